"""Where replicas are and who leads them: ElectLeaders (0-2), AlterPartitionReassignments (0-1),
ListPartitionReassignments (0), AlterReplicaLogDirs (1-2) and DescribeLogDirs (1-5).

All but the last two are for the controller and passed on to it. Those are asked of each broker about itself.

Departure from Kafka: AlterReplicaLogDirs moves nothing. A replica that lies in the directory asked for is where it
should be, and any other move is refused with UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.broker.connection import Call
from penstock.broker.partitions import HostedPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker


def elect_leaders(broker: Broker, request: ElectLeadersRequest, call: Call) -> Any:
    return broker.decide(request, call)


def alter_partition_reassignments(
    broker: Broker, request: AlterPartitionReassignmentsRequest, call: Call
) -> Any:
    return broker.decide(request, call)


def list_partition_reassignments(
    broker: Broker, request: ListPartitionReassignmentsRequest, call: Call
) -> Any:
    return broker.decide(request, call)


def alter_replica_log_dirs(
    broker: Broker, request: AlterReplicaLogDirsRequest, call: Call
) -> AlterReplicaLogDirsResponse:
    results: dict[str, AlterReplicaLogDirTopicResult] = {}
    for asked in request.dirs:
        for topic in asked.topics:
            result = results.setdefault(
                topic.name, AlterReplicaLogDirTopicResult(topic_name=topic.name, partitions=[])
            )
            result.partitions += [
                AlterReplicaLogDirPartitionResult(
                    partition_index=index, error_code=_move_error(broker, topic.name, index, asked.path)
                )
                for index in topic.partitions
            ]
    return AlterReplicaLogDirsResponse(results=list(results.values()))


def _move_error(broker: Broker, topic: str, index: int, path: str) -> ErrorCode:
    """Of moving a replica of this broker to one of its directories; the errors in Kafka's order."""
    target = next((each for each in broker.storage.directories if each.path == path), None)
    if target is None:
        return ErrorCode.LOG_DIR_NOT_FOUND
    if not target.is_online:
        return ErrorCode.KAFKA_STORAGE_ERROR
    hosted = broker.partitions.get(topic, index)
    if hosted is None:
        return ErrorCode.REPLICA_NOT_AVAILABLE
    directory = broker.storage.directory_of(hosted)
    # One without records has no place yet; where there is one directory, that is where it will be.
    if directory is target or (directory is None and len(broker.storage.directories) == 1):
        return ErrorCode.NONE
    return ErrorCode.UNSUPPORTED_VERSION


def describe_log_dirs(broker: Broker, request: DescribeLogDirsRequest, call: Call) -> DescribeLogDirsResponse:
    wanted = None
    if request.topics is not None:
        wanted = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
    hosted_by_directory: dict[bytes, list[HostedPartition]] = {}
    for hosted in broker.partitions:
        if wanted is None or (hosted.topic, hosted.index) in wanted:
            directory = broker.storage.directory_of(hosted)
            if directory is not None:
                hosted_by_directory.setdefault(directory.id, []).append(hosted)
    results = []
    for directory in broker.storage.directories:
        if not directory.is_online:
            results.append(
                DescribeLogDirsResult(
                    error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=directory.path, topics=[]
                )
            )
            continue
        topics: dict[str, DescribeLogDirsTopic] = {}
        for hosted in hosted_by_directory.get(directory.id, []):
            topic = topics.setdefault(hosted.topic, DescribeLogDirsTopic(name=hosted.topic, partitions=[]))
            topic.partitions.append(
                DescribeLogDirsPartition(
                    partition_index=hosted.index,
                    partition_size=hosted.log.size_bytes if hosted.is_open else 0,
                    offset_lag=0,
                    is_future_key=False,
                )
            )
        results.append(DescribeLogDirsResult(log_dir=directory.path, topics=list(topics.values())))
    return DescribeLogDirsResponse(results=results)
