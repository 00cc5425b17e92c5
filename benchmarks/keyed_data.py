"""Keyed records by the million for the benchmarks of compaction, made from a seed and checked record by record.

A record's value begins with its offset, and which key it has follows from the seed, so a reader knows of each
record whether it is what was written, and at the end whether the last record of each key was there. Records are
made and read as columns (``penstock.columnar``), and sent in batches as large as Kafka's Java client makes them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import wire
from penstock.columnar import columns
from penstock.model import TopicPartition
from penstock.protocol.compression import Codec

# Small, for trying out. Issue-sized: PENSTOCK_BENCH_KEYS=2e6 PENSTOCK_BENCH_RECORDS=2e7.
KEYS = int(float(os.environ.get("PENSTOCK_BENCH_KEYS") or 200_000))
RECORDS = int(float(os.environ.get("PENSTOCK_BENCH_RECORDS") or 2_000_000))
PARTITIONS = 4
VALUE_BYTES = 100
TOMBSTONES = 0.02
BATCH_BYTES = 16 * 1024
PREFIX = b"key-"
DIGITS = 12
KEY_BYTES = len(PREFIX) + DIGITS
CHUNK = 200_000
FETCH_BYTES = 8 << 20

_POWERS = 10 ** np.arange(DIGITS - 1, -1, -1, dtype=np.int64)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Found:
    """What a reading of all partitions found."""

    records: int
    # Of which there was a later one of the same key.
    superseded: int


class KeyedData:
    """The same records each time, for a number of partitions that have no key in common."""

    def __init__(self, keys: int = KEYS, records: int = RECORDS, partitions: int = PARTITIONS) -> None:
        self.partitions = partitions
        self.keys = keys // partitions
        self.records = records // partitions
        # Enough segments that all but a small part is cleaned, compressed or not.
        self.segment_bytes = max(1 << 20, min(64 << 20, self.records * VALUE_BYTES // 32))
        self._pool = _pool()

    def keys_of(self, partition: int) -> Array:
        """The key of each record, in the order of offsets: each key once, the rest by chance."""
        draw = np.random.default_rng(partition)
        first = draw.permutation(min(self.keys, self.records))
        rest = draw.integers(0, self.keys, max(0, self.records - self.keys))
        return np.concatenate([first, rest]).astype(np.int32)

    def tombstones_of(self, partition: int) -> Array:
        draw = np.random.default_rng(1000 + partition)
        return draw.random(self.records) < TOMBSTONES

    def fill(self, bootstrap: str, topic: str, codec: Codec = Codec.NONE) -> None:
        """Write everything and wait until it is acknowledged."""
        with wire.Client(bootstrap) as client, wire.Producer(client) as producer:
            # In turn: a producer has a few batches on their way to each partition.
            for row in zip_longest(*(self._batches(each, codec) for each in range(self.partitions))):
                for partition, batch in enumerate(row):
                    if batch is not None:
                        producer.send(TopicPartition(topic, partition), batch)
            producer.flush()

    def check(self, bootstrap: str, topic: str) -> Found:
        """Read everything: each record must be as it was written, and the last one of each key must be there."""
        count = superseded = 0
        with wire.Client(bootstrap) as client:
            for partition in range(self.partitions):
                keys, tombstones = self.keys_of(partition), self.tombstones_of(partition)
                expected = last_offsets(keys, self.keys)
                found = np.full(self.keys, -1, dtype=np.int64)
                for offsets, read_keys, numbers, nulls in _read(client, TopicPartition(topic, partition)):
                    assert (np.diff(offsets) > 0).all(), "offsets do not ascend"
                    assert (read_keys == keys[offsets]).all(), f"{topic}-{partition}: a key is not as written"
                    assert (nulls == tombstones[offsets]).all(), f"{topic}-{partition}: a value came or went"
                    assert (numbers[~nulls] == offsets[~nulls]).all(), f"{topic}-{partition}: another value"
                    found[read_keys] = offsets
                    count += len(offsets)
                    superseded += int((expected[read_keys] != offsets).sum())
                lost = np.nonzero(found != expected)[0]
                assert not len(lost), (
                    f"{topic}-{partition}: {len(lost)} keys lost their last record: {lost[:5]}"
                )
        return Found(count, superseded)

    def _batches(self, partition: int, codec: Codec) -> Iterator[bytearray]:
        keys, tombstones = self.keys_of(partition), self.tombstones_of(partition)
        for first in range(0, self.records, CHUNK):
            numbers = np.arange(first, min(first + CHUNK, self.records), dtype=np.int64)
            here = keys[numbers]
            text = np.empty((len(numbers), KEY_BYTES), dtype=np.uint8)
            text[:, : len(PREFIX)] = np.frombuffer(PREFIX, dtype=np.uint8)
            text[:, len(PREFIX) :] = _digits(here)
            values = self._pool[(numbers * 7919 + partition) % len(self._pool)]
            values[:, :DIGITS] = _digits(numbers)
            key = _binary(text, np.zeros(len(numbers), dtype=bool))
            value = _binary(values, tombstones[numbers])
            now_ms = pa.array(np.full(len(numbers), time.time_ns() // 1_000_000))
            for batch in columns.encode(key, value, None, now_ms, codec=codec, batch_bytes_max=BATCH_BYTES):
                yield batch.batch


def last_offsets(keys: Array, count: int) -> Array:
    """The last offset of each key; of several, the one that is assigned last stays."""
    last = np.full(count, -1, dtype=np.int64)
    last[keys] = np.arange(len(keys))
    return last


def number_in(value: bytes) -> int:
    """The offset that a value says it was written at."""
    return int(value[:DIGITS])


def _read(client: wire.Client, at: TopicPartition) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Offsets, keys, numbers in the values (meaningless where there is none), and where there is no value."""
    end = client.list_offsets({at: wire.LATEST})[at].offset
    for fetched in client.reader(at, 0, end, bytes_max=FETCH_BYTES):
        # The CRC of each batch is checked on the way.
        decoded = columns.decode(fetched.records, start=0, end=end)
        assert decoded.next_offset >= min(end, fetched.next_offset), "a response unfolds to too much"
        if not decoded.count:
            continue
        keys = np.frombuffer(decoded.key.buffers()[2], dtype=np.uint8)[: decoded.count * KEY_BYTES]
        nulls = np.asarray(decoded.value.is_null())
        values = np.frombuffer(decoded.value.buffers()[2], dtype=np.uint8)
        values = values[: (decoded.count - int(nulls.sum())) * VALUE_BYTES].reshape(-1, VALUE_BYTES)
        numbers = np.zeros(decoded.count, dtype=np.int64)
        numbers[~nulls] = _numbers(values[:, :DIGITS])
        yield (
            np.asarray(decoded.offset),
            _numbers(keys.reshape(-1, KEY_BYTES)[:, len(PREFIX) :]),
            numbers,
            nulls,
        )


def _digits(numbers: Array) -> Array:
    return (numbers.astype(np.int64)[:, None] // _POWERS % 10 + ord("0")).astype(np.uint8)


def _numbers(digits: Array) -> Array:
    numbers: Array = (digits.astype(np.int64) - ord("0")) @ _POWERS
    return numbers


def _binary(rows: Array, nulls: Array) -> pa.Array:
    """Rows of bytes as a column."""
    ends = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(np.where(nulls, 0, rows.shape[1]), out=ends[1:])
    data = rows[~nulls] if nulls.any() else rows
    validity = pa.py_buffer(np.packbits(~nulls, bitorder="little").tobytes()) if nulls.any() else None
    buffers = [validity, pa.py_buffer(ends.tobytes()), pa.py_buffer(np.ascontiguousarray(data).tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers, int(nulls.sum()))


def _pool() -> Array:
    """Values as people send them: JSON, of which about half is new in each."""
    choose = Random(1)
    rows = []
    for _ in range(5003):
        event = {
            "user": f"user-{choose.randrange(10_000)}",
            "amount": choose.randrange(10**6) / 100,
            "state": choose.choice(("open", "paid", "sent", "closed")),
            "note": f"{choose.getrandbits(128):032x}",
        }
        rows.append((" " * DIGITS + json.dumps(event)).encode().ljust(VALUE_BYTES, b" ")[:VALUE_BYTES])
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, VALUE_BYTES)
