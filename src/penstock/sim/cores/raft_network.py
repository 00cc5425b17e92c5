"""The network between simulated nodes of a quorum.

Messages are lost, duplicated, late and overtaken, and links are cut in one direction or both. A request without a
response times out, as in a real shell. Both ends of a message contain the incarnation of the process it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.raft.events import (
    Answer,
    Effect,
    FetchAnswer,
    FetchRequest,
    Reply,
    Request,
    Send,
    SnapshotAnswer,
)
from penstock.raft.raft import Raft
from penstock.sim.cores.raft_ledger import Ledger
from penstock.sim.cores.raft_node import Node
from penstock.sim.cores.raft_world import World

# The time after which the sender of a lost message gives up.
GIVEN_UP_MS = 400
SNAPSHOT_PIECES = 2


class Call(NamedTuple):
    """A request in flight: its sender, the sender's incarnation, and the request."""

    node: Node
    life: int
    request: Request


class Network:
    def __init__(self, world: World, ledger: Ledger, nodes: Mapping[int, Node]) -> None:
        self._world = world
        self._ledger = ledger
        self._nodes = nodes
        self._tokens = 0
        # Directed links -> number of cuts on each.
        self.cuts: dict[tuple[int, int], int] = {}

    def send(self, node: Node, effect: Send) -> None:
        world = self._world
        self._ledger.sending(node, effect.request, world.now_ms)
        call = Call(node, node.life, effect.request)
        peer = self._nodes.get(effect.to)
        copies = self._copies(node.id, effect.to) if peer is not None and peer.is_up else 0
        if copies == 0:
            world.later(GIVEN_UP_MS, self._give_up, call)
            return
        assert peer is not None
        for _ in range(copies):
            world.later(self.latency_ms(), self._arrive, peer, peer.life, call)

    def reply(self, node: Node, effect: Reply) -> None:
        world = self._world
        answer = effect.answer
        self._ledger.replying(node, effect.request, answer, world.now_ms)
        call = node.inbound.pop(effect.token, None)
        if call is None:
            return
        if type(answer) is FetchAnswer and type(effect.request) is FetchRequest:
            if not answer.error and answer.diverging is None and answer.snapshot_id is None:
                records = node.log.from_offset(effect.request.offset, world.swarm.fetched_max)
                answer = answer._replace(records=records)
        elif type(answer) is SnapshotAnswer and not answer.error:
            voters = [entry for entry in node.log.voters if entry[0] < node.log.start_offset]
            answer = answer._replace(size=SNAPSHOT_PIECES, data=[voters])
        copies = self._copies(node.id, call.node.id)
        if copies == 0:
            world.later(GIVEN_UP_MS, self._give_up, call)
        for _ in range(copies):
            world.later(self.latency_ms(), self._deliver, call, answer)

    def hang_up(self, node: Node) -> None:
        """A process is gone: nodes that wait for its responses notice."""
        for call in node.inbound.values():
            self._world.later(self.latency_ms(), self._give_up, call)
        node.inbound.clear()

    def latency_ms(self) -> int:
        world = self._world
        swarm, draw = world.swarm, world.network_draw
        latency_ms = 1 + draw.randrange(swarm.latency_ms)
        if swarm.lag_ms and not world.is_healing and draw.random() < 0.05:
            latency_ms += draw.randrange(swarm.lag_ms * 3)
        return latency_ms

    # Links

    def cut(self, links: list[tuple[int, int]]) -> None:
        for link in links:
            self.cuts[link] = self.cuts.get(link, 0) + 1

    def mend(self, links: list[tuple[int, int]]) -> None:
        for link in links:
            count = self.cuts.pop(link, 0)
            if count > 1:
                self.cuts[link] = count - 1

    def _copies(self, source: int, target: int) -> int:
        world = self._world
        if (source, target) in self.cuts:
            return 0
        draw = world.network_draw.random()
        if draw < world.swarm.loss and not world.is_healing:
            world.counts["losses"] += 1
            return 0
        return 2 if draw > 1 - world.swarm.doubling else 1

    # The other end

    def _arrive(self, peer: Node, life: int, call: Call) -> None:
        if peer.life != life or not peer.is_up:
            self._world.later(GIVEN_UP_MS // 4, self._give_up, call)
            return
        self._tokens += 1
        token = self._tokens
        peer.inbound[token] = call
        raft = peer.raft
        assert raft is not None
        peer.step(life, lambda now_ms: raft.request(call.request, token, now_ms))

    def _deliver(self, call: Call, answer: Answer) -> None:
        raft = call.node.raft
        if call.node.life == call.life and raft is not None:
            call.node.step(call.life, lambda now_ms: self._answered(call, raft, answer, now_ms))

    def _answered(self, call: Call, raft: Raft, answer: Answer, now_ms: int) -> list[Effect]:
        self._ledger.heard(call.node, call.request, answer, now_ms)
        return raft.answered(call.request, answer, now_ms)

    def _give_up(self, call: Call) -> None:
        raft = call.node.raft
        if raft is not None:
            call.node.step(call.life, lambda now_ms: self._unanswered(call, raft, now_ms))

    def _unanswered(self, call: Call, raft: Raft, now_ms: int) -> list[Effect]:
        self._ledger.gave_up(call.node, call.request)
        return raft.answered(call.request, None, now_ms)
