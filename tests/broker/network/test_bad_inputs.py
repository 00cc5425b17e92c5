"""What no client should send. Each of these ends in a documented error or a closed connection, costs a bounded
amount of memory, leaves no traceback, and another client is served all the while and afterwards.

What a single API refuses is with that API's tests; here is what is wrong with bytes, sizes and numbers.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from crc32c import crc32c

from penstock.broker.handlers.topics import TOPICS_CREATED_PER_REQUEST_MAX
from penstock.protocol.apis import APIS
from penstock.protocol.compression import Codec, compress
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    LeaveGroupRequest,
    MemberIdentity,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.messages.offsets import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataRequestTopic,
    TopicRequest,
)
from penstock.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    DescribeProducersRequest,
    DescribeProducersRequestTopic,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from penstock.protocol.schema import Message
from tests.broker.conftest import SETTINGS, Node
from tests.broker.memory import MEGABYTE, forget_peak, open_files, peak_bytes, resident_bytes
from tests.broker.phrases import (
    batch,
    create_topic,
    everything,
    fetch_request,
    find_coordinator,
    handshake,
    list_offset,
    only,
    produce,
    produce_request,
    put,
)
from tests.broker.wire import Closed, Wire, encode_request, frame, header
from tests.broker.witness import Witness
from tests.support import BrokerProcess, wait_until

Unique = Callable[[str], str]

MANY = 100_000
THOUSANDS = 25_000
METADATA = APIS[3]
FLEXIBLE = 9


class Target(Node):
    """The broker under attack, and what the attack may cost."""

    memory_bytes = 48 * MEGABYTE
    # How long another client may have to wait, in processor time of the broker. Machines may be slow.
    stall_s = 3.0


@pytest.fixture(scope="module")
def attacked() -> Iterator[Target]:
    with BrokerProcess(SETTINGS) as process:
        node = Target(process)
        yield node
        node.revive()


@pytest.fixture
def target(attacked: Target) -> Iterator[Target]:
    attacked.revive()
    yield from under_watch(attacked)


def under_watch(node: Target) -> Iterator[Target]:
    """Hold a broker to the rules while a test does its worst. ``pytest -rP`` shows what it came to."""
    vars(node).pop("memory_bytes", None)
    vars(node).pop("stall_s", None)
    forget_peak(node.pid)
    before = resident_bytes(node.pid)
    with Witness(node.address, node.pid) as witness:
        yield node
        node.assert_well()
    cost = peak_bytes(node.pid) - before
    print(f"{cost / MEGABYTE:.0f} MB, another client waited {witness.slowest_s:.3f} s")
    assert cost < node.memory_bytes, f"{cost / MEGABYTE:.0f} MB"
    assert witness.slowest_s < node.stall_s, f"another client waited {witness.slowest_s:.1f} s"


@pytest.fixture
def wire(target: Target) -> Iterator[Wire]:
    with target.connect() as wire:
        yield wire


def metadata_body(body: bytes) -> bytes:
    """A frame of Metadata in its first flexible version, with any bytes for a body."""
    return frame(header(METADATA, FLEXIBLE) + body)


# 1. Lengths and pieces


@pytest.mark.parametrize("size", [-1, 0, 1, 3, 7, -(2**31), 2**31 - 1, (100 << 20) + 1])
def test_lengths_that_no_frame_has_close_the_connection(wire: Wire, size: int) -> None:
    wire.send_bytes(struct.pack(">i", size) + bytes(16))
    assert wire.is_closed()


@pytest.mark.parametrize("size", [8, 9])
def test_a_frame_too_short_for_a_header_closes_the_connection(wire: Wire, size: int) -> None:
    wire.send_bytes(frame(struct.pack(">hhi", 18, 0, 1) + bytes(size - 8)))
    assert wire.is_closed()


def test_a_frame_of_a_header_and_nothing_else_is_answered_or_closed(target: Target) -> None:
    for key, api in APIS.items():
        for version in range(api.version_min, api.version_max + 1):
            with target.connect() as wire:
                wire.send_bytes(frame(struct.pack(">hhih", key, version, 1, -1)))
                if key == 18 and version < 3:
                    assert wire.receive_frame()
                elif not (key == 16 and version < 3):
                    assert wire.is_closed(), (api, version)


def test_large_requests_that_carry_no_data_are_refused_by_their_length(wire: Wire) -> None:
    wire.send_bytes(struct.pack(">ihhih", (16 << 20) + 1, 3, 9, 1, -1))
    assert wire.is_closed()


def test_a_length_and_then_silence_costs_nothing(target: Target) -> None:
    with ExitStack() as stack:
        for size in (100, 20_000, 1 << 20, 15 << 20, 100 << 20):
            for sent in (0, 1, 5, 14):
                wire = stack.enter_context(target.connect())
                produce_header = struct.pack(">hhih", 0, 9, 1, -1) + bytes(10)
                wire.send_bytes(struct.pack(">i", size) + produce_header[:sent])
        with target.connect() as other:
            assert handshake(other) > 0
    target.memory_bytes = 16 * MEGABYTE


def test_a_frame_byte_by_byte_is_answered(wire: Wire) -> None:
    request = encode_request(MetadataRequest(topics=[]), 9)
    wire.expect(3, 9)
    for place in range(len(request)):
        wire.send_bytes(request[place : place + 1])
        time.sleep(0.001)
    assert wire.receive().topics == []


def test_a_frame_in_ten_thousand_pieces_is_answered(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    request = encode_request(produce_request(name, batch(b"x" * 300_000)), 9, wire.expect(0, 9))
    step = len(request) // 10_000
    for place in range(0, len(request), step):
        wire.socket.send(request[place : place + step])
    assert only(only(wire.receive().responses).partition_responses).error_code == 0
    assert everything(wire, name) == [b"x" * 300_000]


def test_requests_in_random_pieces_are_answered_in_order(wire: Wire) -> None:
    requests = b"".join(encode_request(MetadataRequest(topics=[]), 9, wire.expect(3, 9)) for _ in range(3000))
    place = 0
    size = 1
    while place < len(requests):
        wire.send_bytes(requests[place : place + size])
        place += size
        size = size * 7 % 4093 + 1
    for _ in range(3000):
        assert wire.receive().topics == []


# 2. Headers and tags


def test_a_negative_correlation_id_comes_back(wire: Wire) -> None:
    for correlation_id in (-1, -(2**31), 2**31 - 1, 0):
        wire.send_bytes(encode_request(MetadataRequest(topics=[]), 9, correlation_id))
        assert struct.unpack_from(">i", wire.receive_frame())[0] == correlation_id


@pytest.mark.parametrize("client_id", [None, "", "x" * 32767, "\0", "a\r\nb", "\x1b[31m", "żółć"])
def test_any_client_id_will_do(wire: Wire, client_id: str | None) -> None:
    assert wire.call(MetadataRequest(topics=[]), 9, client_id=client_id).topics == []


@pytest.mark.parametrize("size", [-2, -32768])
def test_a_client_id_of_negative_length_is_none(wire: Wire, size: int) -> None:
    wire.send_bytes(frame(struct.pack(">hhih", 18, 0, 1, size)))
    assert wire.receive_frame()


def test_a_client_id_longer_than_its_frame_closes_the_connection(wire: Wire) -> None:
    wire.send_bytes(frame(struct.pack(">hhih", 18, 0, 1, 100) + b"short"))
    assert wire.is_closed()


UNKNOWN_TAGS = {
    "one": b"\1\5\3abc",
    "empty": b"\1\5\0",
    "the largest number": b"\1\xff\xff\xff\xff\x0f\1a",
    "a hundred": b"\x64" + b"".join(bytes([number, 1, 0]) for number in range(10, 110)),
}


@pytest.mark.parametrize("what", UNKNOWN_TAGS)
def test_unknown_tags_are_skipped(wire: Wire, what: str) -> None:
    tags = UNKNOWN_TAGS[what]
    empty_metadata = b"\1\0\0\0" + tags
    wire.send_bytes(frame(header(METADATA, FLEXIBLE)[:-1] + tags + empty_metadata))
    assert struct.unpack_from(">i", wire.receive_frame()) == (1,)


@pytest.mark.parametrize("tags", [b"\2\5\1a\5\1b", b"\2\7\1a\5\1b"], ids=["twice", "out of order"])
def test_tags_out_of_order_are_answered_or_closed(target: Target, tags: bytes) -> None:
    for body in (tags + b"\1\0\0\0\0", b"\0\1\0\0\0" + tags):
        with target.connect() as wire:
            wire.send_bytes(frame(header(METADATA, FLEXIBLE)[:-1] + body))
            with contextlib.suppress(Closed):
                assert struct.unpack_from(">i", wire.receive_frame()) == (1,)


BAD_TAGS = {
    "more than there are": b"\2\5\1a",
    "a count of 2^32-1": b"\xff\xff\xff\xff\x0f",
    "a count of six bytes": b"\xff\xff\xff\xff\xff\x0f",
    "longer than the frame": b"\1\5\x7fa",
    "a size of 2^32-1": b"\1\5\xff\xff\xff\xff\x0f",
    "a number that does not end": b"\1\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("what", BAD_TAGS)
def test_tags_that_are_none_close_the_connection(target: Target, what: str) -> None:
    with target.connect() as wire:
        wire.send_bytes(frame(header(METADATA, FLEXIBLE)[:-1] + BAD_TAGS[what]))
        assert wire.is_closed()
    with target.connect() as wire:
        wire.send_bytes(metadata_body(b"\1\0\0\0" + BAD_TAGS[what]))
        assert wire.is_closed()


def test_the_header_of_another_version_is_answered_or_closed(target: Target) -> None:
    for api in APIS.values():
        for version in (api.version_min, api.version_max):
            flexible = api.request_header_version(version) == 2
            start = struct.pack(">hhih", api.key, version, 1, -1)
            with target.connect() as wire:
                wire.send_bytes(frame(start + (b"" if flexible else b"\0") + bytes(40)))
                with contextlib.suppress(Closed, TimeoutError):
                    wire.socket.settimeout(1)
                    wire.receive_frame()


def test_trailing_bytes_are_tolerated(wire: Wire) -> None:
    # librdkafka sends three too many with Metadata v13.
    wire.send_bytes(frame(encode_request(MetadataRequest(topics=[]), 9)[4:] + b"\1\0\0"))
    assert wire.receive_frame()


# 3. Strings and arrays

BAD_BODIES = {
    "2^31 topics": b"\x81\x80\x80\x80\x08",
    "2^32-1 topics": b"\xff\xff\xff\xff\x0f",
    "a count of six bytes": b"\x80\x80\x80\x80\x80\x01",
    "a count of eleven bytes": b"\xff" * 10 + b"\x01",
    "a count that does not end": b"\xff\xff",
    "one topic, no bytes": b"\2",
    "a null name": b"\2\0\0\0\0\0\0",
    "a name longer than the frame": b"\2\x7fabc",
    "a name of 2^31 bytes": b"\2\x81\x80\x80\x80\x08abc",
    "invalid UTF-8": b"\2\3\xff\xfe\0\0\0\0\0",
    "a surrogate": b"\2\4\xed\xa0\x80\0\0\0\0\0",
    "an overlong NUL": b"\2\3\xc0\x80\0\0\0\0\0",
    "cut short": b"\2\3ab\0\1",
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_bodies_that_are_none_close_the_connection(wire: Wire, what: str) -> None:
    wire.send_bytes(metadata_body(BAD_BODIES[what]))
    assert wire.is_closed()


@pytest.mark.parametrize("count", [-2, -(2**31), 2**31 - 1, 10**6])
def test_old_arrays_of_impossible_size_close_the_connection(wire: Wire, count: int) -> None:
    wire.send_bytes(frame(header(METADATA, 8) + struct.pack(">i", count) + bytes(64)))
    assert wire.is_closed()


@pytest.mark.parametrize("size", [-1, -2, -32768, 32767])
def test_old_strings_of_impossible_size_close_the_connection(wire: Wire, size: int) -> None:
    wire.send_bytes(frame(header(METADATA, 8) + struct.pack(">ih", 1, size) + bytes(64)))
    assert wire.is_closed()


def test_booleans_that_are_neither_are_survived(wire: Wire) -> None:
    wire.send_bytes(metadata_body(b"\1\xff\x80\x02\0"))
    with contextlib.suppress(Closed):
        wire.receive_frame()


# 4. Deep and wide


def test_a_million_topics_close_the_connection(target: Target, wire: Wire) -> None:
    # Count, and a million names of one letter with their tags.
    body = b"\xc1\x84\x3d" + b"\2a\0" * 10**6 + bytes(4)
    wire.send_bytes(metadata_body(body))
    assert wire.is_closed()
    target.memory_bytes = 160 * MEGABYTE


def test_a_million_partitions_close_the_connection(target: Target, wire: Wire) -> None:
    partition = struct.pack(">iqi", 0, 0, 100)
    start = struct.pack(">iiiib", -1, 0, 1, 1 << 20, 0) + struct.pack(">ih1si", 1, 1, b"t", 10**6)
    wire.send_bytes(frame(header(APIS[1], 4) + start + partition * 10**6))
    assert wire.is_closed()
    target.memory_bytes = 200 * MEGABYTE


def answered(target: Target, request: Message, version: int, memory_megabytes: int = 160) -> object:
    """The answer to a request that is large, but not too large."""
    target.memory_bytes = memory_megabytes * MEGABYTE
    with target.connect() as wire:
        return wire.call(request, version)


def test_a_hundred_thousand_unknown_partitions_are_fetched_in_vain(target: Target) -> None:
    wanted = [FetchPartition(partition=index, partition_max_bytes=100) for index in range(MANY)]
    request = FetchRequest(
        max_wait_ms=60_000, min_bytes=1, topics=[FetchTopic(topic="no-such-topic", partitions=wanted)]
    )
    response = answered(target, request, 12)
    errors = Counter(data.error_code for data in response.responses[0].partitions)  # type: ignore[attr-defined]
    assert errors == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: MANY}


def test_a_hundred_thousand_times_the_same_partition_is_one_partition(target: Target, unique: Unique) -> None:
    name = unique("t")
    with target.connect() as wire:
        create_topic(wire, name)
        put(wire, name, b"x" * 1000)
    wanted = [FetchPartition(partition=0, partition_max_bytes=1 << 20)] * MANY
    request = FetchRequest(
        max_wait_ms=0, min_bytes=1, max_bytes=1 << 20, topics=[FetchTopic(topic=name, partitions=wanted)]
    )
    response = answered(target, request, 12)
    sizes = [len(data.records) for data in response.responses[0].partitions]  # type: ignore[attr-defined]
    assert sum(sizes) <= (1 << 20) + 2000


def test_a_hundred_thousand_names_create_no_more_topics_than_one_request_may() -> None:
    with BrokerProcess(SETTINGS) as process:
        for target in under_watch(Target(process)):
            target.memory_bytes = 300 * MEGABYTE
            target.stall_s = 8
            asked = [MetadataRequestTopic(name=f"garbage-{number}") for number in range(MANY)]
            with target.connect(timeout_s=60) as wire:
                response = wire.call(MetadataRequest(topics=asked), 9)
                errors = Counter(topic.error_code for topic in response.topics)
                created = TOPICS_CREATED_PER_REQUEST_MAX
                assert errors == {0: created, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: MANY - created}
            # Nothing was written to, so nothing is on the disk.
            assert not list(process.data_dir.glob("garbage-*"))


# Made when asked for: each is tens of thousands of objects.
WIDE: dict[str, tuple[Callable[[], Message], int]] = {
    "ListOffsets": (
        lambda: ListOffsetsRequest(
            topics=[
                ListOffsetsTopic(
                    name="t",
                    partitions=[
                        ListOffsetsPartition(partition_index=n, timestamp=-n) for n in range(THOUSANDS)
                    ],
                )
            ]
        ),
        7,
    ),
    "ListOffsets, one topic each": (
        lambda: ListOffsetsRequest(
            topics=[
                ListOffsetsTopic(name=f"t{n}", partitions=[ListOffsetsPartition(timestamp=-1)])
                for n in range(THOUSANDS)
            ]
        ),
        7,
    ),
    "OffsetForLeaderEpoch": (
        lambda: OffsetForLeaderEpochRequest(
            topics=[
                OffsetForLeaderTopic(
                    topic="t", partitions=[OffsetForLeaderPartition(partition=n) for n in range(THOUSANDS)]
                )
            ]
        ),
        4,
    ),
    "DeleteRecords": (
        lambda: DeleteRecordsRequest(
            topics=[
                DeleteRecordsTopic(
                    name="t",
                    partitions=[
                        DeleteRecordsPartition(partition_index=n, offset=-n) for n in range(THOUSANDS)
                    ],
                )
            ]
        ),
        2,
    ),
    "Produce": (
        lambda: ProduceRequest(
            acks=1,
            topic_data=[
                TopicProduceData(
                    name="t", partition_data=[PartitionProduceData(index=n) for n in range(THOUSANDS)]
                )
            ],
        ),
        9,
    ),
    "DeleteTopics": (lambda: DeleteTopicsRequest(topic_names=[f"no-such-{n}" for n in range(THOUSANDS)]), 5),
    "CreateTopics": (
        lambda: CreateTopicsRequest(
            topics=[CreatableTopic(name=f"..{n}/", num_partitions=1) for n in range(THOUSANDS)]
        ),
        7,
    ),
    "DescribeTopicPartitions": (
        lambda: DescribeTopicPartitionsRequest(
            topics=[TopicRequest(name=f"no-such-{n}") for n in range(THOUSANDS)]
        ),
        0,
    ),
    "FindCoordinator": (
        lambda: FindCoordinatorRequest(coordinator_keys=[f"g{n}" for n in range(THOUSANDS)]),
        6,
    ),
    "DescribeGroups": (lambda: DescribeGroupsRequest(groups=[f"g{n}" for n in range(THOUSANDS)]), 5),
    "DeleteGroups": (lambda: DeleteGroupsRequest(groups_names=[f"g{n}" for n in range(THOUSANDS)]), 2),
    "LeaveGroup": (
        lambda: LeaveGroupRequest(
            group_id="g", members=[MemberIdentity(member_id=f"m{n}") for n in range(THOUSANDS)]
        ),
        5,
    ),
    "SyncGroup": (
        lambda: SyncGroupRequest(
            group_id="g",
            member_id="m",
            assignments=[SyncGroupRequestAssignment(member_id=f"m{n}") for n in range(THOUSANDS)],
        ),
        5,
    ),
    "OffsetCommit": (
        lambda: OffsetCommitRequest(
            group_id="g",
            topics=[
                OffsetCommitRequestTopic(
                    name="t",
                    partitions=[
                        OffsetCommitRequestPartition(partition_index=n, committed_metadata="x")
                        for n in range(THOUSANDS)
                    ],
                )
            ],
        ),
        9,
    ),
    "OffsetFetch": (
        lambda: OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id="g",
                    topics=[OffsetFetchRequestTopics(name="t", partition_indexes=list(range(THOUSANDS)))],
                )
            ]
        ),
        9,
    ),
    "OffsetFetch, one group each": (
        lambda: OffsetFetchRequest(
            groups=[OffsetFetchRequestGroup(group_id=f"g{n}", topics=None) for n in range(THOUSANDS)]
        ),
        9,
    ),
    "AddPartitionsToTxn": (
        lambda: AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="payments",
            v3_and_below_topics=[AddPartitionsToTxnTopic(name="no-such", partitions=list(range(MANY)))],
        ),
        3,
    ),
    "TxnOffsetCommit": (
        lambda: TxnOffsetCommitRequest(
            transactional_id="payments",
            group_id="g",
            topics=[
                TxnOffsetCommitRequestTopic(
                    name="no-such",
                    partitions=[TxnOffsetCommitRequestPartition(partition_index=n) for n in range(MANY)],
                )
            ],
        ),
        5,
    ),
    "DescribeConfigs": (
        lambda: DescribeConfigsRequest(
            resources=[
                DescribeConfigsResource(resource_type=2, resource_name=f"no-such-{n}")
                for n in range(THOUSANDS)
            ]
        ),
        4,
    ),
    "IncrementalAlterConfigs": (
        lambda: IncrementalAlterConfigsRequest(
            resources=[
                IncrementalAlterConfigsResource(resource_type=2, resource_name=f"no-such-{n}")
                for n in range(THOUSANDS)
            ]
        ),
        1,
    ),
}


@pytest.mark.parametrize("what", WIDE)
def test_requests_for_thousands_of_things_are_answered(target: Target, what: str) -> None:
    with target.connect() as wire:
        find_coordinator(wire, "g")
    make, version = WIDE[what]
    assert answered(target, make(), version) is not None


def test_a_topic_described_a_hundred_thousand_times_is_described_once(target: Target, unique: Unique) -> None:
    name = unique("t")
    with target.connect() as wire:
        create_topic(wire, name)
    asked = DescribeConfigsResource(resource_type=2, resource_name=name, configuration_keys=None)
    request = DescribeConfigsRequest(
        resources=[asked] * MANY, include_synonyms=True, include_documentation=True
    )
    assert len(answered(target, request, 4, 100).results) == 1  # type: ignore[attr-defined]


def test_the_producers_of_a_partition_asked_for_a_hundred_thousand_times_are_described_once(
    target: Target, unique: Unique
) -> None:
    name = unique("t")
    with target.connect() as wire:
        create_topic(wire, name)
        for producer_id in range(100):
            records = batch(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=0)
            assert produce(wire, name, records).error_code == 0
    asked = DescribeProducersRequestTopic(name=name, partition_indexes=[0] * MANY)
    response = answered(target, DescribeProducersRequest(topics=[asked]), 0, 100)
    ((described,),) = (topic.partitions for topic in response.topics)  # type: ignore[attr-defined]
    assert len(described.active_producers) == 100


# 6. Bombs


def with_body(body: bytes, codec: Codec, *, timestamp: int) -> bytes:
    """A batch that says it holds one record of this time, whatever its body is."""
    made = bytearray(batch(b"", timestamp=timestamp)[:61]) + body
    struct.pack_into(">i", made, 8, len(made) - 12)
    struct.pack_into(">h", made, 21, codec)
    struct.pack_into(">I", made, 17, crc32c(bytes(made[21:])))
    return bytes(made)


ZSTD_WINDOW_OF_GIGABYTES = b"\x28\xb5\x2f\xfd\x00\xb0" + b"\x01\x00\x00"


def bombs() -> dict[str, tuple[bytes, Codec]]:
    zeros = bytes(150_000_000)
    made = {codec.name: (compress(codec, zeros), codec) for codec in (Codec.GZIP, Codec.LZ4, Codec.ZSTD)}
    made["SNAPPY"] = (compress(Codec.SNAPPY, zeros[:20_000_000]), Codec.SNAPPY)
    # Raw snappy opens with the size of its output.
    made["snappy that lies"] = (b"\xff\xff\xff\xff\x0f" + b"\0" * 20, Codec.SNAPPY)
    made["nested"] = (compress(Codec.ZSTD, compress(Codec.ZSTD, zeros)), Codec.ZSTD)
    made["zstd with a giant window"] = (ZSTD_WINDOW_OF_GIGABYTES, Codec.ZSTD)
    for codec in (Codec.GZIP, Codec.LZ4, Codec.ZSTD, Codec.SNAPPY):
        made[f"{codec.name}, cut short"] = (compress(codec, b"x" * 10_000)[:-7], codec)
        made[f"{codec.name}, rubbish"] = (b"rubbish" * 10, codec)
    return made


def test_bombs_are_stored_and_do_not_go_off(target: Target, unique: Unique) -> None:
    # Up to 64 MB of a batch are unfolded to find a record by its time.
    target.memory_bytes = 220 * MEGABYTE
    with target.connect() as wire:
        for what, (body, codec) in bombs().items():
            name = unique("t")
            create_topic(wire, name, configs={"max.message.bytes": "20000000"})
            assert produce(wire, name, with_body(body, codec, timestamp=1000)).error_code == 0, what
            # Its beginning is the best answer there is.
            assert list_offset(wire, name, 500) == 0, what
            assert list_offset(wire, name, -3) == 0, what


def test_many_batches_that_lie_about_their_time_do_not_stop_the_broker(
    target: Target, unique: Unique
) -> None:
    name = unique("t")
    value = bytes(30_000_000)
    record = bytes(1) + b"\0\0\1" + varint(len(value)) + value + b"\0"
    body = compress(Codec.ZSTD, varint(len(record)) + record)
    lying = bytearray(with_body(body, Codec.ZSTD, timestamp=1000))
    # The header promises a record of a later time than any that is inside.
    struct.pack_into(">q", lying, 35, 5000)
    struct.pack_into(">I", lying, 17, crc32c(bytes(lying[21:])))
    target.memory_bytes = 220 * MEGABYTE
    target.stall_s = 1.5
    with target.connect() as wire:
        create_topic(wire, name)
        for _ in range(120):
            assert produce(wire, name, bytes(lying)).error_code == 0
        assert list_offset(wire, name, 4000) in (-1, 0)


def varint(value: int) -> bytes:
    """A signed varint, as records have them."""
    value <<= 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# 7. Names


def test_names_do_not_leave_the_data_directory_or_write_the_log(target: Target) -> None:
    evil = ["..", "../../x", "a/b", "\x1b[2J", "a\r\nforged: line", "\u202e", "x" * 30_000]
    with target.connect() as wire:
        for name in evil:
            wire.call(MetadataRequest(topics=[MetadataRequestTopic(name=name)]), 9, client_id=name[:100])
            wire.call(produce_request(name, batch(b"v")), 9)
            wire.call(fetch_request(name, 0), 12)
            wire.call(join_request(name), 3)
            wire.call(FindCoordinatorRequest(key=name), 2)
    with target.connect() as wire:
        wire.send_bytes(b"\x7f\xff\xff\xff\r\n\x1b[31m")
        assert wire.is_closed()
    for line in target.process.log_path.read_text().splitlines():
        assert "\x1b" not in line
        assert json.loads(line)["level"] in ("warning", "error", "info")


# 9. Sessions


def test_a_flood_of_sessions_is_bounded(target: Target, unique: Unique) -> None:
    name = unique("t")
    target.memory_bytes = 24 * MEGABYTE
    with target.connect() as wire:
        create_topic(wire, name)
        ids = []
        for _ in range(1200):
            response = wire.call(fetch_request(name, 0, session_epoch=0), 12)
            assert response.error_code == 0
            ids.append(response.session_id)
    # The last ones go on without: theirs is 0, which means none.
    assert 0 in ids
    assert len(set(ids)) <= 1001


def test_sessions_over_partitions_that_do_not_exist_are_bounded() -> None:
    wanted = [FetchPartition(partition=number, partition_max_bytes=1) for number in range(50_000)]
    asked = FetchRequest(
        max_wait_ms=0, session_epoch=0, topics=[FetchTopic(topic="nothing", partitions=wanted)]
    )
    request = encode_request(asked, 12)
    with BrokerProcess(SETTINGS) as process:
        for target in under_watch(Target(process)):
            target.memory_bytes = 250 * MEGABYTE
            with target.connect() as wire:
                create_topic(wire, "t")
                mine = wire.call(fetch_request("t", 0, session_epoch=0), 12).session_id
                for _ in range(6):
                    wire.send_bytes(request)
                    assert len(wire.receive_frame()) > 1_000_000
                # There is no room for more, but who has a session keeps it.
                going_on = fetch_request("t", 0, session_id=mine, session_epoch=1)
                assert wire.call(going_on, 12).error_code == 0
                assert wire.call(fetch_request("t", 0, session_epoch=0), 12).error_code == 0


# 10. Groups


def join_request(group: str, metadata: bytes = b"x") -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=6000,
        rebalance_timeout_ms=1000,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=metadata)],
    )


def test_a_flood_of_new_members_is_bounded(target: Target) -> None:
    with target.connect() as wire:
        find_coordinator(wire, "flooded")
        requests = b"".join(encode_request(join_request("flooded"), 4, number) for number in range(5000))
        wire.send_bytes(requests)
        for _ in range(5000):
            wire.receive_frame()
        described = only(wire.call(DescribeGroupsRequest(groups=["flooded"]), 5).groups)
        # Ids were handed out; nobody has joined.
        assert described.members == []
    target.memory_bytes = 16 * MEGABYTE


def test_a_flood_of_new_groups_is_bounded(target: Target) -> None:
    with target.connect() as wire:
        find_coordinator(wire, "g")
        for start in range(0, 20_000, 1000):
            wire.send_bytes(
                b"".join(encode_request(join_request(f"flood-{start + n}"), 4, n) for n in range(1000))
            )
            for _ in range(1000):
                wire.receive_frame()


def test_subscriptions_of_a_hundred_megabytes_are_refused_by_their_length(wire: Wire) -> None:
    wire.send_bytes(struct.pack(">i", 100 << 20) + header(APIS[11], 5) + bytes(1000))
    assert wire.is_closed()


def test_members_that_take_up_megabytes_are_refused(target: Target) -> None:
    target.memory_bytes = 40 * MEGABYTE
    with target.connect() as wire:
        find_coordinator(wire, "g")
        for number in range(20):
            response = wire.call(join_request(f"large-{number}", bytes(10_000_000)), 3)
            assert response.error_code == ErrorCode.MESSAGE_TOO_LARGE


# Settings


def test_a_setting_of_ten_megabytes_is_survived(target: Target, unique: Unique) -> None:
    name = unique("t")
    target.memory_bytes = 160 * MEGABYTE
    with target.connect() as wire:
        create_topic(wire, name)
        for setting in (
            "leader.replication.throttled.replicas",
            "retention.ms",
            "no.such.setting",
            "cleanup.policy",
        ):
            config = IncrementalAlterableConfig(
                name=setting, config_operation=0, value="9:" + "x" * 10_000_000
            )
            altered = IncrementalAlterConfigsResource(resource_type=2, resource_name=name, configs=[config])
            wire.call(IncrementalAlterConfigsRequest(resources=[altered]), 1)
        asked = DescribeConfigsResource(resource_type=2, resource_name=name, configuration_keys=None)
        # The old versions have no room for such a value; the others do.
        for version in range(1, 5):
            with target.connect() as other:
                result = only(other.call(DescribeConfigsRequest(resources=[asked]), version).results)
                assert result.error_code in (0, ErrorCode.INVALID_CONFIG, ErrorCode.UNSUPPORTED_VERSION)


def test_a_list_that_grows_by_a_hundred_thousand_elements_does_not_stop_the_broker() -> None:
    with BrokerProcess(SETTINGS) as process, Wire((process.host, process.port)) as wire:
        create_topic(wire, "t")
        try:
            for number in range(2):
                value = ",".join(f"{number}:{element}" for element in range(MANY))
                config = IncrementalAlterableConfig(
                    name="leader.replication.throttled.replicas", config_operation=2, value=value
                )
                altered = IncrementalAlterConfigsResource(
                    resource_type=2, resource_name="t", configs=[config]
                )
                wire.call(IncrementalAlterConfigsRequest(resources=[altered]), 1)
            assert handshake(wire) > 0
        except TimeoutError:
            process.kill()
            pytest.fail("the broker does nothing else for a long time")


@pytest.mark.parametrize("version", [0, 1])
def test_names_of_settings_that_fill_the_answer_are_survived(target: Target, version: int) -> None:
    # An old string has room for 32,767 bytes; an answer that repeats the name has something to add.
    name = "x" * 32767
    with target.connect() as wire:
        resource = AlterConfigsResource(
            resource_type=4, resource_name="1", configs=[AlterableConfig(name=name, value=None)]
        )
        assert only(wire.call(AlterConfigsRequest(resources=[resource]), version).responses).error_code != 0
        other = IncrementalAlterConfigsResource(
            resource_type=4,
            resource_name="1",
            configs=[IncrementalAlterableConfig(name=name, config_operation=0, value=None)],
        )
        response = wire.call(IncrementalAlterConfigsRequest(resources=[other]), 0)
        assert only(response.responses).error_code != 0


def test_a_refusal_behind_a_change_that_is_being_written_is_answered(target: Target, unique: Unique) -> None:
    resource = AlterConfigsResource(
        resource_type=4, resource_name="1", configs=[AlterableConfig(name="x" * 32767, value=None)]
    )
    created = CreatableTopic(name=unique("t"), num_partitions=1, replication_factor=1)
    with target.connect() as wire:
        # Both answers come when the disk has the first, out of no request's own turn.
        wire.send(CreateTopicsRequest(topics=[created]), 7)
        wire.send(AlterConfigsRequest(resources=[resource]), 0)
        assert only(wire.receive().topics).error_code == 0
        assert only(wire.receive().responses).error_code != 0


# 11. Other protocols

OTHER_PROTOCOLS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP POST": b"POST /topics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "text": b"hello\r\n" * 10,
}


@pytest.mark.parametrize("what", OTHER_PROTOCOLS)
def test_other_protocols_are_closed(wire: Wire, what: str) -> None:
    wire.send_bytes(OTHER_PROTOCOLS[what])
    assert wire.is_closed()


# 12. Floods


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process too have thousands of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("too few descriptors allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_thousand_idle_connections_cost_little(target: Target, many_files: None) -> None:
    target.memory_bytes = 24 * MEGABYTE
    with ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(target.connect())
        wait_until(lambda: open_files(target.pid) > 2000, 60, "all of them are accepted")
        with target.connect() as wire:
            assert handshake(wire) > 0
    wait_until(lambda: open_files(target.pid) < 200, 60, "all of them are forgotten")


def test_two_thousand_requests_that_have_only_begun_cost_little(target: Target, many_files: None) -> None:
    target.memory_bytes = 64 * MEGABYTE
    begun = struct.pack(">i", 50_000) + header(APIS[0], 9) + bytes(10_000)
    with ExitStack() as stack:
        for number in range(2000):
            stack.enter_context(target.connect()).send_bytes(begun[: 4 + number * 5])
        with target.connect() as wire:
            assert handshake(wire) > 0


def test_large_requests_that_have_only_begun_do_not_keep_others_out() -> None:
    limits = {"socket.request.max.bytes": str(8 << 20), "queued.max.request.bytes": str(16 << 20)}
    begun = struct.pack(">i", 8 << 20) + header(APIS[0], 9) + bytes(5 << 20)
    with BrokerProcess({**SETTINGS, **limits}) as process:
        for target in under_watch(Target(process)):
            target.memory_bytes = 64 * MEGABYTE
            with ExitStack() as stack:
                for _ in range(12):
                    wire = stack.enter_context(target.connect(timeout_s=0.2))
                    with contextlib.suppress(TimeoutError):
                        wire.socket.sendall(begun)
                with target.connect() as other:
                    assert handshake(other) > 0
                    create_topic(other, "t")
                    assert put(other, "t", b"x" * 10_000) == 0


class FrugalBroker(BrokerProcess):
    """A broker that the system allows few descriptors."""

    descriptors = 400

    def command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {self.descriptors} && exec "$@"', "sh", *super().command()]


def test_a_flood_of_connections_leaves_descriptors_for_the_logs(many_files: None) -> None:
    with FrugalBroker(SETTINGS) as process, Wire((process.host, process.port)) as wire:
        create_topic(wire, "t", 20, {"flush.messages": "1"})
        for _ in under_watch(Target(process)):
            with ExitStack() as stack:
                for _ in range(2 * FrugalBroker.descriptors):
                    connection = socket.create_connection((process.host, process.port), timeout=60)
                    stack.callback(connection.close)
                # Those who were there first go on, and what needs files gets them.
                for partition in range(20):
                    assert put(wire, "t", b"v", partition=partition) == 0
                find_coordinator(wire, "g")
                create_topic(wire, "meanwhile")
                assert put(wire, "meanwhile", b"v") == 0
                with Wire((process.host, process.port)) as late:
                    assert late.is_closed()
            wait_until(lambda: open_files(process.pid) < 200, 60, "the connections are gone")
            with Wire((process.host, process.port)) as again:
                assert handshake(again) > 0
