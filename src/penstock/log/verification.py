"""Checking, once, the bytes that another process left: before they are sent to anybody.

A log that was closed cleanly is opened without being read, so what a disk did to it meanwhile is not known.
A read of such bytes therefore has every batch of them checked first, as recovery does it: header, CRC, and
offsets that follow each other. What was found good is remembered with the segment, so a consumer that reads
on costs one check of each byte; what this process itself has written, and that is all of it at the tail of a
busy partition, costs one comparison of two positions.

What a newcomer gets wrong: a CRC covers neither offset nor leader epoch. A range is checked from a batch whose
offset is known by other means: the segment's first, one that the index names, or one that follows a checked
range. And of two batches whose epochs contradict each other, the one before is not believed.
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

# Of one segment. Only readers who jump about leave many; the smallest of them is then checked again one day.
_RANGES_MAX = 64


def good_batches(
    file: File, size: int, base_offset: int, epoch: int, position: int = 0
) -> Iterator[tuple[int, BatchHeader]]:
    """The batches of a segment up to the first that is not as it was written.

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

    ``following`` is the segment behind this one. The position is before or at the range's beginning when its
    first batch is damaged.

    Raises:
        WrongIndex: the index does not know the batches around the range.
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
    """The offset of the first batch of a segment that is not as it was written.

    The first time this reads the whole segment.
    """
    if segment.damaged_at is None:
        next_offset = segment.base_offset
        for _, header in good_batches(segment.file, segment.file.size, next_offset, NO_EPOCH):
            next_offset = header.next_offset
        segment.damaged_at = next_offset
    return segment.damaged_at


def _known_place(segment: Segment, position: int) -> tuple[int, int]:
    """A batch at or before a position whose offset is not only its own word: (position, offset)."""
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
    """Whether the batch behind the last good one is of an earlier epoch."""
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
    # What touches the trusted part belongs to it.
    while merged and merged[-1][1] >= segment.trusted_from:
        segment.trusted_from = min(segment.trusted_from, merged.pop()[0])
    if len(merged) > _RANGES_MAX:
        merged.remove(min(merged, key=lambda known: known[1] - known[0]))
    segment.checked = tuple(merged)


def _position(known: tuple[int, int, int]) -> int:
    return known[0]
