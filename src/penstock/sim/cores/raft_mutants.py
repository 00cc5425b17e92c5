"""Planted bugs: the quorum's core with one rule broken at a time, to see that the simulator would notice.

Each class is a mistake that somebody has made, or could. They exist only here; the product has no switch for
them. Their ``check`` is silenced, so that it is the ledger, which looks from outside, that has to find out.
"""

from __future__ import annotations

from typing import Any

from penstock.raft.events import (
    Append,
    AppendFetched,
    Effect,
    FetchAnswer,
    FetchRequest,
    Send,
    StoreState,
    Truncate,
    VoteRequest,
)
from penstock.raft.quorum import Voter, Voters, majority
from penstock.raft.raft import Raft
from penstock.raft.roles import Follower, Leader, Unattached
from penstock.raft.storage import EpochEnd


class _Mutant(Raft):
    def check(self) -> None:
        pass


class VoteNotStored(_Mutant):
    """Answers first and stores the vote afterwards."""

    def _take(self) -> list[Effect]:
        effects = super()._take()
        if any(isinstance(effect, Append | AppendFetched | Truncate) for effect in effects):
            return effects
        return sorted(effects, key=lambda effect: isinstance(effect, StoreState))


class LeaderCountsUnflushed(_Mutant):
    """Counts its own copy before it is durable."""

    def _advance(self, role: Leader, now_ms: int) -> None:
        flushed_offset = self._flushed_offset
        self._flushed_offset = self._log.end_offset
        super()._advance(role, now_ms)
        self._flushed_offset = flushed_offset


class FetchesUnflushed(_Mutant):
    """Asks for more, and by that promises what it has, before what it has is durable."""

    def log_changed(self, now_ms: int) -> list[Effect]:
        effects = super().log_changed(now_ms)
        if isinstance(self.role, Follower):
            self._flushed_offset = self._log.end_offset
            self._send_fetch(self.role, now_ms)
        return effects + self._take()


class NoCorrelation(_Mutant):
    """Takes any answer of its epoch for the answer to what it asked last."""

    def _fetch_answered(self, request: FetchRequest, answer: FetchAnswer, now_ms: int) -> None:
        if isinstance(self.role, Follower):
            self.role.fetch = request
        super()._fetch_answered(request, answer, now_ms)


class CommitsOldEpoch(_Mutant):
    """Commits what a majority has, be it only of older epochs (Raft, figure 8)."""

    def _advance(self, role: Leader, now_ms: int) -> None:
        epoch_start_offset = role.epoch_start_offset
        role.epoch_start_offset = -1
        super()._advance(role, now_ms)
        role.epoch_start_offset = epoch_start_offset


class TruncatesToHighWatermark(_Mutant):
    """Goes back to what it knows to be committed, which may be less than is (before KIP-101)."""

    def _truncation_offset(self, diverging: EpochEnd) -> int:
        return self.high_watermark


class NoPreVote(_Mutant):
    """Opens a new epoch whenever it misses the leader."""

    def _stand(self, voters: Voters, former_leader_id: int | None, now_ms: int) -> None:
        self._become_candidate(voters, now_ms)


class IgnoresLeader(_Mutant):
    """Would elect anyone with a good log, though it hears the leader."""

    def _hears_leader(self) -> bool:
        return False


class TwoChangesAtOnce(_Mutant):
    """Changes the voters while the change before is not committed."""

    def _may_change_voters(self) -> bool:
        return self.is_leader and bool(self._log.voters)


class BornByMajority(_Mutant):
    """Lets a majority of those it met over time elect the first leader: a wiped one may be the only one that
    two leaders have in common, and it does not remember the first.
    """

    def _votes_needed(self, voters: Voters) -> int:
        return majority(len(voters))

    def _tick_unattached(self, role: Unattached, now_ms: int) -> None:
        met = dict(role.newborns) or getattr(self, "_met", {})
        super()._tick_unattached(role, now_ms)
        role.newborns = {**met, **role.newborns}
        self._met = role.newborns


class NoLogCheck(_Mutant):
    """Elects candidates that lack what is committed."""

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        return True


class VotesTwice(_Mutant):
    """Forgets, while it runs, that it has voted."""

    def _may_vote_for(self, request: VoteRequest) -> bool:
        self.voted_for = None
        return super()._may_vote_for(request)


class AnyDirectory(_Mutant):
    """Gives the vote of a disk that is gone, which it may have given before."""

    def _vote(self, request: VoteRequest, token: Any, now_ms: int) -> None:
        if request.voter.id == self.me.id:
            request = request._replace(voter=self.me)
        super()._vote(request, token, now_ms)


class NoDivergence(_Mutant):
    """Takes every follower's log for the beginning of its own."""

    def _parting(self, request: FetchRequest) -> FetchAnswer | None:
        if request.offset < self._log.start_offset or request.offset > self._log.end_offset:
            return super()._parting(request)
        return None


class CountsObservers(_Mutant):
    """Counts the copies of nodes that have no vote."""

    def _advance(self, role: Leader, now_ms: int) -> None:
        progress = dict(role.progress)
        best: dict[int, Voter] = {}
        for replica in progress:
            best[replica.id] = replica
        for voter in self.voters:
            if voter.id in best and voter != self.me:
                role.progress[voter] = progress[best[voter.id]]
        super()._advance(role, now_ms)


class FetchesTwice(_Mutant):
    """Sends the next fetch before it has appended what the last one brought."""

    def _fetch_answered(self, request: FetchRequest, answer: FetchAnswer, now_ms: int) -> None:
        super()._fetch_answered(request, answer, now_ms)
        role = self.role
        if isinstance(role, Follower) and answer.records and role.fetch is None:
            ahead = request._replace(offset=request.offset + len(answer.records), last_epoch=self.epoch)
            self._emit(Send(role.leader_id, ahead))


MUTANTS: dict[str, type[Raft]] = {
    "vote not stored": VoteNotStored,
    "leader counts unflushed": LeaderCountsUnflushed,
    "fetches unflushed": FetchesUnflushed,
    "no correlation": NoCorrelation,
    "commits old epoch": CommitsOldEpoch,
    "truncates to high watermark": TruncatesToHighWatermark,
    "no prevote": NoPreVote,
    "ignores leader": IgnoresLeader,
    "two changes at once": TwoChangesAtOnce,
    "born by majority": BornByMajority,
    "no log check": NoLogCheck,
    "votes twice": VotesTwice,
    "any directory": AnyDirectory,
    "no divergence": NoDivergence,
    "counts observers": CountsObservers,
    "fetches ahead": FetchesTwice,
}
