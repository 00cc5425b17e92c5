"""kafka-python against the broker. Not in it: writing a header without a value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.adapters.isolated import IsolatedClient
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


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[IsolatedClient]:
    client = IsolatedClient("kafka_python", bootstrap)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingNewest):
    NULL_HEADERS = False


class TestGroups(
    Sharing, Cooperating, StayingStatic, ManagingGroups, DeletingGroups, AlteringCommits, DeletingCommits
):
    pass


class TestAdministration(ManagingTopics, ManagingConfigs, DeletingRecords, SeeingTheCluster):
    pass
