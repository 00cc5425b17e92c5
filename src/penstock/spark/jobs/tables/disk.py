"""The steps by which files become durable, one method each, so that a test can crash between any two of them.

A table's location is a directory shared by driver and executors: a local disk, or NFS. A synced file can still lose
its name until its directory is synced too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Disk:
    """The real disk. Each method is one step, never half done after a crash; unsynced data may be lost."""

    def create(self, path: Path, data: bytes) -> None:
        """Create a file. Raises FileExistsError."""
        with path.open("xb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        self.sync(path)

    def link(self, existing: Path, name: Path) -> None:
        """Give a file a second name, or raise FileExistsError: of several attempts one succeeds."""
        os.link(existing, name)

    def unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def rename(self, existing: Path, name: Path) -> None:
        """Move a directory. Raises OSError if the name has a directory that is not empty."""
        existing.rename(name)

    def remove_directory(self, path: Path) -> None:
        """Nothing happens if it is not empty."""
        with contextlib.suppress(OSError):
            path.rmdir()

    def names(self, directory: Path) -> list[str]:
        """Empty if there is no such directory."""
        try:
            return os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, path: Path) -> bytes:
        return path.read_bytes()


def publish(disk: Disk, temporary: Path, final: Path) -> None:
    """Give a complete file its final name, durably. Raises FileExistsError if the name is taken, changing nothing.

    Not a rename: that would replace an existing file, and the loser of a race would overwrite the winner.
    """
    disk.sync(temporary)
    disk.link(temporary, final)
    disk.sync_directory(final.parent)
    disk.unlink(temporary)


def make_directories(disk: Disk, location: Path, relative: str) -> Path:
    """Create a directory below a location, durably. Existing directories are synced too: their creator may have
    died before it did so.
    """
    directory = location
    for name in Path(relative).parts:
        parent, directory = directory, directory / name
        disk.make_directory(directory)
        disk.sync_directory(parent)
    return directory
