"""What every client must see when it writes and reads records.

A class here is a promise; a client's test class inherits those that its library can put to the test. Records
are compared whole and in order, per partition: key, value, headers, timestamp and offset.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.interop.client import CODECS, Acks, Client, ClientError, Outgoing, Record, When
from tests.interop.murmur2 import partition_of
from tests.interop.raw import StoredBatch, stored_batches
from tests.support import wait_until

Unique = Callable[[str], str]


def mixture(partitions: int, count: int, *, null_headers: bool = True) -> list[Outgoing]:
    """Records of every shape: null, empty and large keys and values, repeated, null and foreign headers."""
    chance = random.Random(count)
    start = int(time.time() * 1000) - 600_000
    keys = (None, b"", b"key", "schlüssel".encode(), bytes(range(256)))
    values = (b"", b"value", None, "größe €".encode() * 50, chance.randbytes(700))
    headers = (
        (),
        (("trace", b"\x00\x01\xff"),),
        (("a", b"1"), ("a", b"2"), ("größe", b""), ("nothing", None if null_headers else b"")),
    )
    records = []
    for number in range(count):
        key, value = chance.choice(keys), chance.choice(values)
        if key is None and value is None:
            key = b"deleted"  # some clients refuse a record of nothing
        timestamp = start + chance.randrange(100_000)
        records.append(Outgoing(value, key, chance.choice(headers), number % partitions, timestamp))
    return records


def numbered(partitions: int, count: int, first: int = 0) -> list[Outgoing]:
    """Records told apart by their value."""
    return [
        Outgoing(value=b"%d" % number, partition=number % partitions)
        for number in range(first, first + count)
    ]


def by_partition(records: Iterable[Record]) -> dict[int, list[Record]]:
    grouped: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.partition].append(record)
    return dict(grouped)


def assert_same(sent: Sequence[Outgoing], received: Sequence[Record]) -> None:
    """Everything sent to a fresh topic was received: whole, once, in order, at consecutive offsets."""
    expected: dict[int, list[Record]] = defaultdict(list)
    for each in sent:
        assert each.partition is not None and each.timestamp is not None
        there = expected[each.partition]
        there.append(Record(each.partition, len(there), each.timestamp, each.key, each.value, each.headers))
    assert by_partition(received) == dict(expected)


def assert_compressed(stored: Sequence[StoredBatch], codec: str) -> None:
    """Clients leave a batch that would not become smaller as it is: on a busy machine, one of a few records."""
    assert max(stored, key=lambda batch: batch.record_count).codec == codec
    assert {batch.codec for batch in stored} <= {codec, "none"}


class Writing:
    # Whether the client can write a header without a value. (Every client can read one.)
    NULL_HEADERS = True

    @pytest.mark.parametrize("codec", CODECS)
    def test_records_come_back_exactly(
        self, client: Client, reference: Client, bootstrap: str, unique: Unique, codec: str
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic, partitions=3)
        sent = mixture(3, 90, null_headers=self.NULL_HEADERS)

        written = client.produce(topic, sent, codec=codec)

        assert [each.partition for each in written] == [each.partition for each in sent]
        assert [each.offset for each in written] == [number // 3 for number in range(90)]
        start = dict.fromkeys(range(3), 0)
        assert_same(sent, client.consume(topic, start, 90))
        assert_same(sent, reference.consume(topic, start, 90))
        stored = [batch for partition in range(3) for batch in stored_batches(bootstrap, topic, partition)]
        assert sum(batch.record_count for batch in stored) == 90
        assert_compressed(stored, codec)

    @pytest.mark.parametrize("acks", ["0", "1", "all"])
    def test_every_level_of_acks_stores_the_records(
        self, client: Client, reference: Client, unique: Unique, acks: Acks
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic)
        sent = mixture(1, 20, null_headers=self.NULL_HEADERS)

        written = client.produce(topic, sent, acks=acks)

        if acks == "0":
            wait_until(lambda: reference.offset(topic, 0, "latest") == 20, 10, "20 unacknowledged records")
        else:
            assert [each.offset for each in written] == list(range(20))
        assert_same(sent, client.consume(topic, {0: 0}, 20))

    def test_an_idempotent_producer_numbers_its_records_without_gaps(
        self, client: Client, bootstrap: str, unique: Unique
    ) -> None:
        topic = unique("topic")
        client.create_topic(topic, partitions=2)
        sent = mixture(2, 60, null_headers=self.NULL_HEADERS)

        client.produce(topic, sent, idempotent=True)

        assert_same(sent, client.consume(topic, {0: 0, 1: 0}, 60))
        for partition in range(2):
            stored = stored_batches(bootstrap, topic, partition)
            assert all(batch.producer_id >= 0 and batch.producer_epoch >= 0 for batch in stored)
            # A fresh producer starts at sequence 0, so sequences here equal offsets.
            assert [batch.base_sequence for batch in stored] == [batch.base_offset for batch in stored]

    def test_a_record_of_900_kilobytes_passes(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        client.create_topic(topic)
        value = random.Random(9).randbytes(900_000)

        client.produce(topic, [Outgoing(value=b"before", partition=0)])
        client.produce(topic, [Outgoing(value=value, partition=0)])

        received = client.consume(topic, {0: 0}, 2)
        assert [record.value for record in received] == [b"before", value]

    def test_a_record_beyond_the_topics_limit_is_refused(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        client.create_topic(topic, configs={"max.message.bytes": "20000"})

        with pytest.raises(ClientError) as refused:
            client.produce(topic, [Outgoing(value=random.Random(1).randbytes(30_000), partition=0)])

        assert refused.value.name == "MESSAGE_TOO_LARGE"
        assert client.produce(topic, [Outgoing(value=bytes(10_000), partition=0)]) == [(0, 0)]

    def test_keys_go_to_the_partitions_that_javas_hash_says(self, client: Client, unique: Unique) -> None:
        topic = unique("topic")
        client.create_topic(topic, partitions=7)
        chance = random.Random(2)
        keys = [chance.randbytes(length) for length in range(1, 40) for _ in range(3)]

        written = client.produce(topic, [Outgoing(value=b"v", key=key) for key in keys])

        assert [each.partition for each in written] == [partition_of(key, 7) for key in keys]


class Reading:
    def test_reads_what_another_client_wrote_with_every_codec(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic = unique("topic")
        reference.create_topic(topic, partitions=2)
        sent: list[Outgoing] = []
        for codec in CODECS:
            some = mixture(2, 40)
            reference.produce(topic, some, codec=codec)
            sent += some

        assert_same(sent, client.consume(topic, {0: 0, 1: 0}, len(sent)))

    @pytest.mark.parametrize("codec", ["none", "gzip"])
    def test_reading_may_start_inside_a_batch(
        self, client: Client, reference: Client, bootstrap: str, unique: Unique, codec: str
    ) -> None:
        topic = unique("topic")
        reference.create_topic(topic)
        reference.produce(topic, numbered(1, 50), codec=codec)
        largest = max(stored_batches(bootstrap, topic, 0), key=lambda batch: batch.record_count)
        assert largest.record_count > 1
        start = largest.base_offset + largest.record_count // 2

        received = client.consume(topic, {0: start}, 50 - start)

        assert [(record.offset, record.value) for record in received] == [
            (number, b"%d" % number) for number in range(start, 50)
        ]


class AskingOffsets:
    """Earliest, latest and by timestamp, which every client has."""

    # Whether the client, when no record is that new, answers with the end of the log itself.
    NONE_IS_LATEST = False

    # Newest in the middle, two of the same age, and time running backwards.
    AGES = (0, 100, 200, 200, 150, 900, 300, 400)

    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_offsets_are_found_by_timestamp(
        self, client: Client, reference: Client, unique: Unique, codec: str
    ) -> None:
        topic, start = unique("topic"), int(time.time() * 1000) - 60_000
        self.fill(reference, topic, start, codec)

        asked: dict[When, int | None] = {
            "earliest": 0,
            "latest": 8,
            start - 1000: 0,
            start: 0,
            start + 1: 1,
            start + 101: 2,
            start + 200: 2,
            start + 201: 5,
            start + 900: 5,
            start + 901: 8 if self.NONE_IS_LATEST else None,
        }
        assert {when: client.offset(topic, 0, when) for when in asked} == asked
        assert client.offset(topic, 1, "earliest") == 0
        assert client.offset(topic, 1, "latest") == 0
        assert client.offset(topic, 1, start) == (0 if self.NONE_IS_LATEST else None)

    def fill(self, reference: Client, topic: str, start: int, codec: str) -> None:
        reference.create_topic(topic, partitions=2)
        # Two batches, so that the answer depends on the right one being opened.
        records = [Outgoing(value=b"v", partition=0, timestamp=start + age) for age in self.AGES]
        reference.produce(topic, records[:3], codec=codec)
        reference.produce(topic, records[3:], codec=codec)


class AskingNewest(AskingOffsets):
    """KIP-734: the offset of the newest record, not of the last."""

    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_the_newest_record_is_found(
        self, client: Client, reference: Client, unique: Unique, codec: str
    ) -> None:
        topic, start = unique("topic"), int(time.time() * 1000) - 60_000
        self.fill(reference, topic, start, codec)

        assert client.offset(topic, 0, "max_timestamp") == 5
        assert client.offset(topic, 1, "max_timestamp") is None
