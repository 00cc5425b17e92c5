"""Transactions as a client library does them: one vocabulary over eight libraries, and what must then be read.

Every library runs behind a program of its own (``python/``, ``java/``, ``go/``, ``js/``) that speaks the line
protocol of ``adapters/program.py``. As there, a program does nothing clever: it calls what the library's manual
says to call, once.

``Ledger`` is the dumb model of a topic: what was written where, and in which transaction. A reader must return
exactly what the ledger says, offsets included: a marker takes one offset of each partition of its transaction.
"""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import pytest
from _pytest.mark import ParameterSet

from tests import java
from tests.interop.adapters.program import ProgramClient
from tests.interop.client import Written
from tests.tools import ROOT, Missing, go_program, node_modules, program, skip_or_fail

Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
ISOLATIONS: tuple[Isolation, Isolation] = ("read_committed", "read_uncommitted")

HERE = Path(__file__).parent
BESIDES = ("com.fasterxml.jackson.core:jackson-databind:2.18.2", "org.slf4j:slf4j-nop:1.7.36")
# C1 only: the JVM lives for seconds, on a machine that also runs the broker.
JVM = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
# Long enough that no transaction of a test ends by itself.
TIMEOUT_MS = 300_000
# What a transformation appends to each value.
MARK = b"!"


class Sent(NamedTuple):
    partition: int
    value: bytes


class Seen(NamedTuple):
    """What is compared of a record that was read."""

    partition: int
    offset: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Reading:
    records: list[Seen]
    # Where the reader would go on; None if the library does not say.
    positions: dict[int, int] | None


class TransactionalClient:
    """A library behind its program."""

    def __init__(self, command: Sequence[str | Path], bootstrap: str) -> None:
        self._program = ProgramClient(command, bootstrap, cwd=ROOT)

    def close(self) -> None:
        self._program.close()

    def open(self, transactional_id: str, *, timeout_ms: int = TIMEOUT_MS) -> Producer:
        """A producer that has its producer id."""
        return self._open(transactional_id, timeout_ms, None, None)

    def open_in_group(self, transactional_id: str, group: str, source: str) -> Producer:
        """A producer, and a read-committed consumer of the group that has joined it."""
        return self._open(transactional_id, TIMEOUT_MS, group, source)

    def _open(
        self, transactional_id: str, timeout_ms: int, group: str | None, source: str | None
    ) -> Producer:
        number = self._program.call(
            "open", id=transactional_id, timeout_ms=timeout_ms, group=group, source=source
        )
        return Producer(self._program, number)

    def read(
        self, topic: str, isolation: Isolation, count: int, ends: Mapping[int, int], *, linger_ms: int = 0
    ) -> Reading:
        """Read from the start of every partition until ``count`` records came and positions are at ``ends``.

        Then for ``linger_ms`` more. All that came is returned, also what is too much.
        """
        answer = self._program.call(
            "read",
            topic=topic,
            isolation=isolation,
            count=count,
            ends=sorted(ends.items()),
            linger_ms=linger_ms,
        )
        positions = answer["positions"]
        return Reading(
            [Seen(partition, offset, b64decode(value)) for partition, offset, value in answer["records"]],
            None if positions is None else dict(positions),
        )


class Producer:
    """A transactional producer, named by a number in its program. Every call raises ClientError."""

    def __init__(self, owner: ProgramClient, number: int) -> None:
        self._program = owner
        self._number = number

    def begin(self) -> None:
        self._program.call("begin", producer=self._number)

    def send(self, topic: str, records: Sequence[Sent]) -> list[Written]:
        """Send and wait for the answers."""
        values = [{"partition": each.partition, "value": b64encode(each.value).decode()} for each in records]
        answer = self._program.call("send", producer=self._number, topic=topic, records=values)
        return [Written(partition, offset) for partition, offset in answer]

    def transform(self, target: str, count: int) -> list[Seen]:
        """Read ``count`` records of the group's, send each on with MARK, and add their offsets.

        The transaction is open afterwards. Returns what was read.
        """
        answer = self._program.call("transform", producer=self._number, topic=target, count=count)
        return [Seen(partition, offset, b64decode(value)) for partition, offset, value in answer]

    def commit(self) -> None:
        self._program.call("end", producer=self._number, commit=True)

    def abort(self) -> None:
        self._program.call("end", producer=self._number, commit=False)

    def close(self) -> None:
        self._program.call("close", producer=self._number)


# The libraries, by name


@dataclass(frozen=True, slots=True)
class Library:
    """How to start a library's program, and what it does in its own way."""

    command: Callable[[], list[str | Path]]
    # Its error when a second producer has taken the id and the first one sends to a partition of its transaction.
    fenced_send: str = "INVALID_PRODUCER_EPOCH"
    # Its error when it commits a transaction that was aborted by another: the second producer, or the coordinator.
    fenced_commit: str = "PRODUCER_FENCED"
    # Whether offsets are sent only with the end of the transaction.
    offsets_at_end: bool = False
    # Whether its transactions come through the death of their coordinator on Apache Kafka 4.3.
    fails_over: bool = True


def _python(name: str) -> Callable[[], list[str | Path]]:
    return lambda: [sys.executable, "-m", f"tests.interop.python.{name}"]


def _java(version: str) -> Callable[[], list[str | Path]]:
    def command() -> list[str | Path]:
        class_path = java.classpath(f"org.apache.kafka:kafka-clients:{version}", *BESIDES)
        classes = java.compiled(HERE / "java" / "JavaTransactions.java", class_path)
        return ["java", *JVM, "-cp", f"{classes}:{class_path}", "JavaTransactions"]

    return command


def _go(package: str) -> Callable[[], list[str | Path]]:
    return lambda: [go_program(HERE / "go", package)]


def _node() -> list[str | Path]:
    return [program("node"), HERE / "js" / "transactions.js", node_modules()]


LIBRARIES = {
    "librdkafka": Library(_python("confluent_transactions"), fenced_send="PRODUCER_FENCED"),
    "java-4": Library(_java(java.CLIENTS_VERSIONS[0])),
    "java-3.9": Library(_java(java.CLIENTS_VERSIONS[1])),
    "aiokafka": Library(_python("aiokafka_transactions"), fenced_send="PRODUCER_FENCED"),
    # 3.0.12: a commit whose coordinator has died never returns.
    "kafka-python": Library(_python("kafka_python_transactions"), fails_over=False),
    "franz-go": Library(_go("franz_go_transactions"), offsets_at_end=True),
    "sarama": Library(_go("sarama_transactions"), offsets_at_end=True),
    # It ends transactions with a version of EndTxn that is older than the other error (KIP-588).
    # 2.2.4: records sent after a restart of the brokers are in the log twice.
    "kafkajs": Library(_node, fenced_commit="INVALID_PRODUCER_EPOCH", fails_over=False),
}
# One of each protocol generation: classic, and transactions v2 (KIP-890). The others take their turn in
# ``make interop-long``.
IN_CI = ("librdkafka", "java-4")


def parameters(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=() if name in IN_CI else pytest.mark.interop_long) for name in names]


def other(name: str) -> str:
    """A library for a second opinion, that shares no code with the one named."""
    return "java-4" if name == "librdkafka" else "librdkafka"


class Clients:
    """Programs, each started when it is first asked for."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._started: dict[str, TransactionalClient] = {}

    def __getitem__(self, name: str) -> TransactionalClient:
        """Skips the test, or fails it in CI, where the library cannot be had."""
        if name not in self._started:
            try:
                command = LIBRARIES[name].command()
            except Missing as missing:
                skip_or_fail(missing)
            self._started[name] = TransactionalClient(command, self._bootstrap)
        return self._started[name]

    def close(self) -> None:
        for client in self._started.values():
            client.close()


# The model


@dataclass(slots=True)
class _Transaction:
    partitions: set[int] = field(default_factory=set)
    state: Literal["open", "committed", "aborted"] = "open"


class _Entry(NamedTuple):
    # None for a marker.
    value: bytes | None
    transaction: _Transaction | None


class Ledger:
    """What the partitions of one topic must hold."""

    def __init__(self, partitions: int) -> None:
        self._logs: list[list[_Entry]] = [[] for _ in range(partitions)]
        self._transactions: dict[object, _Transaction] = {}

    def sent(self, records: Sequence[Sent], producer: object = None) -> list[Written]:
        """Records were sent, in the producer's transaction if one is named; where they must be."""
        transaction = None if producer is None else self._transactions.setdefault(producer, _Transaction())
        written = []
        for partition, value in records:
            if transaction is not None:
                transaction.partitions.add(partition)
            written.append(Written(partition, len(self._logs[partition])))
            self._logs[partition].append(_Entry(value, transaction))
        return written

    def ended(self, producer: object, *, commit: bool) -> None:
        transaction = self._transactions.pop(producer)
        transaction.state = "committed" if commit else "aborted"
        for partition in transaction.partitions:
            self._logs[partition].append(_Entry(None, transaction))

    def ends(self, isolation: Isolation) -> dict[int, int]:
        """Where a reader of every partition stops: the end of the log, or the last stable offset."""
        return {partition: self._end(partition, isolation) for partition in range(len(self._logs))}

    def visible(self, isolation: Isolation) -> list[Seen]:
        """What a reader gets, by partition and offset."""
        return [
            Seen(partition, offset, entry.value)
            for partition, log in enumerate(self._logs)
            for offset, entry in enumerate(log[: self._end(partition, isolation)])
            if entry.value is not None and _is_visible(entry.transaction, isolation)
        ]

    def _end(self, partition: int, isolation: Isolation) -> int:
        log = self._logs[partition]
        if isolation == "read_committed":
            for offset, entry in enumerate(log):
                if entry.transaction is not None and entry.transaction.state == "open":
                    return offset
        return len(log)


def _is_visible(transaction: _Transaction | None, isolation: Isolation) -> bool:
    return isolation == "read_uncommitted" or transaction is None or transaction.state == "committed"


def numbered(first: int, count: int, partitions: int) -> list[Sent]:
    """Records that are told apart by their values, over all partitions."""
    return [Sent(number % partitions, b"%d" % number) for number in range(first, first + count)]


def in_order(records: Sequence[Seen]) -> list[Seen]:
    """By partition, each partition's records in the order in which they were read."""
    return sorted(records, key=lambda record: record.partition)
