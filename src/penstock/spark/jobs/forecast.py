"""What a topic will weigh, and when retention begins to delete from it: arithmetic, no broker and no Spark.

The past is a timeline of bytes, the future goes on at the rate of late. A newcomer expects deletion to the minute:
the broker deletes whole segments, when their newest record is too old, so the times here are the earliest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

DAY_MS = 86_400_000
# The rate of growth is that of the last so long, or of as long as there are records.
GROWTH_WINDOW_MS = DAY_MS
FORECAST_DAYS = 30
# Less than that says nothing about a rate.
WINDOW_MS_MIN = 1000
# The year 9999 ends. What is kept until then (retention.ms may be 2**63 - 1) is kept for ever.
CALENDAR_END_MS = 253_402_300_799_999

Cause: TypeAlias = Literal["time", "size"]


@dataclass(frozen=True, slots=True)
class Retention:
    """A topic's settings; None is without limit."""

    retention_ms: int | None
    # Of each partition.
    retention_bytes: int | None

    @classmethod
    def of(cls, settings: Mapping[str, str | None]) -> Retention:
        """From settings under Kafka's names, where -1 is without limit. What is only compacted has none."""
        if "delete" not in (settings.get("cleanup.policy") or "delete"):
            return cls(None, None)
        return cls(
            _limit(settings.get("retention.ms"), CALENDAR_END_MS), _limit(settings.get("retention.bytes"))
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one partition."""

    stored_bytes: int
    # Measured over so long, up to now.
    window_ms: int
    growth_bytes_per_day: float
    # The earliest time at which records are deleted, None for never; it may have passed.
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
    """Look ahead from a timeline: start of each bucket in ms -> stored bytes of the records in it.

    ``since_ms`` is when the topic's oldest record came: a partition that got its first a moment ago has not grown
    so fast all the time.
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
    """What a partition holds ``ahead_ms`` from now: what is left of today's, and what has come."""
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
    """How much of a bucket lies at or after a time."""
    return min(1.0, max(0.0, (start_ms + bucket_ms - from_ms) / bucket_ms))


def _full_at(stored_bytes: int, rate_per_ms: float, limit: int | None, now_ms: int) -> int | None:
    if limit is None:
        return None
    if stored_bytes > limit:
        return now_ms
    return None if rate_per_ms <= 0 else now_ms + round((limit - stored_bytes) / rate_per_ms)


def _in_calendar(time_ms: int | None) -> int | None:
    """A time as people can be told it: None for never, and 1970 for whatever was before."""
    return None if time_ms is None or time_ms > CALENDAR_END_MS else max(0, time_ms)


def _limit(text: str | None, most: int = 2**63 - 1) -> int | None:
    return None if text is None or not 0 <= int(text) < most else int(text)
