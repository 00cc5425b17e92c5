"""The archive job on Spark: what it leaves in the table, run after run, and what it says when something is gone."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import archive, archive_files
from penstock.spark.jobs.archive import ArchiveFailed, ArchiveResult, _Archive
from penstock.spark.jobs.tables import FORMATS, format_at, open_table
from penstock.spark.jobs.tables.layout import beside
from penstock.spark.jobs.tables.manifest import ManifestTable
from penstock.spark.jobs.tables.state import Change, CommitConflict, Span, State
from tests.spark.tables import shown
from tests.spark.topics import Topics
from tests.support import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Archiving = Callable[..., ArchiveResult]

DEADLINE_S = 60.0
AT_END = Span(0, 20)


def state_of(location: Path) -> State:
    held = format_at(location)
    assert held is not None
    state = open_table(location, held).load()
    assert state is not None
    return state


def archived(location: Path) -> dict[tuple[str, str, int], dict[int, bytes | None]]:
    """Values by life, partition and offset, from the files that the table lists; an offset twice is an error."""
    found: dict[tuple[str, str, int], dict[int, bytes | None]] = {}
    for each in state_of(location).files:
        table = pq.ParquetFile(location / each.path).read(["topic", "partition", "offset", "value"])
        for row in table.to_pylist():
            values = found.setdefault((row["topic"], each.topic_id, row["partition"]), {})
            assert row["offset"] not in values, f"{each.path} repeats offset {row['offset']}"
            values[row["offset"]] = row["value"]
    return {key: dict(sorted(values.items())) for key, values in found.items()}


def numbered(start: int, end: int) -> list[bytes]:
    return [b"value %d" % number for number in range(start, end)]


@pytest.fixture
def topic(topics: Topics, unique: Callable[[str], str]) -> str:
    return topics.create(unique("archived"), 2)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "archive [1] {a}*? 100% \u00fc"  # no character of a path may mean anything


@pytest.fixture
def archive_it(spark: SparkSession, bootstrap: str, topic: str, location: Path) -> Archiving:
    """Archives the topic into the location, with whatever else is given."""
    return partial(archive, spark, bootstrap, topic, location)


@pytest.mark.parametrize("format", FORMATS)
def test_each_run_archives_what_came_since_the_last(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path, format: str
) -> None:
    location = tmp_path / "archive"
    told: list[tuple[int, int]] = []

    def run() -> ArchiveResult:
        return archive(
            spark,
            bootstrap,
            topic,
            location,
            format=format,
            progress=lambda done, total: told.append((done, total)),
        )

    topics.send(topic, numbered(0, 100), partition=0)
    topics.send(topic, numbered(0, 30), partition=1)
    first = run()
    assert (first.records, first.files, first.batches, first.gaps) == (130, 2, 1, ())
    assert told[0] == (0, 130)
    assert told[-1] == (130, 130)
    topics.send(topic, numbered(100, 150), partition=0)
    second = run()
    assert (second.records, second.files, second.batches) == (50, 1, 1)
    columns, rows = second.as_table()
    assert columns == (
        "topic",
        "partition",
        "archived_from",
        "archived_to",
        "records",
        "bytes",
        "files",
        "lost",
    )
    assert [row[:5] + row[6:] for row in rows] == [(topic, 0, 0, 150, 50, 1, 0), (topic, 1, 0, 30, 0, 0, 0)]
    third = run()
    assert (third.records, third.batches) == (0, 0)
    (key, zero), (_, one) = sorted(archived(location).items())
    assert key[0] == topic
    assert list(zero.values()) == numbered(0, 150)
    assert list(one.values()) == numbered(0, 30)
    if format == "parquet":
        # As it is: nothing but the current files, which Spark takes for one table too.
        assert shown(location) == {each.path for each in state_of(location).files}
        frame = spark.read.parquet(str(location))
        assert frame.where(frame.topic == topic).count() == frame.count() == 180


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_the_files_of_an_archive_hold_each_record_once_whatever_else_lies_there(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, format: str
) -> None:
    with pytest.raises(SparkOptionError, match="there is no archive at"):
        archive_files(location)
    for start in (0, 10):
        topics.send(topic, numbered(start, start + 10), partition=0)
        archive_it(format=format)
    files = archive_files(location)
    assert files and archive_files(location, topic) == files and archive_files(location, "other") == []
    # One that no commit has made part of the table.
    shutil.copy(files[0], f"{files[0].removesuffix('.parquet')}-copy.parquet")
    assert archive_files(location) == files
    values = [value for file in files for value in pq.ParquetFile(file).read(["value"])["value"].to_pylist()]
    assert sorted(values) == sorted(numbered(0, 20))


def test_an_empty_topic_makes_an_empty_table_and_a_grown_one_is_followed(
    spark: SparkSession,
    bootstrap: str,
    topics: Topics,
    topic: str,
    unique: Callable[[str], str],
    location: Path,
) -> None:
    empty = archive(spark, bootstrap, [topic], location)
    assert (empty.records, empty.files) == (0, 0)
    assert [(each.start, each.end) for each in empty.partitions] == [(0, 0), (0, 0)]
    topics.grow(topic, 3)
    topics.send(topic, numbered(0, 10), partition=2)
    other = topics.create(unique("other"), 1)
    topics.send(other, numbered(0, 5))
    result = archive(spark, bootstrap, [topic, other], location)
    assert {(each.topic, each.partition): each.end for each in result.partitions} == {
        (topic, 0): 0,
        (topic, 1): 0,
        (topic, 2): 10,
        (other, 0): 5,
    }
    assert sorted(len(values) for values in archived(location).values()) == [5, 10]


def test_values_become_columns_and_a_bad_one_stops_nothing(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, [b'{"id": 1}', b"\xff\xfe", b'{"id": "no"}', None])
    archive_it(value_schema="id BIGINT, at TIMESTAMP", headers=False)
    (file,) = state_of(location).files
    rows = pq.ParquetFile(location / file.path).read().to_pylist()
    assert [row["id"] for row in rows] == [1, None, None, None]
    assert [row["error"] is None for row in rows] == [True, False, False, True]
    assert [row["value"] for row in rows] == [b'{"id": 1}', b"\xff\xfe", b'{"id": "no"}', None]
    with pytest.raises(SparkOptionError, match=r"was created with value_schema .id bigint.*, not without"):
        archive_it(headers=False)
    with pytest.raises(SparkOptionError, match="was created without headers, not with headers"):
        archive_it(value_schema="id BIGINT, at TIMESTAMP")


def test_retention_that_was_faster_is_an_error_or_a_gap(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, numbered(0, 10))
    archive_it()
    topics.send(topic, numbered(10, 30))
    topics.delete_records(topic, 0, 25)
    with pytest.raises(DataLossError, match=rf"{topic}-0 \[10, 25\) by retention.*fail_on_data_loss"):
        archive_it()
    result = archive_it(fail_on_data_loss=False)
    assert [(each.start, each.end, each.reason) for each in result.gaps] == [(10, 25, "retention")]
    assert result.as_table()[1][0][-1] == 15
    (values,) = archived(location).values()
    assert list(values) == [*range(10), *range(25, 30)]
    # It is history now: the next run has nothing to complain of.
    topics.send(topic, numbered(30, 31))
    assert archive_it().records == 1


def test_a_topic_that_was_made_again_is_another_one(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, numbered(0, 10))
    archive_it()
    topics.send(topic, numbered(10, 20))
    topics.delete_records(topic, 0, 15)
    result = archive_it(fail_on_data_loss=False)
    assert [each.lost for each in result.partitions] == [5, 0]
    topics.delete(topic)
    topics.create(topic, 2)
    topics.send(topic, [b"of the new one"])
    with pytest.raises(DataLossError, match="deleted and recreated"):
        archive_it()
    result = archive_it(fail_on_data_loss=False)
    assert {each.reason for each in result.gaps} == {"retention", "recreated"}
    assert [(each.start, each.end, each.lost) for each in result.partitions] == [(0, 1, 0), (0, 0, 0)]
    assert sorted(map(len, archived(location).values())) == [1, 15]
    assert len(state_of(location).lives(topic)) == 2
    assert archive_it().records == 0


def test_a_topic_that_is_made_again_while_it_is_archived_ends_nothing_if_losses_are_allowed(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.send(topic, numbered(0, 10))
    archive_it()
    topics.send(topic, numbered(10, 20))
    run = _Archive._run

    def run_too_late(archiver: _Archive, task: Any, count: int) -> Any:
        monkeypatch.undo()
        topics.delete(topic)
        topics.create(topic, 2)
        topics.send(topic, numbered(0, 30))
        return run(archiver, task, count)

    monkeypatch.setattr(_Archive, "_run", run_too_late)
    result = archive_it(fail_on_data_loss=False)
    assert {each.reason for each in result.gaps} == {"recreated"}
    assert sorted(map(len, archived(location).values())) == [10, 30]


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_an_archive_that_goes_on_keeps_up_and_leaves_no_small_files(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, format: str
) -> None:
    stop, results = threading.Event(), []

    def go_on() -> None:
        results.append(archive_it(format=format, every_seconds=0.01, stop=stop))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for number in range(10):
            topics.send(topic, numbered(number * 10, number * 10 + 10))
            wait_until(
                partial(_ends_at, location, topic, number * 10 + 10), DEADLINE_S, "the archive keeps up"
            )
    finally:
        stop.set()
        thread.join()
    (result,) = results
    assert (result.records, result.files) == (100, 10)
    assert result.batches > 10, "nothing was merged"
    (values,) = archived(location).values()
    assert list(values.values()) == numbered(0, 100)
    files = state_of(location).files
    assert len(files) <= 3
    assert max(each.records for each in files) >= 80


def _ends_at(location: Path, topic: str, offset: int) -> bool:
    return _end(location, topic) == offset


def _end(location: Path, topic: str) -> int:
    if format_at(location) is None:
        return 0
    state = open_table(location, format_at(location) or "").load()
    spans = {} if state is None else {at: span for at, span in state.spans.items() if at.topic == topic}
    return max((span.end for span in spans.values()), default=0)


def test_two_archivers_of_one_table_never_repeat_a_record(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, numbered(0, 500), partition=0)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(2):
                archive_it()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    topics.send(topic, numbered(0, 500), partition=1)
    for each in threads:
        each.join()
    assert not failures, failures
    archive_it()
    for values in archived(location).values():
        assert list(values.values()) == numbered(0, 500)
    current = {each.path for each in state_of(location).files}
    assert shown(location) == shown(open_table(location, "parquet").root) == current, "files were left behind"


def test_what_another_archiver_committed_meanwhile_is_not_taken_for_left_over(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are there when the directory is listed, and not in the state that was read before."""
    topics.send(topic, numbered(0, 10))
    archive_it()
    topics.send(topic, numbered(10, 20))
    load, looks = ManifestTable.load, []

    def load_and_be_overtaken(table: ManifestTable) -> State | None:
        state = load(table)
        looks.append(state)
        if len(looks) == 1:
            archive_it()
            topics.send(topic, numbered(20, 30))
        return state

    monkeypatch.setattr(ManifestTable, "load", load_and_be_overtaken)
    archive_it()
    monkeypatch.undo()
    (values,) = archived(location).values()
    assert list(values.values()) == numbered(0, 30)


def test_what_a_dead_archiver_left_is_deleted_by_the_next(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, numbered(0, 10))
    archive_it()
    (file,) = state_of(location).files
    root = open_table(location, "parquet").root
    orphan = root / file.path.replace(f"{file.start:020d}", f"{file.start + 1:020d}")
    orphan.write_bytes(b"never committed")
    hidden = orphan.parent / f".{orphan.name}.{'0' * 12}.tmp"
    hidden.write_bytes(b"never finished")
    foreign = orphan.parent / "notes.txt"
    foreign.write_text("not ours")
    assert archive_it().records == 0
    assert not orphan.exists()
    assert not hidden.exists()
    assert foreign.exists()
    assert len(archived(location)) == 1


def test_files_that_no_table_lists_are_refused_and_not_deleted(
    spark: SparkSession, bootstrap: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """As when a catalog is misspelt. A table made anew would take all of them for left over."""
    topics.send(topic, numbered(0, 10))
    location = tmp_path / "archive"
    archive(spark, bootstrap, topic, location)
    beside(location).rename(tmp_path / "manifests")
    for format in FORMATS:
        with pytest.raises(SparkOptionError, match=f"has files of an archive, but no {format} table"):
            archive(spark, bootstrap, topic, location, format=format)
    (tmp_path / "manifests").rename(beside(location))
    (values,) = archived(location).values()
    assert list(values.values()) == numbered(0, 10)


def test_a_commit_that_is_wrongly_taken_for_lost_keeps_its_files(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.send(topic, numbered(0, 10))
    commit = ManifestTable.commit
    doubted: list[State] = []

    def commit_and_doubt(table: ManifestTable, base: State, change: Change) -> State:
        state = commit(table, base, change)
        if not doubted:
            doubted.append(state)
            raise CommitConflict("a hundred others followed at once")
        return state

    monkeypatch.setattr(ManifestTable, "commit", commit_and_doubt)
    archive_it()
    (values,) = archived(location).values()
    assert list(values.values()) == numbered(0, 10)


def test_an_archive_that_is_told_to_stop_ends_behind_its_batch(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.send(topic, numbered(0, 10))
    monkeypatch.setattr(sys.modules["penstock.spark.jobs.archive"], "BATCH_FILES_PER_CORE", 1e-9)
    stop = threading.Event()
    result = archive_it(stop=stop, progress=lambda done, total: stop.set())
    assert (result.batches, 0 < result.records < 10) == (1, True)
    monkeypatch.undo()
    archive_it()
    (values,) = archived(location).values()
    assert list(values.values()) == numbered(0, 10)


def test_an_archive_that_goes_on_outlives_a_full_disk(
    archive_it: Archiving, topics: Topics, topic: str, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.send(topic, numbered(0, 10))
    commit, stop = ManifestTable.commit, threading.Event()
    met: list[Change] = []

    def commit_if_there_is_room(table: ManifestTable, base: State, change: Change) -> State:
        if AT_END in change.spans.values() and len(met) < 2:
            met.append(change)
            raise OSError(errno.ENOSPC, "No space left on device")
        state = commit(table, base, change)
        if AT_END in change.spans.values():
            stop.set()
        else:
            topics.send(topic, numbered(10, 20))
        return state

    monkeypatch.setattr(ManifestTable, "commit", commit_if_there_is_room)
    archive_it(every_seconds=0.01, stop=stop)
    assert len(met) == 2
    (values,) = archived(location).values()
    assert list(values.values()) == numbered(0, 20)


def test_a_worker_that_fails_again_and_again_is_told_in_one_line(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, numbered(0, 10))
    archive_it()
    topics.send(topic, numbered(10, 20))
    (file,) = state_of(location).files
    day = (open_table(location, "parquet").root / file.path).parent
    day.rename(day.with_name("elsewhere"))
    day.write_text("a file where a directory should be")
    with pytest.raises(ArchiveFailed, match=rf"{topic}-0 \[10, 20\): .*are kept") as told:
        archive_it()
    assert "\n" not in str(told.value)
    day.unlink()
    day.with_name("elsewhere").rename(day)
    assert archive_it().records == 10


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topics": []}, "at least one topic"),
        ({"topics": "no-such-topic"}, "topic no-such-topic does not exist"),
        ({"format": "csv"}, "parquet, delta, iceberg, not 'csv'"),
        ({"file_mb": 0}, "file_mb must be at least 1"),
        ({"every_seconds": 0}, "every_seconds must be more than 0"),
        ({"location": "s3://bucket/x"}, "location must be a directory"),
        ({"value_schema": "offset BIGINT"}, "a column offset already"),
        ({"value_schema": "date DATE"}, "a column date already"),
        ({"value_schema": "nonsense here now"}, "schema of the values"),
        ({"catalog": "a:b.c"}, "catalog is only for format iceberg"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_makes_no_table(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    location = tmp_path / "archive"
    arguments = {"topics": topic, "location": str(location), **given}
    with pytest.raises(SparkOptionError, match=said) as told:
        archive(spark, bootstrap, **arguments)
    assert "\n" not in str(told.value)
    assert not location.exists()


def test_files_are_compressed_and_typed_as_spark_expects(
    archive_it: Archiving, topics: Topics, topic: str, location: Path
) -> None:
    topics.send(topic, numbered(0, 1000), headers=[("a", b"b")], timestamp_ms=time.time_ns() // 1_000_000)
    archive_it(by_date=False)
    (file,) = state_of(location).files
    opened = pq.ParquetFile(location / file.path)
    assert opened.schema_arrow.field("timestamp").type == pa.timestamp("us", tz="UTC")
    columns = {
        opened.metadata.row_group(0).column(number).path_in_schema: opened.metadata.row_group(0).column(
            number
        )
        for number in range(opened.metadata.num_columns)
    }
    assert {each.compression for each in columns.values()} == {"ZSTD"}
    assert columns["offset"].statistics.max == 999
    assert columns["value"].statistics is None
    assert "RLE_DICTIONARY" in columns["topic"].encodings
    assert "RLE_DICTIONARY" not in columns["value"].encodings
