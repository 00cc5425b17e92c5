"""Kafka Connect's distributed worker, killed: connectors, offsets and states come back from its topics."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.application import COMPACTING_SETTINGS, everything, wait_until_compacted
from tests.interop.client import PATIENCE_S
from tests.interop.connect import STARTING_S, Worker
from tests.support import BrokerProcess, wait_until

pytestmark = [pytest.mark.interop_long, pytest.mark.timeout(1200)]

RUNNING = ["RUNNING", "RUNNING"]
PAUSED = ["PAUSED", "PAUSED"]
# Each is a record in the topic of configurations, and restarts its connector.
CHANGES = 40


class GrowingFile:
    """A file to which lines are appended all the time, as a log grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        path.touch()

    @contextmanager
    def growing(self) -> Iterator[None]:
        done = threading.Event()

        def grow() -> None:
            # The source waits for a second when it finds nothing new.
            while not done.wait(0.002):
                self.append(5)

        thread = threading.Thread(target=grow)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def append(self, count: int) -> None:
        fresh = [f"<{number}>" for number in range(len(self.lines), len(self.lines) + count)]
        with self.path.open("a") as file:
            file.write("".join(f"{line}\n" for line in fresh))
        self.lines += fresh


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(COMPACTING_SETTINGS) as broker:
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[ConfluentClient]:
    client = ConfluentClient(broker.bootstrap)
    yield client
    client.close()


@pytest.mark.parametrize("exactly_once", [False, True], ids=["at_least_once", "exactly_once"])
def test_a_killed_worker_comes_back_with_connectors_offsets_and_states(
    broker: BrokerProcess, client: ConfluentClient, tmp_path: Path, exactly_once: bool
) -> None:
    support = {"exactly.once.source.support": "enabled" if exactly_once else "disabled"}
    worker = Worker(broker.bootstrap, "connect", tmp_path, support)
    source, copy = GrowingFile(tmp_path / "source"), tmp_path / "copy"
    # What it reads beyond a batch it forgets to send until the file grows again.
    reading = {
        "connector.class": "FileStreamSource",
        "file": str(source.path),
        "topic": "lines",
        "batch.size": "1000000",
    }
    writing = {"connector.class": "FileStreamSink", "file": str(copy), "topics": "lines"}
    idle = {**writing, "file": str(tmp_path / "other"), "topics": "others"}

    with worker.run() as running:
        worker.wait_until_ready(running)
        worker.put("/connectors/reading/config", reading)
        worker.put("/connectors/writing/config", writing)
        for number in range(CHANGES):
            worker.put("/connectors/idle/config", {**idle, "comment": f"change {number}"})
        worker.put("/connectors/deleted/config", idle)
        worker.wait_for_states("idle", RUNNING)
        worker.wait_for_states("deleted", RUNNING)
        worker.put("/connectors/idle/pause", None)
        worker.delete("/connectors/deleted")
        worker.wait_for_states("idle", PAUSED)
        with source.growing():
            wait_until(
                lambda: lines_of(copy) > 1000 and end_of(client, worker.offset_topic) > 60,
                3 * PATIENCE_S,
                "lines are copied and offsets are stored",
            )
            running.kill()
    written = len(source.lines)
    assert lines_of(copy) < written
    source.append(500)
    for topic in (worker.config_topic, worker.offset_topic, worker.status_topic):
        wait_until_compacted(broker.bootstrap, topic)

    with worker.run() as running:
        worker.wait_until_ready(running)
        # It answers before it knows them.
        wait_until(lambda: len(worker.get("/connectors")) >= 3, STARTING_S, "the connectors are there")
        assert sorted(worker.get("/connectors")) == ["idle", "reading", "writing"]
        for connector, states in {"reading": RUNNING, "writing": RUNNING, "idle": PAUSED}.items():
            worker.wait_for_states(connector, states)
        configs = {name: worker.get(f"/connectors/{name}/config") for name in ("reading", "writing", "idle")}
        wait_until(
            lambda: len(set(copied(copy))) == len(source.lines), 3 * PATIENCE_S, "every line is copied"
        )
        end = {"position": source.path.stat().st_size}
        wait_until(
            lambda: offsets_of(worker, "reading") == [end], 2 * PATIENCE_S, f"the source's offset is {end}"
        )

    assert configs == {
        "reading": {**reading, "name": "reading"},
        "writing": {**writing, "name": "writing"},
        "idle": {**idle, "comment": f"change {CHANGES - 1}", "name": "idle"},
    }
    records = everything(broker.bootstrap, "lines")
    read = [record.value.decode() for record in records if record.value is not None]
    if exactly_once:
        assert read == source.lines
    else:
        # Each line in its place when it is first seen, and some again: the kill was between two commits of offsets.
        assert list(dict.fromkeys(read)) == source.lines
        assert len(read) < 2 * len(source.lines)
    assert set(copied(copy)) == set(source.lines)
    # The sink went on where its group had committed, not from the start.
    assert len(copied(copy)) < len(records) + written


def end_of(client: ConfluentClient, topic: str) -> int:
    """How many records were ever written to it."""
    ends = [client.offset(topic, partition, "latest") for partition in client.describe_topic(topic)]
    return sum(end or 0 for end in ends)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def copied(path: Path) -> list[str]:
    """Lines, also those that begin behind the half of one at which the worker was killed."""
    return re.findall(r"<\d+>", path.read_text())


def offsets_of(worker: Worker, connector: str) -> list[Any]:
    return [each["offset"] for each in worker.get(f"/connectors/{connector}/offsets")["offsets"]]
