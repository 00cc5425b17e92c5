"""Members against the real group coordinator, in virtual time: who owns what, and who may commit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.groups.settings import GroupSettings
from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    SyncGroupRequest,
)
from penstock.wire import BrokerRefused
from penstock.wire.assignors import (
    ASSIGNORS,
    COOPERATIVE_STICKY,
    RANGE,
    ROUND_ROBIN,
    STICKY,
    Subscriber,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
    owners_of,
    withheld,
)
from penstock.wire.membership import Assigned, Lost, Membership, MembershipSettings, Revoked, State
from tests.groups.conversation import GROUP, Asked, Conversation

COUNTS = {"orders": 5, "payments": 2}
PLACES = [TopicPartition(topic, number) for topic, count in COUNTS.items() for number in range(count)]
SESSION_MS = 10_000
MOVES = ["add", "add", "leave", "cut", "heal", "slow", "fast", "rejoin", "run", "run", "stall"]


class Player:
    """A member, its requests on the way, and what its caller works on."""

    def __init__(self, group: Group, assignors: tuple[str, ...], instance: str | None) -> None:
        self.membership = Membership(
            GROUP, COUNTS, MembershipSettings(assignors, instance, session_timeout_ms=SESSION_MS)
        )
        self.group = group
        self.asked: Asked | None = None
        # Cut off: its requests do not arrive.
        self.is_cut_off = False
        # The caller takes its time to give partitions up.
        self.is_slow = False
        self.works_on: set[TopicPartition] = set()
        self.heard: list[Any] = []

    def step(self) -> bool:
        """Whether anything happened."""
        group, member = self.group, self.membership
        member.tick(group.now_ms)
        happened = False
        if self.asked is not None and not self.asked.waits:
            asked, self.asked = self.asked, None
            member.answered(asked.answer, group.now_ms)
            happened = True
        for event in member.take_events():
            self.heard.append(event)
            happened = True
            match event:
                case Assigned(partitions):
                    assert not self.works_on & set(partitions)
                    self.works_on |= set(partitions)
                case Lost(partitions):
                    self.works_on -= set(partitions)
                case Revoked():
                    pass
        if member._releasing and not self.is_slow:
            self.works_on -= set(member._releasing)
            member.released()
            happened = True
        assert set(member.owned) == self.works_on
        if member.unknown_topics is not None:
            member.assign({topic: self.group.counts[topic] for topic in member.unknown_topics})
            happened = True
        request = member.next_request(group.now_ms)
        if request is not None:
            happened = True
            if self.is_cut_off:
                member.unanswered(group.now_ms)
            else:
                self.asked = group.ask(request)
        member.check()
        return happened


class Group:
    def __init__(self) -> None:
        self.conversation = Conversation(GroupSettings(initial_rebalance_delay_ms=0))
        self.players: list[Player] = []
        self.counts = dict(COUNTS)

    @property
    def now_ms(self) -> int:
        return self.conversation.now_ms

    def add(self, *assignors: str, instance: str | None = None) -> Player:
        player = Player(self, assignors or (RANGE,), instance)
        self.players.append(player)
        return player

    def ask(self, request: Any) -> Asked:
        conversation = self.conversation
        instance = getattr(request, "group_instance_id", None)
        match request:
            case JoinGroupRequest():
                return conversation.join(
                    request.member_id,
                    instance=instance,
                    protocols=[(each.name, each.metadata) for each in request.protocols],
                    session_ms=request.session_timeout_ms,
                    rebalance_ms=request.rebalance_timeout_ms,
                )
            case SyncGroupRequest():
                assignments = {each.member_id: each.assignment for each in request.assignments}
                return conversation.sync(
                    request.member_id, request.generation_id, assignments, instance=instance
                )
            case HeartbeatRequest():
                asked = Asked(4)
                error = conversation.heartbeat(request.member_id, request.generation_id, instance=instance)
                asked.take(HeartbeatResponse(error_code=error))
                return asked
            case LeaveGroupRequest():
                return conversation.leave(*[each.member_id for each in request.members])
        raise AssertionError(request)

    def run_for(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while True:
            while any([player.step() for player in self.players]):
                self.check()
            if self.now_ms >= end_ms:
                return
            times = [player.membership.due_ms() for player in self.players]
            times.append(self.conversation.coordinator.next_deadline_ms)
            next_ms = min((time for time in times if time is not None), default=end_ms)
            self.conversation.sleep(max(1, min(next_ms, end_ms) - self.now_ms))

    def check(self) -> None:
        """No partition has two owners in one generation."""
        owners: dict[tuple[int, TopicPartition], object] = {}
        for player in self.players:
            generation = player.membership.generation
            # Two processes of one static member are one owner, of which the older cannot commit.
            owner = player.membership.settings.instance_id or player
            for at in player.works_on:
                other = owners.setdefault((generation, at), owner)
                assert other == owner, f"{at} has two owners in generation {generation}"

    def check_stable(self, *players: Player) -> None:
        """These are the group, and have every partition once between them."""
        assert {player.membership.state for player in players} == {State.STABLE}
        assert len({player.membership.generation for player in players}) == 1
        assert self.conversation.state() == "Stable"
        owned = [at for player in players for at in player.works_on]
        places = [
            TopicPartition(topic, number) for topic in self.counts for number in range(self.counts[topic])
        ]
        assert sorted(owned) == sorted(places)

    def commit(self, player: Player) -> ErrorCode:
        generation, member_id, instance = player.membership.member
        return self.conversation.commit(
            {("orders", 0): 1}, member_id=member_id, generation=generation, instance=instance
        )[0]


@pytest.mark.parametrize("assignor", list(ASSIGNORS))
def test_members_come_and_go_and_every_partition_is_owned_once(assignor: str) -> None:
    group = Group()
    first = group.add(assignor)
    group.run_for(1_000)
    group.check_stable(first)
    second, third = group.add(assignor), group.add(assignor)
    group.run_for(20_000)
    group.check_stable(first, second, third)
    assert {len(player.works_on) for player in group.players} <= {1, 2, 3, 4}
    second.membership.leave()
    group.run_for(20_000)
    assert second.membership.state is State.LEFT and not second.works_on
    group.check_stable(first, third)


def test_an_eager_member_gives_up_everything_before_it_joins_again() -> None:
    group = Group()
    first = group.add(RANGE)
    group.run_for(1_000)
    first.is_slow = True
    second = group.add(RANGE)
    group.run_for(20_000)
    assert first.membership.state is State.RELEASING
    assert set(first.heard[-1].partitions) == first.works_on == set(PLACES)
    # It may still commit, and its heartbeats keep it in the group.
    assert group.commit(first) is ErrorCode.NONE
    first.is_slow = False
    group.run_for(20_000)
    group.check_stable(first, second)


def test_a_cooperative_member_keeps_what_it_may() -> None:
    group = Group()
    first = group.add(COOPERATIVE_STICKY)
    group.run_for(1_000)
    before = set(first.works_on)
    first.heard.clear()
    second = group.add(COOPERATIVE_STICKY)
    group.run_for(20_000)
    group.check_stable(first, second)
    assert first.works_on < before
    revoked = [event for event in first.heard if isinstance(event, Revoked)]
    assert len(revoked) == 1 and set(revoked[0].partitions) == before - first.works_on == second.works_on


def test_a_member_that_is_cut_off_loses_its_partitions_when_its_session_ends_and_cannot_commit() -> None:
    group = Group()
    first, second = group.add(STICKY), group.add(STICKY)
    group.run_for(20_000)
    stale = first.membership.member
    first.is_cut_off = True
    group.run_for(2 * SESSION_MS)
    assert isinstance(first.heard[-1], Lost) and not first.works_on
    group.check_stable(second)
    refused = group.conversation.commit(
        {("orders", 0): 1}, member_id=stale.member_id, generation=stale.generation
    )
    assert refused == [ErrorCode.UNKNOWN_MEMBER_ID]
    first.is_cut_off = False
    group.run_for(20_000)
    group.check_stable(first, second)


def test_a_commit_of_an_earlier_generation_is_refused() -> None:
    group = Group()
    first = group.add(COOPERATIVE_STICKY)
    group.run_for(1_000)
    stale = first.membership.member
    group.add(COOPERATIVE_STICKY)
    group.run_for(20_000)
    assert group.conversation.commit(
        {("orders", 0): 1}, member_id=stale.member_id, generation=stale.generation
    ) == [ErrorCode.ILLEGAL_GENERATION]
    assert group.commit(first) is ErrorCode.NONE


def test_a_static_member_comes_back_to_its_partitions_without_a_rebalance() -> None:
    group = Group()
    first, second = group.add(RANGE, instance="a"), group.add(RANGE, instance="b")
    group.run_for(20_000)
    generation, had = second.membership.generation, set(first.works_on)
    first.membership.leave()
    group.run_for(1_000)
    assert first.membership.state is State.LEFT
    group.players.remove(first)
    again = group.add(RANGE, instance="a")
    group.run_for(1_000)
    group.check_stable(again, second)
    assert again.works_on == had and second.membership.generation == generation


def test_of_two_with_the_same_instance_the_older_is_told_that_it_is_out() -> None:
    group = Group()
    first = group.add(RANGE, instance="a")
    group.run_for(1_000)
    second = group.add(RANGE, instance="a")
    group.run_for(20_000)
    assert first.membership.state is State.FAILED and not first.works_on
    assert isinstance(first.membership.error, BrokerRefused)
    assert first.membership.error.code == ErrorCode.FENCED_INSTANCE_ID
    group.check_stable(second)


def test_the_leader_assigns_new_partitions_when_it_joins_again() -> None:
    group = Group()
    first, second = group.add(COOPERATIVE_STICKY), group.add(COOPERATIVE_STICKY)
    group.run_for(20_000)
    group.counts["orders"] = 9
    leader = next(player for player in group.players if player.membership.is_leader)
    assert leader.membership.counts == COUNTS
    leader.membership.rejoin()
    group.run_for(20_000)
    group.check_stable(first, second)


def test_members_without_a_common_assignor_are_refused() -> None:
    group = Group()
    first, second = group.add(RANGE), group.add(ROUND_ROBIN)
    group.run_for(20_000)
    failed = [player for player in (first, second) if player.membership.state is State.FAILED]
    assert len(failed) == 1
    assert failed[0].membership.error is not None
    assert "inconsistent group protocol" in str(failed[0].membership.error)


def test_a_leader_that_cannot_read_a_subscription_says_whose() -> None:
    membership = Membership(GROUP, ["orders"], MembershipSettings())
    membership.next_request(0)
    membership.answered(
        JoinGroupResponse(
            generation_id=1,
            protocol_name=RANGE,
            leader="me",
            member_id="me",
            members=[_joined("me", b"\0")],
        ),
        0,
    )
    assert membership.state is State.FAILED
    assert "member me has a subscription that cannot be read" in str(membership.error)


def _joined(member_id: str, metadata: bytes) -> Any:
    from penstock.protocol.messages.groups import JoinGroupResponseMember

    return JoinGroupResponseMember(member_id=member_id, metadata=metadata)


@pytest.mark.parametrize("wrong", [(), ("ranger",)])
def test_an_unknown_assignor_is_refused_at_once(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no assignor"):
        MembershipSettings(wrong)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_whoever_comes_goes_stalls_or_is_cut_off_no_partition_has_two_owners_and_in_the_end_each_has_one(
    seed: int,
) -> None:
    chance = random.Random(seed)
    group = Group()
    assignor = chance.choice(list(ASSIGNORS))
    names = iter(range(1000))
    for _ in range(40):
        live = [
            player for player in group.players if player.membership.state not in (State.LEFT, State.FAILED)
        ]
        match chance.choice(
            ["add", "add", "leave", "cut", "heal", "slow", "fast", "rejoin", "run", "run", "stall"]
        ):
            case "add" if len(live) < 5:
                instance = f"instance-{next(names)}" if chance.random() < 0.3 else None
                group.add(assignor, instance=instance)
            case "leave" if live:
                chance.choice(live).membership.leave()
            case "cut" if live:
                chance.choice(live).is_cut_off = True
            case "heal" if live:
                chance.choice(live).is_cut_off = False
            case "slow" if live:
                chance.choice(live).is_slow = True
            case "fast" if live:
                chance.choice(live).is_slow = False
            case "rejoin" if live:
                chance.choice(live).membership.rejoin()
            case "run":
                group.run_for(chance.choice([10, 1_000, 20_000]))
            case "stall" if live:
                # Nobody hears anything for a while.
                group.conversation.sleep(chance.choice([100, SESSION_MS // 2, 2 * SESSION_MS]))
        group.run_for(chance.choice([0, 50]))
    for player in group.players:
        player.is_cut_off = player.is_slow = False
    group.add(assignor)
    # Longer than any rebalance, and than the sessions of static members that left.
    group.run_for(200_000)
    live = [player for player in group.players if player.membership.state is not State.LEFT]
    group.check_stable(*live)
    assert all(group.commit(player) is ErrorCode.NONE for player in live)


# Assignors

topics = st.dictionaries(st.sampled_from("abc"), st.integers(0, 7), min_size=1)


@st.composite
def subscribers(draw: st.DrawFn) -> tuple[list[Subscriber], dict[str, int]]:
    counts = draw(topics)
    places = [TopicPartition(topic, number) for topic in "abc" for number in range(8)]
    members = [
        Subscriber(
            f"member-{number}",
            draw(st.sampled_from([None, f"instance-{number}"])),
            draw(st.lists(st.sampled_from(sorted(counts)), unique=True)),
            draw(st.lists(st.sampled_from(places), unique=True, max_size=6)),
            draw(st.integers(-1, 2)),
        )
        for number in range(draw(st.integers(1, 5)))
    ]
    return members, counts


@given(given_=subscribers(), name=st.sampled_from(list(ASSIGNORS)))
def test_every_partition_goes_to_one_subscriber(
    given_: tuple[list[Subscriber], dict[str, int]], name: str
) -> None:
    members, counts = given_
    assigned = ASSIGNORS[name](members, counts)
    wanted = {topic for member in members for topic in member.topics}
    places = [
        TopicPartition(topic, number)
        for topic in counts
        if topic in wanted
        for number in range(counts[topic])
    ]
    assert sorted(at for mine in assigned.values() for at in mine) == sorted(places)
    for member in members:
        assert all(at.topic in member.topics for at in assigned[member.member_id])
    if name in (STICKY, COOPERATIVE_STICKY):
        for giver in members:
            for taker in members:
                movable = [at for at in assigned[giver.member_id] if at.topic in taker.topics]
                gap = len(assigned[giver.member_id]) - len(assigned[taker.member_id])
                assert not movable or gap <= 1, "no single move would make it more even"


@given(given_=subscribers())
def test_a_sticky_assignment_of_the_same_group_does_not_change(
    given_: tuple[list[Subscriber], dict[str, int]],
) -> None:
    members, counts = given_
    assigned = ASSIGNORS[STICKY](members, counts)
    again = [member._replace(owned=assigned[member.member_id], generation=5) for member in members]
    repeated = ASSIGNORS[STICKY](again, counts)
    assert {name: set(mine) for name, mine in repeated.items()} == {
        name: set(mine) for name, mine in assigned.items()
    }


@given(given_=subscribers())
def test_what_another_still_has_is_withheld(given_: tuple[list[Subscriber], dict[str, int]]) -> None:
    members, counts = given_
    kept = withheld(ASSIGNORS[COOPERATIVE_STICKY](members, counts), members)
    for member in members:
        others = {at for other in members if other is not member for at in other.owned}
        assert not others & set(kept[member.member_id])


def test_of_several_claims_the_latest_counts_and_of_equal_ones_none() -> None:
    at, other = PLACES[0], PLACES[1]
    members = [
        Subscriber("a", None, ["orders"], [at, other], 3),
        Subscriber("b", None, ["orders"], [at], 4),
        Subscriber("c", None, ["orders"], [other], 3),
    ]
    assert owners_of(members) == {at: "b"}


@pytest.mark.parametrize("assignor", list(ASSIGNORS))
def test_messages_between_members_can_be_read_back(assignor: str) -> None:
    metadata = encode_subscription(["a", "b"], assignor, PLACES, 7)
    found = decode_subscription("me", "mine", metadata, assignor)
    assert found.topics == ["a", "b"] and found.instance_id == "mine"
    if assignor in (STICKY, COOPERATIVE_STICKY):
        assert sorted(found.owned) == sorted(PLACES) and found.generation == 7
    assert sorted(decode_assignment(encode_assignment(PLACES))) == sorted(PLACES)
    assert decode_assignment(b"") == []
