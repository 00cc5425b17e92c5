"""Produce and InitProducerId on the wire: what is accepted, what is answered, and what is stored."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from crc32c import crc32c

from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.messages.topics import MetadataRequest
from penstock.protocol.records import HEADER_SIZE, SEQUENCE_MAX, batches, encode_batch
from tests.broker.conftest import Node
from tests.broker.phrases import (
    batch,
    create_topic,
    everything,
    fetch,
    find_coordinator,
    now_ms,
    only,
    produce,
    produce_request,
    put,
)
from tests.broker.wire import Wire, encode_request

Unique = Callable[[str], str]

VERSIONS = range(3, 14)
CRC_START = 21


@pytest.fixture
def topic(wire: Wire, unique: Unique) -> str:
    name = unique("t")
    create_topic(wire, name)
    return name


def with_valid_crc(damaged: bytearray) -> bytes:
    struct.pack_into(">I", damaged, 17, crc32c(bytes(damaged[CRC_START:])))
    return bytes(damaged)


def edited(position: int, code: str, value: int, *content: bytes) -> bytes:
    """A batch with one header field overwritten, and a checksum that agrees with it."""
    changed = bytearray(batch(*(content or (b"value",))))
    struct.pack_into(">" + code, changed, position, value)
    return with_valid_crc(changed)


# What is stored


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_stores_a_batch_and_answers_with_its_offset(
    wire: Wire, unique: Unique, version: int
) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name)
    for number in range(3):
        data = PartitionProduceData(index=0, records=batch(b"a%d" % number, b"b"))  # type: ignore[arg-type]
        asked = TopicProduceData(name=name, topic_id=topic_id, partition_data=[data])
        response = wire.call(ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[asked]), version)
        answer = only(response.responses)
        assert (answer.name, answer.topic_id) == ((name, bytes(16)) if version < 13 else ("", topic_id))
        result = only(answer.partition_responses)
        assert (result.index, result.error_code, result.base_offset) == (0, 0, 2 * number)
        assert result.log_append_time_ms == -1
        assert result.log_start_offset == (0 if version >= 5 else -1)
    assert everything(wire, name) == [b"a0", b"b", b"a1", b"b", b"a2", b"b"]


@pytest.mark.parametrize("codec", list(Codec))
def test_compressed_batches_come_back_as_they_were_sent(wire: Wire, topic: str, codec: Codec) -> None:
    sent = batch(b"x" * 1000, b"y" * 1000, codec=codec)
    assert produce(wire, topic, sent).base_offset == 0
    stored = bytes(fetch(wire, topic, 0).records)  # type: ignore[arg-type]
    # Only the base offset and the leader epoch are the broker's to write.
    assert stored[16:] == sent[16:]
    assert everything(wire, topic) == [b"x" * 1000, b"y" * 1000]


def test_partitions_of_one_request_stand_and_fall_alone(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 3)
    damaged = bytearray(batch(b"damaged"))
    damaged[-1] ^= 1
    sent = [(0, batch(b"zero")), (1, bytes(damaged)), (2, batch(b"two")), (3, batch(b"nowhere"))]
    data = [PartitionProduceData(index=index, records=records) for index, records in sent]  # type: ignore[arg-type]
    request = ProduceRequest(
        acks=1, timeout_ms=1000, topic_data=[TopicProduceData(name=name, partition_data=data)]
    )
    results = only(wire.call(request, 9).responses).partition_responses
    assert [(result.index, result.error_code) for result in results] == [
        (0, ErrorCode.NONE),
        (1, ErrorCode.CORRUPT_MESSAGE),
        (2, ErrorCode.NONE),
        (3, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert [everything(wire, name, index) for index in range(3)] == [[b"zero"], [], [b"two"]]


def test_one_partition_twice_in_a_request_gets_both_batches(wire: Wire, topic: str) -> None:
    data = [PartitionProduceData(index=0, records=batch(value)) for value in (b"1", b"2")]  # type: ignore[arg-type]
    request = ProduceRequest(
        acks=1, timeout_ms=1000, topic_data=[TopicProduceData(name=topic, partition_data=data)]
    )
    results = only(wire.call(request, 9).responses).partition_responses
    assert [(result.error_code, result.base_offset) for result in results] == [(0, 0), (0, 1)]
    assert everything(wire, topic) == [b"1", b"2"]


def test_log_append_time_is_the_brokers_and_is_told_to_the_producer(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, configs={"message.timestamp.type": "LogAppendTime"})
    before_ms = now_ms()
    result = produce(wire, name, batch(b"v", timestamp=5))
    assert before_ms <= result.log_append_time_ms <= now_ms()
    header = only([header for _, header in batches(fetch(wire, name, 0).records)])  # type: ignore[arg-type]
    assert (header.max_timestamp, header.is_log_append_time) == (result.log_append_time_ms, True)
    assert everything(wire, name) == [b"v"]


# What is refused


@pytest.mark.parametrize("acks", [-2, 2, 5, 32767, -32768])
def test_acks_that_do_not_exist_are_refused(wire: Wire, topic: str, acks: int) -> None:
    result = produce(wire, topic, batch(b"v"), acks=acks)
    assert (result.error_code, result.base_offset) == (ErrorCode.INVALID_REQUIRED_ACKS, -1)
    assert everything(wire, topic) == []


REFUSED_BATCHES = {
    "nothing": (b"", ErrorCode.INVALID_RECORD),
    "null": (None, ErrorCode.INVALID_RECORD),
    "one byte": (b"\0", ErrorCode.CORRUPT_MESSAGE),
    "half a header": (batch(b"v")[:40], ErrorCode.CORRUPT_MESSAGE),
    "cut short": (batch(b"v")[:-1], ErrorCode.CORRUPT_MESSAGE),
    "wrong checksum": (batch(b"v")[:-1] + b"!", ErrorCode.CORRUPT_MESSAGE),
    "magic 0": (edited(16, "b", 0), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
    "magic 1": (edited(16, "b", 1), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
    "magic 3": (edited(16, "b", 3), ErrorCode.CORRUPT_MESSAGE),
    "magic -1": (edited(16, "b", -1), ErrorCode.CORRUPT_MESSAGE),
    "length 0": (edited(8, "i", 0), ErrorCode.CORRUPT_MESSAGE),
    "length -1": (edited(8, "i", -1), ErrorCode.CORRUPT_MESSAGE),
    "length 2^31-1": (edited(8, "i", 2**31 - 1), ErrorCode.CORRUPT_MESSAGE),
    "length one too many": (edited(8, "i", len(batch(b"value")) - 11), ErrorCode.CORRUPT_MESSAGE),
    "two batches": (batch(b"a") + batch(b"b"), ErrorCode.INVALID_RECORD),
    "trailing garbage": (batch(b"a") + b"garbage", ErrorCode.INVALID_RECORD),
    "last offset delta too small": (edited(23, "i", 0, b"a", b"b"), ErrorCode.INVALID_RECORD),
    "last offset delta too large": (edited(23, "i", 2, b"a", b"b"), ErrorCode.INVALID_RECORD),
    "last offset delta -1": (edited(23, "i", -1), ErrorCode.INVALID_RECORD),
    "count 0": (edited(57, "i", 0), ErrorCode.INVALID_RECORD),
    "count -1": (edited(57, "i", -1), ErrorCode.INVALID_RECORD),
    "base offset": (edited(0, "q", 7), ErrorCode.INVALID_RECORD),
    "control": (
        bytes(encode_batch([(now_ms(), b"\0\0\0\1", b"v", [])], control=True)),
        ErrorCode.INVALID_RECORD,
    ),
    "transactional without a producer": (
        bytes(encode_batch([(now_ms(), None, b"v", [])], transactional=True)),
        ErrorCode.INVALID_RECORD,
    ),
    "transactional": (
        batch(b"v", transactional=True, producer_id=1, producer_epoch=0, base_sequence=0),
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ),
    "codec 5": (edited(21, "h", 5), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
    "codec 7": (edited(21, "h", 7), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
    "producer without an epoch": (batch(b"v", producer_id=4, base_sequence=0), ErrorCode.INVALID_RECORD),
    "producer without a sequence": (batch(b"v", producer_id=4, producer_epoch=0), ErrorCode.INVALID_RECORD),
    "producer -2": (batch(b"v", producer_id=-2), ErrorCode.INVALID_RECORD),
    "tomorrow": (batch(b"v", timestamp=now_ms() + 86_400_000), ErrorCode.INVALID_TIMESTAMP),
    "the end of time": (batch(b"v", timestamp=2**63 - 1), ErrorCode.INVALID_TIMESTAMP),
}


@pytest.mark.parametrize("what", REFUSED_BATCHES)
def test_what_is_not_one_good_batch_is_refused_and_not_stored(wire: Wire, topic: str, what: str) -> None:
    records, error = REFUSED_BATCHES[what]
    result = produce(wire, topic, records)
    assert (result.error_code, result.base_offset) == (error, -1)
    assert put(wire, topic, b"next") == 0
    assert everything(wire, topic) == [b"next"]


@pytest.mark.parametrize("timestamp", [-1, -2, -(2**40), 0])
def test_timestamps_from_before_time_do_no_harm(wire: Wire, topic: str, timestamp: int) -> None:
    result = produce(wire, topic, batch(b"v", timestamp=timestamp))
    assert result.error_code == ErrorCode.NONE
    assert everything(wire, topic) == [b"v"]


def test_a_batch_larger_than_the_topic_allows_is_refused(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, configs={"max.message.bytes": "1000"})
    assert produce(wire, name, batch(b"x" * 2000)).error_code == ErrorCode.MESSAGE_TOO_LARGE
    assert produce(wire, name, batch(b"x" * 900)).error_code == ErrorCode.NONE


# Compacted topics


@pytest.fixture
def compacted(wire: Wire, unique: Unique) -> str:
    name = unique("t")
    create_topic(wire, name, configs={"cleanup.policy": "compact"})
    return name


def with_keys(*keys: bytes | None, codec: Codec = Codec.NONE, **fields: Any) -> bytes:
    return bytes(encode_batch([(now_ms(), key, b"value", []) for key in keys], codec=codec, **fields))


@pytest.mark.parametrize("codec", list(Codec))
def test_a_record_without_a_key_is_refused_by_a_compacted_topic_with_its_place(
    wire: Wire, compacted: str, codec: Codec
) -> None:
    result = produce(wire, compacted, with_keys(b"a", None, b"", b"b", None, codec=codec))
    assert (result.error_code, result.base_offset) == (ErrorCode.INVALID_RECORD, -1)
    assert result.error_message == "The topic is compacted, and 2 records in the batch have no key."
    assert [(each.batch_index, each.batch_index_error_message) for each in result.record_errors] == [
        (place, f"A record without a key cannot be stored in {compacted}-0, which is compacted.")
        for place in (1, 4)
    ]
    assert everything(wire, compacted) == []
    # An empty key is a key, and a value may be missing: that is a tombstone.
    stored = encode_batch([(now_ms(), b"", b"1", []), (now_ms(), b"k", None, [])], codec=codec)
    assert produce(wire, compacted, bytes(stored)).error_code == 0
    assert everything(wire, compacted) == [b"1", None]


@pytest.mark.parametrize("policy", ["delete", ""])
def test_other_topics_take_records_without_a_key(wire: Wire, unique: Unique, policy: str) -> None:
    name = unique("t")
    create_topic(wire, name, configs={"cleanup.policy": policy})
    assert produce(wire, name, with_keys(None)).error_code == 0


@pytest.mark.parametrize("version", [7, 8, 13])
def test_the_places_are_told_from_version_eight_on(wire: Wire, unique: Unique, version: int) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name, configs={"cleanup.policy": "compact,delete"})
    data = PartitionProduceData(index=0, records=with_keys(None))  # type: ignore[arg-type]
    asked = TopicProduceData(name=name, topic_id=topic_id, partition_data=[data])
    response = wire.call(ProduceRequest(acks=1, timeout_ms=1000, topic_data=[asked]), version)
    result = only(only(response.responses).partition_responses)
    assert result.error_code == ErrorCode.INVALID_RECORD
    places = [each.batch_index for each in result.record_errors]
    assert (places, bool(result.error_message)) == (([], False) if version < 8 else ([0], True))


def test_a_record_without_a_key_does_not_hinder_other_partitions(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 2, configs={"cleanup.policy": "compact"})
    data = [
        PartitionProduceData(index=index, records=with_keys(key))  # type: ignore[arg-type]
        for index, key in enumerate((None, b"k"))
    ]
    asked = TopicProduceData(name=name, partition_data=data)
    response = wire.call(ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[asked]), 9)
    results = only(response.responses).partition_responses
    assert [each.error_code for each in results] == [ErrorCode.INVALID_RECORD, ErrorCode.NONE]
    assert results[1].record_errors == [] and results[1].error_message is None
    assert [len(everything(wire, name, index)) for index in (0, 1)] == [0, 1]


def test_a_producer_goes_on_with_the_sequence_of_a_batch_that_was_refused(wire: Wire, compacted: str) -> None:
    producer_id = wire.call(InitProducerIdRequest(transactional_id=None), 4).producer_id

    def send(sequence: int, key: bytes | None) -> int:
        sent = with_keys(key, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
        return produce(wire, compacted, sent).error_code

    assert send(0, b"a") == ErrorCode.NONE
    assert send(1, None) == ErrorCode.INVALID_RECORD
    # As after any other batch that is refused for good.
    assert send(2, b"b") == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(1, b"b") == ErrorCode.NONE
    assert len(everything(wire, compacted)) == 2


def test_without_acks_a_record_without_a_key_closes_the_connection(node: Node, compacted: str) -> None:
    with node.connect() as wire:
        wire.send_bytes(encode_request(produce_request(compacted, with_keys(None), acks=0), 9))
        assert wire.is_closed()


def test_records_that_cannot_be_read_are_refused_by_a_compacted_topic(wire: Wire, compacted: str) -> None:
    damaged = bytearray(with_keys(b"key"))
    damaged[HEADER_SIZE] = 0x7E  # the size of the first record
    result = produce(wire, compacted, with_valid_crc(damaged))
    assert result.error_code == ErrorCode.INVALID_RECORD
    assert result.error_message == "The batch cannot be read: the records do not end where their batch does."
    assert result.record_errors == []
    garbage = bytearray(with_keys(b"key", codec=Codec.GZIP))
    garbage[HEADER_SIZE] ^= 0xFF
    assert produce(wire, compacted, with_valid_crc(garbage)).error_code == ErrorCode.INVALID_RECORD
    assert everything(wire, compacted) == []


def test_a_batch_that_is_huge_when_decompressed_is_refused_by_a_compacted_topic(
    wire: Wire, compacted: str
) -> None:
    huge = encode_batch([(now_ms(), b"k", bytes(64 << 20), [])], codec=Codec.ZSTD)
    assert len(huge) < 100_000
    result = produce(wire, compacted, bytes(huge))
    assert result.error_code == ErrorCode.MESSAGE_TOO_LARGE
    assert result.error_message == (
        "A batch for a compacted topic has at most 67108864 bytes when it is decompressed: send smaller batches."
    )
    assert everything(wire, compacted) == []


def test_a_topic_that_becomes_compacted_needs_keys_from_then_on(wire: Wire, topic: str) -> None:
    put(wire, topic, b"without a key")
    set_policy(wire, topic, "compact")
    assert produce(wire, topic, batch(b"v")).error_code == ErrorCode.INVALID_RECORD
    set_policy(wire, topic, "delete")
    put(wire, topic, b"again without")
    assert everything(wire, topic) == [b"without a key", b"again without"]


def set_policy(wire: Wire, topic: str, policy: str) -> None:
    change = IncrementalAlterableConfig(name="cleanup.policy", config_operation=0, value=policy)
    resource = IncrementalAlterConfigsResource(resource_type=2, resource_name=topic, configs=[change])
    request = IncrementalAlterConfigsRequest(resources=[resource])
    assert only(wire.call(request, 1).responses).error_code == 0


def test_zstd_needs_version_seven(wire: Wire, topic: str) -> None:
    sent = batch(b"v", codec=Codec.ZSTD)
    assert produce(wire, topic, sent, version=6).error_code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert produce(wire, topic, sent, version=7).error_code == ErrorCode.NONE


def test_unknown_topics_are_told_by_name_and_by_id(wire: Wire) -> None:
    assert produce(wire, "no-such-topic", batch(b"v")).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for topic_id in (bytes(16), b"\xff" * 16):
        data = PartitionProduceData(index=0, records=batch(b"v"))  # type: ignore[arg-type]
        request = ProduceRequest(
            acks=1, topic_data=[TopicProduceData(topic_id=topic_id, partition_data=[data])]
        )
        answer = only(wire.call(request, 13).responses)
        assert answer.topic_id == topic_id
        assert only(answer.partition_responses).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    # Producing creates nothing, unlike asking for metadata.
    assert "no-such-topic" not in {known.name for known in wire.call(MetadataRequest(topics=None), 9).topics}


@pytest.mark.parametrize("partition", [-1, 1, 2**31 - 1, -(2**31)])
def test_partitions_that_do_not_exist_are_unknown(wire: Wire, topic: str, partition: int) -> None:
    result = produce(wire, topic, batch(b"v"), partition=partition)
    assert (result.index, result.error_code) == (partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def test_nobody_writes_to_the_offsets_topic(wire: Wire, unique: Unique) -> None:
    find_coordinator(wire, unique("g"))
    result = produce(wire, "__consumer_offsets", batch(b"v"))
    assert result.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_request_for_nothing_is_answered_with_nothing(wire: Wire, topic: str) -> None:
    assert wire.call(ProduceRequest(acks=1), 9).responses == []
    answer = only(wire.call(ProduceRequest(acks=1, topic_data=[TopicProduceData(name=topic)]), 9).responses)
    assert answer.partition_responses == []


# Without acknowledgement


def test_acks_zero_gets_no_answer(node: Node, topic: str) -> None:
    with node.connect() as silent:
        for number in range(10):
            silent.send_bytes(encode_request(produce_request(topic, batch(b"%d" % number), acks=0), 9))
        # The next answer on the connection is the next request's.
        assert everything(silent, topic) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("records", [batch(b"v")[:-1] + b"!", b"", None], ids=["damaged", "empty", "null"])
def test_an_error_without_acks_closes_the_connection(node: Node, topic: str, records: bytes | None) -> None:
    with node.connect() as silent:
        silent.send_bytes(encode_request(produce_request(topic, records, acks=0), 9))
        assert silent.is_closed()


# Idempotence


def new_producer(wire: Wire, version: int = 4) -> tuple[int, int]:
    response = wire.call(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0), version)
    assert response.error_code == 0
    return response.producer_id, response.producer_epoch


def test_producer_ids_are_never_given_twice(node: Node, wire: Wire) -> None:
    given = [new_producer(wire, version) for version in range(6) for _ in range(200)]
    with node.connect() as other:
        given += [new_producer(other) for _ in range(1000)]
    assert len({producer_id for producer_id, _ in given}) == len(given) == 2200
    assert {epoch for _, epoch in given} == {0}


def test_a_repeated_batch_is_stored_once_and_answered_alike(wire: Wire, topic: str) -> None:
    producer_id, epoch = new_producer(wire)
    sent = [
        batch(b"%d" % n, b"+", producer_id=producer_id, producer_epoch=epoch, base_sequence=2 * n)
        for n in range(5)
    ]
    first = [produce(wire, topic, records) for records in sent]
    again = [produce(wire, topic, records) for records in sent]
    assert [result.base_offset for result in first] == [0, 2, 4, 6, 8]
    assert again == first
    assert len(everything(wire, topic)) == 10


def test_sequences_wrap_to_zero(wire: Wire, topic: str) -> None:
    producer_id, epoch = new_producer(wire)
    put(wire, topic, b"so that the log is not empty")
    for number, sequence in enumerate((SEQUENCE_MAX - 1, 1)):
        values = (b"a", b"b", b"c") if number == 0 else (b"d",)
        result = produce(
            wire,
            topic,
            batch(*values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence),
        )
        assert result.error_code == 0, sequence
    assert everything(wire, topic)[1:] == [b"a", b"b", b"c", b"d"]


def test_a_producer_goes_on_in_an_empty_log_when_it_insists(wire: Wire, topic: str) -> None:
    """The topic was made again under a producer that has written for long."""
    producer_id, _ = new_producer(wire)

    def send(sequence: int) -> int:
        records = batch(b"%d" % sequence, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
        return produce(wire, topic, records).error_code

    assert [send(200), send(201)] == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 2
    assert [send(200), send(201), send(200)] == [ErrorCode.NONE] * 3
    assert everything(wire, topic) == [b"200", b"201"]


def test_gaps_old_epochs_and_first_batches_that_are_none_are_refused(wire: Wire, topic: str) -> None:
    producer_id, _ = new_producer(wire)

    def send(epoch: int, sequence: int) -> int:
        records = batch(b"v", producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
        return produce(wire, topic, records).error_code

    assert send(0, 5) == ErrorCode.NOT_LEADER_OR_FOLLOWER, "in an empty log, the first may come yet"
    assert send(0, 0) == ErrorCode.NONE
    assert send(0, 2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(1, 1) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(1, 0) == ErrorCode.NONE
    assert send(0, 1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert len(everything(wire, topic)) == 2


def test_a_batch_sent_before_its_topic_was_known_here_is_not_overtaken(wire: Wire, unique: Unique) -> None:
    """A client may know of a new topic before its leader does. Once another producer has written, nothing but the
    memory of the refusal tells that the first batch is missing."""
    name = unique("t")
    producer_id, epoch = new_producer(wire)

    def send(sequence: int) -> int:
        records = batch(
            b"%d" % sequence, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
        )
        return produce(wire, name, records).error_code

    assert send(0) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    create_topic(wire, name)
    put(wire, name, b"so that the log is not empty")
    assert send(1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert [send(sequence) for sequence in range(3)] == [ErrorCode.NONE] * 3
    assert everything(wire, name)[1:] == [b"0", b"1", b"2"]
