"""Planted bugs of the quorum: the core with one rule broken at a time, to test the simulator.

Each is a mistake that was made, or could be made, in one part of the core. They exist only here; the product has
no switch for them. Their ``check`` is disabled, so that the ledger has to find them from outside.
"""

from __future__ import annotations

from typing import Any

from penstock.raft.elections import Elections
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
from penstock.raft.following import Following
from penstock.raft.leading import Leading
from penstock.raft.participant import Participant
from penstock.raft.quorum import Voter, Voters, majority
from penstock.raft.raft import Raft
from penstock.raft.roles import Follower, Leader, Unattached
from penstock.raft.storage import EpochEnd
from penstock.raft.voter_changes import VoterChanges


class _Mutant(Raft):
    def check(self) -> None:
        pass


# State common to all roles.


class StoresLast(Participant):
    """Responds before it stores the vote."""

    def take(self) -> list[Effect]:
        effects = super().take()
        if any(isinstance(effect, Append | AppendFetched | Truncate) for effect in effects):
            return effects
        return sorted(effects, key=lambda effect: isinstance(effect, StoreState))


# Elections.


class NoPreVote(Elections):
    """Opens a new epoch whenever it misses the leader."""

    def stand(self, voters: Voters, former_leader_id: int | None, now_ms: int) -> None:
        self._become_candidate(voters, now_ms)


class IgnoresLeader(Elections):
    """Votes for any candidate with a good log, though it hears the leader."""

    def _hears_leader(self) -> bool:
        return False


class BornByMajority(Elections):
    """Lets a majority of the nodes it has met over time elect the first leader.

    The only node that two such leaders have in common may be a wiped one, which does not remember the first.
    """

    def _votes_needed(self, voters: Voters) -> int:
        return majority(len(voters))

    def tick_unattached(self, role: Unattached, now_ms: int) -> None:
        met = dict(role.newborns) or getattr(self, "_met", {})
        super().tick_unattached(role, now_ms)
        role.newborns = {**met, **role.newborns}
        self._met = role.newborns


class NoLogCheck(Elections):
    """Votes for candidates that lack committed entries."""

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        return True


class VotesTwice(Elections):
    """Forgets its vote while it runs."""

    def _may_vote_for(self, request: VoteRequest) -> bool:
        self._node.voted_for = None
        return super()._may_vote_for(request)


class AnyDirectory(Elections):
    """Gives the vote of its old disk, which may have voted before."""

    def vote(self, request: VoteRequest, token: Any, now_ms: int) -> None:
        if request.voter.id == self._node.me.id:
            request = request._replace(voter=self._node.me)
        super().vote(request, token, now_ms)


# Following.


class FetchesUnflushed(Following):
    """Fetches more, and thereby promises what it has, before that is durable."""

    def log_changed(self, role: Follower) -> None:
        super().log_changed(role)
        self._node.flushed_offset = self._node.log.end_offset
        self.send_fetch(role)


class NoCorrelation(Following):
    """Takes any response of its epoch for the response to its last request."""

    def fetch_answered(self, request: FetchRequest, answer: FetchAnswer, now_ms: int) -> None:
        if isinstance(self._node.role, Follower):
            self._node.role.fetch = request
        super().fetch_answered(request, answer, now_ms)


class TruncatesToHighWatermark(Following):
    """Truncates to its high watermark, which may be behind the real one (before KIP-101)."""

    def _truncation_offset(self, diverging: EpochEnd) -> int:
        return self._node.high_watermark


class FetchesTwice(Following):
    """Sends the next fetch before it has appended the records of the last one."""

    def fetch_answered(self, request: FetchRequest, answer: FetchAnswer, now_ms: int) -> None:
        super().fetch_answered(request, answer, now_ms)
        role = self._node.role
        if isinstance(role, Follower) and answer.records and role.fetch is None:
            offset = request.offset + len(answer.records)
            ahead = request._replace(offset=offset, last_epoch=self._node.epoch)
            self._node.emit(Send(role.leader_id, ahead))


# Leading.


class CountsUnflushed(Leading):
    """Counts its own copy before it is durable."""

    def advance(self, role: Leader, now_ms: int) -> None:
        flushed_offset = self._node.flushed_offset
        self._node.flushed_offset = self._node.log.end_offset
        super().advance(role, now_ms)
        self._node.flushed_offset = flushed_offset


class CommitsOldEpoch(Leading):
    """Commits what a majority has, even if it is of older epochs only (Raft, figure 8)."""

    def advance(self, role: Leader, now_ms: int) -> None:
        epoch_start_offset = role.epoch_start_offset
        role.epoch_start_offset = -1
        super().advance(role, now_ms)
        role.epoch_start_offset = epoch_start_offset


class NoDivergence(Leading):
    """Assumes that every follower's log is a prefix of its own."""

    def _parting(self, request: FetchRequest) -> FetchAnswer | None:
        log = self._node.log
        if request.offset < log.start_offset or request.offset > log.end_offset:
            return super()._parting(request)
        return None


class CountsObservers(Leading):
    """Counts the copies of nodes that have no vote."""

    def advance(self, role: Leader, now_ms: int) -> None:
        progress = dict(role.progress)
        best: dict[int, Voter] = {}
        for replica in progress:
            best[replica.id] = replica
        for voter in self._node.voters:
            if voter.id in best and voter != self._node.me:
                role.progress[voter] = progress[best[voter.id]]
        super().advance(role, now_ms)


# Voter changes.


class TwoAtOnce(VoterChanges):
    """Changes the voters while the previous change is not committed."""

    def may_change(self) -> bool:
        return self._node.is_leader and bool(self._node.log.voters)


def _with(part: type) -> type[Raft]:
    """The core with one of its parts replaced by a broken one."""
    (place,) = (
        name
        for name, good in vars(Raft).items()
        if name.endswith("_type") and isinstance(good, type) and issubclass(part, good)
    )
    return type(part.__name__, (_Mutant,), {place: part})


MUTANTS: dict[str, type[Raft]] = {
    "vote not stored": _with(StoresLast),
    "leader counts unflushed": _with(CountsUnflushed),
    "fetches unflushed": _with(FetchesUnflushed),
    "no correlation": _with(NoCorrelation),
    "commits old epoch": _with(CommitsOldEpoch),
    "truncates to high watermark": _with(TruncatesToHighWatermark),
    "no prevote": _with(NoPreVote),
    "ignores leader": _with(IgnoresLeader),
    "two changes at once": _with(TwoAtOnce),
    "born by majority": _with(BornByMajority),
    "no log check": _with(NoLogCheck),
    "votes twice": _with(VotesTwice),
    "any directory": _with(AnyDirectory),
    "no divergence": _with(NoDivergence),
    "counts observers": _with(CountsObservers),
    "fetches ahead": _with(FetchesTwice),
}
