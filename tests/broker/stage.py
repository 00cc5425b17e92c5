"""A stage for the server and its connections without a network: the test is the loop, the clock and the peer.

For what would take minutes otherwise (timeouts), or cannot be arranged in another process: where a read ends,
when an fsync is done. With a data directory there is a real broker behind the connections, on real files.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.config import BrokerConfig
from penstock.broker.handlers.routes import make_route
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.server import Server
from penstock.broker.options import ServeOptions
from penstock.environment import Buffer, Environment, File, Stream
from penstock.machine import MachineFiles
from penstock.metadata.image import Image
from penstock.protocol.apis import APIS, Api
from penstock.protocol.listeners import CLIENTS
from penstock.protocol.schema import Message, decoder
from tests.broker.wire import encode_request


class ManualClock:
    def __init__(self) -> None:
        self.ms = 1_000_000
        # Real at the start: files have real times too.
        self._epoch_ms = time.time_ns() // 1_000_000 - self.ms

    def now_ms(self) -> int:
        return self.ms

    def work_us(self) -> int:
        return self.ms * 1000

    def boot_id(self) -> str:
        return ""

    def wall_ms(self) -> int:
        return self._epoch_ms + self.ms


class ManualTimer:
    def __init__(self, due_ms: float, callback: Callable[[], None]) -> None:
        self.due_ms = due_ms
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualSpawn:
    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._ready: list[Callable[[], None]] = []
        self._timers: list[ManualTimer] = []
        # Whether work for threads waits for the test to release it.
        self.holds_threads = False
        self.held: list[tuple[Callable[[], Any], Callable[[Any, Exception | None], None]]] = []

    def soon(self, callback: Callable[[], None]) -> None:
        self._ready.append(callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(self._clock.ms + delay_ms, callback)
        self._timers.append(timer)
        return timer

    def in_thread(
        self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None], *, lane: str
    ) -> None:
        self.held.append((work, done))
        if not self.holds_threads:
            self.release()

    def release(self, error: Exception | None = None) -> None:
        """Let the threads do what they have been given so far, or fail at it."""
        held, self.held = self.held, []
        for work, done in held:
            if error is None:
                done(work(), None)
            else:
                done(None, error)
        self.run()

    def run(self) -> None:
        """Everything that is ready or due."""
        while True:
            due = [timer for timer in self._timers if timer.due_ms <= self._clock.ms]
            if not due and not self._ready:
                return
            self._timers = [timer for timer in self._timers if timer not in due]
            ready, self._ready = self._ready, []
            for callback in ready:
                callback()
            for timer in due:
                if not timer.is_cancelled:
                    timer.callback()


class ScriptedStream:
    """A peer that sends what the test says, and takes as much as the test allows."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.sent = bytearray()
        self.room = 1 << 30
        self.is_closed = False
        self._incoming = b""
        self._readable: Callable[[], None] | None = None
        self._writable: Callable[[], None] | None = None

    def arrive(self, data: bytes) -> None:
        """Bytes that can be read now, all at once or as far as there is a buffer for them."""
        self._incoming += data
        self.pump()

    def pump(self) -> None:
        """As a loop does: tell again that there is something to read as long as there is."""
        left = -1
        while self._readable is not None and len(self._incoming) != left:
            left = len(self._incoming)
            self._readable()
            if not self._incoming:
                return

    @property
    def is_read(self) -> bool:
        return self._readable is not None

    def take(self, count: int) -> None:
        """The peer reads this much."""
        self.room += count
        if self._writable is not None:
            self._writable()

    def recv_into(self, buffer: memoryview) -> int | None:
        if not self._incoming:
            return None
        count = min(len(buffer), len(self._incoming))
        buffer[:count] = self._incoming[:count]
        self._incoming = self._incoming[count:]
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        data = b"".join(buffers)[: self.room]
        self.sent += data
        self.room -= len(data)
        return len(data)

    def send_file(self, file: File, position: int, size: int) -> int:
        raise AssertionError("there are no files on this stage")

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        self._readable = callback

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._writable = callback

    def close(self) -> None:
        self.is_closed = True


class Stage:
    def __init__(self, data_dir: Path | None = None, **settings: str) -> None:
        config, _ = BrokerConfig.load({name.replace("_", "."): text for name, text in settings.items()})
        self.clock = ManualClock()
        self.spawn = ManualSpawn(self.clock)
        # What the server said about connections that it closed, and why the broker wanted to stop.
        self.refused: list[str] = []
        # The same with everything that it said, and about requests that failed.
        self.said: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._connect: Callable[[Any], None] = lambda _: None
        self._streams: list[ScriptedStream] = []
        # It listens; nothing on the stage connects to another broker.
        network: Any = self
        self.environment = Environment(
            clock=self.clock,
            files=MachineFiles(),
            network=network,
            random=random.Random(1),
            spawn=self.spawn,
            processes=SimpleNamespace(close=lambda: None),
        )
        logger: Any = SimpleNamespace(
            info=lambda event, **values: None,
            error=lambda event, **values: None,
            exception=lambda event, **values: self.said.append({"event": event, **values}),
            warning=self._warned,
        )
        broker: Any = SimpleNamespace(
            encoded_api_versions={},
            image=Image(),
            connection_limits=ConnectionLimits(config.max_connections, config.max_connections_per_ip),
            storage=SimpleNamespace(read_failed=lambda path, error: None),
        )
        if data_dir is not None:
            options = ServeOptions(1, (str(data_dir),), ("127.0.0.1", 9092), None, None, {}, None)
            active: list[bool] = []
            broker = Broker(
                self.environment,
                options,
                config,
                logger,
                on_failure=self.failures.append,
                on_active=lambda: active.append(True),
            )
            broker.start([(CLIENTS, ("127.0.0.1", 9092))], None)
            while not active:
                self.clock.ms += 1
                self.spawn.run()
        self.broker = broker
        self.server = Server(
            self.environment,
            broker,
            config,
            logger,
            make_route=make_route,
            limits=broker.connection_limits,
            on_read_failed=broker.storage.read_failed,
        )
        self.server.listen("127.0.0.1", 0)

    def _warned(self, event: str, **values: Any) -> None:
        self.refused.append(str(values.get("reason", event)))
        self.said.append({"event": event, **values})

    def listen(self, host: str, port: int, on_connect: Callable[[Any], None]) -> Any:
        self._connect = on_connect
        return SimpleNamespace(address=(host, port), close=lambda: None)

    def connect(self, peer: str = "10.0.0.1") -> ScriptedStream:
        stream = ScriptedStream(peer)
        self._streams.append(stream)
        self.accept(stream)
        return stream

    def accept(self, stream: Stream) -> None:
        """Let a peer connect by a stream of any kind."""
        self._connect(stream)

    def pass_time(self, seconds: float, step_s: float = 1.0) -> None:
        """Let time pass, a second at a time, and everything run that becomes due."""
        end_ms = self.clock.ms + int(seconds * 1000)
        while self.clock.ms < end_ms:
            self.clock.ms = min(end_ms, self.clock.ms + int(step_s * 1000))
            self.spawn.run()
            for stream in self._streams:
                stream.pump()


class Peer:
    """A client on the stage: sends requests, and reads what has come back so far."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._stream = stage.connect()
        self._asked: list[tuple[Api, int]] = []

    def send(self, request: Message, version: int) -> None:
        self._asked.append((APIS[request.KEY], version))
        self._stream.arrive(encode_request(request, version))
        self._stage.spawn.run()

    def call(self, request: Message, version: int) -> Any:
        self.send(request, version)
        (answer,) = self.answers()
        return answer

    def answers(self) -> list[Any]:
        """Every answer that has come and was not taken yet."""
        found = []
        sent = self._stream.sent
        while sent:
            end = 4 + int.from_bytes(sent[:4], "big")
            assert len(sent) >= end, "an answer that is cut short"
            api, version = self._asked.pop(0)
            content = memoryview(bytes(sent[:end]))
            response, _ = decoder(api.response, version)(content, 8 + api.response_header_version(version))
            found.append(response)
            del sent[:end]
        return found

    @property
    def is_closed(self) -> bool:
        return self._stream.is_closed
