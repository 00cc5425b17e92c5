"""Rows that a task sends, as librdkafka reads them. Everything of the sink but Spark."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.records import decode_header
from penstock.spark import producing
from penstock.spark.producing import ProduceSettings, RowError, Sender, Sent
from penstock.wire import Client, TopicReplaced, UnknownTopic, Unreachable, WireError
from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.client import Record
from tests.interop.murmur2 import partition_of
from tests.support import BrokerProcess

Unique = Callable[[str], str]

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[ConfluentClient]:
    client = ConfluentClient(bootstrap)
    yield client
    client.close()


@pytest.fixture
def settings(bootstrap: str) -> ProduceSettings:
    return ProduceSettings(bootstrap)


def send(settings: ProduceSettings, topic: str | None, *batches: Mapping[str, Any]) -> Sent:
    with Sender(settings, topic) as sender:
        for batch in batches:
            sender.send(pa.RecordBatch.from_pydict(dict(batch)))
        return sender.finish()


def stored(client: ConfluentClient, topic: str) -> dict[int, list[Record]]:
    """All that the topic holds, by partition."""
    found = {}
    for partition in client.describe_topic(topic):
        count = client.offset(topic, partition, "latest") or 0
        found[partition] = client.consume(topic, {partition: 0}, count) if count else []
    return found


def values(records: list[Record]) -> list[bytes]:
    """Of records that all have one."""
    found = [record.value for record in records if record.value is not None]
    assert len(found) == len(records)
    return found


def test_rows_arrive_as_they_are(settings: ProduceSettings, client: ConfluentClient, unique: Unique) -> None:
    topic = unique("topic")
    client.create_topic(topic)
    rows = {
        "key": pa.array([b"k", b"", None, b"\xff"]),
        "value": pa.array([b"v", None, b"", b"\x00" * 1000]),
        "timestamp": pa.array([0, 1_700_000_000_123_000, 1, -1000], pa.timestamp("us", "UTC")),
        "headers": pa.array(
            [[("a", b"1"), ("a", None)], [], None, [("ä", b"")]],
            HEADERS,
        ),
        "offset": pa.array([9, 9, 9, 9]),
    }

    sent = send(settings, topic, rows)

    records = stored(client, topic)[0]
    assert [record[2:] for record in records] == [
        (0, b"k", b"v", (("a", b"1"), ("a", None))),
        (1_700_000_000_123, b"", None, ()),
        (0, None, b"", ()),
        (-1, b"\xff", b"\x00" * 1000, (("ä", b""),)),
    ]
    assert sent.records == 4 and sent.bytes > 1000


@pytest.mark.parametrize("codec", Codec)
def test_every_codec_can_be_read(
    bootstrap: str, client: ConfluentClient, unique: Unique, codec: Codec
) -> None:
    topic = unique("topic")
    client.create_topic(topic)

    sent = send(ProduceSettings(bootstrap, codec=codec), topic, {"value": pa.array(["same text"] * 500)})

    assert values(stored(client, topic)[0]) == [b"same text"] * 500
    assert (sent.bytes < 4500) == (codec != Codec.NONE)


def test_keys_go_where_the_java_client_puts_them(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=7)
    keys = [bytes(range(256))[:length] for length in range(60)] + [
        b"key-%d" % number for number in range(500)
    ]

    send(settings, topic, {"key": pa.array(keys, pa.binary()), "value": pa.array(keys, pa.binary())})

    for partition, records in stored(client, topic).items():
        # Also in their order.
        assert values(records) == [key for key in keys if partition_of(key, 7) == partition]


def test_rows_without_a_key_are_spread_and_stay_in_order(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=4)
    numbers = [b"%06d" % number + b"x" * 994 for number in range(2000)]

    send(settings, topic, {"value": pa.array(numbers[:1000])}, {"value": pa.array(numbers[1000:])})

    by_partition = stored(client, topic)
    assert sorted(value for records in by_partition.values() for value in values(records)) == numbers
    for records in by_partition.values():
        assert values(records) == sorted(values(records))
        assert 400 < len(records) < 600


def test_small_tasks_without_keys_do_not_all_go_to_one_partition(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=4)

    for _ in range(40):
        send(settings, topic, {"value": pa.array([b"small"])})

    assert all(stored(client, topic).values())


def test_a_row_may_name_its_partition_and_the_key_decides_for_others(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=5)
    rows = {
        "key": pa.array([b"a", b"a", b"b", b"b"]),
        "value": pa.array([b"0", b"1", b"2", b"3"]),
        "partition": pa.array([4, None, 0, None], pa.int32()),
    }

    send(settings, topic, rows)

    found = Counter({(value, p) for p, records in stored(client, topic).items() for value in values(records)})
    assert found == Counter(
        [(b"0", 4), (b"1", partition_of(b"a", 5)), (b"2", 0), (b"3", partition_of(b"b", 5))]
    )


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_partition_out_of_range_is_refused(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique, wrong: int
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=3)
    rows = {"value": pa.array([b"a", b"b", b"c"]), "partition": pa.array([0, wrong, None], pa.int32())}

    with pytest.raises(RowError, match=f"partition {wrong} of {topic}, which has 3 \\(0 to 2\\)"):
        send(settings, topic, rows)


def test_a_partition_added_during_the_task_is_found(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, partitions=1)
    with Sender(settings, topic) as sender:
        sender.send(pa.RecordBatch.from_pydict({"value": pa.array([b"before"])}))
        sender.flush()
        client.create_partitions(topic, 2)
        added = {"value": pa.array([b"after"]), "partition": pa.array([1], pa.int32())}
        sender.send(pa.RecordBatch.from_pydict(added))
        sender.finish()

    assert values(stored(client, topic)[1]) == [b"after"]


def test_rows_name_their_topics(settings: ProduceSettings, client: ConfluentClient, unique: Unique) -> None:
    topics = [unique("topic") for _ in range(3)]
    for topic in topics:
        client.create_topic(topic)
    rows = {
        "value": pa.array([b"%d" % number for number in range(30)]),
        "topic": pa.array([topics[number % 3] for number in range(30)]),
    }

    assert send(settings, None, rows).records == 30

    for index, topic in enumerate(topics):
        assert values(stored(client, topic)[0]) == [b"%d" % number for number in range(index, 30, 3)]


def test_the_given_topic_wins_over_the_column(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)

    send(settings, topic, {"value": pa.array([b"a", b"b"]), "topic": pa.array(["elsewhere", None])})

    assert values(stored(client, topic)[0]) == [b"a", b"b"]


def test_a_null_topic_is_refused(settings: ProduceSettings, client: ConfluentClient, unique: Unique) -> None:
    topic = unique("topic")
    client.create_topic(topic)

    with pytest.raises(RowError, match="null topic"):
        send(settings, None, {"value": pa.array([b"a", b"b"]), "topic": pa.array([topic, None])})


def test_a_topic_that_is_no_text_is_refused(settings: ProduceSettings) -> None:
    # Spark lets any bytes be cast to a string.
    topics = pa.array([b"\xff"]).view(pa.string())
    with pytest.raises(RowError, match=r"topic b'\\xff', which is not UTF-8"):
        send(settings, None, {"value": pa.array([b"a"]), "topic": topics})


def test_large_and_many_batches_keep_their_order(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "GATHER_BYTES", 10_000)
    topic = unique("topic")
    client.create_topic(topic, partitions=3)
    numbers = [b"%05d" % number for number in range(6000)]
    rows = {"key": pa.array([number[-1:] for number in numbers]), "value": pa.array(numbers)}
    whole = pa.RecordBatch.from_pydict(rows)

    with Sender(settings, topic) as sender:
        sender.send(whole.slice(0, 4000))
        for first in range(4000, 6000, 100):
            sender.send(whole.slice(first, 100))
        assert sender.finish().records == 6000

    for partition, records in stored(client, topic).items():
        assert values(records) == [each for each in numbers if partition_of(each[-1:], 3) == partition]


def test_batches_fit_a_topic_that_allows_little(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, configs={"max.message.bytes": "2000"})

    send(settings, topic, {"value": pa.array([b"x" * 300] * 100)})

    assert len(stored(client, topic)[0]) == 100


def test_a_record_that_the_topic_does_not_allow_is_refused_with_both_sizes(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, configs={"max.message.bytes": "2000"})

    with pytest.raises(
        RowError, match=rf"a record for {topic} takes 3\d\d\d bytes.* allows 2000.*max.message"
    ):
        send(settings, topic, {"value": pa.array([b"small", b"x" * 3000])})


def test_a_record_larger_than_a_batch_is_sent_alone_where_it_is_allowed(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic, configs={"max.message.bytes": "4000000"})
    large = b"x" * 3_000_000

    send(settings, topic, {"value": pa.array([b"a", large, b"b"])})

    assert values(stored(client, topic)[0]) == [b"a", large, b"b"]


def test_rows_without_a_timestamp_get_the_time_of_sending(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)
    before = int(time.time() * 1000)

    send(settings, topic, {"value": pa.array([b"a"])})
    some = pa.array([None, 5_000], pa.timestamp("us", "UTC"))
    send(settings, topic, {"value": pa.array([b"b", b"c"]), "timestamp": some})

    stamps = [record.timestamp for record in stored(client, topic)[0]]
    assert before <= stamps[0] <= stamps[1] <= time.time() * 1000
    assert stamps[2] == 5


def test_a_timestamp_before_1970_is_refused(settings: ProduceSettings, unique: Unique) -> None:
    early = pa.array([-86_400_000_000], pa.timestamp("us", "UTC"))

    with pytest.raises(RowError, match="before 1970"):
        send(settings, unique("topic"), {"value": pa.array([b"a"]), "timestamp": early})


def test_a_timestamp_that_the_brokers_do_not_take_is_explained(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)
    far_ahead = pa.array([datetime(2200, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC"))

    with pytest.raises(RowError, match=rf"{topic}.*raise the topic's message.timestamp.before.max.ms"):
        send(settings, topic, {"value": pa.array([b"a"]), "timestamp": far_ahead})


def test_a_topic_that_was_made_anew_is_sent_to_by_the_same_producer(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    for _ in range(2):
        client.create_topic(topic)
        for _ in range(2):
            send(settings, topic, {"value": pa.array([b"a", b"b"])})
        assert values(stored(client, topic)[0]) == [b"a", b"b", b"a", b"b"]
        client.delete_topic(topic)


def test_a_topic_made_anew_during_a_task_has_lost_what_the_task_sent(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)
    with Sender(settings, topic) as sender:
        sender.send(pa.RecordBatch.from_pydict({"value": pa.array([b"a"])}))
        sender.flush()
        client.delete_topic(topic)
        client.create_topic(topic, 2)
        rows = {"value": pa.array([b"b"]), "partition": pa.array([1], pa.int32())}
        sender.send(pa.RecordBatch.from_pydict(rows))
        with pytest.raises(TopicReplaced, match=f"topic {topic} was deleted and recreated"):
            sender.finish()


def test_a_header_without_a_name_is_refused(settings: ProduceSettings, unique: Unique) -> None:
    headers = pa.array([[("a", b"1")], [(None, b"2")]], HEADERS)

    with pytest.raises(RowError, match="null key"):
        send(settings, unique("topic"), {"value": pa.array([b"a", b"b"]), "headers": headers})


def test_a_topic_is_created_as_for_any_producer_unless_the_brokers_do_not(
    unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = unique("topic")
    with BrokerProcess({"num.partitions": "3"}) as broker:
        send(ProduceSettings(broker.bootstrap), topic, {"value": pa.array([b"a"])})
        reader = ConfluentClient(broker.bootstrap)
        assert len(reader.describe_topic(topic)) == 3
        broker.restart(settings={"auto.create.topics.enable": "false"})
        other = unique("topic")
        monkeypatch.setattr(producing, "CREATION_S", 0.3)
        with pytest.raises(UnknownTopic, match=f"topic {other} does not exist.*create it first"):
            send(ProduceSettings(broker.bootstrap), other, {"value": pa.array([b"a"])})
        assert other not in reader.topics()


def test_tasks_of_one_process_share_a_producer_but_not_a_failed_one(
    settings: ProduceSettings, client: ConfluentClient, unique: Unique
) -> None:
    topic = unique("topic")
    client.create_topic(topic)
    good = {"value": pa.array([b"a"])}
    bad = {"value": pa.array([b"b"]), "headers": pa.array([[(None, b"")]], HEADERS)}

    send(settings, topic, good)
    send(settings, topic, good)
    with Sender(settings, topic) as sender:
        sender.send(pa.RecordBatch.from_pydict(good))
        sender.flush()
        sender.send(pa.RecordBatch.from_pydict(bad))
        with pytest.raises(RowError):
            sender.finish()
    send(settings, topic, good)

    first, second, failed, last = producer_ids(settings.bootstrap, topic, 4)
    assert first == second == failed != last


def producer_ids(bootstrap: str, topic: str, batches: int) -> list[int]:
    ids = []
    with Client(bootstrap) as client:
        records = client.fetch(TopicPartition(topic, 0), 0).records
        position = 0
        for _ in range(batches):
            header = decode_header(records, position)
            ids.append(header.producer_id)
            position += header.size
    return ids


@pytest.mark.chaos
def test_a_broker_that_is_killed_while_a_task_sends_loses_and_repeats_nothing(
    unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "GATHER_BYTES", 20_000)
    topic = unique("topic")
    with BrokerProcess() as broker:
        reader = ConfluentClient(broker.bootstrap)
        reader.create_topic(topic, partitions=2)
        killed = threading.Event()

        def kill_twice() -> None:
            for _ in range(2):
                broker.restart(kill=True)
            killed.set()

        numbers: list[bytes] = []
        with Sender(ProduceSettings(broker.bootstrap), topic) as sender:
            killer = threading.Thread(target=kill_twice)
            killer.start()
            # Something is always on its way when the broker dies.
            while not killed.is_set():
                more = [b"%06d" % number for number in range(len(numbers), len(numbers) + 1000)]
                sender.send(pa.RecordBatch.from_pydict({"key": pa.array(more), "value": pa.array(more)}))
                numbers += more
                time.sleep(0.001)
            killer.join()
            assert sender.finish().records == len(numbers)

        found = stored(reader, topic)
        assert sorted(value for records in found.values() for value in values(records)) == numbers


def test_brokers_that_cannot_be_reached_are_named() -> None:
    nowhere = ProduceSettings("127.0.0.1:1", deadline_ms=2_000)

    with pytest.raises((Unreachable, WireError), match=r"127\.0\.0\.1:1"):
        send(nowhere, "events", {"value": pa.array([b"a"])})
