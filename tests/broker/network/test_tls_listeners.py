"""Clients that come in over TLS: their handshakes, their principals, and the certificates they see."""

from __future__ import annotations

import errno
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.config import BrokerConfig
from penstock.broker.handlers.routes import make_route
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.network.handshakes import HANDSHAKE_TIMEOUT_MS
from penstock.broker.network.listener_tls import WARNING_INTERVAL_MS, ListenerTls
from penstock.broker.network.server import Server
from penstock.environment import Environment, Stream
from penstock.metadata.image import Image
from penstock.protocol.listeners import CLIENTS, SecurityProtocol, client_listener
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.tls.principals import PrincipalMapping
from penstock.tls.settings import TlsSettings
from penstock.tls.stream import LINGER_MS, TlsStream
from tests.broker.wire import encode_request
from tests.tls.authority import HOST, Authority
from tests.tls.memory import MemoryStream, Turns

SECURE = client_listener("TLS", SecurityProtocol.SSL)
HELLO = encode_request(
    ApiVersionsRequest(client_software_name="a", client_software_version="1"), 3, correlation_id=7
)
RULES = "RULE:^CN=(alice|bob),.*$/$1/U"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


class Client:
    """One end of a connection to the broker, with TLS or without."""

    def __init__(self, stage: TlsStage, near: MemoryStream, context: Any) -> None:
        self.inner = near
        self.stream: Stream = near
        self.received = bytearray()
        self.has_ended = False
        self.error = ""
        if context is not None:
            tls = TlsStream(near, context, stage.turns, server_side=False, server_hostname=HOST)
            tls.on_established = lambda: self.send(HELLO)
            self.stream = tls
        self.stream.on_readable(self._readable)

    def send(self, data: bytes) -> None:
        assert self.stream.send([data]) == len(data)

    def _readable(self) -> None:
        buffer = bytearray(4096)
        try:
            count = self.stream.recv_into(memoryview(buffer))
        except OSError as error:
            self.error = str(error)
            self.stream.close()
            return
        if count == 0:
            self.has_ended = True
            self.stream.close()
        self.received += buffer[: count or 0]

    @property
    def is_answered(self) -> bool:
        return len(self.received) > 8 and struct.unpack_from(">i", self.received, 4) == (7,)


class TlsStage:
    """A server with a plain listener and one with TLS, in memory and virtual time."""

    def __init__(
        self, directory: Path, authority: Authority, *, connections_max: int = 1_000, **settings: str
    ) -> None:
        self.turns = Turns()
        self.authority = authority
        self.lines: list[tuple[str, str, dict[str, Any]]] = []
        self.wall_ms = time.time_ns() // 1_000_000
        self._accept: dict[int, Callable[[Stream], None]] = {}
        network: Any = self
        clock: Any = SimpleNamespace(
            now_ms=lambda: int(self.turns.now_ms),
            work_us=lambda: int(self.turns.now_ms) * 1000,
            wall_ms=lambda: self.wall_ms,
            boot_id=lambda: "",
        )
        spawn: Any = self.turns
        nothing: Any = None
        self.environment = Environment(clock, nothing, network, random.Random(1), spawn, nothing)
        logger: Any = SimpleNamespace(
            info=lambda event, **values: self.lines.append(("info", event, values)),
            warning=lambda event, **values: self.lines.append(("warning", event, values)),
            error=lambda event, **values: self.lines.append(("error", event, values)),
        )
        config, _ = BrokerConfig.load({})
        broker: Any = SimpleNamespace(encoded_api_versions={}, image=Image())
        self.server = Server(
            self.environment,
            broker,
            config,
            logger,
            make_route=make_route,
            limits=ConnectionLimits(connections_max, connections_max),
            on_read_failed=lambda path, error: None,
        )
        self.keystore = directory / "broker.pem"
        self.write_keystore()
        truststore = directory / "ca.pem"
        truststore.write_text(authority.pem)
        values = {
            "ssl.keystore.location": str(self.keystore),
            "ssl.truststore.location": str(truststore),
            "ssl.client.auth": "requested",
            **{name.replace("_", "."): text for name, text in settings.items()},
        }
        self.tls = ListenerTls(
            self.environment, logger, "TLS", TlsSettings.from_kafka(values), PrincipalMapping(RULES)
        )
        self.server.listen("plain", 1, listener=CLIENTS)
        self.server.listen("tls", 2, listener=SECURE, tls=self.tls)

    def write_keystore(self, *, valid_days: int = 365, name: str = HOST) -> None:
        chain, key = self.authority.issue(name, is_host=True, valid_days=valid_days)
        new = self.keystore.with_suffix(".new")
        new.write_text(key + chain)
        new.chmod(0o600)
        os.replace(new, self.keystore)

    # The network

    def listen(self, host: str, port: int, on_connect: Callable[[Stream], None]) -> Any:
        if port in self._accept:
            raise OSError(errno.EADDRINUSE, "in use")
        self._accept[port] = on_connect
        return SimpleNamespace(address=(host, port), close=lambda: None)

    def connect(self, port: int, context: Any = None, *, peer: str = "10.0.0.1") -> Client:
        near, far = MemoryStream(self.turns, "broker"), MemoryStream(self.turns, peer)
        near.other, far.other = far, near
        self._accept[port](far)
        return Client(self, near, context)

    # What a test asks

    def principals(self) -> list[str]:
        return [f"{each.listener.name} {each.principal}" for each in self.server._connections]

    def reasons(self) -> list[str]:
        return [str(values["reason"]) for _, _, values in self.lines if "reason" in values]

    def wait(self, duration_ms: int, step_ms: int = 500) -> None:
        for _ in range(duration_ms // step_ms):
            self.turns.wait(step_ms)
            self.turns.settle()

    def check_counts(self) -> None:
        server = self.server
        count = len(server._connections) + len(server._handshakes) + server._lingering
        assert sum(server._per_host.values()) == count


def test_a_client_has_the_principal_of_its_certificate_by_the_rules(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    clients = [
        stage.connect(2, authority.client("alice")),
        stage.connect(2, authority.client()),
        stage.connect(1),
    ]
    clients[2].send(HELLO)
    stage.turns.settle()
    assert all(client.is_answered for client in clients)
    assert sorted(stage.principals()) == ["PLAINTEXT User:ANONYMOUS", "TLS User:ALICE", "TLS User:ANONYMOUS"]
    stage.check_counts()


def test_a_client_for_whom_there_is_no_rule_is_closed(tmp_path: Path, authority: Authority) -> None:
    stage = TlsStage(tmp_path, authority)
    client = stage.connect(2, authority.client("mallory"))
    stage.turns.settle()
    assert client.has_ended or client.error
    assert not client.is_answered
    assert stage.principals() == []
    assert stage.reasons() == ["no rule of ssl.principal.mapping.rules matches CN=mallory,OU=x,O=y"]
    stage.check_counts()


def test_a_client_without_a_certificate_does_not_get_in_where_one_is_required(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority, ssl_client_auth="required")
    without, stranger = (
        stage.connect(2, authority.client()),
        stage.connect(2, Authority().client("alice", trusts=authority)),
    )
    known = stage.connect(2, authority.client("bob"))
    stage.turns.settle()
    assert not without.is_answered and not stranger.is_answered and known.is_answered
    assert stage.principals() == ["TLS User:BOB"]
    assert "the client sent no certificate, and ssl.client.auth is required" in stage.reasons()[0]
    assert len(stage.reasons()) == 2
    stage.check_counts()


@pytest.mark.parametrize(
    "data", [HELLO, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\0" * 64, b"\xff" * 64, os.urandom(64)]
)
def test_what_is_not_tls_is_closed_and_logged_once(tmp_path: Path, authority: Authority, data: bytes) -> None:
    stage = TlsStage(tmp_path, authority)
    client = stage.connect(2)
    client.send(data)
    stage.turns.settle()
    assert client.has_ended
    (reason,) = stage.reasons()
    assert reason.startswith("the TLS handshake failed: ")
    assert stage.lines[-1][2]["peer"] == "10.0.0.1" and stage.lines[-1][2]["listener"] == "TLS"
    stage.check_counts()


def test_tls_at_the_plain_listener_is_closed_and_logged_once(tmp_path: Path, authority: Authority) -> None:
    stage = TlsStage(tmp_path, authority)
    client = stage.connect(1, authority.client())
    stage.turns.settle()
    assert client.error
    assert len(stage.reasons()) == 1
    stage.check_counts()


def test_a_handshake_has_ten_seconds(tmp_path: Path, authority: Authority) -> None:
    stage = TlsStage(tmp_path, authority)
    silent, slow = stage.connect(2), stage.connect(2)
    slow.send(b"\x16\x03\x01\x02\x00\x01")
    stage.wait(HANDSHAKE_TIMEOUT_MS - 1_000)
    assert not silent.has_ended and not slow.has_ended
    in_time = stage.connect(2, authority.client())
    stage.wait(2_000)
    assert silent.has_ended and slow.has_ended
    assert in_time.is_answered
    assert stage.reasons() == ["the TLS handshake took longer than 10 s"] * 2
    stage.wait(HANDSHAKE_TIMEOUT_MS + 2_000)
    assert not in_time.has_ended
    stage.check_counts()


def test_connections_count_while_their_handshake_lasts(tmp_path: Path, authority: Authority) -> None:
    stage = TlsStage(tmp_path, authority, connections_max=3)
    half_open = [stage.connect(2), stage.connect(2)]
    plain = stage.connect(1)
    refused = [stage.connect(2, authority.client()), stage.connect(1)]
    stage.turns.settle()
    assert [client.has_ended or bool(client.error) for client in (*half_open, plain, *refused)] == [
        *(False, False, False),
        *(True, True),
    ]
    assert stage.reasons() == ["too many connections"] * 2
    stage.wait(HANDSHAKE_TIMEOUT_MS + 1_000)
    late = stage.connect(2, authority.client())
    stage.turns.settle()
    assert late.is_answered
    stage.check_counts()


def test_peers_that_leave_during_the_handshake_take_nothing_with_them(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    for said in (b"", b"\x16\x03\x01"):
        client = stage.connect(2)
        client.send(said)
        client.stream.close()
    stage.turns.settle()
    assert len(stage.server._handshakes) == 0
    stage.check_counts()
    assert stage.turns.timers <= 3  # the server's sweep, the certificates, the deadlines


def test_a_server_that_closes_leaves_no_handshake(tmp_path: Path, authority: Authority) -> None:
    stage = TlsStage(tmp_path, authority)
    silent, queued = stage.connect(2), stage.connect(2, authority.client())
    stage.turns.turn()
    stage.server.close()
    stage.turns.settle()
    assert silent.has_ended
    assert not queued.is_answered and (queued.has_ended or queued.error)
    assert stage.reasons() == []


def test_closed_connections_count_until_the_peer_has_read_or_the_time_is_over(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority, connections_max=4)
    clients: list[Client] = []
    for _ in range(20):
        client = stage.connect(2, authority.client())
        stage.turns.settle()
        if not client.is_answered:
            continue
        clients.append(client)
        # From now on the client reads nothing. It asks, and then makes the broker close the connection.
        client.inner.inbox_bytes_max = 0
        client.send(HELLO)
        stage.turns.settle()
        client.send(b"\xff\xff\xff\xff")
        stage.turns.settle()
        stage.check_counts()
    assert len(clients) == 4
    assert not any(client.inner.other.is_closed for client in clients)
    assert stage.principals() == []
    clients[0].received.clear()
    clients[0].inner.inbox_bytes_max = 1 << 30
    stage.turns.settle()
    assert clients[0].is_answered and clients[0].has_ended
    late = stage.connect(2, authority.client()), stage.connect(2, authority.client())
    stage.turns.settle()
    assert [client.is_answered for client in late] == [True, False]
    stage.wait(int(LINGER_MS))
    assert all(client.inner.other.is_closed for client in clients)
    stage.check_counts()
    assert stage.server._per_host == {"10.0.0.1": 1}


def test_a_client_for_whom_there_is_no_rule_counts_until_it_is_gone(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority, connections_max=4)
    accepted: list[MemoryStream] = []
    for _ in range(8):
        client = stage.connect(2, authority.client("mallory"))
        accepted.append(client.inner.other)
        # Up to the client's last message, and then nothing more is read.
        stage.turns.run_until(lambda client=client: client.stream.is_established or client.error)  # type: ignore[misc]
        client.inner.inbox_bytes_max = 0
        stage.turns.settle()
        stage.check_counts()
    assert sum(not end.is_closed for end in accepted) == 4
    stage.wait(int(LINGER_MS))
    assert all(end.is_closed for end in accepted)
    assert stage.server._per_host == {}


def test_new_connections_see_replaced_certificates_and_old_ones_go_on(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    before = stage.connect(2, authority.client())
    stage.turns.settle()
    stage.write_keystore(name="elsewhere.test")
    stage.wait(1_000)
    assert ("info", "new connections use the changed certificates", {"listener": "TLS"}) in stage.lines
    after = stage.connect(2, authority.client())
    before.received.clear()
    before.send(HELLO)
    stage.turns.settle()
    assert before.is_answered
    # It is for another name, which this client notices.
    assert "certificate is not accepted" in after.error
    stage.write_keystore()
    stage.wait(1_000)
    again = stage.connect(2, authority.client())
    stage.turns.settle()
    assert again.is_answered


def test_files_that_cannot_be_used_are_reported_once_and_the_old_ones_stay(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    stage.keystore.write_text("nothing of use")
    stage.wait(5_000)
    ((level, line, values),) = [each for each in stage.lines if "not used" in each[1]]
    assert (level, values) == ("error", {"listener": "TLS"})
    assert "\n" not in line and str(stage.keystore) in line
    client = stage.connect(2, authority.client())
    stage.turns.settle()
    assert client.is_answered


def test_a_file_with_a_byte_that_is_not_ascii_does_not_stop_the_broker(
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


def test_a_certificate_that_expires_soon_is_mentioned_once_a_day(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    assert stage.lines == []
    expires_ms = stage.tls._certificates.expires_ms
    assert expires_ms is not None
    stage.wall_ms = expires_ms - 29 * 24 * 3_600_000
    stage.wait(5_000)
    assert [line for _, line, _ in stage.lines] == [
        f"ssl.keystore.location {stage.keystore}: the certificate expires in 29 days"
    ]
    stage.wait(WARNING_INTERVAL_MS, WARNING_INTERVAL_MS // 4)
    assert len(stage.lines) == 2
    assert all(level == "warning" for level, _, _ in stage.lines)
