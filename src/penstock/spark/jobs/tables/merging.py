"""Which small files of an archive are worth becoming one: the arithmetic, with no disk in it.

An archive that runs every minute makes a small file of each partition every minute. Whenever enough of them lie
behind each other they are merged. A file joins only files that are together as large as it is, so a record is
written again about as often as its file doubles, and never once the file has half of the size wanted. What has no
date stays as it is: it is of days outside of the calendar, of which each has files of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from penstock.spark.jobs.tables.state import NO_DATE, ArchivedPartition, DataFile

# Fewer are not worth a commit.
FILES_MIN: Final = 8


def small_runs(files: Iterable[DataFile], file_bytes: int) -> list[list[DataFile]]:
    """Files to be merged, run by run, each in the order of its offsets."""
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
