"""Topics: Metadata, and creating, extending, deleting and describing topics.

Careful: in Metadata a null list of topics means all of them and an empty list none, except in version 0, where an
empty list means all.
"""

from __future__ import annotations

from penstock.protocol.messages import OPERATIONS_OMITTED
from penstock.protocol.schema import (
    NO_UUID,
    OWN_TAGS,
    Message,
    Response,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    string,
    struct,
    uuid,
)


class MetadataRequestTopic(Message):
    topic_id: bytes = uuid("10+")
    name: str | None = string(nullable="10+")


class MetadataRequest(Message, key=3, versions="0-13", flexible="9+"):
    topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable="1+")
    allow_auto_topic_creation: bool = boolean("4+", default=True)
    include_cluster_authorized_operations: bool = boolean("8-10")
    include_topic_authorized_operations: bool = boolean("8+")


class MetadataResponseBroker(Message):
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string("1+", nullable=True, default=None)


class MetadataResponsePartition(Message):
    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32("7+", default=-1)
    replica_nodes: list[int] = array(int32)
    isr_nodes: list[int] = array(int32)
    offline_replicas: list[int] = array(int32, "5+")


class MetadataResponseTopic(Message):
    error_code: int = int16()
    name: str | None = string(nullable="12+")
    topic_id: bytes = uuid("10+")
    is_internal: bool = boolean("1+")
    partitions: list[MetadataResponsePartition] = array(MetadataResponsePartition)
    topic_authorized_operations: int = int32("8+", default=OPERATIONS_OMITTED)


class MetadataResponse(Response, key=3, versions="0-13", flexible="9+"):
    throttle_time_ms: int = int32("3+")
    brokers: list[MetadataResponseBroker] = array(MetadataResponseBroker)
    cluster_id: str | None = string("2+", nullable=True, default=None)
    controller_id: int = int32("1+", default=-1)
    topics: list[MetadataResponseTopic] = array(MetadataResponseTopic)
    cluster_authorized_operations: int = int32("8-10", default=OPERATIONS_OMITTED)
    # For the whole response: REBOOTSTRAP_REQUIRED tells the client to start over (KIP-1102).
    error_code: int = int16("13+")

    @classmethod
    def for_error(
        cls, request: MetadataRequest, version: int, error: int, message: str | None = None
    ) -> MetadataResponse:
        return cls(
            error_code=error,
            topics=[
                MetadataResponseTopic(error_code=error, name=topic.name, topic_id=topic.topic_id)
                for topic in request.topics or []
            ],
        )


class CreatableReplicaAssignment(Message):
    partition_index: int = int32()
    broker_ids: list[int] = array(int32)


class CreatableTopicConfig(Message):
    name: str = string()
    value: str | None = string(nullable=True)


class CreatableTopic(Message):
    name: str = string()
    num_partitions: int = int32()
    replication_factor: int = int16()
    assignments: list[CreatableReplicaAssignment] = array(CreatableReplicaAssignment)
    configs: list[CreatableTopicConfig] = array(CreatableTopicConfig)


class CreateTopicsRequest(Message, key=19, versions="2-7", flexible="5+"):
    topics: list[CreatableTopic] = array(CreatableTopic)
    timeout_ms: int = int32(default=60000)
    validate_only: bool = boolean()
    # Ours, from a broker: a client that has been connected for this long asked for these topics, which do not
    # exist. -1 for an explicit CreateTopics.
    connected_for_ms: int = int64("5+", default=-1, tag=OWN_TAGS)


class CreatableTopicConfigs(Message):
    name: str = string()
    value: str | None = string(nullable=True)
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()


class CreatableTopicResult(Message):
    name: str = string()
    topic_id: bytes = uuid("7+")
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    topic_config_error_code: int = int16("5+", tag=0)
    num_partitions: int = int32("5+", default=-1)
    replication_factor: int = int16("5+", default=-1)
    configs: list[CreatableTopicConfigs] | None = array(CreatableTopicConfigs, "5+", nullable=True)


class CreateTopicsResponse(Response, key=19, versions="2-7", flexible="5+"):
    throttle_time_ms: int = int32()
    topics: list[CreatableTopicResult] = array(CreatableTopicResult)

    @classmethod
    def for_error(
        cls, request: CreateTopicsRequest, version: int, error: int, message: str | None = None
    ) -> CreateTopicsResponse:
        names = dict.fromkeys(topic.name for topic in request.topics)
        return cls(
            topics=[
                CreatableTopicResult(name=name, error_code=error, error_message=message) for name in names
            ]
        )


class DeleteTopicState(Message):
    name: str | None = string(nullable=True, default=None)
    topic_id: bytes = uuid()


class DeleteTopicsRequest(Message, key=20, versions="1-6", flexible="4+"):
    topics: list[DeleteTopicState] = array(DeleteTopicState, "6+")
    topic_names: list[str] = array(string, "0-5")
    timeout_ms: int = int32()


class DeletableTopicResult(Message):
    name: str | None = string(nullable="6+")
    topic_id: bytes = uuid("6+")
    error_code: int = int16()
    error_message: str | None = string("5+", nullable=True, default=None)


class DeleteTopicsResponse(Response, key=20, versions="1-6", flexible="4+"):
    throttle_time_ms: int = int32()
    responses: list[DeletableTopicResult] = array(DeletableTopicResult)

    @classmethod
    def for_error(
        cls, request: DeleteTopicsRequest, version: int, error: int, message: str | None = None
    ) -> DeleteTopicsResponse:
        asked: list[tuple[str | None, bytes]] = [(name, NO_UUID) for name in request.topic_names]
        asked += [(topic.name, topic.topic_id) for topic in request.topics]
        return cls(
            responses=[
                DeletableTopicResult(name=name, topic_id=id, error_code=error, error_message=message)
                for name, id in dict.fromkeys(asked)
            ]
        )


class CreatePartitionsAssignment(Message):
    broker_ids: list[int] = array(int32)


class CreatePartitionsTopic(Message):
    name: str = string()
    count: int = int32()
    assignments: list[CreatePartitionsAssignment] | None = array(CreatePartitionsAssignment, nullable=True)


class CreatePartitionsRequest(Message, key=37, versions="0-3", flexible="2+"):
    topics: list[CreatePartitionsTopic] = array(CreatePartitionsTopic)
    timeout_ms: int = int32()
    validate_only: bool = boolean()


class CreatePartitionsTopicResult(Message):
    name: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


class CreatePartitionsResponse(Response, key=37, versions="0-3", flexible="2+"):
    throttle_time_ms: int = int32()
    results: list[CreatePartitionsTopicResult] = array(CreatePartitionsTopicResult)

    @classmethod
    def for_error(
        cls, request: CreatePartitionsRequest, version: int, error: int, message: str | None = None
    ) -> CreatePartitionsResponse:
        names = dict.fromkeys(topic.name for topic in request.topics)
        return cls(
            results=[
                CreatePartitionsTopicResult(name=name, error_code=error, error_message=message)
                for name in names
            ]
        )


class TopicRequest(Message):
    name: str = string()


class Cursor(Message):
    topic_name: str = string()
    partition_index: int = int32()


class DescribeTopicPartitionsRequest(Message, key=75, versions="0", flexible="0+"):
    topics: list[TopicRequest] = array(TopicRequest)
    response_partition_limit: int = int32(default=2000)
    cursor: Cursor | None = struct(Cursor, nullable=True)


class DescribeTopicPartitionsResponsePartition(Message):
    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32(default=-1)
    replica_nodes: list[int] = array(int32)
    isr_nodes: list[int] = array(int32)
    # We never send null: the Java admin client fails on it.
    eligible_leader_replicas: list[int] | None = array(int32, nullable=True, default=None)
    last_known_elr: list[int] | None = array(int32, nullable=True, default=None)
    offline_replicas: list[int] = array(int32)


class DescribeTopicPartitionsResponseTopic(Message):
    error_code: int = int16()
    name: str | None = string(nullable=True)
    topic_id: bytes = uuid()
    is_internal: bool = boolean()
    partitions: list[DescribeTopicPartitionsResponsePartition] = array(
        DescribeTopicPartitionsResponsePartition
    )
    topic_authorized_operations: int = int32(default=OPERATIONS_OMITTED)


class DescribeTopicPartitionsResponse(Response, key=75, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    topics: list[DescribeTopicPartitionsResponseTopic] = array(DescribeTopicPartitionsResponseTopic)
    next_cursor: Cursor | None = struct(Cursor, nullable=True)

    @classmethod
    def for_error(
        cls, request: DescribeTopicPartitionsRequest, version: int, error: int, message: str | None = None
    ) -> DescribeTopicPartitionsResponse:
        return cls(
            topics=[
                DescribeTopicPartitionsResponseTopic(error_code=error, name=topic.name)
                for topic in request.topics
            ]
        )
