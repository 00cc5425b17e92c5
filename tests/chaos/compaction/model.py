"""What a compacted partition may hold, by a dict: the record at each offset, and the last record of each key.

One idempotent producer writes a partition and nobody else does, so its n-th record is at offset n, whether or not
the acknowledgement said so. What is promised of every reading that begins at the start of the log:

    altered    a record that is there is at its offset, with its key, value, headers and timestamp
    disordered offsets ascend
    lost       the last record of a key is there, unless it is a tombstone that may be gone
    revived    where a tombstone is gone, no older record of its key is there

and of a replica that has been cleaned: below its first dirty offset each key is there at most once.

What a newcomer gets wrong: a reading takes time, and the cleaner works meanwhile. A record may be gone before the
reader comes to it because a later one of its key is in the log; so a reading is held to what was acknowledged when
it began, and a later record of the key will do (``Reading``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.ledger import Place

VIOLATIONS_SHOWN = 20


class Entry(NamedTuple):
    """A record without its offset. Without a value it is a tombstone."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


Records = Mapping[int, Entry]


class PartitionModel:
    """What was written to one partition, and what was read of it on the way."""

    def __init__(self, place: Place, *, tombstones_may_go: bool) -> None:
        self.place = place
        self._tombstones_may_go = tombstones_may_go
        self._lock = threading.Lock()
        # By offset, in ascending order.
        self._written: dict[int, Entry] = {}
        self._acknowledged_end = 0
        # The last record of each key, of those that are acknowledged.
        self._lasts: dict[bytes, int] = {}
        self._tombstones: dict[bytes, list[int]] = {}
        # What readers saw, and what they missed; both judged at the end, when it is known what was written.
        self._seen: dict[int, Entry] = {}
        self._missed: list[tuple[str, bytes, int]] = []
        self._violations: list[str] = []

    # What happens during a run

    def writing(self, entry: Entry) -> int:
        """The next record is about to be sent; its offset."""
        with self._lock:
            offset = len(self._written)
            self._write(offset, entry)
            return offset

    def wrote(self, offset: int, entry: Entry) -> None:
        """The next record is at this offset, where transactions leave gaps; ``end_offset`` means nothing then."""
        with self._lock:
            self._write(offset, entry)

    def acknowledged(self, offset: int, told: int | None) -> None:
        """``told`` is the offset in the answer, if there was one."""
        with self._lock:
            if told not in (None, offset):
                self._violate("altered", offset, f"was written at {told}")
            key = self._written[offset].key
            self._acknowledged_end = max(self._acknowledged_end, offset + 1)
            self._lasts[key] = max(offset, self._lasts.get(key, -1))

    def saw(self, offset: int, entry: Entry) -> None:
        with self._lock:
            before = self._seen.setdefault(offset, entry)
            if before != entry:
                self._violate("altered", offset, f"read as {before}, then as {entry}")

    def begin_reading(self, who: str) -> Reading:
        with self._lock:
            return Reading(who, dict(self._lasts), self._acknowledged_end)

    def end_reading(self, reading: Reading) -> None:
        with self._lock:
            for key, offset in reading.promised.items():
                if reading.found.get(key, -1) < offset:
                    self._missed.append((reading.who, key, offset))

    # What came of it

    @property
    def end_offset(self) -> int:
        with self._lock:
            return len(self._written)

    @property
    def acknowledged_end(self) -> int:
        with self._lock:
            return self._acknowledged_end

    @property
    def seen_count(self) -> int:
        with self._lock:
            return len(self._seen)

    def check(self, who: str, records: Records) -> None:
        """A whole log, read after everything was acknowledged."""
        with self._lock:
            self._check_unaltered(who, records)
            found: dict[bytes, int] = {}
            for offset, entry in records.items():
                found[entry.key] = max(offset, found.get(entry.key, -1))
            for key, last in self._last_written().items():
                is_tombstone = self._written[last].value is None
                here = found.get(key)
                if here == last or (here is None and is_tombstone and self._tombstones_may_go):
                    continue
                what = "revived" if is_tombstone and self._tombstones_may_go else "lost"
                self._violate(what, last, f"{who}: the last record of {key!r}; there is {here}")

    def check_cleaned(self, who: str, records: Records, first_dirty_offset: int) -> None:
        """Below the first dirty offset only the last record of each key is left."""
        with self._lock:
            lasts: dict[bytes, int] = {}
            for offset, entry in self._written.items():
                if offset < first_dirty_offset:
                    lasts[entry.key] = offset
            kept = [offset for offset in records if offset < first_dirty_offset]
            for offset in kept:
                if lasts.get(records[offset].key) != offset:
                    self._violate("not cleaned", offset, f"{who}: not the last of {records[offset].key!r}")

    def check_seen(self) -> None:
        """What was read on the way, now that it is known what was written."""
        with self._lock:
            self._check_unaltered("a reader on the way", self._seen)
            for who, key, offset in self._missed:
                deleted = [each for each in self._tombstones.get(key, ()) if each >= offset]
                if not (deleted and self._tombstones_may_go):
                    self._violate("lost", offset, f"{who} found neither {key!r} nor a later record of it")
            self._missed.clear()

    def raise_violations(self) -> None:
        with self._lock:
            violations = list(self._violations)
        if violations:
            shown = "\n  ".join(violations[:VIOLATIONS_SHOWN])
            raise AssertionError(f"{len(violations)} broken promises:\n  {shown}")

    def _write(self, offset: int, entry: Entry) -> None:
        self._written[offset] = entry
        if entry.value is None:
            self._tombstones.setdefault(entry.key, []).append(offset)

    def _check_unaltered(self, who: str, records: Records) -> None:
        for offset, entry in records.items():
            if offset not in self._written:
                self._violate("altered", offset, f"{who}: nobody wrote {entry}")
            elif entry != self._written[offset]:
                self._violate("altered", offset, f"{who}: was {self._written[offset]}, is {entry}")

    def _last_written(self) -> dict[bytes, int]:
        return {entry.key: offset for offset, entry in self._written.items()}

    def _violate(self, what: str, offset: int, text: str) -> None:
        self._violations.append(f"{what}: {self.place.topic}-{self.place.partition} at {offset}: {text}")


@dataclass
class Reading:
    """A reading from the start of the log to its end, while it is written and cleaned."""

    who: str
    # The last record of each key that was acknowledged when the reading began.
    promised: dict[bytes, int]
    # Behind the last of all of them.
    end_offset: int
    # The last record of each key that was read.
    found: dict[bytes, int] = field(default_factory=dict)
    _last: int = -1

    def saw(self, model: PartitionModel, offset: int, entry: Entry) -> None:
        assert offset > self._last, (
            f"disordered: {self.who} read {model.place} at {offset} after {self._last}"
        )
        self._last = offset
        self.found[entry.key] = offset
        model.saw(offset, entry)


def differing(copies: Iterable[Records]) -> list[int]:
    """Offsets at which two copies have different records. That one of them has none is allowed."""
    first: dict[int, Entry] = {}
    offsets = []
    for copy in copies:
        for offset, entry in copy.items():
            if first.setdefault(offset, entry) != entry:
                offsets.append(offset)
    return offsets
