"""The segments of one log, oldest first, and which of them are loaded.

The active segment is always loaded. The others are loaded on demand, and only a few stay loaded. Lookups in a
segment go through ``look``, which loads it, and rebuilds its indexes when they turn out to be wrong.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from penstock.environment import Clock, Files
from penstock.log.config import LogConfig
from penstock.log.names import DELETED
from penstock.log.segment import Segment, WrongIndex
from penstock.log.verification import first_damage
from penstock.protocol.records import NO_TIMESTAMP, BatchHeader, CorruptBatch

Result = TypeVar("Result")

# Besides the active segment.
_LOADED_MAX = 4


class CorruptLog(OSError):
    """The log is damaged from ``offset`` on. Everything before it is intact.

    To repair a replica, call ``Log.truncate_to(offset)`` and fetch the missing records from the leader.
    """

    def __init__(self, message: str, path: str, offset: int) -> None:
        super().__init__(errno.EIO, message, path)
        self.offset = offset


class Segments:
    __slots__ = ("_clock", "_directory", "_files", "_loaded", "config", "items")

    def __init__(self, files: Files, clock: Clock, directory: str, config: LogConfig) -> None:
        self._files = files
        self._clock = clock
        self._directory = directory
        self.config = config
        # The last one is the active segment.
        self.items: list[Segment] = []
        # The loaded segments other than the active one, oldest load first.
        self._loaded: list[Segment] = []

    # The list

    @property
    def size_bytes(self) -> int:
        return sum(segment.measure() for segment in self.items)

    @property
    def last_base_offset(self) -> int:
        return self.items[-1].base_offset if self.items else -1

    def place_of(self, offset: int) -> int:
        """The index of the last segment that begins at or before ``offset``; -1 when all begin after it."""
        return bisect_right(self.items, offset, key=_base_offset) - 1

    def list_one(self, base_offset: int) -> None:
        """Add a segment found on disk. Must be called in order of base offset."""
        self.items.append(Segment(self._files, self._directory, base_offset))

    def add(self, base_offset: int) -> None:
        """Create a new active segment."""
        self.items.append(Segment.create(self._files, self._directory, base_offset, self._clock.wall_ms()))

    def drop_oldest(self, count: int) -> list[str]:
        """Drop the oldest segments. Returns the paths of their renamed files."""
        paths: list[str] = []
        for _ in range(count):
            paths += self._drop(0)
        return paths

    def drop_behind(self, offset: int) -> list[str]:
        """Drop the segments that begin after ``offset``, newest first. Returns the paths of their renamed files."""
        paths: list[str] = []
        while self.items and self.items[-1].base_offset > offset:
            paths += self._drop(-1)
        return paths

    def replace(self, segments: list[Segment], replacement: Segment) -> None:
        """Put one segment in the place of neighbours, whose files are set aside already."""
        place = self.items.index(segments[0])
        assert self.items[place : place + len(segments)] == segments
        self.items[place : place + len(segments)] = [replacement]
        for segment in segments:
            segment.unload()
            if segment in self._loaded:
                self._loaded.remove(segment)

    def _drop(self, place: int) -> list[str]:
        segment = self.items[place]
        paths = segment.set_aside(DELETED)
        del self.items[place]
        segment.unload()
        if segment in self._loaded:
            self._loaded.remove(segment)
        return paths

    # Loading

    def load(self, segment: Segment) -> None:
        """Prepare a segment for reading; a damaged one up to the damage."""
        if segment.is_loaded:
            return
        try:
            segment.load(self.config, self._clock.wall_ms())
        except CorruptBatch:
            segment.load_whole(self.config, self._clock.wall_ms())
        self._loaded.append(segment)
        if len(self._loaded) > _LOADED_MAX:
            self._loaded.pop(0).unload()

    def activate(self) -> Segment:
        """Load the last segment for good: it became the active one because later ones were dropped."""
        segment = self.items[-1]
        self.load(segment)
        if segment in self._loaded:
            self._loaded.remove(segment)
        return segment

    def unload_completed(self) -> None:
        """Unload all but the active one."""
        for segment in self.items[:-1]:
            segment.unload()
        self._loaded.clear()

    def look(self, segment: Segment, look: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``look`` with a loaded segment, rebuilding its indexes if needed."""
        self.load(segment)
        try:
            return look(segment, *arguments)
        except WrongIndex:
            self.reindex(segment)
            return look(segment, *arguments)
        except CorruptBatch as error:
            raise damaged(segment, str(error)) from error

    def reindex(self, segment: Segment) -> None:
        """Rebuild the indexes, which do not match the batches.

        Raises:
            CorruptLog: the batches are damaged, not the indexes.
        """
        if segment.damaged_at is not None:
            raise damaged(segment, "its batches and its index disagree")
        try:
            for _ in segment.headers():
                pass
        except CorruptBatch as error:
            raise damaged(segment, str(error)) from error
        segment.rebuild(segment.headers(), self.config, self._clock.wall_ms(), durable=True)

    # Lookups

    def newest_timestamp(self, segment: Segment) -> int:
        if segment.max_timestamp == NO_TIMESTAMP:
            self.load(segment)
        return segment.max_timestamp

    def between(self, start_offset: int, end_offset: int) -> list[Segment]:
        """The segments that hold offsets from ``start_offset`` up to ``end_offset``, exclusive."""
        if start_offset >= end_offset:
            return []
        return self.items[max(0, self.place_of(start_offset)) : self.place_of(end_offset - 1) + 1]

    def headers_in(self, segment: Segment, start_offset: int, end_offset: int) -> Iterator[BatchHeader]:
        """Yield the batches of a segment from one offset up to another, or up to its end.

        Raises:
            CorruptLog: there is damage among them. The batches before it were yielded.
        """
        return (header for _, header in self.batches_in(segment, start_offset, end_offset))

    def batches_in(
        self, segment: Segment, start_offset: int, end_offset: int
    ) -> Iterator[tuple[int, BatchHeader]]:
        """As ``headers_in``, with the position of each batch."""
        following = self.items[self.items.index(segment) + 1 :]
        end_offset = min(end_offset, following[0].base_offset) if following else end_offset
        position = self.look(segment, Segment.locate, start_offset)
        next_offset = start_offset
        try:
            for at, header in segment.headers(position):
                if header.base_offset >= end_offset:
                    return
                yield at, header
                next_offset = header.next_offset
        except CorruptBatch as error:
            raise damaged(segment, str(error)) from error
        if next_offset < end_offset:
            raise damaged(segment, f"{segment.path} ends before offset {end_offset}")

    def headers_before(self, offset: int, size_bytes: int) -> list[BatchHeader]:
        """About the last ``size_bytes`` of batches below an offset, oldest first."""
        found: list[list[BatchHeader]] = []
        place = self.place_of(offset - 1)
        while place >= 0 and size_bytes > 0:
            segment = self.items[place]
            self.load(segment)
            end = segment.size if found else self.look(segment, Segment.locate, offset)
            headers = self.look(segment, Segment.headers_up_to, end, size_bytes)
            found.append(headers)
            size_bytes -= sum(header.size for header in headers)
            place -= 1
        return [header for headers in reversed(found) for header in headers]

    def close(self) -> None:
        for segment in self.items:
            segment.close()

    def check(self, log_start_offset: int, log_end_offset: int) -> None:
        bases = [segment.base_offset for segment in self.items]
        assert bases == sorted(set(bases)), bases
        assert not bases or bases[0] <= log_start_offset, (bases, log_start_offset)
        for segment, next_base in zip(self.items, [*bases[1:], log_end_offset]):
            self.load(segment)
            end_offset = segment.check()
            assert end_offset == next_base, (segment.path, end_offset, next_base)
        assert not self.items or self.items[-1].is_loaded
        assert all(segment.is_loaded and segment is not self.items[-1] for segment in self._loaded)
        assert len(self._loaded) <= _LOADED_MAX


def damaged(segment: Segment, message: str) -> CorruptLog:
    return CorruptLog(message, segment.path, first_damage(segment))


def _base_offset(segment: Segment) -> int:
    return segment.base_offset
