"""Following without fetching: what a follower on a full disk asks its leader, and what the answer means.

Retention is the leader's business, and a follower begins where its leader begins (decision 23). One that has no
room fetches nothing (decision 21), and would keep for ever what has expired everywhere else, which may be the very
records that fill its disk. So it goes on asking where the leader's log begins and where the two logs part: to
delete and to cut needs no room.

It asks as a consumer does. A follower's fetch says that it has all before the offset it asks for, and on a quiet
partition the leader would propose it for the in-sync replicas; a consumer's says nothing. Leaders of older
versions answer it as well.

What a newcomer gets wrong: a consumer is told OFFSET_OUT_OF_RANGE behind the high watermark, where a follower may
well be. Then the leader has compared the epochs, but we take no more from the answer than we can prove.
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
    """Where a follower's log is when it asks. The answer is about that and nothing else."""

    leader_epoch: int
    # The end of the log, and the epoch of the last record before it.
    offset: int
    last_epoch: int
    # What it knows to be committed.
    high_watermark: int


def question(positions: Mapping[PartitionKey, Position]) -> FetchRequest:
    """By topic id: a topic of the same name may be made again, and its log begins elsewhere."""
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
        # The first batch comes along all the same, however large it is (KIP-74).
        max_bytes=0,
        max_wait_ms=0,
        min_bytes=0,
        topics=[FetchTopic(topic_id=topic_id, partitions=asked) for topic_id, asked in topics.items()],
    )


def effects(positions: Mapping[PartitionKey, Position], response: FetchResponse) -> Iterator[Effect]:
    """What a leader's answer means for those that were asked about. No effect brings records."""
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
