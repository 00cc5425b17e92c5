"""Peers, partitions and a loop made of a few lines, for the loops around the replication cores."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.broker.replication.replica_fetchers import ReplicaFetchers
from penstock.environment import Buffer, Environment
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schema import Message, encode
from penstock.replication.events import Assignment, PartitionKey
from penstock.replication.partition import Partition
from tests.replication.making import LAG_MAX_MS, LiveBrokers, key, named, response
from tests.support_files import FakeClock

ME = 1
SESSION = 77
# Shorter than a follower may lag.
SILENCE_MAX_MS = 4_000


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Time that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._timers: list[tuple[int, int, Timer]] = []
        self._count = itertools.count()

    def soon(self, callback: Callable[[], None]) -> None:
        self.later(0, callback)

    def later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock.now + int(delay_ms), next(self._count), timer))
        return timer

    def in_thread(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nothing here needs a thread")

    def run_for(self, ms: int) -> None:
        end = self.clock.now + ms
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heapq.heappop(self._timers)
            self.clock.now = at
            if timer.callback is not None:
                timer.callback()
        self.clock.now = end


class Sent:
    def __init__(
        self, node: int, channel: str, request: Any, done: Callable[[Any], None], timeout_ms: int
    ) -> None:
        self.node = node
        self.channel = channel
        self.request = request
        self.done = done
        self.timeout_ms = timeout_ms

    def __repr__(self) -> str:
        return f"{self.channel} to {self.node}: {named(self.request)}"


class FakePeers:
    def __init__(self) -> None:
        self.sent: deque[Sent] = deque()

    def call(
        self,
        node_id: int,
        channel: str,
        request: Message,
        version: int,
        done: Callable[[Any], None],
        *,
        timeout_ms: int = 5_000,
    ) -> None:
        encode(request, version)
        self.sent.append(Sent(node_id, channel, request, done, timeout_ms))


class FakeLogger:
    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **values: Any) -> None:
        self.events.append(event)

    warning = info


class FakeHosted:
    """A partition whose log is a number, and whose records are as many as the bytes."""

    def __init__(self, index: int, leader: int = 2, *, is_flushed: bool = False) -> None:
        self.key: PartitionKey = key(index)
        self.follower_log: Any = self
        self.brokers = LiveBrokers(1, 2, 3)
        self.core = Partition(ME, live=self.brokers.live, lag_max_ms=LAG_MAX_MS, min_isr=2)
        self.end_offset = 0
        self.log_start_offset = 0
        self.flushed_offset = 0
        self.last_epoch = -1
        self.is_flushed = is_flushed
        self.flush_waiters: list[Callable[[], None]] = []
        self.append_error = ErrorCode.NONE
        self.appended_before_error = 0
        self.refuses_truncation = False
        self.is_offline = False
        # Asked for, beyond those that an append causes by itself.
        self.flushes = 0
        self.on_answered: Callable[[FakeHosted], None] = lambda hosted: None
        self.assignment = Assignment(leader, 1, 1, (1, 2, 3), (1, 2, 3))
        self.assign()

    def assign(self, **changes: Any) -> None:
        self.assignment = self.assignment._replace(**changes)
        assert self.replication.assign(self.assignment, end_offset=self.end_offset, now_ms=0)

    @property
    def replication(self) -> Partition:
        if self.is_offline:
            raise OSError("its disk has failed")
        return self.core

    def position(self) -> tuple[int, int, int]:
        if self.is_offline:
            raise OSError("its disk has failed")
        offset = self.flushed_offset if self.is_flushed else self.end_offset
        return offset, self.last_epoch, self.log_start_offset

    def append(
        self,
        records: Buffer,
        high_watermark: int,
        log_start_offset: int,
        *,
        replicated_before: tuple[int, int] = (-1, -1),
    ) -> ErrorCode:
        if self.append_error == ErrorCode.NONE:
            self.end_offset += len(records)
            if records:
                self.last_epoch = self.replication.leader_epoch
            self.replication.learned(high_watermark, self.end_offset)
            if replicated_before[0] >= 0:
                self.replication.learned_replicated(*replicated_before)
            self.log_start_offset = max(self.log_start_offset, log_start_offset)
        else:
            self.end_offset += self.appended_before_error
        return self.append_error

    def truncate_for(self, diverging_epoch: int, end_offset: int) -> None:
        if not self.refuses_truncation:
            self.end_offset = end_offset
            self.last_epoch = diverging_epoch

    def start_over_at(self, offset: int) -> None:
        self.end_offset = self.flushed_offset = offset

    def when_flushed(self, callback: Callable[[], None]) -> None:
        if self.is_flushed and self.flushed_offset < self.end_offset:
            self.flush_waiters.append(callback)
        else:
            callback()

    def proposal_answered(self) -> None:
        self.on_answered(self)

    def flush(self) -> None:
        self.flushes += 1

    def finish_flush(self) -> None:
        self.flushed_offset = self.end_offset
        waiters, self.flush_waiters = self.flush_waiters, []
        for waiter in waiters:
            waiter()


class Following:
    def __init__(self, *, fetchers_per_leader: int = 1) -> None:
        self.loop = Loop()
        self.peers = FakePeers()
        self.logger = FakeLogger()
        environment = Environment(
            clock=self.loop.clock,
            files=None,  # type: ignore[arg-type]
            network=None,  # type: ignore[arg-type]
            random=random.Random(1),
            spawn=self.loop,
            processes=None,  # type: ignore[arg-type]
        )
        self.environment = environment
        self.fetchers = ReplicaFetchers(
            environment,
            self.peers,
            self.logger,  # type: ignore[arg-type]
            me=ME,
            broker_epoch=lambda: 101,
            fetchers_per_leader=fetchers_per_leader,
        )

    def follow(self, *everyone: FakeHosted, is_throttled: bool = False) -> None:
        for hosted in everyone:
            self.fetchers.follow(hosted, is_throttled=is_throttled)
        self.loop.run_for(0)
        self.fetchers.check()

    def tell(self, hosted: FakeHosted) -> None:
        self.fetchers.tell(hosted)
        self.loop.run_for(0)
        self.fetchers.check()

    def take(self) -> Sent:
        assert self.peers.sent, "nothing was sent"
        return self.peers.sent.popleft()

    def answer(self, sent: Sent, *partitions: Any, session: int = SESSION) -> None:
        sent.done(response(session, *partitions))
        self.loop.run_for(0)
        self.fetchers.check()
