"""Moves that an administrator asks for: reassignments and elections.

A reassignment adds the new replicas first and removes the old ones when the new ones are in sync, which
``isr.py`` notices when a leader proposes them. In between the partition has both (``adding_replicas``,
``removing_replicas``). Replicas to be removed keep all their rights until the end, so a reassignment never makes
a partition less safe than it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.metadata.decided_state import CHANGES_MAX, DecidedState
from penstock.metadata.elections import Election
from penstock.metadata.image import NO_LEADER, PartitionImage, TopicImage
from penstock.metadata.refusal import Refusal
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import PartitionChangeRecord
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
    PartitionResult,
    ReassignablePartition,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
    ReplicaElectionResult,
)

# Far more than any cluster has brokers. Kafka's limit comes from the type of the number.
REPLICAS_MAX = 1000
# Types of elections in ElectLeaders.
PREFERRED = 0
UNCLEAN = 1


def alter_reassignments(
    decided: DecidedState, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    changes: list[PartitionChangeRecord] = []
    seen: set[tuple[str, int]] = set()
    responses = []
    for topic in request.topics:
        results = []
        for asked in topic.partitions:
            result = ReassignablePartitionResponse(partition_index=asked.partition_index, error_message=None)
            try:
                key = (topic.name, asked.partition_index)
                if key in seen:
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Each partition may be named once.")
                seen.add(key)
                if len(changes) >= CHANGES_MAX:
                    raise Refusal(
                        ErrorCode.POLICY_VIOLATION, f"A request can move {CHANGES_MAX} partitions at most."
                    )
                change = _reassigned(decided, *_find(decided, *key), asked, request)
                if change is not None:
                    changes.append(change)
            except Refusal as refusal:
                result.error_code, result.error_message = refusal.error, refusal.message
            results.append(result)
        responses.append(ReassignableTopicResponse(name=topic.name, partitions=results))
    decided.take(changes)
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=responses,
    )


def move(
    decided: DecidedState, topic: TopicImage, partition: PartitionImage, replicas: Sequence[BrokerId]
) -> PartitionChangeRecord | None:
    """The change that begins to move a partition to these replicas, which must be registered brokers."""
    revision = decided.revision(topic, partition)
    revision.election = Election.IF_NEEDED
    revision.reassign(tuple(replicas), decided.directory_for)
    return revision.change()


def cancel(
    decided: DecidedState, topic: TopicImage, partition: PartitionImage
) -> PartitionChangeRecord | None:
    """The change that cancels a reassignment; None when it cannot be cancelled now."""
    revision = decided.revision(topic, partition)
    revision.election = Election.IF_NEEDED
    return revision.change() if revision.cancel() else None


def _reassigned(
    decided: DecidedState,
    topic: TopicImage,
    partition: PartitionImage,
    asked: ReassignablePartition,
    request: AlterPartitionReassignmentsRequest,
) -> PartitionChangeRecord | None:
    if asked.replicas is None:
        if not partition.is_reassigned:
            raise Refusal(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS)
        change = cancel(decided, topic, partition)
        if change is None:
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                "Too few of the original replicas are in sync to cancel now: try again later.",
            )
        return change
    target = tuple(map(BrokerId, asked.replicas))
    reason = None
    if not target or len(target) > REPLICAS_MAX:
        reason = f"{len(target)} replicas"
    elif len(set(target)) != len(target):
        reason = "one broker twice"
    elif unknown := set(target) - decided.image.brokers.keys():
        reason = f"broker {min(unknown)}, which is not registered"
    if reason is not None:
        raise Refusal(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"Partition {asked.partition_index} is assigned {reason}."
        )
    # The replicas it will have when the current reassignment is done.
    size = len(partition.replicas) - len(partition.removing_replicas)
    if not request.allow_replication_factor_change and len(target) != size:
        raise Refusal(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Partition {asked.partition_index} has {size} replicas and would have {len(target)}.",
        )
    return move(decided, topic, partition, target)


def list_reassignments(
    decided: DecidedState, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    image = decided.image
    if request.topics is None:
        found = [decided.find(key) for key in decided.partition_index.reassigned]
    else:
        asked = dict.fromkeys(
            (topic.name, index) for topic in request.topics for index in topic.partition_indexes
        )
        found = [
            (topic, topic.partitions[index])
            for topic, index in ((image.topics.get(name), index) for name, index in asked)
            if topic is not None
            and 0 <= index < len(topic.partitions)
            and topic.partitions[index].is_reassigned
        ]
    by_topic: dict[str, list[OngoingPartitionReassignment]] = {}
    for topic, partition in found:
        by_topic.setdefault(topic.name, []).append(
            OngoingPartitionReassignment(
                partition_index=partition.index,
                replicas=list(partition.replicas),
                adding_replicas=list(partition.adding_replicas),
                removing_replicas=list(partition.removing_replicas),
            )
        )
    return ListPartitionReassignmentsResponse(
        error_message=None,
        topics=[OngoingTopicReassignment(name=name, partitions=parts) for name, parts in by_topic.items()],
    )


def elect_leaders(decided: DecidedState, request: ElectLeadersRequest) -> ElectLeadersResponse:
    if request.election_type not in (PREFERRED, UNCLEAN):
        return ElectLeadersResponse(error_code=ErrorCode.INVALID_REQUEST)
    # A request for all partitions does not get those that need no election listed.
    is_everything = request.topic_partitions is None
    if request.topic_partitions is None:
        keys = (
            decided.partition_index.astray
            if request.election_type == PREFERRED
            else decided.partition_index.leaderless
        )
        asked = [(topic.name, partition.index) for topic, partition in (decided.find(key) for key in keys)]
    else:
        asked = [(topic.topic, index) for topic in request.topic_partitions for index in topic.partitions]
    changes: list[PartitionChangeRecord] = []
    results: dict[str, list[PartitionResult]] = {}
    for name, index in dict.fromkeys(asked):
        result = PartitionResult(partition_id=index, error_message=None)
        try:
            if len(changes) >= CHANGES_MAX:
                raise Refusal(
                    ErrorCode.POLICY_VIOLATION, f"A request can elect {CHANGES_MAX} leaders at most."
                )
            changes.append(_elected(decided, *_find(decided, name, index), request.election_type))
        except Refusal as refusal:
            result.error_code, result.error_message = refusal.error, refusal.message
        if not is_everything or result.error_code != ErrorCode.ELECTION_NOT_NEEDED:
            results.setdefault(name, []).append(result)
    decided.take(changes)
    return ElectLeadersResponse(
        replica_election_results=[
            ReplicaElectionResult(topic=name, partition_result=parts) for name, parts in results.items()
        ]
    )


def _elected(
    decided: DecidedState, topic: TopicImage, partition: PartitionImage, election_type: int
) -> PartitionChangeRecord:
    revision = decided.revision(topic, partition)
    if election_type == PREFERRED:
        if partition.leader == partition.replicas[0]:
            raise Refusal(ErrorCode.ELECTION_NOT_NEEDED, "The preferred replica is already the leader.")
        revision.election = Election.PREFERRED
    else:
        if partition.leader != NO_LEADER:
            raise Refusal(ErrorCode.ELECTION_NOT_NEEDED, f"Broker {partition.leader} is the leader.")
        revision.election = Election.UNCLEAN
    change = revision.change()
    if election_type == PREFERRED and change is not None and change.leader != partition.replicas[0]:
        change = None
    if change is None or change.leader < 0:
        if election_type == PREFERRED:
            raise Refusal(
                ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred replica is not in sync or not alive."
            )
        raise Refusal(ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "No replica is alive.")
    return change


def _find(decided: DecidedState, name: str, index: int) -> tuple[TopicImage, PartitionImage]:
    topic = decided.image.topics.get(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "There is no such partition.")
    return topic, topic.partitions[index]
