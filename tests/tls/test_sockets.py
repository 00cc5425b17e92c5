"""Over real sockets, against other programs: Python's own TLS client, and OpenSSL's."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.environment import Stream
from penstock.machine import MachineFiles, MachineNetwork, MachineSpawn
from penstock.tls.stream import TlsStream
from tests.tls.authority import HOST, Authority

TIMEOUT_S = 60
# Enough to fill the buffers of both kernels.
ECHOED_BYTES = 30_000_000


class Echo:
    """Sends back what it receives, and stops reading while that is not taken, as a broker does."""

    def __init__(self, stream: TlsStream) -> None:
        self.stream = stream
        self.received_bytes = 0
        self.error: OSError | None = None
        self.is_closed = False
        self._buffer = memoryview(bytearray(1 << 16))
        self._unsent = memoryview(b"")
        stream.on_readable(self._readable)

    def _readable(self) -> None:
        try:
            count = self.stream.recv_into(self._buffer)
        except OSError as error:
            self.error = error
            count = 0
        if count is None:
            return
        if count == 0:
            self._close()
            return
        self.received_bytes += count
        self._unsent = memoryview(bytes(self._buffer[:count]))
        self._send()

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self.stream.send([self._unsent]) :]
        except OSError as error:
            self.error = error
            self._close()
            return
        self.stream.on_writable(self._send if self._unsent else None)
        self.stream.on_readable(None if self._unsent else self._readable)

    def _close(self) -> None:
        self.is_closed = True
        self.stream.close()


class Listening:
    def __init__(self, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        spawn = MachineSpawn(loop)
        self.accepted: list[Echo] = []

        def accept(stream: Stream) -> None:
            self.accepted.append(Echo(TlsStream(stream, context, spawn, server_side=True)))

        self._listener = MachineNetwork(loop).listen("127.0.0.1", 0, accept)
        self.port = self._listener.address[1]

    def close(self) -> None:
        self._listener.close()
        for echo in self.accepted:
            echo.stream.close()


@contextmanager
def listening(context: ssl.SSLContext) -> Iterator[Listening]:
    server = Listening(context)
    try:
        yield server
    finally:
        server.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  the condition has no event, and ``run`` has a deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
def test_pythons_client_gets_its_bytes_back(authority: Authority, protocol: str) -> None:
    data = random.Random(1).randbytes(1 << 20)

    def talk(port: int) -> int:
        plain = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        with authority.client("alice").wrap_socket(plain, server_hostname=HOST) as connected:
            assert connected.version() == protocol
            sent = echoed = pauses = 0

            def read(end: int) -> None:
                nonlocal echoed
                while echoed < end:
                    piece = connected.recv(1 << 16)
                    start = echoed % len(data)
                    assert piece == (data[start:] + data)[: len(piece)]
                    echoed += len(piece)

            while sent < ECHOED_BYTES:
                connected.settimeout(0.2)
                try:
                    # OpenSSL wants the same bytes again if it could not send them.
                    sent += connected.send(data[sent % len(data) :][: 1 << 16])
                except TimeoutError:
                    # The broker does not read any more, because nobody reads what it sends.
                    pauses += 1
                    connected.settimeout(TIMEOUT_S)
                    read(echoed + (sent - echoed) // 2)
            connected.settimeout(TIMEOUT_S)
            read(sent)
            assert pauses
            connected.unwrap()
            return sent

    async def main() -> None:
        context = authority.broker(ssl_client_auth="required", ssl_enabled_protocols=protocol)
        with listening(context) as server:
            sent = await asyncio.get_running_loop().run_in_executor(None, talk, server.port)
            await until(lambda: server.accepted[0].is_closed)
            assert server.accepted[0].received_bytes == sent > 1 << 18
            assert server.accepted[0].stream.peer_name == "CN=alice,OU=x,O=y"
            assert server.accepted[0].error is None

    run(main())


def test_stream_is_also_a_client(authority: Authority, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3_000_000)
    (tmp_path / "f").write_bytes(data)

    def serve(listener: socket.socket) -> bytes:
        plain, _ = listener.accept()
        with authority.broker().wrap_socket(plain, server_side=True) as connected:
            received = b""
            while piece := connected.recv(1 << 16):
                received += piece
            return received

    async def main() -> None:
        loop = asyncio.get_running_loop()
        established = asyncio.Event()
        file = MachineFiles(16).open(str(tmp_path / "f"))
        position = 0

        def connected(stream: Stream | None, error: OSError | None) -> None:
            assert stream is not None, error
            tls = TlsStream(
                stream, authority.client(), MachineSpawn(loop), server_side=False, server_hostname=HOST
            )
            tls.on_established = established.set

            def send() -> None:
                nonlocal position
                position += tls.send_file(file, position, len(data) - position)
                if position == len(data):
                    tls.close()

            tls.on_writable(send)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = loop.run_in_executor(None, serve, listener)
            MachineNetwork(loop).connect("127.0.0.1", listener.getsockname()[1], connected)
            assert await serving == data
            assert established.is_set()

    run(main())


def test_alert_reaches_a_client_that_talks_on(authority: Authority) -> None:
    """A TLS 1.3 client may send before it is refused. It still gets the reason, and not a reset."""

    def talk(port: int) -> str:
        plain = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        with authority.client().wrap_socket(plain, server_hostname=HOST) as connected:
            try:
                connected.sendall(b"x" * 1_000)
                connected.recv(1)
            except ssl.SSLError as error:
                return str(error.reason)
        return "no error"

    async def main() -> None:
        with listening(authority.broker(ssl_client_auth="required")) as server:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, talk, server.port) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
            assert "the client sent no certificate" in str(server.accepted[0].error)

    run(main())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_renegotiation_is_refused(authority: Authority) -> None:
    def talk(port: int) -> str:
        # A line that begins with R makes OpenSSL's client renegotiate.
        process = subprocess.Popen(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        output = ""
        with process:
            process.stdin.write("hello\n")
            process.stdin.flush()
            while "hello" not in output:
                line = process.stdout.readline()
                assert line, output
                output += line
            process.stdin.write("R\n")
            process.stdin.flush()
            output += process.communicate(timeout=TIMEOUT_S)[0]
        return output

    async def main() -> None:
        with listening(authority.broker()) as server:
            loop = asyncio.get_running_loop()
            output = await loop.run_in_executor(None, talk, server.port)
            assert "RENEGOTIATING" in output and "no renegotiation" in output
            await until(lambda: server.accepted[0].is_closed)
            assert server.accepted[0].received_bytes == len("hello\n")

    run(main())
