"""What the Spark tests share beside the session, which is in ``session.py`` and known to all tests."""

from __future__ import annotations

import pytest

from tests.spark.topics import Topics


@pytest.fixture
def topics(bootstrap: str) -> Topics:
    """Makes and fills topics on the shared broker."""
    return Topics(bootstrap)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever waits for a broker that has not heard yet waits a moment only: one broker is never behind itself.

    For planning, jobs and clients of this process. It looks more than once all the same.
    """
    monkeypatch.setattr("penstock.spark.planning.GONE_AFTER_S", 0.1)
    monkeypatch.setattr("penstock.spark.planning.GONE_PAUSE_S", 0.03)
    monkeypatch.setattr("penstock.spark.planning.UNHEARD_OF_S", 0.1)
    monkeypatch.setattr("penstock.spark.jobs.topics.UNHEARD_OF_S", 0.1)
    monkeypatch.setattr("penstock.wire.operations.UNKNOWN_TOPIC_MS", 200)
