"""A source whose brokers die, and whose records do not wait: three real brokers under a task and under a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings, read
from tests.cluster.cluster import Cluster
from tests.spark.streams import DEADLINE_S, Stream, expected, send
from tests.spark.topics import Topics
from tests.support import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


@pytest.mark.chaos
def test_a_task_survives_the_death_of_the_leader_it_reads_from(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    topics = Topics(cluster.bootstrap, leaders_may_die=True)
    topic = topics.create(unique("t"), 1, replicas=3)
    # Small batches and fetches: the task is in the middle of its range when the leader dies, with another one in
    # flight.
    small = {"batch.num.messages": "100"}
    topics.send(topic, [b"%d" % number for number in range(3000)], settings=small)
    cluster.wait_in_sync(topic)
    settings = ReadSettings(cluster.bootstrap, fetch_bytes_max=4096)
    batches = read(settings, OffsetRange(topic, 0, 0, 3000))
    seen = next(batches).column("value").to_pylist()
    assert len(seen) < 1500
    leader = cluster.leader(topic, 0)
    cluster.kill(leader)
    for batch in batches:
        seen += batch.column("value").to_pylist()
    assert seen == [b"%d" % number for number in range(3000)]
    cluster.start(leader)


@pytest.mark.chaos
def test_a_stream_survives_the_death_of_a_leader(
    spark: SparkSession, cluster: Cluster, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topics = Topics(cluster.bootstrap, leaders_may_die=True)
    topic, group = topics.create(unique("t"), 3, replicas=3), unique("group")
    cluster.wait_in_sync(topic)
    stream = Stream(spark, cluster.bootstrap, tmp_path / "checkpoint")
    try:
        query = stream.start(subscribe=topic, groupId=group)
        stop, written = threading.Event(), [0]

        def produce() -> None:
            while not stop.is_set():
                for partition in range(3):
                    send(topics, topic, partition, written[0], written[0] + 50)
                written[0] += 50

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            wait_until(lambda: len(stream.table.rows) > 100, DEADLINE_S, "the stream runs")
            leader = cluster.leader(topic, 0)
            cluster.kill(leader)
            before = len(stream.table.rows)
            wait_until(lambda: len(stream.table.rows) > before + 200, DEADLINE_S, "the stream goes on")
        finally:
            stop.set()
            producer.join()
        total = 3 * written[0]
        wait_until(lambda: len(stream.table.rows) >= total, DEADLINE_S, "everything was read")
        assert query.isActive
        rows = sorted(stream.table.rows)
        assert rows == sorted(
            row for number in range(3) for row in expected(topic, number, *range(written[0]))
        )
        done = {(topic, number): written[0] for number in range(3)}
        wait_until(lambda: topics.committed(group) == done, DEADLINE_S, "the group stands at the end")
        cluster.start(leader)
    finally:
        stream.stop()


def test_retention_overtakes_a_stream(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topics.create(unique("t"), 2)
    stream = Stream(spark, bootstrap, tmp_path / "checkpoint")
    for partition in range(2):
        send(topics, topic, partition, 0, 10)
    stream.drain(subscribe=topic)
    for partition in range(2):
        send(topics, topic, partition, 10, 40)
    topics.delete_records(topic, 1, 25)
    try:
        with pytest.raises(PySparkException, match=rf"records {topic}-1 \[10, 25\) are gone"):
            stream.drain(subscribe=topic)
        assert len(stream.table.rows) == 20
        # The way out that the message names, on the same checkpoint.
        stream.drain(subscribe=topic, failOnDataLoss="false")
        assert sorted(stream.table.rows) == sorted(
            expected(topic, 0, *range(40)) + expected(topic, 1, *range(10), *range(25, 40))
        )
    finally:
        stream.stop()
