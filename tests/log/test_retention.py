"""What expires: by time, by size, never beyond the high watermark, oldest first."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.log.config import LogConfig
from penstock.log.log import Log
from tests.log.making import DIRECTORY, NOW, append, base_offsets, made_batch, made_files, opened
from tests.support_files import FakeFiles

BATCH_BYTES = len(made_batch()[0])
HOUR = 3_600_000


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


def hourly(files: FakeFiles, **settings: Any) -> Log:
    """Five segments of two batches; segment n is n hours younger than the first."""
    config = LogConfig(**{"segment_bytes": BATCH_BYTES * 2, "retention_ms": -1, **settings})
    log = opened(files, config)
    for hour in range(5):
        append(log, NOW + hour * HOUR)
        append(log, NOW + hour * HOUR - 5)
    return log


def test_segments_expire_when_their_newest_record_does(files: FakeFiles) -> None:
    log = hourly(files, retention_ms=HOUR)
    assert log.expire(NOW + HOUR, 10) == 0
    assert log.expire(NOW + HOUR + 1, 10) == 1
    assert log.log_start_offset == 2
    assert log.expire(NOW + 3 * HOUR + 1, 10) == 2
    assert base_offsets(log) == [6, 7, 8, 9]
    log.check()


def test_nothing_expires_beyond_the_ceiling(files: FakeFiles) -> None:
    log = hourly(files, retention_ms=1)
    assert log.expire(NOW + 100 * HOUR, 5) == 2
    assert log.log_start_offset == 4


def test_the_active_segment_expires_too(files: FakeFiles) -> None:
    log = hourly(files, retention_ms=1)
    assert log.expire(NOW + 100 * HOUR, 10) == 5
    assert (log.log_start_offset, log.log_end_offset) == (10, 10)
    assert log.expire(NOW + 200 * HOUR, 10) == 0, "an empty segment has nothing to expire"
    assert append(log) == 10
    log.check()


def test_one_that_must_stay_keeps_all_behind_it(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES, retention_ms=HOUR))
    append(log, NOW + 50 * HOUR)  # from the future
    append(log, NOW)
    append(log, NOW)
    assert log.expire(NOW + 2 * HOUR, 3) == 0


def test_without_timestamps_a_segment_is_as_old_as_its_file(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES, retention_ms=HOUR))
    append(log, -1)
    append(log, -1)
    written = files.clock.wall
    assert log.expire(written + HOUR, 2) == 0
    assert log.expire(written + HOUR + 1, 2) == 2


@pytest.mark.parametrize(
    ("batches_kept", "expired"), [(10, 0), (9, 0), (8, 1), (7, 1), (2, 4), (1, 4), (0, 5)]
)
def test_by_size_never_less_is_left_than_was_asked_for(
    files: FakeFiles, batches_kept: int, expired: int
) -> None:
    log = hourly(files, retention_bytes=BATCH_BYTES * batches_kept)
    assert log.expire(NOW, 10) == expired
    assert log.size_bytes == BATCH_BYTES * (10 - 2 * expired)


def test_time_and_size_add_up(files: FakeFiles) -> None:
    log = hourly(files, retention_ms=HOUR, retention_bytes=BATCH_BYTES * 6)
    # By time the first; by size the second.
    assert log.expire(NOW + HOUR + 1, 10) == 2
    log = hourly(made_files(), retention_ms=2 * HOUR, retention_bytes=BATCH_BYTES * 8)
    # By time the first three; that leaves less than the limit.
    assert log.expire(NOW + 4 * HOUR + 1, 10) == 3


def test_nothing_expires_when_all_is_to_be_kept(files: FakeFiles) -> None:
    log = hourly(files)
    assert log.expire(NOW + 10_000 * HOUR, 10) == 0


def test_expired_files_are_renamed_and_named_for_removal(files: FakeFiles) -> None:
    log = hourly(files, retention_ms=HOUR)
    log.expire(NOW + HOUR + 1, 10)
    assert sorted(log.pending_deletes) == [
        f"{DIRECTORY}/{0:020d}{suffix}.deleted" for suffix in (".index", ".log", ".timeindex")
    ]
    assert all(files.exists(path) for path in log.pending_deletes)


def test_old_segments_are_asked_for_their_age_once(files: FakeFiles) -> None:
    log = hourly(files, retention_ms=HOUR)
    log.close()
    log = opened(files, log.config)
    log.expire(NOW, 10)
    files.reads = 0
    log.expire(NOW, 10)
    assert files.reads == 0


def test_epochs_follow_the_start(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES, retention_ms=HOUR))
    for hour in range(4):
        append(log, NOW + hour * HOUR, epoch=hour)
    log.expire(NOW + 2 * HOUR + 1, 4)
    assert log.epochs.entries == [(2, 2), (3, 3)]


def test_idle_producers_expire_with_the_sweep(files: FakeFiles) -> None:
    log = opened(files, LogConfig(producer_expiration_ms=HOUR))
    append(log, producer=(1, 0, 0))
    assert log.producers.get(1) is not None
    log.expire(files.clock.wall + HOUR + 1, 1)
    assert log.producers.get(1) is not None, "the wall clock was set; no hour has passed"
    files.clock.advance(HOUR + 1)
    log.expire(files.clock.wall, 1)
    assert log.producers.get(1) is None
