"""Produce, and InitProducerId, which gives an idempotent producer its id.

Versions 0 to 2 of Produce carried the old message formats and are not read (KIP-896). From version 13 on a
topic is identified only by its id (KIP-516), so a handler uses ``name`` or ``topic_id`` depending on the version,
never both.
"""

from __future__ import annotations

from penstock.protocol.messages.leader_hints import LeaderIdAndEpoch, NodeEndpoint
from penstock.protocol.schema import (
    Message,
    Response,
    array,
    int16,
    int32,
    int64,
    record_set,
    string,
    struct,
    uuid,
)


class PartitionProduceData(Message):
    index: int = int32()
    # A view into the request's buffer, invalid once that buffer is reused.
    records: memoryview | None = record_set()


class TopicProduceData(Message):
    name: str = string("0-12")
    topic_id: bytes = uuid("13+")
    partition_data: list[PartitionProduceData] = array(PartitionProduceData)


class ProduceRequest(Message, key=0, versions="3-13", flexible="9+"):
    transactional_id: str | None = string(nullable=True, default=None)
    # 0: no response; 1: after the leader's append; -1: after all in-sync replicas have it.
    acks: int = int16()
    timeout_ms: int = int32()
    topic_data: list[TopicProduceData] = array(TopicProduceData)


class BatchIndexAndErrorMessage(Message):
    batch_index: int = int32()
    batch_index_error_message: str | None = string(nullable=True, default=None)


class PartitionProduceResponse(Message):
    index: int = int32()
    error_code: int = int16()
    base_offset: int = int64()
    log_append_time_ms: int = int64(default=-1)
    log_start_offset: int = int64("5+", default=-1)
    # Which records of the batch were refused, and why (KIP-467).
    record_errors: list[BatchIndexAndErrorMessage] = array(BatchIndexAndErrorMessage, "8+")
    error_message: str | None = string("8+", nullable=True, default=None)
    # With NOT_LEADER_OR_FOLLOWER: the current leader, which saves a metadata request (KIP-951).
    current_leader: LeaderIdAndEpoch | None = struct(LeaderIdAndEpoch, "10+", tag=0)


class TopicProduceResponse(Message):
    name: str = string("0-12")
    topic_id: bytes = uuid("13+")
    partition_responses: list[PartitionProduceResponse] = array(PartitionProduceResponse)


class ProduceResponse(Response, key=0, versions="3-13", flexible="9+"):
    responses: list[TopicProduceResponse] = array(TopicProduceResponse)
    throttle_time_ms: int = int32()
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "10+", tag=0)

    @classmethod
    def for_error(
        cls, request: ProduceRequest, version: int, error: int, message: str | None = None
    ) -> ProduceResponse:
        return cls(
            responses=[
                TopicProduceResponse(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partition_responses=[
                        PartitionProduceResponse(
                            index=partition.index, error_code=error, base_offset=-1, error_message=message
                        )
                        for partition in topic.partition_data
                    ],
                )
                for topic in request.topic_data
            ]
        )


class InitProducerIdRequest(Message, key=22, versions="0-5", flexible="2+"):
    transactional_id: str | None = string(nullable=True)
    transaction_timeout_ms: int = int32()
    producer_id: int = int64("3+", default=-1)
    producer_epoch: int = int16("3+", default=-1)


class InitProducerIdResponse(Response, key=22, versions="0-5", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()

    @classmethod
    def for_error(
        cls, request: InitProducerIdRequest, version: int, error: int, message: str | None = None
    ) -> InitProducerIdResponse:
        return cls(error_code=error, producer_id=-1, producer_epoch=-1)
