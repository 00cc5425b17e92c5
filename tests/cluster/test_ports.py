"""The ports of a cluster's nodes, which are chosen before any of them listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import cluster
from tests.cluster.cluster import LOOPBACK, Node


def test_no_two_nodes_are_given_the_same_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "_given", set())
    # So few that any two of them would be the same, if that were left to chance.
    monkeypatch.setattr(cluster, "PORTS", range(20_000, 20_500))
    nodes = [Node(number, tmp_path, host=LOOPBACK) for number in range(50)]
    assert len({port for node in nodes for port in (node.port, node.internal_port)}) == 2 * len(nodes)
