"""kafka-python against three brokers: everything it is put to against one, with three replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.contracts import (
    ManagingReplicatedTopics,
    Replicated,
    SeeingThreeBrokers,
    batches_from_the_leader,
    bootstrap,
    kafka_python,
    reference,
)
from tests.interop.admin_contract import DeletingRecords, ManagingConfigs
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

__all__ = ["batches_from_the_leader", "bootstrap", "reference"]


@pytest.fixture(scope="module")
def client(shared_cluster: Cluster) -> Iterator[Replicated]:
    client = kafka_python(shared_cluster)
    yield client
    client.close()


class TestRecords(Writing, Reading, AskingNewest):
    NULL_HEADERS = False


class TestGroups(
    Sharing, Cooperating, StayingStatic, ManagingGroups, DeletingGroups, AlteringCommits, DeletingCommits
):
    pass


class TestAdministration(ManagingReplicatedTopics, ManagingConfigs, DeletingRecords, SeeingThreeBrokers):
    pass
