"""The checkers of transactions notice what they are there to notice: each truth is told a lie."""

from __future__ import annotations

import pytest

from penstock.sim.client import Place
from penstock.sim.report import Violation
from penstock.sim.transaction_checkers import Transaction, TransactionCheckers

HERE = Place(b"1" * 16, "accounts", 0)
THERE = Place(b"1" * 16, "accounts", 1)


@pytest.fixture
def checkers() -> TransactionCheckers:
    return TransactionCheckers()


def transfer(
    checkers: TransactionCheckers, name: str = "t", *, epoch: int = 0, is_v2: bool = True, at: int = 0
) -> Transaction:
    """A transaction with a record here and there, both acknowledged."""
    transaction = checkers.atomic.begin(name, 7, epoch, is_v2=is_v2)
    for place in (HERE, THERE):
        value = f"{name}-{place.partition}".encode()
        checkers.atomic.sending(transaction, place, value)
        checkers.atomic.acked(transaction, value, at)
    return transaction


def read(checkers: TransactionCheckers, place: Place, name: str = "t", at: int = 0) -> None:
    checkers.atomic.read(place, at, f"{name}-{place.partition}".encode(), "reader")
    checkers.atomic.read_past(place, at, at + 1, "reader")


def test_a_committed_transaction_is_read_in_every_partition(checkers: TransactionCheckers) -> None:
    transaction = transfer(checkers)
    checkers.atomic.committing(transaction)
    read(checkers, HERE)
    checkers.atomic.committed(transaction)
    read(checkers, THERE)
    checkers.atomic.final()


def test_an_aborted_transaction_is_passed_in_every_partition(checkers: TransactionCheckers) -> None:
    transaction = transfer(checkers)
    checkers.atomic.aborted(transaction)
    checkers.atomic.read_past(HERE, 0, 2, "reader")
    checkers.atomic.read_past(THERE, 0, 2, "reader")
    checkers.atomic.final()


def test_a_record_of_an_open_transaction(checkers: TransactionCheckers) -> None:
    transfer(checkers)
    with pytest.raises(Violation, match="precommitted read"):
        read(checkers, HERE)


def test_a_record_of_an_aborted_transaction(checkers: TransactionCheckers) -> None:
    checkers.atomic.aborted(transfer(checkers))
    with pytest.raises(Violation, match="G1a"):
        read(checkers, HERE)


def test_a_record_that_was_read_before_its_transaction_was_refused(checkers: TransactionCheckers) -> None:
    transaction = transfer(checkers)
    checkers.atomic.committing(transaction)
    read(checkers, HERE)
    with pytest.raises(Violation, match="G1a"):
        checkers.atomic.aborted(transaction)


def test_a_transaction_that_is_seen_here_and_not_there(checkers: TransactionCheckers) -> None:
    checkers.atomic.committing(transfer(checkers))
    read(checkers, HERE)
    with pytest.raises(Violation, match="torn transaction"):
        checkers.atomic.read_past(THERE, 0, 1, "reader")


def test_a_record_that_is_acknowledged_when_readers_have_passed_it(checkers: TransactionCheckers) -> None:
    transaction = checkers.atomic.begin("t", 7, 0, is_v2=True)
    checkers.atomic.sending(transaction, HERE, b"t-0")
    checkers.atomic.read_past(HERE, 0, 5, "reader")
    checkers.atomic.acked(transaction, b"t-0", 3)
    checkers.atomic.committing(transaction)
    with pytest.raises(Violation, match="past an open transaction"):
        checkers.atomic.committed(transaction)


def test_a_committed_record_that_nobody_reads(checkers: TransactionCheckers) -> None:
    transaction = transfer(checkers)
    checkers.atomic.committing(transaction)
    checkers.atomic.committed(transaction)
    with pytest.raises(Violation, match="lost write"):
        checkers.atomic.final()


def test_a_record_at_two_offsets_or_in_another_partition(checkers: TransactionCheckers) -> None:
    transaction = transfer(checkers)
    with pytest.raises(Violation, match="duplicate"):
        checkers.atomic.acked(transaction, b"t-0", 1)
    with pytest.raises(Violation, match="was sent to"):
        checkers.atomic.read(THERE, 0, b"t-0", "reader")
    with pytest.raises(Violation, match="nobody sent"):
        checkers.atomic.read(THERE, 0, b"?", "reader")


def test_only_a_classic_transaction_after_an_unanswered_end_in_its_epoch_is_excused(
    checkers: TransactionCheckers,
) -> None:
    first = transfer(checkers, "first", is_v2=False)
    checkers.atomic.committing(first)
    checkers.atomic.may_come_late(first)
    checkers.atomic.committed(first)
    excused = transfer(checkers, "second", is_v2=False, at=1)
    read(checkers, HERE, "second", at=1)
    checkers.atomic.aborted(excused)
    assert checkers.atomic.excused == 2
    assert not checkers.atomic.begin("next epoch", 7, 1, is_v2=False).is_excused
    assert not checkers.atomic.begin("v2", 7, 0, is_v2=True).is_excused
    assert not checkers.atomic.begin("another", 8, 0, is_v2=False).is_excused


def test_money_that_is_not_there(checkers: TransactionCheckers) -> None:
    checkers.money.saw("t", -5, "reader")
    checkers.money.saw("t", 5, "reader")
    checkers.money.final(is_excused=False)
    checkers.money.saw("u", -5, "reader")
    with pytest.raises(Violation, match="money"):
        checkers.money.final(is_excused=False)


def test_a_request_of_a_zombie_that_is_accepted(checkers: TransactionCheckers) -> None:
    checkers.zombies.initialized(7, 3, now_ms=100)
    checkers.zombies.accepted("a batch", 7, 3, asked_ms=200)
    checkers.zombies.accepted("a batch", 7, 2, asked_ms=50)
    checkers.zombies.accepted("a batch", 8, 2, asked_ms=200)
    with pytest.raises(Violation, match="zombie"):
        checkers.zombies.accepted("a batch", 7, 2, asked_ms=200)


def test_two_outputs_of_an_input_or_none(checkers: TransactionCheckers) -> None:
    transfer(checkers, "a")
    transfer(checkers, "b", at=1)
    checkers.outputs.saw(0, 0, b"a-0", "reader")
    checkers.outputs.saw(0, 0, b"a-0", "another")
    checkers.outputs.final({0: 1})
    with pytest.raises(Violation, match="no output"):
        checkers.outputs.final({0: 2})
    with pytest.raises(Violation, match="torn transaction"):
        checkers.outputs.final({0: 0})
    with pytest.raises(Violation, match="two outputs"):
        checkers.outputs.saw(0, 0, b"b-0", "reader")


def test_a_late_end_of_a_classic_client_may_commit_a_second_output(checkers: TransactionCheckers) -> None:
    checkers.atomic.may_come_late(transfer(checkers, "before", is_v2=False, at=2))
    transfer(checkers, "a", is_v2=False)
    transfer(checkers, "b", is_v2=False, epoch=1, at=1)
    checkers.outputs.saw(0, 0, b"a-0", "reader")
    checkers.outputs.saw(0, 0, b"b-0", "reader")
    assert checkers.atomic.excused == 1


def test_a_view_that_is_not_what_the_markers_say(checkers: TransactionCheckers) -> None:
    checkers.atomic.committing(transfer(checkers))
    read(checkers, HERE)
    checkers.view.ended(HERE, 0, b"t-0", is_commit=True)
    checkers.view.final()
    checkers.view.ended(THERE, 0, b"t-1", is_commit=True)
    with pytest.raises(Violation, match="is a commit, and it was never read"):
        checkers.view.final()
    checkers.view.ended(THERE, 0, b"t-1", is_commit=False)
    checkers.view.ended(HERE, 0, b"t-0", is_commit=False)
    with pytest.raises(Violation, match="is an abort, and it was read"):
        checkers.view.final()
