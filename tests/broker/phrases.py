"""The requests that most tests begin with, so that each test shows only the one it is about."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.compression import Codec
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    DeleteTopicsRequest,
)
from penstock.protocol.records import batches, decode_records, encode_batch
from tests.broker.wire import Wire

LATEST = -1
EARLIEST = -2

Fields = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def handshake(wire: Wire) -> int:
    """The cheapest request there is; how many APIs are served."""
    return len(wire.call(ApiVersionsRequest(), 2).api_keys)


def create_topic(
    wire: Wire, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None
) -> bytes:
    """The new topic's id."""
    asked = CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=1,
        configs=[CreatableTopicConfig(name=key, value=value) for key, value in (configs or {}).items()],
    )
    (result,) = wire.call(CreateTopicsRequest(topics=[asked]), 7).topics
    assert result.error_code == 0, result
    topic_id: bytes = result.topic_id
    return topic_id


def delete_topic(wire: Wire, name: str) -> None:
    (result,) = wire.call(DeleteTopicsRequest(topic_names=[name]), 4).responses
    assert result.error_code == 0, result


def batch(*values: bytes, timestamp: int | None = None, codec: Codec = Codec.NONE, **fields: Any) -> bytes:
    """One record batch with these values, as a client writes it."""
    at = now_ms() if timestamp is None else timestamp
    records: list[Fields] = [(at, None, value, []) for value in values]
    return bytes(encode_batch(records, codec=codec, **fields))


def keyed(*values: bytes, codec: Codec = Codec.NONE, **fields: Any) -> bytes:
    """One record batch in which each value is its own key, as a compacted topic takes it."""
    records: list[Fields] = [(now_ms(), value, value, []) for value in values]
    return bytes(encode_batch(records, codec=codec, **fields))


def produce_request(
    topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1, timeout_ms: int = 10_000
) -> ProduceRequest:
    data = PartitionProduceData(index=partition, records=records)  # type: ignore[arg-type]
    topics = [TopicProduceData(name=topic, partition_data=[data])]
    return ProduceRequest(acks=acks, timeout_ms=timeout_ms, topic_data=topics)


def produce(
    wire: Wire, topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1, version: int = 9
) -> PartitionProduceResponse:
    """The broker's word about one partition."""
    response = wire.call(produce_request(topic, records, partition=partition, acks=acks), version)
    ((result,),) = (answer.partition_responses for answer in response.responses)
    assert isinstance(result, PartitionProduceResponse)
    return result


def put(wire: Wire, topic: str, *values: bytes, partition: int = 0) -> int:
    """Store values as one batch; the offset of the first."""
    result = produce(wire, topic, batch(*values), partition=partition)
    assert result.error_code == 0, result
    return result.base_offset


def fetch_request(
    topic: str,
    offset: int,
    *,
    partition: int = 0,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 25,
    partition_max_bytes: int = 1 << 25,
    current_leader_epoch: int = -1,
    session_id: int = 0,
    session_epoch: int = -1,
    isolation_level: int = 0,
) -> FetchRequest:
    wanted = FetchPartition(
        partition=partition,
        fetch_offset=offset,
        partition_max_bytes=partition_max_bytes,
        current_leader_epoch=current_leader_epoch,
    )
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        session_id=session_id,
        session_epoch=session_epoch,
        topics=[FetchTopic(topic=topic, partitions=[wanted])],
    )


def fetch(wire: Wire, topic: str, offset: int, *, version: int = 12, **options: Any) -> PartitionData:
    """What the broker has in one partition from an offset on."""
    response = wire.call(fetch_request(topic, offset, **options), version)
    assert response.error_code == 0, response
    ((data,),) = (answer.partitions for answer in response.responses)
    assert isinstance(data, PartitionData)
    return data


def values(records: Any) -> list[bytes | None]:
    """The values in the whole batches of a fetched record set."""
    return [
        record.value
        for position, _ in batches(records)
        for record in decode_records(records, position, bytes_max=1 << 28)
    ]


def everything(wire: Wire, topic: str, partition: int = 0) -> list[bytes | None]:
    """Every value of a partition, from its beginning to its end."""
    found: list[bytes | None] = []
    offset = list_offset(wire, topic, EARLIEST, partition=partition)
    while True:
        data = fetch(wire, topic, offset, partition=partition)
        assert data.error_code == 0, data
        headers = [header for _, header in batches(data.records)]  # type: ignore[arg-type]
        if not headers:
            return found
        found += values(data.records)
        offset = headers[-1].next_offset


def list_offset(wire: Wire, topic: str, timestamp: int, *, partition: int = 0, version: int = 7) -> int:
    wanted = ListOffsetsPartition(partition_index=partition, timestamp=timestamp)
    request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name=topic, partitions=[wanted])])
    ((result,),) = (answer.partitions for answer in wire.call(request, version).topics)
    assert result.error_code == 0, result
    offset: int = result.offset
    return offset


def find_coordinator(wire: Wire, group: str) -> None:
    """Make sure that groups can be used: the first time, this creates the offsets topic."""
    response = wire.call(FindCoordinatorRequest(key=group), 2)
    assert response.error_code == 0, response


def only(items: Sequence[Any]) -> Any:
    (item,) = items
    return item
