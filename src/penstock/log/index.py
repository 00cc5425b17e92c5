"""The two sparse indexes beside a segment: offset to position, and timestamp to offset.

An entry is written about every ``index.interval.bytes`` of log. An offset entry is (last offset of a batch,
position where that batch begins); a time entry is (largest timestamp so far, last offset of the batch that
holds it), written at the same moments, but only when that timestamp grew. Offsets are relative to the
segment's base offset. Both mean "start here and scan forward". The log is correct without them, so both can be
lost and rebuilt.

Only the last few entries are held in memory, until enough have gathered to be written at once. A broker has tens
of thousands of segments, and a search reads only about ten small blocks. A consumer that reads sequentially does
not search at all (``Reader`` remembers where it stopped).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from struct import Struct

from penstock.environment import File, Files

_BLOCK_BYTES = 4096
# Entries are written in groups of this size: one group covers a quarter of a megabyte of log.
_PENDING_ENTRIES = 64


class SparseIndex:
    """A file of fixed-size entries, each column ascending."""

    __slots__ = ("_entry", "_file", "_files", "_pending", "_written", "is_durable", "path")

    def __init__(self, files: Files, path: str, entry: Struct) -> None:
        self.path = path
        self._files = files
        self._entry = entry
        self._file: File | None = None
        self._written = 0  # bytes in the file
        self._pending = bytearray()  # entries not in the file yet
        # Nothing was written since the file was opened. (Whether it was durable at that time is not known.)
        self.is_durable = True

    def open(self) -> bool:
        """Open the file; false when it is missing or its size is not that of an index."""
        if not self._files.exists(self.path):
            return False
        size = self._files.size(self.path)
        if size % self._entry.size:
            return False
        self._file = self._files.open(self.path)
        self._written = size
        self._pending = bytearray()
        return True

    def __len__(self) -> int:
        return (self._written + len(self._pending)) // self._entry.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        data = self._read(0, self._written) if self._written else b""
        yield from self._entry.iter_unpack(data + self._pending)

    def last(self) -> tuple[int, int] | None:
        size = self._entry.size
        if self._pending:
            key, value = self._entry.unpack_from(self._pending, len(self._pending) - size)
        elif self._written:
            key, value = self._entry.unpack(self._read(self._written - size, size))
        else:
            return None
        return key, value

    def add(self, key: int, value: int) -> None:
        self._pending += self._entry.pack(key, value)
        if len(self._pending) >= _PENDING_ENTRIES * self._entry.size:
            try:
                self.write()
            except OSError:
                # The batch itself is in the log. The entries stay in memory until there is room.
                return

    def write(self) -> None:
        """Write the pending entries, creating the file when there is none."""
        if self._file is None:
            self.is_durable = False
            self._file = self._files.open(self.path)
            if self._file.size:
                # Left over from a segment of the same name that was lost in a crash.
                self._file.truncate(0)
        if self._pending:
            self.is_durable = False
            self._file.append((self._pending,))
            self._written += len(self._pending)
            self._pending = bytearray()

    def restore(self, key: int, value: int) -> None:
        """Add an entry to an index that is being rebuilt. ``rewrite`` then writes it as a whole."""
        self._pending += self._entry.pack(key, value)

    def rewrite(self, *, durable: bool) -> None:
        """Replace the file by the entries added with ``restore``."""
        self.is_durable = False
        try:
            self._files.replace(self.path, self._pending, durable=durable)
        except OSError:
            # Reads must work on a full disk too: the index is then served from memory.
            return
        self.is_durable = durable
        self._file = self._files.open(self.path)
        self._written = len(self._pending)
        self._pending = bytearray()

    def floor(self, column: int, target: int) -> tuple[int, int] | None:
        """The last entry whose column 0 or 1 is at most ``target``."""
        pending = self._pending
        if pending and self._entry.unpack_from(pending)[column] <= target:
            return self._floor_within(pending, column, target)
        if not self._written:
            return None
        size = self._entry.size
        block_bytes = _BLOCK_BYTES // size * size
        low, high = 0, -(-self._written // block_bytes)
        while high - low > 1:
            middle = (low + high) // 2
            if self._entry.unpack(self._read(middle * block_bytes, size))[column] <= target:
                low = middle
            else:
                high = middle
        block = self._read(low * block_bytes, min(block_bytes, self._written - low * block_bytes))
        return self._floor_within(block, column, target)

    def cut(self, column: int, target: int) -> None:
        """Drop the entries whose column 0 or 1 is ``target`` or more."""
        size = self._entry.size
        entries = list(self)
        keep = len(entries)
        while keep and entries[keep - 1][column] >= target:
            keep -= 1
        written = min(self._written, keep * size)
        if written < self._written:
            assert self._file is not None
            self.is_durable = False
            self._file.truncate(written)
        del self._pending[keep * size - written :]
        self._written = written

    def moved(self, path: str) -> None:
        self.path = path
        if self._file is not None:
            self._file.moved(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _floor_within(self, block: bytes | bytearray, column: int, target: int) -> tuple[int, int] | None:
        unpack_from, size = self._entry.unpack_from, self._entry.size
        places = range(0, len(block), size)
        count = bisect_right(places, target, key=lambda place: unpack_from(block, place)[column])
        if count == 0:
            return None
        key, value = unpack_from(block, places[count - 1])
        return key, value

    def _read(self, position: int, size: int) -> bytes:
        assert self._file is not None
        return self._file.read_at(position, size)


_OFFSET_ENTRY = Struct(">ii")
_TIME_ENTRY = Struct(">qi")


class OffsetIndex(SparseIndex):
    """(relative last offset of a batch, position of that batch)."""

    __slots__ = ()

    def __init__(self, files: Files, path: str) -> None:
        super().__init__(files, path, _OFFSET_ENTRY)

    def is_sane(self, segment_bytes: int) -> bool:
        # The first batch never has an entry, so zeros (a file extended but not written) are recognised.
        last = self.last()
        return last is None or (last[0] > 0 and 0 < last[1] < segment_bytes)

    def is_full(self, index_bytes: int) -> bool:
        return self._written + len(self._pending) > index_bytes - _OFFSET_ENTRY.size


class TimeIndex(SparseIndex):
    """(largest timestamp so far, relative last offset of the batch that holds it)."""

    __slots__ = ()

    def __init__(self, files: Files, path: str) -> None:
        super().__init__(files, path, _TIME_ENTRY)

    def is_sane(self) -> bool:
        last = self.last()
        return last is None or (last[0] >= 0 and last[1] >= 0)

    def is_full(self, index_bytes: int) -> bool:
        # Leave room for the entry that ``Segment.seal`` adds.
        return self._written + len(self._pending) > index_bytes - 2 * _TIME_ENTRY.size
