"""A quorum of cores in virtual time, with everything that can go wrong between and under them.

Messages are lost, doubled, delayed and overtaken; links are cut in one direction or both; nodes stop for a
while, or crash and lose what was not synced; disks of a minority are wiped, also while the cluster is being
born; voters are added and removed. After every event the node it happened to is checked against all that any
node ever promised (``Ledger``). Then everything heals, and the quorum must come to life: one leader, every
wiped voter replaced, a new entry committed everywhere.

Only cores run here: no bytes, no asyncio, no files. So a seed takes some tens of milliseconds, and the rare
interleavings are found by number. What one seed did, it does again: all randomness comes from it.
"""

from __future__ import annotations

import random
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from penstock.raft.events import (
    Answer,
    Append,
    AppendFetched,
    ChangeVoterRequest,
    Effect,
    FetchAnswer,
    FetchRequest,
    Flush,
    HighWatermark,
    LoadSnapshot,
    Reply,
    Request,
    RoleChanged,
    Send,
    SnapshotAnswer,
    StoreState,
    Truncate,
    WriteSnapshot,
)
from penstock.raft.quorum import Voter, majority
from penstock.raft.raft import Raft, RaftSettings
from penstock.raft.storage import StoredState
from penstock.sim.cores.raft_ledger import Ledger, Violation
from penstock.sim.cores.raft_log import Entry, SimLog

__all__ = ["Report", "Violation", "run"]

FAULTY_MS = 50_000
HEALING_MS = 30_000
# After a message that was lost, its sender is told that no answer comes.
GIVEN_UP_MS = 400
SNAPSHOT_PIECES = 2
# Entries in an answer, when nothing is wrong.
FETCHED_MAX = 20

MutantPatch = Callable[[type[Raft]], type[Raft]]


@dataclass(slots=True)
class Report:
    seed: int
    nodes: int = 0
    events: int = 0
    crashes: int = 0
    wipes: int = 0
    pauses: int = 0
    cuts: int = 0
    losses: int = 0
    elections: int = 0
    commits: int = 0
    truncations: int = 0
    snapshots: int = 0
    voter_changes: int = 0
    virtual_ms: int = 0
    trace_hash: int = 0


class Swarm:
    """What kind of bad luck this seed has; without it, every run would be the same mixture of everything."""

    def __init__(self, draw: random.Random) -> None:
        self.voters = 3 if draw.random() < 0.7 else 5
        self.spares = 1 if draw.random() < 0.4 else 0
        self.latency_ms = draw.choice((2, 10, 40))
        self.lag_ms = draw.choice((0, 0, 300))
        self.loss = draw.choice((0.0, 0.0, 0.02, 0.1))
        self.doubling = draw.choice((0.0, 0.02, 0.1))
        # A small one lets a log cross an epoch in two steps, which is where the paper's figure 8 lies.
        self.fetched_max = draw.choice((1, 3, FETCHED_MAX))
        self.sync_ms = draw.choice((2, 10, 50))
        self.fault_every_ms = draw.choice((700, 1500, 4000))
        self.propose_every_ms = draw.choice((200, 600))
        # The moment between a promise and its storing is short, and faults at random miss it.
        self.crash_while_storing = draw.choice((0.0, 0.05))
        self.sees_refusals = draw.random() < 0.6
        self.is_born_badly = draw.random() < 0.3
        names = (
            "crash",
            "crash",
            "storm",
            "cut",
            "cut_one_way",
            "pause",
            "wipe",
            "change",
            "compact",
            "resign",
        )
        self.faults = [name for name in names if draw.random() < 0.7] or ["crash"]


class Call(NamedTuple):
    """A request on its way: who asked, in which life, and what."""

    node: Node
    life: int
    request: Request


class Node:
    __slots__ = (
        "deferred",
        "directory",
        "id",
        "inbound",
        "is_busy",
        "is_up",
        "life",
        "log",
        "paused_until_ms",
        "raft",
        "stored",
        "tick_at_ms",
    )

    def __init__(self, id: int) -> None:
        self.id = id
        # The disk.
        self.directory = b""
        self.stored = StoredState()
        self.log = SimLog()
        # The process.
        self.life = 0
        self.is_up = False
        self.raft: Raft | None = None
        self.tick_at_ms = -1
        self.paused_until_ms = 0
        # While a state is being stored: what else happened.
        self.is_busy = False
        self.deferred: deque[Callable[[int], list[Effect]]] = deque()
        # Requests it owes an answer.
        self.inbound: dict[int, Call] = {}

    @property
    def me(self) -> Voter:
        return Voter(self.id, self.directory)


class Simulation:
    def __init__(self, seed: int, raft: type[Raft]) -> None:
        self.report = Report(seed)
        # Streams of their own, so that a change in one place does not shift all the others.
        self.network = random.Random(seed * 7 + 1)
        self.disk = random.Random(seed * 7 + 2)
        self.faults = random.Random(seed * 7 + 3)
        self.clients = random.Random(seed * 7 + 4)
        self.cores = random.Random(seed * 7 + 5)
        self.swarm = Swarm(random.Random(seed * 7 + 6))
        self.raft_class = raft
        self.now_ms = 0
        self.queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        self.tokens = 0
        self.trace_hash = 0
        # Directed.
        self.cuts: dict[tuple[int, int], int] = {}
        self.is_healing = False
        self.proposed = 0

        count = self.swarm.voters + self.swarm.spares
        self.controllers = tuple(range(1, self.swarm.voters + 1))
        self.nodes = {id: Node(id) for id in range(1, count + 1)}
        self.report.nodes = count
        self.ledger = Ledger(seed, self.nodes)
        self.settings = RaftSettings()

    # Running

    def run(self) -> Report:
        for node in self.nodes.values():
            node.directory = self.disk.randbytes(4)
            self.later(self.faults.randrange(500), self.boot, node, node.life)
        self.later(self.clients.randrange(500), self.propose)
        self.later(self.faults.randrange(self.swarm.fault_every_ms), self.fault)
        if self.swarm.is_born_badly:
            for _ in range(4):
                node = self.faults.choice(list(self.nodes.values()))
                self.later(self.faults.randrange(4000), self.wipe, node)
                self.later(self.faults.randrange(1000), self.cut_both, node)
        self.run_until(FAULTY_MS, lambda: False)
        self.heal()
        if not self.run_until(FAULTY_MS + HEALING_MS, lambda: self.ailment() is None):
            self.ledger.fail(f"though all faults are over, {self.ailment()}", self.now_ms)
        self.report.virtual_ms = self.now_ms
        self.report.trace_hash = self.trace_hash
        self.report.commits = len(self.ledger.committed)
        return self.report

    def run_until(self, end_ms: int, is_done: Callable[[], bool]) -> bool:
        queue = self.queue
        report = self.report
        looked_at_ms = self.now_ms
        while queue and queue[0][0] <= end_ms:
            self.now_ms, sequence, callback, arguments = heappop(queue)
            report.events += 1
            self.trace_hash = (self.trace_hash * 1000003 ^ (self.now_ms << 24 ^ sequence)) & 0xFFFFFFFFFFFF
            callback(*arguments)
            if self.is_healing and self.now_ms - looked_at_ms >= 200:
                looked_at_ms = self.now_ms
                if is_done():
                    return True
        self.now_ms = end_ms
        return False

    def later(self, delay_ms: int, callback: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heappush(self.queue, (self.now_ms + delay_ms, self.sequence, callback, arguments))

    # A node

    def boot(self, node: Node, life: int) -> None:
        if node.is_up or node.life != life:
            return
        node.is_up = True
        node.paused_until_ms = 0
        node.log.synced_offset = node.log.end_offset
        node.raft = self.raft_class(
            node.me,
            self.controllers,
            log=node.log,
            stored=node.stored,
            random=random.Random(self.cores.getrandbits(32)),
            settings=self.settings,
        )
        self.step(node, node.life, node.raft.start)

    def step(self, node: Node, life: int, happening: Callable[[int], list[Effect]]) -> None:
        """Let something happen to a node, unless it is another process by now."""
        if node.life != life or not node.is_up:
            return
        if node.paused_until_ms > self.now_ms:
            self.later(node.paused_until_ms - self.now_ms, self.step, node, life, happening)
        elif node.is_busy:
            node.deferred.append(happening)
        else:
            try:
                self.carry_out(node, happening(self.now_ms))
            except AssertionError as error:
                self.stopped(node, error)

    def stopped(self, node: Node, error: AssertionError) -> None:
        """A core has found its own invariants broken."""
        if isinstance(error, Violation):
            raise error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self.ledger.fail(f"node {node.id} stopped in {frame.name}: {error or frame.line}", self.now_ms)

    def carry_out(self, node: Node, effects: list[Effect], place: int = 0) -> None:
        """Do what the core wants, in order; go on later when a state has to be stored first."""
        raft = node.raft
        assert raft is not None
        log_changed = False
        while place < len(effects):
            effect = effects[place]
            place += 1
            match effect:
                case Send():
                    self.send(node, effect)
                case Reply():
                    self.reply(node, effect)
                case StoreState():
                    node.is_busy = True
                    if not self.is_healing and self.faults.random() < self.swarm.crash_while_storing:
                        self.later(
                            self.disk.randrange(self.swarm.sync_ms), self.crash_in_life, node, node.life
                        )
                    self.later(
                        self.disk.randrange(self.swarm.sync_ms), self.stored, node, node.life, effects, place
                    )
                    return
                case Append():
                    self.ledger.appended(node, effect, self.now_ms)
                    node.log.append(Entry(effect.epoch, effect.records))
                    self.ledger.grew(node, node.log.end_offset - 1, self.now_ms)
                    log_changed = True
                case AppendFetched():
                    first = node.log.end_offset
                    for entry in effect.records:
                        node.log.append(entry)
                    self.ledger.grew(node, first, self.now_ms)
                    log_changed = True
                case Truncate():
                    self.ledger.truncating(node, effect.offset, self.now_ms)
                    node.log.truncate(effect.offset)
                    self.report.truncations += 1
                    log_changed = True
                case Flush():
                    node.log.begin_sync()
                    self.later(1 + self.disk.randrange(self.swarm.sync_ms), self.synced, node, node.life)
                case HighWatermark():
                    self.ledger.high_watermark(node, effect.offset, self.now_ms)
                case RoleChanged():
                    if effect.role == "leader":
                        self.report.elections += 1
                    self.ledger.role_changed(node, effect, self.now_ms)
                case WriteSnapshot():
                    self.ledger.downloads[node.id] = effect.data[0]
                case LoadSnapshot():
                    self.report.snapshots += 1
                    node.log.load(effect.snapshot_id, self.ledger.downloads[node.id])
                    log_changed = True
        if log_changed:
            self.carry_out(node, raft.log_changed(self.now_ms))
            return
        raft.check()
        self.ledger.check(node, self.now_ms)
        deadline_ms = raft.next_deadline_ms
        if node.tick_at_ms <= self.now_ms or deadline_ms < node.tick_at_ms:
            node.tick_at_ms = max(deadline_ms, self.now_ms + 1)
            if deadline_ms < 1 << 60:
                self.later(node.tick_at_ms - self.now_ms, self.tick, node, node.life, node.tick_at_ms)

    def tick(self, node: Node, life: int, due_ms: int) -> None:
        if node.life == life and node.tick_at_ms == due_ms and node.raft is not None:
            self.step(node, life, node.raft.tick)

    def stored(self, node: Node, life: int, effects: list[Effect], place: int) -> None:
        if node.life != life:
            return
        effect = effects[place - 1]
        assert isinstance(effect, StoreState)
        node.stored = effect.state
        node.is_busy = False
        try:
            self.carry_out(node, effects, place)
        except AssertionError as error:
            self.stopped(node, error)
        while node.deferred and not node.is_busy and node.life == life:
            self.step(node, life, node.deferred.popleft())

    def synced(self, node: Node, life: int) -> None:
        if node.life != life or node.raft is None:
            return
        node.log.end_sync()
        raft = node.raft
        self.step(node, life, lambda now_ms: raft.flushed(node.log.synced_offset, now_ms))

    # The network

    def send(self, node: Node, effect: Send) -> None:
        self.ledger.sending(node, effect.request, self.now_ms)
        call = Call(node, node.life, effect.request)
        peer = self.nodes.get(effect.to)
        copies = self.copies(node.id, effect.to) if peer is not None and peer.is_up else 0
        if copies == 0:
            self.later(GIVEN_UP_MS, self.give_up, call)
            return
        assert peer is not None
        for _ in range(copies):
            self.later(self.latency_ms(), self.arrive, peer, peer.life, call)

    def copies(self, source: int, target: int) -> int:
        if (source, target) in self.cuts:
            return 0
        draw = self.network.random()
        if draw < self.swarm.loss and not self.is_healing:
            self.report.losses += 1
            return 0
        return 2 if draw > 1 - self.swarm.doubling else 1

    def latency_ms(self) -> int:
        latency_ms = 1 + self.network.randrange(self.swarm.latency_ms)
        if self.swarm.lag_ms and not self.is_healing and self.network.random() < 0.05:
            latency_ms += self.network.randrange(self.swarm.lag_ms * 3)
        return latency_ms

    def arrive(self, peer: Node, life: int, call: Call) -> None:
        if peer.life != life or not peer.is_up:
            self.later(GIVEN_UP_MS // 4, self.give_up, call)
            return
        self.tokens += 1
        token = self.tokens
        peer.inbound[token] = call
        raft = peer.raft
        assert raft is not None
        self.step(peer, life, lambda now_ms: raft.request(call.request, token, now_ms))

    def reply(self, node: Node, effect: Reply) -> None:
        answer = effect.answer
        self.ledger.replying(node, effect.request, answer, self.now_ms)
        call = node.inbound.pop(effect.token, None)
        if call is None:
            return
        if type(answer) is FetchAnswer and type(effect.request) is FetchRequest:
            if not answer.error and answer.diverging is None and answer.snapshot_id is None:
                records = node.log.from_offset(effect.request.offset, self.swarm.fetched_max)
                answer = answer._replace(records=records)
        elif type(answer) is SnapshotAnswer and not answer.error:
            voters = [entry for entry in node.log.voters if entry[0] < node.log.start_offset]
            answer = answer._replace(size=SNAPSHOT_PIECES, data=[voters])
        copies = self.copies(node.id, call.node.id)
        if copies == 0:
            self.later(GIVEN_UP_MS, self.give_up, call)
        for _ in range(copies):
            self.later(self.latency_ms(), self.deliver, call, answer)

    def deliver(self, call: Call, answer: Answer) -> None:
        raft = call.node.raft
        if call.node.life == call.life and raft is not None:
            self.step(call.node, call.life, lambda now_ms: self.answered(call, raft, answer, now_ms))

    def answered(self, call: Call, raft: Raft, answer: Answer, now_ms: int) -> list[Effect]:
        self.ledger.heard(call.node, call.request, answer, now_ms)
        return raft.answered(call.request, answer, now_ms)

    def give_up(self, call: Call) -> None:
        raft = call.node.raft
        if raft is not None:
            self.step(call.node, call.life, lambda now_ms: raft.answered(call.request, None, now_ms))

    # Clients

    def propose(self) -> None:
        self.later(1 + self.clients.randrange(self.swarm.propose_every_ms), self.propose)
        node = self.clients.choice(list(self.nodes.values()))
        raft = node.raft
        if raft is None or not raft.is_leader or node.is_busy or node.paused_until_ms > self.now_ms:
            return
        self.append(node, raft)

    def append(self, node: Node, raft: Raft) -> int:
        self.proposed += 1
        for _ in range(self.clients.randrange(1, 4)):
            node.log.append(Entry(raft.epoch, self.proposed))
            self.ledger.grew(node, node.log.end_offset - 1, self.now_ms)
        self.step(node, node.life, raft.log_changed)
        return self.proposed

    # Faults

    def fault(self) -> None:
        if self.is_healing:
            return
        self.later(1 + self.faults.randrange(self.swarm.fault_every_ms), self.fault)
        draw = self.faults
        node = draw.choice(list(self.nodes.values()))
        leaders = [other for other in self.nodes.values() if other.raft is not None and other.raft.is_leader]
        if leaders and draw.random() < 0.4:
            node = draw.choice(leaders)
        match draw.choice(self.swarm.faults):
            case "crash":
                self.crash(node, restart_in_ms=draw.choice((50, 500, 4000)))
            case "storm":
                for other in self.nodes.values():
                    if draw.random() < 0.6:
                        self.crash(other, restart_in_ms=draw.randrange(2000))
            case "cut":
                self.cut(node.id, both=True)
            case "cut_one_way":
                self.cut(node.id, both=False)
            case "pause":
                self.report.pauses += 1
                node.paused_until_ms = self.now_ms + draw.choice((100, 1000, 3000))
            case "wipe":
                self.wipe(node)
            case "change":
                self.change_voters()
            case "compact":
                raft = node.raft
                if raft is not None and raft.high_watermark > node.log.start_offset and not node.is_busy:
                    node.log.compact(draw.randint(node.log.start_offset + 1, raft.high_watermark))
            case "resign":
                if node.raft is not None:
                    self.step(node, node.life, node.raft.resign)

    def crash(self, node: Node, *, restart_in_ms: int, wiped: bool = False) -> None:
        if not node.is_up:
            return
        self.report.crashes += 1
        node.life += 1
        node.is_up = node.is_busy = False
        node.raft = None
        node.tick_at_ms = -1
        node.deferred.clear()
        for call in node.inbound.values():
            self.later(self.latency_ms(), self.give_up, call)
        node.inbound.clear()
        if wiped:
            self.report.wipes += 1
            self.ledger.wiped(node)
            node.directory = self.disk.randbytes(4)
            node.stored = StoredState()
            node.log = SimLog()
        else:
            node.log.truncate(self.disk.randint(node.log.synced_offset, node.log.end_offset))
        self.ledger.crashed(node)
        self.later(1 + restart_in_ms, self.boot, node, node.life)
        if self.swarm.sees_refusals:
            for peer in self.nodes.values():
                self.later(self.latency_ms(), self.refused, peer, peer.life, node)

    def crash_in_life(self, node: Node, life: int) -> None:
        if node.life == life:
            self.crash(node, restart_in_ms=20)

    def wipe(self, node: Node) -> None:
        if self.ledger.may_wipe(node):
            self.crash(node, restart_in_ms=self.faults.choice((50, 3000)), wiped=True)

    def refused(self, peer: Node, life: int, node: Node) -> None:
        raft = peer.raft
        if raft is not None and not node.is_up and (peer.id, node.id) not in self.cuts:
            self.ledger.missed(peer, node)
            self.step(peer, life, lambda now_ms: raft.unreachable(node.id, now_ms))

    def cut(self, id: int, *, both: bool) -> None:
        self.report.cuts += 1
        others = [other for other in self.nodes if other != id]
        if self.faults.random() < 0.5:
            others = [self.faults.choice(others)]
        outward = self.faults.random() < 0.5
        links = [
            link
            for other in others
            for link in ((id, other), (other, id))
            if both or (link[0] == id) == outward
        ]
        for link in links:
            self.cuts[link] = self.cuts.get(link, 0) + 1
        self.later(self.faults.choice((200, 1500, 6000)), self.mend, links)

    def cut_both(self, node: Node) -> None:
        self.cut(node.id, both=True)

    def mend(self, links: list[tuple[int, int]]) -> None:
        for link in links:
            count = self.cuts.pop(link, 0)
            if count > 1:
                self.cuts[link] = count - 1

    def change_voters(self) -> None:
        """An operator adds a node or removes one, anywhere it finds a leader."""
        draw = self.faults
        leaders = [other for other in self.nodes.values() if other.raft is not None and other.raft.is_leader]
        if not leaders:
            return
        leader = draw.choice(leaders)
        raft = leader.raft
        assert raft is not None
        if leader.is_busy or leader.paused_until_ms > self.now_ms:
            # By the time it heard, what the operator looked at could be different.
            return
        voters = raft.voters
        outside = [node for node in self.nodes.values() if node.me not in voters]
        if outside and draw.random() < 0.6:
            request = ChangeVoterRequest(draw.choice(outside).me, False)
        else:
            removed = draw.choice(voters)
            rest = [voter for voter in voters if voter != removed]
            # An operator who looks first: with a disk missing, it is that one that has to go.
            if len(rest) < 2 or any(self.nodes[voter.id].directory != voter.directory for voter in rest):
                return
            request = ChangeVoterRequest(removed, True)
        self.report.voter_changes += 1
        self.step(leader, leader.life, lambda now_ms: raft.request(request, -1, now_ms))

    # Healing

    def heal(self) -> None:
        self.is_healing = True
        self.cuts.clear()
        # One entry to a round trip is a fault too: a wiped disk could not be filled again in the time there is.
        self.swarm.fetched_max = FETCHED_MAX
        for node in self.nodes.values():
            node.paused_until_ms = min(node.paused_until_ms, self.now_ms)
            self.later(1, self.boot, node, node.life)

    def ailment(self) -> str | None:
        """What is still wrong. Nothing: one established leader, every voter with the disk it has, all nodes
        as far as what was committed.
        """
        leaders = [node for node in self.nodes.values() if node.raft is not None and node.raft.is_established]
        if len(leaders) != 1:
            return f"{len(leaders)} nodes lead"
        if len(self.ledger.committed) == 0:
            return "nothing is committed"
        leader = leaders[0].raft
        assert leader is not None
        for voter in leader.voters:
            if self.nodes[voter.id].directory != voter.directory:
                return f"node {voter.id}, whose disk was wiped, has not got its vote back"
        if len(leader.voters) < majority(self.swarm.voters) and self.report.voter_changes == 0:
            return f"only {len(leader.voters)} voters are left"
        end = leader.high_watermark
        if end != len(self.ledger.committed):
            return f"the leader knows only of {end} that {len(self.ledger.committed)} are committed"
        for node in self.nodes.values():
            if node.raft is None or node.raft.high_watermark < end - 5:
                return f"node {node.id} has not got what is committed"
        return None


def run(seed: int, mutant: str | None = None) -> Report:
    """One seed. Raises Violation, whose words say how to see it again."""
    raft: type[Raft] = Raft
    if mutant is not None:
        from penstock.sim.cores.raft_mutants import MUTANTS  # noqa: PLC0415  # it imports this module's neighbours

        raft = MUTANTS[mutant]
    return Simulation(seed, raft).run()
