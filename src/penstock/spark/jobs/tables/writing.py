"""The task's half of the archive: read a range of offsets, write durable Parquet files, without the JVM.

Records come as Arrow batches (`penstock.spark.reading`), are split by day if the table is, gathered into row
groups and written by pyarrow. A task returns a description of its files as JSON; they do not count until the
driver commits them. Batches are gathered first, because `ParquetWriter.write_batch` makes a row group per batch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.protocol.records import CorruptBatch
from penstock.spark.errors import DataLossError
from penstock.spark.jobs import values
from penstock.spark.jobs.tables.disk import Disk, make_directories, publish
from penstock.spark.jobs.tables.state import (
    NO_DATE,
    ArchivedPartition,
    DataFile,
    Gap,
    directory_of,
    file_path,
    temporary_name,
)
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings, read
from penstock.spark.reading import schema as record_schema
from penstock.wire import EARLIEST, LATEST, TopicPartition, UnknownTopic, WireError

# Arrow bytes, before compression. Large enough for a scan, small enough for a task to hold a few.
ROW_GROUP_BYTES: Final = 64 * 2**20
ROW_GROUP_ROWS: Final = 2**20
# Rows of one batch; the JVM sees none of them, so larger than the source's.
ROWS_MAX: Final = 131_072
# Days with open files in a task. More are rare (producers with a broken clock), and cause small files.
DAYS_OPEN_MAX: Final = 32
DAY_US: Final = 86_400 * 1_000_000
_EPOCH = date(1970, 1, 1).toordinal()
DAY_MIN, DAY_MAX = date.min.toordinal() - _EPOCH, date.max.toordinal() - _EPOCH

Task: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Assignment(NamedTuple):
    """One task's work."""

    at: ArchivedPartition
    start: int
    end: int  # exclusive


@dataclass(frozen=True, slots=True)
class WriteSettings:
    # What the files' paths are relative to.
    root: str
    batch_token: str
    read: ReadSettings
    by_date: bool
    value_schema: pa.Schema | None
    # A file is ended when it has reached this size.
    file_bytes: int
    fail_on_data_loss: bool


@dataclass(frozen=True, slots=True)
class Written:
    """The result of an assignment. With an ``error`` none of its files count."""

    files: tuple[DataFile, ...] = ()
    gaps: tuple[Gap, ...] = ()
    error: str | None = None
    # Whether the error is that records are gone.
    is_loss: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Written:
        document = json.loads(text)
        return cls(
            tuple(DataFile(**each) for each in document["files"]),
            tuple(Gap(**each) for each in document["gaps"]),
            document["error"],
            document["is_loss"],
        )


def file_schema(headers: bool, value_schema: pa.Schema | None) -> pa.Schema:
    """The columns of the archive's files: those of Spark's Kafka source, then the parsed ones."""
    columns = record_schema(headers)
    if value_schema is not None:
        values.refuse_taken(value_schema, [*columns.names, "date"])
        columns = pa.schema([*columns, *values.parsed_schema(value_schema)])
    return columns


def archive_range(settings: WriteSettings, assignment: Assignment, disk: Disk | None = None) -> Written:
    """Archive one assignment. Errors that only the user can resolve are returned; all others raise."""
    gaps: list[Gap] = []
    with _Files(settings, assignment, disk or Disk()) as files:
        position = assignment.start
        while position < assignment.end:
            wanted = OffsetRange(assignment.at.topic, assignment.at.partition, position, assignment.end)
            try:
                for batch in read(settings.read, wanted, bytes.fromhex(assignment.at.topic_id)):
                    position = batch.column("offset")[-1].as_py() + 1
                    parsed = settings.value_schema
                    files.add(batch if parsed is None else values.with_columns(batch, parsed))
                position = assignment.end
            except DataLossError as error:
                gap = _gap(settings, assignment, position)
                if gap is None or settings.fail_on_data_loss:
                    return Written(error=str(error), is_loss=True)
                gaps.append(gap)
                assert gap.end is not None
                position = gap.end
        return Written(files.finish(), tuple(gaps))


def merge(settings: WriteSettings, files: Sequence[DataFile], disk: Disk | None = None) -> Written:
    """Merge small files of the same partition and day into one, in the order of offsets."""
    at, root = files[0].at, Path(settings.root)
    with _Files(settings, Assignment(at, files[0].start, files[-1].end), disk or Disk()) as merged:
        for each in files:
            with pq.ParquetFile(root / each.path) as source:
                for batch in source.iter_batches(batch_size=ROWS_MAX):
                    merged.add(batch)
        written = merged.finish()
    records = sum(each.records for each in files)
    assert sum(each.records for each in written) == records, f"{at}: {records} records became {written}"
    return Written(written)


def _gap(settings: WriteSettings, assignment: Assignment, position: int) -> Gap | None:
    """The gap that retention made in a range during the read; None if there is none."""
    at = TopicPartition(assignment.at.topic, assignment.at.partition)
    client = settings.read.client()
    try:
        log_start = client.list_offsets({at: EARLIEST})[at].offset
        log_end = client.list_offsets({at: LATEST})[at].offset
    except UnknownTopic:
        return None
    if log_start <= position or log_end < assignment.end:
        return None
    return Gap(*assignment.at, position, min(log_start, assignment.end), "retention")


class _Files:
    """The files of one assignment, by day. They are durable when `finish` returns, and no sooner."""

    def __init__(self, settings: WriteSettings, assignment: Assignment, disk: Disk) -> None:
        self._settings = settings
        self._assignment = assignment
        self._disk = disk
        # The least recently used first. One key, None, if the table is not parted by day.
        self._open: dict[int | None, _OpenFile] = {}
        self._held_bytes = 0
        # The disk works while the next records are fetched and encoded.
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._synced: list[Future[None]] = []
        self._published: list[Future[DataFile]] = []

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._syncing.shutdown(wait=True, cancel_futures=True)
        for each in self._open.values():
            each.discard()

    def add(self, batch: pa.RecordBatch) -> None:
        if not self._settings.by_date:
            self._hold(None, batch)
            return
        days = np.floor_divide(
            batch.column("timestamp").view(pa.int64()).to_numpy(zero_copy_only=False), DAY_US
        )
        if days[0] == days[-1] and (days == days[0]).all():
            self._hold(int(days[0]), batch)
            return
        order = np.argsort(days, kind="stable")  # offsets stay in order within a day
        days = days[order]
        batch = batch.take(pa.array(order))
        bounds = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
        for first, last in pairwise(bounds):
            self._hold(int(days[first]), batch.slice(first, last - first))

    def finish(self) -> tuple[DataFile, ...]:
        for day in list(self._open):
            self._end(day)
        for each in self._synced:
            each.result()  # a later sync need not tell of an error that this one was told
        return tuple(each.result() for each in self._published)

    def _hold(self, day: int | None, batch: pa.RecordBatch) -> None:
        file = self._open.pop(day, None)
        if file is None:
            file = _OpenFile(self._settings, self._assignment.at, day, self._disk)
        self._open[day] = file
        if len(self._open) > DAYS_OPEN_MAX:
            self._end(next(iter(self._open)))
        self._held_bytes += file.hold(batch)
        if self._held_bytes >= ROW_GROUP_BYTES or file.held_rows >= ROW_GROUP_ROWS:
            largest = max(self._open, key=lambda each: self._open[each].held_bytes)
            self._write(largest)

    def _write(self, day: int | None) -> None:
        file = self._open[day]
        self._held_bytes -= file.held_bytes
        file.write_row_group()
        # Ahead of the last one, for which the task must wait.
        self._synced.append(self._syncing.submit(self._disk.sync, file.temporary))
        if file.size >= self._settings.file_bytes and not self._is_nearly_done(file):
            self._end(day)

    def _is_nearly_done(self, file: _OpenFile) -> bool:
        """Whether what is left would make a small file of its own; then it goes into this one."""
        left = (self._assignment.end - file.end) * file.size / max(1, file.end - file.start)
        return left < self._settings.file_bytes / 2

    def _end(self, day: int | None) -> None:
        file = self._open.pop(day)
        self._held_bytes -= file.held_bytes
        file.close()
        self._published.append(self._syncing.submit(file.publish))


class _OpenFile:
    """A Parquet file that is being written, under a hidden name."""

    def __init__(self, settings: WriteSettings, at: ArchivedPartition, day: int | None, disk: Disk) -> None:
        self._settings = settings
        self._at = at
        self._date = None if day is None else date_of(day)
        self._disk = disk
        root = Path(settings.root)
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is missing here; driver and executors must share it")
        self._directory = make_directories(disk, root, directory_of(at.topic, self._date))
        name = f"{at.topic_id}-{at.partition:05d}-{0:020d}-{0:020d}-{settings.batch_token}.parquet"
        self.temporary = self._directory / temporary_name(name)
        self._sink = pa.OSFile(str(self.temporary), "wb")
        columns = file_schema(settings.read.headers, settings.value_schema)
        dictionary = pa.dictionary(pa.int32(), pa.string())
        schema = columns.set(columns.get_field_index("topic"), pa.field("topic", dictionary))
        self._writer = pq.ParquetWriter(self._sink, schema, **writer_options(columns))
        # What waits for its row group.
        self._held: list[pa.RecordBatch] = []
        self.held_rows = 0
        self.held_bytes = 0
        # What has been added, held or written.
        self.start = -1
        self.end = -1
        self._records = 0
        self._timestamps: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return int(self._sink.tell())

    def hold(self, batch: pa.RecordBatch) -> int:
        """How much memory it takes."""
        offsets = batch.column("offset")
        if self.start < 0:
            self.start = offsets[0].as_py()
        self.end = offsets[-1].as_py() + 1
        self._records += batch.num_rows
        bounds = pc.min_max(batch.column("timestamp").view(pa.int64())).as_py()
        self._timestamps.append((bounds["min"], bounds["max"]))
        self._held.append(batch)
        self.held_rows += batch.num_rows
        size = int(batch.nbytes)
        self.held_bytes += size
        return size

    def write_row_group(self) -> None:
        if self._held:
            table = _with_one_topic(pa.Table.from_batches(self._held), self._at.topic)
            self._writer.write_table(table, row_group_size=self.held_rows)
            self._held.clear()
            self.held_rows = self.held_bytes = 0

    def close(self) -> None:
        self.write_row_group()
        self._writer.close()
        self._sink.close()

    def publish(self) -> DataFile:
        path = file_path(
            self._at, self.start, self.end, date=self._date, batch_token=self._settings.batch_token
        )
        final = Path(self._settings.root) / path
        try:
            publish(self._disk, self.temporary, final)
        except FileExistsError:
            # Another attempt at the same assignment wrote it; the same name means the same records. That attempt
            # may have died before it made the name durable.
            self._disk.sync_directory(final.parent)
            self._disk.unlink(self.temporary)
        return DataFile(
            path,
            *self._at,
            start=self.start,
            end=self.end,
            records=self._records,
            bytes=final.stat().st_size,
            timestamp_min_us=min(low for low, _ in self._timestamps),
            timestamp_max_us=max(high for _, high in self._timestamps),
            date=self._date,
        )

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
            self._sink.close()
        self._disk.unlink(self.temporary)


def date_of(day: int) -> str:
    """A day since 1970 as the name of its directory."""
    return date.fromordinal(day + _EPOCH).isoformat() if DAY_MIN <= day <= DAY_MAX else NO_DATE


# These grow steadily, so their differences are stored.
_DIFFERENCES: Final = {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"}
# The same in every row of a file, mostly: compression alone makes nothing of them, and is faster.
_CONSTANT: Final = frozenset(("partition", "timestampType"))
# Neither dictionaries pay here (values rarely repeat) nor statistics (no one filters by them).
_PLAIN: Final = frozenset(("key", "value", "headers"))


def statistics_of(columns: pa.Schema) -> list[str]:
    return [each.name for each in columns if each.name not in _PLAIN and not pa.types.is_nested(each.type)]


def writer_options(columns: pa.Schema) -> dict[str, object]:
    """Fast, and small where it costs little."""
    repeated = [name for name in statistics_of(columns) if name not in _DIFFERENCES and name not in _CONSTANT]
    if "headers" in columns.names:
        repeated.append("headers.list.element.key")
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": repeated,
        "column_encoding": _DIFFERENCES,
        "write_statistics": statistics_of(columns),
        # Arrow's stored schema would make readers build dictionaries for columns that we pass as dictionaries.
        "store_schema": False,
    }


def _with_one_topic(table: pa.Table, topic: str) -> pa.Table:
    """The topic as a dictionary of one, which Parquet takes as it is instead of looking at every row."""
    numbers = pa.array(np.zeros(table.num_rows, np.int32))
    column = pa.DictionaryArray.from_arrays(numbers, pa.array([topic]))
    return table.set_column(table.schema.get_field_index("topic"), "topic", column)


def parquet_bytes(records: pa.RecordBatch) -> int:
    """What records would take in a file, to judge ranges by."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, records.schema, **writer_options(records.schema)) as writer:
        writer.write_batch(records)
    return int(sink.getvalue().size)


# What Spark calls in a worker, for each row: the number of what to do.


def archive_task(settings: WriteSettings, bins: Sequence[Sequence[Assignment]]) -> Task:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for assignment in bins[number]:
                    yield _answer(_tried(settings, assignment))

    return task


def merge_task(settings: WriteSettings, runs: Sequence[Sequence[DataFile]]) -> Task:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield _answer(merge(settings, runs[number]))

    return task


def _tried(settings: WriteSettings, assignment: Assignment) -> Written:
    try:
        return archive_range(settings, assignment)
    except (WireError, CorruptBatch, OSError) as error:
        # Trying again at once would not help, and the driver says it in one line.
        return Written(error=f"{assignment.at} [{assignment.start}, {assignment.end}): {error}")


def _answer(written: Written) -> pa.RecordBatch:
    return pa.record_batch([pa.array([written.to_json()], pa.string())], names=["written"])
