"""A blocking client of the fewest lines: whole messages through our own codec, and any bytes at all.

It does what no real client does: it sends what it is told, waits for exactly one answer, and says whether the
broker closed the connection. The codec it uses is checked against other people's in ``tests/protocol``, so a
mistake in it cannot hide here.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from penstock.protocol.apis import APIS, Api
from penstock.protocol.schema import Message, decoder, encoder

TIMEOUT_S = 20.0
RECEIVE_BYTES = 1 << 20


class Closed(Exception):
    """The broker closed the connection."""


def encode_request(
    request: Message, version: int, correlation_id: int = 1, client_id: str | None = "wire"
) -> bytes:
    """A whole frame: length, header and body."""
    body = b"".join(bytes(part) for part in encoder(type(request), version)(request))  # type: ignore[arg-type]
    return frame(header(APIS[request.KEY], version, correlation_id, client_id) + body)


def header(api: Api, version: int, correlation_id: int = 1, client_id: str | None = "wire") -> bytes:
    name = None if client_id is None else client_id.encode()
    start = struct.pack(">hhih", api.key, version, correlation_id, -1 if name is None else len(name))
    tags = b"\0" if api.request_header_version(version) == 2 else b""
    return start + (name or b"") + tags


def frame(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


class Wire:
    """One connection. Leaving the context closes it."""

    def __init__(
        self, address: tuple[str, int], *, timeout_s: float = TIMEOUT_S, receive_buffer: int = 0
    ) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._correlation_id = 0
        # What was asked and not answered yet, in order: (correlation id, api, version).
        self._asked: list[tuple[int, Api, int]] = []

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # Messages

    def call(self, request: Message, version: int, *, client_id: str | None = "wire") -> Any:
        """Send a request and return its response. Raises Closed."""
        self.send(request, version, client_id=client_id)
        return self.receive()

    def send(self, request: Message, version: int, *, client_id: str | None = "wire") -> None:
        correlation_id = self.expect(request.KEY, version)
        self.send_bytes(encode_request(request, version, correlation_id, client_id))

    def expect(self, key: int, version: int) -> int:
        """Take note of a request that is sent by hand; the correlation id to put into it."""
        self._correlation_id += 1
        self._asked.append((self._correlation_id, APIS[key], version))
        return self._correlation_id

    def receive(self) -> Any:
        """The response to the oldest request that has none yet. Raises Closed."""
        correlation_id, api, version = self._asked.pop(0)
        content = memoryview(self.receive_frame())
        assert struct.unpack_from(">i", content)[0] == correlation_id, "answers out of order"
        position = 4
        if api.response_header_version(version) == 1:
            assert content[4] == 0, "tags in a response header"
            position = 5
        response, end = decoder(api.response, version)(content, position)
        assert end == len(content), f"{len(content) - end} bytes behind {api.name} v{version}"
        return response

    # Bytes

    def send_bytes(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive_frame(self) -> bytes:
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def is_closed(self, within_s: float = TIMEOUT_S) -> bool:
        """Whether the broker closes the connection within the time, without another byte of an answer."""
        self.socket.settimeout(within_s)
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        finally:
            self.socket.settimeout(TIMEOUT_S)

    def is_silent(self, for_s: float) -> bool:
        """Whether nothing arrives for a while: neither an answer nor the end."""
        self.socket.settimeout(for_s)
        try:
            received = self.socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)
        if not received:
            raise Closed
        self._received += received
        return False

    def drain(self, within_s: float = TIMEOUT_S) -> int:
        """Read whatever comes until the broker closes; how many bytes that were."""
        deadline = time.monotonic() + within_s
        count = len(self._received)
        self._received.clear()
        while time.monotonic() < deadline:
            try:
                received = self.socket.recv(RECEIVE_BYTES)
            except ConnectionResetError:
                return count
            if not received:
                return count
            count += len(received)
        raise AssertionError(f"the connection is open after {within_s:g} s")

    def _exactly(self, size: int) -> bytes:
        received = self._received
        while len(received) < size:
            try:
                some = self.socket.recv(RECEIVE_BYTES)
            except ConnectionResetError as error:
                raise Closed from error
            if not some:
                raise Closed
            received += some
        data = bytes(received[:size])
        del received[:size]
        return data
