"""Transactions (KIP-98, KIP-360, KIP-890): their partitions, offsets, end and markers, and what operators ask.

AddPartitionsToTxn has two shapes. Clients send one transaction (versions 0-3); brokers send several to a
coordinator, to add partitions or only to verify them (4 and later).
"""

from __future__ import annotations

from penstock.protocol.schema import (
    OWN_TAGS,
    Message,
    Response,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    string,
    uuid,
)

# AddPartitionsToTxn from this version on is sent by brokers, for several transactions.
ADD_PARTITIONS_BATCHED = 4
# From these versions on the client speaks transactions v2 (KIP-890).
END_TXN_V2 = 5
TXN_OFFSET_COMMIT_V2 = 5
PRODUCE_V2 = 12


class AddPartitionsToTxnTopic(Message):
    name: str = string()
    partitions: list[int] = array(int32)
    # Ours: the topic that the partitions' leader has. One that was created again has the same name.
    topic_id: bytes = uuid("4+", tag=OWN_TAGS)


class AddPartitionsToTxnTransaction(Message):
    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    verify_only: bool = boolean()
    topics: list[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic)


class AddPartitionsToTxnRequest(Message, key=24, versions="0-5", flexible="3+"):
    transactions: list[AddPartitionsToTxnTransaction] = array(AddPartitionsToTxnTransaction, "4+")
    v3_and_below_transactional_id: str = string("0-3")
    v3_and_below_producer_id: int = int64("0-3")
    v3_and_below_producer_epoch: int = int16("0-3")
    v3_and_below_topics: list[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic, "0-3")


class AddPartitionsToTxnPartitionResult(Message):
    partition_index: int = int32()
    partition_error_code: int = int16()


class AddPartitionsToTxnTopicResult(Message):
    name: str = string()
    results_by_partition: list[AddPartitionsToTxnPartitionResult] = array(AddPartitionsToTxnPartitionResult)


class AddPartitionsToTxnResult(Message):
    transactional_id: str = string()
    topic_results: list[AddPartitionsToTxnTopicResult] = array(AddPartitionsToTxnTopicResult)


class AddPartitionsToTxnResponse(Response, key=24, versions="0-5", flexible="3+"):
    throttle_time_ms: int = int32()
    error_code: int = int16("4+")
    results_by_transaction: list[AddPartitionsToTxnResult] = array(AddPartitionsToTxnResult, "4+")
    results_by_topic_v3_and_below: list[AddPartitionsToTxnTopicResult] = array(
        AddPartitionsToTxnTopicResult, "0-3"
    )

    @classmethod
    def for_error(
        cls, request: AddPartitionsToTxnRequest, version: int, error: int, message: str | None = None
    ) -> AddPartitionsToTxnResponse:
        if version >= ADD_PARTITIONS_BATCHED:
            return cls(error_code=error)
        return cls(results_by_topic_v3_and_below=partition_results(request.v3_and_below_topics, error))


def partition_results(
    topics: list[AddPartitionsToTxnTopic], error: int
) -> list[AddPartitionsToTxnTopicResult]:
    """The same error for every partition of a transaction."""
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=error)
                for index in topic.partitions
            ],
        )
        for topic in topics
    ]


class AddOffsetsToTxnRequest(Message, key=25, versions="0-4", flexible="3+"):
    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    group_id: str = string()


class AddOffsetsToTxnResponse(Response, key=25, versions="0-4", flexible="3+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()

    @classmethod
    def for_error(
        cls, request: AddOffsetsToTxnRequest, version: int, error: int, message: str | None = None
    ) -> AddOffsetsToTxnResponse:
        return cls(error_code=error)


class EndTxnRequest(Message, key=26, versions="0-5", flexible="3+"):
    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    committed: bool = boolean()


class EndTxnResponse(Response, key=26, versions="0-5", flexible="3+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    # For the next transaction.
    producer_id: int = int64("5+", default=-1)
    producer_epoch: int = int16("5+", default=-1)

    @classmethod
    def for_error(
        cls, request: EndTxnRequest, version: int, error: int, message: str | None = None
    ) -> EndTxnResponse:
        return cls(error_code=error)


class WritableTxnMarkerTopic(Message):
    name: str = string()
    partition_indexes: list[int] = array(int32)
    # Ours: the topic that the coordinator has.
    topic_id: bytes = uuid("2+", tag=OWN_TAGS)


class WritableTxnMarker(Message):
    producer_id: int = int64()
    producer_epoch: int = int16()
    # Commit or abort.
    transaction_result: bool = boolean()
    topics: list[WritableTxnMarkerTopic] = array(WritableTxnMarkerTopic)
    # Leader epoch of the coordinator's partition; -1 from an operator (KIP-664).
    coordinator_epoch: int = int32()
    # 2: the marker's epoch is newer than that of the transaction it ends (KIP-1228).
    transaction_version: int = int8("2+")
    # Ours: counts the transactions that the coordinator has ended; -1 if unknown. The same if a marker comes twice.
    number: int = int64("2+", default=-1, tag=OWN_TAGS)


class WriteTxnMarkersRequest(Message, key=27, versions="1-2", flexible="1+"):
    markers: list[WritableTxnMarker] = array(WritableTxnMarker)


class WritableTxnMarkerPartitionResult(Message):
    partition_index: int = int32()
    error_code: int = int16()


class WritableTxnMarkerTopicResult(Message):
    name: str = string()
    partitions: list[WritableTxnMarkerPartitionResult] = array(WritableTxnMarkerPartitionResult)


class WritableTxnMarkerResult(Message):
    producer_id: int = int64()
    topics: list[WritableTxnMarkerTopicResult] = array(WritableTxnMarkerTopicResult)


class WriteTxnMarkersResponse(Response, key=27, versions="1-2", flexible="1+"):
    markers: list[WritableTxnMarkerResult] = array(WritableTxnMarkerResult)

    @classmethod
    def for_error(
        cls, request: WriteTxnMarkersRequest, version: int, error: int, message: str | None = None
    ) -> WriteTxnMarkersResponse:
        return cls(
            markers=[
                WritableTxnMarkerResult(
                    producer_id=marker.producer_id,
                    topics=[
                        WritableTxnMarkerTopicResult(
                            name=topic.name,
                            partitions=[
                                WritableTxnMarkerPartitionResult(partition_index=index, error_code=error)
                                for index in topic.partition_indexes
                            ],
                        )
                        for topic in marker.topics
                    ],
                )
                for marker in request.markers
            ]
        )


class TxnOffsetCommitRequestPartition(Message):
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32("2+", default=-1)
    committed_metadata: str | None = string(nullable=True)


class TxnOffsetCommitRequestTopic(Message):
    name: str = string()
    partitions: list[TxnOffsetCommitRequestPartition] = array(TxnOffsetCommitRequestPartition)


class TxnOffsetCommitRequest(Message, key=28, versions="0-5", flexible="3+"):
    transactional_id: str = string()
    group_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    # The member that consumed (KIP-447); nobody in older versions.
    generation_id: int = int32("3+", default=-1)
    member_id: str = string("3+")
    group_instance_id: str | None = string("3+", nullable=True, default=None)
    topics: list[TxnOffsetCommitRequestTopic] = array(TxnOffsetCommitRequestTopic)


class TxnOffsetCommitResponsePartition(Message):
    partition_index: int = int32()
    error_code: int = int16()


class TxnOffsetCommitResponseTopic(Message):
    name: str = string()
    partitions: list[TxnOffsetCommitResponsePartition] = array(TxnOffsetCommitResponsePartition)


class TxnOffsetCommitResponse(Response, key=28, versions="0-5", flexible="3+"):
    throttle_time_ms: int = int32()
    topics: list[TxnOffsetCommitResponseTopic] = array(TxnOffsetCommitResponseTopic)

    @classmethod
    def for_error(
        cls, request: TxnOffsetCommitRequest, version: int, error: int, message: str | None = None
    ) -> TxnOffsetCommitResponse:
        return cls(
            topics=[
                TxnOffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        TxnOffsetCommitResponsePartition(
                            partition_index=partition.partition_index, error_code=error
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )


class DescribeProducersRequestTopic(Message):
    name: str = string()
    partition_indexes: list[int] = array(int32)


class DescribeProducersRequest(Message, key=61, versions="0", flexible="0+"):
    topics: list[DescribeProducersRequestTopic] = array(DescribeProducersRequestTopic)


class ActiveProducer(Message):
    producer_id: int = int64()
    producer_epoch: int = int32()
    last_sequence: int = int32(default=-1)
    last_timestamp: int = int64(default=-1)
    coordinator_epoch: int = int32()
    # First offset of the open transaction; -1 if there is none.
    current_txn_start_offset: int = int64(default=-1)


class DescribeProducersPartition(Message):
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    active_producers: list[ActiveProducer] = array(ActiveProducer)


class DescribeProducersTopic(Message):
    name: str = string()
    partitions: list[DescribeProducersPartition] = array(DescribeProducersPartition)


class DescribeProducersResponse(Response, key=61, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    topics: list[DescribeProducersTopic] = array(DescribeProducersTopic)

    @classmethod
    def for_error(
        cls, request: DescribeProducersRequest, version: int, error: int, message: str | None = None
    ) -> DescribeProducersResponse:
        return cls(
            topics=[
                DescribeProducersTopic(
                    name=topic.name,
                    partitions=[
                        DescribeProducersPartition(
                            partition_index=index, error_code=error, error_message=message
                        )
                        for index in topic.partition_indexes
                    ],
                )
                for topic in request.topics
            ]
        )


class DescribeTransactionsRequest(Message, key=65, versions="0", flexible="0+"):
    transactional_ids: list[str] = array(string)


class TransactionTopic(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class DescribedTransaction(Message):
    error_code: int = int16()
    transactional_id: str = string()
    transaction_state: str = string()
    transaction_timeout_ms: int = int32()
    # Wall time, of the last transaction if none is open; -1 if there was none.
    transaction_start_time_ms: int = int64()
    producer_id: int = int64()
    producer_epoch: int = int16()
    topics: list[TransactionTopic] = array(TransactionTopic)


class DescribeTransactionsResponse(Response, key=65, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    transaction_states: list[DescribedTransaction] = array(DescribedTransaction)

    @classmethod
    def for_error(
        cls, request: DescribeTransactionsRequest, version: int, error: int, message: str | None = None
    ) -> DescribeTransactionsResponse:
        return cls(
            transaction_states=[
                DescribedTransaction(error_code=error, transactional_id=transactional_id)
                for transactional_id in request.transactional_ids
            ]
        )


class ListTransactionsRequest(Message, key=66, versions="0-1", flexible="0+"):
    # Empty: all.
    state_filters: list[str] = array(string)
    producer_id_filters: list[int] = array(int64)
    # Only transactions open for longer, in milliseconds.
    duration_filter: int = int64("1+", default=-1)


class ListedTransaction(Message):
    transactional_id: str = string()
    producer_id: int = int64()
    transaction_state: str = string()


class ListTransactionsResponse(Response, key=66, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    unknown_state_filters: list[str] = array(string)
    transaction_states: list[ListedTransaction] = array(ListedTransaction)

    @classmethod
    def for_error(
        cls, request: ListTransactionsRequest, version: int, error: int, message: str | None = None
    ) -> ListTransactionsResponse:
        return cls(error_code=error)
