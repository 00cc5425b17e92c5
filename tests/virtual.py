"""A whole broker in virtual time: the real code over a fake clock, fake disk and fake network.

Nothing here waits: ``World.run_for`` jumps from timer to timer. It proves that the ports are all the broker
needs of the world, and lets tests of timeouts take no time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from penstock.broker.config import BrokerConfig
from penstock.broker.logs import Logger
from penstock.broker.node import Node
from penstock.broker.options import ServeOptions
from penstock.environment import Buffer, Environment, File, Stream
from penstock.protocol.apis import APIS
from penstock.protocol.schema import Message, decode, encoder
from tests.support_files import FakeClock, FakeFiles

DISK_MS = 2


class Lines(Logger):
    """A log that the test can read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def _say(self, level: str, event: str, values: dict[str, Any]) -> None:
        self.lines.append((event, values))


class VirtualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualSpawn:
    """Timers in the order of their time, equal ones in the order they were set."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._count = itertools.count()

    def soon(self, callback: Callable[[], None]) -> None:
        self.later(0, callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (self._clock.now_ms() + delay_ms, next(self._count), timer))
        return timer

    def in_thread(
        self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None], *, lane: str
    ) -> None:
        def finish() -> None:
            try:
                result = work()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)

        self.later(DISK_MS, finish)

    def run_until(self, end_ms: float) -> None:
        while self._timers and self._timers[0][0] <= end_ms:
            at_ms, _, timer = heapq.heappop(self._timers)
            self._clock.advance(max(0, int(at_ms - self._clock.now_ms())))
            if timer.callback is not None:
                timer.callback()
        self._clock.advance(max(0, int(end_ms - self._clock.now_ms())))


class VirtualStream:
    """One end of a connection; what it sends, the other end receives at the next turn."""

    def __init__(self, spawn: VirtualSpawn, peer: str) -> None:
        self._spawn = spawn
        self.peer = peer
        self.other: VirtualStream | None = None
        self.inbox: deque[bytes] = deque()
        self.is_closed = False
        # How much more the other end's buffer takes; None for no limit.
        self.window: int | None = None
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None

    def recv_into(self, buffer: memoryview) -> int | None:
        if not self.inbox:
            return 0 if self.other is None or self.other.is_closed else None
        data = self.inbox.popleft()
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        if count < len(data):
            self.inbox.appendleft(data[count:])
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        return self._deliver(b"".join(buffers))

    def send_file(self, file: File, position: int, size: int) -> int:
        return self._deliver(file.read_at(position, size))

    def _deliver(self, data: bytes) -> int:
        if self.other is None or self.other.is_closed:
            raise ConnectionResetError("the peer is gone")
        if self.window is not None:
            data = data[: self.window]
            self.window -= len(data)
        if data:
            self.other.inbox.append(data)
            self._spawn.soon(self.other.wake)
        return len(data)

    def wake(self) -> None:
        while self.inbox and self._on_readable is not None and not self.is_closed:
            self._on_readable()

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        self._on_readable = callback
        if callback is not None and self.inbox:
            self._spawn.soon(self.wake)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._on_writable = callback

    def open_window(self, size: int | None) -> None:
        self.window = size
        if self._on_writable is not None:
            self._spawn.soon(self._on_writable)

    def close(self) -> None:
        self.is_closed = True
        self._on_readable = self._on_writable = None
        if self.other is not None and self.other._on_readable is not None:
            self._spawn.soon(self.other._closed_by_peer)

    def _closed_by_peer(self) -> None:
        if self._on_readable is not None:
            self._on_readable()


class VirtualListener:
    def __init__(self, address: tuple[str, int], on_connect: Callable[[Stream], None]) -> None:
        self.address = address
        self.on_connect: Callable[[Stream], None] | None = on_connect

    def close(self) -> None:
        self.on_connect = None


class VirtualNetwork:
    def __init__(self, spawn: VirtualSpawn) -> None:
        self._spawn = spawn
        # The newest last.
        self._listeners: dict[int, VirtualListener] = {}

    def listen(self, host: str, port: int, on_connect: Callable[[Stream], None]) -> VirtualListener:
        listener = self._listeners[port] = VirtualListener((host, port), on_connect)
        return listener

    def connect(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        """There is nobody else in this world."""
        self._spawn.soon(lambda: done(None, ConnectionRefusedError("nobody listens")))

    def dial(self, peer: str, port: int | None = None) -> VirtualStream:
        """By default to the listener that was made last."""
        on_connect = self._listeners[next(reversed(self._listeners)) if port is None else port].on_connect
        assert on_connect is not None, "nobody listens"
        ours, theirs = VirtualStream(self._spawn, "broker"), VirtualStream(self._spawn, peer)
        ours.other, theirs.other = theirs, ours
        on_connect(theirs)
        return ours


class Client:
    """A raw client inside the world: one connection, requests numbered in order."""

    def __init__(self, world: World, peer: str = "127.0.0.1", client_id: str = "test") -> None:
        self._world = world
        self._client_id = client_id.encode()
        self.stream = world.network.dial(peer)
        self._sent: deque[tuple[int, type[Message], int]] = deque()
        self._correlation_id = 0
        self._received = bytearray()
        self.answers: list[Any] = []
        self.stream.on_readable(self._readable)

    @property
    def is_closed(self) -> bool:
        return self.stream.is_closed or self.stream.other is None or self.stream.other.is_closed

    def send(self, request: Message, version: int, *, expects_answer: bool = True) -> None:
        api = APIS[type(request).KEY]
        self._correlation_id += 1
        body = b"".join(bytes(part) for part in encoder(type(request), version)(request))  # type: ignore[arg-type]
        name = self._client_id
        header = struct.pack(">hhih", api.key, version, self._correlation_id, len(name)) + name
        header += b"\0" * (api.request_header_version(version) - 1)
        if expects_answer:
            self._sent.append((self._correlation_id, api.response, version))
        self.stream.send([struct.pack(">i", len(header) + len(body)) + header + body])

    def call(self, request: Message, version: int, within_ms: int = 60_000) -> Any:
        """Send, and let time pass until the answer is there."""
        count = len(self.answers)
        self.send(request, version)
        self._world.run_until(lambda: len(self.answers) > count, within_ms)
        return self.answers[-1]

    def _readable(self) -> None:
        buffer = bytearray(1 << 20)
        while count := self.stream.recv_into(memoryview(buffer)):
            self._received += buffer[:count]
        while len(self._received) >= 4:
            size = struct.unpack_from(">i", self._received)[0]
            if len(self._received) < 4 + size:
                break
            frame = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            correlation_id, response, version = self._sent.popleft()
            assert struct.unpack_from(">i", frame)[0] == correlation_id, (
                "answers in the order of the requests"
            )
            skip = 4 + APIS[response.KEY].response_header_version(version)
            self.answers.append(decode(response, version, frame[skip:]))


class VirtualProcesses:
    """Jobs that take a moment, one after the other."""

    def __init__(self, spawn: VirtualSpawn, files: FakeFiles) -> None:
        self._spawn = spawn
        self._files = files

    def run(
        self,
        job: Callable[[Any, Any], Any],
        argument: Any,
        done: Callable[[Any, Exception | None], None],
        *,
        bytes_per_second: float = inf,
    ) -> None:
        self._spawn.in_thread(lambda: job(self._files, argument), done, lane="job")

    def close(self) -> None:
        """Nothing runs in the background here."""


class World:
    """One broker and its surroundings, all made from a seed."""

    def __init__(
        self,
        settings: dict[str, str] | None = None,
        *,
        seed: int = 1,
        files: FakeFiles | None = None,
        admin: str | None = None,
        metrics: tuple[str, int] | None = None,
    ):
        self.clock = FakeClock() if files is None else files.clock
        self.files = files or FakeFiles(self.clock)
        self.spawn = VirtualSpawn(self.clock)
        self.network = VirtualNetwork(self.spawn)
        self.failures: list[str] = []
        self.environment = Environment(
            clock=self.clock,
            files=self.files,
            network=self.network,
            random=random.Random(seed),
            spawn=self.spawn,
            processes=VirtualProcesses(self.spawn, self.files),
        )
        options = ServeOptions(
            node_id=1,
            data_dirs=("/data",),
            listen=None if settings and "listeners" in settings else ("127.0.0.1", 9092),
            advertise=None,
            rack=None,
            settings=settings or {},
            config_file=None,
            admin=admin,
            metrics=metrics,
        )
        config, _ = BrokerConfig.load(options.settings)
        ready: list[object] = []
        self.node = Node(
            self.environment,
            options,
            config,
            Logger(node=1),
            on_ready=ready.append,
            on_failure=self.failures.append,
        )
        self.broker = self.node.broker
        self.node.start()
        self.run_until(lambda: bool(ready or self.failures), 60_000)

    def client(self, peer: str = "127.0.0.1", client_id: str = "test") -> Client:
        return Client(self, peer, client_id)

    def run_for(self, duration_ms: int) -> None:
        self.spawn.run_until(self.clock.now_ms() + duration_ms)

    def run_until(self, condition: Callable[[], bool], within_ms: int) -> None:
        deadline_ms = self.clock.now_ms() + within_ms
        while not condition():
            assert self.clock.now_ms() < deadline_ms, f"not within {within_ms} ms of virtual time"
            self.run_for(1)

    def restarted(
        self, *, clean: bool, settings: dict[str, str] | None = None, admin: str | None = None
    ) -> World:
        """The same disk under a new process: after a clean stop, or as a killed one left it."""
        if clean:
            self.node.close()
        return World(settings, files=self.files, admin=admin)
