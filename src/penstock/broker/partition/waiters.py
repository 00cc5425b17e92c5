"""Requests parked on a partition: fetches waiting for data, produces waiting for the high watermark.

A fetch is a watcher: it is told of every change until it unwatches, and reads the partition itself. A request that
waits for the high watermark, or for the followers to delete what was deleted here, is called back once, with the
result.
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
        """There is more to read, or the log start offset, the leader or the disk changed, or it was deleted."""
        ...

    def mark_dirty(self, partition: HostedPartition) -> None:
        """The high watermark moved. Send it with the next response; do not wake one for it."""
        ...


class Waiters:
    __slots__ = ("_hosted", "_waiters", "deleters", "followers", "readers")

    def __init__(self, hosted: HostedPartition) -> None:
        self._hosted = hosted
        self.readers: dict[Watcher, None] = {}
        # Followers read up to the end of the log, readers up to the high watermark.
        self.followers: dict[Watcher, None] = {}
        # (offset, callback), in the order of the offsets.
        self._waiters: deque[tuple[int, Callable[[ErrorCode], None]]] = deque()
        # (offset, callback). Nearly always empty.
        self.deleters: list[tuple[int, Callable[[ErrorCode], None]]] = []

    def watch(self, watcher: Watcher, *, is_replica: bool = False) -> None:
        (self.followers if is_replica else self.readers)[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        self.readers.pop(watcher, None)
        self.followers.pop(watcher, None)

    def wait_for(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back when the high watermark has reached the offset, or with an error if it will not here."""
        self._waiters.append((offset, callback))

    def wait_for_deletion(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back when the in-sync followers have deleted everything before the offset, or with an error."""
        self.deleters.append((offset, callback))

    # Events of the partition

    def appended(self) -> None:
        for watcher in tuple(self.followers):
            watcher.changed(self._hosted)

    def committed(self, high_watermark: int) -> None:
        waiters = self._waiters
        while waiters and waiters[0][0] <= high_watermark:
            waiters.popleft()[1](ErrorCode.NONE)
        self.moved()

    def moved(self) -> None:
        """The log start offset or the high watermark moved. Followers get it with their next response; none is sent
        for this alone."""
        hosted = self._hosted
        if self.readers:
            for watcher in tuple(self.readers):
                watcher.changed(hosted)
        for watcher in self.followers:
            watcher.mark_dirty(hosted)

    def deleted(self, have_deleted_before: Callable[[int], bool]) -> None:
        """Followers may have deleted more: call back those whose offset is reached."""
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
        """The leader changed, the partition was deleted, or its disk failed."""
        for watcher in (*self.readers, *self.followers):
            watcher.changed(self._hosted)

    def fail_waiters(self, error: ErrorCode) -> None:
        """Call back all waiting requests with an error."""
        waiters = [*self._waiters, *self.deleters]
        self._waiters.clear()
        self.deleters = []
        for _, callback in waiters:
            callback(error)
