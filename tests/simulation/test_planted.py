"""Defects that were once in the broker, planted again: simulated clusters with what they need must find them.

Each is put back in one place, as it was or as near to it as the mended code allows. ``test_mutants.py`` has bugs
that nobody made yet; those of single cores are in ``penstock.sim.cores``. Which defects no simulation can find,
and why, is in docs/reference/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.handlers import offsets
from penstock.groups.commits import Commits
from penstock.log.producers import TRY_AGAIN, ProducerStates
from penstock.metadata.decided_state import DecidedState
from penstock.protocol.errors import ErrorCode
from penstock.replication.follower_activity import FollowerActivity
from penstock.sim.plans import Plan, plan_for
from penstock.sim.swarm import Run
from tests.simulation import test_cuts, test_full_disks

Patch = pytest.MonkeyPatch

SEEDS = 12


def quiet(seed: int, seconds: float) -> Plan:
    """Three nodes without faults, and whatever a defect needs on top."""
    return replace(
        plan_for(seed, seconds=seconds, nodes=3, generation=2),
        faults=(),
        later_faults=(),
        changed_settings=(),
        flushed_nodes=(),
        is_flushed=False,
        racks=0,
        administers=False,
        recreates=False,
        asks_by_time=False,
        restarts_all=False,
        clock_skew_ms=0,
        produce_interval_ms=400.0,
    )


def finds(plan: Callable[[int], Plan], what: str) -> int | None:
    """How many seeds it takes to find a violation that says this."""
    for count in range(1, SEEDS + 1):
        violation = Run(plan(count)).run().violation
        if violation is not None:
            assert what in violation, violation
            return count
    return None


def recreated(seed: int) -> Plan:
    return replace(quiet(seed, 60), recreates=True, members=0, one_shot_producers=0)


def asked_by_time(seed: int) -> Plan:
    return replace(
        quiet(seed, 40),
        faults=("crash", "pause"),
        fault_interval_ms=1_500.0,
        replication_factor=3,
        min_in_sync=2,
        produce_interval_ms=plan_for(seed, seconds=40, nodes=3, generation=2).produce_interval_ms,
        asks_by_time=True,
    )


def test_offsets_by_time_from_a_leader_that_is_not_established(monkeypatch: Patch) -> None:
    monkeypatch.setattr(offsets, "_not_available", lambda version: ErrorCode.NONE)
    assert finds(asked_by_time, "was told offset -1") is not None


def test_offsets_of_a_deleted_topic_that_the_next_of_its_name_begins_at(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Commits, "_is_current", lambda self, offset: True)
    assert finds(recreated, "lost commit") is not None


def test_a_long_lived_producer_that_is_called_out_of_order_by_a_topic_made_again(monkeypatch: Patch) -> None:
    check = ProducerStates.check

    def strict(self: ProducerStates, *arguments: Any) -> Any:
        verdict = check(self, *arguments)
        return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER if verdict is TRY_AGAIN else verdict

    monkeypatch.setattr(ProducerStates, "check", strict)
    assert finds(recreated, "OUT_OF_ORDER_SEQUENCE_NUMBER") is not None


def test_a_full_disk_whose_broker_stays_leader_and_in_sync(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DecidedState, "is_full", lambda self, known, directory: False)
    with pytest.raises(AssertionError, match=r"assert \d+"):
        test_full_disks.test_writes_go_on_while_a_disk_is_full("leader", is_flushed=False)


def test_a_follower_that_is_cut_from_its_leader_and_counts_on(monkeypatch: Patch) -> None:
    monkeypatch.setattr(FollowerActivity, "is_silent", lambda self, broker, since_ms, now_ms: False)
    with pytest.raises(AssertionError, match=r"assert \d+"):
        test_cuts.test_two_nodes_cut_from_each_other_cost_a_session_of_writes("without the controller")
