"""Which small files of an archive to merge: arithmetic without disk.

An archive that runs every minute makes a small file per partition every minute. When enough of them are adjacent,
they are merged. A file is merged only with files that are together as large as itself, so a record is rewritten
about as often as its file doubles, and never again once the file has half of the wanted size. Files without a
date are not merged: they are of days outside the calendar, each with its own files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from penstock.spark.jobs.tables.state import NO_DATE, ArchivedPartition, DataFile

# Fewer files are not worth a commit.
FILES_MIN: Final = 8


def small_runs(files: Iterable[DataFile], file_bytes: int) -> list[list[DataFile]]:
    """Runs of files to merge, each in the order of offsets."""
    groups: defaultdict[tuple[ArchivedPartition, str | None], list[DataFile]] = defaultdict(list)
    for each in files:
        if each.date != NO_DATE:
            groups[each.at, each.date].append(each)
    runs = (_newest_run(group, file_bytes) for group in groups.values())
    return [run for run in runs if len(run) >= FILES_MIN]


def _newest_run(group: list[DataFile], file_bytes: int) -> list[DataFile]:
    run: list[DataFile] = []
    total = 0
    for each in sorted(group, key=lambda file: file.start, reverse=True):
        is_small = each.bytes < file_bytes // 2 and total + each.bytes <= file_bytes
        if not is_small or (run and each.bytes > total):
            break
        run.append(each)
        total += each.bytes
    return run[::-1]
