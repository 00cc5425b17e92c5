"""What transactions cost, on Penstock and on Apache Kafka in one run, with a client of each generation.

librdkafka speaks the classic one, Kafka's Java client transactions v2. Four loads: transactions of one record; of
ten records in ten partitions (both from several producers at once, as fast as commits are answered); as many
records as go into transactions of 100 ms; and consume-transform-produce with a commit every 100 ms, exactly once
against at least once. The last is held to a target: at most 20 % slower. Each load is a process of its own, started
anew and warmed up; CPU is the broker's, of all its threads.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic
from tests import java
from tests.tools import Missing

from benchmarks.apache_kafka import ApacheKafka
from benchmarks.process import MeasuredBroker, cpu_s, settle

SOURCE = Path(__file__).parent / "java" / "TransactionLoad.java"
CLIENTS = (f"org.apache.kafka:kafka-clients:{java.CLIENTS_VERSIONS[0]}", "org.slf4j:slf4j-nop:1.7.36")
JVM = ("-Xmx384m", "-XX:+UseSerialGC")
PARTITIONS = 10
INPUT_PARTITIONS = 4
PRODUCERS = 8
# Kafka's brokers are compiled while they run.
WARM_UP_S = float(os.environ.get("PENSTOCK_BENCH_WARM_UP_SECONDS") or 10)
SECONDS = float(os.environ.get("PENSTOCK_BENCH_SECONDS") or 10)
RECORDS = int(float(os.environ.get("PENSTOCK_BENCH_RECORDS") or 1_000_000))
RECORD_BYTES = 100
ROUNDS = 3
SLOWDOWN_TARGET = 0.2
_names = itertools.count(1)


def run() -> dict[str, Any]:
    programs: dict[str, Sequence[str]] = {"classic": [sys.executable, "-m", "benchmarks.transaction_load"]}
    results: dict[str, Any] = {}
    try:
        class_path = os.pathsep.join(map(str, java.jars(*CLIENTS)))
        classes = java.compiled(SOURCE, class_path)
        programs["v2"] = ["java", *JVM, "-cp", f"{classes}{os.pathsep}{class_path}", "TransactionLoad"]
    except Missing as error:
        results["skipped_v2"] = str(error)
    with MeasuredBroker() as broker:
        host, port = broker.address
        ours = results["penstock"] = _measured(f"{host}:{port}", broker.pid, programs)
    with ExitStack() as stack:
        try:
            kafka = stack.enter_context(ApacheKafka(heap="768m"))
        except (OSError, RuntimeError, Missing) as error:
            results["skipped_kafka"] = f"Apache Kafka could not be started: {error}"
        else:
            theirs = results["kafka"] = _measured(kafka.bootstrap, kafka.pid, programs)
            results["rate_ratios"] = _ratios(ours, theirs, "per_s")
            results["cpu_ratios"] = _ratios(ours, theirs, "cpu_us")
    slowdowns = {name: figures["exactly_once_slower_by"] for name, figures in ours.items()}
    results["target_slower_by"] = SLOWDOWN_TARGET
    results["met"] = all(each <= SLOWDOWN_TARGET for each in slowdowns.values())
    return results


def _ratios(ours: dict[str, Any], theirs: dict[str, Any], ending: str) -> dict[str, float]:
    return {
        f"{program} {name.removesuffix(ending).rstrip('_')}": round(figure / theirs[program][name], 2)
        for program, figures in ours.items()
        for name, figure in figures.items()
        if name.endswith(ending) and theirs[program][name]
    }


def _measured(bootstrap: str, pid: int, programs: dict[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    _create(bootstrap, "loaded", PARTITIONS)
    _create(bootstrap, "inputs", INPUT_PARTITIONS)
    _create(bootstrap, "outputs", INPUT_PARTITIONS)
    _fill(bootstrap)
    figures: dict[str, dict[str, float]] = {}
    for name, program in programs.items():
        figures[name] = _small(program, bootstrap, pid) | _large(program, bootstrap, pid)
        figures[name] |= _transformed(program, bootstrap, pid)
    return figures


def _small(program: Sequence[str], bootstrap: str, pid: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, partitions in (("one_record", 1), ("ten_partitions", PARTITIONS)):
        rate, cpu = _loaded(program, bootstrap, pid, load="small", producers=PRODUCERS, partitions=partitions)
        figures[f"{name}_transactions_per_s"] = round(rate)
        figures[f"{name}_transaction_cpu_us"] = round(cpu * 1e6, 1)
    return figures


def _large(program: Sequence[str], bootstrap: str, pid: int) -> dict[str, float]:
    rate, cpu = _loaded(program, bootstrap, pid, load="large", producers=1)
    return {"records_in_100_ms_per_s": round(rate), "record_in_100_ms_cpu_us": round(cpu * 1e6, 3)}


def _transformed(program: Sequence[str], bootstrap: str, pid: int) -> dict[str, float]:
    """The two take turns; the first of each is the warm-up."""
    rates: dict[str, list[float]] = {"once": [], "at least once": []}
    cpus: dict[str, list[float]] = {"once": [], "at least once": []}
    for turn in range(ROUNDS + 1):
        for exactly in sorted(rates, reverse=bool(turn % 2)):
            rate, cpu = _loaded(
                program,
                bootstrap,
                pid,
                load="transform",
                exactly=exactly,
                topic="inputs",
                output="outputs",
                partitions=INPUT_PARTITIONS,
                records=RECORDS if turn else RECORDS // 4,
            )
            if turn:
                rates[exactly].append(rate)
                cpus[exactly].append(cpu)
    ratios = [once / other for once, other in zip(rates["once"], rates["at least once"], strict=True)]
    return {
        "exactly_once_records_per_s": round(statistics.median(rates["once"])),
        "at_least_once_records_per_s": round(statistics.median(rates["at least once"])),
        "exactly_once_record_cpu_us": round(statistics.median(cpus["once"]) * 1e6, 3),
        "at_least_once_record_cpu_us": round(statistics.median(cpus["at least once"]) * 1e6, 3),
        "exactly_once_slower_by": round(1 - statistics.median(ratios), 3),
    }


def _loaded(program: Sequence[str], bootstrap: str, pid: int, **given: object) -> tuple[float, float]:
    """Run a load; how many a second, and the broker's CPU seconds for each."""
    words = {
        "bootstrap": bootstrap,
        "name": f"bench-{next(_names)}",
        "topic": "loaded",
        "warm_up_s": WARM_UP_S,
        "seconds": SECONDS,
        **given,
    }
    settle()
    process = subprocess.Popen(
        [*program, *(f"{name}={value}" for name, value in words.items())], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "begun\n", f"{given} did not begin: {line!r}"
        before = cpu_s(pid)
        line = process.stdout.readline()
        cpu = cpu_s(pid) - before
        assert line.startswith("done "), f"{given} did not end: {line!r}"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    _, count, seconds = line.split()
    return int(count) / float(seconds), cpu / int(count)


def _create(bootstrap: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(60)


def _fill(bootstrap: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 20})
    value = b"x" * RECORD_BYTES
    for number in range(RECORDS):
        while True:
            try:
                producer.produce("inputs", value, partition=number * INPUT_PARTITIONS // RECORDS)
                break
            except BufferError:
                producer.poll(0.01)
    assert producer.flush(120) == 0
