"""The table of the partitions that this broker hosts. ``partition_lifecycle.py`` updates it from the image."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.broker.counters import TopicTraffic
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.environment import Clock, Files
from penstock.log.refused_batches import RefusedBatches, RefusedElsewhere
from penstock.model import TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import BatchHeader, check_produced

# With more logs to close, asking the kernel for everything at once is several times faster.
SYNCED_ONE_BY_ONE_MAX = 32


class Partitions:
    """Every hosted partition, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._topics: dict[str, dict[int, HostedPartition]] = {}
        # Of the same topics.
        self.traffic: dict[str, TopicTraffic] = {}
        # Refused batches of partitions that are not hosted here.
        self._refused = RefusedElsewhere()

    def get(self, topic: str, index: int) -> HostedPartition | None:
        """None when the partition does not exist or has no replica here."""
        hosted = self._topics.get(topic)
        return None if hosted is None else hosted.get(index)

    def topics(self) -> list[str]:
        return list(self._topics)

    def traffic_of(self, topic: str) -> TopicTraffic:
        """Counted since this process began, or since it got its first replica of the topic."""
        traffic = self.traffic.get(topic)
        if traffic is None:
            traffic = self.traffic[topic] = TopicTraffic()
        return traffic

    def of_topic(self, topic: str) -> list[HostedPartition]:
        return list(self._topics.get(topic, {}).values())

    def __iter__(self) -> Iterator[HostedPartition]:
        for hosted in self._topics.values():
            yield from hosted.values()

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))

    def add(self, hosted: HostedPartition) -> None:
        self._topics.setdefault(hosted.topic, {})[hosted.index] = hosted

    def remove(self, hosted: HostedPartition) -> None:
        of_topic = self._topics[hosted.topic]
        del of_topic[hosted.index]
        if not of_topic:
            self.traffic.pop(hosted.topic, None)

    def remove_topic(self, topic: str) -> list[HostedPartition]:
        self.traffic.pop(topic, None)
        return list(self._topics.pop(topic, {}).values())

    def close_logs(self, files: Files) -> None:
        """Make every open log durable and close it."""
        hosted_logs = [hosted for hosted in self if hosted.is_open]
        for hosted in hosted_logs:
            hosted.log.seal()
        if len(hosted_logs) > SYNCED_ONE_BY_ONE_MAX:
            files.sync_everything()
        for hosted in hosted_logs:
            hosted.log.close()

    def refuse(self, topic: str | bytes, index: int, records: memoryview, error: ErrorCode) -> None:
        """Remember a refused batch of a partition that is not here: it may be here when the next batch comes.

        ``topic`` is its name or its id, whichever the client gave.
        """
        checked = check_produced(records, max_message_bytes=len(records))
        if isinstance(checked, BatchHeader) and checked.producer_id >= 0:
            self._refused.add(topic, index, checked, error, self._clock.wall_ms())

    def refused_batches_of(self, topic: str, topic_id: TopicId, index: int) -> RefusedBatches:
        return self._refused.of(topic, topic_id, index)
