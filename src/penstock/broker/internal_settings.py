"""How the nodes of a cluster know each other, from the settings of a node.

``listener.security.protocol.map=INTERNAL:...`` is the protocol of the internal listener and of connections to those
of other nodes:

- SSL: both sides have a certificate, and ``penstock.node.principals`` says whose is a node's.
- SASL_SSL: the side that accepts has a certificate, and both know the secret of ``penstock.internal.secret.file``.
- SASL_PLAINTEXT: both know the secret, and nothing is encrypted.
- PLAINTEXT: nobody is asked. The default, and not enough if clients have to authenticate.

A running cluster gets there by three rolling restarts, with ``penstock.internal.security`` at accepted, preferred
and required (``docs/guide/nodes.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from penstock.addresses import format_address, is_loopback
from penstock.broker.config import ConfigError
from penstock.broker.listener_settings import (
    PROTOCOLS,
    ClientListener,
    Tls,
    internal_protocol,
    internal_tls,
)
from penstock.broker.options import ServeOptions
from penstock.metadata.broker_settings import (
    INTERNAL_SECRET_FILE,
    INTERNAL_SECURITY,
    LISTENER_PREFIX,
    NODE_PRINCIPALS,
)
from penstock.protocol.listeners import NODES, SecurityProtocol
from penstock.tls.settings import ClientAuth

EVERY_PRINCIPAL = "*"
_TRUSTSTORE = "ssl.truststore."
_PREFIX = f"{LISTENER_PREFIX}{NODES.name.lower()}."
_GUIDE = "docs/guide/nodes.md"


class Stage(Enum):
    """How far a cluster is on its way from plain connections between nodes to secure ones."""

    # Connect in plain text, accept both.
    ACCEPTED = "accepted"
    # Connect securely, accept both.
    PREFERRED = "preferred"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class InternalSecurity:
    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    stage: Stage = Stage.REQUIRED
    # None without TLS.
    tls: Tls | None = None
    # Whose certificates are nodes', as in ``User:CN=node1``; None: every one that the truststore vouches for.
    principals: frozenset[str] | None = None
    # None without SASL.
    secret_file: str | None = None

    @property
    def is_plain(self) -> bool:
        return self.protocol is SecurityProtocol.PLAINTEXT

    @property
    def accepts_plain(self) -> bool:
        """Whether nodes may connect here without proving anything."""
        return self.is_plain or self.stage is not Stage.REQUIRED

    @property
    def connects_plain(self) -> bool:
        return self.is_plain or self.stage is Stage.ACCEPTED


def internal_security(settings: Mapping[str, str]) -> InternalSecurity:
    """``settings`` are those that were set, as text. Raises ConfigError."""
    protocol = internal_protocol(settings)
    if protocol is SecurityProtocol.PLAINTEXT:
        for name in (INTERNAL_SECURITY, INTERNAL_SECRET_FILE, NODE_PRINCIPALS):
            if settings.get(name):
                raise ConfigError(
                    f"{name} needs a protocol: set {PROTOCOLS}=INTERNAL:SSL or INTERNAL:SASL_SSL"
                )
        return InternalSecurity()
    has_sasl = protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)
    return InternalSecurity(
        protocol,
        Stage(settings.get(INTERNAL_SECURITY) or Stage.REQUIRED.value),
        tls=_tls(settings, asks_for_certificates=not has_sasl)
        if protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)
        else None,
        principals=None if has_sasl else _principals(settings),
        secret_file=_secret_file(settings) if has_sasl else None,
    )


def check_internal(
    security: InternalSecurity, listeners: Iterable[ClientListener], options: ServeOptions
) -> None:
    """Refuse connections between nodes that are less safe than those of clients. Raises ConfigError."""
    if not options.controllers or options.internal is None or options.is_insecure:
        return
    try:
        is_private = is_loopback(options.internal[0])
    except ValueError as error:
        raise ConfigError(f"--internal: {error}") from None
    if security.accepts_plain and not is_private:
        raise ConfigError(
            f"{format_address(*options.internal)} is open to other machines without authentication; set "
            f"{PROTOCOLS}=INTERNAL:SSL ({_GUIDE}), listen on 127.0.0.1, or pass --insecure if the network is"
            " trusted"
        )
    if security.protocol is SecurityProtocol.SASL_PLAINTEXT and not is_private:
        raise ConfigError(
            f"{format_address(*options.internal)} is open to other machines without encryption; use "
            "INTERNAL:SASL_SSL or INTERNAL:SSL, listen on 127.0.0.1, or pass --insecure if the network is trusted"
        )
    if security.is_plain and any(
        each.description.security_protocol is not SecurityProtocol.PLAINTEXT for each in listeners
    ):
        raise ConfigError(
            f"clients have to be secure, but anyone who reaches --internal can act as a node: set {PROTOCOLS}="
            f"INTERNAL:SSL or INTERNAL:SASL_SSL ({_GUIDE}), or pass --insecure if the network is trusted"
        )


def internal_advice(security: InternalSecurity) -> Iterator[str]:
    """Yield warnings about settings that should not stay."""
    if not security.is_plain and security.accepts_plain:
        yield f"{INTERNAL_SECURITY}={security.stage.value}: other nodes may still connect without proving anything"


def _tls(settings: Mapping[str, str], *, asks_for_certificates: bool) -> Tls:
    """Whatever ``ssl.client.auth`` is for clients: a node has a certificate, or it has the secret."""
    tls = internal_tls(settings)
    if tls.settings.trusted is None:
        raise ConfigError(
            f"listener {NODES.name}: ssl.truststore.location is missing: nodes need the authority of each other's"
            " certificates"
        )
    auth = ClientAuth.REQUIRED if asks_for_certificates else ClientAuth.NONE
    return replace(tls, settings=replace(tls.settings, client_auth=auth))


def _principals(settings: Mapping[str, str]) -> frozenset[str] | None:
    names = [name.strip() for name in settings.get(NODE_PRINCIPALS, "").split(";")]
    found = frozenset(name for name in names if name)
    if not found:
        raise ConfigError(
            f"{NODE_PRINCIPALS} is missing: the certificates that are nodes', such as User:CN=node1,O=Example;"
            "User:CN=node2,O=Example"
        )
    if EVERY_PRINCIPAL in found:
        if len(found) > 1 or not any(name.startswith(f"{_PREFIX}{_TRUSTSTORE}") for name in settings):
            raise ConfigError(
                f"{NODE_PRINCIPALS}=* needs an authority for nodes only: set {_PREFIX}ssl.truststore.location"
            )
        return None
    wrong = sorted(name for name in found if not name.startswith("User:") or name == "User:")
    if wrong:
        raise ConfigError(f"{NODE_PRINCIPALS}: write User:NAME;User:NAME, got {wrong[0]!r}")
    return found


def _secret_file(settings: Mapping[str, str]) -> str:
    path = settings.get(INTERNAL_SECRET_FILE, "").strip()
    if not path:
        raise ConfigError(f"{INTERNAL_SECRET_FILE} is missing: a file with the secret that all nodes share")
    return path
