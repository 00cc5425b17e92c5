"""Finds the bytes that a fetch returns: whole batches of one segment, up to a limit, as a range of its file.

Nothing is copied here. The connection has the kernel send the range.

Most reads need no search: a sequential consumer, and every follower, starts where an earlier read ended, and the
latest of these places are remembered.
"""

from __future__ import annotations

from penstock.environment import FileRange
from penstock.log.segment import Segment
from penstock.log.segments import CorruptLog, Segments, damaged
from penstock.log.verification import checked_end
from penstock.protocol.records import HEADER_SIZE

# Places where reads ended.
_PLACES_REMEMBERED = 32
_SMALL_READ_BYTES = 4096
# At most this many unchecked bytes per read: checking them blocks the loop.
_CHECKED_BYTES_MAX = 1 << 20


class Reader:
    __slots__ = ("_found", "_found_end", "_places", "_segments")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        # Offset -> position of the batch that holds it, or will hold it.
        self._places: dict[int, int] = {}
        # The latest range, and the offset after it.
        self._found: FileRange | None = None
        self._found_end = 0

    def find(
        self, offset: int, bytes_max: int, ceiling: int, log_end_offset: int, at_least_one: bool
    ) -> FileRange | None:
        """Find the batches from the one that holds ``offset`` on; see ``Log.read``. The offset must be in the log.

        Raises:
            CorruptLog: bytes written by an earlier process are damaged.
            WrongIndex, CorruptBatch: the index or a batch in the segment of ``offset`` is wrong.
        """
        segments = self._segments
        items = segments.items
        places = self._places
        place = len(items) - 1
        if offset < items[place].base_offset:
            place = segments.place_of(offset)
        segment = items[place]
        if not segment.is_loaded:
            segments.load(segment)
        position = places.get(offset, -1)
        if position < 0:
            position = segment.locate(offset)
            if position == segment.size:
                raise damaged(segment, f"offset {offset} is missing")

        if bytes_max > _CHECKED_BYTES_MAX and position < segment.trusted_from:
            at_least_one = at_least_one or segment.header_at(position).size <= bytes_max
            bytes_max = _CHECKED_BYTES_MAX
        is_active = place == len(items) - 1
        end_offset = log_end_offset if is_active else items[place + 1].base_offset
        if ceiling >= end_offset:
            end, next_offset = segment.size, end_offset
        else:
            end, next_offset = places.get(ceiling, -1), ceiling
            if end < 0:
                end = segment.locate(ceiling)
        if end - position > bytes_max:
            # A small limit is often smaller than the first batch. Checking that first is cheap.
            first = segment.header_at(position) if bytes_max < _SMALL_READ_BYTES else None
            if first is None or first.size <= bytes_max:
                end, next_offset = segment.whole_batches(position, bytes_max, end)
            else:
                end = position
            if end == position:
                if not at_least_one:
                    return None
                first = first or segment.header_at(position)
                end, next_offset = position + first.size, first.next_offset
        elif end <= position:
            if next_offset == end_offset:
                raise damaged(segment, f"offset {offset} is missing")
            return None
        if position < segment.trusted_from:
            # An earlier process wrote these bytes. They are checked once, before they are sent.
            unknown_end = min(end, segment.trusted_from)
            following = None if is_active else items[place + 1]
            good_end, good_offset = checked_end(segment, position, unknown_end, following)
            if good_end <= position:
                raise CorruptLog(f"the batch at offset {good_offset} is damaged", segment.path, good_offset)
            if good_end < unknown_end:
                end, next_offset = good_end, good_offset
        if is_active or next_offset < end_offset:
            if len(places) >= _PLACES_REMEMBERED and next_offset not in places:
                del places[next(iter(places))]
            places[next_offset] = end
        self._found_end = next_offset
        self._found = found = FileRange(segment.file, position, end - position)
        return found

    def end_offset_of(self, found: FileRange, log_end_offset: int) -> int:
        """The offset after a range that was found; for one of an earlier read, a later offset."""
        return self._found_end if found is self._found else log_end_offset

    def forget(self) -> None:
        """The log was cut: remembered places may lie in the removed part."""
        self._places.clear()
        self._found = None

    def rolled(self, log_end_offset: int) -> None:
        """The next read at the log end must look in the new segment, not in the one before it."""
        self._places.pop(log_end_offset, None)

    def check(self, log_start_offset: int) -> None:
        segments = self._segments
        for offset, position in self._places.items():
            if offset >= log_start_offset:
                found = segments.look(segments.items[segments.place_of(offset)], Segment.locate, offset)
                assert found == position, (offset, position, found)


def holds_records(found: FileRange) -> bool:
    """Whether a batch in the range has records. Compaction leaves batches without, and markers count."""
    if found.size % HEADER_SIZE:
        # A batch without records is a header alone.
        return True
    ends = range(found.position + HEADER_SIZE, found.position + found.size + 1, HEADER_SIZE)
    # The count is the header's last field.
    return any(int.from_bytes(found.file.read_at(end - 4, 4)) for end in ends)
