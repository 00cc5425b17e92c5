"""Plans with no more in them than a planted bug needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.sim.plans import Plan, plan_for
from penstock.sim.swarm import Run

SEEDS = 8


def lean(seed: int, *, seconds: float, generation: int) -> Plan:
    """Three nodes without faults, one plain topic, and nothing that a generation adds."""
    return replace(
        plan_for(seed, seconds=seconds, nodes=3, generation=generation),
        faults=(),
        later_faults=(),
        fault_interval_ms=1_500.0,
        changed_settings=(),
        flushed_nodes=(),
        is_flushed=False,
        racks=0,
        members=0,
        static_members=0,
        partitions=1,
        producers=1,
        one_shot_producers=0,
        readers=1,
        administers=False,
        recreates=False,
        asks_by_time=False,
        restarts_all=False,
        clock_skew_ms=0,
        latency_ms=1.0,
        splits=0.0,
        produce_interval_ms=2_000.0,
        tellers=(),
        processors=(),
        impatience=0.0,
        lateness=0.0,
        data_dirs=1,
        cold_reads=0.0,
        evictions=0.0,
    )


def finds(plan: Callable[[int], Plan], what: str, *, first: int = 1) -> int | None:
    """The first seed that finds a violation that says one of these. Some begin at a seed that is quick."""
    for count in range(first, first + SEEDS):
        violation = Run(plan(count)).run().violation
        if violation is not None:
            assert any(each in violation for each in what.split("|")), violation
            return count
    return None
