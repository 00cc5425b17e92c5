"""A broker with a plain listener and two with TLS, of which one requires certificates, and its clients."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from penstock.protocol.messages.cluster import ApiVersionsRequest, DescribeClusterRequest
from penstock.protocol.messages.groups import FindCoordinatorRequest
from tests import java
from tests.cluster import wire
from tests.cluster.wire import NoAnswer, Wire
from tests.interop.adapters.program import ProgramClient
from tests.interop.client import PATIENCE_S, Outgoing
from tests.interop.test_java import program
from tests.support import BrokerProcess, wait_until
from tests.tls.authority import Authority
from tests.tls.files import TlsFiles

LISTENERS = "PLAINTEXT://127.0.0.1:0,TLS://127.0.0.1:0,MUTUAL://127.0.0.1:0"
HELLO = ApiVersionsRequest(client_software_name="a", client_software_version="1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secured(files: TlsFiles) -> Iterator[BrokerProcess]:
    settings = {
        "listeners": LISTENERS,
        "listener.security.protocol.map": "TLS:SSL,MUTUAL:SSL",
        **files.settings("none"),
        "listener.name.mutual.ssl.client.auth": "required",
        "group.initial.rebalance.delay.ms": "0",
    }
    with BrokerProcess(settings) as broker:
        yield broker


def address(broker: BrokerProcess, listener: str) -> str:
    host, port = broker.addresses[listener]
    return f"{host}:{port}"


def produce_and_consume(settings: dict[str, str], topic: str, count: int = 200) -> None:
    # Of different sizes: some answers to fetches are sent in many TLS records.
    values = [bytes([number % 251]) * (number * 97 % 5_000) for number in range(count)]
    errors: list[KafkaError | None] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        errors.append(error)

    producer = Producer({**settings, "enable.idempotence": True})
    for value in values:
        producer.produce(topic, value, on_delivery=delivered)
    assert producer.flush(PATIENCE_S) == 0
    assert errors == [None] * count
    consumer = Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        found: list[bytes | None] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < deadline:
            found += [record.value() for record in consumer.consume(count, 1.0) if record.error() is None]
        assert found == values
    finally:
        consumer.close()


@pytest.mark.parametrize(("listener", "name"), [("TLS", None), ("TLS", "alice"), ("MUTUAL", "alice")])
def test_librdkafka_produces_and_consumes_over_tls(
    secured: BrokerProcess, files: TlsFiles, listener: str, name: str | None
) -> None:
    settings = {"bootstrap.servers": address(secured, listener), **files.librdkafka(name)}
    produce_and_consume(settings, f"{listener}-{name}")


def test_java_produces_and_consumes_over_tls(secured: BrokerProcess, files: TlsFiles) -> None:
    command = program(java.CLIENTS_VERSIONS[0], f"-Dsettings={files.java('alice')}")
    client = ProgramClient(command, address(secured, "MUTUAL"))
    try:
        client.create_topic("java")
        records = [
            Outgoing(value=bytes([number % 251]) * (number * 397), partition=0) for number in range(100)
        ]
        client.produce("java", records, idempotent=True)
        found = client.consume("java", {0: 0}, len(records))
        assert [record.value for record in found] == [record.value for record in records]
    finally:
        client.close()


def test_a_client_without_a_certificate_is_told_so_where_one_is_required(
    secured: BrokerProcess, files: TlsFiles
) -> None:
    errors: list[str] = []
    producer = Producer(
        {
            "bootstrap.servers": address(secured, "MUTUAL"),
            **files.librdkafka(),
            "error_cb": lambda error: errors.append(str(error)),
            "log_level": 0,
        }
    )
    wait_until(lambda: producer.poll(0.05) or errors, PATIENCE_S, "librdkafka reports an error")
    assert "certificate required" in errors[0].lower()
    needs = "the client sent no certificate, and ssl.client.auth is required"
    wait_until(lambda: needs in secured.log_tail(), PATIENCE_S, "the broker has logged it")


def test_each_listener_names_its_own_port(secured: BrokerProcess, files: TlsFiles) -> None:
    contexts = {
        "PLAINTEXT": None,
        "TLS": files.authority.client(),
        "MUTUAL": files.authority.client("alice"),
    }
    for listener, context in contexts.items():
        here = secured.addresses[listener]
        assert wire.endpoints(here, context) == {1: here}
        with Wire(here, context=context) as connection:
            (described,) = connection.call(DescribeClusterRequest(), 1).brokers
            assert (described.host, described.port) == here

            def coordinator() -> Any:
                (found,) = connection.call(FindCoordinatorRequest(coordinator_keys=["g"]), 4).coordinators
                return found if not found.error_code else None

            found = wait_until(coordinator, PATIENCE_S, "there is a coordinator")
            assert (found.host, found.port) == here


def test_settings_are_shown_without_their_secrets(secured: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": address(secured, "PLAINTEXT")})
    (future,) = admin.describe_configs([ConfigResource(ResourceType.BROKER, "1")]).values()
    entries = future.result(PATIENCE_S)
    assert entries["listeners"].value == LISTENERS
    assert entries["listener.security.protocol.map"].value == "TLS:SSL,MUTUAL:SSL"
    assert entries["ssl.keystore.location"].value.endswith("broker.pem")
    assert entries["listener.name.mutual.ssl.client.auth"].value == "required"
    for name in ("ssl.keystore.key", "ssl.key.password", "ssl.truststore.certificates"):
        assert (entries[name].is_sensitive, entries[name].value) == (True, None)


def closes(broker: BrokerProcess, listener: str, data: bytes) -> None:
    """Whether the broker closes a connection on which it gets this."""
    with socket.create_connection(broker.addresses[listener], PATIENCE_S) as peer:
        peer.sendall(data)
        try:
            while peer.recv(4096):
                pass
        except ConnectionResetError:
            pass


def test_peers_at_the_wrong_port_are_closed_and_others_go_on(secured: BrokerProcess, files: TlsFiles) -> None:
    context = files.authority.client()
    with (
        Wire(secured.addresses["TLS"], context=context) as secure,
        Wire(secured.addresses["PLAINTEXT"]) as plain,
    ):
        kafka = b"\0\0\0\x0e\0\x12\0\0\0\0\0\x01\0\x04test"
        for data in (kafka, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\x05hello", bytes(64)):
            closes(secured, "TLS", data)
        with pytest.raises((OSError, NoAnswer)):
            Wire(secured.addresses["PLAINTEXT"], context=context)
        assert not secure.call(HELLO, 3).error_code and not plain.call(HELLO, 3).error_code
    assert "the peer does not speak TLS" in secured.log_tail()


def client_hello(context: ssl.SSLContext) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    engine = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        engine.do_handshake()
    return outgoing.read()


def test_certificates_are_replaced_while_a_client_produces(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    settings = {"listeners": "SSL://127.0.0.1:0", **files.settings("none")}
    with BrokerProcess(settings) as broker:
        here = broker.addresses["SSL"]
        errors: list[KafkaError | None] = []
        producer = Producer({"bootstrap.servers": address(broker, "SSL"), **files.librdkafka()})

        def produce_until(condition: Callable[[], object], what: str) -> None:
            def step() -> object:
                producer.produce("t", b"x" * 100, on_delivery=lambda error, _: errors.append(error))
                producer.poll(0)
                return condition()

            wait_until(step, PATIENCE_S, what)

        produce_until(lambda: len(errors) > 20, "records are written")
        # From another authority, which clients of today do not trust.
        other = TlsFiles(tmp_path, Authority())
        with Wire(here, context=files.authority.client()) as old:
            produce_until(
                lambda: _is_served(here, other.authority), "new connections see the new certificate"
            )
            assert not old.call(HELLO, 3).error_code
        assert not _is_served(here, files.authority)
        files.keystore.write_text("-----BEGIN RUBBISH-----\n")
        produce_until(lambda: "the changed certificates are not used" in broker.log_tail(), "it is reported")
        assert _is_served(here, other.authority)
        count = len(errors)
        produce_until(lambda: len(errors) > count + 20, "the client goes on")
        assert producer.flush(PATIENCE_S) == 0
        assert set(errors) == {None}
        lines = [json.loads(line) for line in broker.log_path.read_text().splitlines()]
        reported = [line for line in lines if "are not used" in line["event"]]
        assert [line["level"] for line in reported] == ["error"]


def _is_served(here: tuple[str, int], authority: Authority) -> bool:
    try:
        with Wire(here, context=authority.client()) as connection:
            return not connection.call(HELLO, 3).error_code
    except NoAnswer:
        return False


def test_clients_are_given_the_name_that_a_listener_is_bound_to(tmp_path: Path) -> None:
    """As in Kafka. With the number that the name resolves to, they do not accept the certificate."""
    files = TlsFiles(tmp_path, host="localhost")
    settings = {
        "listeners": "TLS://localhost:0",
        "listener.security.protocol.map": "TLS:SSL",
        **files.settings("none"),
    }
    with BrokerProcess(settings) as broker:
        _, port = broker.addresses["TLS"]
        admin = AdminClient({"bootstrap.servers": f"localhost:{port}", **files.librdkafka()})
        found = admin.list_topics(timeout=PATIENCE_S)
        addresses: list[Any] = [(each.host, each.port) for each in found.brokers.values()]
        assert addresses == [("localhost", port)]
