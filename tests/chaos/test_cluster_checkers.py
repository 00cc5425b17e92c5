"""The checkers of the cluster's chaos against made-up histories: each finds the one lie it is there to find."""

from __future__ import annotations

import pytest

from tests.chaos.cluster_clients import Commits
from tests.chaos.cluster_owners import Owners
from tests.chaos.cluster_probe import Probe
from tests.chaos.ledger import Ledger, Place, Reading, identity_of

HERE = Place("here", 0)


def sent(*sequences: int) -> list[tuple[int, int]]:
    """A log with these records of one writer, from offset 0."""
    return [(offset, identity_of(0, sequence)) for offset, sequence in enumerate(sequences)]


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        (sent(0, 1, 2), None),
        (sent(0, 1), "lost"),
        (sent(0, 2, 1), "lost.*|disordered"),
        (sent(0, 1, 2, 1), "doubled"),
        (sent(0, 1, 2, 4), "disordered"),
    ],
    ids=["as promised", "lost", "disordered", "doubled", "with a hole"],
)
def test_the_ledger_finds_what_became_of_acknowledged_records(
    log: list[tuple[int, int]], complaint: str | None
) -> None:
    ledger = Ledger()
    for offset, identity in sent(0, 1, 2):
        ledger.acknowledged(HERE, offset, identity)
    readings = {HERE: Reading(0, log)}
    if complaint is None:
        ledger.check(readings)
        return
    with pytest.raises(AssertionError, match=complaint):
        ledger.check(readings)


def test_a_commit_that_is_found_smaller_than_it_was_acknowledged_is_noticed() -> None:
    ledger = Ledger()
    commits = Commits(ledger)
    for offset in (5, 9):
        commits.attempted({HERE: offset})
        commits.acknowledged({HERE: offset})
    commits.found("somebody", commits.promised(), {HERE: 9})
    assert not ledger.violations
    commits.found("somebody", commits.promised(), {HERE: 5})
    assert len(ledger.violations) == 1


def test_a_commit_without_an_answer_may_be_there_or_not() -> None:
    ledger = Ledger()
    commits = Commits(ledger)
    commits.attempted({HERE: 5})
    commits.acknowledged({HERE: 5})
    commits.attempted({HERE: 7})
    for found in (5, 7):
        commits.found("somebody", commits.promised(), {HERE: found})
    assert not ledger.violations
    commits.found("somebody", commits.promised(), {HERE: 8})
    assert len(ledger.violations) == 1


def test_a_commit_that_vanished_is_noticed() -> None:
    ledger = Ledger()
    commits = Commits(ledger)
    commits.attempted({HERE: 0})
    commits.acknowledged({HERE: 0})
    commits.found("somebody", commits.promised(), {HERE: -1001})
    assert len(ledger.violations) == 1


def test_a_commit_that_an_old_one_overtakes_is_noticed() -> None:
    ledger = Ledger()
    commits = Commits(ledger)
    commits.attempted({HERE: 9})
    commits.acknowledged({HERE: 9})
    commits.acknowledged({HERE: 5})
    assert len(ledger.violations) == 1


def test_two_owners_in_one_generation_are_noticed() -> None:
    ledger = Ledger()
    owners = Owners(ledger)
    owners.assigned(1, "a", [0, 1])
    owners.assigned(1, "b", [2])
    owners.assigned(2, "b", [0, 1, 2])
    assert not ledger.violations
    owners.assigned(2, "a", [2])
    assert len(ledger.violations) == 1


def test_an_assignment_that_changes_within_a_generation_is_noticed() -> None:
    ledger = Ledger()
    owners = Owners(ledger)
    owners.assigned(1, "a", [0, 1])
    owners.assigned(1, "a", [0])
    assert len(ledger.violations) == 1


def test_a_generation_that_goes_back_is_noticed() -> None:
    ledger = Ledger()
    owners = Owners(ledger)
    owners.assigned(7, "a", [0])
    owners.assigned(3, "a", [0])
    assert len(ledger.violations) == 1


def test_a_probe_knows_the_longest_gap_around_a_fault() -> None:
    probe = Probe(lambda: [], "here", 0)
    probe._times = [10.0, 10.1, 12.0, 12.1, 15.0]
    assert probe.gap_s(10.0, 12.05) == pytest.approx(1.9)
    assert probe.gap_s(12.05, 15.0) == pytest.approx(2.9)
    # Only what lies in the span: the next fault has begun then.
    assert probe.gap_s(12.05, 13.0) == pytest.approx(0.9)
    # Nothing came after 15: the time until now counts as a gap too.
    assert probe.gap_s(14.0, 20.0) == pytest.approx(5.0)
