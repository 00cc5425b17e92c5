"""A transaction coordinator: the core behind one partition of ``__transaction_state``.

The shell has one TransactionCoordinator per partition that it leads, and drives it like a group coordinator
(``groups/coordinator.py``). It replays the log with ``apply`` and ``loaded``. Then requests come in and decisions
go out, whose responses are sent when the decision and all before it are committed. A decision that cannot be
written is ``failed``, before anything else is decided. ``verify_partitions``, ``describe`` and
``list_transactions`` are different: they return plain answers that may be sent at once.

Besides, there are markers to write. After ``loaded``, and after every ``committed``, the shell calls
``take_markers``. It writes each of them, retries until it succeeds, and calls ``markers_written`` for partitions as
they are done. The last one completes the transaction. A partition that no longer exists counts as written. Markers
are never due before the decision to end the transaction is committed: otherwise the next coordinator could decide
the opposite. After a failover all markers of a transaction are due again; partitions accept a marker twice.

A change is the whole state of an id, and at most one of them is uncommitted, except that partitions may be added
while the completion of the last transaction or another addition is not committed. Other requests get
CONCURRENT_TRANSACTIONS until it is, and also while markers are being written; clients retry.

Two requests may need a new producer id: see ``needs_producer_id``. The shell gets one first and passes it in; it is
wasted if it turns out not to be needed.

``now_ms`` is monotonic and drives time-outs; ``wall_ms`` is wall time, for records and for the expiry of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from penstock.decision import Decision
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest, InitProducerIdResponse
from penstock.protocol.messages.transactions import (
    END_TXN_V2,
    DescribedTransaction,
    EndTxnRequest,
    EndTxnResponse,
    ListedTransaction,
)
from penstock.transactions import transitions
from penstock.transactions.administration import Filters, described, listed
from penstock.transactions.changes import (
    CLASSIC,
    NO_EPOCH,
    NO_ID,
    V2,
    Change,
    Identity,
    Partition,
    State,
    TransactionRemoved,
    TransactionStored,
)
from penstock.transactions.outcomes import (
    Answer,
    Outcome,
    created,
    ended,
    ended_v2,
    identity_error,
    init_refusal,
    initialized,
)
from penstock.transactions.settings import (
    ABORTED_MAX,
    ABORTED_PARTITIONS_MAX,
    COMPLETE_RETRY_MS,
    EXPIRED_MAX,
    IDS_MAX,
    TransactionSettings,
)
from penstock.transactions.transactional_producer import TransactionalProducer

# Before this version of EndTxn, a fenced producer is told INVALID_PRODUCER_EPOCH.
END_KNOWS_FENCED = 2


class MarkersDue(NamedTuple):
    # Which end of a transaction it is: two of a classic client may be equal in everything else.
    number: int
    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_commit: bool
    partitions: tuple[Partition, ...]
    # The epoch is higher than that of the transaction's batches: v2, or a fence. So a transaction that a partition
    # has open in this very epoch is a later one, and must not be ended by a marker that comes late (KIP-1228).
    is_v2: bool


class TransactionCoordinator:
    """``partition_exists``: whether the committed metadata has a partition.

    During the replay of the log, that must be the metadata as of the beginning of the replay.
    """

    def __init__(self, settings: TransactionSettings, partition_exists: Callable[[str, int], bool]) -> None:
        self._settings = settings
        self._partition_exists = partition_exists
        self._producers: dict[str, TransactionalProducer] = {}
        # Ids whose decided state is Ongoing. Looked through every abort_timed_out_interval_ms.
        self._open: dict[str, TransactionalProducer] = {}
        # Ids whose prepared state was committed since take_markers was called last.
        self._due: dict[str, TransactionalProducer] = {}
        self._end_number = 0
        # Ids with all markers written, but the end of the transaction could not be.
        self._incomplete: dict[str, TransactionalProducer] = {}
        # When to look through each of these. Only valid if there is something to look for.
        self._abort_ms = 0
        self._complete_ms = 0
        # When to look for expired ids.
        self._expiry_ms = 0

    # Requests of producers

    def needs_producer_id(self, transactional_id: str, *, is_init: bool) -> bool:
        """Whether an InitProducerId, or else an EndTxn, will need a new producer id."""
        producer = self._producers.get(transactional_id)
        if producer is None:
            return is_init and len(self._producers) < IDS_MAX
        stored = producer.decided
        return stored is not None and transitions.is_exhausted(stored.producer)

    def init_producer_id(
        self, request: InitProducerIdRequest, *, new_producer_id: int | None, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        """The response is an InitProducerIdResponse."""
        decision: Decision[Change] = Decision()
        answer: Answer = init_refusal(request, self._settings)
        if answer is ErrorCode.NONE:
            answer = self._init(request, new_producer_id, decision, now_ms, wall_ms)
        decision.response = (
            InitProducerIdResponse(producer_id=answer.id, producer_epoch=answer.epoch)
            if isinstance(answer, Identity)
            else InitProducerIdResponse(error_code=answer, producer_id=NO_ID, producer_epoch=NO_EPOCH)
        )
        return decision

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[Partition],
        *,
        is_v2: bool,
        now_ms: int,
        wall_ms: int,
    ) -> Decision[Change]:
        """Add partitions to a transaction, and begin it if there is none. The response is an ErrorCode.

        The shell has checked that the partitions exist, in metadata at least as new as when it became coordinator.
        """
        decision: Decision[Change] = Decision()
        producer = self._producers.get(transactional_id)
        identity = Identity(producer_id, producer_epoch)
        if producer is None:
            error = ErrorCode.INVALID_PRODUCER_ID_MAPPING if transactional_id else ErrorCode.INVALID_REQUEST
            decision.response = error
            return decision
        stored = producer.decided
        # Before the identity is looked at: while the last transaction ends, a v2 client may be ahead of us, with a
        # producer id that is only the next one.
        if stored is None or stored.state.is_prepared:
            decision.response = ErrorCode.CONCURRENT_TRANSACTIONS
            return decision
        decision.response = error = identity_error(stored, identity)
        added = frozenset(partitions)
        is_known = stored.state is State.ONGOING and added <= stored.partitions
        if error is ErrorCode.NONE and added and not is_known:
            if stored.state is not State.ONGOING:
                producer.deadline_ms = now_ms + stored.timeout_ms
            generation = V2 if is_v2 else CLASSIC
            self._decide(producer, transitions.added(stored, added, generation, wall_ms), decision, now_ms)
        return decision

    def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Iterable[Partition],
    ) -> dict[Partition, ErrorCode] | ErrorCode:
        """Whether partitions are in the open transaction of a producer. The answer may be sent at once.

        A partition counts when its addition is committed and the end of the transaction is not even decided.
        """
        producer = self._producers.get(transactional_id)
        if producer is None:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING if transactional_id else ErrorCode.INVALID_REQUEST
        stored = producer.decided
        if stored is None or stored.state.is_prepared:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        error = identity_error(stored, Identity(producer_id, producer_epoch))
        if error is not ErrorCode.NONE:
            return error
        confirmed = producer.confirmed
        is_confirmed = (
            confirmed is not None
            and confirmed.state is State.ONGOING
            and confirmed.producer == stored.producer
        )
        safe = confirmed.partitions if confirmed is not None and is_confirmed else frozenset()
        return {
            partition: ErrorCode.NONE
            if partition in safe
            else ErrorCode.CONCURRENT_TRANSACTIONS
            if partition in stored.partitions
            else ErrorCode.TRANSACTION_ABORTABLE
            for partition in partitions
        }

    def end(
        self,
        request: EndTxnRequest,
        version: int,
        *,
        new_producer_id: int | None,
        now_ms: int,
        wall_ms: int,
    ) -> Decision[Change]:
        """Commit or abort. The response is an EndTxnResponse."""
        decision: Decision[Change] = Decision()
        producer = self._producers.get(request.transactional_id)
        stored = None if producer is None else producer.decided
        identity = Identity(request.producer_id, request.producer_epoch)
        is_v2 = version >= END_TXN_V2
        answer: Answer
        if producer is None:
            is_named = bool(request.transactional_id)
            answer = ErrorCode.INVALID_PRODUCER_ID_MAPPING if is_named else ErrorCode.INVALID_REQUEST
        elif stored is None:
            answer = ErrorCode.CONCURRENT_TRANSACTIONS
        elif not is_v2 and (error := identity_error(stored, identity)):
            answer = error
        elif producer.uncommitted or stored.state.is_prepared:
            # In v2 before the identity is looked at (KAFKA-18464): the client may be ahead of us, with a producer
            # id that is only the next one.
            answer = ErrorCode.CONCURRENT_TRANSACTIONS
        else:
            outcome = (
                ended_v2(stored, identity, request.committed, new_producer_id, wall_ms)
                if is_v2
                else ended(stored, request.committed, wall_ms)
            )
            answer = self._carry_out(producer, outcome, decision, now_ms)
        if isinstance(answer, Identity):
            decision.response = EndTxnResponse(producer_id=answer.id, producer_epoch=answer.epoch)
        else:
            if answer is ErrorCode.PRODUCER_FENCED and version < END_KNOWS_FENCED:
                answer = ErrorCode.INVALID_PRODUCER_EPOCH
            decision.response = EndTxnResponse.for_error(request, version, answer)
        return decision

    # Markers

    def take_markers(self) -> list[MarkersDue]:
        """The markers that became due since the last call."""
        due = [_markers(producer) for producer in self._due.values() if producer.unwritten]
        self._due.clear()
        return due

    def markers_due(self, transactional_id: str) -> MarkersDue | None:
        """The markers of a transaction that are still to be written, for a retry."""
        producer = self._producers.get(transactional_id)
        return None if producer is None or not producer.unwritten else _markers(producer)

    def is_due(self, due: MarkersDue, partition: Partition) -> bool:
        """Whether a marker that was taken is still to be written."""
        producer = self._producers.get(due.transactional_id)
        return (
            producer is not None
            and producer.end_number == due.number
            and producer.unwritten is not None
            and partition in producer.unwritten
        )

    def markers_written(
        self, due: MarkersDue, partitions: Iterable[Partition], *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        """Some markers of a transaction are committed, or their partitions no longer exist. The last ones complete.

        May be called twice for a partition, and late.
        """
        decision: Decision[Change] = Decision()
        producer = self._producers.get(due.transactional_id)
        if producer is not None and producer.unwritten and producer.end_number == due.number:
            for partition in partitions:
                producer.unwritten.pop(partition, None)
            self._complete_if_written(producer, decision, now_ms, wall_ms)
        return decision

    def reconcile(
        self, transactional_ids: list[str], changes_max: int, *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        """No markers are written to partitions that no longer exist, after a load or a deletion.

        Finished ids are removed from the end of the list. At most ``changes_max`` transactions are completed.
        """
        decision: Decision[Change] = Decision()
        while transactional_ids and len(decision.changes) < changes_max:
            producer = self._producers.get(transactional_ids.pop())
            if producer is None or not producer.unwritten:
                continue
            for partition in list(producer.unwritten):
                if not self._partition_exists(*partition):
                    del producer.unwritten[partition]
            self._complete_if_written(producer, decision, now_ms, wall_ms)
        return decision

    # Administration

    def list_transactions(
        self,
        states: Collection[str] = (),
        producer_ids: Collection[int] = (),
        *,
        duration_ms: int = -1,
        wall_ms: int,
        matches: Callable[[str], object] | None = None,
    ) -> list[ListedTransaction]:
        """The ids that pass all filters; an empty filter passes everything. From committed state.

        ``duration_ms``: only transactions open for longer. ``matches``: by transactional id.
        """
        wanted = Filters(frozenset(states), frozenset(producer_ids), duration_ms, matches)
        return [
            listed(stored)
            for producer in self._producers.values()
            if (stored := producer.visible) is not None and wanted.pass_(stored, wall_ms)
        ]

    def describe(self, transactional_id: str) -> DescribedTransaction:
        """From committed state."""
        producer = self._producers.get(transactional_id)
        return described(transactional_id, None if producer is None else producer.visible)

    def is_open(self, producer_id: int) -> bool:
        """Whether a producer has a transaction here that is open or being ended, as decided."""
        for producer in self._producers.values():
            stored = producer.decided
            if stored is not None and stored.producer.id == producer_id and not stored.state.is_idle:
                return True
        return False

    # Time

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call ``tick`` next; changes with every call."""
        deadline_ms = self._expiry_ms
        if self._open:
            deadline_ms = min(deadline_ms, self._abort_ms)
        if self._incomplete:
            deadline_ms = min(deadline_ms, self._complete_ms)
        return deadline_ms

    def tick(self, now_ms: int, wall_ms: int, *, may_expire: bool = True) -> Decision[Change]:
        """``may_expire``: whether the wall time is reliable enough to remove ids by age."""
        decision: Decision[Change] = Decision()
        if self._incomplete and now_ms >= self._complete_ms:
            for producer in list(self._incomplete.values()):
                self._complete_if_written(producer, decision, now_ms, wall_ms)
        if self._open and now_ms >= self._abort_ms:
            is_done = self._abort_timed_out(decision, now_ms, wall_ms)
            self._abort_ms = now_ms + (self._settings.abort_timed_out_interval_ms if is_done else 0)
        if now_ms >= self._expiry_ms:
            is_done = not may_expire or self._expire(decision, now_ms, wall_ms)
            interval_ms = self._settings.remove_expired_interval_ms
            self._expiry_ms = now_ms + (interval_ms if is_done else COMPLETE_RETRY_MS)
        return decision

    # The log

    def apply(self, change: Change) -> None:
        """Replay a committed change, before ``loaded``."""
        if isinstance(change, TransactionRemoved):
            self._producers.pop(change.transactional_id, None)
            return
        producer = self._producers.get(change.transactional_id)
        if producer is None:
            producer = self._producers[change.transactional_id] = TransactionalProducer(
                change.transactional_id
            )
        producer.confirmed = change

    def loaded(self, now_ms: int, wall_ms: int) -> None:
        """The log has been replayed. Open transactions have the rest of their time; decided ones are completed."""
        for producer in self._producers.values():
            stored = producer.confirmed
            assert stored is not None
            producer.restore(stored)
            if stored.state is State.ONGOING:
                # Neither more than a whole time-out nor in the past, whatever the clocks say.
                left_ms = stored.start_timestamp + stored.timeout_ms - wall_ms
                producer.deadline_ms = now_ms + min(max(left_ms, 0), stored.timeout_ms)
            elif producer.unwritten:
                self._make_due(producer)
            self._settle(producer, now_ms, now_ms)
        self._expiry_ms = now_ms + self._settings.remove_expired_interval_ms

    def committed(self, decision: Decision[Change]) -> None:
        """The changes of a decision are committed. Called in the order of the decisions."""
        for change in decision.changes:
            producer = self._producers[change.transactional_id]
            producer.confirm(change)
            if producer.is_blank:
                del self._producers[producer.id]
            elif producer.unwritten:
                self._make_due(producer)

    def failed(self, decision: Decision[Change], now_ms: int, wall_ms: int) -> None:
        """The changes of a decision are not in the log and never will be. Called before the next decision."""
        for change in decision.changes:
            producer = self._producers[change.transactional_id]
            producer.revert(change)
            if producer.is_blank:
                del self._producers[producer.id]
            self._settle(producer, now_ms, now_ms + COMPLETE_RETRY_MS)
            if isinstance(change, TransactionStored) and change.state is State.PREPARE_ABORT:
                # If there are more to abort than one decision holds, that is not tried again at once.
                self._abort_ms = max(self._abort_ms, now_ms + COMPLETE_RETRY_MS)

    def all_keys(self) -> list[str]:
        """The transactional ids."""
        return list(self._producers)

    def resign(self) -> Decision[Change]:
        """Stop leading the partition. No request waits here."""
        return Decision()

    def check(self) -> None:
        """Assert every invariant, in tests and simulation."""
        owners: dict[int, str] = {}
        for transactional_id, producer in self._producers.items():
            assert producer.id == transactional_id
            producer.check()
            stored = producer.decided
            is_open = stored is not None and stored.state is State.ONGOING
            assert (self._open.get(producer.id) is producer) == is_open
            assert (self._incomplete.get(producer.id) is producer) == producer.is_written
            assert producer.id not in self._due or producer.unwritten is not None
            if stored is not None:
                for id in {stored.producer.id, stored.next_producer_id} - {NO_ID}:
                    assert owners.setdefault(id, producer.id) == producer.id, "two ids share a producer id"
        for some in (self._open, self._due, self._incomplete):
            assert all(self._producers.get(id) is producer for id, producer in some.items())

    def _init(
        self,
        request: InitProducerIdRequest,
        new_producer_id: int | None,
        decision: Decision[Change],
        now_ms: int,
        wall_ms: int,
    ) -> Answer:
        transactional_id = request.transactional_id or ""
        producer = self._producers.get(transactional_id)
        if producer is None:
            if len(self._producers) >= IDS_MAX:
                return ErrorCode.COORDINATOR_NOT_AVAILABLE
            if new_producer_id is None:
                return ErrorCode.CONCURRENT_TRANSACTIONS
            outcome = created(request, new_producer_id, wall_ms)
            producer = self._producers[transactional_id] = TransactionalProducer(transactional_id)
        else:
            stored = producer.decided
            if stored is None or producer.uncommitted or stored.state.is_prepared:
                return ErrorCode.CONCURRENT_TRANSACTIONS
            outcome = initialized(stored, request, new_producer_id, wall_ms)
        return self._carry_out(producer, outcome, decision, now_ms)

    def _carry_out(
        self, producer: TransactionalProducer, outcome: Outcome, decision: Decision[Change], now_ms: int
    ) -> Answer:
        if outcome.change is not None:
            self._decide(producer, outcome.change, decision, now_ms)
        return outcome.answer

    def _make_due(self, producer: TransactionalProducer) -> None:
        self._end_number += 1
        producer.end_number = self._end_number
        self._due[producer.id] = producer

    def _complete_if_written(
        self, producer: TransactionalProducer, decision: Decision[Change], now_ms: int, wall_ms: int
    ) -> None:
        if producer.is_written:
            assert producer.confirmed is not None
            self._due.pop(producer.id, None)
            self._decide(producer, transitions.completed(producer.confirmed, wall_ms), decision, now_ms)

    def _abort_timed_out(self, decision: Decision[Change], now_ms: int, wall_ms: int) -> bool:
        """Abort transactions that are open for too long; False if there may be more of them."""
        late = [
            producer
            for producer in self._open.values()
            if producer.deadline_ms <= now_ms and not producer.uncommitted
        ]
        partition_count = 0
        for count, producer in enumerate(late):
            if count == ABORTED_MAX or partition_count >= ABORTED_PARTITIONS_MAX:
                return False
            assert producer.confirmed is not None
            partition_count += len(producer.confirmed.partitions)
            aborted = transitions.fenced(producer.confirmed, may_recover=True, wall_ms=wall_ms)
            self._decide(producer, aborted, decision, now_ms)
        return True

    def _expire(self, decision: Decision[Change], now_ms: int, wall_ms: int) -> bool:
        """Remove ids that were not used for long; False if there may be more of them."""
        oldest_ms = wall_ms - self._settings.id_expiration_ms
        count = 0
        for producer in self._producers.values():
            stored = producer.confirmed
            if (
                stored is not None
                and not producer.uncommitted
                and stored.state.is_idle
                and stored.update_timestamp <= oldest_ms
            ):
                self._decide(producer, TransactionRemoved(producer.id), decision, now_ms)
                count += 1
                if count == EXPIRED_MAX:
                    return False
        return True

    def _decide(
        self, producer: TransactionalProducer, change: Change, decision: Decision[Change], now_ms: int
    ) -> None:
        producer.uncommitted.append(change)
        decision.changes.append(change)
        self._settle(producer, now_ms, now_ms)

    def _settle(self, producer: TransactionalProducer, now_ms: int, complete_ms: int) -> None:
        """Note what time has to bring about for a producer, after its state changed."""
        stored = producer.decided
        if stored is not None and stored.state is State.ONGOING:
            if not self._open:
                self._abort_ms = now_ms + self._settings.abort_timed_out_interval_ms
            self._open[producer.id] = producer
        else:
            self._open.pop(producer.id, None)
        if producer.is_written:
            if not self._incomplete:
                self._complete_ms = complete_ms
            self._incomplete[producer.id] = producer
        else:
            self._incomplete.pop(producer.id, None)


def _markers(producer: TransactionalProducer) -> MarkersDue:
    stored = producer.confirmed
    assert stored is not None and producer.unwritten is not None
    return MarkersDue(
        producer.end_number,
        producer.id,
        stored.producer.id,
        stored.producer.epoch,
        stored.state.is_commit,
        tuple(producer.unwritten),
        stored.generation == V2,
    )
