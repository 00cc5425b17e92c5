"""Requests from brokers to the controller: registration, heartbeats, in-sync replicas, replica directories.

They use the internal listener, except UnregisterBroker, which an administrator sends. A struct whose name several
messages share in Kafka's schemas has its message's name as a prefix here.

Careful: a broker epoch is not a leader epoch. It is the offset of the broker's registration in the metadata log,
and distinguishes one run of a broker from the next (KIP-903).
"""

from __future__ import annotations

from penstock.protocol.messages import TIME_UNKNOWN
from penstock.protocol.schema import (
    OWN_TAGS,
    Message,
    Response,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    string,
    uint16,
    uuid,
)


class BrokerState(Message):
    broker_id: int = int32()
    # -1 when the leader does not know it, which the controller accepts.
    broker_epoch: int = int64(default=-1)


class AlterPartitionRequestPartition(Message):
    partition_index: int = int32()
    leader_epoch: int = int32()
    new_isr: list[int] = array(int32, "0-2")
    new_isr_with_epochs: list[BrokerState] = array(BrokerState, "3+")
    # 1 while the partition recovers from an unclean election (KIP-704).
    leader_recovery_state: int = int8("1+")
    # The epoch this proposal is based on. The controller refuses it if it is not the current one.
    partition_epoch: int = int32()


class AlterPartitionRequestTopic(Message):
    topic_id: bytes = uuid("2+")
    partitions: list[AlterPartitionRequestPartition] = array(AlterPartitionRequestPartition)


class AlterPartitionRequest(Message, key=56, versions="2-3", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    topics: list[AlterPartitionRequestTopic] = array(AlterPartitionRequestTopic)


class AlterPartitionResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()
    isr: list[int] = array(int32)
    leader_recovery_state: int = int8("1+")
    partition_epoch: int = int32()
    # Ours: replicas that may be elected though not in sync. None from a node that does not send it.
    eligible_leader_replicas: list[int] | None = array(int32, nullable=True, default=None, tag=OWN_TAGS)


class AlterPartitionResponseTopic(Message):
    topic_id: bytes = uuid("2+")
    partitions: list[AlterPartitionResponsePartition] = array(AlterPartitionResponsePartition)


class AlterPartitionResponse(Response, key=56, versions="2-3", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: list[AlterPartitionResponseTopic] = array(AlterPartitionResponseTopic)


class Listener(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()
    security_protocol: int = int16()


class Feature(Message):
    name: str = string()
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class FlushedTopic(Message):
    topic_id: bytes = uuid()
    partitions: list[int] = array(int32)


class BrokerRegistrationRequest(Message, key=62, versions="0-4", flexible="0+"):
    broker_id: int = int32()
    cluster_id: str = string()
    # A new one at every start of the process.
    incarnation_id: bytes = uuid()
    listeners: list[Listener] = array(Listener)
    features: list[Feature] = array(Feature)
    rack: str | None = string(nullable=True)
    is_migrating_zk_broker: bool = boolean("1+")
    log_dirs: list[bytes] = array(uuid, "2+")
    # From the last clean shutdown. If it does not match, the broker may have lost data (KIP-966).
    previous_broker_epoch: int = int64("3+", default=-1)
    # Ours: replicas with all their acknowledged records on disk. Empty if a node does not send it.
    flushed: list[FlushedTopic] = array(FlushedTopic, tag=OWN_TAGS)


class BrokerRegistrationResponse(Response, key=62, versions="0-4", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    broker_epoch: int = int64(default=-1)


class BrokerHeartbeatRequest(Message, key=63, versions="0-2", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    # The last offset applied, inclusive.
    current_metadata_offset: int = int64()
    want_fence: bool = boolean()
    want_shut_down: bool = boolean()
    # All offline directories, every time, not only new ones.
    offline_log_dirs: list[bytes] = array(uuid, "1+", tag=0)
    cordoned_log_dirs: list[bytes] | None = array(uuid, "2+", nullable=True, default=None, tag=1)
    # Ours: directories on full disks. An older controller ignores it.
    full_log_dirs: list[bytes] | None = array(uuid, nullable=True, default=None, tag=OWN_TAGS + 10)
    # Ours: the broker's wall time.
    time_ms: int = int64(default=TIME_UNKNOWN, tag=OWN_TAGS + 20)
    # Ours: the time since its wall clock last jumped.
    steady_ms: int = int64(default=TIME_UNKNOWN, tag=OWN_TAGS + 22)
    # Ours: its lease uses the session timeout from the response. Older brokers use their own setting.
    takes_session: bool = boolean(tag=OWN_TAGS + 30)
    # Ours: the features it supports, if its registration in the log does not have them. Otherwise empty.
    features: list[Feature] = array(Feature, tag=OWN_TAGS + 40)


class NodeClock(Message):
    node_id: int = int32()
    # Ahead of the controller's clock.
    ahead_ms: int = int64(default=TIME_UNKNOWN)
    # Time since it last jumped.
    steady_ms: int = int64(default=TIME_UNKNOWN, tag=OWN_TAGS)


class BrokerHeartbeatResponse(Response, key=63, versions="0-2", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    is_caught_up: bool = boolean()
    is_fenced: bool = boolean(default=True)
    should_shut_down: bool = boolean()
    # Ours: the controller's wall time.
    controller_time_ms: int = int64(default=TIME_UNKNOWN, tag=OWN_TAGS + 20)
    # Ours: one per live broker, and one for the controller.
    clocks: list[NodeClock] = array(NodeClock, tag=OWN_TAGS + 21)
    # Ours: this controller fences the broker after this time without a heartbeat; 0 from one that does not send it.
    session_timeout_ms: int = int32(tag=OWN_TAGS + 30)


class UnregisterBrokerRequest(Message, key=64, versions="0", flexible="0+"):
    broker_id: int = int32()


class UnregisterBrokerResponse(Response, key=64, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class AllocateProducerIdsRequest(Message, key=67, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)


class AllocateProducerIdsResponse(Response, key=67, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id_start: int = int64()
    producer_id_len: int = int32()


class AssignReplicasToDirsRequestPartition(Message):
    partition_index: int = int32()


class AssignReplicasToDirsRequestTopic(Message):
    topic_id: bytes = uuid()
    partitions: list[AssignReplicasToDirsRequestPartition] = array(AssignReplicasToDirsRequestPartition)


class AssignReplicasToDirsRequestDirectory(Message):
    id: bytes = uuid()
    topics: list[AssignReplicasToDirsRequestTopic] = array(AssignReplicasToDirsRequestTopic)


class AssignReplicasToDirsRequest(Message, key=73, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    directories: list[AssignReplicasToDirsRequestDirectory] = array(AssignReplicasToDirsRequestDirectory)


class AssignReplicasToDirsResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()


class AssignReplicasToDirsResponseTopic(Message):
    topic_id: bytes = uuid()
    partitions: list[AssignReplicasToDirsResponsePartition] = array(AssignReplicasToDirsResponsePartition)


class AssignReplicasToDirsResponseDirectory(Message):
    id: bytes = uuid()
    topics: list[AssignReplicasToDirsResponseTopic] = array(AssignReplicasToDirsResponseTopic)


class AssignReplicasToDirsResponse(Response, key=73, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    directories: list[AssignReplicasToDirsResponseDirectory] = array(AssignReplicasToDirsResponseDirectory)
