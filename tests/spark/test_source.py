"""``format("penstock")`` as a batch source, in a real Spark session against a real broker."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from penstock.spark import reading, source
from penstock.spark.errors import DataLossError
from penstock.spark.options import parse
from penstock.spark.source import PenstockReader, PenstockStreamReader
from penstock.wire import PartitionInfo, TimedOut, TopicInfo, operations
from tests.spark.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[..., "DataFrame"]


@pytest.fixture
def read(spark: SparkSession, bootstrap: str) -> Read:
    def load(**options: str) -> DataFrame:
        reader = spark.read.format("penstock").options(**{"kafka.bootstrap.servers": bootstrap, **options})
        return reader.load()

    return load


def last_line(caught: pytest.ExceptionInfo[PySparkException]) -> str:
    """What a person reads: the end of the Python error inside Spark's."""
    lines = [line for line in str(caught.value).splitlines() if "penstock." in line and "Error: " in line]
    assert lines, str(caught.value)
    return lines[-1].split("Error: ", 1)[1]


def test_columns_and_values_are_those_of_sparks_kafka_source(
    read: Read, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 2)
    when = datetime.datetime(2024, 5, 6, 7, 8, 9, 123_000, tzinfo=datetime.UTC)
    when_ms = int(when.timestamp() * 1000)
    topics.send(topic, [b"one", None, b""], keys=[b"k", None, b""], timestamp_ms=when_ms)
    topics.send(topic, [b"h"], partition=1, headers=[("a", b"1"), ("a", None)], timestamp_ms=when_ms)
    plain = read(subscribe=topic)
    assert plain.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    rows = [tuple(row) for row in plain.orderBy("partition", "offset").collect()]
    local = when.astimezone().replace(tzinfo=None)
    assert rows == [
        (b"k", b"one", topic, 0, 0, local, 0),
        (None, None, topic, 0, 1, local, 0),
        (b"", b"", topic, 0, 2, local, 0),
        (None, b"h", topic, 1, 0, local, 0),
    ]
    headed = read(subscribe=topic, includeHeaders="true")
    assert headed.dtypes[-1] == ("headers", "array<struct<key:string,value:binary>>")
    found = headed.where("partition = 1").select("headers").collect()[0][0]
    assert [tuple(header) for header in found] == [("a", b"1"), ("a", None)]
    assert headed.where("offset = 0 and partition = 0").collect()[0].headers is None


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_record_arrives_once_however_the_work_is_cut(
    read: Read, topics: Topics, unique: Callable[[str], str], codec: str
) -> None:
    topic = topics.create(unique("t"), 3)
    for partition in range(3):
        values = [b"%d-%d" % (partition, number) for number in range(700)]
        topics.send(topic, values, partition=partition, settings={"compression.type": codec})
    table = read(subscribe=topic, minPartitions="7", **{"kafka.max.partition.fetch.bytes": "4096"})
    whole = f.concat_ws("-", "partition", "offset") == f.col("value").cast("string")
    seen = table.agg(
        f.count("*"), f.countDistinct("partition", "offset"), f.sum(f.when(whole, 1).otherwise(0))
    )
    assert table.rdd.getNumPartitions() == 7
    assert tuple(seen.collect()[0]) == (2100, 2100, 2100)


def test_an_empty_topic_and_a_pattern_that_fits_nothing_are_empty_tables(
    read: Read, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"))
    assert read(subscribe=topic).count() == 0
    assert read(subscribePattern=f"{topic}-nothing").count() == 0


def test_a_topic_is_a_table_in_sql(
    spark: SparkSession, topics: Topics, unique: Callable[[str], str], bootstrap: str
) -> None:
    topic = topics.create(unique("t"))
    topics.send(topic, [b"a", b"b"])
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW a_topic USING penstock "
        f"OPTIONS ('kafka.bootstrap.servers' '{bootstrap}', subscribe '{topic}')"
    )
    found = spark.sql("SELECT CAST(value AS STRING) FROM a_topic ORDER BY offset").collect()
    assert [row[0] for row in found] == ["a", "b"]


def test_a_wrong_option_is_told_by_load(read: Read) -> None:
    with pytest.raises(PySparkException) as caught:
        read(subscribe="t", startingOfsets="earliest")
    assert last_line(caught) == "unknown option startingofsets of the source; did you mean startingOffsets?"
    # Spark's own sentence around it, and no traceback.
    assert len(str(caught.value)) < 400
    assert "Traceback" not in str(caught.value)


def test_an_unknown_topic_is_named(read: Read, bootstrap: str) -> None:
    with pytest.raises(PySparkException) as caught:
        read(subscribe="no-such-topic").count()
    assert last_line(caught) == (
        f"topic no-such-topic does not exist at {bootstrap}; create it or correct the name"
    )


def test_brokers_that_cannot_be_reached_are_named(read: Read) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        options: dict[str, Any] = {
            "kafka.bootstrap.servers": address,
            "kafka.default.api.timeout.ms": "1500",
            "subscribe": "t",
        }
        with pytest.raises(PySparkException) as caught:
            read(**options).count()
    assert address in str(caught.value)
    assert "Unreachable" in str(caught.value)


def test_columns_of_another_shape_are_refused(spark: SparkSession, bootstrap: str) -> None:
    reader = spark.read.format("penstock").options(**{"kafka.bootstrap.servers": bootstrap, "subscribe": "t"})
    with pytest.raises(PySparkException) as caught:
        reader.schema("value string").load().count()
    assert "omit .schema(...)" in last_line(caught)


def test_tasks_read_the_topic_that_was_planned_and_no_other_of_its_name(
    topics: Topics, unique: Callable[[str], str], bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "UNKNOWN_TOPIC_MS", 200)
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"old"] * 3)
    options = {"bootstrap": bootstrap, "subscribe": topic}
    batch = PenstockReader(parse(options, "batch"))
    stream = PenstockStreamReader(parse(options, "stream"))
    planned: list[tuple[PenstockReader | PenstockStreamReader, Any]] = [
        (batch, batch.partitions()),
        (stream, stream.partitions({topic: {"0": 0}}, {topic: {"0": 3}})),
    ]
    topics.delete(topic)
    topics.create(topic, 1)
    topics.send(topic, [b"new"] * 3)
    for reader, partitions in planned:
        for each in partitions:
            with pytest.raises(
                DataLossError, match=f"{topic}-0 is gone: its topic was deleted and recreated"
            ):
                list(reader.read(each))


def test_a_coordinator_that_is_away_does_not_hold_up_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    committed: list[Any] = []

    class Away:
        def topics(self, names: Any) -> Any:
            return {name: TopicInfo(name, bytes(16), {0: PartitionInfo(1, 0)}, False) for name in names}

        def commit(self, group: str, offsets: Any) -> None:
            committed.append(offsets)
            raise TimedOut("no answer")

    monkeypatch.setattr(reading, "shared", lambda *_, **__: Away())
    options = parse({"bootstrap": "127.0.0.1:1", "subscribe": "t", "groupId": "g"}, "stream")
    stream = PenstockStreamReader(options)
    for offset in range(3):
        stream.commit({"t": {"0": offset}})
    assert len(committed) == 1
    monkeypatch.setattr(source, "MIRROR_PAUSE_S", 0.0)
    stream._mirror_not_before = 0.0
    stream.commit({"t": {"0": 3}})
    stream.commit({"t": {"0": 4}})
    assert len(committed) == 3
