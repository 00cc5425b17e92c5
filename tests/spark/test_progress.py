"""How far a stream is behind, from Spark's own report of a micro-batch."""

from __future__ import annotations

import json

from penstock.spark import offsets_behind_latest


def report(end: object, latest: object) -> dict[str, object]:
    return {"sources": [{"endOffset": end, "latestOffset": latest}]}


def test_most_least_and_average_of_the_partitions_are_told() -> None:
    end = {"orders": {"0": 5, "1": 10}, "clicks": {"0": 0}}
    latest = {"orders": {"0": 25, "1": 10}, "clicks": {"0": 1}}
    expected = {"maxOffsetsBehindLatest": 20.0, "minOffsetsBehindLatest": 0.0, "avgOffsetsBehindLatest": 7.0}
    assert offsets_behind_latest(report(end, latest)) == expected
    # As `lastProgress` has it.
    assert offsets_behind_latest(report(json.dumps(end), json.dumps(latest))) == expected


def test_a_partition_that_is_new_since_counts_when_it_is_read() -> None:
    found = offsets_behind_latest(report({"t": {"0": 1}}, {"t": {"0": 1, "1": 9}}))
    assert found["maxOffsetsBehindLatest"] == 0


def test_nothing_is_told_of_other_sources_and_before_the_first_batch() -> None:
    assert offsets_behind_latest({"sources": []}) == {}
    assert offsets_behind_latest(report(None, None)) == {}
    assert offsets_behind_latest(report("12", "13")) == {}
