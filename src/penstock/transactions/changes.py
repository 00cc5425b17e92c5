"""The state changes of a transaction coordinator, as values and as the records of ``__transaction_state``.

A change is the whole state of one transactional id. The bytes are Kafka's own (TransactionLogKey 0,
TransactionLogValue 1, each behind a two-byte version), so that Kafka's console consumer and dump tool read the
topic. One field is ours and skipped by Kafka: the epoch of the previous identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from penstock.environment import Buffer
from penstock.protocol import schema
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.transaction_records import (
    PartitionsSchema,
    TransactionLogKey,
    TransactionLogValue,
)

KEY_VERSION = 0
# The first flexible version, written by Kafka from transaction.version 1 on.
VALUE_VERSION = 1
VALUE_VERSIONS = range(2)

NO_ID = -1
NO_EPOCH = -1
NO_TIMESTAMP = -1
# The last epoch. It is never given to a producer, so that every producer can be fenced.
EPOCH_MAX = 2**15 - 1
# The last epoch that a producer may have.
USABLE_EPOCH_MAX = EPOCH_MAX - 1

# Generations of transactions, as Kafka numbers them in its records.
CLASSIC = 0
V2 = 2

Partition: TypeAlias = tuple[str, int]


class State(Enum):
    """Kafka's states, by the names that DescribeTransactions and ListTransactions use.

    Dead and PrepareEpochFence are never in the log: an id that is being removed has a tombstone, and a fence is
    written as the PrepareAbort that follows from it.
    """

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"

    @property
    def is_prepared(self) -> bool:
        """The outcome is decided, and markers are being written."""
        return self is State.PREPARE_COMMIT or self is State.PREPARE_ABORT

    @property
    def is_idle(self) -> bool:
        """There is no transaction."""
        return self is State.EMPTY or self is State.COMPLETE_COMMIT or self is State.COMPLETE_ABORT

    @property
    def is_commit(self) -> bool:
        return self is State.PREPARE_COMMIT or self is State.COMPLETE_COMMIT


# By the number in a record.
STATES = tuple(State)
_NUMBERS = {state: number for number, state in enumerate(STATES)}
_STORED_STATES = STATES[: _NUMBERS[State.DEAD]]


class Identity(NamedTuple):
    """What a producer sends with each request to show that it is the one that was initialized last."""

    id: int
    epoch: int


NOBODY = Identity(NO_ID, NO_EPOCH)


@dataclass(frozen=True, slots=True)
class TransactionStored:
    transactional_id: str
    # Who may use the transactional id. While markers are being written: whom the markers are for, at their epoch.
    producer: Identity
    state: State
    # From InitProducerId; how long a transaction may be open.
    timeout_ms: int
    # In the transaction; empty unless it is open or prepared.
    partitions: frozenset[Partition] = frozenset()
    # The identity that was replaced by the present one, as long as its owner may not know that: the answer to its
    # InitProducerId or EndTxn may have been lost. NOBODY when nobody is waiting for such an answer.
    previous: Identity = NOBODY
    # The producer id that replaces the present one when the markers are written: its epochs are used up.
    next_producer_id: int = NO_ID
    # Wall time when the transaction began, and of this change.
    start_timestamp: int = NO_TIMESTAMP
    update_timestamp: int = NO_TIMESTAMP
    # CLASSIC or V2: what the client of the present or last transaction speaks. V2 also for a fence: the markers of
    # a prepared transaction have the next epoch, not that of its batches.
    generation: int = CLASSIC


@dataclass(frozen=True, slots=True)
class TransactionRemoved:
    transactional_id: str


Change: TypeAlias = TransactionStored | TransactionRemoved


def encode(change: Change) -> tuple[bytes, bytes | None]:
    """The key and value of a change's record; a value of None is a tombstone."""
    key = _frame(TransactionLogKey(transactional_id=change.transactional_id), KEY_VERSION)
    return key, _value(change) if isinstance(change, TransactionStored) else None


def decode(key: Buffer, value: Buffer | None) -> Change | None:
    """The change in a record; None if the type is unknown.

    Raises:
        DecodeError: the record is of a known type and broken, or of a version newer than ours.
    """
    if _version(key) != KEY_VERSION:
        return None
    transactional_id = schema.decoder(TransactionLogKey, KEY_VERSION)(memoryview(key), 2)[0].transactional_id
    if value is None:
        return TransactionRemoved(transactional_id)
    version = _version(value)
    if version not in VALUE_VERSIONS:
        raise DecodeError(f"a record of the transaction topic has a value of unknown version {version}")
    body = schema.decoder(TransactionLogValue, version)(memoryview(value), 2)[0]
    if not 0 <= body.transaction_status < len(_STORED_STATES):
        raise DecodeError(
            f"a record of the transaction topic has the unknown state {body.transaction_status}"
        )
    state = _STORED_STATES[body.transaction_status]
    return TransactionStored(
        transactional_id,
        Identity(body.producer_id, body.producer_epoch),
        state,
        body.transaction_timeout_ms,
        frozenset(
            [
                (topic.topic, partition)
                for topic in body.transaction_partitions or ()
                for partition in topic.partition_ids
            ]
        ),
        _previous(body, state),
        body.next_producer_id,
        body.transaction_start_timestamp_ms,
        body.transaction_last_update_timestamp_ms,
        body.client_transaction_version,
    )


def by_topic(partitions: frozenset[Partition]) -> dict[str, list[int]]:
    """In order of topics and partitions: the order of a set changes from process to process."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return topics


def _value(change: TransactionStored) -> bytes:
    topics = by_topic(change.partitions).items()
    value = TransactionLogValue(
        producer_id=change.producer.id,
        previous_producer_id=change.previous.id,
        next_producer_id=change.next_producer_id,
        producer_epoch=change.producer.epoch,
        transaction_timeout_ms=change.timeout_ms,
        transaction_status=_NUMBERS[change.state],
        # Kafka writes null for an id without a transaction.
        transaction_partitions=(
            None
            if change.state is State.EMPTY
            else [PartitionsSchema(topic=topic, partition_ids=partitions) for topic, partitions in topics]
        ),
        transaction_last_update_timestamp_ms=change.update_timestamp,
        transaction_start_timestamp_ms=change.start_timestamp,
        client_transaction_version=change.generation,
        previous_producer_epoch=change.previous.epoch,
    )
    return _frame(value, VALUE_VERSION)


def _previous(body: TransactionLogValue, state: State) -> Identity:
    """The previous identity. Kafka's records have no epoch for it, which follows from the rules of v2."""
    if body.previous_producer_id == NO_ID or body.previous_producer_epoch != NO_EPOCH:
        return Identity(body.previous_producer_id, body.previous_producer_epoch)
    if body.client_transaction_version < V2 or state in (State.EMPTY, State.ONGOING):
        return NOBODY
    if body.producer_epoch > 0:
        return Identity(body.producer_id, body.producer_epoch - 1)
    return Identity(body.previous_producer_id, USABLE_EPOCH_MAX)


def _frame(message: schema.Message, version: int) -> bytes:
    return version.to_bytes(2, "big") + schema.encode(message, version)


def _version(buffer: Buffer) -> int:
    if len(buffer) < 2:
        raise DecodeError("a record of the transaction topic has no version")
    return int.from_bytes(buffer[:2], "big", signed=True)
