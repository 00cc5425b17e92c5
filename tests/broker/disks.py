"""A node's storage on real files, whose disks fail when told to and outlive the node."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.broker.storage.data_directory import Directory
from penstock.broker.storage.storage import Storage
from penstock.environment import Buffer, Environment
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.machine import MachineClock, MachineFile, MachineFiles
from penstock.model import TopicId
from tests.log.making import append

NODE = 7
BOOT = "/proc/sys/kernel/random/boot_id"


class FailingFile(MachineFile):
    __slots__ = ()

    def read_at(self, position: int, size: int) -> bytes:
        self.fail("read")
        return super().read_at(position, size)

    def append(self, buffers: Sequence[Buffer]) -> None:
        self.fail("append")
        super().append(buffers)

    def prepare_sync(self) -> Callable[[], None]:
        sync = super().prepare_sync()

        def work() -> None:
            sync()
            self.fail("sync")

        return work

    def fail(self, what: str) -> None:
        files = self._files
        assert isinstance(files, FailingFiles)
        files.fail(what, self.path)


class FailingFiles(MachineFiles):
    """Real files, on disks that fail when told to."""

    def __init__(self) -> None:
        super().__init__()
        # (what, the beginning of the path, errno)
        self.failures: list[tuple[str, str, int]] = []
        self.boot_id = b"boot 1"
        self.is_used = False

    def lock(self, path: str) -> bool:
        # A real lock would outlive a node that was killed, as the process goes on.
        return not self.is_used

    def fail(self, what: str, path: str) -> None:
        for failing, prefix, number in self.failures:
            if failing == what and path.startswith(prefix):
                raise OSError(number, os.strerror(number), path)

    def open(self, path: str) -> FailingFile:
        return FailingFile(self, path)

    def list(self, path: str) -> list[str]:
        self.fail("list", path)
        return super().list(path)

    def make_directory(self, path: str) -> None:
        self.fail("make", path)
        super().make_directory(path)

    def read(self, path: str) -> bytes:
        if path == BOOT:
            return self.boot_id
        self.fail("read", path)
        return super().read(path)

    def allocate(self, path: str, size: int) -> None:
        self.fail("allocate", path)
        super().allocate(path, 0)  # as if: nobody's disk is filled by tests

    def replace(self, path: str, data: Buffer, *, durable: bool = True) -> None:
        self.fail("replace", path)
        super().replace(path, data, durable=durable)


class Spawn:
    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def later(self, delay_ms: float, callback: Callable[[], None]) -> None:
        self.timers.append(callback)

    def soon(self, callback: Callable[[], None]) -> None:
        self.timers.append(callback)

    def in_thread(self, work: Callable[[], Any], done: Callable[..., None], *, lane: str) -> None:
        try:
            work()
        except OSError as error:
            done(None, error)
        else:
            done(None, None)

    def run(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()


class Lines:
    """A logger that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, event: str, **values: Any) -> None:
        self.lines.append(f"{event} {values}")

    info = warning = error = note


class Hosted:
    """As much of a hosted partition as the storage looks at."""

    def __init__(self, topic: str, index: int, topic_id: bytes) -> None:
        self.topic = topic
        self.index = index
        self.topic_id = TopicId(topic_id)
        self.config = SimpleNamespace(log=LogConfig(), file_delete_delay_ms=1000)
        self._log: Log | None = None
        self.flushes = 0
        self.high_watermark = 0
        self.is_deleted = False

    def __repr__(self) -> str:
        return f"{self.topic}-{self.index}"

    @property
    def is_open(self) -> bool:
        return self._log is not None

    @property
    def log(self) -> Log:
        assert self._log is not None
        return self._log

    def open(self, storage: Storage, placed_in: bytes = bytes(16), *, may_cut: bool = True) -> Log:
        self._log = storage.open_log(self, placed_in, may_cut=may_cut)  # type: ignore[arg-type]
        return self._log

    def write(self, storage: Storage, count: int = 3) -> Log:
        log = self.open(storage)
        storage.make_directory(self)  # type: ignore[arg-type]
        for _ in range(count):
            append(log)
        return log

    def flush(self) -> None:
        self.flushes += 1


class Node:
    """One node and its disks, which outlive it."""

    def __init__(self, root: Path, *names: str) -> None:
        self.root = root
        self.paths = [str(root / name) for name in names]
        self.seed = 0

    def start(self, **options: Any) -> Storage:
        self.seed += 1
        self.files = FailingFiles()
        self.logger = Lines()
        self.failures: list[str] = []
        self.failed: list[Directory] = []
        self.spawn = Spawn()
        environment = Environment(
            MachineClock(),
            self.files,
            None,  # type: ignore[arg-type]
            random.Random(self.seed),
            self.spawn,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
        )
        self.files.boot_id = options.pop("boot_id", b"boot 1")
        self.files.is_used = options.pop("is_used", False)
        self.files.failures = options.pop("failures", [])
        node_id = options.pop("node_id", NODE)
        return Storage(
            environment,
            self.paths,
            node_id,
            self.logger,  # type: ignore[arg-type]
            self.failures.append,
            lambda directory, reason: self.failed.append(directory),
            **options,
        )

    def stop(self, storage: Storage, *hosted: Hosted, epoch: int = 5) -> None:
        for one in hosted:
            one.log.close()
        storage.remember(hosted)  # type: ignore[arg-type]
        storage.prepare_checkpoint()()
        storage.leave_clean_marker(epoch)

    def where(self, name: str) -> list[str]:
        """Which directories hold a partition."""
        return [path for path in self.paths if os.path.isdir(f"{path}/{name}")]

    def strays(self, path: str) -> list[str]:
        return [name.split(".")[0] for name in os.listdir(path) if name.endswith("-stray")]


def hosted(index: int = 0, topic: str = "t") -> Hosted:
    return Hosted(topic, index, bytes(15) + topic.encode())
