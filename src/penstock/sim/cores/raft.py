"""A quorum of cores in virtual time, with faults of messages, processes and disks.

Messages are lost, duplicated, delayed and overtaken; links are cut in one direction or both; nodes pause, or
crash and lose what was not synced; disks of a minority are wiped, even while the cluster is founded; voters are
added and removed. After every event the node is checked against everything that any node ever promised
(``Ledger``). Then everything heals, and the quorum must recover: one leader, every wiped voter replaced, a new
entry committed everywhere.

Only cores run here: no bytes, no asyncio, no files. So a seed takes some tens of milliseconds, and the number of
seeds finds rare interleavings. All randomness comes from the seed, so a run can be repeated.
"""

from __future__ import annotations

from penstock.raft.quorum import majority
from penstock.raft.raft import Raft
from penstock.sim.cores.raft_faults import Faults
from penstock.sim.cores.raft_ledger import Ledger
from penstock.sim.cores.raft_mutants import MUTANTS
from penstock.sim.cores.raft_network import Network
from penstock.sim.cores.raft_node import Node
from penstock.sim.cores.raft_world import FETCHED_MAX, World
from penstock.sim.report import Report

FAULTY_MS = 50_000
HEALING_MS = 30_000


class Simulation:
    def __init__(self, seed: int, raft_type: type[Raft]) -> None:
        self.world = world = World(seed)
        self.nodes: dict[int, Node] = {}
        self._ledger = Ledger(seed, self.nodes)
        self._network = Network(world, self._ledger, self.nodes)
        swarm = world.swarm
        controllers = tuple(range(1, swarm.voters + 1))
        for id in range(1, swarm.voters + swarm.spares + 1):
            self.nodes[id] = Node(
                id, world, self._network, self._ledger, raft_type=raft_type, controllers=controllers
            )
        self.faults = Faults(world, self._network, self._ledger, self.nodes)
        world.counts["nodes"] = len(self.nodes)
        self._proposed = 0

    def run(self) -> Report:
        world = self.world
        for node in self.nodes.values():
            node.get_disk()
            world.later(world.faults_draw.randrange(500), node.boot, node.life)
        world.later(world.clients_draw.randrange(500), self._propose)
        self.faults.begin()
        world.run_until(FAULTY_MS)
        self._heal()
        if not world.run_until(FAULTY_MS + HEALING_MS, lambda: self._ailment() is None):
            self._ledger.fail(f"though all faults are over, {self._ailment()}", world.now_ms)
        world.counts["commits"] = len(self._ledger.committed)
        return Report(
            "raft",
            world.seed,
            virtual_ms=world.now_ms,
            events=world.events,
            trace_hash=str(world.trace_hash),
            counts=world.counts,
        )

    def _propose(self) -> None:
        """A client sends a proposal to a node; if it leads, it appends."""
        world = self.world
        draw = world.clients_draw
        world.later(1 + draw.randrange(world.swarm.propose_every_ms), self._propose)
        node = draw.choice(list(self.nodes.values()))
        if node.raft is not None and node.raft.is_leader and node.is_responsive:
            self._proposed += 1
            node.append(self._proposed, draw.randrange(1, 4))

    def _heal(self) -> None:
        world = self.world
        world.is_healing = True
        self._network.cuts.clear()
        # One entry per round trip is a fault too: a wiped disk could not catch up in time.
        world.swarm.fetched_max = FETCHED_MAX
        for node in self.nodes.values():
            node.paused_until_ms = min(node.paused_until_ms, world.now_ms)
            world.later(1, node.boot, node.life)

    def _ailment(self) -> str | None:
        """What is still wrong; None when everything is in order.

        That means one established leader, every voter with its present disk, and everything committed on all
        nodes.
        """
        leaders = [node for node in self.nodes.values() if node.raft is not None and node.raft.is_established]
        if len(leaders) != 1:
            return f"{len(leaders)} nodes lead"
        committed = len(self._ledger.committed)
        if committed == 0:
            return "nothing is committed"
        leader = leaders[0].raft
        assert leader is not None
        for voter in leader.voters:
            if self.nodes[voter.id].directory != voter.directory:
                return f"node {voter.id}, whose disk was wiped, has not got its vote back"
        world = self.world
        if len(leader.voters) < majority(world.swarm.voters) and not world.counts["voter_changes"]:
            return f"only {len(leader.voters)} voters are left"
        end = leader.high_watermark
        if end != committed:
            return f"the leader knows only of {end} that {committed} are committed"
        for node in self.nodes.values():
            if node.raft is None or node.raft.high_watermark < end - 5:
                return f"node {node.id} has not got what is committed"
        return None


def run(seed: int, mutant: str | None = None) -> Report:
    """Run one seed. Raises Violation, which names the seed."""
    return Simulation(seed, Raft if mutant is None else MUTANTS[mutant]).run()
