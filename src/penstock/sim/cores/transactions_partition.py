"""A data partition of the simulated transactions: the rules of its log, and what every transaction came to.

This is a model of ``log/producers.py`` with the verification of its leader. It never restarts: replication is
simulated elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.protocol.errors import ErrorCode
from penstock.sim.report import Violation
from penstock.transactions.changes import Identity, Partition
from penstock.transactions.coordinator import MarkersDue


@dataclass(eq=False)
class Transaction:
    """One transaction as its client sees it, and where it ended up."""

    number: int
    transactional_id: str
    producer: Identity
    # Partitions that acknowledged its record.
    acknowledged: list[Partition] = field(default_factory=list)
    # What a client was told: True for a commit; None if it does not know.
    told: bool | None = None
    # A request to commit was granted; the answer may be lost, and the decision with its coordinator.
    is_granted: bool = False
    # A request to commit was refused for good, and none was granted before.
    is_refused: bool = False
    # By partition, what its marker said.
    outcomes: dict[Partition, bool] = field(default_factory=dict)

    def ended(self, partition: Partition, is_commit: bool) -> None:
        self.outcomes[partition] = is_commit
        if len({*self.outcomes.values()}) > 1:
            raise Violation(f"transaction {self.number} is committed in one partition and aborted in another")


@dataclass(eq=False)
class _Producer:
    epoch: int = -1
    sequence: int = -1
    coordinator_epoch: int = -1
    # Records of the open transaction.
    open: list[Transaction] = field(default_factory=list)
    # Grows with every marker, so that a verification from before it does not count.
    guard: int = 0


class SimPartition:
    # A marker of v2 does not end a transaction of its own epoch.
    is_strict = True

    def __init__(self, name: Partition) -> None:
        self.name = name
        self.producers: dict[int, _Producer] = {}

    def guard(self, producer: Identity) -> int | None:
        """What to present at the append; None if the transaction is open here and nothing must be verified."""
        known = self.producers.setdefault(producer.id, _Producer())
        return None if known.open and known.epoch == producer.epoch else known.guard

    def append(self, transaction: Transaction, sequence: int, guard: int | None) -> ErrorCode:
        producer = transaction.producer
        known = self.producers[producer.id]
        if producer.epoch < known.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if known.open and known.epoch != producer.epoch:
            return ErrorCode.INVALID_TXN_STATE
        last = known.sequence if producer.epoch == known.epoch else -1
        if sequence <= last:
            return ErrorCode.NONE
        if sequence != last + 1:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        if not known.open and guard != known.guard:
            return ErrorCode.NOT_ENOUGH_REPLICAS
        known.epoch, known.sequence = producer.epoch, sequence
        known.open.append(transaction)
        if known.open[0] is not transaction:
            raise Violation(f"a record of {transaction.number} joined transaction {known.open[0].number}")
        return ErrorCode.NONE

    def write_marker(self, due: MarkersDue, coordinator_epoch: int) -> ErrorCode:
        known = self.producers.setdefault(due.producer_id, _Producer())
        if coordinator_epoch < known.coordinator_epoch:
            return ErrorCode.TRANSACTION_COORDINATOR_FENCED
        if due.producer_epoch < known.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        known.coordinator_epoch = coordinator_epoch
        if self.is_strict and due.is_v2 and known.open and known.epoch == due.producer_epoch:
            return ErrorCode.NONE
        if known.open:
            known.open[0].ended(self.name, due.is_commit)
            known.open.clear()
        known.guard += 1
        if due.producer_epoch > known.epoch:
            known.epoch, known.sequence = due.producer_epoch, -1
        return ErrorCode.NONE
