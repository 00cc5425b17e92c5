"""The process that runs jobs for a broker, one after the other: ``python -m penstock.job_process``.

``machine_processes.py`` starts it and is at the other end of its standard input and output.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from math import inf
from queue import SimpleQueue
from typing import Any

from penstock.environment import Buffer, File, Files
from penstock.machine import MachineFiles
from penstock.machine_processes import read_message, write_message

# Added to the niceness of the broker, which goes first when both want the same core.
NICENESS = 10


def main() -> None:
    os.nice(NICENESS)
    # Control-C at a terminal is for the broker, which shuts down cleanly and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A job's output must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()
    sys.path[:] = pickle.loads(jobs.get())
    files = MachineFiles()
    while True:
        answer = _answer(files, jobs.get())
        try:
            write_message(answers, answer)
        except BrokenPipeError:
            # The broker is gone, which ``_receive`` has not noticed yet.
            os._exit(0)


def _receive(jobs: SimpleQueue[bytes]) -> None:
    while (message := read_message(sys.stdin.buffer)) is not None:
        jobs.put(message)
    # The broker is gone. Stop at once: the job must not run beside the next broker.
    os._exit(0)


def _answer(files: MachineFiles, pickled: bytes) -> bytes:
    try:
        job, argument, bytes_per_second = pickle.loads(pickled)
        given = files if bytes_per_second == inf else _PacedFiles(files, bytes_per_second)
        return pickle.dumps((job(given, argument), None))
    except Exception as error:
        return _pickled_error(error)


def _pickled_error(error: Exception) -> bytes:
    """Pickle an error, or its text if it cannot be pickled and read back."""
    try:
        pickled = pickle.dumps((None, error))
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps((None, RuntimeError(repr(error))))
    return pickled


class _Pace:
    """Holds reads and writes to a rate, over the whole job."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._began = time.monotonic()
        self._moved = 0

    def moved(self, size: int) -> None:
        self._moved += size
        ahead = self._moved / self._bytes_per_second - (time.monotonic() - self._began)
        if ahead > 0:
            time.sleep(ahead)


class _PacedFile:
    def __init__(self, file: File, pace: _Pace) -> None:
        self._file = file
        self._pace = pace

    def append(self, buffers: Sequence[Buffer]) -> None:
        self._file.append(buffers)
        self._pace.moved(sum(map(len, buffers)))

    def read_at(self, position: int, size: int) -> bytes:
        data = self._file.read_at(position, size)
        self._pace.moved(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _PacedFiles:
    def __init__(self, files: Files, bytes_per_second: float) -> None:
        self._files = files
        self._pace = _Pace(bytes_per_second)

    def open(self, path: str) -> _PacedFile:
        return _PacedFile(self._files.open(path), self._pace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


if __name__ == "__main__":
    main()
