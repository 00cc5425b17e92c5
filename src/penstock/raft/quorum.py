"""The arithmetic of a quorum: who the voters are, how many of them are enough, and what they have reached.

A voter is a node *with its disk*: the directory id is made with the directory, so a node whose disk was wiped
is another voter, which has promised nothing and must be admitted anew (KIP-853). What a newcomer gets wrong:
two voter sets that differ by one voter have majorities that overlap; two that differ by more need not. So the
set changes by one voter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class Voter(NamedTuple):
    """Also names a replica that has no vote: an observer fetches under its id and directory too."""

    id: int
    directory: bytes


# In the order of their ids, each id once.
Voters: TypeAlias = tuple[Voter, ...]


def voters_of(voters: Iterable[Voter]) -> Voters:
    made = tuple(sorted(voters))
    assert len({voter.id for voter in made}) == len(made), f"a node is there with two directories: {made}"
    return made


def voter_with(voters: Voters, id: int) -> Voter | None:
    return next((voter for voter in voters if voter.id == id), None)


def majority(count: int) -> int:
    """How many of so many voters are enough. Any two majorities of one set share a voter."""
    return count // 2 + 1


def reached_by_majority(values: Sequence[int]) -> int:
    """The largest value that a majority of these is at or beyond: of offsets, what is replicated on a
    majority; of moments, since when a majority has been heard.
    """
    return sorted(values, reverse=True)[len(values) // 2]


def differ_by_one(one: Voters, other: Voters) -> bool:
    """Whether one voter was added or removed, and nothing else."""
    return len(set(one) ^ set(other)) == 1
