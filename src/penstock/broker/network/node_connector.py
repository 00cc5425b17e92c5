"""Connections to other nodes, secure before the first request is sent.

    connected --> TLS handshake --> certificate of a node --> the first answer --+
        |               |                                                        +--> done(stream)
        +---------------+---------> the cluster's secret, in both directions ----+

With certificates alone, this side does not know whether it was admitted: in TLS 1.3 the handshake is done before
the other side has looked at our certificate. So it asks for ApiVersions first. Then a refusal is a failed
connection with a reason, and not a connection that is lost again and again.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.logs import Logger
from penstock.broker.network.node_frames import CLOSED, FramedStream
from penstock.broker.network.node_sasl import CLIENT_ID, FRAME_BYTES_MAX, NodeSaslClient, NotAdmitted
from penstock.broker.network.node_secret import MECHANISM
from penstock.broker.network.node_security import NodeSecurity
from penstock.environment import Environment, Stream, Timer
from penstock.protocol.apis import API_VERSIONS, APIS
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.requests import request_frame
from penstock.sasl.scram import salted_password
from penstock.tls.stream import TlsStream

TIMEOUT_MS = 5_000
# After a refusal, until the next attempt at the same address: each costs both nodes a handshake.
REFUSED_PAUSE_MS = 500
# Between two lines in the log about the same address.
LOG_PAUSE_MS = 10_000
ANSWER_BYTES_MAX = 64 * 1024
CORRELATION_ID = 1

Address = tuple[str, int]
Connected = Callable[[Stream | None, OSError | None], None]


class NodeNotReached(OSError):
    """The node did not prove what it has to, or refused this one. The message is one line."""


class NodeConnector:
    """Connects as ``environment.Network`` does, and ``done`` gets a stream to a node that has proven itself."""

    def __init__(self, environment: Environment, logger: Logger, security: NodeSecurity) -> None:
        self._environment = environment
        self._logger = logger
        self._security = security
        # By address: when the next attempt may be made, and when the next failure may be logged.
        self._paused_until_ms: dict[Address, int] = {}
        self._silent_until_ms: dict[Address, int] = {}
        # By address: the line of the secret's file to try next.
        self._lines: dict[Address, int] = {}

    def connect(self, host: str, port: int, done: Connected) -> None:
        address = (host, port)
        if self._security.settings.connects_plain:
            self._environment.network.connect(host, port, done)
            return
        if self._environment.clock.now_ms() < self._paused_until_ms.get(address, 0):
            error = NodeNotReached("the node refused this one a moment ago")
            self._environment.spawn.soon(lambda: done(None, error))
            return

        def connected(stream: Stream | None, error: OSError | None) -> None:
            if stream is None:
                done(None, error)
            else:
                _Attempt(self, self._environment, self._security, address, done).begin(stream)

        self._environment.network.connect(host, port, connected)

    def secret_for(self, address: Address) -> str:
        assert self._security.secret is not None
        lines = self._security.secret.lines
        return lines[self._lines.get(address, 0) % len(lines)]

    def succeeded(self, address: Address) -> None:
        self._paused_until_ms.pop(address, None)
        self._silent_until_ms.pop(address, None)

    def failed(self, address: Address, reason: str, *, tried: str | None) -> None:
        """``tried`` is the secret that the attempt was made with, if it came that far."""
        now_ms = self._environment.clock.now_ms()
        secret = self._security.secret
        if tried is not None and secret is not None:
            if tried != self.secret_for(address):
                # Attempts are made for several channels at once, and another one has moved on already.
                return
            # The node may not have the new secret yet. Trying the other one does not have to wait.
            line = self._lines[address] = (self._lines.get(address, 0) + 1) % len(secret.lines)
            if line:
                return
        self._paused_until_ms[address] = now_ms + REFUSED_PAUSE_MS
        if now_ms >= self._silent_until_ms.get(address, 0):
            self._silent_until_ms[address] = now_ms + LOG_PAUSE_MS
            host, port = address
            self._logger.warning("cannot connect to a node", host=host, port=port, reason=reason)


class _Attempt:
    """One connection on its way."""

    def __init__(
        self,
        connector: NodeConnector,
        environment: Environment,
        security: NodeSecurity,
        address: Address,
        done: Connected,
    ) -> None:
        self._connector = connector
        self._environment = environment
        self._security = security
        self._address = address
        self._done = done
        self._stream: Stream | None = None
        self._frames: FramedStream | None = None
        self._timer: Timer | None = None
        # The secret that is being proven.
        self._tried: str | None = None
        self._is_over = False

    def begin(self, stream: Stream) -> None:
        self._stream = stream
        self._timer = self._environment.spawn.later(
            TIMEOUT_MS, lambda: self._fail(f"it took longer than {TIMEOUT_MS // 1000} s")
        )
        if self._security.listener_tls is None:
            self._prove()
            return
        try:
            secure = TlsStream(
                stream,
                self._security.client_context,
                self._environment.spawn,
                server_side=False,
                server_hostname=self._address[0],
            )
        except (OSError, ValueError) as error:
            self._fail(f"TLS cannot be used for this address: {error}")
            return
        self._stream = secure
        secure.on_established = lambda: self._established(secure)
        # An error of the handshake is reported like one of reading.
        secure.on_readable(lambda: self._look(secure))

    def _look(self, secure: TlsStream) -> None:
        try:
            count = secure.recv_into(memoryview(bytearray(1)))
        except OSError as error:
            self._fail(str(error))
            return
        if count is not None:
            self._fail("the node closed the connection")

    def _established(self, secure: TlsStream) -> None:
        if self._is_over:
            return
        secure.on_readable(None)
        try:
            self._security.check_certificate(secure.peer_name)
        except NotAdmitted as error:
            self._fail(f"it is not a node: {error}")
            return
        if self._security.secret is None:
            self._ask_first(secure)
        else:
            self._prove()

    def _ask_first(self, stream: Stream) -> None:
        """Wait for one answer: this node is admitted."""
        self._frames = FramedStream(
            stream, ANSWER_BYTES_MAX, on_frame=lambda frame: self._succeed(), on_failed=self._refused
        )
        request = request_frame(APIS[API_VERSIONS], 0, CORRELATION_ID, CLIENT_ID, ApiVersionsRequest())
        self._frames.send(b"".join(request))

    def _refused(self, reason: str) -> None:
        advice = (
            "; is this node's certificate one of penstock.node.principals there?" if reason == CLOSED else ""
        )
        self._fail(f"{reason}{advice}")

    def _prove(self) -> None:
        assert self._stream is not None
        secret = self._tried = self._connector.secret_for(self._address)
        exchange = self._security.sasl_client(secret)
        self._frames = FramedStream(
            self._stream,
            FRAME_BYTES_MAX,
            on_frame=lambda frame: self._received(exchange, secret, frame),
            on_failed=self._fail,
        )
        self._frames.send(exchange.start())

    def _received(self, exchange: NodeSaslClient, secret: str, frame: memoryview) -> None:
        frames = self._frames
        assert frames is not None
        had_challenge = exchange.challenge is not None
        try:
            answer = exchange.received(frame)
        except NotAdmitted as error:
            self._fail(str(error))
            return
        if answer:
            frames.send(answer)
        elif exchange.is_done:
            self._succeed()
        elif not had_challenge:
            self._derive(exchange, secret)

    def _derive(self, exchange: NodeSaslClient, secret: str) -> None:
        assert exchange.challenge is not None and self._security.secret is not None
        salt, iterations = exchange.challenge
        kept = self._security.secret
        known = kept.derived(secret, salt, iterations)
        if known is not None:
            self._answer(exchange, known)
            return

        def derived(salted: bytes | None, error: Exception | None) -> None:
            if error is not None or salted is None:
                self._fail(f"the secret cannot be used: {type(error).__name__}")
                return
            kept.keep(secret, salt, iterations, salted)
            self._answer(exchange, salted)

        self._environment.spawn.in_thread(
            lambda: salted_password(MECHANISM, secret, salt, iterations), derived, lane="login"
        )

    def _answer(self, exchange: NodeSaslClient, salted: bytes) -> None:
        if not self._is_over and self._frames is not None:
            self._frames.send(exchange.answer(salted))

    def _succeed(self) -> None:
        if self._is_over or self._frames is None:
            return
        self._frames.release()
        if self._is_over:
            return
        self._end()
        self._connector.succeeded(self._address)
        self._done(self._stream, None)

    def _fail(self, reason: str) -> None:
        if self._is_over:
            return
        self._end()
        if self._stream is not None:
            self._stream.close()
        self._connector.failed(self._address, reason, tried=self._tried)
        self._done(None, NodeNotReached(reason))

    def _end(self) -> None:
        self._is_over = True
        if self._frames is not None:
            self._frames.stop()
        if self._timer is not None:
            self._timer.cancel()
