"""How long clients wait when something happens to one of three brokers that are under load.

The harms and how the time is taken are those of ``tests/cluster/failover.py``: a probe writes every 50 ms and
asks anew who leads whenever a write fails, so this is the cluster's part of an interruption. Cutting a node off
needs root (network namespaces); without it that row says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.chaos.ledger import Ledger
from tests.cluster.cluster import Cluster
from tests.cluster.failover import (
    controller_killed_s,
    create,
    leader_cut_off_s,
    leader_killed_s,
    leader_stopped_s,
    load,
)
from tests.cluster.network import Network, why_not

ROUNDS = 5
PARTITIONS = 6
TARGETS_S = {"leader_killed": 2.0, "leader_cut_off": 10.0, "controller_killed": 2.0}


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    missing = why_not()
    harms: dict[str, Callable[[Cluster], float]] = {
        "leader_stopped": lambda cluster: leader_stopped_s(cluster, "probed"),
        "leader_killed": lambda cluster: leader_killed_s(cluster, "probed"),
        "controller_killed": controller_killed_s,
    }
    if missing is None:
        harms["leader_cut_off"] = lambda cluster: leader_cut_off_s(cluster, "probed")
    result: dict[str, Any] = {"rounds": rounds}
    ledger = Ledger()
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if missing is None else None
        cluster = stack.enter_context(Cluster(3, network=network))
        create(cluster, "loaded", PARTITIONS)
        create(cluster, "probed", 1)
        with load(cluster, "loaded", PARTITIONS, ledger):
            for name, measure in harms.items():
                times = []
                for _ in range(rounds):
                    times.append(measure(cluster))
                    for topic in ("loaded", "probed"):
                        cluster.wait_in_sync(topic, deadline_s=120)
                result[f"{name}_median_s"] = round(statistics.median(times), 2)
                result[f"{name}_worst_s"] = round(max(times), 2)
        ledger.raise_violations()
    if missing is not None:
        result["leader_cut_off"] = f"skipped: {missing}"
    result["records_acknowledged_meanwhile"] = ledger.acknowledged_count
    result["targets_s"] = TARGETS_S
    result["met"] = all(result.get(f"{name}_worst_s", 0.0) <= target for name, target in TARGETS_S.items())
    return result
