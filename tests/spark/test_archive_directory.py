"""The directory of a Parquet archive, as Polars and others read it: the current files, and no other file.

Polars takes every file below a directory for part of a table, hidden ones too, so all files are compared here, by
whatever name.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs import archive_files
from penstock.spark.jobs.tables import format_at, left_over, open_table
from penstock.spark.jobs.tables.disk import Disk
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.layout import beside, inside
from penstock.spark.jobs.tables.manifest import ManifestTable
from penstock.spark.jobs.tables.state import Change, CommitConflict, Span, State, new_state, temporary_name
from tests.spark.tables import AT, SHAPE, Crash, CrashingDisk, shown, step, write


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def in_directory(location: Path) -> list[int]:
    """The records that a reader of the directory finds."""
    return sorted(ds.dataset(location, partitioning="hive").to_table().column("offset").to_pylist())


def in_files(location: Path) -> list[int]:
    """The records that a reader of the manifest finds."""
    return sorted(
        offset
        for file in archive_files(location)
        for offset in pq.ParquetFile(file).read(["offset"])["offset"].to_pylist()
    )


def merge(table: ManifestTable, state: State) -> State:
    end = state.spans[AT].end
    return table.commit(state, Change(added=(write(table.root, 0, end),), removed=state.files))


def earlier_archive(location: Path) -> State:
    """An archive as earlier versions left it: everything in its directory, and not only current files."""
    location.mkdir()
    state, now_ms = new_state(SHAPE), time.time_ns() // 1_000_000
    for _ in range(3):
        state = state.after(step(location, state, 3), wall_ms=now_ms)
    state = state.after(Change(added=(write(location, 0, 9),), removed=state.files), wall_ms=now_ms)
    state = state.after(step(location, state, 3), wall_ms=now_ms)
    inside(location).mkdir()
    (inside(location) / f"{state.batch:020d}.json").write_text(state.to_json(files=True))
    orphan = location / write(location, 12, 15).path
    (orphan.parent / temporary_name(orphan.name)).write_bytes(b"PAR1")
    return state


class Interrupted(Disk):
    """Once, before its first link to a data file below a directory, something else happens."""

    def __init__(self, where: Path, happens: Callable[[], object]) -> None:
        self._where = where
        self._happens = [happens]

    def link(self, existing: Path, name: Path) -> None:
        if self._happens and self._where in name.parents and name.suffix == ".parquet":
            self._happens.pop()()
        super().link(existing, name)


class Mounted(Disk):
    """The location is a mount point: nothing can be moved or linked out of it."""

    def rename(self, existing: Path, name: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_the_directory_has_the_current_files_and_no_other(location: Path) -> None:
    table = ManifestTable(location)
    state = table.create(SHAPE)
    assert shown(location) == set()
    for number in range(1, 4):
        orphan = table.root / write(table.root, 0, 1).path
        (orphan.parent / temporary_name(orphan.name)).write_bytes(b"never finished")
        state = table.commit(state, step(table.root, state, 5, date=f"2026-11-1{number % 2}"))
        assert in_directory(location) == list(range(5 * number))
        assert shown(location) == {each.path for each in state.files}
    seen = archive_files(location)
    state = merge(table, state)
    assert len(state.files) == 1
    assert shown(location) == {each.path for each in state.files}
    assert in_directory(location) == in_files(location) == list(range(15))
    # Whoever has listed the files before goes on reading them.
    assert sum(pq.ParquetFile(each).metadata.num_rows for each in seen) == 15


def test_a_file_of_somebody_else_stays_in_the_directory(location: Path) -> None:
    table = ManifestTable(location)
    state = table.commit(base := table.create(SHAPE), step(table.root, base, 3))
    note = location / Path(state.files[0].path).parent / "note.txt"
    note.write_text("keep me")
    state = merge(table, state)
    table.settle(state)
    assert shown(location) == {state.files[0].path, str(note.relative_to(location))}


def test_a_directory_that_was_deleted_is_filled_again(location: Path) -> None:
    table = ManifestTable(location)
    state = table.commit(base := table.create(SHAPE), step(table.root, base, 3))
    location.rename(location.with_name("elsewhere"))
    assert format_at(location) == "parquet"
    again = ManifestTable(location)
    assert again.load() == state
    again.settle(state)
    assert in_directory(location) == [0, 1, 2]


def test_a_link_to_the_directory_is_the_same_archive(location: Path, tmp_path: Path) -> None:
    table = ManifestTable(location)
    state = table.commit(base := table.create(SHAPE), step(table.root, base, 3))
    (tmp_path / "link").symlink_to(location)
    linked = ManifestTable(tmp_path / "link")
    assert linked.load() == state
    linked.commit(state, step(linked.root, state, 3))
    assert in_directory(location) == list(range(6))


def test_an_archiver_that_is_overtaken_before_it_shows_its_commit_shows_the_newest(location: Path) -> None:
    table = ManifestTable(location)
    state = table.commit(base := table.create(SHAPE), step(table.root, base, 3))

    def overtake() -> None:
        other = ManifestTable(location)
        newest = other.load()
        assert newest is not None and newest.batch == 2, "it was not interrupted behind its commit"
        merge(other, newest)

    slow = ManifestTable(location, Interrupted(location, overtake))
    slow.commit(state, step(slow.root, state, 3))
    found = table.load()
    assert found is not None and found.batch == 3
    assert shown(location) == {each.path for each in found.files}
    assert in_directory(location) == in_files(location) == list(range(6))


def test_the_name_of_an_archives_own_files_is_refused_for_another(location: Path) -> None:
    ManifestTable(location).create(SHAPE)
    for name in ("archive.penstock", "another.penstock"):
        with pytest.raises(SparkOptionError, match=rf"{name} has a name for the files of an archive"):
            open_table(location.with_name(name), "parquet")


# Archives of earlier versions


def test_an_earlier_archive_is_read_where_it_is(location: Path) -> None:
    state = earlier_archive(location)
    assert format_at(location) == "parquet"
    assert ManifestTable(location).load() == state
    assert in_files(location) == list(range(12))
    assert all(Path(each).is_relative_to(location) for each in archive_files(location))


def test_an_earlier_archive_is_moved_by_the_next_run_wherever_it_is_killed(tmp_path: Path) -> None:
    def run(location: Path, disk: Disk) -> ManifestTable:
        table = ManifestTable(location, disk)
        table.move_beside()
        state = table.load()
        assert state is not None
        table.settle(state)
        return table

    earlier_archive(tmp_path / "whole")
    counting = CrashingDisk()
    run(tmp_path / "whole", counting)
    assert counting.steps > 20
    places = set()
    for steps in range(counting.steps):
        location = tmp_path / f"after-{steps}"
        before = earlier_archive(location)
        with pytest.raises(Crash):
            run(location, CrashingDisk(steps))
        reader = ManifestTable(location)
        assert reader.load() == before
        places.add(reader.root.name)
        assert in_files(location) == list(range(12))
        table = run(location, Disk())
        assert table.root == beside(location) / "files"
        assert shown(location) == {each.path for each in before.files}
        assert sorted(os.listdir(location)) == [f"topic={AT.topic}"]
        # What was replaced is kept for those that read it, and what was never committed is gone.
        assert shown(table.root) == {path for path, _ in before.retired} | shown(location)
        state = table.commit(before, step(table.root, before, 3))
        assert state.spans == {AT: Span(0, 15)}
        assert in_directory(location) == in_files(location) == list(range(15))
        assert left_over(table, state) == []
        assert {each.suffix for each in beside(location).iterdir()} == {"", ".json"}
    assert "files" in places and len(places) > 1, "no crash came before, or none after the move"


def test_archivers_that_move_an_earlier_archive_at_once_help_each_other(location: Path) -> None:
    before = earlier_archive(location)
    ManifestTable(location).move_beside()

    def overtake() -> None:
        other = ManifestTable(location)
        other.settle(before)
        other.commit(before, step(other.root, before, 3))

    slow = ManifestTable(location, Interrupted(beside(location), overtake))
    assert slow.load() == before
    slow.settle(before)
    assert in_directory(location) == in_files(location) == list(range(15))
    assert slow.root == beside(location) / "files"
    assert not [each for each in beside(location).iterdir() if each.name.endswith(".tmp")]


def test_an_archiver_whose_archive_is_moved_meanwhile_commits_nothing_and_finds_it(location: Path) -> None:
    before = earlier_archive(location)
    table = ManifestTable(location)
    change = step(table.root, before, 3)
    other = ManifestTable(location)
    other.move_beside()
    with pytest.raises(CommitConflict, match="were moved"):
        table.commit(before, change)
    assert table.load() == before
    table.settle(before)
    assert shown(location) == {each.path for each in before.files}
    table.commit(before, step(table.root, before, 3))
    assert in_directory(location) == list(range(15))


def test_an_archive_at_a_mount_point_goes_on_as_it_is(
    location: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = earlier_archive(location)
    made = tmp_path / "made"
    table = ManifestTable(made, Mounted())
    with caplog.at_level(logging.WARNING):
        ManifestTable(location, Mounted()).move_beside()
        state = table.create(SHAPE)
    assert caplog.text.count("can have nothing beside it (Invalid cross-device link)") == 2
    for where, base in ((location, before), (made, state)):
        table = ManifestTable(where, Mounted())
        assert (table.load(), table.root, format_at(where)) == (base, where, "parquet")
        table.settle(base)
        table.commit(base, step(table.root, base, 3))
        end = base.spans.get(AT, Span(0, 0)).end + 3
        assert in_files(where) == list(range(end))
        assert not beside(where).exists()
    assert shown(made) == {f"_penstock/{0:020d}.json", f"_penstock/{1:020d}.json"} | {
        str(Path(each).relative_to(made)) for each in archive_files(made)
    }


def test_two_tables_of_one_directory_are_an_error(location: Path) -> None:
    """As when an earlier version created its own, because it found no manifests inside."""
    table = ManifestTable(location)
    table.create(SHAPE)
    inside(location).mkdir()
    (inside(location) / f"{0:020d}.json").write_text(new_state(SHAPE).to_json(files=True))
    with pytest.raises(TableError, match=rf"{location} has two tables.*move one of them away"):
        table.load()
