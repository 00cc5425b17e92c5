"""Which segments have had their time: pure arithmetic over end offset, size and largest timestamp.

Segments go oldest first and without a gap: one that must stay keeps all behind it. A segment is as old as its
newest record; where records carry no timestamps, as its file.
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
    """How many of the oldest segments go. ``ceiling`` (the high watermark) is never passed.

    ``age_ms`` is asked only for as many segments as needed: it may have to open them.
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
        # By size never so much that less than ``retention.bytes`` is left.
        if excess < size and (retention_ms == KEEP or age_ms(segment) <= retention_ms):
            break
        excess -= size
        count += 1
    return count
