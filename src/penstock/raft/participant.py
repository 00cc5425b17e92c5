"""The state that a quorum node has in every role: epoch and vote, how far its log is durable and committed, the
current role, and the effects of the current call.

The parts of the core share one ``Participant`` and otherwise know only those below them: ``elections.py``
knows ``following.py`` and ``leading.py``, and ``leading.py`` knows ``voter_changes.py``. A leader or follower
may become unattached at any moment, so that transition is here; the others are in the part they lead to.

Careful: request effects only through ``emit``, because an epoch or vote that is not stored yet must be stored
before them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    Effect,
    EpochAnswer,
    FetchAnswer,
    Flush,
    HighWatermark,
    Reply,
    RoleChanged,
    StoreState,
)
from penstock.raft.quorum import Voter, Voters, differ_by_one
from penstock.raft.roles import NEVER_MS, Candidate, Follower, Leader, Prospective, Role, Unattached
from penstock.raft.settings import RaftSettings
from penstock.raft.storage import LogView, StoredState


class Participant:
    def __init__(
        self,
        me: Voter,
        controllers: Sequence[int],
        *,
        log: LogView,
        stored: StoredState,
        random: random.Random,
        settings: RaftSettings,
    ) -> None:
        self.me = me
        # The nodes that form a new cluster.
        self.controllers = tuple(sorted(controllers)) or (me.id,)
        self.log = log
        self.random = random
        self.settings = settings

        # Never decreases. Epoch and vote are stored before any message mentions them.
        self.epoch = max(stored.epoch, log.last_epoch)
        self.voted_for = stored.voted_for if stored.epoch == self.epoch else None
        self._is_state_stale = False

        # Exclusive: everything below is committed. Never decreases while this node runs. Snapshots contain only
        # committed records.
        self.high_watermark = log.snapshot_id.end_offset if log.snapshot_id is not None else log.start_offset
        # Exclusive. Never above the log's end.
        self.flushed_offset = log.end_offset
        self._is_flushing = False

        self.role: Role = Unattached(NEVER_MS, NEVER_MS)
        # The epoch in the last RoleChanged.
        self._announced_epoch = -1
        self._effects: list[Effect] = []

    # State

    @property
    def is_leader(self) -> bool:
        return type(self.role) is Leader

    @property
    def is_established(self) -> bool:
        """Whether this node leads and has committed a record of its epoch, and so everything before it."""
        return type(self.role) is Leader and self.high_watermark > self.role.epoch_start_offset

    @property
    def voters(self) -> Voters:
        """The newest voter set in the log; empty if there is none."""
        entries = self.log.voters
        return entries[-1][1] if entries else ()

    @property
    def is_voter(self) -> bool:
        return self.me in self.voters

    @property
    def is_founder(self) -> bool:
        """Whether this node may take part in forming a new cluster."""
        return self.log.end_offset == 0 and self.me.id in self.controllers

    @property
    def is_flushed(self) -> bool:
        """Whether all of the log is durable."""
        return self.flushed_offset == self.log.end_offset

    # Role, epoch and vote

    def become_unattached(self, epoch: int, now_ms: int, *, election_in_ms: int | None = None) -> None:
        if election_in_ms is None:
            election_in_ms = self.draw_timeout_ms()
        election_at_ms = now_ms + election_in_ms
        if self.is_voter:
            role = Unattached(election_at_ms, now_ms + self.settings.retry_backoff_ms)
        elif self.is_founder:
            # It must find the other founders before it can stand, so it searches when it would stand.
            role = Unattached(NEVER_MS, election_at_ms)
        else:
            role = Unattached(NEVER_MS, now_ms)
        self.set_role(epoch, role)

    def set_role(self, epoch: int, role: Role) -> None:
        former = self.role
        self.role = role
        if epoch != self.epoch:
            assert epoch > self.epoch
            self.epoch = epoch
            self.voted_for = None
            self._is_state_stale = True
        if (
            type(role) is not type(former)
            or epoch != self._announced_epoch
            or role.leader_id != former.leader_id
        ):
            self._announced_epoch = epoch
            self._effects.append(RoleChanged(type(role).__name__.lower(), epoch, role.leader_id))
        if isinstance(former, Leader):
            self._dismiss(former)

    def vote_for(self, candidate: Voter) -> None:
        """Give this epoch's vote to a candidate."""
        assert self.voted_for in (None, candidate)
        self.voted_for = candidate
        self._is_state_stale = True

    def _dismiss(self, former: Leader) -> None:
        """Answer the requests parked with the former leader: it no longer leads."""
        error, epoch, leader_id = ErrorCode.NOT_LEADER_OR_FOLLOWER, self.epoch, self.role.leader_id
        for parked in former.parked.values():
            answer = FetchAnswer(error, epoch, leader_id, self.high_watermark)
            self.emit(Reply(parked.token, parked.request, answer))
        if former.change is not None:
            token, request = former.change
            self.emit(Reply(token, request, EpochAnswer(error, epoch, leader_id)))

    # The log

    def log_changed(self) -> None:
        log = self.log
        # The snapshot covers everything before the start, and is durable and committed.
        self.flushed_offset = max(min(self.flushed_offset, log.end_offset), log.start_offset)
        self.raise_high_watermark(log.start_offset)

    def flushed(self, offset: int) -> None:
        self._is_flushing = False
        self.flushed_offset = max(self.flushed_offset, min(offset, self.log.end_offset))

    def flush(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.emit(Flush())

    def raise_high_watermark(self, offset: int) -> None:
        if offset > self.high_watermark:
            self.high_watermark = offset
            self.emit(HighWatermark(offset))

    # Random timeouts

    def draw_timeout_ms(self) -> int:
        return self.settings.election_timeout_ms + self.random.randrange(self.settings.election_timeout_ms)

    def draw_backoff_ms(self) -> int:
        return self.random.randrange(self.settings.election_backoff_ms)

    # Effects

    def emit(self, effect: Effect) -> None:
        """Add an effect. A changed epoch or vote is stored before it."""
        if self._is_state_stale:
            self._store_state()
        self._effects.append(effect)

    def take(self) -> list[Effect]:
        """Return the effects of the current call, which ends here."""
        if self._is_state_stale:
            self._store_state()
        effects = self._effects
        self._effects = []
        return effects

    def _store_state(self) -> None:
        self._is_state_stale = False
        self._effects.append(StoreState(StoredState(self.epoch, self.voted_for, self.role.leader_id)))

    def check(self) -> None:
        """Assert the invariants. Call it when all effects have been carried out."""
        log = self.log
        role = self.role
        assert not self._is_state_stale and not self._effects, "effects were not taken"
        assert self.epoch >= log.last_epoch, (self.epoch, log.last_epoch)
        assert log.start_offset <= self.high_watermark <= log.end_offset
        assert self.flushed_offset <= log.end_offset
        for (_, one), (_, other) in zip(log.voters, log.voters[1:]):
            # Equal when the first record of the voters is written to a legacy log.
            assert one == other or differ_by_one(one, other), (
                f"two changes of the voters at once: {one}, {other}"
            )
        match role:
            case Leader():
                assert self.voted_for == self.me and role.leader_id == self.me.id
                assert all(progress.offset <= log.end_offset for progress in role.progress.values())
                assert log.end_offset == role.epoch_start_offset or log.last_epoch == self.epoch
            case Candidate():
                assert self.voted_for == self.me
            case Follower():
                assert role.leader_id != self.me.id
                if role.fetch is not None:
                    assert role.fetch.offset == self.flushed_offset == log.end_offset
            case Prospective() | Unattached():
                pass
