"""What the blocking shell and the asyncio shell share: their settings, the core they make, and why a connection was
lost.
"""

from __future__ import annotations

import random
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.sasl.client import SaslClient
from penstock.sasl.scram import nonce_from
from penstock.sasl.settings import SaslSettings, TokenSource
from penstock.tls.settings import TlsSettings
from penstock.wire.core import Core
from penstock.wire.security import Security, client_context, client_security, tls_advice


class Lost(NamedTuple):
    why: str
    # TLS failed, and would fail again.
    is_tls: bool = False


@dataclass(frozen=True, slots=True)
class ShellSettings:
    bootstrap: str
    client_id: str
    request_timeout_ms: int
    deadline_ms: int
    # With a context all connections use TLS, with ``sasl`` they authenticate.
    context: ssl.SSLContext | None = None
    sasl: SaslSettings | None = None
    # For errors of TLS.
    kafka_names: bool = False

    @classmethod
    def of(
        cls,
        bootstrap: str,
        client_id: str,
        request_timeout_ms: int,
        deadline_ms: int,
        security: Mapping[str, str] | Security | TlsSettings | None,
        token: TokenSource | None,
    ) -> ShellSettings:
        """From the arguments of a client. Files are read now. Raises BadSecurity."""
        how = client_security(security, token)
        return cls(
            bootstrap,
            client_id,
            request_timeout_ms,
            deadline_ms,
            context=client_context(how),
            sasl=how.sasl,
            kafka_names=how.kafka_names,
        )

    def lost(self, error: OSError | ValueError, host: str, *, is_connected: bool, has_answered: bool) -> Lost:
        """Why a connection to ``host`` was lost. With TLS it is connected when the handshake is done."""
        in_handshake = self.context is not None and not is_connected
        if in_handshake or isinstance(error, ssl.SSLError):
            # An end in the middle may just be a broker that stops, so it is not final.
            is_final = isinstance(error, ValueError) or (
                isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
            )
            return Lost(tls_advice(error, host, kafka_names=self.kafka_names), is_final)
        assert isinstance(error, OSError)
        why = reason(error)
        if self.context is None and is_connected and not has_answered:
            protocol = "ssl" if self.sasl is None else "sasl_ssl"
            why += f"; does it use TLS (security.protocol={protocol})?"
        return Lost(why)


def new_core(settings: ShellSettings) -> Core:
    sasl = settings.sasl
    return Core(
        settings.bootstrap,
        random.Random(),
        client_id=settings.client_id,
        request_timeout_ms=settings.request_timeout_ms,
        deadline_ms=settings.deadline_ms,
        sasl=None if sasl is None else SaslClient(sasl, lambda: nonce_from(secrets.token_bytes(18))),
        has_tls=settings.context is not None,
    )


def reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def unresolved(error: OSError | UnicodeError) -> str:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot resolve the host ({why})"
