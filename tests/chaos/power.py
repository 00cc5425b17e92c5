"""What a power loss leaves of a data directory, judged by the journal that ``lossy.py`` wrote.

A disk promises only what an fsync has covered: of a file the bytes that were there, of a directory the names.
Everything later may be there or not, whole or in part. So three disks are acted out, and the broker has to
come to terms with each of them:

    STRICT     nothing is there but what was promised
    KIND       the names are all there, and some of the bytes
    FICKLE     of the rest anything may be there: some names and not others, files with a piece of their new
               bytes, with zeros where bytes should be, with garbage at the end

A rename is atomic: the file has its old name or its new one. Nothing is assumed about the order in which
changes reach the disk, which is less than any file system in use guarantees.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import defaultdict
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

# The broker's note of which boot of the machine it last ran on; after a power loss it is another one.
BOOT_ID = ".boot-id"
TORN_BYTES_MAX = 5000


class Disk(Enum):
    STRICT = auto()
    KIND = auto()
    FICKLE = auto()


class Damage(NamedTuple):
    """How much a power loss took: so that a test can tell that there was one."""

    lost_bytes: int
    lost_names: int


class PowerLoss:
    """The journal and the attic of one data directory, and what to do with them while no broker runs."""

    def __init__(self, data_dir: Path, scratch: Path) -> None:
        self._data_dir = data_dir
        self.journal = scratch / "journal"
        self.attic = scratch / "attic"
        self.attic.mkdir(parents=True)
        self.journal.touch()
        self._bytes: dict[int, int] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._lost_bytes = 0
        self._lost_names = 0

    def strike(self, disk: Disk, choose: random.Random) -> Damage:
        """Leave of the directory what a power loss might, and take that as the new beginning."""
        self._read_journal()
        self._lost_bytes = self._lost_names = 0
        self._visit(self._data_dir, disk, choose)
        boot_id = self._data_dir / BOOT_ID
        if boot_id.exists():
            boot_id.write_text(f"boot {choose.randrange(2**32)}")
        self._begin_anew()
        return Damage(self._lost_bytes, self._lost_names)

    def _read_journal(self) -> None:
        self._bytes.clear()
        self._names.clear()
        for line in self.journal.read_bytes().splitlines():
            kind, inode, value = json.loads(line)
            match kind:
                case "bytes":
                    # Two flushes of one file may end in the other order.
                    self._bytes[inode] = max(value, self._bytes.get(inode, 0))
                case "cut":
                    self._bytes[inode] = min(value, self._bytes.get(inode, 0))
                case "names":
                    self._names[inode] = value

    # Names

    def _visit(self, directory: Path, disk: Disk, choose: random.Random) -> None:
        promised = self._names.get(directory.stat().st_ino, {})
        present = _entries(directory)
        if disk is not Disk.KIND:
            for names in _changes(promised, present):
                if disk is Disk.STRICT or choose.random() < 0.5:
                    self._undo(directory, names, promised, present)
        for name in sorted(_entries(directory)):
            path = directory / name
            if path.is_dir():
                self._visit(path, disk, choose)
            else:
                self._lose_bytes(path, disk, choose)

    def _undo(
        self, directory: Path, names: set[str], promised: dict[str, int], present: dict[str, int]
    ) -> None:
        """Give these names back what they stood for when the directory was last synced."""
        aside: dict[int, Path] = {}
        for name in names & set(present):
            aside[present[name]] = (directory / name).rename(directory / f"{name}.{present[name]}.aside")
        for name in names & set(promised):
            inode = promised[name]
            if inode in aside:
                aside.pop(inode).rename(directory / name)
            elif (self.attic / str(inode)).exists():
                os.link(self.attic / str(inode), directory / name)
        for path in aside.values():
            self._lost_names += 1
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    # Bytes

    def _lose_bytes(self, path: Path, disk: Disk, choose: random.Random) -> None:
        status = path.stat()
        size = status.st_size
        promised = min(size, self._bytes.get(status.st_ino, 0))
        if promised == size:
            return
        kept = promised if disk is Disk.STRICT else choose.randint(promised, size)
        with path.open("r+b") as file:
            file.truncate(kept)
            if disk is Disk.FICKLE:
                self._spoil(file, promised, kept, size, choose)
        self._lost_bytes += size - kept

    @staticmethod
    def _spoil(file, promised: int, kept: int, size: int, choose: random.Random) -> None:  # type: ignore[no-untyped-def]
        """Something else stands where the last bytes should."""
        match choose.choice(("whole", "zeros", "garbage", "stretched")):
            case "zeros":
                begin = choose.randint(promised, kept)
                file.seek(begin)
                file.write(bytes(min(kept - begin, TORN_BYTES_MAX)))
            case "garbage":
                begin = choose.randint(promised, kept)
                file.seek(begin)
                file.write(choose.randbytes(min(kept - begin, TORN_BYTES_MAX)))
            case "stretched":  # the new size was written, the bytes were not
                file.truncate(size)

    def _begin_anew(self) -> None:
        """What is on the disk now is durable: nothing is cached after a power loss."""
        shutil.rmtree(self.attic)
        self.attic.mkdir()
        lines = []
        for directory, _, names in os.walk(self._data_dir):
            lines.append(["names", os.stat(directory).st_ino, _entries(Path(directory))])
            for name in names:
                path = os.path.join(directory, name)
                status = os.stat(path)
                lines.append(["bytes", status.st_ino, status.st_size])
                os.link(path, self.attic / str(status.st_ino))
        self.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _entries(directory: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(directory)}


def _changes(promised: dict[str, int], present: dict[str, int]) -> list[set[str]]:
    """The names that changed since the last sync, in groups that can only change together.

    A rename joins the name that went and the name that came; a replacement touches one name only.
    """
    by_inode: defaultdict[int, set[str]] = defaultdict(set)
    for entries in (promised, present):
        for name, inode in entries.items():
            if promised.get(name) != present.get(name):
                by_inode[inode].add(name)
    groups: list[set[str]] = []
    for names in by_inode.values():
        joined = [group for group in groups if group & names]
        groups = [group for group in groups if not group & names]
        groups.append(names.union(*joined))
    return sorted(groups, key=sorted)
