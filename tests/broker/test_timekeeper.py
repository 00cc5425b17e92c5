"""By what time a broker may delete, with clocks that are wrong, jump, and are put right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.timekeeper import HOLD_MS_MAX, TOLERANCE_MS, Doubt, Reading, Timekeeper

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
        # Monotonic; the true time is NOW + now.
        self.now = 5_000
        self.core = Timekeeper(ME, self.reading, believed_ms)

    @property
    def reading(self) -> Reading:
        return Reading(self.now, NOW + self.now + (self.wrong_ms[ME] or 0))

    def heartbeat(self, took_ms: int = 10) -> None:
        sent = self.reading
        controller_wrong_ms = self.wrong_ms[self.controller] or 0
        controller_ms = NOW + self.now + took_ms // 2 + controller_wrong_ms
        clocks = {
            broker: None if wrong_ms is None else wrong_ms - controller_wrong_ms
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


def test_a_new_broker_whose_clock_was_never_right_waits_too() -> None:
    clocks = Clocks(10 * DAY, 0, 0, controller=2)
    clocks.heartbeat()
    assert clocks.doubt is Doubt.JUMPED
    clocks.wait(HOLD_MS_MAX)
    assert clocks.doubt is Doubt.AHEAD
    clocks.wrong_ms[ME] = 0
    assert clocks.doubt is None


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
)
def test_no_minority_of_clocks_makes_anything_older_than_it_is(
    count: int, controller: int, steps: list[tuple[int, int, int, bool]]
) -> None:
    """One clock of two or three, two of five, or the only one for ten hours: whatever they do and whoever leads."""
    clocks = Clocks(*[0] * count, controller=min(controller, count))
    clocks.heartbeat()
    wrong: list[int] = []
    for broker, wrong_ms, minutes, hears in steps:
        if broker <= count:
            if broker not in wrong:
                wrong.append(broker)
            if len(wrong) > max(1, (count - 1) // 2):
                clocks.wrong_ms[wrong.pop(0)] = 0
            # A single clock is believed when it has been wrong for as long as it is wrong.
            clocks.wrong_ms[broker] = wrong_ms if count > 1 or abs(wrong_ms) > DAY else 0
        clocks.now += minutes * 60_000
        if hears:
            clocks.heartbeat()
        expiry_ms = clocks.core.expiry_ms(clocks.reading)
        assert expiry_ms is None or expiry_ms <= NOW + clocks.now + TOLERANCE_MS
