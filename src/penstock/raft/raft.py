"""The metadata quorum's algorithm: Raft as KRaft does it, with followers that pull.

A plain object between a log and a network it cannot touch. Each method takes what happened and the moment,
and returns effects in the order in which they must happen (``events.py``). The shell (``broker/consensus.py``)
carries them out; so does the simulator (``sim/cores/raft.py``), which is the reason for this shape.

    start, tick                       time
    request, answered, unreachable    the network
    log_changed, append_failed, flushed, snapshot_failed    the disk
    resign                            the node stops

Four rules carry it:

- *A promise is durable before anyone hears of it.* Epoch and vote are stored before the next message leaves;
  a follower fetches again only when what it appended is durable, so that its fetch offset is a promise too;
  the leader counts itself only as far as it has flushed.
- *The leader commits only with a record of its own epoch*, which it appends when elected (Raft, figure 8).
- *Logs are compared by epoch, never by high watermark* (KIP-101), and an answer counts only for the request
  that is outstanding.
- *Voters change one at a time*, and count from the moment the record is in the log, committed or not.

**The birth of a cluster.** There is no format step: nodes with empty logs find each other by the list of
controllers they were given. A candidate with an empty log needs the votes of *all* of them, each by the
directory it has now; the first leader then writes the voters into the log, and from there on a majority is
enough. Why all: a node may be wiped at any moment of this, and votes again with no memory of its first vote.
Two candidates of one epoch would then share no voter but the wiped one, if a majority were enough. When all
must agree they share every node that was not wiped, and each of those votes once. For the same reason nothing
committed can be missed: whoever holds it has a log that is not empty, and refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    Answer,
    Append,
    AppendFetched,
    BeginEpochRequest,
    ChangeVoterRequest,
    ControlRecord,
    DescribeAnswer,
    DescribeRequest,
    Effect,
    EndEpochRequest,
    EpochAnswer,
    FetchAnswer,
    FetchRequest,
    Flush,
    HighWatermark,
    KRaftVersion,
    LeaderChange,
    LoadSnapshot,
    Reply,
    Request,
    RoleChanged,
    Send,
    SnapshotAnswer,
    SnapshotRequest,
    StoreState,
    Truncate,
    VoteAnswer,
    VoteRequest,
    VotersChange,
    WriteSnapshot,
)
from penstock.raft.quorum import (
    Voter,
    Voters,
    differ_by_one,
    majority,
    reached_by_majority,
    voter_with,
    voters_of,
)
from penstock.raft.roles import (
    NEVER_MS,
    Candidate,
    Download,
    Follower,
    Leader,
    Parked,
    Progress,
    Prospective,
    Role,
    Unattached,
)
from penstock.raft.storage import EpochEnd, LogView, StoredState

# Voters with directories, and changes of them (KIP-853).
KRAFT_VERSION = 1
# A leader whose process is gone is replaced at once, but not by all at the same moment.
GONE_JITTER_MS = 50
# An observer that was not heard for so long is forgotten.
OBSERVER_FORGOTTEN_MS = 300_000

NONE = ErrorCode.NONE


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


class Raft:
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
        """``controllers`` are the nodes that found a cluster together; empty for a node that is one alone.

        The log is durable to its end, which is the shell's first duty.
        """
        self.me = me
        self._controllers = tuple(sorted(controllers)) or (me.id,)
        self._log = log
        self._random = random
        self._settings = settings

        # Never shrinks. Both stored before they are spoken of.
        self.epoch = max(stored.epoch, log.last_epoch)
        self.voted_for = stored.voted_for if stored.epoch == self.epoch else None
        self._is_state_stale = False

        # Exclusive. What is below is committed; it never shrinks while this node runs. A snapshot is only ever
        # made of what is.
        self.high_watermark = log.snapshot_id.end_offset if log.snapshot_id is not None else log.start_offset
        # Exclusive. Never above the log's end.
        self._flushed_offset = log.end_offset
        self._is_flushing = False

        self.role: Role = Unattached(NEVER_MS, NEVER_MS)
        # Of the last RoleChanged.
        self._announced_epoch = -1
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, Any, int], None]] = {
            FetchRequest: self._fetch,
            VoteRequest: self._vote,
            BeginEpochRequest: self._begin_epoch,
            EndEpochRequest: self._end_epoch,
            SnapshotRequest: self._snapshot,
            DescribeRequest: self._describe,
            ChangeVoterRequest: self._change_voter,
        }

    # What is known

    @property
    def leader_id(self) -> int | None:
        return self.role.leader_id

    @property
    def is_leader(self) -> bool:
        return type(self.role) is Leader

    @property
    def is_established(self) -> bool:
        """Whether this node leads and has committed a record of its epoch, and with it all before."""
        return type(self.role) is Leader and self.high_watermark > self.role.epoch_start_offset

    def is_followed(self, now_ms: int) -> bool:
        """Whether this node leads and a majority has fetched from it lately."""
        role = self.role
        if not isinstance(role, Leader):
            return False
        heard_ms = role.heard_from_majority_ms(self.voters, self.me, now_ms)
        return now_ms - heard_ms < self._settings.check_quorum_ms

    @property
    def voters(self) -> Voters:
        """The newest set in the log; nobody while it is empty."""
        entries = self._log.voters
        return entries[-1][1] if entries else ()

    @property
    def is_voter(self) -> bool:
        return self.me in self.voters

    def progress(self) -> list[tuple[Voter, int, int]]:
        """What the leader knows of those who fetch: (who, to which offset, when last); nothing elsewhere."""
        role = self.role
        if not isinstance(role, Leader):
            return []
        return [(replica, known.offset, known.fetched_ms) for replica, known in role.progress.items()]

    @property
    def next_deadline_ms(self) -> int:
        return self.role.deadline_ms

    @property
    def _is_founder(self) -> bool:
        """Whether this node could be one of those that found the cluster."""
        return self._log.end_offset == 0 and self.me.id in self._controllers

    # Time

    def start(self, now_ms: int) -> list[Effect]:
        self._become_unattached(self.epoch, now_ms, election_in_ms=0 if self._is_founder else None)
        if self.voters == (self.me,) or (self._is_founder and self._controllers == (self.me.id,)):
            # Alone: there is nobody to wait for.
            self._stand((self.me,), None, now_ms)
        return self._take()

    def tick(self, now_ms: int) -> list[Effect]:
        """Do what is due. To be called at ``next_deadline_ms``; calling it earlier does no harm."""
        role = self.role
        if now_ms >= role.deadline_ms:
            match role:
                case Unattached():
                    self._tick_unattached(role, now_ms)
                case Follower():
                    self._tick_follower(role, now_ms)
                case Prospective() | Candidate():
                    self._tick_election(role, now_ms)
                case Leader():
                    self._tick_leader(role, now_ms)
        return self._take()

    # The network

    def request(self, request: Request, token: Any, now_ms: int) -> list[Effect]:
        """A request has come; it is answered by a ``Reply`` with its token, now or later."""
        self._handlers[type(request)](request, token, now_ms)
        return self._take()

    def answered(self, request: Request, answer: Answer | None, now_ms: int) -> list[Effect]:
        """A ``Send`` was answered; with None it never will be."""
        match answer:
            case FetchAnswer():
                assert isinstance(request, FetchRequest)
                self._fetch_answered(request, answer, now_ms)
            case VoteAnswer():
                assert isinstance(request, VoteRequest)
                self._vote_answered(request, answer, now_ms)
            case DescribeAnswer():
                assert isinstance(request, DescribeRequest)
                self._describe_answered(request, answer, now_ms)
            case SnapshotAnswer():
                assert isinstance(request, SnapshotRequest)
                self._snapshot_answered(request, answer, now_ms)
            case EpochAnswer():
                self._learn(answer.epoch, answer.leader_id, now_ms)
            case None:
                self._unanswered(request, now_ms)
        return self._take()

    def unreachable(self, node_id: int, now_ms: int) -> list[Effect]:
        """A process is gone for certain: nobody listens where it was."""
        role = self.role
        if isinstance(role, Follower) and role.leader_id == node_id and not role.is_leader_gone:
            role.is_leader_gone = True
            role.timeout_at_ms = min(role.timeout_at_ms, now_ms + self._random.randrange(GONE_JITTER_MS))
        return self._take()

    def resign(self, now_ms: int) -> list[Effect]:
        """Hand leadership over, because the node stops."""
        if isinstance(self.role, Leader) and self.voters != (self.me,):
            self._resign(self.role, now_ms)
        return self._take()

    # The disk

    def log_changed(self, now_ms: int) -> list[Effect]:
        """The log is as an effect wanted it, or the leader's node has appended records of its own."""
        log = self._log
        end_offset = log.end_offset
        # A snapshot, which stands for all before the start, is durable and committed.
        self._flushed_offset = max(min(self._flushed_offset, end_offset), log.start_offset)
        self._raise_high_watermark(log.start_offset)
        role = self.role
        if isinstance(role, Follower):
            if role.download is not None and end_offset >= role.download.snapshot_id.end_offset:
                role.download = None
            self._raise_high_watermark(min(role.leader_high_watermark, end_offset))
        if self._flushed_offset < end_offset:
            self._flush()
        elif isinstance(role, Follower):
            self._send_fetch(role, now_ms)
        if isinstance(role, Leader):
            self._advance(role, now_ms)
            self._answer_parked(now_ms)
        return self._take()

    def append_failed(self, now_ms: int) -> list[Effect]:
        """What ``Append`` or ``AppendFetched`` asked for did not fit on the disk; the log is as it was."""
        role = self.role
        if isinstance(role, Follower):
            role.fetch_at_ms = now_ms + self._settings.fetch_timeout_ms // 2
        elif isinstance(role, Leader):
            self._end_change(role, ErrorCode.KAFKA_STORAGE_ERROR)
            if self._log.end_offset == role.epoch_start_offset:
                # Without a record of its epoch it cannot lead.
                self._resign(role, now_ms)
        return self._take()

    def flushed(self, offset: int, now_ms: int) -> list[Effect]:
        """All below this offset is durable."""
        self._is_flushing = False
        self._flushed_offset = max(self._flushed_offset, min(offset, self._log.end_offset))
        role = self.role
        if self._flushed_offset < self._log.end_offset:
            self._flush()
        elif isinstance(role, Follower):
            self._send_fetch(role, now_ms)
        if isinstance(role, Leader):
            self._advance(role, now_ms)
        return self._take()

    def snapshot_failed(self, now_ms: int) -> list[Effect]:
        """What was downloaded is no snapshot: ask anew, from the beginning."""
        if isinstance(self.role, Follower):
            self.role.download = None
            self.role.fetch_at_ms = now_ms + self._settings.fetch_timeout_ms // 2
        return self._take()

    # Changes of role

    def _become_unattached(self, epoch: int, now_ms: int, *, election_in_ms: int | None = None) -> None:
        if election_in_ms is None:
            election_in_ms = self._draw_timeout_ms()
        election_at_ms = now_ms + election_in_ms
        if self.is_voter:
            role = Unattached(election_at_ms, now_ms + self._settings.retry_backoff_ms)
        elif self._is_founder:
            # It cannot stand before it has found the others, so it looks for them when it would stand.
            role = Unattached(NEVER_MS, election_at_ms)
        else:
            role = Unattached(NEVER_MS, now_ms)
        self._set_role(epoch, role)

    def _become_follower(self, epoch: int, leader_id: int, now_ms: int) -> None:
        assert leader_id != self.me.id
        timeout_ms = self._settings.fetch_timeout_ms + self._random.randrange(
            self._settings.fetch_timeout_ms // 5 + 1
        )
        role = Follower(leader_id, now_ms + timeout_ms)
        self._set_role(epoch, role)
        if self._flushed_offset < self._log.end_offset:
            self._flush()
        else:
            self._send_fetch(role, now_ms)

    def _stand(self, voters: Voters, former_leader_id: int | None, now_ms: int) -> None:
        """Ask whether we would be elected; alone, be elected."""
        timeout_at_ms = now_ms + self._draw_timeout_ms()
        role = Prospective(voters, self._votes_needed(voters), self.me, timeout_at_ms, former_leader_id)
        self._set_role(self.epoch, role)
        self._ask_for_votes(role, now_ms)

    def _become_candidate(self, voters: Voters, now_ms: int) -> None:
        role = Candidate(voters, self._votes_needed(voters), self.me, now_ms + self._draw_timeout_ms())
        self._set_role(self.epoch + 1, role)
        self.voted_for = self.me
        self._ask_for_votes(role, now_ms)

    def _become_leader(self, candidate: Candidate, now_ms: int) -> None:
        settings = self._settings
        log = self._log
        role = Leader(
            self.me.id,
            log.end_offset,
            now_ms + settings.check_quorum_ms,
            now_ms + settings.fetch_timeout_ms // 2,
        )
        role.progress = {
            voter: Progress(now_ms, log.end_offset) for voter in candidate.voters if voter != self.me
        }
        self._set_role(self.epoch, role)
        records: tuple[ControlRecord, ...] = (
            LeaderChange(self.me.id, candidate.voters, voters_of(candidate.granted)),
        )
        # A legacy log has voters that no record in it names.
        if not log.voters or log.voters[-1][0] < 0:
            records += (KRaftVersion(KRAFT_VERSION), VotersChange(candidate.voters))
        self._emit(Append(records, self.epoch))
        for voter in candidate.voters:
            if voter != self.me:
                self._emit(Send(voter.id, BeginEpochRequest(self.epoch, self.me.id, voter)))

    def _resign(self, role: Leader, now_ms: int) -> None:
        """Tell the others, those first who have most, and stand back."""
        others = [voter for voter in self.voters if voter != self.me]
        preferred = tuple(sorted(others, key=role.offset_of, reverse=True))
        for voter in preferred:
            self._emit(Send(voter.id, EndEpochRequest(self.epoch, self.me.id, preferred)))
        self._become_unattached(
            self.epoch, now_ms, election_in_ms=self._settings.election_timeout_ms + self._draw_timeout_ms()
        )

    def _set_role(self, epoch: int, role: Role) -> None:
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
            for parked in former.parked.values():
                self._reply_fetch(parked.token, parked.request)
            self._end_change(former, ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def _learn(self, epoch: int, leader_id: int | None, now_ms: int) -> None:
        """Somebody said which epoch it is, and perhaps who leads it."""
        if leader_id == self.me.id:
            # Said of a former life of this node: we know best whether we lead.
            leader_id = None
        if epoch > self.epoch:
            if leader_id is None:
                self._become_unattached(epoch, now_ms)
            else:
                self._become_follower(epoch, leader_id, now_ms)
        elif epoch == self.epoch and leader_id is not None:
            known = self.role.former_leader_id if isinstance(self.role, Prospective) else self.role.leader_id
            assert known in (None, leader_id), f"epoch {epoch} has two leaders, {known} and {leader_id}"
            if known is None:
                self._become_follower(epoch, leader_id, now_ms)

    # Finding the leader, or each other

    def _tick_unattached(self, role: Unattached, now_ms: int) -> None:
        if now_ms >= role.election_at_ms:
            self._stand(self.voters, None, now_ms)
            return
        role.search_at_ms = now_ms + self._draw_timeout_ms() // 2
        others = [id for id in self._known_nodes() if id != self.me.id]
        if self._is_founder:
            role.newborns = {self.me.id: self.me}
        elif others:
            others = [self._random.choice(others)]
        role.asked = {id: DescribeRequest() for id in others}
        for id, request in role.asked.items():
            self._emit(Send(id, request))

    def _known_nodes(self) -> list[int]:
        ids = dict.fromkeys(self._controllers)
        ids.update(dict.fromkeys(voter.id for voter in self.voters))
        return list(ids)

    def _describe(self, request: DescribeRequest, token: Any, now_ms: int) -> None:
        error = NONE if self.is_leader else ErrorCode.NOT_LEADER_OR_FOLLOWER
        end_offset = self._log.end_offset
        voters = self.voters if end_offset else (self.me,)
        self._emit(
            Reply(token, request, DescribeAnswer(error, self.epoch, self.role.leader_id, voters, end_offset))
        )

    def _describe_answered(self, request: DescribeRequest, answer: DescribeAnswer, now_ms: int) -> None:
        role = self.role
        self._learn(answer.epoch, answer.leader_id, now_ms)
        if self.role is not role or not isinstance(role, Unattached):
            return
        node_id = next((id for id, asked in role.asked.items() if asked is request), None)
        if node_id is None:
            return
        del role.asked[node_id]
        newborn = voter_with(answer.voters, node_id)
        if self._is_founder and answer.end_offset == 0 and answer.voters == (newborn,):
            assert newborn is not None
            role.newborns[node_id] = newborn
            if all(id in role.newborns for id in self._controllers):
                self._stand(voters_of(role.newborns.values()), None, now_ms)

    # Elections

    def _votes_needed(self, voters: Voters) -> int:
        return len(voters) if self._log.end_offset == 0 else majority(len(voters))

    def _ask_for_votes(self, role: Prospective | Candidate, now_ms: int) -> None:
        if role.is_won:
            self._won(role, now_ms)
            return
        log = self._log
        is_pre_vote = isinstance(role, Prospective)
        for voter in role.silent():
            request = VoteRequest(self.epoch, self.me, voter, log.last_epoch, log.end_offset, is_pre_vote)
            role.asked[voter.id] = request
            self._emit(Send(voter.id, request))
        role.ask_at_ms = NEVER_MS

    def _vote(self, request: VoteRequest, token: Any, now_ms: int) -> None:
        if request.voter != self.me:
            # Meant for a disk that is gone; this one has never promised anything.
            self._refuse_vote(request, token, ErrorCode.INVALID_VOTER_KEY)
            return
        if request.epoch > self.epoch:
            self._become_unattached(request.epoch, now_ms)
        if request.epoch < self.epoch:
            self._refuse_vote(request, token, ErrorCode.FENCED_LEADER_EPOCH)
        elif request.is_pre_vote:
            is_granted = self._is_up_to_date(request) and not self._hears_leader()
            self._emit(Reply(token, request, VoteAnswer(NONE, self.epoch, self.role.leader_id, is_granted)))
        elif self._may_vote_for(request):
            if self.voted_for is None:
                self._become_unattached(self.epoch, now_ms)
                self.voted_for = request.candidate
                self._is_state_stale = True
            self._emit(Reply(token, request, VoteAnswer(NONE, self.epoch, self.role.leader_id, True)))
        else:
            self._refuse_vote(request, token, NONE)

    def _refuse_vote(self, request: VoteRequest, token: Any, error: ErrorCode) -> None:
        self._emit(Reply(token, request, VoteAnswer(error, self.epoch, self.role.leader_id, False)))

    def _may_vote_for(self, request: VoteRequest) -> bool:
        if self.voted_for is not None:
            return self.voted_for == request.candidate
        return self.role.leader_id is None and self._is_up_to_date(request)

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        """Whether the candidate's log holds all that ours may have helped to commit (Raft, 5.4.1)."""
        return (request.last_epoch, request.end_offset) >= (self._log.last_epoch, self._log.end_offset)

    def _hears_leader(self) -> bool:
        role = self.role
        return isinstance(role, Leader) or (
            isinstance(role, Follower) and role.has_fetched and not role.is_leader_gone
        )

    def _vote_answered(self, request: VoteRequest, answer: VoteAnswer, now_ms: int) -> None:
        role = self.role
        self._learn(answer.epoch, answer.leader_id, now_ms)
        if self.role is not role or not isinstance(role, Prospective | Candidate):
            return
        if role.asked.get(request.voter.id) is not request:
            return
        del role.asked[request.voter.id]
        if answer.is_granted:
            role.granted.append(request.voter)
            if role.is_won:
                self._won(role, now_ms)
            return
        role.refused.append(request.voter)
        if role.is_lost:
            self._lost(role, now_ms)

    def _won(self, role: Prospective | Candidate, now_ms: int) -> None:
        if isinstance(role, Prospective):
            self._become_candidate(role.voters, now_ms)
        else:
            self._become_leader(role, now_ms)

    def _lost(self, role: Prospective | Candidate, now_ms: int) -> None:
        backoff_ms = self._draw_backoff_ms()
        if isinstance(role, Candidate):
            self._become_unattached(self.epoch, now_ms, election_in_ms=backoff_ms)
        else:
            # They may not have noticed yet what we have: ask anew while the time lasts.
            role.asked = {}
            role.granted = [self.me]
            role.refused = []
            role.ask_at_ms = now_ms + self._settings.retry_backoff_ms + backoff_ms // 4

    def _tick_election(self, role: Prospective | Candidate, now_ms: int) -> None:
        if now_ms < role.timeout_at_ms:
            self._ask_for_votes(role, now_ms)
        elif isinstance(role, Prospective) and role.former_leader_id is not None:
            self._become_follower(self.epoch, role.former_leader_id, now_ms)
        else:
            self._become_unattached(self.epoch, now_ms, election_in_ms=self._draw_backoff_ms())

    # Epochs begin and end

    def _begin_epoch(self, request: BeginEpochRequest, token: Any, now_ms: int) -> None:
        if request.voter != self.me:
            error = ErrorCode.INVALID_VOTER_KEY
        elif request.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            error = NONE
            self._learn(request.epoch, request.leader_id, now_ms)
            if isinstance(self.role, Prospective):
                # The leader we doubted has spoken to us.
                self._become_follower(self.epoch, request.leader_id, now_ms)
        self._emit(Reply(token, request, EpochAnswer(error, self.epoch, self.role.leader_id)))

    def _end_epoch(self, request: EndEpochRequest, token: Any, now_ms: int) -> None:
        if request.epoch > self.epoch:
            self._become_unattached(request.epoch, now_ms)
        if request.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            error = NONE
            if not isinstance(self.role, Candidate | Leader):
                place = request.preferred.index(self.me) if self.me in request.preferred else 0
                self._become_unattached(
                    self.epoch, now_ms, election_in_ms=place * self._settings.election_backoff_ms // 2
                )
        self._emit(Reply(token, request, EpochAnswer(error, self.epoch, self.role.leader_id)))

    # Following

    def _tick_follower(self, role: Follower, now_ms: int) -> None:
        if now_ms < role.timeout_at_ms:
            role.fetch_at_ms = NEVER_MS
            if role.download is not None:
                self._send_snapshot_request(role, role.download)
            elif self._flushed_offset == self._log.end_offset:
                self._send_fetch(role, now_ms)
        elif self.is_voter:
            self._stand(self.voters, role.leader_id, now_ms)
        else:
            self._become_unattached(self.epoch, now_ms)

    def _send_fetch(self, role: Follower, now_ms: int) -> None:
        if role.fetch is not None or role.download is not None or role.fetch_at_ms != NEVER_MS:
            return
        log = self._log
        assert self._flushed_offset == log.end_offset, "a fetch promises what is durable"
        role.fetch = FetchRequest(
            self.epoch,
            self.me,
            log.end_offset,
            log.last_epoch,
            self.high_watermark,
            self._settings.fetch_max_wait_ms,
        )
        self._emit(Send(role.leader_id, role.fetch))

    def _fetch_answered(self, request: FetchRequest, answer: FetchAnswer, now_ms: int) -> None:
        role = self.role
        if not isinstance(role, Follower) or role.fetch is not request:
            # Of an earlier request: it may speak of a log that was truncated since.
            return
        role.fetch = None
        if answer.error or answer.epoch != self.epoch:
            self._leader_refused(role, answer, now_ms)
            return
        self._hear(role, now_ms)
        if answer.diverging is not None:
            offset = self._truncation_offset(answer.diverging)
            assert offset >= self.high_watermark, (
                f"asked to remove what is committed: to {offset} below {self.high_watermark}"
            )
            self._emit(Truncate(offset))
        elif answer.snapshot_id is not None:
            role.download = Download(answer.snapshot_id)
            self._send_snapshot_request(role, role.download)
        else:
            role.leader_high_watermark = max(role.leader_high_watermark, answer.high_watermark)
            self._raise_high_watermark(min(answer.high_watermark, self._log.end_offset))
            if answer.records:
                self._emit(AppendFetched(answer.records))
            else:
                self._send_fetch(role, now_ms)

    def _hear(self, role: Follower, now_ms: int) -> None:
        role.has_fetched = True
        if not role.is_leader_gone:
            # Otherwise it was sent before the leader's end.
            role.timeout_at_ms = now_ms + self._settings.fetch_timeout_ms

    def _truncation_offset(self, diverging: EpochEnd) -> int:
        """Where our log may still be the leader's: where the epoch it names ends, for whom it ends first.

        When we do not have that epoch, it is where the one before ends here; the next fetch goes on from there
        (KIP-279).
        """
        ours = self._log.end_offset_for(diverging.epoch)
        if ours.epoch == diverging.epoch:
            return min(ours.end_offset, diverging.end_offset)
        return max(ours.end_offset, self._log.start_offset)

    def _leader_refused(self, role: Follower, answer: FetchAnswer | SnapshotAnswer, now_ms: int) -> None:
        self._learn(answer.epoch, answer.leader_id, now_ms)
        if self.role is not role:
            return
        if answer.epoch == self.epoch and answer.leader_id is None:
            # It leads no more, and nobody else can in this epoch.
            self._become_unattached(self.epoch, now_ms, election_in_ms=self._draw_backoff_ms())
        else:
            role.download = None
            role.fetch_at_ms = now_ms + self._settings.retry_backoff_ms

    def _send_snapshot_request(self, role: Follower, download: Download) -> None:
        download.request = SnapshotRequest(self.epoch, self.me, download.snapshot_id, download.position)
        self._emit(Send(role.leader_id, download.request))

    def _snapshot_answered(self, request: SnapshotRequest, answer: SnapshotAnswer, now_ms: int) -> None:
        role = self.role
        if not isinstance(role, Follower) or role.download is None or role.download.request is not request:
            return
        download = role.download
        download.request = None
        if answer.error or answer.epoch != self.epoch or answer.position != download.position:
            self._leader_refused(role, answer, now_ms)
            return
        self._hear(role, now_ms)
        self._emit(WriteSnapshot(download.snapshot_id, download.position, answer.data))
        download.position += len(answer.data)
        if download.position >= answer.size:
            self._emit(LoadSnapshot(download.snapshot_id))
        else:
            self._send_snapshot_request(role, download)

    def _unanswered(self, request: Request, now_ms: int) -> None:
        role = self.role
        retry_at_ms = now_ms + self._settings.retry_backoff_ms
        if isinstance(role, Follower):
            if role.fetch is request:
                role.fetch = None
                role.fetch_at_ms = retry_at_ms
            elif role.download is not None and role.download.request is request:
                role.download.request = None
                role.fetch_at_ms = retry_at_ms
        elif (
            isinstance(role, Prospective | Candidate)
            and isinstance(request, VoteRequest)
            and role.asked.get(request.voter.id) is request
        ):
            del role.asked[request.voter.id]
            role.ask_at_ms = min(role.ask_at_ms, retry_at_ms)

    # Leading

    def _tick_leader(self, role: Leader, now_ms: int) -> None:
        settings = self._settings
        voters = self.voters
        if now_ms >= role.quorum_at_ms:
            heard_ms = role.heard_from_majority_ms(voters, self.me, now_ms)
            role.quorum_at_ms = heard_ms + settings.check_quorum_ms
            if now_ms >= role.quorum_at_ms:
                self._become_unattached(self.epoch, now_ms)
                return
        if now_ms >= role.begin_at_ms:
            role.begin_at_ms = now_ms + settings.fetch_timeout_ms // 2
            for voter in voters:
                progress = role.progress.get(voter)
                if voter != self.me and (
                    progress is None
                    or not progress.offset
                    or progress.fetched_ms < now_ms - settings.fetch_timeout_ms
                ):
                    self._emit(Send(voter.id, BeginEpochRequest(self.epoch, self.me.id, voter)))
            for replica, progress in list(role.progress.items()):
                if now_ms - progress.fetched_ms > OBSERVER_FORGOTTEN_MS and replica not in voters:
                    del role.progress[replica]
        for replica, parked in list(role.parked.items()):
            if now_ms >= parked.deadline_ms:
                del role.parked[replica]
                self._reply_fetch(parked.token, parked.request)

    def _fetch(self, request: FetchRequest, token: Any, now_ms: int) -> None:
        if request.epoch > self.epoch:
            self._become_unattached(request.epoch, now_ms)
        role = self.role
        if not isinstance(role, Leader) or request.epoch < self.epoch:
            self._reply_fetch(token, request)
            return
        replica = request.replica
        progress = role.progress.get(replica)
        if progress is None:
            progress = role.progress[replica] = Progress(now_ms, self._log.end_offset)
        progress.fetched_ms = now_ms
        forgotten = role.parked.pop(replica, None)
        if forgotten is not None:
            # The replica has given that one up.
            self._reply_fetch(forgotten.token, forgotten.request)
        elsewhere = self._parting(request)
        if elsewhere is not None:
            self._emit(Reply(token, request, elsewhere))
            return
        if request.offset > progress.offset:
            progress.offset = request.offset
            self._advance(role, now_ms)
        if progress.offset >= progress.leader_end_offset:
            self._replace_wiped(role, replica, now_ms)
        progress.leader_end_offset = self._log.end_offset
        if (
            self.role is not role
            or request.offset < self._log.end_offset
            or request.high_watermark < self.high_watermark
            or request.max_wait_ms <= 0
        ):
            self._reply_fetch(token, request)
        else:
            max_wait_ms = min(request.max_wait_ms, self._settings.fetch_max_wait_ms)
            role.parked[replica] = Parked(token, request, now_ms + max_wait_ms)

    def _parting(self, request: FetchRequest) -> FetchAnswer | None:
        """An answer that says where the replica's log and ours part; None when it is the beginning of ours."""
        log = self._log
        offset, epoch = request.offset, request.last_epoch
        if offset < 0 or epoch < 0:
            return FetchAnswer(ErrorCode.INVALID_REQUEST, self.epoch, self.me.id)
        if offset == log.start_offset and (offset == 0 or epoch == log.start_epoch):
            return None
        if offset <= log.start_offset or epoch < log.start_epoch:
            # Where it parts is no longer in our log.
            assert log.snapshot_id is not None, f"the log begins at {log.start_offset} without a snapshot"
            return FetchAnswer(NONE, self.epoch, self.me.id, self.high_watermark, snapshot_id=log.snapshot_id)
        end = log.end_offset_for(epoch)
        if end.epoch == epoch and offset <= end.end_offset:
            return None
        return FetchAnswer(NONE, self.epoch, self.me.id, self.high_watermark, diverging=end)

    def _reply_fetch(self, token: Any, request: FetchRequest) -> None:
        if not self.is_leader:
            error = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif request.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            error = NONE
        self._emit(
            Reply(token, request, FetchAnswer(error, self.epoch, self.role.leader_id, self.high_watermark))
        )

    def _answer_parked(self, now_ms: int) -> None:
        role = self.role
        if not isinstance(role, Leader) or not role.parked:
            return
        end_offset = self._log.end_offset
        for replica, parked in list(role.parked.items()):
            if parked.request.offset < end_offset or parked.request.high_watermark < self.high_watermark:
                del role.parked[replica]
                self._reply_fetch(parked.token, parked.request)

    def _advance(self, role: Leader, now_ms: int) -> None:
        """Commit what a majority has, once that includes a record of this epoch."""
        entries = self._log.voters
        if not entries:
            return
        voters_offset, voters = entries[-1]
        offset = reached_by_majority(
            [self._flushed_offset if voter == self.me else role.offset_of(voter) for voter in voters]
        )
        if offset <= role.epoch_start_offset or offset <= self.high_watermark:
            return
        self._raise_high_watermark(offset)
        if voters_offset < offset:
            self._end_change(role, NONE)
            if self.me not in voters:
                # It led only until its own removal was committed.
                self._resign(role, now_ms)
                return
        self._answer_parked(now_ms)

    def _raise_high_watermark(self, offset: int) -> None:
        if offset > self.high_watermark:
            self.high_watermark = offset
            self._emit(HighWatermark(offset))

    def _snapshot(self, request: SnapshotRequest, token: Any, now_ms: int) -> None:
        if request.epoch > self.epoch:
            self._become_unattached(request.epoch, now_ms)
        role = self.role
        if not isinstance(role, Leader):
            error = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif request.epoch < self.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        elif request.snapshot_id != self._log.snapshot_id:
            # There is a newer one: the replica fetches again and is told.
            error = ErrorCode.SNAPSHOT_NOT_FOUND
        else:
            error = NONE
        if isinstance(role, Leader) and request.replica in role.progress:
            role.progress[request.replica].fetched_ms = now_ms
        answer = SnapshotAnswer(error, self.epoch, role.leader_id, request.snapshot_id, request.position)
        self._emit(Reply(token, request, answer))

    # Changing the voters

    def _change_voter(self, request: ChangeVoterRequest, token: Any, now_ms: int) -> None:
        error = self._objection(request, now_ms)
        if error:
            self._emit(Reply(token, request, EpochAnswer(error, self.epoch, self.role.leader_id)))
            return
        assert isinstance(self.role, Leader)
        self.role.change = (token, request)
        self._append_voters(request.voter, request.is_removal)

    def _objection(self, request: ChangeVoterRequest, now_ms: int) -> ErrorCode:
        role = self.role
        voter = request.voter
        if not isinstance(role, Leader):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if not self._may_change_voters():
            # The one before is not committed yet, or nothing of this epoch is.
            return ErrorCode.REQUEST_TIMED_OUT
        if request.is_removal:
            if voter not in self.voters:
                return ErrorCode.VOTER_NOT_FOUND
            rest = tuple(other for other in self.voters if other != voter)
            heard_ms = role.heard_from_majority_ms(rest, self.me, now_ms) if rest else -1
            # Those who stay must be able to go on alone.
            return NONE if now_ms - heard_ms <= self._settings.check_quorum_ms else ErrorCode.INVALID_REQUEST
        if voter_with(self.voters, voter.id) is not None:
            return ErrorCode.DUPLICATE_VOTER
        progress = role.progress.get(voter)
        if (
            progress is None
            or progress.offset < role.epoch_start_offset
            or now_ms - progress.fetched_ms > self._settings.check_quorum_ms
        ):
            # A voter that has to catch up first would be a voter that is down.
            return ErrorCode.REQUEST_TIMED_OUT
        return NONE

    def _may_change_voters(self) -> bool:
        """Whether the change before is committed, and something of this leader's epoch (Raft's known hole)."""
        return self.is_established and self._log.voters[-1][0] < self.high_watermark

    def _replace_wiped(self, role: Leader, replica: Voter, now_ms: int) -> None:
        """Give a voter whose disk was wiped its vote back: remove the old one, and when that is committed
        admit the new one.

        It has everything we had when it asked before. To ask for all that is committed by now would be too
        much: while changes never pause, a replica far away is always a round trip behind.
        """
        voters = self.voters
        if (
            self.role is not role
            or replica in voters
            or not self._settings.replaces_wiped_voters
            or not self._may_change_voters()
        ):
            return
        former = voter_with(voters, replica.id)
        if former is not None:
            progress = role.progress.get(former)
            if progress is None or now_ms - progress.fetched_ms > self._settings.check_quorum_ms:
                self._append_voters(former, True)
        elif any(
            voter.id == replica.id and voter != replica
            for _, earlier in self._log.voters[-2:-1]
            for voter in earlier
        ):
            self._append_voters(replica, False)

    def _append_voters(self, voter: Voter, is_removal: bool) -> None:
        others = tuple(other for other in self.voters if other != voter)
        made = others if is_removal else voters_of((*others, voter))
        assert differ_by_one(self.voters, made)
        self._emit(Append((VotersChange(made),), self.epoch))

    def _end_change(self, role: Leader, error: ErrorCode) -> None:
        if role.change is not None:
            token, request = role.change
            role.change = None
            self._emit(Reply(token, request, EpochAnswer(error, self.epoch, self.role.leader_id)))

    # Effects

    def _emit(self, effect: Effect) -> None:
        """Nothing leaves and nothing is written before the promise it may rest on is durable."""
        if self._is_state_stale:
            self._store_state()
        self._effects.append(effect)

    def _store_state(self) -> None:
        self._is_state_stale = False
        self._effects.append(StoreState(StoredState(self.epoch, self.voted_for, self.role.leader_id)))

    def _take(self) -> list[Effect]:
        if self._is_state_stale:
            self._store_state()
        effects = self._effects
        self._effects = []
        return effects

    def _flush(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._emit(Flush())

    def _draw_timeout_ms(self) -> int:
        return self._settings.election_timeout_ms + self._random.randrange(self._settings.election_timeout_ms)

    def _draw_backoff_ms(self) -> int:
        return self._random.randrange(self._settings.election_backoff_ms)

    def check(self) -> None:
        """Assert what must hold between any two calls, when all effects have been carried out."""
        log = self._log
        role = self.role
        assert not self._is_state_stale and not self._effects, "effects were forgotten"
        assert self.epoch >= log.last_epoch, (self.epoch, log.last_epoch)
        assert log.start_offset <= self.high_watermark <= log.end_offset
        assert self._flushed_offset <= log.end_offset
        for (_, one), (_, other) in zip(log.voters, log.voters[1:]):
            # The same again: a legacy log's, when they are written down.
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
                    assert role.fetch.offset == self._flushed_offset == log.end_offset
            case Prospective() | Unattached():
                pass
