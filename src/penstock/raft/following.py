"""Following a leader: fetching its records, or its snapshot first, and truncating what the leader does not have.

A follower fetches from its log end, one request at a time, and only when its log is durable: the fetch offset is
its promise that it has everything below. The leader compares epochs, never high watermarks (KIP-101). Its answer
holds the next records, or the point where the logs diverge, or a snapshot id if its log begins later.

An answer counts only for the request that is outstanding. An older answer may refer to a log that was truncated
since.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    AppendFetched,
    BeginEpochRequest,
    EpochAnswer,
    FetchAnswer,
    FetchRequest,
    LoadSnapshot,
    Reply,
    Request,
    Send,
    SnapshotAnswer,
    SnapshotRequest,
    Truncate,
    WriteSnapshot,
)
from penstock.raft.participant import Participant
from penstock.raft.roles import NEVER_MS, Download, Follower, Prospective
from penstock.raft.storage import EpochEnd

# When the leader's process is gone, its followers stand without waiting for a timeout, but not all at once.
GONE_JITTER_MS = 50


class Following:
    def __init__(self, node: Participant) -> None:
        self._node = node

    # Choosing the leader

    def begin(self, epoch: int, leader_id: int, now_ms: int) -> None:
        node = self._node
        assert leader_id != node.me.id
        fetch_timeout_ms = node.settings.fetch_timeout_ms
        timeout_ms = fetch_timeout_ms + node.random.randrange(fetch_timeout_ms // 5 + 1)
        role = Follower(leader_id, now_ms + timeout_ms)
        node.set_role(epoch, role)
        self._fetch_when_flushed(role)

    def learn(self, epoch: int, leader_id: int | None, now_ms: int) -> None:
        """Another node told its epoch, and perhaps that epoch's leader."""
        node = self._node
        if leader_id == node.me.id:
            # True of this node before it restarted. It knows itself whether it leads now.
            leader_id = None
        if epoch > node.epoch:
            if leader_id is None:
                node.become_unattached(epoch, now_ms)
            else:
                self.begin(epoch, leader_id, now_ms)
        elif epoch == node.epoch and leader_id is not None:
            role = node.role
            known = role.former_leader_id if isinstance(role, Prospective) else role.leader_id
            assert known in (None, leader_id), f"epoch {epoch} has two leaders, {known} and {leader_id}"
            if known is None:
                self.begin(epoch, leader_id, now_ms)

    def begin_epoch(self, request: BeginEpochRequest, token: Any, now_ms: int) -> None:
        """A leader has announced itself."""
        node = self._node
        if request.voter != node.me:
            error = ErrorCode.INVALID_VOTER_KEY
        elif request.epoch < node.epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        else:
            error = ErrorCode.NONE
            self.learn(request.epoch, request.leader_id, now_ms)
            if isinstance(node.role, Prospective):
                # The leader that seemed gone is alive.
                self.begin(node.epoch, request.leader_id, now_ms)
        node.emit(Reply(token, request, EpochAnswer(error, node.epoch, node.role.leader_id)))

    def leader_gone(self, role: Follower, now_ms: int) -> None:
        """The leader's process is certainly gone: do not wait for the fetch timeout."""
        if not role.is_leader_gone:
            role.is_leader_gone = True
            jitter_ms = self._node.random.randrange(GONE_JITTER_MS)
            role.timeout_at_ms = min(role.timeout_at_ms, now_ms + jitter_ms)

    # Requests

    def retry(self, role: Follower) -> None:
        """Repeat the request after a failure."""
        role.fetch_at_ms = NEVER_MS
        if role.download is not None:
            self._send_snapshot_request(role, role.download)
        elif self._node.is_flushed:
            self.send_fetch(role)

    def retry_later(self, role: Follower, now_ms: int) -> None:
        """Our own disk failed: retry slowly, but soon enough not to time out the leader."""
        role.fetch_at_ms = now_ms + self._node.settings.fetch_timeout_ms // 2

    def log_changed(self, role: Follower) -> None:
        node = self._node
        end_offset = node.log.end_offset
        if role.download is not None and end_offset >= role.download.snapshot_id.end_offset:
            role.download = None
        node.raise_high_watermark(min(role.leader_high_watermark, end_offset))
        self._fetch_when_flushed(role)

    def send_fetch(self, role: Follower) -> None:
        if role.fetch is not None or role.download is not None or role.fetch_at_ms != NEVER_MS:
            return
        node = self._node
        assert node.is_flushed, "a fetch promises what is durable"
        role.fetch = FetchRequest(
            node.epoch,
            node.me,
            node.log.end_offset,
            node.log.last_epoch,
            node.high_watermark,
            node.settings.fetch_max_wait_ms,
        )
        node.emit(Send(role.leader_id, role.fetch))

    def unanswered(self, role: Follower, request: Request, now_ms: int) -> None:
        retry_at_ms = now_ms + self._node.settings.retry_backoff_ms
        if role.fetch is request:
            role.fetch = None
            role.fetch_at_ms = retry_at_ms
        elif role.download is not None and role.download.request is request:
            role.download.request = None
            role.fetch_at_ms = retry_at_ms

    def _fetch_when_flushed(self, role: Follower) -> None:
        if self._node.is_flushed:
            self.send_fetch(role)
        else:
            self._node.flush()

    def _send_snapshot_request(self, role: Follower, download: Download) -> None:
        node = self._node
        download.request = SnapshotRequest(node.epoch, node.me, download.snapshot_id, download.position)
        node.emit(Send(role.leader_id, download.request))

    # Answers

    def fetch_answered(self, request: FetchRequest, answer: FetchAnswer, now_ms: int) -> None:
        node = self._node
        role = node.role
        if not isinstance(role, Follower) or role.fetch is not request:
            # The answer to an earlier request: it may refer to a log that was truncated since.
            return
        role.fetch = None
        if answer.error or answer.epoch != node.epoch:
            self._refused(role, answer, now_ms)
            return
        self._hear(role, now_ms)
        if answer.diverging is not None:
            offset = self._truncation_offset(answer.diverging)
            assert offset >= node.high_watermark, (
                f"asked to remove what is committed: to {offset} below {node.high_watermark}"
            )
            node.emit(Truncate(offset))
        elif answer.snapshot_id is not None:
            role.download = Download(answer.snapshot_id)
            self._send_snapshot_request(role, role.download)
        else:
            role.leader_high_watermark = max(role.leader_high_watermark, answer.high_watermark)
            node.raise_high_watermark(min(answer.high_watermark, node.log.end_offset))
            if answer.records:
                node.emit(AppendFetched(answer.records))
            else:
                self.send_fetch(role)

    def snapshot_answered(self, request: SnapshotRequest, answer: SnapshotAnswer, now_ms: int) -> None:
        node = self._node
        role = node.role
        if not isinstance(role, Follower) or role.download is None or role.download.request is not request:
            return
        download = role.download
        download.request = None
        if answer.error or answer.epoch != node.epoch or answer.position != download.position:
            self._refused(role, answer, now_ms)
            return
        self._hear(role, now_ms)
        node.emit(WriteSnapshot(download.snapshot_id, download.position, answer.data))
        download.position += len(answer.data)
        if download.position >= answer.size:
            node.emit(LoadSnapshot(download.snapshot_id))
        else:
            self._send_snapshot_request(role, download)

    def _hear(self, role: Follower, now_ms: int) -> None:
        role.has_fetched = True
        if not role.is_leader_gone:
            # If it is gone, it sent this answer before it ended.
            role.timeout_at_ms = now_ms + self._node.settings.fetch_timeout_ms

    def _truncation_offset(self, diverging: EpochEnd) -> int:
        """Where to truncate: the end of the epoch the leader named, in our log or in the leader's, if earlier.

        When we do not have that epoch, it is where the largest smaller epoch ends here; the next fetch continues
        from there (KIP-279).
        """
        log = self._node.log
        ours = log.end_offset_for(diverging.epoch)
        if ours.epoch == diverging.epoch:
            return min(ours.end_offset, diverging.end_offset)
        return max(ours.end_offset, log.start_offset)

    def _refused(self, role: Follower, answer: FetchAnswer | SnapshotAnswer, now_ms: int) -> None:
        node = self._node
        self.learn(answer.epoch, answer.leader_id, now_ms)
        if node.role is not role:
            return
        if answer.epoch == node.epoch and answer.leader_id is None:
            # It is no longer the leader, and no other node can lead this epoch.
            node.become_unattached(node.epoch, now_ms, election_in_ms=node.draw_backoff_ms())
        else:
            role.download = None
            role.fetch_at_ms = now_ms + node.settings.retry_backoff_ms
