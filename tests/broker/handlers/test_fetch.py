"""Fetch on the wire: long poll, byte limits, errors, topic ids, and fetch sessions (KIP-227)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
    ReplicaState,
)
from penstock.protocol.messages.offsets import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from penstock.protocol.records import batches
from tests.broker.conftest import Node
from tests.broker.phrases import (
    create_topic,
    delete_topic,
    fetch,
    fetch_request,
    only,
    put,
    values,
)
from tests.broker.wire import Closed, Wire

Unique = Callable[[str], str]

VERSIONS = range(4, 19)
# A long time for a wait that should be cut short.
LONG_MS = 15_000


@pytest.fixture
def topic(wire: Wire, unique: Unique) -> str:
    name = unique("t")
    create_topic(wire, name)
    return name


def offsets(data: PartitionData) -> list[int]:
    return [header.base_offset for _, header in batches(data.records)]  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


# What is answered


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_reads_what_was_produced(wire: Wire, unique: Unique, version: int) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name)
    put(wire, name, b"a", b"b")
    put(wire, name, b"c")
    request = fetch_request(name, 0)
    request.topics[0].topic_id = topic_id
    response = wire.call(request, version)
    assert (response.error_code, response.session_id) == (0, 0)
    answer = only(response.responses)
    assert (answer.topic, answer.topic_id) == ((name, bytes(16)) if version < 13 else ("", topic_id))
    data = only(answer.partitions)
    assert (data.partition_index, data.error_code, data.high_watermark, data.last_stable_offset) == (
        0,
        0,
        3,
        3,
    )
    assert data.log_start_offset == (0 if version >= 5 else -1)
    assert values(data.records) == [b"a", b"b", b"c"]


def test_nothing_to_read_is_an_empty_record_set_not_a_null_one(wire: Wire, topic: str) -> None:
    for version in (4, 11, 12):
        data = fetch(wire, topic, 0, version=version)
        # librdkafka and kafka-python break on null.
        assert data.records is not None and bytes(data.records) == b""  # type: ignore[arg-type]
    data = fetch(wire, topic, 9)
    assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert data.records is not None


def test_an_offset_inside_a_batch_returns_the_whole_batch(wire: Wire, topic: str) -> None:
    put(wire, topic, b"0", b"1", b"2")
    put(wire, topic, b"3")
    assert offsets(fetch(wire, topic, 1)) == [0, 3]
    assert values(fetch(wire, topic, 2).records) == [b"0", b"1", b"2", b"3"]
    assert offsets(fetch(wire, topic, 3)) == [3]


@pytest.mark.parametrize("offset", [-1, -2, 5, 2**63 - 1, -(2**63)])
def test_offsets_outside_the_log_are_out_of_range(wire: Wire, topic: str, offset: int) -> None:
    put(wire, topic, b"0", b"1")
    data = fetch(wire, topic, offset, max_wait_ms=LONG_MS)
    assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert bytes(data.records) == b""  # type: ignore[arg-type]


def test_the_start_of_the_log_is_told_and_moves(wire: Wire, topic: str) -> None:
    for number in range(4):
        put(wire, topic, b"%d" % number)
    delete_records(wire, topic, 2)
    assert fetch(wire, topic, 1).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    data = fetch(wire, topic, 2)
    assert (data.log_start_offset, data.high_watermark) == (2, 4)
    assert values(data.records) == [b"2", b"3"]


def test_read_committed_is_told_of_no_aborted_transactions(wire: Wire, topic: str) -> None:
    put(wire, topic, b"v")
    committed = fetch(wire, topic, 0, isolation_level=1)
    assert (committed.last_stable_offset, committed.aborted_transactions) == (1, [])
    assert fetch(wire, topic, 0).aborted_transactions is None
    assert values(committed.records) == [b"v"]


@pytest.mark.parametrize("partition", [1, -1, 2**31 - 1, -(2**31)])
def test_unknown_partitions_are_told_at_once(wire: Wire, topic: str, partition: int) -> None:
    data = fetch(wire, topic, 0, partition=partition, max_wait_ms=LONG_MS)
    assert (data.partition_index, data.error_code) == (partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def test_unknown_topics_are_told_by_name_and_by_id(wire: Wire) -> None:
    data = fetch(wire, "no-such-topic", 0, max_wait_ms=LONG_MS)
    assert data.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for topic_id in (bytes(16), b"\xff" * 16):
        request = fetch_request("", 0, max_wait_ms=LONG_MS)
        request.topics[0].topic_id = topic_id
        answer = only(wire.call(request, 13).responses)
        assert answer.topic_id == topic_id
        assert only(answer.partitions).error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_leader_epochs_of_the_past_are_fenced_and_of_the_future_unknown(wire: Wire, topic: str) -> None:
    put(wire, topic, b"v")
    assert fetch(wire, topic, 0, current_leader_epoch=0).error_code == ErrorCode.NONE
    data = fetch(wire, topic, 0, current_leader_epoch=1, max_wait_ms=LONG_MS)
    assert data.error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    # Before version 9 nobody sends one.
    assert fetch(wire, topic, 0, current_leader_epoch=1, version=8).error_code == ErrorCode.NONE


def test_a_last_fetched_epoch_that_we_never_had_is_out_of_range(wire: Wire, topic: str) -> None:
    put(wire, topic, b"0", b"1")
    request = fetch_request(topic, 1, max_wait_ms=LONG_MS)
    (wanted,) = request.topics[0].partitions
    wanted.last_fetched_epoch = 0
    data = only(only(wire.call(request, 12).responses).partitions)
    assert (data.error_code, data.diverging_epoch) == (0, None)
    wanted.last_fetched_epoch = 7
    data = only(only(wire.call(request, 12).responses).partitions)
    assert data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_position_behind_the_end_of_its_epoch_diverges(wire: Wire, topic: str) -> None:
    put(wire, topic, b"0", b"1")
    request = fetch_request(topic, 5, max_wait_ms=LONG_MS)
    request.topics[0].partitions[0].last_fetched_epoch = 0
    data = only(only(wire.call(request, 12).responses).partitions)
    assert data.error_code == 0
    assert (data.diverging_epoch.epoch, data.diverging_epoch.end_offset) == (0, 2)


def test_whoever_claims_to_be_a_broker_is_refused(node: Node, wire: Wire, topic: str) -> None:
    for version in (7, 12, 14):
        request = fetch_request(topic, 0)
        request.replica_id = 2
        assert wire.call(request, version).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    request = fetch_request(topic, 0)
    request.replica_state = ReplicaState(replica_id=2, replica_epoch=1)
    assert wire.call(request, 15).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    request.replica_id = 2
    with node.connect() as old, pytest.raises(Closed):
        # Before version 7 the answer has no place for the error.
        old.call(request, 4)


# Byte limits


def test_the_first_batch_is_returned_whole_however_small_the_limits(wire: Wire, topic: str) -> None:
    put(wire, topic, b"x" * 5000)
    put(wire, topic, b"y" * 5000)
    for limits in ({"max_bytes": 1}, {"partition_max_bytes": 1}, {"max_bytes": 0}, {"max_bytes": -1}):
        data = fetch(wire, topic, 0, **limits)
        assert values(data.records) == [b"x" * 5000], limits


def test_only_the_first_partition_with_data_may_exceed_the_limits(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 3)
    for partition in (1, 2):
        put(wire, name, b"x" * 5000, partition=partition)
    wanted = [FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=10) for index in range(3)]
    request = FetchRequest(
        max_wait_ms=0, min_bytes=1, max_bytes=10, topics=[FetchTopic(topic=name, partitions=wanted)]
    )
    answered = only(wire.call(request, 12).responses).partitions
    assert [len(values(data.records)) for data in answered] == [0, 1, 0]


def test_the_limits_hold_for_what_follows_the_first_batch(wire: Wire, topic: str) -> None:
    sizes = [put(wire, topic, b"x" * 1000) for _ in range(20)]
    assert sizes == list(range(20))
    data = fetch(wire, topic, 0, partition_max_bytes=4500)
    assert len(bytes(data.records)) <= 4500  # type: ignore[arg-type]
    assert offsets(data) == [0, 1, 2, 3]
    data = fetch(wire, topic, 0, max_bytes=2500)
    assert offsets(data) == [0, 1]


@pytest.mark.parametrize("limit", [2**31 - 1, -1, -(2**31)])
def test_extreme_limits_are_answered(wire: Wire, topic: str, limit: int) -> None:
    put(wire, topic, b"v")
    assert values(fetch(wire, topic, 0, max_bytes=limit, partition_max_bytes=limit).records) == [b"v"]
    assert values(fetch(wire, topic, 0, min_bytes=limit, max_wait_ms=1).records) == [b"v"]


def test_a_partition_twice_in_a_request_is_answered(wire: Wire, topic: str) -> None:
    put(wire, topic, b"v")
    request = fetch_request(topic, 0)
    request.topics[0].partitions *= 2
    for data in only(wire.call(request, 12).responses).partitions:
        assert data.error_code == 0


# Long poll


def test_a_fetch_waits_for_data_and_is_answered_when_it_comes(node: Node, wire: Wire, topic: str) -> None:
    wire.send(fetch_request(topic, 0, max_wait_ms=LONG_MS), 12)
    assert wire.is_silent(0.1)
    with node.connect() as other:
        put(other, topic, b"v")
    took = seconds(lambda: values(only(only(wire.receive().responses).partitions).records))
    assert took < LONG_MS / 2000


def test_a_fetch_waits_no_longer_than_it_said(wire: Wire, topic: str) -> None:
    took = seconds(lambda: fetch(wire, topic, 0, max_wait_ms=200))
    assert 0.15 < took < LONG_MS / 1000
    for no_time in (0, -1, -(2**31)):
        assert seconds(lambda no_time=no_time: fetch(wire, topic, 0, max_wait_ms=no_time)) < LONG_MS / 2000  # type: ignore[misc]


def test_a_fetch_waits_until_there_are_min_bytes(node: Node, wire: Wire, topic: str) -> None:
    put(wire, topic, b"x" * 100)
    wire.send(fetch_request(topic, 0, max_wait_ms=LONG_MS, min_bytes=1000), 12)
    with node.connect() as other:
        put(other, topic, b"y" * 100)
        assert wire.is_silent(0.1)
        put(other, topic, b"z" * 1000)
    assert len(values(only(only(wire.receive().responses).partitions).records)) == 3


def test_what_there_is_comes_when_the_time_is_up(wire: Wire, topic: str) -> None:
    put(wire, topic, b"v")
    data = fetch(wire, topic, 0, max_wait_ms=100, min_bytes=1 << 20)
    assert values(data.records) == [b"v"]


def test_a_fetch_of_no_partitions_is_answered_at_once(wire: Wire) -> None:
    request = FetchRequest(max_wait_ms=LONG_MS, min_bytes=1)
    assert seconds(lambda: wire.call(request, 12)) < LONG_MS / 2000


def test_deleting_the_topic_ends_the_wait(node: Node, wire: Wire, topic: str) -> None:
    wire.send(fetch_request(topic, 0, max_wait_ms=LONG_MS), 12)
    assert wire.is_silent(0.05)
    with node.connect() as other:
        delete_topic(other, topic)
    data = only(only(wire.receive().responses).partitions)
    assert data.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_waiting_fetch_of_a_peer_that_left_does_no_harm(node: Node, wire: Wire, topic: str) -> None:
    for _ in range(20):
        with node.connect() as leaving:
            leaving.send(fetch_request(topic, 0, max_wait_ms=LONG_MS), 12)
    put(wire, topic, b"v")
    assert values(fetch(wire, topic, 0).records) == [b"v"]


# Sessions


class Session:
    """A consumer with a fetch session over some partitions of a topic."""

    def __init__(
        self, wire: Wire, topic: str, partitions: int, version: int = 12, topic_id: bytes = bytes(16)
    ) -> None:
        self.wire = wire
        self.topic = topic
        self.version = version
        self.topic_id = topic_id
        self.epoch = 1
        self.id = 0
        self.first = self.fetch({index: 0 for index in range(partitions)}, epoch=0)

    def fetch(
        self,
        positions: dict[int, int] | None = None,
        *,
        forgotten: tuple[int, ...] = (),
        epoch: int | None = None,
        max_wait_ms: int = 0,
        max_bytes: int = 1 << 20,
    ) -> dict[int, PartitionData]:
        """Name some partitions anew; what the broker says, by partition."""
        self.send(positions, forgotten=forgotten, epoch=epoch, max_wait_ms=max_wait_ms, max_bytes=max_bytes)
        return self.receive()

    def send(
        self,
        positions: dict[int, int] | None = None,
        *,
        forgotten: tuple[int, ...] = (),
        epoch: int | None = None,
        max_wait_ms: int = 0,
        max_bytes: int = 1 << 20,
    ) -> None:
        asked = [
            FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=1 << 20)
            for index, offset in (positions or {}).items()
        ]
        dropped = ForgottenTopic(topic=self.topic, topic_id=self.topic_id, partitions=list(forgotten))
        request = FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            max_bytes=max_bytes,
            session_id=self.id,
            session_epoch=self.epoch if epoch is None else epoch,
            topics=[FetchTopic(topic=self.topic, topic_id=self.topic_id, partitions=asked)] if asked else [],
            forgotten_topics_data=[dropped] if forgotten else [],
        )
        if epoch is None:
            self.epoch += 1
        self.wire.send(request, self.version)

    def receive(self) -> dict[int, PartitionData]:
        response = self.wire.receive()
        assert response.error_code == 0, response
        self.id = response.session_id
        return {data.partition_index: data for answer in response.responses for data in answer.partitions}


def delete_records(wire: Wire, topic: str, offset: int) -> None:
    wanted = DeleteRecordsPartition(partition_index=0, offset=offset)
    request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name=topic, partitions=[wanted])])
    result = only(only(wire.call(request, 2).topics).partitions)
    assert result.error_code == 0, result


def error_of(wire: Wire, **options: Any) -> int:
    code: int = wire.call(fetch_request("any", 0, **options), 12).error_code
    return code


@pytest.mark.parametrize("version", [7, 12, 13, 18])
def test_a_session_names_all_partitions_first_and_then_only_news(
    wire: Wire, unique: Unique, version: int
) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name, 3)
    put(wire, name, b"zero", partition=0)
    session = Session(wire, name, 3, version, topic_id)
    assert session.id != 0
    assert sorted(session.first) == [0, 1, 2]
    assert values(session.first[0].records) == [b"zero"]
    assert session.fetch({0: 1}) == {}
    put(wire, name, b"two", partition=2)
    news = session.fetch()
    assert list(news) == [2]
    assert values(news[2].records) == [b"two"]
    # It has not said that it read it: it is still there.
    assert list(session.fetch()) == [2]
    assert session.fetch({2: 1}) == {}


def test_a_session_waits_for_any_of_its_partitions(node: Node, wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 50)
    session = Session(wire, name, 50)
    session.send(max_wait_ms=LONG_MS)
    assert wire.is_silent(0.1)
    with node.connect() as other:
        put(other, name, b"v", partition=31)
    assert list(session.receive()) == [31]


def test_a_session_waits_its_time_and_then_says_nothing(wire: Wire, topic: str) -> None:
    session = Session(wire, topic, 1)
    assert session.fetch(max_wait_ms=100) == {}


def test_a_forgotten_partition_is_not_named_again(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 2)
    session = Session(wire, name, 2)
    assert session.fetch(forgotten=(0, 7)) == {}
    put(wire, name, b"v", partition=0)
    assert session.fetch() == {}
    assert list(session.fetch({0: 0})) == [0]


def test_a_session_serves_its_partitions_in_turn(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 4)
    session = Session(wire, name, 4)
    for index in range(4):
        put(wire, name, b"x" * 5000, partition=index)
    served = []
    for _ in range(8):
        news = session.fetch(max_bytes=100)
        served += [index for index, data in news.items() if bytes(data.records)]  # type: ignore[arg-type]
        for index in range(4):
            # All of them have news all the time.
            put(wire, name, b"x" * 5000, partition=index)
    # One batch at a time, nobody twice before everybody once.
    assert len(served) == 8
    assert sorted(served[:4]) == sorted(served[4:]) == [0, 1, 2, 3]


def test_a_session_tells_that_the_log_begins_later(wire: Wire, topic: str) -> None:
    for _ in range(3):
        put(wire, topic, b"v")
    session = Session(wire, topic, 1)
    assert session.fetch({0: 3}) == {}
    delete_records(wire, topic, 2)
    news = session.fetch()
    assert news[0].log_start_offset == 2
    assert session.fetch() == {}


def test_sessions_that_do_not_exist_or_are_out_of_step_are_told(wire: Wire, topic: str) -> None:
    assert error_of(wire, session_id=12345, session_epoch=1) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert error_of(wire, session_id=0, session_epoch=1) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert error_of(wire, session_id=-1, session_epoch=2**31 - 1) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    session = Session(wire, topic, 1)
    for epoch in (2, 2**31 - 1):
        code = error_of(wire, session_id=session.id, session_epoch=epoch)
        assert code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    # The session itself is none the worse for it.
    assert session.fetch() == {}
    assert error_of(wire, session_id=session.id, session_epoch=1) == ErrorCode.INVALID_FETCH_SESSION_EPOCH


def test_a_full_fetch_and_a_sessionless_one_end_the_session(wire: Wire, topic: str) -> None:
    for ending in (0, -1):
        session = Session(wire, topic, 1)
        response = wire.call(fetch_request(topic, 0, session_id=session.id, session_epoch=ending), 12)
        assert response.error_code == 0
        assert response.session_id != session.id
        assert only(only(response.responses).partitions).error_code == 0
        code = error_of(wire, session_id=session.id, session_epoch=1)
        assert code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_negative_epochs_are_sessionless(wire: Wire, topic: str) -> None:
    for epoch in (-1, -2, -(2**31)):
        response = wire.call(fetch_request(topic, 0, session_id=0, session_epoch=epoch), 12)
        assert (response.error_code, response.session_id) == (0, 0)


def test_a_session_can_be_used_from_another_connection(node: Node, wire: Wire, topic: str) -> None:
    session = Session(wire, topic, 1)
    put(wire, topic, b"v")
    with node.connect() as other:
        session.wire = other
        assert values(session.fetch()[0].records) == [b"v"]


def test_two_fetches_waiting_in_one_session_are_both_answered(node: Node, wire: Wire, topic: str) -> None:
    session = Session(wire, topic, 1)
    session.send(max_wait_ms=300)
    with node.connect() as other:
        second = Session.__new__(Session)
        second.__dict__.update(session.__dict__, wire=other)
        second.send(max_wait_ms=300)
        with node.connect() as producer:
            put(producer, topic, b"v")
        answers = [session.receive(), second.receive()]
    assert [b"v"] in [values(answer[0].records) for answer in answers if answer]


def test_a_deleted_topic_is_news_of_a_session(wire: Wire, topic: str) -> None:
    session = Session(wire, topic, 1)
    delete_topic(wire, topic)
    assert session.fetch()[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_session_finds_the_topic_that_it_asked_for_before_it_was_created(
    wire: Wire, unique: Unique
) -> None:
    name = unique("t")
    session = Session(wire, name, 1)
    assert session.first[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    create_topic(wire, name)
    put(wire, name, b"v")
    # The client knows of no change, so it does not name the partition again.
    news = session.fetch(max_wait_ms=100)
    assert (news[0].error_code, values(news[0].records)) == (0, [b"v"])


def test_a_session_finds_the_topic_that_was_deleted_and_created_again(wire: Wire, topic: str) -> None:
    session = Session(wire, topic, 1)
    delete_topic(wire, topic)
    assert session.fetch()[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    create_topic(wire, topic)
    put(wire, topic, b"v")
    news = session.fetch(max_wait_ms=100)
    assert (news[0].error_code, values(news[0].records)) == (0, [b"v"])


def test_a_session_of_names_that_goes_on_with_ids_does_no_harm(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name)
    session = Session(wire, name, 1)
    for version, named in ((13, topic_id), (12, bytes(16)), (13, topic_id)):
        session.version, session.topic_id = version, named
        session.send({0: 0}, forgotten=(0,))
        # No client does this. The same topic under two names must not confuse who watches what.
        assert wire.receive().error_code in (ErrorCode.NONE, ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        put(wire, name, b"v")
    assert len(values(fetch(wire, name, 0).records)) == 3


def test_batches_of_many_segments_are_read_to_the_end(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, configs={"segment.bytes": "1000"})
    sent = [b"%d" % number * 100 for number in range(50)]
    for value in sent:
        put(wire, name, value)
    offset, found = 0, []
    while offset < 50:
        data = fetch(wire, name, offset, max_wait_ms=1000)
        assert data.error_code == 0
        found += values(data.records)
        offset = [header.next_offset for _, header in batches(data.records)][-1]  # type: ignore[arg-type]
    assert found == sent
