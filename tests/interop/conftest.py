"""What all interoperability tests share: the mark, the reference client and records that others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.adapters.confluent import ConfluentClient

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("interop")


@pytest.fixture(scope="session")
def reference(bootstrap: str) -> Iterator[ConfluentClient]:
    """A second opinion: what a client did is checked with a client other than itself."""
    client = ConfluentClient(bootstrap)
    yield client
    client.close()
