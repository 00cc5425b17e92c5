"""How long the quorum waits for what. The shell may choose; everything rests on the order of these moments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RaftSettings:
    # Without an answer from the leader for so long, a follower looks for another.
    fetch_timeout_ms: int = 1000
    # Of one election; drawn between this and twice this.
    election_timeout_ms: int = 500
    # After a lost election; drawn between nothing and this.
    election_backoff_ms: int = 500
    # How long the leader may hold a fetch for which it has nothing.
    fetch_max_wait_ms: int = 500
    # After a request that was not answered.
    retry_backoff_ms: int = 50
    # Whether a voter whose disk was wiped is replaced without being told.
    replaces_wiped_voters: bool = True

    @property
    def check_quorum_ms(self) -> int:
        """A leader that no majority fetches from for so long resigns. Its followers have given up before."""
        return self.fetch_timeout_ms * 3 // 2
