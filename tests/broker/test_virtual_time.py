"""The whole broker on fake ports: what happens when, without waiting for it."""

from __future__ import annotations

import errno
import gc

import pytest

from penstock.broker import node_partition_host, startup
from penstock.broker.handlers.fetch import PendingFetch
from penstock.broker.membership.membership import State
from penstock.metadata.image import Image
from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.groups import (
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
)
from penstock.protocol.messages.metadata_records import PartitionChangeRecord
from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    MetadataRequest,
    MetadataRequestTopic,
)
from penstock.protocol.records import Record, batches, decode_records, encode_batch
from tests.support_files import FakeFile
from tests.virtual import Client, World

EARLIEST = -2


def create(client: Client, name: str, **configs: str) -> None:
    topic = CreatableTopic(
        name=name,
        num_partitions=1,
        replication_factor=1,
        configs=[
            CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()
        ],
    )
    response = client.call(CreateTopicsRequest(topics=[topic]), 7)
    assert response.topics[0].error_code == 0, response


def produce_request(world: World, topic: str, *values: bytes) -> ProduceRequest:
    records = [Record(0, world.clock.wall_ms(), None, value, ()) for value in values]
    data = PartitionProduceData(index=0, records=memoryview(encode_batch(records)))
    return ProduceRequest(
        acks=-1, timeout_ms=30_000, topic_data=[TopicProduceData(name=topic, partition_data=[data])]
    )


def fetch_request(topic: str, offset: int, *, max_wait_ms: int, min_bytes: int = 1) -> FetchRequest:
    wanted = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=1 << 20,
        session_epoch=-1,
        topics=[FetchTopic(topic=topic, partitions=[wanted])],
    )


def values_of(response: object) -> list[bytes | None]:
    partition = response.responses[0].partitions[0]  # type: ignore[attr-defined]
    assert partition.error_code == 0
    data = bytes(partition.records)
    return [
        record.value
        for position, _ in batches(data)
        for record in decode_records(data, position, bytes_max=1 << 20)
    ]


def test_what_is_produced_is_fetched() -> None:
    world = World()
    client = world.client()
    create(client, "events")
    assert client.call(produce_request(world, "events", b"a", b"b"), 9).responses[0].partition_responses[0]
    assert values_of(client.call(fetch_request("events", 0, max_wait_ms=0), 12)) == [b"a", b"b"]


def test_a_long_poll_ends_exactly_when_its_time_is_up() -> None:
    world = World()
    client = world.client()
    create(client, "quiet")
    began_ms = world.clock.now_ms()
    response = client.call(fetch_request("quiet", 0, max_wait_ms=5_000), 12)
    assert response.responses[0].partitions[0].records == b""
    assert 5_000 <= world.clock.now_ms() - began_ms <= 5_002


def test_a_long_poll_leaves_nothing_to_the_garbage_collector() -> None:
    world = World()
    reader, writer = world.client(), world.client()
    create(writer, "events")
    gc.collect()
    gc.disable()
    try:
        reader.send(fetch_request("events", 0, max_wait_ms=60_000), 12)
        world.run_for(10)
        assert len(pending_fetches()) == 1
        writer.call(produce_request(world, "events", b"news"), 9)
        world.run_for(2)
        assert values_of(reader.answers[0]) == [b"news"]
        assert not pending_fetches()
    finally:
        gc.enable()


def pending_fetches() -> list[object]:
    return [thing for thing in gc.get_objects() if type(thing) is PendingFetch]


def test_a_long_poll_ends_when_something_arrives() -> None:
    world = World()
    reader, writer = world.client(), world.client()
    create(writer, "events")
    reader.send(fetch_request("events", 0, max_wait_ms=60_000), 12)
    world.run_for(10_000)
    assert not reader.answers
    writer.call(produce_request(world, "events", b"news"), 9)
    world.run_for(2)
    assert values_of(reader.answers[0]) == [b"news"]


def test_an_abandoned_long_poll_leaves_nothing_behind() -> None:
    world = World()
    reader, writer = world.client(), world.client()
    create(writer, "events")
    reader.send(fetch_request("events", 0, max_wait_ms=2**31 - 1), 12)
    world.run_for(10)
    hosted = world.broker.partitions.get("events", 0)
    assert hosted is not None and len(hosted.waiters.readers) == 1
    reader.stream.close()
    world.run_for(10)
    assert not hosted.waiters.readers


def test_a_flushed_topic_acknowledges_after_the_disk() -> None:
    world = World()
    client, reader = world.client(), world.client()
    create(client, "ledger", flush_messages="1")
    client.send(produce_request(world, "ledger", b"entry"), 9)
    world.run_for(1)
    answered = len(client.answers)
    # In the page cache already, but neither acknowledged nor visible.
    assert values_of(reader.call(fetch_request("ledger", 0, max_wait_ms=0), 12)) == []
    world.run_for(10)
    assert len(client.answers) == answered + 1
    assert values_of(reader.call(fetch_request("ledger", 0, max_wait_ms=0), 12)) == [b"entry"]


def test_all_the_replicas_there_are_suffice_where_more_are_asked_for() -> None:
    """As in Kafka since KIP-966: a topic with one replica can have no more in sync than that."""
    world = World()
    client = world.client()
    create(client, "ledger", min_insync_replicas="2")
    taken = client.call(produce_request(world, "ledger", b"entry"), 9)
    assert taken.responses[0].partition_responses[0].error_code == ErrorCode.NONE


def test_a_member_that_falls_silent_is_removed_after_its_session() -> None:
    world = World({"group.initial.rebalance.delay.ms": "0"})
    client = world.client()
    client.call(FindCoordinatorRequest(key="team"), 2)
    join = JoinGroupRequest(
        group_id="team",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    joined = client.call(join, 2)
    assert joined.error_code == 0
    describe = DescribeGroupsRequest(groups=["team"])
    world.run_for(9_000)
    assert len(client.call(describe, 3).groups[0].members) == 1
    world.run_for(2_000)
    assert client.call(describe, 3).groups[0].members == []


def test_a_replica_that_left_and_came_back_is_followed_also_when_its_turn_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_partition_host, "FOLLOWED_PER_TURN", 1)
    world = World()
    broker = world.broker
    client = world.client()
    for name in ("first", "second"):
        create(client, name)
    image = broker.image

    def assign(*replicas: int) -> None:
        nonlocal image
        change = PartitionChangeRecord(
            topic_id=image.topics["second"].id,
            partition_id=0,
            replicas=list(replicas),
            directories=[bytes(16) for _ in replicas],
            isr=[2],
            leader=2,
        )
        image, delta = image.apply([change])
        broker.partition_lifecycle.apply(image, delta)

    assign(1, 2)
    broker.startup.prepared(lambda: None)
    assign(2)
    assign(1, 2)
    assert len(broker.replication.fetchers) == 1
    world.run_for(10)
    assert len(broker.replication.fetchers) == 1, "what began to be followed meanwhile is another object"


def test_what_is_committed_while_logs_are_looked_at_does_not_have_them_looked_at_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "RECOVERED_PER_TURN", 1)
    world = World()
    broker, storage = world.broker, world.broker.storage
    client = world.client()
    for name in ("first", "second"):
        create(client, name)
    unclean = [TopicPartition("first", 0), TopicPartition("second", 0)]
    monkeypatch.setattr(storage, "partitions_to_recover", lambda: unclean)
    compared: list[int] = []
    compare = storage.quarantine_strays

    def compare_and_count(image: Image) -> None:
        compared.append(image.offset)
        compare(image)

    monkeypatch.setattr(storage, "quarantine_strays", compare_and_count)
    broker.membership.state = State.CATCHING_UP
    for _ in range(3):
        broker.membership.image_moved()
    world.run_for(100)
    assert len(compared) == 1
    assert broker.membership.state is State.ACTIVE


def test_old_segments_go_and_the_rest_stays() -> None:
    world = World({"log.retention.check.interval.ms": "60000"})
    client = world.client()
    create(client, "short", retention_ms="3600000", segment_ms="600000")
    client.call(produce_request(world, "short", b"old"), 9)
    world.run_for(2 * 3_600_000)
    client = world.client()
    client.call(produce_request(world, "short", b"new"), 9)
    world.run_for(61_000)
    hosted = world.broker.partitions.get("short", 0)
    assert hosted is not None
    hosted.log.check()
    wanted = ListOffsetsPartition(partition_index=0, timestamp=EARLIEST)
    request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name="short", partitions=[wanted])])
    assert client.call(request, 5).topics[0].partitions[0].offset == 1
    assert values_of(client.call(fetch_request("short", 1, max_wait_ms=0), 12)) == [b"new"]


def test_an_idle_connection_is_closed_and_a_waiting_one_is_not() -> None:
    world = World({"connections.max.idle.ms": "30000"})
    idle, waiting = world.client(), world.client()
    create(waiting, "quiet")
    waiting.send(fetch_request("quiet", 0, max_wait_ms=120_000), 12)
    world.run_for(60_000)
    assert idle.is_closed
    assert not waiting.is_closed


def test_a_frame_that_never_ends_is_given_up() -> None:
    world = World()
    client = world.client()
    client.stream.send([b"\x00\x00\x10\x00\x00\x03"])
    world.run_for(30_000)
    assert not client.is_closed
    world.run_for(60_000)
    assert client.is_closed


def test_a_slow_reader_gets_everything_in_the_end() -> None:
    world = World()
    client = world.client()
    create(client, "events")
    client.call(produce_request(world, "events", b"x" * 200_000), 9)
    server_end = client.stream.other
    assert server_end is not None
    server_end.window = 0
    for _ in range(5):
        client.send(fetch_request("events", 0, max_wait_ms=0), 12)
    world.run_for(1_000)
    answered = len(client.answers)
    for _ in range(400):
        server_end.open_window(4_000)
        world.run_for(1)
    assert [len(value or b"") for answer in client.answers[answered:] for value in values_of(answer)] == [
        200_000
    ] * 5


def test_the_same_seed_gives_the_same_run() -> None:
    def trace(seed: int) -> list[object]:
        world = World(seed=seed)
        client = world.client()
        response = client.call(MetadataRequest(topics=[MetadataRequestTopic(name="made")]), 12)
        ids = [
            client.call(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 4).producer_id
            for _ in range(3)
        ]
        return [response.cluster_id, response.topics[0].topic_id, ids, world.clock.now_ms()]

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_a_killed_broker_comes_back_with_its_topics_and_records() -> None:
    world = World()
    client = world.client()
    create(client, "events")
    client.call(produce_request(world, "events", b"kept"), 9)
    for clean in (False, True, True, False):
        world = world.restarted(clean=clean)
        assert [directory.was_clean for directory in world.broker.storage.directories] == [clean]
        client = world.client()
        assert values_of(client.call(fetch_request("events", 0, max_wait_ms=0), 12)) == [b"kept"]


def test_on_a_full_disk_topics_are_refused_and_made_later() -> None:
    world = World()
    client = world.client()
    create(client, "before")
    world.files.fail_after(0)
    topic = CreatableTopic(name="events", num_partitions=1, replication_factor=1)
    refused = client.call(CreateTopicsRequest(topics=[topic]), 7)
    assert refused.topics[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert (
        client.call(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 4).error_code != 0
    )
    assert not world.failures
    world.files.fail_after(None)
    # The controller has forgotten what came to nothing.
    create(client, "events")
    assert (
        client.call(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 4).error_code == 0
    )
    world = world.restarted(clean=False)
    assert sorted(world.broker.image.topics) == ["before", "events"]


def test_a_broken_disk_stops_the_broker_and_a_full_one_does_not() -> None:
    world = World()
    client = world.client()
    create(client, "events")
    client.call(produce_request(world, "events", b"first"), 9)
    world.files.fail_after(0)
    refused = client.call(produce_request(world, "events", b"no room"), 9)
    assert refused.responses[0].partition_responses[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert not world.failures
    world.files.fail_after(None)
    # It looks for room once a second.
    world.run_for(1_500)
    assert (
        client.call(produce_request(world, "events", b"room again"), 9)
        .responses[0]
        .partition_responses[0]
        .base_offset
        == 1
    )
    world.files.fail_after(0, 5)
    client.send(produce_request(world, "events", b"lost"), 9)
    world.run_for(5)
    assert world.failures


def test_the_in_sync_replicas_of_a_deleted_topic_are_nobodys_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    client = world.client()
    create(client, "events")
    hosted = world.broker.partitions.get("events", 0)
    forgotten: list[object] = []
    monkeypatch.setattr(world.broker.replication.proposals, "forget", forgotten.append)
    client.call(DeleteTopicsRequest(topic_names=["events"]), 5)
    assert forgotten == [hosted]


def test_a_broker_that_has_to_register_again_does_not_fetch_what_it_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    create(world.client(), "events")
    hosted = world.broker.partitions.get("events", 0)
    assert hosted is not None and hosted.is_leader
    let_go: list[object] = []
    monkeypatch.setattr(world.broker.replication.fetchers, "unfollow", let_go.append)
    world.broker.membership.state = State.REGISTERING
    world.broker.partition_host.role_changed(hosted)
    assert let_go == [hosted.key]


def test_a_disk_that_cannot_be_read_stops_the_broker_so_that_others_lead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sent is read last, and a consumer would come back for it again and again."""
    world = World()
    client = world.client()
    create(client, "events")
    client.call(produce_request(world, "events", b"a"), 9)

    def fail() -> None:
        raise OSError(errno.EIO, "the disk failed")

    monkeypatch.setattr(FakeFile, "read_now", lambda self, position, size: None)
    monkeypatch.setattr(FakeFile, "prepare_warming", lambda self, position, size: fail)
    client.send(fetch_request("events", 0, max_wait_ms=0), 12)
    world.run_for(100)
    assert client.is_closed
    (reason,) = world.failures
    assert reason.startswith("the disk under /data failed")
