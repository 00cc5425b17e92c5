"""A well-behaved client beside the one that a test is about: is it served all the time, and how soon?

How soon is told in the broker's own processor time: what else the machine does meanwhile is not its fault.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from penstock.protocol.messages.topics import MetadataRequest
from tests.broker.wire import Wire

PAUSE_S = 0.01
# By the clock on the wall, for a broker that does nothing at all.
TIMEOUT_S = 60.0
# How Linux names the clock of another process's processor time (clock_getcpuclockid).
_CPUCLOCK_SCHED = 2


class Witness:
    """Asks for metadata again and again, in a thread; ``slowest_s`` is the most that the broker did before it
    answered.

    Leaving the context fails when it was not served to the end.
    """

    def __init__(self, address: tuple[str, int], pid: int) -> None:
        self._address = address
        self._clock = (~pid << 3) | _CPUCLOCK_SCHED
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._error: Exception | None = None
        self.slowest_s = 0.0
        self.served = 0

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if error is None:
            assert self._error is None, f"another client was not served: {self._error!r}"
            assert self.served > 0

    def _watch(self) -> None:
        try:
            with Wire(self._address, timeout_s=TIMEOUT_S) as wire:
                while True:
                    begin = time.clock_gettime(self._clock)
                    wire.call(MetadataRequest(topics=[]), 9)
                    self.slowest_s = max(self.slowest_s, time.clock_gettime(self._clock) - begin)
                    self.served += 1
                    if self._done.wait(PAUSE_S):
                        return
        except Exception as error:
            self._error = error
