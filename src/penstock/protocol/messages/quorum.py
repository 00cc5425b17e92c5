"""The metadata quorum: votes, epochs, snapshots, changes of the voters, and the control records of its log.

The quorum fetches with the ordinary ``fetch.FetchRequest``; the voters' other requests are here (KIP-595, 630, 853,
996). A struct whose name several messages share in Kafka's schemas has its message's name as a prefix here. The
control records at the end are the values of control batches in ``__cluster_metadata``; the type in a record's key
says which one it is (``CONTROL_TYPE``).

Careful: an ``error_code`` of 0 at the top level only means that the request was valid. Each partition, of which
there is one, has its own error.
"""

from __future__ import annotations

from penstock.protocol.schema import (
    OWN_TAGS,
    Message,
    Records,
    Response,
    array,
    boolean,
    int16,
    int32,
    int64,
    record_set,
    string,
    struct,
    uint16,
    uuid,
)


class Endpoint(Message):
    """A voter's address. Kafka has three names for it: Endpoint, LeaderEndpoint and Listener."""

    name: str = string()
    host: str = string()
    port: int = uint16()


class NodeEndpoint(Message):
    """The leader's address, for a voter that does not know it yet. Not the struct of this name in Fetch."""

    node_id: int = int32()
    host: str = string()
    port: int = uint16()


class VoteRequestPartition(Message):
    partition_index: int = int32()
    replica_epoch: int = int32()
    replica_id: int = int32()
    replica_directory_id: bytes = uuid("1+")
    voter_directory_id: bytes = uuid("1+")
    last_offset_epoch: int = int32()
    # The end of the candidate's log, exclusive.
    last_offset: int = int64()
    # Only asks whether a vote would be granted; no epoch changes (KIP-996).
    pre_vote: bool = boolean("2+")


class VoteRequestTopic(Message):
    topic_name: str = string()
    partitions: list[VoteRequestPartition] = array(VoteRequestPartition)


class VoteRequest(Message, key=52, versions="0-2", flexible="0+"):
    cluster_id: str | None = string(nullable=True, default=None)
    # The voter that the candidate means to ask.
    voter_id: int = int32("1+", default=-1)
    topics: list[VoteRequestTopic] = array(VoteRequestTopic)


class VoteResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()
    vote_granted: bool = boolean()


class VoteResponseTopic(Message):
    topic_name: str = string()
    partitions: list[VoteResponsePartition] = array(VoteResponsePartition)


class VoteResponse(Response, key=52, versions="0-2", flexible="0+"):
    error_code: int = int16()
    topics: list[VoteResponseTopic] = array(VoteResponseTopic)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)


class BeginQuorumEpochRequestPartition(Message):
    partition_index: int = int32()
    voter_directory_id: bytes = uuid("1+")
    leader_id: int = int32()
    leader_epoch: int = int32()


class BeginQuorumEpochRequestTopic(Message):
    topic_name: str = string()
    partitions: list[BeginQuorumEpochRequestPartition] = array(BeginQuorumEpochRequestPartition)


class BeginQuorumEpochRequest(Message, key=53, versions="0-1", flexible="1+"):
    cluster_id: str | None = string(nullable=True, default=None)
    voter_id: int = int32("1+", default=-1)
    topics: list[BeginQuorumEpochRequestTopic] = array(BeginQuorumEpochRequestTopic)
    leader_endpoints: list[Endpoint] = array(Endpoint, "1+")


class BeginQuorumEpochResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()


class BeginQuorumEpochResponseTopic(Message):
    topic_name: str = string()
    partitions: list[BeginQuorumEpochResponsePartition] = array(BeginQuorumEpochResponsePartition)


class BeginQuorumEpochResponse(Response, key=53, versions="0-1", flexible="1+"):
    error_code: int = int16()
    topics: list[BeginQuorumEpochResponseTopic] = array(BeginQuorumEpochResponseTopic)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)


class ReplicaInfo(Message):
    candidate_id: int = int32()
    candidate_directory_id: bytes = uuid()


class EndQuorumEpochRequestPartition(Message):
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32()
    # The most caught up first. The first one stands for election at once.
    preferred_successors: list[int] = array(int32, "0")
    preferred_candidates: list[ReplicaInfo] = array(ReplicaInfo, "1+")


class EndQuorumEpochRequestTopic(Message):
    topic_name: str = string()
    partitions: list[EndQuorumEpochRequestPartition] = array(EndQuorumEpochRequestPartition)


class EndQuorumEpochRequest(Message, key=54, versions="0-1", flexible="1+"):
    cluster_id: str | None = string(nullable=True, default=None)
    topics: list[EndQuorumEpochRequestTopic] = array(EndQuorumEpochRequestTopic)
    leader_endpoints: list[Endpoint] = array(Endpoint, "1+")


class EndQuorumEpochResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()


class EndQuorumEpochResponseTopic(Message):
    topic_name: str = string()
    partitions: list[EndQuorumEpochResponsePartition] = array(EndQuorumEpochResponsePartition)


class EndQuorumEpochResponse(Response, key=54, versions="0-1", flexible="1+"):
    error_code: int = int16()
    topics: list[EndQuorumEpochResponseTopic] = array(EndQuorumEpochResponseTopic)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)


class DescribeQuorumRequestPartition(Message):
    partition_index: int = int32()


class DescribeQuorumRequestTopic(Message):
    topic_name: str = string()
    partitions: list[DescribeQuorumRequestPartition] = array(DescribeQuorumRequestPartition)


class DescribeQuorumRequest(Message, key=55, versions="0-2", flexible="0+"):
    topics: list[DescribeQuorumRequestTopic] = array(DescribeQuorumRequestTopic)


class ReplicaState(Message):
    replica_id: int = int32()
    replica_directory_id: bytes = uuid("2+")
    # -1 when it has not fetched from this leader.
    log_end_offset: int = int64()
    # Wall-clock milliseconds by the leader's clock; -1 for never.
    last_fetch_timestamp: int = int64("1+", default=-1)
    last_caught_up_timestamp: int = int64("1+", default=-1)


class DescribeQuorumResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string("2+", nullable=True)
    leader_id: int = int32()
    leader_epoch: int = int32()
    high_watermark: int = int64()
    current_voters: list[ReplicaState] = array(ReplicaState)
    observers: list[ReplicaState] = array(ReplicaState)


class DescribeQuorumResponseTopic(Message):
    topic_name: str = string()
    partitions: list[DescribeQuorumResponsePartition] = array(DescribeQuorumResponsePartition)


class Node(Message):
    node_id: int = int32()
    listeners: list[Endpoint] = array(Endpoint)


class DescribeQuorumResponse(Response, key=55, versions="0-2", flexible="0+"):
    error_code: int = int16()
    error_message: str | None = string("2+", nullable=True)
    topics: list[DescribeQuorumResponseTopic] = array(DescribeQuorumResponseTopic)
    nodes: list[Node] = array(Node, "2+")


class SnapshotId(Message):
    end_offset: int = int64()
    epoch: int = int32()


class FetchSnapshotRequestPartition(Message):
    partition: int = int32()
    current_leader_epoch: int = int32()
    snapshot_id: SnapshotId = struct(SnapshotId)
    # A position in the snapshot's file.
    position: int = int64()
    replica_directory_id: bytes = uuid("1+", tag=0)


class FetchSnapshotRequestTopic(Message):
    name: str = string()
    partitions: list[FetchSnapshotRequestPartition] = array(FetchSnapshotRequestPartition)


class FetchSnapshotRequest(Message, key=59, versions="0-1", flexible="0+"):
    cluster_id: str | None = string(nullable=True, default=None, tag=0)
    replica_id: int = int32(default=-1)
    max_bytes: int = int32(default=2**31 - 1)
    topics: list[FetchSnapshotRequestTopic] = array(FetchSnapshotRequestTopic)


class LeaderIdAndEpoch(Message):
    """Unlike the one in Fetch, its defaults are zero, so leader 0 in epoch 0 counts as absent."""

    leader_id: int = int32()
    leader_epoch: int = int32()


class FetchSnapshotResponsePartition(Message):
    index: int = int32()
    error_code: int = int16()
    snapshot_id: SnapshotId = struct(SnapshotId)
    current_leader: LeaderIdAndEpoch | None = struct(LeaderIdAndEpoch, tag=0)
    # Size of the whole snapshot, in bytes.
    size: int = int64()
    position: int = int64()
    # Part of the file, from ``position`` on. Batches may be cut at either end.
    unaligned_records: Records = record_set()


class FetchSnapshotResponseTopic(Message):
    name: str = string()
    partitions: list[FetchSnapshotResponsePartition] = array(FetchSnapshotResponsePartition)


class FetchSnapshotResponse(Response, key=59, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: list[FetchSnapshotResponseTopic] = array(FetchSnapshotResponseTopic)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "1+", tag=0)


class AddRaftVoterRequest(Message, key=80, versions="0-1", flexible="0+"):
    cluster_id: str | None = string(nullable=True)
    timeout_ms: int = int32()
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()
    listeners: list[Endpoint] = array(Endpoint)
    # False: the leader answers as soon as it has appended the record, for a voter that adds itself.
    ack_when_committed: bool = boolean("1+", default=True)


class AddRaftVoterResponse(Response, key=80, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class RemoveRaftVoterRequest(Message, key=81, versions="0", flexible="0+"):
    cluster_id: str | None = string(nullable=True)
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()


class RemoveRaftVoterResponse(Response, key=81, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class KRaftVersionFeature(Message):
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class ControlRecordKey(Message, versions="0"):
    """The key of a record in a control batch. ``type`` is a key of ``CONTROL_TYPE``, or 0 or 1: a marker."""

    version: int = int16()
    type: int = int16()


class LeaderChangeMessageVoter(Message):
    voter_id: int = int32()
    voter_directory_id: bytes = uuid("1+")


class LeaderChangeMessage(Message, key=2, versions="0-1", flexible="0+"):
    """The first record of every epoch, written by its leader."""

    # Kafka decodes the value in the version that this field repeats.
    version: int = int16()
    leader_id: int = int32()
    voters: list[LeaderChangeMessageVoter] = array(LeaderChangeMessageVoter)
    granting_voters: list[LeaderChangeMessageVoter] = array(LeaderChangeMessageVoter)


class SnapshotHeaderRecord(Message, key=3, versions="0", flexible="0+"):
    version: int = int16()
    last_contained_log_timestamp: int = int64()


class SnapshotFooterRecord(Message, key=4, versions="0", flexible="0+"):
    version: int = int16()


class KRaftVersionRecord(Message, key=5, versions="0", flexible="0+"):
    version: int = int16()
    kraft_version: int = int16()


class VotersRecordVoter(Message):
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()
    endpoints: list[Endpoint] = array(Endpoint)
    kraft_version_feature: KRaftVersionFeature = struct(KRaftVersionFeature)


class RemovedVoter(Message):
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()


class VotersRecord(Message, key=6, versions="0", flexible="0+"):
    """The whole voter set. It counts from the moment it is in the log, not only when it is committed."""

    version: int = int16()
    voters: list[VotersRecordVoter] = array(VotersRecordVoter)
    # Ours, and in snapshots only: the voters of the previous set that this one lacks.
    removed: list[RemovedVoter] = array(RemovedVoter, tag=OWN_TAGS)


# The type in a control record's key -> the class of its value. The reverse is e.g. ``LeaderChangeMessage.KEY``.
CONTROL_TYPE: dict[int, type[Message]] = {
    cls.KEY: cls
    for cls in (
        LeaderChangeMessage,
        SnapshotHeaderRecord,
        SnapshotFooterRecord,
        KRaftVersionRecord,
        VotersRecord,
    )
}
