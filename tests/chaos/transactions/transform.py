"""A worker that reads one topic and writes another, exactly once: output and offsets in one transaction.

It is a member of a group, reads what is committed only, and after an abort reads again what it had read. The
output names the place that it was made from.
"""

from __future__ import annotations

import random
import time
from itertools import count

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.chaos.cluster_clients import cluster_settings, is_absence
from tests.chaos.transactions.bank import Output, Transfer
from tests.chaos.transactions.program import CALL_S, Transaction, insist, producer, run

BATCH = 100
SESSION_MS = 6000
POLL_MS = 15_000


def main(given: dict[str, str]) -> None:
    choose = random.Random(given["seed"])
    made = producer(given, linger_ms=choose.choice((0, 2)))
    consumer = Consumer(
        cluster_settings(
            given["bootstrap"],
            group_id=given["group"],
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            check_crcs=True,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=1000,
            # Also how long the others wait in a rebalance for one that is stuck.
            max_poll_interval_ms=POLL_MS,
            fetch_wait_max_ms=100,
            retry_backoff_ms=50,
        )
    )
    consumer.subscribe([given["topic"]])
    numbers = count()
    while True:
        batch = taken(consumer, choose.randint(1, BATCH))
        if not batch:
            continue
        number = next(numbers)
        transaction = Transaction(made, number)
        is_committed = transaction.attempt(
            lambda: work(transaction, batch, number, choose, made, consumer, given)  # noqa: B023
        )
        if not is_committed:
            rewind(consumer, batch)


def taken(consumer: Consumer, most: int) -> list[Message]:
    batch = []
    for message in consumer.consume(most, timeout=0.2):
        error = message.error()
        if error is None:
            batch.append(message)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET or not is_absence(error):
            raise KafkaException(error)
    return batch


def work(
    transaction: Transaction,
    batch: list[Message],
    number: int,
    choose: random.Random,
    made: Producer,
    consumer: Consumer,
    given: dict[str, str],
) -> bool:
    for message in batch:
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None and offset is not None and value is not None
        transfer = Transfer.decode(value)
        output = Output(
            int(given["client"]), int(given["instance"]), number, partition, offset, transfer.identity
        )
        transaction.produce(given["output"], choose.randrange(int(given["partitions"])), output.encode())
    if choose.random() < 0.1:
        transaction.flush(choose.uniform(0.01, 1))
        time.sleep(choose.expovariate(5))
    ends = {(message.topic(), message.partition()): message.offset() for message in batch}
    positions = [TopicPartition(topic, partition, offset + 1) for (topic, partition), offset in ends.items()]  # type: ignore[arg-type,operator]
    membership = consumer.consumer_group_metadata()
    insist(lambda: made.send_offsets_to_transaction(positions, membership, CALL_S))
    return choose.random() < 0.9


def rewind(consumer: Consumer, batch: list[Message]) -> None:
    """Read the batch again, where its partitions are still ours."""
    starts: dict[tuple[str | None, int | None], int | None] = {}
    for message in batch:
        starts.setdefault((message.topic(), message.partition()), message.offset())
    for (topic, partition), offset in starts.items():
        try:
            consumer.seek(TopicPartition(topic, partition, offset))  # type: ignore[arg-type]
        except KafkaException as exception:
            if exception.args[0].code() not in (KafkaError._STATE, KafkaError._UNKNOWN_PARTITION):
                raise


if __name__ == "__main__":
    run(main)
