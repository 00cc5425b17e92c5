"""A well-behaved client beside the one that a test is about: is it served all the time, and how soon?"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from penstock.protocol.messages.topics import MetadataRequest
from tests.broker.wire import Wire

PAUSE_S = 0.01
# Longer than any test lets it wait.
TIMEOUT_S = 6.0


class Witness:
    """Asks for metadata again and again, in a thread; ``slowest_s`` is the longest it waited.

    Leaving the context fails when it was not served to the end.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
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
                    begin = time.monotonic()
                    wire.call(MetadataRequest(topics=[]), 9)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                    self.served += 1
                    if self._done.wait(PAUSE_S):
                        return
        except Exception as error:
            self._error = error
