"""confluent-kafka (librdkafka): classic transactions."""

# confluent_kafka is typed, but does not say which names it exports.
# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

import sys
import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.interop.python.line import (
    HEARTBEAT_INTERVAL_MS,
    PATIENCE_S,
    SESSION_TIMEOUT_MS,
    Came,
    Offsets,
    Outgoing,
    serve,
)


class Librdkafka:
    def __init__(self, bootstrap: str) -> None:
        self._common: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 0}

    def open(
        self, transactional_id: str, timeout_ms: int, group: str | None, source: str | None
    ) -> TransactionalProducer:
        settings = {
            **self._common,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            # It may not be more than the transaction's.
            "message.timeout.ms": min(timeout_ms, 30_000),
            "linger.ms": 0,
        }
        consumer = None if group is None or source is None else self._member(group, source)
        return TransactionalProducer(settings, consumer, source)

    def _member(self, group: str, source: str) -> Consumer:
        consumer = Consumer(
            {
                **self._common,
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": SESSION_TIMEOUT_MS,
                "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
            }
        )
        consumer.subscribe([source])
        return consumer

    def reader(self, topic: str, partitions: list[int], isolation: str) -> AssignedReader:
        return AssignedReader(self._common, topic, partitions, isolation)

    def name_of(self, error: Exception) -> str:
        if isinstance(error, KafkaException):
            name: str = error.args[0].name()
            return {"_FENCED": "PRODUCER_FENCED"}.get(name, name.removeprefix("_"))
        return type(error).__name__


class TransactionalProducer:
    def __init__(self, settings: dict[str, Any], consumer: Consumer | None, source: str | None) -> None:
        self._producer = Producer(settings)
        self._consumer, self._source = consumer, source
        self._producer.init_transactions(PATIENCE_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, records: list[Outgoing]) -> list[tuple[int, int]]:
        answers: list[tuple[int, int] | KafkaError | None] = [None] * len(records)
        for number, record in enumerate(records):

            def delivered(error: KafkaError | None, message: Message, number: int = number) -> None:
                answers[number] = error or (message.partition() or 0, message.offset() or 0)

            self._producer.produce(topic, record.value, partition=record.partition, on_delivery=delivered)
        self._producer.flush(PATIENCE_S)
        written = []
        for answer in answers:
            if isinstance(answer, KafkaError):
                raise KafkaException(answer)
            assert answer is not None, "no answer"
            written.append(answer)
        return written

    def receive(self, count: int) -> list[Came]:
        assert self._consumer is not None
        received: list[Came] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(received) < count:
            assert time.monotonic() < deadline, f"{len(received)} of {count} records came"
            message = self._consumer.poll(0.1)
            if message is not None:
                received.append(_came(message))
        return received

    def send_offsets(self, offsets: Offsets) -> None:
        assert self._consumer is not None and self._source is not None
        wanted = [TopicPartition(self._source, partition, offset) for partition, offset in offsets.items()]
        self._producer.send_offsets_to_transaction(wanted, self._consumer.consumer_group_metadata())

    def end(self, commit: bool) -> None:
        if commit:
            self._producer.commit_transaction(PATIENCE_S)
        else:
            self._producer.abort_transaction(PATIENCE_S)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        del self._producer


class AssignedReader:
    """The ends that librdkafka reports say where it is; its own positions are behind records handed out."""

    def __init__(self, common: dict[str, Any], topic: str, partitions: list[int], isolation: str) -> None:
        self._consumer = Consumer(
            {
                **common,
                "group.id": "unused",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation,
                # It wants to know the end soon, and the last fetch waits for more.
                "fetch.wait.max.ms": 50,
            }
        )
        self._positions = dict.fromkeys(partitions, 0)
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])

    def poll(self, timeout_s: float) -> list[Came]:
        message = self._consumer.poll(timeout_s)
        if message is None:
            return []
        error = message.error()
        partition, offset = message.partition(), message.offset()
        assert partition is not None and offset is not None
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            self._positions[partition] = offset
            return []
        self._positions[partition] = offset + 1
        return [_came(message)]

    def positions(self) -> Offsets:
        return dict(self._positions)

    def close(self) -> None:
        self._consumer.close()


def _came(message: Message) -> Came:
    error = message.error()
    if error is not None:
        raise KafkaException(error)
    partition, offset, value = message.partition(), message.offset(), message.value()
    assert partition is not None and offset is not None and isinstance(value, bytes)
    return Came(partition, offset, value)


if __name__ == "__main__":
    serve(Librdkafka(sys.argv[1]))
