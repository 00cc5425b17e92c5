"""Jobs in a separate process, in virtual time: ``environment.Processes`` for one simulated node.

A job takes a random time, and its effects come at its very end. It may be killed before that, with the node or
alone. Then it has made a random number of its changes to the disk, as a real job would have.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from random import Random
from typing import Any

from penstock.environment import Argument, Files, JobKilled, Result
from penstock.sim.disk import Disk, SimFiles
from penstock.sim.loop import Event, Process, ProcessDied

# On average.
JOB_MS = 200
# A job that is killed has made fewer changes than this number, mostly far fewer.
KILLED_CHANGES_MAX = 1024
# A job on a slow disk is faster again after this time, at the latest, when the disk is.
SLOW_STEP_MS = 1_000.0


class SimProcesses:
    def __init__(self, process: Process, disk: Disk) -> None:
        self._process = process
        self._disk = disk
        self._loop = process.loop
        self._waiting: deque[tuple[bytes, Callable[[Any, Exception | None], None]]] = deque()
        # State of the running job.
        self._running: tuple[bytes, Callable[[Any, Exception | None], None]] | None = None
        self._worker: Process | None = None
        self._files: SimFiles | None = None
        self._end: Event | None = None
        # The time that it still needs on a fast disk.
        self._left_ms = 0.0

    def run(
        self,
        job: Callable[[Files, Argument], Result],
        argument: Argument,
        done: Callable[[Result | None, Exception | None], None],
        *,
        bytes_per_second: float = inf,
    ) -> None:
        # As with a real process, nothing is shared. Objects that cannot be pickled fail here.
        self._waiting.append((pickle.dumps((job, argument)), done))
        if self._running is None:
            self._begin()

    def close(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            self._cut_short()

    def kill(self) -> None:
        """Kill the process of the running job."""
        assert self._running is not None
        _, done = self._running
        self._cut_short()
        self._report(done, None, JobKilled("the process of the job was killed"))
        self._begin()

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def _chance(self) -> Random:
        return self._loop.streams[f"jobs {self._process.host}"]

    def _begin(self) -> None:
        if not self._waiting:
            return
        self._running = self._waiting.popleft()
        clock = self._process.clock
        self._worker = worker = Process(
            self._loop, self._process.host, wall_skew_ms=clock.wall_skew_ms, rate=clock.rate
        )
        self._files = SimFiles(self._disk, worker)
        self._left_ms = self._chance.expovariate(1 / JOB_MS)
        self._go_on()
        # When the node ends, the job ends too, in the middle of its work.
        self._process.on_end[self._cut_short] = None

    def _go_on(self) -> None:
        slowness = self._disk.slowness
        if self._left_ms * slowness <= SLOW_STEP_MS or slowness == 1:
            step_ms, self._left_ms = self._left_ms * slowness, 0.0
        else:
            step_ms = SLOW_STEP_MS
            self._left_ms -= step_ms / slowness
        self._end = self._loop.after(step_ms, self._finish, "job", self._worker)

    def _finish(self) -> None:
        assert self._running is not None
        if self._left_ms:
            self._go_on()
            return
        _, done = self._running
        result, error = self._work()
        self._ended()
        self._report(done, result, error)
        self._begin()

    def _cut_short(self) -> None:
        assert self._files is not None and self._end is not None
        self._end.cancel()
        self._files.changes_left = int(KILLED_CHANGES_MAX ** self._chance.random()) - 1
        with suppress(ProcessDied):
            self._work()
        self._ended()

    def _work(self) -> tuple[Any, Exception | None]:
        assert self._running is not None
        try:
            job, argument = pickle.loads(self._running[0])
            return pickle.loads(pickle.dumps(job(self._files, argument))), None
        except Exception as error:
            return None, error

    def _ended(self) -> None:
        assert self._worker is not None
        self._worker.end()
        self._process.on_end.pop(self._cut_short, None)
        self._running = self._worker = self._files = self._end = None

    def _report(
        self, done: Callable[[Any, Exception | None], None], result: Any, error: Exception | None
    ) -> None:
        self._loop.at(self._process.next_soon_us(), lambda: done(result, error), "done", self._process)
