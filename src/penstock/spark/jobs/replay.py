"""Replay: send a topic's records, selected by offsets or by time, to another topic again.

The driver plans ranges of offsets; tasks read and send them (``replay_task.py``), so that no record passes through
the JVM. A partition is read by one task, in order. Keys, values and timestamps do not change, and four more headers
name each record's origin.

Work is done in rounds of a few seconds. After each round the driver knows the progress of every partition, calls
``progress``, and commits it to the consumer group ``penstock-replay-RUN-TARGET``: lag tools see the replay, and a
replay with the same ``run_id`` continues where the last one stopped, even if its driver was killed.

Delivery is at least once. Records of a failed round may be sent again; the headers (``x-replay-partition``,
``x-replay-offset``) identify such duplicates.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.protocol.compression import Codec
from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs.failures import let_interrupts_pass, reason
from penstock.spark.jobs.progress import Progress
from penstock.spark.jobs.replay_task import REPORT, Plan, Report, Work, work
from penstock.spark.jobs.topics import find_topics
from penstock.spark.option_values import parse_security
from penstock.spark.options import parse
from penstock.spark.planning import Planner
from penstock.spark.producing import ProduceSettings
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import lose
from penstock.wire import Client, WireError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long tasks work before they report. Starting a round costs 0.1 to 0.2 s.
ROUND_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReplayedPartition:
    partition: int
    start: int
    end: int  # exclusive
    # All offsets before this are sent, or counted in a dry run. Equal to the end unless the replay failed.
    next_offset: int
    records: int
    bytes: int  # of keys and values


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What was sent, or would be sent in a dry run."""

    run_id: str
    source: str
    target: str
    is_dry_run: bool
    # Whether the target stores the records' own timestamps, or the broker's clock (LogAppendTime).
    keeps_timestamps: bool
    partitions: tuple[ReplayedPartition, ...]
    seconds: float

    @property
    def records(self) -> int:
        return sum(each.records for each in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.partitions)

    def as_table(self) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Columns, and a row for each partition of the source."""
        columns = ("partition", "start", "end", "next_offset", "records", "bytes")
        return columns, [
            (each.partition, each.start, each.end, each.next_offset, each.records, each.bytes)
            for each in self.partitions
        ]


class ReplayFailed(RuntimeError):
    """``result`` has what was sent before. A replay with its ``run_id`` continues from there."""

    def __init__(self, why: str, result: ReplayResult) -> None:
        left = sum(each.end - each.next_offset for each in result.partitions)
        super().__init__(
            f"the replay stopped after {result.records} records, with {left} offsets left: {why}. "
            f"Continue with run_id={result.run_id!r}"
        )
        self.why = why
        self.result = result


def replay(
    spark: SparkSession,
    bootstrap: str,
    source: str,
    target: str,
    *,
    starting_offsets: str = "earliest",
    ending_offsets: str = "latest",
    starting_timestamp: int | None = None,
    ending_timestamp: int | None = None,
    partitions: Sequence[int] | None = None,
    keep_partitions: bool = True,
    records_per_second: float | None = None,
    bytes_per_second: float | None = None,
    compression: str = "none",
    create_target: bool = False,
    into_itself: bool = False,
    fail_on_data_loss: bool = True,
    dry_run: bool = False,
    run_id: str | None = None,
    progress: Progress | None = None,
    options: Mapping[str, str] | None = None,
) -> ReplayResult:
    """Send records of ``source`` to ``target`` again.

    Args:
        starting_offsets: ``earliest``, or offsets as in Spark's Kafka source: ``{"topic": {"0": 23, "1": -2}}``.
        ending_offsets: ``latest`` (as of now), or offsets; exclusive.
        starting_timestamp: milliseconds since 1970, instead of offsets: from the first record at or after it.
        ending_timestamp: likewise, up to the first record at or after it, exclusive.
        partitions: only these source partitions.
        keep_partitions: send each record to the partition number it comes from; otherwise by key.
        records_per_second: the limit of the whole replay. Each task gets a share, in proportion to what it has left
            to send, so that all end together. A task that runs alone does not use the other tasks' shares: the
            limit may not be reached, and is never exceeded.
        bytes_per_second: likewise, for keys and values before compression.
        create_target: create a missing target with the source's number of partitions.
        into_itself: allow target and source to be the same topic; it grows by the replayed records.
        dry_run: read and count, send nothing, wait for nothing.
        run_id: a name for this run, in headers and in the group with its progress. Pass the id of a stopped run to
            continue it; the end is then determined again.
        progress: called with (offsets done, offsets in total).
        options: how to connect, as the source takes it: ``{"kafka.security.protocol": "SSL", ...}``.

    Raises:
        SparkOptionError: invalid arguments.
        DataLossError: requested offsets, or those where an earlier run stopped, are gone.
        ReplayFailed: it stopped before the end; says what was sent.
    """
    _check_limits(records_per_second, bytes_per_second)
    if source == target and not into_itself:
        raise SparkOptionError(
            f"source and target are both {source}: every replay would make the next one longer. "
            "Choose another target, or pass into_itself=True"
        )
    if run_id == "":
        raise SparkOptionError("run_id is empty; give the run a name or omit it")
    security = parse_security(options)
    parsed = parse(
        {
            **(options or {}),
            **_source_options(
                bootstrap,
                source,
                (starting_offsets, starting_timestamp),
                (ending_offsets, ending_timestamp),
                partitions,
                fail_on_data_loss,
            ),
        },
        "batch",
    )
    produce = ProduceSettings(
        bootstrap, codec=_codec(compression), client_id="penstock-replay", security=security
    )
    client = parsed.read.client()
    planner = Planner(parsed, client)
    whole = planner.batch_ranges()
    plan = Plan(
        reading=parsed.read,
        produce=produce,
        source_id=planner.topic_ids[source],
        target=target,
        run_id=run_id or uuid.uuid4().hex[:12],
        keep_partitions=keep_partitions,
        is_dry_run=dry_run,
        round_s=ROUND_SECONDS,
    )
    keeps_timestamps = _check_target(client, source, partitions, plan, create_target)
    run = _Run(spark, client, plan, records_per_second, bytes_per_second, progress)
    return run.go(source, whole, keeps_timestamps, is_from_earliest=parsed.starting.kind == "earliest")


# On the driver


class _Run:
    def __init__(
        self,
        spark: SparkSession,
        client: Client,
        plan: Plan,
        records_per_second: float | None,
        bytes_per_second: float | None,
        progress: Progress | None,
    ) -> None:
        self._spark = spark
        self._client = client
        self._plan = plan
        self._records_per_second = records_per_second
        self._bytes_per_second = bytes_per_second
        self._progress = progress

    def go(
        self, source: str, whole: list[OffsetRange], keeps_timestamps: bool, *, is_from_earliest: bool
    ) -> ReplayResult:
        begun = time.monotonic()
        done = {
            each.partition: ReplayedPartition(each.partition, each.start, each.end, next_offset, 0, 0)
            for each, next_offset in self._resumed(whole, is_from_earliest)
        }

        def result() -> ReplayResult:
            return ReplayResult(
                self._plan.run_id,
                source,
                self._plan.target,
                self._plan.is_dry_run,
                keeps_timestamps,
                tuple(done.values()),
                time.monotonic() - begun,
            )

        self._tell(done)
        while left := [
            OffsetRange(source, each.partition, each.next_offset, each.end)
            for each in done.values()
            if each.next_offset < each.end
        ]:
            reports, why = self._round(left)
            for report in reports:
                before = done[report.partition]
                done[report.partition] = replace(
                    before,
                    next_offset=report.next_offset,
                    records=before.records + report.records,
                    bytes=before.bytes + report.bytes,
                )
            try:
                self._commit(source, reports)
            except WireError as error:
                why = why or f"its progress could not be committed: {error}"
            if why is not None:
                raise ReplayFailed(why, result())
            self._tell(done)
        return result()

    def _round(self, left: list[OffsetRange]) -> tuple[list[Report], str | None]:
        """Let tasks work for a while. Returns their progress, and why a task stopped, if one did."""
        works = shared_out(
            left,
            self._spark.sparkContext.defaultParallelism,
            self._records_per_second,
            self._bytes_per_second,
        )
        # One row per task, with the number of its work.
        numbers = self._spark.range(0, len(works), 1, len(works))
        try:
            rows = numbers.mapInArrow(partial(work, self._plan, works), REPORT).collect()
        except Exception as error:
            let_interrupts_pass(error)
            # An executor or Spark itself died. What its tasks sent is unknown, so it will be sent again.
            return [], f"Spark failed: {reason(error)}"
        reports = [Report(*row) for row in rows]
        return reports, next((report.error for report in reports if report.error is not None), None)

    def _resumed(self, whole: list[OffsetRange], is_from_earliest: bool) -> list[tuple[OffsetRange, int]]:
        """Each range, and where an earlier run with the same id stopped in it."""
        if self._plan.is_dry_run or not whole:
            return [(each, each.start) for each in whole]
        committed = self._client.committed(self._plan.group, [each.topic_partition for each in whole])
        resumed = []
        for each in whole:
            stopped_at = committed.get(each.topic_partition, each.start)
            if stopped_at < each.start and is_from_earliest:
                gone = each._replace(start=stopped_at, end=each.start)
                lose(
                    self._plan.reading,
                    f"records {gone} are gone: retention or a deletion was faster than this replay",
                )
            resumed.append((each, min(max(each.start, stopped_at), each.end)))
        return resumed

    def _commit(self, source: str, reports: list[Report]) -> None:
        if not reports or self._plan.is_dry_run:
            return
        # A group stores topic names. In a recreated topic this run has no progress.
        found = self._client.topics([source]).get(source)
        if found is not None and found.topic_id == self._plan.source_id:
            offsets = {
                OffsetRange(source, each.partition, 0, 0).topic_partition: each.next_offset
                for each in reports
            }
            self._client.commit(self._plan.group, offsets)

    def _tell(self, done: dict[int, ReplayedPartition]) -> None:
        if self._progress is not None:
            self._progress(
                sum(each.next_offset - each.start for each in done.values()),
                sum(each.end - each.start for each in done.values()),
            )


def shared_out(
    ranges: list[OffsetRange],
    tasks_max: int,
    records_per_second: float | None,
    bytes_per_second: float | None,
) -> list[Work]:
    """Assign ranges to tasks that all run at once, each with its share of the limits.

    The largest range goes first, always to the task with the least work. A range is never split: order would be
    lost.
    """
    piles: list[list[OffsetRange]] = [[] for _ in range(min(tasks_max, len(ranges)))]
    sizes = [0] * len(piles)
    for each in sorted(ranges, key=lambda each: each.size, reverse=True):
        smallest = sizes.index(min(sizes))
        piles[smallest].append(each)
        sizes[smallest] += each.size
    total = sum(sizes)
    return [
        Work(
            tuple(pile),
            None if records_per_second is None else records_per_second * size / total,
            None if bytes_per_second is None else bytes_per_second * size / total,
        )
        for pile, size in zip(piles, sizes)
    ]


def _check_target(
    client: Client, source: str, partitions: Sequence[int] | None, plan: Plan, create_target: bool
) -> bool:
    """Whether the target keeps the records' timestamps. Raises SparkOptionError if it cannot store the records."""
    target = plan.target
    topics = client.topics([source, target]) if create_target else find_topics(client, [source, target])
    if target not in topics:
        if not create_target:
            raise SparkOptionError(f"topic {target} does not exist; create it, or pass create_target=True")
        if plan.is_dry_run:
            return True
        client.create_topic(target, len(topics[source].partitions))
        topics = find_topics(client, [source, target])
        if target not in topics:
            raise WireError(f"topic {target} was created, but a broker does not know it yet; try again")
    needed, there = max(partitions or topics[source].partitions) + 1, len(topics[target].partitions)
    if plan.keep_partitions and needed > there:
        raise SparkOptionError(
            f"{source} has {needed} partitions to replay and {target} only {there}: add partitions to it, or pass "
            "keep_partitions=False to send records by their keys"
        )
    return client.topic_configs([target]).get(target, {}).get("message.timestamp.type") != "LogAppendTime"


def _source_options(
    bootstrap: str,
    source: str,
    starting: tuple[str, int | None],
    ending: tuple[str, int | None],
    partitions: Sequence[int] | None,
    fail_on_data_loss: bool,
) -> dict[str, str]:
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "kafka.isolation.level": "read_committed",
        "failOnDataLoss": str(fail_on_data_loss),
        "includeHeaders": "true",
        "kafka.client.id": "penstock-replay",
        "startingOffsetsByTimestampStrategy": "latest",
    }
    if partitions is None:
        options["subscribe"] = source
    else:
        options["assign"] = f'{{"{source}": {list(partitions)}}}'
    for side, default, (offsets, timestamp) in (
        ("starting", "earliest", starting),
        ("ending", "latest", ending),
    ):
        if timestamp is None:
            options[f"{side}Offsets"] = offsets
        elif offsets != default:
            raise SparkOptionError(f"give either {side}_offsets or {side}_timestamp, not both")
        else:
            options[f"{side}Timestamp"] = str(timestamp)
    return options


def _check_limits(records_per_second: float | None, bytes_per_second: float | None) -> None:
    for name, limit in (("records_per_second", records_per_second), ("bytes_per_second", bytes_per_second)):
        if limit is not None and not limit > 0:
            raise SparkOptionError(f"{name} must be above 0, not {limit}; omit it for no limit")


def _codec(compression: str) -> Codec:
    try:
        return Codec[compression.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise SparkOptionError(f"compression must be one of {names}, not {compression!r}") from None
