"""The same load on Penstock and on Apache Kafka, one after the other, on the same machine.

Two loads: the same prepared requests from one connection (what the broker costs), and librdkafka sending a
million small records (what a user gets). Figures are ratios of rates, and CPU time per unit. Kafka is warmed up
with the load first, as a JVM should be. Skipped with a word where its jars cannot be had.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.apache_kafka import ApacheKafka
from benchmarks.process import MeasuredBroker, Wire, cpu_s, frame, settle
from benchmarks.requests import (
    FETCH_VERSION,
    PRODUCE_VERSION,
    batch,
    create,
    fetch_request,
    produce_request,
    pump,
)

REQUESTS = 60_000
WARM_UP = 30_000
WINDOW = 200
LARGE_BATCHES = 400
LARGE_WINDOW = 5
RECORDS = 1_000_000
RECORD_BYTES = 100


def run() -> dict[str, Any]:
    with MeasuredBroker() as broker:
        host, port = broker.address
        ours = _measured(f"{host}:{port}", broker.pid)
    try:
        with ApacheKafka({"auto.create.topics.enable": "true"}) as kafka:
            theirs = _measured(kafka.bootstrap, kafka.pid)
    except (OSError, RuntimeError) as error:
        return {"skipped": f"Apache Kafka could not be started: {error}", "penstock": ours}
    return {
        "penstock": ours,
        "kafka": theirs,
        "small_produce_rate_ratio": round(ours["small_produce_per_s"] / theirs["small_produce_per_s"], 2),
        "small_fetch_rate_ratio": round(ours["small_fetch_per_s"] / theirs["small_fetch_per_s"], 2),
        "large_produce_rate_ratio": round(
            ours["large_produce_mb_per_s"] / theirs["large_produce_mb_per_s"], 2
        ),
        "client_rate_ratio": round(ours["client_records_per_s"] / theirs["client_records_per_s"], 2),
        "client_cpu_ratio": round(ours["client_broker_cpu_s"] / theirs["client_broker_cpu_s"], 2),
    }


def _measured(bootstrap: str, pid: int) -> dict[str, float]:
    host, port = bootstrap.rsplit(":", 1)
    wire = Wire((host, int(port)))
    figures: dict[str, float] = {}
    create(wire, "small", 1)
    create(wire, "large", 1)
    create(wire, "client", 4)
    one = bytes(batch(1, RECORD_BYTES))
    produce = frame(produce_request("small", one), PRODUCE_VERSION)
    pump(wire.socket, produce, WARM_UP, WINDOW)
    figures |= _pumped(wire, pid, produce, "small_produce")
    fetch = frame(fetch_request("small", 0, 1), FETCH_VERSION)
    pump(wire.socket, fetch, WARM_UP, WINDOW)
    figures |= _pumped(wire, pid, fetch, "small_fetch")
    large = frame(produce_request("large", bytes(batch(9_000, RECORD_BYTES))), PRODUCE_VERSION)
    pump(wire.socket, large, LARGE_BATCHES, LARGE_WINDOW)
    settle()
    cpu_before, began = cpu_s(pid), time.perf_counter()
    pump(wire.socket, large, LARGE_BATCHES, LARGE_WINDOW)
    megabytes = len(large) * LARGE_BATCHES / 1e6
    figures["large_produce_mb_per_s"] = round(megabytes / (time.perf_counter() - began))
    figures["large_produce_cpu_ms_per_mb"] = round((cpu_s(pid) - cpu_before) * 1e3 / megabytes, 3)
    wire.close()
    _client_run(bootstrap)
    settle()
    cpu_before, began = cpu_s(pid), time.perf_counter()
    _client_run(bootstrap)
    figures["client_records_per_s"] = round(RECORDS / (time.perf_counter() - began))
    figures["client_broker_cpu_s"] = round(cpu_s(pid) - cpu_before, 3)
    return figures


def _pumped(wire: Wire, pid: int, request: bytes, name: str) -> dict[str, float]:
    settle()
    cpu_before, began = cpu_s(pid), time.perf_counter()
    pump(wire.socket, request, REQUESTS, WINDOW)
    elapsed = time.perf_counter() - began
    return {
        f"{name}_per_s": round(REQUESTS / elapsed),
        f"{name}_cpu_us": round((cpu_s(pid) - cpu_before) / REQUESTS * 1e6, 1),
    }


def _client_run(bootstrap: str) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, "batch.size": 65536}
    )
    value = b"x" * RECORD_BYTES
    for _ in range(RECORDS):
        while True:
            try:
                producer.produce("client", value)
                break
            except BufferError:
                producer.poll(0.05)
    assert producer.flush(120) == 0
