"""Metadata, DescribeTopicPartitions and the changes of topics on the wire, and the settings of topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import DescribeClusterRequest
from penstock.protocol.messages.configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    Cursor,
    DeleteTopicsRequest,
    DeleteTopicState,
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataRequestTopic,
    TopicRequest,
)
from tests.broker.conftest import Node
from tests.broker.phrases import batch, create_topic, delete_topic, everything, only, produce, put
from tests.broker.wire import Wire
from tests.support import BrokerProcess

Unique = Callable[[str], str]

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4


def names(response: Any) -> list[str]:
    return [topic.name for topic in response.topics]


def metadata(wire: Wire, *topics: str, version: int = 9, create: bool = False) -> Any:
    asked = [MetadataRequestTopic(name=name) for name in topics]
    return wire.call(MetadataRequest(topics=asked, allow_auto_topic_creation=create), version)


# Metadata


@pytest.mark.parametrize("version", range(14))
def test_every_version_tells_where_a_topic_is(node: Node, wire: Wire, unique: Unique, version: int) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name, 2)
    response = metadata(wire, name, version=version)
    broker = only(response.brokers)
    assert (broker.node_id, broker.host, broker.port) == (1, *node.address)
    topic = only(response.topics)
    assert (topic.error_code, topic.name, topic.is_internal) == (0, name, False)
    assert topic.topic_id == (topic_id if version >= 10 else bytes(16))
    assert [partition.partition_index for partition in topic.partitions] == [0, 1]
    for partition in topic.partitions:
        assert (partition.error_code, partition.leader_id) == (0, 1)
        assert (partition.replica_nodes, partition.isr_nodes) == ([1], [1])
        assert partition.leader_epoch == (0 if version >= 7 else -1)
    assert response.controller_id == (1 if version >= 1 else -1)
    assert bool(response.cluster_id) == (version >= 2)


def test_an_empty_list_means_all_topics_in_version_zero_and_none_later(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    assert name in names(wire.call(MetadataRequest(topics=[]), 0))
    for version in range(1, 14):
        assert names(wire.call(MetadataRequest(topics=[]), version)) == []


def test_no_list_means_all_topics(wire: Wire, unique: Unique) -> None:
    kept, deleted = unique("t"), unique("t")
    create_topic(wire, kept)
    create_topic(wire, deleted)
    for version in range(1, 14):
        assert {kept, deleted} <= set(names(wire.call(MetadataRequest(topics=None), version)))
    delete_topic(wire, deleted)
    # The answer is kept in bytes until something changes.
    for version in range(1, 14):
        found = names(wire.call(MetadataRequest(topics=None), version))
        assert kept in found and deleted not in found


def test_topics_are_found_by_id(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name)
    for version in (10, 11, 12, 13):
        asked = [MetadataRequestTopic(name=None, topic_id=topic_id)]
        topic = only(wire.call(MetadataRequest(topics=asked), version).topics)
        assert (topic.error_code, topic.name, topic.topic_id) == (0, name, topic_id)


@pytest.mark.parametrize("topic_id", [bytes(16), b"\xff" * 16, bytes(15) + b"\1"])
def test_ids_of_no_topic_are_unknown(wire: Wire, topic_id: bytes) -> None:
    for version in (10, 12, 13):
        asked = [MetadataRequestTopic(name=None, topic_id=topic_id)]
        topic = only(wire.call(MetadataRequest(topics=asked), version).topics)
        assert (topic.error_code, topic.topic_id) == (ErrorCode.UNKNOWN_TOPIC_ID, topic_id)


def test_a_topic_asked_for_twice_is_told_once(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    assert names(metadata(wire, name, name, "no-such-topic", "no-such-topic")) == [name, "no-such-topic"]


def test_a_missing_topic_is_created_when_the_client_allows_it(wire: Wire, unique: Unique) -> None:
    refused, created, old = unique("t"), unique("t"), unique("t")
    assert only(metadata(wire, refused).topics).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    topic = only(metadata(wire, created, create=True).topics)
    assert topic.error_code == 0
    assert only(topic.partitions).leader_id == 1
    assert put(wire, created, b"v") == 0
    # Before version 4 a client could not say no.
    assert only(metadata(wire, old, version=3).topics).error_code == 0
    assert only(metadata(wire, refused).topics).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_two_clients_that_create_the_same_topic_both_get_it(node: Node, unique: Unique) -> None:
    name = unique("t")
    with node.connect() as one, node.connect() as two:
        for wire in (one, two):
            asked = [MetadataRequestTopic(name=name)]
            wire.send(MetadataRequest(topics=asked, allow_auto_topic_creation=True), 10)
        ids = set()
        for wire in (one, two):
            topic = only(wire.receive().topics)
            assert topic.error_code == 0
            ids.add(topic.topic_id)
    assert len(ids) == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../x",
        "a/b",
        "%2e%2e",
        "a" * 250,
        "nul\0",
        "\u202eright",
        "with space",
        "żółć",
        "a\r\nb",
    ],
    ids=repr,
)
def test_names_that_no_topic_can_have_are_refused_everywhere(wire: Wire, name: str) -> None:
    assert only(metadata(wire, name, create=True).topics).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    asked = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    result = only(wire.call(CreateTopicsRequest(topics=[asked]), 7).topics)
    assert (result.name, result.error_code) == (name, ErrorCode.INVALID_TOPIC_EXCEPTION)
    deletion = only(wire.call(DeleteTopicsRequest(topic_names=[name]), 5).responses)
    assert deletion.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_brokers_own_topics_are_not_for_clients_to_create_or_delete(wire: Wire, unique: Unique) -> None:
    for name in ("__consumer_offsets", "__transaction_state", "__cluster_metadata"):
        asked = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
        assert only(wire.call(CreateTopicsRequest(topics=[asked]), 7).topics).error_code != 0
        assert only(wire.call(DeleteTopicsRequest(topic_names=[name]), 5).responses).error_code != 0
    assert only(metadata(wire, "__share_group_state", create=True).topics).error_code != 0


def test_auto_creation_can_be_switched_off() -> None:
    settings = {"auto.create.topics.enable": "false"}
    with BrokerProcess(settings) as process, Wire((process.host, process.port)) as wire:
        for version in (0, 3, 9, 13):
            topic = only(metadata(wire, "missing", version=version, create=True).topics)
            assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert names(wire.call(MetadataRequest(topics=None), 9)) == []


def test_authorized_operations_are_told_only_to_who_asks(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    asked = [MetadataRequestTopic(name=name)]
    omitted = -(2**31)
    for wanted in (False, True):
        request = MetadataRequest(
            topics=asked,
            include_topic_authorized_operations=wanted,
            include_cluster_authorized_operations=wanted,
        )
        response = wire.call(request, 8)
        assert (only(response.topics).topic_authorized_operations != omitted) == wanted
        assert (response.cluster_authorized_operations != omitted) == wanted


def test_describe_cluster_names_this_broker(node: Node, wire: Wire) -> None:
    for version in (0, 1, 2):
        response = wire.call(DescribeClusterRequest(), version)
        broker = only(response.brokers)
        assert (response.error_code, broker.broker_id, broker.host, broker.port) == (0, 1, *node.address)
    # Controllers exist, but not on this listener; the others are nothing at all.
    for endpoint_type, error in (
        (2, ErrorCode.MISMATCHED_ENDPOINT_TYPE),
        (0, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE),
        (-1, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE),
    ):
        assert wire.call(DescribeClusterRequest(endpoint_type=endpoint_type), 2).error_code == error


# DescribeTopicPartitions


def describe(wire: Wire, *topics: str, limit: int = 2000, cursor: Cursor | None = None) -> Any:
    asked = [TopicRequest(name=name) for name in topics]
    request = DescribeTopicPartitionsRequest(topics=asked, response_partition_limit=limit, cursor=cursor)
    return wire.call(request, 0)


def test_partitions_are_described_page_by_page(wire: Wire, unique: Unique) -> None:
    topics = {unique("t"): 5, unique("t"): 1, unique("t"): 4}
    for name, count in topics.items():
        create_topic(wire, name, count)
    for limit in (1, 2, 3, 10, 2000):
        seen = []
        cursor = None
        pages = 0
        while True:
            response = describe(wire, *topics, limit=limit, cursor=cursor)
            pages += 1
            shown = [
                (topic.name, partition.partition_index)
                for topic in response.topics
                for partition in topic.partitions
            ]
            assert len(shown) <= limit
            seen += shown
            cursor = response.next_cursor
            if cursor is None:
                break
        assert seen == [(name, index) for name in sorted(topics) for index in range(topics[name])]
        assert pages == -(-10 // limit)


def test_descriptions_have_empty_lists_where_java_cannot_read_null(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    topic_id = create_topic(wire, name)
    topic = only(describe(wire, name).topics)
    assert (topic.error_code, topic.topic_id) == (0, topic_id)
    partition = only(topic.partitions)
    assert (partition.eligible_leader_replicas, partition.last_known_elr) == ([], [])
    assert (partition.leader_id, partition.replica_nodes, partition.isr_nodes) == (1, [1], [1])


def test_unknown_topics_and_strange_cursors_are_answered(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, 2)
    missing = only(describe(wire, "no-such-topic").topics)
    assert missing.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert only(describe(wire, "a/b").topics).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    for cursor in (
        Cursor(topic_name=name, partition_index=2**31 - 1),
        Cursor(topic_name=name, partition_index=-5),
        Cursor(topic_name="zzz", partition_index=1),
        Cursor(topic_name="", partition_index=0),
    ):
        assert describe(wire, name, cursor=cursor).next_cursor is None
    for limit in (0, -1, -(2**31), 2**31 - 1):
        assert describe(wire, name, limit=limit).topics[0].error_code == 0
    assert name in names(describe(wire)) or describe(wire).next_cursor is not None


# CreateTopics, DeleteTopics, CreatePartitions


@pytest.mark.parametrize("version", range(2, 8))
def test_every_version_creates_topics(wire: Wire, unique: Unique, version: int) -> None:
    name = unique("t")
    asked = CreatableTopic(
        name=name,
        num_partitions=3,
        replication_factor=1,
        configs=[CreatableTopicConfig(name="retention.ms", value="1234")],
    )
    result = only(wire.call(CreateTopicsRequest(topics=[asked], timeout_ms=1000), version).topics)
    assert (result.name, result.error_code, result.error_message) == (name, 0, None)
    if version >= 5:
        assert (result.num_partitions, result.replication_factor) == (3, 1)
        assert {config.name: config.value for config in result.configs}["retention.ms"] == "1234"
    assert len(only(metadata(wire, name).topics).partitions) == 3
    again = only(wire.call(CreateTopicsRequest(topics=[asked]), version).topics)
    assert again.error_code == ErrorCode.TOPIC_ALREADY_EXISTS


def test_validate_only_creates_nothing(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    asked = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    result = only(wire.call(CreateTopicsRequest(topics=[asked], validate_only=True), 7).topics)
    assert result.error_code == 0
    assert only(metadata(wire, name).topics).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


CREATIONS: dict[str, tuple[dict[str, Any], ErrorCode]] = {
    "no partitions": ({"num_partitions": 0}, ErrorCode.INVALID_PARTITIONS),
    "partitions -2": ({"num_partitions": -2}, ErrorCode.INVALID_PARTITIONS),
    "2^31-1 partitions": ({"num_partitions": 2**31 - 1}, ErrorCode.POLICY_VIOLATION),
    "too few brokers": ({"replication_factor": 2}, ErrorCode.INVALID_REPLICATION_FACTOR),
    "32767 replicas": ({"replication_factor": 32767}, ErrorCode.INVALID_REPLICATION_FACTOR),
    "replication 0": ({"replication_factor": 0}, ErrorCode.INVALID_REPLICATION_FACTOR),
    "another broker": (
        {
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [CreatableReplicaAssignment(partition_index=0, broker_ids=[7])],
        },
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
    "a gap": (
        {
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [CreatableReplicaAssignment(partition_index=5, broker_ids=[1])],
        },
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
    "unknown setting": (
        {"configs": [CreatableTopicConfig(name="no.such.setting", value="1")]},
        ErrorCode.INVALID_CONFIG,
    ),
    "setting without a value": (
        {"configs": [CreatableTopicConfig(name="retention.ms", value=None)]},
        ErrorCode.INVALID_CONFIG,
    ),
    "an unknown policy": (
        {"configs": [CreatableTopicConfig(name="cleanup.policy", value="compress")]},
        ErrorCode.INVALID_CONFIG,
    ),
}


@pytest.mark.parametrize("what", CREATIONS)
def test_topics_that_cannot_be_are_refused_with_a_reason(wire: Wire, unique: Unique, what: str) -> None:
    fields, error = CREATIONS[what]
    name = unique("t")
    asked = CreatableTopic(**{"name": name, "num_partitions": 1, "replication_factor": 1, **fields})
    result = only(wire.call(CreateTopicsRequest(topics=[asked]), 7).topics)
    assert result.error_code == error
    assert result.error_message
    assert only(metadata(wire, name).topics).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_names_that_differ_only_by_dots_and_underscores_collide(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, f"{name}.x")
    asked = CreatableTopic(name=f"{name}_x", num_partitions=1, replication_factor=1)
    result = only(wire.call(CreateTopicsRequest(topics=[asked]), 7).topics)
    assert result.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_topic_named_twice_is_refused(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    asked = [CreatableTopic(name=name, num_partitions=1, replication_factor=1)] * 2
    assert (
        only(wire.call(CreateTopicsRequest(topics=asked), 7).topics).error_code == ErrorCode.INVALID_REQUEST
    )


def test_topics_are_deleted_by_name_and_by_id(wire: Wire, unique: Unique) -> None:
    for version in range(1, 7):
        name = unique("t")
        topic_id = create_topic(wire, name)
        request = DeleteTopicsRequest(
            topic_names=[name], topics=[DeleteTopicState(name=None, topic_id=topic_id)], timeout_ms=1000
        )
        result = only(wire.call(request, version).responses)
        assert (result.name, result.error_code) == (name, 0)
        assert only(metadata(wire, name).topics).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        gone = only(wire.call(request, version).responses)
        wanted = ErrorCode.UNKNOWN_TOPIC_ID if version == 6 else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert gone.error_code == wanted


def test_a_topic_created_again_is_empty_and_another_one(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    first = create_topic(wire, name)
    put(wire, name, b"old")
    delete_topic(wire, name)
    second = create_topic(wire, name)
    assert first != second
    assert everything(wire, name) == []
    assert put(wire, name, b"new") == 0
    assert everything(wire, name) == [b"new"]


def test_deletion_and_creation_sent_together_happen_in_order(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    put(wire, name, b"old")
    asked = CreatableTopic(name=name, num_partitions=2, replication_factor=1)
    for _ in range(5):
        wire.send(DeleteTopicsRequest(topic_names=[name]), 4)
        wire.send(CreateTopicsRequest(topics=[asked]), 7)
    for _ in range(5):
        assert only(wire.receive().responses).error_code == 0
        assert only(wire.receive().topics).error_code == 0
    assert everything(wire, name) == []
    assert put(wire, name, b"new", partition=1) == 0


@pytest.mark.parametrize("version", range(4))
def test_partitions_are_added(wire: Wire, unique: Unique, version: int) -> None:
    name = unique("t")
    create_topic(wire, name, 2)
    put(wire, name, b"kept", partition=1)
    grown = CreatePartitionsTopic(name=name, count=4, assignments=None)
    assert only(wire.call(CreatePartitionsRequest(topics=[grown]), version).results).error_code == 0
    assert len(only(metadata(wire, name).topics).partitions) == 4
    assert put(wire, name, b"new", partition=3) == 0
    assert everything(wire, name, 1) == [b"kept"]
    for count in (4, 1, 0, -1, -(2**31)):
        asked = CreatePartitionsTopic(name=name, count=count, assignments=None)
        result = only(wire.call(CreatePartitionsRequest(topics=[asked]), version).results)
        assert result.error_code == ErrorCode.INVALID_PARTITIONS
    asked = CreatePartitionsTopic(name=name, count=2**31 - 1, assignments=None)
    result = only(wire.call(CreatePartitionsRequest(topics=[asked]), version).results)
    assert result.error_code == ErrorCode.POLICY_VIOLATION


# Settings


def settings(
    wire: Wire, resource: str, kind: int = TOPIC_RESOURCE, *, version: int = 4
) -> dict[str, str | None]:
    asked = DescribeConfigsResource(resource_type=kind, resource_name=resource, configuration_keys=None)
    result = only(wire.call(DescribeConfigsRequest(resources=[asked]), version).results)
    assert result.error_code == 0, result
    return {config.name: config.value for config in result.configs}


def incremental(
    wire: Wire, topic: str, name: str, operation: int, value: str | None, version: int = 1
) -> int:
    config = IncrementalAlterableConfig(name=name, config_operation=operation, value=value)
    resource = IncrementalAlterConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name=topic, configs=[config]
    )
    code: int = only(
        wire.call(IncrementalAlterConfigsRequest(resources=[resource]), version).responses
    ).error_code
    return code


def test_settings_are_changed_and_take_effect(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    assert incremental(wire, name, "max.message.bytes", 0, "200") == 0
    for version in range(1, 5):
        assert settings(wire, name, version=version)["max.message.bytes"] == "200"
    assert produce(wire, name, batch(b"x" * 300)).error_code == ErrorCode.MESSAGE_TOO_LARGE
    assert incremental(wire, name, "max.message.bytes", 1, None) == 0
    assert produce(wire, name, batch(b"x" * 300)).error_code == 0


def test_alter_configs_replaces_everything(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name, configs={"retention.ms": "111"})
    config = AlterableConfig(name="segment.bytes", value="222222")
    resource = AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configs=[config])
    for version in (0, 1, 2):
        assert only(wire.call(AlterConfigsRequest(resources=[resource]), version).responses).error_code == 0
    now = settings(wire, name)
    assert now["segment.bytes"] == "222222"
    assert now["retention.ms"] == "604800000"


def test_a_resource_described_twice_is_told_once(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    asked = DescribeConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configuration_keys=None)
    results = wire.call(DescribeConfigsRequest(resources=[asked] * 3), 4).results
    assert [result.error_code for result in results] == [0]


def test_settings_of_what_does_not_exist_are_refused(wire: Wire) -> None:
    for kind, resource in (
        (2, "no-such-topic"),
        (2, ""),
        (4, "7"),
        (4, "x"),
        (0, "x"),
        (-1, "x"),
        (8, "1"),
        (127, ""),
    ):
        asked = DescribeConfigsResource(resource_type=kind, resource_name=resource, configuration_keys=None)
        assert only(wire.call(DescribeConfigsRequest(resources=[asked]), 4).results).error_code != 0, kind
    assert settings(wire, "1", BROKER_RESOURCE)["node.id"] == "1"


@pytest.mark.parametrize("operation", [2, 3, 4, -1, 127])
def test_strange_operations_on_settings_are_refused(wire: Wire, unique: Unique, operation: int) -> None:
    name = unique("t")
    create_topic(wire, name)
    assert incremental(wire, name, "retention.ms", operation, "5") != 0
    assert incremental(wire, name, "retention.ms", 0, None) == ErrorCode.INVALID_REQUEST
    assert incremental(wire, name, "no.such.setting", 0, "5") == ErrorCode.INVALID_CONFIG


def test_a_topic_whose_creation_was_just_refused_is_not_created_by_asking_for_it(
    wire: Wire, unique: Unique
) -> None:
    name = unique("t")
    asked = CreatableTopic(name=name, num_partitions=1, replication_factor=7)
    (refused,) = wire.call(CreateTopicsRequest(topics=[asked]), 7).topics
    assert refused.error_code == ErrorCode.INVALID_REPLICATION_FACTOR
    assert only(metadata(wire, name, create=True).topics).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    # It was somebody's wish: with other numbers it is created at once.
    create_topic(wire, name)


def test_a_topic_that_was_just_deleted_is_not_created_by_a_client_that_polls(
    node: Node, wire: Wire, unique: Unique
) -> None:
    name = unique("t")
    create_topic(wire, name)
    with node.connect() as polling:
        assert only(metadata(polling, name, create=True).topics).error_code == ErrorCode.NONE
        delete_topic(wire, name)
        for _ in range(3):
            (topic,) = metadata(polling, name, create=True).topics
            assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert name not in names(wire.call(MetadataRequest(topics=None), 9))
    create_topic(wire, name)
