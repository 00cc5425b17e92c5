"""Replica placement: elections, reassignments, log directories.

Administrators send these requests. The controller handles all of them except DescribeLogDirs, which each broker
answers for itself.
"""

from __future__ import annotations

from penstock.protocol.schema import (
    OWN_TAGS,
    Message,
    Response,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    string,
    struct,
)


class TopicPartitions(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class ElectLeadersRequest(Message, key=43, versions="0-2", flexible="2+"):
    # 0: the preferred leader, 1: an unclean one (KIP-460).
    election_type: int = int8("1+")
    # None: all partitions.
    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, nullable=True)
    timeout_ms: int = int32(default=60_000)


class PartitionResult(Message):
    partition_id: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class ReplicaElectionResult(Message):
    topic: str = string()
    partition_result: list[PartitionResult] = array(PartitionResult)


class ElectLeadersResponse(Response, key=43, versions="0-2", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16("1+")
    replica_election_results: list[ReplicaElectionResult] = array(ReplicaElectionResult)

    @classmethod
    def for_error(
        cls, request: ElectLeadersRequest, version: int, error: int, message: str | None = None
    ) -> ElectLeadersResponse:
        if version > 0:
            return cls(error_code=error)
        return cls(
            replica_election_results=[
                ReplicaElectionResult(
                    topic=topic.topic,
                    partition_result=[
                        PartitionResult(partition_id=index, error_code=error, error_message=message)
                        for index in topic.partitions
                    ],
                )
                for topic in request.topic_partitions or []
            ]
        )


class ReassignablePartition(Message):
    partition_index: int = int32()
    # None: cancel the reassignment in progress.
    replicas: list[int] | None = array(int32, nullable=True, default=None)


class ReassignableTopic(Message):
    name: str = string()
    partitions: list[ReassignablePartition] = array(ReassignablePartition)


class AlterPartitionReassignmentsRequest(Message, key=45, versions="0-1", flexible="0+"):
    timeout_ms: int = int32(default=60_000)
    allow_replication_factor_change: bool = boolean("1+", default=True)
    topics: list[ReassignableTopic] = array(ReassignableTopic)


class ReassignablePartitionResponse(Message):
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class ReassignableTopicResponse(Message):
    name: str = string()
    partitions: list[ReassignablePartitionResponse] = array(ReassignablePartitionResponse)


class AlterPartitionReassignmentsResponse(Response, key=45, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    allow_replication_factor_change: bool = boolean("1+", default=True)
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    responses: list[ReassignableTopicResponse] = array(ReassignableTopicResponse)


class ListPartitionReassignmentsTopics(Message):
    name: str = string()
    partition_indexes: list[int] = array(int32)


class ListPartitionReassignmentsRequest(Message, key=46, versions="0", flexible="0+"):
    timeout_ms: int = int32(default=60_000)
    # None: all topics.
    topics: list[ListPartitionReassignmentsTopics] | None = array(
        ListPartitionReassignmentsTopics, nullable=True, default=None
    )


class OngoingPartitionReassignment(Message):
    partition_index: int = int32()
    # The partition's current replicas: old and new together.
    replicas: list[int] = array(int32)
    adding_replicas: list[int] = array(int32)
    removing_replicas: list[int] = array(int32)


class OngoingTopicReassignment(Message):
    name: str = string()
    partitions: list[OngoingPartitionReassignment] = array(OngoingPartitionReassignment)


class ListPartitionReassignmentsResponse(Response, key=46, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    topics: list[OngoingTopicReassignment] = array(OngoingTopicReassignment)


class DescribableLogDirTopic(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class DescribeLogDirsRequest(Message, key=35, versions="1-5", flexible="2+"):
    # None: all topics.
    topics: list[DescribableLogDirTopic] | None = array(DescribableLogDirTopic, nullable=True)
    # Ours: whether to include how far logs are compacted.
    include_cleaning: bool = boolean("2+", tag=OWN_TAGS)


class LastCleaning(Message):
    """Ours: the last pass of the cleaner over a log."""

    ended_ms: int = int64(default=-1)
    duration_ms: int = int64()
    bytes_before: int = int64()
    bytes_after: int = int64()
    records_before: int = int64()
    records_after: int = int64()


class LogCleaning(Message):
    """Ours: how far a log is compacted."""

    # Of what may be compacted; and the part of it that is not compacted yet. The default is not a real value,
    # because a tagged field with nothing but defaults is not sent.
    cleanable_bytes: int = int64(default=-1)
    dirty_bytes: int = int64()
    first_dirty_offset: int = int64()
    # Why the cleaner leaves this log alone; None when it does not.
    set_aside: str | None = string(nullable=True, default=None)
    # None: it was not compacted yet.
    last_run: LastCleaning | None = struct(LastCleaning, tag=OWN_TAGS)


class DescribeLogDirsPartition(Message):
    partition_index: int = int32()
    partition_size: int = int64()
    # How far the end of the log is behind the high watermark.
    offset_lag: int = int64()
    is_future_key: bool = boolean()
    # Ours: only if ``include_cleaning``, and of compacted logs that are open.
    cleaning: LogCleaning | None = struct(LogCleaning, "2+", tag=OWN_TAGS)


class DescribeLogDirsTopic(Message):
    name: str = string()
    partitions: list[DescribeLogDirsPartition] = array(DescribeLogDirsPartition)


class DescribeLogDirsResult(Message):
    error_code: int = int16()
    log_dir: str = string()
    topics: list[DescribeLogDirsTopic] = array(DescribeLogDirsTopic)
    total_bytes: int = int64("4+", default=-1)
    usable_bytes: int = int64("4+", default=-1)
    is_cordoned: bool = boolean("5+")


class DescribeLogDirsResponse(Response, key=35, versions="1-5", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16("3+")
    results: list[DescribeLogDirsResult] = array(DescribeLogDirsResult)
