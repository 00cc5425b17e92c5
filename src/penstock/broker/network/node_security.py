"""What this node proves to other nodes, and what they have to prove: certificates, or the cluster's secret.

The files are looked at every second. New connections use what is in them; open ones go on.
"""

from __future__ import annotations

import ssl

from penstock.broker.internal_settings import InternalSecurity
from penstock.broker.logs import Logger
from penstock.broker.network.listener_tls import RELOAD_INTERVAL_MS, ListenerTls
from penstock.broker.network.node_sasl import NodeSaslClient, NodeSaslServer, NotAdmitted
from penstock.broker.network.node_secret import NodeSecret
from penstock.broker.options import ServeError
from penstock.environment import Environment, Timer
from penstock.protocol.listeners import NODES
from penstock.sasl.scram import nonce_from
from penstock.tls.certificates import Certificates
from penstock.tls.pem import TlsSettingsError, decoded
from penstock.tls.principals import NoRuleMatches
from penstock.tls.x509 import subject_name

NONCE_BYTES = 24


class NodeSecurity:
    def __init__(self, environment: Environment, logger: Logger, settings: InternalSecurity) -> None:
        """Read the files. Raises ServeError when they cannot be used."""
        self.settings = settings
        self._environment = environment
        self._logger = logger
        self._timer: Timer | None = None
        self.listener_tls: ListenerTls | None = None
        self._own_certificates: Certificates | None = None
        self.secret: NodeSecret | None = None
        self._reported: str | None = None
        try:
            if settings.tls is not None:
                self.listener_tls = ListenerTls(
                    environment, logger, NODES.name, settings.tls.settings, settings.tls.principals
                )
                # For connections to others. What is wrong with the files is reported for the listener.
                self._own_certificates = Certificates(settings.tls.settings, server_side=False)
                self._check_own_principal()
            if settings.secret_file is not None:
                self.secret = NodeSecret(settings.secret_file, environment.random.randbytes(32))
        except (TlsSettingsError, NotAdmitted) as error:
            raise ServeError(f"listener {NODES.name}: {error}") from None

    @property
    def client_context(self) -> ssl.SSLContext:
        """For new connections to other nodes."""
        assert self._own_certificates is not None
        return self._own_certificates.context

    def check_certificate(self, peer_name: str | None) -> None:
        """Raises NotAdmitted unless a certificate with this subject is a node's."""
        if self.listener_tls is None or self.settings.secret_file is not None:
            return
        if peer_name is None:
            raise NotAdmitted("the peer has no certificate")
        try:
            principal = str(self.listener_tls.principal(peer_name))
        except NoRuleMatches as error:
            raise NotAdmitted(str(error)) from None
        if self.settings.principals is not None and principal not in self.settings.principals:
            raise NotAdmitted(f"{principal} is not one of penstock.node.principals")

    def sasl_server(self) -> NodeSaslServer:
        assert self.secret is not None
        return NodeSaslServer(self.secret.keys, self._nonce())

    def sasl_client(self, secret: str) -> NodeSaslClient:
        return NodeSaslClient(secret, self._nonce())

    def watch(self) -> None:
        """From now on use files that change."""
        if self.listener_tls is not None:
            self.listener_tls.watch()
        if self.listener_tls is not None or self.secret is not None:
            self._timer = self._environment.spawn.later(RELOAD_INTERVAL_MS, self._reload)

    def close(self) -> None:
        if self.listener_tls is not None:
            self.listener_tls.close()
        if self._timer is not None:
            self._timer.cancel()

    def _nonce(self) -> bytes:
        return nonce_from(self._environment.random.randbytes(NONCE_BYTES))

    def _reload(self) -> None:
        if self._own_certificates is not None:
            self._own_certificates.reload()
        if self.secret is not None:
            if self.secret.reload():
                self._logger.info("new connections between nodes use the changed secret")
            if self.secret.failure is not None and self.secret.failure != self._reported:
                self._logger.error(f"the changed secret is not used: {self.secret.failure}")
            self._reported = self.secret.failure
        self._timer = self._environment.spawn.later(RELOAD_INTERVAL_MS, self._reload)

    def _check_own_principal(self) -> None:
        """All nodes have the same list: one that is not in it itself would be refused by the others."""
        assert self.settings.tls is not None
        chain = self.settings.tls.settings.chain
        if chain is None or self.settings.principals is None:
            return
        try:
            name = subject_name(decoded(chain.certificates()[0]))
        except ValueError as error:
            raise NotAdmitted(f"{chain}: {error}") from None
        try:
            self.check_certificate(name)
        except NotAdmitted as error:
            raise NotAdmitted(f"this node's own certificate is not a node's: {error}") from None
