"""The connections of listeners with SASL: their authentications, and what ends them.

A connection is closed when it is not authenticated in time, also if it sends nothing; when the credential of its
user was removed or replaced; and when its session has ended while a request waits, also during a re-authentication
(if none does, the next request closes it).

Slow checks, which are the key derivations of PLAIN and the signatures of tokens, run on a thread. Few run at once
and the others wait in order, so they take at most a core. A refused client gets its answer after a short delay,
which costs a timer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.broker.network.authentication import (
    BEFORE_AUTHENTICATION,
    Answer,
    Authentication,
    Check,
    Proven,
    State,
)
from penstock.broker.network.authorization import Principal
from penstock.broker.network.connection import WAITING, Call, Connection
from penstock.environment import Environment, Timer
from penstock.protocol.messages.security import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from penstock.sasl import SaslError

# On the thread at once. The second one waits there, so that the thread does not wait for the loop.
CHECKS_RUNNING_MAX = 2
# Waiting for the thread: about three seconds of work. A client above that is refused.
CHECKS_WAITING_MAX = 1_000
DEADLINE_CHECK_MS = 1_000
# How long to collect changes of credentials before all connections are compared with them.
CREDENTIALS_CHECK_MS = 100
# Of a name that a client claims, in our log.
CLAIMED_LENGTH_MAX = 100


class _WaitingCheck(NamedTuple):
    connection: Connection
    check: Check
    done: Callable[[Proven | None, Exception | None], None]


class SaslConnections:
    def __init__(self, environment: Environment, *, failure_delay_ms: int) -> None:
        self._environment = environment
        self._failure_delay_ms = failure_delay_ms
        self._connections: dict[Connection, None] = {}
        self._timer: Timer | None = None
        self._credentials_timer: Timer | None = None
        self._checks: deque[_WaitingCheck] = deque()
        self._running = 0

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None
        if self._timer is None:
            self._timer = self._environment.spawn.later(DEADLINE_CHECK_MS, self._expire)

    def remove(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def close(self) -> None:
        for timer in (self._timer, self._credentials_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._credentials_timer = None
        self._checks.clear()

    def credentials_changed(self) -> None:
        """Users were added, changed or removed: soon close the connections whose credential is gone."""
        if self._credentials_timer is None and self._connections:
            self._credentials_timer = self._environment.spawn.later(
                CREDENTIALS_CHECK_MS, self._check_credentials
            )

    # For the handlers

    def handshake(self, call: Call, authentication: Authentication, request: SaslHandshakeRequest) -> Any:
        answer = authentication.handshake(request.mechanism, call.version, self._environment.clock.now_ms())
        response = SaslHandshakeResponse(error_code=answer.error, mechanisms=list(authentication.mechanisms))
        if authentication.state is not State.FAILED:
            return response
        self._refuse(call, authentication, answer, response)
        return WAITING

    def authenticate(
        self, call: Call, authentication: Authentication, request: SaslAuthenticateRequest
    ) -> Any:
        now_ms = self._environment.clock.now_ms()
        step = authentication.authenticate(request.auth_bytes, now_ms)
        if isinstance(step, Check):
            self._check(call, authentication, step)
        elif authentication.state is State.FAILED:
            self._refuse(call, authentication, step, _response(step))
        else:
            self._identify(call.connection, authentication)
            return _response(step)
        return WAITING

    # Checks

    def _check(self, call: Call, authentication: Authentication, check: Check) -> None:
        def done(proof: Proven | None, error: Exception | None) -> None:
            if call.connection.is_closed:
                return
            if proof is not None:
                answer = authentication.checked(proof, self._environment.clock.now_ms())
            elif isinstance(error, SaslError):
                answer = authentication.failed(error)
            else:
                # Our error, not the client's: it may try again. The text may contain what the client sent.
                call.connection.refuse(f"its authentication could not be checked: {type(error).__name__}")
                return
            if authentication.state is State.FAILED:
                self._refuse(call, authentication, answer, _response(answer))
            else:
                self._identify(call.connection, authentication)
                call.answer(_response(answer))

        if len(self._checks) >= CHECKS_WAITING_MAX:
            # Without an answer: clients take an error for final, and try again after a lost connection.
            call.connection.refuse("too many clients authenticate at once")
            return
        self._checks.append(_WaitingCheck(call.connection, check, done))
        self._run_checks()

    def _run_checks(self) -> None:
        while self._checks and self._running < CHECKS_RUNNING_MAX:
            waiting = self._checks.popleft()
            if waiting.connection.is_closed:
                continue
            self._running += 1
            self._environment.spawn.in_thread(waiting.check.work, self._finished(waiting), lane="login")

    def _finished(self, waiting: _WaitingCheck) -> Callable[[Proven | None, Exception | None], None]:
        def finished(proof: Proven | None, error: Exception | None) -> None:
            self._running -= 1
            self._run_checks()
            waiting.done(proof, error)

        return finished

    # Ends

    def _identify(self, connection: Connection, authentication: Authentication) -> None:
        if authentication.state is State.AUTHENTICATED:
            assert authentication.session is not None
            connection.authenticated(Principal("User", authentication.session.proof.user))

    def _refuse(self, call: Call, authentication: Authentication, answer: Answer, response: Any) -> None:
        """Answer with an error after a while, and close. Until then the connection takes no request."""
        connection = call.connection
        reason = answer.reason
        if connection.audit is not None:
            # Now: the client may not wait for the answer.
            connection.audit.login_failed(
                authentication.claimed,
                connection.peer,
                connection.listener.name,
                authentication.mechanism,
                reason,
            )
        if authentication.mechanism:
            reason = f"{authentication.mechanism}: {reason}"
        claimed = authentication.claimed[:CLAIMED_LENGTH_MAX]
        if claimed:
            reason = f"{reason} (user {claimed!r})"

        def refuse() -> None:
            if not connection.is_closed:
                call.answer(response)
                connection.refuse(f"authentication failed: {reason}")

        self._environment.spawn.later(self._failure_delay_ms, refuse)

    def _expire(self) -> None:
        self._timer = None
        now_ms = self._environment.clock.now_ms()
        for connection in list(self._connections):
            authentication = connection.authentication
            assert authentication is not None
            if connection.is_muted:
                authentication.not_heard(now_ms)
            if authentication.is_late(now_ms):
                connection.refuse("it did not authenticate in time")
            elif (
                authentication.has_ended(now_ms)
                # One that is only muted, for a quota, may authenticate again when its delay is over: it may have
                # begun to in time, and nobody has read that. Nor is the authentication itself a request that waits.
                and any(key not in BEFORE_AUTHENTICATION for key in connection.waiting_apis())
            ):
                connection.refuse("the session has ended while a request waited")
        if self._connections:
            self._timer = self._environment.spawn.later(DEADLINE_CHECK_MS, self._expire)

    def _check_credentials(self) -> None:
        self._credentials_timer = None
        for connection in list(self._connections):
            authentication = connection.authentication
            assert authentication is not None
            if not authentication.is_current():
                connection.refuse("the credential of its user was removed or changed")


def _response(answer: Answer) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(
        error_code=answer.error,
        error_message=answer.message,
        auth_bytes=answer.token,
        session_lifetime_ms=answer.session_lifetime_ms,
    )
