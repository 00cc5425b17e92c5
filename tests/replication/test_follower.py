"""The fetcher: sessions that name only what changed, and what answers mean."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchRequest, FetchResponse, PartitionData
from penstock.protocol.schema import decode, encode
from penstock.replication.events import Append, Backoff, Effect, StartOver, Truncate
from penstock.replication.follower import (
    JOIN_INTERVAL_MS,
    NAMED_MAX,
    SESSION_EPOCH_MAX,
    Fetcher,
    FetchLimits,
    Throttle,
)
from tests.replication.making import data, forgotten, key, named, response

SESSION = 77


class Conversation:
    """A fetcher and its leader's part of the talk."""

    def __init__(self, *indexes: int, throttle: Throttle | None = None) -> None:
        self.fetcher = Fetcher(1, throttle=throttle)
        self.now_ms = 0
        for index in indexes:
            self.fetcher.assign(key(index), 5, 10, 4)
        self.asked: FetchRequest | None = None

    def ask(self) -> FetchRequest | None:
        self.asked = self.fetcher.request(self.now_ms, 101)
        self.fetcher.check()
        return self.asked

    def hear(self, answer: FetchResponse | None) -> list[Effect]:
        assert self.asked is not None
        effects = self.fetcher.answered(self.asked, answer, self.now_ms)
        self.fetcher.check()
        return effects

    def round(self, *partitions: PartitionData) -> list[Effect]:
        assert self.ask() is not None
        return self.hear(response(SESSION, *partitions))


def test_the_first_request_names_everything_and_later_ones_what_changed() -> None:
    talk = Conversation(0, 1, 2)
    request = talk.ask()
    assert named(request) == [0, 1, 2]
    assert request is not None
    assert (request.session_id, request.session_epoch) == (0, 0)
    talk.hear(response(SESSION, data(0), data(1, b"xx"), data(2)))
    talk.fetcher.moved(key(1), 12, 5, 0)
    request = talk.ask()
    assert named(request) == [1]
    assert request is not None
    assert (request.session_id, request.session_epoch) == (SESSION, 1)
    assert request.topics[0].partitions[0].fetch_offset == 12
    talk.hear(response(SESSION))
    request = talk.ask()
    assert named(request) == []
    assert request is not None
    assert request.session_epoch == 2


def test_thirty_thousand_quiet_partitions_are_named_once() -> None:
    talk = Conversation(*range(30_000))
    seen: list[int] = []
    while len(seen) < 30_000:
        request = talk.ask()
        assert request is not None
        assert 0 < len(named(request)) <= NAMED_MAX, "neither side is busy with one of them for long"
        seen += named(request)
        assert (request.max_wait_ms == 0) == (len(seen) < 30_000), "the rest does not wait"
        talk.hear(response(SESSION))
    assert seen == list(range(30_000))
    for _ in range(3):
        request = talk.ask()
        assert request is not None
        assert request.topics == []
        assert request.forgotten_topics_data == []
        assert len(encode(request, 17)) < 60
        talk.hear(response(SESSION))


def test_a_leader_without_room_for_a_session_is_told_of_everything_each_time() -> None:
    talk = Conversation(*range(NAMED_MAX + 5))
    assert len(named(talk.ask())) == NAMED_MAX
    talk.hear(response(0))
    for _ in range(2):
        assert named(talk.ask()) == list(range(NAMED_MAX + 5))
        talk.hear(response(0))


def test_a_leader_that_ends_a_session_because_it_grew_is_told_of_everything_at_once() -> None:
    """Or it would have room for the first ones again, and those behind them were never named."""
    talk = Conversation(*range(3 * NAMED_MAX))
    for _ in range(2):
        talk.round()
    talk.ask()
    talk.hear(response(0, error=ErrorCode.FETCH_SESSION_ID_NOT_FOUND))
    assert named(talk.ask()) == list(range(3 * NAMED_MAX))
    talk.hear(response(SESSION))
    assert named(talk.ask()) == []


def test_partitions_that_moved_are_all_named_and_new_ones_wait_for_them() -> None:
    talk = Conversation(*range(NAMED_MAX))
    talk.round()
    for index in range(NAMED_MAX, NAMED_MAX + 10):
        talk.fetcher.assign(key(index), 5, 10, 4)
    for index in range(NAMED_MAX):
        talk.fetcher.moved(key(index), 12, 5, 0)
    # Those that wait longer go first. But the leader would send again what the others have already.
    request = talk.ask()
    assert sorted(named(request)) == list(range(NAMED_MAX + 10))
    talk.hear(response(SESSION))
    for index in range(NAMED_MAX):
        talk.fetcher.moved(key(index), 13, 5, 0)
    for index in range(NAMED_MAX + 10, NAMED_MAX + 20):
        talk.fetcher.assign(key(index), 5, 10, 4)
    assert named(talk.ask()) == list(range(NAMED_MAX))
    talk.hear(response(SESSION))
    assert named(talk.ask()) == list(range(NAMED_MAX + 10, NAMED_MAX + 20))


def test_many_that_are_not_in_sync_are_named_again_some_at_a_time() -> None:
    talk = Conversation()
    count = 3 * NAMED_MAX
    for index in range(count):
        talk.fetcher.assign(key(index), 5, 10, 4, is_in_sync=False)
    for _ in range(3):
        talk.round()
    assert named(talk.ask()) == [], "all of them have just been named"
    talk.hear(response(SESSION))
    talk.now_ms += JOIN_INTERVAL_MS
    seen: list[int] = []
    for _ in range(3):
        request = talk.ask()
        assert len(named(request)) == NAMED_MAX
        seen += named(request)
        talk.hear(response(SESSION))
    assert seen == list(range(count))


def test_who_is_not_in_sync_is_named_again_however_much_moves() -> None:
    talk = Conversation(*range(NAMED_MAX))
    talk.fetcher.assign(key(NAMED_MAX), 5, 10, 4, is_in_sync=False)
    talk.round()
    talk.round()
    talk.now_ms += JOIN_INTERVAL_MS
    for index in range(NAMED_MAX):
        talk.fetcher.moved(key(index), 12, 5, 0)
    assert named(talk.ask()) == list(range(NAMED_MAX + 1))


def test_who_is_to_be_named_again_does_not_end_a_pause() -> None:
    talk = Conversation()
    for index in range(NAMED_MAX + 1):
        talk.fetcher.assign(key(index), 5, 10, 4, is_in_sync=False)
    talk.round()
    talk.round()
    talk.now_ms += JOIN_INTERVAL_MS
    assert len(named(talk.ask())) == NAMED_MAX, "and one is left for the next time"
    talk.hear(response(SESSION))
    for index in range(NAMED_MAX + 1):
        talk.fetcher.failed(key(index), talk.now_ms)
    assert talk.ask() is None
    retry_ms = talk.fetcher.retry_ms(talk.now_ms)
    assert retry_ms is not None and retry_ms >= talk.now_ms + 10


def test_one_request_is_outstanding_at_a_time() -> None:
    talk = Conversation(0)
    talk.ask()
    assert talk.fetcher.is_outstanding
    assert talk.fetcher.request(0, 101) is None
    talk.fetcher.assign(key(1), 5, 0, -1)
    assert talk.fetcher.has_news
    assert talk.fetcher.request(0, 101) is None


def test_a_request_carries_its_limits_and_can_be_sent() -> None:
    limits = FetchLimits(max_wait_ms=123, min_bytes=2, max_bytes=1000, partition_max_bytes=100)
    fetcher = Fetcher(1, limits=limits)
    fetcher.assign(key(0), 5, 10, 4)
    request = fetcher.request(0, 101)
    assert request is not None
    assert (request.max_wait_ms, request.min_bytes, request.max_bytes) == (123, 2, 1000)
    assert request.topics[0].partitions[0].partition_max_bytes == 100
    for version in (17, 18):
        assert decode(FetchRequest, version, encode(request, version)) == request


def test_nothing_to_follow_is_nothing_to_ask() -> None:
    talk = Conversation()
    assert talk.ask() is None
    assert talk.fetcher.retry_ms(0) is None
    talk = Conversation(0)
    talk.round()
    talk.fetcher.remove(key(0))
    assert talk.ask() is None


def test_what_is_followed_no_longer_is_forgotten_by_the_session() -> None:
    talk = Conversation(0, 1)
    talk.round()
    talk.fetcher.remove(key(0))
    request = talk.ask()
    assert forgotten(request) == [0]
    assert named(request) == []
    talk.hear(response(SESSION, data(0, b"late")))
    assert forgotten(talk.ask()) == []


def test_what_is_taken_up_again_is_named_and_not_forgotten() -> None:
    talk = Conversation(0, 1)
    talk.round()
    talk.fetcher.remove(key(0))
    talk.fetcher.assign(key(0), 6, 9, 4)
    request = talk.ask()
    assert named(request) == [0]
    assert forgotten(request) == []


def test_the_same_assignment_again_changes_no_position() -> None:
    talk = Conversation(0)
    talk.round()
    talk.fetcher.assign(key(0), 5, 3, 1)
    assert named(talk.ask()) == []
    assert talk.fetcher.position(key(0)) == (10, 4)
    assert talk.fetcher.position(key(1)) is None


# Sessions


@pytest.mark.parametrize(
    "error", [ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH]
)
def test_a_lost_session_is_begun_again_at_once(error: ErrorCode) -> None:
    talk = Conversation(0, 1)
    talk.round()
    talk.ask()
    assert talk.hear(response(0, error=error)) == []
    request = talk.ask()
    assert named(request) == [0, 1]
    assert request is not None
    assert (request.session_id, request.session_epoch) == (0, 0)
    # A leader that says it every time is asked less often.
    talk.hear(response(0, error=error))
    assert talk.ask() is None
    retry_ms = talk.fetcher.retry_ms(talk.now_ms)
    assert retry_ms is not None
    talk.now_ms = retry_ms
    assert named(talk.ask()) == [0, 1]


def test_after_a_lost_connection_the_old_session_is_closed_by_the_new_one() -> None:
    talk = Conversation(0)
    talk.round()
    talk.ask()
    talk.hear(None)
    assert talk.ask() is None
    talk.now_ms = 1_000
    request = talk.ask()
    assert request is not None
    assert (request.session_id, request.session_epoch) == (SESSION, 0)


def test_an_answer_of_another_session_is_not_taken() -> None:
    talk = Conversation(0)
    talk.round()
    talk.ask()
    assert talk.hear(response(SESSION + 1, data(0, b"xx"))) == []
    talk.now_ms = 1_000
    assert named(talk.ask()) == [0]


def test_without_a_session_every_request_names_everything() -> None:
    talk = Conversation(0, 1)
    for _ in range(2):
        assert named(talk.ask()) == [0, 1]
        assert talk.hear(response(0, data(0, b"xx"))) == [Append(key(0), b"xx", 0, 0)]
        talk.fetcher.moved(key(0), 11, 4, 0)
        assert talk.fetcher.position(key(0)) == (11, 4)


def test_the_epochs_of_a_session_begin_again_after_the_highest() -> None:
    talk = Conversation(0)
    talk.round()
    talk.fetcher._session_epoch = SESSION_EPOCH_MAX
    talk.round()
    request = talk.ask()
    assert request is not None
    assert request.session_epoch == 1


def test_failures_are_retried_soon_and_then_less_and_less_often() -> None:
    talk = Conversation(0)
    pauses = []
    for _ in range(9):
        assert talk.ask() is not None
        talk.hear(None)
        retry_ms = talk.fetcher.retry_ms(talk.now_ms)
        assert retry_ms is not None
        pauses.append(retry_ms - talk.now_ms)
        talk.now_ms = retry_ms
    assert pauses == [25, 50, 100, 200, 400, 800, 1_000, 1_000, 1_000]


def test_a_new_assignment_is_tried_at_once() -> None:
    talk = Conversation(0)
    talk.ask()
    talk.hear(None)
    assert talk.ask() is None
    talk.fetcher.assign(key(1), 5, 0, -1)
    assert named(talk.ask()) == [0, 1]


# What answers mean


def test_records_are_appended_with_what_the_leader_says_of_itself() -> None:
    talk = Conversation(0)
    effects = talk.round(data(0, b"abc", high_watermark=9, log_start_offset=3))
    assert effects == [Append(key(0), b"abc", 9, 3)]


def test_a_high_watermark_without_records_is_passed_on() -> None:
    talk = Conversation(0)
    assert talk.round(data(0, high_watermark=10)) == [Append(key(0), b"", 10, 0)]


def test_a_diverging_log_is_truncated_and_asked_for_again() -> None:
    talk = Conversation(0)
    assert talk.round(data(0, diverging=(3, 8))) == [Truncate(key(0), 3, 8)]
    talk.fetcher.moved(key(0), 8, 3, 0)
    request = talk.ask()
    assert request is not None
    asked = request.topics[0].partitions[0]
    assert (asked.fetch_offset, asked.last_fetched_epoch) == (8, 3)


@pytest.mark.parametrize("error", [ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE])
def test_a_leader_whose_log_begins_behind_our_end_makes_us_start_over(error: ErrorCode) -> None:
    talk = Conversation(0)
    assert talk.round(data(0, error=error, log_start_offset=50)) == [StartOver(key(0), 50)]


def test_an_offset_out_of_range_for_any_other_reason_drops_nothing() -> None:
    talk = Conversation(0)
    error = ErrorCode.OFFSET_OUT_OF_RANGE
    assert talk.round(data(0, error=error, log_start_offset=3)) == [Backoff(key(0), error)]


def test_an_empty_log_that_begins_behind_the_end_of_the_leaders_starts_over() -> None:
    """After an unclean election. Waiting there would leave a hole below, once the leader's log has grown."""
    talk = Conversation(0)
    talk.fetcher.moved(key(0), 100, -1, 100)
    error = ErrorCode.OFFSET_OUT_OF_RANGE
    assert talk.round(data(0, error=error, log_start_offset=3)) == [StartOver(key(0), 3)]
    talk.fetcher.moved(key(0), 3, -1, 3)
    assert talk.round(data(0, b"abc", log_start_offset=3)) == [Append(key(0), b"abc", 0, 3)]


@pytest.mark.parametrize(
    "error",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.STALE_BROKER_EPOCH,
    ],
)
def test_a_partition_in_trouble_pauses_and_the_others_go_on(error: ErrorCode) -> None:
    talk = Conversation(0, 1)
    assert talk.round(data(0, error=error), data(1, b"x")) == [
        Backoff(key(0), error),
        Append(key(1), b"x", 0, 0),
    ]
    talk.fetcher.moved(key(1), 11, 4, 0)
    request = talk.ask()
    assert named(request) == [1]
    assert forgotten(request) == [0]
    # And the leader does not hold on to the request for longer than the pause.
    assert request is not None
    assert request.max_wait_ms == 25
    talk.hear(response(SESSION))
    talk.now_ms = 25
    assert named(talk.ask()) == [0]


def test_when_everyone_pauses_the_fetcher_says_until_when() -> None:
    talk = Conversation(0)
    talk.round(data(0, error=ErrorCode.UNKNOWN_LEADER_EPOCH))
    assert talk.ask() is None
    assert talk.fetcher.retry_ms(0) == 25


def test_an_effect_that_failed_pauses_the_partition() -> None:
    talk = Conversation(0, 1)
    talk.round(data(0, b"rotten"))
    talk.fetcher.failed(key(0), talk.now_ms)
    request = talk.ask()
    assert forgotten(request) == [0]


def test_an_answer_that_names_what_was_not_asked_is_not_taken() -> None:
    talk = Conversation(0)
    assert talk.round(data(5, b"xx")) == []


def test_an_answer_for_a_position_that_has_moved_meanwhile_is_not_taken() -> None:
    talk = Conversation(0)
    talk.ask()
    talk.fetcher.moved(key(0), 11, 4, 0)
    assert talk.hear(response(SESSION, data(0, b"xx"))) == []
    assert named(talk.ask()) == [0]


# Joining


def test_who_is_not_in_sync_is_named_again_and_again() -> None:
    talk = Conversation(0, 1)
    talk.fetcher.assign(key(0), 5, 10, 4, is_in_sync=False)
    talk.round()
    assert named(talk.ask()) == []
    talk.hear(response(SESSION))
    talk.now_ms = 1_000
    assert named(talk.ask()) == [0]
    talk.hear(response(SESSION))
    talk.fetcher.assign(key(0), 5, 10, 4, is_in_sync=True)
    talk.now_ms = 3_000
    assert named(talk.ask()) == []


# Throttling


def test_a_throttle_lets_through_what_it_is_worth_in_a_second() -> None:
    throttle = Throttle(1_000)
    assert throttle.wait_ms(0) == 0
    throttle.take(3_000)
    assert throttle.wait_ms(0) == 2_001
    assert throttle.wait_ms(1_500) == 501
    assert throttle.wait_ms(2_001) == 0
    throttle.set_rate(None, 2_001)
    throttle.take(10**9)
    assert throttle.wait_ms(2_001) == 0
    throttle.set_rate(1_000, 2_001)
    assert throttle.wait_ms(2_001) == 0


def test_a_throttle_does_not_save_up_for_more_than_a_second() -> None:
    throttle = Throttle(1_000)
    assert throttle.wait_ms(1_000_000) == 0
    throttle.take(1_500)
    assert throttle.wait_ms(1_000_000) == 501


def test_replicas_being_added_wait_for_the_throttle_and_the_others_do_not() -> None:
    throttle = Throttle(1_000)
    talk = Conversation(0, 1, throttle=throttle)
    talk.fetcher.assign(key(1), 5, 10, 4, is_throttled=True)
    talk.round(data(0, b"x" * 5_000), data(1, b"x" * 3_000))
    talk.fetcher.moved(key(0), 20, 4, 0)
    talk.fetcher.moved(key(1), 20, 4, 0)
    request = talk.ask()
    assert named(request) == [0]
    assert forgotten(request) == [1]
    talk.hear(response(SESSION))
    talk.now_ms = 2_001
    assert named(talk.ask()) == [1]


def test_a_replica_that_is_in_sync_is_throttled_no_longer() -> None:
    throttle = Throttle(1_000)
    talk = Conversation(0, throttle=throttle)
    talk.fetcher.assign(key(0), 5, 10, 4, is_throttled=True)
    talk.round(data(0, b"x" * 3_000))
    talk.fetcher.moved(key(0), 20, 4, 0)
    assert talk.ask() is None
    assert talk.fetcher.retry_ms(0) is not None
    talk.fetcher.assign(key(0), 5, 10, 4, is_throttled=False)
    assert named(talk.ask()) == [0]
