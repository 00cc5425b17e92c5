"""The doors outside: clock, files, network, randomness, spawning and processes, as the broker sees them.

Everything the broker does to the world goes through these protocols, so that the very same code runs on a
real machine (``machine.py``) and in a simulator. They sit where the hot path touches the world: a file takes
buffers, a stream takes buffers and file ranges; no file descriptor passes through.

The one thing to get right: only the thread that runs the loop may call these, except the callables returned
by ``File.prepare_*``, which are made on the loop and run on a worker thread through ``Spawn.in_thread``.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

Buffer: TypeAlias = bytes | bytearray | memoryview
Argument = TypeVar("Argument")
Result = TypeVar("Result")

# The errors of a disk that is full: no bytes, no inodes, or no quota left.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Clock(Protocol):
    def now_ms(self) -> int:
        """Monotonic: for timeouts, sessions and leases. It goes on while the machine sleeps, if it can."""
        ...

    def boot_id(self) -> str:
        """Of this start of the machine, if ``now_ms`` counts from it in every process; otherwise ""."""
        ...

    def wall_ms(self) -> int:
        """Wall time since 1970: for timestamps, retention and expiry. May jump."""
        ...


class File(Protocol):
    """One file, appended at its end and read anywhere. It has no cursor."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Write all buffers at the end, or raise OSError with the file as long as it was before."""
        ...

    def read_at(self, position: int, size: int) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end of the file."""
        ...

    def read_now(self, position: int, size: int) -> bytes | None:
        """As ``read_at``, but None when it would have to wait for the disk."""
        ...

    def truncate(self, size: int) -> None: ...

    def moved(self, path: str) -> None:
        """Tell the file that it was renamed (or its directory was), so that it can be opened again."""
        ...

    def is_warm(self, position: int, size: int) -> bool:
        """Whether reading this range probably needs no disk."""
        ...

    def prepare_warming(self, position: int, size: int) -> Callable[[], None]:
        """The work of bringing a range into memory, for a worker thread."""
        ...

    def prepare_sync(self) -> Callable[[], None]:
        """The work of making durable what was appended before this call, for a worker thread or at once.

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
        """The names in a directory, sorted; empty when there is no such directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents; not an error when it exists."""
        ...

    def read(self, path: str) -> bytes: ...

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        """Write a whole small file so that a crash leaves the old or the new one, never a mixture."""
        ...

    def allocate(self, path: str, size: int) -> None:
        """Make a file that takes so much room on the disk, or raise OSError and leave none.

        What is in it says nothing. A worker thread may call it.
        """
        ...

    def capacity(self, path: str) -> int:
        """How large the file system is that a directory lies on, in bytes."""
        ...

    def free_bytes(self, path: str) -> int:
        """How much of that is free: an upper bound, as there may be a quota."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file or a whole directory; not an error when it is missing."""
        ...

    def forget(self, path: str) -> None:
        """Let go of an open file that is about to be removed: only then is its space free."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def sync_everything(self) -> None:
        """Have all that was written to any file on its way to the disk, faster than one by one.

        No promise: what must be durable is synced by itself afterwards, and then finds little to do.
        """
        ...

    def lock(self, path: str) -> bool:
        """Claim a file for this process until it ends; False when another process has it."""
        ...


class Stream(Protocol):
    """A connected, non-blocking byte stream.

    Not always a socket: a stream may lie around another one and change the bytes (TLS). So it may hold bytes of its
    own in both directions, and only its methods say whether there is something to read and room to write.
    """

    @property
    def peer(self) -> str: ...

    def recv_into(self, buffer: memoryview) -> int | None:
        """Bytes received; 0 when the peer has closed; None when there is nothing to read now.

        Raises OSError when what came cannot be read: the stream is of no use any more.
        """
        ...

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Send what fits now, in one gathered call; the number of bytes taken. The stream delivers those by itself.

        Raises OSError when the connection is gone, as ``send_file`` does.
        """
        ...

    def send_file(self, file: File, position: int, size: int) -> int:
        """Send a range of a file, if possible without copying it through the process; the number of bytes taken.

        The range is in memory already, so that a stream that has to read it does not wait for the disk.
        """
        ...

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        """Call this as long as ``recv_into`` has something to give: bytes, the end, or an error. None: no more."""
        ...

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call this as long as ``send`` takes something or has an error to tell. None: no more."""
        ...

    def close(self) -> None:
        """No callback is called from now on. Bytes that were taken are still delivered, if the peer reads them."""
        ...


class Listener(Protocol):
    @property
    def address(self) -> tuple[str, int]:
        """Where it really listens: a port of 0 was replaced by the one chosen."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    def listen(self, host: str, port: int, on_connect: Callable[[Stream], None]) -> Listener: ...

    def connect(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        """Connect, and call ``done`` once, later, on the loop. ConnectionRefusedError: nobody listens there."""
        ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Spawn(Protocol):
    def soon(self, callback: Callable[[], None]) -> None:
        """Run on the loop, after what is running now."""
        ...

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Timer: ...

    def in_thread(
        self,
        work: Callable[[], Result],
        done: Callable[[Result | None, Exception | None], None],
        *,
        lane: str,
    ) -> None:
        """Run ``work`` away from the loop, then ``done(result, error)`` on it.

        Work of one lane does not hold up that of another: ``metadata``, ``flush``, ``read`` or ``upkeep``.
        """
        ...


class JobKilled(Exception):
    """The process of a job ended before the job did."""


class Processes(Protocol):
    """For Python that computes for long, which would hold up the loop from a thread too: see decision 0024."""

    def run(
        self,
        job: Callable[[Files, Argument], Result],
        argument: Argument,
        done: Callable[[Result | None, Exception | None], None],
    ) -> None:
        """Run a job in another process, then ``done(result, error)`` on the loop.

        One job runs at a time; the others wait, in their order. The job is a function at the top level of a module.
        It, its argument and its result are pickled, and it reaches the disk through the files it is given.

        If its process is killed, the error is a ``JobKilled``. What it did to files may be there, in part or in
        whole; the same goes for a job that was running when the broker ended, however it ended.
        """
        ...

    def close(self) -> None:
        """Kill the job that runs and forget the others; nothing is called back. No job writes after this."""
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
