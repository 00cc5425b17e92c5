"""Users and ACLs over a connection to a broker in virtual time: what is answered, and what a restart keeps."""

from __future__ import annotations

import pytest

from penstock.broker.handlers.routes import HANDLERS
from penstock.broker.network.authorization import Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    AclCreation,
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteAclsFilter,
    DeleteAclsRequest,
    DescribeAclsRequest,
    DescribeUserScramCredentialsRequest,
    ScramCredentialUpsertion,
)
from tests.virtual import World

ANY, TOPIC, READ, ALLOW = 1, 2, 3, 3
UPSERTION = ScramCredentialUpsertion(
    name="alice", mechanism=1, iterations=4096, salt=b"salt", salted_password=b"s" * 32
)
ACL = AclCreation(
    resource_type=TOPIC,
    resource_name="orders",
    principal="User:alice",
    host="*",
    operation=READ,
    permission_type=ALLOW,
)


def test_a_user_is_there_as_soon_as_the_answer_is_and_after_a_restart() -> None:
    world = World()
    client = world.client()
    answer = client.call(AlterUserScramCredentialsRequest(upsertions=[UPSERTION]), 0)
    assert [(each.user, each.error_code) for each in answer.results] == [("alice", ErrorCode.NONE)]
    for asked in (world, world.restarted(clean=False)):
        described = asked.client().call(DescribeUserScramCredentialsRequest(users=None), 0)
        (user,) = described.results
        assert user.user == "alice"
        assert [(each.mechanism, each.iterations) for each in user.credential_infos] == [(1, 4096)]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_acls_can_be_created_described_and_deleted_where_there_is_an_authorizer(version: int) -> None:
    world = World({"authorizer.class.name": "acls", "super.users": "User:ANONYMOUS"})
    client = world.client()
    refused = AclCreation(resource_type=TOPIC, principal="alice")
    created = client.call(CreateAclsRequest(creations=[ACL, refused]), version)
    assert [each.error_code for each in created.results] == [ErrorCode.NONE, ErrorCode.INVALID_REQUEST]
    described = client.call(
        DescribeAclsRequest(
            resource_type_filter=ANY,
            resource_name_filter=None,
            pattern_type_filter=ANY,
            principal_filter=None,
            host_filter=None,
            operation=ANY,
            permission_type=ANY,
        ),
        version,
    )
    (resource,) = described.resources
    assert (resource.resource_type, resource.resource_name) == (TOPIC, "orders")
    assert [(each.principal, each.operation) for each in resource.acls] == [("User:alice", READ)]
    wanted = DeleteAclsFilter(
        resource_type_filter=TOPIC,
        resource_name_filter="orders-2",
        pattern_type_filter=ANY,
        principal_filter=None,
        host_filter=None,
        operation=ANY,
        permission_type=ANY,
    )
    assert client.call(DeleteAclsRequest(filters=[wanted]), version).filter_results[0].matching_acls == []
    wanted.resource_name_filter = "orders"
    (result,) = client.call(DeleteAclsRequest(filters=[wanted]), version).filter_results
    assert [each.resource_name for each in result.matching_acls] == ["orders"]
    assert world.broker.image.security.acls == {}


def test_changing_them_needs_the_right_to_alter_the_cluster_and_seeing_them_to_describe_it() -> None:
    rights = {
        key: [(right.operation, right.resource) for right in HANDLERS[key].rights]
        for key in (29, 30, 31, 50, 51)
    }
    alter = [(Operation.ALTER, ResourceType.CLUSTER)]
    describe = [(Operation.DESCRIBE, ResourceType.CLUSTER)]
    assert rights == {29: describe, 30: alter, 31: alter, 50: describe, 51: alter}
