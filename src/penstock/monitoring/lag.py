"""How far a group is behind: in records, in seconds, how fast that changes, and when it will lose data.

Pure: a sample of the cluster and its time go in, one ``PartitionLag`` for each group and partition comes out.

*Records* are offsets between the group's place and the end of the partition. In a compacted or transactional topic
some of them have no record behind them, so it is an upper bound. *Seconds* are the age of the next record that the
group will get, by its timestamp and the sampler's clock; 0 when there is none, and for a record of the future.

*Time to loss* is when retention may first delete that record. Retention deletes whole segments, and only when the
newest record in one is too old, or when what comes after it is already ``retention.bytes``. So the record is not
deleted sooner than this, and may stay for as long as its segment takes to fill. By size it is an estimate: how many
bytes a group is behind is taken from the mean size of a record in the partition, and their growth from the rate
between samples, so it needs two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.model import TopicPartition
from penstock.wire.unread import Unread

# Rates are over the last one to one and a half of these.
WINDOW_MS = 60_000

POLICY, TIME, SIZE, MIN_IN_SYNC = "cleanup.policy", "retention.ms", "retention.bytes", "min.insync.replicas"
UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Retention:
    """What deletes the records of a topic; None for what does not."""

    time_ms: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionSample:
    topic_id: bytes
    log_start_offset: int
    # Where readers end: the high watermark, or the last stable offset for read-committed ones.
    end_offset: int
    high_watermark: int
    # Of the leader's log; None if it is not known.
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LagSample:
    # Since 1970, to compare with timestamps; and of a clock that is never set, for rates.
    time_ms: int
    monotonic_ms: int
    partitions: Mapping[TopicPartition, PartitionSample]
    # By group.
    committed: Mapping[str, Mapping[TopicPartition, int]]
    # The next record of a group: by partition and offset, at least the log's start. None: there is none yet. Those
    # that were not looked for, or not found, are missing.
    unread: Mapping[tuple[TopicPartition, int], Unread | None]
    # By topic.
    retentions: Mapping[str, Retention]


@dataclass(frozen=True, slots=True)
class PartitionLag:
    group: str
    topic: str
    partition: int
    committed: int
    # None: the partition does not exist any more, has no leader, or may not be seen.
    log_start_offset: int | None = None
    end_offset: int | None = None
    # What can still be read.
    lag_records: int | None = None
    lag_s: float | None = None
    # Over the last samples; None with the first.
    lag_per_s: float | None = None
    read_per_s: float | None = None
    written_per_s: float | None = None
    # More records and older ones than before, with no recovery in between.
    is_growing: bool = False
    # Deleted before the group read them.
    lost_records: int = 0
    # Until retention may delete the next unread record; None: never, or not known.
    loss_s: float | None = None
    # What deletes it: "time" or "size".
    loss_by: str | None = None
    # The group has committed an offset that the partition does not have: it was truncated or made again.
    is_beyond_end: bool = False

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class _Point(NamedTuple):
    monotonic_ms: int
    topic_id: bytes
    committed: int
    end_offset: int
    lag: int
    lag_s: float | None


class _Trend:
    """Where a group was in a partition, at two times within the window."""

    __slots__ = ("newer", "older")

    def __init__(self, first: _Point) -> None:
        self.older = first
        self.newer: _Point | None = None

    def continues(self, point: _Point) -> bool:
        """Whether rates mean anything: not over a reset of the group, a truncation, or another topic."""
        last = self.newer or self.older
        return (
            point.topic_id == last.topic_id
            and point.committed >= last.committed
            and point.end_offset >= last.end_offset
            and point.monotonic_ms > last.monotonic_ms
        )

    def add(self, point: _Point, window_ms: int) -> None:
        last = self.newer or self.older
        if 2 * (point.monotonic_ms - last.monotonic_ms) < window_ms:
            return
        self.older, self.newer = last, point


class LagTracker:
    """Turns samples into figures. Keeps two points of each group and partition of the last sample."""

    def __init__(self, window_ms: int = WINDOW_MS) -> None:
        self._window_ms = window_ms
        self._trends: dict[tuple[str, TopicPartition], _Trend] = {}

    def figures(self, sample: LagSample) -> list[PartitionLag]:
        """In order of group, topic and partition; ``worst_first`` sorts them."""
        trends: dict[tuple[str, TopicPartition], _Trend] = {}
        found = []
        for group in sorted(sample.committed):
            for at, committed in sorted(sample.committed[group].items()):
                partition = sample.partitions.get(at)
                if partition is None:
                    found.append(PartitionLag(group, at.topic, at.partition, committed))
                    continue
                lag_s = _lag_s(sample, at, committed, partition)
                point = _Point(
                    sample.monotonic_ms,
                    partition.topic_id,
                    committed,
                    partition.end_offset,
                    _lag(committed, partition),
                    lag_s,
                )
                trend = self._trends.get((group, at))
                if trend is not None and not trend.continues(point):
                    trend = None
                found.append(_figure(sample, group, at, point, partition, trend))
                if trend is None:
                    trend = _Trend(point)
                else:
                    trend.add(point, self._window_ms)
                trends[group, at] = trend
        self._trends = trends
        return found


def worst_first(lags: list[PartitionLag]) -> list[PartitionLag]:
    """Data loss first: what is lost, then what will be lost soonest, then by age, then by records."""
    endless = float("inf")
    return sorted(
        lags,
        key=lambda each: (
            -each.lost_records,
            not each.is_beyond_end,
            endless if each.loss_s is None else each.loss_s,
            -(each.lag_s or 0),
            -(each.lag_records or 0),
            each.group,
            each.at,
        ),
    )


def parse_retention(settings: Mapping[str, str]) -> Retention:
    """From a topic's settings. A topic that is only compacted has no retention."""
    if "delete" not in [word.strip() for word in settings.get(POLICY, "delete").split(",")]:
        return Retention()
    time_ms, size_bytes = (_number(settings.get(name)) for name in (TIME, SIZE))
    return Retention(time_ms, size_bytes)


def _number(text: str | None) -> int | None:
    try:
        number = int(text or UNLIMITED)
    except ValueError:
        return None
    return None if number < 0 else number


def _lag(committed: int, partition: PartitionSample) -> int:
    return max(0, partition.end_offset - max(committed, partition.log_start_offset))


def _lag_s(sample: LagSample, at: TopicPartition, committed: int, partition: PartitionSample) -> float | None:
    if _lag(committed, partition) == 0:
        return 0.0
    place = at, max(committed, partition.log_start_offset)
    if place not in sample.unread:
        return None
    unread = sample.unread[place]
    if unread is None:
        # What is left are markers of transactions, and records that were aborted or compacted.
        return 0.0
    if unread.timestamp is None:
        return None
    return max(0, sample.time_ms - unread.timestamp) / 1000


def _figure(
    sample: LagSample,
    group: str,
    at: TopicPartition,
    point: _Point,
    partition: PartitionSample,
    trend: _Trend | None,
) -> PartitionLag:
    lag_per_s = read_per_s = written_per_s = None
    is_growing = False
    if trend is not None:
        older = trend.older
        seconds = (point.monotonic_ms - older.monotonic_ms) / 1000
        lag_per_s = (point.lag - older.lag) / seconds
        read_per_s = (point.committed - older.committed) / seconds
        written_per_s = (point.end_offset - older.end_offset) / seconds
        is_growing = _has_grown(older, point) and (trend.newer is None or _has_grown(trend.newer, point))
    loss_s, loss_by = _loss(sample, at, point, partition, written_per_s)
    return PartitionLag(
        group,
        at.topic,
        at.partition,
        point.committed,
        partition.log_start_offset,
        partition.end_offset,
        point.lag,
        point.lag_s,
        lag_per_s,
        read_per_s,
        written_per_s,
        is_growing,
        max(0, partition.log_start_offset - point.committed),
        loss_s,
        loss_by,
        point.committed > max(partition.high_watermark, partition.end_offset),
    )


def _has_grown(before: _Point, now: _Point) -> bool:
    return now.lag > before.lag and (now.lag_s or 0) > (before.lag_s or 0)


def _loss(
    sample: LagSample,
    at: TopicPartition,
    point: _Point,
    partition: PartitionSample,
    written_per_s: float | None,
) -> tuple[float | None, str | None]:
    """When the next unread record may be deleted, and by what."""
    retention = sample.retentions.get(at.topic)
    place = at, max(point.committed, partition.log_start_offset)
    unread = sample.unread.get(place)
    is_known_to_be_nothing = place in sample.unread and unread is None
    if retention is None or point.lag == 0 or is_known_to_be_nothing:
        return None, None
    times: list[tuple[float, str]] = []
    if retention.time_ms is not None and unread is not None and unread.timestamp is not None:
        times.append(((unread.timestamp + retention.time_ms - sample.time_ms) / 1000, "time"))
    offsets = partition.high_watermark - partition.log_start_offset
    if retention.size_bytes is not None and partition.size_bytes and written_per_s and offsets > 0:
        record_bytes = partition.size_bytes / offsets
        left_bytes = retention.size_bytes - point.lag * record_bytes
        times.append((left_bytes / (written_per_s * record_bytes), "size"))
    if not times:
        return None, None
    loss_s, loss_by = min(times)
    return max(0.0, loss_s), loss_by
