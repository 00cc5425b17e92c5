"""The archive's commit, without Spark and without brokers: it happens or it does not, wherever it is cut off.

Crashes are tried exhaustively, after every single step on the disk, and in two kinds: the process dies (what was
written stays), and the power fails (what was not synced may be gone, in every combination that counts).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables import FORMATS, format_at, left_over, open_table, resolve
from penstock.spark.jobs.tables.disk import Disk, make_directories, publish
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.layout import beside, files_at
from penstock.spark.jobs.tables.manifest import MANIFESTS_KEPT, RETIRED_FOR_MS, ManifestTable
from penstock.spark.jobs.tables.state import (
    NO_DATE,
    Change,
    CommitConflict,
    DataFile,
    Gap,
    Span,
    State,
    file_path,
    new_batch_token,
    temporary_name,
)
from penstock.spark.jobs.tables.writing import DAY_US
from tests.spark.tables import (
    AT,
    DATE,
    MIDNIGHT_US,
    SCHEMA,
    SHAPE,
    Crash,
    CrashingDisk,
    PowerDisk,
    offsets,
    shown,
    step,
    write,
)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture(params=FORMATS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """A handle to the table of this test, as another process would open it."""
    return lambda: open_table(tmp_path / "table", request.param, SCHEMA)


# All formats


def test_a_commit_is_there_for_the_next_who_looks(make: Callable[[], Any]) -> None:
    table = make()
    assert table.load() is None
    state = table.create(SHAPE)
    assert make().load() == state
    for count in (5, 7):
        gap = Gap(*AT, 1, 2, "retention")
        change = step(table.root, state, count)
        state = table.commit(state, Change(change.spans, change.added, gaps=(gap,)))
    found = make().load()
    assert (found.archive_id, found.batch, found.shape) == (state.archive_id, 2, SHAPE)
    assert found.spans == {AT: Span(0, 12)}
    assert found.gaps == (Gap(*AT, 1, 2, "retention"),) * 2
    assert {each.path for each in found.files} == {each.path for each in state.files}
    assert sum(each.records for each in found.files) == 12
    assert offsets(table.root, found) == list(range(12))


def test_of_two_archivers_one_commits_and_the_other_is_told(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    base = first.create(SHAPE)
    won = first.commit(base, step(first.root, base, 5))
    with pytest.raises(CommitConflict):
        second.commit(base, step(first.root, base, 9))
    found = make().load()
    assert (found.batch, found.spans) == (won.batch, {AT: Span(0, 5)})
    assert offsets(first.root, found) == list(range(5))


def test_a_commit_without_files_shuts_out_those_that_were_planned_before_it(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    base = first.create(SHAPE)
    first.commit(base, Change())
    with pytest.raises(CommitConflict):
        second.commit(base, step(first.root, base, 3))
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


def test_many_archivers_at_once_never_lose_or_repeat_a_record(make: Callable[[], Any]) -> None:
    make().create(SHAPE)
    failures: list[BaseException] = []

    def archive() -> None:
        try:
            table = make()
            for _ in range(4):
                state = table.load()
                try:
                    table.commit(state, step(table.root, state, 3))
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
    assert offsets(make().root, state) == list(range(3 * state.batch))


def test_small_files_are_replaced_by_one_in_one_commit(make: Callable[[], Any]) -> None:
    table = make()
    state = table.create(SHAPE)
    for _ in range(3):
        state = table.commit(state, step(table.root, state, 2))
    merged = write(table.root, 0, 6)
    state = table.commit(state, Change(added=(merged,), removed=state.files))
    found = make().load()
    assert [each.path for each in found.files] == [merged.path]
    assert found.spans == {AT: Span(0, 6)}
    assert offsets(table.root, found) == list(range(6))
    # Replaced files are nobody's left-overs: somebody may be reading them.
    assert left_over(table, found) == []


def test_what_nobody_committed_is_found_and_nothing_else(make: Callable[[], Any]) -> None:
    table = make()
    state = table.create(SHAPE)
    state = table.commit(state, step(table.root, state, 5))
    orphan = table.root / write(table.root, 5, 9).path
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


def test_a_change_that_would_repeat_records_is_refused(make: Callable[[], Any]) -> None:
    table = make()
    state = table.create(SHAPE)
    state = table.commit(state, step(table.root, state, 5))
    with pytest.raises(AssertionError, match="not within"):
        table.commit(state, Change({AT: Span(0, 8)}, (write(table.root, 3, 8),)))
    with pytest.raises(AssertionError, match="go back"):
        table.commit(state, Change({AT: Span(0, 4)}))


def test_a_damaged_table_is_told_of_in_one_line_that_names_it(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    location = tmp_path / "table"
    table = make()
    table.commit(state := table.create(SHAPE), step(table.root, state, 5))
    newest = {
        "parquet": tmp_path / "table.penstock" / f"{1:020d}.json",
        "delta": location / "_delta_log" / f"{1:020d}.json",
        "iceberg": location / "catalog.db",
    }[table.format]
    newest.write_bytes(b"{" * 8192)
    with pytest.raises(TableError, match=rf"^[^\n]*{location}[^\n]*$"):
        make().load()


def test_times_outside_of_the_calendar_are_archived_too(make: Callable[[], Any]) -> None:
    table = make()
    state = table.create(SHAPE)
    far = 100_000 * 366 * DAY_US
    change = step(table.root, state, 3, date=NO_DATE, midnight_us=far)
    state = table.commit(state, change)
    state = table.commit(state, step(table.root, state, 3, date=NO_DATE, midnight_us=-far))
    found = make().load()
    assert offsets(table.root, found) == list(range(6))
    orphan = table.root / write(table.root, 6, 9).path
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
    table.commit(state, step(table.root, state, 4))
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
            state = table.commit(state, step(table.root, state, 3))
        table.commit(state, Change(added=(write(table.root, 0, 6),), removed=state.files))

    counting = CrashingDisk()
    run(tmp_path / "whole", counting)
    assert counting.steps > 20
    outcomes = set()
    for steps in range(counting.steps):
        location = tmp_path / f"after-{steps}"
        with pytest.raises(Crash):
            run(location, CrashingDisk(steps))
        # Whoever only reads finds a whole state.
        reader = ManifestTable(location)
        seen = reader.load()
        end = 0 if seen is None or AT not in seen.spans else seen.spans[AT].end
        assert end in {0, 3, 6}
        if seen is not None:
            assert offsets(reader.root, seen) == list(range(end))
            # A reader of the directory never finds a file that was not committed.
            assert shown(location) <= {each.path for each in seen.files} | {path for path, _ in seen.retired}
            outcomes.add((seen.batch, end))
        # And whoever archives goes on from there, and leaves nothing behind.
        table = ManifestTable(location)
        state = table.load() or table.create(SHAPE)
        table.settle(state)
        assert shown(location) == {each.path for each in state.files}
        stray = left_over(table, state)
        state = table.commit(state, step(table.root, state, 12 - end))
        for each in stray:
            each.unlink()
        found = table.load()
        assert found is not None
        assert found.spans == {AT: Span(0, 12)}
        assert offsets(table.root, found) == list(range(12))
        assert left_over(table, found) == []
        assert not [name for name in Disk().names(beside(location)) if name.endswith(".tmp")]
    assert outcomes == {(0, 0), (1, 3), (2, 6), (3, 6)}, "the crashes did not reach every commit"


@pytest.mark.parametrize("kept", [(), ("names",), ("contents",), ("names", "contents")])
def test_what_a_commit_returned_survives_a_power_failure_after_any_step(
    location: Path, kept: tuple[str, ...]
) -> None:
    """Without what was not synced, and with any of it: an archiver's promises hold, and its table can be read."""

    def commits(disk: PowerDisk) -> Iterator[State]:
        table = ManifestTable(location, disk)
        state = table.create(SHAPE)
        yield state
        for number in range(1, 4):
            path = file_path(AT, number - 1, number, date=DATE, batch_token=new_batch_token())
            directory = make_directories(disk, table.root, str(Path(path).parent))
            disk.create(table.root / path, b"PAR1")
            disk.sync(table.root / path)
            disk.sync_directory(directory)
            file = DataFile(path, *AT, number - 1, number, 1, 10, 0, 0, DATE)
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
        table = ManifestTable(location, disk)
        found = table.load()
        if promised is not None:
            assert found is not None, f"step {steps}: a table was lost"
            assert found.batch >= promised.batch, f"step {steps}: commit {promised.batch} was lost"
        if found is not None:
            end = found.spans.get(AT, Span(0, 0)).end
            assert [each.start for each in found.files] == list(range(end))
            assert all(disk.read(table.root / each.path) == b"PAR1" for each in found.files)
            table.settle(found)
            assert set(files_at(location, disk)) == {each.path for each in found.files}
        if is_over:
            break
        steps += 1
    assert steps > 20


def test_a_base_that_was_never_made_durable_is_made_so_before_it_is_built_on(location: Path) -> None:
    """An archiver dies between naming its manifest and syncing the name; the next goes on; the power fails."""
    disk = PowerDisk()
    table = ManifestTable(location, disk)
    table.create(SHAPE)

    class Dies(PowerDisk):
        def sync_directory(self, path: Path) -> None:
            raise Crash

    with pytest.raises(Crash):
        dying = Dies()
        dying.__dict__ = disk.__dict__  # the same disk, of another process
        base = table.load()
        assert base is not None
        publish(dying, _manifest(disk, location, base), beside(location) / f"{1:020d}.json")
    state = table.load()
    assert state is not None
    assert state.batch == 1
    state = table.commit(state, Change())
    disk.fail(lambda what: False)
    assert table.load() == state
    assert f"{1:020d}.json" in disk.names(beside(location))


def _manifest(disk: PowerDisk, location: Path, base: State) -> Path:
    temporary = beside(location) / temporary_name(f"{1:020d}.json")
    disk.create(temporary, base.after(Change(), wall_ms=0).to_json(files=True).encode())
    return temporary


def test_an_archiver_that_slept_through_a_hundred_commits_has_lost(location: Path) -> None:
    """Its number is free again, because old manifests are pruned; and yet it must not believe that it won."""
    table = ManifestTable(location)
    slept = state = table.create(SHAPE)
    for _ in range(MANIFESTS_KEPT + 2):
        state = table.commit(state, Change())
    names = [name for name in Disk().names(beside(location)) if name.endswith(".json")]
    assert len(names) == MANIFESTS_KEPT
    assert f"{1:020d}.json" not in names
    with pytest.raises(CommitConflict):
        ManifestTable(location).commit(slept, step(table.root, slept, 3))
    assert table.load() == state


def test_an_archiver_that_slept_before_it_made_the_table_does_not_make_it_again(location: Path) -> None:
    """It saw no table. To a table made anew all the files there would be left over."""
    awake, slept = ManifestTable(location), ManifestTable(location)
    assert slept.load() is None
    state = awake.create(SHAPE)
    for _ in range(MANIFESTS_KEPT + 2):
        state = awake.commit(state, Change())
    with pytest.raises(CommitConflict):
        slept.create(SHAPE)
    assert slept.load() == state


def test_a_replaced_file_is_deleted_a_day_later_and_no_sooner(
    location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_800_000_000_000
    monkeypatch.setattr("penstock.spark.jobs.tables.manifest.time.time_ns", lambda: now_ms * 1_000_000)
    table = ManifestTable(location)
    state = table.create(SHAPE)
    state = table.commit(state, step(table.root, state, 3))
    small = state.files
    state = table.commit(state, Change(added=(write(table.root, 0, 3),), removed=small))
    now_ms += RETIRED_FOR_MS
    state = table.commit(state, Change())
    assert (table.root / small[0].path).exists()
    assert left_over(table, state) == []
    now_ms += 1
    state = table.commit(state, Change())
    assert not (table.root / small[0].path).exists()
    assert state.retired == ()


def test_a_manifest_that_is_not_ours_is_an_error_that_names_it(location: Path) -> None:
    table = ManifestTable(location)
    table.create(SHAPE)
    newest = beside(location) / f"{0:020d}.json"
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
        state = table.commit(state, step(table.root, state, 3))
        found = table.load()
        assert found is not None and offsets(table.root, found) == [0, 1, 2]
        beside_it = [f"{name}.penstock"] if table.format == "parquet" else []
        assert sorted(each.name for each in location.parent.iterdir()) == [name, *beside_it]


def test_a_format_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparkOptionError, match="parquet, delta, iceberg, not 'hudi'"):
        open_table(tmp_path, "hudi", SCHEMA)
