"""What an archive has still to read, and how it is dealt out to tasks: arithmetic, no broker and no disk in it.

`backlog` compares what the table has with what the brokers have, and says what is gone; `deal` cuts what is there
into ranges that make files of the size wanted. What a newcomer gets wrong: a topic that was deleted and recreated
has the same name and other records. Partitions are told apart by the topic's id, and begin anew.
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
    """What the brokers have of a partition, or of it what is to be archived now."""

    start: int
    end: int  # exclusive


@dataclass(frozen=True, slots=True)
class Backlog:
    # Where each partition's span begins and reading goes on; also of partitions with nothing to read.
    spans: dict[ArchivedPartition, Span]
    pending: dict[ArchivedPartition, Extent]
    gaps: tuple[Gap, ...]

    @property
    def offsets(self) -> int:
        return sum(each.end - each.start for each in self.pending.values())


def backlog(state: State, extents: Mapping[ArchivedPartition, Extent]) -> Backlog:
    """``extents`` holds every partition of the topics to be archived."""
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
    """Partitions whose log ends before what is archived of them, and that were not known to.

    Only for extents that were asked for after the state was read: another archiver may be ahead of older ones.
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
    """What the tasks of one batch read, task by task. ``offset_bytes`` is about what an offset takes in a file."""
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
        # As many files as make them the size wanted; or as there are cores, while none gets under half of it.
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
    """Into ``count`` bins, the heaviest first, always into the lightest: a task costs something by itself."""
    bins: list[tuple[int, int, list[Assignment]]] = [(0, number, []) for number in range(count)]
    for weight, assignment in sorted(weighed, key=lambda each: -each[0]):
        load, number, held = heapq.heappop(bins)
        held.append(assignment)
        heapq.heappush(bins, (load + weight, number, held))
    return [held for _, _, held in sorted(bins, key=lambda each: each[1])]


def _former_lives(state: State, extents: Mapping[ArchivedPartition, Extent]) -> list[Gap]:
    """What may be gone with topics that were deleted, of those that are there again."""
    current = {at.topic: at.topic_id for at in extents}
    told = {(each.topic, each.topic_id) for each in state.gaps if each.reason == "recreated"}
    return [
        Gap(*at, span.end, None, "recreated")
        for at, span in state.spans.items()
        if at.topic in current and at.topic_id != current[at.topic] and (at.topic, at.topic_id) not in told
    ]
