"""Exact answers to "which record is the first with this timestamp?" (ListOffsets).

The time index and the batch headers narrow it down to one batch; only that batch is unfolded, and only if it
is not too large. This is the one place where the broker looks inside a user's batch.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.log.segment import Segment
from penstock.log.segments import Segments
from penstock.protocol.compression import TooLarge
from penstock.protocol.records import NO_TIMESTAMP, BatchHeader, CorruptBatch, Record, decode_records

# Of one unfolded batch. Beyond it the batch's first offset must do.
_UNFOLDED_BYTES_MAX = 64 << 20


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
    """The first of the records from ``start_offset`` on with the largest timestamp (KIP-734)."""
    result: TimestampedOffset | None = None
    for segment in segments.items:
        if segments.newest_timestamp(segment) > (result.timestamp if result else NO_TIMESTAMP):
            found = segments.look(segment, _newest, start_offset)
            if found is not None and (result is None or found.timestamp > result.timestamp):
                result = found
    return result


def _first_from(segment: Segment, timestamp: int, start_offset: int) -> TimestampedOffset | None:
    for position, header in segment.batches_from(timestamp, start_offset):
        for record in _records(segment, position, header, start_offset):
            if record.timestamp >= timestamp:
                return TimestampedOffset(record.offset, record.timestamp, header.leader_epoch)
    return None


def _newest(segment: Segment, start_offset: int) -> TimestampedOffset | None:
    if start_offset <= segment.base_offset:
        found = segment.batches_from(segment.max_timestamp, start_offset)
    else:
        # What made the segment's largest timestamp may be gone: only the batches that are left can tell.
        found = segment.headers(segment.locate(start_offset))
    result: TimestampedOffset | None = None
    for position, header in found:
        if header.max_timestamp <= (result.timestamp if result else NO_TIMESTAMP):
            continue
        for record in _records(segment, position, header, start_offset):
            if record.timestamp > (result.timestamp if result else NO_TIMESTAMP):
                result = TimestampedOffset(record.offset, record.timestamp, header.leader_epoch)
    return result


def _records(segment: Segment, position: int, header: BatchHeader, start_offset: int) -> list[Record]:
    if not header.is_log_append_time:
        try:
            data = segment.file.read_at(position, header.size)
            records = decode_records(data, bytes_max=_UNFOLDED_BYTES_MAX)
            return [record for record in records if record.offset >= start_offset]
        except (TooLarge, CorruptBatch):
            # Only its reader can say what this batch holds. Its beginning is never too late an answer.
            pass
    return [Record(max(header.base_offset, start_offset), header.max_timestamp, None, None)]
