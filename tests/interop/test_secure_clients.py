"""Every other client with a password over TLS and with a certificate, against a broker that is closed otherwise.

librdkafka and Java's client do this in every run: test_sasl.py and test_tls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from tests.interop import test_franz_go, test_kafkajs, test_sarama
from tests.interop.adapters.isolated import IsolatedClient
from tests.interop.adapters.program import ProgramClient
from tests.interop.client import PATIENCE_S, ClientError, Outgoing, Record, Security
from tests.interop.secured import (
    ADMINISTRATOR,
    MUTUAL,
    SASL_SSL,
    SecuredBroker,
    allow,
    put_user,
    secured_broker,
)
from tests.interop.test_kcat import Kcat, records_of
from tests.support import wait_until
from tests.tools import Missing, go_program, kcat, node_modules, skip_or_fail

pytestmark = pytest.mark.interop_long

COUNT = 40
# Who logs in as alice and who has a certificate with that name are two principals.
LOGGED_IN, CERTIFIED = "User:alice", "User:CN=alice,OU=x,O=y"
PREFIX = "alice-"

Unique = Callable[[str], str]
Connect = Callable[[str, Security], Any]


class KcatClient:
    """kcat as far as these tests need it."""

    def __init__(self, bootstrap: str, security: Security) -> None:
        self._kcat = Kcat(kcat(), bootstrap, security)

    def produce(self, topic: str, records: Sequence[Outgoing], *, idempotent: bool = False) -> None:
        lines = "".join(f"{(each.value or b'').decode()}\n" for each in records)
        self._end("-P", "-t", topic, "-X", f"enable.idempotence={idempotent}".lower(), text=lines)

    def resume(self, group: str, topic: str, count: int) -> list[Record]:
        reading = ("-J", "-q", "-c", str(count), "-X", "auto.offset.reset=earliest", "-G", group, topic)
        return records_of(self._end(*reading))

    def topics(self) -> set[str]:
        return set(self._end("-L").split())

    def close(self) -> None:
        pass

    def _end(self, *arguments: str, text: str = "") -> str:
        done = self._kcat.end(*arguments, text=text)
        if done.returncode != 0:
            raise ClientError("kcat", done.stderr)
        return done.stdout


def franz_go(bootstrap: str, security: Security) -> ProgramClient:
    return ProgramClient([go_program(test_franz_go.MODULE, "franz_go")], bootstrap, security=security)


def sarama(bootstrap: str, security: Security) -> ProgramClient:
    return ProgramClient([go_program(test_sarama.MODULE, "sarama")], bootstrap, security=security)


def kafkajs(bootstrap: str, security: Security) -> ProgramClient:
    return ProgramClient(["node", test_kafkajs.SCRIPT, node_modules()], bootstrap, security=security)


def aiokafka(bootstrap: str, security: Security) -> IsolatedClient:
    return IsolatedClient("aiokafka", bootstrap, security)


def kafka_python(bootstrap: str, security: Security) -> IsolatedClient:
    return IsolatedClient("kafka_python", bootstrap, security)


class Kind(NamedTuple):
    connect: Connect
    # What it says about a wrong password, a missing certificate, and a topic that it may not write to.
    wrong_password: str = "Authentication failed: invalid credentials"
    no_certificate: str = "certificate required"
    not_allowed: str = "TOPIC_AUTHORIZATION_FAILED"


KINDS = {
    # It keeps to itself why the connection was closed.
    "aiokafka": Kind(aiokafka, no_certificate="KafkaConnectionError"),
    "franz-go": Kind(franz_go),
    "kafka-python": Kind(kafka_python),
    "kafkajs": Kind(kafkajs),
    "kcat": Kind(KcatClient, not_allowed="Broker: Topic authorization failed"),
    "sarama": Kind(sarama),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        admin = broker.client(ADMINISTRATOR).admin
        put_user(admin, "alice")
        for principal in (LOGGED_IN, CERTIFIED):
            allow(admin, principal, ResourceType.TOPIC, PREFIX, AclOperation.READ, AclOperation.WRITE)
            allow(admin, principal, ResourceType.GROUP, PREFIX, AclOperation.READ)
        yield broker


@pytest.fixture
def topic(broker: SecuredBroker, unique: Unique) -> str:
    name = unique(PREFIX + "topic")
    broker.client(ADMINISTRATOR).create_topic(name)
    return name


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def connect(kind: Kind) -> Iterator[Connect]:
    """A client of this kind, until the end of the test."""
    clients: list[Any] = []

    def connect(bootstrap: str, security: Security) -> Any:
        try:
            clients.append(kind.connect(bootstrap, security))
        except Missing as missing:
            skip_or_fail(missing)
        return clients[-1]

    yield connect
    for each in clients:
        each.close()


def produce_and_consume(client: Any, topic: str) -> None:
    values = [b"%d " % number + b"x" * (number * 97) for number in range(COUNT)]
    client.produce(topic, [Outgoing(value) for value in values], idempotent=True)
    found = client.resume(topic, topic, COUNT)
    assert [record.value for record in found] == values


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_user_with_a_password_produces_and_consumes(
    broker: SecuredBroker, topic: str, connect: Connect, mechanism: str
) -> None:
    client = connect(broker.address(SASL_SSL), broker.with_password("alice", mechanism))
    produce_and_consume(client, topic)


def test_a_wrong_password_is_an_authentication_error(
    broker: SecuredBroker, kind: Kind, connect: Connect
) -> None:
    client = connect(broker.address(SASL_SSL), broker.with_password("alice", password="wrong-secret"))
    with pytest.raises(ClientError) as refused:
        client.topics()
    assert kind.wrong_password in str(refused.value)
    assert "wrong-secret" not in broker.process.log_path.read_text()


def test_a_certificate_says_who_a_client_is(
    broker: SecuredBroker, topic: str, kind: Kind, connect: Connect
) -> None:
    produce_and_consume(connect(broker.address(MUTUAL), broker.with_certificate("alice")), topic)

    other = connect(broker.address(MUTUAL), broker.with_certificate("bob"))
    with pytest.raises(ClientError) as refused:
        other.produce(topic, [Outgoing(b"not from alice")])
    assert kind.not_allowed in str(refused.value)
    assert broker.client(ADMINISTRATOR).offset(topic, 0, "latest") == COUNT


def test_a_client_without_a_certificate_is_refused(
    broker: SecuredBroker, kind: Kind, connect: Connect
) -> None:
    client = connect(broker.address(MUTUAL), broker.with_certificate(None))
    with pytest.raises(ClientError) as refused:
        client.topics()
    assert kind.no_certificate in str(refused.value)
    # Of many refusals in a few seconds, such as those of kcat, the broker logs only the first and the number.
    expected = (
        "the client sent no certificate, and ssl.client.auth is required",
        "not all refusals were logged",
    )

    def is_logged() -> bool:
        log = broker.process.log_path.read_text()
        return any(each in log for each in expected)

    wait_until(is_logged, PATIENCE_S, "the broker has logged why")
