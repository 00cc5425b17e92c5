"""Lag against schedules of timestamps that are known, and time to loss against retention in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import TopicPartition
from penstock.monitoring.lag import (
    LagSample,
    LagTracker,
    PartitionLag,
    PartitionSample,
    Retention,
    parse_retention,
    worst_first,
)
from penstock.wire.unread import Unread

AT = TopicPartition("orders", 0)
ID, OTHER_ID = b"a" * 16, b"b" * 16
NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000


def sample(
    committed: int,
    *,
    start: int = 0,
    end: int = 100,
    high_watermark: int | None = None,
    unread: Unread | str | None = "missing",
    now_ms: int = NOW_MS,
    monotonic_ms: int = 0,
    size: int | None = None,
    retention: Retention | None = None,
    topic_id: bytes = ID,
) -> LagSample:
    """One group at one place in one partition."""
    place = AT, max(committed, start)
    found: dict[tuple[TopicPartition, int], Unread | None] = {}
    if not isinstance(unread, str):
        found[place] = unread
    return LagSample(
        now_ms,
        monotonic_ms,
        {AT: PartitionSample(topic_id, start, end, end if high_watermark is None else high_watermark, size)},
        {"billing": {AT: committed}},
        found,
        {} if retention is None else {"orders": retention},
    )


def figure(one: LagSample) -> PartitionLag:
    (only,) = LagTracker().figures(one)
    return only


def test_lag_in_seconds_is_the_age_of_the_next_unread_record() -> None:
    """A record every 10 s, the last one now: at offset 40 of 100 the next one is 590 s old."""
    for committed in range(100):
        timestamp = NOW_MS - (99 - committed) * 10_000
        lag = figure(sample(committed, unread=Unread(committed, timestamp)))
        assert (lag.lag_records, lag.lag_s) == (100 - committed, (99 - committed) * 10.0)


def test_a_group_that_has_read_everything_is_not_behind() -> None:
    lag = figure(sample(100, retention=Retention(DAY_MS, 1000)))
    assert (lag.lag_records, lag.lag_s, lag.loss_s) == (0, 0.0, None)


def test_a_record_of_the_future_is_not_late_and_is_kept_for_longer() -> None:
    lag = figure(sample(5, unread=Unread(5, NOW_MS + 60_000), retention=Retention(DAY_MS)))
    assert (lag.lag_s, lag.loss_s) == (0.0, (DAY_MS + 60_000) / 1000)


def test_markers_behind_the_last_record_are_records_of_lag_but_no_time() -> None:
    lag = figure(sample(99, unread=None, retention=Retention(DAY_MS)))
    assert (lag.lag_records, lag.lag_s, lag.loss_s) == (1, 0.0, None)


def test_a_record_without_a_timestamp_has_no_age() -> None:
    lag = figure(sample(5, unread=Unread(5, None), retention=Retention(DAY_MS)))
    assert (lag.lag_records, lag.lag_s, lag.loss_s) == (95, None, None)


def test_a_record_that_was_not_looked_at_has_no_age() -> None:
    assert figure(sample(5)).lag_s is None


def test_below_the_start_of_the_log_records_are_lost_and_the_rest_is_lag() -> None:
    lag = figure(sample(5, start=20, unread=Unread(20, NOW_MS - 1_000)))
    assert (lag.lost_records, lag.lag_records, lag.lag_s) == (15, 80, 1.0)


def test_an_offset_above_the_end_is_said_to_be_beyond_it() -> None:
    lag = figure(sample(101))
    assert (lag.is_beyond_end, lag.lag_records, lag.lag_s) == (True, 0, 0.0)


def test_a_reader_beyond_the_last_stable_offset_is_not_beyond_the_end() -> None:
    lag = figure(sample(90, end=80, high_watermark=100))
    assert (lag.is_beyond_end, lag.lag_records) == (False, 0)


def test_a_partition_that_is_gone_has_no_figures() -> None:
    lag = figure(replace(sample(7), partitions={}))
    assert lag == PartitionLag("billing", "orders", 0, 7)


def test_the_rate_of_change_is_measured_between_samples() -> None:
    tracker = LagTracker()
    (first,) = tracker.figures(sample(10, end=100, unread=Unread(10, NOW_MS), monotonic_ms=0))
    (second,) = tracker.figures(
        sample(20, end=150, unread=Unread(20, NOW_MS - 4_000), now_ms=NOW_MS + 1, monotonic_ms=10_000)
    )
    assert first.lag_per_s is None
    assert (second.lag_per_s, second.read_per_s, second.written_per_s) == (4.0, 1.0, 5.0)
    assert second.is_growing


def test_a_lag_that_grew_long_ago_and_has_shrunk_since_does_not_grow() -> None:
    tracker = LagTracker(window_ms=20_000)
    ends = {0: 100, 10_000: 500, 20_000: 510}
    places = {0: 90, 10_000: 100, 20_000: 300}
    figures = [
        tracker.figures(
            sample(
                places[at],
                end=end,
                unread=Unread(places[at], NOW_MS - end * 100),
                now_ms=NOW_MS + at,
                monotonic_ms=at,
            )
        )[0]
        for at, end in ends.items()
    ]
    assert [each.is_growing for each in figures] == [False, True, False]
    assert figures[2].lag_per_s is not None and figures[2].lag_per_s > 0


@pytest.mark.parametrize(
    "after",
    [
        sample(5, end=150, monotonic_ms=1_000),
        sample(20, end=50, monotonic_ms=1_000),
        sample(20, end=150, monotonic_ms=1_000, topic_id=OTHER_ID),
    ],
    ids=["the group was reset", "the log was cut", "the topic was made again"],
)
def test_there_is_no_rate_over_a_break(after: LagSample) -> None:
    tracker = LagTracker()
    tracker.figures(sample(10, monotonic_ms=0))
    (lag,) = tracker.figures(after)
    assert (lag.lag_per_s, lag.is_growing) == (None, False)
    later = replace(after, monotonic_ms=2_000)
    assert tracker.figures(later)[0].lag_per_s == 0.0


def test_what_is_not_in_the_last_sample_is_forgotten() -> None:
    tracker = LagTracker()
    tracker.figures(sample(10))
    tracker.figures(replace(sample(10, monotonic_ms=1_000), committed={}))
    assert tracker.figures(sample(10, monotonic_ms=2_000))[0].lag_per_s is None


def test_time_to_loss_by_size_is_what_is_left_at_the_rate_of_writing() -> None:
    """100 records of 10 bytes; 50 of them unread are 500 bytes. 1,000 are kept, and 20 records a second come."""
    tracker = LagTracker()
    kept = Retention(size_bytes=1_000)
    (first,) = tracker.figures(sample(50, end=80, size=800, retention=kept))
    (second,) = tracker.figures(sample(50, end=100, size=1_000, retention=kept, monotonic_ms=1_000))
    assert (first.loss_s, first.loss_by) == (None, None)
    assert (second.loss_s, second.loss_by) == ((1_000 - 500) / 200, "size")


def test_what_deletes_first_is_what_counts() -> None:
    tracker = LagTracker()
    kept = Retention(time_ms=10_000, size_bytes=1_000)
    unread = Unread(50, NOW_MS - 9_000)
    tracker.figures(sample(50, end=80, size=800, retention=kept, unread=unread))
    (lag,) = tracker.figures(
        sample(50, end=100, size=1_000, retention=kept, unread=unread, monotonic_ms=1_000)
    )
    assert (lag.loss_s, lag.loss_by) == (1.0, "time")


@pytest.mark.parametrize(
    ("settings", "retention"),
    [
        ({}, Retention()),
        ({"retention.ms": "604800000", "retention.bytes": "-1"}, Retention(604_800_000)),
        ({"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "5"}, Retention(None, 5)),
        ({"cleanup.policy": "compact", "retention.ms": "5", "retention.bytes": "5"}, Retention()),
        ({"cleanup.policy": "compact,delete", "retention.ms": "5"}, Retention(5)),
        ({"cleanup.policy": "", "retention.ms": "5"}, Retention()),
    ],
)
def test_retention_is_read_from_the_settings(settings: Mapping[str, str], retention: Retention) -> None:
    assert parse_retention(settings) == retention


def test_the_worst_is_first() -> None:
    lags = [
        PartitionLag("many", "t", 0, 0, lag_records=1_000, lag_s=1.0),
        PartitionLag("old", "t", 0, 0, lag_records=1, lag_s=50.0),
        PartitionLag("soon", "t", 0, 0, lag_records=1, lag_s=1.0, loss_s=5.0),
        PartitionLag("later", "t", 0, 0, lag_records=1, lag_s=1.0, loss_s=500.0),
        PartitionLag("lost", "t", 0, 0, lag_records=0, lost_records=1),
        PartitionLag("beyond", "t", 0, 0, lag_records=0, is_beyond_end=True),
        PartitionLag("unknown", "t", 0, 0),
    ]
    assert [each.group for each in worst_first(lags)] == [
        *("lost", "beyond", "soon", "later", "old", "many", "unknown")
    ]


# Against a log that is deleted as brokers do it


@dataclass(frozen=True)
class Segment:
    base_offset: int
    timestamps: tuple[int, ...]
    record_bytes: int

    @property
    def size(self) -> int:
        return len(self.timestamps) * self.record_bytes


def remaining(segments: list[Segment], now_ms: int, retention: Retention) -> list[Segment]:
    """What retention leaves: oldest first, whole segments, as `log/retention.py` has it."""
    left = list(segments)
    while left:
        total = sum(each.size for each in left)
        by_size = retention.size_bytes is not None and total - left[0].size >= retention.size_bytes
        by_time = retention.time_ms is not None and now_ms - max(left[0].timestamps) > retention.time_ms
        if not (by_size or by_time):
            break
        left.pop(0)
    return left


segment_timestamps = st.lists(
    st.lists(st.integers(0, 100_000), min_size=1, max_size=5), min_size=1, max_size=6
)


@given(
    timestamps=segment_timestamps,
    data=st.data(),
    time_ms=st.integers(0, 50_000),
    now_ms=st.integers(0, 200_000),
)
def test_retention_by_time_deletes_nothing_sooner_than_said(
    timestamps: list[list[int]], data: st.DataObject, time_ms: int, now_ms: int
) -> None:
    """Records in any order of time, in segments of any size: the time to loss is a lower bound, and exact in the
    end: once the whole segment is as old as the record, it goes."""
    segments, offset = [], 0
    for each in timestamps:
        segments.append(Segment(offset, tuple(each), 1))
        offset += len(each)
    retention = Retention(time_ms=time_ms)
    flat = [timestamp for each in timestamps for timestamp in each]
    left = remaining(segments, now_ms, retention)
    start = left[0].base_offset if left else offset
    committed = data.draw(st.integers(0, offset))
    place = max(committed, start)
    unread = Unread(place, flat[place]) if place < offset else None
    lag = figure(
        sample(committed, start=start, end=offset, unread=unread, now_ms=now_ms, retention=retention)
    )
    assert lag.lost_records == max(0, start - committed)
    if lag.loss_s is None:
        assert place == offset
        return
    assert lag.loss_s >= 0
    if lag.loss_s > 0:
        just_before_ms = now_ms + int(lag.loss_s * 1000)
        still_there = remaining(segments, just_before_ms, retention)
        assert still_there and still_there[0].base_offset <= place


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    data=st.data(),
    size_bytes=st.integers(1, 400),
    more=st.integers(1, 40),
)
def test_retention_by_size_deletes_nothing_sooner_than_said(
    counts: list[int], data: st.DataObject, size_bytes: int, more: int
) -> None:
    """With records of one size the estimate is a true lower bound too, while writing goes on at the same rate."""
    record_bytes = 10
    segments, offset = [], 0
    for count in counts:
        segments.append(Segment(offset, (0,) * count, record_bytes))
        offset += count
    retention = Retention(size_bytes=size_bytes)
    left = remaining(segments, 0, retention)
    start = left[0].base_offset if left else offset
    size = sum(each.size for each in left)
    committed = data.draw(st.integers(start, offset))
    tracker = LagTracker()
    before = sample(committed, start=start, end=max(start, offset - more), retention=retention)
    tracker.figures(before)
    (lag,) = tracker.figures(
        sample(committed, start=start, end=offset, size=size, retention=retention, monotonic_ms=1_000)
    )
    if not lag.loss_s or lag.written_per_s is None:
        return
    # In segments of one record, which retention can delete soonest.
    written = int(lag.loss_s * lag.written_per_s * 0.999)
    grown = left + [Segment(offset + number, (0,), record_bytes) for number in range(written)]
    still_there = remaining(grown, 0, retention)
    assert still_there and still_there[0].base_offset <= committed


@given(
    committed=st.integers(0, 200),
    start=st.integers(0, 100),
    length=st.integers(0, 100),
    timestamp=st.one_of(st.none(), st.integers(-1, 2 * NOW_MS)),
    retention=st.builds(Retention, st.one_of(st.none(), st.integers(0, DAY_MS)), st.none()),
)
def test_figures_are_never_negative_and_never_contradict_each_other(
    committed: int, start: int, length: int, timestamp: int | None, retention: Retention
) -> None:
    end = start + length
    place = max(committed, start)
    unread = Unread(place, timestamp) if place < end else None
    lag = figure(sample(committed, start=start, end=end, unread=unread, retention=retention))
    assert lag.lag_records is not None and lag.lag_records >= 0 and lag.lost_records >= 0
    assert lag.lag_s is None or lag.lag_s >= 0
    assert lag.loss_s is None or lag.loss_s >= 0
    assert (lag.loss_s is None) == (lag.loss_by is None)
    if lag.lag_records == 0:
        assert (lag.lag_s, lag.loss_s) == (0.0, None)
    assert not (lag.is_beyond_end and lag.lost_records and committed >= start)
