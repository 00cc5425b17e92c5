"""The loop that fetches from one leader.

A ``ReplicaFetcher`` is an endless loop: the core builds a request, ``Peers`` sends it, the core turns the response
into effects, the hosted partitions carry them out, and the next request follows.

A request waits at the leader for half a second when there is no data, and cannot be withdrawn. A partition that is
assigned meanwhile does not wait for it: a second loop fetches it until the first has its response. Otherwise every
failover would cost that half second, because a new leader commits nothing before its followers have fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.broker.logs import Logger
from penstock.broker.partition.follower_log import FollowerLog
from penstock.environment import Environment, Timer
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchRequest, FetchResponse
from penstock.protocol.schema import Message
from penstock.replication.events import Append, Effect, PartitionKey, StartOver, Truncate
from penstock.replication.follower import Fetcher, FetchLimits, Throttle
from penstock.replication.partition import Partition

FETCH_VERSION = 17
# How long a response may take beyond the request's wait time at the leader.
FETCH_PATIENCE_MS = 4_500
# How long a request of the second loop may wait at the leader. Short, because the first loop waits for it.
URGENT_WAIT_MS = 20
# The first loop does not wait longer than this for the second.
URGENT_PATIENCE_MS = 100
# Partitions in the second loop. More of them wait, because each has to move to the first loop afterwards.
URGENT_MAX = 1_000

Done: TypeAlias = Callable[[Any | None], None]


class Calling(Protocol):
    """``Peers``, as fetchers see it."""

    def call(
        self, node_id: int, channel: str, request: Message, version: int, done: Done, *, timeout_ms: int = ...
    ) -> None: ...


class Hosted(Protocol):
    """A hosted partition, as fetchers see it."""

    @property
    def key(self) -> PartitionKey: ...

    @property
    def replication(self) -> Partition: ...

    @property
    def follower_log(self) -> FollowerLog: ...

    def when_flushed(self, callback: Callable[[], None]) -> None:
        """Call back when everything appended counts: at once in replicated mode, else after the flush."""
        ...

    def proposal_answered(self) -> None:
        """Its ISR, and so its high watermark, may have changed."""
        ...

    def flush(self) -> None:
        """Make everything appended so far durable, in a thread."""
        ...


@dataclass(frozen=True, slots=True)
class FetcherContext:
    """Shared by all fetchers of a node."""

    environment: Environment
    peers: Calling
    logger: Logger
    me: int
    broker_epoch: Callable[[], int]
    limits: FetchLimits
    throttle: Throttle


class ReplicaFetcher:
    """Fetches from one leader: an endless loop, and a second one for partitions that cannot wait."""

    def __init__(self, context: FetcherContext, leader: int, number: int) -> None:
        self._first = _FetchLoop(context, leader, f"fetch-{number}", context.limits, self._turned)
        urgent = context.limits._replace(max_wait_ms=min(URGENT_WAIT_MS, context.limits.max_wait_ms))
        self._second = _FetchLoop(context, leader, f"fetch-{number}-urgent", urgent, self._turned)

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._first.hosted or key in self._second.hosted

    def follow(self, hosted: Hosted, is_throttled: bool) -> None:
        key = hosted.key
        first, second = self._first, self._second
        if first.follows(hosted) or second.follows(hosted):
            # It is fetched already. The ISR may have changed.
            (first if first.follows(hosted) else second).follow(hosted, is_throttled)
            return
        first.unfollow(key)
        second.unfollow(key)
        is_urgent = first.core.is_outstanding and len(second.hosted) < URGENT_MAX
        (second if is_urgent else first).follow(hosted, is_throttled)

    def tell(self, hosted: Hosted) -> None:
        """Report its current position without waiting for a request that waits at the leader. Raises OSError."""
        first, second = self._first, self._second
        if first.follows(hosted) and first.core.is_outstanding and len(second.hosted) < URGENT_MAX:
            second.follow(hosted, first.unfollow(hosted.key))
        else:
            (first if first.follows(hosted) else second).tell(hosted)

    def unfollow(self, key: PartitionKey) -> None:
        self._first.unfollow(key)
        self._second.unfollow(key)

    def _turned(self, loop: _FetchLoop) -> None:
        """A loop has its response. When neither has a request out, the first takes over the second's partitions."""
        first, second = self._first, self._second
        if first.core.is_outstanding:
            loop.go_on()
            return
        if second.core.is_outstanding:
            # Its response comes soon; if not, its connection has a problem, and the first loop continues.
            first.go_on_after(URGENT_PATIENCE_MS)
            return
        for hosted, is_throttled in second.leave_all():
            first.follow(hosted, is_throttled)
        first.go_on()

    def close(self) -> None:
        self._first.close()
        self._second.close()

    def check(self) -> None:
        self._first.check()
        self._second.check()
        assert not any(key in self._second.hosted for key in self._first.hosted)


class _FetchLoop:
    """One fetching core and the requests it makes."""

    def __init__(
        self,
        context: FetcherContext,
        leader: int,
        name: str,
        limits: FetchLimits,
        on_turn: Callable[[_FetchLoop], None],
    ) -> None:
        self._context = context
        self._leader = leader
        self._name = name
        self._timeout_ms = limits.max_wait_ms + FETCH_PATIENCE_MS
        self._on_turn = on_turn
        self.core = Fetcher(context.me, limits=limits, throttle=context.throttle)
        self.hosted: dict[PartitionKey, Hosted] = {}
        self._throttled: dict[PartitionKey, bool] = {}
        # Partitions that must be flushed before the next request. The whole loop waits for them.
        self._unflushed: dict[PartitionKey, Hosted] = {}
        self._timer: Timer | None = None
        self._is_scheduled = False
        self._is_closed = False

    def follows(self, hosted: Hosted) -> bool:
        """Whether this loop follows the partition in its current leader epoch."""
        return (
            self.hosted.get(hosted.key) is hosted
            and self.core.leader_epoch(hosted.key) == hosted.replication.leader_epoch
        )

    def follow(self, hosted: Hosted, is_throttled: bool) -> None:
        key = hosted.key
        core = hosted.replication
        offset, last_epoch, log_start_offset = hosted.follower_log.position()
        self.hosted[key] = hosted
        self._throttled[key] = is_throttled
        self.core.assign(
            key,
            core.leader_epoch,
            offset,
            last_epoch,
            log_start_offset,
            is_in_sync=core.me in core.isr,
            is_throttled=is_throttled,
        )
        # In flushed mode more may be written than is on the disk. Written records are not fetched again.
        self._await_flush(hosted)
        if key in self._unflushed:
            # The records may be from before a crash, and then nothing else flushes them.
            hosted.flush()
        self._schedule()

    def tell(self, hosted: Hosted) -> None:
        """Raises OSError."""
        # A partition that waits for a flush reports its position after it.
        if self.follows(hosted) and hosted.key not in self._unflushed:
            self._moved(hosted)
            self._schedule()

    def unfollow(self, key: PartitionKey) -> bool:
        """Return whether it was throttled."""
        if self.hosted.pop(key, None) is None:
            return False
        self.core.remove(key)
        if self._unflushed.pop(key, None) is not None:
            self._schedule()
        return self._throttled.pop(key)

    def leave_all(self) -> list[tuple[Hosted, bool]]:
        everyone = [(hosted, self._throttled[key]) for key, hosted in self.hosted.items()]
        for hosted, _ in everyone:
            self.unfollow(hosted.key)
        return everyone

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    # The loop

    def _schedule(self) -> None:
        """Continue at the end of this turn: ten thousand partitions may be assigned in it."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._context.environment.spawn.soon(self._scheduled)

    def _scheduled(self) -> None:
        self._is_scheduled = False
        if not self.core.is_outstanding:
            self._on_turn(self)

    def go_on(self) -> None:
        """Send the next request, now or when the core allows it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closed or self._unflushed:
            return
        environment = self._context.environment
        now_ms = environment.clock.now_ms()
        request = self.core.request(now_ms, self._context.broker_epoch())
        if request is not None:
            self._context.peers.call(
                self._leader,
                self._name,
                request,
                FETCH_VERSION,
                lambda response: self._answered(request, response),
                timeout_ms=self._timeout_ms,
            )
            return
        retry_ms = self.core.retry_ms(now_ms)
        if retry_ms is not None:
            self._timer = environment.spawn.later(max(1, retry_ms - now_ms), self._time_is_up)

    def go_on_after(self, delay_ms: int) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._context.environment.spawn.later(delay_ms, self.go_on)

    def _time_is_up(self) -> None:
        self._timer = None
        self._scheduled()

    def _answered(self, request: FetchRequest, response: FetchResponse | None) -> None:
        if self._is_closed:
            return
        now_ms = self._context.environment.clock.now_ms()
        # The loop continues below: the effects need not schedule it.
        was_scheduled, self._is_scheduled = self._is_scheduled, True
        for effect in self.core.answered(request, response, now_ms):
            self._carry_out(effect, now_ms)
        self._is_scheduled = was_scheduled
        self._on_turn(self)

    def _carry_out(self, effect: Effect, now_ms: int) -> None:
        hosted = self.hosted.get(effect.key)
        if hosted is None:
            return
        try:
            is_done = self._do(hosted, effect)
        except OSError as error:
            # Its disk has failed, perhaps while an earlier partition was written. One loop serves many disks.
            self._context.logger.warning("cannot follow", partition=repr(hosted), error=str(error))
            is_done = False
        if not is_done and self.hosted.get(effect.key) is hosted:
            self.core.failed(effect.key, now_ms)

    def _do(self, hosted: Hosted, effect: Effect) -> bool:
        """False when the partition should back off for a while. Raises OSError."""
        before = hosted.follower_log.position()
        match effect:
            case Append():
                error = hosted.follower_log.append(
                    effect.records,
                    effect.high_watermark,
                    effect.leader_log_start,
                    replicated_before=effect.replicated_before,
                )
                if effect.records or hosted.follower_log.position() != before:
                    # Also after an error: some batches may be written, and are not fetched again. And a new log
                    # start offset must be reported: a DeleteRecords at the leader may be waiting for it.
                    self._await_flush(hosted)
                if error == ErrorCode.NONE:
                    return True
                if error == ErrorCode.LOG_DIR_NOT_FOUND:
                    # The controller does not know its directory yet, for example after a disk was replaced.
                    return False
                self._context.logger.warning(
                    "cannot append what was fetched",
                    partition=repr(hosted),
                    leader=self._leader,
                    error=ErrorCode(error).name,
                )
                return False
            case Truncate():
                hosted.follower_log.truncate_for(effect.epoch, effect.end_offset)
            case StartOver():
                self._context.logger.warning(
                    "starting over where the leader's log begins", partition=repr(hosted), offset=effect.at
                )
                hosted.follower_log.start_over_at(effect.at)
            case _:
                # The core has handled it. Most of these pass when the other side has the newest metadata.
                return True
        if hosted.follower_log.position() == before:
            # Nothing changed, so the leader would send the same response again, at once.
            return False
        self._moved(hosted)
        return True

    def _await_flush(self, hosted: Hosted) -> None:
        key = hosted.key
        self._unflushed[key] = hosted
        hosted.when_flushed(lambda: self._flushed(hosted))

    def _flushed(self, hosted: Hosted) -> None:
        if self._unflushed.get(hosted.key) is hosted:
            del self._unflushed[hosted.key]
            try:
                self._moved(hosted)
            except OSError:
                self.core.failed(hosted.key, self._context.environment.clock.now_ms())
            if not self._unflushed:
                self._schedule()

    def _moved(self, hosted: Hosted) -> None:
        offset, last_epoch, log_start_offset = hosted.follower_log.position()
        key, core = hosted.key, self.core
        if core.position(key) != (offset, last_epoch) or core.log_start_offset(key) != log_start_offset:
            core.moved(key, offset, last_epoch, log_start_offset)

    def check(self) -> None:
        self.core.check()
        for key in self._unflushed:
            assert key in self.hosted
