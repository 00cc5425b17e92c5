"""Compacting a log: what may be, when it is due, what is left, and how it gets into its place."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.log import cleaner_job
from penstock.log.cleaner_job import CannotClean, CleaningResult, clean
from penstock.log.cleaning_state import CLEANING, CleaningState, read_state
from penstock.log.compaction import Source, grouped
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.swapping import WrongCleaning
from penstock.protocol.compression import Codec
from penstock.protocol.records import (
    HEADER_SIZE,
    Record,
    batches,
    decode_header,
    decode_records,
    encode_batch,
    filler,
)
from tests.log.making import DIRECTORY, NOW, append_marker, flush, made_files, names, opened
from tests.support_files import FakeFiles

RETENTION_MS = 10_000


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


def config(**settings: Any) -> LogConfig:
    return LogConfig(
        **{
            "segment_bytes": 300,
            "is_compacted": True,
            "min_cleanable_dirty_ratio": 0.0,
            "delete_retention_ms": RETENTION_MS,
            **settings,
        }
    )


def put(
    log: Log, key: bytes, value: bytes | None, *, epoch: int = 0, timestamp: int = NOW, **options: Any
) -> int:
    batch = encode_batch([(timestamp, key, value, ())], **options)
    return log.append(batch, decode_header(batch), epoch)


def roll(log: Log) -> None:
    """Begin a segment: only those before it can be compacted."""
    put(log, b"roll", b"x" * 300)
    put(log, b"roll", b"x" * 300)


def compact(
    log: Log,
    files: FakeFiles,
    *,
    wall_ms: int | None = NOW,
    drop_below: int = 2**62,
    table_bytes: int = 24_000,
    latest_ms: int | None = None,
) -> CleaningResult | None:
    """A whole pass; None when the log is not due."""
    job = log.prepare_cleaning(
        log.log_end_offset,
        wall_ms,
        drop_below=drop_below,
        table_bytes=table_bytes,
        load_factor=0.9,
        latest_ms=latest_ms,
    )
    if job is None:
        return None
    result = clean(files, job)
    for group in result.groups:
        log.swapping.prepare_check(group)()
        log.swapping.prepare_intent(group)()
        assert log.swap(group)
        log.swapping.prepare_end()()
    log.swapping.prepare_end(CleaningState(result.clean_before))()
    log.check()
    return result


def records(log: Log) -> list[Record]:
    found: list[Record] = []
    offset = log.log_start_offset
    while (part := log.read(offset, 1 << 20, log.log_end_offset, at_least_one=True)) is not None:
        data = part.file.read_at(part.position, part.size)
        for position, header in batches(data):
            if not header.is_control:
                found += decode_records(data, position, bytes_max=1 << 20)
            offset = header.next_offset
    return found


def markers(log: Log) -> list[int]:
    segments = log._segments
    found = [segments.headers_in(segment, 0, log.log_end_offset) for segment in segments.items]
    return [header.base_offset for headers in found for header in headers if header.is_control]


def contents(log: Log) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(one.offset, one.key, one.value) for one in records(log) if one.key != b"roll"]


# What is left


@pytest.mark.parametrize("codec", list(Codec))
def test_the_last_value_of_each_key_stays_at_its_offset(files: FakeFiles, codec: Codec) -> None:
    log = opened(files, config())
    for number in range(20):
        batch = encode_batch(
            [(NOW + number, b"k%d" % (number % 3), b"%d" % number, ()), (NOW, b"own%d" % number, b"", ())],
            codec=codec,
        )
        log.append(batch, decode_header(batch), 0)
    roll(log)
    result = compact(log, files)
    assert result is not None and result.records_after < result.records_before
    expected = [(2 * number + 1, b"own%d" % number, b"") for number in range(20)]
    expected += [(2 * number, b"k%d" % (number % 3), b"%d" % number) for number in (17, 18, 19)]
    assert contents(log) == sorted(expected)
    assert [one.timestamp for one in records(log) if one.key == b"k2"] == [NOW + 17]


def test_offsets_without_records_are_covered_by_one_batch(files: FakeFiles) -> None:
    log = opened(files, config(segment_bytes=2000))
    for number in range(10):
        put(log, b"a", b"%d" % number)
    for _ in range(2):
        put(log, b"roll", b"x" * 2000)
    compact(log, files)
    part = log.read(0, 1 << 20, 10, at_least_one=True)
    assert part is not None
    header = decode_header(part.file.read_at(part.position, HEADER_SIZE))
    assert (header.base_offset, header.last_offset, header.count) == (0, 8, 0)
    assert contents(log) == [(9, b"a", b"9")]
    assert log.read(4, 1 << 20, 10, at_least_one=True) == part, "any offset can be read from"


def test_an_empty_batch_does_not_cover_two_epochs(files: FakeFiles) -> None:
    log = opened(files, config())
    for epoch in range(3):
        put(log, b"a", b"%d" % epoch, epoch=epoch)
        put(log, b"a", b"%d" % epoch, epoch=epoch)
    for _ in range(2):
        put(log, b"roll", b"x" * 300, epoch=2)
    compact(log, files)
    files.remove(f"{DIRECTORY}/leader-epoch-checkpoint")
    log.close()
    files.remove(f"{DIRECTORY}/leader-epoch-checkpoint")
    log = opened(files, config(), clean=False)
    assert list(log.epochs.entries) == [(0, 0), (1, 2), (2, 4)]


def test_small_segments_are_merged(files: FakeFiles) -> None:
    log = opened(files, config(segment_bytes=400))
    for number in range(60):
        put(log, b"%d" % (number % 5), b"x" * 20)
    before = len(names(files, ".log"))
    for _ in range(3):
        compact(log, files)
        put(log, b"roll", b"x" * 400)
    assert len(names(files, ".log")) <= before / 3


def test_a_merged_segment_is_no_larger_than_a_segment_may_be() -> None:
    sources = [Source(offset, offset + 10, 100) for offset in range(0, 50, 10)]
    assert [len(group) for group in grouped(sources, LogConfig(segment_bytes=250))] == [2, 2, 1]
    far = [Source(0, 10, 100), Source(10, 2**31, 100), Source(2**31, 2**31 + 5, 100)]
    assert [len(group) for group in grouped(far, LogConfig())] == [2, 1], "offsets in a segment have 31 bits"


def test_keys_that_do_not_fit_into_memory_take_several_passes(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(100):
        put(log, b"%d" % (number % 50), b"%d" % number)
    roll(log)
    passes = 0
    while compact(log, files, table_bytes=24 * 12) is not None:
        passes += 1
    assert passes > 5
    assert contents(log) == [(50 + number, b"%d" % number, b"%d" % (50 + number)) for number in range(50)]


def test_one_batch_with_more_keys_than_memory_is_not_compacted(files: FakeFiles) -> None:
    log = opened(files, config())
    batch = encode_batch([(NOW, b"%d" % number, b"", ()) for number in range(100)])
    log.append(batch, decode_header(batch), 0)
    roll(log)
    with pytest.raises(CannotClean, match=r"log\.cleaner\.dedupe\.buffer\.size"):
        compact(log, files, table_bytes=24 * 12)


def test_a_batch_that_unfolds_to_too_much_is_not_compacted(
    files: FakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner_job, "UNFOLDED_BYTES_MAX", 100_000)
    log = opened(files, config())
    put(log, b"a", bytes(200_000), codec=Codec.ZSTD)
    roll(log)
    with pytest.raises(CannotClean, match="more than 100000 bytes of zstd"):
        compact(log, files)
    assert not names(files, ".cleaned")


# What may be compacted, and when


def test_the_active_segment_and_open_transactions_are_not_touched(files: FakeFiles) -> None:
    log = opened(files, config())
    put(log, b"a", b"1")
    put(log, b"a", b"2")
    put(log, b"b", b"1", producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    for _ in range(3):
        put(log, b"b", b"2" * 200)
    compact(log, files)
    assert [offset for offset, _, _ in contents(log)] == [0, 1, 2, 3, 4, 5], (
        "the segment has an open transaction"
    )
    append_marker(log, 5, is_commit=True)
    roll(log)
    compact(log, files)
    assert [offset for offset, _, _ in contents(log)] == [1, 5]


def test_a_record_is_left_alone_until_the_lag_is_over(files: FakeFiles) -> None:
    log = opened(files, config(min_compaction_lag_ms=1000))
    put(log, b"a", b"1")
    put(log, b"a", b"2")
    put(log, b"roll", b"x" * 300)
    put(log, b"roll", b"x" * 300)
    assert compact(log, files, wall_ms=NOW + 500) is None
    assert compact(log, files, wall_ms=None) is None, "the clock cannot be trusted"
    compact(log, files, wall_ms=NOW + 1001)
    assert contents(log) == [(1, b"a", b"2")]


def test_a_log_is_due_by_its_dirty_share_or_by_age(files: FakeFiles) -> None:
    log = opened(files, config(min_cleanable_dirty_ratio=0.5, max_compaction_lag_ms=60_000))
    for number in range(100):
        put(log, b"%d" % number, b"x")
    roll(log)
    assert compact(log, files) is not None
    roll(log)
    assert log.first_dirty_offset == 101
    assert compact(log, files) is None, "most of it is clean"
    assert compact(log, files, wall_ms=NOW + 60_001) is not None


# Tombstones and markers


def test_a_tombstone_stays_its_time_from_the_latest_time_that_it_may_be(files: FakeFiles) -> None:
    """Otherwise it goes too early when the broker becomes certain of a later time."""
    log = opened(files, config())
    put(log, b"a", b"1")
    put(log, b"a", None)
    roll(log)
    assert compact(log, files, latest_ms=NOW + 5_000) is not None
    roll(log)
    assert compact(log, files, wall_ms=NOW + RETENTION_MS + 4_999) is not None
    assert contents(log) == [(1, b"a", None)]
    roll(log)
    assert compact(log, files, wall_ms=NOW + RETENTION_MS + 5_000) is not None
    assert contents(log) == []


def test_a_tombstone_goes_after_its_time_and_only_where_all_replicas_have_it(files: FakeFiles) -> None:
    log = opened(files, config())
    put(log, b"a", b"1")
    put(log, b"a", None)
    put(log, b"b", None)
    roll(log)
    compact(log, files, wall_ms=NOW)
    assert contents(log) == [(1, b"a", None), (2, b"b", None)]
    assert [one.timestamp for one in records(log)][:2] == [NOW, NOW]

    def again(wall_ms: int | None, drop_below: int) -> list[int]:
        roll(log)
        compact(log, files, wall_ms=wall_ms, drop_below=drop_below)
        return [offset for offset, _, _ in contents(log)]

    assert again(NOW + RETENTION_MS - 1, 100) == [1, 2]
    assert again(None, 100) == [1, 2], "the clock cannot be trusted"
    assert again(NOW + RETENTION_MS, 2) == [2], "a replica has not fetched the other one"
    assert again(NOW + RETENTION_MS, 3) == []


def test_aborted_records_go_and_their_marker_after_them(files: FakeFiles) -> None:
    log = opened(files, config(producer_expiration_ms=1))
    put(log, b"a", b"1")
    put(log, b"a", b"aborted", producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    append_marker(log, 5, is_commit=False)
    put(log, b"b", b"committed", producer_id=6, producer_epoch=0, base_sequence=0, transactional=True)
    append_marker(log, 6, is_commit=True)
    roll(log)
    files.clock.advance(10)
    log.producers.expire(log.steady_ms())
    compact(log, files, wall_ms=NOW)
    assert contents(log) == [(0, b"a", b"1"), (3, b"b", b"committed")]
    assert log.aborted_transactions(0, 10) == []
    roll(log)
    compact(log, files, wall_ms=NOW + RETENTION_MS)
    assert markers(log) == [4]
    assert contents(log) == [(0, b"a", b"1"), (3, b"b", b"committed")]


def test_the_last_batches_of_an_active_producer_stay_without_records(files: FakeFiles) -> None:
    log = opened(files, config())
    for sequence in range(8):
        put(log, b"a", b"%d" % sequence, producer_id=5, producer_epoch=0, base_sequence=sequence)
    put(log, b"a", b"other")
    roll(log)
    compact(log, files)
    assert contents(log) == [(8, b"a", b"other")]
    log.close()
    for name in names(files, ".snapshot"):
        files.remove(f"{DIRECTORY}/{name}")
    log = opened(files, config())
    state = log.producers.get(5)
    assert state is not None
    assert [batch.last_sequence for batch in state.batches] == [3, 4, 5, 6, 7]


# Getting into place


def test_a_read_that_began_before_the_swap_goes_on_in_the_old_file(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(6):
        put(log, b"a", b"%d" % number)
    roll(log)
    part = log.read(0, 1 << 20, 4, at_least_one=True)
    assert part is not None
    before = part.file.read_at(part.position, part.size)
    compact(log, files)
    assert part.file.read_at(part.position, part.size) == before
    assert part.file.path.endswith(".deleted")
    assert log.pending_deletes


def test_a_damaged_cleaned_file_is_not_used(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(6):
        put(log, b"a", b"%d" % number)
    roll(log)
    job = log.prepare_cleaning(log.log_end_offset, NOW, drop_below=0, table_bytes=24_000, load_factor=0.9)
    assert job is not None
    result = clean(files, job)
    files.damage(f"{DIRECTORY}/{names(files, '.log.cleaned')[0]}", 30, 1)
    with pytest.raises(WrongCleaning):
        log.swapping.prepare_check(result.groups[0])()


def test_nothing_is_swapped_into_a_log_that_was_cut_meanwhile(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(9):
        put(log, b"a", b"%d" % number)
    roll(log)
    job = log.prepare_cleaning(log.log_end_offset, NOW, drop_below=0, table_bytes=24_000, load_factor=0.9)
    assert job is not None
    result = clean(files, job)
    # Otherwise the truncation would remove the intent.
    log.swapping.state.committed_before = 0
    log.swapping.prepare_intent(result.groups[0])()
    log.truncate_to(2)
    flush(log)
    assert not log.swap(result.groups[0])
    # A crash now must not bring back what was cut: the intent is still on the disk.
    assert read_state(files, DIRECTORY)[0].swap is not None
    log = opened(files, config(), clean=False)
    assert log.log_end_offset == 2
    assert contents(log) == [(0, b"a", b"0"), (1, b"a", b"1")]


def test_a_full_disk_leaves_the_log_as_it_was(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(30):
        put(log, b"%d" % (number % 4), b"%d" % number)
    roll(log)
    before = contents(log)
    for room in range(0, 2000, 100):
        files.fail_after(room)
        try:
            compact(log, files)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            log.swapping.cut()
        else:
            break
        files.fail_after(None)
        assert {key: value for _, key, value in contents(log)} == {key: value for _, key, value in before}
        log.check()
    else:
        pytest.fail("it never had enough room")


def test_a_state_that_cannot_be_read_costs_only_another_pass(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(6):
        put(log, b"a", b"%d" % number)
    roll(log)
    compact(log, files)
    log.close()
    for broken in (b"", b"{}", b'{"version": 9}', b'{"version": 1, "first_dirty_offset": "x"}', b"\xff"):
        files.replace(f"{DIRECTORY}/{CLEANING}", broken)
        log = opened(files, config())
        assert log.first_dirty_offset == 0
        assert contents(log) == [(5, b"a", b"5")]


# Followers


def test_a_follower_takes_the_rest_of_an_empty_batch(files: FakeFiles) -> None:
    log = opened(files, config())
    put(log, b"a", b"1")
    put(log, b"a", b"2")
    data = filler(0, 9, 0)
    log.append_replicated(data)
    assert log.log_end_offset == 10
    assert [offset for offset, _, _ in contents(log)] == [0, 1]
    log.check()


def test_a_follower_does_not_take_a_damaged_empty_batch(files: FakeFiles) -> None:
    log = opened(files, config())
    put(log, b"a", b"1")
    data = filler(0, 9, 0)
    data[25] ^= 1
    with pytest.raises(Exception, match="offset 0 in a log that ends at 1"):
        log.append_replicated(data)
    assert log.log_end_offset == 1


def test_a_segment_can_be_replaced_many_times_before_its_old_files_are_removed(files: FakeFiles) -> None:
    log = opened(files, config(segment_bytes=400))
    for number in range(100):
        put(log, b"a", b"%d" % number + b"x" * 400)
        compact(log, files)
    old = names(files, ".deleted")
    assert len(old) > 100
    assert max(map(len, old)) < 60
    log = opened(files, config(segment_bytes=400), clean=False)
    assert sorted(log.pending_deletes) == [f"{DIRECTORY}/{name}" for name in old]
