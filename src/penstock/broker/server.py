"""The listening side of a node: connections, their limits, and the life of the process from start to stop.

A node has a listener for clients, if it is a broker, and one for the other nodes, if there are any. What is
asked on the second is never answered on the first.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.config import BrokerConfig, ConfigError
from penstock.broker.logs import Logger
from penstock.broker.network.connection import Connection, Route
from penstock.broker.network.routes import make_route
from penstock.broker.options import ServeError, ServeOptions
from penstock.environment import Environment, Listener, Stream
from penstock.protocol.apis import CLIENT, INTERNAL
from penstock.protocol.framing import BufferPool

SWEEP_INTERVAL_MS = 5_000
# A frame must arrive within this time, or at this rate: a byte now and then is not a client.
FRAME_TIMEOUT_MS = 60_000
FRAME_BYTES_PER_MS_MIN = 64
# Whoever sits on a buffer that others wait for has to keep sending.
STALLED_MS = 5_000
# Connections that wait for a node to be ready.
HELD_MAX = 1_000
# A node that has not found its cluster by then says what it is waiting for.
FOUND_WITHIN_S = 5.0
# Refusals are logged, but a peer that is refused all the time may not fill the disk with it.
REFUSALS_LOGGED_PER_SWEEP = 20


class Server:
    """Accepts connections for one broker and keeps them within bounds."""

    def __init__(
        self,
        environment: Environment,
        broker: Broker,
        config: BrokerConfig,
        logger: Logger,
        *,
        connections_max: int | None = None,
        listener: str = CLIENT,
    ) -> None:
        self.environment = environment
        self.listener = listener
        self.broker = broker
        self._config = config
        self._logger = logger
        # What the system can give.
        self._connections_max = connections_max
        self.frame_bytes_max = config.socket_request_max_bytes
        self.buffers = BufferPool(config.queued_max_request_bytes)
        # Unsupported (API, version) pairs are not kept: a peer could make up 2**32 of them.
        self._routes: dict[int, Route] = {}
        self._connections: dict[Connection, None] = {}
        self._per_host: dict[str, int] = {}
        self._waiting_for_buffer: dict[Connection, None] = {}
        self._listener: Listener | None = None
        # Connections that came before this node has something to say.
        self._held: list[Stream] | None = None
        self._refusals = 0

    def listen(self, host: str, port: int, *, hold: bool = False) -> tuple[str, int]:
        """Serve from now on; the address really bound. With ``hold`` nobody is heard before ``open``."""
        self._held = [] if hold else None
        self._listener = self.environment.network.listen(host, port, self._accept)
        self._sweep()
        return self._listener.address

    def open(self) -> None:
        """Hear those who came too early."""
        held, self._held = self._held, None
        for stream in held or ():
            self._accept(stream)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for stream in self._held or ():
            stream.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self, stream: Stream) -> None:
        host = stream.peer
        if self._held is not None and len(self._held) < HELD_MAX:
            self._held.append(stream)
            return
        limit, limit_per_host = self._limits()
        if (
            self._held is not None
            or len(self._connections) >= limit
            or self._per_host.get(host, 0) >= limit_per_host
        ):
            self._note("refused a connection", peer=host, reason="too many connections")
            stream.close()
            return
        self._per_host[host] = self._per_host.get(host, 0) + 1
        self._connections[Connection(stream, self)] = None

    def _limits(self) -> tuple[int, int]:
        """Of all connections, and of those from one address."""
        if self.listener != CLIENT:
            # No setting that is changed while running may cut a node off from the others.
            return self._config.max_connections, self._config.max_connections_per_ip
        limit, limit_per_host = self.broker.connection_limits
        return min(limit, self._connections_max or limit), limit_per_host

    # For the connections

    def route(self, key: int, version: int) -> Route | None:
        route = self._routes.get(key << 16 | version & 0xFFFF)
        if route is None:
            route = make_route(key, version, self.listener)
            if route is not None and route.version == version:
                self._routes[key << 16 | version & 0xFFFF] = route
        return route

    def failed(self, connection: Connection) -> None:
        """A request met an error of ours; called while it is being handled. Only its connection pays for it."""
        self._logger.exception("a request failed", peer=connection.peer)

    def refused(self, connection: Connection, reason: str) -> None:
        self._note("closed a connection", peer=connection.peer, reason=reason)

    def _note(self, event: str, **values: str) -> None:
        self._refusals += 1
        if self._refusals <= REFUSALS_LOGGED_PER_SWEEP:
            self._logger.warning(event, **values)

    def closed(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._waiting_for_buffer.pop(connection, None)
        left = self._per_host.get(connection.peer, 1) - 1
        if left > 0:
            self._per_host[connection.peer] = left
        else:
            self._per_host.pop(connection.peer, None)

    def wait_for_buffer(self, connection: Connection) -> None:
        if not self._waiting_for_buffer:
            self.environment.spawn.later(10, self._lend)
        self._waiting_for_buffer[connection] = None

    def _lend(self) -> None:
        waiting, self._waiting_for_buffer = self._waiting_for_buffer, {}
        for connection in waiting:
            connection.resume()

    def _sweep(self) -> None:
        """Close the connections of peers that have fallen silent, or never finish what they begin."""
        now_ms = self.environment.clock.now_ms()
        if self._refusals > REFUSALS_LOGGED_PER_SWEEP:
            self._logger.warning("more refusals than were logged", count=self._refusals)
        self._refusals = 0
        idle_before_ms = now_ms - self._config.connections_max_idle_ms
        for connection in list(self._connections):
            if connection.last_active_ms < idle_before_ms and connection.is_silent:
                connection.close()
            elif self._is_too_slow(connection, now_ms):
                connection.refuse("a request that did not arrive in time")
        self.environment.spawn.later(SWEEP_INTERVAL_MS, self._sweep)

    def _is_too_slow(self, connection: Connection, now_ms: int) -> bool:
        """Whether a request has been on its way for too long, or keeps a buffer from others and stands still."""
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


class Node:
    """One node of a cluster, or all of it: a broker or a controller or both, and its listeners."""

    def __init__(
        self,
        environment: Environment,
        options: ServeOptions,
        config: BrokerConfig,
        logger: Logger,
        *,
        on_ready: Callable[[tuple[str, int] | None], None],
        on_failure: Callable[[str], None],
        connections_max: int | None = None,
    ) -> None:
        """``on_ready(address for clients)`` once it serves. Raises ServeError, or OSError of its disk."""
        self._environment = environment
        self._options = options
        self._on_ready = on_ready
        self.broker = Broker(
            environment, options, config, logger, on_failure=on_failure, on_active=self._became_active
        )
        self.internal: Server | None = None
        self.client: Server | None = None
        self._client_address: tuple[str, int] | None = None
        if options.controllers:
            self.internal = Server(environment, self.broker, config, logger, listener=INTERNAL)
        if "broker" in options.roles:
            self.client = Server(environment, self.broker, config, logger, connections_max=connections_max)
            self.broker.on_left = self.client.close

    def start(self) -> None:
        """Listen and take part. Raises ServeError when an address cannot be listened on."""
        options = self._options
        internal = None
        if self.internal is not None:
            assert options.internal is not None
            bound = self._listen(self.internal, options.internal, "--internal")
            told = options.internal_told
            internal = told if told is not None and told[1] else bound
        advertised = None
        if self.client is not None:
            # A broker that is not in the cluster yet could tell clients of none, and they would believe it.
            self._client_address = self._listen(self.client, options.listen, "--listen", hold=True)
            advertised = options.advertise or self._client_address
        self.broker.start(advertised, internal)
        if self.client is None:
            self._on_ready(None)

    def _listen(
        self, server: Server, address: tuple[str, int], option: str, *, hold: bool = False
    ) -> tuple[str, int]:
        try:
            return server.listen(*address, hold=hold)
        except OSError as error:
            wanted = f"{address[0]}:{address[1]}"
            raise ServeError(
                f"cannot listen on {wanted}: {error.strerror}; choose another {option}"
            ) from None

    def _became_active(self) -> None:
        if self.client is not None:
            self.client.open()
        self._on_ready(self._client_address)

    def stop(self, done: Callable[[], None]) -> None:
        """Hand over leaderships, close everything in good order, then ``done``. May raise OSError."""

        def handed_over() -> None:
            self.close()
            done()

        self.broker.stop(handed_over)

    def close(self) -> None:
        """Close the listeners and every log. Raises OSError when something could not be made durable."""
        self.close_listeners()
        self.broker.close()

    def close_listeners(self) -> None:
        for server in (self.client, self.internal):
            if server is not None:
                server.close()


def run(options: ServeOptions) -> int:
    """Run a node until it is told to stop. Raises ServeError with one line when it cannot start or go on."""
    try:
        config, warnings = BrokerConfig.load(
            options.settings, options.config_file, options=_as_settings(options)
        )
    except ConfigError as error:
        raise ServeError(str(error)) from None
    logger = Logger(node=options.node_id)
    for warning in warnings:
        logger.warning(warning)

    loop = _event_loop()
    from penstock.machine import machine_environment  # noqa: PLC0415 - with the loop

    environment = machine_environment(loop)
    failure: list[str] = []
    is_ready = False

    def fail(reason: str) -> None:
        failure.append(reason)
        loop.stop()

    def crash(_: Any, context: dict[str, Any]) -> None:
        # First of all: whatever happens while this is reported, the broker stops.
        fail("an internal error; see the lines above")
        error = context.get("exception")
        if error is not None:
            traceback.print_exception(error, file=sys.stderr)
        logger.error("stopping after an error of our own", error=repr(error), message=context.get("message"))

    def ready(address: tuple[str, int] | None) -> None:
        nonlocal is_ready
        is_ready = True
        host, port = address or ("", 0)
        shown = f"[{host}]" if ":" in host else host
        serving = f"kafka={shown}:{port}" if address is not None else "kafka=off"
        print(f"penstock node {options.node_id} ready {serving} http=off", flush=True)  # noqa: T201

    def remark_on_waiting() -> None:
        if is_ready or stopping or node.broker.consensus.leader_id is not None:
            return
        if options.controllers:
            why = "waiting for the cluster: the first time all controllers must be there, later a majority"
        else:
            why = "waiting for the cluster that this data directory belongs to: give --controllers and --internal"
        logger.warning(why, controllers=list(options.controllers))

    loop.set_exception_handler(crash)
    # What has been imported stays. The garbage collector need not walk through it with the loop waiting, for 10 ms.
    gc.freeze()
    try:
        node = Node(
            environment,
            options,
            config,
            logger,
            on_ready=ready,
            on_failure=fail,
            connections_max=_connections_max(),
        )
    except OSError as error:
        raise ServeError(f"cannot use the data directory {options.data_dirs[0]}: {error}") from error
    stopping: list[int] = []

    def stop() -> None:
        if stopping:
            # Told twice: without waiting for anybody.
            loop.stop()
            return
        stopping.append(1)
        node.broker.stop(loop.stop)

    def start() -> None:
        # On the running loop: a signal that comes before it runs would be lost on uvloop.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            node.start()
        except ServeError as error:
            failure.append(str(error))
            loop.stop()
        loop.call_later(FOUND_WITHIN_S, remark_on_waiting)

    loop.call_soon(start)
    loop.run_forever()
    node.close_listeners()
    if failure:
        # What is on the disk is not what we believe: no marker, the next start looks for itself.
        raise ServeError(failure[0])
    try:
        node.close()
    except OSError as error:
        raise ServeError(f"could not stop cleanly, the next start will check the logs: {error}") from error
    return 0


def _connections_max() -> int | None:
    """Half of the descriptors that the system allows, or all that the logs leave if that is more.

    Without it a flood of connections would take the descriptors that the next append or fsync needs.
    """
    import resource  # noqa: PLC0415 - Unix only

    from penstock.machine import OPEN_FILES_MAX, RESERVED_DESCRIPTORS  # noqa: PLC0415 - with the loop

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return None
    return max(1, allowed // 2, allowed - OPEN_FILES_MAX - RESERVED_DESCRIPTORS)


def _as_settings(options: ServeOptions) -> dict[str, str]:
    """The options under the names that Kafka's settings give them, for clients that ask."""
    host, port = options.listen
    settings = {
        "node.id": str(options.node_id),
        "broker.id": str(options.node_id),
        "log.dirs": ",".join(options.data_dirs),
        "listeners": f"PLAINTEXT://{host}:{port}",
    }
    if options.controllers:
        settings["controller.quorum.voters"] = ",".join(
            f"{node}@{voter[0]}:{voter[1]}" for node, voter in options.controllers.items()
        )
        settings["process.roles"] = ",".join(options.roles)
    if options.advertise is not None:
        settings["advertised.listeners"] = f"PLAINTEXT://{options.advertise[0]}:{options.advertise[1]}"
    if options.rack is not None:
        settings["broker.rack"] = options.rack
    return settings


def _event_loop() -> Any:
    try:
        import uvloop  # noqa: PLC0415 - optional on some systems

        return uvloop.new_event_loop()
    except ImportError:
        import asyncio  # noqa: PLC0415

        return asyncio.new_event_loop()
