"""Markers that come twice, or late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.partition.produced_batch import Appended
from penstock.broker.transactions import marker_writer
from penstock.broker.transactions.marker_writer import MarkerWriter
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from penstock.protocol.records import Marker


class FakePartition:
    """A partition that takes every marker, and commits it when the test says so."""

    topic, topic_id, index = "orders", b"1" * 16, 0
    is_serving = True
    replication = SimpleNamespace(has_established=True)
    log = SimpleNamespace(log_end_offset=100)

    def __init__(self) -> None:
        self.leader_epoch = 1
        self.error = ErrorCode.NONE
        self.markers: list[tuple[Marker, int]] = []
        self.waiting: list[Any] = []

    def append_marker(
        self, marker: Marker, producer_id: int, producer_epoch: int, *, is_v2: bool
    ) -> Appended:
        if not self.error:
            self.markers.append((marker, producer_epoch))
        return Appended(self.error)

    def when_acknowledged(self, appended: Appended, done: Any, *, by_all: bool) -> None:
        self.waiting.append(done)

    def when_committed(self, offset: int, done: Any) -> None:
        assert offset == 100
        self.waiting.append(done)


class Scene:
    def __init__(self) -> None:
        self.partition = FakePartition()
        self.answers: list[WriteTxnMarkersResponse] = []
        partitions: Any = SimpleNamespace(get=lambda topic, index: self.partition)
        nothing: Any = SimpleNamespace(cancel=lambda *_, **__: None)
        self.writer = MarkerWriter(
            partitions,
            nothing,
            nothing,
            nothing,
            image=lambda: nothing,
            is_serving=lambda: True,
        )

    def write(
        self,
        number: int,
        *,
        coordinator_epoch: int = 5,
        is_commit: bool = True,
        topic_id: bytes = FakePartition.topic_id,
    ) -> None:
        marker = WritableTxnMarker(
            producer_id=7,
            producer_epoch=0,
            transaction_result=is_commit,
            topics=[WritableTxnMarkerTopic(name="orders", partition_indexes=[0], topic_id=topic_id)],
            coordinator_epoch=coordinator_epoch,
            number=number,
        )
        self.writer.write(WriteTxnMarkersRequest(markers=[marker]), self.answers.append)

    @property
    def written(self) -> int:
        return len(self.partition.markers)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_marker_that_comes_again_is_not_written_again_and_waits_for_the_first(scene: Scene) -> None:
    scene.write(1)
    scene.write(1)
    assert (scene.written, scene.answers) == (1, [])
    for done in scene.partition.waiting:
        done(ErrorCode.NONE)
    assert [answer.markers[0].topics[0].partitions[0].error_code for answer in scene.answers] == [0, 0]


def test_a_delayed_marker_does_not_end_the_next_transaction(scene: Scene) -> None:
    scene.write(1)
    scene.write(2, is_commit=False)
    scene.write(1)
    assert [marker.is_commit for marker, _ in scene.partition.markers] == [True, False]


def test_a_marker_for_the_topic_of_before_does_not_end_a_transaction_in_its_successor(scene: Scene) -> None:
    scene.write(1, topic_id=b"0" * 16)
    assert scene.written == 0
    error = scene.answers[0].markers[0].topics[0].partitions[0].error_code
    assert error == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    # An operator names no id.
    scene.write(1, topic_id=bytes(16))
    assert scene.written == 1


def test_the_next_coordinator_counts_from_the_beginning(scene: Scene) -> None:
    scene.write(9)
    scene.write(1, coordinator_epoch=6)
    assert scene.written == 2


def test_another_leader_may_have_removed_the_marker(scene: Scene) -> None:
    scene.write(1)
    scene.partition.leader_epoch += 2
    scene.write(1)
    assert scene.written == 2


def test_a_marker_that_was_refused_is_written_when_it_comes_again(scene: Scene) -> None:
    scene.partition.error = ErrorCode.NOT_ENOUGH_REPLICAS
    scene.write(1)
    scene.partition.error = ErrorCode.NONE
    scene.write(1)
    assert scene.written == 1


def test_markers_without_a_number_are_always_written(scene: Scene) -> None:
    scene.write(-1)
    scene.write(-1)
    assert scene.written == 2


def test_the_memory_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_writer, "WRITTEN_MAX", 1)
    scene.write(1)
    scene.partition.index = 1
    scene.write(1)
    scene.partition.index = 0
    scene.write(1)
    assert scene.written == 3
