"""Users and ACLs, as librdkafka's admin client and Kafka's own tools manage them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from tests import java
from tests.interop.client import PATIENCE_S

Unique = Callable[[str], str]


@pytest.fixture(scope="module")
def admin(bootstrap: str) -> Any:
    # Its annotations are narrower than what it takes and returns.
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def code(error: BaseException | None) -> int:
    assert isinstance(error, KafkaException)
    found: int = error.args[0].code()
    return found


def test_librdkafka_adds_describes_and_removes_users(admin: Any, unique: Unique) -> None:
    user, other = unique("user"), unique("user")
    mechanism = ScramMechanism.SCRAM_SHA_256
    added = [
        UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), b"password"),
        UserScramCredentialUpsertion(other, ScramCredentialInfo(mechanism, 1), b"password"),
    ]
    results = admin.alter_user_scram_credentials(added)
    assert results[user].result(PATIENCE_S) is None
    assert code(results[other].exception(PATIENCE_S)) == KafkaError.UNACCEPTABLE_CREDENTIAL

    described = admin.describe_user_scram_credentials([user, other])
    infos = described[user].result(PATIENCE_S).scram_credential_infos
    assert [(each.mechanism, each.iterations) for each in infos] == [(mechanism, 4096)]
    assert code(described[other].exception(PATIENCE_S)) == KafkaError.RESOURCE_NOT_FOUND
    assert user in admin.describe_user_scram_credentials().result(PATIENCE_S)

    removal = [UserScramCredentialDeletion(user, mechanism)]
    assert admin.alter_user_scram_credentials(removal)[user].result(PATIENCE_S) is None
    again = admin.alter_user_scram_credentials(removal)[user].exception(PATIENCE_S)
    assert code(again) == KafkaError.RESOURCE_NOT_FOUND


def test_librdkafka_is_told_that_there_are_no_acls_without_an_authorizer(admin: Any) -> None:
    acl = AclBinding(
        ResourceType.TOPIC,
        "orders",
        ResourcePatternType.LITERAL,
        "User:alice",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    anything: Any = None
    everything = AclBindingFilter(
        ResourceType.ANY,
        anything,
        ResourcePatternType.ANY,
        anything,
        anything,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    # It does not pass on the error of a description.
    asked = [admin.create_acls([acl])[acl], admin.delete_acls([everything])[everything]]
    assert [code(each.exception(PATIENCE_S)) for each in asked] == [KafkaError.SECURITY_DISABLED] * 2


@pytest.mark.interop_long
def test_kafkas_tools_change_users_and_are_told_that_there_are_no_acls(
    admin: Any, bootstrap: str, unique: Unique
) -> None:
    user = unique("user")
    server = ("--bootstrap-server", bootstrap)
    users = ("kafka.admin.ConfigCommand", *server, "--entity-type", "users", "--entity-name", user)
    credential = "SCRAM-SHA-512=[iterations=8192,password=a-password]"
    added = java.kafka_tool(*users, "--alter", "--add-config", credential)
    assert f"Completed updating config for user {user}." in added
    described = admin.describe_user_scram_credentials([user])[user].result(PATIENCE_S)
    assert [each.iterations for each in described.scram_credential_infos] == [8192]
    removed = java.kafka_tool(*users, "--alter", "--delete-config", "SCRAM-SHA-512")
    assert f"Completed updating config for user {user}." in removed
    assert "no authorizer" in java.kafka_tool("org.apache.kafka.tools.AclCommand", *server, "--list")
