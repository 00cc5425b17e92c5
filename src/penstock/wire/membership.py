"""One member of a classic consumer group, without sockets and clocks.

    OUT         not in a generation; the next request is JoinGroup
    JOINING     JoinGroup is in flight; the coordinator answers when all members have joined
    ASSIGNING   this member leads, and needs the number of partitions of ``unknown_topics``
    SYNCING     SyncGroup is to be sent, or in flight
    STABLE      heartbeats
    RELEASING   as STABLE, but the caller has to give partitions up before the member joins again
    LEAVING     LeaveGroup is to be sent, or in flight
    LEFT        never left again
    FAILED      refused for good; ``error`` says why

The shell sends ``next_request``, at most one at a time, and reports ``answered`` or ``unanswered``. It takes
``events`` in order and calls ``released`` when the caller has given up the partitions of a ``Revoked``.

An eager member gives up everything before it joins again. A cooperative one (all its assignors are cooperative)
keeps what it has, hears after the rebalance what to give up, and joins again when it has done so. Partitions are
``Lost`` without being asked when the group has gone on without this member; others may have them already, and
commits would be refused. The member also believes that when it has heard nothing for the time of its session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from penstock.model import TopicPartition
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.messages.groups import (
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    MemberIdentity,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.schema import Message
from penstock.wire.assignors import (
    ASSIGNORS,
    COOPERATIVE_STICKY,
    Subscriber,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
    withheld,
)
from penstock.wire.errors import BUSY, COORDINATOR_MOVED, BrokerRefused, WireError, words_of
from penstock.wire.transactions import NO_MEMBER, GroupMember

CONSUMER = "consumer"
# After an error that passes.
RETRY_MS = 100


class State(Enum):
    OUT = auto()
    JOINING = auto()
    ASSIGNING = auto()
    SYNCING = auto()
    STABLE = auto()
    RELEASING = auto()
    LEAVING = auto()
    LEFT = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Assigned:
    """The member has these now, besides what it has kept."""

    partitions: list[TopicPartition]


@dataclass(frozen=True, slots=True)
class Revoked:
    """Finish with these, commit, and call ``released``."""

    partitions: list[TopicPartition]


@dataclass(frozen=True, slots=True)
class Lost:
    """Others may have these already."""

    partitions: list[TopicPartition]


Event: TypeAlias = Assigned | Revoked | Lost


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    assignors: tuple[str, ...] = ("range",)
    instance_id: str | None = None
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 60_000
    heartbeat_interval_ms: int = 3_000

    def __post_init__(self) -> None:
        unknown = [name for name in self.assignors if name not in ASSIGNORS]
        if unknown or not self.assignors:
            raise ValueError(f"no assignor {', '.join(unknown)}; there are {', '.join(ASSIGNORS)}")

    @property
    def is_cooperative(self) -> bool:
        return all(name == COOPERATIVE_STICKY for name in self.assignors)


class Membership:
    def __init__(self, group: str, topics: Iterable[str], settings: MembershipSettings) -> None:
        self.group = group
        self.topics = sorted(set(topics))
        self.settings = settings
        self.state = State.OUT
        self.error: WireError | None = None
        self.member_id = ""
        self.generation = -1
        # What the caller may work on. While RELEASING it includes what is being given up.
        self.owned: list[TopicPartition] = []
        self._releasing: list[TopicPartition] = []
        # In the last generation; sticky assignors ask for it.
        self._previous: list[TopicPartition] = []
        self._previous_generation = -1
        self.events: list[Event] = []
        # The coordinator has to be looked up again.
        self.has_moved = False

        # Of the leader, in this generation.
        self.is_leader = False
        self._assignor = ""
        self._members: list[Subscriber] = []
        self.counts: dict[str, int] = {}
        self._assignments: dict[str, bytes] = {}

        self._in_flight: Message | None = None
        self._sent_ms = 0
        self._not_before_ms = 0
        self._next_heartbeat_ms = 0
        # When the coordinator last accepted a request, as of its sending.
        self._heard_ms = 0

    @property
    def member(self) -> GroupMember:
        """What to commit as."""
        if self.generation < 0:
            return NO_MEMBER
        return GroupMember(self.generation, self.member_id, self.settings.instance_id)

    @property
    def unknown_topics(self) -> list[str] | None:
        """The topics whose number of partitions ``assign`` needs; None if it is not to be called."""
        return self.led_topics if self.state is State.ASSIGNING else None

    @property
    def led_topics(self) -> list[str]:
        """The topics of all members, if this one leads."""
        return sorted({topic for member in self._members for topic in member.topics})

    @property
    def in_flight(self) -> Message | None:
        return self._in_flight

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    # What the caller wants

    def rejoin(self) -> None:
        """Begin another generation, because topics have changed."""
        if self.state is State.STABLE:
            self._rejoin()

    def leave(self) -> None:
        """Give up everything and leave; a static member only falls silent, and may come back (KIP-345)."""
        if self.state in (State.LEAVING, State.LEFT, State.FAILED):
            return
        self.state = State.LEAVING
        self._releasing = []
        if self.owned:
            self._release(self.owned)

    def released(self) -> None:
        """The caller has given up the partitions of the last ``Revoked``."""
        if not self._releasing:
            return
        self.owned = [at for at in self.owned if at not in self._releasing]
        self._releasing = []
        if self.state is State.RELEASING:
            self.state = State.OUT

    def assign(self, counts: Mapping[str, int]) -> None:
        """Assign the partitions; ``counts`` has those of ``unknown_topics`` that exist."""
        assert self.state is State.ASSIGNING
        self.counts = dict(counts)
        assigned = ASSIGNORS[self._assignor](self._members, counts)
        if self._assignor == COOPERATIVE_STICKY:
            assigned = withheld(assigned, self._members)
        self._assignments = {member: encode_assignment(places) for member, places in assigned.items()}
        self.state = State.SYNCING

    # Requests

    def next_request(self, now_ms: int) -> Message | None:
        """The request to send now, if there is one. Its outcome has to be reported."""
        if self._in_flight is not None or now_ms < self._not_before_ms:
            return None
        request = self._request(now_ms)
        if request is not None:
            self._in_flight, self._sent_ms = request, now_ms
        return request

    def answered(self, response: Any, now_ms: int) -> None:
        request, self._in_flight = self._in_flight, None
        code = response.error_code
        if code in COORDINATOR_MOVED:
            self.has_moved = True
        if code != ErrorCode.NONE and (code in COORDINATOR_MOVED or code in BUSY):
            self._retry(now_ms)
            return
        match request:
            case JoinGroupRequest():
                self._joined(response, now_ms)
            case SyncGroupRequest():
                self._synced(response, now_ms)
            case HeartbeatRequest():
                self._beaten(code, now_ms)
            case LeaveGroupRequest():
                self.state = State.LEFT
            case _:
                raise AssertionError("nothing was asked")

    def unanswered(self, now_ms: int) -> None:
        """The request failed, or was taken back. It may have been done."""
        self._in_flight = None
        self.has_moved = True
        self._retry(now_ms)

    def tick(self, now_ms: int) -> None:
        if self.owned and now_ms >= self._session_ends_ms():
            self._lose()
            if self.state in (State.STABLE, State.RELEASING):
                self.state = State.OUT

    def due_ms(self) -> int | None:
        """When to call ``tick`` and ``next_request`` if nothing happens before."""
        times = []
        if self.owned:
            times.append(self._session_ends_ms())
        if self._in_flight is None:
            if self.state in (State.STABLE, State.RELEASING):
                times.append(max(self._next_heartbeat_ms, self._not_before_ms))
            elif self.state in (State.OUT, State.SYNCING, State.LEAVING):
                times.append(self._not_before_ms)
        return min(times, default=None)

    def check(self) -> None:
        """Assert the invariants that hold between two steps."""
        assert set(self._releasing) <= set(self.owned)
        if self.state in (State.ASSIGNING, State.SYNCING, State.STABLE, State.RELEASING):
            assert self.member_id and self.generation >= 0
        if self.state is State.RELEASING:
            assert self._releasing
        if self.state in (State.LEFT, State.FAILED):
            assert not self.owned
        if not self.settings.is_cooperative and self.state in (
            State.OUT,
            State.JOINING,
            State.ASSIGNING,
            State.SYNCING,
        ):
            assert not self.owned, "an eager member joins with nothing"
        assert (self.error is not None) == (self.state is State.FAILED)
        assert (self.state is State.JOINING) <= isinstance(self._in_flight, JoinGroupRequest)

    # Private

    def _request(self, now_ms: int) -> Message | None:
        identity = {"group_id": self.group, "member_id": self.member_id}
        instance_id = self.settings.instance_id
        match self.state:
            case State.OUT:
                self.state = State.JOINING
                return JoinGroupRequest(
                    **identity,
                    session_timeout_ms=self.settings.session_timeout_ms,
                    rebalance_timeout_ms=self.settings.rebalance_timeout_ms,
                    group_instance_id=instance_id,
                    protocol_type=CONSUMER,
                    protocols=[
                        JoinGroupRequestProtocol(name=name, metadata=self._subscription(name))
                        for name in self.settings.assignors
                    ],
                )
            case State.SYNCING:
                return SyncGroupRequest(
                    **identity,
                    generation_id=self.generation,
                    group_instance_id=instance_id,
                    protocol_type=CONSUMER,
                    protocol_name=self._assignor,
                    assignments=[
                        SyncGroupRequestAssignment(member_id=member, assignment=assignment)
                        for member, assignment in self._assignments.items()
                    ],
                )
            case State.STABLE | State.RELEASING if now_ms >= self._next_heartbeat_ms:
                return HeartbeatRequest(
                    **identity, generation_id=self.generation, group_instance_id=instance_id
                )
            case State.LEAVING if not self._releasing:
                if not self.member_id or instance_id is not None:
                    self.state = State.LEFT
                    return None
                return LeaveGroupRequest(**identity, members=[MemberIdentity(member_id=self.member_id)])
        return None

    def _subscription(self, assignor: str) -> bytes:
        owned = self.owned if self.settings.is_cooperative else self._previous
        return encode_subscription(self.topics, assignor, owned, self._previous_generation)

    def _joined(self, response: Any, now_ms: int) -> None:
        if self.state is not State.JOINING:
            # It is leaving, and needs its id for that.
            self.member_id = response.member_id or self.member_id
            return
        self.state = State.OUT
        code = response.error_code
        if code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
        elif code == ErrorCode.REBALANCE_IN_PROGRESS:
            self._retry(now_ms)
        elif code != ErrorCode.NONE:
            self._refused(code, now_ms)
        else:
            self.member_id, self.generation = response.member_id, response.generation_id
            self._heard_ms = now_ms
            self._assignor = response.protocol_name or ""
            self._members, self._assignments, self.counts = [], {}, {}
            self.is_leader = response.leader == response.member_id
            self.state = State.SYNCING
            if self.is_leader and not response.skip_assignment:
                self._lead(response.members)

    def _lead(self, members: Sequence[Any]) -> None:
        try:
            self._members = [
                decode_subscription(each.member_id, each.group_instance_id, each.metadata, self._assignor)
                for each in members
            ]
        except DecodeError as error:
            self._fail(WireError(f"cannot lead group {self.group}: {error}"))
            return
        self.state = State.ASSIGNING

    def _synced(self, response: Any, now_ms: int) -> None:
        if self.state is not State.SYNCING:
            return
        if response.error_code != ErrorCode.NONE:
            self.state = State.OUT
            if response.error_code != ErrorCode.REBALANCE_IN_PROGRESS:
                self._refused(response.error_code, now_ms)
            return
        try:
            assigned = decode_assignment(response.assignment)
        except DecodeError as error:
            self._fail(WireError(f"the leader of group {self.group} sent {error}"))
            return
        self._heard_ms = self._sent_ms
        self._next_heartbeat_ms = now_ms + self.settings.heartbeat_interval_ms
        self._previous, self._previous_generation = assigned, self.generation
        kept = set(self.owned)
        added = [at for at in assigned if at not in kept]
        wanted = set(assigned)
        surplus = [at for at in self.owned if at not in wanted]
        self.state = State.STABLE
        if surplus:
            # Another member waits for these, in the next generation.
            self._release(surplus)
            self.state = State.RELEASING
        self.owned = self.owned + added
        self.events.append(Assigned(added))

    def _beaten(self, code: int, now_ms: int) -> None:
        self._next_heartbeat_ms = now_ms + self.settings.heartbeat_interval_ms
        if code in (ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS):
            self._heard_ms = max(self._heard_ms, self._sent_ms)
            if code != ErrorCode.NONE and self.state is State.STABLE:
                self._rejoin()
        elif self.state in (State.STABLE, State.RELEASING, State.LEAVING):
            is_leaving = self.state is State.LEAVING
            self.state = State.OUT
            self._refused(code, now_ms)
            if is_leaving:
                self.state = State.LEAVING
                self.error = None

    def _refused(self, code: int, now_ms: int) -> None:
        """A code that ends this membership, or this generation of it."""
        if code == ErrorCode.UNKNOWN_MEMBER_ID:
            self.member_id = ""
            self._lose()
        elif code == ErrorCode.ILLEGAL_GENERATION:
            self._lose()
        else:
            self._lose()
            words = f"group {self.group} refuses this member: {words_of(code)}"
            self._fail(BrokerRefused(words, code))

    def _retry(self, now_ms: int) -> None:
        """The same again, after a while. A generation that ended meanwhile is noticed then."""
        self._not_before_ms = now_ms + RETRY_MS
        if self.state is State.JOINING:
            self.state = State.OUT

    def _rejoin(self) -> None:
        if self.owned and not self.settings.is_cooperative:
            self._release(self.owned)
            self.state = State.RELEASING
        else:
            self.state = State.OUT

    def _release(self, partitions: Sequence[TopicPartition]) -> None:
        self._releasing = list(partitions)
        self.events.append(Revoked(list(partitions)))

    def _lose(self) -> None:
        lost, self.owned, self._releasing = self.owned, [], []
        self.generation = -1
        # Somebody else's by now: a sticky assignor must not count on it.
        self._previous, self._previous_generation = [], -1
        if lost:
            self.events.append(Lost(lost))

    def _fail(self, error: WireError) -> None:
        self._lose()
        self.error = error
        self.state = State.FAILED

    def _session_ends_ms(self) -> int:
        ends_ms = self._heard_ms + self.settings.session_timeout_ms
        if self.state in (State.STABLE, State.RELEASING, State.LEAVING):
            return ends_ms
        # A cooperative member that joins again is waited for that much longer.
        return ends_ms + self.settings.rebalance_timeout_ms
