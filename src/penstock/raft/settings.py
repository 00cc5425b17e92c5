"""Timeouts of the quorum. The shell may change them, but must keep their order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RaftSettings:
    # A follower that gets no answer from the leader for this long stands for election.
    fetch_timeout_ms: int = 1000
    # For one election. Drawn between this and twice this.
    election_timeout_ms: int = 500
    # After a lost election. Drawn between 0 and this.
    election_backoff_ms: int = 500
    # How long the leader may park a fetch for which it has no records.
    fetch_max_wait_ms: int = 500
    # After a request that was not answered.
    retry_backoff_ms: int = 50
    # Whether the leader replaces a voter whose disk was wiped without an operator's command.
    replaces_wiped_voters: bool = True

    @property
    def check_quorum_ms(self) -> int:
        """A leader resigns when no majority has fetched for this long. Its followers time out earlier."""
        return self.fetch_timeout_ms * 3 // 2
