"""One simulated broker: its metadata, its fetchers, and its followers' sessions.

It stands for the real broker's shell around the replication cores: it carries messages between them and the
network, keeps fetch sessions and parked fetches as a leader, and loses all of that when it crashes. The logs of
its replicas are in ``replication_replica``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse
from penstock.replication.events import Append, Assignment, IsrProposal, PartitionKey, StartOver, Truncate
from penstock.replication.follower import Fetcher, FetchLimits
from penstock.sim.cores.replication_controller import BrokerChange, MinIsrChange
from penstock.sim.cores.replication_replica import Replica

if TYPE_CHECKING:
    from penstock.sim.cores.replication import World

# The controller's address.
CONTROLLER = 0
HEARTBEAT_MS = 400
CALL_TIMEOUT_MS = 900
PROPOSAL_RETRY_MS = 150
LIMITS = FetchLimits(max_wait_ms=250, backoff_ms=400)


class Node:
    """A broker process, and the machine it runs on."""

    def __init__(self, world: World, node_id: int) -> None:
        self.world = world
        self.id = node_id
        self.replicas: dict[PartitionKey, Replica] = {}
        # Counts starts; messages for an earlier start are not delivered.
        self.life = 0
        self.is_alive = False
        self.has_lost_power = False
        self.paused_until_ms = 0
        self.reset()

    def reset(self) -> None:
        self.broker_epoch = -1
        # How much of the controller's history was applied, and the brokers in it.
        self.applied = 0
        self.brokers: dict[int, BrokerChange] = {}
        self.min_isr = self.world.min_isr
        self.fetchers: dict[int, Fetcher] = {}
        # As a leader: sessions by follower, and parked fetches.
        self.sessions: dict[int, _Session] = {}
        self.parked: dict[int, tuple[FetchRequest, int]] = {}

    def live(self, broker: int) -> int | None:
        known = self.brokers.get(broker)
        return None if known is None or known.is_fenced else known.broker_epoch

    # Life

    def start(self) -> None:
        self.life += 1
        self.is_alive = True
        self.reset()
        for replica in self.replicas.values():
            replica.restarted(has_lost_power=self.has_lost_power)
        self.register(self.life)

    def stop(self, *, loses_power: bool) -> None:
        self.life += 1
        self.is_alive = False
        self.has_lost_power = self.has_lost_power or loses_power

    def register(self, life: int) -> None:
        if life != self.life or self.broker_epoch >= 0:
            return
        self.world.send(self.id, CONTROLLER, self.world.registering, self, life)
        self.world.later(300, self.register, life)

    def registered(self, life: int, broker_epoch: int, upto: int) -> None:
        if life != self.life or self.broker_epoch >= 0:
            return
        self.broker_epoch = broker_epoch
        self.has_lost_power = False
        # The registration comes with all changes that followed from it. An older image could say that we lead,
        # with records that we have lost.
        self.learn(life, upto)
        self.heartbeat(life)

    def heartbeat(self, life: int) -> None:
        if life != self.life:
            return
        self.world.send(self.id, CONTROLLER, self.world.heartbeat, self, life, self.broker_epoch)
        self.world.later(HEARTBEAT_MS, self.heartbeat, life)

    def learn(self, life: int, upto: int) -> None:
        """Apply the metadata up to here."""
        if life != self.life or self.broker_epoch < 0 or upto <= self.applied:
            return
        history = self.world.controller.history
        latest: dict[int, Assignment] = {}
        # Settings before partitions, as when an image is applied.
        for change in history[self.applied : upto]:
            if isinstance(change, MinIsrChange):
                self.min_isr = change.value
        for replica in self.replicas.values():
            if replica.core.min_isr != min(self.min_isr, len(replica.core.replicas) or 1):
                replica.core.min_isr = self.min_isr
                if replica.core.is_leader:
                    replica.leader_moved()
        for change in history[self.applied : upto]:
            if isinstance(change, MinIsrChange):
                continue
            if isinstance(change, BrokerChange):
                self.brokers[change.broker] = change
            elif self.applied < self.broker_epoch:
                # At the start, apply only the last assignment.
                latest[change.index] = change.assignment
            else:
                self.assigned(change.index, change.assignment)
        self.applied = upto
        for index, assignment in latest.items():
            self.assigned(index, assignment)

    def assigned(self, index: int, assignment: Assignment) -> None:
        for replica in self.replicas.values():
            if replica.index == index:
                replica.assigned(assignment)
                if self.world.random.random() < 0.05:
                    # A message from an old controller.
                    older = self.world.older(index, assignment)
                    if older is not None:
                        replica.assigned(older)

    # Following

    def follow(self, replica: Replica) -> None:
        """Fetch from the current leader, if there is one."""
        core = replica.core
        for leader in self.fetchers:
            if leader != core.leader or core.is_leader:
                self.unfollow(replica, leader)
        if core.is_leader or core.leader <= 0 or not replica.is_ready:
            return
        fetcher = self.fetchers.get(core.leader)
        if fetcher is None:
            fetcher = self.fetchers[core.leader] = self.world.fetcher_type(self.id, limits=LIMITS)
        offset, last_epoch = replica.position()
        if replica.key in fetcher and fetcher.position(replica.key) != (offset, last_epoch):
            fetcher.moved(replica.key, offset, last_epoch, 0)
        fetcher.assign(replica.key, core.leader_epoch, offset, last_epoch, 0, is_in_sync=self.id in core.isr)
        self.world.later(0, self.pump, self.life, core.leader)

    def unfollow(self, replica: Replica, leader: int) -> None:
        fetcher = self.fetchers[leader]
        if replica.key in fetcher:
            fetcher.remove(replica.key)
            if not replica.is_ready:
                # Other partitions waited for its flush, which no longer triggers the fetch.
                self.world.later(0, self.pump, self.life, leader)

    def pump(self, life: int, leader: int) -> None:
        if life != self.life:
            return
        fetcher = self.fetchers[leader]
        if any(not replica.is_ready and replica.key in fetcher for replica in self.replicas.values()):
            # Flushed mode: the end of the flush calls this again.
            return
        request = fetcher.request(self.world.now_ms, self.broker_epoch)
        if request is None:
            retry_ms = fetcher.retry_ms(self.world.now_ms)
            if retry_ms is not None:
                self.world.later(max(1, retry_ms - self.world.now_ms), self.pump, life, leader)
            return
        self.world.counts["fetches"] += 1
        self.world.send(self.id, leader, self.world.nodes[leader].fetch, self.id, life, request)
        self.world.later(CALL_TIMEOUT_MS, self.fetched, life, leader, request, None)

    def fetched(self, life: int, leader: int, request: FetchRequest, response: FetchResponse | None) -> None:
        if life != self.life:
            return
        fetcher = self.fetchers[leader]
        was_outstanding = fetcher.is_outstanding
        for effect in fetcher.answered(request, response, self.world.now_ms):
            replica = self.replicas[effect.key]
            match effect:
                case Append():
                    replica.append(effect)
                    if not effect.records:
                        continue
                case Truncate():
                    replica.truncate(effect)
                case StartOver():
                    replica.start_over(effect)
                case _:
                    continue
            if replica.is_ready:
                fetcher.moved(replica.key, *replica.position(), 0)
        fetcher.check()
        if was_outstanding and not fetcher.is_outstanding:
            self.pump(life, leader)

    # Leading

    def fetch(self, follower: int, life: int, request: FetchRequest) -> None:
        session = self.sessions.get(follower)
        if request.session_epoch == 0:
            session = self.sessions[follower] = _Session(self.world.random.randrange(1, 2**31))
        elif session is None or session.id != request.session_id:
            self.answer(
                follower, life, request, FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
            )
            return
        elif session.epoch != request.session_epoch:
            self.answer(
                follower, life, request, FetchResponse(error_code=ErrorCode.INVALID_FETCH_SESSION_EPOCH)
            )
            return
        session.epoch += 1
        for topic in request.topics:
            for asked in topic.partitions:
                session.partitions[topic.topic_id, asked.partition] = (
                    asked.current_leader_epoch,
                    asked.fetch_offset,
                    asked.last_fetched_epoch,
                )
        for forgotten in request.forgotten_topics_data:
            for index in forgotten.partitions:
                session.partitions.pop((forgotten.topic_id, index), None)
        session.named = [
            (topic.topic_id, it.partition) for topic in request.topics for it in topic.partitions
        ]
        if self.serve(follower, life, request, is_last=False):
            return
        self.parked[follower] = (request, life)
        self.world.later(request.max_wait_ms, self.time_is_up, self.life, follower, life, request)

    def time_is_up(self, own_life: int, follower: int, life: int, request: FetchRequest) -> None:
        if own_life == self.life and self.parked.get(follower, (None, 0))[0] is request:
            self.serve(follower, life, request, is_last=True)

    def wake(self) -> None:
        for follower, (request, life) in list(self.parked.items()):
            self.serve(follower, life, request, is_last=False)

    def serve(self, follower: int, life: int, request: FetchRequest, *, is_last: bool) -> bool:
        session = self.sessions[follower]
        assert request.replica_state is not None
        broker_epoch = request.replica_state.replica_epoch
        is_waking = follower in self.parked
        responses = []
        has_news = False
        for key, (epoch, offset, last_epoch) in session.partitions.items():
            replica = self.replicas[key]
            core = replica.core
            is_named = not is_waking and key in session.named
            if (
                not is_named
                and offset >= len(replica.log)
                and core.leader_epoch == epoch
                and session.told.get(key) == core.high_watermark
            ):
                # Skip unchanged partitions.
                continue
            before = core.high_watermark
            # A request says nothing new about partitions it does not name.
            data = replica.serve(follower, broker_epoch, epoch, offset, last_epoch, is_named)
            if core.high_watermark != before:
                self.world.watermark_moved(replica)
                self.world.later(0, self.moved, self.life, replica)
            if core.wants_proposal:
                self.maybe_propose(replica)
            is_new = data.high_watermark != session.told.get(key)
            if data.records or data.error_code or data.diverging_epoch is not None or is_new:
                responses.append(FetchableTopicResponse(topic_id=key[0], partitions=[data]))
                session.told[key] = data.high_watermark
            if data.records or data.error_code or data.diverging_epoch is not None:
                has_news = True
        if not has_news and not is_last:
            for response in responses:
                del session.told[response.topic_id, response.partitions[0].partition_index]
            return False
        self.parked.pop(follower, None)
        self.answer(follower, life, request, FetchResponse(session_id=session.id, responses=responses))
        return True

    def moved(self, life: int, replica: Replica) -> None:
        if life == self.life:
            replica.leader_moved()

    def answer(self, follower: int, life: int, request: FetchRequest, response: FetchResponse) -> None:
        node = self.world.nodes[follower]
        self.world.send(self.id, follower, node.fetched, life, self.id, request, response)

    # Who is in sync

    def look_for_laggards(self, life: int) -> None:
        if life != self.life:
            return
        for replica in self.replicas.values():
            self.maybe_propose(replica)

    def maybe_propose(self, replica: Replica) -> None:
        proposal = replica.core.proposal(self.world.now_ms)
        if proposal is None:
            return
        self.world.counts["proposals"] += 1
        arguments = (self, self.life, self.broker_epoch, replica, proposal)
        late_ms = self.world.strike(replica, proposal)
        if late_ms:
            self.world.later(late_ms, self.world.altering, *arguments)
        else:
            self.world.send(self.id, CONTROLLER, self.world.altering, *arguments)
        self.world.later(CALL_TIMEOUT_MS, self.altered, self.life, replica, proposal, None, None)

    def altered(
        self, life: int, replica: Replica, proposal: IsrProposal, error: int | None, result: Assignment | None
    ) -> None:
        if life != self.life:
            return
        core = replica.core
        if proposal is core.proposal_in_flight and error != ErrorCode.NONE:
            self.world.counts["proposals without success"] += 1
            self.world.later(PROPOSAL_RETRY_MS, self.propose_again, life, replica)
        core.answered(proposal, error, result, self.world.now_ms)
        if core.is_leader:
            replica.leader_moved()

    def propose_again(self, life: int, replica: Replica) -> None:
        if life == self.life:
            self.maybe_propose(replica)


class _Session:
    __slots__ = ("epoch", "id", "named", "partitions", "told")

    def __init__(self, session_id: int) -> None:
        self.id = session_id
        self.epoch = 0
        self.partitions: dict[PartitionKey, tuple[int, int, int]] = {}
        self.named: list[PartitionKey] = []
        self.told: dict[PartitionKey, int] = {}
