"""Transactions of real clients on three brokers: they live through a leader change and a restart of all brokers.

One library of each protocol generation, and in ``make interop-long`` the others that come through it on Apache
Kafka itself (``Library.fails_over``). Offsets are not predicted here, as they are in ``tests/interop``: a
coordinator that takes over may write a marker twice, which takes an offset. But all readers must agree on them, and
they never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaException

from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.contracts import confluent
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import PATIENCE_S
from tests.interop.transactions import (
    ISOLATIONS,
    LIBRARIES,
    Clients,
    Isolation,
    Ledger,
    Producer,
    Seen,
    TransactionalClient,
    in_order,
    numbered,
    other,
    parameters,
)
from tests.interop.transactions_contract import LINGER_MS, PARTITIONS, ends
from tests.support import wait_until

Unique = Callable[[str], str]
Records = dict[Isolation, list[Seen]]

TRANSACTION_STATE = "__transaction_state"
NODES = (1, 2, 3)


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Cluster]:
    """Of this module only: the tests stop its nodes."""
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(own_cluster: Cluster) -> Iterator[Cluster]:
    yield own_cluster
    # What a failed test left stopped would fail the next.
    own_cluster.start(*(node.id for node in own_cluster.nodes.values() if not node.is_running))


@pytest.fixture(scope="module")
def reference(own_cluster: Cluster) -> Iterator[Any]:
    client = confluent(own_cluster)
    yield client
    client.close()


@pytest.fixture(scope="module")
def clients(own_cluster: Cluster) -> Iterator[Clients]:
    clients = Clients(own_cluster.bootstrap)
    yield clients
    clients.close()


FAILING_OVER = [name for name, library in LIBRARIES.items() if library.fails_over]


@pytest.fixture(scope="module", params=parameters(FAILING_OVER))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


class Book:
    """A topic and its ledger, as far as a ledger can tell when coordinators change."""

    def __init__(self, cluster: Cluster, reference: Any, topic: str) -> None:
        self.topic = topic
        self._bootstrap = cluster.bootstrap
        self._ledger = Ledger(PARTITIONS)
        self._number = 0
        # What was acknowledged must be where the acknowledgement said.
        self._places: dict[tuple[int, int], bytes] = {}
        # Of every open transaction, the first offset in each partition.
        self._firsts: dict[Producer, dict[int, int]] = {}
        reference.create_topic(topic, PARTITIONS)

    def send(self, producer: Producer, count: int = 6) -> None:
        records = numbered(self._number, count, PARTITIONS)
        self._number += count
        written = producer.send(self.topic, records)
        self._ledger.sent(records, producer)
        for record, (partition, offset) in zip(records, written, strict=True):
            assert partition == record.partition
            self._places[partition, offset] = record.value
            self._firsts.setdefault(producer, {}).setdefault(partition, offset)

    def commit(self, producer: Producer) -> None:
        producer.commit()
        self._ended(producer, commit=True)

    def abort(self, producer: Producer) -> None:
        producer.abort()
        self._ended(producer, commit=False)

    def _ended(self, producer: Producer, *, commit: bool) -> None:
        self._ledger.ended(producer, commit=commit)
        del self._firsts[producer]

    def compare(self, readers: Sequence[TransactionalClient]) -> Records:
        """Every reader sees the same, and the values that the ledger has, in its order; what they see."""
        stable_ends = self._wait_for_stable_ends()
        seen: Records = {}
        for reader in readers:
            for isolation in ISOLATIONS:
                expected = [(each.partition, each.value) for each in self._ledger.visible(isolation)]
                last = stable_ends[isolation]
                reading = reader.read(self.topic, isolation, len(expected), last, linger_ms=LINGER_MS)
                records = in_order(reading.records)
                assert [(each.partition, each.value) for each in records] == expected, isolation
                assert reading.positions in (None, last), isolation
                assert seen.setdefault(isolation, records) == records, isolation
        found = {(each.partition, each.offset): each.value for each in seen["read_uncommitted"]}
        assert found == self._places
        assert set(seen["read_committed"]) <= set(seen["read_uncommitted"])
        return seen

    def _wait_for_stable_ends(self) -> dict[Isolation, dict[int, int]]:
        """Until every transaction that has ended has its markers; where readers then stop."""

        def stable_ends() -> dict[Isolation, dict[int, int]] | None:
            # A new client each time: librdkafka's keeps asking with the leader epochs that it knew first.
            reference = ConfluentClient(self._bootstrap)
            try:
                found = {isolation: ends(reference, self.topic, isolation) for isolation in ISOLATIONS}
            except KafkaException:
                return None
            finally:
                reference.close()
            expected = dict(found["read_uncommitted"])
            for firsts in self._firsts.values():
                for partition, offset in firsts.items():
                    expected[partition] = min(expected[partition], offset)
            return found if found["read_committed"] == expected else None

        found = wait_until(stable_ends, PATIENCE_S, f"markers of all ended transactions in {self.topic}")
        assert found is not None
        return found


def test_transactions_live_through_a_leader_change_and_a_restart(
    name: str, cluster: Cluster, clients: Clients, reference: Any, unique: Unique
) -> None:
    client, readers = clients[name], [clients[name], clients[other(name)]]
    book = Book(cluster, reference, unique("topic"))
    transactional_id = unique("id")
    first, second = client.open(transactional_id), client.open(unique("id"))
    for ending in (book.commit, book.abort):
        first.begin()
        book.send(first)
        ending(first)
    first.begin()
    book.send(first)
    second.begin()
    book.send(second)

    victim = coordinator(cluster, transactional_id)
    assert victim in {cluster.leader(book.topic, partition) for partition in range(PARTITIONS)}
    cluster.kill(victim)
    book.send(first)
    book.commit(first)
    cluster.start(victim)
    cluster.wait_in_sync(book.topic)
    book.compare(readers)

    cluster.stop(*NODES)
    cluster.start(*NODES)
    cluster.wait_in_sync(book.topic)
    book.send(second)
    book.abort(second)
    first.begin()
    book.send(first)
    book.commit(first)
    before = book.compare(readers)

    cluster.kill(*NODES)
    cluster.start(*NODES)
    cluster.wait_in_sync(book.topic)
    assert book.compare(readers) == before
    for producer in (first, second):
        producer.close()


def coordinator(cluster: Cluster, transactional_id: str) -> int:
    """The node that leads the id's partition of the transaction log."""
    partitions = len(wire.partitions(cluster.nodes[1].address, [TRANSACTION_STATE]))
    return cluster.leader(TRANSACTION_STATE, java_hash(transactional_id) % partitions)


def java_hash(text: str) -> int:
    """String.hashCode without its sign, as Kafka takes it."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
