"""Records to batches and back, a whole batch or response per call.

The loops are those of ``columnar.kernel``, compiled where there was a compiler; Arrow is not needed. Control
batches, records of aborted transactions, gaps and empty batches are passed over: go on at ``next_offset``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.columnar import kernel
from penstock.environment import Buffer
from penstock.protocol.compression import Codec, compress
from penstock.protocol.records import Record, RecordFields, batch_of
from penstock.wire.operations import Fetched

# Decompressed bytes of one response. Later batches are left for the next fetch.
UNFOLDED_BYTES_MAX = 64 * 1024 * 1024
OFFSET_END = 2**62
# The length of a batch has 32 bits.
BODY_BYTES_MAX = 2**31 - 128

_NOTHING = memoryview(b"")
_NO_INTEGERS = memoryview(array("i"))
_NO_COLUMN = kernel.Binary(memoryview(array("i", [0])), _NOTHING, _NOTHING, 0)


@dataclass(frozen=True, slots=True)
class FetchedRecords:
    """The decoded records of one fetch."""

    records: list[Record]
    # Where to go on. It may be beyond the last record, and is the requested offset if nothing was read.
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    topic_id: bytes


def encode_rows(rows: Sequence[RecordFields], codec: Codec = Codec.NONE) -> bytearray:
    """One batch with these rows, of which there is at least one. Raises ValueError for one that is no record."""
    timestamps, keys, values, headers = zip(*rows)
    header_ends, names, contents = _NO_INTEGERS, _NO_COLUMN, _NO_COLUMN
    if any(headers):
        header_ends = memoryview(array("i", accumulate(map(len, headers), initial=0)))
        pairs = [pair for each in headers for pair in each]
        names = _column([name.encode() for name, _ in pairs])
        contents = _column([content for _, content in pairs])
    times = memoryview(array("q", timestamps))
    table = kernel.Rows(_column(keys), _column(values), times, header_ends, names, contents)
    count, size, max_timestamp = kernel.fit(table, 0, BODY_BYTES_MAX)
    if count < len(rows):
        raise ValueError(f"{len(rows)} records are too many for a batch")
    body: Buffer = bytearray(size)
    kernel.write(table, 0, count, memoryview(body))
    if codec != Codec.NONE:
        body = compress(codec, body)
    return batch_of(body, codec, count, (timestamps[0], max_timestamp))


def decode_fetched(fetched: Fetched, offset: int) -> FetchedRecords:
    """The records from ``offset`` on. Raises CorruptBatch."""
    records, next_offset = decode_records_from(fetched.records, offset, fetched.aborted)
    return FetchedRecords(
        records,
        next_offset,
        fetched.high_watermark,
        fetched.last_stable_offset,
        fetched.log_start_offset,
        fetched.topic_id,
    )


def decode_records_from(
    data: memoryview, offset: int, aborted: Sequence[tuple[int, int]] = ()
) -> tuple[list[Record], int]:
    sections, next_offset = kernel.find(data, offset, OFFSET_END, aborted, UNFOLDED_BYTES_MAX)
    room = sum(section.count for section in sections)
    if not room:
        return [], next_offset
    offsets, timestamps = _int64s(room), _int64s(room)
    types, key_places, value_places, header_places = (_int32s(room) for _ in range(4))
    key_ends, value_ends, header_ends = (_int32s(room + 1) for _ in range(3))
    count, _, _ = kernel.measure(
        sections,
        offset,
        OFFSET_END,
        offsets,
        timestamps,
        types,
        key_ends,
        key_places,
        value_ends,
        value_places,
        header_ends,
        header_places,
    )
    keys = _cells(sections, False, count, key_ends, key_places)
    values = _cells(sections, False, count, value_ends, value_places)
    total = header_ends[count]
    if not total:
        return [
            Record(at, time // 1000, key, value)
            for at, time, key, value in zip(offsets[:count], timestamps, keys, values)
        ], next_offset
    name_places, content_places = _int32s(total), _int32s(total)
    name_ends, content_ends = _int32s(total + 1), _int32s(total + 1)
    kernel.measure_headers(
        sections, header_ends, header_places, name_ends, name_places, content_ends, content_places
    )
    names = _cells(sections, True, total, name_ends, name_places)
    contents = _cells(sections, True, total, content_ends, content_places)
    # As in Java a bad byte in a name does not make the record unreadable.
    pairs = [((name or b"").decode(errors="replace"), content) for name, content in zip(names, contents)]
    return [
        Record(at, time // 1000, key, value, pairs[begin:end])
        for at, time, key, value, (begin, end) in zip(
            offsets[:count], timestamps, keys, values, pairwise(header_ends)
        )
    ], next_offset


def partitions_of(keys: Sequence[bytes | None], count: int) -> list[int]:
    """The partition, of ``count``, to which Kafka's Java client sends each key; -1 without a key."""
    found = _int32s(len(keys))
    kernel.assign(_column(keys), count, found)
    return found.tolist()


def _column(cells: Sequence[bytes | None]) -> kernel.Binary:
    try:
        data = b"".join(cells)  # type: ignore[arg-type]
        validity = _NOTHING
        sizes = map(len, cells)  # type: ignore[arg-type]
    except TypeError:
        data = b"".join([cell for cell in cells if cell is not None])
        bits = bytearray((len(cells) + 7) // 8)
        for row, cell in enumerate(cells):
            if cell is not None:
                bits[row >> 3] |= 1 << (row & 7)
        validity = memoryview(bits)
        sizes = map(len, [cell or b"" for cell in cells])
    ends = memoryview(array("i", accumulate(sizes, initial=0)))
    return kernel.Binary(ends, memoryview(data), validity, 0)


def _cells(
    sections: list[kernel.Section], of_headers: bool, count: int, ends: memoryview, places: memoryview
) -> list[bytes | None]:
    data = bytearray(ends[count])
    kernel.copy(sections, of_headers, ends, places, memoryview(data), memoryview(bytearray()))
    whole = bytes(data)
    return [
        whole[begin:end] if place >= 0 else None
        for (begin, end), place in zip(pairwise(ends[: count + 1]), places)
    ]


def _int32s(count: int) -> memoryview:
    return memoryview(bytearray(4 * count)).cast("i")


def _int64s(count: int) -> memoryview:
    return memoryview(bytearray(8 * count)).cast("q")
