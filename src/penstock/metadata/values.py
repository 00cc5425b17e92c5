"""What the metadata is made of: brokers, partitions, topics, and the changes that write each of them down.

Plain immutable values, gathered into one in ``image.py``. What a newcomer gets wrong: a replica's directory is
all zeros until its broker has said where it lies, and that counts as online. A directory is offline only when
it is named and its broker does not have it (any more).
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.model import BrokerId, TopicId
from penstock.protocol.listeners import NODES, ListenerDescription
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    ConfigRecord,
    PartitionRecord,
    RegisterBrokerRecord,
)

NO_LEADER = BrokerId(-1)
# In a PartitionChangeRecord: the leader stays, and so does its epoch.
NO_LEADER_CHANGE = -2

# Values of leader_recovery_state (KIP-704). Recovering: elected although it may lack records that were
# committed, until the leader says that it has made the best of it.
RECOVERED = 0
RECOVERING = 1

# Resource types of ConfigRecord and of the config requests.
TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4

# Kept like settings, because Kafka's records have no place for them; never shown and never set by clients.
# The cluster's id, on all brokers.
CLUSTER_ID = "penstock.cluster.id"
# On a broker that has not had its share of the replicas yet.
NEWCOMER = "penstock.newcomer"
# The longest session that a controller may have given to brokers that its successor has not heard of, where that is
# not the default. Kept like the others, for the same reason.
SESSION = "penstock.session.ms"

# Kafka's directory ids that are no directories: not known, not assigned, lost.
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


class BrokerImage(NamedTuple):
    id: BrokerId
    # Grows with each registration; a request with an older one comes from a process that was replaced.
    epoch: int
    # One process's life.
    incarnation_id: bytes
    # The one for clients first.
    endpoints: tuple[Endpoint, ...]
    rack: str | None
    # Registered, but not (or no longer) to be given leadership.
    fenced: bool
    in_controlled_shutdown: bool
    # Ids of its data directories.
    directories: tuple[bytes, ...]

    def endpoint_for(self, listener: ListenerDescription) -> Endpoint:
        """Where a client of a listener reaches this broker: at the endpoint of that name, or else at the first."""
        for endpoint in self.endpoints:
            if endpoint.name == listener.advertises:
                return endpoint
        return self.endpoints[0]

    @property
    def internal(self) -> Endpoint | None:
        """Where other nodes reach it; None when it is alone."""
        for endpoint in self.endpoints:
            if endpoint.name == NODES.name:
                return endpoint
        return None

    @property
    def is_active(self) -> bool:
        return not self.fenced and not self.in_controlled_shutdown

    def has(self, directory: bytes) -> bool:
        """Whether a replica said to be there can be read; one that is said to be nowhere is taken at its word."""
        # A log written by others may know brokers without directories.
        return directory in self.directories or directory in _NOWHERE or not self.directories


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
    # A subset of the replicas; may be empty when there is no leader.
    isr: tuple[BrokerId, ...]
    # The data directory of each replica, in their order; zeros where its broker has not said.
    directories: tuple[bytes, ...]
    # Of a reassignment under way: replicas that will go when all of the added ones are in sync.
    removing_replicas: tuple[BrokerId, ...] = ()
    adding_replicas: tuple[BrokerId, ...] = ()
    # KIP-966: replicas that left the ISR while it was too small for anything to be committed without them, so
    # that they hold all that is. Disjoint from the ISR.
    eligible_leader_replicas: tuple[BrokerId, ...] = ()
    # The last leader of a partition that has none and has nobody left who surely holds everything.
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
    # The new and changed partitions of the ``changed`` topics: name and index.
    partitions_changed: tuple[tuple[str, int], ...] = ()


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
    """The change that makes a broker a newcomer, or takes that from it."""
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
        rack=broker.rack,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        log_dirs=list(broker.directories),
    )


def registered(change: RegisterBrokerRecord) -> BrokerImage:
    """The broker that such a change registers."""
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


def check_partition(partition: PartitionImage) -> None:
    """Assert what must be true of a partition by itself. Called for every change, so it builds no sets."""
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
