"""The exchange by which two nodes prove to each other that they know the cluster's secret. Sans-IO.

    the node that connects                          the node that accepts
    SaslHandshake, SCRAM-SHA-512              ->
                                              <-    no error
    SaslAuthenticate, client-first            ->
                                              <-    server-first
    SaslAuthenticate, client-final            ->    the proof is right: admitted
                                              <-    server-final
    the signature is right: connected

Nothing else is answered before the end, not even ApiVersions, and nothing may be sent ahead of an answer. Each side
gets whole frames without their length, and returns whole frames with it. The secret may be either of two while it
is being replaced (``node_secret.py``). The proof does not say which, so it is checked against both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum, auto

from penstock.broker.network.node_secret import MECHANISM
from penstock.protocol.apis import APIS
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.messages.security import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from penstock.protocol.requests import CORRELATION_BYTES, request_frame
from penstock.protocol.schema import Message, decode
from penstock.sasl import SaslError
from penstock.sasl.scram import Challenge, Keys, ScramClient, ScramServer

USER = "penstock-node"
CLIENT_ID = b"penstock"
HANDSHAKE, AUTHENTICATE = 17, 36
HANDSHAKE_VERSION, AUTHENTICATE_VERSION = 1, 2
# Of a frame before admission. The longest one that nodes send has about 300 bytes.
FRAME_BYTES_MAX = 4096
HEADER_BYTES = 10
FAILED = "this node does not know that secret"

_header = struct.Struct(">hhih")
_frame_start = struct.Struct(">ii")


class NotAdmitted(Exception):
    """The peer did not prove that it is a node. ``told`` is the last frame for it, if it gets one."""

    def __init__(self, reason: str, told: bytes = b"") -> None:
        super().__init__(reason)
        self.told = told


class _Step(Enum):
    HANDSHAKE = auto()
    FIRST = auto()
    FINAL = auto()
    OVER = auto()


class NodeSaslServer:
    """The side that accepts. A frame in, a frame out; then ``is_admitted``, or NotAdmitted is raised."""

    def __init__(self, accepted: Sequence[Keys], nonce: bytes) -> None:
        """``accepted`` have the same salt, and ``nonce`` is new."""
        assert accepted and len({(known.salt, known.iterations) for known in accepted}) == 1
        salt = accepted[0].salt
        self._exchanges = [_exchange(known, nonce, salt) for known in accepted]
        self._step = _Step.HANDSHAKE
        self.is_admitted = False

    def received(self, frame: memoryview) -> bytes:
        """Raises NotAdmitted."""
        step, self._step = self._step, _Step.OVER
        if len(frame) < HEADER_BYTES:
            raise NotAdmitted("a frame without a header")
        key, version, correlation_id, client_id_size = _header.unpack_from(frame)
        expected = HANDSHAKE if step is _Step.HANDSHAKE else AUTHENTICATE
        if step is _Step.OVER or key != expected:
            raise NotAdmitted(f"API {key} before the node was admitted")
        if version != (HANDSHAKE_VERSION if key == HANDSHAKE else AUTHENTICATE_VERSION):
            raise NotAdmitted(f"API {key} version {version} is not served here")
        position = HEADER_BYTES + max(0, client_id_size)
        if APIS[key].request_header_version(version) == 2:
            if bytes(frame[position : position + 1]) != b"\0":
                raise NotAdmitted("a header with tags")
            position += 1
        try:
            request, end = APIS[key].decode_request[version](frame, position)
        except DecodeError as error:
            raise NotAdmitted(str(error)) from None
        if end != len(frame):
            raise NotAdmitted("a frame with bytes after its end")
        if step is _Step.HANDSHAKE:
            return self._shake_hands(request, correlation_id)
        try:
            token = self._first(request) if step is _Step.FIRST else self._final(request)
        except SaslError as error:
            response = SaslAuthenticateResponse(
                error_code=ErrorCode.SASL_AUTHENTICATION_FAILED, error_message=FAILED
            )
            raise NotAdmitted(str(error), _response(response, correlation_id)) from None
        self._step = _Step.FINAL if step is _Step.FIRST else _Step.OVER
        self.is_admitted = step is _Step.FINAL
        return _response(SaslAuthenticateResponse(error_message=None, auth_bytes=token), correlation_id)

    def check(self) -> None:
        """Assert what holds between two frames."""
        proven = sum(exchange.user is not None for exchange in self._exchanges)
        assert self.is_admitted == (proven == 1) and proven <= 1
        assert not self.is_admitted or self._step is _Step.OVER

    def _shake_hands(self, request: SaslHandshakeRequest, correlation_id: int) -> bytes:
        if request.mechanism != MECHANISM:
            response = SaslHandshakeResponse(
                error_code=ErrorCode.UNSUPPORTED_SASL_MECHANISM, mechanisms=[MECHANISM]
            )
            raise NotAdmitted(f"nodes use {MECHANISM}", _response(response, correlation_id))
        self._step = _Step.FIRST
        return _response(SaslHandshakeResponse(mechanisms=[MECHANISM]), correlation_id)

    def _first(self, request: SaslAuthenticateRequest) -> bytes:
        """Raises SaslError."""
        answers = {exchange.first(bytes(request.auth_bytes)) for exchange in self._exchanges}
        assert len(answers) == 1, "the same salt and nonce"
        return answers.pop()

    def _final(self, request: SaslAuthenticateRequest) -> bytes:
        """Raises SaslError."""
        refused: SaslError | None = None
        for exchange in self._exchanges:
            try:
                return exchange.final(bytes(request.auth_bytes))
            except SaslError as error:
                refused = error
        assert refused is not None
        raise refused


class NodeSaslClient:
    """The side that connects: ``start``, then ``received`` for each frame, until ``is_done``.

    After the second frame ``challenge`` is set, and ``answer`` has to be called with the salted secret.
    """

    def __init__(self, secret: str, nonce: bytes) -> None:
        self._exchange = ScramClient(MECHANISM, USER, secret, nonce)
        self._step = _Step.HANDSHAKE
        self._correlation_id = 0
        self.challenge: Challenge | None = None

    @property
    def is_done(self) -> bool:
        return self._exchange.is_done

    def start(self) -> bytes:
        return self._request(SaslHandshakeRequest(mechanism=MECHANISM), HANDSHAKE_VERSION)

    def received(self, frame: memoryview) -> bytes:
        """The next frame to send; empty if there is none now. Raises NotAdmitted."""
        step, self._step = self._step, _Step.OVER
        try:
            if step is _Step.HANDSHAKE:
                self._response(SaslHandshakeResponse, HANDSHAKE_VERSION, frame)
                self._step = _Step.FIRST
                return self._authenticate(self._exchange.first())
            response = self._response(SaslAuthenticateResponse, AUTHENTICATE_VERSION, frame)
            token = bytes(response.auth_bytes)
            if step is _Step.FIRST:
                self.challenge = self._exchange.challenged(token)
            elif step is _Step.FINAL:
                self._exchange.finish(token)
            else:
                raise NotAdmitted("a frame that is not expected now")
        except (SaslError, DecodeError) as error:
            raise NotAdmitted(str(error)) from None
        return b""

    def answer(self, salted: bytes) -> bytes:
        """The frame with the proof."""
        self._step = _Step.FINAL
        return self._authenticate(self._exchange.answer(salted))

    def _authenticate(self, token: bytes) -> bytes:
        return self._request(SaslAuthenticateRequest(auth_bytes=token), AUTHENTICATE_VERSION)

    def _request(self, request: Message, version: int) -> bytes:
        self._correlation_id += 1
        return b"".join(request_frame(APIS[request.KEY], version, self._correlation_id, CLIENT_ID, request))

    def _response(self, kind: type[Message], version: int, frame: memoryview) -> SaslAuthenticateResponse:
        """Raises NotAdmitted or DecodeError."""
        start = CORRELATION_BYTES + APIS[kind.KEY].response_header_version(version)
        if len(frame) < start or struct.unpack_from(">i", frame)[0] != self._correlation_id:
            raise NotAdmitted("a response with an unexpected correlation id")
        response = decode(kind, version, frame[start:])
        assert isinstance(response, SaslAuthenticateResponse | SaslHandshakeResponse)
        if response.error_code:
            # Its own words could be anybody's.
            name = ErrorCode(response.error_code).name if response.error_code in _ERRORS else "an error"
            raise NotAdmitted(f"the node refused this one with {name}; do both have the same secret?")
        return response  # type: ignore[return-value]


_ERRORS = frozenset(code.value for code in ErrorCode)


def _exchange(known: Keys, nonce: bytes, salt: bytes) -> ScramServer:
    return ScramServer(
        MECHANISM,
        lambda user: known if user == USER else None,
        nonce,
        lambda user: salt,
        unknown_iterations=known.iterations,
    )


def _response(response: Message, correlation_id: int) -> bytes:
    api = APIS[response.KEY]
    version = HANDSHAKE_VERSION if response.KEY == HANDSHAKE else AUTHENTICATE_VERSION
    tags = b"\0" * api.response_header_version(version)
    body = b"".join(api.encode_response[version](response))
    return _frame_start.pack(CORRELATION_BYTES + len(tags) + len(body), correlation_id) + tags + body
