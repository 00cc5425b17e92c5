"""How long the faults go on, and the seed of the moments at which they strike.

PENSTOCK_CHAOS_SECONDS is the time that the longest test spends on faults (the others take shares of it); on a
slow machine they go on until as much has happened as they ask for. PENSTOCK_CHAOS_SEED repeats the choices of a
run; ``random`` makes new ones, as ``make chaos`` does, and without it they are those that found the last bug, so
that a change is judged by the same damage as the one before. Real processes are not deterministic: the same seed
gives the same moments and the same damage, not the same interleaving.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator

import pytest

SECONDS = "PENSTOCK_CHAOS_SECONDS"
SEED = "PENSTOCK_CHAOS_SEED"
SECONDS_DEFAULT = 40.0
PINNED_SEED = "1437705561"


@pytest.fixture(scope="session")
def chaos_seconds() -> float:
    return float(os.environ.get(SECONDS) or SECONDS_DEFAULT)


@pytest.fixture
def seed() -> int:
    wanted = os.environ.get(SEED) or PINNED_SEED
    return random.SystemRandom().randrange(2**32) if wanted == "random" else int(wanted)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seed = getattr(item, "funcargs", {}).get("seed")
    if report.failed and seed is not None:
        report.sections.append(
            ("chaos", f"repeat with {SEED}={seed} {SECONDS}={os.environ.get(SECONDS, '')}")
        )
    return report
