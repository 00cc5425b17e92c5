"""kafka-python: classic transactions, with a protocol implementation of its own."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.structs import OffsetAndMetadata

from tests.interop.python.line import (
    HEARTBEAT_INTERVAL_MS,
    PATIENCE_S,
    SESSION_TIMEOUT_MS,
    Came,
    Offsets,
    Outgoing,
    serve,
)

NAMES = {47: "INVALID_PRODUCER_EPOCH", 48: "INVALID_TXN_STATE", 90: "PRODUCER_FENCED"}


class KafkaPython:
    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap.split(",")

    def open(
        self, transactional_id: str, timeout_ms: int, group: str | None, source: str | None
    ) -> TransactionalProducer:
        producer = KafkaProducer(
            bootstrap_servers=self._bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            max_block_ms=int(PATIENCE_S * 1000),
        )
        producer.init_transactions()
        consumer = None
        if group is not None:
            consumer = KafkaConsumer(
                source,
                bootstrap_servers=self._bootstrap,
                group_id=group,
                isolation_level="read_committed",
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                session_timeout_ms=SESSION_TIMEOUT_MS,
                heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            )
        return TransactionalProducer(producer, consumer, source)

    def reader(self, topic: str, partitions: list[int], isolation: str) -> AssignedReader:
        consumer = KafkaConsumer(bootstrap_servers=self._bootstrap, isolation_level=isolation)
        return AssignedReader(consumer, [TopicPartition(topic, partition) for partition in partitions])

    def name_of(self, error: Exception) -> str:
        if isinstance(error, kafka_errors.KafkaError):
            return NAMES.get(error.errno, str(error.errno))
        return type(error).__name__


class TransactionalProducer:
    def __init__(self, producer: KafkaProducer, consumer: KafkaConsumer | None, source: str | None) -> None:
        self._producer, self._consumer, self._source = producer, consumer, source

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, records: list[Outgoing]) -> list[tuple[int, int]]:
        futures = [self._producer.send(topic, each.value, partition=each.partition) for each in records]
        self._producer.flush(PATIENCE_S)
        answers = [future.get(PATIENCE_S) for future in futures]
        return [(answer.partition, answer.offset) for answer in answers]

    def receive(self, count: int) -> list[Came]:
        assert self._consumer is not None
        received: list[Came] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(received) < count:
            assert time.monotonic() < deadline, f"{len(received)} of {count} records came"
            # Not shorter: a poll that ends while the member rejoins may lose its assignment (kafka-python 3.0.12).
            received += _came(self._consumer.poll(timeout_ms=5_000, max_records=count - len(received)))
        return received

    def send_offsets(self, offsets: Offsets) -> None:
        assert self._consumer is not None
        wanted = {
            TopicPartition(self._source, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in offsets.items()
        }
        self._producer.send_offsets_to_transaction(wanted, self._consumer.group_metadata())

    def end(self, commit: bool) -> None:
        if commit:
            self._producer.commit_transaction()
        else:
            self._producer.abort_transaction()

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._producer.close(timeout=PATIENCE_S)


class AssignedReader:
    def __init__(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        self._consumer, self._partitions = consumer, partitions
        consumer.assign(partitions)
        for partition in partitions:
            consumer.seek(partition, 0)

    def poll(self, timeout_s: float) -> list[Came]:
        return _came(self._consumer.poll(timeout_ms=int(timeout_s * 1000)))

    def positions(self) -> Offsets:
        return {each.partition: self._consumer.position(each) for each in self._partitions}

    def close(self) -> None:
        self._consumer.close()


def _came(polled: dict[TopicPartition, list[Any]]) -> list[Came]:
    return [
        Came(each.partition, each.offset, bytes(each.value))
        for records in polled.values()
        for each in records
    ]


if __name__ == "__main__":
    logging.disable()
    serve(KafkaPython(sys.argv[1]))
