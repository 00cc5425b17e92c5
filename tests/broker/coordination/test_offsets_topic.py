"""The offsets topic in its log: segments that the log cleaner can work on, and what it leaves of them."""

from __future__ import annotations

import pytest

from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
)
from tests.broker.test_virtual_time import create
from tests.virtual import Client, World

COMMITS = 300


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


@pytest.mark.parametrize("clean", [True, False])
def test_a_history_of_several_segments_is_replayed(clean: bool) -> None:
    world = World({"offsets.topic.num.partitions": "1", "offsets.topic.segment.bytes": "5000"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    for offset in range(COMMITS):
        commit(client, "a", offset)
    commit(client, "b", 7)
    hosted = world.broker.partitions.get(CONSUMER_OFFSETS, 0)
    assert hosted is not None
    assert len(hosted.log._segments.items) > 3
    world = world.restarted(clean=clean)
    client = world.client()
    assert (committed(client, "a"), committed(client, "b")) == (COMMITS - 1, 7)
