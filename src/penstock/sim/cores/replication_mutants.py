"""Planted bugs of replication: each breaks one rule on purpose.

A simulator that finds nothing may be blind. Every mutant must be found within a number of seeds; the number shows
how sharp the simulator is. They are subclasses that override one rule, so that the product itself has no switch
for being wrong.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import EpochEndOffset, FetchRequest, FetchResponse, PartitionData
from penstock.replication.events import NO_EPOCH, Assignment, Effect, IsrProposal, PartitionKey
from penstock.replication.follower import Fetcher
from penstock.replication.partition import UNKNOWN_BROKER_EPOCH, UNKNOWN_OFFSET, Partition, _Follower
from penstock.sim.cores.replication import World
from penstock.sim.cores.replication_controller import ModelController
from penstock.sim.cores.replication_replica import Replica

# Trap 1: truncation by high watermark (before KIP-101).


class _TruncatesToWatermark(Replica):
    def assigned(self, assignment: Assignment) -> None:
        is_new = assignment.leader_epoch > self.core.leader_epoch
        super().assigned(assignment)
        if is_new and not self.core.is_leader:
            self.cut_to(self.core.high_watermark)
            self.node.follow(self)

    def position(self) -> tuple[int, int]:
        return self.counted(), NO_EPOCH


class TruncateToHighWatermark(World):
    replica_type = _TruncatesToWatermark


# Trap 2: an elected leader that writes nothing leaves no trace of its epoch (KIP-279).


class _ForgetsItsElection(Replica):
    def begin_epoch(self, epoch: int) -> None:
        pass

    def divergence(self, offset: int, last_epoch: int) -> EpochEndOffset | None:
        if self.epochs and last_epoch > self.epochs[-1][0]:
            # Asked for an unknown epoch, it can only return the end of its log.
            return (
                None
                if offset <= len(self.log)
                else EpochEndOffset(epoch=last_epoch, end_offset=len(self.log))
            )
        return super().divergence(offset, last_epoch)


class LeaderDoesNotRecordItsEpoch(World):
    replica_type = _ForgetsItsElection


# Trap 4: a follower assumes that a leader it has followed before still has the same log (KAFKA-7164).


class _TrustsAKnownLeader(Fetcher):
    def assign(
        self,
        key: PartitionKey,
        leader_epoch: int,
        offset: int,
        last_epoch: int,
        log_start_offset: int = 0,
        *,
        is_in_sync: bool = True,
        is_throttled: bool = False,
    ) -> None:
        known = self.__dict__.setdefault("known", {})
        if key in known:
            last_epoch = NO_EPOCH
        known[key] = None
        super().assign(
            key,
            leader_epoch,
            offset,
            last_epoch,
            log_start_offset,
            is_in_sync=is_in_sync,
            is_throttled=is_throttled,
        )


class ReconcileSkippedWithAKnownLeader(World):
    fetcher_type = _TrustsAKnownLeader


# Trap 5: a stale response is applied.


class _TakesAnyResponse(Fetcher):
    def answered(self, request: FetchRequest, response: FetchResponse | None, now_ms: int) -> list[Effect]:
        if response is not None and request is not self._outstanding and not response.error_code:
            return list(self._effects(response, now_ms))
        return super().answered(request, response, now_ms)


class StaleResponseApplied(World):
    fetcher_type = _TakesAnyResponse


# Trap 7: the high watermark moves although too few replicas are in sync, past the eligible leaders.


class _NeverFreezes(Partition):
    def _advance(self) -> None:
        self._may_commit = True
        super()._advance()
        self._may_commit = self.has_enough and not self.elr


class WatermarkMovesBelowMinIsr(World):
    partition_type = _NeverFreezes


class _ForgivesUncleanShutdown(ModelController):
    def register(self, broker: int, *, is_unclean: bool, now_ms: int) -> int:
        return super().register(broker, is_unclean=False, now_ms=now_ms)


class UncleanShutdownStaysEligible(World):
    controller_type = _ForgivesUncleanShutdown


# Trap 8: fetches of a broker's earlier incarnation count for its present one (KIP-903).


class _IgnoresBrokerEpochs(Partition):
    def fetched_by(self, replica: int, broker_epoch: int, *where: Any, **more: Any) -> ErrorCode:
        follower = self._followers.get(replica)
        if follower is not None:
            follower.broker_epoch = broker_epoch
        return super().fetched_by(replica, broker_epoch, *where, **more)

    def _may_join(self, follower: _Follower) -> bool:
        live = self._live(follower.broker)
        return live is not None and follower.end_offset >= max(self.high_watermark, self.epoch_start_offset)

    def broker_epoch_of(self, broker: int) -> int:
        # The controller does not compare this value.
        return UNKNOWN_BROKER_EPOCH


class StaleBrokerEpochAccepted(World):
    partition_type = _IgnoresBrokerEpochs


# Trap 9: races of the ISR.


class _ShrinksAtOnce(Partition):
    def proposal(self, now_ms: int) -> IsrProposal | None:
        proposal = super().proposal(now_ms)
        if proposal is not None:
            self._count()
        return proposal

    def _count(self) -> None:
        super()._count()
        if self._in_flight is not None:
            staying = [broker for broker, _ in self._in_flight.isr]
            self._counting = [follower for follower in self._counting if follower.broker in staying]
            self._advance()

    def check(self) -> None:
        pass


class ShrinkCountsAtOnce(World):
    partition_type = _ShrinksAtOnce


class _ExpandsLate(Partition):
    def _count(self) -> None:
        flight, unresolved = self._in_flight, self._unresolved
        self._in_flight, self._unresolved = None, {}
        super()._count()
        self._in_flight, self._unresolved = flight, unresolved

    def check(self) -> None:
        pass


class ExpansionCountsWhenCommitted(World):
    partition_type = _ExpandsLate


class _TakesSilenceForRefusal(Partition):
    def answered(
        self, proposal: IsrProposal, error: int | None, assignment: Assignment | None, now_ms: int
    ) -> None:
        super().answered(proposal, error, assignment, now_ms)
        if self.is_leader and self._in_flight is None:
            self._unresolved = {}
            self._count()


class SilenceIsRefusal(World):
    partition_type = _TakesSilenceForRefusal


class _JoinsBeforeEpochStart(Partition):
    def _may_join(self, follower: _Follower) -> bool:
        return (
            follower.end_offset >= self.high_watermark
            and follower.end_offset != UNKNOWN_OFFSET
            and self._live(follower.broker) == follower.broker_epoch
        )


class JoinerNeedNotReachEpochStart(World):
    partition_type = _JoinsBeforeEpochStart


# Trap 10: a retry repeats an outdated proposal.


class _RepeatsProposals(Partition):
    __slots__ = ("_again",)

    def answered(
        self, proposal: IsrProposal, error: int | None, assignment: Assignment | None, now_ms: int
    ) -> None:
        if proposal is self._in_flight and error != ErrorCode.NONE:
            self._again = proposal
        super().answered(proposal, error, assignment, now_ms)

    def proposal(self, now_ms: int) -> IsrProposal | None:
        fresh = super().proposal(now_ms)
        old: IsrProposal | None = getattr(self, "_again", None)
        if fresh is None or old is None:
            return fresh
        del self._again
        # Sent with the present epochs, so that it is accepted.
        self._in_flight = old._replace(leader_epoch=self.leader_epoch, partition_epoch=self.partition_epoch)
        return self._in_flight

    def check(self) -> None:
        pass


class RetriedProposalIsStale(World):
    partition_type = _RepeatsProposals


class _ComparesNoPartitionEpoch(ModelController):
    def is_old(self, proposal: IsrProposal, partition: Assignment) -> bool:
        return False


class PartitionEpochNotCompared(World):
    controller_type = _ComparesNoPartitionEpoch


# Trap 7: the leader uses the settings it knows, and ignores the controller's eligible leaders.


class TrustsItsSettings(Partition):
    def _count(self) -> None:
        eligible, self.elr = self.elr, ()
        super()._count()
        self.elr = eligible

    def check(self) -> None:
        pass


class CommitsUnderAnOldMinimum(World):
    partition_type = TrustsItsSettings


# Trap 11: an outdated assignment is accepted.


class _BelievesAnyAssignment(Partition):
    def assign(
        self, assignment: Assignment, *, end_offset: int, now_ms: int, counted_end: int | None = None
    ) -> bool:
        if assignment.leader_epoch < self.leader_epoch:
            self.leader_epoch = assignment.leader_epoch - 1
        self.partition_epoch = min(self.partition_epoch, assignment.partition_epoch - 1)
        return super().assign(assignment, end_offset=end_offset, now_ms=now_ms, counted_end=counted_end)


class StaleAssignmentAccepted(World):
    partition_type = _BelievesAnyAssignment


# Trap 16: in flushed mode a fetch reports what is written, not what is on the disk.


class _CountsBeforeFlush(Replica):
    def position(self) -> tuple[int, int]:
        return len(self.log), super().position()[1]

    @property
    def is_ready(self) -> bool:
        return True


class FetchCountsBeforeFlush(World):
    replica_type = _CountsBeforeFlush


# A fetch that is told to truncate counts all the same.


class _CountsDivergingFetches(Replica):
    def serve(
        self, replica: int, broker_epoch: int, epoch: int, offset: int, last_epoch: int, counts: bool
    ) -> PartitionData:
        if self.core.is_leader and epoch == self.core.leader_epoch and counts:
            self.count(replica, broker_epoch, offset)
        return super().serve(replica, broker_epoch, epoch, offset, last_epoch, counts)


class DivergingFetchCounts(World):
    replica_type = _CountsDivergingFetches


MUTANTS: tuple[type[World], ...] = (
    TruncateToHighWatermark,
    LeaderDoesNotRecordItsEpoch,
    ReconcileSkippedWithAKnownLeader,
    StaleResponseApplied,
    WatermarkMovesBelowMinIsr,
    UncleanShutdownStaysEligible,
    StaleBrokerEpochAccepted,
    ShrinkCountsAtOnce,
    ExpansionCountsWhenCommitted,
    SilenceIsRefusal,
    JoinerNeedNotReachEpochStart,
    RetriedProposalIsStale,
    PartitionEpochNotCompared,
    CommitsUnderAnOldMinimum,
    StaleAssignmentAccepted,
    FetchCountsBeforeFlush,
    DivergingFetchCounts,
)
