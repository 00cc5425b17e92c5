"""Record batches: against the builders of two other clients, and against everything a client may get wrong."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import aiokafka.record.default_records as aiokafka_records
import kafka.record.default_records as kafka_python_records
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.compression import Codec, TooLarge
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import (
    DELETE_HORIZON,
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    CorruptBatch,
    Marker,
    Record,
    RecordFields,
    batches,
    check_produced,
    crc_matches,
    decode_header,
    decode_marker,
    decode_records,
    emptied,
    encode_batch,
    encode_marker,
    filler,
    keyless_records,
    patch,
    rebuilt,
    set_log_append_time,
    unfold,
)

NOW = 1_700_000_000_000
FIELDS: list[RecordFields] = [
    (NOW, b"key", b"value", [("name", b"content"), ("empty", b""), ("none", None)]),
    (NOW + 5, None, b"no key", []),
    (NOW - 3, b"tombstone", None, []),
    (NOW + 1, b"", b"x" * 300, [("Ω", "é".encode())]),
]

# (codec, batch from ``FIELDS`` by that client's builder)
Build = Callable[[Codec], bytes]


def build_with_aiokafka(codec: Codec) -> bytes:
    return _build(aiokafka_records._DefaultRecordBatchBuilderPy, codec)


def build_with_kafka_python(codec: Codec) -> bytes:
    return _build(kafka_python_records.DefaultRecordBatchBuilder, codec)


def _build(builder_class: Any, codec: Codec) -> bytes:
    builder = builder_class(
        magic=2,
        compression_type=int(codec),
        is_transactional=0,
        producer_id=42,
        producer_epoch=3,
        base_sequence=17,
        batch_size=1 << 20,
    )
    for offset, (timestamp, key, value, headers) in enumerate(FIELDS):
        assert builder.append(offset, timestamp=timestamp, key=key, value=value, headers=headers) is not None
    return bytes(builder.build())


BUILDERS = [
    *(pytest.param(build_with_aiokafka, codec, id=f"aiokafka-{codec.name.lower()}") for codec in Codec),
    *(
        pytest.param(build_with_kafka_python, codec, id=f"kafka-python-{codec.name.lower()}")
        for codec in Codec
        if codec is not Codec.SNAPPY  # which needs a library of its own there
    ),
]


@pytest.mark.parametrize(("build", "codec"), BUILDERS)
def test_batches_of_other_clients_are_read(build: Build, codec: Codec) -> None:
    batch = build(codec)
    header = decode_header(batch)
    assert header.codec == codec
    assert header.size == len(batch)
    assert header.count == len(FIELDS)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (42, 3, 17)
    assert (header.last_sequence, header.next_offset) == (20, 4)
    assert crc_matches(batch, 0, header)
    records = decode_records(batch, bytes_max=10_000)
    expected = [Record(offset, *fields) for offset, fields in enumerate(FIELDS)]
    assert [record._replace(headers=list(record.headers)) for record in records] == expected


@pytest.mark.parametrize("codec", Codec)
def test_aiokafka_reads_our_batches(codec: Codec) -> None:
    batch = encode_batch(FIELDS, base_offset=100, codec=codec)
    read = aiokafka_records._DefaultRecordBatchPy(bytes(batch))
    assert read.validate_crc()
    got = [(r.timestamp, r.key, r.value, list(r.headers)) for r in read]
    assert got == FIELDS
    assert read.base_offset == 100


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.SNAPPY])
def test_kafka_python_reads_our_batches(codec: Codec) -> None:
    batch = encode_batch(FIELDS, base_offset=100, codec=codec)
    read = kafka_python_records.DefaultRecordBatch(bytes(batch))
    assert read.validate_crc()
    got = [(r.timestamp, r.key, r.value, list(r.headers)) for r in read]
    assert got == FIELDS


def test_an_uncompressed_batch_is_byte_for_byte_that_of_kafka_python() -> None:
    ours = encode_batch(FIELDS, leader_epoch=0, producer_id=42, producer_epoch=3, base_sequence=17)
    theirs = bytearray(build_with_kafka_python(Codec.NONE))
    # The leader epoch is the broker's: clients send what they like.
    theirs[12:16] = ours[12:16]
    assert ours == theirs


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
contents = st.none() | st.binary(max_size=50)
timestamps = st.integers(-1, 2**50)
records_strategy = st.lists(
    st.tuples(timestamps, contents, contents, st.lists(st.tuples(names, contents), max_size=3)),
    min_size=1,
    max_size=20,
)


@given(records_strategy, st.sampled_from(Codec), st.integers(0, 2**40))
def test_what_was_encoded_comes_back(fields: list[Any], codec: Codec, base_offset: int) -> None:
    batch = encode_batch(fields, base_offset=base_offset, codec=codec, leader_epoch=5)
    header = decode_header(batch)
    assert header.max_timestamp == max(timestamp for timestamp, *_ in fields)
    assert header.leader_epoch == 5
    records = decode_records(batch, bytes_max=1 << 20)
    assert records == [Record(base_offset + delta, *record) for delta, record in enumerate(fields)]


def test_a_batch_can_be_made_from_records() -> None:
    records = [Record(77, NOW, b"k", b"v"), Record(99, NOW, None, None)]
    made = decode_records(encode_batch(records, base_offset=5), bytes_max=1000)
    assert [record.offset for record in made] == [5, 6]
    assert [record.value for record in made] == [b"v", None]


def test_a_batch_without_records_is_not_made() -> None:
    with pytest.raises(ValueError, match="at least one"):
        encode_batch([])


def test_patching_offset_and_epoch_leaves_the_crc_valid() -> None:
    batch = bytearray(b"before" + encode_batch(FIELDS))
    patch(batch, 6, 123_456, 9)
    header = decode_header(batch, 6)
    assert (header.base_offset, header.leader_epoch) == (123_456, 9)
    assert crc_matches(batch, 6, header)
    assert [record.offset for record in decode_records(batch, 6, bytes_max=1000)][:2] == [123_456, 123_457]


def test_log_append_time_replaces_the_timestamps_of_all_records() -> None:
    batch = encode_batch(FIELDS, codec=Codec.LZ4)
    header = set_log_append_time(batch, 0, decode_header(batch), NOW + 1000)
    assert header == decode_header(batch)
    assert header.is_log_append_time
    assert crc_matches(batch, 0, header)
    assert {record.timestamp for record in decode_records(batch, bytes_max=1000)} == {NOW + 1000}
    assert aiokafka_records._DefaultRecordBatchPy(bytes(batch)).validate_crc()


def test_a_sequence_wraps_inside_a_batch() -> None:
    batch = encode_batch(FIELDS, producer_id=1, producer_epoch=0, base_sequence=2**31 - 2)
    assert decode_header(batch).last_sequence == 1
    assert decode_header(encode_batch(FIELDS)).last_sequence == -1


def test_attributes_are_told_apart() -> None:
    header = decode_header(encode_batch(FIELDS, control=True, transactional=True, producer_id=1))
    assert (header.is_control, header.is_transactional, header.is_log_append_time) == (True, True, False)


def test_batches_in_a_row_are_found_and_a_partial_one_is_left_out() -> None:
    first, second = encode_batch(FIELDS, base_offset=0), encode_batch(FIELDS[:1], base_offset=4)
    both = bytes(first + second)
    for cut in range(1, len(second)):
        found = list(batches(both[:-cut]))
        assert [(position, header.base_offset) for position, header in found] == [(0, 0)]
    assert [position for position, _ in batches(both)] == [0, len(first)]
    assert list(batches(b"")) == []


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1])
def test_too_few_bytes_are_no_header(size: int) -> None:
    with pytest.raises(CorruptBatch):
        decode_header(bytes(encode_batch(FIELDS))[:size])


@pytest.mark.parametrize(
    ("at", "value"), [(16, b"\x01"), (16, b"\x03"), (8, b"\0\0\0\0"), (8, b"\xff\xff\xff\xff")]
)
def test_a_header_that_no_batch_has_is_corrupt(at: int, value: bytes) -> None:
    batch = encode_batch(FIELDS)
    batch[at : at + len(value)] = value
    with pytest.raises(CorruptBatch):
        decode_header(batch)


def test_every_changed_byte_behind_the_crc_is_noticed() -> None:
    batch = encode_batch(FIELDS)
    for position in range(21, len(batch)):
        batch[position] ^= 0x40
        assert not crc_matches(batch, 0, decode_header(batch))
        batch[position] ^= 0x40
    assert crc_matches(batch, 0, decode_header(batch))
    assert not crc_matches(batch[:-1], 0, decode_header(batch))


# What a client may send


def check(batch: bytes | bytearray, **options: Any) -> BatchHeader | ErrorCode:
    return check_produced(memoryview(batch), **{"max_message_bytes": 1 << 20, **options})


def forge(batch: bytearray, **changes: int) -> bytearray:
    """Change header fields and make the CRC fit again."""
    places = {
        "base_offset": (">q", 0),
        "length": (">i", 8),
        "magic": (">b", 16),
        "attributes": (">h", 21),
        "last_offset_delta": (">i", 23),
        "max_timestamp": (">q", 35),
        "producer_id": (">q", 43),
        "producer_epoch": (">h", 51),
        "base_sequence": (">i", 53),
        "count": (">i", 57),
    }
    for name, value in changes.items():
        layout, at = places[name]
        struct.pack_into(layout, batch, at, value)
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return batch


@pytest.mark.parametrize(("build", "codec"), BUILDERS)
def test_what_clients_send_is_accepted(build: Build, codec: Codec) -> None:
    batch = build(codec)
    assert check(batch) == decode_header(batch)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"magic": 0}, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        ({"magic": 1}, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        ({"magic": 3}, ErrorCode.CORRUPT_MESSAGE),
        ({"magic": -1}, ErrorCode.CORRUPT_MESSAGE),
        ({"base_offset": 1}, ErrorCode.INVALID_RECORD),
        ({"base_offset": -1}, ErrorCode.INVALID_RECORD),
        ({"last_offset_delta": 2}, ErrorCode.INVALID_RECORD),
        ({"last_offset_delta": 4}, ErrorCode.INVALID_RECORD),
        ({"count": 0, "last_offset_delta": -1}, ErrorCode.INVALID_RECORD),
        ({"count": -1, "last_offset_delta": -2}, ErrorCode.INVALID_RECORD),
        ({"attributes": 0x20}, ErrorCode.INVALID_RECORD),
        ({"attributes": 5}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ({"attributes": 7}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ({"attributes": 0x10}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5, "producer_epoch": 0}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5, "base_sequence": 0}, ErrorCode.INVALID_RECORD),
        ({"producer_id": -2}, ErrorCode.INVALID_RECORD),
        ({"length": 0}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": -1}, ErrorCode.CORRUPT_MESSAGE),
        ({"length": 2**31 - 1}, ErrorCode.CORRUPT_MESSAGE),
    ],
)
def test_what_no_client_should_send_is_refused(changes: dict[str, int], error: ErrorCode) -> None:
    assert check(forge(encode_batch(FIELDS), **changes)) is error


def test_a_length_that_lies_is_corrupt() -> None:
    batch = encode_batch(FIELDS)
    assert check(forge(bytearray(batch), length=len(batch) - 12 + 1)) is ErrorCode.CORRUPT_MESSAGE
    assert check(batch[:-1]) is ErrorCode.CORRUPT_MESSAGE


def test_anything_behind_the_one_batch_is_refused() -> None:
    batch = encode_batch(FIELDS)
    assert check(batch + b"\0") is ErrorCode.INVALID_RECORD
    assert check(batch + batch) is ErrorCode.INVALID_RECORD


def test_no_batch_at_all_is_refused() -> None:
    batch = encode_batch(FIELDS)
    assert check(b"") is ErrorCode.INVALID_RECORD
    assert check(batch[:40]) is ErrorCode.CORRUPT_MESSAGE
    # A message of magic 1 may be shorter than our header.
    batch[16] = 1
    assert check(batch[:40]) is ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT


def test_the_size_limit_is_inclusive() -> None:
    batch = encode_batch(FIELDS)
    assert isinstance(check(batch, max_message_bytes=len(batch)), BatchHeader)
    assert check(batch, max_message_bytes=len(batch) - 1) is ErrorCode.MESSAGE_TOO_LARGE


def test_damage_is_told_from_nonsense() -> None:
    batch = encode_batch(FIELDS)
    batch[-1] ^= 1
    assert check(batch) is ErrorCode.CORRUPT_MESSAGE


def test_zstd_is_refused_from_clients_too_old_for_it() -> None:
    batch = encode_batch(FIELDS, codec=Codec.ZSTD)
    assert isinstance(check(batch), BatchHeader)
    assert check(batch, allow_zstd=False) is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert isinstance(check(encode_batch(FIELDS, codec=Codec.LZ4), allow_zstd=False), BatchHeader)


@given(st.binary(max_size=300))
def test_rubbish_is_refused_without_an_exception(data: bytes) -> None:
    assert isinstance(check(data), ErrorCode)


@given(st.data())
def test_a_batch_damaged_anywhere_is_refused_or_differs_only_where_the_broker_writes(
    data: st.DataObject,
) -> None:
    batch = encode_batch(FIELDS, producer_id=1, producer_epoch=0, base_sequence=0)
    position = data.draw(st.integers(0, len(batch) - 1))
    batch[position] ^= data.draw(st.integers(1, 255))
    verdict = check(batch)
    if isinstance(verdict, BatchHeader):
        assert 12 <= position < 16, "only the leader epoch is not the client's to say"


# Reading records


def test_records_are_bounded_while_they_unfold() -> None:
    batch = encode_batch([(NOW, None, bytes(1 << 20), ())], codec=Codec.ZSTD)
    assert len(batch) < 1000
    with pytest.raises(TooLarge):
        decode_records(batch, bytes_max=1000)


@pytest.mark.parametrize("count", [-1, 5, 1000, 2**31 - 1])
def test_a_lying_count_is_corrupt(count: int) -> None:
    with pytest.raises(CorruptBatch):
        decode_records(forge(encode_batch(FIELDS), count=count), bytes_max=1000)


def test_an_unknown_codec_is_corrupt() -> None:
    with pytest.raises(CorruptBatch, match="codec 6"):
        decode_records(forge(encode_batch(FIELDS), attributes=6), bytes_max=1000)


@given(st.data())
def test_damaged_records_raise_nothing_but_corrupt_batch(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(Codec))
    batch = encode_batch(FIELDS, codec=codec)
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(HEADER_SIZE, len(batch) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptBatch, TooLarge):
        decode_records(batch, bytes_max=100_000)


def test_a_varint_of_eleven_bytes_is_corrupt() -> None:
    batch = encode_batch([(NOW, b"k" * 20, b"v" * 20, ())])
    batch[HEADER_SIZE : HEADER_SIZE + 11] = b"\xff" * 11
    with pytest.raises(CorruptBatch, match="varint"):
        decode_records(batch, bytes_max=1000)


def test_a_batch_without_timestamps_says_so() -> None:
    header = decode_header(encode_batch([(NO_TIMESTAMP, None, b"v", ())]))
    assert header.max_timestamp == header.base_timestamp == NO_TIMESTAMP


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_marker_is_one_control_record_without_a_sequence(is_commit: bool) -> None:
    batch = encode_marker(Marker(is_commit, 7), producer_id=4000, producer_epoch=3, timestamp=1_000)
    header = decode_header(batch)
    assert header.is_control and header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.count) == (4000, 3, -1, 1)
    (record,) = decode_records(batch, bytes_max=1_000)
    assert record.key == bytes([0, 0, 0, is_commit])
    assert record.value == bytes([0, 0, 0, 0, 0, 7])
    assert decode_marker(batch) == Marker(is_commit, 7)


def test_a_control_record_of_another_type_is_no_marker() -> None:
    batch = encode_batch([(1, bytes([0, 0, 0, 2]), b"", ())], control=True)
    assert decode_marker(batch) is None


@pytest.mark.parametrize(("key", "value"), [(None, b"\0" * 6), (b"\0\0", b"\0" * 6), (b"\0\0\0\1", b"\0\0")])
def test_a_marker_cut_short_is_corrupt(key: bytes | None, value: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decode_marker(encode_batch([(1, key, value, ())], control=True))


# Records without a key


def keyless(records: bytes | bytearray) -> list[int]:
    return keyless_records(records, bytes_max=1 << 20)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("build", [build_with_aiokafka, build_with_kafka_python])
def test_records_without_a_key_are_found_in_batches_of_other_clients(build: Build, codec: Codec) -> None:
    assert keyless(build(codec)) == [1]


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**40), 2**40),
            st.none() | st.binary(max_size=100) | st.integers(0, 20_000).map(bytes),
            st.none() | st.binary(max_size=100) | st.integers(0, 20_000).map(bytes),
            st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3),
        ),
        min_size=1,
        max_size=200,
    ),
    st.sampled_from(Codec),
)
def test_records_without_a_key_are_those_that_decode_without_one(
    fields: list[RecordFields], codec: Codec
) -> None:
    batch = encode_batch(fields, codec=codec)
    records = decode_records(batch, bytes_max=1 << 30)
    assert keyless_records(batch, bytes_max=1 << 30) == [
        place for place, record in enumerate(records) if record.key is None
    ]


def test_places_of_all_sizes_are_found() -> None:
    keys = [None if place in (63, 64, 8191, 8192, 16_384) else b"k" for place in range(20_000)]
    batch = encode_batch([(NOW, key, None, []) for key in keys])
    assert keyless(batch) == [63, 64, 8191, 8192, 16_384]


@given(st.integers(0, 200), st.integers(0, 255))
def test_keys_are_found_or_the_batch_is_corrupt_whatever_a_client_sends(at: int, byte: int) -> None:
    damaged = bytearray(encode_batch([(NOW, b"key", b"value", []), (NOW, None, None, [("a", b"b")])]))
    damaged[min(HEADER_SIZE + at, len(damaged) - 1)] = byte
    with contextlib.suppress(CorruptBatch):
        assert set(keyless(damaged)) <= {0, 1}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\x0e\0\0\x02\x01\x01\0\0", "offset delta 1"),
        (b"\x0e\0\0\0\x03\x01\0\0", "a key of -2 bytes"),
        (b"\x0e\0\0\0\x10\x01\0\0", "a key reaches beyond its record"),
        (b"\x0e\0\0\0\x01\x03\0\0", "a value of -2 bytes"),
        (b"\x0e\0\0\0\x01\x10\0\0", "a value reaches beyond its record"),
        (b"\x01\0\0\0\x01\x01\0\0", "a record of -1 bytes"),
        (b"\x10\0\0\0\x01\x01\0\0", "do not end where their batch does"),
        (b"\x0c\0\0\0\x01\x01\0\0", "do not end where their batch does"),
    ],
)
def test_a_batch_that_compaction_could_not_read_is_corrupt(record: bytes, reason: str) -> None:
    batch = encode_batch([(NOW, b"k", None, [])])
    batch[HEADER_SIZE:] = record
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    with pytest.raises(CorruptBatch, match=reason):
        keyless(batch)


@pytest.mark.parametrize("codec", list(Codec))
def test_keys_are_looked_for_up_to_a_limit(codec: Codec) -> None:
    batch = encode_batch([(NOW, b"k", bytes(1 << 20), [])], codec=codec)
    with pytest.raises(TooLarge):
        keyless(batch)


# What compaction writes


def test_only_a_broker_sets_a_delete_horizon() -> None:
    header = decode_header(encode_batch([(1, b"a", b"b", ())]))
    batch = rebuilt(
        header._replace(attributes=DELETE_HORIZON, base_timestamp=77),
        unfold(encode_batch([(1, b"a", b"b", ())]), 0, 99)[1],
    )
    assert decode_header(batch).delete_horizon_ms == 77
    assert decode_header(encode_batch([(1, b"a", b"b", ())])).delete_horizon_ms is None
    assert check_produced(memoryview(batch), max_message_bytes=1000) == ErrorCode.INVALID_RECORD


def test_a_filler_covers_offsets_and_has_no_records() -> None:
    batch = filler(100, 2**31 + 98, 7)
    header = decode_header(batch)
    assert (header.base_offset, header.last_offset, header.leader_epoch) == (100, 2**31 + 98, 7)
    assert header.is_filler and len(batch) == HEADER_SIZE and crc_matches(batch, 0, header)
    assert decode_records(batch, bytes_max=0) == []


def test_an_emptied_batch_keeps_offsets_and_sequence() -> None:
    full = encode_batch(
        [(5, b"a", b"b", ()), (9, b"c", b"d", ())],
        base_offset=40,
        codec=Codec.GZIP,
        producer_id=3,
        producer_epoch=1,
        base_sequence=8,
        transactional=True,
    )
    batch = emptied(decode_header(full))
    header = decode_header(batch)
    assert crc_matches(batch, 0, header)
    assert (header.base_offset, header.last_offset, header.last_sequence, header.count) == (40, 41, 9, 0)
    assert (header.is_transactional, header.codec, header.max_timestamp) == (True, Codec.NONE, 9)
    assert not header.is_filler
    assert decode_records(batch, bytes_max=0) == []
