from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from penstock.environment import File, FileRange
from penstock.protocol.codegen import decoder_source, encoder_source
from penstock.protocol.messages.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
    ReplicaState,
)
from penstock.protocol.messages.groups import HeartbeatRequest, JoinGroupResponse
from penstock.protocol.messages.leader_hints import LeaderIdAndEpoch, NodeEndpoint
from penstock.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from penstock.protocol.messages.quorum import LeaderIdAndEpoch as QuorumLeader
from penstock.protocol.messages.topics import Cursor, DescribeTopicPartitionsRequest
from penstock.protocol.schema import (
    Message,
    array,
    binary,
    boolean,
    decode,
    decoder,
    encode,
    encoder,
    int8,
    int16,
    int32,
    is_flexible,
    string,
    struct,
    uuid,
    version_range,
)


class Point(Message):
    x: int = int32()
    y: int = int32("1+", default=7)


class Everything(Message, key=99, versions="0-2", flexible="2+"):
    """What no message of today combines: a struct by itself, arrays of every kind, tags of every kind."""

    origin: Point = struct(Point)
    flags: list[bool] = array(boolean)
    ids: list[bytes] = array(uuid)
    blobs: list[bytes] = array(binary)
    small: list[int] = array(int8, nullable="1+")
    name: str | None = string(nullable="1+", default=None)
    corner: Point | None = struct(Point, "2+", tag=0)
    points: list[Point] = array(Point, "2+", tag=3)
    shares: list[int] | None = array(int16, "2+", nullable=True, default=None, tag=5)
    note: bytes | None = binary("2+", nullable=True, default=None, tag=300)


class TestMessages:
    def test_a_message_starts_with_the_defaults_of_its_schema(self) -> None:
        response = PartitionProduceResponse()
        assert (response.index, response.log_append_time_ms, response.error_message) == (0, -1, None)
        assert ProduceRequest().topic_data == []
        assert Everything().origin == Point(x=0, y=7)

    def test_each_message_has_lists_of_its_own(self) -> None:
        first, second = ProduceResponse(), ProduceResponse()
        first.responses.append(TopicProduceResponse())
        assert second.responses == []
        third, fourth = Everything(), Everything()
        third.origin.x = 3
        assert fourth.origin.x == 0

    def test_messages_are_equal_by_value_and_only_to_their_own_kind(self) -> None:
        assert LeaderIdAndEpoch(leader_id=1) == LeaderIdAndEpoch(leader_id=1)
        assert LeaderIdAndEpoch(leader_id=1) != LeaderIdAndEpoch(leader_id=2)
        assert LeaderIdAndEpoch() != QuorumLeader()

    def test_a_message_is_printed_as_its_constructor(self) -> None:
        assert repr(LeaderIdAndEpoch(leader_id=1)) == "LeaderIdAndEpoch(leader_id=1, leader_epoch=-1)"

    def test_a_field_that_does_not_exist_is_an_error_in_constructing_and_in_setting(self) -> None:
        with pytest.raises(TypeError):
            cast(Any, LeaderIdAndEpoch)(leader=1)
        with pytest.raises(AttributeError):
            cast(Any, LeaderIdAndEpoch()).leader = 1

    def test_a_message_can_be_copied_but_not_hashed(self) -> None:
        original = ProduceResponse(responses=[TopicProduceResponse(name="a")])
        assert copy.deepcopy(original) == original
        with pytest.raises(TypeError):
            hash(original)

    def test_a_message_without_fields_works(self) -> None:
        class Nothing(Message, versions="0", flexible="0+"):
            pass

        assert encode(Nothing(), 0) == b"\0"
        assert decode(Nothing, 0, b"\0") == Nothing()


class TestVersions:
    @pytest.mark.parametrize(
        ("text", "versions"), [("3", range(3, 4)), ("3-12", range(3, 13)), ("3+", range(3, 32768))]
    )
    def test_the_three_ways_to_write_versions(self, text: str, versions: range) -> None:
        assert version_range(text) == versions

    def test_a_version_that_is_not_served_is_refused(self) -> None:
        with pytest.raises(ValueError, match="ProduceRequest has no version 2"):
            decoder(ProduceRequest, 2)
        with pytest.raises(ValueError, match="no version 14"):
            encoder(ProduceRequest, 14)
        with pytest.raises(ValueError, match="TopicProduceData has no version"):
            decoder(TopicProduceData, 9)

    def test_a_codec_is_made_once(self) -> None:
        assert decoder(ProduceRequest, 9) is decoder(ProduceRequest, 9)
        assert encoder(ProduceRequest, 9) is encoder(ProduceRequest, 9)

    def test_what_a_version_does_not_know_is_left_out(self) -> None:
        partition = PartitionProduceResponse(
            index=1, log_start_offset=5, error_message="no", current_leader=LeaderIdAndEpoch(leader_id=2)
        )
        message = ProduceResponse(
            responses=[TopicProduceResponse(name="t", topic_id=b"i" * 16, partition_responses=[partition])],
            node_endpoints=[NodeEndpoint(node_id=1, host="h", port=1)],
        )
        oldest = decode(ProduceResponse, 3, encode(message, 3))
        assert oldest.responses[0].partition_responses[0] == PartitionProduceResponse(index=1)
        assert oldest.node_endpoints == []
        newest = decode(ProduceResponse, 13, encode(message, 13))
        assert (newest.responses[0].name, newest.responses[0].topic_id) == ("", b"i" * 16)
        assert newest.responses[0].partition_responses == [partition]

    def test_null_is_written_as_empty_to_a_version_that_knows_no_null(self) -> None:
        assert (
            decode(JoinGroupResponse, 6, encode(JoinGroupResponse(protocol_name=None), 6)).protocol_name == ""
        )
        assert (
            decode(JoinGroupResponse, 7, encode(JoinGroupResponse(protocol_name=None), 7)).protocol_name
            is None
        )

    def test_null_in_a_field_that_is_never_null_is_our_own_mistake(self) -> None:
        with pytest.raises(AttributeError):
            encode(HeartbeatRequest(group_id=cast(str, None)), 0)

    def test_flexible_starts_at_its_version(self) -> None:
        assert [is_flexible(ProduceRequest, version) for version in (3, 8, 9, 13)] == [
            False,
            False,
            True,
            True,
        ]


class TestEveryKindOfField:
    FULL = Everything(
        origin=Point(x=1, y=2),
        flags=[True, False],
        ids=[b"a" * 16, bytes(16)],
        blobs=[b"", b"\xff" * 130],
        small=[-1, 127],
        name="n",
    )

    @pytest.mark.parametrize("version", [0, 1, 2])
    def test_it_comes_back_as_it_was(self, version: int) -> None:
        expected = copy.deepcopy(self.FULL)
        if version == 0:
            expected.origin.y = 7
        assert decode(Everything, version, encode(self.FULL, version)) == expected

    def test_tagged_fields_come_back_as_they_were(self) -> None:
        message = copy.deepcopy(self.FULL)
        message.corner = Point(x=5)
        message.points = [Point(x=1), Point(y=2)]
        message.shares = []
        message.note = b"!" * 300
        assert decode(Everything, 2, encode(message, 2)) == message

    def test_a_tagged_struct_that_says_nothing_is_not_sent(self) -> None:
        message = copy.deepcopy(self.FULL)
        message.corner = Point()
        assert encode(message, 2) == encode(self.FULL, 2)

    def test_a_nullable_struct_is_sent_behind_a_marker(self) -> None:
        without = encode(DescribeTopicPartitionsRequest(), 0)
        assert without == b"\1" + (2000).to_bytes(4, "big") + b"\xff\0"
        request = DescribeTopicPartitionsRequest(cursor=Cursor(topic_name="t", partition_index=1))
        assert encode(request, 0) == without[:-2] + b"\1" + b"\2t\0\0\0\1\0" + b"\0"
        assert decode(DescribeTopicPartitionsRequest, 0, encode(request, 0)) == request

    def test_a_tagged_struct_is_none_until_it_is_sent(self) -> None:
        assert decode(FetchRequest, 15, encode(FetchRequest(), 15)).replica_state is None
        follower = FetchRequest(replica_state=ReplicaState(replica_id=2, replica_epoch=9))
        assert decode(FetchRequest, 15, encode(follower, 15)) == follower


class TestRecords:
    def test_decoded_records_are_a_view_of_the_request(self) -> None:
        partition = PartitionProduceData(index=1, records=memoryview(b"batch"))
        request = ProduceRequest(topic_data=[TopicProduceData(name="t", partition_data=[partition])])
        for version in (3, 9):
            buffer = bytearray(encode(request, version))
            records = decode(ProduceRequest, version, buffer).topic_data[0].partition_data[0].records
            assert records is not None
            assert bytes(records) == b"batch"
            records[0] = ord("B")
            assert b"Batch" in buffer

    @pytest.mark.parametrize("size", [1, 126, 127, 128, 16_382, 16_383, 16_384, 2_100_000])
    def test_records_of_any_size_come_back(self, size: int) -> None:
        partition = PartitionProduceData(records=memoryview(b"x" * size))
        request = ProduceRequest(topic_data=[TopicProduceData(partition_data=[partition])])
        assert decode(ProduceRequest, 9, encode(request, 9)) == request

    @pytest.mark.parametrize("version", [11, 12])
    def test_encoded_records_stand_between_the_other_bytes_untouched(self, version: int) -> None:
        file = cast(File, object())
        in_file, in_memory = FileRange(file, 100, 5000), bytearray(b"123")
        message = fetch_response(in_file, b"", None, [in_memory, in_file], in_memory)
        parts = encoder(FetchResponse, version)(message)
        held = [part for part in parts if part is in_file or part is in_memory]
        assert held == [in_file, in_memory, in_file, in_memory]
        assert all(isinstance(part, bytes) for part in parts if part is not in_file and part is not in_memory)
        joined = b"".join(bytes(part.size) if isinstance(part, FileRange) else part for part in parts)
        read = decode(FetchResponse, version, joined).responses[0].partitions
        sizes = [
            None if partition.records is None else len(cast(bytes, partition.records)) for partition in read
        ]
        assert sizes == [5000, 0, None, 5003, 3]

    def test_no_records_means_one_part(self) -> None:
        assert len(encoder(FetchResponse, 12)(fetch_response(b"", None, []))) == 1

    def test_records_in_a_file_cannot_be_joined_into_bytes(self) -> None:
        with pytest.raises(AssertionError, match="file"):
            encode(fetch_response(FileRange(cast(File, object()), 0, 1)), 12)


def fetch_response(*records: Any) -> FetchResponse:
    partitions = [PartitionData(partition_index=index, records=value) for index, value in enumerate(records)]
    return FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=partitions)])


def test_neighbouring_fixed_fields_and_the_next_length_are_read_in_one_call() -> None:
    decoding = decoder_source(ProduceRequest, 9)
    assert "message.acks, message.timeout_ms, n = unpack_from_hiB(buffer, p)" in decoding
    assert "append(pack_ihqq(" in encoder_source(ProduceResponse, 3)
