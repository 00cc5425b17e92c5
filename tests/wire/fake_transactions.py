"""A cluster in a dictionary that coordinates transactions, in both generations, and a producer on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsResponse, FinalizedFeatureKey
from penstock.protocol.messages.produce import InitProducerIdResponse, ProduceResponse
from penstock.protocol.messages.transactions import (
    END_TXN_V2,
    PRODUCE_V2,
    TXN_OFFSET_COMMIT_V2,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    TxnOffsetCommitResponse,
    partition_results,
)
from penstock.protocol.records import (
    Marker,
    decode_header,
    decode_marker,
    decode_records,
    encode_batch,
    encode_marker,
)
from penstock.wire.core import Task
from penstock.wire.transacting import Transacting
from penstock.wire.transactions import NO_MEMBER, GroupMember
from tests.wire.fake import WALL_MS, FakeCluster, FakeShell


@dataclass
class FakeTransaction:
    producer_id: int
    epoch: int = 0
    is_open: bool = False
    partitions: set[TopicPartition] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    pending: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    # How the last one ended, and in which epoch; for repeated requests.
    ended: tuple[int, bool] | None = None
    # The epoch in which the producer asked for the current one (KIP-360); for a repeated request.
    renewed_from: int | None = None


class TransactionalCluster(FakeCluster):
    def __init__(self, level: int = 2, **settings: Any) -> None:
        super().__init__(**settings)
        # Of transaction.version; 0 for a cluster without features.
        self.level = level
        self.transactions: dict[str, FakeTransaction] = {}
        self.make_topic("orders", [1, 2, 3])

    def read(self, at: TopicPartition) -> list[bytes]:
        """The values of a partition's committed records, judged by the markers after them."""
        found: list[tuple[int, bytes]] = []
        seen: list[bytes] = []
        for _, data in self.partition(at).batches:
            header = decode_header(data)
            if header.is_control:
                marker = decode_marker(data)
                assert marker is not None
                seen += [
                    key
                    for producer_id, key in found
                    if producer_id == header.producer_id and marker.is_commit
                ]
                found = [each for each in found if each[0] != header.producer_id]
            else:
                (record,) = decode_records(data, bytes_max=1_000)
                found.append((header.producer_id, record.value or b""))
        return seen

    def _apiversions(self, broker: int, version: int, request: Any) -> ApiVersionsResponse:
        response = super()._apiversions(broker, version, request)
        if self.level:
            response.finalized_features_epoch = 7
            response.finalized_features = [
                FinalizedFeatureKey(
                    name="transaction.version", max_version_level=self.level, min_version_level=self.level
                )
            ]
        return response

    def _initproducerid(self, broker: int, version: int, request: Any) -> InitProducerIdResponse:
        if request.transactional_id is None:
            return super()._initproducerid(broker, version, request)
        if broker != self.coordinator:
            return InitProducerIdResponse(error_code=ErrorCode.NOT_COORDINATOR)
        known = self.transactions.get(request.transactional_id)
        if known is None:
            self.producer_ids += 1
            known = self.transactions[request.transactional_id] = FakeTransaction(self.producer_ids)
        else:
            if request.producer_id >= 0 and request.producer_epoch == known.renewed_from:
                return InitProducerIdResponse(producer_id=known.producer_id, producer_epoch=known.epoch)
            if request.producer_id >= 0 and request.producer_epoch != known.epoch:
                return InitProducerIdResponse(error_code=ErrorCode.PRODUCER_FENCED)
            if known.is_open:
                self._finish(known, is_commit=False, ended=known.epoch)
            known.renewed_from = known.epoch if request.producer_id >= 0 else None
            known.epoch += 1
        return InitProducerIdResponse(producer_id=known.producer_id, producer_epoch=known.epoch)

    def _judge(
        self, broker: int, transactional_id: str, producer_id: int, epoch: int
    ) -> ErrorCode | FakeTransaction:
        known = self.transactions.get(transactional_id)
        if broker != self.coordinator:
            return ErrorCode.NOT_COORDINATOR
        if known is None or known.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return known if known.epoch == epoch else ErrorCode.PRODUCER_FENCED

    def _addpartitionstotxn(self, broker: int, version: int, request: Any) -> AddPartitionsToTxnResponse:
        assert version < 4, "newer versions are for brokers"
        known = self._judge(
            broker,
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
        )
        error = known if isinstance(known, ErrorCode) else ErrorCode.NONE
        if isinstance(known, FakeTransaction):
            known.is_open = True
            for topic in request.v3_and_below_topics:
                known.partitions |= {TopicPartition(topic.name, number) for number in topic.partitions}
        return AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=partition_results(request.v3_and_below_topics, error)
        )

    def _addoffsetstotxn(self, broker: int, version: int, request: Any) -> AddOffsetsToTxnResponse:
        known = self._judge(broker, request.transactional_id, request.producer_id, request.producer_epoch)
        if isinstance(known, ErrorCode):
            return AddOffsetsToTxnResponse(error_code=known)
        known.is_open = True
        known.groups.add(request.group_id)
        return AddOffsetsToTxnResponse()

    def _txnoffsetcommit(self, broker: int, version: int, request: Any) -> TxnOffsetCommitResponse:
        known = self._judge(broker, request.transactional_id, request.producer_id, request.producer_epoch)
        if isinstance(known, FakeTransaction) and version >= TXN_OFFSET_COMMIT_V2:
            known.is_open = True
            known.groups.add(request.group_id)
        if isinstance(known, FakeTransaction) and request.group_id not in known.groups:
            known = ErrorCode.INVALID_TXN_STATE
        if isinstance(known, ErrorCode):
            return TxnOffsetCommitResponse.for_error(request, version, known)
        for topic in request.topics:
            for each in topic.partitions:
                at = TopicPartition(topic.name, each.partition_index)
                known.pending[request.group_id, at] = each.committed_offset
        return TxnOffsetCommitResponse.for_error(request, version, ErrorCode.NONE)

    def _produce(self, broker: int, version: int, request: Any) -> ProduceResponse:
        if request.transactional_id is not None:
            known = self.transactions[request.transactional_id]
            for topic in request.topic_data:
                name = self._name(topic, version >= 13, topic.name)
                for data in topic.partition_data:
                    header = decode_header(data.records)
                    assert header.is_transactional and header.producer_id == known.producer_id
                    if header.producer_epoch != known.epoch:
                        return ProduceResponse.for_error(request, version, ErrorCode.INVALID_PRODUCER_EPOCH)
                    at = TopicPartition(name or "", data.index)
                    if version >= PRODUCE_V2:
                        known.is_open = True
                        known.partitions.add(at)
                    if at not in known.partitions:
                        return ProduceResponse.for_error(request, version, ErrorCode.INVALID_TXN_STATE)
        return super()._produce(broker, version, request)

    def _endtxn(self, broker: int, version: int, request: Any) -> EndTxnResponse:
        known = self.transactions[request.transactional_id]
        if broker != self.coordinator:
            return EndTxnResponse(error_code=ErrorCode.NOT_COORDINATOR)
        is_v2 = version >= END_TXN_V2
        again = known.ended == (request.producer_epoch, request.committed) and not known.is_open
        if not again:
            if known.epoch != request.producer_epoch:
                return EndTxnResponse(error_code=ErrorCode.PRODUCER_FENCED)
            if not known.is_open and (request.committed or not is_v2):
                return EndTxnResponse(error_code=ErrorCode.INVALID_TXN_STATE)
            known.epoch += is_v2
            self._finish(known, request.committed, ended=request.producer_epoch)
        if is_v2:
            return EndTxnResponse(producer_id=known.producer_id, producer_epoch=known.epoch)
        return EndTxnResponse()

    def _finish(self, known: FakeTransaction, is_commit: bool, *, ended: int) -> None:
        """``ended`` is the epoch of the transaction; the markers have the present one."""
        marker = Marker(is_commit, 0)
        for at in sorted(known.partitions):
            batch = encode_marker(marker, known.producer_id, known.epoch, WALL_MS)
            partition = self.partition(at)
            offset = partition.append(batch, 1)
            partition.producers.end_transaction(decode_header(batch), marker, offset, WALL_MS)
        if is_commit:
            self.offsets.update(known.pending)
        known.ended = (ended, is_commit)
        known.is_open = False
        known.partitions.clear()
        known.groups.clear()
        known.pending.clear()


class Transactions:
    """A transactional producer on a fake cluster."""

    def __init__(self, cluster: TransactionalCluster, transactional_id: str = "etl", **settings: Any) -> None:
        self.cluster = cluster
        self.shell = FakeShell(cluster, bootstrap="broker-2:9092,broker-3:9092", **settings)
        self.transacting = Transacting(self.shell.core, transactional_id, timeout_ms=60_000, in_flight=5)

    def init(self) -> None:
        self._do(self.transacting.init)

    def begin(self) -> None:
        self.transacting.begin()
        self.transacting.check()

    def send(self, at: TopicPartition, value: bytes = b"") -> None:
        batch = encode_batch([(1000, None, value, ())])
        self.transacting.add(at, batch, None, self.shell.now_ms)
        self.shell.wait(0)

    def flush(self) -> None:
        producing = self.transacting.producing
        self.shell.run(lambda: not producing.unacknowledged or producing.error is not None)
        self.transacting.check()
        if self.transacting.error is not None:
            raise self.transacting.error

    def send_offsets(
        self, group: str, offsets: dict[TopicPartition, int], member: GroupMember = NO_MEMBER
    ) -> None:
        self._do(
            lambda core, task: self.transacting.send_offsets(core, task, group, offsets, member),
        )

    def commit(self) -> None:
        self.flush()
        self._do(self.transacting.commit)

    def start_commit(self) -> Task[None]:
        return self.shell.start("committing", self.transacting.commit)

    def abort(self) -> None:
        self.transacting.give_up()
        self.shell.run(lambda: not self.transacting.producing.has_requests)
        self._do(self.transacting.abort)

    def _do(self, steps: Any) -> None:
        try:
            self.shell.result(self.shell.start("asking", steps))
        finally:
            self.transacting.check()
