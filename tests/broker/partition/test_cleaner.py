"""The cleaner of a broker in virtual time: what it chooses, and what happens to a log meanwhile."""

from __future__ import annotations

import errno
from itertools import pairwise
from typing import Any

import pytest

from penstock.broker.partition import cleaner
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.environment import JobKilled
from penstock.log import cleaner_job
from penstock.log.cleaner_job import CannotClean
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.records import HEADER_SIZE, Record, batches, decode_records, encode_batch
from tests.broker.test_virtual_time import create
from tests.virtual import Client, World

SETTINGS = {"log.cleaner.backoff.ms": "1000"}
COMPACTED = {
    "cleanup_policy": "compact",
    "segment_bytes": "1000",
    "min_cleanable_dirty_ratio": "0.1",
    "delete_retention_ms": "5000",
    "file_delete_delay_ms": "1000",
}


def put(world: World, client: Client, topic: str, *records: tuple[bytes, bytes | None]) -> None:
    batch = encode_batch([Record(0, world.clock.wall_ms(), key, value, ()) for key, value in records])
    data = PartitionProduceData(index=0, records=memoryview(batch))
    request = ProduceRequest(
        acks=-1, timeout_ms=1000, topic_data=[TopicProduceData(name=topic, partition_data=[data])]
    )
    response = client.call(request, 9)
    assert response.responses[0].partition_responses[0].error_code == 0


def fill(world: World, client: Client, topic: str, count: int = 60) -> None:
    for number in range(count):
        put(world, client, topic, (b"%d" % (number % 4), b"%d" % number * 5))


def fetch(client: Client, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> bytes:
    partition = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=bytes_max)
    request = FetchRequest(max_wait_ms=0, topics=[FetchTopic(topic=topic, partitions=[partition])])
    data = client.call(request, 11).responses[0].partitions[0]
    assert data.error_code == 0
    return bytes(data.records)


def read(client: Client, topic: str) -> list[Record]:
    found: list[Record] = []
    offset = 0
    while records := fetch(client, topic, offset):
        for position, header in batches(records):
            found += [
                one for one in decode_records(records, position, bytes_max=1 << 20) if one.offset >= offset
            ]
            offset = header.next_offset
    return found


def hosted_of(world: World, topic: str) -> HostedPartition:
    hosted = world.broker.partitions.get(topic, 0)
    assert hosted is not None
    return hosted


def test_old_values_go_and_the_last_ones_stay() -> None:
    world = World(SETTINGS)
    client = world.client()
    create(client, "prices", **COMPACTED)
    create(client, "events")
    fill(world, client, "prices")
    fill(world, client, "events")
    before = read(client, "prices")
    world.run_for(5_000)
    after = read(client, "prices")
    assert len(after) < len(before) / 2
    assert {one.key: one.value for one in after} == {one.key: one.value for one in before}
    assert all(one in before for one in after)
    assert len(read(client, "events")) == 60, "the other topic is not compacted"
    report = hosted_of(world, "prices").cleaning_report()
    assert report is not None and report.last_run is not None
    assert report.dirty_bytes == 0
    assert report.last_run.records_after < report.last_run.records_before
    assert hosted_of(world, "events").cleaning_report() is None
    names = world.files.list(hosted_of(world, "prices").log.directory)
    assert not [name for name in names if name.endswith((".cleaned", ".deleted"))]
    hosted_of(world, "prices").log.check()


def test_a_consumer_is_not_answered_with_empty_batches_alone() -> None:
    """librdkafka would ask for more and more, and in the end report MSG_SIZE_TOO_LARGE."""
    world = World(SETTINGS)
    client = world.client()
    create(client, "prices", **COMPACTED)
    for number in range(20):
        # Each in a segment of its own, of which only an empty batch is left.
        put(world, client, "prices", (b"a", b"%d" % (number % 10) * 900))
    world.run_for(5_000)
    sizes = [segment.size for segment in hosted_of(world, "prices").log._segments.items]
    assert sizes.count(HEADER_SIZE) > 2, sizes

    answers = []
    offset = 0
    while data := fetch(client, "prices", offset):
        headers = [header for _, header in batches(data)]
        assert headers[0].base_offset == offset
        assert all(one.next_offset == other.base_offset for one, other in pairwise(headers))
        answers.append([header.count for header in headers])
        offset = headers[-1].next_offset
    assert offset == 20
    assert len(answers[0]) > 2 and all(map(sum, answers)), answers
    # Nor where the limit is smaller than any batch.
    assert sum(header.count for _, header in batches(fetch(client, "prices", 0, bytes_max=1))) == 1


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_knows_how_far_it_was(clean: bool) -> None:
    world = World(SETTINGS)
    client = world.client()
    create(client, "prices", **COMPACTED)
    fill(world, client, "prices")
    world.run_for(5_000)
    before = hosted_of(world, "prices").cleaning_report()
    records = read(client, "prices")
    world = world.restarted(clean=clean)
    assert read(world.client(), "prices") == records
    after = hosted_of(world, "prices").cleaning_report()
    assert before is not None and after is not None
    assert (after.first_dirty_offset, after.last_run) == (before.first_dirty_offset, before.last_run)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (CannotClean("the batch at offset 7 is damaged"), "the batch at offset 7 is damaged"),
        (JobKilled("the job's process ended with status -9"), "the job's process ended with status -9"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_log_that_cannot_be_compacted_is_set_aside_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    failures = []

    def failing(files: Any, job: Any) -> Any:
        if "/bad-0" in job.directory:
            failures.append(job)
            raise failure
        return cleaner_job.clean(files, job)

    monkeypatch.setattr(cleaner, "clean", failing)
    world = World(SETTINGS)
    client = world.client()
    create(client, "bad", **COMPACTED)
    create(client, "good", **COMPACTED)
    fill(world, client, "bad")
    fill(world, client, "good", 30)
    world.run_for(20_000)
    assert len(failures) == 3
    report = hosted_of(world, "bad").cleaning_report()
    assert report is not None and report.set_aside == reason
    assert len(read(client, "bad")) == 60
    assert len(read(client, "good")) < 30
    world.run_for(3_700_000)
    assert len(failures) > 3, "it is tried again after an hour"
