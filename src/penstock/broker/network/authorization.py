"""Authorization: who asks, the check that each request passes, and what a client without a right is told.

A listener without an ``authorizer`` allows everything to everybody, and a request only pays for checking that
attribute. So it is between nodes, where a forwarded request is checked with its ``Requester``.

Each route names the rights that its requests need (``handlers/routes.py``). If a whole request is about one
resource, the cluster or a group, that right is checked before the handler runs; without it the client gets the
API's error response. If a request names several resources, the handler checks each of them with ``Call.allows``;
for those that the controller decides, ``controller/authorized.py`` does.

Clients can request the operations they may perform, as a bit set (KIP-430).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from penstock.metadata import acls
from penstock.metadata.acls import AclResource
from penstock.metadata.authorizer import Operation, ResourceType
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schema import Message

if TYPE_CHECKING:
    from penstock.broker.network.connection import Call

__all__ = [
    "ALL_OPERATIONS",
    "ANONYMOUS",
    "CLUSTER_NAME",
    "DENIED",
    "OPERATIONS",
    "Authorizer",
    "Operation",
    "Principal",
    "Requester",
    "ResourceType",
    "Right",
    "allowed_and_denied",
    "authorized_operations",
    "on_cluster",
    "on_its_group",
    "refusal",
]


class Principal(NamedTuple):
    """The identity of a client, as Kafka writes it: ``User:alice``."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


# Every client on a listener without authentication.
ANONYMOUS = Principal("User", "ANONYMOUS")


class Requester(NamedTuple):
    """The client whose request another broker has forwarded."""

    principal: Principal
    # Its address.
    host: str


# Kafka's name for the one resource of the type CLUSTER.
CLUSTER_NAME = "kafka-cluster"

# The error for a client that lacks a right on a resource of the type.
DENIED = {
    ResourceType.TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ResourceType.GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ResourceType.CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}

# The operations of each resource type for which clients can request them (KIP-430).
OPERATIONS = {
    resource: tuple(map(Operation, acls.OPERATIONS[AclResource(resource)]))
    for resource in (ResourceType.CLUSTER, ResourceType.TOPIC, ResourceType.GROUP)
}
ALL_OPERATIONS = {
    resource: sum(1 << operation for operation in operations) for resource, operations in OPERATIONS.items()
}


class Authorizer(Protocol):
    """What ``metadata/authorizer.py`` decides."""

    @property
    def version(self) -> int:
        """Changes whenever a decision may change."""

    def allows(self, principal: object, host: str, operation: int, resource: int, name: str) -> bool: ...

    def allows_any(self, principal: object, host: str, operation: int, resource: int) -> bool: ...


class Named(Protocol):
    name: str


T = TypeVar("T", bound=Named)


class Right(NamedTuple):
    """A right that a route needs: an operation on a resource."""

    operation: Operation
    resource: ResourceType
    # Gets the resource's name from the request, if the whole request is about one resource. None: the handler
    # checks, because the request names several resources or only some requests need the right.
    name: Callable[[Any], str] | None = None


def on_cluster(operation: Operation) -> Right:
    return Right(operation, ResourceType.CLUSTER, lambda request: CLUSTER_NAME)


def on_its_group(operation: Operation) -> Right:
    return Right(operation, ResourceType.GROUP, lambda request: request.group_id)


def refusal(call: Call, request: Message) -> Message | None:
    """The error response if the caller lacks a right that the whole request needs; None if the handler may run."""
    for operation, resource, name in call.route.rights_of_whole:
        assert name is not None
        if not call.allows(operation, resource, name(request)):
            return error_response(request, call.version, DENIED[resource])
    return None


def allowed_and_denied(call: Call, operation: Operation, topics: Iterable[T]) -> tuple[list[T], list[T]]:
    """The topics of a request on which the caller has a right, and the others.

    A topic without a name, whose id is unknown, is nobody's: the handler says so.
    """
    allowed: list[T] = []
    denied: list[T] = []
    for topic in topics:
        is_allowed = not topic.name or call.allows(operation, ResourceType.TOPIC, topic.name)
        (allowed if is_allowed else denied).append(topic)
    return allowed, denied


def authorized_operations(call: Call, resource: ResourceType, name: str = CLUSTER_NAME) -> int:
    """The operations that the caller may perform on a resource, as a bit set."""
    if call.authorizer is None:
        return ALL_OPERATIONS[resource]
    return sum(1 << each for each in OPERATIONS[resource] if call.allows(each, resource, name, quietly=True))
