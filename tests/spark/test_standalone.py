"""The pipeline on a cluster of Spark's own: master, worker, executors and Python workers are separate processes.

What only holds in one process breaks here: anything that cannot be pickled, a module that the executor cannot
import, a file that only the driver sees, a session that forgets which master it was given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import Outgoing
from tests.spark.standalone import SPARK_HOME, StandaloneCluster
from tests.tools import ROOT

Unique = Callable[[str], str]

PARTITIONS = 3
RECORDS = 300
DRIVER_TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(2 * DRIVER_TIMEOUT_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path_factory.mktemp("standalone")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ConfluentClient]:
    client = ConfluentClient(bootstrap)
    yield client
    client.close()


@pytest.fixture
def topic(client: ConfluentClient, unique: Unique) -> str:
    topic = unique("topic")
    client.create_topic(topic, partitions=PARTITIONS)
    client.produce(topic, [Outgoing(key=b"key-%d" % n, value=b"value-%d" % n) for n in range(RECORDS)])
    return topic


def contents(client: ConfluentClient, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    got = client.consume(topic, dict.fromkeys(range(PARTITIONS), 0), RECORDS)
    ends = [client.offset(topic, partition, "latest") for partition in range(PARTITIONS)]
    assert sum(end or 0 for end in ends) == RECORDS, f"{topic} ends at {ends}"
    return sorted((each.key or b"", each.value) for each in got)


def driver(cluster: StandaloneCluster, command: Sequence[str | Path]) -> str:
    """Run a driver as its own process, in a directory that is not the checkout; what it printed."""
    done = subprocess.run(
        command,
        env=cluster.environment,
        cwd=cluster.directory,
        capture_output=True,
        text=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def settings(cluster: StandaloneCluster) -> list[str]:
    """What a driver is told about the size of things, as ``--conf`` of spark-submit and of our own command."""
    values = {
        "spark.log.level": "WARN",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": cluster.java_options,
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": cluster.java_options,
    }
    return [word for name, value in values.items() for word in ("--conf", f"{name}={value}")]


def test_a_script_given_to_spark_submit_reads_writes_and_streams_on_the_cluster(
    cluster: StandaloneCluster,
    client: ConfluentClient,
    bootstrap: str,
    topic: str,
    unique: Unique,
    tmp_path: Path,
) -> None:
    copy, streamed = unique("copy"), unique("streamed")
    for name in (copy, streamed):
        client.create_topic(name, partitions=PARTITIONS)
    submit: list[str | Path] = [
        SPARK_HOME / "bin" / "spark-submit",
        "--master",
        cluster.url,
        *settings(cluster),
    ]
    script = ROOT / "tests" / "spark" / "submitted.py"

    printed = driver(cluster, [*submit, script, bootstrap, topic, copy, streamed, tmp_path / "checkpoint"])

    seen = json.loads(printed.splitlines()[-1])
    assert seen["master"] == cluster.url
    assert seen["records"] == RECORDS
    assert seen["session_ids"] == [cluster.session_id], f"tasks ran elsewhere; this test is {os.getsid(0)}"
    expected = contents(client, topic)
    assert contents(client, copy) == expected
    assert contents(client, streamed) == expected


def test_the_archive_command_runs_on_the_cluster(
    cluster: StandaloneCluster, client: ConfluentClient, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "penstock",
        "spark",
        "archive",
        topic,
        "--to",
        tmp_path / "archive",
    ]
    command += ["--bootstrap", bootstrap, "--master", cluster.url, *settings(cluster), "--json"]

    result = json.loads(driver(cluster, command))

    assert result["records"] == RECORDS
    files = list((tmp_path / "archive").rglob("*.parquet"))
    assert len(files) == result["files"] >= 1
    archived = pa.concat_tables(pq.ParquetFile(path).read(["key", "value"]) for path in files)
    rows = zip(*(column.to_pylist() for column in archived.columns), strict=True)
    assert sorted(rows) == contents(client, topic)
    assert "penstock archive" in cluster.applications(), "it ran elsewhere"
