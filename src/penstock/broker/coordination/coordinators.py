"""The coordinators of this broker: one per partition of an internal topic that it leads.

A coordinator serves only while this broker leads its partition, knows what is committed there, and has replayed all
of it; before that, clients get COORDINATOR_LOAD_IN_PROGRESS. When leadership is lost, all waiting clients are sent
to the next coordinator, which replays the same log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Generic

from penstock.broker.coordination.coordinator_kind import CoordinatorKind, Core
from penstock.broker.coordination.coordinator_partition import CoordinatorHost, CoordinatorPartition
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.model import NO_TOPIC_ID, BrokerId
from penstock.protocol.errors import ErrorCode

# Keys whose partition is remembered. The same few come again and again, and Python is slow at hashing as Java does.
HASHED_KEYS_MAX = 1_000


class CoordinatorRegistry:
    """The kinds of coordinators, by their internal topics."""

    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._by_topic: dict[str, Coordinators[Any]] = {}

    def register(self, kind: CoordinatorKind[Core]) -> Coordinators[Core]:
        assert kind.topic not in self._by_topic
        self._by_topic[kind.topic] = coordinators = Coordinators(self._host, kind)
        return coordinators

    def __contains__(self, topic: str) -> bool:
        return topic in self._by_topic

    def role_changed(self, hosted: HostedPartition) -> None:
        """Start or stop the coordinator, if the partition belongs to one of the topics."""
        coordinators = self._by_topic.get(hosted.topic)
        if coordinators is not None:
            self._host.environment.spawn.soon(lambda: coordinators.begin_or_stop(hosted))

    def topics_deleted(self) -> None:
        """Topics were deleted. A coordinator that is still loading checks when it has loaded."""
        for coordinators in self._by_topic.values():
            for partition in coordinators:
                partition.topics_deleted()


class Coordinators(Generic[Core]):
    """The coordinators of one kind."""

    def __init__(self, host: CoordinatorHost, kind: CoordinatorKind[Core]) -> None:
        self._host = host
        self._kind = kind
        self._partitions: dict[int, CoordinatorPartition[Core]] = {}
        # Called when a coordinator was loaded, and when a decision of it was committed.
        self.on_committed: Callable[[CoordinatorPartition[Core]], None] | None = None

    def of(self, key: str) -> CoordinatorPartition[Core] | ErrorCode:
        """The coordinator of a key, if it is here and has replayed everything."""
        index = self.index_of(key)
        return ErrorCode.NOT_COORDINATOR if index is None else self.at(index)

    def at(self, index: int) -> CoordinatorPartition[Core] | ErrorCode:
        """The coordinator of a partition, if it is here and has replayed everything."""
        if not self._host.is_serving():
            return ErrorCode.NOT_COORDINATOR
        partition = self._partitions.get(index)
        if partition is not None and partition.is_loaded:
            return partition
        hosted = self._host.partitions.get(self._kind.topic, index)
        if hosted is None or not hosted.is_serving:
            return ErrorCode.NOT_COORDINATOR
        # The turn in which it starts may not have come yet.
        self.begin_or_stop(hosted)
        partition = self._partitions.get(index)
        if partition is not None and partition.is_loaded:
            return partition
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS

    def broker_of(self, key: str) -> BrokerId | None:
        """The broker that coordinates a key; None while the topic does not exist."""
        index = self.index_of(key)
        if index is None:
            return None
        return self._host.image().topics[self._kind.topic].partitions[index].leader

    def knows_partition(self, topic: str, topic_id: bytes, index: int) -> bool:
        """Whether a partition of any topic is in this broker's metadata. NO_TOPIC_ID fits every topic."""
        image = self._host.image()
        return image.has_partition(topic, index) and topic_id in (NO_TOPIC_ID, image.topics[topic].id)

    def when_topic_exists(self, then: Callable[[int], None]) -> None:
        """Create the topic if it does not exist; ``then`` gets the error code."""
        if self._kind.topic in self._host.image().topics:
            then(ErrorCode.NONE)
        else:
            self._host.create_topic(self._kind.new_topic(), then)

    def __iter__(self) -> Iterator[CoordinatorPartition[Core]]:
        return iter([partition for partition in self._partitions.values() if partition.is_loaded])

    @property
    def is_loading(self) -> bool:
        """Whether a coordinator that belongs to this broker has not been loaded yet."""
        return any(
            hosted.is_serving
            and ((partition := self._partitions.get(hosted.index)) is None or not partition.is_loaded)
            for hosted in self._host.partitions.of_topic(self._kind.topic)
        )

    def begin_or_stop(self, hosted: HostedPartition) -> None:
        """Start or stop the coordinator, as the partition's leadership says."""
        known = self._partitions.get(hosted.index)
        # The image at the start of the process may lack topics that groups have committed offsets for since.
        leads = self._host.are_logs_ready() and hosted.is_serving and not hosted.is_deleted
        if known is not None and not (leads and known.leader_epoch == hosted.leader_epoch):
            del self._partitions[hosted.index]
            known.resign()
            known = None
        if leads and known is None:
            try:
                # The leader opens the log, so that its high watermark becomes known.
                if hosted.replication.has_established and hosted.index not in self._partitions:
                    partition = CoordinatorPartition(
                        self._host, hosted, self._kind, on_committed=self.on_committed
                    )
                    self._partitions[hosted.index] = partition
                    self._load(hosted, partition)
            except OSError as error:
                self._failed_to_load(hosted, error)

    def _load(self, hosted: HostedPartition, partition: CoordinatorPartition[Core]) -> None:
        """Load a slice per turn; the first one now, which usually is the only one."""
        if self._partitions.get(hosted.index) is not partition:
            return
        try:
            if not partition.load_some():
                self._host.environment.spawn.soon(lambda: self._load(hosted, partition))
        except OSError as error:
            # Damage is reported, and this broker may no longer lead the partition.
            if self._partitions.get(hosted.index) is partition:
                del self._partitions[hosted.index]
            self._failed_to_load(hosted, error)

    def _failed_to_load(self, hosted: HostedPartition, error: OSError) -> None:
        # Only the keys of this partition have no coordinator.
        self._host.logger.error("cannot load coordinator", partition=repr(hosted), error=str(error))

    def index_of(self, key: str) -> int | None:
        """The partition that stores a key; None while the topic does not exist."""
        topic = self._host.image().topics.get(self._kind.topic)
        return None if topic is None else partition_for(key, len(topic.partitions))


@lru_cache(HASHED_KEYS_MAX)
def partition_for(key: str, partition_count: int) -> int:
    """The partition of an internal topic that stores a key: Java's String.hashCode, made non-negative.

    Java hashes UTF-16 code units in 32 bits. The most negative number has no counterpart: Kafka takes 0.
    """
    hashed = 0
    units = key.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        hashed = (31 * hashed + (units[position] << 8 | units[position + 1])) & 0xFFFFFFFF
    if hashed >= 2**31:
        hashed = 2**32 - hashed
    return 0 if hashed == 2**31 else hashed % partition_count
