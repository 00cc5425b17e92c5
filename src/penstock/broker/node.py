"""One node of a cluster: the broker and its listeners.

A node has one or several client listeners if it is a broker, and an internal listener if there are other nodes.
Internal requests are never answered on client listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.addresses import format_address
from penstock.broker.broker import Broker
from penstock.broker.config import BrokerConfig, ConfigError
from penstock.broker.handlers.routes import make_route
from penstock.broker.internal_settings import InternalSecurity, internal_security
from penstock.broker.listener_settings import LISTENERS, ClientListener, client_listeners
from penstock.broker.logs import Logger
from penstock.broker.network.audit import Audit
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.listener_sasl import ListenerSasl
from penstock.broker.network.listener_tls import ListenerTls
from penstock.broker.network.node_admission import NodeAdmission
from penstock.broker.network.node_connector import NodeConnector
from penstock.broker.network.node_security import NodeSecurity
from penstock.broker.network.sasl_exchanges import Users
from penstock.broker.network.server import Server
from penstock.broker.options import ServeError, ServeOptions
from penstock.environment import Environment
from penstock.protocol.apis import CLIENT, INTERNAL
from penstock.protocol.listeners import NODES, ListenerDescription
from penstock.sasl.tokens import KeysError
from penstock.tls.pem import TlsSettingsError

if TYPE_CHECKING:
    from penstock.broker.metrics.process_figures import ProcessFigures
    from penstock.broker.metrics.server import MetricsServer

# The listeners for clients and where they are bound, in the order of the settings.
Bound = Sequence[tuple[ListenerDescription, tuple[str, int]]]


class Node:
    """One node of a cluster, or a whole one: a broker, a controller or both, and its listeners."""

    def __init__(
        self,
        environment: Environment,
        options: ServeOptions,
        config: BrokerConfig,
        logger: Logger,
        *,
        on_ready: Callable[[Bound], None],
        on_failure: Callable[[str], None],
        connections_max: int | None = None,
        process_figures: ProcessFigures | None = None,
    ) -> None:
        """Calls ``on_ready(client listeners)`` once it serves. Raises ServeError, or OSError of its disk.

        ``process_figures``: for the metrics, if this is the only node of its process.
        """
        self._environment = environment
        self._options = options
        self._on_ready = on_ready
        # Before anything is opened: these may be wrong.
        self._listeners: list[tuple[ClientListener, ListenerTls | None]] = []
        if "broker" in options.roles:
            self._listeners = _with_tls(environment, options, config, logger)
        users = Users(
            stored=lambda: self.broker.image.security.credentials,
            secret=self._secret_of_salts,
        )
        self._sasl = _with_sasl(environment, logger, [each for each, _ in self._listeners], users)
        internal = _internal(options, config)
        self._security = None if internal.is_plain else NodeSecurity(environment, logger, internal)
        self._admission: NodeAdmission | None = None
        self.broker = Broker(
            environment,
            options,
            config,
            logger,
            on_failure=on_failure,
            on_active=self._became_active,
            nodes=None if self._security is None else NodeConnector(environment, logger, self._security),
            internal_protocol=internal.protocol,
        )
        self.internal: Server | None = None
        self.client: Server | None = None
        self._bound: Bound = ()
        if options.controllers:
            admitted = environment
            if self._security is not None:
                self._admission = NodeAdmission(environment, logger, self._security)
                # The server only gets connections of nodes.
                admitted = replace(environment, network=self._admission)
            self.internal = Server(
                admitted,
                self.broker,
                config,
                logger,
                make_route=make_route,
                # Fixed: a setting changed at runtime must not cut a node off from the other nodes.
                limits=ConnectionLimits(config.max_connections, config.max_connections_per_ip),
                serves=INTERNAL,
                on_read_failed=self.broker.storage.read_failed,
            )
        if self._listeners:
            self.client = Server(
                environment,
                self.broker,
                config,
                logger,
                make_route=make_route,
                limits=self.broker.connection_limits,
                connections_max=connections_max,
                throttling=self.broker.throttling,
                on_read_failed=self.broker.storage.read_failed,
            )
            self.client.authorizer = self.broker.authorizer
            if self.broker.has_authorizer or any(each.is_secured for each, _ in self._listeners):
                self.client.audit = Audit(logger.named("audit"), environment.clock)
            self.broker.on_left = self.client.close
            self.broker.on_credentials_changed = self.client.sasl.credentials_changed
        self._metrics: MetricsServer | None = None
        # Where it is bound.
        self.metrics_address: tuple[str, int] | None = None
        if options.metrics is not None:
            from penstock.broker.metrics.server import MetricsServer  # noqa: PLC0415 - not every node has it

            servers = {CLIENT: self.client, INTERNAL: self.internal}
            self._metrics = MetricsServer(
                environment,
                self.broker,
                {name: server for name, server in servers.items() if server is not None},
                process_figures,
            )

    def start(self) -> None:
        """Listen and join the cluster. Raises ServeError when it cannot listen on an address."""
        options = self._options
        if self._metrics is not None:
            assert options.metrics is not None
            try:
                self.metrics_address = self._metrics.listen(*options.metrics)
            except OSError as error:
                raise _cannot_listen(options.metrics, error, "--metrics") from None
        internal = None
        if self.internal is not None:
            assert options.internal is not None
            if self._security is not None:
                self._security.watch()
            bound = self._listen(self.internal, NODES, options.internal, "--internal")
            told = options.internal_told
            internal = told if told is not None and told[1] else bound
        option = LISTENERS if options.listen is None else "--listen"
        bound_clients = []
        advertised = []
        for each, tls in self._listeners:
            assert self.client is not None
            # A broker that is not in the cluster yet would report no brokers or topics, and clients believe it.
            bound = self._listen(
                self.client,
                each.description,
                each.address,
                option,
                tls,
                self._sasl.get(each.description.name),
                hold=True,
            )
            bound_clients.append((each.description, bound))
            # By the name that was given: certificates are for names.
            advertised.append((each.description, each.advertised or (each.address[0], bound[1])))
        self._bound = bound_clients
        self.broker.start(advertised, internal)
        if self.client is None:
            self._on_ready(())

    def _listen(
        self,
        server: Server,
        listener: ListenerDescription,
        address: tuple[str, int],
        option: str,
        tls: ListenerTls | None = None,
        sasl: ListenerSasl | None = None,
        *,
        hold: bool = False,
    ) -> tuple[str, int]:
        try:
            return server.listen(*address, listener=listener, tls=tls, sasl=sasl, hold=hold)
        except OSError as error:
            raise _cannot_listen(address, error, option) from None

    def _secret_of_salts(self) -> bytes:
        """What made-up salts are derived from. Clients know the cluster id once they were let in."""
        nodes = None if self._security is None else self._security.secret
        return (b"" if nodes is None else nodes.derived_by_all) + (self.broker.cluster_id or "").encode()

    def _became_active(self) -> None:
        if self.client is not None:
            self.client.open()
        self._on_ready(self._bound)

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
        if self._metrics is not None:
            self._metrics.close()
        if self._admission is not None:
            self._admission.close()
        if self._security is not None:
            self._security.close()


def _cannot_listen(address: tuple[str, int], error: OSError, option: str) -> ServeError:
    return ServeError(
        f"cannot listen on {format_address(*address)}: {error.strerror}; choose another {option}"
    )


def _internal(options: ServeOptions, config: BrokerConfig) -> InternalSecurity:
    """Raises ServeError."""
    if not options.controllers:
        return InternalSecurity()
    try:
        return internal_security(config.static)
    except ConfigError as error:
        raise ServeError(str(error)) from None


def _with_tls(
    environment: Environment, options: ServeOptions, config: BrokerConfig, logger: Logger
) -> list[tuple[ClientListener, ListenerTls | None]]:
    """The listeners for clients, with their certificates. Raises ServeError when settings or files are wrong."""
    found: list[tuple[ClientListener, ListenerTls | None]] = []
    try:
        for each in client_listeners(options, config.static):
            tls = None
            name = each.description.name
            if each.tls is not None:
                try:
                    tls = ListenerTls(environment, logger, name, each.tls.settings, each.tls.principals)
                except TlsSettingsError as error:
                    raise ServeError(f"listener {name}: {error}") from None
            found.append((each, tls))
    except ConfigError as error:
        raise ServeError(str(error)) from None
    return found


def _with_sasl(
    environment: Environment, logger: Logger, listeners: Sequence[ClientListener], users: Users
) -> dict[str, ListenerSasl]:
    """The SASL of the listeners that have it, by their names. Raises ServeError when keys cannot be used."""
    found: dict[str, ListenerSasl] = {}
    for each in listeners:
        if each.sasl is not None:
            name = each.description.name
            try:
                found[name] = ListenerSasl(environment, logger, each.sasl, users)
            except KeysError as error:
                raise ServeError(f"listener {name}: sasl.oauthbearer.jwks.endpoint.url: {error}") from None
    return found
