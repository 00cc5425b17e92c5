"""What a log needs to know of its topic's settings. The defaults are Kafka's."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = -1

_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class LogConfig:
    # A segment is completed when it would grow beyond this size, or is older than this,
    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * _DAY_MS
    # or when one of its indexes has this size.
    segment_index_bytes: int = 10 << 20
    # One index entry about every so many bytes.
    index_interval_bytes: int = 4096
    # KEEP: for ever.
    retention_ms: int = 7 * _DAY_MS
    retention_bytes: int = KEEP
    # How long an idempotent producer that writes nothing is remembered.
    producer_expiration_ms: int = _DAY_MS
