"""Splits a byte stream into frames. Sans-IO: the connection asks where to receive (``space``), reports how much
arrived (``received``), takes whole frames (``next_frame``), and ends its turn (``settle``).

A frame is a four-byte length and that many bytes. Small frames are received, many at a time, into one scratch
buffer that all connections share, one turn each. The rest of an incomplete one is copied out, so an idle connection
holds no buffer and can always receive. A large incomplete frame gets a pooled buffer, which grows as bytes arrive:
a peer that announces 100 MB and then sends nothing costs little. The pool lends a limited amount in total; a
connection that gets no buffer waits.

Careful: a frame is a view that is valid only until ``settle``.
"""

from __future__ import annotations

import struct

from penstock.protocol.errors import DecodeError

READ_BYTES = 256 * 1024
# An incomplete frame up to this size is kept as a copy of the bytes that arrived, outside the pool.
SMALL_FRAME_BYTES = 16 * 1024
# A frame up to this size gets its buffer at once; a larger one grows by doubling as its bytes arrive.
TRUSTED_FRAME_BYTES = 4 * 1024 * 1024
BUFFER_STEP_BYTES = 64 * 1024
# Keep this much in free buffers: allocating a new one costs many page faults.
POOLED_BYTES_MAX = 32 * 1024 * 1024
# Only a Produce carries data; nothing else a client sends has a reason to be larger than this.
CONTROL_FRAME_BYTES_MAX = 16 * 1024 * 1024
PRODUCE_KEY = 0
LENGTH_BYTES = 4
# API key, version, correlation id and the length of the client id.
HEADER_BYTES_MIN = 10

_length_of = struct.Struct(">i").unpack_from
_key_of = struct.Struct(">h").unpack_from


class BufferPool:
    """Buffers in steps of 64 KB, lent to connections with a large incomplete frame."""

    def __init__(self, bytes_max: int) -> None:
        self.scratch = memoryview(bytearray(READ_BYTES))
        # Limit on ``lent_bytes``. The first buffer is always lent, however large.
        self.bytes_max = bytes_max
        self.lent_bytes = 0
        # The one buffer that may exceed the limit. Without it, incomplete frames that fill the pool would deadlock.
        self._overdrawn: memoryview | None = None
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0

    def acquire(self, size: int) -> memoryview | None:
        capacity = -(-size // BUFFER_STEP_BYTES) * BUFFER_STEP_BYTES
        if self.lent_bytes and self.lent_bytes + capacity > self.bytes_max:
            return None
        self.lent_bytes += capacity
        free = self._free.get(capacity)
        if free:
            self._free_bytes -= capacity
            return free.pop()
        return memoryview(bytearray(capacity))

    def exchange(self, buffer: memoryview, size: int) -> memoryview | None:
        """Exchange a full buffer for a larger one with the same content. The old one is released."""
        lent_bytes, self.lent_bytes = self.lent_bytes, 0
        may_overdraw = self._overdrawn is None or self._overdrawn is buffer
        fits = lent_bytes - len(buffer) + size <= self.bytes_max
        larger = self.acquire(size) if fits or may_overdraw else None
        self.lent_bytes += lent_bytes
        if larger is None:
            return None
        larger[: len(buffer)] = buffer
        self.release(buffer)
        if not fits:
            self._overdrawn = larger
        return larger

    def release(self, buffer: memoryview) -> None:
        capacity = len(buffer)
        self.lent_bytes -= capacity
        if buffer is self._overdrawn:
            self._overdrawn = None
        if self._free_bytes + capacity <= POOLED_BYTES_MAX:
            self._free_bytes += capacity
            self._free.setdefault(capacity, []).append(buffer)


class Framer:
    __slots__ = ("_end", "_lent", "_next_pool", "_pool", "_start", "_view", "frame_bytes_max")

    def __init__(self, pool: BufferPool, frame_bytes_max: int) -> None:
        self._pool = pool
        # The pool for the frames to come, if it changes.
        self._next_pool: BufferPool | None = None
        # May change between frames: before authentication it is smaller.
        self.frame_bytes_max = frame_bytes_max
        # Bytes received and not taken yet are view[start:end]. The view is the scratch buffer during a turn, and
        # between turns a copy of the rest or, when ``lent``, a buffer of the pool.
        self._view: memoryview | None = None
        self._start = 0
        self._end = 0
        self._lent = False

    @property
    def has_pooled_buffer(self) -> bool:
        return self._lent

    @property
    def partial_bytes(self) -> int:
        """Bytes that have arrived and are not taken yet."""
        return self._end - self._start

    def move(self, pool: BufferPool, frame_bytes_max: int) -> None:
        """Use another pool and limit for the frames to come; also during a turn."""
        self._next_pool = pool
        self.frame_bytes_max = frame_bytes_max

    def space(self) -> memoryview | None:
        """The buffer to receive into next; None when the pool is exhausted."""
        if self._next_pool is not None and not self._lent:
            # A turn begins, so what is left is in a copy, and nothing of the old pool is in use.
            self._pool, self._next_pool = self._next_pool, None
        view, start, end = self._view, self._start, self._end
        left = end - start
        wanted = LENGTH_BYTES
        if view is not None and left >= LENGTH_BYTES:
            wanted += _length_of(view, start)[0]
        if wanted > SMALL_FRAME_BYTES:
            assert view is not None
            if not self._lent:
                own = self._pool.acquire(wanted if wanted <= TRUSTED_FRAME_BYTES else TRUSTED_FRAME_BYTES)
                if own is None:
                    return None
                own[:left] = view[start:end]
                self._view, self._start, self._end, self._lent = own, 0, left, True
            elif end == len(view):
                larger = self._pool.exchange(view, min(wanted, 2 * len(view)))
                if larger is None:
                    return None
                self._view = larger
            # Do not receive beyond the frame, so that its buffer is free once the frame is taken.
            return self._view[self._end : wanted] if self._view is not None else None
        scratch = self._pool.scratch
        if view is not None:
            scratch[:left] = view[start:end]
        self._view, self._start, self._end = scratch, 0, left
        return scratch[left:]

    def received(self, count: int) -> None:
        self._end += count

    def next_frame(self) -> memoryview | None:
        """The next whole frame without its length, or None. Raises DecodeError for an impossible length."""
        view = self._view
        start = self._start
        available = self._end - start
        if view is None or available < LENGTH_BYTES:
            return None
        size: int = _length_of(view, start)[0]
        if size < HEADER_BYTES_MIN or size > self.frame_bytes_max:
            raise DecodeError(f"a frame of {size} bytes")
        if size > CONTROL_FRAME_BYTES_MAX and available >= 6 and _key_of(view, start + 4)[0] != PRODUCE_KEY:
            raise DecodeError(f"a frame of {size} bytes that is not a Produce")
        stop = start + LENGTH_BYTES + size
        if available < LENGTH_BYTES + size:
            return None
        self._start = stop
        return view[start + LENGTH_BYTES : stop]

    def settle(self) -> None:
        """End the turn: keep the rest of the bytes and release the buffer. No frame may be in use any more."""
        view = self._view
        if view is None:
            return
        if self._start == self._end:
            self.close()
        elif view is self._pool.scratch:
            self._view = memoryview(bytearray(view[self._start : self._end]))
            self._start, self._end = 0, self._end - self._start

    def close(self) -> None:
        if self._lent and self._view is not None:
            self._pool.release(self._view)
        self._view = None
        self._lent = False
        self._start = self._end = 0
