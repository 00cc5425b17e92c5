"""Markers on their way to the leaders of partitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.broker.transactions.marker_sender import RETRY_MS, MarkerSender
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from penstock.transactions.changes import Partition
from penstock.transactions.coordinator import MarkersDue
from tests.support_files import FakeClock
from tests.virtual import VirtualSpawn

ME = 1


class FakeCoordinator:
    """A coordinator that notes which markers are written."""

    has_resigned = False
    leader_epoch = 0

    def __init__(self) -> None:
        self.core = self
        self.due: list[MarkersDue] = []
        self.completed: set[int] = set()
        self.written: list[tuple[int, list[Partition]]] = []

    def take_markers(self) -> list[MarkersDue]:
        due, self.due = self.due, []
        return due

    def is_due(self, due: MarkersDue, partition: Partition) -> bool:
        return due.number not in self.completed

    def markers_written(self, due: MarkersDue, partitions: list[Partition], **_: int) -> None:
        self.written.append((due.number, partitions))

    def handle(self, decide: Any, answer: Any, unavailable: Any) -> None:
        decide(self, 0, 0)


class Scene:
    def __init__(self) -> None:
        clock = FakeClock()
        self.spawn = VirtualSpawn(clock)
        self.clock = clock
        self.requests: list[tuple[WriteTxnMarkersRequest, Any]] = []
        self.coordinator = FakeCoordinator()
        environment: Any = SimpleNamespace(clock=clock, spawn=self.spawn)
        partition = SimpleNamespace(leader=ME)
        topic = SimpleNamespace(partitions=[partition] * 10, id=b"1" * 16)
        image: Any = SimpleNamespace(has_partition=lambda *_: True, topics={"orders": topic})
        writer: Any = SimpleNamespace(write=lambda request, answer: self.requests.append((request, answer)))
        nobody: Any = None
        self.sender = MarkerSender(
            environment,
            nobody,
            writer,
            nobody,
            node_id=ME,  # type: ignore[arg-type]
            image=lambda: image,
            broker_epoch=lambda: 1,
        )

    def send(self, number: int, *partitions: int, transactional_id: str = "payments") -> None:
        places = tuple(("orders", index) for index in partitions)
        self.coordinator.due.append(MarkersDue(number, transactional_id, 7, number, True, places, is_v2=True))
        coordinator: Any = self.coordinator
        self.sender.send_due(coordinator)
        self.run()

    def answer(self) -> None:
        request, answer = self.requests.pop(0)
        answer(WriteTxnMarkersResponse.for_error(request, 2, ErrorCode.NONE))
        self.run()

    def run(self) -> None:
        self.spawn.run_until(self.clock.now_ms())


def test_markers_wait_while_a_request_to_their_leader_is_under_way() -> None:
    scene = Scene()
    scene.send(1, 0)
    scene.send(2, 1, 2, transactional_id="refunds")
    assert len(scene.requests) == 1
    scene.answer()
    scene.answer()
    assert scene.coordinator.written == [(1, [("orders", 0)]), (2, [("orders", 1), ("orders", 2)])]


def test_each_end_of_an_id_gets_its_own_markers() -> None:
    # The first end of the id was completed meanwhile: its topic was deleted, and is there again.
    scene = Scene()
    scene.send(1, 0, transactional_id="refunds")
    scene.send(2, 1)
    scene.send(3, 1, 2)
    scene.answer()
    scene.answer()
    assert (3, [("orders", 1), ("orders", 2)]) in scene.coordinator.written


def test_an_end_of_many_partitions_is_one_marker_and_each_partition_has_its_own_answer() -> None:
    scene = Scene()
    scene.send(1, 0, 1, 2)
    request, answer = scene.requests.pop(0)
    assert [[topic.partition_indexes for topic in marker.topics] for marker in request.markers] == [
        [[0, 1, 2]]
    ]
    response = WriteTxnMarkersResponse.for_error(request, 2, ErrorCode.NONE)
    response.markers[0].topics[0].partitions[1].error_code = ErrorCode.NOT_ENOUGH_REPLICAS
    answer(response)
    scene.run()
    assert scene.coordinator.written == [(1, [("orders", 0), ("orders", 2)])]
    scene.spawn.run_until(scene.clock.now_ms() + RETRY_MS)
    scene.answer()
    assert scene.coordinator.written[1:] == [(1, [("orders", 1)])]


def test_a_marker_that_is_no_longer_due_is_not_sent() -> None:
    # Its topic was deleted and created again, and may have the next transaction of the producer.
    scene = Scene()
    scene.send(1, 0, transactional_id="refunds")
    scene.send(2, 1)
    scene.coordinator.completed.add(2)
    scene.answer()
    assert scene.requests == []
    scene.send(3, 1)
    scene.answer()
    assert [number for number, _ in scene.coordinator.written] == [1, 3]
