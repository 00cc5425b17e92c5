"""How much of what the machine can do the broker does: large batches in, and log data out.

In: 1 MB batches over one connection, against a bare copy from a loopback socket to a file with the same reads
and writes. Out: fetching what is in the page cache, against a bare ``sendfile`` loop over the same file. Each
pair runs in the same process arrangement: the sender or receiver here, the other side in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.process import MeasuredBroker, Wire, frame, settle
from benchmarks.requests import (
    FETCH_VERSION,
    PRODUCE_VERSION,
    batch,
    create,
    fetch_request,
    produce_request,
    pump,
)

BATCHES = 600
BATCH_RECORDS = 9_000
RECORD_BYTES = 100
WINDOW = 5
ROUNDS = 3
PRODUCE_TARGET = 0.5
CONSUME_TARGET = 0.5
FETCH_BYTES = 1 << 20


def run() -> dict[str, Any]:
    records = bytes(batch(BATCH_RECORDS, RECORD_BYTES))
    produced, copied, consumed, sent = [], [], [], []
    with MeasuredBroker() as broker:
        wire = Wire(broker.address)
        create(wire, "large", 1)
        request = frame(produce_request("large", records), PRODUCE_VERSION)
        pump(wire.socket, request, 50, WINDOW)
        cpu_before = broker.cpu_s
        for _ in range(ROUNDS):
            settle()
            began = time.perf_counter()
            pump(wire.socket, request, BATCHES, WINDOW)
            produced.append(len(request) * BATCHES / (time.perf_counter() - began))
            settle()
            copied.append(_raw_copy(request, BATCHES))
        produce_cpu_s = broker.cpu_s - cpu_before
        for _ in range(ROUNDS):
            settle()
            consumed.append(_consume(wire, BATCHES * BATCH_RECORDS))
            settle()
            sent.append(_raw_sendfile(_segment(broker.data_dir)))
        wire.close()
    produce_ratio = statistics.median(produced) / statistics.median(copied)
    consume_ratio = statistics.median(consumed) / statistics.median(sent)
    megabytes = len(records) * BATCHES * ROUNDS / 1e6
    return {
        "produce_mb_per_s": round(statistics.median(produced) / 1e6),
        "raw_copy_mb_per_s": round(statistics.median(copied) / 1e6),
        "produce_ratio": round(produce_ratio, 2),
        "produce_records_per_s": round(
            statistics.median(produced) / len(records) * BATCH_RECORDS,
        ),
        "produce_cpu_ms_per_mb": round(produce_cpu_s * 1e3 / megabytes, 3),
        "consume_mb_per_s": round(statistics.median(consumed) / 1e6),
        "raw_sendfile_mb_per_s": round(statistics.median(sent) / 1e6),
        "consume_ratio": round(consume_ratio, 2),
        "produce_target": PRODUCE_TARGET,
        "consume_target": CONSUME_TARGET,
        "met": produce_ratio >= PRODUCE_TARGET and consume_ratio >= CONSUME_TARGET,
    }


def _segment(data_dir: Path) -> Path:
    return max((data_dir / "large-0").glob("*.log"), key=lambda path: path.stat().st_size)


def _consume(wire: Wire, records: int) -> float:
    """Fetch about 1 MB at a time, one request in flight, as a consumer of one partition does."""
    offset = received = 0
    buffer = bytearray(4 << 20)
    view = memoryview(buffer)
    began = time.perf_counter()
    while offset < records:
        wire.socket.sendall(frame(fetch_request("large", offset, FETCH_BYTES), FETCH_VERSION))
        wire.socket.recv_into(view[:4], 4, socket.MSG_WAITALL)
        size = int.from_bytes(view[:4], "big")
        at = 0
        while at < size:
            at += wire.socket.recv_into(view[at:size])
        received += size
        offset += BATCH_RECORDS
    return received / (time.perf_counter() - began)


def _raw_copy(request: bytes, count: int) -> float:
    """The same bytes into a file with nothing in between but recv and write."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        listener = socket.create_server(("127.0.0.1", 0))
        child = multiprocessing.get_context("fork").Process(
            target=_copy_into_file, args=(listener, Path(directory) / "copy", len(request))
        )
        child.start()
        connection = socket.create_connection(listener.getsockname())
        began = time.perf_counter()
        pump(connection, request, count, WINDOW)
        elapsed = time.perf_counter() - began
        connection.close()
        child.join()
        listener.close()
    return len(request) * count / elapsed


def _copy_into_file(listener: socket.socket, path: Path, size: int) -> None:
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(size))
    answer = (8).to_bytes(4, "big") + bytes(8)
    with path.open("wb", buffering=0) as file:
        while True:
            at = 0
            while at < size:
                count = connection.recv_into(buffer[at:])
                if not count:
                    return
                at += count
            file.write(buffer)
            connection.sendall(answer)


def _raw_sendfile(path: Path) -> float:
    """The segment through sendfile in pieces of the same size, each asked for by a few bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = multiprocessing.get_context("fork").Process(target=_send_file, args=(listener, path))
    child.start()
    connection = socket.create_connection(listener.getsockname())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(bytearray(4 << 20))
    total = os.path.getsize(path)
    received = 0
    began = time.perf_counter()
    while received < total:
        connection.sendall(b"more")
        at, size = 0, min(FETCH_BYTES, total - received)
        while at < size:
            at += connection.recv_into(view[at:size])
        received += size
    elapsed = time.perf_counter() - began
    connection.close()
    child.join()
    listener.close()
    return received / elapsed


def _send_file(listener: socket.socket, path: Path) -> None:
    connection, _ = listener.accept()
    with path.open("rb") as file:
        position, total = 0, os.path.getsize(path)
        while position < total:
            if not connection.recv(4):
                return
            end = min(position + FETCH_BYTES, total)
            while position < end:
                position += os.sendfile(connection.fileno(), file.fileno(), position, end - position)
