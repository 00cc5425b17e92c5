"""Apache Kafka's own dump tool reads our metadata log and our snapshots, control records and all."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from penstock.broker.quorum.metadata_log import control_batch, control_message, decode_control
from penstock.protocol import schema
from penstock.protocol.messages.quorum import (
    ControlRecordKey,
    LeaderChangeMessage,
    LeaderChangeMessageVoter,
)
from penstock.protocol.records import decode_header, encode_batch
from penstock.raft.events import LeaderChange
from penstock.raft.quorum import Voter
from tests.broker.quorum_stage import DIRECTORY, Stage
from tests.java import KAFKA_VERSION, classpath


def dump(*files: Path) -> str:
    jars = classpath(
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"
    )
    command = ["java", "-Xshare:auto", "-cp", jars, "org.apache.kafka.tools.DumpLogSegments"]
    command += ["--cluster-metadata-decoder", "--files", ",".join(map(str, files))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return done.stdout


def staged(directory_id: bytes = bytes((1,)) * 16, snapshot_records: int = 1_000) -> Stage:
    """A node whose log has 15 topics, or a snapshot of them in place of its beginning."""
    stage = Stage((1,), snapshot_records=snapshot_records)
    stage.nodes[1].directory_id = directory_id
    stage.nodes[1].start()
    stage.commit(stage.leader(), 15)
    stage.run_for(500)
    return stage


def copied(stage: Stage, ending: str, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    files = stage.nodes[1].files
    (name,) = [name for name in files.list(DIRECTORY) if name.endswith(ending)]
    copy = target / name
    copy.write_bytes(files.read(f"{DIRECTORY}/{name}"))
    return copy


def test_kafkas_tool_reads_the_metadata_log_whatever_the_id_of_the_directory(tmp_path: Path) -> None:
    choose = random.Random(9)
    # The first is read by accident even when it is written where Kafka's tool expects none.
    ids = [bytes((1,)) * 16, *(choose.randbytes(16) for _ in range(5)), bytes((255,)) * 16]
    logs = [copied(staged(id), ".log", tmp_path / id.hex()) for id in ids]
    text = dump(*logs)
    for kind in ("LeaderChange", "KRaftVersion", "KRaftVoters"):
        assert text.count(kind) >= len(logs), kind
    assert text.count('"type":"TOPIC_RECORD"') == 15 * len(logs)
    assert "Error" not in text and "rror at" not in text


def test_kafkas_tool_reads_a_snapshot(tmp_path: Path) -> None:
    text = dump(copied(staged(snapshot_records=20), "1.checkpoint", tmp_path))
    assert "SnapshotHeader" in text and "SnapshotFooter" in text and "KRaftVoters" in text
    assert text.count('"type":"PARTITION_RECORD"') == 15


@pytest.mark.parametrize("version", [0, 1])
def test_a_change_of_leader_is_read_in_the_version_it_was_written_in(version: int) -> None:
    """Version 1, with the ids of directories, is what older releases wrote."""
    written = LeaderChangeMessage(
        version=version,
        leader_id=2,
        voters=[LeaderChangeMessageVoter(voter_id=2, voter_directory_id=bytes(16))],
        granting_voters=[],
    )
    key = schema.encode(ControlRecordKey(version=0, type=LeaderChangeMessage.KEY), 0)
    batch = encode_batch([(0, key, schema.encode(written, version), [])], leader_epoch=1, control=True)
    assert list(decode_control(batch, 0, decode_header(batch))) == [written]


def test_a_change_of_leader_is_written_in_version_0_which_is_all_that_kafkas_tools_read() -> None:
    voters = (Voter(1, random.Random(1).randbytes(16)),)
    batch = control_batch([control_message(LeaderChange(1, voters, voters), {})], 0, 1)
    (read,) = decode_control(batch, 0, decode_header(batch))
    assert isinstance(read, LeaderChangeMessage) and read.version == 0
    assert [voter.voter_id for voter in read.voters] == [1]
