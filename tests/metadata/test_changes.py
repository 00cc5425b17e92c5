"""Changes as bytes. The vectors were written by Apache Kafka 4.3.1 (MetadataRecordSerde)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata.changes import decode, encode
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerRegistrationChangeRecord,
    ConfigRecord,
    FeatureLevelRecord,
    FenceBrokerRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnfenceBrokerRecord,
    UnregisterBrokerRecord,
)
from penstock.protocol.schema import Message

TOPIC = bytes(range(1, 17))
DIRECTORY = bytes(range(17, 33))

VECTORS: list[tuple[Message, str]] = [
    (
        RegisterBrokerRecord(
            broker_id=1,
            incarnation_id=DIRECTORY,
            broker_epoch=7,
            end_points=[BrokerEndpoint(name="PLAINTEXT", host="127.0.0.1", port=49152)],
            rack="a",
            fenced=False,
            log_dirs=[DIRECTORY],
        ),
        "01000300000001001112131415161718191a1b1c1d1e1f200000000000000007020a504c41494e544558540a3132372e302e30"
        "2e31c0000000000102610000010011021112131415161718191a1b1c1d1e1f20",
    ),
    (UnregisterBrokerRecord(broker_id=3, broker_epoch=9), "01010000000003000000000000000900"),
    (
        TopicRecord(name="orders", topic_id=TOPIC),
        "010200076f72646572730102030405060708090a0b0c0d0e0f1000",
    ),
    (
        PartitionRecord(
            partition_id=2,
            topic_id=TOPIC,
            replicas=[1, 2, 3],
            isr=[1, 2],
            leader=1,
            leader_epoch=4,
            partition_epoch=5,
            directories=[DIRECTORY] * 3,
        ),
        "010302000000020102030405060708090a0b0c0d0e0f1004000000010000000200000003030000000100000002010100000001"
        "0000000400000005041112131415161718191a1b1c1d1e1f201112131415161718191a1b1c1d1e1f20111213141516171819"
        "1a1b1c1d1e1f2000",
    ),
    (
        PartitionRecord(
            partition_id=0,
            topic_id=TOPIC,
            replicas=[1, 2],
            isr=[1],
            removing_replicas=[2],
            adding_replicas=[1],
            leader=1,
            leader_recovery_state=1,
            leader_epoch=0,
            partition_epoch=0,
            directories=[DIRECTORY] * 2,
            eligible_leader_replicas=[2],
            last_known_elr=[1],
        ),
        "010302000000000102030405060708090a0b0c0d0e0f1003000000010000000202000000010200000002020000000100000001"
        "0000000000000000031112131415161718191a1b1c1d1e1f201112131415161718191a1b1c1d1e1f20030001010105020000"
        "000202050200000001",
    ),
    (
        ConfigRecord(resource_type=2, resource_name="orders", name="retention.ms", value="1000"),
        "01040002076f72646572730d726574656e74696f6e2e6d73053130303000",
    ),
    (
        ConfigRecord(resource_type=4, resource_name="", name="log.retention.ms", value=None),
        "0104000401116c6f672e726574656e74696f6e2e6d730000",
    ),
    (
        PartitionChangeRecord(partition_id=2, topic_id=TOPIC, leader=1),
        "010502000000020102030405060708090a0b0c0d0e0f1001010400000001",
    ),
    (
        PartitionChangeRecord(
            partition_id=0,
            topic_id=TOPIC,
            isr=[1],
            leader=-1,
            replicas=[1, 2],
            removing_replicas=[2],
            adding_replicas=[],
            leader_recovery_state=0,
            directories=[DIRECTORY] * 2,
            eligible_leader_replicas=[2],
            last_known_elr=[1],
        ),
        "010502000000000102030405060708090a0b0c0d0e0f1009000502000000010104ffffffff0209030000000100000002030502"
        "0000000204010105010006050200000002070502000000010821031112131415161718191a1b1c1d1e1f2011121314151617"
        "18191a1b1c1d1e1f20",
    ),
    (FenceBrokerRecord(id=1, epoch=7), "01070000000001000000000000000700"),
    (UnfenceBrokerRecord(id=1, epoch=7), "01080000000001000000000000000700"),
    (RemoveTopicRecord(topic_id=TOPIC), "0109000102030405060708090a0b0c0d0e0f1000"),
    (
        FeatureLevelRecord(name="metadata.version", feature_level=25),
        "010c00116d657461646174612e76657273696f6e001900",
    ),
    (
        ProducerIdsRecord(broker_id=1, broker_epoch=7, next_producer_id=2000),
        "010f0000000001000000000000000700000000000007d000",
    ),
    (
        BrokerRegistrationChangeRecord(
            broker_id=1, broker_epoch=7, fenced=-1, in_controlled_shutdown=1, log_dirs=[DIRECTORY]
        ),
        "011102000000010000000000000007030001ff0101010211021112131415161718191a1b1c1d1e1f20",
    ),
    (NoOpRecord(), "01140000"),
]


@pytest.mark.parametrize(("change", "vector"), VECTORS, ids=lambda value: type(value).__name__)
def test_change_is_written_byte_for_byte_as_kafka_writes_it(change: Message, vector: str) -> None:
    assert encode(change).hex() == vector


@pytest.mark.parametrize(("change", "vector"), VECTORS, ids=lambda value: type(value).__name__)
def test_change_written_by_kafka_is_read(change: Message, vector: str) -> None:
    assert decode(memoryview(bytes.fromhex(vector))) == change


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("", "shorter than its frame"),
        ("0102", "shorter than its frame"),
        ("02020000", "frame version 2"),
        ("016300", "type 99"),
        ("010209", "version 9"),
        ("0114000000", "left over"),
    ],
)
def test_frame_that_is_not_known_is_refused(frame: str, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode(bytes.fromhex(frame))


@given(st.sampled_from([vector for _, vector in VECTORS]), st.data())
@settings(deadline=None)
def test_cut_or_garbled_change_is_refused_or_read_but_never_anything_else(
    vector: str, data: st.DataObject
) -> None:
    garbled = bytearray.fromhex(vector)
    at = data.draw(st.integers(0, len(garbled) - 1))
    garbled[at] = data.draw(st.integers(0, 255))
    del garbled[data.draw(st.integers(0, len(garbled))) :]
    try:
        change = decode(garbled)
    except DecodeError:
        return
    assert isinstance(change, Message)
