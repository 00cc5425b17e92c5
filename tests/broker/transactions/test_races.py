"""What happens at awkward moments of a transaction: markers on their way, a topic just created or just deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.transactions import coordinator_client, marker_sender
from penstock.broker.transactions.coordinator_client import add_partitions
from penstock.metadata.topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
    EndTxnRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.broker.coordination.test_offsets_topic import committed
from tests.broker.phrases import batch, only, produce_request
from tests.broker.test_virtual_time import create
from tests.virtual import World

TOPIC = "events"
OTHER_TOPIC = "other"
GROUP = "movers"
ID = "payments"
# In another partition of __transaction_state.
OTHER_ID = "paymentt"
NO_OFFSET = -1
SETTINGS = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "2"}


class Stage:
    """One broker in virtual time, and a producer of transactions v2. Markers can be held back."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World(SETTINGS)
        self.client = self.world.client()
        if world is None:
            create(self.client, TOPIC)
            create(self.client, OTHER_TOPIC)
        find = FindCoordinatorRequest(key_type=1, coordinator_keys=[ID])
        assert only(self.client.call(find, 4).coordinators).error_code == 0
        assert self.client.call(FindCoordinatorRequest(key=GROUP), 2).error_code == 0
        self.id = ID
        self.producer_id, self.epoch = -1, -1
        self._answers = 0
        self.init()
        self._held_markers: list[Callable[[], None]] | None = None
        write: Any = self.world.broker.marker_writer.write

        def held_or_written(*args: Any, **options: Any) -> None:
            if self._held_markers is None:
                write(*args, **options)
            else:
                self._held_markers.append(lambda: write(*args, **options))

        self.world.broker.marker_writer.write = held_or_written  # type: ignore[method-assign]

    def hold_markers(self) -> None:
        self._held_markers = []

    def release_markers(self) -> None:
        held, self._held_markers = self._held_markers or [], None
        assert held
        for write in held:
            write()
        self.world.run_for(50)

    def init(self) -> None:
        request = InitProducerIdRequest(transactional_id=self.id, transaction_timeout_ms=60_000)
        request.producer_id = request.producer_epoch = -1

        def is_initialized() -> bool:
            response = self.client.call(request, 5)
            self.producer_id, self.epoch = response.producer_id, response.producer_epoch
            return not response.error_code

        self.world.run_until(is_initialized, 20_000)

    def send(self, value: bytes, *, sequence: int = 0, acks: int = -1, topic: str = TOPIC) -> None:
        records = self.batch(value, sequence)
        request = produce_request(topic, records, acks=acks)
        request.transactional_id = self.id
        self._answers = len(self.client.answers)
        self.client.send(request, 12)

    def batch(self, value: bytes, sequence: int = 0) -> bytes:
        return batch(
            value,
            timestamp=self.world.clock.wall_ms(),
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            transactional=True,
        )

    def sent(self) -> ErrorCode:
        """The answer to the last ``send``."""
        self.world.run_until(lambda: len(self.client.answers) > self._answers, 20_000)
        ((result,),) = (topic.partition_responses for topic in self.client.answers[-1].responses)
        return ErrorCode(result.error_code)

    def put(self, value: bytes, *, sequence: int = 0, topic: str = TOPIC) -> ErrorCode:
        self.send(value, sequence=sequence, topic=topic)
        return self.sent()

    def end(self, *, commit: bool) -> None:
        request = EndTxnRequest(
            transactional_id=self.id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        response = self.client.call(request, 5)
        assert response.error_code == 0
        self.producer_id, self.epoch = response.producer_id, response.producer_epoch

    def send_offset(self, offset: int) -> ErrorCode:
        partition = TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=offset, committed_metadata=""
        )
        request = TxnOffsetCommitRequest(
            transactional_id=self.id,
            group_id=GROUP,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            topics=[TxnOffsetCommitRequestTopic(name=TOPIC, partitions=[partition])],
        )
        ((result,),) = (topic.partitions for topic in self.client.call(request, 5).topics)
        return ErrorCode(result.error_code)

    def hosted(self, topic: str = TOPIC) -> HostedPartition:
        hosted = self.world.broker.partitions.get(topic, 0)
        assert hosted is not None
        return hosted

    def open_in(self, topic: str = TOPIC) -> list[int]:
        return list(self.hosted(topic).log.producers.open_transactions())


@pytest.fixture
def stage() -> Stage:
    return Stage()


def freeze(monkeypatch: pytest.MonkeyPatch, topic: str, index: int = 0) -> None:
    """Nothing more is committed in a partition: too few replicas are in sync."""
    when_committed = HostedPartition.when_committed

    def wait_for_ever(self: HostedPartition, *args: Any) -> None:
        if (self.topic, self.index) != (topic, index):
            when_committed(self, *args)

    monkeypatch.setattr(HostedPartition, "when_committed", wait_for_ever)


def test_the_next_transaction_may_begin_before_the_marker_of_the_last_one_is_written(stage: Stage) -> None:
    assert stage.put(b"a") is ErrorCode.NONE
    stage.hold_markers()
    stage.end(commit=True)
    assert stage.put(b"b") is ErrorCode.CONCURRENT_TRANSACTIONS
    stage.release_markers()
    assert stage.put(b"b") is ErrorCode.NONE
    stage.end(commit=True)
    stage.world.run_for(50)
    assert not stage.open_in()


def test_a_marker_does_not_refuse_the_first_batch_of_the_next_transaction(stage: Stage) -> None:
    assert stage.put(b"a") is ErrorCode.NONE
    stage.hold_markers()
    stage.end(commit=True)
    stage.send(b"b")
    stage.world.run_for(20)
    stage.release_markers()
    assert stage.sent() is ErrorCode.NONE


def test_offsets_of_the_next_transaction_do_not_join_the_last_one(stage: Stage) -> None:
    assert stage.put(b"a") is ErrorCode.NONE
    assert stage.send_offset(5) is ErrorCode.NONE
    stage.hold_markers()
    stage.end(commit=True)
    assert stage.send_offset(6) is ErrorCode.CONCURRENT_TRANSACTIONS
    stage.release_markers()
    assert committed(stage.client, GROUP) == 5
    assert stage.send_offset(6) is ErrorCode.NONE
    stage.end(commit=False)
    stage.world.run_for(50)
    assert committed(stage.client, GROUP) == 5
    assert not stage.open_in(CONSUMER_OFFSETS)


def test_a_partition_that_the_coordinator_has_not_heard_of_is_not_added(stage: Stage) -> None:
    # Its leader knows the new topic already. Were it added, its marker would never be sent.
    transaction = AddPartitionsToTxnTransaction(
        transactional_id=ID,
        producer_id=stage.producer_id,
        producer_epoch=stage.epoch,
        topics=[AddPartitionsToTxnTopic(name="newer", partitions=[0])],
    )
    answers: list[AddPartitionsToTxnResponse] = []
    add_partitions(
        stage.world.broker.transaction_coordinators,
        AddPartitionsToTxnRequest(transactions=[transaction]),
        answers.append,
    )
    stage.world.run_for(50)
    (result,) = answers[0].results_by_transaction[0].topic_results[0].results_by_partition
    assert result.partition_error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize("at_once", [1, 1000])
def test_a_transaction_may_have_very_many_partitions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(marker_sender, "MARKERS_MAX", at_once)
    monkeypatch.setattr(coordinator_client, "QUESTIONS_MAX", at_once)
    wide = CreatableTopic(name="wide", num_partitions=400, replication_factor=1)
    assert stage.client.call(CreateTopicsRequest(topics=[wide]), 7).topics[0].error_code == 0
    add = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=ID,
        v3_and_below_producer_id=stage.producer_id,
        v3_and_below_producer_epoch=stage.epoch,
        v3_and_below_topics=[AddPartitionsToTxnTopic(name="wide", partitions=list(range(400)))],
    )
    results = stage.client.call(add, 3).results_by_topic_v3_and_below[0].results_by_partition
    assert {result.partition_error_code for result in results} == {0}
    records = stage.batch(b"a")
    request = ProduceRequest(
        transactional_id=ID,
        acks=-1,
        timeout_ms=10_000,
        topic_data=[
            TopicProduceData(
                name="wide",
                partition_data=[
                    PartitionProduceData(index=index, records=memoryview(records)) for index in range(400)
                ],
            )
        ],
    )
    responses = stage.client.call(request, 11).responses[0].partition_responses
    assert {response.error_code for response in responses} == {0}
    stage.end(commit=True)
    stage.world.run_for(1_000)
    for hosted in stage.world.broker.partitions.of_topic("wide"):
        assert not hosted.log.producers.open_transactions()


def test_a_transactional_id_that_is_too_long_is_not_sent_to_its_coordinator(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(coordinator_client, "add_partitions", lambda *args: asked.append(args))
    stage.id = "x" * 1_000_000
    assert stage.put(b"a") is ErrorCode.INVALID_REQUEST
    assert stage.send_offset(1) is ErrorCode.INVALID_REQUEST
    assert not asked


@pytest.mark.parametrize("version", [1, 2])
def test_a_fenced_producer_is_told_so_in_the_words_of_its_version(stage: Stage, version: int) -> None:
    fenced = stage.producer_id, stage.epoch
    stage.init()
    stage.producer_id, stage.epoch = fenced
    known = ErrorCode.PRODUCER_FENCED if version >= 2 else ErrorCode.INVALID_PRODUCER_EPOCH
    add = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=ID,
        v3_and_below_producer_id=stage.producer_id,
        v3_and_below_producer_epoch=stage.epoch,
        v3_and_below_topics=[AddPartitionsToTxnTopic(name=TOPIC, partitions=[0])],
    )
    (result,) = stage.client.call(add, version).results_by_topic_v3_and_below[0].results_by_partition
    assert result.partition_error_code == known
    add_offsets = AddOffsetsToTxnRequest(
        transactional_id=ID, producer_id=stage.producer_id, producer_epoch=stage.epoch, group_id=GROUP
    )
    assert stage.client.call(add_offsets, version).error_code == known
    again = InitProducerIdRequest(
        transactional_id=ID,
        transaction_timeout_ms=60_000,
        producer_id=stage.producer_id,
        producer_epoch=stage.epoch,
    )
    assert stage.client.call(again, version + 2).error_code == known


def test_a_leader_tells_a_fenced_producer_what_leaders_tell(stage: Stage) -> None:
    fenced = stage.producer_id, stage.epoch
    stage.init()
    stage.producer_id, stage.epoch = fenced
    assert stage.put(b"a") is ErrorCode.INVALID_PRODUCER_EPOCH
    assert stage.send_offset(1) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_partition_whose_marker_is_not_committed_does_not_hold_up_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage.put(b"a") is ErrorCode.NONE
    freeze(monkeypatch, TOPIC)
    stage.end(commit=True)
    stage.id = OTHER_ID
    stage.init()
    assert stage.put(b"b", topic=OTHER_TOPIC) is ErrorCode.NONE
    stage.end(commit=True)
    stage.world.run_for(11_000)
    assert not stage.open_in(OTHER_TOPIC)


def test_a_coordinator_that_commits_nothing_does_not_hold_up_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = stage.world.broker.transaction_coordinators.index_of
    frozen = index(ID)
    assert frozen is not None and frozen != index(OTHER_ID)
    identity = stage.producer_id, stage.epoch
    stage.id = OTHER_ID
    stage.init()
    other = stage.producer_id, stage.epoch
    freeze(monkeypatch, TRANSACTION_STATE, frozen)
    stage.id, (stage.producer_id, stage.epoch) = ID, identity
    assert stage.put(b"a") is ErrorCode.NOT_ENOUGH_REPLICAS
    stage.id, (stage.producer_id, stage.epoch) = OTHER_ID, other
    assert stage.put(b"b", topic=OTHER_TOPIC) is ErrorCode.NONE


def test_markers_of_a_coordinator_that_was_restarted_are_no_repetitions() -> None:
    # With one replica, its partition keeps its leader epoch. Leaders elsewhere remember the markers of before.
    stage = Stage()
    for _ in range(3):
        assert stage.put(b"a") is ErrorCode.NONE
        stage.end(commit=True)
        stage.world.run_for(50)
    leader_epoch = stage.hosted().leader_epoch
    remembered = stage.world.broker.marker_writer._written
    assert remembered
    identity = stage.producer_id, stage.epoch
    stage = Stage(stage.world.restarted(clean=True, settings=SETTINGS))
    assert stage.hosted().leader_epoch == leader_epoch
    stage.world.broker.marker_writer._written = dict(remembered)
    assert stage.producer_id == identity[0]
    assert stage.put(b"a") is ErrorCode.NONE
    stage.end(commit=True)
    stage.world.run_for(50)
    assert not stage.open_in()


def test_the_marker_of_an_operator_ends_one_transaction_and_hides_none(stage: Stage) -> None:
    assert stage.put(b"z") is ErrorCode.NONE
    stage.end(commit=True)
    stage.world.run_for(50)
    # A transaction that no coordinator knows of.
    hanging = stage.hosted().append(
        memoryview(bytearray(stage.batch(b"a"))), is_transactional=True, is_verified=True
    )
    assert hanging.error is ErrorCode.NONE
    marker = WritableTxnMarker(
        producer_id=stage.producer_id,
        producer_epoch=stage.epoch,
        transaction_result=False,
        topics=[WritableTxnMarkerTopic(name=TOPIC, partition_indexes=[0])],
        coordinator_epoch=-1,
        transaction_version=2,
        number=2**62,
    )
    answer = stage.client.call(WriteTxnMarkersRequest(markers=[marker]), 2)
    assert answer.markers[0].topics[0].partitions[0].error_code == 0
    assert not stage.open_in()
    stage.init()
    for _ in range(2):
        assert stage.put(b"b") is ErrorCode.NONE
        stage.end(commit=True)
        stage.world.run_for(50)
        assert not stage.open_in()
