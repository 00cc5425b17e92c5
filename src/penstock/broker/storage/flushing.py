"""Flushing a partition: one fsync at a time, and the requests that wait for it.

A flush covers everything that was appended before it began. Batches appended while it runs share the next one, so
a partition never costs the disk one fsync per batch, whatever the number of producers. The fsync runs in a
thread. ``FlushQueue`` limits how many partitions flush at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.broker.counters import Durations
from penstock.broker.logs import Logger
from penstock.broker.storage.stored_partition import StoredPartition
from penstock.environment import Environment
from penstock.log.log import Log
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.storage.storage import Storage

# Flushes at the same time: each holds file descriptors.
FLUSHES_MAX = 16
RETRY_MS = 100
NEVER = -1


class FlushQueue:
    """The flushes of all the partitions of a node."""

    def __init__(self, environment: Environment, logger: Logger) -> None:
        self._environment = environment
        self._logger = logger
        # Partitions with appends that no flush has covered, oldest first.
        self.unflushed: dict[StoredPartition, None] = {}
        # From when a flush is given to a thread until its result is here.
        self.durations = Durations()
        self._running = 0
        # Partitions waiting for their turn.
        self._waiting: dict[StoredPartition, None] = {}

    def may_start(self, hosted: StoredPartition) -> bool:
        """Whether one more flush may run now; if not, ``hosted.flush`` is called when it may."""
        if self._running < FLUSHES_MAX:
            return True
        self._waiting[hosted] = None
        return False

    def start(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Run the work of a flush in a thread, and start the next partition's flush when it has ended."""

        clock = self._environment.clock
        began_us = clock.work_us()

        def ended(_: None, error: Exception | None) -> None:
            self._running -= 1
            self.durations.add(clock.work_us() - began_us)
            done(error)
            # A loop, because a deleted partition starts no flush.
            while self._waiting and self._running < FLUSHES_MAX:
                following = next(iter(self._waiting))
                del self._waiting[following]
                following.flush()

        self._running += 1
        self._environment.spawn.in_thread(work, ended, lane="flush")

    def delay(self, hosted: StoredPartition, error: OSError) -> None:
        """A flush could not begin: try again after RETRY_MS."""
        self._logger.error("cannot start a flush; will retry", partition=repr(hosted), error=str(error))
        self._environment.spawn.later(RETRY_MS, hosted.flush)

    def drop(self, is_lost: Callable[[StoredPartition], bool]) -> None:
        """The disk of some partitions has failed: forget their flushes."""
        for partitions in (self.unflushed, self._waiting):
            for hosted in [hosted for hosted in partitions if is_lost(hosted)]:
                del partitions[hosted]


class Flushing:
    """The flushes of one partition."""

    __slots__ = (
        "_hosted",
        "_is_running",
        "_is_wanted",
        "_queue",
        "_storage",
        "_waiters",
        "unflushed_since_ms",
    )

    def __init__(self, hosted: StoredPartition, storage: Storage) -> None:
        self._hosted = hosted
        self._storage = storage
        self._queue = storage.flush_queue
        self._is_running = False
        # Another flush was requested while one was running or waiting for its turn.
        self._is_wanted = False
        # (offset, callback), in the order of the offsets.
        self._waiters: deque[tuple[int, Callable[[ErrorCode], None]]] = deque()
        # Time of the oldest append that no flush has covered; NEVER when there is none.
        self.unflushed_since_ms = NEVER

    def appended(self, log: Log, flush_messages: int) -> int:
        """Account for an append. Return the offset to flush before it is acknowledged, or 0."""
        end_offset = log.log_end_offset
        if self.unflushed_since_ms < 0:
            self.unflushed_since_ms = self._storage.environment.clock.now_ms()
            self._queue.unflushed[self._hosted] = None
        # As in Kafka, the append that reaches flush.messages is acknowledged after the flush it causes.
        if end_offset - log.recovery_point >= flush_messages:
            self.flush()
            return end_offset
        if log.has_rolled:
            self.flush()
        return 0

    def when_flushed(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back once everything below the offset is on this disk, or with an error if it never will be."""
        hosted = self._hosted
        if hosted.is_deleted:
            callback(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        elif not hosted.is_open or offset <= hosted.log.recovery_point:
            callback(ErrorCode.NONE)
        else:
            self._waiters.append((offset, callback))

    def flush(self) -> None:
        """Make everything appended so far durable, in a thread."""
        hosted = self._hosted
        if not hosted.is_open or hosted.is_deleted or hosted.is_offline:
            return
        if self._is_running or not self._queue.may_start(hosted):
            self._is_wanted = True
            return
        log = hosted.log
        try:
            offset, work = log.prepare_flush()
        except OSError as error:
            # Most likely too many open files. No fsync has failed, so nothing is lost: try again.
            self._queue.delay(hosted, error)
            return
        self._is_running = True
        self._is_wanted = False
        self.stop_counting()

        def done(error: Exception | None) -> None:
            self._is_running = False
            if hosted.is_deleted or hosted.is_offline or not hosted.is_open:
                return
            if hosted.log is not log:
                # That log was given up with its disk. Requests may be waiting for the log in its place.
                self._go_on(hosted.log)
                return
            if error is not None:
                self._storage.flush_failed(hosted, error)
                return
            # The log may have been truncated meanwhile; it knows how much of this flush still counts.
            log.flushed(offset)
            hosted.flushed(log)
            self._go_on(log)

        self._queue.start(work, done)

    def _go_on(self, log: Log) -> None:
        waiters = self._waiters
        while waiters and waiters[0][0] <= log.recovery_point:
            waiters.popleft()[1](ErrorCode.NONE)
        if self._is_wanted or waiters:
            self.flush()

    def stop_counting(self) -> None:
        """Nothing is left unflushed: a flush is running, or the log is gone."""
        self.unflushed_since_ms = NEVER
        self._queue.unflushed.pop(self._hosted, None)

    def fail_waiters(self, error: ErrorCode) -> None:
        """Call back all waiting requests with an error."""
        waiters = list(self._waiters)
        self._waiters.clear()
        for _, callback in waiters:
            callback(error)
