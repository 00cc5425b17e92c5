"""Where replicas go."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata.placement import Candidate, TooFewBrokers, place
from penstock.model import BrokerId


def brokers(count: int, racks: int = 0, fenced: frozenset[int] = frozenset()) -> list[Candidate]:
    return [
        Candidate(BrokerId(id), f"rack-{id % racks}" if racks else None, id not in fenced)
        for id in range(count)
    ]


def test_one_broker_holds_everything() -> None:
    assert place(brokers(1), 3, 1, start=5) == [(0,), (0,), (0,)]


def test_more_replicas_than_brokers_are_refused() -> None:
    with pytest.raises(TooFewBrokers, match="3 replicas need as many brokers, and there are 2"):
        place(brokers(2), 1, 3, start=0)


def test_nobody_to_lead_is_refused() -> None:
    with pytest.raises(TooFewBrokers, match="no broker is active"):
        place(brokers(2, fenced=frozenset({0, 1})), 1, 1, start=0)


def test_leaders_of_a_dead_broker_fall_to_all_the_others() -> None:
    placed = place(brokers(5), 20, 3, start=0)
    heirs = Counter(replicas[1] for replicas in placed if replicas[0] == 2)
    assert heirs == {0: 1, 1: 1, 3: 1, 4: 1}


def test_order_of_the_candidates_does_not_matter() -> None:
    candidates = brokers(6, racks=3)
    shuffled = list(candidates)
    Random(3).shuffle(shuffled)
    assert place(shuffled, 12, 3, start=4) == place(candidates, 12, 3, start=4)


def test_equal_placements_are_one_object() -> None:
    placed = place(brokers(3), 1000, 2, start=0)
    assert len({id(replicas) for replicas in placed}) == len(set(placed)) == 6


@given(
    count=st.integers(1, 12),
    partitions=st.integers(0, 60),
    start=st.integers(0, 200),
    data=st.data(),
)
@settings(deadline=None)
def test_without_racks_leaders_and_full_turns_of_replicas_are_even(
    count: int, partitions: int, start: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, count))
    placed = place(brokers(count), partitions, factor, start)
    assert len(placed) == partitions
    assert all(len(replicas) == len(set(replicas)) == factor for replicas in placed)
    leaders = Counter({BrokerId(id): 0 for id in range(count)})
    leaders.update(replicas[0] for replicas in placed)
    assert max(leaders.values()) - min(leaders.values()) <= 1
    full = place(brokers(count), count * partitions, factor, start)
    held = Counter(broker for replicas in full for broker in replicas)
    assert set(held.values()) in (set(), {partitions * factor})


@given(
    count=st.integers(1, 12),
    racks=st.integers(1, 5),
    partitions=st.integers(0, 40),
    start=st.integers(0, 200),
    data=st.data(),
)
@settings(deadline=None)
def test_with_racks_a_rack_is_used_twice_only_after_every_rack_was_used(
    count: int, racks: int, partitions: int, start: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, count))
    candidates = brokers(count, racks)
    sizes = Counter(candidate.rack for candidate in candidates)
    for replicas in place(candidates, partitions, factor, start):
        assert len(set(replicas)) == factor
        used = Counter(candidates[broker].rack for broker in replicas)
        for rack, size in sizes.items():
            # A rack may have fewer than another only when it has no broker left.
            assert used[rack] >= max(used.values()) - 1 or used[rack] == size


@given(
    count=st.integers(2, 9),
    partitions=st.integers(1, 30),
    start=st.integers(0, 99),
    racks=st.integers(0, 3),
    data=st.data(),
)
@settings(deadline=None)
def test_fenced_brokers_never_lead_and_follow_only_when_needed(
    count: int, partitions: int, start: int, racks: int, data: st.DataObject
) -> None:
    fenced = data.draw(st.frozensets(st.integers(0, count - 1), max_size=count - 1))
    factor = data.draw(st.integers(1, count))
    needed = max(0, factor - (count - len(fenced)))
    for replicas in place(brokers(count, racks, fenced), partitions, factor, start):
        assert replicas[0] not in fenced
        assert len(set(replicas)) == factor
        assert len(fenced.intersection(replicas)) == needed
