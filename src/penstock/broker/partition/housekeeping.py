"""Periodic work: flush by time, look for room on full disks, checkpoint, expire old segments, forget old producers.

Each chore has its own timer. Those that visit every partition do it in slices, so that the loop stays free between
slices, whatever the number of partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.config import BrokerConfig
from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment

DISK_CHECK_INTERVAL_MS = 1_000
PRODUCER_EXPIRY_INTERVAL_MS = 600_000
PARTITIONS_PER_SLICE = 100
# Larger, because noting a log's offsets takes microseconds.
REMEMBERED_PER_SLICE = 5_000


class Housekeeping:
    def __init__(
        self,
        environment: Environment,
        config: BrokerConfig,
        storage: Storage,
        partitions: Partitions,
        clocks: ClockWatch,
        logger: Logger,
        *,
        may_delete: Callable[[], bool],
        when_full: Callable[[], None],
    ) -> None:
        """``may_delete``: whether it is certain that no other broker leads the partitions this broker leads.

        ``when_full`` is called regularly while a disk is full.
        """
        self._when_full = when_full
        self._clocks = clocks
        self._may_delete = may_delete
        self._environment = environment
        self._storage = storage
        self._partitions = partitions
        self._logger = logger
        self._is_checkpointing = False
        # Another checkpoint was requested while a write was under way.
        self._checkpoint_is_due = False
        self._checkpoint_waiters: list[Callable[[bool], None]] = []
        self._every(DISK_CHECK_INTERVAL_MS, self._look_after_disks)
        self._every(config.log_flush_offset_checkpoint_interval_ms, self.checkpoint)
        self._every(config.log_retention_check_interval_ms, lambda: self._visit(self._expire))
        self._every(PRODUCER_EXPIRY_INTERVAL_MS, lambda: self._visit(self._forget_producers))

    def checkpoint(self, then: Callable[[bool], None] | None = None) -> None:
        """Write the checkpoints of all logs; ``then`` gets whether that succeeded.

        One write at a time: requests that arrive meanwhile share the next one.
        """
        if then is not None:
            self._checkpoint_waiters.append(then)
        if self._is_checkpointing:
            self._checkpoint_is_due = True
            return
        self._is_checkpointing = True
        self._checkpoint_is_due = False
        waiters, self._checkpoint_waiters = self._checkpoint_waiters, []

        def done(_: None, error: Exception | None) -> None:
            self._is_checkpointing = False
            if error is not None:
                # A full disk must not stop the broker, nor the deletion of records, which makes room.
                self._logger.error("cannot write the checkpoint", error=str(error))
            for waiter in waiters:
                waiter(error is None)
            if self._checkpoint_is_due:
                self.checkpoint()

        everyone = iter(list(self._partitions))
        # Before that the image may be one of before the power failure.
        all_caught_up = self._storage.knows_strays

        def next_slice() -> None:
            nonlocal all_caught_up
            slice_ = list(islice(everyone, REMEMBERED_PER_SLICE))
            self._storage.remember(slice_)
            all_caught_up = all_caught_up and not any(
                hosted.follower_log.may_lack_records for hosted in slice_ if not hosted.is_deleted
            )
            if len(slice_) == REMEMBERED_PER_SLICE:
                self._environment.spawn.soon(next_slice)
            else:
                write_time = self._clocks.prepare_memory()
                write_checkpoint = self._storage.prepare_checkpoint(all_caught_up=all_caught_up)

                def write() -> None:
                    write_time()
                    write_checkpoint()

                self._environment.spawn.in_thread(write, done, lane="upkeep")

        next_slice()

    def _every(self, interval_ms: int, chore: Callable[[], None]) -> None:
        def again() -> None:
            chore()
            self._environment.spawn.later(interval_ms, again)

        self._environment.spawn.later(interval_ms, again)

    def _look_after_disks(self) -> None:
        self._flush_by_time()
        self._storage.look_for_room()
        if self._storage.is_any_full:
            self._when_full()

    def _flush_by_time(self) -> None:
        now_ms = self._environment.clock.now_ms()
        for hosted in list(self._storage.flush_queue.unflushed):
            if now_ms - hosted.flushing.unflushed_since_ms >= hosted.config.flush_ms:
                hosted.flush()

    def _visit(self, chore: Callable[[HostedPartition], None]) -> None:
        """Run a chore for every partition that has files on disk, a slice per turn."""
        if not self._storage.knows_strays:
            return
        everyone = iter(list(self._partitions))

        def next_slice() -> None:
            slice_ = list(islice(everyone, PARTITIONS_PER_SLICE))
            for hosted in slice_:
                if hosted.is_deleted or not (hosted.is_open or self._storage.holds(hosted)):
                    continue
                try:
                    chore(hosted)
                except OSError as error:
                    self._logger.error("housekeeping failed", partition=repr(hosted), error=str(error))
            if slice_:
                self._environment.spawn.soon(next_slice)

        next_slice()

    def _expire(self, hosted: HostedPartition) -> None:
        # A follower deletes what its leader has deleted (``full_followers.py``: those without room to fetch).
        if not (hosted.is_serving and self._may_delete()):
            return
        # Read for each partition: the clock may be set at any moment.
        count = hosted.expire(self._clocks.expiry_ms())
        if count:
            self._logger.info("expired segments", partition=f"{hosted.topic}-{hosted.index}", count=count)

    def _forget_producers(self, hosted: HostedPartition) -> None:
        if hosted.is_open:
            hosted.log.producers.expire(hosted.log.steady_ms())
