from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import DecodeError
from penstock.wire.frames import FRAME_BYTES_MAX, SCRATCH_BYTES, STEP_BYTES, Buffers, Inbox, is_free


def framed(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def receive(inbox: Inbox, data: bytes, pieces: list[int]) -> list[bytes]:
    """Feed bytes in pieces of the given sizes (over and over), and copy the frames that come out."""
    frames = []
    turn = 0
    while data:
        space = inbox.space()
        count = min(len(space), len(data), pieces[turn % len(pieces)])
        turn += 1
        space[:count] = data[:count]
        data = data[count:]
        frames += [bytes(frame) for frame in inbox.received(count)]
    return frames


@given(
    st.lists(st.integers(4, 3 * SCRATCH_BYTES), max_size=6),
    st.lists(st.integers(1, 2 * SCRATCH_BYTES), min_size=1, max_size=4),
)
def test_frames_come_out_as_they_went_in_however_they_are_cut(sizes: list[int], pieces: list[int]) -> None:
    contents = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    inbox = Inbox(Buffers())
    inbox.frame_bytes_max = FRAME_BYTES_MAX
    # Pieces of a few bytes would make this slow, and cut nothing that larger ones do not.
    pieces = [max(piece, 300) for piece in pieces]
    assert receive(inbox, b"".join(map(framed, contents)), pieces) == contents


def test_a_frame_cut_within_its_length_is_put_together() -> None:
    inbox = Inbox(Buffers())
    assert receive(inbox, framed(b"hello") + framed(b"world!"), [1]) == [b"hello", b"world!"]


@pytest.mark.parametrize("size", [-1, 0, 3, 0x48545450])  # the last is "HTTP"
def test_a_length_that_no_broker_sends_is_an_error(size: int) -> None:
    with pytest.raises(DecodeError):
        receive(Inbox(Buffers()), struct.pack(">i", size), [4])


def test_a_buffer_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    buffers = Buffers()
    first = buffers.take(100_000)
    first[:5] = b"first"
    part = first[:5]
    del first
    second = buffers.take(100_000)
    second[:6] = b"second"
    assert bytes(part) == b"first"
    del part
    third = buffers.take(100_000)
    assert bytes(third[:5]) == b"first", "a fresh buffer, not the one that was used first"


def test_buffers_that_do_not_fit_are_not_hoarded() -> None:
    buffers = Buffers(kept_bytes_max=4 * STEP_BYTES)
    for size in (4 * STEP_BYTES, STEP_BYTES, 3 * STEP_BYTES, 100 * STEP_BYTES):
        view = buffers.take(size)
        assert len(view) == size
        del view
        assert sum(map(len, buffers._kept)) <= 4 * STEP_BYTES


def test_a_buffer_that_is_looked_into_is_not_free() -> None:
    buffer = bytearray(b"abc")
    view = memoryview(buffer)[1:2]
    assert not is_free(buffer)
    view.release()
    assert is_free(buffer)
    assert buffer == b"abc"
