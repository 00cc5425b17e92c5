"""Bugs of compaction, planted in the log and the broker: each must be found, by the checker that is there for it.

The clusters here have no more in them than a bug needs: a compacted topic with small segments, and a cleaner that
is always due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.partition import cleaner
from penstock.broker.partition.cleaner import Cleaner
from penstock.log import compaction
from penstock.log import log as log_module
from penstock.log import reading as log_reading
from penstock.log.cleaner_job import CleaningJob
from penstock.log.compaction import Source
from penstock.log.log import Log
from penstock.log.swapping import Swapping
from penstock.sim import compaction_readers
from penstock.sim.compaction_plans import NOTHING_EXPIRES, Compaction
from penstock.sim.disk import Disk, SimFile, SimFiles
from penstock.sim.faults import Nemesis
from penstock.sim.plans import Plan
from penstock.sim.swarm import Run
from tests.simulation.lean import finds, lean

Patch = pytest.MonkeyPatch

SECONDS = 15.0


def table(seed: int, *, compaction: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """Three nodes without faults, a compacted topic, and whatever a bug needs on top."""
    made = Compaction(
        partitions=1,
        policy="compact",
        segment_bytes=1_024,
        dirty_ratio=0.0,
        delete_retention_ms=0,
        min_lag_ms=0,
        retention_ms=NOTHING_EXPIRES,
        keys=6,
        tombstones=0.3,
        producers=1,
        transactors=(),
        interval_ms=200.0,
        changes_policy=False,
        deletes_records=False,
        recreates=False,
    )
    plan = replace(
        lean(seed, seconds=SECONDS, generation=5),
        clock_drift=0.0,
        has_receipts=False,
        transaction_timeout_ms=15_000,
        compaction=replace(made, **(compaction or {})),
    )
    return replace(plan, **changes)


def with_job(monkeypatch: Patch, change: Callable[[CleaningJob], CleaningJob]) -> None:
    """Change every job before it is run."""
    prepare = Log.prepare_cleaning

    def changed(self: Log, *arguments: Any, **options: Any) -> CleaningJob | None:
        job = prepare(self, *arguments, **options)
        return None if job is None else change(job)

    monkeypatch.setattr(Log, "prepare_cleaning", changed)


def in_transactions(seed: int) -> Plan:
    return table(seed, compaction={"transactors": (True, False)})


def test_a_log_that_is_cleaned_past_the_last_stable_offset(monkeypatch: Patch) -> None:
    def hasty(segments: Any, last_stable_offset: int, *arguments: Any) -> list[Source]:
        return compaction.cleanable(segments, segments[-1].base_offset, *arguments)

    monkeypatch.setattr(log_module, "cleanable", hasty)
    assert finds(in_transactions, "cleaned past the last stable offset") is not None


def test_a_tombstone_that_is_dropped_too_early(monkeypatch: Patch) -> None:
    with_job(monkeypatch, lambda job: replace(job, config=replace(job.config, delete_retention_ms=0)))
    assert (
        finds(
            lambda seed: table(seed, compaction={"delete_retention_ms": 10_000}),
            "tombstone dropped too early",
        )
        is not None
    )


def test_a_key_that_a_returning_replica_revives(monkeypatch: Patch) -> None:
    with_job(monkeypatch, lambda job: replace(job, drop_below=2**62))
    # It is looked at twice: when the job is made, and before the swap.
    monkeypatch.setattr(cleaner._Cleaning, "_may_swap", lambda self, group: self._is_current)
    assert (
        finds(
            lambda seed: table(seed, later_faults=(("absence", 5_000.0),), seconds=40.0),
            "revived key",
        )
        is not None
    )


def test_aborted_records_that_cleaning_makes_visible(monkeypatch: Patch) -> None:
    with_job(monkeypatch, lambda job: replace(job, aborted=()))
    assert finds(in_transactions, "G1a") is not None


class _Unsynced:
    """Files whose names are not made durable."""

    def __init__(self, files: SimFiles) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def sync_directory(self, path: str) -> None:
        pass

    def replace(self, path: str, data: Any, *, durable: bool = True) -> None:
        self._files.replace(path, data, durable=False)


def test_a_swap_without_a_sync_of_the_directory(monkeypatch: Patch) -> None:
    init = Swapping.__init__

    def unsynced(self: Swapping, files: Any, *arguments: Any) -> None:
        init(self, _Unsynced(files), *arguments)

    monkeypatch.setattr(Swapping, "__init__", unsynced)
    with_power_losses_after_swaps(monkeypatch)
    assert finds(flushed, "lost|gave up|not whole|starts at|was committed") is not None


def test_power_losses_right_after_swaps_do_no_harm(monkeypatch: Patch) -> None:
    with_power_losses_after_swaps(monkeypatch)
    report = Run(flushed(1)).run()
    assert report.violation is None, report.violation
    assert report.counts["fault: power"] > 2


def flushed(seed: int) -> Plan:
    return table(seed, is_flushed=True, compaction={"partitions": 2})


def with_power_losses_after_swaps(monkeypatch: Patch) -> None:
    """Now and then a machine loses power just after it has put a cleaned file in its place."""
    swap, init = Log.swap, Nemesis.__init__
    current: list[Nemesis] = []

    def remembered(self: Nemesis, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        current[:] = [self]

    def swap_and_perhaps_end(self: Log, group: Any) -> bool:
        is_swapped, nemesis = swap(self, group), current[0]
        chance = nemesis._loop.streams["power after a swap"]
        hit = [machine for machine in nemesis._cluster.running if machine.files is self._files]
        if hit and not nemesis._is_over and chance.random() < 0.1:
            delay_ms = chance.uniform(0, 10)
            nemesis._loop.after(delay_ms, lambda: nemesis._strike_with("power", hit[0]), "fault")
        return is_swapped

    monkeypatch.setattr(Nemesis, "__init__", remembered)
    monkeypatch.setattr(Log, "swap", swap_and_perhaps_end)


def cold(seed: int) -> Plan:
    return table(seed, cold_reads=0.5, evictions=0.5, compaction={"partitions": 3})


def test_a_fetch_that_crosses_a_swap(monkeypatch: Patch) -> None:
    """The range that a reader was promised is read from the new file."""
    thread_ms = Disk.thread_ms

    def slow_reads(self: Disk, lane: str) -> float:
        return thread_ms(self, lane) * (200 if lane == "read" else 1)

    monkeypatch.setattr(Disk, "thread_ms", slow_reads)
    monkeypatch.setattr(compaction_readers, "REST_MS_MAX", 300)
    monkeypatch.setattr(SimFile, "moved", lambda self, path: None)
    assert finds(cold, "damaged|poll skip") is not None


def test_a_position_in_a_file_that_a_swap_has_replaced(monkeypatch: Patch) -> None:
    """Readers go on where they were in the old file."""
    monkeypatch.setattr(log_reading.Reader, "forget", lambda self: None)
    assert finds(cold, "damaged|poll skip|reading.py") is not None


def test_a_cleaner_that_ends_with_its_first_failure(monkeypatch: Patch) -> None:
    failed = Cleaner._failed

    def discouraged(self: Cleaner, hosted: Any, reason: str) -> None:
        failed(self, hosted, reason)
        monkeypatch.setattr(Cleaner, "_rest", lambda self: None)

    rest = Cleaner._rest

    def killed(seed: int) -> Plan:
        monkeypatch.setattr(Cleaner, "_rest", rest)
        return table(seed, later_faults=(("killed job", 1_000.0),))

    monkeypatch.setattr(Cleaner, "_failed", discouraged)
    assert finds(killed, "never cleaned") is not None


def test_without_a_bug_the_same_clusters_are_good() -> None:
    plan = table(
        1,
        compaction={"transactors": (True, False)},
        faults=("crash", "pause"),
        fault_interval_ms=5_000.0,
        later_faults=(("absence", 20_000.0), ("killed job", 1_000.0)),
        cold_reads=0.1,
        evictions=0.1,
        seconds=30.0,
    )
    report = Run(plan).run()
    assert report.violation is None, report.violation
    assert report.counts["files swapped"] > 20
    assert report.counts["tombstones seen gone"] > 20
    assert report.counts["fault: killed job"] > 0
