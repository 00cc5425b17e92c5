"""A topic and its archive as one DataFrame: ``penstock.spark.jobs.table``.

    orders = table(spark, "localhost:9092", "orders", "/data/archive")
    table(spark, "localhost:9092", "orders", "/data/archive", view="orders")     # and for SQL

Archived records come from the files, through Spark's Parquet reader; newer ones come from the brokers, through
``format("penstock")``. The seam is the offset up to which each partition is archived, in one commit of the
archive: files of that commit before it, the brokers from there on. So no record is missing or repeated, without
any comparison of records. The DataFrame is fixed when it is made, including its newest record. To see newer
records, call again; a view of the same name is replaced.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.model import TopicPartition
from penstock.spark import register
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import values
from penstock.spark.jobs.tables import format_at, open_table, resolve, spark_path
from penstock.spark.jobs.tables.state import DataFile, State, directory_of
from penstock.spark.jobs.tables.writing import DAY_MAX, DAY_MIN, DAY_US, file_schema
from penstock.spark.jobs.topics import find_topics
from penstock.spark.option_values import parse_security
from penstock.spark.ranges import OffsetRange, to_json
from penstock.spark.reading import ReadSettings
from penstock.wire import EARLIEST, LATEST, Client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from penstock.spark.jobs.tables import ArchiveTable

CLIENT_ID: Final = "penstock-table"
# How long the driver looks for brokers while a user waits.
DRIVER_DEADLINE_MS: Final = 30_000
# Attempts to read the archive and the log in a race with retention.
LOOKS_MAX: Final = 10

_log = logging.getLogger("penstock.spark")


def table(
    spark: SparkSession,
    bootstrap: str,
    topic: str,
    location: str | Path,
    *,
    format: str | None = None,
    catalog: str | None = None,
    view: str | None = None,
    fail_on_data_loss: bool = True,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """All records of a topic, archived or not, as of now.

    Args:
        location: directory of the archive; it must have the topic.
        format: of the archive; detected unless the table is in an Iceberg catalog.
        catalog: the archive's catalog.
        view: also create or replace a temporary view of this name.
        fail_on_data_loss: fail if retention has deleted records that are not archived, or if the topic is gone;
            otherwise leave out what is missing.
        options: how to connect, as the source takes it: ``{"kafka.security.protocol": "SSL", ...}``.

    The columns are those of ``format("penstock")`` with the archive's headers, then the parsed columns, then
    ``date``
    if the archive is partitioned by it. Earlier topics of the same name are left out.

    Raises:
        SparkOptionError: there is no such archive, or the topic is not in it.
        DataLossError: see ``fail_on_data_loss``.
    """
    settings = ReadSettings(
        bootstrap,
        read_committed=True,
        fail_on_data_loss=fail_on_data_loss,
        client_id=CLIENT_ID,
        security=parse_security(options),
    )
    where = resolve(str(location))
    held = format or ("iceberg" if catalog is not None else format_at(where))
    if held is None:
        raise SparkOptionError(f"there is no archive at {where}; create it with the job archive")
    client = replace(settings, deadline_ms=DRIVER_DEADLINE_MS).client()
    archive = open_table(where, held, catalog=catalog)
    seam = find_seam(client, topic, archive, fail_on_data_loss)
    frame = _cold(spark, archive.root, seam)
    if seam.hot:
        frame = frame.union(_hot(spark, settings, seam, options or {}).select(*frame.columns))
    if view is not None:
        frame.createOrReplaceTempView(view)
    return frame


@dataclass(frozen=True, slots=True)
class Seam:
    """One topic between its archive and its brokers, at one moment."""

    topic: str
    state: State
    files: tuple[DataFile, ...]
    # Read from the brokers: from the archive's end to the log's end. Never empty ranges.
    hot: tuple[OffsetRange, ...]
    # The topic's id. The topic may be recreated before the DataFrame is read.
    topic_id: bytes


def find_seam(client: Client, topic: str, archive: ArchiveTable, fail_on_data_loss: bool) -> Seam:
    """Read the archive first and the log after it: records that retention deletes in between are archived in a
    newer commit, so the archive is read again.
    """
    for _ in range(LOOKS_MAX):
        state = archive.load()
        if state is None:
            raise SparkOptionError(f"there is no {archive.format} archive at {archive.location}")
        found = find_topics(client, [topic]).get(topic)
        lives = state.lives(topic)
        if not lives:
            held = ", ".join(sorted({at.topic for at in state.spans})) or "no topic yet"
            raise SparkOptionError(f"the archive at {archive.location} has {held}, but not {topic}")
        if found is None:
            if fail_on_data_loss:
                raise DataLossError(
                    f"topic {topic} is deleted; to read only its archive set fail_on_data_loss to false"
                )
            return _seam(topic, state, lives[-1], ())
        topic_id = found.topic_id.hex()
        spans = state.partitions_of(topic, topic_id)
        places = [TopicPartition(topic, number) for number in sorted(found.partitions)]
        starts = client.list_offsets(dict.fromkeys(places, EARLIEST), read_committed=True)
        ends = client.list_offsets(dict.fromkeys(places, LATEST), read_committed=True)
        hot, lost = [], []
        for at in places:
            start, end = starts[at].offset, ends[at].offset
            archived = spans[at.partition].end if at.partition in spans else start
            if start > archived:
                lost.append(OffsetRange(*at, archived, start))
            if end > max(start, archived):
                hot.append(OffsetRange(*at, max(start, archived), end))
        if not lost:
            return _seam(topic, state, topic_id, tuple(hot))
        newest = archive.load()
        if newest is not None and newest.batch != state.batch:
            continue
        what = f"records {lost[0]} were deleted by retention before they were archived"
        if fail_on_data_loss:
            raise DataLossError(f"{what}. To read on without them set fail_on_data_loss to false.")
        _log.warning("%s. Reading on without them, as fail_on_data_loss is false.", what)
        return _seam(topic, state, topic_id, tuple(hot))
    raise DataLossError(f"retention deletes {topic} faster than it is archived; try again later")


def _seam(topic: str, state: State, topic_id: str, hot: tuple[OffsetRange, ...]) -> Seam:
    if state.foreign and len(state.lives(topic)) > 1:
        raise SparkOptionError(
            f"topic {topic} was deleted and recreated, and another program has merged files of both, which cannot "
            "be distinguished; read the table directly"
        )
    return Seam(topic, state, tuple(state.files_of(topic, topic_id)), hot, bytes.fromhex(topic_id))


def columns_of(state: State) -> StructType:
    """The columns of the table, then ``date`` if it is partitioned by it."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415  the driver's half
    from pyspark.sql.types import DateType, StructField, StructType  # noqa: PLC0415

    parsed = _parsed(state)
    arrow = file_schema(state.shape.headers, None if parsed is None else values.arrow_schema(parsed))
    columns = from_arrow_schema(arrow, prefer_timestamp_ntz=True)
    return StructType([*columns, StructField("date", DateType())]) if state.shape.by_date else columns


def _parsed(state: State) -> StructType | None:
    from pyspark.sql.types import StructType  # noqa: PLC0415  the driver's half

    return (
        None
        if state.shape.value_schema is None
        else StructType.fromJson(json.loads(state.shape.value_schema))
    )


def _cold(spark: SparkSession, root: Path, seam: Seam) -> DataFrame:
    columns = columns_of(seam.state)
    reader = spark.read.schema(columns)
    frame = None
    if seam.files:
        # Below the topic's directory, directories are columns. The column `topic` is also in the files.
        base = root / directory_of(seam.topic, None)
        paths = [spark_path(root / each.path) for each in seam.files]
        frame = reader.option("basePath", f"file:{base}").parquet(*paths)
    if seam.state.foreign:
        paths = [spark_path(root / each) for each in seam.state.foreign]
        rest = reader.option("basePath", f"file:{root}").parquet(*paths)
        rest = rest.where(rest.topic == seam.topic)
        frame = rest if frame is None else frame.union(rest.select(*frame.columns))
    if frame is None:
        frame = spark.createDataFrame([], columns)
    return frame.select(*columns.names)


def _hot(spark: SparkSession, settings: ReadSettings, seam: Seam, security: Mapping[str, str]) -> DataFrame:
    from pyspark.sql.functions import expr  # noqa: PLC0415  the driver's half

    starts = {each.topic_partition: each.start for each in seam.hot}
    ends = {each.topic_partition: each.end for each in seam.hot}
    ids = {seam.topic: seam.topic_id}
    frame = (
        register(spark)
        .read.format("penstock")
        .options(**security)
        .option("kafka.bootstrap.servers", settings.bootstrap)
        .option("assign", json.dumps({seam.topic: [each.partition for each in seam.hot]}))
        .option("startingOffsets", json.dumps(to_json(starts, ids)))
        .option("endingOffsets", json.dumps(to_json(ends, ids)))
        .option("includeHeaders", str(seam.state.shape.headers).lower())
        .option("kafka.isolation.level", "read_committed")
        .option("failOnDataLoss", str(settings.fail_on_data_loss).lower())
        .load()
    )
    parsed = _parsed(seam.state)
    if parsed is not None:
        frame = values.parse_frame(frame, parsed)
    if seam.state.shape.by_date:
        # Not to_date, which uses the session's time zone; and rounded down before 1970 too.
        micros = "unix_micros(timestamp)"
        day = f"int(({micros} - pmod({micros}, {DAY_US})) div {DAY_US})"
        is_in_calendar = f"{day} between {DAY_MIN} and {DAY_MAX}"
        frame = frame.withColumn("date", expr(f"if({is_in_calendar}, date_from_unix_date({day}), null)"))
    return frame
