"""Which followers have stopped fetching altogether."""

from __future__ import annotations

from penstock.replication.silence import LOOK_INTERVAL_MS, Silence

MAX_MS = 9_000


def look_until(silence: Silence, start_ms: int, end_ms: int) -> list[int]:
    """As the broker does; who is silent in the end."""
    for now_ms in range(start_ms, end_ms, LOOK_INTERVAL_MS):
        silence.look(now_ms)
    return silence.look(end_ms)


def test_a_broker_is_silent_when_it_has_not_fetched_for_too_long() -> None:
    silence = Silence(MAX_MS, now_ms=0)
    silence.heard(2, 500)
    silence.heard(3, 5_000)
    assert look_until(silence, 0, 9_500) == []
    assert look_until(silence, 9_500, 9_501) == [2]
    assert silence.is_silent(2, 0, 9_501) and not silence.is_silent(3, 0, 9_501)
    silence.heard(2, 9_502)
    assert silence.look(9_502) == []


def test_a_broker_that_never_fetched_is_counted_from_when_it_should_have() -> None:
    silence = Silence(MAX_MS, now_ms=0)
    assert look_until(silence, 0, 20_000) == []
    assert not silence.is_silent(2, 12_000, 20_000)
    assert silence.is_silent(2, 10_000, 20_000)


def test_the_silence_of_a_process_that_did_not_run_is_its_own() -> None:
    silence = Silence(MAX_MS, now_ms=0)
    look_until(silence, 0, 5_000)
    silence.heard(2, 5_000)
    # It was stopped, and asked before it has looked again.
    assert not silence.is_silent(2, 5_000, 60_000)
    assert look_until(silence, 60_000, 60_000 + MAX_MS) == []
    assert look_until(silence, 60_000 + MAX_MS, 60_001 + MAX_MS) == [2]
