"""The requests of members: JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

Versions: JoinGroup 0-9, SyncGroup 0-5, Heartbeat 0-4, LeaveGroup 0-5. The checks are in Kafka's order, because
clients act on the first error they get.

Departures from Kafka: a request that is superseded by another of the same member gets a response (Kafka forgets
it, and later requests on the same connection then wait for ever); only its timer ends the first join phase of an
empty group (Kafka also ends it when a member leaves); a static member that comes back to a stable group with
other topics starts a rebalance (Kafka leaves it with the assignment for its old ones).
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple
from uuid import UUID

from penstock.groups.classic.answers import (
    LEAVE_BATCHED,
    join_refused,
    joined,
    left,
    static_rejoined,
    synced,
)
from penstock.groups.classic.classic_group import (
    CONSUMER_PROTOCOL_TYPE,
    Caller,
    ClassicGroup,
    Member,
    State,
    subscribed_topics,
)
from penstock.groups.classic.rebalance import Rebalance
from penstock.groups.settings import (
    CLIENT_ID_LENGTH_MAX,
    GROUPS_MAX,
    MEMBERS_MAX,
    NAME_BYTES_MAX,
    NEW_MEMBER_TIMEOUT_MS,
    PENDING_MEMBERS_MAX,
    GroupSettings,
)
from penstock.groups.timers import Timer, TimerKind, Timers
from penstock.groups.turn import Turn, Waiting
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

# From this version on a client must join with an id that we gave it (KIP-394), so that a retry of the first
# JoinGroup does not leave a dead member behind.
JOIN_REQUIRES_MEMBER_ID = 4


class Joining(NamedTuple):
    """A JoinGroup request and its sender."""

    request: JoinGroupRequest
    caller: Caller
    waiting: Waiting

    @property
    def version(self) -> int:
        return self.waiting.version

    def refused(self, error: ErrorCode) -> JoinGroupResponse:
        return join_refused(error, self.request.member_id, self.version)

    def protocols(self) -> dict[str, bytes]:
        """Metadata by protocol name, in the member's order of preference. The first of equal names wins."""
        protocols: dict[str, bytes] = {}
        for protocol in self.request.protocols:
            protocols.setdefault(protocol.name, protocol.metadata)
        return protocols


class Membership:
    def __init__(
        self,
        groups: dict[str, ClassicGroup],
        settings: GroupSettings,
        timers: Timers,
        rebalance: Rebalance,
        random: Random,
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._timers = timers
        self._rebalance = rebalance
        self._random = random
        self.members_max = min(settings.members_max, MEMBERS_MAX)

    # JoinGroup

    def join(self, joining: Joining, turn: Turn) -> JoinGroupResponse | None:
        """The response, or None if it comes at the end of the join phase."""
        request = joining.request
        error = self._join_error(request)
        if error is not ErrorCode.NONE:
            return joining.refused(error)
        member_id = request.member_id
        group = self._groups.get(request.group_id)
        if group is None:
            if member_id:
                return joining.refused(ErrorCode.UNKNOWN_MEMBER_ID)
            if len(self._groups) >= GROUPS_MAX:
                return joining.refused(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            group = ClassicGroup(request.group_id)
            group.state_timestamp = turn.wall_ms

        if group.state is State.DEAD:
            return joining.refused(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if not self._has_room(group, member_id):
            self._turn_away(group, member_id, turn)
            return join_refused(ErrorCode.GROUP_MAX_SIZE_REACHED, "", joining.version)
        if not group.supports(request.protocol_type, (protocol.name for protocol in request.protocols)):
            return joining.refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)

        self._groups[group.id] = group
        if member_id:
            return self._join_known(group, joining, turn)
        instance_id = request.group_instance_id
        prefix = joining.caller.client_id if instance_id is None else instance_id
        new_id = self._new_member_id(group, prefix)
        if instance_id is None and joining.version >= JOIN_REQUIRES_MEMBER_ID:
            self._hand_out(group, new_id, request.session_timeout_ms, turn)
            return join_refused(ErrorCode.MEMBER_ID_REQUIRED, new_id, joining.version)
        if instance_id in group.static_members:
            return self._replace_static(group, new_id, joining, turn)
        self._add(group, new_id, joining, turn)
        return None

    def _join_error(self, request: JoinGroupRequest) -> ErrorCode:
        """The error in a request that does not depend on the group."""
        settings = self._settings
        if not is_valid_name(request.group_id):
            return ErrorCode.INVALID_GROUP_ID
        timeout_ms = request.session_timeout_ms
        if not settings.session_timeout_ms_min <= timeout_ms <= settings.session_timeout_ms_max:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        if request.group_instance_id is not None and not is_valid_name(request.group_instance_id):
            return ErrorCode.INVALID_REQUEST
        names = [request.protocol_type, *(protocol.name for protocol in request.protocols)]
        if any(len(name.encode()) > NAME_BYTES_MAX for name in names):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.NONE

    def _has_room(self, group: ClassicGroup, member_id: str) -> bool:
        member = group.members.get(member_id)
        if group.state is State.EMPTY:
            return True
        if group.state is State.PREPARING:
            # Count waiting members, not all members: the group may be too large already because the limit was
            # lowered, and then the last to rejoin have to go.
            is_waiting = member is not None and member.waiting_join is not None
            return is_waiting or group.waiting_joins < self.members_max
        return member is not None or len(group.members) < self.members_max

    def _turn_away(self, group: ClassicGroup, member_id: str, turn: Turn) -> None:
        """Stop waiting for a member that the group has no room for."""
        if member_id in group.pending:
            self._timers.cancel(group.pending.pop(member_id))
        elif member_id in group.members:
            self._rebalance.remove(group, group.members[member_id], ErrorCode.GROUP_MAX_SIZE_REACHED, turn)
        self._rebalance.try_complete_join(group, turn)

    def _hand_out(self, group: ClassicGroup, member_id: str, session_timeout_ms: int, turn: Turn) -> None:
        """Note an id as sent out: a member with it should join soon."""
        if len(group.pending) >= PENDING_MEMBERS_MAX:
            self._timers.cancel(group.pending.pop(next(iter(group.pending))))
        timer = Timer(TimerKind.PENDING, group.id, member_id)
        group.pending[member_id] = timer
        self._timers.start(timer, turn.now_ms + session_timeout_ms)

    def _add(self, group: ClassicGroup, member_id: str, joining: Joining, turn: Turn) -> None:
        request = joining.request
        member = Member(group.id, member_id, request.group_instance_id, joining.caller)
        member.is_new = True
        member.protocols = joining.protocols()
        _set_timeouts(member, joining)
        group.add(member, request.protocol_type)
        group.wait_for_join(member, joining.waiting)
        if group.initial_deadline_ms is not None:
            group.new_member_added = True
        self._timers.start(member.session, turn.now_ms + NEW_MEMBER_TIMEOUT_MS)
        self._prepare_or_complete(group, turn)

    def _join_known(self, group: ClassicGroup, joining: Joining, turn: Turn) -> JoinGroupResponse | None:
        member_id = joining.request.member_id
        instance_id = joining.request.group_instance_id
        if member_id in group.pending and instance_id is None:
            self._timers.cancel(group.pending.pop(member_id))
            self._add(group, member_id, joining, turn)
            return None
        error = group.member_error(member_id, instance_id)
        if error is not ErrorCode.NONE:
            return joining.refused(error)

        member = group.members[member_id]
        unchanged = list(member.protocols.items()) == list(joining.protocols().items())
        if group.state is State.COMPLETING and unchanged:
            # The member did not get our response.
            return joined(group, member)
        if group.state is State.STABLE and unchanged and group.leader != member_id:
            return joined(group, member)
        # A leader of a stable group joins again when it sees a change that only it can see: new partitions.
        self._update(group, member, joining, turn)
        self._prepare_or_complete(group, turn)
        return None

    def _update(self, group: ClassicGroup, member: Member, joining: Joining, turn: Turn) -> None:
        group.set_protocols(member, joining.protocols())
        _set_timeouts(member, joining)
        overtaken = group.stop_waiting_for_join(member)
        if overtaken is not None:
            response = join_refused(ErrorCode.REBALANCE_IN_PROGRESS, member.id, overtaken.version)
            turn.answer(overtaken, response)
        group.wait_for_join(member, joining.waiting)

    def _replace_static(
        self, group: ClassicGroup, new_id: str, joining: Joining, turn: Turn
    ) -> JoinGroupResponse | None:
        """Handle a static member that is back with a new id. The old id is fenced (KIP-345)."""
        previous = group.members[group.static_members[joining.request.group_instance_id or ""]]
        fenced = group.stop_waiting_for_join(previous)
        if fenced is not None:
            response = join_refused(ErrorCode.FENCED_INSTANCE_ID, previous.id, fenced.version)
            turn.answer(fenced, response)
        if previous.waiting_sync is not None:
            turn.answer(previous.waiting_sync, SyncGroupResponse(error_code=ErrorCode.FENCED_INSTANCE_ID))
            previous.waiting_sync = None
        self._timers.cancel(previous.session)
        previous_leader = group.leader
        assert previous_leader is not None
        member = group.replace_static(previous, new_id, joining.caller)
        self._rebalance.touch(member, turn.now_ms)

        if group.state is State.STABLE:
            before = member.protocols
            group.set_protocols(member, joining.protocols())
            if group.select_protocol() == group.protocol and not _changes_topics(group, member, before):
                _set_timeouts(member, joining)
                self._rebalance.touch(member, turn.now_ms)
                group.store(turn.decision)
                return static_rejoined(group, member, previous_leader, joining.version)
        # The leader that computes an assignment knows the old id only, so the new one would get nothing: start
        # the rebalance again (KAFKA-9801).
        self._update(group, member, joining, turn)
        self._prepare_or_complete(group, turn)
        return None

    def _prepare_or_complete(self, group: ClassicGroup, turn: Turn) -> None:
        if group.state is State.PREPARING:
            self._rebalance.try_complete_join(group, turn)
        else:
            self._rebalance.prepare(group, turn)

    def _new_member_id(self, group: ClassicGroup, prefix: str) -> str:
        while True:
            unique = UUID(int=self._random.getrandbits(128), version=4)
            member_id = f"{prefix[:CLIENT_ID_LENGTH_MAX]}-{unique}"
            # Only a simulated generator, restarted from the same seed, could repeat an id.
            if member_id not in group.members and member_id not in group.pending:
                return member_id

    # SyncGroup

    def sync(self, request: SyncGroupRequest, waiting: Waiting, turn: Turn) -> SyncGroupResponse | None:
        """The member's assignment, or None if it comes with the leader's request."""
        if not is_valid_name(request.group_id):
            return SyncGroupResponse(error_code=ErrorCode.INVALID_GROUP_ID)
        group = self._groups.get(request.group_id)
        error = _sync_error(group, request)
        if group is None or error is not ErrorCode.NONE:
            return SyncGroupResponse(error_code=error)

        member = group.members[request.member_id]
        self._rebalance.mark_synced(group, member)
        if group.state is State.STABLE:
            return synced(group, member)
        if member.waiting_sync is not None:
            overtaken = SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
            turn.answer(member.waiting_sync, overtaken)
            member.waiting_sync = None
        if member.id != group.leader:
            member.waiting_sync = waiting
            return None
        assignments = {entry.member_id: entry.assignment for entry in request.assignments}
        self._rebalance.assign(group, assignments, turn)
        self._rebalance.touch(member, turn.now_ms)
        return synced(group, member)

    # Heartbeat

    def heartbeat(self, request: HeartbeatRequest, now_ms: int) -> HeartbeatResponse:
        group = self._groups.get(request.group_id)
        if group is None:
            known = is_valid_name(request.group_id)
            error = ErrorCode.UNKNOWN_MEMBER_ID if known else ErrorCode.INVALID_GROUP_ID
            return HeartbeatResponse(error_code=error)
        error = group.member_error(request.member_id, request.group_instance_id)
        if error is ErrorCode.NONE:
            if request.generation_id != group.generation:
                error = ErrorCode.ILLEGAL_GENERATION
            else:
                self._rebalance.touch(group.members[request.member_id], now_ms)
                if group.state is State.PREPARING:
                    error = ErrorCode.REBALANCE_IN_PROGRESS
        return HeartbeatResponse(error_code=error)

    # OffsetCommit

    def commit_received(self, group: ClassicGroup, member_id: str, now_ms: int) -> None:
        """A commit counts as a heartbeat."""
        if group.state in (State.STABLE, State.PREPARING):
            self._rebalance.touch(group.members[member_id], now_ms)

    # LeaveGroup

    def leave(self, request: LeaveGroupRequest, version: int, turn: Turn) -> LeaveGroupResponse:
        if not is_valid_name(request.group_id):
            return LeaveGroupResponse(error_code=ErrorCode.INVALID_GROUP_ID)
        group = self._groups.get(request.group_id)
        members_before = 0 if group is None else len(group.members)
        leaving = request.members
        if version < LEAVE_BATCHED:
            leaving = [MemberIdentity(member_id=request.member_id)]
        results = []
        for identity in leaving:
            error = ErrorCode.UNKNOWN_MEMBER_ID if group is None else self._leave(group, identity, turn)
            results.append(
                MemberResponse(
                    member_id=identity.member_id,
                    group_instance_id=identity.group_instance_id,
                    error_code=error,
                )
            )
        if group is not None:
            if len(group.members) < members_before:
                self._rebalance.member_gone(group, turn)
            else:
                self._rebalance.try_complete_join(group, turn)
            self.discard_if_blank(group)
        return left(results, version)

    def _leave(self, group: ClassicGroup, identity: MemberIdentity, turn: Turn) -> ErrorCode:
        member_id = identity.member_id
        if not member_id:
            # An administrator removes a static member by its instance id alone.
            member_id = group.static_members.get(identity.group_instance_id or "", "")
        elif member_id in group.pending:
            self._timers.cancel(group.pending.pop(member_id))
            return ErrorCode.NONE
        error = group.member_error(member_id, identity.group_instance_id)
        if error is ErrorCode.NONE:
            self._rebalance.remove(group, group.members[member_id], ErrorCode.UNKNOWN_MEMBER_ID, turn)
        return error

    # Timers

    def session_ended(self, group: ClassicGroup, member_id: str, turn: Turn) -> None:
        member = group.members[member_id]
        if not member.is_excused:
            self._rebalance.remove(group, member, ErrorCode.UNKNOWN_MEMBER_ID, turn)
            self._rebalance.member_gone(group, turn)

    def pending_ended(self, group: ClassicGroup, member_id: str, turn: Turn) -> None:
        del group.pending[member_id]
        self._rebalance.try_complete_join(group, turn)
        self.discard_if_blank(group)

    def discard_if_blank(self, group: ClassicGroup) -> None:
        """Remove a group that has no state worth keeping."""
        if group.is_blank:
            self._groups.pop(group.id, None)


def is_valid_name(name: str) -> bool:
    return 0 < len(name) <= NAME_BYTES_MAX and len(name.encode()) <= NAME_BYTES_MAX


def _sync_error(group: ClassicGroup | None, request: SyncGroupRequest) -> ErrorCode:
    if group is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    error = group.member_error(request.member_id, request.group_instance_id)
    if error is not ErrorCode.NONE:
        return error
    if request.generation_id != group.generation:
        return ErrorCode.ILLEGAL_GENERATION
    # Both are null before version 5 (KIP-559).
    if request.protocol_type not in (None, group.protocol_type):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if group.protocol is not None and request.protocol_name not in (None, group.protocol):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if group.state is State.PREPARING:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def _set_timeouts(member: Member, joining: Joining) -> None:
    request = joining.request
    member.session_timeout_ms = request.session_timeout_ms
    # Version 0 has no rebalance timeout. Negative values mean 0: do not wait.
    timeout_ms = request.session_timeout_ms if joining.version == 0 else request.rebalance_timeout_ms
    member.rebalance_timeout_ms = max(timeout_ms, 0)


def _changes_topics(group: ClassicGroup, member: Member, before: dict[str, bytes]) -> bool:
    """Whether a static member came back with other topics than it left with.

    The bytes of the subscription differ at every restart (they contain the partitions it owns), so only the
    topics can be compared. If they cannot be read, they count as unchanged.
    """
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE or group.protocol is None:
        return False
    return subscribed_topics(before[group.protocol]) != subscribed_topics(member.protocols[group.protocol])
