"""TLS handshakes in progress, until they become connections.

                   +-------------- more to come --------------+
                   v                                          |
    accepted --> waits --bytes--> queued --a few per turn--> step --established--> on_established
                   |                |                         |
                   +----------------+-------------------------+------------------> on_failed
                        the deadline, the peer closes, an error

A step may cost a signature, or the check of a client's certificate: as much as a dozen small requests. Which one it
will be is not known before, because a peer may send a single byte first, or ask for a second try with another key.
So every step waits in a queue, and only a few are taken in one turn of the loop: clients that come in a burst wait
for each other, and nobody else waits for them. A peer that sends nothing costs a socket and an entry here until its
deadline.

A stream that failed is closed at once. Its peer gets the alert if the socket has room for it.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from penstock.environment import Environment, Stream, Timer
from penstock.tls.stream import TlsStream

# From the connection to the end of the handshake.
HANDSHAKE_TIMEOUT_MS = 10_000
# About 3 ms of work with RSA keys of 2048 bits.
STEPS_PER_TURN = 4
# Handshakes that wait for their turn; new ones are refused above this. One that has begun is not: the work done for
# it would be lost, and its client would come again.
QUEUED_MAX = 1_000
DEADLINE_CHECK_MS = 1_000


class HasContext(Protocol):
    @property
    def context(self) -> ssl.SSLContext: ...


Door = TypeVar("Door")


class _Handshake(Generic[Door]):
    __slots__ = ("context", "deadline_ms", "door", "inner", "stream")

    def __init__(self, inner: Stream, door: Door, context: HasContext, deadline_ms: int) -> None:
        self.inner = inner
        # None until the first step.
        self.stream: TlsStream | None = None
        self.door = door
        self.context = context
        self.deadline_ms = deadline_ms

    def close(self) -> None:
        (self.inner if self.stream is None else self.stream).close()


class Handshakes(Generic[Door]):
    def __init__(
        self,
        environment: Environment,
        *,
        on_established: Callable[[TlsStream, Door], None],
        on_failed: Callable[[Stream, Door, str], None],
    ) -> None:
        """Calls one of the two for each stream added, unless it is closed before.

        ``on_failed(stream, door, reason)`` gets a stream that is closed already.
        """
        self._environment = environment
        self._on_established = on_established
        self._on_failed = on_failed
        # In the order of their deadlines.
        self._open: dict[_Handshake[Door], None] = {}
        self._queue: deque[_Handshake[Door]] = deque()
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: Stream, door: Door, tls: HasContext) -> Callable[[str], None]:
        """Returns what ends the handshake, with a reason, to make room for another."""
        now_ms = self._environment.clock.now_ms()
        handshake = _Handshake(stream, door, tls, now_ms + HANDSHAKE_TIMEOUT_MS)
        self._open[handshake] = None
        if self._timer is None:
            self._timer = self._environment.spawn.later(DEADLINE_CHECK_MS, self._expire)
        self._wait(handshake)
        return partial(self._give_up, handshake)

    def close(self) -> None:
        handshakes, self._open = self._open, {}
        self._queue.clear()
        for handshake in handshakes:
            handshake.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, handshake: _Handshake[Door]) -> None:
        handshake.inner.on_readable(partial(self._has_bytes, handshake))

    def _has_bytes(self, handshake: _Handshake[Door]) -> None:
        handshake.inner.on_readable(None)
        if handshake.stream is None and len(self._queue) >= QUEUED_MAX:
            self._fail(handshake, "too many TLS handshakes at once")
            return
        if not self._queue:
            self._environment.spawn.soon(self._take_steps)
        self._queue.append(handshake)

    def _take_steps(self) -> None:
        taken = 0
        again: list[_Handshake[Door]] = []
        while self._queue and taken < STEPS_PER_TURN:
            handshake = self._queue.popleft()
            if handshake not in self._open:
                continue
            taken += 1
            if self._step(handshake):
                again.append(handshake)
        self._queue += again
        if self._queue:
            self._environment.spawn.soon(self._take_steps)

    def _step(self, handshake: _Handshake[Door]) -> bool:
        """Returns whether another step is to be taken without waiting for the peer."""
        stream = handshake.stream
        if stream is None:
            # The context of now: the certificates may have changed while it waited.
            context = handshake.context.context
            stream = TlsStream(
                handshake.inner, context, self._environment.spawn, server_side=True, is_driven=True
            )
            stream.on_established = partial(self._established, handshake, stream)
            handshake.stream = stream
        try:
            again = stream.proceed()
        except OSError as error:
            self._fail(handshake, f"the TLS handshake failed: {error}")
            return False
        if not again and handshake in self._open:
            self._wait(handshake)
        return again

    def _established(self, handshake: _Handshake[Door], stream: TlsStream) -> None:
        if self._open.pop(handshake, handshake) is None:
            self._on_established(stream, handshake.door)

    def _give_up(self, handshake: _Handshake[Door], reason: str) -> None:
        # Here and not left to its turn: nobody is refused for the place in the queue of one that is gone.
        with suppress(ValueError):
            self._queue.remove(handshake)
        self._fail(handshake, reason)

    def _fail(self, handshake: _Handshake[Door], reason: str) -> None:
        if self._open.pop(handshake, handshake) is None:
            handshake.close()
            self._on_failed(handshake.inner, handshake.door, reason)

    def _expire(self) -> None:
        self._timer = None
        now_ms = self._environment.clock.now_ms()
        for handshake in list(self._open):
            if handshake.deadline_ms > now_ms:
                break
            self._fail(handshake, f"the TLS handshake took longer than {HANDSHAKE_TIMEOUT_MS // 1000} s")
        if self._open and self._timer is None:
            self._timer = self._environment.spawn.later(DEADLINE_CHECK_MS, self._expire)
