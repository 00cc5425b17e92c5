"""Conversations of a transactional producer: both generations, lost answers, fences, moved coordinators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdResponse, ProduceResponse
from penstock.protocol.messages.transactions import (
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    TxnOffsetCommitResponse,
)
from penstock.protocol.records import decode_header
from penstock.wire.errors import (
    BrokerRefused,
    OutOfSequence,
    ProducerFenced,
    TimedOut,
    TransactionFailed,
    UnsupportedBroker,
    WireError,
)
from penstock.wire.transacting import State, WrongState
from penstock.wire.transactions import GroupMember
from tests.wire.fake import SILENCE
from tests.wire.fake_transactions import TransactionalCluster, Transactions

AT, OTHER = TopicPartition("orders", 0), TopicPartition("orders", 1)
PRODUCE, INIT, ADD_PARTITIONS, ADD_OFFSETS, END, TXN_OFFSETS = 0, 22, 24, 25, 26, 28
OF_TRANSACTIONS = (PRODUCE, INIT, ADD_PARTITIONS, ADD_OFFSETS, END, TXN_OFFSETS)

both = pytest.mark.parametrize("level", [1, 2], ids=["classic", "v2"])


def made(level: int, **settings: Any) -> Transactions:
    """A producer that has its id."""
    transactions = Transactions(TransactionalCluster(level), **settings)
    transactions.init()
    return transactions


def asked(cluster: TransactionalCluster) -> list[tuple[int, int]]:
    """(API, version) of the requests that matter here."""
    return [(key, version) for _, key, version, _ in cluster.asked if key in OF_TRANSACTIONS]


def headers(cluster: TransactionalCluster, at: TopicPartition = AT) -> list[tuple[int, int]]:
    """(epoch, sequence) of each batch of records."""
    found = [decode_header(data) for _, data in cluster.partition(at).batches]
    return [(each.producer_epoch, each.base_sequence) for each in found if not each.is_control]


def once(key: int, answer: Any) -> Callable[[int, int, int, Any], Any]:
    """Answer the first request of an API like this, then as usual."""
    left = [answer]

    def interfere(broker: int, asked: int, version: int, request: Any) -> Any:
        if asked != key or not left:
            return None
        first = left.pop()
        return first(request, version) if callable(first) else first

    return interfere


def refused(response: Any, code: ErrorCode) -> Callable[[Any, int], Any]:
    return lambda request, version: response.for_error(request, version, code)


def test_classic_transactions_name_each_partition_before_they_write_to_it() -> None:
    transactions = made(1)
    for value in (b"a", b"b"):
        transactions.begin()
        transactions.send(AT, value)
        transactions.commit()
    one = [(ADD_PARTITIONS, 3), (PRODUCE, 11), (END, 4)]
    assert asked(transactions.cluster) == [(INIT, 5), *one, *one]
    # One epoch, and the sequences go on.
    assert headers(transactions.cluster) == [(0, 0), (0, 1)]


def test_v2_adds_partitions_by_writing_and_gets_an_epoch_with_every_end() -> None:
    transactions = made(2)
    for end in (transactions.commit, transactions.abort, transactions.commit):
        transactions.begin()
        transactions.send(AT)
        transactions.flush()
        end()
    assert asked(transactions.cluster) == [(INIT, 5), *[(PRODUCE, 13), (END, 5)] * 3]
    assert headers(transactions.cluster) == [(0, 0), (1, 0), (2, 0)]
    assert transactions.transacting.identity == (1, 3)


def test_a_cluster_without_features_gets_classic_transactions() -> None:
    transactions = made(0)
    transactions.begin()
    transactions.send(AT)
    transactions.commit()
    assert (ADD_PARTITIONS, 3) in asked(transactions.cluster)


@both
def test_only_committed_transactions_are_read(level: int) -> None:
    transactions = made(level)
    for value, end in ((b"a", transactions.commit), (b"b", transactions.abort), (b"c", transactions.commit)):
        transactions.begin()
        for at in (AT, OTHER):
            transactions.send(at, value)
        transactions.flush()
        end()
    for at in (AT, OTHER):
        assert transactions.cluster.read(at) == [b"a", b"c"]


def test_a_classic_batch_waits_until_the_coordinator_knows_its_partition() -> None:
    transactions = made(1)
    transactions.cluster.interfere = once(ADD_PARTITIONS, SILENCE)
    transactions.begin()
    transactions.send(AT)
    for _ in range(10):
        for link in transactions.shell.can_act():
            transactions.shell.act(link)
        for link in transactions.shell.can_deliver():
            transactions.shell.deliver(link)
    assert (PRODUCE, 11) not in asked(transactions.cluster)
    # The coordinator falls silent, and is asked again.
    transactions.commit()
    assert len(headers(transactions.cluster)) == 1


@both
def test_a_transaction_without_records_asks_nobody(level: int) -> None:
    transactions = made(level)
    before = list(asked(transactions.cluster))
    for end in (transactions.commit, transactions.abort):
        transactions.begin()
        end()
    assert asked(transactions.cluster) == before


@both
def test_offsets_count_when_the_transaction_is_committed(level: int) -> None:
    transactions = made(level)
    cluster = transactions.cluster
    for offset, end in ((5, transactions.commit), (9, transactions.abort)):
        transactions.begin()
        transactions.send_offsets("etl", {AT: offset}, GroupMember(3, "member-1", "static-1"))
        transactions.send(OTHER)
        transactions.flush()
        assert cluster.offsets.get(("etl", AT)) == (None if offset == 5 else 5)
        end()
    assert cluster.offsets["etl", AT] == 5
    request = next(request for _, key, _, request in cluster.asked if key == TXN_OFFSETS)
    assert (request.generation_id, request.member_id, request.group_instance_id) == (
        3,
        "member-1",
        "static-1",
    )
    versions = {key: version for key, version in asked(cluster)}
    assert versions[TXN_OFFSETS] == (5 if level == 2 else 4)
    assert (ADD_OFFSETS in versions) == (level == 1)


@both
def test_an_abort_waits_for_what_is_in_flight_and_the_next_transaction_has_another_epoch(level: int) -> None:
    transactions = made(level)
    transactions.begin()
    transactions.send(AT)
    transactions.flush()
    for _ in range(3):
        transactions.send(AT)
    transactions.abort()
    ends = [number for number, (key, _) in enumerate(asked(transactions.cluster)) if key == END]
    writes = [number for number, (key, _) in enumerate(asked(transactions.cluster)) if key == PRODUCE]
    assert max(writes) < min(ends), "no batch arrives behind the end of its transaction"
    transactions.begin()
    transactions.send(AT, b"next")
    transactions.commit()
    assert headers(transactions.cluster)[-1] == (1, 0)
    assert transactions.cluster.read(AT) == [b"next"]


@both
@pytest.mark.parametrize("is_done", [True, False])
def test_an_end_whose_answer_was_lost_is_repeated(level: int, is_done: bool) -> None:
    transactions = made(level)
    transactions.begin()
    transactions.send(AT, b"a")
    transactions.flush()
    task = transactions.start_commit()
    shell = transactions.shell
    while not any(key == END for key, _ in asked(transactions.cluster)):
        acting = shell.can_act()
        if acting and not is_done:
            break
        shell.act(acting[0]) if acting else shell.deliver(shell.can_deliver()[0])
    for number in [
        number for number, link in shell.links.items() if link.broker == transactions.cluster.coordinator
    ]:
        shell.lose(number)
    shell.result(task)
    assert transactions.transacting.identity == (1, 1 if level == 2 else 0)
    assert transactions.cluster.read(AT) == [b"a"]


@both
def test_a_commit_without_an_answer_may_only_be_tried_again(level: int) -> None:
    transactions = made(level, deadline_ms=10_000, request_timeout_ms=2_000)
    transactions.begin()
    transactions.send(AT, b"a")
    transactions.flush()
    transactions.cluster.interfere = lambda broker, key, *_: SILENCE if key == END else None
    with pytest.raises(TimedOut):
        transactions.commit()
    assert transactions.transacting.state is State.COMMITTING
    with pytest.raises(WrongState, match=r"commit\(\) again"):
        transactions.abort()
    with pytest.raises(WrongState):
        transactions.begin()
    transactions.cluster.interfere = lambda *_: None
    transactions.commit()
    assert transactions.cluster.read(AT) == [b"a"]


@both
def test_an_abort_without_an_answer_is_tried_again(level: int) -> None:
    transactions = made(level, deadline_ms=10_000, request_timeout_ms=2_000)
    transactions.begin()
    transactions.send(AT)
    transactions.flush()
    transactions.cluster.interfere = lambda broker, key, *_: SILENCE if key == END else None
    with pytest.raises(TimedOut):
        transactions.abort()
    transactions.cluster.interfere = lambda *_: None
    transactions.abort()
    transactions.begin()


@both
def test_a_newer_producer_fences_an_older_one_for_good(level: int) -> None:
    cluster = TransactionalCluster(level)
    old, new = Transactions(cluster), Transactions(cluster)
    old.init()
    old.begin()
    old.send(AT, b"old")
    old.flush()
    new.init()
    with pytest.raises(ProducerFenced):
        old.commit()
    for call in (old.begin, old.abort, lambda: old.send(AT)):
        with pytest.raises(ProducerFenced):
            call()
    new.begin()
    new.send(AT, b"new")
    new.commit()
    assert cluster.read(AT) == [b"new"]


@both
def test_a_batch_of_a_fenced_producer_ends_in_a_fence_at_the_abort(level: int) -> None:
    cluster = TransactionalCluster(level)
    old, new = Transactions(cluster), Transactions(cluster)
    old.init()
    new.init()
    old.begin()
    old.send(AT)
    with pytest.raises(BrokerRefused):
        old.flush()
    with pytest.raises(ProducerFenced):
        old.abort()


@both
def test_while_the_last_transaction_is_still_ending_the_next_one_waits(level: int) -> None:
    transactions = made(level)
    busy = ErrorCode.CONCURRENT_TRANSACTIONS
    for key, response in (
        (PRODUCE, ProduceResponse),
        (END, EndTxnResponse),
        (ADD_PARTITIONS, AddPartitionsToTxnResponse),
        (TXN_OFFSETS, TxnOffsetCommitResponse),
    ):
        transactions.cluster.interfere = once(key, refused(response, busy))
        transactions.begin()
        transactions.send(AT)
        transactions.send_offsets("etl", {AT: 1})
        transactions.commit()
    assert len(headers(transactions.cluster)) == 4


def test_a_classic_abort_before_the_coordinator_knew_of_the_transaction_is_done() -> None:
    transactions = made(1)
    transactions.begin()
    transactions.send(AT, b"a")
    transactions.commit()
    busy = refused(AddPartitionsToTxnResponse, ErrorCode.CONCURRENT_TRANSACTIONS)
    transactions.cluster.interfere = lambda broker, key, version, request: (
        busy(request, version) if key == ADD_PARTITIONS else None
    )
    transactions.begin()
    transactions.send(OTHER)
    transactions.abort()
    transactions.cluster.interfere = lambda *_: None
    transactions.begin()
    transactions.send(AT, b"b")
    transactions.commit()
    assert transactions.cluster.read(AT) == [b"a", b"b"]
    assert headers(transactions.cluster) == [(0, 0), (1, 0)]


@both
def test_init_waits_for_the_end_of_an_older_transaction(level: int) -> None:
    cluster = TransactionalCluster(level)
    cluster.interfere = once(INIT, refused(InitProducerIdResponse, ErrorCode.CONCURRENT_TRANSACTIONS))
    transactions = Transactions(cluster)
    transactions.init()
    assert transactions.transacting.state is State.READY


@both
def test_a_moved_coordinator_is_found(level: int) -> None:
    transactions = made(level)
    for coordinator in (2, 3):
        transactions.begin()
        transactions.send(AT)
        transactions.flush()
        transactions.cluster.coordinator = coordinator
        transactions.commit()
    assert transactions.transacting.state is State.READY


@both
def test_after_a_refused_batch_the_transaction_can_only_be_aborted(level: int) -> None:
    transactions = made(level)
    transactions.cluster.interfere = once(PRODUCE, refused(ProduceResponse, ErrorCode.MESSAGE_TOO_LARGE))
    transactions.begin()
    transactions.send(AT)
    with pytest.raises(BrokerRefused, match="larger than topic orders allows"):
        transactions.flush()
    for call in (transactions.commit, lambda: transactions.send(AT)):
        with pytest.raises(BrokerRefused):
            call()
    transactions.abort()
    transactions.begin()
    transactions.send(AT, b"next")
    transactions.commit()
    assert headers(transactions.cluster) == [(1, 0)]


@both
def test_a_transaction_that_the_broker_calls_abortable_is_aborted(level: int) -> None:
    transactions = made(level)
    transactions.cluster.interfere = once(END, refused(EndTxnResponse, ErrorCode.TRANSACTION_ABORTABLE))
    transactions.begin()
    transactions.send(AT)
    with pytest.raises(TransactionFailed):
        transactions.commit()
    transactions.abort()
    transactions.begin()


@both
@pytest.mark.parametrize("code", [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID])
def test_a_producer_that_a_leader_forgot_aborts_and_goes_on(level: int, code: ErrorCode) -> None:
    transactions = made(level)
    transactions.cluster.interfere = once(PRODUCE, refused(ProduceResponse, code))
    transactions.begin()
    transactions.send(AT)
    with pytest.raises(OutOfSequence):
        transactions.flush()
    transactions.abort()
    transactions.begin()
    transactions.send(AT)
    transactions.commit()
    assert headers(transactions.cluster) == [(1, 0)]


def test_a_lost_answer_to_the_next_epoch_is_asked_for_again() -> None:
    """Trap 15: the coordinator recognises the request by the producer id and epoch in it."""
    transactions = made(1)
    cluster = transactions.cluster
    cluster.interfere = once(PRODUCE, refused(ProduceResponse, ErrorCode.MESSAGE_TOO_LARGE))
    transactions.begin()
    transactions.send(AT)
    with pytest.raises(BrokerRefused):
        transactions.flush()
    transactions.abort()
    init = [request for _, key, _, request in cluster.asked if key == INIT]
    assert [(each.producer_id, each.producer_epoch) for each in init] == [(-1, -1), (1, 0)]


def test_a_refused_timeout_ends_the_producer() -> None:
    cluster = TransactionalCluster()
    cluster.interfere = once(INIT, refused(InitProducerIdResponse, ErrorCode.INVALID_TRANSACTION_TIMEOUT))
    transactions = Transactions(cluster)
    with pytest.raises(BrokerRefused, match="invalid transaction timeout"):
        transactions.init()
    with pytest.raises(BrokerRefused):
        transactions.begin()


def test_a_broker_without_the_request_is_named() -> None:
    cluster = TransactionalCluster(1, version_max={ADD_PARTITIONS: -1})
    transactions = Transactions(cluster)
    transactions.init()
    transactions.begin()
    transactions.send(AT)
    with pytest.raises(UnsupportedBroker, match="does not support AddPartitionsToTxn"):
        transactions.flush()


@both
def test_methods_are_refused_where_they_mean_nothing(level: int) -> None:
    transactions = Transactions(TransactionalCluster(level))
    for call in (transactions.begin, transactions.abort, lambda: transactions.send(AT)):
        with pytest.raises(WrongState, match=r"init\(\)"):
            call()
    transactions.init()
    for call in (transactions.abort, transactions.commit, lambda: transactions.send(AT)):
        with pytest.raises(WrongState, match=r"begin\(\)"):
            call()
    transactions.begin()
    for call in (transactions.begin, transactions.init):
        with pytest.raises(WrongState, match=r"abort\(\) it first"):
            call()


@both
def test_offsets_that_could_not_be_sent_spoil_the_transaction(level: int) -> None:
    transactions = made(level)
    transactions.cluster.interfere = once(
        TXN_OFFSETS, refused(TxnOffsetCommitResponse, ErrorCode.ILLEGAL_GENERATION)
    )
    transactions.begin()
    with pytest.raises(TransactionFailed, match="illegal generation") as caught:
        transactions.send_offsets("etl", {AT: 3})
    transactions.transacting.spoil(caught.value)
    with pytest.raises(WireError):
        transactions.commit()
    transactions.abort()
    assert ("etl", AT) not in transactions.cluster.offsets
