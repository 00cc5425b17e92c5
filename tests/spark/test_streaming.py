"""``format("penstock")`` as a stream: restarts, triggers, limits, growing topics, and the group that mirrors it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from penstock.spark import offsets_behind_latest
from tests.spark.jars import connector_jars
from tests.spark.streams import DEADLINE_S, Stream, expected, send
from tests.spark.topics import Topics
from tests.support import wait_until
from tests.tools import Missing, skip_or_fail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def stream(spark: SparkSession, bootstrap: str, tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(spark, bootstrap, tmp_path / "checkpoint")
    yield stream
    stream.stop()


def test_a_stream_goes_on_from_its_checkpoint_and_repeats_and_skips_nothing(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic, group = topics.create(unique("t"), 2), unique("group")
    send(topics, topic, 0, 0, 40)
    send(topics, topic, 1, 0, 60)
    options = {"subscribe": topic, "maxOffsetsPerTrigger": "50", "groupId": group}
    # The table fails after it has taken the second batch, as if the driver had died just then.
    stream.table.fail_after = 1
    with pytest.raises(PySparkException, match="the table is full"):
        stream.drain(**options)
    assert stream.table.sizes == [50, 50]
    assert topics.committed(group) == {(topic, 0): 20, (topic, 1): 30}

    stream.table.fail_after = None
    send(topics, topic, 0, 40, 45)
    query = stream.drain(**options)
    assert sorted(stream.table.rows) == sorted(
        expected(topic, 0, *range(45)) + expected(topic, 1, *range(60))
    )
    # The unfinished batch was written again as it was, and the rest after it.
    assert stream.table.sizes == [50, 50, 5]
    assert topics.committed(group) == {(topic, 0): 45, (topic, 1): 60}
    last = sorted((stream.checkpoint / "offsets").glob("[0-9]*"))[-1].read_text().splitlines()[-1]
    assert json.loads(last)[topic] == {"0": 45, "1": 60}
    progress = query.lastProgress
    assert progress is not None
    assert json.loads(progress.sources[0].latestOffset) == json.loads(last)
    assert set(offsets_behind_latest(progress).values()) == {0.0}

    stream.drain(**options)
    assert stream.table.sizes == [50, 50, 5]


def test_a_checkpoint_of_sparks_kafka_source_is_gone_on_from(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    try:
        connector_jars()
    except Missing as missing:
        skip_or_fail(missing)
    topic = topics.create(unique("t"), 2)
    send(topics, topic, 0, 0, 4)
    stream.drain(subscribe=topic, source="kafka")
    send(topics, topic, 0, 4, 6)
    send(topics, topic, 1, 0, 3)
    stream.drain(subscribe=topic)
    assert stream.table.sizes == [4, 5]
    assert sorted(stream.table.rows) == expected(topic, 0, *range(6)) + expected(topic, 1, *range(3))


def test_a_running_stream_picks_up_new_partitions_and_topics(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    send(topics, topic, 0, 0, 5)
    query = stream.start(subscribePattern=f"{topic}.*", includeHeaders="true", minPartitions="4")
    wait_until(lambda: len(stream.table.rows) == 5, DEADLINE_S, "the first records were read")
    topics.grow(topic, 3)
    send(topics, topic, 2, 0, 7)
    wait_until(lambda: len(stream.table.rows) == 12, DEADLINE_S, "the new partition was read")
    other = topics.create(f"{topic}-other", 1)
    send(topics, other, 0, 0, 4)
    send(topics, topic, 0, 5, 6)
    wait_until(lambda: len(stream.table.rows) == 17, DEADLINE_S, "the new topic was read")
    assert query.isActive
    query.stop()
    assert sorted(stream.table.rows) == sorted(
        expected(topic, 0, *range(6)) + expected(topic, 2, *range(7)) + expected(other, 0, *range(4))
    )


def test_a_stream_from_latest_leaves_out_what_was_there(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic, group = topics.create(unique("t"), 1), unique("group")
    send(topics, topic, 0, 0, 5)
    options = {"subscribe": topic, "startingOffsets": "latest", "groupId": group}
    stream.drain(**options)
    assert topics.committed(group) == {(topic, 0): 5}
    send(topics, topic, 0, 5, 8)
    stream.drain(**options)
    assert stream.table.rows == expected(topic, 0, 5, 6, 7)
    assert topics.committed(group) == {(topic, 0): 8}


@pytest.mark.parametrize("strictness", ["true", "false"])
def test_a_stream_from_latest_that_fails_at_once_begins_where_it_was_started_first(
    stream: Stream, topics: Topics, unique: Callable[[str], str], strictness: str
) -> None:
    topic = topics.create(unique("t"), 1)
    send(topics, topic, 0, 0, 5)
    options = {"subscribe": topic, "startingOffsets": "latest", "failOnDataLoss": strictness}
    stream.table.fail_after = 0
    with pytest.raises(PySparkException, match="the table is full"):
        stream.drain(**options)
    stream.table.fail_after = None
    send(topics, topic, 0, 5, 8)
    stream.drain(**options)
    assert stream.table.rows == expected(topic, 0, 5, 6, 7)


def test_a_stream_waits_for_the_least_amount_or_for_the_longest_delay(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    send(topics, topic, 0, 0, 5)
    options: dict[str, Any] = {"subscribe": topic, "minOffsetsPerTrigger": "10"}
    query = stream.start(maxTriggerDelay="1h", **options)
    wait_until(lambda: query.status["message"].startswith("Waiting"), DEADLINE_S, "a trigger has passed")
    assert stream.table.rows == []
    send(topics, topic, 0, 5, 10)
    wait_until(lambda: len(stream.table.rows) == 10, DEADLINE_S, "ten records are enough")
    query.stop()
    send(topics, topic, 0, 10, 11)
    stream.start(maxTriggerDelay="1s", **options)
    wait_until(lambda: len(stream.table.rows) == 11, DEADLINE_S, "a second is enough")
    assert stream.table.rows == expected(topic, 0, *range(11))


def test_a_group_with_members_of_its_own_is_refused(
    stream: Stream, topics: Topics, unique: Callable[[str], str], bootstrap: str
) -> None:
    from confluent_kafka import Consumer

    topic, group = topics.create(unique("t"), 1), unique("group")
    member = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        member.subscribe([topic])
        wait_until(
            lambda: member.poll(0.1) or member.assignment(), DEADLINE_S, "the member has its partition"
        )
        with pytest.raises(
            PySparkException, match=f"cannot commit this stream's progress to groupId {group}"
        ):
            stream.drain(subscribe=topic, groupId=group)
    finally:
        member.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "no-such-topic"}, "topic no-such-topic does not exist at"),
        ({"subscribe": "t", "endingOffsets": "latest"}, "a stream has no end; omit it"),
    ],
)
def test_a_streams_mistake_gets_one_clear_line(stream: Stream, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message):
        stream.drain(**options)
