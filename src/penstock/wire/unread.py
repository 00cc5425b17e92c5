"""The next record that a reader at an offset would get, found in the bytes of a fetch.

It is not always the record with that offset: compaction leaves gaps, markers end transactions, and a read-committed
reader leaves out aborted transactions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.protocol.compression import TooLarge
from penstock.protocol.records import (
    NO_TIMESTAMP,
    BatchHeader,
    batches,
    decode_marker,
    decode_timestamps,
)

# Of one batch when it is decompressed. The timestamp of a larger one is that of its first record.
DECOMPRESSED_BYTES_MAX = 64 * 1024 * 1024


class Unread(NamedTuple):
    offset: int
    # Milliseconds since 1970; None if the producer set none.
    timestamp: int | None


class Nothing(NamedTuple):
    """The bytes hold no record for the reader."""

    # After the last whole batch; the offset that was asked for if there is none.
    next_offset: int


def next_unread(
    records: memoryview, offset: int, aborted: Iterable[tuple[int, int]] = ()
) -> Unread | Nothing:
    """The first record at or after ``offset``. ``aborted`` is what came with a read-committed fetch.

    Raises:
        CorruptBatch: the bytes are not record batches.
    """
    waiting = sorted(aborted, key=lambda each: each[1])
    leaving_out: set[int] = set()
    next_offset = offset
    for position, header in batches(records):
        while waiting and waiting[0][1] <= header.last_offset:
            leaving_out.add(waiting.pop(0)[0])
        next_offset = max(next_offset, header.next_offset)
        if header.is_control:
            marker = decode_marker(records, position)
            if marker is not None and not marker.is_commit:
                leaving_out.discard(header.producer_id)
            continue
        is_aborted = header.is_transactional and header.producer_id in leaving_out
        if header.next_offset <= offset or header.count == 0 or is_aborted:
            continue
        found = _in_batch(records, position, header, offset)
        if found is not None:
            return found
    return Nothing(next_offset)


def _in_batch(records: memoryview, position: int, header: BatchHeader, offset: int) -> Unread | None:
    is_whole = header.count == header.last_offset_delta + 1
    has_one_time = header.is_log_append_time or header.base_timestamp == header.max_timestamp
    if is_whole and has_one_time and header.delete_horizon_ms is None:
        return Unread(max(offset, header.base_offset), _known(header.max_timestamp))
    try:
        for each, timestamp in decode_timestamps(records, position, bytes_max=DECOMPRESSED_BYTES_MAX):
            if each >= offset:
                return Unread(each, _known(header.max_timestamp if header.is_log_append_time else timestamp))
    except TooLarge:
        return Unread(max(offset, header.base_offset), _known(header.base_timestamp))
    # Compaction has removed the last records of the batch.
    return None


def _known(timestamp: int) -> int | None:
    return None if timestamp <= NO_TIMESTAMP else timestamp
