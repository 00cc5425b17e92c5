"""Logs and batches for tests, on the file system that can lose power."""

from __future__ import annotations

from typing import Any

from penstock.environment import Buffer, FileRange
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.protocol.compression import Codec, compress
from penstock.protocol.records import (
    BatchHeader,
    Marker,
    batches,
    check_produced,
    decode_header,
    emptied,
    encode_batch,
    encode_marker,
    rebuilt,
    unfold,
)
from tests.support_files import FakeFiles, fake_environment

DIRECTORY = "/data/topic-0"
NOW = 1_700_000_000_000


def made_files() -> FakeFiles:
    files = FakeFiles()
    files.make_directory("/data")
    return files


def opened(files: FakeFiles, config: LogConfig | None = None, *, clean: bool = True, **options: Any) -> Log:
    return Log.open(fake_environment(files), DIRECTORY, config or LogConfig(), clean=clean, **options)


def made_batch(
    *timestamps: int,
    size: int = 10,
    codec: Codec = Codec.NONE,
    producer: tuple[int, int, int] | None = None,
    transactional: bool = False,
) -> tuple[bytearray, BatchHeader]:
    """A batch of one record per timestamp; ``producer`` is (id, epoch, base sequence)."""
    producer_id, producer_epoch, base_sequence = producer or (-1, -1, -1)
    batch = encode_batch(
        [(timestamp, b"k", bytes(size), ()) for timestamp in timestamps or (NOW,)],
        codec=codec,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
    )
    header = check_produced(memoryview(batch), max_message_bytes=1 << 30)
    assert isinstance(header, BatchHeader)
    return batch, header


def append(log: Log, *timestamps: int, epoch: int = 0, **options: Any) -> int:
    batch, header = made_batch(*timestamps, **options)
    return log.append(batch, header, epoch)


def append_marker(
    log: Log,
    producer_id: int,
    producer_epoch: int = 0,
    *,
    is_commit: bool,
    coordinator_epoch: int = 0,
    leader_epoch: int = 0,
) -> int:
    batch = encode_marker(Marker(is_commit, coordinator_epoch), producer_id, producer_epoch, NOW)
    return log.append(batch, decode_header(batch), leader_epoch)


def flush(log: Log) -> None:
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)


def headers_in(found: FileRange | None) -> list[BatchHeader]:
    if found is None:
        return []
    data = found.file.read_at(found.position, found.size)
    headers = [header for _, header in batches(data)]
    assert sum(header.size for header in headers) == found.size, "only whole batches"
    return headers


def base_offsets(log: Log, offset: int | None = None, bytes_max: int = 1 << 30) -> list[int]:
    """Where the batches begin that a consumer gets, reading on from an offset to the end."""
    offset = log.log_start_offset if offset is None else offset
    found: list[int] = []
    while headers := headers_in(log.read(offset, bytes_max, log.log_end_offset, at_least_one=True)):
        found += [header.base_offset for header in headers]
        offset = headers[-1].next_offset
    return found


def names(files: FakeFiles, suffix: str = "") -> list[str]:
    return [name for name in files.list(DIRECTORY) if name.endswith(suffix)]


def compacted(batch: Buffer, *kept: int) -> bytearray:
    """The batch with only the records that have these offset deltas, in the same codec; without any, empty."""
    header, body = unfold(batch, 0, 1 << 30)
    if not kept:
        return emptied(header)
    records, at = [], 0
    while at < len(body):
        assert body[at] < 0x80 and not body[at] & 1, "a record too large for this"
        end = at + 1 + body[at] // 2
        records.append(body[at:end])
        at = end
    payload = compress(Codec(header.codec), b"".join(records[delta] for delta in kept))
    return rebuilt(header._replace(count=len(kept)), payload)
