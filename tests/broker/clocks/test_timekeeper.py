"""By what time a broker may delete, with clocks that are wrong, jump, and are put right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.clocks.timekeeper import (
    HOLD_MS_MAX,
    TOLERANCE_MS,
    Doubt,
    Memory,
    NodeTime,
    Reading,
    Timekeeper,
)

NOW = 1_700_000_000_000
HOUR = 3_600_000
DAY = 24 * HOUR
ME = 1


class Clocks:
    """A cluster's clocks, as far as they are wrong, and the broker that this is about."""

    def __init__(self, *wrong_ms: int | None, controller: int = ME, believed_ms: int | None = None) -> None:
        # By broker, from 1 on. None: it does not tell.
        self.wrong_ms: dict[int, int | None] = dict(enumerate(wrong_ms, 1))
        self.controller = controller
        # Since when the clocks of the others have not jumped, as far as they say so.
        self.steady_since: dict[int, int] = {}
        # The true time is NOW + now, and the monotonic clock is behind ``now`` by what it has not seen.
        self.now = 5_000
        self.paused_ms = 0
        self.boots = 0
        self.core = Timekeeper(
            ME, self.reading, None if believed_ms is None else Memory(believed_ms), "boot 0"
        )

    @property
    def reading(self) -> Reading:
        return Reading(self.now - self.paused_ms, NOW + self.now + (self.wrong_ms[ME] or 0))

    def heartbeat(self, took_ms: int = 10) -> None:
        sent = self.reading
        controller_wrong_ms = self.wrong_ms[self.controller] or 0
        controller_ms = NOW + self.now + took_ms // 2 + controller_wrong_ms
        clocks = {
            broker: NodeTime(
                None if wrong_ms is None else wrong_ms - controller_wrong_ms, self.steady_ms(broker)
            )
            for broker, wrong_ms in self.wrong_ms.items()
        }
        self.now += took_ms
        self.core.compared(sent, self.reading, controller_ms, clocks)
        self.core.check()

    def wait(self, ms: int) -> None:
        """With a heartbeat now and then."""
        for _ in range(5):
            self.now += ms // 5
            self.heartbeat()

    def steady_ms(self, broker: int) -> int | None:
        since = self.steady_since.get(broker)
        return None if since is None else self.now - since

    def pause(self, ms: int) -> None:
        """Of which the monotonic clock knows nothing."""
        self.now += ms
        self.paused_ms += ms

    def restart(self, *, off_ms: int = 0, boot: bool = True) -> None:
        """The process, and with ``boot`` its machine: whose monotonic clock then begins again."""
        memory = self.core.memory(self.reading)
        self.now += off_ms
        if boot:
            self.boots += 1
            self.paused_ms = self.now
        self.core = Timekeeper(ME, self.reading, memory, f"boot {self.boots}")

    @property
    def doubt(self) -> Doubt | None:
        return self.core.doubt(self.reading)

    @property
    def early_ms(self) -> int:
        """How far the time to delete by is ahead of the true time."""
        expiry_ms = self.core.expiry_ms(self.reading)
        assert expiry_ms is not None
        return expiry_ms - NOW - self.now


def test_a_broker_among_others_that_agree_deletes_by_the_earlier_clock() -> None:
    clocks = Clocks(3_000, 0, -2_000)
    assert clocks.doubt is Doubt.NOT_COMPARED
    clocks.heartbeat()
    assert clocks.doubt is None
    assert -20 <= clocks.early_ms <= 0


def test_a_clock_that_is_ahead_deletes_nothing() -> None:
    clocks = Clocks(0, 0, 0, controller=2)
    clocks.heartbeat()
    clocks.wrong_ms[ME] = 10 * DAY
    clocks.heartbeat()
    assert clocks.doubt is Doubt.AHEAD
    clocks.wrong_ms[ME] = 0
    assert clocks.doubt is None, "it is right at once when it is put right"


def test_a_clock_that_is_behind_deletes_nothing_and_accepts_what_the_others_call_now() -> None:
    clocks = Clocks(0, 0, 0, controller=3)
    clocks.heartbeat()
    clocks.wrong_ms[ME] = -2 * HOUR
    clocks.heartbeat()
    assert clocks.doubt is Doubt.BEHIND
    earliest_ms, latest_ms = clocks.core.range_ms(clocks.reading)
    assert earliest_ms == clocks.reading.wall_ms
    assert abs(latest_ms - NOW - clocks.now) < TOLERANCE_MS
    assert clocks.core.stamp_ms(clocks.reading) == latest_ms


def test_a_clock_that_is_set_between_two_heartbeats_is_noticed_at_once() -> None:
    for alone in (True, False):
        clocks = Clocks(0) if alone else Clocks(0, 0, 0)
        clocks.heartbeat()
        assert clocks.doubt is None
        clocks.wrong_ms[ME] = 10 * DAY
        assert clocks.doubt in (Doubt.AHEAD, Doubt.JUMPED)


def test_the_controllers_own_clock_may_be_the_wrong_one() -> None:
    right = Clocks(0, 10 * DAY, 0, controller=2)
    right.heartbeat()
    assert right.doubt is None
    assert -20 <= right.early_ms <= 0
    wrong = Clocks(0, 0, 0, controller=ME)
    wrong.heartbeat()
    wrong.wrong_ms[ME] = 10 * DAY
    wrong.heartbeat()
    assert wrong.doubt is Doubt.AHEAD


def test_of_two_clocks_the_earlier_one_counts() -> None:
    ahead = Clocks(0, 0, controller=2)
    ahead.heartbeat()
    ahead.wrong_ms[ME] = 10 * DAY
    ahead.heartbeat()
    assert ahead.doubt is Doubt.AHEAD
    slow = Clocks(-2 * HOUR, 0, controller=ME)
    slow.heartbeat()
    assert slow.doubt is None and slow.early_ms <= -2 * HOUR
    assert slow.core.range_ms(slow.reading)[1] >= NOW + slow.now - 20, "which refuses nothing"


def test_all_clocks_that_jump_together_are_believed_when_it_has_lasted() -> None:
    for wrong_ms, held_ms in ((HOUR, HOUR), (10 * DAY, HOLD_MS_MAX), (-HOUR, HOUR)):
        clocks = Clocks(0, 0, 0)
        clocks.heartbeat()
        clocks.wrong_ms = dict.fromkeys(clocks.wrong_ms, wrong_ms)
        clocks.heartbeat()
        assert clocks.doubt is Doubt.JUMPED
        assert abs(clocks.core.jump_ms() - wrong_ms) < TOLERANCE_MS
        clocks.wait(held_ms - 1_000)
        assert clocks.doubt is Doubt.JUMPED
        clocks.wait(2_000)
        assert clocks.doubt is None


def test_a_jump_that_is_taken_back_is_forgotten() -> None:
    clocks = Clocks(0)
    clocks.heartbeat()
    clocks.wrong_ms[ME] = 10 * DAY
    clocks.wait(6 * DAY)
    assert clocks.doubt is Doubt.JUMPED
    clocks.wrong_ms[ME] = 0
    assert clocks.doubt is None
    clocks.wrong_ms[ME] = 10 * DAY
    clocks.wait(6 * DAY)
    assert clocks.doubt is Doubt.JUMPED, "it begins to last anew"


def test_a_process_that_starts_with_another_time_waits() -> None:
    for believed_ms, doubt in ((NOW, None), (NOW - 10 * DAY, Doubt.JUMPED), (NOW + DAY, Doubt.JUMPED)):
        clocks = Clocks(0, believed_ms=believed_ms)
        clocks.heartbeat()
        assert clocks.doubt is doubt
        clocks.wait(HOLD_MS_MAX)
        assert clocks.doubt is None


def test_a_new_broker_whose_clock_was_never_right_deletes_nothing_until_it_is() -> None:
    clocks = Clocks(10 * DAY, 0, 0, controller=2)
    clocks.heartbeat()
    doubts = [clocks.doubt]
    clocks.wrong_ms[ME] = 0
    doubts.append(clocks.doubt)
    assert doubts == [Doubt.AHEAD, Doubt.JUMPED] and clocks.early_ms <= 0
    clocks.wait(HOLD_MS_MAX)
    assert clocks.doubt is None


def test_while_a_jump_is_not_believed_the_earlier_time_counts() -> None:
    for wrong_ms, early_ms in ((10 * DAY, 0), (-10 * DAY, -10 * DAY)):
        clocks = Clocks(0)
        clocks.heartbeat()
        clocks.wrong_ms[ME] = wrong_ms
        clocks.wait(DAY)
        assert clocks.doubt is Doubt.JUMPED
        assert abs(clocks.early_ms - early_ms) < TOLERANCE_MS


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_machine_that_is_off_at_night_is_late_by_two_nights_and_not_for_ever(is_stopped: bool) -> None:
    """Stopped, or paused in a way that no clock but the wall clock counts."""
    clocks = Clocks(0)
    late = []
    for _ in range(60):
        clocks.wait(8 * HOUR)
        late.append(-clocks.early_ms)
        if is_stopped:
            clocks.restart(off_ms=16 * HOUR)
        else:
            clocks.pause(16 * HOUR)
    assert max(late) <= 2 * 16 * HOUR + TOLERANCE_MS
    assert min(late) > -TOLERANCE_MS


def test_a_process_that_was_off_while_its_machine_ran_knows_for_how_long() -> None:
    clocks = Clocks(0)
    clocks.heartbeat()
    clocks.restart(off_ms=3 * DAY, boot=False)
    clocks.heartbeat()
    assert clocks.doubt is None
    clocks.wrong_ms[ME] = 10 * DAY
    clocks.restart(off_ms=HOUR, boot=False)
    clocks.heartbeat()
    assert clocks.doubt is Doubt.JUMPED
    assert abs(clocks.core.jump_ms() - 10 * DAY) < TOLERANCE_MS


@pytest.mark.parametrize("boot", [True, False])
def test_a_clock_that_is_wrong_over_many_processes_is_believed_after_a_week_of_them(boot: bool) -> None:
    clocks = Clocks(0)
    clocks.heartbeat()
    clocks.wrong_ms[ME] = 10 * DAY
    for _ in range(20):
        clocks.restart(boot=boot)
        clocks.heartbeat()
        clocks.wait(8 * HOUR)
        assert clocks.doubt is Doubt.JUMPED and clocks.early_ms < TOLERANCE_MS
    clocks.restart(boot=boot)
    clocks.wait(9 * HOUR)
    assert clocks.doubt is None


def started_again(*wrong_ms: int, off_ms: int, steady_ms: int) -> Clocks:
    """A broker that was off, among others whose clocks have not jumped for so long."""
    clocks = Clocks(*wrong_ms)
    clocks.core = Timekeeper(ME, clocks.reading, Memory(clocks.reading.wall_ms - off_ms))
    clocks.steady_since = dict.fromkeys(range(2, len(wrong_ms) + 1), clocks.now - steady_ms)
    clocks.heartbeat()
    return clocks


def test_a_broker_that_comes_back_to_others_that_were_there_believes_them_at_once() -> None:
    for wrong_ms in ((0, 0), (0, 0, 0), (0, 0, 0, 10 * DAY)):
        assert started_again(*wrong_ms, off_ms=16 * HOUR, steady_ms=17 * HOUR).doubt is None
    assert started_again(0, 0, 0, off_ms=300 * DAY, steady_ms=8 * DAY).doubt is None


def test_others_do_not_make_a_time_believed_that_has_not_lasted_with_most_of_them() -> None:
    young = started_again(0, 0, 0, off_ms=16 * HOUR, steady_ms=15 * HOUR)
    assert young.doubt is Doubt.JUMPED and young.early_ms <= -16 * HOUR
    few = started_again(0, 0, 0, 0, 0, off_ms=16 * HOUR, steady_ms=DAY)
    assert few.doubt is None
    few = started_again(0, 0, 0, 10 * DAY, -10 * DAY, off_ms=16 * HOUR, steady_ms=DAY)
    assert few.doubt is Doubt.JUMPED, "two of the four others do not agree"
    wrong = started_again(10 * DAY, 10 * DAY, 10 * DAY, off_ms=10 * DAY, steady_ms=HOUR)
    assert wrong.doubt is Doubt.JUMPED and wrong.early_ms < TOLERANCE_MS


def test_a_broker_tells_for_how_long_its_clock_has_not_jumped() -> None:
    clocks = Clocks(0)
    clocks.wait(DAY)
    clocks.restart(off_ms=HOUR, boot=False)
    assert abs(clocks.core.steady_ms(clocks.reading) - DAY - HOUR) < TOLERANCE_MS
    clocks.wrong_ms[ME] = HOUR
    assert clocks.core.steady_ms(clocks.reading) == 0
    clocks.wait(DAY)
    clocks.restart(boot=True)
    assert clocks.core.steady_ms(clocks.reading) == 0, "nobody looked at it meanwhile"


def test_a_clock_that_jumps_all_the_time_is_not_followed() -> None:
    clocks = Clocks(0)
    clocks.heartbeat()
    for hours in range(1, 500):
        clocks.wrong_ms[ME] = hours * HOUR
        clocks.heartbeat()
    assert clocks.early_ms < TOLERANCE_MS
    clocks.wait(2 * HOUR)
    assert clocks.early_ms < 100 * HOUR, "of so many jumps most count as one"


def test_nothing_is_deleted_while_most_brokers_do_not_tell_their_time() -> None:
    clocks = Clocks(0, None, None)
    clocks.heartbeat()
    assert clocks.doubt is Doubt.NOT_TOLD
    clocks.wrong_ms[2] = 0
    clocks.heartbeat()
    assert clocks.doubt is None
    clocks.core.compared(clocks.reading, clocks.reading, None, {})
    assert clocks.doubt is Doubt.NOT_TOLD, "a controller of an older version"


def test_an_answer_that_was_long_on_its_way_says_nothing() -> None:
    clocks = Clocks(0, 0, 0, controller=2)
    clocks.heartbeat(took_ms=60_000)
    assert clocks.doubt is Doubt.NOT_COMPARED


def test_differences_are_told_for_every_broker() -> None:
    clocks = Clocks(0, 10 * DAY, None, 0, controller=2)
    clocks.heartbeat()
    told = clocks.core.ahead_ms(clocks.reading)
    assert set(told) == {1, 2, 3, 4} and told[3] is None
    assert abs((told[2] or 0) - 10 * DAY) < 100 and abs(told[1] or 0) < 100
    alone = Clocks(0)
    alone.heartbeat()
    assert alone.core.ahead_ms(alone.reading) == {ME: None}


wrongs = st.sampled_from([-400 * DAY, -2 * HOUR, 0, 5_000, 30_000, 2 * HOUR, 10 * DAY])


@given(
    count=st.integers(1, 5),
    controller=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 5), wrongs, st.integers(0, 30), st.booleans()), max_size=20),
    restarts=st.sets(st.integers(0, 19)),
    boot=st.booleans(),
)
def test_no_minority_of_clocks_makes_anything_older_than_it_is(
    count: int, controller: int, steps: list[tuple[int, int, int, bool]], restarts: set[int], boot: bool
) -> None:
    """One clock of two or three, two of five, or the only one for ten hours: whatever they do, over restarts."""
    clocks = Clocks(*[0] * count, controller=min(controller, count))
    clocks.heartbeat()
    wrong: list[int] = []
    # The others have been there for long.
    clocks.steady_since = dict.fromkeys(range(2, count + 1), -400 * DAY)
    for step, (broker, wrong_ms, minutes, hears) in enumerate(steps):
        before = dict(clocks.wrong_ms)
        if broker <= count:
            if broker not in wrong:
                wrong.append(broker)
            if len(wrong) > max(1, (count - 1) // 2):
                clocks.wrong_ms[wrong.pop(0)] = 0
            # A single clock is believed when it has been wrong for as long as it is wrong.
            clocks.wrong_ms[broker] = wrong_ms if count > 1 or abs(wrong_ms) > DAY else 0
        for other in clocks.steady_since:
            if clocks.wrong_ms[other] != before[other]:
                clocks.steady_since[other] = clocks.now
        clocks.now += minutes * 60_000
        if step in restarts:
            clocks.restart(off_ms=HOUR, boot=boot)
        if hears:
            clocks.heartbeat()
        expiry_ms = clocks.core.expiry_ms(clocks.reading)
        assert expiry_ms is None or expiry_ms <= NOW + clocks.now + TOLERANCE_MS
