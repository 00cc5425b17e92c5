"""Produce (3-13) and InitProducerId (0-5).

Each partition's batch stands or falls alone. A partition whose append must wait for an fsync holds back the
whole answer, for the request's timeout at the most; what was appended stays appended, so REQUEST_TIMED_OUT
means "perhaps", and an idempotent producer's retry finds out. With acks=0 nobody is listening: an error
closes the connection, which is the only sign such a producer understands.

Departures from Kafka: records inside a batch are not inspected (the header and the CRC are), and
transactional ids are refused until transactions exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.broker.connection import CLOSE, NO_RESPONSE, WAITING, Call
from penstock.metadata.topics import is_internal
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.broker.partitions import HostedPartition

ZSTD_SINCE_VERSION = 7
TOPIC_IDS_SINCE_VERSION = 13

ALL = -1
# One node has one replica of everything, and it is always in sync with itself.
IN_SYNC_REPLICAS = 1

NONE = ErrorCode.NONE


def produce(broker: Broker, request: ProduceRequest, call: Call) -> Any:
    acks = request.acks
    refusal = NONE
    if request.transactional_id is not None:
        refusal = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    elif not -1 <= acks <= 1:
        refusal = ErrorCode.INVALID_REQUIRED_ACKS
    failed = False
    allow_zstd = call.version >= ZSTD_SINCE_VERSION
    by_id = call.version >= TOPIC_IDS_SINCE_VERSION
    topics = []
    waiting: list[tuple[HostedPartition, int, PartitionProduceResponse]] = []
    for topic in request.topic_data:
        name = topic.name
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if by_id:
            name = broker.topic_name(topic.topic_id)
            unknown = ErrorCode.UNKNOWN_TOPIC_ID if not name else unknown
        results = []
        for data in topic.partition_data:
            result = PartitionProduceResponse(index=data.index, base_offset=-1, log_append_time_ms=-1)
            results.append(result)
            hosted = broker.partitions.get(name, data.index)
            if refusal or hosted is None:
                result.error_code = refusal or unknown
                failed = True
                continue
            if is_internal(name):
                result.error_code = ErrorCode.INVALID_TOPIC_EXCEPTION
                failed = True
                continue
            if acks == ALL and hosted.config.min_insync_replicas > IN_SYNC_REPLICAS:
                result.error_code = ErrorCode.NOT_ENOUGH_REPLICAS
                failed = True
                continue
            appended = hosted.append(data.records or memoryview(b""), allow_zstd=allow_zstd)
            if appended.error:
                result.error_code = appended.error
                failed = True
                continue
            result.base_offset = appended.base_offset
            result.log_append_time_ms = appended.log_append_time_ms
            result.log_start_offset = hosted.log.log_start_offset
            if appended.commit_offset:
                waiting.append((hosted, appended.commit_offset, result))
        topics.append(TopicProduceResponse(name=name, topic_id=topic.topic_id, partition_responses=results))
    if acks == 0:
        return CLOSE if failed else NO_RESPONSE
    response = ProduceResponse(responses=topics)
    if not waiting:
        return response
    _PendingProduce(broker, call, response, waiting, request.timeout_ms)
    return WAITING


class _PendingProduce:
    """An answer that waits until every partition's batch is committed, or the time is up."""

    __slots__ = ("_call", "_response", "_timer", "_unfinished")

    def __init__(
        self,
        broker: Broker,
        call: Call,
        response: ProduceResponse,
        waiting: list[tuple[HostedPartition, int, PartitionProduceResponse]],
        timeout_ms: int,
    ) -> None:
        self._call = call
        self._response = response
        self._unfinished = {id(result): result for _, _, result in waiting}
        self._timer = broker.environment.spawn.later(max(0, timeout_ms), self._timed_out)
        for hosted, offset, result in waiting:
            hosted.when_committed(offset, lambda error, result=result: self._committed(result, error))  # type: ignore[misc]

    def _committed(self, result: PartitionProduceResponse, error: ErrorCode) -> None:
        if self._unfinished.pop(id(result), None) is None:
            return
        if error:
            _fail(result, error)
        if not self._unfinished:
            self._timer.cancel()
            self._call.answer(self._response)

    def _timed_out(self) -> None:
        if not self._unfinished:
            return
        for result in self._unfinished.values():
            _fail(result, ErrorCode.REQUEST_TIMED_OUT)
        self._unfinished.clear()
        self._call.answer(self._response)


def _fail(result: PartitionProduceResponse, error: ErrorCode) -> None:
    result.error_code = error
    result.base_offset = -1
    result.log_append_time_ms = -1


def init_producer_id(broker: Broker, request: InitProducerIdRequest, call: Call) -> Any:
    if request.transactional_id == "" or (request.producer_id < 0) != (request.producer_epoch < 0):
        return InitProducerIdResponse(error_code=ErrorCode.INVALID_REQUEST, producer_id=-1, producer_epoch=-1)
    if request.transactional_id is not None:
        return InitProducerIdResponse(
            error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, producer_id=-1, producer_epoch=-1
        )

    def allocated(producer_id: int) -> None:
        call.answer(InitProducerIdResponse(producer_id=producer_id, producer_epoch=0))

    def refused() -> None:
        call.answer(
            InitProducerIdResponse(
                error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, producer_id=-1, producer_epoch=-1
            )
        )

    broker.producer_ids.next(allocated, refused)
    return WAITING
