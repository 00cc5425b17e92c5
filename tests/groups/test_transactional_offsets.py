"""TxnOffsetCommit: offsets that count when the transaction commits, and only then."""

from __future__ import annotations

import pytest

from penstock.groups.changes import OffsetCommitted, OffsetRemoved
from penstock.groups.settings import GROUPS_MAX
from penstock.protocol.errors import ErrorCode
from tests.groups.conversation import (
    DAY_MS,
    DELAY_MS,
    GROUP,
    Conversation,
    Ended,
    InTransaction,
    topic_id,
)

P0 = ("orders", 0)
P1 = ("orders", 1)
# Producer ids.
ONE, TWO = 7, 8


def unstable(talk: Conversation, *partitions: tuple[str, int], group: str = GROUP) -> list[tuple[str, int]]:
    found = talk.fetch(*partitions, group=group, stable=True)
    return [key for key, part in found.items() if part.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT]


def test_an_offset_is_seen_once_its_transaction_has_committed() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    assert talk.commit_in_transaction(ONE, {P0: 5, P1: 6}, epoch=3) == [ErrorCode.NONE, ErrorCode.NONE]
    assert talk.offsets() == {P0: 1}
    assert unstable(talk, P0, P1) == [P0, P1]
    assert unstable(talk) == [P0], "of all offsets, those that are committed are listed"
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 5, P1: 6}
    assert unstable(talk, P0, P1) == []
    assert [(logged.producer_id, logged.producer_epoch) for logged in talk.log[1:3]] == [  # type: ignore[union-attr]
        (ONE, 3),
        (ONE, 3),
    ]
    assert talk.log[3:] == [Ended(ONE, True)]
    assert talk.restarted().offsets() == {P0: 5, P1: 6}


def test_an_offset_of_an_aborted_transaction_is_never_seen() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.commit_in_transaction(ONE, {P0: 5, P1: 6})
    talk.end_transaction(ONE, commit=False)
    assert talk.offsets() == {P0: 1}
    assert unstable(talk, P0, P1) == []
    assert talk.restarted().offsets() == {P0: 1}


def test_the_next_coordinator_waits_for_the_end_of_the_transaction_too() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit_in_transaction(TWO, {P1: 6})
    after = talk.restarted()
    assert after.offsets() == {}
    assert unstable(after, P0, P1) == [P0, P1]
    after.end_transaction(ONE, commit=True)
    after.end_transaction(TWO, commit=False)
    assert after.offsets() == {P0: 5}
    assert after.restarted().offsets() == {P0: 5}


def test_a_marker_counts_when_it_is_committed() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.hold = True
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {}
    assert unstable(talk, P0) == [P0]
    talk.commit_all()
    assert talk.offsets() == {P0: 5}
    assert unstable(talk, P0) == []


def test_a_marker_that_could_not_be_written_changes_nothing() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.hold = True
    talk.end_transaction(ONE, commit=False)
    talk.fail_all()
    talk.hold = False
    assert unstable(talk, P0) == [P0]
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 5}


def test_a_commit_that_could_not_be_written_is_in_no_transaction() -> None:
    talk = Conversation()
    talk.hold = True
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.fail_all()
    talk.hold = False
    assert unstable(talk, P0) == []
    assert talk.groups() == []
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {}


def test_the_next_transaction_may_begin_before_the_marker_of_the_last_is_committed() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.hold = True
    talk.end_transaction(ONE, commit=True)
    talk.commit_in_transaction(ONE, {P0: 8}, epoch=1)
    talk.commit_all()
    talk.hold = False
    assert talk.offsets() == {P0: 5}
    assert unstable(talk, P0) == [P0]
    talk.end_transaction(ONE, commit=False)
    assert talk.offsets() == {P0: 5}


def test_the_last_commit_of_a_transaction_counts() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit_in_transaction(ONE, {P0: 3})
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 3}


def test_a_plain_commit_after_that_of_the_transaction_stays() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5, P1: 6})
    talk.commit({P0: 2})
    assert talk.offsets() == {P0: 2}
    assert unstable(talk, P0) == [P0], "as in Kafka, although the outcome is known"
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 2, P1: 6}
    assert talk.restarted().offsets() == {P0: 2, P1: 6}


def test_of_two_transactions_the_one_that_wrote_last_stays_however_they_end() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit_in_transaction(TWO, {P0: 7})
    talk.end_transaction(TWO, commit=True)
    assert talk.offsets() == {P0: 7}
    assert unstable(talk, P0) == [P0]
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 7}
    assert unstable(talk, P0) == []
    assert talk.restarted().offsets() == {P0: 7}


def test_one_transaction_may_commit_for_several_groups() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5}, group="a")
    talk.commit_in_transaction(ONE, {P0: 6}, group="b")
    talk.end_transaction(ONE, commit=True)
    assert (talk.offsets("a"), talk.offsets("b")) == ({P0: 5}, {P0: 6})


def test_a_marker_of_an_unknown_producer_has_no_effect() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.end_transaction(TWO, commit=True)
    assert unstable(talk, P0) == [P0]


# Who may commit (KIP-447)


def test_a_producer_that_names_no_member_may_commit_for_any_group() -> None:
    talk = Conversation()
    talk.stable(1)
    assert talk.commit_in_transaction(ONE, {P0: 5}, version=2) == [ErrorCode.NONE]


@pytest.mark.parametrize(
    ("is_member", "behind", "error"),
    [
        (True, 0, ErrorCode.NONE),
        (True, 1, ErrorCode.ILLEGAL_GENERATION),
        (False, 0, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_a_producer_commits_for_a_member_of_this_generation(
    is_member: bool, behind: int, error: ErrorCode
) -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    name = member if is_member else "stranger"
    errors = talk.commit_in_transaction(ONE, {P0: 5}, member_id=name, generation=generation - behind)
    assert errors == [error]
    assert bool(unstable(talk, P0)) == (error is ErrorCode.NONE)


def test_the_old_incarnation_of_a_static_member_is_fenced() -> None:
    talk = Conversation()
    joined = talk.join(instance="i")
    talk.sleep(DELAY_MS)
    member, generation = joined.answer.member_id, joined.answer.generation_id
    talk.sync(member, generation, {member: b""}, instance="i")
    talk.join(instance="i")
    errors = talk.commit_in_transaction(ONE, {P0: 5}, member_id=member, generation=generation, instance="i")
    assert errors == [ErrorCode.FENCED_INSTANCE_ID]
    errors = talk.commit_in_transaction(ONE, {P0: 5}, member_id=member, generation=generation, instance="j")
    assert errors == [ErrorCode.UNKNOWN_MEMBER_ID]


def test_a_member_may_commit_in_a_transaction_while_its_group_rebalances() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    talk.join_new()
    assert talk.state() == "PreparingRebalance"
    errors = talk.commit_in_transaction(ONE, {P0: 5}, member_id=member, generation=generation)
    assert errors == [ErrorCode.NONE]
    talk.join(member)
    assert talk.state() == "CompletingRebalance"
    errors = talk.commit_in_transaction(ONE, {P0: 5}, member_id=member, generation=generation)
    assert errors == [ErrorCode.ILLEGAL_GENERATION]
    errors = talk.commit_in_transaction(ONE, {P0: 5}, member_id=member, generation=generation + 1)
    assert errors == [ErrorCode.NONE], "a plain commit would get REBALANCE_IN_PROGRESS"


def test_a_commit_in_a_transaction_is_no_heartbeat() -> None:
    talk = Conversation()
    (member,), generation = talk.stable(1)
    for _ in range(4):
        talk.sleep(DELAY_MS)
        talk.commit_in_transaction(ONE, {P0: 5}, member_id=member, generation=generation)
    assert talk.state() == "Empty"


def test_a_group_that_is_missing_is_made_unless_a_generation_is_named() -> None:
    talk = Conversation()
    assert talk.commit_in_transaction(ONE, {P0: 5}, member_id="m", generation=3) == [
        ErrorCode.ILLEGAL_GENERATION
    ]
    assert talk.groups() == []
    assert talk.commit_in_transaction(ONE, {P0: 5}, group="") == [ErrorCode.INVALID_GROUP_ID]
    assert talk.commit_in_transaction(ONE, {P0: 5}, group="g" * 2_000) == [ErrorCode.INVALID_GROUP_ID]
    assert talk.commit_in_transaction(ONE, {P0: 5}) == [ErrorCode.NONE]
    assert talk.state() == "Empty"


def test_there_is_a_limit_to_the_groups_that_producers_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.groups.commits.GROUPS_MAX", 1)
    assert GROUPS_MAX > 1
    talk = Conversation()
    assert talk.commit_in_transaction(ONE, {P0: 5}) == [ErrorCode.NONE]
    assert talk.commit_in_transaction(ONE, {P0: 5}, group="b") == [ErrorCode.COORDINATOR_NOT_AVAILABLE]


def test_a_partition_may_be_refused_while_others_are_committed() -> None:
    talk = Conversation(topics={"gone": None})
    errors = talk.commit_in_transaction(ONE, {("gone", 0): 1, P0: 5})
    assert errors == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NONE]
    assert talk.commit_in_transaction(ONE, {P1: 5}, metadata="x" * 5_000) == [
        ErrorCode.OFFSET_METADATA_TOO_LARGE
    ]
    assert unstable(talk, P0, P1) == [P0]


# Removal


def test_offsets_in_a_transaction_keep_their_group() -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit_in_transaction(ONE, {P0: 5}, group="b")
    talk.sleep(30 * DAY_MS)
    assert talk.offsets() == {P0: 1}
    assert {group.group_id for group in talk.groups()} == {GROUP, "b"}
    talk.end_transaction(ONE, commit=False)
    assert [group.group_id for group in talk.groups()] == [GROUP], "nothing is left of the other"
    talk.sleep(DAY_MS)
    assert talk.groups() == []


def test_a_group_is_deleted_with_its_offsets_in_transactions() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    assert talk.delete_group() is ErrorCode.NONE
    assert talk.log[-1] == OffsetRemoved(GROUP, *P0)
    talk.end_transaction(ONE, commit=True)
    assert talk.groups() == []
    assert talk.restarted().groups() == []


def test_a_deleted_offset_does_not_come_back_with_the_end_of_the_transaction() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5, P1: 6})
    assert talk.delete_offsets(P0).error is ErrorCode.NONE
    assert unstable(talk, P0, P1) == [P1]
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P1: 6}
    assert talk.restarted().offsets() == {P1: 6}


def test_a_deletion_that_could_not_be_written_brings_the_offsets_of_the_transaction_back() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.hold = True
    assert talk.delete_group() is ErrorCode.NONE
    talk.fail_last()
    talk.hold = False
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 5}


# Deleted topics


def test_an_offset_of_a_deleted_topic_is_not_seen_after_the_commit() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5, ("payments", 0): 3})
    talk.topics["orders"] = topic_id("orders", 2)
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == talk.restarted().offsets() == {("payments", 0): 3}


def test_offsets_in_transactions_are_removed_with_their_topic() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.delete_topics("orders")
    assert talk.log[-1] == OffsetRemoved(GROUP, *P0)
    assert talk.groups() == []


def test_removing_offsets_of_a_deleted_topic_spares_the_transaction_on_the_new_one() -> None:
    talk = Conversation()
    talk.commit({P0: 9})
    talk.topics["orders"] = topic_id("orders", 2)
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.reconcile()
    assert not any(isinstance(logged, OffsetRemoved) for logged in talk.log)
    assert talk.offsets() == {}
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 5}


def test_an_offset_without_topic_id_in_a_transaction_gets_one_when_it_is_committed() -> None:
    old = InTransaction(OffsetCommitted(GROUP, *P0, 5), ONE, 0)
    talk = Conversation(log=[old])
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 5}
    talk.reconcile()
    assert talk.log[-1] == OffsetCommitted(GROUP, *P0, 5, topic_id=topic_id("orders"))


def test_an_offset_without_topic_id_is_not_written_again_behind_one_in_a_transaction() -> None:
    """It would supersede it: the order of the log decides."""
    talk = Conversation(log=[OffsetCommitted(GROUP, *P0, 5)])
    talk.commit_in_transaction(ONE, {P0: 7})
    talk.reconcile()
    assert isinstance(talk.log[-1], InTransaction)
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == talk.restarted().offsets() == {P0: 7}


# The log


def test_a_commit_that_equals_the_one_before_still_supersedes_an_offset_in_a_transaction() -> None:
    """Of two equal records compaction leaves the later one."""
    talk = Conversation()
    talk.commit({P0: 1})
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit({P0: 1})
    assert talk.log[0] == talk.log[2]
    talk.end_transaction(ONE, commit=True)
    assert talk.offsets() == {P0: 1}
    after = Conversation(log=[talk.log[2]])
    assert after.offsets() == {P0: 1}


def test_an_offset_that_is_committed_again_in_a_transaction_is_the_newer_one() -> None:
    talk = Conversation()
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit_in_transaction(TWO, {P0: 7})
    talk.commit_in_transaction(ONE, {P0: 5})
    assert talk.log[0] == talk.log[2]
    talk.end_transaction(ONE, commit=True)
    talk.end_transaction(TWO, commit=True)
    assert talk.offsets() == {P0: 5}
    assert Conversation(log=talk.log[1:]).offsets() == {P0: 5}


@pytest.mark.parametrize("restated", range(4))
def test_a_log_that_an_earlier_version_was_rewriting_says_the_same(restated: int) -> None:
    """That version appended the state again, and then deleted what was before; it may have stopped anywhere."""
    talk = Conversation()
    talk.commit({P0: 1, P1: 2})
    talk.commit({P0: 3})
    talk.commit({P0: 4}, group="b")
    again = talk.log[:0:-1][:restated]
    after = Conversation(log=[*talk.log, *again])
    assert (after.offsets(), after.offsets("b")) == ({P0: 3, P1: 2}, {P0: 4})


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_log_that_an_earlier_version_has_rewritten_keeps_offsets_in_transactions(is_deleted: bool) -> None:
    talk = Conversation()
    talk.commit({P0: 1})
    talk.commit_in_transaction(ONE, {P0: 5})
    talk.commit_in_transaction(TWO, {P0: 7})
    # It appended what was committed, and behind it what was in transactions.
    before = [] if is_deleted else talk.log
    after = Conversation(log=[*before, *talk.log])
    assert after.offsets() == {P0: 1}
    after.end_transaction(TWO, commit=True)
    after.end_transaction(ONE, commit=True)
    assert after.offsets() == {P0: 7}
