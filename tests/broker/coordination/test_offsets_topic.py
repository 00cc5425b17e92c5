"""The offsets topic does not grow for ever, and what it forgets is only history."""

from __future__ import annotations

import pytest

from penstock.broker.coordination import coordinator_partition
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
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
def test_a_large_history_is_replaced_by_the_state_it_led_to(
    monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    monkeypatch.setattr(coordinator_partition, "REWRITE_BYTES_MIN", 10_000)
    world = World({"offsets.topic.num.partitions": "1", "offsets.topic.segment.bytes": "5000"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    for offset in range(COMMITS):
        commit(client, "a", offset)
    commit(client, "b", 7)
    hosted = world.broker.partitions.get("__consumer_offsets", 0)
    assert hosted is not None
    size_before = hosted.log.size_bytes
    world.run_for(61_000)
    hosted.log.check()
    assert hosted.log.log_start_offset == COMMITS + 1
    assert hosted.log.size_bytes < size_before / 2
    assert (committed(client, "a"), committed(client, "b")) == (COMMITS - 1, 7)
    world.run_for(61_000)
    world = world.restarted(clean=clean)
    client = world.client()
    assert (committed(client, "a"), committed(client, "b")) == (COMMITS - 1, 7)


def test_a_group_that_rebalances_for_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two static members of one group, of which the first waits half an hour for the second to come back."""
    monkeypatch.setattr(coordinator_partition, "REWRITE_BYTES_MIN", 10_000)
    world = World({"offsets.topic.num.partitions": "1", "offsets.topic.segment.bytes": "5000"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    for instance in ("x", "y"):
        protocol = JoinGroupRequestProtocol(name="range", metadata=b"")
        request = JoinGroupRequest(
            group_id="busy",
            session_timeout_ms=1_800_000,
            rebalance_timeout_ms=1_800_000,
            group_instance_id=instance,
            protocol_type="consumer",
            protocols=[protocol],
        )
        world.client().send(request, 5)
        world.run_for(4_000)
    (partition,) = world.broker.group_coordinators
    assert partition.core.describe_group("busy", 5).group_state == "PreparingRebalance"
    for offset in range(COMMITS):
        commit(client, "a", offset)
    world.run_for(61_000)
    hosted = world.broker.partitions.get("__consumer_offsets", 0)
    assert hosted is not None
    assert hosted.log.log_start_offset >= COMMITS
    assert partition.core.describe_group("busy", 5).group_state == "PreparingRebalance"
    world = world.restarted(clean=False)
    assert committed(world.client(), "a") == COMMITS - 1


def test_a_small_history_is_left_alone() -> None:
    world = World({"offsets.topic.num.partitions": "1"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    for offset in range(50):
        commit(client, "a", offset)
    world.run_for(180_000)
    hosted = world.broker.partitions.get("__consumer_offsets", 0)
    assert hosted is not None
    assert hosted.log.log_start_offset == 0
