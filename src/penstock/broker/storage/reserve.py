"""Disk space reserved for what must be written even when the disk is full: metadata, votes and checkpoints.

The reserve is a few placeholder files. A write that must succeed and finds no room removes one of them and tries
again (``keeping``). Records never use it: when a disk has no room for them, its partitions leave the in-sync
replicas (``storage.py``), and the reserve holds the metadata that says so. When there is room again the files are
created again first, and only then are records written.

The free space of a file system says nothing about quotas and inodes. So ``look`` checks the free space first and
then allocates the room to see whether it is really there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from penstock.environment import NO_ROOM, Files

Result = TypeVar("Result")

# Not a name that a partition could have.
NAME = "penstock-reserve"
# Several, so that another program that fills the disk does not get all of it at once.
PARTS = 4
# A snapshot of 100,000 partitions, a checkpoint of as many logs, and some hours of metadata; on a small disk less.
PART_BYTES_MAX = 4 * 1024 * 1024
SHARE_OF_DISK = 64
# The disk is neither broken nor full: it does not support such files, or a file size limit applies.
_REFUSED = (errno.EFBIG, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)


class Reserve:
    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._part_bytes = 0
        # The files that exist and can be removed.
        self._parts: list[str] = []
        # Why no reserve can be created here. Then the free space alone tells whether there is room.
        self.refusal: OSError | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no part of it is used."""
        return len(self._parts) == PARTS or self.refusal is not None

    def find(self) -> None:
        """Look for the files of an earlier process. On a disk that is full at start there are no others."""
        self._files.remove(self._path("probe"))
        self._parts = [path for path in map(self._path, range(PARTS)) if self._files.exists(path)]
        capacity = self._files.capacity(self._directory)
        self._part_bytes = min(PART_BYTES_MAX, capacity // SHARE_OF_DISK // PARTS)

    def fill(self) -> None:
        """Create the missing files, where that is possible. Raises OSError when there is no room."""
        for path in map(self._path, range(PARTS)):
            if path not in self._parts:
                refusal = self._refused(path, self._part_bytes)
                if refusal is not None:
                    self.refusal = refusal
                    return
                self._parts.append(path)
        self.refusal = None

    def look(self) -> None:
        """Create the missing files, and check that as much room again is free. Raises OSError when it is not."""
        missing = PARTS - len(self._parts)
        if self._files.free_bytes(self._directory) < self._part_bytes * (PARTS + missing):
            # Trying would briefly take the room that another write may need.
            raise OSError(errno.ENOSPC, "there is not enough room yet", self._directory)
        self.fill()
        path = self._path("probe")
        if self._refused(path, self._part_bytes * PARTS) is None:
            self._files.remove(path)

    def _refused(self, path: str, size: int) -> OSError | None:
        """Allocate a file. Return the error if that is not possible here. Raises OSError when there is no room."""
        try:
            self._files.allocate(path, size)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return error
        return None

    def give(self) -> bool:
        """Remove one file to make room; False when none is left."""
        try:
            path = self._parts.pop()
        except IndexError:
            return False
        self._files.remove(path)
        return True

    def give_spare(self) -> bool:
        """Make some room so that a log can delete. Half of the reserve stays for the metadata."""
        return len(self._parts) > PARTS // 2 and self.give()

    def keeping(self, work: Callable[[], Result]) -> Result:
        """Run a write that must succeed, using the reserve if the disk is full. Raises OSError."""
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in NO_ROOM or not self.give():
                    raise

    def _path(self, part: object) -> str:
        return os.path.join(self._directory, f"{NAME}.{part}")
