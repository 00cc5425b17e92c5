"""What all tests of clusters share: the mark, a network that can be cut, a cluster for tests that hurt nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.network import Network, why_not

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: several real broker processes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips what cannot be done without network namespaces."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def network(namespaces: None) -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """Three brokers for tests that leave them alone; a test takes names of its own from ``unique``."""
    with Cluster(3) as cluster:
        yield cluster
