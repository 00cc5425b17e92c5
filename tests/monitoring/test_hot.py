from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.model import TopicPartition
from penstock.monitoring.hot import KeyShare, heaviest_keys, hot_partitions
from penstock.monitoring.lag import PartitionSample

ID = b"a" * 16


def partitions(
    ends: list[int], sizes: list[int] | None = None, topic_id: bytes = ID
) -> dict[TopicPartition, PartitionSample]:
    return {
        TopicPartition("clicks", number): PartitionSample(
            topic_id, 0, end, end, None if sizes is None else sizes[number]
        )
        for number, end in enumerate(ends)
    }


def hot(before: list[int], after: list[int], times: float = 10.0) -> list[tuple[int, float | None]]:
    found = hot_partitions(partitions(before), partitions(after), 1.0, times)
    return [(each.partition, each.times) for each in found]


def test_a_partition_with_many_times_the_traffic_of_the_others_is_hot() -> None:
    assert hot([0, 0, 0], [1_100, 100, 100]) == [(0, 11.0)]


def test_exactly_the_multiple_is_not_above_it() -> None:
    assert hot([0, 0], [1_000, 100]) == []


def test_of_two_partitions_one_can_be_hot() -> None:
    assert hot([5, 5], [505, 6], 3.0) == [(0, 500.0)]


def test_when_the_others_get_nothing_there_is_no_multiple() -> None:
    assert hot([0, 0], [500, 0]) == [(0, None)]


def test_a_trickle_is_not_hot() -> None:
    assert hot([0, 0], [9, 0]) == []


def test_the_only_partition_of_a_topic_is_not_hot() -> None:
    assert hot([0], [1_000_000]) == []


def test_few_large_records_are_hot_by_their_bytes() -> None:
    before, after = partitions([0, 0], [0, 0]), partitions([5, 5], [5_000_000, 1_000])
    (only,) = hot_partitions(before, after, 1.0, 10.0)
    assert (only.partition, only.bytes_per_s, only.times) == (0, 5_000_000.0, 5_000.0)


def test_sizes_that_shrank_by_retention_are_not_compared() -> None:
    before, after = partitions([0, 0], [10_000_000, 0]), partitions([5, 5], [1, 5_000_000])
    assert hot_partitions(before, after, 1.0, 10.0) == []


def test_a_topic_that_was_made_again_is_not_compared() -> None:
    after = partitions([1_000, 0], topic_id=b"b" * 16)
    assert hot_partitions(partitions([0, 0]), after, 1.0, 10.0) == []


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8), st.floats(1.0, 20.0))
def test_at_most_one_partition_is_above_all_others_taken_together(rates: list[int], times: float) -> None:
    """Whatever is found has more than the mean of the others, and the topic's busiest is among it."""
    found = hot([0] * len(rates), rates, times)
    for number, _ in found:
        others = [rate for other, rate in enumerate(rates) if other != number]
        assert rates[number] > times * sum(others) / len(others) * 0.999
    assert not found or rates.index(max(rates)) in [number for number, _ in found]


def test_the_heaviest_keys_are_those_with_the_most_bytes() -> None:
    records = [(b"a", 10), (b"b", 70), (b"a", 10), (None, 10)]
    assert heaviest_keys(records, 2) == (KeyShare(b"b", 1, 70, 0.7), KeyShare(b"a", 2, 20, 0.2))
    assert heaviest_keys([]) == ()
