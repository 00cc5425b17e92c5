"""Asks a transaction's coordinator before the first batch of the transaction is appended to a partition.

Otherwise a batch that comes late, after its transaction has ended, would open a transaction that nobody ends
(KIP-890). While the question is open, the batch and all later ones of that producer for the partition are held
back, so that their order is kept. A frame's buffer is used again after its turn, so what is held is a copy.

The answer is about the past. What may have happened meanwhile is checked when the batch is appended:

    the transaction has ended      its marker was written here, and ``cancel`` refuses what was held
    another broker leads           the leader epoch has changed; the client is told to look for the leader
    the topic was deleted          what was held is refused
    the producer was fenced        ``ProducerStates.check`` compares epochs as always

A coordinator that still writes the markers of the previous transaction refuses the next one for a moment
(CONCURRENT_TRANSACTIONS). The question is repeated for a short time, because the client would wait longer.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.produced_batch import NOT_VERIFIED, Appended
from penstock.broker.transactions.coordinator_client import PartitionQuestion, TransactionCoordinatorClient
from penstock.environment import Environment
from penstock.model import TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.transactions import PRODUCE_V2
from penstock.protocol.records import HEADER_SIZE

# From this version of Produce on, clients know TRANSACTION_ABORTABLE.
ABORTABLE_SINCE_VERSION = 11
# Bytes held back, of all producers. Beyond this, batches are refused and sent again.
HELD_BYTES_MAX = 64 * 1024 * 1024
# Counted besides the batch: its question and its pending answer. A batch may be much smaller than these.
HELD_OVERHEAD_BYTES = 2 * 1024
# How often, and how long, a question is repeated while the coordinator ends the previous transaction.
CONCURRENT_RETRY_MS = 10
CONCURRENT_MAX_MS = 200

_PRODUCER = Struct(">qh")
_PRODUCER_AT = 43

# Topic id, partition, producer id, producer epoch.
Key: TypeAlias = tuple[TopicId, int, int, int]
Done: TypeAlias = Callable[[Appended], None]
Refusal: TypeAlias = Callable[[], ErrorCode]

# Errors of a coordinator that pass: the client's retry may find it ready. Every client retries this one.
_PASSING = frozenset(
    (
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.REQUEST_TIMED_OUT,
    )
)


class _Held:
    """The batches of one producer for one partition that wait for the coordinator's answer."""

    __slots__ = ("batches", "deadline_ms", "hosted", "is_cancelled", "leader_epoch", "question", "version")

    def __init__(
        self, hosted: HostedPartition, question: PartitionQuestion, version: int, deadline_ms: int
    ) -> None:
        self.hosted = hosted
        self.leader_epoch = hosted.leader_epoch
        self.question = question
        self.version = version
        self.deadline_ms = deadline_ms
        self.is_cancelled = False
        # In order: the batch, acks=all, zstd allowed, the last check, and the callback for its result.
        self.batches: list[tuple[bytearray, bool, bool, Refusal | None, Done]] = []


class Verification:
    def __init__(self, environment: Environment, client: TransactionCoordinatorClient) -> None:
        self._environment = environment
        self._client = client
        self._held: dict[Key, _Held] = {}
        self._held_bytes = 0
        # Transactions that are being verified for something else than a batch (offsets); by key, their cancels.
        self._others: dict[Key, list[_Other]] = {}

    def append(
        self,
        hosted: HostedPartition,
        records: memoryview,
        transactional_id: str,
        version: int,
        done: Done,
        *,
        allow_zstd: bool,
        by_all: bool,
        refusal: Refusal | None = None,
    ) -> Appended | None:
        """Append a transactional batch, or hold it back: None, and ``done`` gets the result later.

        ``refusal`` is asked before a batch that was held back is appended: the client's rights may have changed.
        """
        if len(records) < HEADER_SIZE:
            return Appended(ErrorCode.CORRUPT_MESSAGE if len(records) else ErrorCode.INVALID_RECORD)
        producer_id, producer_epoch = _PRODUCER.unpack_from(records, _PRODUCER_AT)
        key = (hosted.topic_id, hosted.index, producer_id, producer_epoch)
        held = self._held.get(key)
        if held is None:
            appended = hosted.append(
                records, allow_zstd=allow_zstd, by_all=by_all, is_transactional=True, is_verified=False
            )
            if appended is not NOT_VERIFIED:
                return appended
        size = len(records) + HELD_OVERHEAD_BYTES
        if self._held_bytes + size > HELD_BYTES_MAX:
            return hosted.refuse(records, ErrorCode.NOT_ENOUGH_REPLICAS)
        if held is None:
            question = PartitionQuestion(
                transactional_id,
                producer_id,
                producer_epoch,
                hosted.topic,
                hosted.topic_id,
                hosted.index,
                verify_only=version < PRODUCE_V2,
            )
            deadline_ms = self._environment.clock.now_ms() + CONCURRENT_MAX_MS
            held = self._held[key] = _Held(hosted, question, version, deadline_ms)
            self._ask(key, held)
        self._held_bytes += size
        held.batches.append((bytearray(records), by_all, allow_zstd, refusal, done))
        return None

    def cancel(
        self, hosted: HostedPartition, producer_id: int, producer_epoch: int, *, is_v2: bool = False
    ) -> None:
        """A marker is written: what is being verified belongs to the transaction that it ends.

        Its epoch is that of the transaction, or the next one. In v2 it is always the next one, and what has the
        marker's own epoch belongs to the next transaction.
        """
        for epoch in (producer_epoch - 1,) if is_v2 else (producer_epoch - 1, producer_epoch):
            key = (hosted.topic_id, hosted.index, producer_id, epoch)
            held = self._held.get(key)
            if held is not None:
                held.is_cancelled = True
            for other in self._others.get(key, ()):
                other.is_cancelled = True

    def verify(
        self, hosted: HostedPartition, question: PartitionQuestion, done: Callable[[ErrorCode], None]
    ) -> None:
        """Verify a partition for something else than a produced batch: offsets that are part of a transaction."""
        key = (hosted.topic_id, hosted.index, question.producer_id, question.producer_epoch)
        other = _Other()
        self._others.setdefault(key, []).append(other)
        leader_epoch = hosted.leader_epoch
        deadline_ms = self._environment.clock.now_ms() + CONCURRENT_MAX_MS

        def ask() -> None:
            self._client.ask(question, answered)

        def answered(error: ErrorCode) -> None:
            if self._is_repeated(error, deadline_ms) and not other.is_cancelled:
                self._environment.spawn.later(CONCURRENT_RETRY_MS, ask)
                return
            others = self._others[key]
            others.remove(other)
            if not others:
                del self._others[key]
            if not error and (hosted.leader_epoch != leader_epoch or hosted.is_deleted):
                error = ErrorCode.NOT_COORDINATOR
            done(ErrorCode.INVALID_TXN_STATE if other.is_cancelled and not error else error)

        ask()

    def check(self) -> None:
        """Assert the invariants, in tests and simulation."""
        held_bytes = sum(
            len(batch[0]) + HELD_OVERHEAD_BYTES for held in self._held.values() for batch in held.batches
        )
        assert held_bytes == self._held_bytes, (held_bytes, self._held_bytes)
        assert all(held.batches for held in self._held.values())
        assert all(self._others.values())

    def _ask(self, key: Key, held: _Held) -> None:
        self._client.ask(held.question, lambda error: self._answered(key, held, error))

    def _is_repeated(self, error: ErrorCode, deadline_ms: int) -> bool:
        return error == ErrorCode.CONCURRENT_TRANSACTIONS and self._environment.clock.now_ms() < deadline_ms

    def _answered(self, key: Key, held: _Held, error: ErrorCode) -> None:
        if self._is_repeated(error, held.deadline_ms) and not held.is_cancelled:
            self._environment.spawn.later(CONCURRENT_RETRY_MS, lambda: self._ask(key, held))
            return
        del self._held[key]
        hosted = held.hosted
        if hosted.is_deleted:
            # Its files are renamed and still open: an append would succeed, into nothing.
            error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        elif not error and hosted.leader_epoch != held.leader_epoch:
            error = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif not error and held.is_cancelled:
            error = ErrorCode.INVALID_TXN_STATE
        for batch, by_all, allow_zstd, refusal, done in held.batches:
            self._held_bytes -= len(batch) + HELD_OVERHEAD_BYTES
            denied = ErrorCode.NONE if refusal is None else refusal()
            if denied:
                done(Appended(denied))
                continue
            with memoryview(batch) as records:
                if error:
                    appended = hosted.refuse(records, _for_client(error, held.version))
                else:
                    appended = hosted.append(
                        records,
                        allow_zstd=allow_zstd,
                        by_all=by_all,
                        is_transactional=True,
                        is_verified=True,
                    )
            done(appended)


class _Other:
    __slots__ = ("is_cancelled",)

    def __init__(self) -> None:
        self.is_cancelled = False


def _for_client(error: ErrorCode, version: int) -> ErrorCode:
    """The error of the coordinator as a producer of this version of Produce understands it."""
    if error in _PASSING or (error == ErrorCode.CONCURRENT_TRANSACTIONS and version < PRODUCE_V2):
        return ErrorCode.NOT_ENOUGH_REPLICAS
    if error == ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_SINCE_VERSION:
        return ErrorCode.INVALID_TXN_STATE
    return error
