"""`penstock transactions` against answers made up here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import Coordinator, FindCoordinatorResponse
from penstock.protocol.messages.topics import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from penstock.protocol.messages.transactions import (
    ActiveProducer,
    DescribedTransaction,
    DescribeProducersPartition,
    DescribeProducersResponse,
    DescribeProducersTopic,
    DescribeTransactionsResponse,
    ListedTransaction,
    ListTransactionsResponse,
    TransactionTopic,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersResponse,
)
from tests.cli.conftest import Outcome, Penstock
from tests.cli.fake_broker import FakeBroker

NOW_MS = time.time_ns() // 1_000_000
HOUR_MS = 3_600_000
METADATA, FIND_COORDINATOR, MARKERS, PRODUCERS, DESCRIBE, LIST = 3, 10, 27, 61, 65, 66

Ask = Callable[..., Outcome]


class Scene:
    """Two partitions of `orders`: one with a hanging transaction, one with a transaction of `etl`."""

    def __init__(self) -> None:
        self.listed = [("etl", 7, "Ongoing"), ("reports", 8, "Empty")]
        self.described: dict[str, DescribedTransaction] = {
            "etl": DescribedTransaction(
                transactional_id="etl",
                transaction_state="Ongoing",
                transaction_timeout_ms=60_000,
                transaction_start_time_ms=NOW_MS - 2 * HOUR_MS,
                producer_id=7,
                producer_epoch=3,
                topics=[TransactionTopic(topic="orders", partitions=[1])],
            )
        }
        self.producers = {
            0: [_producer(9, start=42, last_ms=NOW_MS - HOUR_MS)],
            1: [_producer(7, start=5, last_ms=NOW_MS - HOUR_MS), _producer(6, start=-1, last_ms=1)],
        }
        self.marker_error = ErrorCode.NONE

    @contextmanager
    def broker(self) -> Iterator[FakeBroker]:
        answers: dict[str, Any] = {
            f"api_{METADATA}": self._metadata,
            f"api_{FIND_COORDINATOR}": self._coordinator,
            f"api_{MARKERS}": self._markers,
            f"api_{PRODUCERS}": self._producers,
            f"api_{DESCRIBE}": self._describe,
            f"api_{LIST}": self._list,
        }
        with FakeBroker(**answers) as self.fake:
            yield self.fake

    def _port(self) -> int:
        return int(self.fake.bootstrap.rpartition(":")[2])

    def _metadata(self, request: Any) -> MetadataResponse:
        names = ["orders"] if request.topics is None else [topic.name for topic in request.topics]
        return MetadataResponse(
            brokers=[MetadataResponseBroker(node_id=1, host="127.0.0.1", port=self._port())],
            controller_id=1,
            topics=[
                MetadataResponseTopic(
                    name=name,
                    topic_id=bytes([1]) * 16,
                    partitions=[
                        MetadataResponsePartition(partition_index=number, leader_id=1, leader_epoch=0)
                        for number in (0, 1)
                    ],
                )
                if name == "orders"
                else MetadataResponseTopic(name=name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                for name in names
            ],
        )

    def _coordinator(self, request: Any) -> FindCoordinatorResponse:
        assert request.key_type == 1
        found = Coordinator(
            key=request.coordinator_keys[0],
            node_id=1,
            host="127.0.0.1",
            port=self._port(),
            error_message=None,
        )
        return FindCoordinatorResponse(coordinators=[found])

    def _list(self, request: Any) -> ListTransactionsResponse:
        found = [
            ListedTransaction(transactional_id=name, producer_id=producer_id, transaction_state=state)
            for name, producer_id, state in self.listed
            if not request.producer_id_filters or producer_id in request.producer_id_filters
            if not request.state_filters or state in request.state_filters
        ]
        return ListTransactionsResponse(transaction_states=found)

    def _describe(self, request: Any) -> DescribeTransactionsResponse:
        name = request.transactional_ids[0]
        unknown = DescribedTransaction(transactional_id=name, error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
        return DescribeTransactionsResponse(transaction_states=[self.described.get(name, unknown)])

    def _producers(self, request: Any) -> DescribeProducersResponse:
        return DescribeProducersResponse(
            topics=[
                DescribeProducersTopic(
                    name=topic.name,
                    partitions=[
                        DescribeProducersPartition(
                            partition_index=number, active_producers=self.producers[number]
                        )
                        for number in topic.partition_indexes
                    ],
                )
                for topic in request.topics
            ]
        )

    def _markers(self, request: Any) -> WriteTxnMarkersResponse:
        marker = request.markers[0]
        return WriteTxnMarkersResponse(
            markers=[
                WritableTxnMarkerResult(
                    producer_id=marker.producer_id,
                    topics=[
                        WritableTxnMarkerTopicResult(
                            name=topic.name,
                            partitions=[
                                WritableTxnMarkerPartitionResult(
                                    partition_index=number, error_code=self.marker_error
                                )
                                for number in topic.partition_indexes
                            ],
                        )
                        for topic in marker.topics
                    ],
                )
            ]
        )


def _producer(producer_id: int, *, start: int, last_ms: int) -> ActiveProducer:
    return ActiveProducer(
        producer_id=producer_id,
        producer_epoch=3,
        last_sequence=4,
        last_timestamp=last_ms,
        coordinator_epoch=-1,
        current_txn_start_offset=start,
    )


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def ask(penstock: Penstock, scene: Scene) -> Iterator[Ask]:
    with scene.broker() as broker:

        def invoke(*words: str, code: int = 0) -> Outcome:
            # Options may follow a command only, and `list` is the default.
            named = words or ("list",)
            outcome = penstock("transactions", *named, "--bootstrap", broker.bootstrap)
            assert outcome.code == code, outcome
            return outcome

        yield invoke


def markers(scene: Scene) -> list[Any]:
    return [marker for request in scene.fake.asked for marker in getattr(request, "markers", ())]


def test_transactions_are_listed(ask: Ask) -> None:
    assert ask().rows == [
        ["TRANSACTIONAL-ID", "STATE", "PRODUCER-ID", "COORDINATOR"],
        ["etl", "Ongoing", "7", "1"],
        ["reports", "Empty", "8", "1"],
    ]
    assert [each["state"] for each in ask("list", "--state", "ongoing", "--json").json] == ["Ongoing"]
    assert [each["transactional_id"] for each in ask("list", "--producer-id", "8", "--json").json] == [
        "reports"
    ]


def test_filters_go_to_the_broker(ask: Ask, scene: Scene) -> None:
    # The fake one does not filter by time; ids without an open transaction are left out here.
    assert [
        each["state"] for each in ask("list", "--open-for", "30s", "--pattern", "e.*", "--json").json
    ] == ["Ongoing"]
    assert scene.fake.asked[-1].duration_filter == 30_000


def test_a_pattern_is_matched_here_and_a_bad_one_refused(ask: Ask) -> None:
    assert [each["transactional_id"] for each in ask("list", "--pattern", "e.*", "--json").json] == ["etl"]
    assert "'(' is not a regular expression" in ask("list", "--pattern", "(", code=2).err


def test_a_transaction_is_described(ask: Ask) -> None:
    outcome = ask("describe", "etl")
    assert "etl  Ongoing  producer 7 epoch 3  timeout 60s  open for 2h" in outcome.out
    assert outcome.rows[-1] == ["orders", "1"]
    document = ask("describe", "etl", "--json").json
    assert document["partitions"] == [{"topic": "orders", "partition": 1}]
    assert document["timeout_ms"] == 60_000


def test_a_transaction_that_has_ended_is_not_open_for_any_time(ask: Ask, scene: Scene) -> None:
    scene.described["etl"].transaction_state = "CompleteCommit"
    scene.described["etl"].topics = []
    assert "open for" not in ask("describe", "etl").out
    document = ask("describe", "etl", "--json").json
    assert (document["started"], document["open_ms"]) == (None, None)


def test_an_unknown_id_is_an_error_that_suggests_a_near_one(ask: Ask) -> None:
    assert "did you mean reports?" in ask("describe", "report", code=1).err
    assert "see `penstock transactions list`" in ask("describe", "nothing-like-it", code=1).err


def test_a_transaction_without_a_coordinator_is_hanging(ask: Ask) -> None:
    outcome = ask("find-hanging", code=1)
    assert [row[:5] for row in outcome.rows[1:]] == [["orders", "0", "42", "9", "3"]]
    document = ask("find-hanging", "--topic", "orders", "--partition", "0", "--json", code=1).json
    assert [(each["start_offset"], each["transactional_id"]) for each in document] == [(42, None)]


@pytest.mark.parametrize("state", ["CompleteAbort", "Empty"])
def test_a_transaction_that_its_coordinator_has_ended_is_hanging(ask: Ask, scene: Scene, state: str) -> None:
    scene.described["etl"].transaction_state = state
    found = ask("find-hanging", "--json", code=1).json
    assert [(each["partition"], each["transactional_id"]) for each in found] == [(0, None), (1, "etl")]


def test_a_transaction_in_other_partitions_only_is_hanging(ask: Ask, scene: Scene) -> None:
    scene.described["etl"].topics = []
    assert len(ask("find-hanging", "--json", code=1).json) == 2


def test_a_recent_transaction_is_not_hanging(ask: Ask) -> None:
    assert "no hanging transactions in 2 partitions" in ask("find-hanging", "--open-for", "2h").out


def test_a_hanging_transaction_is_aborted(ask: Ask, scene: Scene) -> None:
    words = ("abort", "orders", "--partition", "0", "--start-offset", "42")
    assert "pass --yes" in ask(*words, code=1).err
    assert markers(scene) == []
    assert "aborted the transaction of producer 9 in orders-0" in ask(*words, "--yes").out
    (marker,) = markers(scene)
    assert (marker.producer_id, marker.producer_epoch, marker.transaction_result) == (9, 3, False)
    assert marker.coordinator_epoch == 0
    assert ask(*words, "--yes", "--json").json["aborted"]["start_offset"] == 42


def test_an_open_transaction_is_not_aborted(ask: Ask, scene: Scene) -> None:
    outcome = ask("abort", "orders", "-p", "1", "--start-offset", "5", "--yes", code=1)
    assert "etl has it open" in outcome.err
    assert markers(scene) == []


def test_an_abort_that_the_leader_refuses_is_an_error(ask: Ask, scene: Scene) -> None:
    scene.marker_error = ErrorCode.INVALID_PRODUCER_EPOCH
    outcome = ask("abort", "orders", "-p", "0", "--start-offset", "42", "--yes", code=1)
    assert "invalid producer epoch" in outcome.err


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["abort", "orders", "-p", "0", "--start-offset", "41", "--yes"], "begins at offset 41 is open", 1),
        (["abort", "orders", "-p", "7", "--start-offset", "0", "--yes"], "has no partition 7", 1),
        (["abort", "order", "-p", "0", "--start-offset", "0", "--yes"], "did you mean orders?", 1),
        (["find-hanging", "--topic", "nothing"], "there is no topic nothing", 1),
        (["find-hanging", "--partition", "0"], "--partition needs --topic", 2),
        (["find-hanging", "--open-for", "soon"], "is not a time", 2),
        (["list", "--open-for", "99999999999999d"], "is too long", 2),
        (["describe", ""], "no transactional id is empty", 1),
        (["describe", "\x1b[31mred"], "transactional id \\x1b[31mred", 1),
        (["list", "--state", "Sleeping"], "is not a state", 2),
    ],
)
def test_wrong_words_are_explained(ask: Ask, words: list[str], said: str, code: int) -> None:
    assert said in ask(*words, code=code).err


def test_a_broker_without_transactions_is_named(penstock: Penstock, scene: Scene) -> None:
    with FakeBroker(api_3=scene._metadata) as scene.fake:
        outcome = penstock("transactions", "--bootstrap", scene.fake.bootstrap)
    assert outcome.code == 1
    assert "does not support ListTransactions" in outcome.err
