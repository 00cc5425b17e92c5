"""One segment: consecutive batches of the log in one file, with two indexes. A third lists aborted transactions.

A segment is opened in steps, because a broker has many and uses few. At first only its base offset is known;
``measure`` reads its size; ``load`` opens the indexes, or rebuilds them when they are missing or invalid, and
prepares appending. Only the last segment of a log, the active one, is ever appended to. It remembers where its
latest batches lie, so that consumers at the tail need no disk reads to find them.

The indexes are hints. An entry is compared with the batch it points to before it is used, and a wrong one (a
flipped bit, a file that a power failure left half written) has the index rebuilt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise

from penstock.environment import Buffer, File, Files
from penstock.log.aborted_index import AbortedIndex, AbortedTransaction
from penstock.log.config import LogConfig
from penstock.log.epochs import NO_OFFSET
from penstock.log.index import OffsetIndex, TimeIndex
from penstock.log.names import ABORTED_INDEX, INDEX, LOG, SEGMENT_SUFFIXES, TIME_INDEX, path_of
from penstock.protocol.compression import CompressionError
from penstock.protocol.records import (
    CONTROL,
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    CorruptBatch,
    Marker,
    crc_matches,
    decode_header,
    decode_marker,
)

# Relative offsets and positions are int32 in the indexes.
RELATIVE_MAX = 2**31 - 1
_COPY_BYTES = 1 << 20
# Headers are read through a window larger than one index interval, so that a lookup costs one read.
_WINDOW_BYTES = 8192
# Once a read is this full, do not search for one more batch.
_GOOD_SHARE = 7 / 8
# The active segment remembers between half of this and this many batches, at eight bytes each.
_TAIL_BATCHES = 256
# A control batch larger than this is no marker of ours or of Kafka's.
_MARKER_BYTES_MAX = 1024


class WrongIndex(Exception):
    """An index entry does not match its batch: the index must be rebuilt."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.path)
        self.segment = segment


class Segment:
    __slots__ = (
        "_bytes_since_entry",
        "_directory",
        "_file",
        "_files",
        "_indexed_timestamp",
        "_offset_of_max",
        "_tail_last",
        "_tail_positions",
        "aborted",
        "base_offset",
        "checked",
        "created_ms",
        "damaged_at",
        "first_timestamp",
        "is_loaded",
        "max_timestamp",
        "offsets",
        "size",
        "times",
        "trusted_from",
    )

    # The following are set only in a loaded segment.
    offsets: OffsetIndex
    times: TimeIndex
    # Timestamp of the last entry in ``times``.
    _indexed_timestamp: int
    # Relative last offset of the batch that holds ``max_timestamp``.
    _offset_of_max: int
    # The largest timestamp of the first batch. The segment's age is counted from it,
    first_timestamp: int
    # or from this wall time if the records have no timestamps.
    created_ms: int
    # Including the batch of the last index entry.
    _bytes_since_entry: int
    # Relative last offset and position of the latest batches.
    _tail_last: array[int]
    _tail_positions: array[int]

    def __init__(self, files: Files, directory: str, base_offset: int) -> None:
        self._files = files
        self._directory = directory
        self.base_offset = base_offset
        # Size of the log file in bytes; -1 until measured.
        self.size = -1
        # Everything from this position on was written or checked by this process.
        self.trusted_from = 0
        # Other checked ranges, in order: (position, end, the offset that follows at the end).
        self.checked: tuple[tuple[int, int, int], ...] = ()
        # The offset of the first damaged batch; None when none is known.
        self.damaged_at: int | None = None
        # Largest of all batches; NO_TIMESTAMP when they have none, and until loaded. Survives ``unload``.
        self.max_timestamp = NO_TIMESTAMP
        # None when it has no aborted transactions, as far as the files show.
        self.aborted: AbortedIndex | None = None
        self._file: File | None = None
        self.is_loaded = False

    # Opening

    @classmethod
    def create(cls, files: Files, directory: str, base_offset: int, wall_ms: int) -> Segment:
        """Create an empty segment. Only the log file is created now; the indexes follow later."""
        segment = cls(files, directory, base_offset)
        if segment.file.size:
            # Left over from a segment that was lost in a crash.
            segment.file.truncate(0)
        # Unlike the other indexes, this one need not be written again.
        files.remove(segment._aborted_path)
        segment.size = 0
        segment._reset(wall_ms)
        segment.is_loaded = True
        return segment

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._files.open(self.path)
        return self._file

    @property
    def path(self) -> str:
        return path_of(self._directory, self.base_offset, LOG)

    @property
    def _aborted_path(self) -> str:
        return path_of(self._directory, self.base_offset, ABORTED_INDEX)

    def measure(self) -> int:
        if self.size < 0:
            self.size = self.trusted_from = self._files.size(self.path)
        return self.size

    def load(self, config: LogConfig, wall_ms: int) -> int:
        """Prepare for reading and appending. Returns the offset after the last batch.

        Raises:
            CorruptBatch: the file does not end with a whole batch.
        """
        self.measure()
        self._reset(wall_ms)
        offsets, times = self.offsets, self.times
        if offsets.open() and times.open() and offsets.is_sane(self.size) and times.is_sane():
            try:
                return self._load_from_last_entry()
            except WrongIndex:
                pass
        return self.rebuild(self.headers(), config, wall_ms, durable=True)

    def load_whole(self, config: LogConfig, wall_ms: int) -> None:
        """Load a damaged segment as if it ended before the damage. Its file is not changed."""

        def whole() -> Iterator[tuple[int, BatchHeader]]:
            end = 0
            with suppress(CorruptBatch):
                for position, header in self.headers():
                    yield position, header
                    end = position + header.size
            self.size = end

        self.rebuild(whole(), config, wall_ms, durable=False)

    def _load_from_last_entry(self) -> int:
        newest = self.times.last()
        if newest is not None:
            self._check_time(newest)
            self.max_timestamp, self._offset_of_max = newest
            self._indexed_timestamp = self.max_timestamp
        if self.size:
            self.first_timestamp = decode_header(self.file.read_at(0, HEADER_SIZE)).max_timestamp
        next_offset = self.base_offset
        for position, header in self._headers_from(self.offsets.last()):
            self._note(position, header.size, header.last_offset - self.base_offset, header.max_timestamp)
            next_offset = header.next_offset
        self.is_loaded = True
        return next_offset

    def rebuild(
        self, headers: Iterable[tuple[int, BatchHeader]], config: LogConfig, wall_ms: int, *, durable: bool
    ) -> int:
        """Rebuild both indexes from the batches. Returns the offset after the last one.

        The aborted transactions depend on the segments before, so they are rebuilt when they are next needed.
        """
        self._reset(wall_ms)
        interval_bytes = config.index_interval_bytes
        next_offset = self.base_offset
        has_markers = False
        for position, header in headers:
            if position == 0:
                self.first_timestamp = header.max_timestamp
            relative = header.last_offset - self.base_offset
            self._note(position, header.size, relative, header.max_timestamp)
            if self._bytes_since_entry - header.size > interval_bytes:
                self._bytes_since_entry = header.size
                self.offsets.restore(relative, position)
                self._restore_time()
            next_offset = header.next_offset
            has_markers = has_markers or (header.attributes & CONTROL != 0 and header.producer_id >= 0)
        self._restore_time()
        if has_markers:
            # First: once the other indexes are there, nothing else shows that this one may be missing.
            self.suspect_aborted(durable=durable)
        self.offsets.rewrite(durable=durable)
        self.times.rewrite(durable=durable)
        self.is_loaded = True
        return next_offset

    def _reset(self, wall_ms: int) -> None:
        self.offsets = OffsetIndex(self._files, path_of(self._directory, self.base_offset, INDEX))
        self.times = TimeIndex(self._files, path_of(self._directory, self.base_offset, TIME_INDEX))
        self.max_timestamp = NO_TIMESTAMP
        self._offset_of_max = 0
        self._indexed_timestamp = NO_TIMESTAMP
        self.first_timestamp = NO_TIMESTAMP
        self.created_ms = wall_ms
        self._bytes_since_entry = 0
        self._tail_last = array("i")
        self._tail_positions = array("i")

    # Appending

    def must_roll(
        self,
        header: BatchHeader,
        last_offset: int,
        config: LogConfig,
        wall_ms: int,
        *,
        pending_bytes: int = 0,
        pending_timestamp: int = NO_TIMESTAMP,
    ) -> bool:
        """Whether a batch needs a new segment. The rules are Kafka's.

        ``pending_bytes`` are about to be written to this one, and begin with a batch of ``pending_timestamp``.
        """
        size = self.size + pending_bytes
        relative = last_offset - self.base_offset
        if size == 0:
            return relative > RELATIVE_MAX
        first_timestamp = self.first_timestamp if self.size else pending_timestamp
        if first_timestamp >= 0 <= header.max_timestamp:
            age_ms = header.max_timestamp - first_timestamp
        else:
            age_ms = wall_ms - self.created_ms
        index_bytes = config.segment_index_bytes
        return (
            size + header.size > config.segment_bytes
            or age_ms > config.segment_ms
            or relative > RELATIVE_MAX
            or size + header.size > RELATIVE_MAX
            or self.offsets.is_full(index_bytes)
            or self.times.is_full(index_bytes)
            or (
                header.attributes & CONTROL != 0
                and self.aborted is not None
                and self.aborted.is_full(index_bytes)
            )
        )

    def append(
        self, batch: bytearray | memoryview, header: BatchHeader, last_offset: int, config: LogConfig
    ) -> None:
        """Write a batch at the end. On OSError nothing has changed."""
        self.file.append((batch,))
        self._written(header, last_offset, config)

    def append_all(self, batches: memoryview, headers: Iterable[BatchHeader], config: LogConfig) -> None:
        """Write several batches, which have their offsets, with one call. On OSError nothing has changed."""
        self.file.append((batches,))
        for header in headers:
            self._written(header, header.last_offset, config)

    def _written(self, header: BatchHeader, last_offset: int, config: LogConfig) -> None:
        position = self.size
        size = header.size
        self.size = position + size
        if position == 0:
            self.first_timestamp = header.max_timestamp
        relative = last_offset - self.base_offset
        self._note(position, size, relative, header.max_timestamp)
        if self._bytes_since_entry - size > config.index_interval_bytes:
            self._bytes_since_entry = size
            self.offsets.add(relative, position)
            self._add_time()

    def seal(self) -> None:
        """Write the index files: before the next segment is created, and when the log is closed."""
        self._add_time()
        self.times.write()
        self.offsets.write()
        if self.aborted is not None:
            self.aborted.write()

    # Aborted transactions

    def found_aborted(self) -> None:
        """There is a file with aborted transactions."""
        self.aborted = AbortedIndex(self._files, self._aborted_path, is_new=False)

    def miss_aborted(self) -> None:
        """The aborted transactions may be missing. They are rebuilt if they are used, also where there are none."""
        self.found_aborted()
        assert self.aborted is not None
        self.aborted.is_suspect = True

    def suspect_aborted(self, *, durable: bool) -> None:
        """The aborted transactions must be rebuilt from the batches before they are used."""
        if self.aborted is None:
            self.found_aborted()
        assert self.aborted is not None
        self.aborted.suspect(durable=durable)

    def add_aborted(self, entry: AbortedTransaction) -> None:
        """A marker that aborts a transaction was appended."""
        if self.aborted is None:
            self.aborted = AbortedIndex(self._files, self._aborted_path, is_new=True)
        self.aborted.add(entry)

    def replace_aborted(self, entries: list[AbortedTransaction], *, durable: bool) -> None:
        """Replace the aborted transactions by those found in the batches."""
        if not entries:
            if self.aborted is not None:
                self.aborted.close()
            self.aborted = None
            self._files.remove(self._aborted_path)
            return
        if self.aborted is None:
            self.aborted = AbortedIndex(self._files, self._aborted_path, is_new=True)
        self.aborted.replace(entries, durable=durable)

    def marker_at(self, position: int, header: BatchHeader) -> Marker | None:
        """The marker in a control batch; None when it holds another kind of record.

        Raises:
            CorruptBatch: the batch is damaged.
        """
        if header.size > _MARKER_BYTES_MAX:
            return None
        return marker_in(self.checked_batch(position, header))

    def checked_batch(self, position: int, header: BatchHeader) -> bytes:
        """The bytes of a batch.

        Raises:
            CorruptBatch: it is damaged.
        """
        batch = self.file.read_at(position, header.size)
        if not crc_matches(batch, 0, header):
            raise CorruptBatch(f"the CRC of the batch at {position} of {self.path} does not match")
        return batch

    def truncate(self, position: int, config: LogConfig, wall_ms: int) -> int:
        """Cut at a batch's beginning. Returns the offset after the last batch left."""
        self.file.truncate(position)
        self.size = position
        self.trusted_from = min(self.trusted_from, position)
        self.checked = ()
        self.damaged_at = None
        # Cut the indexes instead of rebuilding them: a segment may be large.
        self.offsets.cut(1, position)
        end = 0
        try:
            for _, header in self._headers_from(self.offsets.last()):
                end = header.next_offset - self.base_offset
            self.times.cut(1, end)
            self.times.write()
            self.offsets.write()
        except (OSError, WrongIndex):
            return self.rebuild(self.headers(), config, wall_ms, durable=False)
        next_offset = self.load(config, wall_ms)
        self.offsets.is_durable = self.times.is_durable = False
        return next_offset

    def _note(self, position: int, size: int, relative: int, max_timestamp: int) -> None:
        tail = self._tail_last
        if len(tail) >= _TAIL_BATCHES:
            del tail[: _TAIL_BATCHES // 2]
            del self._tail_positions[: _TAIL_BATCHES // 2]
        tail.append(relative)
        self._tail_positions.append(position)
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self._offset_of_max = relative
        self._bytes_since_entry += size

    def _add_time(self) -> None:
        if self.max_timestamp > self._indexed_timestamp:
            self._indexed_timestamp = self.max_timestamp
            self.times.add(self.max_timestamp, self._offset_of_max)

    def _restore_time(self) -> None:
        if self.max_timestamp > self._indexed_timestamp:
            self._indexed_timestamp = self.max_timestamp
            self.times.restore(self.max_timestamp, self._offset_of_max)

    # Reading

    def headers(self, position: int = 0, end: int | None = None) -> Iterator[tuple[int, BatchHeader]]:
        """Yield the batches from ``position`` on, which must be a batch's beginning.

        Raises:
            CorruptBatch: there is no batch where one should begin, the last one is cut short, or the offsets of
                one do not follow from the batch before.
        """
        file = self.file
        end = self.size if end is None else end
        window = b""
        window_start = position
        next_offset = NO_OFFSET if position else self.base_offset
        while position < end:
            at = position - window_start
            if at + HEADER_SIZE > len(window):
                window = file.read_at(position, min(_WINDOW_BYTES, end - position))
                window_start = position
                at = 0
            header = decode_header(window, at)
            if header.size > end - position:
                raise CorruptBatch(f"the batch at {position} of {self.path} is cut short")
            if next_offset not in (header.base_offset, NO_OFFSET):
                raise CorruptBatch(f"the batch at {position} of {self.path} does not follow the one before")
            next_offset = header.next_offset
            if not header.base_offset < next_offset <= self.base_offset + RELATIVE_MAX + 1:
                raise CorruptBatch(
                    f"the batch at {position} of {self.path} has offsets outside the segment's range"
                )
            yield position, header
            position += header.size

    def _headers_from(self, entry: tuple[int, int] | None) -> Iterator[tuple[int, BatchHeader]]:
        """The batches from an entry of ``offsets`` on, or from the beginning. May also raise WrongIndex."""
        if entry is None:
            return self.headers()
        relative, position = entry
        if position < 0:
            raise WrongIndex(self)
        try:
            header = decode_header(self.file.read_at(position, HEADER_SIZE))
        except CorruptBatch as error:
            raise WrongIndex(self) from error
        if header.last_offset != self.base_offset + relative:
            raise WrongIndex(self)
        return self.headers(position)

    def _check_time(self, entry: tuple[int, int]) -> None:
        """Raise WrongIndex unless an entry of ``times`` points to a batch with that timestamp."""
        timestamp, relative = entry
        offset = self.base_offset + relative
        for _, header in self._headers_from(self.offsets.floor(0, relative)):
            if header.last_offset >= offset:
                if header.last_offset == offset and header.max_timestamp == timestamp:
                    return
                break
        raise WrongIndex(self)

    def locate(self, offset: int) -> int:
        """The position of the batch that holds ``offset``; the file's end when the offset is beyond it.

        Raises:
            WrongIndex, CorruptBatch: ``Segments.look`` and ``Log.read`` rebuild the index, or raise CorruptLog.
        """
        relative = offset - self.base_offset
        tail = self._tail_positions
        if tail:
            place = bisect_left(self._tail_last, relative)
            if place or tail[0] == 0:
                return tail[place] if place < len(tail) else self.size
        for position, header in self._headers_from(self.offsets.floor(0, relative)):
            if header.last_offset >= offset:
                return position
        return self.size

    def locate_cut(self, offset: int) -> tuple[int, int]:
        """Where to cut to remove ``offset`` and everything after it: (position, the new end offset).

        That is the beginning of the batch that holds the offset, or of a damaged batch before it.
        """
        entry = self.offsets.floor(0, offset - self.base_offset - 1)
        try:
            position, next_offset = self._cut_from(entry, offset)
        except WrongIndex:
            position, next_offset = self._cut_from(None, offset)
        return position, next_offset

    def locate_damage(self) -> tuple[int, int]:
        """Where the unbroken sequence of batches ends: (position, the offset that follows there)."""
        return self._cut_from(None, self.base_offset + RELATIVE_MAX + 1)

    def _cut_from(self, entry: tuple[int, int] | None, offset: int) -> tuple[int, int]:
        position, next_offset = 0, self.base_offset
        with suppress(CorruptBatch):
            for at, header in self._headers_from(entry):
                if header.last_offset >= offset:
                    return at, header.base_offset
                position, next_offset = at + header.size, header.next_offset
        return position, next_offset

    def whole_batches(self, position: int, bytes_max: int, end: int) -> tuple[int, int]:
        """Where to end a read of at most ``bytes_max`` bytes before ``end``, and the offset that follows there.

        The position returned is a batch's beginning, ``position`` itself when not even one batch fits. It may be
        a little before the last possible one, because finding that one takes reading every header.
        """
        limit = min(position + bytes_max, end)
        tail = self._tail_positions
        if tail and tail[0] <= limit:
            place = bisect_right(tail, limit) - 1
            if place and tail[place] > position:
                return tail[place], self.base_offset + self._tail_last[place - 1] + 1
        entry = self.offsets.floor(1, limit)
        if entry is None or entry[1] <= position:
            found = self.headers(position)
            cut = position
        else:
            found = self._headers_from(entry)
            cut = entry[1]
        next_offset = -1
        for at, header in found:
            next_offset = header.base_offset
            if at + header.size > limit or at - position > bytes_max * _GOOD_SHARE:
                break
            cut = at + header.size
            next_offset = header.next_offset
        return cut, next_offset

    def header_at(self, position: int) -> BatchHeader:
        return decode_header(self.file.read_at(position, HEADER_SIZE))

    def batches_from(self, timestamp: int, offset: int) -> Iterator[tuple[int, BatchHeader]]:
        """The batches that may hold a record at ``offset`` or after it with this timestamp or a later one."""
        newest_before = self.times.floor(0, timestamp)
        if newest_before is not None:
            self._check_time(newest_before)
            offset = max(offset, self.base_offset + newest_before[1])
        for position, header in self._headers_from(self.offsets.floor(0, offset - self.base_offset)):
            if header.max_timestamp >= timestamp and header.last_offset >= offset:
                yield position, header

    def headers_up_to(self, end: int, size_bytes: int) -> list[BatchHeader]:
        """About the last ``size_bytes`` of batches before a position."""
        headers = []
        for position, header in self._headers_from(self.offsets.floor(1, max(0, end - size_bytes))):
            if position >= end:
                break
            headers.append(header)
        return headers

    # Syncing, renaming and closing

    @property
    def has_durable_indexes(self) -> bool:
        """Whether the index files are unchanged since they were last made durable."""
        if self.aborted is not None and not self.aborted.is_durable:
            return False
        return not self.is_loaded or (self.offsets.is_durable and self.times.is_durable)

    def index_files(self) -> list[File]:
        """Open the index files again, for syncing them."""
        paths = [path_of(self._directory, self.base_offset, suffix) for suffix in (INDEX, TIME_INDEX)]
        if self.aborted is not None and self._files.exists(self.aborted.path):
            paths.append(self.aborted.path)
        return [self._files.open(path) for path in paths]

    def set_aside(self, suffix: str) -> list[str]:
        """Rename the files out of the log. Returns the new paths. Reads in progress continue."""
        paths = []
        for kind in SEGMENT_SUFFIXES:
            path = path_of(self._directory, self.base_offset, kind)
            if self._files.exists(path):
                target = self._free_path(path, suffix)
                self._files.rename(path, target)
                paths.append(target)
                if kind == LOG and self._file is not None:
                    self._file.moved(target)
        return paths

    def moved(self, directory: str) -> None:
        """The directory was renamed. Reads in progress continue under the new path."""
        self._directory = directory
        if self._file is not None:
            self._file.moved(self.path)
        if self.is_loaded:
            self.offsets.moved(path_of(directory, self.base_offset, INDEX))
            self.times.moved(path_of(directory, self.base_offset, TIME_INDEX))
        if self.aborted is not None:
            self.aborted.moved(self._aborted_path)

    def copy_aside(self, position: int, suffix: str) -> str:
        """Copy the log file from a position on to a separate file. Returns its path."""
        target = self._free_path(self.path, suffix)
        copy = self._files.open(target)
        try:
            for at in range(position, self.size, _COPY_BYTES):
                copy.append((self.file.read_at(at, _COPY_BYTES),))
            copy.prepare_sync()()
        except OSError:
            # Otherwise every attempt on a full disk would leave another partial copy.
            copy.close()
            self._files.remove(target)
            raise
        copy.close()
        return target

    def _free_path(self, path: str, suffix: str) -> str:
        free, number = path + suffix, 1
        while self._files.exists(free):
            # A segment may be compacted many times before its old files are removed.
            number += 1
            free = f"{path}.{number}{suffix}"
        return free

    def unload(self) -> None:
        """Drop all but the sizes and the largest timestamp. Not for the active segment."""
        if self.aborted is not None:
            self.aborted.unload()
        if self.is_loaded:
            self.is_loaded = False
            self.offsets.close()
            self.times.close()
            del self.offsets, self.times, self._tail_last, self._tail_positions

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self.unload()

    def check(self) -> int:
        """Assert the invariants of a loaded segment. Returns the offset after the last batch."""
        assert self.size == self.file.size, (self.path, self.size, self.file.size)
        places = {}
        next_offset = self.base_offset
        max_timestamp = NO_TIMESTAMP
        for position, header in self.headers():
            assert header.base_offset == next_offset, (self.path, position, header, next_offset)
            places[position] = header.last_offset - self.base_offset
            max_timestamp = max(max_timestamp, header.max_timestamp)
            next_offset = header.next_offset
        entries = list(self.offsets)
        assert entries == sorted(set(entries)), (self.path, entries)
        assert all(places[position] == relative for relative, position in entries), (self.path, entries)
        times = list(self.times)
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(times)), (self.path, times)
        assert max_timestamp == self.max_timestamp, (self.path, max_timestamp, self.max_timestamp)
        for relative, position in zip(self._tail_last, self._tail_positions):
            assert places[position] == relative, (self.path, relative, position)
        return next_offset


def marker_in(batch: Buffer, position: int = 0) -> Marker | None:
    """The marker in a control batch that is undamaged; None when it holds anything else."""
    try:
        return decode_marker(batch, position)
    except (CorruptBatch, CompressionError, IndexError):
        return None
