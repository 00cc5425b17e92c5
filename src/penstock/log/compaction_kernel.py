"""The inner loops of compaction: which offset each key was last written at, and which records of a batch stay.

Plain Python that Cython compiles, with the C types in ``compaction_kernel.pxd``; see ``columnar/kernel.py``, whose
rules hold here too: nothing of Cython is imported, and every index follows from a comparison in this file, because
compiled code does not check any.

A key is known by a hash of 128 bits: a table of fixed size holds it with the offset in 24 bytes, so the memory does
not depend on the keys' sizes. Kafka does the same with MD5. Here it is Python's own hash, of the key and of the key
with a byte before it: 64 bits each, in a tenth of the time that a digest from ``hashlib`` takes. It has a secret of
the process, so nobody can choose keys that collide.
"""

from __future__ import annotations

from penstock.protocol.records import CorruptBatch

IS_COMPILED = not __file__.endswith((".py", ".pyc"))

# Three words of 64 bits: the hash, and the offset plus one; a zero there marks a free slot.
SLOT_WORDS = 3
SLOT_BYTES = 8 * SLOT_WORDS

NO_TIMESTAMP = -1

# Python's hashes are signed; the table's words are not.
_WORD_MASK = 2**64 - 1
_SECOND = b"\x01"


class KeyTable:
    """Hashes of keys and the last offset of each: open addressing in one block of memory."""

    def __init__(self, size_bytes: int, load_factor: float) -> None:
        self.slots = max(2, size_bytes // SLOT_BYTES)
        # Above this the search for a free slot becomes long.
        self.capacity = max(1, min(self.slots - 1, int(self.slots * load_factor)))
        self.count = 0
        self.words = memoryview(bytearray(self.slots * SLOT_BYTES)).cast("Q")

    def has_room(self, keys: int) -> bool:
        return self.count + keys <= self.capacity


def note_key(table: KeyTable, key: bytes, offset: int) -> None:
    """Remember the offset of a key. Offsets must come in ascending order, and the table must have room."""
    words = table.words
    high = hash(key) & _WORD_MASK
    low = hash(_SECOND + key) & _WORD_MASK
    place = high % table.slots * SLOT_WORDS
    last = table.slots * SLOT_WORDS
    while words[place + 2]:
        if words[place] == high and words[place + 1] == low:
            words[place + 2] = offset + 1
            return
        place += SLOT_WORDS
        if place == last:
            place = 0
    words[place] = high
    words[place + 1] = low
    words[place + 2] = offset + 1
    table.count += 1


def last_offset(table: KeyTable, key: bytes) -> int:
    """The last offset of a key; -1 when it is not in the table."""
    words = table.words
    high = hash(key) & _WORD_MASK
    low = hash(_SECOND + key) & _WORD_MASK
    place = high % table.slots * SLOT_WORDS
    last = table.slots * SLOT_WORDS
    while words[place + 2]:
        if words[place] == high and words[place + 1] == low:
            return int(words[place + 2]) - 1
        place += SLOT_WORDS
        if place == last:
            place = 0
    return -1


def note_keys(table: KeyTable, body: bytes, count: int, base_offset: int, last_offset_delta: int) -> None:
    """Remember the keys of a batch's records, which are decompressed. The table must have room for them.

    Raises:
        CorruptBatch: the records are not what their lengths say.
    """
    size = len(body)
    at = 0
    previous = -1
    for _ in range(count):
        length, at = varint(body, at, size)
        if at < 0 or length < 1 or length > size - at:
            raise CorruptBatch("a record reaches beyond its batch")
        end = at + length
        _timestamp_delta, at = varint(body, at + 1, end)
        if at >= 0:
            delta, at = varint(body, at, end)
        if at >= 0:
            key_size, at = varint(body, at, end)
        if at < 0 or key_size > end - at:
            raise CorruptBatch("a key reaches beyond its record")
        if delta <= previous or delta > last_offset_delta:
            raise CorruptBatch("a record's offset is not in its batch, or not after the one before")
        previous = delta
        if key_size >= 0:
            note_key(table, body[at : at + key_size], base_offset + delta)
        at = end
    if at != size:
        raise CorruptBatch("bytes behind the last record")


def select(
    table: KeyTable,
    body: bytes,
    count: int,
    base_offset: int,
    last_offset_delta: int,
    base_timestamp: int,
    new_base_timestamp: int,
    drop_tombstones_below: int,
) -> tuple[bytearray, int, int, int]:
    """The records of a batch that stay: (their bytes, their count, tombstones among them, largest timestamp).

    A record stays if it has a key that was not written again later. Tombstones below ``drop_tombstones_below`` do
    not. The records keep their offset deltas, and get other timestamp deltas if the base timestamp changes.

    Raises:
        CorruptBatch: the records are not what their lengths say.
    """
    size = len(body)
    kept = bytearray()
    kept_count = 0
    tombstones = 0
    max_timestamp = NO_TIMESTAMP
    # Neighbours that stay are copied together.
    run_start = 0
    run_end = 0
    at = 0
    previous = -1
    for _ in range(count):
        start = at
        length, at = varint(body, at, size)
        if at < 0 or length < 1 or length > size - at:
            raise CorruptBatch("a record reaches beyond its batch")
        end = at + length
        timestamp_delta, rest = varint(body, at + 1, end)
        at = rest
        if at >= 0:
            delta, at = varint(body, at, end)
        if at >= 0:
            key_size, at = varint(body, at, end)
        if at < 0 or key_size > end - at:
            raise CorruptBatch("a key reaches beyond its record")
        if delta <= previous or delta > last_offset_delta:
            raise CorruptBatch("a record's offset is not in its batch, or not after the one before")
        previous = delta
        stays = False
        if key_size >= 0:
            stays = last_offset(table, body[at : at + key_size]) <= base_offset + delta
            value_size, at = varint(body, at + key_size, end)
            if at < 0:
                raise CorruptBatch("a value reaches beyond its record")
            if stays and value_size < 0:
                if base_offset + delta < drop_tombstones_below:
                    stays = False
                else:
                    tombstones += 1
        if stays:
            kept_count += 1
            timestamp = base_timestamp + timestamp_delta
            max_timestamp = max(max_timestamp, timestamp)
            if base_timestamp != new_base_timestamp:
                record = bytearray(1)
                append_varint(record, timestamp - new_base_timestamp)
                record += body[rest:end]
                append_varint(kept, len(record))
                kept += record
            elif start == run_end:
                run_end = end
            else:
                kept += body[run_start:run_end]
                run_start = start
                run_end = end
        at = end
    if at != size:
        raise CorruptBatch("bytes behind the last record")
    if run_end > run_start:
        kept += body[run_start:run_end]
    return kept, kept_count, tombstones, max_timestamp


def varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The signed number at a position, and where it ends: -1 if not before ``end``."""
    value = 0
    shift = 0
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


def append_varint(output: bytearray, value: int) -> None:
    encoded = (value << 1) ^ (value >> 63)
    while encoded > 0x7F:
        output.append(encoded & 0x7F | 0x80)
        encoded >>= 7
    output.append(encoded)
