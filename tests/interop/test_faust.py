"""A table of faust, killed: it is rebuilt from its compacted changelog when what was on disk is gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.application import (
    COMPACTING_SETTINGS,
    Application,
    everything,
    latest,
    wait_until_compacted,
)
from tests.interop.client import PATIENCE_S, Outgoing
from tests.support import BrokerProcess, wait_until
from tests.tools import Missing, python_with, skip_or_fail

pytestmark = pytest.mark.interop_long

PROGRAM = Path(__file__).parent / "python" / "faust_table.py"
PACKAGES = ("faust-streaming==0.15.3", "rocksdict==0.3.29")
SOURCE, APPLICATION = "source", "application"
CHANGELOG = f"{APPLICATION}-latest-changelog"
PARTITIONS = 3
KEYS = 40


class Table:
    """The application, the records for it, and what its table must then hold."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.data_directory, self._log = directory / "data", directory / "log"
        self._client = ConfluentClient(bootstrap)
        self._client.create_topic(SOURCE, PARTITIONS)
        self.written = 0
        self.expected: dict[str, str] = {}
        try:
            self._python = python_with(*PACKAGES)
        except Missing as missing:
            skip_or_fail(missing)

    def close(self) -> None:
        self._client.close()

    def run(self) -> Application:
        names = (self.bootstrap, APPLICATION, SOURCE)
        return Application([self._python, PROGRAM, *names, self.data_directory], self._log, answers=True)

    def write(self, count: int) -> None:
        """Values that tell when they were written; every seventh deletes."""
        records = []
        for number in range(self.written, self.written + count):
            key, value = str(number % KEYS), str(number) if number % 7 else ""
            records.append(Outgoing(value.encode(), key=key.encode()))
            if value:
                self.expected[key] = value
            else:
                self.expected.pop(key, None)
        self._client.produce(SOURCE, records, idempotent=True)
        self.written += count

    def committed(self) -> int:
        return sum(self._client.committed(APPLICATION, SOURCE, range(PARTITIONS)).values())

    def changelog(self) -> Mapping[str, str]:
        """The serializers of faust's tables are JSON."""
        return {
            json.loads(key): json.loads(value)
            for key, value in latest(everything(self.bootstrap, CHANGELOG)).items()
            if key is not None
        }

    def wait_until_committed(self, count: int) -> None:
        wait_until(lambda: self.committed() >= count, 2 * PATIENCE_S, f"{count} inputs are committed")


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with BrokerProcess(COMPACTING_SETTINGS) as broker:
        table = Table(broker.bootstrap, tmp_path)
        yield table
        table.close()


def test_the_table_is_rebuilt_from_its_compacted_changelog(table: Table) -> None:
    table.write(20_000)
    with table.run() as running:
        running.expect("running")
        table.wait_until_committed(2000)
        running.kill()
    assert table.committed() < table.written
    shutil.rmtree(table.data_directory)
    wait_until_compacted(table.bootstrap, CHANGELOG)

    # It goes on in the middle, with the table of then.
    with table.run() as running:
        running.expect("running")
        assert len(state(running)["table"]) > KEYS / 2
        table.wait_until_committed(table.written)
        assert state(running)["table"] == table.expected
        running.kill()
    assert table.changelog() == table.expected
    shutil.rmtree(table.data_directory)
    wait_until_compacted(table.bootstrap, CHANGELOG)

    # Nothing is left to process, so all it has is from the changelog.
    with table.run() as running:
        running.expect("running")
        assert state(running) == {"processed": 0, "table": table.expected}
        table.write(100)
        table.wait_until_committed(table.written)
        assert state(running) == {"processed": 100, "table": table.expected}
        running.kill()
    assert table.changelog() == table.expected


def state(running: Application) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(running.ask("state"))
    return answer
