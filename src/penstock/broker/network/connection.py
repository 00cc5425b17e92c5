"""One client connection: bytes in, requests to their handlers, responses out in request order.

The connection owns no task and no future. It reads when the stream is readable, passes each whole frame to its
route, and sends everything that is ready in one gathered call per turn. A request that cannot be answered at once
leaves its ``Call`` in a queue until ``Call.answer`` completes it. The responses behind it wait, because clients
treat a changed order as a protocol error.

Back-pressure is one rule: while too many bytes wait to be sent, or too many requests wait for their response, the
connection neither parses nor reads. So a slow client uses a bounded amount of memory and does not slow down others.
The same holds for a client that is over its quota, while its delay lasts (``throttling.py``).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.counters import ApiCounts
from penstock.broker.network.audit import SUBJECTS, Audit, api_name, shown_name, shown_subject
from penstock.broker.network.authentication import Authentication
from penstock.broker.network.authorization import (
    Authorizer,
    Operation,
    Principal,
    ResourceType,
    Right,
    refusal,
)
from penstock.environment import Buffer, FileRange, Stream
from penstock.protocol.apis import INTERNAL
from penstock.protocol.errors import DecodeError
from penstock.protocol.framing import Framer
from penstock.protocol.listeners import ListenerDescription
from penstock.protocol.schema import Message

if TYPE_CHECKING:
    from penstock.broker.network.sasl_connections import SaslConnections
    from penstock.broker.network.server import Server
    from penstock.broker.network.throttling import ClientUsage

# Requests of one connection that may wait for their response; Kafka allows one, its clients send five.
WAITING_CALLS_MAX = 64
# Bytes held in memory for a peer that does not read them.
UNSENT_BYTES_MAX = 4 * 1024 * 1024
# The same before authentication: a response to ApiVersions is thirty times as long as the request.
UNSENT_BYTES_OF_STRANGERS_MAX = 64 * 1024
# After this many requests of one connection, the loop serves other connections.
FRAMES_PER_TURN = 128
# A file range up to this size is read and sent together with the buffers around it: one call instead of three.
GATHERED_RANGE_BYTES = 64 * 1024
# Sent with sendfile in one turn; then the loop serves other connections.
SENT_FILE_BYTES_PER_TURN = 4 * 1024 * 1024
BUFFERS_PER_SEND = 256
# Decisions of the authorizer that a connection keeps for one operation: a client may name any number of topics.
DECISIONS_MAX = 2_000
# Names that are longer, of which a client may invent any number, are decided each time. Topics have shorter ones.
DECIDED_NAME_MAX = 249
GATHERED_BYTES_MAX = 512 * 1024

_header = struct.Struct(">hhih")
_frame_start = struct.Struct(">ii").pack
_flexible_frame_start = struct.Struct(">iib").pack

# Returned by a handler when the response comes later, through Call.answer.
WAITING: Final = object()
# Returned by a handler when the client expects no response (acks=0).
NO_RESPONSE: Final = object()
# Returned by a handler to close the connection without a response.
CLOSE: Final = object()


class Encoded:
    """A response that is already encoded, such as a cached one."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Buffer | FileRange]) -> None:
        self.parts = parts


class Route:
    """How one version of one API is decoded, authorized, handled and encoded."""

    __slots__ = (
        "counts",
        "decode",
        "encode",
        "find_errors",
        "flexible_request",
        "flexible_response",
        "handle",
        "key",
        "rights",
        "rights_of_whole",
        "subject",
        "version",
    )

    def __init__(
        self,
        version: int,
        decode: Callable[[memoryview, int], tuple[Any, int]],
        encode: Callable[[Any], list[Buffer | FileRange]],
        handle: Callable[[Any, Any, Call], Any],
        rights: tuple[Right, ...],
        flexible_request: bool,
        flexible_response: bool,
        key: int = -1,
        find_errors: Callable[[Any], Iterator[int]] | None = None,
    ) -> None:
        # The API.
        self.key = key
        # Of all versions; replaced by the server's.
        self.counts = ApiCounts()
        # Finds the errors in a response; None where handlers count them, or there are none.
        self.find_errors = find_errors
        # What a request is about, for the audit log; None if it administers nothing.
        self.subject = SUBJECTS.get(key)
        self.version = version
        self.decode = decode
        self.encode = encode
        self.handle = handle
        self.rights = rights
        # Those about the one resource of the whole request, which are checked before the handler runs.
        self.rights_of_whole = tuple(right for right in rights if right.name is not None)
        self.flexible_request = flexible_request
        self.flexible_response = flexible_response


class Call:
    """One request that waits for its response; also the token by which a core identifies the request."""

    __slots__ = (
        "amend",
        "audited",
        "began_us",
        "client_id",
        "connection",
        "correlation_id",
        "is_denied",
        "on_abandoned",
        "parts",
        "route",
        "throttle_ms",
        "version",
    )

    def __init__(self, connection: Connection, route: Route, correlation_id: int, client_id: str) -> None:
        self.connection = connection
        self.route = route
        self.version = route.version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.began_us = connection.began_us
        # The encoded response, None until it is ready; empty when the client expects none.
        self.parts: list[Buffer | FileRange] | None = None
        # Called when the connection ends before the response is ready.
        self.on_abandoned: Callable[[], None] | None = None
        # Whether the audit log has a line about a right that was missing.
        self.is_denied = False
        # What the request is about, if the audit log gets a line about its result.
        self.audited: str | None = None
        # How long the client is delayed because it is over a quota. The response says so.
        self.throttle_ms = 0
        # Only if it is delayed: completes the response.
        self.amend: Callable[[Any], None] | None = None

    @property
    def host(self) -> str:
        return self.connection.peer

    @property
    def principal(self) -> Principal:
        """The client's identity."""
        return self.connection.principal

    @property
    def authorizer(self) -> Authorizer | None:
        """None: every client may do everything."""
        return self.connection.authorizer

    def allows(
        self, operation: Operation, resource: ResourceType, name: str, *, quietly: bool = False
    ) -> bool:
        """Whether the client may do this. Handlers check it for each resource that a request names.

        ``quietly``: the client has not asked for this resource, so a denial is not for the audit log.
        """
        connection = self.connection
        authorizer = connection._server.authorizer
        if authorizer is None:
            return True
        # On the path of every Produce and Fetch, so without another call.
        if connection.decided_by == authorizer.version and connection.decided_for is connection.principal:
            known = connection.decisions.get(operation << 3 | resource)
            if known is not None and known.get(name):
                return True
        if connection.decide(authorizer, operation, resource, name):
            return True
        if not quietly:
            self.denied(operation, resource, name)
        return False

    def allows_any(self, operation: Operation, resource: ResourceType) -> bool:
        """Whether there could be a resource of the type on which the client may do this."""
        authorizer = self.authorizer
        return authorizer is None or authorizer.allows_any(self.principal, self.host, operation, resource)

    def denied(self, operation: Operation, resource: ResourceType, name: str) -> None:
        """Write into the audit log that the client lacks a right, once per request."""
        audit = self.connection.audit
        if audit is not None and not self.is_denied:
            self.is_denied = True
            audit.denied(self.principal, self.host, self.route.key, operation, resource, name)

    @property
    def is_internal(self) -> bool:
        """Whether the request came in on the internal listener, from another node."""
        return self.connection.listener.serves == INTERNAL

    @property
    def listener(self) -> ListenerDescription:
        return self.connection.listener

    @property
    def connected_ms(self) -> int:
        """When the client connected."""
        return self.connection.connected_ms

    def answer(self, response: Any) -> None:
        """Complete a request whose handler returned WAITING."""
        assert self.parts is None, "a request is answered once"
        connection = self.connection
        if connection.is_closed:
            self.parts = []
        elif self.complete(response):
            self.route.counts.durations.add(connection.clock.work_us() - self.began_us)
            connection.advance()

    def complete(self, response: Any) -> bool:
        """Encode the response; False when the connection was closed instead."""
        if self.audited is not None and (audit := self.connection.audit) is not None:
            audit.done(self.principal, self.host, self.route.key, self.audited, response)
        if response is CLOSE:
            self.connection.close()
            return False
        if self.route.find_errors is not None and isinstance(response, Message):
            for error in self.route.find_errors(response):
                self.route.counts.failed(error)
        if self.throttle_ms:
            self._say_delay(response)
        try:
            self.parts = [] if response is NO_RESPONSE else frame_response(self, response)
        except struct.error as error:
            # The response does not fit in the requested version: for example a string of more than 32 KB.
            self.connection.refuse(f"the answer cannot be written: {error}")
            return False
        return True

    def _say_delay(self, response: Any) -> None:
        if self.amend is not None:
            self.amend(response)
        # Not in one that was encoded before, and not where the client expects none.
        if hasattr(response, "throttle_time_ms"):
            response.throttle_time_ms = self.throttle_ms


class Connection:
    __slots__ = (
        "_client_id",
        "_client_id_bytes",
        "_framer",
        "_is_reading",
        "_is_warming",
        "_is_writing",
        "_server",
        "_stream",
        "_unsent",
        "_unsent_bytes",
        "_unsent_bytes_max",
        "_waiting",
        "_warmed",
        "authentication",
        "began_us",
        "clock",
        "connected_ms",
        "decided_by",
        "decided_for",
        "decisions",
        "frame_started_ms",
        "is_closed",
        "is_muted",
        "is_of_member",
        "last_active_ms",
        "listener",
        "on_closed",
        "peer",
        "principal",
        "usage",
    )

    def __init__(
        self,
        stream: Stream,
        server: Server,
        listener: ListenerDescription,
        principal: Principal,
        authentication: Authentication | None = None,
    ) -> None:
        self._stream = stream
        self._server = server
        self.peer = stream.peer
        self.principal = principal
        # None on listeners without SASL.
        self.authentication = authentication
        self.listener = listener
        self.is_closed = False
        # Over a quota: no request is handled until the delay is over. And what is known of its quotas.
        self.is_muted = False
        self.usage: ClientUsage | None = None
        # A member of a group sends its heartbeats here.
        self.is_of_member = False
        # Called once when the connection has ended.
        self.on_closed: Callable[[], None] | None = None
        self.clock = server.environment.clock
        self.connected_ms = self.last_active_ms = self.clock.now_ms()
        # When the turn began in which the request came that is handled now.
        self.began_us = 0
        # Input.
        self._framer = (
            Framer(server.buffers, server.frame_bytes_max)
            if authentication is None
            else Framer(server.buffers_of_strangers, authentication.token_bytes_max)
        )
        self._is_reading = False
        # When the incomplete frame began; -1 while there is none.
        self.frame_started_ms = -1
        self._client_id_bytes = b""
        self._client_id = ""
        # Requests whose response is not ready, oldest first, and the ready ones behind them.
        self._waiting: deque[Call] = deque()
        # Output.
        self._unsent: deque[Buffer | FileRange] = deque()
        self._unsent_bytes = 0
        self._unsent_bytes_max = UNSENT_BYTES_MAX if authentication is None else UNSENT_BYTES_OF_STRANGERS_MAX
        self._is_writing = False
        self._is_warming = False
        # The range that a thread has just read: it is sent without another check whether it is in memory.
        self._warmed: FileRange | None = None
        # What the client may do, by operation and resource type and then by name: of which version of the ACLs,
        # and for whom.
        self.decisions: dict[int, dict[str, bool]] = {}
        self.decided_by = -1
        self.decided_for = principal
        self._read(True)

    @property
    def authorizer(self) -> Authorizer | None:
        return self._server.authorizer

    @property
    def sasl(self) -> SaslConnections:
        return self._server.sasl

    @property
    def audit(self) -> Audit | None:
        return self._server.audit

    def decide(self, authorizer: Authorizer, operation: int, resource: int, name: str) -> bool:
        """Decide, or remember a decision that still holds."""
        if self.decided_by != authorizer.version or self.decided_for is not self.principal:
            self.decided_by, self.decided_for = authorizer.version, self.principal
            self.decisions.clear()
        known = self.decisions.setdefault(operation << 3 | resource, {})
        decision = known.get(name)
        if decision is None:
            decision = authorizer.allows(self.principal, self.peer, operation, resource, name)
            if len(name) <= DECIDED_NAME_MAX:
                if len(known) >= DECISIONS_MAX:
                    known.clear()
                known[name] = decision
        return decision

    @property
    def is_silent(self) -> bool:
        """Whether no response is pending: the next move is the client's."""
        return not self._waiting and not self.is_muted

    def waiting_apis(self) -> Iterator[int]:
        """Of the requests that wait for their responses."""
        return (call.route.key for call in self._waiting)

    @property
    def partial_bytes(self) -> int:
        return self._framer.partial_bytes

    @property
    def has_pooled_buffer(self) -> bool:
        return self._framer.has_pooled_buffer

    def advance(self) -> None:
        """Send the responses that have become ready, and read on if that made room."""
        waiting = self._waiting
        while waiting and waiting[0].parts is not None:
            self._queue(waiting.popleft().parts)
        self._flush()
        if not self._is_reading and not self.is_closed and not self._is_overloaded():
            self._server.environment.spawn.soon(self._process)

    def authenticated(self, principal: Principal) -> None:
        """The client has proven who it is: it may send requests of any size."""
        self.principal = principal
        self._framer.move(self._server.buffers, self._server.frame_bytes_max)
        self._unsent_bytes_max = UNSENT_BYTES_MAX

    def resume(self) -> None:
        """The buffer pool has a free buffer again."""
        if not self.is_closed:
            self._process()

    def mute(self) -> None:
        """Handle no more requests until ``unmute``. Responses are sent as usual."""
        self.is_muted = True
        # The frame timeout does not run while we do not read.
        self.frame_started_ms = -1
        self._read(False)

    def unmute(self) -> None:
        self.is_muted = False
        if not self.is_closed and not self._is_overloaded():
            self._server.environment.spawn.soon(self._process)

    def refuse(self, reason: str, frame: memoryview | None = None) -> None:
        """Close the connection and log why; ``frame`` is the request that is the reason."""
        self._server.refused(self, reason, request_of(frame))
        self.close()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._stream.close()
        self._framer.close()
        for call in self._waiting:
            if call.parts is None and call.on_abandoned is not None:
                call.on_abandoned()
        self._waiting.clear()
        self._unsent.clear()
        self._server.closed(self)
        if self.on_closed is not None:
            self.on_closed()

    # Input

    def _read(self, wanted: bool) -> None:
        if wanted != self._is_reading:
            self._is_reading = wanted
            self._stream.on_readable(self._readable if wanted else None)

    def _is_overloaded(self) -> bool:
        return (
            self._unsent_bytes > self._unsent_bytes_max
            or len(self._waiting) >= WAITING_CALLS_MAX
            or self.is_muted
            or (self.authentication is not None and self.authentication.is_busy)
        )

    def _readable(self) -> None:
        space = self._framer.space()
        if space is None:
            # Not the client's fault: the frame timeout does not run while we do not read.
            self.frame_started_ms = -1
            self._read(False)
            self._server.wait_for_buffer(self)
            return
        try:
            count = self._stream.recv_into(space)
        except OSError as error:
            self.refuse(f"cannot receive: {error}")
            return
        if count is None:
            self._framer.settle()
            return
        if count == 0:
            self.close()
            return
        self._framer.received(count)
        self._process()

    def _process(self) -> None:
        """Handle the whole frames received so far, at most FRAMES_PER_TURN, then send."""
        if self.is_closed:
            return
        framer = self._framer
        server = self._server
        self.last_active_ms = now_ms = self.clock.now_ms()
        self.began_us = began_us = self.clock.work_us()
        more, took_one = True, False
        frame: memoryview | None = None
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._is_overloaded():
                    break
                frame = framer.next_frame()
                if frame is None:
                    more = False
                    break
                took_one = True
                self._handle(frame)
                if self.is_closed:
                    return
        except DecodeError as error:
            self.refuse(str(error), frame)
            return
        except AssertionError:
            raise  # a broken invariant: continuing could damage stored data
        except Exception:
            server.failed(self, request_of(frame))
            self.close()
            return
        finally:
            if server.requests.answered:
                server.requests.turn_ended(self.clock.work_us() - began_us)
        framer.settle()
        if more or not framer.partial_bytes:
            self.frame_started_ms = -1
        elif self.frame_started_ms < 0 or took_one:
            self.frame_started_ms = now_ms
        self._flush()
        if self.is_closed:
            return
        if not more:
            self._read(True)
            return
        self._read(False)
        if not self._is_overloaded():
            server.environment.spawn.soon(self._process)

    def _handle(self, frame: memoryview) -> None:
        key, version, correlation_id, client_id_size = _header.unpack_from(frame)
        if self.authentication is not None:
            reason = self.authentication.refusal(key, self.last_active_ms)
            if reason is not None:
                self.refuse(reason, frame)
                return
        position = 10
        if client_id_size > 0:
            position += client_id_size
            raw = bytes(frame[10:position])
            if len(raw) != client_id_size:
                raise DecodeError("a client id longer than its frame")
            if raw != self._client_id_bytes:
                self._client_id = raw.decode("utf-8", "replace")
                self._client_id_bytes = raw
        server = self._server
        route = server.route(key, version)
        if route is None:
            self.refuse(f"API {key} version {version} is not served", frame)
            return
        if route.flexible_request:
            position = _skip_tags(frame, position)
        request, _ = route.decode(frame, position)
        call = Call(self, route, correlation_id, self._client_id if client_id_size > 0 else "")
        if route.subject is not None and server.audit is not None:
            call.audited = shown_subject(route.subject(request))
        response = None
        if server.authorizer is not None and route.rights_of_whole:
            response = refusal(call, request)
        if response is None:
            throttling = server.throttling
            if throttling is None or not throttling.limits_requests:
                response = route.handle(server.broker, request, call)
            else:
                response = throttling.timed(server.broker, request, call)
        if response is WAITING:
            if call.parts is None:
                self._waiting.append(call)
                return
        elif call.complete(response):
            counts = route.counts
            if not counts.answered:
                server.requests.answered.append(counts)
            counts.answered += 1
        else:
            return
        if self._waiting:
            self._waiting.append(call)
        else:
            self._queue(call.parts)

    # Output

    def _queue(self, parts: list[Buffer | FileRange] | None) -> None:
        assert parts is not None
        for part in parts:
            if type(part) is not FileRange:
                self._unsent_bytes += len(part)
            self._unsent.append(part)

    def _flush(self) -> None:
        if self._is_warming or self.is_closed:
            return
        try:
            sent_all = self._send()
        except OSError as error:
            self.refuse(f"cannot send: {error}")
            return
        if self._is_writing == sent_all:
            self._is_writing = not sent_all
            self._stream.on_writable(None if sent_all else self._writable)

    def _writable(self) -> None:
        self.last_active_ms = self._server.environment.clock.now_ms()
        self.advance()

    def _send(self) -> bool:
        """Send what the stream accepts; False if it has to be called again when the stream is writable."""
        unsent = self._unsent
        budget = SENT_FILE_BYTES_PER_TURN
        while unsent:
            first = unsent[0]
            if type(first) is FileRange and first.size > GATHERED_RANGE_BYTES:
                if budget <= 0:
                    return False
                size = min(first.size, budget)
                if first is not self._warmed and not first.file.is_warm(first.position, size):
                    self._warm(first, size)
                    return True
                sent = self._stream.send_file(first.file, first.position, size)
                budget -= sent
                if sent == first.size:
                    unsent.popleft()
                elif sent:
                    unsent[0] = FileRange(first.file, first.position + sent, first.size - sent)
                if sent < size:
                    return False
                continue
            buffers = self._gather()
            if buffers is None:
                return True
            sent = self._stream.send(buffers)
            self._unsent_bytes -= sent
            for buffer in buffers:
                if sent < len(buffer):
                    unsent[0] = memoryview(buffer)[sent:]
                    return False
                sent -= len(buffer)
                unsent.popleft()
        return True

    def _gather(self) -> list[Buffer] | None:
        """The buffers at the front, with small file ranges read; None when one has to be warmed first."""
        unsent = self._unsent
        buffers: list[Buffer] = []
        gathered_bytes = 0
        for place, part in enumerate(unsent):
            if type(part) is not FileRange:
                buffers.append(part)  # type: ignore[arg-type]
            elif part.size > GATHERED_RANGE_BYTES:
                break
            else:
                data = part.file.read_now(part.position, part.size)
                if data is None:
                    if part is self._warmed:
                        data = part.file.read_at(part.position, part.size)
                    elif buffers:
                        break
                    else:
                        self._warm(part, part.size)
                        return None
                if len(data) != part.size:
                    raise OSError(f"{part.file.path} is shorter than the range to send")
                unsent[place] = data
                self._unsent_bytes += len(data)
                buffers.append(data)
            gathered_bytes += len(buffers[-1])
            if len(buffers) >= BUFFERS_PER_SEND or gathered_bytes >= GATHERED_BYTES_MAX:
                break
        return buffers

    def _warm(self, part: FileRange, size: int) -> None:
        """Have a thread read a cold range into memory, because the loop must not wait for a disk."""
        self._is_warming = True

        def warmed(_: None, error: Exception | None) -> None:
            self._is_warming = False
            self._warmed = part
            if error is not None:
                self._server.on_read_failed(part.file.path, error)
                self.refuse(f"cannot read: {error}")
            else:
                self.advance()

        self._server.environment.spawn.in_thread(
            part.file.prepare_warming(part.position, size), warmed, lane="read"
        )


def request_of(frame: memoryview | None) -> dict[str, Any]:
    """What the log says of a request, so that it can be found in the log of the client."""
    if frame is None or len(frame) < _header.size:
        return {}
    key, version, correlation_id, client_id_size = _header.unpack_from(frame)
    found = {"api": api_name(key), "version": version, "correlation_id": correlation_id}
    if client_id_size > 0:
        raw = bytes(frame[_header.size : _header.size + client_id_size])
        found["client_id"] = shown_name(raw.decode("utf-8", "replace"))
    return found


def frame_response(call: Call, response: Any) -> list[Buffer | FileRange]:
    """The response as sent on the wire: length, correlation id, and the parts of the body, not copied."""
    parts: list[Buffer | FileRange] = (
        list(response.parts) if type(response) is Encoded else call.route.encode(response)
    )
    size = 4
    for part in parts:
        size += part.size if type(part) is FileRange else len(part)
    if call.route.flexible_response:
        start = _flexible_frame_start(size + 1, call.correlation_id, 0)
    else:
        start = _frame_start(size, call.correlation_id)
    first = parts[0] if parts else b""
    if type(first) is bytes:
        parts[:1] = [start + first]
    else:
        parts.insert(0, start)
    return parts


def _skip_tags(frame: memoryview, position: int) -> int:
    """Skip the tagged fields of a request header. Usually there are none: one zero byte."""
    if position < len(frame) and frame[position] == 0:
        return position + 1
    count, position = _uvarint(frame, position)
    for _ in range(min(count, len(frame))):
        _, position = _uvarint(frame, position)
        size, position = _uvarint(frame, position)
        position += size
        if position > len(frame):
            raise DecodeError("a tagged field longer than its frame")
    return position


def _uvarint(frame: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(frame):
            raise DecodeError("a header that ends in a number")
        byte = frame[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a number of more than five bytes")
