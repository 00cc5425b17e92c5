"""Virtual time: order, pauses, deaths, threads and clocks."""

from __future__ import annotations

from penstock.sim.loop import Loop, Process, Promise, Streams, sleep, start


def world(seed: int = 1) -> tuple[Loop, Process]:
    loop = Loop(Streams(seed))
    return loop, Process(loop, "a")


def test_what_is_asked_for_soon_comes_in_the_order_asked() -> None:
    loop, process = world()
    seen: list[int] = []
    for number in range(50):
        process.spawn.soon(lambda number=number: seen.append(number))  # type: ignore[misc]
    loop.run_for(100)
    assert seen == list(range(50))


def test_a_timer_is_never_early() -> None:
    loop, process = world()
    seen: list[float] = []
    for delay_ms in (5, 1, 30, 0):
        process.spawn.later(delay_ms, lambda delay_ms=delay_ms: seen.append(loop.now_ms - delay_ms))  # type: ignore[misc]
    loop.run_for(100)
    assert len(seen) == 4
    assert min(seen) >= 0


def test_equal_timers_come_in_different_orders_for_different_seeds() -> None:
    orders = {}
    for seed in range(10):
        loop, process = world(seed)
        seen: list[int] = []
        for number in range(5):
            process.spawn.later(10, lambda number=number, seen=seen: seen.append(number))  # type: ignore[misc]
        loop.run_for(100)
        orders[tuple(seen)] = True
    assert len(orders) > 3


def test_a_cancelled_timer_stays_silent() -> None:
    loop, process = world()
    seen: list[int] = []
    process.spawn.later(5, lambda: seen.append(1)).cancel()
    loop.run_for(100)
    assert seen == []


def test_a_paused_process_does_everything_later_and_in_order() -> None:
    loop, process = world()
    seen: list[tuple[int, float]] = []
    for number in range(5):
        process.spawn.later(number + 1, lambda number=number: seen.append((number, loop.now_ms)))  # type: ignore[misc]
    process.pause(500)
    loop.run_for(400)
    assert seen == []
    loop.run_for(400)
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    assert min(at for _, at in seen) >= 500


def test_a_dead_process_does_nothing_any_more() -> None:
    loop, process = world()
    seen: list[str] = []
    process.spawn.later(10, lambda: seen.append("timer"))
    process.spawn.in_thread(lambda: seen.append("work"), lambda *_: seen.append("done"), lane="flush")
    process.end()
    loop.run_for(1000)
    assert seen == []


def test_work_that_was_not_finished_when_the_process_died_was_not_done() -> None:
    loop = Loop(Streams(1))
    process = Process(loop, "a", thread_ms=lambda lane: 50)
    seen: list[str] = []
    process.spawn.in_thread(lambda: seen.append("work"), lambda *_: seen.append("done"), lane="flush")
    loop.run_for(40)
    process.end()
    loop.run_for(1000)
    assert seen == []


def test_one_thread_works_in_order_and_four_do_not() -> None:
    for lane, keeps_order in (("metadata", True), ("flush", False)):
        loop = Loop(Streams(3))
        chance = loop.streams["disk"]
        process = Process(loop, "a", thread_ms=lambda lane, chance=chance: chance.uniform(1, 50))  # type: ignore[misc]
        seen: list[int] = []
        for number in range(20):
            process.spawn.in_thread(
                lambda: None,
                lambda *_, number=number, seen=seen: seen.append(number),
                lane=lane,
            )
        loop.run_for(10_000)
        assert sorted(seen) == list(range(20))
        assert (seen == sorted(seen)) is keeps_order


def test_an_error_of_the_work_is_handed_to_done() -> None:
    loop, process = world()
    seen: list[object] = []

    def work() -> None:
        raise OSError("broken")

    process.spawn.in_thread(work, lambda result, error: seen.append((result, str(error))), lane="read")
    loop.run_for(100)
    assert seen == [(None, "broken")]


def test_clocks_drift_and_are_wrong_by_different_amounts() -> None:
    loop = Loop(Streams(1))
    right = Process(loop, "a")
    wrong = Process(loop, "b", wall_skew_ms=-5_000, rate=1.01)
    before = (right.clock.now_ms(), wrong.clock.now_ms())
    assert wrong.clock.wall_ms() == right.clock.wall_ms() - 5_000
    loop.run_for(100_000)
    assert right.clock.now_ms() - before[0] == 100_000
    assert wrong.clock.now_ms() - before[1] == 101_000


def test_an_exception_goes_to_the_process_it_came_from() -> None:
    loop, process = world()
    seen: list[str] = []
    process.on_exception = lambda error: seen.append(str(error))

    def fail() -> None:
        raise AssertionError("ours")

    process.spawn.soon(fail)
    loop.run_for(10)
    assert seen == ["ours"]


def test_a_coroutine_of_a_dead_process_is_closed() -> None:
    loop, process = world()
    seen: list[str] = []

    async def client() -> None:
        try:
            await sleep(process, 10)
            seen.append("woke")
            await Promise()
        finally:
            seen.append("closed")

    ended = start(process, client())
    loop.run_for(100)
    process.end()
    assert seen == ["woke", "closed"]
    assert not ended.is_kept


def test_equal_seeds_give_equal_traces_and_others_do_not() -> None:
    def trace(seed: int) -> str:
        loop, process = world(seed)
        for number in range(20):
            process.spawn.later(number % 3, lambda: None)
        loop.run_for(100)
        return loop.trace_hash

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_the_streams_of_chance_do_not_disturb_each_other() -> None:
    undisturbed = Streams(5)["network"].random()
    streams = Streams(5)
    for _ in range(10):
        streams["workload"].random()
    assert streams["network"].random() == undisturbed
