"""What bad peers and bad files do to a TLS listener."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from penstock.broker.config import BrokerConfig
from penstock.broker.network.handshakes import HANDSHAKE_TIMEOUT_MS
from tests.broker.network.test_tls_listeners import HELLO, TlsStage
from tests.tls.authority import HOST, Authority
from tests.tls.memory import MemoryStream


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def client_hello(authority: Authority) -> bytes:
    """The first bytes of a good client."""
    outgoing = ssl.MemoryBIO()
    engine = authority.client().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        engine.do_handshake()
    return outgoing.read()


def test_a_certificate_file_with_a_byte_that_is_not_ascii_does_not_stop_the_broker(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    damaged = bytearray(stage.keystore.read_bytes())
    damaged[damaged.index(b"BEGIN CERTIFICATE") + 60] = 0xFF
    stage.keystore.write_bytes(damaged)
    # What a timer raises stops the broker (the handler of the loop's exceptions in process.py).
    stage.wait(3_000)
    assert len([line for _, line, _ in stage.lines if "not used" in line]) == 1
    stage.write_keystore(name="elsewhere.test")
    stage.wait(2_000)
    assert any("new connections use" in line for _, line, _ in stage.lines)


def test_connections_closed_while_their_peer_does_not_read_count_until_they_are_gone(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority, connections_max=4)
    accepted: list[MemoryStream] = []
    for _ in range(20):
        client = stage.connect(2, authority.client())
        stage.turns.settle()
        if not client.is_answered:
            continue  # refused, as it should be
        accepted.append(client.inner.other)
        # From now on the client reads nothing. It asks, and then makes the broker close the connection.
        client.inner.inbox_bytes_max = 0
        client.send(HELLO)
        client.send(b"\xff\xff\xff\xff")
        stage.turns.settle()
    assert sum(not end.is_closed for end in accepted) <= 4


def test_handshakes_that_expire_while_their_peer_does_not_read_count_until_they_are_gone(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority, connections_max=4)
    hello = client_hello(authority)

    def connect() -> list[MemoryStream]:
        ends = []
        for _ in range(4):
            client = stage.connect(2)
            client.inner.inbox_bytes_max = 0
            if not client.inner.other.is_closed:
                client.send(hello)
            ends.append(client.inner.other)
        return ends

    ends = connect()
    # Until the first deadline, and no longer.
    stage.wait(HANDSHAKE_TIMEOUT_MS + 500)
    ends += connect()
    stage.turns.settle()
    assert sum(not end.is_closed for end in ends) <= 4


def test_passwords_are_not_in_the_text_of_a_configuration() -> None:
    """On a terminal the log shows the variables of a failed request (structlog with rich)."""
    given = {"ssl.key.password": "hunter2"}
    config, _ = BrokerConfig.load(given)
    assert "hunter2" not in repr(config)
