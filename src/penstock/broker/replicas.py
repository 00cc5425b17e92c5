"""Following and being followed: the loops that fetch from leaders, and the one that tells the controller who is
in sync.

``ReplicaFetchers`` has a ``Lane`` for each leader (more with ``num.replica.fetchers``). A lane is a loop
without an end: the core builds a request, ``Peers`` sends it, the core says what the answer means, the hosted
partitions do it, and on to the next. ``IsrProposals`` gathers what the partitions we lead have to propose and
sends it to the controller, one AlterPartition at a time.

What a newcomer gets wrong: a request lies at the leader for half a second when there is nothing new, and
cannot be called back. A partition that is assigned meanwhile does not wait for it: until the next turn of the
loop it is fetched on a second line. Otherwise every failover would cost that half second, for a new leader
commits nothing before its followers have come to it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol, TypeAlias

from penstock.broker.logs import Logger
from penstock.environment import Buffer, Environment, Timer
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionRequestPartition,
    AlterPartitionRequestTopic,
    AlterPartitionResponse,
    AlterPartitionResponsePartition,
    BrokerState,
)
from penstock.protocol.messages.fetch import FetchRequest, FetchResponse
from penstock.protocol.schema import Message
from penstock.replication.events import (
    Append,
    Assignment,
    Effect,
    IsrProposal,
    PartitionKey,
    StartOver,
    Truncate,
)
from penstock.replication.follower import Fetcher, FetchLimits, Throttle
from penstock.replication.partition import Partition

FETCH_VERSION = 17
ALTER_PARTITION_VERSION = 3
ALTER_LANE = "alter"
# How long an answer may take beyond the time that it may lie at the leader.
FETCH_PATIENCE_MS = 4_500
# How long a request may lie at the leader on the second line. Short, because the first one waits for it.
URGENT_WAIT_MS = 20
URGENT_PATIENCE_MS = 100
ALTER_TIMEOUT_MS = 5_000
ALTER_RETRY_FIRST_MS = 25
ALTER_RETRY_MAX_MS = 1_000
# Partitions of one turn of the loop, and so of one AlterPartition, so that our loop and the controller's stay
# free. The rest goes with the next one.
LOOKS_PER_TURN = 1_000

Done: TypeAlias = Callable[[Any | None], None]


class Calling(Protocol):
    """What we need of ``Peers``."""

    def call(
        self, node_id: int, lane: str, request: Message, version: int, done: Done, *, timeout_ms: int = ...
    ) -> None: ...


class Asking(Protocol):
    """A request to the active controller, wherever that is; None when it is not known, or does not answer."""

    def __call__(self, request: Message, version: int, done: Done, *, lane: str, timeout_ms: int) -> None: ...


class Hosted(Protocol):
    """What we need of a hosted partition."""

    @property
    def key(self) -> PartitionKey: ...

    @property
    def replication(self) -> Partition: ...

    def fetch_position(self) -> tuple[int, int]:
        """(where to fetch on, the epoch of the last record before it); what is flushed, in flushed mode."""
        ...

    def append_fetched(self, records: Buffer, high_watermark: int, log_start_offset: int) -> ErrorCode:
        """Append what the leader has sent, which may be nothing, and learn its offsets."""
        ...

    def truncate_for(self, diverging_epoch: int, end_offset: int) -> None:
        """Cut off what the leader does not have, or leave it if that must not be."""
        ...

    def start_over_at(self, offset: int) -> None: ...

    def when_flushed(self, callback: Callable[[], None]) -> None:
        """Call back, perhaps at once, when all that was appended counts. In replicated mode it always does."""
        ...


class ReplicaFetchers:
    """Everything this broker follows."""

    def __init__(
        self,
        environment: Environment,
        peers: Calling,
        logger: Logger,
        *,
        me: int,
        broker_epoch: Callable[[], int],
        limits: FetchLimits | None = None,
        lanes: int = 1,
    ) -> None:
        self.environment = environment
        self.peers = peers
        self.logger = logger
        self.me = me
        self.broker_epoch = broker_epoch
        self.limits = limits or FetchLimits()
        self.throttle = Throttle()
        self._lane_count = lanes
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._followed: dict[PartitionKey, Lane] = {}
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._followed)

    def follow(self, hosted: Hosted, *, is_throttled: bool = False) -> None:
        """Fetch from the leader that the partition has now; for every assignment that does not make us it."""
        core = hosted.replication
        key = hosted.key
        if core.is_leader or core.leader < 0 or core.leader == self.me or self.is_closed:
            self.unfollow(key)
            return
        number = (key[1] + key[0][-1]) % self._lane_count
        lane = self._lanes.get((core.leader, number))
        if lane is None:
            lane = self._lanes[core.leader, number] = Lane(self, core.leader, number)
        known = self._followed.get(key)
        if known is not None and known is not lane:
            known.unfollow(key)
        self._followed[key] = lane
        lane.follow(hosted, is_throttled)

    def unfollow(self, key: PartitionKey) -> None:
        lane = self._followed.pop(key, None)
        if lane is not None:
            lane.unfollow(key)

    def set_throttle(self, bytes_per_second: int | None) -> None:
        """For replicas that a reassignment is adding here; None for none."""
        self.throttle.set_rate(bytes_per_second, self.environment.clock.now_ms())

    def close(self) -> None:
        self.is_closed = True
        for lane in self._lanes.values():
            lane.close()

    def check(self) -> None:
        for key, lane in self._followed.items():
            assert key in lane
        for lane in self._lanes.values():
            lane.check()


class Lane:
    """The way to one leader: a line that goes on for ever, and a second one for who cannot wait."""

    def __init__(self, fetchers: ReplicaFetchers, leader: int, number: int) -> None:
        self._first = _Line(fetchers, leader, f"fetch-{number}", fetchers.limits, self._turned)
        urgent = fetchers.limits._replace(max_wait_ms=min(URGENT_WAIT_MS, fetchers.limits.max_wait_ms))
        self._second = _Line(fetchers, leader, f"fetch-{number}-urgent", urgent, self._turned)

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._first.hosted or key in self._second.hosted

    def follow(self, hosted: Hosted, is_throttled: bool) -> None:
        key = hosted.key
        first, second = self._first, self._second
        if first.follows(hosted) or second.follows(hosted):
            # Nothing to ask anew; who is in sync may have changed.
            (first if first.follows(hosted) else second).follow(hosted, is_throttled)
            return
        first.unfollow(key)
        second.unfollow(key)
        (second if first.core.is_outstanding else first).follow(hosted, is_throttled)

    def unfollow(self, key: PartitionKey) -> None:
        self._first.unfollow(key)
        self._second.unfollow(key)

    def _turned(self, line: _Line) -> None:
        """A line has been answered. Whenever neither is out, the first takes over what the second has."""
        first, second = self._first, self._second
        if first.core.is_outstanding:
            line.go_on()
            return
        if second.core.is_outstanding:
            # It will be back at once; if not, something is wrong with its connection and not with ours.
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


class _Line:
    """One fetcher and its loop."""

    def __init__(
        self,
        fetchers: ReplicaFetchers,
        leader: int,
        name: str,
        limits: FetchLimits,
        on_turn: Callable[[_Line], None],
    ) -> None:
        self._fetchers = fetchers
        self._leader = leader
        self._name = name
        self._timeout_ms = limits.max_wait_ms + FETCH_PATIENCE_MS
        self._on_turn = on_turn
        self.core = Fetcher(fetchers.me, limits=limits, throttle=fetchers.throttle)
        self.hosted: dict[PartitionKey, Hosted] = {}
        self._throttled: dict[PartitionKey, bool] = {}
        # Not to be asked about before they are flushed; waiting for them is waiting for all.
        self._unflushed: dict[PartitionKey, Hosted] = {}
        self._timer: Timer | None = None
        self._is_scheduled = False
        self._is_closed = False

    def follows(self, hosted: Hosted) -> bool:
        """Whether it does so in the leader epoch of now."""
        return (
            self.hosted.get(hosted.key) is hosted
            and self.core.leader_epoch(hosted.key) == hosted.replication.leader_epoch
        )

    def follow(self, hosted: Hosted, is_throttled: bool) -> None:
        key = hosted.key
        core = hosted.replication
        self.hosted[key] = hosted
        self._throttled[key] = is_throttled
        offset, last_epoch = hosted.fetch_position()
        self.core.assign(
            key,
            core.leader_epoch,
            offset,
            last_epoch,
            is_in_sync=core.me in core.isr,
            is_throttled=is_throttled,
        )
        # In flushed mode more may be written than is on the disk. What is written is not fetched again.
        self._await_flush(hosted)
        self._schedule()

    def unfollow(self, key: PartitionKey) -> None:
        if self.hosted.pop(key, None) is not None:
            self._throttled.pop(key)
            self.core.remove(key)
            if self._unflushed.pop(key, None) is not None:
                self._schedule()

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
        """Go on at the end of this turn: ten thousand partitions may be assigned in it."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._fetchers.environment.spawn.soon(self._scheduled)

    def _scheduled(self) -> None:
        self._is_scheduled = False
        if not self.core.is_outstanding:
            self._on_turn(self)

    def go_on(self) -> None:
        """Ask for more, now or when there is leave to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closed or self._unflushed:
            return
        environment = self._fetchers.environment
        now_ms = environment.clock.now_ms()
        request = self.core.request(now_ms, self._fetchers.broker_epoch())
        if request is not None:
            self._fetchers.peers.call(
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
            self._timer = self._fetchers.environment.spawn.later(delay_ms, self.go_on)

    def _time_is_up(self) -> None:
        self._timer = None
        self._scheduled()

    def _answered(self, request: FetchRequest, response: FetchResponse | None) -> None:
        if self._is_closed:
            return
        now_ms = self._fetchers.environment.clock.now_ms()
        for effect in self.core.answered(request, response, now_ms):
            self._carry_out(effect, now_ms)
        self._on_turn(self)

    def _carry_out(self, effect: Effect, now_ms: int) -> None:
        key = effect.key
        hosted = self.hosted.get(key)
        if hosted is None:
            return
        before = hosted.fetch_position()
        match effect:
            case Append():
                error = hosted.append_fetched(effect.records, effect.high_watermark, effect.leader_log_start)
                if error == ErrorCode.NONE:
                    if effect.records:
                        self._await_flush(hosted)
                    return
                self._warn("cannot append what was fetched", hosted, error)
            case Truncate():
                hosted.truncate_for(effect.epoch, effect.end_offset)
                if hosted.fetch_position() != before:
                    self._moved(hosted)
                    return
            case StartOver():
                self._fetchers.logger.warning(
                    "starting over where the leader's log begins", partition=repr(hosted), offset=effect.at
                )
                hosted.start_over_at(effect.at)
                if hosted.fetch_position() != before:
                    self._moved(hosted)
                    return
            case _:
                # The core has drawn the consequences. Most of these pass when the other side has heard the news.
                return
        if self.hosted.get(key) is hosted:
            self.core.failed(key, now_ms)

    def _await_flush(self, hosted: Hosted) -> None:
        key = hosted.key
        self._unflushed[key] = hosted
        hosted.when_flushed(lambda: self._flushed(hosted))

    def _flushed(self, hosted: Hosted) -> None:
        if self._unflushed.get(hosted.key) is hosted:
            del self._unflushed[hosted.key]
            self._moved(hosted)
            if not self._unflushed:
                self._schedule()

    def _moved(self, hosted: Hosted) -> None:
        offset, last_epoch = hosted.fetch_position()
        if self.core.position(hosted.key) != (offset, last_epoch):
            self.core.moved(hosted.key, offset, last_epoch)

    def _warn(self, event: str, hosted: Hosted, error: ErrorCode) -> None:
        self._fetchers.logger.warning(
            event, partition=repr(hosted), leader=self._leader, error=ErrorCode(error).name
        )

    def check(self) -> None:
        self.core.check()
        for key in self._unflushed:
            assert key in self.hosted


class IsrProposals:
    """What the partitions that we lead want changed: who is in sync."""

    def __init__(
        self,
        environment: Environment,
        ask_controller: Asking,
        logger: Logger,
        *,
        me: int,
        broker_epoch: Callable[[], int],
        lag_max_ms: int,
        on_answered: Callable[[Any], None],
    ) -> None:
        """``on_answered(hosted)``: its in-sync replicas, and so its high watermark, may have changed."""
        self._environment = environment
        self._ask = ask_controller
        self._logger = logger
        self._me = me
        self._broker_epoch = broker_epoch
        self._on_answered = on_answered
        # Worth asking for a proposal now.
        self._wanted: dict[Hosted, None] = {}
        # Somebody may fall behind; looked at now and then. A partition where all are at the end is not in it.
        self._unsettled: dict[Hosted, None] = {}
        self._in_flight: list[tuple[Hosted, IsrProposal]] = []
        self._is_asking = False
        self._is_scheduled = False
        self._failures = 0
        self._timer: Timer | None = None
        self._is_closed = False
        # Twice as often as a replica may lag, so that it is dropped after one and a half times that.
        self._look_interval_ms = max(1, lag_max_ms // 2)
        self._look_timer = environment.spawn.later(self._look_interval_ms, self._look)

    def wants_proposal(self, hosted: Hosted) -> None:
        """Its core says so, or it was assigned something as the leader."""
        self._wanted[hosted] = None
        self._unsettled[hosted] = None
        if not self._is_asking and self._timer is None:
            self._schedule()

    def appended(self, hosted: Hosted) -> None:
        """There is something that a follower does not have. Called at every append, so it does next to nothing."""
        self._unsettled[hosted] = None

    def controller_changed(self) -> None:
        """Another controller: no need to wait any longer."""
        self._failures = 0
        if self._timer is not None:
            self._timer.cancel()
            self._time_is_up()

    def forget(self, hosted: Hosted) -> None:
        """We do not lead it any more, or it is gone."""
        self._wanted.pop(hosted, None)
        self._unsettled.pop(hosted, None)

    def close(self) -> None:
        self._is_closed = True
        self._look_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # Looking for laggards

    def _look(self) -> None:
        self._look_timer = self._environment.spawn.later(self._look_interval_ms, self._look)
        everyone = list(self._unsettled)

        def next_turn(start: int) -> None:
            if self._is_closed:
                return
            for hosted in everyone[start : start + LOOKS_PER_TURN]:
                if hosted.replication.is_settled:
                    self._unsettled.pop(hosted, None)
                elif hosted in self._unsettled:
                    self._wanted[hosted] = None
            if start + LOOKS_PER_TURN < len(everyone):
                self._environment.spawn.soon(lambda: next_turn(start + LOOKS_PER_TURN))
            elif self._wanted and not self._is_asking and self._timer is None:
                self._schedule()

        next_turn(0)

    # Asking

    def _schedule(self) -> None:
        """At the end of this turn, so that whatever else it brings goes along."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._environment.spawn.soon(self._send)

    def _send(self) -> None:
        self._is_scheduled = False
        if self._is_asking or self._is_closed or self._broker_epoch() < 0:
            return
        now_ms = self._environment.clock.now_ms()
        topics: dict[bytes, list[AlterPartitionRequestPartition]] = {}
        for hosted in list(islice(self._wanted, LOOKS_PER_TURN)):
            del self._wanted[hosted]
            proposal = hosted.replication.proposal(now_ms)
            if proposal is not None:
                self._in_flight.append((hosted, proposal))
                topic_id, index = hosted.key
                topics.setdefault(topic_id, []).append(_asked(index, proposal))
        if not self._in_flight and self._wanted:
            self._schedule()
        if not self._in_flight:
            return
        request = AlterPartitionRequest(
            broker_id=self._me,
            broker_epoch=self._broker_epoch(),
            topics=[
                AlterPartitionRequestTopic(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in topics.items()
            ],
        )
        self._is_asking = True
        self._ask(
            request, ALTER_PARTITION_VERSION, self._answered, lane=ALTER_LANE, timeout_ms=ALTER_TIMEOUT_MS
        )

    def _answered(self, response: AlterPartitionResponse | None) -> None:
        if self._is_closed:
            return
        self._is_asking = False
        sent, self._in_flight = self._in_flight, []
        results: dict[PartitionKey, AlterPartitionResponsePartition] = {}
        if response is not None and not response.error_code:
            for topic in response.topics:
                for result in topic.partitions:
                    results[topic.topic_id, result.partition_index] = result
        now_ms = self._environment.clock.now_ms()
        has_failed = not results
        for hosted, proposal in sent:
            core = hosted.replication
            answer = results.get(hosted.key)
            if answer is None:
                core.answered(proposal, None, None, now_ms)
            else:
                has_failed = has_failed or bool(answer.error_code)
                core.answered(proposal, answer.error_code, _assignment(core, answer), now_ms)
                if answer.error_code:
                    self._logger.info(
                        "in-sync replicas not changed",
                        partition=repr(hosted),
                        error=ErrorCode(answer.error_code).name,
                    )
            if core.wants_proposal:
                self._wanted[hosted] = None
            self._on_answered(hosted)
        if not has_failed:
            self._failures = 0
            if self._wanted:
                self._schedule()
            return
        self._failures += 1
        if self._wanted:
            delay_ms = min(ALTER_RETRY_MAX_MS, ALTER_RETRY_FIRST_MS << min(self._failures - 1, 10))
            self._timer = self._environment.spawn.later(delay_ms, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._schedule()

    def check(self) -> None:
        assert self._is_asking == bool(self._in_flight)
        for hosted, proposal in self._in_flight:
            in_flight = hosted.replication.proposal_in_flight
            assert (
                in_flight is None
                or in_flight is proposal
                or in_flight.partition_epoch > proposal.partition_epoch
            )


def _asked(index: int, proposal: IsrProposal) -> AlterPartitionRequestPartition:
    return AlterPartitionRequestPartition(
        partition_index=index,
        leader_epoch=proposal.leader_epoch,
        new_isr_with_epochs=[
            BrokerState(broker_id=broker, broker_epoch=epoch) for broker, epoch in proposal.isr
        ],
        # Whatever was lost by an unclean election is lost: from the first change on the partition is recovered.
        leader_recovery_state=0,
        partition_epoch=proposal.partition_epoch,
    )


def _assignment(core: Partition, answer: AlterPartitionResponsePartition) -> Assignment | None:
    """What is committed now, as far as the answer says; the rest comes with the image."""
    if answer.error_code:
        return None
    return Assignment(
        answer.leader_id,
        answer.leader_epoch,
        answer.partition_epoch,
        core.replicas,
        tuple(answer.isr),
        core.elr,
        bool(answer.leader_recovery_state),
    )
