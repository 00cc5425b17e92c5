"""What a profile is reckoned from, without Spark and brokers: counts that can be added up, and the look ahead."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.columnar.columns import Columns
from penstock.protocol.compression import Codec
from penstock.protocol.records import encode_batch, filler
from penstock.spark.jobs import profile_counts
from penstock.spark.jobs.forecast import DAY_MS, Retention, forecast
from penstock.spark.jobs.profile import spread
from penstock.spark.jobs.profile_counts import Clock, HotKeys, PartitionCounts, bucket_bytes_max, size_bucket
from penstock.spark.ranges import OffsetRange

CLOCK = Clock(bucket_ms=1000, first_ms=0, last_ms=1_000_000)
NOW_MS = 1_794_787_200_000
NO_LIMIT = Retention(None, None)


def columns(records: list[tuple[bytes | None, bytes | None, int]]) -> Columns:
    keys, values, times = zip(*records) if records else ((), (), ())
    count = len(records)
    return Columns(
        key=pa.array(keys, pa.binary()),
        value=pa.array(values, pa.binary()),
        headers=None,
        offset=pa.array(range(count), pa.int64()),
        timestamp=pa.array([each * 1000 for each in times], pa.timestamp("us", tz="UTC")),
        timestamp_type=pa.array([0] * count, pa.int32()),
        count=count,
        next_offset=count,
    )


def counted(*parts: list[tuple[bytes | None, bytes | None, int]]) -> PartitionCounts:
    whole = PartitionCounts()
    for part in parts:
        one = PartitionCounts()
        one.add_records(columns(part), CLOCK)
        whole.merge(one)
    return whole


some_bytes = st.one_of(st.none(), st.binary(max_size=40))
record_lists = st.lists(
    st.tuples(
        st.one_of(st.none(), st.sampled_from([b"a", b"b", b""])), some_bytes, st.integers(-1, 2_000_000)
    ),
    max_size=50,
)


@settings(max_examples=100, deadline=None)
@given(record_lists, st.integers(0, 50))
def test_parts_add_up_to_the_whole(records: list[tuple[bytes | None, bytes | None, int]], cut: int) -> None:
    parts, whole = counted(records[:cut], records[cut:]), counted(records)
    for name in PartitionCounts.__slots__:
        left, right = getattr(parts, name), getattr(whole, name)
        assert (left == right).all() if name == "sizes" else left == right, name
    sizes = [len(key or b"") + len(value or b"") for key, value, _ in records]
    assert (whole.records, whole.record_bytes, int(whole.sizes.sum())) == (len(sizes), sum(sizes), len(sizes))
    assert whole.hot_keys.counts == Counter(key for key, _, _ in records if key is not None)
    assert sum(count for count, _ in whole.timeline.values()) == len(records)
    assert all(CLOCK.first_ms <= start <= CLOCK.last_ms for start in whole.timeline)


def test_a_percentile_is_at_most_a_fifth_too_large() -> None:
    whole = counted([(None, bytes(size), 0) for size in range(1, 1001)])
    for share in (0.01, 0.5, 0.99):
        found = whole.size_percentile(share)
        assert found is not None and share * 1000 <= found <= share * 1000 * 1.2 + 1
    assert whole.size_percentile(1.0) == whole.record_bytes_max == 1000
    assert PartitionCounts().size_percentile(0.5) is None


def test_buckets_of_sizes_meet_without_a_gap() -> None:
    import numpy as np

    sizes = np.arange(5000)
    buckets = size_bucket(sizes)
    assert buckets[0] == 0
    assert all(sizes <= [bucket_bytes_max(int(each)) for each in buckets])
    assert all(sizes[1:] > [bucket_bytes_max(int(each) - 1) for each in buckets[1:]])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60), max_size=60), max_size=6), st.lists(st.integers(0, 5), max_size=100)
)
def test_hot_keys_are_off_by_no_more_than_they_say(batches: list[list[int]], often: list[int]) -> None:
    """Against a plain count, with room for so few keys that most are dropped."""
    before, profile_counts.KEYS_MAX = profile_counts.KEYS_MAX, 8
    try:
        merged = HotKeys()
        for batch in [*batches, often]:
            one = HotKeys()
            one.add(Counter(b"%d" % key for key in batch))
            one.shrink()
            merged.merge(one)
        merged.shrink()
    finally:
        profile_counts.KEYS_MAX = before
    truth = Counter(b"%d" % key for batch in [*batches, often] for key in batch)
    assert len(merged.counts) <= 8
    for key, count in truth.items():
        assert count - merged.error <= merged.counts.get(key, 0) <= count
    # The promise: whoever has more than one in so many is found.
    assert merged.error <= sum(truth.values()) / 8 or merged.error == 0


def test_a_batch_that_two_tasks_share_is_counted_once() -> None:
    records = [(0, b"k", b"v" * 10, ())] * 10
    data = b"".join(
        encode_batch(records, base_offset=base, codec=Codec.GZIP if base else Codec.NONE) for base in (0, 10)
    )
    whole, left, right = PartitionCounts(), PartitionCounts(), PartitionCounts()
    whole.add_batches(data, 0, 20)
    left.add_batches(data, 0, 13)
    right.add_batches(data, 13, 20)
    left.merge(right)
    assert (whole.stored_bytes, whole.batches) == (len(data), 2)
    assert left.stored_bytes == pytest.approx(len(data)) and left.batches == pytest.approx(2)
    assert left.codecs == {"none", "gzip"}


def test_what_compaction_has_emptied_counts_as_bytes_only() -> None:
    data = encode_batch([(0, b"k", b"v", ())], base_offset=10, codec=Codec.ZSTD) + filler(11, 99, 0)
    counts = PartitionCounts()
    counts.add_batches(data, 0, 100)
    assert (counts.batches, counts.stored_bytes, counts.codecs) == (1, len(data), {"zstd"})


def test_a_sample_is_spread_from_the_first_record_to_the_last() -> None:
    whole = OffsetRange("t", 0, 1000, 101_000)
    assert spread(whole, None) == spread(whole, 100_000) == [whole]
    pieces = spread(whole, 2000)
    assert (pieces[0].start, pieces[-1].end, sum(each.size for each in pieces)) == (1000, 101_000, 2000)
    assert all(left.end < right.start for left, right in pairwise(pieces))


# The look ahead


def ahead(timeline: dict[int, int], retention: Retention, bucket_ms: int = DAY_MS) -> Any:
    oldest_ms = min(timeline, default=NOW_MS)
    stored_bytes = sum(timeline.values())
    return forecast(timeline, bucket_ms, oldest_ms, stored_bytes, retention, NOW_MS, since_ms=oldest_ms)


def daily(days: int, amount: int) -> dict[int, int]:
    return {NOW_MS - day * DAY_MS: amount for day in range(1, days + 1)}


def test_without_limits_a_topic_grows_by_what_comes() -> None:
    found = ahead(daily(3, 100), NO_LIMIT)
    assert found.growth_bytes_per_day == pytest.approx(100)
    assert (found.deletes_from_ms, found.deletes_by) == (None, None)
    assert found.bytes_by_day[:3] == (300, 400, 500)
    assert found.bytes_by_day[30] == 3300


def test_with_a_limit_in_time_it_levels_off() -> None:
    found = ahead(daily(3, 100), Retention(7 * DAY_MS, None))
    assert (found.deletes_from_ms, found.deletes_by) == (NOW_MS + 4 * DAY_MS, "time")
    assert found.bytes_by_day[4] == found.bytes_by_day[5] == found.bytes_by_day[30] == 700


def test_with_a_limit_in_bytes_it_stops_there() -> None:
    found = ahead(daily(3, 100), Retention(30 * DAY_MS, 450))
    assert (found.deletes_from_ms, found.deletes_by) == (NOW_MS + 1.5 * DAY_MS, "size")
    assert found.bytes_by_day[:4] == (300, 400, 450, 450)
    assert ahead(daily(3, 100), Retention(None, 200)).deletes_from_ms == NOW_MS


def test_a_topic_that_nobody_writes_to_any_more_shrinks() -> None:
    old = {NOW_MS - 5 * DAY_MS: 100, NOW_MS - 4 * DAY_MS: 100}
    found = ahead(old, Retention(7 * DAY_MS, None))
    assert found.growth_bytes_per_day == 0
    assert found.bytes_by_day[:6] == (200, 200, 200, 100, 0, 0)


def test_an_empty_topic_has_nothing_ahead() -> None:
    found = ahead({}, Retention(DAY_MS, 100))
    assert (found.growth_bytes_per_day, found.deletes_from_ms, set(found.bytes_by_day)) == (0, None, {0})


@pytest.mark.parametrize("retention", [Retention(2**63 - 1, None), Retention(None, 2**63 - 1)])
def test_what_is_kept_longer_than_calendars_go_is_never_deleted(retention: Retention) -> None:
    found = ahead(daily(3, 100), retention)
    assert (found.deletes_from_ms, found.deletes_by) == (None, None)
    assert found.bytes_by_day[30] == 3300


def test_what_is_only_compacted_is_never_deleted() -> None:
    limits = {"retention.ms": "5", "retention.bytes": "5"}
    assert Retention.of({**limits, "cleanup.policy": "compact"}) == NO_LIMIT
    assert Retention.of({**limits, "cleanup.policy": "compact,delete"}) == Retention(5, 5)


def test_settings_of_minus_one_are_no_limits() -> None:
    assert Retention.of({"retention.ms": "-1", "retention.bytes": "-1"}) == NO_LIMIT
    assert Retention.of({"retention.ms": "5"}) == Retention(5, None)
    assert Retention.of({"retention.ms": str(2**63 - 1), "retention.bytes": str(2**63 - 1)}) == NO_LIMIT
