"""The blocking shell: sockets and a selector around the core, driven by the caller that waits.

It has no thread. Between two calls nothing happens: a response that arrives stays in the socket until the next
turn. So a turn reads before it checks timeouts, and the time between two turns, in which the caller may have been
busy for minutes, does not count.
"""

from __future__ import annotations

import errno
import os
import random
import selectors
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any, TypeVar

from penstock.environment import Buffer
from penstock.wire.core import Core, Task
from penstock.wire.errors import WireError
from penstock.wire.links import Address, Connect, Disconnect, Send

Result = TypeVar("Result")

# Buffers in one gathered call; the kernel takes 1024.
BUFFERS_PER_SEND = 512
# Reads per connection and turn, so that a fast connection does not starve the others.
READS_PER_TURN = 32
# A longer gap between two turns was the caller's and does not count.
GAP_MS = 1_000
# The longest sleep of a turn, however far away the next timeout is.
SLEEP_MS_MAX = 60_000


class _Socket:
    """One connection: its address and its unsent bytes."""

    __slots__ = ("addresses", "is_connected", "link", "socket", "unsent", "where")

    def __init__(self, link: int, addresses: deque[Any]) -> None:
        self.link = link
        # Other addresses of the same host, tried when this one fails.
        self.addresses = addresses
        self.where: Any = None
        self.socket: socket.socket | None = None
        self.is_connected = False
        self.unsent: deque[Buffer] = deque()


class Shell:
    """Not thread-safe, and not usable in a forked child process."""

    def __init__(self, bootstrap: str, *, client_id: str, request_timeout_ms: int, deadline_ms: int) -> None:
        self.core = Core(
            bootstrap,
            random.Random(),
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            deadline_ms=deadline_ms,
        )
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, _Socket] = {}
        # Addresses that could not be connected to; the host's other addresses are tried first until one succeeds.
        self._dead_ends: set[Any] = set()
        self._process_id = os.getpid()
        self._turned_ms = self.now_ms()
        # Abandoned tasks. Only noted here, because the garbage collector may drop a reader in the middle of a turn.
        self.given_up: deque[Task[Any]] = deque()
        self.is_closed = False

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wait(self, task: Task[Result]) -> Result:
        """Turn until a task is done. Returns its result or raises its error."""
        try:
            while not task.is_done:
                self.turn()
        except BaseException:
            # Interrupted: the result is not needed any more.
            self.core.cancel(task)
            raise
        return task.outcome()

    def turn(self, *, block: bool = True) -> None:
        """Carry out the core's effects, wait for events (unless ``block`` is False), and pass them to the core."""
        self.check_usable()
        gap_ms = self.now_ms() - self._turned_ms
        if gap_ms > GAP_MS:
            self.core.slept(gap_ms)
        while self.given_up:
            self.core.cancel(self.given_up.popleft())
        self._act()
        timeout_s = 0.0
        if block:
            due_ms = self.core.due_ms()
            now_ms = self.now_ms()
            timeout_ms = SLEEP_MS_MAX if due_ms is None else max(0, min(due_ms - now_ms, SLEEP_MS_MAX))
            timeout_s = timeout_ms / 1000
        for key, events in self._selector.select(timeout_s):
            each: _Socket = key.data
            # An earlier event may have closed it.
            if events & selectors.EVENT_WRITE and each.socket is not None:
                self._writable(each)
            if events & selectors.EVENT_READ and each.socket is not None:
                self._readable(each)
        self._turned_ms = self.now_ms()
        self.core.tick(self._turned_ms)
        self._act()

    def check_usable(self) -> None:
        if self.is_closed:
            raise WireError("this client is closed")
        if os.getpid() != self._process_id:
            raise WireError("this client belongs to the parent process; create another one after a fork")

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if os.getpid() == self._process_id:
            self.core.close()
            self._act()
        self._selector.close()

    # Private

    def _act(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                match effect:
                    case Connect(link, address):
                        self._connect(link, address)
                    case Send(link, buffers):
                        each = self._sockets.get(link)
                        if each is not None:
                            idle = not each.unsent
                            each.unsent += buffers
                            if idle and each.is_connected:
                                self._flush(each)
                    case Disconnect(link):
                        self._close(link)

    def _connect(self, link: int, address: Address) -> None:
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.core.lost(link, f"cannot resolve the host ({reason})", self.now_ms())
            return
        found.sort(key=lambda address: address[4] in self._dead_ends)
        each = self._sockets[link] = _Socket(link, deque(found))
        self._connect_next(each, "no address")

    def _connect_next(self, each: _Socket, why: str) -> None:
        """Try the next address of the host; report the link as lost when none is left."""
        while each.addresses:
            family, kind, protocol, _, where = each.addresses.popleft()
            try:
                connection = socket.socket(family, kind, protocol)
            except OSError as error:
                why = _reason(error)
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = connection.connect_ex(where)
            if number in _UNDER_WAY:
                each.socket, each.where = connection, where
                self._selector.register(connection, selectors.EVENT_WRITE, each)
                return
            why = os.strerror(number)
            connection.close()
        self.core.lost(each.link, why.lower(), self.now_ms())

    def _writable(self, each: _Socket) -> None:
        if each.is_connected:
            self._flush(each)
            return
        assert each.socket is not None
        number = each.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._drop(each)
            self._connect_next(each, os.strerror(number))
            return
        each.is_connected = True
        self._dead_ends.discard(each.where)
        self._selector.modify(each.socket, selectors.EVENT_READ, each)
        self.core.connected(each.link, self.now_ms())
        self._act()

    def _flush(self, each: _Socket) -> None:
        unsent, connection = each.unsent, each.socket
        assert connection is not None
        try:
            while unsent:
                buffers = [unsent[number] for number in range(min(len(unsent), BUFFERS_PER_SEND))]
                sent = connection.sendmsg(buffers)
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            self.core.lost(each.link, _reason(error), self.now_ms())
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, each)

    def _readable(self, each: _Socket) -> None:
        connection = each.socket
        assert connection is not None
        for _ in range(READS_PER_TURN):
            space = self.core.space(each.link)
            if space is None:
                return
            try:
                count = connection.recv_into(space)
            except BlockingIOError:
                return
            except OSError as error:
                self.core.lost(each.link, _reason(error), self.now_ms())
                return
            if count == 0:
                self.core.lost(each.link, "the broker closed the connection", self.now_ms())
                return
            is_full = count == len(space)
            # A view would keep the buffer from being reused.
            space.release()
            self.core.received(each.link, count, self.now_ms())
            if not is_full:
                return

    def _drop(self, each: _Socket) -> None:
        if each.socket is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(each.socket)
            each.socket.close()
            each.socket = None
            each.is_connected = False

    def _close(self, link: int) -> None:
        each = self._sockets.pop(link, None)
        if each is not None:
            if each.socket is not None and not each.is_connected:
                self._dead_ends.add(each.where)
            self._drop(each)
            each.unsent.clear()


_UNDER_WAY = (0, errno.EINPROGRESS)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
