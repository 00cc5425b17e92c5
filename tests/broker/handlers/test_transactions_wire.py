"""Transactions on the wire, of both generations, with every request written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    DescribeProducersRequest,
    DescribeProducersRequestTopic,
    DescribeTransactionsRequest,
    EndTxnRequest,
    ListTransactionsRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from penstock.protocol.records import batches, decode_records
from tests.broker.phrases import (
    batch,
    create_topic,
    fetch,
    find_coordinator,
    keyed,
    only,
    produce_request,
    put,
)
from tests.broker.wire import Wire
from tests.support import wait_until

Unique = Callable[[str], str]

LATEST = -1
READ_COMMITTED = 1
TIMEOUT_MS = 60_000

CONCURRENT = ErrorCode.CONCURRENT_TRANSACTIONS


class Producer:
    """A transactional producer of one generation. It repeats what a coordinator refuses for a moment."""

    def __init__(
        self, wire: Wire, transactional_id: str, *, is_v2: bool, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        self.wire = wire
        self.id = transactional_id
        self.is_v2 = is_v2
        self.timeout_ms = timeout_ms
        self.producer_id = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}
        self.added: set[tuple[str, int]] = set()

    def repeat(self, ask: Callable[[], tuple[int, Any]]) -> Any:
        def asked() -> Any:
            error, response = ask()
            return None if error in (CONCURRENT, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) else [response]

        return wait_until(asked, 10.0, "the coordinator is ready")[0]

    def init(self) -> Any:
        request = FindCoordinatorRequest(key_type=1, coordinator_keys=[self.id])
        assert only(self.wire.call(request, 4).coordinators).error_code == 0

        def ask() -> tuple[int, Any]:
            response = self.wire.call(
                InitProducerIdRequest(
                    transactional_id=self.id,
                    transaction_timeout_ms=self.timeout_ms,
                    producer_id=self.producer_id,
                    producer_epoch=self.epoch,
                ),
                5,
            )
            return response.error_code, response

        response = self.repeat(ask)
        if not response.error_code:
            self.producer_id, self.epoch = response.producer_id, response.producer_epoch
            self.sequences.clear()
            self.added.clear()
        return response

    def add(self, topic: str, partition: int = 0) -> int:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=[partition])],
        )

        def ask() -> tuple[int, Any]:
            ((result,),) = (
                topic.results_by_partition
                for topic in self.wire.call(request, 3).results_by_topic_v3_and_below
            )
            return result.partition_error_code, result.partition_error_code

        error: int = self.repeat(ask)
        return error

    def send(self, topic: str, *values: bytes, partition: int = 0) -> Any:
        place = (topic, partition)
        if not self.is_v2 and place not in self.added:
            assert self.add(topic, partition) == 0
            self.added.add(place)
        result = self.repeat(lambda: self._send(topic, partition, values))
        if not result.error_code:
            self.sequences[place] = self.sequences.get(place, 0) + len(values)
        return result

    def _send(self, topic: str, partition: int, values: tuple[bytes, ...]) -> tuple[int, Any]:
        request = produce_request(
            topic,
            batch(
                *values,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=self.sequences.get((topic, partition), 0),
                transactional=True,
            ),
            partition=partition,
        )
        request.transactional_id = self.id
        ((result,),) = (
            topic.partition_responses for topic in self.wire.call(request, 12 if self.is_v2 else 11).responses
        )
        return result.error_code, result

    def end(self, is_commit: bool) -> int:
        def ask() -> tuple[int, Any]:
            request = EndTxnRequest(
                transactional_id=self.id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                committed=is_commit,
            )
            response = self.wire.call(request, 5 if self.is_v2 else 4)
            return response.error_code, response

        response = self.repeat(ask)
        if self.is_v2 and not response.error_code:
            assert (response.producer_id, response.producer_epoch) == (self.producer_id, self.epoch + 1)
            self.epoch = response.producer_epoch
            self.sequences.clear()
        self.added.clear()
        error: int = response.error_code
        return error

    def commit(self) -> None:
        assert self.end(True) == 0

    def abort(self) -> None:
        assert self.end(False) == 0

    def send_offset(self, group: str, topic: str, offset: int, *, is_added: bool = True) -> int:
        if not self.is_v2 and is_added:

            def add() -> tuple[int, Any]:
                request = AddOffsetsToTxnRequest(
                    transactional_id=self.id,
                    producer_id=self.producer_id,
                    producer_epoch=self.epoch,
                    group_id=group,
                )
                response = self.wire.call(request, 4)
                return response.error_code, response

            assert self.repeat(add).error_code == 0
        request = TxnOffsetCommitRequest(
            transactional_id=self.id,
            group_id=group,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            topics=[
                TxnOffsetCommitRequestTopic(
                    name=topic,
                    partitions=[
                        TxnOffsetCommitRequestPartition(
                            partition_index=0, committed_offset=offset, committed_metadata=""
                        )
                    ],
                )
            ],
        )

        def ask() -> tuple[int, Any]:
            ((result,),) = (
                topic.partitions for topic in self.wire.call(request, 5 if self.is_v2 else 4).topics
            )
            return result.error_code, result.error_code

        error: int = self.repeat(ask)
        return error


@pytest.fixture(params=["classic", "v2"])
def producer(request: pytest.FixtureRequest, wire: Wire, unique: Unique) -> Producer:
    producer = Producer(wire, unique("payments"), is_v2=request.param == "v2")
    assert producer.init().error_code == 0
    return producer


@pytest.fixture
def topic(wire: Wire, unique: Unique) -> str:
    name = unique("t")
    create_topic(wire, name, 2)
    return name


def read(wire: Wire, topic: str, *, partition: int = 0, committed: bool = True) -> list[bytes | None]:
    """Every value a consumer of this isolation level sees, leaving out what is aborted as clients do."""
    data = fetch(wire, topic, 0, partition=partition, isolation_level=READ_COMMITTED if committed else 0)
    assert data.error_code == 0, data
    aborted = sorted((each.first_offset, each.producer_id) for each in data.aborted_transactions or ())
    found: list[bytes | None] = []
    active: set[int] = set()
    for position, header in batches(data.records):  # type: ignore[arg-type]
        while aborted and aborted[0][0] <= header.base_offset:
            active.add(aborted.pop(0)[1])
        if header.is_control:
            active.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in active):
            found += [record.value for record in decode_records(data.records, position, bytes_max=1 << 20)]  # type: ignore[arg-type]
    return found


def latest(wire: Wire, topic: str, isolation_level: int) -> int:
    wanted = ListOffsetsPartition(partition_index=0, timestamp=LATEST)
    request = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=isolation_level,
        topics=[ListOffsetsTopic(name=topic, partitions=[wanted])],
    )
    ((result,),) = (answer.partitions for answer in wire.call(request, 7).topics)
    assert result.error_code == 0
    offset: int = result.offset
    return offset


def committed_offset(wire: Wire, group: str, topic: str, *, require_stable: bool = True) -> tuple[int, int]:
    request = OffsetFetchRequest(
        groups=[
            OffsetFetchRequestGroup(
                group_id=group, topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[0])]
            )
        ],
        require_stable=require_stable,
    )
    (group_result,) = wire.call(request, 8).groups
    ((result,),) = (each.partitions for each in group_result.topics)
    return result.error_code, result.committed_offset


def ends(producer: Producer, topic: str, values: list[bytes]) -> None:
    """Wait until the markers are there: EndTxn answers before that."""
    wait_until(lambda: read(producer.wire, topic) == values, 10.0, f"readers see {values}")


def test_what_is_committed_is_read_and_what_is_aborted_is_not(producer: Producer, topic: str) -> None:
    producer.send(topic, b"a", b"b")
    producer.send(topic, b"c", partition=1)
    producer.commit()
    ends(producer, topic, [b"a", b"b"])
    producer.send(topic, b"d")
    producer.abort()
    producer.send(topic, b"e")
    producer.commit()
    ends(producer, topic, [b"a", b"b", b"e"])
    assert read(producer.wire, topic, partition=1) == [b"c"]
    assert read(producer.wire, topic, committed=False) == [b"a", b"b", b"d", b"e"]


def test_an_open_transaction_hides_what_comes_after_it(producer: Producer, topic: str) -> None:
    wire = producer.wire
    put(wire, topic, b"before")
    producer.send(topic, b"open")
    put(wire, topic, b"after")
    assert read(wire, topic) == [b"before"]
    assert read(wire, topic, committed=False) == [b"before", b"open", b"after"]
    assert (latest(wire, topic, READ_COMMITTED), latest(wire, topic, 0)) == (1, 3)
    data = fetch(wire, topic, 0, isolation_level=READ_COMMITTED)
    assert (data.last_stable_offset, data.high_watermark) == (1, 3)
    producer.commit()
    ends(producer, topic, [b"before", b"open", b"after"])


def test_a_second_producer_fences_the_first(producer: Producer, topic: str, node: Any) -> None:
    producer.send(topic, b"lost")
    with node.connect() as wire:
        second = Producer(wire, producer.id, is_v2=producer.is_v2)
        assert second.init().error_code == 0
        assert second.producer_id == producer.producer_id and second.epoch > producer.epoch
        second.send(topic, b"won")
        late = producer.repeat(lambda: producer._send(topic, 0, (b"late",)))
        assert late.error_code == ErrorCode.INVALID_PRODUCER_EPOCH
        assert producer.end(True) in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
        second.commit()
        ends(second, topic, [b"won"])


def test_a_transaction_that_is_open_too_long_is_aborted(wire: Wire, topic: str, unique: Unique) -> None:
    producer = Producer(wire, unique("slow"), is_v2=True, timeout_ms=300)
    producer.init()
    producer.send(topic, b"slow")
    put(wire, topic, b"next")
    wait_until(lambda: read(wire, topic) == [b"next"], 30.0, "the transaction is aborted")
    assert producer.end(True) in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)


def test_a_batch_of_a_partition_that_was_not_added_is_refused(wire: Wire, topic: str, unique: Unique) -> None:
    producer = Producer(wire, unique("classic"), is_v2=False)
    producer.init()
    producer.add(topic, 1)
    refused = producer.repeat(lambda: producer._send(topic, 0, (b"x",)))
    assert refused.error_code == ErrorCode.TRANSACTION_ABORTABLE
    assert read(wire, topic, committed=False) == []


def test_a_late_batch_of_an_ended_transaction_opens_no_other(producer: Producer, topic: str) -> None:
    producer.send(topic, b"in time")
    epoch, sequences = producer.epoch, dict(producer.sequences)
    producer.commit()
    ends(producer, topic, [b"in time"])
    producer.epoch, producer.sequences = epoch, sequences
    late = producer.repeat(lambda: producer._send(topic, 0, (b"late",)))
    assert late.error_code == (
        ErrorCode.INVALID_PRODUCER_EPOCH if producer.is_v2 else ErrorCode.TRANSACTION_ABORTABLE
    )
    put(producer.wire, topic, b"after")
    assert read(producer.wire, topic) == [b"in time", b"after"]


def test_offsets_are_committed_with_the_transaction(producer: Producer, topic: str, unique: Unique) -> None:
    wire, group = producer.wire, unique("g")
    find_coordinator(wire, group)
    producer.send(topic, b"a")
    assert producer.send_offset(group, topic, 7) == 0
    assert committed_offset(wire, group, topic) == (ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
    assert committed_offset(wire, group, topic, require_stable=False) == (0, -1)
    producer.commit()
    wait_until(lambda: committed_offset(wire, group, topic) == (0, 7), 10.0, "the offset is committed")
    producer.send(topic, b"b")
    assert producer.send_offset(group, topic, 9) == 0
    producer.abort()
    wait_until(lambda: committed_offset(wire, group, topic) == (0, 7), 10.0, "the offset is dropped")


def test_offsets_of_a_group_that_was_not_added_are_refused(wire: Wire, topic: str, unique: Unique) -> None:
    producer, group = Producer(wire, unique("classic"), is_v2=False), unique("g")
    find_coordinator(wire, group)
    producer.init()
    producer.send(topic, b"a")
    assert producer.send_offset(group, topic, 7, is_added=False) == ErrorCode.TRANSACTION_ABORTABLE


def test_records_of_a_transaction_need_keys_in_a_compacted_topic(producer: Producer, unique: Unique) -> None:
    topic = unique("t")
    create_topic(producer.wire, topic, configs={"cleanup.policy": "compact"})
    result = producer.send(topic, b"no key")
    assert result.error_code == ErrorCode.INVALID_RECORD
    assert [each.batch_index for each in result.record_errors] == [0]
    assert read(producer.wire, topic, committed=False) == []


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_batch_behind_one_that_is_verified_needs_keys_too(wire: Wire, unique: Unique, is_v2: bool) -> None:
    topic = unique("t")
    create_topic(wire, topic, configs={"cleanup.policy": "compact"})
    producer = Producer(wire, unique("x"), is_v2=is_v2)
    producer.init()
    if not is_v2:
        assert producer.add(topic) == 0
    version = 12 if is_v2 else 11
    fields: dict[str, Any] = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "transactional": True,
    }
    # The first is held until it is verified, and the second, sent with it, behind it.
    for records in (keyed(b"a", base_sequence=0, **fields), batch(b"b", base_sequence=1, **fields)):
        request = produce_request(topic, records)
        request.transactional_id = producer.id
        wire.send(request, version)
    first, second = (only(only(wire.receive().responses).partition_responses) for _ in range(2))
    assert first.error_code == ErrorCode.NONE
    assert second.error_code == ErrorCode.INVALID_RECORD
    assert [each.batch_index for each in second.record_errors] == [0] and second.error_message
    producer.commit()
    ends(producer, topic, [b"a"])


def test_the_batch_and_the_request_must_agree(wire: Wire, topic: str, unique: Unique) -> None:
    producer = Producer(wire, unique("mixed"), is_v2=True)
    producer.init()
    fields: Any = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "base_sequence": 0,
    }
    plain = produce_request(topic, batch(b"x", **fields))
    plain.transactional_id = producer.id
    transactional = produce_request(topic, batch(b"x", transactional=True, **fields))
    errors = [
        wire.call(request, 12).responses[0].partition_responses[0].error_code
        for request in (plain, transactional)
    ]
    assert errors == [ErrorCode.INVALID_RECORD, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED]


def test_operators_see_transactions_and_producers(producer: Producer, topic: str) -> None:
    wire = producer.wire
    producer.send(topic, b"a", b"b")
    (described,) = wire.call(
        DescribeTransactionsRequest(transactional_ids=[producer.id]), 0
    ).transaction_states
    assert (described.error_code, described.transaction_state) == (0, "Ongoing")
    assert [(each.topic, each.partitions) for each in described.topics] == [(topic, [0])]
    listed = wire.call(ListTransactionsRequest(state_filters=["Ongoing"]), 1).transaction_states
    assert producer.id in [each.transactional_id for each in listed]
    request = DescribeProducersRequest(
        topics=[DescribeProducersRequestTopic(name=topic, partition_indexes=[0])]
    )
    (active,) = wire.call(request, 0).topics[0].partitions[0].active_producers
    assert (active.producer_id, active.producer_epoch) == (producer.producer_id, producer.epoch)
    assert (active.last_sequence, active.current_txn_start_offset) == (1, 0)
    producer.commit()


def test_an_operator_cannot_commit_nor_touch_what_is_not_open(producer: Producer, topic: str) -> None:
    def write(is_commit: bool) -> int:
        marker = WritableTxnMarker(
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            transaction_result=is_commit,
            topics=[WritableTxnMarkerTopic(name=topic, partition_indexes=[0])],
            coordinator_epoch=-1,
        )
        response = producer.wire.call(WriteTxnMarkersRequest(markers=[marker]), 1)
        error: int = response.markers[0].topics[0].partitions[0].error_code
        return error

    assert write(False) == ErrorCode.INVALID_TXN_STATE
    producer.send(topic, b"a")
    assert write(True) == ErrorCode.INVALID_REQUEST
    # Its coordinator knows it, and will end it.
    assert write(False) == ErrorCode.CONCURRENT_TRANSACTIONS
    producer.commit()
