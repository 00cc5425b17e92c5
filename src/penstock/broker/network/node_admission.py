"""Connections from other nodes, until they have proven that they are nodes.

                     +--> TLS handshake --+--> certificate of a node -----+
    accepted --> look?                    |                               +--> admitted
                     |                    +--> the cluster's secret ------+
                     +------------------------> the cluster's secret -----+
                     +--> plain, while the cluster is on its way to secure connections

Before that there is no ``Connection``: nobody reads requests, and no handler can be reached. A peer gets ten
seconds, frames of a few kilobytes, and at most a thousand may be on their way. When there are more, the oldest one
of the host that has the most makes room: a node needs some milliseconds, and strangers that stay do not keep it
out. The server behind this only gets streams of nodes.

While nodes may still connect in plain text, the first bytes decide. A TLS record begins with 22, which would be the
first byte of a frame of 369 MB, and a node with the secret begins with SaslHandshake.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.broker.logs import Logger
from penstock.broker.network.handshakes import Handshakes
from penstock.broker.network.node_frames import CLOSED, FramedStream, ReplayedStream
from penstock.broker.network.node_sasl import FRAME_BYTES_MAX, HANDSHAKE, NodeSaslServer, NotAdmitted
from penstock.broker.network.node_security import NodeSecurity
from penstock.environment import Environment, Listener, Stream, Timer
from penstock.tls.stream import CLOSED_IN_HANDSHAKE, TlsStream

ADMISSION_TIMEOUT_MS = 10_000
# Peers that have not proven anything yet, in all and from one host.
PENDING_MAX = 1_000
PENDING_PER_HOST_MAX = 200
TLS_RECORD = 22
# The length of a frame and its API key.
LOOK_BYTES = 6
REFUSALS_LOGGED = 20
REFUSALS_WINDOW_MS = 5_000

TOO_MANY = "too many connections that are not admitted yet"

OnConnect = Callable[[Stream], None]


class _Guest:
    """A peer that is not admitted yet."""

    __slots__ = ("end_handshake", "first", "frames", "on_connect", "stream", "timer")

    def __init__(self, stream: Stream, on_connect: OnConnect) -> None:
        self.stream = stream
        self.on_connect = on_connect
        self.timer: Timer | None = None
        # While its TLS handshake lasts.
        self.end_handshake: Callable[[str], None] | None = None
        self.first = b""
        self.frames: FramedStream | None = None


class NodeAdmission:
    """A network whose listeners admit nodes only. Connecting is as in the environment's."""

    def __init__(self, environment: Environment, logger: Logger, security: NodeSecurity) -> None:
        self._environment = environment
        self._logger = logger
        self._security = security
        self._guests: dict[_Guest, None] = {}
        # The same by host, the oldest first.
        self._by_host: dict[str, dict[_Guest, None]] = {}
        self._handshakes: Handshakes[_Guest] = Handshakes(
            environment, on_established=self._established, on_failed=self._handshake_failed
        )
        self._refusals = 0
        self._refusals_since_ms = 0

    def __len__(self) -> int:
        return len(self._guests)

    def listen(self, host: str, port: int, on_connect: OnConnect) -> Listener:
        return self._environment.network.listen(host, port, partial(self._accept, on_connect))

    def connect(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        self._environment.network.connect(host, port, done)

    def close(self) -> None:
        self._handshakes.close()
        for guest in list(self._guests):
            self._leave(guest)
            guest.stream.close()

    def _accept(self, on_connect: OnConnect, stream: Stream) -> None:
        host = stream.peer
        if len(self._by_host.get(host, ())) >= PENDING_PER_HOST_MAX:
            self._make_room(host)
        elif len(self._guests) >= PENDING_MAX:
            self._make_room(max(self._by_host, key=lambda each: len(self._by_host[each])))
        guest = _Guest(stream, on_connect)
        self._guests[guest] = None
        self._by_host.setdefault(host, {})[guest] = None
        if self._security.settings.accepts_plain:
            self._set_deadline(guest)
            stream.on_readable(partial(self._look, guest))
        elif self._security.listener_tls is not None:
            guest.end_handshake = self._handshakes.add(stream, guest, self._security.listener_tls)
        else:
            self._ask_for_secret(guest)

    def _make_room(self, host: str) -> None:
        oldest = next(iter(self._by_host[host]))
        if oldest.end_handshake is not None:
            oldest.end_handshake(TOO_MANY)
        else:
            self._refuse(oldest, TOO_MANY)

    def _look(self, guest: _Guest) -> None:
        """The first bytes of a peer that may be plain."""
        buffer = bytearray(LOOK_BYTES - len(guest.first))
        try:
            count = guest.stream.recv_into(memoryview(buffer))
        except OSError as error:
            self._refuse(guest, str(error))
            return
        if count is None:
            return
        if count == 0:
            self._refuse(guest, CLOSED)
            return
        guest.first += bytes(buffer[:count])
        tls = self._security.listener_tls
        if tls is not None and guest.first[0] == TLS_RECORD:
            stream = self._replayed(guest)
            self._clear_deadline(guest)
            guest.end_handshake = self._handshakes.add(stream, guest, tls)
        elif tls is None and len(guest.first) < LOOK_BYTES:
            return
        elif tls is None and int.from_bytes(guest.first[4:6], "big") == HANDSHAKE:
            self._replayed(guest)
            self._ask_for_secret(guest)
        else:
            self._replayed(guest)
            self._admit(guest)

    def _replayed(self, guest: _Guest) -> Stream:
        guest.stream.on_readable(None)
        guest.stream = ReplayedStream(guest.stream, guest.first, self._environment.spawn)
        return guest.stream

    def _established(self, stream: TlsStream, guest: _Guest) -> None:
        guest.stream = stream
        guest.end_handshake = None
        try:
            self._security.check_certificate(stream.peer_name)
        except NotAdmitted as error:
            self._refuse(guest, str(error))
            return
        if self._security.secret is None:
            self._admit(guest)
        else:
            self._ask_for_secret(guest)

    def _handshake_failed(self, stream: Stream, guest: _Guest, reason: str) -> None:
        self._leave(guest)
        self._note(stream.peer, reason)

    def _ask_for_secret(self, guest: _Guest) -> None:
        if guest.timer is None:
            self._set_deadline(guest)
        exchange = self._security.sasl_server()
        guest.frames = FramedStream(
            guest.stream,
            FRAME_BYTES_MAX,
            on_frame=lambda frame: self._received(guest, exchange, frame),
            on_failed=lambda reason: self._refuse(guest, reason),
        )

    def _received(self, guest: _Guest, exchange: NodeSaslServer, frame: memoryview) -> None:
        frames = guest.frames
        assert frames is not None
        try:
            answer = exchange.received(frame)
        except NotAdmitted as error:
            if error.told:
                frames.send(error.told)
            self._refuse(guest, str(error))
            return
        frames.send(answer)
        if exchange.is_admitted and guest in self._guests:
            frames.release()
            if guest in self._guests:
                self._admit(guest)

    def _admit(self, guest: _Guest) -> None:
        self._leave(guest)
        guest.on_connect(guest.stream)

    def _refuse(self, guest: _Guest, reason: str) -> None:
        if guest in self._guests:
            self._leave(guest)
            guest.stream.close()
            self._note(guest.stream.peer, reason)

    def _leave(self, guest: _Guest) -> None:
        del self._guests[guest]
        self._clear_deadline(guest)
        if guest.frames is not None:
            guest.frames.stop()
            guest.frames = None
        host = guest.stream.peer
        of_host = self._by_host[host]
        del of_host[guest]
        if not of_host:
            del self._by_host[host]

    def _set_deadline(self, guest: _Guest) -> None:
        reason = f"not admitted within {ADMISSION_TIMEOUT_MS // 1000} s"
        guest.timer = self._environment.spawn.later(ADMISSION_TIMEOUT_MS, lambda: self._refuse(guest, reason))

    def _clear_deadline(self, guest: _Guest) -> None:
        if guest.timer is not None:
            guest.timer.cancel()
            guest.timer = None

    def _note(self, peer: str, reason: str) -> None:
        """Log it, but a peer that comes again and again must not fill the disk."""
        if reason.endswith((CLOSED, CLOSED_IN_HANDSHAKE)):
            # A node that looks whether this one listens, or a check from outside. A refusal has another reason.
            return
        now_ms = self._environment.clock.now_ms()
        if now_ms - self._refusals_since_ms >= REFUSALS_WINDOW_MS:
            if self._refusals > REFUSALS_LOGGED:
                self._logger.warning("not all refused nodes were logged", count=self._refusals)
            self._refusals, self._refusals_since_ms = 0, now_ms
        self._refusals += 1
        if self._refusals <= REFUSALS_LOGGED:
            self._logger.warning("did not admit a node", peer=peer, reason=reason)
