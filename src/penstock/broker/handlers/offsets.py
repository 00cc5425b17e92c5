"""ListOffsets (1-11), OffsetForLeaderEpoch (2-4) and DeleteRecords (0-2): the offsets of a partition.

ListOffsets by timestamp is exact: the broker looks inside a batch for it. There is no remote tier, so "earliest
local" is the earliest offset and there is no "latest tiered".
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.authorization import Operation, ResourceType
from penstock.broker.network.connection import WAITING, Call
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.log.log import OffsetOutOfRange
from penstock.metadata.topics import is_internal
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.offsets import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
    EpochEndOffset,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)

MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
EARLIEST_PENDING_UPLOAD = -6
SPECIAL_SINCE_VERSION = {
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
NOT_AVAILABLE_SINCE_VERSION = 5
READ_COMMITTED = 1
# DeleteRecords: everything below the high watermark.
ALL = -1


def list_offsets(broker: Broker, request: ListOffsetsRequest, call: Call) -> ListOffsetsResponse:
    read_committed = request.isolation_level == READ_COMMITTED
    seen: set[tuple[str, int]] = set()
    repeated: set[tuple[str, int]] = set()
    for topic in request.topics:
        for wanted in topic.partitions:
            name = (topic.name, wanted.partition_index)
            (repeated if name in seen else seen).add(name)
    topics = []
    for topic in request.topics:
        results = []
        is_denied = not call.allows(Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
        for wanted in topic.partitions:
            result = ListOffsetsPartitionResponse(partition_index=wanted.partition_index)
            results.append(result)
            if is_denied:
                result.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                continue
            if (topic.name, wanted.partition_index) in repeated:
                result.error_code = ErrorCode.INVALID_REQUEST
                continue
            hosted = _led_here(broker, topic.name, wanted.partition_index, wanted.current_leader_epoch)
            if isinstance(hosted, ErrorCode):
                result.error_code = hosted
                continue
            try:
                _find(hosted, wanted, call.version, result, read_committed=read_committed)
            except OSError:
                result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=results))
    return ListOffsetsResponse(topics=topics)


def _find(
    hosted: HostedPartition,
    wanted: ListOffsetsPartition,
    version: int,
    result: ListOffsetsPartitionResponse,
    *,
    read_committed: bool,
) -> None:
    log = hosted.log
    # Exclusive: what this consumer can read.
    end_offset = hosted.last_stable_offset if read_committed else hosted.high_watermark
    match wanted.timestamp:
        case timestamp if version < SPECIAL_SINCE_VERSION.get(timestamp, 0):
            result.error_code = ErrorCode.UNSUPPORTED_VERSION
        case -1 if not hosted.replication.has_established:
            # The high watermark is not known yet, so any answer could turn out wrong (KIP-207).
            result.error_code = _not_available(version)
        case -1:  # latest
            result.offset = end_offset
            result.leader_epoch = hosted.leader_epoch
        case -2 | -4:  # earliest, earliest local
            result.offset = log.log_start_offset
            # The epoch of the record at that offset, or of the next one to be written there.
            is_empty = log.log_start_offset == log.log_end_offset
            result.leader_epoch = hosted.leader_epoch if is_empty else log.epochs.epoch_at(result.offset)
        case -5 | -6:  # latest tiered, earliest pending upload: there is no tier
            result.leader_epoch = -1
        case timestamp:
            if timestamp == MAX_TIMESTAMP:
                found = log.latest_timestamp()
            elif timestamp < 0:
                result.error_code = ErrorCode.UNSUPPORTED_VERSION
                return
            else:
                found = log.offset_for_timestamp(timestamp)
            if found is not None and found[0] < end_offset:
                result.offset, result.timestamp, result.leader_epoch = found
            elif not hosted.replication.has_established:
                # A later record may match (KIP-207). A client told "none" would continue at the end and skip it.
                result.error_code = _not_available(version)


def _not_available(version: int) -> ErrorCode:
    return (
        ErrorCode.OFFSET_NOT_AVAILABLE
        if version >= NOT_AVAILABLE_SINCE_VERSION
        else ErrorCode.LEADER_NOT_AVAILABLE
    )


def offset_for_leader_epoch(
    broker: Broker, request: OffsetForLeaderEpochRequest, call: Call
) -> OffsetForLeaderEpochResponse:
    topics = []
    for topic in request.topics:
        results = []
        is_denied = not call.allows(Operation.DESCRIBE, ResourceType.TOPIC, topic.topic)
        for wanted in topic.partitions:
            result = EpochEndOffset(partition=wanted.partition)
            results.append(result)
            if is_denied:
                result.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                continue
            hosted = _led_here(broker, topic.topic, wanted.partition, wanted.current_leader_epoch)
            if isinstance(hosted, ErrorCode):
                result.error_code = hosted
                continue
            try:
                log = hosted.log
                if wanted.leader_epoch == hosted.leader_epoch:
                    # Also when the epoch has no records yet.
                    result.leader_epoch, result.end_offset = hosted.leader_epoch, log.log_end_offset
                else:
                    result.leader_epoch, result.end_offset = log.epochs.end_offset_for(
                        wanted.leader_epoch, log.log_end_offset
                    )
            except OSError:
                result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        topics.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=results))
    return OffsetForLeaderEpochResponse(topics=topics)


def delete_records(broker: Broker, request: DeleteRecordsRequest, call: Call) -> Any:
    topics = []
    deleted: list[tuple[HostedPartition, DeleteRecordsPartitionResult]] = []
    for topic in request.topics:
        results = []
        is_denied = not call.allows(Operation.DELETE, ResourceType.TOPIC, topic.name)
        for wanted in topic.partitions:
            result = DeleteRecordsPartitionResult(partition_index=wanted.partition_index, low_watermark=-1)
            results.append(result)
            if is_denied:
                result.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                continue
            hosted = _led_here(broker, topic.name, wanted.partition_index)
            if isinstance(hosted, ErrorCode):
                result.error_code = hosted
            elif is_internal(topic.name) or (hosted.config.is_compact and not hosted.config.is_delete):
                # Deleting would lose the last values of keys, which such a topic keeps for ever.
                result.error_code = ErrorCode.POLICY_VIOLATION
            else:
                try:
                    _ = hosted.log
                    offset = hosted.high_watermark if wanted.offset == ALL else wanted.offset
                    if not 0 <= offset <= hosted.high_watermark:
                        result.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
                    else:
                        result.low_watermark = hosted.delete_before(offset)
                        deleted.append((hosted, result))
                except OffsetOutOfRange:
                    result.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
                except OSError:
                    result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        topics.append(DeleteRecordsTopicResult(name=topic.name, partitions=results))
    response = DeleteRecordsResponse(topics=topics)
    if not deleted:
        return response
    _PendingDeletion(broker, call, response, deleted, request.timeout_ms)
    return WAITING


class _PendingDeletion:
    """A response that waits until the deleted records cannot come back.

    The log start offset is stored only in the checkpoint, so that has to be written; and the in-sync followers have
    to delete the records too, because one of them may lead next.
    """

    __slots__ = ("_call", "_response", "_timer", "_unfinished")

    def __init__(
        self,
        broker: Broker,
        call: Call,
        response: DeleteRecordsResponse,
        deleted: list[tuple[HostedPartition, DeleteRecordsPartitionResult]],
        timeout_ms: int,
    ) -> None:
        self._call = call
        self._response = response
        # The partitions' results, and None for the checkpoint.
        self._unfinished: dict[int, DeleteRecordsPartitionResult | None] = {0: None}
        self._unfinished.update((id(result), result) for _, result in deleted)
        self._timer = broker.environment.spawn.later(max(0, timeout_ms), self._timed_out)
        broker.housekeeping.checkpoint(self._checkpointed)
        for hosted, result in deleted:
            hosted.when_deleted_before(
                result.low_watermark,
                lambda error, result=result: self._done(id(result), error),  # type: ignore[misc]
            )

    def _checkpointed(self, is_written: bool) -> None:
        if not is_written:
            # The records are gone now but may be back after the next start: the client should retry.
            for topic in self._response.topics:
                for result in topic.partitions:
                    if not result.error_code:
                        _fail(result, ErrorCode.KAFKA_STORAGE_ERROR)
        self._done(0)

    def _done(self, key: int, error: ErrorCode = ErrorCode.NONE) -> None:
        if key not in self._unfinished:
            return
        result = self._unfinished.pop(key)
        if error and result is not None:
            _fail(result, error)
        if not self._unfinished:
            self._timer.cancel()
            self._call.answer(self._response)

    def _timed_out(self) -> None:
        """The followers take too long. The response still waits for the checkpoint."""
        for key in [key for key, result in self._unfinished.items() if result is not None]:
            self._done(key, ErrorCode.REQUEST_TIMED_OUT)


def _fail(result: DeleteRecordsPartitionResult, error: ErrorCode) -> None:
    result.error_code = error
    result.low_watermark = -1


def _led_here(
    broker: Broker, topic: str, index: int, current_leader_epoch: int = -1
) -> HostedPartition | ErrorCode:
    """The partition, if this broker leads it in the epoch that the client expects (KIP-320)."""
    hosted = broker.partitions.get(topic, index)
    if hosted is None:
        if broker.image.has_partition(topic, index):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if not broker.membership.is_serving():
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    if 0 <= current_leader_epoch < hosted.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if current_leader_epoch > hosted.leader_epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    if not hosted.is_leader:
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    return ErrorCode.KAFKA_STORAGE_ERROR if hosted.is_offline else hosted
