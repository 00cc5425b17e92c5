"""What the quorum is told and what it wants done: requests, their answers, and effects.

Requests and answers are KRaft's messages without their wire form (``broker/quorum/messages.py`` has that).
Effects are the counterpart of the methods of ``raft.Raft``, which return them as a list **in the order in
which they must happen**: a ``StoreState`` is durable before the effect behind it begins, and no other method
is called before the list is done. After an effect that touches the log the shell calls ``log_changed``.

They are all NamedTuples because the simulator makes millions of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from penstock.protocol.errors import ErrorCode
from penstock.raft.quorum import Voter, Voters
from penstock.raft.storage import EpochEnd, SnapshotId, StoredState

# Requests.


class VoteRequest(NamedTuple):
    # Of the candidate; in a PreVote the one it is in, else the one it stands in.
    epoch: int
    candidate: Voter
    # Whose vote is asked. A node with another directory has no such vote to give.
    voter: Voter
    # Of the candidate's log.
    last_epoch: int
    end_offset: int
    # Whether it only asks if it would be elected (KIP-996).
    is_pre_vote: bool


class BeginEpochRequest(NamedTuple):
    """A new leader makes itself known to a voter."""

    epoch: int
    leader_id: int
    voter: Voter


class EndEpochRequest(NamedTuple):
    """A leader that leaves says so, and who could best follow it."""

    epoch: int
    leader_id: int
    preferred: Voters


class FetchRequest(NamedTuple):
    """Asks for what follows a log, and says by that what this log has: all below ``offset`` is durable."""

    epoch: int
    replica: Voter
    offset: int
    # Of the record before ``offset``.
    last_epoch: int
    # What the replica knows to be committed; the leader answers at once when it knows more.
    high_watermark: int
    max_wait_ms: int


class SnapshotRequest(NamedTuple):
    epoch: int
    replica: Voter
    snapshot_id: SnapshotId
    position: int


class DescribeRequest(NamedTuple):
    """Who are you, and whom do you know? Answered by anyone, in any role."""


class ChangeVoterRequest(NamedTuple):
    """Admit a voter or remove one (KIP-853)."""

    voter: Voter
    is_removal: bool


Request: TypeAlias = (
    VoteRequest
    | BeginEpochRequest
    | EndEpochRequest
    | FetchRequest
    | SnapshotRequest
    | DescribeRequest
    | ChangeVoterRequest
)

# Answers. All say which epoch the answering node is in and whom it takes for the leader.


class VoteAnswer(NamedTuple):
    error: ErrorCode
    epoch: int
    leader_id: int | None
    is_granted: bool


class EpochAnswer(NamedTuple):
    """To BeginEpochRequest, EndEpochRequest and ChangeVoterRequest."""

    error: ErrorCode
    epoch: int
    leader_id: int | None


class FetchAnswer(NamedTuple):
    error: ErrorCode
    epoch: int
    leader_id: int | None
    high_watermark: int = -1
    # The logs part here, at the latest.
    diverging: EpochEnd | None = None
    # To be loaded first: the leader's log begins behind the offset asked for.
    snapshot_id: SnapshotId | None = None
    # Batches from the offset on. The leader's shell puts them in when it sends the answer.
    records: Any = None


class SnapshotAnswer(NamedTuple):
    error: ErrorCode
    epoch: int
    leader_id: int | None
    snapshot_id: SnapshotId | None = None
    position: int = 0
    # Of the whole snapshot. It and the bytes from ``position`` on are put in by the leader's shell.
    size: int = 0
    data: Any = None


class DescribeAnswer(NamedTuple):
    error: ErrorCode
    epoch: int
    leader_id: int | None
    # A node with an empty log knows nobody but itself.
    voters: Voters
    end_offset: int


Answer: TypeAlias = VoteAnswer | EpochAnswer | FetchAnswer | SnapshotAnswer | DescribeAnswer

# Control records, which the quorum writes for itself.

# Voters with directories, and changes of them (KIP-853).
KRAFT_VERSION = 1


class LeaderChange(NamedTuple):
    leader_id: int
    voters: Voters
    granting_voters: Voters


class KRaftVersion(NamedTuple):
    version: int


class VotersChange(NamedTuple):
    voters: Voters


ControlRecord: TypeAlias = LeaderChange | KRaftVersion | VotersChange

# Effects.


class StoreState(NamedTuple):
    """Replace what was stored, durably, before going on."""

    state: StoredState


class Append(NamedTuple):
    """Append these as one batch, whole or not at all. Then ``log_changed``, or ``append_failed``."""

    records: tuple[ControlRecord, ...]
    epoch: int


class AppendFetched(NamedTuple):
    """Append batches that the leader sent. Then ``log_changed``, or ``append_failed``."""

    records: Any


class Truncate(NamedTuple):
    """Remove everything from this offset on. Then ``log_changed``."""

    offset: int


class Flush(NamedTuple):
    """Begin to make the log durable; ``flushed`` when it is. At most one is under way."""


class Send(NamedTuple):
    """Send a request; ``answered`` with this very request when an answer comes, or none will."""

    to: int
    request: Request


class Reply(NamedTuple):
    """Answer an incoming request, by the token it came with."""

    token: Any
    request: Request
    answer: Answer


class HighWatermark(NamedTuple):
    """Everything below is committed, for ever."""

    offset: int


class WriteSnapshot(NamedTuple):
    """Put a piece of a snapshot that is being fetched at its position."""

    snapshot_id: SnapshotId
    position: int
    data: Any


class LoadSnapshot(NamedTuple):
    """The snapshot is complete: let the log begin and end behind it, durably. Then ``log_changed``, or
    ``snapshot_failed``.
    """

    snapshot_id: SnapshotId


class RoleChanged(NamedTuple):
    # Of the class in ``roles.py``, in lower case.
    role: str
    epoch: int
    leader_id: int | None


Effect: TypeAlias = (
    StoreState
    | Append
    | AppendFetched
    | Truncate
    | Flush
    | Send
    | Reply
    | HighWatermark
    | WriteSnapshot
    | LoadSnapshot
    | RoleChanged
)
