"""Metrics and readiness of three real nodes: a rolling restart that goes by /readyz, and what they add up to."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from tests.broker.metrics.scraping import samples
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.contracts import confluent
from tests.cluster.failover import create
from tests.cluster.test_rolling import PARTITIONS, RECORDS_AT_ONCE, Load
from tests.interop.records_contract import numbered
from tests.support import wait_until

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A follower that stops is dropped by its leader, before the controller fences it.
    with Cluster(3, {"replica.lag.time.max.ms": "3000"}, has_metrics=True) as cluster:
        yield cluster


def ask(cluster: Cluster, node_id: int, path: str) -> tuple[int, str]:
    """Status and body. Raises OSError when nobody answers."""
    node = cluster.nodes[node_id]
    assert node.metrics_port is not None
    connection = http.client.HTTPConnection(node.host, node.metrics_port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def is_ready(cluster: Cluster, node_id: int) -> bool:
    try:
        status, body = ask(cluster, node_id, "/readyz")
    except OSError:
        return False
    assert (status, body) == (200, "ready\n") or status == 503, body
    return status == 200


def wait_until_all_are_ready(cluster: Cluster) -> None:
    for node_id in cluster.nodes:
        wait_until(partial(is_ready, cluster, node_id), DEADLINE_S, f"node {node_id} is ready")


def scrape(cluster: Cluster, node_id: int) -> dict[str, float]:
    status, body = ask(cluster, node_id, "/metrics")
    assert status == 200
    return samples(body.encode())


def added_up(cluster: Cluster, name: str) -> float:
    """Over all nodes that can answer."""
    return sum(scrape(cluster, node_id).get(name, 0) for node_id in cluster.running)


@pytest.mark.timeout(400)
def test_a_rolling_restart_that_waits_for_readiness_fails_no_client(cluster: Cluster) -> None:
    with ExitStack() as stack:
        client = confluent(cluster)
        stack.callback(client.close)
        load = Load("by-readiness", cluster, client)
        load.start()
        stack.callback(load.stop)
        load.wait_for(RECORDS_AT_ONCE, "has begun")
        wait_until_all_are_ready(cluster)
        for node_id in cluster.nodes:
            written = load.written
            cluster.stop(node_id)
            assert not is_ready(cluster, node_id)
            cluster.start(node_id, wait=False)
            wait_until_all_are_ready(cluster)
            # So the next one may be stopped: every partition has all of its replicas in sync.
            for (topic, partition), view in wire.partitions(
                cluster.nodes[node_id].address, [load.topic]
            ).items():
                assert sorted(view.in_sync_replicas) == sorted(view.replicas), (topic, partition, view)
            load.wait_for(written + 1, f"goes on after node {node_id} was restarted")
        load.stop()
        load.check()
        wait_until(load.has_read_everything, DEADLINE_S, "the group has read everything")
        load.leave()


def test_a_node_without_the_others_lives_and_is_not_ready(cluster: Cluster) -> None:
    wait_until_all_are_ready(cluster)
    cluster.kill(2, 3)
    wait_until(lambda: not is_ready(cluster, 1), DEADLINE_S, "node 1 says that it is not ready")
    assert ask(cluster, 1, "/healthz") == (200, "ok\n")
    status, reason = ask(cluster, 1, "/readyz")
    assert status == 503 and reason.count("\n") == 1, reason
    cluster.start(2, 3)
    wait_until_all_are_ready(cluster)


def test_the_metrics_of_all_nodes_add_up(cluster: Cluster) -> None:
    create(cluster, "counted", PARTITIONS)
    cluster.wait_in_sync("counted")
    wait_until_all_are_ready(cluster)
    client = confluent(cluster)
    try:
        client.produce("counted", numbered(PARTITIONS, 60), idempotent=True)
    finally:
        client.close()
    assert added_up(cluster, "penstock_active_controller") == 1
    assert added_up(cluster, "penstock_topic_in_messages_total{topic=counted}") == 60
    stored = added_up(cluster, "penstock_topic_in_bytes_total{topic=counted}")
    for way in ("in", "out"):
        assert (
            added_up(cluster, f"penstock_topic_replication_{way}_bytes_total{{topic=counted}}") >= 2 * stored
        )
    assert added_up(cluster, "penstock_log_size_bytes{topic=counted}") == 3 * stored
    assert added_up(cluster, "penstock_cluster_brokers{state=active}") == 3
    assert added_up(cluster, "penstock_under_replicated_partitions") == 0
    for node_id in cluster.nodes:
        found = scrape(cluster, node_id)
        assert found["penstock_request_seconds_count{api=Fetch,server=internal}"] > 0
        assert abs(found[f"penstock_clock_ahead_seconds{{node_id={node_id}}}"]) < 10
        lags = [value for name, value in found.items() if name.startswith("penstock_quorum_lag_records")]
        assert bool(lags) == bool(found["penstock_active_controller"])


def test_a_replica_that_stops_is_seen_and_so_is_its_return(cluster: Cluster) -> None:
    create(cluster, "shrinking", PARTITIONS)
    cluster.wait_in_sync("shrinking")
    stopped = 1 + cluster.controller() % 3
    others = [node_id for node_id in cluster.nodes if node_id != stopped]
    before = {
        name: added_up(cluster, name)
        for name in ("penstock_isr_shrinks_total", "penstock_isr_expansions_total")
    }
    client = confluent(cluster)
    try:
        cluster.pause(stopped)
        try:
            client.produce("shrinking", numbered(PARTITIONS, 60), idempotent=True)
            wait_until(
                lambda: (
                    sum(scrape(cluster, each)["penstock_under_replicated_partitions"] for each in others) > 0
                ),
                DEADLINE_S,
                "partitions are under-replicated",
            )
            assert sum(scrape(cluster, each)["penstock_under_min_isr_partitions"] for each in others) == 0
        finally:
            cluster.resume(stopped)
    finally:
        client.close()
    wait_until_all_are_ready(cluster)
    assert added_up(cluster, "penstock_isr_shrinks_total") > before["penstock_isr_shrinks_total"]
    assert added_up(cluster, "penstock_isr_expansions_total") > before["penstock_isr_expansions_total"]
    assert added_up(cluster, "penstock_under_replicated_partitions") == 0
