"""The next record of a reader, in batches as brokers store them."""

from __future__ import annotations

import pytest

from penstock.protocol.compression import Codec
from penstock.protocol.records import (
    CorruptBatch,
    Marker,
    decode_header,
    emptied,
    encode_batch,
    encode_marker,
    filler,
    patch,
    set_log_append_time,
)
from penstock.wire.unread import Nothing, Unread, next_unread


def batch(
    base_offset: int, timestamps: list[int], *, codec: Codec = Codec.NONE, producer: int | None = None
) -> bytearray:
    records = [(timestamp, b"key", b"value", ()) for timestamp in timestamps]
    if producer is None:
        return encode_batch(records, base_offset=base_offset, codec=codec)
    return encode_batch(
        records,
        base_offset=base_offset,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )


def marker(offset: int, producer: int, *, is_commit: bool) -> bytearray:
    found = encode_marker(Marker(is_commit, 0), producer, 0, 5)
    patch(found, 0, offset, 0)
    return found


def look(
    *parts: bytes | bytearray, offset: int, aborted: list[tuple[int, int]] | None = None
) -> Unread | Nothing:
    return next_unread(memoryview(b"".join(parts)), offset, aborted or [])


@pytest.mark.parametrize("codec", list(Codec))
def test_it_is_the_record_with_the_offset(codec: Codec) -> None:
    stored = batch(10, [100, 300, 200], codec=codec)
    assert [look(stored, offset=offset) for offset in (10, 11, 12)] == [
        Unread(10, 100),
        Unread(11, 300),
        Unread(12, 200),
    ]


def test_with_the_brokers_time_all_records_of_a_batch_have_it() -> None:
    stored = batch(10, [100, 300])
    set_log_append_time(stored, 0, decode_header(stored), 777)
    assert look(stored, offset=11) == Unread(11, 777)


def test_an_unset_timestamp_is_not_a_time() -> None:
    assert look(batch(0, [-1]), offset=0) == Unread(0, None)


def test_compacted_offsets_and_empty_batches_are_passed() -> None:
    stored = batch(0, [1, 2]), emptied(decode_header(batch(2, [3]))), filler(3, 9, 0), batch(10, [50])
    assert look(*stored, offset=2) == Unread(10, 50)
    assert look(*stored[:3], offset=2) == Nothing(10)


def test_a_marker_is_not_a_record() -> None:
    assert look(batch(0, [1], producer=7), marker(1, 7, is_commit=True), offset=1) == Nothing(2)


def test_aborted_records_are_left_out_up_to_their_marker() -> None:
    stored = (
        batch(0, [10], producer=7),
        batch(1, [20], producer=8),
        marker(2, 7, is_commit=False),
        batch(3, [30], producer=7),
    )
    assert look(*stored, offset=0, aborted=[(7, 0)]) == Unread(1, 20)
    assert look(stored[0], stored[2], stored[3], offset=0, aborted=[(7, 0)]) == Unread(3, 30)
    assert look(*stored, offset=0) == Unread(0, 10)


def test_a_batch_that_is_cut_off_holds_nothing() -> None:
    assert look(batch(4, [1, 2])[:-1], offset=4) == Nothing(4)
    assert look(b"", offset=4) == Nothing(4)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(CorruptBatch):
        look(bytes(100), offset=0)
