"""The traps of replication that others have fallen into, one by one (RELIABILITY, section 5).

The simulator's mutants walk into the same traps and are found; these tests say in a few lines each what must
be done instead.
"""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import Append, Assignment, Remove, Truncate
from penstock.replication.follower import Fetcher, truncation_offset
from penstock.replication.partition import Truncation
from tests.replication.making import (
    LAG_MAX_MS,
    TOPIC,
    Leading,
    data,
    end_offset_of,
    following,
    key,
    named,
    response,
)


class Log:
    """Leader epochs as the log keeps them: (epoch, start), ascending."""

    def __init__(self, end_offset: int, *epochs: tuple[int, int]) -> None:
        self.end_offset = end_offset
        self.epochs = list(epochs)

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        known = [entry for entry in self.epochs if entry[0] <= epoch]
        later = [entry for entry in self.epochs if entry[0] > epoch]
        if not self.epochs or (not later and known[-1][0] != epoch):
            return -1, -1
        return known[-1][0] if known else epoch, later[0][1] if later else self.end_offset

    def truncate(self, offset: int) -> None:
        self.end_offset = offset
        self.epochs = [entry for entry in self.epochs if entry[1] < offset]

    def reconcile(self, leader: Log) -> int:
        """Ask until the leader has nothing to object; how often that was."""
        rounds = 0
        while self.epochs:
            last_epoch = self.epochs[-1][0]
            epoch, end_offset = leader.end_offset_for(last_epoch)
            if epoch == last_epoch and end_offset >= self.end_offset:
                break
            self.truncate(truncation_offset(epoch, end_offset, self.end_offset_for, self.end_offset))
            rounds += 1
            assert rounds < 10
        return rounds


def test_trap_1_truncation_goes_by_epoch_not_by_high_watermark() -> None:
    # KIP-101, first scenario: the follower has a record that is committed, and does not know that it is.
    follower, leader = Log(2, (0, 0)), Log(2, (0, 0), (1, 2))
    assert follower.reconcile(leader) == 0
    assert follower.end_offset == 2
    # Second scenario: two logs of equal length, of which one was written by another leader.
    follower, leader = Log(2, (0, 0)), Log(2, (0, 0), (1, 1))
    follower.reconcile(leader)
    assert follower.end_offset == 1


def test_trap_2_after_two_fast_elections_the_logs_are_compared_until_they_agree() -> None:
    # KIP-279: the follower wrote in epoch 2, the leader of epoch 3 never saw that, but has epoch 1 to 20.
    follower = Log(30, (0, 0), (2, 10))
    leader = Log(25, (0, 0), (1, 8), (3, 20))
    assert follower.reconcile(leader) == 2
    assert follower.end_offset == 8


def test_trap_2_an_epoch_in_which_nothing_was_written_is_answered_with_the_one_before() -> None:
    # A leader of epoch 1 that wrote nothing follows again: it has an epoch that nobody else has.
    follower = Log(10, (0, 0), (1, 10))
    leader = Log(12, (0, 0), (2, 10))
    follower.reconcile(leader)
    assert follower.end_offset == 10
    assert follower.epochs == [(0, 0)]


def test_trap_2_a_log_that_knows_no_epoch_so_old_begins_anew() -> None:
    follower = Log(30, (5, 0))
    leader = Log(25, (3, 0), (6, 20))
    follower.reconcile(leader)
    assert follower.end_offset == 0


def test_trap_2_without_any_epochs_of_our_own_only_the_leaders_end_is_known() -> None:
    assert truncation_offset(3, 17, lambda epoch: (-1, -1), 30) == 17
    assert truncation_offset(3, 40, lambda epoch: (-1, -1), 30) == 30


def test_trap_3_every_fetch_says_in_which_epoch_we_are_and_which_we_have() -> None:
    fetcher = Fetcher(1)
    fetcher.assign(key(0), 7, 42, 5, 3)
    request = fetcher.request(0, 101)
    assert request is not None
    asked = request.topics[0].partitions[0]
    assert (asked.current_leader_epoch, asked.fetch_offset, asked.last_fetched_epoch) == (7, 42, 5)
    assert asked.log_start_offset == 3
    assert request.replica_state is not None
    assert (request.replica_state.replica_id, request.replica_state.replica_epoch) == (1, 101)


def test_trap_3_a_fenced_follower_fetches_no_more_until_it_has_heard_of_the_new_epoch() -> None:
    fetcher = Fetcher(1)
    fetcher.assign(key(0), 7, 42, 5)
    request = fetcher.request(0, 101)
    assert request is not None
    answer = response(9, data(0, error=ErrorCode.FENCED_LEADER_EPOCH))
    assert fetcher.answered(request, answer, 0) == [Remove(key(0), ErrorCode.FENCED_LEADER_EPOCH)]
    assert fetcher.request(60_000, 101) is None
    fetcher.assign(key(0), 8, 42, 5)
    assert named(fetcher.request(60_000, 101)) == [0]


def test_trap_4_a_new_epoch_of_the_same_leader_is_reconciled_too() -> None:
    fetcher = Fetcher(1)
    fetcher.assign(key(0), 7, 42, 5)
    request = fetcher.request(0, 101)
    assert request is not None
    fetcher.answered(request, response(9, data(0)), 0)
    fetcher.assign(key(0), 8, 42, 5)
    request = fetcher.request(0, 101)
    assert request is not None
    asked = request.topics[0].partitions[0]
    assert (asked.current_leader_epoch, asked.last_fetched_epoch) == (8, 5)
    effects = fetcher.answered(request, response(9, data(0, diverging=(4, 40))), 0)
    assert effects == [Truncate(key(0), 4, 40)]


def test_trap_5_a_response_to_another_request_is_not_taken() -> None:
    fetcher = Fetcher(1)
    fetcher.assign(key(0), 7, 42, 5)
    first = fetcher.request(0, 101)
    assert first is not None
    fetcher.answered(first, None, 0)
    second = fetcher.request(1_000, 101)
    assert second is not None
    late = response(9, data(0, b"late", high_watermark=42))
    assert fetcher.answered(first, late, 1_000) == []
    assert fetcher.is_outstanding
    effects = fetcher.answered(second, response(9, data(0, b"mine", high_watermark=42)), 1_000)
    assert effects == [Append(key(0), b"mine", 42, 0)]
    assert fetcher.answered(second, response(9, data(0, b"again")), 1_000) == []
    fetcher.check()


def test_trap_5_an_answer_for_a_log_that_was_truncated_meanwhile_is_not_taken() -> None:
    fetcher = Fetcher(1)
    fetcher.assign(key(0), 7, 42, 5)
    fetcher.assign(key(1), 7, 10, 5)
    request = fetcher.request(0, 101)
    assert request is not None
    fetcher.assign(key(0), 8, 30, 4)
    answer = response(9, data(0, b"old"), data(1, b"good"))
    assert fetcher.answered(request, answer, 0) == [Append(key(1), b"good", 0, 0)]
    # And it is asked for anew, from where its log ends now.
    fetcher.moved(key(1), 11, 5, 0)
    request = fetcher.request(0, 101)
    assert request is not None
    assert [(it.partition, it.fetch_offset) for it in request.topics[0].partitions] == [(0, 30), (1, 11)]
    fetcher.check()


def test_trap_5_a_truncation_below_the_high_watermark_is_refused() -> None:
    partition = following(end_offset=10)
    partition.learned(6, 10)
    assert partition.may_truncate(6) is Truncation.FINE
    assert partition.may_truncate(5) is Truncation.REFUSED


def test_trap_6_a_new_leader_is_established_when_its_followers_have_what_it_had() -> None:
    leading = Leading(end_offset=10, high_watermark=4)
    assert not leading.partition.has_established
    leading.append()
    leading.fetch(2, 10)
    leading.fetch(3, 9)
    assert leading.high_watermark == 9
    assert not leading.partition.has_established
    leading.fetch(3, 10)
    assert leading.partition.has_established


def test_trap_7_the_high_watermark_stands_still_while_too_few_are_in_sync() -> None:
    leading = Leading((1, 2))
    leading.append(3)
    leading.fetch(2, 3)
    leading.assign(isr=(1,), elr=(2,), partition_epoch=2)
    leading.append(4)
    assert leading.high_watermark == 3
    leading.fetch(3, 7)
    # Proposed is not committed: only with the answer may it move.
    proposal = leading.propose()
    assert proposal is not None
    assert leading.high_watermark == 3
    leading.commit(proposal)
    assert leading.high_watermark == 7


def test_trap_7_nothing_is_committed_while_somebody_is_eligible_whatever_our_settings_say() -> None:
    """The controller has heard of a higher minimum than we have: it would elect 2, which lacks the record."""
    leading = Leading((1, 2), replicas=(1, 2), min_isr=1)
    leading.append()
    leading.assign(isr=(1,), elr=(2,), partition_epoch=2)
    assert leading.high_watermark == 0
    assert leading.partition.has_enough
    # Lowered again, and with it the eligible leader was given up.
    leading.assign(isr=(1,), elr=(), partition_epoch=3)
    assert leading.high_watermark == 1


def test_trap_7_an_answer_may_make_somebody_eligible_before_the_settings_come() -> None:
    leading = Leading((1, 2), replicas=(1, 2), min_isr=1)
    leading.append()
    leading.now_ms = LAG_MAX_MS + 1
    proposal = leading.propose()
    assert proposal is not None
    committed = leading.assignment._replace(isr=(1,), elr=(2,), partition_epoch=2)
    leading.partition.answered(proposal, ErrorCode.NONE, committed, leading.now_ms)
    leading.partition.check()
    assert leading.high_watermark == 0
    leading.assignment = committed
    leading.assign()
    leading.partition.min_isr = 2
    assert leading.high_watermark == 0


def test_trap_8_what_an_earlier_life_of_a_broker_had_is_worth_nothing() -> None:
    leading = Leading()
    leading.append(9)
    leading.fetch(2, 9)
    leading.fetch(3, 2, broker_epoch=203)
    assert leading.fetch(3, 9, broker_epoch=103) == ErrorCode.STALE_BROKER_EPOCH
    assert end_offset_of(leading.partition, 3) == 2
    assert leading.high_watermark == 2


def test_trap_8_the_image_may_know_of_a_new_life_before_it_has_fetched() -> None:
    leading = Leading((1, 2))
    leading.brokers.epochs[3] = 203
    assert leading.fetch(3, 0, broker_epoch=103) == ErrorCode.STALE_BROKER_EPOCH
    assert leading.members() is None


def test_trap_8_a_life_that_the_image_does_not_know_yet_may_fetch_but_not_join() -> None:
    leading = Leading((1, 2))
    assert leading.fetch(3, 0, broker_epoch=203) == ErrorCode.NONE
    assert leading.members() is None
    leading.brokers.epochs[3] = 203
    assert leading.members() == [1, 2, 3]


def test_trap_9_who_is_being_added_holds_the_high_watermark_back_at_once() -> None:
    leading = Leading((1, 2))
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 5)
    assert leading.propose() is not None
    assert leading.partition.maximal_isr == (1, 2, 3)
    leading.append(1)
    leading.fetch(2, 6)
    assert leading.high_watermark == 5
    leading.fetch(3, 6)
    assert leading.high_watermark == 6


def test_trap_9_who_is_being_dropped_holds_it_back_until_that_is_committed() -> None:
    leading = Leading()
    leading.append(5)
    leading.now_ms = LAG_MAX_MS + 1
    leading.fetch(2, 5)
    proposal = leading.propose()
    assert proposal is not None
    assert [broker for broker, _ in proposal.isr] == [1, 2]
    assert leading.high_watermark == 0
    leading.commit(proposal)
    assert leading.high_watermark == 5


def test_trap_9_one_proposal_is_in_flight_at_a_time() -> None:
    leading = Leading((1,))
    leading.fetch(2, 0)
    assert leading.members() == [1, 2]
    leading.fetch(3, 0)
    assert leading.members() is None


def test_trap_9_who_joins_has_reached_the_start_of_the_epoch_not_only_the_high_watermark() -> None:
    leading = Leading((1, 2), end_offset=10, high_watermark=4)
    leading.fetch(3, 9)
    assert leading.members() is None
    leading.fetch(3, 10)
    assert leading.members() == [1, 2, 3]


def test_trap_9_who_joins_has_reached_the_high_watermark_not_only_the_start_of_the_epoch() -> None:
    leading = Leading((1, 2))
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 4)
    assert leading.members() is None


def test_trap_10_a_retry_is_built_from_what_is_true_then() -> None:
    leading = Leading((1, 2))
    leading.fetch(3, 0)
    first = leading.propose()
    assert first is not None
    leading.refuse(first, None)
    leading.brokers.epochs[3] = None
    second = leading.propose()
    assert second is not None
    assert first.isr == ((1, 101), (2, -1), (3, 103))
    assert second.isr == ((1, 101), (2, -1))


def test_trap_10_without_an_answer_who_might_have_been_added_still_counts() -> None:
    leading = Leading((1, 2))
    leading.append(5)
    leading.fetch(2, 5)
    leading.fetch(3, 5)
    for error in (None, ErrorCode.NOT_CONTROLLER, ErrorCode.REQUEST_TIMED_OUT):
        proposal = leading.propose()
        assert proposal is not None
        leading.refuse(proposal, error)
        assert leading.partition.maximal_isr == (1, 2, 3)
    leading.append(1)
    leading.fetch(2, 6)
    assert leading.high_watermark == 5
    # It was committed all along.
    leading.assign(partition_epoch=2, isr=(1, 2, 3))
    assert leading.high_watermark == 5
    leading.fetch(3, 6)
    assert leading.high_watermark == 6


def test_trap_10_a_leader_is_always_in_what_it_proposes() -> None:
    leading = Leading()
    leading.append(1)
    leading.now_ms = LAG_MAX_MS + 1
    leading.brokers.epochs.clear()
    proposal = leading.propose()
    assert proposal is not None
    assert proposal.isr == ((1, -1),)


def test_trap_11_an_assignment_that_is_older_is_refused() -> None:
    leading = Leading(leader_epoch=5)
    assert leading.assign(partition_epoch=9, isr=(1, 2))
    newest = leading.assignment
    assert not leading.assign(partition_epoch=8, isr=(1, 2, 3))
    leading.assignment = newest
    assert not leading.assign(leader_epoch=4, leader=2, partition_epoch=20)
    assert leading.partition.is_leader
    assert leading.partition.isr == (1, 2)
    assert leading.partition.partition_epoch == 9


def test_trap_11_a_new_leader_epoch_begins_its_partition_epochs_where_it_says() -> None:
    leading = Leading()
    assert leading.assign(partition_epoch=9)
    assert leading.assign(leader_epoch=2, partition_epoch=10)
    assert not leading.assign(leader_epoch=2, partition_epoch=9)


def test_trap_16_in_flushed_mode_a_leader_counts_what_is_on_its_disk() -> None:
    leading = Leading((1, 2), replicas=(1, 2))
    leading.end_offset = 5
    leading.fetch(2, 5)
    assert leading.high_watermark == 0
    leading.partition.appended(3)
    assert leading.high_watermark == 3


def test_a_topic_that_comes_back_under_another_id_is_another_partition() -> None:
    fetcher = Fetcher(1)
    fetcher.assign((TOPIC, 0), 7, 42, 5)
    fetcher.assign((bytes(16), 0), 0, 0, -1)
    request = fetcher.request(0, 101)
    assert request is not None
    assert [topic.topic_id for topic in request.topics] == [TOPIC, bytes(16)]


def test_an_assignment_is_ordered_by_leader_epoch_first() -> None:
    partition = following(leader=2, leader_epoch=3)
    assert partition.assign(Assignment(3, 4, 0, (1, 2, 3), (3,)), end_offset=0, now_ms=0)
    assert partition.partition_epoch == 0


def test_a_deletion_waits_for_those_who_are_eligible_to_lead() -> None:
    leading = Leading(end_offset=10, high_watermark=10)
    leading.assign(isr=(1,), elr=(2,), partition_epoch=2)
    assert not leading.partition.have_deleted_before(5), "the eligible one would bring it back"
    leading.assign(isr=(1,), elr=(), partition_epoch=3)
    assert leading.partition.have_deleted_before(5)


def test_a_follower_that_has_not_deleted_what_the_leader_has_is_not_in_sync() -> None:
    """It is not waited for when a deletion is acknowledged, and would bring the records back if it led."""
    leading = Leading(end_offset=10, high_watermark=10)
    leading.assign(isr=(1,), elr=(), partition_epoch=2)
    leading.partition.begins_at(5)
    assert leading.partition.have_deleted_before(5)
    leading.fetch(2, 10, log_start_offset=4)
    assert leading.members() is None
    leading.fetch(2, 10, log_start_offset=5)
    assert leading.members() == [1, 2]


def test_a_deletion_between_a_fetch_and_the_proposal_keeps_the_follower_out() -> None:
    leading = Leading(end_offset=10, high_watermark=10)
    leading.assign(isr=(1,), elr=(), partition_epoch=2)
    leading.fetch(2, 10, log_start_offset=0)
    leading.partition.begins_at(5)
    assert leading.members() is None
