"""A data directory that belongs to another cluster than the one a node is told to join is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import LOOPBACK, Cluster, Node
from tests.support import wait_until

# More than the cluster itself has in these tests.
EARLIER_CONTROLLERS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def other() -> Iterator[Cluster]:
    """Another cluster, one of whose brokers, the fourth, has no vote. It is down, and its epochs are higher: a node
    with a higher epoch believes none of the controllers that another node leads."""
    with Cluster(3) as other:
        other.add()
        for _ in range(EARLIER_CONTROLLERS):
            other.restart(other.controller())
        other.stop(*other.nodes)
        yield other


def check_refused(cluster: Cluster, node_id: int, directory: Path, scratch: Path) -> None:
    """Hold a node to refusing to be part of a cluster with this directory."""
    node = Node(node_id, scratch, host=LOOPBACK, data_dirs=[directory])
    if node_id in cluster.nodes:
        cluster.stop(node_id)
        node.internal_port = cluster.nodes[node_id].internal_port
    node.launch(cluster.arguments())
    try:
        wait_until(lambda: not node.is_running, 30.0, f"node {node_id} ends")
    finally:
        assert node.process is not None
        node.process.kill()
        status = node.reap(30.0)
    if node_id in cluster.nodes:
        cluster.start(node_id)
    assert status == 1, node.log_tail()
    (line,) = [line for line in node.log().splitlines() if not line.startswith("{")]
    assert line.startswith(f"penstock: {directory} belongs to the cluster ")
    assert line.endswith("; choose another --data-dir")


@pytest.mark.parametrize("node_id", [3, 4], ids=["a voter", "a broker without a vote"])
def test_of_a_node_of_another_cluster(cluster: Cluster, other: Cluster, node_id: int, tmp_path: Path) -> None:
    check_refused(cluster, node_id, other.nodes[node_id].data_dirs[0], tmp_path)


@pytest.mark.parametrize("node_id", [1, 4], ids=["a voter", "a broker without a vote"])
def test_of_a_node_that_was_a_cluster_alone(cluster: Cluster, node_id: int, tmp_path: Path) -> None:
    """Its own log gives the vote to itself: without asking the others it would lead a cluster of its own."""
    alone = Node(node_id, tmp_path, host=LOOPBACK)
    alone.launch(["--controllers", f"{node_id}@{LOOPBACK}:{alone.internal_port}"])
    try:
        wait_until(alone.is_ready, 30.0, "the node alone is ready")
    finally:
        assert alone.process is not None
        alone.process.terminate()
        alone.reap(30.0)
    alone.log_path.unlink()
    check_refused(cluster, node_id, alone.data_dirs[0], tmp_path)
