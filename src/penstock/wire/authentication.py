"""SASL on one connection, as requests and responses: SaslHandshake, then SaslAuthenticate until it is over.

The same for a new connection and for one that authenticates again because its session ends (KIP-368).
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from penstock.protocol.schema import Message
from penstock.sasl import SaslError
from penstock.sasl.client import SaslClient
from penstock.wire.errors import BUSY, words_of
from penstock.wire.security import handshake_advice, no_sasl, not_accepted

HANDSHAKE = SaslHandshakeRequest.KEY
AUTHENTICATE = SaslAuthenticateRequest.KEY
# In version 0 the messages of the mechanism would follow without Kafka's header.
HANDSHAKE_VERSION_MIN = 1


class Denied(Exception):
    """The exchange has failed. One line, without secrets."""

    def __init__(self, why: str, *, is_final: bool = True) -> None:
        super().__init__(why)
        # Another attempt would fail too.
        self.is_final = is_final


class Authentication:
    def __init__(self, client: SaslClient, *, has_tls: bool) -> None:
        self._client = client
        self._has_tls = has_tls
        self._exchange = client.exchange()
        self._is_agreed = False
        # How long the broker accepts it; 0: for as long as the connection lasts.
        self.lifetime_ms = 0

    @property
    def unsupported(self) -> str:
        """The line for a broker that does not know these requests."""
        return no_sasl(has_tls=self._has_tls)

    def begin(self) -> Message:
        return SaslHandshakeRequest(mechanism=self._client.settings.mechanism)

    def step(self, response: Any) -> Message | None:
        """The next request; None when the client is authenticated. Raises Denied."""
        settings = self._client.settings
        if not self._is_agreed:
            if response.error_code != ErrorCode.NONE:
                why = handshake_advice(
                    response.error_code, settings.mechanism, response.mechanisms, has_tls=self._has_tls
                )
                raise Denied(why, is_final=response.error_code not in BUSY)
            self._is_agreed = True
            try:
                return SaslAuthenticateRequest(auth_bytes=self._exchange.begin())
            except SaslError as error:
                raise Denied(
                    f"cannot authenticate {settings.who} with {settings.mechanism}: {error}"
                ) from None
        if response.error_code != ErrorCode.NONE:
            why = not_accepted(settings, words_of(response.error_code, response.error_message))
            raise Denied(why, is_final=response.error_code not in BUSY)
        try:
            following = self._exchange.step(bytes(response.auth_bytes))
        except SaslError as error:
            raise Denied(f"cannot authenticate {settings.who} with {settings.mechanism}: {error}") from None
        if following is None:
            self.lifetime_ms = max(0, response.session_lifetime_ms)
            return None
        return SaslAuthenticateRequest(auth_bytes=following)
