"""The client side of a connection: encodes requests as frames and matches responses with them.

A broker answers the requests of one connection in the order in which they were sent, so the requests in flight are
a queue, and a frame that does not answer the oldest one means that the connection is broken. Nodes, the client
library and the commands all use this. Each of them does its own I/O, timeouts and error handling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from struct import Struct
from typing import Any, Generic, TypeVar

from penstock.environment import Buffer
from penstock.protocol.apis import Api
from penstock.protocol.errors import DecodeError
from penstock.protocol.framing import LENGTH_BYTES
from penstock.protocol.schema import Message

CORRELATION_MAX = 2**31 - 1
CORRELATION_BYTES = 4

# The caller's data, returned with the response.
Context = TypeVar("Context")

# Length, API key, version, correlation id, length of the client id.
_header = Struct(">ihhih")
_correlation_of = Struct(">i").unpack_from


def request_frame(
    api: Api, version: int, correlation_id: int, client_id: bytes, message: Message
) -> list[Buffer]:
    """Encode a whole frame, in parts so that records are not copied."""
    parts: list[Buffer] = api.encode_request[version](message)
    tags = b"\0" if api.request_header_version(version) == 2 else b""
    size = _header.size - LENGTH_BYTES + len(client_id) + len(tags) + sum(map(len, parts))
    head = _header.pack(size, api.key, version, correlation_id, len(client_id)) + client_id + tags
    return [head, *parts]


class _Request(Generic[Context]):
    __slots__ = ("api", "context", "correlation_id", "version")

    def __init__(self, api: Api, version: int, correlation_id: int, context: Context) -> None:
        self.api = api
        self.version = version
        self.correlation_id = correlation_id
        self.context = context


class InFlight(Generic[Context]):
    """The unanswered requests of one connection, oldest first."""

    __slots__ = ("_client_id", "_correlation_id", "_requests")

    def __init__(self, client_id: bytes) -> None:
        self._client_id = client_id
        self._correlation_id = 0
        self._requests: deque[_Request[Context]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Context]:
        return (request.context for request in self._requests)

    def add(self, api: Api, version: int, message: Message, context: Context) -> list[Buffer]:
        """Add a request and return the frame to send. If it cannot be encoded, it is not added."""
        self._correlation_id = (self._correlation_id + 1) & CORRELATION_MAX
        frame = request_frame(api, version, self._correlation_id, self._client_id, message)
        self._requests.append(_Request(api, version, self._correlation_id, context))
        return frame

    def oldest(self) -> Context:
        return self._requests[0].context

    def check_answer(self, frame: Buffer) -> None:
        """Raises DecodeError for a frame that does not answer the oldest request."""
        if not self._requests or _correlation_of(frame)[0] != self._requests[0].correlation_id:
            raise DecodeError("a response with an unexpected correlation id")

    def answered(self, frame: memoryview) -> tuple[Context, Any]:
        """Return the oldest request's context and its response, which may hold views of the frame.

        Raises:
            DecodeError: the frame is not its response. All requests are still in flight.
        """
        self.check_answer(frame)
        request = self._requests[0]
        # Header version 1 adds one byte: an empty tag section.
        start = CORRELATION_BYTES + request.api.response_header_version(request.version)
        message, _ = request.api.decode_response[request.version](frame, start)
        self._requests.popleft()
        return request.context, message

    def drop_oldest(self) -> None:
        """Remove the oldest request: its response had another version and was decoded elsewhere."""
        self._requests.popleft()

    def clear(self) -> list[Context]:
        """The connection has ended: return the unanswered contexts. Correlation ids continue."""
        contexts = list(self)
        self._requests.clear()
        return contexts

    def check(self) -> None:
        ids = [request.correlation_id for request in self._requests]
        assert len(set(ids)) == len(ids)
