"""Reading stored batches without any client: what a client believes it sent is not always what it sent.

A hand-written Fetch version 4 (the oldest that Kafka 4 serves) over a plain socket. It exists to see the
headers of batches, which no client shows: the codec that was really used, and the numbering of idempotent
producers.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from tests.interop.client import CODECS

FETCH, VERSION = 1, 4
BYTES_MAX = 50_000_000


class StoredBatch(NamedTuple):
    base_offset: int
    codec: str
    record_count: int
    producer_id: int
    producer_epoch: int
    base_sequence: int


def stored_batches(bootstrap: str, topic: str, partition: int, offset: int = 0) -> list[StoredBatch]:
    """The headers of all whole batches from the one that holds ``offset``."""
    host, _, port = bootstrap.rpartition(":")
    name = topic.encode()
    request = struct.pack(">hhih", FETCH, VERSION, 7, -1)
    request += struct.pack(">iiiib", -1, 500, 1, BYTES_MAX, 0)
    request += struct.pack(f">ih{len(name)}s", 1, len(name), name)
    request += struct.pack(">iiqi", 1, partition, offset, BYTES_MAX)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _exactly(connection, 4))
        response = _exactly(connection, size)
    return _headers(_records(response, name))


def _exactly(connection: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = connection.recv(min(size, 1 << 20))
        assert chunk, "the broker closed the connection"
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _records(response: bytes, name: bytes) -> bytes:
    correlation_id, _throttle_ms, topics, name_size = struct.unpack_from(">iiih", response)
    assert (correlation_id, topics, name_size) == (7, 1, len(name))
    position = 14 + name_size
    partitions, _index, error, _watermark, _stable, aborted = struct.unpack_from(
        ">iihqqi", response, position
    )
    assert (partitions, error) == (1, 0), f"fetch answered with error {error}"
    position += 30 + 16 * max(aborted, 0)
    (size,) = struct.unpack_from(">i", response, position)
    return response[position + 4 : position + 4 + size]


def _headers(records: bytes) -> list[StoredBatch]:
    found, position = [], 0
    while position + 61 <= len(records):
        base_offset, length = struct.unpack_from(">qi", records, position)
        if position + 12 + length > len(records):
            break
        (attributes,) = struct.unpack_from(">h", records, position + 21)
        producer_id, epoch, sequence, count = struct.unpack_from(">qhii", records, position + 43)
        codec = CODECS[attributes & 7]
        found.append(StoredBatch(base_offset, codec, count, producer_id, epoch, sequence))
        position += 12 + length
    return found
