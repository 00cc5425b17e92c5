"""Jobs in a separate process, on a real machine: the broker's side. The other side is ``job_process.py``.

The process is started for the first job and runs the later ones too. The two sides share only two pipes, which
carry pickles, each preceded by its length. The pipes also end the process: when the broker ends in any way, its end
of the pipes is closed, and the other side exits at once, even in the middle of a job.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from typing import IO, Any

from penstock.environment import Argument, Files, JobKilled, Result

LENGTH_BYTES = 8
# -P: the current directory is not on the import path.
COMMAND = (sys.executable, "-P", "-m", "penstock.job_process")


class MachineProcesses:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Pickled jobs and their callbacks; None to end the thread.
        self._jobs: SimpleQueue[tuple[bytes, Callable[[Any, Exception | None], None]] | None] = SimpleQueue()
        # Talks to the process. A daemon, because it may be waiting for a job when the interpreter ends.
        self._thread: threading.Thread | None = None
        # Guards the two below: no process is started after ``close``.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def run(
        self,
        job: Callable[[Files, Argument], Result],
        argument: Argument,
        done: Callable[[Result | None, Exception | None], None],
        *,
        bytes_per_second: float = inf,
    ) -> None:
        pickled = pickle.dumps((job, argument, bytes_per_second))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="jobs", daemon=True)
            self._thread.start()
        self._jobs.put((pickled, done))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (queued := self._jobs.get()) is not None:
            pickled, done = queued
            result: Any = None
            error: Exception | None = None
            try:
                result = self._ask(pickled)
            except Exception as raised:
                error = raised
            if self._is_closed:
                continue
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(done, result, error)
        self._reap()

    def _ask(self, pickled: bytes) -> Any:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            write_message(process.stdin, pickled)
            answer = read_message(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            status = self._reap()
            raise JobKilled(f"the job's process ended with status {status}")
        result, error = pickle.loads(answer)
        if error is not None:
            raise error
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, starting one if needed. Raises OSError."""
        if self._process is not None and self._process.poll() is not None:
            self._reap()
        with self._lock:
            if self._is_closed:
                raise JobKilled("the broker is stopping")
            if self._process is None:
                self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert self._process.stdin is not None
                # Jobs are imported from where the broker would import them.
                with suppress(OSError):  # it has ended already; the job will fail
                    write_message(self._process.stdin, pickle.dumps(sys.path))
            return self._process

    def _reap(self) -> int | None:
        """Close the pipes, which ends the process, and wait for it. Returns the exit status."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unsent bytes to a process that is gone
                pipe.close()
        return process.wait()


def write_message(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(LENGTH_BYTES, "big"))
    pipe.write(message)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes | None:
    """Read one message; None when the other side is gone."""
    length = pipe.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "big")
    message = pipe.read(size)
    return message if len(message) == size else None
