"""Requests that librdkafka's admin client lacks: one blocking connection over our own codec.

Any broker answers for the cluster or forwards the request to the controller. The other commands use librdkafka on
purpose: they show what a user's client sees.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
from types import TracebackType
from typing import Any

from penstock.addresses import parse_address
from penstock.cli.connection import Brokers
from penstock.cli.failures import Failure, WrongUsage
from penstock.protocol.apis import API_VERSIONS, APIS
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.security import SaslHandshakeRequest
from penstock.protocol.requests import InFlight
from penstock.protocol.schema import Message
from penstock.sasl.client import SaslClient
from penstock.sasl.scram import nonce_from
from penstock.wire.authentication import (
    AUTHENTICATE,
    HANDSHAKE,
    HANDSHAKE_VERSION_MIN,
    Authentication,
    Denied,
)
from penstock.wire.security import plain_words, tls_advice

CLIENT_ID = b"penstock-cli"
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0


class RawClient:
    """A connection to the first broker that answers. Raises Failure when none does or the connection breaks."""

    def __init__(self, bootstrap: Brokers, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """``timeout_s`` is for each answer."""
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s
        # Of the broker that is connected.
        self._host = ""
        self._socket = self._connected()
        self._in_flight: InFlight[None] = InFlight(CLIENT_ID)
        # More than the versions of its APIs.
        self._has_answered = False
        # API key -> the newest version the broker supports.
        self._newest = {API_VERSIONS: 0}
        try:
            answer = self.ask(ApiVersionsRequest())
        except Failure:
            self._socket.close()
            raise
        self._newest.update({each.api_key: each.max_version for each in answer.api_keys})
        if bootstrap.sasl is not None:
            try:
                self._authenticate(SaslClient(bootstrap.sasl, lambda: nonce_from(secrets.token_bytes(18))))
            except Failure:
                self._socket.close()
                raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, request: Message) -> Any:
        """Send one request, in the newest version both sides support, and return the response."""
        api = APIS[request.KEY]
        newest = self._newest.get(api.key, -1)
        if newest < api.version_min:
            raise Failure(f"the broker at {self._bootstrap} is too old: it does not support {api.name}")
        version = min(newest, api.version_max)
        try:
            self._socket.sendall(b"".join(self._in_flight.add(api, version, request, None)))
            answer = self._receive()
            self._has_answered = api.key != API_VERSIONS
            return answer
        except ssl.SSLError as error:
            # Of TLS 1.3, in which the broker refuses a client after the handshake.
            raise Failure(f"the broker at {self._bootstrap}: {tls_advice(error, self._host)}") from None
        except (OSError, DecodeError) as error:
            hint = ""
            sasl = "sasl_" if self._bootstrap.sasl is not None else ""
            if self._bootstrap.context is None and len(self._newest) == 1:
                hint = f"; does it use TLS (security.protocol={sasl}ssl in a file for --config)?"
            elif not sasl and not self._has_answered:
                hint = "; does it want a user and password (sasl.* in a file for --config)?"
            raise Failure(f"the broker at {self._bootstrap} did not answer: {error}{hint}") from None

    def mechanisms(self) -> list[str]:
        """The SASL mechanisms that the listener offers; none if it has no SASL."""
        if self._newest.get(HANDSHAKE, -1) < HANDSHAKE_VERSION_MIN:
            return []
        found: list[str] = self.ask(SaslHandshakeRequest(mechanism="")).mechanisms
        return [plain_words(name) for name in found[:10]]

    def _authenticate(self, client: SaslClient) -> None:
        authentication = Authentication(client, has_tls=self._bootstrap.context is not None)
        try:
            if self._newest.get(HANDSHAKE, -1) < HANDSHAKE_VERSION_MIN or AUTHENTICATE not in self._newest:
                raise Denied(authentication.unsupported)
            request: Message | None = authentication.begin()
            while request is not None:
                request = authentication.step(self.ask(request))
        except Denied as denied:
            raise Failure(f"{self._bootstrap}: {denied}") from None

    def _connected(self) -> socket.socket:
        trouble = ""
        for text in self._bootstrap.servers.split(","):
            try:
                address = parse_address(text.strip())
            except ValueError as error:
                raise WrongUsage(f"--bootstrap: {error}") from None
            try:
                connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
            except OSError:
                continue
            if self._bootstrap.context is not None:
                try:
                    connection = self._bootstrap.context.wrap_socket(connection, server_hostname=address[0])
                except (OSError, ValueError) as error:
                    connection.close()
                    trouble = trouble or f"{text.strip()}: {tls_advice(error, address[0])}"
                    continue
            self._host = address[0]
            connection.settimeout(self._timeout_s)
            return connection
        if trouble:
            raise Failure(trouble)
        raise Failure(
            f"no broker answers at {self._bootstrap}; "
            "start one with `penstock serve` or choose another with --bootstrap"
        )

    def _receive(self) -> Any:
        (size,) = struct.unpack(">i", self._exactly(4))
        if size < 4:
            raise DecodeError(f"a response of {size} bytes is not a Kafka response")
        _, answer = self._in_flight.answered(memoryview(self._exactly(size)))
        return answer

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            data = self._socket.recv(size - len(received))
            if not data:
                raise OSError("the broker closed the connection")
            received += data
        return bytes(received)


def refuse(error_code: int, message: str | None, what: str) -> None:
    """Raise Failure unless the code is NONE. ``what`` says which operation failed."""
    if error_code != ErrorCode.NONE:
        raise Failure(f"{what}: {reason(error_code, message)}")


def reason(error_code: int, message: str | None) -> str:
    """The broker's error message if there is one, else the code's name."""
    try:
        name = ErrorCode(error_code).name
    except ValueError:
        name = f"error {error_code}"
    return (message or name.lower().replace("_", " ")).rstrip(".")
