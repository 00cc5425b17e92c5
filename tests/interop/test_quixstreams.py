"""State of quixstreams under exactly-once, killed: it is rebuilt from its compacted changelog."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.application import COMPACTING_SETTINGS, Application, everything, wait_until_compacted
from tests.interop.client import PATIENCE_S, Outgoing
from tests.interop.transactions import ISOLATIONS
from tests.interop.transactions_contract import PARTITIONS, ends
from tests.support import BrokerProcess, wait_until
from tests.tools import Missing, python_with, skip_or_fail

pytestmark = pytest.mark.interop_long

PROGRAM = Path(__file__).parent / "python" / "quixstreams_state.py"
PACKAGES = ("quixstreams==3.28.1",)
SOURCE, TARGET, GROUP = "source", "target", "counting"
CHANGELOG = f"changelog__{GROUP}--{SOURCE}--default"
KEYS = 37


class Counting:
    """The application, the records for it, and what it must then have counted."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.state_directory, self._log = directory / "state", directory / "log"
        self.client = ConfluentClient(bootstrap)
        for topic in (SOURCE, TARGET):
            self.client.create_topic(topic, PARTITIONS)
        self.written = 0
        self.expected: dict[str, list[int]] = defaultdict(list)
        try:
            self._python = python_with(*PACKAGES)
        except Missing as missing:
            skip_or_fail(missing)

    def run(self, *, record_ms: int = 0) -> Application:
        names = (self.bootstrap, GROUP, SOURCE, TARGET)
        return Application([self._python, PROGRAM, *names, self.state_directory, str(record_ms)], self._log)

    def write(self, count: int) -> None:
        records = []
        for number in range(self.written, self.written + count):
            key = str(number % KEYS)
            records.append(Outgoing(b"%d" % number, key=key.encode()))
            counted = self.expected[key]
            # From 1 to 10, and again.
            counted.append(len(counted) % 10 + 1)
        self.client.produce(SOURCE, records, idempotent=True)
        self.written += count

    def committed(self) -> int:
        return sum(self.client.committed(GROUP, SOURCE, range(PARTITIONS)).values())

    def counted(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        for record in everything(self.bootstrap, TARGET):
            assert record.key is not None and record.value is not None
            found[record.key.decode()].append(int(record.value))
        return found

    def has_open_transaction(self) -> bool:
        stable, end = (ends(self.client, TARGET, each) for each in ISOLATIONS)
        return stable != end

    def is_inside_a_transaction(self) -> bool:
        return self.has_open_transaction() and 2000 <= self.committed() < self.written


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Counting]:
    with BrokerProcess(COMPACTING_SETTINGS) as broker:
        counting = Counting(broker.bootstrap, tmp_path)
        yield counting
        counting.client.close()


def test_the_state_is_rebuilt_from_its_compacted_changelog(counting: Counting) -> None:
    counting.write(5000)
    with counting.run(record_ms=1) as running:
        running.kill_when(counting.is_inside_a_transaction, "another transaction")
    shutil.rmtree(counting.state_directory)
    wait_until_compacted(counting.bootstrap, CHANGELOG)
    counting.write(500)

    with counting.run() as running:
        wait_until(
            lambda: counting.committed() == counting.written and not counting.has_open_transaction(),
            2 * PATIENCE_S,
            "every input is processed",
        )
        running.kill()

    assert counting.counted() == counting.expected
