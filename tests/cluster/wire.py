"""Questions to one broker of a cluster that no client library lets a test ask: to this node, in these words."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.protocol.apis import APIS
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.quorum import (
    DescribeQuorumRequest,
    DescribeQuorumRequestPartition,
    DescribeQuorumRequestTopic,
)
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic
from penstock.protocol.records import encode_batch
from penstock.protocol.schema import Message

Address = tuple[str, int]

METADATA_VERSION = 12
PRODUCE_VERSION = 10
FETCH_VERSION = 12
QUORUM_VERSION = 2
CLIENT_ID = b"cluster-tests"


class NoAnswer(Exception):
    """The broker could not be reached, closed the connection or was silent."""


class Wire:
    """One connection to one broker. Raises NoAnswer."""

    def __init__(
        self, address: Address, *, timeout_s: float = 5.0, context: ssl.SSLContext | None = None
    ) -> None:
        """With a context, over TLS."""
        try:
            self._socket = socket.create_connection(address, timeout_s)
            if context is not None:
                self._socket = context.wrap_socket(self._socket, server_hostname=address[0])
        except OSError as error:
            raise NoAnswer(f"{address}: {error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def call(self, request: Message, version: int) -> Any:
        api = APIS[request.KEY]
        self._correlation_id += 1
        header = struct.pack(">hhih", api.key, version, self._correlation_id, len(CLIENT_ID)) + CLIENT_ID
        if api.request_header_version(version) == 2:
            header += b"\0"
        content = b"".join([header, *map(bytes, api.encode_request[version](request))])
        try:
            self._socket.sendall(struct.pack(">i", len(content)) + content)
            (size,) = struct.unpack(">i", self._exactly(4))
            answer = self._exactly(size)
        except OSError as error:
            raise NoAnswer(repr(error)) from None
        (correlation_id,) = struct.unpack_from(">i", answer)
        if correlation_id != self._correlation_id:
            raise DecodeError(f"an answer to {correlation_id}, not {self._correlation_id}")
        start = 4 + api.response_header_version(version)
        return api.decode_response[version](memoryview(answer), start)[0]

    def ends_after(self, data: bytes) -> bool:
        """Whether the broker closes the connection when it gets these bytes, whatever it answers before."""
        try:
            self._socket.sendall(data)
            while self._socket.recv(1 << 20):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            data = self._socket.recv(min(size - len(received), 1 << 20))
            if not data:
                raise OSError("closed")
            received += data
        return bytes(received)


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition as one broker sees it."""

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]
    error: int


def partitions(address: Address, topics: Iterable[str] | None = None) -> dict[tuple[str, int], PartitionView]:
    """What a broker answers to Metadata; of all topics if none are named."""
    wanted = None if topics is None else [MetadataRequestTopic(name=name) for name in topics]
    with Wire(address) as wire:
        answer = wire.call(MetadataRequest(topics=wanted, allow_auto_topic_creation=False), METADATA_VERSION)
    return {
        (topic.name, each.partition_index): PartitionView(
            each.leader_id,
            each.leader_epoch,
            tuple(each.replica_nodes),
            tuple(each.isr_nodes),
            each.error_code,
        )
        for topic in answer.topics
        for each in topic.partitions
    }


def leader_address(address: Address, topic: str, partition: int, *, timeout_s: float = 5.0) -> Address | None:
    """Where the leader of a partition listens, as a broker tells it; None when it knows of none."""
    wanted = [MetadataRequestTopic(name=topic)]
    with Wire(address, timeout_s=timeout_s) as wire:
        answer = wire.call(MetadataRequest(topics=wanted, allow_auto_topic_creation=False), METADATA_VERSION)
    leaders = [each.leader_id for each in answer.topics[0].partitions if each.partition_index == partition]
    return next(((each.host, each.port) for each in answer.brokers if [each.node_id] == leaders), None)


def brokers(address: Address) -> list[int]:
    """The brokers that one of them knows to be alive."""
    with Wire(address) as wire:
        answer = wire.call(MetadataRequest(topics=[], allow_auto_topic_creation=False), METADATA_VERSION)
    return sorted(each.node_id for each in answer.brokers)


def endpoints(address: Address, context: ssl.SSLContext | None = None) -> dict[int, Address]:
    """Where the brokers listen, as one of them tells a client of this listener."""
    with Wire(address, context=context) as wire:
        answer = wire.call(MetadataRequest(topics=[], allow_auto_topic_creation=False), METADATA_VERSION)
    return {each.node_id: (each.host, each.port) for each in answer.brokers}


def quorum(address: Address) -> Any:
    """The metadata quorum as a broker describes it. Raises NoAnswer also when there is no leader to ask."""
    partition = DescribeQuorumRequestPartition(partition_index=0)
    topic = DescribeQuorumRequestTopic(topic_name="__cluster_metadata", partitions=[partition])
    with Wire(address) as wire:
        answer = wire.call(DescribeQuorumRequest(topics=[topic]), QUORUM_VERSION)
    if answer.error_code or not answer.topics:
        raise NoAnswer(f"DescribeQuorum: error {answer.error_code}")
    described = answer.topics[0].partitions[0]
    if described.error_code or described.leader_id < 0:
        raise NoAnswer(f"DescribeQuorum: error {described.error_code}, leader {described.leader_id}")
    return described


def produce(
    wire: Wire, topic: str, partition: int, value: bytes, *, acks: int, timeout_ms: int = 5000
) -> Any:
    """One record in one batch; the partition's answer."""
    return produce_with_endpoints(wire, topic, partition, value, acks=acks, timeout_ms=timeout_ms)[0]


def produce_with_endpoints(
    wire: Wire, topic: str, partition: int, value: bytes, *, acks: int, timeout_ms: int = 5000
) -> tuple[Any, dict[int, Address]]:
    """The partition's answer, and the addresses that came with it (KIP-951)."""
    records = bytes(encode_batch([(time.time_ns() // 1_000_000, None, value, [])]))
    data = [PartitionProduceData(index=partition, records=memoryview(records))]
    answer = wire.call(
        ProduceRequest(
            acks=acks, timeout_ms=timeout_ms, topic_data=[TopicProduceData(name=topic, partition_data=data)]
        ),
        PRODUCE_VERSION,
    )
    endpoints = {each.node_id: (each.host, each.port) for each in answer.node_endpoints}
    return answer.responses[0].partition_responses[0], endpoints


def fetch(
    wire: Wire, topic: str, partition: int, offset: int, *, rack: str = "", is_committed: bool = False
) -> Any:
    """At most a megabyte from an offset, at once, of all or of what is committed; the partition's answer."""
    wanted = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20)
    answer = wire.call(
        FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1 << 20,
            session_epoch=-1,
            isolation_level=int(is_committed),
            topics=[FetchTopic(topic=topic, partitions=[wanted])],
            rack_id=rack,
        ),
        FETCH_VERSION,
    )
    return answer.responses[0].partitions[0]
