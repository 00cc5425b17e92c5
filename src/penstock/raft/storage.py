"""What the quorum needs from a disk: a view of its log, and the stored epoch and vote.

The core only reads. It requests writes as effects (``events.py``), and the shell reports when they are done.
``LogView`` shows the current log, including records that are not durable yet; ``Raft.flushed`` tells the core
what is durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.raft.quorum import Voter, Voters


class SnapshotId(NamedTuple):
    # Exclusive: the snapshot covers everything below.
    end_offset: int
    # Epoch of the last record below.
    epoch: int


class EpochEnd(NamedTuple):
    """Where an epoch ends in a log."""

    epoch: int
    end_offset: int


class LogView(Protocol):
    @property
    def start_offset(self) -> int:
        """Above 0 only when there is a snapshot that ends at or after it."""
        ...

    @property
    def start_epoch(self) -> int:
        """Epoch of the record before ``start_offset``; 0 when the log begins at 0."""
        ...

    @property
    def end_offset(self) -> int: ...

    @property
    def last_epoch(self) -> int:
        """Epoch of the last record, or of the snapshot when no record follows it; 0 when there is neither."""
        ...

    @property
    def snapshot_id(self) -> SnapshotId | None:
        """The newest snapshot. A follower whose log ends before ``start_offset`` loads it."""
        ...

    @property
    def voters(self) -> Sequence[tuple[int, Voters]]:
        """The snapshot's voter sets, then those in the log, oldest first, with the offsets of their records.

        Committed or not: a voter set counts from the moment it is in the log.
        """
        ...

    def end_offset_for(self, epoch: int) -> EpochEnd:
        """The largest epoch in the log that is at most ``epoch``, and where it ends; (-1, -1) when there is none.

        The log has the epochs of its records, and ``start_epoch``, which ends where the first record begins.
        """
        ...


class StoredState(NamedTuple):
    """A node's epoch and vote. They must survive every crash, and be durable before any message mentions them."""

    epoch: int = 0
    # The vote in that epoch.
    voted_for: Voter | None = None
    # For operators only; the algorithm does not use it.
    leader_id: int | None = None
