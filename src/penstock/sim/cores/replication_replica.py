"""One simulated replica: a list for a log, and a minimal shell around the real replication core.

It does what the hosted partition of a broker does, in the same order: compare epochs before a fetch counts,
record an epoch at the election, ask before truncating. Mutants override one of its methods.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, TypeAlias

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import EpochEndOffset, PartitionData
from penstock.replication.events import NO_EPOCH, Append, Assignment, StartOver, Truncate
from penstock.replication.follower import truncation_offset
from penstock.replication.partition import Partition, Truncation
from penstock.sim.report import Violation

if TYPE_CHECKING:
    from penstock.sim.cores.replication import World
    from penstock.sim.cores.replication_node import Node

# (leader epoch, value)
Entry: TypeAlias = tuple[int, int]
ENTRIES_PER_FETCH = 8


class Slice:
    """The records field of a response: the core only needs its length."""

    __slots__ = ("base_offset", "entries")

    def __init__(self, base_offset: int, entries: list[Entry]) -> None:
        self.base_offset = base_offset
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)


class Replica:
    def __init__(self, world: World, node: Node, index: int) -> None:
        self.world = world
        self.node = node
        self.index = index
        self.key = (bytes(15) + bytes([index + 1]), index)
        # Survives a crash. Entries that are not synced do not survive a loss of power.
        self.log: list[Entry] = []
        self.epochs: list[Entry] = []
        self.synced = 0
        # Lost in every restart.
        self.core: Partition = self.new_core(0)
        self.waiters: list[tuple[int, int]] = []
        self.is_flushing = False
        # The high watermark up to which the checkers have followed this core.
        self.checked = 0

    def new_core(self, high_watermark: int) -> Partition:
        return self.world.partition_type(
            self.node.id,
            live=self.node.live,
            lag_max_ms=self.world.lag_max_ms,
            min_isr=self.node.min_isr,
            high_watermark=high_watermark,
        )

    # Life

    def restarted(self, *, has_lost_power: bool) -> None:
        if has_lost_power:
            self.cut(self.synced)
            # The entry of an election without records was never written.
            self.epochs = [
                (epoch, start)
                for epoch, start in self.epochs
                if start < len(self.log) and self.log[start][0] == epoch
            ]
        hint = self.world.random.randint(0, min(self.core.high_watermark, len(self.log)))
        self.core = self.new_core(hint)
        self.waiters = []
        self.is_flushing = False
        self.checked = 0

    def flush(self) -> None:
        if self.world.is_flushed and not self.is_flushing and self.synced < len(self.log):
            self.is_flushing = True
            self.world.later(self.world.random.randint(1, 15), self.flushed, self.node.life, len(self.log))

    def flushed(self, life: int, end_offset: int) -> None:
        if life != self.node.life:
            return
        self.is_flushing = False
        self.synced = max(self.synced, min(end_offset, len(self.log)))
        if self.core.is_leader:
            self.core.appended(self.synced)
            self.leader_moved()
        elif self.synced == len(self.log):
            self.node.follow(self)
        self.flush()

    def counted(self) -> int:
        return self.synced if self.world.is_flushed else len(self.log)

    def position(self) -> tuple[int, int]:
        """The offset to fetch from, and the epoch of the record before it."""
        return self.counted(), self.epochs[-1][0] if self.epochs else NO_EPOCH

    @property
    def is_ready(self) -> bool:
        """Whether the whole log counts, so that the next fetch may report it."""
        return not self.world.is_flushed or self.synced == len(self.log)

    # The leader

    def assigned(self, assignment: Assignment) -> None:
        core = self.core
        epoch, was_leader = core.leader_epoch, core.is_leader
        if not core.assign(
            assignment, end_offset=len(self.log), now_ms=self.world.now_ms, counted_end=self.counted()
        ):
            self.world.counts["refused assignments"] += 1
            return
        if core.leader_epoch != epoch:
            if was_leader:
                self.waiters = []
            if core.is_leader:
                self.world.elected(self)
                self.begin_epoch(core.leader_epoch)
        if core.is_leader:
            self.leader_moved()
            self.node.maybe_propose(self)
        self.flush()
        self.node.follow(self)

    def begin_epoch(self, epoch: int) -> None:
        self.assign_epoch(epoch, len(self.log))

    def produce(self, value: int, *, acks_all: bool) -> None:
        core = self.core
        if not core.is_leader or (acks_all and len(core.isr) < core.min_isr):
            return
        self.log.append((core.leader_epoch, value))
        self.assign_epoch(core.leader_epoch, len(self.log) - 1)
        if acks_all:
            self.waiters.append((len(self.log), value))
        self.flush()
        if not self.world.is_flushed:
            core.appended(len(self.log))
        self.leader_moved()

    def leader_moved(self) -> None:
        """Acknowledge writes and wake fetches after a possible change of the log or the high watermark."""
        self.world.watermark_moved(self)
        high_watermark = self.core.high_watermark
        waiters = self.waiters
        while waiters and waiters[0][0] <= high_watermark:
            offset, value = waiters.pop(0)
            self.world.acknowledged(self, offset, value)
        self.node.wake()

    def serve(
        self, replica: int, broker_epoch: int, epoch: int, offset: int, last_epoch: int, counts: bool
    ) -> PartitionData:
        """Answer a follower's fetch."""
        data = PartitionData(partition_index=self.index, high_watermark=-1, log_start_offset=-1)
        core = self.core
        if not core.is_leader:
            data.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif epoch != core.leader_epoch:
            is_old = epoch < core.leader_epoch
            data.error_code = ErrorCode.FENCED_LEADER_EPOCH if is_old else ErrorCode.UNKNOWN_LEADER_EPOCH
        else:
            data.log_start_offset = 0
            diverging = self.divergence(offset, last_epoch)
            if diverging is not None:
                data.diverging_epoch = diverging
                data.high_watermark = core.high_watermark
            elif offset > len(self.log):
                data.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            else:
                if counts:
                    data.error_code = self.count(replica, broker_epoch, offset)
                if data.error_code == ErrorCode.NONE:
                    data.high_watermark = core.high_watermark
                    entries = self.log[offset : offset + ENTRIES_PER_FETCH]
                    data.records = Slice(offset, entries)  # type: ignore[assignment]
        return data

    def count(self, replica: int, broker_epoch: int, offset: int) -> ErrorCode:
        return self.core.fetched_by(replica, broker_epoch, offset, len(self.log), self.world.now_ms)

    def divergence(self, offset: int, last_epoch: int) -> EpochEndOffset | None:
        if last_epoch < 0:
            return None
        epoch, end_offset = self.end_offset_for(last_epoch)
        if end_offset < 0:
            return EpochEndOffset(epoch=0, end_offset=0) if not self.log else None
        if epoch < last_epoch or end_offset < offset:
            return EpochEndOffset(epoch=epoch, end_offset=end_offset)
        return None

    # The follower

    def append(self, effect: Append) -> None:
        records = effect.records
        if records:
            assert isinstance(records, Slice)
            if records.base_offset != len(self.log):
                raise Violation(f"{self}: appending at {records.base_offset}")
            for entry in records.entries:
                self.assign_epoch(entry[0], len(self.log))
                self.log.append(entry)
            self.flush()
        self.core.learned(effect.high_watermark, len(self.log))
        self.world.watermark_moved(self)

    def truncate(self, effect: Truncate) -> None:
        offset = truncation_offset(effect.epoch, effect.end_offset, self.end_offset_for, len(self.log))
        self.cut_to(offset)

    def cut_to(self, offset: int) -> None:
        if self.core.may_truncate(offset) is Truncation.REFUSED:
            raise Violation(f"{self}: told to truncate to {offset}, below the high watermark")
        if offset < len(self.log):
            self.world.counts["truncations"] += 1
        self.cut(offset)
        self.core.truncated(offset)
        self.checked = min(self.checked, offset)

    def start_over(self, effect: StartOver) -> None:
        raise Violation(f"{self}: nothing is ever deleted here, but it was told to start over at {effect.at}")

    # The log

    def cut(self, offset: int) -> None:
        del self.log[offset:]
        self.epochs = [entry for entry in self.epochs if entry[1] < offset]
        self.synced = min(self.synced, offset)

    def assign_epoch(self, epoch: int, start: int) -> None:
        if not self.epochs or self.epochs[-1][0] != epoch:
            self.epochs = [entry for entry in self.epochs if entry[0] < epoch and entry[1] < start]
            self.epochs.append((epoch, start))

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """Like ``LeaderEpochs.end_offset_for`` of the real log."""
        if not self.epochs:
            return -1, -1
        place = bisect_right(self.epochs, epoch, key=_epoch_of)
        if place == len(self.epochs):
            return (epoch, len(self.log)) if self.epochs[-1][0] == epoch else (-1, -1)
        return (self.epochs[place - 1][0] if place else epoch), self.epochs[place][1]

    def __repr__(self) -> str:
        return f"{self.core!r} log={self.log} epochs={self.epochs} synced={self.synced}"


def _epoch_of(entry: Entry) -> int:
    return entry[0]
