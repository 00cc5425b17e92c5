"""Several nodes of a metadata quorum in virtual time: real ``Consensus`` and files in memory, and between them
a network that carries Kafka's own bytes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.broker.logs import Logger
from penstock.broker.network.connection import WAITING
from penstock.broker.quorum.consensus import Consensus, ConsensusSettings
from penstock.decision import Decision
from penstock.environment import Environment, FileRange
from penstock.metadata.image import Delta, Image
from penstock.protocol.apis import APIS
from penstock.protocol.messages.cluster import DescribeClusterRequest, DescribeClusterResponse
from penstock.protocol.messages.metadata_records import PartitionRecord, TopicRecord
from penstock.protocol.schema import Message
from tests.support_files import FakeClock, FakeFiles

DIRECTORY = "/data/__cluster_metadata-0"
DISK_MS = 2
NETWORK_MS = 1


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Spawn:
    """Of one process: when it has ended, nothing of it runs any more."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.is_dead = False

    def soon(self, callback: Callable[[], None]) -> None:
        self.later(0, callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(lambda: None if self.is_dead else callback())
        self._stage.schedule(delay_ms, timer)
        return timer

    def in_thread(
        self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None], *, lane: str
    ) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)

        self.later(DISK_MS, run)


class FakeCall:
    def __init__(self, version: int, answer: Callable[[Any], None]) -> None:
        self.version = version
        self.answer = answer


class FakePeers:
    """As ``broker.peers.Peers``, over the stage's network."""

    def __init__(self, stage: Stage, node: StagedNode) -> None:
        self._stage = stage
        self._node = node
        self.addresses: dict[int, tuple[str, int]] = {}
        self.on_lost: list[Callable[[int, str], None]] = []

    def set_address(self, node_id: int, host: str, port: int) -> None:
        self.addresses[node_id] = (host, port)

    def is_refused(self, node_id: int, channel: str) -> bool:
        return not self._stage.nodes[node_id].is_up and (self._node.id, node_id) not in self._stage.cuts

    def call(
        self,
        node_id: int,
        channel: str,
        request: Message,
        version: int,
        done: Callable[[Any | None], None],
        *,
        timeout_ms: int = 5000,
    ) -> None:
        answered: list[bool] = []

        def once(response: Any | None) -> None:
            if not answered:
                answered.append(True)
                done(response)

        spawn = self._node.environment.spawn
        spawn.later(timeout_ms, lambda: once(None))
        if node_id in self.addresses and self._stage.nodes[node_id].is_up:
            self._stage.carry(self._node, node_id, request, version, once)
        else:
            spawn.later(NETWORK_MS, lambda: once(None))


class StagedNode:
    def __init__(self, stage: Stage, id: int) -> None:
        self.stage = stage
        self.id = id
        self.directory_id = bytes((id,)) * 16
        self.files = FakeFiles(stage.clock)
        self.is_up = False
        self.life = 0
        self.environment: Environment = None  # type: ignore[assignment]
        self.consensus: Consensus = None  # type: ignore[assignment]
        self.failures: list[str] = []
        self.activity: list[bool] = []
        self.deltas: list[Delta] = []

    def start(self, **more: Any) -> Consensus:
        stage = self.stage
        self.life += 1
        self.environment = Environment(
            clock=stage.clock,
            files=self.files,
            network=None,  # type: ignore[arg-type]
            random=random.Random(self.id * 100 + self.life),
            spawn=Spawn(stage),
            processes=None,  # type: ignore[arg-type]
        )
        arguments: dict[str, Any] = {
            "node_id": self.id,
            "directory_id": self.directory_id,
            "controllers": stage.controllers,
            "peers": FakePeers(stage, self) if stage.controllers else None,
            "lost_page_cache": False,
            "logger": Silent(),
            "on_committed": self._committed,
            "on_active": self.activity.append,
            "on_failure": self.failures.append,
            "settings": stage.settings,
        }
        self.consensus = Consensus(self.environment, DIRECTORY, **(arguments | more))
        self.is_up = True
        self.consensus.start()
        return self.consensus

    def _committed(self, image: Image, delta: Delta) -> None:
        image.check()
        self.deltas.append(delta)

    def stop(self) -> None:
        self._end()
        self.consensus.close()

    def crash(self, *, loses_power: bool = False) -> None:
        self._end()
        if loses_power:
            self.files.crash(random.Random(self.life))

    def wipe(self) -> None:
        self._end()
        self.files = FakeFiles(self.stage.clock)
        self.directory_id = bytes((self.id, self.life)) * 8

    def _end(self) -> None:
        if self.is_up:
            self.is_up = False
            self.environment.spawn.is_dead = True  # type: ignore[attr-defined]
            self.stage.ended(self)

    @property
    def topics(self) -> list[str]:
        return list(self.consensus.image.topics)


class Silent(Logger):
    def info(self, event: str, **values: Any) -> None:
        pass

    warning = error = info


class Stage:
    def __init__(
        self, ids: tuple[int, ...] = (1, 2, 3), *, observers: tuple[int, ...] = (), **settings: Any
    ) -> None:
        self.clock = FakeClock()
        self.settings = ConsensusSettings(**settings)
        self.controllers = {id: (f"host{id}", 9000 + id) for id in ids} if len(ids) > 1 else {}
        self.nodes = {id: StagedNode(self, id) for id in (*ids, *observers)}
        # Directed.
        self.cuts: set[tuple[int, int]] = set()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._topics = 0

    # Time

    def schedule(self, delay_ms: float, timer: Timer) -> None:
        heapq.heappush(self._timers, (self.clock.now_ms() + delay_ms, next(self._count), timer))

    def run_for(self, ms: int) -> None:
        end_ms = self.clock.now_ms() + ms
        while self._timers and self._timers[0][0] <= end_ms:
            self.step()
        self.clock.advance(max(0, end_ms - self.clock.now_ms()))

    def step(self) -> None:
        """Let the next thing happen."""
        at_ms, _, timer = heapq.heappop(self._timers)
        self.clock.advance(max(0, int(at_ms - self.clock.now_ms())))
        if timer.callback is not None:
            timer.callback()
            for node in self.nodes.values():
                if node.is_up:
                    node.consensus.check()

    def run_until(self, condition: Callable[[], bool], within_ms: int = 20_000) -> None:
        deadline_ms = self.clock.now_ms() + within_ms
        while not condition():
            assert self.clock.now_ms() < deadline_ms, f"not within {within_ms} ms of virtual time"
            self.run_for(5)

    # Nodes

    def start_all(self) -> None:
        for node in self.nodes.values():
            if not node.is_up:
                node.start()

    def leader(self) -> StagedNode:
        """The active controller, once there is one that a majority could elect."""
        found: list[StagedNode] = []

        def look() -> bool:
            found[:] = [node for node in self.nodes.values() if node.is_up and node.consensus.is_active]
            return len(found) == 1

        self.run_until(look)
        return found[0]

    def others(self, node: StagedNode) -> list[StagedNode]:
        return [other for other in self.nodes.values() if other is not node]

    def agree(self) -> None:
        """Let time pass until all nodes that run have applied the same."""
        running = [node for node in self.nodes.values() if node.is_up]
        self.run_until(
            lambda: (
                len({node.consensus.image.offset for node in running}) == 1
                and all(node.consensus.high_watermark == node.consensus.log_end_offset for node in running)
            )
        )
        first = running[0].consensus.image
        for node in running:
            assert node.consensus.image == first
            assert not node.failures

    def propose(self, node: StagedNode, partitions: int = 1) -> list[str]:
        """Create a topic; the outcome is put into the list that is returned."""
        self._topics += 1
        outcome: list[str] = []
        name = f"topic-{self._topics}"
        if not node.consensus.propose(
            topic(name, self._topics, partitions), outcome.append, lambda: outcome.append("lost")
        ):
            outcome.append("full")
        return outcome

    def commit(self, node: StagedNode, count: int = 1, partitions: int = 1) -> None:
        outcomes = [self.propose(node, partitions) for _ in range(count)]
        self.run_until(lambda: all(outcomes))
        assert all(outcome[0].startswith("topic") for outcome in outcomes)

    # Network

    def cut(self, node: StagedNode) -> None:
        for other in self.others(node):
            self.cuts |= {(node.id, other.id), (other.id, node.id)}

    def carry(
        self, source: StagedNode, target: int, request: Message, version: int, done: Callable[[Any], None]
    ) -> None:
        """Bring a request to a node and its answer back, both as bytes."""
        api = APIS[request.KEY]
        data = _bytes(api.encode_request[version](request))
        peer, life = self.nodes[target], self.nodes[target].life
        spawn = source.environment.spawn

        def arrive() -> None:
            if (source.id, target) in self.cuts or peer.life != life or not peer.is_up:
                return
            message, _ = api.decode_request[version](memoryview(data), 0)
            if isinstance(message, DescribeClusterRequest):
                # Not a request of the quorum: the broker answers it.
                back(DescribeClusterResponse(cluster_id=peer.consensus.image.cluster_id or ""))
                return
            call: Any = FakeCall(version, back)
            answered = peer.consensus.handle(message, call)
            if answered is not WAITING:
                back(answered)

        def back(response: Any) -> None:
            returned = _bytes(api.encode_response[version](response))
            if (target, source.id) not in self.cuts:
                spawn.later(
                    NETWORK_MS, lambda: done(api.decode_response[version](memoryview(returned), 0)[0])
                )

        self.schedule(NETWORK_MS, Timer(arrive))

    def ask(self, node: StagedNode, request: Message, version: int) -> Any:
        """As an operator would; the answer when it comes."""
        answers: list[Any] = []
        call: Any = FakeCall(version, answers.append)
        answered = node.consensus.handle(request, call)
        if answered is not WAITING:
            return answered
        self.run_until(lambda: bool(answers))
        api = APIS[request.KEY]
        data = _bytes(api.encode_response[version](answers[0]))
        return api.decode_response[version](memoryview(data), 0)[0]

    def ended(self, node: StagedNode) -> None:
        """The others lose their connections, and nobody answers when they call again."""

        def tell(lost: Callable[[int, str], None]) -> None:
            if not node.is_up:
                lost(node.id, "quorum")

        for other in self.others(node):
            if other.is_up and (other.id, node.id) not in self.cuts:
                peers = other.consensus._conversation._peers
                for lost in list(peers.on_lost) if peers is not None else []:
                    other.environment.spawn.later(NETWORK_MS, partial(tell, lost))


def topic(name: str, number: int, partitions: int = 1) -> Decision[Message]:
    id = number.to_bytes(16, "big")
    return Decision(
        [
            TopicRecord(name=name, topic_id=id),
            *(
                PartitionRecord(
                    partition_id=index,
                    topic_id=id,
                    replicas=[1],
                    isr=[1],
                    leader=1,
                    leader_epoch=0,
                    partition_epoch=0,
                    directories=[bytes(16)],
                )
                for index in range(partitions)
            ),
        ],
        name,
    )


def _bytes(parts: list[Any]) -> bytes:
    return b"".join(
        part.file.read_at(part.position, part.size) if isinstance(part, FileRange) else bytes(part)
        for part in parts
    )
