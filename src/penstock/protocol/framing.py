"""Cuts a byte stream into frames, in pooled buffers. Sans-IO: the connection asks where to receive, says how
much arrived, and takes whole frames out.

A frame is a four-byte length and that many bytes. Most frames are small: they are cut out of a shared-size
buffer that goes back to the pool as soon as it is empty, so an idle connection holds no memory. A large frame
gets a buffer that grows as its bytes really arrive, so a peer that promises 100 MB and falls silent costs little.

The one thing to get right: a frame is a view into the buffer and is valid only until the next ``space()``.
"""

from __future__ import annotations

import struct

from penstock.protocol.errors import DecodeError

READ_BYTES = 256 * 1024
# Left over after the whole frames were taken: kept as a copy, so that the buffer can serve someone else.
LEFTOVER_COPY_BYTES = 16 * 1024
# A frame up to this size gets its buffer at once; a larger one grows by doubling as its bytes arrive.
TRUSTED_FRAME_BYTES = 4 * 1024 * 1024
POOLED_BYTES_MAX = 32 * 1024 * 1024
# Only a Produce carries data; nothing else a client sends has a reason to be larger than this.
CONTROL_FRAME_BYTES_MAX = 16 * 1024 * 1024
PRODUCE_KEY = 0

_length_of = struct.Struct(">i").unpack_from
_key_of = struct.Struct(">h").unpack_from


class BufferPool:
    """Buffers of 256 KB, 512 KB, 1 MB, … lent to connections; a fresh large one is mostly page faults."""

    def __init__(self, bytes_max: int) -> None:
        # What may be lent out at once; a connection that gets none waits until another gives one back.
        self.bytes_max = bytes_max
        self.lent_bytes = 0
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0

    def acquire(self, size: int) -> memoryview | None:
        capacity = READ_BYTES
        while capacity < size:
            capacity *= 2
        # A single buffer is always lent, however large, or its frame could never be received.
        if self.lent_bytes and self.lent_bytes + capacity > self.bytes_max:
            return None
        self.lent_bytes += capacity
        free = self._free.get(capacity)
        if free:
            self._free_bytes -= capacity
            return free.pop()
        return memoryview(bytearray(capacity))

    def release(self, buffer: memoryview) -> None:
        capacity = len(buffer)
        self.lent_bytes -= capacity
        if self._free_bytes + capacity <= POOLED_BYTES_MAX:
            self._free_bytes += capacity
            self._free.setdefault(capacity, []).append(buffer)


class Framer:
    __slots__ = ("_buffer", "_end", "_frame_bytes_max", "_leftover", "_pool", "_start")

    def __init__(self, pool: BufferPool, frame_bytes_max: int) -> None:
        self._pool = pool
        self._frame_bytes_max = frame_bytes_max
        self._buffer: memoryview | None = None
        # What was received and not taken yet: buffer[start:end], or ``leftover`` while no buffer is held.
        self._start = 0
        self._end = 0
        self._leftover = b""

    @property
    def has_partial_frame(self) -> bool:
        return bool(self._leftover) or self._end > self._start

    def space(self) -> memoryview | None:
        """Where to receive next; None when the pool has nothing to lend."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._pool.acquire(READ_BYTES)
            if buffer is None:
                return None
            self._buffer = buffer
            self._start = 0
            self._end = len(self._leftover)
            buffer[: self._end] = self._leftover
            self._leftover = b""
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = 0
            return buffer
        capacity = len(buffer)
        wanted = 4 if end - start < 4 else 4 + _length_of(buffer, start)[0]
        if wanted > capacity and (wanted <= TRUSTED_FRAME_BYTES or end == capacity):
            larger = self._pool.acquire(
                wanted if wanted <= TRUSTED_FRAME_BYTES else min(wanted, 2 * capacity)
            )
            if larger is None:
                return None
            larger[: end - start] = buffer[start:end]
            self._pool.release(buffer)
            self._buffer = buffer = larger
            self._start, self._end = start, end = 0, end - start
        elif start and (end == capacity or start + wanted > capacity):
            buffer[: end - start] = bytes(buffer[start:end])
            self._start, self._end = start, end = 0, end - start
        if wanted > READ_BYTES:
            # Not a byte beyond a large frame: its buffer is free again once it is taken.
            return buffer[end : start + wanted]
        return buffer[end:]

    def received(self, count: int) -> None:
        self._end += count

    def next_frame(self) -> memoryview | None:
        """The next whole frame without its length, or None. Raises DecodeError for an impossible length."""
        buffer = self._buffer
        start = self._start
        available = self._end - start
        if buffer is None or available < 4:
            return None
        size: int = _length_of(buffer, start)[0]
        if size < 8 or size > self._frame_bytes_max:
            raise DecodeError(f"a frame of {size} bytes")
        if size > CONTROL_FRAME_BYTES_MAX and available >= 6 and _key_of(buffer, start + 4)[0] != PRODUCE_KEY:
            raise DecodeError(f"a frame of {size} bytes that is not a Produce")
        stop = start + 4 + size
        if available < 4 + size:
            return None
        self._start = stop
        return buffer[start + 4 : stop]

    def settle(self) -> None:
        """Give the buffer back if little or nothing is left in it. No frame may be in use any more."""
        buffer = self._buffer
        if buffer is None:
            return
        left = self._end - self._start
        if left <= LEFTOVER_COPY_BYTES:
            self._leftover = bytes(buffer[self._start : self._end])
            self._pool.release(buffer)
            self._buffer = None
            self._start = self._end = 0

    def close(self) -> None:
        if self._buffer is not None:
            self._pool.release(self._buffer)
            self._buffer = None
        self._leftover = b""
        self._start = self._end = 0
