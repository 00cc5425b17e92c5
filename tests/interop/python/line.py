"""The Python half of the line protocol of tests/interop/adapters/program.py, for programs of transactions."""

from __future__ import annotations

import json
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

PATIENCE_S = 30.0
SESSION_TIMEOUT_MS = 10_000
HEARTBEAT_INTERVAL_MS = 200
MARK = b"!"


class Came(NamedTuple):
    """A record that was read."""

    partition: int
    offset: int
    value: bytes


class Outgoing(NamedTuple):
    partition: int
    value: bytes


Offsets: TypeAlias = dict[int, int]


class Producer(Protocol):
    """A library's transactional producer, with a consumer if it was opened in a group."""

    def begin(self) -> None: ...

    def send(self, topic: str, records: list[Outgoing]) -> list[tuple[int, int]]:
        """Send, wait for the answers; partition and offset of each record."""
        ...

    def receive(self, count: int) -> list[Came]: ...

    def send_offsets(self, offsets: Offsets) -> None:
        """Add the offsets of the source's partitions."""
        ...

    def end(self, commit: bool) -> None: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """A consumer that was assigned all partitions of a topic from their starts."""

    def poll(self, timeout_s: float) -> list[Came]: ...

    def positions(self) -> Offsets: ...

    def close(self) -> None: ...


class Library(Protocol):
    def open(
        self, transactional_id: str, timeout_ms: int, group: str | None, source: str | None
    ) -> Producer: ...

    def reader(self, topic: str, partitions: list[int], isolation: str) -> Reader: ...

    def name_of(self, error: Exception) -> str:
        """Kafka's name of an error that the library raised."""
        ...


def serve(library: Library) -> None:
    """Answer commands until the input ends."""
    producers: list[Producer] = []
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": _run(library, producers, command)}
        except Exception as error:
            answer = {"error": library.name_of(error), "message": repr(error)}
        print(json.dumps(answer), flush=True)


def _run(library: Library, producers: list[Producer], command: Mapping[str, Any]) -> Any:
    def producer() -> Producer:
        found: Producer = producers[command["producer"]]
        return found

    commands: dict[str, Callable[[], Any]] = {
        "open": lambda: _open(library, producers, command),
        "begin": lambda: producer().begin(),
        "send": lambda: producer().send(
            command["topic"],
            [Outgoing(each["partition"], b64decode(each["value"])) for each in command["records"]],
        ),
        "transform": lambda: _transform(producer(), command["topic"], command["count"]),
        "end": lambda: producer().end(command["commit"]),
        "close": lambda: producer().close(),
        "read": lambda: _read(library, command),
    }

    return commands[command["do"]]()


def _open(library: Library, producers: list[Producer], command: Mapping[str, Any]) -> int:
    producers.append(library.open(command["id"], command["timeout_ms"], command["group"], command["source"]))
    return len(producers) - 1


def _transform(producer: Producer, target: str, count: int) -> list[list[Any]]:
    producer.begin()
    received = producer.receive(count)
    producer.send(target, [Outgoing(each.partition, each.value + MARK) for each in received])
    producer.send_offsets({each.partition: each.offset + 1 for each in received})
    return _fields(received)


def _read(library: Library, command: Mapping[str, Any]) -> Mapping[str, Any]:
    ends = dict(command["ends"])
    reader = library.reader(command["topic"], sorted(ends), command["isolation"])
    received: list[Came] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(received) < command["count"] or reader.positions() != ends:
            if time.monotonic() > deadline:
                break
            received += reader.poll(0.1)
        linger_until = time.monotonic() + command["linger_ms"] / 1000
        while time.monotonic() < linger_until:
            received += reader.poll(0.05)
        return {"records": _fields(received), "positions": sorted(reader.positions().items())}
    finally:
        reader.close()


def _fields(records: list[Came]) -> list[list[Any]]:
    return [[each.partition, each.offset, b64encode(each.value).decode()] for each in records]
