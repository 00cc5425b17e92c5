"""Record batches, magic 2: the unit in which records are produced, stored and fetched.

    offset size field               offset size field
         0    8 base offset             27    8 base timestamp
         8    4 length after this       35    8 max timestamp
        12    4 leader epoch            43    8 producer id (-1: none)
        16    1 magic = 2               51    2 producer epoch
        17    4 crc                     53    4 base sequence
        21    2 attributes              57    4 count of records
        23    4 last offset delta       61    - records, compressed or not

The broker treats everything after the header as opaque. The CRC-32C covers byte 21 to the end, so base offset and
leader epoch, which only the broker knows, can be patched in place; any other change needs a new CRC.
Careful: the header comes from the client. ``check_produced`` verifies the fields that the log relies on; only the
consumer (and ``decode_records``) reads the records inside, and for compacted topics ``keyless_records``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

from crc32c import crc32c

from penstock.environment import Buffer
from penstock.protocol.compression import Codec, CompressionError, TooLarge, compress, decompress
from penstock.protocol.errors import ErrorCode

HEADER_SIZE = 61
MAGIC = 2

NO_TIMESTAMP = -1
NO_PRODUCER_ID = -1
NO_SEQUENCE = -1
# After this, sequences start again at 0.
SEQUENCE_MAX = 2**31 - 1

_HEADER = Struct(">qiibIhiqqqhii")
assert _HEADER.size == HEADER_SIZE
_PREFIX_SIZE = 12  # base offset and length, which the length does not include
CRC_START = 21  # the first byte that the CRC covers

_BASE_OFFSET = Struct(">q")
_LEADER_EPOCH = Struct(">i")
_MAGIC_AT = 16
_CRC = Struct(">I")
_CRC_AT = 17
_ATTRIBUTES = Struct(">h")
_MAX_TIMESTAMP_AT = 35

CODEC_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
# The base timestamp says when tombstones and markers in the batch may go (KIP-534). Record timestamps still add up.
DELETE_HORIZON = 0x40

# Key of a marker: version and type. Value: version and coordinator epoch.
_MARKER_KEY = Struct(">hh")
_MARKER_VALUE = Struct(">hi")
# The record of a marker as we and Kafka write it. Its lengths are varints of one byte, which are twice the number.
_MARKER_RECORD = Struct(">BBBB B4s B6s B")
_MARKER_KEY_LENGTH = 2 * _MARKER_KEY.size
_MARKER_VALUE_LENGTH = 2 * _MARKER_VALUE.size
_MARKER_RECORD_LENGTH = 2 * (_MARKER_RECORD.size - 1)
_ABORT, _COMMIT = 0, 1
_MARKER_BYTES_MAX = 256

Header: TypeAlias = tuple[str, bytes | None]


class CorruptBatch(Exception):
    """The bytes are not a record batch, or not the one that was written."""


class BatchHeader(NamedTuple):
    base_offset: int
    # Size of the whole batch, including the header.
    size: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed

    @property
    def codec(self) -> int:
        """The codec id. Not a ``Codec``, because it may be unknown; the reader must handle that."""
        return self.attributes & CODEC_MASK

    @property
    def is_log_append_time(self) -> bool:
        return self.attributes & LOG_APPEND_TIME != 0

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL != 0

    @property
    def is_filler(self) -> bool:
        """Whether it only stands for offsets of compacted batches: it has no records and no producer."""
        return self.count == 0 and self.producer_id == NO_PRODUCER_ID

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time from which on its tombstones, or its marker, may go; None when it was never compacted."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON else None

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & SEQUENCE_MAX


class Record(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()


class Marker(NamedTuple):
    """The control record that ends a transaction in a partition."""

    is_commit: bool
    # Leader epoch of the coordinator's partition.
    coordinator_epoch: int


# Input of ``encode_batch``: timestamp, key, value, headers.
RecordFields: TypeAlias = tuple[int, bytes | None, bytes | None, Sequence[Header]]


def decode_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Read the header of the batch at ``position``, whose records need not be in the buffer.

    Raises:
        CorruptBatch: too few bytes for a header, or an invalid length or magic.
    """
    if len(buffer) - position < HEADER_SIZE:
        raise CorruptBatch(f"{len(buffer) - position} bytes are too few for a batch header")
    fields = _HEADER.unpack_from(buffer, position)
    if fields[3] != MAGIC:
        raise CorruptBatch(f"magic {fields[3]}")
    if fields[1] < HEADER_SIZE - _PREFIX_SIZE:
        raise CorruptBatch(f"batch length {fields[1]}")
    return BatchHeader(fields[0], fields[1] + _PREFIX_SIZE, *fields[2:])


def crc_matches(buffer: Buffer, position: int, header: BatchHeader) -> bool:
    """Whether the batch at ``position`` is wholly in the buffer and undamaged."""
    with memoryview(buffer) as view, view[position + CRC_START : position + header.size] as covered:
        return len(covered) == header.size - CRC_START and crc32c(covered) == header.crc


def patch(buffer: bytearray | memoryview, position: int, base_offset: int, leader_epoch: int) -> None:
    """Write the two fields that the broker sets. The CRC does not cover them."""
    _BASE_OFFSET.pack_into(buffer, position, base_offset)
    _LEADER_EPOCH.pack_into(buffer, position + 12, leader_epoch)


def set_log_append_time(
    buffer: bytearray | memoryview, position: int, header: BatchHeader, timestamp: int
) -> BatchHeader:
    """Set the broker's time in the batch (``message.timestamp.type=LogAppendTime``). Returns the new header.

    The records keep their own timestamps: the attribute tells readers to use the batch's instead.
    """
    attributes = header.attributes | LOG_APPEND_TIME
    _ATTRIBUTES.pack_into(buffer, position + CRC_START, attributes)
    _BASE_OFFSET.pack_into(buffer, position + _MAX_TIMESTAMP_AT, timestamp)
    with memoryview(buffer) as view, view[position + CRC_START : position + header.size] as covered:
        crc = crc32c(covered)
    _CRC.pack_into(buffer, position + _CRC_AT, crc)
    return header._replace(attributes=attributes, max_timestamp=timestamp, crc=crc)


def batches(buffer: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the position and header of every whole batch; a partial one at the end is skipped.

    Raises:
        CorruptBatch: there is no batch where one should begin.
    """
    position = 0
    end = len(buffer)
    while end - position >= HEADER_SIZE:
        header = decode_header(buffer, position)
        if header.size > end - position:
            return
        yield position, header
        position += header.size


def check_produced(
    batch: memoryview, *, max_message_bytes: int, allow_zstd: bool = True
) -> BatchHeader | ErrorCode:
    """Check the batch a client sent for one partition. Returns its header if it may be appended, else the error.

    It must be exactly one batch of magic 2, whole, not too large, undamaged, and without values that only a broker
    may set. ``allow_zstd`` is false for Produce before version 7 (KIP-110).
    """
    size = len(batch)
    if size < HEADER_SIZE:
        if size > _MAGIC_AT and batch[_MAGIC_AT] < MAGIC:
            return ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT
        return ErrorCode.CORRUPT_MESSAGE if size else ErrorCode.INVALID_RECORD
    fields = _HEADER.unpack_from(batch)
    base_offset, length, _, magic, crc, attributes, last_offset_delta, _, _, producer_id, _, _, count = fields
    if magic != MAGIC:
        return ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT if 0 <= magic < MAGIC else ErrorCode.CORRUPT_MESSAGE
    if length + _PREFIX_SIZE != size:
        if length < HEADER_SIZE - _PREFIX_SIZE or length + _PREFIX_SIZE > size:
            return ErrorCode.CORRUPT_MESSAGE
        # A second batch, or garbage after the first.
        return ErrorCode.INVALID_RECORD
    if size > max_message_bytes:
        return ErrorCode.MESSAGE_TOO_LARGE
    if crc32c(batch[CRC_START:]) != crc:
        return ErrorCode.CORRUPT_MESSAGE
    # Like Kafka, refuse a base offset other than 0: the broker sets this field.
    if (
        count <= 0
        or last_offset_delta != count - 1
        or base_offset != 0
        or attributes & (CONTROL | DELETE_HORIZON)
    ):
        return ErrorCode.INVALID_RECORD
    codec = attributes & CODEC_MASK
    if codec >= Codec.ZSTD and (codec > Codec.ZSTD or not allow_zstd):
        return ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    if producer_id >= 0:
        # Idempotence needs an epoch and a sequence.
        if fields[10] < 0 or fields[11] < 0:
            return ErrorCode.INVALID_RECORD
    elif producer_id != NO_PRODUCER_ID or attributes & TRANSACTIONAL:
        return ErrorCode.INVALID_RECORD
    return BatchHeader(base_offset, size, *fields[2:])


def encode_batch(
    records: Iterable[Record | RecordFields],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    codec: Codec = Codec.NONE,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
    control: bool = False,
    transactional: bool = False,
) -> bytearray:
    """Write one batch. A ``Record``'s own offset is not used: offsets count up from ``base_offset``."""
    body = bytearray()
    base_timestamp = max_timestamp = NO_TIMESTAMP
    count = 0
    for record in records:
        fields: RecordFields = record[-4:]
        timestamp = fields[0]
        if count == 0:
            base_timestamp = timestamp
        max_timestamp = max(max_timestamp, timestamp)
        _encode_record(body, timestamp - base_timestamp, count, fields)
        count += 1
    if count == 0:
        raise ValueError("a batch holds at least one record")
    return batch_of(
        body if codec == Codec.NONE else compress(codec, body),
        codec | (TRANSACTIONAL if transactional else 0) | (CONTROL if control else 0),
        count,
        (base_timestamp, max_timestamp),
        (producer_id, producer_epoch, base_sequence),
        base_offset,
        leader_epoch,
    )


def rebuilt(header: BatchHeader, payload: Buffer) -> bytearray:
    """The bytes of a batch with this header and these records, compressed as it says. Size and CRC are set here."""
    batch = bytearray(HEADER_SIZE)
    batch += payload
    _HEADER.pack_into(
        batch, 0, header.base_offset, len(batch) - _PREFIX_SIZE, header.leader_epoch, MAGIC, 0, *header[5:]
    )
    with memoryview(batch) as view, view[CRC_START:] as covered:
        crc = crc32c(covered)
    _CRC.pack_into(batch, _CRC_AT, crc)
    return batch


def emptied(header: BatchHeader) -> bytearray:
    """The batch without its records. It keeps its offsets and its producer's sequence, as in Kafka."""
    attributes = header.attributes & (LOG_APPEND_TIME | TRANSACTIONAL | CONTROL)
    return rebuilt(header._replace(attributes=attributes, base_timestamp=header.max_timestamp, count=0), b"")


def filler(base_offset: int, last_offset: int, leader_epoch: int) -> bytearray:
    """An empty batch in place of compacted ones, so that offsets in a log follow each other without a gap."""
    return rebuilt(
        BatchHeader(
            base_offset,
            HEADER_SIZE,
            leader_epoch,
            MAGIC,
            0,
            0,
            last_offset - base_offset,
            NO_TIMESTAMP,
            NO_TIMESTAMP,
            NO_PRODUCER_ID,
            -1,
            NO_SEQUENCE,
            0,
        ),
        b"",
    )


def batch_of(
    payload: Buffer,
    attributes: int,
    count: int,
    timestamps: tuple[int, int],
    producer: tuple[int, int, int] = (NO_PRODUCER_ID, -1, NO_SEQUENCE),
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytearray:
    """Put the header before records that are encoded, and compressed as the attributes say.

    ``timestamps`` are those of the first record and the latest; ``producer`` is id, epoch and base sequence.
    """
    batch = bytearray(HEADER_SIZE)
    batch += payload
    length = len(batch) - _PREFIX_SIZE
    _HEADER.pack_into(
        batch,
        0,
        base_offset,
        length,
        leader_epoch,
        MAGIC,
        0,
        attributes,
        count - 1,
        *timestamps,
        *producer,
        count,
    )
    with memoryview(batch) as view, view[CRC_START:] as covered:
        crc = crc32c(covered)
    _CRC.pack_into(batch, _CRC_AT, crc)
    return batch


def decode_records(buffer: Buffer, position: int = 0, *, bytes_max: int) -> list[Record]:
    """Decode the records of the batch at ``position``, up to ``bytes_max`` decompressed bytes.

    Raises:
        TooLarge: the records are larger than that when decompressed.
        CorruptBatch: the batch is damaged. The CRC is not checked here.
    """
    header, body = unfold(buffer, position, bytes_max)
    records = []
    at = 0
    try:
        for _ in range(header.count):
            record, at = _decode_record(body, at, header)
            records.append(record)
    except (IndexError, UnicodeDecodeError) as error:
        raise CorruptBatch("a record reaches beyond its batch") from error
    if at != len(body):
        raise CorruptBatch(f"{len(body) - at} bytes behind the last record")
    return records


def encode_marker(marker: Marker, producer_id: int, producer_epoch: int, timestamp: int) -> bytearray:
    """A control batch that ends the producer's transaction in a partition."""
    key = _MARKER_KEY.pack(0, _COMMIT if marker.is_commit else _ABORT)
    value = _MARKER_VALUE.pack(0, marker.coordinator_epoch)
    record = _MARKER_RECORD.pack(
        _MARKER_RECORD_LENGTH, 0, 0, 0, _MARKER_KEY_LENGTH, key, _MARKER_VALUE_LENGTH, value, 0
    )
    producer = producer_id, producer_epoch, NO_SEQUENCE
    return batch_of(record, TRANSACTIONAL | CONTROL, 1, (timestamp, timestamp), producer)


def decode_marker(buffer: Buffer, position: int = 0) -> Marker | None:
    """The marker in the control batch at ``position``; None for a control record of another type.

    Also None if compaction has removed the record.

    Raises:
        CorruptBatch: the batch is damaged. The CRC is not checked here.
    """
    records = decode_records(buffer, position, bytes_max=_MARKER_BYTES_MAX)
    if not records:
        return None
    record = records[0]
    # Later versions may add fields at the end.
    if record.key is None or len(record.key) < _MARKER_KEY.size:
        raise CorruptBatch("a control record without a type")
    kind = _MARKER_KEY.unpack_from(record.key)[1]
    if kind not in (_ABORT, _COMMIT):
        return None
    if record.value is None or len(record.value) < _MARKER_VALUE.size:
        raise CorruptBatch("a marker without a coordinator epoch")
    return Marker(kind == _COMMIT, _MARKER_VALUE.unpack_from(record.value)[1])


def decode_timestamps(buffer: Buffer, position: int = 0, *, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and timestamp of each record, without decoding the rest. Raises as ``decode_records``."""
    header, body = unfold(buffer, position, bytes_max)
    at = 0
    try:
        for _ in range(header.count):
            size, at = _decode_varint(body, at)
            if size < 0 or at + size > len(body):
                raise CorruptBatch(f"a record of {size} bytes")
            timestamp_delta, place = _decode_varint(body, at + 1)
            offset_delta, _ = _decode_varint(body, place)
            yield header.base_offset + offset_delta, header.base_timestamp + timestamp_delta
            at += size
    except IndexError as error:
        raise CorruptBatch("a record reaches beyond its batch") from error


def keyless_records(buffer: Buffer, position: int = 0, *, bytes_max: int) -> list[int]:
    """The places in the batch, from 0 on, of its records without a key.

    Also checks what compaction relies on: that offsets count up by one, and that keys and values end where their
    record does, or before. Raises as ``decode_records``.
    """
    header, body = unfold(buffer, position, bytes_max)
    keyless = []
    at = 0
    try:
        # Many of these numbers have one byte, and a call for each would take most of the time.
        for place in range(header.count):
            size = body[at]
            at += 1
            if size > 0x7F or size & 1:
                size, at = _decode_varint(body, at - 1)
                if size < 0:
                    raise CorruptBatch(f"a record of {size} bytes")
            else:
                size >>= 1
            end = at + size
            at += 1  # attributes
            while body[at] > 0x7F:  # timestamp delta
                at += 1
            at += 1
            delta = body[at]
            at += 1
            if delta > 0x7F or delta & 1:
                delta, at = _decode_varint(body, at - 1)
            else:
                delta >>= 1
            if delta != place:
                raise CorruptBatch(f"record {place} has the offset delta {delta}")
            size = body[at]
            at += 1
            if size > 0x7F or size & 1:
                size, at = _decode_varint(body, at - 1)
                if size < -1:
                    raise CorruptBatch(f"a key of {size} bytes")
                if size < 0:
                    keyless.append(place)
                    size = 0
            else:
                size >>= 1
            at += size
            if at >= end:
                raise CorruptBatch("a key reaches beyond its record")
            size = body[at]
            at += 1
            if size > 0x7F or size & 1:
                size, at = _decode_varint(body, at - 1)
                if size < -1:
                    raise CorruptBatch(f"a value of {size} bytes")
                size = max(size, 0)
            else:
                size >>= 1
            if at + size > end:
                raise CorruptBatch("a value reaches beyond its record")
            at = end
    except IndexError as error:
        raise CorruptBatch("a record reaches beyond its batch") from error
    if at != len(body):
        raise CorruptBatch("the records do not end where their batch does")
    return keyless


def unfold(buffer: Buffer, position: int, bytes_max: int) -> tuple[BatchHeader, bytes]:
    """The header of a batch, and its records decompressed."""
    header = decode_header(buffer, position)
    with memoryview(buffer) as view, view[position + HEADER_SIZE : position + header.size] as payload:
        if len(payload) != header.size - HEADER_SIZE:
            raise CorruptBatch("the batch is cut short")
        if header.codec > Codec.ZSTD:
            raise CorruptBatch(f"codec {header.codec}")
        codec = Codec(header.codec)
        try:
            # Without records there is nothing to decompress, whatever codec the batch had before compaction.
            body = decompress(codec, payload, bytes_max) if len(payload) else b""
        except TooLarge:
            raise
        except CompressionError as error:
            raise CorruptBatch(str(error)) from error
    # A record takes at least seven bytes: reject a false count before allocating anything.
    if not 0 <= header.count <= len(body) // 7:
        raise CorruptBatch(f"{header.count} records in {len(body)} bytes")
    return header, body


def _encode_record(body: bytearray, timestamp_delta: int, offset_delta: int, fields: RecordFields) -> None:
    _, key, value, headers = fields
    record = bytearray(1)  # attributes, of which none is defined
    _append_varint(record, timestamp_delta)
    _append_varint(record, offset_delta)
    _append_bytes(record, key)
    _append_bytes(record, value)
    _append_varint(record, len(headers))
    for name, content in headers:
        _append_bytes(record, name.encode())
        _append_bytes(record, content)
    _append_varint(body, len(record))
    body += record


def _append_bytes(output: bytearray, data: bytes | None) -> None:
    if data is None:
        output.append(1)  # -1
    else:
        _append_varint(output, len(data))
        output += data


def _append_varint(output: bytearray, value: int) -> None:
    encoded = (value << 1) ^ (value >> 63)
    while encoded > 0x7F:
        output.append(encoded & 0x7F | 0x80)
        encoded >>= 7
    output.append(encoded)


def _decode_record(body: bytes, at: int, header: BatchHeader) -> tuple[Record, int]:
    size, at = _decode_varint(body, at)
    end = at + size
    if size < 0 or end > len(body):
        raise CorruptBatch(f"a record of {size} bytes")
    at += 1
    timestamp_delta, at = _decode_varint(body, at)
    offset_delta, at = _decode_varint(body, at)
    key, at = _decode_bytes(body, at, end)
    value, at = _decode_bytes(body, at, end)
    count, at = _decode_varint(body, at)
    # A header takes at least two bytes.
    if not 0 <= count <= (end - at) // 2:
        raise CorruptBatch(f"{count} headers in {end - at} bytes")
    headers: list[Header] = []
    for _ in range(count):
        name, at = _decode_bytes(body, at, end)
        content, at = _decode_bytes(body, at, end)
        if name is None:
            raise CorruptBatch("a header without a name")
        headers.append((name.decode(), content))
    if at != end:
        raise CorruptBatch("a record's size does not match its content")
    timestamp = header.max_timestamp if header.is_log_append_time else header.base_timestamp + timestamp_delta
    return Record(header.base_offset + offset_delta, timestamp, key, value, headers), end


def _decode_bytes(body: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    size, at = _decode_varint(body, at)
    if size < 0:
        if size != -1:
            raise CorruptBatch(f"a field of {size} bytes")
        return None, at
    if size > end - at:
        raise CorruptBatch(f"a field of {size} bytes where {end - at} are left")
    return body[at : at + size], at + size


def _decode_varint(body: bytes, at: int) -> tuple[int, int]:
    byte = body[at]
    at += 1
    value = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        if shift > 63:
            raise CorruptBatch("a varint of more than ten bytes")
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1), at
