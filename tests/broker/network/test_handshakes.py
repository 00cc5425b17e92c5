"""TLS handshakes in progress: how much of them a turn of the loop does, and what is left of those that fail."""

from __future__ import annotations

import ssl
from collections import Counter
from pathlib import Path

import pytest

from penstock.broker.network import handshakes
from penstock.broker.network.handshakes import HANDSHAKE_TIMEOUT_MS, STEPS_PER_TURN
from penstock.tls.stream import RECORDS_PER_CALL, TlsStream
from tests.broker.network.test_tls_listeners import Client, TlsStage
from tests.tls.authority import HOST, Authority
from tests.tls.memory import MemoryStream


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[TlsStream]:
    """The stream of each step of a handshake, until the test clears it."""
    taken: list[TlsStream] = []

    class Counted(TlsStream):
        def _shake_hands(self) -> None:
            taken.append(self)
            super()._shake_hands()

    monkeypatch.setattr(handshakes, "TlsStream", Counted)
    return taken


def client_hello(authority: Authority) -> bytes:
    """The first bytes of a good client."""
    outgoing = ssl.MemoryBIO()
    engine = authority.client().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        engine.do_handshake()
    return outgoing.read()


def busiest_turn(stage: TlsStage, steps: list[TlsStream]) -> int:
    """Run until nothing is ready. Returns the most steps that one turn took."""
    most = 0
    while stage.turns.turn():
        most = max(most, len(steps))
        steps.clear()
    return most


def test_a_turn_begins_a_few_handshakes_and_the_others_wait(
    tmp_path: Path, authority: Authority, steps: list[TlsStream]
) -> None:
    stage = TlsStage(tmp_path, authority)
    clients = [stage.connect(2, authority.client()) for _ in range(5 * STEPS_PER_TURN)]
    assert busiest_turn(stage, steps) == STEPS_PER_TURN
    assert all(client.is_answered for client in clients)
    stage.check_counts()


def test_a_turn_answers_a_few_handshakes_also_if_their_first_byte_came_before(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    hello = client_hello(authority)
    clients = [stage.connect(2) for _ in range(10 * STEPS_PER_TURN)]
    for client in clients:
        client.send(hello[:1])
    stage.turns.settle()
    for client in clients:
        client.send(hello[1:])
    answered, most = 0, 0
    for _ in range(100):
        stage.turns.turn()
        now = sum(client.inner.other.sent_bytes > 0 for client in clients)
        answered, most = now, max(most, now - answered)
    assert answered == len(clients)
    assert most == STEPS_PER_TURN


@pytest.mark.parametrize(("protocol", "steps_each"), [("TLSv1.2", 2), ("TLSv1.3", 3)])
def test_a_turn_takes_a_few_steps_of_any_kind(
    tmp_path: Path, authority: Authority, steps: list[TlsStream], protocol: str, steps_each: int
) -> None:
    """With client certificates, and in TLS 1.3 with a curve for which the client has to begin a second time."""
    stage = TlsStage(tmp_path, authority, ssl_client_auth="required", ssl_enabled_protocols=protocol)
    stage.tls.context.set_ecdh_curve("prime256v1")
    clients = [stage.connect(2, authority.client("alice")) for _ in range(5 * STEPS_PER_TURN)]
    taken: Counter[TlsStream] = Counter()

    def turn() -> None:
        stage.turns.turn()
        assert len(steps) <= STEPS_PER_TURN
        taken.update(steps)
        steps.clear()

    for _ in range(steps_each):
        # The clients hear nothing until all of them are answered. Then they all speak in the same turn.
        for client in clients:
            client.inner.recv_bytes_max = 0
        for _ in range(20):
            turn()
        for client in clients:
            client.inner.recv_bytes_max = 1 << 30
        turn()
    for _ in range(20):
        turn()
    assert all(client.is_answered for client in clients)
    assert set(taken.values()) == {steps_each}


def test_a_handshake_in_many_records_goes_to_the_end_of_the_queue(
    tmp_path: Path, authority: Authority, steps: list[TlsStream]
) -> None:
    """What was received is more than a step takes, and the next bytes may never come."""
    stage = TlsStage(tmp_path, authority)
    hello = client_hello(authority)
    content = hello[5:]
    records = b"".join(hello[:3] + b"\0\x01" + content[i : i + 1] for i in range(len(content)))
    clients = [stage.connect(2) for _ in range(STEPS_PER_TURN)]
    for client in clients:
        client.send(records)
    honest = stage.connect(2, authority.client())
    turns_of_honest = turns = 0
    while stage.turns.turn():
        turns += 1
        assert len(steps) <= STEPS_PER_TURN
        steps.clear()
        if not honest.is_answered:
            turns_of_honest = turns
    assert honest.is_answered and turns_of_honest < turns
    assert len(content) > 2 * RECORDS_PER_CALL
    assert all(client.inner.other.sent_bytes > 1_000 for client in clients)


def test_handshakes_that_find_the_queue_full_are_refused(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "QUEUED_MAX", 6)
    stage = TlsStage(tmp_path, authority)
    clients = [stage.connect(2, authority.client()) for _ in range(10)]
    stage.turns.settle()
    answered = sum(client.is_answered for client in clients)
    assert answered >= 6 and answered + len(stage.reasons()) == 10
    assert set(stage.reasons()) == {"too many TLS handshakes at once"}
    stage.check_counts()


def test_handshakes_that_have_begun_are_not_refused_when_the_queue_is_full(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = TlsStage(tmp_path, authority)
    begun = [stage.connect(2, authority.client()) for _ in range(10)]
    stage.turns.run_until(lambda: all(client.inner.other.sent_bytes > 0 for client in begun))
    monkeypatch.setattr(handshakes, "QUEUED_MAX", 0)
    new = stage.connect(2, authority.client())
    stage.turns.settle()
    assert all(client.is_answered for client in begun)
    assert not new.is_answered and stage.reasons() == ["too many TLS handshakes at once"]
    stage.check_counts()


def test_handshakes_that_expire_while_their_peer_does_not_read_are_gone_at_once(
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

    first = connect()
    # Until the first deadline, and no longer.
    stage.wait(HANDSHAKE_TIMEOUT_MS + 500)
    second = connect()
    stage.turns.settle()
    assert all(end.is_closed for end in first) and not any(end.is_closed for end in second)
    stage.check_counts()


def test_handshakes_that_fail_while_their_peer_does_not_read_are_gone_at_once(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority, connections_max=1)
    client = stage.connect(2)
    client.inner.inbox_bytes_max = 0
    client.send(client_hello(authority))
    stage.turns.settle()
    client.send(b"\x17\x03\x03\x00\x20" + bytes(32))
    stage.turns.settle()
    assert client.inner.other.is_closed and len(stage.reasons()) == 1
    stage.check_counts()
    honest: Client = stage.connect(2, authority.client())
    stage.turns.settle()
    assert honest.is_answered


def test_a_handshake_that_fails_still_sends_its_alert(tmp_path: Path, authority: Authority) -> None:
    stage = TlsStage(tmp_path, authority, ssl_client_auth="required")
    client = stage.connect(2, authority.client())
    stage.turns.settle()
    assert client.error == "the broker requires a client certificate"
    assert client.inner.other.is_closed
