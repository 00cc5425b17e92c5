"""Producers of the simulated transactions: one process each, that initializes, writes, commits, stalls, and dies.

A process is a generator. It yields what it waits for, a function that is given the callback to call with the
answer; None is the answer that never came. Processes of one transactional id compete: an old one that wakes up is a
zombie.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.transactions import EndTxnRequest
from penstock.sim.cores.transactions_partition import Transaction
from penstock.sim.report import Violation
from penstock.transactions.changes import NOBODY, Identity, Partition

if TYPE_CHECKING:
    from penstock.sim.cores.transactions import World

Resume: TypeAlias = Callable[[Any], None]
Wait: TypeAlias = Callable[[Resume], None]
Steps: TypeAlias = Generator[Wait, Any, Any]

TIMEOUT_MS = 3_000
# A client that cannot reach its coordinator gives up after so many tries.
PATIENCE = 60
RETRIABLE = (
    None,
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS,
)


class Process:
    def __init__(self, world: World, transactional_id: str, *, is_v2: bool) -> None:
        self._world = world
        self.id = transactional_id
        self._is_v2 = is_v2
        self._producer = NOBODY
        self._sequences: dict[Partition, int] = {}
        self._timeouts = world.timed_out[transactional_id]
        # How many requests for a new producer had come when this one's came.
        self.rivals = 0

    def life(self, transactions: int) -> Steps:
        """Returns whether all transactions had an end that the client knows."""
        world = self._world
        if not (yield from self._init(NOBODY)):
            return False
        for _ in range(transactions):
            yield self._sleep(world.draw.randrange(200))
            if not (yield from self._transact()):
                return False
        return True

    def _transact(self) -> Steps:
        world = self._world
        draw = world.draw
        transaction = world.begin(self.id, self._producer)
        is_good = True
        names = list(world.partitions)
        for name in draw.sample(names, draw.randint(1, len(names))):
            is_good = is_good and (yield from self._produce(transaction, name))
            if draw.random() < world.stall:
                yield self._sleep(draw.randrange(2 * TIMEOUT_MS))
            if draw.random() < world.deaths:
                world.counts["deaths"] += 1
                return False
        if not transaction.acknowledged and not self._is_v2:
            # Nothing may have begun. What is under way must not join the next transaction.
            return (yield from self._init(self._producer))
        is_commit = is_good and draw.random() < 0.8
        if not (yield from self._end(transaction, is_commit)):
            # It may be that only its time was up: ask for the next epoch, as an application may.
            return draw.random() < 0.5 and (yield from self._init(self._producer))
        return self._is_v2 or is_good or (yield from self._init(self._producer))

    def _init(self, expected: Identity) -> Steps:
        request = InitProducerIdRequest(
            transactional_id=self.id,
            transaction_timeout_ms=TIMEOUT_MS,
            producer_id=expected.id,
            producer_epoch=expected.epoch,
        )
        for _ in range(PATIENCE):
            # A repeated request without an identity would be a rival of its own.
            send = self._world.init(request, self)
            response = yield self._world.call(send, may_repeat=self._is_v2 and expected != NOBODY)
            error = None if response is None else ErrorCode(response.error_code)
            if error is ErrorCode.NONE:
                self._take(Identity(response.producer_id, response.producer_epoch))
                return True
            if error not in RETRIABLE:
                self._refused(error, "InitProducerId")
                return False
            yield self._sleep(50)
        return False

    def _produce(self, transaction: Transaction, name: Partition) -> Steps:
        """Whether the partition has acknowledged the record."""
        world = self._world
        sequence = self._sequences.get(name, 0)
        self._sequences[name] = sequence + 1
        is_added = self._is_v2
        for _ in range(world.draw.choice((1, 4))):
            if not is_added:
                error = yield self._ask(world.add(transaction, name, is_v2=False))
                is_added = error is ErrorCode.NONE
            if is_added:
                send = world.produce(transaction, name, sequence, is_v2=self._is_v2)
                # A batch may come late in any generation: sequences and verification are there for that.
                error = yield world.call(send, may_repeat=True)
                if error is ErrorCode.NONE:
                    transaction.acknowledged.append(name)
                    return True
            if error not in RETRIABLE:
                return False
            yield self._sleep(30)
        return False

    def _end(self, transaction: Transaction, is_commit: bool) -> Steps:
        """Whether the client may go on with what it knows."""
        request = EndTxnRequest(
            transactional_id=self.id,
            producer_id=self._producer.id,
            producer_epoch=self._producer.epoch,
            committed=is_commit,
        )
        for _ in range(PATIENCE):
            response = yield self._ask(self._world.end(transaction, request, is_v2=self._is_v2))
            error = None if response is None else ErrorCode(response.error_code)
            if error is ErrorCode.NONE:
                transaction.told = is_commit
                self._world.counts["commits" if is_commit else "aborts"] += 1
                if self._is_v2:
                    self._take(Identity(response.producer_id, response.producer_epoch))
                return True
            if error not in RETRIABLE:
                if error is not ErrorCode.INVALID_TXN_STATE or not is_commit:
                    self._refused(error, "EndTxn")
                return False
            yield self._sleep(50)
        return False

    def _take(self, producer: Identity) -> None:
        self._world.gave(self, producer)
        if producer != self._producer:
            self._producer = producer
            self._sequences = {}

    def _refused(self, error: ErrorCode | None, request: str) -> None:
        """Only another process, or a transaction that timed out, may be the reason."""
        world = self._world
        world.counts["refused"] += 1
        is_alone = world.rivals[self.id] == self.rivals
        if is_alone and world.timed_out[self.id] == self._timeouts and error in FENCES:
            raise Violation(f"{request} of {self.id} got {error!r} though it has no rival")

    def _ask(self, send: Callable[[Resume], None]) -> Wait:
        """A late request of a classic client cannot be told from the next transaction's: those are dropped."""
        return self._world.call(send, may_repeat=self._is_v2)

    def _sleep(self, delay_ms: int) -> Wait:
        return lambda resume: self._world.later(delay_ms, resume, None)


FENCES = (
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
)
