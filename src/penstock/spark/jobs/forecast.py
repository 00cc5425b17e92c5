"""Forecast a topic's size, and when retention starts to delete: arithmetic without broker or Spark.

The past is a timeline of bytes; the future continues at the recent rate. The deletion times are the earliest
possible: the broker deletes whole segments, when their newest record is too old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

DAY_MS = 86_400_000
# The growth rate is measured over this time, or since the oldest record.
GROWTH_WINDOW_MS = DAY_MS
FORECAST_DAYS = 30
# Too short to measure a rate.
WINDOW_MS_MIN = 1000
# The end of the year 9999. Records kept until then (retention.ms may be 2**63 - 1) are kept forever.
CALENDAR_END_MS = 253_402_300_799_999

Cause: TypeAlias = Literal["time", "size"]


@dataclass(frozen=True, slots=True)
class Retention:
    """A topic's retention settings; None means no limit."""

    retention_ms: int | None
    # Of each partition.
    retention_bytes: int | None

    @classmethod
    def of(cls, settings: Mapping[str, str | None]) -> Retention:
        """From Kafka's settings, where -1 means no limit. A topic that is only compacted has no limit."""
        if "delete" not in (settings.get("cleanup.policy") or "delete"):
            return cls(None, None)
        return cls(
            _limit(settings.get("retention.ms"), CALENDAR_END_MS), _limit(settings.get("retention.bytes"))
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of one partition."""

    stored_bytes: int
    # The time over which growth was measured, up to now.
    window_ms: int
    growth_bytes_per_day: float
    # The earliest time at which records are deleted; may be in the past. None: never.
    deletes_from_ms: int | None
    deletes_by: Cause | None
    # Bytes of one replica now, and after each day.
    bytes_by_day: tuple[int, ...]


def forecast(
    timeline: Mapping[int, int],
    bucket_ms: int,
    oldest_ms: int,
    stored_bytes: int,
    retention: Retention,
    now_ms: int,
    *,
    since_ms: int,
) -> Forecast:
    """Forecast from a timeline: start of each bucket in ms -> stored bytes of its records.

    ``since_ms`` is the time of the topic's oldest record: a partition that got its first record a moment ago has
    not grown that fast all the time.
    """
    window_ms = min(GROWTH_WINDOW_MS, max(WINDOW_MS_MIN, now_ms - since_ms))
    window_from_ms = now_ms - window_ms
    recent = sum(
        amount * _share_after(start, bucket_ms, window_from_ms) for start, amount in timeline.items()
    )
    rate_per_ms = recent / window_ms
    by_time = None if retention.retention_ms is None or not timeline else oldest_ms + retention.retention_ms
    by_time = _in_calendar(by_time)
    by_size = _in_calendar(_full_at(stored_bytes, rate_per_ms, retention.retention_bytes, now_ms))
    cause: Cause | None = None
    if by_time is not None or by_size is not None:
        cause = "time" if by_size is None or (by_time is not None and by_time <= by_size) else "size"
    days = tuple(
        round(_bytes_at(timeline, bucket_ms, stored_bytes, rate_per_ms, retention, now_ms, day * DAY_MS))
        for day in range(FORECAST_DAYS + 1)
    )
    return Forecast(
        stored_bytes=stored_bytes,
        window_ms=window_ms,
        growth_bytes_per_day=rate_per_ms * DAY_MS,
        deletes_from_ms=by_time if cause == "time" else by_size,
        deletes_by=cause,
        bytes_by_day=days,
    )


def _bytes_at(
    timeline: Mapping[int, int],
    bucket_ms: int,
    stored_bytes: int,
    rate_per_ms: float,
    retention: Retention,
    now_ms: int,
    ahead_ms: int,
) -> float:
    """Bytes of a partition ``ahead_ms`` from now: what is left of today's, plus growth."""
    if retention.retention_ms is None or ahead_ms == 0:
        kept, new_ms = float(stored_bytes), ahead_ms
    else:
        horizon_ms = now_ms + ahead_ms - retention.retention_ms
        kept = sum(amount * _share_after(start, bucket_ms, horizon_ms) for start, amount in timeline.items())
        new_ms = min(ahead_ms, retention.retention_ms)
    total = kept + rate_per_ms * new_ms
    if retention.retention_bytes is not None and ahead_ms > 0:
        total = min(total, max(retention.retention_bytes, 0))
    return total


def _share_after(start_ms: int, bucket_ms: int, from_ms: int) -> float:
    """The share of a bucket at or after a time."""
    return min(1.0, max(0.0, (start_ms + bucket_ms - from_ms) / bucket_ms))


def _full_at(stored_bytes: int, rate_per_ms: float, limit: int | None, now_ms: int) -> int | None:
    if limit is None:
        return None
    if stored_bytes > limit:
        return now_ms
    return None if rate_per_ms <= 0 else now_ms + round((limit - stored_bytes) / rate_per_ms)


def _in_calendar(time_ms: int | None) -> int | None:
    """A time within the calendar: None for never, 1970 for anything earlier."""
    return None if time_ms is None or time_ms > CALENDAR_END_MS else max(0, time_ms)


def _limit(text: str | None, most: int = 2**63 - 1) -> int | None:
    return None if text is None or not 0 <= int(text) < most else int(text)
