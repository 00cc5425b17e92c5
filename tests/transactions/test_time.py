"""Time-outs, the expiry of ids, and failovers at every step."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.transactions.settings import ABORTED_MAX, ABORTED_PARTITIONS_MAX
from tests.transactions.conversation import (
    CLASSIC_END,
    ID,
    ORDERS,
    PAYMENTS,
    TIMEOUT_MS,
    V2_END,
    Conversation,
)

NONE = ErrorCode.NONE
FENCED = ErrorCode.PRODUCER_FENCED
DAY_MS = 24 * 3600 * 1000
INTERVAL_MS = 10_000


@pytest.fixture
def talk() -> Conversation:
    return Conversation().load()


def test_a_transaction_that_is_open_for_too_long_is_aborted(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.sleep(TIMEOUT_MS - 1)
    assert talk.state == "Ongoing"
    talk.sleep(INTERVAL_MS + 1)
    assert talk.state == "PrepareAbort"
    (due,) = talk.write_all()
    assert (due.producer_epoch, due.is_commit) == (producer.epoch + 1, False)


def test_more_partitions_do_not_give_more_time(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS)
    talk.sleep(TIMEOUT_MS - 1)
    talk.add(producer, PAYMENTS)
    talk.sleep(INTERVAL_MS + 1)
    assert talk.state == "PrepareAbort"


@pytest.mark.parametrize("version", [CLASSIC_END, V2_END])
def test_a_commit_after_the_timeout_is_fenced(talk: Conversation, version: int) -> None:
    """Trap 14, KAFKA-20785."""
    producer = talk.started()
    talk.add(producer, is_v2=version >= V2_END)
    talk.sleep(TIMEOUT_MS + INTERVAL_MS)
    talk.write_all()
    assert talk.end(producer, commit=True, version=version).error is FENCED


def test_a_producer_can_go_on_after_a_timeout(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.sleep(TIMEOUT_MS + INTERVAL_MS)
    assert talk.end(producer, commit=False).error is ErrorCode.CONCURRENT_TRANSACTIONS
    talk.write_all()
    following = (producer.id, producer.epoch + 1)
    assert talk.end(producer, commit=False) == (NONE, following)
    assert talk.init(producer) == (NONE, following)


def test_many_timeouts_are_not_one_large_decision(talk: Conversation) -> None:
    count = 2 * ABORTED_MAX + 1
    for number in range(count):
        talk.add(talk.started(id=f"id-{number}"), id=f"id-{number}")
    written = len(talk.log)
    talk.sleep(TIMEOUT_MS + INTERVAL_MS)
    assert len(talk.log) == written + count
    assert len(talk.due) == count


def test_large_transactions_are_not_aborted_by_one_large_decision(talk: Conversation) -> None:
    wide = [(f"topic-{number}", 0) for number in range(ABORTED_PARTITIONS_MAX // 2)]
    for number in range(5):
        talk.add(talk.started(id=f"id-{number}"), *wide, id=f"id-{number}")
    talk.now_ms += TIMEOUT_MS + INTERVAL_MS
    changes = talk.coordinator.tick(talk.now_ms, talk.wall_ms).changes
    assert len(changes) == 2
    assert talk.coordinator.next_deadline_ms == talk.now_ms


def test_timeouts_that_cannot_be_written_are_not_tried_again_at_once(talk: Conversation) -> None:
    for number in range(2 * ABORTED_MAX):
        talk.add(talk.started(id=f"id-{number}"), id=f"id-{number}")
    talk.now_ms += TIMEOUT_MS + INTERVAL_MS
    decision = talk.coordinator.tick(talk.now_ms, talk.wall_ms)
    talk.coordinator.failed(decision, talk.now_ms, talk.wall_ms)
    deadline_ms = talk.coordinator.next_deadline_ms
    assert deadline_ms is not None and deadline_ms > talk.now_ms


def test_an_end_is_never_aborted(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.end(producer, commit=True)
    talk.sleep(10 * TIMEOUT_MS)
    assert talk.state == "PrepareCommit"
    talk.write_all()
    assert talk.state == "CompleteCommit"


# Expiry


def test_an_id_that_is_not_used_for_a_week_is_forgotten(talk: Conversation) -> None:
    producer = talk.transaction(talk.started())
    talk.sleep(7 * DAY_MS - 1)
    assert talk.state == "CompleteCommit"
    talk.sleep(3_600_001)
    assert talk.coordinator.all_keys() == []
    assert talk.add(producer) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert talk.restarted().coordinator.all_keys() == []


def test_an_id_with_a_transaction_is_not_forgotten(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.end(producer, commit=True)
    talk.sleep(30 * DAY_MS)
    assert talk.state == "PrepareCommit"


def test_nothing_is_forgotten_by_a_clock_that_is_not_trusted(talk: Conversation) -> None:
    talk.started()
    talk.sleep(30 * DAY_MS, may_expire=False)
    assert talk.state == "Empty"


def test_an_id_that_is_being_forgotten_is_not_used(talk: Conversation) -> None:
    producer = talk.started()
    talk.hold = True
    talk.sleep(7 * DAY_MS + 3_600_000)
    concurrent = ErrorCode.CONCURRENT_TRANSACTIONS
    assert talk.init().error is concurrent
    assert talk.add(producer) is concurrent
    assert talk.verify(producer) is concurrent
    assert talk.end(producer, commit=False).error is concurrent
    assert talk.end(producer, commit=False, version=CLASSIC_END).error is concurrent
    assert talk.coordinator.describe(ID).error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert talk.decided() is None
    talk.commit_all()
    talk.hold = False
    assert talk.init().error is NONE


def test_many_ids_are_forgotten_in_several_decisions(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.EXPIRED_MAX", 20)
    for number in range(20 + 5):
        talk.started(id=f"id-{number}")
    talk.wall_ms += 8 * DAY_MS
    talk.sleep(3_600_000)
    assert len(talk.coordinator.all_keys()) == 5
    talk.sleep(2_000)
    assert talk.coordinator.all_keys() == []


def test_forgetting_is_undone_when_it_cannot_be_written(talk: Conversation) -> None:
    producer = talk.started()
    talk.is_full = True
    talk.sleep(8 * DAY_MS)
    talk.is_full = False
    assert talk.add(producer) is NONE


# Failovers


def test_a_new_coordinator_writes_all_markers_again(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS, PAYMENTS)
    answer = talk.end(producer, commit=True)
    talk.write(talk.due[0], ORDERS)
    other = talk.restarted()
    (due,) = other.write_all()
    assert due.partitions == (ORDERS, PAYMENTS)
    assert (due.is_commit, due.producer_epoch) == (True, producer.epoch + 1)
    assert other.end(producer, commit=True) == answer


def test_an_open_transaction_has_the_rest_of_its_time_after_a_failover(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    talk.sleep(TIMEOUT_MS // 2)
    other = talk.restarted()
    other.sleep(TIMEOUT_MS // 2 - 1)
    assert other.state == "Ongoing"
    other.sleep(INTERVAL_MS + 1)
    assert other.state == "PrepareAbort"


@pytest.mark.parametrize("error_ms", [-30 * DAY_MS, 30 * DAY_MS])
def test_a_wrong_clock_gives_no_transaction_more_than_its_time(talk: Conversation, error_ms: int) -> None:
    talk.add(talk.started())
    talk.wall_ms += error_ms
    other = talk.restarted()
    other.sleep(TIMEOUT_MS + INTERVAL_MS)
    assert other.state == "PrepareAbort"


def test_an_addition_that_was_lost_with_the_coordinator_is_not_in_the_transaction(
    talk: Conversation,
) -> None:
    producer = talk.started()
    talk.add(producer, ORDERS)
    talk.hold = True
    talk.add(producer, PAYMENTS)
    assert talk.restarted().verify(producer, PAYMENTS) == {PAYMENTS: ErrorCode.TRANSACTION_ABORTABLE}


def test_the_state_survives_at_every_step(talk: Conversation) -> None:
    """Replaying the log gives the committed state, whenever it is done."""

    def compare() -> None:
        other = talk.restarted()
        for id in talk.coordinator.all_keys():
            assert other.decided(id) == talk.decided(id)
            assert other.coordinator.describe(id) == talk.coordinator.describe(id)

    producer = talk.started()
    for commit in (True, False):
        compare()
        talk.add(producer, ORDERS)
        talk.add(producer, PAYMENTS)
        compare()
        producer = talk.end(producer, commit=commit).producer
        compare()
        talk.write_all()
        compare()
    talk.add(producer)
    talk.init(producer)
    compare()
    talk.write_all()
    talk.init(producer)
    compare()
