"""Fetching from one leader: which partitions, from where, and what its answers mean for each of them.

One ``Fetcher`` per leader and number. It keeps the partitions that we follow there, builds the requests of an
incremental fetch session (KIP-227) and turns each response into effects. At most one request is outstanding,
and only its own response is taken: one that was delayed or repeated says things that were true of another
log (trap 5).

A request names what changed since the last one, so ten thousand quiet partitions cost nothing. Ten thousand
that are new to the leader are named some at a time, so that no single request keeps either side busy for long.
Three kinds of partition are named again though nothing of theirs changed: all of them when the session is
lost; those that are back from a pause; and once a second those that are not in sync, because what a leader
knows of a follower it forgets when the follower drops out.

What a newcomer gets wrong: there is no separate step of finding out where two logs part. Every fetch carries
the epoch of the last record we have, whoever leads and whether or not it led before; the leader answers with
where its own log parts from that (KIP-595), and ``truncation_offset`` says how much of ours must go. If that
was not enough, the next fetch says so.
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
# A follower that is not in sync is named this often, so that the leader can let it in.
JOIN_INTERVAL_MS = 1_000
# The first pause after a failure; each further one is twice as long, up to ``FetchLimits.backoff_ms``.
BACKOFF_FIRST_MS = 25
# How much of a second's throttled bytes may be used at once.
THROTTLE_BURST_MS = 1_000
# How many one request names that the leader does not know, or has merely to be reminded of. It looks at all of
# them in one turn of its loop, and so do we at what it answers.
NAMED_MAX = 1_000
# However much has moved, it is reminded of some.
REMINDED_MIN = 100
# And of so many in a second at the most.
JOINERS_PER_SECOND = 10_000


class FetchLimits(NamedTuple):
    """Kafka's replica.fetch.* settings and their defaults."""

    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 10 * 1024 * 1024
    partition_max_bytes: int = 1024 * 1024
    backoff_ms: int = 1_000


class _Followed:
    """One partition that we follow, as long as its leader epoch lasts."""

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
        # Where to go on, and the epoch of the last record before it.
        self.offset = 0
        self.last_epoch = NO_EPOCH
        self.log_start_offset = 0
        # What the leader's session knows of ``offset``. Answers to anything else are not for us.
        self.sent_offset = NOT_SENT
        self.failures = 0


class Throttle:
    """A bucket of bytes for replicas that are being added by a reassignment; shared by all fetchers of a node.

    It may be overdrawn by one response, and is then empty until that has been made up for.
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
        """0 when there is something to take."""
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

        # What we follow. In a pause is who is in ``_paused``, until the time there; the rest is fetched.
        self._partitions: dict[PartitionKey, _Followed] = {}
        self._paused: dict[PartitionKey, int] = {}
        # Not in sync; named again and again.
        self._joining: dict[PartitionKey, None] = {}
        self._next_join_ms = 0
        # Those whose turn it is.
        self._to_remind: dict[PartitionKey, None] = {}
        # Being added by a reassignment, and held back while the throttle is empty.
        self._throttled: dict[PartitionKey, None] = {}
        self._is_throttling = False

        # The session at the leader: 0 and 0 before there is one, or when a new one has to begin.
        self._session_id = 0
        self._session_epoch = 0
        # The leader has no room for one, or may have none: the next request has to name everything.
        self._is_refused = False
        self._in_session: dict[PartitionKey, None] = {}
        # What the next requests of the session have to say.
        self._dirty: dict[PartitionKey, None] = {}
        self._forgotten: dict[PartitionKey, None] = {}

        self._outstanding: FetchRequest | None = None
        # After a failure of the whole request.
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
        """Whether the next request would say something that an outstanding one did not."""
        return bool(self._dirty)

    # What we follow

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
        """Follow a partition from here on; anew if it was followed under another leader epoch."""
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
        """Follow it no longer, or no longer here."""
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
        """Where our log is after an effect, or after the flush that makes it count."""
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
        """An effect could not be carried out: leave the partition alone for a while."""
        followed = self._partitions.get(key)
        if followed is not None:
            self._pause(followed, now_ms)

    def position(self, key: PartitionKey) -> tuple[int, int] | None:
        """(where the next fetch of a partition begins, the epoch before that); None when it is not followed."""
        followed = self._partitions.get(key)
        return None if followed is None else (followed.offset, followed.last_epoch)

    def log_start_offset(self, key: PartitionKey) -> int:
        """Where our log begins, as the leader is told; -1 when it is not followed."""
        followed = self._partitions.get(key)
        return UNKNOWN_OFFSET if followed is None else followed.log_start_offset

    def leader_epoch(self, key: PartitionKey) -> int:
        """In which epoch a partition is followed here; -1 when it is not."""
        followed = self._partitions.get(key)
        return NO_EPOCH if followed is None else followed.leader_epoch

    # Asking

    def request(self, now_ms: int, broker_epoch: int) -> FetchRequest | None:
        """What to send now; None while there is nothing to ask, or no leave to."""
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
            # With more to say it should be back at once.
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
        """What to name now. The rest waits for the next request."""
        named, self._dirty = self._dirty, {}
        if len(named) > NAMED_MAX and not self._is_refused:
            everyone, named = named, {}
            for key in everyone:
                # What moved must be named, or the leader would send again what we have.
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
        """When ``request`` is worth another try after it had nothing; None when only an ``assign`` helps."""
        if self._outstanding is not None or not self._partitions:
            return None
        if now_ms < self._retry_ms:
            return self._retry_ms
        if not self._paused and not self._is_throttling:
            return None
        return now_ms + self._wait_ms(now_ms)

    def _wait_ms(self, now_ms: int) -> int:
        """How long a request may lie at the leader: until somebody's pause ends, at the longest."""
        wait_ms = self.limits.max_wait_ms
        if self._paused:
            wait_ms = min(wait_ms, max(0, min(self._paused.values()) - now_ms))
        if self._is_throttling:
            wait_ms = min(wait_ms, self._throttle.wait_ms(now_ms))
        return wait_ms

    # Being answered

    def answered(self, request: FetchRequest, response: FetchResponse | None, now_ms: int) -> list[Effect]:
        """What a response means; None for no response. A request that is not outstanding means nothing."""
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
            # Perhaps it has no room for so many. It had some for the first ones, so it has to see all at once.
            self._is_refused = self._is_refused or response.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            if not self._failures:
                # The leader is well and has merely forgotten us.
                self._failures = 1
                return
        self._failures += 1
        self._retry_ms = now_ms + self._backoff_ms(self._failures)

    def _effects(self, response: FetchResponse, now_ms: int) -> Iterator[Effect]:
        for topic in response.responses:
            for data in topic.partitions:
                followed = self._partitions.get((topic.topic_id, data.partition_index))
                # Taken away, assigned anew or moved while the request was out: this is about another log.
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
                return Append(key, records or b"", data.high_watermark, data.log_start_offset)
        if (
            error in (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE)
            and data.log_start_offset > followed.offset
        ):
            return StartOver(key, data.log_start_offset)
        if error == ErrorCode.OFFSET_OUT_OF_RANGE and followed.last_epoch == NO_EPOCH:
            # We have nothing, and begin behind the leader's end: it was elected uncleanly. When its log has grown
            # to where we are, we would lack what is below.
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
        """Not in the next request; and the session has to forget it."""
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
    """Where to cut a log whose leader parts from it at ``diverging_end``, the end of ``diverging_epoch`` there.

    ``own_end_offset_for(epoch)`` is our log's (largest epoch at most that, its end), or (-1, -1). Where we do
    not know the leader's epoch, what we have of it goes back to the end of the one before, and the next fetch
    asks again with that (KIP-279): two logs may have parted more than once.
    """
    own_epoch, own_epoch_end = own_end_offset_for(diverging_epoch)
    if own_epoch_end < 0:
        # We have no epoch so old or so new: all that can be said is where the leader's ends.
        return min(diverging_end, own_end)
    if own_epoch != diverging_epoch:
        return min(own_epoch_end, own_end)
    return min(own_epoch_end, diverging_end, own_end)
