"""The state changes of a group coordinator, as values and as the records of ``__consumer_offsets``.

The bytes are Kafka's own (OffsetCommitKey 1, OffsetCommitValue 4, GroupMetadataKey 2, GroupMetadataValue 3, each
behind a two-byte version), so that Kafka's console consumer and dump tool read the topic. Every version that
Kafka ever wrote is read. An offset contains the id of its topic; records of Kafka before 4.1 and of our first
releases do not (``NO_TOPIC_ID``).

The version in a *key* is the type of the record. Types we do not know (the groups of KIP-848, share groups) are
skipped, so that a data directory may come from Kafka and go back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.environment import Buffer
from penstock.protocol import schema
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.group_records import (
    GroupMetadataKey,
    GroupMetadataValue,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
)

OFFSET_KEY_VERSIONS = (0, 1)
GROUP_KEY_VERSION = 2
# The newest version that is not flexible: older tools read it too (KIP-915).
GROUP_VALUE_VERSION = 3
# The first version with a topic id. It is flexible: readers skip fields that they do not know.
OFFSET_VALUE_VERSION = 4
# For offsets that were read without a topic id and are written again before they get one.
OFFSET_VALUE_VERSION_WITHOUT_ID = 3
OFFSET_VALUE_VERSION_WITH_EXPIRY = 1
VALUE_VERSIONS = range(5)

NO_TIMESTAMP = -1
# The topic id of an offset whose record has none.
NO_TOPIC_ID = bytes(16)
# The topic id of an offset whose topic is certainly gone, whatever its id was. No topic has this id.
GONE_TOPIC_ID = b"\xff" * 16


@dataclass(frozen=True, slots=True)
class OffsetCommitted:
    group_id: str
    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp: int = NO_TIMESTAMP
    expire_timestamp: int = NO_TIMESTAMP
    topic_id: bytes = NO_TOPIC_ID


@dataclass(frozen=True, slots=True)
class OffsetRemoved:
    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class StoredMember:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    # Metadata of the chosen protocol. Other protocols of the member are not stored.
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupStored:
    """A whole generation. Written when its assignment is known, and when the group becomes empty."""

    group_id: str
    # Empty for a group that only stores offsets.
    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    # Wall time of the last change of state: expiry of an empty group's offsets starts here (KIP-211).
    state_timestamp: int
    members: tuple[StoredMember, ...]


@dataclass(frozen=True, slots=True)
class GroupRemoved:
    group_id: str


Change: TypeAlias = OffsetCommitted | OffsetRemoved | GroupStored | GroupRemoved


def encode(change: Change) -> tuple[bytes, bytes | None]:
    """The key and value of a change's record; a value of None is a tombstone."""
    match change:
        case OffsetCommitted():
            return _offset_key(change), _offset_value(change)
        case OffsetRemoved():
            return _offset_key(change), None
        case GroupStored():
            return _group_key(change), _group_value(change)
        case GroupRemoved():
            return _group_key(change), None


def decode(key: Buffer, value: Buffer | None) -> Change | None:
    """The change in a record; None if the type is unknown.

    Raises:
        DecodeError: the record is of a known type and broken, or of a version newer than ours.
    """
    kind = _version(key)
    if kind in OFFSET_KEY_VERSIONS:
        name = schema.decoder(OffsetCommitKey, kind)(memoryview(key), 2)[0]
        return _decode_offset(name, value)
    if kind == GROUP_KEY_VERSION:
        group_id = schema.decoder(GroupMetadataKey, kind)(memoryview(key), 2)[0].group
        return GroupRemoved(group_id) if value is None else _decode_group(group_id, value)
    return None


def _offset_key(change: OffsetCommitted | OffsetRemoved) -> bytes:
    key = OffsetCommitKey(group=change.group_id, topic=change.topic, partition=change.partition)
    return _frame(key, OFFSET_KEY_VERSIONS[-1])


def _offset_value(change: OffsetCommitted) -> bytes:
    has_expiry = change.expire_timestamp != NO_TIMESTAMP
    version = OFFSET_VALUE_VERSION
    if change.topic_id == NO_TOPIC_ID:
        version = OFFSET_VALUE_VERSION_WITH_EXPIRY if has_expiry else OFFSET_VALUE_VERSION_WITHOUT_ID
    value = OffsetCommitValue(
        offset=change.offset,
        leader_epoch=change.leader_epoch,
        metadata=change.metadata,
        commit_timestamp=change.commit_timestamp,
        expire_timestamp=change.expire_timestamp,
        topic_id=change.topic_id,
        expires_at=change.expire_timestamp,
    )
    return _frame(value, version)


def _group_key(change: GroupStored | GroupRemoved) -> bytes:
    return _frame(GroupMetadataKey(group=change.group_id), GROUP_KEY_VERSION)


def _group_value(change: GroupStored) -> bytes:
    members = [
        MemberMetadata(
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            rebalance_timeout=member.rebalance_timeout_ms,
            session_timeout=member.session_timeout_ms,
            subscription=member.subscription,
            assignment=member.assignment,
        )
        for member in change.members
    ]
    value = GroupMetadataValue(
        protocol_type=change.protocol_type,
        generation=change.generation,
        protocol=change.protocol,
        leader=change.leader,
        current_state_timestamp=change.state_timestamp,
        members=members,
    )
    return _frame(value, GROUP_VALUE_VERSION)


def _decode_offset(name: OffsetCommitKey, value: Buffer | None) -> Change:
    if value is None:
        return OffsetRemoved(name.group, name.topic, name.partition)
    body = schema.decoder(OffsetCommitValue, _value_version(value))(memoryview(value), 2)[0]
    return OffsetCommitted(
        name.group,
        name.topic,
        name.partition,
        body.offset,
        body.leader_epoch,
        body.metadata,
        body.commit_timestamp,
        body.expire_timestamp if body.expires_at == NO_TIMESTAMP else body.expires_at,
        body.topic_id,
    )


def _decode_group(group_id: str, value: Buffer) -> Change:
    body = schema.decoder(GroupMetadataValue, _value_version(value))(memoryview(value), 2)[0]
    members = tuple(
        StoredMember(
            member.member_id,
            member.group_instance_id,
            member.client_id,
            member.client_host,
            # Version 0 has only the session timeout.
            member.session_timeout if member.rebalance_timeout == -1 else member.rebalance_timeout,
            member.session_timeout,
            member.subscription,
            member.assignment,
        )
        for member in body.members
    )
    return GroupStored(
        group_id,
        body.protocol_type,
        body.generation,
        body.protocol,
        body.leader,
        body.current_state_timestamp,
        members,
    )


def _frame(message: schema.Message, version: int) -> bytes:
    return version.to_bytes(2, "big") + schema.encode(message, version)


def _version(buffer: Buffer) -> int:
    if len(buffer) < 2:
        raise DecodeError("a record of the offsets topic has no version")
    return int.from_bytes(buffer[:2], "big", signed=True)


def _value_version(value: Buffer) -> int:
    version = _version(value)
    if version not in VALUE_VERSIONS:
        raise DecodeError(f"a record of the offsets topic has a value of unknown version {version}")
    return version
