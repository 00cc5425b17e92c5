"""What a simulated run found out: numbers, and the one line that replays it.

The whole-cluster simulator and the simulators of single cores all answer with a ``Report``, so that one
command can run and show them. A run without a violation proves nothing if nothing happened in it: ``counts``
say how much did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class Report:
    # "cluster", or the name of a core.
    what: str
    seed: int
    # What was broken, in one line or with a traceback; None when nothing was.
    violation: str | None = None
    virtual_ms: int = 0
    events: int = 0
    # Equal for equal seeds, whatever the process.
    trace_hash: str = ""
    # How often what happened: commits, elections, crashes, ...
    counts: Mapping[str, int] = field(default_factory=dict)
    # The command that does this run again.
    replay: str = ""
    # The last lines that the nodes logged, for whoever looks into a violation.
    log: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.violation is None


# The simulators of single cores: penstock.sim.cores.<name>.run(seed).
CORES = ("raft", "replication", "controller")


def run_core(name: str, seed: int) -> Report:
    """One life of a core, whatever its own report looks like."""
    module = import_module(f"penstock.sim.cores.{name}")
    replay = f"penstock sim cores --core {name} --seed {seed}"
    try:
        told = module.run(seed)
    except AssertionError as violation:
        return Report(name, seed, violation=str(violation) or repr(violation), replay=replay)
    counts = dict(getattr(told, "counts", {}))
    for each in fields(told):
        value = getattr(told, each.name)
        if isinstance(value, int) and each.name not in ("seed", "events", "virtual_ms", "trace_hash"):
            counts[each.name] = value
    return Report(
        name,
        seed,
        virtual_ms=told.virtual_ms,
        events=told.events,
        trace_hash=str(getattr(told, "trace_hash", "")),
        counts=counts,
        replay=replay,
    )


def known_cores() -> list[str]:
    """Those that are there."""
    return [name for name in CORES if find_spec(f"penstock.sim.cores.{name}") is not None]
