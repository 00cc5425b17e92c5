"""The aborted transactions of one segment, in Kafka's ``.txnindex`` format.

A segment has an entry for each abort marker in it, in the order of the markers. A read-committed reader is sent
the entries that overlap the batches it reads, and skips the batches of those producers up to their markers.

The file exists only if the segment has aborted transactions. Its entries have no checksum. A file that cannot be
right (a wrong size, offsets outside the segment or out of order) is rebuilt from the batches, like the other
indexes; so is every file that recovery finds in the segments it scans.

Careful: both the last offsets (those of the markers) and the last stable offsets ascend, the first offsets do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

from penstock.environment import File, Files

_VERSION = 0
# Version, producer id, first offset, last offset, last stable offset.
_ENTRY = Struct(">hqqqq")
# The content of a file that must be rebuilt. Kafka rebuilds it too.
_INVALID = b"?"


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    # Of the marker.
    last_offset: int
    # After the marker: all transactions that begin before it have ended.
    last_stable_offset: int


class AbortedIndex:
    __slots__ = ("_data", "_file", "_files", "_is_checked", "_written", "is_durable", "is_suspect", "path")

    def __init__(self, files: Files, path: str, *, is_new: bool) -> None:
        self._files = files
        self.path = path
        self._file: File | None = None
        # All entries; None until read. At most ``segment.index.bytes``: the segment is rolled then.
        self._data: bytearray | None = bytearray() if is_new else None
        # How many bytes of them are in the file.
        self._written = 0
        # The entries are those of the segment's batches, as far as they show. False until they were read.
        self._is_checked = is_new
        # They must be rebuilt: the other indexes of the segment were wrong or missing.
        self.is_suspect = False
        self.is_durable = True

    def __iter__(self) -> Iterator[AbortedTransaction]:
        for _, *fields in _ENTRY.iter_unpack(self._entries()):
            yield AbortedTransaction(*fields)

    def is_sane(self, base_offset: int, end_offset: int) -> bool:
        """Whether the entries may be those of a segment with these offsets. If not, ``replace`` them."""
        if self.is_suspect or not self._is_checked:
            data = self._entries()
            if self.is_suspect or len(data) % _ENTRY.size:
                return False
            marker, stable = base_offset - 1, 0
            for version, producer_id, first, last, last_stable in _ENTRY.iter_unpack(data):
                if not (
                    version == _VERSION
                    and producer_id >= 0
                    and marker < last < end_offset
                    and 0 <= first < last
                    and max(stable, 0) <= last_stable <= last + 1
                ):
                    return False
                marker, stable = last, last_stable
            self._is_checked = True
        return True

    def is_full(self, index_bytes: int) -> bool:
        return len(self._entries()) > index_bytes - _ENTRY.size

    def overlapping(self, offset: int, end_offset: int) -> tuple[list[AbortedTransaction], bool]:
        """The transactions that overlap the offsets from one up to another; and whether that is all of them."""
        data = self._entries()
        unpack_from, size = _ENTRY.unpack_from, _ENTRY.size
        places = range(0, len(data) // size * size, size)
        found = []
        for at in places[bisect_left(places, offset, key=lambda place: unpack_from(data, place)[3]) :]:
            entry = AbortedTransaction(*unpack_from(data, at)[1:])
            if entry.first_offset < end_offset:
                found.append(entry)
            if entry.last_stable_offset >= end_offset:
                return found, True
        return found, False

    # Changing

    def add(self, entry: AbortedTransaction) -> None:
        data = self._entries()
        if len(data) % _ENTRY.size:
            return  # the file is damaged, and will be rebuilt from the batches, of which this one is the last
        data += _ENTRY.pack(_VERSION, *entry)
        with suppress(OSError):
            # The marker itself is in the log. The entry stays in memory until there is room.
            self.write()

    def write(self) -> None:
        """Write the entries that are not in the file yet."""
        data = self._data
        if data is not None and self._written < len(data):
            self.is_durable = False
            file = self._opened()
            if file.size != self._written:
                # Left over from a segment of the same name that was lost in a crash.
                file.truncate(self._written)
            with memoryview(data) as view, view[self._written :] as added:
                file.append((added,))
            self._written = len(data)

    def suspect(self, *, durable: bool) -> None:
        """Have the entries rebuilt before they are used, also by a later process."""
        self.is_suspect = True
        self._is_checked = False
        self.close()
        self._data = None
        self.is_durable = False
        try:
            self._files.replace(self.path, _INVALID, durable=durable)
            self.is_durable = durable
        except OSError:
            self._empty()

    def replace(self, entries: Iterable[AbortedTransaction], *, durable: bool) -> None:
        """Replace the file by one with the entries read from the batches."""
        self._data = bytearray().join(_ENTRY.pack(_VERSION, *entry) for entry in entries)
        self._is_checked = True
        self.is_suspect = False
        self._written = 0
        self.is_durable = False
        self.close()
        try:
            self._files.replace(self.path, bytes(self._data), durable=durable)
            self._written = len(self._data)
            self.is_durable = durable
        except OSError:
            # Reads must work on a full disk too: the index is then served from memory.
            self._empty()

    def _empty(self) -> None:
        """Take the wrong entries out of the file. That needs no room, and a later process rebuilds an empty one."""
        with suppress(OSError):
            if self._files.exists(self.path):
                self._opened().truncate(0)

    def cut(self, end_offset: int) -> None:
        """Drop the transactions whose markers are at this offset or after it."""
        data = self._entries()
        keep = len(data) // _ENTRY.size * _ENTRY.size
        if keep != len(data):
            return  # damaged: it will be rebuilt
        while keep and _ENTRY.unpack_from(data, keep - _ENTRY.size)[3] >= end_offset:
            keep -= _ENTRY.size
        del data[keep:]
        if keep < self._written:
            self.is_durable = False
            self._opened().truncate(keep)
            self._written = keep

    def moved(self, path: str) -> None:
        self.path = path
        if self._file is not None:
            self._file.moved(path)

    def unload(self) -> None:
        """Drop the entries from memory, if they are in the file."""
        if self._data is not None and self._written == len(self._data):
            self._data = None
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _entries(self) -> bytearray:
        if self._data is None:
            # An empty file may have been cut by a crash, unless we have cut it: then the batches know better.
            if_empty = b"" if self._is_checked else _INVALID
            self._data = (
                bytearray(self._files.read(self.path) or if_empty)
                if self._files.exists(self.path)
                else bytearray()
            )
            self._written = len(self._data)
        return self._data

    def _opened(self) -> File:
        if self._file is None:
            self._file = self._files.open(self.path)
        return self._file
