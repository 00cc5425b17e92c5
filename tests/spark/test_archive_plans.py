"""What the archive decides before it reads: what is left, what is gone, who reads what, what is merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.spark.jobs.tables.backlog import Extent, backlog, deal, rewound
from penstock.spark.jobs.tables.errors import TableError
from penstock.spark.jobs.tables.merging import FILES_MIN, small_runs
from penstock.spark.jobs.tables.state import (
    NO_DATE,
    ArchivedPartition,
    Change,
    DataFile,
    Gap,
    Shape,
    Span,
    State,
    file_path,
    from_path,
    is_ours,
    new_state,
    temporary_name,
)

MB = 2**20
FILE = 256 * MB
OLD, NEW = "a" * 32, "b" * 32
SHAPE = Shape(by_date=True, headers=True, value_schema='{"type":"struct"}')


def at(partition: int, topic_id: str = NEW, topic: str = "orders") -> ArchivedPartition:
    return ArchivedPartition(topic, topic_id, partition)


def archived(spans: dict[ArchivedPartition, Span], *gaps: Gap) -> State:
    return new_state(SHAPE).after(Change(spans, gaps=gaps), wall_ms=0)


def file(start: int, size: int, *, partition: int = 0, date: str | None = "2026-11-16") -> DataFile:
    path = file_path(at(partition), start, start + 1, date=date, batch_token="0" * 12)
    return DataFile(path, *at(partition), start, start + 1, 1, size, 0, 0, date)


# What is left, and what is gone


def test_a_partition_that_is_new_is_read_from_where_its_log_begins() -> None:
    found = backlog(archived({at(0): Span(0, 10)}), {at(0): Extent(0, 15), at(1): Extent(4, 9)})
    assert found.pending == {at(0): Extent(10, 15), at(1): Extent(4, 9)}
    assert found.spans == {at(0): Span(0, 10), at(1): Span(4, 4)}
    assert found.gaps == ()
    assert found.offsets == 10


def test_a_partition_with_nothing_new_is_not_read() -> None:
    assert backlog(archived({at(0): Span(0, 10)}), {at(0): Extent(3, 10)}).pending == {}


def test_what_retention_took_is_a_gap_and_reading_goes_on_behind_it() -> None:
    found = backlog(archived({at(0): Span(0, 10)}), {at(0): Extent(12, 15)})
    assert found.gaps == (Gap(*at(0), 10, 12, "retention"),)
    assert found.pending == {at(0): Extent(12, 15)}
    assert found.spans == {at(0): Span(0, 12)}


def test_a_log_that_retention_emptied_is_a_gap_with_nothing_to_read() -> None:
    found = backlog(archived({at(0): Span(0, 10)}), {at(0): Extent(15, 15)})
    assert found.gaps == (Gap(*at(0), 10, 15, "retention"),)
    assert found.pending == {}
    assert found.spans == {at(0): Span(0, 15)}


def test_a_topic_that_was_made_again_is_read_from_its_start_and_told_of_once() -> None:
    state = archived({at(0, OLD): Span(0, 10), at(1, OLD): Span(0, 4)})
    extents = {at(0): Extent(0, 3), at(1): Extent(0, 0)}
    found = backlog(state, extents)
    assert found.pending == {at(0): Extent(0, 3)}
    assert found.gaps == (
        Gap(*at(0, OLD), 10, None, "recreated"),
        Gap(*at(1, OLD), 4, None, "recreated"),
    )
    state = state.after(Change({at(0): Span(0, 3), at(1): Span(0, 0)}, gaps=found.gaps), wall_ms=0)
    assert backlog(state, extents).gaps == ()
    assert state.lives("orders") == [OLD, NEW]
    assert state.partitions_of("orders", NEW) == {0: Span(0, 3), 1: Span(0, 0)}


def test_a_log_that_ends_before_its_archive_is_told_of_once() -> None:
    state = archived({at(0): Span(0, 10)})
    gaps = rewound(state, {at(0): Extent(0, 7)})
    assert gaps == [Gap(*at(0), 7, 10, "rewound")]
    assert backlog(state, {at(0): Extent(0, 7)}).pending == {}
    known = state.after(Change(gaps=tuple(gaps)), wall_ms=0)
    assert rewound(known, {at(0): Extent(0, 9)}) == []
    assert rewound(state, {at(0): Extent(0, 10)}) == []


# Who reads what


@given(
    st.dictionaries(
        st.integers(0, 50), st.tuples(st.integers(0, 10**6), st.integers(1, 10**8)), min_size=1, max_size=20
    ),
    st.floats(0.1, 5000),
    st.integers(1, 32),
    st.sampled_from([1, 16, 256]),
)
@example({0: (0, 1), 1: (0, 1)}, 0.5, 1, 1)  # weighed nothing, so one task got both and another none
def test_tasks_take_each_offset_once_and_in_order(
    logs: dict[int, tuple[int, int]], offset_bytes: float, parallelism: int, file_mb: int
) -> None:
    pending = {at(number): Extent(start, start + count) for number, (start, count) in logs.items()}
    bins = deal(
        pending,
        dict.fromkeys(pending, offset_bytes),
        file_bytes=file_mb * MB,
        parallelism=parallelism,
        batch_bytes=4 * parallelism * file_mb * MB,
    )
    assert all(bins)
    taken = sorted((each for held in bins for each in held), key=lambda each: (each.at, each.start))
    assert {each.at for each in taken} == set(pending), "a partition starves"
    for place, extent in pending.items():
        position = extent.start
        for each in (each for each in taken if each.at == place):
            assert each.start == position
            assert each.end > each.start
            position = each.end
        assert position <= extent.end


@pytest.mark.parametrize(
    ("sizes_mb", "parallelism", "files"),
    [
        ([100], 8, 1),  # not worth cutting
        ([256], 2, 2),  # two of 128 for two cores
        ([256], 8, 2),  # and no smaller, whoever has nothing to do
        ([2560], 2, 10),
        ([600, 600], 2, 4),
        ([10] * 5, 2, 5),  # partitions never share a file
    ],
)
def test_files_become_as_large_as_wanted(sizes_mb: list[int], parallelism: int, files: int) -> None:
    pending = {at(number): Extent(0, size * 1024) for number, size in enumerate(sizes_mb)}
    bins = deal(
        pending,
        dict.fromkeys(pending, 1024.0),
        file_bytes=FILE,
        parallelism=parallelism,
        batch_bytes=100 * FILE,
    )
    assert sum(len(held) for held in bins) == files


def test_a_batch_takes_no_more_than_it_should() -> None:
    pending = {at(0): Extent(0, 10**9), at(1): Extent(0, 10**6)}
    bins = deal(pending, dict.fromkeys(pending, 1000.0), file_bytes=FILE, parallelism=2, batch_bytes=8 * FILE)
    taken = sum((each.end - each.start) * 1000 for held in bins for each in held)
    assert 7 * FILE < taken <= 8 * FILE + 2000


def test_many_small_partitions_share_few_tasks() -> None:
    pending = {at(number): Extent(0, 10) for number in range(1000)}
    bins = deal(pending, dict.fromkeys(pending, 100.0), file_bytes=FILE, parallelism=2, batch_bytes=8 * FILE)
    assert len(bins) == 8
    assert sum(len(held) for held in bins) == 1000


# What is merged


def test_small_files_are_merged_when_there_are_enough_of_them() -> None:
    small = [file(number, MB) for number in range(FILES_MIN)]
    assert small_runs(small[:-1], FILE) == []
    assert small_runs(reversed(small), FILE) == [small]


def test_files_of_other_partitions_and_days_are_merged_apart() -> None:
    mixed = [
        file(number, MB, partition=number % 2, date=f"2026-11-{15 + number // 2 % 2}")
        for number in range(4 * FILES_MIN)
    ]
    runs = small_runs(mixed, FILE)
    assert len(runs) == 4
    for run in runs:
        assert len({(each.partition, each.date) for each in run}) == 1


def test_a_file_that_is_large_enough_is_left_alone() -> None:
    files = [file(0, FILE // 2), *(file(number, MB) for number in range(1, 1 + FILES_MIN))]
    assert small_runs(files, FILE) == [files[1:]]


def test_files_without_a_date_are_left_alone() -> None:
    """They are of many days, and merging would make as many files of them again, in every round."""
    assert small_runs([file(number, 10, date=NO_DATE) for number in range(50)], 1000) == []


def test_a_record_is_written_again_only_a_few_times() -> None:
    """Ten thousand small files, one a minute: the work done and the files left, after every merge due was made."""
    files: list[DataFile] = []
    written = 0
    for minute in range(10_000):
        files.append(file(minute, MB // 8))
        for run in small_runs(files, FILE):
            merged = replace(run[0], end=run[-1].end, bytes=sum(each.bytes for each in run))
            written += merged.bytes
            files = sorted(
                [each for each in files if each not in run] + [merged], key=lambda each: each.start
            )
    total = sum(each.bytes for each in files)
    assert total == 10_000 * (MB // 8)
    assert written / total < 10
    assert len(files) < 60
    assert [each.start for each in files[1:]] == [each.end for each in files[:-1]]


# State and names


def test_a_state_is_the_same_after_it_was_written_down() -> None:
    gap = Gap(*at(0, OLD), 10, None, "recreated")
    state = archived({at(0, OLD): Span(0, 10), at(2): Span(5, 7)}, gap)
    state = replace(state, files=(file(5, 100), file(6, 100, date=None)), retired=(("a/b", 5),))
    assert State.from_json(state.to_json(files=True)) == state
    assert State.from_json(state.to_json(files=False)) == replace(state, files=(), retired=())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format":1}', '{"format":1,"archive_id":"x","batch":0}'])
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(TableError):
        State.from_json(text)


@pytest.mark.parametrize("topic", ["orders", "a=b", "_hidden", "x" * 249, "1.2-3_4"])
@pytest.mark.parametrize("date", [None, "2026-11-16", "__HIVE_DEFAULT_PARTITION__"])
def test_a_name_says_what_its_file_holds(topic: str, date: str | None) -> None:
    place = ArchivedPartition(topic, OLD, 123456)
    path = file_path(place, 7, 2**62, date=date, batch_token="0123456789ab")
    assert max(len(part) for part in path.split("/")) <= 255
    found = from_path(path, records=3, size=9)
    assert found is not None
    assert (found.at, found.start, found.end, found.date) == (place, 7, 2**62, date)
    name = path.rpartition("/")[2]
    assert is_ours(name)
    assert is_ours(temporary_name(name))
    assert temporary_name(name).startswith(".")


@pytest.mark.parametrize("name", ["part-0.parquet", "_SUCCESS", "x.parquet", f"{OLD}-0-1-2.parquet", ".tmp"])
def test_a_file_with_another_name_is_not_ours(name: str) -> None:
    assert not is_ours(name)
    assert from_path(f"topic=orders/{name}", records=0, size=0) is None
