"""Where a Parquet archive keeps its manifests and files: beside its directory, which has only current files.

    archive/topic=orders/date=2026-11-16/....parquet                   the current files: links
    archive.penstock/00000000000000000007.json                         the manifests
    archive.penstock/files/topic=orders/date=2026-11-16/....parquet    all files, under names that stay

Beside and not below, because Polars reads every file below a directory, hidden ones too. Links and not renames,
because a query that began before a file was replaced must find it under the name that it knows.

An archive of an earlier version has everything in its directory, with the manifests in `_penstock`. So does an
archive whose directory nothing can be moved out of, such as a mount point.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from penstock.spark.jobs.tables.disk import Disk, make_directories
from penstock.spark.jobs.tables.state import is_ours

INSIDE: Final = "_penstock"
SUFFIX: Final = ".penstock"
FILES: Final = "files"
_GATHERED: Final = "files.tmp"
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST)

_log = logging.getLogger("penstock.spark")


class Layout(NamedTuple):
    manifests: Path
    # What the files' paths are relative to.
    root: Path


def inside(location: Path) -> Path:
    return location / INSIDE


def beside(location: Path) -> Path:
    """Of the real directory: a link to it must not have manifests of its own."""
    real = Path(os.path.realpath(location))
    return real.parent / f"{real.name}{SUFFIX}"


def layout_at(location: Path, manifests: Path, disk: Disk) -> Layout:
    """The layout of an archive with these manifests. Until its files are gathered they are in the location."""
    is_gathered = manifests != inside(location) and FILES in disk.names(manifests)
    return Layout(manifests, manifests / FILES if is_gathered else location)


def new_layout(location: Path, disk: Disk) -> Layout:
    """Create the directories of a new archive; those of another archiver may exist already."""
    # Moved out of the location: that fails if files could not be linked into it.
    made = location / f".{uuid.uuid4().hex[:12]}{SUFFIX}"
    disk.make_directory(made)
    disk.make_directory(made / FILES)
    disk.sync_directory(made)
    manifests = beside(location)
    try:
        disk.rename(made, manifests)
    except OSError as error:
        disk.remove_directory(made / FILES)
        disk.remove_directory(made)
        if error.errno not in _TAKEN:
            _warn(location, error)
            manifests = inside(location)
            disk.make_directory(manifests)
    for each in (manifests.parent, location, location.parent):
        disk.sync_directory(each)
    return layout_at(location, manifests, disk)


def move_out(location: Path, disk: Disk) -> None:
    """Move the manifests of an earlier version's archive beside it, in one step. `gather` is next.

    Archivers of that version can commit nothing from then on: they find no manifests.
    """
    try:
        disk.rename(inside(location), beside(location))
    except FileNotFoundError:
        return  # another archiver has just moved them
    except OSError as error:
        _warn(location, error)
        return
    disk.sync_directory(location)
    disk.sync_directory(beside(location).parent)


def gather(location: Path, manifests: Path, paths: Iterable[str], disk: Disk) -> None:
    """Give the files of a location their names beside the manifests, all at once.

    Archivers that do so at the same time help each other: they make the same links, and the first to finish
    moves all of them. No archiver commits before that.
    """
    gathered = manifests / _GATHERED
    try:
        disk.make_directory(gathered)
        for directory, names in _by_directory(paths).items():
            target = make_directories(disk, gathered, directory)
            for name in sorted(names):
                _link(disk, location / directory / name, target / name)
            disk.sync_directory(target)
        disk.rename(gathered, manifests / FILES)
    except OSError:
        if FILES not in disk.names(manifests):
            raise
        shutil.rmtree(gathered, ignore_errors=True)  # another archiver was done first
    disk.sync_directory(manifests)


def show(
    location: Path, root: Path, paths: Iterable[str], disk: Disk, only: Iterable[str] | None = None
) -> None:
    """Make these files, and no others, visible in the location; with ``only``, in these directories.

    Merged files are in the directory of those that they replace, and shown first: a reader of the directory finds
    a record twice for a moment, but never misses one.
    """
    wanted = _by_directory(paths)
    directories = {*wanted, *directories_at(location, disk)} if only is None else set(only)
    for directory in sorted(directories):
        shown = {name for name in disk.names(location / directory) if is_ours(name)}
        names = wanted.get(directory, set())
        if names == shown:
            continue
        make_directories(disk, location, directory)
        for name in sorted(names - shown):
            _link(disk, root / directory / name, location / directory / name)
        for name in sorted(shown - names):
            disk.unlink(location / directory / name)
        disk.sync_directory(location / directory)


def directories_at(location: Path, disk: Disk) -> Iterator[str]:
    """The directories that archives write files to, relative to the location."""
    for topic in (name for name in disk.names(location) if name.startswith("topic=")):
        yield topic
        yield from (f"{topic}/{name}" for name in disk.names(location / topic) if name.startswith("date="))


def files_at(location: Path, disk: Disk) -> Iterator[str]:
    """All files that archives have created there, finished or not, as paths relative to the location."""
    for directory in directories_at(location, disk):
        yield from (f"{directory}/{name}" for name in disk.names(location / directory) if is_ours(name))


def directory_in(path: str) -> str:
    return path.rpartition("/")[0]


def _by_directory(paths: Iterable[str]) -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        directory, _, name = path.rpartition("/")
        found[directory].add(name)
    return found


def _link(disk: Disk, existing: Path, name: Path) -> None:
    try:
        disk.link(existing, name)
    except FileExistsError:
        pass  # by another archiver
    except FileNotFoundError:
        if name.parent.name not in disk.names(name.parent.parent):
            raise
        _log.warning("%s is missing", existing)


def _warn(location: Path, error: OSError) -> None:
    _log.warning(
        "%s can have nothing beside it (%s), so it holds more than the current files: do not read it as it is, "
        "list its files",
        location,
        error.strerror,
    )
