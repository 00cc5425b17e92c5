"""Clients that write keys, values and tombstones to compacted topics, and one that changes the topics.

A ``KeyedProducer`` is an idempotent producer. A ``KeyedTransactor`` writes several keys in a transaction, and
aborts some. Keys are shared: a partition has a few at a time, and one that is deleted for good is replaced by
another. So some tombstones are the last record of their key, and a replica that misses one shows it.
"""

from __future__ import annotations

from random import Random

from penstock.protocol.messages.offsets import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from penstock.protocol.records import RecordFields
from penstock.sim.administrator import TOPIC, set_config
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.compaction_checkers import NAME, CompactionCheckers, KeyedWrites
from penstock.sim.compaction_plans import Compaction
from penstock.sim.loop import Process
from penstock.sim.producers import IdempotentProducer, Identity
from penstock.sim.tellers import Transactor
from penstock.sim.topics import TABLE, Topics
from penstock.sim.transaction_checkers import Transaction
from penstock.sim.transactional_producer import Result, TransactionalProducer

POLICIES = ("compact", "delete", "compact,delete")
# How often a deleted key is replaced by another.
RETIRES = 0.6
# How often a transactor decides against its transaction, vanishes, or sleeps in it.
ABORTS = 0.25
VANISHES = 0.06
SLEEPS = 0.15
SLEEP_MS_MAX = 8_000.0


class Keys:
    """The keys in use, by partition."""

    def __init__(self, writes: KeyedWrites, count: int, tombstones: float) -> None:
        self._writes = writes
        self._count = count
        self._tombstones = tombstones
        self._keys: dict[Place, list[bytes]] = {}
        self._made = 0

    def write(
        self,
        chance: Random,
        place: Place,
        name: bytes,
        process: Process,
        transaction: Transaction | None = None,
    ) -> None:
        """Decide what the record of this name is: a value or a tombstone, and of which key."""
        keys = self._keys.setdefault(place, [])
        while len(keys) < self._count:
            self._made += 1
            keys.append(b"key-%d" % self._made)
        number = chance.randrange(len(keys))
        is_tombstone = chance.random() < self._tombstones
        value = None if is_tombstone else b"value of %s" % name
        self._writes.writing(
            place, name, keys[number], value, process.clock.wall_ms(), process.loop.now_ms, transaction
        )
        if is_tombstone and chance.random() < RETIRES:
            del keys[number]


def fields(writes: KeyedWrites, name: bytes) -> RecordFields:
    """The record of this name. Its timestamp is that of the first attempt to write it."""
    write = writes.write(name)
    return write.timestamp, write.key, write.value, ((NAME, name),)


class KeyedProducer(IdempotentProducer):
    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        compaction: CompactionCheckers,
        topics: Topics,
        keys: Keys,
        place: Place,
        name: str,
        *,
        interval_ms: float,
    ) -> None:
        super().__init__(client, checkers, topics, place, name, identity=Identity(), interval_ms=interval_ms)
        self._compaction = compaction
        self._keys = keys

    def _sending(self, value: bytes) -> None:
        self._keys.write(self._chance, self._place, value, self._client.process)

    def _acked(self, value: bytes, offset: int) -> None:
        self._compaction.writes.acked(value, offset)

    def _fields(self, value: bytes, wall_ms: int) -> RecordFields:
        return fields(self._compaction.writes, value)


class KeyedTransactionalProducer(TransactionalProducer):
    """A transactional producer whose values are the names of records."""

    writes: KeyedWrites

    def _fields(self, value: bytes, wall_ms: int) -> RecordFields:
        return fields(self.writes, value)


class KeyedTransactor(Transactor):
    topic = TABLE

    def __init__(
        self,
        client: Client,
        compaction: CompactionCheckers,
        keys: Keys,
        producer: KeyedTransactionalProducer,
        *,
        interval_ms: float,
    ) -> None:
        super().__init__(client, producer, interval_ms=interval_ms)
        self._keys = keys
        producer.writes = compaction.writes
        self.committed = 0

    async def _transact(self, places: list[Place]) -> None:
        chance, producer = self._chance, self._producer
        transaction = producer.begin()
        result = Result.DONE
        for part in range(chance.choice([1, 1, 2, 3])):
            place = chance.choice(places)
            names = [
                f"{transaction.name}/{part}.{number}".encode() for number in range(chance.choice([1, 2]))
            ]
            for name in names:
                self._keys.write(chance, place, name, self._client.process, transaction)
            result = await producer.send(place, names)
            if result is not Result.DONE:
                break
        if chance.random() < SLEEPS and self.is_open and not self.is_calm:
            await self._client.pause(chance.uniform(0, SLEEP_MS_MAX))
        if result is Result.OVER or chance.random() < VANISHES:
            producer.vanish()
            return
        is_commit = result is Result.DONE and chance.random() >= ABORTS
        if await producer.end(is_commit=is_commit) is not Result.OVER:
            self.committed += is_commit


class TableOperator:
    """Changes the policy of the topic that stays, and deletes records of it."""

    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        plan: Compaction,
        *,
        interval_ms: float,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._plan = plan
        self._interval_ms = interval_ms
        # By partition: an offset that was committed.
        self.ends: dict[Place, int] = {}
        self.is_open = True
        self.changes = 0

    async def run(self) -> None:
        plan = self._plan
        work = [self._change_policy] * plan.changes_policy + [self._delete_records] * plan.deletes_records
        while True:
            await self._client.pause(self._chance.expovariate(1 / self._interval_ms))
            if self.is_open:
                await self._client.refresh([TABLE])
                await self._chance.choice(work)()

    @property
    def process(self) -> Process:
        return self._client.process

    async def settle(self) -> None:
        """Compact again, whatever the policy was changed to."""
        while not await set_config(self._client, TOPIC, TABLE, "cleanup.policy", self._plan.policy):
            await self._client.back_off()
            await self._client.refresh([])
        self.changes += 1

    async def _change_policy(self) -> None:
        policy = self._chance.choice(POLICIES)
        self.changes += await set_config(self._client, TOPIC, TABLE, "cleanup.policy", policy)

    async def _delete_records(self) -> None:
        places = self._client.places.get(TABLE, [])
        if not places:
            return
        place = self._chance.choice(places)
        end, leadership = self.ends.get(place, 0), self._client.leader(place)
        if leadership is None or end == 0:
            return
        offset = self._chance.randint(0, end)
        self._checkers.starts.asked(place, offset)
        request = DeleteRecordsRequest(
            topics=[
                DeleteRecordsTopic(
                    name=TABLE,
                    partitions=[DeleteRecordsPartition(partition_index=place.partition, offset=offset)],
                )
            ],
            timeout_ms=5_000,
        )
        response = await self._client.call(leadership.broker, request, 2, timeout_ms=8_000)
        if response is not None and not response.topics[0].partitions[0].error_code:
            self.changes += 1
            low_watermark = response.topics[0].partitions[0].low_watermark
            self._checkers.starts.deleted(place, low_watermark, leadership.epoch)
