"""The client's side of an exchange, whatever the mechanism: bytes to send, and bytes that came back.

``SaslClient`` lives as long as the client and remembers what it derived from the password, so that only the first
connection pays for it: a cluster has one salt per user and mechanism. Each connection, and each re-authentication
(KIP-368), is an ``Exchange``.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.sasl import SaslError, oauthbearer, plain
from penstock.sasl.scram import Challenge, ScramClient, salted_password
from penstock.sasl.settings import PLAIN, SaslSettings

# A password that is changed has another salt. More than a few mean a peer that makes them up.
DERIVED_MAX = 8


class SaslClient:
    def __init__(self, settings: SaslSettings, nonce: Callable[[], bytes]) -> None:
        """``nonce`` returns another random nonce each time (``scram.nonce_from``)."""
        self.settings = settings
        self._nonce = nonce
        self._derived: dict[Challenge, bytes] = {}

    def exchange(self) -> Exchange:
        return Exchange(self, self._nonce)

    def salted(self, challenge: Challenge) -> bytes:
        """Some milliseconds for a salt that was not seen before. Raises SaslError."""
        found = self._derived.get(challenge)
        if found is None:
            found = salted_password(self.settings.mechanism, self.settings.password, *challenge)
            while len(self._derived) >= DERIVED_MAX:
                del self._derived[next(iter(self._derived))]
            self._derived[challenge] = found
        return found

    def __repr__(self) -> str:
        return f"SaslClient({self.settings.mechanism})"


class Exchange:
    """``begin`` gives the first bytes, ``step`` takes an answer and gives the next ones, or None at the end."""

    def __init__(self, client: SaslClient, nonce: Callable[[], bytes]) -> None:
        self._client = client
        self._nonce = nonce
        self._scram: ScramClient | None = None
        self._steps = 0
        self._refusal: SaslError | None = None

    def begin(self) -> bytes:
        """Raises SaslError, also when no token can be had."""
        settings = self._client.settings
        if settings.mechanism == PLAIN:
            return plain.message(settings.user, settings.password)
        if settings.mechanism == oauthbearer.MECHANISM:
            assert settings.token is not None
            try:
                token = settings.token()
            except Exception as error:  # of the caller's function, with a message that may contain the token
                raise SaslError(f"no token: {type(error).__name__}") from error
            return oauthbearer.message(token)
        self._scram = ScramClient(settings.mechanism, settings.user, settings.password, self._nonce())
        return self._scram.first()

    def step(self, answer: bytes) -> bytes | None:
        """Raises SaslError: the exchange has failed."""
        self._steps += 1
        if self._scram is not None:
            if self._steps == 1:
                return self._scram.answer(self._client.salted(self._scram.challenged(answer)))
            self._scram.finish(answer)
            return None
        if self._refusal is not None:
            raise self._refusal
        if self._client.settings.mechanism == oauthbearer.MECHANISM:
            try:
                oauthbearer.finish(answer)
            except SaslError as error:
                # The broker says why after this.
                self._refusal = error
                return oauthbearer.ACKNOWLEDGEMENT
        return None
