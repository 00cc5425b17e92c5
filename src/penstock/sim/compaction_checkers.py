"""Checkers of what clients see of compacted topics, and the model they compare it with.

``KeyedWrites`` knows every record that a client tried to write to a compacted topic, by its name: a header that is
unique, because a tombstone has no value. Which record is the last of its key at an offset follows from the writes
whose outcome is certain; a write without an answer may count or not.

Compaction removes records and changes none. So a record that is found anywhere, by a reader or on a disk, is one
that was written, at its offset, with its content. A reader that has read a partition from its start to an offset
has the last value of each key before that offset. Only a reader that takes longer than ``delete.retention.ms`` may
miss a tombstone and keep an older value.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.protocol.records import Record
from penstock.sim.client import Place
from penstock.sim.report import Violation
from penstock.sim.transaction_checkers import (
    Outcome,
    Transaction,
    TransactionCheckers,
    TransactionsAreAtomic,
)

# The header with the name of a record.
NAME = "name"


@dataclass(slots=True, eq=False)
class Write:
    name: bytes
    place: Place
    key: bytes
    # None: a tombstone.
    value: bytes | None
    timestamp: int
    # When it was first sent.
    sent_ms: float
    transaction: Transaction | None
    # As acknowledged or found; -1 until then.
    offset: int = -1
    # Whether it counts: it is acknowledged or committed, and not in a transaction.
    is_certain: bool = False

    def __str__(self) -> str:
        what = "tombstone" if self.value is None else "value"
        return f"{what} {self.name!r} of {self.key!r} at {self.offset}"

    @property
    def may_count(self) -> bool:
        """Whether it is or may become visible to readers of committed records."""
        transaction = self.transaction
        return transaction is None or transaction.is_excused or transaction.outcome is not Outcome.ABORTED


class Found(NamedTuple):
    """The last record of a key that was found."""

    offset: int
    is_tombstone: bool


class KeyedWrites:
    """Every record found is one that was written; the last one of each key is the last one written."""

    def __init__(self) -> None:
        self._writes: dict[bytes, Write] = {}
        # By partition and key: all writes, and the certain ones by offset.
        self._of_key: dict[Place, dict[bytes, list[Write]]] = {}
        self._certain: dict[Place, dict[bytes, list[tuple[int, bytes]]]] = {}
        # By partition and offset: (name, leader epoch, who found it first).
        self._at: dict[Place, dict[int, tuple[bytes, int, str]]] = {}
        self.acknowledged = 0
        self.tombstones = 0
        self.found_count = 0
        self.compared = 0
        self.excused = 0

    # What clients do

    def writing(
        self,
        place: Place,
        name: bytes,
        key: bytes,
        value: bytes | None,
        timestamp: int,
        sent_ms: float,
        transaction: Transaction | None = None,
    ) -> None:
        assert name not in self._writes
        write = self._writes[name] = Write(name, place, key, value, timestamp, sent_ms, transaction)
        self._of_key.setdefault(place, {}).setdefault(key, []).append(write)

    def write(self, name: bytes) -> Write:
        return self._writes[name]

    def acked(self, name: bytes, offset: int) -> None:
        write = self._writes[name]
        if write.offset not in (-1, offset):
            raise Violation(f"duplicate: {write} of {write.place} is acknowledged at {offset}")
        there = self._at.get(write.place, {}).get(offset)
        if there is not None and there[0] != name:
            raise Violation(
                f"lost write: {name!r} is acknowledged at {offset} of {write.place}, where {there[2]} found "
                f"{there[0]!r} (epoch {there[1]})"
            )
        self.acknowledged += 1
        self.tombstones += write.value is None
        write.offset = offset
        if write.transaction is None:
            self._is_certain(write)

    def committed(self, transaction: Transaction) -> None:
        """The client knows for certain that the transaction is committed."""
        for name in transaction.sent if not transaction.is_excused else ():
            write = self._writes[name]
            if write.offset >= 0:
                self._is_certain(write)

    def _is_certain(self, write: Write) -> None:
        if not write.is_certain:
            write.is_certain = True
            of_key = self._certain.setdefault(write.place, {}).setdefault(write.key, [])
            insort(of_key, (write.offset, write.name))

    # What is found

    def found(self, place: Place, epoch: int, record: Record, by: str) -> Write:
        """A committed record was found, by a reader or on a disk; its transaction may be open or aborted."""
        self.found_count += 1
        name = dict(record.headers).get(NAME)
        write = self._writes.get(name) if name is not None else None
        if write is None:
            raise Violation(f"{by} found {record} in {place}, which nobody wrote")
        if (place, record.key, record.value, record.timestamp) != (
            write.place,
            write.key,
            write.value,
            write.timestamp,
        ):
            raise Violation(f"changed record: {by} found {record} in {place}, written was {write}")
        if write.offset not in (-1, record.offset):
            raise Violation(f"moved record: {by} found {write} of {place} at {record.offset}")
        known = self._at.setdefault(place, {}).setdefault(record.offset, (write.name, epoch, by))
        if known[:2] != (write.name, epoch):
            raise Violation(
                f"inconsistent offsets: {place} at {record.offset} is {known[0]!r} (epoch {known[1]}) for "
                f"{known[2]} and {write.name!r} (epoch {epoch}) for {by}"
            )
        write.offset = record.offset
        if write.transaction is None:
            self._is_certain(write)
        return write

    def found_committed(self, write: Write, by: str) -> None:
        """The record is visible to readers of committed records."""
        transaction = write.transaction
        if transaction is None or transaction.is_excused:
            return
        if transaction.outcome is Outcome.ABORTED:
            raise Violation(f"G1a: {by} found {write} of {write.place}, and {transaction} is aborted")
        if transaction.outcome is Outcome.OPEN:
            raise Violation(
                f"precommitted read: {by} found {write} of {write.place}, and nobody asked to commit {transaction}"
            )
        transaction.seen.setdefault(write.name, by)

    def compare(
        self,
        place: Place,
        start: int,
        end: int,
        last: Mapping[bytes, Found],
        by: str,
        *,
        misses_tombstones: bool = False,
    ) -> None:
        """Check the last record of every key before ``end``, of those that are not deleted before ``start``.

        A record may be missing when there is a later one of its key at ``end`` or after it: the replica copies the
        log of one that has compacted further. Kafka's are no different.

        ``misses_tombstones``: it was read so slowly that tombstones may be gone, and what they delete was read.
        """
        for key, writes in self._of_key.get(place, {}).items():
            self.compared += 1
            found = last.get(key)
            expected = self.last_certain(place, key, end)
            if expected is None or expected.offset < start:
                continue
            is_missing = found is None or found.offset < expected.offset
            if is_missing and self._is_superseded(place, key, end):
                self.excused += 1
                continue
            if found is None:
                if expected.value is not None and not _may_be_deleted(writes, expected, end):
                    raise Violation(
                        f"lost value: {by} has nothing of {key!r} in {place} up to {end}; the last one is "
                        f"the {expected}"
                    )
            elif found.offset < expected.offset:
                if expected.value is not None:
                    if misses_tombstones and _may_be_deleted(writes, expected, end):
                        continue
                    raise Violation(
                        f"lost value: the last record of {key!r} that {by} has in {place} up to {end} is at "
                        f"{found.offset}; the last one is the {expected}"
                    )
                if not found.is_tombstone and not misses_tombstones:
                    raise Violation(
                        f"revived key: the last record of {key!r} that {by} has in {place} up to {end} is a "
                        f"value at {found.offset}; the last one is the {expected}"
                    )

    def _is_superseded(self, place: Place, key: bytes, end: int) -> bool:
        """Whether there is, or may be, a later write of a key at an offset or after it."""
        certain = self._certain.get(place, {}).get(key)
        if certain is not None and certain[-1][0] >= end:
            return True
        return any(
            not write.is_certain and write.may_count and (write.offset < 0 or write.offset >= end)
            for write in self._of_key.get(place, {}).get(key, ())
        )

    def last_certain(self, place: Place, key: bytes, end: int) -> Write | None:
        """The last write of a key before an offset that is certain."""
        certain = self._certain.get(place, {}).get(key, [])
        number = bisect_left(certain, (end, b""))
        return self._writes[certain[number - 1][1]] if number else None

    def dead_keys(self, place: Place, end: int) -> list[Write]:
        """The last writes of the keys whose last certain write is a tombstone, before this offset."""
        keys = [key for key in self._of_key.get(place, {}) if not self._is_superseded(place, key, end)]
        last = (self.last_certain(place, key, end) for key in keys)
        return [write for write in last if write is not None and write.value is None]


def _may_be_deleted(writes: list[Write], expected: Write, end: int) -> bool:
    """Whether a tombstone whose outcome is not certain may follow the last certain write."""
    return any(
        write.value is None
        and not write.is_certain
        and write.may_count
        and (write.offset < 0 or expected.offset < write.offset < end)
        for write in writes
    )


class TransactionsOfKeys(TransactionsAreAtomic):
    """The transactions that write to compacted topics. A reader need not see their records: later ones count."""

    def __init__(self, writes: KeyedWrites) -> None:
        super().__init__()
        self._keyed = writes

    def acked(self, transaction: Transaction, value: bytes, offset: int) -> None:
        super().acked(transaction, value, offset)
        self._keyed.acked(value, offset)

    def committed(self, transaction: Transaction) -> None:
        super().committed(transaction)
        self._keyed.committed(transaction)


class CompactionCheckers:
    """All checkers of what clients see of compacted topics."""

    def __init__(self) -> None:
        self.writes = KeyedWrites()
        self.transactions = TransactionCheckers()
        self.transactions.atomic = TransactionsOfKeys(self.writes)
