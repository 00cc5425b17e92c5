"""Authentication of one connection: which requests it may send, and who it is. No I/O, no clock, no thread.

All listeners with SASL use this one state machine, and none has a shortcut around it.

                 handshake              authenticate
    INITIAL ----------------> CHOSEN ------------------> EXCHANGING <--+
                                ^                          |    |      | authenticate: another challenge
                                |                          |    +------+
                                | handshake                |  authenticate: a slow check
                                | (re-authentication)      +------------------------------> CHECKING
                                |                          |  authenticate: proven             |
                          AUTHENTICATED <------------------+                                   |
                                ^                                                              |
                                +------------------------ checked: proven ---------------------+

    any state --> FAILED: a wrong password, a request at the wrong time, a mechanism that is not enabled

Until the client is authenticated only ApiVersions, SaslHandshake and SaslAuthenticate are admitted. The same holds
during a re-authentication (KIP-368), which proves the same user by the same mechanism again. In CHECKING and FAILED
the connection takes no request (``is_busy``). A session may end: then only a new handshake is admitted.

What a mechanism does with the client's messages is its ``Exchange`` (``sasl_exchanges.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import NamedTuple, Protocol

from penstock.protocol.errors import ErrorCode
from penstock.sasl import SaslError

# From the connection, or the handshake of a re-authentication, to the proof. As for TLS handshakes.
AUTHENTICATION_TIMEOUT_MS = 10_000
# As in Kafka: an authenticated client cannot keep the broker busy with proofs.
REAUTHENTICATION_INTERVAL_MS = 1_000
FAILED_MESSAGE = "Authentication failed: invalid credentials"

SASL_HANDSHAKE = 17
API_VERSIONS = 18
SASL_AUTHENTICATE = 36
BEFORE_AUTHENTICATION = frozenset((SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE))


class State(Enum):
    INITIAL = auto()
    # The handshake named a mechanism.
    CHOSEN = auto()
    EXCHANGING = auto()
    # A thread checks what the client sent.
    CHECKING = auto()
    AUTHENTICATED = auto()
    FAILED = auto()


class Challenge(NamedTuple):
    """What the client has to answer before it is known."""

    message: bytes


class Proven(NamedTuple):
    """Who the client is."""

    user: str
    # The last message to the client.
    message: bytes = b""
    # What the user was recognised by; None if it is not stored in the cluster (a token).
    credential: object = None
    # How long the proof is good for; None for as long as the credential is there.
    lifetime_ms: int | None = None


class Check(NamedTuple):
    """A check that is too slow for the loop."""

    # For a worker thread. Raises SaslError.
    work: Callable[[], Proven]


class InvalidCredentials(SaslError):
    """The client is not told more than that: neither whether the user exists nor what is wrong. Our log is."""


class Exchange(Protocol):
    """One authentication by one mechanism."""

    @property
    def claimed(self) -> str:
        """The user that the client says it is, for the log; empty if not known."""
        ...

    def step(self, message: bytes) -> Challenge | Proven | Check:
        """Take the client's next message. Raises SaslError when the client is refused."""
        ...


class Answer(NamedTuple):
    """What SaslHandshake or SaslAuthenticate is answered with. After an error the connection is to be closed."""

    error: ErrorCode = ErrorCode.NONE
    message: str | None = None
    token: bytes = b""
    session_lifetime_ms: int = 0
    # For our log, when it is more than the client is told.
    reason: str = ""


class Session(NamedTuple):
    """The last successful authentication."""

    mechanism: str
    proof: Proven
    began_ms: int
    # None: it does not end.
    ends_ms: int | None


class Authentication:
    __slots__ = (
        "_exchange",
        "_is_current",
        "_mechanism",
        "_session_ms_max",
        "deadline_ms",
        "mechanisms",
        "session",
        "state",
        "token_bytes_max",
    )

    def __init__(
        self,
        mechanisms: Mapping[str, Callable[[], Exchange]],
        now_ms: int,
        *,
        token_bytes_max: int,
        session_ms_max: int = 0,
        is_current: Callable[[Proven], bool] = lambda proof: True,
    ) -> None:
        """``session_ms_max`` 0: only the proof limits a session. ``is_current``: is its credential still there?"""
        # The enabled ones, by name.
        self.mechanisms = mechanisms
        self._session_ms_max = session_ms_max
        self._is_current = is_current
        # Also the limit for frames before the first authentication.
        self.token_bytes_max = token_bytes_max
        self.state = State.INITIAL
        # When the client must be authenticated; None while it is.
        self.deadline_ms: int | None = now_ms + AUTHENTICATION_TIMEOUT_MS
        self._mechanism = ""
        self._exchange: Exchange | None = None
        # None until the first success. Kept during a re-authentication.
        self.session: Session | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the connection must not take another request."""
        return self.state is State.CHECKING or self.state is State.FAILED

    @property
    def claimed(self) -> str:
        return "" if self._exchange is None else self._exchange.claimed

    @property
    def mechanism(self) -> str:
        """The one that the last handshake named, or empty."""
        return self._mechanism

    def refusal(self, api_key: int, now_ms: int) -> str | None:
        """Why the connection is to be closed instead of handling this request; None if it is admitted."""
        if self.state is State.AUTHENTICATED:
            if self.has_ended(now_ms) and api_key != SASL_HANDSHAKE:
                return "the session has ended, and the client did not authenticate again"
            return None
        if self.is_busy or api_key not in BEFORE_AUTHENTICATION:
            during = "during" if self.session is not None else "before"
            return f"a request of API {api_key} {during} authentication"
        return None

    def has_ended(self, now_ms: int) -> bool:
        """Whether there was a session and its time is over."""
        session = self.session
        return session is not None and session.ends_ms is not None and now_ms >= session.ends_ms

    def is_current(self) -> bool:
        """Whether the credential of the session still exists. True without a session."""
        return self.session is None or self._is_current(self.session.proof)

    def is_late(self, now_ms: int) -> bool:
        """Whether the time for an authentication is over."""
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def not_heard(self, now_ms: int) -> None:
        """The connection does not read now: the time for a re-authentication does not run.

        That for the first one does, or a stranger could stay by being delayed.
        """
        if self.deadline_ms is not None and self.session is not None:
            self.deadline_ms = now_ms + AUTHENTICATION_TIMEOUT_MS

    def handshake(self, mechanism: str, version: int, now_ms: int) -> Answer:
        """The client names a mechanism. After an error the state is FAILED, except for a handshake too soon."""
        session = self.session
        if self.state is State.AUTHENTICATED:
            assert session is not None
            if now_ms < session.began_ms + REAUTHENTICATION_INTERVAL_MS and not self.has_ended(now_ms):
                return Answer(ErrorCode.ILLEGAL_SASL_STATE)
        elif self.state is not State.INITIAL:
            return self._fail(ErrorCode.ILLEGAL_SASL_STATE, "a second SaslHandshake in one authentication")
        if version == 0:
            # Its tokens would follow without request headers, which only clients from before 2017 do.
            return self._fail(ErrorCode.ILLEGAL_SASL_STATE, "SaslHandshake version 0; clients need version 1")
        make = self.mechanisms.get(mechanism)
        if make is None:
            return self._fail(ErrorCode.UNSUPPORTED_SASL_MECHANISM, "a SASL mechanism that is not enabled")
        self._mechanism = mechanism
        self._exchange = make()
        self.state = State.CHOSEN
        if session is not None:
            self.deadline_ms = now_ms + AUTHENTICATION_TIMEOUT_MS
        return Answer()

    def authenticate(self, token: bytes, now_ms: int) -> Answer | Check:
        """Take a message of the client. A Check has to be done, and reported to ``checked`` or ``failed``."""
        exchange = self._exchange
        if self.state not in (State.CHOSEN, State.EXCHANGING) or exchange is None:
            return self._fail(
                ErrorCode.ILLEGAL_SASL_STATE,
                "SaslAuthenticate without a SaslHandshake before it",
                "Send a SaslHandshake request first.",
            )
        if self.session is not None and self._mechanism != self.session.mechanism:
            # Told here as in Kafka: the answer to a handshake has no room for a message.
            return self.failed(SaslError("a re-authentication has to use the same mechanism"))
        if len(token) > self.token_bytes_max:
            return self.failed(SaslError("a SASL message that is too long"))
        try:
            step = exchange.step(token)
        except SaslError as error:
            return self.failed(error)
        match step:
            case Challenge():
                self.state = State.EXCHANGING
                return Answer(token=step.message)
            case Check():
                self.state = State.CHECKING
                return step
            case Proven():
                return self._proven(step, now_ms)

    def checked(self, proof: Proven, now_ms: int) -> Answer:
        """A Check is done: it has proven who the client is."""
        assert self.state is State.CHECKING, self.state
        return self._proven(proof, now_ms)

    def failed(self, error: SaslError) -> Answer:
        """The client is refused. It is told why only if that helps nobody to guess a password."""
        told = FAILED_MESSAGE if isinstance(error, InvalidCredentials) else f"Authentication failed: {error}"
        return self._fail(ErrorCode.SASL_AUTHENTICATION_FAILED, str(error), told)

    def check(self) -> None:
        session = self.session
        if self.state is State.INITIAL:
            assert session is None and self._exchange is None and not self._mechanism
        if self.state in (State.CHOSEN, State.EXCHANGING, State.CHECKING):
            assert self._exchange is not None and self._mechanism in self.mechanisms
        if self.state is State.AUTHENTICATED:
            assert session is not None and self._exchange is None and self.deadline_ms is None
            assert session.mechanism == self._mechanism
        elif self.state is not State.FAILED:
            assert self.deadline_ms is not None, "an authentication without a deadline"
        if session is not None:
            assert session.proof.user and session.mechanism in self.mechanisms
            assert session.ends_ms is None or session.ends_ms > session.began_ms

    def _proven(self, proof: Proven, now_ms: int) -> Answer:
        session = self.session
        if session is not None and proof.user != session.proof.user:
            return self.failed(SaslError("a re-authentication has to prove the same user"))
        if not self._is_current(proof):
            return self.failed(InvalidCredentials("the credential was changed during the exchange"))
        lifetimes_ms = [self._session_ms_max] if self._session_ms_max > 0 else []
        if proof.lifetime_ms is not None:
            lifetimes_ms.append(proof.lifetime_ms)
        # To the client, 0 is a session without an end.
        lifetime_ms = max(1, min(lifetimes_ms)) if lifetimes_ms else 0
        self.session = Session(
            self._mechanism, proof, began_ms=now_ms, ends_ms=now_ms + lifetime_ms if lifetime_ms else None
        )
        self.state = State.AUTHENTICATED
        self._exchange = None
        self.deadline_ms = None
        return Answer(token=proof.message, session_lifetime_ms=lifetime_ms)

    def _fail(self, error: ErrorCode, reason: str, told: str | None = None) -> Answer:
        self.state = State.FAILED
        return Answer(error, told, reason=reason)
