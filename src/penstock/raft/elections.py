"""Elections: finding the leader, standing, voting, and forming a new cluster.

A node that does not hear from its leader first asks whether it would be elected (PreVote, KIP-996), so that a
node that is merely cut off does not disturb the others with a higher epoch. A node votes for one candidate per
epoch, and only if the candidate's log holds everything that ours may have helped to commit. A voter is a node
*with its disk*: a vote request for another directory is refused, because this one has never voted.

**Forming a cluster.** There is no format step: nodes with empty logs find each other through the list of
controllers in their settings. A candidate with an empty log needs the votes of *all* of them, each with the
directory it has now. The first leader writes the voters into the log, and from then on a majority is enough.
Why all: a node may be wiped during this, and then votes again without knowing of its first vote. If a majority
were enough, two candidates of one epoch could have only the wiped voter in common. When all must agree, they
have every node in common that was not wiped, and each of those votes once. For the same reason no committed
record can be missed: a node that holds one has a log that is not empty, and refuses.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    DescribeAnswer,
    DescribeRequest,
    EndEpochRequest,
    EpochAnswer,
    Reply,
    Request,
    Send,
    VoteAnswer,
    VoteRequest,
)
from penstock.raft.following import Following
from penstock.raft.leading import Leading
from penstock.raft.participant import Participant
from penstock.raft.quorum import Voters, majority, voter_with, voters_of
from penstock.raft.roles import NEVER_MS, Candidate, Follower, Leader, Prospective, Unattached


class Elections:
    def __init__(self, node: Participant, following: Following, leading: Leading) -> None:
        self._node = node
        self._following = following
        self._leading = leading

    # Finding the leader, or the other founders

    def tick_unattached(self, role: Unattached, now_ms: int) -> None:
        node = self._node
        if now_ms >= role.election_at_ms:
            self.stand(node.voters, None, now_ms)
            return
        role.search_at_ms = now_ms + node.draw_timeout_ms() // 2
        others = [id for id in self._known_nodes() if id != node.me.id]
        if node.is_founder:
            role.newborns = {node.me.id: node.me}
        elif others:
            others = [node.random.choice(others)]
        role.asked = {id: DescribeRequest() for id in others}
        for id, request in role.asked.items():
            node.emit(Send(id, request))

    def _known_nodes(self) -> list[int]:
        ids = dict.fromkeys(self._node.controllers)
        ids.update(dict.fromkeys(voter.id for voter in self._node.voters))
        return list(ids)

    def describe(self, request: DescribeRequest, token: Any, now_ms: int) -> None:
        node = self._node
        error = ErrorCode.NONE if node.is_leader else ErrorCode.NOT_LEADER_OR_FOLLOWER
        end_offset = node.log.end_offset
        voters = node.voters if end_offset else (node.me,)
        answer = DescribeAnswer(error, node.epoch, node.role.leader_id, voters, end_offset)
        node.emit(Reply(token, request, answer))

    def describe_answered(self, request: DescribeRequest, answer: DescribeAnswer, now_ms: int) -> None:
        node = self._node
        role = node.role
        self._following.learn(answer.epoch, answer.leader_id, now_ms)
        if node.role is not role or not isinstance(role, Unattached):
            return
        node_id = next((id for id, asked in role.asked.items() if asked is request), None)
        if node_id is None:
            return
        del role.asked[node_id]
        newborn = voter_with(answer.voters, node_id)
        if node.is_founder and answer.end_offset == 0 and answer.voters == (newborn,):
            assert newborn is not None
            role.newborns[node_id] = newborn
            if all(id in role.newborns for id in node.controllers):
                self.stand(voters_of(role.newborns.values()), None, now_ms)

    # Standing

    def stand(self, voters: Voters, former_leader_id: int | None, now_ms: int) -> None:
        """Start a PreVote. A single voter is elected at once."""
        node = self._node
        timeout_at_ms = now_ms + node.draw_timeout_ms()
        role = Prospective(voters, self._votes_needed(voters), node.me, timeout_at_ms, former_leader_id)
        node.set_role(node.epoch, role)
        self._ask_for_votes(role, now_ms)

    def tick(self, role: Prospective | Candidate, now_ms: int) -> None:
        node = self._node
        if now_ms < role.timeout_at_ms:
            self._ask_for_votes(role, now_ms)
        elif isinstance(role, Prospective) and role.former_leader_id is not None:
            self._following.begin(node.epoch, role.former_leader_id, now_ms)
        else:
            node.become_unattached(node.epoch, now_ms, election_in_ms=node.draw_backoff_ms())

    def vote_answered(self, request: VoteRequest, answer: VoteAnswer, now_ms: int) -> None:
        node = self._node
        role = node.role
        self._following.learn(answer.epoch, answer.leader_id, now_ms)
        if node.role is not role or not isinstance(role, Prospective | Candidate):
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

    def unanswered(self, role: Prospective | Candidate, request: Request, now_ms: int) -> None:
        if isinstance(request, VoteRequest) and role.asked.get(request.voter.id) is request:
            del role.asked[request.voter.id]
            role.ask_at_ms = min(role.ask_at_ms, now_ms + self._node.settings.retry_backoff_ms)

    def _votes_needed(self, voters: Voters) -> int:
        return len(voters) if self._node.log.end_offset == 0 else majority(len(voters))

    def _become_candidate(self, voters: Voters, now_ms: int) -> None:
        node = self._node
        role = Candidate(voters, self._votes_needed(voters), node.me, now_ms + node.draw_timeout_ms())
        node.set_role(node.epoch + 1, role)
        node.vote_for(node.me)
        self._ask_for_votes(role, now_ms)

    def _ask_for_votes(self, role: Prospective | Candidate, now_ms: int) -> None:
        if role.is_won:
            self._won(role, now_ms)
            return
        node = self._node
        log = node.log
        is_pre_vote = isinstance(role, Prospective)
        for voter in role.silent():
            request = VoteRequest(node.epoch, node.me, voter, log.last_epoch, log.end_offset, is_pre_vote)
            role.asked[voter.id] = request
            node.emit(Send(voter.id, request))
        role.ask_at_ms = NEVER_MS

    def _won(self, role: Prospective | Candidate, now_ms: int) -> None:
        if isinstance(role, Prospective):
            self._become_candidate(role.voters, now_ms)
        else:
            self._leading.begin(role, now_ms)

    def _lost(self, role: Prospective | Candidate, now_ms: int) -> None:
        node = self._node
        backoff_ms = node.draw_backoff_ms()
        if isinstance(role, Candidate):
            node.become_unattached(node.epoch, now_ms, election_in_ms=backoff_ms)
        else:
            # The others may not have noticed yet that the leader is gone: ask again until the timeout.
            role.asked = {}
            role.granted = [node.me]
            role.refused = []
            role.ask_at_ms = now_ms + node.settings.retry_backoff_ms + backoff_ms // 4

    # Voting

    def vote(self, request: VoteRequest, token: Any, now_ms: int) -> None:
        node = self._node
        if request.voter != node.me:
            # Meant for a disk that is gone; this one has never voted.
            self._reply_vote(request, token, ErrorCode.INVALID_VOTER_KEY, False)
            return
        if request.epoch > node.epoch:
            node.become_unattached(request.epoch, now_ms)
        if request.epoch < node.epoch:
            self._reply_vote(request, token, ErrorCode.FENCED_LEADER_EPOCH, False)
        elif request.is_pre_vote:
            is_granted = self._is_up_to_date(request) and not self._hears_leader()
            self._reply_vote(request, token, ErrorCode.NONE, is_granted)
        elif self._may_vote_for(request):
            if node.voted_for is None:
                node.become_unattached(node.epoch, now_ms)
                node.vote_for(request.candidate)
            self._reply_vote(request, token, ErrorCode.NONE, True)
        else:
            self._reply_vote(request, token, ErrorCode.NONE, False)

    def _reply_vote(self, request: VoteRequest, token: Any, error: ErrorCode, is_granted: bool) -> None:
        node = self._node
        node.emit(Reply(token, request, VoteAnswer(error, node.epoch, node.role.leader_id, is_granted)))

    def _may_vote_for(self, request: VoteRequest) -> bool:
        node = self._node
        if node.voted_for is not None:
            return node.voted_for == request.candidate
        return node.role.leader_id is None and self._is_up_to_date(request)

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        """Whether the candidate's log holds everything that ours may have helped to commit (Raft, 5.4.1)."""
        log = self._node.log
        return (request.last_epoch, request.end_offset) >= (log.last_epoch, log.end_offset)

    def _hears_leader(self) -> bool:
        role = self._node.role
        return isinstance(role, Leader) or (
            isinstance(role, Follower) and role.has_fetched and not role.is_leader_gone
        )

    # A leader resigns

    def end_epoch(self, request: EndEpochRequest, token: Any, now_ms: int) -> None:
        """The leader resigned and listed its preferred successors: those stand first."""
        node = self._node
        if request.epoch > node.epoch:
            node.become_unattached(request.epoch, now_ms)
        if request.epoch < node.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            error = ErrorCode.NONE
            if not isinstance(node.role, Candidate | Leader):
                place = request.preferred.index(node.me) if node.me in request.preferred else 0
                election_in_ms = place * node.settings.election_backoff_ms // 2
                node.become_unattached(node.epoch, now_ms, election_in_ms=election_in_ms)
        node.emit(Reply(token, request, EpochAnswer(error, node.epoch, node.role.leader_id)))
