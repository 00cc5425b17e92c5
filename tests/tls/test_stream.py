"""``TlsStream`` keeps what ``environment.Stream`` promises."""

from __future__ import annotations

import random
import ssl

import pytest

from penstock.tls.stream import LINGER_MS, PORTION_BYTES, TAKEN_BYTES_PER_CALL, UNSENT_BYTES_MAX, TlsStream
from tests.support_files import FakeClock, FakeFiles
from tests.tls.authority import HOST, Authority
from tests.tls.memory import Turns, memory_pair
from tests.tls.party import Connected, Party, records

# What encryption adds to a portion is a small part of it.
OVERHEAD = 1.02


def test_handshake_needs_nobody_to_read(authority: Authority) -> None:
    both = Connected(authority).establish()
    assert both.broker.established == both.client.established == 1
    assert both.broker.readable_calls == both.client.readable_calls == 0
    assert both.broker.stream.peer == "10.0.0.1"
    both.turns.settle()
    assert not both.broker.inner.is_watched and not both.client.inner.is_watched


def test_client_certificate_names_the_client(authority: Authority) -> None:
    broker = authority.broker(ssl_client_auth="required")
    both = Connected(authority, broker=broker, client=authority.client("alice")).establish()
    assert both.broker.stream.peer_name == "CN=alice,OU=x,O=y"
    assert Connected(authority).establish().broker.stream.peer_name is None


def test_requested_certificate_may_be_missing(authority: Authority) -> None:
    broker = authority.broker(ssl_client_auth="requested")
    assert Connected(authority, broker=broker).establish().broker.stream.peer_name is None
    both = Connected(authority, broker=broker, client=authority.client("bob")).establish()
    assert both.broker.stream.peer_name == "CN=bob,OU=x,O=y"


@pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
def test_bytes_arrive_in_both_directions(authority: Authority, protocol: str) -> None:
    both = Connected(authority, broker=authority.broker(ssl_enabled_protocols=protocol)).establish()
    both.broker.read()
    both.client.read()
    question, answer = random.Random(1).randbytes(300_000), random.Random(2).randbytes(3_000_000)
    both.client.send(question)
    both.broker.send(answer[:5], answer[5:100], answer[100:1_000_000], answer[1_000_000:])
    both.turns.settle()
    assert both.broker.received == question
    assert both.client.received == answer
    assert not both.broker.errors and not both.client.errors


def test_bytes_sent_one_at_a_time_arrive(authority: Authority) -> None:
    both = Connected(
        authority, broker=authority.broker(ssl_client_auth="required"), client=authority.client("a")
    )
    for inner in (both.broker.inner, both.client.inner):
        inner.send_bytes_max = inner.recv_bytes_max = 1
    both.establish()
    both.broker.read()
    both.client.send(b"hello")
    both.turns.settle()
    assert both.broker.received == b"hello"


def test_data_that_comes_with_the_end_of_the_handshake_is_read(authority: Authority) -> None:
    both = Connected(authority)
    both.broker.read()
    both.client.send(b"early")
    assert not both.client.has_sent_all, "nothing is taken before the handshake"
    both.turns.run_until(lambda: both.client.has_sent_all)
    both.turns.settle()
    assert both.client.writable_calls == 1
    assert both.broker.received == b"early"


def test_small_buffers_share_a_record(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.turns.settle()
    inbox = both.client.inner.inbox
    assert both.broker.stream.send([b"x"] * 1_000) == 1_000
    assert len(records(inbox)) == 1
    inbox.clear()
    # A header, a large buffer that is not copied but for its ends, and another header.
    assert both.broker.stream.send([b"h" * 100, memoryview(bytes(100_000)), b"h" * 100]) == 100_200
    assert len(records(inbox)) == 7
    assert all(size > 16_000 for size in records(inbox)[:-1])


def test_plaintext_left_after_a_pause_is_announced(authority: Authority) -> None:
    both = Connected(authority, buffer_bytes=10).establish()
    broker = both.broker

    def pause() -> None:
        broker.read(False)

    broker.on_received = pause
    broker.read()
    both.client.send(bytes(range(95)))
    for expected in [*range(10, 95, 10), 95]:
        both.turns.settle()
        assert len(broker.received) == expected
        assert not broker.inner.inbox, "the socket has nothing that would call"
        broker.read()
    assert broker.received == bytes(range(95))
    both.turns.settle()
    assert broker.readable_calls == 10


def test_small_buffer_gets_everything_without_a_pause(authority: Authority) -> None:
    both = Connected(authority, buffer_bytes=1).establish()
    both.broker.read()
    both.client.send(b"x" * 50, b"y" * 50)
    both.turns.settle()
    assert both.broker.received == b"x" * 50 + b"y" * 50


def test_buffer_without_room_is_no_end(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.send(b"x")
    assert both.broker.stream.recv_into(memoryview(bytearray())) is None
    assert both.broker.stream.recv_into(memoryview(bytearray(10))) == 1


def test_part_of_a_record_keeps_nobody_busy(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.broker.read()
    both.client.inner.send_bytes_max = 20
    both.client.stream.send([b"x" * 100])
    both.client.inner.send_bytes_max = 0
    both.turns.settle()
    assert not both.broker.received
    both.client.inner.send_bytes_max = 1_000
    both.turns.settle()
    assert both.broker.received == b"x" * 100


def test_slow_reader_takes_bounded_memory(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    taken = 0
    while count := both.broker.stream.send([bytes(10_000), bytes(200_000)]):
        taken += count
    assert UNSENT_BYTES_MAX - 1_000 <= taken <= (UNSENT_BYTES_MAX + PORTION_BYTES) * OVERHEAD
    called: list[int] = []

    def writable() -> None:
        called.append(len(both.client.received))
        both.broker.stream.on_writable(None)

    both.broker.stream.on_writable(writable)
    both.turns.settle()
    assert not called
    both.client.read()
    both.turns.settle()
    assert len(both.client.received) == taken
    assert len(called) == 1 and called[0] < taken, "called as soon as there is room"


def test_owner_is_called_while_the_stream_is_writable(authority: Authority) -> None:
    both = Connected(authority).establish()
    calls: list[int] = []
    both.broker.stream.on_writable(lambda: calls.append(1))
    for _ in range(5):
        both.turns.turn()
    assert len(calls) == 5


def test_one_call_takes_a_bounded_amount(authority: Authority) -> None:
    both = Connected(authority).establish()
    assert both.broker.stream.send([bytes(10_000_000)]) == TAKEN_BYTES_PER_CALL
    assert both.broker.stream.send([]) == both.broker.stream.send([b"", b""]) == 0


def test_file_range_is_encrypted(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.read()
    data = random.Random(3).randbytes(700_000)
    file = FakeFiles(FakeClock()).open("/f")
    file.append([data])
    taken = 0
    while taken < 600_000:
        count = both.broker.stream.send_file(file, 50_000 + taken, 600_000 - taken)
        assert 0 < count <= TAKEN_BYTES_PER_CALL
        taken += count
    both.turns.settle()
    assert both.client.received == data[50_000:650_000]
    with pytest.raises(OSError, match="shorter than the range"):
        both.broker.stream.send_file(file, 700_000, 10)


def test_file_range_waits_for_a_slow_reader(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    file = FakeFiles(FakeClock()).open("/f")
    file.append([bytes(2_000_000)])
    taken = 0
    while count := both.broker.stream.send_file(file, taken, 2_000_000 - taken):
        taken += count
    assert taken <= (UNSENT_BYTES_MAX + PORTION_BYTES) * OVERHEAD


def test_close_says_farewell(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.read()
    both.broker.send(b"last words")
    both.broker.stream.close()
    assert both.broker.inner.is_closed
    both.turns.settle()
    assert both.client.received == b"last words" and both.client.has_ended
    assert not both.client.errors


def test_farewell_without_closing_is_an_end(authority: Authority) -> None:
    """The peer may leave its socket open; the owner is still told."""
    both = Connected(authority).establish()
    both.turns.settle()
    # The peer of this test says farewell by hand.
    with pytest.raises(ssl.SSLWantReadError):
        both.client.stream._engine.unwrap()
    both.client.stream._answer()
    both.broker.read()
    both.turns.settle()
    assert both.broker.has_ended and not both.client.inner.is_closed


def test_close_still_delivers_what_was_taken(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    data = random.Random(4).randbytes(100_000)
    assert both.broker.stream.send([data]) == len(data)
    called: list[str] = []
    both.broker.stream.on_readable(lambda: called.append("readable"))
    both.broker.stream.on_writable(lambda: called.append("writable"))
    both.broker.stream.close()
    both.broker.stream.close()
    assert not both.broker.inner.is_closed
    both.client.send(b"unheard")
    both.client.read()
    both.turns.settle()
    assert both.client.received == data and both.client.has_ended
    assert both.broker.inner.is_closed and not called
    assert both.turns.timers == 0


def test_closed_stream_does_not_wait_for_ever(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    both.broker.stream.send([bytes(100_000)])
    both.broker.stream.close()
    both.turns.settle()
    both.turns.wait(LINGER_MS - 1)
    assert not both.broker.inner.is_closed
    both.turns.wait(1)
    assert both.broker.inner.is_closed


def test_closed_stream_says_when_it_is_gone(authority: Authority) -> None:
    gone: list[str] = []
    both = Connected(authority).establish()
    both.broker.stream.on_gone = lambda: gone.append("broker")
    both.client.stream.on_gone = lambda: gone.append("client")
    both.client.inner.inbox_bytes_max = 1_000
    both.broker.stream.send([bytes(100_000)])
    both.broker.stream.close()
    both.turns.settle()
    assert not gone and not both.broker.stream.is_gone
    both.client.inner.inbox_bytes_max = 1 << 30
    both.client.read()
    both.turns.settle()
    both.turns.wait(LINGER_MS)
    assert gone == ["broker"] and both.broker.stream.is_gone
    both.client.stream.close()
    assert gone == ["broker", "client"]


def test_stream_closed_after_an_error_does_not_wait(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.broker.read()
    both.client.inner.inbox_bytes_max = 0
    both.broker.stream.send([bytes(1_000)])
    both.client.inner.send([b"no record of TLS"])
    both.turns.settle()
    assert both.broker.errors
    assert both.broker.inner.is_closed and both.turns.timers == 0


def test_closed_stream_gives_up_when_the_peer_is_gone(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    both.broker.stream.send([bytes(100_000)])
    both.broker.stream.close()
    both.client.inner.close()
    both.turns.settle()
    assert both.broker.inner.is_closed and both.turns.timers == 0


def test_closed_stream_is_at_its_end(authority: Authority) -> None:
    stream = Connected(authority).establish().broker.stream
    stream.close()
    assert stream.recv_into(memoryview(bytearray(10))) == 0
    with pytest.raises(OSError, match="the stream is closed"):
        stream.send([b"x"])


def test_driven_handshake_waits_for_its_owner(authority: Authority) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    stream = TlsStream(far, authority.broker(), turns, server_side=True, is_driven=True)
    client = Party(turns, near, authority.client(), server_side=False, hostname=HOST)
    steps = 0
    while not stream.is_established:
        turns.settle()
        assert not far.is_watched and far.inbox
        steps += 1
        assert not stream.proceed()
    assert steps == 2
    received: list[int | None] = []
    stream.on_readable(lambda: received.append(stream.recv_into(memoryview(bytearray(10)))))
    client.send(b"abc")
    turns.settle()
    assert received == [3]
    assert not stream.proceed()


def test_driven_handshake_raises_its_error(authority: Authority) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    stream = TlsStream(far, authority.broker(), turns, server_side=True, is_driven=True)
    near.send([b"GET / HTTP/1.1\r\n\r\n"])
    for _ in range(2):
        with pytest.raises(OSError, match="does not speak TLS"):
            stream.proceed()
    stream.close()
    assert far.is_closed and stream.is_gone


def test_close_before_the_handshake(authority: Authority) -> None:
    both = Connected(authority)
    both.broker.read()
    both.client.read()
    both.turns.turn()
    both.broker.stream.close()
    assert both.broker.inner.is_closed
    both.turns.settle()
    assert both.client.error == "the peer closed the connection during the TLS handshake"
    assert not both.broker.established


def test_owner_may_close_in_every_callback(authority: Authority) -> None:
    both = Connected(authority)
    both.broker.stream.on_established = both.broker.stream.close
    both.client.read()
    both.turns.settle()
    assert both.broker.inner.is_closed and both.client.has_ended

    both = Connected(authority, buffer_bytes=3).establish()
    both.broker.on_received = both.broker.stream.close
    both.broker.read()
    both.client.send(b"abcdef")
    both.turns.run_until(lambda: both.broker.inner.is_closed)
    assert both.broker.received == b"abc"


def test_end_without_farewell_is_an_end(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.broker.read()
    both.client.send(b"abc")
    both.client.inner.close()
    both.turns.settle()
    assert both.broker.received == b"abc"
    assert both.broker.has_ended and not both.broker.errors


def test_end_within_a_record_is_an_end(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.turns.settle()
    both.broker.read()
    both.client.send(b"abc", b"")
    both.client.inner.send_bytes_max = 20
    both.client.send(b"cut off")
    both.client.inner.close()
    both.turns.settle()
    assert both.broker.received == b"abc"
    assert both.broker.has_ended and not both.broker.errors


def test_broken_connection_is_an_error_for_the_sender(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.broker.inner.is_broken = True
    with pytest.raises(ConnectionResetError):
        both.broker.stream.send([b"x"])
    with pytest.raises(ConnectionResetError):
        both.broker.stream.send_file(FakeFiles(FakeClock()).open("/f"), 0, 1)
    both.broker.read()
    both.turns.settle()
    assert both.broker.has_ended


def test_waiting_sender_hears_of_a_broken_connection(authority: Authority) -> None:
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    both.broker.send(bytes(1_000_000))
    both.turns.settle()
    both.broker.inner.is_broken = True
    both.turns.settle()
    assert "gone" in both.broker.error
    assert both.broker.inner.is_closed


def test_peer_that_does_not_read_its_answers_is_still_read(authority: Authority) -> None:
    """Requests go on while responses wait; when to stop is the owner's decision."""
    both = Connected(authority).establish()
    both.client.inner.inbox_bytes_max = 1_000
    both.broker.read()
    both.broker.send(bytes(1_000_000))
    both.client.send(b"x" * 100_000)
    both.turns.settle()
    assert len(both.broker.received) == 100_000
