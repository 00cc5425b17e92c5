"""Read one range of offsets of one partition as Arrow batches, in a task.

All readers use this: the source's tasks, the archive, replay. Raw batches come from the partition's leader
(``penstock.wire`` finds a new leader when it dies), one kernel call turns each response into columns, and the
columns are sliced, never copied. Offsets have gaps: a range is done when the log has been read up to its end, not
when a number of records has arrived.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from penstock.columnar.columns import HEADERS_TYPE, Columns, decode
from penstock.protocol.records import CorruptBatch
from penstock.spark.errors import DataLossError
from penstock.spark.ranges import OffsetRange
from penstock.wire import Client, OffsetOutOfRange, Security, TopicReplaced, UnknownTopic, shared

CLIENT_ID = "penstock-spark"
REQUEST_TIMEOUT_MS = 30_000
# How long one task looks for a leader before it fails; Spark then retries the task elsewhere.
DEADLINE_MS = 120_000
# A topic or partition missing for this long is gone; for a shorter time a just started broker may be behind.
GONE_AFTER_S = 10.0
# Large enough that decoding outweighs the round trip, small enough for many tasks on one machine.
FETCH_BYTES_MAX = 8 * 2**20
# Rows per batch for the JVM: fewer cost more per row, many more do not fit its caches.
ROWS_MAX = 16_384
# Freed memory that a reading process keeps.
KEPT_BYTES = 24 * 2**20
# Approximate limit of one batch: the JVM holds it in one piece, for every task. Only large records reach it.
BATCH_BYTES_MAX = 32 * 2**20

_log = logging.getLogger("penstock.spark")


@dataclass(frozen=True, slots=True)
class ReadSettings:
    bootstrap: str
    headers: bool = False
    read_committed: bool = False
    fail_on_data_loss: bool = True
    rows_max: int = ROWS_MAX
    client_id: str = CLIENT_ID
    request_timeout_ms: int = REQUEST_TIMEOUT_MS
    deadline_ms: int = DEADLINE_MS
    fetch_bytes_max: int = FETCH_BYTES_MAX
    # None: plaintext.
    security: Security | None = None

    def client(self) -> Client:
        """This process's shared client: Spark reuses its workers, and so their connections."""
        return shared(
            self.bootstrap,
            client_id=self.client_id,
            request_timeout_ms=self.request_timeout_ms,
            deadline_ms=self.deadline_ms,
            security=self.security,
        )


def schema(headers: bool) -> pa.Schema:
    """The columns of Spark's Kafka source."""
    fields = [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
    if headers:
        fields.append(pa.field("headers", HEADERS_TYPE))
    return pa.schema(fields)


def read(
    settings: ReadSettings, offset_range: OffsetRange, topic_id: bytes | None = None
) -> Iterator[pa.RecordBatch]:
    """All records of a range, in order, in batches of at most ``rows_max`` rows.

    With a ``topic_id`` only that topic is read; in a recreated topic of the same name the offsets are other
    records.

    Raises:
        DataLossError: a part of the range is gone (retention, deletion) and ``fail_on_data_loss`` is on.
        WireError: no leader answered within ``deadline_ms``.
        CorruptBatch: a stored batch is damaged.
    """
    _settle_process()
    client = settings.client()
    shape = _Shape(settings, offset_range)
    position = offset_range.start
    unknown_until: float | None = None
    while position < offset_range.end:
        try:
            answers = client.reader(
                offset_range.topic_partition,
                position,
                offset_range.end,
                bytes_max=settings.fetch_bytes_max,
                read_committed=settings.read_committed,
                topic_id=topic_id,
            )
            for answer in answers:
                unknown_until, topic_id = None, answer.topic_id
                # One response may decompress to more than the kernel decodes in one call.
                while position < offset_range.end:
                    columns = decode(
                        answer.records,
                        start=position,
                        end=offset_range.end,
                        aborted=answer.aborted,
                        headers=settings.headers,
                    )
                    if columns.next_offset == position:
                        break
                    position = columns.next_offset
                    yield from shape.batches(columns)
                del answer  # frees its buffer for a later response
        except CorruptBatch as error:
            raise CorruptBatch(f"{offset_range.topic_partition}: {error}") from error
        except OffsetOutOfRange as error:
            gone = OffsetRange(
                offset_range.topic,
                offset_range.partition,
                position,
                max(position, min(offset_range.end, error.log_start_offset)),
            )
            if gone.size:
                lose(settings, f"records {gone} are gone: retention or a deletion was faster than this read")
                position = gone.end
            else:
                lose(
                    settings,
                    f"records [{position}, {offset_range.end}) of {offset_range.topic_partition} are gone: the "
                    f"log ends at {error.high_watermark}, so the topic was recreated or lost records",
                )
                return
        except TopicReplaced:
            lose(settings, f"{offset_range.topic_partition} is gone: its topic was deleted and recreated")
            return
        except UnknownTopic:
            now = time.monotonic()
            unknown_until = unknown_until or now + GONE_AFTER_S
            if now >= unknown_until:
                lose(
                    settings, f"{offset_range.topic_partition} is gone: its topic was deleted during the read"
                )
                return


@cache
def _settle_process() -> None:
    """Tune a worker process once, to make every task cheaper.

    glibc returns freed memory to the system at once, so every response would be decompressed into new pages, and
    page faults take a third of a task's time; once it has freed a block of this size, it keeps as much. And Spark
    collects garbage after each task, which is fast when imported objects are frozen.
    """
    np.empty(KEPT_BYTES, np.uint8)  # not written to, unlike a bytearray
    gc.freeze()


def lose(settings: ReadSettings, what: str, way_on: str = "on without them") -> None:
    """Report lost records: an error with failOnDataLoss, otherwise a warning in the log."""
    if settings.fail_on_data_loss:
        raise DataLossError(f"{what}. To read {way_on} set failOnDataLoss to false.")
    _log.warning("%s. Reading %s, as failOnDataLoss is false.", what, way_on)


class _Shape:
    """Builds record batches from columns; constant columns are built once and sliced."""

    def __init__(self, settings: ReadSettings, offset_range: OffsetRange) -> None:
        self._rows_max = settings.rows_max
        self._schema = schema(settings.headers)
        # Built from buffers: pa.scalar and pa.array import pandas, which costs a new worker more than its first
        # task.
        topic, rows = offset_range.topic.encode(), self._rows_max
        ends = np.arange(0, len(topic) * (rows + 1), len(topic), dtype=np.int32)
        self._topic = pa.Array.from_buffers(
            pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(topic * rows)], 0
        )
        same = pa.py_buffer(np.full(rows, offset_range.partition, dtype=np.int32))
        self._partition = pa.Array.from_buffers(pa.int32(), rows, [None, same], 0)

    def batches(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        size = columns.value.nbytes + columns.key.nbytes
        rows_max = max(1, min(self._rows_max, BATCH_BYTES_MAX * columns.count // max(1, size)))
        for first in range(0, columns.count, rows_max):
            rows = min(rows_max, columns.count - first)
            arrays = [
                columns.key.slice(first, rows),
                columns.value.slice(first, rows),
                self._topic.slice(0, rows),
                self._partition.slice(0, rows),
                columns.offset.slice(first, rows),
                columns.timestamp.slice(first, rows),
                columns.timestamp_type.slice(first, rows),
            ]
            if columns.headers is not None:
                arrays.append(columns.headers.slice(first, rows))
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
