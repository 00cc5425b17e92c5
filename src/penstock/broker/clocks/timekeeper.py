"""What time it is, as far as this broker can know: its own clock against the others', and the monotonic one.

Records and committed offsets are deleted when they are old enough, and a wrong clock makes everything old at once.
So a broker deletes by age only while

    most brokers tell their time          the controller passes it on in the answer to every heartbeat
    its own clock agrees with theirs      within TOLERANCE_MS of their median; of two, the earlier one counts

and if that time has jumped against the monotonic clock, which nobody sets, by the earlier of the time before and
the time since. After a jump (all clocks were set, the cluster was off) nobody can tell which of them is right. The
new one is believed when it has lasted as long as it jumped, or HOLD_MS_MAX: here, over all processes, or on most of
the other brokers, which were there while this one was not. Each jump waits for itself, so that a machine that is
off every night is late by some nights and not for ever. A broker that is alone is the same with one clock: its own.

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
# This many jumps wait at the same time; of more, the newest count as one. A machine that runs for a quarter of an
# hour a day has as many.
JUMPS_MAX = 100
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


class NodeTime(NamedTuple):
    """What the controller tells of one clock."""

    # How far it is ahead of the controller's; None: not known.
    ahead_ms: int | None
    # For how long it has not jumped; None: not known.
    steady_ms: int | None = None


class Memory(NamedTuple):
    """What one process leaves to the next."""

    believed_ms: int
    # Those not believed yet: how far, and for how long that has lasted.
    jumps: tuple[tuple[int, int], ...] = ()
    # When this was true, since when the clock had not jumped then, and between which two starts of the machine.
    reading: Reading = Reading(0, 0)
    steady_ms: int = 0
    boot: str = ""


@dataclass(slots=True)
class _Jump:
    by_ms: int
    since_ms: int

    @property
    def hold_ms(self) -> int:
        return min(abs(self.by_ms), HOLD_MS_MAX)


class Timekeeper:
    def __init__(self, me: int, reading: Reading, memory: Memory | None = None, boot: str = "") -> None:
        """``boot`` names the start of the machine from which the monotonic clock counts; "": unknown."""
        self._me = me
        self._boot = boot
        # From the monotonic clock to the time that is believed in.
        self._believed_offset_ms = reading.offset_ms
        # What lies between that and the time as it seems to be, which is the earlier median of all clocks. The
        # oldest first, and all in the same direction.
        self._jumps: list[_Jump] = []
        # Of this broker's own clock, and since when it has not jumped.
        self._own_offset_ms, self._steady_since_ms = reading.offset_ms, reading.now_ms
        if memory is not None:
            self._recall(memory, reading)
        # Of the later median.
        self._latest_offset_ms = self._offset_ms
        self._is_compared = False
        self._are_most_told = True
        # Whether there is no other clock to compare with.
        self._is_alone = False
        # Of each other broker: how far ahead of the median it is, if it says so.
        self._others: dict[int, int | None] = {}

    def _recall(self, memory: Memory, reading: Reading) -> None:
        # On a machine that was off meanwhile the monotonic clock has begun again: nobody knows for how long it was.
        is_same_boot = (
            bool(self._boot) and self._boot == memory.boot and reading.now_ms >= memory.reading.now_ms
        )
        then_ms = memory.reading.now_ms if is_same_boot else reading.now_ms
        self._believed_offset_ms = memory.believed_ms - then_ms
        self._jumps = [_Jump(by_ms, then_ms - lasted_ms) for by_ms, lasted_ms in memory.jumps]
        if is_same_boot and abs(reading.offset_ms - memory.reading.offset_ms) <= TOLERANCE_MS:
            self._steady_since_ms = then_ms - memory.steady_ms

    @property
    def _offset_ms(self) -> int:
        """From the monotonic clock to the time as it seems to be."""
        return self._believed_offset_ms + sum(jump.by_ms for jump in self._jumps)

    # What comes in

    def compared(
        self, sent: Reading, received: Reading, controller_ms: int | None, clocks: Mapping[int, NodeTime]
    ) -> None:
        """The controller has answered a heartbeat.

        ``controller_ms`` is its wall time; ``clocks`` has each broker's, and the controller's.
        """
        self._look(received)
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
        others = {node: told for node, told in clocks.items() if node != self._me}
        known = sorted([own_ms, *(told.ahead_ms for told in others.values() if told.ahead_ms is not None)])
        self._is_compared = True
        self._is_alone = not others
        self._are_most_told = 2 * len(known) > 1 + len(others)
        earlier_ms, later_ms = known[(len(known) - 1) // 2], known[len(known) // 2]
        self._others = {
            node: None if told.ahead_ms is None else told.ahead_ms - earlier_ms
            for node, told in others.items()
        }
        if self._are_most_told:
            self._latest_offset_ms = controller_ms + later_ms - received.now_ms
            self._found(controller_ms + earlier_ms - received.now_ms, received.now_ms)
            self._trust(others)

    def _look(self, reading: Reading) -> None:
        """Whether this broker's own clock has jumped."""
        if abs(reading.offset_ms - self._own_offset_ms) > TOLERANCE_MS:
            self._steady_since_ms = reading.now_ms
        self._own_offset_ms = reading.offset_ms

    def _found(self, offset_ms: int, now_ms: int) -> None:
        """This seems to be the time."""
        by_ms = offset_ms - self._offset_ms
        if abs(by_ms) > TOLERANCE_MS:
            # What is taken back has not lasted.
            while self._jumps and abs(by_ms) > TOLERANCE_MS and (self._jumps[-1].by_ms > 0) != (by_ms > 0):
                by_ms += self._jumps.pop().by_ms
        if abs(by_ms) <= TOLERANCE_MS:
            self._believed_offset_ms += by_ms
        else:
            if len(self._jumps) == JUMPS_MAX:
                by_ms += self._jumps.pop().by_ms
            self._jumps.append(_Jump(by_ms, now_ms))
        for jump in list(self._jumps):
            if now_ms - jump.since_ms >= jump.hold_ms:
                self._believed_offset_ms += jump.by_ms
                self._jumps.remove(jump)

    def _trust(self, others: Mapping[int, NodeTime]) -> None:
        """The time is believed here as soon as it has lasted long enough on most of the other brokers."""
        jump_ms = min(abs(self.jump_ms()), HOLD_MS_MAX)
        witnesses = 0
        for node, told in others.items():
            ahead_ms = self._others[node]
            if ahead_ms is not None and abs(ahead_ms) <= TOLERANCE_MS:
                witnesses += told.steady_ms is not None and told.steady_ms >= jump_ms
        if 2 * witnesses > len(others):
            self._believed_offset_ms = self._offset_ms
            self._jumps.clear()

    # What comes out

    def doubt(self, reading: Reading) -> Doubt | None:
        """What is wrong with the time; None: nothing."""
        if not self._are_most_told:
            return Doubt.NOT_TOLD
        if not self._is_compared:
            return Doubt.NOT_COMPARED
        if self._is_alone:
            # The clock may have been set since the last heartbeat.
            self._found(reading.offset_ms, reading.now_ms)
        difference_ms = self.difference_ms(reading)
        if abs(difference_ms) > TOLERANCE_MS:
            return Doubt.AHEAD if difference_ms > 0 else Doubt.BEHIND
        return Doubt.JUMPED if self._jumps else None

    def expiry_ms(self, reading: Reading) -> int | None:
        """The time by which something may be deleted for its age; None: nothing may."""
        if self.doubt(reading) not in (None, Doubt.JUMPED):
            return None
        return self.range_ms(reading)[0]

    def range_ms(self, reading: Reading) -> tuple[int, int]:
        """The earliest and the latest that it may be."""
        offsets = (reading.offset_ms, self._believed_offset_ms, self._offset_ms, self._latest_offset_ms)
        return reading.now_ms + min(offsets), reading.now_ms + max(offsets)

    def stamp_ms(self, reading: Reading) -> int:
        """What to write on a record. Never a time long ago, or the record would be deleted too early."""
        latest_ms = self.range_ms(reading)[1]
        return latest_ms if latest_ms - reading.wall_ms > TOLERANCE_MS else reading.wall_ms

    def difference_ms(self, reading: Reading) -> int:
        """How far this broker's clock is ahead of the median of all."""
        return reading.offset_ms - self._offset_ms

    def jump_ms(self) -> int:
        """How far the time has jumped, as far as that is not believed."""
        return self._offset_ms - self._believed_offset_ms

    def steady_ms(self, reading: Reading) -> int:
        """For how long this broker's own clock has not jumped."""
        self._look(reading)
        return reading.now_ms - self._steady_since_ms

    def ahead_ms(self, reading: Reading) -> dict[int, int | None]:
        """How far each clock is ahead of the median of all; None where it is not told."""
        if self._is_alone or not self._is_compared:
            return {self._me: None}
        return {**self._others, self._me: self.difference_ms(reading)}

    def memory(self, reading: Reading) -> Memory:
        """What the next process has to know."""
        return Memory(
            reading.now_ms + self._believed_offset_ms,
            tuple((jump.by_ms, reading.now_ms - jump.since_ms) for jump in self._jumps),
            reading,
            self.steady_ms(reading),
            self._boot,
        )

    def check(self) -> None:
        assert not (self._is_alone and self._others), self._others
        assert len(self._jumps) <= JUMPS_MAX
        assert all(abs(jump.by_ms) > TOLERANCE_MS for jump in self._jumps), self._jumps
        assert len({jump.by_ms > 0 for jump in self._jumps}) <= 1, self._jumps
