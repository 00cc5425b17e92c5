"""Clients that log in to a broker process: commands, our own client, and libraries of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.wire import AuthenticationFailed, Client
from tests.cli.conftest import Outcome, Penstock
from tests.conftest import BROKER_SETTINGS
from tests.sasl.broker import PASSWORD, USER, SaslBroker, sasl_broker

WAYS = [
    ("SASL_PLAINTEXT", "SCRAM-SHA-256"),
    ("SASL_PLAINTEXT", "SCRAM-SHA-512"),
    ("SASL_SSL", "SCRAM-SHA-512"),
    ("SASL_SSL", "PLAIN"),
]


@pytest.fixture(scope="module")
def sasl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    with sasl_broker(tmp_path_factory.mktemp("sasl"), BROKER_SETTINGS) as running:
        yield running


def config(path: Path, sasl: SaslBroker, listener: str, mechanism: str, **changed: str) -> str:
    values = {
        "bootstrap.servers": sasl.address(listener),
        **sasl.librdkafka(listener, mechanism, **changed),
    }
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return str(path)


def failed(outcome: Outcome) -> str:
    """Its one line."""
    assert outcome.code == 1 and outcome.err.count("\n") == 1, outcome
    assert "hunter" not in outcome.err + outcome.out
    return outcome.err


@pytest.mark.parametrize(("listener", "mechanism"), WAYS)
def test_our_client_logs_in(
    sasl: SaslBroker, listener: str, mechanism: str, unique: Callable[[str], str]
) -> None:
    topic = unique("topic")
    with Client(sasl.address(listener), security=sasl.librdkafka(listener, mechanism)) as client:
        client.create_topic(topic, 1)
        assert set(client.topics([topic])) == {topic}


def test_our_client_logs_in_with_a_token(sasl: SaslBroker) -> None:
    address = sasl.address("SASL_SSL")
    security = {**sasl.files.librdkafka(), "security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER"}
    with Client(address, security=security, token=lambda: sasl.issuer.token(time.time())) as client:
        assert isinstance(client.topics(), dict)
    late = sasl.issuer.token(time.time() - 3600)
    refused = "the broker did not accept the token with OAUTHBEARER: "
    with (
        Client(address, security=security, token=lambda: late) as client,
        pytest.raises(AuthenticationFailed, match=refused) as caught,
    ):
        client.topics()
    assert late not in str(caught.value)


@pytest.mark.parametrize(("listener", "mechanism"), [WAYS[0], WAYS[3]])
def test_commands_log_in(
    penstock: Penstock,
    sasl: SaslBroker,
    tmp_path: Path,
    listener: str,
    mechanism: str,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP", raising=False)
    file, topic = config(tmp_path / "client.properties", sasl, listener, mechanism), unique("topic")
    # librdkafka, penstock.wire and RawClient.
    for words in (
        ["topics", "create", topic, "--command-config", file],
        ["transactions", "list", "--config", file],
        ["quorum", "show", "--config", file],
    ):
        outcome = penstock(*words)
        assert outcome.code == 0, outcome
    assert penstock("produce", topic, "--config", file, stdin=b"one\n").code == 0
    assert penstock("consume", topic, "--no-follow", "--from", "beginning", "--config", file).out == "one\n"


def test_wrong_logins_are_one_line(
    penstock: Penstock, sasl: SaslBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP", raising=False)
    file = tmp_path / "client.properties"
    refused = f"the broker did not accept user {USER} with SCRAM-SHA-256: "
    for user, password in ((USER, "hunter3"), ("nobody", PASSWORD)):
        wrong = config(
            file, sasl, "SASL_PLAINTEXT", "SCRAM-SHA-256", sasl_username=user, sasl_password=password
        )
        for words in (["topics", "list"], ["transactions", "list"], ["quorum", "show"]):
            assert refused.replace(USER, user) in failed(penstock(*words, "--config", wrong))
    other = config(file, sasl, "SASL_SSL", "SCRAM-SHA-256")
    line = failed(penstock("topics", "list", "--config", other))
    assert "does not offer SCRAM-SHA-256 there; set sasl.mechanism to one of: " in line
    assert "PLAIN" in line and "SCRAM-SHA-512" in line


def test_commands_without_a_user_are_told_what_the_listener_wants(
    penstock: Penstock, sasl: SaslBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.client.CONNECT_TIMEOUT_S", 1.0)
    line = failed(penstock("topics", "list", "--bootstrap", sasl.address()))
    assert "wants a user and password (it offers " in line and "SCRAM-SHA-256" in line
    line = failed(penstock("quorum", "show", "--bootstrap", sasl.address()))
    assert "does it want a user and password (sasl.* in a file for --config)?" in line


def test_login_on_a_listener_without_sasl_is_refused(
    bootstrap: str, penstock: Penstock, sasl: SaslBroker, tmp_path: Path
) -> None:
    file = config(tmp_path / "client.properties", sasl, "SASL_PLAINTEXT", "SCRAM-SHA-256")
    line = failed(penstock("topics", "list", "--config", file, "--bootstrap", bootstrap))
    assert "the broker has no SASL there; use security.protocol=plaintext" in line
    security = sasl.librdkafka()
    with Client(bootstrap, security=security) as client, pytest.raises(AuthenticationFailed, match="no SASL"):
        client.topics()


def test_kafka_python_logs_in(sasl: SaslBroker) -> None:
    from kafka import KafkaAdminClient

    # It does not escape names in SCRAM, so it is PLAIN that it can log in with here.
    admin = KafkaAdminClient(
        bootstrap_servers=sasl.address("SASL_SSL"),
        security_protocol="SASL_SSL",
        ssl_cafile=str(sasl.files.authorities),
        sasl_mechanism="PLAIN",
        sasl_plain_username=USER,
        sasl_plain_password=PASSWORD,
    )
    try:
        assert isinstance(admin.list_topics(), list)
    finally:
        admin.close()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    """With ACLs; the user of ``config`` may do everything."""
    settings = {**BROKER_SETTINGS, "authorizer.class.name": "acls", "super.users": f"User:{USER}"}
    with sasl_broker(tmp_path_factory.mktemp("acls"), settings) as running:
        yield running


def restricted(penstock: Penstock, broker: SaslBroker, directory: Path, user: str, *rights: str) -> str:
    """The file of a new user who has these rights on the topic `orders`."""
    admin = config(directory / "admin", broker, *WAYS[1])
    for words in (
        ("users", "add", user, "--password-stdin"),
        ("acls", "add", "--principal", user, "--topic", "orders", *rights),
        ("topics", "create", "orders", "--if-not-exists"),
    ):
        done = penstock(*words, "--command-config", admin, stdin=b"of Camelot\n")
        assert done.code == 0, done
    return config(directory / user, broker, *WAYS[1], sasl_username=user, sasl_password="of Camelot")


def test_the_rights_of_a_producer_are_enough_to_produce(
    penstock: Penstock, strict: SaslBroker, tmp_path: Path
) -> None:
    """They do not include the right to read the settings of the topic."""
    bob = restricted(penstock, strict, tmp_path, "bob", "--producer")
    done = penstock("produce", "orders", "--config", bob, "--value", "hello")
    assert done.code == 0, done
    too_large = penstock("produce", "orders", "--config", bob, stdin=b"x" * 2_000_000)
    assert "line 1 is too large: 2000000 bytes, and orders takes smaller batches" in failed(too_large)


def test_the_right_to_read_a_topic_is_enough_to_consume_it_without_a_group(
    penstock: Penstock, strict: SaslBroker, tmp_path: Path
) -> None:
    carol = restricted(penstock, strict, tmp_path, "carol", "--operation", "read", "--operation", "write")
    assert penstock("produce", "orders", "--config", carol, "--value", "hello").code == 0
    done = penstock("consume", "orders", "--no-follow", "--config", carol)
    assert done.code == 0 and "hello" in done.out, done
    refused = penstock("consume", "orders", "--config", carol, "--group", "billing")
    assert "Group authorization failed" in failed(refused)
