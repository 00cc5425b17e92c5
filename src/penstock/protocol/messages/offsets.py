"""Offsets in a log: ListOffsets, OffsetForLeaderEpoch and DeleteRecords.

ListOffsets takes a timestamp or a negative sentinel: -1 latest, -2 earliest, -3 the record with the largest
timestamp (KIP-734), -4 earliest local, -5 latest tiered. Each exists only from a certain version on.
"""

from __future__ import annotations

from penstock.protocol.schema import Message, Response, array, int8, int16, int32, int64, string


class ListOffsetsPartition(Message):
    partition_index: int = int32()
    current_leader_epoch: int = int32("4+", default=-1)
    # Or a negative sentinel, see above.
    timestamp: int = int64()


class ListOffsetsTopic(Message):
    name: str = string()
    partitions: list[ListOffsetsPartition] = array(ListOffsetsPartition)


class ListOffsetsRequest(Message, key=2, versions="1-11", flexible="6+"):
    replica_id: int = int32()
    isolation_level: int = int8("2+")
    topics: list[ListOffsetsTopic] = array(ListOffsetsTopic)
    timeout_ms: int = int32("10+")


class ListOffsetsPartitionResponse(Message):
    partition_index: int = int32()
    error_code: int = int16()
    timestamp: int = int64(default=-1)
    offset: int = int64(default=-1)
    leader_epoch: int = int32("4+", default=-1)


class ListOffsetsTopicResponse(Message):
    name: str = string()
    partitions: list[ListOffsetsPartitionResponse] = array(ListOffsetsPartitionResponse)


class ListOffsetsResponse(Response, key=2, versions="1-11", flexible="6+"):
    throttle_time_ms: int = int32("2+")
    topics: list[ListOffsetsTopicResponse] = array(ListOffsetsTopicResponse)

    @classmethod
    def for_error(
        cls, request: ListOffsetsRequest, version: int, error: int, message: str | None = None
    ) -> ListOffsetsResponse:
        return cls(
            topics=[
                ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[
                        ListOffsetsPartitionResponse(
                            partition_index=partition.partition_index, error_code=error
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )


class OffsetForLeaderPartition(Message):
    partition: int = int32()
    current_leader_epoch: int = int32(default=-1)
    leader_epoch: int = int32()


class OffsetForLeaderTopic(Message):
    topic: str = string()
    partitions: list[OffsetForLeaderPartition] = array(OffsetForLeaderPartition)


class OffsetForLeaderEpochRequest(Message, key=23, versions="2-4", flexible="4+"):
    replica_id: int = int32("3+", default=-2)
    topics: list[OffsetForLeaderTopic] = array(OffsetForLeaderTopic)


class EpochEndOffset(Message):
    error_code: int = int16()
    partition: int = int32()
    leader_epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


class OffsetForLeaderTopicResult(Message):
    topic: str = string()
    partitions: list[EpochEndOffset] = array(EpochEndOffset)


class OffsetForLeaderEpochResponse(Response, key=23, versions="2-4", flexible="4+"):
    throttle_time_ms: int = int32()
    topics: list[OffsetForLeaderTopicResult] = array(OffsetForLeaderTopicResult)

    @classmethod
    def for_error(
        cls, request: OffsetForLeaderEpochRequest, version: int, error: int, message: str | None = None
    ) -> OffsetForLeaderEpochResponse:
        return cls(
            topics=[
                OffsetForLeaderTopicResult(
                    topic=topic.topic,
                    partitions=[
                        EpochEndOffset(partition=partition.partition, error_code=error)
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )


class DeleteRecordsPartition(Message):
    partition_index: int = int32()
    offset: int = int64()


class DeleteRecordsTopic(Message):
    name: str = string()
    partitions: list[DeleteRecordsPartition] = array(DeleteRecordsPartition)


class DeleteRecordsRequest(Message, key=21, versions="0-2", flexible="2+"):
    topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic)
    timeout_ms: int = int32()


class DeleteRecordsPartitionResult(Message):
    partition_index: int = int32()
    low_watermark: int = int64()
    error_code: int = int16()


class DeleteRecordsTopicResult(Message):
    name: str = string()
    partitions: list[DeleteRecordsPartitionResult] = array(DeleteRecordsPartitionResult)


class DeleteRecordsResponse(Response, key=21, versions="0-2", flexible="2+"):
    throttle_time_ms: int = int32()
    topics: list[DeleteRecordsTopicResult] = array(DeleteRecordsTopicResult)

    @classmethod
    def for_error(
        cls, request: DeleteRecordsRequest, version: int, error: int, message: str | None = None
    ) -> DeleteRecordsResponse:
        return cls(
            topics=[
                DeleteRecordsTopicResult(
                    name=topic.name,
                    partitions=[
                        DeleteRecordsPartitionResult(
                            partition_index=partition.partition_index, error_code=error, low_watermark=-1
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )
