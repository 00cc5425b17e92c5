"""Errors in responses, wherever a message has them."""

from __future__ import annotations

from penstock.broker.network.response_errors import error_finder, error_name, errors_to_count
from penstock.protocol.apis import APIS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import HeartbeatResponse
from penstock.protocol.messages.topics import (
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)


def test_an_error_at_the_top_is_found() -> None:
    find = error_finder(HeartbeatResponse)
    assert find is not None
    assert list(find(HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))) == [27]
    assert list(find(HeartbeatResponse())) == []


def test_errors_of_all_topics_and_partitions_are_found() -> None:
    find = error_finder(MetadataResponse)
    assert find is not None
    partitions = [MetadataResponsePartition(error_code=code) for code in (0, 5, 0, 5)]
    topics = [
        MetadataResponseTopic(error_code=3, name="a"),
        MetadataResponseTopic(name="b", partitions=partitions),
    ]
    assert sorted(find(MetadataResponse(topics=topics))) == [3, 5, 5]


def test_produce_and_fetch_are_not_searched_because_their_handlers_count() -> None:
    assert errors_to_count(0) is None and errors_to_count(1) is None
    searched = [key for key in APIS if errors_to_count(key) is not None]
    assert len(searched) > 40


def test_an_error_of_a_later_release_has_its_number_as_its_name() -> None:
    assert (error_name(3), error_name(31_999)) == ("UNKNOWN_TOPIC_OR_PARTITION", "31999")
