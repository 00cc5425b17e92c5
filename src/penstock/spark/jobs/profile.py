"""`profile`: the contents of topics and their forecast, as tables (Parquet) and plots (PNG).

The driver queries the brokers for offsets, settings and groups; tasks read and count the records
(``profile_counts.py``) and return only sums: no record passes through the JVM. Then the driver forecasts
(``forecast.py``) and draws (``plots.py``).

Offsets are not records: `records` were read and counted, while lag and backlog are differences of offsets, as in
every lag tool. Hot keys are exact up to a limited number of different keys per partition; beyond that a count is a
lower bound, and the column ``count_max`` is the upper bound.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.model import TopicPartition
from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.forecast import Forecast, Retention, forecast
from penstock.spark.jobs.profile_counts import Clock, PartitionCounts, measure
from penstock.spark.jobs.profile_tables import GroupLag, PartitionProfile, TopicProfile, tables
from penstock.spark.jobs.progress import Progress, followed
from penstock.spark.jobs.topics import find_topics
from penstock.spark.librdkafka import librdkafka_settings
from penstock.spark.option_values import parse_security
from penstock.spark.ranges import OffsetRange, split
from penstock.spark.reading import ReadSettings
from penstock.wire import EARLIEST, LATEST, MAX_TIMESTAMP, Client, WireError, shared

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from pyspark.sql import SparkSession

# Records per task. Small enough that the bar moves and no worker ends with a large last task.
RECORDS_PER_TASK = 500_000
# The most points in a plot; the bucket width is the first of these that needs no more.
BUCKETS_MAX = 200
BUCKET_WIDTHS_MS = tuple(
    seconds * 1000 for seconds in (1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400)
)
# Pieces of each partition in a sample.
SAMPLE_PIECES = 20
SAMPLE_MIN = 1000
ADMIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ProfileResult:
    topics: tuple[TopicProfile, ...]
    # Tables and plots, in the order they were written.
    files: tuple[str, ...]

    def as_table(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Columns, and a row for each topic."""
        columns = ("topic", "partitions", "records", "bytes", "disk_bytes", "skew", "lag")
        ahead = ("bytes_per_day", "deletes_from", "deletes_by")
        rows = []
        for each in self.topics:
            first = each.deletes_from
            begins = (
                None if first is None or first.deletes_from_ms is None else _minute(first.deletes_from_ms)
            )
            rows.append(
                (
                    *(each.topic, len(each.partitions), each.records, each.record_bytes),
                    *(each.stored_bytes * each.replicas, None if each.skew is None else round(each.skew, 2)),
                    *(each.lag, round(each.growth_bytes_per_day)),
                    *(begins, None if first is None else first.deletes_by),
                )
            )
        return (*columns, *ahead), rows


def profile(
    spark: SparkSession,
    bootstrap: str,
    topics: Sequence[str],
    output: str | Path,
    *,
    sample: int | None = None,
    progress: Progress | None = None,
    options: Mapping[str, str] | None = None,
) -> ProfileResult:
    """Profile topics. Tables go to ``output``, plots to one directory per topic in it.

    With ``sample`` the totals are estimated from at most that many records of each partition, spread over it.
    ``options`` say how to connect, as the source takes it: ``{"kafka.security.protocol": "SSL", ...}``.
    Raises SparkOptionError for a topic that does not exist.
    """
    if not topics:
        raise SparkOptionError("profile needs at least one topic")
    if sample is not None and sample < SAMPLE_MIN:
        raise SparkOptionError(
            f"sample must be at least {SAMPLE_MIN}, not {sample}; fewer records are not representative"
        )
    directory = Path(output)
    if not str(output) or (directory.exists() and not directory.is_dir()):
        raise SparkOptionError(f"profile writes to a directory, and {str(output)!r} is not one")
    directory.mkdir(parents=True, exist_ok=True)  # first, to fail early
    security = parse_security(options)
    client = shared(bootstrap, security=security)
    known = find_topics(client, topics)
    for topic in topics:
        if topic not in known:
            raise SparkOptionError(f"topic {topic} does not exist at {bootstrap}; create it first")
    partitions = [
        TopicPartition(topic, number) for topic in topics for number in sorted(known[topic].partitions)
    ]
    starts = client.list_offsets(dict.fromkeys(partitions, EARLIEST))
    ends = client.list_offsets(dict.fromkeys(partitions, LATEST))
    spans = {each: (starts[each].offset, ends[each].offset) for each in partitions}
    now_ms = time.time_ns() // 1_000_000
    clocks = {
        topic: _clock(client, [each for each in partitions if each.topic == topic], now_ms)
        for topic in topics
    }
    counts = _measured(spark, ReadSettings(bootstrap, security=security), spans, clocks, sample, progress)
    settings = client.topic_configs(list(topics))
    from confluent_kafka import KafkaException  # noqa: PLC0415  # librdkafka, on the driver only
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415

    admin = AdminClient(
        {
            "bootstrap.servers": bootstrap,
            **librdkafka_settings(options),
            "client.id": "penstock-spark",
            "log_level": 0,
        }
    )
    try:
        replicas = _replicas(admin, topics)
        lags = _lags(admin, client, {each: end for each, (_, end) in spans.items()})
    except KafkaException as error:
        raise WireError(f"cannot list topics and groups: {error.args[0].str()}") from None
    profiles = []
    for topic in topics:
        retention = Retention.of(settings[topic])
        found = tuple(
            PartitionProfile(
                topic,
                place.partition,
                *span,
                counts[place],
                _forecast(counts[place], clocks[topic], retention, now_ms),
            )
            for place, span in spans.items()
            if place.topic == topic
        )
        groups = tuple(each for each in lags if each.topic == topic)
        profiles.append(
            TopicProfile(topic, replicas[topic], retention, clocks[topic], found, groups, now_ms, sample)
        )
    files = tuple(str(each) for each in _write(directory, profiles))
    return ProfileResult(tuple(profiles), files)


def _measured(
    spark: SparkSession,
    settings: ReadSettings,
    spans: Mapping[TopicPartition, tuple[int, int]],
    clocks: Mapping[str, Clock],
    sample: int | None,
    progress: Progress | None,
) -> dict[TopicPartition, PartitionCounts]:
    pieces = [
        piece
        for each, (start, end) in spans.items()
        for piece in spread(OffsetRange(*each, start, end), sample)
    ]
    ranges = split(pieces, records_max=RECORDS_PER_TASK, partitions_min=spark.sparkContext.defaultParallelism)
    counts = {each: PartitionCounts() for each in spans}
    if not ranges:
        return counts
    total = sum(each.size for each in ranges)
    # Small pieces share a task; otherwise starting tasks would take longer than reading.
    works = _dealt(ranges, max(1, min(RECORDS_PER_TASK, total // spark.sparkContext.defaultParallelism)))

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for work in batch.column("id").to_pylist():
                found = [(each, measure(settings, each, clocks[each.topic])) for each in works[work]]
                yield pa.RecordBatch.from_pydict({"counted": [pickle.dumps(found)]})

    tasks = spark.range(0, len(works), 1, len(works)).mapInArrow(count, "counted BINARY")
    with followed(spark, "profile", total, progress):
        for row in tasks.collect():
            for each, part in pickle.loads(row.counted):
                counts[each.topic_partition].merge(part)
    for at, (start, end) in spans.items():
        counts[at].hot_keys.shrink()
        read = sum(each.size for each in ranges if each.topic_partition == at)
        if read and read < end - start:
            counts[at].scale((end - start) / read)
    return counts


def spread(whole: OffsetRange, sample: int | None) -> list[OffsetRange]:
    """The whole range, or evenly spaced pieces that include its first and last."""
    if sample is None or whole.size <= sample:
        return [whole]
    size = sample // SAMPLE_PIECES
    step = (whole.size - size) / (SAMPLE_PIECES - 1)
    starts = (whole.start + round(number * step) for number in range(SAMPLE_PIECES))
    return [whole._replace(start=start, end=start + size) for start in starts]


def _dealt(ranges: Sequence[OffsetRange], records: int) -> list[list[OffsetRange]]:
    """Ranges in groups of about ``records`` records."""
    groups: list[list[OffsetRange]] = []
    room = 0
    for each in ranges:
        if room < each.size:
            groups.append([])
            room = records
        groups[-1].append(each)
        room -= each.size
    return groups


def _forecast(counts: PartitionCounts, clock: Clock, retention: Retention, now_ms: int) -> Forecast:
    """Forecast from stored bytes, assuming that all records compress equally well."""
    ratio = counts.stored_bytes / counts.record_bytes if counts.record_bytes else 0.0
    timeline = {start: round(amount * ratio) for start, (_, amount) in counts.timeline.items()}
    oldest_ms = now_ms if counts.timestamp_ms_min is None else counts.timestamp_ms_min
    return forecast(
        timeline,
        clock.bucket_ms,
        oldest_ms,
        round(counts.stored_bytes),
        retention,
        now_ms,
        since_ms=clock.first_ms,
    )


def _clock(client: Client, partitions: Sequence[TopicPartition], now_ms: int) -> Clock:
    """Buckets from the oldest record to the newest, according to the brokers."""
    oldest = client.list_offsets(dict.fromkeys(partitions, 0)).values()
    newest = client.list_offsets(dict.fromkeys(partitions, MAX_TIMESTAMP)).values()
    # Timestamps in the future say nothing about the recent rate.
    first_ms = min((each.timestamp for each in oldest if each.offset >= 0), default=now_ms)
    first_ms = min(first_ms, now_ms)
    last_ms = max((each.timestamp for each in newest if each.offset >= 0), default=now_ms)
    last_ms = max(first_ms, min(last_ms, now_ms))
    span = last_ms - first_ms
    widths = (width for width in BUCKET_WIDTHS_MS if span / width <= BUCKETS_MAX)
    return Clock(next(widths, BUCKET_WIDTHS_MS[-1]), first_ms, last_ms)


def _replicas(admin: AdminClient, topics: Iterable[str]) -> dict[str, int]:
    described = admin.list_topics(timeout=ADMIN_TIMEOUT_S).topics
    return {
        topic: max((len(each.replicas) for each in described[topic].partitions.values()), default=1)
        if topic in described
        else 1
        for topic in topics
    }


def _lags(admin: AdminClient, client: Client, ends: Mapping[TopicPartition, int]) -> list[GroupLag]:
    """The lag of every group with committed offsets in these partitions."""
    listed = admin.list_consumer_groups(request_timeout=ADMIN_TIMEOUT_S).result()
    lags = []
    for group in sorted(each.group_id for each in listed.valid):
        for place, offset in sorted(client.committed(group, list(ends)).items()):
            if offset >= 0:
                lags.append(GroupLag(group, place.topic, place.partition, offset, ends[place]))
    return lags


def _write(output: Path, profiles: Sequence[TopicProfile]) -> Iterator[Path]:
    from penstock.spark.jobs.plots import draw  # noqa: PLC0415  # matplotlib, only to draw

    for name, table in tables(profiles).items():
        path = output / f"{name}.parquet"
        pq.write_table(table, path)
        yield path
    for each in profiles:
        yield from draw(each, output / each.topic)


def _minute(time_ms: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)).strftime("%Y-%m-%dT%H:%MZ")
