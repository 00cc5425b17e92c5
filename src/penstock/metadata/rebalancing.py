"""Automatic changes of the placement, made by the controller in small steps.

- Leaderships return to the first replica when it is in sync again (``auto.leader.rebalance.enable``).
- A broker that joins gets its share of the replicas (``penstock.rebalance.enable``). The image remembers which
  brokers still wait for it (``newcomers``), so that another controller continues, and a broker that an
  administrator has emptied is not filled again.
- The replicas of a broker that stays away (``penstock.replica.rebuild.delay.ms``) are rebuilt on others; if it
  comes back, it is a newcomer.

Plans come from ``balance.py`` and are carried out as ordinary reassignments, a limited number at a time. A plan
may be outdated by the time it runs: each move is checked again before it begins, and a partition that an
administrator is moving is left alone.
"""

from __future__ import annotations

from collections import deque

from penstock.metadata.balance import Placed, Plan, Racks, plan_leaders, plan_rebuild, plan_replicas
from penstock.metadata.broker_registry import BrokerRegistry
from penstock.metadata.broker_settings import (
    REBALANCE,
    REBALANCE_DELAY_MS,
    REBALANCE_PARTITIONS_MAX,
    REBUILD_DELAY_MS,
)
from penstock.metadata.decided_state import DecidedState
from penstock.metadata.elections import Election, Standing
from penstock.metadata.image import NO_LEADER, PartitionImage
from penstock.metadata.partition_index import Key
from penstock.metadata.reassignment import cancel, move
from penstock.metadata.values import newcomer_record
from penstock.model import BrokerId
from penstock.protocol.messages.metadata_records import PartitionChangeRecord

# Preferred leader elections at a time, as in Kafka. Each interrupts its clients for a moment.
ELECTIONS_MAX = 1000
# Moves planned at a time. Planning looks at every partition, so it must not run for every few moves.
PLAN_MAX = 2000
# How often planned moves are started, and how soon more elections follow.
STEP_MS = 1000
# How soon to try again to rebuild a broker's replicas when no plan was possible.
REBUILD_RETRY_MS = 60_000


class Rebalancing:
    def __init__(self, decided: DecidedState, brokers: BrokerRegistry) -> None:
        self._decided = decided
        self._brokers = brokers
        setting = decided.setting
        self._elects: bool = setting("auto.leader.rebalance.enable")
        self._elections_ms: int = setting("leader.imbalance.check.interval.seconds") * 1000
        self._moves: bool = setting(REBALANCE)
        self._delay_ms: int = setting(REBALANCE_DELAY_MS)
        self._in_flight_max: int = setting(REBALANCE_PARTITIONS_MAX)
        self._rebuild_delay_ms: int = setting(REBUILD_DELAY_MS)
        self._next_elections_ms = 0
        self._next_step_ms = 0
        self._next_rebuild_ms = 0
        # Moves to begin: the partition, its replicas when the plan was made, and the replicas it shall have.
        self._planned: deque[tuple[Key, tuple[BrokerId, ...], tuple[BrokerId, ...]]] = deque()
        # Moves begun by this controller and not known to have ended.
        self._begun: dict[Key, None] = {}
        # Whether there may be replicas on brokers that are not registered.
        self.has_unregistered = True

    def took_over(self, now_ms: int) -> None:
        self._next_elections_ms = now_ms + self._elections_ms
        self._next_step_ms = self._next_rebuild_ms = now_ms + STEP_MS
        self._planned.clear()
        self._begun.clear()
        self.has_unregistered = True

    def next_deadline_ms(self) -> int | None:
        deadlines = []
        if self._elects and self._decided.partition_index.astray:
            deadlines.append(self._next_elections_ms)
        if self._planned or self._begun:
            deadlines.append(self._next_step_ms)
        elif self._moves and self._receivers():
            deadlines.append(max(self._next_step_ms, self._brokers.joined_ms + self._delay_ms))
        if self._rebuild_delay_ms >= 0:
            since = list(self._brokers.fenced_since_ms.values())
            if since:
                deadlines.append(max(self._next_rebuild_ms, min(since) + self._rebuild_delay_ms))
            if self.has_unregistered:
                deadlines.append(self._next_rebuild_ms)
        return min(deadlines, default=None)

    def tick(self, now_ms: int) -> None:
        if self._elects and now_ms >= self._next_elections_ms:
            is_more = self._elect_preferred()
            self._next_elections_ms = now_ms + (STEP_MS if is_more else self._elections_ms)
        if self._rebuild_delay_ms >= 0 and now_ms >= self._next_rebuild_ms:
            self._rebuild(now_ms)
        if now_ms >= self._next_step_ms:
            self._next_step_ms = now_ms + STEP_MS
            self._cancel_stuck(now_ms)
            if (
                self._moves
                and not self._planned
                and now_ms >= self._brokers.joined_ms + self._delay_ms
                and self._receivers()
            ):
                self._share_out()
            self._begin_moves()

    # Leaderships.

    def _elect_preferred(self) -> bool:
        """Return leaderships to preferred replicas; True if some are left for the next step."""
        decided = self._decided
        changes: list[PartitionChangeRecord] = []
        is_more = False
        for key in decided.partition_index.astray:
            topic, partition = decided.find(key)
            first = partition.replicas[0]
            if (
                first not in partition.isr
                or partition.is_reassigned
                or decided.standing_of(first, partition.directories[0]) is not Standing.ACTIVE
            ):
                continue
            if len(changes) == ELECTIONS_MAX:
                is_more = True
                break
            revision = decided.revision(topic, partition)
            revision.election = Election.PREFERRED
            change = revision.change()
            assert change is not None
            changes.append(change)
        decided.take(changes)
        return is_more

    # New brokers.

    def _receivers(self) -> list[BrokerId]:
        return [broker for broker in self._decided.image.newcomers if self._decided.is_active(broker)]

    def _share_out(self) -> None:
        """Plan moves to the newcomers; when they have their share, remove their newcomer mark."""
        receivers = self._receivers()
        racks = self._racks()
        placed = self._placed()
        plan = plan_replicas(placed, racks, receivers, PLAN_MAX)
        if not plan:
            if self._begun:
                return
            plan = plan_leaders(placed, racks, receivers, PLAN_MAX)
        if plan:
            self._plan(plan)
        else:
            self._decided.take([newcomer_record(broker, False) for broker in receivers])

    # Dead brokers.

    def _rebuild(self, now_ms: int) -> None:
        decided = self._decided
        self._next_rebuild_ms = now_ms + STEP_MS
        dead = [
            broker
            for broker, since_ms in self._brokers.fenced_since_ms.items()
            if now_ms >= since_ms + self._rebuild_delay_ms
        ]
        if (not dead and not self.has_unregistered) or self._planned:
            return
        placed = self._placed(needs_full_isr=False)
        registered = decided.image.brokers
        unregistered = dict.fromkeys(
            broker for one in placed for broker in one.replicas if broker not in registered
        )
        self.has_unregistered = bool(unregistered)
        plan = plan_rebuild(placed, self._racks(), frozenset([*dead, *unregistered]), PLAN_MAX)
        if not plan:
            if dead or unregistered:
                self._next_rebuild_ms = now_ms + REBUILD_RETRY_MS
            return
        decided.take(
            [newcomer_record(broker, True) for broker in dead if broker not in decided.image.newcomers]
        )
        self._plan(plan)

    # Moves.

    def _plan(self, plan: Plan) -> None:
        for key, replicas in plan.items():
            _, partition = self._decided.find(key)
            self._planned.append((key, partition.replicas, replicas))

    def _begin_moves(self) -> None:
        decided = self._decided
        self._begun = {key: None for key in self._begun if key in decided.partition_index.reassigned}
        changes: list[PartitionChangeRecord] = []
        room = self._in_flight_max - self._in_flight()
        while self._planned and room > 0:
            key, before, target = self._planned.popleft()
            topic = decided.image.topics_by_id.get(key[0])
            if topic is None:
                continue
            partition = topic.partitions[key[1]]
            if not (
                partition.replicas == before
                and not partition.is_reassigned
                and _has_leader(partition)
                and all([decided.is_active(broker) for broker in target if broker not in before])
            ):
                continue
            change = move(decided, topic, partition, target)
            if change is not None:
                changes.append(change)
                if change.adding_replicas:
                    self._begun[key] = None
                    room -= 1
        decided.take(changes)

    def _in_flight(self) -> int:
        """The number of reassignments that make progress, including those of administrators."""
        decided = self._decided
        reassigned = [decided.find(key)[1] for key in decided.partition_index.reassigned]
        return sum(
            [all([decided.is_active(b) for b in partition.adding_replicas]) for partition in reassigned]
        )

    def _cancel_stuck(self, now_ms: int) -> None:
        """Cancel moves to brokers that have gone and stay away."""
        decided = self._decided
        since_ms = self._brokers.fenced_since_ms
        changes: list[PartitionChangeRecord] = []
        for key in list(self._begun):
            if key not in decided.partition_index.reassigned:
                del self._begun[key]
                continue
            topic, partition = decided.find(key)
            if any(
                [
                    broker not in decided.image.brokers
                    or (
                        self._rebuild_delay_ms >= 0
                        and now_ms >= since_ms.get(broker, now_ms) + self._rebuild_delay_ms
                        and broker in since_ms
                    )
                    for broker in partition.adding_replicas
                ]
            ):
                change = cancel(decided, topic, partition)
                if change is not None:
                    changes.append(change)
                    del self._begun[key]
                    # The replica still has to be replaced.
                    self.has_unregistered = True
                    self._next_rebuild_ms = now_ms
        decided.take(changes)

    def _racks(self) -> Racks:
        active = [broker for broker in self._decided.image.brokers.values() if broker.is_active]
        has_racks = all([broker.rack is not None for broker in active])
        return {
            broker.id: broker.rack if has_racks else None
            for broker in sorted(active, key=lambda broker: broker.id)
        }

    def _placed(self, *, needs_full_isr: bool = True) -> list[Placed]:
        """Every partition; movable if its ISR is full, or at least (not ``needs_full_isr``) has a leader.

        In the second case, a partition of a single replica is not movable.
        """
        placed = []
        for topic in self._decided.image.topics.values():
            for partition in topic.partitions:
                replicas = partition.replicas
                is_movable = _has_leader(partition) and not partition.is_reassigned
                if needs_full_isr:
                    is_movable = is_movable and len(partition.isr) == len(replicas)
                else:
                    is_movable = is_movable and len(replicas) > 1
                if partition.removing_replicas:
                    replicas = tuple(
                        [broker for broker in replicas if broker not in partition.removing_replicas]
                    )
                placed.append(Placed((topic.id, partition.index), replicas, is_movable))
        return placed


def _has_leader(partition: PartitionImage) -> bool:
    return partition.leader != NO_LEADER
