"""Fetch, by consumers and by followers.

Sessions came with version 7 (KIP-227), flexible encoding and divergence with 12, topic ids in place of
names with 13 (KIP-516). A follower identifies itself in ``replica_id`` up to version 14 and in the tagged
``replica_state`` from 15 on (KIP-903); a consumer sends -1 and omits the second.
"""

from __future__ import annotations

from penstock.protocol.messages.leader_hints import LeaderIdAndEpoch, NodeEndpoint
from penstock.protocol.schema import (
    Message,
    Records,
    Response,
    array,
    int8,
    int16,
    int32,
    int64,
    record_set,
    string,
    struct,
    uuid,
)

TOPIC_IDS_SINCE_VERSION = 13


class ReplicaState(Message):
    replica_id: int = int32(default=-1)
    replica_epoch: int = int64(default=-1)


class FetchPartition(Message):
    partition: int = int32()
    current_leader_epoch: int = int32("9+", default=-1)
    fetch_offset: int = int64()
    last_fetched_epoch: int = int32("12+", default=-1)
    log_start_offset: int = int64("5+", default=-1)
    partition_max_bytes: int = int32()
    replica_directory_id: bytes = uuid("17+", tag=0)
    # The maximum means that the follower does not use this (KIP-1166).
    high_watermark: int = int64("18+", default=2**63 - 1, tag=1)


class FetchTopic(Message):
    topic: str = string("0-12")
    topic_id: bytes = uuid("13+")
    partitions: list[FetchPartition] = array(FetchPartition)


class ForgottenTopic(Message):
    topic: str = string("7-12")
    topic_id: bytes = uuid("13+")
    partitions: list[int] = array(int32)


class FetchRequest(Message, key=1, versions="4-18", flexible="12+"):
    cluster_id: str | None = string("12+", nullable=True, default=None, tag=0)
    replica_id: int = int32("0-14", default=-1)
    replica_state: ReplicaState | None = struct(ReplicaState, "15+", tag=1)
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(default=2**31 - 1)
    isolation_level: int = int8()
    session_id: int = int32("7+")
    session_epoch: int = int32("7+", default=-1)
    topics: list[FetchTopic] = array(FetchTopic)
    forgotten_topics_data: list[ForgottenTopic] = array(ForgottenTopic, "7+")
    # The consumer's rack, to direct it to a replica nearby (KIP-392).
    rack_id: str = string("11+")


class EpochEndOffset(Message):
    epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


class SnapshotId(Message):
    end_offset: int = int64(default=-1)
    epoch: int = int32(default=-1)


class AbortedTransaction(Message):
    producer_id: int = int64()
    first_offset: int = int64()


class PartitionData(Message):
    partition_index: int = int32()
    error_code: int = int16()
    high_watermark: int = int64()
    last_stable_offset: int = int64(default=-1)
    log_start_offset: int = int64("5+", default=-1)
    # Where the follower's log diverges from ours (KIP-595).
    diverging_epoch: EpochEndOffset | None = struct(EpochEndOffset, "12+", tag=0)
    current_leader: LeaderIdAndEpoch | None = struct(LeaderIdAndEpoch, "12+", tag=1)
    # The snapshot to load when the fetch offset is before our log start (KIP-630).
    snapshot_id: SnapshotId | None = struct(SnapshotId, "12+", tag=2)
    # Ours, for followers: tombstones that every assigned replica has, if it is compacted, and since when we know.
    replicated_before: int = int64("12+", default=-1, tag=10_000)
    partition_epoch: int = int32("12+", default=-1, tag=10_001)
    aborted_transactions: list[AbortedTransaction] | None = array(AbortedTransaction, nullable=True)
    preferred_read_replica: int = int32("11+", default=-1)
    # Without records b"", not None: librdkafka and kafka-python break on null.
    records: Records = record_set()


class FetchableTopicResponse(Message):
    topic: str = string("0-12")
    topic_id: bytes = uuid("13+")
    partitions: list[PartitionData] = array(PartitionData)


class FetchResponse(Response, key=1, versions="4-18", flexible="12+"):
    throttle_time_ms: int = int32()
    error_code: int = int16("7+")
    session_id: int = int32("7+")
    responses: list[FetchableTopicResponse] = array(FetchableTopicResponse)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "16+", tag=0)

    @classmethod
    def for_error(
        cls, request: FetchRequest, version: int, error: int, message: str | None = None
    ) -> FetchResponse:
        # Older versions have no error at the top level. From 13 on the partitions may be only in the session.
        topics = request.topics if version < TOPIC_IDS_SINCE_VERSION else []
        return cls(
            error_code=error,
            responses=[
                FetchableTopicResponse(
                    topic=topic.topic,
                    partitions=[
                        PartitionData(
                            partition_index=partition.partition,
                            error_code=error,
                            high_watermark=-1,
                            records=b"",
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in topics
            ],
        )
