"""aiokafka: an asyncio client, with a protocol implementation of its own.

The tests are plain functions, so the adapter keeps an event loop in a thread and sends each call there.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.helpers import create_ssl_context

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
DYNAMIC_TOPIC_CONFIG = 1


class AiokafkaClient:
    def __init__(self, bootstrap: str, security: Security) -> None:
        # It takes no list in one string.
        self._common = {"bootstrap_servers": bootstrap.split(","), **_secured(security)}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @cached_property
    def _admin(self) -> Any:
        with explained("aiokafka"):
            return self._run(self._start_admin())

    def close(self) -> None:
        self._run(self._admin.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        with _named_errors():
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _start_admin(self) -> Any:
        admin = AIOKafkaAdminClient(**self._common)
        await admin.start()
        return admin

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
        return self._run(self._produce(topic, records, codec, acks, idempotent))

    async def _produce(
        self, topic: str, records: Sequence[Outgoing], codec: str, acks: Acks, idempotent: bool
    ) -> list[Written]:
        producer = AIOKafkaProducer(
            **self._common,
            acks=ACKS[acks],
            compression_type=None if codec == "none" else codec,
            enable_idempotence=idempotent,
            linger_ms=20,
            max_request_size=2_000_000,
        )
        await producer.start()
        try:
            futures = [
                await producer.send(
                    topic,
                    each.value,
                    each.key,
                    partition=each.partition,
                    timestamp_ms=each.timestamp,
                    headers=list(each.headers),
                )
                for each in records
            ]
            await producer.flush()
            answers = await asyncio.gather(*futures)
        finally:
            await producer.stop()
        if acks == "0":
            return [Written(-1, -1) for _ in answers]
        return [Written(answer.partition, answer.offset) for answer in answers]

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Record]:
        return self._run(self._consume(topic, starts, count))

    async def _consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Record]:
        consumer = AIOKafkaConsumer(**self._common)
        await consumer.start()
        try:
            consumer.assign([TopicPartition(topic, partition) for partition in starts])
            for partition, offset in starts.items():
                consumer.seek(TopicPartition(topic, partition), offset)
            return await _receive(consumer, count)
        finally:
            await consumer.stop()

    def offset(self, topic: str, partition: int, when: When) -> int | None:
        return self._run(self._offset(TopicPartition(topic, partition), when))

    async def _offset(self, asked: TopicPartition, when: When) -> int | None:
        consumer = AIOKafkaConsumer(**self._common)
        await consumer.start()
        try:
            if when == "earliest":
                answer = await consumer.beginning_offsets([asked])
                return int(answer[asked])
            if when == "latest":
                answer = await consumer.end_offsets([asked])
                return int(answer[asked])
            found = (await consumer.offsets_for_times({asked: when}))[asked]
            return None if found is None else int(found.offset)
        finally:
            await consumer.stop()

    # Groups

    def join(
        self, group: str, topic: str, *, strategy: Strategy = "range", instance_id: str | None = None
    ) -> AiokafkaMember:
        assert strategy == "range", "aiokafka has no cooperative assignor"
        settings = {
            **self._common,
            "group_id": group,
            "group_instance_id": instance_id,
            "auto_offset_reset": "earliest",
            "partition_assignment_strategy": (RangePartitionAssignor,),
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
        }
        return AiokafkaMember(self._loop, settings, topic)

    def resume(self, group: str, topic: str, count: int) -> list[Record]:
        return self._run(self._resume(group, topic, count))

    async def _resume(self, group: str, topic: str, count: int) -> list[Record]:
        consumer = AIOKafkaConsumer(
            topic,
            **self._common,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        try:
            received = await _receive(consumer, count)
            ends = {TopicPartition(topic, each.partition): each.offset + 1 for each in received}
            await consumer.commit(ends)
            return received
        finally:
            await consumer.stop()

    def groups(self) -> set[str]:
        return {group[0] for group in self._run(self._admin.list_consumer_groups())}

    def describe_group(self, group: str) -> GroupView:
        (answer,) = self._run(self._admin.describe_consumer_groups([group]))
        (described,) = answer.to_object()["groups"]
        members = []
        for member in described["members"]:
            assignment = ConsumerProtocolMemberAssignment.decode(member["member_assignment"])
            partitions = frozenset(index for _, indexes in assignment.assignment for index in indexes)
            members.append(MemberView(member["client_id"], partitions))
        return GroupView(described["state"].upper(), described["protocol"], tuple(members))

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        asked = [TopicPartition(topic, partition) for partition in partitions]
        found = self._run(self._admin.list_consumer_group_offsets(group, partitions=asked))
        return {each.partition: commit.offset for each, commit in found.items() if commit.offset >= 0}

    def alter_committed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        raise AssertionError("aiokafka's admin client does not commit")

    def delete_committed(self, group: str, topic: str, partitions: Sequence[int]) -> None:
        raise AssertionError("aiokafka does not offer OffsetDelete")

    def delete_group(self, group: str) -> None:
        raise AssertionError("aiokafka does not offer DeleteGroups")

    # Topics, settings and the cluster

    def create_topic(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None, replicas: int = 1
    ) -> None:
        wanted = NewTopic(topic, partitions, replicas, topic_configs=dict(configs or {}))
        answer = self._run(self._admin.create_topics([wanted]))
        _raise_code(answer.topic_errors[0][1], str(answer))

    def delete_topic(self, topic: str) -> None:
        answer = self._run(self._admin.delete_topics([topic]))
        _raise_code(answer.topic_error_codes[0][1], str(answer))

    def create_partitions(self, topic: str, count: int) -> None:
        self._run(self._admin.create_partitions({topic: NewPartitions(count)}))

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        wanted = {TopicPartition(topic, p): RecordsToDelete(offset) for p, offset in before.items()}
        self._run(self._admin.delete_records(wanted))

    def topics(self) -> set[str]:
        return set(self._run(self._admin.list_topics()))

    def describe_topic(self, topic: str) -> dict[int, PartitionView]:
        (described,) = self._run(self._admin.describe_topics([topic]))
        _raise_code(described["error_code"], topic)
        return {
            each["partition"]: PartitionView(each["leader"], tuple(each["replicas"]), tuple(each["isr"]))
            for each in described["partitions"]
        }

    def describe_configs(self, topic: str) -> dict[str, ConfigView]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        (answer,) = self._run(self._admin.describe_configs([resource]))
        (described,) = answer.to_object()["resources"]
        _raise_code(described["error_code"], described["error_message"])
        return {
            each["config_names"]: ConfigView(
                each["config_value"], each["config_source"] != DYNAMIC_TOPIC_CONFIG
            )
            for each in described["config_entries"]
        }

    def alter_config(self, topic: str, name: str, value: str | None) -> None:
        # Only AlterConfigs, which replaces everything: what is to stay has to be sent again.
        wanted = {
            key: each.value for key, each in self.describe_configs(topic).items() if not each.is_default
        }
        wanted[name] = value
        kept = {key: each for key, each in wanted.items() if each is not None}
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, kept)
        (answer,) = self._run(self._admin.alter_configs([resource]))
        code, message, *_ = answer.resources[0]
        _raise_code(code, message)

    def describe_cluster(self) -> ClusterView:
        described = self._run(self._admin.describe_cluster())
        brokers = (BrokerView(each["node_id"], each["host"], each["port"]) for each in described["brokers"])
        return ClusterView(described["cluster_id"], described["controller_id"], tuple(brokers))


class AiokafkaMember(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, loop: asyncio.AbstractEventLoop, settings: dict[str, Any], topic: str) -> None:
        self._loop = loop
        self._owned: frozenset[int] = frozenset()
        self._revoked = 0
        self._records: list[Record] = []
        self._leaving = False
        self._polling = asyncio.run_coroutine_threadsafe(self._poll(settings, topic), loop)

    def partitions(self) -> frozenset[int]:
        self._check()
        return self._owned

    def revoked(self) -> int:
        return self._revoked

    def records(self) -> list[Record]:
        self._check()
        return list(self._records)

    def leave(self) -> None:
        self._leaving = True
        self._polling.result(PATIENCE_S)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._owned = frozenset(each.partition for each in assigned)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        lost = frozenset(each.partition for each in revoked)
        self._owned -= lost
        if not self._leaving:
            self._revoked += len(lost)

    def _check(self) -> None:
        if self._polling.done():
            self._polling.result()

    async def _poll(self, settings: dict[str, Any], topic: str) -> None:
        consumer = AIOKafkaConsumer(**settings)
        consumer.subscribe([topic], listener=self)
        await consumer.start()
        try:
            while not self._leaving:
                for records in (await consumer.getmany(timeout_ms=50)).values():
                    self._records += map(_record, records)
        finally:
            await consumer.stop()


def _secured(security: Security) -> dict[str, Any]:
    if not security:
        return {}
    return {
        "security_protocol": security["security.protocol"],
        "ssl_context": create_ssl_context(
            cafile=security["ssl.ca.location"],
            certfile=security.get("ssl.certificate.location"),
            keyfile=security.get("ssl.key.location"),
        ),
        "sasl_mechanism": security.get("sasl.mechanism", "PLAIN"),
        "sasl_plain_username": security.get("sasl.username"),
        "sasl_plain_password": security.get("sasl.password"),
    }


async def _receive(consumer: Any, count: int) -> list[Record]:
    received: list[Record] = []
    while len(received) < count:
        polled = await consumer.getmany(timeout_ms=PATIENCE_S * 1000, max_records=count - len(received))
        assert polled, f"{len(received)} of {count} records came"
        received += [_record(record) for records in polled.values() for record in records]
    return received


def _record(record: Any) -> Record:
    headers = tuple((name, value) for name, value in record.headers)
    return Record(record.partition, record.offset, record.timestamp, record.key, record.value, headers)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except kafka_errors.KafkaError as error:
        raise ClientError(error_name(error), str(error)) from error


def _raise_code(code: int, message: str) -> None:
    if code:
        raise ClientError(ERROR_NAMES.get(code, str(code)), message)
