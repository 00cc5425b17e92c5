"""Numbers for the metrics: which bucket a time belongs to."""

from __future__ import annotations

import pytest

from penstock.broker.counters import BOUNDS_US, ApiCounts, Durations, RequestCounts


@pytest.mark.parametrize(
    ("duration_us", "bucket"), [(0, 0), (500, 0), (501, 1), (10_000_000, 7), (10_000_001, 8), (10**12, 8)]
)
def test_a_time_is_in_the_first_bucket_whose_bound_it_does_not_exceed(duration_us: int, bucket: int) -> None:
    durations = Durations()
    durations.add(duration_us)
    assert durations.counts == [int(number == bucket) for number in range(len(BOUNDS_US) + 1)]
    assert durations.sum_us == duration_us


def test_all_requests_that_a_turn_has_answered_took_as_long_as_the_turn() -> None:
    requests = RequestCounts()
    produce, fetch = requests.of(0), requests.of(1)
    requests.answered += [produce, fetch]
    produce.answered, fetch.answered = 2, 1
    requests.turn_ended(700)
    assert produce.durations.counts[1] == 2 and produce.durations.sum_us == 1_400
    assert fetch.durations.counts[1] == 1 and fetch.durations.sum_us == 700
    requests.turn_ended(700)
    assert fetch.durations.sum_us == 700
    assert requests.of(0) is produce


def test_errors_are_counted_by_their_code() -> None:
    counts = ApiCounts()
    for error in (3, 6, 3):
        counts.failed(error)
    assert counts.errors == {3: 2, 6: 1}
