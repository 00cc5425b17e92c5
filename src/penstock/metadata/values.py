"""The values of the metadata (brokers, partitions, topics) and the changes that write them to the log.

Plain immutable values; ``image.py`` combines them. A replica's directory is all zeros until its broker has
reported it, and counts as online. A directory is offline only when its id is known and its broker does not have
it (any more).
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.metadata.security import NO_SECURITY_CHANGE, SecurityDelta
from penstock.model import BrokerId, TopicId
from penstock.protocol.apis import INTERNAL
from penstock.protocol.listeners import NODES, ListenerDescription
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerFeature,
    ConfigRecord,
    PartitionRecord,
    RegisterBrokerRecord,
)

NO_LEADER = BrokerId(-1)
# In a PartitionChangeRecord: the leader stays, and so does its epoch.
NO_LEADER_CHANGE = -2

# Values of leader_recovery_state (KIP-704). Recovering: the leader was elected although it may lack committed
# records, and has not yet reported that its recovery is done.
RECOVERED = 0
RECOVERING = 1

# Resource types of ConfigRecord and of the config requests.
TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4

# Stored as settings, because Kafka's records have no field for them. Clients never see them and cannot set them.
# The cluster's id, on all brokers.
CLUSTER_ID = "penstock.cluster.id"
# On a broker that has not received its share of the replicas yet.
NEWCOMER = "penstock.newcomer"
# The longest session that a controller may have given to brokers, if not the default. Its successor, which has
# not heard from these brokers, needs it.
SESSION = "penstock.session.ms"

# Kafka's special directory ids: 0 unknown, 1 unassigned, 2 lost.
UNASSIGNED_DIRECTORY = bytes(16)
LOST_DIRECTORY = bytes(15) + b"\x02"
_NOWHERE = (UNASSIGNED_DIRECTORY, bytes(15) + b"\x01")


class ConfigResource(NamedTuple):
    type: int
    # A topic's name, or a broker's id in digits; empty for all brokers.
    name: str


class Endpoint(NamedTuple):
    name: str
    host: str
    port: int
    security_protocol: int


class FeatureRange(NamedTuple):
    """The levels of a feature that a broker supports, inclusive."""

    name: str
    level_min: int
    level_max: int


class BrokerImage(NamedTuple):
    id: BrokerId
    # Grows with each registration. A request with an older epoch comes from a process that was replaced.
    epoch: int
    # Unique to one run of the process.
    incarnation_id: bytes
    # One for each listener, those of clients first.
    endpoints: tuple[Endpoint, ...]
    rack: str | None
    # Registered, but must not lead (yet, or any more).
    fenced: bool
    in_controlled_shutdown: bool
    # Ids of its data directories.
    directories: tuple[bytes, ...]
    # Empty for a broker of an older release, or one that was registered by a controller of an older release.
    features: tuple[FeatureRange, ...] = ()

    def endpoint_for(self, listener: ListenerDescription) -> Endpoint | None:
        """The endpoint for clients of a listener: the one with its name. None: this broker has no such listener.

        Never that of another listener: a client that came over TLS must not be sent to a port without it.
        """
        for endpoint in self.endpoints:
            if endpoint.name == listener.advertises:
                return endpoint
        # What nodes ask for is an address to show; brokers may have any listeners for clients.
        return self.endpoints[0] if listener.serves == INTERNAL else None

    @property
    def internal(self) -> Endpoint | None:
        """The endpoint for other nodes; None on a single node."""
        for endpoint in self.endpoints:
            if endpoint.name == NODES.name:
                return endpoint
        return None

    @property
    def is_active(self) -> bool:
        return not self.fenced and not self.in_controlled_shutdown

    def supports(self, feature: str, level: int) -> bool:
        return any(
            [each.name == feature and each.level_min <= level <= each.level_max for each in self.features]
        )

    def has(self, directory: bytes) -> bool:
        """Whether a replica in this directory can be read. A replica without a directory can."""
        # A log written by other software may have brokers without directories.
        return directory in self.directories or directory in _NOWHERE or not self.directories


class PartitionImage(NamedTuple):
    """One partition. There may be 100,000, so equal tuples in them are one shared object."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    # In the ISR, or NO_LEADER.
    leader: BrokerId
    # Grows with each election, even if the leader stays the same.
    leader_epoch: int
    # Grows with each change of the partition.
    partition_epoch: int
    # In order of preference.
    replicas: tuple[BrokerId, ...]
    # A subset of the replicas; may be empty when there is no leader.
    isr: tuple[BrokerId, ...]
    # The data directory of each replica, in the order of the replicas; zeros until its broker has reported it.
    directories: tuple[bytes, ...]
    # During a reassignment: replicas that are removed when all of the added ones are in sync.
    removing_replicas: tuple[BrokerId, ...] = ()
    adding_replicas: tuple[BrokerId, ...] = ()
    # KIP-966: replicas that left the ISR when it was too small to commit anything without them, so they hold
    # everything committed. Disjoint from the ISR.
    eligible_leader_replicas: tuple[BrokerId, ...] = ()
    # The last leader of a leaderless partition, if no replica is left that surely holds everything committed.
    last_known_elr: tuple[BrokerId, ...] = ()
    leader_recovery_state: int = RECOVERED

    @property
    def is_reassigned(self) -> bool:
        return bool(self.adding_replicas or self.removing_replicas)

    def directory(self, broker: int) -> bytes:
        return self.directories[self.replicas.index(BrokerId(broker))]


class TopicImage(NamedTuple):
    name: str
    id: TopicId
    # Partition n has index n.
    partitions: tuple[PartitionImage, ...] = ()
    # Wall time; -1 in a log written by other software.
    created_ms: int = -1


class Delta(NamedTuple):
    """The differences that a batch of changes made."""

    # Names of topics that exist now and did not exist before with their present ids.
    created: tuple[str, ...] = ()
    # The topics as they were when deleted. Includes topics created and deleted by the same batch, because their
    # directories may exist.
    deleted: tuple[TopicImage, ...] = ()
    # Names of topics that existed before and have new or changed partitions.
    changed: tuple[str, ...] = ()
    # Resources whose settings changed, except topics that were created or deleted.
    configs_changed: tuple[ConfigResource, ...] = ()
    # Brokers that were registered, unregistered, fenced, unfenced or changed.
    brokers_changed: tuple[BrokerId, ...] = ()
    # The new and changed partitions of the ``changed`` topics: name and index.
    partitions_changed: tuple[tuple[str, int], ...] = ()
    security: SecurityDelta = NO_SECURITY_CHANGE


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


def newcomer_record(broker: int, is_newcomer: bool) -> ConfigRecord:
    """The change that marks a broker as a newcomer, or removes the mark."""
    return config_record(ConfigResource(BROKER_RESOURCE, str(broker)), NEWCOMER, "1" if is_newcomer else None)


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
        features=[
            BrokerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, low, high in broker.features
        ],
        rack=broker.rack,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        log_dirs=list(broker.directories),
    )


def registered(change: RegisterBrokerRecord) -> BrokerImage:
    """The broker that this change registers."""
    return BrokerImage(
        BrokerId(change.broker_id),
        change.broker_epoch,
        change.incarnation_id,
        tuple(Endpoint(end.name, end.host, end.port, end.security_protocol) for end in change.end_points),
        change.rack,
        change.fenced,
        change.in_controlled_shutdown,
        tuple(change.log_dirs),
        tuple(
            FeatureRange(feature.name, feature.min_supported_version, feature.max_supported_version)
            for feature in change.features
        ),
    )


def check_partition(partition: PartitionImage) -> None:
    """Assert the invariants of a single partition. Called for every change, so it builds no sets."""
    replicas, isr = partition.replicas, partition.isr
    assert replicas and len(partition.directories) == len(replicas), partition
    for broker in isr:
        assert broker in replicas, partition
    assert partition.leader == NO_LEADER or partition.leader in isr, partition
    assert partition.leader_epoch >= 0 and partition.partition_epoch >= 0, partition
    for broker in partition.eligible_leader_replicas:
        assert broker in replicas and broker not in isr, partition
    if partition.adding_replicas or partition.removing_replicas:
        for broker in partition.adding_replicas:
            assert broker in replicas and broker not in partition.removing_replicas, partition
        for broker in partition.removing_replicas:
            assert broker in replicas, partition
        assert len(partition.removing_replicas) < len(replicas), partition
    assert len(replicas) == 1 or len(dict.fromkeys(replicas)) == len(replicas), partition
    assert len(isr) <= 1 or len(dict.fromkeys(isr)) == len(isr), partition
