"""A broker of a real cluster loses its power: what it had not flushed must not be taken for kept."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, TopicPartition

from tests.cluster.cluster import Cluster
from tests.cluster.failover import create, write

RECORDS = 50
TIMEOUT_S = 30.0


def lose_power(cluster: Cluster, node_id: int, topic: str) -> None:
    """Take from a node that was killed what no fsync has covered: all of a small log, and the boot."""
    (data_dir,) = cluster.nodes[node_id].data_dirs
    (log,) = (data_dir / f"{topic}-0").glob("*.log")
    assert log.stat().st_size > 0
    log.write_bytes(b"")
    (data_dir / ".boot-id").write_text("another boot")


def test_a_broker_that_lost_power_is_not_elected_because_its_controller_runs_flushed(
    unique: Callable[[str], str],
) -> None:
    """A rolling restart to flushed has come to two of three brokers when the third loses its power."""
    topic = unique("topic")
    with Cluster(3) as cluster:
        create(cluster, topic, 1, replicas=2, min_insync_replicas="2")
        view = cluster.partition(topic, 0)
        leader = view.leader
        (victim,) = (replica for replica in view.replicas if replica != leader)
        (third,) = (node_id for node_id in cluster.nodes if node_id not in view.replicas)
        cluster._settings["penstock.durability"] = "flushed"
        for node_id in (third, leader):
            cluster.restart(node_id)
            cluster.wait_in_sync(topic)
        write(cluster, topic, RECORDS, partition=0)

        cluster.kill(victim)
        cluster.wait_for(topic, lambda view: view.in_sync_replicas == (leader,), "one replica is in sync")
        lose_power(cluster, victim, topic)
        cluster.kill(leader)
        # As it was started before: it does not flush.
        del cluster._settings["penstock.durability"]
        cluster.start(victim)
        cluster._settings["penstock.durability"] = "flushed"
        cluster.start(leader)
        cluster.wait_in_sync(topic)

        consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": topic})
        try:
            consumer.assign([TopicPartition(topic, 0, 0)])
            found = len(consumer.consume(RECORDS, TIMEOUT_S))
        finally:
            consumer.close()
        assert found == RECORDS, "acknowledged records are gone"
