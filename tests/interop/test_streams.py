"""Kafka Streams with exactly_once_v2, with and without a state store: every input counts once, kills or not."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import java
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.application import (
    COMPACTING_SETTINGS,
    Application,
    everything,
    latest,
    wait_until_compacted,
)
from tests.interop.client import PATIENCE_S, Outgoing, Record
from tests.interop.transactions import ISOLATIONS, JVM, Isolation
from tests.interop.transactions_contract import PARTITIONS, ends
from tests.support import BrokerProcess, wait_until
from tests.tools import Missing, skip_or_fail

SOURCE = Path(__file__).parent / "java" / "StreamsApplication.java"
STORE = "counts"
WINDOW_MS = 60_000

Unique = Callable[[str], str]


class Streams:
    """A source, a target and the application between them."""

    def __init__(
        self, topology: str, bootstrap: str, reference: Any, unique: Unique, directory: Path
    ) -> None:
        self.source, self.target, self.application = unique("source"), unique("target"), unique(topology)
        self.state_directory = directory / "state"
        self.bootstrap, self._reference, self._log = bootstrap, reference, directory / "streams.log"
        for topic in (self.source, self.target):
            reference.create_topic(topic, PARTITIONS)
        class_path = java.classpath(
            f"org.apache.kafka:kafka-streams:{java.KAFKA_VERSION}", "org.slf4j:slf4j-nop:1.7.36"
        )
        try:
            classes = java.compiled(SOURCE, class_path)
        except Missing as missing:
            skip_or_fail(missing)
        # RocksDB unpacks a library, and a killed process does not remove it.
        scratch = f"-Djava.io.tmpdir={directory}"
        self._java = ["java", *JVM, scratch, "-cp", f"{classes}:{class_path}", "StreamsApplication", topology]

    def run(self, *, commit_interval_ms: int = 100, record_ms: int = 0) -> Application:
        words = [*self._java, self.bootstrap, self.application, self.source, self.target]
        words += [str(self.state_directory), str(commit_interval_ms), str(record_ms)]
        return Application(words, self._log, answers=True)

    def write(self, records: list[Outgoing]) -> None:
        self._reference.produce(self.source, records, idempotent=True)

    def ends(self, topic: str, isolation: Isolation) -> dict[int, int]:
        return ends(self._reference, topic, isolation)

    def committed(self) -> dict[int, int]:
        found: dict[int, int] = self._reference.committed(self.application, self.source, range(PARTITIONS))
        return found

    def wait_until_processed(self) -> None:
        ends = self.ends(self.source, "read_committed")
        wait_until(lambda: self.committed() == ends, 2 * PATIENCE_S, f"all of {ends} is processed")

        def is_settled() -> bool:
            stable, end = (self.ends(self.target, each) for each in ISOLATIONS)
            return stable == end

        # A process that was killed had another transactional id, so its transaction ends with its time.
        wait_until(is_settled, PATIENCE_S, f"no transaction is open in {self.target}")

    def kill_inside_a_transaction(self, running: Application, *, after: int) -> None:
        """Kill it when it has committed ``after`` inputs, while a transaction with outputs is open."""

        def is_inside() -> bool:
            stable, end = (sum(self.ends(self.target, each).values()) for each in ISOLATIONS)
            return stable < end and sum(self.committed().values()) >= after

        running.kill_when(is_inside, "another transaction")


class TestCopying:
    @pytest.fixture
    def copying(self, bootstrap: str, reference: Any, unique: Unique, tmp_path: Path) -> Streams:
        return Streams("copy", bootstrap, reference, unique, tmp_path)

    def test_every_input_has_one_output(self, copying: Streams) -> None:
        copying.write(numbered(0, 300))
        with copying.run() as streams:
            streams.expect("running")
            copying.write(numbered(300, 300))
            copying.wait_until_processed()
            streams.stop()

        assert_exactly_once(copying, 600)

    def test_every_input_has_one_output_after_a_kill_in_the_middle(self, copying: Streams) -> None:
        copying.write(numbered(0, 900))
        with copying.run(commit_interval_ms=500, record_ms=5) as streams:
            streams.expect("running")
            copying.kill_inside_a_transaction(streams, after=1)
        assert sum(copying.committed().values()) < 900
        copying.write(numbered(900, 300))

        with copying.run() as streams:
            streams.expect("running")
            copying.wait_until_processed()
            streams.stop()

        assert_exactly_once(copying, 1200)
        # The kill was in the middle of something: records of the dead process are there, aborted.
        assert len(everything(copying.bootstrap, copying.target, "read_uncommitted")) > 1200


class TestCounting:
    """In windows, with a store and its changelog."""

    KEYS, WINDOWS = 10, 3

    @pytest.fixture
    def counting(self, unique: Unique, tmp_path: Path) -> Iterator[Streams]:
        with BrokerProcess(COMPACTING_SETTINGS) as broker:
            reference = ConfluentClient(broker.bootstrap)
            yield Streams("count", broker.bootstrap, reference, unique, tmp_path)
            reference.close()

    def test_the_counts_come_back_from_the_compacted_changelog(self, counting: Streams) -> None:
        changelog = f"{counting.application}-{STORE}-changelog"
        before, after = self.records(0, 2500), self.records(2500, 300)
        counting.write(before)
        with counting.run(commit_interval_ms=300, record_ms=2) as streams:
            streams.expect("running")
            counting.kill_inside_a_transaction(streams, after=1000)
        done = sum(counting.committed().values())
        assert 1000 <= done < 2500
        # Also of the dead process, aborted.
        written = everything(counting.bootstrap, counting.target, "read_uncommitted")
        assert len(written) > len(everything(counting.bootstrap, counting.target))
        shutil.rmtree(counting.state_directory)
        wait_until_compacted(counting.bootstrap, changelog)
        windows = len(self.counts_in(counting, changelog))
        counting.write(after)

        with counting.run() as streams:
            streams.expect("running")
            counting.wait_until_processed()
            state = json.loads(streams.ask("state"))
            streams.stop()

        expected = Counter(map(self.window, before + after))
        assert len(expected) == self.KEYS * self.WINDOWS
        assert state["counts"] == expected
        # From the changelog, which had at least the last count of every window so far, and was compacted.
        assert 0 < windows <= state["restored"] < done // 2
        assert self.counts_in(counting, changelog) == expected
        self.assert_every_input_was_counted_once(counting, expected)

    def records(self, first: int, count: int) -> list[Outgoing]:
        """In each window all keys, in each minute all windows."""
        start_ms = (time.time_ns() // 1_000_000 // WINDOW_MS - 10) * WINDOW_MS
        return [
            Outgoing(
                b"%d" % number,
                key=b"%d" % (number % self.KEYS),
                timestamp=start_ms + number // self.KEYS % self.WINDOWS * WINDOW_MS + number % WINDOW_MS,
            )
            for number in range(first, first + count)
        ]

    @staticmethod
    def window(record: Outgoing) -> str:
        assert record.key is not None and record.timestamp is not None
        return f"{record.key.decode()}@{record.timestamp // WINDOW_MS * WINDOW_MS}"

    @staticmethod
    def counts_in(counting: Streams, changelog: str) -> dict[str, int]:
        """Its keys end with the window's start in 8 bytes and a number in 4."""
        counts = {}
        for key, value in latest(everything(counting.bootstrap, changelog)).items():
            assert key is not None
            counts[f"{key[:-12].decode()}@{int.from_bytes(key[-12:-4])}"] = int.from_bytes(value)
        return counts

    @staticmethod
    def assert_every_input_was_counted_once(counting: Streams, expected: Counter[str]) -> None:
        counted = defaultdict(list)
        for record in everything(counting.bootstrap, counting.target):
            assert record.key is not None and record.value is not None
            counted[record.key.decode()].append(int(record.value))
        assert counted == {window: list(range(1, count + 1)) for window, count in expected.items()}


def numbered(first: int, count: int) -> list[Outgoing]:
    """With keys, since Streams' output is then in the partition of its input."""
    return [Outgoing(b"%d" % number, key=b"%d" % number) for number in range(first, first + count)]


def assert_exactly_once(copying: Streams, count: int) -> None:
    inputs = by_partition(everything(copying.bootstrap, copying.source))
    outputs = by_partition(everything(copying.bootstrap, copying.target))
    assert sum(map(len, inputs.values())) == count
    assert outputs == {partition: [value + b"!" for value in values] for partition, values in inputs.items()}


def by_partition(records: list[Record]) -> dict[int, list[bytes]]:
    values = defaultdict(list)
    for record in records:
        assert record.value is not None
        values[record.partition].append(record.value)
    return values
