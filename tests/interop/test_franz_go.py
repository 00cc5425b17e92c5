"""franz-go against the broker. It can do all that the contract asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.adapters.program import ProgramClient
from tests.interop.admin_contract import DeletingRecords, ManagingConfigs, ManagingTopics, SeeingTheCluster
from tests.interop.groups_contract import (
    AlteringCommits,
    Cooperating,
    DeletingCommits,
    DeletingGroups,
    ManagingGroups,
    Sharing,
    StayingStatic,
)
from tests.interop.records_contract import AskingNewest, Reading, Writing
from tests.tools import Missing, go_program, skip_or_fail

MODULE = Path(__file__).parent / "go"


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ProgramClient]:
    try:
        program = go_program(MODULE, "franz_go")
    except Missing as missing:
        skip_or_fail(missing)
    client = ProgramClient([program], bootstrap)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingNewest):
    NONE_IS_LATEST = True


class TestGroups(
    Sharing, Cooperating, StayingStatic, ManagingGroups, DeletingGroups, AlteringCommits, DeletingCommits
):
    pass


class TestAdministration(ManagingTopics, ManagingConfigs, DeletingRecords, SeeingTheCluster):
    pass
