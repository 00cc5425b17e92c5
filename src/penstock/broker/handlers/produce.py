"""Produce (3-13) and InitProducerId (0-5).

Each partition's batch succeeds or fails on its own. A partition whose append waits for its replicas or for an fsync
delays the whole response, at most for the request's timeout. What was appended stays appended, so after
REQUEST_TIMED_OUT the records may be there, and an idempotent producer's retry finds out. A broker that does not
lead a partition names the leader (KIP-951). With acks=0 the client expects no response, so an error closes the
connection: the only sign that such a producer notices.

The first batch of a transaction in a partition is verified with the transaction's coordinator
(``transactions/verification.py``), and the response waits for that too. InitProducerId with a transactional id is
decided by its coordinator.

Departure from Kafka: records inside a batch are only inspected on compacted topics, where each needs a key; which
ones have none is said from version 8 on (KIP-467). Elsewhere the header and the CRC are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.handlers.leader_hints import endpoints_of, name_leader
from penstock.broker.network.authorization import CLUSTER_NAME, Operation, ResourceType
from penstock.broker.network.connection import CLOSE, NO_RESPONSE, WAITING, Call
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.produced_batch import Appended, Refused
from penstock.metadata.topics import is_internal
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    InitProducerIdRequest,
    InitProducerIdResponse,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)

ZSTD_SINCE_VERSION = 7
TOPIC_IDS_SINCE_VERSION = 13
# From this version of InitProducerId on, clients know PRODUCER_FENCED.
FENCED_SINCE_VERSION = 4

ALL = -1
WRITE, TOPIC, TRANSACTIONAL_ID = Operation.WRITE, ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID


def produce(broker: Broker, request: ProduceRequest, call: Call) -> Any:
    acks = request.acks
    transactional_id = request.transactional_id
    if transactional_id is not None and not broker.serves_transactions:
        return _refused(request, call, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if not -1 <= acks <= 1 or (transactional_id is not None and acks == 0):
        return _refused(request, call, ErrorCode.INVALID_REQUIRED_ACKS)
    is_checked = call.authorizer is not None
    # Without a transactional id, batches that say they are transactional are refused one by one.
    if transactional_id is not None and not call.allows(WRITE, TRANSACTIONAL_ID, transactional_id):
        return _refused(request, call, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    throttling = broker.throttling
    if throttling.limits_produce and not call.is_internal:
        throttling.produced(call, _size(request))
    failed = False
    allow_zstd = call.version >= ZSTD_SINCE_VERSION
    by_id = call.version >= TOPIC_IDS_SINCE_VERSION
    is_serving = broker.membership.is_serving()
    topics = []
    waiting: list[tuple[HostedPartition, Appended, PartitionProduceResponse]] = []
    held: list[_Held] = []
    leaders: dict[int, None] = {}
    for topic in request.topic_data:
        name = broker.image.topic_name(topic.topic_id) if by_id else topic.name
        results: list[PartitionProduceResponse] = []
        if is_checked and name and not call.allows(WRITE, TOPIC, name):
            topics.append(_denied(topic, name))
            call.route.counts.failed(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            failed = True
            continue
        for data in topic.partition_data:
            result = PartitionProduceResponse(index=data.index, base_offset=-1, log_append_time_ms=-1)
            results.append(result)
            hosted = broker.partitions.get(name, data.index)
            records = data.records or memoryview(b"")
            if hosted is None:
                error = (
                    _why_not_here(broker, name, data.index, by_id=by_id)
                    if is_serving
                    else ErrorCode.NOT_LEADER_OR_FOLLOWER
                )
                broker.partitions.refuse(topic.topic_id if by_id else name, data.index, records, error)
            elif not is_serving:
                error = ErrorCode.NOT_LEADER_OR_FOLLOWER
                hosted.refuse(records, error)
            elif is_internal(name):
                error = ErrorCode.INVALID_TOPIC_EXCEPTION
            else:
                if transactional_id is None:
                    appended = hosted.append(records, allow_zstd=allow_zstd, by_all=acks == ALL)
                else:
                    slot = _Held(hosted, result)
                    verified = broker.verification.append(
                        hosted,
                        records,
                        transactional_id,
                        call.version,
                        slot.verified,
                        allow_zstd=allow_zstd,
                        by_all=acks == ALL,
                        refusal=_refusing(call, transactional_id, name) if is_checked else None,
                    )
                    if verified is None:
                        held.append(slot)
                        continue
                    appended = verified
                error = appended.error
                if not error:
                    _succeed(result, hosted, appended)
                    if acks and not hosted.is_acknowledged(appended, by_all=acks == ALL):
                        waiting.append((hosted, appended, result))
                elif appended.refused is not None:
                    _explain(result, hosted, appended.refused)
            if error:
                result.error_code = error
                call.route.counts.failed(error)
                failed = True
                if error == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                    name_leader(broker, name, data.index, result, leaders)
        topics.append(TopicProduceResponse(name=name, topic_id=topic.topic_id, partition_responses=results))
    if acks == 0:
        return CLOSE if failed else NO_RESPONSE
    response = ProduceResponse(responses=topics)
    if leaders:
        response.node_endpoints = endpoints_of(broker, call, leaders)
    if not waiting and not held:
        return response
    pending = _PendingProduce(broker, call, response, waiting, request.timeout_ms, by_all=acks == ALL)
    if held:
        pending.wait_for(held)
    return WAITING


def _refused(request: ProduceRequest, call: Call, error: ErrorCode) -> Any:
    call.route.counts.failed(error)
    return ProduceResponse.for_error(request, call.version, error) if request.acks else CLOSE


def _refusing(call: Call, transactional_id: str, topic: str) -> Callable[[], ErrorCode]:
    """For a batch that is held back: the error if the client has lost its rights meanwhile."""

    def refusal() -> ErrorCode:
        if not call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
            return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if not call.allows(Operation.WRITE, ResourceType.TOPIC, topic):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return ErrorCode.NONE

    return refusal


def _denied(topic: TopicProduceData, name: str) -> TopicProduceResponse:
    return TopicProduceResponse(
        name=name,
        topic_id=topic.topic_id,
        partition_responses=[
            PartitionProduceResponse(
                index=data.index,
                base_offset=-1,
                log_append_time_ms=-1,
                error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            )
            for data in topic.partition_data
        ],
    )


def _size(request: ProduceRequest) -> int:
    return sum(len(data.records or b"") for topic in request.topic_data for data in topic.partition_data)


def _why_not_here(broker: Broker, name: str, index: int, *, by_id: bool) -> ErrorCode:
    if broker.image.has_partition(name, index):
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    return ErrorCode.UNKNOWN_TOPIC_ID if by_id and not name else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class _Held:
    """A partition's batch that is held back until its transaction is verified."""

    __slots__ = ("hosted", "pending", "result")

    def __init__(self, hosted: HostedPartition, result: PartitionProduceResponse) -> None:
        self.hosted = hosted
        self.result = result
        self.pending: _PendingProduce | None = None

    def verified(self, appended: Appended) -> None:
        # Never called in the turn of the request, so there is a pending response.
        assert self.pending is not None
        self.pending.verified(self, appended)


class _PendingProduce:
    """A response that waits until every partition's batch is acknowledged, or the timeout is over."""

    __slots__ = ("_by_all", "_call", "_response", "_timer", "_unfinished", "_waiting_requests")

    def __init__(
        self,
        broker: Broker,
        call: Call,
        response: ProduceResponse,
        waiting: list[tuple[HostedPartition, Appended, PartitionProduceResponse]],
        timeout_ms: int,
        *,
        by_all: bool,
    ) -> None:
        self._call = call
        self._response = response
        self._by_all = by_all
        self._waiting_requests = broker.waiting_requests
        self._waiting_requests.produces += 1
        self._unfinished = {id(result): result for _, _, result in waiting}
        self._timer = broker.environment.spawn.later(max(0, timeout_ms), self._timed_out)
        for hosted, appended, result in waiting:
            self._when_acknowledged(hosted, appended, result)

    def wait_for(self, held: list[_Held]) -> None:
        for slot in held:
            slot.pending = self
            self._unfinished[id(slot.result)] = slot.result

    def verified(self, slot: _Held, appended: Appended) -> None:
        """A batch that was held back was appended or refused. The response may have timed out before."""
        result, hosted = slot.result, slot.hosted
        if id(result) not in self._unfinished:
            return
        if appended.error:
            if appended.refused is not None:
                _explain(result, hosted, appended.refused)
            self._committed(result, appended.error)
            return
        _succeed(result, hosted, appended)
        if hosted.is_acknowledged(appended, by_all=self._by_all):
            self._committed(result, ErrorCode.NONE)
        else:
            self._when_acknowledged(hosted, appended, result)

    def _when_acknowledged(
        self, hosted: HostedPartition, appended: Appended, result: PartitionProduceResponse
    ) -> None:
        hosted.when_acknowledged(appended, lambda error: self._committed(result, error), by_all=self._by_all)

    def _committed(self, result: PartitionProduceResponse, error: ErrorCode) -> None:
        if self._unfinished.pop(id(result), None) is None:
            return
        if error:
            self._fail(result, error)
        if not self._unfinished:
            self._timer.cancel()
            self._answer()

    def _timed_out(self) -> None:
        if not self._unfinished:
            return
        for result in self._unfinished.values():
            self._fail(result, ErrorCode.REQUEST_TIMED_OUT)
        self._unfinished.clear()
        self._answer()

    def _fail(self, result: PartitionProduceResponse, error: ErrorCode) -> None:
        result.error_code = error
        result.base_offset = -1
        result.log_append_time_ms = -1
        self._call.route.counts.failed(error)

    def _answer(self) -> None:
        self._waiting_requests.produces -= 1
        self._call.answer(self._response)


def _succeed(result: PartitionProduceResponse, hosted: HostedPartition, appended: Appended) -> None:
    result.base_offset = appended.base_offset
    result.log_append_time_ms = appended.log_append_time_ms
    result.log_start_offset = hosted.log.log_start_offset


def _explain(result: PartitionProduceResponse, hosted: HostedPartition, refused: Refused) -> None:
    result.error_message = refused.message
    message = f"A record without a key cannot be stored in {hosted.topic}-{hosted.index}, which is compacted."
    result.record_errors = [
        BatchIndexAndErrorMessage(batch_index=place, batch_index_error_message=message)
        for place in refused.records
    ]


def init_producer_id(broker: Broker, request: InitProducerIdRequest, call: Call) -> Any:
    if request.transactional_id == "" or (request.producer_id < 0) != (request.producer_epoch < 0):
        return error_response(request, call.version, ErrorCode.INVALID_REQUEST)
    if request.transactional_id is not None:
        if not broker.serves_transactions or not call.allows(
            Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id
        ):
            return error_response(request, call.version, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        return _init_transactional(broker, request, request.transactional_id, call)
    if not _may_be_idempotent(call):
        return error_response(request, call.version, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)

    def allocated(producer_id: int) -> None:
        call.answer(InitProducerIdResponse(producer_id=producer_id, producer_epoch=0))

    broker.producer_ids.next(allocated, lambda: _no_producer_id(request, call))
    return WAITING


def _may_be_idempotent(call: Call) -> bool:
    """Who may write to any topic may do so with a producer id (KIP-679)."""
    if call.allows(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER, CLUSTER_NAME, quietly=True):
        return True
    if call.allows_any(Operation.WRITE, ResourceType.TOPIC):
        return True
    call.denied(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER, CLUSTER_NAME)
    return False


def _init_transactional(
    broker: Broker, request: InitProducerIdRequest, transactional_id: str, call: Call
) -> Any:
    partition = broker.transaction_coordinators.of(transactional_id)
    if isinstance(partition, ErrorCode):
        return error_response(request, call.version, partition)

    def decide(producer_id: int | None) -> None:
        # The coordinator, and the client's rights, may have changed while the producer id was fetched.
        partition = broker.transaction_coordinators.of(transactional_id)
        if not call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
            partition = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if isinstance(partition, ErrorCode):
            call.answer(error_response(request, call.version, partition))
            return

        def answer(response: InitProducerIdResponse) -> None:
            if response.error_code == ErrorCode.PRODUCER_FENCED and call.version < FENCED_SINCE_VERSION:
                response.error_code = ErrorCode.INVALID_PRODUCER_EPOCH
            call.answer(response)

        partition.handle(
            lambda core, now_ms, wall_ms: core.init_producer_id(
                request, new_producer_id=producer_id, now_ms=now_ms, wall_ms=wall_ms
            ),
            answer,
            error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        )

    if partition.core.needs_producer_id(transactional_id, is_init=True):
        broker.producer_ids.next(decide, lambda: _no_producer_id(request, call))
    else:
        decide(None)
    return WAITING


def _no_producer_id(request: InitProducerIdRequest, call: Call) -> None:
    call.answer(error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE))
