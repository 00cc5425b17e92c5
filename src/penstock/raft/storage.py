"""What the quorum needs of a disk: a view of its log, and what was stored of its promises.

The core only looks. What is to be written it says as effects (``events.py``), and the shell tells it when
that has happened. The one thing to get right: ``LogView`` shows the log as it is at this moment, including
what is not durable yet; what is durable the core is told by ``Raft.flushed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.raft.quorum import Voter, Voters


class SnapshotId(NamedTuple):
    # Exclusive: the snapshot stands for everything below.
    end_offset: int
    # Of the last record below.
    epoch: int


class EpochEnd(NamedTuple):
    """Where an epoch ends in some log."""

    epoch: int
    end_offset: int


class LogView(Protocol):
    @property
    def start_offset(self) -> int:
        """Above 0 only when there is a snapshot that ends there or behind."""
        ...

    @property
    def start_epoch(self) -> int:
        """Of the record before ``start_offset``; 0 when the log begins at 0."""
        ...

    @property
    def end_offset(self) -> int: ...

    @property
    def last_epoch(self) -> int:
        """Of the last record, or of the snapshot when no record follows it; 0 when there is neither."""
        ...

    @property
    def snapshot_id(self) -> SnapshotId | None:
        """The newest one, which a follower that is behind ``start_offset`` is to load."""
        ...

    @property
    def voters(self) -> Sequence[tuple[int, Voters]]:
        """The voter sets in the log with the offsets of their records, oldest first, the snapshot's before
        them. Committed or not: a voter set counts from the moment it is in the log.
        """
        ...

    def end_offset_for(self, epoch: int) -> EpochEnd:
        """The largest epoch at most this one that the log knows, and where it ends.

        It knows the epochs of its records, and ``start_epoch``, which ends where the first record begins.
        (-1, -1) when it knows none.
        """
        ...


class StoredState(NamedTuple):
    """What a node has promised: it must outlive every crash, and be durable before anyone hears of it."""

    epoch: int = 0
    # In that epoch.
    voted_for: Voter | None = None
    # A hint for people; nothing rests on it.
    leader_id: int | None = None
