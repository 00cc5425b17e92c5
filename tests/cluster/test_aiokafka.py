"""aiokafka against three brokers: everything it is put to against one, with three replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.contracts import (
    ManagingReplicatedTopics,
    Replicated,
    SeeingThreeBrokers,
    aiokafka,
    batches_from_the_leader,
    bootstrap,
    reference,
)
from tests.interop.admin_contract import DeletingRecords, ManagingConfigs
from tests.interop.groups_contract import ManagingGroups, Sharing, StayingStatic
from tests.interop.records_contract import AskingOffsets, Reading, Writing

__all__ = ["batches_from_the_leader", "bootstrap", "reference"]


@pytest.fixture(scope="module")
def client(shared_cluster: Cluster) -> Iterator[Replicated]:
    client = aiokafka(shared_cluster)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingOffsets):
    pass


class TestGroups(Sharing, StayingStatic, ManagingGroups):
    pass


class TestAdministration(ManagingReplicatedTopics, ManagingConfigs, DeletingRecords, SeeingThreeBrokers):
    pass
