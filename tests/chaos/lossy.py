"""``penstock`` with a witness: every fsync is written down, so that a power loss can be acted out afterwards.

Run instead of ``python -m penstock``, with two arguments before its own: a journal to append to, and a
directory on the same file system, the attic. ``power.py`` is the other half; it reads the journal when the
broker has been killed, and takes away what no fsync had covered.

The witness stands at ``os.fsync`` and ``os.ftruncate``, below ``penstock.machine``, so nothing can be made
durable behind its back. Files and directories are known by inode, which a rename does not change:

    bytes  INODE SIZE            an fsync of the file has returned; so many bytes were there when it was asked
    names  INODE {NAME: INODE}   an fsync of the directory has returned; these were its entries before it
    cut    INODE SIZE            the file was made shorter: what comes behind that is not covered any more

Each file that is mentioned gets a second name in the attic. So the disk can give back an entry whose removal
or replacement was not durable, and the number of an inode is not given to another file meanwhile.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any

from penstock.cli.main import run
from penstock.machine import MachineFile


class Witness:
    def __init__(self, journal: str, attic: str) -> None:
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._attic = attic
        self._fsync = os.fsync
        self._ftruncate = os.ftruncate
        # What the fsync that this thread is about to make was asked to cover, if it was asked earlier.
        self._asked = threading.local()

    def watch(self) -> None:
        os.fsync = self.fsync  # type: ignore[assignment]
        os.ftruncate = self.ftruncate
        prepare_sync = MachineFile.prepare_sync

        def prepare(file: MachineFile) -> Callable[[], None]:
            size = file.size
            sync = prepare_sync(file)

            def work() -> None:
                self._asked.size = size
                try:
                    sync()
                finally:
                    self._asked.size = None

            return work

        MachineFile.prepare_sync = prepare  # type: ignore[method-assign,assignment]

    def fsync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(status.st_mode):
            entries = list(os.scandir(descriptor))
            names = {entry.name: entry.inode() for entry in entries}
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    self._keep(os.path.join(path, entry.name), entry.inode())
            self._fsync(descriptor)
            self._write("names", status.st_ino, names)
        else:
            asked = getattr(self._asked, "size", None)
            self._keep(path, status.st_ino)
            self._fsync(descriptor)
            self._write("bytes", status.st_ino, status.st_size if asked is None else asked)

    def ftruncate(self, descriptor: int, size: int) -> None:
        # First the journal: a cut that is announced and not made takes nothing that was promised.
        self._write("cut", os.fstat(descriptor).st_ino, size)
        self._ftruncate(descriptor, size)

    def _keep(self, path: str, inode: int) -> None:
        kept = os.path.join(self._attic, str(inode))
        try:
            os.link(path, kept)
        except (FileExistsError, FileNotFoundError):
            return  # it is there already; or it was removed a moment ago
        if os.stat(kept).st_ino != inode:  # replaced a moment ago
            os.unlink(kept)

    def _write(self, *event: Any) -> None:
        os.write(self._journal, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    Witness(sys.argv[1], sys.argv[2]).watch()
    sys.exit(run(sys.argv[3:]))
