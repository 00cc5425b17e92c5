"""`penstock groups lag` against a broker, with records of known times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import pytest
from confluent_kafka import Producer

from penstock.protocol.records import encode_batch
from penstock.wire import Client, TopicPartition, TransactionalProducer
from tests.cli.conftest import Penstock

Unique = Callable[[str], str]

pytestmark = pytest.mark.interop

# By how much the clock may go on between writing and looking, on a machine that is busy.
SLACK_S = 120.0


def produce(bootstrap: str, topic: str, timestamps_ms: Iterable[int], *, partition: int = 0) -> None:
    """One batch for each record."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for timestamp in timestamps_ms:
        producer.produce(topic, b"value", b"key", partition=partition, timestamp=timestamp)
        assert producer.flush(60) == 0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def commit(bootstrap: str, group: str, topic: str, offsets: dict[int, int]) -> None:
    with Client(bootstrap) as client:
        client.commit(group, {TopicPartition(topic, number): offset for number, offset in offsets.items()})


@pytest.fixture
def topic(kafka: Penstock, unique: Unique) -> str:
    name = unique("topic")
    kafka("topics", "create", name, "--partitions", "2", "--config", "retention.ms=86400000")
    return name


def test_lag_in_seconds_follows_the_schedule_of_the_records(
    kafka: Penstock, topic: str, bootstrap: str, unique: Unique
) -> None:
    """Records of 5, 4, 3, 2 and 1 hours ago: a group at offset n is 5 - n hours behind."""
    hour_ms = 3_600_000
    written_ms = now_ms()
    produce(bootstrap, topic, [written_ms - hours * hour_ms for hours in (5, 4, 3, 2, 1)])
    groups = [unique("group") for _ in range(6)]
    for offset, group in enumerate(groups):
        commit(bootstrap, group, topic, {0: offset})
    rows = {row["group"]: row for row in kafka("groups", "lag", *groups, "--json").json["partitions"]}
    for offset, group in enumerate(groups):
        row = rows[group]
        assert row["lag_records"] == 5 - offset
        expected_s = (5 - offset) * 3600
        assert expected_s <= row["lag_s"] <= expected_s + (SLACK_S if expected_s else 0)
        if expected_s:
            assert 24 * 3600 - expected_s - SLACK_S <= row["loss_s"] <= 24 * 3600 - expected_s
            assert row["loss_by"] == "time"
        else:
            assert row["loss_s"] is None


def test_the_worst_is_first_in_the_table(kafka: Penstock, topic: str, bootstrap: str, unique: Unique) -> None:
    produce(bootstrap, topic, [now_ms() - 7_200_000 - 60_000])
    produce(bootstrap, topic, [now_ms()] * 3, partition=1)
    group = unique("group")
    commit(bootstrap, group, topic, {0: 0, 1: 1})
    heading, *rows = kafka("groups", "lag", group).rows
    assert heading[:6] == ["GROUP", "TOPIC", "PARTITION", "COMMITTED", "END", "LAG"]
    assert [row[:7] for row in rows[:1]] == [[group, topic, "0", "0", "1", "1", "2h"]]
    assert rows[0][7:] == ["-", "in", "21h", "by", "time"]
    assert rows[1][:6] == [group, topic, "1", "1", "3", "2"]
    assert "and 1 more" in kafka("groups", "lag", group, "--top", "1").out


def test_what_was_deleted_unread_is_lost(kafka: Penstock, topic: str, bootstrap: str, unique: Unique) -> None:
    for partition in (0, 1):
        produce(bootstrap, topic, [now_ms()] * 5, partition=partition)
    group = unique("group")
    commit(bootstrap, group, topic, {0: 1})
    kafka("topics", "trim", topic, "--before", "4", "--yes")
    (row,) = kafka("groups", "lag", group, "--json").json["partitions"]
    assert (row["lost_records"], row["lag_records"], row["log_start_offset"]) == (3, 1, 4)
    assert kafka("groups", "lag", group).rows[1][-2:] == ["3", "lost"]


def test_an_offset_beyond_the_end_is_shown(
    kafka: Penstock, topic: str, bootstrap: str, unique: Unique
) -> None:
    group = unique("group")
    commit(bootstrap, group, topic, {0: 7})
    (row,) = kafka("groups", "lag", group, "--json").json["partitions"]
    assert (row["is_beyond_end"], row["lag_records"]) == (True, 0)
    assert "beyond the end" in kafka("groups", "lag", group).out


def test_read_committed_ends_at_the_open_transaction(
    kafka: Penstock, topic: str, bootstrap: str, unique: Unique
) -> None:
    """An aborted transaction and its marker, then an open one: for read-committed readers nothing is unread."""
    at, group = TopicPartition(topic, 0), unique("group")
    commit(bootstrap, group, topic, {0: 0})
    record = [(now_ms() - 3_600_000, b"key", b"value", ())]
    with Client(bootstrap) as client, TransactionalProducer(client, unique("transactional-id")) as producer:
        producer.init()
        producer.begin()
        producer.send(at, encode_batch(record))
        producer.flush()
        producer.abort()
        producer.begin()
        producer.send(at, encode_batch(record))
        producer.flush()
        lag = {
            isolation: kafka("groups", "lag", group, "--json", "--isolation", isolation).json["partitions"][0]
            for isolation in ("read_uncommitted", "read_committed")
        }
        producer.abort()
    assert (lag["read_uncommitted"]["lag_records"], lag["read_committed"]["lag_records"]) == (3, 2)
    assert lag["read_uncommitted"]["lag_s"] >= 3600
    assert (lag["read_committed"]["lag_s"], lag["read_committed"]["loss_s"]) == (0.0, None)


def test_the_next_record_of_a_large_batch_is_found(
    kafka: Penstock, topic: str, bootstrap: str, unique: Unique
) -> None:
    """Batches of many groups that do not fit into one small fetch, each group in the middle of its batch."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 500, "batch.size": 900_000})
    written_ms = now_ms()
    for partition in (0, 1):
        for number in range(60):
            age_ms = (60 - number) * 60_000
            producer.produce(topic, os.urandom(5_000), partition=partition, timestamp=written_ms - age_ms)
    assert producer.flush(60) == 0
    groups = [unique("group") for _ in range(3)]
    for number, group in enumerate(groups):
        commit(bootstrap, group, topic, {0: 10 * number + 5, 1: 10 * number + 5})
    rows = kafka("groups", "lag", *groups, "--json").json["partitions"]
    assert len(rows) == 6
    for row in rows:
        expected_s = (60 - row["committed"]) * 60
        assert expected_s <= row["lag_s"] <= expected_s + SLACK_S


def test_a_group_without_offsets_is_refused(kafka: Penstock, unique: Unique) -> None:
    name = unique("group")
    assert f"group {name} has no committed offsets" in kafka("groups", "lag", name, code=1).err


def test_a_topic_that_is_gone_has_no_figures(
    kafka: Penstock, topic: str, bootstrap: str, unique: Unique
) -> None:
    other, group = unique("topic"), unique("group")
    kafka("topics", "create", other)
    commit(bootstrap, group, topic, {0: 0})
    commit(bootstrap, group, other, {0: 3})
    kafka("topics", "delete", other, "--yes")
    rows = kafka("groups", "lag", group, "--json").json["partitions"]
    assert {row["topic"]: row["lag_records"] for row in rows} in ({topic: 0}, {topic: 0, other: None})


def test_a_watch_shows_how_fast_the_lag_changes(topic: str, bootstrap: str, unique: Unique) -> None:
    group = unique("group")
    produce(bootstrap, topic, [now_ms()])
    commit(bootstrap, group, topic, {0: 0})
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "groups", "lag", group, "--watch", "--interval", "0.2", "--json"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_BOOTSTRAP": bootstrap},
    )
    assert process.stdout is not None
    try:
        first = json.loads(process.stdout.readline())["partitions"][0]
        produce(bootstrap, topic, [now_ms()] * 5)
        while (row := json.loads(process.stdout.readline())["partitions"][0])["lag_records"] < 6:
            pass
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first["lag_records"], first["lag_per_s"]) == (1, None)
    assert row["lag_per_s"] > 0 and row["written_per_s"] > 0 and row["read_per_s"] == 0
