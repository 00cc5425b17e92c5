"""Which followers have stopped fetching from this broker: cut off from it, or stuck.

The controller fences a broker that it does not hear for a session. A follower that the controller hears, and its
leader does not, is nobody's business but the leader's: as long as it counts as in sync, nothing is committed. One
that is slow is given ``replica.lag.time.max.ms``; one that has not asked for anything at all for a session is
removed like one that the controller does not hear.

What a newcomer gets wrong: it is noted per broker and not per partition, because a fetch does not name the
partitions that are quiet. And silence may be our own: a process that was stopped for a while has heard nobody.
"""

from __future__ import annotations

# How often to look whether somebody has fallen silent.
LOOK_INTERVAL_MS = 1_000
# A look that comes later than this after the one before: this process did not run, and has to listen anew.
_ABSENCE_MS = 3 * LOOK_INTERVAL_MS


class FollowerActivity:
    __slots__ = ("_heard_ms", "_listening_ms", "_looked_ms", "max_ms")

    def __init__(self, max_ms: int, now_ms: int) -> None:
        self.max_ms = max_ms
        # The last fetch of each broker, of any of its partitions.
        self._heard_ms: dict[int, int] = {}
        # What was before does not count.
        self._listening_ms = now_ms
        self._looked_ms = now_ms

    def heard(self, broker: int, now_ms: int) -> None:
        """A broker fetches. Called at every fetch of a follower, so it does next to nothing."""
        self._heard_ms[broker] = now_ms

    def look(self, now_ms: int) -> list[int]:
        """Who is silent now, of those that have ever fetched. To be called every ``LOOK_INTERVAL_MS``."""
        if now_ms - self._looked_ms > _ABSENCE_MS:
            self._listening_ms = now_ms
        self._looked_ms = now_ms
        return [broker for broker in self._heard_ms if self.is_silent(broker, 0, now_ms)]

    def is_silent(self, broker: int, since_ms: int, now_ms: int) -> bool:
        """Whether a broker that should have fetched since then, at the latest, has not for too long."""
        if now_ms - self._looked_ms > _ABSENCE_MS:
            return False  # the next look comes first
        heard_ms = self._heard_ms.get(broker, 0)
        return now_ms - max(heard_ms, since_ms, self._listening_ms) > self.max_ms
