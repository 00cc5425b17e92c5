"""A cluster gets a second listener, with TLS, and loses it again, one broker after the other, under load."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic
from tests.cluster import wire
from tests.cluster.cluster import Cluster, free_ports
from tests.cluster.failover import create
from tests.cluster.wire import METADATA_VERSION, Address, Wire
from tests.interop.client import PATIENCE_S
from tests.support import wait_until
from tests.tls.files import TlsFiles

TOPIC = "t"
PARTITIONS = 3


class Writer(threading.Thread):
    """Writes on the plain listener all the time."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5}
        )
        self._stopping = threading.Event()
        self.errors: list[KafkaError] = []
        self.written = 0

    def run(self) -> None:
        while not self._stopping.wait(0.01):
            self._producer.produce(TOPIC, b"x" * 100, on_delivery=self._delivered)
            self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _: object) -> None:
        if error is not None:
            self.errors.append(error)
        self.written += 1

    def wait_for_more(self) -> None:
        written = self.written
        wait_until(lambda: self.written > written + 20, PATIENCE_S, "the writer goes on")
        assert not self.errors

    def stop(self) -> None:
        self._stopping.set()
        self.join(PATIENCE_S)
        assert self._producer.flush(PATIENCE_S) == 0
        assert not self.errors


def leaders(address: Address, context: ssl.SSLContext | None) -> dict[int, tuple[int, int]]:
    """The leader and the error of each partition, as a client of this listener is told, asked for in both ways."""
    found = []
    with Wire(address, context=context) as connection:
        for topics in ([MetadataRequestTopic(name=TOPIC)], None):
            request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
            answer = connection.call(request, METADATA_VERSION)
            (topic,) = [each for each in answer.topics if each.name == TOPIC]
            found.append(
                {each.partition_index: (each.leader_id, each.error_code) for each in topic.partitions}
            )
    assert found[0] == found[1]
    return found[0]


@pytest.mark.timeout(300)
def test_a_listener_is_added_and_removed_by_rolling_restarts(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    context = files.authority.client()
    with Cluster(3) as cluster:
        create(cluster, TOPIC, PARTITIONS)
        writer = Writer(cluster.bootstrap)
        writer.start()
        plain = {node.id: node.address for node in cluster.nodes.values()}
        secure = dict(zip(cluster.nodes, (("127.0.0.1", port) for port in free_ports(3)), strict=True))

        def restart(node_id: int, *, kill: bool = False) -> None:
            cluster.restart(node_id, kill=kill)
            cluster.wait_in_sync(TOPIC)
            writer.wait_for_more()

        for node_id, node in cluster.nodes.items():
            node.settings = {
                "listeners": ",".join(
                    f"{name}://{host}:{port}"
                    for name, (host, port) in (("PLAINTEXT", node.address), ("TLS", secure[node_id]))
                ),
                # With clients that are secure, connections between nodes have to be on their way to it.
                "listener.security.protocol.map": "TLS:SSL,INTERNAL:SSL",
                "penstock.internal.security": "accepted",
                "penstock.node.principals": "User:CN=127.0.0.1,OU=x,O=y",
                **files.settings("none"),
            }
            restart(node_id)
            # Clients of the new listener are told of the brokers that have it, and of no others.
            there = {each: secure[each] for each in secure if each <= node_id}
            for asked in there:
                wait_until(lambda: wire.endpoints(secure[asked], context) == there, PATIENCE_S, f"{there}")  # noqa: B023
            views = leaders(secure[node_id], context)
            known = wire.partitions(plain[node_id], [TOPIC])
            assert all(view.error == 0 for view in known.values())
            for partition, (leader, error) in views.items():
                expected = known[TOPIC, partition].leader
                if expected in there:
                    assert (leader, error) == (expected, 0)
                else:
                    assert (leader, error) == (-1, ErrorCode.LISTENER_NOT_FOUND)
            # Nothing changes for the others, whichever kind of broker they ask.
            for address in plain.values():
                assert wire.endpoints(address) == plain

        _write_over_tls(",".join(f"{host}:{port}" for host, port in secure.values()), files)

        for node_id, node in cluster.nodes.items():
            node.settings = {}
            restart(node_id, kill=node_id == 1)
            there = {each: secure[each] for each in secure if each > node_id}
            for asked in there:
                wait_until(lambda: wire.endpoints(secure[asked], context) == there, PATIENCE_S, f"{there}")  # noqa: B023
                with Wire(secure[asked], context=context) as connection:
                    answer = connection.call(FindCoordinatorRequest(coordinator_keys=["a", "b", "c"]), 4)
                for each in answer.coordinators:
                    is_told = each.node_id in there and (each.host, each.port) == there[each.node_id]
                    assert is_told or each.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
            for address in plain.values():
                assert wire.endpoints(address) == plain
        writer.stop()


def _write_over_tls(bootstrap: str, files: TlsFiles) -> None:
    errors: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": bootstrap, **files.librdkafka(), "enable.idempotence": True})
    for partition in range(PARTITIONS):
        producer.produce(
            TOPIC, b"secure", partition=partition, on_delivery=lambda error, _: errors.append(error)
        )
    assert producer.flush(PATIENCE_S) == 0
    assert errors == [None] * PARTITIONS
