"""A group coordinator: the core behind one partition of ``__consumer_offsets``.

The shell has one Coordinator per partition that it leads. It feeds it the partition's records
(``changes.decode``, then ``apply``) and calls ``loaded`` once. From then on requests come in and decisions go
out:

1. ``decision = coordinator.join(...)`` (or any other request, or ``tick``);
2. append ``decision.changes`` as one atomic batch;
3. when that batch and *every earlier one* is committed: ``coordinator.committed(decision)``, then send
   ``decision.response`` and ``decision.replies``. If it cannot be written: ``coordinator.failed(...)``, and
   respond with an error instead.

Careful: step 3 is also needed for decisions without changes. They may reveal state that an earlier decision
changed and that is not committed yet (a follower's SyncGroup right after the leader's), so they wait in the same
queue. ``fetch_offsets``, ``list_groups`` and ``describe_group`` are different: they return plain responses from
committed state only, which may be sent at once.

After ``loaded``, and whenever topics were deleted, the shell calls ``reconcile`` until it is done; the offsets it
removes are already invisible. ``topic_id`` returns the id of the topic with a name in the committed metadata.
During the replay of the log, that must be the metadata as of the beginning of the replay.

``now_ms`` is monotonic and drives sessions and rebalances; ``wall_ms`` is wall time and drives the expiry of
offsets.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any, assert_never

from penstock.decision import Decision
from penstock.groups.changes import (
    Change,
    GroupRemoved,
    GroupStored,
    OffsetCommitted,
    OffsetRemoved,
)
from penstock.groups.classic.answers import join_refused
from penstock.groups.classic.classic_group import Caller, ClassicGroup, Member, State
from penstock.groups.classic.membership import Joining, Membership
from penstock.groups.classic.rebalance import Rebalance
from penstock.groups.commits import COMMIT_KNOWS_MISSING_GROUP, Commits, TopicIds, missing_group_error
from penstock.groups.offsets import OffsetInTransaction, OffsetSettled
from penstock.groups.settings import GroupSettings
from penstock.groups.timers import Timer, TimerKind, Timers
from penstock.groups.turn import Turn, Waiting
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    DeletableGroupResult,
    DescribedGroup,
    DescribedGroupMember,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListedGroup,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponseGroup,
    SyncGroupRequest,
    SyncGroupResponse,
)
from penstock.protocol.messages.transactions import TxnOffsetCommitRequest, TxnOffsetCommitResponse

GROUP_TYPE = "classic"
# Before this version of DescribeGroups, a group that does not exist is reported as Dead.
DESCRIBE_KNOWS_MISSING_GROUP = 6


class Coordinator:
    def __init__(self, settings: GroupSettings, random: Random, topic_id: TopicIds) -> None:
        self._settings = settings
        self._groups: dict[str, ClassicGroup] = {}
        self._timers = Timers()
        self._expiry = Timer(TimerKind.OFFSETS)
        self._rebalance = Rebalance(settings, self._timers)
        self._membership = Membership(self._groups, settings, self._timers, self._rebalance, random)
        self._commits = Commits(settings, topic_id)
        # Producer id -> the groups that may have offsets in its open transaction. A group that does is in here; one
        # whose offsets were removed stays until the transaction ends.
        self._open_groups: dict[int, dict[str, None]] = {}

    # Requests of members

    def join(
        self,
        request: JoinGroupRequest,
        version: int,
        caller: Caller,
        *,
        token: Any,
        now_ms: int,
        wall_ms: int,
    ) -> Decision[Change]:
        turn = Turn(now_ms, wall_ms)
        joining = Joining(request, caller, Waiting(token, version))
        turn.decision.response = self._membership.join(joining, turn)
        return _settle(turn, token)

    def sync(
        self, request: SyncGroupRequest, version: int, *, token: Any, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        turn = Turn(now_ms, wall_ms)
        turn.decision.response = self._membership.sync(request, Waiting(token, version), turn)
        return turn.decision

    def heartbeat(self, request: HeartbeatRequest, *, now_ms: int) -> Decision[Change]:
        return Decision(response=self._membership.heartbeat(request, now_ms))

    def leave(
        self, request: LeaveGroupRequest, version: int, *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        turn = Turn(now_ms, wall_ms)
        turn.decision.response = self._membership.leave(request, version, turn)
        return turn.decision

    # Offsets

    def commit(
        self, request: OffsetCommitRequest, version: int, *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        turn = Turn(now_ms, wall_ms)
        group = self._groups.get(request.group_id)
        member_id, instance_id = request.member_id, request.group_instance_id
        generation = request.generation_id_or_member_epoch
        if group is not None:
            error = group.commit_error(member_id, instance_id, generation, in_transaction=False)
        else:
            error = missing_group_error(request.group_id, generation, len(self._groups))
            if error is ErrorCode.ILLEGAL_GENERATION and version >= COMMIT_KNOWS_MISSING_GROUP:
                error = ErrorCode.GROUP_ID_NOT_FOUND
        if error is not ErrorCode.NONE:
            turn.decision.response = OffsetCommitResponse.for_error(request, version, error)
            return turn.decision
        if group is None:
            # A consumer that assigns its partitions itself: the group only stores offsets.
            group = ClassicGroup(request.group_id)
        else:
            self._membership.commit_received(group, request.member_id, now_ms)
        turn.decision.response = self._commits.commit(group, request, turn)
        if turn.decision.changes:
            self._groups[group.id] = group
        return turn.decision

    def commit_in_transaction(
        self, request: TxnOffsetCommitRequest, version: int, *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        """Commit offsets that become visible when the producer's transaction commits (``end_transaction``).

        The caller has verified that the transaction is open. Unlike a plain commit this is no heartbeat (as in
        Kafka): the sender is a producer, and need not be the member.
        """
        turn = Turn(now_ms, wall_ms)
        group = self._groups.get(request.group_id)
        generation = request.generation_id
        if not request.group_id:
            error = ErrorCode.INVALID_GROUP_ID
        elif group is None:
            error = missing_group_error(request.group_id, generation, len(self._groups))
        else:
            error = group.commit_error(
                request.member_id, request.group_instance_id, generation, in_transaction=True
            )
        if error is not ErrorCode.NONE:
            turn.decision.response = TxnOffsetCommitResponse.for_error(request, version, error)
            return turn.decision
        if group is None:
            group = ClassicGroup(request.group_id)
        turn.decision.response = self._commits.commit_in_transaction(group, request, turn)
        if turn.decision.changes:
            self._groups[group.id] = group
            self._has_open(request.producer_id, group)
        return turn.decision

    def end_transaction(self, producer_id: int, is_commit: bool) -> Decision[OffsetSettled]:
        """A marker ends the transaction of a producer: its offsets become visible, or are dropped.

        The changes have no records: the shell appends the marker. As with any other decision, they take effect
        for readers once that is ``committed``, or not at all if it ``failed``.
        """
        decision: Decision[OffsetSettled] = Decision()
        for group_id in list(self._open_groups.get(producer_id, ())):
            group = self._groups.get(group_id)
            if group is not None:
                decision.changes += self._commits.end_transaction(group, producer_id, is_commit)
            self._forget_open(producer_id, group_id)
        return decision

    def fetch_offsets(
        self, request: OffsetFetchRequestGroup, *, require_stable: bool = False
    ) -> OffsetFetchResponseGroup:
        """The committed offsets of one group; ``offset_answers`` turns them into responses."""
        return self._commits.fetch(self._groups.get(request.group_id), request, require_stable)

    def delete_offsets(self, request: OffsetDeleteRequest, *, now_ms: int, wall_ms: int) -> Decision[Change]:
        turn = Turn(now_ms, wall_ms)
        turn.decision.response = self._commits.delete(self._groups.get(request.group_id), request, turn)
        return turn.decision

    def reconcile(
        self, group_ids: list[str], changes_max: int, *, now_ms: int, wall_ms: int
    ) -> Decision[Change]:
        """Update the offsets of some groups to the topics that exist, after a load or a deletion.

        Finished groups are removed from the end of the list. At most ``changes_max`` offsets are changed, and
        about as many looked at.
        """
        turn = Turn(now_ms, wall_ms)
        looked_at = 0
        while group_ids and looked_at < changes_max:
            group = self._groups.get(group_ids[-1])
            if group is not None:
                looked_at += 1 + group.offsets.count
                if not self._commits.reconcile(group, changes_max, turn):
                    break
            group_ids.pop()
        return turn.decision

    # Administration

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> list[ListedGroup]:
        """Every group that passes the filters. An empty filter passes everything; case is ignored."""
        wanted_states = {state.strip().lower() for state in states}
        wanted_types = {group_type.strip().lower() for group_type in types}
        if wanted_types and GROUP_TYPE not in wanted_types:
            return []
        listed = []
        for group in self._groups.values():
            state = _committed_state(group).value
            if not wanted_states or state.lower() in wanted_states:
                listed.append(
                    ListedGroup(
                        group_id=group.id,
                        protocol_type=group.protocol_type or "",
                        group_state=state,
                        group_type=GROUP_TYPE,
                    )
                )
        return listed

    def describe_group(self, group_id: str, version: int) -> DescribedGroup:
        group = self._groups.get(group_id)
        if group is None:
            described = DescribedGroup(group_id=group_id, group_state=State.DEAD.value)
            if version >= DESCRIBE_KNOWS_MISSING_GROUP:
                described.error_code = ErrorCode.GROUP_ID_NOT_FOUND
                described.error_message = f"Group {group_id} not found."
            return described
        state = _committed_state(group)
        protocol = group.protocol if state is State.STABLE else None
        return DescribedGroup(
            group_id=group_id,
            group_state=state.value,
            protocol_type=group.protocol_type or "",
            protocol_data=protocol or "",
            members=[_described(group, member, protocol) for member in group.members.values()],
        )

    def delete_group(self, group_id: str, *, now_ms: int, wall_ms: int) -> Decision[Change]:
        """Remove an empty group with its offsets. The response is a DeletableGroupResult."""
        turn = Turn(now_ms, wall_ms)
        group = self._groups.get(group_id)
        error = ErrorCode.NONE
        if group is None or group.state is State.DEAD:
            error = ErrorCode.GROUP_ID_NOT_FOUND
        elif group.state is not State.EMPTY:
            error = ErrorCode.NON_EMPTY_GROUP
        else:
            self._bury(group, turn)
        turn.decision.response = DeletableGroupResult(group_id=group_id, error_code=error)
        return turn.decision

    # Time

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call ``tick`` next; changes with every call."""
        return self._timers.next_deadline_ms

    def tick(self, now_ms: int, wall_ms: int, *, may_expire: bool = True) -> Decision[Change]:
        """``may_expire``: whether the wall time is reliable enough to expire offsets."""
        turn = Turn(now_ms, wall_ms)
        for timer in self._timers.due(now_ms):
            match timer.kind:
                case TimerKind.SESSION:
                    self._membership.session_ended(self._groups[timer.group_id], timer.member_id, turn)
                case TimerKind.PENDING:
                    self._membership.pending_ended(self._groups[timer.group_id], timer.member_id, turn)
                case TimerKind.JOIN:
                    self._rebalance.join_time_is_up(self._groups[timer.group_id], turn)
                case TimerKind.SYNC:
                    self._rebalance.sync_time_is_up(self._groups[timer.group_id], turn)
                case TimerKind.OFFSETS:
                    if may_expire:
                        self._expire_offsets(turn)
                    interval_ms = self._settings.offsets_retention_check_interval_ms
                    self._timers.start(self._expiry, now_ms + interval_ms)
                case _:
                    assert_never(timer.kind)
        return turn.decision

    # The log

    def apply(self, change: Change) -> None:
        """Replay a committed change, before ``loaded``."""
        group = self._groups.get(change.group_id)
        if group is None:
            if isinstance(change, OffsetRemoved | GroupRemoved):
                return
            group = self._groups[change.group_id] = ClassicGroup(change.group_id)
        match change:
            case OffsetCommitted():
                self._commits.restored(group, change)
            case OffsetRemoved():
                group.offsets.apply(change)
            case GroupStored():
                group.restore(change)
            case GroupRemoved():
                group.forget_members()
        self._membership.discard_if_blank(group)

    def apply_in_transaction(self, change: Change, producer_id: int, producer_epoch: int) -> None:
        """Replay a committed change of a transactional batch, before ``loaded``."""
        if not isinstance(change, OffsetCommitted):
            # Nothing else is written in transactions. Kafka would apply it at once, too.
            self.apply(change)
            return
        group = self._groups.get(change.group_id)
        if group is None:
            group = self._groups[change.group_id] = ClassicGroup(change.group_id)
        self._commits.restored_in_transaction(group, change, producer_id, producer_epoch)
        self._has_open(producer_id, group)

    def transaction_ended(self, producer_id: int, is_commit: bool) -> None:
        """Replay a marker, before ``loaded``."""
        self.committed(self.end_transaction(producer_id, is_commit))

    def loaded(self, now_ms: int, wall_ms: int) -> None:
        """The log has been replayed. Every member gets a whole session."""
        turn = Turn(now_ms, wall_ms)
        for group in self._groups.values():
            for member in group.members.values():
                self._rebalance.touch(member, now_ms)
            if len(group.members) > self._membership.members_max:
                # The limit was lowered. The last members to rejoin are refused.
                self._rebalance.prepare(group, turn)
        assert not turn.decision.changes and not turn.decision.replies
        self._timers.start(self._expiry, now_ms + self._settings.offsets_retention_check_interval_ms)

    def committed(self, decision: Decision[Change] | Decision[OffsetSettled]) -> None:
        """The changes of a decision are committed. Called in the order of the decisions."""
        for change in decision.changes:
            group = self._groups[change.group_id]
            match change:
                case OffsetCommitted():
                    group.offsets.confirm(_in_transaction(change, decision.producer))
                case OffsetRemoved():
                    group.offsets.confirm(change)
                case OffsetSettled():
                    group.offsets.confirm(change)
                    self._forget_open(change.producer_id, group.id)
                case GroupStored() | GroupRemoved():
                    group.unconfirmed.remove(change)
                    group.confirmed = change if isinstance(change, GroupStored) else None
            if group.state is State.DEAD and not group.unconfirmed and group.offsets.is_empty:
                del self._groups[group.id]
            else:
                self._membership.discard_if_blank(group)

    def failed(self, decision: Decision[Change] | Decision[OffsetSettled], now_ms: int, wall_ms: int) -> None:
        """The changes of a decision are not in the log and never will be. Called in the order of the decisions.

        A generation that could not be stored is given up: its members rebalance, and the next generation is
        stored as a whole.
        """
        turn = Turn(now_ms, wall_ms)
        for change in decision.changes:
            group = self._groups[change.group_id]
            match change:
                case OffsetCommitted():
                    group.offsets.revert(_in_transaction(change, decision.producer))
                case OffsetRemoved() | OffsetSettled():
                    group.offsets.revert(change)
                case GroupStored():
                    group.unconfirmed.remove(change)
                    if group.state is State.STABLE:
                        self._rebalance.give_up(group, turn)
                case GroupRemoved():
                    group.unconfirmed.remove(change)
            if group.state is State.DEAD and not group.is_being_removed:
                group.move_to(State.EMPTY, wall_ms)
            self._membership.discard_if_blank(group)
        assert not turn.decision.changes and not turn.decision.replies

    def all_keys(self) -> list[str]:
        """The groups' ids."""
        return list(self._groups)

    def resign(self) -> Decision[Change]:
        """Stop leading the partition: send waiting members to the next coordinator. Then drop this one."""
        decision: Decision[Change] = Decision()
        for group in self._groups.values():
            for member in group.members.values():
                if (join := group.stop_waiting_for_join(member)) is not None:
                    response = join_refused(ErrorCode.NOT_COORDINATOR, member.id, join.version)
                    decision.replies.append((join.token, response))
                if (sync := member.waiting_sync) is not None:
                    member.waiting_sync = None
                    refused = SyncGroupResponse(error_code=ErrorCode.NOT_COORDINATOR)
                    decision.replies.append((sync.token, refused))
        return decision

    def check(self) -> None:
        """Assert every invariant, in tests and simulation."""
        for group_id, group in self._groups.items():
            assert group.id == group_id
            assert not group.is_blank
            group.check()
            assert all(group_id in self._open_groups[known] for known in group.offsets.producer_ids())
        assert all(self._open_groups.values())
        self._timers.check()

    def _has_open(self, producer_id: int, group: ClassicGroup) -> None:
        self._open_groups.setdefault(producer_id, {})[group.id] = None

    def _forget_open(self, producer_id: int, group_id: str) -> None:
        """Forget that a group may have offsets in a producer's transaction, if it has none."""
        group = self._groups.get(group_id)
        groups = self._open_groups.get(producer_id)
        if groups is not None and (group is None or not group.offsets.knows(producer_id)):
            groups.pop(group_id, None)
            if not groups:
                del self._open_groups[producer_id]

    def _expire_offsets(self, turn: Turn) -> None:
        for group in list(self._groups.values()):
            if group.state is State.DEAD:
                continue
            expired = self._commits.expired(group, turn.wall_ms)
            nothing_left = len(expired) == len(group.offsets.partitions())
            if nothing_left and group.state is State.EMPTY and not group.pending:
                self._bury(group, turn)
            else:
                self._commits.remove(group, expired, turn)

    def _bury(self, group: ClassicGroup, turn: Turn) -> None:
        """Remove an empty group. It stays as Dead until that is committed, and cannot be joined meanwhile."""
        for timer in group.pending.values():
            self._timers.cancel(timer)
        group.pending.clear()
        self._commits.remove(group, group.offsets.partitions(), turn)
        if group.stored is not None:
            removed = GroupRemoved(group.id)
            group.unconfirmed.append(removed)
            turn.decision.changes.append(removed)
        if group.is_blank:
            del self._groups[group.id]
        else:
            group.move_to(State.DEAD, turn.wall_ms)


def _settle(turn: Turn, token: Any) -> Decision[Change]:
    """A reply to the request that is being handled becomes the decision's response."""
    decision = turn.decision
    for position, (waiting_token, response) in enumerate(decision.replies):
        if waiting_token is token:
            decision.response = response
            del decision.replies[position]
            break
    return decision


def _in_transaction(
    change: OffsetCommitted, producer: tuple[int, int] | None
) -> OffsetCommitted | OffsetInTransaction:
    return change if producer is None else OffsetInTransaction(*producer, change)


def _committed_state(group: ClassicGroup) -> State:
    """Readers see a generation as stable once its assignment is committed."""
    return State.COMPLETING if group.state is State.STABLE and group.unconfirmed else group.state


def _described(group: ClassicGroup, member: Member, protocol: str | None) -> DescribedGroupMember:
    return DescribedGroupMember(
        member_id=member.id,
        group_instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        member_metadata=b"" if protocol is None else member.protocols[protocol],
        member_assignment=b"" if group.unconfirmed else member.assignment,
    )
