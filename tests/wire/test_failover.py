"""The blocking client while leaders are killed under it: nothing lost, nothing twice, everything in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from penstock.model import TopicPartition
from penstock.protocol.records import batches, decode_records, encode_batch
from penstock.wire import LATEST, Client, Producer, links
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.chaos

BATCHES = 240
RECORDS = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Brokers that fall silent are noticed sooner than by default.
    with Cluster(3, {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "1000"}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.bootstrap, request_timeout_ms=20_000) as client:
        yield client


@pytest.fixture
def places(cluster: Cluster, client: Client, unique: Callable[[str], str]) -> list[TopicPartition]:
    """Partitions of one topic, replicated to all three, each led by another broker if it can be."""
    name = unique("wire")
    client.create_topic(name, 3, 3, configs={"retention.ms": "-1"})  # its records are of 1970
    cluster.wait_in_sync(name)
    return [TopicPartition(name, number) for number in range(3)]


def batch_of(number: int, size: int = 200) -> bytearray:
    first = number * RECORDS
    return encode_batch([(1000, b"%d" % (first + place), b"x" * size, ()) for place in range(RECORDS)])


def keys(records: memoryview) -> list[int]:
    return [
        int(record.key or b"")
        for position, _ in batches(records)
        for record in decode_records(records, position, bytes_max=1 << 30)
    ]


def read(client: Client, at: TopicPartition) -> list[int]:
    end = client.list_offsets({at: LATEST})[at].offset
    return [key for fetched in client.reader(at, 0, end) for key in keys(fetched.records)]


def recover(cluster: Cluster, topic: str, killed: int) -> None:
    cluster.start(killed)
    cluster.wait_in_sync(topic)


def test_a_leader_killed_while_batches_are_in_flight_costs_nothing(
    cluster: Cluster, client: Client, places: list[TopicPartition]
) -> None:
    killed = cluster.leader(*places[0])
    acked: dict[TopicPartition, list[int]] = {at: [] for at in places}
    with Producer(client) as producer:
        for number in range(BATCHES):
            for at in places:
                producer.send(at, batch_of(number), acked[at].append)
            if number == BATCHES // 3:
                cluster.kill(killed)
    expected = list(range(BATCHES * RECORDS))
    for at in places:
        assert read(client, at) == expected
        assert sorted(acked[at]) == expected[::RECORDS]
    recover(cluster, places[0].topic, killed)


def test_a_leader_killed_while_it_is_read_is_followed(
    cluster: Cluster, client: Client, places: list[TopicPartition]
) -> None:
    with Producer(client) as producer:
        for number in range(BATCHES):
            for at in places:
                producer.send(at, batch_of(number))
    killed = cluster.leader(*places[0])
    readers = {at: client.reader(at, 0, BATCHES * RECORDS, bytes_max=50_000) for at in places}
    seen: dict[TopicPartition, list[int]] = {at: [] for at in places}
    # Each has its next request in flight when the leader of the first goes.
    for at, reader in readers.items():
        seen[at] += keys(next(reader).records)
    cluster.kill(killed)
    for at, reader in readers.items():
        for fetched in reader:
            seen[at] += keys(fetched.records)
    assert all(each == list(range(BATCHES * RECORDS)) for each in seen.values())
    assert client.list_offsets(dict.fromkeys(places, LATEST))[places[0]].offset == BATCHES * RECORDS
    recover(cluster, places[0].topic, killed)


def test_the_coordinator_of_a_group_is_killed_between_two_commits(
    cluster: Cluster, client: Client, places: list[TopicPartition], unique: Callable[[str], str]
) -> None:
    group, at = unique("group"), places[0]
    client.commit(group, {at: 1})
    cluster.wait_in_sync("__consumer_offsets")
    where = client.shell.core.cluster.coordinators[group]
    killed = next(node.id for node in cluster.nodes.values() if node.address == where)
    cluster.kill(killed)
    assert client.committed(group, [at]) == {at: 1}
    client.commit(group, {at: 2})
    assert client.committed(group, [at]) == {at: 2}
    recover(cluster, at.topic, killed)


def test_a_leader_that_falls_silent_is_left_when_its_time_is_up(
    cluster: Cluster, places: list[TopicPartition], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = places[0]
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_MS", 1_000)
    with Client(cluster.bootstrap, request_timeout_ms=1_000) as client, Producer(client) as producer:
        for number in range(10):
            producer.send(at, batch_of(number))
        producer.flush()
        silent = cluster.leader(*at)
        cluster.pause(silent)
        try:
            for number in range(10, 20):
                producer.send(at, batch_of(number))
            producer.flush()
            assert read(client, at) == list(range(20 * RECORDS))
        finally:
            cluster.resume(silent)
    cluster.wait_in_sync(at.topic)
