"""Plans: who gets which replicas, whatever the placement was before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata.balance import Placed, Plan, Racks, plan_leaders, plan_rebuild, plan_replicas
from penstock.model import BrokerId, TopicId


def racks_of(brokers: int, racks: int = 0) -> dict[BrokerId, str | None]:
    return {BrokerId(id): f"rack-{id % racks}" if racks else None for id in range(1, brokers + 1)}


def placed(*replicas: Sequence[int], is_movable: bool = True, topic: int = 1) -> list[Placed]:
    id = TopicId(topic.to_bytes(16, "big"))
    return [
        Placed((id, index), tuple(map(BrokerId, brokers)), is_movable)
        for index, brokers in enumerate(replicas)
    ]


def random_placement(random: Random, brokers: Sequence[int], factor: int, topics: int) -> list[Placed]:
    found = []
    for topic in range(1, topics + 1):
        partitions = [random.sample(brokers, factor) for _ in range(random.randint(1, 8))]
        found += placed(*partitions, topic=topic)
    return found


def after(partitions: Sequence[Placed], plan: Plan) -> list[Placed]:
    return [one._replace(replicas=plan.get(one.key, one.replicas)) for one in partitions]


def converge(partitions: list[Placed], make: Callable[[list[Placed]], Plan]) -> tuple[list[Placed], int]:
    """The fixed point, and the number of moves it took."""
    moves = 0
    for _ in range(1000):
        plan = make(partitions)
        if not plan:
            return partitions, moves
        moves += len(plan)
        partitions = after(partitions, plan)
    raise AssertionError("it never ends")


def held(partitions: Sequence[Placed], racks: Racks) -> dict[BrokerId, int]:
    counts = Counter(broker for one in partitions for broker in one.replicas)
    return {broker: counts[broker] for broker in racks}


def led(partitions: Sequence[Placed], racks: Racks) -> dict[BrokerId, int]:
    counts = Counter(one.replicas[0] for one in partitions)
    return {broker: counts[broker] for broker in racks}


def spread_of(counts: dict[BrokerId, int]) -> int:
    return max(counts.values()) - min(counts.values())


def crowding(replicas: Sequence[BrokerId], racks: Racks) -> int:
    return sum(count * count for count in Counter(racks[broker] for broker in replicas).values())


def test_new_broker_gets_its_share_from_those_who_have_the_most() -> None:
    partitions = placed(*[(1, 2), (2, 1), (1, 2), (2, 1), (1, 2), (2, 1)])
    plan = plan_replicas(partitions, racks_of(3), [BrokerId(3)], 100)
    assert held(after(partitions, plan), racks_of(3)) == {1: 4, 2: 4, 3: 4}
    assert len(plan) == 4
    # Followers are moved rather than leaders.
    assert led(after(partitions, plan), racks_of(3)) == led(partitions, racks_of(3))


def test_nobody_else_gets_anything() -> None:
    partitions = placed(*[(1,)] * 9, (2,))
    plan = plan_replicas(partitions, racks_of(4), [BrokerId(4)], 100)
    assert {replicas for replicas in plan.values()} == {(4,)}
    assert held(after(partitions, plan), racks_of(4)) == {1: 5, 2: 1, 3: 0, 4: 4}


def test_partitions_that_must_not_be_moved_are_counted_and_left_alone() -> None:
    still = placed(*[(1, 2)] * 4, is_movable=False)
    assert plan_replicas(still, racks_of(3), [BrokerId(3)], 100) == {}
    assert plan_leaders(still, racks_of(3), [BrokerId(2)], 100) == {}
    assert plan_rebuild(still, racks_of(3), frozenset([BrokerId(9)]), 100) == {}


def test_plan_is_no_longer_than_asked() -> None:
    partitions = placed(*[(1,)] * 20)
    assert len(plan_replicas(partitions, racks_of(2), [BrokerId(2)], 3)) == 3


def test_topics_are_spread_and_not_moved_as_a_whole() -> None:
    partitions = [*placed(*[(1, 2)] * 8, topic=1), *placed(*[(1, 2)] * 8, topic=2)]
    plan = plan_replicas(partitions, racks_of(4), [BrokerId(3), BrokerId(4)], 100)
    for topic in (1, 2):
        one_topic = [one for one in after(partitions, plan) if one.key[0][-1] == topic]
        assert spread_of(held(one_topic, racks_of(4))) <= 2


def test_leaderships_are_passed_on_along_a_chain() -> None:
    # 3 shares partitions with 2 only, and 2 has no leadership to spare.
    partitions = placed((1, 2), (1, 2), (1, 2), (2, 3))
    plan = plan_leaders(partitions, racks_of(3), [BrokerId(3)], 100)
    assert led(after(partitions, plan), racks_of(3)) == {1: 2, 2: 1, 3: 1}


def test_dead_replicas_are_replaced_in_other_racks() -> None:
    racks: dict[BrokerId, str | None] = {BrokerId(1): "x", BrokerId(3): "x", BrokerId(4): "y"}
    plan = plan_rebuild(placed((1, 2)), racks, frozenset([BrokerId(2)]), 100)
    assert list(plan.values()) == [(1, 4)]


def test_dead_replicas_stay_when_there_is_nowhere_to_go() -> None:
    assert plan_rebuild(placed((1, 2)), racks_of(1), frozenset([BrokerId(2)]), 100) == {}


@given(seed=st.integers(0, 2**32), brokers=st.integers(1, 7), limit=st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_without_racks_it_ends_with_replicas_and_leaderships_spread_to_within_one(
    seed: int, brokers: int, limit: int
) -> None:
    random = Random(seed)
    racks = racks_of(brokers)
    # Some brokers are new.
    old = sorted(racks)[: random.randint(1, brokers)]
    partitions = random_placement(random, old, random.randint(1, len(old)), random.randint(1, 6))
    before = held(partitions, racks)
    spread, moves = converge(partitions, lambda now: plan_replicas(now, racks, racks, limit))
    assert spread_of(held(spread, racks)) <= 1
    assert all(len(set(one.replicas)) == len(was.replicas) for one, was in zip(spread, partitions))
    # The fewest there can be: what everybody has above its share, where the odd ones stay with those who have most.
    share, odd = divmod(sum(before.values()), brokers)
    shares = [share + (place < odd) for place in range(brokers)]
    assert moves == sum(max(0, has - due) for has, due in zip(sorted(before.values(), reverse=True), shares))

    ordered, _ = converge(spread, lambda now: plan_leaders(now, racks, racks, limit))
    assert [set(one.replicas) for one in ordered] == [set(one.replicas) for one in spread]
    if all(len(one.replicas) == brokers for one in ordered):
        assert spread_of(led(ordered, racks)) <= 1
    assert spread_of(led(ordered, racks)) <= max(1, spread_of(led(spread, racks)))


@given(seed=st.integers(0, 2**32), brokers=st.integers(2, 8), racks=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_with_racks_no_partition_is_spread_worse_than_it_was(seed: int, brokers: int, racks: int) -> None:
    random = Random(seed)
    places = racks_of(brokers, racks)
    old = sorted(places)[: random.randint(1, brokers)]
    partitions = random_placement(random, old, random.randint(1, min(4, len(old))), random.randint(1, 6))
    receivers = [broker for broker in places if random.random() < 0.5]
    spread, _ = converge(partitions, lambda now: plan_replicas(now, places, receivers, 10))
    for was, one in zip(partitions, spread):
        assert len(set(one.replicas)) == len(was.replicas)
        assert crowding(one.replicas, places) <= crowding(was.replicas, places)
        for broker in one.replicas:
            assert broker in was.replicas or broker in receivers


@given(seed=st.integers(0, 2**32), brokers=st.integers(2, 7))
@settings(max_examples=100, deadline=None)
def test_dead_brokers_are_replaced_wherever_there_is_somebody_else(seed: int, brokers: int) -> None:
    random = Random(seed)
    everyone = range(1, brokers + 1)
    dead = frozenset(BrokerId(id) for id in random.sample(everyone, random.randint(0, brokers - 1)))
    racks: dict[BrokerId, str | None] = {BrokerId(id): None for id in everyone if id not in dead}
    factor = random.randint(1, brokers)
    partitions = random_placement(random, everyone, factor, 4)
    rebuilt, _ = converge(partitions, lambda now: plan_rebuild(now, racks, dead, 7))
    for one in rebuilt:
        assert len(set(one.replicas)) == factor
        assert len(dead.intersection(one.replicas)) == max(0, factor - len(racks))


@pytest.mark.parametrize("seed", range(5))
def test_plans_do_not_depend_on_the_order_of_brokers(seed: int) -> None:
    random = Random(seed)
    partitions = random_placement(random, [1, 2, 3], 2, 5)
    racks = racks_of(5)
    turned = dict(reversed(racks.items()))
    receivers = [BrokerId(5), BrokerId(4)]
    assert plan_replicas(partitions, racks, receivers, 99) == plan_replicas(
        partitions, turned, reversed(receivers), 99
    )
    assert plan_leaders(partitions, racks, receivers, 99) == plan_leaders(partitions, turned, receivers, 99)
