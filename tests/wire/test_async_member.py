"""Members of groups in an asyncio loop, among themselves and with librdkafka in the same group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer

from penstock.model import TopicPartition
from penstock.wire import (
    AsyncClient,
    AsyncMember,
    AsyncProducer,
    BrokerRefused,
    MembershipSettings,
    Message,
    StaleMember,
    Stored,
    calls,
)
from penstock.wire.assignors import ASSIGNORS, COOPERATIVE_STICKY, RANGE

PARTITIONS = 6
PATIENCE_S = 60.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """The loop goes on meanwhile, so this is not ``wait_until``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def settings_of(*assignors: str, instance: str | None = None) -> MembershipSettings:
    return MembershipSettings(
        assignors, instance, session_timeout_ms=10_000, rebalance_timeout_ms=20_000, heartbeat_interval_ms=200
    )


def places(topic: str, count: int = PARTITIONS) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(count)]


class Reader:
    """A member that reads what it owns and commits when it has to give it up."""

    def __init__(self, client: AsyncClient, group: str, topic: str, settings: MembershipSettings) -> None:
        self.client, self.group = client, group
        self.member = AsyncMember(
            client,
            group,
            [topic],
            settings,
            on_assigned=self.assigned,
            on_revoked=self.revoked,
            on_lost=self.lost,
            topics_ms=500,
        )
        self.reading: dict[TopicPartition, asyncio.Task[None]] = {}
        self.positions: dict[TopicPartition, int] = {}
        self.seen: list[bytes | None] = []

    async def assigned(self, partitions: list[TopicPartition]) -> None:
        committed = await self.client.do(calls.committed(self.group, partitions))
        for at in partitions:
            self.positions[at] = committed.get(at, 0)
            self.reading[at] = asyncio.create_task(self.read(at))

    async def revoked(self, partitions: list[TopicPartition]) -> None:
        offsets = await self.stop(partitions)
        await self.member.commit(offsets)

    async def lost(self, partitions: list[TopicPartition]) -> None:
        await self.stop(partitions)

    async def stop(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        for at in partitions:
            self.reading.pop(at).cancel()
        return {at: self.positions.pop(at) for at in partitions}

    async def read(self, at: TopicPartition) -> None:
        while True:
            fetched = await self.client.fetch(at, self.positions[at], wait_ms=500)
            self.seen += [record.value for record in fetched.records]
            self.positions[at] = fetched.next_offset


@asynccontextmanager
async def topic_of(bootstrap: str, name: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(bootstrap) as client:
        await client.do(calls.create_topic(name, PARTITIONS))
        yield client


@pytest.mark.parametrize("assignor", list(ASSIGNORS))
def test_members_share_a_topic_and_each_record_is_read_once(
    bootstrap: str, unique: Callable[[str], str], assignor: str
) -> None:
    async def work() -> None:
        topic, group = unique("topic"), unique("group")
        async with topic_of(bootstrap, topic) as client, AsyncProducer(client) as producer:
            readers = [Reader(client, group, topic, settings_of(assignor)) for _ in range(3)]
            made = 0

            async def produce(count: int) -> None:
                nonlocal made
                messages = [Message(b"%d" % (made + number), b"%d" % number) for number in range(count)]
                outcomes = await producer.produce_many(topic, messages)
                assert all(isinstance(outcome, Stored) for outcome in outcomes)
                made += count

            def is_shared(*members: Reader) -> bool:
                owned = [at for reader in members for at in reader.reading]
                return sorted(owned) == places(topic) and all(len(reader.reading) for reader in members)

            def are_read() -> bool:
                return sum(len(reader.seen) for reader in readers) >= made

            readers[0].member.start()
            await until(lambda: is_shared(readers[0]), "the first has all")
            await produce(300)
            for reader in readers[1:]:
                reader.member.start()
            await until(lambda: is_shared(*readers), "all share")
            await produce(300)
            await until(are_read, "all is read")
            await readers[0].member.close()
            assert not readers[0].reading
            await until(lambda: is_shared(*readers[1:]), "the others share")
            await produce(300)
            await until(are_read, "all is read")
            for reader in readers[1:]:
                await reader.member.close()
            # Everybody gave up in order, so nothing was read twice.
            seen = sorted(int(value or b"") for reader in readers for value in reader.seen)
            assert seen == list(range(made))

    asyncio.run(work())


@pytest.mark.parametrize("assignor", [RANGE, COOPERATIVE_STICKY])
@pytest.mark.parametrize("is_first", [True, False])
def test_our_member_and_librdkafka_share_a_group(
    bootstrap: str, unique: Callable[[str], str], assignor: str, is_first: bool
) -> None:
    """Whoever comes first leads, and assigns for the other."""

    async def work() -> None:
        topic, group = unique("topic"), unique("group")
        async with topic_of(bootstrap, topic) as client:
            ours = Reader(client, group, topic, settings_of(assignor))
            theirs = Consumer(
                {
                    "bootstrap.servers": bootstrap,
                    "group.id": group,
                    "partition.assignment.strategy": assignor,
                    "session.timeout.ms": 10_000,
                    "heartbeat.interval.ms": 200,
                    "auto.offset.reset": "earliest",
                }
            )
            is_open = True

            async def poll() -> None:
                while is_open:
                    await asyncio.to_thread(theirs.poll, 0.05)

            def assigned() -> list[TopicPartition]:
                return sorted(TopicPartition(each.topic, each.partition) for each in theirs.assignment())

            def is_shared() -> bool:
                mine, others = sorted(ours.reading), assigned()
                return bool(mine and others) and sorted(mine + others) == places(topic)

            theirs_polling: asyncio.Task[None] | None = None
            try:
                if is_first:
                    ours.member.start()
                    await until(lambda: len(ours.reading) == PARTITIONS, "ours has all")
                    assert ours.member._membership.is_leader
                theirs.subscribe([topic])
                theirs_polling = asyncio.create_task(poll())
                if not is_first:
                    await until(lambda: len(assigned()) == PARTITIONS, "theirs has all")
                    ours.member.start()
                await until(is_shared, "both share")
                assert ours.member._membership.is_leader == is_first
                await ours.member.commit(dict.fromkeys(ours.member.owned, 0))
                if is_first:
                    is_open = False
                    await theirs_polling
                    await asyncio.to_thread(theirs.close)
                    await until(lambda: len(ours.reading) == PARTITIONS, "ours has all again")
                    await ours.member.close()
                else:
                    await ours.member.close()
                    await until(lambda: len(assigned()) == PARTITIONS, "theirs has all again")
            finally:
                is_open = False
                if theirs_polling is not None:
                    await theirs_polling
                await asyncio.to_thread(theirs.close)

    asyncio.run(work())


def test_a_stale_member_cannot_commit_and_its_token_works_anywhere_until_then(
    bootstrap: str, unique: Callable[[str], str]
) -> None:
    async def work() -> None:
        topic, group = unique("topic"), unique("group")
        at = TopicPartition(topic, 0)
        async with topic_of(bootstrap, topic) as client, AsyncClient(bootstrap) as other:
            reader = Reader(client, group, topic, settings_of(RANGE))
            with pytest.raises(StaleMember):
                await reader.member.commit({at: 1})
            async with reader.member as member:
                await until(lambda: len(reader.reading) == PARTITIONS, "it has all")
                token = member.member
                await other.do(calls.commit(group, {at: 7}, member=token))
                assert await other.do(calls.committed(group, [at])) == {at: 7}
            with pytest.raises(StaleMember):
                await other.do(calls.commit(group, {at: 8}, member=token))

    asyncio.run(work())


def test_a_leader_hears_of_topics_that_are_made_later(bootstrap: str, unique: Callable[[str], str]) -> None:
    async def work() -> None:
        topic, group = unique("topic"), unique("group")
        async with AsyncClient(bootstrap) as client:
            reader = Reader(client, group, topic, settings_of(COOPERATIVE_STICKY))
            async with reader.member as member:
                await until(lambda: member.state.name == "STABLE", "it is in the group")
                assert member.owned == []
                await client.do(calls.create_topic(topic, 2))
                await until(lambda: sorted(reader.reading) == places(topic, 2), "it has both partitions")

    asyncio.run(work())


def test_a_fenced_static_member_ends_with_the_error(bootstrap: str, unique: Callable[[str], str]) -> None:
    async def work() -> None:
        topic, group = unique("topic"), unique("group")
        async with topic_of(bootstrap, topic) as client:
            readers = [Reader(client, group, topic, settings_of(RANGE, instance="one")) for _ in range(2)]
            readers[0].member.start()
            await until(lambda: len(readers[0].reading) == PARTITIONS, "the first has all")
            readers[1].member.start()
            with pytest.raises(BrokerRefused, match="fenced"):
                await asyncio.wait_for(readers[0].member.ended(), PATIENCE_S)
            assert not readers[0].reading
            await until(lambda: len(readers[1].reading) == PARTITIONS, "the second has all")
            await readers[1].member.close()

    asyncio.run(work())


def test_a_callback_that_fails_ends_the_member_and_is_not_hidden(
    bootstrap: str, unique: Callable[[str], str]
) -> None:
    async def work() -> None:
        topic, group = unique("topic"), unique("group")

        async def fail(_: Any) -> None:
            raise RuntimeError("the caller's own mistake")

        async with topic_of(bootstrap, topic) as client:
            member = AsyncMember(client, group, [topic], settings_of(RANGE), on_assigned=fail)
            member.start()
            with pytest.raises(RuntimeError, match="own mistake"):
                await asyncio.wait_for(member.ended(), PATIENCE_S)
            assert member.owned == []
            await member.close()

    asyncio.run(work())
