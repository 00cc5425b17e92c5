"""Ten thousand topics, a hundred thousand partitions, three brokers: what the numbers alone cost.

The partitions are empty: what is measured is metadata, bookkeeping and idleness. For a quick look at fewer::

    python -m benchmarks.scale --topics 500
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import time
from typing import Any

from tests.cluster.cluster import Cluster, Node
from tests.cluster.failover import controller_killed_s
from tests.cluster.wire import Wire

from benchmarks.process import cpu_s, frame, resident_mb, settle
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest, MetadataRequest

TOPICS = 10_000
PARTITIONS_PER_TOPIC = 10
TOPICS_PER_REQUEST = 200
IDLE_S = 15.0
CREATE_VERSION = 7
METADATA_VERSION = 12
CALM_CPU = 0.10
CALM_TIMEOUT_S = 300.0
START_TIMEOUT_S = 600.0
TARGETS = {
    "resident_mb": 700.0,
    "metadata_s": 1.0,
    "controller_failover_s": 5.0,
    "restart_s": 20.0,
}


def run(topics: int = TOPICS) -> dict[str, Any]:
    single = _measured(topics, 1)
    replicated = _measured(topics, 3)
    return {
        "replication_1": single,
        "replication_3": replicated,
        "targets_of_replication_1": TARGETS,
        "met": all(single[name] <= target for name, target in TARGETS.items()),
    }


def _measured(topics: int, replicas: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "topics": topics,
        "partitions": topics * PARTITIONS_PER_TOPIC,
        "replicas": topics * PARTITIONS_PER_TOPIC * replicas,
    }
    with Cluster(3) as cluster:
        began, cpu_before = time.perf_counter(), _cpu_s(cluster)
        _create(cluster, topics, replicas)
        figures["create_s"] = round(time.perf_counter() - began, 1)
        figures["create_cpu_ms_per_partition"] = round(
            (_cpu_s(cluster) - cpu_before) * 1e3 / figures["partitions"], 3
        )
        figures["calm_after_s"] = round(_until_calm(cluster), 1)
        figures["resident_mb"] = max(round(resident_mb(node.pid)) for node in cluster.nodes.values())
        answers = [_metadata(node) for node in cluster.nodes.values()]
        figures["metadata_s"] = round(max(seconds for seconds, _ in answers), 2)
        figures["metadata_mb"] = round(answers[0][1] / 1e6, 1)
        figures["idle_cpu_percent"] = _idle_cpu(cluster)
        victim = min(node for node in cluster.nodes if node != cluster.controller())
        stopping = time.perf_counter()
        cluster.stop(victim)
        figures["stop_s"] = round(time.perf_counter() - stopping, 1)
        starting = time.perf_counter()
        cluster.start(victim, wait=False)
        cluster.wait_ready(victim, timeout_s=START_TIMEOUT_S)
        figures["restart_s"] = round(time.perf_counter() - starting, 1)
        figures["calm_after_restart_s"] = round(_until_calm(cluster), 1)
        figures["controller_failover_s"] = round(controller_killed_s(cluster), 2)
        figures["resident_after_failover_mb"] = max(
            round(resident_mb(node.pid)) for node in cluster.nodes.values()
        )
    return figures


def _create(cluster: Cluster, topics: int, replicas: int) -> None:
    with Wire(cluster.nodes[cluster.controller()].address, timeout_s=120) as wire:
        for first in range(0, topics, TOPICS_PER_REQUEST):
            wanted = [
                CreatableTopic(
                    name=f"topic-{number:05}",
                    num_partitions=PARTITIONS_PER_TOPIC,
                    replication_factor=replicas,
                )
                for number in range(first, min(first + TOPICS_PER_REQUEST, topics))
            ]
            answer = wire.call(CreateTopicsRequest(topics=wanted, timeout_ms=120_000), CREATE_VERSION)
            refused = [each for each in answer.topics if each.error_code]
            assert not refused, refused[0]


def _metadata(node: Node) -> tuple[float, int]:
    """The whole Metadata answer of a broker: seconds until the last byte, and its size."""
    request = frame(MetadataRequest(topics=None, allow_auto_topic_creation=False), METADATA_VERSION)
    with socket.create_connection(node.address, timeout=60) as connection:
        began = time.perf_counter()
        connection.sendall(request)
        received = bytearray()
        size = 4
        while len(received) < size:
            data = connection.recv(1 << 20)
            assert data, "the broker closed the connection"
            received += data
            if size == 4 and len(received) >= 4:
                size = 4 + struct.unpack_from(">i", received)[0]
        return time.perf_counter() - began, size


def _until_calm(cluster: Cluster) -> float:
    """Seconds until no broker is busy any more with what was asked of it."""
    began = time.perf_counter()
    while time.perf_counter() < began + CALM_TIMEOUT_S:
        before = [cpu_s(node.pid) for node in cluster.nodes.values()]
        time.sleep(1)
        used = [cpu_s(node.pid) - cpu for node, cpu in zip(cluster.nodes.values(), before)]
        if max(used) < CALM_CPU:
            break
    return time.perf_counter() - began


def _idle_cpu(cluster: Cluster) -> list[float]:
    """What each broker uses with nobody asking, in percent of a core."""
    settle()
    before = [cpu_s(node.pid) for node in cluster.nodes.values()]
    time.sleep(IDLE_S)
    return [
        round((cpu_s(node.pid) - cpu) / IDLE_S * 100, 1) for node, cpu in zip(cluster.nodes.values(), before)
    ]


def _cpu_s(cluster: Cluster) -> float:
    return sum(cpu_s(node.pid) for node in cluster.nodes.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--topics", type=int, default=TOPICS, help=f"of ten partitions each (default {TOPICS})"
    )
    print(json.dumps(run(parser.parse_args().topics), indent=2))
