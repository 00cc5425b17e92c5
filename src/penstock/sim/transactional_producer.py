"""A transactional producer for simulated machines, of both generations.

A classic producer adds partitions to its transaction before it writes to them, and keeps its epoch from one
transaction to the next, unless the fate of a batch is unknown (KIP-360). A producer of transactions v2 (KIP-890)
writes at once, and gets a new epoch with every end.

Requests are repeated until they are answered, like those of any client. Now and then a producer is impatient: it
closes the connection right after a request and sends the request again, so answers are lost without any fault. And
now and then the first copy of a request gets stuck in the network: the second one is answered, and the first one
arrives when nobody waits for it any more.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    EndTxnRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from penstock.protocol.records import RecordFields, encode_batch
from penstock.sim.client import CALL_TIMEOUT_MS, GROUP, TRANSACTION, Client, Place
from penstock.sim.producers import ALL, produce_request
from penstock.sim.report import Violation
from penstock.sim.topics import RECEIPTS
from penstock.sim.transaction_checkers import Transaction, TransactionCheckers

# How long an impatient client waits at most.
IMPATIENT_MS_MAX = 60
LATE_MS_MAX = 2_000
# How long a client repeats a request before it gives up.
PATIENCE_MS = 25_000
# The same where the topic may be gone.
RECEIPT_PATIENCE_MS = 3_000

NO_PRODUCER = -1
# (InitProducerId, Produce, EndTxn, TxnOffsetCommit)
CLASSIC_VERSIONS = (4, 11, 4, 4)
V2_VERSIONS = (5, 12, 5, 5)
ADD_PARTITIONS_VERSION = 3
ADD_OFFSETS_VERSION = 3

MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
# The request has to be repeated.
RETRIABLE = (
    *MOVED,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.UNSTABLE_OFFSET_COMMIT,
)
# Another producer has taken over, or the coordinator has aborted the transaction.
FENCED = (
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
)
# With these answers the coordinator has not ended the transaction, and this request never will.
UNPROCESSED = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.CONCURRENT_TRANSACTIONS,
)


class Result(Enum):
    DONE = auto()
    # The transaction must be aborted.
    ABORTABLE = auto()
    # This producer must not go on, or does not know how its transaction ended. It has to be initialized again.
    OVER = auto()


class TransactionalProducer:
    def __init__(
        self,
        client: Client,
        checkers: TransactionCheckers,
        transactional_id: str,
        name: str,
        *,
        is_v2: bool,
        timeout_ms: int,
        # Whether no other producer has this transactional id.
        is_alone: bool,
        # How often it does not wait for an answer, and how often the first copy of a request comes late.
        impatience: float,
        lateness: float,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._transactional_id = transactional_id
        self.name = name
        self._is_v2 = is_v2
        self._timeout_ms = timeout_ms
        self._is_alone = is_alone
        self._impatience = impatience
        self._lateness = lateness
        self._may_fence_itself = False
        # A copy of the offsets last sent may come late, and nothing in it says which transaction it belongs to.
        self.offsets_may_come_late = False
        # Some producers ask patiently for their first epoch, so that no late copy of that request fences them.
        self._is_careful = self._chance.random() < 0.5
        versions = V2_VERSIONS if is_v2 else CLASSIC_VERSIONS
        self._init_version, self._produce_version, self._end_version, self._commit_version = versions
        if is_v2 and self._chance.random() < 0.5:
            self._produce_version = 13
        self._coordinator: int | None = None
        self._group_coordinator: int | None = None
        self._transactions = 0
        # After an end with OVER: whether the transaction is certainly aborted.
        self.is_certain = True
        self._forget()

    def _forget(self) -> None:
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        # The next sequence of each partition.
        self._sequences: dict[Place, int] = {}
        self._needs_epoch = False
        self._transaction: Transaction | None = None
        # Partitions and groups of the open transaction.
        self._added: dict[Place | str, None] = {}
        self._has_sent = False

    @property
    def is_ready(self) -> bool:
        return self.producer_id >= 0 and not self._needs_epoch

    @property
    def _now_ms(self) -> float:
        return self._client.process.loop.now_ms

    async def init(self) -> bool:
        """Get a producer id, or after an abort with unknown batches a new epoch; False if there is none now."""
        request = InitProducerIdRequest(
            transactional_id=self._transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
        )
        asked_ms = self._now_ms
        response = await self._ask(request, self._init_version)
        if response is None or response.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE:
            # A copy that names no producer may come late, and fence this one.
            self._may_fence_itself = self._may_fence_itself or self.producer_id < 0
        if response is None or response.error_code:
            if response is not None and response.error_code not in RETRIABLE:
                if response.error_code in FENCED:
                    self._was_fenced(ErrorCode(response.error_code))
                self._forget()
            if response is not None:
                self._moved(response.error_code)
            return False
        if self.producer_id >= 0:
            self._checkers.zombies.accepted(
                f"InitProducerId of {self.name}", self.producer_id, self.epoch, asked_ms
            )
        self._forget()
        self.producer_id, self.epoch = response.producer_id, response.producer_epoch
        if not self._is_v2:
            self._checkers.classic[self.producer_id] = None
        self._checkers.zombies.initialized(self.producer_id, self.epoch, self._now_ms)
        return True

    def _was_fenced(self, error: ErrorCode) -> None:
        self._checkers.zombies.fenced += 1
        if self._is_alone and not self._may_fence_itself:
            raise Violation(
                f"fenced without a rival: {self.name} is the only producer of {self._transactional_id}, and its "
                f"InitProducerId with producer {self.producer_id} and epoch {self.epoch} is answered {error.name}"
            )

    def begin(self) -> Transaction:
        assert self.is_ready and self._transaction is None
        self._transactions += 1
        self._transaction = self._checkers.atomic.begin(
            f"{self.name}/{self._transactions}", self.producer_id, self.epoch, is_v2=self._is_v2
        )
        return self._transaction

    async def send(self, place: Place, values: list[bytes]) -> Result:
        transaction = self._transaction
        assert transaction is not None
        for value in values:
            self._checkers.atomic.sending(transaction, place, value)
        return await self._send(transaction, place, values, PATIENCE_MS)

    async def send_receipt(self, place: Place, value: bytes) -> Result:
        """Write to a topic that may be deleted. Nobody is promised to read it."""
        assert self._transaction is not None
        return await self._send(self._transaction, place, [value], RECEIPT_PATIENCE_MS)

    async def _send(
        self, transaction: Transaction, place: Place, values: list[bytes], patience_ms: int
    ) -> Result:
        if not self._is_v2:
            added = await self._add_partition(place, patience_ms)
            if added is not Result.DONE:
                return added
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + len(values)
        self._has_sent = True
        result = await self._produce(transaction, place, values, sequence, patience_ms)
        if result is not Result.DONE:
            # Whether it is stored is unknown, and so is the next sequence.
            self._needs_epoch = not self._is_v2
        return result

    async def _produce(
        self, transaction: Transaction, place: Place, values: list[bytes], sequence: int, patience_ms: int
    ) -> Result:
        client = self._client
        records = encode_batch(
            [self._fields(value, client.process.clock.wall_ms()) for value in values],
            producer_id=transaction.producer_id,
            producer_epoch=transaction.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        request = produce_request(
            place, records, self._produce_version, ALL, transactional_id=self._transactional_id
        )
        until_ms = self._now_ms + patience_ms
        while self._now_ms < until_ms:
            asked_ms, leadership, response = self._now_ms, client.leader(place), None
            if leadership is not None:
                is_late = self._perhaps_late(leadership.broker, request, self._produce_version)
                if is_late and self._chance.random() < 0.5:
                    return Result.ABORTABLE  # the delivery takes too long
                response = await client.call(
                    leadership.broker,
                    request,
                    self._produce_version,
                    timeout_ms=self._timeout(10_000),
                    channel=f"produce {self.name} {place}",
                )
            if response is not None:
                result = response.responses[0].partition_responses[0]
                if not result.error_code:
                    self._accepted(f"a batch for {place}", transaction, asked_ms)
                    for number, value in enumerate(values if place.topic != RECEIPTS else ()):
                        self._checkers.atomic.acked(transaction, value, result.base_offset + number)
                    return Result.DONE
                if result.error_code not in RETRIABLE:
                    return self._refused(result.error_code)
            await client.back_off()
            if response is None or leadership is None or self._chance.random() < 0.5:
                await client.refresh([place.topic])
        return Result.ABORTABLE

    def _fields(self, value: bytes, wall_ms: int) -> RecordFields:
        """The record for a value."""
        return wall_ms, b"key", value, ()

    async def _add_partition(self, place: Place, patience_ms: int) -> Result:
        if place in self._added:
            return Result.DONE
        transaction = self._transaction
        assert transaction is not None
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._transactional_id,
            v3_and_below_producer_id=transaction.producer_id,
            v3_and_below_producer_epoch=transaction.epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=place.topic, partitions=[place.partition])],
        )
        self._has_sent = True
        return await self._add(
            place,
            request,
            ADD_PARTITIONS_VERSION,
            lambda response: (
                response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            ),
            patience_ms,
        )

    async def _add(
        self, what: Place | str, request: Any, version: int, error_in: Any, patience_ms: int = PATIENCE_MS
    ) -> Result:
        transaction = self._transaction
        assert transaction is not None
        until_ms = self._now_ms + patience_ms
        while self._now_ms < until_ms:
            asked_ms = self._now_ms
            response = await self._ask(request, version)
            if response is not None:
                error = error_in(response)
                if not error:
                    self._accepted(f"adding {what}", transaction, asked_ms)
                    self._added[what] = None
                    return Result.DONE
                if error not in RETRIABLE:
                    return self._refused(error)
                self._moved(error)
            await self._client.back_off()
        return Result.ABORTABLE

    async def send_offsets(
        self, group: str, member_id: str, generation: int, place: Place, offset: int
    ) -> Result:
        """Commit an offset of a group with the transaction."""
        transaction = self._transaction
        assert transaction is not None
        self._has_sent = True
        if not self._is_v2:
            added = AddOffsetsToTxnRequest(
                transactional_id=self._transactional_id,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.epoch,
                group_id=group,
            )
            result = await self._add(group, added, ADD_OFFSETS_VERSION, lambda response: response.error_code)
            if result is not Result.DONE:
                return result
        request = TxnOffsetCommitRequest(
            transactional_id=self._transactional_id,
            group_id=group,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.epoch,
            generation_id=generation,
            member_id=member_id,
            topics=[
                TxnOffsetCommitRequestTopic(
                    name=place.topic,
                    partitions=[
                        TxnOffsetCommitRequestPartition(
                            partition_index=place.partition, committed_offset=offset, committed_metadata=""
                        )
                    ],
                )
            ],
        )
        self.offsets_may_come_late = False
        until_ms = self._now_ms + PATIENCE_MS
        while self._now_ms < until_ms:
            asked_ms, response = self._now_ms, None
            if self._group_coordinator is None:
                self._group_coordinator = await self._client.find_coordinator(group, GROUP)
            if self._group_coordinator is not None:
                is_late = self._perhaps_late(self._group_coordinator, request, self._commit_version)
                response = await self._client.call(
                    self._group_coordinator,
                    request,
                    self._commit_version,
                    timeout_ms=self._timeout(CALL_TIMEOUT_MS),
                    channel=f"offsets {self.name}",
                )
                if not transaction.is_v2 and (is_late or response is None):
                    self.offsets_may_come_late = True
                    self._checkers.atomic.may_come_late(transaction)
            if response is None:
                self._group_coordinator = None
            else:
                error = response.topics[0].partitions[0].error_code
                if not error:
                    self._accepted(f"offsets of {group}", transaction, asked_ms)
                    return Result.DONE
                if error not in RETRIABLE:
                    return self._refused(error)
                if error in MOVED:
                    self._group_coordinator = None
            await self._client.back_off()
        return Result.ABORTABLE

    async def end(self, *, is_commit: bool) -> Result:
        """Commit or abort. OVER if it is aborted or has an unknown outcome, and the producer cannot go on."""
        transaction = self._transaction
        assert transaction is not None
        atomic = self._checkers.atomic
        if is_commit:
            atomic.committing(transaction)
        else:
            atomic.aborted(transaction)
        if not self._has_sent:
            return self._ended(transaction, is_commit=is_commit)
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.epoch,
            committed=is_commit,
        )
        self.is_certain = True
        until_ms = self._now_ms + PATIENCE_MS
        while self._now_ms < until_ms:
            asked_ms = self._now_ms
            response = await self._ask(request, self._end_version)
            error = ErrorCode(response.error_code) if response is not None else None
            if response is not None and not error:
                self._accepted("an end", transaction, asked_ms)
                if self._is_v2:
                    self.producer_id, self.epoch = response.producer_id, response.producer_epoch
                    self._sequences = {}
                return self._ended(transaction, is_commit=is_commit)
            if error is not None and error not in RETRIABLE:
                if is_commit and self.is_certain:
                    atomic.aborted(transaction)
                self.give_up()
                return Result.OVER
            if error is None or error not in UNPROCESSED:
                self.is_certain = False
                atomic.may_come_late(transaction)
            if error is not None:
                self._moved(error)
            await self._client.back_off()
        self.give_up()
        return Result.OVER

    def _ended(self, transaction: Transaction, *, is_commit: bool) -> Result:
        if is_commit:
            self._checkers.atomic.committed(transaction)
        self._transaction = None
        self._added = {}
        self._has_sent = False
        return Result.DONE

    def give_up(self) -> None:
        """Forget everything, as a process that ends. The next ``init`` is that of a new process."""
        self._checkers.zombies.fenced += 1
        self._forget()

    def recover(self) -> None:
        """Leave the transaction, and ask for the next epoch: the coordinator may have aborted it (KIP-360)."""
        if self._transaction is not None:
            self._checkers.atomic.aborted(self._transaction)
        identity = self.producer_id, self.epoch
        self._forget()
        self.producer_id, self.epoch = identity
        self._needs_epoch = True

    def vanish(self) -> None:
        """The process ends within the transaction, and a new one takes its place."""
        if self._transaction is not None:
            self._checkers.atomic.aborted(self._transaction)
        self._forget()

    # Requests

    def _refused(self, error: int) -> Result:
        return Result.OVER if error in FENCED else Result.ABORTABLE

    def _accepted(self, what: str, transaction: Transaction, asked_ms: float) -> None:
        self._checkers.zombies.accepted(
            f"{what} of {transaction.name}", transaction.producer_id, transaction.epoch, asked_ms
        )

    def _timeout(self, usual_ms: float) -> float:
        if self._chance.random() < self._impatience:
            return self._chance.uniform(1, IMPATIENT_MS_MAX)
        return usual_ms

    def _perhaps_late(self, broker: int, request: Any, version: int) -> bool:
        """Perhaps a first copy of the request is sent, which arrives late."""
        if self._chance.random() >= self._lateness or broker not in self._client.brokers:
            return False
        self._client.send_late(broker, request, version, self._chance.uniform(0, LATE_MS_MAX))
        if isinstance(request, EndTxnRequest):
            assert self._transaction is not None
            self._checkers.atomic.may_come_late(self._transaction)
        elif isinstance(request, InitProducerIdRequest) and request.producer_id < 0:
            self._may_fence_itself = True
        return True

    async def _ask(self, request: Any, version: int) -> Any:
        """The answer of the coordinator, or None."""
        client = self._client
        if self._coordinator is None:
            self._coordinator = await client.find_coordinator(self._transactional_id, TRANSACTION)
            if self._coordinator is None:
                if not client.brokers:
                    await client.refresh([])
                return None
        timeout_ms: float = CALL_TIMEOUT_MS
        if not (self._is_careful and isinstance(request, InitProducerIdRequest) and request.producer_id < 0):
            self._perhaps_late(self._coordinator, request, version)
            timeout_ms = self._timeout(CALL_TIMEOUT_MS)
        response = await client.call(
            self._coordinator,
            request,
            version,
            timeout_ms=timeout_ms,
            channel=f"transactions {self.name}",
        )
        if response is None:
            self._coordinator = None
        return response

    def _moved(self, error: int) -> None:
        if error in MOVED:
            self._coordinator = None
