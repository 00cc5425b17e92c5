"""Converts the quorum's events (``raft/events.py``) to Kafka's messages, and back.

The core has one log; Kafka's messages have topics and partitions, here always exactly one of each. So each message
is an envelope with one letter in it, the partition, and this module packs and unpacks it. It decides nothing: a
message without a partition becomes None, which the caller treats as no answer or answers with INVALID_REQUEST.

Careful: the bytes in a response are views of a buffer that is used again. They are copied here, because the core
may process them in a later turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from penstock.metadata.topics import CLUSTER_METADATA, CLUSTER_METADATA_ID
from penstock.protocol.errors import ErrorCode
from penstock.protocol.listeners import NODES
from penstock.protocol.messages import fetch as fetching
from penstock.protocol.messages import quorum as messages
from penstock.protocol.messages.leader_hints import LeaderIdAndEpoch
from penstock.protocol.schema import Message
from penstock.raft.events import (
    Answer,
    BeginEpochRequest,
    ChangeVoterRequest,
    DescribeAnswer,
    DescribeRequest,
    EndEpochRequest,
    EpochAnswer,
    FetchAnswer,
    FetchRequest,
    Request,
    SnapshotAnswer,
    SnapshotRequest,
    VoteAnswer,
    VoteRequest,
)
from penstock.raft.quorum import Voter
from penstock.raft.storage import EpochEnd, SnapshotId

# One connection each, so that long polls and long downloads do not hold up votes.
CHANNEL = "quorum"
FETCH_CHANNEL = "quorum-fetch"
SNAPSHOT_CHANNEL = "snapshot"

# The newest each: all nodes of a cluster run the same release.
VOTE_VERSION = 2
BEGIN_VERSION = 1
END_VERSION = 1
DESCRIBE_VERSION = 2
FETCH_VERSION = 18
SNAPSHOT_VERSION = 1

# The core has no use for a response that takes longer.
TIMEOUT_MS = 1_000
SNAPSHOT_TIMEOUT_MS = 5_000

# Some thousand changes: a follower reads them all in one turn of its loop.
FETCH_BYTES_MAX = 256 * 1024
SNAPSHOT_CHUNK_BYTES = 1024 * 1024

Addresses: TypeAlias = Mapping[int, tuple[str, int]]


class Letter(NamedTuple):
    """A request ready to be sent."""

    channel: str
    message: Message
    version: int
    timeout_ms: int


# Requests, outward


def write(request: Request, cluster_id: str | None, me: Voter, addresses: Addresses) -> Letter:
    match request:
        case FetchRequest():
            return Letter(
                FETCH_CHANNEL, _fetch(request, cluster_id), FETCH_VERSION, request.max_wait_ms + TIMEOUT_MS
            )
        case VoteRequest():
            vote = messages.VoteRequestPartition(
                replica_epoch=request.epoch,
                replica_id=request.candidate.id,
                replica_directory_id=request.candidate.directory,
                voter_directory_id=request.voter.directory,
                last_offset_epoch=request.last_epoch,
                last_offset=request.end_offset,
                pre_vote=request.is_pre_vote,
            )
            votes = [messages.VoteRequestTopic(topic_name=CLUSTER_METADATA, partitions=[vote])]
            message: Message = messages.VoteRequest(
                cluster_id=cluster_id, voter_id=request.voter.id, topics=votes
            )
            return Letter(CHANNEL, message, VOTE_VERSION, TIMEOUT_MS)
        case BeginEpochRequest():
            begin = messages.BeginQuorumEpochRequestPartition(
                voter_directory_id=request.voter.directory,
                leader_id=request.leader_id,
                leader_epoch=request.epoch,
            )
            message = messages.BeginQuorumEpochRequest(
                cluster_id=cluster_id,
                voter_id=request.voter.id,
                topics=[
                    messages.BeginQuorumEpochRequestTopic(topic_name=CLUSTER_METADATA, partitions=[begin])
                ],
                leader_endpoints=endpoints_of(me.id, addresses),
            )
            return Letter(CHANNEL, message, BEGIN_VERSION, TIMEOUT_MS)
        case EndEpochRequest():
            end = messages.EndQuorumEpochRequestPartition(
                leader_id=request.leader_id,
                leader_epoch=request.epoch,
                preferred_candidates=[
                    messages.ReplicaInfo(candidate_id=id, candidate_directory_id=directory)
                    for id, directory in request.preferred
                ],
            )
            message = messages.EndQuorumEpochRequest(
                cluster_id=cluster_id,
                topics=[messages.EndQuorumEpochRequestTopic(topic_name=CLUSTER_METADATA, partitions=[end])],
                leader_endpoints=endpoints_of(me.id, addresses),
            )
            return Letter(CHANNEL, message, END_VERSION, TIMEOUT_MS)
        case DescribeRequest():
            described = messages.DescribeQuorumRequestTopic(
                topic_name=CLUSTER_METADATA, partitions=[messages.DescribeQuorumRequestPartition()]
            )
            return Letter(
                CHANNEL, messages.DescribeQuorumRequest(topics=[described]), DESCRIBE_VERSION, TIMEOUT_MS
            )
        case SnapshotRequest():
            piece = messages.FetchSnapshotRequestPartition(
                current_leader_epoch=request.epoch,
                snapshot_id=messages.SnapshotId(
                    end_offset=request.snapshot_id.end_offset, epoch=request.snapshot_id.epoch
                ),
                position=request.position,
                replica_directory_id=request.replica.directory,
            )
            message = messages.FetchSnapshotRequest(
                cluster_id=cluster_id,
                replica_id=request.replica.id,
                max_bytes=SNAPSHOT_CHUNK_BYTES,
                topics=[messages.FetchSnapshotRequestTopic(name=CLUSTER_METADATA, partitions=[piece])],
            )
            return Letter(SNAPSHOT_CHANNEL, message, SNAPSHOT_VERSION, SNAPSHOT_TIMEOUT_MS)
        case ChangeVoterRequest():
            raise AssertionError("operators ask for that, not nodes")


def _fetch(request: FetchRequest, cluster_id: str | None) -> fetching.FetchRequest:
    partition = fetching.FetchPartition(
        partition=0,
        current_leader_epoch=request.epoch,
        fetch_offset=request.offset,
        last_fetched_epoch=request.last_epoch,
        partition_max_bytes=FETCH_BYTES_MAX,
        replica_directory_id=request.replica.directory,
        high_watermark=request.high_watermark,
    )
    return fetching.FetchRequest(
        cluster_id=cluster_id,
        replica_state=fetching.ReplicaState(replica_id=request.replica.id),
        max_wait_ms=request.max_wait_ms,
        min_bytes=1,
        max_bytes=FETCH_BYTES_MAX,
        topics=[fetching.FetchTopic(topic_id=CLUSTER_METADATA_ID, partitions=[partition])],
    )


# Requests, inward


def read(message: Any) -> Request | None:
    """The request of another node or an operator; None when the partition is missing."""
    match message:
        case messages.DescribeQuorumRequest():
            return DescribeRequest()
        case messages.AddRaftVoterRequest():
            return ChangeVoterRequest(Voter(message.voter_id, message.voter_directory_id), False)
        case messages.RemoveRaftVoterRequest():
            return ChangeVoterRequest(Voter(message.voter_id, message.voter_directory_id), True)
    letter = _only(message.topics)
    if letter is None:
        return None
    match message:
        case fetching.FetchRequest():
            return _read_fetch(message, letter)
        case messages.VoteRequest():
            return VoteRequest(
                letter.replica_epoch,
                Voter(letter.replica_id, letter.replica_directory_id),
                Voter(message.voter_id, letter.voter_directory_id),
                letter.last_offset_epoch,
                letter.last_offset,
                letter.pre_vote,
            )
        case messages.BeginQuorumEpochRequest():
            voter = Voter(message.voter_id, letter.voter_directory_id)
            return BeginEpochRequest(letter.leader_epoch, letter.leader_id, voter)
        case messages.EndQuorumEpochRequest():
            preferred = tuple(
                Voter(candidate.candidate_id, candidate.candidate_directory_id)
                for candidate in letter.preferred_candidates
            )
            return EndEpochRequest(letter.leader_epoch, letter.leader_id, preferred)
        case messages.FetchSnapshotRequest():
            return _read_snapshot(message, letter)
        case _:
            raise AssertionError(f"{type(message).__name__} is not for the quorum")


def _read_fetch(message: fetching.FetchRequest, letter: fetching.FetchPartition) -> FetchRequest | None:
    if message.replica_state is None:
        return None
    return FetchRequest(
        letter.current_leader_epoch,
        Voter(message.replica_state.replica_id, letter.replica_directory_id),
        letter.fetch_offset,
        letter.last_fetched_epoch,
        letter.high_watermark,
        message.max_wait_ms,
    )


def _read_snapshot(
    message: messages.FetchSnapshotRequest, letter: messages.FetchSnapshotRequestPartition
) -> SnapshotRequest | None:
    if letter.position < 0:
        return None
    return SnapshotRequest(
        letter.current_leader_epoch,
        Voter(message.replica_id, letter.replica_directory_id),
        SnapshotId(letter.snapshot_id.end_offset, letter.snapshot_id.epoch),
        letter.position,
    )


# Answers, outward


def write_answer(request: Request, answer: Answer, records: Any = b"", size: int = 0) -> Message:
    """``records`` is the data for a Fetch or FetchSnapshot response, ``size`` that of the whole snapshot."""
    leader_id = -1 if answer.leader_id is None else answer.leader_id
    match answer:
        case VoteAnswer():
            vote = messages.VoteResponsePartition(
                error_code=answer.error,
                leader_id=leader_id,
                leader_epoch=answer.epoch,
                vote_granted=answer.is_granted,
            )
            return messages.VoteResponse(
                topics=[messages.VoteResponseTopic(topic_name=CLUSTER_METADATA, partitions=[vote])]
            )
        case FetchAnswer():
            return _write_fetch(answer, leader_id, records)
        case SnapshotAnswer():
            assert answer.snapshot_id is not None
            piece = messages.FetchSnapshotResponsePartition(
                error_code=answer.error,
                snapshot_id=messages.SnapshotId(
                    end_offset=answer.snapshot_id.end_offset, epoch=answer.snapshot_id.epoch
                ),
                current_leader=messages.LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=answer.epoch),
                size=size,
                position=answer.position,
                unaligned_records=records,
            )
            return messages.FetchSnapshotResponse(
                topics=[messages.FetchSnapshotResponseTopic(name=CLUSTER_METADATA, partitions=[piece])]
            )
        case EpochAnswer():
            return _write_epoch(request, answer, leader_id)
        case DescribeAnswer():
            raise AssertionError("described by ``write_description``")


def _write_fetch(answer: FetchAnswer, leader_id: int, records: Any) -> fetching.FetchResponse:
    data = fetching.PartitionData(
        error_code=answer.error,
        high_watermark=answer.high_watermark,
        current_leader=LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=answer.epoch),
        records=records,
    )
    if answer.diverging is not None:
        data.diverging_epoch = fetching.EpochEndOffset(
            epoch=answer.diverging.epoch, end_offset=answer.diverging.end_offset
        )
    if answer.snapshot_id is not None:
        data.snapshot_id = fetching.SnapshotId(
            end_offset=answer.snapshot_id.end_offset, epoch=answer.snapshot_id.epoch
        )
    topic = fetching.FetchableTopicResponse(topic_id=CLUSTER_METADATA_ID, partitions=[data])
    return fetching.FetchResponse(responses=[topic])


def _write_epoch(request: Request, answer: EpochAnswer, leader_id: int) -> Message:
    if isinstance(request, BeginEpochRequest):
        begun = messages.BeginQuorumEpochResponsePartition(
            error_code=answer.error, leader_id=leader_id, leader_epoch=answer.epoch
        )
        return messages.BeginQuorumEpochResponse(
            topics=[messages.BeginQuorumEpochResponseTopic(topic_name=CLUSTER_METADATA, partitions=[begun])]
        )
    if isinstance(request, EndEpochRequest):
        ended = messages.EndQuorumEpochResponsePartition(
            error_code=answer.error, leader_id=leader_id, leader_epoch=answer.epoch
        )
        return messages.EndQuorumEpochResponse(
            topics=[messages.EndQuorumEpochResponseTopic(topic_name=CLUSTER_METADATA, partitions=[ended])]
        )
    assert isinstance(request, ChangeVoterRequest)
    response = messages.RemoveRaftVoterResponse if request.is_removal else messages.AddRaftVoterResponse
    return response(error_code=answer.error, error_message=_WHY_NOT.get(answer.error))


_WHY_NOT = {
    ErrorCode.NOT_LEADER_OR_FOLLOWER: "This node does not lead the quorum.",
    ErrorCode.REQUEST_TIMED_OUT: (
        "The change before is not committed yet, or the node has not caught up with the metadata."
    ),
    ErrorCode.DUPLICATE_VOTER: "The node has a vote already; one with another directory is removed first.",
    ErrorCode.VOTER_NOT_FOUND: "There is no voter with this id and directory.",
    ErrorCode.INVALID_REQUEST: "The voters left could not go on without it.",
    ErrorCode.KAFKA_STORAGE_ERROR: "The disk is full.",
}


class Standing(NamedTuple):
    """The progress of a replica, for DescribeQuorum."""

    replica: Voter
    # -1 when unknown.
    end_offset: int = -1
    fetched_wall_ms: int = -1
    caught_up_wall_ms: int = -1


def write_description(
    answer: DescribeAnswer,
    high_watermark: int,
    voters: list[Standing],
    observers: list[Standing],
    addresses: Addresses,
) -> messages.DescribeQuorumResponse:
    partition = messages.DescribeQuorumResponsePartition(
        error_code=answer.error,
        leader_id=-1 if answer.leader_id is None else answer.leader_id,
        leader_epoch=answer.epoch,
        high_watermark=high_watermark,
        current_voters=[_state(standing) for standing in voters],
        observers=[_state(standing) for standing in observers],
    )
    if answer.error:
        partition.error_message = "This node does not lead the quorum."
    nodes = [
        messages.Node(node_id=standing.replica.id, listeners=endpoints_of(standing.replica.id, addresses))
        for standing in voters
    ]
    topic = messages.DescribeQuorumResponseTopic(topic_name=CLUSTER_METADATA, partitions=[partition])
    return messages.DescribeQuorumResponse(topics=[topic], nodes=nodes)


def _state(standing: Standing) -> messages.ReplicaState:
    return messages.ReplicaState(
        replica_id=standing.replica.id,
        replica_directory_id=standing.replica.directory,
        log_end_offset=standing.end_offset,
        last_fetch_timestamp=standing.fetched_wall_ms,
        last_caught_up_timestamp=standing.caught_up_wall_ms,
    )


def endpoints_of(id: int, addresses: Addresses) -> list[messages.Endpoint]:
    address = addresses.get(id)
    if address is None:
        return []
    return [messages.Endpoint(name=NODES.name, host=address[0], port=address[1])]


# Answers, inward; None when the response holds none


def read_answer(node_id: int, request: Request, response: Any) -> Answer | None:
    """The answer of ``node_id`` to this request."""
    if response is None or response.error_code:
        return None
    partition = _only(response.responses if isinstance(request, FetchRequest) else response.topics)
    if partition is None:
        return None
    error = _error(partition.error_code)
    match request:
        case FetchRequest():
            return _read_fetch_answer(partition, error)
        case VoteRequest():
            return VoteAnswer(
                error, partition.leader_epoch, _leader(partition.leader_id), partition.vote_granted
            )
        case BeginEpochRequest() | EndEpochRequest():
            return EpochAnswer(error, partition.leader_epoch, _leader(partition.leader_id))
        case SnapshotRequest():
            leader = partition.current_leader
            if leader is None:
                return None
            return SnapshotAnswer(
                error,
                leader.leader_epoch,
                _leader(leader.leader_id),
                SnapshotId(partition.snapshot_id.end_offset, partition.snapshot_id.epoch),
                partition.position,
                partition.size,
                bytes(partition.unaligned_records or b""),
            )
        case DescribeRequest():
            return _read_description(node_id, partition, error)
        case ChangeVoterRequest():
            raise AssertionError("operators ask for that, not nodes")


def _read_fetch_answer(partition: fetching.PartitionData, error: ErrorCode) -> FetchAnswer | None:
    leader = partition.current_leader
    if leader is None:
        return None
    diverging = partition.diverging_epoch
    snapshot = partition.snapshot_id
    return FetchAnswer(
        error,
        leader.leader_epoch,
        _leader(leader.leader_id),
        partition.high_watermark,
        None if diverging is None else EpochEnd(diverging.epoch, diverging.end_offset),
        None if snapshot is None else SnapshotId(snapshot.end_offset, snapshot.epoch),
        bytes(partition.records or b""),  # type: ignore[arg-type]
    )


def _read_description(
    node_id: int, partition: messages.DescribeQuorumResponsePartition, error: ErrorCode
) -> DescribeAnswer:
    voters = tuple(Voter(state.replica_id, state.replica_directory_id) for state in partition.current_voters)
    replicas = [*partition.current_voters, *partition.observers]
    # Of the node that answers. -1 if it does not report one: only 0 marks a new node.
    end_offset = next((state.log_end_offset for state in replicas if state.replica_id == node_id), -1)
    return DescribeAnswer(error, partition.leader_epoch, _leader(partition.leader_id), voters, end_offset)


def _only(topics: Any) -> Any:
    """The one partition of the one topic, if there is one."""
    return topics[0].partitions[0] if topics and topics[0].partitions else None


def _leader(id: int) -> int | None:
    return id if id >= 0 else None


def _error(code: int) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR
