"""Changing the voters, one at a time (KIP-853): on request, and to replace a voter whose disk was wiped.

A voter set counts from the moment its record is in the log, committed or not. So a change waits until the
previous one is committed, and a record of the leader's own epoch too: the majorities of two sets that differ by
one voter always overlap; of two that differ by more they may not.

To the quorum, a voter whose disk was wiped is another voter. It returns as an observer, and when it has caught up
the leader removes the old voter and adds the new one. Careful: a voter that an operator removed returns as an
observer too, and must not be added. It differs in that it fetches with its old directory. So the previous voter
set is needed as long as the current one counts; snapshots keep it.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import Append, ChangeVoterRequest, EpochAnswer, Reply, VotersChange
from penstock.raft.participant import Participant
from penstock.raft.quorum import Voter, differ_by_one, voter_with, voters_of
from penstock.raft.roles import Leader


class VoterChanges:
    def __init__(self, node: Participant) -> None:
        self._node = node

    def change(self, request: ChangeVoterRequest, token: Any, now_ms: int) -> None:
        node = self._node
        error = self._objection(request, now_ms)
        if error:
            node.emit(Reply(token, request, EpochAnswer(error, node.epoch, node.role.leader_id)))
            return
        assert isinstance(node.role, Leader)
        node.role.change = (token, request)
        self._append_voters(request.voter, request.is_removal)

    def end_change(self, role: Leader, error: ErrorCode) -> None:
        """Answer the request for the current change of voters, if there is one."""
        if role.change is not None:
            token, request = role.change
            role.change = None
            node = self._node
            node.emit(Reply(token, request, EpochAnswer(error, node.epoch, node.role.leader_id)))

    def replace_wiped(self, role: Leader, replica: Voter, now_ms: int) -> None:
        """Give a voter whose disk was wiped its vote back: remove the old voter, and when that is committed add
        the new one.

        It has everything that we had at its previous fetch. To require everything committed by now would be too
        strict: under constant load a distant replica is always a round trip behind.
        """
        node = self._node
        voters = node.voters
        if (
            node.role is not role
            or replica in voters
            or not node.settings.replaces_wiped_voters
            or not self.may_change()
        ):
            return
        former = voter_with(voters, replica.id)
        if former is not None:
            progress = role.progress.get(former)
            if progress is None or now_ms - progress.fetched_ms > node.settings.check_quorum_ms:
                self._append_voters(former, True)
        elif any(
            voter.id == replica.id and voter != replica
            for _, earlier in node.log.voters[-2:-1]
            for voter in earlier
        ):
            self._append_voters(replica, False)

    def may_change(self) -> bool:
        """Whether the previous change and a record of this leader's epoch are committed (a known gap in Raft)."""
        node = self._node
        return node.is_established and node.log.voters[-1][0] < node.high_watermark

    def _objection(self, request: ChangeVoterRequest, now_ms: int) -> ErrorCode:
        node = self._node
        role = node.role
        voter = request.voter
        check_quorum_ms = node.settings.check_quorum_ms
        if not isinstance(role, Leader):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if not self.may_change():
            # The previous change is not committed yet, or no record of this epoch is.
            return ErrorCode.REQUEST_TIMED_OUT
        if request.is_removal:
            if voter not in node.voters:
                return ErrorCode.VOTER_NOT_FOUND
            rest = tuple(other for other in node.voters if other != voter)
            heard_ms = role.heard_from_majority_ms(rest, node.me, now_ms)
            # The remaining voters must have a working majority.
            return ErrorCode.NONE if now_ms - heard_ms <= check_quorum_ms else ErrorCode.INVALID_REQUEST
        if voter_with(node.voters, voter.id) is not None:
            return ErrorCode.DUPLICATE_VOTER
        progress = role.progress.get(voter)
        if (
            progress is None
            or progress.offset < role.epoch_start_offset
            or now_ms - progress.fetched_ms > check_quorum_ms
        ):
            # A voter that must first catch up would count as one that is down.
            return ErrorCode.REQUEST_TIMED_OUT
        return ErrorCode.NONE

    def _append_voters(self, voter: Voter, is_removal: bool) -> None:
        node = self._node
        others = tuple(other for other in node.voters if other != voter)
        made = others if is_removal else voters_of((*others, voter))
        assert differ_by_one(node.voters, made)
        node.emit(Append((VotersChange(made),), node.epoch))
