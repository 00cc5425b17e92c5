"""DescribeLogDirs (1-5), which each broker answers for its own directories."""

from __future__ import annotations

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)


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
