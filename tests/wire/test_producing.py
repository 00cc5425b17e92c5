"""Conversations of a producer: what is sent when, and what becomes of each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import SEQUENCE_MAX, CorruptBatch, decode_header, encode_batch
from penstock.wire import operations
from penstock.wire.errors import (
    BatchTooLarge,
    BrokerRefused,
    OutOfSequence,
    TimedOut,
    TopicReplaced,
    UnknownTopic,
    Unreachable,
    WireError,
)
from tests.wire.fake import FakeCluster, Writing

AT = TopicPartition("orders", 0)
PRODUCE, INIT_PRODUCER_ID = 0, 22


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster()
    cluster.make_topic("orders", [1, 2, 3])
    return cluster


def log(cluster: FakeCluster, at: TopicPartition = AT) -> list[tuple[int, int]]:
    """(producer id, base sequence) of each batch in the log."""
    headers = [decode_header(data) for _, data in cluster.partition(at).batches]
    return [(header.producer_id, header.base_sequence) for header in headers]


def answering(code: ErrorCode, *, times: int = 1, written: bool = False) -> Callable[..., Any]:
    """Interference with the next Produce requests: the batch is refused, or written and then called refused."""
    left = times
    cluster: FakeCluster

    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        nonlocal left
        if key != PRODUCE or left == 0:
            return None
        left -= 1
        answer = cluster._produce(broker, version, request)
        for topic in answer.responses:
            for result in topic.partition_responses:
                result.error_code, result.base_offset = code, -1
        return answer

    def bound(to: FakeCluster) -> Callable[..., Any]:
        nonlocal cluster
        cluster = to
        if written:
            return interfere

        def refuse(broker: int, key: int, version: int, request: Any) -> Any:
            if key == PRODUCE and left:
                kept = cluster.write
                cluster.write = lambda partition, batch: (code, -1)  # type: ignore[method-assign]
                try:
                    return interfere(broker, key, version, request)
                finally:
                    cluster.write = kept  # type: ignore[method-assign]
            return None

        return refuse

    return bound


def interfere(cluster: FakeCluster, code: ErrorCode, *, times: int = 1, written: bool = False) -> None:
    cluster.interfere = answering(code, times=times, written=written)(cluster)


# In order


def test_batches_are_numbered_and_acknowledged_in_order(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    for records in (3, 1, 2):
        writing.send(AT, records=records)
    writing.flush()
    assert log(cluster) == [(1, 0), (1, 3), (1, 4)]
    assert writing.acked == [(0, 0), (1, 3), (2, 4)]


def test_each_partition_has_sequences_of_its_own_under_one_producer_id(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    places = [TopicPartition("orders", number) for number in range(3)]
    for at in [*places, *places]:
        writing.send(at)
    writing.flush()
    assert [log(cluster, at) for at in places] == [[(1, 0), (1, 1)]] * 3
    assert sum(key == INIT_PRODUCER_ID for _, key, _, _ in cluster.asked) == 1


def test_the_first_batch_of_a_partition_goes_alone_then_five(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    for _ in range(9):
        writing.send(AT)
    writing.shell.run(lambda: bool(writing.flying()))
    assert writing.flying() == [0]
    writing.shell.run(lambda: writing.producing.unacknowledged == 8)
    assert writing.flying() == [1, 2, 3, 4, 5]
    writing.flush()
    assert len(log(cluster)) == 9


def test_partitions_of_one_broker_share_a_request(cluster: FakeCluster) -> None:
    cluster.make_topic("many", [2] * 20)
    writing = Writing(cluster)
    for number in range(20):
        writing.send(TopicPartition("many", number))
    writing.flush()
    requests = [request for _, key, _, request in cluster.asked if key == PRODUCE]
    assert max(len(request.topic_data[0].partition_data) for request in requests) > 10


def test_large_batches_do_not_share_a_request_beyond_its_size(cluster: FakeCluster) -> None:
    cluster.make_topic("many", [2] * 12)
    writing = Writing(cluster)
    for number in range(12):
        writing.send(TopicPartition("many", number), size=900_000)
    writing.flush()
    requests = [request for _, key, _, request in cluster.asked if key == PRODUCE]
    assert max(len(request.topic_data[0].partition_data) for request in requests) == 4


def test_sequences_wrap_around(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    writing.producing._queues[AT].next_sequence = SEQUENCE_MAX - 1
    cluster.partition(AT).producers = type(cluster.partition(AT).producers)(10**12)
    for _ in range(3):
        writing.send(AT, records=2)
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == [0, SEQUENCE_MAX - 1, 0, 2]


def test_an_older_broker_is_written_to_by_name(cluster: FakeCluster) -> None:
    cluster.version_max = {PRODUCE: 9}
    cluster.has_topic_ids = False
    writing = Writing(cluster)
    writing.send(AT)
    writing.send(AT)
    writing.flush()
    assert log(cluster) == [(1, 0), (1, 1)]
    assert {version for _, key, version, _ in cluster.asked if key == PRODUCE} == {9}


# Again


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.CORRUPT_MESSAGE,
    ],
)
def test_what_was_refused_for_a_moment_is_sent_again_once(
    cluster: FakeCluster, code: ErrorCode, written: bool
) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    interfere(cluster, code, times=2, written=written)
    for _ in range(7):
        writing.send(AT, records=2)
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == [0, *range(1, 15, 2)]
    assert sorted(writing.acked) == [(0, 0), *((number, 2 * number - 1) for number in range(1, 8))]


def test_nothing_is_sent_behind_a_refusal_until_all_in_flight_has_come_back(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    interfere(cluster, ErrorCode.NOT_ENOUGH_REPLICAS, times=1)
    for _ in range(8):
        writing.send(AT)
    shell = writing.shell
    (number,) = shell.can_act()
    for _ in range(5):
        shell.act(number)
    shell.deliver(number)
    assert writing.flying() == [2, 3, 4, 5]
    for _ in range(4):
        shell.deliver(number)
    shell.run(lambda: bool(writing.flying()))
    assert writing.flying() == [1, 2, 3, 4, 5]
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == list(range(9))


def test_a_connection_lost_with_five_in_flight_repeats_nothing(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    for _ in range(8):
        writing.send(AT)
    shell = writing.shell
    (number,) = shell.can_act()
    for _ in range(3):
        shell.act(number)
    shell.lose(number)
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == list(range(9))
    assert sorted(writing.acked) == [(number, number) for number in range(9)]


def test_a_leader_that_moves_is_followed_with_the_same_sequences(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    for _ in range(4):
        writing.send(AT)
    cluster.move(AT, 3)
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == list(range(5))
    assert [broker for broker, key, _, _ in cluster.asked if key == PRODUCE][-1] == 3


def test_a_leader_that_dies_is_replaced(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    for _ in range(4):
        writing.send(AT)
    shell = writing.shell
    (number,) = shell.can_act()
    shell.act(number)
    shell.stop_broker(1)
    shell.run(lambda: shell.now_ms > 4_000)
    cluster.move(AT, 2)
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == list(range(5))


def test_a_duplicate_counts_as_acknowledged(cluster: FakeCluster) -> None:
    interfere(cluster, ErrorCode.DUPLICATE_SEQUENCE_NUMBER, written=True)
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    assert writing.acked == [(0, -1)]


def test_a_batch_that_others_have_overtaken_goes_alone_and_is_not_repeated(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    # Written, but it took too long to be told so; those behind it were.
    interfere(cluster, ErrorCode.REQUEST_TIMED_OUT, written=True)
    for _ in range(12):
        writing.send(AT)
    shell = writing.shell
    (number,) = shell.can_act()
    for _ in range(5):
        shell.act(number)
    for _ in range(5):
        shell.deliver(number)
    shell.run(lambda: bool(writing.flying()))
    assert writing.flying() == [1]
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == list(range(13))
    assert sorted(writing.acked) == [(number, number) for number in range(13)]


def test_out_of_order_behind_a_refused_batch_says_nothing(cluster: FakeCluster) -> None:
    """As Apache Kafka answers: the refused batch leaves a hole, and the others are out of order."""
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    answers = iter([ErrorCode.NOT_ENOUGH_REPLICAS, *[ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER] * 4])
    kept = cluster.write

    def write(partition: Any, batch: bytearray) -> tuple[int, int]:
        code = next(answers, None)
        return kept(partition, batch) if code is None else (code, -1)

    cluster.write = write  # type: ignore[method-assign]
    for _ in range(6):
        writing.send(AT)
    writing.flush()
    assert [sequence for _, sequence in log(cluster)] == list(range(7))


def test_a_producer_forgotten_by_retention_goes_on_as_somebody_new(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    interfere(cluster, ErrorCode.UNKNOWN_PRODUCER_ID)
    writing.send(AT, records=2)
    writing.send(AT)
    writing.flush()
    assert log(cluster) == [(1, 0), (2, 0), (2, 2)]


# Final errors


def test_a_hole_behind_what_was_acknowledged_is_raised(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    interfere(cluster, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    writing.send(AT)
    with pytest.raises(OutOfSequence, match="lost records that were acknowledged"):
        writing.flush()


def test_a_producer_forgotten_while_nobody_knows_what_was_written_is_raised(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    writing.send(AT)
    shell = writing.shell
    (number,) = shell.can_act()
    shell.act(number)
    shell.lose(number)
    interfere(cluster, ErrorCode.UNKNOWN_PRODUCER_ID)
    with pytest.raises(OutOfSequence, match="it is unknown whether it has the last batches"):
        writing.flush()


def test_records_in_another_order_are_noticed(cluster: FakeCluster) -> None:
    """A broker that does not look at sequences takes the second batch and then the first."""
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()

    def write(partition: Any, batch: bytearray) -> tuple[int, int]:
        header = decode_header(batch)
        if header.base_sequence == 1 and not refused:
            refused.append(header)
            return ErrorCode.NOT_ENOUGH_REPLICAS, -1
        return ErrorCode.NONE, partition.append(batch, header.count)

    refused: list[Any] = []
    cluster.write = write  # type: ignore[method-assign]
    for _ in range(4):
        writing.send(AT)
    with pytest.raises(OutOfSequence, match="in another order"):
        writing.flush()


def test_a_batch_that_is_too_large_says_what_to_do(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT, size=1_000_001)
    with pytest.raises(
        BatchTooLarge, match=r"send smaller batches, or raise the topic's max\.message\.bytes"
    ):
        writing.flush()


def test_a_batch_that_is_damaged_again_and_again_is_given_up(cluster: FakeCluster) -> None:
    interfere(cluster, ErrorCode.CORRUPT_MESSAGE, times=100)
    writing = Writing(cluster)
    writing.send(AT)
    with pytest.raises(BrokerRefused, match="corrupt message"):
        writing.flush()


def test_after_an_error_nothing_is_sent(cluster: FakeCluster) -> None:
    interfere(cluster, ErrorCode.INVALID_RECORD)
    writing = Writing(cluster)
    for _ in range(3):
        writing.send(AT)
    with pytest.raises(BrokerRefused, match="invalid record"):
        writing.flush()
    writing.shell.wait(1_000)
    assert log(cluster) == []
    assert not writing.producing.unacknowledged
    assert writing.acked == []


def test_an_unknown_topic_is_said(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(TopicPartition("nothing", 0))
    with pytest.raises(UnknownTopic, match="no topic nothing"):
        writing.flush()


def test_a_topic_made_anew_is_not_written_on(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    cluster.make_topic("orders", [1])
    writing.send(AT)
    with pytest.raises(TopicReplaced, match="while it was written to"):
        writing.flush()
    assert log(cluster) == []


def test_a_topic_made_anew_is_not_written_on_in_another_partition_either(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    cluster.make_topic("orders", [1, 1])
    writing.send(TopicPartition("orders", 1))
    with pytest.raises(TopicReplaced, match="while it was written to"):
        writing.flush()


def test_a_broker_that_still_knows_the_topic_before_ends_no_producer(cluster: FakeCluster) -> None:
    before = cluster.topics["orders"][0]
    cluster.make_topic("orders", [1, 2, 3])
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    now, partitions = cluster.topics["orders"]
    cluster.topics["orders"] = (before, partitions)
    writing.shell.ask(operations.topics, ["orders"])
    cluster.topics["orders"] = (now, partitions)
    writing.send(AT)
    writing.flush()
    assert log(cluster) == [(1, 0), (1, 1)]


def test_a_topic_made_anew_before_anything_was_written_is_as_good(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.shell.ask(operations.topics, ["orders"])
    cluster.make_topic("orders", [1])
    writing.send(AT)
    writing.send(AT)
    writing.flush()
    assert log(cluster) == [(1, 0), (1, 1)]


def test_a_partition_that_nobody_leads_holds_up_no_other(cluster: FakeCluster) -> None:
    cluster.make_topic("dead", [-1])
    writing = Writing(cluster)
    writing.send(TopicPartition("dead", 0))
    other = writing.send(AT)
    writing.shell.run(lambda: writing.producing.unacknowledged == 1)
    writing.call_back()
    assert writing.acked == [(other, 0)]
    with pytest.raises(
        TimedOut, match="a batch for dead-0 was not acknowledged within 120 s: dead-0 has no leader"
    ):
        writing.flush()


def test_nobody_to_be_reached_is_said(cluster: FakeCluster) -> None:
    cluster.down.update((1, 2, 3))
    writing = Writing(cluster)
    writing.send(AT)
    with pytest.raises(Unreachable, match="cannot reach any of broker-2:9092, broker-3:9092"):
        writing.flush()


def test_what_is_no_batch_is_not_taken(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    batch = encode_batch([(1, None, b"x", ())])
    with pytest.raises(CorruptBatch):
        writing.producing.add(AT, bytearray(10), None, 0)
    with pytest.raises(ValueError, match="not exactly one record batch"):
        writing.producing.add(AT, batch + batch, None, 0)
    with pytest.raises(ValueError, match="not exactly one record batch"):
        writing.producing.add(AT, batch[:-1], None, 0)
    assert not writing.producing.unacknowledged


def test_a_closed_producer_gives_up_what_is_in_flight(cluster: FakeCluster) -> None:
    writing = Writing(cluster)
    writing.send(AT)
    writing.flush()
    for _ in range(3):
        writing.send(AT)
    writing.producing.close()
    shell = writing.shell
    while shell.can_act() or shell.can_deliver():
        for number in shell.can_act():
            shell.act(number)
        for number in shell.can_deliver():
            shell.deliver(number)
    assert isinstance(writing.producing.error, WireError)
    assert writing.acked == [(0, 0)]
