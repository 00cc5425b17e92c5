"""The blocking transactional producer against a real broker. With PENSTOCK_TEST_BOOTSTRAP against Apache Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from penstock.columnar.columns import decode
from penstock.model import TopicPartition
from penstock.protocol.records import encode_batch
from penstock.wire import (
    LATEST,
    Client,
    ProducerFenced,
    TransactionalProducer,
    TransactionFailed,
    WireError,
)
from penstock.wire.transaction_admin import ListFilter
from penstock.wire.transactions import GroupMember
from tests.support import wait_until

FEATURE = "transaction.version"


@pytest.fixture(scope="module", params=["classic", "v2"])
def client(bootstrap: str, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(bootstrap, deadline_ms=30_000) as client:
        client.topics()
        assert client.shell.core.links.features.get(FEATURE, 0) == 2
        if request.param == "classic":
            # What a cluster at level 1 says. The connections made later must not overrule it.
            client.shell.core.links.features = {FEATURE: 1}
            client.shell.core.links._features_epoch = 2**62
        yield client


@pytest.fixture
def places(client: Client, unique: Callable[[str], str]) -> list[TopicPartition]:
    name = unique("transactions")
    assert client.create_topic(name, 2, configs={"retention.ms": "-1"})
    return [TopicPartition(name, number) for number in range(2)]


@pytest.fixture
def producer(client: Client, unique: Callable[[str], str]) -> Iterator[TransactionalProducer]:
    with TransactionalProducer(client, unique("id")) as producer:
        producer.init()
        yield producer


def batch_of(*values: bytes) -> bytearray:
    return encode_batch([(1_700_000_000_000, None, value, ()) for value in values])


def soon(condition: Callable[[], bool]) -> None:
    """Markers are written after the end has been answered."""
    wait_until(condition, 10.0, "the markers were not written")


def read(client: Client, at: TopicPartition, *, read_committed: bool = True) -> list[bytes]:
    end = client.list_offsets({at: LATEST}, read_committed=read_committed)[at].offset
    found: list[bytes] = []
    position = 0
    for answer in client.reader(at, 0, end, read_committed=read_committed):
        columns = decode(answer.records, start=position, end=end, aborted=answer.aborted)
        found += columns.value.to_pylist()
        position = columns.next_offset
    return found


def test_committed_records_are_read_and_aborted_ones_are_not(
    client: Client, producer: TransactionalProducer, places: list[TopicPartition]
) -> None:
    for number in range(6):
        producer.begin()
        for at in places:
            producer.send(at, batch_of(b"%d" % number, b"again %d" % number))
        if number % 3 == 1:
            producer.abort()
        else:
            producer.commit()
    kept = [value for number in (0, 2, 3, 5) for value in (b"%d" % number, b"again %d" % number)]
    soon(lambda: all(read(client, at) == kept for at in places))
    for at in places:
        seen = read(client, at, read_committed=False)
        assert set(kept) <= set(seen) and [value for value in seen if value in kept] == kept


def test_an_open_transaction_is_not_read(
    client: Client, producer: TransactionalProducer, places: list[TopicPartition]
) -> None:
    producer.begin()
    producer.send(places[0], batch_of(b"open"))
    producer.flush()
    assert read(client, places[0]) == []
    assert read(client, places[0], read_committed=False) == [b"open"]
    assert client.list_offsets({places[0]: LATEST}, read_committed=True)[places[0]].offset == 0
    producer.commit()
    soon(lambda: read(client, places[0]) == [b"open"])


def test_offsets_belong_to_the_transaction(
    client: Client,
    producer: TransactionalProducer,
    places: list[TopicPartition],
    unique: Callable[[str], str],
) -> None:
    group, (source, target) = unique("group"), places
    with producer.transaction():
        producer.send(target, batch_of(b"out"))
        producer.send_offsets(group, {source: 7})
    soon(lambda: client.committed(group, [source]) == {source: 7})
    with pytest.raises(ZeroDivisionError), producer.transaction():
        producer.send_offsets(group, {source: 9})
        raise ZeroDivisionError
    assert client.committed(group, [source]) == {source: 7}


def test_offsets_of_a_member_that_is_gone_are_refused(
    client: Client,
    producer: TransactionalProducer,
    places: list[TopicPartition],
    unique: Callable[[str], str],
) -> None:
    group = unique("group")
    client.commit(group, {places[0]: 1})
    producer.begin()
    with pytest.raises(TransactionFailed):
        producer.send_offsets(group, {places[0]: 5}, member=GroupMember(3, "gone"))
    with pytest.raises(WireError):
        producer.commit()
    producer.abort()
    with producer.transaction():
        producer.send(places[0], batch_of(b"next"))
    soon(lambda: read(client, places[0]) == [b"next"])
    assert client.committed(group, [places[0]]) == {places[0]: 1}


def test_the_newest_producer_of_an_id_fences_the_others(
    client: Client, producer: TransactionalProducer, places: list[TopicPartition]
) -> None:
    producer.begin()
    producer.send(places[0], batch_of(b"zombie"))
    producer.flush()
    with TransactionalProducer(client, producer.transactional_id) as newer:
        newer.init()
        with pytest.raises(ProducerFenced):
            producer.commit()
        with newer.transaction():
            newer.send(places[0], batch_of(b"newer"))
    soon(lambda: read(client, places[0]) == [b"newer"])


def test_an_abort_in_the_middle_of_sending_is_followed_by_other_transactions(
    client: Client, producer: TransactionalProducer, places: list[TopicPartition]
) -> None:
    for number in range(5):
        producer.begin()
        for _ in range(20):
            producer.send(places[0], batch_of(b"lost"))
        producer.abort()
        with producer.transaction():
            producer.send(places[0], batch_of(b"%d" % number))
    soon(lambda: read(client, places[0]) == [b"0", b"1", b"2", b"3", b"4"])


def test_operators_see_an_open_transaction_until_it_ends(
    client: Client, producer: TransactionalProducer, places: list[TopicPartition]
) -> None:
    name = producer.transactional_id
    producer.begin()
    producer.send(places[1], batch_of(b"one"))
    producer.flush()
    described = client.describe_transaction(name)
    assert described is not None
    assert (described.state, described.partitions) == ("Ongoing", (places[1],))
    assert described.timeout_ms == 60_000 and described.started_ms is not None
    listed = client.list_transactions(ListFilter(producer_ids=(described.producer_id,)))
    assert [(each.transactional_id, each.state) for each in listed] == [(name, "Ongoing")]
    seen = client.partition_producers(places)
    assert seen[places[0]] == []
    assert [(each.producer_id, each.open_since_offset) for each in seen[places[1]]] == [
        (described.producer_id, 0)
    ]
    producer.commit()
    soon(lambda: client.partition_producers(places)[places[1]][0].open_since_offset is None)
    assert client.describe_transaction(f"{name}-missing") is None
