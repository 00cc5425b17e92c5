"""All the partitions that this broker hosts: which they are follows from the committed image.

Newcomers: a topic that comes back under its old name is another topic. The image's delta says so, and the old
partitions are let go of before the new ones are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.broker.config import TopicConfig
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.partition_host import PartitionHost
from penstock.log.refused_batches import RefusedElsewhere
from penstock.metadata.image import TOPIC_RESOURCE, Delta, Image, TopicImage
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import BatchHeader, check_produced

if TYPE_CHECKING:
    from penstock.broker.storage.storage import Storage


class Partitions:
    """Every hosted partition, by name; follows the image."""

    def __init__(
        self,
        storage: Storage,
        host: PartitionHost,
        topic_config: Callable[[Image, str], TopicConfig],
    ) -> None:
        self._storage = storage
        self._host = host
        self._topic_config = topic_config
        self._topics: dict[str, dict[int, HostedPartition]] = {}
        # Batches that were sent here for partitions that are not here.
        self._refused = RefusedElsewhere()

    def get(self, topic: str, index: int) -> HostedPartition | None:
        """None when there is no such partition, or no replica of it is here."""
        hosted = self._topics.get(topic)
        return None if hosted is None else hosted.get(index)

    def of_topic(self, topic: str) -> list[HostedPartition]:
        return list(self._topics.get(topic, {}).values())

    def __iter__(self) -> Iterator[HostedPartition]:
        for hosted in self._topics.values():
            yield from hosted.values()

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))

    def refuse(self, topic: str | bytes, index: int, records: memoryview, error: ErrorCode) -> None:
        """Remember a batch for a partition that is not here: it may be here when the next batch comes.

        ``topic`` is its name or its id, whichever the client gave.
        """
        checked = check_produced(records, max_message_bytes=len(records))
        if isinstance(checked, BatchHeader) and checked.producer_id >= 0:
            self._refused.add(topic, index, checked, error, self._storage.environment.clock.wall_ms())

    def apply(self, image: Image, delta: Delta) -> None:
        for topic in delta.deleted:
            for hosted in self._topics.pop(topic.name, {}).values():
                self._let_go(hosted)
        # Settings first: who is in sync now was decided when they held.
        for resource in delta.configs_changed:
            # A broker's setting may be the default of any topic's.
            names = [resource.name] if resource.type == TOPIC_RESOURCE else list(self._topics)
            for name in names:
                config = self._topic_config(image, name)
                for hosted in self.of_topic(name):
                    if hosted.config is not config:
                        hosted.config = config
        for name in (*delta.created, *delta.changed):
            self._host_topic(image, image.topics[name])

    def _host_topic(self, image: Image, topic: TopicImage) -> None:
        me = self._host.me
        config = self._topic_config(image, topic.name)
        here = self._topics.get(topic.name, {})
        for partition in topic.partitions:
            hosted = here.get(partition.index)
            if hosted is not None:
                if me in partition.replicas:
                    if hosted.image is not partition:
                        hosted.assign(partition)
                else:
                    del here[partition.index]
                    self._let_go(hosted)
            elif me in partition.replicas:
                here = self._topics.setdefault(topic.name, here)
                hosted = here[partition.index] = HostedPartition(
                    self._storage,
                    self._host,
                    topic,
                    partition,
                    config,
                    refused_batches=self._refused.of(topic.name, topic.id, partition.index),
                )
                self._host.role_changed(hosted)

    def _let_go(self, hosted: HostedPartition) -> None:
        hosted.deleted()
        self._storage.delete_log(hosted)
        self._host.role_changed(hosted)
