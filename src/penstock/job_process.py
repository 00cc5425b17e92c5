"""The process that runs jobs for a broker, one after the other: ``python -m penstock.job_process``.

``machine_processes.py`` starts it and is at the other end of its standard input and output.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from queue import SimpleQueue

from penstock.machine import MachineFiles
from penstock.machine_processes import read_message, write_message


def main() -> None:
    # Control-C at a terminal is for the broker, which stops in good order and takes this process along.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a job prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()
    sys.path[:] = pickle.loads(jobs.get())
    files = MachineFiles()
    while True:
        write_message(answers, _answer(files, jobs.get()))


def _receive(jobs: SimpleQueue[bytes]) -> None:
    while (message := read_message(sys.stdin.buffer)) is not None:
        jobs.put(message)
    # The broker is gone. Nobody waits for the job, and the next broker must not meet it.
    os._exit(0)


def _answer(files: MachineFiles, pickled: bytes) -> bytes:
    try:
        job, argument = pickle.loads(pickled)
        return pickle.dumps((job(files, argument), None))
    except Exception as error:
        return _pickled_error(error)


def _pickled_error(error: Exception) -> bytes:
    """Not every exception can be pickled, or read back."""
    try:
        pickled = pickle.dumps((None, error))
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps((None, RuntimeError(repr(error))))
    return pickled


if __name__ == "__main__":
    main()
