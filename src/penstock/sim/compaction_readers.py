"""Readers of compacted topics: of committed records or of all, once or again and again from the beginning.

A reader keeps the last record of each key, as a table does. Whenever a reader of committed records has come to the
end, its table must be the last values before that offset (``compaction_checkers.py``).

The broker keeps every offset covered: where records are gone, a batch still has their offsets. So a reader never
has to jump, and offsets only rise.
"""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import PartitionData
from penstock.protocol.records import BatchHeader, Marker, decode_records
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.compaction_checkers import CompactionCheckers, Found
from penstock.sim.isolated_readers import IsolatedReader
from penstock.sim.readers import (
    RECORDS_BYTES_MAX,
    Position,
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


class CompactedReader(IsolatedReader):
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
            is_committed=is_committed,
        )
        self._compaction = compaction
        self._is_repeating = is_repeating
        self._tombstones_stay_ms = tombstones_stay_ms
        self._is_excused = is_excused
        self._passes: dict[Place, _Pass] = {}
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

    async def _out_of_range(self, place: Place, position: Position) -> None:
        await super()._out_of_range(place, position)
        reading = self._passes.setdefault(place, _Pass(self._now_ms))
        reading.start = max(reading.start, position.offset)

    def _read(self, place: Place, position: Position, data: PartitionData) -> None:
        reading = self._passes.setdefault(place, _Pass(self._now_ms))
        leadership = self._client.leaders[place]
        reading.sources[self._source(place), leadership.epoch] = None
        super()._read(place, position, data)
        if self._is_committed and position.offset >= data.last_stable_offset:
            if record_bytes(data):
                self._came_to_the_end(place, position, reading)
            elif reading.start == position.offset:
                # Everything before the end was deleted by age: there is nothing to compare.
                self._compared_to[place] = position.offset

    def _saw_marker(self, place: Place, header: BatchHeader, marker: Marker | None, *, is_new: bool) -> None:
        if marker is None and header.count:
            raise Violation(f"{self.name} read an unknown control record of {place}")

    def _saw_batch(
        self, place: Place, position: Position, header: BatchHeader, records: bytes, at: int
    ) -> None:
        reading = self._passes[place]
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
