"""The offsets topic in its log: segments that the log cleaner can work on, and what it leaves of them."""

from __future__ import annotations

import pytest

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.metadata.topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
)
from penstock.protocol.records import (
    Marker,
    decode_header,
    emptied,
    encode_batch,
    encode_marker,
    filler,
)
from tests.broker.test_virtual_time import create
from tests.virtual import Client, World

COMMITS = 300
# The cleaner looks every second, and cleans whatever is dirty.
CLEANING = {"log.cleaner.backoff.ms": "1000", "log.cleaner.min.cleanable.ratio": "0"}


def commit(client: Client, group: str, offset: int) -> None:
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    topic = OffsetCommitRequestTopic(name="events", partitions=[partition])
    response = client.call(OffsetCommitRequest(group_id=group, topics=[topic]), 7)
    assert response.topics[0].partitions[0].error_code == 0


def committed(client: Client, group: str) -> int:
    topic = OffsetFetchRequestTopic(name="events", partition_indexes=[0])
    response = client.call(OffsetFetchRequest(group_id=group, topics=[topic]), 5)
    offset: int = response.topics[0].partitions[0].committed_offset
    return offset


def hosted_of(world: World) -> HostedPartition:
    hosted = world.broker.partitions.get(CONSUMER_OFFSETS, 0)
    assert hosted is not None
    return hosted


@pytest.mark.parametrize("clean", [True, False])
def test_a_history_of_several_segments_is_replayed(clean: bool) -> None:
    world = World({"offsets.topic.num.partitions": "1", "offsets.topic.segment.bytes": "5000"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    for offset in range(COMMITS):
        commit(client, "a", offset)
    commit(client, "b", 7)
    assert len(hosted_of(world).log._segments.items) > 3
    world = world.restarted(clean=clean)
    client = world.client()
    assert (committed(client, "a"), committed(client, "b")) == (COMMITS - 1, 7)


@pytest.mark.parametrize("clean", [True, False])
def test_what_the_cleaner_leaves_is_replayed(clean: bool) -> None:
    world = World({"offsets.topic.num.partitions": "1", "offsets.topic.segment.bytes": "5000"} | CLEANING)
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    commit(client, "b", 7)
    for offset in range(COMMITS):
        commit(client, "a", offset)
    log = hosted_of(world).log
    size_before = log.size_bytes
    world.run_until(lambda: log.first_dirty_offset > COMMITS // 2, 60_000)
    log.check()
    assert log.size_bytes < size_before / 4
    world = world.restarted(clean=clean)
    client = world.client()
    assert (committed(client, "a"), committed(client, "b")) == (COMMITS - 1, 7)


def test_batches_that_compaction_has_emptied_are_replayed() -> None:
    world = World({"offsets.topic.num.partitions": "1"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    commit(client, "a", 5)
    hosted = hosted_of(world)
    of_producer = encode_batch(
        [(1, b"k", None, ())], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
    )
    marker = encode_marker(Marker(True, 0), 7, 0, 1)
    for batch in (of_producer, marker):
        hosted.append_internal(emptied(decode_header(batch)))
        hosted.append_internal(filler(0, 99, 0))
    assert hosted.log.log_end_offset > 200
    commit(client, "b", 7)
    world = world.restarted(clean=False)
    client = world.client()
    assert (committed(client, "a"), committed(client, "b")) == (5, 7)


@pytest.mark.parametrize(
    ("setting", "topic"),
    [("offsets.topic", CONSUMER_OFFSETS), ("transaction.state.log", TRANSACTION_STATE)],
)
@pytest.mark.parametrize("segment_bytes", [None, 20 << 20])
def test_segments_are_closed_early_enough_to_be_compacted(
    setting: str, topic: str, segment_bytes: int | None
) -> None:
    """100 MB as in Kafka, not the gigabyte of other topics: the cleaner works on closed segments only."""
    settings = {} if segment_bytes is None else {f"{setting}.segment.bytes": str(segment_bytes)}
    world = World({f"{setting}.num.partitions": "1", **settings})
    key_type = 0 if topic == CONSUMER_OFFSETS else 1
    world.client().call(FindCoordinatorRequest(key="a", key_type=key_type), 2)
    world.run_until(lambda: world.broker.partitions.get(topic, 0) is not None, 10_000)
    hosted = world.broker.partitions.get(topic, 0)
    assert hosted is not None
    assert hosted.log.config.segment_bytes == (segment_bytes or 100 << 20)
    assert hosted.log.config.is_compacted
