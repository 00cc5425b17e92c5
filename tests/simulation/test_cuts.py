"""Two of three nodes that cannot reach each other: how long partitions take no writes, on virtual time.

Each of the two still reaches the third, and every client reaches all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.sim import swarm
from penstock.sim.plans import plan_for

CUT_MS = 60_000
# The session, the look that ends it, and what clients wait before they try again.
WITHOUT_WRITES_MAX_MS = 12_000


@pytest.mark.parametrize("case", ["with the controller", "without the controller", "one way"])
def test_two_nodes_cut_from_each_other_cost_a_session_of_writes(case: str) -> None:
    plan = plan_for(2, seconds=CUT_MS / 1000, nodes=3)
    run = swarm.Run(
        replace(
            plan,
            data_dirs=1,
            partitions=6,
            producers=1,
            one_shot_producers=0,
            produce_interval_ms=400.0,
            clock_drift=0.0,
        )
    )
    run._begin()
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS)
    run.loop.run_for(10_000)
    machines = list(run.cluster.machines.values())
    (controller,) = [one for one in machines if one.node is not None and one.node.is_controller]
    others = [machine for machine in machines if machine is not controller]
    one, other = (controller, others[0]) if case == "with the controller" else others
    led = [
        hosted
        for machine in (one, other)
        if machine.node is not None
        for hosted in machine.node.broker.partitions
        if hosted.is_leader and hosted.topic == "orders"
    ]
    assert led, "nothing would be interrupted"
    run.fabric.cut(one.host, other.host)
    if case != "one way":
        run.fabric.cut(other.host, one.host)

    began_ms = run.loop.now_ms
    counts = {producer: producer.acknowledged for producer in run.producers}
    last_ms = dict.fromkeys(run.producers, began_ms)
    longest_ms = 0.0
    while run.loop.now_ms < began_ms + CUT_MS:
        run.loop.run_for(100)
        for producer in run.producers:
            longest_ms = max(longest_ms, run.loop.now_ms - last_ms[producer])
            if producer.acknowledged != counts[producer]:
                counts[producer], last_ms[producer] = producer.acknowledged, run.loop.now_ms
    assert longest_ms < WITHOUT_WRITES_MAX_MS
    run.fabric.mend_all()
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()
