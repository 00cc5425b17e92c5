"""The archive as an Iceberg table, through `pyiceberg`: no JAR, no JVM, and by default no server.

Without a user's catalog the table has its own, an SQLite file beside it. Files, state and (archive id, batch) are
one commit: the state is a property of the table, the batch also one of the snapshot. pyiceberg would retry a
conflicting commit on top of the other one, which would store records twice. So retries are off, and every commit
makes a snapshot, even an empty one, because conflicts are detected by the snapshot's parent.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg import exceptions
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.io import OutputFile
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_file_to_data_file,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import TimestampType, TimestamptzType
from sqlalchemy import URL
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables.disk import Disk
from penstock.spark.jobs.tables.errors import TableError, tells
from penstock.spark.jobs.tables.state import (
    Change,
    CommitConflict,
    DataFile,
    Shape,
    State,
    from_path,
    new_state,
)
from penstock.spark.jobs.tables.writing import DAY_MAX, DAY_MIN, DAY_US, statistics_of

STATE_KEY: Final = "penstock.archive"
RETRIES_KEY: Final = "commit.retry.num-retries"
OWN_CATALOG: Final = "catalog.db"
IDENTIFIER: Final = "penstock.archive"
COMMIT_ATTEMPTS: Final = 10
BIRTH_PAUSE_S: Final = 0.5
# pyiceberg's errors have no common base class; SQLAlchemy's come from the table's own catalog.
LIBRARY_ERRORS: Final[tuple[type[Exception], ...]] = (
    SQLAlchemyError,
    *(each for each in vars(exceptions).values() if isinstance(each, type) and issubclass(each, Exception)),
)
PROPERTIES: Final = {
    RETRIES_KEY: "0",
    # Each commit writes the table's whole metadata; a hundred old ones are enough.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


class ArchiveIcebergTable:
    format: Final = "iceberg"

    def __init__(
        self,
        location: Path,
        schema: pa.Schema | None = None,
        *,
        catalog: str | None = None,
        disk: Disk | None = None,
    ) -> None:
        """``catalog`` is `NAME:NAMESPACE.TABLE`, with a NAME from pyiceberg's configuration."""
        self.location = self.root = location
        self._schema = schema
        self._disk = disk or Disk()
        self._given_catalog, self._identifier = _named(catalog)

    @tells(*LIBRARY_ERRORS)
    def load(self) -> State | None:
        table = self._open()
        return None if table is None else self._state(table)

    @tells(*LIBRARY_ERRORS)
    def create(self, shape: Shape) -> State:
        assert self._schema is not None, "a table opened for reading cannot be made"
        self.location.mkdir(parents=True, exist_ok=True)
        state = new_state(shape)
        catalog = self._catalog()
        with contextlib.suppress(IntegrityError):  # another archiver has just created it
            catalog.create_namespace_if_not_exists(self._identifier.rpartition(".")[0])
        try:
            creation = catalog.create_table_transaction(
                self._identifier,
                self._schema,
                location=_address(self.location),
                properties=PROPERTIES | _metrics(self._schema) | {STATE_KEY: state.to_json(files=False)},
            )
            with creation as transaction, transaction.update_spec() as spec:
                spec.add_field("topic", IdentityTransform())
                if shape.by_date:
                    spec.add_field("timestamp", DayTransform(), "date")
        except (TableAlreadyExistsError, CommitFailedException) as error:
            raise CommitConflict(f"{self.location} has a table already: {error}") from None
        self._sync()
        return state

    @tells(*LIBRARY_ERRORS)
    def commit(self, base: State, change: Change) -> State:
        state = base.after(change, wall_ms=time.time_ns() // 1_000_000)
        for _ in range(COMMIT_ATTEMPTS):
            table = self._open()
            found = None if table is None else self._state(table)
            if (
                table is None
                or found is None
                or (found.archive_id, found.batch) != (base.archive_id, base.batch)
            ):
                raise CommitConflict(f"{self.location} has newer commits than {state.batch}")
            try:
                self._commit(table, state, change)
            except CommitFailedException:
                continue
            removed = {each.path for each in change.removed}
            kept = (each for each in found.files if each.path not in removed)
            return replace(state, files=(*kept, *change.added), retired=(), foreign=found.foreign)
        raise CommitConflict(
            f"{self.location}: other programs commit too often; commit {state.batch} did not succeed"
        )

    @tells(*LIBRARY_ERRORS)
    def ever_committed(self, paths: set[str], state: State) -> set[str]:
        """Files of snapshots that still exist; those of expired snapshots cannot be read."""
        table = self._open()
        if table is None:
            return set()
        listed = table.inspect.all_data_files().column("file_path").to_pylist()
        return paths & {self._relative(each) for each in listed}

    # Reading

    def _open(self) -> Table | None:
        if self._given_catalog is None and not (self.location / OWN_CATALOG).exists():
            return None
        try:
            return self._catalog().load_table(self._identifier)
        except NoSuchTableError:
            return None

    def _state(self, table: Table) -> State:
        text = table.properties.get(STATE_KEY)
        if text is None:
            raise TableError(
                f"{self._identifier} is an Iceberg table that no archive created; choose another"
            )
        state = State.from_json(text)
        files, foreign = [], []
        for task in table.scan().plan_files():
            if task.delete_files:
                raise TableError(
                    f"{self._identifier} has delete files, which Spark's Parquet reader would ignore"
                )
            path = self._relative(task.file.file_path)
            found = from_path(path, records=task.file.record_count, size=task.file.file_size_in_bytes)
            if found is None:
                foreign.append(path)
            else:
                files.append(found)
        return replace(state, files=tuple(files), foreign=tuple(foreign))

    # Writing

    def _commit(self, table: Table, state: State, change: Change) -> None:
        # It may have been changed since the table was created.
        if table.properties.get(RETRIES_KEY) != "0":
            with table.transaction() as transaction:
                transaction.set_properties({RETRIES_KEY: "0"})
        named = {"penstock.archive-id": state.archive_id, "penstock.batch": str(state.batch)}
        removed = self._listed(table, change.removed)
        with table.transaction() as transaction:
            transaction.set_properties({STATE_KEY: state.to_json(files=False)})
            if table.metadata.name_mapping() is None:
                # The files identify columns by name only.
                mapping = table.schema().name_mapping.model_dump_json()
                transaction.set_properties({"schema.name-mapping.default": mapping})
            snapshot = transaction.update_snapshot(snapshot_properties=named)
            with snapshot.overwrite() if removed else snapshot.fast_append() as files:
                for each in change.added:
                    files.append_data_file(self._described(table, transaction.table_metadata, each))
                for file in removed:
                    files.delete_data_file(file)
        self._sync()

    def _described(self, table: Table, metadata: TableMetadata, file: DataFile) -> IcebergFile:
        address = _address(self.location / file.path)
        try:
            return parquet_file_to_data_file(table.io, metadata, address)
        except OverflowError:
            # pyiceberg converts bounds to Python datetimes, and some times are outside that calendar. Such
            # columns get no bounds, and the file is on the calendar's first or last day, where most filters find
            # it.
            parquet = pq.read_metadata(self.location / file.path)
            columns = metadata.schema()
            untold = {
                f"write.metadata.metrics.column.{each.name}": "none"
                for each in columns.fields
                if isinstance(each.field_type, TimestampType | TimestamptzType)
            }
            statistics = data_file_statistics_from_parquet_metadata(
                parquet,
                compute_statistics_plan(columns, metadata.properties | untold),
                parquet_path_to_id_mapping(columns),
            )
            day = min(max(file.timestamp_min_us // DAY_US, DAY_MIN), DAY_MAX)
            return IcebergFile.from_args(
                content=DataFileContent.DATA,
                file_path=address,
                file_format=FileFormat.PARQUET,
                partition=Record(file.topic) if file.date is None else Record(file.topic, day),
                file_size_in_bytes=file.bytes,
                spec_id=metadata.default_spec_id,
                **statistics.to_serialized_dict(),
            )

    def _listed(self, table: Table, wanted: tuple[DataFile, ...]) -> list[Any]:
        if not wanted:
            return []
        paths = {each.path for each in wanted}
        found = [
            task.file for task in table.scan().plan_files() if self._relative(task.file.file_path) in paths
        ]
        if len(found) != len(paths):
            raise CommitConflict(f"{self.location}: another program has replaced the same files")
        return found

    # The catalog

    def _catalog(self) -> Catalog:
        settings = {"py-io-impl": f"{__name__}.{SyncedFileIO.__name__}"}
        if self._given_catalog is not None:
            try:
                return load_catalog(self._given_catalog, **settings)
            except ValueError as error:
                raise SparkOptionError(f"pyiceberg has no catalog {self._given_catalog}: {error}") from None
        database = URL.create("sqlite", database=str(self.location / OWN_CATALOG)).render_as_string()
        own = {"type": "sql", "uri": database, "warehouse": _address(self.location), **settings}
        try:
            return load_catalog("penstock", **own)
        except OperationalError:
            # Of two archivers that create the catalog at once, one gets an error that its tables exist already.
            time.sleep(BIRTH_PAUSE_S)
            return load_catalog("penstock", **own)

    def _sync(self) -> None:
        """SQLite has synced its file; sync the names of the file and its directory."""
        self._disk.sync_directory(self.location)
        self._disk.sync_directory(self.location.parent)

    def _relative(self, address: str) -> str:
        """A file's path relative to the location, or its whole path if it is elsewhere."""
        path = Path(address.removeprefix("file://"))
        return str(path.relative_to(self.location)) if path.is_relative_to(self.location) else str(path)


class SyncedFileIO(PyArrowFileIO):
    """Makes metadata durable before the catalog refers to it; pyiceberg's own FileIO does not."""

    def new_output(self, location: str) -> Any:
        return _SyncedOutputFile(super().new_output(location))


class _SyncedOutputFile(OutputFile):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner.location)
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def exists(self) -> bool:
        return bool(self._inner.exists())

    def to_input_file(self) -> Any:
        return self._inner.to_input_file()

    def create(self, overwrite: bool = False) -> Any:
        return _SyncedStream(self._inner.create(overwrite), self.location)


class _SyncedStream:
    def __init__(self, stream: Any, address: str) -> None:
        self._stream = stream
        self._path = Path(address.removeprefix("file://")) if address.startswith(("file:///", "/")) else None
        self._is_closed = False

    def write(self, data: bytes) -> int:
        return int(self._stream.write(data))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stream.close()
        if self._path is not None and os.name == "posix":
            disk = Disk()
            disk.sync(self._path)
            disk.sync_directory(self._path.parent)

    def __enter__(self) -> _SyncedStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _metrics(columns: pa.Schema) -> dict[str, str]:
    """Metrics modes: only for columns with statistics in the files; pyiceberg warns about every other one."""
    kept = {"write.metadata.metrics.default": "none"}
    for name in statistics_of(columns):
        is_partitioned_by = name in {"topic", "timestamp"}
        kept[f"write.metadata.metrics.column.{name}"] = "full" if is_partitioned_by else "truncate(16)"
    return kept


def _address(path: Path) -> str:
    """Not an encoded URI: Iceberg's readers take the part after the scheme literally."""
    return f"file://{path}"


def _named(catalog: str | None) -> tuple[str | None, str]:
    if catalog is None:
        return None, IDENTIFIER
    name, colon, identifier = catalog.partition(":")
    if not (name and colon and "." in identifier.strip(".")):
        raise SparkOptionError(
            f"catalog must be NAME:NAMESPACE.TABLE, as in prod:events.archive, not {catalog!r}"
        )
    return name, identifier
