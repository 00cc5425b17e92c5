"""The group coordinators of this broker, one per partition of ``__consumer_offsets``, and their log.

A coordinator decides; this shell appends the decision's changes to its partition and lets the answers go when
they are committed, in the order of the decisions. A decision without changes waits behind one with changes,
because it may speak of what that one decided.

Until compaction exists, a partition that has grown large against what it holds is written anew: the present
state is appended behind everything, and then the log is told to begin there.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.broker.partitions import HostedPartition
from penstock.decision import Decision
from penstock.environment import Timer
from penstock.groups import changes as group_changes
from penstock.groups.changes import Change
from penstock.groups.coordinator import Coordinator
from penstock.groups.settings import GroupSettings
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


class GroupPartition:
    """One coordinator and the partition it remembers in."""

    def __init__(self, broker: Broker, hosted: HostedPartition, settings: GroupSettings) -> None:
        self._environment = broker.environment
        self._hosted = hosted
        self.coordinator = Coordinator(settings, broker.environment.random)
        # Decisions that are not committed, in order: the offset to wait for (0: only for those before it).
        self._uncommitted: deque[tuple[int, Callable[[], None]]] = deque()
        self._timer: Timer | None = None
        self._timer_ms = 0
        self._is_rewriting = False
        self._replay()
        clock = self._environment.clock
        self.coordinator.loaded(clock.now_ms(), clock.wall_ms())
        self._arm()

    def execute(
        self,
        decision: Decision[Change],
        answer: Callable[[Any], None] | None = None,
        unavailable: Any = None,
    ) -> None:
        """Make a decision durable, then let its answers go: ``answer`` gets the response if there is one.

        When the disk refuses, the decision is undone and ``answer`` gets ``unavailable`` instead.
        """
        commit_offset = 0
        if decision.changes:
            try:
                commit_offset = self._append(decision.changes)
            except OSError:
                self._give_up(decision, answer, unavailable)
                return
        self._arm()

        def committed() -> None:
            self.coordinator.committed(decision)
            for call, response in decision.replies:
                call.answer(response)
            if answer is not None and decision.response is not None:
                answer(decision.response)

        if not commit_offset and not self._uncommitted:
            committed()
            return
        self._uncommitted.append((commit_offset, committed))
        if commit_offset:
            self._hosted.when_committed(commit_offset, lambda _: self._committed(commit_offset))

    def rewrite_if_large(self) -> None:
        """Replace a long history by the state it led to, a slice per turn."""
        log = self._hosted.log
        records = log.log_end_offset - log.log_start_offset
        if (
            self._is_rewriting
            or log.size_bytes < REWRITE_BYTES_MIN
            or records < REWRITE_RATIO * (self.coordinator.change_count + 1)
        ):
            return
        self._is_rewriting = True
        self._rewrite(log.log_end_offset, self.coordinator.group_ids())

    def _rewrite(self, begin: int, groups: list[str]) -> None:
        """Append the state of these groups, and of those after them in later turns; then begin there.

        Each group is written as it is at that moment, so nothing newer can lie before it.
        """
        alive: list[Change] = []
        while groups and len(alive) < CHANGES_PER_SLICE:
            state = self.coordinator.snapshot_of(groups.pop())
            if state is None:
                self._is_rewriting = False  # in the middle of something: another time
                return
            alive += state
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

        # The new copy must be on the disk before the old one may go.
        self._hosted.flush()
        self._hosted.when_committed(self._hosted.log.log_end_offset, committed)

    def _append(self, changes: Iterable[Change]) -> int:
        """The offset that must be committed. Raises OSError."""
        batch = encode_batch(self._encoded(changes))
        if len(batch) > BATCH_BYTES_MAX:
            raise OSError(errno.EFBIG, "a group too large to be stored")
        return self._hosted.append_internal(batch)

    def _encoded(self, changes: Iterable[Change]) -> Iterator[RecordFields]:
        wall_ms = self._environment.clock.wall_ms()
        for change in changes:
            key, value = group_changes.encode(change)
            yield wall_ms, key, value, ()

    def _committed(self, offset: int) -> None:
        waiting = self._uncommitted
        while waiting and waiting[0][0] <= offset:
            waiting.popleft()[1]()

    def _give_up(
        self, decision: Decision[Change], answer: Callable[[Any], None] | None, unavailable: Any
    ) -> None:
        """The disk refused: undo, and tell everyone who was about to hear of it."""
        clock = self._environment.clock
        self.coordinator.failed(decision, clock.now_ms(), clock.wall_ms())
        for call, response in decision.replies:
            response.error_code = ErrorCode.COORDINATOR_NOT_AVAILABLE
            call.answer(response)
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
        if not self._hosted.is_deleted:
            clock = self._environment.clock
            self.execute(self.coordinator.tick(clock.now_ms(), clock.wall_ms()))

    def _replay(self) -> None:
        log = self._hosted.log
        offset = log.log_start_offset
        while offset < log.log_end_offset:
            found = log.read(offset, READ_BYTES, log.log_end_offset, at_least_one=True)
            assert found is not None, "the log ends before its end offset"
            data = found.file.read_at(found.position, found.size)
            for position, header in batches(data):
                # Not compressed: we wrote it, so whatever its size is, that is the most there can be.
                for record in decode_records(data, position, bytes_max=header.size):
                    change = group_changes.decode(record.key or b"", record.value)
                    if change is not None:
                        self.coordinator.apply(change)
                offset = header.next_offset


class Coordinators:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._settings = broker.config.groups
        self._partitions: dict[int, GroupPartition] = {}

    def load(self) -> None:
        """Read back every partition that holds anything, before the first client can ask."""
        for hosted in self._broker.partitions.of_topic(CONSUMER_OFFSETS):
            if hosted.is_open or self._broker.storage.holds(hosted):
                self._try_load(hosted)
        self._rewrite_large()

    def _rewrite_large(self) -> None:
        for partition in self:
            partition.rewrite_if_large()
        self._broker.environment.spawn.later(REWRITE_CHECK_INTERVAL_MS, self._rewrite_large)

    def of(self, group_id: str) -> GroupPartition | None:
        """The coordinator of a group; None while the offsets topic does not exist or cannot be read."""
        hosted = self._broker.partitions.of_topic(CONSUMER_OFFSETS)
        if not hosted:
            return None
        index = group_changes.partition_for(group_id, len(hosted))
        return self._partitions.get(index) or self._try_load(hosted[index])

    def ready(self, then: Callable[[int], None]) -> None:
        """Create the offsets topic if it does not exist, then go on."""
        if self._broker.partitions.of_topic(CONSUMER_OFFSETS):
            then(ErrorCode.NONE)
        else:
            self._broker.create_offsets_topic(then)

    def __iter__(self) -> Iterator[GroupPartition]:
        return iter(list(self._partitions.values()))

    def topics_deleted(self, names: list[str]) -> None:
        if CONSUMER_OFFSETS in names:
            self._partitions.clear()
        clock = self._broker.environment.clock
        for partition in self:
            decision = partition.coordinator.topics_deleted(
                names, now_ms=clock.now_ms(), wall_ms=clock.wall_ms()
            )
            partition.execute(decision)

    def _try_load(self, hosted: HostedPartition) -> GroupPartition | None:
        """None when its log cannot be read: its groups have no coordinator, the others do."""
        try:
            partition = GroupPartition(self._broker, hosted, self._settings)
        except OSError as error:
            self._broker.logger.error("cannot load groups", partition=repr(hosted), error=str(error))
            return None
        self._partitions[hosted.index] = partition
        return partition


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
