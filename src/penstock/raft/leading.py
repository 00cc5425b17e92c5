"""Leading an epoch: answering fetches, committing what a majority has, and resigning without a majority.

The leader begins with a record of its own epoch, and commits nothing before that record is replicated (Raft,
figure 8); with it, everything before it is committed. It counts its own copy only as far as it is durable, and
the others' by their fetch offsets. A fetch for which there are no records yet is parked until there are, or until
it times out.

The leader keeps checking that a majority still fetches (check-quorum). Otherwise a leader that was cut off would
never learn that it no longer leads.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    KRAFT_VERSION,
    Append,
    BeginEpochRequest,
    ControlRecord,
    EndEpochRequest,
    FetchAnswer,
    FetchRequest,
    KRaftVersion,
    LeaderChange,
    Reply,
    Send,
    SnapshotAnswer,
    SnapshotRequest,
    VotersChange,
)
from penstock.raft.participant import Participant
from penstock.raft.quorum import reached_by_majority, voters_of
from penstock.raft.roles import Candidate, Leader, Parked, Progress
from penstock.raft.voter_changes import VoterChanges

# An observer that has not fetched for this long is forgotten.
OBSERVER_FORGOTTEN_MS = 300_000


class Leading:
    def __init__(self, node: Participant, voter_changes: VoterChanges) -> None:
        self._node = node
        self._voter_changes = voter_changes

    # Beginning and ending

    def begin(self, candidate: Candidate, now_ms: int) -> None:
        """Start leading after an election: append a LeaderChange and announce it to the other voters."""
        node = self._node
        log = node.log
        role = Leader(
            node.me.id,
            log.end_offset,
            now_ms + node.settings.check_quorum_ms,
            now_ms + node.settings.fetch_timeout_ms // 2,
        )
        others = [voter for voter in candidate.voters if voter != node.me]
        role.progress = {voter: Progress(now_ms, log.end_offset) for voter in others}
        node.set_role(node.epoch, role)
        records: tuple[ControlRecord, ...] = (
            LeaderChange(node.me.id, candidate.voters, voters_of(candidate.granted)),
        )
        # A legacy log has voters without a record that lists them.
        if not log.voters or log.voters[-1][0] < 0:
            records += (KRaftVersion(KRAFT_VERSION), VotersChange(candidate.voters))
        node.emit(Append(records, node.epoch))
        for voter in others:
            node.emit(Send(voter.id, BeginEpochRequest(node.epoch, node.me.id, voter)))

    def resign(self, role: Leader, now_ms: int) -> None:
        """Tell the other voters, preferring those that have the most records, and stop leading."""
        node = self._node
        others = [voter for voter in node.voters if voter != node.me]
        preferred = tuple(sorted(others, key=role.offset_of, reverse=True))
        for voter in preferred:
            node.emit(Send(voter.id, EndEpochRequest(node.epoch, node.me.id, preferred)))
        node.become_unattached(
            node.epoch, now_ms, election_in_ms=node.settings.election_timeout_ms + node.draw_timeout_ms()
        )

    # Time

    def is_followed(self, role: Leader, now_ms: int) -> bool:
        """Whether a majority has fetched lately."""
        node = self._node
        heard_ms = role.heard_from_majority_ms(node.voters, node.me, now_ms)
        return now_ms - heard_ms < node.settings.check_quorum_ms

    def tick(self, role: Leader, now_ms: int) -> None:
        node = self._node
        if now_ms >= role.quorum_at_ms:
            heard_ms = role.heard_from_majority_ms(node.voters, node.me, now_ms)
            role.quorum_at_ms = heard_ms + node.settings.check_quorum_ms
            if now_ms >= role.quorum_at_ms:
                node.become_unattached(node.epoch, now_ms)
                return
        if now_ms >= role.begin_at_ms:
            role.begin_at_ms = now_ms + node.settings.fetch_timeout_ms // 2
            self._remind_and_forget(role, now_ms)
        for replica, parked in list(role.parked.items()):
            if now_ms >= parked.deadline_ms:
                del role.parked[replica]
                self._reply_fetch(parked.token, parked.request)

    def _remind_and_forget(self, role: Leader, now_ms: int) -> None:
        """Announce ourselves again to voters that do not fetch; forget observers that are gone."""
        node = self._node
        voters = node.voters
        for voter in voters:
            progress = role.progress.get(voter)
            if voter != node.me and (
                progress is None
                or not progress.offset
                or progress.fetched_ms < now_ms - node.settings.fetch_timeout_ms
            ):
                node.emit(Send(voter.id, BeginEpochRequest(node.epoch, node.me.id, voter)))
        newest_ms: dict[int, int] = {}
        for replica, progress in role.progress.items():
            newest_ms[replica.id] = max(progress.fetched_ms, newest_ms.get(replica.id, progress.fetched_ms))
        for replica, progress in list(role.progress.items()):
            # A node has one disk: of two directories, the one used earlier is gone.
            is_replaced = progress.fetched_ms < newest_ms[replica.id]
            is_silent = now_ms - progress.fetched_ms > OBSERVER_FORGOTTEN_MS
            if replica not in voters and (is_replaced or is_silent):
                del role.progress[replica]

    # Requests, which reach a node in any role

    def fetch(self, request: FetchRequest, token: Any, now_ms: int) -> None:
        node = self._node
        if request.epoch > node.epoch:
            node.become_unattached(request.epoch, now_ms)
        role = node.role
        if isinstance(role, Leader) and now_ms >= role.quorum_at_ms:
            # Check the quorum before this fetch counts: a process that was suspended finds old fetches in its
            # sockets, and must not stay leader because of them.
            self.tick(role, now_ms)
            role = node.role
        if not isinstance(role, Leader) or request.epoch < node.epoch:
            self._reply_fetch(token, request)
            return
        log = node.log
        replica = request.replica
        progress = role.progress.get(replica)
        if progress is None:
            progress = role.progress[replica] = Progress(now_ms, log.end_offset)
        progress.fetched_ms = now_ms
        forgotten = role.parked.pop(replica, None)
        if forgotten is not None:
            # The replica no longer waits for the earlier fetch.
            self._reply_fetch(forgotten.token, forgotten.request)
        elsewhere = self._parting(request)
        if elsewhere is not None:
            node.emit(Reply(token, request, elsewhere))
            return
        if request.offset > progress.offset:
            progress.offset = request.offset
            self.advance(role, now_ms)
        if progress.offset >= progress.leader_end_offset:
            self._voter_changes.replace_wiped(role, replica, now_ms)
        progress.leader_end_offset = log.end_offset
        if (
            node.role is not role
            or request.offset < log.end_offset
            or request.high_watermark < node.high_watermark
            or request.max_wait_ms <= 0
        ):
            self._reply_fetch(token, request)
        else:
            max_wait_ms = min(request.max_wait_ms, node.settings.fetch_max_wait_ms)
            role.parked[replica] = Parked(token, request, now_ms + max_wait_ms)

    def snapshot(self, request: SnapshotRequest, token: Any, now_ms: int) -> None:
        node = self._node
        if request.epoch > node.epoch:
            node.become_unattached(request.epoch, now_ms)
        role = node.role
        if not isinstance(role, Leader):
            error = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif request.epoch < node.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        elif request.snapshot_id != node.log.snapshot_id:
            # There is a newer snapshot: the replica fetches again and gets its id.
            error = ErrorCode.SNAPSHOT_NOT_FOUND
        else:
            error = ErrorCode.NONE
        if isinstance(role, Leader) and request.replica in role.progress:
            role.progress[request.replica].fetched_ms = now_ms
        answer = SnapshotAnswer(error, node.epoch, role.leader_id, request.snapshot_id, request.position)
        node.emit(Reply(token, request, answer))

    def _parting(self, request: FetchRequest) -> FetchAnswer | None:
        """The answer if the replica's log diverges from ours; None when it is a prefix of ours."""
        node = self._node
        log = node.log
        offset, epoch = request.offset, request.last_epoch
        if offset < 0 or epoch < 0:
            return FetchAnswer(ErrorCode.INVALID_REQUEST, node.epoch, node.me.id)
        if offset == log.start_offset and (offset == 0 or epoch == log.start_epoch):
            return None
        if offset <= log.start_offset or epoch < log.start_epoch:
            # The point of divergence is no longer in our log.
            assert log.snapshot_id is not None, f"the log begins at {log.start_offset} without a snapshot"
            return FetchAnswer(
                ErrorCode.NONE, node.epoch, node.me.id, node.high_watermark, snapshot_id=log.snapshot_id
            )
        end = log.end_offset_for(epoch)
        if end.epoch == epoch and offset <= end.end_offset:
            return None
        return FetchAnswer(ErrorCode.NONE, node.epoch, node.me.id, node.high_watermark, diverging=end)

    def _reply_fetch(self, token: Any, request: FetchRequest) -> None:
        node = self._node
        if not node.is_leader:
            error = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif request.epoch < node.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            error = ErrorCode.NONE
        answer = FetchAnswer(error, node.epoch, node.role.leader_id, node.high_watermark)
        node.emit(Reply(token, request, answer))

    # Committing

    def log_changed(self, role: Leader, now_ms: int) -> None:
        self.advance(role, now_ms)
        self._answer_parked()

    def append_failed(self, role: Leader, now_ms: int) -> None:
        self._voter_changes.end_change(role, ErrorCode.KAFKA_STORAGE_ERROR)
        if self._node.log.end_offset == role.epoch_start_offset:
            # It cannot lead without a record of its epoch.
            self.resign(role, now_ms)

    def advance(self, role: Leader, now_ms: int) -> None:
        """Commit what a majority has, if that includes a record of this epoch."""
        node = self._node
        entries = node.log.voters
        if not entries:
            return
        voters_offset, voters = entries[-1]
        offset = reached_by_majority(
            [node.flushed_offset if voter == node.me else role.offset_of(voter) for voter in voters]
        )
        if offset <= role.epoch_start_offset or offset <= node.high_watermark:
            return
        node.raise_high_watermark(offset)
        if voters_offset < offset:
            self._voter_changes.end_change(role, ErrorCode.NONE)
            if node.me not in voters:
                # It led only until its own removal was committed.
                self.resign(role, now_ms)
                return
        self._answer_parked()

    def _answer_parked(self) -> None:
        node = self._node
        role = node.role
        if not isinstance(role, Leader) or not role.parked:
            return
        end_offset = node.log.end_offset
        for replica, parked in list(role.parked.items()):
            if parked.request.offset < end_offset or parked.request.high_watermark < node.high_watermark:
                del role.parked[replica]
                self._reply_fetch(parked.token, parked.request)
