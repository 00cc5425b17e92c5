"""One HTTP connection: requests in, short answers out. h11 knows HTTP, this knows the stream.

Only what a scraper or a probe does is possible: GET and HEAD, without a body, one request after the other. A
request must arrive within its time, however slowly its bytes come, and nothing is read while an answer is being
sent. What is not HTTP gets an error and is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

import h11

from penstock.environment import Environment, Stream, Timer

# Of the request line and all headers together.
HEADERS_BYTES_MAX = 8 * 1024
# From the first byte of a request, or from the connection, to its last byte.
REQUEST_TIMEOUT_MS = 10_000
# Scrapers come back on the same connection, usually every 15 s or every minute.
IDLE_TIMEOUT_MS = 120_000
# From a request to the last byte of its answer: a large one is made in many turns of the loop.
ANSWER_TIMEOUT_MS = 60_000
# After an error, what the peer still sends is read and dropped: closing at once could destroy the answer.
LINGER_MS = 1_000
RECEIVED_BYTES = 4 * 1024
TEXT = "text/plain; charset=utf-8"

Answer = Callable[[int, bytes, str], None]


class Owner(Protocol):
    """What a connection belongs to."""

    def allows_host(self, host: str) -> bool:
        """Whether the Host of a request may be meant for this listener."""
        ...

    def answer(self, path: str, answer: Answer) -> None:
        """Call ``answer(status, body, content type)``, now or later, once."""
        ...

    def closed(self, connection: HttpConnection) -> None: ...


class HttpConnection:
    def __init__(self, environment: Environment, stream: Stream, owner: Owner) -> None:
        self._spawn = environment.spawn
        self._stream = stream
        self._owner = owner
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS_BYTES_MAX)
        self._received = memoryview(bytearray(RECEIVED_BYTES))
        self._unsent = memoryview(b"")
        self._is_closed = False
        # The present request is being answered; the next one waits.
        self._is_answering = False
        self._is_lingering = False
        # Its answer has no body.
        self._is_head = False
        # Part of a request has come.
        self._has_begun = False
        self._timer: Timer | None = None
        self._time_limit(REQUEST_TIMEOUT_MS)
        self._stream.on_readable(self._readable)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the next request."""
        return not self._is_answering and not self._has_begun

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close()
        self._owner.closed(self)

    def _time_limit(self, delay_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._spawn.later(delay_ms, self.close)

    # Input

    def _readable(self) -> None:
        try:
            count = self._stream.recv_into(self._received)
        except OSError:
            self.close()
            return
        if count is None:
            return
        if count == 0:
            self.close()
        elif not self._is_lingering:
            if not self._has_begun:
                self._has_begun = True
                self._time_limit(REQUEST_TIMEOUT_MS)
            self._http.receive_data(bytes(self._received[:count]))
            self._take_request()

    def _take_request(self) -> None:
        """Answer the next request, if it is complete."""
        try:
            event = self._http.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if not isinstance(event, h11.Request):  # the peer has closed
                self.close()
                return
            request = event
            has_body = not isinstance(self._http.next_event(), h11.EndOfMessage)
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, "not an HTTP request that is understood here")
            return
        if has_body:
            self._refuse(413, "a request without a body is expected")
            return
        self._stream.on_readable(None)
        self._is_answering = True
        self._is_head = request.method == b"HEAD"
        self._time_limit(ANSWER_TIMEOUT_MS)
        headers = dict(request.headers)
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._owner.allows_host(host):
            self._answer(421, b"this host name is not served here; use an IP address or localhost\n", TEXT)
        elif request.method not in (b"GET", b"HEAD"):
            self._answer(405, b"only GET and HEAD\n", TEXT)
        else:
            path = request.target.partition(b"?")[0].decode("latin-1")
            self._owner.answer(path, self._answer)

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error, then close; the rest of the input is not read as HTTP."""
        self._is_lingering = True
        self._is_answering = True
        self._time_limit(LINGER_MS)
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(status, reason.encode() + b"\n", TEXT, [("connection", "close")])
        else:
            self.close()

    # Output

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        if self._is_closed:
            return
        extra = [("allow", "GET, HEAD")] if status == 405 else []
        self._send(status, body, content_type, extra)

    def _send(self, status: int, body: bytes, content_type: str, extra: list[tuple[str, str]]) -> None:
        headers = [
            ("content-type", content_type),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),
            *extra,
        ]
        http = self._http
        parts = [
            http.send(
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            )
        ]
        if not self._is_head:
            parts.append(http.send(h11.Data(data=body)))
        parts.append(http.send(h11.EndOfMessage()))
        self._unsent = memoryview(b"".join(part for part in parts if part))
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._stream.send([self._unsent])
        except OSError:
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._stream.on_writable(self._flush)
            return
        self._stream.on_writable(None)
        if not self._is_lingering:
            self._answered()

    def _answered(self) -> None:
        if self._http.our_state is h11.MUST_CLOSE:
            self.close()
            return
        self._http.start_next_cycle()
        self._is_answering = False
        # A peer may have sent the next one already.
        self._has_begun = bool(self._http.trailing_data[0])
        self._time_limit(REQUEST_TIMEOUT_MS if self._has_begun else IDLE_TIMEOUT_MS)
        self._stream.on_readable(self._readable)
        if self._has_begun:
            # Not at once: a peer that sends many requests would keep the loop.
            self._spawn.soon(self._next)

    def _next(self) -> None:
        if not self._is_closed and not self._is_answering:
            self._take_request()
