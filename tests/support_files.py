"""A file system in memory that can lose power.

Every file has two contents, what was written and what was made durable, and so has every directory. ``crash``
keeps the durable ones and, as a real disk may, any part of what came after: a prefix of the changes to a
directory, a prefix of the writes to a file, the last of them torn or turned into zeros. ``kill`` is the end of
the process alone: the page cache survives it.

``fail_after`` makes the disk fill up or break after so many more bytes.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

from penstock.environment import Buffer, Environment

BLOCK_BYTES = 512


class Content:
    """What a name points to (an inode)."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        # Since the last sync: bytes appended, or the size truncated to.
        self.changes: list[bytes | int] = []
        self.modified_ms = 0

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.changes.clear()

    def after_crash(self, chance: random.Random) -> None:
        data = bytearray(self.durable)
        kept = chance.randint(0, len(self.changes))
        for change in self.changes[:kept]:
            if isinstance(change, int):
                del data[change:]
            else:
                data += change
        torn = self.changes[kept] if kept < len(self.changes) else None
        if isinstance(torn, bytes):
            part = torn[: chance.randint(0, len(torn))]
            # A block that was allocated but not written reads as zeros.
            data += chance.choice([part, part + bytes(chance.randint(0, BLOCK_BYTES)), bytes(len(part))])
        self.data = data
        self.sync()


class FakeClock:
    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self.wall = wall_ms
        self.now = 0

    def now_ms(self) -> int:
        return self.now

    def work_us(self) -> int:
        return self.now * 1000

    def boot_id(self) -> str:
        return ""

    def wall_ms(self) -> int:
        return self.wall

    def advance(self, ms: int) -> None:
        self.wall += ms
        self.now += ms


class FakeFile:
    def __init__(self, files: FakeFiles, path: str) -> None:
        self._files = files
        self._path = path
        self._content = files.content(path, create=True)

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return len(self._content.data)

    def append(self, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        self._files.spend(len(data))
        self._content.data += data
        self._content.changes.append(data)
        self._content.modified_ms = self._files.clock.wall_ms()
        self._files.appends += 1

    def read_at(self, position: int, size: int) -> bytes:
        self._files.reads += 1
        return bytes(self._content.data[position : position + size])

    def read_now(self, position: int, size: int) -> bytes | None:
        return self.read_at(position, size)

    def truncate(self, size: int) -> None:
        assert size <= self.size
        del self._content.data[size:]
        self._content.changes.append(size)

    def moved(self, path: str) -> None:
        self._path = path

    def is_warm(self, position: int, size: int) -> bool:
        return True

    def prepare_warming(self, position: int, size: int) -> Callable[[], None]:
        return lambda: None

    def prepare_sync(self) -> Callable[[], None]:
        content = self._content
        covered = len(content.changes)

        def sync() -> None:
            # Only what was written before this was prepared.
            data = bytearray(content.durable)
            for change in content.changes[:covered]:
                if isinstance(change, int):
                    del data[change:]
                else:
                    data += change
            content.durable = bytes(data)
            del content.changes[:covered]

        return sync

    def close(self) -> None:
        pass


class FakeFiles:
    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self._names: dict[str, Content] = {}
        self._durable_names: dict[str, Content] = {}
        self._directories: set[str] = {"/"}
        # Since the last sync of its directory: (directory, change to the names).
        self._changes: list[tuple[str, Callable[[dict[str, Content]], None]]] = []
        self._bytes_left: int | None = None
        self._failure = errno.ENOSPC
        self.reads = 0
        self.appends = 0

    # What a test does

    def fail_after(self, count: int | None, failure: int = errno.ENOSPC) -> None:
        """Refuse every write after ``count`` more bytes; None heals the disk."""
        self._bytes_left = count
        self._failure = failure

    def crash(self, chance: random.Random) -> None:
        """The power fails and comes back."""
        self.fail_after(None)
        directories = sorted({directory for directory, _ in self._changes})
        names = dict(self._durable_names)
        kept = {
            directory: chance.randint(0, sum(1 for at, _ in self._changes if at == directory))
            for directory in directories
        }
        for directory, change in self._changes:
            if kept[directory] > 0:
                kept[directory] -= 1
                change(names)
        self._changes.clear()
        self._names = names
        self._durable_names = dict(names)
        for content in names.values():
            content.after_crash(chance)

    def damage(self, path: str, position: int, value: int) -> None:
        """Change one byte behind everybody's back."""
        content = self._names[path]
        content.data[position] ^= value
        content.sync()

    # Files

    def open(self, path: str) -> FakeFile:
        assert os.path.dirname(path) in self._directories, path
        return FakeFile(self, path)

    def exists(self, path: str) -> bool:
        return path in self._names or path in self._directories

    def size(self, path: str) -> int:
        return len(self.content(path).data)

    def modified_ms(self, path: str) -> int:
        return self.content(path).modified_ms

    def list(self, path: str) -> list[str]:
        return sorted(os.path.basename(name) for name in self._names if os.path.dirname(name) == path)

    def make_directory(self, path: str) -> None:
        while path not in self._directories:
            self._directories.add(path)
            path = os.path.dirname(path)

    def read(self, path: str) -> bytes:
        return bytes(self.content(path).data)

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        assert os.path.dirname(path) in self._directories, path
        self.spend(len(data))
        content = Content()
        content.data += data
        content.modified_ms = self.clock.wall_ms()
        content.changes.append(bytes(data))
        if durable:
            content.sync()
        self._change(path, lambda names: names.__setitem__(path, content))
        if durable:
            self.sync_directory(os.path.dirname(path))

    def allocate(self, path: str, size: int) -> None:
        self.spend(size)
        self._change(path, lambda names: names.__setitem__(path, Content()))

    def capacity(self, path: str) -> int:
        return 1 << 30

    def free_bytes(self, path: str) -> int:
        return 1 << 30 if self._bytes_left is None else self._bytes_left

    def rename(self, source: str, target: str) -> None:
        assert source in self._names, source

        def move(names: dict[str, Content]) -> None:
            if source in names:
                names[target] = names.pop(source)

        self._change(source, move)

    def remove(self, path: str) -> None:
        for name in [name for name in self._names if name == path or name.startswith(path + "/")]:
            self._change(name, lambda names, name=name: names.pop(name, None))  # type: ignore[misc]

    def forget(self, path: str) -> None:
        pass

    def sync_everything(self) -> None:
        pass

    def lock(self, path: str) -> bool:
        return True

    def sync_directory(self, path: str) -> None:
        rest = []
        for directory, change in self._changes:
            if directory == path:
                change(self._durable_names)
            else:
                rest.append((directory, change))
        self._changes = rest

    # For FakeFile

    def content(self, path: str, *, create: bool = False) -> Content:
        content = self._names.get(path)
        if content is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            content = Content()
            made = content
            self._change(path, lambda names: names.__setitem__(path, made))
        return content

    def spend(self, count: int) -> None:
        if self._bytes_left is not None:
            if count > self._bytes_left:
                raise OSError(self._failure, os.strerror(self._failure))
            self._bytes_left -= count

    def _change(self, path: str, change: Callable[[dict[str, Content]], None]) -> None:
        change(self._names)
        self._changes.append((os.path.dirname(path), change))


class Nowhere:
    """Stands for the doors a log does not use."""


def fake_environment(files: FakeFiles) -> Environment:
    nowhere = Nowhere()
    return Environment(
        clock=files.clock,
        files=files,
        network=nowhere,  # type: ignore[arg-type]
        random=random.Random(0),
        spawn=nowhere,  # type: ignore[arg-type]
        processes=nowhere,  # type: ignore[arg-type]
    )
