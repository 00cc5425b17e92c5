"""The quorum's input and output: requests, their answers, and effects.

Requests and answers are KRaft's messages without their wire form (``broker/quorum/messages.py`` has that).
The methods of ``raft.Raft`` return effects as a list **in the order in which they must happen**: a ``StoreState``
is durable before the next effect begins, and no other method is called before the list is done. After an effect
that changes the log the shell calls ``log_changed``.

They are all NamedTuples because the simulator creates millions of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from penstock.protocol.errors import ErrorCode
from penstock.raft.quorum import Voter, Voters
from penstock.raft.storage import EpochEnd, SnapshotId, StoredState

# Requests.


class VoteRequest(NamedTuple):
    # The candidate's epoch. In a PreVote, its current epoch, not yet raised.
    epoch: int
    candidate: Voter
    # Whose vote is requested. A node with another directory refuses.
    voter: Voter
    # The candidate's log.
    last_epoch: int
    end_offset: int
    # Whether the candidate only asks if it would be elected (KIP-996).
    is_pre_vote: bool


class BeginEpochRequest(NamedTuple):
    """A new leader announces itself to a voter."""

    epoch: int
    leader_id: int
    voter: Voter


class EndEpochRequest(NamedTuple):
    """A leader resigns. ``preferred`` are its successors, best first."""

    epoch: int
    leader_id: int
    preferred: Voters


class FetchRequest(NamedTuple):
    """Fetches the records after the replica's log. Everything below ``offset`` is durable on the replica."""

    epoch: int
    replica: Voter
    offset: int
    # Epoch of the record before ``offset``.
    last_epoch: int
    # As the replica knows it. The leader answers at once when its own is higher.
    high_watermark: int
    max_wait_ms: int


class SnapshotRequest(NamedTuple):
    epoch: int
    replica: Voter
    snapshot_id: SnapshotId
    position: int


class DescribeRequest(NamedTuple):
    """Asks a node for its voters, epoch and leader. Every node answers, in any role."""


class ChangeVoterRequest(NamedTuple):
    """Add a voter or remove one (KIP-853)."""

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

# Answers. Each carries the answering node's epoch and the leader it knows.


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
    # The logs diverge here or earlier.
    diverging: EpochEnd | None = None
    # Load this snapshot first: the leader's log begins after the requested offset.
    snapshot_id: SnapshotId | None = None
    # Batches from the offset on. The leader's shell fills them in when it sends the answer.
    records: Any = None


class SnapshotAnswer(NamedTuple):
    error: ErrorCode
    epoch: int
    leader_id: int | None
    snapshot_id: SnapshotId | None = None
    position: int = 0
    # Size of the whole snapshot. The leader's shell fills it in, and ``data``: the bytes from ``position`` on.
    size: int = 0
    data: Any = None


class DescribeAnswer(NamedTuple):
    error: ErrorCode
    epoch: int
    leader_id: int | None
    # A node with an empty log lists only itself.
    voters: Voters
    end_offset: int


Answer: TypeAlias = VoteAnswer | EpochAnswer | FetchAnswer | SnapshotAnswer | DescribeAnswer

# Control records, which the quorum writes for its own use.

# Version 1: voters have directories and can be changed (KIP-853).
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
    """Replace the stored state, and make it durable before the next effect."""

    state: StoredState


class Append(NamedTuple):
    """Append these as one batch, atomically. Then call ``log_changed``, or ``append_failed``."""

    records: tuple[ControlRecord, ...]
    epoch: int


class AppendFetched(NamedTuple):
    """Append batches fetched from the leader. Then call ``log_changed``, or ``append_failed``."""

    records: Any


class Truncate(NamedTuple):
    """Remove everything from this offset on. Then call ``log_changed``."""

    offset: int


class Flush(NamedTuple):
    """Start a flush of the log, and call ``flushed`` when it is done. At most one is in progress."""


class Send(NamedTuple):
    """Send a request. Call ``answered`` with this same object when an answer arrives or will never arrive."""

    to: int
    request: Request


class Reply(NamedTuple):
    """Answer an incoming request, identified by its token."""

    token: Any
    request: Request
    answer: Answer


class HighWatermark(NamedTuple):
    """Everything below ``offset`` is committed."""

    offset: int


class WriteSnapshot(NamedTuple):
    """Write a piece of the snapshot being fetched at its position."""

    snapshot_id: SnapshotId
    position: int
    data: Any


class LoadSnapshot(NamedTuple):
    """The snapshot is complete: make the log begin and end after it, durably. Then call ``log_changed``, or
    ``snapshot_failed``.
    """

    snapshot_id: SnapshotId


class RoleChanged(NamedTuple):
    # The name of a class in ``roles.py``, in lower case.
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
