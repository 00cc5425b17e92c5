"""List the files of an archive, for readers other than Spark: Polars, DuckDB, pandas.

Do not list the archive's directory instead. It also has files that were merged into others, and perhaps files of an
archiver that died; their records would be counted twice.
"""

from __future__ import annotations

from pathlib import Path

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables import format_at, open_table, resolve


def archive_files(location: str | Path, topic: str | None = None, *, catalog: str | None = None) -> list[str]:
    """The current Parquet files of an archive, of all its topics or of one, as absolute paths.

    ``polars.read_parquet(archive_files("/data/archive"))`` reads each archived record once. Replaced files are kept
    for a day.

    Raises SparkOptionError: there is no archive.
    """
    where = resolve(str(location))
    held = "iceberg" if catalog is not None else format_at(where)
    state = None if held is None else open_table(where, held, catalog=catalog).load()
    if state is None:
        raise SparkOptionError(f"there is no archive at {where}; create it with the job archive")
    return [str(where / each.path) for each in state.files if topic is None or each.topic == topic]
