"""The connections of a node from clients, or from other nodes, and the limits on them.

Clients may come in on several listeners. The limits hold for all of them together, as in Kafka, and count
connections from the moment they are accepted, also while their TLS handshake is not done (``handshakes.py``), until
their socket is closed, which may be later than the connection (``TlsStream.close``).

It does not know what requests do: the table of routes names the handler, and the handler gets the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.broker.config import BrokerConfig
from penstock.broker.counters import RequestCounts
from penstock.broker.logs import Logger
from penstock.broker.network.audit import Audit
from penstock.broker.network.authorization import ANONYMOUS, Authorizer, Principal
from penstock.broker.network.connection import Connection, Route
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.handshakes import Handshakes
from penstock.broker.network.listener_sasl import ListenerSasl
from penstock.broker.network.listener_tls import ListenerTls
from penstock.broker.network.sasl_connections import SaslConnections
from penstock.broker.network.throttling import Throttling
from penstock.environment import Environment, Listener, Stream, Timer
from penstock.protocol.apis import CLIENT
from penstock.protocol.framing import BufferPool
from penstock.protocol.listeners import CLIENTS, ListenerDescription
from penstock.tls.principals import NoRuleMatches
from penstock.tls.stream import TlsStream

SWEEP_INTERVAL_MS = 5_000
# A frame must arrive within this time, or at this rate. A peer that sends a byte now and then is closed.
FRAME_TIMEOUT_MS = 60_000
FRAME_BYTES_PER_MS_MIN = 64
# A peer whose frame holds a buffer that other connections wait for has to keep sending.
STALLED_MS = 5_000
# Large incomplete requests before authentication, in all. Usual ones have a few hundred bytes and need no buffer.
STRANGERS_BYTES_MAX = 8 * 1024 * 1024
# Connections that wait until the node is ready.
HELD_MAX = 1_000
# Refusals are logged, but a peer that is refused all the time must not fill the disk.
REFUSALS_LOGGED_PER_SWEEP = 20


class _Door:
    """One listener: where it is bound, and what connections through it get."""

    __slots__ = ("accepted", "listener", "sasl", "socket", "tls")

    def __init__(
        self, listener: ListenerDescription, tls: ListenerTls | None, sasl: ListenerSasl | None
    ) -> None:
        self.listener = listener
        self.tls = tls
        self.sasl = sasl
        self.socket: Listener | None = None
        self.accepted = 0


class Server:
    """Accepts connections for one broker and enforces their limits."""

    def __init__(
        self,
        environment: Environment,
        broker: Any,
        config: BrokerConfig,
        logger: Logger,
        *,
        make_route: Callable[[int, int, str], Route | None],
        limits: ConnectionLimits,
        connections_max: int | None = None,
        serves: str = CLIENT,
        throttling: Throttling | None = None,
        on_read_failed: Callable[[str, Exception], None],
    ) -> None:
        """``broker`` is passed to handlers; ``make_route(API, version, serves)`` finds the handler.

        ``connections_max`` is what the operating system allows, whatever the limits are.
        ``on_read_failed(path, error)``: a file range to be sent could not be read.
        """
        self.environment = environment
        self._serves = serves
        self.broker = broker
        # None: every client may do everything.
        self.authorizer: Authorizer | None = None
        # None: nothing is written into the audit log.
        self.audit: Audit | None = None
        # None: there are no quotas here.
        self.throttling = throttling
        self._config = config
        self._logger = logger
        self._make_route = make_route
        self._limits = limits
        self._connections_max = connections_max
        self.on_read_failed = on_read_failed
        self.frame_bytes_max = config.socket_request_max_bytes
        self.buffers = BufferPool(config.queued_max_request_bytes)
        # For requests before authentication, so that strangers cannot take the buffers of clients.
        self.buffers_of_strangers = BufferPool(STRANGERS_BYTES_MAX)
        self.requests = RequestCounts()
        # Unsupported (API, version) pairs are not kept: a peer could invent 2**32 of them.
        self._routes: dict[int, Route] = {}
        # With the stream, if it is one of TLS.
        self._connections: dict[Connection, TlsStream | None] = {}
        # Connections that are closed, but whose stream waits for the peer to read the last answers.
        self._lingering = 0
        self._per_host: dict[str, int] = {}
        self._waiting_for_buffer: dict[Connection, None] = {}
        self._handshakes = Handshakes(
            environment, on_established=self._established, on_failed=self._handshake_failed
        )
        self.sasl = SaslConnections(
            environment, failure_delay_ms=config.connection_failed_authentication_delay_ms
        )
        self._doors: list[_Door] = []
        # Accepted, but not served yet: their address connects too often.
        self._delayed: dict[Stream, Timer] = {}
        # Connections that arrived before this node could answer; None once it can.
        self._held: list[tuple[Stream, _Door]] | None = None
        self._refusals = 0
        self.connections_refused = 0

    def listen(
        self,
        host: str,
        port: int,
        *,
        listener: ListenerDescription = CLIENTS,
        tls: ListenerTls | None = None,
        sasl: ListenerSasl | None = None,
        hold: bool = False,
    ) -> tuple[str, int]:
        """Listen on one more address, and return it as bound. With ``hold``, connections wait for ``open``."""
        door = _Door(listener, tls, sasl)
        is_first = not self._doors
        if hold and self._held is None:
            self._held = []
        door.socket = self.environment.network.listen(host, port, partial(self._accept, door))
        self._doors.append(door)
        if tls is not None:
            tls.watch()
        if sasl is not None:
            sasl.watch()
        if is_first:
            self._sweep()
        return door.socket.address

    def open(self) -> None:
        """Serve the connections that were held."""
        held, self._held = self._held, None
        for stream, door in held or ():
            self._accept(door, stream)

    def close(self) -> None:
        for door in self._doors:
            if door.socket is not None:
                door.socket.close()
            if door.tls is not None:
                door.tls.close()
            if door.sasl is not None:
                door.sasl.close()
        self.sasl.close()
        for stream, _ in self._held or ():
            stream.close()
        for stream, timer in self._delayed.items():
            timer.cancel()
            stream.close()
        self._handshakes.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self, door: _Door, stream: Stream) -> None:
        host = stream.peer
        if self._held is not None and len(self._held) < HELD_MAX:
            self._held.append((stream, door))
            return
        door.accepted += 1
        limits = self._limits
        count = len(self._connections) + len(self._handshakes) + self._lingering + len(self._delayed)
        if (
            self._held is not None
            or count >= min(limits.total, self._connections_max or limits.total)
            or self._per_host.get(host, 0) >= limits.per_address
        ):
            self.connections_refused += 1
            self._note("refused a connection", peer=host, reason="too many connections")
            stream.close()
            return
        throttling = self.throttling
        delay_ms: int | None = 0
        if throttling is not None and throttling.limits_connections:
            delay_ms = throttling.accepted(host)
        if delay_ms is None:
            self.connections_refused += 1
            self._note("refused a connection", peer=host, reason="its address connects too often")
            stream.close()
            return
        self._per_host[host] = self._per_host.get(host, 0) + 1
        if delay_ms:
            self._delayed[stream] = self.environment.spawn.later(
                delay_ms, partial(self._admit_late, door, stream)
            )
        else:
            self._admit(door, stream)

    def _admit_late(self, door: _Door, stream: Stream) -> None:
        del self._delayed[stream]
        self._admit(door, stream)

    def _admit(self, door: _Door, stream: Stream) -> None:
        if door.tls is None:
            self._connect(stream, door, ANONYMOUS, None)
        else:
            self._handshakes.add(stream, door, door.tls)

    def _established(self, stream: TlsStream, door: _Door) -> None:
        """A TLS handshake is done: the client may send requests."""
        assert door.tls is not None
        try:
            principal = door.tls.principal(stream.peer_name)
        except NoRuleMatches as error:
            stream.close()
            self._leave(stream.peer, stream)
            self._note_closed(stream, door, str(error))
            return
        self._connect(stream, door, principal, stream)

    def _connect(self, stream: Stream, door: _Door, principal: Principal, tls: TlsStream | None) -> None:
        """With SASL, a client is anonymous until it has authenticated, whatever its certificate says."""
        if door.sasl is None:
            self._connections[Connection(stream, self, door.listener, principal)] = tls
            return
        authentication = door.sasl.authentication(self.environment.clock.now_ms())
        connection = Connection(stream, self, door.listener, ANONYMOUS, authentication)
        self._connections[connection] = tls
        self.sasl.add(connection)

    def _handshake_failed(self, stream: Stream, door: _Door, reason: str) -> None:
        self._leave(stream.peer, None)
        self._note_closed(stream, door, reason)

    def _note_closed(self, stream: Stream, door: _Door, reason: str) -> None:
        self._note("closed a connection", peer=stream.peer, listener=door.listener.name, reason=reason)

    # For the metrics

    def connection_counts(self) -> dict[str, int]:
        """The connections of each listener, after their TLS handshake."""
        counts = {door.listener.name: 0 for door in self._doors}
        for connection in self._connections:
            counts[connection.listener.name] += 1
        return counts

    @property
    def accepted(self) -> dict[str, int]:
        """How many connections each listener has accepted."""
        return {door.listener.name: door.accepted for door in self._doors}

    # For the connections

    def route(self, key: int, version: int) -> Route | None:
        route = self._routes.get(key << 16 | version & 0xFFFF)
        if route is None:
            route = self._make_route(key, version, self._serves)
            if route is not None:
                route.counts = self.requests.of(key)
                if route.version == version:
                    self._routes[key << 16 | version & 0xFFFF] = route
        return route

    def failed(self, connection: Connection, request: Mapping[str, Any]) -> None:
        """Log an unexpected error of ours; called while it is being handled. Only this connection is closed.

        ``request`` says which one it was, as ``request_of``.
        """
        self._logger.exception("a request failed", peer=connection.peer, **request)

    def refused(self, connection: Connection, reason: str, request: Mapping[str, Any]) -> None:
        self._note("closed a connection", peer=connection.peer, reason=reason, **request)

    def _note(self, event: str, **values: Any) -> None:
        self._refusals += 1
        if self._refusals <= REFUSALS_LOGGED_PER_SWEEP:
            self._logger.warning(event, **values)

    def closed(self, connection: Connection) -> None:
        stream = self._connections.pop(connection, None)
        self._waiting_for_buffer.pop(connection, None)
        if connection.authentication is not None:
            self.sasl.remove(connection)
        if self.throttling is not None:
            self.throttling.closed(connection)
        self._leave(connection.peer, stream)

    def _leave(self, host: str, stream: TlsStream | None) -> None:
        """A connection is closed. It counts until its socket is."""
        if stream is None or stream.is_gone:
            self._uncount(host)
        else:
            self._lingering += 1
            stream.on_gone = partial(self._gone, host)

    def _gone(self, host: str) -> None:
        self._lingering -= 1
        self._uncount(host)

    def _uncount(self, host: str) -> None:
        left = self._per_host.get(host, 1) - 1
        if left > 0:
            self._per_host[host] = left
        else:
            self._per_host.pop(host, None)

    def wait_for_buffer(self, connection: Connection) -> None:
        if not self._waiting_for_buffer:
            self.environment.spawn.later(10, self._lend)
        self._waiting_for_buffer[connection] = None

    def _lend(self) -> None:
        waiting, self._waiting_for_buffer = self._waiting_for_buffer, {}
        for connection in waiting:
            connection.resume()

    def _sweep(self) -> None:
        """Close connections that are idle, or whose request does not arrive in time."""
        now_ms = self.environment.clock.now_ms()
        if self._refusals > REFUSALS_LOGGED_PER_SWEEP:
            self._logger.warning("not all refusals were logged", count=self._refusals)
        self._refusals = 0
        idle_before_ms = now_ms - self._config.connections_max_idle_ms
        for connection in list(self._connections):
            if connection.last_active_ms < idle_before_ms and connection.is_silent:
                connection.close()
            elif self._is_too_slow(connection, now_ms):
                connection.refuse("a request that did not arrive in time")
        self.environment.spawn.later(SWEEP_INTERVAL_MS, self._sweep)

    def _is_too_slow(self, connection: Connection, now_ms: int) -> bool:
        """Whether a request takes too long to arrive, or stalls while it holds a buffer that others wait for."""
        if connection.frame_started_ms < 0:
            return False
        under_way_ms = now_ms - connection.frame_started_ms
        if (
            under_way_ms > FRAME_TIMEOUT_MS
            and connection.partial_bytes < under_way_ms * FRAME_BYTES_PER_MS_MIN
        ):
            return True
        return (
            bool(self._waiting_for_buffer)
            and connection.has_pooled_buffer
            and connection.last_active_ms < now_ms - STALLED_MS
        )
