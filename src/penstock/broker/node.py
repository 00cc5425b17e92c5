"""One node of a cluster: the broker and its listeners.

A node has a client listener if it is a broker, and an internal listener if there are other nodes. Internal requests
are never answered on the client listener.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.broker import Broker
from penstock.broker.config import BrokerConfig
from penstock.broker.handlers.routes import make_route
from penstock.broker.logs import Logger
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.server import Server
from penstock.broker.options import ServeError, ServeOptions
from penstock.environment import Environment
from penstock.protocol.listeners import NODES


class Node:
    """One node of a cluster, or a whole one: a broker, a controller or both, and its listeners."""

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
        """Calls ``on_ready(client address)`` once it serves. Raises ServeError, or OSError of its disk."""
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
            self.internal = Server(
                environment,
                self.broker,
                config,
                logger,
                make_route=make_route,
                # Fixed: a setting changed at runtime must not cut a node off from the other nodes.
                limits=ConnectionLimits(config.max_connections, config.max_connections_per_ip),
                listener=NODES,
                on_read_failed=self.broker.storage.read_failed,
            )
        if "broker" in options.roles:
            self.client = Server(
                environment,
                self.broker,
                config,
                logger,
                make_route=make_route,
                limits=self.broker.connection_limits,
                connections_max=connections_max,
                on_read_failed=self.broker.storage.read_failed,
            )
            self.broker.on_left = self.client.close

    def start(self) -> None:
        """Listen and join the cluster. Raises ServeError when it cannot listen on an address."""
        options = self._options
        internal = None
        if self.internal is not None:
            assert options.internal is not None
            bound = self._listen(self.internal, options.internal, "--internal")
            told = options.internal_told
            internal = told if told is not None and told[1] else bound
        advertised = None
        if self.client is not None:
            # A broker that is not in the cluster yet would report no brokers or topics, and clients believe it.
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
        """Hand over leaderships, close everything cleanly, then call ``done``. May raise OSError."""

        def handed_over() -> None:
            self.close()
            done()

        self.broker.stop(handed_over)

    def close(self) -> None:
        """Close the listeners and every log. Raises OSError when a log or file could not be made durable."""
        self.close_listeners()
        self.broker.close()

    def close_listeners(self) -> None:
        for server in (self.client, self.internal):
            if server is not None:
                server.close()
