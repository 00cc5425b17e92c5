"""The current time, checked: this broker's wall clock against the other brokers' and against the monotonic clock.

Records and committed offsets are deleted by age, and a wrong clock would make all of them old at once. So a broker
deletes by age only while

    most brokers report their time        the controller passes it on in every heartbeat response
    its own clock agrees with theirs      within TOLERANCE_MS of their median; of two medians, the earlier counts

If that time has jumped against the monotonic clock, the earlier of the old and the new time counts. After a jump
(all clocks were set, or the cluster was off) a broker cannot tell which of them is right. It believes the new time
when it has lasted as long as it jumped, or HOLD_MS_MAX: on this broker, across its processes, or on most of the
other brokers, which ran while this one did not. Each jump has its own wait, so a machine that is off every night is
late by some nights, not for ever. A single broker follows the same rules with one clock.

A core: times go in as ``Reading``s, answers come out. There is not one safe time: for deleting it is the earliest;
for stamping a record, or refusing one as too far in the future, it is the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Synchronised clocks differ by milliseconds. An unsynchronised clock drifts by some seconds in a week.
TOLERANCE_MS = 10_000
# The longest that a jump has to last. Also the default retention of a topic.
HOLD_MS_MAX = 7 * 86_400_000
# Jumps that wait at the same time; further ones are merged into the newest. A machine that runs for a quarter of an
# hour a day has this many.
JUMPS_MAX = 100
# A response that took longer says too little about the time.
ANSWER_MS_MAX = 5_000


class Reading(NamedTuple):
    """The monotonic and the wall clock of this machine at one moment."""

    now_ms: int
    wall_ms: int

    @property
    def offset_ms(self) -> int:
        return self.wall_ms - self.now_ms


class Doubt(Enum):
    """Why little or nothing is deleted by age."""

    NOT_COMPARED = "the time was not compared with the other brokers yet"
    NOT_TOLD = "most brokers do not tell their time: they run an older version"
    JUMPED = "the time has jumped"
    AHEAD = "this broker's clock is ahead of the others"
    BEHIND = "this broker's clock is behind the others"


class NodeTime(NamedTuple):
    """One node's clock, as the controller reports it."""

    # How far it is ahead of the controller's clock; None: unknown.
    ahead_ms: int | None
    # Time since it last jumped; None: unknown.
    steady_ms: int | None = None


class Memory(NamedTuple):
    """What a process stores for the next one."""

    believed_ms: int
    # Jumps not believed yet, oldest first: (how far, how long it has lasted).
    jumps: tuple[tuple[int, int], ...] = ()
    # The clocks when this was stored, the time since the wall clock's last jump, and the boot id.
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
        """``boot`` is the boot id; the monotonic clock starts again with each boot. "" if unknown."""
        self._me = me
        self._boot = boot
        # The believed time minus the monotonic clock.
        self._believed_offset_ms = reading.offset_ms
        # The jumps from the believed time to the apparent time (the earlier median of all clocks). Oldest first,
        # all in the same direction.
        self._jumps: list[_Jump] = []
        # This broker's own wall clock minus its monotonic clock, and when it last jumped.
        self._own_offset_ms, self._steady_since_ms = reading.offset_ms, reading.now_ms
        if memory is not None:
            self._recall(memory, reading)
        # The later median of all clocks minus the monotonic clock.
        self._latest_offset_ms = self._offset_ms
        self._is_compared = False
        self._are_most_told = True
        # Whether there is no other clock to compare with.
        self._is_alone = False
        # How far each other node's clock is ahead of the earlier median; None: unknown.
        self._others: dict[int, int | None] = {}

    def _recall(self, memory: Memory, reading: Reading) -> None:
        # After a reboot the monotonic clock has started again, so the time in between is unknown.
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
        """The apparent time minus the monotonic clock."""
        return self._believed_offset_ms + sum(jump.by_ms for jump in self._jumps)

    # What comes in

    def compared(
        self, sent: Reading, received: Reading, controller_ms: int | None, clocks: Mapping[int, NodeTime]
    ) -> None:
        """The controller has answered a heartbeat.

        ``controller_ms`` is its wall time, None if it reports none; ``clocks`` has all brokers' and its own.
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
        # The controller read its clock between the two, so ours is ahead by a value in this range. Take the one
        # nearest to zero.
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
        """Notice when this broker's own clock has jumped."""
        if abs(reading.offset_ms - self._own_offset_ms) > TOLERANCE_MS:
            self._steady_since_ms = reading.now_ms
        self._own_offset_ms = reading.offset_ms

    def _found(self, offset_ms: int, now_ms: int) -> None:
        """The apparent time is now this: record a jump, cancel one, or believe one that has lasted."""
        by_ms = offset_ms - self._offset_ms
        if abs(by_ms) > TOLERANCE_MS:
            # A jump back cancels the latest jumps.
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
        """Believe the apparent time if it has lasted long enough on most of the other brokers."""
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
        """Why the time is in doubt; None when it is not."""
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
        """The current time for deleting by age; None: nothing may be deleted by age."""
        if self.doubt(reading) not in (None, Doubt.JUMPED):
            return None
        return self.range_ms(reading)[0]

    def range_ms(self, reading: Reading) -> tuple[int, int]:
        """The earliest and the latest time that it may be now."""
        offsets = (reading.offset_ms, self._believed_offset_ms, self._offset_ms, self._latest_offset_ms)
        return reading.now_ms + min(offsets), reading.now_ms + max(offsets)

    def stamp_ms(self, reading: Reading) -> int:
        """The timestamp for a record. Never too early, or the record would be deleted too early."""
        latest_ms = self.range_ms(reading)[1]
        return latest_ms if latest_ms - reading.wall_ms > TOLERANCE_MS else reading.wall_ms

    def difference_ms(self, reading: Reading) -> int:
        """How far this broker's clock is ahead of the median."""
        return reading.offset_ms - self._offset_ms

    def jump_ms(self) -> int:
        """The sum of the jumps that are not believed yet."""
        return self._offset_ms - self._believed_offset_ms

    def steady_ms(self, reading: Reading) -> int:
        """Time since this broker's own clock last jumped."""
        self._look(reading)
        return reading.now_ms - self._steady_since_ms

    def ahead_ms(self, reading: Reading) -> dict[int, int | None]:
        """How far each clock is ahead of the median; None where unknown."""
        if self._is_alone or not self._is_compared:
            return {self._me: None}
        return {**self._others, self._me: self.difference_ms(reading)}

    def memory(self, reading: Reading) -> Memory:
        """The state to store for the next process."""
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
