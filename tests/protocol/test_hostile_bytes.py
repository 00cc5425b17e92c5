"""Bytes a peer should never send: the only thing they may cause is a DecodeError.

Every message we read is cut at every byte, filled with noise and given counts beyond all bounds.
"""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.fetch import FetchRequest
from penstock.protocol.messages.groups import DescribeGroupsRequest, HeartbeatRequest, JoinGroupRequest
from penstock.protocol.messages.metadata_records import PartitionChangeRecord, RegisterBrokerRecord
from penstock.protocol.messages.produce import ProduceRequest
from penstock.protocol.messages.topics import (
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from penstock.protocol.primitives import uvarint
from penstock.protocol.schema import ELEMENTS_MAX, Message, decode, decoder, encode
from tests.protocol.samples import EVERY_MESSAGE, MessageAtVersion, Samples, title

FULL_COUNT = b"\xff\xff\xff\xff\x0f"  # 2**32 - 1 as an unsigned varint


def small_sample(cls: type[Message], version: int) -> bytes:
    """A message of which every cut can be tried."""
    sizes = (encode(Samples(f"{title((cls, version))} {n}").message(cls, version), version) for n in range(6))
    return sorted(sizes, key=len)[2]


@pytest.mark.parametrize("pair", EVERY_MESSAGE, ids=title)
def test_a_message_cut_anywhere_is_refused(pair: MessageAtVersion) -> None:
    cls, version = pair
    whole = small_sample(cls, version)
    read = decoder(cls, version)
    cuts = range(len(whole)) if len(whole) < 600 else Random(1).sample(range(len(whole)), 600)
    for cut in cuts:
        with pytest.raises(DecodeError):
            read(memoryview(whole)[:cut], 0)
    assert read(memoryview(whole), 0)[1] == len(whole)


@pytest.mark.parametrize("pair", EVERY_MESSAGE, ids=title)
def test_noise_raises_nothing_but_decode_error(pair: MessageAtVersion) -> None:
    cls, version = pair
    whole = small_sample(cls, version)
    read = decoder(cls, version)
    random = Random(title(pair))
    for _ in range(60):
        noisy = bytearray(whole)
        for _ in range(random.choice((1, 1, 3, 10))):
            if noisy:
                noisy[random.randrange(len(noisy))] = random.choice(
                    (0, 1, 127, 128, 255, random.randrange(256))
                )
        read_or_refuse(read, noisy)
        read_or_refuse(read, bytearray(random.randbytes(random.randrange(80))))


def read_or_refuse(read: object, data: bytearray) -> None:
    try:
        _, position = read(memoryview(data), 0)  # type: ignore[operator]
    except DecodeError:
        return
    assert position <= len(data)


def test_bytes_behind_a_message_are_left_alone() -> None:
    whole = encode(HeartbeatRequest(group_id="g", member_id="m"), 4)
    message, position = decoder(HeartbeatRequest, 4)(memoryview(b"??" + whole + b"\1\0\0"), 2)
    assert message == HeartbeatRequest(group_id="g", member_id="m")
    assert position == 2 + len(whole)


@pytest.mark.parametrize(
    ("cls", "version", "data"),
    [
        (ProduceRequest, 9, b"\0" + bytes(6) + FULL_COUNT),
        (ProduceRequest, 3, b"\xff\xff" + bytes(6) + b"\x7f\xff\xff\xff"),
        (MetadataRequest, 12, FULL_COUNT),
        (MetadataRequest, 1, b"\x7f\xff\xff\xff"),
        (DescribeGroupsRequest, 5, FULL_COUNT),
        (PartitionChangeRecord, 0, bytes(20) + b"\1\0\x05" + FULL_COUNT),
        (RegisterBrokerRecord, 0, bytes(28) + FULL_COUNT),
        (HeartbeatRequest, 4, FULL_COUNT),
        (JoinGroupRequest, 6, b"\2g" + bytes(8) + b"\2m\0\2c\2\2n" + FULL_COUNT),
        (ApiVersionsRequest, 3, b"\2a\2b" + FULL_COUNT),
    ],
)
def test_a_count_of_four_billion_is_refused_before_any_memory_is_taken(
    cls: type[Message], version: int, data: bytes
) -> None:
    data += bytes(100)
    read = decoder(cls, version)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            read(memoryview(data), 0)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


def test_the_elements_of_one_message_are_bounded() -> None:
    """An array may fit its bytes and still be too many objects."""

    def request_for(count: int) -> bytes:
        return uvarint(count + 1) + b"\1" * count + b"\0\0"

    assert len(decode(DescribeGroupsRequest, 5, request_for(ELEMENTS_MAX)).groups) == ELEMENTS_MAX
    with pytest.raises(DecodeError, match="too many"):
        decode(DescribeGroupsRequest, 5, request_for(ELEMENTS_MAX + 1))


def test_the_bound_counts_nested_arrays_and_tags() -> None:
    half = [1] * (ELEMENTS_MAX // 2)
    partition = MetadataResponsePartition(replica_nodes=half, isr_nodes=half)
    data = encode(MetadataResponse(topics=[MetadataResponseTopic(partitions=[partition])]), 12)
    with pytest.raises(DecodeError, match="too many"):
        decode(MetadataResponse, 12, data)


def test_many_unknown_tags_are_bounded_too() -> None:
    tags = b"".join(uvarint(tag) + b"\0" for tag in range(ELEMENTS_MAX + 1))
    with pytest.raises(DecodeError, match="too many"):
        decode(HeartbeatRequest, 4, b"\2g" + bytes(4) + b"\2m\0" + uvarint(ELEMENTS_MAX + 1) + tags)


class TestStrings:
    def test_invalid_utf_8_is_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(HeartbeatRequest, 0, b"\0\2\xc3\x28" + bytes(4) + b"\0\1m")

    def test_surrogates_in_utf_8_are_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(HeartbeatRequest, 0, b"\0\3\xed\xa0\x80" + bytes(4) + b"\0\1m")

    def test_null_where_it_is_not_allowed_is_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(HeartbeatRequest, 0, b"\xff\xff" + bytes(4) + b"\0\1m")
        with pytest.raises(DecodeError):
            decode(HeartbeatRequest, 4, b"\0" + bytes(4) + b"\2m\0\0")

    def test_a_negative_length_other_than_null_is_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(HeartbeatRequest, 3, b"\0\1g" + bytes(4) + b"\0\1m" + b"\xff\xfe")

    def test_a_varint_of_six_bytes_is_refused(self) -> None:
        with pytest.raises(DecodeError, match="varint"):
            decode(HeartbeatRequest, 4, b"\x82\x80\x80\x80\x80\x00g" + bytes(4) + b"\2m\0\0")

    def test_a_padded_varint_is_accepted_as_by_kafka(self) -> None:
        message = decode(HeartbeatRequest, 4, b"\x82\x80\x00g" + bytes(4) + b"\2m\0\0")
        assert message.group_id == "g"


class TestArrays:
    def test_null_where_it_is_not_allowed_is_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(DescribeGroupsRequest, 5, b"\0\0\0")
        with pytest.raises(DecodeError):
            decode(DescribeGroupsRequest, 0, b"\xff\xff\xff\xff")

    def test_a_negative_count_is_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(MetadataRequest, 1, b"\xff\xff\xff\xfe")

    def test_null_is_not_empty(self) -> None:
        assert decode(MetadataRequest, 1, b"\xff\xff\xff\xff").topics is None
        assert decode(MetadataRequest, 1, bytes(4)).topics == []

    def test_a_null_struct_is_none_and_a_present_one_is_read(self) -> None:
        assert decode(DescribeTopicPartitionsRequest, 0, b"\1" + bytes(4) + b"\xff\0").cursor is None
        with pytest.raises(DecodeError):
            decode(DescribeTopicPartitionsRequest, 0, b"\1" + bytes(4) + b"\1\0")


class TestTags:
    # A Fetch v12 up to its tag section: fixed-width fields, no topics, none forgotten, no rack.
    BODY = bytes(4 + 4 + 4 + 4 + 1 + 4 + 4) + b"\1\1\1"

    def test_an_unknown_tag_is_skipped(self) -> None:
        assert decode(FetchRequest, 12, self.BODY + b"\1\x09\3xyz") == decode(
            FetchRequest, 12, self.BODY + b"\0"
        )

    def test_a_known_tag_is_read_between_unknown_ones(self) -> None:
        tags = b"\3" + b"\0\3\3id" + b"\x05\1?" + b"\x09\0"
        assert decode(FetchRequest, 12, self.BODY + tags).cluster_id == "id"

    def test_a_tag_sent_twice_is_refused(self) -> None:
        with pytest.raises(DecodeError, match="tag"):
            decode(FetchRequest, 12, self.BODY + b"\2\0\2\2a\0\2\2b")

    def test_an_unknown_tag_sent_twice_is_refused(self) -> None:
        with pytest.raises(DecodeError, match="tag"):
            decode(HeartbeatRequest, 4, b"\2g" + bytes(4) + b"\2m\0" + b"\2\1\0\1\0")

    def test_tags_out_of_order_are_refused(self) -> None:
        with pytest.raises(DecodeError, match="tag"):
            decode(FetchRequest, 12, self.BODY + b"\2\x09\0\0\2\2a")

    def test_a_tag_whose_value_is_shorter_than_its_size_is_refused(self) -> None:
        with pytest.raises(DecodeError, match="tag size"):
            decode(FetchRequest, 12, self.BODY + b"\1\0\3\2a?")

    def test_a_tag_whose_value_is_longer_than_its_size_is_refused(self) -> None:
        with pytest.raises(DecodeError, match="tag size"):
            decode(FetchRequest, 12, self.BODY + b"\1\0\1\2a")

    def test_a_tag_that_runs_past_the_end_is_refused(self) -> None:
        with pytest.raises(DecodeError):
            decode(FetchRequest, 12, self.BODY + b"\1\x09\x7f")
        with pytest.raises(DecodeError):
            decode(HeartbeatRequest, 4, b"\2g" + bytes(4) + b"\2m\0" + b"\1\x09\x7f")

    def test_more_than_127_tags_are_read(self) -> None:
        tags = uvarint(200) + b"".join(uvarint(tag) + b"\1?" for tag in range(100, 300))
        assert decode(FetchRequest, 12, self.BODY + tags) == decode(FetchRequest, 12, self.BODY + b"\0")
        message, position = decoder(HeartbeatRequest, 4)(memoryview(b"\2g" + bytes(4) + b"\2m\0" + tags), 0)
        assert message.member_id == "m"
        assert position == 9 + len(tags)
