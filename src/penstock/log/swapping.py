"""Puts the files of a cleaner in the place of the segments that they were made from.

    1. The job has written ``A.log.cleaned`` and its indexes, and synced all of it (``cleaner_job.py``).
    2. ``prepare_check`` reads the file again: every batch, its CRC, and that the offsets from A to E have no gap.
    3. ``prepare_intent`` writes "A to E is replaced" into ``penstock-cleaning``, durably.
    4. ``swap`` renames the old segments to ``.deleted`` and the cleaned files to their names, without a sync.
    5. ``prepare_end`` syncs the directory, then removes the intent, durably, or replaces it by the next one.

After a crash ``complete`` looks at the intent. Before 3 there is none, and ``.cleaned`` files are removed. After 3
any of the renames of 4 may be there or not. If ``A.log.cleaned`` is still there, the renames are done again. If it
is not, ``A.log`` is the new file, and old segments that lie within it go. (Where it ends shows whether it is the
new one. An intent whose cleaned file was removed, because the log was cut meanwhile, is without effect.)

2, 3 and 5 are work for a thread. Reads that began before 4 go on in the old files, until these are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.environment import Files
from penstock.log.cleaner_job import CleanedGroup
from penstock.log.cleaning_state import CLEANING, CleaningState, read_state
from penstock.log.names import (
    ABORTED_INDEX,
    CLEANED,
    DELETED,
    INDEX,
    LOG,
    SEGMENT_SUFFIXES,
    TIME_INDEX,
    offset_of,
    path_of,
    read_partition_metadata,
)
from penstock.log.segment import Segment
from penstock.log.segments import Segments
from penstock.log.verification import good_batches
from penstock.model import format_id


class WrongCleaning(Exception):
    """A cleaned file is not what the job said. It is not used."""


class Swapping:
    __slots__ = ("_directory", "_files", "_has_renamed", "_intended", "_segments", "_state", "version")

    def __init__(self, files: Files, directory: str, segments: Segments) -> None:
        self._files = files
        self._directory = directory
        self._segments = segments
        # None until it is used: few logs are compacted.
        self._state: CleaningState | None = None
        # Grows when segments were cut or removed: what a job has read is no longer the log.
        self.version = 0
        # The cleaned file that an intent names, which may be on disk already; None without one.
        self._intended: str | None = None
        # The renames of a swap may not be durable yet.
        self._has_renamed = False

    @property
    def state(self) -> CleaningState:
        if self._state is None:
            self._state = CleaningState()
        return self._state

    # Opening

    def complete(self, names: Iterable[str]) -> bool:
        """Finish or undo what a crash has left, before the segments are listed. Returns whether files changed."""
        known = set(names)
        if CLEANING in known:
            stored, topic_id = read_state(self._files, self._directory)
            if topic_id == self._topic_id:
                self._state = stored
        cleaned = [name for name in known if name.endswith(CLEANED)]
        swap = None if self._state is None else self._state.swap
        if swap is not None:
            base_offset, end_offset = swap
            path = path_of(self._directory, base_offset, LOG)
            if _name(path + CLEANED) in known:
                # Of the first one also what is left without its log file.
                Segment(self._files, self._directory, base_offset).set_aside(DELETED)
                self._set_aside(known, range(base_offset + 1, end_offset))
                self._files.rename(path + CLEANED, path)
                cleaned.remove(_name(path + CLEANED))
            elif _name(path) in known and self._end_of(path, base_offset) == end_offset:
                self._set_aside(known, range(base_offset + 1, end_offset))
            # Which of the indexes are the new ones is not known. They are rebuilt from the batches.
            for suffix in (INDEX, TIME_INDEX, ABORTED_INDEX):
                self._files.remove(path_of(self._directory, base_offset, suffix))
            self.prepare_end()()
        for name in cleaned:
            self._files.remove(f"{self._directory}/{name}")
        return swap is not None or bool(cleaned)

    def _set_aside(self, known: set[str], offsets: range) -> None:
        for name in sorted(known):
            base_offset = offset_of(name, LOG)
            if base_offset is not None and base_offset in offsets:
                Segment(self._files, self._directory, base_offset).set_aside(DELETED)

    def _end_of(self, path: str, base_offset: int) -> int:
        file = self._files.open(path)
        end_offset = base_offset
        for _, header in good_batches(file, file.size, base_offset, -1):
            end_offset = header.next_offset
        file.close()
        return end_offset

    # Swapping

    def segments_of(self, group: CleanedGroup) -> list[Segment] | None:
        """The segments that a group was made from; None when they are not in the log any more as they were."""
        segments = self._segments.items[:-1]
        bases = [segment.base_offset for segment in segments]
        wanted = [source.base_offset for source in group.sources]
        if wanted[0] not in bases:
            return None
        place = bases.index(wanted[0])
        found = segments[place : place + len(wanted)]
        sources = [(segment.base_offset, segment.measure()) for segment in found]
        if sources != [(source.base_offset, source.size) for source in group.sources]:
            return None
        return found

    def prepare_check(self, group: CleanedGroup) -> Callable[[], None]:
        """Return the work that reads a cleaned file. It raises WrongCleaning or OSError."""
        path = path_of(self._directory, group.base_offset, LOG) + CLEANED
        files = self._files

        def check() -> None:
            if not files.exists(path) or files.size(path) != group.size:
                raise WrongCleaning(f"{path} is missing or has another size")
            file = files.open(path)
            try:
                next_offset, batches, end = group.base_offset, 0, 0
                for position, header in good_batches(file, group.size, group.base_offset, -1):
                    next_offset, batches, end = header.next_offset, batches + 1, position + header.size
            finally:
                file.close()
            if (next_offset, batches, end) != (group.end_offset, group.batches, group.size):
                raise WrongCleaning(f"{path} has {batches} good batches up to offset {next_offset}")

        return check

    def prepare_intent(self, group: CleanedGroup) -> Callable[[], None]:
        """Return the work that makes the intent durable."""
        self.state.swap = (group.base_offset, group.end_offset)
        self._intended = path_of(self._directory, group.base_offset, LOG) + CLEANED
        return self._prepare_write()

    def swap(self, group: CleanedGroup) -> list[str] | None:
        """Put a checked file, of which the intent is durable, in its place. Returns the paths of the old files.

        None, and nothing is changed, when the log was cut since.
        """
        segments = self.segments_of(group)
        if segments is None or self._intended is None:
            return None
        paths: list[str] = []
        for segment in segments:
            paths += segment.set_aside(DELETED)
        _rename_cleaned(self._files, self._directory, group.base_offset)
        cleaned = Segment(self._files, self._directory, group.base_offset)
        cleaned.measure()
        # It was read and checked.
        cleaned.trusted_from = 0
        if group.has_aborted:
            cleaned.found_aborted()
        self._segments.replace(segments, cleaned)
        self._intended = None
        self._has_renamed = True
        return paths

    def prepare_end(self, state: CleaningState | None = None) -> Callable[[], None]:
        """Return the work that makes the renames durable and then removes the intent. ``state`` replaces ours."""
        if state is not None:
            state.committed_before = max(state.committed_before, self.state.committed_before)
            self._state = state
        self.state.swap = None
        write = self._prepare_write()

        def end() -> None:
            self._files.sync_directory(self._directory)
            self._has_renamed = False
            try:
                write()
            except OSError:
                # There is no room. The intent must go all the same: it would be applied to the next cleaned file.
                self._forget()

        return end

    def _forget(self) -> None:
        """Remove the stored state, which needs no room. The next process takes the log for one never cleaned."""
        self._files.remove(f"{self._directory}/{CLEANING}")
        self._files.sync_directory(self._directory)

    def ends_at(self, offset: int) -> None:
        """The log was cut, or is about to be. What is written from this offset on was never compacted."""
        state = self._state
        if state is not None and max(state.first_dirty_offset, state.committed_before) > offset:
            state.first_dirty_offset = min(state.first_dirty_offset, offset)
            state.committed_before = min(state.committed_before, offset)
            self._forget()

    def cut(self) -> None:
        """Segments are about to be cut or removed. What was cleaned before must not come back after a crash."""
        self.version += 1
        if self._intended is not None:
            self._files.remove(self._intended)
            self._intended = None
        elif not self._has_renamed:
            return
        # Otherwise a power failure could bring old segments back beside the one that has replaced them.
        self._files.sync_directory(self._directory)

    def started_over(self) -> None:
        """The log is empty: nothing in it is compacted."""
        self.cut()
        self.ends_at(0)

    def prepare_discard(self) -> Callable[[], None]:
        """Return the work that removes the cleaned files of a job, which are not used."""
        self._intended = None

        def discard() -> None:
            for name in self._files.list(self._directory):
                if name.endswith(CLEANED):
                    self._files.remove(f"{self._directory}/{name}")
            self._files.sync_directory(self._directory)

        return discard

    @property
    def _topic_id(self) -> str:
        """Work of a thread may be late, and the directory another topic's by then. Empty where there is no id."""
        topic_id = read_partition_metadata(self._files, self._directory)
        return "" if topic_id is None else format_id(topic_id)

    def _prepare_write(self) -> Callable[[], None]:
        path, data = f"{self._directory}/{CLEANING}", self.state.encode(self._topic_id)
        return lambda: self._files.replace(path, data)


def _rename_cleaned(files: Files, directory: str, base_offset: int) -> None:
    """Give the cleaned files their names, the log file last: until then a restart does all of this again."""
    for suffix in (*(suffix for suffix in SEGMENT_SUFFIXES if suffix != LOG), LOG):
        path = path_of(directory, base_offset, suffix)
        if files.exists(path + CLEANED):
            files.rename(path + CLEANED, path)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
