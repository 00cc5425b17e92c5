"""Starting, stopping and killing a real broker process, and waiting for things to become true.

``BrokerProcess`` is a whole one-node cluster behind ``penstock serve``. It remembers its port and directory,
so that a restarted broker is the same broker to its clients. A test that stops it cleanly learns whether it
exited with status 0 and logged no traceback; a test that kills it learns nothing, as after a crash.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

Found = TypeVar("Found")

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
READY = re.compile(r"^penstock node \d+ ready\b.*\bkafka=(?P<addresses>\S+)")
ADDRESS = re.compile(r"(?:(?P<name>[A-Z0-9_-]+)://)?(?P<host>[^,]+):(?P<port>\d+)")
TAIL_CHARACTERS = 6000
JOB_PROCESS = b"penstock.job_process"


def wait_until(condition: Callable[[], Found], deadline_s: float, message: str) -> Found:
    """Poll until ``condition`` returns something true, and return that. Fails with ``message`` otherwise."""
    deadline = time.monotonic() + deadline_s
    pause_s = 0.005
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {message} (last seen: {found!r})")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)


def job_process_of(pid: int) -> int | None:
    """The process that does the jobs of a broker, if it has one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            for child in (task / "children").read_text().split():
                if JOB_PROCESS in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


class BrokerProcess:
    """``penstock serve`` as its own process: started on entering the context, stopped on leaving it.

    Without a ``data_dir`` it uses a temporary one and removes it at the end.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        node_id: int = 1,
        data_dir: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._settings = dict(settings or {})
        self._node_id = node_id
        self._arguments = list(arguments)
        self._given_dir = data_dir
        self._scratch: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None
        self.data_dir = data_dir or Path()
        self.port = 0  # 0 until the first start; then kept over restarts.
        self.host = "127.0.0.1"
        # Of all its listeners, by their names, if the settings name them.
        self.addresses: dict[str, tuple[str, int]] = {}
        self.ready_line = ""

    # The context

    def __enter__(self) -> Self:
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-test-"))
        if self._given_dir is None:
            self.data_dir = self._scratch / "data"
        try:
            self.start()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._process is None:
                return  # the test stopped or killed it
            if error is None:
                assert self.is_running, f"the broker ended by itself\n{self.log_tail()}"
                self.stop()
            else:
                sys.stderr.write(f"\n--- end of the broker's log ---\n{self.log_tail()}\n")
        finally:
            self._discard()

    # What a test does to a broker

    def start(self, *, settings: Mapping[str, str] | None = None) -> None:
        """Start on the directory and port of last time; ``settings`` replace those given before."""
        assert not self.is_running, "the broker is running already"
        assert self._scratch is not None, "enter the context first"
        if settings is not None:
            self._settings = dict(settings)
        self._stderr = self.log_path.open("ab")
        self._process = subprocess.Popen(
            self.command(), stdout=subprocess.PIPE, stderr=self._stderr, text=True, start_new_session=True
        )
        try:
            self._read_ready_line()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """SIGTERM, and hold the broker to a clean end: status 0 and no traceback in its log."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end {STOP_TIMEOUT_S:g} s after SIGTERM\n{self.log_tail()}") from None
        self._release()
        assert status == 0, f"exit status {status} after SIGTERM\n{self.log_tail()}"
        self.assert_no_traceback()

    def kill(self) -> None:
        """SIGKILL: what a crash of the process looks like. The page cache survives it."""
        process = self._running()
        process.kill()
        process.wait()
        self._release()

    def restart(self, *, kill: bool = False, settings: Mapping[str, str] | None = None) -> None:
        if kill:
            self.kill()
        else:
            self.stop()
        self.start(settings=settings)

    # What a test asks of a broker

    @property
    def bootstrap(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        assert self._scratch is not None
        return self._scratch / "stderr.log"

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-TAIL_CHARACTERS:]

    def assert_no_traceback(self) -> None:
        log = self.log_path.read_text(errors="replace")
        first = log.find("Traceback")
        assert first < 0, (
            f"the broker logged a traceback:\n{log[max(0, first - 500) : first + TAIL_CHARACTERS]}"
        )

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "penstock", "serve", "--node-id", str(self._node_id)]
        command += ["--data-dir", str(self.data_dir)]
        if "listeners" not in self._settings:
            command += ["--listen", f"{self.host}:{self.port}"]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        return command + self._arguments

    # Private

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the broker is not running"
        return self._process

    def _read_ready_line(self) -> None:
        process = self._running()
        assert process.stdout is not None
        # Reading a pipe has no timeout of its own; the end of the process ends it.
        alarm = threading.Timer(START_TIMEOUT_S, process.kill)
        alarm.start()
        try:
            for line in process.stdout:
                match = READY.match(line)
                if match:
                    self.ready_line = line.rstrip("\n")
                    found = [
                        (each["name"], each["host"], int(each["port"]))
                        for each in ADDRESS.finditer(match["addresses"])
                    ]
                    _, self.host, self.port = found[0]
                    self.addresses = {name: (host, port) for name, host, port in found if name}
                    return
        finally:
            alarm.cancel()
        status = process.wait()
        raise AssertionError(f"the broker ended with status {status} before it was ready\n{self.log_tail()}")

    def _release(self) -> None:
        process = self._running()
        if process.stdout is not None:
            process.stdout.close()
        if self._stderr is not None:
            self._stderr.close()
        self._process, self._stderr = None, None

    def _discard(self) -> None:
        if self._process is not None:
            self.kill()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
