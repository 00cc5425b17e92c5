"""Kafka Streams with exactly_once_v2 and without a state store: every input has one output, also after a kill."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests import java
from tests.interop.client import PATIENCE_S, Outgoing
from tests.interop.transactions import ISOLATIONS, JVM, Clients, Isolation, Seen, in_order
from tests.interop.transactions_contract import PARTITIONS, ends
from tests.support import wait_until
from tests.tools import Missing, skip_or_fail

SOURCE = Path(__file__).parent / "java" / "StreamsCopy.java"

Unique = Callable[[str], str]


class StreamsProcess:
    def __init__(self, words: list[str], log: Path) -> None:
        self._words, self._log = words, log

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        alarm = threading.Timer(2 * PATIENCE_S, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        if line != "running\n":
            self.kill()
            raise AssertionError(f"Kafka Streams did not start:\n{self._log.read_text()[-4000:]}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.kill()

    def stop(self) -> None:
        """A clean end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0, self._log.read_text()[-4000:]
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Copying:
    """A source, a target and the application between them."""

    def __init__(self, bootstrap: str, reference: Any, unique: Unique, directory: Path) -> None:
        self.source, self.target, self.application = unique("source"), unique("target"), unique("copy")
        self._bootstrap, self._reference, self._directory = bootstrap, reference, directory
        self._written = 0
        for topic in (self.source, self.target):
            reference.create_topic(topic, PARTITIONS)
        class_path = java.classpath(
            f"org.apache.kafka:kafka-streams:{java.KAFKA_VERSION}", "org.slf4j:slf4j-nop:1.7.36"
        )
        try:
            classes = java.compiled(SOURCE, class_path)
        except Missing as missing:
            skip_or_fail(missing)
        self._java = ["java", *JVM, "-cp", f"{classes}:{class_path}", "StreamsCopy"]

    def streams(self, *, commit_interval_ms: int = 100, record_ms: int = 0) -> StreamsProcess:
        words = [*self._java, self._bootstrap, self.application, self.source, self.target]
        words += [str(self._directory / "state"), str(commit_interval_ms), str(record_ms)]
        return StreamsProcess(words, self._directory / "streams.log")

    def write(self, count: int) -> None:
        # With keys, since Streams' output is then in the partition of its input.
        records = [
            Outgoing(b"%d" % number, key=b"%d" % number)
            for number in range(self._written, self._written + count)
        ]
        self._reference.produce(self.source, records, idempotent=True)
        self._written += count

    def ends(self, topic: str, isolation: Isolation) -> dict[int, int]:
        return ends(self._reference, topic, isolation)

    def read(self, clients: Clients, topic: str, count: int, isolation: Isolation) -> list[Seen]:
        return clients["librdkafka"].read(topic, isolation, count, self.ends(topic, isolation)).records

    def committed(self) -> dict[int, int]:
        found: dict[int, int] = self._reference.committed(self.application, self.source, range(PARTITIONS))
        return found

    def wait_until_copied(self) -> None:
        ends = self.ends(self.source, "read_committed")
        wait_until(lambda: self.committed() == ends, 2 * PATIENCE_S, f"all of {ends} is copied")

    def assert_exactly_once(self, clients: Clients) -> None:
        inputs = in_order(self.read(clients, self.source, self._written, "read_committed"))
        outputs = in_order(self.read(clients, self.target, self._written, "read_committed"))
        assert len(inputs) == self._written
        expected = [(each.partition, each.value + b"!") for each in inputs]
        assert [(each.partition, each.value) for each in outputs] == expected


@pytest.fixture(scope="module")
def clients(bootstrap: str) -> Iterator[Clients]:
    clients = Clients(bootstrap)
    yield clients
    clients.close()


@pytest.fixture
def copying(bootstrap: str, reference: Any, unique: Unique, tmp_path: Path) -> Copying:
    return Copying(bootstrap, reference, unique, tmp_path)


def test_every_input_has_one_output(copying: Copying, clients: Clients) -> None:
    copying.write(300)
    with copying.streams() as streams:
        copying.write(300)
        copying.wait_until_copied()
        streams.stop()

    copying.assert_exactly_once(clients)


def test_every_input_has_one_output_after_a_kill_in_the_middle(copying: Copying, clients: Clients) -> None:
    copying.write(900)
    with copying.streams(commit_interval_ms=500, record_ms=5) as streams:

        def is_inside() -> bool:
            """Something was committed, and a transaction is open behind it."""
            stable, end = (sum(copying.ends(copying.target, each).values()) for each in ISOLATIONS)
            return 0 < stable < end

        def is_paused_inside() -> bool:
            """It may have been about to commit, so it is asked again when it can do nothing any more."""
            if not is_inside():
                return False
            streams.process.send_signal(signal.SIGSTOP)
            if is_inside():
                return True
            streams.process.send_signal(signal.SIGCONT)
            return False

        wait_until(is_paused_inside, PATIENCE_S, "a second transaction")
        streams.kill()
    assert sum(copying.committed().values()) < 900
    copying.write(300)

    with copying.streams() as streams:
        copying.wait_until_copied()
        streams.stop()

    copying.assert_exactly_once(clients)
    # The kill was in the middle of something: records of the dead process are there, aborted.
    ends = copying.ends(copying.target, "read_uncommitted")
    everything = copying.read(clients, copying.target, 1200, "read_uncommitted")
    assert len(everything) > 1200, ends
