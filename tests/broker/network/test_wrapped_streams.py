"""A connection over a stream that is not a socket: one that lies around another and changes the bytes, as TLS does.

It has what makes TLS hard for those above it: records that arrive in pieces, plain bytes left over that no socket
tells of, and bytes taken that are not on their way yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.broker.network.peers import Peers
from penstock.environment import Buffer, File, Stream
from penstock.protocol.apis import APIS
from penstock.protocol.messages.brokers import BrokerHeartbeatRequest
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.schema import Message, decoder
from tests.broker.phrases import batch, fetch_request, produce_request
from tests.broker.stage import ManualSpawn, Peer, ScriptedStream, Stage
from tests.broker.wire import encode_request

RECORD_BYTES = 1_000
PENDING_BYTES_MAX = 4_000


def scrambled(data: Buffer) -> bytes:
    """In records: a length, then each byte changed. Applied to a record's content it undoes itself."""
    found = bytearray()
    for start in range(0, len(data), RECORD_BYTES):
        piece = bytes(data[start : start + RECORD_BYTES])
        found += len(piece).to_bytes(2, "big") + changed(piece)
    return bytes(found)


def changed(data: Buffer) -> bytes:
    return bytes(byte ^ 0x5A for byte in data)


def unscramble(data: bytearray) -> bytes:
    """Take the whole records off the front. Raises OSError for what is none."""
    plain = bytearray()
    while len(data) >= 2:
        size = int.from_bytes(data[:2], "big")
        if size > RECORD_BYTES:
            raise OSError("a record that is too long")
        if len(data) < 2 + size:
            break
        plain += changed(data[2 : 2 + size])
        del data[: 2 + size]
    return bytes(plain)


class ScramblingStream:
    def __init__(self, inner: Stream, spawn: ManualSpawn) -> None:
        self.peer = inner.peer
        self._inner = inner
        self._spawn = spawn
        self._received = bytearray()
        self._plain = bytearray()
        self._pending = bytearray()
        self._has_ended = False
        self._is_told = False
        self._readable: Callable[[], None] | None = None
        self._writable: Callable[[], None] | None = None

    def recv_into(self, buffer: memoryview) -> int | None:
        scratch = bytearray(4096)
        while not self._has_ended and (count := self._inner.recv_into(memoryview(scratch))) is not None:
            self._has_ended = count == 0
            self._received += scratch[:count]
        self._plain += unscramble(self._received)
        count = min(len(buffer), len(self._plain))
        if count == 0:
            return 0 if self._has_ended else None
        buffer[:count] = self._plain[:count]
        del self._plain[:count]
        self._tell_of_rest()
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        taken = 0
        for buffer in buffers:
            for start in range(0, len(buffer), RECORD_BYTES):
                if len(self._pending) >= PENDING_BYTES_MAX:
                    return taken
                piece = memoryview(buffer)[start : start + RECORD_BYTES]
                self._pending += scrambled(piece)
                taken += len(piece)
                self._flush()
        return taken

    def send_file(self, file: File, position: int, size: int) -> int:
        return self.send([file.read_at(position, min(size, PENDING_BYTES_MAX))])

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        self._readable = callback
        self._inner.on_readable(None if callback is None else lambda: self._call(self._readable))
        self._tell_of_rest()

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._writable = callback
        self._tell_of_room()

    def close(self) -> None:
        self._readable = self._writable = None
        self._inner.close()

    def _tell_of_rest(self) -> None:
        if self._plain and self._readable is not None:
            self._spawn.soon(lambda: self._call(self._readable))

    def _tell_of_room(self) -> None:
        if self._writable is not None and len(self._pending) < PENDING_BYTES_MAX and not self._is_told:
            self._is_told = True
            self._spawn.soon(self._has_room)

    def _has_room(self) -> None:
        self._is_told = False
        self._call(self._writable)
        self._tell_of_room()

    def _flush(self) -> None:
        sent = self._inner.send([bytes(self._pending)])
        del self._pending[:sent]
        self._inner.on_writable(self._drained if self._pending else None)

    def _drained(self) -> None:
        self._flush()
        self._tell_of_room()

    def _call(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            callback()


class Client:
    """The other end of such a stream, on a stage with a broker."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.socket = ScriptedStream("10.0.0.9")
        stage.accept(ScramblingStream(self.socket, stage.spawn))
        self._answers = bytearray()

    def arrive(self, data: bytes) -> None:
        self.socket.arrive(data)
        self._stage.spawn.run()

    def call(self, request: Message, version: int) -> Any:
        self.arrive(scrambled(encode_request(request, version)))
        (content,) = self.frames()
        api = APIS[request.KEY]
        start = 4 + api.response_header_version(version)
        return decoder(api.response, version)(memoryview(content), start)[0]

    def frames(self) -> list[bytes]:
        self._answers += unscramble(self.socket.sent)
        found = []
        while len(self._answers) >= 4:
            end = 4 + int.from_bytes(self._answers[:4], "big")
            if len(self._answers) < end:
                break
            found.append(bytes(self._answers[4:end]))
            del self._answers[:end]
        return found


def create(name: str) -> CreateTopicsRequest:
    return CreateTopicsRequest(topics=[CreatableTopic(name=name, num_partitions=1, replication_factor=1)])


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_request_that_comes_in_pieces_of_records_is_answered(stage: Stage) -> None:
    client = Client(stage)
    for byte in scrambled(encode_request(ApiVersionsRequest(), 0)):
        assert client.frames() == []
        client.arrive(bytes([byte]))
    assert len(client.frames()) == 1


def test_requests_left_in_the_stream_are_read_though_nothing_more_arrives(stage: Stage) -> None:
    client = Client(stage)
    requests = encode_request(ApiVersionsRequest(), 0) * 3_000
    client.arrive(scrambled(requests))
    assert len(client.frames()) == 3_000


def test_records_larger_than_the_streams_own_buffers_go_in_and_out(stage: Stage) -> None:
    plain, client = Peer(stage), Client(stage)
    plain.call(create("t"), 7)
    sent = batch(b"x" * 200_000)
    produced = client.call(produce_request("t", sent, acks=1), 9)
    assert produced.responses[0].partition_responses[0].error_code == 0
    fetched = client.call(fetch_request("t", 0, max_wait_ms=0), 11)
    assert len(bytes(fetched.responses[0].partitions[0].records)) == len(sent)


def test_a_peer_that_reads_slowly_gets_all_of_a_large_answer(stage: Stage) -> None:
    plain, client = Peer(stage), Client(stage)
    plain.call(create("t"), 7)
    client.call(produce_request("t", batch(b"x" * 200_000), acks=1), 9)
    client.socket.room = 10
    client.arrive(scrambled(encode_request(fetch_request("t", 0, max_wait_ms=0), 11)))
    assert client.frames() == []
    for _ in range(10_000):
        client.socket.take(997)
        stage.spawn.run()
        if frames := client.frames():
            break
    assert len(frames[0]) > 200_000


def test_what_is_no_record_closes_the_connection_and_says_why(stage: Stage) -> None:
    client, other = Client(stage), Client(stage)
    client.arrive(b"\xff\xff")
    assert client.socket.is_closed
    assert stage.refused[-1] == "cannot receive: a record that is too long"
    assert other.call(ApiVersionsRequest(), 0).error_code == 0


def test_a_peer_whose_bytes_cannot_be_read_is_lost() -> None:
    stage = Stage()
    sockets: list[ScriptedStream] = []

    class Network:
        def connect(self, host: str, port: int, done: Callable[[Any, OSError | None], None]) -> None:
            sockets.append(ScriptedStream(host))
            done(ScramblingStream(sockets[-1], stage.spawn), None)

    peers = Peers(replace(stage.environment, network=cast(Any, Network())))
    peers.set_address(2, "host", 9093)
    answers: list[Any] = []
    peers.call(2, "any", BrokerHeartbeatRequest(), 1, answers.append, timeout_ms=1_000)
    sockets[0].arrive(b"\xff\xff")
    stage.spawn.run()
    assert sockets[0].is_closed
    assert answers == [None]
