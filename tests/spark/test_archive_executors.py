"""The archive on a cluster of Spark's own while its executor, or a Python worker of it, is killed with SIGKILL.

The driver lives on: Spark starts another executor and repeats the tasks that were lost, while Python workers of the
dead one may still be writing. The archive must survive that by itself, and at the end the table must equal the
topic. A kill counts when the driver says that a task was lost by it. Half of PENSTOCK_SPARK_KILLS must count, and
at least one of each kind.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.spark.jobs import archive
from penstock.spark.jobs.tables import open_table
from penstock.wire import Client
from tests.spark.standalone import StandaloneCluster
from tests.spark.test_archive_kills import (
    DEADLINE_S,
    KILLS,
    PARTITIONS,
    SEED,
    Archiver,
    Feed,
    Trial,
    check,
    kill,
)
from tests.spark.topics import Topics
from tests.support import wait_until

KILLS_HERE = max(2, KILLS // 2)
EXECUTOR = "CoarseGrainedExecutorBackend"
PYTHON = "pyspark.daemon"
# What the driver says of a task whose process was killed.
LOST = {EXECUTOR: "ExecutorLostFailure", PYTHON: "Python worker exited unexpectedly"}
# Some kills come too late for the task that was seen.
TRIES_PER_KILL = 10


@pytest.mark.timeout(300 + 120 * KILLS_HERE)
def test_the_table_equals_the_topic_whichever_executor_is_killed(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    seed = random.Random(f"{SEED} executors")
    topic = topics.create(unique("killed"), PARTITIONS)
    with Client(bootstrap) as client, StandaloneCluster(tmp_path / "cluster") as cluster:
        trial = Trial(bootstrap, topic, Feed(client, topic), tmp_path, "parquet")
        try:
            archiver = trial.start("--master", cluster.url, "--log-level", "WARN")
            trial.until_at_work(archiver)
            kills = [
                _kill_at_work(trial, archiver, cluster, PYTHON if number % 2 else EXECUTOR, seed)
                for number in range(KILLS_HERE)
            ]
            archiver.kill_all()
            # A worker that outlives its driver may yet leave a file behind, too late for the last run to find.
            wait_until(lambda: not _of(cluster, EXECUTOR, PYTHON), DEADLINE_S, "the executor ends")
            archive(spark, bootstrap, topic, trial.location, file_mb=1)
        finally:
            trial.end()
        print(f"executors, seed {SEED}: {'; '.join(kills)}; {sum(trial.feed.ends)} records")
        check(trial, client)


def _kill_at_work(
    trial: Trial, archiver: Archiver, cluster: StandaloneCluster, name: str, seed: random.Random
) -> str:
    """Kill such a process until a task is lost by it; each time the archive must go on by itself."""
    for number in range(1, TRIES_PER_KILL + 1):
        lost = archiver.log().count(LOST[name])
        former = _of(cluster, EXECUTOR)
        _until_a_task_writes(trial, archiver)
        time.sleep(seed.uniform(0, 0.1))
        running = _of(cluster, name)
        assert archiver.status is None, f"the archive ended before the kill\n{archiver.tail()}"
        if not running:
            continue  # it was a worker of the last executor that wrote, and the next is not there yet
        victim = seed.choice([pid for pid in running if _writes(pid)] or running)
        if not kill(victim):
            continue
        trial.until_caught_up(archiver)
        if name == EXECUTOR:
            assert set(_of(cluster, EXECUTOR)).isdisjoint(former), "the executor was not killed"
        if archiver.log().count(LOST[name]) > lost:
            return f"{name} {victim} at try {number}"
    raise AssertionError(f"of {TRIES_PER_KILL} kills of {name} none met a task\n{archiver.tail()}")


def _until_a_task_writes(trial: Trial, archiver: Archiver) -> None:
    """A file is being written that was not begun before there was so much to write."""
    before = _unfinished(trial)  # also what killed tasks have left behind
    trial.feed.more(10_000)
    deadline = time.monotonic() + DEADLINE_S
    while _unfinished(trial) <= before:
        assert archiver.status is None, f"the archive ended\n{archiver.tail()}"
        assert time.monotonic() < deadline, f"no task writes\n{archiver.tail()}"
        time.sleep(0.002)


def _unfinished(trial: Trial) -> set[str]:
    (topic,) = open_table(trial.location, trial.format).root.glob("topic=*")
    return {name for date in topic.iterdir() for name in os.listdir(date) if name.endswith(".tmp")}


def _writes(pid: int) -> bool:
    """Whether a process has a file of the table open that is not finished: so a Python worker, not the others."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return any(os.readlink(each).endswith(".tmp") for each in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _of(cluster: StandaloneCluster, *names: str) -> list[int]:
    """The executors of the cluster, or their Python workers, that run now."""
    found = []
    for pid in cluster.processes():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if any(name in command for name in names):
                found.append(pid)
    return sorted(found)
