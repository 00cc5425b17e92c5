"""How soon a planted bug of a core is found."""

from __future__ import annotations

from penstock.sim.cores.replication import World, run
from penstock.sim.report import Violation


def seeds_to_kill(mutant: type[World], first: int, seeds_max: int) -> int | None:
    """How many seeds it takes from ``first`` on; None when it lives on."""
    for count in range(1, seeds_max + 1):
        try:
            run(first + count - 1, mutant)
        except Violation:
            return count
    return None
