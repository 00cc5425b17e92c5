"""A partitioned Parquet table with a manifest: the archive's own format, only files in directories.

A commit writes the complete next manifest and names it by `link`, which fails if the name is taken: of two
archivers that commit at once one wins, and the other gets an error. The highest number counts. All listed files
were synced before. A manifest has the whole state, so one read is a consistent view, and an unlisted file does not
count.

The location itself is for readers that know nothing of manifests. It follows each commit (`settle`) a moment later;
after a kill, in the next run. `layout.py` says where everything is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.spark.jobs.tables.disk import Disk, publish
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.layout import (
    beside,
    directory_in,
    gather,
    inside,
    layout_at,
    move_out,
    new_layout,
    show,
)
from penstock.spark.jobs.tables.state import Change, CommitConflict, Shape, State, new_state, temporary_name

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
        self._inside, self._beside = inside(location), beside(location)
        manifests = self._inside if self._numbers(self._inside) else self._beside
        self._layout = layout_at(location, manifests, self._disk)

    @property
    def root(self) -> Path:
        """What the files' paths are relative to, as of the last `load`."""
        return self._layout.root

    def load(self) -> State | None:
        """The newest state; None if there is no table."""
        held: list[Path] = []
        for _ in range(READ_ATTEMPTS):
            # In this order: manifests move from inside to beside.
            held = [each for each in (self._inside, self._beside) if self._numbers(each)]
            if not held:
                return None
            if len(held) > 1:
                continue  # moved between the two looks
            self._layout = layout_at(self.location, held[0], self._disk)
            try:
                return self._read(self._numbers()[-1])
            except (FileNotFoundError, IndexError):
                continue  # a hundred commits since the listing, or moved
        if len(held) > 1:
            raise TableError(
                f"{self.location} has two tables, {held[0]} and {held[1]}; move one of them away"
            )
        raise OSError(f"the manifests in {self._layout.manifests} vanish while they are read")

    def create(self, shape: Shape) -> State:
        """Create the table. Raises CommitConflict if another archiver was faster."""
        self.location.mkdir(parents=True, exist_ok=True)
        self._layout = new_layout(self.location, self._disk)
        state = new_state(shape)
        self._write(state)
        return state

    def commit(self, base: State, change: Change) -> State:
        """Raises CommitConflict, and changes nothing, if ``base`` is no longer the newest state."""
        try:
            # The writer of the base may have died before its name was durable; this commit builds on it.
            self._disk.sync_directory(self._layout.manifests)
        except FileNotFoundError:
            raise CommitConflict(f"the manifests of {self.location} were moved") from None
        wall_ms = time.time_ns() // 1_000_000
        state = base.after(change, wall_ms=wall_ms)
        state = self._without_dead(state, wall_ms)
        self._write(state)
        self._prune(state.batch)
        self.settle(state, {directory_in(each.path) for each in (*change.added, *change.removed)})
        return state

    def move_beside(self) -> None:
        """Move the manifests of an archive of an earlier version out of its directory. `settle` does the rest."""
        if self.load() is not None and self._layout.manifests == self._inside:
            move_out(self.location, self._disk)

    def settle(self, state: State, only: Iterable[str] | None = None) -> None:
        """Make the location's files those of a state, or of a newer one; with ``only``, in these directories.

        Two archivers may do so for different states at once. Each looks again when it is done, so the one that is
        done last has seen the newest.
        """
        if self._layout.manifests == self._inside:
            return
        self._layout = layout_at(self.location, self._beside, self._disk)
        if self.root == self.location:
            paths = (*(each.path for each in state.files), *(path for path, _ in state.retired))
            gather(self.location, self._beside, paths, self._disk)
            self._layout = layout_at(self.location, self._beside, self._disk)
        self.location.mkdir(parents=True, exist_ok=True)
        while True:
            show(self.location, self.root, (each.path for each in state.files), self._disk, only)
            newest = self._numbers()[-1:]
            if newest <= [state.batch]:
                return
            found = self.load()
            if found is None:
                return
            state, only = found, None

    def ever_committed(self, paths: set[str], state: State) -> set[str]:
        """The files that this table has ever listed, which must not be deleted as leftovers."""
        return paths & ({each.path for each in state.files} | {path for path, _ in state.retired})

    # A manifest

    def _write(self, state: State) -> None:
        name = f"{state.batch:020d}.json"
        directory = self._layout.manifests
        temporary = directory / temporary_name(name)
        try:
            self._disk.create(temporary, state.to_json(files=True).encode())
            publish(self._disk, temporary, directory / name)
        except (FileExistsError, FileNotFoundError):
            # Not found: the archiver that committed this number first has cleaned up, or the manifests were moved.
            self._disk.unlink(temporary)
            raise CommitConflict(f"{self.location} has a commit {state.batch} already") from None
        if self._lost(state.batch):
            # Harmless, because it is not the newest.
            self._disk.unlink(directory / name)
            raise CommitConflict(f"{self.location} has newer commits than {state.batch}")

    def _lost(self, number: int) -> bool:
        """Whether ``number`` was free only because it had been pruned: a hundred commits happened meanwhile.

        Also for the very first commit, if we paused between finding no table and creating one. A successful commit
        counts as lost if a hundred more followed at once; then the state is read again and includes it.
        """
        return self._numbers()[-1:] >= [number + MANIFESTS_KEPT]  # none: moved, with this one among them

    def _read(self, number: int) -> State:
        path = self._layout.manifests / f"{number:020d}.json"
        try:
            return State.from_json(self._disk.read(path))
        except TableError as error:
            raise TableError(f"{path}: {error}") from None

    def _numbers(self, manifests: Path | None = None) -> list[int]:
        names = self._disk.names(manifests or self._layout.manifests)
        found = (_NUMBERED.fullmatch(name) for name in names)
        return sorted(int(each[1]) for each in found if each)

    def _prune(self, newest: int) -> None:
        for number in self._numbers():
            if number > newest - MANIFESTS_KEPT:
                break
            self._disk.unlink(self._layout.manifests / f"{number:020d}.json")
        for name in self._disk.names(self._layout.manifests):
            left_over = _TEMPORARY.fullmatch(name)
            if left_over and int(left_over[1]) <= newest:
                self._disk.unlink(self._layout.manifests / name)

    def _without_dead(self, state: State, wall_ms: int) -> State:
        """Delete files that were replaced long ago, and drop them from the state."""
        dead = [path for path, since_ms in state.retired if wall_ms - since_ms > RETIRED_FOR_MS]
        if not dead:
            return state
        for path in dead:
            self._disk.unlink(self.root / path)
        kept = tuple(each for each in state.retired if each[0] not in set(dead))
        return replace(state, retired=kept)
