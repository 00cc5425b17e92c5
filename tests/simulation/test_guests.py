"""A client whose rights are taken away never succeeds where that is known; and the check that finds it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.network.connection import Connection
from penstock.metadata.authorizer import Authorizer
from penstock.sim.plans import Plan
from penstock.sim.swarm import Run
from tests.simulation.test_planted import quiet


def visited(seed: int) -> Plan:
    """Nothing but a guest, whose rights come and go."""
    return replace(
        quiet(seed, 15),
        nodes=1,
        voters=1,
        replication_factor=1,
        min_in_sync=1,
        members=0,
        one_shot_producers=0,
        has_guest=True,
    )


def test_a_guest_is_let_in_and_out() -> None:
    report = Run(visited(1)).run()
    assert report.violation is None, report.violation
    assert report.counts["guest succeeded"] > 5
    assert report.counts["guest denied"] > 5
    assert report.counts["guest had no right"] > 5


def test_decisions_that_are_kept_when_the_acls_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a connection goes by what it was once allowed."""
    decide = Connection.decide

    def forgetful(self: Connection, authorizer: Any, *what: Any) -> bool:
        kept = self.decisions.copy()
        decision = decide(self, authorizer, *what)
        return decision or bool(kept.get(what[0] << 3 | what[1], {}).get(what[2]))

    monkeypatch.setattr(Connection, "decide", forgetful)
    violation = Run(visited(1)).run().violation
    assert violation is not None
    assert "the guest has no right" in violation


def test_acls_that_are_not_followed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a removed ACL stays in the index (CVE-2024-27309 was like this)."""
    follow = Authorizer.follow

    def adding_only(self: Authorizer, acls: Any) -> None:
        follow(self, {**self._acls, **acls})

    monkeypatch.setattr(Authorizer, "follow", adding_only)
    violation = Run(visited(1)).run().violation
    assert violation is not None
    assert "the guest has no right" in violation
