"""The topic settings that a log uses. The defaults are Kafka's."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = -1
NEVER_MS = 2**63 - 1

_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class LogConfig:
    # A segment is rolled when it would grow beyond this size, or is older than this,
    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * _DAY_MS
    # or when one of its indexes has this size.
    segment_index_bytes: int = 10 << 20
    # Bytes of log between two index entries.
    index_interval_bytes: int = 4096
    # KEEP: no limit.
    retention_ms: int = 7 * _DAY_MS
    retention_bytes: int = KEEP
    # How long the state of an idle idempotent producer is kept.
    producer_expiration_ms: int = _DAY_MS
    # Compaction (``cleanup.policy``). The ``retention_*`` above are KEEP without the policy ``delete``.
    is_compacted: bool = False
    # The share of uncompacted bytes that makes a log due.
    min_cleanable_dirty_ratio: float = 0.5
    # A record younger than this is not compacted; one older than that makes its log due.
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = NEVER_MS
    # How long a tombstone, or the marker of a transaction without records, stays after it was first compacted.
    delete_retention_ms: int = _DAY_MS
