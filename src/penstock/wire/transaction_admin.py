"""What operators ask about transactions (KIP-664): list and describe them, find their traces in partitions, abort.

Each coordinator lists its own transactions, so every broker is asked. The leader of a partition knows the producers
that wrote to it and their open transactions, whether or not a coordinator still knows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    DescribeProducersRequest,
    DescribeProducersRequestTopic,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from penstock.wire import coordinators
from penstock.wire.coordinators import Kind
from penstock.wire.core import Core, Question, Steps, Task
from penstock.wire.errors import (
    BUSY,
    COORDINATOR_MOVED,
    LEADER_MOVED,
    BrokerRefused,
    UnsupportedBroker,
    words_of,
)
from penstock.wire.links import Address, Ask, Channel, Failed
from penstock.wire.operations import back_off, know_leaders, recover, refresh

WRITE_MARKERS, DESCRIBE_PRODUCERS, DESCRIBE, LIST = 27, 61, 65, 66
# The first version of ListTransactions that filters by duration (KIP-994).
LIST_BY_DURATION = 1
NO_OFFSET = -1


@dataclass(frozen=True, slots=True)
class ListFilter:
    """Which transactions to list. Empty: all."""

    states: tuple[str, ...] = ()
    producer_ids: tuple[int, ...] = ()
    # Only those open for longer; -1 for all.
    open_ms_min: int = -1
    # For the whole transactional id. Matched here: a bad expression must not keep a broker busy.
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    transactional_id: str
    producer_id: int
    # Kafka's word: Empty, Ongoing, PrepareCommit, CompleteCommit, ...
    state: str
    # The broker that coordinates it.
    coordinator: int


@dataclass(frozen=True, slots=True)
class DescribedTransaction:
    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    # Since 1970, of the open transaction, or of the last one if it has ended; None if there was none.
    started_ms: int | None
    # The partitions written to, those of committed offsets included.
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PartitionProducer:
    """A producer that a partition's leader remembers."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    # Of its last record, in milliseconds since 1970; -1 if unknown.
    last_timestamp: int
    # Of its last marker here; -1 if there was none.
    coordinator_epoch: int
    # First offset of its open transaction; None if none is open here.
    open_since_offset: int | None


def list_transactions(core: Core, task: Task[Any], wanted: ListFilter) -> Steps[list[ListedTransaction]]:
    """The transactions of all coordinators, by id.

    Raises:
        BrokerRefused: a state that does not exist.
    """
    message = ListTransactionsRequest(
        state_filters=list(wanted.states),
        producer_id_filters=list(wanted.producer_ids),
        duration_filter=wanted.open_ms_min,
    )
    version_min = LIST_BY_DURATION if wanted.open_ms_min >= 0 else 0
    ask = Ask(LIST, lambda _: message, version_min=version_min)
    while True:
        yield from refresh(core, task, [])
        brokers = dict(core.cluster.brokers)
        answers = yield [Question(address, Channel.CONTROL, ask) for address in brokers.values()]
        found: dict[str, ListedTransaction] = {}
        is_whole = True
        for broker, answer in zip(brokers, answers):
            if isinstance(answer, Failed):
                if answer.is_unsupported:
                    raise UnsupportedBroker(answer.why)
                task.trouble, is_whole = answer.why, False
                continue
            code = answer.message.error_code
            if answer.message.unknown_state_filters:
                names = ", ".join(answer.message.unknown_state_filters)
                raise BrokerRefused(f"there is no transaction state {names}", code)
            if code in COORDINATOR_MOVED or code in BUSY:
                task.trouble, is_whole = f"broker {broker}: {words_of(code)}", False
            elif code != ErrorCode.NONE:
                raise BrokerRefused(f"{task.what}: broker {broker}: {words_of(code)}", code)
            for each in answer.message.transaction_states:
                found[each.transactional_id] = ListedTransaction(
                    each.transactional_id, each.producer_id, each.transaction_state, broker
                )
        if is_whole:
            matches = None if wanted.pattern is None else wanted.pattern.fullmatch
            return [found[name] for name in sorted(found) if matches is None or matches(name)]
        yield from back_off(core, task)


def describe_transaction(
    core: Core, task: Task[Any], transactional_id: str
) -> Steps[DescribedTransaction | None]:
    """What its coordinator knows of a transactional id; None if that is nothing."""
    message = DescribeTransactionsRequest(transactional_ids=[transactional_id])
    while True:
        response = yield from coordinators.ask(
            core, task, Kind.TRANSACTION, transactional_id, DESCRIBE, message
        )
        if response is None:
            continue
        each = response.transaction_states[0]
        code = each.error_code
        if code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            return None
        if code == ErrorCode.NONE:
            return DescribedTransaction(
                transactional_id,
                each.transaction_state,
                each.producer_id,
                each.producer_epoch,
                each.transaction_timeout_ms,
                each.transaction_start_time_ms if each.transaction_start_time_ms >= 0 else None,
                tuple(
                    sorted(
                        TopicPartition(topic.topic, number)
                        for topic in each.topics
                        for number in topic.partitions
                    )
                ),
            )
        if code not in COORDINATOR_MOVED and code not in BUSY:
            raise BrokerRefused(f"{task.what}: {words_of(code)}", code)
        task.trouble = f"the coordinator of transactional id {transactional_id}: {words_of(code)}"
        yield from coordinators.forget(core, task, Kind.TRANSACTION, transactional_id)


def partition_producers(
    core: Core, task: Task[Any], partitions: Sequence[TopicPartition]
) -> Steps[dict[TopicPartition, list[PartitionProducer]]]:
    """The producers that each partition's leader remembers. Raises UnknownTopic."""
    found: dict[TopicPartition, list[PartitionProducer]] = {}
    left = dict.fromkeys(partitions)
    while left:
        places = yield from know_leaders(core, task, left)
        by_broker: dict[Address, list[TopicPartition]] = {}
        for at in left:
            by_broker.setdefault(places[at][0], []).append(at)
        answers = yield [
            Question(address, Channel.CONTROL, producers_ask(group)) for address, group in by_broker.items()
        ]
        for answer in answers:
            if isinstance(answer, Failed):
                if answer.is_unsupported:
                    raise UnsupportedBroker(answer.why)
                task.trouble = answer.why
                continue
            for topic in answer.message.topics:
                for each in topic.partitions:
                    at = TopicPartition(topic.name, each.partition_index)
                    if _is_done(task, at, each.error_code, each.error_message):
                        found[at] = [producer_of(producer) for producer in each.active_producers]
                        left.pop(at, None)
        if left:
            yield from recover(core, task, dict.fromkeys(at.topic for at in left))
    return {at: found[at] for at in partitions}


def abort_in_partition(
    core: Core, task: Task[Any], at: TopicPartition, producer: PartitionProducer
) -> Steps[None]:
    """Write an abort marker for a producer's open transaction in one partition, without its coordinator.

    Right only for a hanging transaction: one that no coordinator will end.
    """
    message = WriteTxnMarkersRequest(
        markers=[
            WritableTxnMarker(
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                transaction_result=False,
                topics=[WritableTxnMarkerTopic(name=at.topic, partition_indexes=[at.partition])],
                # The leader refuses a lower one than it has seen. Java's Admin sends the same.
                coordinator_epoch=max(0, producer.coordinator_epoch),
            )
        ]
    )
    while True:
        places = yield from know_leaders(core, task, [at])
        ask = Ask(WRITE_MARKERS, lambda _: message, patience_ms=core.request_timeout_ms)
        answer = (yield [Question(places[at][0], Channel.CONTROL, ask)])[0]
        if isinstance(answer, Failed):
            if answer.is_unsupported:
                raise UnsupportedBroker(answer.why)
            task.trouble = answer.why
        else:
            result = answer.message.markers[0].topics[0].partitions[0]
            if _is_done(task, at, result.error_code):
                return
        yield from recover(core, task, [at.topic])


def producers_ask(group: Sequence[TopicPartition]) -> Ask:
    by_topic: dict[str, list[int]] = {}
    for at in group:
        by_topic.setdefault(at.topic, []).append(at.partition)
    message = DescribeProducersRequest(
        topics=[
            DescribeProducersRequestTopic(name=name, partition_indexes=numbers)
            for name, numbers in by_topic.items()
        ]
    )
    return Ask(DESCRIBE_PRODUCERS, lambda _: message)


def producer_of(each: Any) -> PartitionProducer:
    start = each.current_txn_start_offset
    return PartitionProducer(
        each.producer_id,
        each.producer_epoch,
        each.last_sequence,
        each.last_timestamp,
        each.coordinator_epoch,
        start if start != NO_OFFSET else None,
    )


def _is_done(task: Task[Any], at: TopicPartition, code: int, message: str | None = None) -> bool:
    """Whether it succeeded; False when a retry may help. Raises the final error otherwise."""
    if code == ErrorCode.NONE:
        return True
    if code not in LEADER_MOVED and code not in BUSY:
        raise BrokerRefused(f"{task.what}: the leader of {at} refuses: {words_of(code, message)}", code)
    task.trouble = f"{at}: {words_of(code, message)}"
    return False
