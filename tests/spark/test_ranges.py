"""Ranges of offsets: cut for tasks, shared under a limit, written as Kafka's JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import TopicPartition
from penstock.spark.ranges import OffsetRange, StreamOffset, from_json, share, split, to_json

offset_ranges = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 1000), st.integers(0, 500)).map(
        lambda drawn: OffsetRange("t", drawn[0], drawn[1], drawn[1] + drawn[2])
    ),
    max_size=6,
    unique_by=lambda each: each.partition,
)


@given(offset_ranges, st.none() | st.integers(1, 40), st.none() | st.integers(1, 200))
def test_pieces_cover_the_ranges_exactly_once_and_keep_both_promises(
    ranges: list[OffsetRange], partitions_min: int | None, records_max: int | None
) -> None:
    pieces = split(ranges, partitions_min=partitions_min, records_max=records_max)
    for whole in ranges:
        mine = [piece for piece in pieces if piece.partition == whole.partition]
        covered = [offset for piece in mine for offset in range(piece.start, piece.end)]
        assert covered == list(range(whole.start, whole.end))
        if mine:
            assert max(piece.size for piece in mine) - min(piece.size for piece in mine) <= 1
    assert all(piece.size > 0 for piece in pieces)
    if records_max is not None:
        assert all(piece.size <= records_max for piece in pieces)
    if partitions_min is not None:
        assert len(pieces) >= min(partitions_min, sum(each.size for each in ranges))


def test_ranges_are_left_whole_when_there_are_enough() -> None:
    ranges = [OffsetRange("t", 0, 5, 10), OffsetRange("t", 1, 0, 1000)]
    assert split(ranges) == ranges
    assert split(ranges, partitions_min=2) == ranges


def test_the_largest_range_is_cut_first() -> None:
    pieces = split([OffsetRange("t", 0, 0, 10), OffsetRange("t", 1, 0, 100)], partitions_min=4)
    assert [piece.partition for piece in pieces] == [0, 1, 1, 1]


def test_a_limit_is_shared_in_proportion() -> None:
    backlog = {TopicPartition("t", 0): 300, TopicPartition("t", 1): 100, TopicPartition("t", 2): 0}
    assert list(share(backlog, 100).values()) == [75, 25, 0]
    assert list(share(backlog, 400).values()) == [300, 100, 0]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), st.integers(1, 10**6))
def test_a_share_never_starves_anybody_nor_exceeds_what_there_is(amounts: list[int], limit: int) -> None:
    backlog = {TopicPartition("t", number): amount for number, amount in enumerate(amounts)}
    shares = share(backlog, limit)
    for each, amount in backlog.items():
        assert (1 if amount else 0) <= shares[each] <= amount
    # Only those whose fair share is below one get more than it.
    assert sum(shares.values()) <= limit + len(amounts)


def test_offsets_are_written_as_kafkas_json_in_one_order() -> None:
    offsets = {TopicPartition("b", 10): 1, TopicPartition("b", 2): 2, TopicPartition("a", 0): 3}
    text = json.dumps(to_json(offsets))
    assert text == '{"a": {"0": 3}, "b": {"2": 2, "10": 1}}'
    assert from_json(json.loads(text)) == StreamOffset(offsets)


def test_the_ids_of_topics_stand_behind_the_offsets_as_topics_without_partitions() -> None:
    offsets = {TopicPartition("a", 0): 3, TopicPartition("b", 2): 2, TopicPartition("c", 0): 1}
    ids = {"a": bytes(range(16)), "b": bytes([255] * 16)}
    text = json.dumps(to_json(offsets, ids | {"c": bytes(16), "gone": bytes(range(16))}))
    assert text == (
        '{"a": {"0": 3}, "b": {"2": 2}, "c": {"0": 1}, '
        '"a@AAECAwQFBgcICQoLDA0ODw": {}, "b@_____________________w": {}}'
    )
    assert from_json(json.loads(text)) == StreamOffset(offsets, ids)


@pytest.mark.parametrize(
    "nested",
    [[], {"t": 3}, {"t": {"x": 1}}, {"t": {"0": "1"}}, {"t": {"0": True}}, {"t@short": {}}, {"t@": {}}],
)
def test_json_of_another_shape_is_refused(nested: object) -> None:
    with pytest.raises(ValueError, match=r"offsets|topic|t-0"):
        from_json(nested)  # type: ignore[arg-type]
