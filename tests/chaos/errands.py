"""Errands to a broker: create topics, write and wait, read everything; and how to wait for one that is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.chaos.ledger import (
    Ledger,
    Place,
    Reading,
    decode_value,
    encode_value,
    identity_of,
    offset_in,
    place_of,
    seen_in,
)
from tests.interop.adapters.isolated import in_another_process

PATIENCE_S = 60.0
# librdkafka would by default forget the brokers it knows when none answers, and take a second to ask again.
_RECONNECT = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "metadata.recovery.strategy": "none",
    "log_level": 2,
}
_ABSENCE = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError._RESOLVE,
    KafkaError._DESTROY,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NETWORK_EXCEPTION,
    # A leader that moves while it is asked.
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    # A generation that went on without us while we could not be heard.
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError._STATE,
    KafkaError._ASSIGNMENT_LOST,
}


def settings(bootstrap: str, security: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """What every client is told, how it logs in under librdkafka's names, and more, with underscores for dots."""
    named = {name.replace("_", "."): value for name, value in more.items()}
    return {"bootstrap.servers": bootstrap, **_RECONNECT, **(security or {}), **named}


def is_absence(error: KafkaError) -> bool:
    """Whether an error says no more than that the broker was away, or had been."""
    return error.code() in _ABSENCE


def patiently(ask: Callable[[], Any]) -> Any:
    """Ask until a broker answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if not is_absence(error.args[0]) or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def create_topics(bootstrap: str, places: list[Place]) -> None:
    admin = AdminClient(settings(bootstrap))
    partitions: dict[str, int] = {}
    for place in places:
        partitions[place.topic] = max(partitions.get(place.topic, 0), place.partition + 1)
    for future in admin.create_topics([NewTopic(name, count) for name, count in partitions.items()]).values():
        future.result()


def produce(bootstrap: str, ledger: Ledger, place: Place, sequences: range, *, writer: int = 0) -> None:
    """Send some records and see each of them acknowledged."""
    producer = Producer(
        settings(bootstrap, enable_idempotence=True, message_timeout_ms=int(PATIENCE_S * 1000))
    )
    failures = []

    def delivered(identity: int, error: KafkaError | None, message: Message) -> None:
        if error is None:
            ledger.acknowledged(place, offset_in(message), identity)
        else:
            failures.append(error)

    for sequence in sequences:
        identity = identity_of(writer, sequence)
        producer.produce(
            place.topic,
            encode_value(identity, 100),
            partition=place.partition,
            on_delivery=partial(delivered, identity),
        )
    assert producer.flush(2 * PATIENCE_S) == 0, "not everything was acknowledged"
    assert not failures, failures[0]


def read_everything(
    bootstrap: str, places: Sequence[Place], security: Mapping[str, Any] | None = None
) -> dict[Place, Reading]:
    """Every record of these partitions, by assignment, with a client that checks the CRC of each batch."""
    consumer = Consumer(
        settings(
            bootstrap,
            security,
            group_id="nobody",
            enable_auto_commit=False,
            auto_offset_reset="error",
            check_crcs=True,
            enable_partition_eof=True,
            fetch_wait_max_ms=50,
        )
    )
    try:
        readings = {}
        for place in places:
            partition = TopicPartition(*place)
            low, _ = patiently(partial(consumer.get_watermark_offsets, partition, timeout=5))
            readings[place] = Reading(low)
        consumer.assign([TopicPartition(*place, reading.start_offset) for place, reading in readings.items()])
        ended: set[Place] = set()
        deadline = time.monotonic() + PATIENCE_S
        while len(ended) < len(readings):
            for message in consumer.consume(5000, timeout=0.1):
                place = place_of(message)
                error = message.error()
                if error is None:
                    _, offset, identity = seen_in(message)
                    readings[place].records.append((offset, identity))
                    deadline = time.monotonic() + PATIENCE_S
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(place)
                elif not is_absence(error):
                    raise KafkaException(error)
            assert time.monotonic() < deadline, f"no more to read, and no end: {set(readings) - ended}"
        return readings
    finally:
        consumer.close()


def read_with_kafka_python(bootstrap: str, place: Place) -> Reading:
    """One partition again, with a client that shares no code with librdkafka."""
    return in_another_process(_read_with_kafka_python, bootstrap, place)


def _read_with_kafka_python(bootstrap: str, place: Place) -> Reading:
    import kafka

    with closing(kafka.KafkaConsumer(bootstrap_servers=bootstrap, check_crcs=True)) as consumer:
        partition = kafka.TopicPartition(*place)
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        reading = Reading(consumer.position(partition))
        end = consumer.end_offsets([partition])[partition]
        deadline = time.monotonic() + PATIENCE_S
        while consumer.position(partition) < end:
            for records in consumer.poll(timeout_ms=500, max_records=5000).values():
                reading.records += [(record.offset, decode_value(record.value)) for record in records]
            assert time.monotonic() < deadline, f"no more to read before {end}"
        return reading
