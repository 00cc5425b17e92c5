"""One partition's log: segments on disk, and the offsets where it begins and ends.

Everything here is synchronous and runs on the broker's loop, except the work returned by ``prepare_flush``.
The files are Kafka's (``names.py``). To open a log that was closed cleanly, only the file names and the end of
the last segment are read. They must agree with the snapshot written by ``close``, which is named after the log
end offset. The rest is read on first use, so that ten thousand idle partitions cost little.

Careful: when ``append`` returns, the batch is in the page cache but not durable. Only bytes below
``recovery_point`` are durable, and only ``prepare_flush`` and ``flushed`` move it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.environment import NO_ROOM, Buffer, Clock, Environment, FileRange, Files
from penstock.log.aborted_index import AbortedTransaction
from penstock.log.cleaner_job import ActiveProducer, CleanedGroup, CleaningJob
from penstock.log.compaction import Source, cleanable, is_due
from penstock.log.config import KEEP, NEVER_MS, LogConfig
from penstock.log.durability import Durability, sync_once
from penstock.log.epochs import NO_EPOCH, LeaderEpochs
from penstock.log.fetched_batches import first_holding, good_from, without_overlap
from penstock.log.names import ABORTED_INDEX, DELETED, INDEX, LOG, SNAPSHOT, TIME_INDEX, name_of, offset_of
from penstock.log.producers import ProducerStates
from penstock.log.reading import Reader
from penstock.log.recovery import Recovery, epochs_of, recover
from penstock.log.retention import count_expired
from penstock.log.segment import Segment, WrongIndex, marker_in
from penstock.log.segments import CorruptLog, Segments, damaged
from penstock.log.snapshots import Snapshots, producers_at
from penstock.log.swapping import Swapping
from penstock.log.timestamp_lookup import TimestampedOffset, first_from, newest
from penstock.log.transaction_lookup import aborted_between, check_transactions
from penstock.protocol.records import CONTROL, BatchHeader, CorruptBatch, patch

__all__ = ["CorruptLog", "Log", "LogConfig", "OffsetOutOfRange"]


class OffsetOutOfRange(Exception):
    """The offset is not between the log's start and its end."""


class Log:
    __slots__ = (
        "_clock",
        "_config",
        "_durability",
        "_epoch",
        "_files",
        "_producers",
        "_reader",
        "_segments",
        "_snapshots",
        "_wall_offset_ms",
        "before_cut",
        "directory",
        "epochs",
        "give_room",
        "has_rolled",
        "log_end_offset",
        "log_start_offset",
        "pending_deletes",
        "recovery",
        "swapping",
    )

    def __init__(self, files: Files, clock: Clock, directory: str, config: LogConfig) -> None:
        self._files = files
        self._clock = clock
        self._config = config
        self.directory = directory
        # Added to the monotonic clock, gives ``steady_ms``.
        self._wall_offset_ms = clock.wall_ms() - clock.now_ms()

        # Exclusive: where the next record goes.
        self.log_end_offset = 0
        # Never above log_end_offset. May lie inside the first segment.
        self.log_start_offset = 0
        # Empty until the first append.
        self._segments = Segments(files, clock, directory, config)
        self._reader = Reader(self._segments)
        # How far it is compacted, and cleaned segments on their way in.
        self.swapping = Swapping(files, directory, self._segments)

        self.epochs = LeaderEpochs(files, directory, self._epochs_from_batches)
        # Leader epoch of the last batch, or NO_EPOCH when not known. Saves a lookup in ``epochs``.
        self._epoch = NO_EPOCH
        self._snapshots = Snapshots(files, directory)
        # None until first used.
        self._producers: ProducerStates | None = None

        self._durability = Durability(files, directory, self._segments, self.epochs)
        # A segment was rolled since the last flush. The shell flushes it soon, as Kafka does on roll.
        self.has_rolled = False
        # Paths that are no longer part of the log. The shell takes them and removes them after a delay.
        self.pending_deletes: list[str] = []
        # Called with the offset before the log is cut there: the recovery point stored elsewhere must be lowered
        # first.
        self.before_cut: Callable[[int], None] | None = None
        # On a full disk, frees the little space that is needed to free more; false when it cannot.
        self.give_room: Callable[[], bool] = _give_none
        # The result of recovery, if ``open`` had to run it.
        self.recovery: Recovery | None = None

    @property
    def config(self) -> LogConfig:
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._config = self._segments.config = config

    # Opening and closing

    @classmethod
    def open(
        cls,
        environment: Environment,
        directory: str,
        config: LogConfig,
        *,
        clean: bool,
        recovery_point: int = 0,
        log_start_offset: int | None = None,
        may_cut: bool = True,
        before_cut: Callable[[int], None] | None = None,
    ) -> Log:
        """Open the log in a directory, which need not exist yet.

        ``clean`` means that ``close`` was the last operation on it. Otherwise everything from the segment of
        ``recovery_point`` on is read and checked, and ``recovery`` holds the result.
        ``log_start_offset`` comes from the broker's checkpoint and reflects DeleteRecords and retention.
        ``may_cut`` says whether damage may be cut off; a torn tail always is.

        Raises:
            CorruptLog: there is damage, and it may not be cut off. The files are unchanged.
            OSError: the files cannot be used.
        """
        log = cls(environment.files, environment.clock, directory, config)
        log.before_cut = before_cut
        log._list_files()
        if log._segments.items:
            if not (clean and log._open_clean()):
                log._recover(recovery_point, may_cut=may_cut)
            log.log_start_offset = log._segments.items[0].base_offset
        elif recovery_point > (log_start_offset or 0):
            if not may_cut:
                raise CorruptLog("it has no segments", directory, 0)
            log._warn_of_cut(0)
            log.recovery = Recovery(0, was_cut=True)
        if log_start_offset is not None and log_start_offset > log.log_start_offset:
            log._start_at(log_start_offset)
        log.swapping.ends_at(log.log_end_offset)
        if log.recovery is not None:
            # The epoch checkpoint may be older than the removal of the segments before the start.
            log.epochs.truncate_from_start(log.log_start_offset)
        return log

    def _list_files(self) -> None:
        names = self._files.list(self.directory)
        if self.swapping.complete(names):
            names = self._files.list(self.directory)
            self._durability.changed()
        for name in names:
            if name.endswith(LOG):
                base_offset = offset_of(name, LOG)
                if base_offset is not None:
                    self._segments.list_one(base_offset)
            elif name.endswith(SNAPSHOT):
                snapshot = offset_of(name, SNAPSHOT)
                if snapshot is not None:
                    self._snapshots.offsets.append(snapshot)
            elif name.endswith(ABORTED_INDEX):
                # Listed after the segment's log file.
                base_offset = offset_of(name, ABORTED_INDEX)
                if base_offset is not None and base_offset == self._segments.last_base_offset:
                    self._segments.items[-1].found_aborted()
            elif name.endswith(DELETED):
                self.pending_deletes.append(f"{self.directory}/{name}")
        known = frozenset(names)
        for segment in self._segments.items:
            if not all(name_of(segment.base_offset, suffix) in known for suffix in (INDEX, TIME_INDEX)):
                # They were removed, so the third one may have been too. Nothing shows that once they are rebuilt.
                segment.miss_aborted()
        if not self._segments.items:
            # Without segments the log is empty: other files that a crash may have left do not count.
            self.epochs.has_directory = False
            self._snapshots.drop_above(-1)

    def _open_clean(self) -> bool:
        """Load the last segment; false when the files show that the log was not closed cleanly."""
        active = self._segments.items[-1]
        try:
            self.log_end_offset = active.load(self._config, self._clock.wall_ms())
        except CorruptBatch:
            return False
        self._durability.recovery_point = self.log_end_offset
        # ``close`` wrote a snapshot at the log end, unless one was there from the roll.
        return self._snapshots.newest <= active.base_offset or self._snapshots.newest == self.log_end_offset

    def _recover(self, recovery_point: int, *, may_cut: bool) -> None:
        before_cut = self._warn_of_cut if may_cut else None
        try:
            self.recovery, self._producers = recover(
                self._segments, self.epochs, self._snapshots, recovery_point, self.steady_ms(), before_cut
            )
        except OSError:
            self._segments.close()
            raise
        self.log_end_offset = self.recovery.log_end_offset
        self._producers.log_was_empty = self.log_end_offset == 0
        self._epoch = self.epochs.latest
        # The directory entries may not be durable either.
        self._durability.made_directory()
        self._durability.recovery_point = recovery_point
        self._durability.truncated(self.log_end_offset)

    def _start_at(self, offset: int) -> None:
        """Raise the log start offset to the one in the checkpoint."""
        if offset > self.log_end_offset:
            # The lost records lie before the start anyway. Their offsets were used and must not be used again.
            self.start_over_at(offset)
        self.log_start_offset = offset
        # A crash may have undone the removal of older segments.
        stale = self._segments.place_of(offset)
        if stale > 0:
            self.pending_deletes += self._segments.drop_oldest(stale)
            self._durability.changed()

    def seal(self) -> None:
        """Write the files that a clean open needs; ``close`` does it too.

        On shutdown the broker seals all its logs, lets the kernel write everything back at once, and then closes
        them: syncing thousands of logs one by one would take too long.
        """
        if not self._segments.items:
            return
        self._segments.items[-1].seal()
        if self.epochs.is_stale:
            self.epochs.write()
        if self._snapshots.newest != self.log_end_offset:
            self._write_snapshot()
            self._snapshots.drop_old()
            # A clean open relies on the snapshot's name.
            self._durability.changed()

    def close(self) -> None:
        """Make everything durable: a clean open does not check it. The log must not be used afterwards."""
        self.seal()
        offset, work = self.prepare_flush()
        work()
        items = self._segments.items
        if items and not items[-1].has_durable_indexes:
            for file in items[-1].index_files():
                sync_once(file)()
        self.flushed(offset)
        self._segments.close()

    def moved(self, directory: str) -> None:
        """The directory was renamed because the log is being deleted. Only reads in progress continue."""
        self.swapping.version += 1
        for segment in self._segments.items:
            segment.moved(directory)

    def abandon(self) -> None:
        """Close the files without writing: the log was deleted, or its disk failed."""
        self._segments.close()

    # Writing

    def append(self, batch: bytearray | memoryview, header: BatchHeader, leader_epoch: int) -> int:
        """Append one checked batch and assign its offsets. Returns the offset of its first record.

        Raises:
            OSError: the disk is full or failing; the log is unchanged.
        """
        base_offset = self.log_end_offset
        last_offset = base_offset + header.last_offset_delta
        wall_ms = self._clock.wall_ms()
        patch(batch, 0, base_offset, leader_epoch)
        segment = self._make_ready(header, base_offset, last_offset, leader_epoch, wall_ms)
        segment.append(batch, header, last_offset, self._config)
        self.log_end_offset = last_offset + 1
        producers = self.producers
        producers.log_was_empty = False
        if header.producer_id >= 0:
            if header.attributes & CONTROL:
                self._end_transaction(segment, batch, 0, header, base_offset)
            else:
                producers.update(header, base_offset, self.steady_ms())
        return base_offset

    def append_replicated(self, data: Buffer) -> int:
        """Append batches fetched from the leader, which have their offsets and epochs. Returns the bytes appended.

        A batch at the end that is cut short is skipped.

        Raises:
            CorruptBatch: a batch is damaged, or does not continue the log. The batches before it were appended.
            OSError: as ``append``; some batches may have been appended.
        """
        start = self.log_end_offset
        data = without_overlap(data, start)
        if start and self.log_start_offset == start:
            base_offset = first_holding(data, start)
            if base_offset is not None:
                # The leader's log begins inside a batch, and batches are copied whole.
                self.start_over_at(base_offset)
                try:
                    return self._append_replicated(data)
                finally:
                    if self.log_end_offset < start:
                        # Nothing was written. What is below ``start`` is committed, so the end must not be.
                        self.start_over_at(start)
                    self.delete_before(start)
        return self._append_replicated(data)

    def _append_replicated(self, data: Buffer) -> int:
        headers, wrong = good_from(data, self.log_end_offset)
        wall_ms = self._clock.wall_ms()
        config = self._config
        end = 0
        with memoryview(data) as view:
            while headers:
                first = headers[0]
                if not self._may_append(first.leader_epoch):
                    raise CorruptBatch(f"epoch {first.leader_epoch} in a log of epoch {self.epochs.latest}")
                segment = self._make_ready(
                    first, first.base_offset, first.last_offset, first.leader_epoch, wall_ms
                )
                # Write all batches that fit into this segment with one call.
                count, size = 1, first.size
                for header in headers[1:]:
                    if header.leader_epoch != first.leader_epoch or segment.must_roll(
                        header,
                        header.last_offset,
                        config,
                        wall_ms,
                        pending_bytes=size,
                        pending_timestamp=first.max_timestamp,
                    ):
                        break
                    count += 1
                    size += header.size
                written = headers[:count]
                with view[end : end + size] as run:
                    segment.append_all(run, written, config)
                end += size
                self.log_end_offset = written[-1].next_offset
                producers = self.producers
                producers.log_was_empty = False
                steady_ms = self.steady_ms()
                position = end - size
                for header in written:
                    if header.producer_id >= 0:
                        if header.attributes & CONTROL:
                            self._end_transaction(segment, view, position, header, header.base_offset)
                        else:
                            producers.update(header, header.base_offset, steady_ms)
                    position += header.size
                del headers[:count]
        if wrong is not None:
            raise wrong
        return end

    def _end_transaction(
        self, segment: Segment, data: Buffer, position: int, header: BatchHeader, offset: int
    ) -> None:
        """A control batch of a producer was appended to the segment."""
        marker = marker_in(data, position)
        if marker is not None:
            aborted = self.producers.end_transaction(header, marker, offset, self.steady_ms())
            if aborted is not None:
                segment.add_aborted(aborted)

    def begin_epoch(self, epoch: int) -> None:
        """This replica was elected: its leader epoch begins at the end of the log. Nothing is written."""
        self.epochs.begin(epoch, self.log_end_offset)

    def _make_ready(
        self, header: BatchHeader, base_offset: int, last_offset: int, leader_epoch: int, wall_ms: int
    ) -> Segment:
        """Return the segment that a batch goes into, rolling and beginning the epoch if needed."""
        items = self._segments.items
        if self._producers is None:
            # Cheap now. At the first roll it would require reading the whole segment.
            _ = self.producers
        if not items:
            self._add_segment()
        segment = items[-1]
        if segment.must_roll(header, last_offset, self._config, wall_ms):
            self._roll()
            segment = items[-1]
        if leader_epoch != self._epoch:
            assert self._may_append(leader_epoch), (leader_epoch, self.epochs.entries)
            self.epochs.assign(leader_epoch, base_offset)
            self._epoch = leader_epoch
        return segment

    def _may_append(self, leader_epoch: int) -> bool:
        """Whether no batch in the log has a later epoch."""
        if leader_epoch != self._epoch and leader_epoch < self.epochs.latest:
            # The epoch checkpoint has no checksum, so it may be wrong. The batches have one: ask them.
            self.epochs.replace(epochs_of(self._segments, self._segments.items))
            return leader_epoch >= self.epochs.latest
        return True

    def _epochs_from_batches(self) -> list[tuple[int, int]]:
        try:
            return epochs_of(self._segments, self._segments.items)
        except CorruptLog:
            # A read of the damaged batch will report it and have the replica repaired. This is only a lookup.
            return []

    def _add_segment(self) -> None:
        """Begin a segment at the end of the log."""
        if not self._segments.items:
            self._files.make_directory(self.directory)
            self._durability.made_directory()
            self.epochs.found_directory()
        self._segments.add(self.log_end_offset)
        self._durability.changed()
        self._reader.rolled(self.log_end_offset)

    def _roll(self, *, durable_snapshot: bool = False) -> None:
        completed = self._segments.items[-1]
        completed.seal()
        self._write_snapshot(durable=durable_snapshot)
        self._add_segment()
        completed.unload()
        self.has_rolled = True
        self._snapshots.drop_old()

    def _write_snapshot(self, *, durable: bool = False) -> None:
        # Loading a snapshot keeps its producers for a while, so leave out the expired ones.
        self.producers.expire(self.steady_ms())
        self._snapshots.write(self.log_end_offset, self.producers, durable=durable)

    @property
    def producers(self) -> ProducerStates:
        """The state of idempotent producers.

        Raises:
            CorruptLog: some batches cannot be read. Raised once; after that the state is that of the other batches.
        """
        if self._producers is None:
            self._producers, damage = producers_at(
                self._segments, self._snapshots, self.log_end_offset, self.steady_ms()
            )
            self._producers.log_was_empty = self.log_end_offset == 0
            if damage is not None:
                raise damage
        return self._producers

    def steady_ms(self) -> int:
        """The wall time when the log was opened plus the monotonic time since. It never jumps."""
        return self._wall_offset_ms + self._clock.now_ms()

    # Making durable

    @property
    def recovery_point(self) -> int:
        """Exclusive: everything below is durable. Never above ``log_end_offset``."""
        return self._durability.recovery_point

    def prepare_flush(self) -> tuple[int, Callable[[], None]]:
        """Return (offset, work for a worker thread). Once it has run, everything below the offset is durable.

        Call ``flushed`` with the offset when the work is done. When the work raises, the directory must not be
        used any more: fsync reports an error only once, so it is unknown what the kernel failed to write.
        """
        offset = self.log_end_offset
        work = self._durability.prepare(offset)
        self.has_rolled = False
        return offset, work

    def flushed(self, offset: int) -> None:
        """The work of the ``prepare_flush`` that returned this offset is done."""
        self._durability.flushed(offset)

    # Reading

    def read(self, offset: int, bytes_max: int, ceiling: int, *, at_least_one: bool) -> FileRange | None:
        """Read whole batches from the one that holds ``offset``: up to ``bytes_max`` bytes, below ``ceiling``.

        None when there is nothing to read, and when the first batch is larger than ``bytes_max``, unless
        ``at_least_one``. A read never crosses a segment's end.

        Raises:
            OffsetOutOfRange: the offset is before the log's start or after its end.
            CorruptLog: the bytes on disk are not the batches that were written, from the error's ``offset`` on.
        """
        if offset >= self.log_end_offset or offset < self.log_start_offset:
            if offset == self.log_end_offset:
                return None
            raise OffsetOutOfRange(offset)
        if offset >= ceiling:
            return None
        try:
            return self._reader.find(offset, bytes_max, ceiling, self.log_end_offset, at_least_one)
        except WrongIndex as wrong:
            self._segments.reindex(wrong.segment)
            return self.read(offset, bytes_max, ceiling, at_least_one=at_least_one)
        except CorruptBatch as error:
            raise damaged(self._segments.items[self._segments.place_of(offset)], str(error)) from error

    def offset_for_timestamp(self, timestamp: int) -> TimestampedOffset | None:
        """The first record with this timestamp or a later one."""
        return first_from(self._segments, timestamp, self.log_start_offset)

    def latest_timestamp(self) -> TimestampedOffset | None:
        """The first record with the largest timestamp (ListOffsets with timestamp -3)."""
        return newest(self._segments, self.log_start_offset)

    # Transactions

    def last_stable_offset(self, high_watermark: int) -> int:
        """Exclusive: all transactions with records below it have ended, with markers below the high watermark.

        Never below the log's start: DeleteRecords and retention also remove records of open transactions.

        Raises:
            CorruptLog: as ``producers``.
        """
        producers = self._producers
        if producers is None:
            producers = self.producers
        transactions = producers.transactions
        if high_watermark < transactions.known_from:
            self._look_back(producers, high_watermark)
        return max(self.log_start_offset, transactions.last_stable_offset(high_watermark))

    def committed(self, high_watermark: int) -> None:
        """The high watermark has moved: forget the transactions whose markers are below it."""
        producers = self._producers
        if producers is not None and producers.transactions.has_ended:
            producers.transactions.last_stable_offset(high_watermark)

    def _look_back(self, producers: ProducerStates, high_watermark: int) -> None:
        """Find the transactions that ended at the high watermark or after it, below the producers' snapshot.

        A restarted replica needs this while its high watermark is behind the snapshot that it loaded.
        """
        if producers.has_known_transactions:
            # Damage in these batches was reported when the producers were loaded, or is when they are read.
            replayed, _ = producers_at(
                self._segments,
                self._snapshots,
                self.log_end_offset,
                self.steady_ms(),
                snapshot_max=high_watermark,
            )
            producers.transactions.take_ended_from(replayed.transactions)
        producers.transactions.known_from = min(producers.transactions.known_from, high_watermark)

    def aborted_transactions(self, offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions that overlap the offsets from one up to another, sorted by first offset.

        Complete only below the last stable offset.

        Raises:
            CorruptLog: an index must be rebuilt, and its batches are damaged.
        """
        return aborted_between(
            self._segments, self._snapshots, offset, end_offset, self.log_end_offset, self.steady_ms()
        )

    def end_offset_of(self, found: FileRange) -> int:
        """The offset after the last batch that ``read`` found, or a later one if it was not the latest read."""
        return self._reader.end_offset_of(found, self.log_end_offset)

    # Compaction

    def cleanable(self, high_watermark: int, wall_ms: int | None) -> list[Source]:
        """The segments that may be compacted now. Raises OSError."""
        if len(self._segments.items) < 2:
            return []
        return cleanable(
            self._segments.items,
            min(high_watermark, self.last_stable_offset(high_watermark)),
            self._config,
            self._newest_ms,
            wall_ms,
        )

    def _newest_ms(self, segment: Segment) -> int:
        newest_ms = self._segments.newest_timestamp(segment)
        return newest_ms if newest_ms >= 0 else self._files.modified_ms(segment.path)

    @property
    def first_dirty_offset(self) -> int:
        """Exclusive: everything below was compacted at least once."""
        return min(self.log_end_offset, max(self.log_start_offset, self.swapping.state.first_dirty_offset))

    @property
    def committed_before(self) -> int:
        """Exclusive: everything below is committed, as far as compaction tells."""
        return self.swapping.state.committed_before

    def due_for_cleaning(self, high_watermark: int, wall_ms: int | None) -> list[Source]:
        """The segments that may be compacted, if enough of them is dirty. Raises OSError."""
        sources = self.cleanable(high_watermark, wall_ms)
        first_dirty = self.first_dirty_offset
        oldest_dirty = next((source for source in sources if source.end_offset > first_dirty), None)
        if oldest_dirty is None:
            return []
        dirty_age_ms = 0
        if wall_ms is not None and self._config.max_compaction_lag_ms < NEVER_MS:
            segment = self._segments.items[self._segments.place_of(oldest_dirty.base_offset)]
            first_ms = self._segments.look(segment, _first_timestamp)
            dirty_age_ms = wall_ms - first_ms if first_ms >= 0 else 0
        return sources if is_due(sources, first_dirty, self._config, dirty_age_ms) else []

    def prepare_cleaning(
        self,
        high_watermark: int,
        wall_ms: int | None,
        *,
        drop_below: int,
        table_bytes: int,
        load_factor: float,
        latest_ms: int | None = None,
    ) -> CleaningJob | None:
        """The job that compacts this log, for another process; None when it is not due. Raises OSError.

        ``wall_ms`` and ``latest_ms`` are the earliest and the latest time that it may be now.
        """
        sources = self.due_for_cleaning(high_watermark, wall_ms)
        if not sources:
            return None
        # Stored with the first swap.
        state = self.swapping.state
        state.committed_before = max(state.committed_before, high_watermark)
        return CleaningJob(
            self.directory,
            tuple(sources),
            self.first_dirty_offset,
            tuple(self.aborted_transactions(sources[0].base_offset, sources[-1].end_offset)),
            {
                producer_id: ActiveProducer(
                    state.epoch, frozenset(batch.last_offset for batch in state.batches)
                )
                for producer_id, state in self.producers.items()
            },
            wall_ms,
            drop_below,
            self._config,
            table_bytes,
            load_factor,
            latest_ms,
        )

    def swap(self, group: CleanedGroup) -> bool:
        """Put a cleaned segment in its place; false when the log was cut since. Raises OSError."""
        paths = self.swapping.swap(group)
        if paths is None:
            return False
        self._reader.forget()
        self.pending_deletes += paths
        self._durability.changed()
        return True

    # Shortening

    def truncate_to(self, offset: int) -> None:
        """Remove everything from the batch that holds ``offset`` on, or from a damaged batch before it.

        Until the next flush a power failure may undo the truncation. That brings back the removed batches, but
        never after batches that were appended since: those have a later epoch, and recovery rejects an earlier
        epoch after a later one. (Or they are the same batches: a damaged log that was fetched again.)
        """
        self._reader.forget()
        self.swapping.cut()
        if offset >= self.log_end_offset:
            # Nothing to remove, but an epoch may have begun here that the leader does not know. Also, the
            # recovery point of a log that recovery cut is lowered only now, because it is the trace of the damage.
            self._warn_of_cut(self.log_end_offset)
            self.epochs.truncate_from_end(self.log_end_offset)
            self._epoch = NO_EPOCH
            return
        segments = self._segments
        position = 0
        place = segments.place_of(offset)
        if place >= 0:
            segments.load(segments.items[place])
            # The batch is removed as a whole.
            position, offset = segments.items[place].locate_cut(offset)
        self._warn_of_cut(offset)
        self.swapping.ends_at(offset)
        self.pending_deletes += segments.drop_behind(offset)
        if segments.items:
            active, wall_ms = segments.activate(), self._clock.wall_ms()
            try:
                active.truncate(position, self._config, wall_ms)
            except CorruptBatch:
                # There is damage before the cut. The index search skipped over it.
                position, offset = active.locate_damage()
                self._warn_of_cut(offset)
                self.swapping.ends_at(offset)
                active.truncate(position, self._config, wall_ms)
            if active.aborted is not None:
                active.aborted.cut(offset)
            self.log_end_offset = offset
        else:
            self.log_end_offset = offset
            self._add_segment()
        self.log_start_offset = min(self.log_start_offset, offset)
        self._durability.truncated(offset)
        self.epochs.truncate_from_end(offset)
        self._epoch = NO_EPOCH
        self._snapshots.drop_above(offset)
        self._producers = None

    def start_over_at(self, offset: int, epoch: int | None = None) -> None:
        """Drop everything; the log begins and ends here.

        For a follower whose end lies before its leader's start, and for a metadata log whose beginning was
        replaced by a snapshot; ``epoch`` is that of the last record in the snapshot.

        A crash in between leaves the beginning of the old log, an empty log, or the new one. The epochs are
        removed first, because no batch in the new log could contradict them, and no file is created before the
        removal of the old ones is durable.
        """
        self._reader.forget()
        self.swapping.started_over()
        if not self._segments.items and offset == self.log_end_offset == 0:
            self.epochs.start_over(offset, NO_EPOCH)
            return
        self._warn_of_cut(offset)
        if self._segments.items or self._snapshots.offsets:
            self.epochs.remove()
            self._snapshots.drop_above(-1)
            self._files.sync_directory(self.directory)
            self.pending_deletes += self._segments.drop_behind(-1)
            self._files.sync_directory(self.directory)
        self._epoch = NO_EPOCH
        self._producers = None
        self.log_start_offset = self.log_end_offset = offset
        self._durability.started_over(offset)
        try:
            self._add_segment()
        except OSError as error:
            # On a full disk the next append creates the segment. Until then a crash leaves an empty log.
            if error.errno not in NO_ROOM:
                raise
        self.epochs.start_over(offset, NO_EPOCH if epoch is None else epoch)

    def _warn_of_cut(self, offset: int) -> None:
        if self.before_cut is not None:
            self.before_cut(offset)

    def delete_before(self, offset: int, *, frees_last: bool = False) -> None:
        """Raise the start of the log (DeleteRecords) and drop the segments wholly before it.

        The last segment is dropped only if ``frees_last`` is set.

        Raises:
            OffsetOutOfRange: the offset is after the end of the log.
        """
        if offset > self.log_end_offset:
            raise OffsetOutOfRange(offset)
        if offset > self.log_start_offset:
            items = self._segments.items
            if frees_last and offset == self.log_end_offset and items and items[-1].measure():
                # Otherwise the last segment would keep its space until the next roll.
                self._roll_to_empty()
            self.log_start_offset = offset
            self._drop_oldest(max(0, self._segments.place_of(offset)))

    def expire(self, wall_ms: int | None, ceiling: int) -> int:
        """Remove segments past ``retention.ms`` or ``retention.bytes``, but none reaching beyond ``ceiling``.

        Without ``wall_ms``, by size only. Returns the number removed. Idle producers are expired too.
        """
        if self._producers is not None:
            self._producers.expire(self.steady_ms())
        segments = self._segments

        def age_ms(segment: Segment) -> int:
            newest_ms = segments.newest_timestamp(segment)
            assert wall_ms is not None
            return wall_ms - (newest_ms if newest_ms >= 0 else self._files.modified_ms(segment.path))

        config = self._config if wall_ms is not None else replace(self._config, retention_ms=KEEP)
        count = count_expired(segments.items, self.log_end_offset, ceiling, config, age_ms)
        if count and count == len(segments.items) and not self._roll_to_empty():
            count -= 1
        if count == 0:
            return 0
        self.log_start_offset = max(self.log_start_offset, segments.items[count].base_offset)
        self._drop_oldest(count)
        return count

    def _roll_to_empty(self) -> bool:
        """Roll to an empty segment, whose name preserves the log end offset; false when the disk is full.

        The producer snapshot needs a little space; dropping the old segments then frees much more.
        """
        while True:
            try:
                # The batches that it could be rebuilt from are about to be removed.
                self._roll(durable_snapshot=True)
                break
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if not self.give_room():
                    return False
        # The new segment must be durable before the removal of the old ones is.
        self._files.sync_directory(self.directory)
        return True

    def _drop_oldest(self, count: int) -> None:
        if count:
            self.swapping.cut()
            self.pending_deletes += self._segments.drop_oldest(count)
            self._durability.changed()
        self.epochs.truncate_from_start(self.log_start_offset)

    # State

    @property
    def size_bytes(self) -> int:
        return self._segments.size_bytes

    @property
    def first_base_offset(self) -> int:
        """Where the first segment begins; the log may begin later."""
        items = self._segments.items
        return items[0].base_offset if items else self.log_start_offset

    @property
    def begins_with_segment(self) -> bool:
        """Whether the log start offset follows from the file names alone."""
        items = self._segments.items
        return not items or items[0].base_offset == self.log_start_offset

    def check(self) -> None:
        """Assert the invariants. Reads the whole log: for tests and simulation."""
        assert 0 <= self.log_start_offset <= self.log_end_offset, (self.log_start_offset, self.log_end_offset)
        assert 0 <= self.recovery_point <= self.log_end_offset, (self.recovery_point, self.log_end_offset)
        segments = self._segments
        segments.check(self.log_start_offset, self.log_end_offset)
        self._reader.check(self.log_start_offset)
        self.epochs.check(self.log_start_offset, self.log_end_offset)
        self.producers.check_invariants(self.log_end_offset)
        check_transactions(segments, self.producers, self.log_end_offset)
        assert self._snapshots.newest <= self.log_end_offset, self._snapshots.offsets


def _first_timestamp(segment: Segment) -> int:
    return segment.first_timestamp


def _give_none() -> bool:
    return False
