"""The arithmetic against a version too plain to be wrong."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from penstock.raft.quorum import differ_by_one, majority, reached_by_majority, voter_with, voters_of
from tests.raft.playing import FIVE, THREE, voter


@given(st.integers(1, 12))
def test_any_two_majorities_share_a_voter(count: int) -> None:
    voters = range(count)
    needed = majority(count)
    for one in combinations(voters, needed):
        assert len([voter for voter in voters if voter not in one]) < needed


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_what_a_majority_has_reached_is_what_counting_finds(offsets: list[int]) -> None:
    reached = max(
        offset for offset in range(21) if sum(other >= offset for other in offsets) > len(offsets) / 2
    )
    assert reached_by_majority(offsets) == reached


@given(st.sets(st.integers(1, 5), min_size=1), st.sets(st.integers(1, 5), min_size=1))
def test_majorities_of_sets_that_differ_by_one_overlap(one: set[int], other: set[int]) -> None:
    if not differ_by_one(voters_of(map(voter, one)), voters_of(map(voter, other))):
        return
    for first in combinations(sorted(one), majority(len(one))):
        for second in combinations(sorted(other), majority(len(other))):
            assert set(first) & set(second)


def test_a_replaced_disk_is_two_changes() -> None:
    assert not differ_by_one(THREE, voters_of((voter(1), voter(2), voter(3, life=1))))
    assert differ_by_one(THREE, THREE[:2])
    assert not differ_by_one(THREE, FIVE)
    assert not differ_by_one(THREE, THREE)


def test_a_voter_is_found_by_its_node() -> None:
    assert voter_with(THREE, 2) == voter(2)
    assert voter_with(THREE, 4) is None
