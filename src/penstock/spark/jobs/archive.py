"""Archive topics in a table of files: ``penstock.spark.jobs.archive``.

    archive(spark, "localhost:9092", ["orders"], "/data/archive")

It works in rounds: ask the brokers how far the topics reach, split that into tasks, let each write Parquet files
(`tables/writing.py`; no record passes through the JVM), and commit all files with their end offsets in one commit
of the table (`tables/`). After a kill at any moment, run it again: committed files count, uncommitted files are
found and deleted. The archive has no position of its own: the table is the only place that says where to
continue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.columnar.columns import decode
from penstock.model import TopicPartition
from penstock.protocol.records import CorruptBatch
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import values
from penstock.spark.jobs.failures import let_interrupts_pass, reason
from penstock.spark.jobs.progress import Progress, followed
from penstock.spark.jobs.tables import left_over, open_table, resolve
from penstock.spark.jobs.tables.backlog import Backlog, Extent, backlog, deal, rewound
from penstock.spark.jobs.tables.disk import Disk
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.layout import beside, files_at
from penstock.spark.jobs.tables.manifest import ManifestTable
from penstock.spark.jobs.tables.merging import small_runs
from penstock.spark.jobs.tables.state import (
    ArchivedPartition,
    Change,
    CommitConflict,
    Gap,
    Shape,
    Span,
    State,
    new_batch_token,
)
from penstock.spark.jobs.tables.writing import (
    ROWS_MAX,
    Task,
    WriteSettings,
    Written,
    archive_task,
    file_schema,
    merge_task,
    parquet_bytes,
)
from penstock.spark.jobs.topics import find_topics
from penstock.spark.option_values import parse_security
from penstock.spark.reading import ReadSettings
from penstock.wire import EARLIEST, LATEST, Client, OffsetOutOfRange, WireError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

CLIENT_ID: Final = "penstock-archive"
# Size of one file. Spark reads files of 128 to 512 MB best: many tasks, few of them short.
FILE_MB: Final = 256
# Limit of a batch, which is the work that a crash repeats.
BATCH_FILES_PER_CORE: Final = 4
# Spark retries tasks on a cluster, but not on a local master.
JOB_ATTEMPTS: Final = 3
# A log that became shorter is believed after this time: a new leader may not know its high watermark yet.
REWOUND_AFTER_S: Final = 10.0
SAMPLE_BYTES: Final = 2**20
# How long the driver looks for brokers while a user waits. Tasks, which have more to lose, wait longer.
DRIVER_DEADLINE_MS: Final = 30_000

_log = logging.getLogger("penstock.spark")


class ArchiveFailed(RuntimeError):
    """Tasks failed for good. Committed records stay; run the archive again to continue."""


class Count(NamedTuple):
    records: int
    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class ArchivedSpan:
    """How far a partition is archived."""

    topic: str
    partition: int
    start: int
    end: int  # exclusive
    # Offsets that were gone before they could be archived, in this run or an earlier one.
    lost: int
    # In this run.
    records: int
    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    location: str
    format: str
    # In this run; merging small files also counts as a batch.
    batches: int
    records: int
    bytes: int
    files: int
    seconds: float
    # All that the archive lacks, from this run and earlier ones.
    gaps: tuple[Gap, ...]
    partitions: tuple[ArchivedSpan, ...]

    def as_table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Columns, and a row for each partition."""
        columns = ("topic", "partition", "archived_from", "archived_to", "records", "bytes", "files", "lost")
        return columns, [
            (
                *(each.topic, each.partition, each.start, each.end),
                each.records,
                each.bytes,
                each.files,
                each.lost,
            )
            for each in self.partitions
        ]


def archive(
    spark: SparkSession,
    bootstrap: str,
    topics: str | Sequence[str],
    location: str | Path,
    *,
    format: str = "parquet",
    by_date: bool = True,
    headers: bool = True,
    value_schema: str | StructType | None = None,
    every_seconds: float | None = None,
    file_mb: int = FILE_MB,
    fail_on_data_loss: bool = True,
    catalog: str | None = None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
    options: Mapping[str, str] | None = None,
) -> ArchiveResult:
    """Archive topics from the end of the table at ``location`` to the topics' current ends.

    Args:
        topics: one name, or several.
        location: a directory that driver and executors share.
        format: ``parquet``, ``delta`` or ``iceberg``.
        by_date: partition the files by the day (UTC) of their records' timestamps, as in ``date=2026-11-16``.
        headers: keep the records' headers.
        value_schema: also parse values as JSON into these columns, as in ``id BIGINT, name STRING``. The value
            stays; if it does not fit, the column ``error`` has the reason.
        every_seconds: repeat forever, with this pause after each round.
        file_mb: approximate file size in MB (2**20 bytes).
        fail_on_data_loss: fail when records are gone that were not archived; otherwise note the gap and continue.
        catalog: for iceberg, ``NAME:NAMESPACE.TABLE`` of a catalog in pyiceberg's configuration; without it the
            table has its own catalog in its location.
        stop: when set, end after the current batch.
        progress: called with (offsets done, offsets in total).
        options: how to connect, as the source takes it: ``{"kafka.security.protocol": "SSL", ...}``.

    A table keeps its shape: ``by_date``, ``headers`` and ``value_schema`` must be the same each time.

    Raises:
        SparkOptionError: invalid arguments, or they do not fit the existing table.
        DataLossError: records are gone, and ``fail_on_data_loss`` is on.
        ArchiveFailed: tasks failed repeatedly. WireError: no broker answers.
    """
    names = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
    if not names or not all(names):
        raise SparkOptionError("archive needs the name of at least one topic")
    if every_seconds is not None and not every_seconds > 0:
        raise SparkOptionError(f"every_seconds must be more than 0, not {every_seconds}")
    if file_mb < 1:
        raise SparkOptionError(f"file_mb must be at least 1, not {file_mb}")
    parsed = None if value_schema is None else values.arrow_schema(value_schema)
    run = _Archive(
        spark,
        ReadSettings(
            bootstrap,
            headers=headers,
            read_committed=True,
            rows_max=ROWS_MAX,
            client_id=CLIENT_ID,
            security=parse_security(options),
        ),
        names,
        Shape(by_date, headers, None if parsed is None else values.schema_text(parsed)),
        resolve(str(location)),
        format,
        catalog,
        parsed,
        file_mb * 2**20,
        fail_on_data_loss,
        progress,
    )
    stop = stop or threading.Event()
    if every_seconds is None:
        run.round(stop)
    else:
        run.go_on(every_seconds, stop)
    return run.result()


class _Archive:
    """One run, on the driver."""

    def __init__(
        self,
        spark: SparkSession,
        settings: ReadSettings,
        topics: list[str],
        shape: Shape,
        location: Path,
        format: str,
        catalog: str | None,
        value_schema: pa.Schema | None,
        file_bytes: int,
        fail_on_data_loss: bool,
        progress: Progress | None,
    ) -> None:
        # Arguments.
        self._spark = spark
        self._read = settings
        self._topics = topics
        self._shape = shape
        self._value_schema = value_schema
        self._file_bytes = file_bytes
        self._fail_on_data_loss = fail_on_data_loss
        self._progress = progress
        self._columns = file_schema(settings.headers, value_schema)
        self._table = open_table(location, format, self._columns, catalog=catalog)
        self._client: Client = replace(settings, deadline_ms=DRIVER_DEADLINE_MS).client()
        self._parallelism = max(1, spark.sparkContext.defaultParallelism)
        # The table's state as last read.
        self._extents()  # raises before a table is created for a missing topic
        if isinstance(self._table, ManifestTable) and str(spark.sparkContext.master).startswith("local"):
            # On a cluster not: executors might share the archive's directory, but not the one around it.
            self._table.move_beside()
        self._look()
        self._offset_bytes: dict[ArchivedPartition, float] = {}
        # Totals of this run.
        self._began = time.monotonic()
        self._batches = 0
        self._written: dict[ArchivedPartition, Count] = {}

    def go_on(self, every_seconds: float, stop: threading.Event) -> None:
        """Run rounds until stopped. The first must succeed; later ones survive temporary errors."""
        try:
            self.round(stop)
            has_failed = False
            while not stop.wait(min(every_seconds, threading.TIMEOUT_MAX)):
                # Also when there is nothing to do, so that a supervisor notices.
                if not self._has_spark():
                    raise ArchiveFailed("Spark has stopped; records archived before are kept")
                try:
                    if has_failed:
                        self._look()
                    self.round(stop)
                    has_failed = False
                except (ArchiveFailed, TableError, WireError, OSError) as error:
                    _log.warning("%s; trying again in %g s", error, every_seconds)
                    has_failed = True
        except KeyboardInterrupt:
            _log.info("stopped; committed records are kept, and the next run continues from there")

    def round(self, stop: threading.Event) -> None:
        """Archive all current records, in as many batches as needed; then merge small files.

        When stopped it ends after the current batch.
        """
        extents, gaps = self._reach()
        ends = {at: extent.end for at, extent in extents.items()}
        done = 0
        while not stop.is_set():
            todo = backlog(self._state, extents)
            gaps = [*gaps, *todo.gaps]
            self._lose(gaps)
            total = done + todo.offsets
            if not todo.pending and not gaps and todo.spans.items() <= self._state.spans.items():
                break
            taken = self._batch(todo, gaps, done, total)
            if taken is None:
                extents, gaps = self._reach()
                ends = {at: extent.end for at, extent in extents.items()}
            else:
                done += taken
                extents, gaps = self._extents(ends), []
        else:
            return
        if self._left_over:
            # Nothing new, but this commit keeps other archivers from committing those files.
            self._commit(Change())
        if self._progress is not None:
            self._progress(done, done)
        self._merge()

    def result(self) -> ArchiveResult:
        current = {name: self._state.lives(name)[-1:] for name in self._topics}
        partitions = tuple(
            ArchivedSpan(
                at.topic,
                at.partition,
                *span,
                sum(gap.end - gap.start for gap in self._state.gaps if gap.at == at and gap.end is not None),
                *self._written.get(at, Count(0, 0, 0)),
            )
            for at, span in sorted(self._state.spans.items())
            if [at.topic_id] == current.get(at.topic)
        )
        return ArchiveResult(
            location=str(self._table.location),
            format=self._table.format,
            batches=self._batches,
            records=sum(each.records for each in self._written.values()),
            bytes=sum(each.bytes for each in self._written.values()),
            files=sum(each.files for each in self._written.values()),
            seconds=time.monotonic() - self._began,
            gaps=tuple(each for each in self._state.gaps if each.topic in current),
            partitions=partitions,
        )

    # The table

    def _look(self) -> None:
        """Read the table's state, then list leftover files, which are deleted after our next commit.

        Between the two, finish what a commit left to do in the table's directory if its archiver was killed.

        Always both: the files are leftovers with respect to this state. With an older state they might have been
        committed since.
        """
        self._state = self._open()
        if isinstance(self._table, ManifestTable):
            self._table.settle(self._state)
        self._left_over = left_over(self._table, self._state)

    def _open(self) -> State:
        state = self._table.load()
        if state is None:
            self._refuse_files_of_others()
            try:
                state = self._table.create(self._shape)
            except CommitConflict:
                state = self._table.load()
                assert state is not None, "a table was created and is missing"
        for held, asked in zip(_told_shape(state.shape), _told_shape(self._shape)):
            if held != asked:
                raise SparkOptionError(
                    f"the table at {self._table.location} was created {held}, not {asked}; use the same, "
                    "or another location"
                )
        return state

    def _refuse_files_of_others(self) -> None:
        """Refuse a location with files but no table: a new table would take them for leftovers and delete them."""
        where = self._table.location
        is_used = any(any(files_at(each, Disk())) for each in {where, self._table.root})
        if is_used and self._table.load() is None:
            raise SparkOptionError(
                f"{where} has files of an archive, but no {self._table.format} table that lists them; use the "
                f"format and the catalog of that archive, put its {beside(where).name} back beside it, or use "
                "another location"
            )

    def _commit(self, change: Change) -> bool:
        """False if another archiver was faster; then the newer state is loaded, and the caller must plan again."""
        try:
            self._state = self._table.commit(self._state, change)
        except CommitConflict as conflict:
            _log.warning("%s; another archiver is running, continuing after it", conflict)
            self._look()
            self._delete({self._table.root / each.path for each in change.added})
            return False
        self._batches += 1
        self._delete(set(self._left_over))
        return True

    def _delete(self, paths: set[Path]) -> None:
        """Delete only leftovers among these paths, never committed files."""
        disk = Disk()
        for path in paths.intersection(self._left_over):
            disk.unlink(path)
        self._left_over = [path for path in self._left_over if path not in paths]

    # The brokers

    def _reach(self) -> tuple[dict[ArchivedPartition, Extent], list[Gap]]:
        """The current ends of the topics, and gaps for logs that are shorter than their archive."""
        deadline = time.monotonic() + REWOUND_AFTER_S
        while True:
            extents = self._extents()
            gaps = rewound(self._state, extents)
            if not gaps or time.monotonic() > deadline:
                return extents, gaps
            time.sleep(0.25)

    def _extents(
        self, ends: Mapping[ArchivedPartition, int] | None = None
    ) -> dict[ArchivedPartition, Extent]:
        """Where each partition begins and ends; with ``ends``, only those partitions, up to these ends."""
        found = find_topics(self._client, self._topics)
        for name in self._topics:
            if name not in found:
                raise SparkOptionError(
                    f"topic {name} does not exist at {self._read.bootstrap}; create it first, or omit it"
                )
        partitions = [
            ArchivedPartition(name, found[name].topic_id.hex(), number)
            for name in self._topics
            for number in sorted(found[name].partitions)
        ]
        if ends is not None:
            partitions = [at for at in partitions if at in ends]
        places = {at: TopicPartition(at.topic, at.partition) for at in partitions}
        starts = self._client.list_offsets(dict.fromkeys(places.values(), EARLIEST), read_committed=True)
        if ends is None:
            reach = self._client.list_offsets(dict.fromkeys(places.values(), LATEST), read_committed=True)
            ends = {at: reach[place].offset for at, place in places.items()}
        return {at: Extent(starts[place].offset, ends[at]) for at, place in places.items()}

    def _lose(self, gaps: Sequence[Gap]) -> None:
        if gaps and self._fail_on_data_loss:
            raise DataLossError(_told(gaps))
        for each in gaps:
            _log.warning("records are gone that were not archived: %s", each)

    def _bytes_of(self, at: ArchivedPartition, start: int) -> float:
        """Approximate file bytes per offset: from the newest file, or from a sample."""
        known = self._offset_bytes.get(at)
        if known is not None:
            return known
        newest = max(
            (each for each in self._state.files if each.at == at), key=lambda each: each.end, default=None
        )
        if newest is not None:
            return newest.bytes / (newest.end - newest.start)
        try:
            place = TopicPartition(at.topic, at.partition)
            sample = self._client.fetch(place, start, bytes_max=SAMPLE_BYTES, wait_ms=0, read_committed=True)
            columns = decode(sample.records, start=start, end=2**63 - 1, aborted=sample.aborted)
        except (OffsetOutOfRange, CorruptBatch):
            return 1.0  # the task will report it
        if columns.next_offset == start:
            return 1.0
        records = pa.record_batch(
            {
                "key": columns.key,
                "value": columns.value,
                "offset": columns.offset,
                "timestamp": columns.timestamp,
            }
        )
        return max(1.0, parquet_bytes(records) / (columns.next_offset - start))

    # A batch

    def _batch(self, todo: Backlog, gaps: Sequence[Gap], done: int, total: int) -> int | None:
        """Read, write and commit one batch.

        Returns the number of offsets, or None if the state has changed and the caller must plan again.
        """
        spans, files, taken = dict(todo.spans), [], 0
        if todo.pending:
            bins = deal(
                todo.pending,
                {at: self._bytes_of(at, extent.start) for at, extent in todo.pending.items()},
                file_bytes=self._file_bytes,
                parallelism=self._parallelism,
                batch_bytes=BATCH_FILES_PER_CORE * self._parallelism * self._file_bytes,
            )
            taken = sum(each.end - each.start for held in bins for each in held)
            with self._following(done, taken, total):
                outcomes = self._run(archive_task(self._settings(), bins), len(bins))
            if not self._may_commit(outcomes, todo.pending):
                return None
            for held in bins:
                for each in held:
                    spans[each.at] = Span(spans[each.at].start, max(spans[each.at].end, each.end))
            files = [file for each in outcomes for file in each.files]
            gaps = [*gaps, *(gap for each in outcomes for gap in each.gaps)]
        if not self._commit(Change(spans, tuple(files), gaps=tuple(gaps))):
            return None
        for file in files:
            self._offset_bytes[file.at] = file.bytes / (file.end - file.start)
            records, size, count = self._written.get(file.at, Count(0, 0, 0))
            self._written[file.at] = Count(records + file.records, size + file.bytes, count + 1)
        return taken

    def _may_commit(self, outcomes: Sequence[Written], planned: Iterable[ArchivedPartition]) -> bool:
        ids = {at.topic: at.topic_id for at in planned}
        failed = next((each for each in outcomes if each.error is not None), None)
        if failed is not None:
            if self._open().batch != self._state.batch or (failed.is_loss and self._is_made_anew(ids)):
                # Perhaps a faster archiver has deleted our files, which could not be committed any more. The next
                # plan finds records lost with a topic, and handles them by ``fail_on_data_loss``.
                self._look()
                return False
            if failed.is_loss:
                raise DataLossError(str(failed.error))
            raise ArchiveFailed(f"{failed.error}; records archived before are kept")
        # Older brokers are read by the topic's name. A deleted id never comes back: if it still exists, all records
        # read are of the planned topic.
        if self._ids_now(ids) == ids:
            return True
        self._look()
        return False

    def _is_made_anew(self, ids: Mapping[str, str]) -> bool:
        return any(ids[name] != now for name, now in self._ids_now(ids).items())

    def _ids_now(self, names: Iterable[str]) -> dict[str, str]:
        return {name: topic.topic_id.hex() for name, topic in self._client.topics(list(names)).items()}

    def _merge(self) -> None:
        """Merge small files. If that fails nothing is lost, and the next round retries."""
        runs = small_runs(self._state.files, self._file_bytes)
        if not runs:
            return
        try:
            outcomes = self._run(merge_task(self._settings(), runs), len(runs))
        except ArchiveFailed as error:
            _log.warning("could not merge small files: %s", error)
            return
        added = tuple(file for each in outcomes for file in each.files)
        self._commit(Change(added=added, removed=tuple(file for run in runs for file in run)))

    def _run(self, task: Task, count: int) -> list[Written]:
        """Run ``count`` tasks on Spark, each called with its number."""
        for attempt in range(1, JOB_ATTEMPTS + 1):
            try:
                numbers = self._spark.range(0, count, 1, count)
                rows = numbers.mapInArrow(task, "written STRING").collect()
                return [Written.from_json(row["written"]) for row in rows]
            except (
                Exception
            ) as error:  # Spark and py4j raise many types, and a dead worker may cause any of them
                let_interrupts_pass(error)
                why = reason(error)
                if attempt == JOB_ATTEMPTS or not self._has_spark():
                    raise ArchiveFailed(f"Spark gave up: {why}; records archived before are kept") from error
                _log.warning("tasks failed, retrying (%d of %d): %s", attempt, JOB_ATTEMPTS - 1, why)
        raise AssertionError("unreachable")

    def _has_spark(self) -> bool:
        """Whether the JVM still runs; without it no retry can succeed."""
        try:
            return not self._spark.sparkContext._jsc.sc().isStopped()
        except Exception:  # py4j: the connection is gone
            return False

    @contextmanager
    def _following(self, done: int, taken: int, total: int) -> Iterator[None]:
        tell = self._progress
        seen = None if tell is None else lambda part, _: tell(done + part, total)
        with followed(self._spark, f"archive of {', '.join(self._topics)}", taken, seen):
            yield

    def _settings(self) -> WriteSettings:
        return WriteSettings(
            str(self._table.root),
            new_batch_token(),
            self._read,
            self._shape.by_date,
            self._value_schema,
            self._file_bytes,
            self._fail_on_data_loss,
        )


def _told_shape(shape: Shape) -> tuple[str, ...]:
    """A table's shape for an error message."""
    text = shape.value_schema
    return (
        f"{'with' if shape.by_date else 'without'} dates (by_date)",
        f"{'with' if shape.headers else 'without'} headers",
        "without value_schema" if text is None else f"with value_schema {values.ddl_of(text)!r}",
    )


def _told(gaps: Sequence[Gap]) -> str:
    first, more = gaps[0], f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    what = {
        "retention": "retention deleted records before they were archived",
        "recreated": "the topic was deleted and recreated; records of the old one after its archive are gone",
        "rewound": "the log ends before its archive; it was truncated, and may fill up with other records",
    }[first.reason]
    return f"{what}: {first}{more}. To note the gap and continue set fail_on_data_loss to false."
