"""Commands with a user: the file with sasl.* settings, and the login of the connection under `quorum`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from penstock.cli import client
from penstock.cli.connection import Brokers, load_client_config
from penstock.cli.failures import Failure
from penstock.cli.raw import RawClient
from penstock.cli.wire_client import connected
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
)
from penstock.protocol.messages.security import SaslAuthenticateResponse, SaslHandshakeResponse
from penstock.protocol.messages.topics import MetadataResponse
from penstock.sasl import SaslError, scram
from penstock.sasl.scram import ScramServer
from penstock.sasl.settings import SaslSettings
from tests.cli.fake_broker import FakeBroker

SALT = b"0123456789abcdefghijklmnop"
ALICE = SaslSettings("SCRAM-SHA-256", "alice", "hunter2")


class Logins:
    """The answers of a broker with one user."""

    def __init__(self, mechanisms: tuple[str, ...] = ("SCRAM-SHA-256",)) -> None:
        self._mechanisms = mechanisms
        salted = scram.salted_password("SCRAM-SHA-256", "hunter2", SALT, 4096)
        self._keys = scram.keys("SCRAM-SHA-256", salted, SALT, 4096)
        self.server = self._made()

    def _made(self) -> ScramServer:
        return ScramServer("SCRAM-SHA-256", {"alice": self._keys}.get, b"nonce", lambda _: SALT)

    def handshake(self, request: Any) -> SaslHandshakeResponse:
        self.server, self._step = self._made(), 0
        is_there = request.mechanism in self._mechanisms
        error = ErrorCode.NONE if is_there else ErrorCode.UNSUPPORTED_SASL_MECHANISM
        return SaslHandshakeResponse(error_code=error, mechanisms=list(self._mechanisms))

    def authenticate(self, request: Any) -> SaslAuthenticateResponse:
        self._step += 1
        try:
            answer = (self.server.first if self._step == 1 else self.server.final)(request.auth_bytes)
        except SaslError as error:
            code = ErrorCode.SASL_AUTHENTICATION_FAILED
            return SaslAuthenticateResponse(error_code=code, error_message=str(error), auth_bytes=b"")
        return SaslAuthenticateResponse(error_message=None, auth_bytes=answer)


def broker_with(logins: Logins) -> FakeBroker:
    answers = AlterPartitionReassignmentsResponse(), MetadataResponse()
    return FakeBroker(*answers, api_17=logins.handshake, api_36=logins.authenticate)


def test_connection_logs_in_before_its_first_request() -> None:
    logins = Logins()
    with broker_with(logins) as broker, RawClient(Brokers(broker.bootstrap, sasl=ALICE)) as raw:
        assert logins.server.user == "alice"
        raw.ask(AlterPartitionReassignmentsRequest())
        assert len(broker.asked) == 4


def test_wire_client_logs_in_over_a_socket() -> None:
    logins = Logins()
    security = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
    }
    with broker_with(logins) as broker:
        right = Brokers(broker.bootstrap, {**security, "sasl.password": "hunter2"})
        with connected(right) as wire:
            assert wire.topics() == {}
            assert logins.server.user == "alice"
        wrong = Brokers(broker.bootstrap, {**security, "sasl.password": "hunter3"})
        line = "did not accept user alice with SCRAM-SHA-256: invalid credentials$"
        with pytest.raises(Failure, match=line), connected(wrong) as wire:
            wire.topics()


@pytest.mark.parametrize(
    ("mechanisms", "password", "line"),
    [
        (
            ("SCRAM-SHA-256",),
            "hunter3",
            "the broker did not accept user alice with SCRAM-SHA-256: invalid credentials",
        ),
        (
            ("PLAIN", "SCRAM-SHA-512"),
            "hunter2",
            "the broker does not offer SCRAM-SHA-256 there; set sasl.mechanism to one of: PLAIN, SCRAM-SHA-512",
        ),
    ],
)
def test_refused_login_is_one_line(mechanisms: tuple[str, ...], password: str, line: str) -> None:
    settings = SaslSettings("SCRAM-SHA-256", "alice", password)
    with broker_with(Logins(mechanisms)) as broker, pytest.raises(Failure) as caught:
        RawClient(Brokers(broker.bootstrap, sasl=settings))
    assert str(caught.value) == f"{broker.bootstrap}: {line}"


def test_listener_without_sasl_says_so() -> None:
    with (
        FakeBroker() as broker,
        pytest.raises(Failure, match=r"has no SASL there; use security.protocol=plain"),
    ):
        RawClient(Brokers(broker.bootstrap, sasl=ALICE))


def test_mechanisms_of_a_listener_are_found_without_a_user() -> None:
    with (
        broker_with(Logins(("PLAIN", "SCRAM-SHA-512"))) as broker,
        RawClient(Brokers(broker.bootstrap)) as raw,
    ):
        assert raw.mechanisms() == ["PLAIN", "SCRAM-SHA-512"]
    with FakeBroker() as broker, RawClient(Brokers(broker.bootstrap)) as raw:
        assert raw.mechanisms() == []


def test_file_is_read_for_our_clients_and_for_librdkafka(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=scram-sha-256\n"
        "sasl.username = alice\nsasl.password = hunter2\n"
    )
    config = load_client_config(str(file))
    assert config.sasl == ALICE and config.context is None
    assert config.security == {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": "hunter2",
    }
    brokers = Brokers("127.0.0.1:1", config.security, config.context, config.sasl)
    assert "hunter2" not in f"{config!r} {brokers!r} {brokers}"
    # librdkafka accepts all of it.
    AdminClient(client.settings(brokers))
