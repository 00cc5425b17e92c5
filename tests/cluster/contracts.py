"""The interoperability contracts on three brokers: the same promises, with three replicas of everything.

Tests of one broker say "the" broker in two places; those are said anew here. A topic counts as created when every
broker knows it, because a client may ask any of them next: the contracts, written for one broker, do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests import java
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.wire import NoAnswer
from tests.interop import records_contract
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.adapters.isolated import IsolatedClient
from tests.interop.adapters.program import ProgramClient
from tests.interop.admin_contract import ManagingTopics
from tests.interop.client import PATIENCE_S, Client, ClientError
from tests.interop.raw import StoredBatch, stored_batches
from tests.interop.test_java import program
from tests.support import wait_until

Unique = Callable[[str], str]
REPLICAS = 3


class Replicated:
    """A client of one broker's contracts that makes topics of three replicas, known to every broker."""

    def __init__(self, cluster: Cluster, client: Any, maker: Any = None) -> None:
        self._cluster = cluster
        self._client = client
        self._maker = maker or client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def create_topic(self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        self._maker.create_topic(topic, partitions, configs, replicas=REPLICAS)
        self._cluster.wait_in_sync(topic)

    def create_partitions(self, topic: str, count: int) -> None:
        self._client.create_partitions(topic, count)
        wait_until(
            lambda: all(
                sum(view.leader >= 0 for view in wire.partitions(node.address, [topic]).values()) == count
                for node in self._cluster.nodes.values()
            ),
            PATIENCE_S,
            f"every broker knows {count} partitions",
        )

    def delete_topic(self, topic: str) -> None:
        self._client.delete_topic(topic)
        wait_until(lambda: not self._is_known(topic), PATIENCE_S, "no broker knows the topic any more")

    def _is_known(self, topic: str) -> bool:
        try:
            return any(wire.partitions(node.address, [topic]) for node in self._cluster.nodes.values())
        except NoAnswer:
            return True


def confluent(cluster: Cluster) -> Replicated:
    return Replicated(cluster, ConfluentClient(cluster.bootstrap))


def kafka_python(cluster: Cluster) -> Replicated:
    return Replicated(cluster, IsolatedClient("kafka_python", cluster.bootstrap))


def aiokafka(cluster: Cluster) -> Replicated:
    return Replicated(cluster, IsolatedClient("aiokafka", cluster.bootstrap))


def java_client(cluster: Cluster, version: str = java.CLIENTS_VERSIONS[0]) -> Replicated:
    client = ProgramClient(program(version), cluster.bootstrap)
    # The program makes topics of one replica; whoever makes them, it is the rest that is put to the test.
    return Replicated(cluster, client, ConfluentClient(cluster.bootstrap))


@pytest.fixture(scope="session")
def bootstrap(shared_cluster: Cluster) -> str:
    return shared_cluster.bootstrap


@pytest.fixture(scope="session")
def reference(shared_cluster: Cluster) -> Iterator[Replicated]:
    client = confluent(shared_cluster)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def batches_from_the_leader(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stored batches without a client means asking the right broker."""

    def from_leader(bootstrap: str, topic: str, partition: int, offset: int = 0) -> list[StoredBatch]:
        host, port = shared_cluster.nodes[shared_cluster.leader(topic, partition)].address
        return stored_batches(f"{host}:{port}", topic, partition, offset)

    monkeypatch.setattr(records_contract, "stored_batches", from_leader)


class ManagingReplicatedTopics(ManagingTopics):
    def test_a_topic_is_created_described_listed_and_deleted(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        assert topic not in client.topics()

        client.create_topic(topic, partitions=6, configs={"retention.ms": "123456789"})

        described = client.describe_topic(topic)
        assert sorted(described) == list(range(6))
        for partition in described.values():
            assert sorted(partition.replicas) == [1, 2, 3] == sorted(partition.in_sync_replicas)
            assert partition.leader == partition.replicas[0]
        assert {partition.leader for partition in described.values()} == {1, 2, 3}
        assert topic in client.topics()
        with pytest.raises(ClientError) as exists:
            client.create_topic(topic)
        assert exists.value.name == "TOPIC_ALREADY_EXISTS"

        client.delete_topic(topic)
        assert topic not in client.topics()
        with pytest.raises(ClientError) as unknown:
            client.delete_topic(topic)
        assert unknown.value.name == "UNKNOWN_TOPIC_OR_PARTITION"


class SeeingThreeBrokers:
    def test_the_cluster_is_three_brokers(self, client: Client, shared_cluster: Cluster) -> None:
        cluster = client.describe_cluster()

        assert sorted(cluster.brokers) == [
            (node.id, node.host, node.port) for node in shared_cluster.nodes.values()
        ]
        assert cluster.controller_id in shared_cluster.nodes
        assert cluster.cluster_id is None or len(cluster.cluster_id) == 22
