"""Bugs that tests with real processes found in the log, each reduced to the log alone."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.environment import Buffer, Environment
from penstock.log.log import Log, LogConfig
from penstock.machine import MachineClock, MachineFiles
from penstock.protocol.records import batches, crc_matches, decode_header, encode_batch

FIRST_TIMESTAMP = 1_700_000_000_000


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
        clock=MachineClock(),
        files=files,
        network=unused,
        random=random.Random(1),
        spawn=unused,
        processes=unused,
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
    assert log.pending_deletes, "the segments are to be removed"
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
    assert log.pending_deletes, "the segments are to be removed"


@pytest.mark.parametrize("is_expired", [False, True])
def test_the_last_segment_goes_on_a_full_disk_if_a_little_room_can_be_made(
    tmp_path: Path, is_expired: bool
) -> None:
    """An empty one has to take its place, and what producers have written has to be written down."""
    files = FullDisk()
    log = Log.open(environment(files), str(tmp_path / "t-0"), LogConfig(retention_bytes=0), clean=False)
    append(log, 20)
    files.is_full = True

    def delete() -> None:
        if is_expired:
            log.expire(MachineClock().wall_ms(), log.log_end_offset)
        else:
            log.delete_before(log.log_end_offset, frees_last=True)

    given: list[int] = []

    def give_room() -> bool:
        given.append(len(given))
        files.is_full = len(given) < 2
        return True

    log.give_room = give_room
    delete()
    assert given == [0, 1]
    assert log.size_bytes == 0 and log.log_start_offset == log.log_end_offset == 20
    assert log.pending_deletes
    log.check()


# Damage


def closed_log(directory: Path, count: int, config: LogConfig) -> None:
    """A log of so many batches of one record, one millisecond apart, flushed and closed."""
    log = Log.open(environment(MachineFiles()), str(directory), config, clean=False)
    for number in range(count):
        batch = encode_batch([(FIRST_TIMESTAMP + number, None, b"value %d" % number, [])])
        log.append(batch, decode_header(batch), 0)
    flush(log)
    log.close()


def offsets_read(log: Log) -> list[int]:
    offsets: list[int] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        found = log.read(offset, 1 << 20, log.log_end_offset, at_least_one=True)
        assert found is not None
        data = found.file.read_at(found.position, found.size)
        for position, header in batches(data):
            assert crc_matches(data, position, header), f"a damaged batch at {header.base_offset} was served"
            offsets += range(header.base_offset, header.next_offset)
            offset = header.next_offset
    return offsets


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_recovery_does_not_believe_a_base_offset_that_leaves_a_gap(tmp_path: Path) -> None:
    """The checksum of a batch does not cover its base offset: that of the batch before does tell it."""
    closed_log(tmp_path, 20, LogConfig(segment_bytes=500))
    damaged = sorted(tmp_path.glob("*.log"))[1]
    base_offset = int(damaged.stem)
    first = decode_header(damaged.read_bytes())
    flip(damaged, first.size + 5)
    log = Log.open(environment(MachineFiles()), str(tmp_path), LogConfig(segment_bytes=500), clean=False)
    assert log.log_end_offset == base_offset + 1
    assert offsets_read(log) == list(range(base_offset + 1))


def test_recovery_keeps_the_bytes_behind_a_damaged_batch(tmp_path: Path) -> None:
    """Good batches may stand behind a bad one. They are no longer part of the log, but they are not deleted."""
    closed_log(tmp_path, 20, LogConfig())
    (path,) = tmp_path.glob("*.log")
    size = path.stat().st_size
    position, header = list(batches(path.read_bytes()))[10]
    flip(path, position + header.size - 3)
    log = Log.open(environment(MachineFiles()), str(tmp_path), LogConfig(), clean=False)
    assert log.log_end_offset == 10
    assert offsets_read(log) == list(range(10))
    kept = sum(one.stat().st_size for one in tmp_path.glob("*.log*"))
    assert kept >= size


@pytest.mark.parametrize("harm", ["cut", "garbage"])
def test_a_log_whose_end_was_damaged_after_it_was_closed_is_served_up_to_there(
    tmp_path: Path, harm: str
) -> None:
    """Not refused for ever, nor a reason to stop the broker: it is recovered, as after a kill."""
    closed_log(tmp_path, 20, LogConfig())
    (path,) = tmp_path.glob("*.log")
    if harm == "cut":
        os.truncate(path, path.stat().st_size - 10)
    else:
        path.write_bytes(path.read_bytes() + b"garbage" * 50)
    log = Log.open(environment(MachineFiles()), str(tmp_path), LogConfig(), clean=True)
    expected = list(range(19 if harm == "cut" else 20))
    append(log, 1)
    assert offsets_read(log) == [*expected, len(expected)]
    log.check()


def test_a_flipped_bit_in_a_time_index_does_not_mislead_a_lookup(tmp_path: Path) -> None:
    """An entry names a batch, and the batch says whether the entry is right."""
    config = LogConfig(segment_bytes=2000, index_interval_bytes=100)
    closed_log(tmp_path / "t-0", 60, config)
    original = sorted((tmp_path / "t-0").glob("*.timeindex"))[0]
    misled = []
    for position in range(original.stat().st_size):
        copy = tmp_path / f"copy-{position}"
        shutil.copytree(tmp_path / "t-0", copy)
        flip(copy / original.name, position)
        log = Log.open(environment(MachineFiles()), str(copy), config, clean=True)
        for offset in range(60):
            found = log.offset_for_timestamp(FIRST_TIMESTAMP + offset)
            if found is None or found[0] != offset:
                misled.append((position, offset, found))
        log.close()
        shutil.rmtree(copy)
    assert not misled, f"{len(misled)} wrong answers, such as {misled[0]}"


def test_recovery_keeps_the_bytes_behind_a_batch_with_a_damaged_length(tmp_path: Path) -> None:
    """A length that points behind the end looks like a torn write, which only the last segment can have."""
    config = LogConfig(segment_bytes=500)
    closed_log(tmp_path, 20, config)
    size = sum(one.stat().st_size for one in tmp_path.glob("*.log"))
    damaged = sorted(tmp_path.glob("*.log"))[1]
    flip(damaged, 9)
    log = Log.open(environment(MachineFiles()), str(tmp_path), config, clean=False)
    assert log.log_end_offset == int(damaged.stem)
    assert sum(one.stat().st_size for one in tmp_path.glob("*.log*")) >= size


def test_a_completed_segment_that_was_cut_after_the_log_was_closed_is_served_up_to_there(
    tmp_path: Path,
) -> None:
    config = LogConfig(segment_bytes=500)
    closed_log(tmp_path, 20, config)
    damaged = sorted(tmp_path.glob("*.log"))[1]
    os.truncate(damaged, damaged.stat().st_size - 10)
    last = int(sorted(tmp_path.glob("*.log"))[2].stem) - 1
    log = Log.open(environment(MachineFiles()), str(tmp_path), config, clean=True)
    served = []
    for offset in range(last):
        found = log.read(offset, 1, log.log_end_offset, at_least_one=True)
        assert found is not None
        served.append(decode_header(found.file.read_at(found.position, found.size)).base_offset)
    assert served == list(range(last))


def test_a_position_before_the_file_in_an_index_is_noticed(tmp_path: Path) -> None:
    """One flipped bit makes a position negative, which no read accepts."""
    config = LogConfig(segment_bytes=2000, index_interval_bytes=100)
    closed_log(tmp_path / "t-0", 40, config)
    original = sorted((tmp_path / "t-0").glob("*.index"))[0]
    for entry in range(0, original.stat().st_size, 8):
        copy = tmp_path / f"copy-{entry}"
        shutil.copytree(tmp_path / "t-0", copy)
        data = bytearray(original.read_bytes())
        data[entry + 4] ^= 0x80
        (copy / original.name).write_bytes(data)
        log = Log.open(environment(MachineFiles()), str(copy), config, clean=True)
        found = [log.offset_for_timestamp(FIRST_TIMESTAMP + offset) for offset in range(40)]
        assert [one and one[0] for one in found] == list(range(40))
        assert offsets_read(log) == list(range(40))


def test_a_flipped_bit_in_the_epochs_does_not_stop_the_next_append(tmp_path: Path) -> None:
    """Found by test_corruption.py with PENSTOCK_CHAOS_SEED=1437705561: epoch 0 had become 4."""
    config = LogConfig(segment_bytes=2000)
    closed_log(tmp_path / "t-0", 40, config)
    path = tmp_path / "t-0" / "leader-epoch-checkpoint"
    original = path.read_text()
    assert original.endswith("\n0 0\n")
    path.write_text(original[: -len("0 0\n")] + "4 0\n")
    log = Log.open(environment(MachineFiles()), str(tmp_path / "t-0"), config, clean=True)
    batch = encode_batch([(FIRST_TIMESTAMP, None, b"next", [])])
    assert log.append(batch, decode_header(batch), 0) == 40
    assert log.epochs.entries == [(0, 0)]
    log.check()
    log.close()
    assert path.read_text() == original
