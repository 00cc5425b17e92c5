"""Streams between nodes before they trust each other: small frames, one at a time, and bytes read ahead."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from penstock.environment import Buffer, File, Spawn, Stream
from penstock.protocol.framing import LENGTH_BYTES

CLOSED = "the peer closed the connection"

_length = struct.Struct(">i")


class FramedStream:
    """Takes and sends frames of a stream until ``release`` gives it to its next owner."""

    def __init__(
        self,
        stream: Stream,
        frame_bytes_max: int,
        *,
        on_frame: Callable[[memoryview], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """``on_failed(reason)`` is called once, unless the stream was released; closing it is the owner's task."""
        self._stream = stream
        self._frame_bytes_max = frame_bytes_max
        self._on_frame = on_frame
        self._on_failed = on_failed
        self._received = bytearray()
        self._scratch = memoryview(bytearray(LENGTH_BYTES + frame_bytes_max))
        self._unsent = b""
        self._is_over = False
        stream.on_readable(self._readable)

    def send(self, frame: bytes) -> None:
        self._unsent += frame
        self._flush()

    def release(self) -> None:
        """Stop. Fails if the peer has sent more than it was asked for: nobody may speak ahead of an answer."""
        if self._is_over:
            return
        if self._received or self._unsent:
            self._fail("the peer did not wait for the answer")
            return
        self._stop()

    def stop(self) -> None:
        """Stop without calling ``on_failed``."""
        if not self._is_over:
            self._stop()

    def _stop(self) -> None:
        self._is_over = True
        self._stream.on_readable(None)
        self._stream.on_writable(None)

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self._stop()
            self._on_failed(reason)

    def _readable(self) -> None:
        try:
            count = self._stream.recv_into(self._scratch)
        except OSError as error:
            self._fail(str(error))
            return
        if count is None:
            return
        if count == 0:
            self._fail(CLOSED)
            return
        self._received += self._scratch[:count]
        self._take()

    def _take(self) -> None:
        received = self._received
        if len(received) < LENGTH_BYTES:
            return
        size = _length.unpack_from(received)[0]
        if not 0 < size <= self._frame_bytes_max:
            self._fail(f"a frame of {size} bytes before the node was admitted")
        elif len(received) > LENGTH_BYTES + size:
            self._fail("the peer did not wait for the answer")
        elif len(received) == LENGTH_BYTES + size:
            frame = memoryview(bytes(received))[LENGTH_BYTES:]
            received.clear()
            self._on_frame(frame)

    def _flush(self) -> None:
        if self._is_over:
            return
        try:
            if self._unsent:
                self._unsent = self._unsent[self._stream.send([self._unsent]) :]
        except OSError as error:
            self._fail(str(error))
            return
        self._stream.on_writable(self._flush if self._unsent else None)


class ReplayedStream:
    """A stream whose first bytes were read already: they are read once more."""

    __slots__ = ("_callback", "_first", "_inner", "_is_soon", "_spawn", "peer")

    def __init__(self, inner: Stream, first: bytes, spawn: Spawn) -> None:
        self._inner = inner
        self._first = first
        self._spawn = spawn
        self._callback: Callable[[], None] | None = None
        self._is_soon = False
        self.peer = inner.peer

    def recv_into(self, buffer: memoryview) -> int | None:
        if not self._first:
            return self._inner.recv_into(buffer)
        count = min(len(buffer), len(self._first))
        buffer[:count] = self._first[:count]
        self._first = self._first[count:]
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        return self._inner.send(buffers)

    def send_file(self, file: File, position: int, size: int) -> int:
        return self._inner.send_file(file, position, size)

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        self._callback = callback
        self._inner.on_readable(callback)
        self._call_soon()

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._inner.on_writable(callback)

    def close(self) -> None:
        self._callback = None
        self._inner.close()

    def _call_soon(self) -> None:
        # The inner stream does not know that there is something to read.
        if self._first and self._callback is not None and not self._is_soon:
            self._is_soon = True
            self._spawn.soon(self._soon)

    def _soon(self) -> None:
        self._is_soon = False
        if self._first and self._callback is not None:
            self._callback()
            self._call_soon()
