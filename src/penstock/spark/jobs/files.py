"""The files of an archive, for readers that are not Spark: Polars, DuckDB, pandas.

What a newcomer gets wrong: listing the archive's directory. It also holds files that were merged into others, and
perhaps those of an archiver that died, and their records would be counted twice.
"""

from __future__ import annotations

from pathlib import Path

from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.tables import format_at, open_table, resolve


def archive_files(location: str | Path, topic: str | None = None, *, catalog: str | None = None) -> list[str]:
    """The Parquet files that an archive consists of now, of all its topics or of one, as absolute paths.

    ``polars.read_parquet(archive_files("/data/archive"))`` reads each archived record once. Files stay for a day
    after they were replaced.

    Raises SparkOptionError: there is no archive.
    """
    where = resolve(str(location))
    held = "iceberg" if catalog is not None else format_at(where)
    state = None if held is None else open_table(where, held, catalog=catalog).load()
    if state is None:
        raise SparkOptionError(f"there is no archive at {where}; make it with the job archive")
    return [str(where / each.path) for each in state.files if topic is None or each.topic == topic]
