"""The arithmetic of a quorum: voters, majorities, and the offset a majority has reached.

A voter is a node *with its disk*: the directory id is created with the directory, so a node whose disk was wiped
is another voter, which has never voted and must be added again (KIP-853). The majorities of two voter sets that
differ by one voter always overlap; of two that differ by more they may not. So voters change one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class Voter(NamedTuple):
    """Also identifies an observer, which has no vote but fetches with its id and directory too."""

    id: int
    directory: bytes


# Sorted by id. Each id occurs once.
Voters: TypeAlias = tuple[Voter, ...]


def voters_of(voters: Iterable[Voter]) -> Voters:
    made = tuple(sorted(voters))
    assert len({voter.id for voter in made}) == len(made), f"a voter id occurs twice: {made}"
    return made


def voter_with(voters: Voters, id: int) -> Voter | None:
    return next((voter for voter in voters if voter.id == id), None)


def majority(count: int) -> int:
    """The size of a majority of ``count`` voters. Any two majorities of one set share a voter."""
    return count // 2 + 1


def reached_by_majority(values: Sequence[int]) -> int:
    """The largest value that a majority of ``values`` has reached: for offsets, what is replicated on a majority;
    for times, when a majority was last heard from.
    """
    return sorted(values, reverse=True)[len(values) // 2]


def differ_by_one(one: Voters, other: Voters) -> bool:
    """Whether one voter was added or removed, and nothing else."""
    return len(set(one) ^ set(other)) == 1
