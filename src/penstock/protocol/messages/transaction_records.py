"""Keys and values of ``__transaction_state``, and the control records that end transactions, in Kafka's schemas.

Each key and each value is preceded by its version as an int16. A null value is a tombstone.
"""

from __future__ import annotations

from penstock.protocol.schema import OWN_TAGS, Message, array, int8, int16, int32, int64, string


class TransactionLogKey(Message, versions="0"):
    transactional_id: str = string()


class PartitionsSchema(Message):
    topic: str = string()
    partition_ids: list[int] = array(int32)


class TransactionLogValue(Message, versions="0-1", flexible="1+"):
    producer_id: int = int64()
    previous_producer_id: int = int64("1+", default=-1, tag=0)
    next_producer_id: int = int64("1+", default=-1, tag=1)
    producer_epoch: int = int16()
    transaction_timeout_ms: int = int32()
    transaction_status: int = int8()
    transaction_partitions: list[PartitionsSchema] | None = array(PartitionsSchema, nullable=True)
    transaction_last_update_timestamp_ms: int = int64()
    transaction_start_timestamp_ms: int = int64()
    # The generation of transactions that the client speaks: 0 or 1 classic, 2 KIP-890.
    client_transaction_version: int = int16("1+", default=0, tag=2)
    # Ours: the epoch that goes with previous_producer_id. Kafka 4.3 keeps it in memory only, so that a retry is not
    # recognised after a failover (KAFKA-20357). It skips the field.
    previous_producer_epoch: int = int16("1+", default=-1, tag=OWN_TAGS)


class EndTxnMarker(Message, versions="0"):
    coordinator_epoch: int = int32()
