"""The profile job on Spark: what it says of a topic whose contents are known."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from penstock.model import TopicPartition
from penstock.spark.errors import SparkOptionError
from penstock.spark.jobs import profile
from penstock.wire import Client
from tests.spark.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
PNG = b"\x89PNG\r\n\x1a\n"


def table(directory: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.ParquetFile(directory / f"{name}.parquet").read().to_pylist()
    return rows


def test_a_topic_is_counted_measured_and_drawn(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic, empty = unique("profiled"), unique("empty")
    topics.create(topic, 2, configs={"retention.ms": str(3 * DAY_MS)})
    topics.create(empty, 1, configs={"retention.ms": "-1"})
    now_ms = time.time_ns() // 1_000_000
    lz4 = {"compression.type": "lz4"}
    for hours, key in ((48, b"old"), (36, b"hot"), (0, b"hot")):
        values = [b"x" * 100] * 300
        topics.send(
            topic, values, keys=[key] * 300, timestamp_ms=now_ms - hours * HOUR_MS - 1000, settings=lz4
        )
    topics.send(topic, [None, b"y"], keys=[b"gone", None], partition=1, timestamp_ms=now_ms - 1000)
    group = unique("group")
    with Client(bootstrap) as client:
        client.commit(group, {TopicPartition(topic, 0): 850, TopicPartition(topic, 1): 2})
    told: list[tuple[int, int]] = []
    result = profile(spark, bootstrap, [topic, empty], tmp_path, progress=lambda *each: told.append(each))
    assert told[-1] == (902, 902)

    full, bare = table(tmp_path, "topics")
    assert (full["partitions"], full["records"], full["lag"], full["reckoned"]) == (2, 902, 50, False)
    assert full["record_bytes"] == 900 * 103 + 4 + 1
    assert full["stored_bytes"] == full["disk_bytes"] < full["record_bytes"] / 5
    assert full["skew"] == pytest.approx(2, abs=0.01)
    # The newest third of what the first partition holds has come within a day.
    assert full["stored_bytes_per_day"] == pytest.approx(full["stored_bytes"] / 3, rel=0.2)
    assert (full["deletes_by"], full["retention_ms"], full["retention_bytes"]) == ("time", 3 * DAY_MS, None)
    assert full["deletes_from"].timestamp() * 1000 == now_ms + DAY_MS - 1000
    assert (bare["records"], bare["skew"], bare["lag"], bare["deletes_from"]) == (0, None, None, None)

    first, second, _ = table(tmp_path, "partitions")
    assert (first["start"], first["end"], first["codecs"]) == (0, 900, "lz4")
    assert first["record_bytes_min"] == first["record_bytes_max"] == first["record_bytes_p99"] == 103
    assert (first["newest"].timestamp() - first["oldest"].timestamp()) * 1000 == 2 * DAY_MS
    assert (second["without_key"], second["tombstones"], second["record_bytes_min"]) == (1, 1, 1)
    hot = [
        (each["key"], each["partition"], each["count"], each["count_max"])
        for each in table(tmp_path, "hot_keys")
    ]
    assert hot == [(b"hot", 0, 600, 600), (b"old", 0, 300, 300), (b"gone", 1, 1, 1)]
    lags = {(each["group"], each["partition"]): each["lag"] for each in table(tmp_path, "lag")}
    assert lags[group, 0] == 50 and lags[group, 1] == 0
    assert sum(each["records"] for each in table(tmp_path, "timeline")) == 902
    assert sum(each["records"] for each in table(tmp_path, "sizes")) == 902
    days = [each["disk_bytes"] for each in table(tmp_path, "forecast") if each["topic"] == topic]
    assert len(days) == 31 and days[0] == full["disk_bytes"]

    drawn = {path.name for path in (tmp_path / topic).iterdir()}
    assert drawn == {
        f"{each}.png" for each in ("partitions", "timeline", "sizes", "hot_keys", "lag", "forecast")
    }
    assert all((tmp_path / topic / name).read_bytes().startswith(PNG) for name in drawn)
    assert list((tmp_path / empty).iterdir()) == []
    assert [Path(each).name for each in result.files if each.endswith(".parquet")] == [
        f"{each}.parquet"
        for each in ("topics", "partitions", "hot_keys", "lag", "timeline", "sizes", "forecast")
    ]
    columns, rows = result.as_table()
    assert columns[:3] == ("topic", "partitions", "records")
    assert [row[:3] for row in rows] == [(topic, 2, 902), (empty, 1, 0)]


def test_a_sample_says_about_the_same(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topics.create(unique("sampled"))
    now_ms = time.time_ns() // 1_000_000
    for hour in range(20):
        keys = [b"often" if number % 4 else b"seldom" for number in range(1000)]
        topics.send(topic, [b"x" * 200] * 1000, keys=keys, timestamp_ms=now_ms - (20 - hour) * 3_600_000)
    exact = profile(spark, bootstrap, [topic], tmp_path / "all").topics[0]
    about = profile(spark, bootstrap, [topic], tmp_path / "some", sample=4000).topics[0]
    assert (exact.is_reckoned, about.is_reckoned) == (False, True)
    assert exact.records == 20_000
    assert about.records == pytest.approx(20_000, rel=0.01)
    assert about.stored_bytes == pytest.approx(exact.stored_bytes, rel=0.1)
    assert about.growth_bytes_per_day == pytest.approx(exact.growth_bytes_per_day, rel=0.1)
    (often, seldom) = about.hot_keys()
    assert often.key == b"often" and often.share == pytest.approx(0.75, abs=0.02)
    assert seldom.key == b"seldom" and seldom.share == pytest.approx(0.25, abs=0.02)


@pytest.mark.usefixtures("impatient")
def test_a_mistake_is_told_in_one_line(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    with pytest.raises(SparkOptionError, match="topic no-such-topic does not exist"):
        profile(spark, bootstrap, ["no-such-topic"], tmp_path)
    with pytest.raises(SparkOptionError, match="at least one topic"):
        profile(spark, bootstrap, [], tmp_path)
    with pytest.raises(SparkOptionError, match="sample must be at least 1000, not 5"):
        profile(spark, bootstrap, ["no-such-topic"], tmp_path, sample=5)
    assert list(tmp_path.iterdir()) == []
