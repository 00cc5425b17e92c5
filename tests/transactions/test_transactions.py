"""Transactions from begin to end, classic and v2, and requests that come in the wrong state."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.transactions.changes import Identity
from tests.transactions.conversation import (
    CLASSIC_END,
    ORDERS,
    PAYMENTS,
    V2_END,
    Conversation,
)

NONE = ErrorCode.NONE
FENCED = ErrorCode.PRODUCER_FENCED
CONCURRENT = ErrorCode.CONCURRENT_TRANSACTIONS
INVALID_STATE = ErrorCode.INVALID_TXN_STATE
MAPPING = ErrorCode.INVALID_PRODUCER_ID_MAPPING


@pytest.fixture
def talk() -> Conversation:
    return Conversation().load()


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_of_v2_ends_with_the_next_epoch(talk: Conversation, commit: bool) -> None:
    producer = talk.started()
    assert talk.add(producer, ORDERS) is NONE
    assert talk.add(producer, PAYMENTS, ORDERS) is NONE
    assert talk.state == "Ongoing"
    following = Identity(producer.id, producer.epoch + 1)
    assert talk.end(producer, commit=commit) == (NONE, following)
    assert talk.state == ("PrepareCommit" if commit else "PrepareAbort")
    (due,) = talk.write_all()
    assert due[1:] == ("transfers", *following, commit, (ORDERS, PAYMENTS), True)
    assert talk.state == ("CompleteCommit" if commit else "CompleteAbort")
    assert talk.producer == following


@pytest.mark.parametrize("commit", [True, False])
def test_a_classic_transaction_keeps_the_epoch(talk: Conversation, commit: bool) -> None:
    producer = talk.started()
    assert talk.add(producer, ORDERS, is_v2=False) is NONE
    assert talk.end(producer, commit=commit, version=CLASSIC_END).error is NONE
    (due,) = talk.write_all()
    assert due[1:] == ("transfers", *producer, commit, (ORDERS,), False)
    assert talk.producer == producer


def test_markers_are_due_only_when_the_end_is_committed(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.hold = True
    talk.end(producer, commit=True)
    assert not talk.due and talk.coordinator.markers_due("transfers") is None
    talk.commit_all()
    assert len(talk.due) == 1


def test_a_transaction_is_complete_with_its_last_marker(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS, PAYMENTS)
    talk.end(producer, commit=True)
    (due,) = talk.due
    talk.write(due, PAYMENTS)
    assert talk.state == "PrepareCommit"
    still_due = talk.coordinator.markers_due("transfers")
    assert still_due is not None and still_due.partitions == (ORDERS,)
    talk.write(due, PAYMENTS)
    assert talk.state == "PrepareCommit"
    talk.write(due, ORDERS)
    assert talk.state == "CompleteCommit"
    assert talk.coordinator.markers_due("transfers") is None


def test_a_late_confirmation_does_not_count_for_the_next_transaction(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS, is_v2=False)
    talk.end(producer, commit=True, version=CLASSIC_END)
    (first,) = talk.write_all()
    talk.add(producer, ORDERS, is_v2=False)
    talk.end(producer, commit=False, version=CLASSIC_END)
    talk.write(first)
    assert talk.state == "PrepareAbort"
    talk.write_all()
    assert talk.state == "CompleteAbort"


def test_the_end_is_written_again_when_it_could_not_be(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.end(producer, commit=True)
    talk.is_full = True
    talk.write_all()
    talk.sleep(5_000)
    assert talk.state == "PrepareCommit"
    talk.is_full = False
    talk.sleep(1_000)
    assert talk.state == "CompleteCommit"


def test_a_decision_that_cannot_be_written_changes_nothing(talk: Conversation) -> None:
    talk.is_full = True
    assert talk.init().error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert talk.coordinator.all_keys() == []
    talk.is_full = False
    producer = talk.started()
    talk.add(producer)
    before = talk.decided()
    talk.is_full = True
    talk.add(producer, PAYMENTS)
    talk.end(producer, commit=True)
    talk.end(producer, commit=True, version=CLASSIC_END)
    talk.init()
    talk.sleep(100_000)
    assert talk.decided() == before
    talk.is_full = False
    talk.sleep(10_000)
    assert talk.state == "PrepareAbort"


# States and requests


def test_a_second_end_waits_for_the_markers_of_the_first(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    following = talk.end(producer, commit=True).producer
    # The client is one epoch ahead, or repeats itself (KAFKA-18464).
    assert talk.end(following, commit=False).error is CONCURRENT
    assert talk.end(producer, commit=True).error is CONCURRENT
    assert talk.end(producer, commit=False).error is CONCURRENT
    assert talk.add(following).name == "CONCURRENT_TRANSACTIONS"
    assert talk.verify(following) is CONCURRENT
    talk.write_all()
    assert talk.end(producer, commit=True) == (NONE, following)


@pytest.mark.parametrize(
    ("state", "abort_again", "commit_again"),
    [("CompleteAbort", NONE, FENCED), ("CompleteCommit", INVALID_STATE, NONE)],
)
def test_a_repeated_end_of_v2_gets_the_same_answer(
    talk: Conversation, state: str, abort_again: ErrorCode, commit_again: ErrorCode
) -> None:
    producer = talk.started()
    following = talk.transaction(producer, commit=state == "CompleteCommit")
    assert talk.state == state
    assert talk.end(producer, commit=False).error is abort_again
    assert talk.end(producer, commit=True).error is commit_again
    assert talk.producer == following and not talk.due


@pytest.mark.parametrize("commit", [True, False])
def test_a_repeated_classic_end_gets_the_same_answer(talk: Conversation, commit: bool) -> None:
    producer = talk.started()
    talk.transaction(producer, commit=commit, version=CLASSIC_END)
    assert talk.end(producer, commit=commit, version=CLASSIC_END).error is NONE
    assert talk.end(producer, commit=not commit, version=CLASSIC_END).error is INVALID_STATE
    assert not talk.due


def test_an_abort_without_a_transaction_takes_the_next_epoch_in_v2(talk: Conversation) -> None:
    producer = talk.started()
    for _ in range(3):
        answer = talk.end(producer, commit=False)
        assert answer == (NONE, Identity(producer.id, producer.epoch + 1))
        # The answer may be lost.
        assert talk.end(producer, commit=False) == answer
        assert talk.end(producer, commit=True).error is FENCED
        producer = answer.producer
    assert talk.state == "CompleteAbort"
    producer = talk.transaction(producer)
    assert talk.end(producer, commit=False).error is NONE
    assert not talk.due


def test_there_is_nothing_to_commit_without_a_transaction(talk: Conversation) -> None:
    producer = talk.started()
    assert talk.end(producer, commit=True).error is INVALID_STATE
    producer = talk.transaction(producer)
    assert talk.end(producer, commit=True).error is INVALID_STATE
    producer = talk.transaction(producer, commit=False)
    assert talk.end(producer, commit=True).error is INVALID_STATE


@pytest.mark.parametrize("commit", [True, False])
def test_a_classic_client_cannot_end_what_it_has_not_begun(talk: Conversation, commit: bool) -> None:
    producer = talk.started()
    assert talk.end(producer, commit=commit, version=CLASSIC_END).error is INVALID_STATE


def test_a_late_end_of_v2_does_not_end_the_next_transaction(talk: Conversation) -> None:
    producer = talk.started()
    following = talk.transaction(producer)
    talk.add(following)
    assert talk.end(producer, commit=True).error is FENCED
    assert talk.end(producer, commit=False).error is FENCED
    assert talk.state == "Ongoing"


def test_a_late_addition_does_not_begin_a_transaction(talk: Conversation) -> None:
    producer = talk.started()
    following = talk.transaction(producer)
    assert talk.add(producer).name == "PRODUCER_FENCED"
    assert talk.verify(producer) is FENCED
    assert talk.state == "CompleteCommit" and talk.producer == following


def test_unknown_and_foreign_producers_are_refused(talk: Conversation) -> None:
    producer = talk.started()
    other = Identity(producer.id + 77, 0)
    later = Identity(producer.id, producer.epoch + 1)
    for version in (CLASSIC_END, V2_END):
        assert talk.end(other, commit=True, version=version).error is MAPPING
        assert talk.end(later, commit=True, version=version).error is FENCED
        assert talk.end(producer, commit=True, id="nobody", version=version).error is MAPPING
        assert talk.end(producer, commit=True, id="", version=version).error is ErrorCode.INVALID_REQUEST
    assert talk.add(other) is MAPPING
    assert talk.add(later) is FENCED
    assert talk.add(producer, id="nobody") is MAPPING
    assert talk.add(producer, id="") is ErrorCode.INVALID_REQUEST
    assert talk.verify(other) is MAPPING
    assert talk.verify(later) is FENCED
    assert talk.verify(producer, id="nobody") is MAPPING
    assert talk.verify(producer, id="") is ErrorCode.INVALID_REQUEST


def test_old_versions_of_end_txn_call_a_fence_an_invalid_epoch(talk: Conversation) -> None:
    producer = talk.started()
    later = Identity(producer.id, 9)
    assert talk.end(later, commit=True, version=1).error is ErrorCode.INVALID_PRODUCER_EPOCH
    assert talk.end(later, commit=True, version=2).error is FENCED


# Partitions


def test_partitions_that_are_in_the_transaction_are_not_written_again(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS, PAYMENTS)
    count = len(talk.log)
    assert talk.add(producer, PAYMENTS) is NONE
    assert len(talk.log) == count


def test_partitions_may_be_added_while_others_are_not_committed(talk: Conversation) -> None:
    producer = talk.started()
    talk.hold = True
    assert talk.add(producer, ORDERS) is NONE
    assert talk.add(producer, PAYMENTS) is NONE
    # Everything else waits.
    assert talk.end(producer, commit=True).error is CONCURRENT
    assert talk.end(producer, commit=True, version=CLASSIC_END).error is CONCURRENT
    assert talk.init().error is CONCURRENT
    talk.commit_all()
    talk.hold = False
    talk.end(producer, commit=True)
    assert talk.due[0].partitions == (ORDERS, PAYMENTS)


def test_the_next_transaction_begins_while_the_end_of_the_last_is_not_committed(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    following = talk.end(producer, commit=True).producer
    assert talk.add(following, PAYMENTS) is CONCURRENT
    talk.hold = True
    talk.write_all()
    assert talk.add(following, PAYMENTS) is NONE
    assert talk.state == "PrepareCommit"
    talk.commit_all()
    assert talk.state == "Ongoing"


def test_verification_wants_a_committed_addition(talk: Conversation) -> None:
    producer = talk.started()
    assert talk.verify(producer) == {ORDERS: ErrorCode.TRANSACTION_ABORTABLE}
    talk.hold = True
    talk.add(producer)
    assert talk.verify(producer) == {ORDERS: CONCURRENT}
    talk.commit_all()
    assert talk.verify(producer, ORDERS, PAYMENTS) == {
        ORDERS: NONE,
        PAYMENTS: ErrorCode.TRANSACTION_ABORTABLE,
    }


def test_verification_fails_as_soon_as_the_end_is_decided(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.hold = True
    talk.end(producer, commit=True)
    assert talk.verify(producer) is CONCURRENT


def test_a_partition_of_an_earlier_transaction_is_not_in_this_one(talk: Conversation) -> None:
    producer = talk.started()
    talk.transaction(producer, version=CLASSIC_END)
    assert talk.verify(producer) == {ORDERS: ErrorCode.TRANSACTION_ABORTABLE}
    talk.add(producer, PAYMENTS, is_v2=False)
    assert talk.verify(producer) == {ORDERS: ErrorCode.TRANSACTION_ABORTABLE}


# Deleted topics


def test_markers_of_deleted_partitions_are_not_waited_for(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS, PAYMENTS)
    talk.end(producer, commit=True)
    talk.deleted.add(PAYMENTS)
    talk.reconcile()
    due = talk.coordinator.markers_due("transfers")
    assert due is not None and due.partitions == (ORDERS,)
    talk.deleted.add(ORDERS)
    talk.reconcile()
    assert talk.state == "CompleteCommit"


def test_a_marker_is_due_until_it_is_written_or_its_topic_is_deleted(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS, PAYMENTS)
    talk.end(producer, commit=True, version=CLASSIC_END)
    (due,) = talk.due
    assert talk.coordinator.is_due(due, ORDERS) and talk.coordinator.is_due(due, PAYMENTS)
    talk.write(due, ORDERS)
    assert not talk.coordinator.is_due(due, ORDERS)
    talk.deleted.add(PAYMENTS)
    talk.reconcile()
    assert not talk.coordinator.is_due(due, PAYMENTS)
    talk.add(producer, PAYMENTS)
    talk.end(producer, commit=False, version=CLASSIC_END)
    assert not talk.coordinator.is_due(due, PAYMENTS)


def test_an_open_transaction_keeps_partitions_that_were_deleted(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.deleted.add(ORDERS)
    talk.reconcile()
    assert talk.verify(producer) == {ORDERS: NONE}
    talk.end(producer, commit=True)
    talk.reconcile()
    assert talk.state == "CompleteCommit"
