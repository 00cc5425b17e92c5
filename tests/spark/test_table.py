"""A topic and its archive as one DataFrame: every record once, wherever the seam lies and whatever moves."""

from __future__ import annotations

import datetime
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.columnar.columns import encode
from penstock.protocol.compression import Codec
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import archive, table
from penstock.spark.jobs.table import find_seam
from penstock.spark.jobs.tables import FORMATS, open_table
from penstock.wire import Client, TopicPartition
from penstock.wire.producer import Producer
from tests.spark.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Ten million in `make spark-long`.
RECORDS = int(os.environ.get("PENSTOCK_SPARK_RECORDS", "1000000"))
PARTITIONS = 4
CHUNK = 50_000
MIDNIGHT_MS = 1_794_787_200_000  # 2026-11-16


@pytest.fixture
def topic(topics: Topics, unique: Callable[[str], str]) -> str:
    anytime = {"message.timestamp.after.max.ms": str(2**63 - 1), "retention.ms": "-1"}
    return topics.create(unique("both"), 2, configs=anytime)


def numbered(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


def values(frame: DataFrame, partition: int = 0) -> list[bytes]:
    """In the order of offsets, which must have no gap and no repetition."""
    rows = frame.where(frame.partition == partition).select("offset", "value").orderBy("offset").collect()
    offsets = [row.offset for row in rows]
    assert offsets == list(range(offsets[0], offsets[0] + len(offsets))) if rows else True
    return [bytes(row.value) for row in rows]


@pytest.mark.parametrize("format", FORMATS)
def test_archived_and_new_records_are_one_table(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path, format: str
) -> None:
    topics.send(topic, numbered(0, 50), headers=[("a", b"b")], timestamp_ms=MIDNIGHT_MS + 1)
    archive(spark, bootstrap, topic, tmp_path / "archive", format=format)
    cold = table(spark, bootstrap, topic, tmp_path / "archive")
    assert values(cold) == numbered(0, 50)
    topics.send(topic, numbered(50, 70), headers=[("a", b"b")], timestamp_ms=MIDNIGHT_MS - 1)
    topics.send(topic, numbered(0, 5), partition=1, timestamp_ms=MIDNIGHT_MS + 1)
    # A day is a day of UTC, wherever the session lives.
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        both = table(spark, bootstrap, topic, tmp_path / "archive")
        assert both.columns == [
            "key",
            "value",
            "topic",
            "partition",
            "offset",
            "timestamp",
            "timestampType",
            "headers",
            "date",
        ]
        days = {
            row.date: row.n for row in both.groupBy("date").agg({"*": "count"}).toDF("date", "n").collect()
        }
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert days == {datetime.date(2026, 11, 16): 55, datetime.date(2026, 11, 15): 20}
    assert values(both) == numbered(0, 70)
    assert values(both, 1) == numbered(0, 5)
    assert both.where("headers[0].key = 'a' and headers[0].value = cast('b' as binary)").count() == 70
    assert values(cold) == numbered(0, 50), "a DataFrame changed behind its user's back"


def test_a_table_with_nothing_in_it_works(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    archive(spark, bootstrap, topic, tmp_path / "archive", by_date=False, headers=False)
    empty = table(spark, bootstrap, topic, tmp_path / "archive")
    assert empty.count() == 0
    assert "date" not in empty.columns
    topics.send(topic, numbered(0, 3))
    topics.grow(topic, 3)
    topics.send(topic, numbered(0, 2), partition=2)
    hot = table(spark, bootstrap, topic, tmp_path / "archive")
    assert hot.schema == empty.schema
    assert (values(hot), values(hot, 1), values(hot, 2)) == (numbered(0, 3), [], numbered(0, 2))


def test_a_view_is_for_sql_and_is_replaced_by_a_newer_one(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    topics.send(topic, [b'{"id": 1}', b"broken"])
    archive(spark, bootstrap, topic, tmp_path / "archive", value_schema="id BIGINT")
    topics.send(topic, [b'{"id": 10}', b'{"id": "x"}', None])
    table(spark, bootstrap, topic, tmp_path / "archive", view="hot_and_cold")
    query = "select count(*) n, sum(id) ids, count(error) errors, max(offset) last from hot_and_cold"
    assert spark.sql(query).first() == (5, 11, 2, 4)
    topics.send(topic, [b'{"id": 100}'])
    assert spark.sql(query).first() == (5, 11, 2, 4)
    table(spark, bootstrap, topic, tmp_path / "archive", view="hot_and_cold")
    assert spark.sql(query).first() == (6, 111, 2, 5)
    spark.catalog.dropTempView("hot_and_cold")


def test_retention_up_to_the_seam_loses_nothing_and_beyond_it_is_told(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    topics.send(topic, numbered(0, 20))
    archive(spark, bootstrap, topic, tmp_path / "archive")
    topics.send(topic, numbered(20, 30))
    topics.delete_records(topic, 0, 20)
    assert values(table(spark, bootstrap, topic, tmp_path / "archive")) == numbered(0, 30)
    topics.delete_records(topic, 0, 25)
    with pytest.raises(DataLossError, match=rf"{topic}-0 \[20, 25\).*fail_on_data_loss"):
        table(spark, bootstrap, topic, tmp_path / "archive")
    rest = table(spark, bootstrap, topic, tmp_path / "archive", fail_on_data_loss=False)
    assert sorted(row.offset for row in rest.collect()) == [*range(20), *range(25, 30)]
    topics.delete_records(topic, 0, 30)
    rest = table(spark, bootstrap, topic, tmp_path / "archive", fail_on_data_loss=False)
    assert values(rest) == numbered(0, 20)


def test_a_commit_between_two_looks_is_not_taken_for_a_loss(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """The archive is read; then it commits, and retention deletes what it committed; then the log is asked."""
    topics.send(topic, numbered(0, 10))
    archive(spark, bootstrap, topic, tmp_path / "archive")
    topics.send(topic, numbered(10, 20))
    stale = open_table(tmp_path / "archive", "parquet")
    load, looks = stale.load, []

    def load_and_be_overtaken() -> Any:
        state = load()
        looks.append(state)
        if len(looks) == 1:
            archive(spark, bootstrap, topic, tmp_path / "archive")
            topics.delete_records(topic, 0, 15)
        return state

    stale.load = load_and_be_overtaken  # type: ignore[method-assign]
    with Client(bootstrap) as client:
        seam = find_seam(client, topic, stale, fail_on_data_loss=True)
    assert len(looks) >= 2
    assert seam.state.batch == 2
    assert seam.hot == ()
    assert sum(each.records for each in seam.files) == 20


@pytest.mark.usefixtures("impatient")
def test_a_topic_that_was_made_again_shows_only_its_new_records(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    topics.send(topic, numbered(0, 10))
    archive(spark, bootstrap, topic, tmp_path / "archive")
    topics.delete(topic)
    with pytest.raises(DataLossError, match="is deleted"):
        table(spark, bootstrap, topic, tmp_path / "archive")
    assert values(table(spark, bootstrap, topic, tmp_path / "archive", fail_on_data_loss=False)) == numbered(
        0, 10
    )
    topics.create(topic, 1)
    topics.send(topic, [b"new"])
    assert values(table(spark, bootstrap, topic, tmp_path / "archive")) == [b"new"]
    archive(spark, bootstrap, topic, tmp_path / "archive", fail_on_data_loss=False)
    topics.send(topic, [b"newer"])
    assert values(table(spark, bootstrap, topic, tmp_path / "archive")) == [b"new", b"newer"]


def test_files_that_somebody_else_merged_are_read_too(
    spark: SparkSession,
    bootstrap: str,
    topics: Topics,
    topic: str,
    unique: Callable[[str], str],
    tmp_path: Path,
) -> None:
    from deltalake import DeltaTable

    other = topics.create(unique("other"), 1)
    for start in (0, 10):
        topics.send(topic, numbered(start, start + 10))
        topics.send(other, [b"of another topic"])
        archive(spark, bootstrap, [topic, other], tmp_path / "archive", format="delta")
    DeltaTable(str(tmp_path / "archive")).optimize.compact()
    topics.send(topic, numbered(20, 25))
    assert values(table(spark, bootstrap, topic, tmp_path / "archive")) == numbered(0, 25)
    archive(spark, bootstrap, [topic, other], tmp_path / "archive", format="delta")
    assert values(table(spark, bootstrap, topic, tmp_path / "archive")) == numbered(0, 25)


def test_a_mistake_is_told_in_one_line(
    spark: SparkSession,
    bootstrap: str,
    topic: str,
    topics: Topics,
    unique: Callable[[str], str],
    tmp_path: Path,
) -> None:
    with pytest.raises(SparkOptionError, match="no archive at"):
        table(spark, bootstrap, topic, tmp_path / "archive")
    archive(spark, bootstrap, topic, tmp_path / "archive")
    other = topics.create(unique("other"), 1)
    with pytest.raises(SparkOptionError, match=rf"has {topic}, but not {other}"):
        table(spark, bootstrap, other, tmp_path / "archive")
    with pytest.raises(SparkOptionError, match="has a table of format parquet"):
        table(spark, bootstrap, topic, tmp_path / "archive", format="delta")


# A million records while everything moves


class Production:
    """Writes numbered records into all partitions and knows the checksum of every prefix of each."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        # Of each partition: the running sum of its values' checksums, and how far the broker has acknowledged.
        self._sums = [np.zeros(1, np.int64) for _ in range(PARTITIONS)]
        self.acknowledged = [0] * PARTITIONS
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def write(self, client: Client, count: int) -> None:
        """``count`` more records for each partition."""
        producer = Producer(client)
        for first in range(0, count, CHUNK):
            for partition in range(PARTITIONS):
                self._send(producer, partition, min(CHUNK, count - first))
        producer.flush()
        producer.close()
        self.acknowledged = [len(each) - 1 for each in self._sums]

    def begin(self) -> None:
        def run() -> None:
            try:
                with Client(self._bootstrap) as client:
                    while not self._stop.is_set():
                        self.write(client, 500)
                        time.sleep(0.02)
            except BaseException as error:
                self._failures.append(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        assert not self._failures, self._failures

    def check(self, frame: DataFrame, at_least: list[int]) -> int:
        """Every record once, with its own value: counts, offsets and checksums of each partition are exact."""
        rows = frame.selectExpr("partition", "offset", "crc32(value) as sum").groupBy("partition")
        by_partition = {row.partition: row for row in rows.agg(*_aggregates()).collect()}
        total = 0
        for partition in range(PARTITIONS):
            row = by_partition[partition]
            count = row.records
            assert count >= at_least[partition], f"partition {partition} lacks records that were there before"
            assert (row.first, row.last) == (0, count - 1), (
                f"partition {partition} has a gap or an overlap: {row}"
            )
            assert row.offsets == count * (count - 1) // 2, f"partition {partition}: {row}"
            assert row.checksums == self._sums[partition][count], (
                f"partition {partition} has other values: {row}"
            )
            total += count
        return total

    def _send(self, producer: Producer, partition: int, count: int) -> None:
        begin = len(self._sums[partition]) - 1
        texts = [
            b"%d/%012d/%0*d" % (partition, number, 86, number * 7919)
            for number in range(begin, begin + count)
        ]
        sums = np.fromiter((zlib.crc32(each) for each in texts), np.int64, count)
        keys = pa.array([b"%d" % (number % 1000) for number in range(begin, begin + count)], pa.binary())
        # Known before it can be read.
        self._sums[partition] = np.concatenate(
            [self._sums[partition], self._sums[partition][-1] + np.cumsum(sums)]
        )
        stamps = pa.array(np.full(count, time.time_ns() // 1_000_000))
        for encoded in encode(keys, pa.array(texts, pa.binary()), None, stamps, codec=Codec.LZ4):
            producer.send(TopicPartition(self._topic, partition), encoded.batch)


def _aggregates() -> list[Any]:
    from pyspark.sql.functions import expr

    return [
        expr("count(*) as records"),
        expr("min(offset) as first"),
        expr("max(offset) as last"),
        expr("sum(offset) as offsets"),
        expr("sum(sum) as checksums"),
    ]


def test_hot_and_cold_are_exact_while_producing_archiving_and_retention_go_on(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topics.create(unique("million"), PARTITIONS)
    production = Production(bootstrap, topic)
    with Client(bootstrap) as client:
        production.write(client, RECORDS // PARTITIONS)
    production.begin()
    stop, failures = threading.Event(), []

    def go_on() -> None:
        try:
            archive(spark, bootstrap, topic, tmp_path / "archive", every_seconds=0.2, stop=stop)
        except BaseException as error:
            failures.append(error)

    try:
        first = archive(spark, bootstrap, topic, tmp_path / "archive")
        assert first.records >= RECORDS
        archiver = threading.Thread(target=go_on)
        archiver.start()
        try:
            for look in range(4):
                before = list(production.acknowledged)
                seen = production.check(table(spark, bootstrap, topic, tmp_path / "archive"), before)
                assert seen >= RECORDS
                if look == 1:
                    # Retention takes what is archived; hot begins in the middle of what the archive has.
                    state = open_table(tmp_path / "archive", "parquet").load()
                    assert state is not None
                    for at, span in state.spans.items():
                        topics.delete_records(topic, at.partition, span.end)
        finally:
            stop.set()
            archiver.join()
    finally:
        production.end()
    assert not failures, failures
    assert production.check(
        table(spark, bootstrap, topic, tmp_path / "archive"), production.acknowledged
    ) == sum(production.acknowledged)
    archive(spark, bootstrap, topic, tmp_path / "archive")
    for partition, end in enumerate(production.acknowledged):
        topics.delete_records(topic, partition, end)
    assert production.check(
        table(spark, bootstrap, topic, tmp_path / "archive"), production.acknowledged
    ) == sum(production.acknowledged)
