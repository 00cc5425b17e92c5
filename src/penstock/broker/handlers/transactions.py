"""The APIs of transactions: AddPartitionsToTxn (0-5), AddOffsetsToTxn (0-4), EndTxn (0-5), TxnOffsetCommit (0-5),
WriteTxnMarkers (1-2), DescribeProducers (0), DescribeTransactions (0) and ListTransactions (0-1).

The rules are in ``penstock.transactions``, those of offsets in ``penstock.groups``. This module finds the
coordinator and converts between requests and decisions.

AddPartitionsToTxn from version 4 on is for brokers, on the internal listener. WriteTxnMarkers is too, except that
an operator may abort a hanging transaction with it (KIP-664, ``transactions/marker_writer.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.network.authorization import (
    CLUSTER_NAME,
    Operation,
    ResourceType,
    allowed_and_denied,
)
from penstock.broker.network.connection import WAITING, Call
from penstock.broker.transactions import open_elsewhere
from penstock.broker.transactions.coordinator_client import PartitionQuestion, add_partitions
from penstock.decision import Decision
from penstock.groups.coordinator import Coordinator as GroupCoordinator
from penstock.metadata.topics import CONSUMER_OFFSETS, is_internal
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    ADD_PARTITIONS_BATCHED,
    END_TXN_V2,
    TXN_OFFSET_COMMIT_V2,
    ActiveProducer,
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
    DescribedTransaction,
    DescribeProducersPartition,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersTopic,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    ListTransactionsRequest,
    ListTransactionsResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
    WriteTxnMarkersRequest,
    partition_results,
)
from penstock.transactions.coordinator import TransactionCoordinator

# From this version of TxnOffsetCommit on, clients know TRANSACTION_ABORTABLE.
ABORTABLE_SINCE_VERSION = 4

# From this version of AddPartitionsToTxn and AddOffsetsToTxn on, clients know PRODUCER_FENCED.
FENCED_SINCE_VERSION = 2

Decide = Callable[[TransactionCoordinator, int, int], Decision[Any]]


def add_partitions_to_txn(broker: Broker, request: AddPartitionsToTxnRequest, call: Call) -> Any:
    if call.version >= ADD_PARTITIONS_BATCHED:
        add_partitions(broker.transaction_coordinators, request, call.answer)
        return WAITING
    topics = request.v3_and_below_topics
    if not _may_use(call, request.v3_and_below_transactional_id):
        return error_response(request, call.version, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    denied = {
        topic.name for topic in topics if not call.allows(Operation.WRITE, ResourceType.TOPIC, topic.name)
    }
    unknown = {
        (topic.name, index)
        for topic in topics
        for index in topic.partitions
        if is_internal(topic.name) or not broker.image.has_partition(topic.name, index)
    }
    if unknown or denied:
        # All or nothing, as in Kafka.
        return AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=[
                AddPartitionsToTxnTopicResult(
                    name=topic.name,
                    results_by_partition=[
                        AddPartitionsToTxnPartitionResult(
                            partition_index=index,
                            partition_error_code=(
                                ErrorCode.TOPIC_AUTHORIZATION_FAILED
                                if topic.name in denied
                                else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                                if (topic.name, index) in unknown
                                else ErrorCode.OPERATION_NOT_ATTEMPTED
                            ),
                        )
                        for index in topic.partitions
                    ],
                )
                for topic in topics
            ]
        )
    partitions = [(topic.name, index) for topic in topics for index in topic.partitions]
    return _decide(
        broker,
        call,
        request,
        request.v3_and_below_transactional_id,
        lambda core, now_ms, wall_ms: core.add_partitions(
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            partitions,
            is_v2=False,
            now_ms=now_ms,
            wall_ms=wall_ms,
        ),
        lambda error: AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=partition_results(topics, _for_version(error, call.version))
        ),
    )


def _may_use(call: Call, transactional_id: str) -> bool:
    return call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)


def add_offsets_to_txn(broker: Broker, request: AddOffsetsToTxnRequest, call: Call) -> Any:
    denied = _offsets_refusal(request, call)
    if denied:
        return error_response(request, call.version, denied)

    def add(error: int) -> None:
        # A right may have been taken away while the topic was created.
        denied = _offsets_refusal(request, call)
        if denied:
            call.answer(error_response(request, call.version, denied))
            return
        index = broker.group_coordinators.index_of(request.group_id)
        partition = broker.transaction_coordinators.of(request.transactional_id)
        if index is None:
            call.answer(error_response(request, call.version, error or ErrorCode.COORDINATOR_NOT_AVAILABLE))
        elif isinstance(partition, ErrorCode):
            call.answer(error_response(request, call.version, partition))
        else:
            _handle(
                partition,
                call,
                request,
                lambda core, now_ms, wall_ms: core.add_partitions(
                    request.transactional_id,
                    request.producer_id,
                    request.producer_epoch,
                    [(CONSUMER_OFFSETS, index)],
                    is_v2=False,
                    now_ms=now_ms,
                    wall_ms=wall_ms,
                ),
                lambda error: AddOffsetsToTxnResponse(error_code=_for_version(error, call.version)),
            )

    # The client has not looked for the group's coordinator yet, which would create the topic.
    broker.group_coordinators.when_topic_exists(add)
    return WAITING


def end_txn(broker: Broker, request: EndTxnRequest, call: Call) -> Any:
    denied = error_response(request, call.version, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if not _may_use(call, request.transactional_id):
        return denied
    partition = broker.transaction_coordinators.of(request.transactional_id)
    if isinstance(partition, ErrorCode):
        return error_response(request, call.version, partition)

    def decide(producer_id: int | None) -> None:
        # It may have been taken away while the request waited.
        if not _may_use(call, request.transactional_id):
            call.answer(denied)
            return
        _handle(
            partition,
            call,
            request,
            lambda core, now_ms, wall_ms: core.end(
                request, call.version, new_producer_id=producer_id, now_ms=now_ms, wall_ms=wall_ms
            ),
            lambda response: response,
        )

    if call.version < END_TXN_V2:
        _unless_abandoned(broker, call, lambda: decide(None))
    elif partition.core.needs_producer_id(request.transactional_id, is_init=False):
        unavailable = error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        broker.producer_ids.next(decide, lambda: call.answer(unavailable))
    else:
        decide(None)
    return WAITING


def txn_offset_commit(broker: Broker, request: TxnOffsetCommitRequest, call: Call) -> Any:
    denied = _offsets_refusal(request, call)
    if denied:
        return error_response(request, call.version, denied)
    if call.version < TXN_OFFSET_COMMIT_V2:
        _unless_abandoned(broker, call, lambda: _commit_offsets(broker, request, call))
    else:
        _commit_offsets(broker, request, call)
    return WAITING


def _offsets_refusal(request: AddOffsetsToTxnRequest | TxnOffsetCommitRequest, call: Call) -> ErrorCode:
    if not _may_use(call, request.transactional_id):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if not call.allows(Operation.READ, ResourceType.GROUP, request.group_id):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    return ErrorCode.NONE


def _commit_offsets(broker: Broker, request: TxnOffsetCommitRequest, call: Call) -> None:
    partition = broker.group_coordinators.of(request.group_id)
    if isinstance(partition, ErrorCode):
        call.answer(error_response(request, call.version, partition))
        return
    hosted = partition.hosted
    refused = _refuse_topics(request, call) + _refuse_unknown_partitions(broker, request)
    if refused and not request.topics:
        call.answer(TxnOffsetCommitResponse(topics=refused))
        return

    def commit(core: GroupCoordinator, now_ms: int, wall_ms: int) -> Decision[Any]:
        decision = core.commit_in_transaction(request, call.version, now_ms=now_ms, wall_ms=wall_ms)
        decision.response.topics += refused
        return decision

    def verified(error: ErrorCode) -> None:
        # A right may have been taken away while the coordinator was asked.
        error = error or _offsets_refusal(request, call)
        if error:
            if error == ErrorCode.TRANSACTION_ABORTABLE and call.version < ABORTABLE_SINCE_VERSION:
                error = ErrorCode.INVALID_TXN_STATE
            call.answer(error_response(request, call.version, error))
            return
        unavailable = error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        partition.handle(
            commit,
            call.answer,
            unavailable,
            refused=lambda error: error_response(request, call.version, error),
        )

    try:
        producers = hosted.log.producers
    except OSError:
        call.answer(error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE))
        return
    state = producers.get(request.producer_id)
    if (
        state is not None
        and producers.open_transaction(request.producer_id) is not None
        # A v2 client may be in its next transaction, before the marker of the last one is written here.
        and state.epoch == request.producer_epoch
    ):
        verified(ErrorCode.NONE)
        return
    question = PartitionQuestion(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        CONSUMER_OFFSETS,
        hosted.topic_id,
        hosted.index,
        verify_only=call.version < TXN_OFFSET_COMMIT_V2,
    )
    broker.verification.verify(hosted, question, verified)


def _unless_abandoned(broker: Broker, call: Call, handle: Callable[[], None]) -> None:
    """Handle a request whose epoch does not say which transaction it belongs to.

    A client that closed the connection has given up and may have begun the next transaction, which the request must
    not touch. After two turns the loop has seen that, if the end of the connection came right behind the request.
    """
    soon = broker.environment.spawn.soon

    def unless_closed() -> None:
        if call.connection.is_closed:
            call.answer(None)
        else:
            handle()

    soon(lambda: soon(unless_closed))


def _refuse_topics(request: TxnOffsetCommitRequest, call: Call) -> list[TxnOffsetCommitResponseTopic]:
    """Remove topics that the client may not read from a commit. Return the results for them."""
    request.topics, denied = allowed_and_denied(call, Operation.READ, request.topics)
    return [
        TxnOffsetCommitResponseTopic(
            name=topic.name,
            partitions=[
                TxnOffsetCommitResponsePartition(
                    partition_index=item.partition_index, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
                )
                for item in topic.partitions
            ],
        )
        for topic in denied
    ]


def _refuse_unknown_partitions(
    broker: Broker, request: TxnOffsetCommitRequest
) -> list[TxnOffsetCommitResponseTopic]:
    """Remove partitions that do not exist from a commit. Return the results for them."""
    refused = []
    for topic in request.topics:
        unknown = [
            item.partition_index
            for item in topic.partitions
            if not broker.image.has_partition(topic.name, item.partition_index)
        ]
        if unknown:
            removed = set(unknown)
            refused.append(
                TxnOffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        TxnOffsetCommitResponsePartition(
                            partition_index=index, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                        )
                        for index in unknown
                    ],
                )
            )
            topic.partitions = [item for item in topic.partitions if item.partition_index not in removed]
    request.topics = [topic for topic in request.topics if topic.partitions]
    return refused


def write_txn_markers(broker: Broker, request: WriteTxnMarkersRequest, call: Call) -> Any:
    if not call.allows(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME, quietly=True) and not call.allows(
        Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME
    ):
        return error_response(request, call.version, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    broker.marker_writer.write(request, call.answer, by_operator=not call.is_internal)
    return WAITING


def describe_producers(
    broker: Broker, request: DescribeProducersRequest, call: Call
) -> DescribeProducersResponse:
    # Each partition once: it may have very many producers.
    topics: dict[str, dict[int, None]] = {}
    for topic in request.topics:
        topics.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    denied = {name for name in topics if not call.allows(Operation.READ, ResourceType.TOPIC, name)}
    return DescribeProducersResponse(
        topics=[
            DescribeProducersTopic(
                name=name,
                partitions=[
                    _producers(broker, name, index)
                    if name not in denied
                    else DescribeProducersPartition(
                        partition_index=index, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
                    )
                    for index in indexes
                ],
            )
            for name, indexes in topics.items()
        ]
    )


def _producers(broker: Broker, topic: str, index: int) -> DescribeProducersPartition:
    described = DescribeProducersPartition(partition_index=index)
    hosted = broker.partitions.get(topic, index)
    if hosted is None or not hosted.is_serving or not broker.membership.is_serving():
        described.error_code = (
            ErrorCode.NOT_LEADER_OR_FOLLOWER
            if broker.image.has_partition(topic, index)
            else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        )
        return described
    try:
        producers = hosted.log.producers
        open_transactions = producers.open_transactions()
        described.active_producers = [
            ActiveProducer(
                producer_id=producer_id,
                producer_epoch=state.epoch,
                last_sequence=state.last_sequence,
                last_timestamp=state.batches[-1].timestamp if state.batches else state.last_seen_ms,
                coordinator_epoch=state.coordinator_epoch,
                current_txn_start_offset=open_transactions.get(producer_id, -1),
            )
            for producer_id, state in producers.items()
        ]
    except OSError:
        described.error_code = ErrorCode.KAFKA_STORAGE_ERROR
    return described


def describe_transactions(
    broker: Broker, request: DescribeTransactionsRequest, call: Call
) -> DescribeTransactionsResponse:
    # A dictionary, because a client without any right may name very many.
    denied = {
        name: None
        for name in dict.fromkeys(request.transactional_ids)
        if not call.allows(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name)
    }
    request.transactional_ids = [name for name in request.transactional_ids if name not in denied]
    response = open_elsewhere.describe_transactions(broker.transaction_coordinators, request)
    for described in response.transaction_states:
        described.topics = [
            topic
            for topic in described.topics
            if call.allows(Operation.DESCRIBE, ResourceType.TOPIC, topic.topic, quietly=True)
        ]
    response.transaction_states += [
        DescribedTransaction(
            error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, transactional_id=name
        )
        for name in denied
    ]
    return response


def list_transactions(
    broker: Broker, request: ListTransactionsRequest, call: Call
) -> ListTransactionsResponse:
    response = open_elsewhere.list_transactions(
        broker.transaction_coordinators, request, broker.clocks.stamp_ms()
    )
    if call.authorizer is not None:
        response.transaction_states = [
            state
            for state in response.transaction_states
            if call.allows(
                Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, state.transactional_id, quietly=True
            )
        ]
    return response


def _for_version(error: ErrorCode, version: int) -> ErrorCode:
    if error == ErrorCode.PRODUCER_FENCED and version < FENCED_SINCE_VERSION:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def _decide(
    broker: Broker,
    call: Call,
    request: Any,
    transactional_id: str,
    decide: Decide,
    response: Callable[[Any], Any],
) -> Any:
    partition = broker.transaction_coordinators.of(transactional_id)
    if isinstance(partition, ErrorCode):
        return error_response(request, call.version, partition)
    _handle(partition, call, request, decide, response)
    return WAITING


def _handle(
    partition: CoordinatorPartition[TransactionCoordinator],
    call: Call,
    request: Any,
    decide: Decide,
    response: Callable[[Any], Any],
) -> None:
    unavailable = error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def answer(decided: Any) -> None:
        call.answer(decided if decided is unavailable else response(decided))

    partition.handle(decide, answer, unavailable)
