"""A partition that this broker hosts: its log, its part in the replication, and who waits for it.

A hosted partition opens its log at the first use, so a restart with ten thousand partitions costs only those
that are touched. Newcomers: nothing here waits. An append answers at once with the offset after its batch;
``when_acknowledged`` calls back when the high watermark has passed it and the flush it asked for is done.

The log remembers the bytes, the replication core (``penstock.replication``) decides who is in sync and what
is committed, and this class does what both say. In ``flushed`` mode a replica's bytes count only once they
are on its disk: the core is told of the flushed offset, and a follower asks for more only after its fsync.
Who waits is kept in ``audience.py`` and ``flushing.py``; what the node is told, in ``surroundings.py``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.broker.audience import Audience
from penstock.broker.config import TopicConfig
from penstock.broker.flushing import Flushing
from penstock.broker.surroundings import Surroundings
from penstock.environment import NO_ROOM, Buffer, FileRange
from penstock.log.log import CorruptLog, Log
from penstock.log.producers import TRY_AGAIN, Duplicate
from penstock.log.refusals import NONE_REFUSED, Refusals
from penstock.metadata.image import PartitionImage, TopicImage
from penstock.model import TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import (
    NO_TIMESTAMP,
    BatchHeader,
    CorruptBatch,
    check_produced,
    decode_header,
    set_log_append_time,
)
from penstock.replication.events import Assignment
from penstock.replication.follower import truncation_offset
from penstock.replication.partition import Partition, Truncation

if TYPE_CHECKING:
    from penstock.broker.storage import Storage


class Appended(NamedTuple):
    error: ErrorCode
    base_offset: int = -1
    # When the broker stamped the batch; -1 when the producer's own timestamps stand.
    log_append_time_ms: int = NO_TIMESTAMP
    # Behind the batch: what the high watermark must reach before all replicas in sync have it.
    end_offset: int = 0
    # What must be on this disk before any acknowledgement; 0 when nothing must.
    flush_offset: int = 0


class HostedPartition:
    __slots__ = (
        "_core",
        "_counts_flushed",
        "_flush_before",
        "_has_directory",
        "_image",
        "_is_established",
        "_log",
        "_refusals",
        "_storage",
        "_surroundings",
        "_told_start",
        "_topic_config",
        "audience",
        "flushing",
        "high_watermark",
        "index",
        "is_deleted",
        "is_leader",
        "is_offline",
        "leader",
        "leader_epoch",
        "topic",
        "topic_id",
    )

    def __init__(
        self,
        storage: Storage,
        surroundings: Surroundings,
        topic: TopicImage,
        partition: PartitionImage,
        config: TopicConfig,
        *,
        refusals: Refusals = NONE_REFUSED,
    ) -> None:
        self._storage = storage
        self._surroundings = surroundings
        self.topic = topic.name
        self.index = partition.index
        self.topic_id = topic.id
        self._image = partition
        self.leader = partition.leader
        self.leader_epoch = partition.leader_epoch
        self.is_leader = partition.leader == surroundings.me
        self._topic_config = config
        self._log: Log | None = None
        # Made with the log.
        self._core: Partition | None = None
        # Whether what we write counts only once it is on the disk: as the settings say, and until the note of it
        # (``flushed_note.py``) is removed.
        self._counts_flushed = config.is_flushed
        # What was confirmed while it was not so, at the most.
        self._flush_before = 0
        self._is_established = False
        self._has_directory = False
        self.is_deleted = False
        # Its disk has failed, or what is on it cannot be trusted.
        self.is_offline = False
        # Where the leader hears that it begins, as long as the next process would not know better; else None.
        self._told_start: int | None = None
        # Batches that were not taken but will be sent again.
        self._refusals = refusals
        # Exclusive. Never above the log's end; valid once the log is open.
        self.high_watermark = 0
        self.audience = Audience(self)
        self.flushing = Flushing(self, storage)

    def __repr__(self) -> str:
        return f"<partition {self.topic}-{self.index}>"

    @property
    def key(self) -> tuple[TopicId, int]:
        return self.topic_id, self.index

    @property
    def image(self) -> PartitionImage:
        """What the metadata last said of it."""
        return self._image

    @property
    def log(self) -> Log:
        """Raises OSError when it cannot be opened."""
        if self._log is None:
            try:
                log = self._open(may_cut=self._surroundings.may_cut(self))
            except CorruptLog as error:
                self._surroundings.damaged(self, error.offset)
                raise
            if log.recovery is not None and log.recovery.was_cut:
                self._surroundings.damaged(self, log.log_end_offset)
            return log
        return self._log

    def _open(self, *, may_cut: bool) -> Log:
        if self.is_offline:
            raise OSError(errno.EIO, "its disk has failed", repr(self))
        if self.is_deleted:
            # What lies under its name may be another topic's.
            raise OSError(errno.ENOENT, "it was deleted", repr(self))
        place = self._image.directory(self._surroundings.me)
        has_lost = self._storage.has_lost(place)
        if has_lost and len(self._image.replicas) == 1 and not self._image.leader_recovery_state:
            # The only copy. It may come back with its disk, and nobody has said that it should be given up.
            raise OSError(errno.EIO, "its data directory is not here", repr(self))
        log = self._log = self._storage.open_log(self, place, may_cut=may_cut)
        self._start_replicating(log)
        if has_lost and self._surroundings.me not in (
            *self._image.isr,
            *self._image.eligible_leader_replicas,
        ):
            # Not only with its first record: it cannot be in sync before, and too few in sync means no record.
            self._surroundings.placed(self)
        if log.recovery is not None and log.recovery.damaged_at is not None:
            self._surroundings.damaged(self, log.recovery.damaged_at)
        return log

    @property
    def is_open(self) -> bool:
        return self._log is not None

    @property
    def is_serving(self) -> bool:
        """Whether this broker leads it and nothing stands in the way."""
        return self.is_leader and not self.is_offline

    @property
    def replication(self) -> Partition:
        """Raises OSError when the log cannot be opened, or is gone."""
        if self.is_deleted:
            raise OSError(errno.ENOENT, "it was deleted", repr(self))
        if self._core is None:
            _ = self.log
        assert self._core is not None
        return self._core

    @property
    def config(self) -> TopicConfig:
        return self._topic_config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        self._topic_config = config
        log, core = self._log, self._core
        if log is not None and core is not None:
            log.config = config.log
            core.min_isr = config.min_insync_replicas
            self._settle_flushed(log)
            self._advance()

    def _settle_flushed(self, log: Log) -> None:
        """Count by the settings, as soon as the note of what is flushed allows it."""
        note = self._storage.flushed_note
        is_noted = note.holds(self.key)
        if self._topic_config.is_flushed:
            if not self._counts_flushed:
                self._counts_flushed = True
                self._flush_before = log.log_end_offset
            if is_noted or log.recovery_point >= min(self._flush_before, log.log_end_offset):
                note.add(self.key)
            else:
                # Noted when that is done.
                self.flush()
        elif is_noted:
            self._counts_flushed = True
            note.remove(self.key, self._flushed_note_removed)
        elif self._counts_flushed:
            self._counts_flushed = False
            if self.is_leader:
                # What waited to be on the disk need not any more.
                assert self._core is not None
                self._core.appended(log.log_end_offset)

    def _flushed_note_removed(self) -> None:
        if self._log is not None and self._core is not None and not self.is_deleted:
            self._settle_flushed(self._log)
            self._advance()

    @property
    def has_enough_replicas(self) -> bool:
        """Whether we lead it with as many in sync as min.insync.replicas says, or all. Raises OSError."""
        core = self.replication
        return core.is_leader and core.has_enough

    # Its part in the replication

    def assign(self, partition: PartitionImage) -> None:
        """Follow what the cluster has agreed on."""
        if partition.partition_epoch < self._image.partition_epoch:
            return
        was_leader, epoch = self.is_leader, self.leader_epoch
        self._image = partition
        self.leader, self.leader_epoch = partition.leader, partition.leader_epoch
        self.is_leader = partition.leader == self._surroundings.me
        if self._core is not None:
            self._assign_core()
        if was_leader and not self.is_leader:
            self._disappoint(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if epoch != self.leader_epoch or was_leader != self.is_leader:
            self._is_established = False
            self.audience.changed()
            self._surroundings.role_changed(self)
        if self._core is not None:
            self._advance()
            if self._core.wants_proposal:
                self._surroundings.wants_proposal(self)
        self._surroundings.reassigned(self)

    def _start_replicating(self, log: Log) -> None:
        # Of an earlier process nobody knows how it counted.
        self._counts_flushed = self._topic_config.is_flushed
        self._flush_before = log.log_end_offset
        self._core = Partition(
            self._surroundings.me,
            live=self._surroundings.live,
            is_silent=self._surroundings.is_silent,
            lag_max_ms=self._surroundings.lag_max_ms,
            min_isr=self._topic_config.min_insync_replicas,
            high_watermark=min(
                log.log_end_offset, max(log.log_start_offset, self._storage.remembered_high_watermark(self))
            ),
        )
        self._core.begins_at(log.log_start_offset)
        self._settle_flushed(log)
        self._assign_core()
        self._advance()

    def _assign_core(self) -> None:
        core, log, image = self._core, self._log, self._image
        assert core is not None and log is not None
        core.assign(
            Assignment(
                leader=image.leader,
                leader_epoch=image.leader_epoch,
                partition_epoch=image.partition_epoch,
                replicas=image.replicas,
                isr=image.isr,
                elr=image.eligible_leader_replicas,
                is_recovering=bool(image.leader_recovery_state),
            ),
            end_offset=log.log_end_offset,
            now_ms=self._now_ms(),
            counted_end=log.recovery_point if self._counts_flushed else None,
        )
        if self.is_leader:
            # Where it begins is told to followers before anything is written in it (KIP-279).
            log.begin_epoch(image.leader_epoch)

    def _now_ms(self) -> int:
        return self._storage.environment.clock.now_ms()

    def _advance(self) -> None:
        """Let everyone know who waited for the high watermark."""
        core = self._core
        assert core is not None
        if core.high_watermark != self.high_watermark:
            self.high_watermark = core.high_watermark
            self.audience.committed(self.high_watermark)
        if self.audience.deleters:
            # Who is no longer in sync is not waited for.
            self.audience.deleted(core.have_deleted_before)
        if self.is_leader and not self._is_established and core.has_established:
            self._is_established = True
            self._surroundings.established(self)

    def fetched_by(self, replica: int, broker_epoch: int, offset: int, log_start_offset: int) -> ErrorCode:
        """A follower asks for what is at the offset, so it has all before it, down to its start. Raises OSError."""
        core = self.replication
        error = core.fetched_by(
            replica,
            broker_epoch,
            offset,
            end_offset=self.log.log_end_offset,
            now_ms=self._now_ms(),
            log_start_offset=log_start_offset,
        )
        if not error:
            if self.audience.deleters:
                self.audience.deleted(core.have_deleted_before)
            if core.high_watermark != self.high_watermark:
                self._advance()
            if core.wants_proposal:
                self._surroundings.wants_proposal(self)
        return error

    def proposal_answered(self) -> None:
        """The core was told what became of a proposal."""
        self._advance()

    def fetch_position(self) -> tuple[int, int, int]:
        """(where to go on, the epoch of what lies before it, where the log certainly begins). Raises OSError."""
        log, told = self.log, self._told_start
        return log.log_end_offset, log.epochs.latest, log.log_start_offset if told is None else told

    def append_fetched(self, records: Buffer, high_watermark: int, log_start_offset: int) -> ErrorCode:
        """Append what the leader sent, and learn what it says is committed."""
        try:
            log = self.log
            if len(records):
                if not self._has_directory and not self._make_directory():
                    return ErrorCode.LOG_DIR_NOT_FOUND
                end_offset = log.log_end_offset
                try:
                    log.append_replicated(records)
                finally:
                    # Also when it ends in the middle, at a damaged batch or on a full disk.
                    if log.log_end_offset != end_offset:
                        self.flushing.appended(log, self._flush_messages)
            core = self.replication
            core.learned(high_watermark, log.log_end_offset)
            if core.high_watermark != self.high_watermark:
                self._advance()
            start = min(log_start_offset, log.log_end_offset)
            if start > log.log_start_offset:
                self._begin_at(log, start)
        except CorruptBatch:
            return ErrorCode.CORRUPT_MESSAGE
        except OSError as error:
            self._write_failed(error)
            return ErrorCode.KAFKA_STORAGE_ERROR
        return ErrorCode.NONE

    def _begin_at(self, log: Log, offset: int) -> None:
        """Delete what the leader has deleted; it hears of that when it would not be back after a kill."""
        is_asked = self._told_start is not None
        if not is_asked:
            self._told_start = log.log_start_offset
        try:
            self.delete_before(offset)
        finally:
            if log.begins_with_segment:
                # As after retention, which removes whole segments: nothing need be remembered.
                self._told_start = None
            elif not is_asked:
                self._write_start(log)

    def _write_start(self, log: Log) -> None:
        start = log.log_start_offset

        def written() -> None:
            told = self._told_start
            # Otherwise it has started over meanwhile, or been closed.
            if self._log is log and told is not None and told <= start <= log.log_start_offset:
                self._told_start = None if start == log.log_start_offset else start
                if self._told_start is not None:
                    self._write_start(log)

        self._surroundings.start_raised(self, written)

    def truncate_for(self, diverging_epoch: int, end_offset: int) -> None:
        """The leader says that our log parts from its own: cut off what it does not have."""
        log = self.log
        offset = truncation_offset(
            diverging_epoch,
            end_offset,
            lambda epoch: log.epochs.end_offset_for(epoch, log.log_end_offset),
            log.log_end_offset,
        )
        try:
            self._truncate_to(offset)
        except OSError as error:
            self._write_failed(error)

    def _truncate_to(self, offset: int) -> None:
        log, core = self.log, self.replication
        self._give_up_from(offset)
        # Also at the very end: an epoch of ours that wrote nothing is forgotten.
        log.truncate_to(max(offset, log.log_start_offset))
        self._storage.doom(self, log)
        core.truncated(log.log_end_offset)
        self._advance()

    def _give_up_from(self, offset: int) -> None:
        """The leader does not have what we have from here on."""
        core = self.replication
        if offset >= core.high_watermark:
            return
        if core.may_truncate(offset) is Truncation.REFUSED:
            # A clean leader has everything below the high watermark: somebody has erred, and cutting on
            # would make the error last.
            raise AssertionError(f"{self!r} is asked to give up committed records from {offset} on")
        # There was an unclean election, perhaps while we were away, or power was lost where nothing was flushed.
        # A remembered high watermark is no reason to stay apart from what the cluster goes on with.
        self._storage.giving_up(self, offset, core.high_watermark)

    def start_over_at(self, offset: int) -> None:
        """What we have is of no use any more: the leader's log begins behind it, or ends before it."""
        try:
            self._give_up_from(offset)
            if not self._has_directory and not self._make_directory():
                return
            self.log.start_over_at(offset)
            self._told_start = None
            self._storage.doom(self, self.log)
        except OSError as error:
            self._write_failed(error)
            return
        self.replication.started_over(offset)
        self._advance()

    # Writing

    def append(self, records: memoryview, *, allow_zstd: bool = True, by_all: bool = False) -> Appended:
        """Append one batch from a producer, if it is one and it is new.

        With ``by_all`` only if as many replicas are in sync as the topic asks for.
        """
        config = self._topic_config
        if not self.is_leader:
            return self.refuse(records, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if self.is_offline:
            return self.refuse(records, ErrorCode.KAFKA_STORAGE_ERROR)
        checked = check_produced(records, max_message_bytes=config.max_message_bytes, allow_zstd=allow_zstd)
        if not isinstance(checked, BatchHeader):
            return Appended(checked)
        header = checked
        if header.is_transactional:
            return Appended(ErrorCode.INVALID_TXN_STATE)
        wall_ms = self._storage.environment.clock.wall_ms()
        stamped = NO_TIMESTAMP
        if config.is_log_append_time:
            stamped = self._surroundings.stamp_ms()
        elif (
            header.max_timestamp > wall_ms + config.timestamp_after_max_ms
            or header.base_timestamp < wall_ms - config.timestamp_before_max_ms
            # The one whose clock is wrong may be us.
        ) and not _is_near(header, self._surroundings.time_range_ms(), config):
            return Appended(ErrorCode.INVALID_TIMESTAMP)
        try:
            log = self.log
            if by_all and not self.has_enough_replicas:
                return self._not_now(header, ErrorCode.NOT_ENOUGH_REPLICAS)
            if header.producer_id >= 0:
                verdict = log.producers.check(header, log.steady_ms(), self._refusals)
                if isinstance(verdict, Duplicate):
                    # The first attempt may still be waiting: the repeat waits with it.
                    end_offset = verdict.base_offset + header.last_offset_delta + 1
                    return Appended(
                        ErrorCode.NONE,
                        verdict.base_offset,
                        verdict.timestamp if stamped != NO_TIMESTAMP else NO_TIMESTAMP,
                        end_offset,
                        end_offset if self._counts_flushed and end_offset > log.recovery_point else 0,
                    )
                if verdict is TRY_AGAIN:
                    return self._not_now(header, verdict)
                if verdict is not None:
                    return Appended(verdict)
            if self._storage.is_any_full and self._storage.has_no_room(self):
                return self._not_now(header, ErrorCode.KAFKA_STORAGE_ERROR)
            if not self._has_directory and not self._make_directory():
                return self._not_now(header, ErrorCode.KAFKA_STORAGE_ERROR)
            if stamped != NO_TIMESTAMP:
                header = set_log_append_time(records, 0, header, stamped)
            base_offset = log.append(records, header, self.leader_epoch)
        except OSError as error:
            self._write_failed(error)
            return self._not_now(header, ErrorCode.KAFKA_STORAGE_ERROR)
        return Appended(ErrorCode.NONE, base_offset, stamped, log.log_end_offset, self._appended(log))

    def refuse(self, records: memoryview, error: ErrorCode) -> Appended:
        """Take nothing now, and see to it that what was sent behind it does not overtake it a moment later."""
        checked = check_produced(records, max_message_bytes=self._topic_config.max_message_bytes)
        return self._not_now(checked, error) if isinstance(checked, BatchHeader) else Appended(error)

    def _not_now(self, header: BatchHeader, error: ErrorCode) -> Appended:
        if header.producer_id >= 0:
            if self._refusals is NONE_REFUSED:
                self._refusals = Refusals()
            log = self._log
            steady_ms = self._storage.environment.clock.wall_ms() if log is None else log.steady_ms()
            self._refusals.add(header, error, steady_ms)
        return Appended(error)

    def append_internal(self, batch: bytearray) -> Appended:
        """Append a batch of the broker's own. Raises OSError."""
        log = self.log
        if self.leader_epoch < log.epochs.latest:
            # A node that starts applies what it knew before: another may lead by now.
            raise OSError(errno.EAGAIN, "the metadata is older than the log", repr(self))
        if self._storage.has_no_room(self):
            raise OSError(errno.ENOSPC, "the disk is full", repr(self))
        try:
            if not self._has_directory and not self._make_directory():
                raise OSError(errno.EAGAIN, "where it lies is not written down yet", repr(self))
            base_offset = log.append(batch, decode_header(batch), self.leader_epoch)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._storage.append_failed(self, error)
            raise
        flush_offset = self._appended(log)
        return Appended(ErrorCode.NONE, base_offset, NO_TIMESTAMP, log.log_end_offset, flush_offset)

    def _make_directory(self) -> bool:
        """False while the cluster does not know in which of several directories it will lie.

        It has to be known before the first record is there: of a disk that fails, one could not say otherwise
        whether it holds a partition, and the partition would begin anew on another.
        """
        if len(self._storage.directories) > 1 and not self._storage.holds(self):
            place = self._storage.place(self)
            if self._image.directory(self._surroundings.me) != place.id:
                self._surroundings.placed(self)
                return False
        self._storage.make_directory(self)
        self._has_directory = True
        self._surroundings.placed(self)
        return True

    def _appended(self, log: Log) -> int:
        """Account for a leader's append; the offset that must be flushed before it is acknowledged, or 0."""
        if not self._counts_flushed:
            core = self._core
            assert core is not None
            core.appended(log.log_end_offset)
            if core.high_watermark != self.high_watermark:
                self._advance()
        audience = self.audience
        if audience.followers:
            audience.appended()
        if len(self._image.replicas) > 1:
            self._surroundings.appended(self)
        return self.flushing.appended(log, self._flush_messages)

    @property
    def _flush_messages(self) -> int:
        return 1 if self._counts_flushed else self._topic_config.flush_messages

    def when_acknowledged(
        self, appended: Appended, callback: Callable[[ErrorCode], None], *, by_all: bool
    ) -> None:
        """Call back once an append is as safe as was asked for, or will never be."""
        if by_all and not appended.flush_offset:
            self.when_committed(appended.end_offset, callback)
            return

        def flushed(error: ErrorCode) -> None:
            if error or not by_all:
                callback(error)
            else:
                self.when_committed(appended.end_offset, callback)

        self.flushing.when_flushed(appended.flush_offset, flushed)

    def is_acknowledged(self, appended: Appended, *, by_all: bool) -> bool:
        return not appended.flush_offset and (not by_all or appended.end_offset <= self.high_watermark)

    def when_committed(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back once every replica in sync has all below the offset, or we cannot know any more."""
        if self.is_deleted:
            callback(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        elif offset <= self.high_watermark:
            callback(ErrorCode.NONE)
        elif not self.is_leader:
            callback(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        else:
            self.audience.wait_for(offset, callback)

    def when_flushed(self, callback: Callable[[], None]) -> None:
        """Call back when all that was appended counts, which is at once unless it has to be on the disk."""
        if self._log is None or not self._counts_flushed:
            callback()
        else:
            self.flushing.when_flushed(self._log.log_end_offset, lambda _: callback())

    def _disappoint(self, error: ErrorCode) -> None:
        self.audience.disappoint(error)
        self.flushing.disappoint(error)

    # Reading

    def read(
        self, offset: int, bytes_max: int, *, at_least_one: bool, ceiling: int | None = None
    ) -> FileRange | None:
        """Up to the high watermark unless told otherwise. Raises OffsetOutOfRange, or OSError."""
        ceiling = self.high_watermark if ceiling is None else ceiling
        log = self.log
        try:
            return log.read(offset, bytes_max, ceiling, at_least_one=at_least_one)
        except CorruptLog as error:
            self._surroundings.damaged(self, error.offset)
            raise
        except OSError as error:
            self._storage.read_failed(log.directory, error)
            raise

    def _write_failed(self, error: OSError) -> None:
        """The log is as it was. What lies in it may be damaged: an append looks at batches of before, too."""
        self._storage.append_failed(self, error)
        if isinstance(error, CorruptLog):
            self._surroundings.damaged(self, error.offset)

    # Upkeep

    def flush(self) -> None:
        """Make everything appended so far durable, in a thread."""
        self.flushing.flush()

    def flushed(self, log: Log) -> None:
        """More of the log is on the disk."""
        if not self._counts_flushed or self._core is None:
            return
        if self.is_leader:
            # What is committed counted before it had to be on the disk.
            self._core.appended(max(log.recovery_point, self._core.high_watermark))
            self._advance()
        if not self._storage.flushed_note.holds(self.key):
            self._settle_flushed(log)

    def delete_before(self, offset: int) -> int:
        """Raise the log's start, at the most to the high watermark; where it starts now."""
        log = self.log
        log.delete_before(offset, frees_last=True)
        self._start_moved(log)
        return log.log_start_offset

    def when_deleted_before(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back once every replica in sync has deleted what lies before the offset, or we cannot know any more.

        Before that, it would be back with the next leader.
        """
        if not self.is_serving:
            callback(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        elif self.replication.have_deleted_before(offset):
            callback(ErrorCode.NONE)
        else:
            self.audience.wait_for_deletion(offset, callback)

    def expire(self, wall_ms: int | None) -> int:
        """Apply retention, by size only when there is no time to go by; how many segments went."""
        count = self.log.expire(wall_ms, self.high_watermark)
        if count:
            self._start_moved(self.log)
        return count

    def _start_moved(self, log: Log) -> None:
        if self._core is not None:
            self._core.begins_at(log.log_start_offset)
        self._storage.doom(self, log)
        self.audience.moved()

    def take_offline(self) -> None:
        """Its disk cannot be trusted any more: serve nothing, write nothing."""
        self.is_offline = True
        self.flushing.stop_counting()
        log, self._log, self._core, self._told_start = self._log, None, None, None
        if log is not None:
            log.abandon()
        self.audience.changed()
        self._disappoint(ErrorCode.KAFKA_STORAGE_ERROR)

    def mend(self, offset: int) -> None:
        """Cut off what is damaged, now that nobody counts on it; the leader has it all. Raises OSError."""
        if self._log is None:
            # It could not even be opened, or its disk has failed since.
            self._storage.give_up(self, offset)
            self._has_directory = False
            self.is_offline = False
            try:
                self._open(may_cut=True)
            except OSError:
                # What is cut off is kept, and there may be no room for that.
                self.is_offline = True
                raise
            return
        log = self._log
        log.truncate_to(max(offset, log.log_start_offset))
        self._storage.doom(self, log)
        self.is_offline = False
        self.high_watermark = min(self.high_watermark, log.log_end_offset)
        self._start_replicating(log)

    def deleted(self) -> None:
        """The topic is gone, or this replica of it: tell everyone who waits."""
        self.is_deleted = True
        self.flushing.stop_counting()
        self.audience.changed()
        self._disappoint(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def _is_near(header: BatchHeader, range_ms: tuple[int, int], config: TopicConfig) -> bool:
    """Whether the timestamps are as near to the time, which is somewhere in the range, as the topic asks for."""
    earliest_ms, latest_ms = range_ms
    return (
        header.max_timestamp <= latest_ms + config.timestamp_after_max_ms
        and header.base_timestamp >= earliest_ms - config.timestamp_before_max_ms
    )
