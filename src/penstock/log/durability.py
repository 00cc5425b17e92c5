"""Keeping the books on what of a log would survive a power failure.

A flush is prepared on the loop, run on a worker thread, and acknowledged on the loop again. Meanwhile the log
goes on: it may grow, which this flush does not cover, or be truncated, after which less is durable than was
asked for. So each flush under way is remembered with what it may claim when it is done.

A log's bytes are durable below ``recovery_point``. Its names (files made, renamed, removed) and the small
files beside the segments are counted as changes instead: rare, and made durable all together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Flush:
    prepared_offset: int
    # What may be claimed when it is done; lowered by a truncation.
    offset: int
    changes: int


class Durability:
    __slots__ = ("_changes", "_durable_changes", "_flushes", "recovery_point")

    def __init__(self) -> None:
        # Exclusive: all bytes below are durable.
        self.recovery_point = 0
        self._changes = 0
        self._durable_changes = 0
        self._flushes: list[_Flush] = []

    @property
    def has_changes(self) -> bool:
        """Whether names and small files must be made durable too."""
        return self._changes != self._durable_changes

    def changed(self) -> None:
        self._changes += 1

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

    def prepared(self, offset: int) -> None:
        self._flushes.append(_Flush(offset, offset, self._changes))

    def flushed(self, prepared_offset: int) -> None:
        """The flush prepared at this offset is done, and with it all that were prepared before it.

        (They covered no more than it does: a flush begins at the recovery point, which they did not move.)
        """
        while self._flushes:
            flush = self._flushes.pop(0)
            if flush.prepared_offset == prepared_offset:
                self.recovery_point = max(self.recovery_point, flush.offset)
                self._durable_changes = max(self._durable_changes, flush.changes)
                return
