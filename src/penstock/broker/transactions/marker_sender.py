"""Sends the markers of ended transactions to the leaders of their partitions, until every partition has its marker.

A coordinator's core says which markers are due, once its decision to end the transaction is committed. Markers for
the same broker are collected while one request to it is under way. A partition that has no leader, or whose leader
cannot write now, is tried again: the outcome of a transaction never changes, so there is no other way to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.logs import Logger
from penstock.broker.network.peers import Peers
from penstock.broker.transactions.local_call import within
from penstock.broker.transactions.marker_writer import MarkerWriter
from penstock.environment import Environment
from penstock.metadata.image import Image
from penstock.model import NO_TOPIC_ID, BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from penstock.transactions.changes import CLASSIC, V2
from penstock.transactions.coordinator import MarkersDue, TransactionCoordinator

CHANNEL = "markers"
WRITE_MARKERS_VERSION = 2
# A leader answers when its in-sync replicas have the markers, or refuses.
TIMEOUT_MS = 10_000
RETRY_MS = 100
# Markers in one request. More wait for the next one.
MARKERS_MAX = 1_000
# Of the number of an end, for the count in one process. Above them is the broker epoch: a restarted coordinator may
# have the same epoch as before, and its numbers must not begin again.
NUMBER_BITS = 30

Coordinator = CoordinatorPartition[TransactionCoordinator]


class _Marker(NamedTuple):
    """One transaction's marker for one partition."""

    coordinator: Coordinator
    due: MarkersDue
    # Tells the end of a transaction from the ones before, for the partition's leader.
    number: int
    topic: str
    partition: int


class MarkerSender:
    def __init__(
        self,
        environment: Environment,
        peers: Peers,
        writer: MarkerWriter,
        logger: Logger,
        *,
        node_id: BrokerId,
        image: Callable[[], Image],
        broker_epoch: Callable[[], int],
    ) -> None:
        self._environment = environment
        self._peers = peers
        self._writer = writer
        self._logger = logger
        self._node_id = node_id
        self._image = image
        self._broker_epoch = broker_epoch
        # Ends of transactions that this process has sent markers of.
        self._end_count = 0
        # By broker: markers for the next request.
        self._waiting: dict[int, list[_Marker]] = {}
        # Brokers with a request under way, or about to be sent.
        self._busy: set[int] = set()
        # Markers whose partition has no leader, or refused; they wait for the timer.
        self._later: list[_Marker] = []
        self._is_armed = False

    def send_due(self, coordinator: Coordinator) -> None:
        """A coordinator may have markers to send: it was loaded, or a decision of it was committed."""
        for due in coordinator.core.take_markers():
            self._end_count += 1
            number = (self._broker_epoch() << NUMBER_BITS) + self._end_count
            for topic, index in due.partitions:
                self._route(_Marker(coordinator, due, number, topic, index))

    def _route(self, marker: _Marker) -> None:
        if marker.coordinator.has_resigned:
            return  # the next coordinator sends it
        image = self._image()
        if not image.has_partition(marker.topic, marker.partition):
            # The topic was deleted, and the open transaction with it.
            self._written(marker.coordinator, marker.due, [(marker.topic, marker.partition)])
            return
        leader = image.topics[marker.topic].partitions[marker.partition].leader
        if leader is None or leader < 0:
            self._try_later(marker)
            return
        self._waiting.setdefault(leader, []).append(marker)
        if leader not in self._busy:
            self._busy.add(leader)
            self._environment.spawn.soon(lambda: self._send(leader))

    def _try_later(self, marker: _Marker) -> None:
        self._later.append(marker)
        if not self._is_armed:
            self._is_armed = True
            self._environment.spawn.later(RETRY_MS, self._try_again)

    def _try_again(self) -> None:
        self._is_armed = False
        later, self._later = self._later, []
        for marker in later:
            self._route(marker)

    def _send(self, broker: int) -> None:
        waiting = self._waiting.pop(broker, [])
        sent = [marker for marker in waiting[:MARKERS_MAX] if _is_due(marker)]
        if waiting[MARKERS_MAX:]:
            self._waiting[broker] = waiting[MARKERS_MAX:]
        if not sent:
            if broker in self._waiting:
                self._environment.spawn.soon(lambda: self._send(broker))
            else:
                self._busy.discard(broker)
            return
        ends: dict[int, list[_Marker]] = {}
        for marker in sent:
            ends.setdefault(marker.number, []).append(marker)
        image = self._image()
        request = WriteTxnMarkersRequest(markers=[_writable(markers, image) for markers in ends.values()])

        def answered(response: WriteTxnMarkersResponse | None) -> None:
            self._answered(ends, response)
            # In a turn of its own: this broker may answer at once, and there may be very many.
            self._environment.spawn.soon(lambda: self._send(broker))

        if broker == self._node_id:
            self._writer.write(request, within(self._environment, TIMEOUT_MS, answered))
        else:
            self._peers.call(broker, CHANNEL, request, WRITE_MARKERS_VERSION, answered, timeout_ms=TIMEOUT_MS)

    def _answered(self, ends: dict[int, list[_Marker]], response: WriteTxnMarkersResponse | None) -> None:
        for place, markers in enumerate(ends.values()):
            errors: dict[tuple[str, int], int] = {}
            if response is not None:
                errors = {
                    (topic.name, each.partition_index): each.error_code
                    for topic in response.markers[place].topics
                    for each in topic.partitions
                }
            written = []
            for marker in markers:
                partition = marker.topic, marker.partition
                if self._is_settled(marker, errors.get(partition, ErrorCode.REQUEST_TIMED_OUT)):
                    written.append(partition)
            if written:
                self._written(markers[0].coordinator, markers[0].due, written)

    def _is_settled(self, marker: _Marker, error: int) -> bool:
        """Whether the partition needs no marker any more."""
        if error == ErrorCode.TRANSACTION_COORDINATOR_FENCED:
            return False  # a later coordinator has ended a later transaction of this producer there
        if error == ErrorCode.INVALID_PRODUCER_EPOCH:
            # The partition has a later epoch, so it has no open transaction of this one.
            self._logger.warning(
                "a marker is older than its partition's producer",
                transactional_id=marker.due.transactional_id,
                topic=marker.topic,
                partition=marker.partition,
            )
            return True
        if error:
            self._try_later(marker)
        return not error

    def _written(self, coordinator: Coordinator, due: MarkersDue, partitions: list[tuple[str, int]]) -> None:
        if not coordinator.has_resigned:
            coordinator.handle(
                lambda core, now_ms, wall_ms: core.markers_written(
                    due, partitions, now_ms=now_ms, wall_ms=wall_ms
                ),
                lambda _: None,
                None,
            )


def _writable(markers: list[_Marker], image: Image) -> WritableTxnMarker:
    """The markers of one end of a transaction, for some of its partitions."""
    topics: dict[str, list[int]] = {}
    for marker in markers:
        topics.setdefault(marker.topic, []).append(marker.partition)
    due = markers[0].due
    return WritableTxnMarker(
        producer_id=due.producer_id,
        producer_epoch=due.producer_epoch,
        transaction_result=due.is_commit,
        topics=[
            WritableTxnMarkerTopic(
                name=name,
                partition_indexes=indexes,
                topic_id=image.topics[name].id if name in image.topics else NO_TOPIC_ID,
            )
            for name, indexes in topics.items()
        ],
        coordinator_epoch=markers[0].coordinator.leader_epoch,
        number=markers[0].number,
        transaction_version=V2 if due.is_v2 else CLASSIC,
    )


def _is_due(marker: _Marker) -> bool:
    """False if the coordinator has completed the transaction without this marker, because the topic was deleted.

    It may have been created again, and have the producer's next transaction.
    """
    coordinator = marker.coordinator
    return not coordinator.has_resigned and coordinator.core.is_due(
        marker.due, (marker.topic, marker.partition)
    )
