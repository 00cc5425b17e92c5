"""Produce (3-13) and InitProducerId (0-5).

Each partition's batch succeeds or fails on its own. A partition whose append waits for its replicas or for an fsync
delays the whole response, at most for the request's timeout. What was appended stays appended, so after
REQUEST_TIMED_OUT the records may be there, and an idempotent producer's retry finds out. A broker that does not
lead a partition names the leader (KIP-951). With acks=0 the client expects no response, so an error closes the
connection: the only sign that such a producer notices.

Departures from Kafka: records inside a batch are not inspected (the header and the CRC are), and transactional ids
are refused until transactions exist.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.handlers.leader_hints import endpoints_of, name_leader
from penstock.broker.network.connection import CLOSE, NO_RESPONSE, WAITING, Call
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.produced_batch import Appended
from penstock.metadata.topics import is_internal
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)

ZSTD_SINCE_VERSION = 7
TOPIC_IDS_SINCE_VERSION = 13

ALL = -1


def produce(broker: Broker, request: ProduceRequest, call: Call) -> Any:
    acks = request.acks
    if request.transactional_id is not None:
        return _refused(request, call, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if not -1 <= acks <= 1:
        return _refused(request, call, ErrorCode.INVALID_REQUIRED_ACKS)
    failed = False
    allow_zstd = call.version >= ZSTD_SINCE_VERSION
    by_id = call.version >= TOPIC_IDS_SINCE_VERSION
    is_serving = broker.membership.is_serving()
    topics = []
    waiting: list[tuple[HostedPartition, Appended, PartitionProduceResponse]] = []
    leaders: dict[int, None] = {}
    for topic in request.topic_data:
        name = broker.image.topic_name(topic.topic_id) if by_id else topic.name
        results = []
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
                appended = hosted.append(records, allow_zstd=allow_zstd, by_all=acks == ALL)
                error = appended.error
                if not error:
                    result.base_offset = appended.base_offset
                    result.log_append_time_ms = appended.log_append_time_ms
                    result.log_start_offset = hosted.log.log_start_offset
                    if acks and not hosted.is_acknowledged(appended, by_all=acks == ALL):
                        waiting.append((hosted, appended, result))
            if error:
                result.error_code = error
                failed = True
                if error == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                    name_leader(broker, name, data.index, result, leaders)
        topics.append(TopicProduceResponse(name=name, topic_id=topic.topic_id, partition_responses=results))
    if acks == 0:
        return CLOSE if failed else NO_RESPONSE
    response = ProduceResponse(responses=topics)
    if leaders:
        response.node_endpoints = endpoints_of(broker, call, leaders)
    if not waiting:
        return response
    _PendingProduce(broker, call, response, waiting, request.timeout_ms, by_all=acks == ALL)
    return WAITING


def _refused(request: ProduceRequest, call: Call, error: ErrorCode) -> Any:
    return ProduceResponse.for_error(request, call.version, error) if request.acks else CLOSE


def _why_not_here(broker: Broker, name: str, index: int, *, by_id: bool) -> ErrorCode:
    if broker.image.has_partition(name, index):
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    return ErrorCode.UNKNOWN_TOPIC_ID if by_id and not name else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class _PendingProduce:
    """A response that waits until every partition's batch is acknowledged, or the timeout is over."""

    __slots__ = ("_call", "_response", "_timer", "_unfinished")

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
        self._unfinished = {id(result): result for _, _, result in waiting}
        self._timer = broker.environment.spawn.later(max(0, timeout_ms), self._timed_out)
        for hosted, appended, result in waiting:
            hosted.when_acknowledged(
                appended,
                lambda error, result=result: self._committed(result, error),  # type: ignore[misc]
                by_all=by_all,
            )

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
        return error_response(request, call.version, ErrorCode.INVALID_REQUEST)
    if request.transactional_id is not None:
        return error_response(request, call.version, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

    def allocated(producer_id: int) -> None:
        call.answer(InitProducerIdResponse(producer_id=producer_id, producer_epoch=0))

    def refused() -> None:
        call.answer(error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE))

    broker.producer_ids.next(allocated, refused)
    return WAITING
