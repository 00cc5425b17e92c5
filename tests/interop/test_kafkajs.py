"""KafkaJS against the broker.

Not in it: reading without a group, headers without a value, static members and cooperative rebalancing, the
newest record's offset, deleting single commits, incremental changes of settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.adapters.program import ProgramClient
from tests.interop.admin_contract import DeletingRecords, ManagingConfigs, ManagingTopics, SeeingTheCluster
from tests.interop.groups_contract import AlteringCommits, DeletingGroups, ManagingGroups, Sharing
from tests.interop.records_contract import AskingOffsets, Reading, Writing
from tests.tools import Missing, node_modules, skip_or_fail

SCRIPT = Path(__file__).parent / "js" / "client.js"


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ProgramClient]:
    try:
        packages = node_modules()
    except Missing as missing:
        skip_or_fail(missing)
    client = ProgramClient(["node", SCRIPT, packages], bootstrap)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingOffsets):
    NULL_HEADERS = False
    NONE_IS_LATEST = True


class TestGroups(Sharing, ManagingGroups, DeletingGroups, AlteringCommits):
    ASSIGNOR = "RoundRobinAssigner"


class TestAdministration(ManagingTopics, ManagingConfigs, DeletingRecords, SeeingTheCluster):
    pass
