"""The checks of a produced batch, and the result of its append.

The checks here depend on the batch, the topic's settings and the time. The hosted partition then checks whether the
batch is new, and whether there is room and enough replicas for it.
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
    # The time stamped on the batch; -1 when the producer's own timestamps stay.
    log_append_time_ms: int = NO_TIMESTAMP
    # Exclusive. When the high watermark reaches it, all in-sync replicas have the batch.
    end_offset: int = 0
    # Exclusive. Must be on this disk before any acknowledgement; 0 when no flush is needed.
    flush_offset: int = 0


# The coordinator of the transaction must be asked before the batch is appended.
NOT_VERIFIED = Appended(ErrorCode.CONCURRENT_TRANSACTIONS)


def check_batch(
    records: memoryview, config: TopicConfig, wall_ms: int, host: PartitionHost, *, allow_zstd: bool
) -> tuple[BatchHeader, int] | ErrorCode:
    """Its header and the time to stamp on it (NO_TIMESTAMP: the producer's own timestamps stay), or an error."""
    header = check_produced(records, max_message_bytes=config.max_message_bytes, allow_zstd=allow_zstd)
    if not isinstance(header, BatchHeader):
        return header
    if config.is_log_append_time:
        return header, host.stamp_ms()
    if (
        header.max_timestamp > wall_ms + config.timestamp_after_max_ms
        or header.base_timestamp < wall_ms - config.timestamp_before_max_ms
        # This broker's own clock may be the wrong one.
    ) and not _is_near(header, host.time_range_ms(), config):
        return ErrorCode.INVALID_TIMESTAMP
    return header, NO_TIMESTAMP


def _is_near(header: BatchHeader, range_ms: tuple[int, int], config: TopicConfig) -> bool:
    """Whether the timestamps are within the topic's limits for some time in the range."""
    earliest_ms, latest_ms = range_ms
    return (
        header.max_timestamp <= latest_ms + config.timestamp_after_max_ms
        and header.base_timestamp >= earliest_ms - config.timestamp_before_max_ms
    )
