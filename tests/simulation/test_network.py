"""The network model: bytes in order or a broken connection, never anything else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.environment import Network, Stream
from penstock.sim.loop import Loop, Process, Streams
from penstock.sim.network import Fabric


class End:
    """Reads all it can; writes what it is told, as the window allows."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.received = b""
        self.has_ended = False
        self.failed = False
        self._unsent = b""
        stream.on_readable(self._readable)

    def _readable(self) -> None:
        buffer = bytearray(1000)
        count = self.stream.recv_into(memoryview(buffer))
        if count == 0:
            self.has_ended = True
            self.stream.on_readable(None)
        elif count is not None:
            self.received += buffer[:count]

    def write(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self.stream.send([self._unsent])
        except OSError:
            self.failed = True
            self.stream.on_writable(None)
            return
        self._unsent = self._unsent[sent:]
        self.stream.on_writable(self._flush if self._unsent else None)

    def read_no_more(self) -> None:
        self.stream.on_readable(None)

    def read_on(self) -> None:
        self.stream.on_readable(self._readable)


class Pair:
    """A server and a client on two hosts."""

    def __init__(self, seed: int = 1) -> None:
        self.loop = Loop(Streams(seed))
        self.fabric = Fabric(self.loop)
        self.server = Process(self.loop, "server")
        self.client = Process(self.loop, "client")
        self.accepted: list[End] = []
        self.listen()

    def listen(self) -> None:
        door: Network = self.fabric.door(self.server)
        self.listener = door.listen("server", 9092, lambda stream: self.accepted.append(End(stream)))

    def connect(self, within_ms: float = 30_000) -> End | OSError:
        results: list[End | OSError] = []

        def done(stream: Stream | None, error: OSError | None) -> None:
            if stream is not None:
                results.append(End(stream))
            else:
                assert error is not None
                results.append(error)

        self.fabric.door(self.client).connect("server", 9092, done)
        assert results == [], "never at once"
        assert self.loop.run_until(lambda: bool(results), within_ms)
        return results[0]

    def connected(self) -> tuple[End, End]:
        near = self.connect()
        assert isinstance(near, End)
        assert self.loop.run_until(lambda: bool(self.accepted), 1000)
        return near, self.accepted[-1]


def test_bytes_arrive_in_order_both_ways() -> None:
    pair = Pair()
    near, far = pair.connected()
    pair.fabric.weather.splits = 0.5
    for number in range(100):
        near.write(b"%d " % number)
        far.write(b"%d," % number)
    pair.loop.run_for(1000)
    assert far.received == b"".join(b"%d " % number for number in range(100))
    assert near.received == b"".join(b"%d," % number for number in range(100))


def test_a_sender_is_stopped_by_a_reader_that_does_not_read() -> None:
    pair = Pair()
    near, far = pair.connected()
    far.read_no_more()
    data = bytes(1_000_000)
    near.write(data)
    pair.loop.run_for(10_000)
    far.read_on()
    pair.loop.run_for(1)
    assert 0 < len(far.received) < len(data)
    pair.loop.run_for(60_000)
    assert far.received == data


def test_nobody_listening_is_refused_at_once() -> None:
    pair = Pair()
    pair.listener.close()
    assert isinstance(pair.connect(within_ms=100), ConnectionRefusedError)
    pair.listen()
    pair.server.end()
    assert isinstance(pair.connect(within_ms=100), ConnectionRefusedError)


def test_a_host_that_lives_may_refuse_and_what_is_connected_goes_on() -> None:
    pair = Pair()
    before = pair.connect()
    assert isinstance(before, End)
    pair.fabric.refuse("server", 9092)
    assert isinstance(pair.connect(), ConnectionRefusedError)
    before.write(b"still here")
    pair.loop.run_for(1_000)
    assert pair.accepted[0].received == b"still here"
    pair.fabric.refuse_no_more("server", 9092)
    assert isinstance(pair.connect(), End)


def test_a_host_without_power_does_not_answer() -> None:
    pair = Pair()
    pair.fabric.power_lost("server")
    assert isinstance(pair.connect(), TimeoutError)
    assert pair.loop.now_ms > 5_000


def test_the_peer_of_a_dead_process_hears_of_it() -> None:
    pair = Pair()
    near, far = pair.connected()
    far.write(b"last words")
    pair.server.end()
    pair.loop.run_for(100)
    assert near.received == b"last words"
    assert near.has_ended


def test_the_peer_of_a_machine_without_power_does_not_until_it_is_back() -> None:
    pair = Pair()
    near, _ = pair.connected()
    pair.fabric.power_lost("server")
    pair.server.end()
    near.write(b"hello?")
    pair.loop.run_for(2_000)
    assert not near.has_ended
    pair.fabric.power_back("server")
    pair.loop.run_for(5_000)
    assert near.has_ended


def test_a_short_cut_only_delays() -> None:
    pair = Pair()
    near, far = pair.connected()
    for source, target in (("server", "client"), ("client", "server")):
        pair.fabric.cut(source, target)
    near.write(b"patience")
    pair.loop.run_for(3_000)
    assert far.received == b""
    pair.fabric.mend_all()
    pair.loop.run_for(3_000)
    assert far.received == b"patience"
    assert not near.has_ended


def test_a_long_cut_breaks_the_connection_of_who_sent_and_the_other_learns_it_when_it_sends() -> None:
    pair = Pair()
    near, far = pair.connected()
    pair.fabric.cut("client", "server")
    near.write(b"hello?")
    pair.loop.run_for(30_000)
    assert near.has_ended
    near.stream.close()
    assert not far.has_ended
    pair.fabric.mend_all()
    pair.loop.run_for(10_000)
    assert not far.has_ended, "nothing was sent that could be answered with a reset"
    far.write(b"are you there?")
    pair.loop.run_for(10_000)
    assert far.has_ended
    assert far.received == b""


def test_a_one_way_cut_lets_the_other_way_through() -> None:
    pair = Pair()
    near, far = pair.connected()
    pair.fabric.cut("client", "server")
    far.write(b"down")
    near.write(b"up")
    pair.loop.run_for(1_000)
    assert near.received == b"down"
    assert far.received == b""


def test_a_paused_process_is_connected_to_by_its_kernel() -> None:
    pair = Pair()
    pair.server.pause(5_000)
    near = pair.connect(within_ms=1_000)
    assert isinstance(near, End)
    near.write(b"waiting")
    pair.loop.run_for(1_000)
    assert pair.accepted == []
    pair.loop.run_for(5_000)
    assert pair.accepted[0].received == b"waiting"


def test_a_reset_loses_what_is_on_its_way() -> None:
    pair = Pair()
    near, far = pair.connected()
    near.write(b"gone")
    assert pair.fabric.reset_some("client", "server") == 1
    pair.loop.run_for(1_000)
    assert far.received == b""
    assert near.has_ended and far.has_ended
    near.write(b"more")
    assert near.failed


def test_who_closes_without_reading_breaks_the_connection() -> None:
    pair = Pair()
    near, far = pair.connected()
    far.read_no_more()
    near.write(b"unread")
    pair.loop.run_for(100)
    far.stream.close()
    pair.loop.run_for(100)
    near.write(b"more")
    assert near.failed


def test_a_port_can_be_listened_on_once_and_again_after_the_process_ended() -> None:
    pair = Pair()
    other = Process(pair.loop, "server")
    with pytest.raises(OSError):
        pair.fabric.door(other).listen("server", 9092, lambda stream: None)
    pair.server.end()
    pair.fabric.door(other).listen("server", 9092, lambda stream: None)
    assert pair.fabric.door(other).listen("server", 0, lambda stream: None).address[1] > 1024


def test_closed_connections_are_forgotten() -> None:
    pair = Pair()
    for _ in range(10):
        near, far = pair.connected()
        near.stream.close()
        pair.loop.run_for(100)
        far.stream.close()
    pair.loop.run_for(1_000)
    assert pair.fabric.open_streams == 0
    assert not pair.client.on_end


@given(st.integers(0, 1_000_000))
def test_whatever_happens_a_prefix_of_what_was_sent_arrives(seed: int) -> None:
    pair = Pair(seed)
    chance = random.Random(seed)
    weather = pair.fabric.weather
    weather.splits, weather.clogs = chance.choice([0, 0.3]), chance.choice([0, 0.1])
    near, far = pair.connected()
    sent = {near: b"", far: b""}
    for _ in range(30):
        what = chance.randrange(8)
        if what < 4:
            end = chance.choice([near, far])
            data = chance.randbytes(chance.choice([1, 100, 10_000]))
            sent[end] += data
            end.write(data)
        elif what == 4:
            pair.fabric.cut(*chance.sample(["client", "server"], 2))
        elif what == 5:
            pair.fabric.mend_all()
        elif what == 6:
            chance.choice([pair.client, pair.server]).pause(chance.uniform(1, 3_000))
        elif chance.random() < 0.1:
            pair.fabric.reset_some("client", "server")
        pair.loop.run_for(chance.choice([0.1, 10, 2_000]))
    assert sent[near].startswith(far.received)
    assert sent[far].startswith(near.received)
    pair.fabric.mend_all()
    pair.loop.run_for(120_000)
    for end, other in ((near, far), (far, near)):
        assert sent[end].startswith(other.received)
        if not (near.has_ended or far.has_ended or near.failed or far.failed):
            assert other.received == sent[end], "what was not broken was delivered"
