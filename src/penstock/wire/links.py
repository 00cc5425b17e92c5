"""Connections to brokers, without sockets: requests in flight, their versions and timeouts.

A link is one connection to an address on a channel. Its states:

    CONNECTING      the shell was told to connect
    GREETING        connected; ApiVersions was sent, and requests wait for its response
    AUTHENTICATING  with SASL only: SaslHandshake or SaslAuthenticate was sent, and requests still wait
    READY           requests are sent at once, responses come in the same order
    gone            closed, refused or silent for too long; all its requests fail

It never goes back: the next request gets a new link. The shell carries out ``effects`` in order and reports with
``connected``, ``received`` and ``lost``.

A broker may end the session of an authenticated connection after some time (KIP-368). A request that comes late
in the session first makes the link authenticate again: it stays READY, the responses of earlier requests arrive,
and new requests wait.

Channels exist because a broker answers in order: metadata must not wait behind a fetch that waits for records. A
``Lane`` is a further connection of a channel, for requests that would wait for each other. A failure says whether
the request may have been executed. A request that was never sent can always be repeated; one that was sent only if
repeating it is harmless.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple, TypeAlias

import penstock
from penstock.environment import Buffer
from penstock.protocol.apis import API_VERSIONS, APIS, Api
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.requests import CORRELATION_BYTES, InFlight
from penstock.protocol.schema import VERSION_MAX, Message
from penstock.sasl.client import SaslClient
from penstock.wire.authentication import HANDSHAKE, HANDSHAKE_VERSION_MIN, Authentication, Denied
from penstock.wire.frames import FRAME_BYTES_MAX, Buffers, Inbox

# Connecting and greeting together. A dead host, unlike a dead process, never answers at all.
CONNECT_TIMEOUT_MS = 10_000
RECONNECT_MS = 50
RECONNECT_MS_MAX = 1_000
# The first version with the client's name; every broker since Kafka 2.4 supports it.
GREETING_VERSION = 3
# The parts of a session after which a link authenticates again, as in Java's client.
SESSION_PART_MIN, SESSION_PART_MAX = 0.85, 0.95
# After this many it is not a broker that happens to stop.
CLOSED_AT_ONCE_MAX = 3

_error_of = Struct(">h").unpack_from


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Channel(Enum):
    CONTROL = auto()
    FETCH = auto()
    PRODUCE = auto()


class Lane(NamedTuple):
    channel: Channel
    number: int


# Effects for the shell


@dataclass(frozen=True, slots=True)
class Connect:
    link: int
    address: Address


@dataclass(frozen=True, slots=True)
class Send:
    link: int
    buffers: list[Buffer]


@dataclass(frozen=True, slots=True)
class Disconnect:
    link: int


Effect: TypeAlias = Connect | Send | Disconnect


# Requests and outcomes


class Ask(NamedTuple):
    key: int
    # Builds the message for the negotiated version.
    build: Callable[[int], Message]
    # The newest version that ``build`` supports, if not the protocol's newest.
    version_max: int = VERSION_MAX
    # The oldest version in which the request has the intended meaning.
    version_min: int = 0
    # Added to the client's request timeout: how long the broker may wait before it answers.
    patience_ms: int = 0


class Answered(NamedTuple):
    message: Any
    version: int


class Failed(NamedTuple):
    why: str
    # The request was sent, and its outcome is unknown.
    may_be_done: bool
    # The broker does not support this API, or the request cannot be encoded: a retry cannot succeed.
    is_unsupported: bool = False
    # TLS with the broker failed, which a retry would not change soon.
    is_tls: bool = False
    # The broker does not accept the user, or not in this way.
    is_denied: bool = False


Answer: TypeAlias = Answered | Failed
Done: TypeAlias = Callable[[Answer], None]


class State(Enum):
    CONNECTING = auto()
    GREETING = auto()
    AUTHENTICATING = auto()
    READY = auto()


@dataclass(slots=True)
class _Asked:
    ask: Ask
    done: Done
    # Set when it is sent.
    version: int = -1
    sent_ms: int = -1


class Link:
    __slots__ = (
        "address",
        "authenticate_at_ms",
        "authentication",
        "begun_ms",
        "channel",
        "has_answered",
        "heard_ms",
        "id",
        "in_flight",
        "inbox",
        "state",
        "versions",
        "waiting",
    )

    def __init__(
        self,
        link_id: int,
        address: Address,
        channel: Channel | Lane,
        inbox: Inbox,
        in_flight: InFlight[_Asked],
        now_ms: int,
    ) -> None:
        self.id = link_id
        self.address = address
        self.channel = channel
        self.state = State.CONNECTING
        self.inbox = inbox
        self.begun_ms = now_ms
        # When bytes last arrived: a large response may take longer than any timeout without being silence.
        self.heard_ms = now_ms
        # API key -> (oldest, newest) version of the broker. Empty until READY.
        self.versions: dict[int, tuple[int, int]] = {}
        self.in_flight = in_flight
        # A request was answered since the link became READY.
        self.has_answered = False
        # Under way: the first one, or another one of a READY link.
        self.authentication: Authentication | None = None
        # From then on a request has to wait for another authentication. None: the session has no end.
        self.authenticate_at_ms: int | None = None
        # Not sent yet, because the link is not READY or authenticates again.
        self.waiting: deque[_Asked] = deque()


class _Failures:
    """Failures of one address since its last answer."""

    __slots__ = ("count", "is_denied", "is_tls", "no_attempt_before_ms", "why")

    def __init__(self) -> None:
        self.count = 0
        self.is_denied = False
        self.is_tls = False
        self.no_attempt_before_ms = 0
        self.why = ""


class Links:
    def __init__(
        self,
        client_id: str,
        chance: random.Random,
        *,
        request_timeout_ms: int,
        sasl: SaslClient | None = None,
        has_tls: bool = False,
    ) -> None:
        """With ``sasl`` every link authenticates. ``has_tls`` is for errors."""
        self._client_id = client_id.encode()
        self._chance = chance
        self._request_timeout_ms = request_timeout_ms
        self._sasl = sasl
        self._has_tls = has_tls
        self._buffers = Buffers()
        self._by_id: dict[int, Link] = {}
        self._by_place: dict[tuple[Address, Channel | Lane], Link] = {}
        self._failures: dict[Address, _Failures] = {}
        # How often each address closed a connection instead of answering the first request. 0: it has answered one.
        self._closed_at_once: dict[Address, int] = {}
        self._links_made = 0
        self.effects: list[Effect] = []
        # Whether any broker has ever answered.
        self.has_contact = False
        # The cluster's finalized features (KIP-584) and their epoch, which grows with every change.
        self.features: dict[str, int] = {}
        self._features_epoch = -1

    # For the core

    def ask(self, address: Address, channel: Channel | Lane, ask: Ask, now_ms: int, done: Done) -> None:
        """Send a request. ``done`` is called once, perhaps before this returns."""
        link = self._by_place.get((address, channel))
        if link is None:
            failures = self._failures.get(address)
            if failures is not None and now_ms < failures.no_attempt_before_ms:
                done(
                    Failed(
                        failures.why, may_be_done=False, is_tls=failures.is_tls, is_denied=failures.is_denied
                    )
                )
                return
            link = self._open(address, channel, now_ms)
        asked = _Asked(ask, done)
        at_ms = link.authenticate_at_ms
        if at_ms is not None and now_ms >= at_ms and link.authentication is None:
            link.waiting.append(asked)
            self._authenticate(link, now_ms)
        elif link.state is State.READY and link.authentication is None:
            self._send(link, asked, now_ms)
        else:
            link.waiting.append(asked)

    def doubts(self, address: Address, channel: Channel | Lane) -> int:
        """How doubtful an answer from there is: 0 connected, 1 unknown, 2 failed recently."""
        link = self._by_place.get((address, channel))
        if link is not None and link.state is State.READY:
            return 0
        return 2 if address in self._failures else 1

    def hang_up(self, lane: Lane) -> None:
        """Nobody needs the lane any more: end its connections."""
        for link in [link for link in self._by_id.values() if link.channel == lane]:
            self._end(link, "the connection is not needed any more")

    def close(self) -> None:
        for link in list(self._by_id.values()):
            self._end(link, "the client was closed")

    # Events from the shell

    def connected(self, link_id: int, now_ms: int) -> None:
        link = self._by_id.get(link_id)
        if link is None:
            return
        assert link.state is State.CONNECTING, link.state
        link.state = State.GREETING
        link.heard_ms = now_ms
        self._greet(link, GREETING_VERSION, now_ms)

    def space(self, link_id: int) -> memoryview | None:
        """Where to receive; None when the link is gone."""
        link = self._by_id.get(link_id)
        return None if link is None else link.inbox.space()

    def received(self, link_id: int, count: int, now_ms: int) -> None:
        link = self._by_id.get(link_id)
        if link is None:
            return
        link.heard_ms = now_ms
        try:
            for frame in link.inbox.received(count):
                self._take(link, frame, now_ms)
                if link_id not in self._by_id:
                    return
        except DecodeError as error:
            if link.state in (State.AUTHENTICATING, State.READY):
                self._fail(link, f"{link.address} sent bytes that break the protocol: {error}", now_ms)
            else:
                self._fail(
                    link,
                    f"{link.address} is not a plaintext Kafka broker; does it use TLS (security.protocol=ssl), "
                    "or is it another service?",
                    now_ms,
                )

    def lost(self, link_id: int, why: str, now_ms: int, *, is_tls: bool = False) -> None:
        """The connection failed or has ended; with ``is_tls``, one side refused the other."""
        link = self._by_id.get(link_id)
        if link is None:
            return
        is_denied = False
        if self._sasl is None and link.state is State.READY and self._wants_sasl(link):
            protocol = "sasl_ssl" if self._has_tls else "sasl_plaintext"
            why += f"; does the listener want a user and password (security.protocol={protocol})?"
            is_denied = self._closed_at_once[link.address] >= CLOSED_AT_ONCE_MAX
        elif link.authentication is not None:
            assert self._sasl is not None
            why += f", while {self._sasl.settings.who} was authenticated"
        self._fail(link, f"{link.address}: {why}", now_ms, is_tls=is_tls, is_denied=is_denied)

    def tick(self, now_ms: int) -> None:
        for link in list(self._by_id.values()):
            due_ms = self._due_ms(link)
            if due_ms is not None and due_ms <= now_ms and link.id in self._by_id:
                self._fell_silent(link, now_ms)

    def slept(self, ms: int) -> None:
        """The sockets were not read for this long, so it does not count as silence."""
        for link in self._by_id.values():
            link.begun_ms += ms
            link.heard_ms += ms

    def due_ms(self) -> int | None:
        """When ``tick`` will have something to do, if no event comes before."""
        return min((due for due in map(self._due_ms, self._by_id.values()) if due is not None), default=None)

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        assert len(self._by_id) == len(self._by_place)
        for place, link in self._by_place.items():
            assert self._by_id[link.id] is link and place == (link.address, link.channel)
            if link.state is State.READY:
                assert not link.waiting or link.authentication, "no request waits on a ready link"
                assert link.versions
            else:
                sent = link.state is not State.CONNECTING
                assert len(link.in_flight) == sent, "only the greeting, or a step of SASL, was sent"
                assert (link.authentication is not None) == (link.state is State.AUTHENTICATING)
            link.in_flight.check()

    # Private

    def _open(self, address: Address, channel: Channel | Lane, now_ms: int) -> Link:
        self._links_made += 1
        inbox, in_flight = Inbox(self._buffers), InFlight[_Asked](self._client_id)
        link = Link(self._links_made, address, channel, inbox, in_flight, now_ms)
        self._by_id[link.id] = self._by_place[address, channel] = link
        self.effects.append(Connect(link.id, address))
        return link

    def _greet(self, link: Link, version: int, now_ms: int) -> None:
        message = ApiVersionsRequest(
            client_software_name="penstock-wire", client_software_version=penstock.__version__
        )
        greeting = _Asked(Ask(API_VERSIONS, lambda _: message), lambda _: None, version)
        self._transmit(link, greeting, APIS[API_VERSIONS], message, now_ms)

    def _send(self, link: Link, asked: _Asked, now_ms: int) -> None:
        api = APIS[asked.ask.key]
        oldest, newest = link.versions.get(api.key, (0, -1))
        asked.version = min(newest, api.version_max, asked.ask.version_max)
        if asked.version < max(oldest, api.version_min, asked.ask.version_min):
            why = (
                f"the broker at {link.address} supports {api.name} versions {oldest} to {newest}, "
                "none of which works here; use another release of the broker"
                if newest >= 0
                else f"the broker at {link.address} does not support {api.name}"
            )
            asked.done(Failed(why, may_be_done=False, is_unsupported=True))
            return
        try:
            self._transmit(link, asked, api, asked.ask.build(asked.version), now_ms)
        except (StructError, ValueError, OverflowError) as error:
            # The caller passed a number that does not fit its field. Other requests on this link must go on.
            why = f"cannot encode the request {api.name}: {error}"
            asked.done(Failed(why, may_be_done=False, is_unsupported=True))

    def _transmit(self, link: Link, asked: _Asked, api: Api, message: Message, now_ms: int) -> None:
        buffers = link.in_flight.add(api, asked.version, message, asked)
        asked.sent_ms = now_ms
        self.effects.append(Send(link.id, buffers))

    def _take(self, link: Link, frame: memoryview, now_ms: int) -> None:
        if link.state is State.GREETING:
            self._greeted(link, frame, now_ms)
            return
        asked, message = link.in_flight.answered(frame)
        if link.state is State.READY and not link.has_answered:
            link.has_answered = True
            self._closed_at_once[link.address] = 0
        asked.done(Answered(message, asked.version))

    def _greeted(self, link: Link, frame: memoryview, now_ms: int) -> None:
        link.in_flight.check_answer(frame)
        if len(frame) < 6:
            raise DecodeError("a greeting that is cut short")
        if _error_of(frame, CORRELATION_BYTES)[0] == ErrorCode.UNSUPPORTED_VERSION:
            if link.in_flight.oldest().version == 0:
                raise DecodeError("a broker without ApiVersions")
            # It answers in version 0, in which we ask again (KIP-511).
            link.in_flight.drop_oldest()
            self._greet(link, 0, now_ms)
            return
        _, message = link.in_flight.answered(frame)
        if message.error_code or not message.api_keys:
            raise DecodeError("a broker that does not say its versions")
        link.versions = {each.api_key: (each.min_version, each.max_version) for each in message.api_keys}
        if message.finalized_features_epoch >= self._features_epoch:
            self._features_epoch = message.finalized_features_epoch
            self.features = {each.name: each.max_version_level for each in message.finalized_features}
        if self._sasl is None:
            self._become_ready(link, now_ms)
        else:
            link.state = State.AUTHENTICATING
            self._authenticate(link, now_ms)

    def _become_ready(self, link: Link, now_ms: int) -> None:
        link.state = State.READY
        link.inbox.frame_bytes_max = FRAME_BYTES_MAX
        self.has_contact = True
        self._failures.pop(link.address, None)
        self._send_waiting(link, now_ms)

    def _send_waiting(self, link: Link, now_ms: int) -> None:
        waiting, link.waiting = link.waiting, deque()
        for each in waiting:
            self._send(link, each, now_ms)

    def _authenticate(self, link: Link, now_ms: int) -> None:
        """Send the first request of an authentication; the others follow from the answers."""
        assert self._sasl is not None
        link.authentication = authentication = Authentication(self._sasl, has_tls=self._has_tls)
        self._send_step(link, authentication, authentication.begin(), now_ms)

    def _send_step(self, link: Link, authentication: Authentication, message: Message, now_ms: int) -> None:
        version_min = HANDSHAKE_VERSION_MIN if message.KEY == HANDSHAKE else 0
        ask = Ask(message.KEY, lambda _: message, version_min=version_min)
        self._send(
            link, _Asked(ask, lambda answer: self._stepped(link, authentication, answer, now_ms)), now_ms
        )

    def _stepped(self, link: Link, authentication: Authentication, answer: Answer, sent_ms: int) -> None:
        if link.id not in self._by_id:
            # It ended meanwhile.
            return
        now_ms = link.heard_ms
        if isinstance(answer, Failed):
            self._fail(link, f"{link.address}: {authentication.unsupported}", now_ms, is_denied=True)
            return
        try:
            following = authentication.step(answer.message)
        except Denied as denied:
            self._fail(link, f"{link.address}: {denied}", now_ms, is_denied=denied.is_final)
            return
        if following is not None:
            self._send_step(link, authentication, following, now_ms)
            return
        link.authentication = None
        link.authenticate_at_ms = None
        if authentication.lifetime_ms:
            # Of the session the broker knows when it began, which was after this request was sent.
            part = self._chance.uniform(SESSION_PART_MIN, SESSION_PART_MAX)
            link.authenticate_at_ms = sent_ms + int(authentication.lifetime_ms * part)
        if link.state is State.READY:
            self._send_waiting(link, now_ms)
        else:
            self._become_ready(link, now_ms)

    def _wants_sasl(self, link: Link) -> bool:
        """Whether a lost link looks like that: a broker closes when a stranger asks for more than ApiVersions."""
        if link.has_answered or not link.in_flight or self._closed_at_once.get(link.address) == 0:
            return False
        self._closed_at_once[link.address] = self._closed_at_once.get(link.address, 0) + 1
        return True

    def _due_ms(self, link: Link) -> int | None:
        if link.state is not State.READY:
            return link.begun_ms + CONNECT_TIMEOUT_MS
        if not link.in_flight:
            return None
        first = link.in_flight.oldest()
        return max(first.sent_ms, link.heard_ms) + self._request_timeout_ms + first.ask.patience_ms

    def _fell_silent(self, link: Link, now_ms: int) -> None:
        """Fail the link, and the address's other channels that have been silent as long."""
        silent_s = (now_ms - max(link.heard_ms, link.begun_ms)) / 1000
        why = f"{link.address} has been silent for {silent_s:.0f} s"
        since_ms = max(link.heard_ms, link.in_flight.oldest().sent_ms) if link.in_flight else link.heard_ms
        self._fail(link, why, now_ms)
        self._failures.setdefault(link.address, _Failures()).why = why
        for other in list(self._by_id.values()):
            if other.address == link.address and other.state is State.READY and other.heard_ms <= since_ms:
                self._end(other, why)

    def _fail(
        self, link: Link, why: str, now_ms: int, *, is_tls: bool = False, is_denied: bool = False
    ) -> None:
        if link.state is not State.READY:
            failures = self._failures.setdefault(link.address, _Failures())
            failures.count += 1
            failures.why, failures.is_tls, failures.is_denied = why, is_tls, is_denied
            delay_ms = min(RECONNECT_MS_MAX, RECONNECT_MS * 2 ** min(failures.count - 1, 10))
            # Clients that lost the same broker at the same time should not reconnect at the same time.
            failures.no_attempt_before_ms = now_ms + int(delay_ms * self._chance.uniform(0.8, 1.2))
        self._end(link, why, is_tls=is_tls, is_denied=is_denied)

    def _end(self, link: Link, why: str, *, is_tls: bool = False, is_denied: bool = False) -> None:
        del self._by_id[link.id], self._by_place[link.address, link.channel]
        self.effects.append(Disconnect(link.id))
        asked, waiting = link.in_flight.clear(), list(link.waiting)
        link.waiting.clear()
        for each in asked:
            each.done(Failed(why, may_be_done=True, is_tls=is_tls, is_denied=is_denied))
        for each in waiting:
            each.done(Failed(why, may_be_done=False, is_tls=is_tls, is_denied=is_denied))
