"""The producer-state snapshots beside the segments: which there are, and which are still worth keeping.

One is written at every roll, named after the new segment, and one when the log is closed, named after the end
of the log. None is made durable: its CRC tells whether it survived, and without it the batches tell the same.
``producers_at`` puts the state together from the newest snapshot and the batches behind it.

What a newcomer gets wrong: those batches may be damaged, long before anybody reads them. Then the log is reported
as damaged, and a replica that has others is fetched again. One that has none goes on with what can be read.
"""

from __future__ import annotations

from penstock.environment import Files
from penstock.log.names import SNAPSHOT, path_of
from penstock.log.producers import CorruptSnapshot, ProducerStates
from penstock.log.segments import CorruptLog, Segments

# For the active segment, the one before it, and the close.
_KEPT = 3
# How far back a loaded state looks for the batches that a snapshot, with one per producer, has no room for.
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

    def write(self, offset: int, producers: ProducerStates) -> None:
        """Store what the producers had written below ``offset``."""
        self._files.replace(path_of(self._directory, offset, SNAPSHOT), producers.encode(), durable=False)
        if offset not in self.offsets:
            self.offsets.append(offset)
            self.offsets.sort()

    def load_into(self, producers: ProducerStates, offset_max: int, wall_ms: int) -> int | None:
        """Load the newest one that is whole and not above ``offset_max``; its offset."""
        for offset in reversed(self.offsets):
            if offset > offset_max:
                continue
            try:
                producers.load(self._files.read(path_of(self._directory, offset, SNAPSHOT)), wall_ms)
            except (CorruptSnapshot, FileNotFoundError):
                continue
            return offset
        return None

    def drop_above(self, offset: int) -> bool:
        """Remove those of a history that is no more; whether there were any."""
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
    segments: Segments, snapshots: Snapshots, offset: int, wall_ms: int
) -> tuple[ProducerStates, CorruptLog | None]:
    """What the producers had written below ``offset``, as far as that can be read; and the damage, if any."""
    damage: CorruptLog | None = None
    producers = ProducerStates(segments.config.producer_expiration_ms)
    start = segments.items[0].base_offset if segments.items else offset
    loaded_at = snapshots.load_into(producers, offset, wall_ms)
    if loaded_at is not None:
        start = max(start, loaded_at)
        if len(producers):
            try:
                producers.remember(segments.headers_before(start, _REMEMBERED_BYTES))
            except CorruptLog as error:
                damage = error
    for segment in segments.between(start, offset):
        try:
            for header in segments.headers_in(segment, start, offset):
                if header.producer_id >= 0:
                    producers.update(header, header.base_offset, wall_ms)
        except CorruptLog as error:
            damage = damage or error
    return producers, damage
