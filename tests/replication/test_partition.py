"""One partition's leader and followers: who counts, who is in sync, what is committed."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import NO_LEADER, Assignment
from penstock.replication.partition import Partition, Truncation
from tests.replication.making import LAG_MAX_MS, Leading, LiveBrokers, end_offset_of, following

# The high watermark


def test_the_high_watermark_is_the_least_end_of_the_in_sync_replicas() -> None:
    leading = Leading()
    leading.append(10)
    leading.fetch(2, 4)
    assert leading.high_watermark == 0
    leading.fetch(3, 7)
    assert leading.high_watermark == 4
    leading.fetch(2, 10)
    assert leading.high_watermark == 7


def test_a_leader_alone_commits_what_it_appends() -> None:
    leading = Leading((1,), replicas=(1,))
    leading.append(3)
    assert leading.high_watermark == 3
    assert leading.partition.has_established


def test_what_is_required_to_be_in_sync_is_never_more_than_there_are_replicas() -> None:
    leading = Leading((1,), replicas=(1,), min_isr=3)
    assert leading.partition.min_isr == 1
    assert Leading(min_isr=5).partition.min_isr == 3


def test_a_replica_out_of_sync_does_not_hold_the_high_watermark_back() -> None:
    leading = Leading((1, 2))
    leading.append(5)
    leading.fetch(2, 5)
    assert leading.high_watermark == 5


def test_the_high_watermark_never_passes_what_counts_of_our_own_log() -> None:
    leading = Leading()
    # In flushed mode the followers may be ahead of our own disk.
    leading.fetch(2, 5)
    leading.fetch(3, 5)
    leading.append(3)
    assert leading.high_watermark == 3


def test_the_high_watermark_does_not_go_back_with_a_follower() -> None:
    leading = Leading()
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 5)
    leading.fetch(3, 2)
    assert leading.high_watermark == 5
    assert end_offset_of(leading.partition, 3) == 2


def test_the_high_watermark_moves_at_once_when_fewer_need_to_be_in_sync() -> None:
    leading = Leading((1,))
    leading.append(2)
    assert leading.high_watermark == 0
    leading.partition.min_isr = 1
    assert leading.high_watermark == 2


def test_a_leader_elected_again_begins_a_new_epoch_at_its_end() -> None:
    leading = Leading()
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 5)
    leading.append(2)
    assert leading.assign(leader_epoch=2, partition_epoch=2)
    assert leading.partition.epoch_start_offset == 7
    assert leading.high_watermark == 5
    assert end_offset_of(leading.partition, 2) == -1
    assert not leading.partition.has_established


def test_in_flushed_mode_a_new_leader_counts_only_what_is_on_its_disk() -> None:
    partition = Partition(1, live=LiveBrokers(1).live, lag_max_ms=LAG_MAX_MS, min_isr=1)
    partition.assign(Assignment(1, 1, 1, (1,), (1,)), end_offset=9, now_ms=0, counted_end=6)
    assert partition.high_watermark == 6
    assert partition.epoch_start_offset == 9
    partition.appended(9)
    assert partition.has_established


# Fetches


def test_a_reader_may_go_on_at_a_follower_within_the_followers_log() -> None:
    leading = Leading(end_offset=9)
    assert not leading.partition.has(2, 0)
    leading.partition.fetched_by(2, 102, 7, 9, 0, log_start_offset=4)
    assert [offset for offset in range(10) if leading.partition.has(2, offset)] == [4, 5, 6, 7]
    assert not leading.partition.has(3, 5)
    assert not leading.partition.has(1, 5)


def test_a_fetch_of_somebody_who_is_no_replica_is_refused() -> None:
    leading = Leading()
    assert leading.fetch(4, 0) == ErrorCode.UNKNOWN_LEADER_EPOCH


def test_a_follower_does_not_serve_fetches() -> None:
    assert following().fetched_by(3, 103, 0, 0, 0) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_replica_added_by_a_reassignment_may_fetch_and_join() -> None:
    leading = Leading()
    leading.append(4)
    leading.assign(partition_epoch=2, replicas=(1, 2, 3, 4))
    leading.fetch(2, 4)
    leading.fetch(3, 4)
    assert leading.fetch(4, 4) == ErrorCode.NONE
    assert leading.members() == [1, 2, 3, 4]


def test_a_replica_taken_away_is_forgotten() -> None:
    leading = Leading()
    leading.fetch(3, 0)
    leading.assign(partition_epoch=2, replicas=(1, 2), isr=(1, 2))
    assert leading.fetch(3, 0) == ErrorCode.UNKNOWN_LEADER_EPOCH
    assert end_offset_of(leading.partition, 3) == -1


# Who is in sync


def test_a_follower_that_has_caught_up_is_proposed_with_its_broker_epoch() -> None:
    leading = Leading((1, 2))
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 4)
    assert leading.members() is None
    assert not leading.partition.wants_proposal
    leading.fetch(3, 5)
    assert leading.partition.wants_proposal
    proposal = leading.propose()
    assert proposal is not None
    assert proposal.isr == ((1, 101), (2, 102), (3, 103))
    assert proposal.leader_epoch == 1
    assert proposal.partition_epoch == 1


@pytest.mark.parametrize("live_epoch", [None, 102, 104])
def test_a_follower_joins_only_as_the_broker_it_is_now(live_epoch: int | None) -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    leading.brokers.epochs[3] = live_epoch
    assert leading.members() is None


def test_a_member_that_has_not_fetched_yet_is_listed_without_a_broker_epoch() -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    proposal = leading.propose()
    assert proposal is not None
    assert proposal.isr == ((1, 101), (2, -1), (3, 103))


def test_a_follower_that_stays_behind_is_dropped_after_the_lag() -> None:
    leading = Leading()
    leading.fetch(2, 0)
    leading.fetch(3, 0)
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 1)
    leading.now_ms = LAG_MAX_MS
    assert leading.members() is None
    leading.now_ms += 1
    leading.fetch(2, 5)
    assert leading.members() == [1, 2]


def test_a_follower_that_never_fetches_is_dropped_after_the_lag() -> None:
    leading = Leading()
    leading.append(1)
    leading.now_ms = LAG_MAX_MS + 1
    leading.fetch(2, 1)
    assert leading.members() == [1, 2]


def test_a_follower_that_is_silent_is_dropped_before_the_lag_if_it_lacks_anything() -> None:
    leading = Leading()
    leading.append(1)
    leading.fetch(2, 1)
    leading.fetch(3, 1)
    leading.silent.add(3)
    assert leading.members() is None
    leading.append(1)
    leading.fetch(2, 2)
    assert leading.members() == [1, 2]


def test_a_follower_of_a_busy_leader_is_in_sync_though_it_never_reaches_the_end() -> None:
    leading = Leading((1, 2), replicas=(1, 2))
    leading.append(10)
    leading.fetch(2, 0)
    for _ in range(30):
        at_last_fetch = leading.end_offset
        leading.now_ms += 1_000
        leading.append(10)
        leading.fetch(2, at_last_fetch)
        assert leading.members() is None


def test_a_follower_that_fetches_but_falls_behind_is_dropped() -> None:
    leading = Leading((1, 2), replicas=(1, 2))
    leading.append(10)
    leading.fetch(2, 0)
    for fetched in range(1, 12):
        leading.now_ms += 1_000
        leading.append(10)
        leading.fetch(2, fetched)
    assert leading.members() == [1]


def test_a_quiet_partition_is_in_sync_for_ever_and_its_clock_starts_with_the_append() -> None:
    leading = Leading((1, 2), replicas=(1, 2))
    leading.fetch(2, 0)
    leading.now_ms = 100 * LAG_MAX_MS
    assert leading.members() is None
    assert leading.partition.is_settled
    leading.append(1)
    assert not leading.partition.is_settled
    assert leading.members() is None
    leading.now_ms += LAG_MAX_MS
    assert leading.members() is None
    leading.now_ms += 1
    assert leading.members() == [1]


def test_one_proposal_lets_one_in_and_drops_another() -> None:
    leading = Leading((1, 2))
    leading.append(3)
    leading.now_ms = LAG_MAX_MS + 1
    leading.fetch(3, 3)
    assert leading.members() == [1, 3]


def test_a_member_that_was_dropped_comes_back_by_a_new_fetch_not_by_an_old_one() -> None:
    leading = Leading()
    leading.fetch(3, 0)
    leading.assign(partition_epoch=2, isr=(1, 2))
    assert leading.members() is None
    leading.fetch(3, 0)
    assert leading.members() == [1, 2, 3]


def test_a_settled_partition_needs_no_look() -> None:
    leading = Leading()
    leading.append(1)
    leading.fetch(2, 1)
    assert not leading.partition.is_settled
    leading.fetch(3, 1)
    assert leading.partition.is_settled
    # Whoever is missing will fetch when it is back.
    leading.assign(partition_epoch=2, isr=(1, 2))
    assert leading.partition.is_settled
    leading.fetch(3, 1)
    assert leading.propose() is not None
    assert not leading.partition.is_settled
    assert following().is_settled


# Proposals


def test_a_committed_proposal_is_adopted_and_its_image_changes_nothing() -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    proposal = leading.propose()
    assert proposal is not None
    leading.commit(proposal)
    assert leading.partition.isr == (1, 2, 3)
    assert leading.partition.partition_epoch == 2
    assert leading.assign()
    assert leading.partition.isr == (1, 2, 3)
    assert leading.members() is None


def test_the_image_of_the_same_partition_epoch_may_bring_other_replicas() -> None:
    """The last replica of a reassignment joins, and the controller completes it in the same record."""
    leading = Leading((1, 2), replicas=(1, 2, 3))
    leading.fetch(3, 0)
    proposal = leading.propose()
    assert proposal is not None
    leading.commit(proposal)
    leading.assign(replicas=(1, 3), isr=(1, 3), partition_epoch=2)
    assert leading.partition.replicas == (1, 3)


@pytest.mark.parametrize("error", [ErrorCode.INELIGIBLE_REPLICA, ErrorCode.INVALID_REQUEST, None])
def test_a_replica_that_the_image_takes_away_is_not_waited_for_though_it_was_proposed(
    error: ErrorCode | None,
) -> None:
    """The answer that completes a reassignment names no replicas: until the image comes, the old one may rejoin."""
    leading = Leading((1, 2), replicas=(1, 2, 3, 4))
    leading.fetch(4, 0)
    proposal = leading.propose()
    assert proposal is not None
    leading.commit(proposal)
    leading.fetch(3, 0)
    late = leading.propose()
    assert late is not None
    leading.append()
    leading.assign(replicas=(1, 2, 4))
    leading.fetch(2, 1)
    leading.fetch(4, 1)
    assert leading.high_watermark == 1
    leading.refuse(late, error)
    assert leading.partition.maximal_isr == (1, 2, 4)


def test_an_image_that_is_newer_cancels_what_is_in_flight() -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    proposal = leading.propose()
    assert proposal is not None
    leading.assign(partition_epoch=2, isr=(1,))
    assert leading.partition.proposal_in_flight is None
    assert leading.partition.maximal_isr == (1,)
    leading.refuse(proposal, ErrorCode.INVALID_UPDATE_VERSION)
    assert leading.partition.maximal_isr == (1,)


@pytest.mark.parametrize(
    "error", [ErrorCode.INVALID_UPDATE_VERSION, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_TOPIC_ID]
)
def test_a_leader_that_is_behind_waits_for_the_image_but_not_for_ever(error: ErrorCode) -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    proposal = leading.propose()
    assert proposal is not None
    leading.refuse(proposal, error)
    assert leading.members() is None
    leading.now_ms = LAG_MAX_MS
    assert leading.members() == [1, 2, 3]


def test_an_ineligible_replica_is_let_alone_until_it_fetches_again() -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    proposal = leading.propose()
    assert proposal is not None
    leading.refuse(proposal, ErrorCode.INELIGIBLE_REPLICA)
    # What was refused may have been sent before and be under way still: the epoch has to move.
    resolving = leading.propose()
    assert resolving is not None
    assert [broker for broker, _ in resolving.isr] == [1, 2]
    leading.commit(resolving)
    assert leading.members() is None
    leading.fetch(3, 0)
    assert leading.members() == [1, 2, 3]


def test_a_controller_that_writes_nothing_down_resolves_too() -> None:
    leading = Leading((1, 2))
    leading.append(1)
    leading.fetch(2, 1)
    leading.fetch(3, 1)
    proposal = leading.propose()
    assert proposal is not None
    leading.refuse(proposal, ErrorCode.INELIGIBLE_REPLICA)
    leading.append(1)
    leading.fetch(2, 2)
    assert leading.high_watermark == 1
    resolving = leading.propose()
    assert resolving is not None
    leading.partition.answered(resolving, ErrorCode.NONE, leading.assignment, leading.now_ms)
    assert leading.high_watermark == 2
    assert leading.partition.maximal_isr == (1, 2)


# The follower


def test_a_follower_knows_of_nothing_committed_that_it_does_not_have() -> None:
    partition = following(end_offset=3)
    partition.learned(10, 3)
    assert partition.high_watermark == 3
    partition.learned(10, 8)
    assert partition.high_watermark == 8
    partition.learned(5, 8)
    assert partition.high_watermark == 8


def test_a_follower_that_becomes_the_leader_keeps_its_high_watermark() -> None:
    partition = following(end_offset=8)
    partition.learned(5, 8)
    assert partition.assign(Assignment(1, 2, 2, (1, 2, 3), (1, 2)), end_offset=8, now_ms=0)
    assert partition.high_watermark == 5
    assert not partition.has_established
    partition.fetched_by(2, 102, 8, 8, 0)
    assert partition.high_watermark == 8
    assert partition.has_established
    partition.check()


def test_a_leader_that_is_replaced_follows_and_may_truncate_what_was_not_committed() -> None:
    leading = Leading()
    leading.append(5)
    leading.fetch(2, 3)
    leading.fetch(3, 3)
    leading.assign(leader=2, leader_epoch=2, partition_epoch=2)
    assert not leading.partition.is_leader
    assert leading.partition.may_truncate(3) is Truncation.FINE
    leading.partition.truncated(3)
    assert leading.high_watermark == 3


def test_a_checkpoint_is_a_hint_and_refuses_nothing() -> None:
    partition = following(end_offset=9, high_watermark=7)
    assert partition.high_watermark == 7
    assert partition.may_truncate(4) is Truncation.FINE
    partition.truncated(4)
    assert partition.high_watermark == 4
    partition.check()


def test_after_an_unclean_election_committed_records_may_go() -> None:
    partition = following(end_offset=9)
    partition.learned(7, 9)
    assert partition.may_truncate(4) is Truncation.REFUSED
    partition.assign(Assignment(3, 2, 2, (1, 2, 3), (3,), is_recovering=True), end_offset=9, now_ms=0)
    assert partition.may_truncate(4) is Truncation.UNCLEAN
    partition.truncated(4)
    assert partition.high_watermark == 4
    assert partition.may_truncate(4) is Truncation.FINE


@pytest.mark.parametrize("was_leader", [False, True])
def test_an_election_that_was_not_seen_may_have_been_unclean(was_leader: bool) -> None:
    """Who was cut off or asleep hears of the election and of what came after it as one change."""
    if was_leader:
        leading = Leading(end_offset=9)
        leading.fetch(2, 9)
        leading.fetch(3, 9)
        partition = leading.partition
    else:
        partition = following(end_offset=9)
        partition.learned(9, 9)
    assert partition.high_watermark == 9
    partition.assign(Assignment(3, 2, 3, (1, 2, 3), (3, 2)), end_offset=9, now_ms=0)
    assert partition.may_truncate(4) is Truncation.UNCLEAN
    partition.learned(9, 9)
    assert partition.may_truncate(4) is Truncation.REFUSED


def test_an_election_that_was_seen_and_is_clean_takes_nothing_committed() -> None:
    partition = following(end_offset=9)
    partition.learned(7, 9)
    partition.assign(Assignment(3, 2, 2, (1, 2, 3), (3, 2)), end_offset=9, now_ms=0)
    assert partition.may_truncate(4) is Truncation.REFUSED


def test_once_our_log_agrees_with_a_clean_leaders_nothing_committed_may_go_again() -> None:
    partition = following(end_offset=9)
    unclean = Assignment(3, 2, 2, (1, 2, 3), (3,), is_recovering=True)
    partition.assign(unclean, end_offset=9, now_ms=0)
    partition.learned(9, 9)
    assert partition.may_truncate(4) is Truncation.UNCLEAN
    partition.assign(unclean._replace(partition_epoch=3, is_recovering=False), end_offset=9, now_ms=0)
    assert partition.may_truncate(4) is Truncation.UNCLEAN
    partition.learned(9, 9)
    assert partition.may_truncate(4) is Truncation.REFUSED


def test_a_follower_that_starts_over_has_all_that_is_committed_before() -> None:
    partition = following(end_offset=9)
    partition.learned(7, 9)
    partition.started_over(50)
    assert partition.high_watermark == 50
    partition.check()


def test_a_partition_without_a_leader_has_followers_only() -> None:
    leading = Leading()
    leading.append(3)
    assert leading.assign(leader=NO_LEADER, leader_epoch=2, partition_epoch=2, isr=(), elr=(1, 2))
    assert not leading.partition.is_leader
    assert leading.partition.elr == (1, 2)
    assert leading.propose() is None
