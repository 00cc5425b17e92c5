"""`penstock acls` against a broker that decides as a real one does, with the controller's own functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.metadata.acls import describe_acls
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import CreateAclsRequest, DescribeAclsRequest, DescribeAclsResponse
from tests.cli.conftest import Outcome, Penstock
from tests.cli.fake_broker import FakeBroker
from tests.metadata.ensemble import Ensemble
from tests.metadata.test_features import NEW, cluster


class Acls:
    """The command, and the cluster it changes."""

    def __init__(self, penstock: Penstock, fake: FakeBroker, on: Ensemble) -> None:
        self.penstock = penstock
        self.fake = fake
        self.on = on

    def __call__(self, *words: str, code: int = 0) -> Outcome:
        done = self.penstock("acls", *words, "--bootstrap", self.fake.bootstrap)
        assert done.code == code, done
        if code:
            assert done.err.startswith("penstock: ") and done.err.count("\n") == 1, done.err
        return done

    @property
    def known(self) -> list[str]:
        rows = self("list", "--json").json["acls"]
        return sorted(
            f"{each['principal']} {each['permission']} {each['operation']} {each['resource']} {each['name']} "
            f"{each['pattern']} {each['host']}"
            for each in rows
        )


@pytest.fixture
def acls(penstock: Penstock) -> Iterator[Acls]:
    on = cluster(NEW)
    with FakeBroker(
        api_29=lambda request: describe_acls(on.on.image.security.acls.values(), request),
        api_30=lambda request: on.handle(request, 3),
        api_31=lambda request: on.handle(request, 3),
    ) as fake:
        yield Acls(penstock, fake, on)


def test_an_acl_is_added_listed_and_removed(acls: Acls) -> None:
    added = acls("add", "--principal", "User:alice", "--operation", "read", "--topic", "orders")
    assert added.out.splitlines()[0] == "added 1 ACL"
    assert acls("list").rows == [
        ["PRINCIPAL", "PERMISSION", "OPERATION", "RESOURCE", "NAME", "PATTERN", "HOST"],
        ["User:alice", "ALLOW", "READ", "TOPIC", "orders", "LITERAL", "*"],
    ]
    assert acls("remove", "--topic", "orders", "--json").json["removed"][0]["principal"] == "User:alice"
    assert acls.known == []


def test_everything_given_is_combined(acls: Acls) -> None:
    principals = ("--principal", "alice", "--principal", "Group:b")
    acls("add", "--deny", *principals, "--operation", "DescribeConfigs", "--topic", "*", "--host", "::1")
    acls("add", "--principal", "a", "--operation", "all", "--group", "g", "--topic", "t-", "--prefixed")
    acls("add", "--principal", "a", "--operation", "cluster-action", "--cluster")
    assert acls.known == [
        "Group:b DENY DESCRIBE_CONFIGS TOPIC * LITERAL ::1",
        "User:a ALLOW ALL GROUP g PREFIXED *",
        "User:a ALLOW ALL TOPIC t- PREFIXED *",
        "User:a ALLOW CLUSTER_ACTION CLUSTER kafka-cluster LITERAL *",
        "User:alice DENY DESCRIBE_CONFIGS TOPIC * LITERAL ::1",
    ]


def test_producers_and_consumers_get_what_they_need(acls: Acls) -> None:
    acls("add", "--principal", "p", "--producer", "--topic", "t", "--transactional-id", "x")
    acls("add", "--principal", "c", "--consumer", "--topic", "t", "--group", "g")
    assert [line.removesuffix(" LITERAL *") for line in acls.known] == [
        "User:c ALLOW DESCRIBE TOPIC t",
        "User:c ALLOW READ GROUP g",
        "User:c ALLOW READ TOPIC t",
        "User:p ALLOW CREATE TOPIC t",
        "User:p ALLOW DESCRIBE TOPIC t",
        "User:p ALLOW DESCRIBE TRANSACTIONAL_ID x",
        "User:p ALLOW WRITE TOPIC t",
        "User:p ALLOW WRITE TRANSACTIONAL_ID x",
    ]


def test_a_name_lists_all_that_decides_about_it(acls: Acls) -> None:
    for words in (("orders",), ("*",), ("ord", "--prefixed"), ("order",), ("other", "--prefixed")):
        acls("add", "--principal", "a", "--operation", "read", "--topic", *words)

    def names(*words: str) -> list[str]:
        return sorted(each["name"] for each in acls("list", "--json", *words).json["acls"])

    assert names("--topic", "orders") == ["*", "ord", "orders"]
    assert names("--topic", "ord", "--prefixed") == ["ord"]
    assert names("--topic", "orders", "--principal", "b") == []
    assert names("--principal", "a", "--allow") == ["*", "ord", "order", "orders", "other"]
    assert names("--deny") == []


def test_removing_several_needs_a_yes_and_takes_only_what_is_named(acls: Acls) -> None:
    for principal in ("a", "b"):
        acls("add", "--principal", principal, "--operation", "read", "--topic", "t")
    acls("add", "--principal", "a", "--operation", "read", "--topic", "t", "--prefixed")
    refused = acls("remove", "--topic", "t", code=1)
    assert "Remove 2 ACLs?" in refused.err and "--yes" in refused.err
    assert len(acls.known) == 3
    assert len(acls("remove", "--topic", "t", "--yes", "--json").json["removed"]) == 2
    assert acls.known == ["User:a ALLOW READ TOPIC t PREFIXED *"]
    assert "no ACL matches" in acls("remove", "--topic", "t", code=1).err
    acls("remove", "--all")
    assert acls.known == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("add --operation read --topic t", "--principal"),
        ("add --principal a --topic t", "--operation"),
        ("add --principal a --operation read", "--topic"),
        ("add --principal a --operation raed --topic t", "did you mean read?"),
        ("add --principal a --operation any --topic t", "there is no operation 'any'"),
        ("add --principal User: --operation read --topic t", "User:alice"),
        ("add --principal a --operation read --topic * --prefixed", "asterisk"),
        ("add --principal a --operation all --cluster --prefixed", "--cluster"),
        ("add --principal a --operation read --topic t --host example.com", "is not an address"),
        ("add --principal a --producer --operation read --topic t", "omit --operation"),
        ("add --principal a --producer --group g", "need --topic"),
        ("add --principal a --producer --topic t --group g", "nothing of the given group"),
        ("add --principal a --consumer --topic t", "--group"),
        ("add --deny --principal a --consumer --topic t --group g", "only allow"),
        ("remove", "--all"),
        ("remove --all --topic t", "--all does not go"),
        ("create", "penstock acls add"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_sent(acls: Acls, words: str, line: str) -> None:
    assert line in acls(*words.split(), code=2).err
    assert acls.fake.asked == []


def test_an_empty_name_is_refused(acls: Acls) -> None:
    assert "must not be empty" in acls("list", "--topic", "", code=2).err


def test_what_the_controller_refuses_is_said_in_its_words(acls: Acls) -> None:
    refused = acls("add", "--principal", "a", "--operation", "write", "--group", "g", code=1)
    assert "could not add allow write on group g to User:a: A GROUP has no operation WRITE" in refused.err
    assert isinstance(acls.fake.asked[0], CreateAclsRequest)


def test_a_broker_without_an_authorizer_says_so(penstock: Penstock) -> None:
    def disabled(request: DescribeAclsRequest) -> DescribeAclsResponse:
        return DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message="no authorizer")

    with FakeBroker(api_29=disabled) as fake:
        done = penstock("acls", "--bootstrap", fake.bootstrap)
    assert (done.code, done.err) == (1, "penstock: could not list the ACLs: no authorizer\n")
