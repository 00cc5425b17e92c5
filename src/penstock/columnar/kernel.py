"""The kernel between record batches and Arrow buffers: the inner loops of ``columns``, and nothing else.

Plain Python that Cython compiles, with the C types in ``kernel.pxd``; without a compiler at install time the same
code is interpreted, about sixty times slower. So nothing of Cython is imported here, integers never rely on
wrap-around, and a failure is a return value where an exception would be expensive.

Reading takes two passes. ``find`` walks the batches and ``measure`` their records: every length is checked, the
fixed-width columns are filled, and the position of each key and value is noted. Then the exact sizes are known
and ``copy`` moves the bytes. Careful: compiled, **no index is checked** (setup.py turns that off). Each index
must follow from a comparison in this file, and a negative index does not count from the end but reads foreign
memory. The tests also run the interpreted file, where Python checks indexes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crc32c import crc32c

from penstock.protocol.compression import Codec, CompressionError, TooLarge, decompress
from penstock.protocol.records import CorruptBatch, decode_records

IS_COMPILED = not __file__.endswith((".py", ".pyc"))

# Arrow's offsets into a binary column are 32 bits wide.
ARRAY_BYTES_MAX = 2**31 - 1

# Compiled, a loop over bytes becomes vector moves and beats a slice: 8 ns against 47 ns for 100 bytes, equal from
# a few kilobytes on. Interpreted, a slice is the only sensible way.
COPIES_BY_LOOP = IS_COMPILED

# Layout of a batch; see protocol/records.py.
HEADER_SIZE = 61
PREFIX_SIZE = 12
MAGIC_AT = 16
# A record takes at least seven bytes: this rejects a false count before anything is allocated.
RECORD_BYTES_MIN = 7
# At most this many, so that the length of its batch fits 32 bits.
RECORD_BYTES_MAX = 2**31 - 128

# Few batches are compressed better than that.
UNFOLDING_LIKELY = 8
UNFOLDED_BYTES_LIKELY = 64 * 1024

INT64_MAX = 2**63 - 1
# Beyond these milliseconds, microseconds do not fit into 64 bits.
MILLISECONDS_MAX = INT64_MAX // 1000
# An offset is far below; so a delta of 32 bits can be added without a thought.
OFFSET_MAX = 2**62

CODEC_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20

MURMUR_MULTIPLIER = 0x5BD1E995
MURMUR_SEED = 0x9747B28C
MASK_32 = 0xFFFFFFFF


class Section:
    """The records of one batch that a reader may want, decompressed, with what its header says of them."""

    def __init__(
        self, body: memoryview | bytes, position: int, end: int, base_offset: int, count: int
    ) -> None:
        self.body = body
        # Of the first record in the body, and of the end of the last.
        self.position = position
        self.end = end
        self.base_offset = base_offset
        self.last_offset_delta = 0
        self.base_timestamp = 0
        # The batch's own time counts for all its records if it is of type 1 (append time).
        self.max_timestamp = 0
        self.timestamp_type = 0
        # Declared, and believed by nobody: the body decides.
        self.count = count
        # Set by ``measure``: the rows that were wanted, and their headers.
        self.rows = 0
        self.headers = 0


class Binary:
    """A column of Arrow's layout to read from: row ``i`` is ``data[ends[i]:ends[i + 1]]``."""

    def __init__(self, ends: memoryview, data: memoryview, validity: memoryview, first_bit: int) -> None:
        self.ends = ends
        self.data = data
        # Empty: no row is null. Otherwise bit ``first_bit + i``, least significant first, is set if row ``i`` is.
        self.validity = validity
        self.first_bit = first_bit


class Rows:
    """Columns of the same length to be written as records."""

    def __init__(
        self,
        key: Binary,
        value: Binary,
        timestamps: memoryview,
        header_ends: memoryview,
        names: Binary,
        contents: Binary,
    ) -> None:
        self.key = key
        self.value = value
        self.timestamps = timestamps
        # Empty if there are no headers; otherwise those of row ``i`` are ``header_ends[i]`` up to ``[i + 1]``.
        self.header_ends = header_ends
        self.names = names
        self.contents = contents
        self.sizes = memoryview(bytearray(4 * len(timestamps))).cast("i")


# ------------------------------------------------------------------------------------------------- batches


def find(
    records: memoryview, start: int, end: int, aborted: Iterable[tuple[int, int]], bytes_max: int
) -> tuple[list[Section], int]:
    """The batches that hold records between the offsets, and the offset at which reading goes on.

    Control batches and those of aborted transactions are passed over (KIP-98), as is a partial batch at the
    end. Stops before the batch that would bring more than ``bytes_max`` bytes, unless it is the first.

    Raises:
        CorruptBatch: a batch is damaged, of an old format, or unfolds to more than ``bytes_max`` on its own.
    """
    view = records
    size = len(view)
    sections: list[Section] = []
    # By the offset of their first record; a producer is ``aborting`` from there to its abort marker.
    pending = sorted(aborted, key=_first_offset)
    pending_at = 0
    aborting: set[int] = set()
    position = 0
    expected_offset = 0
    next_offset = start
    bytes_left = max(1, min(bytes_max, ARRAY_BYTES_MAX))
    while start < end and size - position > MAGIC_AT:
        base_offset = _int64(view, position)
        if view[position + MAGIC_AT] != 2:
            raise _unknown_format(base_offset, view[position + MAGIC_AT])
        batch_size = _int32(view, position + 8) + PREFIX_SIZE
        if batch_size < HEADER_SIZE:
            raise damaged(base_offset, "a length that no batch has")
        if batch_size > size - position:
            break
        last_offset_delta = _int32(view, position + 23)
        if base_offset < expected_offset or base_offset > OFFSET_MAX or last_offset_delta < 0:
            raise damaged(base_offset, "its offsets do not follow those before")
        last_offset = base_offset + last_offset_delta
        expected_offset = last_offset + 1
        if base_offset >= end:
            next_offset = end
            break
        # The CRC covers two bytes of attributes, and none beyond the first is defined.
        attributes = view[position + 22]
        is_aborted = False
        if attributes & TRANSACTIONAL and pending:
            # Also of batches before the start: an abort that ends there must not take what comes behind.
            while pending_at < len(pending) and pending[pending_at][1] <= last_offset:
                aborting.add(pending[pending_at][0])
                pending_at += 1
            if aborting:
                producer_id = _int64(view, position + 43)
                is_aborted = producer_id in aborting
                is_marker = is_aborted and attributes & CONTROL != 0
                if is_marker and _is_abort_marker(records[position : position + batch_size]):
                    aborting.discard(producer_id)
        if last_offset < start:
            position += batch_size
            continue
        if crc32c(records[position + 21 : position + batch_size]) != _uint32(view, position + 17):
            raise damaged(base_offset, "the CRC is wrong")
        count = _int32(view, position + 57)
        is_wanted = count > 0 and not is_aborted and not attributes & CONTROL
        if count < 0:
            raise damaged(base_offset, "a negative count of records")
        if is_wanted:
            if bytes_left <= 0 and sections:
                break
            body: memoryview | bytes = records
            body_at = position + HEADER_SIZE
            body_end = position + batch_size
            if attributes & CODEC_MASK:
                unfolded = _unfold(
                    attributes & CODEC_MASK, records[body_at:body_end], bytes_left, base_offset, not sections
                )
                if unfolded is None:
                    break
                body = unfolded
                body_at = 0
                body_end = len(unfolded)
            elif body_end - body_at > bytes_left and sections:
                break
            if count > (body_end - body_at) // RECORD_BYTES_MIN:
                raise damaged(base_offset, "more records than bytes for them")
            bytes_left -= body_end - body_at
            section = Section(body, body_at, body_end, base_offset, count)
            section.last_offset_delta = last_offset_delta
            section.base_timestamp = _int64(view, position + 27)
            section.max_timestamp = _int64(view, position + 35)
            section.timestamp_type = 1 if attributes & LOG_APPEND_TIME else 0
            sections.append(section)
        next_offset = last_offset + 1
        position += batch_size
    return sections, min(next_offset, end) if start < end else start


def damaged(base_offset: int, what: str) -> CorruptBatch:
    return CorruptBatch(f"the batch at offset {base_offset}: {what}")


def _unknown_format(base_offset: int, magic: int) -> CorruptBatch:
    if magic < 2:
        return damaged(base_offset, f"message format {magic}, older than Kafka 0.11, is not supported")
    return damaged(base_offset, f"message format {magic} is not known")


def _first_offset(transaction: tuple[int, int]) -> int:
    return transaction[1]


def _is_abort_marker(batch: memoryview) -> bool:
    try:
        markers = decode_records(batch, bytes_max=len(batch))
    except TooLarge as error:
        raise CorruptBatch("a control batch that unfolds to more than itself") from error
    # The key is a version and a type, 16 bits each; type 0 is abort.
    return bool(markers) and markers[0].key is not None and markers[0].key[2:4] == b"\0\0"


def _unfold(
    codec: int, payload: memoryview, bytes_max: int, base_offset: int, is_first: bool
) -> bytes | None:
    """The records decompressed; None if they are too many for now but may do in a call of their own."""
    if codec > Codec.ZSTD:
        raise damaged(base_offset, f"codec {codec} is not known")
    # The decoders reserve what they may fill, and reserving the whole bound takes longer than decompressing a
    # small batch. So the guess comes first, and what unfolds to more is begun again.
    bytes_guessed = max(UNFOLDED_BYTES_LIKELY, UNFOLDING_LIKELY * len(payload))
    while True:
        try:
            return decompress(Codec(codec), payload, min(bytes_guessed, bytes_max))
        except TooLarge as error:
            if bytes_guessed < bytes_max:
                bytes_guessed *= UNFOLDING_LIKELY
            elif is_first:
                raise damaged(base_offset, f"its records are more than {bytes_max} bytes") from error
            else:
                return None
        except CompressionError as error:
            raise damaged(base_offset, str(error)) from error


# ------------------------------------------------------------------------------------------------- records


def measure(
    sections: Sequence[Section],
    start: int,
    end: int,
    offsets: memoryview,
    timestamps: memoryview,
    timestamp_types: memoryview,
    key_ends: memoryview,
    key_places: memoryview,
    value_ends: memoryview,
    value_places: memoryview,
    header_ends: memoryview,
    header_places: memoryview,
) -> tuple[int, int, int]:
    """Check every record; fill what has a fixed width; note where keys, values and headers stand.

    A place is a position in the section's body, or -1 for null. Each view has room for all records that the
    sections declare (``..._ends``: one more); the header views may be empty, then headers are checked only.

    Returns the number of rows, and of nulls among their keys and values.

    Raises:
        CorruptBatch: a length, a varint or an offset that cannot be.
    """
    wants_headers = len(header_ends) > 0
    row = key_bytes = value_bytes = header_count = key_nulls = value_nulls = 0
    key_ends[0] = 0
    value_ends[0] = 0
    if wants_headers:
        header_ends[0] = 0
    current: memoryview | bytes | None = None
    for section in sections:
        if section.body is not current:
            current = section.body
            body = current
        at = section.position
        last = section.end
        base_offset = section.base_offset
        last_offset_delta = section.last_offset_delta
        base_timestamp = section.base_timestamp
        timestamp_type = section.timestamp_type
        timestamp = section.max_timestamp
        previous_delta = -1
        first_row = row
        first_header = header_count
        for _ in range(section.count):
            size, at = _varint(body, at, last)
            if at < 0 or size < 0 or size > last - at:
                raise damaged(base_offset, "a record reaches beyond its batch")
            stop = at + size
            # The byte of attributes is passed over: none is defined.
            timestamp_delta, at = _varint(body, at + 1, stop)
            if at < 0:
                raise damaged(base_offset, "a record's timestamp is no number")
            offset_delta, at = _varint(body, at, stop)
            if at < 0 or offset_delta <= previous_delta or offset_delta > last_offset_delta:
                raise damaged(base_offset, "its records' offsets do not go up")
            previous_delta = offset_delta
            key_size, at = _varint(body, at, stop)
            if at < 0 or key_size < -1 or key_size > stop - at:
                raise damaged(base_offset, "a key reaches beyond its record")
            key_place = -1
            if key_size >= 0:
                key_place = at
                at += key_size
            value_size, at = _varint(body, at, stop)
            if at < 0 or value_size < -1 or value_size > stop - at:
                raise damaged(base_offset, "a value reaches beyond its record")
            value_place = -1
            if value_size >= 0:
                value_place = at
                at += value_size
            headers, at = _varint(body, at, stop)
            # A header takes at least two bytes.
            if at < 0 or headers < 0 or headers > (stop - at) // 2:
                raise damaged(base_offset, "more headers than bytes for them")
            header_place = at
            for _ in range(headers):
                at = _skip_header(body, at, stop)
                if at < 0:
                    raise damaged(base_offset, "a header that is none")
            if at != stop:
                raise damaged(base_offset, "a record's size does not match its content")
            if timestamp_type == 0:
                if (timestamp_delta > 0 and base_timestamp > INT64_MAX - timestamp_delta) or (
                    timestamp_delta < 0 and base_timestamp < -INT64_MAX - timestamp_delta
                ):
                    raise damaged(base_offset, "a record's timestamp is no number")
                timestamp = base_timestamp + timestamp_delta
            offset = base_offset + offset_delta
            if offset < start or offset >= end:
                continue
            offsets[row] = offset
            timestamps[row] = _microseconds(timestamp)
            timestamp_types[row] = timestamp_type
            key_places[row] = key_place
            value_places[row] = value_place
            if key_place < 0:
                key_nulls += 1
            else:
                key_bytes += key_size
            if value_place < 0:
                value_nulls += 1
            else:
                value_bytes += value_size
            if wants_headers:
                header_count += headers
                header_places[row] = header_place
                header_ends[row + 1] = header_count
            row += 1
            key_ends[row] = key_bytes
            value_ends[row] = value_bytes
        if at != last:
            raise damaged(base_offset, "bytes behind the last record")
        section.rows = row - first_row
        section.headers = header_count - first_header
    return row, key_nulls, value_nulls


def measure_headers(
    sections: Sequence[Section],
    header_ends: memoryview,
    header_places: memoryview,
    name_ends: memoryview,
    name_places: memoryview,
    value_ends: memoryview,
    value_places: memoryview,
) -> int:
    """What ``measure`` does for records, for the headers it has found; returns how many values are null."""
    row = header = name_bytes = value_bytes = nulls = 0
    name_ends[0] = 0
    value_ends[0] = 0
    for section in sections:
        body = section.body
        for _ in range(section.rows):
            at = header_places[row]
            for _ in range(header_ends[row + 1] - header_ends[row]):
                # Checked again, in case somebody writes into the buffer meanwhile.
                stop = _skip_header(body, at, section.end)
                if stop < 0:
                    raise damaged(section.base_offset, "a header that is none")
                name_size, at = _varint(body, at, section.end)
                name_places[header] = at
                name_bytes += name_size
                value_size, at = _varint(body, at + name_size, section.end)
                if value_size < 0:
                    value_places[header] = -1
                    nulls += 1
                else:
                    value_places[header] = at
                    value_bytes += value_size
                if name_bytes > ARRAY_BYTES_MAX or value_bytes > ARRAY_BYTES_MAX:
                    raise damaged(section.base_offset, "headers that were changed while they were read")
                header += 1
                name_ends[header] = name_bytes
                value_ends[header] = value_bytes
                at = stop
            row += 1
    return nulls


def copy(
    sections: Sequence[Section],
    of_headers: bool,
    ends: memoryview,
    places: memoryview,
    data: memoryview,
    validity: memoryview,
) -> None:
    """Move the bytes of one column to where they belong; ``validity`` is empty, or zeros, one bit a row."""
    has_nulls = len(validity) > 0
    row = 0
    current: memoryview | bytes | None = None
    for section in sections:
        if section.body is not current:
            current = section.body
            body = current
        for _ in range(section.headers if of_headers else section.rows):
            place = places[row]
            if place >= 0:
                begin = ends[row]
                size = ends[row + 1] - begin
                # Here and not a call of ``_move``: handing over two views costs more than most copies.
                if COPIES_BY_LOOP:
                    for index in range(size):
                        data[begin + index] = body[place + index]
                else:
                    data[begin : begin + size] = body[place : place + size]
                if has_nulls:
                    validity[row >> 3] |= 1 << (row & 7)
            row += 1


def mark_filled(ends: memoryview, rows: int, validity: memoryview) -> int:
    """Set the bit of each row that has any element; returns how many have none."""
    nulls = 0
    for row in range(rows):
        if ends[row + 1] > ends[row]:
            validity[row >> 3] |= 1 << (row & 7)
        else:
            nulls += 1
    return nulls


# ------------------------------------------------------------------------------------------------- encoding


def fit(table: Rows, first: int, bytes_max: int) -> tuple[int, int, int]:
    """How many rows from ``first`` on make one batch: (rows, their bytes, the latest timestamp).

    At least one row, however large. The size of each record is left in ``table.sizes`` for ``write``.

    Raises:
        ValueError: a row cannot be written as a record.
    """
    key, value, names, contents = table.key, table.value, table.names, table.contents
    timestamps = table.timestamps
    header_ends = table.header_ends
    sizes = table.sizes
    has_headers = len(header_ends) > 0
    header_count = len(names.ends) - 1
    bytes_max = min(bytes_max, RECORD_BYTES_MAX)
    total = 0
    row = first
    base_timestamp = timestamps[first]
    max_timestamp = base_timestamp
    while row < len(timestamps):
        timestamp = timestamps[row]
        if timestamp < -OFFSET_MAX or timestamp > OFFSET_MAX:
            raise ValueError(f"row {row}: {timestamp} is no timestamp in milliseconds")
        size = 1 + _varint_size(timestamp - base_timestamp) + _varint_size(row - first)
        size += _field_size(key, row) + _field_size(value, row)
        begin = stop = 0
        if has_headers:
            begin = header_ends[row]
            stop = header_ends[row + 1]
            if begin < 0 or stop < begin or stop > header_count:
                raise ValueError(f"row {row}: its headers are not in the array")
        size += _varint_size(stop - begin)
        for header in range(begin, stop):
            if _is_null(names, header):
                raise ValueError(f"row {row}: a header without a key")
            size += _field_size(names, header) + _field_size(contents, header)
        if size > RECORD_BYTES_MAX:
            raise ValueError(f"row {row}: {size} bytes are too many for a record")
        if total + size + _varint_size(size) > bytes_max and row > first:
            break
        total += size + _varint_size(size)
        sizes[row] = size
        max_timestamp = max(max_timestamp, timestamp)
        row += 1
    return row - first, total, max_timestamp


def write(table: Rows, first: int, rows: int, output: memoryview) -> int:
    """Write the records that ``fit`` measured into ``output``, which has room for just that; the end."""
    key, value, names, contents = table.key, table.value, table.names, table.contents
    timestamps = table.timestamps
    header_ends = table.header_ends
    sizes = table.sizes
    has_headers = len(header_ends) > 0
    at = 0
    base_timestamp = timestamps[first]
    for row in range(first, first + rows):
        at = _put_varint(output, at, sizes[row])
        output[at] = 0
        at = _put_varint(output, at + 1, timestamps[row] - base_timestamp)
        at = _put_varint(output, at, row - first)
        at = _put_field(output, at, key, row)
        at = _put_field(output, at, value, row)
        if has_headers:
            at = _put_varint(output, at, header_ends[row + 1] - header_ends[row])
            for header in range(header_ends[row], header_ends[row + 1]):
                at = _put_field(output, at, names, header)
                at = _put_field(output, at, contents, header)
        else:
            output[at] = 0
            at += 1
    return at


def assign(key: Binary, count: int, partitions: memoryview) -> None:
    """The partition of each key as Kafka's Java client chooses it: murmur2, positive, modulo; null: -1."""
    data = key.data
    ends = key.ends
    for row in range(len(partitions)):
        begin = ends[row]
        size = ends[row + 1] - begin
        if begin < 0 or size < 0 or begin + size > len(data):
            raise ValueError(f"row {row}: its key is not in the array")
        if _is_null(key, row):
            partitions[row] = -1
            continue
        hashed = MURMUR_SEED ^ size
        whole = begin + size - size % 4
        for at in range(begin, whole, 4):
            word = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
            word = word * MURMUR_MULTIPLIER & MASK_32
            word = (word ^ word >> 24) * MURMUR_MULTIPLIER & MASK_32
            hashed = (hashed * MURMUR_MULTIPLIER & MASK_32) ^ word
        if size % 4:
            for at in range(whole, begin + size):
                hashed ^= data[at] << 8 * (at - whole)
            hashed = hashed * MURMUR_MULTIPLIER & MASK_32
        hashed = (hashed ^ hashed >> 13) * MURMUR_MULTIPLIER & MASK_32
        hashed ^= hashed >> 15
        partitions[row] = (hashed & 0x7FFFFFFF) % count


# -------------------------------------------------------------------------------------------------- numbers


def _uint32(view: memoryview, at: int) -> int:
    return view[at] << 24 | view[at + 1] << 16 | view[at + 2] << 8 | view[at + 3]


def _int32(view: memoryview, at: int) -> int:
    value = _uint32(view, at)
    return value - 0x100000000 if value > 0x7FFFFFFF else value


def _int64(view: memoryview, at: int) -> int:
    return _int32(view, at) * 0x100000000 + _uint32(view, at + 4)


def _varint(body: memoryview | bytes, at: int, end: int) -> tuple[int, int]:
    """The signed number at a position that is not negative, and where it ends: -1 if not before ``end``."""
    value = shift = 0
    while at < end:
        byte = body[at]
        at += 1
        # The tenth byte holds the last bit of 64.
        if shift == 63 and byte > 1:
            break
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            half = value >> 1
            return (-half - 1 if value & 1 else half), at
        shift += 7
    return 0, -1


def _skip_header(body: memoryview | bytes, at: int, end: int) -> int:
    """Where the header ends, or -1."""
    size, at = _varint(body, at, end)
    # A name, unlike a value, is never null.
    if at < 0 or size < 0 or size > end - at:
        return -1
    size, at = _varint(body, at + size, end)
    if at < 0 or size < -1 or size > end - at:
        return -1
    return at + size if size > 0 else at


def _microseconds(milliseconds: int) -> int:
    """The nearest that 64 bits can hold: nonsense in a record's timestamp is no reason to stop reading."""
    if milliseconds > MILLISECONDS_MAX:
        return MILLISECONDS_MAX * 1000
    if milliseconds < -MILLISECONDS_MAX:
        return -MILLISECONDS_MAX * 1000
    return milliseconds * 1000


def _varint_size(value: int) -> int:
    rest = value if value >= 0 else -value - 1
    # Six bits of the number fit into the first byte, beside its sign.
    size = 1
    rest >>= 6
    while rest:
        size += 1
        rest >>= 7
    return size


def _put_varint(output: memoryview, at: int, value: int) -> int:
    sign = 0
    rest = value
    if value < 0:
        sign = 1
        rest = -value - 1
    byte = (rest & 0x3F) << 1 | sign
    rest >>= 6
    while rest:
        output[at] = byte | 0x80
        at += 1
        byte = rest & 0x7F
        rest >>= 7
    output[at] = byte
    return at + 1


def _is_null(column: Binary, row: int) -> bool:
    bit = column.first_bit + row
    return len(column.validity) > 0 and not column.validity[bit >> 3] >> (bit & 7) & 1


def _field_size(column: Binary, row: int) -> int:
    """Of a field with its length before it, as it stands in a record."""
    begin = column.ends[row]
    size = column.ends[row + 1] - begin
    if begin < 0 or size < 0 or begin + size > len(column.data):
        raise ValueError(f"row {row}: its bytes are not in the array")
    if _is_null(column, row):
        return 1
    return _varint_size(size) + size


def _put_field(output: memoryview, at: int, column: Binary, row: int) -> int:
    if _is_null(column, row):
        return _put_varint(output, at, -1)
    begin = column.ends[row]
    size = column.ends[row + 1] - begin
    at = _put_varint(output, at, size)
    return _move(output, at, column.data, begin, size)


def _move(output: memoryview, at: int, data: memoryview, begin: int, size: int) -> int:
    if not COPIES_BY_LOOP:
        return _move_slice(output, at, data, begin, size)
    for index in range(size):
        output[at + index] = data[begin + index]
    return at + size


def _move_slice(output: memoryview, at: int, data: memoryview, begin: int, size: int) -> int:
    # Apart, so that the loop stays small enough for the C compiler to put it where it is used.
    output[at : at + size] = data[begin : begin + size]
    return at + size
