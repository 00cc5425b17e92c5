"""Recovers a log after a crash.

Everything below the recovery point was made durable and is not checked. From the segment that holds it, every
batch is read and its CRC verified. The log ends before the first batch that is torn, damaged, out of order or of
an older leader epoch than the batch before it. The file is cut there and later segments are renamed
(``.corrupt``). The bytes after the cut are copied to such a file too, unless they are just the beginning of the
last batch, above the recovery point, as any crash may leave it. No other data is destroyed: an operator may want
to inspect it.

A torn tail is cut at once. Anything else is damage, and cutting it destroys the evidence: if the process died
before it had reported the damage, the next one would find a valid log that is merely shorter. So damage is cut
only with a ``before_cut``, which is called first; without one, CorruptLog is raised.

The CRC does not cover a batch's offset and epoch. Only the neighbouring batches show whether these are right,
which is why offsets must follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from crc32c import crc32c

from penstock.environment import File
from penstock.log.aborted_index import AbortedTransaction
from penstock.log.epochs import NO_EPOCH, LeaderEpochs
from penstock.log.names import CORRUPT
from penstock.log.producers import ProducerStates
from penstock.log.segment import Segment
from penstock.log.segments import CorruptLog, Segments
from penstock.log.snapshots import Snapshots, producers_at, replay
from penstock.log.verification import good_batches
from penstock.protocol.records import (
    CRC_START,
    HEADER_SIZE,
    MAGIC,
    BatchHeader,
    CorruptBatch,
    decode_header,
)

__all__ = ["Recovery", "epochs_of", "good_batches", "recover"]

_CHUNK_BYTES = 1 << 20
# How far after a bad batch to search for a good one, and how many offsets later that one may be.
_SEARCHED_BYTES = 4 << 20
_OFFSETS_AHEAD = 1 << 31
_BATCH_START = bytes(4)
_MAGIC_POSITION = 16


@dataclass(slots=True)
class Recovery:
    """The result of recovery, for the storage and the broker's log."""

    log_end_offset: int
    scanned_bytes: int = 0
    # After the last good batch of its segment.
    cut_bytes: int = 0
    # Paths of files that are no longer part of the log.
    set_aside: list[str] = field(default_factory=list)
    # The log ends below the recovery point: this is damage, not a torn tail. The missing records may have been
    # committed, so the replica must not lead before it has caught up.
    was_cut: bool = False
    # A batch below the scanned range is damaged. Epochs and producer state come from the other batches only. The
    # log is not cut: the records after the damage may be the only copy.
    damaged_at: int | None = None
    # There was more than a torn tail after the last good batch. This is damage, or writes that were lost with the
    # page cache; the bytes do not show which.
    had_more: bool = False


def recover(
    segments: Segments,
    epochs: LeaderEpochs,
    snapshots: Snapshots,
    recovery_point: int,
    wall_ms: int,
    before_cut: Callable[[int], None] | None,
) -> tuple[Recovery, ProducerStates]:
    """Make the files of a log agree with its good batches. Also returns the producer state.

    Raises:
        CorruptLog: there is damage, and it may not be cut off.
    """
    items = segments.items
    # Scan the segment that ends at the recovery point too: a truncation to there may have been undone.
    start = max(0, segments.place_of(recovery_point - 1))
    scanned_from = items[start].base_offset
    # A snapshot above may include batches that the crash undid.
    snapshots.drop_above(scanned_from)
    epoch_entries, damage = _epochs_before(segments, epochs, start)
    producers, more_damage = producers_at(segments, snapshots, scanned_from, wall_ms)
    recovery = Recovery(scanned_from)
    for found in (damage, more_damage):
        if found is not None and before_cut is None:
            raise found
        if found is not None and (recovery.damaged_at is None or found.offset < recovery.damaged_at):
            recovery.damaged_at = found.offset
    last_epoch = NO_EPOCH
    aborted: list[AbortedTransaction] = []

    def give_up_from(segment: Segment, offset: int) -> None:
        if before_cut is None:
            raise CorruptLog("it is damaged", segment.path, offset)
        before_cut(offset)

    def good(segment: Segment) -> Iterator[tuple[int, BatchHeader]]:
        """Yield the good batches of a segment, then cut it after them."""
        nonlocal last_epoch
        size = segment.measure()
        end, next_offset = 0, segment.base_offset
        for position, header in good_batches(segment.file, size, segment.base_offset, last_epoch):
            end, next_offset = position + header.size, header.next_offset
            last_epoch = header.leader_epoch
            _add_epoch(epoch_entries, header)
            if header.producer_id >= 0:
                entry = replay(producers, segment, position, header, wall_ms)
                if entry is not None:
                    aborted.append(entry)
            yield position, header
        recovery.scanned_bytes += size
        if end < size:
            recovery.cut_bytes = size - end
            is_usual = segment is items[-1] and next_offset >= recovery_point
            is_torn = segment is items[-1] and _is_torn(segment.file, end, next_offset)
            recovery.had_more = recovery.had_more or not is_torn
            if not (is_usual and is_torn):
                give_up_from(segment, next_offset)
                recovery.set_aside.append(segment.copy_aside(end, CORRUPT))
            segment.file.truncate(end)
            segment.size = end
        segment.trusted_from = 0

    kept = start
    for segment in items[start:]:
        if kept > start:
            if recovery.cut_bytes or segment.base_offset != recovery.log_end_offset:
                break  # a batch before it is missing
            with suppress(OSError):  # a broker must be able to start on a full disk
                snapshots.write(segment.base_offset, producers)
        kept += 1
        aborted.clear()
        recovery.log_end_offset = segment.rebuild(good(segment), segments.config, wall_ms, durable=False)
        segment.replace_aborted(aborted, durable=False)

    if recovery.log_end_offset < recovery_point or (items[kept:] and not recovery.had_more):
        give_up_from(items[kept - 1], recovery.log_end_offset)
    for segment in items[kept:]:
        recovery.had_more = True
        recovery.set_aside += segment.set_aside(CORRUPT)
        segment.close()
    del items[kept:]
    segments.unload_completed()
    recovery.was_cut = recovery.log_end_offset < recovery_point
    epochs.replace(epoch_entries + _begun_at_the_end(epochs, epoch_entries, recovery.log_end_offset))
    snapshots.drop_above(recovery.log_end_offset)
    snapshots.drop_old()
    return recovery, producers


def _is_torn(file: File, position: int, next_offset: int) -> bool:
    """Whether the rest of a file is the beginning of one batch, or was never written."""
    try:
        looks_torn = decode_header(file.read_at(position, HEADER_SIZE)).size > file.size - position
    except CorruptBatch:
        rest = range(position, file.size, _CHUNK_BYTES)
        looks_torn = file.size - position < HEADER_SIZE or not any(
            any(file.read_at(at, _CHUNK_BYTES)) for at in rest
        )
    # A damaged length field looks the same, except that good batches follow.
    return looks_torn and not _has_good_batch(file, position + 1, next_offset)


def _has_good_batch(file: File, position: int, next_offset: int) -> bool:
    """Whether a whole batch of this log, with a later offset, lies after ``position``."""
    data = file.read_at(position, _SEARCHED_BYTES)
    # In practice offsets stay below 2**32, so a batch begins with four zero bytes.
    at = data.find(_BATCH_START)
    while at >= 0 and at + HEADER_SIZE <= len(data):
        if data[at + _MAGIC_POSITION] == MAGIC:
            try:
                header = decode_header(data[at : at + HEADER_SIZE])
                if next_offset < header.base_offset < next_offset + _OFFSETS_AHEAD:
                    batch = data[at : at + header.size]
                    if len(batch) == header.size and crc32c(batch[CRC_START:]) == header.crc:
                        return True
            except CorruptBatch:
                pass
        at = data.find(_BATCH_START, at + 1)
    return False


def _epochs_before(
    segments: Segments, epochs: LeaderEpochs, start: int
) -> tuple[list[tuple[int, int]], CorruptLog | None]:
    """The epochs that began before segment ``start``, from the checkpoint or the batches themselves."""
    stored = epochs.stored()
    if stored is not None or start == 0:
        return [entry for entry in stored or () if entry[1] < segments.items[start].base_offset], None
    entries: list[tuple[int, int]] = []
    damage: CorruptLog | None = None
    end_offset = segments.items[start].base_offset
    for segment in segments.items[:start]:
        try:
            for header in segments.headers_in(segment, segment.base_offset, end_offset):
                _add_epoch(entries, header)
        except CorruptLog as error:
            damage = damage or error
    return entries, damage


def _begun_at_the_end(
    epochs: LeaderEpochs, found: list[tuple[int, int]], log_end_offset: int
) -> list[tuple[int, int]]:
    """The checkpoint's entry that begins at the log end, if any: no batch can confirm or contradict it."""
    stored = epochs.stored()
    if stored and stored[-1][1] == log_end_offset and (not found or stored[-1][0] > found[-1][0]):
        return stored[-1:]
    return []


def epochs_of(segments: Segments, items: Iterable[Segment]) -> list[tuple[int, int]]:
    """Read the epochs from the batches of some segments: (epoch, the offset where it began)."""
    entries: list[tuple[int, int]] = []
    for segment in items:
        for header in segments.look(segment, _headers):
            _add_epoch(entries, header)
    return entries


def _add_epoch(entries: list[tuple[int, int]], header: BatchHeader) -> None:
    if not entries or header.leader_epoch > entries[-1][0]:
        entries.append((header.leader_epoch, header.base_offset))


def _headers(segment: Segment) -> list[BatchHeader]:
    return [header for _, header in segment.headers()]
