"""How long nobody could write: one small record every 50 ms to a partition, and when each was acknowledged.

A probe trusts nothing it knew before: each attempt that fails is followed by asking another broker who leads
now, over a new connection. So what it measures is the cluster's part of an interruption, without the time that
a client library takes to notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from penstock.protocol.errors import ErrorCode
from tests.cluster import wire
from tests.cluster.wire import Address, NoAnswer, Wire

INTERVAL_S = 0.05
ATTEMPT_TIMEOUT_S = 0.5


class Probe(threading.Thread):
    """Writes to one partition until stopped."""

    def __init__(self, brokers: Callable[[], Sequence[Address]], topic: str, partition: int) -> None:
        super().__init__(name=f"probe of {topic}-{partition}", daemon=True)
        self._brokers = brokers
        self._topic = topic
        self._partition = partition
        self._stopping = threading.Event()
        self._turn = 0
        # When each acknowledged write was acknowledged.
        self._times: list[float] = [time.monotonic()]

    def run(self) -> None:
        connection: Wire | None = None
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                connection = connection or self._connect()
                if connection is not None:
                    answer = wire.produce(
                        connection,
                        self._topic,
                        self._partition,
                        b"are you there",
                        acks=-1,
                        timeout_ms=int(ATTEMPT_TIMEOUT_S * 1000),
                    )
                    if answer.error_code != ErrorCode.NONE:
                        raise NoAnswer(f"error {answer.error_code}")
                    self._times.append(time.monotonic())
            except NoAnswer:
                if connection is not None:
                    connection.__exit__()
                connection = None
            self._stopping.wait(max(0.0, began + INTERVAL_S - time.monotonic()))
        if connection is not None:
            connection.__exit__()

    def stop(self) -> None:
        self._stopping.set()
        self.join(10)

    def gap_s(self, since: float, until: float | None = None) -> float:
        """The longest time without an acknowledged write in a span; what lies after it does not count."""
        end = time.monotonic() if until is None else until
        times = [*self._times, end]
        return max(
            (
                min(after, end) - before
                for before, after in pairwise(times)
                if after >= since and before <= end
            ),
            default=0.0,
        )

    def since(self, when: float) -> int:
        """How many writes were acknowledged after a moment."""
        return sum(each > when for each in self._times[-100:])

    @property
    def count(self) -> int:
        return len(self._times) - 1

    def _connect(self) -> Wire | None:
        """To the leader, as somebody tells it."""
        addresses = list(self._brokers())
        if not addresses:
            return None
        self._turn += 1
        asked = addresses[self._turn % len(addresses)]
        known = wire.leader_address(asked, self._topic, self._partition, timeout_s=ATTEMPT_TIMEOUT_S)
        return None if known is None else Wire(known, timeout_s=ATTEMPT_TIMEOUT_S)
