"""Kafka's dump tool and metadata shell on the metadata log of a real cluster, with ids that it made itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.test_creating import asked_for
from tests.java import KAFKA_VERSION, classpath

TOPICS = 5
SHELLS_MAX = 5


@pytest.fixture(scope="module")
def logs() -> Iterator[dict[int, Path]]:
    """Of a cluster whose controller was changed once, by node."""
    with Cluster(3) as cluster:
        for number in range(TOPICS):
            assert asked_for(cluster.nodes[1].address, f"topic-{number}") == 0
        cluster.restart(cluster.controller(), kill=True)
        cluster.wait_in_sync("topic-0")
        cluster.stop(*cluster.nodes)
        yield {
            node.id: node.data_dirs[0] / "__cluster_metadata-0" / f"{0:020}.log"
            for node in cluster.nodes.values()
        }


def java(main: str, *words: str, artifact: str) -> str:
    jars = classpath(
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", f"org.apache.kafka:{artifact}:{KAFKA_VERSION}"
    )
    command = ["java", "-Xshare:auto", "-cp", jars, main, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return done.stdout


def test_kafkas_dump_tool_reads_the_metadata_log_of_every_node(logs: dict[int, Path]) -> None:
    files = ",".join(map(str, logs.values()))
    text = java(
        "org.apache.kafka.tools.DumpLogSegments",
        *("--cluster-metadata-decoder", "--files", files),
        artifact="kafka-tools",
    )
    assert text.count("KRaftVoters") == len(logs)
    assert text.count("LeaderChange") >= 2 * len(logs)
    for number in range(TOPICS):
        assert text.count(f'"type":"TOPIC_RECORD","version":0,"data":{{"name":"topic-{number}"') == len(logs)
    assert "rror" not in text


def test_kafkas_metadata_shell_shows_the_topics(logs: dict[int, Path]) -> None:
    topics = {f"topic-{number}" for number in range(TOPICS)}
    # On a busy machine the shell answers before it has read the whole log.
    for _ in range(SHELLS_MAX):
        text = java(
            "org.apache.kafka.shell.MetadataShell",
            *("--snapshot", str(logs[1]), "ls", "/image/topics/byName"),
            artifact="kafka-shell",
        )
        if set(text.split()) >= topics:
            return
    pytest.fail(f"not {topics}: {text}")
