"""Responses to members, whose format depends on the version."""

from __future__ import annotations

from penstock.groups.classic.classic_group import ClassicGroup, Member
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    JoinGroupResponse,
    JoinGroupResponseMember,
    LeaveGroupResponse,
    MemberResponse,
    SyncGroupResponse,
)

# Before this version of JoinGroup the protocol name was "" instead of null.
JOIN_NULLABLE_PROTOCOL = 7
JOIN_SKIPS_ASSIGNMENT = 9
LEAVE_BATCHED = 3


def join_refused(error: ErrorCode, member_id: str, version: int) -> JoinGroupResponse:
    return JoinGroupResponse(
        error_code=error,
        protocol_name=None if version >= JOIN_NULLABLE_PROTOCOL else "",
        member_id=member_id,
    )


def joined(group: ClassicGroup, member: Member) -> JoinGroupResponse:
    """The current generation; the leader also gets the metadata of all members."""
    is_leader = group.leader == member.id
    return JoinGroupResponse(
        generation_id=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol,
        leader=group.leader or "",
        member_id=member.id,
        members=_join_members(group) if is_leader else [],
    )


def static_rejoined(
    group: ClassicGroup, member: Member, previous_leader: str, version: int
) -> JoinGroupResponse:
    """The unchanged generation, for the new incarnation of a static member of a stable group.

    It must not compute an assignment, because a stable group would ignore it. From version 9 on the response says
    so; before, it contains the leader's previous id, so that the leader does not recognise itself.
    """
    response = joined(group, member)
    if version >= JOIN_SKIPS_ASSIGNMENT:
        response.skip_assignment = group.leader == member.id
    else:
        response.leader = previous_leader
        response.members = []
    return response


def _join_members(group: ClassicGroup) -> list[JoinGroupResponseMember]:
    assert group.protocol is not None
    return [
        JoinGroupResponseMember(
            member_id=member.id,
            group_instance_id=member.instance_id,
            metadata=member.protocols[group.protocol],
        )
        for member in group.members.values()
    ]


def synced(group: ClassicGroup, member: Member) -> SyncGroupResponse:
    return SyncGroupResponse(
        protocol_type=group.protocol_type, protocol_name=group.protocol, assignment=member.assignment
    )


def left(results: list[MemberResponse], version: int) -> LeaveGroupResponse:
    """One result per member; in versions that name only one member, its error at the top."""
    if version >= LEAVE_BATCHED:
        return LeaveGroupResponse(members=results)
    return LeaveGroupResponse(error_code=results[0].error_code)
