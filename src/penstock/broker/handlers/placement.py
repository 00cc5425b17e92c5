"""DescribeLogDirs (1-5), which each broker answers for its own directories.

The sizes of disks and of logs that are not open are asked of the file system in a thread, and the response waits
for that. With our own ``include_cleaning`` the response also says how far each log is compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import WAITING, Call
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.storage.data_directory import size_on_disk
from penstock.environment import Files
from penstock.log.cleaning_state import CleaningReport
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
    LastCleaning,
    LogCleaning,
)


def describe_log_dirs(broker: Broker, request: DescribeLogDirsRequest, call: Call) -> Any:
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
    # Logs that are not open, with their paths.
    closed: list[tuple[DescribeLogDirsPartition, str]] = []
    for directory in broker.storage.directories:
        result = DescribeLogDirsResult(log_dir=directory.path)
        results.append(result)
        if not directory.is_online:
            result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
            continue
        topics: dict[str, DescribeLogDirsTopic] = {}
        for hosted in hosted_by_directory.get(directory.id, []):
            topic = topics.setdefault(hosted.topic, DescribeLogDirsTopic(name=hosted.topic, partitions=[]))
            # The end of a log is never behind its high watermark, so there is no lag.
            partition = DescribeLogDirsPartition(partition_index=hosted.index)
            topic.partitions.append(partition)
            if hosted.is_open:
                partition.partition_size = hosted.log.size_bytes
            else:
                closed.append((partition, directory.path_of(hosted.topic, hosted.index)))
            if request.include_cleaning:
                # A failed disk is noticed by those who use it; here there is nothing to tell.
                with suppress(OSError):
                    partition.cleaning = _cleaning(hosted.cleaning_report())
        result.topics = list(topics.values())
    response = DescribeLogDirsResponse(results=results)
    broker.environment.spawn.in_thread(
        _measuring(broker.environment.files, results, closed), lambda *_: call.answer(response), lane="upkeep"
    )
    return WAITING


def _measuring(
    files: Files,
    results: Sequence[DescribeLogDirsResult],
    closed: Sequence[tuple[DescribeLogDirsPartition, str]],
) -> Callable[[], None]:
    """The work, for a worker thread, that fills in what only the file system knows."""

    def measure() -> None:
        for result in results:
            if not result.error_code:
                # A failed disk is noticed by those who use it; here its size stays unknown.
                with suppress(OSError):
                    result.total_bytes = files.capacity(result.log_dir)
                    result.usable_bytes = files.free_bytes(result.log_dir)
        for partition, path in closed:
            partition.partition_size = size_on_disk(files, path)

    return measure


def _cleaning(report: CleaningReport | None) -> LogCleaning | None:
    if report is None:
        return None
    run = report.last_run
    return LogCleaning(
        cleanable_bytes=report.cleanable_bytes,
        dirty_bytes=report.dirty_bytes,
        first_dirty_offset=report.first_dirty_offset,
        set_aside=report.set_aside,
        last_run=None
        if run is None
        else LastCleaning(
            ended_ms=run.ended_ms,
            duration_ms=run.duration_ms,
            bytes_before=run.bytes_before,
            bytes_after=run.bytes_after,
            records_before=run.records_before,
            records_after=run.records_after,
        ),
    )
