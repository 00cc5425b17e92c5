"""The checks of a produced batch, and the result of its append.

The checks here depend on the batch, the topic's settings and the time. The hosted partition then checks whether the
batch is new, and whether there is room and enough replicas for it. The records inside are read only for a compacted
topic, where each needs a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.broker.config import TopicConfig
from penstock.broker.partition.partition_host import PartitionHost
from penstock.protocol.compression import TooLarge
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import (
    NO_TIMESTAMP,
    BatchHeader,
    CorruptBatch,
    check_produced,
    keyless_records,
)

# Limits of a batch for a compacted topic, whose records are read. A few kilobytes may decompress to gigabytes, and
# nothing else is served meanwhile: this many records take some tenths of a second.
COMPACTED_BATCH_BYTES_MAX = 64 << 20
COMPACTED_BATCH_RECORDS_MAX = 200_000
# Records named in one response. A client that forgets the key of one forgets that of all.
RECORD_ERRORS_MAX = 1000


class Refused(NamedTuple):
    """Why a batch was refused, in words."""

    message: str
    # The places in the batch, from 0 on, of the records that are to blame (KIP-467).
    records: Sequence[int] = ()


class Appended(NamedTuple):
    error: ErrorCode
    base_offset: int = -1
    # The time stamped on the batch; -1 when the producer's own timestamps stay.
    log_append_time_ms: int = NO_TIMESTAMP
    # Exclusive. When the high watermark reaches it, all in-sync replicas have the batch.
    end_offset: int = 0
    # Exclusive. Must be on this disk before any acknowledgement; 0 when no flush is needed.
    flush_offset: int = 0
    # With some errors.
    refused: Refused | None = None


# The coordinator of the transaction must be asked before the batch is appended.
NOT_VERIFIED = Appended(ErrorCode.CONCURRENT_TRANSACTIONS)


def check_batch(
    records: memoryview, config: TopicConfig, wall_ms: int, host: PartitionHost, *, allow_zstd: bool
) -> tuple[BatchHeader, int] | Appended:
    """Its header and the time to stamp on it (NO_TIMESTAMP: the producer's own timestamps stay), or an error."""
    header = check_produced(records, max_message_bytes=config.max_message_bytes, allow_zstd=allow_zstd)
    if not isinstance(header, BatchHeader):
        return Appended(header)
    if config.is_compact:
        refused = _check_keys(records, header)
        if refused is not None:
            return refused
    if config.is_log_append_time:
        return header, host.stamp_ms()
    if (
        header.max_timestamp > wall_ms + config.timestamp_after_max_ms
        or header.base_timestamp < wall_ms - config.timestamp_before_max_ms
        # This broker's own clock may be the wrong one.
    ) and not _is_near(header, host.time_range_ms(), config):
        return Appended(ErrorCode.INVALID_TIMESTAMP)
    return header, NO_TIMESTAMP


def _check_keys(records: memoryview, header: BatchHeader) -> Appended | None:
    """Refuse a batch that compaction could not read, or with a record without a key."""
    if header.count > COMPACTED_BATCH_RECORDS_MAX:
        return _too_large(f"{COMPACTED_BATCH_RECORDS_MAX} records")
    try:
        keyless = keyless_records(records, bytes_max=COMPACTED_BATCH_BYTES_MAX)
    except TooLarge:
        return _too_large(f"{COMPACTED_BATCH_BYTES_MAX} bytes when it is decompressed")
    except CorruptBatch as error:
        return Appended(ErrorCode.INVALID_RECORD, refused=Refused(f"The batch cannot be read: {error}."))
    if not keyless:
        return None
    message = (
        "The topic is compacted, and a record in the batch has no key."
        if len(keyless) == 1
        else f"The topic is compacted, and {len(keyless)} records in the batch have no key."
    )
    return Appended(ErrorCode.INVALID_RECORD, refused=Refused(message, keyless[:RECORD_ERRORS_MAX]))


def _too_large(limit: str) -> Appended:
    # Some clients split the batch and send its parts.
    message = f"A batch for a compacted topic has at most {limit}: send smaller batches."
    return Appended(ErrorCode.MESSAGE_TOO_LARGE, refused=Refused(message))


def _is_near(header: BatchHeader, range_ms: tuple[int, int], config: TopicConfig) -> bool:
    """Whether the timestamps are within the topic's limits for some time in the range."""
    earliest_ms, latest_ms = range_ms
    return (
        header.max_timestamp <= latest_ms + config.timestamp_after_max_ms
        and header.base_timestamp >= earliest_ms - config.timestamp_before_max_ms
    )
