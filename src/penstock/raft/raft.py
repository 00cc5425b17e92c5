"""The metadata quorum's algorithm: Raft as KRaft does it, with followers that pull.

A sans-IO core. Each method takes an event and the time, and returns effects in the order in which they must
happen (``events.py``). The shell (``broker/quorum/consensus.py``) carries them out, and so does the simulator
(``sim/cores/raft_node.py``).

    start, tick                       time
    request, answered, unreachable    the network
    log_changed, append_failed, flushed, snapshot_failed    the disk
    resign                            the node stops

Four rules make it safe:

- *A promise is durable before it is sent.* Epoch and vote are stored before the next message is sent; a follower
  fetches again only when its log is durable, because its fetch offset is a promise too; the leader counts its own
  copy only as far as it has flushed.
- *The leader commits only with a record of its own epoch*, which it appends when elected (Raft, figure 8).
- *Logs are compared by epoch, never by high watermark* (KIP-101), and an answer counts only for the request
  that is outstanding.
- *Voters change one at a time*, and count from the moment the record is in the log, committed or not.

This file is the entry point and passes each event to the part that handles it: ``elections.py``,
``following.py``, ``leading.py`` and ``voter_changes.py``. They share the state in ``participant.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from penstock.raft.elections import Elections
from penstock.raft.events import (
    Answer,
    BeginEpochRequest,
    ChangeVoterRequest,
    DescribeAnswer,
    DescribeRequest,
    Effect,
    EndEpochRequest,
    EpochAnswer,
    FetchAnswer,
    FetchRequest,
    Request,
    SnapshotAnswer,
    SnapshotRequest,
    VoteAnswer,
    VoteRequest,
)
from penstock.raft.following import Following
from penstock.raft.leading import Leading
from penstock.raft.participant import Participant
from penstock.raft.quorum import Voter, Voters
from penstock.raft.roles import Candidate, Follower, Leader, Prospective, Role, Unattached
from penstock.raft.settings import RaftSettings
from penstock.raft.storage import LogView, StoredState
from penstock.raft.voter_changes import VoterChanges


class Raft:
    # Replaced only in tests that plant a bug in one of them.
    participant_type: type[Participant] = Participant
    elections_type: type[Elections] = Elections
    following_type: type[Following] = Following
    leading_type: type[Leading] = Leading
    voter_changes_type: type[VoterChanges] = VoterChanges

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
        """``controllers`` are the nodes that form a new cluster; empty for a single-node cluster.

        The shell must have made the log durable to its end.
        """
        self._node = node = self.participant_type(
            me, controllers, log=log, stored=stored, random=random, settings=settings
        )
        self._voter_changes = self.voter_changes_type(node)
        self._following = self.following_type(node)
        self._leading = self.leading_type(node, self._voter_changes)
        self._elections = self.elections_type(node, self._following, self._leading)
        self._handlers: dict[type, Callable[[Any, Any, int], None]] = {
            FetchRequest: self._leading.fetch,
            VoteRequest: self._elections.vote,
            BeginEpochRequest: self._following.begin_epoch,
            EndEpochRequest: self._elections.end_epoch,
            SnapshotRequest: self._leading.snapshot,
            DescribeRequest: self._elections.describe,
            ChangeVoterRequest: self._voter_changes.change,
        }

    # State

    @property
    def me(self) -> Voter:
        return self._node.me

    @property
    def role(self) -> Role:
        return self._node.role

    @property
    def epoch(self) -> int:
        return self._node.epoch

    @property
    def voted_for(self) -> Voter | None:
        return self._node.voted_for

    @property
    def high_watermark(self) -> int:
        """Exclusive: everything below is committed."""
        return self._node.high_watermark

    @property
    def leader_id(self) -> int | None:
        return self._node.role.leader_id

    @property
    def is_leader(self) -> bool:
        return self._node.is_leader

    @property
    def is_established(self) -> bool:
        """Whether this node leads and has committed a record of its epoch, and so everything before it."""
        return self._node.is_established

    def is_followed(self, now_ms: int) -> bool:
        """Whether this node leads and a majority has fetched from it lately."""
        role = self._node.role
        return isinstance(role, Leader) and self._leading.is_followed(role, now_ms)

    @property
    def voters(self) -> Voters:
        """The newest voter set in the log; empty if there is none."""
        return self._node.voters

    @property
    def is_voter(self) -> bool:
        return self._node.is_voter

    def progress(self) -> list[tuple[Voter, int, int]]:
        """(replica, offset, time of its last fetch) of each voter and observer; empty if not the leader."""
        role = self._node.role
        if not isinstance(role, Leader):
            return []
        return [(replica, known.offset, known.fetched_ms) for replica, known in role.progress.items()]

    @property
    def next_deadline_ms(self) -> int:
        return self._node.role.deadline_ms

    # Time

    def start(self, now_ms: int) -> list[Effect]:
        node = self._node
        node.become_unattached(node.epoch, now_ms, election_in_ms=0 if node.is_founder else None)
        if node.voters == (node.me,) or (node.is_founder and node.controllers == (node.me.id,)):
            # The only voter need not wait for others.
            self._elections.stand((node.me,), None, now_ms)
        return node.take()

    def tick(self, now_ms: int) -> list[Effect]:
        """Do what is due. Call it at ``next_deadline_ms``; calling it earlier does no harm."""
        role = self._node.role
        if now_ms >= role.deadline_ms:
            match role:
                case Unattached():
                    self._elections.tick_unattached(role, now_ms)
                case Follower():
                    self._tick_follower(role, now_ms)
                case Prospective() | Candidate():
                    self._elections.tick(role, now_ms)
                case Leader():
                    self._leading.tick(role, now_ms)
        return self._node.take()

    def _tick_follower(self, role: Follower, now_ms: int) -> None:
        node = self._node
        if now_ms < role.timeout_at_ms:
            self._following.retry(role)
        elif node.is_voter:
            self._elections.stand(node.voters, role.leader_id, now_ms)
        else:
            node.become_unattached(node.epoch, now_ms)

    # The network

    def request(self, request: Request, token: Any, now_ms: int) -> list[Effect]:
        """A request arrived. A ``Reply`` with its token answers it, now or later."""
        self._handlers[type(request)](request, token, now_ms)
        return self._node.take()

    def answered(self, request: Request, answer: Answer | None, now_ms: int) -> list[Effect]:
        """The answer to a ``Send``; None when there will be none."""
        match answer:
            case FetchAnswer():
                assert isinstance(request, FetchRequest)
                self._following.fetch_answered(request, answer, now_ms)
            case VoteAnswer():
                assert isinstance(request, VoteRequest)
                self._elections.vote_answered(request, answer, now_ms)
            case DescribeAnswer():
                assert isinstance(request, DescribeRequest)
                self._elections.describe_answered(request, answer, now_ms)
            case SnapshotAnswer():
                assert isinstance(request, SnapshotRequest)
                self._following.snapshot_answered(request, answer, now_ms)
            case EpochAnswer():
                self._following.learn(answer.epoch, answer.leader_id, now_ms)
            case None:
                self._unanswered(request, now_ms)
        return self._node.take()

    def _unanswered(self, request: Request, now_ms: int) -> None:
        role = self._node.role
        if isinstance(role, Follower):
            self._following.unanswered(role, request, now_ms)
        elif isinstance(role, Prospective | Candidate):
            self._elections.unanswered(role, request, now_ms)

    def unreachable(self, node_id: int, now_ms: int) -> list[Effect]:
        """A node's process is certainly gone: its port refuses connections."""
        role = self._node.role
        if isinstance(role, Follower) and role.leader_id == node_id:
            self._following.leader_gone(role, now_ms)
        return self._node.take()

    def resign(self, now_ms: int) -> list[Effect]:
        """Give up leadership because the node is shutting down."""
        node = self._node
        if isinstance(node.role, Leader) and node.voters != (node.me,):
            self._leading.resign(node.role, now_ms)
        return node.take()

    # The disk

    def log_changed(self, now_ms: int) -> list[Effect]:
        """An effect changed the log, or the leader's shell has appended records."""
        node = self._node
        node.log_changed()
        role = node.role
        if isinstance(role, Follower):
            self._following.log_changed(role)
        elif not node.is_flushed:
            node.flush()
        if isinstance(role, Leader):
            self._leading.log_changed(role, now_ms)
        return node.take()

    def append_failed(self, now_ms: int) -> list[Effect]:
        """An ``Append`` or ``AppendFetched`` failed on a full disk; the log is unchanged."""
        role = self._node.role
        if isinstance(role, Follower):
            self._following.retry_later(role, now_ms)
        elif isinstance(role, Leader):
            self._leading.append_failed(role, now_ms)
        return self._node.take()

    def flushed(self, offset: int, now_ms: int) -> list[Effect]:
        """Everything below ``offset`` is durable."""
        node = self._node
        node.flushed(offset)
        role = node.role
        if not node.is_flushed:
            node.flush()
        elif isinstance(role, Follower):
            self._following.send_fetch(role)
        if isinstance(role, Leader):
            self._leading.advance(role, now_ms)
        return node.take()

    def snapshot_failed(self, now_ms: int) -> list[Effect]:
        """The downloaded snapshot is invalid: start over from the beginning."""
        role = self._node.role
        if isinstance(role, Follower):
            role.download = None
            self._following.retry_later(role, now_ms)
        return self._node.take()

    def check(self) -> None:
        """Assert the invariants. Call it when all effects have been carried out."""
        self._node.check()
