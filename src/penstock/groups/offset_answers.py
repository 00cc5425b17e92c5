"""OffsetFetch responses, whose format depends on the version."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    OFFSET_FETCH_BATCHED,
    OFFSET_FETCH_TOP_LEVEL_ERROR,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)

NO_OFFSET = -1


def offset_fetch_groups(request: OffsetFetchRequest, version: int) -> list[OffsetFetchRequestGroup]:
    """The groups of an OffsetFetch request, in the newer format for every version."""
    if version >= OFFSET_FETCH_BATCHED:
        return request.groups
    topics = None
    if request.topics is not None:
        topics = [
            OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
            for topic in request.topics
        ]
    return [OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]


def offset_fetch_response(
    request: OffsetFetchRequest, version: int, groups: Sequence[OffsetFetchResponseGroup]
) -> OffsetFetchResponse:
    """The response for these groups, in the format of the request's version."""
    if version >= OFFSET_FETCH_BATCHED:
        return OffsetFetchResponse(groups=list(groups))
    (group,) = groups
    if version < OFFSET_FETCH_TOP_LEVEL_ERROR and group.error_code:
        # These versions have no field for the group's error, so every partition gets it.
        return OffsetFetchResponse.for_error(request, version, group.error_code)
    topics = [
        OffsetFetchResponseTopic(
            name=topic.name,
            partitions=[
                OffsetFetchResponsePartition(
                    partition_index=partition.partition_index,
                    committed_offset=partition.committed_offset,
                    committed_leader_epoch=partition.committed_leader_epoch,
                    metadata=partition.metadata,
                    error_code=partition.error_code,
                )
                for partition in topic.partitions
            ],
        )
        for topic in group.topics
    ]
    return OffsetFetchResponse(topics=topics, error_code=group.error_code)


def offset_fetched(
    topic: OffsetFetchRequestTopics | str, partitions: list[OffsetFetchResponsePartitions]
) -> OffsetFetchResponseTopics:
    if isinstance(topic, str):
        return OffsetFetchResponseTopics(name=topic, partitions=partitions)
    return OffsetFetchResponseTopics(name=topic.name, topic_id=topic.topic_id, partitions=partitions)


def no_offset(partition: int, error: ErrorCode = ErrorCode.NONE) -> OffsetFetchResponsePartitions:
    """A partition without a commit. The metadata is empty, not null, which some clients cannot read."""
    return OffsetFetchResponsePartitions(
        partition_index=partition, committed_offset=NO_OFFSET, metadata="", error_code=error
    )
