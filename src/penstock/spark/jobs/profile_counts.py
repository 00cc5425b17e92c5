"""The counts of ``profile`` for one partition: tasks make sums, and the driver adds them up.

`measure` runs in a task: it fetches raw batches, so that it also sees what producers really sent (codec, batch
sizes, stored bytes), decodes them into columns and counts with Arrow and numpy. Python does no work per record,
only per distinct key of a fetch.

There may be as many keys as records, so `HotKeys` holds a bounded number and knows its error (Misra and Gries 1982;
merging: Agarwal et al. 2012, "Mergeable summaries").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.columnar.columns import Columns, decode
from penstock.environment import Buffer
from penstock.protocol.compression import Codec
from penstock.protocol.records import batches
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings
from penstock.wire import OffsetOutOfRange

# Distinct keys held per partition. A key with more than one in this many records is certainly found.
KEYS_MAX = 4096
# Sizes are sorted into buckets, four to a doubling: a percentile is at most a fifth too large.
BUCKETS_PER_DOUBLING = 4
SIZE_BUCKETS = 32 * BUCKETS_PER_DOUBLING
MICROSECONDS_PER_MS = 1000


@dataclass(frozen=True, slots=True)
class Clock:
    """Buckets of time. Records before the first or after the last bucket are counted there.

    Without such bounds a producer with random timestamps would make a bucket per record.
    """

    bucket_ms: int
    first_ms: int
    last_ms: int

    def buckets(self, times_ms: Any) -> Any:
        """The start of each time's bucket."""
        return np.clip(times_ms, self.first_ms, self.last_ms) // self.bucket_ms * self.bucket_ms


@dataclass(slots=True)
class HotKeys:
    """The most frequent keys. A count is too small by at most ``error``; exact while that is 0."""

    counts: dict[bytes, int] = field(default_factory=dict)
    error: int = 0

    def add(self, counted: Mapping[bytes, int]) -> None:
        counts = self.counts
        for key, count in counted.items():
            counts[key] = counts.get(key, 0) + count
        # Up to twice as many are kept before rare keys are dropped, so that it is not done at every call.
        if len(counts) > 2 * KEYS_MAX:
            self.shrink()

    def merge(self, other: HotKeys) -> None:
        self.error += other.error
        self.add(other.counts)

    def shrink(self) -> None:
        """Keep at most KEYS_MAX keys: subtract the next key's count from all, and drop those at zero."""
        if len(self.counts) <= KEYS_MAX:
            return
        ordered = np.partition(np.fromiter(self.counts.values(), np.int64, len(self.counts)), -KEYS_MAX - 1)
        taken = int(ordered[-KEYS_MAX - 1])
        self.counts = {key: count - taken for key, count in self.counts.items() if count > taken}
        self.error += taken

    def top(self, number: int) -> list[tuple[bytes, int]]:
        return sorted(self.counts.items(), key=lambda each: (-each[1], each[0]))[:number]


@dataclass(slots=True)
class PartitionCounts:
    """Everything counted of one partition, or of a part of it."""

    records: int = 0
    key_bytes: int = 0
    value_bytes: int = 0
    without_key: int = 0
    tombstones: int = 0
    record_bytes_min: int | None = None
    record_bytes_max: int | None = None
    sizes: Any = field(default_factory=lambda: np.zeros(SIZE_BUCKETS, np.int64))
    # Of the records, in ms since 1970; None while there is no record.
    timestamp_ms_min: int | None = None
    timestamp_ms_max: int | None = None
    # start of a bucket in ms -> (records, bytes of keys and values)
    timeline: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Batches as stored: compressed, with headers; a fraction for a batch that is partly in range.
    batches: float = 0.0
    stored_bytes: float = 0.0
    codecs: set[str] = field(default_factory=set)
    hot_keys: HotKeys = field(default_factory=HotKeys)
    # Offsets that retention deleted during the read.
    lost: int = 0

    @property
    def record_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    def add_records(self, columns: Columns, clock: Clock) -> None:
        if columns.count == 0:
            return
        key_sizes, value_sizes = _sizes(columns.key), _sizes(columns.value)
        sizes = key_sizes + value_sizes
        self.records += columns.count
        self.key_bytes += int(key_sizes.sum())
        self.value_bytes += int(value_sizes.sum())
        self.without_key += columns.key.null_count
        self.tombstones += columns.value.null_count
        self.record_bytes_min = _least(self.record_bytes_min, int(sizes.min()))
        self.record_bytes_max = _most(self.record_bytes_max, int(sizes.max()))
        self.sizes += np.bincount(size_bucket(sizes), minlength=SIZE_BUCKETS)
        times_ms = columns.timestamp.cast(pa.int64()).to_numpy() // MICROSECONDS_PER_MS
        self.timestamp_ms_min = _least(self.timestamp_ms_min, int(times_ms.min()))
        self.timestamp_ms_max = _most(self.timestamp_ms_max, int(times_ms.max()))
        buckets, inverse = np.unique(clock.buckets(times_ms), return_inverse=True)
        counts = np.bincount(inverse)
        amounts = np.bincount(inverse, weights=sizes)
        for bucket, count, amount in zip(buckets.tolist(), counts.tolist(), amounts.tolist()):
            self._add_to_timeline(bucket, count, int(amount))
        counted = pc.value_counts(columns.key.drop_null())
        self.hot_keys.add(dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist())))

    def add_batches(self, answer: Buffer, start: int, end: int) -> None:
        for _, header in batches(answer):
            inside = min(header.next_offset, end) - max(header.base_offset, start)
            if inside > 0:
                part = inside / (header.next_offset - header.base_offset)
                self.stored_bytes += part * header.size
                if header.count:  # compaction leaves empty ones, which are not compressed
                    self.batches += part
                    self.codecs.add(_codec_name(header.codec))

    def merge(self, other: PartitionCounts) -> None:
        self.records += other.records
        self.key_bytes += other.key_bytes
        self.value_bytes += other.value_bytes
        self.without_key += other.without_key
        self.tombstones += other.tombstones
        self.record_bytes_min = _least(self.record_bytes_min, other.record_bytes_min)
        self.record_bytes_max = _most(self.record_bytes_max, other.record_bytes_max)
        self.sizes = self.sizes + other.sizes
        self.timestamp_ms_min = _least(self.timestamp_ms_min, other.timestamp_ms_min)
        self.timestamp_ms_max = _most(self.timestamp_ms_max, other.timestamp_ms_max)
        for bucket, (count, amount) in other.timeline.items():
            self._add_to_timeline(bucket, count, amount)
        self.batches += other.batches
        self.stored_bytes += other.stored_bytes
        self.codecs |= other.codecs
        self.hot_keys.merge(other.hot_keys)
        self.lost += other.lost

    def scale(self, factor: float) -> None:
        """Extrapolate from a sample to the whole."""
        for name in ("records", "key_bytes", "value_bytes", "without_key", "tombstones", "lost"):
            setattr(self, name, round(getattr(self, name) * factor))
        self.batches *= factor
        self.stored_bytes *= factor
        self.sizes = np.rint(self.sizes * factor).astype(np.int64)
        self.timeline = {
            start: (round(records * factor), round(amount * factor))
            for start, (records, amount) in self.timeline.items()
        }
        hot = self.hot_keys
        hot.counts = {key: round(count * factor) for key, count in hot.counts.items()}
        hot.error = round(hot.error * factor)

    def size_percentile(self, share: float) -> int | None:
        """A size percentile: the upper bound of its bucket, never above the maximum."""
        if self.records == 0 or self.record_bytes_max is None:
            return None
        bucket = int(np.searchsorted(np.cumsum(self.sizes), share * self.records))
        return min(self.record_bytes_max, bucket_bytes_max(bucket))

    def _add_to_timeline(self, bucket: int, count: int, amount: int) -> None:
        before = self.timeline.get(bucket, (0, 0))
        self.timeline[bucket] = (before[0] + count, before[1] + amount)


def measure(settings: ReadSettings, offset_range: OffsetRange, clock: Clock) -> PartitionCounts:
    """Read a range and count. Offsets that retention deletes meanwhile are skipped."""
    counts = PartitionCounts()
    client = settings.client()
    position = offset_range.start
    while position < offset_range.end:
        try:
            for answer in client.reader(
                offset_range.topic_partition, position, offset_range.end, bytes_max=settings.fetch_bytes_max
            ):
                counts.add_batches(answer.records, position, offset_range.end)
                position = _decode_all(counts, answer.records, position, offset_range.end, clock)
        except OffsetOutOfRange as error:
            kept = min(max(error.log_start_offset, position + 1), offset_range.end)
            counts.lost += kept - position
            position = kept
    counts.hot_keys.shrink()
    return counts


def size_bucket(sizes: Any) -> Any:
    """The bucket of each size, an array of numbers from 0 on."""
    return np.minimum(SIZE_BUCKETS - 1, np.ceil(np.log2(sizes + 1) * BUCKETS_PER_DOUBLING)).astype(np.int64)


def bucket_bytes_max(bucket: int) -> int:
    """The largest size in a bucket."""
    return int(2 ** (bucket / BUCKETS_PER_DOUBLING)) - 1


def _decode_all(counts: PartitionCounts, answer: Buffer, position: int, end: int, clock: Clock) -> int:
    """Count all records of a response; a very large one is decoded in several calls."""
    while True:
        columns = decode(answer, start=position, end=end)
        counts.add_records(columns, clock)
        if columns.next_offset <= position or columns.next_offset >= end:
            return max(position, columns.next_offset)
        position = columns.next_offset


def _sizes(data: pa.Array) -> Any:
    return pc.fill_null(pc.binary_length(data), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _codec_name(codec: int) -> str:
    return Codec(codec).name.lower() if codec in set(Codec) else f"codec {codec}"


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _most(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
