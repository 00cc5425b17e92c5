"""Plans for moving replicas, as pure functions of the present placement: for new brokers, and for dead ones.

Three plans, each a mapping from partition to its new replicas:

- ``plan_replicas`` gives brokers with too few replicas their share, taking from the broker with the most, until
  no broker has two more than they. Every move brings the counts closer together, so it ends, and with the
  smallest possible number of moves.
- ``plan_leaders`` does the same for leaderships by reordering replicas: nothing is copied. Where no broker can
  hand over directly, leaderships are passed along a chain of brokers.
- ``plan_rebuild`` replaces the replicas of dead brokers.

Only ``receivers`` get anything, because an administrator who has emptied a broker does not want it filled again.
Racks come first: no move makes a partition's spread over the racks worse than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from penstock.metadata.partition_index import Key
from penstock.model import BrokerId

Replicas: TypeAlias = tuple[BrokerId, ...]
# The rack of each active broker; all None if any broker has no rack, as in placement.
Racks: TypeAlias = Mapping[BrokerId, str | None]
Plan: TypeAlias = dict[Key, Replicas]


# How many candidates to compare for one move; the one whose topic is most unbalanced is chosen.
LOOKED_AT_MAX = 50


class Placed(NamedTuple):
    """The part of a partition's state that planning needs."""

    key: Key
    # In order of preference. During a reassignment, the replicas it will have.
    replicas: Replicas
    # Whether it is healthy enough to be moved now.
    is_movable: bool


def plan_replicas(
    partitions: Sequence[Placed], racks: Racks, receivers: Iterable[BrokerId], moves_max: int
) -> Plan:
    """Moves that give the receivers their share of the replicas; at most one per partition."""
    loads = _loads(partitions, racks)
    waiting = sorted(broker for broker in receivers if broker in racks)
    offers = _Offers(partitions, racks)
    plan: Plan = {}
    while waiting and len(plan) < moves_max:
        receiver = min(waiting, key=lambda broker: (loads[broker], broker))
        for donor in sorted(loads, key=lambda broker: (-loads[broker], broker)):
            if loads[donor] < loads[receiver] + 2:
                found = None
                break
            found = offers.take(donor, receiver, plan)
            if found is not None:
                loads[donor] -= 1
                loads[receiver] += 1
                break
        else:
            found = None
        if found is None:
            # No broker has a partition that could move there.
            waiting.remove(receiver)
        else:
            plan[found.key] = _replaced(found.replicas, donor, receiver)
    return plan


def plan_leaders(
    partitions: Sequence[Placed], racks: Racks, receivers: Iterable[BrokerId], moves_max: int
) -> Plan:
    """New orders of replicas that give the receivers their share of first replicas."""
    leads = dict.fromkeys(sorted(racks), 0)
    # (from, to) -> partitions whose leadership could be passed on this way.
    passable: dict[BrokerId, dict[BrokerId, list[Placed]]] = {broker: {} for broker in leads}
    for placed in partitions:
        first = placed.replicas[0]
        if first not in leads:
            continue
        leads[first] += 1
        if placed.is_movable:
            for other in placed.replicas[1:]:
                if other in leads:
                    passable[first].setdefault(other, []).append(placed)
    waiting = sorted(broker for broker in receivers if broker in racks)
    plan: Plan = {}
    while waiting and len(plan) < moves_max:
        receiver = min(waiting, key=lambda broker: (leads[broker], broker))
        chain = _chain(receiver, leads, passable, plan)
        if chain is None:
            waiting.remove(receiver)
            continue
        for giver, taker in pairwise(chain):
            passed = passable[giver][taker].pop()
            plan[passed.key] = _swapped(passed.replicas, giver, taker)
        leads[chain[0]] -= 1
        leads[receiver] += 1
    return plan


def plan_rebuild(
    partitions: Sequence[Placed], racks: Racks, dead: frozenset[BrokerId], moves_max: int
) -> Plan:
    """Replacements for the replicas of dead brokers, as far as other brokers are available."""
    loads = _loads(partitions, racks)
    plan: Plan = {}
    for placed in partitions:
        if len(plan) >= moves_max:
            break
        if not placed.is_movable:
            continue
        replicas = placed.replicas
        for broker in placed.replicas:
            if broker not in dead:
                continue
            candidates = [other for other in racks if other not in replicas]
            if not candidates:
                break
            best = min(
                candidates,
                key=lambda other: (
                    _crowding(_replaced(replicas, broker, other), racks),
                    loads[other],
                    other,
                ),
            )
            replicas = _replaced(replicas, broker, best)
            loads[best] += 1
        if replicas != placed.replicas:
            plan[placed.key] = replicas
    return plan


class _Offers:
    """The partitions each broker could give away, in order of preference."""

    def __init__(self, partitions: Sequence[Placed], racks: Racks) -> None:
        self._racks = racks
        self._counts: dict[tuple[bytes, BrokerId], int] = {}
        # Follower replicas, which are cheaper to move, and leader replicas. Each is indexed by rank: how many of
        # the same topic the broker has before this one. The highest ranks are taken first, which are of the
        # topics with the most.
        self._ranks: dict[BrokerId, tuple[list[list[Placed]], list[list[Placed]]]] = {
            broker: ([], []) for broker in racks
        }
        # Partitions per topic and broker.
        counts = self._counts
        for placed in partitions:
            if not placed.is_movable:
                continue
            for place, broker in enumerate(placed.replicas):
                if broker in self._ranks:
                    rank = counts.get((placed.key[0], broker), 0)
                    counts[placed.key[0], broker] = rank + 1
                    ranks = self._ranks[broker][place == 0]
                    while len(ranks) <= rank:
                        ranks.append([])
                    ranks[rank].append(placed)
        self._left: dict[BrokerId, list[Placed]] = {}

    def take(self, donor: BrokerId, receiver: BrokerId, plan: Plan) -> Placed | None:
        """A partition that may move from donor to receiver; it is not offered again."""
        left = self._left.get(donor)
        if left is None:
            left = self._left[donor] = list(self._ordered(donor))
        best: int | None = None
        best_excess = 0
        looked_at = 0
        for number in range(len(left) - 1, -1, -1):
            placed = left[number]
            if placed.key in plan:
                del left[number]
                if best is not None:
                    best -= 1
            elif receiver not in placed.replicas and self._keeps_racks(placed.replicas, donor, receiver):
                topic = placed.key[0]
                excess = self._counts.get((topic, donor), 0) - self._counts.get((topic, receiver), 0)
                if best is None or excess > best_excess:
                    best, best_excess = number, excess
                looked_at += 1
                if looked_at == LOOKED_AT_MAX:
                    break
        if best is None:
            return None
        placed = left.pop(best)
        self._counts[placed.key[0], donor] -= 1
        self._counts[placed.key[0], receiver] = self._counts.get((placed.key[0], receiver), 0) + 1
        return placed

    def _ordered(self, donor: BrokerId) -> Iterator[Placed]:
        """The best last."""
        followers, leaders = self._ranks[donor]
        for ranks in (leaders, followers):
            for rank in ranks:
                yield from reversed(rank)

    def _keeps_racks(self, replicas: Replicas, donor: BrokerId, receiver: BrokerId) -> bool:
        return _crowding(_replaced(replicas, donor, receiver), self._racks) <= _crowding(
            replicas, self._racks
        )


def _chain(
    receiver: BrokerId,
    leads: Mapping[BrokerId, int],
    passable: Mapping[BrokerId, Mapping[BrokerId, list[Placed]]],
    plan: Plan,
) -> list[BrokerId] | None:
    """Brokers along which a leadership can be passed to the receiver, from the broker that leads the most."""
    came_from: dict[BrokerId, BrokerId] = {receiver: receiver}
    queue = [receiver]
    best: BrokerId | None = None
    for taker in queue:
        for giver in leads:
            if giver in came_from:
                continue
            # Lists shrink from the end; drop entries that were planned through another list meanwhile.
            offered = passable[giver].get(taker)
            while offered and offered[-1].key in plan:
                offered.pop()
            if not offered:
                continue
            came_from[giver] = taker
            queue.append(giver)
            if leads[giver] >= leads[receiver] + 2 and (best is None or leads[giver] > leads[best]):
                best = giver
    if best is None:
        return None
    chain = [best]
    while chain[-1] != receiver:
        chain.append(came_from[chain[-1]])
    return chain


def _loads(partitions: Sequence[Placed], racks: Racks) -> dict[BrokerId, int]:
    loads = dict.fromkeys(sorted(racks), 0)
    for placed in partitions:
        for broker in placed.replicas:
            if broker in loads:
                loads[broker] += 1
    return loads


def _crowding(replicas: Replicas, racks: Racks) -> int:
    """Smallest when the replicas are spread over the racks as evenly as possible."""
    used: dict[str, int] = {}
    for broker in replicas:
        rack = racks.get(broker)
        # A dead broker, or one without a rack, does not count.
        if rack is not None:
            used[rack] = used.get(rack, 0) + 1
    return sum([count * count for count in used.values()])


def _replaced(replicas: Replicas, old: BrokerId, new: BrokerId) -> Replicas:
    return tuple([new if broker == old else broker for broker in replicas])


def _swapped(replicas: Replicas, first: BrokerId, other: BrokerId) -> Replicas:
    exchanged = {first: other, other: first}
    return tuple([exchanged.get(broker, broker) for broker in replicas])
