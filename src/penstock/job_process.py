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
        job, argument = pickle.loads(pickled)
        return pickle.dumps((job(files, argument), None))
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


if __name__ == "__main__":
    main()
