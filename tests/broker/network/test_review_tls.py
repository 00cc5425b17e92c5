"""What bad peers and bad files do to a TLS listener."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from penstock.broker.network.handshakes import BEGUN_PER_TURN, HANDSHAKE_TIMEOUT_MS
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


def test_a_turn_answers_a_few_handshakes_also_if_their_first_byte_came_before(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    hello = client_hello(authority)
    clients = [stage.connect(2) for _ in range(10 * BEGUN_PER_TURN)]
    for client in clients:
        client.send(hello[:1])
    stage.turns.settle()
    for client in clients:
        client.send(hello[1:])
    answered, most = 0, 0
    for _ in range(100):
        stage.turns.turn()
        now = sum(
            isinstance(end := client.inner.other, MemoryStream) and end.sent_bytes > 0 for client in clients
        )
        answered, most = now, max(most, now - answered)
    assert answered == len(clients)
    assert most <= BEGUN_PER_TURN


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
