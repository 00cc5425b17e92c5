"""Peers that keep to the letter of TLS in order to waste our time or memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.tls.stream import BARREN_BYTES_MAX, RECORDS_PER_CALL, UNSENT_ANSWERS_MAX, UNSENT_BYTES_MAX
from tests.tls.authority import Authority
from tests.tls.forgery import Forger, client_with_secrets
from tests.tls.party import Connected

KEY_UPDATE_BYTES = 27
ANSWERS_MAX = UNSENT_BYTES_MAX + UNSENT_ANSWERS_MAX


@pytest.fixture
def both(authority: Authority, tmp_path: Path) -> Connected:
    connected = Connected(authority, client=client_with_secrets(authority.client(), tmp_path / "secrets"))
    connected.establish()
    connected.turns.settle()
    connected.broker.read()
    return connected


@pytest.fixture
def forger(both: Connected, tmp_path: Path) -> Forger:
    return Forger(tmp_path / "secrets")


def test_forged_records_are_taken_for_the_clients(both: Connected, forger: Forger) -> None:
    both.client.inner.send(
        [forger.record(b"a"), forger.key_update(requests_another=False), forger.record(b"b")]
    )
    both.turns.settle()
    assert both.broker.received == b"ab"


def read_turn_by_turn(both: Connected, until: Callable[[], bool]) -> None:
    """No turn decrypts more than its share, and none is idle."""
    stream = both.broker.stream
    while not until():
        before = both.broker.inner.received_bytes - len(stream._held or b"")
        assert both.turns.turn()
        decrypted = both.broker.inner.received_bytes - len(stream._held or b"") - before
        # One more may have begun in the turn before. After an error, what has come is thrown away.
        assert both.broker.errors or 0 <= decrypted <= (RECORDS_PER_CALL + 1) * KEY_UPDATE_BYTES


def test_flood_of_key_updates_is_an_error(both: Connected, forger: Forger) -> None:
    flood = b"".join(forger.key_update(requests_another=False) for _ in range(10_000))
    assert len(flood) == 10_000 * KEY_UPDATE_BYTES > BARREN_BYTES_MAX
    both.client.inner.send([flood])
    read_turn_by_turn(both, lambda: bool(both.broker.errors))
    assert both.broker.error == "the peer sent 256 KB of TLS messages without any data"


def test_flood_of_key_updates_between_data_is_read_in_turns(both: Connected, forger: Forger) -> None:
    both.client.read()
    flood = b""
    for _ in range(30):
        flood += b"".join(forger.key_update(requests_another=True) for _ in range(30)) + forger.record(b"x")
    both.client.inner.send([flood])
    read_turn_by_turn(both, lambda: len(both.broker.received) == 30)
    assert not both.broker.errors
    both.broker.send(b"answer")
    both.turns.settle()
    assert both.client.received == b"answer"


def test_flood_does_not_go_on_while_the_owner_pauses(both: Connected, forger: Forger) -> None:
    both.client.inner.send([b"".join(forger.key_update(requests_another=False) for _ in range(1_000))])
    both.client.inner.send([forger.record(b"x")])
    both.turns.turn()
    both.broker.read(False)
    both.turns.settle()
    assert both.broker.readable_calls == 1
    both.broker.read()
    both.turns.settle()
    assert both.broker.received == b"x"


def test_answers_that_the_peer_does_not_read_take_bounded_memory(both: Connected, forger: Forger) -> None:
    both.client.inner.inbox_bytes_max = 0
    while both.broker.stream.send([bytes(100_000)]):
        pass
    flood = b""
    for _ in range(30):
        flood += b"".join(forger.key_update(requests_another=True) for _ in range(100)) + forger.record(b"x")
    both.client.inner.send([flood])
    both.turns.run_until(lambda: bool(both.broker.errors))
    assert both.broker.error == "the peer does not read the answers to its TLS messages"
    assert 0 < len(both.broker.received) < 30
    assert both.broker.stream._unsent_bytes <= ANSWERS_MAX + RECORDS_PER_CALL * KEY_UPDATE_BYTES


def test_flood_of_empty_records_is_an_error(both: Connected, forger: Forger) -> None:
    both.client.inner.send([b"".join(forger.record(b"") for _ in range(15_000))])
    both.turns.run_until(lambda: bool(both.broker.errors))
    assert both.broker.inner.is_closed


def test_forged_record_with_a_wrong_tag_is_an_error(both: Connected, forger: Forger) -> None:
    record = bytearray(forger.record(b"x" * 100))
    record[50] ^= 1
    both.client.inner.send([record])
    both.client.read()
    both.turns.settle()
    assert both.broker.error == "TLS failed: decryption failed or bad record mac"
    assert both.client.error == "the peer refused the TLS connection: bad record mac"
