"""What survives the end of the process, what a start does with what it finds, and starts that are refused."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.groups import (
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.messages.offsets import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    MetadataRequest,
)
from tests.broker.conftest import SETTINGS
from tests.broker.phrases import (
    EARLIEST,
    LATEST,
    batch,
    create_topic,
    delete_topic,
    everything,
    fetch,
    fetch_request,
    find_coordinator,
    list_offset,
    only,
    produce,
    put,
)
from tests.broker.wire import Wire
from tests.support import BrokerProcess, wait_until

REFUSED_TIMEOUT_S = 60
CHECKPOINT = "penstock-checkpoint"


@pytest.fixture
def process() -> Iterator[BrokerProcess]:
    with BrokerProcess(SETTINGS) as process:
        yield process


def connect(process: BrokerProcess) -> Wire:
    return Wire((process.host, process.port))


def directories(process: BrokerProcess) -> set[str]:
    return {path.name for path in process.data_dir.iterdir() if path.is_dir()}


def refusal(data_dir: Path, *arguments: str) -> str:
    """The one line with which a start is refused."""
    command = [sys.executable, "-m", "penstock", "serve", "--data-dir", str(data_dir), *arguments]
    if "--listen" not in arguments:
        command += ["--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=REFUSED_TIMEOUT_S, check=False)
    assert ended.returncode != 0
    assert ended.stdout == ""
    line, newline, rest = ended.stderr.partition("\n")
    assert (newline, rest) == ("\n", ""), ended.stderr
    return line


# What survives


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_everything_survives_a_restart(process: BrokerProcess, kill: bool) -> None:
    with connect(process) as wire:
        topic_id = create_topic(wire, "t", 3, {"retention.ms": "123456789"})
        create_topic(wire, "grown")
        create_topic(wire, "deleted")
        put(wire, "deleted", b"gone")
        for number in range(50):
            put(wire, "t", b"%d" % number, partition=number % 2)
        # Topics change.
        grown = CreatePartitionsTopic(name="grown", count=4, assignments=None)
        assert only(wire.call(CreatePartitionsRequest(topics=[grown]), 3).results).error_code == 0
        put(wire, "grown", b"in the new one", partition=3)
        altered = IncrementalAlterConfigsResource(
            resource_type=2,
            resource_name="grown",
            configs=[IncrementalAlterableConfig(name="max.message.bytes", config_operation=0, value="5000")],
        )
        response = wire.call(IncrementalAlterConfigsRequest(resources=[altered]), 1)
        assert only(response.responses).error_code == 0
        delete_topic(wire, "deleted")
        # Groups and their offsets.
        find_coordinator(wire, "g")
        joined = wire.call(join_request("g"), 3)
        assigned = [SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"assigned")]
        request = SyncGroupRequest(
            group_id="g", generation_id=1, member_id=joined.member_id, assignments=assigned
        )
        assert wire.call(request, 3).error_code == 0
        for number in range(10):
            commit(wire, "plain", "t", number)
        # An idempotent producer.
        response = wire.call(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0), 4)
        producer_id = response.producer_id
        sent = [
            batch(b"%d" % number, producer_id=producer_id, producer_epoch=0, base_sequence=number)
            for number in range(3)
        ]
        first = [produce(wire, "t", records, partition=2) for records in sent]
        before = [everything(wire, "t", index) for index in range(3)]
        cluster_id = wire.call(MetadataRequest(topics=[]), 9).cluster_id

    process.restart(kill=kill)

    with connect(process) as wire:
        found = wire.call(MetadataRequest(topics=None), 12)
        assert found.cluster_id == cluster_id
        topics = {topic.name: topic for topic in found.topics}
        assert set(topics) == {"t", "grown", "__consumer_offsets"}
        assert topics["t"].topic_id == topic_id
        assert (len(topics["t"].partitions), len(topics["grown"].partitions)) == (3, 4)
        assert {partition.leader_epoch for partition in topics["t"].partitions} == {0}
        assert [everything(wire, "t", index) for index in range(3)] == before
        assert everything(wire, "grown", 3) == [b"in the new one"]
        assert settings(wire, "t")["retention.ms"] == "123456789"
        assert settings(wire, "grown")["max.message.bytes"] == "5000"
        assert produce(wire, "grown", batch(b"x" * 6000)).error_code == ErrorCode.MESSAGE_TOO_LARGE
        # The member is still in its group, under the same generation.
        heartbeat = HeartbeatRequest(group_id="g", generation_id=1, member_id=joined.member_id)
        assert wire.call(heartbeat, 4).error_code == 0
        described = only(wire.call(DescribeGroupsRequest(groups=["g"]), 5).groups)
        assert only(described.members).member_assignment == b"assigned"
        assert committed(wire, "plain", "t") == 9
        # The producer's repeats are recognised, and it goes on where it was.
        again = [produce(wire, "t", records, partition=2) for records in sent]
        assert [result.base_offset for result in again] == [result.base_offset for result in first]
        behind = batch(b"3", producer_id=producer_id, producer_epoch=0, base_sequence=3)
        assert produce(wire, "t", behind, partition=2).base_offset == 3
        skipped = batch(b"5", producer_id=producer_id, producer_epoch=0, base_sequence=5)
        assert produce(wire, "t", skipped, partition=2).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        other = wire.call(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0), 4)
        assert other.producer_id > producer_id
        assert put(wire, "t", b"next") == 25
        assert fetch(wire, "t", 25).high_watermark == 26


def join_request(group: str) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        protocol_type="test",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"subscription")],
    )


def settings(wire: Wire, topic: str) -> dict[str, str]:
    asked = DescribeConfigsResource(resource_type=2, resource_name=topic, configuration_keys=None)
    result = only(wire.call(DescribeConfigsRequest(resources=[asked]), 4).results)
    return {config.name: config.value for config in result.configs}


def commit(wire: Wire, group: str, topic: str, offset: int) -> None:
    partition = OffsetCommitRequestPartition(
        partition_index=0, committed_offset=offset, committed_metadata=""
    )
    request = OffsetCommitRequest(
        group_id=group, topics=[OffsetCommitRequestTopic(name=topic, partitions=[partition])]
    )
    assert only(only(wire.call(request, 8).topics).partitions).error_code == 0


def committed(wire: Wire, group: str, topic: str) -> int:
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=[0])
    response = wire.call(OffsetFetchRequest(group_id=group, topics=[asked]), 5)
    offset: int = only(only(response.topics).partitions).committed_offset
    return offset


def delete_records(wire: Wire, topic: str, offset: int) -> None:
    wanted = DeleteRecordsPartition(partition_index=0, offset=offset)
    request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name=topic, partitions=[wanted])])
    assert only(only(wire.call(request, 2).topics).partitions).error_code == 0


def test_many_restarts_lose_nothing(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t", configs={"segment.bytes": "2000"})
    sent = []
    for turn in range(6):
        with connect(process) as wire:
            for number in range(20):
                value = b"%d-%d" % (turn, number) + b"x" * 50
                put(wire, "t", value)
                sent.append(value)
            assert everything(wire, "t") == sent
        process.restart(kill=turn % 2 == 0)
    with connect(process) as wire:
        assert everything(wire, "t") == sent


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_a_topic_created_again_is_empty_after_a_restart_too(process: BrokerProcess, kill: bool) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        for _ in range(20):
            put(wire, "t", b"old")
        delete_records(wire, "t", 10)
    # So that the checkpoints speak of the old topic.
    process.restart()
    with connect(process) as wire:
        delete_topic(wire, "t")
        create_topic(wire, "t")
    process.restart(kill=kill)
    with connect(process) as wire:
        assert (list_offset(wire, "t", EARLIEST), list_offset(wire, "t", LATEST)) == (0, 0)
        assert put(wire, "t", b"new") == 0
    process.restart(kill=kill)
    with connect(process) as wire:
        assert everything(wire, "t") == [b"new"]


def test_a_topic_created_again_and_written_to_keeps_its_records_when_killed(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        for _ in range(20):
            put(wire, "t", b"old")
        delete_records(wire, "t", 15)
    process.restart()
    with connect(process) as wire:
        delete_topic(wire, "t")
        create_topic(wire, "t")
        put(wire, "t", b"new")
    process.restart(kill=True)
    with connect(process) as wire:
        assert everything(wire, "t") == [b"new"]


def test_deletion_and_creation_in_one_breath_survive_a_kill(process: BrokerProcess) -> None:
    asked = CreatableTopic(name="t", num_partitions=1, replication_factor=1)
    with connect(process) as wire:
        create_topic(wire, "t")
        put(wire, "t", b"old")
        wire.send(DeleteTopicsRequest(topic_names=["t"]), 4)
        wire.send(CreateTopicsRequest(topics=[asked]), 7)
        assert only(wire.receive().responses).error_code == 0
        assert only(wire.receive().topics).error_code == 0
        put(wire, "t", b"new")
    process.restart(kill=True)
    with connect(process) as wire:
        assert everything(wire, "t") == [b"new"]


def test_deleted_records_stay_deleted(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        for number in range(10):
            put(wire, "t", b"%d" % number)
        delete_records(wire, "t", 7)
    process.restart()
    with connect(process) as wire:
        assert everything(wire, "t") == [b"7", b"8", b"9"]
        delete_records(wire, "t", -1)
        checkpoint = process.data_dir / CHECKPOINT
        wait_until(lambda: " 0 10 10\n" in checkpoint.read_text(), 5, "the checkpoint of DeleteRecords")
    process.restart(kill=True)
    with connect(process) as wire:
        assert list_offset(wire, "t", EARLIEST) == list_offset(wire, "t", LATEST) == 10
        assert put(wire, "t", b"next") == 10


def test_a_large_setting_does_not_stop_the_next_start(process: BrokerProcess) -> None:
    name = "leader.replication.throttled.replicas"
    config = IncrementalAlterableConfig(name=name, config_operation=0, value="1:" + "x" * 12_000_000)
    altered = IncrementalAlterConfigsResource(resource_type=2, resource_name="t", configs=[config])
    with connect(process) as wire:
        create_topic(wire, "t")
        # Accepted or refused, but not forgotten halfway.
        accepted = only(wire.call(IncrementalAlterConfigsRequest(resources=[altered]), 1).responses)
        put(wire, "t", b"v")
    process.restart(kill=True)
    with connect(process) as wire:
        assert everything(wire, "t") == [b"v"]
        value = settings(wire, "t")[name]
    assert len(value) == (12_000_002 if accepted.error_code == 0 else 0)


# What a start finds


def test_a_directory_that_nothing_explains_is_set_aside_and_kept(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t", 2)
        put(wire, "t", b"v")
    process.stop()
    stray = process.data_dir / "unknown-3"
    shutil.copytree(process.data_dir / "t-0", stray)
    beyond = process.data_dir / "t-7"
    shutil.copytree(process.data_dir / "t-0", beyond)
    content = (stray / "00000000000000000000.log").read_bytes()
    process.start()
    with connect(process) as wire:
        assert everything(wire, "t") == [b"v"]
    assert not stray.exists() and not beyond.exists()
    kept = sorted(name for name in directories(process) if name.endswith("-stray"))
    assert [name.split(".")[0] for name in kept] == ["t-7", "unknown-3"]
    assert (process.data_dir / kept[1] / "00000000000000000000.log").read_bytes() == content
    assert "unknown-3" in process.log_tail()
    process.restart()
    # Set aside once, then left alone.
    assert kept == sorted(name for name in directories(process) if name.endswith("-stray"))


def test_a_directory_of_another_topic_of_the_same_name_is_set_aside(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        put(wire, "t", b"old")
    process.stop()
    saved = process.data_dir.parent / "saved"
    shutil.copytree(process.data_dir / "t-0", saved)
    process.start()
    with connect(process) as wire:
        delete_topic(wire, "t")
        create_topic(wire, "t")
    process.stop()
    shutil.copytree(saved, process.data_dir / "t-0")
    process.start()
    with connect(process) as wire:
        assert everything(wire, "t") == []
        assert put(wire, "t", b"new") == 0
    assert any(name.startswith("t-0.") and name.endswith("-stray") for name in directories(process))


def test_other_files_and_directories_are_left_alone(process: BrokerProcess) -> None:
    process.stop()
    for name in ("lost+found", "backup", "-1", "x-", "notes-today"):
        (process.data_dir / name).mkdir()
    (process.data_dir / "README").write_text("mine")
    process.start()
    assert {"lost+found", "backup", "-1", "x-", "notes-today"} <= directories(process)
    assert (process.data_dir / "README").read_text() == "mine"


def test_a_partition_whose_directory_was_lost_refuses_to_start_over(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        create_topic(wire, "other")
        put(wire, "t", b"v")
    process.stop()
    shutil.rmtree(process.data_dir / "t-0")
    process.start()
    with connect(process) as wire:
        assert produce(wire, "t", batch(b"v")).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert fetch(wire, "t", 0).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert put(wire, "other", b"v") == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"rubbish",
        b"penstock-checkpoint 1\n",
        b"penstock-checkpoint 1\n5\n",
        b"penstock-checkpoint 9\n0\n",
        b"penstock-checkpoint 1\n1\nt 0 x y\n",
        b"\xff\xfe",
    ],
)
def test_a_damaged_checkpoint_is_only_a_hint_lost(process: BrokerProcess, content: bytes) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        put(wire, "t", b"v")
    process.stop()
    (process.data_dir / CHECKPOINT).write_bytes(content)
    process.start()
    with connect(process) as wire:
        assert everything(wire, "t") == [b"v"]
        assert put(wire, "t", b"w") == 1


def test_a_torn_tail_is_cut_and_what_was_before_it_stays(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        put(wire, "t", b"whole")
    process.kill()
    with (process.data_dir / "t-0" / "00000000000000000000.log").open("ab") as log:
        log.write(batch(b"torn", base_offset=1)[:-3])
    process.start()
    with connect(process) as wire:
        assert everything(wire, "t") == [b"whole"]
        assert put(wire, "t", b"next") == 1


def test_deleted_topics_leave_nothing_behind() -> None:
    with BrokerProcess({**SETTINGS, "log.segment.delete.delay.ms": "0"}) as process:
        with connect(process) as wire:
            create_topic(wire, "t", 3)
            for index in range(3):
                put(wire, "t", b"v", partition=index)
            delete_topic(wire, "t")
        wait_until(
            lambda: not [name for name in directories(process) if name.startswith("t-")],
            5,
            "the files are gone",
        )


# Starts that are refused


def test_a_second_broker_on_the_same_directory_is_refused(process: BrokerProcess) -> None:
    line = refusal(process.data_dir)
    assert "another broker is running" in line
    with connect(process) as wire:
        create_topic(wire, "t")
        assert put(wire, "t", b"v") == 0


def test_a_directory_of_another_node_is_refused(process: BrokerProcess) -> None:
    process.stop()
    line = refusal(process.data_dir, "--node-id", "2")
    assert "belongs to node 1" in line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"rubbish",
        b"\xff\xfe\x00",
        b"version=1\nnode.id=1\n",
        b"version=1\nnode.id=x\ncluster.id=y\ndirectory.id=z\n",
        b"version=1\nnode.id=1\ncluster.id=abc\ndirectory.id=not an id\n",
        b"version=1\nnode.id=1\ncluster.id=abc\ndirectory.id=\n",
    ],
)
def test_a_damaged_identity_is_refused(process: BrokerProcess, content: bytes) -> None:
    process.stop()
    (process.data_dir / "meta.properties").write_bytes(content)
    assert "meta.properties is damaged" in refusal(process.data_dir)


def test_a_lost_identity_beside_data_is_refused(process: BrokerProcess) -> None:
    process.stop()
    (process.data_dir / "meta.properties").unlink()
    assert "meta.properties is missing" in refusal(process.data_dir)


def test_a_damaged_metadata_log_is_refused(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
        put(wire, "t", b"v")
    process.stop()
    (log,) = (process.data_dir / "__cluster_metadata-0").glob("*.log")
    content = bytearray(log.read_bytes())
    # In the middle, with whole batches behind it: not a torn tail.
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    assert "metadata" in refusal(process.data_dir)
    # Nothing was thrown away on the way.
    assert log.read_bytes() == bytes(content)
    assert "t-0" in directories(process)


def test_a_port_in_use_is_refused(process: BrokerProcess, tmp_path: Path) -> None:
    line = refusal(tmp_path / "data", "--listen", f"127.0.0.1:{process.port}")
    assert f"cannot listen on 127.0.0.1:{process.port}" in line


def test_a_data_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert "cannot use the data directory" in refusal(tmp_path / "file")
    assert "cannot use the data directory" in refusal(tmp_path / "file" / "below")


def test_a_directory_where_a_file_should_be_is_refused_in_one_line(process: BrokerProcess) -> None:
    process.stop()
    (process.data_dir / ".boot-id").unlink()
    (process.data_dir / ".boot-id").mkdir()
    assert str(process.data_dir) in refusal(process.data_dir)


def test_a_free_port_is_taken_again_at_once(process: BrokerProcess) -> None:
    with connect(process) as wire:
        create_topic(wire, "t")
    port = process.port
    process.restart()
    assert process.port == port
    with socket.create_connection((process.host, port), timeout=5):
        pass


def test_a_stop_with_open_connections_and_waiting_requests_is_clean(process: BrokerProcess) -> None:
    with connect(process) as waiting, connect(process), connect(process) as producing:
        create_topic(waiting, "quiet")
        create_topic(waiting, "t")
        waiting.send(fetch_request("quiet", 0, max_wait_ms=600_000), 12)
        for number in range(200):
            put(producing, "t", b"%d" % number)
        process.stop()  # which takes far less time than the request would wait
        assert waiting.is_closed()
    assert (process.data_dir / ".kafka_cleanshutdown").exists()
    process.start()
    assert not (process.data_dir / ".kafka_cleanshutdown").exists()
    with connect(process) as wire:
        assert len(everything(wire, "t")) == 200
