"""What was acknowledged, what was seen, and whether a broker kept all of it.

The ledger stands outside every broker and outlives them all. Writers enter what was acknowledged, readers
what they saw, and at the end a fresh client reads everything and ``Ledger.check`` compares. The checkers it
guards are those of a log without transactions and compaction:

    lost          an acknowledged record is at the offset that was acknowledged
    changed       one value per (partition, offset), for ever, whoever reads it and when
    doubled       the value of an idempotent producer sits at one offset
    disordered    the records of one producer are in the order in which it sent them, without a hole
    skipped       offsets follow each other without a gap

A record is known by one number, its identity: which writer sent it, and as which of its records to that
partition. Offsets are dense, so a partition's history is an array of identities: millions of records fit.
"""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import Message

NOTHING = -1
VIOLATIONS_SHOWN = 20
_SEQUENCE_BITS = 40
_PADDING = b"penstock feeds the turbine; " * 40


class Place(NamedTuple):
    topic: str
    partition: int


def identity_of(writer: int, sequence: int) -> int:
    return writer << _SEQUENCE_BITS | sequence


def writer_of(identity: int) -> int:
    return identity >> _SEQUENCE_BITS


def sequence_of(identity: int) -> int:
    return identity & (1 << _SEQUENCE_BITS) - 1


def encode_value(identity: int, size: int) -> bytes:
    """A value of about ``size`` bytes that says who it is."""
    head = b"%d|" % identity
    return head + _PADDING[: max(0, size - len(head))]


def decode_value(value: bytes) -> int:
    head, _, padding = value.partition(b"|")
    assert _PADDING.startswith(padding), f"not a value of ours: {value[:60]!r}"
    return int(head)


def place_of(message: Message) -> Place:
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return Place(topic, partition)


def seen_in(message: Message) -> tuple[Place, int, int]:
    """Place, offset and identity of a record that a consumer was given. The message must not be an error."""
    offset, value = message.offset(), message.value()
    assert offset is not None and value is not None
    return place_of(message), offset, decode_value(value)


def offset_in(message: Message) -> int:
    """Where a record was written, as the producer was told. The message must not be an error."""
    offset = message.offset()
    assert offset is not None, "acknowledged without an offset"
    return offset


class History:
    """The identity at each offset of one partition, as far as it is known."""

    def __init__(self) -> None:
        self._identities = array("q")
        self.count = 0

    def __getitem__(self, offset: int) -> int:
        return self._identities[offset] if 0 <= offset < len(self._identities) else NOTHING

    def __len__(self) -> int:
        return len(self._identities)

    def enter(self, offset: int, identity: int) -> int:
        """Write down what is at an offset; what was known to be there before."""
        identities = self._identities
        if offset >= len(identities):
            identities.extend([NOTHING] * (offset + 1 - len(identities)))
        before = identities[offset]
        if before == NOTHING:
            self.count += 1
            identities[offset] = identity
        return before

    def items(self) -> Iterable[tuple[int, int]]:
        return ((offset, identity) for offset, identity in enumerate(self._identities) if identity != NOTHING)


@dataclass(slots=True)
class Reading:
    """One partition as the last client found it."""

    # Where the log begins for clients.
    start_offset: int
    records: list[tuple[int, int]] = field(default_factory=list)


class Ledger:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acknowledged: defaultdict[Place, History] = defaultdict(History)
        self._seen: defaultdict[Place, History] = defaultdict(History)
        # Identities whose fate the producer did not learn; they may be there or not.
        self._unknown: defaultdict[Place, set[int]] = defaultdict(set)
        # The largest offset that somebody asked to delete before.
        self._pruned: defaultdict[Place, int] = defaultdict(int)
        self._violations: list[str] = []
        # How often the broker came back: clients look after each time whether all is as it was.
        self.restarts = 0

    # What happens during a run

    def acknowledged(self, place: Place, offset: int, identity: int) -> None:
        with self._lock:
            before = self._acknowledged[place].enter(offset, identity)
            if before not in (NOTHING, identity):
                self._violate(
                    "changed", place, offset, f"acknowledged to {_who(before)}, then {_who(identity)}"
                )

    def unknown(self, place: Place, identity: int) -> None:
        with self._lock:
            self._unknown[place].add(identity)

    def seen(self, place: Place, offset: int, identity: int) -> None:
        with self._lock:
            before = self._seen[place].enter(offset, identity)
            if before not in (NOTHING, identity):
                self._violate("changed", place, offset, f"read as {_who(before)}, then as {_who(identity)}")

    def asked_to_prune(self, place: Place, offset: int) -> None:
        with self._lock:
            self._pruned[place] = max(self._pruned[place], offset)

    def restarted(self) -> None:
        with self._lock:
            self.restarts += 1

    def violated(self, what: str) -> None:
        """Somebody else found a broken promise."""
        with self._lock:
            self._violations.append(what)

    # What came of it

    @property
    def acknowledged_count(self) -> int:
        with self._lock:
            return sum(history.count for history in self._acknowledged.values())

    @property
    def seen_count(self) -> int:
        with self._lock:
            return sum(history.count for history in self._seen.values())

    @property
    def unknown_count(self) -> int:
        with self._lock:
            return sum(map(len, self._unknown.values()))

    @property
    def violations(self) -> list[str]:
        with self._lock:
            return list(self._violations)

    def last_acknowledged(self, place: Place) -> int:
        """The largest acknowledged offset, or -1."""
        with self._lock:
            return len(self._acknowledged[place]) - 1

    def check(self, readings: dict[Place, Reading]) -> None:
        """Compare with what was read in the end. Raises AssertionError with everything that is wrong."""
        with self._lock:
            for place in sorted({*self._acknowledged, *self._seen} - set(readings)):
                self._violations.append(f"lost: {place.topic}-{place.partition} could not be read at all")
            for place, reading in readings.items():
                self._check(place, reading)
        self.raise_violations()

    def raise_violations(self) -> None:
        violations = self.violations
        if violations:
            shown = "\n  ".join(violations[:VIOLATIONS_SHOWN])
            raise AssertionError(f"{len(violations)} broken promises:\n  {shown}")

    def lost(self, readings: dict[Place, Reading], ends: dict[Place, int] | None = None) -> int:
        """How many acknowledged records are not where they were; up to and with ``ends`` only, if given."""
        with self._lock:
            count = 0
            for place, history in self._acknowledged.items():
                read = dict(readings[place].records) if place in readings else {}
                end = len(history) if ends is None else ends.get(place, NOTHING)
                count += sum(
                    read.get(offset) != identity for offset, identity in history.items() if offset <= end
                )
            return count

    def _check(self, place: Place, reading: Reading) -> None:
        start = reading.start_offset
        if start > self._pruned[place]:
            self._violate("lost", place, start, "nobody asked for the log to begin here")
        expected = start
        read = dict(reading.records)
        for offset, _ in reading.records:
            if offset != expected:
                self._violate("skipped", place, offset, f"follows {expected - 1}")
            expected = offset + 1
        for what, histories in (("lost", self._acknowledged), ("changed", self._seen)):
            for offset, identity in histories[place].items():
                found = read.get(offset, NOTHING)
                if offset >= start and found != identity:
                    self._violate(what, place, offset, f"was {_who(identity)}, is {_who(found)}")
        self._check_order(place, reading)

    def _check_order(self, place: Place, reading: Reading) -> None:
        unknown = self._unknown[place]
        offsets: dict[int, int] = {}
        last: dict[int, int] = {}
        for offset, identity in reading.records:
            if identity in offsets:
                self._violate("doubled", place, offset, f"{_who(identity)} is at {offsets[identity]} too")
                continue
            offsets[identity] = offset
            writer, sequence = writer_of(identity), sequence_of(identity)
            if writer in last:
                missing = range(last[writer] + 1, sequence)
                if sequence < last[writer]:
                    self._violate("disordered", place, offset, f"{_who(identity)} after #{last[writer]}")
                elif any(identity_of(writer, one) not in unknown for one in missing):
                    self._violate("disordered", place, offset, f"{_who(identity)} follows #{last[writer]}")
            elif reading.start_offset == 0 and sequence and len(unknown) < sequence:
                self._violate("disordered", place, offset, f"{_who(identity)} is the first of its writer")
            last[writer] = max(sequence, last.get(writer, 0))

    def _violate(self, what: str, place: Place, offset: int, text: str) -> None:
        self._violations.append(f"{what}: {place.topic}-{place.partition} at {offset}: {text}")


def _who(identity: int) -> str:
    if identity == NOTHING:
        return "nothing"
    return f"writer {writer_of(identity)} #{sequence_of(identity)}"
