"""Virtual time: one clock and one queue of events for every process of a simulated run.

Nothing waits. ``Loop.run_for`` takes the next event out of the queue, sets the time to it and calls it, so an
idle hour costs nothing. All randomness comes from ``Streams``: one generator for each purpose, so that, say, one
more draw by the workload does not change the behaviour of the network.

Events belong to a ``Process``. A dead process gets no more events, a paused one gets them later in the same
order; a restarted node is a new process. As on a real loop, ``soon`` keeps the order of its calls within one
process, and no other order is guaranteed: timers, finished work of threads and packets each have a random delay.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from hashlib import sha256
from typing import Any, Generic, TypeVar

from penstock.environment import Result
from penstock.machine import LANE_THREADS
from penstock.sim.report import Violation

Value = TypeVar("Value")

# The wall time at the start of every run: a day in 2023.
WALL_START_MS = 1_700_000_000_000
SOON_US_MAX = 40
TIMER_LATE_US_MAX = 400
THREAD_START_US_MAX = 300


class ProcessDied(BaseException):
    """Raised in the code of a process that dies in the middle of it. Only the loop may catch it."""


class Streams:
    """One random generator for each purpose, all from one seed."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self._made: dict[str, random.Random] = {}

    def __getitem__(self, name: str) -> random.Random:
        made = self._made.get(name)
        if made is None:
            # A string seed is hashed with SHA-512, the same in every process.
            made = self._made[name] = random.Random(f"{self.seed}/{name}")
        return made


class Event:
    """A callback in the queue; also the Timer returned by ``Spawn.later``."""

    __slots__ = ("callback", "kind", "process")

    def __init__(self, callback: Callable[[], None], kind: str, process: Process | None) -> None:
        self.callback: Callable[[], None] | None = callback
        self.kind = kind
        # None: an event of the simulator itself.
        self.process = process

    def cancel(self) -> None:
        self.callback = None


class Loop:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.now_us = 0
        self.events = 0
        self._queue: list[tuple[int, int, Event]] = []
        self._count = 0
        self._chance = streams["schedule"]
        self._trace = sha256()
        self._violation: Violation | None = None

    @property
    def now_ms(self) -> float:
        return self.now_us / 1000

    @property
    def trace_hash(self) -> str:
        """A hash of the events so far: equal for equal seeds, on every machine and in every process."""
        return self._trace.hexdigest()[:16]

    def note(self, text: str) -> None:
        """Add a text to the trace."""
        self._trace.update(text.encode())

    def violate(self, message: str) -> None:
        """End the run, even from code that would catch an exception."""
        if self._violation is None:
            self._violation = Violation(message)
        raise self._violation

    def at(
        self, at_us: int, callback: Callable[[], None], kind: str, process: Process | None = None
    ) -> Event:
        event = Event(callback, kind, process)
        self._count += 1
        heapq.heappush(self._queue, (max(at_us, self.now_us), self._count, event))
        return event

    def after(
        self,
        delay_ms: float,
        callback: Callable[[], None],
        kind: str = "world",
        process: Process | None = None,
    ) -> Event:
        return self.at(self.now_us + int(delay_ms * 1000), callback, kind, process)

    def requeue(self, at_us: int, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_us, self._count, event))

    def jitter_us(self, up_to_us: int) -> int:
        return 1 + int(self._chance.random() * up_to_us)

    def run_for(self, duration_ms: float) -> None:
        self.run_until_us(self.now_us + int(duration_ms * 1000))

    def run_until(self, condition: Callable[[], bool], within_ms: float) -> bool:
        """Run until the condition holds; False if it does not within the time."""
        end_us = self.now_us + int(within_ms * 1000)
        while not condition():
            if not self._queue or self._queue[0][0] > end_us:
                self.now_us = max(self.now_us, end_us)
                return condition()
            self._step()
        return True

    def run_until_us(self, end_us: int) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end_us:
            self._step()
        self.now_us = max(self.now_us, end_us)

    def _step(self) -> None:
        at_us, _, event = heapq.heappop(self._queue)
        callback, process = event.callback, event.process
        if callback is None:
            return
        self.now_us = at_us
        if process is not None and not process.may_run(event):
            return
        event.callback = None
        self.events += 1
        self._trace.update(b"%d %s %s;" % (at_us, process.label if process else b"-", event.kind.encode()))
        try:
            callback()
        except ProcessDied:
            assert process is not None and not process.is_alive, "only a process dies"
        except Violation:
            raise
        except Exception as error:
            if process is None or process.on_exception is None:
                raise
            process.on_exception(error)
        if self._violation is not None:
            raise self._violation


class Process:
    """One run of a program on a host, with its own clock and threads."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        *,
        wall_skew_ms: int = 0,
        # Milliseconds of its clocks per real millisecond.
        rate: float = 1.0,
        thread_ms: Callable[[str], float] | None = None,
    ) -> None:
        self.loop = loop
        self.host = host
        self.label = host.encode()
        self.is_alive = True
        # Called with an exception that a callback raises.
        self.on_exception: Callable[[Exception], None] | None = None
        # Called once at the end: the clean-up that the kernel does.
        self.on_end: dict[Callable[[], None], None] = {}
        self._paused_until_us = 0
        self._deferred: list[Event] = []
        self._soon_us = 0
        self.clock = SimClock(loop, wall_skew_ms, rate)
        self.spawn = SimSpawn(self, thread_ms or (lambda lane: 0.0))

    def __repr__(self) -> str:
        return f"<process on {self.host}>"

    @property
    def is_paused(self) -> bool:
        return self.loop.now_us < self._paused_until_us

    def may_run(self, event: Event) -> bool:
        """Whether an event may run now; an event of a paused process is kept for later."""
        if not self.is_alive:
            return False
        if self._deferred or self.is_paused:
            self._deferred.append(event)
            return False
        return True

    def end(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self._deferred.clear()
            for clean_up in list(self.on_end):
                clean_up()

    def pause(self, duration_ms: float) -> None:
        until_us = self.loop.now_us + int(duration_ms * 1000)
        if until_us > self._paused_until_us:
            self._paused_until_us = until_us
            self.loop.at(until_us, self._resume, "resume")

    def resume(self) -> None:
        self._paused_until_us = 0
        self._resume()

    def _resume(self) -> None:
        if self.is_paused or not self.is_alive:
            return
        deferred, self._deferred = self._deferred, []
        now_us = self.loop.now_us
        for place, event in enumerate(deferred):
            self.loop.requeue(now_us + place, event)
        # New calls of ``soon`` come after the deferred events.
        self._soon_us = max(self._soon_us, now_us + len(deferred))

    def next_soon_us(self) -> int:
        self._soon_us = max(self._soon_us + 1, self.loop.now_us + self.loop.jitter_us(SOON_US_MAX))
        return self._soon_us


class SimClock:
    """The two clocks of a process. Both drift; the wall clock also has an offset and may be set."""

    def __init__(self, loop: Loop, wall_skew_ms: int, rate: float) -> None:
        self._loop = loop
        self.rate = rate
        self.wall_skew_ms = wall_skew_ms
        # The monotonic clock of each machine starts at another value.
        self._monotonic_start_ms = loop.streams["schedule"].randrange(1_000_000)

    def now_ms(self) -> int:
        return self._monotonic_start_ms + int(self._loop.now_us * self.rate / 1000)

    def work_us(self) -> int:
        return self._loop.now_us  # work takes no time

    def boot_id(self) -> str:
        return ""  # every start counts as one after a reboot

    def wall_ms(self) -> int:
        return WALL_START_MS + self.wall_skew_ms + int(self._loop.now_us * self.rate / 1000)


class SimSpawn:
    def __init__(self, process: Process, thread_ms: Callable[[str], float]) -> None:
        self._process = process
        self._loop = process.loop
        # Duration of the next work in a lane.
        self._thread_ms = thread_ms
        # For each lane: when each of its threads is free.
        self._lanes: dict[str, list[int]] = {}

    def soon(self, callback: Callable[[], None]) -> None:
        self._loop.at(self._process.next_soon_us(), callback, "soon", self._process)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Event:
        delay_us = int(max(0, delay_ms) * 1000 / self._process.clock.rate)
        late_us = self._loop.jitter_us(TIMER_LATE_US_MAX)
        return self._loop.at(self._loop.now_us + delay_us + late_us, callback, "timer", self._process)

    def in_thread(
        self,
        work: Callable[[], Result],
        done: Callable[[Result | None, Exception | None], None],
        *,
        lane: str,
    ) -> None:
        threads = self._lanes.setdefault(lane, [0] * LANE_THREADS[lane])
        thread = min(range(len(threads)), key=threads.__getitem__)
        start_us = max(threads[thread], self._loop.now_us) + self._loop.jitter_us(THREAD_START_US_MAX)
        end_us = threads[thread] = start_us + int(self._thread_ms(lane) * 1000)

        def run() -> None:
            # Its effects come at the very end: a process that dies before has done nothing.
            result: Result | None = None
            error: Exception | None = None
            try:
                result = work()
            except Exception as raised:
                error = raised
            self._loop.at(self._process.next_soon_us(), lambda: done(result, error), "done", self._process)

        self._loop.at(end_us, run, f"thread {lane}", self._process)


# Coroutines for the simulated clients: plain Python coroutines, driven by the loop above.


class Promise(Generic[Value]):
    """A future value. One coroutine may await it."""

    __slots__ = ("_waiter", "is_kept", "value")

    def __init__(self) -> None:
        self.is_kept = False
        self.value: Value | None = None
        self._waiter: Callable[[], None] | None = None

    def keep(self, value: Value) -> None:
        """Set the value. Only the first call counts."""
        if not self.is_kept:
            self.is_kept = True
            self.value = value
            if self._waiter is not None:
                self._waiter()

    def wait(self, waiter: Callable[[], None]) -> None:
        assert self._waiter is None, "two coroutines wait for one promise"
        self._waiter = waiter

    def __await__(self) -> Generator[Promise[Value], None, Value]:
        if not self.is_kept:
            yield self
        assert self.is_kept
        return self.value  # type: ignore[return-value]


def sleep(process: Process, delay_ms: float) -> Promise[None]:
    promise: Promise[None] = Promise()
    process.spawn.later(delay_ms, lambda: promise.keep(None))
    return promise


def start(process: Process, coroutine: Coroutine[Promise[Any], None, None]) -> Promise[None]:
    """Run a coroutine as part of a process; the promise is kept when it returns."""
    ended: Promise[None] = Promise()

    def step() -> None:
        try:
            promise = coroutine.send(None)
        except StopIteration:
            process.on_end.pop(close, None)
            ended.keep(None)
            return
        if promise.is_kept:
            process.spawn.soon(step)
        else:
            promise.wait(lambda: process.spawn.soon(step))

    def close() -> None:
        # It is never resumed. Closing it avoids Python's warning.
        if not coroutine.cr_running:  # type: ignore[attr-defined]
            coroutine.close()

    process.on_end[close] = None
    process.spawn.soon(step)
    return ended
