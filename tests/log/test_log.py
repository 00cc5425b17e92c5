"""Appending, reading, rolling, looking up, shortening and flushing one log."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator

import pytest
from crc32c import crc32c

from penstock.log import timestamp_lookup
from penstock.log.config import LogConfig
from penstock.log.log import CorruptLog, Log, OffsetOutOfRange
from penstock.protocol.compression import Codec
from penstock.protocol.records import (
    BatchHeader,
    CorruptBatch,
    check_produced,
    decode_timestamps,
    encode_batch,
    set_log_append_time,
)
from tests.log.making import (
    DIRECTORY,
    NOW,
    append,
    base_offsets,
    flush,
    headers_in,
    made_batch,
    made_files,
    names,
    opened,
)
from tests.support_files import FakeFiles

BATCH_BYTES = len(made_batch()[0])
SMALL_SEGMENTS = LogConfig(segment_bytes=BATCH_BYTES * 3, index_interval_bytes=1)


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


# Appending and reading


def test_a_log_that_was_never_written_has_no_files(files: FakeFiles) -> None:
    log = opened(files)
    assert (log.log_start_offset, log.log_end_offset, log.size_bytes) == (0, 0, 0)
    assert log.read(0, 1000, 0, at_least_one=True) is None
    assert log.offset_for_timestamp(0) is None
    assert log.latest_timestamp() is None
    log.close()
    assert not files.exists(DIRECTORY)


def test_append_gives_offsets_and_epoch(files: FakeFiles) -> None:
    log = opened(files)
    assert append(log, NOW, NOW, epoch=3) == 0
    assert append(log, NOW, epoch=3) == 2
    assert log.log_end_offset == 3
    headers = headers_in(log.read(0, 1 << 20, 3, at_least_one=False))
    assert [(header.base_offset, header.leader_epoch) for header in headers] == [(0, 3), (2, 3)]


def test_an_offset_inside_a_batch_gets_the_whole_batch(files: FakeFiles) -> None:
    log = opened(files)
    append(log, *[NOW] * 10)
    append(log, *[NOW] * 10)
    for offset in range(10):
        assert headers_in(log.read(offset, 1 << 20, 20, at_least_one=False))[0].base_offset == 0
    for offset in range(10, 20):
        assert headers_in(log.read(offset, 1 << 20, 20, at_least_one=False))[0].base_offset == 10


def test_reads_outside_the_log_are_refused(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    log.delete_before(1)
    append(log)
    for offset in (-1, 0, 3):
        with pytest.raises(OffsetOutOfRange):
            log.read(offset, 1000, 2, at_least_one=True)
    assert log.read(2, 1000, 2, at_least_one=True) is None


def test_nothing_at_or_behind_the_ceiling_is_read(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(5):
        append(log, NOW, NOW)
    for ceiling in range(11):
        headers = headers_in(log.read(0, 1 << 20, ceiling, at_least_one=True))
        assert len(headers) == ceiling // 2
    assert log.read(4, 1 << 20, 3, at_least_one=True) is None


def test_only_whole_batches_are_read_within_the_limit(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(200):
        append(log)
    for bytes_max in (BATCH_BYTES, BATCH_BYTES * 2 - 1, BATCH_BYTES * 7 + 3):
        found = log.read(5, bytes_max, 200, at_least_one=False)
        assert len(headers_in(found)) == bytes_max // BATCH_BYTES


def test_a_first_batch_larger_than_the_limit_is_read_only_when_asked_for(files: FakeFiles) -> None:
    log = opened(files)
    append(log, size=5000)
    append(log)
    assert log.read(0, 100, 2, at_least_one=False) is None
    assert len(headers_in(log.read(0, 100, 2, at_least_one=True))) == 1


def test_a_consumer_that_reads_on_needs_no_search(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(3000):
        append(log)
    found = log.read(0, 50_000, 3000, at_least_one=True)
    offset = headers_in(found)[-1].next_offset
    files.reads = 0
    log.read(offset, 50_000, 3000, at_least_one=True)
    # To find where the next 50,000 bytes end: a search in the index, and the header there.
    assert files.reads <= 4


def test_a_consumer_at_the_tail_causes_no_reads(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(100):
        append(log)
        files.reads = 0
        found = log.read(log.log_end_offset - 1, 1 << 20, log.log_end_offset, at_least_one=True)
        assert files.reads == 0
        assert len(headers_in(found)) == 1


def test_many_consumers_are_remembered_within_bounds(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(500):
        append(log)
    for offset in range(0, 500, 2):
        log.read(offset, BATCH_BYTES * 3, 500, at_least_one=True)
    log.check()
    assert base_offsets(log, bytes_max=BATCH_BYTES * 3) == list(range(500))


def test_replicated_batches_keep_their_offsets_and_epochs(files: FakeFiles) -> None:
    log = opened(files)
    first = encode_batch([(NOW, None, b"a", ())] * 2, base_offset=0, leader_epoch=4)
    second = encode_batch([(NOW, None, b"b", ())], base_offset=2, leader_epoch=6)
    log.append_replicated(bytes(first + second))
    assert log.log_end_offset == 3
    assert log.epochs.entries == [(4, 0), (6, 2)]
    log.check()


@pytest.mark.parametrize("base_offset", [0, 1, 3])
def test_replicated_batches_must_continue_the_log(files: FakeFiles, base_offset: int) -> None:
    log = opened(files)
    append(log, NOW, NOW)
    with pytest.raises(CorruptBatch):
        log.append_replicated(encode_batch([(NOW, None, b"v", ())], base_offset=base_offset, leader_epoch=0))
    assert log.log_end_offset == 2


# Rolling


def test_segments_roll_by_size(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for _ in range(10):
        append(log)
    assert names(files, ".log") == [f"{offset:020d}.log" for offset in (0, 3, 6, 9)]
    assert log.has_rolled
    assert base_offsets(log) == list(range(10))
    log.check()


def test_a_batch_larger_than_a_segment_has_one_to_itself(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    append(log, size=5000)
    append(log)
    append(log, size=5000)
    assert names(files, ".log") == [f"{offset:020d}.log" for offset in (0, 1, 2)]


def test_segments_roll_by_the_time_of_their_records(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_ms=1000))
    append(log, NOW)
    append(log, NOW + 1000)
    files.clock.advance(1_000_000)  # the wall clock does not matter
    append(log, NOW + 500)
    assert len(log._segments.items) == 1
    append(log, NOW + 1001)
    assert len(log._segments.items) == 2


def test_segments_without_timestamps_roll_by_the_clock(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_ms=1000))
    append(log, -1)
    files.clock.advance(1000)
    append(log, -1)
    assert len(log._segments.items) == 1
    files.clock.advance(1)
    append(log, -1)
    assert len(log._segments.items) == 2


def test_segments_roll_when_the_time_index_is_full(files: FakeFiles) -> None:
    # Room for six time entries, of which one is kept for the last: a segment is one batch and five with entries.
    log = opened(files, LogConfig(segment_index_bytes=6 * 12, index_interval_bytes=1))
    for count in range(14):
        append(log, NOW + count)
    assert names(files, ".log") == [f"{offset:020d}.log" for offset in (0, 6, 12)]
    assert files.size(f"{DIRECTORY}/{0:020d}.timeindex") == 5 * 12
    log.check()


def test_segments_roll_when_the_offset_index_is_full(files: FakeFiles) -> None:
    # Timestamps that do not grow leave the time index almost empty.
    log = opened(files, LogConfig(segment_index_bytes=6 * 8, index_interval_bytes=1))
    for _ in range(15):
        append(log, NOW)
    assert names(files, ".log") == [f"{offset:020d}.log" for offset in (0, 7, 14)]
    assert files.size(f"{DIRECTORY}/{0:020d}.index") == 6 * 8
    log.check()


def test_segments_roll_before_a_relative_offset_overflows(files: FakeFiles) -> None:
    log = opened(files)
    # A client may say that a small compressed batch holds two billion records.
    batch = encode_batch([(NOW, None, b"v", ())])
    struct.pack_into(">i", batch, 23, 2**31 - 2)
    struct.pack_into(">i", batch, 57, 2**31 - 1)
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    header = check_produced(memoryview(batch), max_message_bytes=1000)
    assert isinstance(header, BatchHeader)
    for _ in range(2):
        log.append(batch, header, 0)
        append(log)
    assert names(files, ".log") == [f"{offset:020d}.log" for offset in (0, 2**31)]
    assert base_offsets(log) == [0, 2**31 - 1, 2**31, 2**32 - 1]
    log.check()


def test_settings_may_change_while_the_log_is_used(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    append(log)
    log.config = SMALL_SEGMENTS
    for _ in range(4):
        append(log)
    assert len(log._segments.items) == 2


# Failing disks


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO])
def test_a_failed_append_leaves_the_log_as_it_was(files: FakeFiles, failure: int) -> None:
    log = opened(files)
    append(log)
    files.fail_after(BATCH_BYTES - 1, failure)
    with pytest.raises(OSError) as raised:
        append(log)
    assert raised.value.errno == failure
    assert log.log_end_offset == 1
    log.check()
    files.fail_after(None)
    assert append(log) == 1
    assert base_offsets(log) == [0, 1]


def test_a_first_append_may_fail(files: FakeFiles) -> None:
    log = opened(files)
    files.fail_after(0)
    for _ in range(2):
        with pytest.raises(OSError, match="space"):
            append(log)
        assert log.log_end_offset == 0
        log.check()
    files.fail_after(None)
    append(log)
    log.close()
    assert opened(files).log_end_offset == 1


@pytest.mark.parametrize("room", range(0, 400, 9))
def test_a_roll_may_fail_anywhere(files: FakeFiles, room: int) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for _ in range(3):
        append(log, producer=None)
    files.fail_after(room)
    failed = 0
    for _ in range(3):
        try:
            append(log, epoch=1)
        except OSError:
            failed += 1
        log.check()
    files.fail_after(None)
    end = log.log_end_offset
    assert end == 6 - failed
    # The disk has room again, but the batch that comes now fits into the old segment.
    log.config = LogConfig()
    append(log, epoch=1)
    log.check()
    for clean in (True, False):
        if clean:
            log.close()
        log = opened(files, SMALL_SEGMENTS, clean=clean)
        assert log.log_end_offset == end + 1
        assert base_offsets(log) == list(range(end + 1))
        log.check()


def test_an_index_that_cannot_be_written_does_not_fail_the_append(files: FakeFiles) -> None:
    log = opened(files, LogConfig(index_interval_bytes=1))
    for _ in range(64):
        append(log)
    # Room for batches only: the 64th index entry would be the one to write them all.
    files.fail_after(BATCH_BYTES * 3)
    for _ in range(3):
        append(log)
    files.fail_after(None)
    assert log.log_end_offset == 67
    log.check()
    log.close()
    assert files.size(f"{DIRECTORY}/{0:020d}.index") == 66 * 8


# Timestamps


@pytest.mark.parametrize("codec", Codec)
def test_a_timestamp_is_looked_up_exactly(files: FakeFiles, codec: Codec) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for start in range(0, 100, 10):
        append(log, *[NOW + start + delta for delta in range(0, 10, 2)], codec=codec, epoch=start // 50)
    for delta in range(100):
        expected = (delta + 1) // 2
        found = log.offset_for_timestamp(NOW + delta)
        if expected == 50:
            assert found is None
        else:
            assert found == (expected, NOW + expected * 2, expected // 25)
    assert log.offset_for_timestamp(0) == (0, NOW, 0)


def test_timestamps_out_of_order_find_the_first_record_that_qualifies(files: FakeFiles) -> None:
    log = opened(files, LogConfig(index_interval_bytes=1))
    append(log, NOW + 50, NOW + 10, NOW + 90)
    append(log, NOW + 20)
    append(log, NOW + 100)
    assert log.offset_for_timestamp(NOW + 60) == (2, NOW + 90, 0)
    assert log.offset_for_timestamp(NOW + 91) == (4, NOW + 100, 0)
    assert log.offset_for_timestamp(NOW + 5) == (0, NOW + 50, 0)


def test_records_before_the_log_start_are_not_found_by_timestamp(files: FakeFiles) -> None:
    log = opened(files)
    append(log, NOW, NOW + 1, NOW + 2)
    append(log, NOW + 1)
    log.delete_before(2)
    assert log.offset_for_timestamp(NOW) == (2, NOW + 2, 0)
    assert log.latest_timestamp() == (2, NOW + 2, 0)
    log.delete_before(3)
    assert log.latest_timestamp() == (3, NOW + 1, 0)


def test_log_append_time_needs_no_unfolding(files: FakeFiles) -> None:
    log = opened(files)
    batch, header = made_batch(NOW, NOW, NOW, codec=Codec.ZSTD)
    header = set_log_append_time(batch, 0, header, NOW + 77)
    log.append(batch, header, 0)
    assert log.offset_for_timestamp(NOW + 77) == (0, NOW + 77, 0)
    assert log.latest_timestamp() == (0, NOW + 77, 0)


def test_a_batch_that_cannot_be_unfolded_is_answered_by_its_beginning(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    batch = encode_batch([(NOW + 1, None, bytes(65 << 20), ()), (NOW + 5, None, b"", ())], codec=Codec.ZSTD)
    header = made_batch()[1]._replace(size=len(batch), last_offset_delta=1, max_timestamp=NOW + 5, count=2)
    log.append(batch, header, 0)
    assert log.offset_for_timestamp(NOW + 5) == (1, NOW + 5, 0)


def test_headers_that_lie_about_their_time_cost_one_unfolding(
    files: FakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(files)
    append(log)
    for _ in range(5):
        batch, header = made_batch(NOW, NOW)
        struct.pack_into(">q", batch, 35, NOW + 500)
        log.append(batch, header._replace(max_timestamp=NOW + 500), 0)
    unfolded = []

    def counted(data: bytes, *, bytes_max: int) -> Iterator[tuple[int, int]]:
        unfolded.append(data)
        return decode_timestamps(data, bytes_max=bytes_max)

    monkeypatch.setattr(timestamp_lookup, "decode_timestamps", counted)
    assert log.offset_for_timestamp(NOW + 200) == (1, NOW + 500, 0)
    assert log.latest_timestamp() == (1, NOW + 500, 0)
    log.delete_before(4)
    assert log.offset_for_timestamp(NOW + 200) == (5, NOW + 500, 0)
    assert len(unfolded) <= 4
    unfolded.clear()
    assert log.latest_timestamp() == (5, NOW + 500, 0)
    assert len(unfolded) <= 2


def test_the_newest_record_may_be_in_any_segment(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for delta in (1, 2, 3, 50, 40, 30, 4, 50, 6):
        append(log, NOW + delta)
    assert log.latest_timestamp() == (3, NOW + 50, 0)
    log.close()
    assert opened(files, SMALL_SEGMENTS).latest_timestamp() == (3, NOW + 50, 0)


def test_records_without_timestamps_are_found_by_none(files: FakeFiles) -> None:
    log = opened(files)
    append(log, -1, -1)
    assert log.offset_for_timestamp(0) is None
    assert log.latest_timestamp() is None


# Shortening


def test_truncating_removes_whole_batches_and_segments(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for count in range(10):
        append(log, NOW + count, epoch=count // 4)
    log.truncate_to(5)
    assert log.log_end_offset == 5
    assert base_offsets(log) == [0, 1, 2, 3, 4]
    assert log.epochs.entries == [(0, 0), (1, 4)]
    assert log.latest_timestamp() == (4, NOW + 4, 1)
    assert log.pending_deletes
    assert all(path.endswith(".deleted") for path in log.pending_deletes)
    log.check()
    assert append(log, epoch=5) == 5


def test_truncating_inside_a_batch_takes_the_whole_batch(files: FakeFiles) -> None:
    log = opened(files)
    append(log, NOW, NOW)
    append(log, NOW, NOW, NOW)
    log.truncate_to(4)
    assert log.log_end_offset == 2
    log.truncate_to(2)
    log.truncate_to(100)
    assert log.log_end_offset == 2
    log.check()


def test_truncating_to_before_the_first_segment_starts_anew_there(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for _ in range(10):
        append(log)
    log.delete_before(7)
    log.truncate_to(2)
    assert (log.log_start_offset, log.log_end_offset) == (2, 2)
    assert append(log) == 2
    log.close()
    assert opened(files).log_end_offset == 3


def test_producers_are_truncated_with_the_log(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for sequence in range(8):
        append(log, producer=(7, 0, sequence))
    log.truncate_to(5)
    state = log.producers.get(7)
    assert state is not None
    assert [batch.base_sequence for batch in state.batches] == [0, 1, 2, 3, 4]
    log.truncate_to(0)
    assert log.producers.get(7) is None


def test_delete_records_raises_the_start_and_drops_whole_segments(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for count in range(10):
        append(log, epoch=count // 4)
    log.delete_before(4)
    assert log.log_start_offset == 4
    assert names(files, ".log")[0] == f"{3:020d}.log"
    assert base_offsets(log) == list(range(4, 10))
    assert log.epochs.entries == [(1, 4), (2, 8)]
    log.delete_before(2)
    assert log.log_start_offset == 4, "the start only grows"
    log.delete_before(10)
    assert (log.log_start_offset, len(log._segments.items)) == (10, 1)
    with pytest.raises(OffsetOutOfRange):
        log.delete_before(11)
    log.check()


def test_a_read_under_way_survives_the_removal_of_its_segment(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for _ in range(4):
        append(log)
    found = log.read(0, 1 << 20, 4, at_least_one=True)
    log.delete_before(3)
    assert [header.base_offset for header in headers_in(found)] == [0, 1, 2]
    assert found is not None
    assert found.file.path.endswith(".deleted")


# Making durable


def test_the_recovery_point_moves_only_when_a_flush_is_done(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    offset, work = log.prepare_flush()
    append(log)
    work()
    assert log.recovery_point == 0
    log.flushed(offset)
    assert log.recovery_point == 1


def test_a_truncation_during_a_flush_lowers_what_it_may_claim(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(5):
        append(log)
    offset, work = log.prepare_flush()
    log.truncate_to(2)
    append(log, epoch=1)
    work()
    log.flushed(offset)
    assert log.recovery_point == 2


def test_flushes_may_finish_in_any_order(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    first, first_work = log.prepare_flush()
    append(log)
    second, second_work = log.prepare_flush()
    second_work()
    log.flushed(second)
    assert log.recovery_point == 2
    first_work()
    log.flushed(first)
    assert log.recovery_point == 2


def test_a_flush_with_nothing_to_do_does_nothing(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    flush(log)
    files.sync_directory = files.open = None  # type: ignore[assignment,method-assign]
    flush(log)
    assert log.recovery_point == 1


# Coming back


def test_opening_after_a_clean_close_reads_only_the_end(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=20_000))
    for count in range(1000):
        append(log, epoch=count // 50, producer=(1, 0, count))
    log.close()
    files.reads = 0
    whole_files_read: list[str] = []
    read = files.read
    files.read = lambda path: (whole_files_read.append(path), read(path))[1]  # type: ignore[func-returns-value,method-assign]
    log = opened(files)
    assert (log.log_end_offset, log.recovery_point) == (1000, 1000)
    assert log.recovery is None
    assert files.reads < 12
    assert whole_files_read == [], "epochs and producers wait until they are asked for"
    assert append(log, epoch=20) == 1000
    log.check()


def test_closing_an_untouched_log_writes_nothing(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    log.close()
    before = files.list(DIRECTORY)
    log = opened(files)
    files.fail_after(0)
    log.close()
    assert files.list(DIRECTORY) == before


def test_a_log_emptied_by_retention_remembers_its_end(files: FakeFiles) -> None:
    log = opened(files, LogConfig(retention_ms=1000))
    for _ in range(5):
        append(log)
    assert log.expire(NOW + 1001, 5) == 1
    assert (log.log_start_offset, log.log_end_offset, log.size_bytes) == (5, 5, 0)
    log.close()
    for clean in (True, False):
        log = opened(files, clean=clean)
        assert (log.log_start_offset, log.log_end_offset) == (5, 5)
    assert append(log) == 5


def test_the_start_offset_of_the_checkpoint_is_kept(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(5):
        append(log)
    log.close()
    assert opened(files, log_start_offset=3).log_start_offset == 3
    assert opened(files).log_start_offset == 0


def test_offsets_below_the_checkpointed_start_are_never_used_again(files: FakeFiles) -> None:
    log = opened(files)
    for _ in range(5):
        append(log, producer=None)
    log.close()
    log = opened(files, clean=False, log_start_offset=9)
    assert (log.log_start_offset, log.log_end_offset, log.recovery_point) == (9, 9, 9)
    assert log.epochs.entries == []
    assert append(log) == 9
    log.check()
    log.close()
    assert opened(files).log_end_offset == 10
    assert opened(made_files(), log_start_offset=4).log_end_offset == 4


def test_files_already_deleted_are_found_again(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for _ in range(4):
        append(log)
    log.delete_before(3)
    paths = sorted(log.pending_deletes)
    assert paths
    log.close()
    assert sorted(opened(files).pending_deletes) == paths


@pytest.mark.parametrize("size", [0, 1, BATCH_BYTES, BATCH_BYTES * 2, BATCH_BYTES * 3 - 1])
def test_data_that_went_after_a_clean_close_is_missed_at_once(files: FakeFiles, size: int) -> None:
    log = opened(files)
    for _ in range(3):
        append(log)
    log.close()
    files.open(f"{DIRECTORY}/{0:020d}.log").truncate(size)
    log = opened(files)
    assert log.recovery is not None
    assert log.log_end_offset == size // BATCH_BYTES
    log.check()


def test_a_broken_header_in_the_middle_is_reported_as_a_failing_disk(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES * 300))
    for _ in range(600):
        append(log)
    log.close()
    log = opened(files)
    files.damage(f"{DIRECTORY}/{0:020d}.log", BATCH_BYTES * 5 + 16, 0xFF)
    with pytest.raises(CorruptLog):
        log.read(6, BATCH_BYTES, 600, at_least_one=True)
    assert log.read(100, BATCH_BYTES, 600, at_least_one=True) is not None


def test_few_old_segments_stay_loaded(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for _ in range(60):
        append(log)
    assert base_offsets(log, bytes_max=1) == list(range(60))
    loaded = [segment for segment in log._segments.items if segment.is_loaded]
    assert len(loaded) <= 5
    log.check()


def test_slots_keep_a_log_small() -> None:
    assert not hasattr(Log(made_files(), made_files().clock, DIRECTORY, LogConfig()), "__dict__")


# A full disk


def test_room_can_be_made_on_a_full_disk(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for count in range(10):
        append(log, epoch=count // 4)
    files.fail_after(0)
    log.delete_before(5)
    log.truncate_to(8)
    assert log.pending_deletes
    log.check()
    with pytest.raises(OSError, match="space"):
        log.close()
    files.fail_after(None)
    log.close()
    log = opened(files, SMALL_SEGMENTS, log_start_offset=5)
    assert base_offsets(log) == [5, 6, 7]
    assert log.epochs.entries == [(1, 5)]
    log.check()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_retention_on_a_full_disk_leaves_the_active_segment(files: FakeFiles, number: int) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES * 3, retention_ms=1))
    for _ in range(7):
        append(log)
    files.fail_after(0, number)
    assert log.expire(NOW + 1000, 7) == 2
    assert (log.log_start_offset, log.log_end_offset) == (6, 7)
    files.fail_after(None)
    assert log.expire(NOW + 1000, 7) == 1
    assert (log.log_start_offset, log.log_end_offset) == (7, 7)
    log.check()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_all_records_can_be_deleted_on_a_full_disk(files: FakeFiles, number: int) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES * 3))
    for _ in range(7):
        append(log)
    files.fail_after(0, number)
    log.delete_before(7, frees_last=True)
    assert (log.log_start_offset, log.log_end_offset, len(log._segments.items)) == (7, 7, 1)
    assert log.pending_deletes
    files.fail_after(None)
    log.check()


def test_a_log_is_recovered_and_read_on_a_full_disk(files: FakeFiles) -> None:
    log = opened(files, SMALL_SEGMENTS)
    for count in range(10):
        append(log, epoch=count // 4, producer=(1, 0, count))
    files.remove(f"{DIRECTORY}/{3:020d}.index")
    files.fail_after(0)
    log = opened(files, SMALL_SEGMENTS, clean=False)
    assert base_offsets(log, bytes_max=BATCH_BYTES) == list(range(10))
    state = log.producers.get(1)
    assert state is not None
    assert state.batches[-1].last_sequence == 9
    log.check()


def test_a_new_epoch_that_cannot_be_written_down_does_not_begin(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    files.fail_after(0)
    with pytest.raises(OSError, match="space"):
        append(log, epoch=1)
    assert log.epochs.entries == [(0, 0)]
    files.fail_after(None)
    append(log, epoch=1)
    assert log.epochs.entries == [(0, 0), (1, 1)]


def test_an_abandoned_log_writes_nothing(files: FakeFiles) -> None:
    log = opened(files)
    append(log)
    before = files.list(DIRECTORY)
    log.abandon()
    assert files.list(DIRECTORY) == before
