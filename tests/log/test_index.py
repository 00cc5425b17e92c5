"""The sparse indexes: searching on disk and in memory, cutting, and files that make no sense."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log.config import LogConfig
from penstock.log.index import OffsetIndex, TimeIndex
from tests.log.making import DIRECTORY, NOW, append, base_offsets, made_files, opened
from tests.support_files import FakeFiles

PATH = f"{DIRECTORY}/00000000000000000000.index"
TIME_PATH = f"{DIRECTORY}/00000000000000000000.timeindex"


@pytest.fixture
def files() -> FakeFiles:
    files = made_files()
    files.make_directory(DIRECTORY)
    return files


@given(
    count=st.integers(0, 3000),
    pending=st.integers(0, 60),
    step=st.integers(1, 5),
    target=st.integers(-5, 9000),
)
def test_floor_finds_the_last_entry_not_above(count: int, pending: int, step: int, target: int) -> None:
    files = made_files()
    files.make_directory(DIRECTORY)
    index = OffsetIndex(files, PATH)
    entries = [(10 + number * step, 100 + number * 7) for number in range(count + pending)]
    for entry in entries[:count]:
        index.add(*entry)
    index.write()
    for entry in entries[count:]:
        index.add(*entry)
    assert len(index) == len(entries)
    assert list(index) == entries
    for column in (0, 1):
        place = bisect_right([entry[column] for entry in entries], target)
        assert index.floor(column, target) == (entries[place - 1] if place else None)
    assert index.last() == (entries[-1] if entries else None)


@given(count=st.integers(0, 200), pending=st.integers(0, 60), target=st.integers(-1, 300))
def test_cut_drops_the_entries_from_a_target_on(count: int, pending: int, target: int) -> None:
    files = made_files()
    files.make_directory(DIRECTORY)
    index = TimeIndex(files, TIME_PATH)
    entries = [(NOW + number, number) for number in range(count + pending)]
    for entry in entries[:count]:
        index.add(*entry)
    index.write()
    for entry in entries[count:]:
        index.add(*entry)
    index.cut(1, target)
    assert list(index) == [entry for entry in entries if entry[1] < target]
    index.write()
    again = TimeIndex(files, TIME_PATH)
    assert again.open()
    assert list(again) == list(index)


def test_a_left_over_file_is_not_taken_for_the_index_of_a_new_segment(files: FakeFiles) -> None:
    files.replace(PATH, bytes(80))
    files.replace(TIME_PATH, bytes(120))
    log = opened(files, LogConfig(index_interval_bytes=1))
    for _ in range(5):
        append(log)
    log.close()
    assert files.size(PATH) == 4 * 8
    assert files.size(TIME_PATH) == 12


INSANE = {
    "missing": None,
    "not whole entries": b"123",
    "zeros": bytes(24),
    "beyond the segment": b"\x00\x00\x00\x05\x7f\xff\xff\xff",
    "negative": b"\x80\x00\x00\x00\x80\x00\x00\x00",
    "not where a batch begins": b"\x00\x00\x00\x05\x00\x00\x00\x14",
    "of another offset": b"\x00\x00\x00\x09\x00\x00\x00\x48",
}


@pytest.mark.parametrize("name", INSANE)
@pytest.mark.parametrize("is_active", [True, False])
def test_an_insane_offset_index_is_made_again(files: FakeFiles, name: str, is_active: bool) -> None:
    config = LogConfig(index_interval_bytes=1, segment_ms=100_000)
    log = opened(files, config)
    for count in range(50):
        append(log, NOW + count)
    if not is_active:
        append(log, NOW + 1_000_000)
    log.close()
    good = files.read(PATH)
    files.remove(PATH)
    if (content := INSANE[name]) is not None:
        files.replace(PATH, content)
    log = opened(files, config)
    assert log.offset_for_timestamp(NOW + 30) == (30, NOW + 30, 0)
    assert base_offsets(log, bytes_max=300) == list(range(log.log_end_offset))
    log.check()
    log.close()
    assert files.read(PATH) == good


@pytest.mark.parametrize("content", [None, b"123", b"\xff" * 12, bytes(8) + b"\x80\0\0\0"])
def test_an_insane_time_index_is_made_again(files: FakeFiles, content: bytes | None) -> None:
    log = opened(files, LogConfig(index_interval_bytes=1))
    for count in range(50):
        append(log, NOW + count)
    log.close()
    good = files.read(TIME_PATH)
    files.remove(TIME_PATH)
    if content is not None:
        files.replace(TIME_PATH, content)
    log = opened(files)
    assert log.latest_timestamp() == (49, NOW + 49, 0)
    log.close()
    # The interval is another one now; the last entry is the same.
    assert files.read(TIME_PATH)[-12:] == good[-12:]


def test_an_entry_found_wrong_while_searching_has_the_index_made_again(files: FakeFiles) -> None:
    config = LogConfig(index_interval_bytes=1)
    log = opened(files, config)
    for _ in range(1000):
        append(log)
    log.close()
    good = files.read(PATH)
    log = opened(files, config)
    append(log)
    # Behind the back of a log that is open, in the middle of the index.
    files.damage(PATH, 8 * 400 + 7, 0x01)
    assert base_offsets(log, 401, bytes_max=500) == list(range(401, 1001))
    log.check()
    log.close()
    assert files.read(PATH)[: len(good)] == good


def test_no_flipped_bit_in_an_offset_index_misleads_a_reader(files: FakeFiles) -> None:
    config = LogConfig(index_interval_bytes=300)
    log = opened(files, config)
    for count in range(60):
        append(log, NOW + count)
    log.close()
    good = files.read(PATH)
    assert len(good) > 80
    for position in range(len(good)):
        for bit in (0x01, 0x10, 0x80):
            files.damage(PATH, position, bit)
            log = opened(files, config)
            for offset in (0, 7, 23, 41, 59):
                assert base_offsets(log, offset, bytes_max=500)[0] == offset
                assert log.offset_for_timestamp(NOW + offset) == (offset, NOW + offset, 0)
            log.abandon()
            files.replace(PATH, good)
