"""Replication under every fault at once: real ``Partition`` and ``Fetcher`` cores, a model of the rest.

Three to five nodes replicate one or two partitions. Messages are lost, duplicated, late and out of order; links
are cut one way or both; nodes pause, crash, and lose power with everything that was not synced; old leaders
continue without knowing that they were replaced. Clients write with acks=all and, now and then, with acks=1.
These invariants are checked at every event:

- what was acknowledged is committed, and what is committed is the same on every replica, for ever;
- a new leader has everything that is committed; one leader per epoch;
- a leader's high watermark never goes back, and every member of its maximal ISR has everything below it;
- no replica truncates below its own high watermark.

Then everything heals, and every partition must have a full ISR and commit a last write. ``run(seed)`` is one run;
the same seed gives the same run on any machine.

The last holder of committed records never loses power. In ``replicated`` mode the design allows that loss, so no
checker could distinguish it from a bug.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import Assignment, IsrProposal
from penstock.replication.follower import Fetcher
from penstock.replication.partition import Partition
from penstock.sim.cores.replication_controller import ModelController, PartitionChange
from penstock.sim.cores.replication_node import CONTROLLER, Node
from penstock.sim.cores.replication_replica import Entry, Replica
from penstock.sim.report import Report, Violation

SESSION_MS = 1_300
LAG_MAX_MS = 1_500
HEALING_MS = 15_000
# The last value written.
PROBE = -1
# The share of runs in which settings change, and how often they do.
SETTINGS_SHARE = 0.3
SETTINGS_CALM_MS = 1_500
SETTINGS_MALICE = 0.5
# Events between two full comparisons.
SCAN_INTERVAL = 64


class World:
    core = "replication"
    partition_type: type[Partition] = Partition
    fetcher_type: type[Fetcher] = Fetcher
    replica_type: type[Replica] = Replica
    controller_type: type[ModelController] = ModelController

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        dice = self.random
        self.now_ms = 0
        self.counts: Counter[str] = Counter()
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        # The mixture of faults of this seed.
        self.is_flushed = dice.random() < 0.25
        self.lag_max_ms = LAG_MAX_MS
        self.min_isr = 2
        self._loss = dice.choice((0.0, 0.02, 0.1))
        self._double = dice.choice((0.0, 0.02, 0.1))
        self._delay_ms = dice.choice((5, 20, 60))
        self._late = dice.choice((0.0, 0.02, 0.1, 0.3))
        self._malice = dice.choice((0.0, 0.1, 0.3))
        self._calm_ms = dice.choice((150, 400, 900))
        self._write_ms = dice.choice((20, 60, 150))
        self._duration_ms = dice.choice((6_000, 10_000, 14_000))
        self._faults = [fault for fault in _FAULTS if dice.random() < 0.7] or list(_FAULTS)
        self._is_healed = False
        # In some runs min.insync.replicas changes. Drawn from a separate stream, so that the other runs stay the
        # same.
        self._settings_dice = random.Random(f"minimum {seed}")
        self._changes_min_isr = self._settings_dice.random() < SETTINGS_SHARE
        self._cuts: dict[tuple[int, int], int] = {}

        count = dice.choice((3, 3, 4, 5))
        members = [
            tuple(dice.sample(range(1, count + 1), dice.choice((3, 3, 3, 2))))
            for _ in range(dice.choice((1, 1, 2)))
        ]
        self.controller = self.controller_type(members, self.min_isr)
        self.nodes = {node_id: Node(self, node_id) for node_id in range(1, count + 1)}
        # The truth: committed entries by partition, and the number of acknowledged writes.
        self.committed: list[list[Entry]] = [[] for _ in members]
        self.acked = 0
        self.leaders: dict[tuple[int, int], int] = {}
        self._published = 0
        self._registrations: dict[tuple[int, int], int] = {}
        self._value = 0
        for index, replicas in enumerate(members):
            for node_id in replicas:
                replica = self.replica_type(self, self.nodes[node_id], index)
                self.nodes[node_id].replicas[replica.key] = replica

    # Time

    def later(self, delay_ms: int, callback: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._sequence, callback, arguments))

    def _run_until(self, end_ms: int, is_done: Callable[[], bool] | None = None) -> int:
        queue = self._queue
        events = 0
        try:
            while queue and queue[0][0] <= end_ms:
                self.now_ms, _, callback, arguments = heapq.heappop(queue)
                owner = getattr(callback, "__self__", None)
                if isinstance(owner, Replica):
                    owner = owner.node
                if isinstance(owner, Node) and owner.paused_until_ms > self.now_ms:
                    self.later(owner.paused_until_ms - self.now_ms, callback, *arguments)
                    continue
                callback(*arguments)
                events += 1
                if events % SCAN_INTERVAL == 0:
                    self.scan()
                    if is_done is not None and is_done():
                        break
        except AssertionError as error:
            if isinstance(error, Violation):
                raise
            raise Violation(f"seed {self.seed} at {self.now_ms} ms: {error}") from error
        return events

    # The network

    def send(self, source: int, target: int, callback: Callable[..., None], *arguments: Any) -> None:
        dice = self.random
        if not self._is_healed and (
            self._cuts.get((source, target), 0) > self.now_ms or dice.random() < self._loss
        ):
            self.counts["lost messages"] += 1
            return
        self._deliver(target, callback, arguments)
        if not self._is_healed and dice.random() < self._double:
            self.counts["doubled messages"] += 1
            self._deliver(target, callback, arguments)

    def _deliver(self, target: int, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        dice = self.random
        delay_ms = dice.randint(1, self._delay_ms)
        if not self._is_healed and dice.random() < self._late:
            delay_ms += dice.randint(100, 3_000)
        if target == CONTROLLER:
            self.later(delay_ms, callback, *arguments)
        else:
            self.later(delay_ms, self._arrive, self.nodes[target], callback, arguments)

    def _arrive(self, node: Node, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not node.is_alive or (node.broker_epoch < 0 and callback != node.registered):
            return
        if node.paused_until_ms > self.now_ms:
            self.later(node.paused_until_ms - self.now_ms, self._arrive, node, callback, arguments)
        else:
            callback(*arguments)

    # The controller's side of messages

    def registering(self, node: Node, life: int) -> None:
        if life != node.life or node.broker_epoch >= 0:
            return
        epoch = self._registrations.get((node.id, life))
        if epoch is not None:
            # A retry, because the response was lost: one start is one registration.
            self.send(CONTROLLER, node.id, node.registered, life, epoch, len(self.controller.history))
            return
        # In flushed mode nothing that counted can be lost, so every start is clean.
        is_unclean = node.has_lost_power and not self.is_flushed
        epoch = self.controller.register(node.id, is_unclean=is_unclean, now_ms=self.now_ms)
        self._registrations[node.id, life] = epoch
        self._publish()
        self.send(CONTROLLER, node.id, node.registered, life, epoch, len(self.controller.history))

    def heartbeat(self, node: Node, life: int, broker_epoch: int) -> None:
        if self.controller.heard(node.id, broker_epoch, self.now_ms):
            self._publish()
            self.send(CONTROLLER, node.id, node.learn, life, len(self.controller.history))

    def altering(
        self, node: Node, life: int, broker_epoch: int, replica: Replica, proposal: IsrProposal
    ) -> None:
        dice = self.random.random()
        if not self._is_healed and dice < 0.03:
            # A controller that decided ahead of its commits and is then replaced.
            error, result = int(ErrorCode.INVALID_UPDATE_VERSION), None
        else:
            self._raise_before(replica.index, proposal)
            error, result = self.controller.alter(node.id, broker_epoch, replica.index, proposal)
            self._publish()
            if not self._is_healed and dice > 0.95:
                # Committed by its successor.
                error, result = int(ErrorCode.NOT_CONTROLLER), None
        self.send(CONTROLLER, node.id, node.altered, life, replica, proposal, error, result)

    def _publish(self) -> None:
        upto = len(self.controller.history)
        if upto == self._published:
            return
        self._published = upto
        for index in range(len(self.committed)):
            self._in_sync_have_all(index)
        for node in self.nodes.values():
            if node.is_alive and 0 <= node.applied < upto:
                self.send(CONTROLLER, node.id, node.learn, node.life, upto)

    def _expire(self) -> None:
        self.controller.expire(self.now_ms, SESSION_MS)
        self._publish()
        for node in self.nodes.values():
            if node.is_alive and node.paused_until_ms <= self.now_ms:
                node.look_for_laggards(node.life)
        self.later(350, self._expire)

    def older(self, index: int, assignment: Assignment) -> Assignment | None:
        changes = [
            change.assignment
            for change in self.controller.history[-20:]
            if isinstance(change, PartitionChange)
            and change.index == index
            and change.assignment.partition_epoch < assignment.partition_epoch
        ]
        return self.random.choice(changes) if changes else None

    # Checkers

    def elected(self, replica: Replica) -> None:
        core = replica.core
        known = self.leaders.setdefault((replica.index, core.leader_epoch), core.me)
        if known != core.me:
            raise Violation(f"epoch {core.leader_epoch} has two leaders: {known} and {core.me}")
        if core.leader_epoch == self.controller.partitions[replica.index].leader_epoch:
            committed = self.committed[replica.index]
            if replica.log[: len(committed)] != committed:
                raise Violation(f"seed {self.seed}: a leader without all of {committed}: {replica}")
            self.counts["leaders"] += 1

    def watermark_moved(self, replica: Replica) -> None:
        core = replica.core
        high_watermark = core.high_watermark
        if high_watermark == replica.checked:
            return
        if high_watermark < replica.checked:
            raise Violation(f"seed {self.seed}: back from {replica.checked}: {replica}")
        committed = self.committed[replica.index]
        log = replica.log
        if high_watermark > len(log):
            raise Violation(f"seed {self.seed}: beyond the end: {replica}")
        for offset in range(replica.checked, high_watermark):
            if offset < len(committed):
                if committed[offset] != log[offset]:
                    raise Violation(f"seed {self.seed}: offset {offset} was {committed[offset]}: {replica}")
            elif core.is_leader:
                committed.append(log[offset])
                self.counts["commits"] += 1
            else:
                raise Violation(f"seed {self.seed}: a follower is ahead of every leader: {replica}")
        if core.is_leader:
            self._all_have(replica, high_watermark)
            self._in_sync_have_all(replica.index)
        replica.checked = high_watermark

    def _all_have(self, replica: Replica, offset: int) -> None:
        core = replica.core
        for member in core.maximal_isr:
            node = self.nodes[member]
            if node.has_lost_power or (
                member != core.me and core.broker_epoch_of(member) != node.broker_epoch
            ):
                # Of its earlier incarnation only the state at that time is known.
                continue
            has = node.replicas[replica.key].counted()
            if has < offset:
                raise Violation(f"seed {self.seed}: {member} has {has} of {offset}: {replica}")

    def _in_sync_have_all(self, index: int) -> None:
        """Check that every replica the controller may elect has everything committed."""
        committed = self.committed[index]
        partition = self.controller.partitions[index]
        for member in (*partition.isr, *partition.elr):
            node = self.nodes[member]
            if not node.has_lost_power:
                replica = next(it for it in node.replicas.values() if it.index == index)
                if replica.counted() < len(committed) or replica.log[: len(committed)] != committed:
                    raise Violation(
                        f"seed {self.seed}: {partition} has not all of {committed}: {member} {replica}"
                    )

    def acknowledged(self, replica: Replica, offset: int, value: int) -> None:
        self.acked += 1
        committed = self.committed[replica.index]
        if len(committed) < offset or committed[offset - 1][1] != value:
            raise Violation(f"seed {self.seed}: {value} was acknowledged, but is not committed: {replica}")

    def scan(self) -> None:
        """Compare everything with everything, to find what the checks above missed."""
        for node in self.nodes.values():
            for fetcher in node.fetchers.values():
                fetcher.check()
            for replica in node.replicas.values():
                replica.core.check()
                high_watermark = min(replica.core.high_watermark, replica.checked)
                if replica.log[:high_watermark] != self.committed[replica.index][:high_watermark]:
                    raise Violation(f"seed {self.seed}: {replica} is not {self.committed[replica.index]}")

    # Faults and work

    def _write(self) -> None:
        dice = self.random
        index = dice.randrange(len(self.committed))
        leaders = [
            replica
            for node in self.nodes.values()
            if node.is_alive and node.paused_until_ms <= self.now_ms
            for replica in node.replicas.values()
            if replica.index == index and replica.core.is_leader
        ]
        if leaders:
            # Sometimes the same value again: a client that got no response.
            if dice.random() < 0.8:
                self._value += 1
            dice.choice(leaders).produce(self._value, acks_all=dice.random() < 0.8)
        if not self._is_healed:
            self.later(dice.randint(1, 2 * self._write_ms), self._write)

    def _sync(self) -> None:
        """Sync random parts of the logs: pages reach the disk at their own pace."""
        dice = self.random
        for node in self.nodes.values():
            for replica in node.replicas.values():
                if node.is_alive and dice.random() < 0.3:
                    replica.synced = dice.randint(replica.synced, len(replica.log))
        if not self.is_flushed:
            self.later(400, self._sync)

    def _set_min_isr(self) -> None:
        if self._is_healed or not self._changes_min_isr:
            return
        dice = self._settings_dice
        self.counts["minimum changes"] += 1
        # With a minimum of one, a power loss may hit the only holder of committed records.
        loses_data = "_power_loss" in self._faults and not self.is_flushed
        self.controller.set_min_isr(dice.choice((2, 3) if loses_data else (1, 2, 2, 3)))
        self._publish()
        self.later(dice.randint(1, SETTINGS_CALM_MS), self._set_min_isr)

    def _raise_before(self, index: int, proposal: IsrProposal) -> None:
        """Sometimes raise the minimum just before a replica is dropped, which makes it eligible."""
        members = self.controller.partitions[index].isr
        if self._is_healed or not self._changes_min_isr or len(proposal.isr) >= len(members):
            return
        if self._settings_dice.random() < SETTINGS_MALICE:
            self.counts["minimum changes"] += 1
            self.controller.set_min_isr(len(members))

    def _fault(self) -> None:
        if self._is_healed:
            return
        dice = self.random
        getattr(self, dice.choice(self._faults))(self.nodes[dice.randint(1, len(self.nodes))])
        self.later(dice.randint(1, 2 * self._calm_ms), self._fault)

    def _crash(self, node: Node, *, loses_power: bool = False, back_ms: int | None = None) -> None:
        if node.is_alive:
            self.counts["power losses" if loses_power else "crashes"] += 1
            node.stop(loses_power=loses_power)
            back_ms = back_ms or self.random.choice((10, 10, 300, 2_500))
            self.later(back_ms, self._restart, node, node.life)

    def _restart(self, node: Node, life: int) -> None:
        if node.life == life:
            node.start()

    def _power_loss(self, node: Node, back_ms: int | None = None) -> None:
        if self._is_healed:
            return
        if self.is_flushed:
            # Everything that counts is on disk, so all nodes may lose power at once.
            everybody = self.random.random() < 0.3
            for other in self.nodes.values() if everybody else [node]:
                self._crash(other, loses_power=True)
            return
        for replica in node.replicas.values():
            partition = self.controller.partitions[replica.index]
            if any(self.nodes[member].has_lost_power for member in partition.replicas):
                # The other replicas may still drop out, and then only these two would be left.
                return
            if all(member == node.id for member in (*partition.isr, *partition.elr)):
                return
        self._crash(node, loses_power=True, back_ms=back_ms)

    def strike(self, replica: Replica, proposal: IsrProposal) -> int:
        """Sometimes inject a fault where it hurts most; returns the delay of the proposal.

        The replicas that the proposal would admit can no longer reach the leader, and may lose power and be back
        at once: when the proposal reaches the controller, it is about an earlier state or even an earlier
        incarnation (KIP-903).
        """
        dice = self.random
        joiners = [member for member, _ in proposal.isr if member not in replica.core.isr]
        if self._is_healed or not joiners or dice.random() > self._malice:
            return 0
        loses_power = "_power_loss" in self._faults and dice.random() < 0.5
        late_ms = dice.randint(200, 1_000 if loses_power else 2_500)
        for member in joiners:
            self._cuts[member, replica.node.id] = self.now_ms + late_ms + 200
            if loses_power:
                self.later(dice.randint(1, 50), self._power_loss, self.nodes[member], 10)
        return late_ms

    def _pause(self, node: Node) -> None:
        self.counts["pauses"] += 1
        node.paused_until_ms = self.now_ms + self.random.choice((100, 600, 2_000))

    def _cut(self, node: Node) -> None:
        self.counts["cuts"] += 1
        dice = self.random
        until_ms = self.now_ms + dice.choice((300, 1_500, 3_000))
        others = [CONTROLLER, *(other for other in self.nodes if other != node.id)]
        chosen = others if dice.random() < 0.3 else [dice.choice(others)]
        way = dice.choice(("out", "in", "both"))
        for other in chosen:
            if way != "in":
                self._cuts[node.id, other] = until_ms
            if way != "out":
                self._cuts[other, node.id] = until_ms

    def _move_leader(self, node: Node) -> None:
        for replica in node.replicas.values():
            self.controller.elect(replica.index, node.id)
        self._publish()

    def _renew_leader(self, node: Node) -> None:
        for index, partition in enumerate(self.controller.partitions):
            if partition.leader > 0:
                self.controller.elect(index, partition.leader)
        self._publish()

    # The run

    def live(self) -> Report:
        for node in self.nodes.values():
            node.start()
        self._expire()
        self._sync()
        self.later(500, self._write)
        self.later(600, self._fault)
        self.later(700, self._set_min_isr)
        events = self._run_until(self._duration_ms)
        self._heal()
        events += self._run_until(self.now_ms + HEALING_MS, self._is_whole)
        self.scan()
        self._probe()
        self.counts["elections"] = self.controller.elections
        self.counts["isr changes"] = self.controller.isr_changes
        self.counts["acknowledged"] = self.acked
        return Report(self.core, self.seed, virtual_ms=self.now_ms, events=events, counts=self.counts)

    def _heal(self) -> None:
        self._is_healed = True
        self._cuts.clear()
        for node in self.nodes.values():
            node.paused_until_ms = min(node.paused_until_ms, self.now_ms)
            if not node.is_alive:
                node.start()

    def _is_whole(self) -> bool:
        for index, partition in enumerate(self.controller.partitions):
            if (
                partition.leader <= 0
                or len(partition.isr) != len(partition.replicas)
                or self._is_reassigned(index)
            ):
                return False
            replicas = self._members(index)
            for replica in replicas:
                if replica.core.partition_epoch != partition.partition_epoch or len(replica.log) != len(
                    replicas[0].log
                ):
                    return False
        return True

    def _probe(self) -> None:
        """Check for a full ISR, equal logs, and a write that is committed."""
        if not self._is_whole():
            raise Violation(f"seed {self.seed}: not whole after healing: {self._everyone()}")
        for index, committed in enumerate(self.committed):
            before = len(committed)
            for _ in range(5):
                # More than once: a message that was in flight at the healing may still move the leader.
                for replica in self._members(index):
                    replica.produce(PROBE, acks_all=True)
                self._run_until(self.now_ms + 1_500)
                if any(value == PROBE for _, value in committed[before:]):
                    break
            else:
                raise Violation(f"seed {self.seed}: the probe was not committed: {self._everyone()}")
            replicas = self._members(index)
            if any(replica.log != replicas[0].log for replica in replicas):
                raise Violation(f"seed {self.seed}: the logs differ: {self._everyone()}")

    def _is_reassigned(self, index: int) -> bool:
        return False

    def _members(self, index: int) -> list[Replica]:
        """The replicas of a partition, on the nodes of its assignment."""
        members = self.controller.partitions[index].replicas
        return [
            replica
            for node in self.nodes.values()
            for replica in node.replicas.values()
            if replica.index == index and node.id in members
        ]

    def _everyone(self) -> str:
        lines = [str(self.controller.partitions)]
        lines += [
            f"{node.id} {replica}" for node in self.nodes.values() for replica in node.replicas.values()
        ]
        return "\n".join(lines)


_FAULTS = ("_crash", "_power_loss", "_pause", "_cut", "_move_leader", "_renew_leader")


def run(seed: int, mutant: type[World] | None = None) -> Report:
    """Run one seed. Raises ``Violation``."""
    return (mutant or World)(seed).live()
