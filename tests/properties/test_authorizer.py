"""The authorizer against a loop over all ACLs, written from Kafka's documentation, while ACLs come and go."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata.authorizer import Authorizer, Operation, ResourceType
from penstock.metadata.security import Acl

ALL = 2
PRINCIPALS = ("User:alice", "User:bob", "User:*")
HOSTS = ("10.0.0.1", "10.0.0.2")
# The last letter is in no pattern: what is appended to a prefix for a name that only the prefix is about.
NAMES = ("a", "ab", "abc", "b", "ba")
ASKED = (*NAMES, "abz", "z", "*", "hardcode")
OPERATIONS = (
    Operation.READ,
    Operation.WRITE,
    Operation.DESCRIBE,
    Operation.ALTER_CONFIGS,
    Operation.DESCRIBE_CONFIGS,
)
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3

acl = st.builds(
    Acl,
    resource_type=st.sampled_from((ResourceType.TOPIC, ResourceType.GROUP)).map(int),
    resource_name=st.sampled_from((*NAMES, "*")),
    pattern_type=st.sampled_from((LITERAL, PREFIXED)),
    principal=st.sampled_from(PRINCIPALS),
    host=st.sampled_from((*HOSTS, "*")),
    operation=st.sampled_from((ALL, *map(int, OPERATIONS))),
    permission_type=st.sampled_from((DENY, ALLOW)),
)
# An ACL to add, or the number of one to remove.
steps = st.lists(st.one_of(acl, acl, st.integers(0, 20)), max_size=12)


def may(
    acls: Iterable[Acl],
    principal: str,
    host: str,
    operation: int,
    resource: int,
    name: str,
    *,
    super_users: frozenset[str],
    allow_everyone: bool,
) -> bool:
    if principal in super_users:
        return True
    about = [
        acl
        for acl in acls
        if acl.resource_type == resource
        and (
            name.startswith(acl.resource_name)
            if acl.pattern_type == PREFIXED
            else acl.resource_name in (name, "*")
        )
    ]
    if not about:
        return allow_everyone
    mine = [acl for acl in about if acl.principal in (principal, "User:*") and acl.host in (host, "*")]
    if any(acl.permission_type == DENY and acl.operation in (operation, ALL) for acl in mine):
        return False
    wanted = {operation, ALL}
    if operation == Operation.DESCRIBE:
        wanted |= {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
    if operation == Operation.DESCRIBE_CONFIGS:
        wanted |= {Operation.ALTER_CONFIGS}
    return any(acl.permission_type == ALLOW and acl.operation in wanted for acl in mine)


@settings(max_examples=50, deadline=None)
@given(steps, st.booleans(), st.booleans())
def test_decisions_are_those_of_a_loop_over_all_acls(
    steps: list[Acl | int], allow_everyone: bool, has_super_user: bool
) -> None:
    super_users = frozenset({"User:bob"} if has_super_user else ())
    authorizer = Authorizer(super_users, allow_everyone=allow_everyone)
    acls: dict[bytes, Acl] = {}
    for number, step in enumerate(steps):
        acls = dict(acls)
        version = authorizer.version
        before = set(acls.values())
        if isinstance(step, Acl):
            if step not in before:
                acls[number.to_bytes(16, "big")] = step
        elif acls:
            del acls[list(acls)[step % len(acls)]]
        authorizer.follow(acls)
        authorizer.check()
        assert (authorizer.version != version) == (before != set(acls.values()))

    for principal in PRINCIPALS[:2]:
        for host in HOSTS:
            for operation in OPERATIONS:
                for resource in (ResourceType.TOPIC, ResourceType.GROUP):
                    expected = {
                        name: may(
                            acls.values(),
                            principal,
                            host,
                            operation,
                            resource,
                            name,
                            super_users=super_users,
                            allow_everyone=allow_everyone,
                        )
                        for name in ASKED
                    }
                    decided = {
                        name: authorizer.allows(principal, host, operation, resource, name) for name in ASKED
                    }
                    assert decided == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(acl, max_size=8, unique=True), st.booleans())
def test_any_resource_is_allowed_exactly_if_a_name_can_be_found(
    given_acls: list[Acl], allow_everyone: bool
) -> None:
    acls = {number.to_bytes(16, "big"): each for number, each in enumerate(given_acls)}
    authorizer = Authorizer(allow_everyone=allow_everyone)
    authorizer.follow(acls)
    # A prefix allows longer names, of which no other ACL need know.
    names = {each.resource_name + "z" * (each.pattern_type == PREFIXED) for each in given_acls}
    for host in HOSTS:
        # Not DESCRIBE: Kafka does not look at what implies an operation here, and asks only for WRITE.
        expected = any(
            may(
                given_acls,
                "User:alice",
                host,
                Operation.WRITE,
                ResourceType.TOPIC,
                name,
                super_users=frozenset(),
                allow_everyone=allow_everyone,
            )
            for name in (names - {"*"}) | {"hardcode"}
        )
        assert authorizer.allows_any("User:alice", host, Operation.WRITE, ResourceType.TOPIC) == expected
