"""The rights for requests that the controller decides: what is refused is taken out, and added to the response.

The broker that a client talks to checks them by its image before it forwards the rest. The controller checks again,
by its own newer image, when it is told who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, NamedTuple, Protocol

from penstock.broker.network.authorization import CLUSTER_NAME, DENIED, Operation, ResourceType
from penstock.metadata.image import Image
from penstock.model import NO_TOPIC_ID, TopicId
from penstock.protocol.apis import APIS, error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import AlterConfigsRequest, IncrementalAlterConfigsRequest
from penstock.protocol.messages.topics import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeletableTopicResult,
    DeleteTopicsRequest,
)
from penstock.protocol.schema import Message

# Requests about the whole cluster, by API: the right they need. All others that have no rule here are of nodes.
_ON_CLUSTER = {
    30: Operation.ALTER,  # CreateAcls
    31: Operation.ALTER,  # DeleteAcls
    43: Operation.ALTER,  # ElectLeaders
    45: Operation.ALTER,  # AlterPartitionReassignments
    46: Operation.DESCRIBE,  # ListPartitionReassignments
    49: Operation.ALTER_CONFIGS,  # AlterClientQuotas
    51: Operation.ALTER,  # AlterUserScramCredentials
    57: Operation.ALTER,  # UpdateFeatures
    64: Operation.ALTER,  # UnregisterBroker
}

# Kafka's numbers of the resources that have configs, with the resource whose rights count.
CONFIG_RESOURCES = {
    2: ResourceType.TOPIC,
    4: ResourceType.CLUSTER,
    # The loggers of a broker, and the metrics of clients.
    8: ResourceType.CLUSTER,
    16: ResourceType.CLUSTER,
    32: ResourceType.GROUP,
}


class Allows(Protocol):
    def __call__(
        self, operation: Operation, resource: ResourceType, name: str, *, quietly: bool = False
    ) -> bool: ...


class Checked(NamedTuple):
    """A request after the check of rights."""

    # What may be decided; None if nothing is left.
    request: Message | None
    # Adds to the response what was refused. With None, for a request of which nothing is left.
    complete: Callable[[Any], Any]


def check(request: Any, version: int, image: Image, allows: Allows) -> Checked:
    """Check every resource that a request names. The request itself stays as it is."""
    match request:
        case CreateTopicsRequest():
            return _create_topics(request, version, allows)
        case DeleteTopicsRequest():
            return _delete_topics(request, image, allows)
        case CreatePartitionsRequest():
            refused = {
                topic.name
                for topic in request.topics
                if not allows(Operation.ALTER, ResourceType.TOPIC, topic.name)
            }
            return _without(
                request,
                version,
                "topics",
                "results",
                lambda topic: (
                    ErrorCode.TOPIC_AUTHORIZATION_FAILED if topic.name in refused else ErrorCode.NONE
                ),
            )
        case AlterConfigsRequest() | IncrementalAlterConfigsRequest():
            return _without(
                request,
                version,
                "resources",
                "responses",
                lambda resource: config_refusal(resource, Operation.ALTER_CONFIGS, allows),
            )
        case _:
            operation = _ON_CLUSTER.get(request.KEY, Operation.CLUSTER_ACTION)
            if allows(operation, ResourceType.CLUSTER, CLUSTER_NAME):
                return Checked(request, lambda response: response)
            denied = error_response(request, version, DENIED[ResourceType.CLUSTER])
            return Checked(None, lambda _: denied)


def config_refusal(resource: Any, operation: Operation, allows: Allows) -> ErrorCode:
    """The error for a resource of a request about configs; NONE if the caller may do this."""
    kind = CONFIG_RESOURCES.get(resource.resource_type)
    if kind is None:
        # It has no configs, which is said to everybody.
        return ErrorCode.NONE
    name = CLUSTER_NAME if kind is ResourceType.CLUSTER else resource.resource_name
    return ErrorCode.NONE if allows(operation, kind, name) else DENIED[kind]


def _create_topics(request: CreateTopicsRequest, version: int, allows: Allows) -> Checked:
    may_create_all = allows(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME, quietly=True)

    def refusal(topic: Any) -> ErrorCode:
        if may_create_all or allows(Operation.CREATE, ResourceType.TOPIC, topic.name):
            return ErrorCode.NONE
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED

    checked = _without(request, version, "topics", "topics", refusal)

    def complete(response: Any) -> Any:
        response = checked.complete(response)
        for topic in response.topics:
            if not topic.error_code and not allows(
                Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, topic.name, quietly=True
            ):
                topic.topic_config_error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                topic.num_partitions = topic.replication_factor = -1
                topic.configs = []
        return response

    return Checked(checked.request, complete)


def _delete_topics(request: DeleteTopicsRequest, image: Image, allows: Allows) -> Checked:
    """Two rights: a client without DESCRIBE is not told the name behind an id, or whether a name exists."""
    # What is named twice has one result.
    refused: dict[tuple[str | None, bytes], DeletableTopicResult] = {}

    def refuse(name: str | None, topic_id: bytes) -> None:
        refused[name, topic_id] = DeletableTopicResult(
            name=name, topic_id=topic_id, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
        )

    def may_delete(name: str) -> bool:
        return allows(Operation.DESCRIBE, ResourceType.TOPIC, name) and allows(
            Operation.DELETE, ResourceType.TOPIC, name
        )

    rest = copy(request)
    rest.topic_names, rest.topics = [], []
    for name in request.topic_names:
        if may_delete(name):
            rest.topic_names.append(name)
        else:
            refuse(name, NO_TOPIC_ID)
    for topic in request.topics:
        by_id = topic.name is None
        known = image.topics_by_id.get(TopicId(topic.topic_id)) if by_id else None
        # An unknown id is refused by the controller.
        named = topic.name if known is None else known.name
        if named is None or may_delete(named):
            rest.topics.append(topic)
        elif by_id and not allows(Operation.DESCRIBE, ResourceType.TOPIC, named, quietly=True):
            refuse(None, topic.topic_id)
        else:
            refuse(named, topic.topic_id)

    def complete(response: Any) -> Any:
        response = _or_empty(request, response)
        response.responses += refused.values()
        return response

    is_left = bool(rest.topic_names or rest.topics) or not refused
    return Checked(rest if is_left else None, complete)


def _without(
    request: Any, version: int, items: str, results: str, refusal: Callable[[Any], ErrorCode]
) -> Checked:
    """Take out the items that are refused. ``results`` is where the response has one for each."""
    rest, refused = copy(request), []
    kept = []
    for item in getattr(request, items):
        error = refusal(item)
        if error:
            refused.append((item, error))
        else:
            kept.append(item)
    setattr(rest, items, kept)

    def complete(response: Any) -> Any:
        response = _or_empty(request, response)
        getattr(response, results).extend(_results(request, version, items, results, refused))
        return response

    return Checked(rest if kept or not refused else None, complete)


def _results(
    request: Any, version: int, items: str, results: str, refused: Iterable[tuple[Any, ErrorCode]]
) -> list[Any]:
    # A name that is given twice has one result. By their text: a client without any right may name very many, and
    # to compare each with all others would stop the loop for minutes.
    made: dict[str, Any] = {}
    for item, error in refused:
        one = copy(request)
        setattr(one, items, [item])
        made.update((repr(each), each) for each in getattr(error_response(one, version, error), results))
    return list(made.values())


def _or_empty(request: Message, response: Any) -> Any:
    return APIS[request.KEY].response() if response is None else response
