"""Requests parked on a partition: fetches waiting for data, produces waiting for the high watermark.

A fetch is a watcher: it stays until it goes, is told that something changed, and looks for itself. What waits for
the high watermark, or for the followers to delete what was deleted here, is called back once, with the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition.hosted_partition import HostedPartition


class Watcher(Protocol):
    def changed(self, partition: HostedPartition) -> None:
        """Readers can see more of the partition, or it begins later, or it is led by another, or gone."""
        ...

    def mark_dirty(self, partition: HostedPartition) -> None:
        """The high watermark moved. Send it with the next response; do not wake one for it."""
        ...


class Waiters:
    __slots__ = ("_hosted", "_waiters", "deleters", "followers", "readers")

    def __init__(self, hosted: HostedPartition) -> None:
        self._hosted = hosted
        self.readers: dict[Watcher, None] = {}
        # They see more than readers do.
        self.followers: dict[Watcher, None] = {}
        # (offset, callback), in the order of the offsets.
        self._waiters: deque[tuple[int, Callable[[ErrorCode], None]]] = deque()
        # (offset, callback). Nearly always nobody.
        self.deleters: list[tuple[int, Callable[[ErrorCode], None]]] = []

    def watch(self, watcher: Watcher, *, is_replica: bool = False) -> None:
        (self.followers if is_replica else self.readers)[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        self.readers.pop(watcher, None)
        self.followers.pop(watcher, None)

    def wait_for(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back when the high watermark has reached an offset, or will not here."""
        self._waiters.append((offset, callback))

    def wait_for_deletion(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back when the followers have nothing left before an offset, or when nobody can tell here."""
        self.deleters.append((offset, callback))

    # What happens to the partition

    def appended(self) -> None:
        for watcher in tuple(self.followers):
            watcher.changed(self._hosted)

    def committed(self, high_watermark: int) -> None:
        waiters = self._waiters
        while waiters and waiters[0][0] <= high_watermark:
            waiters.popleft()[1](ErrorCode.NONE)
        self.moved()

    def moved(self) -> None:
        """Where it begins, or how far it is committed. Followers hear of it with the next answer they get; none is
        sent for this alone."""
        hosted = self._hosted
        if self.readers:
            for watcher in tuple(self.readers):
                watcher.changed(hosted)
        for watcher in self.followers:
            watcher.mark_dirty(hosted)

    def deleted(self, have_deleted_before: Callable[[int], bool]) -> None:
        """The followers may have less than before."""
        done: list[Callable[[ErrorCode], None]] = []
        waiting = []
        for offset, callback in self.deleters:
            if have_deleted_before(offset):
                done.append(callback)
            else:
                waiting.append((offset, callback))
        self.deleters = waiting
        for callback in done:
            callback(ErrorCode.NONE)

    def changed(self) -> None:
        """It is led by another, or gone, or its disk is."""
        for watcher in (*self.readers, *self.followers):
            watcher.changed(self._hosted)

    def fail_waiters(self, error: ErrorCode) -> None:
        """What somebody waits for will not happen here."""
        waiters = [*self._waiters, *self.deleters]
        self._waiters.clear()
        self.deleters = []
        for _, callback in waiters:
            callback(error)
