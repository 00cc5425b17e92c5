"""Every broker in turn is stopped and started again, while four kinds of clients work: none of them fails.

A client may repeat a request by itself, as it is made to; what it reports to its user as failed is a failure.
Every record that was written is read by every group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.contracts import Replicated, aiokafka, confluent, java_client, kafka_python
from tests.cluster.failover import create
from tests.interop.client import PATIENCE_S, Member
from tests.interop.records_contract import numbered
from tests.support import wait_until

PARTITIONS = 6
RECORDS_AT_ONCE = 60
CLIENTS: dict[str, Callable[[Cluster], Replicated]] = {
    "confluent": confluent,
    "kafka-python": kafka_python,
    "aiokafka": aiokafka,
    "java": java_client,
}


class Load(threading.Thread):
    """One client that writes to a topic of its own, and a member of a group that reads it."""

    def __init__(self, name: str, cluster: Cluster, client: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.topic = f"topic-{name}"
        self._client = client
        self._stopping = threading.Event()
        create(cluster, self.topic, PARTITIONS)
        self._member: Member = client.join(f"group-{name}", self.topic)
        # A program answers one question at a time.
        self._turn = threading.Lock()
        self.written = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                records = numbered(PARTITIONS, RECORDS_AT_ONCE, self.written)
                with self._turn:
                    answers = self._client.produce(self.topic, records, idempotent=True)
                assert len(answers) == RECORDS_AT_ONCE
                self.written += RECORDS_AT_ONCE
                self._stopping.wait(0.05)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()
        self.join(2 * PATIENCE_S)
        assert not self.is_alive(), f"{self.name} hangs"

    def check(self) -> None:
        assert self.error is None, f"{self.name} failed: {self.error!r}"

    def wait_for(self, written: int, what: str) -> None:
        wait_until(lambda: self.error or self.written >= written, 60, f"{self.name} {what}")
        self.check()

    def has_read_everything(self) -> bool:
        return self.read() >= set(range(self.written))

    def read(self) -> set[int]:
        with self._turn:
            return {int(record.value or b"-1") for record in self._member.records()}

    def leave(self) -> None:
        with self._turn:
            self._member.leave()


@pytest.fixture
def loads() -> Iterator[tuple[Cluster, list[Load]]]:
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(3))
        loads = []
        for name, make in CLIENTS.items():
            client = make(cluster)
            stack.callback(client.close)
            load = Load(name, cluster, client)
            load.start()
            stack.callback(load.stop)
            loads.append(load)
        yield cluster, loads


@pytest.mark.timeout(400)
def test_no_client_fails_while_every_broker_is_restarted(loads: tuple[Cluster, list[Load]]) -> None:
    cluster, clients = loads
    for load in clients:
        load.wait_for(RECORDS_AT_ONCE, "has begun")
    for node_id in cluster.nodes:
        marks = [(load, load.written) for load in clients]
        cluster.stop(node_id)
        cluster.start(node_id)
        for load, written in marks:
            cluster.wait_in_sync(load.topic)
            # Each has worked in between.
            load.wait_for(written + 1, f"goes on after node {node_id} was restarted")
        time.sleep(1)
    for load in clients:
        load.stop()
        load.check()
    for load in clients:
        wait_until(load.has_read_everything, 60, f"the group of {load.name} has read everything")
        load.leave()
    print("\nrecords written: " + ", ".join(f"{load.name} {load.written}" for load in clients))
    cluster.assert_healthy()
