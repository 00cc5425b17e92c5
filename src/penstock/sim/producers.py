"""The producers of a simulated run, each on a host of its own.

An ``IdempotentProducer`` writes to one partition like the Java client: it retries a batch until it is
acknowledged, in order, with up to five in flight. A ``OneShotProducer`` sends each batch once.

Traffic is sparse on purpose: the interesting events happen between two records, and every request costs real
time.
"""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import (
    InitProducerIdRequest,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)
from penstock.protocol.records import RecordFields, encode_batch
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.loop import Promise
from penstock.sim.report import Violation
from penstock.sim.topics import MORTAL, Topics

ALL = -1
PRODUCE_TIMEOUT_MS = 3_000
TOPIC_IDS_SINCE_VERSION = 13

# With these errors the broker has written nothing. With any other error it may have.
DEFINITE = (
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.MESSAGE_TOO_LARGE,
    ErrorCode.INVALID_REQUIRED_ACKS,
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.INVALID_TIMESTAMP,
)
# The leader does not know what this producer wrote before.
FORGOTTEN = (
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.UNKNOWN_PRODUCER_ID,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
)


class Identity:
    """The producer id that the partitions of one client share."""

    def __init__(self) -> None:
        self.producer_id = -1
        self.epoch = -1


class _Batch:
    def __init__(self, values: list[bytes], sequence: int) -> None:
        self.values = values
        self.sequence = sequence


class IdempotentProducer:
    """An idempotent producer of one partition with acks=all."""

    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        place: Place,
        name: str,
        *,
        identity: Identity,
        interval_ms: float,
        # The producer of the deleted topic with this name; the new one continues its sequence.
        predecessor: IdempotentProducer | None = None,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._place = place
        self._name = name
        self._interval_ms = interval_ms
        self._version = _version(client, place, 8, 11)
        self._in_flight_max = self._chance.choice([1, 1, 3, 5])
        self._numbers = 0
        self._identity: Identity = identity if predecessor is None else predecessor._identity
        self._sequence: int = 0 if predecessor is None else predecessor._sequence
        self._pending: list[_Batch] = []
        # Whether to produce new batches.
        self.is_open = True
        self.acknowledged = 0

    def __str__(self) -> str:
        return f"{self._name} of {self._place}"

    @property
    def is_idle(self) -> bool:
        return not self._pending or not self.is_wanted

    @property
    def is_wanted(self) -> bool:
        return self._place.topic_id not in self._topics.deleting

    async def run(self) -> None:
        while self._place.topic_id not in self._topics.deleting:
            if self.is_open:
                await self._client.pause(self._chance.expovariate(1 / self._interval_ms))
                for _ in range(self._chance.randint(1, self._in_flight_max) if self.is_open else 0):
                    self._make()
            elif not self._pending:
                await self._client.pause(100)
                continue
            while self._pending and self._place.topic_id not in self._topics.deleting:
                if self._identity.producer_id < 0 and not await self._identify():
                    await self._client.back_off()
                elif not await self._send_all():
                    await self._client.back_off()
                    await self._client.refresh([self._place.topic])

    def _make(self) -> None:
        values = [self._make_value() for _ in range(self._chance.choice([1, 1, 2, 5]))]
        self._pending.append(_Batch(values, self._sequence))
        self._sequence += len(values)

    def _make_value(self) -> bytes:
        value = b"%s/%d" % (self._name.encode(), self._numbers)
        self._numbers += 1
        self._sending(value)
        return value

    def _sending(self, value: bytes) -> None:
        self._checkers.promises.sending(self._place, self._name, self._numbers - 1, value, is_promise=True)

    def _acked(self, value: bytes, offset: int) -> None:
        self._checkers.promises.acked(value, offset)

    def _fields(self, value: bytes, wall_ms: int) -> RecordFields:
        """The record for a value."""
        return wall_ms, b"key", value, ()

    async def _identify(self) -> bool:
        request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
        response = await self._client.call(None, request, 4)
        if response is None or response.error_code:
            if not self._client.brokers:
                await self._client.refresh([])
            return False
        if self._identity.producer_id < 0:  # another partition of this client may have been faster
            self._identity.producer_id, self._identity.epoch = response.producer_id, response.producer_epoch
        return True

    async def _send_all(self) -> bool:
        """Send everything pending in order; True when all of it was acknowledged."""
        leadership = self._client.leader(self._place)
        if leadership is None:
            return False
        connection = self._client.connection(self._client.brokers[leadership.broker])
        wall_ms = self._client.process.clock.wall_ms()
        answers: list[Promise[Any]] = []
        gap_ms = self._chance.choice([0, 0, 0, 5, 50])
        for batch in self._pending:
            if answers and gap_ms:
                await self._client.pause(self._chance.expovariate(1 / gap_ms))
            records = encode_batch(
                [self._fields(value, wall_ms) for value in batch.values],
                producer_id=self._identity.producer_id,
                producer_epoch=self._identity.epoch,
                base_sequence=batch.sequence,
            )
            request = produce_request(self._place, records, self._version, ALL)
            answers.append(connection.call(request, self._version, PRODUCE_TIMEOUT_MS + 7_000))
        for count, answer in enumerate(answers, start=1):
            result = _only(await answer)
            if result is None:
                return False
            if result.error_code in FORGOTTEN:
                self._forgotten(ErrorCode(result.error_code))
                return False
            if result.error_code:
                await self._look_behind(ErrorCode(result.error_code), answers[count:])
                return False
            batch = self._pending.pop(0)
            for number, value in enumerate(batch.values):
                self._acked(value, result.base_offset + number)
            self.acknowledged += len(batch.values)
        return True

    async def _look_behind(self, refusal: ErrorCode, answers: list[Promise[Any]]) -> None:
        """Check that batches sent after a refused one are not answered with OUT_OF_ORDER_SEQUENCE_NUMBER.

        librdkafka would then start a new sequence and write records again that are already stored but not
        acknowledged.
        """
        for answer in answers:
            result = _only(await answer)
            if (
                result is not None
                and result.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
                and self._place.topic_id not in self._topics.deleting
            ):
                raise Violation(
                    f"{self._name} sent batches to {self._place} behind one that was refused with "
                    f"{refusal.name}, and they are called out of order"
                )

    def _forgotten(self, error: ErrorCode) -> None:
        """Check that the leader may have lost this producer's state: all earlier batches were acknowledged."""
        place = self._place
        if place.topic_id in self._topics.deleting or self._checkers.starts.deleted_before(place) > 0:
            # Its records were deleted, and perhaps the producer's state with them.
            self._identity = Identity()
            self._pending.clear()
            self._sequence = 0
            return
        raise Violation(
            f"{self._name} has every batch of {place} before sequence {self._pending[0].sequence} "
            f"acknowledged, and the leader answers {error.name}"
        )


class OneShotProducer:
    """A producer without an id that sends each batch once and never retries."""

    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        place: Place,
        name: str,
        *,
        interval_ms: float,
        acks: int,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._place = place
        self._name = name
        self._interval_ms = interval_ms
        self._acks = acks
        self._version = _version(client, place, 3, 9)
        self.is_open = True

    async def run(self) -> None:
        client = self._client
        number = 0
        while self.is_open and self._place.topic_id not in self._topics.deleting:
            await client.pause(self._chance.expovariate(1 / self._interval_ms))
            if not self.is_open:
                return
            leadership = client.leader(self._place)
            if leadership is None:
                await client.refresh([self._place.topic])
                continue
            value = b"%s/%d" % (self._name.encode(), number)
            number += 1
            self._checkers.promises.sending(self._place, "", number, value, is_promise=self._acks == ALL)
            batch = encode_batch([(client.process.clock.wall_ms(), None, value, ())])
            request = produce_request(self._place, batch, self._version, self._acks)
            result = _only(await client.call(leadership.broker, request, self._version))
            if result is None or result.error_code:
                if result is not None and result.error_code in DEFINITE:
                    self._checkers.promises.failed(value)
                await client.refresh([self._place.topic])
            else:
                self._checkers.promises.acked(value, result.base_offset)


def produce_request(
    place: Place, batch: bytearray, version: int, acks: int, *, transactional_id: str | None = None
) -> ProduceRequest:
    by_id = version >= TOPIC_IDS_SINCE_VERSION
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=PRODUCE_TIMEOUT_MS,
        topic_data=[
            TopicProduceData(
                name="" if by_id else place.topic,
                topic_id=place.topic_id if by_id else bytes(16),
                partition_data=[PartitionProduceData(index=place.partition, records=memoryview(batch))],
            )
        ],
    )


def _version(client: Client, place: Place, *by_name: int) -> int:
    if MORTAL in place.topic:
        return TOPIC_IDS_SINCE_VERSION
    return client.chance.choice([*by_name, TOPIC_IDS_SINCE_VERSION])


def _only(response: Any) -> PartitionProduceResponse | None:
    if response is None:
        return None
    result: PartitionProduceResponse = response.responses[0].partition_responses[0]
    return result
