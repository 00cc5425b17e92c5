"""A coordinator to talk to: the smallest shell there can be, with a clock that only tests move.

Every decision is committed at once unless ``hold`` is set, every answer is encoded in the version it was
asked in (an answer that cannot be sent is no answer), and every invariant is checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from penstock.decision import Decision
from penstock.groups.changes import Change, decode, encode
from penstock.groups.classic.classic_group import Caller
from penstock.groups.coordinator import Coordinator
from penstock.groups.offset_answers import offset_fetch_groups, offset_fetch_response
from penstock.groups.offsets import OffsetSettled
from penstock.groups.settings import GroupSettings
from penstock.protocol import schema
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.consumer_protocol import ConsumerProtocolSubscription
from penstock.protocol.messages.groups import (
    DescribedGroup,
    DescribeGroupsResponse,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    ListedGroup,
    ListGroupsResponse,
    MemberIdentity,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.messages.transactions import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

GROUP = "readers"
SESSION_MS = 10_000
REBALANCE_MS = 60_000
DELAY_MS = 3_000
WALL_MS = 1_700_000_000_000
DAY_MS = 24 * 3600 * 1000


def subscription(*topics: str, user_data: bytes | None = None) -> bytes:
    """What a consumer sends as its metadata."""
    message = ConsumerProtocolSubscription(topics=list(topics), user_data=user_data)
    return (0).to_bytes(2, "big") + schema.encode(message, 0)


ORDERS = subscription("orders")


@dataclass
class Asked:
    """A request that was made, and its answer once there is one."""

    version: int
    answers: list[Any] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return not self.answers

    @property
    def answer(self) -> Any:
        assert self.answers, "not answered yet"
        return self.answers[0]

    @property
    def error(self) -> ErrorCode:
        return ErrorCode(self.answer.error_code)

    def take(self, response: Any) -> None:
        assert not self.answers, f"answered twice: {self.answers[0]} and then {response}"
        schema.encode(response, self.version)
        self.answers.append(response)


def topic_id(name: str, incarnation: int = 1) -> bytes:
    return f"{incarnation}{name}".encode().ljust(16, b".")[:16]


class InTransaction(NamedTuple):
    """A change in a transactional batch, as the log has it."""

    change: Change
    producer_id: int
    producer_epoch: int


class Ended(NamedTuple):
    """The marker of a transaction, as the log has it."""

    producer_id: int
    is_commit: bool


Logged: TypeAlias = Change | InTransaction | Ended


def replay(coordinator: Coordinator, log: Iterable[Logged]) -> None:
    """As the shell does it, in the bytes of the log."""
    for logged in log:
        match logged:
            case InTransaction():
                change = decode(*encode(logged.change))
                assert change == logged.change
                coordinator.apply_in_transaction(change, logged.producer_id, logged.producer_epoch)
            case Ended():
                coordinator.transaction_ended(*logged)
            case _:
                change = decode(*encode(logged))
                assert change == logged
                coordinator.apply(change)


def logged_by(decision: Decision[Change] | Decision[OffsetSettled], marker: Ended | None) -> list[Logged]:
    """What the shell appends for a decision."""
    if marker is not None:
        return [marker]
    log: list[Logged] = []
    for change in decision.changes:
        assert not isinstance(change, OffsetSettled)
        log.append(change if decision.producer is None else InTransaction(change, *decision.producer))
    return log


class Conversation:
    def __init__(
        self,
        settings: GroupSettings | None = None,
        log: Sequence[Logged] = (),
        topics: Mapping[str, bytes | None] = {},
    ) -> None:
        self.settings = settings or GroupSettings()
        # Topics that were deleted (None) or made again. All others were always there.
        self.topics = dict(topics)
        self.coordinator = Coordinator(self.settings, random.Random(1), self._topic_id)
        self.now_ms = 1_000_000
        # Wall time is a clock of its own.
        self.wall_ms = WALL_MS
        # What was appended and committed, in order.
        self.log: list[Logged] = []
        # Decisions wait for ``commit_all`` or ``fail_all`` instead of being committed at once.
        self.hold = False
        self.held: list[tuple[Decision[Any], Asked | None, Ended | None]] = []
        replay(self.coordinator, log)
        self.log.extend(log)
        self.coordinator.loaded(self.now_ms, self.wall_ms)
        self.coordinator.check()

    def _topic_id(self, name: str) -> bytes | None:
        return self.topics.get(name, topic_id(name))

    # Time

    def sleep(self, milliseconds: int) -> None:
        """Let time pass, waking the coordinator whenever it asked for it."""
        target = self.now_ms + milliseconds
        while (deadline := self.coordinator.next_deadline_ms) is not None and deadline <= target:
            self._advance(max(deadline, self.now_ms))
            self._take(self.coordinator.tick(self.now_ms, self.wall_ms), None)
        self._advance(target)

    def stall(self, milliseconds: int) -> None:
        """Let time pass without the coordinator hearing of it."""
        self._advance(self.now_ms + milliseconds)

    def _advance(self, now_ms: int) -> None:
        self.wall_ms += now_ms - self.now_ms
        self.now_ms = now_ms

    # Requests

    def join(
        self,
        member_id: str = "",
        *,
        group: str = GROUP,
        version: int = 9,
        instance: str | None = None,
        protocol_type: str = "consumer",
        protocols: Mapping[str, bytes] | Sequence[tuple[str, bytes]] = (("range", ORDERS),),
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        client: str = "client",
    ) -> Asked:
        pairs = list(protocols.items()) if isinstance(protocols, Mapping) else list(protocols)
        request = JoinGroupRequest(
            group_id=group,
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=protocol_type,
            protocols=[JoinGroupRequestProtocol(name=name, metadata=metadata) for name, metadata in pairs],
        )
        asked = Asked(version)
        caller = Caller(client, "/127.0.0.1")
        decision = self.coordinator.join(
            request, version, caller, token=asked, now_ms=self.now_ms, wall_ms=self.wall_ms
        )
        return self._take(decision, asked)

    def join_new(self, **options: Any) -> Asked:
        """Join as a client of today does: ask for an id, then come back with it."""
        handed_out = self.join(**options)
        assert handed_out.error is ErrorCode.MEMBER_ID_REQUIRED
        return self.join(handed_out.answer.member_id, **options)

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: Mapping[str, bytes] | None = None,
        *,
        group: str = GROUP,
        version: int = 5,
        instance: str | None = None,
        protocol_type: str | None = None,
        protocol_name: str | None = None,
    ) -> Asked:
        request = SyncGroupRequest(
            group_id=group,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=protocol_type,
            protocol_name=protocol_name,
            assignments=[
                SyncGroupRequestAssignment(member_id=name, assignment=assignment)
                for name, assignment in (assignments or {}).items()
            ],
        )
        asked = Asked(version)
        decision = self.coordinator.sync(
            request, version, token=asked, now_ms=self.now_ms, wall_ms=self.wall_ms
        )
        return self._take(decision, asked)

    def heartbeat(
        self, member_id: str, generation: int, *, group: str = GROUP, instance: str | None = None
    ) -> ErrorCode:
        request = HeartbeatRequest(
            group_id=group, generation_id=generation, member_id=member_id, group_instance_id=instance
        )
        return self._take(self.coordinator.heartbeat(request, now_ms=self.now_ms), Asked(4)).error

    def leave(self, *members: str | MemberIdentity, group: str = GROUP, version: int = 5) -> Asked:
        identities = [MemberIdentity(member_id=m) if isinstance(m, str) else m for m in members]
        request = LeaveGroupRequest(
            group_id=group, member_id=identities[0].member_id if identities else "", members=identities
        )
        decision = self.coordinator.leave(request, version, now_ms=self.now_ms, wall_ms=self.wall_ms)
        return self._take(decision, Asked(version))

    def commit(
        self,
        offsets: Mapping[tuple[str, int], int],
        *,
        group: str = GROUP,
        member_id: str = "",
        generation: int = -1,
        instance: str | None = None,
        version: int = 9,
        metadata: str | None = "",
        leader_epoch: int = -1,
        retention_ms: int = -1,
    ) -> list[ErrorCode]:
        """Commit, and return the errors of the partitions."""
        topics: dict[str, list[OffsetCommitRequestPartition]] = {}
        for (topic, partition), offset in offsets.items():
            topics.setdefault(topic, []).append(
                OffsetCommitRequestPartition(
                    partition_index=partition,
                    committed_offset=offset,
                    committed_leader_epoch=leader_epoch,
                    committed_metadata=metadata,
                )
            )
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member_id,
            group_instance_id=instance,
            retention_time_ms=retention_ms,
            topics=[OffsetCommitRequestTopic(name=name, partitions=parts) for name, parts in topics.items()],
        )
        decision = self.coordinator.commit(request, version, now_ms=self.now_ms, wall_ms=self.wall_ms)
        response = decision.response
        self._take(decision, Asked(version))
        return [ErrorCode(part.error_code) for topic in response.topics for part in topic.partitions]

    def commit_in_transaction(
        self,
        producer_id: int,
        offsets: Mapping[tuple[str, int], int],
        *,
        epoch: int = 0,
        group: str = GROUP,
        member_id: str = "",
        generation: int = -1,
        instance: str | None = None,
        version: int = 5,
        metadata: str | None = "",
    ) -> list[ErrorCode]:
        """Commit in the producer's transaction, and return the errors of the partitions."""
        topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
        for (topic, partition), offset in offsets.items():
            topics.setdefault(topic, []).append(
                TxnOffsetCommitRequestPartition(
                    partition_index=partition, committed_offset=offset, committed_metadata=metadata
                )
            )
        request = TxnOffsetCommitRequest(
            transactional_id="mover",
            group_id=group,
            producer_id=producer_id,
            producer_epoch=epoch,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=instance,
            topics=[
                TxnOffsetCommitRequestTopic(name=name, partitions=parts) for name, parts in topics.items()
            ],
        )
        decision = self.coordinator.commit_in_transaction(
            request, version, now_ms=self.now_ms, wall_ms=self.wall_ms
        )
        response = decision.response
        self._take(decision, Asked(version))
        return [ErrorCode(part.error_code) for topic in response.topics for part in topic.partitions]

    def end_transaction(self, producer_id: int, *, commit: bool) -> None:
        decision = self.coordinator.end_transaction(producer_id, commit)
        self._take(decision, None, Ended(producer_id, commit))

    def fetch(
        self, *partitions: tuple[str, int], group: str = GROUP, stable: bool = False
    ) -> dict[tuple[str, int], Any]:
        """The committed offsets, by partition; of all partitions when none is named."""
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            topics.setdefault(topic, []).append(partition)
        wanted = [OffsetFetchRequestTopics(name=name, partition_indexes=i) for name, i in topics.items()]
        asked = OffsetFetchRequestGroup(group_id=group, topics=wanted if partitions else None)
        request = OffsetFetchRequest(groups=[asked], require_stable=stable)
        answers = [
            self.coordinator.fetch_offsets(part, require_stable=stable)
            for part in offset_fetch_groups(request, 9)
        ]
        schema.encode(offset_fetch_response(request, 9, answers), 9)
        return {
            (topic.name, part.partition_index): part
            for topic in answers[0].topics
            for part in topic.partitions
        }

    def offsets(self, group: str = GROUP) -> dict[tuple[str, int], int]:
        return {name: part.committed_offset for name, part in self.fetch(group=group).items()}

    def delete_offsets(self, *partitions: tuple[str, int], group: str = GROUP) -> Asked:
        request = OffsetDeleteRequest(
            group_id=group,
            topics=[
                OffsetDeleteRequestTopic(
                    name=topic, partitions=[OffsetDeleteRequestPartition(partition_index=partition)]
                )
                for topic, partition in partitions
            ],
        )
        decision = self.coordinator.delete_offsets(request, now_ms=self.now_ms, wall_ms=self.wall_ms)
        return self._take(decision, Asked(0))

    def delete_group(self, group: str = GROUP) -> ErrorCode:
        decision = self.coordinator.delete_group(group, now_ms=self.now_ms, wall_ms=self.wall_ms)
        error = ErrorCode(decision.response.error_code)
        decision.response = None
        self._take(decision, None)
        return error

    def delete_topics(self, *topics: str) -> None:
        self.topics.update(dict.fromkeys(topics))
        self.reconcile()

    def reconcile(self, changes_max: int = 1_000) -> int:
        """Let it act on the topics that there are; in how many decisions."""
        unreconciled = self.coordinator.all_keys()
        count = 0
        while unreconciled:
            decision = self.coordinator.reconcile(
                unreconciled, changes_max, now_ms=self.now_ms, wall_ms=self.wall_ms
            )
            assert len(decision.changes) <= changes_max
            self._take(decision, None)
            count += 1
        return count

    def describe(self, group: str = GROUP, version: int = 6) -> DescribedGroup:
        described = self.coordinator.describe_group(group, version)
        schema.encode(DescribeGroupsResponse(groups=[described]), version)
        return described

    def state(self, group: str = GROUP) -> str:
        return self.describe(group, version=5).group_state

    def groups(self, states: Sequence[str] = (), types: Sequence[str] = ()) -> list[ListedGroup]:
        listed = self.coordinator.list_groups(states, types)
        schema.encode(ListGroupsResponse(groups=listed), 5)
        return listed

    # Whole scenes

    def stable(self, count: int, **options: Any) -> tuple[list[str], int]:
        """A stable group of so many members, the leader first: their ids, and the generation."""
        joins = [self.join_new(**options) for _ in range(count)]
        self.sleep(self.settings.initial_rebalance_delay_ms * (2 if count > 1 else 1))
        leader = joins[0].answer.leader
        generation = joins[0].answer.generation_id
        members = sorted((asked.answer.member_id for asked in joins), key=lambda name: name != leader)
        group = options.get("group", GROUP)
        self.sync(leader, generation, assignment_of(members), group=group)
        for member in members[1:]:
            assert self.sync(member, generation, group=group).error is ErrorCode.NONE
        assert self.state(group) == "Stable"
        return members, generation

    def restarted(self) -> Conversation:
        """Another coordinator, which knows only what the log says, in the bytes of the log."""
        other = Conversation(self.settings, self.log, self.topics)
        other.wall_ms = self.wall_ms
        return other

    # The log

    def commit_all(self) -> None:
        held, self.held = self.held, []
        for decision, asked, marker in held:
            self._commit(decision, asked, marker)

    def fail_all(self) -> None:
        """The changes could not be written, so nobody hears what was decided."""
        held, self.held = self.held, []
        for decision, _, _ in held:
            self.coordinator.failed(decision, self.now_ms, self.wall_ms)
        self.coordinator.check()

    def fail_last(self) -> None:
        """The changes of the last decision could not be written; those before may still be committed."""
        decision, _, _ = self.held.pop()
        self.coordinator.failed(decision, self.now_ms, self.wall_ms)
        self.coordinator.check()

    def _take(self, decision: Decision[Any], asked: Asked | None, marker: Ended | None = None) -> Asked:
        self.coordinator.check()
        if self.hold:
            self.held.append((decision, asked, marker))
        else:
            self._commit(decision, asked, marker)
        return asked or Asked(0)

    def _commit(self, decision: Decision[Any], asked: Asked | None, marker: Ended | None) -> None:
        self.log.extend(logged_by(decision, marker))
        self.coordinator.committed(decision)
        self.coordinator.check()
        for token, response in decision.replies:
            token.take(response)
        if asked is not None and decision.response is not None:
            asked.take(decision.response)


def assignment_of(members: Sequence[str]) -> dict[str, bytes]:
    return {member: f"for {member}".encode() for member in members}
