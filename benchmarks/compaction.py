"""A large topic is compacted under load: the cleaner's memory and time, and what producers and a reader notice.

One broker. A producer writes to a second compacted topic at a steady rate all the time, and a reader goes through
the large topic again and again. The large topic is not cleaned at first, then until it is clean, then not again.
Producers must wait at most twice as long in the middle (p99) as in the two quiet parts together: what a disk still
has to write makes the first of them slower, some of the time. Afterwards every record is read and compared, and
Kafka's dump tool reads every file.

Small unless told otherwise; the size that is reported is PENSTOCK_BENCH_KEYS=2e6 PENSTOCK_BENCH_RECORDS=2e7.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.dump_tool import COMPLAINTS, dump_lines
from tests.tools import Missing

from benchmarks.cleaners import (
    SETTINGS,
    PenstockCleaner,
    closed_bytes,
    create,
    release,
    wait_until_cleaned,
)
from benchmarks.keyed_data import KEYS, PARTITIONS, RECORDS, KeyedData, number_in
from benchmarks.process import MeasuredBroker, settle

QUIET_S = float(os.environ.get("PENSTOCK_BENCH_SECONDS") or 20)
WARM_UP_S = 3.0
STEADY_RATE = 5_000
STEADY_KEYS = 10_000
RECORD_BYTES = 100
TICK_S = 0.001
READ_RATE = 50_000
P99_TARGET = 2.0
FILES_PER_DUMP = 50
LARGE, LIVE = "large", "live"


def run() -> dict[str, Any]:
    data = KeyedData()
    with MeasuredBroker(SETTINGS) as broker, PenstockCleaner(broker.pid, broker.data_dir) as cleaner:
        bootstrap = "{}:{}".format(*broker.address)
        create(bootstrap, LARGE, data.partitions, data.segment_bytes)
        create(bootstrap, LIVE, 1, data.segment_bytes)
        # The live topic is cleaned all the time.
        release(bootstrap, LIVE)
        began = time.perf_counter()
        data.fill(bootstrap, LARGE)
        fill_s = time.perf_counter() - began
        settle()
        dirty = closed_bytes(broker.data_dir, LARGE, data.partitions)
        load, reader = _Child(_produce, bootstrap), _Child(_read, bootstrap)
        time.sleep(WARM_UP_S)
        quiet_began, broker_before = time.monotonic(), cleaner.broker_cpu_s()
        time.sleep(QUIET_S / 2)
        quiet_broker_s = cleaner.broker_cpu_s() - broker_before
        cleaner_before, broker_before = cleaner.cleaner_cpu_s(), cleaner.broker_cpu_s()
        released = time.monotonic()
        release(bootstrap, LARGE)
        wait_until_cleaned(cleaner, broker.data_dir, LARGE, data.partitions)
        cleaned = time.monotonic()
        cleaner_s = cleaner.cleaner_cpu_s() - cleaner_before
        broker_s = cleaner.broker_cpu_s() - broker_before
        time.sleep(QUIET_S / 2)
        ended = time.monotonic()
        latencies: list[tuple[float, float]] = load.result()
        records_read, passes = reader.result()
        quiet = _cuts(latencies, (quiet_began, released), (cleaned, ended))
        cleaning = _cuts(latencies, (released, cleaned))
        left = closed_bytes(broker.data_dir, LARGE, data.partitions)
        found = data.check(bootstrap, LARGE)
        broker.stop()
        dumped = _dumped(broker.data_dir)
    ratio = cleaning["p99_ms"] / quiet["p99_ms"]
    return {
        "keys": KEYS,
        "records": RECORDS,
        "filled_in_s": round(fill_s, 1),
        "dirty_mb": round(dirty / 1e6),
        "left_mb": round(left / 1e6),
        "records_left": found.records,
        "cleaned_in_s": round(cleaned - released, 1),
        "cleaner_peak_mb": round(cleaner.peak_mb),
        "cleaner_cpu_s_per_gb": round(cleaner_s / dirty * 1e9, 2),
        "broker_cores_quiet": round(quiet_broker_s / (released - quiet_began), 3),
        "broker_cores_while_cleaning": round(broker_s / (cleaned - released), 3),
        "acknowledged_quiet": quiet,
        "acknowledged_while_cleaning": cleaning,
        "p99_ratio": round(ratio, 2),
        "target_p99_ratio": P99_TARGET,
        "records_read_throughout": records_read,
        "passes_of_the_reader": passes,
        **dumped,
        "met": ratio <= P99_TARGET and not dumped.get("dump_complaints"),
    }


class _Child:
    """A load in a process of its own, from now until its result is asked for."""

    def __init__(self, work: Any, bootstrap: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, bootstrap), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "begun"

    def result(self) -> Any:
        """Raises EOFError when it has failed: it says why itself."""
        self._pipe.send("stop")
        result = self._pipe.recv()
        self._process.join()
        return result


def _produce(pipe: Connection, bootstrap: str) -> None:
    """Single records at a steady rate: when each was acknowledged, and how long that took."""
    from confluent_kafka import Producer

    latencies: list[tuple[float, float]] = []

    def delivered(error: object, message: Any) -> None:
        assert error is None, error
        latencies.append((time.monotonic(), message.latency()))

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 1,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    value = b"x" * RECORD_BYTES
    producer.produce(LIVE, value, b"first")
    assert producer.flush(30) == 0
    pipe.send("begun")
    began = time.perf_counter()
    sent = 0
    while not pipe.poll():
        now = time.perf_counter()
        while sent < (now - began) * STEADY_RATE:
            producer.produce(LIVE, value, b"%d" % (sent % STEADY_KEYS), on_delivery=delivered)
            sent += 1
        producer.poll(0)
        time.sleep(max(0.0, began + sent / STEADY_RATE + TICK_S - time.perf_counter()))
    assert producer.flush(30) == 0
    pipe.send(latencies)


def _read(pipe: Connection, bootstrap: str) -> None:
    """The large topic from the start to the end, again and again: no error, and each record as it was written."""
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "reader",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "check.crcs": True,
    }
    records = passes = 0
    pipe.send("begun")
    began = time.perf_counter()
    while not pipe.poll():
        consumer = Consumer(settings)
        consumer.assign([TopicPartition(LARGE, partition, 0) for partition in range(PARTITIONS)])
        last = dict.fromkeys(range(PARTITIONS), -1)
        ended: set[int] = set()
        while len(ended) < PARTITIONS and not pipe.poll():
            message: Any
            for message in consumer.consume(1000, timeout=0.5):
                error = message.error()
                if error is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    ended.add(message.partition())
                    continue
                offset, value = message.offset(), message.value()
                assert offset > last[message.partition()], "offsets do not ascend"
                assert value is None or number_in(value) == offset, f"at {offset} there is {value!r}"
                last[message.partition()] = offset
                records += 1
            time.sleep(max(0.0, began + records / READ_RATE - time.perf_counter()))
        passes += len(ended) == PARTITIONS
        consumer.close()
    pipe.send((records, passes))


def _cuts(latencies: Sequence[tuple[float, float]], *parts: tuple[float, float]) -> dict[str, float]:
    within = [latency for at, latency in latencies if any(since <= at < until for since, until in parts)]
    cuts = statistics.quantiles(within, n=1000)
    return {
        "records": len(within),
        "p50_ms": round(cuts[499] * 1e3, 2),
        "p99_ms": round(cuts[989] * 1e3, 2),
        "p999_ms": round(cuts[998] * 1e3, 2),
        "max_ms": round(max(within) * 1e3, 1),
    }


def _dumped(data_dir: Path) -> dict[str, Any]:
    """Have Kafka's tool read every file of both topics; what it saw, and what it complained about."""
    seen = {"files": 0, "batches": 0}
    complaints: list[str] = []
    try:
        for topic in (LARGE, LIVE):
            for ending, options in (("log", ()), ("index", ("--index-sanity-check",)), ("snapshot", ())):
                files = sorted(data_dir.glob(f"{topic}-*/*{ending}"))
                for first in range(0, len(files), FILES_PER_DUMP):
                    for line in dump_lines(files[first : first + FILES_PER_DUMP], *options):
                        seen["batches"] += line.startswith("baseOffset: ")
                        if any(complaint in line for complaint in COMPLAINTS):
                            complaints.append(line)
                seen["files"] += len(files)
    except Missing as error:
        return {"dump_skipped": str(error)}
    return {"dumped": seen, "dump_complaints": complaints[:5]}
