"""The metadata log on disk, as the quorum sees it, and the ``quorum-state`` file with the stored vote and epoch.

``MetadataLog`` is a ``raft.storage.LogView`` over a ``log.Log``. In memory it keeps the voter sets with their
offsets, and the changes that are not applied yet. Changes are decoded once, when they arrive or at start, so that
committing reads nothing back from disk.

A log of the previous release has neither voters nor ``quorum-state``. It belongs to a single node, so its one voter
is this node. But a log *with* voters whose ``quorum-state`` is missing has lost its votes, and is refused.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.broker.options import ServeError
from penstock.environment import Buffer, Environment, FileRange, Files
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.names import LOG, offset_of
from penstock.log.recovery import good_batches
from penstock.metadata import changes as metadata_changes
from penstock.model import format_id, parse_id
from penstock.protocol import schema
from penstock.protocol.errors import DecodeError
from penstock.protocol.listeners import NODES
from penstock.protocol.messages.quorum import (
    CONTROL_TYPE,
    ControlRecordKey,
    Endpoint,
    KRaftVersionFeature,
    KRaftVersionRecord,
    LeaderChangeMessage,
    LeaderChangeMessageVoter,
    RemovedVoter,
    VotersRecord,
    VotersRecordVoter,
)
from penstock.protocol.records import (
    HEADER_SIZE,
    BatchHeader,
    CorruptBatch,
    RecordFields,
    batches,
    crc_matches,
    decode_header,
    decode_records,
    encode_batch,
)
from penstock.protocol.schema import Message
from penstock.raft.events import ControlRecord, KRaftVersion, LeaderChange, VotersChange
from penstock.raft.quorum import Voter, Voters, voters_of
from penstock.raft.storage import EpochEnd, SnapshotId, StoredState

QUORUM_STATE = "quorum-state"
READ_BYTES = 1024 * 1024
KRAFT_VERSION_MAX = 1
# Segments that a snapshot replaced may still be on their way to a follower.
REMOVAL_DELAY_MS = 60_000
# Small segments: those before the snapshots are deleted, so that a start has little to recover.
METADATA_LOG_CONFIG = LogConfig(
    segment_bytes=32 * 1024 * 1024, segment_ms=7 * 24 * 3600 * 1000, retention_ms=-1, retention_bytes=-1
)
# Kafka's version of the file.
_STATE_VERSION = 1
# Of the keys and values of control records. Kafka's tools read a LeaderChangeMessage in this version, whatever the
# value says, so the voters' directory ids (version 1) are left out. Older releases wrote version 1.
_CONTROL_VERSION = 0
# Before every offset: for voters that are in no record.
BEFORE_ALL = -1

_NOWHERE = EpochEnd(-1, -1)


class Batch(NamedTuple):
    """The changes of one batch, to be applied once it is committed."""

    # Exclusive.
    end_offset: int
    epoch: int
    changes: list[Message]
    size_bytes: int


class MetadataLog:
    def __init__(self, environment: Environment, log: Log, me: Voter) -> None:
        self._environment = environment
        self._me = me
        self.log = log
        # The newest snapshot, and the epoch of the record before the log's start: the oldest one's.
        self.snapshot_id: SnapshotId | None = None
        self.start_epoch = 0
        # (offset, voter set): those of the snapshot, then those in the log.
        self.voters: list[tuple[int, Voters]] = []
        # The voters' addresses in the newest record.
        self.addresses: dict[int, tuple[str, int]] = {}
        # Batches in the log that are not applied yet. Also those without changes: they count as progress.
        self.unapplied: deque[Batch] = deque()

    # As the quorum sees it

    @property
    def start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def end_offset(self) -> int:
        return self.log.log_end_offset

    @property
    def last_epoch(self) -> int:
        entries = self._epochs()
        return entries[-1][0] if entries else self.start_epoch

    def end_offset_for(self, epoch: int) -> EpochEnd:
        entries = self._epochs()
        place = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if place == 0:
            return EpochEnd(self.start_epoch, self.start_offset) if epoch >= self.start_epoch else _NOWHERE
        end_offset = self.end_offset if place == len(entries) else entries[place][1]
        return EpochEnd(entries[place - 1][0], end_offset)

    def _epochs(self) -> list[tuple[int, int]]:
        """The epochs that have records. The log may have one more, of a batch that found no room. It must not
        count, or this node would be elected for a record that it does not have.
        """
        entries = self.log.epochs.entries
        return entries[:-1] if entries and entries[-1][1] >= self.end_offset else entries

    def epoch_before(self, offset: int) -> int:
        """The epoch of the record before this offset."""
        return self.log.epochs.epoch_at(offset - 1) if offset > self.start_offset else self.start_epoch

    # Opening

    def begin_at(self, snapshots: list[SnapshotId], voters: Voters, removed: Voters = ()) -> None:
        """The log continues these snapshots, oldest first; the newest was loaded."""
        if not snapshots:
            if self.start_offset:
                raise ServeError(
                    f"the metadata log begins at offset {self.start_offset} and there is no snapshot before it"
                )
            return
        oldest, newest = snapshots[0], snapshots[-1]
        if not self._continues(newest):
            # The snapshot is durable. The log after it was lost or not fetched yet; or this is still the log that
            # the snapshot was fetched to replace, and what it has beyond that was never committed.
            self.log.start_over_at(newest.end_offset, newest.epoch)
            oldest = newest
        self.start_epoch = oldest.epoch
        self.snapshot_id = newest
        if voters:
            self.voters = _history(newest, voters, removed)

    def _continues(self, snapshot: SnapshotId) -> bool:
        """Whether the log holds what a snapshot holds up to its end, or continues from there."""
        end_offset = snapshot.end_offset
        if self.end_offset < end_offset:
            return False
        epochs = self.log.epochs
        if self.start_offset >= end_offset:
            # The records before it were removed. Epochs never decrease.
            return self.end_offset == end_offset or epochs.epoch_at(end_offset) >= snapshot.epoch
        # Two logs with a record of the same offset and epoch agree on everything before it (Raft, section 5.3).
        # Their lengths say nothing.
        return epochs.epoch_at(end_offset - 1) == snapshot.epoch

    def replay(self) -> None:
        """Read everything after the newest snapshot. Raises ServeError when it cannot be read."""
        offset = self.start_offset if self.snapshot_id is None else self.snapshot_id.end_offset
        try:
            while offset < self.end_offset:
                found = self.read(offset, READ_BYTES)
                assert found is not None, "the log ends before its end offset"
                offset = self._take(found.file.read_at(found.position, found.size), offset)
        except (CorruptBatch, DecodeError) as error:
            raise ServeError(f"the metadata log cannot be read at offset {offset}: {error}") from error
        if self.end_offset and not self.voters:
            self.voters = [(BEFORE_ALL, (self._me,))]

    def read(self, offset: int, bytes_max: int) -> FileRange | None:
        return self.log.read(offset, bytes_max, self.end_offset, at_least_one=True)

    # Writing. All raise OSError as Log.append does.

    def append_changes(self, changes: list[Message], epoch: int) -> None:
        wall_ms = self._environment.clock.wall_ms()
        batch = encode_batch(
            [(wall_ms, None, metadata_changes.encode(change), []) for change in changes], leader_epoch=epoch
        )
        self.log.append(batch, decode_header(batch), epoch)
        self.unapplied.append(Batch(self.end_offset, epoch, changes, len(batch)))

    def append_control(
        self, records: Iterable[ControlRecord], epoch: int, addresses: dict[int, tuple[str, int]]
    ) -> None:
        wall_ms = self._environment.clock.wall_ms()
        batch = control_batch([control_message(record, addresses) for record in records], wall_ms, epoch)
        offset = self.log.append(batch, decode_header(batch), epoch)
        self._take(bytes(batch), offset)

    def append_fetched(self, data: Buffer) -> None:
        """Raises CorruptBatch too; then the batches before the bad one were appended."""
        offset = self.end_offset
        try:
            self.log.append_replicated(data)
        finally:
            self._take(data, offset)

    def truncate(self, offset: int) -> None:
        self.log.truncate_to(offset)
        while self.voters and self.voters[-1][0] >= self.end_offset:
            self.voters.pop()
        while self.unapplied and self.unapplied[-1].end_offset > self.end_offset:
            self.unapplied.pop()

    def start_over(self, snapshot_id: SnapshotId, voters: Voters, removed: Voters = ()) -> None:
        """Make the log empty, starting at the end of a snapshot that was fetched from the leader."""
        self.log.start_over_at(snapshot_id.end_offset, snapshot_id.epoch)
        self.snapshot_id = snapshot_id
        self.start_epoch = snapshot_id.epoch
        self.voters = _history(snapshot_id, voters, removed)
        self.unapplied.clear()

    def snapshot_made(self, snapshots: list[SnapshotId]) -> None:
        """There is a newer snapshot: records before the oldest kept snapshot are no longer needed."""
        self.snapshot_id = snapshots[-1]
        if snapshots[0].end_offset > self.start_offset:
            self.log.delete_before(snapshots[0].end_offset)
            self.start_epoch = snapshots[0].epoch
        older = [entry for entry in self.voters if entry[0] < snapshots[-1].end_offset]
        # Keep one set more than needed: the former voters tell a wiped voter from a removed one.
        self.voters = older[-2:] + self.voters[len(older) :]

    def remove_deleted_files(self) -> None:
        """Remove deleted segments after a delay, when they are no longer read."""
        files = self._environment.files
        paths, self.log.pending_deletes = self.log.pending_deletes, []

        def remove() -> None:
            for path in paths:
                files.forget(path)
                files.remove(path)

        if paths:
            self._environment.spawn.later(REMOVAL_DELAY_MS, remove)

    def _take(self, data: Buffer, offset: int) -> int:
        """Decode the batches that are in the log now. Return the offset after them."""
        for position, header in batches(data):
            if header.base_offset < offset:
                continue
            if header.next_offset > self.end_offset:
                break
            changes: list[Message] = []
            if header.is_control:
                for record in decode_control(data, position, header):
                    if isinstance(record, VotersRecord):
                        self.voters.append((header.base_offset, voters_in(record)))
                        self.addresses.update(addresses_in(record))
            else:
                changes = decode_changes(data, position, header)
            self.unapplied.append(Batch(header.next_offset, header.leader_epoch, changes, header.size))
            offset = header.next_offset
        return offset


# Control records


def control_batch(records: list[Message], wall_ms: int, epoch: int, base_offset: int = 0) -> bytearray:
    """One batch with these control records, which readers see together or not at all."""
    fields: list[RecordFields] = []
    for record in records:
        key = schema.encode(ControlRecordKey(version=_CONTROL_VERSION, type=record.KEY), _CONTROL_VERSION)
        fields.append((wall_ms, key, schema.encode(record, _CONTROL_VERSION), []))
    return encode_batch(fields, leader_epoch=epoch, base_offset=base_offset, control=True)


def control_message(record: ControlRecord, addresses: dict[int, tuple[str, int]]) -> Message:
    match record:
        case LeaderChange():
            return LeaderChangeMessage(
                version=_CONTROL_VERSION,
                leader_id=record.leader_id,
                voters=[LeaderChangeMessageVoter(voter_id=voter.id) for voter in record.voters],
                granting_voters=[
                    LeaderChangeMessageVoter(voter_id=voter.id) for voter in record.granting_voters
                ],
            )
        case KRaftVersion():
            return KRaftVersionRecord(version=0, kraft_version=record.version)
        case VotersChange():
            return voters_record(record.voters, addresses)


def _history(snapshot_id: SnapshotId, voters: Voters, removed: Voters) -> list[tuple[int, Voters]]:
    """The voter set of a snapshot, preceded by the set before it."""
    history = [(snapshot_id.end_offset - 1, voters)]
    return [(snapshot_id.end_offset - 2, voters_of((*voters, *removed))), *history] if removed else history


def voters_record(
    voters: Voters, addresses: dict[int, tuple[str, int]], removed: Voters = ()
) -> VotersRecord:
    return VotersRecord(
        version=0,
        removed=[RemovedVoter(voter_id=voter.id, voter_directory_id=voter.directory) for voter in removed],
        voters=[
            VotersRecordVoter(
                voter_id=voter.id,
                voter_directory_id=voter.directory,
                endpoints=[
                    Endpoint(name=NODES.name, host=host, port=port) for host, port in [addresses[voter.id]]
                ]
                if voter.id in addresses
                else [],
                kraft_version_feature=KRaftVersionFeature(max_supported_version=KRAFT_VERSION_MAX),
            )
            for voter in voters
        ],
    )


def voters_in(record: VotersRecord) -> Voters:
    return voters_of(Voter(voter.voter_id, voter.voter_directory_id) for voter in record.voters)


def removed_in(record: VotersRecord) -> Voters:
    return voters_of(Voter(voter.voter_id, voter.voter_directory_id) for voter in record.removed)


def addresses_in(record: VotersRecord) -> dict[int, tuple[str, int]]:
    return {
        voter.voter_id: (voter.endpoints[0].host, voter.endpoints[0].port)
        for voter in record.voters
        if voter.endpoints
    }


def decode_control(data: Buffer, position: int, header: BatchHeader) -> Iterator[Message]:
    """Yield the records of known types. Raises CorruptBatch and DecodeError."""
    for record in decode_records(data, position, bytes_max=header.size):
        key = schema.decode(ControlRecordKey, 0, record.key or b"")
        kind = CONTROL_TYPE.get(key.type)
        if kind is not None and record.value is not None:
            # Every value begins with the version it is written in.
            version = int.from_bytes(record.value[:2], "big")
            yield schema.decode(kind, version, record.value)


def decode_changes(data: Buffer, position: int, header: BatchHeader) -> list[Message]:
    # Not compressed, so the records are never larger than the batch, however large we wrote it.
    records = decode_records(data, position, bytes_max=header.size)
    return [metadata_changes.decode(record.value or b"") for record in records]


# The stored vote and epoch


def encode_state(state: StoredState) -> bytes:
    """Kafka's ``quorum-state``."""
    voted_for = state.voted_for
    fields = {
        "leaderId": -1 if state.leader_id is None else state.leader_id,
        "leaderEpoch": state.epoch,
        "votedId": -1 if voted_for is None else voted_for.id,
        "votedDirectoryId": format_id(bytes(16) if voted_for is None else voted_for.directory),
        "data_version": _STATE_VERSION,
    }
    return json.dumps(fields).encode()


def read_state(files: Files, path: str) -> StoredState | None:
    """None when there is none yet. Raises ServeError if it is unreadable: a forgotten vote could be cast twice."""
    if not files.exists(path):
        return None
    try:
        fields = json.loads(files.read(path))
        if fields["data_version"] != _STATE_VERSION:
            raise ValueError(f"version {fields['data_version']}")
        voted_id = int(fields["votedId"])
        return StoredState(
            int(fields["leaderEpoch"]),
            None if voted_id < 0 else Voter(voted_id, parse_id(fields["votedDirectoryId"])),
            None if fields["leaderId"] < 0 else int(fields["leaderId"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServeError(f"the quorum's state in {path} cannot be read: {error}") from error


def refuse_damage(files: Files, directory: str) -> None:
    """Refuse a log that recovery would truncate at a bad batch: the topics after it would be gone.

    If the machine stayed up, a killed process can leave nothing worse than a last batch that is cut short.
    Raises ServeError.
    """
    names = [name for name in files.list(directory) if offset_of(name, LOG) is not None]
    for name in names:
        path = f"{directory}/{name}"
        file = files.open(path)
        size = file.size
        end = 0
        for position, header in good_batches(file, size, offset_of(name, LOG) or 0, 0):
            end = position + header.size
        rest = file.read_at(end, size - end)
        file.close()
        if rest and not (name == names[-1] and _is_cut_short(rest)):
            raise ServeError(f"the metadata log is damaged: {path} at byte {end}; restore it from a copy")


def write_again(files: Files, directory: str) -> None:
    """Write the newest segment once more, to another file.

    If an fsync of the previous process has failed, the kernel counts those bytes as written, and no later fsync
    covers them: a voter would confirm what a power loss then destroys. Raises OSError.
    """
    names = [name for name in files.list(directory) if offset_of(name, LOG) is not None]
    if names:
        path = f"{directory}/{names[-1]}"
        files.replace(path, files.read(path))


def _is_cut_short(rest: bytes) -> bool:
    """Whether the last bytes of a file are only the beginning of a batch.

    A damaged length may look the same, but then whole batches follow it.
    """
    try:
        if len(rest) >= HEADER_SIZE and decode_header(rest).size <= len(rest):
            return False
    except CorruptBatch:
        return False
    return not any(_is_whole(rest, position) for position in range(1, len(rest) - HEADER_SIZE + 1))


def _is_whole(buffer: bytes, position: int) -> bool:
    try:
        header = decode_header(buffer, position)
    except CorruptBatch:
        return False
    return position + header.size <= len(buffer) and crc_matches(buffer, position, header)
