"""Compacts the logs of this broker, one after the other, in a process of its own.

The shell around ``log/cleaner_job.py`` and ``log/swapping.py``. Every ``log.cleaner.backoff.ms`` it looks at all
compacted partitions and takes the one with the largest dirty share, until none is due. The process reads and
writes; this broker's part is a check of the result in a thread, a few renames on the loop, and some syncs in a
thread. Each replica compacts for itself.

Meanwhile the log goes on: it may be truncated, deleted, moved or closed at any moment. So before every step the log
must still be the one the job was made for, with the same version of its segments; otherwise the result is dropped.

A log whose cleaning has failed three times in a row is set aside for an hour, with the reason, and the others go
on. A job that was killed counts too: it may be killed because it needs too much memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import inf

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.config import CleanerSettings
from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment
from penstock.log.cleaner_job import CleanedGroup, CleaningJob, CleaningResult, clean
from penstock.log.cleaning_state import CleaningRun, CleaningState
from penstock.log.compaction import dirty_bytes
from penstock.log.log import Log
from penstock.metadata.settings import DOUBLE_MAX
from penstock.model import TopicId

PARTITIONS_PER_SLICE = 100
FAILURES_MAX = 3
SET_ASIDE_MS = 3_600_000


class CleanerTotals:
    """What compaction has done since this process began."""

    __slots__ = (
        "bytes_read",
        "bytes_written",
        "duration_ms",
        "failures",
        "records_read",
        "records_written",
        "runs",
    )

    def __init__(self) -> None:
        self.runs = 0
        self.failures = 0
        self.duration_ms = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.records_read = 0
        self.records_written = 0

    def add(self, run: CleaningRun) -> None:
        self.runs += 1
        self.duration_ms += run.duration_ms
        self.bytes_read += run.bytes_before
        self.bytes_written += run.bytes_after
        self.records_read += run.records_before
        self.records_written += run.records_after


class Cleaner:
    def __init__(
        self,
        environment: Environment,
        storage: Storage,
        partitions: Partitions,
        clocks: ClockWatch,
        logger: Logger,
        *,
        settings: Callable[[], CleanerSettings],
        may_clean: Callable[[], bool],
    ) -> None:
        """``may_clean``: whether every broker of the cluster can read what a cleaner writes."""
        self._environment = environment
        self._storage = storage
        self._partitions = partitions
        self._clocks = clocks
        self._logger = logger
        self._settings = settings
        self._may_clean = may_clean
        # Failures in a row.
        self._failures: dict[tuple[TopicId, int], int] = {}
        # When to try again, by the monotonic clock.
        self._set_aside: dict[tuple[TopicId, int], int] = {}
        # All runs of this process.
        self.totals = CleanerTotals()
        self._rest()

    def _rest(self) -> None:
        self._environment.spawn.later(max(1, self._settings().backoff_ms), self._look)

    @property
    def set_aside(self) -> int:
        """How many logs are not compacted for now, because it has failed again and again."""
        now_ms = self._environment.clock.now_ms()
        return sum(until_ms > now_ms for until_ms in self._set_aside.values())

    # Choosing

    def _look(self) -> None:
        """Find the partition with the largest dirty share, a slice per turn, and clean it."""
        if not (self._settings().is_enabled and self._may_clean() and self._storage.knows_strays):
            self._rest()
            return
        everyone = iter([hosted for hosted in self._partitions if hosted.config.is_compact])
        best: list[tuple[float, HostedPartition]] = []
        now_ms = self._environment.clock.now_ms()

        def next_slice() -> None:
            slice_ = list(islice(everyone, PARTITIONS_PER_SLICE))
            for hosted in slice_:
                if self._is_available(hosted, now_ms):
                    try:
                        share = self._dirty_share(hosted)
                    except OSError as error:
                        self._logger.error("cannot look for work", partition=repr(hosted), error=str(error))
                        continue
                    if share is not None and (not best or share > best[0][0]):
                        best[:] = [(share, hosted)]
            if slice_:
                self._environment.spawn.soon(next_slice)
            elif best:
                self._begin(best[0][1])
            else:
                self._rest()

        next_slice()

    def _is_available(self, hosted: HostedPartition, now_ms: int) -> bool:
        if hosted.is_deleted or hosted.is_offline or not (hosted.is_open or self._storage.holds(hosted)):
            return False
        until_ms = self._set_aside.get(hosted.key)
        if until_ms is not None:
            if now_ms < until_ms:
                return False
            del self._set_aside[hosted.key]
        return not self._storage.has_no_room(hosted)

    def _dirty_share(self, hosted: HostedPartition) -> float | None:
        """None when it is not due."""
        log = hosted.log
        sources = log.due_for_cleaning(hosted.high_watermark, self._clocks.expiry_ms())
        if not sources:
            return None
        return dirty_bytes(sources, log.first_dirty_offset) / max(1, sum(source.size for source in sources))

    def _job(self, hosted: HostedPartition) -> CleaningJob | None:
        settings = self._settings()
        return hosted.log.prepare_cleaning(
            hosted.high_watermark,
            self._clocks.expiry_ms(),
            drop_below=hosted.replication.replicated_before,
            table_bytes=settings.dedupe_buffer_size,
            load_factor=settings.io_buffer_load_factor,
            latest_ms=self._clocks.range_ms()[1],
        )

    # Cleaning

    def _begin(self, hosted: HostedPartition) -> None:
        try:
            job = None if hosted.is_deleted or hosted.is_offline else self._job(hosted)
        except OSError as error:
            self._failed(hosted, str(error))
            job = None
        if job is None:
            self._rest()
            return
        cleaning = _Cleaning(self._environment, self._storage, hosted, job, self._ended)
        rate = self._settings().io_max_bytes_per_second
        cleaning.start(inf if rate >= DOUBLE_MAX else rate)

    def _ended(self, hosted: HostedPartition, run: CleaningRun | None, reason: str | None) -> None:
        """``reason`` says why it failed. With neither, the log has changed and the result was dropped."""
        if run is not None:
            self._failures.pop(hosted.key, None)
            self.totals.add(run)
            self._logger.info(
                "compacted",
                partition=f"{hosted.topic}-{hosted.index}",
                bytes_before=run.bytes_before,
                bytes_after=run.bytes_after,
                records_before=run.records_before,
                records_after=run.records_after,
                ms=run.duration_ms,
            )
        elif reason is not None:
            self._failed(hosted, reason)
            self._rest()
            return
        # There may be more to do, here or elsewhere.
        self._environment.spawn.soon(self._look)

    def _failed(self, hosted: HostedPartition, reason: str) -> None:
        self.totals.failures += 1
        count = self._failures[hosted.key] = self._failures.get(hosted.key, 0) + 1
        self._logger.warning("cannot compact", partition=f"{hosted.topic}-{hosted.index}", reason=reason)
        if count >= FAILURES_MAX:
            del self._failures[hosted.key]
            self._set_aside[hosted.key] = self._environment.clock.now_ms() + SET_ASIDE_MS
            if hosted.is_open:
                hosted.log.swapping.state.set_aside = reason
            self._logger.error(
                "a partition is not compacted for an hour",
                partition=f"{hosted.topic}-{hosted.index}",
                reason=reason,
            )


class _Cleaning:
    """One pass over one log, from the job to the last swap."""

    def __init__(
        self,
        environment: Environment,
        storage: Storage,
        hosted: HostedPartition,
        job: CleaningJob,
        ended: Callable[[HostedPartition, CleaningRun | None, str | None], None],
    ) -> None:
        self._environment = environment
        self._storage = storage
        self._hosted = hosted
        self._log: Log = hosted.log
        self._version = self._log.swapping.version
        self._job = job
        self._ended = ended
        self._began_ms = environment.clock.now_ms()

    def start(self, bytes_per_second: float) -> None:
        self._environment.processes.run(clean, self._job, self._cleaned, bytes_per_second=bytes_per_second)

    @property
    def _has_log(self) -> bool:
        """Whether the partition still has this log: its directory may be another topic's by now."""
        hosted = self._hosted
        return not hosted.is_deleted and hosted.is_open and hosted.log is self._log

    @property
    def _is_current(self) -> bool:
        return self._has_log and self._log.swapping.version == self._version

    def _may_swap(self, group: CleanedGroup) -> bool:
        """Whether the log is as it was, and no replica has come that needs the tombstones that went."""
        if not self._is_current:
            return False
        return self._hosted.replication.replicated_before >= min(self._job.drop_below, group.end_offset)

    def _cleaned(self, result: CleaningResult | None, error: Exception | None) -> None:
        if error is not None:
            self._give_up(str(error) or type(error).__name__)
            return
        assert result is not None
        self._result = result
        self._swap_next(list(result.groups))

    def _swap_next(self, groups: list[CleanedGroup]) -> None:
        """Check, announce, swap and settle the oldest group; then the others, in this order and no other."""
        swapping = self._log.swapping
        if not groups and self._is_current:
            self._finish()
            return
        if not groups or not self._may_swap(groups[0]):
            self._give_up(None)
            return
        group = groups[0]
        check, announce = swapping.prepare_check(group), swapping.prepare_intent(group)

        def prepare() -> None:
            check()
            announce()

        def prepared(_: None, error: Exception | None) -> None:
            if error is not None or not self._may_swap(group):
                self._give_up(None if error is None else str(error))
                return
            try:
                is_swapped = self._log.swap(group)
            except OSError as failure:
                # Some files may have their new names already. The next start completes it.
                self._storage.append_failed(self._hosted, failure)
                if self._hosted.is_open:
                    self._hosted.take_offline()
                self._end(None, str(failure))
                return
            if not is_swapped:
                self._give_up(None)
                return
            self._storage.schedule_removal(self._hosted, self._log)
            self._in_thread(swapping.prepare_end(), lambda: self._swap_next(groups[1:]))

        self._environment.spawn.in_thread(prepare, prepared, lane="upkeep")

    def _finish(self) -> None:
        result = self._result
        run = CleaningRun(
            ended_ms=self._environment.clock.wall_ms(),
            duration_ms=self._environment.clock.now_ms() - self._began_ms,
            bytes_before=result.bytes_before,
            bytes_after=result.bytes_after,
            records_before=result.records_before,
            records_after=result.records_after,
        )
        state = CleaningState(result.clean_before, last_run=run)
        self._in_thread(self._log.swapping.prepare_end(state), lambda: self._end(run, None))

    def _give_up(self, reason: str | None) -> None:
        """The files are not used, but an intent may be on disk: remove the files first, then the intent."""
        if not self._has_log:
            self._end(None, None)
            return
        discard, end = self._log.swapping.prepare_discard(), self._log.swapping.prepare_end()

        def work() -> None:
            discard()
            end()

        self._in_thread(work, lambda: self._end(None, reason if self._is_current else None))

    def _in_thread(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        def done(_: None, error: Exception | None) -> None:
            if error is None:
                then()
                return
            reason = str(error) if self._is_current else None
            if not self._has_log:
                self._end(None, reason)
                return
            self._environment.spawn.in_thread(
                self._log.swapping.prepare_discard(), lambda *outcome: self._end(None, reason), lane="upkeep"
            )

        self._environment.spawn.in_thread(work, done, lane="upkeep")

    def _end(self, run: CleaningRun | None, reason: str | None) -> None:
        self._ended(self._hosted, run, reason)
