"""Connections to the other nodes of the cluster, over which this one asks them things.

One connection for each (node, channel). Answers come in the order of the requests, so whatever may wait long (a
long poll, a change that has to be committed) has a channel of its own, and a heartbeat never stands behind it.
A connection is made when first needed, kept, and made again by the next call after it was lost.

What a newcomer gets wrong: an answer may hold views of the receive buffer, and they are valid only until
``done`` returns. And ``done(None)`` means that nobody knows whether the request was carried out.
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
# After a failed attempt to connect, the next one is not made sooner: whoever calls has its own patience.
RECONNECT_MS = 20
BUFFER_BYTES = 64 * 1024
# A buffer that has grown for one large answer is let go of.
BUFFER_KEPT_BYTES = 16 * 1024 * 1024
ANSWER_BYTES_MAX = 256 * 1024 * 1024
CLIENT_ID = b"penstock"
# When to look again whether anybody listens. A process that is killed loses its connections one by one, and
# the socket it listens on perhaps last: whoever looks at once may still be let in, by nobody.
PROBE_AGAIN_MS = (50, 150, 300, 500)

Done = Callable[[Any | None], None]

_length = struct.Struct(">i")


class Peers:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._addresses: dict[int, tuple[str, int]] = {}
        self._connections: dict[tuple[int, str], _Connection] = {}
        self._is_closed = False
        # (node, channel): an established connection ended, and nobody listens there any more.
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
        """Send a request; ``done(answer)``, or ``done(None)`` when none came. Once, and never inside this."""
        address = self._addresses.get(node_id)
        if address is None or self._is_closed:
            self._environment.spawn.soon(lambda: done(None))
            return
        self._connection(node_id, channel).call(address, request, version, done, timeout_ms)

    def is_refused(self, node_id: int, channel: str) -> bool:
        """Whether the last attempt to connect was refused: nobody listens there."""
        connection = self._connections.get((node_id, channel))
        return connection is not None and connection.is_refused

    def probe(self, node_id: int, done: Callable[[bool], None]) -> None:
        """``done(True)`` as soon as nobody listens at the node's address; ``done(False)`` if somebody keeps to."""
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
                self._environment, lambda: self._lost(node_id, channel)
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
    """Who waits for an answer, and how long."""

    done: Done
    timer: Timer


class _Connection:
    def __init__(self, environment: Environment, on_lost: Callable[[], None]) -> None:
        self._environment = environment
        self._on_lost = on_lost
        self._stream: Stream | None = None
        self._is_connecting = False
        self._is_writing = False
        self.is_refused = False
        self._no_attempt_before_ms = 0
        # Grows with each connection, so that what belongs to an older one is known.
        self._generation = 0
        self._in_flight: InFlight[_Waiting] = InFlight(CLIENT_ID)
        self._unsent: deque[Buffer] = deque()
        # What was received and not taken is buffer[start:end].
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
        """End the connection; everybody who waits is told that no answer came."""
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

        self._environment.network.connect(*address, connected)

    def _timed_out(self, generation: int) -> None:
        # Whatever comes behind an answer that does not come would not come either.
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
        """Hand one whole answer to whoever asked; False when there is none."""
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
