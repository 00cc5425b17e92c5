"""A log that is dropped as a whole and begins somewhere else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.log.config import LogConfig
from penstock.log.log import OffsetOutOfRange
from tests.log.making import DIRECTORY, append, base_offsets, flush, made_batch, made_files, names, opened
from tests.log.test_replicated import fetched
from tests.support_files import FakeFiles

CONFIG = LogConfig(segment_bytes=len(made_batch()[0]) * 4, index_interval_bytes=1)
# Before the old start, inside the old log, at its end, and behind it.
PLACES = [0, 2, 4, 7, 10, 500]


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


@pytest.mark.parametrize("offset", PLACES)
def test_it_begins_and_ends_there(files: FakeFiles, offset: int) -> None:
    log = opened(files, CONFIG)
    for count in range(10):
        append(log, epoch=count // 4, producer=(count % 2, 0, count // 2))
    log.delete_before(3)
    log.read(5, 100, 10, at_least_one=True)
    log.start_over_at(offset)
    assert (log.log_start_offset, log.log_end_offset, log.recovery_point) == (offset, offset, offset)
    assert len(log.producers) == 0
    assert log.epochs.entries == []
    log.check()
    with pytest.raises(OffsetOutOfRange):
        log.read(offset + 1, 100, 1000, at_least_one=True)
    log.append_replicated(fetched(offset, 5, epoch=9))
    assert base_offsets(log) == list(range(offset, offset + 5))
    assert log.epochs.entries == [(9, offset)]
    log.check()


@pytest.mark.parametrize("offset", PLACES)
@pytest.mark.parametrize("clean", [True, False])
def test_it_is_the_same_after_a_restart(files: FakeFiles, offset: int, clean: bool) -> None:
    log = opened(files, CONFIG)
    for count in range(10):
        append(log, epoch=count // 4)
    log.start_over_at(offset)
    if clean:
        log.close()
    again = opened(files, CONFIG, clean=clean, recovery_point=offset, log_start_offset=offset)
    assert (again.log_start_offset, again.log_end_offset) == (offset, offset)
    assert again.epochs.entries == []
    again.check()


def test_what_was_dropped_is_left_for_readers_that_are_still_at_it(files: FakeFiles) -> None:
    log = opened(files, CONFIG)
    for _ in range(10):
        append(log)
    found = log.read(5, 1000, 10, at_least_one=True)
    assert found is not None
    before = found.file.read_at(found.position, found.size)
    log.start_over_at(4)
    append(log, epoch=1)
    assert found.file.read_at(found.position, found.size) == before
    assert sorted(log.pending_deletes) == [f"{DIRECTORY}/{name}" for name in names(files, ".deleted")]


def test_a_log_without_files_starts_over_at_an_offset(files: FakeFiles) -> None:
    """A new follower of a leader whose log no longer begins at 0."""
    log = opened(files, CONFIG)
    log.start_over_at(0)
    assert names(files) == []
    log.start_over_at(300)
    log.check()
    log.append_replicated(fetched(300, 2, epoch=4))
    flush(log)
    assert opened(files, CONFIG, clean=False, recovery_point=302).log_start_offset == 300


def test_the_epoch_of_a_snapshot_is_answered_for(files: FakeFiles) -> None:
    log = opened(files, CONFIG)
    append(log, epoch=1)
    log.start_over_at(100, epoch=5)
    assert log.epochs.latest == 5
    assert log.epochs.end_offset_for(5, log.log_end_offset) == (5, 100)
    log.append_replicated(fetched(100, 2, epoch=7))
    assert log.epochs.end_offset_for(5, log.log_end_offset) == (5, 100)
    assert log.epochs.end_offset_for(6, log.log_end_offset) == (5, 100)
    # What followed the snapshot was never committed.
    log.truncate_to(100)
    assert log.epochs.latest == 5
    assert log.epochs.end_offset_for(5, log.log_end_offset) == (5, 100)
    log.check()


@pytest.mark.parametrize("clean", [True, False])
def test_the_epoch_of_a_snapshot_survives_a_restart(files: FakeFiles, clean: bool) -> None:
    log = opened(files, CONFIG)
    log.start_over_at(100, epoch=5)
    if clean:
        log.close()
    assert opened(files, CONFIG, clean=clean, recovery_point=100).epochs.latest == 5


def test_a_flush_of_the_old_log_claims_nothing_of_the_new_one(files: FakeFiles) -> None:
    log = opened(files, CONFIG)
    for _ in range(10):
        append(log)
    offset, work = log.prepare_flush()
    log.start_over_at(5)
    for _ in range(10):
        append(log, epoch=1)
    work()
    log.flushed(offset)
    assert log.recovery_point == 5


def test_starting_over_works_on_a_full_disk(files: FakeFiles) -> None:
    log = opened(files, CONFIG)
    for _ in range(10):
        append(log)
    files.fail_after(0)
    log.start_over_at(20, epoch=3)
    assert log.log_end_offset == 20
    assert log.epochs.latest == 3
    files.fail_after(None)
    append(log, epoch=3)
    assert base_offsets(log) == [20]
    assert log.epochs.stored() == [(3, 20)]
    log.check()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("seed", range(60))
def test_a_crash_on_the_way_leaves_the_old_log_or_the_new_one_or_none(files: FakeFiles, seed: int) -> None:
    chance = random.Random(seed)
    log = opened(files, CONFIG)
    for count in range(10):
        append(log, epoch=count // 4)
    flush(log)
    offset = chance.choice(PLACES)
    steps = chance.randint(0, 25)

    def counted(name: str) -> Any:
        real = getattr(files, name)

        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            if steps == 0:
                raise Stopped
            steps -= 1
            return real(*arguments, **options)

        return step

    for name in ("rename", "remove", "replace", "sync_directory", "open"):
        setattr(files, name, counted(name))
    try:
        log.start_over_at(offset, epoch=7)
        log.append_replicated(fetched(offset, 3, epoch=8))
    except Stopped:
        pass
    for name in ("rename", "remove", "replace", "sync_directory", "open"):
        delattr(files, name)
    files.crash(chance)
    # The storage lowers the checkpoint before the log is touched.
    again = opened(files, CONFIG, clean=False, recovery_point=min(10, offset))
    again.check()
    found = base_offsets(again)
    if found and again.epochs.entries[-1][0] < 7:
        assert found == list(range(len(found)))
        assert again.epochs.entries == [(0, 0), (1, 4), (2, 8)][: (len(found) + 3) // 4]
    elif found:
        assert found == list(range(offset, offset + len(found)))
        assert again.epochs.entries == [(8, offset)]
    else:
        # An epoch may have begun whose first batch is lost.
        assert again.epochs.entries in ([], [(7, offset)], [(8, offset)])
        assert again.log_end_offset in (0, offset)
