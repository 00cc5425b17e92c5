"""Topics that are deleted and recreated under a stream: the offsets of the old one mean nothing in the new one.

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
from penstock.spark.source import PenstockDataSource, PenstockReader, PenstockStreamReader
from penstock.wire import EARLIEST, LATEST, Client, TopicPartition
from penstock.wire.cluster import Cluster
from tests.spark.jars import connector_jars
from tests.spark.streams import DEADLINE_S, Stream
from tests.spark.topics import Topics
from tests.support import wait_until
from tests.tools import Missing, skip_or_fail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType

Json = dict[str, Any]
Row = tuple[str, int, int, bytes]
Warnings = Callable[[], list[str]]

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

    def first(self) -> tuple[Json, list[Row]]:
        """The first micro-batch of all."""
        return self.go_on(self.begin())

    def _kept(self, offset: Json) -> Json:
        """What a checkpoint gives back: the same text."""
        kept: Json = json.loads(json.dumps(offset))
        return kept


class Topic:
    """A name, and one topic after another that bears it. Records say of which one they are."""

    def __init__(self, topics: Topics, name: str) -> None:
        self._topics = topics
        self.name = name

    def make(self, what: str, *counts: int) -> list[Row]:
        """So many records in each partition, and the rows that they should become."""
        self._topics.create(self.name, len(counts))
        rows = []
        for partition, count in enumerate(counts):
            values = [f"{what} {number}".encode() for number in range(count)]
            if values:
                self.send(*values, partition=partition)
            rows += [(self.name, partition, number, value) for number, value in enumerate(values)]
        return rows

    def make_anew(self, *counts: int, what: str = "new") -> list[Row]:
        self.delete()
        return self.make(what, *counts)

    def send(self, *values: bytes, partition: int = 0) -> None:
        self._topics.send(self.name, values, partition=partition)

    def delete(self) -> None:
        self._topics.delete(self.name)


@pytest.fixture
def named(topics: Topics, unique: Callable[[str], str]) -> Callable[[str], Topic]:
    """Makes topics, each with a name of its own, that hold nothing yet."""
    return lambda kind: Topic(topics, unique(kind))


@pytest.fixture
def topic(named: Callable[[str], Topic]) -> Topic:
    """Three old records in its one partition."""
    topic = named("t")
    topic.make("old", 3)
    return topic


@pytest.fixture
def other(named: Callable[[str], Topic]) -> Topic:
    """Beside the one that is made anew: two records that nothing happens to."""
    other = named("other")
    other.make("beside", 2)
    return other


@pytest.fixture
def driver(bootstrap: str, impatient: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Makes drivers that do not wait long, and look at the brokers for every micro-batch."""
    monkeypatch.setattr(planning, "METADATA_AGE_S", 0.0)
    return lambda **options: Driver(bootstrap, **options)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    """What was told so far."""
    return lambda: [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_restarted_stream_tells_that_its_topic_is_another_and_what_to_do(
    driver: Callable[..., Driver], named: Callable[[str], Topic]
) -> None:
    topic = named("t")
    old = topic.make("old", 3)
    end, rows = driver(subscribe=topic.name).first()
    assert rows == old
    topic.make_anew(5)
    for _ in range(2):
        with pytest.raises(DataLossError) as caught:
            driver(subscribe=topic.name).plan(end)
        assert f"topic {topic.name} was deleted and recreated (id " in str(caught.value)
        assert str(caught.value).endswith(
            "To read the new one from its beginning set failOnDataLoss to false."
        )


@pytest.mark.parametrize("counts", [(5, 9), (3, 2), (1, 0), (0, 0), (7,), (0,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "running"])
def test_a_lenient_stream_reads_the_new_topic_from_its_beginning_once(
    driver: Callable[..., Driver],
    named: Callable[[str], Topic],
    warnings: Warnings,
    counts: tuple[int, ...],
    restarts: bool,
) -> None:
    topic = named("t")
    topic.make("old", 3, 2)
    options = {"subscribe": topic.name, **LENIENT}
    running = driver(**options)
    end, _ = running.first()
    new = topic.make_anew(*counts)
    if restarts:
        running = driver(**options)
    stood_at, end = end, running.plan(end)
    assert end != stood_at  # or Spark would not run the batch
    assert running.read(stood_at, end) == new
    assert from_json(end).offsets == {(topic.name, number): count for number, count in enumerate(counts)}
    told = warnings()
    assert len(told) == 1
    assert f"topic {topic.name} was deleted and recreated" in told[0]
    assert told[0].endswith("Reading the new one from its beginning, as failOnDataLoss is false.")
    # From here on it is any topic, also for a strict stream.
    for later in (running, driver(**options), driver(subscribe=topic.name)):
        assert later.go_on(end) == (end, [])
    assert warnings() == told


def test_a_new_topic_is_read_within_the_limits_of_a_trigger(
    driver: Callable[..., Driver], named: Callable[[str], Topic], warnings: Warnings
) -> None:
    topic = named("t")
    topic.make("old", 4, 4)
    options = {"subscribe": topic.name, "maxOffsetsPerTrigger": "4", **LENIENT}
    running = driver(**options)
    end, _ = running.first()
    end, _ = running.go_on(end)
    new = topic.make_anew(6, 6)
    rows: list[Row] = []
    for _ in range(3):
        end, more = driver(**options).go_on(end)
        assert len(more) == 4
        rows += more
    assert sorted(rows) == new
    assert len(warnings()) == 1


def test_offsets_without_ids_are_gone_on_from_and_get_them(
    driver: Callable[..., Driver], named: Callable[[str], Topic]
) -> None:
    topic = named("t")
    all_rows = topic.make("old", 3, 4)
    name = topic.name
    end, rows = driver(subscribe=name).go_on({name: {"0": 2, "1": 4}})
    assert rows == [all_rows[2]]
    assert end[name] == {"0": 3, "1": 4}
    assert list(from_json(end).topic_ids) == [name]
    # An unfinished batch of such a stream is repeated as it was planned.
    assert driver(subscribe=name).read({name: {"0": 1}}, {name: {"0": 2}}) == [all_rows[1]]
    topic.make_anew(3, 4)
    with pytest.raises(DataLossError, match="was deleted and recreated"):
        driver(subscribe=name).plan(end)


def test_a_stream_from_offsets_without_ids_that_waits_for_more_gets_them_too(
    driver: Callable[..., Driver], topic: Topic, warnings: Warnings
) -> None:
    running = driver(subscribe=topic.name, minOffsetsPerTrigger="5", maxTriggerDelay="1h", **LENIENT)
    start = running.plan({topic.name: {"0": 3}})
    assert start[topic.name] == {"0": 3}
    assert running.plan(start) == start
    new = topic.make_anew(4)
    for _ in range(3):
        assert running.plan(start) == start
    topic.send(b"one more")
    _, rows = running.go_on(start)
    assert rows == [*new, (topic.name, 0, 4, b"one more")]
    assert len(warnings()) == 1


def test_an_unfinished_batch_of_the_old_topic_is_lost_and_the_new_one_read_behind_it(
    driver: Callable[..., Driver], topic: Topic, named: Callable[[str], Topic], warnings: Warnings
) -> None:
    other = named("other")
    beside = other.make("beside", 2)
    options = {"subscribe": f"{topic.name},{other.name}"}
    first = driver(**options)
    start = first.begin()
    end = first.plan(start)  # written down, and then the driver dies
    new = topic.make_anew(4)
    with pytest.raises(DataLossError, match=f"topic {topic.name} was deleted and recreated"):
        driver(**options).read(start, end)
    # Of the very first batch Spark knows no start: the reader is asked anew, and finds the new topic.
    asked_anew = driver(**options)
    begin = asked_anew.begin()
    (was,), (now,) = (
        {key.partition("@")[2] for key in each if key.startswith(f"{topic.name}@")} for each in (end, begin)
    )
    with pytest.raises(
        DataLossError, match=f"recreated .id {was}, now {now}., and a micro-batch of the old one"
    ):
        asked_anew.read(begin, end)
    second = driver(**options, **LENIENT)
    assert second.read(start, end) == beside
    assert second.go_on(end)[1] == new
    assert len(warnings()) == 1
    third = driver(**options, **LENIENT)
    assert third.read(third.begin(), end) == beside
    assert third.go_on(end)[1] == new


def test_an_unfinished_batch_of_the_new_topic_is_repeated_from_its_beginning(
    driver: Callable[..., Driver], topic: Topic, warnings: Warnings, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"subscribe": topic.name, **LENIENT}
    first = driver(**options)
    start = first.plan(first.begin())
    new = topic.make_anew(3)
    end = driver(**options).plan(start)
    caplog.clear()
    second = driver(**options)
    assert second.read(start, end) == new
    assert second.go_on(end) == (end, [])
    assert len(warnings()) == 1
    # Once more, before the batch is done: what it was to read is gone, and so was what came before.
    newest = topic.make_anew(5, what="newest")
    third = driver(**options)
    assert third.read(start, end) == []
    assert third.go_on(end)[1] == newest


def test_a_task_of_the_old_topic_reads_nothing_of_the_new_one(
    driver: Callable[..., Driver], topic: Topic
) -> None:
    running = driver(subscribe=topic.name, **LENIENT)
    start = running.begin()
    end = running.plan(start)
    planned = running.reader.partitions(start, end)
    new = topic.make_anew(4)
    assert [batch for each in planned for batch in running.reader.read(each)] == []
    assert running.go_on(end)[1] == new


def test_a_broker_that_is_behind_is_not_taken_at_its_word(
    driver: Callable[..., Driver],
    topic: Topic,
    warnings: Warnings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = driver(subscribe=topic.name, **LENIENT)
    running.plan(running.begin())
    behind = running.reader._planner()._client.topics([topic.name])
    topic.make_anew(4)
    end = running.plan(driver(subscribe=topic.name).begin())
    caplog.clear()
    real, answers = Client.topics, [behind, behind]

    def late(*given: Any, **settings: Any) -> Any:
        return answers.pop() if answers else real(*given, **settings)

    monkeypatch.setattr(Client, "topics", late)
    # It hears the truth at the third look, however slowly that comes.
    monkeypatch.setattr(planning, "GONE_AFTER_S", DEADLINE_S)
    assert driver(subscribe=topic.name, **LENIENT).go_on(end) == (end, [])
    assert not answers
    assert warnings() == []


def test_a_topic_of_a_pattern_may_vanish_and_come_back_as_another(
    driver: Callable[..., Driver], topics: Topics, unique: Callable[[str], str], warnings: Warnings
) -> None:
    prefix = unique("t")
    here, there = Topic(topics, f"{prefix}-here"), Topic(topics, f"{prefix}-there")
    here.make("old", 1)
    there.make("old", 3, 3)
    options = {"subscribePattern": f"{prefix}-.*", **LENIENT}
    running = driver(**options)
    end, rows = running.first()
    assert len(rows) == 7
    there.delete()
    here.send(b"meanwhile")
    end, rows = running.go_on(end)
    assert rows == [(here.name, 0, 1, b"meanwhile")]
    assert end[there.name] == {"0": 3, "1": 3}
    # Whether or not the stream was stopped meanwhile.
    new = there.make("new", 4, 3)
    stopped = driver(**options)
    assert running.go_on(end)[1] == stopped.go_on(end)[1] == new
    strict = driver(subscribePattern=f"{prefix}-.*")
    with pytest.raises(DataLossError, match=f"topic {there.name} was deleted and recreated"):
        strict.plan(end)
    gone, *made_anew = warnings()
    assert "gone: topics were deleted" in gone
    assert len(made_anew) == 2  # one of each reader


def test_a_topic_that_could_not_be_seen_for_a_while_is_still_the_same(
    driver: Callable[..., Driver], topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = driver(subscribe=topic.name, **LENIENT)
    end, _ = running.first()
    with monkeypatch.context() as patch:
        patch.setattr(Client, "topics", lambda *_, **__: {})
        assert running.plan(end) == end
    topic.send(b"later")
    assert running.go_on(end)[1] == [(topic.name, 0, 3, b"later")]


@pytest.mark.parametrize("strict", [True, False], ids=["failOnDataLoss", "reads on"])
def test_a_topic_made_anew_during_an_available_now_run_is_for_the_next_run(
    driver: Callable[..., Driver], topic: Topic, warnings: Warnings, strict: bool
) -> None:
    options = {"subscribe": topic.name, "failOnDataLoss": str(strict).lower()}
    run = driver(**options)
    run.reader.prepareForTriggerAvailableNow()
    end, _ = run.first()
    new = topic.make_anew(5)
    if strict:
        with pytest.raises(DataLossError, match=f"topic {topic.name} was deleted and recreated"):
            run.plan(end)
        return
    assert run.go_on(end) == (end, [])
    following = driver(**options)
    following.reader.prepareForTriggerAvailableNow()
    assert following.go_on(end)[1] == new
    assert len(warnings()) == 1


def test_a_topic_made_anew_during_an_available_now_run_holds_up_the_rest_of_it_only_once(
    driver: Callable[..., Driver], named: Callable[[str], Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, other = named("t"), named("other")
    topic.make("old", 1)
    beside = other.make("beside", 9)
    run = driver(subscribe=f"{topic.name},{other.name}", maxOffsetsPerTrigger="4", **LENIENT)
    run.reader.prepareForTriggerAvailableNow()
    end, rows = run.first()
    topic.make_anew(5)
    end, more = run.go_on(end)
    rows += more

    def sleep(_: float) -> None:
        raise AssertionError("it waits for a broker that was behind once more")

    monkeypatch.setattr("time.sleep", sleep)
    while more:
        end, more = run.go_on(end)
        rows += more
    assert [row for row in rows if row[0] == other.name] == beside


def test_offsets_without_ids_are_of_the_topic_that_was_seen_first(
    driver: Callable[..., Driver], topic: Topic, unique: Callable[[str], str], warnings: Warnings
) -> None:
    running = driver(subscribe=topic.name, groupId=unique("group"), **LENIENT)
    start = {topic.name: {"0": 3}}
    running.reader.commit(start)  # which looks at the topic
    new = topic.make_anew(5)
    end, rows = running.go_on(start)
    assert rows == new
    assert running.go_on(end) == (end, [])
    assert len(warnings()) == 1


def test_brokers_that_know_no_ids_change_nothing(
    driver: Callable[..., Driver],
    named: Callable[[str], Topic],
    warnings: Warnings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a cluster that is upgraded broker by broker: some answers have ids, some have none."""
    topic = named("t")
    rows = topic.make("old", 3)
    with_ids = driver(subscribe=topic.name)
    start = with_ids.begin()
    end = with_ids.plan(start)
    real = Cluster.learn

    def without_ids(cluster: Cluster, response: Any) -> None:
        for each in response.topics:
            each.topic_id = NO_TOPIC_ID
        real(cluster, response)

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "learn", without_ids)
        running = driver(subscribe=topic.name)
        # What was planned when there were ids, now and after a crash.
        assert running.read(start, end) == rows
        assert with_ids.read(start, end) == rows
        assert running.plan(end) == end
        # A stream that never saw any does without them.
        never = driver(subscribe=topic.name)
        assert never.go_on({topic.name: {"0": 1}}) == ({topic.name: {"0": 3}}, rows[1:])
    assert running.plan(end) == end
    assert driver(subscribe=topic.name).go_on({topic.name: {"0": 1}}) == (end, rows[1:])
    assert warnings() == []


def test_the_group_stands_only_where_the_stream_has_read_the_topic_of_today(
    driver: Callable[..., Driver], topics: Topics, topic: Topic, other: Topic, unique: Callable[[str], str]
) -> None:
    group = unique("group")
    options = {"subscribe": f"{topic.name},{other.name}", "groupId": group}
    first = driver(**options)
    end, _ = first.first()
    topic.make_anew(3)
    with pytest.raises(DataLossError):
        driver(**options).plan(end)
    # Three of the old topic's records were read, none of the new one's.
    assert topics.committed(group).get((topic.name, 0), 0) in (0, -1001)
    assert topics.committed(group)[other.name, 0] == 2
    first.reader.commit(end)
    assert topics.committed(group).get((topic.name, 0), 0) in (0, -1001)
    second = driver(**options, **LENIENT)
    end, _ = second.go_on(end)
    second.reader.commit(end)
    assert topics.committed(group) == {(topic.name, 0): 3, (other.name, 0): 2}


def test_a_running_stream_commits_the_same_offset_again_in_the_new_topic(
    driver: Callable[..., Driver], topics: Topics, topic: Topic, unique: Callable[[str], str]
) -> None:
    group = unique("group")
    running = driver(subscribe=topic.name, groupId=group, **LENIENT)
    end, _ = running.first()
    running.reader.commit(end)
    assert topics.committed(group) == {(topic.name, 0): 3}
    topic.make_anew(3)
    end, _ = running.go_on(end)
    running.reader.commit(end)
    assert topics.committed(group) == {(topic.name, 0): 3}


def test_a_topic_that_is_gone_is_no_reason_for_a_group_to_refuse(
    driver: Callable[..., Driver], topics: Topics, topic: Topic, other: Topic, unique: Callable[[str], str]
) -> None:
    group = unique("group")
    options = {"subscribe": f"{topic.name},{other.name}", "groupId": group, **LENIENT}
    end, _ = driver(**options).first()
    topic.delete()
    second = driver(**options)
    assert second.go_on(end) == (end, [])
    assert topics.committed(group)[other.name, 0] == 2


def test_offsets_copied_from_a_checkpoint_are_for_the_topic_that_they_were_of(
    driver: Callable[..., Driver], named: Callable[[str], Topic], bootstrap: str
) -> None:
    topic = named("t")
    old = topic.make("old", 3)
    name = topic.name
    first = driver(subscribe=name)
    copied = json.dumps(first.plan(first.begin())).replace('"0": 3', '"0": 2')
    assert first.go_on(driver(subscribe=name, startingOffsets=copied).begin())[1] == old[2:]
    new = topic.make_anew(5)
    with pytest.raises(DataLossError, match=f"topic {name} was deleted .* startingOffsets is for the old"):
        driver(subscribe=name, startingOffsets=copied).begin()
    lenient = driver(subscribe=name, startingOffsets=copied, **LENIENT)
    assert lenient.go_on(lenient.begin())[1] == new
    batch = {"bootstrap": bootstrap, "subscribe": name, "endingOffsets": copied}
    with pytest.raises(DataLossError, match="endingOffsets is for the old one"):
        PenstockReader(parse(batch, "batch")).partitions()
    with pytest.raises(SparkOptionError, match="topic t has no id 'x'"):
        driver(subscribe=name, startingOffsets='{"t": {"0": 2}, "t@x": {}}')


# With Spark


@pytest.fixture
def hasty(spark: SparkSession) -> str:
    """The name of a source that believes sooner that a topic is another.

    Spark plans a stream in a process of its own, where only what is pickled can change how long it waits.
    """

    class HastySource(PenstockDataSource):
        @classmethod
        def name(cls) -> str:
            return "penstock-hasty"

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            planning.GONE_AFTER_S = 0.5  # type: ignore[attr-defined]
            return super().streamReader(schema)

    spark.dataSource.register(HastySource)
    return HastySource.name()


@pytest.fixture
def stream(spark: SparkSession, bootstrap: str, tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(spark, bootstrap, tmp_path / "checkpoint")
    yield stream
    stream.stop()


def test_a_stream_of_spark_stops_with_one_clear_error_and_goes_on_as_that_says(
    stream: Stream, hasty: str, topics: Topics, topic: Topic, unique: Callable[[str], str]
) -> None:
    name, group = topic.name, unique("group")
    options = {"source": hasty, "subscribe": name, "groupId": group}
    stream.drain(**options)
    kept = sorted((stream.checkpoint / "offsets").glob("[0-9]*"))[-1].read_text().splitlines()[-1]
    assert json.loads(kept)[name] == {"0": 3}
    new = topic.make_anew(5)
    with pytest.raises(PySparkException, match=f"DataLossError: topic {name} was deleted and recreated"):
        stream.drain(**options)
    assert stream.table.sizes == [3]
    stream.drain(**options, **LENIENT)
    assert stream.table.batches[1] == [(row[:3], row[3]) for row in new]
    assert topics.committed(group) == {(name, 0): 5}


def test_a_running_stream_of_spark_reads_on_in_the_new_topic_and_after_a_crash_too(
    stream: Stream, hasty: str, topic: Topic
) -> None:
    query = stream.start(source=hasty, subscribe=topic.name, failOnDataLoss="false")
    wait_until(lambda: len(stream.table.rows) == 3, DEADLINE_S, "the old topic was read")
    # The first batch of the new topic is planned and taken, and not committed.
    stream.table.fail_after = 1
    new = topic.make_anew(4)
    with pytest.raises(PySparkException, match="the table is full"):
        query.awaitTermination(int(DEADLINE_S))
    stream.table.fail_after = None
    stream.drain(source=hasty, subscribe=topic.name, **LENIENT)
    read = [row for row in stream.table.rows if row[1].startswith(b"new")]
    assert read == [(row[:3], row[3]) for row in new]


def test_sparks_kafka_source_goes_on_from_our_checkpoint(stream: Stream, topic: Topic) -> None:
    try:
        connector_jars()
    except Missing as missing:
        skip_or_fail(missing)
    stream.drain(subscribe=topic.name)
    topic.send(b"theirs")
    stream.drain(subscribe=topic.name, source="kafka")
    topic.send(b"ours again")
    stream.drain(subscribe=topic.name)
    assert stream.table.sizes == [3, 1, 1]
    assert [value for _, value in stream.table.rows[3:]] == [b"theirs", b"ours again"]


# Jobs, whose runs have their own places to keep how far they came


def test_an_archive_holds_both_topics_and_its_table_the_new_one(
    spark: SparkSession, bootstrap: str, topic: Topic, tmp_path: Path
) -> None:
    name, cold = topic.name, tmp_path / "archive"
    archive(spark, bootstrap, [name], cold)
    topic.make_anew(5)
    with pytest.raises(DataLossError, match="was deleted and recreated"):
        archive(spark, bootstrap, [name], cold)
    archive(spark, bootstrap, [name], cold, fail_on_data_loss=False)
    topic.send(b"hot")
    frame = table(spark, bootstrap, name, cold)
    new = [b"new 0", b"new 1", b"new 2", b"new 3", b"new 4"]
    assert [bytes(row.value) for row in frame.orderBy("offset").collect()] == [*new, b"hot"]
    # The seam was found in the topic that there was when the table was made, and its plan comes later.
    frame = table(spark, bootstrap, name, cold)
    topic.make_anew(9, what="newest")
    with pytest.raises(PySparkException, match=f"topic {name} was deleted and recreated"):
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
    with pytest.raises(PySparkException, match=f"topic {topic} was deleted and recreated"):
        snapshot(spark, bootstrap, topic, location)
    assert snapshot(spark, bootstrap, topic, location).is_new
    found = {bytes(row.key): bytes(row.value) for row in read_snapshot(spark, location).collect()}
    assert found == {b"x": b"new", b"y": b"new", b"z": b"new"}


@pytest.mark.parametrize("strict", [True, False], ids=["fail on data loss", "reads on"])
def test_a_replay_that_is_gone_on_with_skips_nothing_of_the_new_topic(
    spark: SparkSession,
    bootstrap: str,
    topics: Topics,
    named: Callable[[str], Topic],
    unique: Callable[[str], str],
    strict: bool,
) -> None:
    topic, target, run = named("t"), topics.create(unique("target"), 1), unique("run")
    name = topic.name
    topic.make("old", 5)
    told: list[int] = []

    def made_anew_at_the_first_word(done: int, _: int) -> None:
        told.append(done)
        if len(told) == 1:
            topic.make_anew(6)

    first: dict[str, Any] = {"starting_offsets": json.dumps({name: {"0": 4}}), "fail_on_data_loss": strict}
    if strict:
        with pytest.raises(ReplayFailed, match=f"{name}-0 is gone: its topic was deleted and recreated"):
            replay(spark, bootstrap, name, target, run_id=run, progress=made_anew_at_the_first_word, **first)
    else:
        replay(spark, bootstrap, name, target, run_id=run, progress=made_anew_at_the_first_word, **first)
    assert replay(spark, bootstrap, name, target, run_id=run).records == 6
    place = TopicPartition(target, 0)
    with Client(bootstrap) as client:
        assert client.list_offsets({place: LATEST})[place].offset == 6
