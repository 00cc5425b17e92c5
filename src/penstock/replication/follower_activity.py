"""Which followers have stopped fetching from this broker: cut off from it, or stuck.

The controller fences a broker that sends no heartbeat for a session. But a follower that reaches the controller
and not its leader can only be handled by the leader: as long as it counts as in sync, nothing is committed. A slow
follower is given ``replica.lag.time.max.ms``. One that has not fetched at all for a session is removed, as if the
controller had fenced it.

Fetches are recorded per broker and not per partition, because a fetch does not list quiet partitions. Careful: a
silence may be our own fault. A process that was suspended has received no fetches.
"""

from __future__ import annotations

# How often to check for silent followers.
LOOK_INTERVAL_MS = 1_000
# If two checks are further apart than this, this process was suspended, and the silence is counted from now.
_ABSENCE_MS = 3 * LOOK_INTERVAL_MS


class FollowerActivity:
    __slots__ = ("_heard_ms", "_listening_ms", "_looked_ms", "max_ms")

    def __init__(self, max_ms: int, now_ms: int) -> None:
        self.max_ms = max_ms
        # Time of each broker's last fetch, of any of its partitions.
        self._heard_ms: dict[int, int] = {}
        # Silence is counted from here at the earliest.
        self._listening_ms = now_ms
        self._looked_ms = now_ms

    def heard(self, broker: int, now_ms: int) -> None:
        """A broker fetched. Called at every follower fetch, so it must be cheap."""
        self._heard_ms[broker] = now_ms

    def look(self, now_ms: int) -> list[int]:
        """The silent brokers among those that have ever fetched. Call it every ``LOOK_INTERVAL_MS``."""
        if now_ms - self._looked_ms > _ABSENCE_MS:
            self._listening_ms = now_ms
        self._looked_ms = now_ms
        return [broker for broker in self._heard_ms if self.is_silent(broker, 0, now_ms)]

    def is_silent(self, broker: int, since_ms: int, now_ms: int) -> bool:
        """Whether a broker, expected to fetch from ``since_ms`` on, has not fetched for too long."""
        if now_ms - self._looked_ms > _ABSENCE_MS:
            return False  # this process was suspended: wait for the next ``look``
        heard_ms = self._heard_ms.get(broker, 0)
        return now_ms - max(heard_ms, since_ms, self._listening_ms) > self.max_ms
