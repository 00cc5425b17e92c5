"""What Kafka's own command line tools and older clients were answered differently than by Kafka."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.consumer_groups import ConsumerGroupHeartbeatRequest
from penstock.protocol.messages.groups import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.broker.phrases import create_topic, find_coordinator
from tests.broker.wire import Wire

Unique = Callable[[str], str]


def test_deleting_offsets_of_what_does_not_exist_says_so(wire: Wire, unique: Unique) -> None:
    group, topic, absent = unique("g"), unique("t"), unique("t")
    create_topic(wire, topic)
    find_coordinator(wire, group)
    kept = OffsetCommitRequestTopic(
        name=topic, partitions=[OffsetCommitRequestPartition(partition_index=0, committed_offset=5)]
    )
    wire.call(OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, topics=[kept]), 9)

    asked = {topic: (0, 9, -1), absent: (0,)}
    response = wire.call(
        OffsetDeleteRequest(
            group_id=group,
            topics=[
                OffsetDeleteRequestTopic(
                    name=name,
                    partitions=[OffsetDeleteRequestPartition(partition_index=index) for index in indexes],
                )
                for name, indexes in asked.items()
            ],
        ),
        0,
    )

    assert response.error_code == ErrorCode.NONE
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert {
        (result.name, partition.partition_index): partition.error_code
        for result in response.topics
        for partition in result.partitions
    } == {(topic, 0): ErrorCode.NONE, (topic, 9): unknown, (topic, -1): unknown, (absent, 0): unknown}


@pytest.mark.parametrize("version", [0, 1])
def test_the_consumer_group_protocol_is_refused_by_an_answer(wire: Wire, version: int) -> None:
    """librdkafka 2.16 takes an API that is not advertised for a broker yet to be upgraded, and waits."""
    request = ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", subscribed_topic_names=["t"])

    response = wire.call(request, version)

    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert "group.protocol=classic" in response.error_message
