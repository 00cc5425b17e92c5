"""A broker whose wall clock is wrong, or is set: nothing is stored twice, deleted or refused because of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.clocks.clock_watch import CLOCK
from penstock.broker.storage.data_directory import CHECKPOINT
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
)
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.records import Record, encode_batch
from tests.broker.test_virtual_time import create
from tests.support_files import FakeFiles
from tests.virtual import Client, VirtualSpawn, World

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
SOON = {"log.retention.check.interval.ms": "1000", "log.flush.offset.checkpoint.interval.ms": "1000"}


def produced(client: Client, topic: str, timestamp: int, *, sequence: int | None = None) -> tuple[int, int]:
    """(error code, base offset) of one record."""
    records = [Record(0, timestamp, None, b"value", ())]
    if sequence is None:
        batch = encode_batch(records)
    else:
        batch = encode_batch(records, producer_id=7, producer_epoch=0, base_sequence=sequence)
    data = PartitionProduceData(index=0, records=memoryview(batch))
    request = ProduceRequest(
        acks=-1, timeout_ms=30_000, topic_data=[TopicProduceData(name=topic, partition_data=[data])]
    )
    result = client.call(request, 9).responses[0].partition_responses[0]
    return result.error_code, result.base_offset


@pytest.mark.parametrize("step_ms", [2 * DAY, -2 * DAY])
def test_a_retry_after_the_clock_was_set_is_not_stored_again(step_ms: int) -> None:
    world = World()
    client = world.client()
    create(client, "events")
    sent_ms = world.clock.wall_ms()
    assert produced(client, "events", sent_ms, sequence=0) == (ErrorCode.NONE, 0)
    world.clock.wall += step_ms
    world.run_for(700_000)  # producers are swept meanwhile
    client = world.client()
    assert produced(client, "events", sent_ms, sequence=0) == (ErrorCode.NONE, 0)


def start_of(world: World, topic: str = "events") -> int:
    hosted = world.broker.partitions.get(topic, 0)
    assert hosted is not None
    return hosted.log.log_start_offset


@pytest.mark.parametrize("restarts", [False, True])
def test_a_clock_that_is_ahead_for_a_while_deletes_nothing(restarts: bool) -> None:
    world = World(SOON)
    client = world.client()
    create(client, "events", retention_ms=str(20 * MINUTE))
    assert produced(client, "events", world.clock.wall_ms()) == (ErrorCode.NONE, 0)
    world.run_for(10_000)
    world.clock.wall += 10 * DAY
    if restarts:
        world = world.restarted(clean=False, settings=SOON)
    world.run_for(4 * MINUTE)
    assert start_of(world) == 0
    if restarts:
        # The doubt outlives a process.
        world = world.restarted(clean=True, settings=SOON)
        world.run_for(4 * MINUTE)
        assert start_of(world) == 0
    world.clock.wall -= 10 * DAY
    world.run_for(10 * MINUTE)
    assert start_of(world) == 0
    world.run_for(10 * MINUTE)
    assert start_of(world) == 1, "and then its time is over"


def test_what_is_too_much_goes_also_while_the_time_is_in_doubt() -> None:
    world = World(SOON)
    client = world.client()
    create(client, "events", retention_bytes="0")
    world.run_for(10_000)
    produced(client, "events", world.clock.wall_ms())
    world.clock.wall += 10 * DAY
    world.run_for(10_000)
    assert start_of(world) == 1


@pytest.mark.parametrize("created", [True, False])
def test_a_clock_that_is_set_back_refuses_no_record(created: bool) -> None:
    """Neither as too far in the future, nor by giving it a time at which its days are over."""
    world = World(SOON)
    client = world.client()
    create(client, "events", message_timestamp_type="CreateTime" if created else "LogAppendTime")
    world.run_for(10_000)
    true_ms = world.clock.wall_ms()
    world.clock.wall -= 30 * DAY
    assert produced(client, "events", true_ms) == (ErrorCode.NONE, 0)
    hosted = world.broker.partitions.get("events", 0)
    assert hosted is not None
    newest = hosted.log.latest_timestamp()
    assert newest is not None and newest.timestamp >= true_ms


def test_a_record_that_no_clock_explains_is_refused() -> None:
    world = World()
    client = world.client()
    create(client, "events")
    error, _ = produced(client, "events", world.clock.wall_ms() + 2 * HOUR)
    assert error == ErrorCode.INVALID_TIMESTAMP


def test_the_next_process_is_told_the_time_that_is_believed_and_the_jump_that_is_not() -> None:
    world = World(SOON)
    world.run_for(10_000)
    world.clock.wall += 10 * DAY
    world.run_for(10_000)
    noted = json.loads(world.files.read("/data/penstock-clock"))
    assert noted["believedMs"] + 10 * DAY == noted["wallMs"] <= world.clock.wall_ms()
    ((by_ms, lasted_ms),) = noted["jumps"]
    assert by_ms == 10 * DAY and 5_000 < lasted_ms <= 10_000


@pytest.mark.parametrize("text", [b"", b"[]", b'{"believedMs": null}', b'{"believedMs": 1, "boot": ""}'])
def test_a_note_of_the_time_that_cannot_be_read_stops_nobody(text: bytes) -> None:
    world = World(SOON)
    world.run_for(10_000)
    world = world.restarted(clean=True, settings=SOON)
    world.files.replace("/data/penstock-clock", text, durable=False)
    world = world.restarted(clean=True, settings=SOON)
    world.run_for(10_000)
    assert json.loads(world.files.read("/data/penstock-clock"))["boot"] == ""


def test_a_broker_that_is_off_for_longer_than_it_runs_deletes_by_age() -> None:
    world = World(SOON)
    create(world.client(), "events", retention_ms=str(20 * MINUTE))
    assert produced(world.client(), "events", world.clock.wall_ms()) == (ErrorCode.NONE, 0)
    for _ in range(6):
        world.run_for(5 * MINUTE)
        world = world.restarted(clean=True, settings=SOON)
        world.clock.wall += 10 * MINUTE
    world.run_for(MINUTE)
    assert start_of(world) == 1


@pytest.mark.parametrize("step_ms", [30 * DAY, -30 * DAY])
def test_no_committed_offset_is_forgotten_by_a_clock_that_is_wrong_for_a_while(step_ms: int) -> None:
    world = World({**SOON, "offsets.retention.check.interval.ms": "1000"})
    client = world.client()
    create(client, "events")
    produced(client, "events", world.clock.wall_ms())
    client.call(FindCoordinatorRequest(key="readers"), 3)
    world.run_for(10_000)
    if step_ms < 0:
        world.clock.wall += step_ms
    committed = OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    commit = OffsetCommitRequest(
        group_id="readers", topics=[OffsetCommitRequestTopic(name="events", partitions=[committed])]
    )
    answer = client.call(commit, 8)
    assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE
    world.clock.wall += abs(step_ms)
    world.run_for(20_000)
    fetch = OffsetFetchRequest(
        group_id="readers", topics=[OffsetFetchRequestTopic(name="events", partition_indexes=[0])]
    )
    assert client.call(fetch, 7).topics[0].partitions[0].committed_offset == 1


def test_the_time_is_written_down_with_the_checkpoint_and_not_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that does not answer must not stop the broker."""
    world = World()
    world.client()
    world.run_for(10_000)
    in_thread = False
    by_threads: list[str] = []
    by_loop: list[str] = []
    replace, spawn = FakeFiles.replace, VirtualSpawn.in_thread

    def replacing(self: FakeFiles, path: str, data: bytes, **options: Any) -> None:
        (by_threads if in_thread else by_loop).append(os.path.basename(path))
        replace(self, path, data, **options)

    def spawning(self: VirtualSpawn, work: Callable[[], Any], done: Any, *, lane: str) -> None:
        def run() -> Any:
            nonlocal in_thread
            in_thread = True
            try:
                return work()
            finally:
                in_thread = False

        spawn(self, run, done, lane=lane)

    monkeypatch.setattr(FakeFiles, "replace", replacing)
    monkeypatch.setattr(VirtualSpawn, "in_thread", spawning)
    world.broker.housekeeping.checkpoint()
    world.run_for(1_000)
    assert {CLOCK, CHECKPOINT} <= set(by_threads)
    assert not by_loop
