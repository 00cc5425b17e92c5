"""The versions of a snapshot at its location, and the one step that makes a version count.

A version is a directory of Parquet files, written by Spark, and a manifest that is published behind it. The
manifest with the highest number is the snapshot; a directory that no manifest names does not exist. What a newcomer
gets wrong: a pointer that is renamed over the last one would do for one run at a time, and lose a version when two
commit at once. A number can be taken once.
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
# The newest, and the one before it: who began to read that must be able to end.
VERSIONS_KEPT = 2
CURRENT, DELETED, SUPERSEDED = "current", "deleted", "superseded"

_NUMBERED = re.compile(r"(\d{20})\.json")
_TEMPORARY = re.compile(r"\.(\d{20})\.json\.[0-9a-f]+\.tmp")
_VERSION = re.compile(r"v(\d{8,})-[0-9a-f]{6}")


class SnapshotConflict(RuntimeError):
    """Another run has made the version that this one wanted to make. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Version:
    """What one manifest says."""

    number: int
    directory: str
    topic: str
    topic_id: str
    # Of each partition: where the next run begins.
    offsets: dict[int, int]
    # Rows by state.
    rows: dict[str, int]
    size_bytes: int
    # Spark's JSON of all columns of a row, and of those parsed from the value alone.
    schema: str
    value_schema: str | None
    created_ms: int

    def to_json(self) -> bytes:
        return json.dumps({"format": MANIFEST_FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Version:
        """Raises TableError for anything that `to_json` did not write."""
        try:
            document = json.loads(text)
            if document.pop("format") == MANIFEST_FORMAT:
                offsets = {int(partition): offset for partition, offset in document.pop("offsets").items()}
                return cls(**document, offsets=offsets)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TableError(f"the snapshot's manifest cannot be read: {error!r}") from None
        raise TableError("the snapshot was written by a newer program; use that")


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
        """Make a version that is written the newest one. Raises SnapshotConflict if another took its number."""
        version = self._measured(version)
        self.location.mkdir(parents=True, exist_ok=True)
        self._disk.make_directory(self._manifests)
        self._disk.sync_directory(self.location)
        final = self._path(version.number)
        temporary = self._manifests / temporary_name(final.name)
        self._disk.create(temporary, version.to_json())
        try:
            publish(self._disk, temporary, final)
        except (FileExistsError, FileNotFoundError):  # the second: it has also tidied up behind itself
            raise self._overtaken(version, temporary) from None
        if self._numbers()[-1] >= version.number + VERSIONS_KEPT:
            # The number was free only because it had been pruned.
            raise self._overtaken(version, final)
        self._prune(version.number)
        return version

    def _overtaken(self, version: Version, manifest: Path) -> SnapshotConflict:
        """Leave nothing of a version behind that came too late."""
        self._disk.unlink(manifest)
        shutil.rmtree(self.location / version.directory, ignore_errors=True)
        return SnapshotConflict(
            f"another run has made version {version.number} of the snapshot at {self.location} meanwhile; "
            "run this one again if what it has does not reach as far"
        )

    def _measured(self, version: Version) -> Version:
        """Count what was written, and make it durable."""
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
        """Delete old versions, and what runs that died, or lost, have left behind."""
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
            # A run that makes a later version is at work there; one that makes this or an earlier has lost.
            if found is not None and int(found[1]) <= newest and name not in kept:
                shutil.rmtree(self.location / name, ignore_errors=True)

    def _numbers(self) -> list[int]:
        found = (_NUMBERED.fullmatch(name) for name in self._disk.names(self._manifests))
        return sorted(int(each[1]) for each in found if each is not None)

    def _path(self, number: int) -> Path:
        return self._manifests / f"{number:020d}.json"
