"""kafka-python: a client in pure Python, with a protocol implementation of its own."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.structs import OffsetAndMetadata

from tests.interop.adapters.explained import explained
from tests.interop.client import (
    ERROR_NAMES,
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
    error_name,
)

Result = TypeVar("Result")

ACKS: dict[Acks, int | str] = {"0": 0, "1": 1, "all": "all"}
OFFSETS = {
    "earliest": OffsetSpec.EARLIEST,
    "latest": OffsetSpec.LATEST,
    "max_timestamp": OffsetSpec.MAX_TIMESTAMP,
}
STRATEGIES = {"range": RangePartitionAssignor, "cooperative-sticky": CooperativeStickyAssignor}
TOPIC_SOURCE = "DYNAMIC_TOPIC_CONFIG"
SECURITY = {
    "security.protocol": "security_protocol",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
}


class KafkaPythonClient:
    def __init__(self, bootstrap: str, security: Security) -> None:
        self._common: dict[str, Any] = {SECURITY[name]: value for name, value in security.items()}
        self._common["bootstrap_servers"] = bootstrap

    @cached_property
    def _admin(self) -> Any:
        with explained("kafka"), _named_errors():
            return KafkaAdminClient(**self._common)

    def close(self) -> None:
        self._admin.close()

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
        producer = KafkaProducer(
            **self._common,
            acks=ACKS[acks],
            compression_type=None if codec == "none" else codec,
            enable_idempotence=idempotent,
            linger_ms=20,
            max_request_size=2_000_000,
        )
        with closing(producer):
            futures = [
                producer.send(topic, each.value, each.key, list(each.headers), each.partition, each.timestamp)
                for each in records
            ]
            producer.flush(PATIENCE_S)
            with _named_errors():
                answers = [future.get(PATIENCE_S) for future in futures]
        return [Written(answer.partition, answer.offset) for answer in answers]

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Record]:
        with closing(KafkaConsumer(**self._common)) as consumer:
            consumer.assign([TopicPartition(topic, partition) for partition in starts])
            for partition, offset in starts.items():
                consumer.seek(TopicPartition(topic, partition), offset)
            return _receive(consumer, count)

    def offset(self, topic: str, partition: int, when: When) -> int | None:
        asked = TopicPartition(topic, partition)
        spec = when if isinstance(when, int) else OFFSETS[when]
        with _named_errors():
            found: int = self._admin.list_partition_offsets({asked: spec})[asked].offset
        return None if found < 0 else found

    # Groups

    def join(
        self, group: str, topic: str, *, strategy: Strategy = "range", instance_id: str | None = None
    ) -> KafkaPythonMember:
        consumer = KafkaConsumer(
            **self._common,
            group_id=group,
            group_instance_id=instance_id,
            auto_offset_reset="earliest",
            partition_assignment_strategy=(STRATEGIES[strategy],),
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
        )
        return KafkaPythonMember(consumer, topic)

    def resume(self, group: str, topic: str, count: int) -> list[Record]:
        consumer = KafkaConsumer(
            topic,
            **self._common,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        with closing(consumer):
            received = _receive(consumer, count)
            ends = {record.partition: record.offset + 1 for record in received}
            consumer.commit(_commits(topic, ends))
        return received

    def groups(self) -> set[str]:
        return {group["group_id"] for group in self._admin.list_groups()}

    def describe_group(self, group: str) -> GroupView:
        described = self._admin.describe_groups([group])[group]
        members = []
        for member in described["members"]:
            assigned = member["member_assignment"]["assigned_partitions"]
            partitions = frozenset(index for topic in assigned for index in topic["partitions"])
            members.append(MemberView(member["client_id"], partitions, member["group_instance_id"]))
        return GroupView(described["group_state"].upper(), described["protocol_data"], tuple(members))

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        asked = [TopicPartition(topic, partition) for partition in partitions]
        found = self._admin.list_group_offsets({group: asked})[group]
        return {each.partition: commit.offset for each, commit in found.items() if commit.offset >= 0}

    def alter_committed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        _raise_first(self._admin.alter_group_offsets(group, _commits(topic, offsets)))

    def delete_committed(self, group: str, topic: str, partitions: Sequence[int]) -> None:
        asked = [TopicPartition(topic, partition) for partition in partitions]
        _raise_first(self._admin.delete_group_offsets(group, asked))

    def delete_group(self, group: str) -> None:
        answer = self._admin.delete_groups([group])[group]
        if answer != "OK":
            raise _named(getattr(kafka_errors, answer)())

    # Topics, settings and the cluster

    def create_topic(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None, replicas: int = 1
    ) -> None:
        wanted = {
            "num_partitions": partitions,
            "replication_factor": replicas,
            "configs": dict(configs or {}),
        }
        with _named_errors():
            self._admin.create_topics({topic: wanted})

    def delete_topic(self, topic: str) -> None:
        with _named_errors():
            self._admin.delete_topics([topic])

    def create_partitions(self, topic: str, count: int) -> None:
        with _named_errors():
            self._admin.create_partitions({topic: count})

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        with _named_errors():
            self._admin.delete_records({TopicPartition(topic, p): offset for p, offset in before.items()})

    def topics(self) -> set[str]:
        return set(self._admin.list_topics())

    def describe_topic(self, topic: str) -> dict[int, PartitionView]:
        (described,) = self._admin.describe_topics([topic])
        if described["error_code"]:
            raise _named(kafka_errors.for_code(described["error_code"])())
        return {
            each["partition_index"]: PartitionView(
                each["leader_id"], tuple(each["replica_nodes"]), tuple(each["isr_nodes"])
            )
            for each in described["partitions"]
        }

    def describe_configs(self, topic: str) -> dict[str, ConfigView]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, None)
        with _named_errors():
            described = self._admin.describe_configs([resource], config_filter="all")["topic"][topic]
        return {
            name: ConfigView(each["value"], TOPIC_SOURCE not in str(each["config_source"]))
            for name, each in described.items()
        }

    def alter_config(self, topic: str, name: str, value: str | None) -> None:
        operation = ("delete", None) if value is None else ("set", value)
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: operation})
        with _named_errors():
            answer = self._admin.alter_configs([resource])["topic"][topic]
        # The answer is prose, with the number of the error in it.
        number = re.match(r"\[Error (\d+)\]", str(answer))
        if number is not None:
            raise ClientError(ERROR_NAMES[int(number[1])], str(answer))

    def describe_cluster(self) -> ClusterView:
        described = self._admin.describe_cluster()
        brokers = (BrokerView(each["broker_id"], each["host"], each["port"]) for each in described["brokers"])
        return ClusterView(described["cluster_id"], described["controller_id"], tuple(brokers))


class KafkaPythonMember(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, consumer: Any, topic: str) -> None:
        self._consumer = consumer
        self._owned: frozenset[int] = frozenset()
        self._revoked = 0
        self._records: list[Record] = []
        self._leaving = threading.Event()
        self._error: Exception | None = None
        consumer.subscribe([topic], listener=self)
        # It must know the topic before it joins. Otherwise it joins anew when it has learned of it, and if a poll
        # ends in the middle of that join, it never looks at its outcome.
        assert topic in consumer.topics(), f"there is no {topic}"
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

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        # Eager assignors revoke everything first, so adding is right for them too.
        self._owned |= frozenset(each.partition for each in assigned)

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        lost = frozenset(each.partition for each in revoked)
        self._owned -= lost
        if not self._leaving.is_set():
            self._revoked += len(lost)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _poll(self) -> None:
        try:
            with closing(self._consumer):
                while not self._leaving.is_set():
                    for records in self._consumer.poll(timeout_ms=50).values():
                        self._records += map(_record, records)
        except Exception as error:
            self._error = error


def _receive(consumer: Any, count: int) -> list[Record]:
    received: list[Record] = []
    while len(received) < count:
        polled = consumer.poll(timeout_ms=PATIENCE_S * 1000, max_records=count - len(received))
        assert polled, f"{len(received)} of {count} records came"
        received += [_record(record) for records in polled.values() for record in records]
    return received


def _record(record: Any) -> Record:
    headers = tuple((name, value) for name, value in record.headers)
    return Record(record.partition, record.offset, record.timestamp, record.key, record.value, headers)


def _commits(topic: str, offsets: Mapping[int, int]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {TopicPartition(topic, p): OffsetAndMetadata(offset, "", -1) for p, offset in offsets.items()}


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except kafka_errors.KafkaError as error:
        raise _named(error) from error


def _named(error: kafka_errors.KafkaError) -> ClientError:
    return ClientError(error_name(error), str(error))


def _raise_first(answers: Mapping[TopicPartition, Callable[[], kafka_errors.KafkaError]]) -> None:
    for error in answers.values():
        if error is not kafka_errors.NoError:
            raise _named(error())
