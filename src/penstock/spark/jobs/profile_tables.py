"""What was found about topics, as values and as tables: what ``profile`` makes and ``plots`` draws.

Nothing here asks a broker or reads a record. Amounts are of one replica unless they say `disk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.spark.jobs.forecast import Forecast, Retention
from penstock.spark.jobs.profile_counts import Clock, PartitionCounts, bucket_bytes_max

HOT_KEYS_SHOWN = 20

_TIME = pa.timestamp("ms", tz="UTC")
_WHOLE = pa.int64()


@dataclass(frozen=True, slots=True)
class PartitionProfile:
    topic: str
    partition: int
    start: int
    end: int
    counts: PartitionCounts
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class HotKey:
    key: bytes
    partition: int
    # At least so many records, and at most; equal where the count is exact.
    count: int
    count_max: int
    # Of the topic's records.
    share: float


@dataclass(frozen=True, slots=True)
class GroupLag:
    group: str
    topic: str
    partition: int
    committed: int
    end: int

    @property
    def lag(self) -> int:
        return max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True)
class TopicProfile:
    topic: str
    replicas: int
    retention: Retention
    clock: Clock
    partitions: tuple[PartitionProfile, ...]
    groups: tuple[GroupLag, ...]
    now_ms: int
    # How many records of each partition were read at most; None for all.
    sample: int | None = None

    @property
    def is_reckoned(self) -> bool:
        """Whether the amounts are reckoned from a sample."""
        return self.sample is not None and any(
            each.end - each.start > self.sample for each in self.partitions
        )

    @property
    def records(self) -> int:
        return sum(each.counts.records for each in self.partitions)

    @property
    def record_bytes(self) -> int:
        return sum(each.counts.record_bytes for each in self.partitions)

    @property
    def stored_bytes(self) -> int:
        return sum(each.forecast.stored_bytes for each in self.partitions)

    @property
    def skew(self) -> float | None:
        """Bytes of the largest partition, in averages: 1 is even. None without records."""
        sizes = [each.counts.record_bytes for each in self.partitions]
        return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else None

    @property
    def growth_bytes_per_day(self) -> float:
        return sum(each.forecast.growth_bytes_per_day for each in self.partitions)

    @property
    def lag(self) -> int | None:
        """Of the group that is furthest behind."""
        lags: dict[str, int] = {}
        for each in self.groups:
            lags[each.group] = lags.get(each.group, 0) + each.lag
        return max(lags.values(), default=None)

    @property
    def deletes_from(self) -> Forecast | None:
        """The forecast of the partition from which records are deleted first."""
        known = [each.forecast for each in self.partitions if each.forecast.deletes_from_ms is not None]
        return min(known, key=lambda each: each.deletes_from_ms or 0, default=None)

    @property
    def disk_bytes_by_day(self) -> list[int]:
        """On all disks: now, and after each day to come."""
        days = zip(*(each.forecast.bytes_by_day for each in self.partitions))
        return [sum(day) * self.replicas for day in days]

    def hot_keys(self) -> list[HotKey]:
        """The most frequent keys of all partitions; a key has an entry for each partition it is in."""
        found = [
            HotKey(key, each.partition, count, count + each.counts.hot_keys.error, count / self.records)
            for each in self.partitions
            for key, count in each.counts.hot_keys.top(HOT_KEYS_SHOWN)
        ]
        return sorted(found, key=lambda each: (-each.count, each.key, each.partition))[:HOT_KEYS_SHOWN]


def tables(profiles: Sequence[TopicProfile]) -> dict[str, pa.Table]:
    """Everything that was found, by the name of its file."""
    partitions = [(topic, each) for topic in profiles for each in topic.partitions]
    return {
        "topics": _table(
            {
                "topic": pa.string(),
                "partitions": pa.int32(),
                "replicas": pa.int32(),
                "records": _WHOLE,
                "record_bytes": _WHOLE,
                "stored_bytes": _WHOLE,
                "disk_bytes": _WHOLE,
                "reckoned": pa.bool_(),
                "skew": pa.float64(),
                "lag": _WHOLE,
                "stored_bytes_per_day": pa.float64(),
                "retention_ms": _WHOLE,
                "retention_bytes": _WHOLE,
                "deletes_from": _TIME,
                "deletes_by": pa.string(),
            },
            (
                (
                    *(each.topic, len(each.partitions), each.replicas, each.records, each.record_bytes),
                    *(each.stored_bytes, each.stored_bytes * each.replicas, each.is_reckoned),
                    *(each.skew, each.lag),
                    *(each.growth_bytes_per_day, each.retention.retention_ms, each.retention.retention_bytes),
                    *_deletion(each.deletes_from),
                )
                for each in profiles
            ),
        ),
        "partitions": _table(
            {
                "topic": pa.string(),
                "partition": pa.int32(),
                "start": _WHOLE,
                "end": _WHOLE,
                "records": _WHOLE,
                "without_key": _WHOLE,
                "tombstones": _WHOLE,
                "key_bytes": _WHOLE,
                "value_bytes": _WHOLE,
                "record_bytes_min": _WHOLE,
                "record_bytes_p50": _WHOLE,
                "record_bytes_p99": _WHOLE,
                "record_bytes_max": _WHOLE,
                "oldest": _TIME,
                "newest": _TIME,
                "batches": _WHOLE,
                "codecs": pa.string(),
                "stored_bytes": _WHOLE,
                "growth_window_ms": _WHOLE,
                "stored_bytes_per_day": pa.float64(),
                "deletes_from": _TIME,
                "deletes_by": pa.string(),
            },
            (
                (
                    *(topic.topic, each.partition, each.start, each.end, each.counts.records),
                    *(
                        each.counts.without_key,
                        each.counts.tombstones,
                        each.counts.key_bytes,
                        each.counts.value_bytes,
                    ),
                    *(each.counts.record_bytes_min, each.counts.size_percentile(0.50)),
                    *(each.counts.size_percentile(0.99), each.counts.record_bytes_max),
                    *(each.counts.timestamp_ms_min, each.counts.timestamp_ms_max),
                    *(
                        round(each.counts.batches),
                        ",".join(sorted(each.counts.codecs)),
                        each.forecast.stored_bytes,
                    ),
                    *(each.forecast.window_ms, each.forecast.growth_bytes_per_day),
                    *_deletion(each.forecast),
                )
                for topic, each in partitions
            ),
        ),
        "hot_keys": _table(
            {
                "topic": pa.string(),
                "partition": pa.int32(),
                "key": pa.binary(),
                "count": _WHOLE,
                "count_max": _WHOLE,
                "share": pa.float64(),
            },
            (
                (topic.topic, each.partition, each.key, each.count, each.count_max, each.share)
                for topic in profiles
                for each in topic.hot_keys()
            ),
        ),
        "lag": _table(
            {
                "group": pa.string(),
                "topic": pa.string(),
                "partition": pa.int32(),
                "committed": _WHOLE,
                "end": _WHOLE,
                "lag": _WHOLE,
            },
            (
                (each.group, each.topic, each.partition, each.committed, each.end, each.lag)
                for topic in profiles
                for each in topic.groups
            ),
        ),
        "timeline": _table(
            {
                "topic": pa.string(),
                "partition": pa.int32(),
                "time": _TIME,
                "bucket_ms": _WHOLE,
                "records": _WHOLE,
                "record_bytes": _WHOLE,
            },
            (
                (topic.topic, each.partition, start, topic.clock.bucket_ms, records, amount)
                for topic, each in partitions
                for start, (records, amount) in sorted(each.counts.timeline.items())
            ),
        ),
        "sizes": _table(
            {"topic": pa.string(), "partition": pa.int32(), "record_bytes_max": _WHOLE, "records": _WHOLE},
            (
                (topic.topic, each.partition, bucket_bytes_max(bucket), int(records))
                for topic, each in partitions
                for bucket, records in enumerate(each.counts.sizes)
                if records
            ),
        ),
        "forecast": _table(
            {"topic": pa.string(), "day": pa.int32(), "disk_bytes": _WHOLE},
            (
                (topic.topic, day, amount)
                for topic in profiles
                for day, amount in enumerate(topic.disk_bytes_by_day)
            ),
        ),
    }


def _table(columns: Mapping[str, pa.DataType], rows: Iterable[tuple[Any, ...]]) -> pa.Table:
    held = list(rows)
    arrays = [pa.array([row[at] for row in held], kind) for at, kind in enumerate(columns.values())]
    return pa.Table.from_arrays(arrays, names=list(columns))


def _deletion(ahead: Forecast | None) -> tuple[int | None, str | None]:
    return (None, None) if ahead is None else (ahead.deletes_from_ms, ahead.deletes_by)
