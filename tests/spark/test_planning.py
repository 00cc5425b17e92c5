"""Planning against a real broker: which partitions, from where to where, and what counts as lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.model import TopicPartition
from penstock.protocol.records import encode_batch, filler
from penstock.spark import planning
from penstock.spark.errors import DataLossError, SparkOptionError
from penstock.spark.options import Mode, parse
from penstock.spark.planning import Available, Planner
from penstock.spark.ranges import OffsetRange, Offsets, StreamOffset
from penstock.wire import Client, Fetched, OffsetAt
from tests.spark.topics import Topics

Plan = Callable[..., Planner]


@pytest.fixture
def plan(bootstrap: str) -> Iterator[Plan]:
    clients = []

    def make(mode: Mode = "batch", **options: str) -> Planner:
        named = {name.replace("__", "."): value for name, value in options.items()}
        parsed = parse({"kafka.bootstrap.servers": bootstrap, **named}, mode)
        client = parsed.read.client()
        clients.append(client)
        return Planner(parsed, client)

    yield make
    for client in clients:
        client.close()


def offsets(topic: str, *each: int) -> Offsets:
    return {TopicPartition(topic, number): offset for number, offset in enumerate(each)}


def filled(base_offset: int, count: int) -> bytearray:
    """A batch with a kilobyte of each record."""
    return encode_batch([(1, None, bytes(1_000), ())] * count, base_offset=base_offset)


def at(topic: str, *each: int) -> StreamOffset:
    return StreamOffset(offsets(topic, *each))


def test_subscriptions_find_their_partitions(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    one, two = topics.create(unique("t"), 2), topics.create(unique("t"), 1)
    all_of_both = sorted([*offsets(one, 0, 0), *offsets(two, 0)])
    assert sorted(plan(subscribe=f"{one}, {two}").partitions()) == all_of_both
    assert plan(subscribePattern=f"{one[:-2]}-[0-9]").partitions() == all_of_both
    assert plan(subscribePattern=one[2:-2]).partitions() == all_of_both  # anywhere in the name
    assert plan(subscribePattern=f"^{one[2:-2]}").partitions() == []
    assert plan(subscribePattern=f"{one[:-2]}$").partitions() == []
    assert plan(assign=f'{{"{one}": [1]}}').partitions() == [TopicPartition(one, 1)]


def test_a_topic_that_a_broker_has_not_heard_of_yet_is_waited_for(
    plan: Plan, topics: Topics, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(unique("t"), 2)
    planner = plan(subscribe=topic)
    listed = Client.topics
    asked: list[Any] = []

    def behind(client: Client, names: Any) -> Any:
        asked.append(names)
        return {} if len(asked) < 3 else listed(client, names)

    monkeypatch.setattr(Client, "topics", behind)
    assert planner.partitions() == list(offsets(topic, 0, 0))


@pytest.mark.usefixtures("impatient")
def test_what_does_not_exist_is_named(plan: Plan, topics: Topics, unique: Callable[[str], str]) -> None:
    topic = topics.create(unique("t"), 2)
    with pytest.raises(SparkOptionError, match=r"topic no-such-topic does not exist at 127\.0\.0\.1"):
        plan(subscribe=f"{topic},no-such-topic").partitions()
    with pytest.raises(SparkOptionError, match=f"partition 2 of topic {topic}, which has only 2, from 0 on"):
        plan(assign=f'{{"{topic}": [0, 2]}}').partitions()


def test_offsets_and_words_become_ranges(plan: Plan, topics: Topics, unique: Callable[[str], str]) -> None:
    topic = topics.create(unique("t"), 3)
    topics.send(topic, [b"v"] * 10, partition=0)
    topics.send(topic, [b"v"] * 20, partition=1)
    topics.delete_records(topic, 1, 5)

    def ranges(**options: str) -> list[OffsetRange]:
        return plan(subscribe=topic, **options).batch_ranges()

    assert ranges() == [OffsetRange(topic, 0, 0, 10), OffsetRange(topic, 1, 5, 20)]
    given = ranges(
        startingOffsets=f'{{"{topic}": {{"0": 3, "1": -2, "2": -2}}}}',
        endingOffsets=f'{{"{topic}": {{"0": 4, "1": -1, "2": 0}}}}',
    )
    assert given == [OffsetRange(topic, 0, 3, 4), OffsetRange(topic, 1, 5, 20)]
    pieces = ranges(minPartitions="5", maxRecordsPerPartition="6")
    assert len(pieces) == 5
    assert sum(piece.size for piece in pieces) == 25


def test_times_become_offsets(plan: Plan, topics: Topics, unique: Callable[[str], str]) -> None:
    topic = topics.create(unique("t"), 1)
    now_ms = 1_700_000_000_000
    for number in range(3):
        topics.send(topic, [b"v"] * 2, timestamp_ms=now_ms + number * 1000)

    def ranges(**options: str) -> list[OffsetRange]:
        return plan(subscribe=topic, **options).batch_ranges()

    assert ranges(startingTimestamp=str(now_ms + 1)) == [OffsetRange(topic, 0, 2, 6)]
    assert ranges(endingTimestamp=str(now_ms + 1500)) == [OffsetRange(topic, 0, 0, 4)]
    assert ranges(endingTimestamp=str(now_ms + 9999)) == [OffsetRange(topic, 0, 0, 6)]
    by_partition = f'{{"{topic}": {{"0": {now_ms + 2000}}}}}'
    assert ranges(startingOffsetsByTimestamp=by_partition) == [OffsetRange(topic, 0, 4, 6)]
    with pytest.raises(SparkOptionError, match=f"{topic}-0 has no record at or after startingTimestamp"):
        ranges(startingTimestamp=str(now_ms + 9999))
    late = {"startingTimestamp": str(now_ms + 9999), "startingOffsetsByTimestampStrategy": "latest"}
    assert ranges(**late) == []


def test_a_record_that_comes_while_a_late_time_is_looked_up_is_not_skipped(
    plan: Plan, topics: Topics, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 2, timestamp_ms=1_700_000_000_000)
    planner = plan(
        subscribe=topic,
        startingTimestamp="1700000000001",
        startingOffsetsByTimestampStrategy="latest",
    )
    list_offsets = Client.list_offsets

    def and_then_one_comes(self: Client, wanted: Any, **options: Any) -> dict[TopicPartition, OffsetAt]:
        found = list_offsets(self, wanted, **options)
        if min(wanted.values()) >= 0:
            topics.send(topic, [b"v"], timestamp_ms=1_700_000_000_002)
        return found

    monkeypatch.setattr(Client, "list_offsets", and_then_one_comes)
    assert planner.batch_ranges() == [OffsetRange(topic, 0, 2, 3)]


def test_given_offsets_must_name_all_partitions_and_lie_in_the_log(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 2)
    topics.send(topic, [b"v"] * 4, partition=0)
    with pytest.raises(SparkOptionError, match=f"must list exactly the partitions .* {topic}-1 is missing"):
        plan(subscribe=topic, startingOffsets=f'{{"{topic}": {{"0": 0}}}}').batch_ranges()
    with pytest.raises(SparkOptionError, match=f"{topic}-7 is not subscribed to"):
        plan(subscribe=topic, startingOffsets=f'{{"{topic}": {{"0": 0, "1": 0, "7": 0}}}}').batch_ranges()
    beyond = {"endingOffsets": f'{{"{topic}": {{"0": 9, "1": -1}}}}'}
    with pytest.raises(DataLossError, match=f"offset 9 of {topic}-0, which reaches from 0 to 4"):
        plan(subscribe=topic, **beyond).batch_ranges()
    lenient = plan(subscribe=topic, failOnDataLoss="false", **beyond)
    assert lenient.batch_ranges() == [OffsetRange(topic, 0, 0, 4)]
    crossed = {
        "startingOffsets": f'{{"{topic}": {{"0": 3, "1": 0}}}}',
        "endingOffsets": f'{{"{topic}": {{"0": 2, "1": 0}}}}',
    }
    with pytest.raises(SparkOptionError, match=f"startingOffsets 3 of {topic}-0 is after endingOffsets 2"):
        plan(subscribe=topic, **crossed).batch_ranges()


def test_a_stream_sees_new_partitions_from_their_beginning(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 4)
    planner = plan("stream", subscribe=topic)
    topics.grow(topic, 2)
    topics.send(topic, [b"v"] * 3, partition=1)
    available = planner.available(at(topic, 2))
    assert available.ends == offsets(topic, 4, 3)
    assert available.backlog == offsets(topic, 2, 3)
    ranges = planner.ranges(at(topic, 2), StreamOffset(available.ends))
    assert ranges == [OffsetRange(topic, 0, 2, 4), OffsetRange(topic, 1, 0, 3)]
    # Decided when an AvailableNow run began: what came later is for the next run.
    assert planner.available(at(topic, 2), until=at(topic, 3)).ends == offsets(topic, 3)
    assert planner.available(at(topic, 4), until=at(topic, 3)).ends == offsets(topic, 4)


@pytest.mark.usefixtures("impatient")
def test_a_topic_that_cannot_be_seen_is_never_read_again_from_its_beginning(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    here, gone = topics.create(unique("t"), 1), unique("gone")
    stands_at = {**offsets(here, 0), **offsets(gone, 7, 9)}
    strict = plan("stream", subscribe=f"{here},{gone}")
    with pytest.raises(DataLossError, match=f"{gone}-0, {gone}-1 are gone: topics were deleted"):
        strict.available(StreamOffset(stands_at))
    lenient = plan("stream", subscribe=f"{here},{gone}", failOnDataLoss="false")
    available = lenient.available(StreamOffset(stands_at))
    assert available.ends == stands_at
    assert lenient.limited(available) == stands_at
    assert lenient.ranges(StreamOffset(stands_at), StreamOffset(available.ends)) == []


@pytest.mark.usefixtures("impatient")
def test_a_topic_made_anew_is_data_loss_or_read_from_its_beginning(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 3)
    stands_at = offsets(topic, 100)
    with pytest.raises(DataLossError, match=f"{topic}-0 was read up to offset 100 but ends at 3 now"):
        plan("stream", subscribe=topic).available(StreamOffset(stands_at))
    lenient = plan("stream", subscribe=topic, failOnDataLoss="false", maxOffsetsPerTrigger="2")
    available = lenient.available(StreamOffset(stands_at))
    end = lenient.limited(available)
    assert end == offsets(topic, 2)
    assert lenient.ranges(StreamOffset(stands_at), StreamOffset(end)) == [OffsetRange(topic, 0, 0, 2)]


@pytest.mark.usefixtures("impatient")
def test_a_topic_made_anew_with_as_many_records_is_noticed_by_a_running_stream(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 3)
    strict = plan("stream", subscribe=topic)
    lenient = plan("stream", subscribe=topic, failOnDataLoss="false")
    assert strict.partitions() == lenient.partitions() == [TopicPartition(topic, 0)]
    topics.delete(topic)
    topics.create(topic, 1)
    topics.send(topic, [b"v"] * 5)
    with pytest.raises(DataLossError, match=f"topic {topic} was deleted and recreated"):
        strict.available(at(topic, 3))
    available = lenient.available(at(topic, 3))
    assert (available.starts, available.ends) == (offsets(topic, 0), offsets(topic, 5))


def test_an_idle_stream_asks_one_question_a_time(
    plan: Plan, topics: Topics, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(unique("t"), 2)
    topics.send(topic, [b"v"] * 3)
    planner = plan("stream", subscribe=topic)
    stands_at = planner.available(at(topic, 0, 0)).ends
    asked = []
    for name in ("topics", "list_offsets"):
        real = getattr(Client, name)

        def counted(*given: Any, _name: str = name, _real: Any = real, **settings: Any) -> Any:
            asked.append(_name)
            return _real(*given, **settings)

        monkeypatch.setattr(Client, name, counted)
    monkeypatch.setattr(planning, "METADATA_AGE_S", 3600.0)
    assert planner.available(StreamOffset(stands_at)).ends == stands_at == offsets(topic, 3, 0)
    assert asked == ["list_offsets"]


def test_retention_that_overtakes_a_stream_is_data_loss(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 10)
    topics.delete_records(topic, 0, 6)
    strict = plan("stream", subscribe=topic)
    with pytest.raises(DataLossError, match=rf"records {topic}-0 \[2, 6\) are gone.*failOnDataLoss to false"):
        strict.ranges(at(topic, 2), at(topic, 10))
    lenient = plan("stream", subscribe=topic, failOnDataLoss="false", maxOffsetsPerTrigger="3")
    # What is gone takes nothing of the limit.
    assert lenient.limited(lenient.available(at(topic, 2))) == offsets(topic, 9)
    assert lenient.ranges(at(topic, 2), at(topic, 10)) == [OffsetRange(topic, 0, 6, 10)]
    assert lenient.ranges(at(topic, 2), at(topic, 5)) == []


def test_limits_per_trigger(plan: Plan, topics: Topics, unique: Callable[[str], str]) -> None:
    topic = topics.create(unique("t"), 2)
    for _ in range(10):
        topics.send(topic, [bytes(900)] * 30, partition=0)
    topics.send(topic, [bytes(900)] * 100, partition=1)
    start = offsets(topic, 0, 0)

    def limited(**options: str) -> Offsets:
        planner = plan("stream", subscribe=topic, **options)
        return planner.limited(planner.available(StreamOffset(start)))

    assert limited() == offsets(topic, 300, 100)
    assert limited(maxOffsetsPerTrigger="40") == offsets(topic, 30, 10)
    by_bytes = limited(maxBytesPerTrigger="40k")
    assert 35_000 < sum(by_bytes.values()) * 910 < 41_000
    assert by_bytes[TopicPartition(topic, 0)] > by_bytes[TopicPartition(topic, 1)] > 0
    assert limited(maxBytesPerTrigger="1g") == offsets(topic, 300, 100)
    # However small the limit, a stream moves on.
    assert limited(maxBytesPerTrigger="1") == offsets(topic, 1, 1)


def test_a_limit_that_is_not_reached_leaves_nothing_out(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are means, and what so many records take is no whole number of bytes."""
    monkeypatch.setattr(Planner, "_sample", lambda *_: (907.334, 0))
    ends = offsets("t", 300, 100)
    available = Available(offsets("t", 0, 0), ends, offsets("t", 0, 0), {})
    assert plan("stream", subscribe="t", maxBytesPerTrigger="1g").limited(available) == ends


@pytest.mark.parametrize(
    ("sample", "limit_bytes", "end"),
    [
        # Sparse, then dense: what comes behind the sample is taken to be dense.
        (filler(0, 999_999, 0) + filled(1_000_000, 9), "10k", 1_000_000 + 10),
        (filler(0, 999_999, 0) + filled(1_000_000, 9), "100k", 1_000_000 + 100),
        # Nothing is known of what comes behind it.
        (filler(0, 999_999, 0), "10k", 1_000_000 + 1),
        (filler(0, 999_999, 0), "10m", 1_000_000 + 80),
        # As many as fit, as ever.
        (filled(0, 9), "10k", 10),
    ],
)
def test_the_limit_of_bytes_holds_in_a_compacted_log(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, sample: bytearray, limit_bytes: str, end: int
) -> None:
    planner = plan("stream", subscribe="t", maxBytesPerTrigger=limit_bytes)
    answer = Fetched(memoryview(sample), 0, 0, 0, [], 0)
    monkeypatch.setattr(planner._client, "fetch", lambda *_, **__: answer)
    available = Available(offsets("t", 0), offsets("t", 2_000_000), offsets("t", 0), {})
    found = planner.limited(available)[TopicPartition("t", 0)]
    assert found == end


@pytest.mark.usefixtures("impatient")
def test_a_deleted_topic_holds_up_a_lenient_stream_only_once(
    plan: Plan, topics: Topics, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, gone = topics.create(unique("t"), 1), unique("gone")
    stands_at = {**offsets(here, 0), **offsets(gone, 7)}
    planner = plan("stream", subscribe=f"{here},{gone}", failOnDataLoss="false")
    assert planner.available(StreamOffset(stands_at)).ends == stands_at
    topics.send(here, [b"v"] * 2)

    def sleep(_: float) -> None:
        raise AssertionError("waits again for what is known to be gone")

    monkeypatch.setattr("penstock.spark.planning.time.sleep", sleep)
    moved = {**stands_at, **offsets(here, 2)}
    assert planner.available(StreamOffset(stands_at)).ends == moved
    assert planner.ranges(StreamOffset(stands_at), StreamOffset(moved)) == [OffsetRange(here, 0, 0, 2)]
    monkeypatch.undo()
    # It may come back, and then it is read again.
    topics.create(gone, 1)
    topics.send(gone, [b"v"] * 9)
    monkeypatch.setattr(planning, "METADATA_AGE_S", 0.0)
    assert planner.available(StreamOffset(moved)).ends == {**moved, **offsets(gone, 9)}


@pytest.mark.parametrize("strictness", ["true", "false"])
def test_a_batch_that_is_repeated_waits_for_brokers_that_do_not_show_its_topic_yet(
    plan: Plan,
    topics: Topics,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    strictness: str,
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 5)
    planner = plan("stream", subscribe=topic, failOnDataLoss=strictness)
    real, empty_answers = Client.topics, [1, 2]

    def late(*given: Any, **settings: Any) -> Any:
        return {} if empty_answers and empty_answers.pop() else real(*given, **settings)

    monkeypatch.setattr(Client, "topics", late)
    assert planner.ranges(at(topic, 1), at(topic, 4)) == [OffsetRange(topic, 0, 1, 4)]
    assert not empty_answers


@pytest.mark.usefixtures("impatient")
def test_a_batch_that_is_repeated_on_a_log_that_was_cut_reads_what_is_there(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 5)
    with pytest.raises(DataLossError, match=f"{topic}-0 was planned up to offset 9 but ends at 5 now"):
        plan("stream", subscribe=topic).ranges(at(topic, 3), at(topic, 9))
    lenient = plan("stream", subscribe=topic, failOnDataLoss="false")
    assert lenient.ranges(at(topic, 3), at(topic, 9)) == [OffsetRange(topic, 0, 3, 5)]
    assert lenient.ranges(at(topic, 7), at(topic, 9)) == []


def test_an_available_now_run_never_plans_beyond_the_log(
    plan: Plan, topics: Topics, unique: Callable[[str], str]
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 5)
    # The topic was made anew since the run began.
    planner = plan("stream", subscribe=topic, failOnDataLoss="false")
    assert planner.available(at(topic, 3), until=at(topic, 90)).ends == offsets(topic, 5)


@pytest.mark.usefixtures("impatient")
def test_a_stream_that_stands_behind_an_open_transaction_has_lost_nothing(
    plan: Plan, topics: Topics, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 5)
    real = Client.list_offsets

    def stable(client: Client, wanted: Any, *, read_committed: bool = False) -> Any:
        found = real(client, wanted, read_committed=read_committed)
        return (
            {each: OffsetAt(min(2, at.offset), -1) for each, at in found.items()} if read_committed else found
        )

    monkeypatch.setattr(Client, "list_offsets", stable)
    planner = plan("stream", subscribe=topic, kafka__isolation__level="read_committed")
    # It read so far before it was told to read committed records only.
    assert planner.available(at(topic, 4)).ends == offsets(topic, 4)
    with pytest.raises(DataLossError, match="but ends at"):
        planner.available(at(topic, 6))


def test_a_given_offset_behind_an_open_transaction_is_no_lost_data(
    plan: Plan, topics: Topics, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(unique("t"), 1)
    topics.send(topic, [b"v"] * 5)
    real = Client.list_offsets

    def stable(client: Client, wanted: Any, *, read_committed: bool = False) -> Any:
        found = real(client, wanted, read_committed=read_committed)
        return (
            {each: OffsetAt(min(2, at.offset), -1) for each, at in found.items()} if read_committed else found
        )

    monkeypatch.setattr(Client, "list_offsets", stable)
    committed = {"subscribe": topic, "kafka__isolation__level": "read_committed"}
    planner = plan("batch", **committed, endingOffsets=f'{{"{topic}": {{"0": 4}}}}')
    assert [(each.start, each.end) for each in planner.batch_ranges()] == [(0, 4)]
    with pytest.raises(DataLossError, match="from 0 to 5"):
        plan("batch", **committed, endingOffsets=f'{{"{topic}": {{"0": 6}}}}').batch_ranges()
