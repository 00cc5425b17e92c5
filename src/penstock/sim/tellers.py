"""Clients that work in transactions: tellers, who transfer money, and processors, who turn records into others.

A ``Teller`` debits one account and credits another, in partitions of one topic, in one transaction. Several tellers
may have the same transactional id, like a process that was replaced and wakes up again: the latest one to
initialize goes on, the others are fenced and come back later. Tellers sleep within transactions, longer than the
coordinator waits, and vanish without ending them.

A ``Processor`` is a member of a group. For every record of its partitions it writes an output, and commits its
offset in the same transaction (KIP-447).
"""

from __future__ import annotations

from abc import abstractmethod

from penstock.protocol.messages.fetch import FetchResponse
from penstock.protocol.records import batches, decode_records
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.loop import start
from penstock.sim.members import Member
from penstock.sim.readers import (
    FETCH_WAIT_MS,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    RECORDS_BYTES_MAX,
    Position,
    fetch_request,
    record_bytes,
)
from penstock.sim.topics import ACCOUNTS, INPUTS, OUTPUTS, RECEIPTS, Topics
from penstock.sim.transactional_producer import Result, TransactionalProducer

FETCH_VERSION = 12
# The session epoch of a fetch without a session.
NO_SESSION = -1
# Records processed in one transaction.
INPUTS_MAX = 5
# How often a client decides against its transaction, vanishes, or (a processor) falls asleep in it.
ABORTS = 0.12
VANISHES = 0.05
SLEEPS = 0.05


class Transactor:
    """A client that does one transaction after another, in the partitions of one topic."""

    topic: str

    def __init__(self, client: Client, producer: TransactionalProducer, *, interval_ms: float) -> None:
        self._client = client
        self._chance = client.chance
        self._producer = producer
        self._interval_ms = interval_ms
        self.is_open = True
        self.is_idle = False
        self.is_calm = False

    def __str__(self) -> str:
        return self._producer.name

    async def run(self) -> None:
        client, producer = self._client, self._producer
        while True:
            if not self.is_open:
                self.is_idle = True
                await client.pause(200)
                continue
            await client.pause(self._chance.expovariate(1 / self._interval_ms))
            if not client.places.get(self.topic):
                await client.refresh([self.topic])
            elif not producer.is_ready:
                if not await producer.init():
                    await client.back_off()
            else:
                await self._transact(client.places[self.topic])

    @abstractmethod
    async def _transact(self, places: list[Place]) -> None:
        """Do one transaction."""


class Teller(Transactor):
    topic = ACCOUNTS

    def __init__(
        self,
        client: Client,
        producer: TransactionalProducer,
        *,
        interval_ms: float,
        sleeps: float,
        sleep_ms_max: float,
        has_receipts: bool = False,
    ) -> None:
        super().__init__(client, producer, interval_ms=interval_ms)
        self._sleeps = sleeps
        self._sleep_ms_max = sleep_ms_max
        self._has_receipts = has_receipts
        self.transfers = 0
        self.vanished = 0

    async def _transact(self, places: list[Place]) -> None:
        if not await self._transfer(places):
            # Leave the field to the one that has taken over, for a while.
            await self._client.pause(self._chance.uniform(0, 6_000))

    async def _transfer(self, places: list[Place]) -> bool:
        """False if this teller has to be initialized again."""
        chance, producer = self._chance, self._producer
        name = producer.begin().name
        source, target = chance.sample(places, 2) if len(places) > 1 else places * 2
        amount = chance.randint(1, 99)
        results: list[Result] = []

        async def send(place: Place, values: list[bytes]) -> None:
            results.append(await producer.send(place, values))

        # Sometimes a transfer has several parts, and its records several batches.
        parts = chance.choice([1, 1, 1, 3])
        debit = start(
            self._client.process,
            send(source, [f"{name}/debit-{part} {name} {-amount}".encode() for part in range(parts)]),
        )
        if source == target or chance.random() < 0.5:
            await debit
            await self._perhaps_sleep()
        if not results or results[0] is Result.DONE:
            await send(target, [f"{name}/credit-{part} {name} {amount}".encode() for part in range(parts)])
        await debit
        if self._has_receipts and chance.random() < 0.7:
            results.append(await self._send_receipt(name))
        if chance.random() < VANISHES:
            self.vanished += 1
            producer.vanish()
            return chance.random() < 0.5
        await self._perhaps_sleep()
        if any(result is Result.OVER for result in results):
            if chance.random() < 0.5:
                producer.recover()
            else:
                producer.vanish()
            return False
        is_commit = all(result is Result.DONE for result in results) and chance.random() >= ABORTS
        if await producer.end(is_commit=is_commit) is Result.OVER:
            return False
        self.transfers += is_commit
        return True

    async def _send_receipt(self, name: str) -> Result:
        client = self._client
        if not client.places.get(RECEIPTS) or self._chance.random() < 0.3:
            # Now and then; otherwise it may be written to the topic of before, or by name to the next one.
            await client.refresh([RECEIPTS])
        places = client.places.get(RECEIPTS)
        if not places:
            return Result.DONE
        return await self._producer.send_receipt(self._chance.choice(places), name.encode())

    async def _perhaps_sleep(self) -> None:
        if self._chance.random() < self._sleeps and self.is_open and not self.is_calm:
            await self._client.pause(self._chance.uniform(0, self._sleep_ms_max))


class Processor(Member):
    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        group: str,
        name: str,
        producer: TransactionalProducer,
    ) -> None:
        super().__init__(client, checkers, topics, group, name, subscription=[INPUTS])
        self._producer = producer
        self.processed = 0

    async def _resume(self) -> dict[Place, int] | None:
        # The transaction of the member before may still be open.
        for _ in range(20):
            if not self._producer.is_ready and not await self._producer.init():
                await self._client.back_off()
                continue
            positions = await super()._resume()
            if positions is not None or self._coordinator is None:
                return positions
            await self._client.back_off()
        return None

    async def _advance(self, place: Place, positions: dict[Place, int]) -> bool:
        client, producer = self._client, self._producer
        if not client.places.get(OUTPUTS):
            await client.refresh([OUTPUTS])
            return True
        if not producer.is_ready:
            return False
        offset = positions.get(place, 0)
        inputs = await self._fetch(place, offset)
        if not inputs:
            return True
        transaction = producer.begin()
        outputs = client.places[OUTPUTS]
        values = [
            f"{transaction.name}/{number} {place.partition} {offset + number}".encode()
            for number in range(len(inputs))
        ]
        result = await producer.send(outputs[place.partition % len(outputs)], values)
        end = offset + len(inputs)
        generation = self._generation
        if result is Result.DONE:
            if self._chance.random() < SLEEPS:
                await client.pause(self._chance.uniform(0, 10_000))
            result = await producer.send_offsets(self._group, self._member_id, generation, place, end)
            if producer.offsets_may_come_late or transaction.is_excused:
                self._checkers.commits.may_come_late(self._group, place, end)
        if result is Result.OVER or self._chance.random() < VANISHES:
            producer.vanish()
            return False
        commits = self._checkers.commits
        if result is not Result.DONE or self._chance.random() < ABORTS:
            await producer.end(is_commit=False)
            return result is Result.DONE and producer.is_ready
        commits.committing(self._group, place, generation, end)
        if await producer.end(is_commit=True) is Result.OVER:
            if producer.is_certain:
                commits.refused(self._group, place, generation, end)
            return False
        commits.acked(self._group, place, generation, end)
        positions[place] = end
        self.processed += len(inputs)
        return True

    async def _fetch(self, place: Place, offset: int) -> list[bytes]:
        """The next inputs; none if there are none or the leader has moved."""
        client = self._client
        leadership = client.leader(place)
        if leadership is None:
            await client.refresh([place.topic])
            return []
        position = Position()
        position.offset = offset
        request = fetch_request(
            [(place, position, leadership.epoch)],
            FETCH_VERSION,
            0,
            NO_SESSION,
            isolation_level=self._chance.choice([READ_COMMITTED, READ_UNCOMMITTED]),
        )
        response: FetchResponse | None = await client.call(
            leadership.broker,
            request,
            FETCH_VERSION,
            timeout_ms=FETCH_WAIT_MS + 5_000,
            channel=f"inputs {self._name}",
        )
        if response is None or not response.responses or response.responses[0].partitions[0].error_code:
            await client.refresh([place.topic])
            return []
        records = record_bytes(response.responses[0].partitions[0])
        values: list[bytes] = []
        for at, header in batches(records):
            if header.size > len(records) - at:
                break
            for record in decode_records(records, at, bytes_max=RECORDS_BYTES_MAX):
                if record.offset >= offset and len(values) < INPUTS_MAX:
                    assert record.value is not None and record.offset == offset + len(values)
                    values.append(record.value)
        return values
