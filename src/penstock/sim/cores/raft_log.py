"""A log in memory that knows which part of it is durable: the disk of the quorum's simulator.

One entry is one batch and takes one offset. A crash keeps what was synced and a prefix of the rest, like a disk
that writes a file in order.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from penstock.raft.events import VotersChange
from penstock.raft.quorum import Voters
from penstock.raft.storage import EpochEnd, SnapshotId

NOWHERE = EpochEnd(-1, -1)


class Entry(NamedTuple):
    epoch: int
    # A proposed number, or control records.
    payload: Any


class SimLog:
    """A ``raft.storage.LogView`` with the methods that write it."""

    __slots__ = (
        "end_offset",
        "entries",
        "epochs",
        "last_epoch",
        "snapshot_id",
        "start_epoch",
        "start_offset",
        "synced_offset",
        "syncing_offset",
        "voters",
    )

    def __init__(self) -> None:
        self.start_offset = 0
        self.start_epoch = 0
        self.end_offset = 0
        self.last_epoch = 0
        self.snapshot_id: SnapshotId | None = None
        # Starts at start_offset.
        self.entries: list[Entry] = []
        # (epoch, start offset), ascending.
        self.epochs: list[tuple[int, int]] = []
        self.voters: list[tuple[int, Voters]] = []
        # Exclusive.
        self.synced_offset = 0
        # The offset up to which a running sync makes the log durable. Exclusive.
        self.syncing_offset = 0

    def end_offset_for(self, epoch: int) -> EpochEnd:
        place = bisect_right(self.epochs, (epoch, 1 << 62))
        if place == 0:
            return EpochEnd(self.start_epoch, self.start_offset) if epoch >= self.start_epoch else NOWHERE
        if place == len(self.epochs):
            return EpochEnd(self.epochs[-1][0], self.end_offset)
        return EpochEnd(self.epochs[place - 1][0], self.epochs[place][1])

    def at(self, offset: int) -> Entry:
        return self.entries[offset - self.start_offset]

    def from_offset(self, offset: int, count: int) -> list[Entry]:
        place = offset - self.start_offset
        return self.entries[place : place + count]

    def append(self, entry: Entry) -> None:
        offset = self.end_offset
        self.entries.append(entry)
        self.end_offset = offset + 1
        if entry.epoch != self.last_epoch or not self.epochs:
            self.epochs.append((entry.epoch, offset))
            self.last_epoch = entry.epoch
        if type(entry.payload) is tuple:
            for record in entry.payload:
                if type(record) is VotersChange:
                    self.voters.append((offset, record.voters))

    def truncate(self, offset: int) -> None:
        del self.entries[offset - self.start_offset :]
        self.end_offset = offset
        while self.epochs and self.epochs[-1][1] >= offset:
            self.epochs.pop()
        self.last_epoch = self.epochs[-1][0] if self.epochs else self.start_epoch
        while self.voters and self.voters[-1][0] >= offset:
            self.voters.pop()
        self.synced_offset = min(self.synced_offset, offset)
        self.syncing_offset = min(self.syncing_offset, offset)

    def begin_sync(self) -> None:
        self.syncing_offset = self.end_offset

    def end_sync(self) -> None:
        self.synced_offset = max(self.synced_offset, self.syncing_offset)

    def compact(self, offset: int) -> None:
        """Take a snapshot that ends at this offset, and start the log there."""
        epoch = self.at(offset - 1).epoch
        del self.entries[: offset - self.start_offset]
        self.start_offset = offset
        self.start_epoch = epoch
        self.snapshot_id = SnapshotId(offset, epoch)
        place = bisect_right(self.epochs, offset, key=lambda entry: entry[1])
        kept = self.epochs[place:]
        if place and (not kept or kept[0][1] > offset) and self.end_offset > offset:
            kept.insert(0, (self.epochs[place - 1][0], offset))
        self.epochs = kept
        older = [entry for entry in self.voters if entry[0] < offset]
        self.voters = older[-1:] + self.voters[len(older) :]
        # A snapshot is durable before the entries it replaces are removed.
        self.synced_offset = max(self.synced_offset, offset)

    def load(self, snapshot_id: SnapshotId, voters: list[tuple[int, Voters]]) -> None:
        """Start and end the log at a snapshot fetched from the leader."""
        self.start_offset = self.end_offset = self.synced_offset = self.syncing_offset = (
            snapshot_id.end_offset
        )
        self.start_epoch = self.last_epoch = snapshot_id.epoch
        self.snapshot_id = snapshot_id
        self.entries = []
        self.epochs = []
        self.voters = list(voters)
