"""Apache Kafka's own dump tool reads our metadata log and our snapshots, control records and all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.broker.quorum_stage import DIRECTORY, Stage
from tests.java import KAFKA_VERSION, classpath


def dump(file: Path) -> str:
    jars = classpath(
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"
    )
    command = ["java", "-Xshare:auto", "-cp", jars, "org.apache.kafka.tools.DumpLogSegments"]
    command += ["--cluster-metadata-decoder", "--files", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture
def stage() -> Stage:
    stage = Stage((1,), snapshot_records=20)
    stage.nodes[1].start()
    stage.commit(stage.leader(), 15)
    stage.run_for(500)
    return stage


def copied(stage: Stage, ending: str, target: Path) -> Path:
    files = stage.nodes[1].files
    (name,) = [name for name in files.list(DIRECTORY) if name.endswith(ending)]
    copy = target / name
    copy.write_bytes(files.read(f"{DIRECTORY}/{name}"))
    return copy


def test_kafkas_tool_reads_the_metadata_log(stage: Stage, tmp_path: Path) -> None:
    text = dump(copied(stage, ".log", tmp_path))
    assert "LeaderChange" in text and "KRaftVersion" in text and "KRaftVoters" in text
    assert text.count('"type":"TOPIC_RECORD"') == 15
    assert "Error" not in text and "rror at" not in text


def test_kafkas_tool_reads_a_snapshot(stage: Stage, tmp_path: Path) -> None:
    text = dump(copied(stage, "1.checkpoint", tmp_path))
    assert "SnapshotHeader" in text and "SnapshotFooter" in text and "KRaftVoters" in text
    assert text.count('"type":"PARTITION_RECORD"') == 15
