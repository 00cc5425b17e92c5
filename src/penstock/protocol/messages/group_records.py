"""Keys and values of ``__consumer_offsets``, in Kafka's schemas.

Each key and each value is preceded by its version as an int16, and a key's version is also its kind: 0 and
1 are a committed offset, 2 is a group's metadata (3 and up belong to newer kinds of groups). A null value
is a tombstone.
"""

from __future__ import annotations

from penstock.protocol.schema import Message, array, binary, int32, int64, string, uuid


class OffsetCommitKey(Message, versions="0-1"):
    group: str = string()
    topic: str = string()
    partition: int = int32()


class OffsetCommitValue(Message, versions="0-4", flexible="4+"):
    offset: int = int64()
    leader_epoch: int = int32("3+", default=-1)
    metadata: str = string()
    commit_timestamp: int = int64()
    expire_timestamp: int = int64("1", default=-1)
    topic_id: bytes = uuid("4+", tag=0)
    # Ours: the ``expire_timestamp`` of version 1, which versions with a topic id lack. Kafka skips it and then
    # keeps the offset for the usual time.
    expires_at: int = int64("4+", tag=10_000, default=-1)


class GroupMetadataKey(Message, versions="2"):
    group: str = string()


class MemberMetadata(Message):
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    rebalance_timeout: int = int32("1+", default=-1)
    session_timeout: int = int32()
    subscription: bytes = binary()
    assignment: bytes = binary()


class GroupMetadataValue(Message, versions="0-4", flexible="4+"):
    protocol_type: str = string()
    generation: int = int32()
    protocol: str | None = string(nullable=True)
    leader: str | None = string(nullable=True)
    current_state_timestamp: int = int64("2+", default=-1)
    members: list[MemberMetadata] = array(MemberMetadata)
