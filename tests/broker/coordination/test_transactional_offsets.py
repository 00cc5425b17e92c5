"""Offsets in transactions and their markers, through the shell and the log of the group coordinator."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.broker.coordination.coordinator_partition import CoordinatorPartition
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.produced_batch import Appended
from penstock.groups.coordinator import Coordinator
from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from penstock.protocol.messages.transactions import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from penstock.protocol.records import BatchHeader, Marker, batches, decode_marker
from tests.broker.coordination.test_offsets_topic import CLEANING, commit, committed
from tests.broker.test_virtual_time import create
from tests.virtual import World

GROUP = "a"
PRODUCER = 7
NO_OFFSET = -1
UNSTABLE = ErrorCode.UNSTABLE_OFFSET_COMMIT


def a_world(settings: dict[str, str] | None = None) -> World:
    world = World({"offsets.topic.num.partitions": "1", **(settings or {})})
    client = world.client()
    create(client, "events")
    client.call(FindCoordinatorRequest(key=GROUP), 2)
    return world


def coordinator_of(world: World) -> CoordinatorPartition[Coordinator]:
    world.run_until(lambda: bool(list(world.broker.group_coordinators)), 20_000)
    partition = world.broker.group_coordinators.at(0)
    assert not isinstance(partition, ErrorCode)
    return partition


def send_commit(world: World, offset: int, *, epoch: int = 0, producer_id: int = PRODUCER) -> ErrorCode:
    request = TxnOffsetCommitRequest(
        transactional_id="mover",
        group_id=GROUP,
        producer_id=producer_id,
        producer_epoch=epoch,
        topics=[
            TxnOffsetCommitRequestTopic(
                name="events",
                partitions=[TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=offset)],
            )
        ],
    )
    answers: list[TxnOffsetCommitResponse] = []
    coordinator_of(world).handle(
        lambda core, now_ms, wall_ms: core.commit_in_transaction(request, 5, now_ms=now_ms, wall_ms=wall_ms),
        answers.append,
        TxnOffsetCommitResponse.for_error(request, 5, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        lambda error: TxnOffsetCommitResponse.for_error(request, 5, error),
    )
    world.run_until(lambda: bool(answers), 10_000)
    return ErrorCode(answers[0].topics[0].partitions[0].error_code)


def end(
    world: World, *, commit: bool, epoch: int = 0, coordinator_epoch: int = 1, producer_id: int = PRODUCER
) -> ErrorCode:
    answers: list[ErrorCode] = []
    marker = Marker(commit, coordinator_epoch)
    coordinator_of(world).write_marker(marker, producer_id, epoch, answers.append)
    world.run_until(lambda: bool(answers), 10_000)
    return answers[0]


def stable(world: World) -> int:
    """The committed offset, or minus the error if it is not stable."""
    topics = [OffsetFetchRequestTopics(name="events", partition_indexes=[0])]
    core = coordinator_of(world).core
    response = core.fetch_offsets(OffsetFetchRequestGroup(group_id=GROUP, topics=topics), require_stable=True)
    partition = response.topics[0].partitions[0]
    return -partition.error_code or partition.committed_offset


def hosted_of(world: World) -> HostedPartition:
    hosted = world.broker.partitions.get(CONSUMER_OFFSETS, 0)
    assert hosted is not None
    return hosted


def stored(world: World) -> list[tuple[BatchHeader, Marker | None]]:
    log = hosted_of(world).log
    found = hosted_of(world).read(
        log.log_start_offset, 1_000_000, ceiling=log.log_end_offset, at_least_one=True
    )
    assert found is not None
    data = found.file.read_at(found.position, found.size)
    return [
        (header, decode_marker(data, position) if header.is_control else None)
        for position, header in batches(data)
    ]


def test_offsets_and_marker_are_stored_as_batches_of_the_producer() -> None:
    world = a_world()
    assert send_commit(world, 5, epoch=3) is ErrorCode.NONE
    assert stable(world) == -UNSTABLE
    assert committed(world.client(), GROUP) == NO_OFFSET
    assert end(world, commit=True, epoch=3, coordinator_epoch=2) is ErrorCode.NONE
    assert stable(world) == committed(world.client(), GROUP) == 5
    (offsets, no_marker), (end_of_transaction, marker) = stored(world)
    assert offsets.is_transactional and not offsets.is_control and no_marker is None
    assert (offsets.producer_id, offsets.producer_epoch, offsets.base_sequence) == (PRODUCER, 3, 0)
    assert end_of_transaction.is_transactional and marker == Marker(True, 2)
    assert (end_of_transaction.producer_id, end_of_transaction.producer_epoch) == (PRODUCER, 3)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_coordinator_that_starts_again_waits_for_the_marker_too(clean: bool, is_commit: bool) -> None:
    world = a_world()
    commit(world.client(), GROUP, 1)
    assert send_commit(world, 5) is ErrorCode.NONE
    world = world.restarted(clean=clean)
    assert stable(world) == -UNSTABLE
    assert end(world, commit=is_commit) is ErrorCode.NONE
    outcome = 5 if is_commit else 1
    assert stable(world) == outcome
    world = world.restarted(clean=clean)
    assert stable(world) == outcome


def test_a_producer_that_was_fenced_commits_no_offsets() -> None:
    world = a_world()
    assert send_commit(world, 5, epoch=1) is ErrorCode.NONE
    assert end(world, commit=False, epoch=2) is ErrorCode.NONE
    length = len(stored(world))
    assert send_commit(world, 6, epoch=1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert len(stored(world)) == length
    assert stable(world) == NO_OFFSET
    assert coordinator_of(world).core.all_keys() == []
    world = world.restarted(clean=True)
    assert send_commit(world, 6, epoch=1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert send_commit(world, 7, epoch=2) is ErrorCode.NONE


def test_a_late_marker_of_an_earlier_epoch_or_coordinator_is_refused() -> None:
    world = a_world()
    assert end(world, commit=False, epoch=2, coordinator_epoch=4) is ErrorCode.NONE
    assert send_commit(world, 5, epoch=2) is ErrorCode.NONE
    assert end(world, commit=True, epoch=1, coordinator_epoch=4) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert end(world, commit=True, epoch=2, coordinator_epoch=3) is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    assert stable(world) == -UNSTABLE
    assert end(world, commit=True, epoch=2, coordinator_epoch=4) is ErrorCode.NONE
    assert stable(world) == 5


def test_a_marker_sent_again_is_written_again_and_changes_nothing() -> None:
    world = a_world()
    send_commit(world, 5)
    assert end(world, commit=True) is ErrorCode.NONE
    commit(world.client(), GROUP, 2)
    assert end(world, commit=True) is ErrorCode.NONE
    assert stable(world) == 2
    assert stable(world.restarted(clean=False)) == 2


def test_a_marker_that_cannot_be_written_is_tried_again_by_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = a_world()
    send_commit(world, 5)

    def refuse(self: HostedPartition, batch: bytearray) -> Appended:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(HostedPartition, "append_internal", refuse)
        assert end(world, commit=True) is ErrorCode.KAFKA_STORAGE_ERROR
        assert send_commit(world, 6) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        meanwhile.setattr(HostedPartition, "has_enough_replicas", property(lambda self: False))
        assert end(world, commit=True) is ErrorCode.NOT_ENOUGH_REPLICAS
    assert stable(world) == -UNSTABLE
    assert end(world, commit=True) is ErrorCode.NONE
    assert stable(world) == 5


def test_a_coordinator_that_resigned_sends_markers_to_the_next_one() -> None:
    world = a_world()
    send_commit(world, 5)
    coordinator = coordinator_of(world)
    coordinator.resign()
    answers: list[Any] = []
    coordinator.write_marker(Marker(True, 1), PRODUCER, 0, answers.append)
    assert answers == [ErrorCode.NOT_LEADER_OR_FOLLOWER]


def test_no_coordinator_is_at_a_partition_that_does_not_exist() -> None:
    assert a_world().broker.group_coordinators.at(1) is ErrorCode.NOT_COORDINATOR


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("is_commit", [True, False])
def test_what_the_cleaner_leaves_of_transactions_is_replayed(clean: bool, is_commit: bool) -> None:
    """The last offset that counts is the first in the log: those of aborted transactions came behind it."""
    world = a_world({"offsets.topic.segment.bytes": "2000", **CLEANING})
    other = 8
    send_commit(world, 3, producer_id=other)
    end(world, commit=True, producer_id=other)
    send_commit(world, 4)
    end(world, commit=is_commit)
    for offset in range(50):
        send_commit(world, 100 + offset)
        end(world, commit=False)
    send_commit(world, 500, producer_id=other)
    log = hosted_of(world).log
    world.run_until(lambda: log.first_dirty_offset > 50, 60_000)
    log.check()
    records = [header for header, _ in stored(world) if header.count and not header.is_control]
    assert len(records) < 20
    world = world.restarted(clean=clean)
    assert committed(world.client(), GROUP) == (4 if is_commit else 3)
    assert stable(world) == -UNSTABLE
    assert end(world, commit=is_commit, producer_id=other) is ErrorCode.NONE
    assert stable(world) == (500 if is_commit else 3)
