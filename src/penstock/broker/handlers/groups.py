"""The group APIs: FindCoordinator (0-6), JoinGroup (0-9), SyncGroup (0-5), Heartbeat (0-4), LeaveGroup (0-5),
OffsetCommit (2-10), OffsetFetch (1-10), ListGroups (0-5), DescribeGroups (0-6), DeleteGroups (0-2),
OffsetDelete (0) and ConsumerGroupHeartbeat (0-1).

The rules of groups are in ``penstock.groups``. This module finds the coordinator, converts topic ids to names and
back, and refuses commits to topics that do not exist. The first FindCoordinator creates the offsets topic and waits
for it; the same with the topic of transactions. Until all brokers support transactions, the coordinator of any
transactional id is this broker, which refuses it at InitProducerId. Requests of the consumer protocol (KIP-848) get
an error response, as from a Kafka broker where it is disabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.coordination.coordinators import Coordinators
from penstock.broker.network.authorization import (
    CLUSTER_NAME,
    DENIED,
    Operation,
    ResourceType,
    allowed_and_denied,
    authorized_operations,
)
from penstock.broker.network.connection import WAITING, Call
from penstock.decision import Decision
from penstock.groups.changes import Change
from penstock.groups.classic.classic_group import Caller
from penstock.groups.coordinator import Coordinator as GroupCoordinator
from penstock.groups.offset_answers import no_offset, offset_fetch_groups, offset_fetch_response
from penstock.groups.settings import CLIENT_ID_LENGTH_MAX
from penstock.metadata.image import BrokerImage
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.consumer_groups import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from penstock.protocol.messages.groups import (
    FIND_BATCHED,
    Coordinator,
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetCommitRequest,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponseTopics,
    SyncGroupRequest,
)

GROUP_KEY = 0
TRANSACTION_KEY = 1
TOPIC_IDS_SINCE_VERSION = 10
# Of a member's metadata in all its protocols together. It is kept in memory while the member is in the group, and
# written with every generation. (In Kafka the offsets topic's max.message.bytes limits it.)
SUBSCRIPTION_BYTES_MAX = 1024 * 1024
NO_SUCH_LISTENER = "the coordinator has no listener {}"
NO_CONSUMER_PROTOCOL = "the consumer group protocol is not supported yet; use group.protocol=classic"


def find_coordinator(broker: Broker, request: FindCoordinatorRequest, call: Call) -> Any:
    batched = call.version >= FIND_BATCHED
    keys = request.coordinator_keys if batched else [request.key]
    coordinators: Coordinators[Any] = broker.group_coordinators
    if request.key_type == TRANSACTION_KEY:
        coordinators = broker.transaction_coordinators
    resource = ResourceType.TRANSACTIONAL_ID if request.key_type == TRANSACTION_KEY else ResourceType.GROUP

    def is_denied(key: str) -> bool:
        return not call.allows(Operation.DESCRIBE, resource, key)

    def coordinator(key: str, error: int, message: str | None) -> Coordinator:
        leader = None if error else coordinators.broker_of(key)
        known = None if leader is None else broker.image.brokers.get(leader)
        if known is None:
            return nowhere(key, error or ErrorCode.COORDINATOR_NOT_AVAILABLE, message)
        return at(key, known)

    def nowhere(key: str, error: int, message: str | None) -> Coordinator:
        return Coordinator(key=key, node_id=-1, host="", port=-1, error_code=error, error_message=message)

    def at(key: str, member: BrokerImage) -> Coordinator:
        endpoint = member.endpoint_for(call.listener)
        if endpoint is None:
            return nowhere(
                key, ErrorCode.COORDINATOR_NOT_AVAILABLE, NO_SUCH_LISTENER.format(call.listener.name)
            )
        return Coordinator(key=key, node_id=member.id, host=endpoint.host, port=endpoint.port)

    def found_here() -> FindCoordinatorResponse:
        me = broker.image.brokers.get(broker.node_id)
        if me is None:
            return answer(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return shown([at(key, me) for key in keys])

    def answer(error: int, message: str | None = None) -> FindCoordinatorResponse:
        return shown([coordinator(key, error, message) for key in keys])

    def shown(found: list[Coordinator]) -> FindCoordinatorResponse:
        found = [nowhere(each.key, DENIED[resource], None) if is_denied(each.key) else each for each in found]
        if batched:
            return FindCoordinatorResponse(coordinators=found)
        only = found[0]
        return FindCoordinatorResponse(
            error_code=only.error_code,
            # As Kafka does, in these versions only.
            error_message=only.error_message if only.error_code else "NONE",
            node_id=only.node_id,
            host=only.host,
            port=only.port,
        )

    if request.key_type == TRANSACTION_KEY and not broker.serves_transactions:
        # InitProducerId refuses it, which every client treats as final. An error here would not be: sarama asks for
        # a coordinator again and again, whatever the error. Any broker can refuse, so it is this one.
        return found_here()
    if request.key_type not in (GROUP_KEY, TRANSACTION_KEY):
        return answer(ErrorCode.INVALID_REQUEST, f"coordinators of type {request.key_type} do not exist here")
    if all(map(is_denied, keys)):
        # Not even the topic is created for such a client.
        return answer(DENIED[resource])
    coordinators.when_topic_exists(lambda error: call.answer(answer(error)))
    return WAITING


def join_group(broker: Broker, request: JoinGroupRequest, call: Call) -> Any:
    call.connection.is_of_member = True
    if sum(len(protocol.metadata) for protocol in request.protocols) > SUBSCRIPTION_BYTES_MAX:
        return error_response(request, call.version, ErrorCode.MESSAGE_TOO_LARGE)
    # It goes into Kafka's group record, whose strings are shorter than those of a request header.
    caller = Caller(call.client_id[:CLIENT_ID_LENGTH_MAX], f"/{call.host}")
    return _decide(
        broker,
        call,
        request,
        lambda core, now_ms, wall_ms: core.join(
            request, call.version, caller=caller, token=call, now_ms=now_ms, wall_ms=wall_ms
        ),
    )


def sync_group(broker: Broker, request: SyncGroupRequest, call: Call) -> Any:
    return _decide(
        broker,
        call,
        request,
        lambda core, now_ms, wall_ms: core.sync(
            request, call.version, token=call, now_ms=now_ms, wall_ms=wall_ms
        ),
    )


def heartbeat(broker: Broker, request: HeartbeatRequest, call: Call) -> Any:
    call.connection.is_of_member = True
    return _decide(
        broker,
        call,
        request,
        lambda core, now_ms, _: core.heartbeat(request, now_ms=now_ms),
    )


def consumer_group_heartbeat(
    broker: Broker, request: ConsumerGroupHeartbeatRequest, call: Call
) -> ConsumerGroupHeartbeatResponse:
    for name in request.subscribed_topic_names or ():
        if not call.allows(Operation.DESCRIBE, ResourceType.TOPIC, name):
            return ConsumerGroupHeartbeatResponse(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    return ConsumerGroupHeartbeatResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION, error_message=NO_CONSUMER_PROTOCOL
    )


def leave_group(broker: Broker, request: LeaveGroupRequest, call: Call) -> Any:
    return _decide(
        broker,
        call,
        request,
        lambda core, now_ms, wall_ms: core.leave(request, call.version, now_ms=now_ms, wall_ms=wall_ms),
    )


def offset_delete(broker: Broker, request: OffsetDeleteRequest, call: Call) -> Any:
    request.topics, denied = allowed_and_denied(call, Operation.READ, request.topics)
    refused = [
        OffsetDeleteResponseTopic(
            name=topic.name,
            partitions=[
                OffsetDeleteResponsePartition(
                    partition_index=item.partition_index, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
                )
                for item in topic.partitions
            ],
        )
        for topic in denied
    ]
    if refused and not request.topics:
        return OffsetDeleteResponse(topics=refused)

    def delete(core: GroupCoordinator, now_ms: int, wall_ms: int) -> Decision[Change]:
        decision = core.delete_offsets(request, now_ms=now_ms, wall_ms=wall_ms)
        # The coordinator does not know topics. For a partition that does not exist it had nothing to delete.
        for topic in decision.response.topics:
            for result in topic.partitions:
                if not broker.image.has_partition(topic.name, result.partition_index):
                    result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if not decision.response.error_code:
            decision.response.topics += refused
        return decision

    return _decide(broker, call, request, delete)


def offset_commit(broker: Broker, request: OffsetCommitRequest, call: Call) -> Any:
    if call.version >= TOPIC_IDS_SINCE_VERSION:
        for topic in request.topics:
            topic.name = broker.image.topic_name(topic.topic_id)
    request.topics, denied = allowed_and_denied(call, Operation.READ, request.topics)
    refused = _refused_topics(denied)
    refused += _refuse_unknown_partitions(broker, request, call.version)
    if refused and not request.topics:
        return OffsetCommitResponse(topics=refused)

    def commit(core: GroupCoordinator, now_ms: int, wall_ms: int) -> Decision[Change]:
        decision = core.commit(request, call.version, now_ms=now_ms, wall_ms=wall_ms)
        response = decision.response
        for topic in response.topics:
            known = broker.image.topics.get(topic.name)
            if known is not None:
                topic.topic_id = known.id
        response.topics += refused
        return decision

    return _decide(broker, call, request, commit)


def _refused_topics(denied: list[OffsetCommitRequestTopic]) -> list[OffsetCommitResponseTopic]:
    return [
        OffsetCommitResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=[
                OffsetCommitResponsePartition(
                    partition_index=item.partition_index, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
                )
                for item in topic.partitions
            ],
        )
        for topic in denied
    ]


def _refuse_unknown_partitions(
    broker: Broker, request: OffsetCommitRequest, version: int
) -> list[OffsetCommitResponseTopic]:
    """Remove partitions that do not exist from a commit. Return the results for them."""
    refused = []
    kept: list[OffsetCommitRequestTopic] = []
    for topic in request.topics:
        unknown = [
            item
            for item in topic.partitions
            if not broker.image.has_partition(topic.name, item.partition_index)
        ]
        if unknown:
            error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if version >= TOPIC_IDS_SINCE_VERSION and not topic.name:
                error = ErrorCode.UNKNOWN_TOPIC_ID
            refused.append(
                OffsetCommitResponseTopic(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partitions=[
                        OffsetCommitResponsePartition(partition_index=item.partition_index, error_code=error)
                        for item in unknown
                    ],
                )
            )
            topic.partitions = [
                item
                for item in topic.partitions
                if broker.image.has_partition(topic.name, item.partition_index)
            ]
        if topic.partitions or not unknown:
            kept.append(topic)
    request.topics = kept
    return refused


def offset_fetch(broker: Broker, request: OffsetFetchRequest, call: Call) -> Any:
    # A consumer that has seen a recreated topic must not get an offset of the deleted one.
    broker.freshness.when_fresh(lambda: call.answer(_fetched_offsets(broker, request, call)))
    return WAITING


def _fetched_offsets(broker: Broker, request: OffsetFetchRequest, call: Call) -> OffsetFetchResponse:
    by_id = call.version >= TOPIC_IDS_SINCE_VERSION
    answers = []
    seen: set[str] = set()
    for group in offset_fetch_groups(request, call.version):
        partition = broker.group_coordinators.of(group.group_id)
        if group.group_id in seen:
            # A repeated name must not repeat all of its offsets.
            answers.append(
                OffsetFetchResponseGroup(group_id=group.group_id, error_code=ErrorCode.INVALID_REQUEST)
            )
            continue
        seen.add(group.group_id)
        if not call.allows(Operation.DESCRIBE, ResourceType.GROUP, group.group_id):
            partition = ErrorCode.GROUP_AUTHORIZATION_FAILED
        if isinstance(partition, ErrorCode):
            answers.append(OffsetFetchResponseGroup(group_id=group.group_id, error_code=partition))
            continue
        names_all = group.topics is None
        refused = _refuse_topics(broker, group, call)
        if by_id:
            answer = _fetch_by_id(broker, partition.core, group, request.require_stable)
        else:
            answer = partition.core.fetch_offsets(group, require_stable=request.require_stable)
        if names_all:
            answer.topics = [
                topic
                for topic in answer.topics
                if call.allows(Operation.DESCRIBE, ResourceType.TOPIC, topic.name, quietly=True)
            ]
        elif not answer.error_code:
            answer.topics += refused
        answers.append(answer)
    return offset_fetch_response(request, call.version, answers)


def _refuse_topics(
    broker: Broker, group: OffsetFetchRequestGroup, call: Call
) -> list[OffsetFetchResponseTopics]:
    """Remove topics that the client may not describe from a request. Return the results for them."""
    if call.authorizer is None or group.topics is None:
        return []
    if call.version >= TOPIC_IDS_SINCE_VERSION:
        for topic in group.topics:
            topic.name = broker.image.topic_name(topic.topic_id)
    group.topics, denied = allowed_and_denied(call, Operation.DESCRIBE, group.topics)
    return [
        OffsetFetchResponseTopics(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=[
                no_offset(index, ErrorCode.TOPIC_AUTHORIZATION_FAILED) for index in topic.partition_indexes
            ],
        )
        for topic in denied
    ]


def _fetch_by_id(
    broker: Broker, core: GroupCoordinator, group: OffsetFetchRequestGroup, require_stable: bool
) -> OffsetFetchResponseGroup:
    unknown = []
    if group.topics is not None:
        for topic in group.topics:
            topic.name = broker.image.topic_name(topic.topic_id)
        unknown = [topic for topic in group.topics if not topic.name]
        group.topics = [topic for topic in group.topics if topic.name]
    answer = core.fetch_offsets(group, require_stable=require_stable)
    topics = broker.image.topics
    # A topic that was deleted meanwhile has no id to put in the response.
    answer.topics = [topic for topic in answer.topics if topic.name in topics]
    for fetched in answer.topics:
        fetched.topic_id = topics[fetched.name].id
    for topic in unknown:
        partitions = [no_offset(index, ErrorCode.UNKNOWN_TOPIC_ID) for index in topic.partition_indexes]
        answer.topics.append(OffsetFetchResponseTopics(topic_id=topic.topic_id, partitions=partitions))
    return answer


def list_groups(broker: Broker, request: ListGroupsRequest, call: Call) -> ListGroupsResponse:
    groups = []
    for partition in broker.group_coordinators:
        groups += partition.core.list_groups(request.states_filter, request.types_filter)
    if not call.allows(Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME, quietly=True):
        groups = [
            group
            for group in groups
            if call.allows(Operation.DESCRIBE, ResourceType.GROUP, group.group_id, quietly=True)
        ]
    return ListGroupsResponse(groups=groups)


def describe_groups(broker: Broker, request: DescribeGroupsRequest, call: Call) -> DescribeGroupsResponse:
    groups = []
    # Once each: a repeated name must not repeat all of its members.
    for group_id in dict.fromkeys(request.groups):
        partition = broker.group_coordinators.of(group_id)
        if not call.allows(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            partition = ErrorCode.GROUP_AUTHORIZATION_FAILED
        if isinstance(partition, ErrorCode):
            groups.append(DescribedGroup(group_id=group_id, error_code=partition))
            continue
        described = partition.core.describe_group(group_id, call.version)
        if request.include_authorized_operations and not described.error_code:
            described.authorized_operations = authorized_operations(call, ResourceType.GROUP, group_id)
        groups.append(described)
    return DescribeGroupsResponse(groups=groups)


def delete_groups(broker: Broker, request: DeleteGroupsRequest, call: Call) -> Any:
    """Each group's own coordinator deletes it. Answered when the last deletion is committed."""
    names = list(dict.fromkeys(request.groups_names))
    results: dict[str, DeletableGroupResult] = {}

    def settled(result: DeletableGroupResult) -> None:
        results[result.group_id] = result
        if len(results) == len(names):
            call.answer(DeleteGroupsResponse(results=[results[name] for name in names]))

    if not names:
        return DeleteGroupsResponse(results=[])
    for name in names:
        partition = broker.group_coordinators.of(name)
        if not call.allows(Operation.DELETE, ResourceType.GROUP, name):
            partition = ErrorCode.GROUP_AUTHORIZATION_FAILED
        if isinstance(partition, ErrorCode):
            settled(DeletableGroupResult(group_id=name, error_code=partition))
            continue

        def delete(core: GroupCoordinator, now_ms: int, wall_ms: int, name: str = name) -> Decision[Change]:
            return core.delete_group(name, now_ms=now_ms, wall_ms=wall_ms)

        unavailable = DeletableGroupResult(group_id=name, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
        partition.handle(delete, settled, unavailable)
    return WAITING


Decide = Callable[[GroupCoordinator, int, int], Decision[Change]]


def _decide(broker: Broker, call: Call, request: Any, decide: Decide) -> Any:
    partition = broker.group_coordinators.of(request.group_id)
    if isinstance(partition, ErrorCode):
        # The error sends clients to FindCoordinator, which creates the offsets topic.
        return error_response(request, call.version, partition)
    unavailable = error_response(request, call.version, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    partition.handle(decide, call.answer, unavailable)
    return WAITING
