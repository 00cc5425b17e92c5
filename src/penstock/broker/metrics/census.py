"""Counts the partitions of a broker, and those of the whole cluster on the active controller.

There may be 100,000 of them, so they are counted in slices, with other work in between. A count that took long is
used again for a while: it may take a twentieth of the time at most. The numbers of one census are of slightly
different moments, as those of any scrape are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from penstock.broker.broker import Broker
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.storage.data_directory import size_on_disk
from penstock.environment import Files
from penstock.metadata.values import NO_LEADER, PartitionImage, TopicImage
from penstock.model import TopicId
from penstock.transactions.changes import State
from penstock.transactions.coordinator import TransactionCoordinator

PARTITIONS_PER_SLICE = 500
# How many times as long as it took to make is a census used.
REUSED_TIMES = 20
OPEN_STATES = (State.ONGOING.value, State.PREPARE_COMMIT.value, State.PREPARE_ABORT.value)


@dataclass(slots=True)
class HostedCount:
    """The partitions that this broker has a replica of."""

    replicas: int = 0
    leaders: int = 0
    # Replicas here that cannot be used.
    offline_replicas: int = 0
    # Of those that this broker leads, as in Kafka.
    under_replicated: int = 0
    under_min_isr: int = 0
    at_min_isr: int = 0
    reassigning: int = 0
    # By topic.
    size_bytes: dict[str, int] = field(default_factory=dict)
    # By state.
    transactions: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ClusterCount:
    """The partitions of the cluster."""

    partitions: int = 0
    # Without a leader.
    offline: int = 0
    # Not led by the first of their replicas.
    not_preferred: int = 0


@dataclass(slots=True)
class Disk:
    path: str
    is_online: bool
    is_full: bool
    # None if the disk does not tell.
    size_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(slots=True)
class Census:
    hosted: HostedCount
    # None on a node that is not the active controller.
    cluster: ClusterCount | None
    disks: list[Disk]


class CensusTaker:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._clock = broker.environment.clock
        self._last: Census | None = None
        self._reused_until_us = 0
        # The work of the present census so far, without what happened in between.
        self._work_us = 0
        # Sizes of logs that are not open, which do not change. Open ones know their size.
        self._closed_sizes: dict[tuple[TopicId, int], int] = {}
        self._counted_topics: Mapping[str, TopicImage] | None = None
        self._cluster: ClusterCount | None = None

    def take(self, then: Callable[[Census], None]) -> None:
        """Call ``then`` with a census, some turns later unless the last one is used again."""
        if self._last is not None and self._clock.work_us() < self._reused_until_us:
            then(self._last)
            return
        self._work_us = 0
        broker = self._broker
        files = broker.environment.files
        everyone = list(broker.partitions)
        unknown = [
            (hosted.key, directory.path_of(hosted.topic, hosted.index))
            for hosted in everyone
            if not hosted.is_open
            and hosted.key not in self._closed_sizes
            and (directory := broker.storage.directory_of(hosted)) is not None
        ]
        disks = [Disk(each.path, each.is_online, each.is_full) for each in broker.storage.directories]

        def measure() -> dict[tuple[TopicId, int], int]:
            _measure_disks(files, disks)
            return {key: size_on_disk(files, path) for key, path in unknown}

        def measured(sizes: dict[tuple[TopicId, int], int] | None, error: Exception | None) -> None:
            assert sizes is not None, error
            self._closed_sizes.update(sizes)
            self._count(everyone, disks, then)

        broker.environment.spawn.in_thread(measure, measured, lane="upkeep")

    def _count(
        self, everyone: list[HostedPartition], disks: list[Disk], then: Callable[[Census], None]
    ) -> None:
        hosted_count, closed_sizes = HostedCount(), self._closed_sizes
        # What is open or gone by now is left out of the next one.
        self._closed_sizes = {}
        parts: Iterator[Callable[[], None]] = iter(
            (
                *self._hosted_slices(everyone, closed_sizes, hosted_count),
                *self._transaction_slices(hosted_count),
            )
        )

        def next_part() -> None:
            began_us = self._clock.work_us()
            part = next(parts, None)
            if part is not None:
                part()
            self._work_us += self._clock.work_us() - began_us
            if part is not None:
                self._broker.environment.spawn.soon(next_part)
            else:
                self._count_cluster(lambda cluster: self._done(Census(hosted_count, cluster, disks), then))

        next_part()

    def _done(self, census: Census, then: Callable[[Census], None]) -> None:
        self._last = census
        self._reused_until_us = self._clock.work_us() + REUSED_TIMES * self._work_us
        then(census)

    # What this broker has

    def _hosted_slices(
        self,
        everyone: list[HostedPartition],
        closed_sizes: Mapping[tuple[TopicId, int], int],
        count: HostedCount,
    ) -> Iterable[Callable[[], None]]:
        def counting(start: int) -> Callable[[], None]:
            def work() -> None:
                for hosted in everyone[start : start + PARTITIONS_PER_SLICE]:
                    if not hosted.is_deleted:
                        _count_hosted(hosted, count, closed_sizes, self._closed_sizes)

            return work

        return (counting(start) for start in range(0, len(everyone), PARTITIONS_PER_SLICE))

    def _transaction_slices(self, count: HostedCount) -> Iterable[Callable[[], None]]:
        """One for each coordinator, which may have 20,000 ids."""
        count.transactions = dict.fromkeys(OPEN_STATES, 0)
        wall_ms = self._clock.wall_ms()

        def counting(coordinator: TransactionCoordinator) -> Callable[[], None]:
            def work() -> None:
                for listed in coordinator.list_transactions(OPEN_STATES, wall_ms=wall_ms):
                    count.transactions[listed.transaction_state] += 1

            return work

        return [counting(each.core) for each in self._broker.transaction_coordinators]

    # What the cluster has

    def _count_cluster(self, then: Callable[[ClusterCount | None], None]) -> None:
        broker = self._broker
        if not broker.consensus.is_active:
            self._counted_topics = self._cluster = None
            then(None)
            return
        topics = broker.image.topics
        if self._cluster is not None and topics is self._counted_topics:
            then(self._cluster)
            return
        count = ClusterCount()
        everything = (partition for topic in list(topics.values()) for partition in topic.partitions)

        def next_slice() -> None:
            began_us = self._clock.work_us()
            found = list(islice(everything, PARTITIONS_PER_SLICE))
            for partition in found:
                _count_partition(partition, count)
            self._work_us += self._clock.work_us() - began_us
            if found:
                broker.environment.spawn.soon(next_slice)
            else:
                self._counted_topics, self._cluster = topics, count
                then(count)

        next_slice()


def _count_hosted(
    hosted: HostedPartition,
    count: HostedCount,
    closed_sizes: Mapping[tuple[TopicId, int], int],
    still_closed: dict[tuple[TopicId, int], int],
) -> None:
    count.replicas += 1
    if hosted.is_offline:
        count.offline_replicas += 1
    size = 0
    if hosted.is_open:
        # A failed disk is noticed by those who use it.
        with suppress(OSError):
            size = hosted.log.size_bytes
    elif (known := closed_sizes.get(hosted.key)) is not None:
        size = still_closed[hosted.key] = known
    count.size_bytes[hosted.topic] = count.size_bytes.get(hosted.topic, 0) + size
    if not hosted.is_leader:
        return
    image = hosted.image
    in_sync, min_isr = len(image.isr), min(hosted.config.min_insync_replicas, len(image.replicas))
    count.leaders += 1
    count.under_replicated += in_sync < len(image.replicas) - len(image.adding_replicas)
    count.under_min_isr += in_sync < min_isr
    count.at_min_isr += in_sync == min_isr
    count.reassigning += image.is_reassigned


def _count_partition(partition: PartitionImage, count: ClusterCount) -> None:
    count.partitions += 1
    count.offline += partition.leader == NO_LEADER
    count.not_preferred += partition.leader != partition.replicas[0]


def _measure_disks(files: Files, disks: list[Disk]) -> None:
    for disk in disks:
        if disk.is_online:
            # A failed disk is noticed by those who use it; here its size stays unknown.
            with suppress(OSError):
                disk.size_bytes = files.capacity(disk.path)
                disk.free_bytes = files.free_bytes(disk.path)
