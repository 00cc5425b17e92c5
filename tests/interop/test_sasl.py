"""A broker with SASL over TLS, and librdkafka and Java's client with every mechanism."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    ResourceType,
    ScramMechanism,
    UserScramCredentialDeletion,
)

from tests import java
from tests.cluster.wire import NoAnswer, Wire
from tests.interop.adapters.program import ProgramClient
from tests.interop.client import PATIENCE_S, Outgoing
from tests.interop.secured import put_user
from tests.interop.test_java import program
from tests.interop.test_tls import HELLO, address, closes
from tests.sasl.issuer import AUDIENCE, NAME, Issuer
from tests.support import BrokerProcess, wait_until
from tests.tls.files import TlsFiles

PASSWORD = "in wonderland"
COUNT = 20
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN", "OAUTHBEARER")
LOGIN_MODULE = "org.apache.kafka.common.security"
MODULES = {
    "SCRAM-SHA-512": f'{LOGIN_MODULE}.scram.ScramLoginModule required username="alice" password="{PASSWORD}";',
    "PLAIN": f'{LOGIN_MODULE}.plain.PlainLoginModule required username="alice" password="{PASSWORD}";',
    "OAUTHBEARER": f"{LOGIN_MODULE}.oauthbearer.OAuthBearerLoginModule required;",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("sasl"))


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def secured(files: TlsFiles, issuer: Issuer) -> Iterator[BrokerProcess]:
    settings = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
        **files.settings("none"),
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "connections.max.reauth.ms": "3000",
        "sasl.oauthbearer.jwks.endpoint.url": issuer.write(files.directory),
        "sasl.oauthbearer.expected.issuer": NAME,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "group.initial.rebalance.delay.ms": "0",
    }
    with BrokerProcess(settings) as broker:
        put(broker, "alice")
        yield broker


def put(broker: BrokerProcess, user: str, password: str = PASSWORD) -> None:
    """A user with both kinds of SCRAM."""
    put_user(AdminClient({"bootstrap.servers": address(broker, "PLAINTEXT")}), user, password)


def client_settings(
    broker: BrokerProcess,
    files: TlsFiles,
    mechanism: str,
    *,
    user: str = "alice",
    password: str = PASSWORD,
    listener: str = "SASL_SSL",
) -> dict[str, str]:
    found = {
        "bootstrap.servers": address(broker, listener),
        "security.protocol": listener.lower(),
        "sasl.mechanisms": mechanism,
    }
    if listener == "SASL_SSL":
        found["ssl.ca.location"] = str(files.authorities)
    if mechanism != "OAUTHBEARER":
        found |= {"sasl.username": user, "sasl.password": password}
    return found


@pytest.mark.parametrize(
    ("listener", "mechanism"),
    [*(("SASL_SSL", mechanism) for mechanism in MECHANISMS), ("SASL_PLAINTEXT", "SCRAM-SHA-256")],
)
def test_librdkafka_produces_and_consumes(
    secured: BrokerProcess, files: TlsFiles, issuer: Issuer, listener: str, mechanism: str
) -> None:
    settings: dict[str, object] = {**client_settings(secured, files, mechanism, listener=listener)}
    if mechanism == "OAUTHBEARER":
        settings["oauth_cb"] = lambda _: (issuer.token(time.time()), time.time() + 60)
    topic = f"{listener}-{mechanism}"
    errors: list[KafkaError | None] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        errors.append(error)

    producer = Producer({**settings, "enable.idempotence": True})
    for number in range(COUNT):
        producer.produce(topic, bytes([number]) * 1_000, on_delivery=delivered)
    assert producer.flush(PATIENCE_S) == 0
    assert errors == [None] * COUNT
    consumer = Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        found: list[bytes | None] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < COUNT and time.monotonic() < deadline:
            found += [record.value() for record in consumer.consume(COUNT, 0.5) if record.error() is None]
        assert found == [bytes([number]) * 1_000 for number in range(COUNT)]
    finally:
        consumer.close()


def test_a_client_goes_on_beyond_its_session_and_is_out_when_its_user_is(
    secured: BrokerProcess, files: TlsFiles
) -> None:
    """Sessions have three seconds: librdkafka authenticates again on the same connection."""
    put(secured, "bob")
    lost: list[str] = []
    errors: list[KafkaError | None] = []
    producer = Producer(
        {
            **client_settings(secured, files, "SCRAM-SHA-256", user="bob"),
            "error_cb": lambda error: lost.append(str(error)),
            "log_level": 0,
        }
    )

    def step() -> None:
        producer.produce("sessions", b"x", on_delivery=lambda error, _: errors.append(error))
        producer.poll(0.05)

    began = time.monotonic()

    def is_beyond() -> bool:
        step()
        return time.monotonic() - began > 4

    wait_until(is_beyond, PATIENCE_S, "the first session is over")
    assert producer.flush(PATIENCE_S) == 0
    assert set(errors) == {None} and lost == []
    assert "the session has ended" not in secured.log_tail()

    admin = AdminClient({"bootstrap.servers": address(secured, "PLAINTEXT")})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        removal = UserScramCredentialDeletion("bob", mechanism)
        admin.alter_user_scram_credentials([removal])["bob"].result(PATIENCE_S)

    def is_refused() -> bool:
        step()
        return any("invalid credentials" in line for line in lost)

    wait_until(is_refused, PATIENCE_S, "librdkafka says that it is not let in again")
    producer.purge()
    assert "the credential of its user was removed or changed" in secured.log_tail()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_librdkafka_with_a_wrong_password_is_told_so(
    secured: BrokerProcess, files: TlsFiles, mechanism: str
) -> None:
    errors: list[str] = []
    producer = Producer(
        {
            **client_settings(secured, files, mechanism, password="wrong-secret"),
            "error_cb": lambda error: errors.append(str(error)),
            "log_level": 0,
        }
    )
    wait_until(lambda: producer.poll(0.05) or errors, PATIENCE_S, "librdkafka reports an error")
    assert "Authentication failed: invalid credentials" in errors[0]
    wait_until(lambda: f"{mechanism}: invalid credentials" in secured.log_tail(), PATIENCE_S, "it is logged")
    assert "wrong-secret" not in secured.log_path.read_text()


def test_librdkafka_with_a_token_of_somebody_else_is_told_so(secured: BrokerProcess, files: TlsFiles) -> None:
    # It bears the name of the issuer, but is not signed with its key.
    other = Issuer()
    errors: list[str] = []
    producer = Producer(
        {
            **client_settings(secured, files, "OAUTHBEARER"),
            "oauth_cb": lambda _: (other.token(time.time()), time.time() + 60),
            "error_cb": lambda error: errors.append(str(error)),
            "log_level": 0,
        }
    )
    wait_until(lambda: producer.poll(0.05) or errors, PATIENCE_S, "librdkafka reports an error")
    assert "Authentication failed: the signature of the token is wrong" in errors[0]


@pytest.mark.parametrize(
    "mechanism",
    [pytest.param(name, marks=pytest.mark.interop_long) if name == "PLAIN" else name for name in MODULES],
)
def test_java_produces_and_consumes(
    secured: BrokerProcess, files: TlsFiles, issuer: Issuer, mechanism: str
) -> None:
    lines = [
        "security.protocol=SASL_SSL",
        "ssl.truststore.type=PEM",
        f"ssl.truststore.location={files.authorities}",
        f"sasl.mechanism={mechanism}",
        f"sasl.jaas.config={MODULES[mechanism]}",
    ]
    options = []
    if mechanism == "OAUTHBEARER":
        token = files.directory / "token"
        token.write_text(issuer.token(time.time()))
        options.append(f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={token.as_uri()}")
        handler = f"{LOGIN_MODULE}.oauthbearer.OAuthBearerLoginCallbackHandler"
        lines += [
            f"sasl.login.callback.handler.class={handler}",
            f"sasl.oauthbearer.token.endpoint.url={token.as_uri()}",
            f"sasl.oauthbearer.jwt.retriever.class={LOGIN_MODULE}.oauthbearer.FileJwtRetriever",
            # The default needs jose4j, which brokers have.
            f"sasl.oauthbearer.jwt.validator.class={LOGIN_MODULE}.oauthbearer.ClientJwtValidator",
        ]
    properties: Path = files.directory / f"{mechanism}.properties"
    properties.write_text("\n".join(lines))
    command = program(java.CLIENTS_VERSIONS[0], f"-Dsettings={properties}", *options)
    client = ProgramClient(command, address(secured, "SASL_SSL"))
    topic = f"java-{mechanism}"
    try:
        client.create_topic(topic)
        records = [Outgoing(value=bytes([number]) * 1_000, partition=0) for number in range(COUNT)]
        client.produce(topic, records, idempotent=True)
        found = client.consume(topic, {0: 0}, len(records))
        assert [record.value for record in found] == [record.value for record in records]
    finally:
        client.close()


def test_peers_at_the_wrong_port_are_closed_and_others_go_on(secured: BrokerProcess, files: TlsFiles) -> None:
    context = files.authority.client()
    with Wire(secured.addresses["SASL_SSL"], context=context) as secure:
        kafka = b"\0\0\0\x0e\0\x12\0\0\0\0\0\x01\0\x04test"
        for data in (kafka, b"GET / HTTP/1.1\r\n\r\n", bytes(64)):
            closes(secured, "SASL_SSL", data)
        with pytest.raises((OSError, NoAnswer)):
            Wire(secured.addresses["SASL_PLAINTEXT"], context=context)
        # A Produce, and more than a request may have before authentication.
        for data in (b"\0\0\0\x0e\0\0\0\x09\0\0\0\x01\0\x04test", b"\0\x09\0\0"):
            closes(secured, "SASL_PLAINTEXT", data)
        assert not secure.call(HELLO, 3).error_code


def test_settings_are_shown(secured: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": address(secured, "PLAINTEXT")})
    (future,) = admin.describe_configs([ConfigResource(ResourceType.BROKER, "1")]).values()
    entries = future.result(PATIENCE_S)
    assert entries["sasl.enabled.mechanisms"].value == ",".join(MECHANISMS)
    assert entries["listener.name.sasl_plaintext.sasl.enabled.mechanisms"].value == "SCRAM-SHA-256"
    assert entries["connections.max.reauth.ms"].value == "3000"
