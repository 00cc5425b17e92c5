"""A batch that a producer sent: whether the partition takes it, and what became of it.

What is checked here depends on the batch, the topic's settings and the time. Whether the batch is new, and whether
there is room and enough replicas for it, the hosted partition finds out afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.broker.config import TopicConfig
from penstock.broker.partition.partition_host import PartitionHost
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import NO_TIMESTAMP, BatchHeader, check_produced


class Appended(NamedTuple):
    error: ErrorCode
    base_offset: int = -1
    # When the broker stamped the batch; -1 when the producer's own timestamps stand.
    log_append_time_ms: int = NO_TIMESTAMP
    # Behind the batch: what the high watermark must reach before all replicas in sync have it.
    end_offset: int = 0
    # What must be on this disk before any acknowledgement; 0 when nothing must.
    flush_offset: int = 0


def check_batch(
    records: memoryview, config: TopicConfig, wall_ms: int, host: PartitionHost, *, allow_zstd: bool
) -> tuple[BatchHeader, int] | ErrorCode:
    """Its header, and the time to stamp on it; NO_TIMESTAMP when the producer's own timestamps stand."""
    header = check_produced(records, max_message_bytes=config.max_message_bytes, allow_zstd=allow_zstd)
    if not isinstance(header, BatchHeader):
        return header
    if header.is_transactional:
        return ErrorCode.INVALID_TXN_STATE
    if config.is_log_append_time:
        return header, host.stamp_ms()
    if (
        header.max_timestamp > wall_ms + config.timestamp_after_max_ms
        or header.base_timestamp < wall_ms - config.timestamp_before_max_ms
        # The one whose clock is wrong may be us.
    ) and not _is_near(header, host.time_range_ms(), config):
        return ErrorCode.INVALID_TIMESTAMP
    return header, NO_TIMESTAMP


def _is_near(header: BatchHeader, range_ms: tuple[int, int], config: TopicConfig) -> bool:
    """Whether the timestamps are as near to the time, which is somewhere in the range, as the topic asks for."""
    earliest_ms, latest_ms = range_ms
    return (
        header.max_timestamp <= latest_ms + config.timestamp_after_max_ms
        and header.base_timestamp >= earliest_ms - config.timestamp_before_max_ms
    )
