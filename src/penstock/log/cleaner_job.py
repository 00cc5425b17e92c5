"""The work of compacting one log, for a process of its own: reads segments, and writes cleaned ones beside them.

A pass has two halves. ``_note_dirty`` reads the keys of the dirty part into a table of fixed size, as far as they
fit; a pass over a larger part ends where the table is full, and the next pass goes on there. ``_clean`` copies the
segments, from the start of the log to that point, into ``.cleaned`` files:

    a record with a later one of the same key            goes
    a record without a key, or of an aborted transaction goes
    a tombstone                                          gets a delete horizon (KIP-534), and goes after it
    the marker of a transaction that has records left    stays
    any other marker                                     like a tombstone
    a batch without records, of an active producer       stays, empty: its sequence is still needed
    any other batch without records                      goes

What is left has its old offsets, timestamps and bytes. Where batches went, an empty one covers their offsets, so
the batches of a log still follow each other without a gap: that is how recovery, followers and readers notice a
missing one. It never covers two leader epochs, so the epochs can still be read from the batches.

The job changes nothing else. The log's owner checks the files and puts them in place (``swapping.py``), oldest
first. That order matters: a tombstone must not go before the values that it deletes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.environment import File, Files
from penstock.log.aborted_index import AbortedIndex, AbortedTransaction
from penstock.log.compaction import Source, grouped
from penstock.log.compaction_kernel import SLOT_BYTES, KeyTable, note_keys, select
from penstock.log.config import LogConfig
from penstock.log.index import OffsetIndex, TimeIndex
from penstock.log.names import ABORTED_INDEX, CLEANED, INDEX, LOG, SEGMENT_SUFFIXES, TIME_INDEX, path_of
from penstock.log.verification import good_batches
from penstock.protocol.compression import Codec, TooLarge, compress
from penstock.protocol.records import (
    DELETE_HORIZON,
    NO_TIMESTAMP,
    BatchHeader,
    CorruptBatch,
    decode_marker,
    emptied,
    filler,
    rebuilt,
    unfold,
)

# A batch that is larger than this without compression is not compacted, nor is its log.
UNFOLDED_BYTES_MAX = 256 << 20
_READ_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20


class CannotClean(Exception):
    """The log cannot be compacted as it is; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    epoch: int
    # Last offsets of the batches that are remembered of it. Empty: only a marker began its epoch.
    last_offsets: frozenset[int]


@dataclass(frozen=True, slots=True)
class CleaningJob:
    directory: str
    # All cleanable segments, from the start of the log.
    sources: tuple[Source, ...]
    first_dirty_offset: int
    # Those that overlap the sources.
    aborted: tuple[AbortedTransaction, ...]
    producers: Mapping[int, ActiveProducer]
    # None: the clocks cannot be trusted, so no tombstone gets a horizon or goes.
    wall_ms: int | None
    # Tombstones and markers from this offset on stay: a replica may not have them yet.
    drop_below: int
    config: LogConfig
    table_bytes: int
    load_factor: float
    # ``wall_ms`` is the earliest time that it may be now, so that nothing goes too early. This is the latest one.
    latest_ms: int | None = None

    @property
    def horizon_ms(self) -> int:
        """When what is compacted for the first time may go."""
        assert self.wall_ms is not None
        return max(self.wall_ms, self.latest_ms or 0) + self.config.delete_retention_ms


@dataclass(frozen=True, slots=True)
class CleanedGroup:
    """Segments that were rewritten as one ``.cleaned`` file."""

    sources: tuple[Source, ...]
    size: int
    batches: int
    has_aborted: bool

    @property
    def base_offset(self) -> int:
        return self.sources[0].base_offset

    @property
    def end_offset(self) -> int:
        return self.sources[-1].end_offset


@dataclass(slots=True)
class CleaningResult:
    # Exclusive: below, each key has one value once the groups are in place.
    clean_before: int
    # In order. Groups in which nothing changed are left out.
    groups: list[CleanedGroup] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    records_before: int = 0
    records_after: int = 0


def clean(files: Files, job: CleaningJob) -> CleaningResult:
    """Compact a log into ``.cleaned`` files, which are durable when this returns.

    Raises:
        CannotClean: a batch is damaged, or too large.
        OSError: the disk is full or failing, or the log was deleted.
    """
    # No more slots than there can be keys: each key touches another page of the table.
    dirty_offsets = job.sources[-1].end_offset - job.first_dirty_offset
    slots = round(dirty_offsets / job.load_factor) + 2
    table = KeyTable(min(job.table_bytes, slots * SLOT_BYTES), job.load_factor)
    writers: list[_Writer] = []
    try:
        clean_before = _note_dirty(files, job, table)
        result = CleaningResult(clean_before)
        sources = [source for source in job.sources if source.base_offset < clean_before]
        transactions = _Transactions(job)
        for group in grouped(sources, job.config):
            writers.append(_Writer(files, job, group[0].base_offset))
            _clean_group(files, job, group, table, clean_before, transactions, writers[-1], result)
        if result.groups:
            files.sync_directory(job.directory)
    except Exception as error:
        for writer in writers:
            writer.discard()
        if isinstance(error, CorruptBatch | TooLarge):
            raise CannotClean(str(error)) from error
        raise
    return result


def _note_dirty(files: Files, job: CleaningJob, table: KeyTable) -> int:
    """Fill the table with the keys of the dirty part. Returns the offset after the last batch in it."""
    aborted = _Aborted(job.aborted)
    noted_before = job.first_dirty_offset
    for source in job.sources:
        if source.end_offset <= job.first_dirty_offset:
            continue
        for data, header in _batches(files, job.directory, source):
            if header.next_offset <= job.first_dirty_offset:
                continue
            if header.count and not header.is_control and not aborted.holds(header):
                if not table.has_room(header.count):
                    if table.count == 0:
                        raise CannotClean(
                            f"the batch at offset {header.base_offset} has {header.count} records, but "
                            f"log.cleaner.dedupe.buffer.size has room for {table.capacity} keys"
                        )
                    return noted_before
                note_keys(
                    table, _body(data, header), header.count, header.base_offset, header.last_offset_delta
                )
            noted_before = header.next_offset
    return noted_before


def _clean_group(
    files: Files,
    job: CleaningJob,
    group: list[Source],
    table: KeyTable,
    clean_before: int,
    transactions: _Transactions,
    writer: _Writer,
    result: CleaningResult,
) -> None:
    is_changed = len(group) > 1
    records_after = 0
    for source in group:
        for data, header in _batches(files, job.directory, source):
            result.records_before += header.count
            if header.base_offset >= clean_before:
                kept: bytes | bytearray | None = data
                count = header.count
                transactions.stays(header)
            else:
                kept, count = _cleaned(job, data, header, table, transactions)
            records_after += count
            if kept is None:
                # A filler that is found again in the same place is not a change.
                is_changed = is_changed or not header.is_filler
                writer.skip(header)
                continue
            is_changed = is_changed or kept is not data
            writer.add(kept, header)
            if header.is_control and transactions.ended is not None:
                writer.add_aborted(transactions.ended)
    bytes_before = sum(source.size for source in group)
    result.bytes_before += bytes_before
    result.records_after += records_after
    writer.finish(group[-1].end_offset)
    if not is_changed and writer.size == bytes_before:
        result.bytes_after += bytes_before
        writer.discard()
        return
    result.bytes_after += writer.size
    result.groups.append(CleanedGroup(tuple(group), writer.size, writer.batches, writer.has_aborted))


def _cleaned(
    job: CleaningJob, data: bytes, header: BatchHeader, table: KeyTable, transactions: _Transactions
) -> tuple[bytes | bytearray | None, int]:
    """What is left of a batch, and how many records: the same object if it is unchanged, None if it goes."""
    if header.is_control:
        return _cleaned_marker(job, data, header, transactions)
    kept: bytes | bytearray | None = None
    count = 0
    if header.count and not transactions.aborted.holds(header):
        kept, count = _selected(job, data, header, table)
    if kept is None and header.producer_id >= 0:
        active = job.producers.get(header.producer_id)
        if active is not None and header.last_offset in active.last_offsets:
            kept = data if header.count == 0 else emptied(header)
    if kept is not None:
        transactions.stays(header)
    return kept, count


def _selected(
    job: CleaningJob, data: bytes, header: BatchHeader, table: KeyTable
) -> tuple[bytes | bytearray | None, int]:
    body = _body(data, header)
    horizon_ms = header.delete_horizon_ms
    is_over = horizon_ms is not None and job.wall_ms is not None and horizon_ms <= job.wall_ms
    drop_below = job.drop_below if is_over else 0
    base_timestamp = header.base_timestamp

    def choose(new_base_timestamp: int) -> tuple[bytearray, int, int, int]:
        return select(
            table,
            body,
            header.count,
            header.base_offset,
            header.last_offset_delta,
            base_timestamp,
            new_base_timestamp,
            drop_below,
        )

    kept, count, tombstones, max_timestamp = choose(base_timestamp)
    if count == 0:
        return None, 0
    attributes = header.attributes
    if tombstones and horizon_ms is None and job.wall_ms is not None:
        base_timestamp_now = job.horizon_ms
        attributes |= DELETE_HORIZON
        kept, count, _, max_timestamp = choose(base_timestamp_now)
    elif count == header.count:
        return data, count
    else:
        base_timestamp_now = base_timestamp
    changed = header._replace(
        attributes=attributes,
        base_timestamp=base_timestamp_now,
        max_timestamp=header.max_timestamp if header.is_log_append_time else max_timestamp,
        count=count,
    )
    return rebuilt(changed, compress(Codec(header.codec), kept)), count


def _cleaned_marker(
    job: CleaningJob, data: bytes, header: BatchHeader, transactions: _Transactions
) -> tuple[bytes | bytearray | None, int]:
    """A marker stays with its transaction's records, then until its horizon."""
    has_records = transactions.ends(header)
    marker = decode_marker(data) if header.count else None
    active = job.producers.get(header.producer_id)
    # Nothing else in the log says that this epoch has begun.
    is_needed = active is not None and not active.last_offsets and active.epoch == header.producer_epoch
    if marker is None or has_records or is_needed or job.wall_ms is None:
        return data, header.count
    horizon_ms = header.delete_horizon_ms
    if horizon_ms is None:
        horizon_ms = job.horizon_ms
        body = _body(data, header)
        table = KeyTable(0, 1.0)
        kept, count, _, max_timestamp = select(
            table,
            body,
            header.count,
            header.base_offset,
            header.last_offset_delta,
            header.base_timestamp,
            horizon_ms,
            0,
        )
        changed = header._replace(
            attributes=header.attributes | DELETE_HORIZON,
            base_timestamp=horizon_ms,
            max_timestamp=max_timestamp,
        )
        assert count == header.count, "a marker has a key"
        return rebuilt(changed, compress(Codec(header.codec), kept)), count
    if horizon_ms <= job.wall_ms and header.base_offset < job.drop_below:
        return None, 0
    return data, header.count


class _Aborted:
    """The aborted transactions of a log, by producer."""

    def __init__(self, aborted: tuple[AbortedTransaction, ...]) -> None:
        self._by_producer: dict[int, list[AbortedTransaction]] = {}
        for entry in aborted:
            self._by_producer.setdefault(entry.producer_id, []).append(entry)

    def holds(self, header: BatchHeader) -> bool:
        """Whether a batch belongs to one of them."""
        return header.is_transactional and any(
            entry.first_offset <= header.base_offset < entry.last_offset
            for entry in self._by_producer.get(header.producer_id, ())
        )

    def at(self, header: BatchHeader) -> AbortedTransaction | None:
        """The one that this marker ends."""
        for entry in self._by_producer.get(header.producer_id, ()):
            if entry.last_offset == header.base_offset:
                return entry
        return None


class _Transactions:
    """Which transactions have batches in what was written so far."""

    def __init__(self, job: CleaningJob) -> None:
        self.aborted = _Aborted(job.aborted)
        self._with_batches: set[int] = set()
        # For the index of the segment: the aborted transaction with batches that the latest marker has ended.
        self.ended: AbortedTransaction | None = None

    def stays(self, header: BatchHeader) -> None:
        """A batch stays, perhaps without records."""
        if header.is_control:
            self.ends(header)
        elif header.is_transactional:
            self._with_batches.add(header.producer_id)

    def ends(self, header: BatchHeader) -> bool:
        """A marker. Returns whether its transaction has batches left."""
        has_batches = header.producer_id in self._with_batches
        self._with_batches.discard(header.producer_id)
        self.ended = self.aborted.at(header) if has_batches else None
        return has_batches


class _Writer:
    """A ``.cleaned`` segment and its indexes."""

    def __init__(self, files: Files, job: CleaningJob, base_offset: int) -> None:
        self._files = files
        self._base_offset = base_offset
        self._interval_bytes = job.config.index_interval_bytes
        self._paths = {
            suffix: path_of(job.directory, base_offset, suffix) + CLEANED for suffix in SEGMENT_SUFFIXES
        }
        for path in self._paths.values():
            files.remove(path)
        self._file: File = files.open(self._paths[LOG])
        self._offsets = OffsetIndex(files, self._paths[INDEX])
        self._times = TimeIndex(files, self._paths[TIME_INDEX])
        self._aborted: list[AbortedTransaction] = []
        self._buffer = bytearray()
        self.size = 0
        self.batches = 0
        # Offsets to cover by a filler: where they begin, and their leader epoch.
        self._gap_start = base_offset
        self._gap_epoch = -1
        self._next_offset = base_offset
        # As in ``Segment``.
        self._bytes_since_entry = 0
        self._max_timestamp = NO_TIMESTAMP
        self._offset_of_max = 0
        self._indexed_timestamp = NO_TIMESTAMP

    @property
    def has_aborted(self) -> bool:
        return bool(self._aborted)

    def skip(self, header: BatchHeader) -> None:
        """Leave a batch out; its offsets are covered."""
        if self._gap_start < self._next_offset and header.leader_epoch != self._gap_epoch:
            self._fill()
        self._gap_epoch = header.leader_epoch
        self._next_offset = header.next_offset

    def add(self, batch: bytes | bytearray, header: BatchHeader) -> None:
        """Add a batch; ``header`` says which offsets it covers."""
        self._fill()
        size = len(batch)
        relative = header.last_offset - self._base_offset
        max_timestamp = int.from_bytes(batch[35:43], "big", signed=True)
        if max_timestamp > self._max_timestamp:
            self._max_timestamp, self._offset_of_max = max_timestamp, relative
        self._bytes_since_entry += size
        if self._bytes_since_entry - size > self._interval_bytes:
            self._bytes_since_entry = size
            self._offsets.restore(relative, self.size)
            self._restore_time()
        self._buffer += batch
        self.size += size
        self.batches += 1
        self._gap_start = self._next_offset = header.next_offset
        if len(self._buffer) >= _WRITE_BYTES:
            self._write()

    def _fill(self) -> None:
        if self._gap_start < self._next_offset:
            last_offset = self._next_offset - 1
            batch = filler(self._gap_start, last_offset, self._gap_epoch)
            self._gap_start = self._next_offset
            self.size += len(batch)
            self.batches += 1
            self._bytes_since_entry += len(batch)
            self._buffer += batch

    def add_aborted(self, entry: AbortedTransaction) -> None:
        self._aborted.append(entry)

    def finish(self, end_offset: int) -> None:
        """Cover the rest of the offsets, and make all files durable."""
        assert self._next_offset == end_offset, (self._next_offset, end_offset)
        self._fill()
        self._write()
        self._restore_time()
        self._offsets.rewrite(durable=True)
        self._times.rewrite(durable=True)
        self._offsets.close()
        self._times.close()
        are_durable = self._offsets.is_durable and self._times.is_durable
        if self._aborted:
            index = AbortedIndex(self._files, self._paths[ABORTED_INDEX], is_new=True)
            index.replace(self._aborted, durable=True)
            index.close()
            are_durable = are_durable and index.is_durable
        if not are_durable:
            raise OSError(errno.ENOSPC, "no room for an index", self._paths[LOG])
        self._file.prepare_sync()()
        self._file.close()

    def discard(self) -> None:
        with suppress(OSError):
            self._file.close()
            for path in self._paths.values():
                self._files.remove(path)

    def _write(self) -> None:
        if self._buffer:
            self._file.append((self._buffer,))
            self._buffer = bytearray()

    def _restore_time(self) -> None:
        if self._max_timestamp > self._indexed_timestamp:
            self._indexed_timestamp = self._max_timestamp
            self._times.restore(self._max_timestamp, self._offset_of_max)


def _batches(files: Files, directory: str, source: Source) -> Iterator[tuple[bytes, BatchHeader]]:
    """The batches of a segment with their bytes.

    Raises:
        CorruptBatch: one is damaged, or the segment does not end where the next one begins.
    """
    path = path_of(directory, source.base_offset, LOG)
    # ``open`` would create it.
    if files.size(path) != source.size:
        raise CorruptBatch(f"{path} has another size than before")
    file = files.open(path)
    try:
        next_offset = source.base_offset
        chunk = b""
        chunk_start = 0
        for position, header in good_batches(file, source.size, source.base_offset, -1):
            at = position - chunk_start
            if at + header.size > len(chunk):
                chunk = file.read_at(position, max(_READ_BYTES, header.size))
                chunk_start, at = position, 0
            next_offset = header.next_offset
            yield chunk[at : at + header.size], header
    finally:
        file.close()
    if next_offset != source.end_offset:
        raise CorruptBatch(f"{path} is damaged at offset {next_offset}")


def _body(data: bytes, header: BatchHeader) -> bytes:
    """The records of a batch, decompressed."""
    return unfold(data, 0, UNFOLDED_BYTES_MAX)[1]
