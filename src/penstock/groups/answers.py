"""The coordinator's answers, and their shapes where they differ between versions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.groups.group import Group, Member
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    OFFSET_FETCH_BATCHED,
    OFFSET_FETCH_TOP_LEVEL_ERROR,
    JoinGroupResponse,
    JoinGroupResponseMember,
    LeaveGroupResponse,
    MemberResponse,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
    SyncGroupResponse,
)

NO_OFFSET = -1
# Before this version of JoinGroup the protocol's name could not be null (and was "" instead).
JOIN_NULLABLE_PROTOCOL = 7
JOIN_SKIPS_ASSIGNMENT = 9
LEAVE_BATCHED = 3


# Join, sync, leave


def join_refused(error: ErrorCode, member_id: str, version: int) -> JoinGroupResponse:
    return JoinGroupResponse(
        error_code=error,
        protocol_name=None if version >= JOIN_NULLABLE_PROTOCOL else "",
        member_id=member_id,
    )


def joined(group: Group, member: Member) -> JoinGroupResponse:
    """The current generation; the leader also hears what everybody can do."""
    is_leader = group.leader == member.id
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol,
        leader=group.leader or "",
        member_id=member.id,
        members=_join_members(group) if is_leader else [],
    )


def static_rejoined(group: Group, member: Member, previous_leader: str, version: int) -> JoinGroupResponse:
    """The unchanged generation, for the new incarnation of a static member of a stable group.

    It must not compute an assignment, which a stable group would ignore. From version 9 on it is told so;
    before, the leader is named by its previous id, so that the leader itself does not recognise itself.
    """
    response = joined(group, member)
    if version >= JOIN_SKIPS_ASSIGNMENT:
        response.skip_assignment = group.leader == member.id
    else:
        response.leader = previous_leader
        response.members = []
    return response


def _join_members(group: Group) -> list[JoinGroupResponseMember]:
    assert group.protocol is not None
    return [
        JoinGroupResponseMember(
            member_id=member.id,
            group_instance_id=member.instance_id,
            metadata=member.protocols[group.protocol],
        )
        for member in group.members.values()
    ]


def synced(group: Group, member: Member) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type, protocol_name=group.protocol, assignment=member.assignment
    )


def left(results: list[MemberResponse], version: int) -> LeaveGroupResponse:
    """One result per member, or, when only one could be named, its error at the top."""
    if version >= LEAVE_BATCHED:
        return LeaveGroupResponse(members=results)
    return LeaveGroupResponse(error_code=results[0].error_code)


# Offsets


def offset_fetch_groups(request: OffsetFetchRequest, version: int) -> list[OffsetFetchRequestGroup]:
    """The groups an OffsetFetch asks for, in the newer shape whatever its version."""
    if version >= OFFSET_FETCH_BATCHED:
        return request.groups
    topics = None
    if request.topics is not None:
        topics = [
            OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
            for topic in request.topics
        ]
    return [OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]


def offset_fetch_response(
    request: OffsetFetchRequest, version: int, groups: Sequence[OffsetFetchResponseGroup]
) -> OffsetFetchResponse:
    """The groups' answers, in the shape of the request's version."""
    if version >= OFFSET_FETCH_BATCHED:
        return OffsetFetchResponse(groups=list(groups))
    (group,) = groups
    if version < OFFSET_FETCH_TOP_LEVEL_ERROR and group.error_code:
        # There is no place for the group's error but beside every partition.
        return OffsetFetchResponse.for_error(request, version, group.error_code)
    topics = [
        OffsetFetchResponseTopic(
            name=topic.name,
            partitions=[
                OffsetFetchResponsePartition(
                    partition_index=partition.partition_index,
                    committed_offset=partition.committed_offset,
                    committed_leader_epoch=partition.committed_leader_epoch,
                    metadata=partition.metadata,
                    error_code=partition.error_code,
                )
                for partition in topic.partitions
            ],
        )
        for topic in group.topics
    ]
    return OffsetFetchResponse(topics=topics, error_code=group.error_code)


def offset_fetched(
    topic: OffsetFetchRequestTopics | str, partitions: list[OffsetFetchResponsePartitions]
) -> OffsetFetchResponseTopics:
    if isinstance(topic, str):
        return OffsetFetchResponseTopics(name=topic, partitions=partitions)
    return OffsetFetchResponseTopics(name=topic.name, topic_id=topic.topic_id, partitions=partitions)


def no_offset(partition: int, error: ErrorCode = ErrorCode.NONE) -> OffsetFetchResponsePartitions:
    """No commit is not an error; and the metadata is empty, not null, which some clients cannot read."""
    return OffsetFetchResponsePartitions(
        partition_index=partition, committed_offset=NO_OFFSET, metadata="", error_code=error
    )
