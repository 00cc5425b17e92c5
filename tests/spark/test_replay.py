"""The replay job: what arrives, by offsets and by time, how fast, and what happens when it cannot go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

from penstock.cli import spark_session
from penstock.model import TopicPartition
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.jobs.replay import ReplayFailed, ReplayResult, _Run, replay, shared_out
from penstock.spark.jobs.replay_task import Pace, Plan, Work, prepared, work
from penstock.spark.producing import ProduceSettings
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings, schema
from penstock.wire import Client, operations
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import Outgoing, Record
from tests.interop.murmur2 import partition_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Unique = Callable[[str], str]

TIMESTAMP_MS = 1_700_000_000_000
OURS = ("x-replay-topic", "x-replay-partition", "x-replay-offset", "x-replay-run")


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ConfluentClient]:
    client = ConfluentClient(bootstrap)
    yield client
    client.close()


@pytest.fixture
def source(client: ConfluentClient, unique: Unique) -> str:
    """Ninety records over three partitions, a second apart; every third without a key, every fifth a tombstone."""
    topic = unique("source")
    client.create_topic(topic, partitions=3)
    records = [
        Outgoing(
            None if number % 5 == 0 else b"value-%d" % number,
            None if number % 7 == 0 else b"key-%d" % (number % 11),
            (("n", b"%d" % number),) if number % 2 else (),
            number % 3,
            TIMESTAMP_MS + number * 1000,
        )
        for number in range(90)
    ]
    client.produce(topic, records, codec="lz4")
    return topic


def stored(client: ConfluentClient, topic: str) -> list[Record]:
    """All that the topic holds, one partition after the other."""
    found: list[Record] = []
    for partition in client.describe_topic(topic):
        count = client.offset(topic, partition, "latest") or 0
        found += client.consume(topic, {partition: 0}, count) if count else []
    return found


def origin(record: Record) -> tuple[str, int, int, str]:
    """Where a replayed record says it comes from."""
    ours = dict(record.headers[-len(OURS) :])
    assert tuple(ours) == OURS
    topic, partition, offset, run = (str(ours[name], "utf-8") for name in OURS)  # type: ignore[arg-type]
    return topic, int(partition), int(offset), run


def without_origin(record: Record) -> Record:
    return record._replace(headers=record.headers[: -len(OURS)])


def test_a_replayed_topic_is_the_same_and_says_where_it_comes_from(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    told: list[tuple[int, int]] = []

    result = replay(
        spark,
        bootstrap,
        source,
        target,
        create_target=True,
        compression="zstd",
        run_id="first",
        progress=lambda done, total: told.append((done, total)),
    )

    records, expected = stored(client, target), stored(client, source)
    assert [without_origin(record) for record in records] == expected
    assert [origin(record) for record in records] == [
        (source, record.partition, record.offset, "first") for record in expected
    ]
    assert (result.records, result.source, result.target, result.run_id) == (90, source, target, "first")
    assert result.bytes == sum(len(record.key or b"") + len(record.value or b"") for record in expected)
    assert result.keeps_timestamps and not result.is_dry_run
    columns, rows = result.as_table()
    assert [row[columns.index("next_offset")] for row in rows] == [30, 30, 30]
    assert told[0] == (0, 90) and told[-1] == (90, 90)


def test_a_replay_begins_and_ends_where_it_is_told(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    by_offset, by_time = unique("target"), unique("target")
    client.create_topic(by_offset, partitions=3)
    client.create_topic(by_time, partitions=3)

    replay(
        spark,
        bootstrap,
        source,
        by_offset,
        starting_offsets=json.dumps({source: {"0": 28, "1": 0, "2": -2}}),
        ending_offsets=json.dumps({source: {"0": -1, "1": 1, "2": 0}}),
    )
    replay(
        spark,
        bootstrap,
        source,
        by_time,
        starting_timestamp=TIMESTAMP_MS + 40_000,
        ending_timestamp=TIMESTAMP_MS + 50_000,
    )

    assert [origin(record)[1:3] for record in stored(client, by_offset)] == [(0, 28), (0, 29), (1, 0)]
    numbers = sorted((record.timestamp - TIMESTAMP_MS) // 1000 for record in stored(client, by_time))
    assert numbers == list(range(40, 50))


def test_a_replay_may_choose_partitions_and_send_by_key(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=2)

    result = replay(spark, bootstrap, source, target, partitions=[1, 2], keep_partitions=False)
    # Those that are replayed must be there, and no others.
    assert replay(spark, bootstrap, source, target, partitions=[1], dry_run=True).records == 30

    records = stored(client, target)
    assert result.records == len(records) == 60
    assert {origin(record)[1] for record in records} == {1, 2}
    assert all(
        record.partition == partition_of(record.key, 2) for record in records if record.key is not None
    )
    # The order of each partition is kept.
    for partition in (0, 1):
        for came_from in (1, 2):
            places = [origin(each) for each in records if each.partition == partition]
            offsets = [offset for _, number, offset, _ in places if number == came_from]
            assert offsets == sorted(offsets)


def test_a_dry_run_counts_and_sends_nothing(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3)

    result = replay(spark, bootstrap, source, target, dry_run=True, records_per_second=0.001, run_id="dry")

    assert result.is_dry_run and result.records == 90
    assert stored(client, target) == []
    # And leaves no trace for a real run of that name.
    assert replay(spark, bootstrap, source, target, run_id="dry").records == 90


def test_a_limited_replay_takes_its_time(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3)

    result = replay(spark, bootstrap, source, target, records_per_second=45)

    # A lower bound is no timing assertion: a slow machine only makes it longer.
    assert result.seconds >= 1.9
    assert len(stored(client, target)) == 90


def test_a_replay_in_several_rounds_sends_each_record_once(
    spark: SparkSession,
    bootstrap: str,
    client: ConfluentClient,
    unique: Unique,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3)
    told: list[int] = []
    monkeypatch.setattr(sys.modules[replay.__module__], "ROUND_SECONDS", 0.2)

    replay(
        spark, bootstrap, source, target, records_per_second=90, progress=lambda done, _: told.append(done)
    )

    assert len(told) > 3 and told == sorted(told)
    assert [without_origin(record) for record in stored(client, target)] == stored(client, source)


def test_a_replay_that_fails_says_what_was_sent_and_goes_on_by_its_run_id(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique
) -> None:
    source, target = unique("source"), unique("target")
    client.create_topic(source, partitions=2)
    client.create_topic(target, partitions=2, configs={"max.message.bytes": "2000"})
    values = [b"a", b"b", b"x" * 3000, b"c"]
    client.produce(source, [Outgoing(value, partition=0) for value in values])
    client.produce(source, [Outgoing(value, partition=1) for value in (b"d", b"e")])

    with pytest.raises(
        ReplayFailed, match=r"source.*-0: a record for .* allows 2000.*run_id='wide'"
    ) as caught:
        replay(spark, bootstrap, source, target, run_id="wide", records_per_second=15)
    failed = caught.value.result
    client.alter_config(target, "max.message.bytes", "1000000")
    result = replay(spark, bootstrap, source, target, run_id="wide")

    assert {each.partition: each.next_offset for each in failed.partitions} == {0: 2, 1: 2}
    assert (failed.records, result.records) == (4, 2)
    assert [record.value for record in stored(client, target)] == [*values, b"d", b"e"]
    group = f"penstock-replay-wide-{target}"
    assert client.committed(group, source, [0, 1]) == {0: 4, 1: 2}
    # All of it is done now.
    assert replay(spark, bootstrap, source, target, run_id="wide").records == 0


class DyingSpark:
    """A session whose jobs fail, as when an executor is lost once too often."""

    defaultParallelism = 2

    @property
    def sparkContext(self) -> DyingSpark:
        return self

    def range(self, *_: int) -> DyingSpark:
        return self

    def mapInArrow(self, *_: object) -> DyingSpark:
        return self

    def collect(self) -> None:
        raise RuntimeError("Job aborted due to stage failure: executor lost\nand a long story")


def test_a_replay_whose_tasks_die_can_be_gone_on_with(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3)

    with pytest.raises(
        ReplayFailed, match=r"after 0 records.*: executor lost. Continue with run_id"
    ) as caught:
        replay(DyingSpark(), bootstrap, source, target)  # type: ignore[arg-type]
    assert replay(spark, bootstrap, source, target, run_id=caught.value.result.run_id).records == 90


def test_a_dry_run_does_not_make_the_target(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")

    assert replay(spark, bootstrap, source, target, dry_run=True, create_target=True).records == 90
    assert target not in client.topics()


def test_a_target_that_keeps_its_own_time_is_told_of(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3, configs={"message.timestamp.type": "LogAppendTime"})

    assert not replay(spark, bootstrap, source, target, partitions=[0]).keeps_timestamps
    assert all(record.timestamp > TIMESTAMP_MS + 90_000 for record in stored(client, target))


def test_replayed_records_that_are_gone_stop_the_replay_unless_told_otherwise(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3)
    client.delete_records(source, {0: 10})
    offsets = json.dumps({source: {"0": 0, "1": 30, "2": 30}})

    with pytest.raises(RuntimeError, match="offset 0 of"):
        replay(spark, bootstrap, source, target, starting_offsets=offsets)
    result = replay(spark, bootstrap, source, target, starting_offsets=offsets, fail_on_data_loss=False)

    assert result.records == 20


def refusal(spark: SparkSession, bootstrap: str, source: str, target: str, **options: Any) -> str:
    with pytest.raises(SparkOptionError) as caught:
        replay(spark, bootstrap, source, target, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_replay_that_goes_on_says_what_retention_took_from_it(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, source: str, unique: Unique
) -> None:
    target = unique("target")
    client.create_topic(target, partitions=3)
    with Client(bootstrap) as wire:
        wire.commit(f"penstock-replay-late-{target}", {TopicPartition(source, 0): 10})
    client.delete_records(source, {0: 20})

    with pytest.raises(DataLossError, match=rf"records {source}-0 \[10, 20\) are gone"):
        replay(spark, bootstrap, source, target, run_id="late")
    # A run that is not gone on with, or begins elsewhere, has missed nothing.
    assert replay(spark, bootstrap, source, target, run_id="new", dry_run=True).records == 70
    lenient = replay(spark, bootstrap, source, target, run_id="late", fail_on_data_loss=False)
    assert lenient.records == 70


def test_ctrl_c_is_one_also_if_a_call_on_the_way_out_fails() -> None:
    """py4j hangs up on a call that is interrupted, and pyspark makes one more before it lets go."""

    class Frame:
        def collect(self) -> None:
            try:
                raise KeyboardInterrupt
            finally:
                raise Py4JNetworkError("Answer from Java side is empty")

    frame = Frame()
    spark: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(defaultParallelism=1),
        range=lambda *_: SimpleNamespace(mapInArrow=lambda *_: frame),
    )
    run: Any = _Run(spark, *[None] * 5)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run._round([OffsetRange("t", 0, 0, 1)])
    with pytest.raises(KeyboardInterrupt), spark_session._explained(None):
        frame.collect()


def test_a_source_made_anew_is_not_replayed_in_place_of_the_one_that_was_planned(
    bootstrap: str, client: ConfluentClient, source: str, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two rounds."""
    monkeypatch.setattr(operations, "UNKNOWN_TOPIC_MS", 200)
    target = unique("target")
    client.create_topic(target, partitions=3)
    reading = ReadSettings(bootstrap, headers=True, read_committed=True)
    plan = Plan(
        reading=reading,
        produce=ProduceSettings(bootstrap),
        source_id=reading.client().topics([source])[source].topic_id,
        target=target,
        run_id="run",
        keep_partitions=True,
        is_dry_run=False,
        round_s=60.0,
    )
    client.delete_topic(source)
    client.create_topic(source, partitions=3)
    client.produce(source, [Outgoing(b"of another topic", None, (), 0, TIMESTAMP_MS)] * 30)
    works = [Work((OffsetRange(source, 0, 10, 30),), None, None)]
    (reports,) = work(plan, works, iter([pa.record_batch({"id": [0]})]))
    (report,) = reports.to_pylist()
    assert (report["next_offset"], report["records"]) == (10, 0)
    assert f"{source}-0 is gone: its topic was deleted and recreated" in report["error"]
    assert stored(client, target) == []


def test_a_target_that_was_just_made_need_not_be_known_to_every_broker(
    spark: SparkSession, bootstrap: str, unique: Unique, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, topics, create, late = unique("target"), Client.topics, Client.create_topic, [0]

    def ask_one_that_is_behind(client: Client, names: Iterable[str], **given: Any) -> dict[str, Any]:
        found = topics(client, names, **given)
        if target in found and late[0]:
            late[0] -= 1
            del found[target]
        return found

    def create_and_ask_another(client: Client, name: str, *given: Any) -> bool:
        late[0] = 2
        return create(client, name, *given)

    monkeypatch.setattr(Client, "topics", ask_one_that_is_behind)
    monkeypatch.setattr(Client, "create_topic", create_and_ask_another)
    assert replay(spark, bootstrap, source, target, create_target=True).records == 90


@pytest.mark.usefixtures("impatient")
def test_what_makes_no_sense_is_refused_with_advice(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, unique: Unique, source: str
) -> None:
    narrow = unique("target")
    client.create_topic(narrow, partitions=2)

    assert "pass into_itself=True" in refusal(spark, bootstrap, source, source)
    assert "keep_partitions=False" in refusal(spark, bootstrap, source, narrow)
    assert "create_target=True" in refusal(spark, bootstrap, source, unique("missing"))
    assert "does not exist" in refusal(spark, bootstrap, unique("missing"), narrow)
    assert "above 0" in refusal(spark, bootstrap, source, narrow, records_per_second=0)
    assert "above 0" in refusal(spark, bootstrap, source, narrow, bytes_per_second=-1)
    assert "none, gzip" in refusal(spark, bootstrap, source, narrow, compression="rar")
    assert "not both" in refusal(
        spark, bootstrap, source, narrow, starting_timestamp=5, starting_offsets='{"x": {"0": 1}}'
    )
    assert "run_id" in refusal(spark, bootstrap, source, narrow, run_id="")
    assert "partition 7" in refusal(spark, bootstrap, source, narrow, partitions=[7], keep_partitions=False)


def test_a_topic_is_replayed_into_itself_once_if_wanted(
    spark: SparkSession, bootstrap: str, client: ConfluentClient, source: str
) -> None:
    assert replay(spark, bootstrap, source, source, into_itself=True).records == 90
    assert len(stored(client, source)) == 180


# Without Spark and brokers


def test_work_is_shared_out_with_limits_in_proportion() -> None:
    ranges = [OffsetRange("t", number, 0, size) for number, size in enumerate((10, 60, 20, 10))]

    works = shared_out(ranges, 3, 100.0, None)

    assert [[each.partition for each in work.ranges] for work in works] == [[1], [2], [0, 3]]
    assert [work.records_per_second for work in works] == [60.0, 20.0, 20.0]
    assert all(work.bytes_per_second is None for work in works)
    assert len(shared_out(ranges[:2], 8, None, 5.0)) == 2


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def rows(count: int, value: bytes = b"", headers: list[Any] | None = None) -> pa.RecordBatch:
    columns: Mapping[str, Any] = {
        "key": [None] * count,
        "value": [value] * count,
        "topic": ["events"] * count,
        "partition": [3] * count,
        "offset": range(count),
        "timestamp": [0] * count,
        "timestampType": [0] * count,
        "headers": headers or [None] * count,
    }
    return pa.RecordBatch.from_pydict(
        {field.name: pa.array(columns[field.name], field.type) for field in schema(True)}
    )


def test_a_pace_never_runs_ahead_of_either_limit() -> None:
    time = Time()
    pace = Pace(100.0, 1000.0, clock=time.clock, sleep=time.sleep)

    assert pace.portion(rows(50, b"x")) == 10
    assert pace.portion(rows(50, b"x" * 50)) == 2
    assert pace.portion(rows(50, b"x" * 5000)) == 1
    pace.sent(50, 50)
    assert time.now == pytest.approx(0.5)
    pace.sent(1, 1500)
    assert time.now == pytest.approx(2.0)
    pace.sent(100, 0)
    assert time.now == pytest.approx(3.0)


def test_a_pace_does_not_make_up_for_a_stall() -> None:
    time = Time()
    pace = Pace(100.0, None, clock=time.clock, sleep=time.sleep)
    pace.sent(10, 0)
    time.now += 60.0

    for _ in range(20):
        pace.sent(10, 0)

    # Two seconds' worth, of which a tenth passed in the stall and another is forgiven.
    assert time.now == pytest.approx(60.1 + 1.8)


def test_a_pace_without_limits_sends_whole_batches_at_once() -> None:
    time = Time()
    pace = Pace(None, None, clock=time.clock, sleep=time.sleep)

    pace.sent(1_000_000, 1 << 40)

    assert pace.portion(rows(50)) == 50 and time.now == 0.0 and not pace.is_limited


def test_headers_of_a_record_come_before_ours() -> None:
    mine = [[("a", b"1"), ("b", None)], None, [], [("c", b"")]]

    batch = prepared(rows(5, headers=[None, *mine]).slice(1), "run", True)

    for index, (found, own) in enumerate(zip(batch.column("headers").to_pylist(), mine, strict=True)):
        pairs = [(each["key"], each["value"]) for each in found]
        assert pairs == [
            *(own or []),
            ("x-replay-topic", b"events"),
            ("x-replay-partition", b"3"),
            ("x-replay-offset", b"%d" % (index + 1)),
            ("x-replay-run", b"run"),
        ]


def test_a_result_is_a_table_even_when_nothing_was_there() -> None:
    empty = ReplayResult("run", "a", "b", False, True, (), 0.0)

    assert empty.as_table()[1] == [] and empty.records == 0
