"""``format("penstock")`` as a sink, through Spark: what librdkafka then reads, and what a user is told."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.model import TopicPartition
from penstock.wire import Client
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import Outgoing, Record
from tests.interop.murmur2 import partition_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Unique = Callable[[str], str]

QUERY_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ConfluentClient]:
    client = ConfluentClient(bootstrap)
    yield client
    client.close()


def stored(client: ConfluentClient, topic: str) -> list[Record]:
    """All that the topic holds, one partition after the other."""
    found: list[Record] = []
    for partition in client.describe_topic(topic):
        count = client.offset(topic, partition, "latest") or 0
        found += client.consume(topic, {partition: 0}, count) if count else []
    return found


def save(frame: DataFrame, bootstrap: str, **options: str) -> None:
    frame.write.format("penstock").mode("append").options(**{"bootstrap": bootstrap, **options}).save()


def last_line(error: BaseException) -> str:
    """What the user reads: Spark puts a sentence of its own in front, or a traceback around it."""
    lines: list[str] = re.findall(r"\bpenstock\.[\w.]+: (.*)$", str(error), re.MULTILINE)
    assert lines, str(error)
    return lines[-1]


def test_all_columns_of_a_frame_arrive(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=3)
    frame = spark.createDataFrame(
        [
            (
                "k1",
                bytearray(b"v1"),
                [("h", bytearray(b"1")), ("h", None)],
                topic,
                2,
                datetime(2024, 5, 1, tzinfo=UTC),
            ),
            (None, None, None, topic, 0, datetime(1970, 1, 1, 0, 0, 1, 500, tzinfo=UTC)),
            ("", bytearray(b""), [], topic, 1, datetime(2020, 1, 1, tzinfo=UTC)),
        ],
        "key STRING, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
        "partition INT, timestamp TIMESTAMP",
    )

    save(frame, bootstrap, includeTimestamp="true")

    assert stored(client, topic) == [
        Record(0, 0, 1000, None, None, ()),
        Record(1, 0, 1577836800000, b"", b"", ()),
        Record(2, 0, 1714521600000, b"k1", b"v1", (("h", b"1"), ("h", None))),
    ]


def test_keys_of_a_frame_go_where_the_java_client_puts_them(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=4)

    keys = spark.range(0, 1000, 1, 2).selectExpr("concat('key-', id) AS key", "CAST(id AS STRING) AS value")
    save(keys, bootstrap, **{"topic": topic, "kafka.compression.type": "zstd", "kafka.linger.ms": "5"})

    records = stored(client, topic)
    assert sorted(int(record.value or b"") for record in records) == list(range(1000))
    for record in records:
        assert record.key is not None
        assert record.partition == partition_of(record.key, 4)


def test_what_the_source_read_can_be_written_on_and_is_the_same(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    origin, copy = unique("origin"), unique("copy")
    client.create_topic(origin, partitions=2)
    client.create_topic(copy, partitions=2)
    sent = [
        Outgoing(
            b"%d" % number, None if number % 3 else b"k", (("n", b"%d" % number),), number % 2, 1000 + number
        )
        for number in range(100)
    ]
    client.produce(origin, sent)

    read = spark.read.format("penstock").option("bootstrap", bootstrap).option("subscribe", origin)
    frame = read.option("includeHeaders", "true").load()
    save(frame, bootstrap, topic=copy, includeTimestamp="true")

    assert stored(client, copy) == stored(client, origin)


@pytest.mark.parametrize("format", ["penstock", "kafka"])
def test_copied_records_have_the_time_of_the_copy_unless_asked_otherwise(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, format: str
) -> None:
    """Week-old records would be deleted at once by the retention of where they are copied to."""
    origin, copy = unique("origin"), unique("copy")
    client.create_topic(origin)
    client.create_topic(copy)
    client.produce(origin, [Outgoing(b"old", None, (), 0, 1000)])
    before_ms = int(time.time() * 1000)

    read = spark.read.format(format).option("kafka.bootstrap.servers", bootstrap).option("subscribe", origin)
    writer = (
        read.load().write.format(format).option("kafka.bootstrap.servers", bootstrap).option("topic", copy)
    )
    writer.mode("append").save()

    (record,) = stored(client, copy)
    assert record.timestamp >= before_ms


def test_partitions_and_times_may_be_bigints(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=2)
    frame = spark.sql("SELECT 'v' AS value, 1L AS partition, 5000L AS timestamp")

    save(frame, bootstrap, topic=topic, includeTimestamp="true")

    assert stored(client, topic) == [Record(1, 0, 5000, None, b"v", ())]


def test_headers_can_be_left_out(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)

    frame = spark.sql("SELECT 'v' AS value, array(named_struct('key', 'h', 'value', X'31')) AS headers")
    save(frame, bootstrap, topic=topic, includeHeaders="false")
    save(frame, bootstrap, topic=topic)

    assert [record.headers for record in stored(client, topic)] == [(), (("h", b"1"),)]


def test_a_user_is_told_in_one_line_what_is_wrong(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=2, configs={"max.message.bytes": "2000"})

    def complaint(query: str, **options: str) -> str:
        with pytest.raises(Exception) as caught:
            save(spark.sql(query), bootstrap, **options)
        return last_line(caught.value)

    assert "no column value" in complaint("SELECT 'a' AS key", topic=topic)
    assert "column value is int" in complaint("SELECT 1 AS value", topic=topic)
    assert "did you mean topic" in complaint("SELECT 'a' AS value", topik=topic)
    assert "null topic" in complaint("SELECT 'a' AS value, CAST(NULL AS STRING) AS topic")
    assert "which has 2 (0 to 1)" in complaint("SELECT 'a' AS value, 2 AS partition", topic=topic)
    assert "allows 2000" in complaint("SELECT repeat('a', 3000) AS value", topic=topic)
    assert "invalid topic name" in complaint("SELECT 'a' AS value", topic="no/slashes")
    assert stored(client, topic) == []


def test_a_topic_is_appended_to_and_nothing_else(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)
    writer = spark.sql("SELECT 'a' AS value").write.format("penstock").option("bootstrap", bootstrap)

    with pytest.raises(Exception, match="use mode append"):
        writer.option("topic", topic).mode("overwrite").save()
    for mode in ("ignore", "errorifexists"):
        with pytest.raises(Exception, match=r"(?i)append"):  # Spark itself says so
            writer.option("topic", topic).mode(mode).save()
    assert stored(client, topic) == []


# Streams


def test_a_stream_that_fails_and_is_started_again_loses_nothing(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, tmp_path: Path
) -> None:
    origin, target = unique("origin"), unique("target")
    client.create_topic(origin, partitions=2)
    client.create_topic(target, partitions=2)
    client.produce(origin, [Outgoing(b"%d" % number, partition=number % 2) for number in range(60)])

    def start() -> StreamingQuery:
        # Twenty records a micro-batch. In the second a row wants a partition that does not exist yet.
        source = (
            spark.readStream.format("penstock").option("bootstrap", bootstrap).option("subscribe", origin)
        )
        frame = source.options(startingOffsets="earliest", maxOffsetsPerTrigger="20").load()
        rows = frame.selectExpr(
            "value", "value AS key", "IF(value = CAST('35' AS BINARY), 2, CAST(NULL AS INT)) AS partition"
        )
        writer = rows.writeStream.format("penstock").options(bootstrap=bootstrap, topic=target)
        return writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()

    query = start()
    with pytest.raises(Exception, match=r"names partition 2 of .*, which has 2 \(0 to 1\)"):
        query.awaitTermination(QUERY_TIMEOUT_S)
    after_failure = Counter(record.value for record in stored(client, target))
    client.create_partitions(target, 3)
    query = start()
    assert query.awaitTermination(QUERY_TIMEOUT_S)

    found = Counter(record.value for record in stored(client, target))
    assert set(found) == {b"%d" % number for number in range(60)}
    # Only what the failed micro-batch had sent is there twice; a task of it may have ended after the query.
    assert {b"%d" % number for number in range(20)} <= set(after_failure)
    twice = found - Counter(set(found))
    assert set(twice) <= {b"%d" % number for number in range(20, 40)}
    assert twice >= after_failure - Counter(b"%d" % number for number in range(20))


def test_a_stream_that_counts_sends_its_whole_result_again(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, tmp_path: Path
) -> None:
    origin, target = unique("origin"), unique("target")
    client.create_topic(origin)
    client.create_topic(target)
    client.produce(origin, [Outgoing(b"a"), Outgoing(b"b"), Outgoing(b"a"), Outgoing(b"a")])

    source = spark.readStream.format("penstock").option("bootstrap", bootstrap).option("subscribe", origin)
    frame = source.options(startingOffsets="earliest", maxOffsetsPerTrigger="2").load()
    counts = frame.groupBy("value").count().selectExpr("value AS key", "CAST(count AS STRING) AS value")
    writer = (
        counts.writeStream.format("penstock")
        .queryName("counts")
        .outputMode("complete")
        .options(bootstrap=bootstrap, topic=target)
    )
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_TIMEOUT_S)

    sent = Counter((record.key, record.value) for record in stored(client, target))
    assert sent == {(b"a", b"1"): 1, (b"b", b"1"): 2, (b"a", b"3"): 1}


def test_micro_batches_use_the_producers_of_earlier_ones(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, tmp_path: Path
) -> None:
    """Brokers remember each producer id for a day: a stream must not take new ones with every micro-batch."""
    from penstock.protocol.records import decode_header

    origin, target = unique("origin"), unique("target")
    client.create_topic(origin)
    client.create_topic(target)
    client.produce(origin, [Outgoing(b"%d" % number) for number in range(5)])
    source = spark.readStream.format("penstock").option("bootstrap", bootstrap).option("subscribe", origin)
    frame = source.options(startingOffsets="earliest", maxOffsetsPerTrigger="1").load().select("value")
    writer = frame.writeStream.format("penstock").options(bootstrap=bootstrap, topic=target)
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_TIMEOUT_S)

    producers = set()
    with Client(bootstrap) as reader:
        records = reader.fetch(TopicPartition(target, 0), 0).records
        position = 0
        while position < len(records):
            header = decode_header(records, position)
            producers.add(header.producer_id)
            position += header.size
    assert len(producers) < 5
