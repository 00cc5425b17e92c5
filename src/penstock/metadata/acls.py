"""Decisions about access control entries: CreateAcls and DeleteAcls (KIP-140, KIP-290), and what a filter matches.

The numbers and rules are Kafka's. One rule is ours: an operation that the resource type does not have is refused,
because such an ACL would never allow or deny anything. Who is allowed what is decided elsewhere, from the same
``Acl``s.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from random import Random
from typing import NamedTuple, TypeVar

from penstock.metadata.decided_state import DecidedState
from penstock.metadata.features import may_secure
from penstock.metadata.refusal import Refusal
from penstock.metadata.security import Acl, acl_record, as_address
from penstock.metadata.users import NOT_YET
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import RemoveAccessControlEntryRecord
from penstock.protocol.messages.security import (
    AclCreation,
    AclCreationResult,
    AclDescription,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsFilter,
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)
from penstock.protocol.schema import NO_UUID, Message

# The name of a resource that stands for all of its type, and the host that stands for all.
WILDCARD = "*"
CLUSTER_NAME = "kafka-cluster"

# In all. Every broker has them in memory, and a filter is compared with each of them.
ACLS_MAX = 10_000
# Filters times ACLs, in one request: half a second of the controller's time.
COMPARISONS_MAX = 1_000_000
TEXT_CHARACTERS_MAX = 1000

ID_BYTES = 16

Numbers = TypeVar("Numbers", bound=IntEnum)


class AclResource(IntEnum):
    """Kafka's numbers (ResourceType)."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class Pattern(IntEnum):
    """Kafka's numbers (PatternType). The first two are for filters only."""

    ANY = 1
    # Every pattern that applies to the named resource.
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class AclOperation(IntEnum):
    """Kafka's numbers."""

    ANY = 1
    ALL = 2
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
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(IntEnum):
    """Kafka's numbers (AclPermissionType)."""

    ANY = 1
    DENY = 2
    ALLOW = 3


# What can be done with each type of resource, beside ALL.
OPERATIONS = {
    AclResource.TOPIC: (
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.CREATE,
        AclOperation.DELETE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
    ),
    AclResource.GROUP: (
        AclOperation.READ,
        AclOperation.DELETE,
        AclOperation.DESCRIBE,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
    ),
    AclResource.CLUSTER: (
        AclOperation.CREATE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE,
        AclOperation.CLUSTER_ACTION,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
        AclOperation.IDEMPOTENT_WRITE,
    ),
    AclResource.TRANSACTIONAL_ID: (
        AclOperation.WRITE,
        AclOperation.DESCRIBE,
        AclOperation.TWO_PHASE_COMMIT,
    ),
    AclResource.DELEGATION_TOKEN: (AclOperation.DESCRIBE,),
    AclResource.USER: (AclOperation.CREATE_TOKENS, AclOperation.DESCRIBE_TOKENS),
}


class AclFilter(NamedTuple):
    """Which ACLs are asked for. None, or ANY, matches everything."""

    resource_type: int
    resource_name: str | None
    pattern_type: int
    principal: str | None
    host: str | None
    operation: int
    permission_type: int

    def matches(self, acl: Acl) -> bool:
        return (
            self.resource_type in (AclResource.ANY, acl.resource_type)
            and self.operation in (AclOperation.ANY, acl.operation)
            and self.permission_type in (Permission.ANY, acl.permission_type)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self._matches_pattern(acl)
        )

    def _matches_pattern(self, acl: Acl) -> bool:
        if self.pattern_type != Pattern.MATCH:
            return self.pattern_type in (Pattern.ANY, acl.pattern_type) and self.resource_name in (
                None,
                acl.resource_name,
            )
        if self.resource_name is None:
            return True
        if acl.pattern_type == Pattern.PREFIXED:
            return self.resource_name.startswith(acl.resource_name)
        return acl.resource_name in (self.resource_name, WILDCARD)


def filter_of(asked: DescribeAclsRequest | DeleteAclsFilter) -> AclFilter:
    """Raises Refusal for numbers that mean nothing."""
    _known(AclResource, asked.resource_type_filter, "resource type")
    _known(Pattern, asked.pattern_type_filter, "pattern type")
    _known(AclOperation, asked.operation, "operation")
    _known(Permission, asked.permission_type, "permission type")
    return AclFilter(
        asked.resource_type_filter,
        asked.resource_name_filter,
        asked.pattern_type_filter,
        asked.principal_filter,
        None if asked.host_filter is None else as_address(asked.host_filter),
        asked.operation,
        asked.permission_type,
    )


def create_acls(decided: DecidedState, request: CreateAclsRequest, generator: Random) -> CreateAclsResponse:
    """Add ACLs. One that exists already is not added again, and its result is no error."""
    if not may_secure(decided.image):
        return CreateAclsResponse.for_error(request, 0, ErrorCode.UNSUPPORTED_VERSION, NOT_YET)
    acls = decided.image.security.acls
    known, ids = set(acls.values()), set(acls)
    added: dict[bytes, Acl] = {}
    results = []
    for creation in request.creations:
        result = AclCreationResult(error_message=None)
        try:
            acl = _acl(creation)
            if acl not in known:
                if len(known) >= ACLS_MAX:
                    raise Refusal(ErrorCode.POLICY_VIOLATION, f"There can be {ACLS_MAX} ACLs in all.")
                known.add(acl)
                added[_new_id(generator, ids)] = acl
        except Refusal as refusal:
            result.error_code, result.error_message = refusal.error, refusal.message
        results.append(result)
    decided.take([acl_record(id, acl) for id, acl in added.items()])
    return CreateAclsResponse(results=results)


def delete_acls(decided: DecidedState, request: DeleteAclsRequest) -> DeleteAclsResponse:
    """Remove the ACLs that match any of the filters.

    Every filter is answered with all that it matches, also if an earlier filter of the request matches it too.
    """
    if not may_secure(decided.image):
        return DeleteAclsResponse.for_error(request, 0, ErrorCode.UNSUPPORTED_VERSION, NOT_YET)
    acls = decided.image.security.acls
    if len(request.filters) * len(acls) > COMPARISONS_MAX:
        message = (
            f"Too many filters for {len(acls)} ACLs: send at most {COMPARISONS_MAX // len(acls)} at a time."
        )
        return DeleteAclsResponse.for_error(request, 0, ErrorCode.INVALID_REQUEST, message)
    removed: dict[bytes, Message] = {}
    results = []
    for asked in request.filters:
        result = DeleteAclsFilterResult(error_message=None)
        try:
            wanted = filter_of(asked)
            for id, acl in acls.items():
                if wanted.matches(acl):
                    removed[id] = RemoveAccessControlEntryRecord(id=id)
                    result.matching_acls.append(DeleteAclsMatchingAcl(error_message=None, **acl._asdict()))
        except Refusal as refusal:
            result.error_code, result.error_message = refusal.error, refusal.message
        results.append(result)
    decided.take(list(removed.values()))
    return DeleteAclsResponse(filter_results=results)


def describe_acls(acls: Iterable[Acl], request: DescribeAclsRequest) -> DescribeAclsResponse:
    try:
        wanted = filter_of(request)
    except Refusal as refusal:
        return DescribeAclsResponse(error_code=refusal.error, error_message=refusal.message)
    resources: dict[tuple[int, str, int], DescribeAclsResource] = {}
    for acl in sorted(acls):
        if not wanted.matches(acl):
            continue
        resource = resources.setdefault(
            (acl.resource_type, acl.resource_name, acl.pattern_type),
            DescribeAclsResource(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                pattern_type=acl.pattern_type,
            ),
        )
        resource.acls.append(
            AclDescription(
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission_type,
            )
        )
    return DescribeAclsResponse(error_message=None, resources=list(resources.values()))


def _acl(creation: AclCreation) -> Acl:
    """Raises Refusal."""
    type = _known(AclResource, creation.resource_type, "resource type")
    pattern = _known(Pattern, creation.resource_pattern_type, "pattern type")
    operation = _known(AclOperation, creation.operation, "operation")
    permission = _known(Permission, creation.permission_type, "permission type")
    if type == AclResource.ANY:
        raise _invalid("An ACL is for one resource type, not for ANY.")
    if pattern not in (Pattern.LITERAL, Pattern.PREFIXED):
        raise _invalid(f"The pattern type of an ACL is LITERAL or PREFIXED, not {pattern.name}.")
    if operation == AclOperation.ANY:
        raise _invalid("An ACL is for one operation or for ALL, not for ANY.")
    if permission == Permission.ANY:
        raise _invalid("The permission of an ACL is ALLOW or DENY, not ANY.")
    if operation != AclOperation.ALL and operation not in OPERATIONS[type]:
        names = ", ".join(each.name for each in (AclOperation.ALL, *OPERATIONS[type]))
        raise _invalid(f"A {type.name} has no operation {operation.name}. Operations: {names}.")
    name, principal, host = creation.resource_name, creation.principal, creation.host
    if not name:
        raise _invalid("The name of the resource must not be empty.")
    if type == AclResource.CLUSTER and (name != CLUSTER_NAME or pattern != Pattern.LITERAL):
        raise _invalid(f"The only name of the CLUSTER resource is {CLUSTER_NAME}, as a LITERAL.")
    kind, _, user = principal.partition(":")
    if not kind or not user:
        raise _invalid("A principal is written TYPE:NAME, such as User:alice, or User:* for everybody.")
    if not host:
        raise _invalid("The host must not be empty: it is an address, or * for all.")
    for text in (name, principal, host):
        if len(text) > TEXT_CHARACTERS_MAX:
            raise _invalid(f"Names have at most {TEXT_CHARACTERS_MAX} characters, not {len(text)}.")
    if not (principal + host).isprintable():
        raise _invalid("Principals and hosts must not have control characters.")
    return Acl(int(type), name, int(pattern), principal, as_address(host), int(operation), int(permission))


def _known(numbers: type[Numbers], number: int, what: str) -> Numbers:
    try:
        return numbers(number)
    except ValueError:
        names = ", ".join(f"{each.value} ({each.name})" for each in numbers)
        raise _invalid(f"There is no {what} {number}. Known: {names}.") from None


def _new_id(generator: Random, taken: set[bytes]) -> bytes:
    while True:
        id = generator.randbytes(ID_BYTES)
        if id != NO_UUID and id not in taken:
            taken.add(id)
            return id


def _invalid(message: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_REQUEST, message)
