"""Batches that are held back until their transaction is verified: order, copies, cancels, limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.partition.produced_batch import NOT_VERIFIED, Appended
from penstock.broker.transactions import verification
from penstock.broker.transactions.coordinator_client import PartitionQuestion
from penstock.broker.transactions.verification import Verification
from penstock.model import TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import decode_header, encode_batch
from tests.support_files import FakeClock
from tests.virtual import VirtualSpawn

CLASSIC, V2 = 11, 12
TOPIC_ID = TopicId(b"1" * 16)


class FakeClient:
    """A coordinator that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[PartitionQuestion, Any]] = []

    def ask(self, question: PartitionQuestion, done: Any) -> None:
        self.asked.append((question, done))

    def answer(self, error: ErrorCode = ErrorCode.NONE) -> None:
        self.asked.pop(0)[1](error)


class FakePartition:
    """Takes what is verified, or continues an open transaction."""

    topic, topic_id, index = "orders", TOPIC_ID, 0

    def __init__(self) -> None:
        self.leader_epoch = 3
        self.is_deleted = False
        self.open: set[int] = set()
        self.appended: list[int] = []
        self.refused: list[tuple[int, ErrorCode]] = []

    def append(self, records: memoryview, *, is_verified: bool, **_: bool) -> Appended:
        header = decode_header(records)
        if header.producer_id not in self.open and not is_verified:
            return NOT_VERIFIED
        self.open.add(header.producer_id)
        self.appended.append(header.base_sequence)
        return Appended(ErrorCode.NONE, len(self.appended))

    def refuse(self, records: memoryview, error: ErrorCode) -> Appended:
        self.refused.append((decode_header(records).base_sequence, error))
        return Appended(error)


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.spawn = VirtualSpawn(self.clock)
        environment: Any = SimpleNamespace(clock=self.clock, spawn=self.spawn)
        self.client = FakeClient()
        client: Any = self.client
        self.verification = Verification(environment, client)
        self.partition = FakePartition()
        self.results: list[tuple[int, ErrorCode]] = []

    def produce(
        self, sequence: int, *, producer_id: int = 7, epoch: int = 0, version: int = CLASSIC
    ) -> Appended | None:
        batch = encode_batch(
            [(1, b"k", b"v", ())],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        hosted: Any = self.partition
        appended = self.verification.append(
            hosted,
            memoryview(batch),
            "payments",
            version,
            lambda appended: self.results.append((sequence, appended.error)),
            allow_zstd=True,
            by_all=True,
        )
        # The frame's buffer is used again after the turn.
        batch[:] = bytes(len(batch))
        self.verification.check()
        return appended

    def cancel(self, producer_id: int = 7, epoch: int = 0) -> None:
        hosted: Any = self.partition
        self.verification.cancel(hosted, producer_id, epoch)

    def run(self, ms: int) -> None:
        self.spawn.run_until(self.clock.now_ms() + ms)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_first_batch_waits_and_later_ones_wait_behind_it(scene: Scene) -> None:
    assert [scene.produce(0), scene.produce(1), scene.produce(2)] == [None, None, None]
    assert len(scene.client.asked) == 1
    assert scene.client.asked[0][0] == PartitionQuestion(
        "payments", 7, 0, "orders", TOPIC_ID, 0, verify_only=True
    )
    assert scene.partition.appended == []
    scene.client.answer()
    assert scene.partition.appended == [0, 1, 2]
    assert scene.results == [(0, ErrorCode.NONE), (1, ErrorCode.NONE), (2, ErrorCode.NONE)]


def test_once_the_transaction_is_open_nobody_is_asked(scene: Scene) -> None:
    scene.produce(0)
    scene.client.answer()
    assert scene.produce(1) == Appended(ErrorCode.NONE, 2)
    assert not scene.client.asked


def test_transactions_v2_add_the_partition(scene: Scene) -> None:
    scene.produce(0, version=V2)
    assert not scene.client.asked[0][0].verify_only


def test_another_producer_does_not_wait(scene: Scene) -> None:
    scene.produce(0)
    scene.partition.open.add(8)
    assert scene.produce(0, producer_id=8) is not None


def test_a_zombie_that_is_being_verified_does_not_hold_up_its_successor(scene: Scene) -> None:
    scene.produce(5, epoch=0)
    scene.produce(0, epoch=1)
    zombie, successor = scene.client.asked
    successor[1](ErrorCode.NONE)
    zombie[1](ErrorCode.INVALID_PRODUCER_EPOCH)
    assert scene.partition.appended == [0]
    assert scene.partition.refused == [(5, ErrorCode.INVALID_PRODUCER_EPOCH)]


@pytest.mark.parametrize("marker_epoch", [0, 1], ids=["classic", "v2, which raises the epoch"])
def test_a_marker_cancels_what_is_being_verified(scene: Scene, marker_epoch: int) -> None:
    scene.produce(0)
    scene.produce(1)
    scene.cancel(epoch=marker_epoch)
    scene.client.answer()
    assert scene.partition.appended == []
    assert scene.partition.refused == [(0, ErrorCode.INVALID_TXN_STATE), (1, ErrorCode.INVALID_TXN_STATE)]


def test_a_change_of_leader_makes_the_answer_worthless(scene: Scene) -> None:
    scene.produce(0)
    scene.partition.leader_epoch += 1
    scene.client.answer()
    assert scene.partition.refused == [(0, ErrorCode.NOT_LEADER_OR_FOLLOWER)]


def test_a_batch_whose_topic_is_deleted_while_it_is_verified_is_refused(scene: Scene) -> None:
    scene.produce(0)
    scene.partition.is_deleted = True
    scene.client.answer()
    assert scene.partition.appended == []
    assert scene.results == [(0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)]


def test_offsets_are_refused_when_their_partition_is_gone(scene: Scene) -> None:
    hosted: Any = scene.partition
    errors: list[ErrorCode] = []
    question = PartitionQuestion("payments", 7, 0, "__consumer_offsets", TOPIC_ID, 0, verify_only=True)
    scene.verification.verify(hosted, question, errors.append)
    scene.partition.is_deleted = True
    scene.client.answer()
    assert errors == [ErrorCode.NOT_COORDINATOR]


@pytest.mark.parametrize(
    ("error", "version", "shown"),
    [
        (ErrorCode.NOT_COORDINATOR, CLASSIC, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, V2, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.TRANSACTION_ABORTABLE, 10, ErrorCode.INVALID_TXN_STATE),
        (ErrorCode.TRANSACTION_ABORTABLE, 11, ErrorCode.TRANSACTION_ABORTABLE),
        (ErrorCode.INVALID_PRODUCER_EPOCH, V2, ErrorCode.INVALID_PRODUCER_EPOCH),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, V2, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
    ],
)
def test_errors_are_told_as_the_client_knows_them(
    scene: Scene, error: ErrorCode, version: int, shown: ErrorCode
) -> None:
    scene.produce(0, version=version)
    scene.client.answer(error)
    assert scene.results == [(0, shown)]


@pytest.mark.parametrize(
    ("version", "shown"),
    [(CLASSIC, ErrorCode.NOT_ENOUGH_REPLICAS), (V2, ErrorCode.CONCURRENT_TRANSACTIONS)],
)
def test_while_the_previous_transaction_ends_the_question_is_repeated_for_a_while(
    scene: Scene, version: int, shown: ErrorCode
) -> None:
    scene.produce(0, version=version)
    asked = 0
    while not scene.results:
        asked += 1
        scene.client.answer(ErrorCode.CONCURRENT_TRANSACTIONS)
        scene.run(verification.CONCURRENT_RETRY_MS)
    assert asked == verification.CONCURRENT_MAX_MS // verification.CONCURRENT_RETRY_MS + 1
    assert scene.results == [(0, shown)]


def test_a_batch_that_is_held_while_the_previous_transaction_ends_is_appended_then(scene: Scene) -> None:
    scene.produce(0, version=V2)
    scene.client.answer(ErrorCode.CONCURRENT_TRANSACTIONS)
    scene.run(verification.CONCURRENT_RETRY_MS)
    scene.client.answer()
    assert scene.results == [(0, ErrorCode.NONE)]


def test_held_bytes_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small batches count for more than their bytes.
    monkeypatch.setattr(verification, "HELD_BYTES_MAX", 4_000)
    assert scene.produce(0) is None
    refused = scene.produce(1)
    assert refused is not None and refused.error == ErrorCode.NOT_ENOUGH_REPLICAS
    assert scene.partition.refused == [(1, ErrorCode.NOT_ENOUGH_REPLICAS)]


@pytest.mark.parametrize("size", [0, 60])
def test_bytes_that_are_no_batch_are_refused(scene: Scene, size: int) -> None:
    hosted: Any = scene.partition
    unanswered: list[Appended] = []
    appended = scene.verification.append(
        hosted, memoryview(bytes(size)), "payments", V2, unanswered.append, allow_zstd=True, by_all=True
    )
    assert appended is not None and appended.error


def test_offsets_are_verified_and_cancelled_likewise(scene: Scene) -> None:
    hosted: Any = scene.partition
    errors: list[ErrorCode] = []
    question = PartitionQuestion("payments", 7, 0, "__consumer_offsets", TOPIC_ID, 0, verify_only=True)
    scene.verification.verify(hosted, question, errors.append)
    scene.verification.verify(hosted, question, errors.append)
    scene.client.answer()
    scene.cancel()
    scene.client.answer()
    assert errors == [ErrorCode.NONE, ErrorCode.INVALID_TXN_STATE]
    scene.verification.check()
