"""The checkers of compacted topics notice what they are there to notice: each truth is told a lie."""

from __future__ import annotations

import pytest

from penstock.protocol.records import Record
from penstock.sim.client import Place
from penstock.sim.compaction_checkers import NAME, CompactionCheckers, Found, KeyedWrites
from penstock.sim.report import Violation
from penstock.sim.transaction_checkers import Transaction

HERE = Place(b"1" * 16, "table", 0)
THERE = Place(b"1" * 16, "table", 1)
KEY = b"key"


@pytest.fixture
def checkers() -> CompactionCheckers:
    return CompactionCheckers()


@pytest.fixture
def writes(checkers: CompactionCheckers) -> KeyedWrites:
    return checkers.writes


def write(writes: KeyedWrites, offset: int | None, *, is_tombstone: bool = False) -> bytes:
    """Write the key once more; without an offset, the answer is lost."""
    name = b"w%d" % len(writes._writes)
    writes.writing(HERE, name, KEY, None if is_tombstone else name, 7, 0.0)
    if offset is not None:
        writes.acked(name, offset)
    return name


def record(offset: int, name: bytes, value: bytes | None, *, key: bytes = KEY, timestamp: int = 7) -> Record:
    return Record(offset, timestamp, key, value, [(NAME, name)])


def transaction(checkers: CompactionCheckers, offset: int, *, is_tombstone: bool = False) -> Transaction:
    """A transaction that writes the key once."""
    atomic = checkers.transactions.atomic
    began = atomic.begin(f"t{offset}", 1, offset, is_v2=True)
    name = b"t%d" % offset
    checkers.writes.writing(HERE, name, KEY, None if is_tombstone else name, 7, 0.0, began)
    atomic.sending(began, HERE, name)
    atomic.acked(began, name, offset)
    return began


def has(offset: int, *, is_tombstone: bool = False) -> dict[bytes, Found]:
    return {KEY: Found(offset, is_tombstone)}


def test_the_last_value_before_the_end_is_the_one_that_counts(writes: KeyedWrites) -> None:
    write(writes, 3)
    write(writes, 8)
    writes.compare(HERE, 0, 9, has(8), "reader")
    writes.compare(HERE, 0, 8, has(3), "reader")
    writes.compare(HERE, 0, 3, {}, "reader")
    with pytest.raises(Violation, match="lost value"):
        writes.compare(HERE, 0, 9, has(3), "reader")
    with pytest.raises(Violation, match="lost value"):
        writes.compare(HERE, 0, 9, {}, "reader")


def test_what_is_deleted_with_the_start_of_the_log_need_not_be_there(writes: KeyedWrites) -> None:
    write(writes, 3)
    writes.compare(HERE, 4, 9, {}, "reader")
    with pytest.raises(Violation, match="lost value"):
        writes.compare(HERE, 3, 9, {}, "reader")


def test_a_deleted_key_may_be_gone_but_not_come_back(writes: KeyedWrites) -> None:
    write(writes, 3)
    write(writes, 8, is_tombstone=True)
    writes.compare(HERE, 0, 9, has(8, is_tombstone=True), "reader")
    writes.compare(HERE, 0, 9, {}, "reader")
    writes.compare(HERE, 0, 9, has(3), "reader", misses_tombstones=True)
    with pytest.raises(Violation, match="revived key"):
        writes.compare(HERE, 0, 9, has(3), "reader")


def test_a_tombstone_without_an_answer_may_have_deleted_the_key(writes: KeyedWrites) -> None:
    write(writes, 3)
    write(writes, None, is_tombstone=True)
    writes.compare(HERE, 0, 9, {}, "reader")
    writes.compare(HERE, 0, 9, has(3), "reader")


def test_a_later_value_without_an_answer_may_be_there(writes: KeyedWrites) -> None:
    write(writes, 3)
    later = write(writes, None)
    writes.found(HERE, 0, record(5, later, later), "reader")
    writes.compare(HERE, 0, 9, has(5), "reader")
    # From now on it is known to be there.
    with pytest.raises(Violation, match="lost value"):
        writes.compare(HERE, 0, 9, has(3), "reader")


def test_a_record_is_found_as_it_was_written(writes: KeyedWrites) -> None:
    name = write(writes, 3)
    writes.found(HERE, 0, record(3, name, name), "reader")
    with pytest.raises(Violation, match="moved record"):
        writes.found(HERE, 0, record(4, name, name), "reader")
    for changed in (
        record(3, name, b"other"),
        record(3, name, None),
        record(3, name, name, key=b"other"),
        record(3, name, name, timestamp=8),
    ):
        with pytest.raises(Violation, match="changed record"):
            writes.found(HERE, 0, changed, "reader")
    with pytest.raises(Violation, match="changed record"):
        writes.found(THERE, 0, record(3, name, name), "reader")
    with pytest.raises(Violation, match="nobody wrote"):
        writes.found(HERE, 0, record(3, b"other", name), "reader")
    with pytest.raises(Violation, match="inconsistent offsets"):
        writes.found(HERE, 1, record(3, name, name), "reader")


def test_an_offset_has_one_record(writes: KeyedWrites) -> None:
    first, second = write(writes, None), write(writes, None)
    writes.found(HERE, 0, record(3, first, first), "node-1")
    with pytest.raises(Violation, match="inconsistent offsets"):
        writes.found(HERE, 0, record(3, second, second), "node-2")
    third = write(writes, None)
    with pytest.raises(Violation, match="lost write"):
        writes.acked(third, 3)
    with pytest.raises(Violation, match="duplicate"):
        writes.acked(first, 4)


def test_a_transaction_counts_when_it_is_committed(checkers: CompactionCheckers) -> None:
    writes, atomic = checkers.writes, checkers.transactions.atomic
    write(writes, 3)
    began = transaction(checkers, 5)
    with pytest.raises(Violation, match="precommitted read"):
        writes.found_committed(writes.write(b"t5"), "reader")
    atomic.committing(began)
    writes.compare(HERE, 0, 9, has(3), "reader")
    writes.compare(HERE, 0, 9, has(5), "reader")
    atomic.committed(began)
    with pytest.raises(Violation, match="lost value"):
        writes.compare(HERE, 0, 9, has(3), "reader")


def test_records_of_an_aborted_transaction_are_never_seen(checkers: CompactionCheckers) -> None:
    writes, atomic = checkers.writes, checkers.transactions.atomic
    write(writes, 3)
    atomic.aborted(transaction(checkers, 5, is_tombstone=True))
    with pytest.raises(Violation, match="G1a"):
        writes.found_committed(writes.write(b"t5"), "reader")
    # Nor do they delete anything.
    with pytest.raises(Violation, match="lost value"):
        writes.compare(HERE, 0, 9, {}, "reader")


def test_a_record_that_was_seen_before_its_transaction_is_known_to_be_aborted(
    checkers: CompactionCheckers,
) -> None:
    atomic = checkers.transactions.atomic
    began = transaction(checkers, 5)
    atomic.committing(began)
    checkers.writes.found_committed(checkers.writes.write(b"t5"), "reader")
    with pytest.raises(Violation, match="G1a"):
        atomic.aborted(began)


def test_dead_keys_are_those_whose_last_write_is_a_tombstone(writes: KeyedWrites) -> None:
    write(writes, 3)
    name = write(writes, 8, is_tombstone=True)
    assert [each.name for each in writes.dead_keys(HERE, 9)] == [name]
    assert writes.dead_keys(HERE, 8) == []
    write(writes, 12)
    assert writes.dead_keys(HERE, 9) == [], "the tombstone may be gone because of the later value"
    assert writes.dead_keys(HERE, 13) == []
