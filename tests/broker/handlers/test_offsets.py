"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from crc32c import crc32c

from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
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
from penstock.protocol.records import encode_batch
from tests.broker.phrases import (
    EARLIEST,
    LATEST,
    batch,
    create_topic,
    everything,
    find_coordinator,
    keyed,
    list_offset,
    only,
    produce,
    put,
)
from tests.broker.wire import Wire

Unique = Callable[[str], str]

MAX_TIMESTAMP = -3


@pytest.fixture
def topic(wire: Wire, unique: Unique) -> str:
    name = unique("t")
    create_topic(wire, name)
    return name


def ask(
    wire: Wire, topic: str, timestamp: int, *, partition: int = 0, epoch: int = -1, version: int = 7
) -> Any:
    wanted = ListOffsetsPartition(partition_index=partition, timestamp=timestamp, current_leader_epoch=epoch)
    request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name=topic, partitions=[wanted])])
    return only(only(wire.call(request, version).topics).partitions)


def timed(wire: Wire, topic: str, *timestamps: int, codec: Codec = Codec.NONE) -> None:
    """One batch of records with these timestamps."""
    records: list[Any] = [(timestamp, None, b"%d" % timestamp, []) for timestamp in timestamps]
    assert produce(wire, topic, bytes(encode_batch(records, codec=codec))).error_code == 0


@pytest.mark.parametrize("version", range(1, 12))
def test_every_version_knows_the_beginning_and_the_end(wire: Wire, topic: str, version: int) -> None:
    assert (ask(wire, topic, EARLIEST, version=version).offset, ask(wire, topic, LATEST).offset) == (0, 0)
    put(wire, topic, b"a", b"b", b"c")
    earliest = ask(wire, topic, EARLIEST, version=version)
    latest = ask(wire, topic, LATEST, version=version)
    assert (earliest.error_code, earliest.offset, earliest.timestamp) == (0, 0, -1)
    assert (latest.error_code, latest.offset, latest.timestamp) == (0, 3, -1)
    assert latest.leader_epoch == (0 if version >= 4 else -1)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_timestamp_finds_the_first_record_at_or_after_it(wire: Wire, topic: str, codec: Codec) -> None:
    timed(wire, topic, 1000, 3000, 2000, codec=codec)
    timed(wire, topic, 2500, 4000, codec=codec)
    for timestamp, offset, found in (
        (0, 0, 1000),
        (1000, 0, 1000),
        (1001, 1, 3000),
        (3000, 1, 3000),
        (3001, 4, 4000),
        (4000, 4, 4000),
        (4001, -1, -1),
        (2**63 - 1, -1, -1),
    ):
        result = ask(wire, topic, timestamp)
        assert (result.error_code, result.offset, result.timestamp) == (0, offset, found), timestamp


def test_the_record_with_the_largest_timestamp_is_found(wire: Wire, topic: str) -> None:
    assert ask(wire, topic, MAX_TIMESTAMP).offset == -1
    timed(wire, topic, 1000, 5000, 2000)
    timed(wire, topic, 4000, 5000)
    result = ask(wire, topic, MAX_TIMESTAMP)
    assert (result.error_code, result.offset, result.timestamp) == (0, 1, 5000)


def test_records_that_were_deleted_are_not_found_by_time(wire: Wire, topic: str) -> None:
    timed(wire, topic, 1000, 2000, 3000)
    assert delete(wire, topic, 2).low_watermark == 2
    assert ask(wire, topic, 500).offset == 2
    assert ask(wire, topic, EARLIEST).offset == 2


@pytest.mark.parametrize("timestamp", [-4, -5, -6, -7, -100, -(2**63)])
def test_other_sentinels_are_answered(wire: Wire, topic: str, timestamp: int) -> None:
    put(wire, topic, b"v")
    result = ask(wire, topic, timestamp, version=11)
    if timestamp == -4:
        assert (result.error_code, result.offset) == (0, 0)
    elif timestamp in (-5, -6):
        # There is no remote tier, so nothing is in it.
        assert (result.error_code, result.offset) == (0, -1)
    else:
        assert (result.error_code, result.offset) == (ErrorCode.UNSUPPORTED_VERSION, -1)


def test_a_batch_whose_records_are_rubbish_answers_by_its_header(wire: Wire, topic: str) -> None:
    rubbish = bytearray(batch(b"x" * 100, timestamp=1000))
    rubbish[61:] = b"\xff" * (len(rubbish) - 61)
    rubbish[17:21] = crc32c(bytes(rubbish[21:])).to_bytes(4, "big")
    # As in the docs: records inside a batch are not inspected when they are produced.
    assert produce(wire, topic, bytes(rubbish)).error_code == 0
    result = ask(wire, topic, 500)
    assert (result.error_code, result.offset, result.timestamp) == (0, 0, 1000)
    assert ask(wire, topic, MAX_TIMESTAMP).error_code == 0


def test_leader_epochs_are_checked(wire: Wire, topic: str) -> None:
    assert ask(wire, topic, LATEST, epoch=0).error_code == 0
    assert ask(wire, topic, LATEST, epoch=1).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    assert ask(wire, topic, LATEST, epoch=-5).error_code == 0


def test_unknown_partitions_are_told(wire: Wire, topic: str) -> None:
    for partition in (1, -1, 2**31 - 1, -(2**31)):
        result = ask(wire, topic, LATEST, partition=partition)
        assert (result.error_code, result.offset) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
    assert ask(wire, "no-such-topic", LATEST).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_partition_asked_for_twice_is_refused_both_times(wire: Wire, topic: str) -> None:
    wanted = [ListOffsetsPartition(partition_index=0, timestamp=when) for when in (LATEST, EARLIEST)]
    request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name=topic, partitions=wanted)])
    results = only(wire.call(request, 7).topics).partitions
    assert [result.error_code for result in results] == [ErrorCode.INVALID_REQUEST] * 2


# OffsetForLeaderEpoch


def end_of(
    wire: Wire, topic: str, epoch: int, *, current: int = -1, partition: int = 0, version: int = 4
) -> Any:
    wanted = OffsetForLeaderPartition(partition=partition, current_leader_epoch=current, leader_epoch=epoch)
    request = OffsetForLeaderEpochRequest(
        replica_id=-1, topics=[OffsetForLeaderTopic(topic=topic, partitions=[wanted])]
    )
    return only(only(wire.call(request, version).topics).partitions)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_present_epoch_ends_at_the_end_of_the_log(wire: Wire, topic: str, version: int) -> None:
    put(wire, topic, b"a", b"b")
    result = end_of(wire, topic, 0, version=version)
    assert (result.error_code, result.leader_epoch, result.end_offset) == (0, 0, 2)


def test_epochs_that_we_do_not_know_have_no_end(wire: Wire, topic: str) -> None:
    put(wire, topic, b"a")
    for epoch in (1, 2**31 - 1, -1):
        result = end_of(wire, topic, epoch)
        assert (result.error_code, result.leader_epoch, result.end_offset) == (0, -1, -1)
    assert end_of(wire, topic, 0, current=3).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    assert end_of(wire, topic, 0, partition=4).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# DeleteRecords


def delete(wire: Wire, topic: str, offset: int, *, partition: int = 0, version: int = 2) -> Any:
    wanted = DeleteRecordsPartition(partition_index=partition, offset=offset)
    request = DeleteRecordsRequest(
        topics=[DeleteRecordsTopic(name=topic, partitions=[wanted])], timeout_ms=1000
    )
    return only(only(wire.call(request, version).topics).partitions)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_records_before_an_offset_are_deleted(wire: Wire, topic: str, version: int) -> None:
    for number in range(5):
        put(wire, topic, b"%d" % number)
    result = delete(wire, topic, 3, version=version)
    assert (result.error_code, result.low_watermark) == (0, 3)
    assert everything(wire, topic) == [b"3", b"4"]
    # Deleting what is deleted changes nothing.
    assert delete(wire, topic, 1).low_watermark == 3
    assert delete(wire, topic, 0).low_watermark == 3


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("compact", ErrorCode.POLICY_VIOLATION),
        ("compact,delete", ErrorCode.NONE),
        ("delete", ErrorCode.NONE),
        ("", ErrorCode.NONE),
    ],
)
def test_records_of_a_topic_that_is_only_compacted_are_not_deleted(
    wire: Wire, unique: Unique, policy: str, error: ErrorCode
) -> None:
    name = unique("t")
    create_topic(wire, name, configs={"cleanup.policy": policy})
    for number in range(3):
        assert produce(wire, name, keyed(b"%d" % number)).error_code == 0
    assert delete(wire, name, 2).error_code == error
    assert len(everything(wire, name)) == (3 if error else 1)


def test_minus_one_deletes_everything_and_offsets_go_on(wire: Wire, topic: str) -> None:
    for number in range(3):
        put(wire, topic, b"%d" % number)
    assert delete(wire, topic, -1).low_watermark == 3
    assert everything(wire, topic) == []
    assert put(wire, topic, b"next") == 3
    assert everything(wire, topic) == [b"next"]
    assert list_offset(wire, topic, EARLIEST) == 3


@pytest.mark.parametrize("offset", [-2, -100, -(2**63), 3, 2**63 - 1])
def test_offsets_that_cannot_be_deleted_to_are_out_of_range(wire: Wire, topic: str, offset: int) -> None:
    put(wire, topic, b"a", b"b")
    result = delete(wire, topic, offset)
    assert (result.error_code, result.low_watermark) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert everything(wire, topic) == [b"a", b"b"]


def test_an_empty_partition_can_be_emptied(wire: Wire, topic: str) -> None:
    assert delete(wire, topic, -1).low_watermark == 0
    assert delete(wire, topic, 0).low_watermark == 0
    assert put(wire, topic, b"v") == 0


def test_internal_and_unknown_topics_are_refused(wire: Wire, unique: Unique) -> None:
    find_coordinator(wire, unique("g"))
    assert delete(wire, "__consumer_offsets", 0).error_code == ErrorCode.POLICY_VIOLATION
    assert delete(wire, "no-such-topic", 0).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert delete(wire, "no-such-topic", 0, partition=-1).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
