"""What three copies cost: the same load with replication 3 and acks=all, and with replication 1, in one run.

Three broker processes and the producers share this machine, so the rates say little about a real cluster and the
ratio says what replication takes. The producers are librdkafka's, one process each, idempotent, with a linger.
Latency is what librdkafka measures from the call to the acknowledgement, at a steady rate well below the largest.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.failover import create

from benchmarks.process import cpu_s, resident_mb, settle

PRODUCERS = 2
PARTITIONS = 12
RECORDS = 2_000_000
RECORD_BYTES = 100
STEADY_RATE = 10_000
STEADY_S = 20.0
TICK_S = 0.001
RATE_TARGET = 500_000
P99_TARGET_MS = 10.0
FAST = {
    "enable.idempotence": True,
    "acks": "all",
    "linger.ms": 20,
    "batch.size": 262_144,
    "batch.num.messages": 20_000,
    "queue.buffering.max.messages": 400_000,
}


def run() -> dict[str, Any]:
    with Cluster(3) as cluster:
        create(cluster, "single", PARTITIONS, 1)
        create(cluster, "replicated", PARTITIONS, 3)
        figures = {}
        for topic in ("single", "replicated"):
            _flat_out(cluster, topic, RECORDS // 4)
            settle()
            figures[topic] = _flat_out(cluster, topic, RECORDS)
            cluster.wait_in_sync(topic)
            settle()
            figures[topic] |= _steady(cluster, topic)
            settle()
        resident = [round(resident_mb(node.pid)) for node in cluster.nodes.values()]
    replicated, single = figures["replicated"], figures["single"]
    return {
        "replication_1": single,
        "replication_3_acks_all": replicated,
        "rate_ratio": round(replicated["records_per_s"] / single["records_per_s"], 2),
        "cpu_ratio": round(
            replicated["brokers_cpu_ms_per_mb"] / max(single["brokers_cpu_ms_per_mb"], 0.001), 2
        ),
        "steady_rate": STEADY_RATE,
        "resident_mb": resident,
        "target_records_per_s": RATE_TARGET,
        "target_acknowledged_p99_ms": P99_TARGET_MS,
        "met": replicated["records_per_s"] >= RATE_TARGET
        and replicated["acknowledged_p99_ms"] <= P99_TARGET_MS,
    }


def _flat_out(cluster: Cluster, topic: str, records: int) -> dict[str, Any]:
    """As fast as the producers can, until everything is acknowledged."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for _ in range(PRODUCERS):
        ours, theirs = context.Pipe()
        child = context.Process(
            target=_produce, args=(theirs, cluster.bootstrap, topic, records // PRODUCERS)
        )
        child.start()
        pipes.append(ours)
        children.append(child)
    for pipe in pipes:
        assert pipe.recv() == "connected"
    cpu_before = _cpu_s(cluster)
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    failures = sum(pipe.recv() for pipe in pipes)
    elapsed = time.perf_counter() - began
    cpu = _cpu_s(cluster) - cpu_before
    for child in children:
        child.join()
    assert failures == 0, f"{failures} records were refused"
    megabytes = records * RECORD_BYTES / 1e6
    return {
        "records_per_s": round(records / elapsed),
        "mb_per_s": round(megabytes / elapsed, 1),
        "brokers_cpu_ms_per_mb": round(cpu * 1e3 / megabytes, 2),
        "brokers_cores_used": round(cpu / elapsed, 2),
    }


def _produce(pipe: Connection, bootstrap: str, topic: str, count: int) -> None:
    from confluent_kafka import Producer

    failures = 0

    def delivered(error: object, _: object) -> None:
        nonlocal failures
        failures += error is not None

    producer = Producer({"bootstrap.servers": bootstrap, **FAST})
    producer.list_topics(topic, timeout=30)
    # The producer id and the connections are not part of it.
    producer.produce(topic, b"first", on_delivery=delivered)
    producer.flush(30)
    pipe.send("connected")
    pipe.recv()
    value = b"x" * RECORD_BYTES
    produce = producer.produce
    for number in range(count):
        # A callback for each record would measure Python: one in a thousand is asked for.
        while True:
            try:
                if number % 1000:
                    produce(topic, value)
                else:
                    produce(topic, value, on_delivery=delivered)
                    producer.poll(0)
                break
            except BufferError:
                producer.poll(0.01)
    failures += producer.flush(120)
    pipe.send(failures)


def _steady(cluster: Cluster, topic: str) -> dict[str, Any]:
    """A steady rate of single records; how long each waits for its acknowledgement."""
    from confluent_kafka import Producer

    latencies: list[float] = []

    def delivered(error: object, message: Any) -> None:
        assert error is None, error
        latencies.append(message.latency())

    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "acks": "all", "linger.ms": 1}
    )
    value = b"x" * RECORD_BYTES
    producer.produce(topic, value)
    producer.flush(30)
    cpu_before = _cpu_s(cluster)
    began = time.perf_counter()
    sent = 0
    while (now := time.perf_counter()) < began + STEADY_S:
        while sent < (now - began) * STEADY_RATE:
            producer.produce(topic, value, on_delivery=delivered)
            sent += 1
        producer.poll(0)
        time.sleep(max(0.0, began + sent / STEADY_RATE + TICK_S - time.perf_counter()))
    cpu = _cpu_s(cluster) - cpu_before
    assert producer.flush(30) == 0
    # The first second finds everybody asleep.
    settled = latencies[STEADY_RATE:]
    cuts = statistics.quantiles(settled, n=1000)
    return {
        "steady_records_per_s": round(sent / STEADY_S),
        "acknowledged_p50_ms": round(cuts[499] * 1e3, 2),
        "acknowledged_p99_ms": round(cuts[989] * 1e3, 2),
        "acknowledged_p999_ms": round(cuts[998] * 1e3, 2),
        "steady_brokers_cores_used": round(cpu / STEADY_S, 2),
    }


def _cpu_s(cluster: Cluster) -> float:
    return sum(cpu_s(node.pid) for node in cluster.nodes.values())
