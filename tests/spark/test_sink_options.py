"""What the sink takes and what it says to what it does not take. No broker, no session."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.protocol.compression import Codec
from penstock.spark.errors import SparkOptionError
from penstock.spark.sink import NAMES, batch_writer, parse, stream_writer

MINIMUM = {"kafka.bootstrap.servers": "localhost:9092", "topic": "events"}
HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def complaint(options: dict[str, str]) -> str:
    with pytest.raises(SparkOptionError) as caught:
        parse(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def complaint_about(schema: StructType, **options: str) -> str:
    with pytest.raises(SparkOptionError) as caught:
        batch_writer({"bootstrap": "localhost:9092", **options}, schema, False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_least_that_can_be_said_is_where_and_what() -> None:
    options = parse(MINIMUM)

    assert (options.produce.bootstrap, options.topic) == ("localhost:9092", "events")
    assert (options.produce.acks, options.produce.codec, options.headers) == (-1, Codec.NONE, True)


def test_options_reach_the_producer_in_either_spelling() -> None:
    long = parse(
        MINIMUM
        | {
            "KAFKA.compression.type": "lz4",
            "kafka.acks": "1",
            "kafka.batch.size": "16384",
            "kafka.client.id": "etl",
            "kafka.request.timeout.ms": "5000",
            "kafka.delivery.timeout.ms": "60000",
            "includeHeaders": "False",
        }
    )
    short = parse({"bootstrap": "localhost:9092", "compression": "LZ4", "acks": "1"})

    assert long.produce.codec == short.produce.codec == Codec.LZ4
    assert long.produce.acks == short.produce.acks == 1
    assert (long.produce.batch_bytes_max, long.produce.client_id) == (16384, "etl")
    assert (long.produce.request_timeout_ms, long.produce.deadline_ms) == (5000, 60000)
    assert not long.headers


def test_what_tunes_the_java_producer_is_accepted() -> None:
    assert parse(MINIMUM | dict.fromkeys(NAMES.without_effect, "1")) == parse(MINIMUM)


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    assert complaint(MINIMUM | {"topik": "x"}) == "unknown option topik of the sink; did you mean topic?"
    assert "did you mean kafka.compression.type?" in complaint(MINIMUM | {"kafka.compresion.type": "lz4"})


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("kafka.transactional.id", "me", "at-least-once"),
        ("kafka.key.serializer", "x", "cast the column"),
        ("kafka.partitioner.class", "x", "column partition"),
        ("kafka.ssl.keystore.location", "x", "needs kafka.security.protocol SSL"),
        ("kafka.security.protocol", "SASL_PLAINTEXT", "kafka.sasl.mechanism is missing"),
        ("path", "/events", "option topic"),
        ("subscribe", "events", "option topic"),
        ("kafka.acks", "0", "all, -1, 1"),
        ("compression", "brotli", "none, gzip, snappy, lz4, zstd"),
        ("includeHeaders", "yes", "true or false"),
        ("kafka.batch.size", "many", "above 0"),
        ("kafka.delivery.timeout.ms", "0", "above 0"),
        ("kafka.request.timeout.ms", "9" * 20, "at most 2147483647"),
        ("topic", "", "give a topic"),
        ("kafka.bootstrap.servers", "localhost", "HOST:PORT"),
        ("kafka.bootstrap.servers", "", "HOST:PORT"),
        ("bootstrap", "elsewhere:9092", "differ"),
    ],
)
def test_what_cannot_be_done_is_refused_with_advice(name: str, value: str, advice: str) -> None:
    assert advice in complaint({**MINIMUM, name: value})


def test_two_spellings_that_differ_are_refused() -> None:
    assert "differ" in complaint(MINIMUM | {"compression": "lz4", "kafka.compression.type": "zstd"})


def test_all_columns_of_the_sink_are_accepted_and_others_let_through() -> None:
    full = columns(
        key=StringType(),
        value=BinaryType(),
        topic=StringType(),
        partition=IntegerType(),
        timestamp=TimestampType(),
        headers=HEADERS,
        offset=LongType(),
    )

    writer = batch_writer({"bootstrap": "localhost:9092"}, full, False)
    pickle.loads(pickle.dumps(writer))
    pickle.loads(pickle.dumps(stream_writer(MINIMUM, columns(value=StringType()), False)))


def test_a_missing_value_column_is_named_with_what_was_found() -> None:
    said = complaint_about(columns(key=StringType(), Value=StringType()), topic="events")

    assert "no column value" in said and "key, Value" in said


def test_rows_need_a_topic_from_somewhere() -> None:
    assert "option topic, or a column topic" in complaint_about(columns(value=StringType()))


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("key", LongType(), "binary or string"),
        ("value", IntegerType(), "binary or string"),
        ("topic", BinaryType(), "cast it to string"),
        ("partition", StringType(), "cast it to int"),
        ("headers", StringType(), "array<struct<key:string,value:binary>>"),
        ("headers", ArrayType(StringType()), "array<struct<key:string,value:binary>>"),
    ],
)
def test_a_column_of_a_wrong_type_is_refused(name: str, kind: DataType, wanted: str) -> None:
    schema = columns(**({"value": StringType(), "topic": StringType()} | {name: kind}))

    said = complaint_about(schema)

    assert f"column {name} is {kind.simpleString()}" in said and wanted in said


def test_a_timestamp_is_looked_at_only_if_it_is_sent() -> None:
    schema = columns(value=StringType(), timestamp=StringType())
    batch_writer(MINIMUM, schema, False)
    assert "bigint for milliseconds" in complaint_about(schema, topic="events", includeTimestamp="true")
    for kind in (LongType(), TimestampType()):
        batch_writer(
            MINIMUM | {"includeTimestamp": "true"}, columns(value=StringType(), timestamp=kind), False
        )


def test_a_partition_may_be_a_bigint() -> None:
    batch_writer(MINIMUM, columns(value=StringType(), partition=LongType()), False)


def test_a_column_that_the_option_topic_overrides_may_have_any_type() -> None:
    batch_writer(MINIMUM, columns(value=StringType(), topic=LongType()), False)


def test_a_column_that_is_there_twice_is_refused() -> None:
    twice = StructType([StructField("value", StringType()), StructField("value", BinaryType())])

    assert "there are two columns value" in complaint_about(twice, topic="events")


def test_overwriting_a_topic_is_refused_but_a_stream_may_send_its_whole_result() -> None:
    with pytest.raises(SparkOptionError, match="cannot be overwritten: use mode append"):
        batch_writer(MINIMUM, columns(value=StringType()), True)
    stream_writer(MINIMUM, columns(value=StringType()), True)
