"""The asyncio client on one broker: records produced and fetched per second of its own CPU.

``single`` is a hundred callers that wait for each record; ``many`` are calls with 500 records. Records have a key
and 100 bytes, and are decoded one by one when they are fetched. The broker's CPU does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from benchmarks.process import MeasuredBroker, settle
from penstock.model import TopicPartition
from penstock.wire import AsyncClient, AsyncProducer, Message, Stored, calls

TOPIC, PARTITIONS = "wire_async", 3
CALLERS, SINGLES = 100, 100
MANY, CALLS = 500, 200
TURNS = 2
VALUE = b"x" * 100
# Records per second of CPU with calls of 500; a gateway needs this and its HTTP on one core.
TARGET = 300_000


def run() -> dict[str, Any]:
    with MeasuredBroker() as broker:
        host, port = broker.address
        result = asyncio.run(_measure(f"{host}:{port}"))
    return {
        "unit": "records per second of CPU",
        **result,
        "target": TARGET,
        "met": result["produce_many"] >= TARGET,
    }


async def _measure(bootstrap: str) -> dict[str, int]:
    async with AsyncClient(bootstrap) as client, AsyncProducer(client) as producer:
        await client.do(calls.create_topic(TOPIC, PARTITIONS))
        messages = [Message(VALUE, b"%d" % number) for number in range(MANY)]

        async def call() -> int:
            for number in range(SINGLES):
                await producer.produce(TOPIC, VALUE, key=b"%d" % number)
            return SINGLES

        async def call_with_many() -> int:
            outcomes = await producer.produce_many(TOPIC, messages)
            assert all(isinstance(outcome, Stored) for outcome in outcomes)
            return len(outcomes)

        async def single() -> int:
            return sum(await asyncio.gather(*(call() for _ in range(CALLERS))))

        async def many() -> int:
            done = 0
            for _ in range(CALLS // 20):
                done += sum(await asyncio.gather(*(call_with_many() for _ in range(20))))
            return done

        async def fetch() -> int:
            count = 0
            for number in range(PARTITIONS):
                offset = 0
                while True:
                    fetched = await client.fetch(TopicPartition(TOPIC, number), offset, wait_ms=0)
                    count += len(fetched.records)
                    if fetched.next_offset == offset:
                        break
                    offset = fetched.next_offset
            return count

        rates: dict[str, list[float]] = {"produce_single": [], "produce_many": [], "fetch": []}
        for _ in range(TURNS):
            for name, work in (("produce_single", single), ("produce_many", many), ("fetch", fetch)):
                settle()
                rates[name].append(await _rate(work()))
        return {name: round(max(found)) for name, found in rates.items()}


async def _rate(work: Awaitable[int]) -> float:
    began = time.process_time()
    return await work / (time.process_time() - began)
