"""Creates, updates and removes the hosted partitions as the committed image changes.

A topic that is deleted and created again under the same name is another topic. The image's delta has both, and the
old partitions are removed before the new ones are created.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.config import TopicConfig
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.partition.partition_host import PartitionHost
from penstock.broker.storage.data_directory import Directory
from penstock.broker.storage.storage import Storage
from penstock.metadata.image import TOPIC_RESOURCE, Delta, Image, TopicImage


class PartitionLifecycle:
    def __init__(
        self,
        partitions: Partitions,
        storage: Storage,
        host: PartitionHost,
        topic_config: Callable[[Image, str], TopicConfig],
    ) -> None:
        self._partitions = partitions
        self._storage = storage
        self._host = host
        self._topic_config = topic_config

    def apply(self, image: Image, delta: Delta) -> None:
        for topic in delta.deleted:
            for hosted in self._partitions.remove_topic(topic.name):
                self._let_go(hosted)
        # Settings first: the controller decided on the in-sync replicas under them.
        for resource in delta.configs_changed:
            # A broker's setting may be the default of any topic.
            names = [resource.name] if resource.type == TOPIC_RESOURCE else self._partitions.topics()
            for name in names:
                config = self._topic_config(image, name)
                for hosted in self._partitions.of_topic(name):
                    if hosted.config is not config:
                        hosted.config = config
        for name in (*delta.created, *delta.changed):
            self._host_topic(image, image.topics[name])

    def directory_failed(self, directory: Directory) -> None:
        """Take the partitions in this directory offline."""
        for hosted in list(self._partitions):
            if self._storage.directory_of(hosted) is directory:
                hosted.take_offline()
                self._host.role_changed(hosted)

    def _host_topic(self, image: Image, topic: TopicImage) -> None:
        me = self._host.me
        config = self._topic_config(image, topic.name)
        for partition in topic.partitions:
            hosted = self._partitions.get(topic.name, partition.index)
            if hosted is not None:
                if me in partition.replicas:
                    if hosted.image is not partition:
                        hosted.assign(partition)
                else:
                    self._partitions.remove(hosted)
                    self._let_go(hosted)
            elif me in partition.replicas:
                hosted = HostedPartition(
                    self._storage,
                    self._host,
                    topic,
                    partition,
                    config,
                    self._partitions.traffic_of(topic.name),
                    refused_batches=self._partitions.refused_batches_of(
                        topic.name, topic.id, partition.index
                    ),
                )
                self._partitions.add(hosted)
                self._host.role_changed(hosted)

    def _let_go(self, hosted: HostedPartition) -> None:
        hosted.deleted()
        self._storage.delete_log(hosted)
        self._host.role_changed(hosted)
