"""The loops around the replication cores, with peers and partitions made of a few lines."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.replication.isr_proposals import LOOKS_PER_TURN, IsrProposals
from penstock.broker.replication.replica_fetcher import FETCH_PATIENCE_MS, URGENT_MAX
from penstock.broker.replication.replica_fetchers import ReplicaFetchers
from penstock.environment import Buffer, Environment
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionResponse,
    AlterPartitionResponsePartition,
    AlterPartitionResponseTopic,
)
from penstock.protocol.messages.fetch import FetchRequest
from penstock.protocol.schema import Message, encode
from penstock.replication.events import Assignment, PartitionKey
from penstock.replication.follower_activity import FollowerActivity
from penstock.replication.partition import Partition
from tests.replication.making import LAG_MAX_MS, LiveBrokers, data, forgotten, key, named, response
from tests.support_files import FakeClock

ME = 1
SESSION = 77
# Shorter than a follower may lag.
SILENCE_MAX_MS = 4_000


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Time that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._timers: list[tuple[int, int, Timer]] = []
        self._count = itertools.count()

    def soon(self, callback: Callable[[], None]) -> None:
        self.later(0, callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock.now + int(delay_ms), next(self._count), timer))
        return timer

    def in_thread(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nothing here needs a thread")

    def run_for(self, ms: int) -> None:
        end = self.clock.now + ms
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heapq.heappop(self._timers)
            self.clock.now = at
            if timer.callback is not None:
                timer.callback()
        self.clock.now = end


class Sent:
    def __init__(
        self, node: int, channel: str, request: Any, done: Callable[[Any], None], timeout_ms: int
    ) -> None:
        self.node = node
        self.channel = channel
        self.request = request
        self.done = done
        self.timeout_ms = timeout_ms

    def __repr__(self) -> str:
        return f"{self.channel} to {self.node}: {named(self.request)}"


class FakePeers:
    def __init__(self) -> None:
        self.sent: deque[Sent] = deque()

    def call(
        self,
        node_id: int,
        channel: str,
        request: Message,
        version: int,
        done: Callable[[Any], None],
        *,
        timeout_ms: int = 5_000,
    ) -> None:
        encode(request, version)
        self.sent.append(Sent(node_id, channel, request, done, timeout_ms))


class FakeLogger:
    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **values: Any) -> None:
        self.events.append(event)

    warning = info


class FakeHosted:
    """A partition whose log is a number, and whose records are as many as the bytes."""

    def __init__(self, index: int, leader: int = 2, *, is_flushed: bool = False) -> None:
        self.key: PartitionKey = key(index)
        self.brokers = LiveBrokers(1, 2, 3)
        self.core = Partition(ME, live=self.brokers.live, lag_max_ms=LAG_MAX_MS, min_isr=2)
        self.end_offset = 0
        self.log_start_offset = 0
        self.flushed_offset = 0
        self.last_epoch = -1
        self.is_flushed = is_flushed
        self.flush_waiters: list[Callable[[], None]] = []
        self.append_error = ErrorCode.NONE
        self.appended_before_error = 0
        self.refuses_truncation = False
        self.is_offline = False
        # Asked for, beyond those that an append causes by itself.
        self.flushes = 0
        self.on_answered: Callable[[FakeHosted], None] = lambda hosted: None
        self.assignment = Assignment(leader, 1, 1, (1, 2, 3), (1, 2, 3))
        self.assign()

    def assign(self, **changes: Any) -> None:
        self.assignment = self.assignment._replace(**changes)
        assert self.replication.assign(self.assignment, end_offset=self.end_offset, now_ms=0)

    @property
    def replication(self) -> Partition:
        if self.is_offline:
            raise OSError("its disk has failed")
        return self.core

    def fetch_position(self) -> tuple[int, int, int]:
        if self.is_offline:
            raise OSError("its disk has failed")
        offset = self.flushed_offset if self.is_flushed else self.end_offset
        return offset, self.last_epoch, self.log_start_offset

    def append_fetched(self, records: Buffer, high_watermark: int, log_start_offset: int) -> ErrorCode:
        if self.append_error == ErrorCode.NONE:
            self.end_offset += len(records)
            if records:
                self.last_epoch = self.replication.leader_epoch
            self.replication.learned(high_watermark, self.end_offset)
            self.log_start_offset = max(self.log_start_offset, log_start_offset)
        else:
            self.end_offset += self.appended_before_error
        return self.append_error

    def truncate_for(self, diverging_epoch: int, end_offset: int) -> None:
        if not self.refuses_truncation:
            self.end_offset = end_offset
            self.last_epoch = diverging_epoch

    def start_over_at(self, offset: int) -> None:
        self.end_offset = self.flushed_offset = offset

    def when_flushed(self, callback: Callable[[], None]) -> None:
        if self.is_flushed and self.flushed_offset < self.end_offset:
            self.flush_waiters.append(callback)
        else:
            callback()

    def proposal_answered(self) -> None:
        self.on_answered(self)

    def flush(self) -> None:
        self.flushes += 1

    def finish_flush(self) -> None:
        self.flushed_offset = self.end_offset
        waiters, self.flush_waiters = self.flush_waiters, []
        for waiter in waiters:
            waiter()


class Following:
    def __init__(self, *, fetchers_per_leader: int = 1) -> None:
        self.loop = Loop()
        self.peers = FakePeers()
        self.logger = FakeLogger()
        environment = Environment(
            clock=self.loop.clock,
            files=None,  # type: ignore[arg-type]
            network=None,  # type: ignore[arg-type]
            random=random.Random(1),
            spawn=self.loop,
        )
        self.environment = environment
        self.fetchers = ReplicaFetchers(
            environment,
            self.peers,
            self.logger,  # type: ignore[arg-type]
            me=ME,
            broker_epoch=lambda: 101,
            fetchers_per_leader=fetchers_per_leader,
        )

    def follow(self, *everyone: FakeHosted, is_throttled: bool = False) -> None:
        for hosted in everyone:
            self.fetchers.follow(hosted, is_throttled=is_throttled)
        self.loop.run_for(0)
        self.fetchers.check()

    def tell(self, hosted: FakeHosted) -> None:
        self.fetchers.tell(hosted)
        self.loop.run_for(0)
        self.fetchers.check()

    def take(self) -> Sent:
        assert self.peers.sent, "nothing was sent"
        return self.peers.sent.popleft()

    def answer(self, sent: Sent, *partitions: Any, session: int = SESSION) -> None:
        sent.done(response(session, *partitions))
        self.loop.run_for(0)
        self.fetchers.check()


def offsets(request: FetchRequest) -> list[tuple[int, int]]:
    return [(it.partition, it.fetch_offset) for topic in request.topics for it in topic.partitions]


def starts(request: FetchRequest) -> list[tuple[int, int]]:
    return [(it.partition, it.log_start_offset) for topic in request.topics for it in topic.partitions]


# Fetching


def test_what_is_fetched_is_appended_and_the_next_fetch_goes_on_behind_it() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    sent = here.take()
    assert (sent.node, sent.channel, sent.timeout_ms) == (2, "fetch-0", 500 + FETCH_PATIENCE_MS)
    assert sent.request.replica_state.replica_epoch == 101
    here.answer(sent, data(0, b"abc", high_watermark=2))
    assert hosted.end_offset == 3
    assert hosted.replication.high_watermark == 2
    assert offsets(here.take().request) == [(0, 3)]


def test_many_partitions_of_one_turn_are_one_request() -> None:
    here = Following()
    here.follow(*[FakeHosted(index) for index in range(1_000)])
    assert len(named(here.take().request)) == 1_000
    assert not here.peers.sent


def test_each_leader_has_a_loop_of_its_own() -> None:
    here = Following()
    here.follow(FakeHosted(0, leader=2), FakeHosted(1, leader=3), FakeHosted(2, leader=2))
    assert sorted([(sent.node, named(sent.request)) for sent in here.peers.sent]) == [(2, [0, 2]), (3, [1])]


def test_several_lanes_to_one_leader_share_its_partitions() -> None:
    here = Following(fetchers_per_leader=2)
    here.follow(*[FakeHosted(index) for index in range(4)])
    sent = sorted([(sent.channel, named(sent.request)) for sent in here.peers.sent])
    assert sent == [("fetch-0", [1, 3]), ("fetch-1", [0, 2])]


def test_partitions_move_to_other_lanes_when_there_are_more_and_nothing_is_appended_twice() -> None:
    here = Following()
    everyone = [FakeHosted(index) for index in range(4)]
    here.follow(*everyone)
    under_way = here.take()
    assert here.fetchers.set_fetchers_per_leader(2) and not here.fetchers.set_fetchers_per_leader(2)
    here.follow(*everyone)
    moved = here.take()
    assert (moved.channel, named(moved.request)) == ("fetch-1", [0, 2])
    here.answer(moved, data(0, b"abc", high_watermark=2))
    here.answer(under_way, data(0, b"abc", high_watermark=2), data(1, b"ab", high_watermark=2))
    assert [hosted.end_offset for hosted in everyone] == [3, 2, 0, 0]
    assert {sent.channel for sent in here.peers.sent} == {"fetch-0", "fetch-1"}


def test_a_partition_whose_leader_moves_is_fetched_from_the_new_one() -> None:
    here = Following()
    hosted, other = FakeHosted(0), FakeHosted(1)
    here.follow(hosted, other)
    old = here.take()
    hosted.assign(leader=3, leader_epoch=2, partition_epoch=2)
    here.follow(hosted)
    new = here.take()
    assert (new.node, offsets(new.request)) == (3, [(0, 0)])
    here.answer(old, data(0, b"of the old leader"), data(1, b"x"))
    assert hosted.end_offset == 0
    assert other.end_offset == 1
    assert forgotten(here.take().request) == [0]


def test_who_becomes_the_leader_follows_nobody() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    sent = here.take()
    hosted.assign(leader=ME, leader_epoch=2, partition_epoch=2)
    here.follow(hosted)
    assert len(here.fetchers) == 0
    here.answer(sent, data(0, b"late"))
    assert hosted.end_offset == 0
    assert not here.peers.sent


def test_a_partition_without_a_leader_is_not_fetched() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    here.answer(here.take(), data(0))
    here.take()
    hosted.assign(leader=-1, leader_epoch=2, partition_epoch=2)
    here.follow(hosted)
    assert len(here.fetchers) == 0


def test_a_partition_that_is_gone_is_not_fetched() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    here.fetchers.unfollow(hosted.key)
    here.answer(here.take(), data(0, b"abc"))
    assert hosted.end_offset == 0
    assert not here.peers.sent


def test_a_partition_assigned_while_a_request_lies_at_the_leader_does_not_wait_for_it() -> None:
    here = Following()
    first, second = FakeHosted(0), FakeHosted(1)
    here.follow(first)
    parked = here.take()
    here.follow(second)
    urgent = here.take()
    assert (urgent.channel, named(urgent.request)) == ("fetch-0-urgent", [1])
    assert urgent.request.max_wait_ms == 20
    here.answer(urgent, data(1, b"abc"), session=5)
    assert second.end_offset == 3
    # And goes on there, until the first line is back.
    urgent = here.take()
    assert offsets(urgent.request) == [(1, 3)]
    here.answer(parked, data(0))
    assert not here.peers.sent
    here.answer(urgent, data(1, b"de"), session=5)
    both = here.take()
    assert (both.channel, offsets(both.request)) == ("fetch-0", [(1, 5)])
    assert not here.peers.sent
    here.answer(both, data(1, b"f"))
    assert second.end_offset == 6


def test_more_than_the_second_line_takes_wait_for_the_first() -> None:
    here = Following()
    here.follow(FakeHosted(0))
    parked = here.take()
    for index in range(1, URGENT_MAX + 11):
        here.fetchers.follow(FakeHosted(index))
    here.loop.run_for(0)
    urgent = here.take()
    assert (urgent.channel, named(urgent.request)) == ("fetch-0-urgent", list(range(1, URGENT_MAX + 1)))
    here.answer(urgent, session=5)
    urgent = here.take()
    here.answer(parked, data(0))
    here.answer(urgent, session=5)
    rest = here.take()
    assert (rest.channel, rest.request.max_wait_ms) == ("fetch-0", 0)
    assert named(rest.request)[:10] == list(range(URGENT_MAX + 1, URGENT_MAX + 11))
    here.answer(rest)
    last = here.take()
    both = [*named(rest.request), *named(last.request)]
    assert sorted(both) == list(range(1, URGENT_MAX + 11)), "all of them are on the first line now"


def test_the_first_line_does_not_wait_for_ever_for_the_second() -> None:
    here = Following()
    here.follow(FakeHosted(0))
    parked = here.take()
    here.follow(FakeHosted(1))
    stuck = here.take()
    here.answer(parked, data(0))
    assert not here.peers.sent
    here.loop.run_for(100)
    alone = here.take()
    assert (alone.channel, named(alone.request)) == ("fetch-0", [])
    stuck.done(None)
    here.loop.run_for(1_000)
    assert named(here.take().request) == [1]


def test_a_new_epoch_of_the_same_leader_does_not_wait_either() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    parked = here.take()
    hosted.assign(leader_epoch=2, partition_epoch=2)
    here.follow(hosted)
    urgent = here.take()
    assert urgent.request.topics[0].partitions[0].current_leader_epoch == 2
    here.answer(parked, data(0, error=ErrorCode.FENCED_LEADER_EPOCH))
    here.answer(urgent, data(0, b"abc"), session=5)
    assert hosted.end_offset == 3
    assert offsets(here.take().request) == [(0, 3)]


def test_a_start_that_is_written_down_is_told_while_a_request_lies_at_the_leader() -> None:
    """Somebody waits for the answer to DeleteRecords."""
    here = Following()
    hosted, other = FakeHosted(0), FakeHosted(1)
    here.follow(hosted, other)
    parked = here.take()
    hosted.log_start_offset = 7
    here.tell(hosted)
    urgent = here.take()
    assert (urgent.channel, starts(urgent.request)) == ("fetch-0-urgent", [(0, 7)])
    here.answer(parked, data(0, b"abc"), data(1, b"ab"))
    assert (hosted.end_offset, other.end_offset) == (0, 2)
    here.answer(urgent, data(0, b"abc"), session=5)
    assert hosted.end_offset == 3
    again = here.take()
    assert (again.channel, starts(again.request)) == ("fetch-0", [(1, 0), (0, 7)])
    assert not here.peers.sent


def test_a_start_that_is_written_down_is_told_with_the_next_request_if_none_is_out() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    here.take().done(None)
    hosted.log_start_offset = 7
    here.tell(hosted)
    here.loop.run_for(1_000)
    sent = here.take()
    assert (sent.channel, starts(sent.request)) == ("fetch-0", [(0, 7)])


def test_a_start_that_is_written_down_does_not_tell_of_what_is_not_flushed() -> None:
    here = Following()
    hosted = FakeHosted(0, is_flushed=True)
    here.follow(hosted)
    here.answer(here.take(), data(0, b"abc"))
    hosted.log_start_offset = 2
    here.tell(hosted)
    assert not here.peers.sent
    hosted.finish_flush()
    here.loop.run_for(0)
    sent = here.take()
    assert (offsets(sent.request), starts(sent.request)) == ([(0, 3)], [(0, 2)])


def test_nothing_is_told_of_what_is_not_followed_or_cannot_be_opened() -> None:
    here = Following()
    hosted, other = FakeHosted(0), FakeHosted(1)
    here.follow(hosted)
    here.take()
    hosted.is_offline = True
    here.tell(hosted)
    here.tell(other)
    assert not here.peers.sent


def test_a_change_of_the_in_sync_replicas_disturbs_nothing() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    parked = here.take()
    hosted.assign(partition_epoch=2, isr=(2, 3))
    here.follow(hosted)
    assert not here.peers.sent
    here.answer(parked, data(0))
    assert named(here.take().request) == [0]


def test_a_leader_that_cannot_be_reached_is_tried_again_and_again() -> None:
    here = Following()
    here.follow(FakeHosted(0))
    for pause_ms in (25, 50, 100):
        here.take().done(None)
        here.loop.run_for(pause_ms - 1)
        assert not here.peers.sent
        here.loop.run_for(1)
    assert named(here.take().request) == [0]


def test_an_assignment_is_tried_at_once_though_the_leader_could_not_be_reached() -> None:
    here = Following()
    here.follow(FakeHosted(0))
    here.take().done(None)
    here.follow(FakeHosted(1))
    assert named(here.take().request) == [0, 1]


def test_a_diverging_log_is_truncated_and_fetched_from_there() -> None:
    here = Following()
    hosted = FakeHosted(0)
    hosted.end_offset, hosted.last_epoch = 9, 3
    here.follow(hosted)
    here.answer(here.take(), data(0, diverging=(2, 5)))
    sent = here.take()
    assert offsets(sent.request) == [(0, 5)]
    assert sent.request.topics[0].partitions[0].last_fetched_epoch == 2


def test_a_truncation_that_is_refused_is_not_asked_for_without_pause() -> None:
    here = Following()
    hosted = FakeHosted(0)
    hosted.end_offset, hosted.last_epoch, hosted.refuses_truncation = 9, 3, True
    here.follow(hosted)
    here.answer(here.take(), data(0, diverging=(2, 5)))
    assert not here.peers.sent
    here.loop.run_for(25)
    assert offsets(here.take().request) == [(0, 9)]


def test_a_leader_whose_log_begins_later_makes_us_start_over() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    here.answer(here.take(), data(0, error=ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=50))
    assert offsets(here.take().request) == [(0, 50)]
    assert here.logger.events == ["starting over where the leader's log begins"]


def test_what_cannot_be_appended_is_asked_for_again_later() -> None:
    here = Following()
    bad, good = FakeHosted(0), FakeHosted(1)
    bad.append_error = ErrorCode.CORRUPT_MESSAGE
    here.follow(bad, good)
    here.answer(here.take(), data(0, b"abc"), data(1, b"abc"))
    sent = here.take()
    assert offsets(sent.request) == [(1, 3)]
    assert forgotten(sent.request) == [0]
    assert here.logger.events == ["cannot append what was fetched"]
    bad.append_error = ErrorCode.NONE
    here.answer(sent, data(1))
    here.loop.run_for(25)
    assert offsets(here.take().request) == []
    here.fetchers.check()


def test_a_replica_on_a_new_disk_waits_for_its_directory_without_a_warning() -> None:
    """A disk that was replaced on purpose is no damage, and must not look like it."""
    here = Following()
    hosted = FakeHosted(0)
    hosted.append_error = ErrorCode.LOG_DIR_NOT_FOUND
    here.follow(hosted)
    here.answer(here.take(), data(0, b"abc"))
    assert here.logger.events == []
    hosted.append_error = ErrorCode.NONE
    here.loop.run_for(1_000)
    assert offsets(here.take().request) == [(0, 0)]


def test_a_log_that_begins_later_tells_its_leader() -> None:
    here = Following()
    hosted = FakeHosted(0)
    hosted.end_offset = 9
    here.follow(hosted)
    sent = here.take()
    assert sent.request.topics[0].partitions[0].log_start_offset == 0
    here.answer(sent, data(0, high_watermark=9, log_start_offset=5))
    sent = here.take()
    assert sent.request.topics[0].partitions[0].log_start_offset == 5
    # And then there is no more to say.
    here.answer(sent, data(0, high_watermark=9, log_start_offset=5))
    assert offsets(here.take().request) == []


def test_a_log_that_begins_later_by_itself_tells_its_leader() -> None:
    here = Following()
    hosted = FakeHosted(0)
    hosted.end_offset = 9
    here.follow(hosted)
    hosted.log_start_offset = 5
    here.follow(hosted)
    here.answer(here.take(), data(0, high_watermark=9))
    assert here.take().request.topics[0].partitions[0].log_start_offset == 5


@pytest.mark.parametrize("is_flushed", [False, True])
def test_after_an_append_that_failed_half_way_the_next_fetch_goes_on_behind_what_was_written(
    is_flushed: bool,
) -> None:
    """A disk that is full at the second segment of an answer. From the old offset nothing would ever fit again."""
    here = Following()
    hosted = FakeHosted(0, is_flushed=is_flushed)
    hosted.append_error = ErrorCode.KAFKA_STORAGE_ERROR
    hosted.appended_before_error = 2
    here.follow(hosted)
    here.answer(here.take(), data(0, b"abc"))
    hosted.append_error = ErrorCode.NONE
    hosted.finish_flush()
    here.loop.run_for(25)
    assert offsets(here.take().request) == [(0, 2)]


def test_in_flushed_mode_the_next_fetch_waits_for_the_flush() -> None:
    here = Following()
    hosted, other = FakeHosted(0, is_flushed=True), FakeHosted(1)
    here.follow(hosted, other)
    here.answer(here.take(), data(0, b"abc"), data(1, b"x"))
    assert not here.peers.sent
    hosted.finish_flush()
    here.loop.run_for(0)
    assert offsets(here.take().request) == [(1, 1), (0, 3)]


def test_in_flushed_mode_what_is_written_is_flushed_before_the_first_fetch() -> None:
    here = Following()
    hosted = FakeHosted(0, is_flushed=True)
    hosted.end_offset = 7
    here.follow(hosted)
    # After a crash nobody else would ask for it.
    assert hosted.flushes == 1
    assert not here.peers.sent
    hosted.finish_flush()
    here.loop.run_for(0)
    assert offsets(here.take().request) == [(0, 7)]


def test_in_replicated_mode_nothing_is_flushed_to_be_followed() -> None:
    here = Following()
    hosted = FakeHosted(0)
    hosted.end_offset = 7
    here.follow(hosted)
    assert hosted.flushes == 0
    assert offsets(here.take().request) == [(0, 7)]


def test_a_partition_that_goes_away_unflushed_holds_nobody_up() -> None:
    here = Following()
    hosted, other = FakeHosted(0, is_flushed=True), FakeHosted(1)
    here.follow(hosted, other)
    here.answer(here.take(), data(0, b"abc"))
    assert not here.peers.sent
    here.fetchers.unfollow(hosted.key)
    here.loop.run_for(0)
    assert forgotten(here.take().request) == [0]
    hosted.finish_flush()
    here.loop.run_for(0)
    here.fetchers.check()


def test_a_disk_that_fails_stops_its_own_partitions_only() -> None:
    here = Following()
    lost, other = FakeHosted(0), FakeHosted(1)
    here.follow(lost, other)
    sent = here.take()
    lost.is_offline = True
    here.answer(sent, data(0, b"abc"), data(1, b"abc"))
    sent = here.take()
    assert (offsets(sent.request), forgotten(sent.request)) == ([(1, 3)], [0])
    with pytest.raises(OSError, match="failed"):
        here.follow(lost)
    assert len(here.fetchers) == 1
    here.answer(sent, data(1, b"d"))
    assert other.end_offset == 4


def test_a_disk_that_fails_before_the_flush_holds_nobody_up() -> None:
    here = Following()
    lost, other = FakeHosted(0, is_flushed=True), FakeHosted(1)
    here.follow(lost, other)
    here.answer(here.take(), data(0, b"abc"))
    lost.is_offline = True
    lost.finish_flush()
    here.loop.run_for(0)
    assert forgotten(here.take().request) == [0]
    here.fetchers.check()


def test_a_closed_broker_fetches_no_more() -> None:
    here = Following()
    hosted = FakeHosted(0)
    here.follow(hosted)
    here.fetchers.close()
    here.take().done(response(SESSION, data(0, b"abc")))
    here.loop.run_for(10_000)
    assert hosted.end_offset == 0
    assert not here.peers.sent


def test_replicas_being_added_are_throttled() -> None:
    here = Following()
    here.fetchers.set_throttle(1_000)
    adding, other = FakeHosted(0), FakeHosted(1)
    here.follow(adding, is_throttled=True)
    here.answer(here.take(), data(0, b"x" * 3_000))
    assert not here.peers.sent
    here.follow(other)
    assert named(here.take().request) == [1]
    here.fetchers.check()


# Proposals


class Proposing(Following):
    def __init__(self) -> None:
        super().__init__()
        self.asked: deque[tuple[AlterPartitionRequest, Callable[[Any], None]]] = deque()
        self.answered: list[FakeHosted] = []
        self.broker_epoch = 101
        self.follower_activity = FollowerActivity(SILENCE_MAX_MS, self.loop.clock.now)
        self.proposals = IsrProposals(
            self.environment,
            self.ask,
            self.logger,  # type: ignore[arg-type]
            me=ME,
            broker_epoch=lambda: self.broker_epoch,
            lag_max_ms=LAG_MAX_MS,
            follower_activity=self.follower_activity,
            live=LiveBrokers(1, 2, 3).live,
        )

    def ask(
        self, request: Message, version: int, done: Callable[[Any], None], *, channel: str, timeout_ms: int
    ) -> None:
        assert isinstance(request, AlterPartitionRequest)
        assert (version, channel) == (3, "alter")
        encode(request, version)
        self.asked.append((request, done))

    def lead(self, index: int, isr: tuple[int, ...] = (1, 2)) -> FakeHosted:
        hosted = FakeHosted(index, leader=ME)
        hosted.on_answered = self.answered.append
        hosted.assign(isr=isr, partition_epoch=2)
        return hosted

    def fetched(self, hosted: FakeHosted, replica: int, offset: int = 0) -> None:
        hosted.replication.fetched_by(replica, 100 + replica, offset, hosted.end_offset, self.loop.clock.now)
        if hosted.replication.wants_proposal:
            self.proposals.wants_proposal(hosted)

    def take_asked(self) -> tuple[list[tuple[int, list[int]]], Callable[..., None]]:
        """[(partition, proposed ISR)], and how to answer: (error for all) or nothing for success."""
        self.loop.run_for(0)
        self.proposals.check()
        request, done = self.asked.popleft()
        proposals = [
            (it.partition_index, [state.broker_id for state in it.new_isr_with_epochs])
            for topic in request.topics
            for it in topic.partitions
        ]

        def answer(error: int = 0) -> None:
            done(
                AlterPartitionResponse(
                    topics=[
                        AlterPartitionResponseTopic(
                            topic_id=topic.topic_id,
                            partitions=[
                                AlterPartitionResponsePartition(
                                    partition_index=it.partition_index,
                                    error_code=error,
                                    leader_id=ME,
                                    leader_epoch=it.leader_epoch,
                                    isr=[state.broker_id for state in it.new_isr_with_epochs],
                                    partition_epoch=it.partition_epoch + 1,
                                )
                                for it in topic.partitions
                            ],
                        )
                        for topic in request.topics
                    ]
                )
            )
            self.loop.run_for(0)
            self.proposals.check()

        def no_answer() -> None:
            done(None)
            self.loop.run_for(0)

        self.no_answer: Callable[[], None] = no_answer
        return proposals, answer


def test_the_proposals_of_one_turn_go_together_and_are_adopted() -> None:
    here = Proposing()
    partitions = [here.lead(0), here.lead(1)]
    for hosted in partitions:
        here.fetched(hosted, 3)
    proposals, answer = here.take_asked()
    assert proposals == [(0, [1, 2, 3]), (1, [1, 2, 3])]
    answer()
    assert [hosted.replication.isr for hosted in partitions] == [(1, 2, 3), (1, 2, 3)]
    assert here.answered == partitions
    for hosted in partitions:
        here.fetched(hosted, 2)
    here.loop.run_for(3 * LAG_MAX_MS)
    assert not here.asked


def test_one_request_to_the_controller_is_in_flight_at_a_time() -> None:
    here = Proposing()
    first, second = here.lead(0), here.lead(1)
    here.fetched(first, 3)
    _, answer = here.take_asked()
    here.fetched(second, 3)
    here.loop.run_for(0)
    assert not here.asked
    answer()
    assert here.take_asked()[0] == [(1, [1, 2, 3])]


def test_without_an_answer_a_proposal_is_made_again_from_the_state_then() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.take_asked()
    here.no_answer()
    assert not here.asked
    hosted.brokers.epochs[3] = None
    here.loop.run_for(25)
    # It may have been committed, so the epoch has to move even if nothing else does.
    proposals, answer = here.take_asked()
    assert proposals == [(0, [1, 2])]
    answer()
    assert hosted.replication.maximal_isr == (1, 2)


def test_failures_make_the_pauses_longer_and_a_new_controller_ends_them() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    for pause_ms in (25, 50, 100, 200):
        here.take_asked()
        here.no_answer()
        here.loop.run_for(pause_ms - 1)
        assert not here.asked
        here.loop.run_for(1)
    here.take_asked()
    here.no_answer()
    here.proposals.controller_changed()
    assert here.take_asked()[0] == [(0, [1, 2, 3])]


def test_a_refusal_concerns_its_partition_only() -> None:
    here = Proposing()
    first, second = here.lead(0), here.lead(1)
    here.fetched(first, 3)
    here.fetched(second, 3)
    here.loop.run_for(0)
    _, done = here.asked.popleft()
    done(
        AlterPartitionResponse(
            topics=[
                AlterPartitionResponseTopic(
                    topic_id=first.key[0],
                    partitions=[
                        AlterPartitionResponsePartition(
                            partition_index=0, error_code=ErrorCode.INVALID_UPDATE_VERSION
                        ),
                        AlterPartitionResponsePartition(
                            partition_index=1, leader_id=ME, leader_epoch=1, isr=[1, 2, 3], partition_epoch=3
                        ),
                    ],
                )
            ]
        )
    )
    assert first.replication.isr == (1, 2)
    assert second.replication.isr == (1, 2, 3)
    here.loop.run_for(1_000)
    # It waits for the image.
    assert not here.asked


def test_a_replica_that_stays_behind_is_dropped_without_anybody_asking() -> None:
    here = Proposing()
    hosted = here.lead(0, (1, 2, 3))
    here.proposals.wants_proposal(hosted)
    for replica in (2, 3):
        here.fetched(hosted, replica)
    here.loop.run_for(10 * LAG_MAX_MS)
    assert not here.asked
    hosted.end_offset = 1
    hosted.replication.appended(1)
    here.proposals.appended(hosted)
    here.fetched(hosted, 2, 1)
    here.loop.run_for(LAG_MAX_MS)
    assert not here.asked
    here.loop.run_for(LAG_MAX_MS)
    assert here.take_asked()[0] == [(0, [1, 2])]


def test_a_follower_that_has_stopped_fetching_is_dropped_before_it_lags() -> None:
    here = Proposing()
    hosted = here.lead(0, (1, 2, 3))
    hosted.core._is_silent = here.follower_activity.is_silent
    here.proposals.wants_proposal(hosted)
    for replica in (2, 3):
        here.fetched(hosted, replica)
        here.follower_activity.heard(replica, here.loop.clock.now)
    hosted.end_offset = 1
    hosted.replication.appended(1)
    here.proposals.appended(hosted)
    here.fetched(hosted, 2, 1)
    for _ in range(0, SILENCE_MAX_MS, 1_000):
        here.loop.run_for(1_000)
        here.follower_activity.heard(2, here.loop.clock.now)
    assert not here.asked
    here.loop.run_for(2_000)
    assert here.take_asked()[0] == [(0, [1, 2])]


def test_a_follower_that_was_silent_before_there_was_something_to_fetch_is_dropped_soon() -> None:
    here = Proposing()
    hosted = here.lead(0, (1, 2, 3))
    hosted.core._is_silent = here.follower_activity.is_silent
    for replica in (2, 3):
        here.fetched(hosted, replica)
        here.follower_activity.heard(replica, here.loop.clock.now)
    for _ in range(0, 3 * LAG_MAX_MS, 1_000):
        here.loop.run_for(1_000)
        here.follower_activity.heard(2, here.loop.clock.now)
    assert not here.asked
    hosted.end_offset = 1
    hosted.replication.appended(1)
    here.proposals.appended(hosted)
    here.fetched(hosted, 2, 1)
    here.loop.run_for(1_000)
    assert here.take_asked()[0] == [(0, [1, 2])]


def test_a_silent_broker_makes_no_work_for_partitions_where_it_is_not_in_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose last partition here has been moved, and which lives on elsewhere."""
    looks = 0

    def looked_at(core: Partition, now_ms: int) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(Partition, "proposal", looked_at)
    here = Proposing()
    busy = here.lead(0, (1, 2))
    here.follower_activity.heard(3, here.loop.clock.now)
    seconds = 10 * LAG_MAX_MS // 1_000
    for count in range(1, seconds + 1):
        busy.end_offset = count
        busy.replication.appended(count)
        here.proposals.appended(busy)
        here.loop.run_for(1_000)
        here.follower_activity.heard(2, here.loop.clock.now)
    # Those for laggards are twice as often as a replica may lag.
    assert 0 < looks <= 20


def test_partitions_that_are_in_order_are_not_looked_at() -> None:
    here = Proposing()
    everyone = [here.lead(index, (1, 2, 3)) for index in range(50)]
    for hosted in everyone:
        here.proposals.appended(hosted)
        for replica in (2, 3):
            here.fetched(hosted, replica)
    here.loop.run_for(LAG_MAX_MS)
    assert not here.proposals._unsettled
    assert not here.asked


def test_very_many_proposals_are_sent_in_portions() -> None:
    here = Proposing()
    everyone = [here.lead(index) for index in range(LOOKS_PER_TURN + 10)]
    for hosted in everyone:
        here.fetched(hosted, 3)
    proposals, answer = here.take_asked()
    assert len(proposals) == LOOKS_PER_TURN
    answer()
    assert len(here.take_asked()[0]) == 10


def test_a_partition_that_we_lead_no_longer_is_forgotten() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.proposals.forget(hosted)
    here.loop.run_for(LAG_MAX_MS)
    assert not here.asked


def test_a_partition_whose_disk_has_failed_is_not_told_of_answers() -> None:
    here = Proposing()
    lost, other, unasked = here.lead(0), here.lead(1), here.lead(2)
    here.fetched(lost, 3)
    here.fetched(other, 3)
    _, answer = here.take_asked()
    here.fetched(unasked, 3)
    lost.is_offline = unasked.is_offline = True
    answer()
    assert here.answered == [other]
    here.loop.run_for(LAG_MAX_MS)
    assert not here.proposals._wanted


def test_a_new_leader_is_looked_at_though_nobody_appends_and_nobody_comes() -> None:
    here = Proposing()
    hosted = FakeHosted(0, leader=ME)
    assert hosted.replication.wants_proposal
    here.proposals.wants_proposal(hosted)
    here.loop.run_for(2 * LAG_MAX_MS)
    assert here.take_asked()[0] == [(0, [1])]


def test_nothing_is_proposed_before_this_broker_is_registered() -> None:
    here = Proposing()
    here.broker_epoch = -1
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.loop.run_for(100)
    assert not here.asked
    here.broker_epoch = 101
    here.loop.run_for(LAG_MAX_MS)
    assert here.take_asked()[0] == [(0, [1, 2, 3])]


def test_a_closed_broker_proposes_no_more() -> None:
    here = Proposing()
    hosted = here.lead(0)
    here.fetched(hosted, 3)
    here.proposals.close()
    here.loop.run_for(10 * LAG_MAX_MS)
    assert not here.asked
