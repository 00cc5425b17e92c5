"""What of a log would survive a power failure, and the work of making it more.

A flush is prepared on the loop, run on a worker thread, and acknowledged on the loop again. Meanwhile the log
goes on: it may grow, which this flush does not cover, or be truncated, after which less is durable than was
asked for. So each flush under way is remembered with what it may claim when it is done.

A log's bytes are durable below ``recovery_point``. Its names (files made, renamed, removed) and the small
files beside the segments are counted as changes instead: rare, and made durable all together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.environment import File, Files
from penstock.log.epochs import LeaderEpochs
from penstock.log.names import PARTITION_METADATA
from penstock.log.segments import Segments


@dataclass(slots=True)
class _Flush:
    prepared_offset: int
    # What may be claimed when it is done; lowered by a truncation.
    offset: int
    changes: int


class Durability:
    __slots__ = (
        "_changes",
        "_directory",
        "_durable_changes",
        "_epoch_writes",
        "_epochs",
        "_files",
        "_flushes",
        "_is_parent_durable",
        "_segments",
        "recovery_point",
    )

    def __init__(self, files: Files, directory: str, segments: Segments, epochs: LeaderEpochs) -> None:
        self._files = files
        self._directory = directory
        self._segments = segments
        self._epochs = epochs
        # Exclusive: all bytes below are durable.
        self.recovery_point = 0
        self._changes = 0
        self._durable_changes = 0
        self._flushes: list[_Flush] = []
        # Of the epochs, when last counted as a change.
        self._epoch_writes = 0
        # The name of the directory itself.
        self._is_parent_durable = True

    # What happens to the log

    def changed(self) -> None:
        """A file was made, renamed or removed."""
        self._changes += 1

    def made_directory(self) -> None:
        """Whoever made it, or found it after a crash: its own name is durable only with its parent."""
        self._is_parent_durable = False

    def truncated(self, offset: int) -> None:
        """Nothing from this offset on is durable now, whatever flush is under way."""
        self._changes += 1
        self.recovery_point = min(self.recovery_point, offset)
        for flush in self._flushes:
            flush.offset = min(flush.offset, offset)

    def started_over(self, offset: int) -> None:
        """The log is empty and begins here: there is nothing below that could be lost."""
        self.truncated(offset)
        self.recovery_point = offset

    # Flushing

    def prepare(self, log_end_offset: int) -> Callable[[], None]:
        """The work of making all of the log durable, for a worker thread; ``flushed`` when it is done."""
        work: list[Callable[[], None]] = []
        if self._epochs.writes != self._epoch_writes:
            self._epoch_writes = self._epochs.writes
            self.changed()
        has_changes = self._changes != self._durable_changes
        items = self._segments.items
        if items and (log_end_offset > self.recovery_point or has_changes):
            # As in ``recover``: also the segment that ends at the recovery point, which may have been cut.
            for segment in items[max(0, self._segments.place_of(self.recovery_point - 1)) :]:
                work.append(segment.file.prepare_sync())
                if segment is not items[-1]:
                    # Recovery does not look at a completed segment again, so its indexes must hold.
                    work += [sync_once(file) for file in segment.index_files()]
        if items and has_changes:
            if self._files.exists(self._epochs.path):
                work.append(sync_once(self._files.open(self._epochs.path)))
            work.append(self._directory_sync(self._directory))
            if not self._is_parent_durable:
                # Whose directory it is must be as durable as what lies in it.
                if self._files.exists(metadata := f"{self._directory}/{PARTITION_METADATA}"):
                    work.append(sync_once(self._files.open(metadata)))
                work.append(self._directory_sync(self._directory.rpartition("/")[0] or "/"))
        self._flushes.append(_Flush(log_end_offset, log_end_offset, self._changes))

        def run() -> None:
            for step in work:
                step()

        return run

    def flushed(self, prepared_offset: int) -> None:
        """The flush prepared at this offset is done, and with it all that were prepared before it.

        (They covered no more than it does: a flush begins at the recovery point, which they did not move.)
        """
        while self._flushes:
            flush = self._flushes.pop(0)
            if flush.prepared_offset == prepared_offset:
                self.recovery_point = max(self.recovery_point, flush.offset)
                self._durable_changes = max(self._durable_changes, flush.changes)
                break
        if self._changes == self._durable_changes:
            self._is_parent_durable = True

    def _directory_sync(self, path: str) -> Callable[[], None]:
        return lambda: self._files.sync_directory(path)


def sync_once(file: File) -> Callable[[], None]:
    """The work of making durable a file that was opened for nothing else."""
    sync = file.prepare_sync()
    file.close()
    return sync
