"""Checks bytes written by an earlier process, once, before they are sent to a client or follower.

A log that was closed cleanly is opened without being read, so the disk may have damaged it meanwhile. Before such
bytes are sent, every batch is checked as in recovery: header, CRC, and consecutive offsets. The segment remembers
which ranges are good, so each byte is checked only once. Bytes written by this process, which at the tail of a
busy partition is all of them, cost one comparison of two positions.

A CRC covers neither offset nor leader epoch. So a check starts at a batch whose offset is known by other means:
the segment's first, one that the index points to, or one that follows a checked range. And if the epochs of two
neighbouring batches contradict each other, the first of them counts as damaged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from crc32c import crc32c

from penstock.environment import File
from penstock.log.epochs import NO_EPOCH
from penstock.log.segment import RELATIVE_MAX, Segment, WrongIndex
from penstock.protocol.records import CRC_START, HEADER_SIZE, BatchHeader, CorruptBatch, decode_header

_CHUNK_BYTES = 1 << 20

# Per segment. Only random reads leave many ranges. Beyond the limit the smallest is forgotten and checked again.
_RANGES_MAX = 64


def good_batches(
    file: File, size: int, base_offset: int, epoch: int, position: int = 0
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the batches of a segment up to the first damaged one.

    They begin at ``position`` with ``base_offset``, and none reaches beyond ``size``.
    """
    next_offset = base_offset
    chunk = b""
    chunk_start = 0
    while size - position >= HEADER_SIZE:
        at = position - chunk_start
        if at + HEADER_SIZE > len(chunk):
            chunk, chunk_start, at = file.read_at(position, min(_CHUNK_BYTES, size - position)), position, 0
        try:
            header = decode_header(chunk, at)
        except CorruptBatch:
            return
        if (
            header.size > size - position
            or header.base_offset != next_offset
            or header.leader_epoch < epoch
            or header.last_offset_delta < 0
            or header.last_offset - base_offset > RELATIVE_MAX
        ):
            return
        if at + header.size > len(chunk):
            piece = min(max(_CHUNK_BYTES, header.size), size - position)
            chunk, chunk_start, at = file.read_at(position, piece), position, 0
        if crc32c(memoryview(chunk)[at + CRC_START : at + header.size]) != header.crc:
            return
        yield position, header
        next_offset = header.next_offset
        epoch = header.leader_epoch
        position += header.size


def checked_end(segment: Segment, position: int, end: int, following: Segment | None) -> tuple[int, int]:
    """How far a range is good: (position, the offset that follows there). At most ``end``.

    ``following`` is the segment after this one. The position is before or at the range's beginning when its
    first batch is damaged.

    Raises:
        WrongIndex: the index entry before the range does not match its batch.
    """
    ranges = segment.checked
    place = bisect_right(ranges, position, key=_position) - 1
    if place >= 0 and ranges[place][1] >= position:
        start, good_end, next_offset = ranges[place]
        if good_end >= end:
            return end, -1
    else:
        good_end, next_offset = _known_place(segment, position)
        start = good_end
    last: BatchHeader | None = None
    for at, header in good_batches(segment.file, end, next_offset, NO_EPOCH, good_end):
        good_end, next_offset, last = at + header.size, header.next_offset, header
    if last is not None and _is_contradicted(segment, good_end, last, following):
        good_end, next_offset = good_end - last.size, last.base_offset
    if good_end > start:
        _remember(segment, start, good_end, next_offset)
    return good_end, next_offset


def first_damage(segment: Segment) -> int:
    """The offset of the first damaged batch of a segment.

    The first call reads the whole segment.
    """
    if segment.damaged_at is None:
        next_offset = segment.base_offset
        for _, header in good_batches(segment.file, segment.file.size, next_offset, NO_EPOCH):
            next_offset = header.next_offset
        segment.damaged_at = next_offset
    return segment.damaged_at


def _known_place(segment: Segment, position: int) -> tuple[int, int]:
    """A batch at or before ``position`` whose offset the index or file name confirms: (position, offset)."""
    entry = segment.offsets.floor(1, position)
    if entry is None:
        return 0, segment.base_offset
    relative, position = entry
    try:
        header = segment.header_at(position)
    except CorruptBatch as error:
        raise WrongIndex(segment) from error
    if header.last_offset != segment.base_offset + relative:
        raise WrongIndex(segment)
    return position, header.base_offset


def _is_contradicted(segment: Segment, end: int, last: BatchHeader, following: Segment | None) -> bool:
    """Whether the batch after the last good one has an earlier epoch."""
    if end == segment.size and following is not None:
        segment, end = following, 0
    try:
        header = segment.header_at(end)
    except CorruptBatch:
        return False
    return header.base_offset == last.next_offset and header.leader_epoch < last.leader_epoch


def _remember(segment: Segment, start: int, end: int, next_offset: int) -> None:
    merged: list[tuple[int, int, int]] = []
    for known in sorted([*segment.checked, (start, end, next_offset)]):
        if merged and known[0] <= merged[-1][1]:
            if known[1] > merged[-1][1]:
                merged[-1] = (merged[-1][0], known[1], known[2])
        else:
            merged.append(known)
    # A range that touches the trusted part becomes part of it.
    while merged and merged[-1][1] >= segment.trusted_from:
        segment.trusted_from = min(segment.trusted_from, merged.pop()[0])
    if len(merged) > _RANGES_MAX:
        merged.remove(min(merged, key=lambda known: known[1] - known[0]))
    segment.checked = tuple(merged)


def _position(known: tuple[int, int, int]) -> int:
    return known[0]
