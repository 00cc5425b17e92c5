"""What time it is, as far as this broker can know: its own clock against the others', and the monotonic one.

Records and committed offsets are deleted when they are old enough, and a wrong clock makes everything old at once.
So a broker deletes by age only while all of this holds:

    most brokers tell their time          the controller passes it on in the answer to every heartbeat
    its own clock agrees with theirs      within TOLERANCE_MS of their median; of two, the earlier one counts
    their time has not just jumped        against the monotonic clock, which nobody sets

After a jump (all clocks were set, the machine slept, the cluster was down) nobody can tell whether the time was
wrong before or is wrong now. The new time is believed when it has lasted as long as it jumped, or HOLD_MS_MAX. So
whatever the clocks do together, a record that is to be kept for a week is there for half of it. A broker that is
alone is the same with one clock: its own.

A core: times go in as ``Reading``s, answers come out. What a newcomer gets wrong: there is not one safe time. To
delete, the earliest is safe; to refuse a record as too far in the future, or to stamp one, the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Synchronised clocks differ by milliseconds. A clock that nobody keeps loses some seconds in a week.
TOLERANCE_MS = 10_000
# How long a jump has to last at the most, and how long most topics keep their records.
HOLD_MS_MAX = 7 * 86_400_000
# An answer that took longer says too little about the time.
ANSWER_MS_MAX = 5_000


class Reading(NamedTuple):
    """Both clocks of this machine at one moment."""

    now_ms: int
    wall_ms: int

    @property
    def offset_ms(self) -> int:
        return self.wall_ms - self.now_ms


class Doubt(Enum):
    """Why nothing is deleted by age."""

    NOT_COMPARED = "the time was not compared with the other brokers yet"
    NOT_TOLD = "most brokers do not tell their time: they run an older version"
    JUMPED = "the time has jumped"
    AHEAD = "this broker's clock is ahead of the others"
    BEHIND = "this broker's clock is behind the others"


@dataclass(slots=True)
class _Jump:
    # From the monotonic clock to the new time.
    offset_ms: int
    until_ms: int


class Timekeeper:
    def __init__(self, me: int, reading: Reading, believed_ms: int | None = None) -> None:
        """``believed_ms`` is the last time that the process before this one believed in, if there was one."""
        self._me = me
        # From the monotonic clock to the time that is believed in: the earlier median of all clocks.
        self._offset_ms = reading.offset_ms if believed_ms is None else believed_ms - reading.now_ms
        # The same of the later median. Believed at once, because nothing is deleted by it.
        self._latest_offset_ms = self._offset_ms
        # What may become the believed time.
        self._jump: _Jump | None = None
        self._is_compared = False
        self._are_most_told = True
        # Whether there is no other clock to compare with.
        self._is_alone = False
        # Of each other broker: how far ahead of the believed time it is, if it says so.
        self._others: dict[int, int | None] = {}

    # What comes in

    def compared(
        self, sent: Reading, received: Reading, controller_ms: int | None, clocks: Mapping[int, int | None]
    ) -> None:
        """The controller has answered a heartbeat.

        ``controller_ms`` is its wall time, and ``clocks`` says of each broker, and of the controller, how far it is
        ahead of that; None where it is not known.
        """
        if controller_ms is None:
            self._are_most_told = False
            return
        if (
            received.now_ms - sent.now_ms > ANSWER_MS_MAX
            or abs(received.offset_ms - sent.offset_ms) > TOLERANCE_MS
        ):
            return
        # Its clock was read between the two: our own is ahead by something in this range. The best of it counts.
        own_ms = max(sent.wall_ms - controller_ms, min(0, received.wall_ms - controller_ms))
        others = {node: ahead_ms for node, ahead_ms in clocks.items() if node != self._me}
        known = sorted([own_ms, *(ahead_ms for ahead_ms in others.values() if ahead_ms is not None)])
        self._is_compared = True
        self._is_alone = not others
        self._are_most_told = 2 * len(known) > 1 + len(others)
        earlier_ms, later_ms = known[(len(known) - 1) // 2], known[len(known) // 2]
        self._others = {
            node: None if ahead_ms is None else ahead_ms - earlier_ms for node, ahead_ms in others.items()
        }
        if self._are_most_told:
            self._latest_offset_ms = controller_ms + later_ms - received.now_ms
            self._found(controller_ms + earlier_ms - received.now_ms, received.now_ms)

    def _found(self, offset_ms: int, now_ms: int) -> None:
        """This seems to be the time."""
        if abs(offset_ms - self._offset_ms) <= TOLERANCE_MS:
            self._offset_ms = offset_ms
            self._jump = None
            return
        if self._jump is None or abs(offset_ms - self._jump.offset_ms) > TOLERANCE_MS:
            self._jump = _Jump(offset_ms, now_ms + min(abs(offset_ms - self._offset_ms), HOLD_MS_MAX))
        self._jump.offset_ms = offset_ms
        if now_ms >= self._jump.until_ms:
            self._offset_ms = offset_ms
            self._jump = None

    # What comes out

    def doubt(self, reading: Reading) -> Doubt | None:
        """Why the time is not good enough to delete anything by it; None when it is."""
        if not self._are_most_told:
            return Doubt.NOT_TOLD
        if not self._is_compared:
            return Doubt.NOT_COMPARED
        if self._is_alone:
            # The clock may have been set since the last heartbeat.
            self._found(reading.offset_ms, reading.now_ms)
        if self._jump is not None:
            return Doubt.JUMPED
        if abs(reading.offset_ms - self._offset_ms) > TOLERANCE_MS:
            return Doubt.AHEAD if reading.offset_ms > self._offset_ms else Doubt.BEHIND
        return None

    def expiry_ms(self, reading: Reading) -> int | None:
        """The time by which something may be deleted for its age; None: nothing may."""
        if self.doubt(reading) is not None:
            return None
        return reading.now_ms + min(reading.offset_ms, self._offset_ms)

    def range_ms(self, reading: Reading) -> tuple[int, int]:
        """The earliest and the latest that it may be."""
        offsets = [reading.offset_ms, self._offset_ms, self._latest_offset_ms]
        if self._jump is not None:
            offsets.append(self._jump.offset_ms)
        return reading.now_ms + min(offsets), reading.now_ms + max(offsets)

    def stamp_ms(self, reading: Reading) -> int:
        """What to write on a record. Never a time long ago, or the record would be deleted too early."""
        latest_ms = self.range_ms(reading)[1]
        return latest_ms if latest_ms - reading.wall_ms > TOLERANCE_MS else reading.wall_ms

    def difference_ms(self, reading: Reading) -> int:
        """How far this broker's clock is ahead of the believed time."""
        return reading.offset_ms - self._offset_ms

    def jump_ms(self) -> int:
        """How far the time has jumped, while that is not believed."""
        return 0 if self._jump is None else self._jump.offset_ms - self._offset_ms

    def ahead_ms(self, reading: Reading) -> dict[int, int | None]:
        """How far each clock is ahead of the median of all; None where it is not told."""
        if self._is_alone or not self._is_compared:
            return {self._me: None}
        # A jump of all of them is no difference between them.
        offset_ms = self._offset_ms if self._jump is None else self._jump.offset_ms
        return {**self._others, self._me: reading.offset_ms - offset_ms}

    def check(self) -> None:
        assert not (self._is_alone and self._others), self._others
