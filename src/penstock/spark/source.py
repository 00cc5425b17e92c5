"""``format("penstock")``: topics as Spark tables and streams, on Spark's Python Data Source API.

Spark creates these objects several times, pickles them, and runs them in separate processes: planning in one on the
driver (for a stream it lives as long as the query), each task in a worker. So constructors only parse, and
connections come from ``ReadSettings.client``, one per process.

Two surprises. A micro-batch is *done* only when Spark calls ``latestOffset`` with its end; ``commit`` comes
later, and never after the last batch of an AvailableNow trigger. So ``latestOffset`` mirrors progress into
``groupId``. And Spark stores only the ends of micro-batches: to repeat the first one after a crash it asks again
where the stream begins. If that may have moved, the first micro-batch is empty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.spark.errors import SparkOptionError
from penstock.spark.options import SourceOptions, check, parse
from penstock.spark.planning import Available, Planner
from penstock.spark.ranges import OffsetRange, StreamOffset, from_json, to_json
from penstock.spark.reading import read
from penstock.wire import BrokerRefused, WireError

_log = logging.getLogger("penstock.spark")

# An unreachable coordinator must not delay the stream.
MIRROR_DEADLINE_MS = 5_000
MIRROR_PAUSE_S = 30.0

COLUMNS = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)
HEADERS = StructField(
    "headers",
    ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
)


class PenstockDataSource(DataSource):
    """The data source that ``register`` registers with Spark."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        """Called by ``load()``, which should report a wrong option. Writes never call it."""
        return _columns(check(self.options).read.headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse(self.options, "batch")
        _check_schema(schema, _columns(options.read.headers))
        return PenstockReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse(self.options, "stream")
        _check_schema(schema, _columns(options.read.headers))
        return PenstockStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink import batch_writer  # noqa: PLC0415  readers need no producer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from penstock.spark.sink import stream_writer  # noqa: PLC0415

        return stream_writer(self.options, schema, overwrite)


class RangePartition(InputPartition):
    """A task's range and its topic's id: the name may belong to another topic when the task begins."""

    def __init__(self, offset_range: OffsetRange, topic_id: bytes) -> None:
        super().__init__((*offset_range, topic_id))

    @property
    def offset_range(self) -> OffsetRange:
        return OffsetRange(*self.value[:-1])

    @property
    def topic_id(self) -> bytes:
        topic_id: bytes = self.value[-1]
        return topic_id


class PenstockReader(DataSourceReader):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        planner = Planner(self._options, self._options.read.client())
        return [RangePartition(each, planner.topic_ids[each.topic]) for each in planner.batch_ranges()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


class PenstockStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """On the driver it plans for as long as the query runs; in a task only ``read`` is called."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planning: Planner | None = None
        # Where a new stream begins if that position moves, until its first micro-batch is planned.
        self._beginning: dict[str, Any] | None = None
        # The end of an AvailableNow run, fixed at its start.
        self._until: StreamOffset | None = None
        # From the last query of the brokers.
        self._available: Available | None = None
        self._batch_planned_at = time.monotonic()
        # What was last committed to the group.
        self._mirrored: StreamOffset | None = None
        self._mirror_not_before = 0.0

    # Planning, on the driver

    def initialOffset(self) -> dict[str, Any]:
        planner = self._planner()
        starts = planner.resolve(self._options.starting, planner.partitions())
        beginning = to_json(starts, planner.topic_ids)
        if self._options.starting.moves:
            self._beginning = beginning
        return beginning

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark passes on only one limit; ``latestOffset`` applies all limits of the options."""
        options = self._options
        if options.offsets_max is not None:
            return ReadMaxRows(options.offsets_max)
        if options.bytes_max is not None:
            return ReadMaxBytes(options.bytes_max)
        if options.offsets_min is not None:
            return ReadMinRows(options.offsets_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        # Spark also calls this before it repeats an unfinished batch: an error here would make that fail forever.
        self._until = self._planner().reach()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        stands_at = from_json(start)
        self._mirror(stands_at)
        if self._is_beginning(start):
            return start
        planner = self._planner()
        self._available = available = planner.available(stands_at, until=self._until)
        if isinstance(limit, ReadAllAvailable):
            return to_json(available.ends, available.topic_ids)
        if self._is_too_little(available):
            named = planner.named(stands_at)
            # The same text if nothing is new: Spark takes another text for a new offset and starts a batch.
            return start if named == stands_at else to_json(named.offsets, named.topic_ids)
        self._batch_planned_at = time.monotonic()
        return to_json(planner.limited(available), available.topic_ids)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        known = self._available
        return None if known is None else to_json(known.ends, known.topic_ids)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if self._is_beginning(start):
            return []  # the first batch again: it ends where the stream began then
        log_starts = None if self._available is None else self._available.log_starts
        planner, ends_at = self._planner(), from_json(end)
        ranges = planner.ranges(from_json(start), ends_at, log_starts)
        # Planned for the topics as they were then. They may have been recreated since.
        topic_ids = planner.topic_ids | ends_at.topic_ids
        return [RangePartition(each, topic_ids[each.topic]) for each in ranges]

    def commit(self, end: dict[str, Any]) -> None:
        self._mirror(from_json(end))

    # Reading, in a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    # Private

    def _planner(self) -> Planner:
        if self._planning is None:
            self._planning = Planner(self._options, self._options.read.client())
        return self._planning

    def _is_beginning(self, start: dict[str, Any]) -> bool:
        """Whether the very first micro-batch is being planned. True only once."""
        is_first, self._beginning = start == self._beginning, None
        return is_first

    def _is_too_little(self, available: Available) -> bool:
        """Whether minOffsetsPerTrigger skips this trigger. AvailableNow reads everything in any case."""
        smallest = self._options.offsets_min
        if smallest is None or self._until is not None:
            return False
        waited_ms = (time.monotonic() - self._batch_planned_at) * 1000
        return sum(available.backlog.values()) < smallest and waited_ms < self._options.trigger_delay_ms_max

    def _mirror(self, done: StreamOffset) -> None:
        group = self._options.group
        if group is None or done == self._mirrored or time.monotonic() < self._mirror_not_before:
            return
        told = self._mirrored or StreamOffset({})
        changed = {topic for topic, each in done.topic_ids.items() if told.topic_ids.get(topic) != each}
        unmoved = {at for at, offset in told.without(changed).items() if done.offsets.get(at) == offset}
        # No offsets are committed for a topic that is gone or was recreated.
        there = self._planner().present(done)
        moved = {at: offset for at, offset in there.items() if at not in unmoved}
        try:
            replace(self._options.read, deadline_ms=MIRROR_DEADLINE_MS).client().commit(group, moved)
        except WireError as error:
            if self._mirrored is None and isinstance(error, BrokerRefused):
                raise SparkOptionError(
                    f"cannot commit this stream's progress to groupId {group}: {error}"
                ) from None
            # Lag tools see an old position for a while, which must not stop the stream or slow it down.
            self._mirror_not_before = time.monotonic() + MIRROR_PAUSE_S
            _log.warning("progress was not mirrored into group %s: %s", group, error)
            return
        self._mirrored = StreamOffset(there, done.topic_ids)


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, RangePartition):
        return iter(())  # Spark's placeholder for a plan without partitions
    return read(options.read, partition.offset_range, partition.topic_id)


def _columns(headers: bool) -> StructType:
    return StructType([*COLUMNS.fields, HEADERS]) if headers else COLUMNS


def _check_schema(schema: StructType, ours: StructType) -> None:
    if [(each.name, each.dataType) for each in schema] != [(each.name, each.dataType) for each in ours]:
        raise SparkOptionError(
            f"the columns of a topic are {', '.join(ours.names)}; omit .schema(...) and cast the columns"
        )
