"""Fetching from one leader: builds the fetch requests and turns the responses into effects.

One ``Fetcher`` per leader and number. It holds the partitions that we follow there and uses an incremental fetch
session (KIP-227). At most one request is outstanding, and only its own response is accepted: a delayed or repeated
one may describe an earlier state of the log (trap 5).

A request lists only the partitions that changed since the last one, so ten thousand quiet partitions cost nothing.
If ten thousand are new to the leader, they are spread over several requests, so that no single request keeps
either side busy for long. Three kinds of partition are listed again although they did not change: all of them when
the session is lost; those whose pause has ended; and once a second those that are not in sync, because a leader
forgets a follower's state when the follower leaves the in-sync replicas.

There is no separate step to find where two logs diverge. Every fetch carries the epoch of our last record, also
to a new leader. The leader responds with the point where its own log diverges (KIP-595), and ``truncation_offset``
computes where to cut ours. If that was not far enough, the next fetch continues the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
    ReplicaState,
)
from penstock.replication.events import (
    NO_EPOCH,
    Append,
    Backoff,
    Effect,
    PartitionKey,
    Remove,
    StartOver,
    Truncate,
)

NOT_SENT = -1
UNKNOWN_OFFSET = -1
SESSION_EPOCH_MAX = 2**31 - 1
# Partitions that are not in sync are listed this often, so that the leader can add us to their ISR.
JOIN_INTERVAL_MS = 1_000
# The first pause after a failure; each further one is twice as long, up to ``FetchLimits.backoff_ms``.
BACKOFF_FIRST_MS = 25
# Size of the throttle's bucket, in milliseconds of its rate.
THROTTLE_BURST_MS = 1_000
# At most this many partitions per request that are new to the leader or not in sync. The leader handles them all in
# one turn of its loop, and so do we with its response.
NAMED_MAX = 1_000
# List at least this many that are not in sync, however many others have changed,
REMINDED_MIN = 100
# and at most this many per second.
JOINERS_PER_SECOND = 10_000


class FetchLimits(NamedTuple):
    """Kafka's replica.fetch.* settings and their defaults."""

    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 10 * 1024 * 1024
    partition_max_bytes: int = 1024 * 1024
    backoff_ms: int = 1_000


class _Followed:
    """One partition that we follow, in one leader epoch."""

    __slots__ = (
        "failures",
        "is_in_sync",
        "is_throttled",
        "key",
        "last_epoch",
        "leader_epoch",
        "log_start_offset",
        "offset",
        "sent_offset",
    )

    def __init__(self, key: PartitionKey, leader_epoch: int, is_throttled: bool, is_in_sync: bool) -> None:
        self.key = key
        self.leader_epoch = leader_epoch
        self.is_throttled = is_throttled
        self.is_in_sync = is_in_sync
        # The next fetch offset, and the epoch of the last record before it.
        self.offset = 0
        self.last_epoch = NO_EPOCH
        self.log_start_offset = 0
        # The offset that the leader's session holds. If it differs from ``offset``, the response is stale.
        self.sent_offset = NOT_SENT
        self.failures = 0


class Throttle:
    """A token bucket of bytes for replicas that a reassignment adds. All fetchers of a node share it.

    One response may overdraw it. It is then empty until the deficit is refilled.
    """

    __slots__ = ("_bytes", "_filled_ms", "_rate")

    def __init__(self, bytes_per_second: int | None = None, now_ms: int = 0) -> None:
        self._rate = bytes_per_second
        self._filled_ms = now_ms
        self._bytes = float(bytes_per_second or 0)

    def set_rate(self, bytes_per_second: int | None, now_ms: int) -> None:
        self._fill(now_ms)
        most = float(bytes_per_second or 0)
        self._bytes = most if self._rate is None else min(self._bytes, most)
        self._rate = bytes_per_second

    def take(self, count: int) -> None:
        if self._rate is not None:
            self._bytes -= count

    def wait_ms(self, now_ms: int) -> int:
        """0 when the bucket is not empty."""
        if self._rate is None:
            return 0
        self._fill(now_ms)
        if self._bytes > 0:
            return 0
        return 1 + int(-self._bytes * 1000 / max(1, self._rate))

    def _fill(self, now_ms: int) -> None:
        if self._rate is not None:
            most = self._rate * THROTTLE_BURST_MS / 1000
            self._bytes = min(most, self._bytes + self._rate * (now_ms - self._filled_ms) / 1000)
        self._filled_ms = now_ms


class Fetcher:
    def __init__(
        self, me: int, *, limits: FetchLimits | None = None, throttle: Throttle | None = None
    ) -> None:
        self.me = me
        self.limits = limits or FetchLimits()
        self._throttle = throttle or Throttle()

        # All partitions that we follow.
        self._partitions: dict[PartitionKey, _Followed] = {}
        # Not fetched until the time given.
        self._paused: dict[PartitionKey, int] = {}
        # Not in sync; listed regularly.
        self._joining: dict[PartitionKey, None] = {}
        self._next_join_ms = 0
        # Those of ``_joining`` that are still to be listed in this round.
        self._to_remind: dict[PartitionKey, None] = {}
        # Being added by a reassignment; not fetched while the throttle is empty.
        self._throttled: dict[PartitionKey, None] = {}
        self._is_throttling = False

        # The leader's session. Both 0 before there is one; epoch 0 also when a new one has to begin.
        self._session_id = 0
        self._session_epoch = 0
        # The leader refused a session, or may refuse it: the next request must list every partition.
        self._is_refused = False
        self._in_session: dict[PartitionKey, None] = {}
        # To be listed in the next requests of the session: changed, and no longer fetched.
        self._dirty: dict[PartitionKey, None] = {}
        self._forgotten: dict[PartitionKey, None] = {}

        self._outstanding: FetchRequest | None = None
        # Failures of whole requests in a row, and when to try again.
        self._failures = 0
        self._retry_ms = 0

    def __len__(self) -> int:
        return len(self._partitions)

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._partitions

    @property
    def is_outstanding(self) -> bool:
        return self._outstanding is not None

    @property
    def has_news(self) -> bool:
        """Whether partitions changed since the outstanding request was built."""
        return bool(self._dirty)

    # Followed partitions

    def assign(
        self,
        key: PartitionKey,
        leader_epoch: int,
        offset: int,
        last_epoch: int,
        log_start_offset: int = UNKNOWN_OFFSET,
        *,
        is_in_sync: bool = True,
        is_throttled: bool = False,
    ) -> None:
        """Follow a partition from ``offset`` on. Starts afresh if it was followed under another leader epoch."""
        known = self._partitions.get(key)
        if known is not None and known.leader_epoch == leader_epoch:
            self._mark(known, is_in_sync, is_throttled)
            return
        self.remove(key)
        followed = _Followed(key, leader_epoch, is_throttled, is_in_sync)
        self._partitions[key] = followed
        self._mark(followed, is_in_sync, is_throttled)
        self._moved(followed, offset, last_epoch, log_start_offset)
        # A new leader may be reachable where the old one was not.
        self._retry_ms = 0

    def _mark(self, followed: _Followed, is_in_sync: bool, is_throttled: bool) -> None:
        key = followed.key
        followed.is_in_sync = is_in_sync
        followed.is_throttled = is_throttled
        if is_in_sync:
            self._joining.pop(key, None)
            self._to_remind.pop(key, None)
        else:
            self._joining[key] = None
        if is_throttled and key not in self._throttled:
            self._throttled[key] = None
            if self._is_throttling:
                self._leave_out(key)
        elif not is_throttled and key in self._throttled:
            del self._throttled[key]
            if self._is_throttling and key not in self._paused:
                self._dirty[key] = None

    def remove(self, key: PartitionKey) -> None:
        """Stop following a partition at this leader."""
        if self._partitions.pop(key, None) is None:
            return
        self._paused.pop(key, None)
        self._joining.pop(key, None)
        self._to_remind.pop(key, None)
        self._throttled.pop(key, None)
        self._leave_out(key)

    def moved(
        self, key: PartitionKey, offset: int, last_epoch: int, log_start_offset: int = UNKNOWN_OFFSET
    ) -> None:
        """The state of our log after an effect, or, in flushed mode, after the flush."""
        followed = self._partitions.get(key)
        if followed is not None:
            self._moved(followed, offset, last_epoch, log_start_offset)

    def _moved(self, followed: _Followed, offset: int, last_epoch: int, log_start_offset: int) -> None:
        followed.offset = offset
        followed.last_epoch = last_epoch
        followed.log_start_offset = log_start_offset
        if self._is_fetched(followed.key):
            self._dirty[followed.key] = None

    def failed(self, key: PartitionKey, now_ms: int) -> None:
        """An effect failed: pause the partition."""
        followed = self._partitions.get(key)
        if followed is not None:
            self._pause(followed, now_ms)

    def position(self, key: PartitionKey) -> tuple[int, int] | None:
        """(the next fetch offset, the epoch of the record before it); None when it is not followed."""
        followed = self._partitions.get(key)
        return None if followed is None else (followed.offset, followed.last_epoch)

    def log_start_offset(self, key: PartitionKey) -> int:
        """Our log start offset as sent to the leader; -1 when the partition is not followed."""
        followed = self._partitions.get(key)
        return UNKNOWN_OFFSET if followed is None else followed.log_start_offset

    def leader_epoch(self, key: PartitionKey) -> int:
        """The leader epoch in which a partition is followed here; -1 when it is not."""
        followed = self._partitions.get(key)
        return NO_EPOCH if followed is None else followed.leader_epoch

    # Requests

    def request(self, now_ms: int, broker_epoch: int) -> FetchRequest | None:
        """The request to send now; None while one is outstanding, after a failure, or with nothing to fetch."""
        if self._outstanding is not None or now_ms < self._retry_ms:
            return None
        for key in [key for key, due_ms in self._paused.items() if due_ms <= now_ms]:
            del self._paused[key]
            if self._is_fetched(key):
                self._dirty[key] = None
        self._look_at_throttle(now_ms)
        if len(self._partitions) == len(self._paused) + (
            sum(key not in self._paused for key in self._throttled) if self._is_throttling else 0
        ):
            return None
        if self._joining and not self._to_remind and now_ms >= self._next_join_ms:
            self._next_join_ms = now_ms + max(
                JOIN_INTERVAL_MS, len(self._joining) * 1000 // JOINERS_PER_SECOND
            )
            self._to_remind = dict(self._joining)

        if self._session_epoch == 0:
            self._in_session = {}
            self._dirty = {key: None for key in self._partitions if self._is_fetched(key)}
            self._forgotten = {}
        named = self._choose()
        self._in_session.update(named)
        forgotten: dict[bytes, list[int]] = {}
        for key in self._forgotten:
            if key not in self._in_session:
                forgotten.setdefault(key[0], []).append(key[1])
        topics: dict[bytes, list[FetchPartition]] = {}
        for key in named:
            topic_id, index = key
            partitions = topics.get(topic_id)
            if partitions is None:
                partitions = topics[topic_id] = []
            partitions.append(self._asked(self._partitions[key], index))
        self._forgotten = {}
        request = FetchRequest(
            replica_state=ReplicaState(replica_id=self.me, replica_epoch=broker_epoch),
            # If there are more partitions to list, the response should come back at once.
            max_wait_ms=0 if self._dirty or self._to_remind else self._wait_ms(now_ms),
            min_bytes=self.limits.min_bytes,
            max_bytes=self.limits.max_bytes,
            session_id=self._session_id,
            session_epoch=self._session_epoch,
            topics=[FetchTopic(topic_id=id_, partitions=asked) for id_, asked in topics.items()],
            forgotten_topics_data=[
                ForgottenTopic(topic_id=id_, partitions=indexes) for id_, indexes in forgotten.items()
            ],
        )
        self._outstanding = request
        return request

    def _choose(self) -> dict[PartitionKey, None]:
        """The partitions to list now. The rest waits for the next request."""
        named, self._dirty = self._dirty, {}
        if len(named) > NAMED_MAX and not self._is_refused:
            everyone, named = named, {}
            for key in everyone:
                # Partitions in the session whose offset moved must be listed, or the leader would resend records.
                if len(named) < NAMED_MAX or key in self._in_session:
                    named[key] = None
                else:
                    self._dirty[key] = None
        if self._to_remind:
            for key in named:
                self._to_remind.pop(key, None)
        for key in list(islice(self._to_remind, max(REMINDED_MIN, NAMED_MAX - len(named)))):
            del self._to_remind[key]
            if self._is_fetched(key) and key not in self._dirty:
                named[key] = None
        return named

    def _asked(self, followed: _Followed, index: int) -> FetchPartition:
        followed.sent_offset = followed.offset
        return FetchPartition(
            partition=index,
            current_leader_epoch=followed.leader_epoch,
            fetch_offset=followed.offset,
            last_fetched_epoch=followed.last_epoch,
            log_start_offset=followed.log_start_offset,
            partition_max_bytes=self.limits.partition_max_bytes,
        )

    def retry_ms(self, now_ms: int) -> int | None:
        """When to call ``request`` again after it returned None; None when only an ``assign`` helps."""
        if self._outstanding is not None or not self._partitions:
            return None
        if now_ms < self._retry_ms:
            return self._retry_ms
        if not self._paused and not self._is_throttling:
            return None
        return now_ms + self._wait_ms(now_ms)

    def _wait_ms(self, now_ms: int) -> int:
        """How long the leader may park a request: not beyond the end of a pause."""
        wait_ms = self.limits.max_wait_ms
        if self._paused:
            wait_ms = min(wait_ms, max(0, min(self._paused.values()) - now_ms))
        if self._is_throttling:
            wait_ms = min(wait_ms, self._throttle.wait_ms(now_ms))
        return wait_ms

    # Responses

    def answered(self, request: FetchRequest, response: FetchResponse | None, now_ms: int) -> list[Effect]:
        """The effects of a response; None for no response. Ignored if the request is not the outstanding one."""
        if request is not self._outstanding:
            return []
        self._outstanding = None
        is_full = request.session_epoch == 0
        if (
            response is None
            or response.error_code
            or (not is_full and response.session_id != request.session_id)
        ):
            self._session_lost(response, now_ms)
            return []
        self._failures = 0
        if is_full:
            self._session_id = response.session_id
            self._session_epoch = 1 if response.session_id else 0
            self._is_refused = not response.session_id
        else:
            self._session_epoch = (
                1 if request.session_epoch == SESSION_EPOCH_MAX else request.session_epoch + 1
            )
        if not self._session_id:
            self._in_session = {}
        return list(self._effects(response, now_ms))

    def _session_lost(self, response: FetchResponse | None, now_ms: int) -> None:
        self._session_epoch = 0
        self._in_session = {}
        self._dirty = {}
        self._forgotten = {}
        for followed in self._partitions.values():
            followed.sent_offset = NOT_SENT
        if response is not None and response.error_code in (
            ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
            ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ):
            self._session_id = 0
            # Perhaps the session had no room for all partitions, only for the first ones: list them all at once.
            self._is_refused = self._is_refused or response.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            if not self._failures:
                # The leader is fine and has only dropped the session: retry at once.
                self._failures = 1
                return
        self._failures += 1
        self._retry_ms = now_ms + self._backoff_ms(self._failures)

    def _effects(self, response: FetchResponse, now_ms: int) -> Iterator[Effect]:
        for topic in response.responses:
            for data in topic.partitions:
                followed = self._partitions.get((topic.topic_id, data.partition_index))
                # If removed, reassigned or moved while the request was out, the response is stale.
                if followed is not None and followed.sent_offset == followed.offset:
                    effect = self._effect(followed, data, now_ms)
                    if effect is not None:
                        yield effect

    def _effect(self, followed: _Followed, data: PartitionData, now_ms: int) -> Effect | None:
        key = followed.key
        error = data.error_code
        if error == ErrorCode.NONE:
            diverging = data.diverging_epoch
            if diverging is not None and diverging.end_offset >= 0:
                return Truncate(key, diverging.epoch, diverging.end_offset)
            if data.log_start_offset <= followed.offset:
                followed.failures = 0
                records = data.records
                assert not isinstance(records, list | tuple), "records of a response lie in memory"
                size = len(records) if records else 0
                if size and followed.is_throttled:
                    self._throttle.take(size)
                return Append(
                    key,
                    records or b"",
                    data.high_watermark,
                    data.log_start_offset,
                    (data.replicated_before, data.partition_epoch),
                )
        if (
            error in (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE)
            and data.log_start_offset > followed.offset
        ):
            return StartOver(key, data.log_start_offset)
        if error == ErrorCode.OFFSET_OUT_OF_RANGE and followed.last_epoch == NO_EPOCH:
            # Our log is empty and begins after the leader's end: the election was unclean. If we waited until the
            # leader's log has grown to our offset, we would lack the records below it.
            return StartOver(key, data.log_start_offset)
        if error == ErrorCode.FENCED_LEADER_EPOCH:
            self.remove(key)
            return Remove(key, error)
        self._pause(followed, now_ms)
        return Backoff(key, error)

    # Pauses

    def _pause(self, followed: _Followed, now_ms: int) -> None:
        followed.failures += 1
        self._paused[followed.key] = now_ms + self._backoff_ms(followed.failures)
        self._leave_out(followed.key)

    def _backoff_ms(self, failures: int) -> int:
        return min(self.limits.backoff_ms, BACKOFF_FIRST_MS << min(failures - 1, 10))

    def _leave_out(self, key: PartitionKey) -> None:
        """Leave a partition out of the next request and remove it from the session."""
        self._dirty.pop(key, None)
        followed = self._partitions.get(key)
        if followed is not None:
            followed.sent_offset = NOT_SENT
        if key in self._in_session:
            del self._in_session[key]
            self._forgotten[key] = None

    def _is_fetched(self, key: PartitionKey) -> bool:
        return key not in self._paused and not (self._is_throttling and key in self._throttled)

    def _look_at_throttle(self, now_ms: int) -> None:
        if not self._throttled:
            self._is_throttling = False
            return
        is_empty = self._throttle.wait_ms(now_ms) > 0
        if is_empty == self._is_throttling:
            return
        self._is_throttling = is_empty
        for key in self._throttled:
            if is_empty:
                self._leave_out(key)
            elif key not in self._paused:
                self._dirty[key] = None

    def check(self) -> None:
        for key, followed in self._partitions.items():
            assert followed.key == key
            assert (key in self._joining) == (not followed.is_in_sync)
            assert (key in self._throttled) == followed.is_throttled
        assert all(key in self._joining for key in self._to_remind)
        for few in (self._paused, self._joining, self._throttled, self._in_session, self._dirty):
            assert all(key in self._partitions for key in few)
        for key in self._dirty:
            assert self._is_fetched(key), "a paused partition is not asked for"
        for key in self._in_session:
            assert self._is_fetched(key)
            assert key not in self._forgotten
        if self._session_epoch:
            assert self._session_id
            for key in self._partitions:
                assert not self._is_fetched(key) or key in self._in_session or key in self._dirty
                followed = self._partitions[key]
                if key in self._in_session and key not in self._dirty:
                    assert followed.sent_offset == followed.offset, "the leader knows another offset"
        assert self._outstanding is None or self._partitions or not self._in_session


def truncation_offset(
    diverging_epoch: int,
    diverging_end: int,
    own_end_offset_for: Callable[[int], tuple[int, int]],
    own_end: int,
) -> int:
    """Where to truncate our log. In the leader's log, ``diverging_epoch`` ends at ``diverging_end``.

    ``own_end_offset_for(epoch)`` gives our log's (largest epoch at most that, its end), or (-1, -1). If our log
    does not have the leader's epoch, it is cut at the end of the largest smaller one, and the next fetch compares
    again (KIP-279): two logs may have diverged more than once.
    """
    own_epoch, own_epoch_end = own_end_offset_for(diverging_epoch)
    if own_epoch_end < 0:
        # Our log has no comparable epoch: only the leader's end is known.
        return min(diverging_end, own_end)
    if own_epoch != diverging_epoch:
        return min(own_epoch_end, own_end)
    return min(own_epoch_end, diverging_end, own_end)
