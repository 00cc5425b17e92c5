"""The owner of one end of a TLS connection, which reads and writes as a broker's connection does."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from penstock.tls.stream import TlsStream
from tests.tls.authority import HOST, Authority
from tests.tls.memory import MemoryStream, Turns, memory_pair


class Party:
    def __init__(
        self,
        turns: Turns,
        inner: MemoryStream,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        hostname: str | None = None,
        buffer_bytes: int = 1 << 16,
    ) -> None:
        self.inner = inner
        self.stream = TlsStream(inner, context, turns, server_side=server_side, server_hostname=hostname)
        self.stream.on_established = self._established
        self.established = 0
        self.received = bytearray()
        self.has_ended = False
        self.errors: list[OSError] = []
        self.readable_calls = 0
        self.writable_calls = 0
        self.on_received: Callable[[], None] | None = None
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._unsent: list[bytes] = []

    @property
    def error(self) -> str:
        assert len(self.errors) == 1, self.errors
        return str(self.errors[0])

    def read(self, wanted: bool = True) -> None:
        self.stream.on_readable(self._readable if wanted else None)

    def send(self, *buffers: bytes) -> None:
        """Send all of this, as the stream takes it."""
        self._unsent += buffers
        self._flush()

    @property
    def has_sent_all(self) -> bool:
        return not self._unsent

    def _established(self) -> None:
        self.established += 1

    def _readable(self) -> None:
        self.readable_calls += 1
        try:
            count = self.stream.recv_into(self._buffer)
        except OSError as error:
            self._failed(error)
            return
        if count is None:
            return
        if count == 0:
            self.has_ended = True
            self.read(False)
            return
        self.received += self._buffer[:count]
        if self.on_received is not None:
            self.on_received()

    def _flush(self) -> None:
        try:
            taken = self.stream.send(self._unsent) if self._unsent else 0
        except OSError as error:
            self._failed(error)
            return
        while self._unsent and taken >= len(self._unsent[0]):
            taken -= len(self._unsent.pop(0))
        if taken:
            self._unsent[0] = self._unsent[0][taken:]
        self.stream.on_writable(self._writable if self._unsent else None)

    def _writable(self) -> None:
        self.writable_calls += 1
        self._flush()

    def _failed(self, error: OSError) -> None:
        self.errors.append(error)
        self.stream.close()


class Connected:
    """A broker and a client on one loop."""

    def __init__(
        self,
        authority: Authority,
        *,
        broker: ssl.SSLContext | None = None,
        client: ssl.SSLContext | None = None,
        hostname: str = HOST,
        buffer_bytes: int = 1 << 16,
    ) -> None:
        self.turns = Turns()
        far, near = memory_pair(self.turns)
        self.broker = Party(
            self.turns, far, broker or authority.broker(), server_side=True, buffer_bytes=buffer_bytes
        )
        self.client = Party(
            self.turns,
            near,
            client or authority.client(),
            server_side=False,
            hostname=hostname,
            buffer_bytes=buffer_bytes,
        )

    def establish(self) -> Connected:
        self.turns.run_until(
            lambda: self.broker.stream.is_established and self.client.stream.is_established, 10_000
        )
        return self


def records(ciphertext: bytes | bytearray) -> list[int]:
    """The sizes of the TLS records in these bytes, which have to be whole."""
    sizes = []
    position = 0
    while position < len(ciphertext):
        size = int.from_bytes(ciphertext[position + 3 : position + 5], "big")
        sizes.append(size)
        position += 5 + size
    assert position == len(ciphertext)
    return sizes
