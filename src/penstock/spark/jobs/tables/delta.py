"""The archive as a Delta table, through `deltalake`: no JAR, no JVM.

The files are where the Parquet table would have them; Delta's log replaces the manifest. Every commit has
`Transaction(archive id, batch)`, which Delta keeps forever, and the archive's state in its commit information,
both in one log entry with the files. Delta does not treat two appends as a conflict, so ours commits on exactly
the version whose state was read, without retries, or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from penstock.spark.jobs.tables.disk import Disk
from penstock.spark.jobs.tables.errors import TableError, tells
from penstock.spark.jobs.tables.state import (
    NO_DATE,
    Change,
    CommitConflict,
    DataFile,
    Shape,
    State,
    from_path,
    new_state,
)

STATE_KEY: Final = "penstock.archive"
# Other programs may write too (OPTIMIZE, VACUUM): a commit that conflicts only with theirs is retried.
COMMIT_ATTEMPTS: Final = 10
# The log keeps the archive's state; deltalake would delete entries after 30 days.
CONFIGURATION: Final = {"delta.enableExpiredLogCleanup": "false"}


class ArchiveDeltaTable:
    format: Final = "delta"

    def __init__(self, location: Path, schema: pa.Schema | None = None, disk: Disk | None = None) -> None:
        """``schema`` is that of the files; required for creating and writing."""
        self.location = self.root = location
        self._schema = schema
        self._disk = disk or Disk()
        self._log = location / "_delta_log"

    @tells(DeltaError, OSError)
    def load(self) -> State | None:
        table = self._open()
        return None if table is None else self._state(table)

    @tells(DeltaError, OSError)
    def create(self, shape: Shape) -> State:
        self.location.mkdir(parents=True, exist_ok=True)
        state = new_state(shape)
        try:
            DeltaTable.create(
                str(self.location),
                self._table_schema(shape),
                partition_by=["date"] if shape.by_date else None,
                name="penstock_archive",
                configuration=CONFIGURATION,
                commit_properties=self._properties(state),
            )
        except DeltaError:
            if self._open() is None:
                raise  # not because another archiver has just created it
            raise CommitConflict(f"{self.location} has a table already") from None
        self._sync(0)
        return state

    @tells(DeltaError, OSError)
    def commit(self, base: State, change: Change) -> State:
        wall_ms = time.time_ns() // 1_000_000
        state = base.after(change, wall_ms=wall_ms)
        for _ in range(COMMIT_ATTEMPTS):
            table = self._open()
            found = None if table is None else self._state(table)
            if (
                table is None
                or found is None
                or (found.archive_id, found.batch) != (base.archive_id, base.batch)
            ):
                raise CommitConflict(f"{self.location} has newer commits than {state.batch}")
            held = {each.path for each in found.files}
            if not all(each.path in held for each in change.removed):
                raise CommitConflict(f"{self.location}: another program has replaced the same files")
            try:
                table.create_write_transaction(
                    [*_removals(change.removed, wall_ms), *_additions(change, wall_ms)],
                    "append",
                    self._table_schema(base.shape),
                    partition_by=["date"] if base.shape.by_date else None,
                    commit_properties=self._properties(state),
                )
            except CommitFailedError:
                continue
            self._sync(table.version() + 1)
            return replace(state, files=_kept(found, change), retired=(), foreign=found.foreign)
        raise CommitConflict(
            f"{self.location}: other programs commit too often; commit {state.batch} did not succeed"
        )

    def ever_committed(self, paths: set[str], state: State) -> set[str]:
        """Delta's readers may time-travel, so the whole log is searched, which is never cleaned."""
        unknown = set(paths)
        for name in self._disk.names(self._log):
            if unknown and name.endswith(".json"):
                entry = self._disk.read(self._log / name).decode()
                unknown = {path for path in unknown if path not in entry}
        return paths - unknown

    # Reading

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(str(self.location))
        except TableNotFoundError:
            return None

    def _state(self, table: DeltaTable) -> State:
        state = self._last_stated(table.version())
        known = table.transaction_version(state.archive_id)
        assert known == state.batch, (
            f"{self.location}: transaction {known} carries the state of {state.batch}"
        )
        if "deletionVectors" in (table.protocol().reader_features or ()):
            raise TableError(
                f"{self.location} has deletion vectors, which Spark's Parquet reader would ignore"
            )
        files, foreign = [], []
        actions = pa.table(table.get_add_actions(flatten=True))
        columns = (actions.column(name).to_pylist() for name in ("path", "num_records", "size_bytes"))
        for path, records, size in zip(*columns):
            found = from_path(path, records=records or 0, size=size)
            if found is None:
                foreign.append(path)
            else:
                files.append(found)
        return replace(state, files=tuple(files), foreign=tuple(foreign))

    def _last_stated(self, version: int) -> State:
        """The archive's state at a version of the table: in its log entry, or an earlier one if others wrote since.

        Read from the log itself: deltalake's history numbers entries wrongly while entries are added.
        """
        for number in range(version, -1, -1):
            try:
                entry = self._disk.read(self._log / f"{number:020d}.json")
            except FileNotFoundError:
                raise TableError(
                    f"the log of {self.location} was cleaned of the archive's state: entry {number} of _delta_log "
                    "is missing, restore it"
                ) from None
            for line in entry.splitlines():
                if line.startswith(b'{"commitInfo"') and STATE_KEY in (
                    info := json.loads(line)["commitInfo"]
                ):
                    return State.from_json(info[STATE_KEY])
        raise TableError(
            f"{self.location} is a Delta table that no archive created; choose another location for the archive"
        )

    # Writing

    def _table_schema(self, shape: Shape) -> pa.Schema:
        assert self._schema is not None, "a table opened for reading cannot be written to"
        return self._schema.append(pa.field("date", pa.date32())) if shape.by_date else self._schema

    def _properties(self, state: State) -> CommitProperties:
        return CommitProperties(
            custom_metadata={STATE_KEY: state.to_json(files=False)},
            app_transactions=[Transaction(state.archive_id, state.batch)],
            max_commit_retries=0,
        )

    def _sync(self, version: int) -> None:
        """deltalake does not fsync: after this the commit survives a power loss."""
        self._disk.sync(self._log / f"{version:020d}.json")
        self._disk.sync_directory(self._log)
        self._disk.sync_directory(self.location)


def _additions(change: Change, wall_ms: int) -> Iterator[AddAction]:
    for each in change.added:
        stats: dict[str, Any] = {
            "numRecords": each.records,
            "minValues": {"topic": each.topic, "partition": each.partition, "offset": each.start},
            "maxValues": {"topic": each.topic, "partition": each.partition, "offset": each.end - 1},
            "nullCount": {"topic": 0, "partition": 0, "offset": 0},
        }
        # Merging files is not a data change for readers that follow the table.
        yield AddAction(each.path, each.bytes, _values(each), wall_ms, not change.removed, json.dumps(stats))


def _removals(files: tuple[DataFile, ...], wall_ms: int) -> Iterator[RemoveAction]:
    for each in files:
        yield RemoveAction(each.path, False, wall_ms, each.bytes, _values(each))


def _values(file: DataFile) -> dict[str, str | None]:
    if file.date is None:
        return {}
    return {"date": None if file.date == NO_DATE else file.date}


def _kept(found: State, change: Change) -> tuple[DataFile, ...]:
    removed = {each.path for each in change.removed}
    return (*(each for each in found.files if each.path not in removed), *change.added)
