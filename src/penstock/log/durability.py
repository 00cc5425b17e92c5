"""Which part of a log would survive a power failure, and the flushes that extend it.

A flush is prepared on the loop, run on a worker thread, and acknowledged on the loop again. Meanwhile the log
may grow, which this flush does not cover, or be truncated, after which the flush makes less durable than it
was asked to. So each flush in progress records the offset it may claim when it is done.

A log's bytes are durable below ``recovery_point``. Directory entries (files created, renamed, removed) and the
small files beside the segments are counted as changes instead: they are rare, and one flush covers them all.
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
    # The recovery point once it is done. A truncation lowers it.
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
        # ``epochs.writes`` when last counted as a change.
        self._epoch_writes = 0
        # Whether the parent directory's entry for this directory is durable.
        self._is_parent_durable = True

    # Changes to the log

    def changed(self) -> None:
        """A file was created, renamed or removed."""
        self._changes += 1

    def made_directory(self) -> None:
        """The directory was created, or found after a crash: its parent needs a sync."""
        self._is_parent_durable = False

    def truncated(self, offset: int) -> None:
        """Nothing from this offset on is durable now, not even after the flushes in progress."""
        self._changes += 1
        self.recovery_point = min(self.recovery_point, offset)
        for flush in self._flushes:
            flush.offset = min(flush.offset, offset)

    def started_over(self, offset: int) -> None:
        """The log is empty and begins here: no bytes below it could be lost."""
        self.truncated(offset)
        self.recovery_point = offset

    # Flushing

    def prepare(self, log_end_offset: int) -> Callable[[], None]:
        """Return the work, for a worker thread, that makes the whole log durable. Then call ``flushed``."""
        work: list[Callable[[], None]] = []
        if self._epochs.writes != self._epoch_writes:
            self._epoch_writes = self._epochs.writes
            self.changed()
        has_changes = self._changes != self._durable_changes
        items = self._segments.items
        if items and (log_end_offset > self.recovery_point or has_changes):
            # As in ``recover``: include the segment that ends at the recovery point, which may have been cut.
            for segment in items[max(0, self._segments.place_of(self.recovery_point - 1)) :]:
                work.append(segment.file.prepare_sync())
                if segment is not items[-1]:
                    # Recovery does not check completed segments, so their indexes must be durable too.
                    work += [sync_once(file) for file in segment.index_files()]
        if items and has_changes:
            if self._files.exists(self._epochs.path):
                work.append(sync_once(self._files.open(self._epochs.path)))
            work.append(self._directory_sync(self._directory))
            if not self._is_parent_durable:
                # The topic id must be as durable as the data in the directory.
                if self._files.exists(metadata := f"{self._directory}/{PARTITION_METADATA}"):
                    work.append(sync_once(self._files.open(metadata)))
                work.append(self._directory_sync(self._directory.rpartition("/")[0] or "/"))
        self._flushes.append(_Flush(log_end_offset, log_end_offset, self._changes))

        def run() -> None:
            for step in work:
                step()

        return run

    def flushed(self, prepared_offset: int) -> None:
        """The flush prepared at this offset is done, and so are all flushes prepared before it.

        (They covered no more than this one: a flush starts at the recovery point, which they did not move.)
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
    """Return the work that syncs a file opened only for this. The file is closed here."""
    sync = file.prepare_sync()
    file.close()
    return sync
