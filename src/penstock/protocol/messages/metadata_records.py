"""The records of ``__cluster_metadata`` in KRaft's schemas, so that Kafka's dump tool can read our log.

``key`` is the record's type in the frame that ``metadata/changes.py`` writes around it. In records that report a
change, a missing field means "unchanged": the defaults of their tagged fields are None or a sentinel, never a
real value.
"""

from __future__ import annotations

from penstock.protocol.schema import (
    Message,
    array,
    binary,
    boolean,
    float64,
    int8,
    int16,
    int32,
    int64,
    string,
    uint16,
    uuid,
)


class BrokerEndpoint(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()
    security_protocol: int = int16()


class BrokerFeature(Message):
    name: str = string()
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class RegisterBrokerRecord(Message, key=0, versions="0-3", flexible="0+"):
    broker_id: int = int32()
    is_migrating_zk_broker: bool = boolean("2+")
    incarnation_id: bytes = uuid()
    broker_epoch: int = int64()
    end_points: list[BrokerEndpoint] = array(BrokerEndpoint)
    features: list[BrokerFeature] = array(BrokerFeature)
    rack: str | None = string(nullable=True)
    fenced: bool = boolean(default=True)
    in_controlled_shutdown: bool = boolean("1+")
    log_dirs: list[bytes] = array(uuid, "3+", tag=0)


class UnregisterBrokerRecord(Message, key=1, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64()


class TopicRecord(Message, key=2, versions="0", flexible="0+"):
    name: str = string()
    topic_id: bytes = uuid()


class PartitionRecord(Message, key=3, versions="0-2", flexible="0+"):
    partition_id: int = int32(default=-1)
    topic_id: bytes = uuid()
    replicas: list[int] = array(int32)
    isr: list[int] = array(int32)
    removing_replicas: list[int] = array(int32)
    adding_replicas: list[int] = array(int32)
    leader: int = int32(default=-1)
    leader_recovery_state: int = int8(tag=0)
    leader_epoch: int = int32(default=-1)
    partition_epoch: int = int32(default=-1)
    directories: list[bytes] = array(uuid, "1+")
    eligible_leader_replicas: list[int] | None = array(int32, "2+", nullable=True, default=None, tag=1)
    last_known_elr: list[int] | None = array(int32, "2+", nullable=True, default=None, tag=2)


class ConfigRecord(Message, key=4, versions="0", flexible="0+"):
    resource_type: int = int8()
    resource_name: str = string()
    name: str = string()
    value: str | None = string(nullable=True)


class PartitionChangeRecord(Message, key=5, versions="0-2", flexible="0+"):
    partition_id: int = int32(default=-1)
    topic_id: bytes = uuid()
    isr: list[int] | None = array(int32, nullable=True, default=None, tag=0)
    leader: int = int32(default=-2, tag=1)
    replicas: list[int] | None = array(int32, nullable=True, default=None, tag=2)
    removing_replicas: list[int] | None = array(int32, nullable=True, default=None, tag=3)
    adding_replicas: list[int] | None = array(int32, nullable=True, default=None, tag=4)
    leader_recovery_state: int = int8(default=-1, tag=5)
    directories: list[bytes] | None = array(uuid, "1+", nullable=True, default=None, tag=8)
    eligible_leader_replicas: list[int] | None = array(int32, "2+", nullable=True, default=None, tag=6)
    last_known_elr: list[int] | None = array(int32, "2+", nullable=True, default=None, tag=7)


class FenceBrokerRecord(Message, key=7, versions="0", flexible="0+"):
    id: int = int32()
    epoch: int = int64()


class UnfenceBrokerRecord(Message, key=8, versions="0", flexible="0+"):
    id: int = int32()
    epoch: int = int64()


class RemoveTopicRecord(Message, key=9, versions="0", flexible="0+"):
    topic_id: bytes = uuid()


class FeatureLevelRecord(Message, key=12, versions="0", flexible="0+"):
    name: str = string()
    feature_level: int = int16()


class ProducerIdsRecord(Message, key=15, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    next_producer_id: int = int64()


class BrokerRegistrationChangeRecord(Message, key=17, versions="0-2", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64()
    fenced: int = int8(tag=0)
    in_controlled_shutdown: int = int8("1+", tag=1)
    log_dirs: list[bytes] = array(uuid, "2+", tag=2)


class NoOpRecord(Message, key=20, versions="0", flexible="0+"):
    pass


class UserScramCredentialRecord(Message, key=11, versions="0", flexible="0+"):
    name: str = string()
    mechanism: int = int8()
    salt: bytes = binary()
    stored_key: bytes = binary()
    server_key: bytes = binary()
    iterations: int = int32()


class RemoveUserScramCredentialRecord(Message, key=22, versions="0", flexible="0+"):
    name: str = string()
    mechanism: int = int8()


class AccessControlEntryRecord(Message, key=18, versions="0", flexible="0+"):
    id: bytes = uuid()
    resource_type: int = int8()
    resource_name: str = string()
    pattern_type: int = int8()
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


class RemoveAccessControlEntryRecord(Message, key=19, versions="0", flexible="0+"):
    id: bytes = uuid()


class QuotaEntityPart(Message):
    entity_type: str = string()
    # None for the default.
    entity_name: str | None = string(nullable=True)


class ClientQuotaRecord(Message, key=14, versions="0", flexible="0+"):
    entity: list[QuotaEntityPart] = array(QuotaEntityPart)
    key: str = string()
    value: float = float64()
    remove: bool = boolean()
