"""The metadata image: everything the cluster has agreed on, as one immutable value.

The image is the result of replaying the metadata log. ``apply`` takes a batch of committed changes and returns a
new image and a delta with the differences. The old image does not change, so a handler in the middle of a
response keeps a consistent view. Copying is per batch and per topic touched: images share the partitions of all
other topics.

The dictionaries in an image are plain ones for speed. Never write to them: every holder of the image would see
it. Only ``_Draft`` writes, to copies. A topic is identified by its id: a topic deleted and created again under
the same name is another topic, so a deletion names the id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.metadata.security import NO_SECURITY_CHANGE, SecurityDraft, SecurityImage
from penstock.metadata.topic_settings import CREATED
from penstock.metadata.values import (
    BROKER_RESOURCE,
    CLUSTER_ID,
    NEWCOMER,
    NO_LEADER,
    NO_LEADER_CHANGE,
    SESSION,
    TOPIC_RESOURCE,
    BrokerImage,
    ConfigResource,
    Delta,
    Endpoint,
    PartitionImage,
    TopicImage,
    check_partition,
    config_record,
    newcomer_record,
    partition_record,
    registered,
    registration_record,
)
from penstock.model import BrokerId, TopicId
from penstock.protocol.listeners import ListenerDescription
from penstock.protocol.messages.metadata_records import (
    AccessControlEntryRecord,
    BrokerRegistrationChangeRecord,
    ClientQuotaRecord,
    ConfigRecord,
    FeatureLevelRecord,
    FenceBrokerRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveAccessControlEntryRecord,
    RemoveTopicRecord,
    RemoveUserScramCredentialRecord,
    TopicRecord,
    UnfenceBrokerRecord,
    UnregisterBrokerRecord,
    UserScramCredentialRecord,
)
from penstock.protocol.schema import Message

__all__ = [
    "BROKER_RESOURCE",
    "NO_LEADER",
    "NO_LEADER_CHANGE",
    "TOPIC_RESOURCE",
    "BrokerImage",
    "ConfigResource",
    "Delta",
    "Endpoint",
    "Image",
    "PartitionImage",
    "TopicImage",
    "config_record",
    "partition_record",
    "registration_record",
]

T = TypeVar("T")

# The resource that holds the settings of all brokers.
_EVERYONE = ConfigResource(BROKER_RESOURCE, "")


@dataclass(frozen=True, slots=True)
class Image:
    # Offset and epoch of the last change applied. Not compared: images with the same content are equal.
    offset: int = field(default=-1, compare=False)
    epoch: int = field(default=0, compare=False)
    brokers: Mapping[BrokerId, BrokerImage] = field(default_factory=dict)
    topics: Mapping[str, TopicImage] = field(default_factory=dict)
    topics_by_id: Mapping[TopicId, TopicImage] = field(default_factory=dict)
    # Only resources with at least one setting.
    configs: Mapping[ConfigResource, Mapping[str, str]] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)
    # The first producer id not yet allocated to a broker.
    next_producer_id: int = 0
    partition_count: int = 0
    # Empty in a log that was started without one.
    cluster_id: str = ""
    # Brokers that have not received their share of the replicas yet, sorted.
    newcomers: tuple[BrokerId, ...] = ()
    # The longest session that brokers may hold; 0 means the default.
    session_ms: int = 0
    security: SecurityImage = field(default_factory=SecurityImage)

    def topic_config(self, name: str) -> Mapping[str, str]:
        """The settings of the topic itself, without defaults."""
        return self.configs.get(ConfigResource(TOPIC_RESOURCE, name), _NOTHING)

    def broker_config(self, broker: BrokerId | int | None) -> Mapping[str, str]:
        """The dynamic settings of a broker; None stands for all brokers."""
        return self.configs.get(
            ConfigResource(BROKER_RESOURCE, "" if broker is None else str(broker)), _NOTHING
        )

    def topic_name(self, topic_id: bytes) -> str:
        """The topic's name; empty when no topic has this id."""
        topic = self.topics_by_id.get(TopicId(topic_id))
        return "" if topic is None else topic.name

    def has_partition(self, topic: str, index: int) -> bool:
        known = self.topics.get(topic)
        return known is not None and 0 <= index < len(known.partitions)

    def reachable_brokers(self) -> Iterable[BrokerImage]:
        """The brokers that clients can connect to. Never empty: clients would give up the cluster."""
        known = self.brokers.values()
        return [broker for broker in known if not broker.fenced] or known

    def reachable_endpoints(self, listener: ListenerDescription) -> list[tuple[BrokerImage, Endpoint]]:
        """The brokers that clients of a listener can connect to, each with its endpoint.

        Empty only if no broker has such a listener, so never for clients that are connected to one.
        """
        found = [
            (broker, endpoint)
            for broker in self.brokers.values()
            if (endpoint := broker.endpoint_for(listener)) is not None
        ]
        return [each for each in found if not each[0].fenced] or found

    def brokers_without(self, listener: ListenerDescription) -> frozenset[BrokerId]:
        """The brokers that clients of a listener cannot reach, because they have no such listener."""
        return frozenset(
            broker.id for broker in self.brokers.values() if broker.endpoint_for(listener) is None
        )

    def active_epoch(self, broker: int) -> int | None:
        """The epoch of a broker that may be in the ISR; None if it is fenced, stopping or unknown."""
        known = self.brokers.get(BrokerId(broker))
        return known.epoch if known is not None and known.is_active else None

    def apply(
        self, changes: Iterable[Message], *, offset: int | None = None, epoch: int | None = None
    ) -> tuple[Image, Delta]:
        """The image after a committed batch, and what the batch changed.

        ``offset`` is that of the last change; by default the changes directly follow this image.
        """
        draft = _Draft(self)
        count = 0
        for change in changes:
            draft.apply(change)
            count += 1
        return draft.finish(
            self.offset + count if offset is None else offset, self.epoch if epoch is None else epoch
        )

    def snapshot(self) -> list[Message]:
        """The changes that build this image from an empty one. Features come first, because readers expect that."""
        changes: list[Message] = [
            FeatureLevelRecord(name=name, feature_level=level)
            for name, level in sorted(self.features.items())
        ]
        if self.cluster_id:
            changes.append(config_record(_EVERYONE, CLUSTER_ID, self.cluster_id))
        changes += [registration_record(broker) for _, broker in sorted(self.brokers.items())]
        changes += [newcomer_record(broker, True) for broker in self.newcomers]
        if self.session_ms:
            changes.append(config_record(_EVERYONE, SESSION, str(self.session_ms)))
        for topic in self.topics.values():
            changes.append(TopicRecord(name=topic.name, topic_id=topic.id))
            changes += [partition_record(topic.id, partition) for partition in topic.partitions]
            if topic.created_ms >= 0:
                changes.append(
                    config_record(ConfigResource(TOPIC_RESOURCE, topic.name), CREATED, str(topic.created_ms))
                )
        for resource, settings in self.configs.items():
            changes += [config_record(resource, name, value) for name, value in settings.items()]
        changes += self.security.snapshot()
        if self.next_producer_id:
            # The broker that got the last block no longer matters.
            changes.append(
                ProducerIdsRecord(broker_id=-1, broker_epoch=-1, next_producer_id=self.next_producer_id)
            )
        return changes

    def check(self) -> None:
        assert self.topics.keys() == {topic.name for topic in self.topics_by_id.values()}
        assert len(self.topics) == len(self.topics_by_id)
        for name, topic in self.topics.items():
            assert topic.name == name
            assert self.topics_by_id[topic.id] is topic
            assert len(topic.id) == 16 and any(topic.id)
            assert topic.partitions, f"{name} has no partitions"
            for index, partition in enumerate(topic.partitions):
                assert partition.index == index, f"partitions of {name} are not dense"
                check_partition(partition)
        for id, broker in self.brokers.items():
            assert broker.id == id and broker.epoch >= 0 and broker.endpoints
        for resource, settings in self.configs.items():
            assert settings, f"{resource} is listed but has no settings"
            assert resource.type != TOPIC_RESOURCE or resource.name in self.topics, (
                f"{resource}: no such topic"
            )
        assert self.partition_count == sum(len(topic.partitions) for topic in self.topics.values())
        self.security.check()
        assert self.next_producer_id >= 0
        assert list(self.newcomers) == sorted(self.newcomers) and self.brokers.keys() >= set(self.newcomers)


_NOTHING: Mapping[str, str] = {}


class _Draft:
    """An image being written: every part is copied before its first change."""

    def __init__(self, base: Image) -> None:
        self._base = base
        self._brokers: dict[BrokerId, BrokerImage] | None = None
        self._features: dict[str, int] | None = None
        self._configs: dict[ConfigResource, Mapping[str, str]] | None = None
        self._next_producer_id = base.next_producer_id
        self._partition_count = base.partition_count
        self._cluster_id = base.cluster_id
        self._newcomers = base.newcomers
        self._session_ms = base.session_ms
        self._security: SecurityDraft | None = None
        # The topics' dictionaries; copied at the first change of any topic.
        self._topics: dict[str, TopicImage] | None = None
        self._topics_by_id: dict[TopicId, TopicImage] = {}
        # Topics that this batch touches, by id, in the order they were touched.
        self._open: dict[TopicId, tuple[TopicImage, list[PartitionImage]]] = {}
        # In order, without repetition.
        self._created: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._deleted: list[TopicImage] = []
        self._configs_changed: dict[ConfigResource, None] = {}
        self._brokers_changed: dict[BrokerId, None] = {}
        self._partitions_changed: dict[tuple[str, int], None] = {}
        # Resources whose settings this batch has already copied.
        self._own_configs: set[ConfigResource] = set()
        self._shared: dict[object, object] = {}

    def apply(self, change: Message) -> None:
        match change:
            case PartitionChangeRecord():
                self._partition_change(change)
            case PartitionRecord():
                self._partition(change)
            case TopicRecord():
                self._topic(change)
            case RemoveTopicRecord():
                self._remove_topic(TopicId(change.topic_id))
            case ConfigRecord():
                self._config(change)
            case RegisterBrokerRecord():
                self._put_broker(registered(change))
            case UnregisterBrokerRecord():
                self._unregister(BrokerId(change.broker_id))
            case FenceBrokerRecord():
                self._put_broker(self._broker(change.id, change.epoch)._replace(fenced=True))
            case UnfenceBrokerRecord():
                self._put_broker(self._broker(change.id, change.epoch)._replace(fenced=False))
            case BrokerRegistrationChangeRecord():
                self._broker_change(change)
            case FeatureLevelRecord():
                self._feature(change)
            case ProducerIdsRecord():
                assert change.next_producer_id >= self._next_producer_id, "producer ids went backwards"
                self._next_producer_id = change.next_producer_id
            case NoOpRecord():
                pass
            case (
                UserScramCredentialRecord()
                | RemoveUserScramCredentialRecord()
                | AccessControlEntryRecord()
                | RemoveAccessControlEntryRecord()
                | ClientQuotaRecord()
            ):
                if self._security is None:
                    self._security = SecurityDraft(self._base.security)
                self._security.apply(change)
            case _:
                raise AssertionError(f"cannot apply {type(change).__name__}")

    def finish(self, offset: int, epoch: int) -> tuple[Image, Delta]:
        base = self._base
        for id in list(self._open):
            self._close(id)
        security, security_delta = base.security, NO_SECURITY_CHANGE
        if self._security is not None:
            security, security_delta = self._security.finish()
        image = Image(
            offset=offset,
            epoch=epoch,
            brokers=base.brokers if self._brokers is None else self._brokers,
            topics=base.topics if self._topics is None else self._topics,
            topics_by_id=base.topics_by_id if self._topics is None else self._topics_by_id,
            configs=base.configs if self._configs is None else self._configs,
            features=base.features if self._features is None else self._features,
            next_producer_id=self._next_producer_id,
            partition_count=self._partition_count,
            cluster_id=self._cluster_id,
            newcomers=self._newcomers,
            session_ms=self._session_ms,
            security=security,
        )
        return image, Delta(
            created=tuple(self._created),
            deleted=tuple(self._deleted),
            changed=tuple(self._changed),
            configs_changed=tuple(
                resource
                for resource in self._configs_changed
                if resource.type != TOPIC_RESOURCE or resource.name not in self._created
            ),
            brokers_changed=tuple(self._brokers_changed),
            partitions_changed=tuple(self._partitions_changed),
            security=security_delta,
        )

    # Topics.

    def _topic(self, change: TopicRecord) -> None:
        topics = self._writable_topics()
        topic = TopicImage(change.name, TopicId(change.topic_id))
        assert topic.name not in topics, f"topic {topic.name} already exists"
        assert topic.id not in self._topics_by_id, f"{topic.name} has the id of another topic"
        topics[topic.name] = topic
        self._topics_by_id[topic.id] = topic
        self._open[topic.id] = (topic, [])
        self._created[topic.name] = None

    def _remove_topic(self, id: TopicId) -> None:
        topics = self._writable_topics()
        self._close(id)
        topic = self._topics_by_id.pop(id)
        del topics[topic.name]
        self._partition_count -= len(topic.partitions)
        self._deleted.append(topic)
        self._created.pop(topic.name, None)
        if self._changed.pop(topic.name, True) is None:
            for index in range(len(topic.partitions)):
                self._partitions_changed.pop((topic.name, index), None)
        resource = ConfigResource(TOPIC_RESOURCE, topic.name)
        self._configs_changed.pop(resource, None)
        if resource in (self._base.configs if self._configs is None else self._configs):
            del self._writable_configs()[resource]
            self._own_configs.discard(resource)

    def _partition(self, change: PartitionRecord) -> None:
        topic, partitions = self._opened(TopicId(change.topic_id))
        partition = PartitionImage(
            change.partition_id,
            BrokerId(change.leader),
            change.leader_epoch,
            change.partition_epoch,
            self._ids(change.replicas),
            self._ids(change.isr),
            self._share(tuple(change.directories or [bytes(16)] * len(change.replicas))),
            self._ids(change.removing_replicas),
            self._ids(change.adding_replicas),
            self._ids(change.eligible_leader_replicas or ()),
            self._ids(change.last_known_elr or ()),
            change.leader_recovery_state,
        )
        check_partition(partition)
        if partition.index < len(partitions):
            partitions[partition.index] = partition
        else:
            assert partition.index == len(partitions), (
                f"{topic.name} lacks a partition before {partition.index}"
            )
            partitions.append(partition)
            self._partition_count += 1
        self._touched(topic, partition.index)

    def _partition_change(self, change: PartitionChangeRecord) -> None:
        # Tens of thousands come in one batch when a broker dies, so this is written for speed.
        topic, partitions = self._opened(TopicId(change.topic_id))
        before = partitions[change.partition_id]
        index, leader, leader_epoch, partition_epoch, replicas, isr, directories = before[:7]
        removing_replicas, adding_replicas, elr, last_known_elr, recovery_state = before[7:]
        if change.isr is not None:
            isr = self._ids(change.isr)
        if change.leader != NO_LEADER_CHANGE:
            leader = BrokerId(change.leader)
            leader_epoch += 1
        if change.replicas is not None:
            replicas = self._ids(change.replicas)
        if change.directories is not None:
            directories = self._share(tuple(change.directories))
        if change.removing_replicas is not None:
            removing_replicas = self._ids(change.removing_replicas)
        if change.adding_replicas is not None:
            adding_replicas = self._ids(change.adding_replicas)
        if change.eligible_leader_replicas is not None:
            elr = self._ids(change.eligible_leader_replicas)
        if change.last_known_elr is not None:
            last_known_elr = self._ids(change.last_known_elr)
        if change.leader_recovery_state >= 0:
            recovery_state = change.leader_recovery_state
        partition = PartitionImage(
            index,
            leader,
            leader_epoch,
            partition_epoch + 1,
            replicas,
            isr,
            directories,
            removing_replicas,
            adding_replicas,
            elr,
            last_known_elr,
            recovery_state,
        )
        check_partition(partition)
        partitions[index] = partition
        self._touched(topic, index)

    def _touched(self, topic: TopicImage, index: int) -> None:
        if topic.name not in self._created:
            self._changed[topic.name] = None
            self._partitions_changed[topic.name, index] = None

    def _opened(self, id: TopicId) -> tuple[TopicImage, list[PartitionImage]]:
        opened = self._open.get(id)
        if opened is None:
            self._writable_topics()
            topic = self._topics_by_id[id]
            opened = self._open[id] = (topic, list(topic.partitions))
        return opened

    def _close(self, id: TopicId) -> None:
        opened = self._open.pop(id, None)
        if opened is None:
            return
        topic, partitions = opened
        assert self._topics is not None
        topic = topic._replace(partitions=tuple(partitions))
        self._topics[topic.name] = self._topics_by_id[id] = topic

    def _writable_topics(self) -> dict[str, TopicImage]:
        if self._topics is None:
            self._topics = dict(self._base.topics)
            self._topics_by_id = dict(self._base.topics_by_id)
        return self._topics

    # Settings and features.

    def _config(self, change: ConfigRecord) -> None:
        resource = ConfigResource(change.resource_type, change.resource_name)
        if resource.type == TOPIC_RESOURCE and change.name == CREATED:
            topic, partitions = self._opened(self._writable_topics()[resource.name].id)
            self._open[topic.id] = (topic._replace(created_ms=int(change.value or -1)), partitions)
            return
        if resource.type == BROKER_RESOURCE and change.name in (CLUSTER_ID, NEWCOMER, SESSION):
            self._hidden(resource, change)
            return
        configs = self._writable_configs()
        settings = configs.get(resource, {})
        if resource not in self._own_configs:
            self._own_configs.add(resource)
            settings = dict(settings)
        assert isinstance(settings, dict)
        if change.value is None:
            settings.pop(change.name, None)
        else:
            settings[change.name] = change.value
        if settings:
            configs[resource] = settings
        else:
            configs.pop(resource, None)
            self._own_configs.discard(resource)
        self._configs_changed[resource] = None

    def _hidden(self, resource: ConfigResource, change: ConfigRecord) -> None:
        if change.name == CLUSTER_ID:
            self._cluster_id = change.value or ""
            return
        if change.name == SESSION:
            self._session_ms = int(change.value or 0)
            return
        broker = BrokerId(int(resource.name))
        others = [newcomer for newcomer in self._newcomers if newcomer != broker]
        self._newcomers = tuple(others) if change.value is None else tuple(sorted([*others, broker]))

    def _writable_configs(self) -> dict[ConfigResource, Mapping[str, str]]:
        if self._configs is None:
            self._configs = dict(self._base.configs)
        return self._configs

    def _feature(self, change: FeatureLevelRecord) -> None:
        if self._features is None:
            self._features = dict(self._base.features)
        if change.feature_level:
            self._features[change.name] = change.feature_level
        else:
            self._features.pop(change.name, None)

    # Brokers.

    def _broker(self, id: int, epoch: int) -> BrokerImage:
        broker = self._writable_brokers()[BrokerId(id)]
        assert broker.epoch == epoch, f"a change for epoch {epoch} of broker {id}, which is in {broker.epoch}"
        return broker

    def _unregister(self, id: BrokerId) -> None:
        del self._writable_brokers()[id]
        self._newcomers = tuple(newcomer for newcomer in self._newcomers if newcomer != id)
        self._brokers_changed[id] = None

    def _put_broker(self, broker: BrokerImage) -> None:
        self._writable_brokers()[broker.id] = broker
        self._brokers_changed[broker.id] = None

    def _broker_change(self, change: BrokerRegistrationChangeRecord) -> None:
        broker = self._broker(change.broker_id, change.broker_epoch)
        # 1 sets the flag, -1 clears it, 0 leaves it unchanged.
        if change.fenced:
            broker = broker._replace(fenced=change.fenced > 0)
        if change.in_controlled_shutdown:
            broker = broker._replace(in_controlled_shutdown=change.in_controlled_shutdown > 0)
        if change.log_dirs:
            broker = broker._replace(directories=tuple(change.log_dirs))
        self._put_broker(broker)

    def _writable_brokers(self) -> dict[BrokerId, BrokerImage]:
        if self._brokers is None:
            self._brokers = dict(self._base.brokers)
        return self._brokers

    # Sharing.

    def _ids(self, ids: Iterable[int]) -> tuple[BrokerId, ...]:
        return self._share(tuple(ids))  # type: ignore[arg-type]  # plain numbers until here

    def _share(self, value: T) -> T:
        """One object for all equal values of this batch."""
        return self._shared.setdefault(value, value)  # type: ignore[return-value]
