"""Throughput over TLS: librdkafka against Penstock and against Apache Kafka, and Penstock without TLS.

All brokers run during the whole measurement, with the same key and certificate, and take turns, so that whatever
else the machine does hits all of them. A round produces records with large batches and consumes them again. The
first round of each broker is not counted: a JVM has to warm up. Figures are medians of rates, ratios of them, and
CPU time of the broker per MB. PENSTOCK_BENCH_RECORDS is the number of records of a round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.apache_kafka import ApacheKafka
from benchmarks.process import MeasuredBroker, cpu_s, settle
from penstock.cli.certificates import DevelopmentAuthority

RECORDS = int(float(os.environ.get("PENSTOCK_BENCH_RECORDS", "5e5")))
RECORD_BYTES = 1_000
ROUNDS = 3
PARTITIONS = 4
RATIO_TARGET = 1.0
TIMEOUT_S = 300.0


@dataclass(slots=True)
class _Subject:
    bootstrap: str
    pid: int
    security: Mapping[str, str]
    produced: list[float] = field(default_factory=list)
    consumed: list[float] = field(default_factory=list)
    produce_cpu_ms: list[float] = field(default_factory=list)
    consume_cpu_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "produce_mb_per_s": round(statistics.median(self.produced), 1),
            "consume_mb_per_s": round(statistics.median(self.consumed), 1),
            "produce_cpu_ms_per_mb": round(statistics.median(self.produce_cpu_ms), 3),
            "consume_cpu_ms_per_mb": round(statistics.median(self.consume_cpu_ms), 3),
        }


def run() -> dict[str, Any]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-tls-")))
        authority = DevelopmentAuthority.create(directory, days=60)
        node = authority.issue_node("broker", ["127.0.0.1"], days=60)
        stores = {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(node.file),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authority.certificate_file),
        }
        tls = {"security.protocol": "ssl", "ssl.ca.location": str(authority.certificate_file)}
        ours = stack.enter_context(MeasuredBroker({"listeners": "SSL://127.0.0.1:0", **stores}))
        plain = stack.enter_context(MeasuredBroker())
        subjects = {
            "penstock": _Subject("{}:{}".format(*ours.address), ours.pid, tls),
            "penstock_plain": _Subject("{}:{}".format(*plain.address), plain.pid, {}),
        }
        skipped = None
        try:
            kafka = stack.enter_context(ApacheKafka(stores, protocol="SSL", heap="1g"))
            subjects["kafka"] = _Subject(kafka.bootstrap, kafka.pid, tls)
        except (OSError, RuntimeError) as error:
            skipped = f"Apache Kafka could not be started: {error}"
        for number in range(1 + ROUNDS):
            for subject in subjects.values():
                _round(subject, f"round-{number}", counts=number > 0)
    results: dict[str, Any] = {name: subject.figures() for name, subject in subjects.items()}
    for action in ("produce", "consume"):
        rate, cpu = f"{action}_mb_per_s", f"{action}_cpu_ms_per_mb"
        results[f"{action}_tls_to_plain"] = round(
            results["penstock"][rate] / results["penstock_plain"][rate], 2
        )
        if skipped is None:
            results[f"{action}_rate_ratio"] = round(results["penstock"][rate] / results["kafka"][rate], 2)
            results[f"{action}_cpu_ratio"] = round(results["penstock"][cpu] / results["kafka"][cpu], 2)
    if skipped is not None:
        return {"skipped": skipped, **results}
    ratios = [results[f"{action}_rate_ratio"] for action in ("produce", "consume")]
    return {**results, "ratio_target": RATIO_TARGET, "met": min(ratios) >= RATIO_TARGET}


def _round(subject: _Subject, topic: str, *, counts: bool) -> None:
    _create(subject, topic)
    megabytes = RECORDS * RECORD_BYTES / 1e6
    for action, rates, costs in (
        (_produce, subject.produced, subject.produce_cpu_ms),
        (_consume, subject.consumed, subject.consume_cpu_ms),
    ):
        settle()
        cpu_before = cpu_s(subject.pid)
        elapsed = action(subject, topic)
        if counts:
            rates.append(megabytes / elapsed)
            costs.append((cpu_s(subject.pid) - cpu_before) * 1e3 / megabytes)


def _settings(subject: _Subject) -> dict[str, Any]:
    return {"bootstrap.servers": subject.bootstrap, **subject.security}


def _create(subject: _Subject, topic: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient(_settings(subject))
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(TIMEOUT_S)


def _produce(subject: _Subject, topic: str) -> float:
    from confluent_kafka import Producer

    producer = Producer(
        {
            **_settings(subject),
            "enable.idempotence": True,
            "linger.ms": 5,
            "batch.size": 900_000,
            "queue.buffering.max.kbytes": 200_000,
        }
    )
    # Not compressed, and TLS does not compress either, so its content makes no difference.
    value = b"x" * RECORD_BYTES
    began = time.perf_counter()
    for number in range(RECORDS):
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.05)
    assert producer.flush(TIMEOUT_S) == 0
    return time.perf_counter() - began


def _consume(subject: _Subject, topic: str) -> float:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {
            **_settings(subject),
            "group.id": "bench",
            "enable.auto.commit": False,
            "queued.min.messages": 100_000,
        }
    )
    began = time.perf_counter()
    consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in range(PARTITIONS)])
    left = RECORDS
    while left:
        found = consumer.consume(min(left, 10_000), timeout=TIMEOUT_S)
        assert found and all(each.error() is None for each in found), "records are missing"
        left -= len(found)
    elapsed = time.perf_counter() - began
    consumer.close()
    return elapsed
