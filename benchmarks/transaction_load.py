"""A program that loads a broker with transactions of librdkafka's, for ``benchmarks/transactions.py``.

``python -m benchmarks.transaction_load load=small|large|transform …``; it says ``begun`` when the part to be
measured begins and ``done COUNT SECONDS`` when it ends. ``java/TransactionLoad.java`` does the same with Kafka's
client.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

RECORD_BYTES = 100
INTERVAL_S = 0.1
PARTITIONS = 10
PATIENCE_S = 60


class Load:
    def __init__(self, given: dict[str, str]) -> None:
        self._given = given
        self._is_over = False
        self._counts: list[int] = []

    def producer(self, transactional_id: str | None) -> Producer:
        settings: dict[str, Any] = {
            "bootstrap.servers": self._given["bootstrap"],
            "enable.idempotence": True,
            "batch.size": 65536,
            "linger.ms": 0 if self._given["load"] == "small" else 5,
            "queue.buffering.max.messages": 1_000_000,
        }
        if transactional_id is None:
            return Producer(settings)
        made = Producer(settings | {"transactional.id": transactional_id})
        made.init_transactions(PATIENCE_S)
        return made

    def run(self) -> None:
        work = self._small if self._given["load"] == "small" else self._large
        threads = []
        for number in range(int(self._given["producers"])):
            made = self.producer(f"{self._given['name']}-{number}")
            self._counts.append(0)
            threads.append(threading.Thread(target=work, args=(number, made)))
            threads[-1].start()
        time.sleep(float(self._given["warm_up_s"]))
        before, began = sum(self._counts), time.perf_counter()
        say("begun")
        time.sleep(float(self._given["seconds"]))
        say(f"done {sum(self._counts) - before} {time.perf_counter() - began}")
        self._is_over = True
        for thread in threads:
            thread.join()

    def _small(self, number: int, made: Producer) -> None:
        """Transactions of one record for each of some partitions."""
        partitions, topic, value = int(self._given["partitions"]), self._given["topic"], b"x" * RECORD_BYTES
        turn = 0
        while not self._is_over:
            made.begin_transaction()
            for each in range(partitions):
                made.produce(topic, value, partition=(turn + each) % PARTITIONS)
            made.commit_transaction(PATIENCE_S)
            turn += 1
            self._counts[number] += 1

    def _large(self, number: int, made: Producer) -> None:
        """As many records as go into transactions of 100 ms."""
        topic, value = self._given["topic"], b"x" * RECORD_BYTES
        while not self._is_over:
            made.begin_transaction()
            end = time.perf_counter() + INTERVAL_S
            sent = 0
            while time.perf_counter() < end:
                partition = sent // 100 % PARTITIONS
                for _ in range(100):
                    _produce(made, topic, partition, value)
                sent += 100
            made.commit_transaction(PATIENCE_S)
            self._counts[number] += sent

    def transform(self) -> None:
        """Read a topic to its end, write each record into another, and commit every 100 ms."""
        is_exact = self._given["exactly"] == "once"
        topic, output = self._given["topic"], self._given["output"]
        records = int(self._given["records"])
        made = self.producer(self._given["name"] if is_exact else None)
        consumer = Consumer(
            {
                "bootstrap.servers": self._given["bootstrap"],
                "group.id": self._given["name"],
                "enable.auto.commit": False,
                "isolation.level": "read_committed" if is_exact else "read_uncommitted",
                "queued.min.messages": 200_000,
            }
        )
        consumer.assign([TopicPartition(topic, each, 0) for each in range(int(self._given["partitions"]))])
        made.list_topics(output, timeout=PATIENCE_S)
        _await_coordinator(consumer, TopicPartition(topic, 0, 0))
        say("begun")
        began = time.perf_counter()
        read = 0
        while read < records:
            end = time.perf_counter() + INTERVAL_S
            positions: dict[int, int] = {}
            if is_exact:
                made.begin_transaction()
            while read < records and time.perf_counter() < end:
                for message in consumer.consume(2000, timeout=0.05):
                    if message.error() is not None:
                        raise KafkaException(message.error())
                    partition = message.partition()
                    _produce(made, output, partition, message.value())  # type: ignore[arg-type]
                    positions[partition] = message.offset()  # type: ignore[assignment,index]
                    read += 1
                made.poll(0)
            offsets = [
                TopicPartition(topic, partition, offset + 1) for partition, offset in positions.items()
            ]
            if is_exact and offsets:
                made.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), PATIENCE_S)
            if is_exact:
                made.commit_transaction(PATIENCE_S)
            elif offsets:
                assert made.flush(PATIENCE_S) == 0
                consumer.commit(offsets=offsets, asynchronous=False)
        say(f"done {read} {time.perf_counter() - began}")


def _produce(made: Producer, topic: str, partition: int, value: bytes) -> None:
    while True:
        try:
            made.produce(topic, value, partition=partition)
            return
        except BufferError:
            made.poll(0.005)


def _await_coordinator(consumer: Consumer, offset: TopicPartition) -> None:
    """The first commit of all makes the topic of offsets, which takes its time."""
    deadline = time.perf_counter() + PATIENCE_S
    while True:
        try:
            consumer.commit(offsets=[offset], asynchronous=False)
            return
        except KafkaException:
            if time.perf_counter() > deadline:
                raise
        time.sleep(0.1)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    load = Load(given)
    if given["load"] == "transform":
        load.transform()
    else:
        load.run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
