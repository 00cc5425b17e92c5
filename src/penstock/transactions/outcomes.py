"""What becomes of a producer's request, given the state of its transactional id: an answer, and perhaps a change.

These are the rules of who may do what. The states themselves are in ``transitions.py``. The functions here are
called only when no change of the id is uncommitted and no markers are being written; ``coordinator.py`` answers
CONCURRENT_TRANSACTIONS otherwise.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.transactions import transitions
from penstock.transactions.changes import (
    EPOCH_MAX,
    NO_EPOCH,
    NO_ID,
    NOBODY,
    Identity,
    State,
    TransactionStored,
)
from penstock.transactions.settings import ID_BYTES_MAX, TransactionSettings

# The identity for the next transaction, or an error.
Answer: TypeAlias = Identity | ErrorCode


class Outcome(NamedTuple):
    answer: Answer
    change: TransactionStored | None = None


# The shell has not passed a producer id that turned out to be needed: the state changed since it looked. The client
# retries.
NO_PRODUCER_ID = Outcome(ErrorCode.CONCURRENT_TRANSACTIONS)


def identity_error(stored: TransactionStored, identity: Identity) -> ErrorCode:
    if identity.id != stored.producer.id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    # The last epoch belongs to nobody. It fences.
    if identity.epoch != stored.producer.epoch or identity.epoch == EPOCH_MAX:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.NONE


# InitProducerId


def init_refusal(request: InitProducerIdRequest, settings: TransactionSettings) -> ErrorCode:
    """The error of a request that is refused in any state."""
    transactional_id = request.transactional_id
    expected = _expected(request)
    if not transactional_id or len(transactional_id.encode()) > ID_BYTES_MAX:
        return ErrorCode.INVALID_REQUEST
    # A producer that wants to go on names both parts of its identity (KIP-360), a new one neither.
    if expected.id < NO_ID or expected.epoch < NO_EPOCH:
        return ErrorCode.INVALID_REQUEST
    if (expected.id == NO_ID) != (expected.epoch == NO_EPOCH):
        return ErrorCode.INVALID_REQUEST
    if not 0 < request.transaction_timeout_ms <= settings.timeout_ms_max:
        return ErrorCode.INVALID_TRANSACTION_TIMEOUT
    return ErrorCode.NONE


def created(request: InitProducerIdRequest, new_producer_id: int, wall_ms: int) -> Outcome:
    """InitProducerId for an unknown id. One that had expired may still be in use by its producer."""
    assert request.transactional_id is not None
    change = transitions.created(
        request.transactional_id,
        new_producer_id,
        request.transaction_timeout_ms,
        _expected(request),
        wall_ms,
    )
    return Outcome(change.producer, change)


def initialized(
    stored: TransactionStored, request: InitProducerIdRequest, new_producer_id: int | None, wall_ms: int
) -> Outcome:
    expected = _expected(request)
    is_new = expected == NOBODY
    if stored.state is State.ONGOING:
        # A producer that began this transaction knows its identity. Kafka lets any earlier one abort it.
        if not is_new and expected != stored.producer:
            return Outcome(ErrorCode.PRODUCER_FENCED)
        # A new producer never gets the epoch of the fence: it retries, and gets the next one.
        fence = transitions.fenced(stored, may_recover=not is_new, wall_ms=wall_ms)
        return Outcome(ErrorCode.CONCURRENT_TRANSACTIONS, fence)
    following: Identity | None = stored.producer
    if is_new or expected == stored.producer:
        following = _next_identity(stored.producer, new_producer_id)
    elif expected != stored.previous:
        return Outcome(ErrorCode.PRODUCER_FENCED)
    elif stored.producer.epoch == EPOCH_MAX:
        # The last answer was lost, or there was none because the transaction timed out, and the epoch only fences.
        following = _next_identity(stored.producer, new_producer_id)
    if following is None:
        return NO_PRODUCER_ID
    timeout_ms = request.transaction_timeout_ms
    return Outcome(following, transitions.initialized(stored, following, timeout_ms, expected, wall_ms))


# EndTxn


def ended(stored: TransactionStored, is_commit: bool, wall_ms: int) -> Outcome:
    """EndTxn of a classic client with the present identity.

    The epoch stays, so a late EndTxn cannot be told from that of the next transaction.
    """
    if stored.state is State.ONGOING:
        change = transitions.ended(stored, is_commit=is_commit, wall_ms=wall_ms)
        return Outcome(change.producer, change)
    wanted = State.COMPLETE_COMMIT if is_commit else State.COMPLETE_ABORT
    return Outcome(stored.producer if stored.state is wanted else ErrorCode.INVALID_TXN_STATE)


def ended_v2(
    stored: TransactionStored,
    identity: Identity,
    is_commit: bool,
    new_producer_id: int | None,
    wall_ms: int,
) -> Outcome:
    """EndTxn in v2. Every end changes the identity, so the present one is that of the next transaction (KIP-890).

    ::

                         the previous identity              the present identity
                         abort             commit           abort       commit
        Ongoing          fenced            fenced           aborts      commits
        Empty            fenced            fenced           next epoch  invalid state
        CompleteAbort    repeated answer   fenced           next epoch  invalid state
        CompleteCommit   invalid state     repeated answer  next epoch  invalid state
    """
    if identity == stored.previous and stored.state in (State.COMPLETE_ABORT, State.COMPLETE_COMMIT):
        return _ended_again(stored, is_commit, new_producer_id, wall_ms)
    error = identity_error(stored, identity)
    if error is not ErrorCode.NONE:
        return Outcome(error)
    is_open = stored.state is State.ONGOING
    if is_commit and not is_open:
        return Outcome(ErrorCode.INVALID_TXN_STATE)
    following = _next_identity(stored.producer, new_producer_id)
    if following is None:
        return NO_PRODUCER_ID
    if is_open:
        return Outcome(
            following,
            transitions.ended_v2(
                stored, is_commit=is_commit, new_producer_id=new_producer_id, wall_ms=wall_ms
            ),
        )
    return Outcome(following, transitions.replaced(stored, following, stored.producer, wall_ms))


def _ended_again(
    stored: TransactionStored, is_commit: bool, new_producer_id: int | None, wall_ms: int
) -> Outcome:
    """EndTxn for a transaction that has ended: the answer was lost, or the coordinator was first."""
    if is_commit != stored.state.is_commit:
        # A client repeats the same request. So if it wants to commit what was aborted, its time was up
        # (KAFKA-20785).
        return Outcome(ErrorCode.PRODUCER_FENCED if is_commit else ErrorCode.INVALID_TXN_STATE)
    if stored.producer.epoch < EPOCH_MAX:
        return Outcome(stored.producer)
    # Aborted by the coordinator in its last usable epoch (KAFKA-20090).
    following = _next_identity(stored.producer, new_producer_id)
    if following is None:
        return NO_PRODUCER_ID
    return Outcome(following, transitions.replaced(stored, following, stored.previous, wall_ms))


def _expected(request: InitProducerIdRequest) -> Identity:
    return Identity(request.producer_id, request.producer_epoch)


def _next_identity(producer: Identity, new_producer_id: int | None) -> Identity | None:
    """None if there must be a new producer id and there is none."""
    if not transitions.is_exhausted(producer):
        return Identity(producer.id, producer.epoch + 1)
    return None if new_producer_id is None else Identity(new_producer_id, 0)
