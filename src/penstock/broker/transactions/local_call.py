"""Requests of a broker to itself, with a time-out like those to other brokers.

The answer may wait for the replicas of a partition, and never come while too few are in sync. Requests for the same
broker wait for each other, so one such partition would hold up the transactions of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.environment import Environment

Response = TypeVar("Response")


def within(
    environment: Environment, timeout_ms: int, done: Callable[[Response | None], None]
) -> Callable[[Response], None]:
    """A callback for the answer. ``done`` gets it, or None if it does not come in time; a late one is dropped."""
    is_done = False

    def finish(response: Response | None) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            timer.cancel()
            done(response)

    timer = environment.spawn.later(timeout_ms, lambda: finish(None))
    return finish
