"""Which segments retention removes: pure arithmetic over end offset, size and largest timestamp.

Segments are removed oldest first and without a gap: one that must stay keeps all later ones. A segment is as old
as its newest record, or as its file if the records have no timestamps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.log.config import KEEP, LogConfig
from penstock.log.segment import Segment


def count_expired(
    segments: Sequence[Segment],
    log_end_offset: int,
    ceiling: int,
    config: LogConfig,
    age_ms: Callable[[Segment], int],
) -> int:
    """How many of the oldest segments to remove. None reaches beyond ``ceiling`` (the high watermark).

    ``age_ms`` is called for as few segments as possible: it may have to open them.
    """
    retention_ms, retention_bytes = config.retention_ms, config.retention_bytes
    if retention_ms == KEEP and retention_bytes == KEEP:
        return 0
    excess = -1
    if retention_bytes != KEEP:
        excess = sum(segment.measure() for segment in segments) - retention_bytes
    count = 0
    for segment in segments:
        is_last = count == len(segments) - 1
        end_offset = log_end_offset if is_last else segments[count + 1].base_offset
        size = segment.measure()
        if end_offset > ceiling or (is_last and size == 0):
            break
        # By size, always leave at least ``retention.bytes``.
        if excess < size and (retention_ms == KEEP or age_ms(segment) <= retention_ms):
            break
        excess -= size
        count += 1
    return count
