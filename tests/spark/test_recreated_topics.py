"""Topics that are deleted and made anew under a stream: the offsets of the old one mean nothing in the new one.

Most tests are themselves the driver: they ask the stream's reader as Spark does, keep what it says as a checkpoint
does, and restart it by making another reader. The last ones leave that to Spark.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from penstock.model import NO_TOPIC_ID
from penstock.spark import planning
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs import archive, read_snapshot, snapshot, table
from penstock.spark.jobs.replay import ReplayFailed, replay
from penstock.spark.options import parse
from penstock.spark.ranges import from_json
from penstock.spark.source import PenstockReader, PenstockStreamReader
from penstock.wire import EARLIEST, LATEST, Client, TopicPartition, operations
from penstock.wire.cluster import Cluster
from tests.spark.jars import connector_jars
from tests.spark.streams import DEADLINE_S, Stream
from tests.spark.topics import Topics
from tests.support import wait_until
from tests.tools import Missing, skip_or_fail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Json = dict[str, Any]
Row = tuple[str, int, int, bytes]

LENIENT = {"failOnDataLoss": "false"}


class Driver:
    """Plans micro-batches and reads them, as Spark would."""

    def __init__(self, bootstrap: str, **options: str) -> None:
        given = {"bootstrap": bootstrap, "startingOffsets": "earliest", **options}
        self.reader = PenstockStreamReader(parse(given, "stream"))

    def begin(self) -> Json:
        return self._kept(self.reader.initialOffset())

    def plan(self, start: Json) -> Json:
        return self._kept(self.reader.latestOffset(start, self.reader.getDefaultReadLimit()))

    def read(self, start: Json, end: Json) -> list[Row]:
        return [
            (topic, partition, offset, value)
            for each in self.reader.partitions(start, end)
            for batch in self.reader.read(each)
            for topic, partition, offset, value in zip(
                *(batch.column(name).to_pylist() for name in ("topic", "partition", "offset", "value"))
            )
        ]

    def go_on(self, start: Json) -> tuple[Json, list[Row]]:
        """One micro-batch from ``start``."""
        end = self.plan(start)
        return end, self.read(start, end)

    def _kept(self, offset: Json) -> Json:
        """What a checkpoint gives back: the same text."""
        kept: Json = json.loads(json.dumps(offset))
        return kept


@pytest.fixture
def driver(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    monkeypatch.setattr(planning, "GONE_AFTER_S", 0.5)
    monkeypatch.setattr(planning, "UNHEARD_OF_S", 0.5)
    monkeypatch.setattr(planning, "METADATA_AGE_S", 0.0)
    monkeypatch.setattr(operations, "UNKNOWN_TOPIC_MS", 200)
    return lambda **options: Driver(bootstrap, **options)


@pytest.fixture
def stream(spark: SparkSession, bootstrap: str, tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(spark, bootstrap, tmp_path / "checkpoint")
    yield stream
    stream.stop()


def fill(topics: Topics, topic: str, what: str, *counts: int) -> list[Row]:
    """Records for each partition, named for the topic's life that they are of; and the rows they should become."""
    rows = []
    for partition, count in enumerate(counts):
        values = [f"{what} {number}".encode() for number in range(count)]
        topics.send(topic, values, partition=partition)
        rows += [(topic, partition, number, value) for number, value in enumerate(values)]
    return rows


def make_anew(topics: Topics, topic: str, what: str, *counts: int) -> list[Row]:
    topics.delete(topic)
    topics.create(topic, len(counts))
    return fill(topics, topic, what, *counts)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_restarted_stream_tells_that_its_topic_is_another_and_what_to_do(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    old = fill(topics, topic, "old", 3)
    first = driver(subscribe=topic)
    end, rows = first.go_on(first.begin())
    assert rows == old
    make_anew(topics, topic, "new", 5)
    for _ in range(2):
        with pytest.raises(DataLossError) as caught:
            driver(subscribe=topic).plan(end)
        assert f"topic {topic} was deleted and made anew (id " in str(caught.value)
        assert str(caught.value).endswith(
            "To read the new one from its beginning set failOnDataLoss to false."
        )


@pytest.mark.parametrize("counts", [(5, 9), (3, 2), (1, 0), (0, 0), (7,), (0,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "running"])
def test_a_lenient_stream_reads_the_new_topic_from_its_beginning_once(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    counts: tuple[int, ...],
    restarts: bool,
) -> None:
    topic = topics.create(unique("t"), 2)
    fill(topics, topic, "old", 3, 2)
    options = {"subscribe": topic, **LENIENT}
    running = driver(**options)
    end, _ = running.go_on(running.begin())
    new = make_anew(topics, topic, "new", *counts)
    if restarts:
        running = driver(**options)
    stood_at, end = end, running.plan(end)
    assert end != stood_at  # or Spark would not run the batch
    assert running.read(stood_at, end) == new
    assert from_json(end).offsets == {(topic, number): count for number, count in enumerate(counts)}
    told = warnings(caplog)
    assert len(told) == 1
    assert f"topic {topic} was deleted and made anew" in told[0]
    assert told[0].endswith("Reading the new one from its beginning, as failOnDataLoss is false.")
    # From here on it is any topic, also for a strict stream.
    for later in (running, driver(**options), driver(subscribe=topic)):
        assert later.go_on(end) == (end, [])
    assert warnings(caplog) == told


def test_a_new_topic_is_read_within_the_limits_of_a_trigger(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = topics.create(unique("t"), 2)
    fill(topics, topic, "old", 4, 4)
    options = {"subscribe": topic, "maxOffsetsPerTrigger": "4", **LENIENT}
    running = driver(**options)
    end = running.begin()
    for _ in range(2):
        end, _ = running.go_on(end)
    new = make_anew(topics, topic, "new", 6, 6)
    rows: list[Row] = []
    for _ in range(3):
        end, more = driver(**options).go_on(end)
        assert len(more) == 4
        rows += more
    assert sorted(rows) == new
    assert len(warnings(caplog)) == 1


def test_offsets_without_ids_are_gone_on_from_and_get_them(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 2)
    all_rows = fill(topics, topic, "old", 3, 4)
    end, rows = driver(subscribe=topic).go_on({topic: {"0": 2, "1": 4}})
    assert rows == [all_rows[2]]
    assert end[topic] == {"0": 3, "1": 4}
    assert list(from_json(end).topic_ids) == [topic]
    # An unfinished batch of such a stream is repeated as it was planned.
    assert driver(subscribe=topic).read({topic: {"0": 1}}, {topic: {"0": 2}}) == [all_rows[1]]
    make_anew(topics, topic, "new", 3, 4)
    with pytest.raises(DataLossError, match="was deleted and made anew"):
        driver(subscribe=topic).plan(end)


def test_a_stream_from_offsets_without_ids_that_waits_for_more_gets_them_too(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    running = driver(subscribe=topic, minOffsetsPerTrigger="5", maxTriggerDelay="1h", **LENIENT)
    start = running.plan({topic: {"0": 3}})
    assert start[topic] == {"0": 3}
    assert running.plan(start) == start
    new = make_anew(topics, topic, "new", 4)
    for _ in range(3):
        assert running.plan(start) == start
    topics.send(topic, [b"one more"])
    _, rows = running.go_on(start)
    assert rows == [*new, (topic, 0, 4, b"one more")]
    assert len(warnings(caplog)) == 1


def test_an_unfinished_batch_of_the_old_topic_is_lost_and_the_new_one_read_behind_it(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic, other = topics.create(unique("t"), 1), topics.create(unique("other"), 1)
    fill(topics, topic, "old", 3)
    beside = fill(topics, other, "beside", 2)
    options = {"subscribe": f"{topic},{other}"}
    first = driver(**options)
    start = first.begin()
    end = first.plan(start)  # written down, and then the driver dies
    new = make_anew(topics, topic, "new", 4)
    with pytest.raises(DataLossError, match=f"topic {topic} was deleted and made anew"):
        driver(**options).read(start, end)
    # Of the very first batch Spark knows no start: the reader is asked anew, and finds the new topic.
    asked_anew = driver(**options)
    begin = asked_anew.begin()
    (was,), (now,) = (
        {key.partition("@")[2] for key in each if key.startswith(f"{topic}@")} for each in (end, begin)
    )
    with pytest.raises(
        DataLossError, match=f"made anew .id {was}, now {now}., and a micro-batch of the old one"
    ):
        asked_anew.read(begin, end)
    second = driver(**options, **LENIENT)
    assert second.read(start, end) == beside
    assert second.go_on(end)[1] == new
    assert len(warnings(caplog)) == 1
    third = driver(**options, **LENIENT)
    assert third.read(third.begin(), end) == beside
    assert third.go_on(end)[1] == new


def test_an_unfinished_batch_of_the_new_topic_is_repeated_from_its_beginning(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    options = {"subscribe": topic, **LENIENT}
    first = driver(**options)
    start = first.plan(first.begin())
    new = make_anew(topics, topic, "new", 3)
    end = driver(**options).plan(start)
    caplog.clear()
    second = driver(**options)
    assert second.read(start, end) == new
    assert second.go_on(end) == (end, [])
    assert len(warnings(caplog)) == 1
    # Once more, before the batch is done: what it was to read is gone, and so was what came before.
    newest = make_anew(topics, topic, "newest", 5)
    third = driver(**options)
    assert third.read(start, end) == []
    assert third.go_on(end)[1] == newest


def test_a_task_of_the_old_topic_reads_nothing_of_the_new_one(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    running = driver(subscribe=topic, **LENIENT)
    start = running.begin()
    end = running.plan(start)
    planned = running.reader.partitions(start, end)
    new = make_anew(topics, topic, "new", 4)
    assert [batch for each in planned for batch in running.reader.read(each)] == []
    assert running.go_on(end)[1] == new


def test_a_broker_that_is_behind_is_not_taken_at_its_word(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    running = driver(subscribe=topic, **LENIENT)
    running.plan(running.begin())
    behind = running.reader._planner()._client.topics([topic])
    make_anew(topics, topic, "new", 4)
    end = running.plan(driver(subscribe=topic).begin())
    caplog.clear()
    real, answers = Client.topics, [behind, behind]

    def late(*given: Any, **settings: Any) -> Any:
        return answers.pop() if answers else real(*given, **settings)

    monkeypatch.setattr(Client, "topics", late)
    assert driver(subscribe=topic, **LENIENT).go_on(end) == (end, [])
    assert not answers
    assert warnings(caplog) == []


def test_a_topic_of_a_pattern_may_vanish_and_come_back_as_another(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefix = unique("t")
    here, there = topics.create(f"{prefix}-here", 1), topics.create(f"{prefix}-there", 2)
    fill(topics, here, "old", 1)
    fill(topics, there, "old", 3, 3)
    options = {"subscribePattern": f"{prefix}-.*", **LENIENT}
    running = driver(**options)
    end, rows = running.go_on(running.begin())
    assert len(rows) == 7
    topics.delete(there)
    topics.send(here, [b"meanwhile"])
    end, rows = running.go_on(end)
    assert rows == [(here, 0, 1, b"meanwhile")]
    assert end[there] == {"0": 3, "1": 3}
    # Whether or not the stream was stopped meanwhile.
    topics.create(there, 2)
    new = fill(topics, there, "new", 4, 3)
    stopped = driver(**options)
    assert running.go_on(end)[1] == stopped.go_on(end)[1] == new
    strict = driver(subscribePattern=f"{prefix}-.*")
    with pytest.raises(DataLossError, match=f"topic {there} was deleted and made anew"):
        strict.plan(end)
    gone, *made_anew = warnings(caplog)
    assert "no longer there" in gone
    assert len(made_anew) == 2  # one of each reader


def test_a_topic_that_could_not_be_seen_for_a_while_is_still_the_same(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    running = driver(subscribe=topic, **LENIENT)
    end, _ = running.go_on(running.begin())
    with monkeypatch.context() as patch:
        patch.setattr(Client, "topics", lambda *_, **__: {})
        assert running.plan(end) == end
    topics.send(topic, [b"later"])
    assert running.go_on(end)[1] == [(topic, 0, 3, b"later")]


@pytest.mark.parametrize("strict", [True, False], ids=["failOnDataLoss", "reads on"])
def test_a_topic_made_anew_during_an_available_now_run_is_for_the_next_run(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    strict: bool,
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    options = {"subscribe": topic, "failOnDataLoss": str(strict).lower()}
    run = driver(**options)
    run.reader.prepareForTriggerAvailableNow()
    end, _ = run.go_on(run.begin())
    new = make_anew(topics, topic, "new", 5)
    if strict:
        with pytest.raises(DataLossError, match=f"topic {topic} was deleted and made anew"):
            run.plan(end)
        return
    assert run.go_on(end) == (end, [])
    following = driver(**options)
    following.reader.prepareForTriggerAvailableNow()
    assert following.go_on(end)[1] == new
    assert len(warnings(caplog)) == 1


def test_a_topic_made_anew_during_an_available_now_run_holds_up_the_rest_of_it_only_once(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, other = topics.create(unique("t"), 1), topics.create(unique("other"), 1)
    fill(topics, topic, "old", 1)
    beside = fill(topics, other, "beside", 9)
    run = driver(subscribe=f"{topic},{other}", maxOffsetsPerTrigger="4", **LENIENT)
    run.reader.prepareForTriggerAvailableNow()
    end, rows = run.go_on(run.begin())
    make_anew(topics, topic, "new", 5)
    end, more = run.go_on(end)
    rows += more

    def sleep(_: float) -> None:
        raise AssertionError("it waits for a broker that was behind once more")

    monkeypatch.setattr("time.sleep", sleep)
    while more:
        end, more = run.go_on(end)
        rows += more
    assert [row for row in rows if row[0] == other] == beside


def test_offsets_without_ids_are_of_the_topic_that_was_seen_first(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    running = driver(subscribe=topic, groupId=unique("group"), **LENIENT)
    start = {topic: {"0": 3}}
    running.reader.commit(start)  # which looks at the topic
    new = make_anew(topics, topic, "new", 5)
    end, rows = running.go_on(start)
    assert rows == new
    assert running.go_on(end) == (end, [])
    assert len(warnings(caplog)) == 1


def test_brokers_that_know_no_ids_change_nothing(
    driver: Callable[..., Driver],
    topics: Topics,
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a cluster that is upgraded broker by broker: some answers have ids, some have none."""
    topic = topics.create(unique("t"), 1)
    rows = fill(topics, topic, "old", 3)
    with_ids = driver(subscribe=topic)
    start = with_ids.begin()
    end = with_ids.plan(start)
    real = Cluster.learn

    def without_ids(cluster: Cluster, response: Any) -> None:
        for each in response.topics:
            each.topic_id = NO_TOPIC_ID
        real(cluster, response)

    monkeypatch.setattr(Cluster, "learn", without_ids)
    running = driver(subscribe=topic)
    # What was planned when there were ids, now and after a crash.
    assert running.read(start, end) == rows
    assert with_ids.read(start, end) == rows
    assert running.plan(end) == end
    # A stream that never saw any does without them.
    assert driver(subscribe=topic).go_on({topic: {"0": 1}}) == ({topic: {"0": 3}}, rows[1:])
    monkeypatch.undo()
    assert running.plan(end) == end
    assert driver(subscribe=topic).go_on({topic: {"0": 1}}) == (end, rows[1:])
    assert warnings(caplog) == []


def test_the_group_stands_only_where_the_stream_has_read_the_topic_of_today(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str]
) -> None:
    topic, other, group = topics.create(unique("t"), 1), topics.create(unique("other"), 1), unique("group")
    fill(topics, topic, "old", 3)
    fill(topics, other, "beside", 2)
    options = {"subscribe": f"{topic},{other}", "groupId": group}
    first = driver(**options)
    end, _ = first.go_on(first.begin())
    make_anew(topics, topic, "new", 3)
    with pytest.raises(DataLossError):
        driver(**options).plan(end)
    # Three of the old topic's records were read, none of the new one's.
    assert topics.committed(group).get((topic, 0), 0) in (0, -1001)
    assert topics.committed(group)[other, 0] == 2
    first.reader.commit(end)
    assert topics.committed(group).get((topic, 0), 0) in (0, -1001)
    second = driver(**options, **LENIENT)
    end, _ = second.go_on(end)
    second.reader.commit(end)
    assert topics.committed(group) == {(topic, 0): 3, (other, 0): 2}


def test_a_running_stream_commits_the_same_offset_again_in_the_new_topic(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str]
) -> None:
    topic, group = topics.create(unique("t"), 1), unique("group")
    fill(topics, topic, "old", 3)
    running = driver(subscribe=topic, groupId=group, **LENIENT)
    end, _ = running.go_on(running.begin())
    running.reader.commit(end)
    assert topics.committed(group) == {(topic, 0): 3}
    make_anew(topics, topic, "new", 3)
    end, _ = running.go_on(end)
    running.reader.commit(end)
    assert topics.committed(group) == {(topic, 0): 3}


def test_a_topic_that_is_gone_is_no_reason_for_a_group_to_refuse(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str]
) -> None:
    topic, other, group = topics.create(unique("t"), 1), topics.create(unique("other"), 1), unique("group")
    fill(topics, topic, "old", 3)
    fill(topics, other, "beside", 2)
    options = {"subscribe": f"{topic},{other}", "groupId": group, **LENIENT}
    first = driver(**options)
    end, _ = first.go_on(first.begin())
    topics.delete(topic)
    second = driver(**options)
    assert second.go_on(end) == (end, [])
    assert topics.committed(group)[other, 0] == 2


def test_offsets_copied_from_a_checkpoint_are_for_the_topic_that_they_were_of(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str], bootstrap: str
) -> None:
    topic = topics.create(unique("t"), 1)
    old = fill(topics, topic, "old", 3)
    first = driver(subscribe=topic)
    copied = json.dumps(first.plan(first.begin())).replace('"0": 3', '"0": 2')
    assert first.go_on(driver(subscribe=topic, startingOffsets=copied).begin())[1] == old[2:]
    new = make_anew(topics, topic, "new", 5)
    with pytest.raises(DataLossError, match=f"topic {topic} was deleted .* startingOffsets is for the old"):
        driver(subscribe=topic, startingOffsets=copied).begin()
    lenient = driver(subscribe=topic, startingOffsets=copied, **LENIENT)
    assert lenient.go_on(lenient.begin())[1] == new
    batch = {"bootstrap": bootstrap, "subscribe": topic, "endingOffsets": copied}
    with pytest.raises(DataLossError, match="endingOffsets is for the old one"):
        PenstockReader(parse(batch, "batch")).partitions()
    with pytest.raises(SparkOptionError, match="topic t has no id 'x'"):
        driver(subscribe=topic, startingOffsets='{"t": {"0": 2}, "t@x": {}}')


# With Spark


def test_a_stream_of_spark_stops_with_one_clear_error_and_goes_on_as_that_says(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic, group = topics.create(unique("t"), 1), unique("group")
    fill(topics, topic, "old", 3)
    options = {"subscribe": topic, "groupId": group}
    stream.drain(**options)
    kept = sorted((stream.checkpoint / "offsets").glob("[0-9]*"))[-1].read_text().splitlines()[-1]
    assert json.loads(kept)[topic] == {"0": 3}
    new = make_anew(topics, topic, "new", 5)
    with pytest.raises(PySparkException, match=f"DataLossError: topic {topic} was deleted and made anew"):
        stream.drain(**options)
    assert stream.table.sizes == [3]
    stream.drain(**options, **LENIENT)
    assert stream.table.batches[1] == [(row[:3], row[3]) for row in new]
    assert topics.committed(group) == {(topic, 0): 5}


def test_a_running_stream_of_spark_reads_on_in_the_new_topic_and_after_a_crash_too(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "old", 3)
    query = stream.start(subscribe=topic, failOnDataLoss="false")
    wait_until(lambda: len(stream.table.rows) == 3, DEADLINE_S, "the old topic was read")
    # The first batch of the new topic is planned and taken, and not committed.
    stream.table.fail_after = 1
    new = make_anew(topics, topic, "new", 4)
    with pytest.raises(PySparkException, match="the table is full"):
        query.awaitTermination(int(DEADLINE_S))
    stream.table.fail_after = None
    stream.drain(subscribe=topic, **LENIENT)
    read = [row for row in stream.table.rows if row[1].startswith(b"new")]
    assert read == [(row[:3], row[3]) for row in new]


def test_sparks_kafka_source_goes_on_from_our_checkpoint(
    stream: Stream, topics: Topics, unique: Callable[[str], str]
) -> None:
    try:
        connector_jars()
    except Missing as missing:
        skip_or_fail(missing)
    topic = topics.create(unique("t"), 1)
    fill(topics, topic, "ours", 3)
    stream.drain(subscribe=topic)
    topics.send(topic, [b"theirs"])
    stream.drain(subscribe=topic, source="kafka")
    topics.send(topic, [b"ours again"])
    stream.drain(subscribe=topic)
    assert stream.table.sizes == [3, 1, 1]
    assert [value for _, value in stream.table.rows[3:]] == [b"theirs", b"ours again"]


# Jobs, whose runs have their own places to keep how far they came


def test_an_archive_holds_both_topics_and_its_table_the_new_one(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic, cold = topics.create(unique("t"), 1), tmp_path / "archive"
    fill(topics, topic, "old", 3)
    archive(spark, bootstrap, [topic], cold)
    make_anew(topics, topic, "new", 5)
    with pytest.raises(DataLossError, match="was deleted and made again"):
        archive(spark, bootstrap, [topic], cold)
    archive(spark, bootstrap, [topic], cold, fail_on_data_loss=False)
    topics.send(topic, [b"hot"])
    frame = table(spark, bootstrap, topic, cold)
    new = [b"new 0", b"new 1", b"new 2", b"new 3", b"new 4"]
    assert [bytes(row.value) for row in frame.orderBy("offset").collect()] == [*new, b"hot"]
    # The seam was found in the topic that there was when the table was made, and its plan comes later.
    frame = table(spark, bootstrap, topic, cold)
    make_anew(topics, topic, "newest", 9)
    with pytest.raises(PySparkException, match=f"topic {topic} was deleted and made anew"):
        frame.count()


def test_a_snapshot_is_of_the_topic_that_it_was_begun_with(
    spark: SparkSession,
    bootstrap: str,
    topics: Topics,
    unique: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, location = topics.create(unique("t"), 1), tmp_path / "snapshot"
    topics.send(topic, [b"old"] * 2, keys=[b"a", b"b"])
    real = Client.list_offsets

    def then_made_anew(client: Client, wanted: Any, **settings: Any) -> Any:
        found = real(client, wanted, **settings)
        if EARLIEST in wanted.values():  # what is asked last
            monkeypatch.undo()
            topics.delete(topic)
            topics.create(topic, 1)
            topics.send(topic, [b"new"] * 3, keys=[b"x", b"y", b"z"])
        return found

    monkeypatch.setattr(Client, "list_offsets", then_made_anew)
    with pytest.raises(PySparkException, match=f"topic {topic} was deleted and made anew"):
        snapshot(spark, bootstrap, topic, location)
    assert snapshot(spark, bootstrap, topic, location).is_new
    found = {bytes(row.key): bytes(row.value) for row in read_snapshot(spark, location).collect()}
    assert found == {b"x": b"new", b"y": b"new", b"z": b"new"}


@pytest.mark.parametrize("strict", [True, False], ids=["fail on data loss", "reads on"])
def test_a_replay_that_is_gone_on_with_skips_nothing_of_the_new_topic(
    spark: SparkSession, bootstrap: str, topics: Topics, unique: Callable[[str], str], strict: bool
) -> None:
    topic, target, run = topics.create(unique("t"), 1), topics.create(unique("target"), 1), unique("run")
    fill(topics, topic, "old", 5)
    told: list[int] = []

    def made_anew_at_the_first_word(done: int, _: int) -> None:
        told.append(done)
        if len(told) == 1:
            make_anew(topics, topic, "new", 6)

    first: dict[str, Any] = {"starting_offsets": json.dumps({topic: {"0": 4}}), "fail_on_data_loss": strict}
    if strict:
        with pytest.raises(ReplayFailed, match=f"{topic}-0 is gone: its topic was deleted and made anew"):
            replay(spark, bootstrap, topic, target, run_id=run, progress=made_anew_at_the_first_word, **first)
    else:
        replay(spark, bootstrap, topic, target, run_id=run, progress=made_anew_at_the_first_word, **first)
    assert replay(spark, bootstrap, topic, target, run_id=run).records == 6
    place = TopicPartition(target, 0)
    with Client(bootstrap) as client:
        assert client.list_offsets({place: LATEST})[place].offset == 6
