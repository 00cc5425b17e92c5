"""Reading one range, as a task does: every record once, whatever the log looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.columnar.columns import decode
from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.records import CorruptBatch, encode_batch, filler
from penstock.spark import reading
from penstock.spark.errors import DataLossError
from penstock.spark.ranges import OffsetRange
from penstock.spark.reading import ReadSettings, read, schema
from penstock.spark.source import COLUMNS, HEADERS
from penstock.wire import Fetched, OffsetOutOfRange, TopicReplaced, UnknownTopic, operations
from tests.spark.topics import Topics
from tests.support import BrokerProcess, wait_until


def offsets_of(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


# A real broker


def test_rows_come_in_order_in_batches_that_spark_takes_as_they_are(
    topics: Topics, unique: Callable[[str], str], bootstrap: str
) -> None:
    topic = topics.create(unique("t"), 2)
    topics.send(topic, [b"%d" % number for number in range(250)], partition=1, headers=[("h", b"x")])
    settings = ReadSettings(bootstrap, headers=True, rows_max=100)
    batches = list(read(settings, OffsetRange(topic, 1, 20, 240)))
    assert [batch.num_rows for batch in batches] == [100, 100, 20]
    expected = to_arrow_schema(COLUMNS.add(HEADERS), timezone="UTC")
    assert all(batch.schema.equals(expected) for batch in batches)
    table = pa.Table.from_batches(batches)
    assert table.column("offset").to_pylist() == list(range(20, 240))
    assert table.column("value").to_pylist() == [b"%d" % number for number in range(20, 240)]
    assert set(table.column("topic").to_pylist()) == {topic}
    assert set(table.column("partition").to_pylist()) == {1}


def test_a_reader_overtaken_by_retention_fails_and_says_so(
    topics: Topics, unique: Callable[[str], str], bootstrap: str
) -> None:
    topic = topics.create(unique("t"))
    topics.send(topic, [b"v"] * 50)
    topics.delete_records(topic, 0, 30)
    whole = OffsetRange(topic, 0, 10, 50)
    with pytest.raises(DataLossError, match=rf"records {topic}-0 \[10, 30\) are gone: retention"):
        list(read(ReadSettings(bootstrap), whole))
    lenient = ReadSettings(bootstrap, fail_on_data_loss=False)
    assert offsets_of(read(lenient, whole)) == list(range(30, 50))
    assert offsets_of(read(lenient, whole._replace(end=25))) == []


def test_a_log_that_ends_too_early_is_data_loss(
    topics: Topics, unique: Callable[[str], str], bootstrap: str
) -> None:
    topic = topics.create(unique("t"))
    topics.send(topic, [b"v"] * 5)
    beyond = OffsetRange(topic, 0, 100, 200)
    with pytest.raises(DataLossError, match="the log ends at 5, so the topic was recreated"):
        list(read(ReadSettings(bootstrap), beyond))
    assert offsets_of(read(ReadSettings(bootstrap, fail_on_data_loss=False), beyond)) == []


def test_a_topic_deleted_before_the_read_is_data_loss(
    unique: Callable[[str], str], bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = unique("never-made")
    monkeypatch.setattr(reading, "GONE_AFTER_S", 0.0)
    monkeypatch.setattr(operations, "UNKNOWN_TOPIC_MS", 200)
    with pytest.raises(DataLossError, match=f"{topic}-0 is gone: its topic was deleted"):
        list(read(ReadSettings(bootstrap, deadline_ms=20_000), OffsetRange(topic, 0, 0, 5)))


def test_a_topic_made_anew_is_not_read_in_place_of_the_one_that_was_planned(
    unique: Callable[[str], str], topics: Topics, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "UNKNOWN_TOPIC_MS", 200)
    topic = topics.create(unique("t"), 1)
    settings = ReadSettings(bootstrap)
    planned = settings.client().topics([topic])[topic].topic_id
    topics.delete(topic)
    topics.create(topic, 1)
    topics.send(topic, [b"of another topic"] * 5)
    with pytest.raises(DataLossError, match=f"{topic}-0 is gone: its topic was deleted and recreated"):
        list(read(settings, OffsetRange(topic, 0, 0, 5), planned))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_compacted_topic_is_read_from_any_place_to_any_place(codec: str) -> None:
    records = {offset: (b"%d" % (offset % 7), b"%d" % offset) for offset in range(600)}
    with BrokerProcess({"log.cleaner.backoff.ms": "100", "log.cleaner.min.cleanable.ratio": "0"}) as broker:
        topics = Topics(broker.bootstrap)
        topic = topics.create("t", configs={"cleanup.policy": "compact", "segment.bytes": "2000"})
        for first in range(0, 600, 20):
            some = [records[offset] for offset in range(first, first + 20)]
            topics.send(
                topic,
                [value for _, value in some],
                keys=[key for key, _ in some],
                settings={"compression.type": codec},
            )

        def found(start: int, end: int) -> dict[int, tuple[bytes, bytes]]:
            read_as = ReadSettings(broker.bootstrap, fetch_bytes_max=1_000)
            table = pa.Table.from_batches(
                read(read_as, OffsetRange(topic, 0, start, end)), schema(headers=False)
            )
            keys, values = table.column("key").to_pylist(), table.column("value").to_pylist()
            return dict(zip(table.column("offset").to_pylist(), zip(keys, values)))

        wait_until(lambda: found(0, 300) == {}, 60, "nothing is left of the first half")
        left = found(0, 600)
        assert left.items() <= records.items()
        assert dict(left.values()) == dict(records.values()), "the newest values of all keys"
        for start, end in ((0, 1), (7, 400), (100, 599), (401, 402)):
            assert found(start, end).keys() <= set(range(start, end))
        assert found(550, 600).keys() <= left.keys()


# Logs made by hand: of compacted topics, with transactions, damaged


class ScriptedLog:
    """Answers like ``Client.reader``, with the batches that a test made."""

    def __init__(self, answers: list[Fetched | Exception]) -> None:
        self.answers = answers
        self.asked: list[int] = []
        self.topic_ids: list[bytes | None] = []

    def reader(self, at: TopicPartition, offset: int, end: int, **settings: Any) -> Iterator[Fetched]:
        self.asked.append(offset)
        self.topic_ids.append(settings["topic_id"])
        while self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            yield answer


OLD = bytes(range(16))


def batch(base_offset: int, count: int, **settings: Any) -> bytes:
    return bytes(encode_batch([(1, None, b"v" * 100, ())] * count, base_offset=base_offset, **settings))


def fetched(*batches: bytes, aborted: list[tuple[int, int]] | None = None) -> Fetched:
    return Fetched(memoryview(b"".join(batches)), 1000, 1000, 0, aborted or [], 0, OLD)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedLog]:
    def make(*answers: Fetched | Exception) -> ScriptedLog:
        log = ScriptedLog(list(answers))
        monkeypatch.setattr(reading, "shared", lambda *_, **__: log)
        return log

    return make


SETTINGS = ReadSettings("127.0.0.1:1")


def test_gaps_of_a_compacted_log_are_stepped_over(script: Callable[..., ScriptedLog]) -> None:
    script(fetched(batch(0, 3), batch(40, 2)), fetched(batch(70, 5)))
    assert offsets_of(read(SETTINGS, OffsetRange("t", 0, 1, 72))) == [1, 2, 40, 41, 70, 71]
    # The range ends inside a gap: the batch behind it shows that there is nothing left.
    log = script(fetched(batch(0, 3), batch(40, 2)))
    assert offsets_of(read(SETTINGS, OffsetRange("t", 0, 0, 20))) == [0, 1, 2]
    assert log.asked == [0]


def test_offsets_of_which_nothing_is_left_are_read_to_the_end(script: Callable[..., ScriptedLog]) -> None:
    log = script(fetched(bytes(filler(0, 39, 0))), fetched(batch(40, 2), bytes(filler(42, 99, 0))))
    assert offsets_of(read(SETTINGS, OffsetRange("t", 0, 0, 100))) == [40, 41]
    assert log.asked == [0]
    # Nothing is left of a whole range, and it ends in the middle of what covers it.
    script(fetched(bytes(filler(0, 39, 0))))
    assert offsets_of(read(SETTINGS, OffsetRange("t", 0, 5, 30))) == []


def test_aborted_records_and_markers_are_left_out(script: Callable[..., ScriptedLog]) -> None:
    def transactional(base_offset: int) -> bytes:
        return batch(base_offset, 2, producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)

    def abort_marker(base_offset: int) -> bytes:
        marker = (1, b"\0\0\0\0", b"\0\0\0\0\0\0", ())
        return bytes(
            encode_batch(
                [marker],
                base_offset=base_offset,
                producer_id=7,
                producer_epoch=0,
                control=True,
                transactional=True,
            )
        )

    answer = fetched(batch(0, 1), transactional(1), abort_marker(3), batch(4, 1), aborted=[(7, 1)])
    script(answer)
    committed = ReadSettings("127.0.0.1:1", read_committed=True)
    assert offsets_of(read(committed, OffsetRange("t", 0, 0, 5))) == [0, 4]
    # A range may consist of nothing but what is left out.
    script(answer)
    assert offsets_of(read(committed, OffsetRange("t", 0, 1, 4))) == []


def test_a_reader_overtaken_midway_goes_on_where_the_log_begins(script: Callable[..., ScriptedLog]) -> None:
    gone = OffsetOutOfRange(TopicPartition("t", 0), 3, 8, 10)
    log = script(fetched(batch(0, 3)), gone, fetched(batch(8, 2)))
    lenient = ReadSettings("127.0.0.1:1", fail_on_data_loss=False)
    assert offsets_of(read(lenient, OffsetRange("t", 0, 0, 10))) == [0, 1, 2, 8, 9]
    assert log.asked == [0, 8]
    script(fetched(batch(0, 3)), gone)
    with pytest.raises(DataLossError, match=r"records t-0 \[3, 8\) are gone"):
        list(read(SETTINGS, OffsetRange("t", 0, 0, 10)))


def test_a_damaged_batch_is_named_with_its_partition(script: Callable[..., ScriptedLog]) -> None:
    damaged = bytearray(batch(3, 2))
    damaged[-1] ^= 1
    script(fetched(batch(0, 3), bytes(damaged)))
    with pytest.raises(CorruptBatch, match="t-0: the batch at offset 3: the CRC is wrong"):
        list(read(SETTINGS, OffsetRange("t", 0, 0, 5)))


def test_large_records_come_in_small_batches(
    script: Callable[..., ScriptedLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_BYTES_MAX", 1000)
    script(fetched(batch(0, 40)))
    batches = list(read(SETTINGS, OffsetRange("t", 0, 0, 40)))
    assert offsets_of(iter(batches)) == list(range(40))
    assert max(each.num_rows for each in batches) < 10


def test_an_answer_that_unfolds_to_much_is_decoded_in_parts(
    script: Callable[..., ScriptedLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(settings["start"])
        return partial(decode, bytes_max=15_000)(*arguments, **settings)

    monkeypatch.setattr(reading, "decode", counted)
    script(fetched(*(batch(number * 100, 100, codec=Codec.GZIP) for number in range(4))))
    assert offsets_of(read(SETTINGS, OffsetRange("t", 0, 0, 400))) == list(range(400))
    assert calls == [0, 100, 200, 300]


def test_a_topic_that_brokers_do_not_show_for_a_moment_is_read_on(script: Callable[..., ScriptedLog]) -> None:
    unknown = UnknownTopic("there is no topic t")
    log = script(fetched(batch(0, 3)), unknown, unknown, fetched(batch(3, 2)))
    lenient = ReadSettings("127.0.0.1:1", fail_on_data_loss=False)
    assert offsets_of(read(lenient, OffsetRange("t", 0, 0, 5))) == [0, 1, 2, 3, 4]
    assert log.topic_ids == [None, OLD, OLD]
    # One that was made anew is another, however soon it is there.
    script(fetched(batch(0, 3)), TopicReplaced("made again"), fetched(batch(3, 2)))
    assert offsets_of(read(lenient, OffsetRange("t", 0, 0, 5))) == [0, 1, 2]
