"""What compaction leaves of batches: empty ones, gaps inside, and fillers. All that reads a log meets them."""

from __future__ import annotations

import pytest

from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.protocol.compression import Codec, compress
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import (
    LOG_APPEND_TIME,
    Marker,
    check_produced,
    decode_header,
    decode_marker,
    decode_records,
    decode_timestamps,
    emptied,
    encode_marker,
    filler,
    patch,
    rebuilt,
    set_log_append_time,
)
from tests.log.making import NOW, compacted, made_batch, made_files, opened
from tests.support_files import FakeFiles

SMALL_SEGMENTS = LogConfig(segment_bytes=300)


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


def copied(files: FakeFiles, *batches: bytearray, config: LogConfig | None = None) -> Log:
    """A log with these batches, each behind the one before."""
    log = opened(files, config)
    for batch in batches:
        patch(batch, 0, log.log_end_offset, 0)
        log.append_replicated(batch)
    log.check()
    return log


# Batches


@pytest.mark.parametrize("codec", Codec)
def test_a_batch_without_records_has_none_in_every_codec(codec: Codec) -> None:
    _, header = made_batch(NOW, NOW + 1, codec=codec)
    empty = emptied(header)
    assert decode_records(empty, bytes_max=100) == []
    assert list(decode_timestamps(empty, bytes_max=100)) == []
    # As another broker may have left it: with the codec, and with nothing or an empty stream behind the header.
    for payload in (b"", b"" if codec == Codec.NONE else compress(codec, b"")):
        still_compressed = rebuilt(header._replace(count=0), payload)
        assert decode_records(still_compressed, bytes_max=100) == []
        assert list(decode_timestamps(still_compressed, bytes_max=100)) == []


@pytest.mark.parametrize("codec", Codec)
def test_records_keep_their_offsets_when_others_go(codec: Codec) -> None:
    batch, _ = made_batch(NOW, NOW + 1, NOW + 2, codec=codec)
    left = compacted(batch, 1)
    assert [(record.offset, record.timestamp) for record in decode_records(left, bytes_max=1_000)] == [
        (1, NOW + 1)
    ]
    assert list(decode_timestamps(left, bytes_max=1_000)) == [(1, NOW + 1)]


@pytest.mark.parametrize("codec", Codec)
def test_a_control_batch_without_records_is_no_marker(codec: Codec) -> None:
    batch = encode_marker(Marker(True, 3), 7, 1, NOW)
    header = decode_header(batch)
    assert decode_marker(emptied(header)) is None
    still_compressed = header._replace(count=0, attributes=header.attributes | codec)
    assert decode_marker(rebuilt(still_compressed, b"")) is None


def test_a_producer_cannot_send_what_only_compaction_makes() -> None:
    batch, header = made_batch(NOW, NOW + 1, producer=(7, 0, 0))
    for made in (emptied(header), compacted(batch, 1), filler(0, 3, 0), filler(0, 0, 0)):
        assert check_produced(memoryview(made), max_message_bytes=1_000) is ErrorCode.INVALID_RECORD


# Offsets by time


def test_an_empty_batch_is_not_found_by_its_time(files: FakeFiles) -> None:
    early, late = made_batch(NOW + 10, NOW + 90)[0], made_batch(NOW + 50)[0]
    log = copied(files, compacted(early), late)
    assert log.offset_for_timestamp(NOW + 5) == (2, NOW + 50, 0)
    assert log.offset_for_timestamp(NOW + 60) is None
    assert log.latest_timestamp() == (2, NOW + 50, 0)


@pytest.mark.parametrize("codec", Codec)
def test_the_first_record_that_is_left_is_found_by_time(files: FakeFiles, codec: Codec) -> None:
    batch, _ = made_batch(NOW, NOW + 10, NOW + 20, NOW + 20, codec=codec)
    log = copied(files, filler(0, 4, 0), compacted(batch, 1, 3), filler(0, 0, 0))
    assert log.offset_for_timestamp(NOW - 5) == (6, NOW + 10, 0)
    assert log.offset_for_timestamp(NOW + 11) == (8, NOW + 20, 0)
    assert log.offset_for_timestamp(NOW + 21) is None
    assert log.latest_timestamp() == (8, NOW + 20, 0)


def test_a_record_that_is_left_is_found_by_the_time_of_its_append(files: FakeFiles) -> None:
    batch, header = made_batch(NOW, NOW + 1, NOW + 2)
    set_log_append_time(batch, 0, header, NOW + 500)
    left = compacted(batch, 1)
    assert decode_header(left).attributes & LOG_APPEND_TIME
    log = copied(files, left)
    assert log.offset_for_timestamp(NOW + 3) == (1, NOW + 500, 0)
    assert log.latest_timestamp() == (1, NOW + 500, 0)


def test_the_newest_record_is_found_although_a_segment_has_a_newer_empty_batch(files: FakeFiles) -> None:
    batches = [made_batch(NOW + delta, size=50)[0] for delta in (10, 90, 20, 30, 80)]
    log = copied(
        files, batches[0], compacted(batches[1]), *batches[2:4], compacted(batches[4]), config=SMALL_SEGMENTS
    )
    assert len(log._segments.items) > 1
    assert log.latest_timestamp() == (3, NOW + 30, 0)
    log.delete_before(1)
    assert log.latest_timestamp() == (3, NOW + 30, 0)
    log.delete_before(4)
    assert log.latest_timestamp() is None


def test_a_log_of_empty_batches_has_no_time(files: FakeFiles) -> None:
    log = copied(files, filler(0, 9, 0), compacted(made_batch(NOW, producer=(7, 0, 0))[0]))
    assert log.offset_for_timestamp(0) is None
    assert log.latest_timestamp() is None
    log.delete_before(10)
    assert log.latest_timestamp() is None


# Producers


@pytest.mark.parametrize("clean", [True, False])
def test_an_empty_batch_still_says_where_its_producer_is(files: FakeFiles, clean: bool) -> None:
    batch, header = made_batch(NOW, NOW, NOW, producer=(7, 2, 5))
    log = copied(files, filler(0, 9, 0), compacted(batch))

    def check(log: Log) -> None:
        assert len(log.producers) == 1
        state = log.producers.get(7)
        assert state is not None
        assert (state.epoch, state.last_sequence) == (2, 7)
        (written,) = state.batches
        assert (written.base_offset, written.last_offset) == (10, 12)
        duplicate = log.producers.check(header, log.steady_ms())
        assert duplicate is not None and not isinstance(duplicate, ErrorCode)
        assert duplicate.base_offset == 10
        following = header._replace(base_sequence=8)
        assert log.producers.check(following, log.steady_ms()) is None

    check(log)
    if clean:
        log.close()
    check(opened(files, clean=clean))


def test_an_empty_control_batch_does_not_stop_recovery(files: FakeFiles) -> None:
    marker = encode_marker(Marker(True, 3), 7, 1, NOW)
    log = copied(files, emptied(decode_header(marker)), made_batch(NOW, producer=(8, 0, 0))[0])
    end = log.log_end_offset
    again = opened(files, clean=False)
    assert again.log_end_offset == end
    assert again.producers.get(8) is not None
    again.check()
