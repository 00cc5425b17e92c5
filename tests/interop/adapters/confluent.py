"""confluent-kafka: librdkafka, and with it most clients that are not Java. Also the reference client."""

# confluent_kafka is typed, but does not say which names it exports.
# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.interop.client import (
    HEARTBEAT_INTERVAL_MS,
    PATIENCE_S,
    SESSION_TIMEOUT_MS,
    Acks,
    BrokerView,
    ClientError,
    ClusterView,
    ConfigView,
    GroupView,
    MemberView,
    Outgoing,
    PartitionView,
    Record,
    Security,
    Strategy,
    When,
    Written,
)

Result = TypeVar("Result")

CLIENT_ID = "confluent-kafka"

# librdkafka's own names for errors that Kafka calls otherwise.
KAFKA_NAMES = {
    "MSG_SIZE_TOO_LARGE": "MESSAGE_TOO_LARGE",
    "UNKNOWN_TOPIC_OR_PART": "UNKNOWN_TOPIC_OR_PARTITION",
    "TOPIC_EXCEPTION": "INVALID_TOPIC_EXCEPTION",
}


class ConfluentClient:
    def __init__(self, bootstrap: str, security: Security | None = None) -> None:
        self._common: dict[str, Any] = {
            **(security or {}),
            "bootstrap.servers": bootstrap,
            "client.id": CLIENT_ID,
            "log_level": 3,
        }
        self.admin = AdminClient(self._common)

    def close(self) -> None:
        del self.admin

    # Reading and writing

    def produce(
        self,
        topic: str,
        records: Sequence[Outgoing],
        *,
        codec: str = "none",
        acks: Acks = "all",
        idempotent: bool = False,
    ) -> list[Written]:
        producer = Producer(
            {
                **self._common,
                "acks": acks,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "partitioner": "murmur2_random",
                "linger.ms": 20,
                "message.max.bytes": 2_000_000,
            }
        )
        answers: list[Written | KafkaError | None] = [None] * len(records)

        for number, record in enumerate(records):

            def delivered(error: KafkaError | None, message: Message, number: int = number) -> None:
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                answers[number] = error or Written(partition, -1 if offset is None else offset)

            producer.produce(
                topic,
                record.value,
                record.key,
                partition=-1 if record.partition is None else record.partition,
                timestamp=record.timestamp or 0,
                headers=list(record.headers),
                on_delivery=delivered,
            )
        assert producer.flush(PATIENCE_S) == 0, "records were not answered"
        written = []
        for answer in answers:
            if isinstance(answer, KafkaError):
                raise _named(answer)
            assert answer is not None
            written.append(answer)
        return written

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Record]:
        consumer = Consumer({**self._common, "group.id": "unused", "enable.auto.commit": False})
        try:
            consumer.assign([TopicPartition(topic, partition, at) for partition, at in starts.items()])
            received: list[Record] = []
            while len(received) < count:
                messages = consumer.consume(count - len(received), timeout=PATIENCE_S)
                assert messages, f"{len(received)} of {count} records came"
                received += [record_of(message) for message in messages]
            return received
        finally:
            consumer.close()

    def offset(self, topic: str, partition: int, when: When) -> int | None:
        named = {
            "earliest": OffsetSpec.earliest,
            "latest": OffsetSpec.latest,
            "max_timestamp": OffsetSpec.max_timestamp,
        }
        spec = OffsetSpec.for_timestamp(when) if isinstance(when, int) else named[when]()
        asked = TopicPartition(topic, partition)
        found: int = _result(self.admin.list_offsets({asked: spec})[asked]).offset
        return None if found < 0 else found

    # Groups

    def join(
        self, group: str, topic: str, *, strategy: Strategy = "range", instance_id: str | None = None
    ) -> ConfluentMember:
        static = {"group.instance.id": instance_id} if instance_id else {}
        settings = {
            **self._common,
            "group.id": group,
            "partition.assignment.strategy": strategy,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
            **static,
        }
        return ConfluentMember(settings, topic)

    def resume(self, group: str, topic: str, count: int) -> list[Record]:
        settings = {
            **self._common,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        consumer = Consumer(settings)
        try:
            consumer.subscribe([topic])
            received: list[Record] = []
            while len(received) < count:
                message = consumer.poll(PATIENCE_S)
                assert message is not None, f"{len(received)} of {count} records came"
                received.append(record_of(message))
            ends = {record.partition: record.offset + 1 for record in received}
            offsets = [TopicPartition(topic, partition, end) for partition, end in ends.items()]
            consumer.commit(offsets=offsets, asynchronous=False)
            return received
        finally:
            consumer.close()

    def groups(self) -> set[str]:
        listed = _result(self.admin.list_consumer_groups())
        assert not listed.errors, listed.errors
        return {each.group_id for each in listed.valid}

    def describe_group(self, group: str) -> GroupView:
        described = _result(self.admin.describe_consumer_groups([group])[group])
        members = []
        for member in described.members:
            owned = member.assignment.topic_partitions if member.assignment else []
            partitions = frozenset(each.partition for each in owned)
            members.append(MemberView(member.client_id, partitions, member.group_instance_id))
        return GroupView(described.state.name, described.partition_assignor, tuple(members))

    def committed(
        self, group: str, topic: str, partitions: Iterable[int], *, require_stable: bool = False
    ) -> dict[int, int]:
        asked = [TopicPartition(topic, partition) for partition in partitions]
        request = [ConsumerGroupTopicPartitions(group, asked)]
        futures = self.admin.list_consumer_group_offsets(request, require_stable=require_stable)
        found = _result(futures[group]).topic_partitions
        for each in found:
            if each.error:
                raise _named(each.error)
        return {each.partition: each.offset for each in found if each.offset >= 0}

    def alter_committed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        wanted = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
        request = [ConsumerGroupTopicPartitions(group, wanted)]
        for each in _result(self.admin.alter_consumer_group_offsets(request)[group]).topic_partitions:
            if each.error:
                raise _named(each.error)

    def delete_committed(self, group: str, topic: str, partitions: Sequence[int]) -> None:
        raise AssertionError("confluent-kafka does not offer OffsetDelete")

    def delete_group(self, group: str) -> None:
        _result(self.admin.delete_consumer_groups([group])[group])

    # Topics, settings and the cluster

    def create_topic(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None, replicas: int = 1
    ) -> None:
        wanted = NewTopic(topic, partitions, replicas, config=dict(configs or {}))
        _result(self.admin.create_topics([wanted])[topic])

    def delete_topic(self, topic: str) -> None:
        _result(self.admin.delete_topics([topic])[topic])

    def create_partitions(self, topic: str, count: int) -> None:
        _result(self.admin.create_partitions([NewPartitions(topic, count)])[topic])

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        wanted = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
        for answer in self.admin.delete_records(wanted).values():
            _result(answer)

    def topics(self) -> set[str]:
        return set(self.admin.list_topics(timeout=PATIENCE_S).topics)

    def describe_topic(self, topic: str) -> dict[int, PartitionView]:
        described = self.admin.list_topics(topic, timeout=PATIENCE_S).topics[topic]
        if described.error is not None:
            raise _named(described.error)
        return {
            partition.id: PartitionView(partition.leader, tuple(partition.replicas), tuple(partition.isrs))
            for partition in described.partitions.values()
        }

    def describe_configs(self, topic: str) -> dict[str, ConfigView]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = _result(self.admin.describe_configs([resource])[resource])
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        return {name: ConfigView(entry.value, entry.source != own) for name, entry in entries.items()}

    def alter_config(self, topic: str, name: str, value: str | None) -> None:
        operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        entry = ConfigEntry(name, value or "", incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        _result(self.admin.incremental_alter_configs([resource])[resource])

    def describe_cluster(self) -> ClusterView:
        described = _result(self.admin.describe_cluster())
        brokers = tuple(BrokerView(node.id, node.host, node.port) for node in described.nodes)
        return ClusterView(described.cluster_id, described.controller.id, brokers)


class ConfluentMember:
    def __init__(self, settings: dict[str, Any], topic: str) -> None:
        self._consumer = Consumer(settings)
        self._incremental = settings["partition.assignment.strategy"] == "cooperative-sticky"
        self._owned: frozenset[int] = frozenset()
        self._revoked = 0
        self._records: list[Record] = []
        self._leaving = threading.Event()
        self._error: Exception | None = None
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke)
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def partitions(self) -> frozenset[int]:
        self._check()
        return self._owned

    def revoked(self) -> int:
        return self._revoked

    def records(self) -> list[Record]:
        self._check()
        return list(self._records)

    def leave(self) -> None:
        self._leaving.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the consumer does not close"
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _poll(self) -> None:
        try:
            while not self._leaving.is_set():
                message = self._consumer.poll(0.05)
                if message is not None:
                    self._records.append(record_of(message))
            self._consumer.close()
        except Exception as error:
            self._error = error

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        fresh = frozenset(each.partition for each in partitions)
        self._owned = self._owned | fresh if self._incremental else fresh

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        lost = frozenset(each.partition for each in partitions)
        self._owned -= lost
        if not self._leaving.is_set():
            self._revoked += len(lost)


def _result(future: Future[Result]) -> Any:
    try:
        return future.result(PATIENCE_S)
    except KafkaException as error:
        raise _named(error.args[0]) from error


def _named(error: KafkaError) -> ClientError:
    name = error.name().removeprefix("_")
    return ClientError(KAFKA_NAMES.get(name, name), error.str())


def record_of(message: Message) -> Record:
    error = message.error()
    if error is not None:
        raise _named(error)
    partition, offset = message.partition(), message.offset()
    assert partition is not None and offset is not None
    headers: list[tuple[str, Any]] = list(message.headers() or [])  # type: ignore[arg-type]
    return Record(partition, offset, message.timestamp()[1], message.key(), message.value(), tuple(headers))
