"""Consumer groups: finding the coordinator, membership, committed offsets, and the tools' view of groups.

Two APIs changed their layout and have both here: FindCoordinator (one ``key`` up to version 3,
``coordinator_keys`` from 4 on) and OffsetFetch (one group in ``topics`` up to 7, ``groups`` from 8 on). The
structs with a plural name, such as ``OffsetFetchRequestTopics``, are Kafka's own names for the newer layout.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.messages import OPERATIONS_OMITTED
from penstock.protocol.schema import (
    Message,
    Response,
    array,
    binary,
    boolean,
    int8,
    int16,
    int32,
    int64,
    string,
    uuid,
)

FIND_BATCHED = 4
OFFSET_FETCH_TOP_LEVEL_ERROR = 2
OFFSET_FETCH_BATCHED = 8


class FindCoordinatorRequest(Message, key=10, versions="0-6", flexible="3+"):
    key: str = string("0-3")
    # 0: a group; 1: a transactional id; 2: a share group's partition.
    key_type: int = int8("1+")
    coordinator_keys: list[str] = array(string, "4+")


class Coordinator(Message):
    key: str = string()
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class FindCoordinatorResponse(Response, key=10, versions="0-6", flexible="3+"):
    throttle_time_ms: int = int32("1+")
    error_code: int = int16("0-3")
    error_message: str | None = string("1-3", nullable=True)
    node_id: int = int32("0-3")
    host: str = string("0-3")
    port: int = int32("0-3")
    coordinators: list[Coordinator] = array(Coordinator, "4+")

    @classmethod
    def for_error(
        cls, request: FindCoordinatorRequest, version: int, error: int, message: str | None = None
    ) -> FindCoordinatorResponse:
        nobody: dict[str, Any] = {
            "node_id": -1,
            "host": "",
            "port": -1,
            "error_code": error,
            "error_message": message,
        }
        if version < FIND_BATCHED:
            return cls(**nobody)
        return cls(coordinators=[Coordinator(key=key, **nobody) for key in request.coordinator_keys])


class JoinGroupRequestProtocol(Message):
    name: str = string()
    metadata: bytes = binary()


class JoinGroupRequest(Message, key=11, versions="0-9", flexible="6+"):
    group_id: str = string()
    session_timeout_ms: int = int32()
    rebalance_timeout_ms: int = int32("1+", default=-1)
    member_id: str = string()
    group_instance_id: str | None = string("5+", nullable=True, default=None)
    protocol_type: str = string()
    protocols: list[JoinGroupRequestProtocol] = array(JoinGroupRequestProtocol)
    reason: str | None = string("8+", nullable=True, default=None)


class JoinGroupResponseMember(Message):
    member_id: str = string()
    group_instance_id: str | None = string("5+", nullable=True, default=None)
    metadata: bytes = binary()


class JoinGroupResponse(Response, key=11, versions="0-9", flexible="6+"):
    throttle_time_ms: int = int32("2+")
    error_code: int = int16()
    generation_id: int = int32(default=-1)
    protocol_type: str | None = string("7+", nullable=True, default=None)
    # Before version 7 None is encoded as "".
    protocol_name: str | None = string(nullable="7+")
    leader: str = string()
    # The leader must not assign: it is a static member that rejoined a stable group (KIP-814).
    skip_assignment: bool = boolean("9+")
    member_id: str = string()
    members: list[JoinGroupResponseMember] = array(JoinGroupResponseMember)

    @classmethod
    def for_error(
        cls, request: JoinGroupRequest, version: int, error: int, message: str | None = None
    ) -> JoinGroupResponse:
        return cls(error_code=error, protocol_name=None, member_id=request.member_id)


class SyncGroupRequestAssignment(Message):
    member_id: str = string()
    assignment: bytes = binary()


class SyncGroupRequest(Message, key=14, versions="0-5", flexible="4+"):
    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable=True, default=None)
    protocol_type: str | None = string("5+", nullable=True, default=None)
    protocol_name: str | None = string("5+", nullable=True, default=None)
    assignments: list[SyncGroupRequestAssignment] = array(SyncGroupRequestAssignment)


class SyncGroupResponse(Response, key=14, versions="0-5", flexible="4+"):
    throttle_time_ms: int = int32("1+")
    error_code: int = int16()
    protocol_type: str | None = string("5+", nullable=True, default=None)
    protocol_name: str | None = string("5+", nullable=True, default=None)
    assignment: bytes = binary()


class HeartbeatRequest(Message, key=12, versions="0-4", flexible="4+"):
    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable=True, default=None)


class HeartbeatResponse(Response, key=12, versions="0-4", flexible="4+"):
    throttle_time_ms: int = int32("1+")
    error_code: int = int16()


class MemberIdentity(Message):
    member_id: str = string()
    group_instance_id: str | None = string(nullable=True, default=None)
    reason: str | None = string("5+", nullable=True, default=None)


class LeaveGroupRequest(Message, key=13, versions="0-5", flexible="4+"):
    group_id: str = string()
    member_id: str = string("0-2")
    members: list[MemberIdentity] = array(MemberIdentity, "3+")


class MemberResponse(Message):
    member_id: str = string()
    group_instance_id: str | None = string(nullable=True)
    error_code: int = int16()


class LeaveGroupResponse(Response, key=13, versions="0-5", flexible="4+"):
    throttle_time_ms: int = int32("1+")
    error_code: int = int16()
    members: list[MemberResponse] = array(MemberResponse, "3+")


class OffsetCommitRequestPartition(Message):
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32("6+", default=-1)
    committed_metadata: str | None = string(nullable=True)


class OffsetCommitRequestTopic(Message):
    name: str = string("0-9")
    topic_id: bytes = uuid("10+")
    partitions: list[OffsetCommitRequestPartition] = array(OffsetCommitRequestPartition)


class OffsetCommitRequest(Message, key=8, versions="2-10", flexible="8+"):
    group_id: str = string()
    # The generation in the classic protocol, the member epoch in KIP-848's.
    generation_id_or_member_epoch: int = int32(default=-1)
    member_id: str = string()
    group_instance_id: str | None = string("7+", nullable=True, default=None)
    retention_time_ms: int = int64("0-4", default=-1)
    topics: list[OffsetCommitRequestTopic] = array(OffsetCommitRequestTopic)


class OffsetCommitResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()


class OffsetCommitResponseTopic(Message):
    name: str = string("0-9")
    topic_id: bytes = uuid("10+")
    partitions: list[OffsetCommitResponsePartition] = array(OffsetCommitResponsePartition)


class OffsetCommitResponse(Response, key=8, versions="2-10", flexible="8+"):
    throttle_time_ms: int = int32("3+")
    topics: list[OffsetCommitResponseTopic] = array(OffsetCommitResponseTopic)

    @classmethod
    def for_error(
        cls, request: OffsetCommitRequest, version: int, error: int, message: str | None = None
    ) -> OffsetCommitResponse:
        return cls(
            topics=[
                OffsetCommitResponseTopic(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partitions=[
                        OffsetCommitResponsePartition(
                            partition_index=partition.partition_index, error_code=error
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )


class OffsetFetchRequestTopic(Message):
    name: str = string()
    partition_indexes: list[int] = array(int32)


class OffsetFetchRequestTopics(Message):
    name: str = string("8-9")
    topic_id: bytes = uuid("10+")
    partition_indexes: list[int] = array(int32)


class OffsetFetchRequestGroup(Message):
    group_id: str = string()
    member_id: str | None = string("9+", nullable=True, default=None)
    member_epoch: int = int32("9+", default=-1)
    topics: list[OffsetFetchRequestTopics] | None = array(OffsetFetchRequestTopics, nullable=True)


class OffsetFetchRequest(Message, key=9, versions="1-10", flexible="6+"):
    group_id: str = string("0-7")
    topics: list[OffsetFetchRequestTopic] | None = array(OffsetFetchRequestTopic, "0-7", nullable="2-7")
    groups: list[OffsetFetchRequestGroup] = array(OffsetFetchRequestGroup, "8+")
    require_stable: bool = boolean("7+")


class OffsetFetchResponsePartition(Message):
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32("5-7", default=-1)
    metadata: str | None = string(nullable=True)
    error_code: int = int16()


class OffsetFetchResponseTopic(Message):
    name: str = string()
    partitions: list[OffsetFetchResponsePartition] = array(OffsetFetchResponsePartition)


class OffsetFetchResponsePartitions(Message):
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(default=-1)
    metadata: str | None = string(nullable=True)
    error_code: int = int16()


class OffsetFetchResponseTopics(Message):
    name: str = string("8-9")
    topic_id: bytes = uuid("10+")
    partitions: list[OffsetFetchResponsePartitions] = array(OffsetFetchResponsePartitions)


class OffsetFetchResponseGroup(Message):
    group_id: str = string()
    topics: list[OffsetFetchResponseTopics] = array(OffsetFetchResponseTopics)
    error_code: int = int16()


class OffsetFetchResponse(Response, key=9, versions="1-10", flexible="6+"):
    throttle_time_ms: int = int32("3+")
    topics: list[OffsetFetchResponseTopic] = array(OffsetFetchResponseTopic, "0-7")
    error_code: int = int16("2-7")
    groups: list[OffsetFetchResponseGroup] = array(OffsetFetchResponseGroup, "8+")

    @classmethod
    def for_error(
        cls, request: OffsetFetchRequest, version: int, error: int, message: str | None = None
    ) -> OffsetFetchResponse:
        if version >= OFFSET_FETCH_BATCHED:
            groups = [
                OffsetFetchResponseGroup(group_id=group.group_id, error_code=error)
                for group in request.groups
            ]
            return cls(groups=groups)
        if version >= OFFSET_FETCH_TOP_LEVEL_ERROR:
            return cls(error_code=error)
        return cls(
            topics=[
                OffsetFetchResponseTopic(
                    name=topic.name,
                    partitions=[
                        OffsetFetchResponsePartition(
                            partition_index=index, committed_offset=-1, metadata="", error_code=error
                        )
                        for index in topic.partition_indexes
                    ],
                )
                for topic in request.topics or []
            ]
        )


class OffsetDeleteRequestPartition(Message):
    partition_index: int = int32()


class OffsetDeleteRequestTopic(Message):
    name: str = string()
    partitions: list[OffsetDeleteRequestPartition] = array(OffsetDeleteRequestPartition)


class OffsetDeleteRequest(Message, key=47, versions="0"):
    group_id: str = string()
    topics: list[OffsetDeleteRequestTopic] = array(OffsetDeleteRequestTopic)


class OffsetDeleteResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()


class OffsetDeleteResponseTopic(Message):
    name: str = string()
    partitions: list[OffsetDeleteResponsePartition] = array(OffsetDeleteResponsePartition)


class OffsetDeleteResponse(Response, key=47, versions="0"):
    error_code: int = int16()
    throttle_time_ms: int = int32()
    topics: list[OffsetDeleteResponseTopic] = array(OffsetDeleteResponseTopic)


class ListGroupsRequest(Message, key=16, versions="0-5", flexible="3+"):
    states_filter: list[str] = array(string, "4+")
    types_filter: list[str] = array(string, "5+")


class ListedGroup(Message):
    group_id: str = string()
    protocol_type: str = string()
    group_state: str = string("4+")
    group_type: str = string("5+")


class ListGroupsResponse(Response, key=16, versions="0-5", flexible="3+"):
    throttle_time_ms: int = int32("1+")
    error_code: int = int16()
    groups: list[ListedGroup] = array(ListedGroup)


class DescribeGroupsRequest(Message, key=15, versions="0-6", flexible="5+"):
    groups: list[str] = array(string)
    include_authorized_operations: bool = boolean("3+")


class DescribedGroupMember(Message):
    member_id: str = string()
    group_instance_id: str | None = string("4+", nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    member_metadata: bytes = binary()
    member_assignment: bytes = binary()


class DescribedGroup(Message):
    error_code: int = int16()
    error_message: str | None = string("6+", nullable=True, default=None)
    group_id: str = string()
    group_state: str = string()
    protocol_type: str = string()
    protocol_data: str = string()
    members: list[DescribedGroupMember] = array(DescribedGroupMember)
    authorized_operations: int = int32("3+", default=OPERATIONS_OMITTED)


class DescribeGroupsResponse(Response, key=15, versions="0-6", flexible="5+"):
    throttle_time_ms: int = int32("1+")
    groups: list[DescribedGroup] = array(DescribedGroup)

    @classmethod
    def for_error(
        cls, request: DescribeGroupsRequest, version: int, error: int, message: str | None = None
    ) -> DescribeGroupsResponse:
        return cls(
            groups=[
                DescribedGroup(group_id=name, error_code=error, error_message=message)
                for name in request.groups
            ]
        )


class DeleteGroupsRequest(Message, key=42, versions="0-2", flexible="2+"):
    groups_names: list[str] = array(string)


class DeletableGroupResult(Message):
    group_id: str = string()
    error_code: int = int16()


class DeleteGroupsResponse(Response, key=42, versions="0-2", flexible="2+"):
    throttle_time_ms: int = int32()
    results: list[DeletableGroupResult] = array(DeletableGroupResult)

    @classmethod
    def for_error(
        cls, request: DeleteGroupsRequest, version: int, error: int, message: str | None = None
    ) -> DeleteGroupsResponse:
        results = [DeletableGroupResult(group_id=name, error_code=error) for name in request.groups_names]
        return cls(results=results)
