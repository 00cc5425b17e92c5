"""TLS in the blocking shell: against a broker with TLS listeners only, and against peers that make it difficult."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.environment import Buffer
from penstock.model import TopicPartition
from penstock.protocol.records import batches, decode_records, encode_batch
from penstock.wire import (
    BadSecurity,
    Client,
    Producer,
    TlsFailed,
    TransactionalProducer,
    Unreachable,
    WireError,
    blocking,
    links,
    operations,
    shared,
)
from penstock.wire.blocking import Shell
from penstock.wire.links import Address, Connect, Disconnect, Effect, Send
from penstock.wire.shells import ShellSettings
from tests.tls.authority import HOST, Authority
from tests.tls.broker import TlsBroker
from tests.tls.files import TlsFiles

DEADLINE_S = 30
RECORDS = 300


def batch_of(numbers: range, size: int) -> bytearray:
    return encode_batch([(0, b"%d" % number, bytes([number % 256]) * size, ()) for number in numbers])


def keys(client: Client, at: TopicPartition, end: int) -> list[int]:
    return [
        int(record.key or b"")
        for fetched in client.reader(at, 0, end)
        for position, _ in batches(fetched.records)
        for record in decode_records(fetched.records, position, bytes_max=1 << 30)
    ]


# Against a broker


@pytest.mark.parametrize(("listener", "name"), [("SSL", None), ("MUTUAL", "alice")])
def test_records_are_written_and_read_over_tls(
    tls_broker: TlsBroker, unique: Callable[[str], str], listener: str, name: str | None
) -> None:
    at = TopicPartition(unique("tls"), 0)
    with Client(tls_broker.address(listener), security=tls_broker.files.librdkafka(name)) as client:
        assert client.create_topic(at.topic, 1)
        with Producer(client) as producer:
            # Batches of less than a TLS record, and of many.
            for first in range(0, RECORDS, 10):
                producer.send(at, batch_of(range(first, first + 10), 5 if first % 20 else 40_000))
        assert keys(client, at, RECORDS) == list(range(RECORDS))
        assert client.fetch(at, RECORDS, wait_ms=10).next_offset == RECORDS


def test_transactions_work_over_tls(tls_broker: TlsBroker, unique: Callable[[str], str]) -> None:
    at = TopicPartition(unique("tls"), 0)
    with Client(tls_broker.address("SSL"), security=tls_broker.files.librdkafka()) as client:
        assert client.create_topic(at.topic, 1)
        with TransactionalProducer(client, unique("writer")) as producer:
            producer.init()
            producer.begin()
            producer.send(at, batch_of(range(3), 10))
            producer.commit()
        # With the marker.
        assert client.fetch(at, 0, read_committed=True).last_stable_offset == 4


def test_a_shared_client_is_shared_by_the_same_security_only(tls_broker: TlsBroker) -> None:
    security = tls_broker.files.librdkafka()
    first = shared(tls_broker.address("SSL"), security=security)
    assert shared(tls_broker.address("SSL"), security=dict(security)) is first
    assert shared(tls_broker.address("SSL")) is not first
    assert isinstance(first.topics(), dict)
    first.close()


def failure(tls_broker: TlsBroker, security: dict[str, str], listener: str = "SSL", host: str = "") -> str:
    address = tls_broker.address(listener)
    if host:
        address = f"{host}:{address.rpartition(':')[2]}"
    with Client(address, security=security) as client, pytest.raises(WireError) as caught:
        client.topics()
    text = str(caught.value)
    assert "\n" not in text and address in text
    # A wrong setting is reported at once.
    assert isinstance(caught.value, TlsFailed) == (security.get("security.protocol") == "ssl")
    return text


def test_an_authority_that_is_not_trusted_is_reported_at_once(tls_broker: TlsBroker) -> None:
    security = {"security.protocol": "ssl", "ssl.ca.pem": Authority().pem}
    assert "set ssl.ca.location to the certificate of that authority" in failure(tls_broker, security)
    # The authorities of the system.
    assert "set ssl.ca.location" in failure(tls_broker, {"security.protocol": "ssl"})


def test_a_certificate_for_another_host_is_refused_unless_the_name_is_not_checked(
    tls_broker: TlsBroker,
) -> None:
    security = tls_broker.files.librdkafka()
    text = failure(tls_broker, security, host="localhost")
    assert "the broker's certificate is not for localhost; connect to a name that is in it" in text
    for name, value in (
        ("ssl.endpoint.identification.algorithm", "none"),
        ("enable.ssl.certificate.verification", "false"),
    ):
        port = tls_broker.address("SSL").rpartition(":")[2]
        with Client(f"localhost:{port}", security={**security, name: value}) as client:
            assert isinstance(client.topics(), dict)


def test_a_certificate_that_the_client_lacks_is_named(tls_broker: TlsBroker) -> None:
    text = failure(tls_broker, tls_broker.files.librdkafka(), "MUTUAL")
    assert "requires a certificate of the client; set ssl.certificate.location and ssl.key.location" in text


def test_plaintext_to_a_tls_listener_says_so(tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FIRST_CONTACT_MS", 200)
    text = failure(tls_broker, {})
    assert "does it use TLS (security.protocol=ssl)?" in text


def test_tls_to_a_plaintext_listener_says_so(
    bootstrap: str, tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "FIRST_CONTACT_MS", 200)
    with (
        Client(bootstrap, security=tls_broker.files.librdkafka()) as client,
        pytest.raises(Unreachable, match="is it a plaintext listener"),
    ):
        client.topics()


# Against other peers


@contextmanager
def serving(context: ssl.SSLContext | None, serve: Callable[[socket.socket], object]) -> Iterator[Address]:
    """A server of one connection in a thread, with TLS if there is a context."""

    def run() -> None:
        connection, _ = listener.accept()
        connection.settimeout(DEADLINE_S)
        try:
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            serve(connection)
        except OSError:
            pass
        finally:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Address(*listener.getsockname())
        finally:
            # If nobody has connected.
            with socket.socket() as waker:
                waker.connect_ex(listener.getsockname())
            thread.join(DEADLINE_S)


class Bytes:
    """In the place of the core: sends bytes and keeps what it receives."""

    def __init__(self, address: Address, buffers: Sequence[Buffer], space_bytes: int) -> None:
        self.effects: list[Effect] = [Connect(1, address)]
        self._buffers = list(buffers)
        self._space = bytearray(space_bytes)
        self.received_bytes = bytearray()
        self.why: str | None = None
        self.is_tls = False

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def connected(self, link: int, now_ms: int) -> None:
        self.effects.append(Send(link, self._buffers))

    def space(self, link: int) -> memoryview | None:
        return memoryview(self._space) if self.why is None else None

    def received(self, link: int, count: int, now_ms: int) -> None:
        self.received_bytes += self._space[:count]

    def lost(self, link: int, why: str, now_ms: int, *, is_tls: bool = False) -> None:
        if self.why is None:
            self.why, self.is_tls = why, is_tls
            self.effects.append(Disconnect(link))

    def due_ms(self) -> int:
        # A turn without events ends soon, for the tests' deadlines.
        return 0

    def tick(self, now_ms: int) -> None:
        pass

    def slept(self, ms: int) -> None:
        pass

    def close(self) -> None:
        self.effects.append(Disconnect(1))


def shell_with(core: Any, authority: Authority, *, checks: str = "none") -> Shell:
    """``checks`` is the value of ssl.endpoint.identification.algorithm."""
    context = authority.client(ssl_endpoint_identification_algorithm=checks)
    shell = Shell(ShellSettings("a:1", "a", request_timeout_ms=1, deadline_ms=1, context=context))
    shell.core = core
    return shell


def turn_until(shell: Shell, condition: Callable[[], bool]) -> None:
    end_ms = shell.now_ms() + DEADLINE_S * 1000
    while not condition():
        assert shell.now_ms() < end_ms
        shell.turn()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_plaintext_that_the_selector_does_not_see_is_read(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "READS_PER_TURN", 2)
    sent = bytes(range(256)) * 60  # one TLS record
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(sent)
        done.wait(DEADLINE_S)

    with serving(authority.broker(), serve) as address:
        core = Bytes(address, [], space_bytes=100)
        shell = shell_with(core, authority)
        # A turn may sleep now; it must not while OpenSSL has plaintext.
        core.due_ms = lambda: shell.now_ms() + 500  # type: ignore[method-assign]
        try:
            turn_until(shell, lambda: len(core.received_bytes) > 0)
            started_ms = shell.now_ms()
            for _ in range(len(sent) // 200):
                shell.turn()
            assert core.received_bytes == sent
            assert shell.now_ms() - started_ms < 10_000
            assert not shell._unread
        finally:
            done.set()
            shell.close()


def test_buffers_of_all_sizes_arrive_whole_at_a_slow_reader(authority: Authority) -> None:
    sizes = [1, 2, 16_383, 16_384, 16_385, 5, 12_000_000, 7, *range(40), 100_000, 20_000, 1]
    buffers: list[Buffer] = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    wanted = b"".join(buffers)
    arrived = bytearray()
    blocked = threading.Event()

    def serve(connection: socket.socket) -> None:
        # Reads only once the client's socket is full.
        blocked.wait(DEADLINE_S)
        while len(arrived) < len(wanted):
            arrived.extend(connection.recv(65_536))
        connection.sendall(b"done")

    with serving(authority.broker(), serve) as address:
        core = Bytes(address, buffers, space_bytes=100)
        shell = shell_with(core, authority)
        try:
            turn_until(shell, lambda: 1 in shell._sockets and shell._sockets[1].is_connected)
            assert shell._sockets[1].unsent, "the socket is full"
            blocked.set()
            turn_until(shell, lambda: core.received_bytes == b"done" or core.why is not None)
            assert arrived == wanted
            assert core.received_bytes == b"done"
        finally:
            shell.close()


def test_small_buffers_are_joined_and_large_ones_are_sent_as_they_are(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = ssl.SSLSocket.send

    def counted(connection: ssl.SSLSocket, data: Any, flags: int = 0) -> int:
        sent.append(len(data))
        return send(connection, data, flags)

    monkeypatch.setattr(ssl.SSLSocket, "send", counted)
    with serving(authority.broker(), lambda connection: connection.recv(1 << 20)) as address:
        core = Bytes(address, [bytes(100)] * 50 + [bytes(30_000)], space_bytes=100)
        shell = shell_with(core, authority)
        try:
            turn_until(shell, lambda: sum(sent) >= 35_000)
            assert sent[:2] == [5_000, 30_000]
        finally:
            shell.close()


@pytest.mark.parametrize(
    ("checks", "days", "line"),
    [
        ("none", -1, "the broker's certificate has expired"),
        (
            "https",
            365,
            "the broker's certificate is not for 127.0.0.1",
        ),
    ],
)
def test_what_is_wrong_with_a_certificate_is_said(
    authority: Authority, checks: str, days: int, line: str
) -> None:
    assert HOST != "127.0.0.1"
    with serving(authority.broker(valid_days=days), lambda connection: None) as address:
        core = Bytes(address, [], space_bytes=100)
        shell = shell_with(core, authority, checks=checks)
        try:
            turn_until(shell, lambda: core.why is not None)
            assert core.why is not None and line in core.why
            assert core.is_tls
        finally:
            shell.close()


@pytest.mark.parametrize(
    ("data", "line", "is_final"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the broker does not speak TLS there", True),
        (b"", "the broker closed the connection during the TLS handshake", False),
    ],
)
def test_peers_that_do_not_speak_tls_are_named(
    authority: Authority, data: bytes, line: str, is_final: bool
) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(data)

    with serving(None, serve) as address:
        core = Bytes(address, [], space_bytes=100)
        shell = shell_with(core, authority)
        try:
            turn_until(shell, lambda: core.why is not None)
            assert core.why is not None and line in core.why
            assert core.is_tls == is_final
        finally:
            shell.close()


def test_a_handshake_without_an_answer_ends(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_MS", 300)
    monkeypatch.setattr(operations, "FIRST_CONTACT_MS", 300)
    done = threading.Event()
    security = {"security.protocol": "ssl", "ssl.ca.pem": authority.pem}
    with serving(None, lambda connection: done.wait(DEADLINE_S)) as address:
        with Client(str(address), security=security) as client, pytest.raises(Unreachable, match="silent"):
            client.topics()
        done.set()


# Settings


@pytest.mark.parametrize(
    ("security", "line"),
    [
        (
            {"security.protocol": "tls"},
            "security.protocol: not plaintext, ssl, sasl_plaintext or sasl_ssl: tls",
        ),
        ({"ssl.ca.locatoin": "x"}, "unknown setting ssl.ca.locatoin; did you mean ssl.ca.location?"),
        (
            {"ssl.truststore.location": "x"},
            "ssl.truststore.location is a setting of Java's clients; use ssl.ca.location",
        ),
        (
            {"security.protocol": "ssl", "ssl.ca.location": "/no/such/file"},
            "ssl.ca.location /no/such/file: No such file or directory",
        ),
        (
            {"security.protocol": "ssl", "ssl.certificate.location": "/no/such/file"},
            "ssl.key.location is missing",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_line(security: dict[str, str], line: str) -> None:
    with pytest.raises(BadSecurity) as caught:
        Client("127.0.0.1:1", security=security)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_wrong_password_is_not_repeated(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    security = {**files.librdkafka("alice"), "ssl.key.pem": "hunter2", "ssl.key.password": "hunter3"}
    del security["ssl.key.location"]
    with pytest.raises(BadSecurity, match=r"ssl\.key\.pem") as caught:
        Client("127.0.0.1:1", security=security)
    assert "hunter" not in str(caught.value)


def test_the_files_of_tls_are_not_read_for_plaintext(bootstrap: str) -> None:
    with Client(bootstrap, security={"security.protocol": "plaintext", "ssl.ca.location": "/none"}) as client:
        assert isinstance(client.topics(), dict)
