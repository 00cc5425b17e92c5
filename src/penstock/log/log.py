"""One partition's log: segments on disk, and the offsets where it begins and ends.

Everything here is synchronous and runs on the broker's loop, except the work returned by ``prepare_flush``.
The files are Kafka's own (``names.py``). A log that was closed cleanly opens by looking at names and at the
end of its last segment, which must agree with the snapshot written at closing: that is named after the log's
end. The rest is read when first needed, so that ten thousand idle partitions cost little.

What a newcomer gets wrong: ``append`` returning means "in the page cache", not "durable". Durable is what is
below ``recovery_point``, and that moves only through ``prepare_flush`` and ``flushed``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.environment import NO_ROOM, Buffer, Clock, Environment, FileRange, Files
from penstock.log.config import KEEP, LogConfig
from penstock.log.durability import Durability, sync_once
from penstock.log.epochs import NO_EPOCH, LeaderEpochs
from penstock.log.fetched_batches import first_holding, good_from
from penstock.log.names import DELETED, LOG, SNAPSHOT, offset_of
from penstock.log.producers import ProducerStates
from penstock.log.reading import Reader
from penstock.log.recovery import Recovery, epochs_of, recover
from penstock.log.retention import count_expired
from penstock.log.segment import Segment, WrongIndex
from penstock.log.segments import CorruptLog, Segments, damaged
from penstock.log.snapshots import Snapshots, producers_at
from penstock.log.timestamp_lookup import TimestampedOffset, first_from, newest
from penstock.protocol.records import BatchHeader, CorruptBatch, patch

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
    )

    def __init__(self, files: Files, clock: Clock, directory: str, config: LogConfig) -> None:
        self._files = files
        self._clock = clock
        self._config = config
        self.directory = directory
        # From the monotonic clock to ``steady_ms``.
        self._wall_offset_ms = clock.wall_ms() - clock.now_ms()

        # Exclusive: where the next record goes.
        self.log_end_offset = 0
        # Never above log_end_offset. May lie inside the first segment.
        self.log_start_offset = 0
        # None until the first append.
        self._segments = Segments(files, clock, directory, config)
        self._reader = Reader(self._segments)

        self.epochs = LeaderEpochs(files, directory, self._epochs_from_batches)
        # Of the last batch, when known: what ``epochs`` would say, without asking.
        self._epoch = NO_EPOCH
        self._snapshots = Snapshots(files, directory)
        # None until first asked for.
        self._producers: ProducerStates | None = None

        self._durability = Durability(files, directory, self._segments, self.epochs)
        # A segment was completed since the last flush. The shell flushes it soon, as Kafka does on roll.
        self.has_rolled = False
        # Paths that are no longer part of the log, for the shell to take, and to remove after a delay.
        self.pending_deletes: list[str] = []
        # Called with the offset before the log is cut there: whoever remembers, elsewhere, that it was longer must
        # first remember less.
        self.before_cut: Callable[[int], None] | None = None
        # On a full disk, makes some room for what frees more; false when there is none to be made.
        self.give_room: Callable[[], bool] = lambda: False
        # What the last open found, when it had to look.
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

        ``clean`` means that ``close`` was the last thing that happened to it. Otherwise everything from the
        segment of ``recovery_point`` on is read and checked, and ``recovery`` says what was found.
        ``log_start_offset`` is what the broker's checkpoint remembers of DeleteRecords and retention.
        ``may_cut`` says whether damage may be cut off; a torn tail always is.

        Raises:
            CorruptLog: there is damage that may not be cut off. The files are as they were.
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
        if log.recovery is not None:
            # The checkpoint may be older than the removal of what lay before.
            log.epochs.truncate_from_start(log.log_start_offset)
        return log

    def _list_files(self) -> None:
        for name in self._files.list(self.directory):
            if name.endswith(LOG):
                base_offset = offset_of(name, LOG)
                if base_offset is not None:
                    self._segments.list_one(base_offset)
            elif name.endswith(SNAPSHOT):
                snapshot = offset_of(name, SNAPSHOT)
                if snapshot is not None:
                    self._snapshots.offsets.append(snapshot)
            elif name.endswith(DELETED):
                self.pending_deletes.append(f"{self.directory}/{name}")
        if not self._segments.items:
            # What a crash may have left beside no segment says nothing about an empty log.
            self.epochs.has_directory = False
            self._snapshots.drop_above(-1)

    def _open_clean(self) -> bool:
        """Load the last segment; false when the files contradict what was said about them."""
        active = self._segments.items[-1]
        try:
            self.log_end_offset = active.load(self._config, self._clock.wall_ms())
        except CorruptBatch:
            return False
        self._durability.recovery_point = self.log_end_offset
        # Closing left a snapshot at the end of the log, unless one is there from the roll.
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
        # The names may be as new as the bytes above the recovery point.
        self._durability.made_directory()
        self._durability.recovery_point = recovery_point
        self._durability.truncated(self.log_end_offset)

    def _start_at(self, offset: int) -> None:
        """Begin where the checkpoint says."""
        if offset > self.log_end_offset:
            # What was lost lies before the start anyway. Its offsets were used: they are not used again.
            self.start_over_at(offset)
        self.log_start_offset = offset
        # A crash may have undone their removal.
        stale = self._segments.place_of(offset)
        if stale > 0:
            self.pending_deletes += self._segments.drop_oldest(stale)
            self._durability.changed()

    def seal(self) -> None:
        """Write what a clean open needs; ``close`` does it too.

        A broker that stops seals all its logs, lets the kernel write everything back at once, and closes
        them then: thousands of logs are not made durable one by one.
        """
        if not self._segments.items:
            return
        self._segments.items[-1].seal()
        if self.epochs.is_stale:
            self.epochs.write()
        if self._snapshots.newest != self.log_end_offset:
            self._write_snapshot()
            self._snapshots.drop_old()
            # A clean open goes by its name.
            self._durability.changed()

    def close(self) -> None:
        """Make everything durable, as a clean open trusts it all. The log must not be used afterwards."""
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
        """The directory was renamed because the log is deleted; only reads that are under way go on."""
        for segment in self._segments.items:
            segment.moved(directory)

    def abandon(self) -> None:
        """Let go of the files and write nothing: the log was deleted, or its disk cannot be trusted."""
        self._segments.close()

    # Writing

    def append(self, batch: bytearray | memoryview, header: BatchHeader, leader_epoch: int) -> int:
        """Append one checked batch, giving it its offsets; the offset of its first record.

        Raises:
            OSError: the disk is full or failing; the log is as it was.
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
            producers.update(header, base_offset, self.steady_ms())
        return base_offset

    def append_replicated(self, data: Buffer) -> int:
        """Append batches fetched from the leader, whose offsets and epochs are set; how many bytes.

        A batch at the end that is cut short is left out.

        Raises:
            CorruptBatch: a batch is damaged, or does not continue the log. Those before it were appended.
            OSError: as ``append``; again, some batches may have been appended.
        """
        start = self.log_end_offset
        if start and self.log_start_offset == start:
            base_offset = first_holding(data, start)
            if base_offset is not None:
                # The leader's log begins inside a batch, and batches are copied whole.
                self.start_over_at(base_offset)
                size = self._append_replicated(data)
                self.delete_before(min(start, self.log_end_offset))
                return size
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
                # As many as go into this segment are written together.
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
                for header in written:
                    if header.producer_id >= 0:
                        producers.update(header, header.base_offset, steady_ms)
                del headers[:count]
        if wrong is not None:
            raise wrong
        return end

    def begin_epoch(self, epoch: int) -> None:
        """This replica was elected: its leader epoch begins at the end of the log. Nothing is written."""
        self.epochs.begin(epoch, self.log_end_offset)

    def _make_ready(
        self, header: BatchHeader, base_offset: int, last_offset: int, leader_epoch: int, wall_ms: int
    ) -> Segment:
        """The segment that a batch goes into, with its epoch begun."""
        items = self._segments.items
        if self._producers is None:
            # Cheap now. At the first roll it would mean reading the whole segment.
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
        """Whether no batch in the log is of a later epoch."""
        if leader_epoch != self._epoch and leader_epoch < self.epochs.latest:
            # The checkpoint has no checksum, the batches have: they tell which of us is wrong.
            self.epochs.replace(epochs_of(self._segments, self._segments.items))
            return leader_epoch >= self.epochs.latest
        return True

    def _epochs_from_batches(self) -> list[tuple[int, int]]:
        try:
            return epochs_of(self._segments, self._segments.items)
        except CorruptLog:
            # Whoever reads there will say so, and the replica is made good again. Here somebody merely asks.
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

    def _roll(self) -> None:
        completed = self._segments.items[-1]
        completed.seal()
        self._write_snapshot()
        self._add_segment()
        completed.unload()
        self.has_rolled = True
        self._snapshots.drop_old()

    def _write_snapshot(self) -> None:
        # Producers in it are remembered for a while after the next start.
        self.producers.expire(self.steady_ms())
        self._snapshots.write(self.log_end_offset, self.producers)

    @property
    def producers(self) -> ProducerStates:
        """What idempotent producers have written.

        Raises:
            CorruptLog: some batches cannot be read; said once. After that, it is what the others tell.
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
        """The wall time as it was when the log was opened and the monotonic time since: it never jumps."""
        return self._wall_offset_ms + self._clock.now_ms()

    # Making durable

    @property
    def recovery_point(self) -> int:
        """Exclusive: everything below is durable. Never above ``log_end_offset``."""
        return self._durability.recovery_point

    def prepare_flush(self) -> tuple[int, Callable[[], None]]:
        """(the offset below which all is durable once the work has run, the work, for a worker thread).

        Call ``flushed`` with the offset when the work is done. When it raises, the directory must not be used
        any more: what the kernel failed to write is no longer known (fsync tells only once).
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
        """Whole batches, the first one holding ``offset``: up to ``bytes_max`` bytes, all below ``ceiling``.

        None when there is nothing to read; also when the first batch is larger than ``bytes_max``, unless
        ``at_least_one``. Never more than one segment's worth.

        Raises:
            OffsetOutOfRange: the offset is before the log's start or behind its end.
            CorruptLog: the bytes on disk are not the batches that were written; its ``offset`` says from where on.
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

    # Shortening

    def truncate_to(self, offset: int) -> None:
        """Remove everything from the batch that holds ``offset`` on, or from a damaged one before it.

        A power failure may undo it as long as no flush has followed, and then brings back what was removed,
        never parts of it behind what was appended since: that is of a later epoch, and recovery will not have
        an earlier one behind it. (Or it is what was removed: a damaged log that was fetched again.)
        """
        self._reader.forget()
        if offset >= self.log_end_offset:
            # Nothing to remove, but an epoch may have begun here that the leader does not know; and what recovery
            # has cut was remembered until now, because it tells of the damage.
            self._warn_of_cut(self.log_end_offset)
            self.epochs.truncate_from_end(self.log_end_offset)
            self._epoch = NO_EPOCH
            return
        segments = self._segments
        position = 0
        place = segments.place_of(offset)
        if place >= 0:
            segments.load(segments.items[place])
            # The batch goes as a whole.
            position, offset = segments.items[place].locate_cut(offset)
        self._warn_of_cut(offset)
        self.pending_deletes += segments.drop_behind(offset)
        if segments.items:
            active, wall_ms = segments.activate(), self._clock.wall_ms()
            try:
                active.truncate(position, self._config, wall_ms)
            except CorruptBatch:
                # There is damage before the cut that the index had led past.
                position, offset = active.locate_damage()
                self._warn_of_cut(offset)
                active.truncate(position, self._config, wall_ms)
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

        For a follower whose end lies before its leader's start, and for a metadata log whose beginning is now a
        snapshot; ``epoch`` is that of the last record in the snapshot.

        A crash on the way leaves the beginning of the old log, or an empty one, or the new one: the epochs go
        first, because nothing in the new log could contradict them, and nothing new is made before the removal
        of the old is durable.
        """
        self._reader.forget()
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
            # On a full disk the next append makes it. Until then a crash leaves an empty log.
            if error.errno not in NO_ROOM:
                raise
        self.epochs.start_over(offset, NO_EPOCH if epoch is None else epoch)

    def _warn_of_cut(self, offset: int) -> None:
        if self.before_cut is not None:
            self.before_cut(offset)

    def delete_before(self, offset: int, *, frees_last: bool = False) -> None:
        """Raise the start of the log (DeleteRecords); segments wholly before it go, the last one if asked for.

        Raises:
            OffsetOutOfRange: the offset is behind the end of the log.
        """
        if offset > self.log_end_offset:
            raise OffsetOutOfRange(offset)
        if offset > self.log_start_offset:
            items = self._segments.items
            if frees_last and offset == self.log_end_offset and items and items[-1].measure():
                # Or its last segment would keep its space until there is another.
                self._roll_to_empty()
            self.log_start_offset = offset
            self._drop_oldest(max(0, self._segments.place_of(offset)))

    def expire(self, wall_ms: int | None, ceiling: int) -> int:
        """Remove segments past ``retention.ms`` or ``retention.bytes``, none reaching beyond ``ceiling``.

        Without a time, by size only. Returns how many. Producers that have not written for long are forgotten too.
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
        """Begin a segment whose name alone remembers where the log ends; false when the disk is full.

        It needs some room, for what producers have written, and makes much more.
        """
        while True:
            try:
                self._roll()
                break
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if not self.give_room():
                    return False
        # It must not be lost while the removal of the others is not.
        self._files.sync_directory(self.directory)
        return True

    def _drop_oldest(self, count: int) -> None:
        if count:
            self.pending_deletes += self._segments.drop_oldest(count)
            self._durability.changed()
        self.epochs.truncate_from_start(self.log_start_offset)

    # Looking

    @property
    def size_bytes(self) -> int:
        return self._segments.size_bytes

    @property
    def begins_with_segment(self) -> bool:
        """Whether the names of the files tell where the log begins."""
        items = self._segments.items
        return not items or items[0].base_offset == self.log_start_offset

    @property
    def segment_count(self) -> int:
        return len(self._segments.items)

    def check(self) -> None:
        """Assert what must hold between any two calls. Reads the whole log: for tests and simulation."""
        assert 0 <= self.log_start_offset <= self.log_end_offset, (self.log_start_offset, self.log_end_offset)
        assert 0 <= self.recovery_point <= self.log_end_offset, (self.recovery_point, self.log_end_offset)
        segments = self._segments
        segments.check(self.log_start_offset, self.log_end_offset)
        self._reader.check(self.log_start_offset)
        self.epochs.check(self.log_start_offset, self.log_end_offset)
        self.producers.check_invariants(self.log_end_offset)
        assert self._snapshots.newest <= self.log_end_offset, self._snapshots.offsets
