"""Whatever the network and the two owners do, each gets exactly the bytes that the other sent."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tls.authority import Authority
from tests.tls.party import Connected, Party

# For all examples. Contexts are not changed by connections.
AUTHORITY = Authority()
CONTEXTS = {
    protocol: (AUTHORITY.broker(ssl_enabled_protocols=protocol), AUTHORITY.client())
    for protocol in ("TLSv1.2", "TLSv1.3")
}

sizes = st.sampled_from([1, 2, 5, 21, 100, 1_000, 16_384, 1 << 20])
# What happens between two turns.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.booleans(), st.lists(st.integers(0, 40_000), min_size=1, max_size=4)),
        st.tuples(st.just("read"), st.booleans(), st.booleans()),
        st.tuples(st.just("chunks"), st.booleans(), st.tuples(sizes, sizes, sizes)),
        st.tuples(st.just("turns"), st.booleans(), st.integers(1, 20)),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(
    protocol=st.sampled_from(sorted(CONTEXTS)),
    buffer_bytes=st.sampled_from([1, 7, 1_000, 16_384, 1 << 17]),
    steps=steps,
    closes=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_chunks_and_pauses_deliver_exactly_the_bytes(
    protocol: str, buffer_bytes: int, steps: list[tuple[str, bool, object]], closes: bool, seed: int
) -> None:
    broker, client = CONTEXTS[protocol]
    both = Connected(AUTHORITY, broker=broker, client=client, buffer_bytes=buffer_bytes)
    chance = random.Random(seed)
    sent: dict[Party, bytes] = {both.broker: b"", both.client: b""}
    for kind, is_broker, value in steps:
        party = both.broker if is_broker else both.client
        match kind, value:
            case "send", list():
                # With a buffer of one byte, each byte takes a turn.
                buffers = [chance.randbytes(min(size, 200 * buffer_bytes)) for size in value]
                sent[party] += b"".join(buffers)
                party.send(*buffers)
            case "read", bool():
                party.read(value)
            case "chunks", (int(recv), int(send), int(inbox)):
                party.inner.recv_bytes_max, party.inner.send_bytes_max = recv, send
                party.inner.inbox_bytes_max = inbox
            case "turns", int():
                for _ in range(value):
                    both.turns.turn()
            case _:
                raise AssertionError(kind)
        assert sent[both.client].startswith(bytes(both.broker.received))
        assert sent[both.broker].startswith(bytes(both.client.received))
    for party in (both.broker, both.client):
        # Small chunks are for the steps above; here they would only take time.
        inner = party.inner
        inner.recv_bytes_max = max(inner.recv_bytes_max, 1_000)
        inner.send_bytes_max = max(inner.send_bytes_max, 1_000)
        inner.inbox_bytes_max = max(inner.inbox_bytes_max, 1_000)
        party.read()
    both.establish()
    both.turns.run_until(lambda: both.broker.has_sent_all and both.client.has_sent_all, 20_000)
    if closes:
        both.broker.stream.close()
    both.turns.settle(20_000)
    assert both.client.received == sent[both.broker]
    assert not both.client.errors and not both.broker.errors
    if closes:
        assert both.client.has_ended
    else:
        assert both.broker.received == sent[both.client]
