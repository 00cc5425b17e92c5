"""aiokafka against the broker.

Not in it: cooperative rebalancing, changing or deleting commits, deleting groups, the newest record's offset.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.adapters.isolated import IsolatedClient
from tests.interop.admin_contract import DeletingRecords, ManagingConfigs, ManagingTopics, SeeingTheCluster
from tests.interop.groups_contract import ManagingGroups, Sharing, StayingStatic
from tests.interop.records_contract import AskingOffsets, Reading, Writing


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[IsolatedClient]:
    client = IsolatedClient("aiokafka", bootstrap)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingOffsets):
    pass


class TestGroups(Sharing, StayingStatic, ManagingGroups):
    pass


class TestAdministration(ManagingTopics, ManagingConfigs, DeletingRecords, SeeingTheCluster):
    pass
