"""The client without a socket, clock or thread: events and the time go in, effects and results come out.

The shell (``blocking.py`` or ``async_shell.py``) does, in a loop:

    for effect in core.take_effects():      connect, send, disconnect
    wait until a socket is ready or core.due_ms() has come
    core.connected / core.received / core.lost / core.tick

A caller's operation is a ``Task``: a generator that yields what it waits for: a list of requests, all sent at
once and answered together, a ``Pause``, or an ``Errand`` that a participant does. The generators are in
``operations.py``. Producers, which have many requests in flight, are not generators; they take part through
``Participant``.

Nothing here runs callbacks in the middle of an event. Responses are collected, and ``_settle`` resumes tasks and
producers after the event.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from penstock.sasl.client import SaslClient
from penstock.wire.cluster import Cluster, parse_bootstrap
from penstock.wire.errors import TimedOut, Unreachable, WireError
from penstock.wire.links import Address, Answer, Ask, Channel, Done, Effect, Lane, Links

# If no broker has ever answered, the address is probably wrong or no broker is running, so give up sooner.
FIRST_CONTACT_MS = 15_000
BACK_OFF_MS = 20
BACK_OFF_MS_MAX = 1_000

Result = TypeVar("Result")


class Question(NamedTuple):
    address: Address
    channel: Channel | Lane
    ask: Ask


@dataclass(frozen=True, slots=True)
class Pause:
    ms: int


@dataclass(frozen=True, slots=True)
class Errand:
    """Something that ends with one answer, later or at once, such as a part of a request that tasks share."""

    begin: Callable[[Done], None]


Wish: TypeAlias = list[Question] | Pause | Errand
Steps: TypeAlias = Generator[Wish, list[Answer], Result]


class Task(Generic[Result]):
    """One operation of a caller. When ``is_done``, it has a ``result`` or an ``error``."""

    def __init__(self, what: str, now_ms: int, deadline_ms: int) -> None:
        # For error messages: "fetching orders-0".
        self.what = what
        self.begun_ms = now_ms
        self.due_ms = now_ms + deadline_ms
        self.is_done = False
        self.result: Result | None = None
        self.error: WireError | None = None
        # Why it has not succeeded yet, and whether the reason is that no broker can be reached.
        self.trouble = ""
        self.is_cut_off = False
        self.failures = 0
        # For the shell. It runs in the middle of an event, so it may only note that the task is done.
        self.on_done: Callable[[], None] | None = None
        # Private to the core
        self.steps: Steps[Result] | None = None
        self.wake_ms: int | None = None
        self.answers: list[Answer | None] = []
        self.missing = 0

    def outcome(self) -> Result:
        assert self.is_done
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # None only where Result says so


class Participant(Protocol):
    """Acts after every event."""

    def step(self) -> None: ...

    def due_ms(self) -> int | None: ...

    def slept(self, ms: int) -> None: ...

    def check(self) -> None: ...


class Core:
    def __init__(
        self,
        bootstrap: str,
        chance: random.Random,
        *,
        client_id: str = "penstock-wire",
        request_timeout_ms: int = 30_000,
        deadline_ms: int = 120_000,
        sasl: SaslClient | None = None,
        has_tls: bool = False,
    ) -> None:
        self.bootstrap = bootstrap
        self.chance = chance
        self.request_timeout_ms = request_timeout_ms
        self.deadline_ms = deadline_ms
        self.cluster = Cluster(parse_bootstrap(bootstrap))
        self.links = Links(
            client_id, chance, request_timeout_ms=request_timeout_ms, sasl=sasl, has_tls=has_tls
        )
        # Time of the current event. Monotonic.
        self.now_ms = 0
        self.participants: list[Participant] = []
        self._tasks: dict[Task[Any], None] = {}
        self._ready: deque[Task[Any]] = deque()
        self._rotation = 0

    # For callers

    def start(
        self,
        what: str,
        steps: Callable[[Core, Task[Result]], Steps[Result]],
        now_ms: int,
        deadline_ms: int | None = None,
    ) -> Task[Result]:
        """Start an operation; the shell turns until the task is done."""
        self.now_ms = now_ms
        task = self.begin(what, steps, deadline_ms)
        self._settle()
        return task

    def begin(
        self,
        what: str,
        steps: Callable[[Core, Task[Result]], Steps[Result]],
        deadline_ms: int | None = None,
    ) -> Task[Result]:
        """As ``start``, for participants in the middle of an event."""
        deadline_ms = self.deadline_ms if deadline_ms is None else deadline_ms
        task: Task[Result] = Task(what, self.now_ms, deadline_ms)
        task.steps = steps(self, task)
        self._tasks[task] = None
        self._ready.append(task)
        return task

    def cancel(self, task: Task[Any]) -> None:
        """The result is not needed any more. Responses to its requests in flight are dropped."""
        if not task.is_done:
            self._finish(task, None, WireError(f"{task.what} was cancelled"))

    def close(self) -> None:
        for task in list(self._tasks):
            self.cancel(task)
        self.links.close()
        self._settle()

    # Events from the shell

    def connected(self, link: int, now_ms: int) -> None:
        self.now_ms = now_ms
        self.links.connected(link, now_ms)
        self._settle()

    def space(self, link: int) -> memoryview | None:
        return self.links.space(link)

    def received(self, link: int, count: int, now_ms: int) -> None:
        self.now_ms = now_ms
        self.links.received(link, count, now_ms)
        self._settle()

    def lost(self, link: int, why: str, now_ms: int, *, is_tls: bool = False) -> None:
        self.now_ms = now_ms
        self.links.lost(link, why, now_ms, is_tls=is_tls)
        self._settle()

    def slept(self, ms: int) -> None:
        """The sockets were not read for this long: responses in them are not late, and deadlines move by it."""
        self.links.slept(ms)
        for task in self._tasks:
            task.due_ms += ms
        for participant in self.participants:
            participant.slept(ms)

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.links.tick(now_ms)
        for task in list(self._tasks):
            if task.due_ms <= now_ms:
                self._overdue(task)
            elif task.wake_ms is not None and task.wake_ms <= now_ms:
                task.wake_ms = None
                self._ready.append(task)
        self._settle()

    def due_ms(self) -> int | None:
        """When to call ``tick`` if no event comes before."""
        times = [self.links.due_ms(), *(each.due_ms() for each in self.participants)]
        for task in self._tasks:
            times += (task.due_ms, task.wake_ms)
        return min((time for time in times if time is not None), default=None)

    def take_effects(self) -> list[Effect]:
        effects, self.links.effects = self.links.effects, []
        return effects

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        self.links.check()
        self.cluster.check()
        assert not self._ready
        for task in self._tasks:
            assert not task.is_done
            assert (task.wake_ms is not None) != (task.missing > 0), "a task waits for one thing"
        for participant in self.participants:
            participant.check()

    # For operations

    def candidates(self) -> list[Address]:
        """Brokers for a request that any broker can answer: connected ones first, recently failed ones last."""
        known = list(self.cluster.brokers.values())
        self._rotation += 1
        turn = self._rotation % len(known) if known else 0
        known = known[turn:] + known[:turn]
        everybody = list(dict.fromkeys([*known, *self.cluster.bootstrap]))
        return sorted(everybody, key=lambda address: self.links.doubts(address, Channel.CONTROL))

    def back_off_ms(self, failures: int) -> int:
        """How long to wait after this many failures in a row: not at all after the first."""
        if failures <= 1:
            return 0
        delay_ms = min(BACK_OFF_MS_MAX, BACK_OFF_MS * 2 ** min(failures - 2, 10))
        return int(delay_ms * self.chance.uniform(0.8, 1.2))

    def unreachable(self, trouble: str) -> Unreachable:
        brokers = ", ".join(map(str, self.cluster.bootstrap))
        return Unreachable(f"cannot reach any of {brokers}; is a broker running there? ({trouble})")

    # Private

    def _settle(self) -> None:
        while True:
            while self._ready:
                self._resume(self._ready.popleft())
            for participant in list(self.participants):
                participant.step()
            if not self._ready:
                return

    def _resume(self, task: Task[Any]) -> None:
        if task.is_done:
            return
        assert task.steps is not None
        answers, task.answers = task.answers, []
        try:
            wish = task.steps.send(answers if answers else None)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._finish(task, stop.value, None)
            return
        except WireError as error:
            self._finish(task, None, error)
            return
        except BaseException as error:
            # Our bug, or a response without a required field. Later turns must not fail on the task.
            self._finish(task, None, WireError(f"{task.what} failed: {error!r}"))
            raise
        if isinstance(wish, Pause):
            task.wake_ms = self.now_ms + wish.ms
            return
        if isinstance(wish, Errand):
            task.answers, task.missing = [None], 1
            wish.begin(_Collecting(self, task, 0))
            return
        assert wish, "a task without requests would wait forever"
        task.answers = [None] * len(wish)
        task.missing = len(wish)
        for number, question in enumerate(wish):
            self.links.ask(
                question.address, question.channel, question.ask, self.now_ms, _Collecting(self, task, number)
            )

    def collected(self, task: Task[Any], number: int, answer: Answer) -> None:
        if task.is_done:
            return
        assert task.answers[number] is None
        task.answers[number] = answer
        task.missing -= 1
        if task.missing == 0:
            self._ready.append(task)

    def _overdue(self, task: Task[Any]) -> None:
        if task.is_cut_off or not self.links.has_contact:
            self._finish(task, None, self.unreachable(task.trouble or "no answer"))
            return
        seconds = (task.due_ms - task.begun_ms) / 1000
        why = task.trouble or "no answer"
        self._finish(task, None, TimedOut(f"{task.what} did not succeed within {seconds:g} s: {why}"))

    def _finish(self, task: Task[Any], result: Any, error: WireError | None) -> None:
        task.is_done = True
        task.result, task.error = result, error
        steps, task.steps = task.steps, None
        if steps is not None:
            steps.close()
        self._tasks.pop(task, None)
        if task.on_done is not None:
            task.on_done()


class _Collecting:
    """Stores one response at its place among those that a task waits for."""

    __slots__ = ("_core", "_number", "_task")

    def __init__(self, core: Core, task: Task[Any], number: int) -> None:
        self._core = core
        self._task = task
        self._number = number

    def __call__(self, answer: Answer) -> None:
        self._core.collected(self._task, self._number, answer)
