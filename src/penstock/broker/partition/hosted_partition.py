"""A partition that this broker hosts: its log, its replication state, and the requests that wait for it.

A hosted partition opens its log at the first use, so a restart with ten thousand partitions costs only those that
are used. Nothing here blocks. An append returns at once with the offset after its batch; ``when_acknowledged``
calls back when the high watermark has passed it and the flush it needs is done.

The log stores the bytes, the replication core (``penstock.replication``) decides on the ISR and the high watermark,
and this class connects them. In ``flushed`` mode a replica's records count only once they are on its disk: the core
gets the flushed offset, and a follower fetches more only after its fsync. The follower's side is in
``follower_log.py``, waiting requests are in ``waiters.py`` and ``storage/flushing.py``, and events for the node are
in ``partition_host.py``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from penstock.broker.config import TopicConfig
from penstock.broker.counters import TopicTraffic
from penstock.broker.partition.follower_log import FollowerLog
from penstock.broker.partition.partition_host import PartitionHost
from penstock.broker.partition.produced_batch import NOT_VERIFIED, Appended, check_batch
from penstock.broker.partition.waiters import Waiters
from penstock.broker.storage.flushing import Flushing
from penstock.broker.storage.storage import Storage
from penstock.environment import NO_ROOM, FileRange
from penstock.log.cleaning_state import CleaningReport
from penstock.log.compaction import dirty_bytes
from penstock.log.log import CorruptLog, Log
from penstock.log.producers import TRY_AGAIN, Duplicate
from penstock.log.refused_batches import NONE_REFUSED, RefusedBatches
from penstock.metadata.image import PartitionImage, TopicImage
from penstock.model import TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import (
    NO_TIMESTAMP,
    BatchHeader,
    Marker,
    check_produced,
    decode_header,
    encode_marker,
    set_log_append_time,
)
from penstock.replication.events import Assignment
from penstock.replication.partition import Partition


class HostedPartition:
    __slots__ = (
        "_core",
        "_counts_flushed",
        "_flush_before",
        "_has_directory",
        "_host",
        "_image",
        "_is_established",
        "_log",
        "_refused_batches",
        "_storage",
        "_topic_config",
        "flushing",
        "follower_log",
        "high_watermark",
        "index",
        "is_deleted",
        "is_leader",
        "is_offline",
        "leader",
        "leader_epoch",
        "topic",
        "topic_id",
        "traffic",
        "waiters",
    )

    def __init__(
        self,
        storage: Storage,
        host: PartitionHost,
        topic: TopicImage,
        partition: PartitionImage,
        config: TopicConfig,
        traffic: TopicTraffic,
        *,
        refused_batches: RefusedBatches = NONE_REFUSED,
    ) -> None:
        self._storage = storage
        self._host = host
        self.topic = topic.name
        self.index = partition.index
        self.topic_id = topic.id
        self._image = partition
        self.leader = partition.leader
        self.leader_epoch = partition.leader_epoch
        self.is_leader = partition.leader == host.me
        self._topic_config = config
        # Of all partitions of the topic here.
        self.traffic = traffic
        self._log: Log | None = None
        # Created when the log is opened.
        self._core: Partition | None = None
        # Whether records count only once they are on the disk: while the settings say so, and until the partition
        # is removed from the flushed note (``flushed_note.py``).
        self._counts_flushed = config.is_flushed
        # Exclusive. Records below may have been confirmed before a flush.
        self._flush_before = 0
        self._is_established = False
        self._has_directory = False
        self.is_deleted = False
        # Its disk has failed, or its data there cannot be trusted.
        self.is_offline = False
        # Batches that were refused and will be sent again.
        self._refused_batches = refused_batches
        # Exclusive. Never above the log's end; valid once the log is open.
        self.high_watermark = 0
        self.waiters = Waiters(self)
        self.flushing = Flushing(self, storage)
        self.follower_log = FollowerLog(self, storage, host)

    def __repr__(self) -> str:
        return f"<partition {self.topic}-{self.index}>"

    @property
    def key(self) -> tuple[TopicId, int]:
        return self.topic_id, self.index

    @property
    def image(self) -> PartitionImage:
        """Its state in the committed metadata."""
        return self._image

    @property
    def log(self) -> Log:
        """Raises OSError when it cannot be opened."""
        if self._log is None:
            try:
                log = self._open(may_cut=self._host.may_cut(self))
            except CorruptLog as error:
                self._host.damaged(self, error.offset)
                raise
            if log.recovery is not None and log.recovery.was_cut:
                self._host.damaged(self, log.log_end_offset)
            return log
        return self._log

    def _open(self, *, may_cut: bool) -> Log:
        if self.is_offline:
            raise OSError(errno.EIO, "its disk has failed", repr(self))
        if self.is_deleted:
            # The files under its name may be another topic's.
            raise OSError(errno.ENOENT, "it was deleted", repr(self))
        place = self._image.directory(self._host.me)
        has_lost = self._storage.has_lost(place)
        if has_lost and len(self._image.replicas) == 1 and not self._image.leader_recovery_state:
            # The only copy. It may come back with its disk, and no operator has asked to give it up.
            raise OSError(errno.EIO, "its data directory is not here", repr(self))
        log = self._log = self._storage.open_log(self, place, may_cut=may_cut)
        self._start_replicating(log)
        if has_lost and self._host.me not in (
            *self._image.isr,
            *self._image.eligible_leader_replicas,
        ):
            # Report the directory now, not with the first record: without it the replica cannot be in sync, and
            # with too few in-sync replicas there is no record.
            self._host.placed(self)
        if log.recovery is not None and log.recovery.damaged_at is not None:
            self._host.damaged(self, log.recovery.damaged_at)
        return log

    @property
    def is_open(self) -> bool:
        return self._log is not None

    @property
    def is_serving(self) -> bool:
        """Whether this broker leads it and it is not offline."""
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
            self.advance()

    def _settle_flushed(self, log: Log) -> None:
        """Switch to the settings' flush mode, as soon as the flushed note allows it."""
        note = self._storage.flushed_note
        is_noted = note.holds(self.key)
        if self._topic_config.is_flushed:
            if not self._counts_flushed:
                self._counts_flushed = True
                self._flush_before = log.log_end_offset
            if is_noted or log.recovery_point >= min(self._flush_before, log.log_end_offset):
                note.add(self.key)
            else:
                # Added to the note when the flush is done.
                self.flush()
        elif is_noted:
            self._counts_flushed = True
            note.remove(self.key, self._flushed_note_removed)
        elif self._counts_flushed:
            self._counts_flushed = False
            if self.is_leader:
                # Records that waited for a flush count now.
                assert self._core is not None
                self._core.appended(log.log_end_offset)

    def _flushed_note_removed(self) -> None:
        if self._log is not None and self._core is not None and not self.is_deleted:
            self._settle_flushed(self._log)
            self.advance()

    @property
    def has_enough_replicas(self) -> bool:
        """Whether we lead it and the ISR has min.insync.replicas members, or all replicas. Raises OSError."""
        core = self.replication
        return core.is_leader and core.has_enough

    # Replication

    def assign(self, partition: PartitionImage) -> None:
        """Apply the partition's new state in the committed metadata."""
        if partition.partition_epoch < self._image.partition_epoch:
            return
        was_leader, epoch = self.is_leader, self.leader_epoch
        self._image = partition
        self.leader, self.leader_epoch = partition.leader, partition.leader_epoch
        self.is_leader = partition.leader == self._host.me
        if self._core is not None:
            self._assign_core()
        if was_leader and not self.is_leader:
            self._fail_waiters(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if epoch != self.leader_epoch or was_leader != self.is_leader:
            self._is_established = False
            self.waiters.changed()
            self._host.role_changed(self)
        if self._core is not None:
            self.advance()
            if self._core.wants_proposal:
                self._host.wants_proposal(self)
        self._host.reassigned(self)

    def _start_replicating(self, log: Log) -> None:
        # Whether an earlier process flushed before it confirmed is unknown.
        self._counts_flushed = self._topic_config.is_flushed
        self._flush_before = log.log_end_offset
        self._core = Partition(
            self._host.me,
            live=self._host.live,
            is_silent=self._host.is_silent,
            lag_max_ms=self._host.lag_max_ms,
            min_isr=self._topic_config.min_insync_replicas,
            high_watermark=min(
                log.log_end_offset,
                # The checkpoint may be older than what was compacted.
                max(
                    log.log_start_offset,
                    log.committed_before,
                    self._storage.remembered_high_watermark(self),
                ),
            ),
        )
        self._core.begins_at(log.log_start_offset)
        self._settle_flushed(log)
        self._assign_core()
        self.advance()

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
            # Followers may ask where the epoch begins before it has any record (KIP-279).
            log.begin_epoch(image.leader_epoch)

    def _now_ms(self) -> int:
        return self._storage.environment.clock.now_ms()

    def advance(self) -> None:
        """Take over the core's high watermark and call back the requests that waited for it."""
        core = self._core
        assert core is not None
        if core.high_watermark != self.high_watermark:
            self.high_watermark = core.high_watermark
            assert self._log is not None
            self._log.committed(self.high_watermark)
            self.waiters.committed(self.high_watermark)
        if self.waiters.deleters:
            # A replica that has left the ISR no longer counts.
            self.waiters.deleted(core.have_deleted_before)
        if self.is_leader and not self._is_established and core.has_established:
            self._is_established = True
            self._host.established(self)

    def fetched_by(self, replica: int, broker_epoch: int, offset: int, log_start_offset: int) -> ErrorCode:
        """A follower fetches at the offset: it has everything from its log start up to there. Raises OSError."""
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
            if self.waiters.deleters:
                self.waiters.deleted(core.have_deleted_before)
            if core.high_watermark != self.high_watermark:
                self.advance()
            if core.wants_proposal:
                self._host.wants_proposal(self)
        return error

    def proposal_answered(self) -> None:
        """The core has received the controller's answer to a proposal."""
        self.advance()

    # Writing

    def append(
        self,
        records: memoryview,
        *,
        allow_zstd: bool = True,
        by_all: bool = False,
        is_transactional: bool = False,
        is_verified: bool = False,
    ) -> Appended:
        """Append one batch from a producer, if it is valid and new.

        With ``by_all`` only if the ISR has min.insync.replicas members. ``is_transactional`` says whether the
        request has a transactional id; then the first batch of a transaction must be verified (NOT_VERIFIED).
        """
        config = self._topic_config
        if not self.is_leader:
            return self.refuse(records, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if self.is_offline:
            return self.refuse(records, ErrorCode.KAFKA_STORAGE_ERROR)
        wall_ms = self._storage.environment.clock.wall_ms()
        checked = check_batch(records, config, wall_ms, self._host, allow_zstd=allow_zstd)
        if isinstance(checked, Appended):
            return checked
        header, stamped = checked
        if header.is_transactional != is_transactional:
            return Appended(
                ErrorCode.INVALID_RECORD
                if is_transactional
                else ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            )
        try:
            log = self.log
            if by_all and not self.has_enough_replicas:
                return self._not_now(header, ErrorCode.NOT_ENOUGH_REPLICAS)
            if header.producer_id >= 0:
                verdict = log.producers.check(header, log.steady_ms(), self._refused_batches)
                if isinstance(verdict, Duplicate):
                    # The first attempt may still be waiting; the repeated one waits with it.
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
                if verdict is ErrorCode.INVALID_TXN_STATE and is_transactional and not is_verified:
                    # Of a newer epoch than the open transaction (v2). The marker that ends it may be on its way,
                    # which only the coordinator knows.
                    return NOT_VERIFIED
                if verdict is not None:
                    return Appended(verdict)
                if (
                    is_transactional
                    and not is_verified
                    and log.producers.open_transaction(header.producer_id) is None
                ):
                    return NOT_VERIFIED
            if self._storage.is_any_full and self._storage.has_no_room(self):
                return self._not_now(header, ErrorCode.KAFKA_STORAGE_ERROR)
            if not self._has_directory and not self.make_directory():
                return self._not_now(header, ErrorCode.KAFKA_STORAGE_ERROR)
            if stamped != NO_TIMESTAMP:
                header = set_log_append_time(records, 0, header, stamped)
            base_offset = log.append(records, header, self.leader_epoch)
        except OSError as error:
            self.write_failed(error)
            return self._not_now(header, ErrorCode.KAFKA_STORAGE_ERROR)
        traffic = self.traffic
        traffic.bytes_in += len(records)
        traffic.messages_in += header.last_offset_delta + 1
        return Appended(ErrorCode.NONE, base_offset, stamped, log.log_end_offset, self._appended(log))

    def refuse(self, records: memoryview, error: ErrorCode) -> Appended:
        """Refuse a batch, and make sure that the producer's next batches do not overtake it."""
        checked = check_produced(records, max_message_bytes=self._topic_config.max_message_bytes)
        return self._not_now(checked, error) if isinstance(checked, BatchHeader) else Appended(error)

    def _not_now(self, header: BatchHeader, error: ErrorCode) -> Appended:
        if header.producer_id >= 0:
            if self._refused_batches is NONE_REFUSED:
                self._refused_batches = RefusedBatches()
            log = self._log
            steady_ms = self._storage.environment.clock.wall_ms() if log is None else log.steady_ms()
            self._refused_batches.add(header, error, steady_ms)
        return Appended(error)

    def append_internal(self, batch: bytearray) -> Appended:
        """Append a batch that the broker itself wrote. Raises OSError."""
        log = self.log
        if self.leader_epoch < log.epochs.latest:
            # A starting node applies old metadata first: another broker may lead by now.
            raise OSError(errno.EAGAIN, "the metadata is older than the log", repr(self))
        if self._storage.has_no_room(self):
            raise OSError(errno.ENOSPC, "the disk is full", repr(self))
        try:
            if not self._has_directory and not self.make_directory():
                raise OSError(errno.EAGAIN, "its directory is not in the metadata yet", repr(self))
            base_offset = log.append(batch, decode_header(batch), self.leader_epoch)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._storage.append_failed(self, error)
            raise
        flush_offset = self._appended(log)
        return Appended(ErrorCode.NONE, base_offset, NO_TIMESTAMP, log.log_end_offset, flush_offset)

    def append_marker(
        self, marker: Marker, producer_id: int, producer_epoch: int, *, is_v2: bool = False
    ) -> Appended:
        """Append the marker that ends a producer's transaction, unless it is there already."""
        if not self.is_leader:
            return Appended(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if self.is_offline:
            return Appended(ErrorCode.KAFKA_STORAGE_ERROR)
        try:
            log = self.log
            if not self.has_enough_replicas:
                return Appended(ErrorCode.NOT_ENOUGH_REPLICAS)
            producers = log.producers
            error = producers.check_marker(producer_id, producer_epoch, marker.coordinator_epoch, is_v2=is_v2)
            if error:
                return Appended(error)
            state = producers.get(producer_id)
            if (
                state is not None
                and state.epoch == producer_epoch
                and state.coordinator_epoch == marker.coordinator_epoch
                and producers.open_transaction(producer_id) is None
            ):
                # Written before, and the answer was lost. It may not be committed yet.
                end_offset = log.log_end_offset
                flush_offset = end_offset if self._counts_flushed and end_offset > log.recovery_point else 0
                return Appended(ErrorCode.NONE, -1, NO_TIMESTAMP, end_offset, flush_offset)
            return self.append_internal(
                encode_marker(marker, producer_id, producer_epoch, self._host.stamp_ms())
            )
        except OSError as failure:
            if failure.errno != errno.EAGAIN:  # then it cannot be written yet, and the disk is well
                self.write_failed(failure)
            return Appended(ErrorCode.KAFKA_STORAGE_ERROR)

    def make_directory(self) -> bool:
        """False while the metadata does not say which of several directories the partition is in.

        The metadata must say so before the first record: otherwise, when a disk fails, the cluster could not tell
        whether the partition was on it, and the partition would start empty on another disk.
        """
        if self._has_directory:
            return True
        if len(self._storage.directories) > 1 and not self._storage.holds(self):
            place = self._storage.place(self)
            if self._image.directory(self._host.me) != place.id:
                self._host.placed(self)
                return False
        self._storage.make_directory(self)
        self._has_directory = True
        self._host.placed(self)
        return True

    def _appended(self, log: Log) -> int:
        """Tell the core and the followers of a leader's append; then as ``flush_if_due``."""
        if not self._counts_flushed:
            core = self._core
            assert core is not None
            core.appended(log.log_end_offset)
            if core.high_watermark != self.high_watermark:
                self.advance()
        waiters = self.waiters
        if waiters.followers:
            waiters.appended()
        if len(self._image.replicas) > 1:
            self._host.appended(self)
        return self.flush_if_due(log)

    def flush_if_due(self, log: Log) -> int:
        """Account for an append. Return the offset to flush before it is acknowledged, or 0."""
        return self.flushing.appended(log, self._flush_messages)

    @property
    def _flush_messages(self) -> int:
        return 1 if self._counts_flushed else self._topic_config.flush_messages

    def when_acknowledged(
        self, appended: Appended, callback: Callable[[ErrorCode], None], *, by_all: bool
    ) -> None:
        """Call back once an append is flushed and committed as required, or with an error if it never will be."""
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
        """Call back once all in-sync replicas have everything below the offset, or with an error."""
        if self.is_deleted:
            callback(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        elif offset <= self.high_watermark:
            callback(ErrorCode.NONE)
        elif not self.is_leader:
            callback(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        else:
            self.waiters.wait_for(offset, callback)

    def when_flushed(self, callback: Callable[[], None]) -> None:
        """Call back when everything appended counts: at once, or after the flush in ``flushed`` mode."""
        if self._log is None or not self._counts_flushed:
            callback()
        else:
            self.flushing.when_flushed(self._log.log_end_offset, lambda _: callback())

    def _fail_waiters(self, error: ErrorCode) -> None:
        self.waiters.fail_waiters(error)
        self.flushing.fail_waiters(error)

    # Reading

    @property
    def last_stable_offset(self) -> int:
        """Exclusive: below it there are no records of open transactions. Raises OSError."""
        return self.log.last_stable_offset(self.high_watermark)

    def read(
        self, offset: int, bytes_max: int, *, at_least_one: bool, ceiling: int | None = None
    ) -> FileRange | None:
        """Read up to the ceiling, by default the high watermark. Raises OffsetOutOfRange or OSError."""
        ceiling = self.high_watermark if ceiling is None else ceiling
        log = self.log
        try:
            return log.read(offset, bytes_max, ceiling, at_least_one=at_least_one)
        except CorruptLog as error:
            self._host.damaged(self, error.offset)
            raise
        except OSError as error:
            self._storage.read_failed(log.directory, error)
            raise

    def write_failed(self, error: OSError) -> None:
        """A write failed and left the log unchanged. The log may be damaged: an append reads older batches too."""
        self._storage.append_failed(self, error)
        if isinstance(error, CorruptLog):
            self._host.damaged(self, error.offset)

    # Upkeep

    def flush(self) -> None:
        """Make everything appended so far durable, in a thread."""
        self.flushing.flush()

    def flushed(self, log: Log) -> None:
        """More of the log is on the disk."""
        if not self._counts_flushed or self._core is None:
            return
        if self.is_leader:
            # Records below the high watermark already counted, perhaps before a flush was required.
            self._core.appended(max(log.recovery_point, self._core.high_watermark))
            self.advance()
        if not self._storage.flushed_note.holds(self.key):
            self._settle_flushed(log)

    def delete_before(self, offset: int) -> int:
        """Raise the log start offset, at most to the high watermark. Return the new one."""
        log = self.log
        log.delete_before(offset, frees_last=True)
        self._start_moved(log)
        return log.log_start_offset

    def when_deleted_before(self, offset: int, callback: Callable[[ErrorCode], None]) -> None:
        """Call back once all in-sync replicas have deleted everything before the offset, or with an error.

        Before that, the next leader could bring it back.
        """
        if not self.is_serving:
            callback(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        elif self.replication.have_deleted_before(offset):
            callback(ErrorCode.NONE)
        else:
            self.waiters.wait_for_deletion(offset, callback)

    def expire(self, wall_ms: int | None) -> int:
        """Apply retention; only by size if ``wall_ms`` is None. Return the number of deleted segments."""
        count = self.log.expire(wall_ms, self.high_watermark)
        if count:
            self._start_moved(self.log)
        return count

    def cleaning_report(self) -> CleaningReport | None:
        """How far it is compacted; None if it is not a compacted one, or not open. Raises OSError."""
        log = self._log
        if log is None or not self._topic_config.is_compact:
            return None
        sources = log.cleanable(self.high_watermark, self._storage.environment.clock.wall_ms())
        state = log.swapping.state
        return CleaningReport(
            sum(source.size for source in sources),
            dirty_bytes(sources, log.first_dirty_offset),
            log.first_dirty_offset,
            state.last_run,
            state.set_aside,
        )

    def _start_moved(self, log: Log) -> None:
        if self._core is not None:
            self._core.begins_at(log.log_start_offset)
        self._storage.schedule_removal(self, log)
        self.waiters.moved()

    def take_offline(self) -> None:
        """Its data on disk can no longer be trusted: stop reading and writing."""
        self.is_offline = True
        self.flushing.stop_counting()
        self.follower_log.closed()
        log, self._log, self._core = self._log, None, None
        if log is not None:
            log.abandon()
        self.waiters.changed()
        self._fail_waiters(ErrorCode.KAFKA_STORAGE_ERROR)

    def mend(self, offset: int) -> None:
        """Truncate the damage, now that this replica is out of sync and the leader has it all. Raises OSError."""
        if self._log is None:
            # The log could not be opened, or its disk has failed since.
            self._storage.give_up(self, offset)
            self._has_directory = False
            self.is_offline = False
            try:
                self._open(may_cut=True)
                self.follower_log.lost_records()
            except OSError:
                # The damaged part is kept in a copy, and there may be no room for it.
                self.is_offline = True
                raise
            return
        log = self._log
        log.truncate_to(max(offset, log.log_start_offset))
        self._storage.schedule_removal(self, log)
        self.follower_log.lost_records()
        self.is_offline = False
        self.high_watermark = min(self.high_watermark, log.log_end_offset)
        self._start_replicating(log)

    def deleted(self) -> None:
        """The topic or this replica was deleted: answer all waiting requests."""
        self.is_deleted = True
        self.flushing.stop_counting()
        self.waiters.changed()
        self._fail_waiters(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
