"""Fetch requests that many fetches share, so that no long poll makes another fetch wait.

A broker answers the requests of one connection in order, and a fetch at the end of a log is answered late. So a
fetch goes two ways:

    asked       in a request that does not wait, on the channel for fetches, together with all others of that moment
    waiting     at the end of the log: in a long poll on a lane of its own, together with all others that wait

A long poll cannot be taken back or added to. A fetch that begins to wait while every lane has one in flight is
asked again every RECHECK_MS until a lane is free, so that is how late it can be. When a long poll is over, the
lane rests for GATHER_MS: readers that got records are about to come back, and should share the next one.

Fetches of the same partition and offset share its place in the request, and the records: many readers wait at the
end of one log. A response may leave a partition out because others filled it. Then its end of the log is behind
the offset, and the partition is asked for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from penstock.model import NO_TOPIC_ID, TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from penstock.protocol.schema import VERSION_MAX
from penstock.wire.core import Core
from penstock.wire.links import Address, Answer, Answered, Ask, Channel, Done, Failed, Lane

FETCH = 1
# From this version on Fetch identifies topics by id (KIP-516).
FETCH_BY_ID = 13
# Connections to each broker for long polls.
LANES = 2
# The longest wait of one request. A caller that waits longer is in several.
POLL_MS_MAX = 500
RECHECK_MS = 50
GATHER_MS = 5
# Of one response, unless a single fetch asks for more.
RESPONSE_BYTES = 8 * 1024 * 1024
# Requests that do not wait, in flight to one broker.
ASKED_MAX = 4


class FetchSettings(NamedTuple):
    bytes_max: int = 8 * 1024 * 1024
    wait_ms: int = 500
    bytes_min: int = 1
    read_committed: bool = False


class Want(NamedTuple):
    """One fetch: a partition at its leader, from an offset on."""

    address: Address
    at: TopicPartition
    topic_id: bytes
    offset: int
    leader_epoch: int
    settings: FetchSettings


def fetch_ask(topics: list[FetchTopic], settings: FetchSettings, wait_ms: int) -> Ask:
    message = FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=settings.bytes_min,
        max_bytes=settings.bytes_max,
        isolation_level=int(settings.read_committed),
        topics=topics,
    )
    has_ids = all(topic.topic_id != NO_TOPIC_ID for topic in topics)
    version_max = VERSION_MAX if has_ids else FETCH_BY_ID - 1
    return Ask(FETCH, lambda _: message, version_max, patience_ms=wait_ms)


class _Fetch:
    __slots__ = ("ask_at_ms", "done", "due_ms", "want")

    def __init__(self, want: Want, done: Done, now_ms: int) -> None:
        self.want = want
        self.done = done
        # When the caller has waited long enough.
        self.due_ms = now_ms + want.settings.wait_ms
        # If it waits and no lane is free.
        self.ask_at_ms = 0


Together: TypeAlias = dict[TopicPartition, list[_Fetch]]


class _Broker:
    """The fetches at one broker, by isolation level."""

    def __init__(self, address: Address, read_committed: bool) -> None:
        self.address = address
        self.read_committed = read_committed
        # To be asked, in order.
        self.new: deque[_Fetch] = deque()
        self.asked = 0
        # At the end of the log.
        self.waiting: deque[_Fetch] = deque()
        # The lanes with a long poll in flight, and when each other lane may have the next.
        self.polls: set[int] = set()
        self.rests_until_ms = [0] * LANES
        self.in_flight = 0

    def free_lane(self, now_ms: int) -> int | None:
        return next(
            (lane for lane in range(LANES) if lane not in self.polls and self.rests_until_ms[lane] <= now_ms),
            None,
        )


class Polling:
    """A ``Participant`` of the core. ``add`` is what an ``Errand`` begins."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._brokers: dict[tuple[Address, bool], _Broker] = {}
        core.participants.append(self)

    def add(self, want: Want, done: Done) -> None:
        """``done`` gets a response with this partition alone, or the failure of the request."""
        key = (want.address, want.settings.read_committed)
        broker = self._brokers.get(key)
        if broker is None:
            broker = self._brokers[key] = _Broker(*key)
        broker.new.append(_Fetch(want, done, self._core.now_ms))

    # Participant

    def step(self) -> None:
        now_ms = self._core.now_ms
        for key, broker in list(self._brokers.items()):
            self._step(broker, now_ms)
            if not broker.new and not broker.waiting and not broker.in_flight:
                del self._brokers[key]

    def due_ms(self) -> int | None:
        now_ms = self._core.now_ms
        times: list[int] = []
        for broker in self._brokers.values():
            if broker.waiting:
                times += (each.due_ms for each in broker.waiting)
                if len(broker.polls) == LANES:
                    times += (each.ask_at_ms for each in broker.waiting)
                else:
                    times += (until for until in broker.rests_until_ms if until > now_ms)
        return min(times, default=None)

    def slept(self, ms: int) -> None:
        pass

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        for broker in self._brokers.values():
            assert broker.in_flight == broker.asked + len(broker.polls)
            assert 0 <= broker.asked <= ASKED_MAX and all(0 <= lane < LANES for lane in broker.polls)
            assert not broker.new or broker.asked == ASKED_MAX, "what can be asked is asked"

    # Private

    def _step(self, broker: _Broker, now_ms: int) -> None:
        waiting, broker.waiting = broker.waiting, deque()
        may_ask_again = len(broker.polls) == LANES
        for each in waiting:
            if each.due_ms <= now_ms or (may_ask_again and each.ask_at_ms <= now_ms):
                broker.new.append(each)
            else:
                broker.waiting.append(each)
        while broker.new and broker.asked < ASKED_MAX:
            together, broker.new = _together(broker.new)
            broker.asked += 1
            self._ask(broker, together, Channel.FETCH, 0)
        lane = broker.free_lane(now_ms)
        if broker.waiting and lane is not None:
            together, broker.waiting = _together(broker.waiting)
            shortest_ms = min(each.due_ms for fetches in together.values() for each in fetches) - now_ms
            broker.polls.add(lane)
            self._ask(broker, together, Lane(Channel.FETCH, lane), min(POLL_MS_MAX, shortest_ms))

    def _ask(self, broker: _Broker, together: Together, channel: Channel | Lane, wait_ms: int) -> None:
        broker.in_flight += 1
        by_topic: dict[str, FetchTopic] = {}
        bytes_max = RESPONSE_BYTES
        for at, fetches in together.items():
            want = fetches[0].want
            partition_bytes = max(each.want.settings.bytes_max for each in fetches)
            bytes_max = max(bytes_max, partition_bytes)
            topic = by_topic.get(at.topic)
            if topic is None:
                topic = by_topic[at.topic] = FetchTopic(topic=at.topic, topic_id=want.topic_id, partitions=[])
            topic.partitions.append(
                FetchPartition(
                    partition=at.partition,
                    current_leader_epoch=want.leader_epoch,
                    fetch_offset=want.offset,
                    partition_max_bytes=partition_bytes,
                )
            )
        settings = FetchSettings(bytes_max, wait_ms, 1, broker.read_committed)
        self._core.links.ask(
            broker.address,
            channel,
            fetch_ask(list(by_topic.values()), settings, wait_ms),
            self._core.now_ms,
            lambda answer: self._answered(broker, together, channel, answer),
        )

    def _answered(self, broker: _Broker, together: Together, channel: Channel | Lane, answer: Answer) -> None:
        now_ms = self._core.now_ms
        broker.in_flight -= 1
        if isinstance(channel, Lane):
            broker.polls.remove(channel.number)
            broker.rests_until_ms[channel.number] = now_ms + GATHER_MS
        else:
            broker.asked -= 1
        if isinstance(answer, Failed):
            for fetches in together.values():
                for each in fetches:
                    each.done(answer)
            return
        response = answer.message
        by_id = answer.version >= FETCH_BY_ID
        names = {fetches[0].want.topic_id: at.topic for at, fetches in together.items()}
        left = dict(together)
        for topic in response.responses:
            name = names.get(topic.topic_id, "") if by_id else topic.topic
            for data in topic.partitions:
                single = FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=[data])
                for each in left.pop(TopicPartition(name, data.partition_index), ()):
                    if not self._is_at_end(broker, each, data, now_ms):
                        each.done(_single(response, [single], answer.version))
        for fetches in left.values():
            for each in fetches:
                each.done(_single(response, [], answer.version))

    def _is_at_end(self, broker: _Broker, each: _Fetch, data: Any, now_ms: int) -> bool:
        """Whether there is nothing to tell the caller yet; then the fetch goes on."""
        if data.error_code != ErrorCode.NONE or data.records:
            return False
        end = data.last_stable_offset if broker.read_committed else data.high_watermark
        if end > each.want.offset:
            # Others filled the response.
            broker.new.append(each)
            return True
        if each.due_ms <= now_ms:
            return False
        each.ask_at_ms = now_ms + RECHECK_MS
        broker.waiting.append(each)
        return True


def _together(fetches: deque[_Fetch]) -> tuple[Together, deque[_Fetch]]:
    """The fetches that fit in one request, and the others: a partition has one offset there, and a name one id."""
    together: Together = {}
    ids: dict[str, bytes] = {}
    left: deque[_Fetch] = deque()
    for each in fetches:
        want = each.want
        if ids.setdefault(want.at.topic, want.topic_id) != want.topic_id:
            left.append(each)
            continue
        others = together.setdefault(want.at, [])
        if not others or others[0].want.offset == want.offset:
            others.append(each)
        else:
            left.append(each)
    return together, left


def _single(response: Any, responses: Iterable[FetchableTopicResponse], version: int) -> Answered:
    return Answered(
        FetchResponse(
            throttle_time_ms=response.throttle_time_ms,
            error_code=response.error_code,
            responses=list(responses),
            node_endpoints=response.node_endpoints,
        ),
        version,
    )
