"""The versions of a snapshot at its location, and the atomic commit of a version.

A version is a directory of Parquet files, written by Spark, and a manifest that is published after it. The
manifest with the highest number is the snapshot; a directory without a manifest does not count. A pointer file
renamed over the last one would work for a single run, but lose a version when two commit at once. A number can be
taken only once.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from penstock.spark.jobs.tables.disk import Disk, publish
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.state import temporary_name

DIRECTORY = "_snapshot"
MANIFEST_FORMAT = 1
# The newest and the one before it, which readers may still be reading.
VERSIONS_KEPT = 2
CURRENT, DELETED, SUPERSEDED = "current", "deleted", "superseded"

_NUMBERED = re.compile(r"(\d{20})\.json")
_TEMPORARY = re.compile(r"\.(\d{20})\.json\.[0-9a-f]+\.tmp")
_VERSION = re.compile(r"v(\d{8,})-[0-9a-f]{6}")


class SnapshotConflict(RuntimeError):
    """Another run has committed the same version number. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Version:
    """The contents of one manifest."""

    number: int
    directory: str
    topic: str
    topic_id: str
    # By partition: where the next run begins.
    offsets: dict[int, int]
    # Rows by state.
    rows: dict[str, int]
    size_bytes: int
    # Spark's JSON of all columns, and of those parsed from the value.
    schema: str
    value_schema: str | None
    created_ms: int

    def to_json(self) -> bytes:
        return json.dumps({"format": MANIFEST_FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Version:
        """Raises TableError for text that `to_json` did not write."""
        try:
            document = json.loads(text)
            if document.pop("format") == MANIFEST_FORMAT:
                offsets = {int(partition): offset for partition, offset in document.pop("offsets").items()}
                return cls(**document, offsets=offsets)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TableError(f"the snapshot's manifest cannot be read: {error!r}") from None
        raise TableError("the snapshot was written by a newer version of penstock; use that one")


class Versions:
    """The versions at a location."""

    def __init__(self, location: Path, disk: Disk | None = None) -> None:
        self.location = location
        self._disk = disk or Disk()
        self._manifests = location / DIRECTORY

    def load(self) -> Version | None:
        """The newest version; None if there is none."""
        while numbers := self._numbers():
            path = self._path(numbers[-1])
            try:
                return Version.from_json(self._disk.read(path))
            except FileNotFoundError:
                continue  # two newer ones since the listing
            except TableError as error:
                raise TableError(f"{path}: {error}") from None
        return None

    def commit(self, version: Version) -> Version:
        """Commit a written version as the newest. Raises SnapshotConflict if its number is taken."""
        version = self._measured(version)
        self.location.mkdir(parents=True, exist_ok=True)
        self._disk.make_directory(self._manifests)
        self._disk.sync_directory(self.location)
        final = self._path(version.number)
        temporary = self._manifests / temporary_name(final.name)
        self._disk.create(temporary, version.to_json())
        try:
            publish(self._disk, temporary, final)
        except (FileExistsError, FileNotFoundError):  # not found: the other run has also pruned
            raise self._overtaken(version, temporary) from None
        if self._numbers()[-1] >= version.number + VERSIONS_KEPT:
            # The number was free only because its version had been pruned.
            raise self._overtaken(version, final)
        self._prune(version.number)
        return version

    def _overtaken(self, version: Version, manifest: Path) -> SnapshotConflict:
        """Delete a version that came too late."""
        self._disk.unlink(manifest)
        shutil.rmtree(self.location / version.directory, ignore_errors=True)
        return SnapshotConflict(
            f"another run has committed version {version.number} of the snapshot at {self.location} meanwhile; "
            "run this one again if that version does not reach as far"
        )

    def _measured(self, version: Version) -> Version:
        """Count the written rows and bytes, and make the files durable."""
        rows = dict.fromkeys((CURRENT, DELETED, SUPERSEDED), 0)
        size = 0
        directory = self.location / version.directory
        for path in sorted(directory.glob("state=*/*.parquet")):
            rows[path.parent.name.removeprefix("state=")] += pq.read_metadata(path).num_rows
            size += path.stat().st_size
            self._disk.sync(path)
        for state in directory.glob("state=*"):
            self._disk.sync_directory(state)
        self._disk.sync_directory(directory)
        return replace(version, rows=rows, size_bytes=size)

    def _prune(self, newest: int) -> None:
        """Delete old versions, and leftovers of runs that died or lost the race."""
        for number in self._numbers():
            if number <= newest - VERSIONS_KEPT:
                self._disk.unlink(self._path(number))
        for name in self._disk.names(self._manifests):
            found = _TEMPORARY.fullmatch(name)
            if found is not None and int(found[1]) <= newest:
                self._disk.unlink(self._manifests / name)
        kept = set()
        for number in self._numbers():
            with contextlib.suppress(FileNotFoundError):
                kept.add(Version.from_json(self._disk.read(self._path(number))).directory)
        for name in self._disk.names(self.location):
            found = _VERSION.fullmatch(name)
            # A directory of a later number belongs to a running run; one of this or an earlier number has lost.
            if found is not None and int(found[1]) <= newest and name not in kept:
                shutil.rmtree(self.location / name, ignore_errors=True)

    def _numbers(self) -> list[int]:
        found = (_NUMBERED.fullmatch(name) for name in self._disk.names(self._manifests))
        return sorted(int(each[1]) for each in found if each is not None)

    def _path(self, number: int) -> Path:
        return self._manifests / f"{number:020d}.json"
