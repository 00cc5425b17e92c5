"""Rolling upgrades from a release without features: brokers register none, and controllers record none.

The nodes run this release's code, with what an older one lacks taken away: its broker sends no features, and its
controller drops those of others and raises no level.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.broker.membership.membership import Membership
from penstock.decision import Decision
from penstock.metadata import broker_registry, controller, features
from penstock.metadata.decided_state import DecidedState
from penstock.metadata.features import SUPPORTED_FEATURES, TRANSACTION_VERSION
from penstock.metadata.values import FeatureRange
from penstock.protocol.messages.brokers import BrokerHeartbeatRequest, BrokerRegistrationRequest
from penstock.protocol.schema import Message
from penstock.sim import swarm
from penstock.sim.plans import plan_for

NODES = (1, 2, 3)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The nodes of the older release, to be changed by the test; it counts from a node's next start."""
    nodes: set[int] = set()

    def supported(self: Membership) -> tuple[FeatureRange, ...]:
        return () if self._node_id in nodes else SUPPORTED_FEATURES

    handle = controller.Controller.handle

    def handled(self: controller.Controller, request: Message, *rest: Any, **options: Any) -> Decision[Any]:
        if self._decided.broker in nodes and isinstance(
            request, BrokerRegistrationRequest | BrokerHeartbeatRequest
        ):
            request.features = []
        return handle(self, request, *rest, **options)

    def raised(decided: DecidedState) -> None:
        if decided.broker not in nodes:
            features.raise_levels(decided)

    monkeypatch.setattr(Membership, "supported_features", property(supported))
    monkeypatch.setattr(controller.Controller, "handle", handled)
    monkeypatch.setattr(controller, "raise_levels", raised)
    monkeypatch.setattr(broker_registry, "raise_levels", raised)
    return nodes


class Upgrade:
    def __init__(self, seed: int, older: set[int]) -> None:
        self.older = older
        self.run = swarm.Run(replace(plan_for(seed, seconds=20, nodes=3), data_dirs=1, administers=False))
        self.run._begin()
        self.become_whole()

    def become_whole(self) -> None:
        run = self.run
        assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()

    def restart(self, node: int, *, is_older: bool, kill: bool = False) -> None:
        cluster, machine = self.run.cluster, self.run.cluster.machines[node]
        if kill:
            cluster.crash(machine)
        else:
            cluster.stop(machine)
        assert self.run.loop.run_until(lambda: not machine.is_running, 20_000)
        if is_older:
            self.older.add(node)
        else:
            self.older.discard(node)
        cluster.start(machine)

    def levels(self) -> list[int]:
        """On every node."""
        nodes = [machine.node for machine in self.run.cluster.machines.values()]
        return [
            each.image.features.get(TRANSACTION_VERSION, 0)
            for each in nodes
            if each is not None and each.is_ready
        ]

    def is_raised(self) -> bool:
        return self.levels() == [2, 2, 2]


def test_a_new_cluster_has_the_level_from_the_start(older: set[int]) -> None:
    assert Upgrade(3, older).is_raised()


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_the_level_is_raised_after_the_last_node_and_not_before(
    older: set[int], order: tuple[int, ...], kill: bool
) -> None:
    older.update(NODES)
    upgrade = Upgrade(3, older)
    for node in order:
        assert upgrade.levels() == [0, 0, 0]
        upgrade.restart(node, is_older=False, kill=kill)
        upgrade.become_whole()
        if node != order[-1]:
            upgrade.run.loop.run_for(10_000)
    assert upgrade.run.loop.run_until(upgrade.is_raised, swarm.LIVENESS_MS), upgrade.levels()
    upgrade.become_whole()


def test_a_node_that_goes_back_to_an_older_release_says_why_it_cannot_start(older: set[int]) -> None:
    upgrade = Upgrade(3, older)
    machine = upgrade.run.cluster.machines[3]
    # So that giving up is no violation.
    machine.is_harmed = True
    upgrade.restart(3, is_older=True)
    assert upgrade.run.loop.run_until(lambda: bool(machine.failure), swarm.LIVENESS_MS)
    assert "the cluster uses level 1 of penstock.compaction" in machine.failure
    upgrade.restart(3, is_older=False)
    upgrade.become_whole()
    assert upgrade.is_raised()
