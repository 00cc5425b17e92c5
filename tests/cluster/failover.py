"""How long a cluster of three does not do its work after something happened to one of them.

Each function does one harm to a cluster that is under load and returns the seconds until the work goes on, as a
client sees it that trusts nothing it knew before (see ``tests.chaos.cluster_probe``). The tests hold them to
deadlines, ``benchmarks/failover.py`` reports them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from tests.chaos.clients import running
from tests.chaos.cluster_clients import ClusterWriter
from tests.chaos.cluster_probe import Probe
from tests.chaos.ledger import Ledger, Place
from tests.cluster.cluster import Cluster
from tests.cluster.wire import NoAnswer, Wire
from tests.support import wait_until

CREATE_VERSION = 7
ATTEMPT_TIMEOUT_S = 0.5
GIVE_UP_S = 90.0
RECORDS_PER_SECOND = 500
_numbers = itertools.count(1)


def create(cluster: Cluster, topic: str, partitions: int, replicas: int = 3, **configs: str) -> None:
    """A topic that every broker knows of, with all its replicas in sync."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    config = {name.replace("_", "."): value for name, value in configs.items()}
    admin.create_topics([NewTopic(topic, partitions, replicas, config=config)])[topic].result(60)
    cluster.wait_in_sync(topic)


def write(cluster: Cluster, topic: str, count: int, *, partition: int = -1, size: int = 100) -> None:
    """So many records, each acknowledged by all replicas in sync."""
    failures = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 5})
    for number in range(count):
        value = b"%d|" % number
        producer.produce(
            topic,
            value + bytes(max(0, size - len(value))),
            partition=partition,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        producer.poll(0)
    assert producer.flush(60) == 0, "not everything was acknowledged"
    assert not failures, failures[0]


@contextmanager
def load(cluster: Cluster, topic: str, partitions: int, ledger: Ledger) -> Iterator[ClusterWriter]:
    """A writer at work; in the end every record it sent is acknowledged."""
    places = [Place(topic, partition) for partition in range(partitions)]
    writer = ClusterWriter(0, cluster.bootstrap, ledger, places, 1, RECORDS_PER_SECOND)
    with running([writer], ledger):
        before = ledger.acknowledged_count
        wait_until(lambda: ledger.acknowledged_count > before + 100, 30, "the load has begun")
        yield writer


@contextmanager
def probing(cluster: Cluster, topic: str, partition: int = 0) -> Iterator[Probe]:
    addresses = [node.address for node in cluster.nodes.values()]
    probe = Probe(lambda: addresses, topic, partition)
    probe.start()
    try:
        wait_until(lambda: probe.count > 5, 30, "the probe writes")
        yield probe
    finally:
        probe.stop()


def interrupted_s(probe: Probe, harm: Callable[[], object]) -> float:
    """Do something, wait until the probe writes again, and say how long it could not."""
    began = time.monotonic()
    harm()
    done = time.monotonic()
    # A write that was under way may still be acknowledged: only later ones say that all is well.
    wait_until(lambda: probe.since(done + 0.2) >= 10, GIVE_UP_S, "writes go on")
    return probe.gap_s(began)


def leader_killed_s(cluster: Cluster, topic: str) -> float:
    """Without a write after the leader's process was killed."""
    with probing(cluster, topic) as probe:
        leader = cluster.leader(topic, 0)
        gap_s = interrupted_s(probe, lambda: cluster.kill(leader))
    wait_until(lambda: cluster.leader(topic, 0) not in (leader, -1), 30, "all know of another leader")
    cluster.start(leader)
    return gap_s


def leader_cut_off_s(cluster: Cluster, topic: str) -> float:
    """Without a write after the leader was cut off from everybody, silently."""
    assert cluster.network is not None
    with probing(cluster, topic) as probe:
        leader = cluster.leader(topic, 0)
        gap_s = interrupted_s(probe, lambda: cluster.network.cut_off(leader))  # type: ignore[union-attr]
    cluster.network.heal()
    return gap_s


def leader_stopped_s(cluster: Cluster, topic: str) -> float:
    """Without a write while the leader stops as it was told to."""
    with probing(cluster, topic) as probe:
        leader = cluster.leader(topic, 0)
        gap_s = interrupted_s(probe, lambda: cluster.stop(leader))
    cluster.start(leader)
    return gap_s


def controller_killed_s(cluster: Cluster) -> float:
    """Without a change of the metadata after the active controller's process was killed."""
    controller = cluster.controller()
    others = [node.address for node in cluster.nodes.values() if node.id != controller]
    cluster.kill(controller)
    began = time.monotonic()
    seconds = None
    while seconds is None and time.monotonic() < began + GIVE_UP_S:
        for address in others:
            name = f"made-{next(_numbers)}"
            with suppress(NoAnswer):
                if is_created(address, name):
                    seconds = time.monotonic() - began
                    break
            time.sleep(0.02)
    assert seconds is not None, f"no topic could be created for {GIVE_UP_S:g} s"
    cluster.start(controller)
    return seconds


def is_created(address: tuple[str, int], name: str) -> bool:
    """Whether a topic can be created, by asking this broker once."""
    topic = CreatableTopic(name=name, num_partitions=1, replication_factor=2)
    with Wire(address, timeout_s=ATTEMPT_TIMEOUT_S) as wire:
        request = CreateTopicsRequest(topics=[topic], timeout_ms=int(ATTEMPT_TIMEOUT_S * 1000))
        answer = wire.call(request, CREATE_VERSION)
    return bool(answer.topics[0].error_code == ErrorCode.NONE)
