"""InitProducerId: fencing, retries after a lost answer, and epochs that run out."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.transactions.changes import Identity
from penstock.transactions.settings import ID_BYTES_MAX, TransactionSettings
from tests.transactions.conversation import CLASSIC_END, ORDERS, V2_END, Conversation

NONE = ErrorCode.NONE
FENCED = ErrorCode.PRODUCER_FENCED
CONCURRENT = ErrorCode.CONCURRENT_TRANSACTIONS
LAST = 32_766
EPOCH_MAX = 32_767


@pytest.fixture
def talk() -> Conversation:
    return Conversation().load()


def test_a_new_producer_fences_the_one_before(talk: Conversation) -> None:
    old = talk.started()
    new = talk.started()
    assert new == (old.id, old.epoch + 1)
    assert talk.add(old) is FENCED
    assert talk.end(old, commit=True).error is FENCED
    assert talk.init(old).error is FENCED


def test_a_new_producer_aborts_the_open_transaction_first(talk: Conversation) -> None:
    old = talk.started()
    talk.add(old, is_v2=False)
    assert talk.init().error is CONCURRENT
    assert talk.state == "PrepareAbort"
    assert talk.init().error is CONCURRENT
    (due,) = talk.write_all()
    # The markers fence the old producer in the partitions.
    assert (due.producer_epoch, due.is_commit, due.is_v2) == (old.epoch + 1, False, True)
    assert talk.init() == (NONE, (old.id, old.epoch + 2))


@pytest.mark.parametrize("version", [CLASSIC_END, V2_END])
@pytest.mark.parametrize("commit", [True, False])
def test_a_producer_that_another_one_aborted_is_fenced_at_once(
    talk: Conversation, version: int, commit: bool
) -> None:
    old = talk.started()
    talk.add(old, is_v2=version >= V2_END)
    talk.init()
    talk.write_all()
    # Before the new producer comes back.
    assert talk.end(old, commit=commit, version=version).error is FENCED
    assert talk.init(old).error is FENCED
    assert talk.add(old) is FENCED


def test_a_zombie_cannot_abort_the_transaction_of_its_successor(talk: Conversation) -> None:
    old = talk.started()
    new = talk.started()
    talk.add(new)
    assert talk.init(old).error is FENCED
    assert talk.init(Identity(old.id + 9, 0)).error is FENCED
    assert talk.state == "Ongoing"


def test_a_producer_may_take_its_next_epoch(talk: Conversation) -> None:
    producer = talk.started()
    assert talk.init(producer) == (NONE, (producer.id, 1))
    assert talk.add(producer) is FENCED


def test_a_producer_may_abort_by_taking_its_next_epoch(talk: Conversation) -> None:
    producer = talk.started()
    talk.add(producer)
    assert talk.init(producer).error is CONCURRENT
    talk.write_all()
    assert talk.init(producer) == (NONE, (producer.id, 1))
    assert talk.add(Identity(producer.id, 1)) is NONE


# Trap 15


@pytest.mark.parametrize("fails_over", [False, True])
def test_a_lost_answer_is_repeated(talk: Conversation, fails_over: bool) -> None:
    producer = talk.started()
    answer = talk.init(producer)
    for _ in range(3):
        if fails_over:
            talk = talk.restarted()
        assert talk.init(producer) == answer
    # Once the producer has used its new epoch, nobody can be waiting for the answer.
    assert talk.add(answer.producer) is NONE
    assert talk.init(producer).error is FENCED
    assert talk.state == "Ongoing"


@pytest.mark.parametrize("fails_over", [False, True])
def test_a_lost_answer_with_a_new_producer_id_is_repeated(talk: Conversation, fails_over: bool) -> None:
    producer = talk.exhausted()
    answer = talk.init(producer)
    assert answer.error is NONE and answer.producer.epoch == 0 and answer.producer.id != producer.id
    if fails_over:
        talk = talk.restarted()
    assert talk.init(producer) == answer
    assert talk.init(Identity(producer.id, LAST - 1)).error is FENCED


def test_a_lost_answer_to_an_id_that_had_expired_is_repeated(talk: Conversation) -> None:
    stranger = Identity(5, 17)
    answer = talk.init(stranger)
    assert answer.error is NONE and answer.producer.epoch == 0
    assert talk.restarted().init(stranger) == answer


def test_a_new_producer_takes_the_lost_answer_away(talk: Conversation) -> None:
    producer = talk.started()
    talk.init(producer)
    talk.started()
    assert talk.init(producer).error is FENCED


@pytest.mark.parametrize("fails_over", [False, True])
def test_init_after_a_lost_answer_to_end_txn_gives_the_epoch_of_that_answer(
    talk: Conversation, fails_over: bool
) -> None:
    producer = talk.started()
    following = talk.transaction(producer)
    if fails_over:
        talk = talk.restarted()
    assert talk.init(producer) == (NONE, following)


# Exhausted epochs


def test_a_new_producer_after_the_last_epoch_gets_a_new_producer_id(talk: Conversation) -> None:
    producer = talk.exhausted()
    answer = talk.init()
    assert answer.error is NONE and answer.producer.id != producer.id and answer.producer.epoch == 0
    assert talk.init(producer).error is FENCED


def test_no_producer_has_the_epoch_that_only_fences(talk: Conversation) -> None:
    producer = talk.exhausted()
    talk.add(producer)
    assert talk.init().error is CONCURRENT
    assert talk.write_all()[0].producer_epoch == EPOCH_MAX
    fence = Identity(producer.id, EPOCH_MAX)
    assert talk.producer == fence
    assert talk.add(fence) is FENCED
    assert talk.end(fence, commit=False).error is FENCED
    assert talk.end(fence, commit=False, version=CLASSIC_END).error is FENCED
    new = talk.init()
    assert new.error is NONE and new.producer.epoch == 0


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("fails_over", [False, True])
def test_the_last_epoch_ends_with_a_new_producer_id_in_v2(
    talk: Conversation, commit: bool, fails_over: bool
) -> None:
    producer = talk.exhausted()
    talk.add(producer)
    answer = talk.end(producer, commit=commit)
    assert answer.error is NONE and answer.producer.epoch == 0 and answer.producer.id != producer.id
    # The new producer id is in use before the coordinator has finished the old one.
    assert talk.add(answer.producer) is CONCURRENT
    assert talk.end(answer.producer, commit=False).error is CONCURRENT
    assert talk.init(answer.producer).error is CONCURRENT
    if fails_over:
        talk = talk.restarted()
    (due,) = talk.write_all()
    assert (due.producer_id, due.producer_epoch) == (producer.id, EPOCH_MAX)
    assert talk.end(producer, commit=commit) == answer
    assert talk.add(answer.producer, ORDERS) is NONE


def test_the_last_epoch_of_a_classic_client_can_commit(talk: Conversation) -> None:
    producer = talk.exhausted()
    talk.transaction(producer, version=CLASSIC_END)
    talk.transaction(producer, version=CLASSIC_END)
    assert talk.producer == producer


def test_an_empty_abort_in_the_last_epoch_gives_a_new_producer_id(talk: Conversation) -> None:
    producer = talk.exhausted()
    answer = talk.end(producer, commit=False)
    assert answer.error is NONE and answer.producer.epoch == 0
    assert talk.end(producer, commit=False) == answer


def test_a_timeout_in_the_last_epoch_leaves_a_way_out(talk: Conversation) -> None:
    """KAFKA-20090: the client must not get the epoch that only fences."""
    producer = talk.exhausted()
    talk.add(producer)
    talk.sleep(80_000)
    talk.write_all()
    assert talk.producer == (producer.id, EPOCH_MAX)
    assert talk.end(producer, commit=True).error is FENCED
    answer = talk.end(producer, commit=False)
    assert answer.error is NONE and answer.producer.epoch == 0
    assert talk.end(producer, commit=False) == answer
    assert talk.init(producer) == answer
    assert talk.add(answer.producer) is NONE


def test_a_producer_id_that_is_missing_is_asked_for_again(talk: Conversation) -> None:
    assert talk.init(has_id=False).error is CONCURRENT
    producer = talk.exhausted()
    assert talk.init(has_id=False).error is CONCURRENT
    assert talk.init(producer, has_id=False).error is CONCURRENT
    assert talk.end(producer, commit=False, has_id=False).error is CONCURRENT
    talk.add(producer)
    assert talk.end(producer, commit=True, has_id=False).error is CONCURRENT
    assert talk.end(producer, commit=True, version=CLASSIC_END, has_id=False).error is NONE


# Wrong requests


def test_a_timeout_must_be_positive_and_within_the_limit(talk: Conversation) -> None:
    error = ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert talk.init(timeout_ms=900_001).error is error
    assert talk.init(timeout_ms=0).error is error
    assert talk.init(timeout_ms=-1).error is error
    assert talk.init(timeout_ms=900_000).error is NONE
    small = Conversation(TransactionSettings(timeout_ms_max=10)).load()
    assert small.init(timeout_ms=11).error is error


def test_half_an_identity_is_refused(talk: Conversation) -> None:
    for expected in (Identity(-1, 0), Identity(0, -1), Identity(-2, 0), Identity(0, -2), Identity(-2, -2)):
        assert talk.init(expected).error is ErrorCode.INVALID_REQUEST


def test_an_id_has_a_name_of_limited_length(talk: Conversation) -> None:
    assert talk.init(id="").error is ErrorCode.INVALID_REQUEST
    assert talk.init(id=None).error is ErrorCode.INVALID_REQUEST
    assert talk.init(id="é" * (ID_BYTES_MAX // 2) + "x").error is ErrorCode.INVALID_REQUEST
    assert talk.init(id="é" * (ID_BYTES_MAX // 2)).error is NONE


def test_the_number_of_ids_is_limited(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.IDS_MAX", 2)
    talk.started(id="a")
    talk.started(id="b")
    assert talk.init(id="c").error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert not talk.coordinator.needs_producer_id("c", is_init=True)
    assert talk.init(id="a").error is NONE
