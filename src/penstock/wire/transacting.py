"""A transactional producer without sockets: the order of its requests, and what may still be done after an error.

    NEW         no producer id yet                              init    -> READY
    READY       between two transactions                        begin   -> OPEN
    OPEN        batches and offsets are sent                    commit  -> COMMITTING, give_up -> ABORTING
    COMMITTING  the commit was sent, its outcome is unknown     commit  -> READY, refused -> OPEN
    ABORTING    nothing more is sent                            abort   -> READY
    FAILED      fenced, or refused for good                     never left

A failure of a batch or of offsets spoils the transaction: it stays OPEN, but can only be aborted. Careful with a
commit that timed out. It may have happened, so it can only be tried again, not be turned into an abort. The same
call made again is right in COMMITTING and in ABORTING: coordinators recognise a repeated request.

After an abort that left batches unanswered their sequences are unknown, and late copies of them may still arrive.
So the next transaction has another epoch: the end gives it (v2), or InitProducerId does (classic).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.wire.core import Core, Steps, Task
from penstock.wire.enlistment import Enlistment
from penstock.wire.errors import BrokerRefused, ProducerFenced, TransactionFailed, UnknownTopic, WireError
from penstock.wire.producing import Producing
from penstock.wire.sequences import Identity, OnAck
from penstock.wire.transactions import (
    FATAL,
    GroupMember,
    add_offsets,
    commit_offsets,
    end,
    init_producer_id,
)

# The finalized level of this feature from which on clients speak transactions v2 (KIP-890).
FEATURE = "transaction.version"
V2 = 2
ALL_REPLICAS = -1


class State(Enum):
    NEW = auto()
    READY = auto()
    OPEN = auto()
    COMMITTING = auto()
    ABORTING = auto()
    FAILED = auto()


class WrongState(WireError):
    """The caller's mistake: a method that has no meaning now, such as ``send`` outside of a transaction."""


_WORDS = {
    State.NEW: "call init() first",
    State.READY: "no transaction is open; call begin() first",
    State.OPEN: "a transaction is open; commit() or abort() it first",
    State.COMMITTING: "the outcome of the commit is unknown; call commit() again",
    State.ABORTING: "the transaction is being aborted; call abort() again",
}


class Transacting:
    """The methods that are generators are tasks of the core."""

    def __init__(self, core: Core, transactional_id: str, *, timeout_ms: int, in_flight: int) -> None:
        self._core = core
        self.transactional_id = transactional_id
        self._timeout_ms = timeout_ms
        self.state = State.NEW
        self.identity: Identity | None = None
        # Why the producer can do nothing any more. Set when FAILED.
        self.fatal: WireError | None = None
        self.enlistment = Enlistment(core, transactional_id)
        self.producing = Producing(core, acks=ALL_REPLICAS, in_flight=in_flight, enlistment=self.enlistment)

    @property
    def error(self) -> WireError | None:
        """Why the producer, or its open transaction, has failed."""
        return self.fatal or (self.producing.error if self.state is State.OPEN else None)

    def init(self, core: Core, task: Task[Any]) -> Steps[None]:
        """Get the producer id. Fences earlier producers of the transactional id and ends their transaction."""
        self._expect(State.NEW)
        yield from self._identify(core, task, None)
        self.state = State.READY

    def begin(self) -> None:
        self._expect(State.READY)
        assert self.identity is not None
        # Fixed for this transaction: the coordinator does not accept a mixture.
        is_v2 = self._core.links.features.get(FEATURE, 0) >= V2
        self.enlistment.start(self.identity, is_v2=is_v2)
        self.state = State.OPEN

    def add(self, at: TopicPartition, data: bytearray, on_ack: OnAck | None, now_ms: int) -> None:
        """Queue a batch, as ``Producing.add``."""
        self._expect_sound()
        self.producing.add(at, data, on_ack, now_ms)

    def send_offsets(
        self,
        core: Core,
        task: Task[Any],
        group: str,
        offsets: Mapping[TopicPartition, int],
        member: GroupMember,
    ) -> Steps[None]:
        """Make offsets part of the transaction. If it fails, also by a timeout, ``spoil`` the transaction."""
        self._expect_sound()
        assert self.identity is not None
        self.enlistment.is_begun = True
        is_v2 = self.enlistment.is_v2
        if not is_v2:
            yield from add_offsets(core, task, self.transactional_id, self.identity, group)
            self.enlistment.has_group = True
        yield from commit_offsets(
            core, task, self.transactional_id, self.identity, group, offsets, member, is_v2
        )

    def spoil(self, error: WireError) -> None:
        """The open transaction is incomplete, so it can only be aborted."""
        if isinstance(error, ProducerFenced) or (isinstance(error, BrokerRefused) and error.code in FATAL):
            self._fail(error)
        elif self.state is State.OPEN:
            self.producing.fail(error)

    def commit(self, core: Core, task: Task[Any]) -> Steps[None]:
        """Commit, once every batch is acknowledged."""
        if self.state is not State.COMMITTING:
            self._expect_sound()
        assert not self.producing.unacknowledged and self.identity is not None
        self.enlistment.stop()
        identity = self.identity
        if self.enlistment.is_begun:
            self.state = State.COMMITTING
            try:
                identity = yield from self._end(core, task, is_commit=True)
            except TransactionFailed as error:
                self.state = State.OPEN
                self.producing.fail(error)
                raise
            except BrokerRefused as error:
                self._fail(error)
                raise
        self._ended(identity)

    def give_up(self) -> None:
        """Stop sending. ``abort`` may be called when ``producing.has_requests`` is False."""
        if self.state is not State.ABORTING:
            self._expect(State.OPEN)
            if self.producing.unacknowledged:
                self.producing.fail(WireError("the transaction is being aborted"))
            self.enlistment.stop()
            self.state = State.ABORTING

    def abort(self, core: Core, task: Task[Any]) -> Steps[None]:
        self._expect(State.ABORTING)
        assert not self.producing.has_requests and self.identity is not None
        try:
            if self.enlistment.is_begun:
                self.identity = yield from self._end_if_known(core, task)
                self.enlistment.ended()
            if self.producing.error is not None and self.identity == self.producing.identity:
                yield from self._identify(core, task, self.identity)
        except (BrokerRefused, UnknownTopic) as error:
            self._fail(error)
            raise
        self._ended(self.identity)

    def close(self) -> None:
        """The producer is not used any more. A transaction that is still open ends by its timeout."""
        self.enlistment.stop()
        self.producing.close()

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        assert (self.state is State.FAILED) == (self.fatal is not None)
        assert (self.identity is None) <= (self.state in (State.NEW, State.FAILED))
        if self.state in (State.NEW, State.READY):
            assert not self.producing.unacknowledged and not self.enlistment.is_begun
            assert not self.producing.has_requests
        if self.state is State.READY:
            assert self.producing.error is None and self.producing.identity == self.identity
        if self.state is State.COMMITTING:
            assert not self.producing.unacknowledged, "everything is written before the commit"

    # Private

    def _identify(self, core: Core, task: Task[Any], current: Identity | None) -> Steps[None]:
        try:
            self.identity = yield from init_producer_id(
                core, task, self.transactional_id, self._timeout_ms, current
            )
        except BrokerRefused as error:
            self._fail(error)
            raise
        self.producing.restart(self.identity)

    def _end(self, core: Core, task: Task[Any], *, is_commit: bool) -> Steps[Identity]:
        assert self.identity is not None
        is_v2 = self.enlistment.is_v2
        return (yield from end(core, task, self.transactional_id, self.identity, is_commit, is_v2))

    def _end_if_known(self, core: Core, task: Task[Any]) -> Steps[Identity]:
        """Abort at the coordinator, which may not have heard of the transaction before it was given up."""
        assert self.identity is not None
        try:
            return (yield from self._end(core, task, is_commit=False))
        except TransactionFailed as error:
            if error.code != ErrorCode.INVALID_TXN_STATE or self.enlistment.is_certain:
                raise
        # The sequences are unknown, so the producer will get another epoch.
        assert self.producing.error is not None
        return self.identity

    def _ended(self, identity: Identity) -> None:
        self.identity = identity
        self.enlistment.ended()
        self.producing.restart(identity)
        self.state = State.READY

    def _expect_sound(self) -> None:
        self._expect(State.OPEN)
        if self.producing.error is not None:
            raise self.producing.error

    def _expect(self, state: State) -> None:
        if self.fatal is not None:
            raise self.fatal
        if self.state is not state:
            raise WrongState(_WORDS[self.state])

    def _fail(self, error: WireError) -> None:
        if self.fatal is None:
            self.fatal = error
            self.state = State.FAILED
            self.close()
