"""Checkers that look into the replicas of compacted partitions on the nodes.

They read the files directly from the simulated disks, several times a second, and keep a second, deliberately
dumb account of each replica: its committed batches, which transactions are open, and the last record of each key.
Byte by byte the replicas differ, because each one cleans for itself. What has to be equal is the record at each
offset that two of them have, and the last value of each key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.protocol.records import (
    BatchHeader,
    CorruptBatch,
    Record,
    batches,
    crc_matches,
    decode_marker,
    decode_records,
)
from penstock.sim.client import Place
from penstock.sim.cluster import Cluster, Machine
from penstock.sim.compaction_checkers import Found, KeyedWrites
from penstock.sim.disk import Content
from penstock.sim.readers import RECORDS_BYTES_MAX
from penstock.sim.report import Violation
from penstock.sim.topics import COMPACTED, Topics

# Between two looks at a replica whose files are the same.
REST_MS = 1_000


class _Batch(NamedTuple):
    header: BatchHeader
    records: list[Record]
    # Of a marker: whether it commits.
    is_commit: bool | None


@dataclass(slots=True)
class _File:
    """A decoded segment."""

    content: Content
    data: bytes = b""
    batches: list[_Batch] = field(default_factory=list)


@dataclass(slots=True)
class _Replica:
    """What a replica has, up to an offset where nothing is uncertain."""

    start: int
    # Exclusive: the first offset that is not committed, or belongs to an open transaction.
    end: int
    last: dict[bytes, Found]
    names: dict[int, bytes]


class CompactedLogs:
    """Replicas of a compacted partition agree, and only what is below the last stable offset is compacted."""

    def __init__(
        self,
        cluster: Cluster,
        writes: KeyedWrites,
        topics: Topics,
        *,
        # For how long a tombstone stays at least; 0 if the clocks cannot tell.
        tombstones_stay_ms: float,
        # Whether bytes on harmed machines may be wrong. A disk that failed for a while has the right ones.
        is_damaging: bool,
    ) -> None:
        self._cluster = cluster
        self._is_damaging = is_damaging
        self._writes = writes
        self._topics = topics
        self._tombstones_stay_ms = tombstones_stay_ms
        # By machine and path.
        self._files: dict[tuple[str, str], _File] = {}
        # By start of a node and partition: when it was last looked at, and the files then.
        self._looked: dict[tuple[str, int, Place], tuple[float, object]] = {}
        # By partition: the highest last stable offset of a leader.
        self._stable: dict[Place, int] = {}
        # By partition and base offset: the next offset, epoch and checksum of batches that are not stable yet.
        self._unstable: dict[Place, dict[int, tuple[int, int, int]]] = {}
        # By partition: how far it is committed, according to its leader.
        self.ends: dict[Place, int] = {}
        self.compared = 0
        self.swaps = 0
        self.removed_tombstones = 0

    def look(self) -> None:
        replicas = [
            (machine, place, hosted)
            for machine in self._cluster.running
            if machine.node is not None and machine.node.is_ready and not self._is_damaged(machine)
            for place, hosted in self._hosted(machine)
        ]
        epochs: dict[Place, int] = {}
        for _, place, hosted in replicas:
            epochs[place] = max(epochs.get(place, -1), hosted.replication.leader_epoch)
        led: dict[Place, None] = {}
        for _, place, hosted in replicas:
            # Not one that has not heard of its successor, which may be on a machine that is left out here.
            if _is_established(hosted) and hosted.replication.leader_epoch == epochs[place]:
                led[place] = None
                self.ends[place] = hosted.high_watermark
                self._stable[place] = max(self._stable.get(place, 0), hosted.last_stable_offset)
        for machine, place, hosted in replicas:
            self._saw(machine, place, hosted, is_led=place in led)

    def _is_damaged(self, machine: Machine) -> bool:
        return machine.is_harmed and self._is_damaging

    def _hosted(self, machine: Machine) -> Iterator[tuple[Place, HostedPartition]]:
        assert machine.node is not None
        for hosted in machine.node.broker.partitions:
            is_watched = hosted.topic in COMPACTED and hosted.topic_id not in self._topics.deleting
            if is_watched and hosted.is_open and not hosted.is_offline:
                yield Place(hosted.topic_id, hosted.topic, hosted.index), hosted

    def _saw(self, machine: Machine, place: Place, hosted: HostedPartition, *, is_led: bool) -> None:
        key = (machine.host, machine.starts, place)
        files = [machine.disk.find(segment.path) for segment in hosted.log._segments.items]
        now_ms = self._cluster.loop.now_ms
        last_ms, last_files = self._looked.get(key, (-1, None))
        if last_files == files and now_ms < last_ms + REST_MS:
            return
        self._looked[key] = (now_ms, files)
        replica = self._replica(machine, place, hosted, is_led=is_led)
        if replica is None:
            return
        stable = max(replica.end, replica.start)
        # A transaction stays open when its records are deleted by age. Then the log is stable up to its start.
        is_deleted = hosted.last_stable_offset == replica.start > 0
        if _is_established(hosted) and hosted.last_stable_offset != stable and not is_deleted:
            raise Violation(
                f"the last stable offset of {place} on its leader {machine.host} is "
                f"{hosted.last_stable_offset} and should be {stable}; the high watermark is {hosted.high_watermark}"
            )
        if is_led and hosted.log.first_dirty_offset > max(self._stable[place], replica.start):
            raise Violation(
                f"cleaned past the last stable offset: {place} on {machine.host} is said to be compacted up to "
                f"{hosted.log.first_dirty_offset}, and is stable to {self._stable[place]}"
            )
        self._writes.compare(place, replica.start, replica.end, replica.last, machine.host)
        self._tombstones_stayed(machine, place, replica)

    def open_transactions(self) -> list[str]:
        """The partitions with open transactions, according to their leaders."""
        return [
            f"{place} from {hosted.last_stable_offset}"
            for machine in self._cluster.running
            if machine.node is not None
            for place, hosted in self._hosted(machine)
            if hosted.is_serving and hosted.last_stable_offset < hosted.high_watermark
        ]

    def due(self) -> list[str]:
        """The replicas that should be compacted."""
        return [
            f"{place} on {machine.host}"
            for machine in self._cluster.running
            if machine.node is not None and not self._is_damaged(machine)
            for place, hosted in self._hosted(machine)
            if machine.node.is_due_for_cleaning(hosted)
        ]

    # One replica

    def _replica(
        self, machine: Machine, place: Place, hosted: HostedPartition, *, is_led: bool
    ) -> _Replica | None:
        """What the replica has; None if its files are just being changed."""
        log = hosted.log
        start, high_watermark = log.log_start_offset, hosted.high_watermark
        committed: list[_Batch] = []
        at = -1
        for segment in log._segments.items:
            found = self._decoded(machine, place, segment.path, segment.size)
            if found is None:
                return None
            for batch in found:
                header = batch.header
                if at not in (-1, header.base_offset):
                    raise Violation(
                        f"{place} on {machine.host} has offset {header.base_offset} after {at - 1}, in "
                        f"{segment.path}"
                    )
                at = header.next_offset
                if at <= high_watermark:
                    committed.append(batch)
        if committed and committed[0].header.base_offset > start:
            raise Violation(
                f"{place} on {machine.host} begins at {start}, and its first batch at "
                f"{committed[0].header.base_offset}"
            )
        if is_led:
            # A follower may not know yet how far its leader is stable, but has what that one has compacted.
            self._is_untouched(machine, place, committed, self._stable[place])
        end = _stable_end(committed, high_watermark)
        return self._folded(machine, place, committed, start, end)

    def _decoded(self, machine: Machine, place: Place, path: str, size: int) -> list[_Batch] | None:
        content = machine.disk.find(path)
        if not isinstance(content, Content):
            return None
        known = self._files.get((machine.host, path))
        if known is not None and known.content is not content:
            self.swaps += 1
            known = None
        now = bytes(content.data if size < 0 else content.data[:size])
        if known is None or not now.startswith(known.data):
            known = self._files[machine.host, path] = _File(content)
        data = now[len(known.data) :]
        try:
            for at, header in batches(data):
                if header.size > len(data) - at:
                    break
                if not crc_matches(data, at, header):
                    raise CorruptBatch("wrong checksum")
                records = decode_records(data, at, bytes_max=RECORDS_BYTES_MAX)
                marker = decode_marker(data, at) if header.is_control and header.count else None
                known.batches.append(_Batch(header, records, None if marker is None else marker.is_commit))
                known.data = now[: len(known.data) + header.size]
        except CorruptBatch as error:
            raise Violation(f"{place} on {machine.host} is damaged in {path}: {error}") from error
        return known.batches

    def _is_untouched(self, machine: Machine, place: Place, committed: list[_Batch], stable: int) -> None:
        """Nothing at or above the last stable offset is compacted."""
        unstable = self._unstable.setdefault(place, {})
        for header, records, _ in committed:
            if header.next_offset <= stable:
                continue
            now = (header.next_offset, header.leader_epoch, header.crc)
            before = unstable.setdefault(header.base_offset, now)
            if len(records) <= header.last_offset_delta or before != now:
                raise Violation(
                    f"cleaned past the last stable offset: {place} on {machine.host} is stable to {stable}, and "
                    f"its batch {header.base_offset} to {header.last_offset} has {len(records)} records and (next "
                    f"offset, epoch, checksum) {now}, which were {before}"
                )

    def _folded(
        self, machine: Machine, place: Place, committed: list[_Batch], start: int, end: int
    ) -> _Replica:
        replica = _Replica(start, end, {}, {})
        # By producer: the records of its transaction.
        pending: dict[int, list[tuple[int, Record]]] = {}
        for header, records, is_commit in committed:
            if header.is_control:
                for epoch, record in pending.pop(header.producer_id, ()):
                    self._found(machine, place, replica, epoch, record, is_committed=bool(is_commit))
            elif header.is_transactional:
                pending.setdefault(header.producer_id, []).extend(
                    (header.leader_epoch, record) for record in records
                )
            else:
                for record in records:
                    self._found(machine, place, replica, header.leader_epoch, record, is_committed=True)
        return replica

    def _found(
        self,
        machine: Machine,
        place: Place,
        replica: _Replica,
        epoch: int,
        record: Record,
        *,
        is_committed: bool,
    ) -> None:
        if not replica.start <= record.offset < replica.end:
            return
        write = self._writes.found(place, epoch, record, machine.host)
        if not is_committed:
            return
        self._writes.found_committed(write, machine.host)
        replica.names[record.offset] = write.name
        found = replica.last.get(write.key)
        if found is None or found.offset < record.offset:
            replica.last[write.key] = Found(record.offset, record.value is None)

    def _tombstones_stayed(self, machine: Machine, place: Place, replica: _Replica) -> None:
        """A tombstone that is the last record of its key is there until ``delete.retention.ms`` is over."""
        now_ms = self._cluster.loop.now_ms
        for tombstone in self._writes.dead_keys(place, replica.end):
            if tombstone.offset < replica.start or tombstone.offset in replica.names:
                continue
            found = replica.last.get(tombstone.key)
            if found is not None and found.offset > tombstone.offset:
                continue
            self.removed_tombstones += 1
            if now_ms < tombstone.sent_ms + self._tombstones_stay_ms:
                raise Violation(
                    f"tombstone dropped too early: the {tombstone} of {place} is gone from {machine.host} after "
                    f"{now_ms - tombstone.sent_ms:.0f} ms; delete.retention.ms is {self._tombstones_stay_ms:.0f}"
                )

    # At the end

    def final(self) -> None:
        """16, for compacted topics: two replicas have the same records, and the same last value of each key."""
        replicas: dict[Place, list[tuple[str, _Replica]]] = {}
        for machine in self._cluster.running:
            if machine.node is None or self._is_damaged(machine):
                continue
            for place, hosted in self._hosted(machine):
                hosted.log.check()
                replica = self._replica(machine, place, hosted, is_led=False)
                if replica is not None:
                    replicas.setdefault(place, []).append((machine.host, replica))
        for place, found in replicas.items():
            for (one, replica), (other, another) in pairwise(found):
                self._are_equal(place, one, replica, other, another)

    def _are_equal(self, place: Place, one: str, replica: _Replica, other: str, another: _Replica) -> None:
        self.compared += 1
        for offset in replica.names.keys() & another.names.keys():
            if replica.names[offset] != another.names[offset]:
                raise Violation(
                    f"{place} at {offset} is {replica.names[offset]!r} on {one} and {another.names[offset]!r} on "
                    f"{other}"
                )
        if replica.end != another.end:
            return  # one of them does not know yet how much is committed
        start = max(replica.start, another.start)
        for key in sorted(replica.last.keys() | another.last.keys()):
            values = [_value_offset(each.last.get(key), start) for each in (replica, another)]
            if values[0] != values[1]:
                raise Violation(
                    f"the last value of {key!r} in {place} is at {values[0]} on {one} and at {values[1]} on "
                    f"{other}; -1 is none"
                )


def _is_established(hosted: HostedPartition) -> bool:
    return hosted.is_serving and hosted.replication.has_established


def _stable_end(committed: list[_Batch], high_watermark: int) -> int:
    """The first offset of an open transaction, or the high watermark."""
    opened: dict[int, int] = {}
    for header, _, _ in committed:
        if header.is_control:
            opened.pop(header.producer_id, None)
        elif header.is_transactional and header.count:
            opened.setdefault(header.producer_id, header.base_offset)
    return min([high_watermark, *opened.values()])


def _value_offset(found: Found | None, start: int) -> int:
    """Where the last value of a key is; -1 if it has none, or it is deleted."""
    if found is None or found.is_tombstone or found.offset < start:
        return -1
    return found.offset
