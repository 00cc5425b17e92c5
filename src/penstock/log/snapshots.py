"""The producer-state snapshots beside the segments.

One is written at every roll, named after the new segment, and one when the log is closed, named after the end
of the log. They are not synced: the CRC shows whether one survived, and without it the state is rebuilt from the
batches. Only where these are about to be removed, it is synced first.

``producers_at`` builds the state from the newest snapshot and the batches after it. A snapshot from before the
first segment is not used: the batches between them are gone, and with them the ends of transactions that it has
open.

Those batches may be damaged before any consumer reads them. Then the log is reported as damaged, and the replica
is fetched again if there are others. If there are none, it continues with the batches that can be read.
"""

from __future__ import annotations

from penstock.environment import Files
from penstock.log.aborted_index import AbortedTransaction
from penstock.log.names import SNAPSHOT, path_of
from penstock.log.producers import CorruptSnapshot, ProducerStates
from penstock.log.segment import Segment
from penstock.log.segments import CorruptLog, Segments, damaged
from penstock.protocol.records import CONTROL, BatchHeader, CorruptBatch

# One for the active segment, one for the segment before it, one from ``close``.
_KEPT = 3
# How far before a snapshot to read, because snapshots of older versions hold only one batch per producer.
_REMEMBERED_BYTES = 1 << 20


class Snapshots:
    __slots__ = ("_directory", "_files", "offsets")

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        # Ascending.
        self.offsets: list[int] = []

    @property
    def newest(self) -> int:
        return self.offsets[-1] if self.offsets else -1

    def write(self, offset: int, producers: ProducerStates, *, durable: bool = False) -> None:
        """Write the producer state below ``offset``."""
        self._files.replace(path_of(self._directory, offset, SNAPSHOT), producers.encode(), durable=durable)
        if offset not in self.offsets:
            self.offsets.append(offset)
            self.offsets.sort()

    def load_into(self, producers: ProducerStates, offsets: range, wall_ms: int) -> int | None:
        """Load the newest intact snapshot at one of the offsets. Returns its offset."""
        for offset in reversed(self.offsets):
            if offset not in offsets:
                continue
            try:
                producers.load(self._files.read(path_of(self._directory, offset, SNAPSHOT)), wall_ms, offset)
            except (CorruptSnapshot, FileNotFoundError):
                continue
            return offset
        return None

    def drop_above(self, offset: int) -> bool:
        """Remove the snapshots above ``offset``: their batches are gone. Returns whether there were any."""
        count = len(self.offsets)
        while self.newest > offset:
            self._remove(self.offsets.pop())
        return len(self.offsets) < count

    def drop_old(self) -> None:
        while len(self.offsets) > _KEPT:
            self._remove(self.offsets.pop(0))

    def _remove(self, offset: int) -> None:
        self._files.remove(path_of(self._directory, offset, SNAPSHOT))


def producers_at(
    segments: Segments, snapshots: Snapshots, offset: int, wall_ms: int, *, snapshot_max: int | None = None
) -> tuple[ProducerStates, CorruptLog | None]:
    """The producer state below ``offset``, as far as the batches can be read; and the damage, if any.

    With ``snapshot_max``, batches from there on are replayed even if there is a later snapshot.
    """
    damage: CorruptLog | None = None
    producers = ProducerStates(segments.config.producer_expiration_ms)
    start = segments.items[0].base_offset if segments.items else offset
    newest = offset if snapshot_max is None else snapshot_max
    loaded_at = snapshots.load_into(producers, range(start, newest + 1), wall_ms)
    if loaded_at is not None:
        start = loaded_at
        if len(producers):
            try:
                producers.remember(segments.headers_before(start, _REMEMBERED_BYTES))
            except CorruptLog as error:
                damage = error
    for segment in segments.between(start, offset):
        try:
            for position, header in segments.batches_in(segment, start, offset):
                if header.producer_id < 0:
                    continue
                try:
                    replay(producers, segment, position, header, wall_ms)
                except CorruptBatch as error:
                    damage = damage or damaged(segment, str(error))
        except CorruptLog as error:
            damage = damage or error
    return producers, damage


def replay(
    producers: ProducerStates, segment: Segment, position: int, header: BatchHeader, wall_ms: int
) -> AbortedTransaction | None:
    """Apply a batch with a producer id that is in the log. Returns the transaction that it aborts, if any.

    Raises:
        CorruptBatch: it begins or ends a transaction, and is damaged.
    """
    if not header.attributes & CONTROL:
        if header.is_transactional and header.producer_id not in producers.transactions:
            # A transaction of a producer id that nobody has would never end.
            segment.checked_batch(position, header)
        producers.update(header, header.base_offset, wall_ms)
        return None
    marker = segment.marker_at(position, header)
    if marker is None:
        return None
    return producers.end_transaction(header, marker, header.base_offset, wall_ms)
