"""What `penstock doctor` finds in a cluster that loses brokers, and that it finds nothing before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.monitoring.collecting import Collector
from penstock.monitoring.findings import Finding, Thresholds, examine
from penstock.wire import Client
from tests.cluster.cluster import Cluster
from tests.support import wait_until

# The disk and the clock of the machine that runs this are its own affair.
LIMITS = Thresholds(disk=1.0, disk_critical=1.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as running:
        yield running


def test_stopped_brokers_are_found_by_what_they_are_missed_for(cluster: Cluster) -> None:
    with Client(cluster.bootstrap) as client:
        client.create_topic("orders", 3, 3, {"min.insync.replicas": "2"})
        client.create_topic("single", 6, 1)
        cluster.wait_in_sync("orders")
        collector = Collector(client)

        def findings() -> dict[tuple[str, str], Finding]:
            return {(each.rule, each.subject): each for each in examine(collector.snapshot(10.0), LIMITS)}

        wait_until(lambda: not findings(), 60, "a cluster that is well")
        cluster.kill(3)
        expected = {
            ("under-replicated", "orders"),
            ("offline-partitions", "single"),
            ("stopped-broker", "broker 3"),
        }
        wait_until(lambda: expected <= findings().keys(), 60, "the missing broker is found")
        found = findings()
        assert "broker 3" in found["under-replicated", "orders"].what
        assert "broker 3" in found["offline-partitions", "single"].advice
        cluster.start(3)
        wait_until(lambda: not findings(), 60, "a cluster that is well again")


def test_a_topic_below_its_minimum_is_found(cluster: Cluster) -> None:
    with Client(cluster.bootstrap) as client:
        client.create_topic("orders", 1, 3, {"min.insync.replicas": "3"})
        cluster.wait_in_sync("orders")
        collector = Collector(client)
        cluster.kill(next(id for id in cluster.nodes if id != cluster.leader("orders", 0)))
        wait_until(
            lambda: "below-min-insync" in {each.rule for each in examine(collector.snapshot(10.0), LIMITS)},
            60,
            "writes are refused",
        )
