"""What batching in the client is worth: librdkafka with batches of 64 KB and a linger of 5 ms, against none."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.process import MeasuredBroker, Wire, settle
from benchmarks.requests import create

BATCHED_RECORDS = 500_000
SINGLE_RECORDS = 30_000
RECORD_BYTES = 100
TARGET = 10.0


def run() -> dict[str, Any]:
    with MeasuredBroker() as broker:
        host, port = broker.address
        wire = Wire(broker.address)
        create(wire, "batching", 1)
        wire.close()
        bootstrap = f"{host}:{port}"
        single = {"batch.num.messages": 1, "linger.ms": 0}
        batched = {"batch.size": 65536, "linger.ms": 5}
        _rate(bootstrap, batched, 50_000)
        settle()
        unbatched_rate = _rate(bootstrap, single, SINGLE_RECORDS)
        settle()
        batched_rate = _rate(bootstrap, batched, BATCHED_RECORDS)
    ratio = batched_rate / unbatched_rate
    return {
        "unbatched_records_per_s": round(unbatched_rate),
        "batched_records_per_s": round(batched_rate),
        "ratio": round(ratio, 1),
        "target": TARGET,
        "met": ratio >= TARGET,
    }


def _rate(bootstrap: str, settings: dict[str, Any], count: int) -> float:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **settings})
    value = b"x" * RECORD_BYTES
    began = time.perf_counter()
    for _ in range(count):
        while True:
            try:
                producer.produce("batching", value)
                break
            except BufferError:
                producer.poll(0.01)
    assert producer.flush(120) == 0
    return count / (time.perf_counter() - began)
