"""The table formats of an archive: Parquet with our own manifest, Delta, Iceberg.

All three have the same few methods (`load`, `create`, `commit`, `ever_committed`) and the same `State`. None uses
Spark: tasks write the files before, and a commit only makes them count.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlparse

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables.disk import Disk
from penstock.spark.jobs.tables.layout import INSIDE, SUFFIX, beside, files_at
from penstock.spark.jobs.tables.manifest import ManifestTable
from penstock.spark.jobs.tables.state import State

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.jobs.tables.delta import ArchiveDeltaTable
    from penstock.spark.jobs.tables.iceberg import ArchiveIcebergTable

    ArchiveTable: TypeAlias = ManifestTable | ArchiveDeltaTable | ArchiveIcebergTable

# The file or directory that identifies a location's format.
_SIGNS = {"parquet": INSIDE, "delta": "_delta_log", "iceberg": "catalog.db"}
FORMATS = tuple(_SIGNS)
# Characters that the libraries would interpret in a path: they would write elsewhere, perhaps into another table.
_MISREAD = {"delta": re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f]"), "iceberg": re.compile(r"[?#\x00-\x1f]")}


def resolve(location: str) -> Path:
    """The directory of a location. Raises SparkOptionError for one that is not a path."""
    parsed = urlparse(str(location))
    if parsed.scheme not in {"", "file"} or parsed.netloc not in {"", "localhost"}:
        raise SparkOptionError(
            f"location must be a directory that driver and executors share, as in /data/archive, not {location!r}"
        )
    path = Path(unquote(parsed.path) if parsed.scheme else str(location)).expanduser()
    if not str(location) or (path.exists() and not path.is_dir()):
        raise SparkOptionError(f"location must be a directory, and {location!r} is not one")
    return path.absolute()


def format_at(location: Path) -> str | None:
    """The format of the existing table; None if there is none."""
    held = next((name for name, sign in _SIGNS.items() if (location / sign).exists()), None)
    return held or ("parquet" if os.path.isdir(beside(location)) else None)


def open_table(
    location: Path, format: str, schema: pa.Schema | None = None, *, catalog: str | None = None
) -> ArchiveTable:
    """A table for reading or, with the ``schema`` of its files, for creating and writing.

    Raises SparkOptionError for an unknown format, another format than the existing table's, or a missing library.
    """
    if format not in FORMATS:
        raise SparkOptionError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    if catalog is not None and format != "iceberg":
        raise SparkOptionError("catalog is only for format iceberg; omit it")
    if format in _MISREAD and (misread := _MISREAD[format].search(str(location))):
        raise SparkOptionError(
            f"a table of format {format} cannot be at {location} ({misread[0]!r}); choose another directory"
        )
    held = format_at(location)
    if held not in {None, format}:
        raise SparkOptionError(
            f"{location} has a table of format {held}; use format {held}, or another location"
        )
    if location.name.endswith(SUFFIX) and held is None:
        raise SparkOptionError(
            f"{location} has a name for the files of an archive {location.name.removesuffix(SUFFIX)}; "
            "use that one, or another location"
        )
    library, extra = {"delta": ("deltalake", "delta"), "iceberg": ("pyiceberg", "iceberg")}.get(
        format, ("", "")
    )
    if library and find_spec(library) is None:
        raise SparkOptionError(f"format {format} needs its library: pip install 'penstock-mq[{extra}]'")
    if format == "delta":
        from penstock.spark.jobs.tables.delta import ArchiveDeltaTable  # noqa: PLC0415  an extra

        return ArchiveDeltaTable(location, schema)
    if format == "iceberg":
        from penstock.spark.jobs.tables.iceberg import ArchiveIcebergTable  # noqa: PLC0415  an extra

        return ArchiveIcebergTable(location, schema, catalog=catalog)
    return ManifestTable(location)


def left_over(table: ArchiveTable, state: State, disk: Disk | None = None) -> list[Path]:
    """Files of archivers that died or lost a race: among the files, but never in the table.

    List them before a commit and delete them after it. A running archiver may be about to commit one of them, but
    it has read its state before our commit, so its commit will fail.
    """
    found = set(files_at(table.root, disk or Disk())) - {each.path for each in state.files}
    found -= table.ever_committed(found, state) if found else set()
    return [table.root / path for path in sorted(found)]


def spark_path(path: Path) -> str:
    """A path escaped for Spark, which takes every path for a pattern."""
    return "file:" + re.sub(r"([][{}*?\\])", r"\\\1", str(path))
