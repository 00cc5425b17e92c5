"""ACLs: what may be created, and which ones a filter finds and removes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metadata import acls
from penstock.metadata.acls import AclFilter, AclOperation, AclResource, Pattern, Permission
from penstock.metadata.authorizer import Authorizer
from penstock.metadata.security import Acl
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import (
    AccessControlEntryRecord,
    RemoveAccessControlEntryRecord,
)
from penstock.protocol.messages.security import (
    AclCreation,
    AclCreationResult,
    CreateAclsRequest,
    DeleteAclsFilter,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DescribeAclsRequest,
)
from tests.metadata.ensemble import Ensemble
from tests.metadata.test_features import NEW, WITHOUT_COMPACTION, cluster

TOPIC, GROUP, CLUSTER = AclResource.TOPIC, AclResource.GROUP, AclResource.CLUSTER
LITERAL, PREFIXED = Pattern.LITERAL, Pattern.PREFIXED
READ, WRITE, ALL = AclOperation.READ, AclOperation.WRITE, AclOperation.ALL
ALLOW, DENY = Permission.ALLOW, Permission.DENY


@pytest.fixture
def on() -> Ensemble:
    return cluster(NEW)


def acl(
    name: str = "orders",
    *,
    type: int = TOPIC,
    pattern: int = LITERAL,
    principal: str = "User:alice",
    host: str = "*",
    operation: int = READ,
    permission: int = ALLOW,
) -> Acl:
    return Acl(int(type), name, int(pattern), principal, host, int(operation), int(permission))


def create(on: Ensemble, *wanted: Acl) -> list[AclCreationResult]:
    request = CreateAclsRequest(
        creations=[
            AclCreation(
                resource_type=each.resource_type,
                resource_name=each.resource_name,
                resource_pattern_type=each.pattern_type,
                principal=each.principal,
                host=each.host,
                operation=each.operation,
                permission_type=each.permission_type,
            )
            for each in wanted
        ]
    )
    results: list[AclCreationResult] = on.handle(request, 3).results
    assert len(results) == len(wanted)
    return results


def errors(on: Ensemble, *wanted: Acl) -> list[int]:
    return [result.error_code for result in create(on, *wanted)]


def known(on: Ensemble) -> list[Acl]:
    return sorted(on.on.image.security.acls.values())


def asked(**changed: Any) -> AclFilter:
    everything: dict[str, Any] = {
        "resource_type": 1,
        "resource_name": None,
        "pattern_type": 1,
        "principal": None,
        "host": None,
        "operation": 1,
        "permission_type": 1,
    }
    return AclFilter(**{**everything, **changed})


def delete(on: Ensemble, *filters: AclFilter) -> list[tuple[int, list[Acl]]]:
    request = DeleteAclsRequest(filters=[DeleteAclsFilter(**as_asked(each)) for each in filters])
    results = on.handle(request, 3).filter_results
    return [(each.error_code, sorted(acl_of(match) for match in each.matching_acls)) for each in results]


def as_asked(wanted: AclFilter) -> dict[str, Any]:
    return {
        "resource_type_filter": wanted.resource_type,
        "resource_name_filter": wanted.resource_name,
        "pattern_type_filter": wanted.pattern_type,
        "principal_filter": wanted.principal,
        "host_filter": wanted.host,
        "operation": wanted.operation,
        "permission_type": wanted.permission_type,
    }


def acl_of(match: DeleteAclsMatchingAcl) -> Acl:
    assert match.error_code == ErrorCode.NONE
    return Acl(
        match.resource_type,
        match.resource_name,
        match.pattern_type,
        match.principal,
        match.host,
        match.operation,
        match.permission_type,
    )


# Creating.


def test_acls_are_created_with_ids_of_their_own(on: Ensemble) -> None:
    wanted = [acl("a"), acl("a", operation=WRITE), acl("*"), acl("b", pattern=PREFIXED, permission=DENY)]
    assert errors(on, *wanted) == [0, 0, 0, 0]
    assert known(on) == sorted(wanted)
    assert len(on.on.image.security.acls) == 4


def test_what_exists_is_not_written_again(on: Ensemble) -> None:
    assert errors(on, acl("a"), acl("b"), acl("a")) == [0, 0, 0]
    before = len(on.log)
    assert errors(on, acl("a")) == [0]
    assert len(on.log) == before
    assert len([each for each in on.log if isinstance(each, AccessControlEntryRecord)]) == 2


@pytest.mark.parametrize(
    "wanted",
    [
        acl(type=0),
        acl(type=AclResource.ANY),
        acl(type=8),
        acl(pattern=0),
        acl(pattern=Pattern.ANY),
        acl(pattern=Pattern.MATCH),
        acl(pattern=5),
        acl(operation=0),
        acl(operation=AclOperation.ANY),
        acl(operation=16),
        acl(permission=0),
        acl(permission=Permission.ANY),
        acl(permission=4),
        acl(""),
        acl("a" * 1001),
        acl("orders", type=CLUSTER, operation=ALL),
        acl("*", type=CLUSTER, operation=ALL),
        acl("kafka-cluster", type=CLUSTER, pattern=PREFIXED, operation=ALL),
        acl("kafka-cluster", type=CLUSTER, operation=READ),
        acl("g", type=GROUP, operation=WRITE),
        acl("t", type=AclResource.TRANSACTIONAL_ID, operation=READ),
        acl(operation=AclOperation.IDEMPOTENT_WRITE),
        acl(principal="alice"),
        acl(principal="User:"),
        acl(principal=":alice"),
        acl(principal=""),
        acl(principal="User:a\nb"),
        acl(principal="User:" + "a" * 1000),
        acl(host=""),
        acl(host="\x1b[2J"),
        acl(host="1" * 1001),
    ],
    ids=str,
)
def test_an_acl_that_would_mean_nothing_is_refused_in_one_line(on: Ensemble, wanted: Acl) -> None:
    # And what is right in the same request is done.
    first, last = create(on, wanted, acl("right"))
    assert first.error_code == ErrorCode.INVALID_REQUEST
    assert first.error_message and first.error_message.isprintable()
    assert (last.error_code, last.error_message) == (ErrorCode.NONE, None)
    assert known(on) == [acl("right")]


def test_every_operation_of_every_resource_type_can_be_allowed(on: Ensemble) -> None:
    wanted = [
        acl(acls.CLUSTER_NAME if type == CLUSTER else "name", type=type, operation=operation)
        for type, operations in acls.OPERATIONS.items()
        for operation in (ALL, *operations)
    ]
    assert set(errors(on, *wanted)) == {0}
    assert known(on) == sorted(wanted)


def test_principals_have_any_type_and_may_contain_colons(on: Ensemble) -> None:
    assert (
        errors(on, acl(principal="User:CN=a:b"), acl(principal="Group:x"), acl(principal="User:*")) == [0] * 3
    )


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("2001:db8:0:0:0:0:0:7", "2001:db8::7"),
        ("2001:DB8::7", "2001:db8::7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "10.0.0.7"),
        ("*", "*"),
    ],
)
def test_a_host_is_kept_as_brokers_see_it_however_it_is_written(
    on: Ensemble, written: str, seen: str
) -> None:
    """Otherwise an ACL that denies something to the host would be there and not apply."""
    assert errors(on, acl(host=written, permission=DENY), acl(host=seen, permission=DENY)) == [0, 0]
    assert known(on) == [acl(host=seen, permission=DENY)]
    authorizer = Authorizer()
    authorizer.follow({**on.on.image.security.acls, b"1": acl()})
    host = "10.0.0.7" if seen == "*" else seen
    assert not authorizer.allows("User:alice", host, READ, TOPIC, "orders")
    (deleted,) = delete(on, asked(host=written))
    assert deleted == (0, [acl(host=seen, permission=DENY)])


def test_there_is_a_limit_on_acls(on: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acls, "ACLS_MAX", 2)
    assert errors(on, acl("a"), acl("b"), acl("c"), acl("a")) == [0, 0, ErrorCode.POLICY_VIOLATION, 0]
    assert delete(on, asked(resource_name="a")) == [(0, [acl("a")])]
    assert errors(on, acl("c"), acl("d")) == [0, ErrorCode.POLICY_VIOLATION]


def test_nothing_is_written_before_every_broker_understands_it() -> None:
    on = cluster(WITHOUT_COMPACTION, NEW)
    before = len(on.log)
    assert errors(on, acl(), acl("b")) == [ErrorCode.UNSUPPORTED_VERSION] * 2
    assert delete(on, asked()) == [(ErrorCode.UNSUPPORTED_VERSION, [])]
    assert len(on.log) == before


# Filters.


def naive(wanted: AclFilter, known: Acl) -> bool:
    """As the words of KIP-140 and KIP-290 say it, one after the other."""
    if wanted.resource_type not in (AclResource.ANY, known.resource_type):
        return False
    if wanted.principal is not None and wanted.principal != known.principal:
        return False
    if wanted.host is not None and wanted.host != known.host:
        return False
    if wanted.operation not in (AclOperation.ANY, known.operation):
        return False
    if wanted.permission_type not in (Permission.ANY, known.permission_type):
        return False
    is_named = wanted.resource_name is None or wanted.resource_name == known.resource_name
    if wanted.pattern_type == Pattern.ANY:
        return is_named
    if wanted.pattern_type in (LITERAL, PREFIXED):
        return is_named and wanted.pattern_type == known.pattern_type
    # Everything that would decide about this name: its own literals, the wildcard, and prefixes of it.
    if is_named:
        return True
    if known.pattern_type == LITERAL:
        return known.resource_name == "*"
    name = wanted.resource_name or ""
    prefixes = [name[:size] for size in range(len(name) + 1)]
    return known.resource_name in prefixes


names = st.sampled_from(["*", "a", "ab", "abc", "b"])
principals = st.sampled_from(["User:a", "User:*", "Group:a"])
hosts = st.sampled_from(["*", "127.0.0.1"])
some_acls = st.builds(
    acl,
    names,
    type=st.sampled_from([TOPIC, GROUP]),
    pattern=st.sampled_from([LITERAL, PREFIXED]),
    principal=principals,
    host=hosts,
    operation=st.sampled_from([READ, ALL]),
    permission=st.sampled_from([ALLOW, DENY]),
)
filters = st.builds(
    AclFilter,
    st.sampled_from([1, TOPIC, GROUP]),
    st.none() | names,
    st.sampled_from(list(Pattern)),
    st.none() | principals,
    st.none() | hosts,
    st.sampled_from([1, READ, ALL]),
    st.sampled_from([1, ALLOW, DENY]),
)


@given(filters, some_acls)
def test_a_filter_matches_what_the_words_say(wanted: AclFilter, known: Acl) -> None:
    assert wanted.matches(known) == naive(wanted, known)


@given(st.lists(some_acls, max_size=20), st.lists(filters, min_size=1, max_size=3))
def test_deletion_removes_and_returns_exactly_what_matches(
    given: list[Acl], wanted: Sequence[AclFilter]
) -> None:
    on = cluster(NEW)
    create(on, *given)
    before = set(given)
    answers = delete(on, *wanted)
    assert answers == [(0, sorted(each for each in before if naive(filter, each))) for filter in wanted]
    assert set(known(on)) == {each for each in before if not any(naive(filter, each) for filter in wanted)}


@given(st.lists(some_acls, max_size=20), filters)
def test_a_description_shows_exactly_what_matches(given: list[Acl], wanted: AclFilter) -> None:
    response = acls.describe_acls(set(given), DescribeAclsRequest(**as_asked(wanted)))
    shown = [
        Acl(
            resource.resource_type,
            resource.resource_name,
            resource.pattern_type,
            each.principal,
            each.host,
            each.operation,
            each.permission_type,
        )
        for resource in response.resources
        for each in resource.acls
    ]
    assert shown == sorted(each for each in set(given) if naive(wanted, each))
    patterns = [(each.resource_type, each.resource_name, each.pattern_type) for each in response.resources]
    assert len(set(patterns)) == len(patterns)


def test_other_acls_of_a_resource_stay_when_one_is_removed(on: Ensemble) -> None:
    """CVE-2024-27309: with one ACL of a resource removed, Kafka's migration forgot the others."""
    kept = [acl("a", principal="User:b", permission=DENY), acl("a", operation=WRITE)]
    create(on, acl("a"), *kept)
    assert delete(on, asked(resource_name="a", principal="User:alice", operation=int(READ))) == [
        (0, [acl("a")])
    ]
    assert known(on) == sorted(kept)
    on.fail_over()
    assert known(on) == sorted(kept)


def test_overlapping_filters_each_say_what_they_matched_and_it_is_removed_once(on: Ensemble) -> None:
    create(on, acl("a"), acl("b"))
    assert delete(on, asked(resource_name="a"), asked()) == [(0, [acl("a")]), (0, [acl("a"), acl("b")])]
    assert len([each for each in on.log if isinstance(each, RemoveAccessControlEntryRecord)]) == 2
    assert known(on) == []
    assert delete(on, asked()) == [(0, [])]


@pytest.mark.parametrize("field", ["resource_type", "pattern_type", "operation", "permission_type"])
@pytest.mark.parametrize("number", [0, 99, -1])
def test_a_filter_with_unknown_numbers_is_refused_and_the_others_work(
    on: Ensemble, field: str, number: int
) -> None:
    create(on, acl("a"))
    invalid = asked(**{field: number})
    assert (
        acls.describe_acls([], DescribeAclsRequest(**as_asked(invalid))).error_code
        == ErrorCode.INVALID_REQUEST
    )
    assert delete(on, invalid) == [(ErrorCode.INVALID_REQUEST, [])]
    assert delete(on, invalid, asked()) == [(ErrorCode.INVALID_REQUEST, []), (0, [acl("a")])]


def test_a_request_cannot_keep_the_controller_busy_for_long(
    on: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acls, "COMPARISONS_MAX", 10)
    create(on, acl("a"), acl("b"), acl("c"))
    assert delete(on, *[asked()] * 4) == [(ErrorCode.INVALID_REQUEST, [])] * 4
    assert len(known(on)) == 3
    assert [len(found) for _, found in delete(on, *[asked()] * 3)] == [3, 3, 3]
