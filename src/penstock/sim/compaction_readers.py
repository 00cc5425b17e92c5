"""Readers of compacted topics: of committed records or of all, once or again and again from the beginning.

A reader keeps the last record of each key, as a table does. Whenever a reader of committed records has come to the
end, its table must be the last values before that offset (``compaction_checkers.py``).

The broker keeps every offset covered: where records are gone, a batch still has their offsets. So a reader never
has to jump, and offsets only rise.
"""

from __future__ import annotations

from crc32c import crc32c

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import PartitionData
from penstock.protocol.records import CRC_START, BatchHeader, batches, decode_marker, decode_records
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.compaction_checkers import CompactionCheckers, Found
from penstock.sim.readers import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    RECORDS_BYTES_MAX,
    Position,
    Reader,
    record_bytes,
)
from penstock.sim.report import Violation
from penstock.sim.topics import Topics

# A leader never answers with these, whatever its cleaner does.
WRONG = (ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.CORRUPT_MESSAGE)
# Between two readings of a partition.
REST_MS_MAX = 4_000


class _Pass:
    """One reading of a partition from its beginning."""

    def __init__(self, began_ms: float) -> None:
        self.began_ms = began_ms
        # Records before it were deleted and not read.
        self.start = 0
        # By key.
        self.last: dict[bytes, Found] = {}
        # The brokers and leader epochs that it was read from. Replicas clean at different times.
        self.sources: dict[tuple[int | None, int], None] = {}


class CompactedReader(Reader):
    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        compaction: CompactionCheckers,
        topics: Topics,
        name: str,
        *,
        rack: str | None = None,
        by_id: bool = False,
        is_committed: bool,
        # Whether it begins again when it has come to the end.
        is_repeating: bool = False,
        # For how long a tombstone can be read at least; 0 if the clocks cannot tell.
        tombstones_stay_ms: float,
        # Whether a disk was damaged: then an error may be right.
        is_excused: bool = False,
    ) -> None:
        super().__init__(
            client,
            checkers,
            topics,
            name,
            rack=rack,
            by_id=by_id,
            isolation_level=READ_COMMITTED if is_committed else READ_UNCOMMITTED,
        )
        self._compaction = compaction
        self._is_committed = is_committed
        self._is_repeating = is_repeating
        self._tombstones_stay_ms = tombstones_stay_ms
        self._is_excused = is_excused
        self._passes: dict[Place, _Pass] = {}
        # The last stable offset from the leader of an epoch.
        self._stable: dict[tuple[Place, int], int] = {}
        # By partition: the end of the last reading that was compared.
        self._compared_to: dict[Place, int] = {}
        # By partition: when to begin again.
        self._rests_until_ms: dict[Place, float] = {}
        self.passes = 0

    @property
    def _now_ms(self) -> float:
        return self._client.process.loop.now_ms

    def _names(self) -> list[str]:
        return self._topics.alive_compacted()

    def read_to(self, place: Place) -> int:
        """How far it has read, and compared if it can."""
        return self._compared_to.get(place, 0) if self._is_committed else self.offset(place)

    def _led_by(self, broker: int) -> list[Place]:
        places = super()._led_by(broker)
        return [place for place in places if self._rests_until_ms.get(place, 0) <= self._now_ms]

    def _refused(self, place: Place, error: ErrorCode) -> None:
        if error in WRONG and not self._is_excused:
            raise Violation(f"{self.name} read {place} at {self.offset(place)} and was answered {error.name}")

    def _watermark_moved(self, place: Place, epoch: int, data: PartitionData) -> None:
        super()._watermark_moved(place, epoch, data)
        stable = data.last_stable_offset
        known = self._stable.get((place, epoch), 0)
        if not known <= stable <= data.high_watermark:
            raise Violation(
                f"{self.name}: the last stable offset of {place} in epoch {epoch} went from {known} to {stable}; "
                f"the high watermark is {data.high_watermark}"
            )
        self._stable[place, epoch] = stable

    async def _out_of_range(self, place: Place, position: Position) -> None:
        await super()._out_of_range(place, position)
        reading = self._passes.setdefault(place, _Pass(self._now_ms))
        reading.start = max(reading.start, position.offset)

    def _read(self, place: Place, position: Position, data: PartitionData) -> None:
        reading = self._passes.setdefault(place, _Pass(self._now_ms))
        leadership = self._client.leaders[place]
        reading.sources[self._source(place), leadership.epoch] = None
        records = record_bytes(data)
        limit = data.last_stable_offset if self._is_committed else data.high_watermark
        aborted = [(each.first_offset, each.producer_id) for each in data.aborted_transactions or []]
        # The producers whose records are aborted, until their marker.
        active: dict[int, None] = {}
        for at, header in batches(records):
            if header.size > len(records) - at:
                break  # cut off by the limit
            if crc32c(memoryview(records)[at + CRC_START : at + header.size]) != header.crc:
                raise Violation(f"{self.name} was served a damaged batch of {place} at {header.base_offset}")
            if header.last_offset >= limit:
                raise Violation(
                    f"{self.name} was served {place} to {header.last_offset}, beyond the "
                    f"{'last stable offset' if self._is_committed else 'high watermark'} {limit}"
                )
            if header.base_offset > position.offset:
                raise Violation(
                    f"poll skip: {self.name} expected {position.offset} of {place} and got {header.base_offset}"
                )
            # A response of a nearer replica may come when its leader has already sent more.
            is_new = header.next_offset > position.offset
            if is_new and header.leader_epoch < position.epoch:
                raise Violation(
                    f"{self.name}: {place} at {header.base_offset} has epoch {header.leader_epoch} after "
                    f"{position.epoch}"
                )
            while aborted and aborted[0][0] <= header.last_offset:
                active[aborted.pop(0)[1]] = None
            if header.is_control:
                # Without records it is what compaction has left of a marker.
                marker = decode_marker(records, at) if header.count else None
                if marker is not None and not marker.is_commit:
                    active.pop(header.producer_id, None)
            elif not (header.is_transactional and header.producer_id in active):
                self._saw_batch(place, position, header, reading, records, at)
            if is_new:
                position.offset, position.epoch = header.next_offset, header.leader_epoch
        if self._is_committed and position.offset >= data.last_stable_offset:
            if records:
                self._came_to_the_end(place, position, reading)
            elif reading.start == position.offset:
                # Everything before the end was deleted by age: there is nothing to compare.
                self._compared_to[place] = position.offset

    def _saw_batch(
        self, place: Place, position: Position, header: BatchHeader, reading: _Pass, records: bytes, at: int
    ) -> None:
        writes, expected = self._compaction.writes, header.base_offset
        for record in decode_records(records, at, bytes_max=RECORDS_BYTES_MAX):
            if not expected <= record.offset < header.next_offset:
                raise Violation(
                    f"{self.name} read {record.offset} of {place}, in a batch from {header.base_offset} to "
                    f"{header.last_offset}, where {expected} or a later one was expected"
                )
            expected = record.offset + 1
            if record.offset < position.offset:
                continue  # the batch begins before the requested offset
            self._checkers.polls.polled += 1
            write = writes.found(place, header.leader_epoch, record, self.name)
            if self._is_committed:
                writes.found_committed(write, self.name)
                reading.last[write.key] = Found(record.offset, record.value is None)

    def _came_to_the_end(self, place: Place, position: Position, reading: _Pass) -> None:
        took_ms = self._now_ms - reading.began_ms
        self._compaction.writes.compare(
            place,
            reading.start,
            position.offset,
            reading.last,
            self.name,
            misses_tombstones=took_ms >= self._tombstones_stay_ms or len(reading.sources) > 1,
        )
        self.passes += 1
        self._compared_to[place] = position.offset
        if self._is_repeating:
            del self._passes[place]
            position.offset, position.epoch = 0, -1
            self._rests_until_ms[place] = self._now_ms + self._chance.uniform(0, REST_MS_MAX)
