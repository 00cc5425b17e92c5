"""The model of compacted topics against made-up readings: it finds each lie that it is there to find."""

from __future__ import annotations

import pytest

from tests.chaos.compaction.model import Entry, PartitionModel, differing
from tests.chaos.ledger import Place

HERE = Place("here", 0)
TIME = 1_700_000_000_000


def value(key: str, text: str) -> Entry:
    return Entry(key.encode(), text.encode(), (), TIME)


def tombstone(key: str) -> Entry:
    return Entry(key.encode(), None, (), TIME)


# a: replaced twice; b: deleted; c: deleted and there again; d: there once.
WRITTEN = [
    value("a", "1"),
    value("b", "1"),
    value("c", "1"),
    tombstone("c"),
    value("a", "2"),
    tombstone("b"),
    value("c", "2"),
    value("d", ""),
    value("a", "3"),
]
LASTS = (5, 6, 7, 8)


def written(*, tombstones_may_go: bool = False) -> PartitionModel:
    model = PartitionModel(HERE, tombstones_may_go=tombstones_may_go)
    for entry in WRITTEN:
        offset = model.writing(entry)
        model.acknowledged(offset, offset)
    return model


def at(*offsets: int) -> dict[int, Entry]:
    return {offset: WRITTEN[offset] for offset in offsets}


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        (at(*range(9)), None),
        (at(*LASTS), None),
        (at(0, 4, *LASTS), None),
        (at(5, 6, 8), "lost: here-0 at 7"),
        (at(4, 5, 6, 7), "lost: here-0 at 8"),
        (at(6, 7, 8), "lost: here-0 at 5"),
        (at(*LASTS) | {4: WRITTEN[0]}, "altered: here-0 at 4"),
        (at(*LASTS) | {7: WRITTEN[7]._replace(value=None)}, "altered: here-0 at 7"),
        (at(*LASTS) | {7: WRITTEN[7]._replace(timestamp=TIME + 1)}, "altered: here-0 at 7"),
        (at(*LASTS) | {9: value("a", "4")}, "altered: here-0 at 9: .*nobody wrote"),
    ],
    ids=[
        "everything",
        "cleaned",
        "cleaned in part",
        "a value is lost",
        "an old value is the last",
        "a tombstone is lost",
        "another's offset",
        "a value became a tombstone",
        "another time",
        "from nowhere",
    ],
)
def test_a_reading_where_tombstones_stay(records: dict[int, Entry], complaint: str | None) -> None:
    assert_found(written(), records, complaint)


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        (at(*LASTS), None),
        (at(6, 7, 8), None),
        (at(1, 5, 6, 7, 8), None),
        (at(1, 6, 7, 8), "revived: here-0 at 5"),
        (at(6, 7), "lost: here-0 at 8"),
    ],
    ids=["with the tombstone", "without it", "not cleaned there", "the key is back", "a value is lost"],
)
def test_a_reading_where_tombstones_may_go(records: dict[int, Entry], complaint: str | None) -> None:
    assert_found(written(tombstones_may_go=True), records, complaint)


def assert_found(model: PartitionModel, records: dict[int, Entry], complaint: str | None) -> None:
    model.check("somebody", records)
    if complaint is None:
        model.raise_violations()
        return
    with pytest.raises(AssertionError, match=complaint):
        model.raise_violations()


def test_a_cleaned_replica_has_each_key_once_below_its_first_dirty_offset() -> None:
    model = written()
    # Of b, the tombstone is dirty; of a, the last value is.
    model.check_cleaned("somebody", at(1, 3, 4, 5, 6, 7, 8), first_dirty_offset=5)
    model.raise_violations()
    model.check_cleaned("somebody", at(0, 1, 3, 4, 5, 6, 7, 8), first_dirty_offset=5)
    with pytest.raises(AssertionError, match="not cleaned: here-0 at 0"):
        model.raise_violations()


def test_a_reading_on_the_way_may_find_a_later_record_instead() -> None:
    model = PartitionModel(HERE, tombstones_may_go=False)
    for entry in WRITTEN[:3]:
        model.acknowledged(model.writing(entry), None)
    reading = model.begin_reading("somebody")
    assert reading.end_offset == 3
    for entry in WRITTEN[3:]:
        model.acknowledged(model.writing(entry), None)
    for offset in (4, 5, 6):
        reading.saw(model, offset, WRITTEN[offset])
    model.end_reading(reading)
    model.check_seen()
    model.raise_violations()


@pytest.mark.parametrize(("may_go", "is_lost"), [(False, True), (True, False)])
def test_a_reading_on_the_way_may_miss_a_key_that_was_deleted_meanwhile(may_go: bool, is_lost: bool) -> None:
    model = written(tombstones_may_go=may_go)
    reading = model.begin_reading("somebody")
    for offset in (6, 7, 8):
        reading.saw(model, offset, WRITTEN[offset])
    model.end_reading(reading)
    model.check_seen()
    if is_lost:
        with pytest.raises(AssertionError, match="lost: here-0 at 5: somebody"):
            model.raise_violations()
    else:
        model.raise_violations()


def test_a_reading_on_the_way_misses_nothing_else() -> None:
    model = written(tombstones_may_go=True)
    reading = model.begin_reading("somebody")
    for offset in (5, 6, 8):
        reading.saw(model, offset, WRITTEN[offset])
    model.end_reading(reading)
    model.check_seen()
    with pytest.raises(AssertionError, match="lost: here-0 at 7: somebody"):
        model.raise_violations()


def test_a_record_that_was_read_on_the_way_must_have_been_written() -> None:
    model = written()
    reading = model.begin_reading("somebody")
    reading.saw(model, 9, value("a", "never"))
    model.check_seen()
    with pytest.raises(AssertionError, match="altered: here-0 at 9"):
        model.raise_violations()


def test_a_record_is_the_same_for_every_reader() -> None:
    model = written()
    model.begin_reading("one").saw(model, 8, WRITTEN[8])
    model.begin_reading("another").saw(model, 8, WRITTEN[4])
    with pytest.raises(AssertionError, match="altered: here-0 at 8"):
        model.raise_violations()


def test_offsets_ascend() -> None:
    model = written()
    reading = model.begin_reading("somebody")
    reading.saw(model, 5, WRITTEN[5])
    with pytest.raises(AssertionError, match="disordered"):
        reading.saw(model, 5, WRITTEN[5])


def test_a_record_is_acknowledged_where_it_is() -> None:
    model = PartitionModel(HERE, tombstones_may_go=False)
    model.acknowledged(model.writing(WRITTEN[0]), 1)
    with pytest.raises(AssertionError, match="was written at 1"):
        model.raise_violations()


def test_copies_differ_where_both_have_a_record() -> None:
    assert differing([at(0, 1, 5), at(5, 6)]) == []
    assert differing([at(0, 1, 5), at(6) | {5: WRITTEN[6]}]) == [5]
