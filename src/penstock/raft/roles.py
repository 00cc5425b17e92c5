"""The roles of a node in the quorum: one small class each, with the state that belongs to the role.

    Unattached  -> Follower     learned who leads the epoch
    Unattached  -> Prospective  election timeout; or, with an empty log, every listed node is newborn too
    Follower    -> Prospective  fetch timeout; the leader's process is gone
    Follower    -> Unattached   the leader has resigned; any timeout of a node without a vote
    Prospective -> Candidate    enough voters say that they would elect it: the epoch grows by one
    Prospective -> Follower     not enough do, and a leader is known that may still be alive
    Prospective -> Unattached   not enough do
    Candidate   -> Leader       elected
    Candidate   -> Unattached   not elected
    Leader      -> Unattached   not heard from a majority for too long; resigned; removed from the voters
    any         -> Follower, Unattached   learned of a higher epoch

A role is replaced as a whole, so no state leaks into the next: an answer to a request of an old role matches no
outstanding request. State that outlives a role (epoch, vote, high watermark) is in ``participant.py``, and the
rules are in the parts of the core; these classes only keep counts and times.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from penstock.raft.events import (
    ChangeVoterRequest,
    DescribeRequest,
    FetchRequest,
    SnapshotRequest,
    VoteRequest,
)
from penstock.raft.quorum import Voter, Voters, reached_by_majority
from penstock.raft.storage import SnapshotId

NEVER_MS = 2**62
# "Never heard from". Before any clock time, since a clock may begin at 0.
LONG_AGO_MS = -NEVER_MS


class Unattached:
    """Knows the epoch but not its leader, and asks other nodes. A node without a vote does nothing else."""

    __slots__ = ("asked", "election_at_ms", "newborns", "search_at_ms")

    leader_id: int | None = None

    def __init__(self, election_at_ms: int, search_at_ms: int) -> None:
        self.election_at_ms = election_at_ms
        # When to ask the next node; for a founder, when to ask all of them again.
        self.search_at_ms = search_at_ms
        # Unanswered requests by node id.
        self.asked: dict[int, DescribeRequest] = {}
        # Nodes that have an empty log like ours, with their current directories.
        self.newborns: dict[int, Voter] = {}

    @property
    def deadline_ms(self) -> int:
        return min(self.election_at_ms, self.search_at_ms)


class Follower:
    __slots__ = (
        "download",
        "fetch",
        "fetch_at_ms",
        "has_fetched",
        "is_leader_gone",
        "leader_high_watermark",
        "leader_id",
        "timeout_at_ms",
    )

    def __init__(self, leader_id: int, timeout_at_ms: int) -> None:
        self.leader_id = leader_id
        # Each answer of the leader moves it.
        self.timeout_at_ms = timeout_at_ms
        # Unanswered. While there is one, the log is durable and ends at its offset.
        self.fetch: FetchRequest | None = None
        # When to retry after a failure.
        self.fetch_at_ms = NEVER_MS
        # Set instead of ``fetch`` while our log ends before the leader's begins.
        self.download: Download | None = None
        self.leader_high_watermark = 0
        # Whether the leader has answered yet. Until then we do not refuse a PreVote because of it.
        self.has_fetched = False
        self.is_leader_gone = False

    @property
    def deadline_ms(self) -> int:
        return min(self.timeout_at_ms, self.fetch_at_ms)


class Download:
    """A snapshot being downloaded from the leader."""

    __slots__ = ("position", "request", "snapshot_id")

    def __init__(self, snapshot_id: SnapshotId) -> None:
        self.snapshot_id = snapshot_id
        self.position = 0
        self.request: SnapshotRequest | None = None


class _Election:
    __slots__ = ("ask_at_ms", "asked", "granted", "needed", "refused", "timeout_at_ms", "voters")

    leader_id: int | None = None

    def __init__(self, voters: Voters, needed: int, me: Voter, timeout_at_ms: int) -> None:
        self.voters = voters
        self.needed = needed
        self.timeout_at_ms = timeout_at_ms
        # When to ask silent voters again.
        self.ask_at_ms = NEVER_MS
        # Unanswered requests by node id.
        self.asked: dict[int, VoteRequest] = {}
        self.granted: list[Voter] = [me]
        self.refused: list[Voter] = []

    @property
    def deadline_ms(self) -> int:
        return min(self.timeout_at_ms, self.ask_at_ms)

    @property
    def is_won(self) -> bool:
        return len(self.granted) >= self.needed

    @property
    def is_lost(self) -> bool:
        return len(self.voters) - len(self.refused) < self.needed

    def silent(self) -> list[Voter]:
        """The voters that have neither granted nor refused, and have no unanswered request."""
        heard = [*self.granted, *self.refused]
        return [voter for voter in self.voters if voter not in heard and voter.id not in self.asked]


class Prospective(_Election):
    """Asks whether it would be elected, before it disturbs the others with a higher epoch (KIP-996)."""

    __slots__ = ("former_leader_id",)

    def __init__(
        self, voters: Voters, needed: int, me: Voter, timeout_at_ms: int, former_leader_id: int | None
    ) -> None:
        super().__init__(voters, needed, me, timeout_at_ms)
        # The leader of this epoch. It may be gone, or only cut off from us.
        self.former_leader_id = former_leader_id


class Candidate(_Election):
    """Has voted for itself in this epoch."""

    __slots__ = ()


class Progress:
    """How far a replica has come, according to its fetches."""

    __slots__ = ("fetched_ms", "leader_end_offset", "offset")

    def __init__(self, fetched_ms: int, leader_end_offset: int) -> None:
        # Everything below is durable there, and the same as here. 0 until it has fetched in this epoch.
        self.offset = 0
        self.fetched_ms = fetched_ms
        # Our log end offset at its last fetch. A replica that has reached it counts as caught up.
        self.leader_end_offset = leader_end_offset


class Parked:
    """A fetch for which there are no records yet."""

    __slots__ = ("deadline_ms", "request", "token")

    def __init__(self, token: Any, request: FetchRequest, deadline_ms: int) -> None:
        self.token = token
        self.request = request
        self.deadline_ms = deadline_ms


class Leader:
    __slots__ = (
        "begin_at_ms",
        "change",
        "epoch_start_offset",
        "leader_id",
        "parked",
        "progress",
        "quorum_at_ms",
    )

    def __init__(self, leader_id: int, epoch_start_offset: int, quorum_at_ms: int, begin_at_ms: int) -> None:
        self.leader_id: int = leader_id
        # Offset of its LeaderChange. Records of older epochs are not committed by counting copies (Raft, figure
        # 8), but together with this record.
        self.epoch_start_offset = epoch_start_offset
        # When to check whether a majority still fetches. The check moves it; fetches do not.
        self.quorum_at_ms = quorum_at_ms
        # When to announce itself again to voters that do not fetch.
        self.begin_at_ms = begin_at_ms
        # Voters and observers.
        self.progress: dict[Voter, Progress] = {}
        # At most one per replica.
        self.parked: dict[Voter, Parked] = {}
        # The change of voters in progress, to be answered when it is committed.
        self.change: tuple[Any, ChangeVoterRequest] | None = None

    @property
    def deadline_ms(self) -> int:
        deadline_ms = min(self.quorum_at_ms, self.begin_at_ms)
        for parked in self.parked.values():
            deadline_ms = min(deadline_ms, parked.deadline_ms)
        return deadline_ms

    def offset_of(self, replica: Voter) -> int:
        progress = self.progress.get(replica)
        return 0 if progress is None else progress.offset

    def heard_from_majority_ms(self, voters: Voters, me: Voter, now_ms: int) -> int:
        """When a majority was last heard from, this node included if it is a voter. LONG_AGO_MS without voters."""
        heard_ms = [now_ms if voter == me else self._heard_ms(voter) for voter in voters]
        return reached_by_majority(heard_ms) if heard_ms else LONG_AGO_MS

    def _heard_ms(self, replica: Voter) -> int:
        progress = self.progress.get(replica)
        return LONG_AGO_MS if progress is None else progress.fetched_ms


Role: TypeAlias = Unattached | Follower | Prospective | Candidate | Leader
