"""A partitioned Parquet table with a manifest: the archive's own format, only files in a directory.

    LOCATION/_penstock/00000000000000000007.json        the manifest, the highest number counts
    LOCATION/topic=orders/date=2026-11-16/....parquet   what it lists

A commit writes the complete next manifest and names it by `link`, which fails if the name is taken: of two
archivers that commit at once one wins, and the other gets an error. All listed files were synced before. A
manifest has the whole state, so one read is a consistent view, and an unlisted file does not count. Never read
the directory instead of the manifest: it also has files that were never committed or were replaced.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.spark.jobs.tables.disk import Disk, publish
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.state import Change, CommitConflict, Shape, State, new_state, temporary_name

DIRECTORY: Final = "_penstock"
# Old manifests are a history. This many also keep `_lost` correct, see there.
MANIFESTS_KEPT: Final = 100
# How long a replaced file stays: longer than any query that began before it was replaced.
RETIRED_FOR_MS: Final = 24 * 3600 * 1000
READ_ATTEMPTS: Final = 10

_NUMBERED = re.compile(r"(\d{20})\.json")
_TEMPORARY = re.compile(r"\.(\d{20})\.json\.[0-9a-f]+\.tmp")


class ManifestTable:
    format: Final = "parquet"

    def __init__(self, location: Path, disk: Disk | None = None) -> None:
        self.location = location
        self._disk = disk or Disk()
        self._directory = location / DIRECTORY

    def load(self) -> State | None:
        """The newest state; None if there is no table."""
        for _ in range(READ_ATTEMPTS):
            numbers = self._numbers()
            if not numbers:
                return None
            try:
                return self._read(numbers[-1])
            except FileNotFoundError:
                continue  # a hundred commits since the listing
        raise OSError(f"the manifests in {self._directory} vanish while they are read")

    def create(self, shape: Shape) -> State:
        """Create the table. Raises CommitConflict if another archiver was faster."""
        self.location.mkdir(parents=True, exist_ok=True)
        self._disk.make_directory(self._directory)
        self._disk.sync_directory(self.location)
        self._disk.sync_directory(self.location.parent)
        state = new_state(shape)
        self._write(state)
        return state

    def commit(self, base: State, change: Change) -> State:
        """Raises CommitConflict, and changes nothing, if ``base`` is no longer the newest state."""
        # The writer of the base may have died before its name was durable; this commit builds on it.
        self._disk.sync_directory(self._directory)
        wall_ms = time.time_ns() // 1_000_000
        state = base.after(change, wall_ms=wall_ms)
        state = self._without_dead(state, wall_ms)
        self._write(state)
        self._prune(state.batch)
        return state

    def ever_committed(self, paths: set[str], state: State) -> set[str]:
        """The files that this table has ever listed, which must not be deleted as leftovers."""
        return paths & ({each.path for each in state.files} | {path for path, _ in state.retired})

    # A manifest

    def _write(self, state: State) -> None:
        name = f"{state.batch:020d}.json"
        temporary = self._directory / temporary_name(name)
        self._disk.create(temporary, state.to_json(files=True).encode())
        try:
            publish(self._disk, temporary, self._directory / name)
        except (FileExistsError, FileNotFoundError):
            # Not found: the archiver that committed this number first has already cleaned up.
            self._disk.unlink(temporary)
            raise CommitConflict(f"{self.location} has a commit {state.batch} already") from None
        if self._lost(state.batch):
            # Harmless, because it is not the newest.
            self._disk.unlink(self._directory / name)
            raise CommitConflict(f"{self.location} has newer commits than {state.batch}")

    def _lost(self, number: int) -> bool:
        """Whether ``number`` was free only because it had been pruned: a hundred commits happened meanwhile.

        Also for the very first commit, if we paused between finding no table and creating one. A successful commit
        counts as lost if a hundred more followed at once; then the state is read again and includes it.
        """
        return self._numbers()[-1] >= number + MANIFESTS_KEPT

    def _read(self, number: int) -> State:
        path = self._directory / f"{number:020d}.json"
        try:
            return State.from_json(self._disk.read(path))
        except TableError as error:
            raise TableError(f"{path}: {error}") from None

    def _numbers(self) -> list[int]:
        found = (_NUMBERED.fullmatch(name) for name in self._disk.names(self._directory))
        return sorted(int(each[1]) for each in found if each)

    def _prune(self, newest: int) -> None:
        for number in self._numbers():
            if number > newest - MANIFESTS_KEPT:
                break
            self._disk.unlink(self._directory / f"{number:020d}.json")
        for name in self._disk.names(self._directory):
            left_over = _TEMPORARY.fullmatch(name)
            if left_over and int(left_over[1]) <= newest:
                self._disk.unlink(self._directory / name)

    def _without_dead(self, state: State, wall_ms: int) -> State:
        """Delete files that were replaced long ago, and drop them from the state."""
        dead = [path for path, since_ms in state.retired if wall_ms - since_ms > RETIRED_FOR_MS]
        if not dead:
            return state
        for path in dead:
            self._disk.unlink(self.location / path)
        kept = tuple(each for each in state.retired if each[0] not in set(dead))
        return replace(state, retired=kept)
