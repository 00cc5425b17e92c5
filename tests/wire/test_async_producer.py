"""The asyncio producer against real brokers, and while their leaders are killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import pytest

from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.records import Record, decode_header
from penstock.wire import (
    LATEST,
    AsyncClient,
    AsyncProducer,
    BatchTooLarge,
    Message,
    ProduceFailed,
    Stored,
    UnknownTopic,
    WireError,
    calls,
)
from penstock.wire.polling import FetchSettings
from tests.cluster.cluster import Cluster
from tests.interop.murmur2 import partition_of
from tests.support import wait_until


async def read(client: AsyncClient, at: TopicPartition) -> list[Record]:
    end = (await client.do(calls.list_offsets({at: LATEST})))[at].offset
    records: list[Record] = []
    offset = 0
    while offset < end:
        fetched = await client.fetch(at, offset)
        records += fetched.records
        offset = fetched.next_offset
    return records


def test_each_record_has_its_place(bootstrap: str, unique: Callable[[str], str]) -> None:
    async def work() -> None:
        topic = unique("async")
        async with AsyncClient(bootstrap) as client, AsyncProducer(client) as producer:
            await client.do(calls.create_topic(topic, 5))
            begun_ms = time.time_ns() // 1_000_000
            stored = await asyncio.gather(
                *(producer.produce(topic, b"%d" % number, key=b"key-%d" % number) for number in range(500))
            )
            assert [each.partition for each in stored] == [
                partition_of(b"key-%d" % number, 5) for number in range(500)
            ]
            logs = {
                partition: {
                    record.offset: record for record in await read(client, TopicPartition(topic, partition))
                }
                for partition in range(5)
            }
            for number, (partition, offset, timestamp_ms) in enumerate(stored):
                record = logs[partition].pop(offset)
                assert record.value == b"%d" % number
                assert record.timestamp == timestamp_ms >= begun_ms
            assert not any(logs.values())

    asyncio.run(work())


def test_what_a_call_says_is_kept_and_many_have_a_result_each(
    bootstrap: str, unique: Callable[[str], str]
) -> None:
    async def work() -> None:
        topic = unique("async")
        async with AsyncClient(bootstrap) as client, AsyncProducer(client, acks=1, linger_ms=2) as producer:
            await client.do(calls.create_topic(topic, 3))
            headers = [("trace", b"1"), ("empty", None)]
            stored = await producer.produce(
                topic, None, key=b"key", headers=headers, partition=2, timestamp_ms=1_700_000_000_000
            )
            assert stored == Stored(2, 0, 1_700_000_000_000)
            (record,) = await read(client, TopicPartition(topic, 2))
            assert (record.key, record.value, list(record.headers)) == (b"key", None, headers)
            outcomes = await producer.produce_many(
                topic, [Message(b"%d" % number, partition=number % 2) for number in range(1000)]
            )
            assert [(each.partition, each.offset) for each in outcomes if isinstance(each, Stored)] == [
                (number % 2, number // 2) for number in range(1000)
            ]
            assert await producer.produce_many(topic, []) == []
            # Without a key all of a call go to one partition.
            together = await producer.produce_many(topic, [Message(b"")] * 10)
            assert len({each.partition for each in together if isinstance(each, Stored)}) == 1

    asyncio.run(work())


@pytest.mark.parametrize("codec", list(Codec))
def test_batches_are_compressed_as_asked(bootstrap: str, unique: Callable[[str], str], codec: Codec) -> None:
    async def work() -> None:
        at = TopicPartition(unique("async"), 0)
        async with AsyncClient(bootstrap) as client, AsyncProducer(client, codec=codec) as producer:
            await client.do(calls.create_topic(at.topic, 1))
            await producer.produce_many(at.topic, [Message(b"value" * 20)] * 100)
            raw = await client.do(calls.fetch(at, 0, FetchSettings()))
            assert decode_header(raw.records).codec == codec
            assert [record.value for record in await read(client, at)] == [b"value" * 20] * 100

    asyncio.run(work())


def test_failures_say_that_nothing_is_stored(bootstrap: str, unique: Callable[[str], str]) -> None:
    async def work() -> None:
        topic = unique("async")
        async with AsyncClient(bootstrap) as client, AsyncProducer(client) as producer:
            await client.do(calls.create_topic(topic, 1, configs={"max.message.bytes": "2000"}))
            with pytest.raises(UnknownTopic):
                await producer.produce(unique("nothing"), b"")
            with pytest.raises(UnknownTopic, match="no partition 7"):
                await producer.produce(topic, b"", partition=7)
            # Large and small together: the batch is divided until only the large one is refused.
            outcomes = await producer.produce_many(
                topic, [Message(b"x" * (5_000 if number == 50 else 100)) for number in range(100)]
            )
            (large,) = [each for each in outcomes if isinstance(each, ProduceFailed)]
            assert outcomes[50] is large and isinstance(large.cause, BatchTooLarge)
            assert not large.may_be_stored
            offsets = [each.offset for each in outcomes if isinstance(each, Stored)]
            assert offsets == list(range(99))
            assert [record.offset for record in await read(client, TopicPartition(topic, 0))] == offsets
            with pytest.raises(TypeError):
                await producer.produce(topic, "text")  # type: ignore[arg-type]
        with pytest.raises(ProduceFailed, match="closed"):
            await producer.produce(topic, b"")

    asyncio.run(work())


def test_a_full_buffer_makes_callers_wait_in_order(bootstrap: str, unique: Callable[[str], str]) -> None:
    async def work() -> None:
        topic = unique("async")
        async with AsyncClient(bootstrap) as client:
            await client.do(calls.create_topic(topic, 1))
            peak = 0
            async with AsyncProducer(client, buffer_bytes=5_000) as producer:

                async def call(number: int) -> Stored:
                    nonlocal peak
                    stored = await producer.produce(topic, b"%d" % number + b" " * 1_000)
                    peak = max(peak, producer.buffered_bytes)
                    return stored

                stored = await asyncio.gather(*(call(number) for number in range(100)))
                # One alone may be larger than the buffer.
                await producer.produce(topic, b" " * 20_000)
                await producer.flush()
                assert producer.buffered_bytes == 0
            assert [each.offset for each in stored] == list(range(100))
            assert peak <= 5_000

    asyncio.run(work())


def test_closing_the_client_fails_what_has_no_result(unique: Callable[[str], str], bootstrap: str) -> None:
    async def work() -> None:
        topic = unique("async")
        client = AsyncClient(bootstrap)
        producer = AsyncProducer(client)
        await client.do(calls.create_topic(topic, 1))
        await producer.produce(topic, b"one")
        calls_made = [asyncio.create_task(producer.produce(topic, b"two")) for _ in range(3)]
        await asyncio.sleep(0)
        await client.close()
        for call in calls_made:
            with pytest.raises(WireError):
                await call
        await producer.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "1000"}) as cluster:
        yield cluster


@pytest.mark.chaos
def test_leaders_killed_under_load_cost_no_record_and_repeat_none(
    cluster: Cluster, unique: Callable[[str], str]
) -> None:
    topic = unique("async")
    chance = random.Random(1)

    async def work() -> None:
        async with AsyncClient(cluster.bootstrap, request_timeout_ms=20_000) as client:
            await client.do(calls.create_topic(topic, 6, 3, {"min.insync.replicas": "2"}))
            await asyncio.to_thread(cluster.wait_in_sync, topic)
            stored: dict[int, Stored] = {}
            failed: dict[int, ProduceFailed] = {}
            numbers = iter(range(10**9))
            is_over = False

            async def call(producer: AsyncProducer) -> None:
                while not is_over:
                    mine = [next(numbers) for _ in range(chance.choice([1, 1, 20]))]
                    messages = [Message(b"%d" % number, key=b"%d" % (number % 100)) for number in mine]
                    for number, outcome in zip(mine, await producer.produce_many(topic, messages)):
                        if isinstance(outcome, Stored):
                            stored[number] = outcome
                        else:
                            failed[number] = outcome

            async def enough(more: int) -> None:
                goal = len(stored) + more
                await asyncio.to_thread(wait_until, lambda: len(stored) >= goal, 90, "records are stored")

            async with AsyncProducer(client) as producer:
                callers = [asyncio.create_task(call(producer)) for _ in range(30)]
                for partition in range(2):
                    await enough(1000)
                    leader = await asyncio.to_thread(cluster.leader, topic, partition)
                    await asyncio.to_thread(cluster.kill, leader)
                    await enough(1000)
                    await asyncio.to_thread(cluster.start, leader)
                    await asyncio.to_thread(cluster.wait_in_sync, topic)
                is_over = True
                await asyncio.gather(*callers)
            logs = {partition: await read(client, TopicPartition(topic, partition)) for partition in range(6)}
            places: dict[int, list[tuple[int, int]]] = {}
            for partition, records in logs.items():
                assert [record.offset for record in records] == list(range(len(records)))
                for record in records:
                    places.setdefault(int(record.value or b""), []).append((partition, record.offset))
            assert len(stored) >= 4000
            for number, outcome in stored.items():
                assert len(places[number]) == 1, f"{number} is stored {places[number]}"
                assert outcome.offset in (-1, places[number][0][1])
                assert outcome.partition == places[number][0][0]
            for number, failure in failed.items():
                assert len(places.get(number, [])) <= failure.may_be_stored

    asyncio.run(work())
