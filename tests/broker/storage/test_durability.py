"""What is acknowledged when: the fsyncs are the test's to release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
)
from penstock.protocol.messages.offsets import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    MetadataRequest,
)
from tests.broker.phrases import batch, everything, fetch_request, only, produce_request, put, values
from tests.broker.stage import Peer, Stage
from tests.broker.wire import Wire
from tests.support import BrokerProcess

FLUSHED = {"flush.messages": "1"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "data")
    yield stage
    stage.spawn.holds_threads = False
    if not stage.failures:
        stage.spawn.release()
        stage.server.close()
        stage.broker.close()


@pytest.fixture
def peer(stage: Stage) -> Peer:
    return Peer(stage)


def create_topic(stage: Stage, peer: Peer, name: str, configs: dict[str, str]) -> None:
    """Create a topic, and hold every fsync from then on."""
    stage.spawn.holds_threads = False
    stage.spawn.release()
    peer.call(creation(name, configs), 7)
    stage.spawn.holds_threads = True


def creation(name: str, configs: dict[str, str]) -> CreateTopicsRequest:
    set_here = [CreatableTopicConfig(name=key, value=value) for key, value in configs.items()]
    asked = CreatableTopic(name=name, num_partitions=1, replication_factor=1, configs=set_here)
    return CreateTopicsRequest(topics=[asked])


def produced(answer: Any) -> tuple[int, int]:
    result = only(only(answer.responses).partition_responses)
    return result.error_code, result.base_offset


def visible(peer: Peer, topic: str) -> list[bytes | None]:
    return values(only(only(peer.call(fetch_request(topic, 0), 12).responses).partitions).records)


@pytest.mark.parametrize("acks", [1, -1])
def test_a_flushed_topic_acknowledges_and_shows_only_what_is_on_the_disk(
    stage: Stage, peer: Peer, acks: int
) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    reader = Peer(stage)
    peer.send(produce_request("t", batch(b"v"), acks=acks), 9)
    assert peer.answers() == []
    assert visible(reader, "t") == []
    stage.spawn.release()
    assert [produced(answer) for answer in peer.answers()] == [(0, 0)]
    assert visible(reader, "t") == [b"v"]


def test_one_fsync_serves_everything_appended_before_it(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    others = [Peer(stage) for _ in range(10)]
    peer.send(produce_request("t", batch(b"first")), 9)
    for other in others:
        other.send(produce_request("t", batch(b"v")), 9)
    # One fsync, and the note that the partition is flushed.
    assert len(stage.spawn.held) == 2
    stage.spawn.release()
    assert produced(only(peer.answers())) == (0, 0)
    # The fsync that has run began before the others were appended.
    assert [other.answers() for other in others] == [[]] * 10
    assert len(stage.spawn.held) == 1
    stage.spawn.release()
    assert [produced(only(other.answers())) for other in others] == [(0, offset) for offset in range(1, 11)]


def test_a_replicated_topic_acknowledges_at_once(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", {})
    assert produced(peer.call(produce_request("t", batch(b"v")), 9)) == (0, 0)
    assert visible(peer, "t") == [b"v"]
    assert stage.spawn.held == []


def test_the_append_that_reaches_flush_messages_waits_for_the_flush(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", {"flush.messages": "3"})
    for offset in range(2):
        assert produced(peer.call(produce_request("t", batch(b"v")), 9)) == (0, offset)
    peer.send(produce_request("t", batch(b"v")), 9)
    assert peer.answers() == []
    stage.spawn.release()
    assert produced(only(peer.answers())) == (0, 2)
    assert produced(peer.call(produce_request("t", batch(b"v")), 9)) == (0, 3)


def test_a_topic_is_flushed_when_its_time_has_come(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", {"flush.ms": "5000"})
    assert produced(peer.call(produce_request("t", batch(b"v")), 9)) == (0, 0)
    stage.pass_time(3)
    assert stage.spawn.held == []
    stage.pass_time(4)
    assert len(stage.spawn.held) == 1
    stage.spawn.release()
    hosted = stage.broker.partitions.get("t", 0)
    assert hosted.log.recovery_point == 1


def test_an_fsync_that_takes_too_long_is_told_as_a_timeout(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    peer.send(produce_request("t", batch(b"v"), timeout_ms=1500), 9)
    stage.pass_time(1)
    assert peer.answers() == []
    stage.pass_time(1)
    assert produced(only(peer.answers())) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    # "Perhaps" is what it means: it is there all the same.
    stage.spawn.release()
    assert visible(peer, "t") == [b"v"]


def test_a_repeat_of_a_batch_that_is_being_flushed_waits_with_it(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    sent = batch(b"v", producer_id=7, producer_epoch=0, base_sequence=0)
    again = Peer(stage)
    peer.send(produce_request("t", sent), 9)
    again.send(produce_request("t", sent), 9)
    assert (peer.answers(), again.answers()) == ([], [])
    stage.spawn.release()
    assert produced(only(peer.answers())) == produced(only(again.answers())) == (0, 0)
    assert visible(peer, "t") == [b"v"]


def test_a_failed_fsync_is_never_acknowledged_and_stops_the_broker(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    peer.send(produce_request("t", batch(b"v")), 9)
    stage.spawn.release(OSError(5, "Input/output error"))
    assert peer.answers() == []
    assert "fsync of t-0" in only(stage.failures)


def test_deleting_the_topic_ends_the_wait_for_the_disk(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    peer.send(produce_request("t", batch(b"v")), 9)
    deleting = Peer(stage)
    deleting.send(DeleteTopicsRequest(topic_names=["t"]), 4)
    stage.spawn.release()
    error, _ = produced(only(peer.answers()))
    assert error in (0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert only(only(deleting.answers()).responses).error_code == 0


def test_deleted_records_are_told_of_once_that_is_written_down_however_long_it_takes(
    stage: Stage, peer: Peer
) -> None:
    create_topic(stage, peer, "t", {})
    peer.call(produce_request("t", batch(b"a", b"b")), 9)
    wanted = DeleteRecordsTopic(name="t", partitions=[DeleteRecordsPartition(partition_index=0, offset=1)])
    peer.send(DeleteRecordsRequest(topics=[wanted], timeout_ms=1000), 2)
    stage.pass_time(2)
    assert peer.answers() == []
    stage.spawn.release()
    result = only(only(only(peer.answers()).topics).partitions)
    assert (result.error_code, result.low_watermark) == (0, 1)


def test_deleted_records_whose_deletion_could_not_be_written_down_are_not_told_of(
    stage: Stage, peer: Peer
) -> None:
    """The next start would find them again."""
    create_topic(stage, peer, "t", {})
    peer.call(produce_request("t", batch(b"a", b"b")), 9)
    wanted = DeleteRecordsTopic(name="t", partitions=[DeleteRecordsPartition(partition_index=0, offset=1)])
    peer.send(DeleteRecordsRequest(topics=[wanted], timeout_ms=1000), 2)
    stage.spawn.release(OSError(5, "Input/output error"))
    result = only(only(only(peer.answers()).topics).partitions)
    assert (result.error_code, result.low_watermark) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)


def test_a_long_poll_sees_what_was_flushed(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    reader = Peer(stage)
    reader.send(fetch_request("t", 0, max_wait_ms=60_000), 12)
    peer.send(produce_request("t", batch(b"v")), 9)
    assert reader.answers() == []
    stage.spawn.release()
    data = only(only(only(reader.answers()).responses).partitions)
    assert values(data.records) == [b"v"]


def test_what_waited_for_the_disk_is_visible_when_the_topic_no_longer_waits(stage: Stage, peer: Peer) -> None:
    create_topic(stage, peer, "t", FLUSHED)
    peer.send(produce_request("t", batch(b"v")), 9)
    altered = IncrementalAlterConfigsResource(
        resource_type=2,
        resource_name="t",
        configs=[IncrementalAlterableConfig(name="flush.messages", config_operation=1, value=None)],
    )
    admin = Peer(stage)
    admin.send(IncrementalAlterConfigsRequest(resources=[altered]), 1)
    # First the metadata's fsync, then the partition's.
    held = stage.spawn.held
    stage.spawn.held = held[1:]
    stage.spawn.release()
    stage.spawn.held += held[:1]
    stage.spawn.release()
    assert only(only(admin.answers()).responses).error_code == 0
    assert produced(only(peer.answers())) == (0, 0)
    assert visible(peer, "t") == [b"v"]


def test_a_topic_exists_for_clients_once_the_metadata_is_on_the_disk(stage: Stage, peer: Peer) -> None:
    stage.spawn.holds_threads = True
    reader, other = Peer(stage), Peer(stage)
    peer.send(creation("t", {}), 7)
    assert peer.answers() == []
    assert reader.call(MetadataRequest(topics=None), 9).topics == []
    assert (
        produced(reader.call(produce_request("t", batch(b"v")), 9))[0] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    )
    # Decided already, so it cannot be created twice; but nobody may be told before it is certain.
    other.send(creation("t", {}), 7)
    assert other.answers() == []
    stage.spawn.release()
    stage.spawn.release()
    assert only(only(peer.answers()).topics).error_code == 0
    assert only(only(other.answers()).topics).error_code == ErrorCode.TOPIC_ALREADY_EXISTS
    assert [topic.name for topic in reader.call(MetadataRequest(topics=None), 9).topics] == ["t"]


def test_a_failed_fsync_of_the_metadata_stops_the_broker(stage: Stage, peer: Peer) -> None:
    stage.spawn.holds_threads = True
    peer.send(creation("t", {}), 7)
    stage.spawn.release(OSError(5, "Input/output error"))
    assert peer.answers() == []
    assert "fsync of the metadata log failed" in only(stage.failures)


def test_committed_offsets_are_told_once_they_are_committed(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data", **{"penstock_durability": "flushed"})
    peer = Peer(stage)
    create_topic(stage, peer, "t", {})
    stage.spawn.holds_threads = False
    assert peer.call(FindCoordinatorRequest(key="g"), 2).error_code == 0
    stage.spawn.holds_threads = True
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=5, committed_metadata="")
    request = OffsetCommitRequest(
        group_id="g", topics=[OffsetCommitRequestTopic(name="t", partitions=[partition])]
    )
    peer.send(request, 8)
    assert peer.answers() == []
    asked = OffsetFetchRequest(
        group_id="g", topics=[OffsetFetchRequestTopic(name="t", partition_indexes=[0])]
    )
    reader = Peer(stage)
    assert only(only(reader.call(asked, 5).topics).partitions).committed_offset == -1
    stage.spawn.release()
    assert only(only(only(peer.answers()).topics).partitions).error_code == 0
    assert only(only(reader.call(asked, 5).topics).partitions).committed_offset == 5
    stage.spawn.holds_threads = False
    stage.broker.close()


def test_the_mode_of_the_whole_broker_counts_for_its_topics() -> None:
    with BrokerProcess({"penstock.durability": "flushed"}) as process:
        with Wire((process.host, process.port)) as wire:
            wire.call(creation("t", {}), 7)
            for number in range(20):
                assert put(wire, "t", b"%d" % number) == number
        process.restart(kill=True)
        with Wire((process.host, process.port)) as wire:
            assert everything(wire, "t") == [b"%d" % number for number in range(20)]


def test_what_follows_a_batch_that_the_lapsed_lease_refused_does_not_overtake_it(
    stage: Stage, peer: Peer
) -> None:
    """Several are under way. One hears that nobody leads here; a heartbeat later the next one comes. Were it called
    out of order, librdkafka would begin a new sequence, and store twice what is stored and not acknowledged yet.
    """
    peer.call(creation("t", {}), 7)

    def send(sequence: int) -> tuple[int, int]:
        records = batch(
            b"%d" % sequence,
            timestamp=stage.clock.wall_ms(),
            producer_id=7,
            producer_epoch=0,
            base_sequence=sequence,
        )
        return produced(peer.call(produce_request("t", records), 9))

    assert send(0) == (ErrorCode.NONE, 0)
    # Nothing runs: a process that was stopped, say.
    stage.clock.ms += stage.broker.config.broker_session_timeout_ms
    assert send(1) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
    stage.spawn.run()
    assert stage.broker.membership.is_serving()
    assert send(2) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
    assert [send(1), send(2), send(3)] == [(ErrorCode.NONE, offset) for offset in (1, 2, 3)]
    assert send(5) == (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1), "of that one nobody has heard"
