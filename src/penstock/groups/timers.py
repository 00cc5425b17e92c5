"""Timers for many deadlines, most of which move long before they are due.

Every heartbeat moves its member's session forward, so moving a timer must cost almost nothing. A timer has at
most one valid entry in the heap. Moving it later only changes the deadline in the timer, and the heap notices
when it gets to the entry. The real deadline is always ``Timer.deadline_ms``; the heap only guarantees to look at
it early enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum, auto

# The heap may hold as many stale entries as armed timers, plus this many.
STALE_MAX = 64


class TimerKind(Enum):
    SESSION = auto()  # a member sent nothing for its session timeout
    PENDING = auto()  # a member id sent with MEMBER_ID_REQUIRED was not used
    JOIN = auto()  # the join phase of a rebalance is over
    SYNC = auto()  # members have not sent SyncGroup
    OFFSETS = auto()  # it is time to look for expired offsets


class Timer:
    __slots__ = ("deadline_ms", "group_id", "kind", "member_id", "queued_ms")

    def __init__(self, kind: TimerKind, group_id: str = "", member_id: str = "") -> None:
        self.kind = kind
        self.group_id = group_id
        self.member_id = member_id
        # None while not armed.
        self.deadline_ms: int | None = None
        # The time of its entry in the heap. Never after deadline_ms. None without an entry.
        self.queued_ms: int | None = None

    @property
    def is_armed(self) -> bool:
        return self.deadline_ms is not None


class Timers:
    def __init__(self) -> None:
        # (moment, tie breaker, timer): equal moments are served in the order they were queued.
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = 0
        self._armed = 0

    def start(self, timer: Timer, deadline_ms: int) -> None:
        """Arm a timer, or move an armed one."""
        if timer.deadline_ms is None:
            self._armed += 1
        timer.deadline_ms = deadline_ms
        if timer.queued_ms is None or deadline_ms < timer.queued_ms:
            self._queue(timer, deadline_ms)

    def cancel(self, timer: Timer) -> None:
        if timer.deadline_ms is not None:
            timer.deadline_ms = None
            self._armed -= 1

    @property
    def next_deadline_ms(self) -> int | None:
        return self._heap[0][0] if self._settle_top() else None

    def due(self, now_ms: int) -> Iterator[Timer]:
        """Disarm and yield the timers that are due, in order, including those armed during the iteration."""
        while self._settle_top() and self._heap[0][0] <= now_ms:
            _, _, timer = heapq.heappop(self._heap)
            timer.queued_ms = None
            timer.deadline_ms = None
            self._armed -= 1
            yield timer

    def check(self) -> None:
        waiting = {id(timer): moment for moment, _, timer in self._heap if timer.queued_ms == moment}
        armed = 0
        for _, _, timer in self._heap:
            if timer.deadline_ms is not None and waiting.pop(id(timer), None) is not None:
                armed += 1
                assert timer.queued_ms is not None and timer.queued_ms <= timer.deadline_ms
        assert armed == self._armed, f"{self._armed} timers armed but {armed} in the heap"

    def _settle_top(self) -> bool:
        """Make the top of the heap a timer that is due at that time; False when the heap is empty."""
        heap = self._heap
        while heap:
            moment, _, timer = heap[0]
            if timer.queued_ms == moment and timer.deadline_ms == moment:
                return True
            heapq.heappop(heap)
            if timer.queued_ms == moment:
                timer.queued_ms = None
                if timer.deadline_ms is not None:
                    self._queue(timer, timer.deadline_ms)
            # Otherwise the timer was queued again for an earlier time, and this entry is stale.
        return False

    def _queue(self, timer: Timer, moment_ms: int) -> None:
        if len(self._heap) > 2 * self._armed + STALE_MAX:
            self._drop_stale()
        self._sequence += 1
        timer.queued_ms = moment_ms
        heapq.heappush(self._heap, (moment_ms, self._sequence, timer))

    def _drop_stale(self) -> None:
        kept = []
        for entry in self._heap:
            moment, _, timer = entry
            if timer.queued_ms != moment:
                continue
            if timer.deadline_ms is None:
                timer.queued_ms = None
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
