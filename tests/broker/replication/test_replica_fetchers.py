"""The fetch loops around the replication cores, with peers and partitions made of a few lines."""

from __future__ import annotations

import pytest

from penstock.broker.replication.replica_fetcher import FETCH_PATIENCE_MS, URGENT_MAX
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchRequest
from tests.broker.replication.stage import ME, SESSION, FakeHosted, Following
from tests.replication.making import data, forgotten, named, response


def offsets(request: FetchRequest) -> list[tuple[int, int]]:
    return [(it.partition, it.fetch_offset) for topic in request.topics for it in topic.partitions]


def starts(request: FetchRequest) -> list[tuple[int, int]]:
    return [(it.partition, it.log_start_offset) for topic in request.topics for it in topic.partitions]


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


def test_several_fetchers_of_one_leader_share_its_partitions() -> None:
    here = Following(fetchers_per_leader=2)
    here.follow(*[FakeHosted(index) for index in range(4)])
    sent = sorted([(sent.channel, named(sent.request)) for sent in here.peers.sent])
    assert sent == [("fetch-0", [1, 3]), ("fetch-1", [0, 2])]


def test_partitions_move_to_other_fetchers_when_there_are_more_and_nothing_is_appended_twice() -> None:
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


def test_more_than_the_second_loop_takes_wait_for_the_first() -> None:
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


def test_the_first_loop_does_not_wait_for_ever_for_the_second() -> None:
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
