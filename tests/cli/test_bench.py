from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.cli.bench import WARM_UP_RECORDS, percentiles
from tests.cli.conftest import Penstock


def test_percentiles_are_samples_that_were_measured() -> None:
    assert percentiles([float(number) for number in range(1, 1001)]) == {
        "p50": 500.0,
        "p99": 990.0,
        "p99.9": 999.0,
        "max": 1000.0,
    }


def test_one_sample_is_every_percentile() -> None:
    assert set(percentiles([7.0]).values()) == {7.0}


def test_no_samples_have_no_percentiles() -> None:
    assert set(percentiles([]).values()) == {None}


@pytest.mark.interop
def test_producing_is_measured(kafka: Penstock) -> None:
    result = kafka(
        "bench", "produce", "--records", "2000", "--size", "100", "--partitions", "2", "--json"
    ).json
    assert (result["benchmark"], result["records"], result["bytes"]) == ("produce", 2000, 200_000)
    assert result["records_per_s"] == pytest.approx(2000 / result["seconds"], rel=0.01)
    assert result["mb_per_s"] == pytest.approx(0.2 / result["seconds"], rel=0.01)
    assert result["client_cpu_s"] > 0
    latency = result["latency_ms"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]


@pytest.mark.interop
def test_a_topic_of_its_own_is_removed(kafka: Penstock) -> None:
    topic = kafka("bench", "produce", "--records", "10", "--json").json["topic"]
    assert f"there is no topic {topic}" in kafka("topics", "describe", topic, code=1).err


@pytest.mark.interop
def test_producing_keeps_to_the_rate(kafka: Penstock) -> None:
    result = kafka("bench", "produce", "--records", "100", "--rate", "200", "--json").json
    assert result["records_per_s"] <= 210


@pytest.mark.interop
def test_consuming_is_measured_on_a_topic_filled_first(kafka: Penstock) -> None:
    words = "bench consume --records 3000 --size 50 --compression lz4 --partitions 3 --json"
    result = kafka(*words.split()).json
    assert (result["records"], result["bytes"]) == (3000, 150_000)
    assert 0 < result["first_record_ms"] / 1000 <= result["seconds"]


@pytest.mark.interop
def test_consuming_a_topic_that_holds_enough_adds_nothing(
    kafka: Penstock, unique: Callable[[str], str]
) -> None:
    topic = unique("topic")
    kafka("bench", "produce", "--records", "500", "--topic", topic)
    kafka("bench", "consume", "--records", "400", "--topic", topic)
    end = kafka("topics", "describe", topic, "--json").json["partitions"][0]["end"]
    assert end == 500 + WARM_UP_RECORDS


@pytest.mark.interop
def test_latency_is_measured_from_end_to_end(kafka: Penstock) -> None:
    result = kafka(
        "bench", "latency", "--records", "200", "--rate", "500", "--partitions", "2", "--json"
    ).json
    assert result["records"] == 200
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    assert 0 < result["ack_ms"]["p50"] <= result["ack_ms"]["p99"]


@pytest.mark.interop
def test_the_table_names_every_quantity(kafka: Penstock) -> None:
    outcome = kafka("bench", "produce", "--records", "100")
    names = {line.split("  ")[0] for line in outcome.out.splitlines()}
    assert {"records_per_s", "mb_per_s", "client_cpu_s", "latency_ms p50", "latency_ms p99.9"} <= names
