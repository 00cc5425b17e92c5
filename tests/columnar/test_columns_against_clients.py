"""Random records through the record batches of other clients: kafka-python and aiokafka write, we read, and back.

Neither knows of ours, and each knows every codec.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.columnar import columns as installed
from penstock.protocol.compression import Codec
from penstock.protocol.records import decode_records
from tests.columnar.kernels import INTERPRETED, at_offset, everything, rows

RecordFields = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]

# Long enough for sizes of one, two and three bytes; and compressible, so that the clients do compress.
FIELDS = st.none() | st.binary(max_size=80) | st.integers(0, 20_000).map(lambda size: b"ab" * (size // 2))
NAMES = st.text(max_size=8)
TIMESTAMPS = st.integers(0, 2**41) | st.integers(0, 2**52)
RECORDS = st.lists(
    st.tuples(TIMESTAMPS, FIELDS, FIELDS, st.lists(st.tuples(NAMES, FIELDS), max_size=3)),
    min_size=1,
    max_size=12,
)
BATCHES = st.lists(st.tuples(RECORDS, st.sampled_from(Codec), st.integers(0, 5)), min_size=1, max_size=4)
SPEEDS = [INTERPRETED, installed] if installed.IS_COMPILED else [INTERPRETED]
few = settings(max_examples=40, deadline=None)


def builder_of(client: str) -> Any:
    if client == "kafka-python":
        from kafka.record.default_records import DefaultRecordBatchBuilder
    else:
        from aiokafka.record.default_records import DefaultRecordBatchBuilder
    return DefaultRecordBatchBuilder


def reader_of(client: str) -> Any:
    if client == "kafka-python":
        from kafka.record.memory_records import MemoryRecords
    else:
        from aiokafka.record.memory_records import MemoryRecords
    return MemoryRecords


def written(client: str, records: list[RecordFields], codec: Codec) -> bytearray:
    builder = builder_of(client)(
        magic=2,
        compression_type=int(codec),
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for delta, (timestamp, key, value, headers) in enumerate(records):
        assert builder.append(delta, timestamp=timestamp, key=key, value=value, headers=headers) is not None
    return bytearray(builder.build())


def read_by(client: str, data: bytes) -> list[tuple[Any, ...]]:
    found = []
    memory = reader_of(client)(data)
    while memory.has_next():
        batch = memory.next_batch()
        assert batch.validate_crc()
        found += [
            (record.offset, record.timestamp, record.key, record.value, list(record.headers))
            for record in batch
        ]
    return found


@pytest.mark.parametrize("client", ["kafka-python", "aiokafka"])
@given(batches=BATCHES)
@few
def test_what_a_client_wrote_is_read_as_the_client_reads_it(
    client: str, batches: list[tuple[list[RecordFields], Codec, int]]
) -> None:
    data = b""
    base_offset = 0
    expected = []
    for records, codec, gap in batches:
        base_offset += gap
        batch = at_offset(written(client, records, codec), base_offset)
        expected += [
            (*record[:4], list(record.headers)) for record in decode_records(batch, bytes_max=1 << 30)
        ]
        data += batch
        base_offset += len(records)
    assert read_by(client, data) == expected
    for columns in SPEEDS:
        decoded = everything(columns, data)
        assert rows(decoded) == expected
        assert decoded.next_offset == base_offset


@pytest.mark.parametrize("client", ["kafka-python", "aiokafka"])
@given(records=RECORDS, codec=st.sampled_from(Codec), batch_bytes_max=st.sampled_from([100, 5000, 1 << 20]))
@few
def test_what_we_wrote_is_read_by_the_client(
    client: str, records: list[RecordFields], codec: Codec, batch_bytes_max: int
) -> None:
    timestamps, keys, values, headers = zip(*records)
    pairs = [[{"key": name, "value": value} for name, value in items] for items in headers]
    arrays = (
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(pairs, installed.HEADERS_TYPE),
        pa.array(timestamps, pa.int64()),
    )
    written_by_each = []
    for columns in SPEEDS:
        batches = columns.encode(*arrays, codec=codec, batch_bytes_max=batch_bytes_max)
        data = b"".join(at_offset(encoded.batch, encoded.first_row) for encoded in batches)
        assert read_by(client, data) == [(offset, *record) for offset, record in enumerate(records)]
        written_by_each.append(data)
    assert len(set(written_by_each)) == 1


@given(records=RECORDS)
@few
def test_uncompressed_we_write_the_same_bytes_as_kafka_python(records: list[RecordFields]) -> None:
    timestamps, keys, values, headers = zip(*records)
    pairs = [[{"key": name, "value": value} for name, value in items] for items in headers]
    for columns in SPEEDS:
        (encoded,) = columns.encode(
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            pa.array(pairs, installed.HEADERS_TYPE),
            pa.array(timestamps, pa.int64()),
            batch_bytes_max=1 << 30,
        )
        # The leader epoch, which is the broker's, is 0 there and -1 here.
        assert at_offset(encoded.batch, 0) == at_offset(written("kafka-python", records, Codec.NONE), 0)
