"""Record batches to Arrow columns and back, at both speeds: what is left out, what is refused, what it says."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pytest

from penstock.protocol.compression import Codec, compress
from penstock.protocol.records import (
    DELETE_HORIZON,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    CorruptBatch,
    RecordFields,
    decode_header,
    decode_records,
    encode_batch,
    filler,
)
from tests.columnar.kernels import (
    at_both_speeds,
    at_offset,
    changed,
    everything,
    fix_crc,
    interpreted,
    rows,
    with_body,
)
from tests.interop.murmur2 import partition_of

NOW_MS = 1_700_000_000_000
ABORT_MARKER = (NOW_MS, b"\0\0\0\0", b"\0\0\0\0\0\0", ())
COMMIT_MARKER = (NOW_MS, b"\0\0\0\1", b"\0\0\0\0\0\0", ())


def batch_of(count: int, base_offset: int = 0, **settings: Any) -> bytearray:
    """Records that tell their own offset."""
    records = [(NOW_MS + n, b"k%d" % (base_offset + n), b"v%d" % (base_offset + n), ()) for n in range(count)]
    return encode_batch(records, base_offset=base_offset, **settings)


def transaction(producer_id: int, count: int, base_offset: int) -> bytearray:
    return batch_of(
        count, base_offset, producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True
    )


def marker(producer_id: int, base_offset: int, record: Any) -> bytearray:
    return encode_batch(
        [record],
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=0,
        control=True,
        transactional=True,
    )


def offsets(decoded: Any) -> list[int]:
    found: list[int] = decoded.offset.to_pylist()
    return found


# ---------------------------------------------------------------------------------------------------- reading


@at_both_speeds
def test_an_empty_response_has_no_rows_and_no_progress(columns: Any) -> None:
    decoded = everything(columns, b"", start=17)
    assert (rows(decoded), decoded.next_offset) == ([], 17)


@at_both_speeds
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_any_buffer_will_do(columns: Any, buffer: Any) -> None:
    assert everything(columns, buffer(bytes(batch_of(3)))).count == 3


@at_both_speeds
def test_the_types_are_those_of_sparks_kafka_source(columns: Any) -> None:
    decoded = everything(columns, batch_of(1))
    assert decoded.key.type == decoded.value.type == pa.binary()
    assert decoded.offset.type == pa.int64()
    assert decoded.timestamp.type == pa.timestamp("us", tz="UTC")
    assert decoded.timestamp_type.type == pa.int32()
    assert str(decoded.headers.type) == "list<element: struct<key: string, value: binary>>"
    assert columns.decode(batch_of(1), start=0, end=9).headers is None


@at_both_speeds
def test_null_and_empty_are_not_the_same(columns: Any) -> None:
    fields = [(None, None), (b"", b""), (None, b""), (b"", None)]
    batch = encode_batch([(NOW_MS, key, value, ()) for key, value in fields])
    decoded = everything(columns, batch)
    assert [row[2:4] for row in rows(decoded)] == fields
    assert (decoded.key.null_count, decoded.value.null_count) == (2, 2)


@at_both_speeds
def test_a_record_without_headers_has_null_and_a_headers_value_may_be_null(columns: Any) -> None:
    headers = [("a", b"1"), ("a", None), ("ünï", b"")]
    batch = encode_batch([(NOW_MS, None, None, ()), (NOW_MS, None, b"v", headers), (NOW_MS, b"k", None, ())])
    decoded = everything(columns, batch)
    pairs = [{"key": name, "value": value} for name, value in headers]
    assert decoded.headers.to_pylist() == [None, pairs, None]


@at_both_speeds
def test_a_headers_name_that_is_not_utf8_is_read_with_marks_as_java_does(columns: Any) -> None:
    batch = encode_batch([(NOW_MS, None, None, [("ok", b"1"), ("na", b"2")])])
    decoded = everything(columns, fix_crc(batch.replace(b"na", b"n\xff")))
    assert rows(decoded)[0][4] == [("ok", b"1"), ("n\N{REPLACEMENT CHARACTER}", b"2")]


@at_both_speeds
def test_only_offsets_from_start_up_to_end_are_read(columns: Any) -> None:
    data = bytes(batch_of(10) + batch_of(10, 10) + batch_of(10, 20))
    for start, end in [(0, 30), (3, 27), (10, 20), (12, 13), (9, 11), (29, 30), (0, 1), (5, 5), (7, 3)]:
        decoded = everything(columns, data, start=start, end=end)
        assert offsets(decoded) == list(range(start, end))
        assert [row[2] for row in rows(decoded)] == [b"k%d" % offset for offset in range(start, end)]
        assert decoded.next_offset == max(start, end)


@at_both_speeds
def test_what_lies_before_the_start_or_behind_the_end_need_not_be_whole(columns: Any) -> None:
    broken = batch_of(10)
    broken[-1] ^= 1
    behind = at_offset(broken, 20)
    decoded = everything(columns, bytes(broken + batch_of(10, 10) + behind), start=10, end=20)
    assert offsets(decoded) == list(range(10, 20))


@at_both_speeds
def test_a_partial_batch_at_the_end_is_left_for_the_next_fetch(columns: Any) -> None:
    first, second = batch_of(4), batch_of(4, 4)
    for cut in range(len(second)):
        decoded = everything(columns, bytes(first + second[:cut]))
        assert (offsets(decoded), decoded.next_offset) == ([0, 1, 2, 3], 4)
    assert everything(columns, bytes(first[:-1])).next_offset == 0


@at_both_speeds
@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_is_read(columns: Any, codec: Codec) -> None:
    data = bytes(batch_of(200, 5, codec=codec) + batch_of(3, 205) + batch_of(100, 300, codec=codec))
    decoded = everything(columns, data, start=100, end=350)
    wanted = [*range(100, 208), *range(300, 350)]
    assert [(row[0], row[2], row[3]) for row in rows(decoded)] == [
        (offset, b"k%d" % offset, b"v%d" % offset) for offset in wanted
    ]
    assert decoded.next_offset == 350


@at_both_speeds
def test_offsets_that_compaction_removed_are_gaps(columns: Any) -> None:
    whole = batch_of(6, 100)
    # One record behind the other, each with its size in the first byte (a varint, so doubled).
    records, at = [], HEADER_SIZE
    while at < len(whole):
        size = 1 + whole[at] // 2
        records.append(bytes(whole[at : at + size]))
        at += size
    kept = with_body(whole, records[1] + records[4], count=2)
    decoded = everything(columns, bytes(kept + batch_of(1, 110)), start=100)
    assert (offsets(decoded), decoded.next_offset) == ([101, 104, 110], 111)
    # Behind the last record kept, reading goes on behind the batch.
    assert everything(columns, bytes(kept), start=105).next_offset == 106


@at_both_speeds
def test_a_batch_that_compaction_emptied_is_progress_without_rows(columns: Any) -> None:
    empty = with_body(batch_of(5, 40), b"", count=0)
    decoded = everything(columns, bytes(empty), start=40)
    assert (rows(decoded), decoded.next_offset) == ([], 45)


@at_both_speeds
@pytest.mark.parametrize("codec", Codec)
def test_emptied_batches_are_stepped_over_in_every_codec(columns: Any, codec: Codec) -> None:
    first = batch_of(3, 10, codec=codec)
    # Its codec is still in the header, and there is nothing to decompress.
    empty = with_body(first, b"", count=0)
    data = bytes(
        filler(0, 9, 4) + empty + filler(13, 39, 4) + batch_of(2, 40, codec=codec) + filler(42, 99, 4)
    )
    decoded = everything(columns, data)
    assert (offsets(decoded), decoded.next_offset) == ([40, 41], 100)
    # From and to the middle of a filler.
    decoded = everything(columns, data, start=20, end=70)
    assert (offsets(decoded), decoded.next_offset) == ([40, 41], 70)
    assert everything(columns, data, start=50, end=60).next_offset == 60
    assert everything(columns, data, start=12, end=30).next_offset == 30


@at_both_speeds
@pytest.mark.parametrize("codec", Codec)
def test_an_emptied_control_batch_ends_no_abort(columns: Any, codec: Codec) -> None:
    ended = marker(7, 1, ABORT_MARKER)
    empty = with_body(ended, b"", count=0, attributes=decode_header(ended).attributes | codec)
    data = bytes(
        transaction(7, 1, 0) + empty + transaction(7, 1, 2) + marker(7, 3, ABORT_MARKER) + batch_of(1, 4)
    )
    assert offsets(everything(columns, data, aborted=[(7, 0)])) == [4]


@at_both_speeds
def test_a_delete_horizon_changes_no_timestamp(columns: Any) -> None:
    """KIP-534: the base timestamp is the horizon, and the records' deltas are negative."""
    whole = batch_of(3, 10)
    later = encode_batch(
        [(NOW_MS + 86_400_000, None, None, ()), *decode_records(whole, bytes_max=1_000)], base_offset=9
    )
    size = 1 + later[HEADER_SIZE] // 2
    kept = with_body(
        later,
        bytes(later[HEADER_SIZE + size :]),
        count=3,
        attributes=DELETE_HORIZON,
        max_timestamp=NOW_MS + 2,
    )
    decoded = everything(columns, bytes(kept))
    assert [row[:2] for row in rows(decoded)] == [row[:2] for row in rows(everything(columns, bytes(whole)))]


@at_both_speeds
def test_with_append_time_the_batchs_own_timestamp_counts_for_all(columns: Any) -> None:
    appended = changed(batch_of(3), attributes=LOG_APPEND_TIME, max_timestamp=NOW_MS + 5000)
    decoded = everything(columns, bytes(appended + batch_of(2, 3)))
    assert [row[1] - NOW_MS for row in rows(decoded)] == [5000, 5000, 5000, 0, 1]
    assert decoded.timestamp_type.to_pylist() == [1, 1, 1, 0, 0]


@at_both_speeds
@pytest.mark.parametrize(
    ("timestamp_ms", "microseconds"),
    [
        (-1, -1000),
        (0, 0),
        (NOW_MS, NOW_MS * 1000),
        (9_223_372_036_854_775, 9_223_372_036_854_775_000),
        # Nanoseconds by mistake, and the largest of all: the latest that can be said in microseconds.
        (NOW_MS * 1_000_000, 9_223_372_036_854_775_000),
        (2**63 - 1, 9_223_372_036_854_775_000),
        (-(2**63), -9_223_372_036_854_775_000),
    ],
)
def test_a_timestamp_that_is_nonsense_stops_nobody(
    columns: Any, timestamp_ms: int, microseconds: int
) -> None:
    batch = changed(encode_batch([(0, None, None, ())]), base_timestamp=timestamp_ms)
    decoded = everything(columns, batch)
    assert decoded.timestamp.cast(pa.int64()).to_pylist() == [microseconds]


# ----------------------------------------------------------------------------------------------- transactions


@at_both_speeds
def test_control_batches_are_passed_over(columns: Any) -> None:
    data = bytes(transaction(7, 2, 0) + marker(7, 2, COMMIT_MARKER) + batch_of(1, 3))
    decoded = everything(columns, data)
    assert offsets(decoded) == [0, 1, 3]
    # Also at the end, where nothing else would move the reader on; and if nobody asks about aborts.
    last = everything(columns, bytes(marker(7, 8, ABORT_MARKER)), start=8)
    assert (rows(last), last.next_offset) == ([], 9)


@at_both_speeds
def test_an_abort_covers_its_producer_from_its_first_offset_to_its_marker(columns: Any) -> None:
    data = bytes(
        transaction(7, 2, 0)  # committed
        + marker(7, 2, COMMIT_MARKER)
        + transaction(7, 2, 3)  # aborted
        + transaction(8, 2, 5)  # somebody else's
        + batch_of(1, 7)  # outside any
        + transaction(7, 1, 8)  # aborted
        + marker(7, 9, ABORT_MARKER)
        + transaction(7, 2, 10)  # the next one, committed
        + marker(8, 12, COMMIT_MARKER)
        + marker(7, 13, COMMIT_MARKER)
    )
    decoded = everything(columns, data, aborted=[(7, 3)])
    assert (offsets(decoded), decoded.next_offset) == ([0, 1, 5, 6, 7, 10, 11], 14)
    # read_uncommitted
    assert offsets(everything(columns, data)) == [0, 1, 3, 4, 5, 6, 7, 8, 10, 11]


@at_both_speeds
def test_aborts_need_no_order_and_may_be_of_one_producer_twice(columns: Any) -> None:
    data = bytes(
        transaction(7, 1, 0)
        + marker(7, 1, ABORT_MARKER)
        + transaction(7, 1, 2)
        + marker(7, 3, COMMIT_MARKER)
        + transaction(7, 1, 4)
        + transaction(9, 1, 5)
        + marker(9, 6, ABORT_MARKER)
        + marker(7, 7, ABORT_MARKER)
    )
    assert offsets(everything(columns, data, aborted=[(9, 5), (7, 4), (7, 0)])) == [2]


@at_both_speeds
def test_an_abort_that_began_before_the_response_counts(columns: Any) -> None:
    data = bytes(transaction(7, 2, 10) + marker(7, 12, ABORT_MARKER) + transaction(7, 1, 13))
    assert offsets(everything(columns, data, aborted=[(7, 4)])) == [13]


@at_both_speeds
def test_a_commit_marker_does_not_end_an_abort(columns: Any) -> None:
    data = bytes(transaction(7, 1, 0) + marker(7, 1, COMMIT_MARKER) + transaction(7, 1, 2))
    assert offsets(everything(columns, data, aborted=[(7, 0)])) == []


@at_both_speeds
def test_records_of_the_same_producer_outside_transactions_are_kept(columns: Any) -> None:
    plain = batch_of(1, 1, producer_id=7, producer_epoch=0, base_sequence=0)
    assert offsets(everything(columns, bytes(transaction(7, 1, 0) + plain), aborted=[(7, 0)])) == [1]


@at_both_speeds
def test_an_abort_that_ended_before_the_start_does_not_reach_beyond_it(columns: Any) -> None:
    data = bytes(transaction(7, 1, 0) + marker(7, 1, ABORT_MARKER) + transaction(7, 2, 2))
    # As when a large answer is decoded in several calls: the second begins in its middle.
    assert offsets(everything(columns, data, start=2, aborted=[(7, 0)])) == [2, 3]
    assert offsets(everything(columns, data, start=3, aborted=[(7, 0)])) == [3]


@at_both_speeds
def test_an_abort_that_began_before_the_start_reaches_beyond_it(columns: Any) -> None:
    data = bytes(
        transaction(7, 2, 0)  # aborted, before the start
        + transaction(8, 1, 2)  # aborted and ended, before the start
        + marker(8, 3, ABORT_MARKER)
        + transaction(8, 1, 4)
        + transaction(7, 1, 5)
        + marker(7, 6, ABORT_MARKER)
        + transaction(7, 1, 7)
    )
    for start, found in ((0, [4, 7]), (2, [4, 7]), (4, [4, 7]), (5, [7]), (7, [7])):
        assert offsets(everything(columns, data, start=start, aborted=[(7, 0), (8, 2)])) == found


@at_both_speeds
def test_an_answer_with_many_aborts_is_read_from_any_place(columns: Any) -> None:
    data, aborted, kept = bytearray(), [], []
    for number in range(60):
        producer, base = number % 7, 3 * number
        data += transaction(producer, 2, base)
        if number % 3:
            aborted.append((producer, base))
            data += marker(producer, base + 2, ABORT_MARKER)
        else:
            kept += [base, base + 1]
            data += marker(producer, base + 2, COMMIT_MARKER)
    for start in range(0, 180, 11):
        decoded = everything(columns, bytes(data), start=start, aborted=reversed(aborted))
        assert offsets(decoded) == [offset for offset in kept if offset >= start]


@at_both_speeds
def test_an_abort_marker_that_is_no_record_is_refused(columns: Any) -> None:
    broken = with_body(marker(7, 1, ABORT_MARKER), b"\xff\xff")
    with pytest.raises(CorruptBatch):
        everything(columns, bytes(transaction(7, 1, 0) + broken), aborted=[(7, 0)])


# -------------------------------------------------------------------------------------------- what is refused


@at_both_speeds
@pytest.mark.parametrize("position", [21, 30, HEADER_SIZE, -1])
def test_a_flipped_bit_is_a_wrong_crc(columns: Any, position: int) -> None:
    batch = batch_of(3, 1234)
    batch[position] ^= 0x10
    with pytest.raises(CorruptBatch, match="offset 1234: the CRC is wrong"):
        everything(columns, batch)


@at_both_speeds
@pytest.mark.parametrize("magic", [0, 1])
def test_a_format_before_kafka_0_11_is_named(columns: Any, magic: int) -> None:
    from kafka.record.legacy_records import LegacyRecordBatchBuilder

    builder = LegacyRecordBatchBuilder(magic, 0, 1000)
    builder.append(0, NOW_MS, b"k", b"v")
    with pytest.raises(
        CorruptBatch, match=f"message format {magic}, older than Kafka 0.11, is not supported"
    ):
        everything(columns, builder.build())


@at_both_speeds
def test_a_format_of_the_future_is_refused(columns: Any) -> None:
    with pytest.raises(CorruptBatch, match="message format 3 is not known"):
        everything(columns, changed(batch_of(1), magic=3))


@at_both_speeds
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"length": 48}, "a length that no batch has"),
        ({"length": -1}, "a length that no batch has"),
        ({"last_offset_delta": -1}, "offsets do not follow"),
        ({"last_offset_delta": 1}, "offsets do not go up"),
        ({"count": -1}, "a negative count"),
        ({"count": 2**31 - 1}, "more records than bytes"),
        ({"count": 4}, "beyond its batch"),
        ({"count": 2}, "bytes behind the last record"),
        ({"attributes": 5}, "codec 5 is not known"),
        ({"attributes": int(Codec.GZIP)}, "gzip"),
        ({"attributes": int(Codec.LZ4)}, "lz4"),
        ({"attributes": int(Codec.ZSTD)}, "zstd"),
        ({"attributes": int(Codec.SNAPPY)}, "snappy"),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(columns: Any, fields: dict[str, int], word: str) -> None:
    batch = changed(batch_of(3, 10), **fields)
    with pytest.raises(CorruptBatch, match=word):
        everything(columns, batch)


@at_both_speeds
@pytest.mark.parametrize(
    ("record", "word"),
    [
        # size, attributes, timestamp delta, offset delta, key size, value size, headers
        ([0x0E, 0, 0, 0, 1, 1, 0], "beyond its batch"),
        ([0x0C, 0, 0, 0, 1, 1, 0], None),
        ([0x01, 0, 0, 0, 1, 1, 0], "beyond its batch"),
        ([0x00, 0, 0, 0, 1, 1, 0], "timestamp is no number"),
        ([0x0C, 0, 0, 2, 1, 1, 0], "do not go up"),
        ([0x0C, 0, 0, 1, 1, 1, 0], "do not go up"),
        ([0x0C, 0, 0, 0, 3, 1, 0], "a key reaches"),
        ([0x0C, 0, 0, 0, 8, 1, 0], "a key reaches"),
        ([0x0C, 0, 0, 0, 1, 3, 0], "a value reaches"),
        ([0x0C, 0, 0, 0, 1, 4, 0], "a value reaches"),
        ([0x0C, 0, 0, 0, 1, 1, 1], "more headers than bytes"),
        ([0x0C, 0, 0, 0, 1, 1, 2], "more headers than bytes"),
        ([0x10, 0, 0, 0, 1, 1, 2, 0, 1], None),
        ([0x10, 0, 0, 0, 1, 1, 2, 1, 1], "a header that is none"),
        ([0x10, 0, 0, 0, 1, 1, 2, 2, 1], "a header that is none"),
        ([0x10, 0, 0, 0, 1, 1, 2, 0, 3], "a header that is none"),
        ([0x10, 0, 0, 0, 1, 1, 0, 0, 0], "does not match its content"),
        ([0x1E, 0, *[0xFF] * 10, 0, 1, 1, 0], "timestamp is no number"),
        ([0x1E, 0, *[0xFF] * 9, 2, 0, 1, 1, 0], "timestamp is no number"),
        ([0x1E, 0, *[0xFE] + [0xFF] * 8, 1, 0, 1, 1, 0], None),
        ([0x0C, 0, 0, 0, 1, 1, 0xFF], "more headers than bytes"),
    ],
    ids=str,
)
def test_a_record_that_lies_is_refused(columns: Any, record: list[int], word: str | None) -> None:
    batch = with_body(batch_of(1), bytes(record), base_timestamp=0)
    if word is None:
        assert everything(columns, batch).count == 1
        return
    with pytest.raises(CorruptBatch, match=word):
        everything(columns, batch)


@at_both_speeds
@pytest.mark.parametrize(("base", "delta"), [(2**63 - 1, 1), (-(2**63) + 1, -2), (2**62, 2**62)])
def test_a_timestamp_beyond_64_bits_is_refused(columns: Any, base: int, delta: int) -> None:
    batch = encode_batch([(0, None, None, ()), (delta, None, None, ())])
    with pytest.raises(CorruptBatch, match="timestamp is no number"):
        everything(columns, changed(batch, base_timestamp=base))


@at_both_speeds
@pytest.mark.parametrize("base_offset", [-1, -(2**63), 2**63 - 1, 2**62 + 1])
def test_an_offset_that_no_log_reaches_is_refused(columns: Any, base_offset: int) -> None:
    with pytest.raises(CorruptBatch, match="offsets do not follow"):
        everything(columns, at_offset(batch_of(1), base_offset))


@at_both_speeds
def test_batches_out_of_order_are_refused(columns: Any) -> None:
    with pytest.raises(CorruptBatch, match="the batch at offset 9: its offsets do not follow"):
        everything(columns, bytes(batch_of(10) + batch_of(1, 9)))


# ------------------------------------------------------------------------------------------------------ bounds


def bomb(codec: Codec, base_offset: int = 0) -> bytearray:
    """Some kilobytes that are 32 MiB."""
    return encode_batch([(NOW_MS, None, bytes(32 << 20), ())], base_offset=base_offset, codec=codec)


@at_both_speeds
@pytest.mark.parametrize("codec", list(Codec)[1:])
def test_a_batch_that_unfolds_to_more_than_allowed_is_refused(columns: Any, codec: Codec) -> None:
    batch = bomb(codec)
    with pytest.raises(CorruptBatch, match="more than 1000000 bytes"):
        everything(columns, batch, bytes_max=1_000_000)
    assert len(everything(columns, batch).value[0].as_py()) == 32 << 20


@at_both_speeds
@pytest.mark.parametrize("codec", list(Codec))
def test_a_response_that_unfolds_to_more_than_allowed_is_read_in_parts(columns: Any, codec: Codec) -> None:
    data = b"".join(batch_of(100, 100 * n, codec=codec) for n in range(10))
    body = len(encode_batch_body(100, 900))
    start, parts = 0, []
    while start < 1000:
        decoded = everything(columns, data, start=start, bytes_max=3 * body)
        parts.append(offsets(decoded))
        start = decoded.next_offset
    assert [offset for part in parts for offset in part] == list(range(1000))
    assert 3 < len(parts) <= 5


def encode_batch_body(count: int, base_offset: int) -> bytes:
    return bytes(batch_of(count, base_offset)[HEADER_SIZE:])


@at_both_speeds
def test_one_uncompressed_batch_is_read_however_large(columns: Any) -> None:
    """It cannot be a bomb: it is no larger than what was fetched."""
    data = bytes(batch_of(50) + batch_of(50, 50, codec=Codec.GZIP))
    decoded = everything(columns, data, bytes_max=10)
    assert (decoded.count, decoded.next_offset) == (50, 50)


@at_both_speeds
def test_members_and_frames_in_a_row_are_one_body(columns: Any) -> None:
    """Some producers flush their compressor within a batch."""
    body = encode_batch_body(20, 0)
    for codec in (Codec.GZIP, Codec.LZ4, Codec.ZSTD):
        parts = compress(codec, body[:99]) + compress(codec, body[99:])
        batch = with_body(batch_of(20), parts, attributes=int(codec))
        assert offsets(everything(columns, batch)) == list(range(20))


# ----------------------------------------------------------------------------------------------------- writing


def table(count: int, seed: int = 1) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    random = Random(seed)

    def field() -> bytes | None:
        return None if random.random() < 0.2 else random.randbytes(random.choice((0, 1, 63, 64, 300)))

    key, value = [field() for _ in range(count)], [field() for _ in range(count)]
    headers = [
        [{"key": "h" * random.randrange(100), "value": field()} for _ in range(random.choice((0, 0, 1, 3)))]
        if random.random() < 0.8
        else None
        for _ in range(count)
    ]
    timestamps = [NOW_MS + random.randrange(-(10**6), 10**6) for _ in range(count)]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return (
        pa.array(key, pa.binary()),
        pa.array(value, pa.binary()),
        pa.array(headers, kind),
        pa.array(timestamps),
    )


def read_back(batches: list[Any]) -> list[tuple[Any, ...]]:
    records: list[tuple[Any, ...]] = []
    for encoded in batches:
        assert encoded.first_row == len(records)
        found = decode_records(encoded.batch, bytes_max=1 << 30)
        assert len(found) == encoded.count
        records += [(item.timestamp, item.key, item.value, list(item.headers)) for item in found]
    return records


def plain(key: pa.Array, value: pa.Array, headers: pa.Array, timestamps: pa.Array) -> list[tuple[Any, ...]]:
    pairs = [[(item["key"], item["value"]) for item in items or ()] for items in headers.to_pylist()]
    return list(zip(timestamps.to_pylist(), key.to_pylist(), value.to_pylist(), pairs))


@at_both_speeds
@pytest.mark.parametrize("codec", list(Codec))
def test_columns_written_as_batches_hold_the_same_records(columns: Any, codec: Codec) -> None:
    arrays = table(500)
    batches = columns.encode(*arrays, codec=codec, batch_bytes_max=20_000)
    assert len(batches) > 3
    assert read_back(batches) == plain(*arrays)
    data = b"".join(at_offset(encoded.batch, encoded.first_row) for encoded in batches)
    assert [row[1:] for row in rows(everything(columns, data))] == plain(*arrays)


@at_both_speeds
def test_a_slice_of_an_array_is_written_as_the_slice(columns: Any) -> None:
    arrays = table(200)
    for offset, length in [(0, 200), (1, 50), (9, 1), (64, 100), (150, 0)]:
        part = [array.slice(offset, length) for array in arrays]
        assert read_back(columns.encode(*part)) == plain(*part)


@at_both_speeds
def test_the_header_of_a_batch_says_what_a_broker_wants_to_hear(columns: Any) -> None:
    timestamps = pa.array([NOW_MS, NOW_MS + 9, NOW_MS - 5])
    nothing = pa.nulls(3, pa.binary())
    (encoded,) = columns.encode(nothing, nothing, None, timestamps, codec=Codec.ZSTD)
    header = decode_header(encoded.batch)
    assert header == decode_header(
        encode_batch([(at, None, None, ()) for at in timestamps.to_pylist()], codec=Codec.ZSTD)
    )
    assert (header.base_timestamp, header.max_timestamp, header.count) == (NOW_MS, NOW_MS + 9, 3)


@at_both_speeds
def test_batches_are_as_large_as_allowed_and_no_larger(columns: Any) -> None:
    key, value, headers, timestamps = table(2000)
    sizes = [
        len(item.batch) for item in columns.encode(key, value, headers, timestamps, batch_bytes_max=5000)
    ]
    assert max(sizes) <= 5000
    assert min(sizes[:-1]) > 5000 - 2500
    big = pa.array([b"x" * 9000, b"y", b"z" * 9000], pa.binary())
    batches = columns.encode(pa.nulls(3, pa.binary()), big, None, timestamps[:3], batch_bytes_max=5000)
    assert [encoded.count for encoded in batches] == [1, 1, 1]


@at_both_speeds
def test_strings_and_large_arrays_are_written_too(columns: Any) -> None:
    timestamps = pa.array([1, 2])
    wanted: list[RecordFields] = [(1, b"a", "ü".encode(), []), (2, None, b"", [])]
    for kind in (pa.string(), pa.large_string()):
        batches = columns.encode(pa.array(["a", None], kind), pa.array(["ü", ""], kind), None, timestamps)
        assert read_back(batches) == wanted
    key = pa.array([b"a", None], pa.large_binary())
    assert read_back(columns.encode(key, pa.nulls(2), None, timestamps)) == [
        (1, b"a", None, []),
        (2, None, None, []),
    ]


@at_both_speeds
def test_no_rows_make_no_batch(columns: Any) -> None:
    nothing = pa.array([], pa.binary())
    assert columns.encode(nothing, nothing, None, pa.array([], pa.int64())) == []


@at_both_speeds
def test_rows_that_cannot_be_records_are_refused(columns: Any) -> None:
    one, time = pa.array([b"x"]), pa.array([1])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    unnamed = pa.array([[{"key": None, "value": b""}]], kind)
    nobody = pa.array([[None]], kind)
    for message, arguments in [
        ("differ in length", (one, pa.array([b"x", b"y"]), None, time)),
        ("a timestamp is null", (one, one, None, pa.array([None], pa.int64()))),
        ("no timestamp in milliseconds", (one, one, None, pa.array([2**62 + 1]))),
        ("must be binary or string, not int64", (time, one, None, time)),
        ("a header without a key", (one, one, unnamed, time)),
        ("a header without a key", (one, one, nobody, time)),
        (
            "headers must be list<struct<key: string, value: binary>>, not string",
            (one, one, pa.array(["h"]), time),
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            columns.encode(*arguments)


@at_both_speeds
def test_what_would_be_refused_when_it_is_read_is_not_written(
    columns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "UNFOLDED_BYTES_MAX", 1_000)
    key, value, time = pa.array([None], pa.binary()), pa.array([bytes(2_000)]), pa.array([1])
    with pytest.raises(ValueError, match="could not be read back"):
        columns.encode(key, value, None, time, codec=Codec.LZ4)
    (plain,) = columns.encode(key, value, None, time)
    assert everything(columns, plain.batch, bytes_max=1_000).value[0].as_py() == bytes(2_000)


# ------------------------------------------------------------------------------------------------ partitioning


@at_both_speeds
def test_keys_go_where_the_java_client_sends_them(columns: Any) -> None:
    random = Random(5)
    keys = [random.randbytes(size) for size in range(70)] + [b"", b"\xff" * 8, "ключ".encode()]
    for count in (1, 2, 7, 2**31 - 1):
        found = columns.partitions_for(pa.array([None, *keys]), count)
        assert found.type == pa.int32()
        assert found.to_pylist() == [-1, *(partition_of(key, count) for key in keys)]
    assert columns.partitions_for(pa.array(keys)[5:9], 7).to_pylist() == [
        partition_of(k, 7) for k in keys[5:9]
    ]


@at_both_speeds
def test_there_is_no_partition_among_none(columns: Any) -> None:
    with pytest.raises(ValueError, match="0 partitions"):
        columns.partitions_for(pa.array([b"k"]), 0)


# -------------------------------------------------------------------------------------------------- the warning


def test_the_slow_kernel_says_so_once_when_much_is_read() -> None:
    columns = interpreted()
    batch = bytes(encode_batch([(NOW_MS, None, bytes(20_000), ())]))
    columns._patience = 50_000
    for _ in range(2):
        everything(columns, batch)
    with pytest.warns(RuntimeWarning, match="not compiled.*install a C compiler"):
        everything(columns, batch)
    everything(columns, batch)
