"""Which followers have stopped fetching altogether."""

from __future__ import annotations

from penstock.replication.follower_activity import LOOK_INTERVAL_MS, FollowerActivity

MAX_MS = 9_000


def look_until(activity: FollowerActivity, start_ms: int, end_ms: int) -> list[int]:
    """As the broker does; who is silent in the end."""
    for now_ms in range(start_ms, end_ms, LOOK_INTERVAL_MS):
        activity.look(now_ms)
    return activity.look(end_ms)


def test_a_broker_is_silent_when_it_has_not_fetched_for_too_long() -> None:
    activity = FollowerActivity(MAX_MS, now_ms=0)
    activity.heard(2, 500)
    activity.heard(3, 5_000)
    assert look_until(activity, 0, 9_500) == []
    assert look_until(activity, 9_500, 9_501) == [2]
    assert activity.is_silent(2, 0, 9_501) and not activity.is_silent(3, 0, 9_501)
    activity.heard(2, 9_502)
    assert activity.look(9_502) == []


def test_a_broker_that_never_fetched_is_counted_from_when_it_should_have() -> None:
    activity = FollowerActivity(MAX_MS, now_ms=0)
    assert look_until(activity, 0, 20_000) == []
    assert not activity.is_silent(2, 12_000, 20_000)
    assert activity.is_silent(2, 10_000, 20_000)


def test_the_silence_of_a_process_that_did_not_run_is_its_own() -> None:
    activity = FollowerActivity(MAX_MS, now_ms=0)
    look_until(activity, 0, 5_000)
    activity.heard(2, 5_000)
    # It was stopped, and asked before it has looked again.
    assert not activity.is_silent(2, 5_000, 60_000)
    assert look_until(activity, 60_000, 60_000 + MAX_MS) == []
    assert look_until(activity, 60_000 + MAX_MS, 60_001 + MAX_MS) == [2]
