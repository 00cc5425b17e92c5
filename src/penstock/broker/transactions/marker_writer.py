"""Writes the markers that end transactions into partitions that this broker leads.

A marker is answered when all in-sync replicas have it. A marker that was written before, and is sent again because
the answer was lost, is not written twice.

An operator may end a hanging transaction (KIP-664): one that is open in a partition, while no coordinator knows of
it. That must be an abort, of an open transaction of exactly this producer epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from penstock.broker.coordination.coordinators import Coordinators
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.transactions.open_elsewhere import OpenElsewhere
from penstock.broker.transactions.verification import Verification
from penstock.groups.coordinator import Coordinator as GroupCoordinator
from penstock.metadata.image import Image
from penstock.metadata.topics import CONSUMER_OFFSETS, is_internal
from penstock.model import NO_TOPIC_ID, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from penstock.protocol.records import Marker
from penstock.transactions.changes import CLASSIC, V2

Done = Callable[[ErrorCode], None]


# Producers in partitions whose last marker is remembered. A delayed marker is not older than the sender's timeout.
WRITTEN_MAX = 100_000

# Topic id, partition, producer id.
Key: TypeAlias = tuple[TopicId, int, int]


class _Written(NamedTuple):
    """A marker that was appended here."""

    # Of the data partition: another leader in between may have removed the marker.
    leader_epoch: int
    coordinator_epoch: int
    number: int

    def is_before(self, last: _Written | None) -> bool:
        """Whether it is the last marker again, or one before it."""
        return last is not None and self.number >= 0 and self[:2] == last[:2] and self.number <= last.number


class MarkerWriter:
    def __init__(
        self,
        partitions: Partitions,
        groups: Coordinators[GroupCoordinator],
        verification: Verification,
        open_elsewhere: OpenElsewhere,
        *,
        image: Callable[[], Image],
        is_serving: Callable[[], bool],
    ) -> None:
        self._partitions = partitions
        self._groups = groups
        self._verification = verification
        self._open_elsewhere = open_elsewhere
        # The last marker of each producer in each partition, the latest at the end.
        self._written: dict[Key, _Written] = {}
        self._image = image
        self._is_serving = is_serving

    def write(
        self,
        request: WriteTxnMarkersRequest,
        answer: Callable[[WriteTxnMarkersResponse], None],
        *,
        by_operator: bool = False,
    ) -> None:
        """Write all markers; ``answer`` gets the response when each is written or refused."""
        write = self._write_for_operator if by_operator else self._write
        response = WriteTxnMarkersResponse.for_error(request, 1, ErrorCode.NONE)
        # One more than there are, until all were begun.
        unfinished = 1

        def settled(result: WritableTxnMarkerPartitionResult | None, error: ErrorCode) -> None:
            nonlocal unfinished
            if result is not None:
                result.error_code = error
            unfinished -= 1
            if not unfinished:
                answer(response)

        for marker, markers in zip(request.markers, response.markers, strict=True):
            for topic, results in zip(marker.topics, markers.topics, strict=True):
                for result in results.partitions:
                    unfinished += 1
                    write(
                        marker,
                        topic,
                        result.partition_index,
                        lambda error, result=result: settled(result, error),  # type: ignore[misc]
                    )
        settled(None, ErrorCode.NONE)

    def _write_for_operator(
        self, wanted: WritableTxnMarker, topic: WritableTxnMarkerTopic, index: int, done: Done
    ) -> None:
        hosted = self._led_here(topic, index)
        error = hosted if isinstance(hosted, ErrorCode) else self._operator_error(hosted, wanted)
        if error:
            done(error)
            return

        def asked(error: ErrorCode) -> None:
            # It may have ended meanwhile.
            hosted = self._led_here(topic, index)
            if not error:
                error = hosted if isinstance(hosted, ErrorCode) else self._operator_error(hosted, wanted)
            if error or isinstance(hosted, ErrorCode):
                done(error)
                return
            state = hosted.log.producers.get(wanted.producer_id)
            assert state is not None
            # Not the operator's: that could fence the true coordinator, should it come back.
            wanted.coordinator_epoch = state.coordinator_epoch
            # Nor its number, which would make later markers of the coordinator look late.
            wanted.number = -1
            # The marker has the epoch of the transaction, whatever its client spoke.
            wanted.transaction_version = CLASSIC
            self._write(wanted, topic, index, done)

        self._open_elsewhere.ask(wanted.producer_id, topic.name, index, asked)

    def _led_here(self, topic: WritableTxnMarkerTopic, index: int) -> HostedPartition | ErrorCode:
        hosted = self._partitions.get(topic.name, index)
        if hosted is None:
            known = self._image().has_partition(topic.name, index)
            return ErrorCode.NOT_LEADER_OR_FOLLOWER if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if topic.topic_id not in (NO_TOPIC_ID, hosted.topic_id):
            # One of the same name, created later or earlier. It may have the next transaction of the producer.
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if not self._is_serving() or not hosted.is_serving:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        try:
            # Before that, what this log takes for an open transaction may be removed again.
            return hosted if hosted.replication.has_established else ErrorCode.NOT_LEADER_OR_FOLLOWER
        except OSError:
            return ErrorCode.KAFKA_STORAGE_ERROR

    def _write(
        self, wanted: WritableTxnMarker, topic: WritableTxnMarkerTopic, index: int, done: Done
    ) -> None:
        hosted = self._led_here(topic, index)
        if isinstance(hosted, ErrorCode):
            done(hosted)
            return
        key = (hosted.topic_id, hosted.index, wanted.producer_id)
        written = _Written(hosted.leader_epoch, wanted.coordinator_epoch, wanted.number)
        if written.is_before(self._written.get(key)):
            # It was delayed, and sent again meanwhile. The producer may have begun the next transaction, in the
            # same epoch if it is a classic one.
            hosted.when_committed(hosted.log.log_end_offset, done)
            return
        marker = Marker(wanted.transaction_result, wanted.coordinator_epoch)
        is_v2 = wanted.transaction_version >= V2
        # A batch that waits for its verification belongs to the transaction that ends now.
        self._verification.cancel(hosted, wanted.producer_id, wanted.producer_epoch, is_v2=is_v2)
        if topic.name == CONSUMER_OFFSETS:
            coordinator = self._groups.at(index)
            if isinstance(coordinator, ErrorCode):
                done(coordinator)
            elif coordinator.write_marker(
                marker, wanted.producer_id, wanted.producer_epoch, done, is_v2=is_v2
            ):
                self._remember(key, written)
        elif is_internal(topic.name):
            done(ErrorCode.INVALID_TOPIC_EXCEPTION)
        else:
            appended = hosted.append_marker(marker, wanted.producer_id, wanted.producer_epoch, is_v2=is_v2)
            if appended.error:
                done(appended.error)
            else:
                self._remember(key, written)
                hosted.when_acknowledged(appended, done, by_all=True)

    def _remember(self, key: Key, written: _Written) -> None:
        if written.number >= 0:
            self._written.pop(key, None)
            if len(self._written) >= WRITTEN_MAX:
                del self._written[next(iter(self._written))]
            self._written[key] = written

    def _operator_error(self, hosted: HostedPartition, wanted: WritableTxnMarker) -> ErrorCode:
        if wanted.transaction_result:
            # Only the coordinator knows that a transaction may be committed.
            return ErrorCode.INVALID_REQUEST
        state = hosted.log.producers.get(wanted.producer_id)
        if state is None or hosted.log.producers.open_transaction(wanted.producer_id) is None:
            return ErrorCode.INVALID_TXN_STATE
        return ErrorCode.NONE if state.epoch == wanted.producer_epoch else ErrorCode.INVALID_PRODUCER_EPOCH
