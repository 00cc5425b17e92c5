"""The archive's commit, without Spark and without brokers: it happens or it does not, wherever it is cut off.

Crashes are tried exhaustively, after every single step on the disk, and in two kinds: the process dies (what was
written stays), and the power fails (what was not synced may be gone, in every combination that counts).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables import FORMATS, format_at, left_over, open_table, resolve
from penstock.spark.jobs.tables.disk import Disk, make_directories, publish
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.manifest import MANIFESTS_KEPT, RETIRED_FOR_MS, ManifestTable
from penstock.spark.jobs.tables.state import (
    NO_DATE,
    ArchivedPartition,
    Change,
    CommitConflict,
    DataFile,
    Gap,
    Shape,
    Span,
    State,
    file_path,
    new_batch_token,
    temporary_name,
)
from penstock.spark.jobs.tables.writing import DAY_US
from penstock.spark.reading import schema as record_schema

SHAPE = Shape(by_date=True, headers=False, value_schema=None)
AT = ArchivedPartition("orders", "0123456789abcdef" * 2, 3)
DATE = "2026-11-16"
MIDNIGHT_US = 1_794_787_200_000_000
SCHEMA = record_schema(headers=False)


class Crash(BaseException):
    """Not an Exception: nobody may go on after it."""


class CrashingDisk(Disk):
    """A real disk whose process dies after so many steps that change something."""

    def __init__(self, steps_left: int = 10**9) -> None:
        self.steps_left = steps_left
        self.steps = 0

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self.steps_left:
            raise Crash

    def create(self, path: Path, data: bytes) -> None:
        self._step()
        super().create(path, data)

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)

    def link(self, existing: Path, name: Path) -> None:
        self._step()
        super().link(existing, name)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._step()
        super().make_directory(path)


class PowerDisk(Disk):
    """A disk in memory that forgets, when the power fails, what was not synced: names and contents apart.

    ``keeps`` decides for each thing that is not synced whether it happens to be on the disk already.
    """

    def __init__(self, steps_left: int = 10**9) -> None:
        self.steps_left = steps_left
        self._contents: dict[int, bytes] = {}
        self._durable_contents: dict[int, bytes] = {}
        self._names: dict[Path, int] = {}
        self._durable_names: dict[Path, int] = {}
        self._numbers = itertools.count()

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Crash

    def create(self, path: Path, data: bytes) -> None:
        self._step()
        if path in self._names:
            raise FileExistsError(path)
        self._names[path] = number = next(self._numbers)
        self._contents[number] = data

    def sync(self, path: Path) -> None:
        self._step()
        number = self._names[path]
        self._durable_contents[number] = self._contents[number]

    def sync_directory(self, path: Path) -> None:
        self._step()
        for name in [each for each in self._durable_names if each.parent == path and each not in self._names]:
            del self._durable_names[name]
        self._durable_names.update({name: n for name, n in self._names.items() if name.parent == path})

    def link(self, existing: Path, name: Path) -> None:
        self._step()
        if name in self._names:
            raise FileExistsError(name)
        self._names[name] = self._names[existing]

    def unlink(self, path: Path) -> None:
        self._step()
        self._names.pop(path, None)

    def make_directory(self, path: Path) -> None:
        self._step()

    def names(self, directory: Path) -> list[str]:
        return [each.name for each in self._names if each.parent == directory]

    def read(self, path: Path) -> bytes:
        return self._contents[self._names[path]]

    def fail(self, keeps: Callable[[str], bool]) -> None:
        """The power fails and comes back. ``keeps`` is asked for "names" and "contents"."""
        names = self._names if keeps("names") else self._durable_names
        contents = self._contents if keeps("contents") else self._durable_contents
        self._names = dict(names)
        # A file whose contents were never synced is there, and empty.
        self._contents = {number: contents.get(number, b"") for number in self._names.values()}
        self._durable_names, self._durable_contents = dict(self._names), dict(self._contents)
        self.steps_left = 10**9


def write(
    location: Path,
    start: int,
    end: int,
    *,
    batch_token: str | None = None,
    date: str = DATE,
    midnight_us: int = MIDNIGHT_US,
) -> DataFile:
    """A file as a task leaves it: complete and durable, committed by nobody."""
    path = file_path(AT, start, end, date=date, batch_token=batch_token or new_batch_token())
    make_directories(Disk(), location, str(Path(path).parent))
    count = end - start
    rows = {
        "key": pa.array([None] * count, pa.binary()),
        "value": pa.array([b"%d" % number for number in range(start, end)], pa.binary()),
        "topic": pa.array([AT.topic] * count),
        "partition": pa.array([AT.partition] * count, pa.int32()),
        "offset": pa.array(range(start, end), pa.int64()),
        "timestamp": pa.array(
            [midnight_us + number for number in range(start, end)], pa.timestamp("us", "UTC")
        ),
        "timestampType": pa.array([0] * count, pa.int32()),
    }
    final = location / path
    temporary = final.parent / temporary_name(final.name)
    pq.write_table(pa.table(rows, schema=SCHEMA), temporary)
    publish(Disk(), temporary, final)
    size = final.stat().st_size
    return DataFile(path, *AT, start, end, count, size, midnight_us + start, midnight_us + end - 1, date)


def step(location: Path, state: State, count: int, **given: Any) -> Change:
    """The next records of the partition, as a change to be committed."""
    begin = state.spans.get(AT, Span(0, 0)).end
    return Change({AT: Span(0, begin + count)}, (write(location, begin, begin + count, **given),))


def offsets(location: Path, state: State) -> list[int]:
    """Every record that the table has, as a reader would find it."""
    found: list[int] = []
    for each in state.files:
        found += pq.ParquetFile(location / each.path).read(["offset"]).column("offset").to_pylist()
    return sorted(found)


@pytest.fixture(params=FORMATS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """A handle to the table of this test, as another process would open it."""
    return lambda: open_table(tmp_path / "table", request.param, SCHEMA)


# All formats


def test_a_commit_is_there_for_the_next_who_looks(make: Callable[[], Any], tmp_path: Path) -> None:
    location = tmp_path / "table"
    table = make()
    assert table.load() is None
    state = table.create(SHAPE)
    assert make().load() == state
    for count in (5, 7):
        gap = Gap(*AT, 1, 2, "retention")
        change = step(location, state, count)
        state = table.commit(state, Change(change.spans, change.added, gaps=(gap,)))
    found = make().load()
    assert (found.archive_id, found.batch, found.shape) == (state.archive_id, 2, SHAPE)
    assert found.spans == {AT: Span(0, 12)}
    assert found.gaps == (Gap(*AT, 1, 2, "retention"),) * 2
    assert {each.path for each in found.files} == {each.path for each in state.files}
    assert sum(each.records for each in found.files) == 12
    assert offsets(location, found) == list(range(12))


def test_of_two_archivers_one_commits_and_the_other_is_told(make: Callable[[], Any], tmp_path: Path) -> None:
    location = tmp_path / "table"
    first, second = make(), make()
    base = first.create(SHAPE)
    won = first.commit(base, step(location, base, 5))
    with pytest.raises(CommitConflict):
        second.commit(base, step(location, base, 9))
    found = make().load()
    assert (found.batch, found.spans) == (won.batch, {AT: Span(0, 5)})
    assert offsets(location, found) == list(range(5))


def test_a_commit_without_files_shuts_out_those_that_were_planned_before_it(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    location = tmp_path / "table"
    first, second = make(), make()
    base = first.create(SHAPE)
    first.commit(base, Change())
    with pytest.raises(CommitConflict):
        second.commit(base, step(location, base, 3))
    assert make().load().files == ()


def test_archivers_that_find_no_table_at_once_make_one(make: Callable[[], Any]) -> None:
    begin, found = threading.Barrier(4), []

    def archive() -> None:
        table = make()
        begin.wait()
        try:
            found.append(table.create(SHAPE).archive_id)
        except CommitConflict:
            found.append(table.load().archive_id)

    threads = [threading.Thread(target=archive) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [make().load().archive_id] * 4


def test_many_archivers_at_once_never_lose_or_repeat_a_record(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    location = tmp_path / "table"
    make().create(SHAPE)
    failures: list[BaseException] = []

    def archive() -> None:
        try:
            table = make()
            for _ in range(4):
                state = table.load()
                try:
                    table.commit(state, step(location, state, 3))
                except CommitConflict:
                    continue
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=archive) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures, failures
    state = make().load()
    assert state.batch >= 4  # each thread's first commit, or one that it lost to
    assert state.spans[AT].end == 3 * state.batch
    assert offsets(location, state) == list(range(3 * state.batch))


def test_small_files_are_replaced_by_one_in_one_commit(make: Callable[[], Any], tmp_path: Path) -> None:
    location = tmp_path / "table"
    table = make()
    state = table.create(SHAPE)
    for _ in range(3):
        state = table.commit(state, step(location, state, 2))
    merged = write(location, 0, 6)
    state = table.commit(state, Change(added=(merged,), removed=state.files))
    found = make().load()
    assert [each.path for each in found.files] == [merged.path]
    assert found.spans == {AT: Span(0, 6)}
    assert offsets(location, found) == list(range(6))
    # Replaced files are nobody's left-overs: somebody may be reading them.
    assert left_over(table, found) == []


def test_what_nobody_committed_is_found_and_nothing_else(make: Callable[[], Any], tmp_path: Path) -> None:
    location = tmp_path / "table"
    table = make()
    state = table.create(SHAPE)
    state = table.commit(state, step(location, state, 5))
    orphan = location / write(location, 5, 9).path
    unfinished = orphan.parent / temporary_name(orphan.name)
    unfinished.write_bytes(b"PAR1")
    foreign = orphan.parent / "part-00000.parquet"
    foreign.write_bytes(b"somebody's")
    assert set(left_over(table, state)) == {orphan, unfinished}


def test_a_table_of_another_format_is_not_overwritten(make: Callable[[], Any], tmp_path: Path) -> None:
    table = make()
    table.create(SHAPE)
    assert format_at(tmp_path / "table") == table.format
    for other in set(FORMATS) - {table.format}:
        with pytest.raises(SparkOptionError, match=f"has a table of format {table.format}"):
            open_table(tmp_path / "table", other, SCHEMA)
    with pytest.raises(CommitConflict):
        make().create(SHAPE)


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_a_format_whose_library_is_missing_says_what_to_install(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.jobs.tables.find_spec", lambda name: None)
    # Not 'penstock[delta]': what is called so on PyPI is another project.
    with pytest.raises(SparkOptionError, match=rf"pip install 'penstock-mq\[{format}\]'"):
        open_table(tmp_path / "table", format, SCHEMA)


def test_a_change_that_would_repeat_records_is_refused(make: Callable[[], Any], tmp_path: Path) -> None:
    location = tmp_path / "table"
    table = make()
    state = table.create(SHAPE)
    state = table.commit(state, step(location, state, 5))
    with pytest.raises(AssertionError, match="not within"):
        table.commit(state, Change({AT: Span(0, 8)}, (write(location, 3, 8),)))
    with pytest.raises(AssertionError, match="go back"):
        table.commit(state, Change({AT: Span(0, 4)}))


def test_a_damaged_table_is_told_of_in_one_line_that_names_it(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    location = tmp_path / "table"
    table = make()
    table.commit(state := table.create(SHAPE), step(location, state, 5))
    newest = {
        "parquet": location / "_penstock" / f"{1:020d}.json",
        "delta": location / "_delta_log" / f"{1:020d}.json",
        "iceberg": location / "catalog.db",
    }[table.format]
    newest.write_bytes(b"{" * 8192)
    with pytest.raises(TableError, match=rf"^[^\n]*{location}[^\n]*$"):
        make().load()


def test_times_outside_of_the_calendar_are_archived_too(make: Callable[[], Any], tmp_path: Path) -> None:
    location = tmp_path / "table"
    table = make()
    state = table.create(SHAPE)
    far = 100_000 * 366 * DAY_US
    change = step(location, state, 3, date=NO_DATE, midnight_us=far)
    state = table.commit(state, change)
    state = table.commit(state, step(location, state, 3, date=NO_DATE, midnight_us=-far))
    found = make().load()
    assert offsets(location, found) == list(range(6))
    orphan = location / write(location, 6, 9).path
    assert left_over(table, found) == [orphan]


# Delta and Iceberg, read by their own libraries


def test_delta_reads_what_was_archived(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    table = open_table(tmp_path, "delta", SCHEMA)
    state = table.create(SHAPE)
    state = table.commit(state, step(tmp_path, state, 5))
    state = table.commit(state, step(tmp_path, state, 5, date="__HIVE_DEFAULT_PARTITION__"))
    read = DeltaTable(str(tmp_path)).to_pyarrow_table()
    assert sorted(read.column("offset").to_pylist()) == list(range(10))
    assert {str(each) for each in read.column("date").to_pylist()} == {DATE, "None"}
    assert DeltaTable(str(tmp_path)).transaction_version(state.archive_id) == 2


def test_delta_survives_being_optimized_by_somebody_else(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    table = open_table(tmp_path, "delta", SCHEMA)
    state = table.create(SHAPE)
    for _ in range(3):
        state = table.commit(state, step(tmp_path, state, 5))
    DeltaTable(str(tmp_path)).optimize.compact()
    found = table.load()
    assert found is not None
    assert (found.batch, found.spans, found.files) == (3, {AT: Span(0, 15)}, ())
    assert len(found.foreign) == 1
    assert left_over(table, found) == []
    # The archive goes on from a state that is older than the other program's commit.
    state = table.commit(state, step(tmp_path, state, 2))
    assert len(state.foreign) == 1
    assert sorted(DeltaTable(str(tmp_path)).to_pyarrow_table().column("offset").to_pylist()) == list(
        range(17)
    )


def test_iceberg_reads_what_was_archived(tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    table = open_table(tmp_path, "iceberg", SCHEMA)
    state = table.create(SHAPE)
    state = table.commit(state, step(tmp_path, state, 5))
    state = table.commit(state, step(tmp_path, state, 5))
    catalog = load_catalog("penstock", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db")
    read = catalog.load_table("penstock.archive")
    assert sorted(read.scan().to_arrow().column("offset").to_pylist()) == list(range(10))
    assert sorted(read.scan("offset >= 7").to_arrow().column("offset").to_pylist()) == [7, 8, 9]
    snapshot = read.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    summary = snapshot.summary
    assert summary["penstock.archive-id"] == state.archive_id
    assert summary["penstock.batch"] == "2"


@pytest.mark.parametrize("by_date", [True, False])
def test_iceberg_finds_times_outside_of_the_calendar(tmp_path: Path, by_date: bool) -> None:
    from pyiceberg.catalog import load_catalog

    table = open_table(tmp_path, "iceberg", SCHEMA)
    state = table.create(replace(SHAPE, by_date=by_date))
    for midnight_us in (MIDNIGHT_US, 100_000 * 366 * DAY_US):
        date = DATE if midnight_us == MIDNIGHT_US else NO_DATE
        change = step(tmp_path, state, 3, date=date, midnight_us=midnight_us)
        added = tuple(replace(each, date=date if by_date else None) for each in change.added)
        state = table.commit(state, replace(change, added=added))
    read = load_catalog("penstock", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db").load_table(
        "penstock.archive"
    )
    assert read.scan().to_arrow().sort_by("offset").column("offset").to_pylist() == list(range(6))
    late = read.scan(row_filter="timestamp > '2027-01-01T00:00:00+00:00'").to_arrow()
    assert sorted(late.column("offset").to_pylist()) == [3, 4, 5]


def test_delta_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").write_text("in the way")
    table = open_table(tmp_path, "delta", SCHEMA)
    with pytest.raises(TableError, match=rf"^the table at {tmp_path}: [^\n\x1b]*Not a directory[^\n]*$"):
        table.create(SHAPE)


def test_iceberg_can_be_in_a_catalog_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg import catalog
    from pyiceberg.utils.config import Config

    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", f"sqlite:///{tmp_path}/theirs.db")
    monkeypatch.setattr(catalog, "_ENV_CONFIG", Config())  # it was read when pyiceberg was imported
    location = tmp_path / "table"
    table = open_table(location, "iceberg", SCHEMA, catalog="prod:events.archive")
    state = table.create(SHAPE)
    table.commit(state, step(location, state, 4))
    again = open_table(location, "iceberg", catalog="prod:events.archive").load()
    assert again is not None
    assert offsets(location, again) == [0, 1, 2, 3]
    assert not (location / "catalog.db").exists()
    with pytest.raises(SparkOptionError, match=r"NAME:NAMESPACE\.TABLE"):
        open_table(location, "iceberg", SCHEMA, catalog="prod")
    with pytest.raises(SparkOptionError, match="no catalog test"):
        open_table(location, "iceberg", SCHEMA, catalog="test:events.archive").load()
    with pytest.raises(SparkOptionError, match="format iceberg"):
        open_table(location, "delta", SCHEMA, catalog="prod:events.archive")


# Parquet with a manifest: every step


def test_a_process_that_dies_after_any_step_has_committed_all_or_nothing(tmp_path: Path) -> None:
    """Two commits and a merge of small files, cut off after each step; then an archiver that starts afresh."""

    def run(location: Path, disk: Disk) -> None:
        table = ManifestTable(location, disk)
        state = table.load() or table.create(SHAPE)
        for _ in range(2):
            state = table.commit(state, step(location, state, 3))
        table.commit(state, Change(added=(write(location, 0, 6),), removed=state.files))

    counting = CrashingDisk()
    run(tmp_path / "whole", counting)
    assert counting.steps > 20
    outcomes = set()
    for steps in range(counting.steps):
        location = tmp_path / f"after-{steps}"
        with pytest.raises(Crash):
            run(location, CrashingDisk(steps))
        # Whoever only reads finds a whole state.
        seen = ManifestTable(location).load()
        end = 0 if seen is None or AT not in seen.spans else seen.spans[AT].end
        assert end in {0, 3, 6}
        if seen is not None:
            assert offsets(location, seen) == list(range(end))
            outcomes.add((seen.batch, end))
        # And whoever archives goes on from there, and leaves nothing behind.
        table = ManifestTable(location)
        state = table.load() or table.create(SHAPE)
        stray = left_over(table, state)
        state = table.commit(state, step(location, state, 12 - end))
        for each in stray:
            each.unlink()
        found = table.load()
        assert found is not None
        assert found.spans == {AT: Span(0, 12)}
        assert offsets(location, found) == list(range(12))
        assert left_over(table, found) == []
        assert not [name for name in Disk().names(location / "_penstock") if name.endswith(".tmp")]
    assert outcomes == {(0, 0), (1, 3), (2, 6), (3, 6)}, "the crashes did not reach every commit"


@pytest.mark.parametrize("kept", [(), ("names",), ("contents",), ("names", "contents")])
def test_what_a_commit_returned_survives_a_power_failure_after_any_step(
    tmp_path: Path, kept: tuple[str, ...]
) -> None:
    """Without what was not synced, and with any of it: an archiver's promises hold, and its table can be read."""
    location = tmp_path

    def commits(disk: PowerDisk) -> Iterator[State]:
        table = ManifestTable(location, disk)
        state = table.create(SHAPE)
        yield state
        for number in range(1, 4):
            file = DataFile(f"{number}", *AT, number - 1, number, 1, 10, 0, 0, DATE)
            state = table.commit(state, Change({AT: Span(0, number)}, (file,)))
            yield state

    steps = 0
    while True:
        disk = PowerDisk(steps)
        promised: State | None = None
        try:
            for state in commits(disk):
                promised = state
            is_over = True
        except Crash:
            is_over = False
        disk.fail(lambda what: what in kept)
        found = ManifestTable(location, disk).load()
        if promised is not None:
            assert found is not None, f"step {steps}: a table was lost"
            assert found.batch >= promised.batch, f"step {steps}: commit {promised.batch} was lost"
        if found is not None:
            end = found.spans.get(AT, Span(0, 0)).end
            assert [each.start for each in found.files] == list(range(end))
        if is_over:
            break
        steps += 1
    assert steps > 20


def test_a_base_that_was_never_made_durable_is_made_so_before_it_is_built_on(tmp_path: Path) -> None:
    """An archiver dies between naming its manifest and syncing the name; the next goes on; the power fails."""
    disk = PowerDisk()
    table = ManifestTable(tmp_path, disk)
    table.create(SHAPE)

    class Dies(PowerDisk):
        def sync_directory(self, path: Path) -> None:
            raise Crash

    with pytest.raises(Crash):
        dying = Dies()
        dying.__dict__ = disk.__dict__  # the same disk, of another process
        base = table.load()
        assert base is not None
        publish(dying, _manifest(disk, tmp_path, base), tmp_path / "_penstock" / f"{1:020d}.json")
    state = table.load()
    assert state is not None
    assert state.batch == 1
    state = table.commit(state, Change())
    disk.fail(lambda what: False)
    assert table.load() == state
    assert f"{1:020d}.json" in disk.names(tmp_path / "_penstock")


def _manifest(disk: PowerDisk, location: Path, base: State) -> Path:
    temporary = location / "_penstock" / temporary_name(f"{1:020d}.json")
    disk.create(temporary, base.after(Change(), wall_ms=0).to_json(files=True).encode())
    return temporary


def test_an_archiver_that_slept_through_a_hundred_commits_has_lost(tmp_path: Path) -> None:
    """Its number is free again, because old manifests are pruned; and yet it must not believe that it won."""
    table = ManifestTable(tmp_path)
    slept = state = table.create(SHAPE)
    for _ in range(MANIFESTS_KEPT + 2):
        state = table.commit(state, Change())
    names = Disk().names(tmp_path / "_penstock")
    assert len(names) == MANIFESTS_KEPT
    assert f"{1:020d}.json" not in names
    with pytest.raises(CommitConflict):
        ManifestTable(tmp_path).commit(slept, step(tmp_path, slept, 3))
    assert table.load() == state


def test_an_archiver_that_slept_before_it_made_the_table_does_not_make_it_again(tmp_path: Path) -> None:
    """It saw no table. To a table made anew all the files there would be left over."""
    awake, slept = ManifestTable(tmp_path), ManifestTable(tmp_path)
    assert slept.load() is None
    state = awake.create(SHAPE)
    for _ in range(MANIFESTS_KEPT + 2):
        state = awake.commit(state, Change())
    with pytest.raises(CommitConflict):
        slept.create(SHAPE)
    assert slept.load() == state


def test_a_replaced_file_is_deleted_a_day_later_and_no_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_800_000_000_000
    monkeypatch.setattr("penstock.spark.jobs.tables.manifest.time.time_ns", lambda: now_ms * 1_000_000)
    table = ManifestTable(tmp_path)
    state = table.create(SHAPE)
    state = table.commit(state, step(tmp_path, state, 3))
    small = state.files
    state = table.commit(state, Change(added=(write(tmp_path, 0, 3),), removed=small))
    now_ms += RETIRED_FOR_MS
    state = table.commit(state, Change())
    assert (tmp_path / small[0].path).exists()
    assert left_over(table, state) == []
    now_ms += 1
    state = table.commit(state, Change())
    assert not (tmp_path / small[0].path).exists()
    assert state.retired == ()


def test_a_manifest_that_is_not_ours_is_an_error_that_names_it(tmp_path: Path) -> None:
    table = ManifestTable(tmp_path)
    table.create(SHAPE)
    newest = tmp_path / "_penstock" / f"{0:020d}.json"
    newest.write_text('{"format": 99}')
    with pytest.raises(TableError, match=rf"{newest}.*format 99.*newer"):
        table.load()


@pytest.mark.parametrize(
    "location", ["s3://bucket/archive", "hdfs://name/archive", "", "file://host/archive"]
)
def test_a_location_that_is_no_directory_is_refused(location: str) -> None:
    with pytest.raises(SparkOptionError, match="location must be a directory"):
        resolve(location)


def test_a_location_may_be_a_file_address(tmp_path: Path) -> None:
    assert resolve(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    (tmp_path / "plain").write_text("")
    with pytest.raises(SparkOptionError, match="is not one"):
        resolve(str(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["a b", "100% x", "[1] {a,b}*", "\u00fc:#?", "a%20b", "a\\b", "a\tb"])
def test_a_table_is_where_its_location_says_or_nowhere(
    make: Callable[[], Any], tmp_path: Path, name: str
) -> None:
    """deltalake takes %20 for a blank, pyiceberg what is behind ? or # for no part of a path."""
    location = tmp_path / "odd" / name
    try:
        table = open_table(location, make().format, SCHEMA)
    except SparkOptionError as error:
        assert "cannot be at" in str(error)
        assert not location.parent.exists()
    else:
        state = table.create(SHAPE)
        state = table.commit(state, step(location, state, 3))
        found = table.load()
        assert found is not None and offsets(location, found) == [0, 1, 2]
        assert [each.name for each in location.parent.iterdir()] == [name]


def test_a_format_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparkOptionError, match="parquet, delta, iceberg, not 'hudi'"):
        open_table(tmp_path, "hudi", SCHEMA)
