"""Ready jobs on topics, each a function here and a command ``penstock spark JOB``.

Each module has the name of its function, so ``penstock.spark.jobs.archive`` is the function once this package is
imported. Import other names with ``from penstock.spark.jobs.archive import ArchiveResult``.
"""

from __future__ import annotations

from penstock.spark.jobs.archive import ArchiveResult, archive
from penstock.spark.jobs.files import archive_files
from penstock.spark.jobs.profile import ProfileResult, profile
from penstock.spark.jobs.replay import ReplayResult, replay
from penstock.spark.jobs.snapshot import SnapshotResult, read_snapshot, snapshot
from penstock.spark.jobs.table import table

__all__ = [
    "ArchiveResult",
    "ProfileResult",
    "ReplayResult",
    "SnapshotResult",
    "archive",
    "archive_files",
    "profile",
    "read_snapshot",
    "replay",
    "snapshot",
    "table",
]
