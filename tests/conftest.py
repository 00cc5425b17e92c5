"""Fixtures for every test that talks to a running broker.

``broker`` is shared by the whole run: a test takes names of its own from ``unique`` and leaves the rest of
the cluster alone. With PENSTOCK_TEST_BOOTSTRAP=HOST:PORT the same tests run against a broker that is already
there, Apache Kafka for one (``python -m benchmarks.apache_kafka`` starts it).
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings

from penstock.machine import MachineFiles
from tests.accounting import Accounting
from tests.spark.session import spark as spark  # noqa: PLC0414  a fixture for every test
from tests.support import BrokerProcess
from tests.tls import broker as tls

# Warnings are errors (pyproject.toml), except those that client libraries give about themselves.
FOREIGN_WARNINGS = (
    # kafka-python reads its message schemas this way, when imported and at first use.
    "ignore:(read_text|open_text|contents) is deprecated:DeprecationWarning",
)

# How long an example takes says more about the machine than about the code. The rest is as Hypothesis has it, which
# with CI=true draws the same examples every time.
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Accounting())
    # Under nohup, and in some runners, SIGINT arrives ignored, and every process started here would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for foreign in FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", foreign)


@pytest.fixture(autouse=True)
def _files_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test's logs have left open, as their process would by ending.

    The tests are one process. Some thousand descriptors later there are clients in it, py4j for one, that wait with
    ``select``, which knows the first 1,024 only: the thread that takes Spark's calls of foreachBatch died of it.
    """
    made: list[MachineFiles] = []
    make = MachineFiles.__init__

    def remember(files: MachineFiles, *arguments: int, **named: int) -> None:
        make(files, *arguments, **named)
        made.append(files)

    monkeypatch.setattr(MachineFiles, "__init__", remember)
    yield
    for files in made:
        for file in list(files._open):
            file.close()
        while files._locks:
            os.close(files._locks.pop())


# Records of tests are of all times, and retention looks for old ones every five minutes by default: whichever test
# it then meets would lose them in the middle. Nor need a rebalance wait for latecomers.
BROKER_SETTINGS = {
    "log.retention.check.interval.ms": str(24 * 3_600_000),
    "group.initial.rebalance.delay.ms": "0",
}


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that somebody else started."""

    bootstrap: str


@pytest.fixture(scope="session")
def broker() -> Iterator[BrokerProcess | RunningBroker]:
    bootstrap = os.environ.get("PENSTOCK_TEST_BOOTSTRAP")
    if bootstrap:
        yield RunningBroker(bootstrap)
        return
    with BrokerProcess(BROKER_SETTINGS) as process:
        yield process


@pytest.fixture(scope="session")
def bootstrap(broker: BrokerProcess | RunningBroker) -> str:
    return broker.bootstrap


@pytest.fixture(scope="session")
def tls_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tls.TlsBroker]:
    """As ``broker``, with TLS only."""
    with tls.tls_broker(tmp_path_factory.mktemp("tls"), BROKER_SETTINGS) as running:
        yield running


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Make names of topics and groups that no other test, and no earlier run, has used."""
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:60].strip("-")
    run = uuid.uuid4().hex[:8]
    numbers = itertools.count(1)
    return lambda kind: f"{kind}-{test}-{run}-{next(numbers)}"
