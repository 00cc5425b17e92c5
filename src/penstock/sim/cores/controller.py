"""The replication simulator with the real controller: ``metadata.Controller`` in place of the model.

The worlds of ``replication.py`` have real replicas and a small model of a controller. Here the controller is real
too, and more happens to it: it is replaced by another one that knows only the log, brokers stop cleanly,
administrators move replicas and cancel that. The checks are the same, above all that every replica that may be
elected holds everything committed. After every decision the controller checks itself, and replaying the log must
give the decided image.

Decisions are committed at once. A decision that is lost with its controller would look to the others like a
request without a response, and those are frequent here anyway.
"""

from __future__ import annotations

import random
from typing import Any

from penstock.decision import Decision
from penstock.metadata.controller import Controller
from penstock.metadata.elections import Revision
from penstock.metadata.image import Image, PartitionImage
from penstock.metadata.topic_settings import MIN_ISR
from penstock.metadata.values import (
    BROKER_RESOURCE,
    SESSION,
    BrokerImage,
    ConfigResource,
    Endpoint,
    config_record,
    partition_record,
    registration_record,
)
from penstock.model import BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.listeners import CLIENTS
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionRequestPartition,
    AlterPartitionRequestTopic,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    BrokerRegistrationRequest,
    BrokerState,
    Listener,
)
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.metadata_records import ConfigRecord, TopicRecord
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ReassignablePartition,
    ReassignableTopic,
    TopicPartitions,
)
from penstock.protocol.schema import Message
from penstock.replication.events import Assignment, IsrProposal
from penstock.sim.cores.replication import SESSION_MS, World
from penstock.sim.cores.replication_controller import (
    BrokerChange,
    Change,
    MinIsrChange,
    ModelController,
    PartitionChange,
)
from penstock.sim.cores.replication_node import Node
from penstock.sim.cores.replication_replica import Replica
from penstock.sim.report import Report

BROKERS_MAX = 5
VERSION = 3
# Not compared with anything here: a broker that knows its registration has all metadata that came with it.
CAUGHT_UP = 2**62
SETTINGS = {
    "broker.session.timeout.ms": str(SESSION_MS),
    "penstock.rebalance.enable": "false",
    "penstock.replica.rebuild.delay.ms": "-1",
    "leader.imbalance.check.interval.seconds": "2",
}


class RealController(ModelController):
    """Has the interface of the model; every change of the metadata log is one entry of its history."""

    revision_type: type[Revision] = Revision

    def __init__(self, replicas: list[tuple[int, ...]], min_isr: int) -> None:
        super().__init__(replicas, min_isr)
        self._now_ms = 0
        self._random = random.Random(len(replicas))
        self._image, _ = Image().apply(_beginning(replicas, min_isr))
        # As many entries as offsets, so that a broker epoch is an index in it.
        self.history: list[Change] = [BrokerChange(0, 0, True)] * (self._image.offset + 1)
        self.fail_overs = 0
        self._controller = self._new_controller()
        self._follow(self._image)

    # The interface of the model

    def register(self, broker: int, *, is_unclean: bool, now_ms: int) -> int:
        known = self._image.brokers[BrokerId(broker)]
        request = BrokerRegistrationRequest(
            broker_id=broker,
            # Unique per start of a broker: each start has one epoch, the next offset of the log.
            incarnation_id=(self._image.offset + 1).to_bytes(16, "big"),
            listeners=[Listener(name=CLIENTS.name, host="h", port=9092)],
            log_dirs=[_directory(broker)],
            previous_broker_epoch=-1 if is_unclean else known.epoch,
        )
        response = self._handle(request, now_ms)
        assert response.error_code == ErrorCode.NONE, response
        epoch: int = response.broker_epoch
        return epoch

    def heard(self, broker: int, epoch: int, now_ms: int) -> bool:
        return self._beat(broker, epoch, now_ms).error_code == ErrorCode.NONE

    def expire(self, now_ms: int, session_ms: int) -> None:
        deadline_ms = self._controller.next_deadline_ms(now_ms)
        while deadline_ms is not None and deadline_ms <= now_ms:
            self._decided(self._controller.tick(now_ms, now_ms))
            deadline_ms = self._controller.next_deadline_ms(now_ms)

    def alter(
        self, broker: int, broker_epoch: int, index: int, proposal: IsrProposal
    ) -> tuple[int, Assignment | None]:
        asked = AlterPartitionRequestPartition(
            partition_index=0,
            leader_epoch=proposal.leader_epoch,
            partition_epoch=proposal.partition_epoch,
            new_isr_with_epochs=[BrokerState(broker_id=id, broker_epoch=epoch) for id, epoch in proposal.isr],
        )
        response = self._handle(
            AlterPartitionRequest(
                broker_id=broker,
                broker_epoch=broker_epoch,
                topics=[AlterPartitionRequestTopic(topic_id=_topic_id(index), partitions=[asked])],
            ),
            self._now_ms,
        )
        error: int = response.error_code or response.topics[0].partitions[0].error_code
        if error:
            return error, None
        self.isr_changes += 1
        return error, self.partitions[index]

    def elect(self, index: int, leader: int) -> None:
        replicas = self.partitions[index].replicas
        if leader in replicas and not self._partition(index).is_reassigned:
            self.reassign(index, (leader, *(other for other in replicas if other != leader)))
            asked = [TopicPartitions(topic=_name(index), partitions=[0])]
            self._handle(ElectLeadersRequest(topic_partitions=asked), self._now_ms)

    def set_min_isr(self, value: int) -> None:
        setting = IncrementalAlterableConfig(name=MIN_ISR, config_operation=0, value=str(value))
        response = self._handle(
            IncrementalAlterConfigsRequest(
                resources=[
                    IncrementalAlterConfigsResource(
                        resource_type=BROKER_RESOURCE, resource_name="", configs=[setting]
                    )
                ]
            ),
            self._now_ms,
        )
        assert response.responses[0].error_code == ErrorCode.NONE, response

    # What only the real controller does

    def fail_over(self, now_ms: int) -> None:
        self.fail_overs += 1
        self._now_ms = now_ms
        self._controller = self._new_controller()

    def stop(self, broker: int, now_ms: int) -> bool:
        """A broker asks to stop; True if it may."""
        epoch = self._image.brokers[BrokerId(broker)].epoch
        return self._beat(broker, epoch, now_ms, want_shut_down=True).should_shut_down

    def reassign(self, index: int, replicas: tuple[int, ...] | None) -> int:
        asked = ReassignablePartition(
            partition_index=0, replicas=None if replicas is None else list(replicas)
        )
        response = self._handle(
            AlterPartitionReassignmentsRequest(
                topics=[ReassignableTopic(name=_name(index), partitions=[asked])]
            ),
            self._now_ms,
        )
        error: int = response.responses[0].partitions[0].error_code
        return error

    def is_reassigned(self, index: int) -> bool:
        return self._partition(index).is_reassigned

    def _new_controller(self) -> Controller:
        made = Controller(self._image, random=self._random, broker=0, static=SETTINGS)
        made._decided.revision_type = self.revision_type
        made.took_over(self._now_ms)
        return made

    def _beat(
        self, broker: int, epoch: int, now_ms: int, *, want_shut_down: bool = False
    ) -> BrokerHeartbeatResponse:
        response: BrokerHeartbeatResponse = self._handle(
            BrokerHeartbeatRequest(
                broker_id=broker,
                broker_epoch=epoch,
                current_metadata_offset=CAUGHT_UP,
                want_shut_down=want_shut_down,
                takes_session=True,
            ),
            now_ms,
        )
        return response

    def _handle(self, request: Message, now_ms: int) -> Any:
        self._now_ms = now_ms
        return self._decided(self._controller.handle(request, VERSION, now_ms, now_ms)).response

    def _decided(self, decision: Decision[Message]) -> Decision[Message]:
        if decision.changes:
            self._controller.check()
            # One by one, as a slow broker would see them.
            for change in decision.changes:
                before = self._image
                self._image, delta = before.apply([change])
                if delta.brokers_changed:
                    broker = self._image.brokers[delta.brokers_changed[0]]
                    self.history.append(BrokerChange(broker.id, broker.epoch, not broker.is_active))
                elif delta.partitions_changed:
                    index = int(delta.partitions_changed[0][0])
                    self.history.append(PartitionChange(index, _assignment(self._partition(index))))
                elif isinstance(change, ConfigRecord) and change.name == MIN_ISR:
                    self.history.append(MinIsrChange(int(change.value or 1)))
                else:
                    self.history.append(BrokerChange(0, 0, True))
            assert self._image == self._controller.image, "replaying the log does not give the decided image"
            self._follow(self._image)
        return decision

    def _follow(self, image: Image) -> None:
        for index, old in enumerate(self.partitions):
            self.partitions[index] = new = _assignment(self._partition(index))
            self.elections += new.leader_epoch - old.leader_epoch

    def _partition(self, index: int) -> PartitionImage:
        return self._image.topics[_name(index)].partitions[0]


class MovableReplica(Replica):
    """A replica that is deleted when its broker is no longer among the partition's replicas."""

    # Epochs of the last assignment: an older one must not delete anything.
    newest: tuple[int, int] = (-1, -1)
    # Epochs of the deletion: records from before are rightly gone.
    deleted_at: tuple[int, int] = (-1, -1)

    def assigned(self, assignment: Assignment) -> None:
        epochs = (assignment.leader_epoch, assignment.partition_epoch)
        if epochs < self.newest:
            self.world.counts["refused assignments"] += 1
            return
        self.newest = epochs
        if self.node.id in assignment.replicas:
            super().assigned(assignment)
            return
        if self.log or self.core.leader_epoch >= 0:
            self.world.counts["deleted replicas"] += 1
            for leader in self.node.fetchers:
                self.node.unfollow(self, leader)
            self.log, self.epochs, self.synced, self.checked = [], [], 0, 0
            self.waiters = []
            self.core = self.new_core(0)
            self.deleted_at = epochs

    def restarted(self, *, has_lost_power: bool) -> None:
        super().restarted(has_lost_power=has_lost_power)
        self.newest = (-1, -1)


class ControllerWorld(World):
    core = "controller"
    replica_type: type[Replica] = MovableReplica
    controller_type: type[ModelController] = RealController

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        assert isinstance(self.controller, RealController)
        self.real = self.controller
        dice = self.random
        self._faults += [name for name in _FAULTS if dice.random() < 0.7]
        # Any node may get any partition.
        for node in self.nodes.values():
            for index in range(len(self.committed)):
                if not any(replica.index == index for replica in node.replicas.values()):
                    replica = self.replica_type(self, node, index)
                    node.replicas[replica.key] = replica

    def live(self) -> Report:
        report = super().live()
        self.counts["fail-overs"] = self.real.fail_overs
        return report

    def _all_have(self, replica: Replica, offset: int) -> None:
        core = replica.core
        epochs = (core.leader_epoch, core.partition_epoch)
        for member in core.maximal_isr:
            other = self.nodes[member].replicas[replica.key]
            assert isinstance(other, MovableReplica)
            if other.deleted_at > epochs:
                # This leader does not know yet that one of its replicas was moved away. The other replicas have
                # the records.
                return
        super()._all_have(replica, offset)

    # Faults

    def _fail_over(self, node: Node) -> None:
        self.real.fail_over(self.now_ms)

    def _renew_leader(self, node: Node) -> None:
        """The real controller has no request for that, so move the leadership."""
        self._move_leader(node)

    def _stop(self, node: Node) -> None:
        if not node.is_alive or node.broker_epoch < 0 or node.paused_until_ms > self.now_ms:
            return
        if self.real._image.brokers[BrokerId(node.id)].epoch == node.broker_epoch:
            self.counts["stops"] += 1
            may_stop = self.real.stop(node.id, self.now_ms) or self.real.stop(node.id, self.now_ms)
            self._publish()
            if may_stop or self.random.random() < 0.5:
                self._crash(node)

    def _reassign(self, node: Node) -> None:
        dice = self.random
        index = dice.randrange(len(self.committed))
        if self.real.is_reassigned(index) and dice.random() < 0.5:
            self.counts["cancellations"] += self.real.reassign(index, None) == ErrorCode.NONE
        else:
            size = min(len(self.nodes), dice.choice((2, 3, 3)))
            target = tuple(dice.sample(sorted(self.nodes), size))
            self.counts["reassignments"] += self.real.reassign(index, target) == ErrorCode.NONE
        self._publish()

    # The end

    def _is_reassigned(self, index: int) -> bool:
        return self.real.is_reassigned(index)


_FAULTS = ("_fail_over", "_stop", "_reassign", "_reassign")


def run(seed: int, mutant: type[World] | None = None) -> Report:
    """Run one seed. Raises ``Violation``."""
    return (mutant or ControllerWorld)(seed).live()


def _beginning(replicas: list[tuple[int, ...]], min_isr: int) -> list[Message]:
    """The initial log: registered brokers, and partitions that wait for them."""
    changes: list[Message] = [
        registration_record(
            BrokerImage(
                BrokerId(id),
                0,
                bytes(16),
                (Endpoint(CLIENTS.name, "h", 9092, CLIENTS.security_protocol),),
                None,
                fenced=True,
                in_controlled_shutdown=False,
                directories=(_directory(id),),
            )
        )
        for id in range(1, BROKERS_MAX + 1)
    ]
    changes.append(config_record(ConfigResource(4, ""), MIN_ISR, str(min_isr)))
    changes.append(config_record(ConfigResource(4, ""), SESSION, str(SESSION_MS)))
    for index, members in enumerate(replicas):
        brokers = tuple(map(BrokerId, members))
        changes.append(TopicRecord(name=_name(index), topic_id=_topic_id(index)))
        partition = PartitionImage(
            0,
            BrokerId(-1),
            0,
            0,
            brokers,
            (),
            tuple(map(_directory, members)),
            eligible_leader_replicas=brokers,
        )
        changes.append(partition_record(_topic_id(index), partition))
    return changes


def _assignment(partition: PartitionImage) -> Assignment:
    return Assignment(
        partition.leader,
        partition.leader_epoch,
        partition.partition_epoch,
        partition.replicas,
        partition.isr,
        partition.eligible_leader_replicas,
        bool(partition.leader_recovery_state),
    )


def _name(index: int) -> str:
    return str(index)


def _topic_id(index: int) -> TopicId:
    return TopicId(bytes(15) + bytes([index + 10]))


def _directory(broker: int) -> bytes:
    return b"directory" + broker.to_bytes(7, "big")
