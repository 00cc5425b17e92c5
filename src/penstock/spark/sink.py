"""``format("penstock")`` as a sink, batch and streaming: options, columns, and the writers Spark calls.

Options and columns are those of Spark's Kafka sink, and a few of ours: ``includeTimestamp``, which sends the
column ``timestamp``, and the short name ``compression``. The sink is at-least-once: a failed task, or a
micro-batch repeated after a restart, sends its records again. Nothing is lost: a task succeeds only when the
brokers have acknowledged all its records.

Spark creates writers on the driver, twice per micro-batch, and pickles them into tasks, so creating one opens
nothing. ``write`` runs in the tasks; ``commit`` and ``abort`` run on the driver and do nothing here. A
transactional sink would end its transactions there: ``write`` would return the open transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.protocol.compression import Codec
from penstock.spark.errors import SparkOptionError
from penstock.spark.option_values import INT32_MAX, OF_JAVA_CLIENTS, SECURITY, Names, OptionValues
from penstock.spark.producing import (
    BATCH_BYTES_MAX,
    CLIENT_ID,
    DELIVERY_TIMEOUT_MS,
    REQUEST_TIMEOUT_MS,
    ProduceSettings,
    Sender,
    Sent,
)

NAMES = Names(
    of="sink",
    meant=(
        "kafka.bootstrap.servers",
        "bootstrap",
        "topic",
        "includeHeaders",
        "includeTimestamp",
        "compression",
        "kafka.compression.type",
        "acks",
        "kafka.acks",
        "kafka.batch.size",
        "kafka.client.id",
        "kafka.request.timeout.ms",
        "kafka.delivery.timeout.ms",
        *SECURITY,
    ),
    # They tune the Java producer's lingering, buffering and retries. A task knows its rows, gathers a fixed
    # amount, and retries in order until kafka.delivery.timeout.ms.
    without_effect=(
        *OF_JAVA_CLIENTS,
        "checkpointLocation",  # this and the next are Spark's own options
        "queryName",
        "kafka.linger.ms",
        "kafka.buffer.memory",
        "kafka.max.block.ms",
        "kafka.max.request.size",  # the topic's max.message.bytes decides
        "kafka.max.in.flight.requests.per.connection",
        "kafka.enable.idempotence",  # always on
        "kafka.retries",
        "kafka.metadata.max.idle.ms",
        "kafka.partitioner.adaptive.partitioning.enable",
        "kafka.partitioner.availability.timeout.ms",
        "kafka.compression.gzip.level",
        "kafka.compression.lz4.level",
        "kafka.compression.zstd.level",
    ),
    refused={
        "kafka.transactional.id": "this sink is at-least-once and does not write in transactions yet",
        "kafka.transaction.timeout.ms": "this sink is at-least-once and does not write in transactions yet",
        "kafka.key.serializer": "keys are sent unchanged; cast the column to string or binary",
        "kafka.value.serializer": "values are sent unchanged; cast the column to string or binary",
        "kafka.partitioner.class": "Java classes cannot run here; compute a column partition instead",
        "kafka.partitioner.ignore.keys": "omit the column key, or compute a column partition",
        "kafka.interceptor.classes": "Java classes cannot run here",
        "path": "name the topic with the option topic or a column topic, and save() without a path",
        "subscribe": "it is for reading; choose where to write with the option topic or a column topic",
    },
)

Value = TypeVar("Value")

_CODECS = {codec.name.lower(): codec for codec in Codec}
# Not 0: without acknowledgements a task cannot know that it has succeeded.
_ACKS = {"all": -1, "-1": -1, "1": 1}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    produce: ProduceSettings
    topic: str | None = None
    headers: bool = True
    # Off by default, as in Spark's Kafka sink: records copied from another topic would keep their old timestamps,
    # and retention would delete them at once.
    timestamps: bool = False

    @property
    def unsent(self) -> list[str]:
        """Columns that the options exclude from being sent."""
        return [
            name
            for name, is_sent in (("headers", self.headers), ("timestamp", self.timestamps))
            if not is_sent
        ]


class Written(WriterCommitMessage):
    """What one task sent."""

    def __init__(self, sent: Sent) -> None:
        self.sent = sent


class BatchWriter(DataSourceArrowWriter):
    """``df.write.format("penstock")``."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream.format("penstock")``."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """Raises SparkOptionError for the first error."""
    if overwrite:
        raise SparkOptionError("a topic cannot be overwritten: use mode append, or delete the topic first")
    parsed = parse(options)
    check_columns(schema, parsed)
    return BatchWriter(parsed)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """Raises SparkOptionError for the first error.

    ``overwrite`` means output mode complete: every micro-batch sends the whole result again, as with Spark's Kafka
    sink.
    """
    parsed = parse(options)
    check_columns(schema, parsed)
    return StreamWriter(parsed)


def _write(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    with Sender(options.produce, options.topic) as sender:
        for batch in batches:
            sender.send(batch.drop_columns([name for name in options.unsent if name in batch.schema.names]))
        return Written(sender.finish())


# Options


def parse(options: Mapping[str, str]) -> SinkOptions:
    """Raises SparkOptionError for the first error."""
    values = OptionValues(options, NAMES)
    topic = values.get("topic")
    if topic == "":
        raise SparkOptionError("option topic is empty; give a topic, or omit it and add a column topic")
    produce = ProduceSettings(
        bootstrap=values.bootstrap(),
        security=values.security(),
        acks=_choice(values, ("kafka.acks", "acks"), _ACKS, -1),
        codec=_choice(values, ("kafka.compression.type", "compression"), _CODECS, Codec.NONE),
        batch_bytes_max=min(
            values.positive("kafka.batch.size", INT32_MAX) or BATCH_BYTES_MAX, BATCH_BYTES_MAX
        ),
        client_id=values.client_id(CLIENT_ID),
        request_timeout_ms=values.positive("kafka.request.timeout.ms", INT32_MAX) or REQUEST_TIMEOUT_MS,
        deadline_ms=values.positive("kafka.delivery.timeout.ms", INT32_MAX) or DELIVERY_TIMEOUT_MS,
    )
    return SinkOptions(
        produce, topic, values.flag("includeHeaders", True), values.flag("includeTimestamp", False)
    )


def _choice(
    values: OptionValues, names: tuple[str, str], choices: Mapping[str, Value], default: Value
) -> Value:
    said = {name: values[name] for name in names if name in values}
    for name, text in said.items():
        if text.lower() not in choices:
            raise SparkOptionError(f"{name} must be one of {', '.join(choices)}, not {text!r}")
    if len({text.lower() for text in said.values()}) > 1:
        raise SparkOptionError(f"{names[0]} and {names[1]} differ; give one of them")
    return choices[next(iter(said.values())).lower()] if said else default


# Columns


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Check the columns to send. Others, such as ``offset``, are ignored, as in Spark's Kafka sink."""
    fields = {field.name: field.dataType for field in schema.fields}
    if len(fields) < len(schema.fields):
        twice = next(name for name in fields if schema.fieldNames().count(name) > 1)
        raise SparkOptionError(f"there are two columns {twice}; select it once")
    if "value" not in fields:
        raise SparkOptionError(
            f"there is no column value, which is what is sent; found {', '.join(fields) or 'no columns'}. "
            'Name one with .selectExpr("... AS value")'
        )
    if options.topic is None and "topic" not in fields:
        raise SparkOptionError("no topic to write to: give the option topic, or a column topic")
    for name in ("key", "value"):
        _check_type(fields, name, (BinaryType, StringType), "binary or string")
    if options.topic is None:
        _check_type(fields, "topic", (StringType,), "string")
    _check_type(fields, "partition", (IntegerType, LongType, ShortType, ByteType), "int")
    if options.timestamps:
        _check_type(fields, "timestamp", (TimestampType, LongType), "timestamp, or bigint for milliseconds")
    if options.headers and "headers" in fields and not _are_headers(fields["headers"]):
        found = fields["headers"].simpleString()
        raise SparkOptionError(
            f"column headers is {found}; cast it to array<struct<key:string,value:binary>>"
        )


def _check_type(
    fields: Mapping[str, DataType], name: str, allowed: tuple[type[DataType], ...], words: str
) -> None:
    if name in fields and not isinstance(fields[name], allowed):
        raise SparkOptionError(f"column {name} is {fields[name].simpleString()}; cast it to {words}")


def _are_headers(found: DataType) -> bool:
    if not isinstance(found, ArrayType) or not isinstance(found.elementType, StructType):
        return False
    entry = found.elementType
    return (
        entry.fieldNames() == ["key", "value"]
        and isinstance(entry["key"].dataType, StringType)
        and isinstance(entry["value"].dataType, BinaryType)
    )
