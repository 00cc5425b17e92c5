"""The real environment: this machine's clock, disk, network, randomness and event loop.

The only module that uses file descriptors and sockets, except for the pipes of ``machine_processes.py``. Files are
opened lazily, and the least recently used descriptors are closed, so that a broker with a hundred thousand
partitions stays far below the descriptor limit: holding a ``MachineFile`` is cheap, and any call on it may reopen
it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import resource
import shutil
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from penstock.environment import Buffer, Environment, File, Result, Stream
from penstock.machine_processes import MachineProcesses

# Descriptors kept for sockets, pipes and the files Python itself holds open.
RESERVED_DESCRIPTORS = 256
OPEN_FILES_MAX = 4096
# The kernel takes at most this many buffers in one gathered call.
GATHERED_BUFFERS_MAX = 1024
# Probe a range at this distance to see whether it is in the page cache: the kernel reads ahead in such runs.
WARM_PROBE_BYTES = 128 * 1024
# Start writing a file to the disk in portions of this size.
WRITEBACK_BYTES = 8 * 1024 * 1024
SYNC_FILE_RANGE_WRITE = 2
# How much to write at once where space cannot be allocated.
ZEROS_BYTES = 1024 * 1024
# Errors where space cannot be allocated (NFS, FUSE, 9p): glibc then writes zeros itself, musl does not. A sandbox
# may also forbid the call.
_NOT_ALLOCATED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)
ACCEPTS_PER_TURN = 64
# A host that is down does not refuse a connection; it does not answer at all.
CONNECT_TIMEOUT_S = 3.0
# These threads wait for the disk, not for a core.
LANE_THREADS = {"metadata": 1, "flush": 4, "read": 4, "upkeep": 1, "login": 1, "jwks": 1}
READ_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
# A full garbage collection that takes longer has visited too many objects: about 250,000.
LONG_COLLECTION_S = 0.05
SPARED_S = 3600.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def _clock_over_sleep() -> int:
    """A clock that counts the time the machine sleeps, as leases need. Linux's monotonic clock does not."""
    clock: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    try:
        time.clock_gettime_ns(clock)
    except OSError:
        return time.CLOCK_MONOTONIC
    return clock


CLOCK = _clock_over_sleep()


class MachineClock:
    def now_ms(self) -> int:
        return time.clock_gettime_ns(CLOCK) // 1_000_000

    def work_us(self) -> int:
        return time.perf_counter_ns() // 1000

    def boot_id(self) -> str:
        # Clocks of other systems do not count sleep, or start with each process.
        if CLOCK != time.CLOCK_MONOTONIC:
            with suppress(OSError, ValueError), open(BOOT_ID, encoding="ascii") as file:
                return file.read().strip()
        return ""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class MachineFile:
    __slots__ = ("_descriptor", "_files", "_is_broken", "_path", "_size", "_written_back")

    def __init__(self, files: MachineFiles, path: str) -> None:
        self._files = files
        self._path = path
        self._descriptor = -1
        self._size = -1
        self._is_broken = False
        # The kernel was asked to write everything below this to the disk.
        self._written_back = 0

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        if self._size < 0:
            self._size = os.fstat(self.descriptor()).st_size
        return self._size

    def descriptor(self) -> int:
        """For this module only: valid until the next call on any file."""
        if self._descriptor < 0:
            self._descriptor = self._files.admit(self)
        else:
            self._files.touch(self)
        return self._descriptor

    @property
    def was_opened(self) -> bool:
        return self._size >= 0

    def append(self, buffers: Sequence[Buffer]) -> None:
        if self._is_broken:
            raise OSError(errno.EIO, "a failed write could not be undone", self._path)
        descriptor = self.descriptor()
        size_before = self.size
        expected = sum(map(len, buffers))
        try:
            written = os.writev(descriptor, buffers)
            if written != expected:
                rest = b"".join(buffers)
                while written < expected:
                    written += os.write(descriptor, memoryview(rest)[written:])
        except OSError:
            try:
                os.ftruncate(descriptor, size_before)
            except OSError:
                # A partial batch remains at the end: nothing may ever be written after it.
                self._is_broken = True
            raise
        self._size = size_before + expected
        if self._size - self._written_back >= WRITEBACK_BYTES:
            # If the file existed before, only what this process wrote.
            begin = max(self._written_back, self._size - 2 * WRITEBACK_BYTES)
            self._written_back = self._size
            with suppress(
                OSError, RuntimeError
            ):  # out of descriptors or threads: the kernel will do it alone
                self._files.write_back(os.dup(descriptor), begin, self._size - begin)

    def read_at(self, position: int, size: int) -> bytes:
        return os.pread(self.descriptor(), size, position)

    def read_now(self, position: int, size: int) -> bytes | None:
        if not READ_NOWAIT:
            return os.pread(self.descriptor(), size, position)
        data = bytearray(size)
        try:
            count = os.preadv(self.descriptor(), [data], position, READ_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return os.pread(self.descriptor(), size, position)
            raise
        if count < size and position + count < self.size:
            return None  # only the beginning was in memory
        del data[count:]
        return bytes(data)

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor(), size)
        self._size = size

    def moved(self, path: str) -> None:
        self._path = path

    def is_warm(self, position: int, size: int) -> bool:
        if not READ_NOWAIT or size <= 0:
            return True
        descriptor = self.descriptor()
        probe = bytearray(1)
        last = position + size - 1
        try:
            for place in range(position, last, WARM_PROBE_BYTES):
                os.preadv(descriptor, [probe], place, READ_NOWAIT)
            os.preadv(descriptor, [probe], last, READ_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the file system does not support it
        return True

    def prepare_warming(self, position: int, size: int) -> Callable[[], None]:
        descriptor = os.dup(self.descriptor())

        def warm() -> None:
            try:
                end = position + size
                for place in range(position, end, 1 << 20):
                    os.pread(descriptor, min(1 << 20, end - place), place)
            finally:
                os.close(descriptor)

        return warm

    def prepare_sync(self) -> Callable[[], None]:
        # A duplicate shares the open file, including any write error that the kernel has yet to report.
        descriptor = os.dup(self.descriptor())

        def sync() -> None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        return sync

    def close(self) -> None:
        if self._descriptor >= 0:
            self._files.dismiss(self)

    def evicted(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _is_allocated(descriptor: int, size: int) -> bool:
    """Allocate disk space for a file; false where that is not supported. Raises OSError on a full disk."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return False
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NOT_ALLOCATED:
            raise
        return False
    return True


class MachineFiles:
    """Files with a limited number of open descriptors. The least recently used is closed for a new one."""

    def __init__(self, open_files_max: int = OPEN_FILES_MAX) -> None:
        self._writeback: _Writeback | None = None
        self._open_files_max = open_files_max
        # In order of last use.
        self._open: OrderedDict[MachineFile, None] = OrderedDict()
        self._locks: list[int] = []

    def open(self, path: str) -> MachineFile:
        return MachineFile(self, path)

    def admit(self, file: MachineFile) -> int:
        while len(self._open) >= self._open_files_max:
            oldest, _ = self._open.popitem(last=False)
            oldest.evicted()
        # Create it only the first time: a deleted segment must not come back empty when it is reopened.
        create = 0 if file.was_opened else os.O_CREAT
        descriptor = os.open(file.path, os.O_RDWR | create | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._open[file] = None
        return descriptor

    def touch(self, file: MachineFile) -> None:
        self._open.move_to_end(file)

    def dismiss(self, file: MachineFile) -> None:
        del self._open[file]
        file.evicted()

    def write_back(self, descriptor: int, position: int, size: int) -> None:
        """Write a range of a file to the disk in the background. Takes ownership of the descriptor."""
        if self._writeback is None:
            self._writeback = _Writeback()
        self._writeback.start(descriptor, position, size)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        # Two threads may do this at the same time: each has its own temporary file, and the last one wins.
        temporary = f"{path}.{threading.current_thread().name}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            # Free the space: the disk may be full.
            self.remove(temporary)
            raise
        os.replace(temporary, path)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def allocate(self, path: str, size: int) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if size and not _is_allocated(descriptor, size):
                    written = 0
                    while written < size:
                        written += os.pwrite(descriptor, bytes(min(size - written, ZEROS_BYTES)), written)
            finally:
                os.close(descriptor)
        except OSError:
            self.remove(path)
            raise

    def capacity(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        try:
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass

    def forget(self, path: str) -> None:
        for file in [file for file in self._open if file.path == path]:
            self.dismiss(file)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_everything(self) -> None:
        os.sync()

    def lock(self, path: str) -> bool:
        import fcntl  # noqa: PLC0415 - Unix only

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._locks.append(descriptor)
        return True


class _Writeback:
    """Starts writing dirty pages early, in small portions, on its own thread.

    Otherwise the kernel collects gigabytes of them and then blocks the next ``write``, and with it the whole loop,
    until they are written. This does not make anything durable; ``prepare_sync`` does.
    """

    def __init__(self) -> None:
        import ctypes  # noqa: PLC0415 - only a broker that writes a lot needs it

        self._thread = ThreadPoolExecutor(1, "writeback")
        start = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if start is not None:
            start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        # None where the system has no such call (macOS).
        self._start = start

    def start(self, descriptor: int, position: int, size: int) -> None:
        self._thread.submit(self._run, descriptor, position, size)

    def _run(self, descriptor: int, position: int, size: int) -> None:
        if self._start is not None:
            self._start(descriptor, position, size, SYNC_FILE_RANGE_WRITE)
        os.close(descriptor)


class MachineStream:
    __slots__ = ("_descriptor", "_loop", "_reading", "_socket", "_writing", "peer")

    def __init__(self, loop: asyncio.AbstractEventLoop, connected: socket.socket, peer: str) -> None:
        self._loop = loop
        self._socket = connected
        self._descriptor = connected.fileno()
        self._reading = False
        self._writing = False
        self.peer = peer

    def recv_into(self, buffer: memoryview) -> int | None:
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return 0

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:GATHERED_BUFFERS_MAX])
        except (BlockingIOError, InterruptedError):
            return 0

    def send_file(self, file: File, position: int, size: int) -> int:
        assert isinstance(file, MachineFile)
        try:
            sent = os.sendfile(self._descriptor, file.descriptor(), position, size)
        except (BlockingIOError, InterruptedError):
            return 0
        if sent == 0:
            raise OSError(errno.EIO, "the file is shorter than the range to send", file.path)
        return sent

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            self._reading = True
            self._loop.add_reader(self._descriptor, callback)
        elif self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            self._writing = True
            self._loop.add_writer(self._descriptor, callback)
        elif self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        self.on_readable(None)
        self.on_writable(None)
        self._socket.close()


class MachineListener:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, listening: socket.socket, on_connect: Callable[[Stream], None]
    ) -> None:
        self._loop = loop
        self._socket = listening
        self._on_connect = on_connect
        host, port = listening.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        loop.add_reader(listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: stop accepting for a moment instead of spinning on the same connection.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._loop.remove_reader(self._socket.fileno())
                    self._loop.call_later(1.0, self._resume)
                return
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # On a listener for both families, a client that came over IPv4 has the address ::ffff:10.0.0.7. It is
            # known by the one it has itself, as in Kafka: ACLs, quotas and limits name that.
            self._on_connect(MachineStream(self._loop, connected, _own_address(str(peer[0]))))

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


def _own_address(peer: str) -> str:
    mapped = peer.removeprefix("::ffff:")
    return mapped if "." in mapped else peer


class MachineNetwork:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def listen(self, host: str, port: int, on_connect: Callable[[Stream], None]) -> MachineListener:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setblocking(False)
            listening.bind(address)
            listening.listen(1024)
        except OSError:
            listening.close()
            raise
        return MachineListener(self._loop, listening, on_connect)

    def connect(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, ValueError):
            # Not a numeric address: the lookup may be slow, so a thread does it.
            self._resolve(host, port, done)
            return
        self._connect(found[0], done)

    def _resolve(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        def resolved(future: asyncio.Future[list[Any]]) -> None:
            error = future.exception()
            if error is not None:
                done(None, error if isinstance(error, OSError) else OSError(str(error)))
            else:
                self._connect(future.result()[0], done)

        looking = asyncio.ensure_future(
            self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), loop=self._loop
        )
        looking.add_done_callback(resolved)

    def _connect(self, found: tuple[Any, ...], done: Callable[[Stream | None, OSError | None], None]) -> None:
        family, kind, protocol, _, address = found
        connecting = socket.socket(family, kind, protocol)
        connecting.setblocking(False)
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connecting.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            connecting.close()
            self._loop.call_soon(done, None, OSError(code, os.strerror(code)))
            return
        descriptor = connecting.fileno()

        def finished() -> None:
            self._loop.remove_writer(descriptor)
            timer.cancel()
            code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                connecting.close()
                done(None, OSError(code, os.strerror(code)))
            else:
                done(MachineStream(self._loop, connecting, str(address[0])), None)

        def give_up() -> None:
            self._loop.remove_writer(descriptor)
            connecting.close()
            done(None, TimeoutError(errno.ETIMEDOUT, "no answer"))

        timer = self._loop.call_later(CONNECT_TIMEOUT_S, give_up)
        self._loop.add_writer(descriptor, finished)


class MachineSpawn:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lanes: dict[str, ThreadPoolExecutor] = {}

    def soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_ms / 1000, callback)

    def in_thread(
        self,
        work: Callable[[], Result],
        done: Callable[[Result | None, Exception | None], None],
        *,
        lane: str,
    ) -> None:
        threads = self._lanes.get(lane)
        if threads is None:
            threads = self._lanes[lane] = ThreadPoolExecutor(LANE_THREADS[lane], lane)

        def run() -> None:
            result: Result | None = None
            error: Exception | None = None
            try:
                result = work()
            except Exception as raised:
                error = raised
            self._loop.call_soon_threadsafe(done, result, error)

        threads.submit(run)


class Survivors:
    """Exempts long-lived objects from the garbage collector, which blocks the loop.

    A full collection visits every object: with 300,000 replicas it takes a second and finds almost nothing, and
    meanwhile the other nodes take this one for dead. So after a long collection the remaining objects are frozen
    (``gc.freeze``), and the next one visits only newer objects. Frozen objects are still freed by reference
    counting, but garbage in cycles, such as the partitions of a deleted topic, is not found. So after an hour they
    are unfrozen.
    """

    def __init__(self) -> None:
        self._began_s = 0.0
        # When objects were first frozen.
        self._spared_since_s: float | None = None

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """For ``gc.callbacks``."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.thread_time()
            return
        now_s = time.monotonic()
        if time.thread_time() - self._began_s >= LONG_COLLECTION_S:
            gc.freeze()
            if self._spared_since_s is None:
                self._spared_since_s = now_s
        elif self._spared_since_s is not None and now_s >= self._spared_since_s + SPARED_S:
            gc.unfreeze()
            self._spared_since_s = None


def machine_environment(loop: asyncio.AbstractEventLoop) -> Environment:
    """The environment of a broker process. It also installs a garbage collection callback."""
    gc.callbacks.append(Survivors().collected)
    return Environment(
        clock=MachineClock(),
        files=MachineFiles(_open_files_max()),
        network=MachineNetwork(loop),
        random=random.SystemRandom(),
        spawn=MachineSpawn(loop),
        processes=MachineProcesses(loop),
    )


def _open_files_max() -> int:
    """Half of the descriptors the system allows, after raising the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES_MAX
    return max(16, min(OPEN_FILES_MAX, (soft - RESERVED_DESCRIPTORS) // 2))
