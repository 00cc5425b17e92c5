"""Connections to the other nodes of the cluster, for requests of this node.

There is one connection for each (node, channel). Responses come in the order of the requests, so requests that may
wait long (a long poll, a change that has to be committed) have their own channel, and never delay a heartbeat. A
connection is opened when first needed, kept, and opened again by the next call after it was lost.

Careful: a response may hold views of the receive buffer, which are valid only until ``done`` returns. And after
``done(None)`` the request may or may not have been carried out.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.environment import Buffer, Environment, Stream, Timer
from penstock.protocol.apis import APIS
from penstock.protocol.errors import DecodeError
from penstock.protocol.requests import InFlight
from penstock.protocol.schema import Message

CALL_TIMEOUT_MS = 5_000
# Between a failed attempt to connect and the next one. Callers have their own retry delays.
RECONNECT_MS = 20
BUFFER_BYTES = 64 * 1024
# A buffer that has grown beyond this for one large response is dropped.
BUFFER_KEPT_BYTES = 16 * 1024 * 1024
ANSWER_BYTES_MAX = 256 * 1024 * 1024
CLIENT_ID = b"penstock"
# Pauses between the attempts of a probe. A killed process loses its connections one by one, and its listening
# socket perhaps last: an attempt made at once may still succeed, although the process is gone.
PROBE_AGAIN_MS = (50, 150, 300, 500)

Done = Callable[[Any | None], None]
# As ``environment.Network.connect``.
Connect = Callable[[str, int, Callable[[Stream | None, OSError | None], None]], None]

_length = struct.Struct(">i")


class Peers:
    def __init__(self, environment: Environment, connect: Connect | None = None) -> None:
        """``connect`` opens connections for requests, by default in plain text."""
        self._environment = environment
        self._connect = connect or environment.network.connect
        self._addresses: dict[int, tuple[str, int]] = {}
        self._connections: dict[tuple[int, str], _Connection] = {}
        self._is_closed = False
        # Called with (node, channel) when an established connection ended and the node refuses new ones.
        self.on_lost: list[Callable[[int, str], None]] = []

    def set_address(self, node_id: int, host: str, port: int) -> None:
        if self._addresses.get(node_id) == (host, port):
            return
        self._addresses[node_id] = (host, port)
        for (node, _), connection in list(self._connections.items()):
            if node == node_id:
                connection.close()

    def call(
        self,
        node_id: int,
        channel: str,
        request: Message,
        version: int,
        done: Done,
        *,
        timeout_ms: int = CALL_TIMEOUT_MS,
    ) -> None:
        """Send a request; ``done(response)`` once, with None if none came. Never called before this returns."""
        address = self._addresses.get(node_id)
        if address is None or self._is_closed:
            self._environment.spawn.soon(lambda: done(None))
            return
        self._connection(node_id, channel).call(address, request, version, done, timeout_ms)

    def is_refused(self, node_id: int, channel: str) -> bool:
        """Whether the last attempt to connect was refused: no process listens there."""
        connection = self._connections.get((node_id, channel))
        return connection is not None and connection.is_refused

    def probe(self, node_id: int, done: Callable[[bool], None]) -> None:
        """Call ``done(True)`` as soon as the node refuses a connection, ``done(False)`` if it never does."""
        address = self._addresses.get(node_id)
        if address is None:
            return
        environment = self._environment
        pauses_ms = iter(PROBE_AGAIN_MS)

        def connected(stream: Stream | None, error: OSError | None) -> None:
            if stream is not None:
                stream.close()
            pause_ms = next(pauses_ms, None)
            if self._is_closed:
                return
            if isinstance(error, ConnectionRefusedError) or pause_ms is None:
                done(isinstance(error, ConnectionRefusedError))
            else:
                environment.spawn.later(pause_ms, look)

        def look() -> None:
            if not self._is_closed:
                environment.network.connect(*address, connected)

        look()

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self._connections.values()):
            connection.close()

    def _connection(self, node_id: int, channel: str) -> _Connection:
        connection = self._connections.get((node_id, channel))
        if connection is None:
            connection = self._connections[node_id, channel] = _Connection(
                self._environment, self._connect, lambda: self._lost(node_id, channel)
            )
        return connection

    def _lost(self, node_id: int, channel: str) -> None:
        def probed(is_refused: bool) -> None:
            if is_refused and not self._is_closed:
                for listener in self.on_lost:
                    listener(node_id, channel)

        if not self._is_closed:
            self.probe(node_id, probed)


class _Waiting(NamedTuple):
    """A request that waits for its response."""

    done: Done
    timer: Timer


class _Connection:
    def __init__(self, environment: Environment, connect: Connect, on_lost: Callable[[], None]) -> None:
        self._environment = environment
        self._open = connect
        self._on_lost = on_lost
        self._stream: Stream | None = None
        self._is_connecting = False
        self._is_writing = False
        self.is_refused = False
        self._no_attempt_before_ms = 0
        # Grows with each connection, so that callbacks of an older one can be told apart.
        self._generation = 0
        self._in_flight: InFlight[_Waiting] = InFlight(CLIENT_ID)
        self._unsent: deque[Buffer] = deque()
        # Received and not processed yet: buffer[start:end].
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = 0
        self._end = 0

    def call(
        self, address: tuple[str, int], request: Message, version: int, done: Done, timeout_ms: int
    ) -> None:
        spawn = self._environment.spawn
        if self._stream is None and not self._is_connecting:
            if self._environment.clock.now_ms() < self._no_attempt_before_ms:
                spawn.soon(lambda: done(None))
                return
            self._connect(address)
        generation = self._generation
        timer = spawn.later(timeout_ms, lambda: self._timed_out(generation))
        self._unsent += self._in_flight.add(APIS[type(request).KEY], version, request, _Waiting(done, timer))
        if self._stream is not None:
            self._flush()

    def close(self) -> None:
        """End the connection; all waiting requests get ``done(None)``."""
        self._generation += 1
        self._is_connecting = False
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._is_writing = False
        self._start = self._end = 0
        self._unsent.clear()
        waiting = self._in_flight.clear()
        for each in waiting:
            each.timer.cancel()
        if waiting:
            # Not from within the call that found the connection broken.
            self._environment.spawn.soon(lambda: _tell(waiting))

    def _connect(self, address: tuple[str, int]) -> None:
        self._is_connecting = True
        generation = self._generation

        def connected(stream: Stream | None, error: OSError | None) -> None:
            if generation != self._generation:
                if stream is not None:
                    stream.close()
                return
            self._is_connecting = False
            self.is_refused = isinstance(error, ConnectionRefusedError)
            if stream is None:
                self._no_attempt_before_ms = self._environment.clock.now_ms() + RECONNECT_MS
                self.close()
                return
            self._stream = stream
            stream.on_readable(self._readable)
            self._flush()

        self._open(*address, connected)

    def _timed_out(self, generation: int) -> None:
        # The responses after a missing one would not come either.
        if generation == self._generation:
            self.close()

    def _lost(self) -> None:
        self.close()
        self._on_lost()

    def _flush(self) -> None:
        stream = self._stream
        if stream is None:
            return
        unsent = self._unsent
        try:
            while unsent:
                sent = stream.send(list(unsent))
                if not sent:
                    break
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
        except OSError:
            self._lost()
            return
        if self._is_writing != bool(unsent):
            self._is_writing = bool(unsent)
            stream.on_writable(self._flush if unsent else None)

    def _readable(self) -> None:
        stream = self._stream
        assert stream is not None
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            self._make_room()
        try:
            count = stream.recv_into(self._buffer[self._end :])
        except OSError:
            count = 0
        if count is None:
            return
        if count == 0:
            self._lost()
            return
        self._end += count
        generation = self._generation
        while generation == self._generation and self._take():
            pass

    def _make_room(self) -> None:
        left = self._end - self._start
        wanted = 4
        if left >= 4:
            wanted += _length.unpack_from(self._buffer, self._start)[0]
        rest = self._buffer[self._start : self._end]
        if wanted > len(self._buffer):
            larger = memoryview(bytearray(max(wanted, BUFFER_BYTES)))
            larger[:left] = rest
            self._buffer = larger
        else:
            self._buffer[:left] = bytes(rest)
        self._start, self._end = 0, left

    def _take(self) -> bool:
        """Pass one whole response to its caller; False when there is none."""
        left = self._end - self._start
        if left < 4:
            return False
        size = _length.unpack_from(self._buffer, self._start)[0]
        if not 4 <= size <= ANSWER_BYTES_MAX:
            self._lost()
            return False
        if left < 4 + size:
            if self._start + 4 + size > len(self._buffer):
                self._make_room()
            return False
        frame = self._buffer[self._start + 4 : self._start + 4 + size]
        self._start += 4 + size
        try:
            waiting, answer = self._in_flight.answered(frame)
        except DecodeError:
            self._lost()
            return False
        waiting.timer.cancel()
        waiting.done(answer)
        if self._start == self._end and len(self._buffer) > BUFFER_KEPT_BYTES:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
            self._start = self._end = 0
        return True


def _tell(waiting: list[_Waiting]) -> None:
    for each in waiting:
        each.done(None)
