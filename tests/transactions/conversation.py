"""A transaction coordinator to talk to: the smallest shell there can be, with a clock that only tests move.

Every decision is committed at once unless ``hold`` is set. Markers that are due are kept in ``due`` until a test
writes them. Every answer is encoded in the version it was asked in, and every invariant is checked after every
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.decision import Decision
from penstock.protocol import schema
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import EndTxnRequest
from penstock.transactions.changes import (
    USABLE_EPOCH_MAX,
    Change,
    Identity,
    Partition,
    State,
    TransactionStored,
    decode,
    encode,
)
from penstock.transactions.coordinator import MarkersDue, TransactionCoordinator
from penstock.transactions.settings import TransactionSettings

ID = "transfers"
TIMEOUT_MS = 60_000
WALL_MS = 1_700_000_000_000
ORDERS = ("orders", 0)
PAYMENTS = ("payments", 3)
CLASSIC_END = 3
V2_END = 5


class Answer(NamedTuple):
    error: ErrorCode
    producer: Identity


class Conversation:
    def __init__(self, settings: TransactionSettings | None = None, log: Sequence[Change] = ()) -> None:
        self.settings = settings or TransactionSettings()
        self.deleted: set[Partition] = set()
        self.coordinator = TransactionCoordinator(
            self.settings, lambda topic, index: (topic, index) not in self.deleted
        )
        self.now_ms = 1_000_000
        # Wall time is a clock of its own.
        self.wall_ms = WALL_MS
        self.next_producer_id = 1_000
        # What was appended and committed, in order.
        self.log: list[Change] = []
        # Markers that are to be written.
        self.due: list[MarkersDue] = []
        # Decisions wait for ``commit_all`` instead of being committed at once.
        self.hold = False
        self.held: list[Decision[Change]] = []
        # Decisions cannot be written.
        self.is_full = False
        for change in log:
            self.coordinator.apply(change)
            self.log.append(change)

    def load(self) -> Conversation:
        self.coordinator.loaded(self.now_ms, self.wall_ms)
        self.coordinator.check()
        self.due += self.coordinator.take_markers()
        return self

    # Requests

    def init(
        self,
        expected: Identity | None = None,
        *,
        id: str | None = ID,
        timeout_ms: int = TIMEOUT_MS,
        has_id: bool = True,
    ) -> Answer:
        request = InitProducerIdRequest(transactional_id=id, transaction_timeout_ms=timeout_ms)
        if expected is not None:
            request.producer_id, request.producer_epoch = expected
        decision = self.coordinator.init_producer_id(
            request, new_producer_id=self._new_id(id or "", has_id, is_init=True), **self.times
        )
        return self._answer(decision, 5)

    def started(self, *, id: str = ID) -> Identity:
        answer = self.init(id=id)
        assert answer.error is ErrorCode.NONE
        return answer.producer

    def add(self, producer: Identity, *partitions: Partition, id: str = ID, is_v2: bool = True) -> ErrorCode:
        decision = self.coordinator.add_partitions(
            id, *producer, partitions or (ORDERS,), is_v2=is_v2, **self.times
        )
        error = decision.response
        assert isinstance(error, ErrorCode)
        return error if self._take(decision) else ErrorCode.COORDINATOR_NOT_AVAILABLE

    def verify(
        self, producer: Identity, *partitions: Partition, id: str = ID
    ) -> dict[Partition, ErrorCode] | ErrorCode:
        return self.coordinator.verify_partitions(id, *producer, partitions or (ORDERS,))

    def end(
        self,
        producer: Identity,
        *,
        commit: bool,
        version: int = V2_END,
        id: str = ID,
        has_id: bool = True,
    ) -> Answer:
        request = EndTxnRequest(
            transactional_id=id, producer_id=producer.id, producer_epoch=producer.epoch, committed=commit
        )
        new_id = self._new_id(id, has_id, is_init=False)
        decision = self.coordinator.end(request, version, new_producer_id=new_id, **self.times)
        return self._answer(decision, version)

    # Markers

    def write(self, due: MarkersDue, *partitions: Partition) -> None:
        decision = self.coordinator.markers_written(due, partitions or due.partitions, **self.times)
        self._take(decision)

    def write_all(self) -> list[MarkersDue]:
        written, self.due = self.due, []
        for due in written:
            self.write(due)
        return written

    def reconcile(self) -> None:
        keys = self.coordinator.all_keys()
        while keys:
            self._take(self.coordinator.reconcile(keys, 2, **self.times))

    # Whole scenes

    def transaction(self, producer: Identity, *, commit: bool = True, version: int = V2_END) -> Identity:
        """One whole transaction; the identity for the next."""
        assert self.add(producer, ORDERS, PAYMENTS, is_v2=version >= V2_END) is ErrorCode.NONE
        answer = self.end(producer, commit=commit, version=version)
        assert answer.error is ErrorCode.NONE
        self.write_all()
        return answer.producer if version >= V2_END else producer

    def exhausted(self) -> Identity:
        """A producer in the last epoch that it may have."""
        self.next_producer_id += 1
        producer = Identity(self.next_producer_id, USABLE_EPOCH_MAX)
        stored = TransactionStored(ID, producer, State.EMPTY, TIMEOUT_MS, update_timestamp=self.wall_ms)
        self.coordinator.apply(stored)
        self.log.append(stored)
        return producer

    def restarted(self) -> Conversation:
        """Another coordinator, which knows only what the log says, in the bytes of the log."""
        copied = [decode(*encode(change)) for change in self.log]
        other = Conversation(self.settings, [change for change in copied if change is not None])
        other.deleted = self.deleted
        other.now_ms += 5_000_000
        other.wall_ms = self.wall_ms
        other.next_producer_id = self.next_producer_id
        return other.load()

    # State

    def decided(self, id: str = ID) -> TransactionStored | None:
        return decided(self.coordinator, id)

    @property
    def state(self) -> str:
        return self.coordinator.describe(ID).transaction_state

    @property
    def producer(self) -> Identity:
        described = self.coordinator.describe(ID)
        return Identity(described.producer_id, described.producer_epoch)

    # Time

    @property
    def times(self) -> dict[str, int]:
        return {"now_ms": self.now_ms, "wall_ms": self.wall_ms}

    def sleep(self, milliseconds: int, *, may_expire: bool = True) -> None:
        """Let time pass, waking the coordinator whenever it asked for it."""
        target = self.now_ms + milliseconds
        while (deadline := self.coordinator.next_deadline_ms) is not None and deadline <= target:
            self._advance(max(deadline, self.now_ms))
            self._take(self.coordinator.tick(self.now_ms, self.wall_ms, may_expire=may_expire))
        self._advance(target)

    def _advance(self, now_ms: int) -> None:
        self.wall_ms += now_ms - self.now_ms
        self.now_ms = now_ms

    # The log

    def commit_all(self) -> None:
        held, self.held = self.held, []
        for decision in held:
            self._commit(decision)

    def _answer(self, decision: Decision[Change], version: int) -> Answer:
        response: Any = decision.response
        schema.encode(response, version)
        if not self._take(decision):
            return Answer(ErrorCode.COORDINATOR_NOT_AVAILABLE, Identity(-1, -1))
        return Answer(ErrorCode(response.error_code), Identity(response.producer_id, response.producer_epoch))

    def _take(self, decision: Decision[Change]) -> bool:
        self.coordinator.check()
        if self.is_full and decision.changes:
            self.coordinator.failed(decision, self.now_ms, self.wall_ms)
            self.coordinator.check()
            return False
        if self.hold:
            self.held.append(decision)
        else:
            self._commit(decision)
        return True

    def _commit(self, decision: Decision[Change]) -> None:
        self.log += decision.changes
        self.coordinator.committed(decision)
        self.coordinator.check()
        self.due += self.coordinator.take_markers()

    def _new_id(self, id: str, has_id: bool, *, is_init: bool) -> int | None:
        if not has_id or not self.coordinator.needs_producer_id(id, is_init=is_init):
            return None
        self.next_producer_id += 1
        return self.next_producer_id


def decided(coordinator: TransactionCoordinator, id: str) -> TransactionStored | None:
    """The state of an id including what is not committed."""
    producer = coordinator._producers.get(id)
    return None if producer is None else producer.decided
