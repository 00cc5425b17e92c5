"""The broker's environment: clock, files, network, randomness, spawning and processes.

All I/O goes through these protocols, so that the same code runs on a real machine (``machine.py``) and in the
simulator. They are cut for the hot path: a file takes buffers, a stream takes buffers and file ranges; file
descriptors are not exposed.

Careful: only the loop's thread may call these, except the callables returned by ``File.prepare_*``, which are
created on the loop and run on a worker thread through ``Spawn.in_thread``.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

Buffer: TypeAlias = bytes | bytearray | memoryview
Argument = TypeVar("Argument")
Result = TypeVar("Result")

# The errors of a full disk: no bytes, no inodes, or no quota left.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Clock(Protocol):
    def now_ms(self) -> int:
        """Monotonic: for timeouts, sessions and leases. Includes the time the machine sleeps, if possible."""
        ...

    def work_us(self) -> int:
        """For measuring how long a piece of work takes, in microseconds. It starts anywhere."""
        ...

    def boot_id(self) -> str:
        """The id of this boot of the machine, if ``now_ms`` counts from it in every process; otherwise ""."""
        ...

    def wall_ms(self) -> int:
        """Wall time since 1970: for timestamps, retention and expiry. May jump."""
        ...


class File(Protocol):
    """A file that is appended to at its end and read anywhere. It has no cursor."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Write all buffers at the end. On OSError the file has its old size."""
        ...

    def read_at(self, position: int, size: int) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end of the file."""
        ...

    def read_now(self, position: int, size: int) -> bytes | None:
        """Like ``read_at``, but None if it would have to wait for the disk."""
        ...

    def truncate(self, size: int) -> None: ...

    def moved(self, path: str) -> None:
        """The file or its directory was renamed: use this path to reopen it."""
        ...

    def is_warm(self, position: int, size: int) -> bool:
        """Whether this range is probably in the page cache."""
        ...

    def prepare_warming(self, position: int, size: int) -> Callable[[], None]:
        """Return the work, for a worker thread, that reads a range into the page cache."""
        ...

    def prepare_sync(self) -> Callable[[], None]:
        """Return the work that makes durable what was appended so far. Run it on a worker thread or at once.

        It raises OSError when the disk failed; the file can then no longer be trusted.
        """
        ...

    def close(self) -> None: ...


class Files(Protocol):
    def open(self, path: str) -> File:
        """Open a file, creating it when it is missing. Its directory must exist."""
        ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def modified_ms(self, path: str) -> int:
        """Wall time of the last write to the file."""
        ...

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty when the directory does not exist."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents; not an error when it exists."""
        ...

    def read(self, path: str) -> bytes: ...

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        """Write a whole small file atomically: a crash leaves the old or the new one."""
        ...

    def allocate(self, path: str, size: int) -> None:
        """Create a file that occupies ``size`` bytes on the disk, or raise OSError and leave no file.

        Its content is undefined. A worker thread may call it.
        """
        ...

    def capacity(self, path: str) -> int:
        """The size of a directory's file system, in bytes."""
        ...

    def free_bytes(self, path: str) -> int:
        """The free space of a directory's file system: an upper bound, as there may be a quota."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file or a whole directory; not an error when it is missing."""
        ...

    def forget(self, path: str) -> None:
        """Close an open file that is about to be removed: otherwise its space is not freed."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the entries of a directory durable."""
        ...

    def sync_everything(self) -> None:
        """Start writing all files to the disk, which is faster than file by file.

        It promises nothing: files that must be durable are synced afterwards, which is then quick.
        """
        ...

    def lock(self, path: str) -> bool:
        """Lock a file until this process ends; False when another process holds the lock."""
        ...


class Stream(Protocol):
    """A connected, non-blocking byte stream.

    Not always a socket: a stream may wrap another one and transform the bytes (TLS). So it may buffer bytes in both
    directions, and only its methods tell whether it is readable or writable.
    """

    @property
    def peer(self) -> str: ...

    def recv_into(self, buffer: memoryview) -> int | None:
        """Returns the bytes received; 0 when the peer has closed; None when there is nothing to read now.

        Raises OSError when the received bytes are invalid: the stream cannot be used any more.
        """
        ...

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Send as much as fits now, in one gathered call. Returns the bytes taken, which the stream then delivers.

        Raises OSError when the connection is gone, as does ``send_file``.
        """
        ...

    def send_file(self, file: File, position: int, size: int) -> int:
        """Send a range of a file, without copying it through the process if possible. Returns the bytes taken.

        The range must be in the page cache, so that a stream that has to read it does not wait for the disk.
        """
        ...

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        """Call back while ``recv_into`` has bytes, the end or an error to return. None: stop calling."""
        ...

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call back while ``send`` can take bytes or has an error to raise. None: stop calling."""
        ...

    def close(self) -> None:
        """Stop all callbacks and close. Bytes already taken are still delivered, if the peer reads them."""
        ...


class Listener(Protocol):
    @property
    def address(self) -> tuple[str, int]:
        """The actual address: a port of 0 is replaced by the one chosen."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    def listen(self, host: str, port: int, on_connect: Callable[[Stream], None]) -> Listener: ...

    def connect(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        """Connect, and call ``done`` once, later, on the loop. ConnectionRefusedError: no listener there."""
        ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Spawn(Protocol):
    def soon(self, callback: Callable[[], None]) -> None:
        """Run on the loop, after the current callback."""
        ...

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Timer: ...

    def in_thread(
        self,
        work: Callable[[], Result],
        done: Callable[[Result | None, Exception | None], None],
        *,
        lane: str,
    ) -> None:
        """Run ``work`` on a worker thread, then ``done(result, error)`` on the loop.

        The lanes are ``metadata``, ``flush``, ``read``, ``upkeep``, ``login`` and ``jwks``. Work in one does not
        delay another.
        """
        ...


class JobKilled(Exception):
    """The job's process ended before the job was done."""


class Processes(Protocol):
    """For long computations in Python, which would block the loop even from a thread: see decision 0024."""

    def run(
        self,
        job: Callable[[Files, Argument], Result],
        argument: Argument,
        done: Callable[[Result | None, Exception | None], None],
        *,
        bytes_per_second: float = inf,
    ) -> None:
        """Run a job in another process, then ``done(result, error)`` on the loop.

        The job's reads and writes together are held to ``bytes_per_second``.

        One job runs at a time; the others wait in order. The job is a function at the top level of a module. The
        job, its argument and its result are pickled. It accesses the disk only through the files it is given.

        If its process is killed, the error is a ``JobKilled``. Its changes to files may exist, partly or wholly;
        the same holds for a job that was running when the broker ended in any way.
        """
        ...

    def close(self) -> None:
        """Kill the running job and drop the others, without callbacks. No job writes after this."""
        ...


@dataclass(frozen=True, slots=True)
class Environment:
    clock: Clock
    files: Files
    network: Network
    random: random.Random
    spawn: Spawn
    processes: Processes


class FileRange(NamedTuple):
    """Bytes that stay on disk until a stream sends them."""

    file: File
    position: int
    size: int
