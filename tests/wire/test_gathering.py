"""Records of many callers in batches, against a cluster in a dictionary: a failure is its own, and never a lie."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import (
    InitProducerIdResponse,
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
)
from penstock.protocol.messages.topics import MetadataResponse, MetadataResponseTopic
from penstock.protocol.records import decode_records
from penstock.wire import BatchTooLarge, BrokerRefused, OutOfSequence, ProduceFailed, TimedOut, UnknownTopic
from penstock.wire.gathering import Gathering, sizes_of
from penstock.wire.producing import Producing
from tests.wire.fake import SILENCE, FakeCluster, FakeShell

PRODUCE, METADATA, INIT_PRODUCER_ID = 0, 3, 22
PLACES = [TopicPartition("orders", number) for number in range(3)]
AT = PLACES[0]


class Gatherer:
    """A producer for many callers on a fake cluster. Each record is a number, and has an outcome."""

    def __init__(self, cluster: FakeCluster, *, linger_ms: int = 0, batch_bytes: int = 2_000) -> None:
        self.cluster = cluster
        self.shell = FakeShell(cluster, bootstrap="broker-1:9092,broker-2:9092,broker-3:9092")
        core = self.shell.core
        self.producing = Producing(core, acks=-1, in_flight=2, fails_alone=True, deadline_ms=10_000)
        self.gathering = Gathering(
            core, self.producing, codec=Codec.NONE, batch_bytes=batch_bytes, linger_ms=linger_ms
        )
        self.made = 0
        self.sent: dict[int, TopicPartition] = {}
        self.outcomes: dict[int, int | ProduceFailed] = {}

    def add(self, at: TopicPartition, count: int = 1, size: int = 10) -> list[int]:
        """A call with some records; they leave with the next step."""
        numbers = list(range(self.made, self.made + count))
        self.made += count
        self.sent.update(dict.fromkeys(numbers, at))
        rows = [(1000, b"%d" % number, b"x" * size, ()) for number in numbers]

        def take(first: int, count: int, offset: int, error: ProduceFailed | None) -> None:
            for place, number in enumerate(numbers[first : first + count]):
                assert number not in self.outcomes, "one outcome each"
                self.outcomes[number] = error or (offset + place if offset >= 0 else -1)

        self.gathering.add(at, rows, sizes_of(rows), take, self.shell.now_ms)
        return numbers

    def call(self, at: TopicPartition, count: int = 1, size: int = 10) -> list[int]:
        numbers = self.add(at, count, size)
        self.shell.wait(0)
        self.report()
        return numbers

    def report(self) -> None:
        acked, self.producing.acked = self.producing.acked, []
        for on_ack, offset in acked:
            on_ack(offset)
        failed, self.producing.failed = self.producing.failed, []
        for on_failure, error, may_be_stored in failed:
            on_failure(error, may_be_stored)

    def settle(self) -> None:
        def is_done() -> bool:
            self.report()
            return len(self.outcomes) == self.made

        self.shell.run(is_done)

    def failure(self, number: int) -> ProduceFailed:
        outcome = self.outcomes[number]
        assert isinstance(outcome, ProduceFailed)
        return outcome

    def log(self, at: TopicPartition) -> dict[int, list[int]]:
        """The offsets of each number."""
        found: dict[int, list[int]] = {}
        for _, batch in self.cluster.partition(at).batches:
            for record in decode_records(batch, bytes_max=1 << 30):
                found.setdefault(int(record.key or b""), []).append(record.offset)
        return found

    def check(self) -> None:
        """What callers were told is true of the logs."""
        logs = {
            at: self.log(at) for at in dict.fromkeys(self.sent.values()) if at.topic in self.cluster.topics
        }
        for number, at in self.sent.items():
            offsets = logs.get(at, {}).get(number, [])
            outcome = self.outcomes[number]
            assert len(offsets) <= 1, f"{number} is stored twice"
            if isinstance(outcome, int):
                assert len(offsets) == 1 and outcome in (-1, offsets[0])
            elif not outcome.may_be_stored:
                assert not offsets, f"{number} is stored, but its caller was told that it is not"


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster(3)
    cluster.make_topic("orders", [1, 2, 3])
    return cluster


def produced(cluster: FakeCluster) -> int:
    return len([key for _, key, _, _ in cluster.asked if key == PRODUCE])


def refuse(cluster: FakeCluster, code: ErrorCode, times: int = 1, at: TopicPartition = AT) -> None:
    """Answer the next batches of a partition with an error, without writing them."""
    left = [times]
    answer = cluster._produce

    def refusing(broker: int, version: int, request: Any) -> ProduceResponse:
        topic = request.topic_data[0]
        name = cluster._name(topic, version >= 13, topic.name)
        if left[0] and name == at.topic and topic.partition_data[0].index == at.partition:
            left[0] -= 1
            result = PartitionProduceResponse(index=at.partition, error_code=code, base_offset=-1)
            return ProduceResponse(
                responses=[
                    TopicProduceResponse(
                        name=topic.name, topic_id=topic.topic_id, partition_responses=[result]
                    )
                ]
            )
        return answer(broker, version, request)

    cluster._produce = refusing  # type: ignore[method-assign]


def test_records_of_one_moment_are_one_batch(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    for _ in range(20):
        gatherer.add(AT)
    gatherer.settle()
    assert len(cluster.partition(AT).batches) == 1
    assert list(gatherer.outcomes.values()) == list(range(20))
    gatherer.check()


def test_records_that_come_while_requests_are_in_flight_are_gathered(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT)
    gatherer.settle()
    for _ in range(30):
        gatherer.call(AT)
    gatherer.settle()
    assert list(gatherer.outcomes.values()) == list(range(31))
    # One before, two in flight, and all the others together.
    assert len(cluster.partition(AT).batches) == 4
    gatherer.check()


def test_with_a_linger_records_wait_for_company(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster, linger_ms=5)
    gatherer.call(AT)
    gatherer.settle()
    for _ in range(3):
        gatherer.call(AT)
        gatherer.shell.wait(1)
    gatherer.settle()
    assert len(cluster.partition(AT).batches) == 2
    gatherer.check()


def test_a_call_larger_than_a_batch_is_several_and_keeps_its_order(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT, count=200, size=50)
    gatherer.settle()
    assert list(gatherer.outcomes.values()) == list(range(200))
    assert len(cluster.partition(AT).batches) > 5
    gatherer.check()


def test_a_batch_too_large_for_its_topic_is_divided_and_one_record_fails(cluster: FakeCluster) -> None:
    cluster.max_message_bytes = 500
    gatherer = Gatherer(cluster, batch_bytes=10_000)
    small = gatherer.add(AT, count=40)
    large = gatherer.add(AT, size=600)
    behind = gatherer.add(AT, count=3)
    gatherer.settle()
    assert [gatherer.outcomes[number] for number in small + behind] == list(range(43))
    failure = gatherer.failure(large[0])
    assert isinstance(failure.cause, BatchTooLarge) and not failure.may_be_stored
    assert "the record is not stored" in str(failure)
    gatherer.check()


def test_a_refusal_fails_its_batch_and_what_follows_goes_on(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT)
    gatherer.settle()
    refuse(cluster, ErrorCode.INVALID_RECORD)
    bad = gatherer.call(AT)[0]
    # Both are in flight; the second has the sequence behind the first.
    good = gatherer.call(AT)[0]
    other = gatherer.call(PLACES[1])[0]
    gatherer.settle()
    assert isinstance(gatherer.failure(bad).cause, BrokerRefused)
    assert not gatherer.failure(bad).may_be_stored
    assert gatherer.outcomes[good] == 1 and gatherer.outcomes[other] == 0
    gatherer.check()


@pytest.mark.parametrize(
    "code",
    [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.INVALID_PRODUCER_EPOCH],
)
def test_a_broker_that_lost_the_sequences_gets_the_record_from_another_producer(
    cluster: FakeCluster, code: ErrorCode
) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT)
    gatherer.settle()
    refuse(cluster, code)
    gatherer.call(AT)
    gatherer.settle()
    assert list(gatherer.outcomes.values()) == [0, 1]
    assert cluster.producer_ids == 2
    gatherer.check()


def test_a_record_in_doubt_is_not_sent_as_another_producer(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT)
    gatherer.settle()
    number = gatherer.call(AT)[0]
    link = next(link for link in gatherer.shell.can_act())
    gatherer.shell.act(link)
    # It is written, the answer is lost, and then the broker does not know the producer.
    gatherer.shell.lose(link)
    refuse(cluster, ErrorCode.UNKNOWN_PRODUCER_ID)
    later = gatherer.call(AT)[0]
    gatherer.settle()
    failure = gatherer.failure(number)
    assert isinstance(failure.cause, OutOfSequence) and failure.may_be_stored
    assert isinstance(gatherer.outcomes[later], int)
    gatherer.check()


def test_a_record_whose_time_is_over_before_it_was_sent_is_surely_not_stored(cluster: FakeCluster) -> None:
    cluster.make_topic("dead", [-1])
    gatherer = Gatherer(cluster)
    dead = gatherer.call(TopicPartition("dead", 0))[0]
    good = gatherer.call(AT)[0]
    gatherer.settle()
    failure = gatherer.failure(dead)
    assert isinstance(failure.cause, TimedOut) and not failure.may_be_stored
    assert "within 10 s: dead-0 has no leader" in str(failure)
    assert gatherer.outcomes[good] == 0


def test_a_record_whose_answer_never_came_may_be_stored_and_later_ones_are_not_stuck(
    cluster: FakeCluster,
) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT)
    gatherer.settle()
    cluster.interfere = lambda broker, key, version, request: SILENCE if key == PRODUCE else None
    number = gatherer.call(AT)[0]
    gatherer.settle()
    failure = gatherer.failure(number)
    assert isinstance(failure.cause, TimedOut) and failure.may_be_stored
    assert "may be stored" in str(failure)
    cluster.interfere = lambda broker, key, version, request: None
    later = gatherer.call(AT)[0]
    for link in list(gatherer.shell.links):
        gatherer.shell.lose(link)
    gatherer.settle()
    # Both were in doubt, and sending both again is the only way to be sure of the later one.
    assert gatherer.log(AT) == {0: [0], number: [1], later: [2]}
    assert gatherer.outcomes[later] == 2


def test_topics_that_are_missing_or_forbidden_fail_alone(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    answer = cluster._metadata

    def forbidding(broker: int, version: int, request: Any) -> MetadataResponse:
        response = answer(broker, version, request)
        for number, topic in enumerate(response.topics):
            if topic.name == "secret":
                response.topics[number] = MetadataResponseTopic(
                    error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=topic.name
                )
        return response

    cluster._metadata = forbidding  # type: ignore[method-assign]
    missing = gatherer.add(TopicPartition("missing", 0))[0]
    secret = gatherer.add(TopicPartition("secret", 0))[0]
    good = gatherer.add(AT)[0]
    gatherer.settle()
    assert isinstance(gatherer.failure(missing).cause, UnknownTopic)
    assert isinstance(gatherer.failure(secret).cause, BrokerRefused)
    assert not gatherer.failure(missing).may_be_stored and not gatherer.failure(secret).may_be_stored
    assert gatherer.outcomes[good] == 0


def test_a_topic_that_was_made_again_is_written_to_without_an_error(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    for _ in range(3):
        gatherer.call(AT)
        gatherer.settle()
    cluster.make_topic("orders", [2, 1, 1])
    number = gatherer.call(AT)[0]
    gatherer.settle()
    assert gatherer.outcomes[number] == 0
    assert list(gatherer.log(AT)) == [number]


def test_a_producer_id_that_is_refused_fails_the_records_and_is_asked_for_again(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    refusals = [InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)]
    cluster.interfere = lambda broker, key, version, request: (
        refusals.pop() if key == INIT_PRODUCER_ID and refusals else None
    )
    refused = gatherer.call(AT)[0]
    gatherer.settle()
    assert not gatherer.failure(refused).may_be_stored
    good = gatherer.call(AT)[0]
    gatherer.settle()
    assert gatherer.outcomes[good] == 0


def test_close_fails_what_has_no_result(cluster: FakeCluster) -> None:
    gatherer = Gatherer(cluster)
    gatherer.call(AT)
    gatherer.settle()
    in_flight = gatherer.call(AT)[0]
    gatherer.call(AT)
    gathered = gatherer.add(AT)[0]
    gatherer.gathering.close()
    gatherer.producing.close()
    gatherer.report()
    assert gatherer.failure(in_flight).may_be_stored
    assert not gatherer.failure(gathered).may_be_stored
    assert len(gatherer.outcomes) == gatherer.made


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ((0, "text", b"", ()), TypeError),
        ((0, None, 5, ()), TypeError),
        ((-2, None, b"", ()), ValueError),
        ((0, None, b"", [("name", "text")]), TypeError),
        ((0, None, b"", [("\ud800", b"")]), ValueError),
    ],
)
def test_what_is_no_record_is_refused_before_it_is_gathered(row: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        sizes_of([(0, b"", b"", ()), row])


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_outcomes_are_true_whatever_is_lost_moved_refused_or_late(seed: int) -> None:
    chance = random.Random(seed)
    cluster = FakeCluster(3)
    cluster.make_topic("orders", [1, 2, 3])
    gatherer = Gatherer(cluster, linger_ms=chance.choice([0, 5]))
    shell = gatherer.shell
    codes = [
        ErrorCode.INVALID_RECORD,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_PRODUCER_ID,
    ]
    for _ in range(200):
        moves = ["act"] * 3 + ["deliver"] * 3 + ["call"] * 3 + ["wait", "wait", "rest"]
        moves += ["move", "lose", "refuse", "shrink"] if chance.random() < 0.3 else []
        match chance.choice(moves):
            case "act" if shell.can_act():
                shell.act(chance.choice(shell.can_act()))
            case "deliver" if shell.can_deliver():
                shell.deliver(chance.choice(shell.can_deliver()))
            case "call":
                gatherer.call(chance.choice(PLACES), chance.choice([1, 1, 5, 60]), chance.choice([5, 100]))
            case "wait":
                shell.wait(chance.choice([0, 1, 30]))
            case "rest":
                shell.wait(chance.choice([500, 4_000]))
            case "move":
                cluster.move(chance.choice(PLACES), chance.choice([1, 2, 3]))
            case "lose" if shell.links:
                shell.lose(chance.choice(list(shell.links)))
            case "refuse":
                refuse(cluster, chance.choice(codes), at=chance.choice(PLACES))
            case "shrink":
                cluster.max_message_bytes = chance.choice([300, 1_000, 1_000_000])
        gatherer.report()
    gatherer.settle()
    gatherer.check()
    for at in PLACES:
        acked = [
            (outcome, number)
            for number, outcome in gatherer.outcomes.items()
            if gatherer.sent[number] == at and isinstance(outcome, int) and outcome >= 0
        ]
        assert [number for _, number in sorted(acked)] == sorted(number for _, number in acked), "in order"
