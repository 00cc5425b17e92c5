"""aiokafka: classic transactions, with a protocol implementation of its own."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka_errors

from tests.interop.python.line import (
    HEARTBEAT_INTERVAL_MS,
    PATIENCE_S,
    SESSION_TIMEOUT_MS,
    Came,
    Offsets,
    Outgoing,
    serve,
)

Result = TypeVar("Result")

NAMES = {47: "INVALID_PRODUCER_EPOCH", 48: "INVALID_TXN_STATE", 90: "PRODUCER_FENCED"}


class Aiokafka:
    def __init__(self, bootstrap: str) -> None:
        # It takes no list in one string.
        self._bootstrap = bootstrap.split(",")
        self._loop = asyncio.new_event_loop()

    def open(
        self, transactional_id: str, timeout_ms: int, group: str | None, source: str | None
    ) -> TransactionalProducer:
        return self.run(self._open(transactional_id, timeout_ms, group, source))

    async def _open(
        self, transactional_id: str, timeout_ms: int, group: str | None, source: str | None
    ) -> TransactionalProducer:
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
        )
        await producer.start()
        consumer = None
        if group is not None:
            consumer = AIOKafkaConsumer(
                source,
                bootstrap_servers=self._bootstrap,
                group_id=group,
                isolation_level="read_committed",
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                session_timeout_ms=SESSION_TIMEOUT_MS,
                heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            )
            await consumer.start()
        return TransactionalProducer(self, producer, consumer, group, source)

    def reader(self, topic: str, partitions: list[int], isolation: str) -> AssignedReader:
        return AssignedReader(self, self._bootstrap, topic, partitions, isolation)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def name_of(self, error: Exception) -> str:
        if isinstance(error, kafka_errors.ProducerFenced):
            return "PRODUCER_FENCED"
        if isinstance(error, kafka_errors.KafkaError):
            return NAMES.get(error.errno, str(error.errno))
        return type(error).__name__


class TransactionalProducer:
    def __init__(
        self,
        library: Aiokafka,
        producer: AIOKafkaProducer,
        consumer: AIOKafkaConsumer | None,
        group: str | None,
        source: str | None,
    ) -> None:
        self._library = library
        self._producer, self._consumer = producer, consumer
        self._group, self._source = group, source

    def begin(self) -> None:
        self._library.run(self._producer.begin_transaction())

    def send(self, topic: str, records: list[Outgoing]) -> list[tuple[int, int]]:
        return self._library.run(self._send(topic, records))

    async def _send(self, topic: str, records: list[Outgoing]) -> list[tuple[int, int]]:
        futures = [await self._producer.send(topic, each.value, partition=each.partition) for each in records]
        await self._producer.flush()
        return [(answer.partition, answer.offset) for answer in await asyncio.gather(*futures)]

    def receive(self, count: int) -> list[Came]:
        return self._library.run(self._receive(count))

    async def _receive(self, count: int) -> list[Came]:
        assert self._consumer is not None
        received: list[Came] = []
        while len(received) < count:
            polled = await self._consumer.getmany(timeout_ms=100, max_records=count - len(received))
            received += _came(polled)
        return received

    def send_offsets(self, offsets: Offsets) -> None:
        wanted = {TopicPartition(self._source, partition): offset for partition, offset in offsets.items()}
        self._library.run(self._producer.send_offsets_to_transaction(wanted, self._group))

    def end(self, commit: bool) -> None:
        end = self._producer.commit_transaction if commit else self._producer.abort_transaction
        self._library.run(end())

    def close(self) -> None:
        if self._consumer is not None:
            self._library.run(self._consumer.stop())
        self._library.run(self._producer.stop())


class AssignedReader:
    def __init__(
        self, library: Aiokafka, bootstrap: list[str], topic: str, partitions: list[int], isolation: str
    ) -> None:
        self._library = library
        self._partitions = [TopicPartition(topic, partition) for partition in partitions]
        self._consumer = library.run(self._start(bootstrap, isolation))

    async def _start(self, bootstrap: list[str], isolation: str) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level=isolation)
        await consumer.start()
        consumer.assign(self._partitions)
        for partition in self._partitions:
            consumer.seek(partition, 0)
        return consumer

    def poll(self, timeout_s: float) -> list[Came]:
        polled = self._library.run(self._consumer.getmany(timeout_ms=int(timeout_s * 1000)))
        return _came(polled)

    def positions(self) -> Offsets:
        return self._library.run(self._ask_positions())

    async def _ask_positions(self) -> Offsets:
        return {each.partition: await self._consumer.position(each) for each in self._partitions}

    def close(self) -> None:
        self._library.run(self._consumer.stop())


def _came(polled: dict[TopicPartition, list[Any]]) -> list[Came]:
    return [
        Came(each.partition, each.offset, bytes(each.value))
        for records in polled.values()
        for each in records
    ]


if __name__ == "__main__":
    logging.disable()
    serve(Aiokafka(sys.argv[1]))
