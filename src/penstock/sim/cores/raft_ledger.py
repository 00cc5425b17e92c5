"""Everything that any node of a simulated quorum has ever promised, and checks that the promises are kept.

The ledger sees what no node sees: every vote, every leader, every committed entry. It records what goes in and
out of the cores and asks the cores nothing, so that a core with a wrong state cannot mislead it. Each method is
called when the event happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from penstock.raft.events import (
    Answer,
    Append,
    FetchAnswer,
    FetchRequest,
    Request,
    RoleChanged,
    VoteAnswer,
    VoteRequest,
    VotersChange,
)
from penstock.raft.quorum import Voter, Voters, majority
from penstock.raft.settings import RaftSettings
from penstock.sim.report import Violation

if TYPE_CHECKING:
    from penstock.sim.cores.raft_log import Entry, SimLog
    from penstock.sim.cores.raft_node import Node


class Ledger:
    def __init__(self, seed: int, nodes: dict[int, Node]) -> None:
        self._seed = seed
        self._nodes = nodes
        # The leader of each epoch, and its incarnation.
        self._leaders: dict[int, tuple[Voter, int]] = {}
        # The vote of each disk in each epoch.
        self._votes: dict[tuple[Voter, int], Voter] = {}
        # The voters that granted a candidate's pre-vote in an epoch.
        self._words: dict[tuple[Voter, int], dict[Voter, None]] = {}
        # The entry at an offset in an epoch, and the epoch before it.
        self._written: dict[tuple[int, int], tuple[Any, int]] = {}
        # By offset; never shrinks.
        self.committed: list[Entry] = []
        # By offset: the epoch of the first node that knew it was committed.
        self._committed_in: list[int] = []
        self._committed_voters: Voters = ()
        # The latest epoch with a committed entry.
        self._committed_epoch = 0
        # The high watermark of each node since its last start.
        self._high_watermarks: dict[int, int] = {}
        # Wiped disks, as they were when they were wiped.
        self._graves: dict[Voter, SimLog] = {}
        self._wiped_ids: dict[int, None] = {}
        # When each node last had a response from a leader, and of which epoch.
        self._heard: dict[int, tuple[int, int]] = {}
        # The epoch in which each follower follows.
        self._followed: dict[int, int] = {}
        # The last fetch of each node.
        self._fetching: dict[int, Request] = {}
        # Pieces of snapshots being downloaded.
        self.downloads: dict[int, Any] = {}

    def fail(self, message: str, now_ms: int) -> NoReturn:
        raise Violation(f"{message} (seed {self._seed}, at {now_ms} ms)")

    # Elections

    def role_changed(self, node: Node, effect: RoleChanged, now_ms: int) -> None:
        if effect.role == "follower":
            self._followed[node.id] = effect.epoch
        else:
            self._followed.pop(node.id, None)
            self._heard.pop(node.id, None)
        if effect.role == "leader":
            leader = (node.me, node.life)
            if self._leaders.setdefault(effect.epoch, leader) != leader:
                self.fail(f"two leaders of epoch {effect.epoch}", now_ms)
            if effect.epoch < self._committed_epoch:
                # Elected long ago, and only now informed. No node will follow it.
                return
            count = len(self.committed)
            if node.log.end_offset < count or (
                count > node.log.start_offset and node.log.at(count - 1) != self.committed[-1]
            ):
                self.fail(f"node {node.id} leads epoch {effect.epoch} without all that is committed", now_ms)
        elif effect.role == "candidate":
            raft = node.raft
            assert raft is not None
            words = len(self._words.get((node.me, effect.epoch - 1), ())) + 1
            voters = raft.voters
            if voters and words < majority(len(voters)):
                self.fail(f"node {node.id} opened epoch {effect.epoch} though nobody wanted it", now_ms)

    def sending(self, node: Node, request: Request, now_ms: int) -> None:
        if type(request) is VoteRequest and not request.is_pre_vote:
            self._vote(node.me, request.epoch, node.me, now_ms)
        elif type(request) is FetchRequest:
            self._fetching[node.id] = request

    def replying(self, node: Node, request: Request, answer: Answer, now_ms: int) -> None:
        if type(answer) is VoteAnswer and answer.is_granted and type(request) is VoteRequest:
            if not request.is_pre_vote:
                self._vote(node.me, request.epoch, request.candidate, now_ms)
                return
            self._words.setdefault((request.candidate, request.epoch), {})[node.me] = None
            heard_ms, epoch = self._heard.get(node.id, (-(1 << 30), -1))
            if epoch == answer.epoch and now_ms - heard_ms < RaftSettings().fetch_timeout_ms // 2:
                self.fail(f"node {node.id} would elect another though it hears the leader", now_ms)

    def heard(self, node: Node, request: Request, answer: Answer, now_ms: int) -> None:
        if type(answer) is FetchAnswer and self._fetching.get(node.id) is request:
            del self._fetching[node.id]
            if answer.error:
                self._heard.pop(node.id, None)
            elif self._followed.get(node.id) == answer.epoch:
                self._heard[node.id] = (now_ms, answer.epoch)

    def gave_up(self, node: Node, request: Request) -> None:
        """A node no longer waits for a request; an answer to a copy of it does not count."""
        if self._fetching.get(node.id) is request:
            del self._fetching[node.id]

    def missed(self, node: Node, gone: Node) -> None:
        """A node learned that a process is gone; earlier responses of that leader no longer count."""
        leader = self._leaders.get(self._followed.get(node.id, -1))
        if leader is not None and leader[0].id == gone.id:
            self._followed.pop(node.id, None)
            self._heard.pop(node.id, None)

    def _vote(self, voter: Voter, epoch: int, candidate: Voter, now_ms: int) -> None:
        if self._votes.setdefault((voter, epoch), candidate) != candidate:
            self.fail(f"node {voter.id} voted twice in epoch {epoch}", now_ms)

    # Logs

    def appended(self, node: Node, effect: Append, now_ms: int) -> None:
        is_change = len(effect.records) == 1 and type(effect.records[0]) is VotersChange
        if is_change and node.log.voters[-1][0] >= len(self.committed):
            self.fail(f"node {node.id} changes the voters while a change is not committed", now_ms)

    def grew(self, node: Node, first: int, now_ms: int) -> None:
        log = node.log
        for offset in range(first, log.end_offset):
            entry = log.at(offset)
            before = log.at(offset - 1).epoch if offset > log.start_offset else log.start_epoch
            written = (entry.payload, before)
            if self._written.setdefault((offset, entry.epoch), written) != written:
                self.fail(
                    f"node {node.id} has another entry at offset {offset} of epoch {entry.epoch}", now_ms
                )

    def truncating(self, node: Node, offset: int, now_ms: int) -> None:
        log = node.log
        if offset < log.start_offset:
            self.fail(f"node {node.id} truncates to {offset}, before its log", now_ms)
        raft = node.raft
        assert raft is not None
        # Committed in a later epoch, it does not count on this copy: it may go by order of an earlier leader.
        if (
            offset < min(len(self.committed), log.end_offset)
            and log.at(offset) == self.committed[offset]
            and raft.epoch >= self._committed_in[offset]
        ):
            self.fail(f"node {node.id} removes offset {offset}, which is committed", now_ms)

    def high_watermark(self, node: Node, offset: int, now_ms: int) -> None:
        log = node.log
        known = self._high_watermarks.get(node.id, 0)
        if offset < known:
            self.fail(f"the high watermark of node {node.id} went back from {known} to {offset}", now_ms)
        self._high_watermarks[node.id] = offset
        committed = self.committed
        for place in range(max(known, log.start_offset), min(offset, len(committed))):
            if log.at(place) != committed[place]:
                self.fail(f"node {node.id} has another committed entry at offset {place}", now_ms)
        if offset <= len(committed):
            return
        self._check_majority(node, offset, now_ms)
        raft = node.raft
        assert raft is not None
        for place in range(len(committed), offset):
            committed.append(log.at(place))
            self._committed_in.append(raft.epoch)
        self._committed_epoch = max(self._committed_epoch, committed[-1].epoch)
        self._committed_voters = next(voters for at, voters in reversed(log.voters) if at < offset)

    def _check_majority(self, node: Node, offset: int, now_ms: int) -> None:
        """Check that a newly committed entry is on the disks of a majority, or was when they were wiped."""
        entry = node.log.at(offset - 1)
        voters = node.log.voters[-1][1]
        holders = 0
        for voter in voters:
            holder = self._nodes[voter.id]
            log = holder.log if holder.directory == voter.directory else self._graves.get(voter)
            if log is None or log.synced_offset < offset:
                continue
            if offset <= log.start_offset or log.at(offset - 1) == entry:
                holders += 1
        if holders < majority(len(voters)):
            self.fail(
                f"node {node.id} commits offset {offset - 1} of epoch {entry.epoch}, durable on {holders} of "
                f"{len(voters)} voters",
                now_ms,
            )

    def check(self, node: Node, now_ms: int) -> None:
        raft = node.raft
        assert raft is not None
        if raft.epoch < node.stored.epoch:
            self.fail(f"node {node.id} went back to epoch {raft.epoch}", now_ms)

    # Faults

    def crashed(self, node: Node) -> None:
        self._high_watermarks.pop(node.id, None)
        self._heard.pop(node.id, None)
        self._followed.pop(node.id, None)

    def may_wipe(self, node: Node) -> bool:
        """Whether a quorum can survive the loss of this disk too: it must survive the loss of a minority."""
        if not node.is_up:
            return False
        if not self.committed:
            ids = {**self._wiped_ids, node.id: None}
            founders = [id for id in self._nodes if id <= 5]
            return len(ids) <= (len(founders) - 1) // 2
        voters = self._committed_voters
        for other in self._nodes.values():
            entries = other.log.voters
            if entries and entries[-1][1] != voters and entries[-1][0] >= len(self.committed):
                return False
        intact = sum(
            self._nodes[voter.id].directory == voter.directory and voter.id != node.id for voter in voters
        )
        return node.me not in voters or intact >= majority(len(voters))

    def wiped(self, node: Node) -> None:
        self._graves[node.me] = node.log
        self._wiped_ids[node.id] = None
