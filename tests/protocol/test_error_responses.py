"""The answer of each API that says one error to everything a request asks for, and how that error is read."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.apis import APIS, Api, error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import groups, placement, topics
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.schema import Message, Response, decode, encode, version_range
from tests.protocol.samples import EVERY_API, Samples

ERROR = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
# Enough that every API is asked for something at least once.
SAMPLES = 20
# An empty list of directories is all that these can say, in Kafka too (KIP-784).
NOWHERE_TO_SAY_IT = {("DescribeLogDirs", 1), ("DescribeLogDirs", 2)}


def error_codes(message: Message) -> list[int]:
    """All error codes in an answer, however deep."""
    found = []
    for field in message.FIELDS:
        value = getattr(message, field.name)
        if field.name.endswith("error_code"):
            found.append(value)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Message):
                found += error_codes(item)
    return found


def sent(response: Response, version: int) -> Any:
    return decode(type(response), version, encode(response, version))


@pytest.mark.parametrize("api", EVERY_API, ids=lambda api: api.name)
def test_every_api_can_say_an_error_to_everything_in_every_version(api: Api) -> None:
    for version in version_range(api.request.VERSIONS):
        samples = Samples((api.name, version))
        read = set()
        for _ in range(SAMPLES):
            response = error_response(samples.message(api.request, version), version, ERROR)
            assert type(response) is api.response
            received = sent(response, version)
            told = [code for code in error_codes(received) if code]
            assert set(told) <= {ERROR}
            read.add(received.first_error())
        assert (ERROR in read) == ((api.name, version) not in NOWHERE_TO_SAY_IT), version


@pytest.mark.parametrize("api", EVERY_API, ids=lambda api: api.name)
def test_an_answer_without_an_error_says_none(api: Api) -> None:
    assert api.response().first_error() == ErrorCode.NONE


def test_every_topic_asked_for_is_answered_once() -> None:
    request = topics.CreateTopicsRequest(topics=[topics.CreatableTopic(name=name) for name in "aba"])
    response: Any = error_response(request, 7, ERROR, "No.")
    assert [(topic.name, topic.error_code, topic.error_message) for topic in response.topics] == [
        ("a", ERROR, "No."),
        ("b", ERROR, "No."),
    ]


def test_topics_to_delete_are_answered_by_the_name_or_id_they_were_asked_by() -> None:
    by_name = sent(error_response(topics.DeleteTopicsRequest(topic_names=["a"]), 5, ERROR), 5)
    assert [topic.name for topic in by_name.responses] == ["a"]
    by_id = topics.DeleteTopicsRequest(topics=[topics.DeleteTopicState(name=None, topic_id=b"x" * 16)])
    answered = sent(error_response(by_id, 6, ERROR), 6)
    assert [(topic.name, topic.topic_id) for topic in answered.responses] == [(None, b"x" * 16)]


def test_the_first_version_of_elections_has_its_error_beside_each_partition() -> None:
    request = placement.ElectLeadersRequest(
        topic_partitions=[placement.TopicPartitions(topic="a", partitions=[0])]
    )
    first = sent(error_response(request, 0, ErrorCode.NOT_CONTROLLER), 0)
    assert first.replica_election_results[0].partition_result[0].error_code == ErrorCode.NOT_CONTROLLER
    assert first.first_error() == ErrorCode.NOT_CONTROLLER
    assert sent(error_response(request, 1, ErrorCode.NOT_CONTROLLER), 1).first_error() == 41


def test_a_refused_fetch_names_its_partitions_until_the_session_may_know_them_alone() -> None:
    request = FetchRequest(
        topics=[FetchTopic(topic="a", topic_id=b"x" * 16, partitions=[FetchPartition(partition=3)])]
    )
    for version in version_range(FetchRequest.VERSIONS):
        response = sent(error_response(request, version, ERROR), version)
        assert response.error_code == (ERROR if version >= 7 else 0)
        told = [
            (part.partition_index, part.error_code) for each in response.responses for part in each.partitions
        ]
        assert told == ([(3, ERROR)] if version < 13 else [])


def test_a_refused_produce_has_no_offset() -> None:
    request = ProduceRequest(
        topic_data=[TopicProduceData(name="a", partition_data=[PartitionProduceData(index=1)])]
    )
    (result,) = sent(error_response(request, 9, ERROR), 9).responses[0].partition_responses
    assert (result.index, result.error_code, result.base_offset) == (1, ERROR, -1)


@pytest.mark.parametrize("version", range(10))
def test_a_refused_join_names_the_member_that_asked(version: int) -> None:
    response = sent(error_response(groups.JoinGroupRequest(member_id="m"), version, ERROR), version)
    assert (response.error_code, response.member_id, response.generation_id) == (ERROR, "m", -1)
    assert response.protocol_name == (None if version >= 7 else "")


def test_the_first_error_is_found_behind_what_succeeded() -> None:
    response = topics.MetadataResponse(
        topics=[
            topics.MetadataResponseTopic(
                partitions=[topics.MetadataResponsePartition(error_code=ErrorCode.LEADER_NOT_AVAILABLE)]
            )
        ]
    )
    assert response.first_error() == ErrorCode.LEADER_NOT_AVAILABLE


def test_every_api_has_an_answer_that_knows_errors() -> None:
    assert all(issubclass(api.response, Response) for api in APIS.values())
