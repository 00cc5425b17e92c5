"""The quota of CreateTopics, DeleteTopics and CreatePartitions: partitions per second (KIP-599).

Versions that know THROTTLING_QUOTA_EXCEEDED get it for the topics that come after the quota is used up, and clients
ask for these again after the throttle time. With older versions, all topics are created or deleted, and the
connection is delayed.

Departure from Kafka: each broker counts what it is asked for, as with the other quotas. In Kafka the controller
counts for the whole cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.broker.broker import Broker
from penstock.broker.network.authorization import CLUSTER_NAME, Operation, ResourceType
from penstock.broker.network.connection import Call
from penstock.metadata.configs import broker_value, layers_of
from penstock.model import TopicId
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)

Handle: TypeAlias = Callable[[Any, Any, Call], Any]

# By API: the first version whose clients know THROTTLING_QUOTA_EXCEEDED.
STRICT_SINCE_VERSION = {
    CreateTopicsRequest.KEY: 6,
    DeleteTopicsRequest.KEY: 5,
    CreatePartitionsRequest.KEY: 3,
}

OVER = "Too many partitions are created and deleted: try again after the throttle time."


def within_quota(handle: Handle) -> Handle:
    """A handler that is only asked for what the client's quota allows."""

    def limited(broker: Broker, request: Any, call: Call) -> Any:
        if (
            not broker.throttling.limits_mutations
            or call.is_internal
            # DeleteTopics has no such option.
            or (type(request) is not DeleteTopicsRequest and request.validate_only)
        ):
            return handle(broker, request, call)
        refused = _take_refused(broker, request, call)
        if refused is None:
            return handle(broker, request, call)
        response: Any = error_response(refused, call.version, ErrorCode.THROTTLING_QUOTA_EXCEEDED, OVER)
        if not _asked(request):
            return response
        call.amend = lambda answered: _results(answered).extend(_results(response))
        return handle(broker, request, call)

    return limited


def creatable_within_quota(broker: Broker, names: list[str], call: Call) -> list[str]:
    """The topics that a Metadata request may create. The others stay unknown, and clients ask again."""
    if not broker.throttling.limits_mutations or call.is_internal:
        return names
    partitions = _default_partitions(broker)
    return [name for name in names if broker.throttling.may_mutate(call, partitions, is_strict=True)]


def _default_partitions(broker: Broker) -> int:
    layers = layers_of(broker.image, broker.node_id, broker.config.static)
    partitions: int = broker_value("num.partitions", layers)
    return partitions


def _take_refused(broker: Broker, request: Any, call: Call) -> Any:
    """Remove the topics that are over the quota: another request for these, or None."""
    is_strict = call.version >= STRICT_SINCE_VERSION[request.KEY]
    refused: Any = type(request)()
    for kept, taken, cost in _lists(broker, request, refused):
        allowed: list[Any] = []
        for topic in kept:
            # What the client has no right to is refused later. It costs nothing: the delay would tell whether the
            # topic exists, and clients that share the quota would pay.
            is_allowed = not _has_right(broker, request, topic, call) or broker.throttling.may_mutate(
                call, cost(topic), is_strict=is_strict
            )
            (allowed if is_allowed else taken).append(topic)
        kept[:] = allowed
    return refused if _asked(refused) else None


def _has_right(broker: Broker, request: Any, topic: Any, call: Call) -> bool:
    if call.authorizer is None:
        return True
    name = topic if isinstance(topic, str) else topic.name
    match request:
        case CreateTopicsRequest():
            if call.allows(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME, quietly=True):
                return True
            operation = Operation.CREATE
        case DeleteTopicsRequest():
            operation = Operation.DELETE
            if name is None:
                name = broker.image.topic_name(TopicId(topic.topic_id))
        case _:
            operation = Operation.ALTER
    return call.allows(operation, ResourceType.TOPIC, name, quietly=True)


def _lists(
    broker: Broker, request: Any, refused: Any
) -> list[tuple[list[Any], list[Any], Callable[[Any], int]]]:
    """The lists of topics in a request and in its counterpart, with the number of partitions that each is about."""
    image = broker.image
    match request:
        case CreateTopicsRequest():
            default = _default_partitions(broker)
            return [
                (
                    request.topics,
                    refused.topics,
                    lambda topic: (
                        len(topic.assignments)
                        or (topic.num_partitions if topic.num_partitions > 0 else default)
                    ),
                )
            ]
        case CreatePartitionsRequest():
            return [
                (
                    request.topics,
                    refused.topics,
                    lambda topic: max(0, topic.count - _partitions(broker, topic.name)),
                )
            ]
        case DeleteTopicsRequest():
            return [
                (request.topic_names, refused.topic_names, lambda name: _partitions(broker, name)),
                (
                    request.topics,
                    refused.topics,
                    lambda topic: _partitions(
                        broker,
                        image.topic_name(TopicId(topic.topic_id)) if topic.name is None else topic.name,
                    ),
                ),
            ]
    raise AssertionError(f"{type(request).__name__} has no quota")


def _partitions(broker: Broker, name: str) -> int:
    topic = broker.image.topics.get(name)
    return 0 if topic is None else len(topic.partitions)


def _asked(request: Any) -> bool:
    return bool(request.topics) or (type(request) is DeleteTopicsRequest and bool(request.topic_names))


def _results(response: Any) -> list[Any]:
    results: list[Any]
    match response:
        case CreateTopicsResponse():
            results = response.topics
        case CreatePartitionsResponse():
            results = response.results
        case DeleteTopicsResponse():
            results = response.responses
        case _:
            raise AssertionError(f"{type(response).__name__} has no topics")
    return results
