"""What is not supported is refused by an answer that says so, with Kafka's error, never by a closed connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    ListConfigResourcesRequest,
)
from penstock.protocol.messages.placement import DescribeLogDirsRequest
from penstock.protocol.messages.security import (
    AclCreation,
    CreateAclsRequest,
    DeleteAclsFilter,
    DeleteAclsRequest,
    DescribeAclsRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)
from tests.broker.phrases import create_topic, handshake
from tests.broker.wire import Wire

Unique = Callable[[str], str]
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32


@pytest.mark.parametrize("version", [0, 1])
def test_a_sasl_handshake_is_answered_with_no_mechanisms(wire: Wire, version: int) -> None:
    response = wire.call(SaslHandshakeRequest(mechanism="PLAIN"), version)
    assert response.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert response.mechanisms == []
    assert handshake(wire) > 0


@pytest.mark.parametrize("version", [0, 1, 2])
def test_sasl_authentication_is_refused_and_says_what_to_use(wire: Wire, version: int) -> None:
    response = wire.call(SaslAuthenticateRequest(auth_bytes=b"\0user\0password"), version)
    assert response.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert "security.protocol=PLAINTEXT" in response.error_message


@pytest.mark.parametrize("version", [1, 2, 3])
def test_acls_are_refused_one_by_one(wire: Wire, version: int) -> None:
    described = wire.call(
        DescribeAclsRequest(resource_type_filter=1, operation=1, permission_type=1), version
    )
    assert described.error_code == ErrorCode.SECURITY_DISABLED and described.error_message
    acl = AclCreation(resource_type=2, resource_name="t", principal="User:a", host="*", operation=3)
    created = wire.call(CreateAclsRequest(creations=[acl, acl]), version)
    assert [result.error_code for result in created.results] == [ErrorCode.SECURITY_DISABLED] * 2
    deleted = wire.call(DeleteAclsRequest(filters=[DeleteAclsFilter(resource_type_filter=1)] * 3), version)
    assert [result.error_code for result in deleted.filter_results] == [ErrorCode.SECURITY_DISABLED] * 3
    assert all(result.error_message and not result.matching_acls for result in deleted.filter_results)


def described(wire: Wire, kind: int, name: str, *, synonyms: bool = False) -> Any:
    asked = DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
    (result,) = wire.call(DescribeConfigsRequest(resources=[asked], include_synonyms=synonyms), 4).results
    return result


@pytest.mark.parametrize(
    ("kind", "words"), [(GROUP, "classic protocol"), (METRICS, "KIP-714"), (LOGGER, "logger")]
)
def test_resources_without_settings_say_why_they_have_none(wire: Wire, kind: int, words: str) -> None:
    result = described(wire, kind, "1")
    assert result.error_code == ErrorCode.INVALID_REQUEST
    assert words in result.error_message
    asked = AlterConfigsResource(
        resource_type=kind, resource_name="1", configs=[AlterableConfig(name="a", value="1")]
    )
    (altered,) = wire.call(AlterConfigsRequest(resources=[asked]), 2).responses
    assert (altered.error_code, altered.error_message) == (result.error_code, result.error_message)


def test_settings_are_described_without_a_null_message_and_with_kafkas_synonyms(
    wire: Wire, unique: Unique
) -> None:
    topic = unique("t")
    create_topic(wire, topic, configs={"retention.ms": "86400000"})
    result = described(wire, TOPIC, topic, synonyms=True)
    assert (result.error_code, result.error_message) == (ErrorCode.NONE, "")
    synonyms = {
        config.name: [(synonym.name, synonym.value) for synonym in config.synonyms]
        for config in result.configs
    }
    # As Kafka 4.3 answered: see the recorded bytes.
    assert synonyms["retention.ms"] == [("retention.ms", "86400000")]
    assert synonyms["segment.ms"] == synonyms["segment.jitter.ms"] == synonyms["flush.ms"] == []
    assert synonyms["segment.bytes"] == [("log.segment.bytes", "1073741824")]


def test_features_are_those_that_work_and_only_those(wire: Wire) -> None:
    named = ApiVersionsRequest(client_software_name="test", client_software_version="1")
    response = wire.call(named, 4)
    supported = {each.name: (each.min_version, each.max_version) for each in response.supported_features}
    finalized = {each.name: each.max_version_level for each in response.finalized_features}
    names = {
        "metadata.version",
        "kraft.version",
        "transaction.version",
        "penstock.compaction",
        "penstock.security",
    }
    assert finalized.keys() == supported.keys() == names
    assert (supported["transaction.version"], finalized["transaction.version"]) == ((0, 2), 2)
    assert (supported["penstock.compaction"], finalized["penstock.compaction"]) == ((0, 1), 1)
    assert all(low <= finalized[name] <= high for name, (low, high) in supported.items())
    assert response.finalized_features_epoch >= 0
    older = wire.call(named, 3)
    assert [each.name for each in older.supported_features] == ["metadata.version"]


def test_the_replication_factor_that_applies_is_shown(wire: Wire) -> None:
    shown = {config.name: config for config in described(wire, BROKER, "1").configs}
    assert shown["default.replication.factor"].value == "1"
    assert shown["offsets.topic.replication.factor"].value == "1"


def test_topics_and_brokers_are_listed_as_resources_with_settings(wire: Wire, unique: Unique) -> None:
    topic = unique("t")
    create_topic(wire, topic)
    for types in ([], [TOPIC, BROKER, GROUP]):
        response = wire.call(ListConfigResourcesRequest(resource_types=types), 1)
        assert response.error_code == ErrorCode.NONE
        listed = {(each.resource_type, each.resource_name) for each in response.config_resources}
        assert {(TOPIC, topic), (BROKER, "1")} <= listed
        assert {kind for kind, _ in listed} == {TOPIC, BROKER}
    assert wire.call(ListConfigResourcesRequest(resource_types=[GROUP]), 1).config_resources == []
    assert wire.call(ListConfigResourcesRequest(), 0).config_resources == []
    unknown = wire.call(ListConfigResourcesRequest(resource_types=[99]), 1)
    assert unknown.error_code == ErrorCode.UNSUPPORTED_VERSION


def test_no_directory_is_cordoned(wire: Wire) -> None:
    (directory,) = wire.call(DescribeLogDirsRequest(topics=None), 5).results
    assert directory.error_code == ErrorCode.NONE and not directory.is_cordoned
