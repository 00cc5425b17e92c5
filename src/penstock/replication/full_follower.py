"""A follower on a full disk: what it asks its leader instead of fetching, and what the response means.

The leader applies retention, and a follower's log begins where its leader's begins (decision 23). A follower
without disk space fetches nothing (decision 21), and would never delete records that have expired everywhere else,
which may be the ones that fill its disk. So it keeps asking where the leader's log begins and where the two logs
diverge: deleting and truncating need no space.

It asks as a consumer. A follower's fetch promises everything before the fetch offset, and on a quiet partition the
leader would propose it for the in-sync replicas; a consumer's fetch promises nothing. Leaders of older versions
answer it too.

Careful: above the high watermark, where a follower's log may end, a consumer gets OFFSET_OUT_OF_RANGE. Then the
leader has compared the epochs, but we use only the part of the response that is certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from penstock.replication.events import Append, Effect, PartitionKey, StartOver, Truncate


class Position(NamedTuple):
    """The state of a follower's log at the time of the request. The response applies to this state only."""

    leader_epoch: int
    # The end of the log, and the epoch of the last record before it.
    offset: int
    last_epoch: int
    # As the follower knows it.
    high_watermark: int


def question(positions: Mapping[PartitionKey, Position]) -> FetchRequest:
    """Build the fetch request. It uses topic ids: a recreated topic of the same name has another log."""
    topics: dict[bytes, list[FetchPartition]] = {}
    for (topic_id, index), position in positions.items():
        topics.setdefault(topic_id, []).append(
            FetchPartition(
                partition=index,
                current_leader_epoch=position.leader_epoch,
                fetch_offset=position.offset,
                last_fetched_epoch=position.last_epoch,
                partition_max_bytes=0,
            )
        )
    return FetchRequest(
        # The response still holds the first batch, however large it is (KIP-74).
        max_bytes=0,
        max_wait_ms=0,
        min_bytes=0,
        topics=[FetchTopic(topic_id=topic_id, partitions=asked) for topic_id, asked in topics.items()],
    )


def effects(positions: Mapping[PartitionKey, Position], response: FetchResponse) -> Iterator[Effect]:
    """The effects of a leader's response on the requested partitions. None of them carries records."""
    for topic in response.responses:
        for data in topic.partitions:
            key = (topic.topic_id, data.partition_index)
            position = positions.get(key)
            effect = None if position is None else _effect(key, position, data)
            if effect is not None:
                yield effect


def _effect(key: PartitionKey, position: Position, data: PartitionData) -> Effect | None:
    start = data.log_start_offset
    if data.error_code not in (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE) or start < 0:
        return None
    diverging = data.diverging_epoch
    if diverging is not None and diverging.end_offset >= 0:
        return Truncate(key, diverging.epoch, diverging.end_offset)
    if start > position.offset:
        return StartOver(key, start)
    if data.error_code == ErrorCode.NONE:
        return Append(key, b"", data.high_watermark, start)
    return Append(key, b"", position.high_watermark, min(start, position.high_watermark))
