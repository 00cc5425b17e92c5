"""List the files of an archive at one commit, for readers other than Spark: Polars, DuckDB, pandas.

The directory of a Parquet archive can be read as it is, but while a commit is made it is between two states, and
files that are merged leave it. Delta and Iceberg tables have old files in their directories.
"""

from __future__ import annotations

from pathlib import Path

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables import format_at, open_table, resolve


def archive_files(location: str | Path, topic: str | None = None, *, catalog: str | None = None) -> list[str]:
    """The current Parquet files of an archive, of all its topics or of one, as absolute paths.

    ``polars.read_parquet(archive_files("/data/archive"))`` reads each archived record once, also while records are
    archived. Replaced files are kept under these names for a day.

    Raises SparkOptionError: there is no archive.
    """
    where = resolve(str(location))
    held = "iceberg" if catalog is not None else format_at(where)
    table = None if held is None else open_table(where, held, catalog=catalog)
    state = None if table is None else table.load()
    if table is None or state is None:
        raise SparkOptionError(f"there is no archive at {where}; create it with the job archive")
    return [str(table.root / each.path) for each in state.files if topic is None or each.topic == topic]
