"""Finds the first record with a timestamp, exactly (ListOffsets).

The time index and the batch headers narrow the search to one batch; only that batch is decompressed, and only if
it is not too large.

A header comes from the client and may claim a later timestamp than any record in the batch has. It is then
believed, and the batch's first offset returned: searching the next batches instead would let such a client keep
the broker busy for minutes. An offset that is too early does no harm.

Compaction may leave the header of a batch, with its timestamps, and none of its records. It is then passed over.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.log.segment import Segment
from penstock.log.segments import Segments
from penstock.protocol.compression import TooLarge
from penstock.protocol.records import NO_TIMESTAMP, BatchHeader, CorruptBatch, decode_timestamps

# The largest batch to decompress: going through this much in tiny records takes some tenths of a second. For a
# larger batch, its first offset is returned.
_UNFOLDED_BYTES_MAX = 4 << 20


class TimestampedOffset(NamedTuple):
    offset: int
    timestamp: int
    leader_epoch: int


def first_from(segments: Segments, timestamp: int, start_offset: int) -> TimestampedOffset | None:
    """The first record from ``start_offset`` on with this timestamp or a later one."""
    for segment in segments.items:
        if segments.newest_timestamp(segment) >= timestamp:
            found = segments.look(segment, _first_from, timestamp, start_offset)
            if found is not None:
                return found
    return None


def newest(segments: Segments, start_offset: int) -> TimestampedOffset | None:
    """The first record with the largest timestamp, from ``start_offset`` on (KIP-734)."""
    candidates = segments.items[max(0, segments.place_of(start_offset)) :]
    first: TimestampedOffset | None = None
    if candidates and candidates[0].base_offset < start_offset:
        # The record with its largest timestamp may lie before the start: check the remaining batches.
        first = segments.look(candidates.pop(0), _newest_left, start_offset)
    # Nearly always the first one has it; unless that is the timestamp of a batch that is empty by now.
    for segment in sorted(candidates, key=segments.newest_timestamp, reverse=True):
        timestamp = segments.newest_timestamp(segment)
        if timestamp <= (first.timestamp if first else NO_TIMESTAMP):
            break
        found = segments.look(segment, _first_from, timestamp, segment.base_offset)
        if found is not None:
            return found
        left = segments.look(segment, _newest_left, segment.base_offset)
        if left is not None and (first is None or left.timestamp > first.timestamp):
            first = left
    return first


def _first_from(segment: Segment, timestamp: int, start_offset: int) -> TimestampedOffset | None:
    for position, header in segment.batches_from(timestamp, start_offset):
        found = _first_in(segment, position, header, timestamp, start_offset)
        if found is not None:
            return found
    return None


def _newest_left(segment: Segment, start_offset: int) -> TimestampedOffset | None:
    found = segment.headers(segment.locate(start_offset))
    position, first = next(found, (0, None))
    if first is None:
        return None
    # The start offset may lie inside the first batch, so check its records. For the other batches headers suffice.
    records = _records(segment, position, first, start_offset)
    offset, timestamp = max(records, key=lambda record: record[1], default=(-1, NO_TIMESTAMP))
    best: tuple[int, BatchHeader] | None = None
    for position, header in found:
        if header.count and header.max_timestamp > (best[1].max_timestamp if best else timestamp):
            best = position, header
    if best is not None:
        return _first_in(segment, *best, best[1].max_timestamp, start_offset)
    return TimestampedOffset(offset, timestamp, first.leader_epoch) if timestamp != NO_TIMESTAMP else None


def _first_in(
    segment: Segment, position: int, header: BatchHeader, timestamp: int, start_offset: int
) -> TimestampedOffset | None:
    """The first such record in a batch whose header claims one.

    None when it lies before ``start_offset``, or the batch is empty.
    """
    if header.count == 0:
        return None
    for offset, found in _records(segment, position, header, start_offset):
        if found >= timestamp:
            return TimestampedOffset(offset, found, header.leader_epoch)
    if header.base_offset < start_offset:
        return None
    return TimestampedOffset(header.base_offset, header.max_timestamp, header.leader_epoch)


def _records(
    segment: Segment, position: int, header: BatchHeader, start_offset: int
) -> list[tuple[int, int]]:
    """(offset, timestamp) of the records from ``start_offset`` on; of the batch when it cannot be decoded."""
    if header.count == 0:
        return []
    has_gaps = header.count <= header.last_offset_delta
    if has_gaps or not header.is_log_append_time:
        data = segment.file.read_at(position, header.size)
        try:
            records = list(decode_timestamps(data, bytes_max=_UNFOLDED_BYTES_MAX))
        except (TooLarge, CorruptBatch):
            records = []  # fall back to the header
        records = [record for record in records if start_offset <= record[0] <= header.last_offset]
        if header.is_log_append_time:
            records = [(offset, header.max_timestamp) for offset, _ in records]
        if records:
            return records
    return [(max(header.base_offset, start_offset), header.max_timestamp)]
