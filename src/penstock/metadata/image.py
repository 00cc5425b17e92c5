"""Everything the cluster has agreed on, as one immutable value: the metadata image.

The image is what replaying the metadata log gives. ``apply`` takes a batch of committed changes and returns a
new image and a delta that says what became different; the old image stays as it was, so a handler that is in
the middle of an answer keeps a consistent view. Copying is per batch and per topic touched: partitions of
other topics are shared between images.

What a newcomer gets wrong: the dictionaries in an image are plain ones for speed, and writing to them breaks
every holder of the image. Only ``_Draft`` writes, to copies. And what makes a topic the same topic is its id:
one that is deleted and created again under its name is another topic, so a deletion names the id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from penstock.metadata.topic_settings import CREATED
from penstock.model import BrokerId, TopicId
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerRegistrationChangeRecord,
    ConfigRecord,
    FeatureLevelRecord,
    FenceBrokerRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnfenceBrokerRecord,
    UnregisterBrokerRecord,
)
from penstock.protocol.schema import Message

NO_LEADER = BrokerId(-1)
# In a PartitionChangeRecord: the leader stays, and so does its epoch.
NO_LEADER_CHANGE = -2
# What else a PartitionChangeRecord may bring; None leaves it as it was.
_BROKER_LISTS = (
    *("isr", "replicas", "removing_replicas", "adding_replicas"),
    *("eligible_leader_replicas", "last_known_elr"),
)

# Resource types of ConfigRecord and of the config requests.
TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4

T = TypeVar("T")


class ConfigResource(NamedTuple):
    type: int
    # A topic's name, or a broker's id in digits; empty for all brokers.
    name: str


class Endpoint(NamedTuple):
    name: str
    host: str
    port: int
    security_protocol: int


class BrokerImage(NamedTuple):
    id: BrokerId
    # Grows with each registration; a request with an older one comes from a process that was replaced.
    epoch: int
    # One process's life.
    incarnation_id: bytes
    endpoints: tuple[Endpoint, ...]
    rack: str | None
    # Registered, but not (or no longer) to be given leadership.
    fenced: bool
    in_controlled_shutdown: bool
    # Ids of its data directories.
    directories: tuple[bytes, ...]

    @property
    def host(self) -> str:
        return self.endpoints[0].host

    @property
    def port(self) -> int:
        return self.endpoints[0].port

    @property
    def is_active(self) -> bool:
        return not self.fenced and not self.in_controlled_shutdown


class PartitionImage(NamedTuple):
    """One partition. There may be 100,000, so equal tuples in them are one object."""

    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody misses here
    # In the ISR, or NO_LEADER.
    leader: BrokerId
    # Grows with each election, be it of the same leader.
    leader_epoch: int
    # Grows with each change of anything here.
    partition_epoch: int
    # In order of preference.
    replicas: tuple[BrokerId, ...]
    # A subset of the replicas.
    isr: tuple[BrokerId, ...]
    # The data directory of each replica, in their order; zeros where its broker has not said.
    directories: tuple[bytes, ...]
    removing_replicas: tuple[BrokerId, ...] = ()
    adding_replicas: tuple[BrokerId, ...] = ()
    # KIP-966.
    eligible_leader_replicas: tuple[BrokerId, ...] = ()
    last_known_elr: tuple[BrokerId, ...] = ()
    leader_recovery_state: int = 0


class TopicImage(NamedTuple):
    name: str
    id: TopicId
    # Partition n is at place n.
    partitions: tuple[PartitionImage, ...] = ()
    # Wall time; -1 in a log written by others.
    created_ms: int = -1


class Delta(NamedTuple):
    """What a batch of changes made different, for those who must act on it."""

    # Names of topics that are there now and were not before, under their present ids.
    created: tuple[str, ...] = ()
    # As they were when they were deleted; also those that were created and deleted by the same batch, because
    # their directories may exist all the same.
    deleted: tuple[TopicImage, ...] = ()
    # Names of topics that were there before and have new or changed partitions.
    changed: tuple[str, ...] = ()
    # Resources whose settings changed, except topics that were created or deleted.
    configs_changed: tuple[ConfigResource, ...] = ()
    # Brokers that were registered, unregistered, fenced, unfenced or changed.
    brokers_changed: tuple[BrokerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    # Of the last change applied. Where an image has been is no part of what it says, so not compared.
    offset: int = field(default=-1, compare=False)
    epoch: int = field(default=0, compare=False)
    brokers: Mapping[BrokerId, BrokerImage] = field(default_factory=dict)
    topics: Mapping[str, TopicImage] = field(default_factory=dict)
    topics_by_id: Mapping[TopicId, TopicImage] = field(default_factory=dict)
    # Only resources with at least one setting.
    configs: Mapping[ConfigResource, Mapping[str, str]] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)
    # The first one that no broker has been given.
    next_producer_id: int = 0
    partition_count: int = 0

    def topic_config(self, name: str) -> Mapping[str, str]:
        """What a topic itself sets."""
        return self.configs.get(ConfigResource(TOPIC_RESOURCE, name), _NOTHING)

    def broker_config(self, broker: BrokerId | int | None) -> Mapping[str, str]:
        """What was set on a broker while it ran; with None, on all of them."""
        return self.configs.get(
            ConfigResource(BROKER_RESOURCE, "" if broker is None else str(broker)), _NOTHING
        )

    def apply(
        self, changes: Iterable[Message], *, offset: int | None = None, epoch: int | None = None
    ) -> tuple[Image, Delta]:
        """The image after a committed batch, and what the batch changed.

        ``offset`` is that of the last change. Without it the changes are taken to follow directly.
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
        """Changes that make this image out of an empty one, the features first, as readers expect."""
        changes: list[Message] = [
            FeatureLevelRecord(name=name, feature_level=level)
            for name, level in sorted(self.features.items())
        ]
        changes += [registration_record(broker) for _, broker in sorted(self.brokers.items())]
        for topic in self.topics.values():
            changes.append(TopicRecord(name=topic.name, topic_id=topic.id))
            changes += [partition_record(topic.id, partition) for partition in topic.partitions]
            if topic.created_ms >= 0:
                changes.append(
                    config_record(ConfigResource(TOPIC_RESOURCE, topic.name), CREATED, str(topic.created_ms))
                )
        for resource, settings in self.configs.items():
            changes += [config_record(resource, name, value) for name, value in settings.items()]
        if self.next_producer_id:
            # Who was given the last block does not matter to anyone any more.
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
                _check_partition(partition)
        for id, broker in self.brokers.items():
            assert broker.id == id and broker.epoch >= 0 and broker.endpoints
        for resource, settings in self.configs.items():
            assert settings, f"{resource} is there without settings"
            assert resource.type != TOPIC_RESOURCE or resource.name in self.topics, f"{resource} is left over"
        assert self.partition_count == sum(len(topic.partitions) for topic in self.topics.values())
        assert self.next_producer_id >= 0


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
        # The topics' dictionaries; copied with the first change of any topic.
        self._topics: dict[str, TopicImage] | None = None
        self._topics_by_id: dict[TopicId, TopicImage] = {}
        # Topics that this batch touches, by id; finished in the order they were touched.
        self._open: dict[TopicId, tuple[TopicImage, list[PartitionImage]]] = {}
        # In order, without repetition.
        self._created: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._deleted: list[TopicImage] = []
        self._configs_changed: dict[ConfigResource, None] = {}
        self._brokers_changed: dict[BrokerId, None] = {}
        # Resources whose settings were already copied by this batch.
        self._own_configs: set[ConfigResource] = set()
        self._shared: dict[object, object] = {}

    def apply(self, change: Message) -> None:
        match change:
            case PartitionRecord():
                self._partition(change)
            case PartitionChangeRecord():
                self._partition_change(change)
            case TopicRecord():
                self._topic(change)
            case RemoveTopicRecord():
                self._remove_topic(TopicId(change.topic_id))
            case ConfigRecord():
                self._config(change)
            case RegisterBrokerRecord():
                self._put_broker(_registered(change))
            case UnregisterBrokerRecord():
                del self._writable_brokers()[BrokerId(change.broker_id)]
                self._brokers_changed[BrokerId(change.broker_id)] = None
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
            case _:
                raise AssertionError(f"no way to apply {type(change).__name__}")

    def finish(self, offset: int, epoch: int) -> tuple[Image, Delta]:
        base = self._base
        for id in list(self._open):
            self._close(id)
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
        )

    # Topics.

    def _topic(self, change: TopicRecord) -> None:
        topics = self._writable_topics()
        topic = TopicImage(change.name, TopicId(change.topic_id))
        assert topic.name not in topics, f"{topic.name} is there already"
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
        self._changed.pop(topic.name, None)
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
        _check_partition(partition)
        if partition.index < len(partitions):
            partitions[partition.index] = partition
        else:
            assert partition.index == len(partitions), (
                f"{topic.name} lacks a partition before {partition.index}"
            )
            partitions.append(partition)
            self._partition_count += 1
        self._touched(topic)

    def _partition_change(self, change: PartitionChangeRecord) -> None:
        topic, partitions = self._opened(TopicId(change.topic_id))
        before = partitions[change.partition_id]
        new: dict[str, object] = {"partition_epoch": before.partition_epoch + 1}
        for name in _BROKER_LISTS:
            ids = getattr(change, name)
            if ids is not None:
                new[name] = self._ids(ids)
        if change.directories is not None:
            new["directories"] = self._share(tuple(change.directories))
        if change.leader_recovery_state >= 0:
            new["leader_recovery_state"] = change.leader_recovery_state
        if change.leader != NO_LEADER_CHANGE:
            new["leader"] = BrokerId(change.leader)
            new["leader_epoch"] = before.leader_epoch + 1
        after = before._replace(**new)  # type: ignore[arg-type]
        _check_partition(after)
        partitions[change.partition_id] = after
        self._touched(topic)

    def _touched(self, topic: TopicImage) -> None:
        if topic.name not in self._created:
            self._changed[topic.name] = None

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

    def _put_broker(self, broker: BrokerImage) -> None:
        self._writable_brokers()[broker.id] = broker
        self._brokers_changed[broker.id] = None

    def _broker_change(self, change: BrokerRegistrationChangeRecord) -> None:
        broker = self._broker(change.broker_id, change.broker_epoch)
        # 1 sets, -1 clears, 0 leaves as it was.
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
        return self._share(tuple(map(BrokerId, ids)))

    def _share(self, value: T) -> T:
        """The first equal value that this batch brought, so that there is one of each."""
        return self._shared.setdefault(value, value)  # type: ignore[return-value]


def partition_record(topic_id: bytes, partition: PartitionImage) -> PartitionRecord:
    """The change that creates a partition in its present state."""
    return PartitionRecord(
        partition_id=partition.index,
        topic_id=topic_id,
        replicas=list(partition.replicas),
        isr=list(partition.isr),
        removing_replicas=list(partition.removing_replicas),
        adding_replicas=list(partition.adding_replicas),
        leader=partition.leader,
        leader_recovery_state=partition.leader_recovery_state,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        directories=list(partition.directories),
        eligible_leader_replicas=list(partition.eligible_leader_replicas) or None,
        last_known_elr=list(partition.last_known_elr) or None,
    )


def config_record(resource: ConfigResource, name: str, value: str | None) -> ConfigRecord:
    """The change of one setting; with None, its removal."""
    return ConfigRecord(resource_type=resource.type, resource_name=resource.name, name=name, value=value)


def registration_record(broker: BrokerImage) -> RegisterBrokerRecord:
    """The change that registers a broker in its present state."""
    return RegisterBrokerRecord(
        broker_id=broker.id,
        incarnation_id=broker.incarnation_id,
        broker_epoch=broker.epoch,
        end_points=[
            BrokerEndpoint(name=name, host=host, port=port, security_protocol=protocol)
            for name, host, port, protocol in broker.endpoints
        ],
        rack=broker.rack,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        log_dirs=list(broker.directories),
    )


def _registered(change: RegisterBrokerRecord) -> BrokerImage:
    return BrokerImage(
        BrokerId(change.broker_id),
        change.broker_epoch,
        change.incarnation_id,
        tuple(Endpoint(end.name, end.host, end.port, end.security_protocol) for end in change.end_points),
        change.rack,
        change.fenced,
        change.in_controlled_shutdown,
        tuple(change.log_dirs),
    )


def _check_partition(partition: PartitionImage) -> None:
    assert partition.replicas and len(set(partition.replicas)) == len(partition.replicas), partition
    assert set(partition.isr) <= set(partition.replicas), partition
    assert partition.leader == NO_LEADER or partition.leader in partition.isr, partition
    assert partition.leader_epoch >= 0 and partition.partition_epoch >= 0, partition
    assert len(partition.directories) == len(partition.replicas), partition
