"""What the Spark tests share beside the session, which is in ``session.py`` and known to all tests."""

from __future__ import annotations

import pytest

from tests.spark.topics import Topics


@pytest.fixture
def topics(bootstrap: str) -> Topics:
    """Makes and fills topics on the shared broker."""
    return Topics(bootstrap)
