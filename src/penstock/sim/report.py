"""The result of a simulated run: a violation or none, counts, and the command line that replays it.

The whole-cluster simulator and the simulators of single cores all raise ``Violation`` and return a ``Report``, so
that one command can run and show them. A run without a violation proves nothing if nothing happened in it:
``counts`` show how much did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module


class Violation(AssertionError):
    """An invariant was broken."""


@dataclass(frozen=True, slots=True)
class Report:
    # "cluster", or the name of a core.
    what: str
    seed: int
    # The broken invariant, in one line or with a traceback; None when there is none.
    violation: str | None = None
    virtual_ms: int = 0
    events: int = 0
    # Equal for equal seeds, in every process.
    trace_hash: str = ""
    # Event counts: commits, elections, crashes, ...
    counts: Mapping[str, int] = field(default_factory=dict)
    # The command that repeats this run.
    replay: str = ""
    # The last lines that the nodes logged, to investigate a violation.
    log: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.violation is None


# The simulators of single cores: penstock.sim.cores.<name>.run(seed).
CORES = ("raft", "replication", "controller", "transactions")


def run_core(name: str, seed: int) -> Report:
    """Run one core. A failed assertion of the core itself is a violation too."""
    module = import_module(f"penstock.sim.cores.{name}")
    replay = f"penstock sim cores --core {name} --seed {seed}"
    try:
        report: Report = module.run(seed)
    except AssertionError as violation:
        return Report(name, seed, violation=str(violation) or repr(violation), replay=replay)
    return replace(report, replay=replay)


def known_cores() -> list[str]:
    return list(CORES)
