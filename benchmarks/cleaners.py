"""The cleaners of Penstock and of Apache Kafka, as the benchmarks see them: whether they are done, and their CPU.

Penstock cleans in a process of its own, and its broker verifies the outcome; Kafka cleans in a thread.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from tests.chaos.compaction.replicas import state_in
from tests.support import job_process_of, wait_until

from benchmarks.process import cpu_s

# Nothing is cleaned until it is asked for.
HELD_MS = 7 * 24 * 3600 * 1000
DONE_S = 3600.0
SAMPLE_S = 0.02
SETTINGS = {"log.cleaner.backoff.ms": "200"}
# What the kernel keeps of "kafka-log-cleaner-thread-0".
KAFKA_THREAD = "kafka-log-clean"


class Cleaner(Protocol):
    def first_dirty_offset(self, topic: str, partition: int) -> int: ...

    def cleaner_cpu_s(self) -> float:
        """What the cleaner itself has used so far."""

    def broker_cpu_s(self) -> float:
        """What the rest of the broker has used so far."""


class PenstockCleaner:
    """Samples the process that cleans, as it may end before it is asked."""

    def __init__(self, pid: int, data_dir: Path) -> None:
        self._pid = pid
        self._data_dir = data_dir
        self._ended = threading.Event()
        self._cpu_s: dict[int, float] = {}
        # The most that it had resident.
        self.peak_mb = 0.0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PenstockCleaner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def first_dirty_offset(self, topic: str, partition: int) -> int:
        return state_in(self._data_dir / f"{topic}-{partition}").first_dirty_offset

    def cleaner_cpu_s(self) -> float:
        self._look()
        return sum(self._cpu_s.values())

    def broker_cpu_s(self) -> float:
        return cpu_s(self._pid)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            pid = job_process_of(self._pid)
            if pid is not None:
                self._cpu_s[pid] = cpu_s(pid)
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peak = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
                self.peak_mb = max(self.peak_mb, peak)


class KafkaCleaner:
    def __init__(self, pid: int, data_dir: Path) -> None:
        self._pid = pid
        self._data_dir = data_dir

    def first_dirty_offset(self, topic: str, partition: int) -> int:
        checkpoint = self._data_dir / "cleaner-offset-checkpoint"
        if checkpoint.exists():
            for line in checkpoint.read_text().splitlines()[2:]:
                words = line.split()
                if words[:2] == [topic, str(partition)]:
                    return int(words[2])
        return 0

    def cleaner_cpu_s(self) -> float:
        total = 0
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with suppress(FileNotFoundError):
                if (task / "comm").read_text().strip() == KAFKA_THREAD:
                    total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def broker_cpu_s(self) -> float:
        return cpu_s(self._pid) - self.cleaner_cpu_s()


def create(bootstrap: str, topic: str, partitions: int, segment_bytes: int) -> None:
    """A compacted topic that is not cleaned yet."""
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": str(segment_bytes),
        "min.cleanable.dirty.ratio": "0.1",
        "min.compaction.lag.ms": str(HELD_MS),
    }
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(60)


def release(bootstrap: str, topic: str) -> None:
    """Have a topic cleaned from now on."""
    entry = ConfigEntry("min.compaction.lag.ms", "0", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(60)


def closed_segments(data_dir: Path, topic: str, partition: int) -> tuple[int, int]:
    """The bytes before the active segment, and where that begins."""
    paths = sorted((data_dir / f"{topic}-{partition}").glob("*.log"))
    return sum(path.stat().st_size for path in paths[:-1]), int(paths[-1].stem)


def closed_bytes(data_dir: Path, topic: str, partitions: int) -> int:
    return sum(closed_segments(data_dir, topic, partition)[0] for partition in range(partitions))


def wait_until_cleaned(cleaner: Cleaner, data_dir: Path, topic: str, partitions: int) -> None:
    """Until everything before the active segments is cleaned. The topic must not be written to meanwhile."""
    ends = {partition: closed_segments(data_dir, topic, partition)[1] for partition in range(partitions)}
    wait_until(
        lambda: all(cleaner.first_dirty_offset(topic, partition) >= end for partition, end in ends.items()),
        DONE_S,
        f"{topic} is cleaned",
    )
