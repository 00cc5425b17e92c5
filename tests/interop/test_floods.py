"""Floods of connections against a real broker, on each kind of port: idle ones, and ones that do not go on.

All the while another client on the same port, librdkafka, produces and consumes and hears of no error. What the
flood costs the broker is bounded, and afterwards nothing of it is left. ``make interop-long`` sends ten thousand to
each port; CI sends fewer.
"""

from __future__ import annotations

import random
import resource
import shutil
import socket
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.broker.memory import MEGABYTE, forget_peak, open_files, peak_bytes, resident_bytes
from tests.broker.network.test_bad_inputs import FrugalBroker
from tests.cluster.wire import NoAnswer, Wire
from tests.interop.client import PATIENCE_S
from tests.interop.ports import HELLO, LISTENERS, Ports, SteadyClient, ports
from tests.interop.test_tls import address, client_hello, produce_and_consume
from tests.support import BrokerProcess, wait_until
from tests.tls.files import TlsFiles
from tests.tls.forgery import Forger, client_with_secrets

KINDS = ("idle", "silent", "begun")
FEW, MANY = 250, 10_000
# What one more connection may cost: most of it are the buffers of OpenSSL.
BYTES_PER_CONNECTION = {
    "PLAINTEXT": 16 << 10,
    "SSL": 96 << 10,
    "SASL_PLAINTEXT": 16 << 10,
    "SASL_SSL": 96 << 10,
}
# That the broker opens for other reasons meanwhile.
SPARE_FILES = 20
# Two times what the broker accepts in a row.
KEY_UPDATES = 20_000
BYTES_FOR_ALL = 48 * MEGABYTE


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("floods"))


@pytest.fixture(scope="module")
def broker(files: TlsFiles) -> Iterator[Ports]:
    with ports(files) as broker:
        yield broker


class Flood:
    """Connections to one listener of a broker, of a test's own addresses."""

    def __init__(self, stack: ExitStack, broker: Ports, listener: str) -> None:
        self._stack = stack
        self._broker = broker
        self._listener = listener
        context = broker.context(listener)
        # The first message, of which strangers send a part.
        self._first = b"\0\0\1\0\0\x12\0\3" if context is None else client_hello(context)
        self.idle: list[Wire] = []
        self.half_open: list[socket.socket] = []

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        peer = self._stack.enter_context(
            socket.create_connection(
                self._broker.process.addresses[self._listener], PATIENCE_S, source_address=(source, 0)
            )
        )
        self.half_open.append(peer)
        return peer

    def pour(self, count: int, kinds: Sequence[str]) -> None:
        """Connections of these kinds in turn: let in and idle, silent from the start, or only begun."""
        for number in range(count):
            match kinds[number % len(kinds)]:
                case "idle":
                    self.idle.append(self.log_in())
                case "silent":
                    self.connect()
                case "begun":
                    # A part of the first message, or all of it, to which the answer is not read.
                    self.connect().sendall(self._first[: random.choice((8, 100, len(self._first)))])

    def log_in(self) -> Wire:
        """A client that may send any request. Raises NoAnswer."""
        return self._stack.enter_context(self._broker.log_in(self._listener))

    @property
    def has_deadline(self) -> bool:
        """Whether those that do not go on are closed after seconds, and not after minutes."""
        return self._listener != "PLAINTEXT"


def is_over(peer: socket.socket) -> bool:
    """Whether the broker has closed a connection."""
    peer.setblocking(False)
    try:
        while peer.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def are_over(peers: Sequence[socket.socket]) -> bool:
    return all(map(is_over, peers))


def has_released(broker: Ports, files_before: int) -> bool:
    return open_files(broker.pid) < files_before + SPARE_FILES


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("listeners", "kinds", "count"),
    [
        pytest.param(LISTENERS, KINDS, FEW, id="few"),
        *(
            pytest.param((name,), kinds, MANY, id=f"{name}-{kinds[0]}", marks=pytest.mark.interop_long)
            for name in LISTENERS
            for kinds in (("idle",), ("silent", "begun"))
        ),
    ],
)
def test_idle_and_half_open_connections_cost_little_and_disturb_nobody(
    broker: Ports, listeners: Sequence[str], kinds: Sequence[str], count: int
) -> None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < count + 2_000:
        pytest.skip("too few descriptors allowed")
    if count == MANY:
        # One that has no memory left over from another flood.
        broker.process.stop()
        broker.process.start()
    with ExitStack() as steady:
        clients = [
            steady.enter_context(SteadyClient(broker.librdkafka(name), f"{name}-{count}"))
            for name in listeners
        ]
        before, files_before = resident_bytes(broker.pid), open_files(broker.pid)
        forget_peak(broker.pid)
        with ExitStack() as stack:
            floods = [Flood(stack, broker, name) for name in listeners]
            for flood in floods:
                flood.pour(count, kinds)
            for client in clients:
                client.wait_for_more()
            # Below the limits, newcomers are let in.
            for flood in floods:
                assert not flood.log_in().call(HELLO, 3).error_code
                if flood.has_deadline:
                    wait_until(
                        partial(are_over, flood.half_open),
                        PATIENCE_S,
                        "those that do not go on are closed",
                    )
                assert not any(wire.call(HELLO, 3).error_code for wire in flood.idle)
            cost = peak_bytes(broker.pid) - before
        wait_until(partial(has_released, broker, files_before), PATIENCE_S, "the connections are released")
    print(f"{cost / MEGABYTE:.0f} MB for {count} connections ({', '.join(kinds)}) to each of {listeners}")
    assert cost < BYTES_FOR_ALL + sum(count * BYTES_PER_CONNECTION[name] for name in listeners)
    for name in listeners:
        produce_and_consume(broker.librdkafka(name), f"after-{name}-{count}")
    assert "Traceback" not in broker.process.log_tail()


LIMITED = {"max.connections": "300", "max.connections.per.ip": "100"}
SOURCES = [f"127.0.0.{number}" for number in range(2, 6)]


@pytest.mark.parametrize("by", ["settings", "descriptors"])
def test_connections_beyond_the_limits_are_closed_and_those_within_go_on(files: TlsFiles, by: str) -> None:
    kind, limits, total_max, per_address_max = (
        (BrokerProcess, LIMITED, 300, 100)
        if by == "settings"
        # Half of what the system allows.
        else (FrugalBroker, {}, FrugalBroker.descriptors // 2, FrugalBroker.descriptors)
    )
    with ports(files, limits, kind) as broker, ExitStack() as steady:
        clients = [steady.enter_context(SteadyClient(broker.librdkafka(name), name)) for name in LISTENERS]
        for name in LISTENERS:
            before = open_files(broker.pid)
            with ExitStack() as stack:
                flood = Flood(stack, broker, name)
                wait_until(partial(is_refused, flood), PATIENCE_S, "a newcomer is refused")
                are_open = Counter(peer.getsockname()[0] for peer in flood.half_open if not is_over(peer))
                assert are_open.total() <= total_max
                assert all(are_open[source] <= per_address_max for source in SOURCES)
                for client in clients:
                    client.wait_for_more()
            wait_until(partial(has_released, broker, before), PATIENCE_S, "the connections are released")
            with ExitStack() as stack:
                assert not Flood(stack, broker, name).log_in().call(HELLO, 3).error_code
        assert "too many connections" in broker.process.log_tail()


def is_refused(flood: Flood) -> bool:
    """Whether a client is closed behind more connections than there may be. On a slow machine these end first."""
    for source in SOURCES:
        for _ in range(120):
            flood.connect(source)
    try:
        flood.log_in().call(HELLO, 3)
    except NoAnswer:
        return True
    return False


@pytest.mark.parametrize(("listener", "requests_another"), [("SSL", True), ("SASL_SSL", False)])
def test_key_updates_without_end_close_the_connection_and_disturb_nobody(
    broker: Ports, tmp_path: Path, listener: str, requests_another: bool
) -> None:
    with SteadyClient(broker.librdkafka(listener), listener) as client:
        before = resident_bytes(broker.pid)
        forget_peak(broker.pid)
        context = client_with_secrets(broker.files.authority.client(), tmp_path / "secrets")
        peer = socket.create_connection(broker.process.addresses[listener], PATIENCE_S)
        with context.wrap_socket(peer, server_hostname="127.0.0.1") as connected:
            forger = Forger(tmp_path / "secrets")
            updates = b"".join(
                forger.key_update(requests_another=requests_another) for _ in range(KEY_UPDATES)
            )
            # Past the library, which knows nothing of them.
            with suppress(OSError):
                socket.socket.sendall(connected, updates)
            wait_until(lambda: has_ended(connected), PATIENCE_S, "it is closed")
        client.wait_for_more()
        assert peak_bytes(broker.pid) - before < 16 * MEGABYTE
    assert "Traceback" not in broker.process.log_tail()


def has_ended(connected: ssl.SSLSocket) -> bool:
    connected.setblocking(False)
    try:
        return socket.socket.recv(connected, 65536) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize("listener", ["SSL", "SASL_SSL"])
def test_renegotiation_is_refused_and_disturbs_nobody(broker: Ports, listener: str) -> None:
    with SteadyClient(broker.librdkafka(listener), listener) as client:
        # A line that begins with R makes OpenSSL's client renegotiate.
        process = subprocess.run(
            ["openssl", "s_client", "-connect", address(broker.process, listener), "-tls1_2"],
            input="R\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert "no renegotiation" in process.stderr
        client.wait_for_more()
