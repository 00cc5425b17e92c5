"""Counts the partitions of a broker, and those of the whole cluster on the active controller.

There may be 100,000 of them, so they are counted in slices, with other work in between. A count that took long is
used again for a while: it may take a twentieth of the time at most. The numbers of one census are of slightly
different moments, as those of any scrape are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        storage = self._broker.storage
        disks = [Disk(each.path, each.is_online, each.is_full) for each in storage.directories]
        census = Census(HostedCount(), None, disks)
        # What is open or gone by now is left out of the next one.
        known_sizes, self._closed_sizes = self._closed_sizes, {}
        unknown: list[HostedPartition] = []
        everyone = iter(list(self._broker.partitions))

        def count_some() -> bool:
            found = list(islice(everyone, PARTITIONS_PER_SLICE))
            for hosted in found:
                if not hosted.is_deleted:
                    self._count_hosted(hosted, census.hosted, known_sizes, unknown)
            return bool(found)

        self._in_slices(count_some, lambda: self._measure(census, unknown, then))

    def _count_hosted(
        self,
        hosted: HostedPartition,
        count: HostedCount,
        known_sizes: Mapping[tuple[TopicId, int], int],
        unknown: list[HostedPartition],
    ) -> None:
        _count_hosted(hosted, count)
        size = 0
        if hosted.is_open:
            # A failed disk is noticed by those who use it.
            with suppress(OSError):
                size = hosted.log.size_bytes
        elif hosted.key in known_sizes:
            size = self._closed_sizes[hosted.key] = known_sizes[hosted.key]
        else:
            unknown.append(hosted)
        count.size_bytes[hosted.topic] = count.size_bytes.get(hosted.topic, 0) + size

    def _measure(
        self, census: Census, unknown: list[HostedPartition], then: Callable[[Census], None]
    ) -> None:
        """Ask the file system, in a thread, for the disks and for logs that are not open."""
        paths: list[tuple[HostedPartition, str]] = []
        rest = iter(unknown)

        def find_some() -> bool:
            found = list(islice(rest, PARTITIONS_PER_SLICE))
            for hosted in found:
                directory = self._broker.storage.directory_of(hosted)
                # Without one it is empty.
                self._closed_sizes[hosted.key] = 0
                if directory is not None:
                    paths.append((hosted, directory.path_of(hosted.topic, hosted.index)))
            return bool(found)

        files = self._broker.environment.files

        def measure() -> list[int]:
            _measure_disks(files, census.disks)
            return [size_on_disk(files, path) for _, path in paths]

        def measured(sizes: list[int] | None, error: Exception | None) -> None:
            assert sizes is not None, error
            sums = census.hosted.size_bytes
            for (hosted, _), size in zip(paths, sizes):
                self._closed_sizes[hosted.key] = size
                sums[hosted.topic] += size
            self._count_transactions(census, then)

        self._in_slices(
            find_some, lambda: self._broker.environment.spawn.in_thread(measure, measured, lane="upkeep")
        )

    def _count_transactions(self, census: Census, then: Callable[[Census], None]) -> None:
        """One coordinator in a turn: it may have 20,000 ids."""
        counts = census.hosted.transactions = dict.fromkeys(OPEN_STATES, 0)
        coordinators = iter([each.core for each in self._broker.transaction_coordinators])
        wall_ms = self._clock.wall_ms()

        def count_some() -> bool:
            coordinator = next(coordinators, None)
            if coordinator is None:
                return False
            for listed in coordinator.list_transactions(OPEN_STATES, wall_ms=wall_ms):
                counts[listed.transaction_state] += 1
            return True

        self._in_slices(count_some, lambda: self._count_cluster(census, then))

    def _count_cluster(self, census: Census, then: Callable[[Census], None]) -> None:
        """Only on the active controller, and only if a topic has changed."""
        broker = self._broker
        if not broker.consensus.is_active:
            self._counted_topics = self._cluster = None
            self._done(census, then)
            return
        topics = broker.image.topics
        if self._cluster is not None and topics is self._counted_topics:
            census.cluster = self._cluster
            self._done(census, then)
            return
        count = census.cluster = ClusterCount()
        everything = (partition for topic in list(topics.values()) for partition in topic.partitions)

        def count_some() -> bool:
            found = list(islice(everything, PARTITIONS_PER_SLICE))
            for partition in found:
                _count_partition(partition, count)
            return bool(found)

        def counted() -> None:
            self._counted_topics, self._cluster = topics, count
            self._done(census, then)

        self._in_slices(count_some, counted)

    def _done(self, census: Census, then: Callable[[Census], None]) -> None:
        self._last = census
        self._reused_until_us = self._clock.work_us() + REUSED_TIMES * self._work_us
        then(census)

    def _in_slices(self, work: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do some of the work in each turn until it says that nothing is left, then go on."""

        def next_slice() -> None:
            began_us = self._clock.work_us()
            is_more = work()
            self._work_us += self._clock.work_us() - began_us
            if is_more:
                self._broker.environment.spawn.soon(next_slice)
            else:
                then()

        next_slice()


def _count_hosted(hosted: HostedPartition, count: HostedCount) -> None:
    count.replicas += 1
    if hosted.is_offline:
        count.offline_replicas += 1
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
