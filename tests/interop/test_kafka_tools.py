"""Kafka's own kafka-acls and kafka-configs against a broker with an authorizer.

The tools log in as the administrator, with a password over TLS; what they say they did is checked with librdkafka.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from tests import java
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import PATIENCE_S, ClientError
from tests.interop.records_contract import numbered
from tests.interop.secured import ADMINISTRATOR, SASL_SSL, SecuredBroker, put_user, secured_broker
from tests.support import wait_until

pytestmark = pytest.mark.interop_long

ACLS, CONFIGS = "org.apache.kafka.tools.AclCommand", "kafka.admin.ConfigCommand"
NO_RIGHTS = "ClusterAuthorizationException"

Unique = Callable[[str], str]
Acl = tuple[str, str, str, str, str, str]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(broker: SecuredBroker) -> ConfluentClient:
    return broker.client(ADMINISTRATOR)


@pytest.fixture
def user(admin: ConfluentClient, unique: Unique) -> str:
    name = unique("user")
    put_user(admin.admin, name)
    return name


def tool(broker: SecuredBroker, main: str, *words: str, user: str = ADMINISTRATOR) -> str:
    settings = str(broker.properties(user))
    return java.kafka_tool(
        main, "--bootstrap-server", broker.address(SASL_SSL), "--command-config", settings, *words
    )


def acls_of(admin: ConfluentClient, user: str) -> set[Acl]:
    """Resource, name, pattern, host, operation and permission of all ACLs for a user, as librdkafka sees them."""
    anything: Any = None
    wanted = AclBindingFilter(
        ResourceType.ANY,
        anything,
        ResourcePatternType.ANY,
        f"User:{user}",
        anything,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    found: Any = admin.admin.describe_acls(wanted).result(PATIENCE_S)
    return {
        (
            each.restype.name,
            each.name,
            each.resource_pattern_type.name,
            each.host,
            each.operation.name,
            each.permission_type.name,
        )
        for each in found
    }


def may(action: Callable[[], object]) -> bool:
    """Whether a client may do this. Any other failure than for want of a right fails the test."""
    try:
        action()
    except ClientError as error:
        assert "AUTHORIZATION_FAILED" in error.name, error
        return False
    return True


def test_acls_of_kafkas_tool_decide_what_a_client_may_do(
    broker: SecuredBroker, admin: ConfluentClient, user: str, unique: Unique
) -> None:
    prefix = unique("orders")
    topic, principal = f"{prefix}-new", f"User:{user}"
    admin.create_topic(topic)
    client = broker.client(user)

    def writes() -> bool:
        return may(lambda: client.produce(topic, numbered(1, 20)))

    groups = (f"{prefix}-{number}" for number in itertools.count())

    def reads() -> bool:
        """From the beginning, in a group of its own, with a commit."""
        return may(lambda: client.resume(next(groups), topic, 20))

    assert not writes() and not reads()

    prefixed = ("--topic", prefix, "--resource-pattern-type", "prefixed")
    producer = ("--allow-principal", principal, "--producer", *prefixed)
    tool(broker, ACLS, "--add", *producer)
    wait_until(writes, PATIENCE_S, "the producer may write")
    assert not reads()

    consumer = ("--allow-principal", principal, "--consumer", *prefixed, "--group", prefix)
    tool(broker, ACLS, "--add", *consumer)
    wait_until(reads, PATIENCE_S, "the consumer may read and commit")

    denied = ("--deny-principal", principal, "--operation", "Read", "--topic", topic)
    tool(broker, ACLS, "--add", *denied)
    wait_until(lambda: not reads(), PATIENCE_S, "what is denied wins")
    assert writes()

    tool(broker, ACLS, "--remove", "--force", *denied)
    wait_until(reads, PATIENCE_S, "the consumer may read again")
    tool(broker, ACLS, "--remove", "--force", *producer)
    wait_until(lambda: not writes(), PATIENCE_S, "the producer may write no more")
    tool(broker, ACLS, "--remove", "--force", *consumer)
    wait_until(lambda: not reads(), PATIENCE_S, "the consumer may read no more")
    assert acls_of(admin, user) == set()


def test_kafkas_tool_adds_lists_and_removes_acls_of_every_resource(
    broker: SecuredBroker, admin: ConfluentClient, user: str, unique: Unique
) -> None:
    topic, group, transactions = unique("topic"), unique("group"), unique("transactions")
    allow = ("--add", "--allow-principal", f"User:{user}")
    tool(broker, ACLS, *allow, "--producer", "--topic", topic, "--transactional-id", transactions)
    tool(broker, ACLS, *allow, "--operation", "Read", "--group", group, "--allow-host", "192.0.2.7")
    tool(broker, ACLS, *allow, "--operation", "IdempotentWrite", "--cluster")
    tool(broker, ACLS, "--add", "--deny-principal", f"User:{user}", "--operation", "All", "--topic", "*")
    on_topic: set[Acl] = {
        ("TOPIC", topic, "LITERAL", "*", "WRITE", "ALLOW"),
        ("TOPIC", topic, "LITERAL", "*", "DESCRIBE", "ALLOW"),
        ("TOPIC", topic, "LITERAL", "*", "CREATE", "ALLOW"),
    }
    others: set[Acl] = {
        ("TRANSACTIONAL_ID", transactions, "LITERAL", "*", "WRITE", "ALLOW"),
        ("TRANSACTIONAL_ID", transactions, "LITERAL", "*", "DESCRIBE", "ALLOW"),
        ("GROUP", group, "LITERAL", "192.0.2.7", "READ", "ALLOW"),
        ("BROKER", "kafka-cluster", "LITERAL", "*", "IDEMPOTENT_WRITE", "ALLOW"),
        ("TOPIC", "*", "LITERAL", "*", "ALL", "DENY"),
    }
    wait_until(lambda: acls_of(admin, user) == on_topic | others, PATIENCE_S, "all ACLs are there")

    listed = tool(broker, ACLS, "--list", "--principal", f"User:{user}")
    for name in (topic, group, transactions, "kafka-cluster", "*"):
        assert f"name={name}, patternType=LITERAL" in listed
    assert listed.count(f"(principal=User:{user}, ") == len(on_topic | others)
    assert listed.count("permissionType=DENY") == 1
    # Everything that decides about the topic, and nothing else.
    matching = tool(broker, ACLS, "--list", "--topic", topic, "--resource-pattern-type", "match")
    assert matching.count(f"(principal=User:{user}, ") == len(on_topic) + 1

    tool(broker, ACLS, "--remove", "--force", "--topic", topic)
    wait_until(lambda: acls_of(admin, user) == others, PATIENCE_S, "those of the topic are gone")
    for resource in (("--cluster",), ("--group", group), ("--transactional-id", transactions)):
        tool(broker, ACLS, "--remove", "--force", *resource)
    tool(broker, ACLS, "--remove", "--force", "--topic", "*")
    wait_until(lambda: not acls_of(admin, user), PATIENCE_S, "all are gone")
    assert f"User:{user}" not in tool(broker, ACLS, "--list")


def test_kafkas_tools_are_refused_to_users_without_rights(
    broker: SecuredBroker, admin: ConfluentClient, user: str
) -> None:
    allow = ("--allow-principal", f"User:{user}", "--operation", "All", "--topic", "*")
    entity = ("--entity-type", "users", "--entity-name", user)
    attempts = (
        (ACLS, "--list"),
        (ACLS, "--add", *allow),
        (ACLS, "--remove", "--force", *allow),
        (CONFIGS, "--describe", *entity),
        (CONFIGS, "--alter", "--add-config", "producer_byte_rate=1048576", *entity),
        (CONFIGS, "--alter", "--add-config", "SCRAM-SHA-512=[password=another-one]", *entity),
    )
    for words in attempts:
        assert NO_RIGHTS in tool(broker, *words, user=user), words
    assert acls_of(admin, user) == set()
    # Still with the old password.
    assert broker.client(user).describe_cluster().cluster_id


def test_kafkas_tool_is_told_that_its_password_is_wrong(broker: SecuredBroker, unique: Unique) -> None:
    told = tool(broker, ACLS, "--list", user=unique("nobody"))
    assert "SaslAuthenticationException: Authentication failed: invalid credentials" in told


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_users_of_kafkas_tool_log_in_until_it_removes_them(
    broker: SecuredBroker, admin: ConfluentClient, unique: Unique, mechanism: str
) -> None:
    user, password = unique("user"), "chosen by the tool"
    entity = ("--entity-type", "users", "--entity-name", user)
    added = f"{mechanism}=[iterations=5000,password={password}]"
    assert f"Completed updating config for user {user}." in tool(
        broker, CONFIGS, "--alter", "--add-config", added, *entity
    )
    security = broker.with_password(user, mechanism, password)
    client = ConfluentClient(broker.address(SASL_SSL), security)
    assert client.describe_cluster().cluster_id
    assert f"'{user}' are {mechanism}=iterations=5000" in tool(broker, CONFIGS, "--describe", *entity)

    tool(broker, CONFIGS, "--alter", "--delete-config", mechanism, *entity)
    assert user not in tool(broker, CONFIGS, "--describe", "--entity-type", "users")
    # Its annotations are narrower than what it returns.
    known: Any = admin.admin.describe_user_scram_credentials()
    assert user not in known.result(PATIENCE_S)


USER, CLIENT_ID = "erin", "reports"
BYTES = {"producer_byte_rate": 1048576.0, "consumer_byte_rate": 2097152.0, "request_percentage": 80.0}
CONNECTIONS = {"connection_creation_rate": 1000.0}


@pytest.mark.parametrize(
    ("entity", "shown", "quotas"),
    [
        (("users", USER), f"user-principal '{USER}'", BYTES),
        (("users", None), "the default user-principal", BYTES),
        (("clients", CLIENT_ID), f"client-id '{CLIENT_ID}'", BYTES),
        (("clients", None), "the default client-id", BYTES),
        (
            ("users", USER, "clients", CLIENT_ID),
            f"user-principal '{USER}', client-id '{CLIENT_ID}'",
            BYTES,
        ),
        (("users", USER, "clients", None), f"user-principal '{USER}', the default client-id", BYTES),
        (("ips", "192.0.2.7"), "ip '192.0.2.7'", CONNECTIONS),
        (("ips", None), "the default ip", CONNECTIONS),
    ],
    ids=lambda value: value.replace("'", "") if isinstance(value, str) else "",
)
def test_quotas_of_kafkas_tool_are_set_described_and_deleted(
    broker: SecuredBroker, entity: tuple[str | None, ...], shown: str, quotas: dict[str, float]
) -> None:
    kinds, names = entity[::2], entity[1::2]
    types = [word for kind in kinds for word in ("--entity-type", str(kind))]
    words = list(types)
    for name in names:
        words += ["--entity-default"] if name is None else ["--entity-name", name]

    def described() -> dict[str, float]:
        lines = tool(broker, CONFIGS, "--describe", *types).splitlines()
        start = f"Quota configs for {shown} are "
        found = [line.removeprefix(start) for line in lines if line.startswith(start)]
        pairs = [pair.split("=") for line in found for pair in line.split(", ")]
        return {name: float(value) for name, value in pairs}

    wanted = ",".join(f"{name}={value:.0f}" for name, value in quotas.items())
    tool(broker, CONFIGS, "--alter", "--add-config", wanted, *words)
    assert described() == quotas
    first, *rest = quotas
    tool(broker, CONFIGS, "--alter", "--delete-config", first, *words)
    assert described() == {name: quotas[name] for name in rest}
    if rest:
        tool(broker, CONFIGS, "--alter", "--delete-config", ",".join(rest), *words)
        assert described() == {}
