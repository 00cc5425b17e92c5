"""What a test does to topics, with librdkafka: our own client is not to be its own witness."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import OFFSET_END, ConsumerGroupTopicPartitions, KafkaError, Producer
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

TIMEOUT_S = 60.0


class Topics:
    """On brokers that stay alive, unless told otherwise."""

    def __init__(self, bootstrap: str, *, leaders_may_die: bool = False) -> None:
        self.bootstrap = bootstrap
        # What librdkafka then sends again must not count twice. Otherwise it does without: an idempotent producer
        # asks for its id half a second after it was made.
        self._is_idempotent = leaders_may_die
        self._admin = AdminClient({"bootstrap.servers": bootstrap})
        # Of all records that have no time of their own. A test that runs over midnight stays on its day.
        self._now_ms = time.time_ns() // 1_000_000

    def create(
        self, topic: str, partitions: int = 1, *, replicas: int = -1, configs: Mapping[str, str] | None = None
    ) -> str:
        new = NewTopic(topic, partitions, replicas, config=dict(configs or {}))
        self._done(self._admin.create_topics([new], operation_timeout=TIMEOUT_S))
        return topic

    def grow(self, topic: str, partitions: int) -> None:
        self._done(self._admin.create_partitions([NewPartitions(topic, partitions)]))

    def delete(self, topic: str) -> None:
        self._done(self._admin.delete_topics([topic], operation_timeout=TIMEOUT_S))

    def delete_records(self, topic: str, partition: int, before: int = OFFSET_END) -> None:
        """What retention would do: the log begins at ``before`` from now on."""
        self._done(self._admin.delete_records([Place(topic, partition, before)]))

    def send(
        self,
        topic: str,
        values: Iterable[bytes | None],
        *,
        partition: int = 0,
        keys: Iterable[bytes | None] | None = None,
        headers: list[tuple[str, bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Write records into one partition and wait until all are acknowledged.

        Readers see all of them at once or none, unless there are so many that they make several batches.
        """
        failures: list[KafkaError] = []
        defaults: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap,
            # The flush ends it. A shorter one would send half of them whenever the machine is busy elsewhere.
            "linger.ms": TIMEOUT_S * 1000,
            "enable.idempotence": self._is_idempotent,
        }
        producer = Producer({**defaults, **(settings or {})})
        # Of a topic that it does not know the flush would send the first record alone, as soon as it does.
        producer.list_topics(topic, TIMEOUT_S)
        given = iter(keys) if keys is not None else None
        for value in values:
            key = None if given is None else next(given)
            extra: dict[str, Any] = {} if headers is None else {"headers": headers}
            producer.produce(
                topic,
                value=value,
                key=key,
                partition=partition,
                timestamp=self._now_ms if timestamp_ms is None else timestamp_ms,
                on_delivery=lambda error, _: failures.append(error) if error else None,
                **extra,
            )
            producer.poll(0)
        left = producer.flush(TIMEOUT_S)
        assert not left, f"{left} records were not acknowledged"
        assert not failures, failures[0]

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """What a lag tool sees."""
        asked = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        found = asked[group].result(TIMEOUT_S)
        return {(each.topic, each.partition): each.offset for each in found.topic_partitions}

    def _done(self, futures: Mapping[Any, Any]) -> None:
        for future in futures.values():
            future.result(TIMEOUT_S)
