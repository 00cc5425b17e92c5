"""Authorization: principals, operations on resources, and the check that each request passes.

There is no authorizer yet. A listener whose ``authorizer`` is None allows everything to every client, and a request
only pays for checking that attribute.

Each route names the rights that its requests need (``handlers/routes.py``). If a whole request is about one
resource, the cluster or a group, that right is checked before the handler runs; without it the client gets the
API's error response. If a request names several resources, each must be checked on its own by the handler, with
``Call.allows``. No handler does that yet, so an authorizer must not be set before they do.

Clients can request the operations they may perform, as a bit set (KIP-430).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schema import Message

if TYPE_CHECKING:
    from penstock.broker.network.connection import Call


class Principal(NamedTuple):
    """The identity of a client, as Kafka writes it: ``User:alice``."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


class Requester(NamedTuple):
    """Who sent a request that another node forwards."""

    principal: Principal
    # Where the client connected from.
    host: str


# Every client on a listener without authentication.
ANONYMOUS = Principal("User", "ANONYMOUS")


class Operation(IntEnum):
    """Kafka's numbers (AclOperation)."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class ResourceType(IntEnum):
    """Kafka's numbers (ResourceType)."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


# Kafka's name for the one resource of the type CLUSTER.
CLUSTER_NAME = "kafka-cluster"

# The error for a client that lacks a right on a resource of the type.
DENIED = {
    ResourceType.TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ResourceType.GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ResourceType.CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}

# The operations of each resource type for which clients can request them.
OPERATIONS = {
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
}
ALL_OPERATIONS = {
    resource: sum(1 << operation for operation in operations) for resource, operations in OPERATIONS.items()
}


class Authorizer(Protocol):
    def allows(
        self, principal: Principal, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool: ...


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
    for operation, resource, name in call.route.rights:
        if name is not None and not call.allows(operation, resource, name(request)):
            return error_response(request, call.version, DENIED[resource])
    return None


def authorized_operations(call: Call, resource: ResourceType, name: str = CLUSTER_NAME) -> int:
    """The operations that the caller may perform on a resource, as a bit set."""
    if call.authorizer is None:
        return ALL_OPERATIONS[resource]
    operations = OPERATIONS[resource]
    return sum(1 << operation for operation in operations if call.allows(operation, resource, name))
