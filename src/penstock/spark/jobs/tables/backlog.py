"""An archive's backlog and its split into tasks: arithmetic without broker or disk.

`backlog` compares the table with the brokers and finds what is gone; `deal` splits the rest into ranges that give
files of the wanted size. A recreated topic has the same name and other records, so partitions are identified by the
topic's id, and start again from the beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from penstock.model import TopicPartition
from penstock.spark.jobs.tables.state import ArchivedPartition, Gap, Span, State
from penstock.spark.jobs.tables.writing import Assignment
from penstock.spark.ranges import OffsetRange, share, split


class Extent(NamedTuple):
    """The offsets of a partition on the brokers, or the part to archive now."""

    start: int
    end: int  # exclusive


@dataclass(frozen=True, slots=True)
class Backlog:
    # Each partition's span, at whose end reading continues; also for partitions with nothing to read.
    spans: dict[ArchivedPartition, Span]
    pending: dict[ArchivedPartition, Extent]
    gaps: tuple[Gap, ...]

    @property
    def offsets(self) -> int:
        return sum(each.end - each.start for each in self.pending.values())


def backlog(state: State, extents: Mapping[ArchivedPartition, Extent]) -> Backlog:
    """``extents`` has every partition of the topics to archive."""
    spans: dict[ArchivedPartition, Span] = {}
    pending: dict[ArchivedPartition, Extent] = {}
    gaps = _former_lives(state, extents)
    for at, extent in extents.items():
        span = state.spans.get(at)
        if span is None:
            span = Span(extent.start, extent.start)
        elif extent.start > span.end:
            gaps.append(Gap(*at, span.end, extent.start, "retention"))
            span = Span(span.start, extent.start)
        spans[at] = span
        if extent.end > span.end:
            pending[at] = Extent(span.end, extent.end)
    return Backlog(spans, pending, tuple(gaps))


def rewound(state: State, extents: Mapping[ArchivedPartition, Extent]) -> list[Gap]:
    """New gaps: partitions whose log ends before their archive.

    Only for extents queried after the state was read: another archiver may be ahead of older ones.
    """
    found = []
    for at, extent in extents.items():
        span = state.spans.get(at)
        if span is not None and extent.end < span.end:
            gap = Gap(*at, extent.end, span.end, "rewound")
            if not any(
                each.reason == "rewound" and each.end == gap.end and each.at == at for each in state.gaps
            ):
                found.append(gap)
    return found


def deal(
    pending: Mapping[ArchivedPartition, Extent],
    offset_bytes: Mapping[ArchivedPartition, float],
    *,
    file_bytes: int,
    parallelism: int,
    batch_bytes: int,
) -> list[list[Assignment]]:
    """The assignments of one batch, task by task. ``offset_bytes`` is the approximate file size per offset."""
    sizes = {at: max(1, round((each.end - each.start) * offset_bytes[at])) for at, each in pending.items()}
    by_place = {TopicPartition(at.topic, at.partition): at for at in pending}
    shares = share({place: sizes[at] for place, at in by_place.items()}, batch_bytes)
    total = max(1, sum(shares.values()))
    weighed: list[tuple[int, Assignment]] = []
    for place, size in shares.items():
        at = by_place[place]
        extent = pending[at]
        offsets = extent.end - extent.start
        if size < sizes[at]:
            offsets = min(offsets, max(1, int(size / offset_bytes[at])))
        # As many files as give the wanted size; or one per core, as long as none is below half of it.
        wanted = round(size / file_bytes)
        most = max(1, wanted, size // max(1, file_bytes // 2))
        pieces = max(1, min(most, max(wanted, ceil(parallelism * size / total))))
        whole = OffsetRange(*place, extent.start, extent.start + offsets)
        weighed += [
            (max(1, round(piece.size * offset_bytes[at])), Assignment(at, piece.start, piece.end))
            for piece in split([whole], records_max=ceil(offsets / pieces))
        ]
    return _packed(weighed, min(len(weighed), max(4 * parallelism, ceil(total / file_bytes))))


def _packed(weighed: Sequence[tuple[int, Assignment]], count: int) -> list[list[Assignment]]:
    """Pack into ``count`` bins, the heaviest first, always into the lightest: starting a task has a cost."""
    bins: list[tuple[int, int, list[Assignment]]] = [(0, number, []) for number in range(count)]
    for weight, assignment in sorted(weighed, key=lambda each: -each[0]):
        load, number, held = heapq.heappop(bins)
        held.append(assignment)
        heapq.heappush(bins, (load + weight, number, held))
    return [held for _, _, held in sorted(bins, key=lambda each: each[1])]


def _former_lives(state: State, extents: Mapping[ArchivedPartition, Extent]) -> list[Gap]:
    """Gaps of deleted topics that have been recreated."""
    current = {at.topic: at.topic_id for at in extents}
    told = {(each.topic, each.topic_id) for each in state.gaps if each.reason == "recreated"}
    return [
        Gap(*at, span.end, None, "recreated")
        for at, span in state.spans.items()
        if at.topic in current and at.topic_id != current[at.topic] and (at.topic, at.topic_id) not in told
    ]
