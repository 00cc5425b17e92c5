"""The offsets of a deleted topic go with it, whatever its coordinator is busy with at that moment."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.broker.coordination import coordinator_partition
from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.coordination.coordinators import Coordinators
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.produced_batch import Appended
from penstock.groups import changes
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest
from tests.broker.coordination.test_offsets_topic import commit, committed
from tests.broker.test_virtual_time import create
from tests.virtual import Client, World

NO_OFFSET = -1


def delete(client: Client, name: str) -> None:
    response = client.call(DeleteTopicsRequest(topic_names=[name]), 5)
    assert response.responses[0].error_code == 0


def a_group_with_an_offset() -> tuple[World, Client]:
    world = World({"offsets.topic.num.partitions": "1"})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key="a"), 2)
    for offset in range(1000, 1100):
        commit(client, "a", offset)
    return world, client


def loading_slowly(monkeypatch: pytest.MonkeyPatch, world: World) -> World:
    """The world after a restart. The offsets topic takes 300 ms and more to be read back."""

    def load(self: Coordinators[Any], hosted: HostedPartition, partition: CoordinatorPartition[Any]) -> None:
        if self._partitions.get(hosted.index) is partition and not partition.load_some():
            self._host.environment.spawn.later(30, lambda: self._load(hosted, partition))

    monkeypatch.setattr(coordinator_partition, "READ_BYTES", 1_000)
    monkeypatch.setattr(Coordinators, "_load", load)
    return world.restarted(clean=True)


def is_loading(world: World) -> bool:
    return not list(world.broker.group_coordinators)


def test_a_topic_that_is_deleted_while_the_coordinator_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = a_group_with_an_offset()
    world = loading_slowly(monkeypatch, world)
    client = world.client()
    delete(client, "events")
    create(client, "events")
    assert is_loading(world)
    world.run_until(lambda: not is_loading(world), 20_000)
    assert committed(client, "a") == NO_OFFSET


def test_offsets_from_before_topic_ids_are_those_of_the_topic_at_the_beginning_of_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as before:
        before.setattr(changes, "OFFSET_VALUE_VERSION", 3)
        world, _ = a_group_with_an_offset()
    world = loading_slowly(monkeypatch, world)
    client = world.client()
    delete(client, "events")
    create(client, "events")
    assert is_loading(world)
    world.run_until(lambda: not is_loading(world), 20_000)
    assert committed(client, "a") == NO_OFFSET


def test_offsets_from_before_topic_ids_are_kept_and_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(changes, "OFFSET_VALUE_VERSION", 3)
        world, _ = a_group_with_an_offset()
    # Whether the offsets now have the topic's id is seen when the topic is made again and the log read again.
    world = world.restarted(clean=True)
    assert committed(world.client(), "a") == 1099
    world = loading_slowly(monkeypatch, world)
    client = world.client()
    delete(client, "events")
    create(client, "events")
    world.run_until(lambda: not is_loading(world), 20_000)
    assert committed(client, "a") == NO_OFFSET


@pytest.mark.parametrize("again_before", [True, False])
def test_a_topic_that_is_deleted_while_the_coordinator_cannot_write(
    monkeypatch: pytest.MonkeyPatch, again_before: bool
) -> None:
    """Too few replicas are in sync, and nobody may hear of the offsets even before that is over."""
    world, client = a_group_with_an_offset()

    def refuse(self: CoordinatorPartition[Any], *_: Any) -> Appended:
        raise OSError(errno.EAGAIN, "too few replicas in sync")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(CoordinatorPartition, "_append", refuse)
        delete(client, "events")
        world.run_for(5_000)
        if again_before:
            create(client, "events")
            assert committed(client, "a") == NO_OFFSET
    world.run_for(coordinator_partition.RECONCILE_RETRY_MS)
    if not again_before:
        create(client, "events")
    assert committed(client, "a") == NO_OFFSET
    (partition,) = world.broker.group_coordinators
    assert partition.core.all_keys() == [], "nothing is left of it"


# A start applies its metadata in steps, from a snapshot or a thousand changes at a time.


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_commit_to_a_topic_newer_than_the_snapshot_outlives_a_start(
    clean: bool, is_made_again: bool
) -> None:
    world = World({"offsets.topic.num.partitions": "1"})
    client = world.client()
    client.call(FindCoordinatorRequest(key="a"), 2)
    if is_made_again:
        create(client, "events")
    metadata = world.broker.consensus.committed
    usual, metadata.snapshot_records = metadata.snapshot_records, 1
    create(client, "other")
    world.run_for(5_000)
    metadata.snapshot_records = usual
    assert world.broker.consensus._snapshots.ids
    if is_made_again:
        delete(client, "events")
    create(client, "events")
    commit(client, "a", 1000)
    for _ in range(2):
        world = world.restarted(clean=clean)
        client = world.client()
        assert committed(client, "a") == 1000
        world.run_for(5_000)
        assert committed(client, "a") == 1000


@pytest.mark.parametrize("clean", [True, False])
def test_a_commit_to_a_topic_a_thousand_changes_later_outlives_a_start(clean: bool) -> None:
    world = World({"offsets.topic.num.partitions": "1"})
    client = world.client()
    client.call(FindCoordinatorRequest(key="a"), 2)
    for number in range(2):
        wide = CreatableTopic(name=f"wide-{number}", num_partitions=700, replication_factor=1)
        assert client.call(CreateTopicsRequest(topics=[wide]), 5).topics[0].error_code == 0
    create(client, "events")
    commit(client, "a", 1000)
    world = world.restarted(clean=clean)
    assert committed(world.client(), "a") == 1000
