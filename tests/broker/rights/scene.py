"""One broker with ACLs in virtual time, and clients with the principals that a test gives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.broker.network.authorization import Operation, Principal, ResourceType
from penstock.metadata.authorizer import ALLOW, LITERAL
from penstock.metadata.security import Acl, acl_record
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from penstock.protocol.messages.metadata_records import RemoveAccessControlEntryRecord
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.records import encode_batch
from penstock.protocol.schema import Message
from tests.virtual import Client, World

ADMIN = "admin"
HOST = "10.1.2.3"
SETTINGS = {
    "authorizer.class.name": "acls",
    "super.users": f"User:{ADMIN};User:CN=other",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
}

Needed = tuple[Operation, ResourceType, str]


class Scene:
    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.world = World({**SETTINGS, **(settings or {})})
        self.broker = self.world.broker
        self._ids = itertools.count(1)
        self.admin = self.client(ADMIN)

    def client(self, user: str, host: str = HOST) -> Client:
        """A client that has proven to be this user."""
        client = self.world.client(host)
        assert self.world.node.client is not None
        *_, connection = self.world.node.client._connections
        connection.principal = Principal("User", user)
        return client

    # ACLs, as the controller would write them

    def add(self, *acls: Acl) -> list[bytes]:
        ids = [next(self._ids).to_bytes(16, "big") for _ in acls]
        self._write([acl_record(id, acl) for id, acl in zip(ids, acls, strict=True)])
        return ids

    def remove(self, ids: Iterable[bytes]) -> None:
        self._write([RemoveAccessControlEntryRecord(id=id) for id in ids])

    def allow(self, user: str, *rights: Needed) -> list[bytes]:
        return self.add(
            *(
                Acl(int(resource), name, LITERAL, f"User:{user}", "*", int(operation), ALLOW)
                for operation, resource, name in rights
            )
        )

    def _write(self, changes: list[Message]) -> None:
        active = self.broker.active_controller
        controller = active._controller
        assert controller is not None
        committed: list[object] = []
        active._propose(controller._decide(changes, True), committed.append, lambda: None, lambda: None)
        self.world.run_until(lambda: bool(committed), 10_000)

    # What the administrator does

    def create(self, *names: str) -> None:
        topics = [CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in names]
        assert not list(errors_in(self.admin.call(CreateTopicsRequest(topics=topics), 7)))

    def commit(self, group: str, topic: str) -> None:
        self.admin.call(FindCoordinatorRequest(coordinator_keys=[group]), 4)
        answer = self.admin.call(commit_request(group, topic), 8)
        assert not list(errors_in(answer)), answer

    def producer(self, transactional_id: str) -> tuple[int, int]:
        """A producer id and epoch for a transactional id."""
        self.admin.call(FindCoordinatorRequest(coordinator_keys=[transactional_id], key_type=1), 4)
        request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000)
        answer = self.admin.call(request, 4)
        assert not answer.error_code, answer
        return answer.producer_id, answer.producer_epoch

    def state(self) -> object:
        """Everything that a request could change: the metadata, and the logs, with those of the coordinators."""
        return self.broker.image.offset, {
            (each.topic, each.index): (each.log.log_start_offset, each.log.log_end_offset)
            for each in self.broker.partitions
            if each.is_open
        }


def commit_request(group: str, topic: str) -> OffsetCommitRequest:
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=1, committed_metadata="")
    return OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequestTopic(name=topic, partitions=[partition])],
    )


def produce_request(
    topic: str, *, transactional_id: str | None = None, acks: int = -1, **batch: Any
) -> ProduceRequest:
    records = memoryview(encode_batch([(1, None, b"value", [])], **batch))
    data = PartitionProduceData(index=0, records=records)
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=1_000,
        topic_data=[TopicProduceData(name=topic, partition_data=[data])],
    )


def errors_in(message: Message) -> Iterator[ErrorCode]:
    """Every error in a response, wherever it is."""
    for field in message.FIELDS:
        value = getattr(message, field.name)
        if field.name.endswith("error_code") and value:
            yield ErrorCode(value)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Message):
                yield from errors_in(item)
