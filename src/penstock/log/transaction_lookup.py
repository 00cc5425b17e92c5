"""Finds the aborted transactions that a read-committed reader must skip, over all segments of a log.

A transaction is listed in the segment of its marker, which may be later than the segment that is read. The search
ends at an entry whose last stable offset is at or after the range's end: transactions whose markers come later
began after it.
"""

from __future__ import annotations

from penstock.log.aborted_index import AbortedTransaction
from penstock.log.producers import ProducerStates
from penstock.log.segment import Segment
from penstock.log.segments import Segments, damaged
from penstock.log.snapshots import Snapshots, producers_at, replay
from penstock.protocol.records import CorruptBatch


def aborted_between(
    segments: Segments, snapshots: Snapshots, offset: int, end_offset: int, log_end_offset: int, wall_ms: int
) -> list[AbortedTransaction]:
    """The aborted transactions that overlap the offsets from one up to another, by first offset.

    They must be sorted: clients activate them in this order as they read.
    """
    items = segments.items
    found: list[AbortedTransaction] = []
    place = max(0, segments.place_of(offset))
    while place < len(items):
        segment = items[place]
        place += 1
        if segment.aborted is None:
            continue
        segment_end = items[place].base_offset if place < len(items) else log_end_offset
        if not segment.aborted.is_sane(segment.base_offset, segment_end):
            _rebuild(segments, snapshots, segment, segment_end, wall_ms)
            if segment.aborted is None:
                continue
        entries, is_complete = segment.aborted.overlapping(offset, end_offset)
        found += entries
        if not segment.is_loaded:
            segment.aborted.unload()
        if is_complete:
            break
    found.sort(key=_first_offset)
    return found


def _rebuild(
    segments: Segments, snapshots: Snapshots, segment: Segment, end_offset: int, wall_ms: int
) -> None:
    """Rebuild a segment's index from its batches, and from those before it, where its transactions may begin."""
    # Damage before it is reported by reads of that part. Here the other batches must do.
    producers, _ = producers_at(segments, snapshots, segment.base_offset, wall_ms)
    aborted: list[AbortedTransaction] = []
    try:
        for position, header in segments.batches_in(segment, segment.base_offset, end_offset):
            if header.producer_id >= 0:
                entry = replay(producers, segment, position, header, wall_ms)
                if entry is not None:
                    aborted.append(entry)
    except CorruptBatch as error:
        raise damaged(segment, str(error)) from error
    segment.replace_aborted(aborted, durable=True)


def check_transactions(segments: Segments, producers: ProducerStates, log_end_offset: int) -> None:
    """Assert that open and aborted transactions are those of the batches. Reads the whole log.

    The beginning of a transaction may lie in a deleted segment. Then the batches do not show it.
    """
    start_offset = segments.items[0].base_offset if segments.items else log_end_offset
    replayed = ProducerStates(segments.config.producer_expiration_ms)
    expected: set[AbortedTransaction] = set()
    listed: set[AbortedTransaction] = set()
    for segment in segments.between(start_offset, log_end_offset):
        for position, header in segments.batches_in(segment, start_offset, log_end_offset):
            if header.producer_id >= 0:
                entry = replay(replayed, segment, position, header, 0)
                if entry is not None:
                    expected.add(entry)
        if segment.aborted is not None and segment.aborted.is_sane(segment.base_offset, log_end_offset):
            listed.update(segment.aborted)
        elif segment.aborted is not None:
            return  # it will be rebuilt when it is needed
    # Compaction removes aborted batches, but entries only from the segments that it rewrites. So an entry may begin
    # before the batches that are left, or have none.
    by_marker = {entry.last_offset: entry for entry in listed}
    for entry in expected:
        found_entry = by_marker.get(entry.last_offset)
        assert found_entry is not None, (entry, listed)
        assert found_entry.producer_id == entry.producer_id, (entry, found_entry)
        assert found_entry.first_offset <= entry.first_offset, (entry, found_entry)
    without_batches = set(by_marker) - {entry.last_offset for entry in expected}
    if without_batches:
        cleaned = _producers_between(
            segments, start_offset, log_end_offset, [by_marker[at] for at in without_batches]
        )
        assert not cleaned, (cleaned, listed, expected)
    found = producers.open_transactions()
    for producer_id, first_offset in replayed.open_transactions().items():
        assert found[producer_id] <= first_offset, (producer_id, found, first_offset)
        assert found[producer_id] == first_offset or found[producer_id] < start_offset, (found, first_offset)
    for producer_id, first_offset in found.items():
        assert first_offset < start_offset or producer_id in replayed.transactions, (
            producer_id,
            first_offset,
        )


def _producers_between(
    segments: Segments, start_offset: int, log_end_offset: int, entries: list[AbortedTransaction]
) -> list[tuple[AbortedTransaction, int]]:
    """The batches of data that lie in these transactions: (transaction, base offset)."""
    found = []
    for segment in segments.between(start_offset, log_end_offset):
        for header in segments.headers_in(segment, start_offset, log_end_offset):
            if header.is_transactional and not header.is_control:
                found += [
                    (entry, header.base_offset)
                    for entry in entries
                    if entry.producer_id == header.producer_id
                    and entry.first_offset <= header.base_offset < entry.last_offset
                ]
    return found


def _first_offset(entry: AbortedTransaction) -> int:
    return entry.first_offset
