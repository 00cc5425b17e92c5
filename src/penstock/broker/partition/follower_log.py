"""The log of a hosted partition while another broker leads it: a copy of the leader's.

Fetched batches are appended unchanged. What the leader does not have is truncated, and what it has deleted is
deleted here too.

A leader compacts away a tombstone when every replica has had it. That does not cover a replica that has lost it
since (a power failure, a damaged file), nor one that copies the log from the beginning: a leader that was elected
meanwhile may have compacted the tombstones of values that were copied from the one before. Nothing would delete
these keys. So such a replica empties its log and copies it again when it meets compacted batches before it is in
sync. A file in its directory tells the next process (``INCOMPLETE``); after a power failure one in the data
directory does (``data_directory.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.partition.partition_host import PartitionHost
from penstock.broker.storage.storage import Storage
from penstock.environment import Buffer
from penstock.log.fetched_batches import is_compacted
from penstock.log.log import Log
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import CorruptBatch
from penstock.replication.events import NO_EPOCH
from penstock.replication.follower import truncation_offset
from penstock.replication.partition import Truncation

if TYPE_CHECKING:
    from penstock.broker.partition.hosted_partition import HostedPartition

# It has to survive a killed process, not a power failure.
INCOMPLETE = "penstock-incomplete"


class FollowerLog:
    __slots__ = (
        "_copied_in_epoch",
        "_host",
        "_hosted",
        "_is_behind",
        "_lost_records",
        "_storage",
        "_told_start",
    )

    def __init__(self, hosted: HostedPartition, storage: Storage, host: PartitionHost) -> None:
        self._hosted = hosted
        self._storage = storage
        self._host = host
        # The log start offset to report to the leader while the current one is not checkpointed; else None.
        self._told_start: int | None = None
        # Not known to have been in sync since the start, or since it lost or gave up records.
        self._is_behind = True
        # It may have lost records in a power failure, and was not in sync since.
        self._lost_records = storage.may_have_lost(hosted.key)
        # The leader epoch in which everything in the log was copied; None if it was in sync before.
        self._copied_in_epoch: int | None = None

    def position(self) -> tuple[int, int, int]:
        """(fetch offset, epoch of the record before it, durable log start offset). Raises OSError."""
        log, told = self._hosted.log, self._told_start
        return log.log_end_offset, log.epochs.latest, log.log_start_offset if told is None else told

    def append(
        self,
        records: Buffer,
        high_watermark: int,
        log_start_offset: int,
        *,
        replicated_before: tuple[int, int] = (-1, -1),
    ) -> ErrorCode:
        """Append what the leader sent, which may be nothing, and take over its high watermark and log start.

        ``replicated_before`` as in ``Append``.
        """
        hosted = self._hosted
        try:
            log = hosted.log
            if len(records):
                if not hosted.make_directory():
                    return ErrorCode.LOG_DIR_NOT_FOUND
                end_offset = log.log_end_offset
                if self._is_behind and self._copies_again(log, records):
                    return ErrorCode.NONE
                begins_with_segment = log.begins_with_segment
                try:
                    log.append_replicated(records)
                    if begins_with_segment and not log.begins_with_segment:
                        self._begins_inside(log)
                finally:
                    # Also when only some batches were appended: one was damaged, or the disk is full.
                    if log.log_end_offset != end_offset:
                        hosted.flush_if_due(log)
                hosted.traffic.replication_bytes_in += len(records)
            core = hosted.replication
            core.learned(high_watermark, log.log_end_offset)
            if replicated_before[0] >= 0:
                core.learned_replicated(*replicated_before)
            if core.high_watermark != hosted.high_watermark:
                hosted.advance()
            start = min(log_start_offset, log.log_end_offset)
            if start > log.log_start_offset:
                self._begin_at(log, start)
        except CorruptBatch:
            return ErrorCode.CORRUPT_MESSAGE
        except OSError as error:
            hosted.write_failed(error)
            return ErrorCode.KAFKA_STORAGE_ERROR
        return ErrorCode.NONE

    def truncate_for(self, diverging_epoch: int, end_offset: int) -> None:
        """The leader reports that our log diverges from its own: truncate what it does not have."""
        log = self._hosted.log
        offset = truncation_offset(
            diverging_epoch,
            end_offset,
            lambda epoch: log.epochs.end_offset_for(epoch, log.log_end_offset),
            log.log_end_offset,
        )
        try:
            self._truncate_to(offset)
        except OSError as error:
            self._hosted.write_failed(error)

    def start_over_at(self, offset: int) -> None:
        """Empty the log and start at the offset: the leader's begins after our end, or ends before our start."""
        hosted = self._hosted
        try:
            self._give_up_from(offset)
            if not hosted.make_directory():
                return
            hosted.log.start_over_at(offset)
            self._told_start = None
            self._is_behind = True
            self._storage.schedule_removal(hosted, hosted.log)
        except OSError as error:
            hosted.write_failed(error)
            return
        hosted.replication.started_over(offset)
        hosted.advance()

    @property
    def may_lack_records(self) -> bool:
        """Whether it may have lost records in a power failure, and has not been in sync since."""
        if self._lost_records and self._is_in_sync:
            self._lost_records = False
        return self._lost_records

    def lost_records(self) -> None:
        """A damaged part of the log was cut off. Raises OSError."""
        self._is_behind = True
        log = self._hosted.log
        if log.log_end_offset > log.log_start_offset:
            self._note_incomplete()
            self._copied_in_epoch = NO_EPOCH

    @property
    def _is_in_sync(self) -> bool:
        """Whether it may be elected. So it has everything, and it must not empty its log."""
        image = self._hosted.image
        return self._host.me in image.isr or self._host.me in image.eligible_leader_replicas

    def _copies_again(self, log: Log, records: Buffer) -> bool:
        """Empty the log if it is incomplete and the records to append are compacted; return whether it did."""
        hosted, files = self._hosted, self._storage.environment.files
        mark = self._mark
        if self._is_in_sync:
            files.remove(mark)
            self._is_behind = self._lost_records = False
            self._copied_in_epoch = None
            return False
        if log.log_end_offset == log.log_start_offset:
            self._note_incomplete()
            self._lost_records = False
            self._copied_in_epoch = hosted.leader_epoch
            return False
        if self._copied_in_epoch is None and files.exists(mark):
            self._copied_in_epoch = NO_EPOCH  # by an earlier process
        is_complete = not self._lost_records and self._copied_in_epoch in (None, hosted.leader_epoch)
        if is_complete or not is_compacted(records):
            return False
        offset = log.log_start_offset
        log.start_over_at(offset)
        self._told_start = None
        self._storage.schedule_removal(hosted, log)
        hosted.replication.started_over(offset)
        hosted.advance()
        return True

    @property
    def _mark(self) -> str:
        return f"{self._hosted.log.directory}/{INCOMPLETE}"

    def _note_incomplete(self) -> None:
        files, mark = self._storage.environment.files, self._mark
        if not files.exists(mark):
            files.replace(mark, b"", durable=False)

    def closed(self) -> None:
        """The log was given up with its disk."""
        self._told_start = None

    # The log start offset

    def _begin_at(self, log: Log, offset: int) -> None:
        """Delete what the leader has deleted. The leader is told once a killed process would not bring it back."""
        is_asked = self._told_start is not None
        if not is_asked:
            self._told_start = log.log_start_offset
        try:
            self._hosted.delete_before(offset)
        finally:
            if log.begins_with_segment:
                # As after retention, which removes whole segments: no checkpoint is needed.
                self._told_start = None
            elif not is_asked:
                self._write_start(log)

    def _begins_inside(self, log: Log) -> None:
        """The leader's log begins inside a batch, which was copied whole.

        The leader is told so once a killed process would not bring back what lies before it.
        """
        is_asked = self._told_start is not None
        self._told_start = log.first_base_offset
        if not is_asked:
            self._write_start(log)

    def _write_start(self, log: Log) -> None:
        hosted = self._hosted
        start = log.log_start_offset

        def written() -> None:
            told = self._told_start
            # Otherwise the log was emptied or closed meanwhile.
            is_current = hosted.is_open and hosted.log is log
            if is_current and told is not None and told <= start <= log.log_start_offset:
                self._told_start = None if start == log.log_start_offset else start
                if self._told_start is not None:
                    self._write_start(log)

        self._host.start_raised(hosted, written)

    # The log end offset

    def _truncate_to(self, offset: int) -> None:
        hosted = self._hosted
        log, core = hosted.log, hosted.replication
        self._give_up_from(offset)
        # Also at the very end: this drops an epoch of ours that has no records.
        log.truncate_to(max(offset, log.log_start_offset))
        self._storage.schedule_removal(hosted, log)
        core.truncated(log.log_end_offset)
        hosted.advance()

    def _give_up_from(self, offset: int) -> None:
        """The leader does not have our records from this offset on: check that they may be given up."""
        hosted = self._hosted
        core = hosted.replication
        if offset >= core.high_watermark:
            return
        if core.may_truncate(offset) is Truncation.REFUSED:
            # A cleanly elected leader has everything below the high watermark. So this is a bug, and truncating
            # would make the loss permanent.
            raise AssertionError(f"{hosted!r} is asked to give up committed records from {offset} on")
        # There was an unclean election, perhaps while this broker was down, or a power loss without a flush. The
        # cluster continues without these records, so the replica must follow, whatever its own high watermark is.
        self._storage.giving_up(hosted, offset, core.high_watermark)
