"""The heap of deadlines: exact, and cheap to move."""

from __future__ import annotations

import random

from penstock.groups.timers import STALE_MAX, Timer, TimerKind, Timers


def timer(name: str = "") -> Timer:
    return Timer(TimerKind.SESSION, "group", name)


def names(timers: Timers, now_ms: int) -> list[str]:
    return [found.member_id for found in timers.due(now_ms)]


def test_timers_fire_in_the_order_of_their_deadlines() -> None:
    timers = Timers()
    for name, deadline in (("c", 30), ("a", 10), ("b", 20)):
        timers.start(timer(name), deadline)
    assert timers.next_deadline_ms == 10
    assert names(timers, 9) == []
    assert names(timers, 20) == ["a", "b"]
    assert timers.next_deadline_ms == 30
    assert names(timers, 100) == ["c"]
    assert timers.next_deadline_ms is None


def test_a_moved_timer_fires_at_its_last_deadline_only() -> None:
    timers = Timers()
    one = timer("one")
    for deadline in (10, 50, 30, 5, 40):
        timers.start(one, deadline)
        assert timers.next_deadline_ms == deadline
    assert names(timers, 39) == []
    assert names(timers, 40) == ["one"]
    assert names(timers, 1000) == []


def test_a_cancelled_timer_does_not_fire_and_can_be_started_again() -> None:
    timers = Timers()
    one = timer("one")
    timers.start(one, 10)
    timers.cancel(one)
    timers.cancel(one)
    assert timers.next_deadline_ms is None
    timers.start(one, 10)
    timers.cancel(one)
    timers.start(one, 20)
    timers.check()
    assert names(timers, 19) == []
    assert names(timers, 20) == ["one"]
    assert not one.is_armed


def test_a_timer_started_on_the_way_fires_in_the_same_round_if_it_is_due() -> None:
    timers = Timers()
    first, second, later = timer("first"), timer("second"), timer("later")
    timers.start(first, 10)
    fired = []
    for found in timers.due(20):
        fired.append(found.member_id)
        if found is first:
            timers.start(second, 20)
            timers.start(later, 21)
    assert fired == ["first", "second"]


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers()
    for deadline in range(10_000):
        one = timer()
        timers.start(one, 1_000_000 + deadline)
        timers.cancel(one)
    assert len(timers._heap) <= STALE_MAX + 1


def test_moving_timers_does_not_grow_the_heap() -> None:
    timers = Timers()
    one = timer()
    for deadline in range(10_000):
        timers.start(one, 1_000_000 + deadline)
    assert len(timers._heap) == 1
    timers.check()


def test_timers_agree_with_a_plain_list() -> None:
    generator = random.Random(7)
    timers = Timers()
    all_timers = [timer(str(number)) for number in range(20)]
    expected: dict[str, int] = {}
    now_ms = 0
    for _ in range(5_000):
        one = generator.choice(all_timers)
        match generator.randrange(4):
            case 0 | 1:
                deadline = now_ms + generator.randrange(50)
                timers.start(one, deadline)
                expected[one.member_id] = deadline
            case 2:
                timers.cancel(one)
                expected.pop(one.member_id, None)
            case 3:
                now_ms += generator.randrange(20)
                due = sorted((when, name) for name, when in expected.items() if when <= now_ms)
                fired = names(timers, now_ms)
                assert sorted(fired) == sorted(name for _, name in due)
                assert [expected[name] for name in fired] == [when for when, _ in due]
                for _, name in due:
                    del expected[name]
        assert timers.next_deadline_ms == min(expected.values(), default=None)
        timers.check()
