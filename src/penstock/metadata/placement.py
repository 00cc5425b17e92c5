"""Placement of the replicas of new partitions.

Leaders go round the brokers in turn, and each partition's followers are at a distance from its leader that grows
with every full round. So leaders are balanced to within one, replicas too after each full round, and when a
broker dies its leaderships go to many others instead of one. With racks, the brokers are first ordered so that
neighbours are in different racks, and a rack is used twice for one partition only after every rack was used once.

A fenced broker may hold a follower when there are not enough others, as during a rolling restart, but never
leads. The result depends on the arguments only: the round begins at ``start``, which the caller draws at random
for a new topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from penstock.model import BrokerId


class Candidate(NamedTuple):
    broker: BrokerId
    rack: str | None
    is_active: bool = True


class TooFewBrokers(Exception):
    """There are fewer brokers than replicas, or none that could lead."""


def place(
    candidates: Sequence[Candidate], partitions: int, replication_factor: int, start: int, first: int = 0
) -> list[tuple[BrokerId, ...]]:
    """The replicas of each new partition, its leader first. Raises TooFewBrokers.

    ``first`` is the index of the first of them, if the topic already has partitions: the round continues.
    """
    assert replication_factor > 0 and partitions >= 0
    if replication_factor > len(candidates):
        raise TooFewBrokers(
            f"{replication_factor} replicas need as many brokers, and there are {len(candidates)}"
        )
    active = [candidate for candidate in candidates if candidate.is_active]
    if not active:
        raise TooFewBrokers("no broker is active")
    leaders = turn_order(active)
    spare = turn_order(candidate for candidate in candidates if not candidate.is_active)
    # Active brokers come first, regardless of racks.
    spares_needed = max(0, replication_factor - len(leaders))
    followers_active = replication_factor - 1 - spares_needed
    # Racks count only when every broker has one.
    racks = {broker: rack for broker, rack, _ in candidates if rack is not None}
    if len(racks) < len(candidates):
        racks = {}
    shared: dict[tuple[BrokerId, ...], tuple[BrokerId, ...]] = {}
    placed = []
    for partition in range(first, first + partitions):
        position = (start + partition) % len(leaders)
        # Counted from the first partition, so that each full round places one follower on every broker.
        turn = start // len(leaders) + partition // len(leaders)
        leader = leaders[position]
        others = _turned([broker for broker in leaders if broker != leader], position + turn)
        replicas = (
            leader,
            *_followers(leader, others, followers_active, racks),
            *_turned(spare, start + partition)[:spares_needed],
        )
        placed.append(shared.setdefault(replicas, replicas))
    return placed


def _followers(
    leader: BrokerId, others: list[BrokerId], count: int, racks: dict[BrokerId, str]
) -> list[BrokerId]:
    if not racks:
        return others[:count]
    # Take brokers from the racks with the fewest replicas so far; among those, in turn.
    used = dict.fromkeys(racks.values(), 0)
    used[racks[leader]] += 1
    followers = []
    for _ in range(count):
        follower = min(others, key=lambda broker: used[racks[broker]])
        others.remove(follower)
        used[racks[follower]] += 1
        followers.append(follower)
    return followers


def _turned(brokers: list[BrokerId], by: int) -> list[BrokerId]:
    by = by % len(brokers) if brokers else 0
    return brokers[by:] + brokers[:by]


def turn_order(candidates: Iterable[Candidate]) -> list[BrokerId]:
    """The brokers in round-robin order, which goes from rack to rack."""
    racks: dict[str, list[BrokerId]] = {}
    for broker, rack, _ in sorted(candidates, key=lambda candidate: candidate.broker):
        racks.setdefault(rack or "", []).append(broker)
    rows = zip_longest(*(racks[rack] for rack in sorted(racks)))
    return [broker for row in rows for broker in row if broker is not None]
