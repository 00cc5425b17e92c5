"""Brokers for these tests: one that most of them share, and the rules that hold for it whatever is sent.

After every test the shared broker must be running, answer others and have logged no traceback. One that died
is started again, so that a single bug does not fail every test behind it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.phrases import handshake
from tests.broker.wire import Closed, Wire
from tests.conftest import BROKER_SETTINGS
from tests.support import BrokerProcess

SETTINGS = BROKER_SETTINGS


class Node:
    """A broker process, its address, and what it logged during the present test."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process

    @property
    def address(self) -> tuple[str, int]:
        return self.process.host, self.process.port

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self, **options: float) -> Wire:
        return Wire(self.address, **options)  # type: ignore[arg-type]

    def revive(self) -> None:
        if not self._answers():
            self.process.kill()
            self.process.start()

    def assert_well(self) -> None:
        """It runs, it answers, and it has logged no traceback. The log begins anew."""
        answers = self._answers()
        log = self.process.log_tail()
        if "Traceback" in log:
            self.process.log_path.write_text("")
        assert answers, f"the broker ended by itself\n{log}"
        assert "Traceback" not in log, f"the broker logged a traceback\n{log}"

    def _answers(self) -> bool:
        if not self.process.is_running:
            return False
        try:
            with self.connect() as wire:
                return handshake(wire) > 0
        except (Closed, ConnectionError):
            return False


@pytest.fixture(scope="session")
def shared_node() -> Iterator[Node]:
    with BrokerProcess(SETTINGS) as process:
        node = Node(process)
        yield node
        node.revive()


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    shared_node.revive()
    yield shared_node
    shared_node.assert_well()


@pytest.fixture
def wire(node: Node) -> Iterator[Wire]:
    with node.connect() as wire:
        yield wire
