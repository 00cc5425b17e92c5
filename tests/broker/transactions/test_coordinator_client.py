"""Questions about partitions of transactions, on their way to the coordinators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.transactions.coordinator_client import PartitionQuestion, TransactionCoordinatorClient
from penstock.decision import Decision
from penstock.model import TopicId
from penstock.protocol.errors import ErrorCode
from penstock.transactions.changes import Change, Partition
from tests.support_files import FakeClock
from tests.virtual import VirtualSpawn

ME = 1
IDS = {"orders": TopicId(b"1" * 16), "refunds": TopicId(b"2" * 16)}


class FakeCoordinator:
    """A coordinator that notes what it is asked, and refuses one producer."""

    refused_producer = 13

    def __init__(self) -> None:
        self.core = self
        self.added: list[list[Partition]] = []
        self.verified: list[list[Partition]] = []

    def add_partitions(
        self, transactional_id: str, producer_id: int, epoch: int, partitions: list[Partition], **_: Any
    ) -> Decision[Change]:
        self.added.append(partitions)
        decision: Decision[Change] = Decision()
        is_refused = producer_id == self.refused_producer
        decision.response = ErrorCode.PRODUCER_FENCED if is_refused else ErrorCode.NONE
        return decision

    def verify_partitions(
        self, transactional_id: str, producer_id: int, epoch: int, partitions: list[Partition]
    ) -> dict[Partition, ErrorCode]:
        self.verified.append(partitions)
        return {
            (topic, index): ErrorCode.TRANSACTION_ABORTABLE if index == 2 else ErrorCode.NONE
            for topic, index in partitions
        }

    def handle(self, decide: Any, answer: Any, unavailable: Any) -> None:
        answer(decide(self, 0, 0).response)


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.spawn = VirtualSpawn(self.clock)
        self.coordinator = FakeCoordinator()
        environment: Any = SimpleNamespace(clock=self.clock, spawn=self.spawn)
        coordinators: Any = SimpleNamespace(
            broker_of=lambda _: ME,
            of=lambda _: self.coordinator,
            knows_partition=lambda topic, topic_id, _: topic_id == IDS[topic],
        )
        nobody: Any = None
        self.client = TransactionCoordinatorClient(environment, nobody, coordinators, node_id=ME)  # type: ignore[arg-type]
        self.answers: list[tuple[str, int, ErrorCode]] = []

    def ask(
        self,
        topic: str,
        index: int,
        *,
        producer_id: int = 7,
        verify_only: bool = False,
        topic_id: TopicId | None = None,
    ) -> None:
        self.client.ask(
            PartitionQuestion("payments", producer_id, 0, topic, topic_id or IDS[topic], index, verify_only),
            lambda error: self.answers.append((topic, index, error)),
        )

    def run(self) -> None:
        self.spawn.run_until(self.clock.now_ms())


def test_the_partitions_of_a_transaction_are_added_together() -> None:
    scene = Scene()
    for index in range(3):
        scene.ask("orders", index)
    scene.ask("refunds", 0)
    # The same partition may be asked for twice: offsets of two groups.
    scene.ask("orders", 1)
    scene.run()
    assert scene.coordinator.added == [[("orders", 0), ("orders", 1), ("orders", 2), ("refunds", 0)]]
    assert scene.answers == [
        ("orders", 0, ErrorCode.NONE),
        ("orders", 1, ErrorCode.NONE),
        ("orders", 2, ErrorCode.NONE),
        ("refunds", 0, ErrorCode.NONE),
        ("orders", 1, ErrorCode.NONE),
    ]


def test_two_producers_of_an_id_get_their_own_answers() -> None:
    scene = Scene()
    scene.ask("orders", 0)
    scene.ask("orders", 0, producer_id=FakeCoordinator.refused_producer)
    scene.ask("orders", 0, verify_only=True)
    scene.run()
    assert scene.coordinator.added == [[("orders", 0)], [("orders", 0)]]
    assert scene.coordinator.verified == [[("orders", 0)]]
    assert [error for _, _, error in scene.answers] == [
        ErrorCode.NONE,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.NONE,
    ]


@pytest.mark.parametrize("verify_only", [False, True])
def test_a_topic_that_is_another_for_the_coordinator_does_not_stop_the_others(verify_only: bool) -> None:
    # Created again, which one of the two does not know yet.
    scene = Scene()
    scene.ask("orders", 0, verify_only=verify_only)
    scene.ask("refunds", 0, verify_only=verify_only, topic_id=TopicId(b"3" * 16))
    scene.ask("orders", 0, verify_only=verify_only, topic_id=TopicId(b"4" * 16))
    scene.run()
    assert (scene.coordinator.verified if verify_only else scene.coordinator.added) == [[("orders", 0)]]
    assert scene.answers == [
        ("orders", 0, ErrorCode.NONE),
        ("refunds", 0, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        ("orders", 0, ErrorCode.COORDINATOR_NOT_AVAILABLE),
    ]


def test_each_verified_partition_has_its_own_answer() -> None:
    scene = Scene()
    for index in range(3):
        scene.ask("orders", index, verify_only=True)
    scene.run()
    assert len(scene.coordinator.verified) == 1
    assert [error for _, _, error in scene.answers] == [
        ErrorCode.NONE,
        ErrorCode.NONE,
        ErrorCode.TRANSACTION_ABORTABLE,
    ]
