"""What a task of the archive writes, against a real broker and without Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spark.jobs.tables import writing
from penstock.spark.jobs.tables.disk import Disk
from penstock.spark.jobs.tables.state import NO_DATE, ArchivedPartition, Gap, is_ours
from penstock.spark.jobs.tables.writing import Assignment, WriteSettings, Written, archive_range, merge
from penstock.spark.reading import ReadSettings
from penstock.wire import Client
from tests.spark.tables import Crash, CrashingDisk
from tests.spark.topics import Topics

DAY_MS = 86_400_000
MIDNIGHT_MS = 1_794_787_200_000  # 2026-11-16


@pytest.fixture
def settings(bootstrap: str, tmp_path: Path) -> WriteSettings:
    read = ReadSettings(bootstrap, headers=True, read_committed=True, rows_max=1000)
    return WriteSettings(str(tmp_path), "0" * 12, read, True, None, 256 * 2**20, True)


@pytest.fixture
def place(bootstrap: str, topics: Topics, unique: Callable[[str], str]) -> ArchivedPartition:
    # Any timestamp is taken, and kept.
    anytime = {"message.timestamp.after.max.ms": str(2**63 - 1), "retention.ms": "-1"}
    topic = topics.create(unique("archived"), 1, configs=anytime)
    with Client(bootstrap) as client:
        return ArchivedPartition(topic, client.topics([topic])[topic].topic_id.hex(), 0)


def rows(location: Path | str, written: Written) -> list[dict[str, Any]]:
    tables = [pq.ParquetFile(Path(location) / each.path).read() for each in written.files]
    return sorted(pa.concat_tables(tables).to_pylist(), key=lambda row: row["offset"])


def names(location: Path) -> list[str]:
    return sorted(each.name for each in location.rglob("*") if each.is_file())


def test_records_keep_all_they_had(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(
        place.topic,
        [b"one", None, b""],
        keys=[b"k", None, b""],
        headers=[("h", b"\x00\xff"), ("h", None)],
        timestamp_ms=MIDNIGHT_MS,
    )
    topics.send(place.topic, [b"bare"], timestamp_ms=MIDNIGHT_MS + 1)
    written = archive_range(settings, Assignment(place, 0, 4))
    assert written.error is None
    assert [(each.start, each.end, each.records, each.date) for each in written.files] == [
        (0, 4, 4, "2026-11-16")
    ]
    found = rows(tmp_path, written)
    assert [row["value"] for row in found] == [b"one", None, b"", b"bare"]
    assert [row["key"] for row in found] == [b"k", None, b"", None]
    header = [{"key": "h", "value": b"\x00\xff"}, {"key": "h", "value": None}]
    assert [row["headers"] for row in found] == [header, header, header, None]
    assert {(row["topic"], row["partition"], row["timestampType"]) for row in found} == {(place.topic, 0, 0)}
    assert found[3]["timestamp"].isoformat() == "2026-11-16T00:00:00.001000+00:00"
    (file,) = written.files
    assert (file.timestamp_min_us, file.timestamp_max_us) == (MIDNIGHT_MS * 1000, (MIDNIGHT_MS + 1) * 1000)
    assert file.bytes == (tmp_path / file.path).stat().st_size


def test_records_are_parted_by_the_day_of_their_timestamp(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    moments = [0, DAY_MS, -1, 0, DAY_MS - 1, 2 * DAY_MS]
    for number, moment in enumerate(moments):
        topics.send(place.topic, [b"%d" % number], timestamp_ms=MIDNIGHT_MS + moment)
    written = archive_range(settings, Assignment(place, 0, 6))
    days = {
        each.date: pq.ParquetFile(tmp_path / each.path).read().column("offset").to_pylist()
        for each in written.files
    }
    assert days == {"2026-11-15": [2], "2026-11-16": [0, 3, 4], "2026-11-17": [1], "2026-11-18": [5]}
    for each in written.files:
        assert f"/date={each.date}/" in each.path
        assert (each.start, each.end) == (days[each.date][0], days[each.date][-1] + 1)
    whole = dataclasses.replace(settings, by_date=False, batch_token="1" * 12)
    (single,) = archive_range(whole, Assignment(place, 0, 6)).files
    assert single.date is None
    assert single.path.startswith(f"topic={place.topic}/{place.topic_id}-00000-")


def test_a_clock_that_runs_wild_costs_small_files_and_no_records(
    settings: WriteSettings,
    place: ArchivedPartition,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "DAYS_OPEN_MAX", 3)
    # The last is beyond the year 9999, where calendars and Spark end.
    moments = [number % 7 * DAY_MS for number in range(50)] + [300_000_000_000_000 - MIDNIGHT_MS]
    for number, moment in enumerate(moments):
        topics.send(place.topic, [b"%d" % number], timestamp_ms=MIDNIGHT_MS + moment)
    written = archive_range(dataclasses.replace(settings, read=_small(settings)), Assignment(place, 0, 51))
    assert len(written.files) > 8, "no file was ended early"
    assert len({each.path for each in written.files}) == len(written.files)
    found: list[int] = []
    for each in written.files:
        found += pq.ParquetFile(tmp_path / each.path).read(["offset"]).column("offset").to_pylist()
    assert sorted(found) == list(range(51))
    assert {each.date for each in written.files} == {f"2026-11-{day}" for day in range(16, 23)} | {NO_DATE}


def _small(settings: WriteSettings) -> ReadSettings:
    return dataclasses.replace(settings.read, rows_max=5)


def test_a_file_is_ended_at_its_size_and_no_small_one_is_left_behind(
    settings: WriteSettings,
    place: ArchivedPartition,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 100_000)
    values = [os.urandom(500) for _ in range(4000)]
    topics.send(place.topic, values, timestamp_ms=MIDNIGHT_MS)
    sized = dataclasses.replace(
        settings, file_bytes=600_000, read=dataclasses.replace(settings.read, rows_max=50)
    )
    written = archive_range(sized, Assignment(place, 0, 4000))
    assert len(written.files) == 3
    assert all(300_000 < each.bytes < 1_000_000 for each in written.files)
    assert [each.start for each in written.files[1:]] == [each.end for each in written.files[:-1]]
    assert [row["value"] for row in rows(tmp_path, written)] == values
    groups = pq.ParquetFile(tmp_path / written.files[0].path).metadata.num_row_groups
    assert 3 <= groups <= 10


def test_values_are_parsed_and_a_bad_one_says_why(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(place.topic, [b'{"id": 7, "name": "x"}', b"broken", None], timestamp_ms=MIDNIGHT_MS)
    parsed = dataclasses.replace(
        settings, value_schema=pa.schema([("id", pa.int64()), ("name", pa.string())])
    )
    first, second, third = rows(tmp_path, archive_range(parsed, Assignment(place, 0, 3)))
    assert (first["id"], first["name"], first["error"]) == (7, "x", None)
    assert (second["id"], second["value"]) == (None, b"broken")
    assert second["error"]
    assert (third["id"], third["value"], third["error"]) == (None, None, None)


def test_a_task_that_is_tried_again_makes_the_same_files(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(place.topic, [b"%d" % number for number in range(100)], timestamp_ms=MIDNIGHT_MS)
    first = archive_range(settings, Assignment(place, 0, 100))
    before = (tmp_path / first.files[0].path).stat()
    assert archive_range(settings, Assignment(place, 0, 100)) == first
    assert (tmp_path / first.files[0].path).stat().st_ino == before.st_ino, "a file in use was replaced"
    assert names(tmp_path) == [Path(first.files[0].path).name]


def test_a_file_of_an_attempt_that_died_is_made_durable_before_it_counts(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(place.topic, [b"%d" % number for number in range(10)], timestamp_ms=MIDNIGHT_MS)
    taken: list[tuple[str, Path]] = []

    class Told(Disk):
        def sync_directory(self, path: Path) -> None:
            taken.append(("sync", path))

        def link(self, existing: Path, name: Path) -> None:
            taken.append(("link", name))
            super().link(existing, name)

    (file,) = archive_range(settings, Assignment(place, 0, 10)).files
    assert archive_range(settings, Assignment(place, 0, 10), Told()).files == (file,)
    path = tmp_path / file.path
    # The first attempt may have been killed between the two: the name is there, and lost with the power.
    assert taken[-2:] == [("link", path), ("sync", path.parent)]


def test_a_task_that_dies_after_any_step_leaves_whole_files_or_hidden_ones(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(place.topic, [b"%d" % number for number in range(20)], timestamp_ms=MIDNIGHT_MS)
    topics.send(place.topic, [b"%d" % number for number in range(20)], timestamp_ms=MIDNIGHT_MS + DAY_MS)
    assignment = Assignment(place, 0, 40)

    steps = 0
    while True:
        location = tmp_path / f"after-{steps}"
        location.mkdir()
        here = dataclasses.replace(settings, root=str(location))
        try:
            archive_range(here, assignment, CrashingDisk(steps))
            break
        except Crash:
            pass
        for each in location.rglob("*"):
            if each.is_file():
                assert is_ours(each.name)
                if not each.name.startswith("."):
                    assert pq.ParquetFile(each).metadata.num_rows == 20
        again = archive_range(here, assignment)
        assert [row["offset"] for row in rows(location, again)] == list(range(40))
        steps += 1
    assert steps >= 12


def test_retention_in_the_middle_of_a_range_is_an_error_or_a_gap(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(place.topic, [b"%d" % number for number in range(30)], timestamp_ms=MIDNIGHT_MS)
    topics.delete_records(place.topic, 0, 12)
    failed = archive_range(settings, Assignment(place, 5, 30))
    assert failed.is_loss
    assert failed.error is not None
    assert "[5, 12)" in failed.error
    assert names(tmp_path) == []
    lenient = dataclasses.replace(settings, fail_on_data_loss=False)
    written = archive_range(lenient, Assignment(place, 5, 30))
    assert written.gaps == (Gap(*place, 5, 12, "retention"),)
    assert [row["offset"] for row in rows(tmp_path, written)] == list(range(12, 30))
    topics.delete_records(place.topic, 0, 30)
    written = archive_range(lenient, Assignment(place, 5, 30))
    assert (written.files, written.gaps) == ((), (Gap(*place, 5, 30, "retention"),))


def test_small_files_become_one_with_the_same_records(
    settings: WriteSettings, place: ArchivedPartition, topics: Topics, tmp_path: Path
) -> None:
    topics.send(
        place.topic,
        [b'{"id": %d}' % number for number in range(90)],
        headers=[("a", b"b")],
        timestamp_ms=MIDNIGHT_MS,
    )
    parsed = dataclasses.replace(settings, value_schema=pa.schema([("id", pa.int64())]))
    small = [
        file
        for start in range(0, 90, 30)
        for file in archive_range(parsed, Assignment(place, start, start + 30)).files
    ]
    merged = merge(dataclasses.replace(parsed, batch_token="1" * 12), small)
    assert [(each.start, each.end, each.records) for each in merged.files] == [(0, 90, 90)]
    assert rows(tmp_path, merged) == rows(tmp_path, Written(tuple(small)))
    assert pq.ParquetFile(tmp_path / merged.files[0].path).metadata.num_row_groups == 1
