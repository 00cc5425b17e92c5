"""Which part of a log is compacted, and when: pure arithmetic over its segments. ``cleaner_job.py`` does the work.

    [ clean ......... | dirty ............ | not cleanable .......... ]
    log start         first dirty offset   end of the cleanable part    log end

Everything below the first dirty offset was compacted before: there each key has one value. A pass reads the keys of
the dirty part and then rewrites the log from its start, without the records that have a later one of the same key.
Cleanable are whole segments before the active one, as far as they are below the last stable offset and older than
``min.compaction.lag.ms``. The rules are Kafka's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.log.config import LogConfig
from penstock.log.segment import RELATIVE_MAX, Segment


class Source(NamedTuple):
    """A segment as the cleaner reads it."""

    base_offset: int
    # Exclusive: where the next segment begins.
    end_offset: int
    size: int


def cleanable(
    segments: Sequence[Segment],
    last_stable_offset: int,
    config: LogConfig,
    newest_ms: Callable[[Segment], int],
    wall_ms: int | None,
) -> list[Source]:
    """The segments that may be compacted, oldest first.

    ``newest_ms`` is the age of a segment; it is asked only if there is a lag. Without a time nothing with a lag is
    cleanable: the clock cannot be trusted.
    """
    sources: list[Source] = []
    lag_ms = config.min_compaction_lag_ms
    for segment, following in pairwise(segments):
        if following.base_offset > last_stable_offset:
            break
        if lag_ms > 0 and (wall_ms is None or newest_ms(segment) > wall_ms - lag_ms):
            break
        sources.append(Source(segment.base_offset, following.base_offset, segment.measure()))
    return sources


def dirty_bytes(sources: Iterable[Source], first_dirty_offset: int) -> int:
    """The bytes of the segments that hold offsets from the first dirty one on."""
    return sum(source.size for source in sources if source.end_offset > first_dirty_offset)


def is_due(sources: Sequence[Source], first_dirty_offset: int, config: LogConfig, dirty_age_ms: int) -> bool:
    """Whether enough is dirty, or something has been for ``max.compaction.lag.ms``."""
    dirty = dirty_bytes(sources, first_dirty_offset)
    total = sum(source.size for source in sources)
    return dirty >= config.min_cleanable_dirty_ratio * total or dirty_age_ms > config.max_compaction_lag_ms


def grouped(sources: Iterable[Source], config: LogConfig) -> list[list[Source]]:
    """Neighbours that become one segment: together they are no larger than a segment may be."""
    groups: list[list[Source]] = []
    size = 0
    for source in sources:
        if (
            groups
            and size + source.size <= config.segment_bytes
            and source.end_offset - 1 - groups[-1][0].base_offset <= RELATIVE_MAX
        ):
            groups[-1].append(source)
            size += source.size
        else:
            groups.append([source])
            size = source.size
    return groups
