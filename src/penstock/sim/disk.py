"""A machine's file system in memory, with all the faults of real disks.

Every file has two contents: what was written (the page cache, which survives the end of a process) and what is on
the disk (which survives a loss of power). Between them is the list of changes since. The same is true of the
names in every directory: creating, renaming or removing a file is durable only when its directory was synced.
``Disk.lose_power`` keeps what is on the disk and, as a real disk may, any part of the rest.

``SimFiles`` is the file system for one process: it notices when the process is dead, and can make a process die
between two operations. It is the most malicious file system that keeps the promises of ``environment.py``, not a
simulation of an existing one.
"""

from __future__ import annotations

import errno
import os.path
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from penstock.environment import Buffer
from penstock.sim.loop import Process, ProcessDied

PAGE_BYTES = 512
# The reported capacity. It is not enforced; ``fill`` limits what fits.
CAPACITY_BYTES = 1 << 21
# Free space of a disk that is not filled.
PLENTY_BYTES = 1 << 40
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Content:
    """The content of a file (an inode)."""

    __slots__ = ("_changes", "_dropped", "_flipped", "data", "durable", "locked_by", "modified_ms")

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        # Changes since ``durable``: bytes appended, or the size truncated to.
        self._changes: deque[bytes | int] = deque()
        # Number of changes before those.
        self._dropped = 0
        # Bits flipped on the disk that are still right in memory: (position, mask).
        self._flipped: list[tuple[int, int]] = []
        self.modified_ms = 0
        # Locked until that process ends.
        self.locked_by: Process | None = None

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._dropped + len(self._changes)

    @property
    def is_durable(self) -> bool:
        return not self._changes

    def append(self, data: bytes) -> None:
        self.data += data
        self._changes.append(data)

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self._flipped = [flipped for flipped in self._flipped if flipped[0] < size]
        self._changes.append(size)

    def sync(self, version: int) -> None:
        """Make the changes before a version durable."""
        while self._dropped < version:
            self._next_change(lambda data: data)

    def sync_failed(self, version: int) -> None:
        """The disk lost the changes before a version, and the kernel counts them as written."""
        while self._dropped < version:
            self._next_change(lambda data: bytes(len(data)))

    def _next_change(self, written: Callable[[bytes], bytes]) -> None:
        change = self._changes.popleft()
        self._dropped += 1
        if isinstance(change, int):
            del self.durable[change:]
        else:
            self.durable += written(change)

    def lose_power(self, chance: random.Random) -> None:
        kept = chance.randint(0, len(self._changes))
        self.sync(self._dropped + kept)
        rest = b""
        for change in self._changes:
            if isinstance(change, int):
                break
            rest += change
        if rest:
            # The size may be that of any later write, and each page may be written or not.
            rest = rest[: chance.randint(0, len(rest))]
            how = chance.randrange(3)
            if how == 0:
                self.durable += rest
            elif how == 1:
                for start in range(0, len(rest), PAGE_BYTES):
                    page = rest[start : start + PAGE_BYTES]
                    self.durable += page if chance.random() < 0.7 else bytes(len(page))
        self._settle()

    def flip(self, position: int, mask: int, *, is_cached: bool) -> None:
        """Change one durable byte. If it is in the page cache, reads see it only later."""
        self.durable[position] ^= mask
        self._flipped.append((position, mask))
        if not is_cached:
            self.drop_cache()

    def drop_cache(self) -> None:
        """Read flipped bytes from the disk from now on."""
        for position, mask in self._flipped:
            self.data[position] ^= mask
        self._flipped.clear()

    def _settle(self) -> None:
        self._flipped.clear()
        self._dropped += len(self._changes)
        self._changes.clear()
        self.data[:] = self.durable


class Directory:
    """The entries of a directory."""

    __slots__ = ("_changes", "durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, Content | Directory] = {}
        self.durable: dict[str, Content | Directory] = {}
        self._changes: list[Callable[[dict[str, Content | Directory]], None]] = []

    def set(self, name: str, node: Content | Directory) -> None:
        self._change(lambda entries: entries.__setitem__(name, node))

    def drop(self, name: str) -> None:
        def drop(entries: dict[str, Content | Directory]) -> None:
            entries.pop(name, None)

        self._change(drop)

    def move(self, source: str, target: str) -> None:
        def move(entries: dict[str, Content | Directory]) -> None:
            if source in entries:
                entries[target] = entries.pop(source)

        self._change(move)

    def _change(self, change: Callable[[dict[str, Content | Directory]], None]) -> None:
        change(self.entries)
        self._changes.append(change)

    @property
    def version(self) -> int:
        return len(self._changes)

    def sync(self) -> None:
        for change in self._changes:
            change(self.durable)
        self._changes.clear()

    def lose_power(self, chance: random.Random) -> None:
        for change in self._changes[: chance.randint(0, len(self._changes))]:
            change(self.durable)
        self._changes.clear()
        self.entries = dict(self.durable)
        for name in sorted(self.entries):
            self.entries[name].lose_power(chance)


class Disk:
    """The disks of one machine: all data directories in one tree."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.root = Directory()
        self.boot_id = chance.randbytes(16).hex()
        # Free bytes; None means unlimited. Removing and truncating files frees bytes.
        self.room_bytes: int | None = None
        # Directories on full file systems, and how many bytes still fit there.
        self._full: dict[str, int] = {}
        # Every write and fsync below these directories fails.
        self.failing: tuple[str, ...] = ()
        # The number of fsyncs that will fail, once each. What they should have written is lost (fsyncgate).
        self.failing_syncs = 0
        # Factor by which the work of threads is slower.
        self.slowness = 1.0
        # Share of reads that are not in the page cache.
        self.cold_reads = 0.0
        # Share of accesses before which the file's descriptor was closed to open another file.
        self.evictions = 0.0
        self.syncs = 0
        self.power_losses = 0

    # What happens to it

    def lose_power(self) -> None:
        self.power_losses += 1
        self.room_bytes = None
        self._full.clear()
        self.root.lose_power(self.chance)
        self.boot_id = self.chance.randbytes(16).hex()

    def drop_caches(self) -> None:
        for _, content in self.files():
            content.drop_cache()

    def wipe(self) -> None:
        self.root = Directory()

    def fill(self, below: str = "/", *, left_bytes: int = 0) -> None:
        """Other files fill the file system of these directories, up to ``left_bytes``.

        From now on writes below them end in ENOSPC, until ``free``; removing and truncating files frees bytes.
        """
        self._full[below.rstrip("/")] = left_bytes

    def free(self, below: str | None = None) -> None:
        """Undo ``fill``, below these directories or everywhere."""
        if below is None:
            self._full.clear()
            self.room_bytes = None
        else:
            self._full.pop(below.rstrip("/"), None)

    @property
    def is_full(self) -> bool:
        """Whether it, or a part of it, is filled."""
        return self.room_bytes is not None or bool(self._full)

    def free_bytes(self, path: str) -> int:
        """Free bytes below a directory."""
        rooms = [room for below, room in self._full.items() if _is_below(path, below)]
        if self.room_bytes is not None:
            rooms.append(self.room_bytes)
        return min(rooms, default=PLENTY_BYTES)

    def take_room(self, path: str, size: int) -> None:
        """Use up free bytes; a negative size frees bytes. Raises OSError if they do not fit."""
        if size > self.free_bytes(path):
            raise OSError(errno.ENOSPC, "the disk is full", path)
        for below in self._full:
            if _is_below(path, below):
                self._full[below] -= size
        if self.room_bytes is not None:
            self.room_bytes -= size

    def heal(self) -> None:
        self.free()
        self.failing = ()
        self.failing_syncs = 0
        self.slowness = 1.0

    def thread_ms(self, lane: str) -> float:
        """Duration of one piece of a thread's work."""
        took = self.chance.expovariate(1 / 2)
        if self.chance.random() < 0.01:
            took += self.chance.uniform(0, 100)
        return took * self.slowness

    # Access that processes do not notice

    def files(self, below: str = "/") -> Iterator[tuple[str, Content]]:
        """Every file below a directory with its path, in the order of the names."""
        directory = self.root if below == "/" else self.find(below)
        if isinstance(directory, Directory):
            yield from _walk("" if below == "/" else below, directory)

    def find(self, path: str) -> Content | Directory | None:
        node: Content | Directory | None = self.root
        for name in path.split("/"):
            if name:
                if not isinstance(node, Directory):
                    return None
                node = node.entries.get(name)
        return node


class SimFiles:
    """``environment.Files`` for one process."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self.disk = disk
        self._process = process
        # The number of changes to the disk after which the process ends, by ``die``; None for never.
        self.changes_left: int | None = None
        self.die: Callable[[], None] = process.end

    # Files

    def open(self, path: str) -> SimFile:
        return SimFile(self, path)

    def exists(self, path: str) -> bool:
        self.alive()
        return self.disk.find(path) is not None

    def size(self, path: str) -> int:
        return len(self.content(path).data)

    def modified_ms(self, path: str) -> int:
        return self.content(path).modified_ms

    def list(self, path: str) -> list[str]:
        self.alive()
        node = self.disk.find(path)
        return sorted(node.entries) if isinstance(node, Directory) else []

    def make_directory(self, path: str) -> None:
        self.alive()
        parent, below = self.disk.root, 0
        for name in path.split("/"):
            if not name:
                continue
            node = parent.entries.get(name)
            if node is None:
                self.changing(path)
                node = Directory()
                parent.set(name, node)
                if below == 0:
                    parent.sync()  # a mount point: it existed before the process
            if not isinstance(node, Directory):
                raise FileExistsError(errno.EEXIST, "not a directory", path)
            parent = node
            below += 1

    def read(self, path: str) -> bytes:
        if path == BOOT_ID:
            self.alive()
            return self.disk.boot_id.encode() + b"\n"
        return bytes(self.content(path).data)

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        directory, name = self._parent(path)
        self.changing(path, len(data))
        content = Content()
        content.append(bytes(data))
        content.modified_ms = self._process.clock.wall_ms()
        directory.set(name + ".tmp", content)
        if durable:
            self.sync_content(path, content, content.version)
        self.changing(path)
        self._make_room(path)
        directory.move(name + ".tmp", name)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def allocate(self, path: str, size: int) -> None:
        directory, name = self._parent(path)
        self.changing(path, size)
        self._make_room(path)
        content = Content()
        content.append(bytes(size))
        content.sync(content.version)
        directory.set(name, content)

    def capacity(self, path: str) -> int:
        self.alive()
        return CAPACITY_BYTES

    def free_bytes(self, path: str) -> int:
        self.alive()
        return self.disk.free_bytes(path)

    def rename(self, source: str, target: str) -> None:
        directory, name = self._parent(source)
        assert os.path.dirname(source) == os.path.dirname(target), "renamed into another directory"
        if name not in directory.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        self.changing(source)
        there = directory.entries.get(os.path.basename(target))
        if isinstance(there, Directory) and there.entries:
            raise OSError(errno.ENOTEMPTY, "there is a directory of that name", target)
        directory.move(name, os.path.basename(target))

    def remove(self, path: str) -> None:
        node = self.disk.find(path)
        if node is None:
            self.alive()
            return
        directory, name = self._parent(path)
        if isinstance(node, Directory):
            for child in sorted(node.entries):
                self.remove(f"{path}/{child}")
        self.changing(path)
        self._make_room(path)
        directory.drop(name)

    def forget(self, path: str) -> None:
        self.alive()

    def sync_directory(self, path: str) -> None:
        node = self.disk.find(path)
        if not isinstance(node, Directory):
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        self.changing(path)
        self.disk.syncs += 1
        node.sync()

    def sync_everything(self) -> None:
        self.alive()

    def lock(self, path: str) -> bool:
        content = self.create(path)
        owner = content.locked_by
        if owner is not None and owner is not self._process and owner.is_alive:
            return False
        content.locked_by = self._process
        return True

    # For SimFile

    def alive(self) -> None:
        if not self._process.is_alive:
            raise ProcessDied

    def changing(self, path: str, size: int = 0) -> None:
        """Called before every change of the disk. Faults are injected here."""
        self.alive()
        if self.changes_left is not None:
            self.changes_left -= 1
            if self.changes_left < 0:
                self.die()
                raise ProcessDied
        disk = self.disk
        if disk.failing and path.startswith(disk.failing):
            raise OSError(errno.EIO, "the disk failed", path)
        if size:
            disk.take_room(path, size)

    def content(self, path: str) -> Content:
        self.alive()
        node = self.disk.find(path)
        if not isinstance(node, Content):
            if node is not None:
                raise IsADirectoryError(errno.EISDIR, "a directory", path)
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return node

    def create(self, path: str) -> Content:
        """The content at a path; created empty if missing."""
        self.alive()
        if self.disk.find(path) is None:
            directory, name = self._parent(path)
            self.changing(path, 1)
            content = Content()
            content.modified_ms = self._process.clock.wall_ms()
            directory.set(name, content)
        return self.content(path)

    def sync_content(self, path: str, content: Content, version: int) -> None:
        disk = self.disk
        disk.syncs += 1
        self.alive()
        if disk.failing_syncs > 0 and not content.is_durable:
            disk.failing_syncs -= 1
            content.sync_failed(version)
            raise OSError(errno.EIO, "the disk did not take it", path)
        self.changing(path)
        content.sync(version)

    def wrote(self, content: Content) -> None:
        content.modified_ms = self._process.clock.wall_ms()

    def _make_room(self, path: str) -> None:
        """Free the bytes of a file that is about to be removed."""
        node = self.disk.find(path)
        if isinstance(node, Content):
            self.disk.take_room(path, -len(node.data))

    def _parent(self, path: str) -> tuple[Directory, str]:
        self.alive()
        node = self.disk.find(os.path.dirname(path))
        if not isinstance(node, Directory):
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return node, os.path.basename(path)


class SimFile:
    """``environment.File``: opened at first use, and again whenever its descriptor was closed."""

    __slots__ = ("_content", "_files", "_path", "_was_opened")

    def __init__(self, files: SimFiles, path: str) -> None:
        self._files = files
        self._path = path
        self._content: Content | None = None
        self._was_opened = False

    def _opened(self) -> Content:
        files = self._files
        files.alive()
        disk = files.disk
        if self._content is not None and disk.evictions and disk.chance.random() < disk.evictions:
            self._content = None
        if self._content is None:
            # When opened again, it must still exist.
            self._content = files.content(self._path) if self._was_opened else files.create(self._path)
            self._was_opened = True
        return self._content

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        # As on a real machine, the size is known once it was opened.
        return len((self._content or self._opened()).data)

    def append(self, buffers: Sequence[Buffer]) -> None:
        content = self._opened()
        data = b"".join(buffers)
        self._files.changing(self._path, len(data))
        content.append(data)
        self._files.wrote(content)

    def read_at(self, position: int, size: int) -> bytes:
        return bytes(self._opened().data[position : position + size])

    def read_now(self, position: int, size: int) -> bytes | None:
        if not self.is_warm(position, size):
            return None
        return self.read_at(position, size)

    def truncate(self, size: int) -> None:
        content = self._opened()
        self._files.changing(self._path)
        assert size <= len(content.data), "truncated to more than there is"
        self._files.disk.take_room(self._path, size - len(content.data))
        content.truncate(size)
        self._files.wrote(content)

    def moved(self, path: str) -> None:
        self._path = path

    def is_warm(self, position: int, size: int) -> bool:
        disk = self._files.disk
        return not disk.cold_reads or disk.chance.random() >= disk.cold_reads

    def prepare_warming(self, position: int, size: int) -> Callable[[], None]:
        self._opened()
        return self._files.alive

    def prepare_sync(self) -> Callable[[], None]:
        content = self._opened()
        # Later writes may or may not become durable with the same fsync: callers must not count on it.
        version = content.version
        return lambda: self._files.sync_content(self._path, content, version)

    def close(self) -> None:
        self._content = None


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


def _walk(path: str, directory: Directory) -> Iterator[tuple[str, Content]]:
    for name in sorted(directory.entries):
        node = directory.entries[name]
        if isinstance(node, Directory):
            yield from _walk(f"{path}/{name}", node)
        else:
            yield f"{path}/{name}", node
