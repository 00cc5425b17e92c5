"""Cut received bytes into frames. Sans-IO: the shell asks where to receive and reports how much arrived.

A large response is received directly into its own buffer, and the caller gets its records as a view of that buffer:
only the kernel copies the bytes. Buffers are never given back explicitly: ``Buffers`` notices that the last view is
gone, because a bytearray with views cannot be resized.
"""

from __future__ import annotations

from struct import Struct

from penstock.protocol.errors import DecodeError
from penstock.protocol.framing import LENGTH_BYTES

# Receive buffer for small frames.
SCRATCH_BYTES = 64 * 1024
# Buffer sizes are multiples of this, so that a buffer can be reused for a slightly longer response.
STEP_BYTES = 1024 * 1024
# Kept for reuse, lent or not: a new buffer costs mostly page faults.
KEPT_BYTES_MAX = 96 * 1024 * 1024
# No response is larger: a peer that announces more is not a Kafka broker.
FRAME_BYTES_MAX = 1024 * 1024 * 1024
# The limit during the handshake. The first bytes of a TLS or HTTP server read as a far larger length.
HANDSHAKE_BYTES_MAX = 1024 * 1024

_length_of = Struct(">i").unpack_from


class Buffers:
    """Large buffers, each lent until its last view is gone."""

    def __init__(self, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._kept: list[bytearray] = []
        self._kept_bytes = 0
        self._kept_bytes_max = kept_bytes_max

    def take(self, size: int) -> memoryview:
        """A view of exactly this size on a free or new buffer."""
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
            # The idle ones have the wrong size.
            self._kept = [kept for kept in self._kept if not is_free(kept)]
            self._kept_bytes = sum(map(len, self._kept))
        if self._kept_bytes + len(buffer) <= self._kept_bytes_max:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)


def is_free(buffer: bytearray) -> bool:
    """Whether the buffer has no views. Only then can it be resized; here its size does not change in the end."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


class Inbox:
    """The received bytes of one connection."""

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
        """The frames, without length prefixes, that these bytes complete. The caller may keep them.

        Raises:
            DecodeError: an impossible length.
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
