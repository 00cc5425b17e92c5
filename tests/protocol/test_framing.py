from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.errors import DecodeError
from penstock.protocol.framing import (
    CONTROL_FRAME_BYTES_MAX,
    READ_BYTES,
    SMALL_FRAME_BYTES,
    TRUSTED_FRAME_BYTES,
    BufferPool,
    Framer,
)

FRAME_BYTES_MAX = 64 * 1024 * 1024


def framed(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(body)) + body for body in bodies)


def feed(framer: Framer, data: bytes, piece: int) -> list[bytes]:
    """Receive ``data`` at most ``piece`` bytes at a time; every frame that came out of it, copied."""
    frames = []
    at = 0
    while at < len(data):
        space = framer.space()
        assert space is not None
        count = min(piece, len(space), len(data) - at)
        assert count > 0
        space[:count] = data[at : at + count]
        framer.received(count)
        at += count
        while (frame := framer.next_frame()) is not None:
            frames.append(bytes(frame))
        framer.settle()
    return frames


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(
            st.integers(10, 300),
            st.integers(SMALL_FRAME_BYTES - 3, SMALL_FRAME_BYTES + 3),
            st.integers(READ_BYTES - 8, READ_BYTES + 8),
            st.just(3 * READ_BYTES + 1),
        ),
        min_size=1,
        max_size=8,
    ),
    piece=st.sampled_from([1000, 4096, SMALL_FRAME_BYTES, READ_BYTES - 1, READ_BYTES, 10 * READ_BYTES]),
)
def test_frames_come_out_whole_and_in_order_however_the_bytes_arrive(sizes: list[int], piece: int) -> None:
    bodies = [bytes([index]) * size for index, size in enumerate(sizes)]
    pool = BufferPool(256 * 1024 * 1024)
    framer = Framer(pool, FRAME_BYTES_MAX)
    assert feed(framer, framed(*bodies), piece) == bodies
    assert not framer.partial_bytes
    framer.close()
    assert pool.lent_bytes == 0


def test_a_frame_in_single_bytes_is_put_together() -> None:
    framer = Framer(BufferPool(1 << 20), FRAME_BYTES_MAX)
    assert feed(framer, framed(b"x" * 50, b"y" * 10), 1) == [b"x" * 50, b"y" * 10]


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 3, 8, 9, FRAME_BYTES_MAX + 1, 2**31 - 1])
def test_an_impossible_length_is_refused(length: int) -> None:
    framer = Framer(BufferPool(1 << 20), FRAME_BYTES_MAX)
    with pytest.raises(DecodeError):
        feed(framer, struct.pack(">i", length) + bytes(100), 104)


def test_only_a_produce_may_be_larger_than_control_requests_are() -> None:
    start = struct.pack(">ih", CONTROL_FRAME_BYTES_MAX + 1, 3)
    with pytest.raises(DecodeError):
        feed(Framer(BufferPool(1 << 30), FRAME_BYTES_MAX), start, len(start))
    start = struct.pack(">ih", CONTROL_FRAME_BYTES_MAX + 1, 0)
    assert feed(Framer(BufferPool(1 << 30), FRAME_BYTES_MAX), start, len(start)) == []


def test_a_promise_of_many_bytes_costs_little_until_they_arrive() -> None:
    pool = BufferPool(1 << 30)
    framer = Framer(pool, FRAME_BYTES_MAX)
    feed(framer, struct.pack(">ih", FRAME_BYTES_MAX, 0), 6)
    assert pool.lent_bytes == 0
    # Past what is trusted, the buffer only doubles what has really come.
    arrived = 5 * TRUSTED_FRAME_BYTES // 4
    feed(framer, bytes(arrived), 1 << 20)
    assert pool.lent_bytes <= 4 * arrived


def test_an_idle_connection_holds_no_buffer() -> None:
    pool = BufferPool(1 << 20)
    framer = Framer(pool, FRAME_BYTES_MAX)
    feed(framer, framed(b"x" * 100) + b"\0\0", 1000)
    assert framer.partial_bytes
    assert pool.lent_bytes == 0


def test_small_frames_need_nothing_of_an_exhausted_pool() -> None:
    pool = BufferPool(1)
    hogs = pool.acquire(1 << 20)
    assert hogs is not None
    framer = Framer(pool, FRAME_BYTES_MAX)
    assert feed(framer, framed(b"x" * 100, b"y" * 5_000), 700) == [b"x" * 100, b"y" * 5_000]
    feed(framer, struct.pack(">ih", 1 << 20, 0), 6)
    assert framer.space() is None
    pool.release(hogs)
    assert framer.space() is not None


def test_two_large_frames_do_not_block_each_other_for_ever() -> None:
    # Room for both at first, but for neither to grow.
    pool = BufferPool(2 * TRUSTED_FRAME_BYTES)
    framers = [Framer(pool, FRAME_BYTES_MAX) for _ in range(2)]
    body = bytes(2) + b"z" * (3 * TRUSTED_FRAME_BYTES)
    data = framed(body)
    at = [0, 0]
    done = [0, 0]
    for _ in range(400):
        for index, framer in enumerate(framers):
            space = framer.space() if at[index] < len(data) else None
            if space is None:
                continue
            count = min(len(space), 1 << 20, len(data) - at[index])
            space[:count] = data[at[index] : at[index] + count]
            framer.received(count)
            at[index] += count
            done[index] += framer.next_frame() is not None
            framer.settle()
    assert done == [1, 1]
    assert pool.lent_bytes == 0


def test_frames_left_for_the_next_turn_are_not_lost() -> None:
    pool = BufferPool(1 << 20)
    framer = Framer(pool, FRAME_BYTES_MAX)
    bodies = [bytes([index]) * 100 for index in range(20)]
    space = framer.space()
    assert space is not None
    data = framed(*bodies)
    space[: len(data)] = data
    framer.received(len(data))
    taken = []
    for _ in range(20):
        frame = framer.next_frame()
        assert frame is not None
        taken.append(bytes(frame))
        framer.settle()
        pool.scratch[:] = bytes(len(pool.scratch))  # another connection's turn
    assert taken == bodies


def test_a_pool_lends_no_more_than_it_may_but_always_one() -> None:
    pool = BufferPool(READ_BYTES)
    first = pool.acquire(10 * READ_BYTES)
    assert first is not None
    assert pool.acquire(1) is None
    pool.release(first)
    assert pool.acquire(1) is not None
