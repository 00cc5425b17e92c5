"""Any course of events, against the invariants: a state machine of brokers around controllers.

``Ensemble`` checks every decision as it is made (``Controller.check``, epochs that never regress, replay equal to
what was decided). Here the brokers are modelled as far as it matters to safety: which records a replica surely
holds. A leader commits only what its whole ISR holds, and nothing while the ISR is smaller than the minimum; a
machine that loses its power forgets what was committed through it. So at every clean election the new leader must
hold everything that was committed (invariant 18), as long as no more machines lost their power than may.
"""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.metadata.changes import decode, encode
from penstock.metadata.image import Image
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import UnregisterBrokerRequest
from penstock.protocol.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    DeleteTopicsRequest,
)
from tests.metadata.ensemble import Ensemble
from tests.metadata.test_broker_registry import set_config

BROKERS = (1, 2, 3, 4)
NAMES = ("a", "b")
MIN_ISR = 2

brokers = st.sampled_from(BROKERS)
names = st.sampled_from(NAMES)
indexes = st.integers(0, 2)
orders = st.permutations(BROKERS)

SETTINGS = {
    "penstock.rebalance.delay.ms": "2000",
    "penstock.replica.rebuild.delay.ms": "15000",
    "leader.imbalance.check.interval.seconds": "5",
}


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.on = Ensemble(brokers=3, static=SETTINGS)
        self.dead: set[int] = set()
        # (topic id, partition) -> how many records are committed, and how many each replica surely holds.
        self.committed: dict[tuple[bytes, int], int] = {}
        self.held: dict[tuple[bytes, int], dict[int, int]] = {}
        self.leader_epochs: dict[tuple[bytes, int], int] = {}

    # Brokers.

    @rule(id=brokers, lost_power=st.booleans())
    def restart(self, id: int, lost_power: bool) -> None:
        known = self.on.on.image.brokers.get(id)  # type: ignore[call-overload]
        # Two machines at once are more than a cluster of three copies with two confirmations promises to survive.
        if lost_power and known is not None and not self.may_lose(id):
            return
        if lost_power:
            for replicas in self.held.values():
                replicas.pop(id, None)
        self.dead.discard(id)
        previous = -1 if lost_power or known is None else known.epoch
        response = self.on.register(id, previous=previous)
        assert response.error_code == ErrorCode.NONE

    @rule(id=brokers)
    def die(self, id: int) -> None:
        self.dead.add(id)
        if id in self.on.on.image.brokers:
            self.on.lost(id)

    @rule(id=brokers, want_fence=st.booleans(), want_shut_down=st.booleans())
    def beat(self, id: int, want_fence: bool, want_shut_down: bool) -> None:
        if id not in self.dead and id in self.on.on.image.brokers:
            self.on.beat(id, want_fence=want_fence, want_shut_down=want_shut_down)

    @rule(id=brokers, lag=st.integers(0, 5))
    def beat_well(self, id: int, lag: int) -> None:
        if id not in self.dead:
            self.on.beat(id, offset=self.on.on.image.offset - lag)

    @rule(ms=st.sampled_from([1000, 3000, 10_000]))
    def wait(self, ms: int) -> None:
        self.on.advance(ms, alive=[id for id in BROKERS if id not in self.dead and self.is_active(id)])

    @rule(ms=st.sampled_from([1000, 9000]))
    def wait_in_silence(self, ms: int) -> None:
        self.on.advance(ms)

    @rule()
    def fail_over(self) -> None:
        self.on.fail_over()

    @rule(id=brokers)
    @precondition(lambda self: len(self.on.on.image.brokers) > 3)
    def unregister(self, id: int) -> None:
        # Said of a broker whose disk is gone for good, so it counts as a loss.
        if id in self.on.on.image.brokers and self.may_lose(id):
            for replicas in self.held.values():
                replicas.pop(id, None)
            self.on.handle(UnregisterBrokerRequest(broker_id=id))

    # Topics.

    @rule(name=names, order=orders, factor=st.integers(1, 3), count=st.integers(1, 3))
    def create(self, name: str, order: list[int], factor: int, count: int) -> None:
        replicas = [id for id in order if id in self.on.on.image.brokers][:factor]
        if name not in self.on.on.image.topics and any(self.is_active(id) for id in replicas):
            self.on.create(name, *[replicas] * count)

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.on.handle(DeleteTopicsRequest(topic_names=[name]), 5)

    @rule(name=names)
    def grow(self, name: str) -> None:
        topic = self.on.on.image.topics.get(name)
        if topic is not None:
            asked = CreatePartitionsTopic(name=name, count=len(topic.partitions) + 1, assignments=None)
            self.on.handle(CreatePartitionsRequest(topics=[asked]), 3)

    # Partitions.

    @rule(name=names, index=indexes, seed=st.integers(0, 999))
    def propose(self, name: str, index: int, seed: int) -> None:
        """A leader proposes followers that hold what it has committed, or drops some."""
        if not self.has(name, index) or self.on.partition(name, index).leader < 0:
            return
        partition = self.on.partition(name, index)
        leader = partition.leader
        if leader in self.dead:
            return
        self.replicate(name, index)
        random = Random(seed)
        chosen = [
            id for id in partition.replicas if id == leader or (id not in self.dead and random.random() < 0.7)
        ]
        error = self.on.propose(name, chosen, index).error_code
        assert error in (
            ErrorCode.NONE,
            ErrorCode.INELIGIBLE_REPLICA,
            ErrorCode.NEW_LEADER_ELECTED,
        ), error

    @rule(name=names, index=indexes)
    def produce(self, name: str, index: int) -> None:
        """Records that every member of the ISR writes, and that are committed if there are enough of them."""
        if not self.has(name, index) or self.on.partition(name, index).leader < 0:
            return
        partition = self.on.partition(name, index)
        if self.dead.intersection(partition.isr) or not partition.isr:
            return
        self.replicate(name, index)
        if len(partition.isr) < min(self.min_isr(), len(partition.replicas)):
            return
        key = self.key(name, index)
        self.committed[key] = self.committed.get(key, 0) + 1
        for id in partition.isr:
            self.held.setdefault(key, {})[id] = self.committed[key]

    @rule(name=names, index=indexes, order=orders, size=st.integers(0, 3))
    def reassign(self, name: str, index: int, order: list[int], size: int) -> None:
        target = [id for id in order if id in self.on.on.image.brokers][:size]
        self.on.reassign(name, target or None, index)

    @rule(name=names, index=indexes)
    def elect_preferred(self, name: str, index: int) -> None:
        self.on.elect(name, 0, index)

    @rule(value=st.sampled_from(["1", "2"]))
    def change_min_isr(self, value: str) -> None:
        set_config(self.on, 4, "", "min.insync.replicas", value)

    # What must be true.

    @invariant()
    def leaders_hold_everything_that_was_committed(self) -> None:
        for topic in self.on.on.image.topics.values():
            for partition in topic.partitions:
                key = (topic.id, partition.index)
                replicas = self.held.setdefault(key, {})
                for id in list(replicas):
                    # What is removed is deleted.
                    if id not in partition.replicas:
                        del replicas[id]
                committed = self.committed.get(key, 0)
                if partition.leader < 0 or not committed:
                    continue
                if partition.leader_recovery_state or len(partition.replicas) == 1:
                    # Known to lack something; what it has is what there is from now on.
                    self.committed[key] = replicas.get(partition.leader, 0)
                    continue
                assert replicas.get(partition.leader, 0) >= committed, (topic.name, partition, replicas)

    @invariant()
    def replay_and_snapshot_give_the_same_image(self) -> None:
        image = self.on.on.image
        snapshot, _ = Image().apply([decode(encode(change)) for change in image.snapshot()])
        assert snapshot == image

    def teardown(self) -> None:
        """After everything is well again, everybody leads and follows, and the controller comes to rest."""
        on = self.on
        self.dead.clear()
        for id in BROKERS:
            known = on.on.image.brokers.get(id)  # type: ignore[call-overload]
            on.register(id, previous=-1 if known is None else known.epoch)
        for _ in range(60):
            on.advance(1000, alive=BROKERS)
            on.catch_up()
        for topic in on.on.image.topics.values():
            for partition in topic.partitions:
                assert partition.leader >= 0 or not partition.isr, (topic.name, partition)
                if partition.leader >= 0:
                    assert len(partition.isr) == len(partition.replicas), (topic.name, partition)
                    assert not partition.is_reassigned, (topic.name, partition)
                    assert partition.leader == partition.replicas[0], (topic.name, partition)
        before = on.on.image
        on.advance(30_000, alive=BROKERS)
        assert on.on.image is before, "the controller does not come to rest"

    # Words.

    def key(self, name: str, index: int) -> tuple[bytes, int]:
        return self.on.on.image.topics[name].id, index

    def has(self, name: str, index: int) -> bool:
        topic = self.on.on.image.topics.get(name)
        return topic is not None and index < len(topic.partitions)

    def is_active(self, id: int) -> bool:
        return self.on.is_active(id)

    def min_isr(self) -> int:
        return int(self.on.on.image.broker_config(None)["min.insync.replicas"])

    def may_lose(self, id: int) -> bool:
        """Whether everything committed is on another replica too, be it alive or not."""
        for key, replicas in self.held.items():
            committed = self.committed.get(key, 0)
            if committed and replicas.get(id, 0) >= committed:
                topic = self.on.on.image.topics_by_id.get(key[0])  # type: ignore[call-overload]
                if topic is None:
                    continue
                partition = topic.partitions[key[1]]
                others = [other for other, count in replicas.items() if other != id and count >= committed]
                trusted = (*partition.isr, *partition.eligible_leader_replicas)
                if not any(other in trusted for other in others):
                    return False
        return True

    def replicate(self, name: str, index: int) -> None:
        """Followers that are alive fetch all that is committed."""
        partition = self.on.partition(name, index)
        key = self.key(name, index)
        replicas = self.held.setdefault(key, {})
        for id in partition.replicas:
            if id not in self.dead and self.is_active(id):
                replicas[id] = self.committed.get(key, 0)


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
