"""Maintain a table with the newest value of each key of a topic: ``penstock.spark.jobs.snapshot``.

    snapshot(spark, "localhost:9092", "customers", "/data/customers")
    read_snapshot(spark, "/data/customers")

A run reads the records since the last one, merges them with the last version's rows and writes a new version
beside it:

    LOCATION/_snapshot/00000000000000000007.json     manifest of version 7: its directory and end offsets
    LOCATION/v00000007-1f0c9a/state=current/         a row for each key
                             /state=deleted/         tombstones that are not old enough to be forgotten
                             /state=superseded/      values that lost against one from another partition

The version counts when its JSON file has its final name, which is atomic and succeeds for one run only; until
then the last version is the newest. If a run dies, run it again.

Newest is by offset, not by timestamp. A key is in one partition, so its offsets say which value is last, whatever
the producers' clocks. Only if a topic got more partitions may a key be in several; then timestamps decide among
the newest of each. That is why superseded and deleted values are remembered for a while (``grace_hours``):
merging must give the same result as reading everything.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.model import TopicPartition
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import values
from penstock.spark.jobs.progress import Progress, followed
from penstock.spark.jobs.snapshot_versions import CURRENT, DELETED, SUPERSEDED, Version, Versions
from penstock.spark.jobs.tables import format_at, open_table, resolve, spark_path
from penstock.spark.jobs.tables.state import Gap, Span, State
from penstock.spark.jobs.topics import find_topics
from penstock.spark.option_values import parse_security
from penstock.spark.ranges import Offsets, to_json
from penstock.wire import EARLIEST, LATEST, Client, TopicInfo, shared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Kafka's own delete.retention.ms.
GRACE_HOURS = 24.0
# Records per task, so that the bar moves.
RECORDS_PER_TASK = 500_000
SHRUNK_AFTER_S = 10.0
COLUMNS = ("key", "value", "partition", "offset", "timestamp")
SCHEMA = "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP"


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    location: str
    # Path of the rows, for `spark.read.parquet`. Kept until the second version after this one.
    path: str
    topic: str
    version: int
    # False if there was nothing new; then this is the last version.
    is_new: bool
    # Offsets read by this run.
    read: int
    keys: int
    # Deleted keys that are still remembered.
    deleted: int
    bytes: int
    seconds: float

    def as_table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        columns = ("topic", "version", "new", "read", "keys", "deleted", "bytes", "path")
        row = (self.topic, self.version, "yes" if self.is_new else "no", self.read, self.keys)
        return columns, [(*row, self.deleted, self.bytes, self.path)]


def snapshot(
    spark: SparkSession,
    bootstrap: str,
    topic: str,
    location: str | Path,
    *,
    archive: str | Path | None = None,
    value_schema: str | StructType | None = None,
    grace_hours: float = GRACE_HOURS,
    full: bool = False,
    fail_on_data_loss: bool = True,
    progress: Progress | None = None,
    options: Mapping[str, str] | None = None,
) -> SnapshotResult:
    """Update the snapshot of a topic to the topic's current end; create it if there is none.

    Args:
        location: a directory that driver and executors share.
        archive: the topic's archive; records that brokers no longer have are read from there.
        value_schema: also parse values as JSON into these columns, as in ``id BIGINT, name STRING``; if a value
            does not fit, the column ``error`` has the reason.
        grace_hours: how long a deleted key is remembered, counted from its tombstone's timestamp.
        full: read everything again instead of only new records.
        fail_on_data_loss: fail when records are gone that were not read; otherwise continue without them.
        progress: called with (offsets done, offsets in total).
        options: how to connect, as the source takes it: ``{"kafka.security.protocol": "SSL", ...}``.

    Records without a key are left out. Raises SparkOptionError, DataLossError, SnapshotConflict, WireError.
    """
    if not grace_hours >= 0:  # nor NaN
        raise SparkOptionError(f"grace_hours must be at least 0, not {grace_hours:g}")
    parsed = None if value_schema is None else values.arrow_schema(value_schema)
    if parsed is not None:
        values.refuse_taken(parsed, [*COLUMNS, "state"])
    begun = time.monotonic()
    store = Versions(resolve(str(location)))
    client = shared(bootstrap, security=parse_security(options))
    found = find_topics(client, [topic]).get(topic)
    if found is None:
        raise SparkOptionError(f"topic {topic} does not exist at {bootstrap}; create it first")
    newest = store.load()
    if newest is not None and newest.topic != topic:
        raise SparkOptionError(
            f"{location} has a snapshot of topic {newest.topic}, not of {topic}; choose another location"
        )
    base = None if full else newest
    if base is not None and base.topic_id != found.topic_id.hex():
        raise SparkOptionError(
            f"topic {topic} was deleted and recreated since its last snapshot; start again with full"
        )
    archived = None if archive is None else _archived(archive, topic, found.topic_id.hex())
    reach = _Reach(client, found, base, archived, fail_on_data_loss)
    parsed_text = None if parsed is None else values.schema_text(parsed)
    offsets = {each.partition: end for each, end in reach.ends.items()}
    # Nothing to read, and nothing that was lost with the user's leave, to be lost only once.
    if base is not None and not reach.size and (base.offsets, base.value_schema) == (offsets, parsed_text):
        return _result(store, base, is_new=False, read=0, begun=begun)
    rows = _newest_rows(
        reach.records(spark, bootstrap, options or {}),
        None if base is None else _held(spark, store, base),
        grace_hours,
    )
    if parsed is not None:
        rows = values.parse_frame(rows, parsed)
    number = 1 if newest is None else newest.number + 1
    directory = f"v{number:08d}-{uuid.uuid4().hex[:6]}"
    store.location.mkdir(parents=True, exist_ok=True)  # Spark tells less, and later, of what is in the way
    with followed(spark, f"snapshot of {topic}", reach.size, progress):
        rows.write.partitionBy("state").parquet(f"file:{store.location / directory}")
    from pyspark.sql.types import StructType  # noqa: PLC0415  # the driver's half

    version = Version(
        number=number,
        directory=directory,
        topic=topic,
        topic_id=found.topic_id.hex(),
        offsets=offsets,
        rows={},
        size_bytes=0,
        schema=StructType([each for each in rows.schema.fields if each.name != "state"]).json(),
        value_schema=parsed_text,
        created_ms=time.time_ns() // 1_000_000,
    )
    return _result(store, store.commit(version), is_new=True, read=reach.size, begun=begun)


def read_snapshot(spark: SparkSession, location: str | Path, *, state: str = CURRENT) -> DataFrame:
    """The rows of the newest version: key, value, partition, offset, timestamp, and the parsed columns.

    ``state`` may also be ``deleted``: the tombstones of keys that were deleted lately.
    """
    from pyspark.sql.types import StructType  # noqa: PLC0415  # the driver's half

    if state not in {CURRENT, DELETED, SUPERSEDED}:
        raise SparkOptionError(f"state must be {CURRENT}, {DELETED} or {SUPERSEDED}, not {state!r}")
    store = Versions(resolve(str(location)))
    version = store.load()
    if version is None:
        raise SparkOptionError(f"there is no snapshot at {location}; create it with `snapshot`")
    schema = StructType.fromJson(json.loads(version.schema))
    path = store.location / version.directory / f"state={state}"
    # No row is in this state, so Spark has created no directory for it.
    return (
        spark.read.schema(schema).parquet(spark_path(path))
        if path.exists()
        else spark.createDataFrame([], schema)
    )


def _newest_rows(new: DataFrame, held: DataFrame | None, grace_hours: float) -> DataFrame:
    """The rows of the next version, with their state, from new records and the rows of the last version."""
    from pyspark.sql import Window  # noqa: PLC0415  # the driver's half
    from pyspark.sql import functions as F  # noqa: PLC0415

    records = new if held is None else new.unionByName(held)
    by_partition = (
        records.groupBy("key", "partition")
        .agg(F.max(F.struct("offset", "timestamp", "value")).alias("newest"))
        .select("key", "newest.value", "partition", "newest.offset", "newest.timestamp")
    )
    # Not before 1970: grace_hours may be infinite.
    forgotten_before = F.lit(max(0.0, time.time() - grace_hours * 3600)).cast("timestamp")
    is_old = F.col("timestamp") < forgotten_before
    newest_first = Window.partitionBy("key").orderBy(
        F.desc("timestamp"), F.desc("offset"), F.desc("partition")
    )
    return (
        by_partition.withColumn("rank", F.row_number().over(newest_first))
        # An old tombstone is forgotten with all that it deleted; otherwise those values would come back.
        .withColumn("is_forgotten", F.first(F.col("value").isNull() & is_old).over(newest_first))
        .where(~F.col("is_forgotten") & ((F.col("rank") == 1) | ~is_old))
        .select(
            *COLUMNS,
            F.when(F.col("rank") > 1, SUPERSEDED)
            .when(F.col("value").isNull(), DELETED)
            .otherwise(CURRENT)
            .alias("state"),
        )
    )


def _held(spark: SparkSession, store: Versions, version: Version) -> DataFrame:
    """All rows of a version."""
    path = store.location / version.directory
    if not any(path.glob("state=*")):
        return spark.createDataFrame([], SCHEMA)
    return spark.read.schema(f"{SCHEMA}, state STRING").parquet(spark_path(path)).select(*COLUMNS)


class _Reach:
    """What a run reads: from the end of the last version to the topic's current end."""

    def __init__(
        self,
        client: Client,
        topic: TopicInfo,
        base: Version | None,
        archived: _Archived | None,
        fail_on_data_loss: bool,
    ) -> None:
        places = [TopicPartition(topic.name, number) for number in sorted(topic.partitions)]
        self._topic_ids = {topic.name: topic.topic_id}
        self._fail_on_data_loss = fail_on_data_loss
        self._archived = archived
        self.ends = _ends(client, places, base)
        earliest = client.list_offsets(dict.fromkeys(places, EARLIEST))
        # Read from the archive: start, and end, from which the brokers are read.
        self._cold: dict[TopicPartition, tuple[int, int]] = {}
        self._hot: Offsets = {}
        for each in places:
            span = None if archived is None else archived.spans.get(each.partition)
            known = None if base is None else base.offsets.get(each.partition)
            first = min(earliest[each].offset, span.start) if span is not None else earliest[each].offset
            start = first if known is None else known
            seam = start
            if span is not None and span.start <= start < span.end:
                seam = min(span.end, self.ends[each])
                self._cold[each] = (start, seam)
            if archived is not None:
                for gap in archived.gaps(each.partition, start, seam):
                    self._lose(f"records {gap} are not in the archive")
            gone = min(earliest[each].offset, self.ends[each])
            if seam < gone:
                self._lose(
                    f"records [{seam}, {gone}) of {each} are gone: retention was faster than the snapshot"
                )
                seam = gone
            self._hot[each] = seam

    @property
    def size(self) -> int:
        cold = sum(end - start for start, end in self._cold.values())
        return cold + sum(self.ends[each] - start for each, start in self._hot.items())

    def records(self, spark: SparkSession, bootstrap: str, security: Mapping[str, str]) -> DataFrame:
        """All records that have a key."""
        hot = {each: start for each, start in self._hot.items() if start < self.ends[each]}
        frames = []
        if hot:
            options = {
                **security,
                "kafka.bootstrap.servers": bootstrap,
                "assign": json.dumps(_assigned(hot)),
                "startingOffsets": json.dumps(to_json(hot, self._topic_ids)),
                "endingOffsets": json.dumps(
                    to_json({each: self.ends[each] for each in hot}, self._topic_ids)
                ),
                "kafka.isolation.level": "read_committed",
                "failOnDataLoss": str(self._fail_on_data_loss).lower(),
                "maxRecordsPerPartition": str(RECORDS_PER_TASK),
            }
            frames.append(spark.read.format("penstock").options(**options).load().select(*COLUMNS))
        if self._archived is not None and self._cold:
            frames.append(self._archived.records(spark, self._cold))
        if not frames:
            frames.append(spark.createDataFrame([], SCHEMA))
        first, *rest = frames
        for each in rest:
            first = first.unionByName(each)
        return first.where("key IS NOT NULL")

    def _lose(self, what: str) -> None:
        if self._fail_on_data_loss:
            raise DataLossError(
                f"{what}. Pass the archive that has them, or set fail_on_data_loss to false to do without."
            )


@dataclass(frozen=True, slots=True)
class _Archived:
    """A topic's part of an archive."""

    root: Path
    topic: str
    state: State
    topic_id: str

    @property
    def spans(self) -> dict[int, Span]:
        return self.state.partitions_of(self.topic, self.topic_id)

    def gaps(self, partition: int, start: int, end: int) -> list[Gap]:
        """The gaps of the archive in a range."""
        return [
            each
            for each in self.state.gaps
            if each.at == (self.topic, self.topic_id, partition)
            and each.start < end
            and (each.end is None or start < each.end)
        ]

    def records(self, spark: SparkSession, ranges: dict[TopicPartition, tuple[int, int]]) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: PLC0415  # the driver's half

        starts = {each.partition: start for each, (start, _) in ranges.items()}
        paths = [
            each.path
            for each in self.state.files_of(self.topic, self.topic_id)
            if each.partition in starts and each.end > starts[each.partition]
        ]
        wanted = F.lit(False)
        for each, (start, end) in ranges.items():
            within = F.col("offset").between(start, end - 1)
            wanted = wanted | ((F.col("partition") == each.partition) & within)
        paths += self.state.foreign
        if not paths:
            return spark.createDataFrame([], SCHEMA)
        schema = f"{SCHEMA}, topic STRING"
        files = spark.read.schema(schema).parquet(*(spark_path(self.root / path) for path in paths))
        return files.where((F.col("topic") == self.topic) & wanted).select(*COLUMNS)


def _archived(location: str | Path, topic: str, topic_id: str) -> _Archived:
    path = resolve(str(location))
    held = format_at(path)
    table = None if held is None else open_table(path, held)
    state = None if table is None else table.load()
    if table is None or state is None:
        raise SparkOptionError(f"there is no archive at {location}; create it with `archive`, or omit it")
    return _Archived(table.root, topic, state, topic_id)


def _ends(client: Client, places: list[TopicPartition], base: Version | None) -> Offsets:
    """The partitions' ends. A new leader may not know its high watermark for a moment."""
    deadline = time.monotonic() + SHRUNK_AFTER_S
    while True:
        found = client.list_offsets(dict.fromkeys(places, LATEST), read_committed=True)
        ends = {each: found[each].offset for each in places}
        shrunk = [
            each for each in places if base is not None and ends[each] < base.offsets.get(each.partition, 0)
        ]
        if not shrunk:
            return ends
        if time.monotonic() > deadline:
            raise SparkOptionError(
                f"{shrunk[0]} ends at offset {ends[shrunk[0]]}, before the end of the last snapshot: "
                "its log was lost or truncated; start again with full"
            )
        time.sleep(0.25)


def _assigned(offsets: Offsets) -> dict[str, list[int]]:
    assigned: dict[str, list[int]] = {}
    for each in sorted(offsets):
        assigned.setdefault(each.topic, []).append(each.partition)
    return assigned


def _result(store: Versions, version: Version, *, is_new: bool, read: int, begun: float) -> SnapshotResult:
    return SnapshotResult(
        location=str(store.location),
        path=str(store.location / version.directory / f"state={CURRENT}"),
        topic=version.topic,
        version=version.number,
        is_new=is_new,
        read=read,
        keys=version.rows[CURRENT],
        deleted=version.rows[DELETED],
        bytes=version.size_bytes,
        seconds=time.monotonic() - begun,
    )
