"""The TLS of one listener: certificates, which may be replaced while it runs, and the principals of clients."""

from __future__ import annotations

import ssl

from penstock.broker.logs import Logger
from penstock.broker.network.authorization import ANONYMOUS, Principal
from penstock.environment import Environment, Timer
from penstock.tls.certificates import Certificates
from penstock.tls.principals import PrincipalMapping
from penstock.tls.settings import TlsSettings

# How often to look whether files have changed: a few calls of stat.
RELOAD_INTERVAL_MS = 1_000
WARNING_INTERVAL_MS = 24 * 60 * 60 * 1000


class ListenerTls:
    def __init__(
        self,
        environment: Environment,
        logger: Logger,
        name: str,
        settings: TlsSettings,
        principals: PrincipalMapping,
    ) -> None:
        """Read the certificates. Raises TlsSettingsError when they cannot be used."""
        self._environment = environment
        self._logger = logger
        self._name = name
        self._principals = principals
        self._is_watching = False
        self._timer: Timer | None = None
        # When the next warning that the certificate expires may be logged.
        self._warns_from_ms = 0
        self._certificates = Certificates(settings, report=self._report)

    @property
    def context(self) -> ssl.SSLContext:
        """For new connections."""
        return self._certificates.context

    def principal(self, peer_name: str | None) -> Principal:
        """The principal of a client with this name in its certificate. Raises NoRuleMatches."""
        return ANONYMOUS if peer_name is None else Principal("User", self._principals.user(peer_name))

    def watch(self) -> None:
        """From now on use new certificates when the files change, and warn before they expire."""
        if self._is_watching and self._certificates.reload():
            self._logger.info("new connections use the changed certificates", listener=self._name)
            self._warns_from_ms = 0
        self._is_watching = True
        self._warn()
        self._timer = self._environment.spawn.later(RELOAD_INTERVAL_MS, self.watch)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _warn(self) -> None:
        now_ms = self._environment.clock.now_ms()
        if now_ms < self._warns_from_ms:
            return
        warning = self._certificates.expiry_warning(self._environment.clock.wall_ms())
        if warning is not None:
            self._logger.warning(warning, listener=self._name)
            self._warns_from_ms = now_ms + WARNING_INTERVAL_MS

    def _report(self, line: str) -> None:
        # While the broker starts, files that cannot be used stop it; what is reported then is advice.
        say = self._logger.error if self._is_watching else self._logger.warning
        say(line, listener=self._name)
