"""Faults of a simulated quorum: crashes, wiped disks, cuts, pauses, and changes of the voters.

One fault at a time, drawn from those in the seed's swarm, more often at the leader than at other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.raft.events import ChangeVoterRequest
from penstock.raft.raft import Raft
from penstock.sim.cores.raft_ledger import Ledger
from penstock.sim.cores.raft_network import Network
from penstock.sim.cores.raft_node import Node
from penstock.sim.cores.raft_world import World


class Faults:
    def __init__(self, world: World, network: Network, ledger: Ledger, nodes: Mapping[int, Node]) -> None:
        self._world = world
        self._network = network
        self._ledger = ledger
        self._nodes = nodes
        for node in nodes.values():
            node.on_storing = self._storing

    def begin(self) -> None:
        world = self._world
        draw = world.faults_draw
        world.later(draw.randrange(world.swarm.fault_every_ms), self._fault)
        if world.swarm.is_born_badly:
            for _ in range(4):
                node = draw.choice(list(self._nodes.values()))
                world.later(draw.randrange(4000), self.wipe, node)
                world.later(draw.randrange(1000), self._cut_both, node)

    def _fault(self) -> None:
        world = self._world
        if world.is_healing:
            return
        draw = world.faults_draw
        world.later(1 + draw.randrange(world.swarm.fault_every_ms), self._fault)
        node = draw.choice(list(self._nodes.values()))
        leaders = self._leaders()
        if leaders and draw.random() < 0.4:
            node = draw.choice(leaders)
        match draw.choice(world.swarm.faults):
            case "crash":
                self._crash(node, restart_in_ms=draw.choice((50, 500, 4000)))
            case "storm":
                for other in self._nodes.values():
                    if draw.random() < 0.6:
                        self._crash(other, restart_in_ms=draw.randrange(2000))
            case "cut":
                self._cut(node.id, both=True)
            case "cut_one_way":
                self._cut(node.id, both=False)
            case "pause":
                world.counts["pauses"] += 1
                node.paused_until_ms = world.now_ms + draw.choice((100, 1000, 3000))
            case "wipe":
                self.wipe(node)
            case "change":
                self._change_voters()
            case "compact":
                raft = node.raft
                if raft is not None and raft.high_watermark > node.log.start_offset and not node.is_busy:
                    node.log.compact(draw.randint(node.log.start_offset + 1, raft.high_watermark))
            case "resign":
                if node.raft is not None:
                    node.step(node.life, node.raft.resign)

    def _leaders(self) -> list[Node]:
        """The nodes that believe to be the leader."""
        return [node for node in self._nodes.values() if node.raft is not None and node.raft.is_leader]

    # Processes and disks

    def _crash(self, node: Node, *, restart_in_ms: int, wiped: bool = False) -> None:
        if not node.is_up:
            return
        world = self._world
        world.counts["crashes"] += 1
        node.end()
        self._network.hang_up(node)
        if wiped:
            world.counts["wipes"] += 1
            self._ledger.wiped(node)
            node.get_disk()
        else:
            node.lose_unsynced()
        self._ledger.crashed(node)
        world.later(1 + restart_in_ms, node.boot, node.life)
        if world.swarm.sees_refusals:
            for peer in self._nodes.values():
                world.later(self._network.latency_ms(), self._refused, peer, peer.life, node)

    def wipe(self, node: Node) -> None:
        if self._ledger.may_wipe(node):
            self._crash(node, restart_in_ms=self._world.faults_draw.choice((50, 3000)), wiped=True)

    def _storing(self, node: Node) -> None:
        """Perhaps crash a node while it stores its state: random faults would miss that moment."""
        world = self._world
        if not world.is_healing and world.faults_draw.random() < world.swarm.crash_while_storing:
            world.later(world.disk_draw.randrange(world.swarm.sync_ms), self._crash_in_life, node, node.life)

    def _crash_in_life(self, node: Node, life: int) -> None:
        if node.life == life:
            self._crash(node, restart_in_ms=20)

    def _refused(self, peer: Node, life: int, node: Node) -> None:
        """A peer notices that a node's port is closed."""
        raft = peer.raft
        if raft is not None and not node.is_up and (peer.id, node.id) not in self._network.cuts:
            self._ledger.missed(peer, node)
            peer.step(life, lambda now_ms: raft.unreachable(node.id, now_ms))

    # Links

    def _cut(self, id: int, *, both: bool) -> None:
        world = self._world
        draw = world.faults_draw
        world.counts["cuts"] += 1
        others = [other for other in self._nodes if other != id]
        if draw.random() < 0.5:
            others = [draw.choice(others)]
        outward = draw.random() < 0.5
        links = [
            link
            for other in others
            for link in ((id, other), (other, id))
            if both or (link[0] == id) == outward
        ]
        self._network.cut(links)
        world.later(draw.choice((200, 1500, 6000)), self._network.mend, links)

    def _cut_both(self, node: Node) -> None:
        self._cut(node.id, both=True)

    # Operators

    def _change_voters(self) -> None:
        """An operator adds or removes a voter, at any node that claims to lead."""
        draw = self._world.faults_draw
        leaders = self._leaders()
        if not leaders:
            return
        leader = draw.choice(leaders)
        raft = leader.raft
        assert raft is not None
        if not leader.is_responsive:
            # The state could change before the node handles the request.
            return
        request = self._wanted_change(raft)
        if request is not None:
            self._world.counts["voter_changes"] += 1
            leader.step(leader.life, lambda now_ms: raft.request(request, -1, now_ms))

    def _wanted_change(self, raft: Raft) -> ChangeVoterRequest | None:
        draw = self._world.faults_draw
        voters = raft.voters
        outside = [node for node in self._nodes.values() if node.me not in voters]
        if outside and draw.random() < 0.6:
            return ChangeVoterRequest(draw.choice(outside).me, False)
        removed = draw.choice(voters)
        rest = [voter for voter in voters if voter != removed]
        # The operator is careful: if a voter's disk is missing, that voter must be removed first.
        if len(rest) < 2 or any(self._nodes[voter.id].directory != voter.directory for voter in rest):
            return None
        return ChangeVoterRequest(removed, True)
