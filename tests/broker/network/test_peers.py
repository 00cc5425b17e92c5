"""Connections between nodes, over a simulated network: what is answered, lost, late, and noticed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.network.peers import Peers
from penstock.environment import Environment, Listener, Stream
from penstock.protocol.apis import APIS
from penstock.protocol.messages.brokers import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from penstock.sim.loop import Loop, Process, Streams
from penstock.sim.network import Fabric

VERSION = 1
PORT = 9090


class Answering:
    """A node that answers heartbeats: with the broker's own epoch back, or not at all."""

    def __init__(self, fabric: Fabric, host: str) -> None:
        self.process = Process(fabric.loop, host)
        self.streams: list[Stream] = []
        self.received: list[int] = []
        self.is_silent = False
        self.padding = b""
        self.listener: Listener = fabric.door(self.process).listen(host, PORT, self._accept)

    def _accept(self, stream: Stream) -> None:
        self.streams.append(stream)
        incoming = bytearray()

        def readable() -> None:
            buffer = bytearray(65536)
            count = stream.recv_into(memoryview(buffer))
            if not count:
                if count == 0:
                    stream.close()
                return
            incoming.extend(buffer[:count])
            while len(incoming) >= 4:
                size = struct.unpack_from(">i", incoming)[0]
                if len(incoming) < 4 + size:
                    return
                frame = bytes(incoming[4 : 4 + size])
                del incoming[: 4 + size]
                self._answer(stream, frame)

        stream.on_readable(readable)

    def _answer(self, stream: Stream, frame: bytes) -> None:
        key, version, correlation_id, client = struct.unpack_from(">hhih", frame)
        api = APIS[key]
        request, _ = api.decode_request[version](memoryview(frame), 10 + client + 1)
        self.received.append(request.broker_id)
        if self.is_silent:
            return
        response = BrokerHeartbeatResponse(throttle_time_ms=request.broker_id, is_fenced=False)
        body = b"".join(bytes(part) for part in api.encode_response[version](response))
        content = struct.pack(">i", correlation_id) + b"\0" + body
        stream.send([struct.pack(">i", len(content)) + content])


class Setting:
    def __init__(self) -> None:
        self.loop = Loop(Streams(1))
        self.fabric = Fabric(self.loop)
        self.me = Process(self.loop, "me")
        files: Any = None
        self.peers = Peers(
            Environment(
                clock=self.me.clock,
                files=files,
                network=self.fabric.door(self.me),
                random=random.Random(1),
                spawn=self.me.spawn,
                processes=None,  # type: ignore[arg-type]
            )
        )
        self.other = Answering(self.fabric, "other")
        self.peers.set_address(2, "other", PORT)
        self.lost: list[tuple[int, str]] = []
        self.peers.on_lost.append(lambda node, channel: self.lost.append((node, channel)))

    def ask(
        self, number: int, *, node: int = 2, channel: str = "heartbeat", timeout_ms: int = 1_000
    ) -> list[Any]:
        answers: list[Any] = []
        self.on_me(
            lambda: self.peers.call(
                node,
                channel,
                BrokerHeartbeatRequest(broker_id=number),
                VERSION,
                lambda answer: answers.append(None if answer is None else answer.throttle_time_ms),
                timeout_ms=timeout_ms,
            )
        )
        return answers

    def on_me(self, callback: Callable[[], None]) -> None:
        self.me.spawn.soon(callback)

    def run(self, duration_ms: float) -> None:
        self.loop.run_for(duration_ms)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_answers_come_to_those_who_asked_in_order(setting: Setting) -> None:
    asked = [setting.ask(number) for number in range(1, 51)]
    setting.run(500)
    assert asked == [[number] for number in range(1, 51)]
    assert setting.other.received == list(range(1, 51))
    assert len(setting.other.streams) == 1


def test_each_channel_has_a_connection_of_its_own(setting: Setting) -> None:
    first, second = setting.ask(1, channel="a"), setting.ask(2, channel="b")
    setting.run(500)
    assert (first, second) == ([1], [2])
    assert len(setting.other.streams) == 2


def test_a_node_without_an_address_gives_no_answer(setting: Setting) -> None:
    answers = setting.ask(1, node=9)
    setting.run(100)
    assert answers == [None]


def test_nobody_listening_is_told_from_silence(setting: Setting) -> None:
    setting.other.listener.close()
    answers = setting.ask(1)
    setting.run(200)
    assert answers == [None]
    assert setting.peers.is_refused(2, "heartbeat")


def test_an_answer_that_does_not_come_ends_the_wait_of_all_behind_it(setting: Setting) -> None:
    setting.other.is_silent = True
    asked = [setting.ask(number, timeout_ms=300) for number in (1, 2)]
    setting.run(1_000)
    assert asked == [[None], [None]]
    setting.other.is_silent = False
    after = setting.ask(3)
    setting.run(500)
    assert after == [3], "the next call makes a new connection"


def test_a_late_answer_is_not_taken_for_the_answer_to_another_request(setting: Setting) -> None:
    setting.fabric.cut("other", "me")
    first = setting.ask(1, timeout_ms=300)
    setting.run(400)
    setting.fabric.mend("other", "me")
    second = setting.ask(2)
    setting.run(5_000)
    assert first == [None]
    assert second == [2]


def test_the_end_of_a_process_is_noticed_at_once(setting: Setting) -> None:
    answers = setting.ask(1)
    setting.run(200)
    assert answers == [1]
    setting.other.process.end()
    setting.run(200)
    assert setting.lost == [(2, "heartbeat")]


def test_a_process_whose_connections_end_before_its_listener_is_noticed_too(setting: Setting) -> None:
    setting.ask(1)
    setting.run(200)
    setting.other.streams[0].close()
    setting.run(20)
    assert len(setting.other.streams) == 2, "the probe was let in, by nobody"
    setting.other.process.end()
    setting.run(2_000)
    assert setting.lost == [(2, "heartbeat")]


def test_a_closed_connection_to_a_node_that_lives_is_not_its_end(setting: Setting) -> None:
    setting.ask(1)
    setting.run(200)
    setting.other.streams[0].close()
    setting.run(5_000)
    assert setting.lost == []
    again = setting.ask(2)
    setting.run(500)
    assert again == [2]


def test_a_new_address_is_used_from_the_next_call_on(setting: Setting) -> None:
    setting.ask(1)
    setting.run(200)
    third = Answering(setting.fabric, "third")
    setting.on_me(lambda: setting.peers.set_address(2, "third", PORT))
    setting.run(100)
    answers = setting.ask(5)
    setting.run(500)
    assert answers == [5]
    assert third.received == [5]


def test_nothing_is_answered_after_closing(setting: Setting) -> None:
    setting.other.is_silent = True
    answers = setting.ask(1)
    setting.run(100)
    setting.on_me(setting.peers.close)
    setting.run(100)
    assert answers == [None]
    late = setting.ask(2)
    setting.run(100)
    assert late == [None]
