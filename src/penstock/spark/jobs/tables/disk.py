"""The steps by which files become durable, one method each, so that a test can crash between any two of them.

A table's location is a directory that driver and executors all see: a local disk, or NFS. What a newcomer gets
wrong: a file that was synced can still be lost with its name, until the directory of the name is synced too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Disk:
    """The real one. Each method is one step: none is half done after a crash; what is not synced may be lost."""

    def create(self, path: Path, data: bytes) -> None:
        """A new file. Raises FileExistsError if there is one of this name."""
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
        """Give a file a second name, or raise FileExistsError: of any number who try, one succeeds."""
        os.link(existing, name)

    def unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

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

    Not a rename: that would replace what is there, and the loser of a race would overwrite the winner.
    """
    disk.sync(temporary)
    disk.link(temporary, final)
    disk.sync_directory(final.parent)
    disk.unlink(temporary)


def make_directories(disk: Disk, location: Path, relative: str) -> Path:
    """A directory below a location, every name on the way durable. Synced also if it was there: by whom, and
    whether they came so far, nobody knows.
    """
    directory = location
    for name in Path(relative).parts:
        parent, directory = directory, directory / name
        disk.make_directory(directory)
        disk.sync_directory(parent)
    return directory
