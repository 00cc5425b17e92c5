"""DescribeTransactions and ListTransactions: what is committed, and only that."""

from __future__ import annotations

import re

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.transactions.administration import STATE_NAMES
from tests.transactions.conversation import ORDERS, PAYMENTS, Conversation


@pytest.fixture
def talk() -> Conversation:
    return Conversation().load()


def ids(talk: Conversation, *states: str, **filters: object) -> list[str]:
    listed = talk.coordinator.list_transactions(states, wall_ms=talk.wall_ms, **filters)  # type: ignore[arg-type]
    return [transaction.transactional_id for transaction in listed]


def test_an_open_transaction_is_described_with_its_partitions(talk: Conversation) -> None:
    producer = talk.started()
    began_ms = talk.wall_ms
    talk.add(producer, PAYMENTS, ("orders", 7), ORDERS)
    talk.sleep(500)
    described = talk.coordinator.describe("transfers")
    assert described.error_code == ErrorCode.NONE
    assert described.transaction_state == "Ongoing"
    assert described.transaction_start_time_ms == began_ms
    assert described.transaction_timeout_ms == 60_000
    assert (described.producer_id, described.producer_epoch) == producer
    assert [(topic.topic, topic.partitions) for topic in described.topics] == [
        ("orders", [0, 7]),
        ("payments", [3]),
    ]


def test_what_is_not_committed_is_not_shown(talk: Conversation) -> None:
    talk.hold = True
    talk.init()
    assert talk.coordinator.describe("transfers").error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert ids(talk) == []
    talk.commit_all()
    talk.add(talk.producer)
    assert talk.state == "Empty"
    assert ids(talk, "Ongoing") == []
    talk.commit_all()
    assert ids(talk, "Ongoing") == ["transfers"]


def test_unknown_and_empty_ids_are_not_described(talk: Conversation) -> None:
    assert talk.coordinator.describe("nobody").error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert talk.coordinator.describe("").error_code == ErrorCode.INVALID_REQUEST


def test_the_list_can_be_filtered(talk: Conversation) -> None:
    first = talk.started(id="a-1")
    second = talk.started(id="a-2")
    talk.started(id="b-1")
    talk.add(first, id="a-1")
    talk.sleep(1_000)
    talk.add(second, id="a-2")
    talk.sleep(500)
    assert ids(talk) == ["a-1", "a-2", "b-1"]
    assert ids(talk, "Ongoing") == ["a-1", "a-2"]
    assert ids(talk, "Ongoing", "Empty") == ["a-1", "a-2", "b-1"]
    assert ids(talk, "CompleteCommit") == []
    assert ids(talk, producer_ids=[second.id, 999_999]) == ["a-2"]
    assert ids(talk, duration_ms=500) == ["a-1"]
    assert ids(talk, duration_ms=499) == ["a-1", "a-2"]
    assert ids(talk, matches=re.compile(".*-1").fullmatch) == ["a-1", "b-1"]


def test_open_transactions_are_found_by_producer_id(talk: Conversation) -> None:
    producer = talk.started()
    assert not talk.coordinator.is_open(producer.id)
    talk.add(producer)
    assert talk.coordinator.is_open(producer.id)
    talk.end(producer, commit=True)
    assert talk.coordinator.is_open(producer.id)
    talk.write_all()
    assert not talk.coordinator.is_open(producer.id)


def test_the_states_have_the_names_of_kafka() -> None:
    assert sorted(STATE_NAMES) == [
        "CompleteAbort",
        "CompleteCommit",
        "Dead",
        "Empty",
        "Ongoing",
        "PrepareAbort",
        "PrepareCommit",
        "PrepareEpochFence",
    ]
