"""Record batches as Arrow columns, and back: the base of Spark's source, sink and jobs.

``decode`` turns the bytes of a whole fetch response into arrays; ``encode`` makes batches for a producer. The
loops are in ``kernel.py`` (compiled where possible); this module allocates buffers and passes them to Arrow
without a copy. Careful: continue reading at ``next_offset``, not after the last row. There may be progress
without any row, because control batches, aborted transactions and compaction leave gaps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import pyarrow as pa
from crc32c import crc32c

from penstock.columnar import kernel
from penstock.environment import Buffer
from penstock.protocol.compression import Codec, compress
from penstock.protocol.records import CRC_START, HEADER_SIZE, MAGIC, NO_PRODUCER_ID, NO_SEQUENCE

__all__ = ["HEADERS_TYPE", "IS_COMPILED", "Columns", "Encoded", "decode", "encode", "partitions_for"]

IS_COMPILED = kernel.IS_COMPILED

TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
# Spark's array<struct<key: string, value: binary>>.
HEADERS_TYPE = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))

# Decompressed bytes per call. A batch is at most 1 MiB compressed unless ``max.message.bytes`` was raised; a larger
# response is read in several calls, and a single batch above this is treated as a decompression bomb.
UNFOLDED_BYTES_MAX = 256 * 1024 * 1024

BATCH_BYTES_MAX = 1024 * 1024

# Interpreted, this takes about a second: then warn that the kernel is not compiled.
_patience = 32 * 1024 * 1024
_HEADER = Struct(">qiibIhiqqqhii")
_CRC = Struct(">I")
_CRC_AT = 17
_EMPTY = memoryview(b"")
_NO_INTEGERS = memoryview(bytearray()).cast("i")
_ZERO = memoryview(bytearray(4)).cast("i")
_BINARY = pa.binary()


@dataclass(frozen=True, slots=True)
class Columns:
    """The records of one fetch response, all arrays ``count`` long."""

    key: pa.BinaryArray
    value: pa.BinaryArray
    # Null for a record without headers, as in Spark's Kafka source. None if they were not requested.
    headers: pa.ListArray | None
    offset: pa.Int64Array
    # Microseconds, UTC. A record without a timestamp is a millisecond before 1970, as in Kafka.
    timestamp: pa.TimestampArray
    # 0: CreateTime, 1: LogAppendTime.
    timestamp_type: pa.Int32Array
    count: int
    # Start of the next fetch. Never above ``end``; equal to ``start`` if there was no whole batch.
    next_offset: int


class Encoded(NamedTuple):
    """A batch, and the rows it holds."""

    batch: bytearray
    first_row: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody misses


def decode(
    records: Buffer,
    *,
    start: int,
    end: int,
    aborted: Iterable[tuple[int, int]] = (),
    headers: bool = False,
    bytes_max: int = UNFOLDED_BYTES_MAX,
) -> Columns:
    """The records with ``start <= offset < end`` of a fetch response.

    Pass ``aborted``, (producer id, first offset) of each aborted transaction in the response, to leave out their
    records; without it they are included (read_uncommitted). A partial batch at the end is ignored. If the records
    are more than ``bytes_max`` bytes decompressed, only the first batches are decoded, up to ``next_offset``.

    Raises:
        CorruptBatch: a batch is damaged, of a format before Kafka 0.11, or too large on its own.
    """
    view = memoryview(records).cast("B")
    _warn_if_slow(len(view))
    sections, next_offset = kernel.find(view, start, end, aborted, bytes_max)
    room = sum(section.count for section in sections)
    offset = pa.allocate_buffer(8 * room)
    timestamp = pa.allocate_buffer(8 * room)
    timestamp_type = pa.allocate_buffer(4 * room)
    key_ends, value_ends = pa.allocate_buffer(4 * (room + 1)), pa.allocate_buffer(4 * (room + 1))
    key_places, value_places = pa.allocate_buffer(4 * room), pa.allocate_buffer(4 * room)
    header_ends = pa.allocate_buffer(4 * (room + 1)) if headers else None
    header_places = pa.allocate_buffer(4 * room) if headers else None
    count, key_nulls, value_nulls = kernel.measure(
        sections,
        start,
        end,
        _int64s(offset),
        _int64s(timestamp),
        _int32s(timestamp_type),
        _int32s(key_ends),
        _int32s(key_places),
        _int32s(value_ends),
        _int32s(value_places),
        _int32s(header_ends),
        _int32s(header_places),
    )
    return Columns(
        key=_binary(sections, False, count, key_ends, key_places, key_nulls),
        value=_binary(sections, False, count, value_ends, value_places, value_nulls),
        headers=_headers(sections, count, header_ends, header_places) if headers else None,
        offset=pa.Array.from_buffers(pa.int64(), count, [None, offset], 0),
        timestamp=pa.Array.from_buffers(TIMESTAMP_TYPE, count, [None, timestamp], 0),
        timestamp_type=pa.Array.from_buffers(pa.int32(), count, [None, timestamp_type], 0),
        count=count,
        next_offset=next_offset,
    )


def encode(
    key: pa.Array,
    value: pa.Array,
    headers: pa.ListArray | None,
    timestamp_ms: pa.Int64Array,
    *,
    codec: Codec = Codec.NONE,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> list[Encoded]:
    """The rows in order as record batches, each of at most ``batch_bytes_max`` bytes before compression.

    A row that is larger is a batch of its own. Keys and values are binary or string, and may be null.

    Raises:
        ValueError: columns of different lengths or wrong types, a timestamp or a header's key that is null, a
            record that ``decode`` would refuse.
    """
    rows = len(timestamp_ms)
    if not len(key) == len(value) == rows or (headers is not None and len(headers) != rows):
        raise ValueError("key, value, headers and timestamp differ in length")
    if timestamp_ms.null_count:
        raise ValueError("a timestamp is null")
    timestamp_ms = timestamp_ms.cast(pa.int64())
    timestamps = _int64s(timestamp_ms.buffers()[1])[timestamp_ms.offset :][:rows]
    table = kernel.Rows(_read(key), _read(value), timestamps, *_read_headers(headers))
    _warn_if_slow(key.nbytes + value.nbytes)
    batches = []
    first = 0
    while first < rows:
        count, size, max_timestamp = kernel.fit(table, first, batch_bytes_max - HEADER_SIZE)
        if codec != Codec.NONE and size > UNFOLDED_BYTES_MAX:
            raise ValueError(
                f"a compressed record of {size} bytes could not be read back: send it uncompressed, or smaller"
            )
        batch = bytearray(HEADER_SIZE + size)
        with memoryview(batch) as whole, whole[HEADER_SIZE:] as body:
            kernel.write(table, first, count, body)
            compressed = compress(codec, body) if codec != Codec.NONE else None
        if compressed is not None:
            batch[HEADER_SIZE:] = compressed
        _seal(batch, codec, count, timestamps[first], max_timestamp)
        batches.append(Encoded(batch, first, count))
        first += count
    return batches


def partitions_for(key: pa.Array, count: int) -> pa.Int32Array:
    """The Java client's partition, of ``count``, for each key; -1 for a null key."""
    if count < 1:
        raise ValueError(f"{count} partitions")
    partitions = pa.allocate_buffer(4 * len(key))
    kernel.assign(_read(key), count, _int32s(partitions))
    return pa.Array.from_buffers(pa.int32(), len(key), [None, partitions], 0)


def _warn_if_slow(size: int) -> None:
    """Warn once per process that the kernel is interpreted, when enough was read to notice."""
    global _patience  # noqa: PLW0603  # it is the process that is warned once
    if IS_COMPILED or _patience < 0:
        return
    _patience -= size
    if _patience < 0:
        warnings.warn(
            "penstock.columnar.kernel is not compiled, so records are read and written about sixty times"
            " slower: install a C compiler and Python's headers, then reinstall penstock",
            RuntimeWarning,
            stacklevel=3,
        )


def _binary(
    sections: list[kernel.Section],
    of_headers: bool,
    count: int,
    ends: pa.Buffer,
    places: pa.Buffer,
    nulls: int,
    of_type: pa.DataType = _BINARY,
) -> pa.Array:
    views = _int32s(ends), _int32s(places)
    data = pa.allocate_buffer(views[0][count])
    # Zeros, unlike what allocate_buffer returns.
    validity = bytearray((count + 7) // 8 if nulls else 0)
    if nulls < count:
        kernel.copy(sections, of_headers, *views, memoryview(data).cast("B"), memoryview(validity))
    buffers = [pa.py_buffer(validity) if nulls else None, ends, data]
    return pa.Array.from_buffers(of_type, count, buffers, nulls)


def _headers(
    sections: list[kernel.Section], count: int, header_ends: pa.Buffer, header_places: pa.Buffer
) -> pa.ListArray:
    total = _int32s(header_ends)[count]
    name_ends, value_ends = pa.allocate_buffer(4 * (total + 1)), pa.allocate_buffer(4 * (total + 1))
    name_places, value_places = pa.allocate_buffer(4 * total), pa.allocate_buffer(4 * total)
    value_nulls = kernel.measure_headers(
        sections,
        _int32s(header_ends),
        _int32s(header_places),
        _int32s(name_ends),
        _int32s(name_places),
        _int32s(value_ends),
        _int32s(value_places),
    )
    names = _text(_binary(sections, True, total, name_ends, name_places, 0))
    contents = _binary(sections, True, total, value_ends, value_places, value_nulls)
    pairs = pa.StructArray.from_arrays([names, contents], fields=list(HEADERS_TYPE.value_type))
    validity = bytearray((count + 7) // 8)
    nulls = kernel.mark_filled(_int32s(header_ends), count, memoryview(validity))
    return pa.Array.from_buffers(
        HEADERS_TYPE, count, [pa.py_buffer(validity), header_ends], nulls, children=[pairs]
    )


def _text(names: pa.BinaryArray) -> pa.StringArray:
    """Decode names as Java does, with a replacement character for each bad byte, so that they never fail."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.as_py().decode(errors="replace") for name in names], pa.string())


def _read(column: pa.Array) -> kernel.Binary:
    if column.type != _BINARY:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) and not (
            pa.types.is_large_binary(column.type) or pa.types.is_null(column.type)
        ):
            raise ValueError(f"the column must be binary or string, not {column.type}")
        column = column.cast(_BINARY)
    validity, ends, data = column.buffers()
    first = column.offset
    return kernel.Binary(
        # Arrow allows an array without rows to have no offsets at all.
        _int32s(ends)[first : first + len(column) + 1] if len(column) else _ZERO,
        memoryview(data).cast("B") if data is not None else _EMPTY,
        memoryview(validity).cast("B") if validity is not None and column.null_count else _EMPTY,
        first,
    )


def _read_headers(headers: pa.ListArray | None) -> tuple[memoryview, kernel.Binary, kernel.Binary]:
    if headers is None:
        return _NO_INTEGERS, kernel.Binary(_ZERO, _EMPTY, _EMPTY, 0), kernel.Binary(_ZERO, _EMPTY, _EMPTY, 0)
    if headers.type != HEADERS_TYPE:
        headers = _cast_headers(headers)
    if headers.null_count:
        # A null list may span elements that belong to no row.
        headers = headers.fill_null([])
    # Unlike ``field``, this makes the name of a null struct null.
    names, contents = headers.values.flatten()
    ends = (
        _int32s(headers.buffers()[1])[headers.offset :][: len(headers) + 1] if len(headers) else _NO_INTEGERS
    )
    return ends, _read(names), _read(contents)


def _cast_headers(headers: pa.Array) -> pa.ListArray:
    kind = headers.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        pair = kind.value_type
        if pa.types.is_struct(pair) and [field.name for field in pair] == ["key", "value"]:
            return headers.cast(HEADERS_TYPE)
    raise ValueError(f"headers must be list<struct<key: string, value: binary>>, not {kind}")


def _seal(batch: bytearray, codec: Codec, count: int, base_timestamp: int, max_timestamp: int) -> None:
    """Write the header, with the CRC of what follows it."""
    _HEADER.pack_into(
        batch,
        0,
        0,
        len(batch) - 12,
        -1,
        MAGIC,
        0,
        codec,
        count - 1,
        base_timestamp,
        max_timestamp,
        NO_PRODUCER_ID,
        -1,
        NO_SEQUENCE,
        count,
    )
    with memoryview(batch) as whole, whole[CRC_START:] as covered:
        _CRC.pack_into(batch, _CRC_AT, crc32c(covered))


def _int32s(buffer: pa.Buffer | None) -> memoryview:
    return memoryview(buffer).cast("B").cast("i") if buffer is not None else _NO_INTEGERS


def _int64s(buffer: pa.Buffer) -> memoryview:
    return memoryview(buffer).cast("B").cast("q")
