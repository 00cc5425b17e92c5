"""How late the loop is: how long a callback that is due has to wait for others."""

from __future__ import annotations

from penstock.broker.counters import Durations
from penstock.environment import Environment, Timer

INTERVAL_MS = 200


class LoopLag:
    def __init__(self, environment: Environment) -> None:
        self._clock = environment.clock
        self._spawn = environment.spawn
        self.durations = Durations()
        self._due_us = 0
        self._timer: Timer | None = None

    def start(self) -> None:
        self._due_us = self._clock.work_us() + INTERVAL_MS * 1000
        self._timer = self._spawn.later(INTERVAL_MS, self._is_due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _is_due(self) -> None:
        self.durations.add(max(0, self._clock.work_us() - self._due_us))
        self.start()
