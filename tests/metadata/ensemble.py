"""A controller with brokers around it, played step by step: every decision is checked as it is made.

``Ensemble`` keeps what a log would: all changes, and after each decision it asserts the controller's own
invariants, that no epoch went backwards, and that replaying the changes gives the image that was decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from penstock.decision import Decision
from penstock.metadata.changes import decode, encode
from penstock.metadata.controller import Controller
from penstock.metadata.image import BrokerImage, Image, PartitionImage
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionRequestPartition,
    AlterPartitionRequestTopic,
    AlterPartitionResponsePartition,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    BrokerRegistrationRequest,
    BrokerRegistrationResponse,
    BrokerState,
    Feature,
    FlushedTopic,
    Listener,
)
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ReassignablePartition,
    ReassignableTopic,
    TopicPartitions,
)
from penstock.protocol.messages.topics import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from penstock.protocol.schema import Message

CLUSTER = "a-cluster"
WALL_MS = 1_700_000_000_000
SESSION_MS = 9000
# So that nothing moves by itself in tests that are not about that.
STILL = {"penstock.rebalance.enable": "false", "auto.leader.rebalance.enable": "false"}


class Ensemble:
    def __init__(
        self, brokers: int = 3, static: Mapping[str, str] | None = None, racks: Sequence[str] = ()
    ) -> None:
        self.now_ms = 0
        # One for all controllers: ids must not be made twice.
        self.random = Random(1)
        self.static = STILL if static is None else static
        self.log: list[Message] = []
        self.replayed = Image()
        self.incarnations = 0
        self.on = self._controller(Image())
        self.decided(self.on.found_cluster(CLUSTER))
        for id in range(1, brokers + 1):
            self.join(id, rack=racks[id - 1] if racks else None)

    # Time and controllers.

    def fail_over(self) -> None:
        """Another controller takes over, with nothing but the log."""
        self.on = self._controller(self.on.image)
        self.settle()

    def advance(self, ms: int, alive: Iterable[int] = ()) -> None:
        """Let time pass, in which some brokers send their heartbeats and the controller looks at its clock."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + 1000)
            for id in alive:
                self.beat(id)
            self.settle()

    def settle(self) -> None:
        """Tick as long as there is something to do now."""
        for _ in range(1000):
            deadline_ms = self.on.next_deadline_ms(self.now_ms)
            if deadline_ms is None or deadline_ms > self.now_ms:
                return
            self.decided(self.on.tick(self.now_ms, WALL_MS))
        raise AssertionError("the controller never comes to rest")

    def lost(self, id: int, epoch: int = -1) -> None:
        self.decided(self.on.broker_lost(id, epoch, self.now_ms))

    # Requests.

    def handle(self, request: Message, version: int = 0, **options: Any) -> Any:
        return self.decided(self.on.handle(request, version, WALL_MS, self.now_ms, **options)).response

    def decided(self, decision: Decision[Message]) -> Decision[Message]:
        if not decision.changes:
            return decision
        before = self.replayed
        self.log += decision.changes
        self.replayed, _ = before.apply([decode(encode(change)) for change in decision.changes])
        self.on.check()
        assert self.replayed == self.on.image
        assert_epochs_grew(before, self.replayed)
        return decision

    def register(
        self,
        id: int,
        *,
        previous: int = -1,
        incarnation: bytes | None = None,
        directories: Sequence[bytes] | None = None,
        rack: str | None = None,
        cluster: str = CLUSTER,
        flushed: Sequence[tuple[str, int]] = (),
        features: Sequence[Feature] = (),
    ) -> BrokerRegistrationResponse:
        self.incarnations += 1
        response: BrokerRegistrationResponse = self.handle(
            BrokerRegistrationRequest(
                broker_id=id,
                cluster_id=cluster,
                incarnation_id=incarnation or self.incarnations.to_bytes(16, "big"),
                listeners=[
                    Listener(name="PLAINTEXT", host=f"host-{id}", port=9092),
                    Listener(name="INTERNAL", host=f"host-{id}", port=9192),
                ],
                features=list(features),
                rack=rack,
                log_dirs=list(directories if directories is not None else [directory(id)]),
                previous_broker_epoch=previous,
                flushed=[
                    FlushedTopic(topic_id=self.on.image.topics[name].id, partitions=[index])
                    for name, index in flushed
                ],
            ),
            4,
        )
        return response

    def beat(self, id: int, *, epoch: int | None = None, **fields: Any) -> BrokerHeartbeatResponse:
        known = self.on.image.brokers.get(BrokerId(id))
        request = BrokerHeartbeatRequest(
            broker_id=id,
            broker_epoch=epoch if epoch is not None else -1 if known is None else known.epoch,
            current_metadata_offset=fields.pop("offset", self.on.image.offset),
            takes_session=fields.pop("takes_session", True),
            **fields,
        )
        response: BrokerHeartbeatResponse = self.handle(request, 1)
        return response

    def join(self, id: int, *, previous: int = -1, rack: str | None = None) -> None:
        """Register and become active."""
        assert self.register(id, previous=previous, rack=rack).error_code == 0
        self.settle()
        assert not self.beat(id).is_fenced
        self.settle()

    def restart(self, id: int) -> None:
        """A process that was killed comes back on the same boot: it has lost nothing."""
        self.join(id, previous=self.broker(id).epoch)

    def create(self, name: str, *replicas: Sequence[int]) -> None:
        asked = CreatableTopic(
            name=name,
            num_partitions=-1,
            replication_factor=-1,
            assignments=[
                CreatableReplicaAssignment(partition_index=index, broker_ids=list(brokers))
                for index, brokers in enumerate(replicas)
            ],
        )
        response = self.handle(CreateTopicsRequest(topics=[asked]), 7)
        assert response.topics[0].error_code == 0, response

    def propose(
        self, name: str, isr: Iterable[int], index: int = 0, version: int = 3, **other: Any
    ) -> AlterPartitionResponsePartition:
        """The leader proposes an ISR, from the present state except for what is given."""
        partition = self.partition(name, index)
        sender = other.pop("sender", partition.leader)
        epochs: Mapping[int, int] = other.pop("epochs", {})
        known = {id: broker.epoch for id, broker in self.on.image.brokers.items()}
        members = list(isr)
        asked = AlterPartitionRequestPartition(
            partition_index=index,
            leader_epoch=other.pop("leader_epoch", partition.leader_epoch),
            partition_epoch=other.pop("partition_epoch", partition.partition_epoch),
            new_isr=members,
            new_isr_with_epochs=[
                BrokerState(broker_id=id, broker_epoch=epochs.get(id, known.get(BrokerId(id), 0)))
                for id in members
            ],
            **other,
        )
        request = AlterPartitionRequest(
            broker_id=sender,
            broker_epoch=known.get(sender, -1),
            topics=[AlterPartitionRequestTopic(topic_id=self.on.image.topics[name].id, partitions=[asked])],
        )
        response = self.handle(request, version)
        if response.error_code:
            return AlterPartitionResponsePartition(error_code=response.error_code)
        result: AlterPartitionResponsePartition = response.topics[0].partitions[0]
        return result

    def catch_up(self) -> None:
        """Every leader proposes everybody who is active, as when all followers have fetched to the end."""
        for topic in list(self.on.image.topics.values()):
            for index in range(len(topic.partitions)):
                partition = self.partition(topic.name, index)
                alive = [id for id in partition.replicas if self.is_active(id)]
                if partition.leader >= 0 and partition.leader in alive and set(alive) != set(partition.isr):
                    error = self.propose(topic.name, alive, index).error_code
                    assert error in (ErrorCode.NONE, ErrorCode.NEW_LEADER_ELECTED), error

    def reassign(self, name: str, replicas: Sequence[int] | None, index: int = 0, **fields: Any) -> ErrorCode:
        asked = ReassignablePartition(
            partition_index=index, replicas=None if replicas is None else list(replicas)
        )
        response = self.handle(
            AlterPartitionReassignmentsRequest(
                topics=[ReassignableTopic(name=name, partitions=[asked])], **fields
            ),
            1,
        )
        return ErrorCode(response.responses[0].partitions[0].error_code)

    def elect(self, name: str, election_type: int, index: int = 0) -> ErrorCode:
        response = self.handle(
            ElectLeadersRequest(
                election_type=election_type,
                topic_partitions=[TopicPartitions(topic=name, partitions=[index])],
            ),
            2,
        )
        return ErrorCode(response.replica_election_results[0].partition_result[0].error_code)

    # Looking.

    def partition(self, name: str, index: int = 0) -> PartitionImage:
        return self.on.image.topics[name].partitions[index]

    def broker(self, id: int) -> BrokerImage:
        return self.on.image.brokers[BrokerId(id)]

    def is_active(self, id: int) -> bool:
        known = self.on.image.brokers.get(BrokerId(id))
        return known is not None and known.is_active

    def state(self, name: str, index: int = 0) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Leader, ISR and eligible leaders."""
        partition = self.partition(name, index)
        return partition.leader, partition.isr, partition.eligible_leader_replicas

    def _controller(self, image: Image) -> Controller:
        made = Controller(image, random=self.random, broker=99, static=self.static)
        made.took_over(self.now_ms)
        return made


def directory(id: int, number: int = 0) -> bytes:
    return b"directory" + id.to_bytes(6, "big") + bytes([number])


def assert_epochs_grew(before: Image, after: Image) -> None:
    """Invariant 17: epochs never regress, and a partition that changed has a later partition epoch."""
    for id, topic in after.topics_by_id.items():
        known = before.topics_by_id.get(id)
        if known is None or known is topic:
            continue
        for old, new in zip(known.partitions, topic.partitions):
            if old != new:
                assert new.partition_epoch > old.partition_epoch, (old, new)
                assert new.leader_epoch >= old.leader_epoch, (old, new)
                # One leader per leader epoch; none is left in its epoch for another.
                assert new.leader == old.leader or new.leader_epoch > old.leader_epoch, (old, new)
    for broker_id, broker in after.brokers.items():
        older = before.brokers.get(broker_id)
        assert older is None or older.epoch <= broker.epoch
        assert older is None or older.epoch < broker.epoch or older.incarnation_id == broker.incarnation_id
