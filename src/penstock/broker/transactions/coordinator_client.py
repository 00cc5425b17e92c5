"""Asks the coordinators of transactional ids, on this broker or on another, about partitions of transactions.

Leaders ask before they append the first batch of a transaction (KIP-890). Questions to the same broker are
collected while one request to it is under way, so many partitions cost one request. Those about one transaction are
put together: its coordinator writes one record then, not one for each partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from penstock.broker.coordination.coordinators import Coordinators
from penstock.broker.network.peers import Peers
from penstock.broker.transactions.local_call import within
from penstock.environment import Environment
from penstock.model import BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
    partition_results,
)
from penstock.transactions.coordinator import TransactionCoordinator
from penstock.transactions.settings import ID_BYTES_MAX

CHANNEL = "transactions"
ADD_PARTITIONS_VERSION = 5
# A coordinator that does not answer in this time may be gone; the producer asks again.
TIMEOUT_MS = 5_000
# Questions in one request. More wait for the next one.
QUESTIONS_MAX = 1_000


class PartitionQuestion(NamedTuple):
    """Is this partition part of the producer's open transaction?"""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    topic: str
    topic_id: TopicId
    partition: int
    # Only verify. Otherwise the partition becomes part of the transaction (transactions v2).
    verify_only: bool


Done = Callable[[ErrorCode], None]


class TransactionCoordinatorClient:
    def __init__(
        self,
        environment: Environment,
        peers: Peers,
        coordinators: Coordinators[TransactionCoordinator],
        *,
        node_id: BrokerId,
    ) -> None:
        self._environment = environment
        self._peers = peers
        self._coordinators = coordinators
        self._node_id = node_id
        # By broker: questions for the next request.
        self._waiting: dict[int, list[tuple[PartitionQuestion, Done]]] = {}
        # Brokers with a request under way, or about to be sent.
        self._busy: set[int] = set()

    def ask(self, question: PartitionQuestion, done: Done) -> None:
        """``done(error)`` once, never before this returns."""
        if len(question.transactional_id) > ID_BYTES_MAX:
            # Nobody has such an id. In a request together with others, it would make that too large.
            self._environment.spawn.soon(lambda: done(ErrorCode.INVALID_REQUEST))
            return
        broker = self._coordinators.broker_of(question.transactional_id)
        if broker is None:
            self._environment.spawn.soon(lambda: done(ErrorCode.COORDINATOR_NOT_AVAILABLE))
            return
        self._waiting.setdefault(broker, []).append((question, done))
        if broker not in self._busy:
            self._busy.add(broker)
            # At the end of the turn, which may bring more questions.
            self._environment.spawn.soon(lambda: self._send(broker))

    def _send(self, broker: int) -> None:
        waiting = self._waiting.pop(broker, [])
        asked = waiting[:QUESTIONS_MAX]
        if waiting[QUESTIONS_MAX:]:
            self._waiting[broker] = waiting[QUESTIONS_MAX:]
        if not asked:
            self._busy.discard(broker)
            return
        request = _request(question for question, _ in asked)

        def answered(response: AddPartitionsToTxnResponse | None) -> None:
            errors = _errors(request, response)
            otherwise = ErrorCode.COORDINATOR_NOT_AVAILABLE
            if response is not None and response.error_code:
                otherwise = ErrorCode(response.error_code)
            for question, done in asked:
                done(errors.get(question, otherwise))
            # In a turn of its own: this broker may answer at once, and there may be very many.
            self._environment.spawn.soon(lambda: self._send(broker))

        if broker == self._node_id:
            add_partitions(self._coordinators, request, within(self._environment, TIMEOUT_MS, answered))
        else:
            self._peers.call(
                broker, CHANNEL, request, ADD_PARTITIONS_VERSION, answered, timeout_ms=TIMEOUT_MS
            )


def _request(questions: Iterable[PartitionQuestion]) -> AddPartitionsToTxnRequest:
    """One transaction for all questions about it, each partition once."""
    transactions: dict[tuple[str, int, int, bool], dict[tuple[str, TopicId], dict[int, None]]] = {}
    for transactional_id, producer_id, epoch, topic, topic_id, partition, verify_only in questions:
        topics = transactions.setdefault((transactional_id, producer_id, epoch, verify_only), {})
        topics.setdefault((topic, topic_id), {})[partition] = None
    return AddPartitionsToTxnRequest(
        transactions=[
            AddPartitionsToTxnTransaction(
                transactional_id=transactional_id,
                producer_id=producer_id,
                producer_epoch=epoch,
                verify_only=verify_only,
                topics=[
                    AddPartitionsToTxnTopic(name=topic, topic_id=topic_id, partitions=list(partitions))
                    for (topic, topic_id), partitions in topics.items()
                ],
            )
            for (transactional_id, producer_id, epoch, verify_only), topics in transactions.items()
        ]
    )


def _errors(
    request: AddPartitionsToTxnRequest, response: AddPartitionsToTxnResponse | None
) -> dict[PartitionQuestion, ErrorCode]:
    """The answer to each question of a request; a coordinator answers in the order of the request."""
    if response is None or response.error_code:
        return {}
    return {
        PartitionQuestion(
            transaction.transactional_id,
            transaction.producer_id,
            transaction.producer_epoch,
            topic.name,
            TopicId(topic.topic_id),
            partition.partition_index,
            transaction.verify_only,
        ): _for_leader(partition.partition_error_code)
        for transaction, result in zip(request.transactions, response.results_by_transaction, strict=True)
        for topic, topic_result in zip(transaction.topics, result.topic_results, strict=True)
        for partition in topic_result.results_by_partition
    }


def _for_leader(error: int) -> ErrorCode:
    # As Kafka's leaders tell it to producers: one whose time was up may go on after that, so it is not fatal.
    return ErrorCode.INVALID_PRODUCER_EPOCH if error == ErrorCode.PRODUCER_FENCED else ErrorCode(error)


def add_partitions(
    coordinators: Coordinators[TransactionCoordinator],
    request: AddPartitionsToTxnRequest,
    answer: Callable[[AddPartitionsToTxnResponse], None],
) -> None:
    """Answer a broker's AddPartitionsToTxn, whose transactions are coordinated here."""
    results: list[AddPartitionsToTxnResult] = [
        AddPartitionsToTxnResult(transactional_id=each.transactional_id) for each in request.transactions
    ]
    unanswered = len(results)

    def settled(place: int, topics: list[AddPartitionsToTxnTopicResult]) -> None:
        nonlocal unanswered
        results[place].topic_results = topics
        unanswered -= 1
        if not unanswered:
            answer(AddPartitionsToTxnResponse(results_by_transaction=results))

    if not results:
        answer(AddPartitionsToTxnResponse())
    for place, transaction in enumerate(request.transactions):
        _add(coordinators, transaction, lambda topics, place=place: settled(place, topics))  # type: ignore[misc]


def _add(
    coordinators: Coordinators[TransactionCoordinator],
    transaction: AddPartitionsToTxnTransaction,
    settled: Callable[[list[AddPartitionsToTxnTopicResult]], None],
) -> None:
    topics = transaction.topics

    def all_with(error: ErrorCode) -> None:
        settled(partition_results(topics, error))

    partition = coordinators.of(transaction.transactional_id)
    if isinstance(partition, ErrorCode):
        all_with(partition)
        return
    # The leaders of the others have newer metadata than we have, or older. A partition that is not in ours, or is
    # about to be deleted, would not get a marker at the end of the transaction.
    known = {
        (topic.name, topic.topic_id, index): (topic.name, index)
        for topic in topics
        for index in topic.partitions
        if coordinators.knows_partition(topic.name, topic.topic_id, index)
    }
    partitions = list(known.values())
    if not known:
        all_with(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return
    if transaction.verify_only:
        verified = partition.core.verify_partitions(
            transaction.transactional_id, transaction.producer_id, transaction.producer_epoch, partitions
        )
        errors = dict.fromkeys(partitions, verified) if isinstance(verified, ErrorCode) else verified
        settled(_results(topics, {each: errors[place] for each, place in known.items()}))
        return
    partition.handle(
        lambda core, now_ms, wall_ms: core.add_partitions(
            transaction.transactional_id,
            transaction.producer_id,
            transaction.producer_epoch,
            partitions,
            is_v2=True,
            now_ms=now_ms,
            wall_ms=wall_ms,
        ),
        lambda error: settled(_results(topics, dict.fromkeys(known, error))),
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
    )


def _results(
    topics: list[AddPartitionsToTxnTopic], errors: Mapping[tuple[str, bytes, int], ErrorCode]
) -> list[AddPartitionsToTxnTopicResult]:
    """Partitions without an error of their own are not known here."""
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(
                    partition_index=index,
                    partition_error_code=errors.get(
                        (topic.name, topic.topic_id, index), ErrorCode.COORDINATOR_NOT_AVAILABLE
                    ),
                )
                for index in topic.partitions
            ],
        )
        for topic in topics
    ]
