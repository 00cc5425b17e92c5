"""One task of a replay: read ranges, add headers, send, keep within the rate.

``replay.py`` is the driver's half. A task works until its ranges are done or its round is over, and reports its
progress; it also reports expected errors, so that the driver knows what was sent before. A report counts only
records that the brokers have acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.columnar.columns import HEADERS_TYPE
from penstock.spark.errors import DataLossError
from penstock.spark.producing import ProduceSettings, RowError, Sender, record_bytes
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings, read
from penstock.wire import WireError

SOURCE_TOPIC = "x-replay-topic"
SOURCE_PARTITION = "x-replay-partition"
SOURCE_OFFSET = "x-replay-offset"
RUN = "x-replay-run"
_ADDED = (SOURCE_TOPIC, SOURCE_PARTITION, SOURCE_OFFSET, RUN)

# With a rate limit records are sent in portions of this time, not in one burst a second.
PORTION_SECONDS = 0.1
# A task's report for each of its ranges.
REPORT = "partition INT, next_offset BIGINT, records BIGINT, bytes BIGINT, error STRING"
_REPORT_ARROW = pa.schema(
    [
        ("partition", pa.int32()),
        ("next_offset", pa.int64()),
        ("records", pa.int64()),
        ("bytes", pa.int64()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters common to all tasks."""

    reading: ReadSettings
    produce: ProduceSettings
    # Id of the planned topic. A recreated topic has another id.
    source_id: bytes
    target: str
    run_id: str
    keep_partitions: bool
    is_dry_run: bool
    round_s: float

    @property
    def group(self) -> str:
        return f"penstock-replay-{self.run_id}-{self.target}"


class Work(NamedTuple):
    """One task's work in a round."""

    ranges: tuple[OffsetRange, ...]
    records_per_second: float | None
    bytes_per_second: float | None


class Report(NamedTuple):
    partition: int
    next_offset: int
    records: int
    bytes: int
    error: str | None


class Pace:
    """Limits the rate. Time lost in a stall is not made up by a burst."""

    def __init__(
        self,
        records_per_second: float | None,
        bytes_per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._records_per_second = records_per_second
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._begun = clock()
        self._due = self._begun  # when the next portion may leave

    @property
    def is_limited(self) -> bool:
        return self._records_per_second is not None or self._bytes_per_second is not None

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._begun

    def portion(self, batch: pa.RecordBatch) -> int:
        """The number of these rows to send at once."""
        rows = float(batch.num_rows)
        if self._records_per_second is not None:
            rows = min(rows, self._records_per_second * PORTION_SECONDS)
        if self._bytes_per_second is not None:
            row_bytes = max(1.0, record_bytes(batch) / max(1, batch.num_rows))
            rows = min(rows, self._bytes_per_second * PORTION_SECONDS / row_bytes)
        return max(1, int(rows))

    def sent(self, records: int, size: int) -> None:
        """Count sent records, and wait until more may be sent."""
        takes_s = 0.0
        if self._records_per_second is not None:
            takes_s = records / self._records_per_second
        if self._bytes_per_second is not None:
            takes_s = max(takes_s, size / self._bytes_per_second)
        now = self._clock()
        # Catch up by at most one portion; otherwise the machine's pauses would add up.
        self._due = max(self._due, now - takes_s - PORTION_SECONDS) + takes_s
        if self._due > now:
            self._sleep(self._due - now)


def work(plan: Plan, works: list[Work], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            reports = _replay_ranges(plan, works[number])
            yield pa.RecordBatch.from_pylist([each._asdict() for each in reports], schema=_REPORT_ARROW)


def _replay_ranges(plan: Plan, work: Work) -> list[Report]:
    pace = Pace(
        None if plan.is_dry_run else work.records_per_second,
        None if plan.is_dry_run else work.bytes_per_second,
    )
    reports: list[Report] = []
    for each in work.ranges:
        report = _replay_range(plan, each, pace)
        reports.append(report)
        if report.error is not None or report.next_offset < each.end:
            break
    return reports


def _replay_range(plan: Plan, offset_range: OffsetRange, pace: Pace) -> Report:
    """Run until the range or the round ends, whichever is first, or an error."""
    # Read but not acknowledged yet, then acknowledged.
    count = size = 0
    report = Report(offset_range.partition, offset_range.start, 0, 0, None)

    def acknowledged(next_offset: int) -> Report:
        return report._replace(
            next_offset=next_offset, records=report.records + count, bytes=report.bytes + size
        )

    try:
        with Sender(plan.produce, plan.target) as sender:
            for batch in read(plan.reading, offset_range, plan.source_id):
                portion = pace.portion(batch)
                for first in range(0, batch.num_rows, portion):
                    piece = batch.slice(first, portion)
                    piece_bytes = record_bytes(piece)
                    if not plan.is_dry_run:
                        sender.send(prepared(piece, plan.run_id, plan.keep_partitions))
                    count += piece.num_rows
                    size += piece_bytes
                    is_over = pace.elapsed_s > plan.round_s
                    if pace.is_limited or is_over:
                        sender.flush()
                        report = acknowledged(piece.column("offset")[-1].as_py() + 1)
                        count = size = 0
                        pace.sent(piece.num_rows, piece_bytes)
                    if is_over:
                        sender.finish()
                        return report
            sender.finish()
            return acknowledged(offset_range.end)
    except (WireError, RowError, DataLossError) as error:
        return report._replace(error=f"{offset_range.topic_partition}: {error}")


def prepared(batch: pa.RecordBatch, run_id: str, keep_partitions: bool) -> pa.RecordBatch:
    """The rows to send: unchanged except for four more headers."""
    columns = {name: batch.column(name) for name in ("key", "value", "timestamp")}
    if keep_partitions:
        columns["partition"] = batch.column("partition")
    columns["headers"] = _with_origin(batch, run_id)
    return pa.RecordBatch.from_pydict(columns)


def _with_origin(batch: pa.RecordBatch, run_id: str) -> pa.Array:
    """Each row's own headers, then ours; a record that was replayed before has both, the newest last.

    The bytes of a row's headers are contiguous in Arrow, so ours are joined to them row by row, and only lengths
    are reordered. Taking entries by index instead would be by far the slowest part of a replay.
    """
    rows, added = batch.num_rows, len(_ADDED)
    before = batch.column("headers")
    counts = before.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    starts = np.concatenate(([0], np.cumsum(counts)))
    ends = np.concatenate(([0], np.cumsum(counts + added)))
    place = _Places(starts, ends[1:, None] - added + np.arange(added), int(ends[-1]))
    names, contents = before.flatten().flatten()
    topic, run = batch.column("topic").cast(pa.binary()), pa.scalar(run_id.encode(), pa.binary())
    partition, offset = (
        batch.column(name).cast(pa.string()).cast(pa.binary()) for name in ("partition", "offset")
    )
    keys = place.joined(names.cast(pa.binary()), [pa.scalar(name.encode(), pa.binary()) for name in _ADDED])
    values = place.joined(contents, [topic, partition, offset, run])
    entries = pa.StructArray.from_arrays(
        [keys.view(pa.string()), values], fields=list(HEADERS_TYPE.value_type)
    )
    offsets = pa.array(ends.astype(np.int32))
    assert len(offsets) == rows + 1
    return pa.ListArray.from_arrays(offsets, entries, type=HEADERS_TYPE)


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions of the entries after each row got more."""

    starts: npt.NDArray[np.int64]  # of each row's own entries, among all of them; one more than rows
    added: npt.NDArray[np.int64]  # of the new ones: a line for each row
    total: int

    def joined(self, own: pa.Array, ours: Sequence[pa.Array | pa.Scalar]) -> pa.Array:
        """Binary entries, with those in ``ours`` (one per row, or the same for all) after each row's own."""
        rows = len(self.added)
        _, own_ends, data = own.buffers()
        bounds = np.zeros(1, np.int32)
        if own_ends is not None and len(own):
            bounds = np.frombuffer(own_ends, np.int32)[own.offset : own.offset + len(own) + 1]
        by_row = pa.py_buffer(np.ascontiguousarray(bounds[self.starts]))
        mine = pa.Array.from_buffers(pa.binary(), rows, [None, by_row, data or pa.py_buffer(b"")])
        together = pc.binary_join_element_wise(mine, *ours, pa.scalar(b"", pa.binary()))
        is_own = np.ones(self.total, dtype=bool)
        is_own[self.added] = False
        lengths = np.empty(self.total, dtype=np.int64)
        lengths[is_own] = np.diff(bounds)
        for index, each in enumerate(ours):
            size = len(each.as_py()) if isinstance(each, pa.Scalar) else pc.binary_length(each)
            lengths[self.added[:, index]] = size
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        validity = None
        if own.null_count:
            is_valid = np.ones(self.total, dtype=bool)
            is_valid[is_own] = own.is_valid().to_numpy(zero_copy_only=False)
            validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
        # A joined array has an offset only if it was sliced, which does not happen here.
        return pa.Array.from_buffers(
            pa.binary(), self.total, [validity, pa.py_buffer(ends), together.buffers()[2]], own.null_count
        )
