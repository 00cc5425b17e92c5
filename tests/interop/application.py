"""Applications that keep their state in topics: started as processes, killed, and started again.

State that lives in a compacted topic is checked in three ways: what the application says it has, what is in the
topic (``everything``, ``latest``), and that the cleaner has been there (``wait_until_compacted``). An application
that comes back from a log that nobody cleaned proves little.
"""

# confluent_kafka is typed, but does not say which names it exports.
# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from tests.interop.adapters.confluent import record_of
from tests.interop.client import PATIENCE_S, Record
from tests.interop.transactions import Isolation
from tests.support import wait_until
from tests.tools import ROOT

# A broker that compacts what an application has written a moment ago, in segments that a test fills.
COMPACTING_SETTINGS = {
    "log.segment.bytes": "1024",
    "log.cleaner.backoff.ms": "100",
    "log.cleaner.min.cleanable.ratio": "0.01",
    "log.cleaner.delete.retention.ms": "100",
    "group.initial.rebalance.delay.ms": "0",
    # Fewer partitions to create and load.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}
TAIL_CHARACTERS = 6000


class Application:
    """A process that is killed at the end of its context, if not before. What it says goes to a log.

    With ``answers`` its standard output is for ``expect`` and ``ask``.
    """

    def __init__(self, words: Sequence[str | Path], log: Path, *, answers: bool = False) -> None:
        self._words, self._log = [str(word) for word in words], log
        self._answers = answers

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            # A group of its own, because some start processes themselves.
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._answers else log,
                stderr=log,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-TAIL_CHARACTERS:]

    def expect(self, line: str) -> None:
        """Wait for it to say this."""
        said = self._line()
        assert said == line, f"{said!r} instead of {line!r}:\n{self.log_tail()}"

    def ask(self, question: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        answer = self._line()
        assert answer, f"no answer to {question!r}:\n{self.log_tail()}"
        return answer

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def kill_when(self, condition: Callable[[], bool], message: str) -> None:
        """Kill it while the condition holds."""

        def holds() -> bool:
            assert self.is_running, self.log_tail()
            if not condition():
                return False
            # It may be about to end that, so it is asked again when it can do nothing any more.
            self.pause()
            if condition():
                return True
            self.resume()
            return False

        wait_until(holds, 2 * PATIENCE_S, message)
        self.kill()

    def stop(self) -> None:
        """Close its standard input and hold it to a clean end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE_S) == 0, self.log_tail()

    def _line(self) -> str:
        assert self._process.stdout is not None
        # Reading a pipe has no timeout of its own; the end of the process ends it.
        alarm = threading.Timer(2 * PATIENCE_S, self._process.kill)
        alarm.start()
        try:
            return self._process.stdout.readline().removesuffix("\n")
        finally:
            alarm.cancel()


def everything(bootstrap: str, topic: str, isolation: Isolation = "read_committed") -> list[Record]:
    """All records of a topic, whatever gaps there are between them, up to its end."""
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": "unused",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": isolation,
    }
    consumer = Consumer(settings)
    try:
        indexes = consumer.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in indexes])
        received, unfinished = [], set(indexes)
        while unfinished:
            message = consumer.poll(PATIENCE_S)
            assert message is not None, f"no end of partitions {unfinished} of {topic}"
            error = message.error()
            if error is None:
                received.append(record_of(message))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                unfinished.discard(message.partition())
        return received
    finally:
        consumer.close()


def latest(records: Iterable[Record]) -> Mapping[bytes | None, bytes]:
    """What a reader of a compacted topic ends with: the last value of each key that is not deleted."""
    values: dict[bytes | None, bytes] = {}
    for record in records:
        if record.value is None:
            values.pop(record.key, None)
        else:
            values[record.key] = record.value
    return values


def wait_until_compacted(bootstrap: str, topic: str) -> None:
    """Wait until a record is at less than a third of a topic's offsets.

    Without compaction it is at every second at least, where each record has a transaction, and that a marker.
    """

    def is_compacted() -> bool:
        records = everything(bootstrap, topic, "read_uncommitted")
        ends: dict[int, int] = {}
        for record in records:
            ends[record.partition] = max(ends.get(record.partition, 0), record.offset + 1)
        return 3 * len(records) < sum(ends.values())

    wait_until(is_compacted, PATIENCE_S, f"{topic} is compacted")
