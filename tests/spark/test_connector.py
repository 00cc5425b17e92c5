"""Spark's own Kafka connector against our brokers: what runs on Kafka with it runs on Penstock unchanged.

Source and sink, batch and streaming. What it wrote is read back by librdkafka and the other way round, so that
neither side judges itself. The last test holds ``format("penstock")`` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import Outgoing
from tests.spark.jars import connector_jars
from tests.tools import Missing, skip_or_fail

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Unique = Callable[[str], str]

PARTITIONS = 3
TIMESTAMP_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
QUERY_TIMEOUT_S = 120


@pytest.fixture(scope="module", autouse=True)
def connector() -> None:
    try:
        connector_jars()
    except Missing as missing:
        skip_or_fail(missing)


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ConfluentClient]:
    client = ConfluentClient(bootstrap)
    yield client
    client.close()


def events(first: int, count: int) -> list[Outgoing]:
    """One second apart; every fifth without a key, every seventh without a value, headers on every third."""
    return [
        Outgoing(
            key=None if number % 5 == 0 else b"key-%d" % (number % 11),
            value=None if number % 7 == 0 else b"value-%d" % number,
            partition=number % PARTITIONS,
            timestamp=TIMESTAMP_MS + number * 1000,
            headers=(("number", b"%d" % number), ("empty", None)) if number % 3 == 0 else (),
        )
        for number in range(first, first + count)
    ]


def read(spark: SparkSession, bootstrap: str, topic: str, form: str = "kafka", **options: str) -> DataFrame:
    reader = spark.read.format(form).option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
    return reader.options(**options).load()


def numbers(frame: DataFrame) -> list[int]:
    """Which events are there, by their timestamps."""
    seconds = frame.selectExpr("unix_millis(timestamp) as ms").collect()
    return sorted((row.ms - TIMESTAMP_MS) // 1000 for row in seconds)


def test_the_connector_reads_what_librdkafka_wrote(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=PARTITIONS)
    sent = events(0, 50)
    for number, codec in enumerate(CODECS):
        client.produce(topic, sent[number * 10 : number * 10 + 10], codec=codec)

    rows = read(spark, bootstrap, topic, includeHeaders="true").collect()

    assert [row.asDict()["topic"] for row in rows] == [topic] * len(sent)
    for partition in range(PARTITIONS):
        mine = sorted((row for row in rows if row.partition == partition), key=lambda row: row.offset)
        expected = [record for record in sent if record.partition == partition]
        assert [row.offset for row in mine] == list(range(len(expected)))
        for row, record in zip(mine, expected, strict=True):
            assert (row.key, row.value) == (record.key, record.value)
            assert round(row.timestamp.timestamp() * 1000) == record.timestamp
            assert row.timestampType == 0
            headers = None if row.headers is None else [(each.key, each.value) for each in row.headers]
            assert headers == (list(record.headers) or None)


def test_the_connector_reads_from_offsets_and_times_to_offsets_and_times(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=PARTITIONS)
    client.produce(topic, events(0, 30))

    by_offset = read(
        spark,
        bootstrap,
        topic,
        startingOffsets=json.dumps({topic: {"0": 3, "1": -2, "2": 9}}),
        endingOffsets=json.dumps({topic: {"0": 5, "1": 2, "2": -1}}),
    )
    by_time = read(
        spark,
        bootstrap,
        topic,
        startingTimestamp=str(TIMESTAMP_MS + 10_000),
        endingTimestamp=str(TIMESTAMP_MS + 20_000),
    )

    assert numbers(by_offset) == sorted([9, 12, 1, 4, 29])
    assert numbers(by_time) == list(range(10, 20))


def test_librdkafka_reads_what_the_connector_wrote(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=PARTITIONS)
    frame = spark.range(40, numPartitions=2).selectExpr(
        "if(id % 4 = 0, null, cast(concat('key-', id % 9) as binary)) as key",
        "if(id % 10 = 0, null, cast(concat('value-', id) as binary)) as value",
        "if(id % 2 = 0, array(struct('id' as key, cast(cast(id as string) as binary) as value)), null) as headers",
        "cast(id % 3 as int) as partition",
    )

    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", bootstrap)
    writer.option("topic", topic).option("includeHeaders", "true").option(
        "kafka.compression.type", "lz4"
    ).save()

    got = client.consume(topic, dict.fromkeys(range(PARTITIONS), 0), 40)
    seen = sorted(
        (each.partition, each.key, each.value, tuple(each.headers)) for each in got if each.value and each.key
    )
    expected = sorted(
        (
            number % 3,
            b"key-%d" % (number % 9),
            b"value-%d" % number,
            (("id", b"%d" % number),) if number % 2 == 0 else (),
        )
        for number in range(40)
        if number % 4 and number % 10
    )
    assert seen == expected
    assert sum(each.key is None for each in got) == 10
    assert sum(each.value is None for each in got) == 4


def test_a_stream_of_the_connector_copies_a_topic_and_resumes(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, tmp_path: Path
) -> None:
    source, target = unique("source"), unique("target")
    client.create_topic(source, partitions=PARTITIONS)
    client.create_topic(target, partitions=1)
    stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", bootstrap)
    stream = stream.option("subscribe", source).option("startingOffsets", "earliest")
    copied = stream.option("maxOffsetsPerTrigger", "40").load().selectExpr("key", "value")

    batches = []
    for first in (0, 100):
        client.produce(source, events(first, 100), codec="zstd")
        writer = copied.writeStream.format("kafka").option("kafka.bootstrap.servers", bootstrap)
        writer = writer.option("topic", target).option("checkpointLocation", str(tmp_path))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_TIMEOUT_S), "the stream did not end"
        batches.append([progress.numInputRows for progress in query.recentProgress if progress.numInputRows])

    got = client.consume(target, {0: 0}, 200)
    wanted = [(record.key, record.value) for record in events(0, 200)]
    assert sorted(map(repr, ((each.key, each.value) for each in got))) == sorted(map(repr, wanted))
    assert client.offset(target, 0, "latest") == 200
    for sizes in batches:
        assert sum(sizes) == 100 and len(sizes) >= 3, sizes


def test_the_penstock_format_gives_the_rows_of_the_connector(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=PARTITIONS)
    client.produce(topic, events(0, 60), codec="snappy")

    theirs = read(spark, bootstrap, topic, includeHeaders="true")
    ours = read(spark, bootstrap, topic, form="penstock", includeHeaders="true")

    assert [(each.name, each.dataType) for each in ours.schema] == [
        (each.name, each.dataType) for each in theirs.schema
    ]
    assert ours.count() == 60
    assert sorted(map(repr, ours.collect())) == sorted(map(repr, theirs.collect()))


def test_a_pattern_is_looked_for_anywhere_in_a_name_by_both(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("pattern")
    client.create_topic(topic, partitions=PARTITIONS)
    client.produce(topic, events(0, 3))
    part = topic[3:-2]
    counts = {}
    for form in ("kafka", "penstock"):
        reader = spark.read.format(form).option("kafka.bootstrap.servers", bootstrap)
        counts[form] = [
            reader.option("subscribePattern", pattern).load().count() for pattern in (part, f"^{part}", topic)
        ]
    assert counts["penstock"] == counts["kafka"] == [3, 0, 3]
