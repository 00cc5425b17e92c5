"""Real brokers with wrong clocks: nothing is deleted, refused or stored twice, and the difference is shown."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster.cluster import Cluster, Node
from tests.support import wait_until

HOUR = 3_600_000
DAY = 24 * HOUR
PARTITIONS = 6
RECORDS = 3_000
OTHER_TIME = Path(__file__).parent / "other_time"
SETTINGS = {
    "log.retention.check.interval.ms": "300",
    "log.segment.bytes": "16384",
    "log.segment.delete.delay.ms": "0",
    "log.retention.ms": str(HOUR),
}
SAID = "nothing is deleted by age"


class Clocks:
    """How far the clocks of the nodes are ahead."""

    def __init__(self, directory: Path, *nodes: int) -> None:
        self._directory = directory
        for node in nodes:
            (directory / str(node)).write_bytes(bytes(8))
        path = os.pathsep.join([str(OTHER_TIME), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, "PENSTOCK_OTHER_TIME": str(directory)}

    def set(self, node: int, ahead_ms: int) -> None:
        with (self._directory / str(node)).open("r+b") as file:
            file.write(struct.pack("<q", ahead_ms))


def produce(cluster: Cluster, count: int) -> int:
    """How many records were acknowledged; those that were refused show what is wrong."""
    acknowledged = 0
    errors: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        nonlocal acknowledged
        if error is None:
            acknowledged += 1
        else:
            errors.append(error)

    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "linger.ms": 1})
    for number in range(count):
        producer.produce("events", bytes(100), partition=number % PARTITIONS, on_delivery=delivered)
        producer.poll(0)
    assert producer.flush(60) == 0
    assert not errors, errors[0]
    return acknowledged


def remaining(cluster: Cluster) -> int:
    """How many records there are, by their offsets."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "counter"})
    try:
        bounds = [
            consumer.get_watermark_offsets(TopicPartition("events", index), timeout=30)
            for index in range(PARTITIONS)
        ]
        return sum(high - low for low, high in bounds)
    finally:
        consumer.close()


def says_so(node: Node) -> bool:
    return SAID in node.log()


def clock_column(cluster: Cluster) -> dict[int, int | None]:
    command = [sys.executable, "-m", "penstock", "brokers", "--json", "--bootstrap", cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {row["broker"]: row["clock_ahead_ms"] for row in json.loads(ended.stdout)}


def test_no_record_is_lost_or_refused_by_the_clock_of_one_broker(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path, 1, 2, 3)
    with Cluster(3, SETTINGS, environment=clocks.environment) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic("events", PARTITIONS, 3)])["events"].result(60)
        cluster.wait_in_sync("events")
        acknowledged = produce(cluster, RECORDS)
        for node_id, node in cluster.nodes.items():
            clocks.set(node_id, 10 * DAY)
            wait_until(partial(says_so, node), 30, f"node {node_id} says that its clock is wrong")
            assert abs((clock_column(cluster)[node_id] or 0) - 10 * DAY) < HOUR
            clocks.set(node_id, 0)
        # One is started with the wrong time already.
        clocks.set(1, 10 * DAY)
        cluster.restart(1, kill=True)
        cluster.wait_in_sync("events")
        clocks.set(1, 0)
        for node_id in cluster.nodes:
            clocks.set(node_id, -2 * HOUR)
            acknowledged += produce(cluster, RECORDS // 10)
            clocks.set(node_id, 0)
        assert remaining(cluster) == acknowledged


def test_records_whose_time_is_over_are_deleted_by_all_replicas(tmp_path: Path) -> None:
    with Cluster(3, {**SETTINGS, "log.retention.ms": "1000"}) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic("events", PARTITIONS, 3)])["events"].result(60)
        produce(cluster, RECORDS)
        wait_until(lambda: remaining(cluster) == 0, 60, "the leaders have deleted everything")

        def kept_bytes() -> int:
            return sum(
                path.stat().st_size
                for node in cluster.nodes.values()
                for directory in node.data_dirs
                for path in directory.glob("events-*/*.log")
            )

        wait_until(lambda: kept_bytes() == 0, 60, "so have the followers")
