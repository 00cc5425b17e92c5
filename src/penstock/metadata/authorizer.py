"""Who may do what: Kafka's rules over the access control entries (ACLs) of the metadata.

An ACL allows or denies a principal on a host an operation on a resource, or on all resources of a type whose name
begins alike. In this order:

1. A super user may do everything.
2. If an ACL for the resource denies the operation, it is denied. Deny wins, whatever else is allowed.
3. If one allows it, it is allowed. To allow READ, WRITE, DELETE or ALTER is to allow DESCRIBE, and to allow
   ALTER_CONFIGS is to allow DESCRIBE_CONFIGS; to deny implies nothing.
4. Otherwise it is denied; with ``allow_everyone`` only if there is some ACL for the resource, for any principal.

A check looks up the name, ``*``, and the name's beginnings in the lengths that some pattern has. So it costs the
same with ten thousand ACLs about other resources and other principals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

from penstock.metadata.security import Acl


class Operation(IntEnum):
    """Kafka's numbers (AclOperation), without ALL: nobody performs that."""

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


# Kafka's number of the operation that stands for all of them, in ACLs only.
ALL = 2
# Kafka's numbers (PatternType, AclPermissionType).
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3
# The name of a literal pattern for every resource, and the host of an ACL for every host.
WILDCARD = "*"
EVERYBODY = "User:*"

# By operation: the operations of which one must be allowed.
_GRANTING = {operation: frozenset((int(operation), ALL)) for operation in Operation}
_GRANTING[Operation.DESCRIBE] |= {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
_GRANTING[Operation.DESCRIBE_CONFIGS] |= {Operation.ALTER_CONFIGS}

# ACLs of one resource pattern, by principal.
_Entries = dict[str, list[Acl]]


class Authorizer:
    """Decides by the ACLs it was last given with ``follow``."""

    def __init__(self, super_users: frozenset[str] = frozenset(), *, allow_everyone: bool = False) -> None:
        """``super_users`` are principals as in ACLs: "User:admin"."""
        self._super_users = super_users
        self._allow_everyone = allow_everyone
        self._acls: Mapping[bytes, Acl] = {}
        self._resources: dict[int, _Resources] = {}
        # Changes whenever a decision may change, so that decisions can be kept until then.
        self.version = 0

    def follow(self, acls: Mapping[bytes, Acl]) -> None:
        """Take over the ACLs of a new image."""
        before = self._acls
        if acls is before:
            return
        removed = [acl for id, acl in before.items() if acls.get(id) != acl]
        added = [acl for id, acl in acls.items() if before.get(id) != acl]
        for acl in removed:
            self._resources[acl.resource_type].remove(acl)
        for acl in added:
            self._resources.setdefault(acl.resource_type, _Resources()).add(acl)
        self._acls = acls
        if removed or added:
            self.version += 1

    def allows(self, principal: object, host: str, operation: int, resource: int, name: str) -> bool:
        """Whether a principal, whose text is like "User:alice", may do this."""
        who = str(principal)
        if who in self._super_users:
            return True
        is_allowed = has_acls = False
        resources = self._resources.get(resource)
        if resources is not None:
            granting = _GRANTING[Operation(operation)]
            for entries in resources.matching(name):
                has_acls = True
                for holder in (who, EVERYBODY):
                    for acl in entries.get(holder, ()):
                        if acl.host not in (host, WILDCARD):
                            continue
                        if acl.permission_type == DENY:
                            if acl.operation in (operation, ALL):
                                return False
                        elif acl.operation in granting:
                            is_allowed = True
        return is_allowed or (self._allow_everyone and not has_acls)

    def allows_any(self, principal: object, host: str, operation: int, resource: int) -> bool:
        """Whether there could be a resource of the type on which the principal may do this (KIP-679)."""
        # Super users, and everybody if there are no ACLs. The name is the one that Kafka tries.
        if self.allows(principal, host, operation, resource, "hardcode"):
            return True
        resources = self._resources.get(resource)
        if resources is None:
            return False
        allowed: list[Acl] = []
        denied: set[tuple[int, str]] = set()
        for acl in resources.about(str(principal)):
            if acl.host in (host, WILDCARD) and acl.operation in (operation, ALL):
                if acl.permission_type == DENY:
                    denied.add((acl.pattern_type, acl.resource_name))
                else:
                    allowed.append(acl)
        if (LITERAL, WILDCARD) in denied:
            return False
        return any(not _is_covered(acl, denied) for acl in allowed)

    def check(self) -> None:
        """Assert that the index is what a new one from the same ACLs would be."""
        fresh = Authorizer()
        fresh.follow(self._acls)
        known = {type: resources.state() for type, resources in self._resources.items() if resources.state()}
        assert known == {type: resources.state() for type, resources in fresh._resources.items()}


def _is_covered(acl: Acl, denied: set[tuple[int, str]]) -> bool:
    """Whether everything that an ACL allows is denied."""
    name = acl.resource_name
    if acl.pattern_type == LITERAL and name == WILDCARD:
        return False
    if acl.pattern_type == LITERAL and (LITERAL, name) in denied:
        return True
    return any((PREFIXED, name[:length]) in denied for length in range(1, len(name) + 1))


def super_users(text: str) -> frozenset[str]:
    """Parse the setting super.users: principals separated by semicolons. Raises ValueError."""
    found = [part.strip() for part in text.split(";") if part.strip()]
    for each in found:
        type, colon, name = each.partition(":")
        if not type or not colon or not name:
            raise ValueError(f"write User:NAME;User:NAME; got {each!r}")
    return frozenset(found)


class _Resources:
    """The ACLs for resources of one type."""

    def __init__(self) -> None:
        # By name or prefix. No pattern is empty.
        self._literal: dict[str, _Entries] = {}
        self._prefixed: dict[str, _Entries] = {}
        # The lengths of prefixes, with the number of prefixes of each.
        self._lengths: dict[int, int] = {}
        self._by_principal: dict[str, dict[Acl, None]] = {}

    def matching(self, name: str) -> Iterator[_Entries]:
        """The ACLs for a resource, by pattern."""
        literal = self._literal
        if (entries := literal.get(name)) is not None:
            yield entries
        if name != WILDCARD and (entries := literal.get(WILDCARD)) is not None:
            yield entries
        for length in self._lengths:
            if length <= len(name) and (entries := self._prefixed.get(name[:length])) is not None:
                yield entries

    def about(self, principal: str) -> Iterator[Acl]:
        """The ACLs that name the principal, or everybody."""
        for holder in dict.fromkeys((principal, EVERYBODY)):
            yield from self._by_principal.get(holder, ())

    def add(self, acl: Acl) -> None:
        patterns = self._prefixed if acl.pattern_type == PREFIXED else self._literal
        entries = patterns.get(acl.resource_name)
        if entries is None:
            entries = patterns[acl.resource_name] = {}
            if acl.pattern_type == PREFIXED:
                length = len(acl.resource_name)
                self._lengths[length] = self._lengths.get(length, 0) + 1
        entries.setdefault(acl.principal, []).append(acl)
        self._by_principal.setdefault(acl.principal, {})[acl] = None

    def remove(self, acl: Acl) -> None:
        patterns = self._prefixed if acl.pattern_type == PREFIXED else self._literal
        entries = patterns[acl.resource_name]
        entries[acl.principal].remove(acl)
        if not entries[acl.principal]:
            del entries[acl.principal]
        if not entries:
            del patterns[acl.resource_name]
            if acl.pattern_type == PREFIXED:
                length = len(acl.resource_name)
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]
        of_principal = self._by_principal[acl.principal]
        del of_principal[acl]
        if not of_principal:
            del self._by_principal[acl.principal]

    def state(self) -> dict[str, object]:
        """Everything known, for comparison; empty if nothing is."""
        if not self._by_principal:
            assert not self._literal and not self._prefixed and not self._lengths
            return {}
        return {
            **{
                f"{kind}:{name}": {who: sorted(acls) for who, acls in entries.items()}
                for kind, patterns in (("literal", self._literal), ("prefixed", self._prefixed))
                for name, entries in patterns.items()
            },
            "lengths": dict(self._lengths),
            "by principal": {who: sorted(acls) for who, acls in self._by_principal.items()},
        }
