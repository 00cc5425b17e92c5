"""Planted bugs of the transaction coordinator: each breaks one of its rules on purpose.

Every mutant must be found within a number of seeds, or the simulator is blind to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.decision import Decision
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import EndTxnRequest, EndTxnResponse
from penstock.sim.cores.transactions import World
from penstock.sim.cores.transactions_partition import SimPartition
from penstock.transactions.changes import (
    NOBODY,
    Change,
    Identity,
    Partition,
    State,
    TransactionStored,
)
from penstock.transactions.coordinator import MarkersDue, TransactionCoordinator
from penstock.transactions.transactional_producer import TransactionalProducer


class _Unchecked(TransactionCoordinator):
    """Its own check would find the bug; the world has to."""

    def check(self) -> None:
        pass


class _Rewriting(_Unchecked):
    """Decides something else in place of what the real one decided."""

    def rewrite(self, old: TransactionStored, new: TransactionStored) -> TransactionStored:
        """What the mutant decides instead of ``new``."""
        return new

    def _decide(
        self, producer: TransactionalProducer, change: Change, decision: Decision[Change], now_ms: int
    ) -> None:
        old = producer.decided
        if old is not None and isinstance(change, TransactionStored):
            change = self.rewrite(old, change)
        super()._decide(producer, change, decision, now_ms)


# Markers are sent when the end is decided, not when it is committed.


class _Hasty(_Unchecked):
    def take_markers(self) -> list[MarkersDue]:
        return []

    def hasty_markers(self) -> list[MarkersDue]:
        due = []
        for producer in self._producers.values():
            stored = producer.decided
            if stored is not None and stored.state.is_prepared and producer.deadline_ms >= 0:
                # Once.
                producer.deadline_ms = -1
                self._end_number += 1
                producer.end_number = self._end_number
                due.append(
                    MarkersDue(
                        producer.end_number,
                        producer.id,
                        *stored.producer,
                        stored.state.is_commit,
                        tuple(sorted(stored.partitions)),
                        True,
                    )
                )
        return due


class MarkersBeforeTheLog(World):
    core_type = _Hasty

    def _execute(self, decision: Decision[Change], answer: Any) -> None:
        super()._execute(decision, answer)
        core = self.core
        assert isinstance(core, _Hasty)
        for due in core.hasty_markers():
            for name in due.partitions:
                self._send_marker(due, name, self._epoch)


# Trap 13: the epoch stays when a transaction of v2 ends.


class _KeepsEpochs(_Rewriting):
    def rewrite(self, old: TransactionStored, new: TransactionStored) -> TransactionStored:
        is_end = old.state is State.ONGOING and new.state.is_prepared and new.previous != NOBODY
        return replace(new, producer=old.producer, previous=NOBODY) if is_end else new

    def end(self, request: EndTxnRequest, version: int, **options: Any) -> Decision[Change]:
        decision = super().end(request, version, **options)
        stored = self._producers[request.transactional_id].decided
        if decision.response.error_code == ErrorCode.NONE and stored is not None:
            decision.response = EndTxnResponse(
                producer_id=stored.producer.id, producer_epoch=stored.producer.epoch
            )
        return decision


class EpochsStay(World):
    core_type = _KeepsEpochs


# The producer whose transaction is aborted for another one is not fenced.


class _DoesNotFence(_Rewriting):
    def rewrite(self, old: TransactionStored, new: TransactionStored) -> TransactionStored:
        is_fence = new.state is State.PREPARE_ABORT and new.previous == NOBODY
        return replace(new, producer=old.producer) if is_fence else new


class NewProducersDoNotFence(World):
    core_type = _DoesNotFence


# A new producer gets the present epoch.


class _GivesTheSameEpoch(_Rewriting):
    def rewrite(self, old: TransactionStored, new: TransactionStored) -> TransactionStored:
        is_new = new.state is State.EMPTY and new.previous == NOBODY
        return replace(new, producer=old.producer) if is_new else new

    def init_producer_id(self, *arguments: Any, **options: Any) -> Decision[Change]:
        decision = super().init_producer_id(*arguments, **options)
        for change in decision.changes:
            if isinstance(change, TransactionStored) and change.state is State.EMPTY:
                decision.response.producer_id, decision.response.producer_epoch = change.producer
        return decision


class EpochsAreShared(World):
    core_type = _GivesTheSameEpoch


# Trap 15, KAFKA-20357: the previous identity is not in the log.


class _Forgetful(_Unchecked):
    def apply(self, change: Change) -> None:
        if isinstance(change, TransactionStored):
            change = replace(change, previous=NOBODY)
        super().apply(change)


class LostAnswersAreForgotten(World):
    core_type = _Forgetful


# KAFKA-20310: the next producer id is not in the log.


class _ForgetsTheNext(_Unchecked):
    def apply(self, change: Change) -> None:
        if isinstance(change, TransactionStored):
            change = replace(change, next_producer_id=-1)
        super().apply(change)


class NextProducerIdsAreForgotten(World):
    core_type = _ForgetsTheNext


# Trap 14, KAFKA-18464: the identity is looked at although markers are being written.


class _ChecksEpochsFirst(_Unchecked):
    def end(self, request: EndTxnRequest, version: int, **options: Any) -> Decision[Change]:
        producer = self._producers.get(request.transactional_id)
        stored = None if producer is None else producer.decided
        identity = Identity(request.producer_id, request.producer_epoch)
        if stored is not None and stored.state.is_prepared and identity != stored.producer:
            return Decision(response=EndTxnResponse(error_code=ErrorCode.PRODUCER_FENCED))
        return super().end(request, version, **options)


class IdentitiesAreCheckedFirst(World):
    core_type = _ChecksEpochsFirst


# Trap 14, KAFKA-20785: a commit after the coordinator's own abort looks like a repeated request.


class _RepeatsAnyAnswer(_Unchecked):
    def end(self, request: EndTxnRequest, version: int, **options: Any) -> Decision[Change]:
        producer = self._producers.get(request.transactional_id)
        stored = None if producer is None else producer.decided
        if stored is not None and stored.state is State.COMPLETE_ABORT:
            identity = Identity(request.producer_id, request.producer_epoch)
            if identity == stored.previous:
                request = EndTxnRequest(
                    transactional_id=request.transactional_id,
                    producer_id=request.producer_id,
                    producer_epoch=request.producer_epoch,
                    committed=False,
                )
        return super().end(request, version, **options)


class AbortedIsToldAsCommitted(World):
    core_type = _RepeatsAnyAnswer


# Trap 13: nothing is verified. A late batch of a classic client opens a transaction that nobody ends.


class _VerifiesEverything(_Unchecked):
    def verify_partitions(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: Iterable[Partition]
    ) -> dict[Partition, ErrorCode] | ErrorCode:
        return dict.fromkeys(partitions, ErrorCode.NONE)


class NothingIsVerified(World):
    core_type = _VerifiesEverything


# A transaction is complete with its first marker.


class _Sloppy(_Unchecked):
    def markers_written(
        self, due: MarkersDue, partitions: Iterable[Partition], **times: Any
    ) -> Decision[Change]:
        return super().markers_written(due, due.partitions, **times)


class OneMarkerIsEnough(World):
    core_type = _Sloppy


# The next coordinator does not write the markers.


class _DoesNotResume(_Unchecked):
    def loaded(self, now_ms: int, wall_ms: int) -> None:
        super().loaded(now_ms, wall_ms)
        self._due.clear()


class EndsAreNotResumed(World):
    core_type = _DoesNotResume


# Trap 21: no transaction times out.


class _WaitsForEver(_Unchecked):
    def _abort_timed_out(self, decision: Decision[Change], now_ms: int, wall_ms: int) -> bool:
        return True


class NothingTimesOut(World):
    core_type = _WaitsForEver


# KIP-1228: a late marker ends the next transaction, which has its epoch.


class _LaxPartition(SimPartition):
    is_strict = False


class LateMarkersCount(World):
    partition_type = _LaxPartition


MUTANTS: tuple[type[World], ...] = (
    MarkersBeforeTheLog,
    EpochsStay,
    NewProducersDoNotFence,
    EpochsAreShared,
    LostAnswersAreForgotten,
    NextProducerIdsAreForgotten,
    IdentitiesAreCheckedFirst,
    AbortedIsToldAsCommitted,
    NothingIsVerified,
    OneMarkerIsEnough,
    EndsAreNotResumed,
    NothingTimesOut,
    LateMarkersCount,
)
