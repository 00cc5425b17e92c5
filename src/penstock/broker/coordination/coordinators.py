"""The group coordinators of this broker, one per partition of ``__consumer_offsets``, and their log.

A coordinator decides; this shell appends the decision's changes to its partition and lets the answers go when
they are committed, in the order of the decisions. A decision without changes waits behind one with changes,
because it may speak of what that one decided.

A coordinator exists only while this broker leads its partition, knows what is committed there, and has read
all of it back; before that, whoever asks is told that it is loading. When the leadership goes, everybody who
waits is sent to the next coordinator, which reads the same log.

Until compaction exists, a partition that has grown large against what it holds is written anew: the present
state is appended behind everything, and then the log is told to begin there.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.broker.partition.hosted_partition import Appended, HostedPartition
from penstock.decision import Decision
from penstock.environment import Timer
from penstock.groups import changes as group_changes
from penstock.groups.changes import Change
from penstock.groups.coordinator import Coordinator
from penstock.groups.settings import GroupSettings
from penstock.metadata.image import Image
from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import RecordFields, batches, decode_records, encode_batch

if TYPE_CHECKING:
    from penstock.broker.broker import Broker

READ_BYTES = 1024 * 1024
# Of one decision, nearly all of it one group's members. A larger one is given up, like one that the disk
# refuses; a group of ten thousand ordinary members takes a tenth of this.
BATCH_BYTES_MAX = 32 * 1024 * 1024
# Of one batch of a rewrite; small enough that writing it does not hold up the loop.
REWRITTEN_BYTES = 1024 * 1024
# A log is written anew when it has this many bytes, and this many times as many records as are alive.
REWRITE_BYTES_MIN = 64 * 1024 * 1024
REWRITE_RATIO = 4
REWRITE_CHECK_INTERVAL_MS = 60_000
CHANGES_PER_SLICE = 1_000
# When offsets of deleted topics could not be removed: too few replicas in sync, or a full disk.
RECONCILE_RETRY_MS = 1_000


class GroupPartition:
    """One coordinator and the partition it remembers in."""

    def __init__(self, broker: Broker, hosted: HostedPartition, settings: GroupSettings) -> None:
        self._broker = broker
        self._environment = broker.environment
        self._hosted = hosted
        self._epoch = hosted.leader_epoch
        # While the log is read back. Every commit in it was made by a leader before this one, under metadata
        # older than those that made this broker the leader; so a topic that is not in these is gone for good.
        self._image: Image | None = broker.image
        self.coordinator = Coordinator(settings, broker.environment.random, self._topic_id)
        # Groups whose offsets may belong to topics that are gone.
        self._unreconciled: list[str] = []
        # Decisions that are not committed, in order: the offset to wait for (0: only for those before it).
        # Then what to do when they are, and when they can no longer be.
        self._uncommitted: deque[tuple[int, Callable[[], None], Callable[[], None]]] = deque()
        self._timer: Timer | None = None
        self._timer_ms = 0
        self._is_rewriting = False
        self._has_resigned = False
        # Where the replay has come to; None once it is done.
        self._replayed: int | None = hosted.log.log_start_offset
        # How far it has to come: nothing is appended while the coordinator is loading.
        self._replay_end = hosted.log.log_end_offset

    @property
    def is_loaded(self) -> bool:
        return self._replayed is None

    @property
    def leader_epoch(self) -> int:
        return self._epoch

    def load_some(self) -> bool:
        """Read back a part of the log; whether that was the last. Raises OSError."""
        if self._replayed is not None:
            self._replay_some()
            if self._replayed < self._replay_end:
                return False
            self._replayed = self._image = None
            self.coordinator.loaded(self._environment.clock.now_ms(), self._broker.clocks.stamp_ms())
            self._arm()
            self.topics_deleted()
        return True

    def topics_deleted(self) -> None:
        """Remove the offsets of topics that are gone, a slice per turn, and as often as it takes."""
        is_under_way = bool(self._unreconciled)
        self._unreconciled = self.coordinator.group_ids()
        if not is_under_way:
            self._reconcile()

    def _reconcile(self) -> None:
        if self._has_resigned or not self._unreconciled:
            return
        decision = self.coordinator.reconcile(
            self._unreconciled,
            CHANGES_PER_SLICE,
            now_ms=self._environment.clock.now_ms(),
            wall_ms=self._broker.clocks.stamp_ms(),
        )
        if decision.changes and not self.execute(decision):
            self._unreconciled = self.coordinator.group_ids()
            self._environment.spawn.later(RECONCILE_RETRY_MS, self._reconcile)
        elif self._unreconciled:
            self._environment.spawn.soon(self._reconcile)

    def _topic_id(self, name: str) -> bytes | None:
        topic = (self._image or self._broker.image).topics.get(name)
        return None if topic is None else topic.id

    def resign(self) -> None:
        """Another broker leads the partition, or may: send everybody there."""
        self._has_resigned = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for call, response in self.coordinator.resign().replies:
            call.answer(response)

    def execute(
        self,
        decision: Decision[Change],
        answer: Callable[[Any], None] | None = None,
        unavailable: Any = None,
    ) -> bool:
        """Make a decision durable, then let its answers go: ``answer`` gets the response if there is one.

        When the disk refuses, the decision is undone, ``answer`` gets ``unavailable`` instead, and this returns
        False.
        """
        appended: Appended | None = None
        if decision.changes:
            try:
                appended = self._append(decision.changes)
            except OSError:
                self._give_up(decision, answer, unavailable)
                return False
        self._arm()

        def committed() -> None:
            self.coordinator.committed(decision)
            for call, response in decision.replies:
                call.answer(response)
            if answer is not None and decision.response is not None:
                answer(decision.response)

        def lost() -> None:
            # Perhaps it will be committed by the next leader, perhaps not: the client has to ask there.
            _refuse_replies(decision, ErrorCode.NOT_COORDINATOR)
            if answer is not None and decision.response is not None:
                answer(unavailable)

        if appended is None and not self._uncommitted:
            committed()
            return True
        offset = 0 if appended is None else appended.end_offset
        self._uncommitted.append((offset, committed, lost))
        if appended is not None:
            self._hosted.when_acknowledged(appended, lambda error: self._settled(offset, error), by_all=True)
        return True

    def rewrite_if_large(self) -> None:
        """Replace a long history by the state it led to, a slice per turn."""
        log = self._hosted.log
        records = log.log_end_offset - log.log_start_offset
        if (
            self._is_rewriting
            or self._has_resigned
            or log.size_bytes < REWRITE_BYTES_MIN
            or records < REWRITE_RATIO * (self.coordinator.change_count + 1)
        ):
            return
        self._is_rewriting = True
        self._rewrite(log.log_end_offset, self.coordinator.group_ids())

    def _rewrite(self, begin: int, groups: list[str]) -> None:
        """Append the state of these groups, and of those after them in later turns; then begin there.

        Each group is written as the log has it at that moment, so nothing newer can lie before it.
        """
        if self._has_resigned:
            return
        alive: list[Change] = []
        while groups and len(alive) < CHANGES_PER_SLICE:
            alive += self.coordinator.snapshot_of(groups.pop())
        try:
            for some in _batched(self._encoded(alive)):
                self._hosted.append_internal(encode_batch(some))
        except OSError:
            self._is_rewriting = False  # no room for a second copy; the first one stays
            return
        if groups:
            self._environment.spawn.soon(lambda: self._rewrite(begin, groups))
            return

        def committed(error: ErrorCode) -> None:
            self._is_rewriting = False
            if not error:
                self._hosted.delete_before(begin)

        # The new copy must be on the disks before the old one may go.
        self._hosted.flush()
        end_offset = self._hosted.log.log_end_offset
        copied = Appended(ErrorCode.NONE, end_offset=end_offset, flush_offset=end_offset)
        self._hosted.when_acknowledged(copied, committed, by_all=True)

    def _append(self, changes: Iterable[Change]) -> Appended:
        """Raises OSError, also when there are too few replicas in sync for it to be safe."""
        if not self._hosted.has_enough_replicas:
            raise OSError(errno.EAGAIN, "too few replicas in sync")
        batch = encode_batch(self._encoded(changes))
        if len(batch) > BATCH_BYTES_MAX:
            raise OSError(errno.EFBIG, "a group too large to be stored")
        return self._hosted.append_internal(batch)

    def _encoded(self, changes: Iterable[Change]) -> Iterator[RecordFields]:
        wall_ms = self._broker.clocks.stamp_ms()
        for change in changes:
            key, value = group_changes.encode(change)
            yield wall_ms, key, value, ()

    def _settled(self, offset: int, error: ErrorCode) -> None:
        waiting = self._uncommitted
        while waiting and waiting[0][0] <= offset:
            _, committed, lost = waiting.popleft()
            if error:
                lost()
            else:
                committed()

    def _give_up(
        self, decision: Decision[Change], answer: Callable[[Any], None] | None, unavailable: Any
    ) -> None:
        """The disk refused: undo, and tell everyone who was about to hear of it."""
        self.coordinator.failed(decision, self._environment.clock.now_ms(), self._broker.clocks.stamp_ms())
        _refuse_replies(decision, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._arm()
        if answer is not None and decision.response is not None:
            answer(unavailable)

    def _arm(self) -> None:
        deadline_ms = self.coordinator.next_deadline_ms
        if self._timer is not None:
            if deadline_ms == self._timer_ms:
                return
            self._timer.cancel()
            self._timer = None
        if deadline_ms is not None:
            self._timer_ms = deadline_ms
            delay_ms = max(0, deadline_ms - self._environment.clock.now_ms())
            self._timer = self._environment.spawn.later(delay_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._hosted.is_deleted and not self._has_resigned:
            now_ms, expiry_ms = self._environment.clock.now_ms(), self._broker.clocks.expiry_ms()
            wall_ms = self._broker.clocks.stamp_ms() if expiry_ms is None else expiry_ms
            self.execute(self.coordinator.tick(now_ms, wall_ms, may_expire=expiry_ms is not None))

    def _replay_some(self) -> None:
        offset = self._replayed
        assert offset is not None
        if offset >= self._replay_end:
            return
        # As readers do: damage that is found here is reported, and another replica leads.
        found = self._hosted.read(offset, READ_BYTES, ceiling=self._replay_end, at_least_one=True)
        assert found is not None, "the log ends before its end offset"
        data = found.file.read_at(found.position, found.size)
        for position, header in batches(data):
            # Not compressed: we wrote it, so whatever its size is, that is the most there can be.
            for record in decode_records(data, position, bytes_max=header.size):
                change = group_changes.decode(record.key or b"", record.value)
                if change is not None:
                    self.coordinator.apply(change)
            offset = header.next_offset
        self._replayed = offset


class Coordinators:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._settings = broker.config.groups
        self._partitions: dict[int, GroupPartition] = {}
        broker.environment.spawn.later(REWRITE_CHECK_INTERVAL_MS, self._rewrite_large)

    def role_changed(self, hosted: HostedPartition) -> None:
        """Begin to coordinate, or stop, as the partition's leadership says."""
        self._broker.environment.spawn.soon(lambda: self._follow(hosted))

    def _follow(self, hosted: HostedPartition) -> None:
        known = self._partitions.get(hosted.index)
        # Not by the image that a start knew before: it may lack topics that have been committed to since.
        is_ready = self._broker.membership.are_logs_ready
        leads = is_ready and hosted.is_serving and not hosted.is_deleted
        if known is not None and not (leads and known.leader_epoch == hosted.leader_epoch):
            del self._partitions[hosted.index]
            known.resign()
            known = None
        if leads and known is None:
            try:
                # Opened by whoever leads it, so that what is committed becomes known.
                if hosted.replication.has_established and hosted.index not in self._partitions:
                    self._partitions[hosted.index] = partition = GroupPartition(
                        self._broker, hosted, self._settings
                    )
                    self._load(hosted, partition)
            except OSError as error:
                self._failed_to_load(hosted, error)

    def _load(self, hosted: HostedPartition, partition: GroupPartition) -> None:
        """A slice per turn; the first one now, which mostly is the only one."""
        if self._partitions.get(hosted.index) is not partition:
            return
        try:
            if not partition.load_some():
                self._broker.environment.spawn.soon(lambda: self._load(hosted, partition))
        except OSError as error:
            # Damage is reported, and then it may not be ours any more.
            if self._partitions.get(hosted.index) is partition:
                del self._partitions[hosted.index]
            self._failed_to_load(hosted, error)

    def _failed_to_load(self, hosted: HostedPartition, error: OSError) -> None:
        # Its groups have no coordinator, the others do.
        self._broker.logger.error("cannot load groups", partition=repr(hosted), error=str(error))

    def _rewrite_large(self) -> None:
        for partition in self:
            partition.rewrite_if_large()
        self._broker.environment.spawn.later(REWRITE_CHECK_INTERVAL_MS, self._rewrite_large)

    def of(self, group_id: str) -> GroupPartition | ErrorCode:
        """The coordinator of a group, if it is here and has read back everything."""
        index = self.index_of(group_id)
        if index is None or not self._broker.membership.is_serving():
            return ErrorCode.NOT_COORDINATOR
        partition = self._partitions.get(index)
        if partition is not None and partition.is_loaded:
            return partition
        hosted = self._broker.partitions.get(CONSUMER_OFFSETS, index)
        if hosted is None or not hosted.is_serving:
            return ErrorCode.NOT_COORDINATOR
        # Perhaps nobody has looked yet.
        self._follow(hosted)
        partition = self._partitions.get(index)
        if partition is not None and partition.is_loaded:
            return partition
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS

    def index_of(self, group_id: str) -> int | None:
        """The partition that remembers a group; None while the offsets topic does not exist."""
        topic = self._broker.image.topics.get(CONSUMER_OFFSETS)
        if topic is None:
            return None
        return group_changes.partition_for(group_id, len(topic.partitions))

    def ready(self, then: Callable[[int], None]) -> None:
        """Create the offsets topic if it does not exist, then go on."""
        if CONSUMER_OFFSETS in self._broker.image.topics:
            then(ErrorCode.NONE)
        else:
            self._broker.controller.create_offsets_topic(then)

    def __iter__(self) -> Iterator[GroupPartition]:
        return iter([partition for partition in self._partitions.values() if partition.is_loaded])

    def topics_deleted(self) -> None:
        """The image has fewer topics. A coordinator that is still loading looks when it has loaded."""
        for partition in self:
            partition.topics_deleted()


def _refuse_replies(decision: Decision[Change], error: ErrorCode) -> None:
    for call, response in decision.replies:
        response.error_code = error
        call.answer(response)


def _batched(records: Iterable[RecordFields]) -> Iterator[list[RecordFields]]:
    some: list[RecordFields] = []
    size = 0
    for record in records:
        some.append(record)
        size += len(record[1] or b"") + len(record[2] or b"")
        if size >= REWRITTEN_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
