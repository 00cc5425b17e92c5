"""A broker whose wall clock is wrong, or is set: nothing is stored twice, deleted or refused because of it."""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.records import encode_batch
from tests.broker.test_virtual_time import create
from tests.virtual import Client, World

HOUR = 3_600_000
DAY = 24 * HOUR


def produced(client: Client, topic: str, timestamp: int, *, sequence: int | None = None) -> tuple[int, int]:
    """(error code, base offset) of one record."""
    producer = {} if sequence is None else {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
    batch = encode_batch([(timestamp, None, b"value", ())], **producer)
    data = PartitionProduceData(index=0, records=batch)
    request = ProduceRequest(
        acks=-1, timeout_ms=30_000, topic_data=[TopicProduceData(name=topic, partition_data=[data])]
    )
    result = client.call(request, 9).responses[0].partition_responses[0]
    return result.error_code, result.base_offset


def test_a_retry_after_the_clock_was_set_is_not_stored_again() -> None:
    world = World()
    client = world.client()
    create(client, "events")
    sent_ms = world.clock.wall_ms()
    assert produced(client, "events", sent_ms, sequence=0) == (ErrorCode.NONE, 0)
    world.clock.wall += 2 * DAY
    world.run_for(700_000)  # producers are swept meanwhile
    client = world.client()
    assert produced(client, "events", sent_ms, sequence=0) == (ErrorCode.NONE, 0)
