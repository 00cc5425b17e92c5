"""ISR proposals to the controller for the partitions led here.

``IsrProposals`` collects the proposals of these partitions and sends them to the controller, one AlterPartition at
a time.

A hosted partition may be taken offline at any moment, and then loses its replication core. So a proposal in flight
keeps the core that made it, and its response is checked against the partition's current core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from penstock.broker.logs import Logger
from penstock.broker.replication.replica_fetcher import Done, Hosted
from penstock.environment import Environment, Timer
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionRequestPartition,
    AlterPartitionRequestTopic,
    AlterPartitionResponse,
    AlterPartitionResponsePartition,
    BrokerState,
)
from penstock.protocol.schema import Message
from penstock.replication.events import Assignment, IsrProposal, PartitionKey
from penstock.replication.follower_activity import LOOK_INTERVAL_MS, FollowerActivity
from penstock.replication.partition import Partition

ALTER_PARTITION_VERSION = 3
ALTER_CHANNEL = "alter"
ALTER_TIMEOUT_MS = 5_000
ALTER_RETRY_FIRST_MS = 25
ALTER_RETRY_MAX_MS = 1_000
# Partitions in one turn of the loop, and so in one AlterPartition, so that our loop and the controller's stay free.
# The rest goes with the next one.
LOOKS_PER_TURN = 1_000


class Asking(Protocol):
    """A request to the active controller, on any node; ``done(None)`` when it is unknown or does not answer."""

    def __call__(
        self, request: Message, version: int, done: Done, *, channel: str, timeout_ms: int
    ) -> None: ...


class IsrProposals:
    """ISR changes that the partitions led here want."""

    def __init__(
        self,
        environment: Environment,
        ask_controller: Asking,
        logger: Logger,
        *,
        me: int,
        broker_epoch: Callable[[], int],
        lag_max_ms: int,
        follower_activity: FollowerActivity,
        live: Callable[[int], int | None],
    ) -> None:
        """``live(broker)``: its epoch if the controller hears from it, as in ``Partition``."""
        self._environment = environment
        self._ask = ask_controller
        self._logger = logger
        self._me = me
        self._broker_epoch = broker_epoch
        self._follower_activity = follower_activity
        self._live = live
        # Partitions whose cores may have a proposal now.
        self._wanted: dict[Hosted, None] = {}
        # Partitions in which a follower may fall behind; checked regularly. Not if all followers are at the end.
        self._unsettled: dict[Hosted, None] = {}
        self._in_flight: list[tuple[Hosted, Partition, IsrProposal]] = []
        self._is_asking = False
        self._is_scheduled = False
        # Proposals that the controller has accepted.
        self.shrinks = 0
        self.expansions = 0
        self._failures = 0
        self._timer: Timer | None = None
        self._is_closed = False
        # Half of the allowed lag, so that a replica is dropped after at most one and a half times that lag.
        self._look_interval_ms = max(1, lag_max_ms // 2)
        self._look_timer = environment.spawn.later(self._look_interval_ms, self._look_again)
        self._silence_timer = environment.spawn.later(LOOK_INTERVAL_MS, self._listen)

    def wants_proposal(self, hosted: Hosted) -> None:
        """Its core wants a proposal, or its assignment as the leader changed."""
        self._wanted[hosted] = None
        self._unsettled[hosted] = None
        if not self._is_asking and self._timer is None:
            self._schedule()

    def appended(self, hosted: Hosted) -> None:
        """A follower does not have everything. Called at every append, so it does very little."""
        self._unsettled[hosted] = None

    def forget(self, hosted: Hosted) -> None:
        """This broker no longer leads it, or it was deleted."""
        self._wanted.pop(hosted, None)
        self._unsettled.pop(hosted, None)

    def close(self) -> None:
        self._is_closed = True
        self._look_timer.cancel()
        self._silence_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # Looking for laggards

    def _look_again(self) -> None:
        self._look_timer = self._environment.spawn.later(self._look_interval_ms, self._look_again)
        self._look()

    def _listen(self) -> None:
        self._silence_timer = self._environment.spawn.later(LOOK_INTERVAL_MS, self._listen)
        silent = self._follower_activity.look(self._environment.clock.now_ms())
        # A broker that the controller does not hear from either is out of every ISR already.
        lost = {broker for broker in silent if self._live(broker) is not None}
        if lost:
            self._look(lost)

    def _look(self, silent: set[int] | None = None) -> None:
        """Check for replicas that have fallen behind; with ``silent``, only where one of these is in the ISR.

        A broker that no longer follows any partition here stays silent.
        """
        everyone = list(self._unsettled)

        def next_turn(start: int) -> None:
            if self._is_closed:
                return
            for hosted in everyone[start : start + LOOKS_PER_TURN]:
                core = core_of(hosted)
                if core is not None and silent is not None and silent.isdisjoint(core.isr):
                    continue
                if core is None or core.is_settled:
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
        """Send at the end of this turn, with all other proposals of the turn."""
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
            core = core_of(hosted)
            proposal = None if core is None else core.proposal(now_ms)
            if core is not None and proposal is not None:
                self._in_flight.append((hosted, core, proposal))
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
            request,
            ALTER_PARTITION_VERSION,
            self._answered,
            channel=ALTER_CHANNEL,
            timeout_ms=ALTER_TIMEOUT_MS,
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
        for hosted, core, proposal in sent:
            answer = results.get(hosted.key)
            if answer is None:
                core.answered(proposal, None, None, now_ms)
            else:
                has_failed = has_failed or bool(answer.error_code)
                if not answer.error_code:
                    self._count(core.isr, answer.isr)
                core.answered(proposal, answer.error_code, _assignment(core, answer), now_ms)
                if answer.error_code:
                    self._logger.info(
                        "in-sync replicas not changed",
                        partition=repr(hosted),
                        error=ErrorCode(answer.error_code).name,
                    )
            if core is core_of(hosted):
                if core.wants_proposal:
                    self._wanted[hosted] = None
                hosted.proposal_answered()
        if not has_failed:
            self._failures = 0
            if self._wanted:
                self._schedule()
            return
        self._failures += 1
        if self._wanted:
            delay_ms = min(ALTER_RETRY_MAX_MS, ALTER_RETRY_FIRST_MS << min(self._failures - 1, 10))
            self._timer = self._environment.spawn.later(delay_ms, self._time_is_up)

    def _count(self, before: Sequence[int], after: Sequence[int]) -> None:
        """A replica may leave while another one comes, so it is not the size that is compared."""
        self.shrinks += any(broker not in after for broker in before)
        self.expansions += any(broker not in before for broker in after)

    def _time_is_up(self) -> None:
        self._timer = None
        self._schedule()

    def check(self) -> None:
        assert self._is_asking == bool(self._in_flight)
        for _, core, proposal in self._in_flight:
            in_flight = core.proposal_in_flight
            # The image may have cancelled it; the next one waits until this one is answered.
            assert in_flight is None or in_flight is proposal


def core_of(hosted: Hosted) -> Partition | None:
    """None while the partition has no core, because its disk has failed."""
    try:
        return hosted.replication
    except OSError:
        return None


def _asked(index: int, proposal: IsrProposal) -> AlterPartitionRequestPartition:
    return AlterPartitionRequestPartition(
        partition_index=index,
        leader_epoch=proposal.leader_epoch,
        new_isr_with_epochs=[
            BrokerState(broker_id=broker, broker_epoch=epoch) for broker, epoch in proposal.isr
        ],
        # What an unclean election lost stays lost: the first ISR change marks the partition as recovered.
        leader_recovery_state=0,
        partition_epoch=proposal.partition_epoch,
    )


def _assignment(core: Partition, answer: AlterPartitionResponsePartition) -> Assignment | None:
    """The committed state, as far as the response has it; the rest comes with the image."""
    if answer.error_code:
        return None
    eligible = answer.eligible_leader_replicas
    if eligible is None:
        # An older controller does not tell. Until the image does, every dropped broker may be eligible.
        eligible = [broker for broker in dict.fromkeys((*core.elr, *core.isr)) if broker not in answer.isr]
    return Assignment(
        answer.leader_id,
        answer.leader_epoch,
        answer.partition_epoch,
        core.replicas,
        tuple(answer.isr),
        tuple(eligible),
        bool(answer.leader_recovery_state),
    )
