"""Where clients are sent: to a replica in their own rack to read, to the leader to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.records import encode_batch
from tests.chaos.ledger import offset_in
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.failover import create, write
from tests.cluster.wire import Wire
from tests.support import wait_until

RACKS = {1: "north", 2: "south", 3: "west"}
RECORDS = 2000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Kafka's own name for the choice; here racks are looked at whenever a client says where it is.
    with Cluster(3, racks=RACKS) as cluster:
        yield cluster


def test_a_consumer_reads_from_the_follower_of_its_rack(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    topic = unique("topic")
    create(cluster, topic, 1)
    write(cluster, topic, RECORDS, partition=0)
    leader = cluster.leader(topic, 0)
    follower = next(node for node in RACKS if node != leader)
    statistics: list[dict[str, Any]] = []
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "near",
            "client.rack": RACKS[follower],
            "statistics.interval.ms": 200,
            "stats_cb": lambda text: statistics.append(json.loads(text)),
            "check.crcs": True,
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        received: list[int] = []

        def read_on() -> bool:
            for message in consumer.consume(500, timeout=0.2):
                assert message.error() is None, message.error()
                received.append(offset_in(message))
            return bool(statistics) and fetching_from(statistics[-1], topic) == follower

        wait_until(lambda: read_on() and len(received) >= RECORDS, 30, f"{RECORDS} records from the follower")
        assert received == list(range(RECORDS))
        # What is written now is read there too, as soon as the follower knows that it is committed.
        before = bytes_from(statistics[-1], follower)
        write(cluster, topic, RECORDS, partition=0)
        wait_until(lambda: read_on() and len(received) >= 2 * RECORDS, 30, "the new records")
        assert received == list(range(2 * RECORDS))
        wait_until(
            lambda: read_on() and bytes_from(statistics[-1], follower) >= before + 50 * RECORDS,
            30,
            "the new records came from the follower",
        )
    finally:
        consumer.close()


def test_who_is_behind_the_start_of_the_log_hears_that_from_the_leader(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    """From a follower a Java client does not believe it, and asks the leader again, and so on for ever."""
    topic = unique("topic")
    create(cluster, topic, 1)
    write(cluster, topic, 100, partition=0)
    leader = cluster.leader(topic, 0)
    near = RACKS[next(node for node in RACKS if node != leader)]
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for future in admin.delete_records([TopicPartition(topic, 0, 60)]).values():
        future.result(60)
    with Wire(cluster.nodes[leader].address) as asker:
        result = wire.fetch(asker, topic, 0, 10, rack=near)
        assert (result.error_code, result.preferred_read_replica) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
        assert wire.fetch(asker, topic, 0, 60, rack=near).preferred_read_replica >= 0


def fetching_from(statistics: dict[str, Any], topic: str) -> int:
    """The broker from which librdkafka reads the topic's first partition."""
    partition = statistics["topics"].get(topic, {}).get("partitions", {}).get("0", {})
    return int(partition.get("broker", -1))


def bytes_from(statistics: dict[str, Any], node: int) -> int:
    return sum(int(each["rxbytes"]) for each in statistics["brokers"].values() if each["nodeid"] == node)


def test_a_consumer_without_a_rack_reads_from_the_leader(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    topic = unique("topic")
    create(cluster, topic, 1)
    write(cluster, topic, 10, partition=0)
    with Wire(cluster.nodes[cluster.leader(topic, 0)].address) as connection:
        answer = wire.fetch(connection, topic, 0, 0)
    assert answer.error_code == ErrorCode.NONE
    assert answer.preferred_read_replica == -1
    assert answer.high_watermark == 10


@pytest.mark.parametrize("acks", [1, -1])
def test_a_write_to_the_wrong_broker_is_told_the_right_one(
    cluster: Cluster, unique: Callable[[str], str], acks: int
) -> None:
    topic = unique("topic")
    create(cluster, topic, 1)
    view = cluster.partition(topic, 0)
    for node_id, node in cluster.nodes.items():
        if node_id == view.leader:
            continue
        with Wire(node.address) as connection:
            answer, endpoints = wire.produce_with_endpoints(connection, topic, 0, b"x", acks=acks)
        assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert answer.current_leader is not None
        assert answer.current_leader.leader_id == view.leader
        assert answer.current_leader.leader_epoch == view.leader_epoch
        assert endpoints[view.leader] == cluster.nodes[view.leader].address


def test_a_partition_that_does_not_exist_is_unknown_also_behind_one_that_lies_elsewhere(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    topic = unique("topic")
    create(cluster, topic, 1, replicas=1)
    elsewhere = next(node for node in cluster.nodes if node != cluster.leader(topic, 0))
    records = bytes(encode_batch([(0, None, b"x", [])]))
    data = [PartitionProduceData(index=index, records=memoryview(records)) for index in (0, 7)]
    request = ProduceRequest(
        acks=1, timeout_ms=5000, topic_data=[TopicProduceData(name=topic, partition_data=data)]
    )
    with Wire(cluster.nodes[elsewhere].address) as connection:
        answer = connection.call(request, wire.PRODUCE_VERSION)
    assert {each.index: each.error_code for each in answer.responses[0].partition_responses} == {
        0: ErrorCode.NOT_LEADER_OR_FOLLOWER,
        7: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
