"""A cleaner that fails, or whose log changes while it works."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.broker.partition import cleaner
from penstock.log import cleaner_job
from penstock.log.cleaner_job import CleaningJob
from penstock.log.cleaning_state import CleaningState
from penstock.log.log import CorruptLog, Log
from penstock.log.swapping import Swapping
from tests.broker.partition.test_cleaner import COMPACTED, SETTINGS, fill, hosted_of, put, read
from tests.broker.test_virtual_time import create
from tests.virtual import World


def test_a_log_of_which_no_job_can_be_made_does_not_keep_the_others_from_being_compacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Log.aborted_transactions

    def aborted(self: Log, offset: int, end_offset: int) -> Any:
        if "/bad-0" in self.directory:
            raise CorruptLog("a marker is damaged, and the index must be rebuilt", self.directory, 0)
        return original(self, offset, end_offset)

    monkeypatch.setattr(Log, "aborted_transactions", aborted)
    world = World(SETTINGS)
    client = world.client()
    create(client, "bad", **COMPACTED)
    create(client, "good", **COMPACTED)
    fill(world, client, "bad")
    fill(world, client, "good", 30)
    world.run_for(600_000)
    assert len(read(client, "good")) < 30


def test_a_failed_job_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cleaner_job._clean_group
    groups = []

    def full(*arguments: Any) -> None:
        groups.append(arguments)
        if len(groups) % 3 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments)

    monkeypatch.setattr(cleaner_job, "_clean_group", full)
    world = World(SETTINGS)
    client = world.client()
    create(client, "prices", **COMPACTED)
    fill(world, client, "prices")
    world.run_for(20_000)
    assert len(groups) == 9
    left = world.files.list(hosted_of(world, "prices").log.directory)
    assert [name for name in left if name.endswith(".cleaned")] == [], "for an hour, on a full disk"


def test_a_tombstone_stays_for_a_replica_that_was_added_during_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(SETTINGS)
    client = world.client()
    create(client, "prices", **COMPACTED)
    hosted = None
    jobs: list[CleaningJob] = []

    def slow(files: Any, job: CleaningJob) -> Any:
        jobs.append(job)
        if job.wall_ms is not None and hosted is not None and is_armed:
            # The controller adds a replica, which has fetched nothing yet.
            monkeypatch.setattr(type(hosted.replication), "replicated_before", 0)
        return cleaner_job.clean(files, job)

    is_armed = False
    monkeypatch.setattr(cleaner, "clean", slow)
    put(world, client, "prices", (b"gone", None))
    fill(world, client, "prices")
    hosted = hosted_of(world, "prices")
    world.run_for(4_000)
    assert b"gone" in {one.key for one in read(client, "prices")}
    world.run_for(10_000)
    is_armed = True
    fill(world, client, "prices")
    world.run_for(5_000)
    assert hosted.replication.replicated_before == 0
    assert b"gone" in {one.key for one in read(client, "prices")}


def test_the_files_of_later_groups_go_when_a_pass_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Swapping.prepare_end

    def prepare_end(self: Swapping, state: CleaningState | None = None) -> Any:
        original(self, state)

        def fail() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return fail

    monkeypatch.setattr(Swapping, "prepare_end", prepare_end)
    world = World(SETTINGS)
    client = world.client()
    create(client, "prices", **COMPACTED)
    fill(world, client, "prices")
    world.run_for(20_000)
    left = world.files.list(hosted_of(world, "prices").log.directory)
    assert [name for name in left if name.endswith(".cleaned")] == []
