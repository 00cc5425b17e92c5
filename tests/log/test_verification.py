"""Damage that a disk did while nobody looked: never handed out, found where it begins, and healed from there."""

from __future__ import annotations

import errno
import random
from itertools import pairwise

import pytest

from penstock.log.config import LogConfig
from penstock.log.log import CorruptLog, Log
from penstock.protocol.records import batches
from tests.log.making import DIRECTORY, NOW, append, base_offsets, made_batch, made_files, names, opened
from tests.support_files import FakeFiles

BATCH_BYTES = len(made_batch()[0])
CONFIG = LogConfig(segment_bytes=BATCH_BYTES * 4, index_interval_bytes=BATCH_BYTES)
COUNT = 10


def path(base_offset: int, suffix: str = ".log") -> str:
    return f"{DIRECTORY}/{base_offset:020d}{suffix}"


def closed(count: int = COUNT, config: LogConfig = CONFIG) -> FakeFiles:
    files = made_files()
    log = opened(files, config)
    for offset in range(count):
        append(log, NOW + offset, epoch=offset // 3)
    log.close()
    return files


def all_bytes(files: FakeFiles) -> bytes:
    return b"".join(files.read(f"{DIRECTORY}/{name}") for name in names(files, ".log"))


def read_until_damage(log: Log, bytes_max: int) -> tuple[bytes, int | None]:
    """All that a consumer gets, and the offset that the error names."""
    data = bytearray()
    offset = log.log_start_offset
    try:
        while (found := log.read(offset, bytes_max, log.log_end_offset, at_least_one=True)) is not None:
            piece = found.file.read_at(found.position, found.size)
            data += piece
            for _, header in batches(piece):
                offset = header.next_offset
    except CorruptLog as error:
        assert error.errno == errno.EIO
        return bytes(data), error.offset
    return bytes(data), None


@pytest.mark.parametrize("bytes_max", [1, BATCH_BYTES * 3, 1 << 20])
def test_a_flipped_bit_anywhere_is_never_handed_out(bytes_max: int) -> None:
    whole = all_bytes(closed())
    for place in range(len(whole)):
        files = closed()
        # Only the closing of the log tells the end of it, so what is there must be looked at: see ``Log.open``.
        victim = place // (BATCH_BYTES * 4) * 4
        log = opened(files, CONFIG)
        files.damage(path(victim), place % (BATCH_BYTES * 4), 0x04)
        damaged = place // BATCH_BYTES
        got, offset = read_until_damage(log, bytes_max)
        if offset is None:
            # The epoch of the last batch of all: nothing contradicts it.
            assert damaged == COUNT - 1 and place % BATCH_BYTES in range(12, 16)
            continue
        assert whole.startswith(got), place
        # Of two batches whose epochs contradict each other either may be blamed.
        assert offset in (damaged, damaged - 1) if place % BATCH_BYTES in range(12, 16) else offset == damaged
        # All before it can be read, but in one read with what lies behind it only in parts.
        assert len(got) <= offset * BATCH_BYTES < len(got) + max(bytes_max, BATCH_BYTES)

        # A replica cuts it off there and fetches the rest again.
        log.truncate_to(offset)
        assert log.log_end_offset == offset
        log.check()
        log.append_replicated(whole[offset * BATCH_BYTES :])
        log.check()
        assert read_until_damage(log, bytes_max) == (whole, None)
        assert all_bytes(files) == whole


def test_what_this_process_wrote_is_not_read_again() -> None:
    files = closed()
    log = opened(files, CONFIG)
    append(log, epoch=4)
    files.damage(path(8), BATCH_BYTES * 2 + 70, 1)
    found = log.read(10, 1000, 11, at_least_one=True)
    assert found is not None


def test_bytes_are_checked_once() -> None:
    files = closed(200, config := LogConfig(index_interval_bytes=BATCH_BYTES * 10))
    log = opened(files, config)
    assert base_offsets(log, bytes_max=BATCH_BYTES * 7) == list(range(200))
    assert log._segments.items[0].trusted_from == 0
    # Nobody knows, and nobody looks.
    files.damage(path(0), 70, 1)
    assert log.read(0, 1000, 200, at_least_one=True) is not None


def test_what_recovery_has_read_is_not_read_again() -> None:
    files = closed()
    log = opened(files, CONFIG, clean=False)
    assert [segment.trusted_from for segment in log._segments.items] == [0, 0, 0]
    log = opened(files, CONFIG, clean=False, recovery_point=9)
    assert log.size_bytes == COUNT * BATCH_BYTES
    assert [segment.trusted_from for segment in log._segments.items] == [4 * BATCH_BYTES, 4 * BATCH_BYTES, 0]


@pytest.mark.parametrize("seed", range(20))
def test_readers_who_jump_about_are_remembered_within_bounds(seed: int) -> None:
    chance = random.Random(seed)
    count = 1000
    files = closed(count, config := LogConfig(index_interval_bytes=BATCH_BYTES * 3))
    log = opened(files, config)
    segment = log._segments.items[0]
    for _ in range(400):
        offset = chance.randrange(count)
        found = log.read(offset, BATCH_BYTES * chance.choice([1, 1, 5, 40]), count, at_least_one=True)
        assert found is not None and found.position <= offset * BATCH_BYTES
        checked = segment.checked
        assert len(checked) <= 64
        assert all(start < end for start, end, _ in checked)
        assert all(before[1] < after[0] for before, after in pairwise(checked))
        assert all(end < segment.trusted_from for _, end, _ in checked)
        assert all(end == next_offset * BATCH_BYTES for _, end, next_offset in checked)
    assert base_offsets(log) == list(range(count))
    assert (segment.trusted_from, segment.checked) == (0, ())


def test_a_range_ends_before_the_damage() -> None:
    files = closed(10, LogConfig())
    log = opened(files)
    files.damage(path(0), BATCH_BYTES * 6 + 70, 1)
    assert base_offsets_in(log, 2) == [2, 3, 4, 5]
    for _ in range(2):
        with pytest.raises(CorruptLog) as caught:
            log.read(6, 1 << 20, 10, at_least_one=True)
        assert caught.value.offset == 6


def test_damage_before_the_place_that_is_read_is_noticed() -> None:
    """As far back as the index knows a batch whose offset can be believed."""
    files = closed(10, LogConfig())
    log = opened(files)
    files.damage(path(0), BATCH_BYTES * 2 + 7, 1)  # the base offset
    with pytest.raises(CorruptLog) as caught:
        log.read(5, 1 << 20, 10, at_least_one=True)
    assert caught.value.offset == 2


@pytest.mark.parametrize("size", [1000, 700_000, 3 << 20])
def test_a_first_read_is_of_one_piece_at_a_time(size: int) -> None:
    """However large the reader's buffer, and though one batch may be larger than a piece."""
    files = made_files()
    log = opened(files)
    while log.size_bytes < 8 << 20:
        append(log, size=size)
    log.close()
    log = opened(files)
    found = []
    offset = 0
    while offset < log.log_end_offset:
        piece = log.read(offset, 64 << 20, log.log_end_offset, at_least_one=False)
        assert piece is not None and piece.size <= max(1 << 20, size + 100)
        found += [header.base_offset for _, header in batches(piece.file.read_at(piece.position, piece.size))]
        offset = found[-1] + 1
    assert found == list(range(log.log_end_offset))
    whole = log.read(0, 64 << 20, log.log_end_offset, at_least_one=False)
    assert whole is not None and whole.size == log.size_bytes


def test_a_damaged_segment_is_looked_through_once() -> None:
    files = closed(300, config := LogConfig(index_interval_bytes=BATCH_BYTES * 10))
    log = opened(files, config)
    files.damage(path(0), BATCH_BYTES * 5 + 16, 0xFF)  # no batch at all
    with pytest.raises(CorruptLog):
        log.read(6, 100, 300, at_least_one=True)
    reads = files.reads
    for _ in range(5):
        with pytest.raises(CorruptLog) as caught:
            log.read(6, 100, 300, at_least_one=True)
        assert caught.value.offset == 5
    assert files.reads - reads < 30


def test_a_damaged_batch_that_the_index_names_is_not_taken_for_a_wrong_index() -> None:
    files = closed(40, config := LogConfig(index_interval_bytes=BATCH_BYTES))
    log = opened(files, config)
    named = list(log._segments.items[0].offsets)[5][0]
    files.damage(path(0), BATCH_BYTES * named + 7, 1)  # its base offset
    got, offset = read_until_damage(log, BATCH_BYTES * 3)
    assert offset == named
    assert named - 3 <= len(got) // BATCH_BYTES <= named
    index = files.read(path(0, ".index"))
    log.truncate_to(named)
    assert files.read(path(0, ".index")) == index[: 5 * 8]
    log.check()


def test_a_cut_takes_a_damaged_batch_before_it_along() -> None:
    files = closed(10, LogConfig())
    log = opened(files)
    files.damage(path(0), BATCH_BYTES * 3 + 16, 0xFF)
    log.truncate_to(7)
    assert log.log_end_offset == 3
    log.check()


def base_offsets_in(log: Log, offset: int) -> list[int]:
    found = log.read(offset, 1 << 20, log.log_end_offset, at_least_one=True)
    assert found is not None
    data = found.file.read_at(found.position, found.size)
    return [header.base_offset for _, header in batches(data)]
