"""What cleaning costs beside Apache Kafka: CPU seconds per GB of dirty log, the same records in the same run.

Each broker gets the same topics, of one codec each, and is then told to clean them while nobody uses it. Of
Penstock, the cleaner is the process that cleans, and what the broker needs to verify and swap is counted beside it.
Of Kafka, the cleaner is its thread, and what the JVM needs to compile and to collect garbage is counted beside it.
A first topic, which is not counted, warms Kafka up. After it was cleaned, each topic is read and compared.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.tools import Missing

from benchmarks.apache_kafka import ApacheKafka
from benchmarks.cleaners import (
    SETTINGS,
    Cleaner,
    KafkaCleaner,
    PenstockCleaner,
    closed_bytes,
    create,
    release,
    wait_until_cleaned,
)
from benchmarks.keyed_data import KEYS, RECORDS, KeyedData
from benchmarks.process import MeasuredBroker, settle
from penstock.protocol.compression import Codec

CODECS = (Codec.NONE, Codec.LZ4, Codec.ZSTD)


def run() -> dict[str, Any]:
    data = KeyedData()
    result: dict[str, Any] = {"keys": KEYS, "records": RECORDS}
    with MeasuredBroker(SETTINGS) as broker, PenstockCleaner(broker.pid, broker.data_dir) as cleaner:
        host, port = broker.address
        ours = result["penstock"] = _measured(f"{host}:{port}", broker.data_dir, cleaner, data)
        ours["cleaner_peak_mb"] = round(cleaner.peak_mb)
    with ExitStack() as stack:
        try:
            kafka = stack.enter_context(ApacheKafka(SETTINGS, heap="1g"))
        except (OSError, RuntimeError, Missing) as error:
            return {**result, "skipped": f"Apache Kafka could not be started: {error}"}
        kafka_data = kafka.directory / "data"
        theirs = _measured(kafka.bootstrap, kafka_data, KafkaCleaner(kafka.pid, kafka_data), data)
    result["kafka"] = theirs
    for part in ("cleaner", "all"):
        result[f"{part}_cpu_ratio"] = {
            codec.name.lower(): round(
                ours[codec.name.lower()][f"{part}_cpu_s_per_gb"]
                / theirs[codec.name.lower()][f"{part}_cpu_s_per_gb"],
                2,
            )
            for codec in CODECS
        }
    return result


def _measured(bootstrap: str, data_dir: Path, cleaner: Cleaner, data: KeyedData) -> dict[str, Any]:
    figures = {}
    for number, codec in enumerate((Codec.NONE, *CODECS)):
        topic = f"{'keyed' if number else 'warm-up'}-{codec.name.lower()}"
        create(bootstrap, topic, data.partitions, data.segment_bytes)
        data.fill(bootstrap, topic, codec)
        figure = _cleaned(bootstrap, data_dir, cleaner, topic, data.partitions)
        found = data.check(bootstrap, topic)
        if number:
            figures[codec.name.lower()] = {**figure, "records_left": found.records}
    return figures


def _cleaned(
    bootstrap: str, data_dir: Path, cleaner: Cleaner, topic: str, partitions: int
) -> dict[str, float]:
    settle()
    dirty = closed_bytes(data_dir, topic, partitions)
    cleaner_before, broker_before = cleaner.cleaner_cpu_s(), cleaner.broker_cpu_s()
    began = time.perf_counter()
    release(bootstrap, topic)
    wait_until_cleaned(cleaner, data_dir, topic, partitions)
    elapsed = time.perf_counter() - began
    # The last segments are swapped, and what they replace is removed.
    settle()
    cleaner_s = cleaner.cleaner_cpu_s() - cleaner_before
    broker_s = cleaner.broker_cpu_s() - broker_before
    return {
        "dirty_mb": round(dirty / 1e6),
        "left_mb": round(closed_bytes(data_dir, topic, partitions) / 1e6),
        "seconds": round(elapsed, 1),
        "cleaner_cpu_s_per_gb": round(cleaner_s / dirty * 1e9, 2),
        "broker_cpu_s_per_gb": round(broker_s / dirty * 1e9, 2),
        "all_cpu_s_per_gb": round((cleaner_s + broker_s) / dirty * 1e9, 2),
    }
