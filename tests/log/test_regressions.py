"""Bugs that tests with real processes found in the log, each reduced to the log alone."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

from penstock.environment import Buffer, Environment
from penstock.log.log import Log, LogConfig
from penstock.machine import MachineClock, MachineFiles
from penstock.protocol.records import decode_header, encode_batch


class PromisedNames(MachineFiles):
    """Remembers which names a sync of their directory has covered, and can drop the others."""

    def __init__(self) -> None:
        super().__init__()
        self._promised: dict[str, set[str]] = {}

    def sync_directory(self, path: str) -> None:
        names = set(os.listdir(path))
        super().sync_directory(path)
        self._promised[path] = names

    def lose_power(self, directory: str) -> set[str]:
        """Remove what a power loss may; the names removed."""
        lost = set(os.listdir(directory)) - self._promised.get(directory, set())
        for name in lost:
            os.unlink(os.path.join(directory, name))
        return lost


def environment(files: MachineFiles) -> Environment:
    unused: Any = None
    return Environment(
        clock=MachineClock(), files=files, network=unused, random=random.Random(1), spawn=unused
    )


def append(log: Log, count: int) -> None:
    for _ in range(count):
        batch = encode_batch([(MachineClock().wall_ms(), None, b"value", [])])
        log.append(batch, decode_header(batch), 0)


def flush(log: Log) -> None:
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)


def test_a_log_closed_with_nothing_left_to_flush_opens_at_its_end_after_a_power_loss(tmp_path: Path) -> None:
    """The marker of a clean stop is durable; the name of the snapshot that a clean open goes by must be too."""
    directory = str(tmp_path / "t-0")
    files = PromisedNames()
    log = Log.open(environment(files), directory, LogConfig(), clean=False)
    append(log, 5)
    log.close()
    log = Log.open(environment(files), directory, LogConfig(), clean=True)
    append(log, 5)
    flush(log)
    log.close()

    files.lose_power(directory)
    log = Log.open(environment(files), directory, LogConfig(), clean=True)
    assert log.log_end_offset == 10
    append(log, 1)
    log.check()


class FullDisk(MachineFiles):
    """Small files cannot be written once it is full. (Renaming and removing needs no room.)"""

    is_full = False

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().replace(path, data, durable=durable)


def test_deleting_records_on_a_full_disk_makes_room(tmp_path: Path) -> None:
    files = FullDisk()
    log = Log.open(environment(files), str(tmp_path / "t-0"), LogConfig(segment_bytes=300), clean=False)
    append(log, 20)
    files.is_full = True
    log.delete_before(10)
    assert log.log_start_offset == 10
    assert log.doomed, "the segments are to be removed"
    files.is_full = False
    append(log, 1)
    flush(log)
    log.check()
    reopened = Log.open(environment(files), log.directory, log.config, clean=False, log_start_offset=10)
    assert reopened.log_start_offset == 10
    reopened.check()


def test_retention_on_a_full_disk_makes_room(tmp_path: Path) -> None:
    files = FullDisk()
    config = LogConfig(segment_bytes=300, retention_bytes=600)
    log = Log.open(environment(files), str(tmp_path / "t-0"), config, clean=False)
    append(log, 20)
    files.is_full = True
    assert log.expire(MachineClock().wall_ms(), log.log_end_offset) > 0
    assert log.log_start_offset > 0
    assert log.doomed, "the segments are to be removed"
