"""kcat against the broker: an old librdkafka (2.0.2 in Debian 12) behind a command line.

It writes lines of text and reads them back as JSON. It cannot create topics with several partitions, set
timestamps, give headers per record or manage anything, so it has tests of its own instead of the contract.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.client import CODECS, PATIENCE_S, Client, Record, Security
from tests.interop.groups_contract import ALL, PARTITIONS, wait_for_values, wait_until_settled
from tests.interop.raw import stored_batches
from tests.interop.records_contract import assert_compressed, by_partition, numbered
from tests.support import wait_until
from tests.tools import Missing, kcat, skip_or_fail

Unique = Callable[[str], str]


class Kcat:
    def __init__(self, path: str, bootstrap: str, security: Security | None = None) -> None:
        self.command = [path, "-b", bootstrap, "-m", "10"]
        for name, value in (security or {}).items():
            self.command += ["-X", f"{name}={value}"]

    def end(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run it until it ends, well or not."""
        return subprocess.run(
            [*self.command, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def run(self, *arguments: str, text: str = "", fails: bool = False) -> str:
        done = self.end(*arguments, text=text)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    def read(self, *arguments: str) -> list[Record]:
        return records_of(self.run(*arguments, "-J", "-q"))


class KcatMember:
    """``kcat -G``: a consumer in a group. Its assignments are read from what it tells the user."""

    def __init__(self, kcat: Kcat, group: str, topic: str) -> None:
        settings = ["session.timeout.ms=10000", "heartbeat.interval.ms=200", "auto.offset.reset=earliest"]
        options = [word for setting in settings for word in ("-X", setting)]
        self._process = subprocess.Popen(
            # Unbuffered output, as JSON lines.
            [*kcat.command, *options, "-u", "-J", "-G", group, topic],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._records: list[Record] = []
        self._owned: frozenset[int] = frozenset()
        self._revoked = 0
        self._threads = [
            threading.Thread(target=self._read_records, daemon=True),
            threading.Thread(target=self._read_news, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def partitions(self) -> frozenset[int]:
        return self._owned

    def revoked(self) -> int:
        return self._revoked

    def records(self) -> list[Record]:
        return list(self._records)

    def leave(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()

    def _read_records(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._records.append(_record(json.loads(line)))

    def _read_news(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "rebalanced" not in line:
                continue
            partitions = frozenset(int(number) for number in re.findall(r"\[(\d+)\]", line))
            if "assigned:" in line:
                self._owned = partitions
            else:
                self._owned -= partitions
                self._revoked += len(partitions)


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Kcat:
    try:
        return Kcat(kcat(), bootstrap)
    except Missing as missing:
        skip_or_fail(missing)


@pytest.fixture
def join(client: Kcat) -> Iterator[Callable[[str, str], KcatMember]]:
    members: list[KcatMember] = []

    def join(group: str, topic: str) -> KcatMember:
        members.append(KcatMember(client, group, topic))
        return members[-1]

    yield join
    for member in members:
        member.leave()


@pytest.mark.parametrize("codec", CODECS)
def test_lines_come_back_exactly(
    client: Kcat, reference: Client, bootstrap: str, unique: Unique, codec: str
) -> None:
    topic, start = unique("topic"), int(time.time() * 1000)
    reference.create_topic(topic, partitions=3)
    lines = [f"key {number}:value größe {number} {'x' * number}" for number in range(90)]

    for partition in range(3):
        chosen = ("-P", "-t", topic, "-p", str(partition), "-K:", "-z", codec, "-H", "a=1", "-H", "b=")
        client.run(*chosen, text="\n".join(lines[partition::3]) + "\n")

    received = by_partition(client.read("-C", "-t", topic, "-o", "beginning", "-e"))
    assert received == by_partition(reference.consume(topic, {0: 0, 1: 0, 2: 0}, 90))
    for partition, records in received.items():
        assert [record.offset for record in records] == list(range(30))
        told = [f"{(record.key or b'').decode()}:{(record.value or b'').decode()}" for record in records]
        assert told == lines[partition::3]
        assert {record.headers for record in records} == {(("a", b"1"), ("b", b""))}
        assert all(start <= record.timestamp <= time.time() * 1000 for record in records)
    stored = [batch for partition in range(3) for batch in stored_batches(bootstrap, topic, partition)]
    assert_compressed(stored, codec)


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_level_of_acks_stores_the_lines(
    client: Kcat, reference: Client, unique: Unique, acks: str
) -> None:
    topic = unique("topic")
    reference.create_topic(topic)

    client.run("-P", "-t", topic, "-X", f"acks={acks}", text="one\ntwo\nthree\n")

    wait_until(lambda: reference.offset(topic, 0, "latest") == 3, PATIENCE_S, "three records")
    records = client.read("-C", "-t", topic, "-o", "beginning", "-e")
    assert [record.value for record in records] == [b"one", b"two", b"three"]


def test_an_idempotent_producer_is_numbered(
    client: Kcat, reference: Client, bootstrap: str, unique: Unique
) -> None:
    topic = unique("topic")
    reference.create_topic(topic)

    client.run("-P", "-t", topic, "-X", "enable.idempotence=true", text="one\ntwo\nthree\n")

    stored = stored_batches(bootstrap, topic, 0)
    assert sum(batch.record_count for batch in stored) == 3
    assert all(batch.producer_id >= 0 for batch in stored)
    assert [batch.base_sequence for batch in stored] == [batch.base_offset for batch in stored]


def test_a_line_beyond_the_topics_limit_is_refused(client: Kcat, reference: Client, unique: Unique) -> None:
    topic = unique("topic")
    reference.create_topic(topic, configs={"max.message.bytes": "20000"})

    told = client.run("-P", "-t", topic, text="x" * 30_000 + "\n", fails=True)

    assert "Message size too large" in told


def test_writing_to_an_unknown_topic_creates_it(client: Kcat, reference: Client, unique: Unique) -> None:
    topic = unique("topic")

    client.run("-P", "-t", topic, text="hello\n")

    assert len(reference.describe_topic(topic)) == 1
    assert [record.value for record in client.read("-C", "-t", topic, "-o", "beginning", "-e")] == [b"hello"]


def test_reading_starts_at_an_offset_and_from_the_end(
    client: Kcat, reference: Client, unique: Unique
) -> None:
    topic = unique("topic")
    reference.create_topic(topic)
    reference.produce(topic, numbered(1, 50), codec="gzip")

    assert [r.offset for r in client.read("-C", "-t", topic, "-p0", "-o", "37", "-e")] == list(range(37, 50))
    assert [r.offset for r in client.read("-C", "-t", topic, "-p0", "-o", "-4", "-e")] == list(range(46, 50))


def test_offsets_are_found_by_timestamp(client: Kcat, reference: Client, unique: Unique) -> None:
    topic, start = unique("topic"), int(time.time() * 1000) - 60_000
    reference.create_topic(topic)
    records = [each._replace(timestamp=start + 100 * i) for i, each in enumerate(numbered(1, 10))]
    reference.produce(topic, records)

    asked = {start - 5: 0, start: 0, start + 101: 2, start + 900: 9, start + 901: -1, -1: 10, -2: 0}
    for timestamp, offset in asked.items():
        answer = json.loads(client.run("-Q", "-J", "-t", f"{topic}:0:{timestamp}"))
        assert answer[topic]["0"]["offset"] == offset, timestamp - start


def test_the_cluster_and_its_topics_are_listed(
    client: Kcat, reference: Client, bootstrap: str, unique: Unique
) -> None:
    topic = unique("topic")
    reference.create_topic(topic, partitions=3)

    listed = json.loads(client.run("-L", "-J"))
    alone = json.loads(client.run("-L", "-J", "-t", topic))

    assert listed["brokers"] == [{"id": 1, "name": bootstrap}]
    assert listed["controllerid"] == 1
    assert topic in {each["topic"] for each in listed["topics"]}
    (described,) = alone["topics"]
    assert described["partitions"] == [
        {"partition": index, "leader": 1, "replicas": [{"id": 1}], "isrs": [{"id": 1}]} for index in range(3)
    ]


def test_two_members_share_the_partitions_and_the_one_that_stays_takes_over(
    reference: Client, unique: Unique, join: Callable[[str, str], KcatMember]
) -> None:
    topic, group = unique("topic"), unique("group")
    reference.create_topic(topic, PARTITIONS)
    reference.produce(topic, numbered(PARTITIONS, 40))

    first = join(group, topic)
    wait_until_settled(reference, group, [first])
    wait_for_values([first], 40)
    second = join(group, topic)
    wait_until_settled(reference, group, [first, second])
    reference.produce(topic, numbered(PARTITIONS, 40, first=40))
    wait_for_values([first, second], 80)
    second.leave()
    wait_until_settled(reference, group, [first])
    reference.produce(topic, numbered(PARTITIONS, 40, first=80))
    wait_for_values([first, second], 120)
    first.leave()

    assert reference.committed(group, topic, ALL) == dict.fromkeys(ALL, 30)


def test_the_next_member_starts_exactly_where_the_last_one_stopped(
    client: Kcat, reference: Client, unique: Unique
) -> None:
    topic, group = unique("topic"), unique("group")
    reference.create_topic(topic, partitions=3)
    reference.produce(topic, numbered(3, 60))
    reading = ("-X", "auto.offset.reset=earliest", "-G", group, topic)

    earlier = client.read("-c", "25", *reading)
    later = client.read("-c", "35", *reading)

    assert (len(earlier), len(later)) == (25, 35)
    for partition, records in by_partition(earlier + later).items():
        assert [record.offset for record in records] == list(range(20))
        assert [record.value for record in records] == [b"%d" % (3 * i + partition) for i in range(20)]


def records_of(output: str) -> list[Record]:
    return [_record(json.loads(line)) for line in output.splitlines()]


def _record(line: dict[str, Any]) -> Record:
    names = line.get("headers", [])
    headers = tuple((name, value.encode()) for name, value in zip(names[::2], names[1::2], strict=True))
    key, value = line["key"], line["payload"]
    return Record(
        line["partition"],
        line["offset"],
        line["ts"],
        None if key is None else key.encode(),
        None if value is None else value.encode(),
        headers,
    )
