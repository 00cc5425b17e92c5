"""A group of the classic protocol: its members, their protocols, and its state.

Theory of operation. Members assign the partitions among themselves; the coordinator only brings them together, in
two phases. In the *join* phase every member sends the protocols (assignors) it supports; when all have joined,
the generation goes up and one member, the leader, gets the metadata of all members. In the *sync* phase the
leader sends an assignment for each member, and each member gets its own. A member that disappears, joins again or
changes its subscription starts this over.

    Empty               -> PreparingRebalance   a member joins
    PreparingRebalance  -> CompletingRebalance  all members have joined, or the time is up
    PreparingRebalance  -> Empty                ... and no member is left
    CompletingRebalance -> Stable               the leader's assignment arrives
    CompletingRebalance -> PreparingRebalance   a member comes, changes, leaves or fails
    Stable              -> PreparingRebalance   the same
    Empty               -> Dead                 deleted or expired; Dead lasts until that is committed
    Dead                -> Empty                ... or could not be committed

This file holds the state and keeps it consistent; ``rebalance.py`` decides when to move. ``pending`` are member
ids that were sent out but not used yet; they delay the end of a join phase. ``unsynced`` are members of this
generation that have not sent SyncGroup; they are removed at the end of the sync phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from penstock.decision import Decision
from penstock.groups.changes import (
    NO_TIMESTAMP,
    Change,
    GroupRemoved,
    GroupStored,
    OffsetCommitted,
    StoredMember,
)
from penstock.groups.group import Group
from penstock.groups.timers import Timer, TimerKind
from penstock.groups.turn import Waiting
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.messages.consumer_protocol import ConsumerProtocolSubscription
from penstock.protocol.schema import decoder

CONSUMER_PROTOCOL_TYPE = "consumer"


class State(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


TRANSITIONS = {
    State.EMPTY: {State.PREPARING, State.DEAD},
    State.PREPARING: {State.COMPLETING, State.EMPTY},
    State.COMPLETING: {State.STABLE, State.PREPARING},
    State.STABLE: {State.PREPARING},
    State.DEAD: {State.EMPTY},
}


class Caller(NamedTuple):
    """The sender of a request. The host is shown to users as it is given here."""

    client_id: str
    host: str


class Member:
    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "id",
        "instance_id",
        "is_new",
        "protocols",
        "rebalance_timeout_ms",
        "session",
        "session_timeout_ms",
        "waiting_join",
        "waiting_sync",
    )

    def __init__(self, group_id: str, member_id: str, instance_id: str | None, caller: Caller) -> None:
        self.id = member_id
        self.instance_id = instance_id
        self.client_id = caller.client_id
        self.client_host = caller.host
        self.rebalance_timeout_ms = 0
        self.session_timeout_ms = 0
        # Metadata by protocol name, in order of preference.
        self.protocols: dict[str, bytes] = {}
        self.assignment = b""
        # True until its first generation; see NEW_MEMBER_TIMEOUT_MS.
        self.is_new = False
        # Set only by the group, which counts waiting members.
        self.waiting_join: Waiting | None = None
        self.waiting_sync: Waiting | None = None
        # Armed, unless the member waits for our response and so cannot send heartbeats.
        self.session = Timer(TimerKind.SESSION, group_id, member_id)

    @property
    def is_static(self) -> bool:
        return self.instance_id is not None

    @property
    def is_excused(self) -> bool:
        """Whether it cannot send heartbeats because it waits for us. New members: see NEW_MEMBER_TIMEOUT_MS."""
        return not self.is_new and (self.waiting_join is not None or self.waiting_sync is not None)


class ClassicGroup(Group):
    __slots__ = (
        "confirmed",
        "generation",
        "initial_deadline_ms",
        "join_timer",
        "leader",
        "members",
        "new_member_added",
        "pending",
        "protocol",
        "protocol_counts",
        "protocol_type",
        "state",
        "state_timestamp",
        "static_members",
        "subscribed_topics",
        "sync_timer",
        "unconfirmed",
        "unsynced",
        "waiting_joins",
    )

    def __init__(self, group_id: str) -> None:
        super().__init__(group_id)
        self.state = State.EMPTY
        # Wall time of the last change of state; NO_TIMESTAMP if unknown.
        self.state_timestamp = NO_TIMESTAMP
        # Never decreases while the group exists.
        self.generation = 0
        # None when the group never had a member: it only stores offsets.
        self.protocol_type: str | None = None
        # The protocol of this generation. Set in Completing and Stable, None in Empty.
        self.protocol: str | None = None
        # A key of members; None when there are none.
        self.leader: str | None = None
        # None when unknown: no consumers, or subscriptions we cannot read.
        self.subscribed_topics: frozenset[str] | None = None

        self.members: dict[str, Member] = {}
        # Member id by instance id (KIP-345).
        self.static_members: dict[str, str] = {}
        # Number of members that support a protocol; never 0.
        self.protocol_counts: dict[str, int] = {}
        # Ids sent with MEMBER_ID_REQUIRED, oldest first. Disjoint from members.
        self.pending: dict[str, Timer] = {}

        # State of the join phase.
        self.waiting_joins = 0
        self.join_timer = Timer(TimerKind.JOIN, group_id)
        # The latest end of the first join phase of a group that was empty; None in other join phases.
        self.initial_deadline_ms: int | None = None
        self.new_member_added = False

        # State of the sync phase, in the order of members (a dict, because the order of a set is not repeatable).
        self.unsynced: dict[str, None] = {}
        self.sync_timer = Timer(TimerKind.SYNC, group_id)

        # The committed record of this group in the log (not its offsets).
        self.confirmed: GroupStored | None = None
        # Decided changes of that record that are not confirmed, in order.
        self.unconfirmed: list[GroupStored | GroupRemoved] = []

    @property
    def stored(self) -> GroupStored | None:
        """The group's record at the end of the log (not its offsets): the last whole generation."""
        if not self.unconfirmed:
            return self.confirmed
        change = self.unconfirmed[-1]
        return change if isinstance(change, GroupStored) else None

    @property
    def is_blank(self) -> bool:
        """Whether the group has no state worth keeping."""
        return (
            self.state is State.EMPTY
            and not self.pending
            and self.confirmed is None
            and not self.unconfirmed
            and self.offsets.is_empty
        )

    @property
    def is_being_removed(self) -> bool:
        """Whether nothing of the group is left once every decision is committed."""
        is_undecided = self.unconfirmed or self.offsets.has_pending
        return bool(is_undecided) and self.stored is None and self.offsets.will_be_empty

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    @property
    def everybody_joined(self) -> bool:
        return len(self.members) == self.waiting_joins and not self.pending

    def move_to(self, state: State, wall_ms: int) -> None:
        assert state in TRANSITIONS[self.state], f"group {self.id!r} cannot go from {self.state} to {state}"
        self.state = state
        self.state_timestamp = wall_ms

    # Members

    def member_error(self, member_id: str, instance_id: str | None) -> ErrorCode:
        """The error if a request does not come from this member. Nearly every request is checked with it first."""
        if instance_id is not None:
            owner = self.static_members.get(instance_id)
            if owner is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if owner != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def supports(self, protocol_type: str, protocols: Iterable[str]) -> bool:
        """Whether a member with these protocols could join: all members must support one of them."""
        if self.state is State.EMPTY:
            return bool(protocol_type) and any(True for _ in protocols)
        count = len(self.members)
        return protocol_type == self.protocol_type and any(
            self.protocol_counts.get(name, 0) == count for name in protocols
        )

    def add(self, member: Member, protocol_type: str) -> None:
        assert member.id not in self.members
        if not self.members:
            self.protocol_type = protocol_type
        assert protocol_type == self.protocol_type
        if member.instance_id is not None:
            assert member.instance_id not in self.static_members
            self.static_members[member.instance_id] = member.id
        self.members[member.id] = member
        self._count_protocols(member, 1)
        if self.leader is None:
            self.leader = member.id

    def remove(self, member_id: str) -> Member:
        """Remove a member. Its waiting requests must have been answered."""
        member = self.members.pop(member_id)
        assert member.waiting_join is None and member.waiting_sync is None
        self._count_protocols(member, -1)
        if member.instance_id is not None:
            del self.static_members[member.instance_id]
        self.unsynced.pop(member_id, None)
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        return member

    def replace_static(self, old: Member, member_id: str, caller: Caller) -> Member:
        """Replace a static member by its new incarnation (KIP-345). The old one's requests have been answered."""
        assert old.instance_id is not None and self.static_members[old.instance_id] == old.id
        new = Member(self.id, member_id, old.instance_id, caller)
        new.rebalance_timeout_ms = old.rebalance_timeout_ms
        new.session_timeout_ms = old.session_timeout_ms
        new.protocols = old.protocols
        new.assignment = old.assignment
        was_leader = self.leader == old.id
        was_unsynced = old.id in self.unsynced
        self.remove(old.id)
        assert self.protocol_type is not None
        self.add(new, self.protocol_type)
        if was_leader:
            self.leader = member_id
        if was_unsynced:
            self.unsynced[member_id] = None
        return new

    def set_protocols(self, member: Member, protocols: dict[str, bytes]) -> None:
        self._count_protocols(member, -1)
        member.protocols = protocols
        self._count_protocols(member, 1)

    def wait_for_join(self, member: Member, waiting: Waiting) -> None:
        assert member.waiting_join is None
        member.waiting_join = waiting
        self.waiting_joins += 1

    def stop_waiting_for_join(self, member: Member) -> Waiting | None:
        waiting = member.waiting_join
        if waiting is not None:
            member.waiting_join = None
            self.waiting_joins -= 1
        return waiting

    # Generations

    def elect_joined_leader(self) -> bool:
        """Keep the leader if it has joined, or choose a member that has; False if no member has joined."""
        if self.leader is None:
            return False
        if self.members[self.leader].waiting_join is None:
            joined = next((member.id for member in self.members.values() if member.waiting_join), None)
            if joined is None:
                return False
            self.leader = joined
        return True

    def select_protocol(self) -> str:
        """Each member votes for the first of its protocols that all members support; the most votes win.

        In a tie, the protocol that was voted for first wins.
        """
        count = len(self.members)
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = next(name for name in member.protocols if self.protocol_counts[name] == count)
            votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def start_generation(self, wall_ms: int) -> None:
        self.generation += 1
        self.unsynced.clear()
        self.initial_deadline_ms = None
        self.new_member_added = False
        if self.members:
            self.protocol = self.select_protocol()
            self.move_to(State.COMPLETING, wall_ms)
        else:
            self.protocol = None
            self.move_to(State.EMPTY, wall_ms)
        self.subscribed_topics = self.read_subscriptions()

    def subscribes_to(self, topic: str) -> bool:
        if self.subscribed_topics is None:
            return self.protocol_type == CONSUMER_PROTOCOL_TYPE
        return topic in self.subscribed_topics

    def read_subscriptions(self) -> frozenset[str] | None:
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            assert self.protocol is not None
            subscribed = subscribed_topics(member.protocols[self.protocol])
            if subscribed is None:
                return None
            topics |= subscribed
        return frozenset(topics)

    # Offsets

    def commit_error(
        self, member_id: str, instance_id: str | None, generation: int, *, in_transaction: bool
    ) -> ErrorCode:
        if self.state is State.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if self.state is State.EMPTY and generation < 0:
            # An administrator, or a consumer that assigns its partitions itself.
            return ErrorCode.NONE
        if generation < 0 and not member_id and instance_id is None:
            # Transactional producers before KIP-447 do not say for which member they commit.
            return ErrorCode.NONE if in_transaction else ErrorCode.UNKNOWN_MEMBER_ID
        error = self.member_error(member_id, instance_id)
        if error is ErrorCode.NONE and generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        if error is ErrorCode.NONE and self.state is State.COMPLETING and not in_transaction:
            # The member knows the new generation but not its assignment, so it cannot commit for it. (In a
            # transaction it may, as in Kafka: the transaction's records would otherwise have to be aborted.)
            return ErrorCode.REBALANCE_IN_PROGRESS
        return error

    def offset_delete_error(self) -> ErrorCode:
        if self.state is State.DEAD:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if self.state is not State.EMPTY and self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            # There are members, and their subscriptions are unknown.
            return ErrorCode.NON_EMPTY_GROUP
        return ErrorCode.NONE

    def unused_since(self, offset: OffsetCommitted) -> int | None:
        if self.protocol_type is None:
            return offset.commit_timestamp
        if self.state is State.EMPTY:
            # Old records of Kafka do not contain when the group became empty; then the commit counts.
            return max(offset.commit_timestamp, self.state_timestamp)
        if self.state is State.STABLE and self.subscribed_topics is not None:
            return offset.commit_timestamp
        return None

    # The log

    def store(self, decision: Decision[Change]) -> None:
        """Add a change with the present state of the group."""
        change = self.to_stored()
        self.unconfirmed.append(change)
        decision.changes.append(change)

    def to_stored(self) -> GroupStored:
        members = tuple(
            StoredMember(
                member.id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.session_timeout_ms,
                member.protocols[self.protocol] if self.protocol is not None else b"",
                member.assignment,
            )
            for member in self.members.values()
        )
        return GroupStored(
            self.id,
            self.protocol_type or "",
            self.generation,
            self.protocol,
            self.leader,
            self.state_timestamp,
            members,
        )

    def restore(self, change: GroupStored) -> None:
        """Take over the state of a change. The sessions are armed at the end of the replay."""
        self.forget_members()
        self.generation = change.generation
        self.protocol_type = change.protocol_type or None
        self.protocol = change.protocol
        self.state_timestamp = change.state_timestamp
        self.confirmed = change
        for stored in change.members:
            caller = Caller(stored.client_id, stored.client_host)
            member = Member(self.id, stored.member_id, stored.instance_id, caller)
            member.rebalance_timeout_ms = stored.rebalance_timeout_ms
            member.session_timeout_ms = stored.session_timeout_ms
            member.protocols = {change.protocol or "": stored.subscription}
            member.assignment = stored.assignment
            self.add(member, change.protocol_type)
        if self.members:
            self.state = State.STABLE
            self.protocol = change.protocol or ""
            if change.leader in self.members:
                self.leader = change.leader
        self.subscribed_topics = self.read_subscriptions()

    def forget_members(self) -> None:
        """Become a group that only has offsets. No member may be waiting and no timer running."""
        assert self.waiting_joins == 0 and not self.join_timer.is_armed and not self.sync_timer.is_armed
        self.members.clear()
        self.static_members.clear()
        self.protocol_counts.clear()
        self.unsynced.clear()
        self.leader = self.protocol = self.protocol_type = None
        self.subscribed_topics = None
        self.generation = 0
        self.state = State.EMPTY
        # Compaction may have removed what was stored of the group: it must leave no trace.
        self.state_timestamp = NO_TIMESTAMP
        self.confirmed = None

    def check(self) -> None:
        """Assert the invariants between two calls of the coordinator."""
        members = self.members
        assert all(member.id == member_id for member_id, member in members.items())
        owners = {member.instance_id: member.id for member in members.values() if member.is_static}
        assert owners == self.static_members
        assert not members.keys() & self.pending.keys()
        assert self.unsynced.keys() <= members.keys()
        assert (self.leader in members) if members else self.leader is None

        counts: dict[str, int] = {}
        for member in members.values():
            for name in member.protocols:
                counts[name] = counts.get(name, 0) + 1
        assert counts == self.protocol_counts
        assert self.waiting_joins == sum(member.waiting_join is not None for member in members.values())

        for member in members.values():
            assert member.session.is_armed or member.is_excused, f"{member.id} would never expire"
            assert member.waiting_join is None or self.state is State.PREPARING
            assert member.waiting_sync is None or self.state is State.COMPLETING
            assert member.waiting_sync is None or member.id not in self.unsynced
        assert all(timer.is_armed for timer in self.pending.values())
        assert self.join_timer.is_armed == (self.state is State.PREPARING)
        assert self.sync_timer.is_armed or not self.unsynced
        assert self.initial_deadline_ms is None or self.state is State.PREPARING

        if self.state in (State.COMPLETING, State.STABLE):
            assert members and self.protocol_counts.get(self.protocol or "") == len(members)
        elif self.state in (State.EMPTY, State.DEAD):
            assert not members and self.protocol is None
        self.offsets.check()

    def _count_protocols(self, member: Member, by: int) -> None:
        counts = self.protocol_counts
        for name in member.protocols:
            count = counts.get(name, 0) + by
            if count:
                counts[name] = count
            else:
                del counts[name]


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """The topics in a consumer's metadata; None if it is not of the consumer protocol.

    Every version starts with the fields of version 0, so we need not know the newest version.
    """
    try:
        subscription = decoder(ConsumerProtocolSubscription, 0)(memoryview(metadata), 2)[0]
    except DecodeError:
        return None
    return frozenset(subscription.topics)
