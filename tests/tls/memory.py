"""Two ends of a connection in memory, and an event loop in virtual time that calls them as a real one would.

Readiness is level-triggered, as ``environment.Stream`` has it: in every turn, a stream that can be read or written
calls its owner. How many bytes a call moves, and how many fit between the two ends, is up to the test.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.environment import Buffer, File


class Turns:
    """``environment.Spawn``, and the loop itself."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.count = 0
        self.streams: list[MemoryStream] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[MemoryTimer] = []

    def soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> MemoryTimer:
        timer = MemoryTimer(self.now_ms + delay_ms, callback)
        self._timers.append(timer)
        return timer

    def in_thread(
        self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None], *, lane: str
    ) -> None:
        raise AssertionError("TLS uses no thread")

    @property
    def timers(self) -> int:
        return sum(timer.callback is not None for timer in self._timers)

    def turn(self) -> bool:
        """One pass of the loop; False if nothing was ready."""
        self.count += 1
        ready: list[Callable[[], None]] = list(self._soon)
        self._soon.clear()
        for stream in list(self.streams):
            ready += stream.ready()
        for callback in ready:
            callback()
        return bool(ready)

    def run_until(self, condition: Callable[[], bool], turns: int = 2_000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError(f"not within {turns} turns")

    def settle(self, turns: int = 2_000) -> None:
        """Run until nothing is ready. Fails if something calls itself again and again."""
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError(f"still busy after {turns} turns")

    def wait(self, duration_ms: float) -> None:
        self.now_ms += duration_ms
        for timer in self._timers:
            if timer.callback is not None and timer.at_ms <= self.now_ms:
                callback, timer.callback = timer.callback, None
                callback()


class MemoryTimer:
    def __init__(self, at_ms: float, callback: Callable[[], None]) -> None:
        self.at_ms = at_ms
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class MemoryStream:
    """``environment.Stream``: one end."""

    def __init__(self, turns: Turns, peer: str) -> None:
        self.peer = peer
        self.other: MemoryStream = self
        self.inbox = bytearray()
        self.is_closed = False
        self.is_broken = False
        # Bytes that one call moves at most, and that fit into the inbox of the other end.
        self.recv_bytes_max = 1 << 30
        self.send_bytes_max = 1 << 30
        self.inbox_bytes_max = 1 << 30
        self.received_bytes = 0
        self.sent_bytes = 0
        self.recv_calls = 0
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        turns.streams.append(self)

    def recv_into(self, buffer: memoryview) -> int | None:
        self.recv_calls += 1
        if self.is_closed or self.is_broken:
            return 0
        count = min(len(buffer), len(self.inbox), self.recv_bytes_max)
        if count == 0:
            return 0 if self.other.is_closed else None
        buffer[:count] = self.inbox[:count]
        del self.inbox[:count]
        self.received_bytes += count
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self.is_closed:
            raise OSError(errno.EBADF, "the stream is closed")
        if self.is_broken or self.other.is_closed:
            raise ConnectionResetError(errno.ECONNRESET, "the connection is gone")
        data = b"".join(buffers)[: self._room()]
        self.other.inbox += data
        self.sent_bytes += len(data)
        return len(data)

    def send_file(self, file: File, position: int, size: int) -> int:
        raise AssertionError("the bytes of a file are encrypted first")

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        self._on_readable = callback

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._on_writable = callback

    def close(self) -> None:
        self.is_closed = True
        self._on_readable = self._on_writable = None

    def ready(self) -> list[Callable[[], None]]:
        """The callbacks of this turn. One of them may unset the next."""
        gone = self.other.is_closed or self.is_broken
        calls: list[Callable[[], None]] = []
        if self._on_readable is not None and (self.inbox or gone):
            calls.append(self._call_reader)
        if self._on_writable is not None and (self._room() or gone):
            calls.append(self._call_writer)
        return calls

    def _call_reader(self) -> None:
        if self._on_readable is not None:
            self._on_readable()

    def _call_writer(self) -> None:
        if self._on_writable is not None:
            self._on_writable()

    @property
    def is_watched(self) -> bool:
        return self._on_readable is not None or self._on_writable is not None

    def _room(self) -> int:
        return max(0, min(self.send_bytes_max, self.other.inbox_bytes_max - len(self.other.inbox)))


def memory_pair(turns: Turns) -> tuple[MemoryStream, MemoryStream]:
    near, far = MemoryStream(turns, "10.0.0.1"), MemoryStream(turns, "10.0.0.2")
    near.other, far.other = far, near
    return near, far
