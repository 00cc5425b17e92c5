"""Metadata (0-13), DescribeTopicPartitions (0) and CreateTopics (2-7).

Reads are answered from the committed image; the list of all topics comes encoded from ``metadata_pages.py``. A
request for a new topic goes to the controller and is answered when it is committed.

Departures from Kafka: a Metadata request that creates a topic waits for it and answers with its leader, instead of
UNKNOWN_TOPIC_OR_PARTITION and a retry. And it does not create every name (``auto_creation.py``).
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.handlers.mutation_quota import creatable_within_quota
from penstock.broker.network.authorization import (
    ALL_OPERATIONS,
    CLUSTER_NAME,
    Operation,
    ResourceType,
    authorized_operations,
)
from penstock.broker.network.connection import WAITING, Call, Encoded
from penstock.broker.network.metadata_pages import listener_not_found
from penstock.metadata.image import NO_LEADER, Image, TopicImage
from penstock.metadata.topics import is_internal, name_error
from penstock.model import NO_TOPIC_ID, BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import OPERATIONS_OMITTED
from penstock.protocol.messages.topics import (
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from penstock.protocol.primitives import uvarint

AUTO_CREATION_FLAG_SINCE_VERSION = 4
FLEXIBLE_SINCE_VERSION = 9
TOPICS_CREATED_PER_REQUEST_MAX = 100


def metadata(broker: Broker, request: MetadataRequest, call: Call) -> Any:
    topics = request.topics
    if topics is None or (call.version == 0 and not topics):
        return _all_topics(broker, request, call)
    may_create = broker.config.auto_create_topics_enable and (
        call.version < AUTO_CREATION_FLAG_SINCE_VERSION or request.allow_auto_topic_creation
    )
    if may_create:
        missing = [
            topic.name
            for topic in topics
            if topic.name and topic.name not in broker.image.topics and _may_create(call, topic.name)
        ]
        creatable = [
            name for name in dict.fromkeys(missing) if name_error(name) is None and not is_internal(name)
        ]
        # The rest is created when the client asks again, as clients do for missing topics.
        del creatable[TOPICS_CREATED_PER_REQUEST_MAX:]
        creatable = creatable_within_quota(broker, creatable, call)
        if creatable:
            broker.controller.create_topics(
                creatable,
                call.connected_ms,
                lambda errors: call.answer(
                    _named_topics(broker, request, call, topics, errors, may_create=True)
                ),
            )
            return WAITING
    return _named_topics(broker, request, call, topics, {}, may_create=may_create)


def _may_describe(call: Call, name: str, *, quietly: bool = False) -> bool:
    return call.allows(Operation.DESCRIBE, ResourceType.TOPIC, name, quietly=quietly)


def _may_create(call: Call, name: str) -> bool:
    """Whether a client's question about a topic that does not exist may create it."""
    return _may_describe(call, name) and (
        call.allows(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME, quietly=True)
        or call.allows(Operation.CREATE, ResourceType.TOPIC, name)
    )


def _all_topics(broker: Broker, request: MetadataRequest, call: Call) -> Any:
    version = call.version
    image = broker.image
    # Encode the response without topics, then insert their count and bytes.
    around = bytes(call.route.encode(_response(broker, request, call))[0])  # type: ignore[arg-type]  # no records
    place = len(around) - _behind_topics_bytes(version)

    def answer(topic_count: int, pages: list[bytes]) -> None:
        if version >= FLEXIBLE_SINCE_VERSION:
            start, count = around[: place - 1], uvarint(topic_count + 1)
        else:
            start, count = around[: place - 4], topic_count.to_bytes(4, "big")
        call.answer(Encoded([start + count, *pages, around[place:]]))

    if call.authorizer is not None:
        broker.metadata_pages.list_some(
            image,
            version,
            lambda name: _operations_listed(call, request, name),
            image.brokers_without(call.listener),
            answer,
        )
        return WAITING
    broker.metadata_pages.list_topics(
        image,
        version,
        # The pages are the same for all clients of a listener.
        ALL_OPERATIONS[ResourceType.TOPIC]
        if request.include_topic_authorized_operations
        else OPERATIONS_OMITTED,
        image.brokers_without(call.listener),
        lambda pages: answer(len(image.topics), pages),
    )
    return WAITING


def _operations_listed(call: Call, request: MetadataRequest, name: str) -> int | None:
    """What the list of all topics says of a topic; None if it is left out."""
    if not _may_describe(call, name, quietly=True):
        return None
    if request.include_topic_authorized_operations:
        return authorized_operations(call, ResourceType.TOPIC, name)
    return OPERATIONS_OMITTED


def _behind_topics_bytes(version: int) -> int:
    """The size of the fields after the topics: the operations on the cluster, the error, the tags."""
    return 4 * (8 <= version <= 10) + 2 * (version >= 13) + (version >= FLEXIBLE_SINCE_VERSION)


def _named_topics(
    broker: Broker,
    request: MetadataRequest,
    call: Call,
    asked: list[MetadataRequestTopic],
    errors: dict[str, int],
    *,
    may_create: bool,
) -> MetadataResponse:
    response = _response(broker, request, call)
    image = broker.image
    unlisted = image.brokers_without(call.listener)
    offline = _offline(broker) | unlisted
    seen = set()
    for wanted in asked:
        by_id = wanted.name is None or (not wanted.name and wanted.topic_id != NO_TOPIC_ID)
        key = wanted.topic_id if by_id else wanted.name
        if key in seen:
            continue
        seen.add(key)
        topic = (
            image.topics_by_id.get(TopicId(wanted.topic_id)) if by_id else image.topics.get(wanted.name or "")
        )
        if not by_id and not _may_describe(call, wanted.name or ""):
            # Also if it does not exist, which is not this client's business.
            response.topics.append(
                MetadataResponseTopic(
                    error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
                    name=wanted.name,
                    is_internal=is_internal(wanted.name or ""),
                )
            )
            continue
        if by_id and topic is not None and not _may_describe(call, topic.name):
            topic = None
        if topic is not None:
            response.topics.append(_topic(topic, request, call, offline, unlisted))
            continue
        error: int
        if by_id:
            error = ErrorCode.UNKNOWN_TOPIC_ID
        elif name_error(wanted.name or "") is not None:
            error = ErrorCode.INVALID_TOPIC_EXCEPTION
        else:
            error = errors.get(wanted.name or "", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            if may_create and not is_internal(wanted.name or "") and not _may_create(call, wanted.name or ""):
                error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        # From version 12 on a topic may be requested by id, and only there may the name be null.
        response.topics.append(
            MetadataResponseTopic(error_code=error, name=wanted.name, topic_id=wanted.topic_id)
        )
    return response


def _response(broker: Broker, request: MetadataRequest, call: Call) -> MetadataResponse:
    return MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=member.id, host=endpoint.host, port=endpoint.port, rack=member.rack
            )
            for member, endpoint in broker.image.reachable_endpoints(call.listener)
        ],
        cluster_id=broker.cluster_id,
        controller_id=broker.controller_id_for(call.listener),
        topics=[],
        cluster_authorized_operations=(
            authorized_operations(call, ResourceType.CLUSTER)
            if request.include_cluster_authorized_operations
            else OPERATIONS_OMITTED
        ),
    )


def _offline(broker: Broker) -> frozenset[int]:
    """The fenced brokers, whose replicas are reported as offline."""
    return frozenset(member.id for member in broker.image.brokers.values() if member.fenced)


def _topic(
    topic: TopicImage,
    request: MetadataRequest,
    call: Call,
    offline: frozenset[int],
    unlisted: frozenset[BrokerId],
) -> MetadataResponseTopic:
    """``offline``: brokers whose replicas cannot be reached; ``unlisted``: those without the client's listener."""
    without_listener = listener_not_found(call.version)
    return MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.id,
        is_internal=is_internal(topic.name),
        partitions=[
            MetadataResponsePartition(
                error_code=(
                    ErrorCode.LEADER_NOT_AVAILABLE
                    if partition.leader == NO_LEADER
                    else without_listener
                    if partition.leader in unlisted
                    else ErrorCode.NONE
                ),
                partition_index=partition.index,
                leader_id=NO_LEADER if partition.leader in unlisted else partition.leader,
                leader_epoch=partition.leader_epoch,
                replica_nodes=list(partition.replicas),
                isr_nodes=list(partition.isr),
                offline_replicas=(
                    [replica for replica in partition.replicas if replica in offline] if offline else []
                ),
            )
            for partition in topic.partitions
        ],
        topic_authorized_operations=(
            authorized_operations(call, ResourceType.TOPIC, topic.name)
            if request.include_topic_authorized_operations
            else OPERATIONS_OMITTED
        ),
    )


def describe_topic_partitions(
    broker: Broker, request: DescribeTopicPartitionsRequest, call: Call
) -> DescribeTopicPartitionsResponse:
    """Describe topics in order of their names, up to a number of partitions; the cursor says where to continue."""
    image = broker.image
    names = sorted({topic.name for topic in request.topics} or image.topics)
    if not request.topics and call.authorizer is not None:
        names = [name for name in names if _may_describe(call, name, quietly=True)]
    first_partition = 0
    if request.cursor is not None:
        start = request.cursor.topic_name
        names = [name for name in names if name >= start]
        if names and names[0] == start:
            first_partition = max(0, request.cursor.partition_index)
    room = max(1, min(request.response_partition_limit, broker.config.max_request_partition_size_limit))
    unlisted = image.brokers_without(call.listener)
    response = DescribeTopicPartitionsResponse(topics=[], next_cursor=None)
    for name in names:
        if room <= 0:
            response.next_cursor = Cursor(topic_name=name, partition_index=0)
            break
        described, count, rest = _describe_topic(image, name, first_partition, room, call, unlisted)
        response.topics.append(described)
        room -= count
        if rest is not None:
            response.next_cursor = Cursor(topic_name=name, partition_index=rest)
            break
        first_partition = 0
    return response


def _describe_topic(
    image: Image, name: str, first_partition: int, room: int, call: Call, unlisted: frozenset[BrokerId]
) -> tuple[DescribeTopicPartitionsResponseTopic, int, int | None]:
    if not _may_describe(call, name):
        denied = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return DescribeTopicPartitionsResponseTopic(error_code=denied, name=name), 1, None
    topic = image.topics.get(name)
    if topic is None:
        known = name_error(name) is None
        error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if known else ErrorCode.INVALID_TOPIC_EXCEPTION
        return DescribeTopicPartitionsResponseTopic(error_code=error, name=name), 1, None
    shown = topic.partitions[first_partition : first_partition + room]
    described = DescribeTopicPartitionsResponseTopic(
        name=name,
        topic_id=topic.id,
        is_internal=is_internal(topic.name),
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                partition_index=partition.index,
                # As in Kafka: without an error code.
                leader_id=NO_LEADER if partition.leader in unlisted else partition.leader,
                leader_epoch=partition.leader_epoch,
                replica_nodes=list(partition.replicas),
                isr_nodes=list(partition.isr),
                # Empty, not null: Kafka's own admin client cannot read null here.
                eligible_leader_replicas=list(partition.eligible_leader_replicas),
                last_known_elr=list(partition.last_known_elr),
            )
            for partition in shown
        ],
        topic_authorized_operations=authorized_operations(call, ResourceType.TOPIC, name),
    )
    rest = first_partition + len(shown)
    return described, len(shown), rest if rest < len(topic.partitions) else None


def create_topics(broker: Broker, request: CreateTopicsRequest, call: Call) -> Any:
    if call.is_internal:
        return broker.controller.decide(request, call)

    request.connected_for_ms = -1
    # The controller lets brokers create internal topics, and cannot tell a client's request from a broker's own.
    own = [topic.name for topic in request.topics if is_internal(topic.name)]
    request.topics = [topic for topic in request.topics if not is_internal(topic.name)]

    def created(response: CreateTopicsResponse) -> None:
        made = [topic.name for topic in response.topics if not topic.error_code]
        response.topics += [
            CreatableTopicResult(
                name=name,
                error_code=ErrorCode.INVALID_TOPIC_EXCEPTION,
                error_message=f"'{name}' is an internal topic; the broker creates it when needed.",
            )
            for name in dict.fromkeys(own)
        ]
        # A client that created a topic through this broker finds it here.
        broker.controller.when_seen([] if request.validate_only else made, lambda: call.answer(response))

    broker.controller.forward_checked(request, call, created)
    return WAITING
