"""Transactional ids as DescribeTransactions and ListTransactions show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    DescribedTransaction,
    ListedTransaction,
    TransactionTopic,
)
from penstock.transactions.changes import NO_ID, STATES, TransactionStored, by_topic

STATE_NAMES = frozenset([state.value for state in STATES])


class Filters(NamedTuple):
    """An empty filter passes everything."""

    states: frozenset[str]
    producer_ids: frozenset[int]
    # Only transactions that are open for longer; negative: all.
    duration_ms: int
    matches: Callable[[str], object] | None

    def pass_(self, stored: TransactionStored, wall_ms: int) -> bool:
        if self.states and stored.state.value not in self.states:
            return False
        if self.producer_ids and stored.producer.id not in self.producer_ids:
            return False
        if self.duration_ms >= 0 and (
            stored.state.is_idle or wall_ms - stored.start_timestamp <= self.duration_ms
        ):
            return False
        return self.matches is None or bool(self.matches(stored.transactional_id))


def listed(stored: TransactionStored) -> ListedTransaction:
    return ListedTransaction(
        transactional_id=stored.transactional_id,
        producer_id=stored.producer.id,
        transaction_state=stored.state.value,
    )


def described(transactional_id: str, stored: TransactionStored | None) -> DescribedTransaction:
    if not transactional_id:
        return DescribedTransaction(error_code=ErrorCode.INVALID_REQUEST, producer_id=NO_ID)
    if stored is None:
        return DescribedTransaction(
            error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
            transactional_id=transactional_id,
            producer_id=NO_ID,
        )
    return DescribedTransaction(
        transactional_id=transactional_id,
        transaction_state=stored.state.value,
        transaction_timeout_ms=stored.timeout_ms,
        transaction_start_time_ms=stored.start_timestamp,
        producer_id=stored.producer.id,
        producer_epoch=stored.producer.epoch,
        topics=[
            TransactionTopic(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(stored.partitions).items()
        ],
    )
