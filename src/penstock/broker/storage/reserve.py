"""Room on a disk that is kept for what has to be written when it is full: metadata, votes and checkpoints.

The reserve is a few files that nobody reads. A write that must succeed and finds no room removes one of them and
tries again (``keeping``). Records never take from it: a disk without room for them takes its partitions out of
the in-sync replicas (``storage.py``) and says so in the metadata, which is what the reserve pays for. When there
is room again the files are made again, and only then are records written again.

What a newcomer gets wrong: the free space of a file system says nothing about quotas and inodes. So ``look``
asks first, and then takes the room to see whether it is there.
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
# Several, so that somebody else who fills the disk does not get all of it at once.
PARTS = 4
# A snapshot of 100,000 partitions, a checkpoint of as many logs, and some hours of metadata; on a small disk less.
PART_BYTES_MAX = 4 * 1024 * 1024
SHARE_OF_DISK = 64
# The disk has not failed and is not full: files like these cannot be made here, as under a limit for their size.
_REFUSED = (errno.EFBIG, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)


class Reserve:
    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._part_bytes = 0
        # Those that can be removed.
        self._parts: list[str] = []
        # Why there can be none here. Then the free space alone tells whether there is room.
        self.refusal: OSError | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is as large as it can be."""
        return len(self._parts) == PARTS or self.refusal is not None

    def find(self) -> None:
        """See what an earlier process left, which is all there is on a disk that is full at start."""
        self._files.remove(self._path("probe"))
        self._parts = [path for path in map(self._path, range(PARTS)) if self._files.exists(path)]
        capacity = self._files.capacity(self._directory)
        self._part_bytes = min(PART_BYTES_MAX, capacity // SHARE_OF_DISK // PARTS)

    def fill(self) -> None:
        """Take back what was given, where such files can be made. Raises OSError when there is no room."""
        for path in map(self._path, range(PARTS)):
            if path not in self._parts:
                refusal = self._refused(path, self._part_bytes)
                if refusal is not None:
                    self.refusal = refusal
                    return
                self._parts.append(path)
        self.refusal = None

    def look(self) -> None:
        """Take back what was given, and see that as much room is left. Raises OSError when there is none."""
        missing = PARTS - len(self._parts)
        if self._files.free_bytes(self._directory) < self._part_bytes * (PARTS + missing):
            # To try would take, for a moment, what somebody may have to write in.
            raise OSError(errno.ENOSPC, "there is not enough room yet", self._directory)
        self.fill()
        path = self._path("probe")
        if self._refused(path, self._part_bytes * PARTS) is None:
            self._files.remove(path)

    def _refused(self, path: str, size: int) -> OSError | None:
        """Make a file of a size; why that is not possible here. Raises OSError when there is no room for it."""
        try:
            self._files.allocate(path, size)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return error
        return None

    def give(self) -> bool:
        """Make some room; False when nothing is left."""
        try:
            path = self._parts.pop()
        except IndexError:
            return False
        self._files.remove(path)
        return True

    def give_spare(self) -> bool:
        """Make some room for deleting what takes more; half of the reserve stays for the metadata."""
        return len(self._parts) > PARTS // 2 and self.give()

    def keeping(self, work: Callable[[], Result]) -> Result:
        """Do something that must be written, from the reserve if there is no other room. Raises OSError."""
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in NO_ROOM or not self.give():
                    raise

    def _path(self, part: object) -> str:
        return os.path.join(self._directory, f"{NAME}.{part}")
