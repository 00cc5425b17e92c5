"""Brokers as clients of one listener see them: those that have it, at its addresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.handlers.leader_hints import endpoints_of
from penstock.broker.replication.nearest_replica import nearest_replica
from penstock.metadata.image import Image
from penstock.protocol.errors import ErrorCode
from penstock.protocol.listeners import CLIENTS, SecurityProtocol, client_listener
from penstock.protocol.messages.cluster import DescribeClusterRequest
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    PartitionRecord,
    RegisterBrokerRecord,
    TopicRecord,
)
from penstock.protocol.messages.topics import (
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataRequestTopic,
    TopicRequest,
)
from penstock.protocol.schema import Message
from tests.broker.stage import Peer, Stage

TLS = client_listener("TLS", SecurityProtocol.SSL)


def registered(id: int, listeners: Sequence[str]) -> Message:
    return RegisterBrokerRecord(
        broker_id=id,
        incarnation_id=bytes(16),
        end_points=[BrokerEndpoint(name=name, host=f"{name}-{id}", port=id) for name in listeners],
        fenced=False,
        rack=f"rack-{id}",
    )


def cluster() -> Image:
    """Broker 1 has both listeners, 2 only the plain one, 3 only TLS. Each leads the partition of its number."""
    topic_id = (7).to_bytes(16, "big")
    image, _ = Image().apply(
        [
            registered(1, ["PLAINTEXT", "TLS", "INTERNAL"]),
            registered(2, ["PLAINTEXT", "INTERNAL"]),
            registered(3, ["TLS", "INTERNAL"]),
            TopicRecord(name="t", topic_id=topic_id),
            *(
                PartitionRecord(
                    partition_id=leader - 1,
                    topic_id=topic_id,
                    replicas=[1, 2, 3],
                    isr=[1, 2, 3],
                    leader=leader,
                    leader_epoch=0,
                    partition_epoch=0,
                )
                for leader in (1, 2, 3)
            ),
        ]
    )
    return image


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    """A client that came in on the plain listener of broker 1."""
    stage = Stage(tmp_path)
    stage.broker.consensus.committed.image = cluster()
    # Another node leads the quorum, which these clients cannot reach.
    stage.broker.consensus._raft.role.leader_id = 3
    return Peer(stage)


@pytest.mark.parametrize("version", [5, 6, 12])
def test_metadata_names_the_brokers_that_have_the_listener(peer: Peer, version: int) -> None:
    answer = peer.call(MetadataRequest(topics=[MetadataRequestTopic(name="t")]), version)
    assert [(each.node_id, each.host, each.port) for each in answer.brokers] == [
        (1, "PLAINTEXT-1", 1),
        (2, "PLAINTEXT-2", 2),
    ]
    assert answer.controller_id == 1
    (topic,) = answer.topics
    without = ErrorCode.LISTENER_NOT_FOUND if version >= 6 else ErrorCode.LEADER_NOT_AVAILABLE
    assert [(each.leader_id, each.error_code) for each in topic.partitions] == [(1, 0), (2, 0), (-1, without)]
    assert all(each.offline_replicas == [3] for each in topic.partitions)
    assert all(each.replica_nodes == each.isr_nodes == [1, 2, 3] for each in topic.partitions)


def test_other_descriptions_leave_out_the_others_too(peer: Peer) -> None:
    described = peer.call(DescribeClusterRequest(), 1)
    assert [(each.broker_id, each.host) for each in described.brokers] == [
        (1, "PLAINTEXT-1"),
        (2, "PLAINTEXT-2"),
    ]
    assert described.controller_id == 1
    (topic,) = peer.call(DescribeTopicPartitionsRequest(topics=[TopicRequest(name="t")]), 0).topics
    assert [each.leader_id for each in topic.partitions] == [1, 2, -1]


def test_a_leader_hint_has_the_address_of_the_listener_or_none() -> None:
    broker: Any = SimpleNamespace(image=cluster())
    for listener, expected in ((CLIENTS, ["PLAINTEXT-1", "PLAINTEXT-2"]), (TLS, ["TLS-1", "TLS-3"])):
        call: Any = SimpleNamespace(listener=listener)
        assert [each.host for each in endpoints_of(broker, call, (1, 2, 3, 4))] == expected


def test_a_consumer_is_not_sent_to_a_replica_that_lacks_its_listener() -> None:
    image = cluster()
    broker: Any = SimpleNamespace(image=image, rack="rack-1", node_id=1)
    hosted: Any = SimpleNamespace(
        image=image.topics["t"].partitions[0],
        log=SimpleNamespace(log_start_offset=0),
        replication=SimpleNamespace(has=lambda replica, offset: True),
    )
    assert nearest_replica(broker, hosted, "rack-3", 5, TLS) == 3
    assert nearest_replica(broker, hosted, "rack-3", 5, CLIENTS) == -1
    assert nearest_replica(broker, hosted, "rack-2", 5, CLIENTS) == 2
