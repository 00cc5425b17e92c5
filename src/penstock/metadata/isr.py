"""Reports of brokers about their partitions: the ISR (AlterPartition) and the directories of replicas.

The leader of a partition proposes its in-sync replicas. The controller accepts a proposal only if it was made by
the present leader from the present state (leader epoch and partition epoch), and only with members that could be
elected: registered under the epoch that the leader has seen them fetch with (KIP-903), not fenced, not shutting
down (KIP-841), on a disk that is not full. An error is per partition, not for the whole request. A proposal may
complete a reassignment, which may change the leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from penstock.metadata.decided_state import DecidedState
from penstock.metadata.image import Image, PartitionImage, TopicImage
from penstock.metadata.refusal import Refusal
from penstock.metadata.topic_settings import MIN_ISR
from penstock.metadata.values import (
    BROKER_RESOURCE,
    LOST_DIRECTORY,
    RECOVERED,
    RECOVERING,
    TOPIC_RESOURCE,
    BrokerImage,
)
from penstock.model import BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AlterPartitionRequest,
    AlterPartitionRequestPartition,
    AlterPartitionResponse,
    AlterPartitionResponsePartition,
    AlterPartitionResponseTopic,
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
    AssignReplicasToDirsResponseDirectory,
    AssignReplicasToDirsResponsePartition,
    AssignReplicasToDirsResponseTopic,
)
from penstock.protocol.messages.metadata_records import ConfigRecord, PartitionChangeRecord

# Members of the ISR have had their epochs since this version.
_EPOCHS_VERSION = 3


def alter_partition(
    decided: DecidedState, sender: BrokerImage, request: AlterPartitionRequest, version: int
) -> AlterPartitionResponse:
    """Decide about the proposals of a broker whose epoch has been checked."""
    proposals = _Proposals(decided, sender.id, version)
    asked = [
        (topic.topic_id, proposals.propose(TopicId(topic.topic_id), topic.partitions))
        for topic in request.topics
    ]
    decided.take(proposals.changes)
    return AlterPartitionResponse(
        topics=[
            AlterPartitionResponseTopic(
                topic_id=topic_id,
                partitions=[_answer(decided.image, topic_id, sender.id, *result) for result in results],
            )
            for topic_id, results in asked
        ]
    )


class _Proposals:
    def __init__(self, decided: DecidedState, sender: BrokerId, version: int) -> None:
        self._decided = decided
        self._sender = sender
        self._has_epochs = version >= _EPOCHS_VERSION
        self._seen: set[tuple[TopicId, int]] = set()
        self.changes: list[PartitionChangeRecord] = []

    def propose(
        self, topic_id: TopicId, partitions: Iterable[AlterPartitionRequestPartition]
    ) -> list[tuple[int, ErrorCode]]:
        topic = self._decided.image.topics_by_id.get(topic_id)
        results = []
        for asked in partitions:
            try:
                self._propose(topic, asked)
                error = ErrorCode.NONE
            except Refusal as refusal:
                error = refusal.error
            results.append((asked.partition_index, error))
        return results

    def _propose(self, topic: TopicImage | None, asked: AlterPartitionRequestPartition) -> None:
        if topic is None:
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID)
        if not 0 <= asked.partition_index < len(topic.partitions):
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        key = (topic.id, asked.partition_index)
        if key in self._seen:
            raise Refusal(ErrorCode.INVALID_REQUEST)
        self._seen.add(key)
        partition = topic.partitions[asked.partition_index]
        if self._has_epochs:
            isr = [(BrokerId(state.broker_id), state.broker_epoch) for state in asked.new_isr_with_epochs]
        else:
            isr = [(BrokerId(broker), -1) for broker in asked.new_isr]
        self._check(partition, asked, [broker for broker, _ in isr])
        if not all([self._is_eligible(partition, *member) for member in isr]):
            raise Refusal(ErrorCode.INELIGIBLE_REPLICA)
        revision = self._decided.revision(topic, partition)
        members = {broker for broker, _ in isr}
        if members != set(partition.isr):
            # In the order of preference, not in the order of the request.
            revision.isr = tuple([broker for broker in partition.replicas if broker in members])
        revision.recovery_state = asked.leader_recovery_state
        # Even when nothing else changes: the new partition epoch invalidates the leader's earlier requests that
        # have no response yet. The leader relies on that.
        self.changes.append(
            revision.change()
            or PartitionChangeRecord(partition_id=partition.index, topic_id=topic.id, isr=list(partition.isr))
        )

    def _check(
        self, partition: PartitionImage, asked: AlterPartitionRequestPartition, isr: list[BrokerId]
    ) -> None:
        """Raises Refusal. The order is Kafka's; leaders act on which error comes first."""
        # Its image is ahead of ours, so there must be another controller.
        if asked.leader_epoch > partition.leader_epoch or asked.partition_epoch > partition.partition_epoch:
            raise Refusal(ErrorCode.NOT_CONTROLLER)
        if asked.leader_epoch < partition.leader_epoch:
            raise Refusal(ErrorCode.FENCED_LEADER_EPOCH)
        if self._sender != partition.leader:
            raise Refusal(ErrorCode.INVALID_REQUEST)
        if asked.partition_epoch < partition.partition_epoch:
            raise Refusal(ErrorCode.INVALID_UPDATE_VERSION)
        members = set(isr)
        if (
            len(members) < len(isr)
            or not members <= set(partition.replicas)
            or partition.leader not in members
            or asked.leader_recovery_state not in (RECOVERED, RECOVERING)
        ):
            raise Refusal(ErrorCode.INVALID_REQUEST)
        if asked.leader_recovery_state == RECOVERING and (
            len(isr) > 1 or partition.leader_recovery_state == RECOVERED
        ):
            raise Refusal(ErrorCode.INVALID_REQUEST)

    def _is_eligible(self, partition: PartitionImage, broker: BrokerId, epoch: int) -> bool:
        known = self._decided.image.brokers.get(broker)
        return (
            known is not None
            and known.is_active
            # -1: the leader does not know the epoch.
            and epoch in (-1, known.epoch)
            and known.has(partition.directory(broker))
            # A full replica that is in sync leaves the ISR by itself, unless no other member could write either.
            and (broker in partition.isr or not self._decided.is_full(known, partition.directory(broker)))
        )


def _answer(
    image: Image, topic_id: bytes, sender: BrokerId, index: int, error: ErrorCode
) -> AlterPartitionResponsePartition:
    if error:
        return AlterPartitionResponsePartition(partition_index=index, error_code=error)
    partition = image.topics_by_id[TopicId(topic_id)].partitions[index]
    if partition.leader != sender:
        # The proposal was accepted, and completed a reassignment that moved the leadership.
        return AlterPartitionResponsePartition(partition_index=index, error_code=ErrorCode.NEW_LEADER_ELECTED)
    return AlterPartitionResponsePartition(
        partition_index=index,
        leader_id=partition.leader,
        leader_epoch=partition.leader_epoch,
        isr=list(partition.isr),
        leader_recovery_state=partition.leader_recovery_state,
        partition_epoch=partition.partition_epoch,
        eligible_leader_replicas=list(partition.eligible_leader_replicas),
    )


def without_outdated_eligible(
    decided: DecidedState, changes: Iterable[ConfigRecord]
) -> list[PartitionChangeRecord]:
    """The changes that clear outdated eligible leaders after these changes of settings.

    With a lower min.insync.replicas the leader may commit records that they do not have. Call this when the
    settings have been taken, and take the result as part of the same decision.
    """
    image = decided.image
    topics: dict[str, TopicImage] = {}
    for change in changes:
        if change.name != MIN_ISR:
            continue
        if change.resource_type == BROKER_RESOURCE:
            topics = dict(image.topics)
            break
        if change.resource_type == TOPIC_RESOURCE:
            topics[change.resource_name] = image.topics[change.resource_name]
    return outdated_eligible(decided, topics.values())


def outdated_eligible(
    decided: DecidedState, topics: Iterable[TopicImage], changes_max: float = inf
) -> list[PartitionChangeRecord]:
    """The changes that clear eligible leaders where the ISR is large enough by the present settings.

    The leader of a partition commits nothing while it has eligible leader replicas, so none may be left over.
    """
    changes: list[PartitionChangeRecord] = []
    for topic in topics:
        for partition in topic.partitions:
            if partition.eligible_leader_replicas and len(changes) < changes_max:
                change = decided.revision(topic, partition).change()
                if change is not None:
                    changes.append(change)
    return changes


def assign_replicas_to_dirs(
    decided: DecidedState, sender: BrokerImage, request: AssignReplicasToDirsRequest
) -> AssignReplicasToDirsResponse:
    """Record the directories of a broker's replicas."""
    changes: list[PartitionChangeRecord] = []
    seen: set[tuple[bytes, int]] = set()
    directories = []
    for directory in request.directories:
        topics = []
        for topic in directory.topics:
            partitions = []
            for partition in topic.partitions:
                key = (topic.topic_id, partition.partition_index)
                result = AssignReplicasToDirsResponsePartition(partition_index=partition.partition_index)
                try:
                    if key in seen:
                        raise Refusal(ErrorCode.INVALID_REQUEST)
                    seen.add(key)
                    change = _assigned(decided, sender, TopicId(key[0]), key[1], directory.id)
                    if change is not None:
                        changes.append(change)
                except Refusal as refusal:
                    result.error_code = refusal.error
                partitions.append(result)
            topics.append(AssignReplicasToDirsResponseTopic(topic_id=topic.topic_id, partitions=partitions))
        directories.append(AssignReplicasToDirsResponseDirectory(id=directory.id, topics=topics))
    decided.take(changes)
    return AssignReplicasToDirsResponse(directories=directories)


def _assigned(
    decided: DecidedState, sender: BrokerImage, topic_id: TopicId, index: int, directory: bytes
) -> PartitionChangeRecord | None:
    topic = decided.image.topics_by_id.get(topic_id)
    if topic is None:
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID)
    if not 0 <= index < len(topic.partitions):
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    partition = topic.partitions[index]
    if sender.id not in partition.replicas:
        raise Refusal(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    return placed_in(decided, sender, topic, partition, directory)


def placed_in(
    decided: DecidedState, sender: BrokerImage, topic: TopicImage, partition: PartitionImage, directory: bytes
) -> PartitionChangeRecord | None:
    """The change that records the directory of a broker's replica."""
    before = partition.directory(sender.id)
    revision = decided.revision(topic, partition)
    revision.directories = tuple(
        [
            directory if broker == sender.id else known
            for broker, known in zip(partition.replicas, partition.directories)
        ]
    )
    if directory == LOST_DIRECTORY:
        # The rest of the replica may lack records that it had confirmed.
        revision.lose(sender.id)
    elif before == LOST_DIRECTORY:
        # Repaired. It joins the ISR when it has fetched what it lacks.
        pass
    elif directory != before and not sender.has(before):
        # The replica starts empty, because its old directory is gone. It must not count as a copy, nor lead
        # without an election: the directory may come back, with the records.
        revision.lose(sender.id, everything=True)
    elif not sender.has(directory):
        revision.leave_isr(sender.id)
    return revision.change()
