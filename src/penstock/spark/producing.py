"""Send rows as record batches from one task; used by the sink and ``replay``.

A ``Sender`` gathers Arrow batches until there is enough for good record batches, assigns rows to partitions as the
Java client would, lets the kernel encode each partition's rows in one call, and passes the result to an idempotent
producer. No Python object is created per record. ``finish`` returns when every record is acknowledged.

Idempotent is not exactly-once: the brokers recognise a producer's own retries, but a task that Spark repeats is
another producer, and records that both send are stored twice. Delivery is at least once.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.columnar import columns
from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
from penstock.wire import (
    BrokerRefused,
    Client,
    Producer,
    Security,
    TopicInfo,
    TopicReplaced,
    UnknownTopic,
    shared,
)

# Gathered before encoding. Arrow batches from Spark hold some ten thousand rows; split over many partitions that is
# little for a record batch, and less for a compressor. It also bounds a task's memory: this, the same again sorted
# and encoded, and the producer's batches in flight.
GATHER_BYTES = 8 << 20
# Below Kafka's default max.message.bytes, with some room.
BATCH_BYTES_MAX = 1 << 20
# Records without a key go to one partition for this many bytes and then to the next, like the Java client with its
# batch.size.
STRIPE_BYTES = 64 << 10
# How long to wait for an auto-created topic: some brokers answer before it exists.
CREATION_S = 3.0
CREATION_PAUSE_S = 0.1
CLIENT_ID = "penstock-sink"
# The Java producer's defaults.
REQUEST_TIMEOUT_MS = 30_000
DELIVERY_TIMEOUT_MS = 120_000
# "No timestamp" in a record; the source shows it as a millisecond before 1970.
NO_TIMESTAMP = -1

Rows = npt.NDArray[np.int64]


class RowError(ValueError):
    """A row cannot become a record. The message says why."""


@dataclass(frozen=True, slots=True)
class ProduceSettings:
    """Picklable, and equal for tasks that may share a producer."""

    bootstrap: str
    acks: int = -1
    codec: Codec = Codec.NONE
    batch_bytes_max: int = BATCH_BYTES_MAX
    client_id: str = CLIENT_ID
    request_timeout_ms: int = REQUEST_TIMEOUT_MS
    deadline_ms: int = DELIVERY_TIMEOUT_MS
    # None: plaintext.
    security: Security | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """Totals of a task, all acknowledged by the brokers."""

    records: int
    # Size of the record batches as sent: compressed, with their headers.
    bytes: int


@dataclass(frozen=True, slots=True)
class _Lent:
    """A producer lent to one task, and the topics it has written to."""

    producer: Producer
    topic_ids: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class _Target:
    """A topic's metadata for sending."""

    topic_id: bytes
    count: int  # of partitions
    led: Rows  # those that have a leader now; all if none has
    record_bytes_max: int | None  # the topic's max.message.bytes, if the brokers tell


class Sender:
    """One task's sender. Leaving the context without ``finish`` may leave the records incomplete."""

    def __init__(self, settings: ProduceSettings, topic: str | None = None) -> None:
        """``topic`` wins over a column of that name."""
        self._settings = settings
        self._topic = topic
        self._client = shared(
            settings.bootstrap,
            client_id=settings.client_id,
            request_timeout_ms=settings.request_timeout_ms,
            deadline_ms=settings.deadline_ms,
            security=settings.security,
        )
        self._targets: dict[str, _Target] = {}
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        # The next partition for records without a key. Tasks start at different partitions.
        self._turn = random.randrange(1 << 16)
        self._lent: _Lent | None = None
        self._records = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lent is not None:
            # After an error its batches in flight are given up, and no other task may reuse the producer.
            self._lent.producer.__exit__(kind, error, traceback)
            self._lent = None

    # What a task does

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows with the column value and, if present, key, headers, topic, partition, timestamp.

        Raises:
            RowError: a row cannot become a record.
            WireError: the brokers refused, or could not be reached in time.
        """
        rows = max(1, int(batch.num_rows * GATHER_BYTES / max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            self._gathered.append(piece)
            self._gathered_bytes += piece.nbytes
            if self._gathered_bytes >= GATHER_BYTES:
                self._send_gathered()

    def finish(self) -> Sent:
        """Send the rest and wait until everything is acknowledged."""
        self.flush()
        lent, self._lent = self._lent, None
        if lent is not None:
            _idle.setdefault((os.getpid(), self._settings), []).append(lent)
        return Sent(self._records, self._bytes)

    def flush(self) -> None:
        """As ``finish``, but more may follow."""
        self._send_gathered()
        if self._lent is not None:
            with _explained():
                self._lent.producer.flush()

    # From rows to batches

    def _send_gathered(self) -> None:
        if not self._gathered:
            return
        table = pa.Table.from_batches(self._gathered).combine_chunks()
        self._gathered, self._gathered_bytes = [], 0
        for batch in table.to_batches():
            self._send_rows(_normalised(batch))

    def _send_rows(self, batch: pa.RecordBatch) -> None:
        if self._topic is not None:
            self._send_to(self._topic, batch)
            return
        if "topic" not in batch.schema.names:
            raise RowError("no topic: give the option topic, or a column topic")
        topics = batch.column("topic")
        if topics.null_count:
            raise RowError("a row has a null topic: give every row one, or the option topic for all of them")
        names = topics.dictionary_encode()
        order, groups = _grouped(names.indices.to_numpy(zero_copy_only=False))
        ordered = batch if order is None else batch.take(pa.array(order))
        for index, start, size in groups:
            self._send_to(_name(names.dictionary[index]), ordered.slice(start, size))

    def _send_to(self, topic: str, batch: pa.RecordBatch) -> None:
        target = self._target(topic)
        order, groups = _grouped(self._partitions(topic, target, batch))
        if order is not None:
            batch = batch.take(pa.array(order))
        key, value = batch.column("key"), batch.column("value")
        headers = batch.column("headers") if "headers" in batch.schema.names else None
        timestamps = batch.column("timestamp")
        for partition, start, size in groups:
            encoded = columns.encode(
                key.slice(start, size),
                value.slice(start, size),
                None if headers is None else headers.slice(start, size),
                timestamps.slice(start, size),
                codec=self._settings.codec,
                batch_bytes_max=min(
                    self._settings.batch_bytes_max, target.record_bytes_max or BATCH_BYTES_MAX
                ),
            )
            for each in encoded:
                self._send_batch(TopicPartition(topic, partition), target, each)

    def _send_batch(self, at: TopicPartition, target: _Target, encoded: columns.Encoded) -> None:
        size = len(encoded.batch)
        if target.record_bytes_max is not None and size > target.record_bytes_max:
            raise RowError(
                f"a record for {at.topic} takes {size} bytes, and the topic allows {target.record_bytes_max}: "
                "raise its max.message.bytes, compress, or send less"
            )
        with _explained():
            self._producer_for(at.topic, target).send(at, encoded.batch)
        self._records += encoded.count
        self._bytes += size

    def _producer_for(self, topic: str, target: _Target) -> Producer:
        lent = self._lent
        if lent is None:
            lent = self._lent = _take(self._settings, self._client)
        if lent.topic_ids.setdefault(topic, target.topic_id) != target.topic_id:
            # Recreated since an earlier task: this producer's sequences continue those of the old topic.
            lent.producer.close()
            lent = self._lent = _Lent(
                Producer(self._client, acks=self._settings.acks), {topic: target.topic_id}
            )
        return lent.producer

    # Where records go

    def _partitions(self, topic: str, target: _Target, batch: pa.RecordBatch) -> Rows:
        """A partition for each row: the row's own, else by key, else in turn."""
        chosen = columns.partitions_for(batch.column("key"), target.count)
        if "partition" in batch.schema.names:
            named = batch.column("partition")
            self._check_partitions(topic, target, named)
            chosen = pc.coalesce(named, chosen)
        partitions: Rows = chosen.to_numpy(zero_copy_only=False).astype(np.int64)
        keyless = np.flatnonzero(partitions == -1)
        if len(keyless):
            sizes = pc.fill_null(pc.binary_length(batch.column("value")), 0).to_numpy(zero_copy_only=False)
            ends = np.cumsum(sizes[keyless], dtype=np.int64)
            turns = self._turn + ends // STRIPE_BYTES
            partitions[keyless] = target.led[turns % len(target.led)]
            # The next rows go to another partition, so that many small batches are spread too.
            self._turn = int(turns[-1]) + 1
        return partitions

    def _check_partitions(self, topic: str, target: _Target, partitions: pa.Array) -> None:
        lowest, highest = pc.min_max(partitions).as_py().values()
        if highest is None:
            return
        if highest >= target.count:
            # It may have been added since the task began. Keys keep their partitions until the next batch.
            target = self._target(topic, anew=True)
        if lowest < 0 or highest >= target.count:
            raise RowError(
                f"a row names partition {lowest if lowest < 0 else highest} of {topic}, which has {target.count} "
                f"(0 to {target.count - 1}): correct the column partition or leave it null"
            )

    def _target(self, topic: str, *, anew: bool = False) -> _Target:
        target = self._targets.get(topic)
        if target is None or anew:
            info = _topic_info(self._client, topic)
            led = [number for number, partition in info.partitions.items() if partition.leader >= 0]
            target = _Target(
                topic_id=info.topic_id,
                count=len(info.partitions),
                led=np.array(sorted(led or info.partitions), dtype=np.int64),
                record_bytes_max=self._record_bytes_max(topic),
            )
            known = self._targets.setdefault(topic, target)
            if known.topic_id != target.topic_id:
                raise TopicReplaced(f"topic {topic} was deleted and recreated while it was written to")
            self._targets[topic] = target
        return target

    def _record_bytes_max(self, topic: str) -> int | None:
        try:
            largest = self._client.topic_configs([topic])[topic].get("max.message.bytes")
        except BrokerRefused:
            # The right to write does not include reading settings. The leader reports a record that is too large.
            return None
        return None if largest is None else int(largest)


def record_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of keys and values, before compression and without overhead."""
    total = 0
    for name in ("key", "value"):
        total += pc.sum(pc.binary_length(batch.column(name))).as_py() or 0
    return total


@contextmanager
def _explained() -> Iterator[None]:
    """Add advice to broker errors that are too terse."""
    try:
        yield
    except BrokerRefused as error:
        if error.code != ErrorCode.INVALID_TIMESTAMP:
            raise
        raise RowError(
            f"{error}: it is too far from now for the topic; correct the column timestamp, or raise the topic's "
            "message.timestamp.before.max.ms or message.timestamp.after.max.ms"
        ) from None


# Producers outlive tasks: worker processes are reused, a producer id costs a round trip, and brokers remember
# each id for a day. A failed producer is not kept. Keyed by process, because Spark's workers are forked.
_idle: dict[tuple[int, ProduceSettings], list[_Lent]] = {}


def _take(settings: ProduceSettings, client: Client) -> _Lent:
    idle = _idle.get((os.getpid(), settings))
    return idle.pop() if idle else _Lent(Producer(client, acks=settings.acks), {})


def _topic_info(client: Client, topic: str) -> TopicInfo:
    """Look the topic up as a producer, so that brokers with auto-creation create it."""
    deadline = time.monotonic() + CREATION_S
    while True:
        info = client.topics([topic], create=True).get(topic)
        if info is not None and info.partitions:
            return info
        if time.monotonic() > deadline:
            raise UnknownTopic(
                f"topic {topic} does not exist and the brokers do not create it; create it first"
            )
        time.sleep(CREATION_PAUSE_S)


# Arrow


def _name(topic: pa.StringScalar) -> str:
    try:
        name: str = topic.as_py()
    except UnicodeDecodeError:
        # Spark casts any bytes to a string.
        name = topic.as_buffer().to_pybytes()
        raise RowError(
            f"a row has the topic {name!r}, which is not UTF-8: correct the column topic"
        ) from None
    return name


def _normalised(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns to send, in the kernel's types: bytes, and milliseconds for times."""
    names = set(batch.schema.names)
    value = batch.column("value").cast(pa.binary())
    arrays = {"value": value}
    arrays["key"] = (
        batch.column("key").cast(pa.binary()) if "key" in names else pa.nulls(len(value), pa.binary())
    )
    arrays["timestamp"] = _milliseconds(
        batch.column("timestamp") if "timestamp" in names else None, len(value)
    )
    if "headers" in names:
        headers = batch.column("headers").cast(columns.HEADERS_TYPE)
        if pc.struct_field(headers.flatten(), "key").null_count:
            raise RowError("a header has a null key: give every header a name")
        arrays["headers"] = headers
    if "partition" in names:
        arrays["partition"] = _numbers(batch.column("partition"))
    if "topic" in names:
        arrays["topic"] = batch.column("topic")
    return pa.RecordBatch.from_pydict(arrays)


def _numbers(partitions: pa.Array) -> pa.Array:
    try:
        return partitions.cast(pa.int32())
    except pa.ArrowInvalid:
        raise RowError(
            f"column partition goes up to {pc.max(partitions).as_py()}, and no topic has so many partitions"
        ) from None


def _milliseconds(timestamps: pa.Array | None, count: int) -> pa.Array:
    now_ms = time.time_ns() // 1_000_000
    if timestamps is None:
        return pa.array(np.full(count, now_ms, dtype=np.int64))
    in_ms = timestamps
    if not pa.types.is_integer(timestamps.type):
        in_ms = timestamps.cast(pa.timestamp("ms", timestamps.type.tz), safe=False).cast(pa.int64())
    earliest = pc.min(in_ms).as_py()
    if earliest is not None and earliest < NO_TIMESTAMP:
        raise RowError("a row has a timestamp before 1970, which a record cannot hold")
    return in_ms.fill_null(now_ms)


def _grouped(codes: npt.NDArray[np.integer]) -> tuple[Rows | None, list[tuple[int, int, int]]]:
    """Group rows by code, keeping their order: (order, [(code, first row, rows)]).

    The order is None if the rows are grouped already.
    """
    if len(codes) == 0:
        return None, []
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    if len(changes) == 0:
        return None, [(int(codes[0]), 0, len(codes))]
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    ends = np.append(starts[1:], len(codes))
    groups = [(int(ordered[start]), int(start), int(end - start)) for start, end in zip(starts, ends)]
    return order.astype(np.int64, copy=False), groups
