"""Groups under any order of events: clients that join, sync, commit, vanish; a coordinator that dies.

The machine is the shell of one coordinator. Decisions go into a queue and are committed, or lost with the
coordinator, later; answers leave in the order of the queue. Its clients do what real ones do, but at the
worst moments. Checked all along, and independently of the coordinator's own ``check()``:

- at most one owner per partition and generation (of all assignments that ever reached a client);
- a commit of an older generation than a client has heard of is refused;
- readers see exactly what is in the log, so that an acknowledged commit survives every restart;
- an offset committed in a transaction is seen when the transaction has committed, and never if it was aborted;
- another coordinator that replays the log agrees with this one, also when the log was compacted;
- every request is answered exactly once, in the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.decision import Decision
from penstock.groups.changes import (
    Change,
    GroupRemoved,
    GroupStored,
    OffsetCommitted,
    OffsetRemoved,
)
from penstock.groups.classic.classic_group import Caller, State
from penstock.groups.coordinator import Coordinator
from penstock.groups.settings import GroupSettings
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.messages.transactions import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from tests.groups.compaction import compacted, last_stable_place, state_of
from tests.groups.conversation import (
    Ended,
    InTransaction,
    Logged,
    logged_by,
    replay,
    subscription,
    topic_id,
)

GROUPS = ("a", "b")
PARTITIONS = 5
PRODUCERS = (7, 8, 9)
SETTINGS = GroupSettings(
    session_timeout_ms_min=1_000,
    initial_rebalance_delay_ms=500,
    members_max=4,
    offsets_retention_ms=200_000,
    offsets_retention_check_interval_ms=60_000,
)
# Group, topic, partition.
Key: TypeAlias = tuple[str, str, int]
Protocols: TypeAlias = tuple[tuple[str, bytes], ...]
PROTOCOLS: tuple[Protocols, ...] = (
    (("range", subscription("orders")), ("sticky", subscription("orders", user_data=b"x"))),
    (("sticky", subscription("orders")), ("range", subscription("payments"))),
    (("range", subscription("orders", "payments")),),
)
JOINS = st.tuples(
    st.sampled_from(PROTOCOLS),
    st.sampled_from([5_000, 5_000, 1_000]),
    st.sampled_from([10_000, 10_000, 2_000, 0]),
    st.sampled_from([9, 9, 9, 8, 5]),
)
ORDERS = "orders"


@dataclass(eq=False)
class Client:
    group: str
    # A static member keeps its instance id over its crashes.
    instance: str | None
    member_id: str = ""
    generation: int = -1
    # What the last JoinGroup told; None when it was not the leader.
    led: list[str] | None = None
    # The JoinGroup or SyncGroup that it waits for.
    waiting: Ask | None = None
    # What a real client would do next.
    wants: str = "join"
    # An answer to an earlier life finds nobody.
    life: int = 0


@dataclass(eq=False)
class Ask:
    """A request on its way; the token that the coordinator is given."""

    kind: str
    client: Client
    life: int
    member_id: str
    generation: int
    answered: bool = False


@dataclass
class Told:
    """What clients have been told about one group since it came into being."""

    generation: int = 0
    # By generation and partition: who got it, a static member by its instance.
    owners: dict[tuple[int, int], str] = field(default_factory=dict)


class Groups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.wall_ms = 1_700_000_000_000
        self.log: list[Logged] = []
        self.queue: list[tuple[Decision[Any], Ask | None, Ended | None]] = []
        self.told = {group: Told() for group in GROUPS}
        # Groups of which the log refused a record: it is behind until the next one.
        self.refused: set[str] = set()
        self.asks: list[Ask] = []
        self.clients: list[Client] = []
        self.lazy = False
        # How often the topic was made.
        self.incarnation = 1
        # The number of coordinators there have been, and their seed.
        self.seed = 0
        self.coordinator = self.start_coordinator()

    @initialize(
        static=st.lists(st.booleans(), min_size=3, max_size=6), rounds=st.integers(0, 6), data=st.data()
    )
    def meet(self, static: list[bool], rounds: int, data: st.DataObject) -> None:
        for number, is_static in enumerate(static):
            # Most clients are in the same group, so that something happens there.
            group = GROUPS[number == 2]
            self.clients.append(Client(group, f"i-{number}" if is_static else None))
        self.behave_together(GROUPS[0], rounds, data)

    def start_coordinator(self, log: list[Logged] | None = None) -> Coordinator:
        coordinator = Coordinator(SETTINGS, random.Random(self.seed), self.topic_id)
        self.seed += 1
        replay(coordinator, self.log if log is None else log)
        coordinator.loaded(self.now_ms, self.wall_ms)
        coordinator.check()
        return coordinator

    def topic_id(self, name: str) -> bytes:
        return topic_id(name, self.incarnation)

    # What clients do

    def pick(self, index: int) -> Client:
        return self.clients[index % len(self.clients)]

    @rule(index=st.integers(0, 5), impatient=st.sampled_from([False, False, False, True]), data=st.data())
    def behave(self, index: int, impatient: bool, data: st.DataObject) -> None:
        """A client does what it should do next, or asks again for what it waits for."""
        client = self.pick(index)
        if client.waiting is None or impatient:
            self.step(client, data)

    @rule(group=st.sampled_from(GROUPS), rounds=st.integers(1, 6), data=st.data())
    def everybody_behaves(self, group: str, rounds: int, data: st.DataObject) -> None:
        self.behave_together(group, rounds, data)

    @rule(data=st.data())
    def the_larger_group_settles(self, data: st.DataObject) -> None:
        self.behave_together(GROUPS[0], 6, data)

    def behave_together(self, group: str, rounds: int, data: st.DataObject) -> None:
        for _ in range(rounds):
            for client in self.clients:
                if client.group == group and client.waiting is None:
                    self.step(client, data)
            self.time_passes(600)

    def step(self, client: Client, data: st.DataObject) -> None:
        if client.wants == "join":
            protocols, session_ms, rebalance_ms, version = data.draw(JOINS)
            self.send_join(client, protocols, session_ms, rebalance_ms, version)
        elif client.wants == "sync":
            self.send_sync(client, data.draw(st.permutations(range(PARTITIONS))))
        else:
            self.send_heartbeat(client)

    @rule(index=st.integers(0, 5), joining=JOINS)
    def join_out_of_turn(self, index: int, joining: tuple[Protocols, int, int, int]) -> None:
        self.send_join(self.pick(index), *joining)

    def send_join(
        self, client: Client, protocols: Protocols, session_ms: int, rebalance_ms: int, version: int
    ) -> None:
        request = JoinGroupRequest(
            group_id=client.group,
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            member_id=client.member_id,
            group_instance_id=client.instance,
            protocol_type="consumer",
            protocols=[
                JoinGroupRequestProtocol(name=name, metadata=metadata) for name, metadata in protocols
            ],
        )
        # Before version 4 no id is required; static members start at version 5.
        version = 3 if client.instance is None and version == 5 else version
        ask = self.ask("join", client)
        decision = self.coordinator.join(
            request, version, Caller("c", "/h"), token=ask, now_ms=self.now_ms, wall_ms=self.wall_ms
        )
        self.take(decision, ask)

    def send_sync(self, client: Client, order: list[int]) -> None:
        members = client.led or []
        assignments = [
            SyncGroupRequestAssignment(member_id=member, assignment=bytes(order[place :: len(members)]))
            for place, member in enumerate(members)
        ]
        request = SyncGroupRequest(
            group_id=client.group,
            generation_id=client.generation,
            member_id=client.member_id,
            group_instance_id=client.instance,
            assignments=assignments,
        )
        ask = self.ask("sync", client)
        decision = self.coordinator.sync(request, 5, token=ask, now_ms=self.now_ms, wall_ms=self.wall_ms)
        self.take(decision, ask)

    def send_heartbeat(self, client: Client) -> None:
        request = HeartbeatRequest(
            group_id=client.group,
            generation_id=client.generation,
            member_id=client.member_id,
            group_instance_id=client.instance,
        )
        ask = self.ask("heartbeat", client)
        self.take(self.coordinator.heartbeat(request, now_ms=self.now_ms), ask)

    @rule(
        index=st.integers(0, 5),
        behind=st.sampled_from([0, 0, 0, 1]),
        partition=st.integers(0, PARTITIONS - 1),
        topic=st.sampled_from([ORDERS, "payments"]),
        offset=st.integers(0, 1000),
    )
    def commit(self, index: int, behind: int, partition: int, topic: str, offset: int) -> None:
        client = self.pick(index)
        generation = max(client.generation - behind, -1)
        self.send_commit(client, generation, topic, partition, offset)

    @rule(
        group=st.sampled_from(GROUPS), partition=st.integers(0, PARTITIONS - 1), offset=st.integers(0, 1000)
    )
    def commit_from_outside(self, group: str, partition: int, offset: int) -> None:
        self.send_commit(Client(group, None), -1, ORDERS, partition, offset)

    def send_commit(self, client: Client, generation: int, topic: str, partition: int, offset: int) -> None:
        committed = OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
        request = OffsetCommitRequest(
            group_id=client.group,
            generation_id_or_member_epoch=generation,
            member_id=client.member_id,
            group_instance_id=client.instance,
            topics=[OffsetCommitRequestTopic(name=topic, partitions=[committed])],
        )
        ask = self.ask("commit", client)
        decision = self.coordinator.commit(request, 9, now_ms=self.now_ms, wall_ms=self.wall_ms)
        error = error_of(decision.response)
        assert (error is ErrorCode.NONE) == bool(decision.changes)
        if error is ErrorCode.NONE and generation >= 0:
            assert generation >= self.told[client.group].generation, "a stale generation has committed"
        self.take(decision, ask)

    @rule(
        producer_id=st.sampled_from(PRODUCERS),
        index=st.integers(0, 5),
        is_member=st.booleans(),
        partitions=st.lists(st.integers(0, PARTITIONS - 1), min_size=1, max_size=3, unique=True),
        offset=st.integers(0, 1000),
    )
    def commit_in_transaction(
        self, producer_id: int, index: int, is_member: bool, partitions: list[int], offset: int
    ) -> None:
        client = self.pick(index)
        committed = [
            TxnOffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
            for partition in partitions
        ]
        request = TxnOffsetCommitRequest(
            transactional_id="mover",
            group_id=client.group,
            producer_id=producer_id,
            producer_epoch=1,
            generation_id=client.generation if is_member else -1,
            member_id=client.member_id if is_member else "",
            group_instance_id=client.instance if is_member else None,
            topics=[TxnOffsetCommitRequestTopic(name=ORDERS, partitions=committed)],
        )
        ask = self.ask("commit", client)
        decision = self.coordinator.commit_in_transaction(
            request, 5, now_ms=self.now_ms, wall_ms=self.wall_ms
        )
        error = error_of(decision.response)
        assert (error is ErrorCode.NONE) == bool(decision.changes)
        if error is ErrorCode.NONE and is_member and client.generation >= 0:
            assert client.generation >= self.told[client.group].generation, "a stale generation has committed"
        self.take(decision, ask)

    @rule(producer_id=st.sampled_from(PRODUCERS), is_commit=st.booleans())
    def transaction_ends(self, producer_id: int, is_commit: bool) -> None:
        decision = self.coordinator.end_transaction(producer_id, is_commit)
        self.take(decision, None, Ended(producer_id, is_commit))

    @rule(index=st.integers(0, 5))
    def leave(self, index: int) -> None:
        client = self.pick(index)
        identity = MemberIdentity(member_id=client.member_id, group_instance_id=client.instance)
        request = LeaveGroupRequest(group_id=client.group, members=[identity])
        ask = self.ask("leave", client)
        decision = self.coordinator.leave(request, 5, now_ms=self.now_ms, wall_ms=self.wall_ms)
        self.take(decision, ask)

    @rule(index=st.integers(0, 5))
    def client_crashes(self, index: int) -> None:
        client = self.pick(index)
        client.life += 1
        client.waiting = None
        self.start_over(client)

    # What happens around them

    @rule(milliseconds=st.sampled_from([1, 400, 1_100, 6_000, 70_000]))
    def time_passes(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.wall_ms += milliseconds
        self.take(self.coordinator.tick(self.now_ms, self.wall_ms), None)

    @rule(what=st.sampled_from([*GROUPS, ORDERS]))
    def something_is_deleted(self, what: str) -> None:
        now_ms, wall_ms = self.now_ms, self.wall_ms
        if what == ORDERS:
            self.incarnation += 1
        else:
            self.take(self.coordinator.delete_group(what, now_ms=now_ms, wall_ms=wall_ms), None)

    @rule(changes_max=st.integers(1, 4))
    def offsets_are_reconciled(self, changes_max: int) -> None:
        unreconciled = self.coordinator.all_keys()
        while unreconciled:
            decision = self.coordinator.reconcile(
                unreconciled, changes_max, now_ms=self.now_ms, wall_ms=self.wall_ms
            )
            self.take(decision, None)

    @rule(lazy=st.booleans())
    def log_becomes_slow_or_fast(self, lazy: bool) -> None:
        self.lazy = lazy

    @precondition(lambda self: self.queue)
    @rule(count=st.integers(1, 4))
    def log_commits_some(self, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            self.commit_next()

    @precondition(lambda self: self.queue)
    @rule()
    def log_refuses_everything(self) -> None:
        queue, self.queue = self.queue, []
        for decision, ask, _ in queue:
            self.coordinator.failed(decision, self.now_ms, self.wall_ms)
            self.coordinator.check()
            self.refused |= {
                c.group_id for c in decision.changes if isinstance(c, GroupStored | GroupRemoved)
            }
            self.lose(decision, ask)

    @precondition(lambda self: self.queue)
    @rule()
    def log_refuses_the_last(self) -> None:
        decision, ask, _ = self.queue.pop()
        self.coordinator.failed(decision, self.now_ms, self.wall_ms)
        self.coordinator.check()
        self.refused |= {c.group_id for c in decision.changes if isinstance(c, GroupStored | GroupRemoved)}
        self.lose(decision, ask)

    @rule()
    def coordinator_crashes(self) -> None:
        """Connections break, what was not committed is gone, another coordinator reads the log."""
        queue, self.queue = self.queue, []
        for decision, ask, _ in queue:
            self.lose(decision, ask)
        for token, _ in self.coordinator.resign().replies:
            self.answer(token, None)
        self.coordinator = self.start_coordinator()
        self.refused.clear()
        for group in GROUPS:
            self.told[group].generation = self.stored_generation(group)

    # The queue

    def ask(self, kind: str, client: Client) -> Ask:
        ask = Ask(kind, client, client.life, client.member_id, client.generation)
        if kind in ("join", "sync"):
            client.waiting = ask
        self.asks.append(ask)
        return ask

    def take(self, decision: Decision[Any], ask: Ask | None, marker: Ended | None = None) -> None:
        self.coordinator.check()
        self.queue.append((decision, ask, marker))
        if not self.lazy:
            while self.queue:
                self.commit_next()

    def commit_next(self) -> None:
        decision, ask, marker = self.queue.pop(0)
        for change in logged_by(decision, marker):
            self.remember(change)
        self.coordinator.committed(decision)
        for token, response in decision.replies:
            self.answer(token, response)
        if ask is not None and decision.response is not None:
            self.answer(ask, decision.response)

    def remember(self, change: Logged) -> None:
        if isinstance(change, GroupStored | GroupRemoved):
            self.refused.discard(change.group_id)
        if isinstance(change, GroupStored):
            assert change.generation >= self.stored_generation(change.group_id), "a generation went back"
            members = {member.member_id for member in change.members}
            assert change.leader in members if members else change.leader is None
        elif isinstance(change, GroupRemoved):
            self.told[change.group_id] = Told()
        self.log.append(change)

    def stored_generation(self, group: str) -> int:
        for change in reversed(self.log):
            if isinstance(change, GroupStored | GroupRemoved) and change.group_id == group:
                return change.generation if isinstance(change, GroupStored) else 0
        return 0

    def lose(self, decision: Decision[Change], ask: Ask | None) -> None:
        for token, _ in decision.replies:
            self.answer(token, None)
        if ask is not None and decision.response is not None:
            self.answer(ask, None)

    def answer(self, ask: Ask, response: Any) -> None:
        """Deliver an answer; None stands for a broken connection."""
        assert not ask.answered, "answered twice"
        ask.answered = True
        client = ask.client
        overtaken = ask.kind in ("join", "sync") and client.waiting is not ask
        if client.waiting is ask:
            client.waiting = None
        if response is None:
            return
        error = error_of(response)
        if ask.kind == "sync" and error is ErrorCode.NONE:
            self.own(ask, response.assignment)
        if ask.kind == "join" and error is ErrorCode.NONE:
            told = self.told[client.group]
            told.generation = max(told.generation, response.generation_id)
        if client.life == ask.life and not overtaken:
            self.react(ask, response, error)

    def own(self, ask: Ask, assignment: bytes) -> None:
        owner = ask.client.instance or ask.member_id
        owners = self.told[ask.client.group].owners
        for partition in assignment:
            previous = owners.setdefault((ask.generation, partition), owner)
            assert previous == owner, f"{previous} and {owner} both own {partition} in {ask.generation}"

    def react(self, ask: Ask, response: Any, error: ErrorCode) -> None:
        client = ask.client
        match ask.kind, error:
            case _, ErrorCode.UNKNOWN_MEMBER_ID | ErrorCode.FENCED_INSTANCE_ID:
                self.start_over(client)
            case "join", ErrorCode.MEMBER_ID_REQUIRED:
                client.member_id = response.member_id
            case "join", ErrorCode.NONE:
                client.member_id, client.generation = response.member_id, response.generation_id
                leads = response.leader == response.member_id and not response.skip_assignment
                client.led = [member.member_id for member in response.members] if leads else None
                client.wants = "sync"
            case "sync", ErrorCode.NONE:
                client.wants = "heartbeat"
            case "leave", ErrorCode.NONE:
                self.start_over(client)
            case (("sync" | "heartbeat"), refused) if refused is not ErrorCode.NONE:
                client.wants = "join"

    def start_over(self, client: Client) -> None:
        client.member_id, client.generation, client.led, client.wants = "", -1, None, "join"

    # ClientCheckers

    @invariant()
    def readers_see_the_log(self) -> None:
        expected, unstable = self.expected()
        assert offsets_of(self.coordinator) == expected
        if not self.queue:
            assert unstable_of(self.coordinator) == unstable

    def expected(self) -> tuple[dict[Key, int], set[Key]]:
        """What the log says: the offsets, and the partitions with an offset in an open transaction."""
        # Each with its place in the log.
        committed: dict[Key, tuple[int, OffsetCommitted]] = {}
        opened: dict[int, dict[Key, tuple[int, OffsetCommitted]]] = {}
        for place, logged in enumerate(self.log):
            match logged:
                case OffsetCommitted():
                    committed[key_of(logged)] = (place, logged)
                case OffsetRemoved():
                    for offsets in (committed, *opened.values()):
                        offsets.pop(key_of(logged), None)
                case InTransaction(change, producer_id):
                    assert isinstance(change, OffsetCommitted)
                    opened.setdefault(producer_id, {})[key_of(change)] = (place, change)
                case Ended(producer_id, is_commit):
                    for key, offset in opened.pop(producer_id, {}).items():
                        if is_commit and offset[0] > committed.get(key, (-1,))[0]:
                            committed[key] = offset
        seen = {
            key: change.offset
            for key, (_, change) in committed.items()
            if change.topic_id == self.topic_id(change.topic)
        }
        return seen, {key for offsets in opened.values() for key in offsets}

    @rule()
    def a_replay_agrees(self) -> None:
        other = self.start_coordinator()
        assert offsets_of(other) == offsets_of(self.coordinator)
        for group_id in GROUPS:
            mine = self.coordinator._groups.get(group_id)
            theirs = other._groups.get(group_id)
            if mine is None:
                assert theirs is None or group_id in self.refused
            elif theirs is not None and not mine.unconfirmed and group_id not in self.refused:
                assert theirs.generation <= mine.generation
                if mine.state is State.STABLE or (mine.state is State.EMPTY and mine.stored):
                    assert theirs.state is mine.state
                    assert theirs.to_stored() == mine.to_stored()
                    assert theirs.subscribed_topics == mine.subscribed_topics
                    assert theirs.static_members == mine.static_members

    @rule(data=st.data())
    def the_log_is_compacted(self, data: st.DataObject) -> None:
        """The next coordinator replays what is left of it, with all that was decided since."""
        full = self.start_coordinator()
        end = data.draw(st.integers(0, last_stable_place(self.log)))
        self.log = compacted(self.log, end, lambda place: data.draw(st.booleans()))
        assert state_of(self.start_coordinator()) == state_of(full)

    def teardown(self) -> None:
        """When nobody does anything any more, everything ends: no request hangs, no member stays."""
        while self.queue:
            self.commit_next()
        self.lazy = False
        for producer_id in PRODUCERS:
            self.transaction_ends(producer_id, False)
        for _ in range(200):
            deadline = self.coordinator.next_deadline_ms
            assert deadline is not None
            self.time_passes(max(deadline - self.now_ms, 0))
            if self.now_ms > 2_000_000:
                break
        assert all(ask.answered for ask in self.asks)
        assert not any(self.coordinator.describe_group(group, 5).members for group in GROUPS)
        assert not self.coordinator.list_groups(), "offsets did not expire"
        assert not self.coordinator._open_groups


def error_of(response: Any) -> ErrorCode:
    """The one error in the answer to a request about one thing."""
    match response:
        case OffsetCommitResponse() | TxnOffsetCommitResponse():
            return ErrorCode(response.topics[0].partitions[0].error_code)
        case LeaveGroupResponse():
            return ErrorCode(response.members[0].error_code)
    return ErrorCode(response.error_code)


def offsets_of(coordinator: Coordinator) -> dict[Key, int]:
    found = {}
    for group in GROUPS:
        answer = coordinator.fetch_offsets(OffsetFetchRequestGroup(group_id=group, topics=None))
        for topic in answer.topics:
            for partition in topic.partitions:
                found[group, topic.name, partition.partition_index] = partition.committed_offset
    return found


def unstable_of(coordinator: Coordinator) -> set[Key]:
    topics = [OffsetFetchRequestTopics(name=ORDERS, partition_indexes=list(range(PARTITIONS)))]
    found = set()
    for group in GROUPS:
        request = OffsetFetchRequestGroup(group_id=group, topics=topics)
        for partition in coordinator.fetch_offsets(request, require_stable=True).topics[0].partitions:
            if partition.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                found.add((group, ORDERS, partition.partition_index))
    return found


def key_of(change: OffsetCommitted | OffsetRemoved) -> Key:
    return change.group_id, change.topic, change.partition


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
