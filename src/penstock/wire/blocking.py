"""The blocking shell: sockets and a selector around the core, driven by the caller that waits.

It has no thread. Between two calls nothing happens: a response that arrives stays in the socket until the next
turn. So a turn reads before it checks timeouts, and the time between two turns, in which the caller may have been
busy for minutes, does not count.

With TLS a socket is wrapped once it is connected, and the core hears of it after the handshake. Three things are
different then. Reading may have to wait until the socket is writable, and the other way round. OpenSSL may hold
plaintext that the selector does not see. And there is no gathered send.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import Any, TypeVar

from penstock.environment import Buffer
from penstock.wire.core import Task
from penstock.wire.errors import WireError
from penstock.wire.links import Address, Connect, Disconnect, Send
from penstock.wire.shells import ShellSettings, new_core, reason, unresolved

Result = TypeVar("Result")

# Buffers in one gathered call; the kernel takes 1024.
BUFFERS_PER_SEND = 512
# Reads per connection and turn, so that a fast connection does not starve the others.
READS_PER_TURN = 32
# The largest TLS record. Smaller buffers are joined, because each send makes a record.
RECORD_BYTES = 16 * 1024
# A longer gap between two turns was the caller's and does not count.
GAP_MS = 1_000
# The longest sleep of a turn, however far away the next timeout is.
SLEEP_MS_MAX = 60_000


class _Socket:
    """One connection: its address and its unsent bytes."""

    __slots__ = (
        "addresses",
        "has_answered",
        "host",
        "is_connected",
        "link",
        "read_needs_write",
        "socket",
        "unsent",
        "where",
        "write_needs_read",
    )

    def __init__(self, link: int, host: str, addresses: deque[Any]) -> None:
        self.link = link
        # For which the broker's certificate has to be.
        self.host = host
        # Other addresses of the same host, tried when this one fails.
        self.addresses = addresses
        self.where: Any = None
        # With TLS an SSLSocket as soon as it is connected.
        self.socket: socket.socket | None = None
        # With TLS: the handshake is done.
        self.is_connected = False
        # At least one byte came.
        self.has_answered = False
        self.unsent: deque[Buffer] = deque()
        # What OpenSSL waits for before it can go on; rare after the handshake.
        self.read_needs_write = False
        self.write_needs_read = False


class Shell:
    """Not thread-safe, and not usable in a forked child process."""

    def __init__(self, settings: ShellSettings) -> None:
        self.core = new_core(settings)
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, _Socket] = {}
        # Of these OpenSSL holds plaintext that the last turn did not read.
        self._unread: list[_Socket] = []
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
        unread, self._unread = self._unread, []
        for key, events in self._selector.select(0.0 if unread else timeout_s):
            each: _Socket = key.data
            # An earlier event may have closed it.
            if events & selectors.EVENT_WRITE and each.socket is not None:
                self._writable(each)
            if events & selectors.EVENT_READ and each.socket is not None:
                self._readable(each)
        for each in unread:
            if each.socket is not None and each not in self._unread:
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
            self.core.lost(link, unresolved(error), self.now_ms())
            return
        found.sort(key=lambda address: address[4] in self._dead_ends)
        each = self._sockets[link] = _Socket(link, address.host, deque(found))
        self._connect_next(each, "no address")

    def _connect_next(self, each: _Socket, why: str) -> None:
        """Try the next address of the host; report the link as lost when none is left."""
        while each.addresses:
            family, kind, protocol, _, where = each.addresses.popleft()
            try:
                connection = socket.socket(family, kind, protocol)
            except OSError as error:
                why = reason(error)
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
            if each.read_needs_write:
                self._readable(each)
            if each.socket is not None:
                self._flush(each)
            return
        assert each.socket is not None
        if isinstance(each.socket, ssl.SSLSocket):
            self._shake_hands(each)
            return
        number = each.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._drop(each)
            self._connect_next(each, os.strerror(number))
            return
        if self._settings.context is None:
            self._connected(each)
        else:
            self._begin_tls(each, self._settings.context)

    def _begin_tls(self, each: _Socket, context: ssl.SSLContext) -> None:
        assert each.socket is not None
        self._selector.unregister(each.socket)
        try:
            each.socket = context.wrap_socket(
                each.socket, server_hostname=each.host, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            self._failed(each, error)
            return
        self._selector.register(each.socket, selectors.EVENT_READ, each)
        self._shake_hands(each)

    def _shake_hands(self, each: _Socket) -> None:
        assert isinstance(each.socket, ssl.SSLSocket)
        try:
            each.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(each, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(each, selectors.EVENT_WRITE)
        except (OSError, ValueError) as error:
            self._failed(each, error)
        else:
            self._connected(each)

    def _connected(self, each: _Socket) -> None:
        each.is_connected = True
        self._dead_ends.discard(each.where)
        self._watch(each, selectors.EVENT_READ)
        self.core.connected(each.link, self.now_ms())
        self._act()

    def _flush(self, each: _Socket) -> None:
        unsent, connection = each.unsent, each.socket
        assert connection is not None
        each.write_needs_read = False
        try:
            while unsent:
                if isinstance(connection, ssl.SSLSocket):
                    sent = connection.send(_joined(unsent))
                else:
                    buffers = [unsent[number] for number in range(min(len(unsent), BUFFERS_PER_SEND))]
                    sent = connection.sendmsg(buffers)
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        except ssl.SSLWantReadError:
            each.write_needs_read = True
        except OSError as error:
            self._failed(each, error)
            return
        self._watch_more(each)

    def _readable(self, each: _Socket) -> None:
        connection = each.socket
        assert connection is not None
        if not each.is_connected:
            self._shake_hands(each)
            return
        if each.write_needs_read:
            self._flush(each)
            if each.socket is None:
                return
        is_tls = isinstance(connection, ssl.SSLSocket)
        if each.read_needs_write:
            each.read_needs_write = False
            self._watch_more(each)
        for _ in range(READS_PER_TURN):
            space = self.core.space(each.link)
            if space is None:
                return
            try:
                count = connection.recv_into(space)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except ssl.SSLWantWriteError:
                each.read_needs_write = True
                self._watch_more(each)
                return
            except OSError as error:
                self._failed(each, error)
                return
            if count == 0:
                self._failed(each, ConnectionError("the broker closed the connection"))
                return
            each.has_answered = True
            is_full = count == len(space)
            # A view would keep the buffer from being reused.
            space.release()
            self.core.received(each.link, count, self.now_ms())
            # With TLS each call returns one record at most, however much there is.
            if not is_full and not is_tls:
                return
        if isinstance(connection, ssl.SSLSocket) and connection.pending():
            self._unread.append(each)

    def _watch_more(self, each: _Socket) -> None:
        """Watch for what a connection waits for besides answers."""
        wants_write = (each.unsent and not each.write_needs_read) or each.read_needs_write
        self._watch(each, selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0))

    def _watch(self, each: _Socket, events: int) -> None:
        assert each.socket is not None
        if self._selector.get_key(each.socket).events != events:
            self._selector.modify(each.socket, events, each)

    def _failed(self, each: _Socket, error: OSError | ValueError) -> None:
        """Report a connection as lost."""
        lost = self._settings.lost(
            error, each.host, is_connected=each.is_connected, has_answered=each.has_answered
        )
        self.core.lost(each.link, lost.why, self.now_ms(), is_tls=lost.is_tls)

    def _drop(self, each: _Socket) -> None:
        if each.socket is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(each.socket)
            if isinstance(each.socket, ssl.SSLSocket) and each.is_connected:
                # Sends the farewell. The broker's is not waited for, which raises.
                with suppress(OSError, ValueError):
                    each.socket.unwrap()
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


def _joined(unsent: deque[Buffer]) -> Buffer:
    """The first bytes to send, in a piece that is good for TLS: small buffers together, a large one as it is.

    OpenSSL wants the same bytes again after it could not send them, so the pieces are joined in the queue.
    """
    if len(unsent) > 1 and len(unsent[0]) < RECORD_BYTES:
        pieces = [unsent.popleft()]
        size = len(pieces[0])
        while unsent and size + len(unsent[0]) <= RECORD_BYTES:
            pieces.append(unsent.popleft())
            size += len(pieces[-1])
        unsent.appendleft(b"".join(pieces))
    return unsent[0]
