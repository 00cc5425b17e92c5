"""The state machine of one transactional id: from one stored state to the next.

::

    nothing ------- InitProducerId -----------> Empty
    Empty, Complete* -- InitProducerId -------> Empty             next epoch, or a new producer id
    Empty, Complete* -- AddPartitions --------> Ongoing
    Ongoing -------- AddPartitions -----------> Ongoing           more partitions
    Ongoing -------- EndTxn ------------------> Prepare*          v2: next epoch
    Ongoing -------- InitProducerId, timeout -> PrepareAbort      next epoch: the producer is fenced
    Prepare* ------- all markers written -----> Complete*         v2: new producer id if epochs are used up
    Empty, Complete* -- EndTxn abort, v2 -----> CompleteAbort     next epoch, or a new producer id
    Empty, Complete* -- not used for a week --> nothing

Prepare* is the point of no return: from the moment it is committed the outcome is certain, and markers are written
with the producer id and epoch of that state. A marker raises the producer's epoch in its partition, so after an end
in v2, or a fence, a late batch of the ended transaction is refused there.

Every function returns a new state and says nothing about whether the request is allowed; ``coordinator.py`` does.

The identity that a change replaces stays in ``previous`` as long as its owner may be waiting for the answer, so
that a retry of a lost answer is recognised, also by the next coordinator (KIP-360, KAFKA-20357). A producer that
begins a transaction knows its present identity. An InitProducerId that names no identity comes from a new producer;
nobody before it may be recognised.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.transactions.changes import (
    CLASSIC,
    EPOCH_MAX,
    NO_ID,
    NO_TIMESTAMP,
    NOBODY,
    USABLE_EPOCH_MAX,
    V2,
    Identity,
    Partition,
    State,
    TransactionStored,
)


def is_exhausted(producer: Identity) -> bool:
    """Whether the next identity needs a new producer id."""
    return producer.epoch >= USABLE_EPOCH_MAX


def created(
    transactional_id: str, producer_id: int, timeout_ms: int, previous: Identity, wall_ms: int
) -> TransactionStored:
    return TransactionStored(
        transactional_id,
        Identity(producer_id, 0),
        State.EMPTY,
        timeout_ms,
        previous=previous,
        update_timestamp=wall_ms,
    )


def initialized(
    old: TransactionStored, producer: Identity, timeout_ms: int, previous: Identity, wall_ms: int
) -> TransactionStored:
    return replace(
        old,
        producer=producer,
        state=State.EMPTY,
        timeout_ms=timeout_ms,
        previous=previous,
        start_timestamp=NO_TIMESTAMP,
        update_timestamp=wall_ms,
    )


def added(
    old: TransactionStored, partitions: frozenset[Partition], generation: int, wall_ms: int
) -> TransactionStored:
    """The transaction with more partitions, begun if there is none."""
    return replace(
        old,
        state=State.ONGOING,
        partitions=old.partitions | partitions,
        previous=NOBODY,
        start_timestamp=old.start_timestamp if old.state is State.ONGOING else wall_ms,
        update_timestamp=wall_ms,
        generation=generation,
    )


def ended(old: TransactionStored, *, is_commit: bool, wall_ms: int) -> TransactionStored:
    """The end of a transaction by a classic client: it keeps its epoch."""
    return _with_outcome(old, is_commit, old.producer, NOBODY, NO_ID, CLASSIC, wall_ms)


def ended_v2(
    old: TransactionStored, *, is_commit: bool, new_producer_id: int | None, wall_ms: int
) -> TransactionStored:
    """``new_producer_id`` is needed if the epochs are exhausted."""
    next_producer_id = NO_ID
    if is_exhausted(old.producer):
        assert new_producer_id is not None
        next_producer_id = new_producer_id
    producer = Identity(old.producer.id, old.producer.epoch + 1)
    return _with_outcome(old, is_commit, producer, old.producer, next_producer_id, V2, wall_ms)


def fenced(old: TransactionStored, *, may_recover: bool, wall_ms: int) -> TransactionStored:
    """Abort for another reason than an EndTxn, with an epoch that fences the producer.

    ``may_recover``: whether the producer may learn its new epoch. Not if another one is taking its place.
    """
    # Kafka before 4.3 could leave a producer with the last epoch (KAFKA-20090).
    producer = Identity(old.producer.id, min(old.producer.epoch + 1, EPOCH_MAX))
    previous = old.producer if may_recover else NOBODY
    # As in v2 the markers have the next epoch, whatever the client speaks.
    return _with_outcome(old, False, producer, previous, NO_ID, V2, wall_ms)


def completed(old: TransactionStored, wall_ms: int) -> TransactionStored:
    """All markers of a prepared transaction are written."""
    return replace(
        old,
        producer=old.producer if old.next_producer_id == NO_ID else Identity(old.next_producer_id, 0),
        state=State.COMPLETE_COMMIT if old.state.is_commit else State.COMPLETE_ABORT,
        partitions=frozenset(),
        next_producer_id=NO_ID,
        update_timestamp=wall_ms,
    )


def replaced(
    old: TransactionStored, producer: Identity, previous: Identity, wall_ms: int
) -> TransactionStored:
    """An abort without a transaction in v2: nothing is to be written to partitions, and the identity changes.

    Kafka has a PrepareAbort without partitions in between.
    """
    return replace(
        old,
        producer=producer,
        state=State.COMPLETE_ABORT,
        previous=previous,
        start_timestamp=wall_ms,
        update_timestamp=wall_ms,
        generation=V2,
    )


def _with_outcome(
    old: TransactionStored,
    is_commit: bool,
    producer: Identity,
    previous: Identity,
    next_producer_id: int,
    generation: int,
    wall_ms: int,
) -> TransactionStored:
    prepared = replace(
        old,
        producer=producer,
        state=State.PREPARE_COMMIT if is_commit else State.PREPARE_ABORT,
        previous=previous,
        next_producer_id=next_producer_id,
        update_timestamp=wall_ms,
        generation=generation,
    )
    # Kafka can write an open transaction without partitions. No marker would complete it.
    return prepared if prepared.partitions else completed(prepared, wall_ms)
