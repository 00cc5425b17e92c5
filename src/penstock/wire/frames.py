"""Received bytes into frames. Sans-IO: the shell asks where to receive and says how much arrived.

A large answer is received straight into a buffer of its own, and its records are handed to the caller as a view
into that buffer: the bytes are copied once, by the kernel. What a newcomer gets wrong is who gives the buffer
back. Nobody does: ``Buffers`` finds out that the last view of it is gone, because a bytearray that is looked
into cannot be resized.
"""

from __future__ import annotations

from struct import Struct

from penstock.protocol.errors import DecodeError
from penstock.protocol.framing import LENGTH_BYTES

# What is received at once when no large frame is on its way.
SCRATCH_BYTES = 64 * 1024
# Buffers are made in steps of this, so that one fits again although the next answer is a little longer.
STEP_BYTES = 1024 * 1024
# Kept for reuse, lent or not: a fresh buffer is mostly page faults.
KEPT_BYTES_MAX = 96 * 1024 * 1024
# No answer is larger: whoever promises more is no Kafka broker.
FRAME_BYTES_MAX = 1024 * 1024 * 1024
# Before the handshake is over. What a TLS or HTTP server says reads as a length far above this.
HANDSHAKE_BYTES_MAX = 1024 * 1024

_length_of = Struct(">i").unpack_from


class Buffers:
    """Large buffers, each lent until the last view of it is gone."""

    def __init__(self, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._kept: list[bytearray] = []
        self._kept_bytes = 0
        self._kept_bytes_max = kept_bytes_max

    def take(self, size: int) -> memoryview:
        """A buffer of at least this size, cut to it."""
        wanted = -(-size // STEP_BYTES) * STEP_BYTES
        best: bytearray | None = None
        for buffer in self._kept:
            fits = wanted <= len(buffer) < 4 * wanted and (best is None or len(buffer) < len(best))
            if fits and is_free(buffer):
                best = buffer
        if best is None:
            best = bytearray(wanted)
            self._keep(best)
        return memoryview(best)[:size]

    def _keep(self, buffer: bytearray) -> None:
        if self._kept_bytes + len(buffer) > self._kept_bytes_max:
            # Those that lie idle were of the wrong size.
            self._kept = [kept for kept in self._kept if not is_free(kept)]
            self._kept_bytes = sum(map(len, self._kept))
        if self._kept_bytes + len(buffer) <= self._kept_bytes_max:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)


def is_free(buffer: bytearray) -> bool:
    """Whether no view into the buffer exists: only then may it change its size, here by nothing in the end."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


class Inbox:
    """What one connection has received."""

    __slots__ = ("_buffers", "_end", "_large", "_large_end", "_scratch", "_start", "frame_bytes_max")

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.frame_bytes_max = HANDSHAKE_BYTES_MAX
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        # Received and not taken: scratch[start:end], or the beginning of a large frame, never both.
        self._start = 0
        self._end = 0
        self._large: memoryview | None = None
        self._large_end = 0

    def space(self) -> memoryview:
        """Where to receive next."""
        if self._large is not None:
            return self._large[self._large_end :]
        return self._scratch[self._end :]

    def received(self, count: int) -> list[memoryview]:
        """The frames, without their lengths, that these bytes complete. They are the caller's to keep.

        Raises:
            DecodeError: a length that no answer has.
        """
        if self._large is not None:
            self._large_end += count
            if self._large_end < len(self._large):
                return []
            frame, self._large = self._large, None
            return [frame]
        self._end += count
        frames = []
        while (frame_or_none := self._next()) is not None:
            frames.append(frame_or_none)
        return frames

    def _next(self) -> memoryview | None:
        scratch, start, end = self._scratch, self._start, self._end
        if end - start >= LENGTH_BYTES:
            size: int = _length_of(scratch, start)[0]
            if not LENGTH_BYTES <= size <= self.frame_bytes_max:
                raise DecodeError(f"a frame of {size} bytes")
            start += LENGTH_BYTES
            if end - start >= size:
                self._start = start + size
                return memoryview(bytes(scratch[start : start + size]))
            if size > SCRATCH_BYTES - LENGTH_BYTES:
                large = self._buffers.take(size)
                large[: end - start] = scratch[start:end]
                self._large, self._large_end = large, end - start
                self._start = self._end = 0
                return None
        left = self._end - self._start
        if self._start:
            scratch[:left] = bytes(scratch[self._start : self._end])
            self._start, self._end = 0, left
        return None
