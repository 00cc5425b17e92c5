"""The asyncio shell: transports and a timer around the core, in the running loop.

Events go to the core when they happen. Its effects are done once per iteration of the loop, so what callers start
in one iteration leaves in the same requests. A response is received directly into the core's buffers
(``BufferedProtocol``), with TLS too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from penstock.wire.core import Core, Task
from penstock.wire.errors import WireError
from penstock.wire.links import Address, Connect, Disconnect, Send
from penstock.wire.shells import ShellSettings, new_core, reason, unresolved

Result = TypeVar("Result")

# How long the farewell of a connection may take. A broker does not wait for it.
FAREWELL_S = 1.0


class _Connection(asyncio.BufferedProtocol):
    """One connection, from the core's ``Connect`` to its ``Disconnect``."""

    def __init__(self, shell: AsyncShell, link: int, host: str) -> None:
        self._shell = shell
        self.link = link
        # For which the broker's certificate has to be.
        self.host = host
        self.connecting: asyncio.Task[None] | None = None
        self.where: Any = None
        self.transport: asyncio.Transport | None = None
        self.is_connected = False
        self.has_answered = False
        self._space: memoryview | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop do not inherit from it.
        self.transport = cast(asyncio.Transport, transport)
        self._shell.made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        space = self._space = self._shell.core.space(self.link)
        # The core has let go of the link; what still comes is not read.
        return space if space is not None else memoryview(bytearray(1024))

    def buffer_updated(self, nbytes: int) -> None:
        space, self._space = self._space, None
        if space is None:
            return
        self.has_answered = True
        # A view would keep the buffer from being reused. Some loops hold it until this returns.
        with suppress(BufferError):
            space.release()
        self._shell.core.received(self.link, nbytes, self._shell.now_ms())
        self._shell.act_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shell.unmade(self, exc)


class AsyncShell:
    """Belongs to the loop in which it was made."""

    def __init__(self, settings: ShellSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self.core: Core = new_core(settings)
        # By link, until the core disconnects; and those whose transport is not closed yet.
        self._connections: dict[int, _Connection] = {}
        self._open: set[_Connection] = set()
        # Addresses that could not be connected to; the host's other addresses are tried first until one succeeds.
        self._dead_ends: set[Any] = set()
        # Run after every iteration in which something happened, to take what participants have for callers.
        self.after_events: list[Callable[[], None]] = []
        # Run before the core is closed.
        self.on_close: list[Callable[[], None]] = []
        self._will_act = False
        self._timer: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Event = asyncio.Event()
        self.is_closed = False

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    async def wait(self, task: Task[Result]) -> Result:
        """Wait until a task is done. If the caller is cancelled, so is the task."""
        if not task.is_done:
            done = self._loop.create_future()
            task.on_done = partial(_settle, done)
            self.act_soon()
            try:
                await done
            except asyncio.CancelledError:
                self.core.cancel(task)
                self.act_soon()
                raise
        return task.outcome()

    def act_soon(self) -> None:
        """Do the core's effects, and whatever follows from them, at the end of this iteration."""
        if not self._will_act and not self.is_closed:
            self._will_act = True
            self._loop.call_soon(self._act)

    def check_usable(self) -> None:
        if self.is_closed:
            raise WireError("this client is closed")

    async def close(self) -> None:
        """End all tasks and connections, and wait until the connections are closed."""
        if not self.is_closed:
            for stop in self.on_close:
                stop()
            self.core.close()
            self._do_effects()
            self._report()
            self.is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            if not self._open:
                self._all_closed.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_closed.wait(), FAREWELL_S)
            return
        for each in list(self._open):
            if each.transport is not None:
                each.transport.abort()
        await self._all_closed.wait()

    # For connections

    def made(self, each: _Connection) -> None:
        if self._connections.get(each.link) is not each:
            assert each.transport is not None
            each.transport.abort()
            return
        each.is_connected = True
        self._dead_ends.discard(each.where)
        self.core.connected(each.link, self.now_ms())
        self.act_soon()

    def unmade(self, each: _Connection, error: Exception | None) -> None:
        self._forget(each)
        if not isinstance(error, (OSError, ValueError)):
            error = ConnectionError("the broker closed the connection")
        self._lost(each, error)

    # Private

    def _act(self) -> None:
        self._will_act = False
        if self.is_closed:
            return
        self.core.tick(self.now_ms())
        self._do_effects()
        self._report()
        due_ms = self.core.due_ms()
        if due_ms is None:
            return
        due_s = due_ms / 1000
        if self._timer is not None:
            # A timer that fires too early does no harm, and moving it on with every event would cost more.
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self.act_soon()

    def _report(self) -> None:
        for each in self.after_events:
            each()

    def _do_effects(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                match effect:
                    case Connect(link, address):
                        self._connect(link, address)
                    case Send(link, buffers):
                        each = self._connections.get(link)
                        if each is not None and each.transport is not None:
                            each.transport.writelines(buffers)
                    case Disconnect(link):
                        self._disconnect(link)

    def _connect(self, link: int, address: Address) -> None:
        each = self._connections[link] = _Connection(self, link, address.host)
        self._open.add(each)
        each.connecting = self._loop.create_task(self._connecting(each, address))
        each.connecting.add_done_callback(lambda _: self._connecting_ended(each))

    def _connecting_ended(self, each: _Connection) -> None:
        each.connecting = None
        if each.transport is None:
            self._forget(each)

    def _forget(self, each: _Connection) -> None:
        self._open.discard(each)
        if self.is_closed and not self._open:
            self._all_closed.set()

    async def _connecting(self, each: _Connection, address: Address) -> None:
        try:
            found = await self._loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.core.lost(each.link, unresolved(error), self.now_ms())
            self.act_soon()
            return
        found.sort(key=lambda one: one[4] in self._dead_ends)
        connection = await self._connect_to_any(each, found)
        if connection is None:
            return
        has_tls = self._settings.context is not None
        try:
            await self._loop.create_connection(
                lambda: each,
                sock=connection,
                ssl=self._settings.context,
                server_hostname=each.host if has_tls else None,
                ssl_shutdown_timeout=FAREWELL_S if has_tls else None,
            )
        except (OSError, ValueError) as error:
            connection.close()
            self._lost(each, error)
        except BaseException:
            connection.close()
            raise

    async def _connect_to_any(self, each: _Connection, found: list[Any]) -> socket.socket | None:
        why = "no address"
        for family, kind, protocol, _, where in found:
            try:
                connection = socket.socket(family, kind, protocol)
            except OSError as error:
                why = reason(error)
                continue
            connection.setblocking(False)
            each.where = where
            try:
                await self._loop.sock_connect(connection, where)
            except OSError as error:
                # asyncio puts other words, and the address, in its place.
                why = os.strerror(error.errno).lower() if error.errno else reason(error)
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        self.core.lost(each.link, why, self.now_ms())
        self.act_soon()
        return None

    def _lost(self, each: _Connection, error: OSError | ValueError) -> None:
        lost = self._settings.lost(
            error, each.host, is_connected=each.is_connected, has_answered=each.has_answered
        )
        self.core.lost(each.link, lost.why, self.now_ms(), is_tls=lost.is_tls)
        self.act_soon()

    def _disconnect(self, link: int) -> None:
        each = self._connections.pop(link, None)
        if each is None:
            return
        if each.connecting is not None:
            if not each.is_connected:
                self._dead_ends.add(each.where)
            each.connecting.cancel()
        if each.transport is not None:
            if each.transport.get_write_buffer_size():
                # The peer does not read.
                each.transport.abort()
            else:
                each.transport.close()


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
