"""Figures of the process itself: pauses of the garbage collector, and what the kernel knows of it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.broker.counters import Durations
from penstock.environment import Clock

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class ProcessFigures:
    """Of this process, so there is at most one; simulated nodes have none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_us = 0
        # By generation.
        self.pauses = [Durations() for _ in range(3)]

    def start(self) -> None:
        gc.callbacks.append(self._collecting)

    def close(self) -> None:
        gc.callbacks.remove(self._collecting)

    def collect(self) -> Iterable[Metric]:
        """Memory, CPU time and descriptors, under the names that all Prometheus clients use."""
        from prometheus_client.process_collector import PROCESS_COLLECTOR  # noqa: PLC0415 - with the first scrape

        return PROCESS_COLLECTOR.collect()

    def _collecting(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_us = self._clock.work_us()
        else:
            self.pauses[info["generation"]].add(self._clock.work_us() - self._began_us)
