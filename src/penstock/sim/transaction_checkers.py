"""Checkers of what clients see of transactions, in the manner of ``client_checkers.py``.

A client knows for certain that a transaction is aborted when it never asked to commit it, or when its only request
to do so was refused. It knows for certain that a transaction is committed when it was told so. Otherwise either may
be true, but all readers must see the same, in every partition.

A classic client has one producer epoch for many transactions. A late copy of its EndTxn may therefore end the next
transaction: nothing in the request says which one is meant (KIP-890). Brokers drop requests of closed connections,
which makes that rare, and transactions v2 rule it out. ``Transaction.is_excused`` is that case and no other: a
classic transaction that follows, in the same epoch, one with an EndTxn that was never answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.sim.client import Place
from penstock.sim.report import Violation


class Outcome(Enum):
    """What the client knows."""

    OPEN = auto()
    # It has asked to commit.
    COMMITTING = auto()
    COMMITTED = auto()
    ABORTED = auto()


@dataclass(slots=True, eq=False)
class Transaction:
    name: str
    producer_id: int
    epoch: int
    is_v2: bool
    # A late EndTxn of an earlier transaction may end it.
    is_excused: bool = False
    outcome: Outcome = Outcome.OPEN
    # By value: where each record was sent, and the offset that was acknowledged.
    sent: dict[bytes, Place] = field(default_factory=dict)
    offsets: dict[bytes, int] = field(default_factory=dict)
    # By value: the reader that saw it, and the one that passed it without seeing it.
    seen: dict[bytes, str] = field(default_factory=dict)
    passed: dict[bytes, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({self.producer_id}, epoch {self.epoch}, {'v2' if self.is_v2 else 'classic'})"


class TransactionsAreAtomic:
    """5, 6, 11, 15: readers of committed records see a committed transaction completely, and no other."""

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}
        # By value.
        self._of: dict[bytes, Transaction] = {}
        # By partition: the values at acknowledged offsets, and where readers of committed records found a value.
        self._acked: dict[Place, dict[int, bytes]] = {}
        self._found: dict[bytes, tuple[Place, int]] = {}
        # By partition and reader: how far it has read.
        self._read_to: dict[Place, dict[str, int]] = {}
        # By (producer id, epoch): a copy of an EndTxn may still be on its way.
        self._late_ends: dict[tuple[int, int], None] = {}
        self.committed_count = 0
        self.aborted_count = 0
        self.excused = 0
        self.compared = 0

    # What the client does

    def begin(self, name: str, producer_id: int, epoch: int, *, is_v2: bool) -> Transaction:
        assert name not in self.transactions
        is_excused = not is_v2 and (producer_id, epoch) in self._late_ends
        transaction = Transaction(name, producer_id, epoch, is_v2, is_excused)
        self.transactions[name] = transaction
        return transaction

    def sending(self, transaction: Transaction, place: Place, value: bytes) -> None:
        assert value not in self._of
        transaction.sent[value] = place
        self._of[value] = transaction

    def acked(self, transaction: Transaction, value: bytes, offset: int) -> None:
        place = transaction.sent[value]
        known = transaction.offsets.setdefault(value, offset)
        if known != offset:
            raise Violation(f"duplicate: {value!r} was acknowledged at {known} and at {offset} of {place}")
        other = self._acked.setdefault(place, {}).setdefault(offset, value)
        if other != value:
            raise Violation(
                f"lost write: {value!r} and {other!r} were both acknowledged at {offset} of {place}"
            )
        for by, read_to in self._read_to.get(place, {}).items():
            if offset < read_to and value not in transaction.seen:
                self._passed(transaction, value, by)

    def committing(self, transaction: Transaction) -> None:
        transaction.outcome = Outcome.COMMITTING

    def may_come_late(self, transaction: Transaction) -> None:
        """An EndTxn was not answered: a copy may still be on its way when another one is answered."""
        self._late_ends[transaction.producer_id, transaction.epoch] = None

    def committed(self, transaction: Transaction) -> None:
        transaction.outcome = Outcome.COMMITTED
        self.committed_count += 1
        for value, by in transaction.passed.items():
            self._torn(
                transaction,
                f"past an open transaction: {by} has read past {value!r} at {transaction.offsets.get(value)} of "
                f"{transaction.sent[value]} without seeing it, and {transaction} is committed now",
            )

    def aborted(self, transaction: Transaction) -> None:
        """It is certain that the transaction is not and will not be committed."""
        transaction.outcome = Outcome.ABORTED
        self.aborted_count += 1
        for value, by in transaction.seen.items():
            self._torn(
                transaction, f"G1a: {by} has read {value!r}, and its transaction {transaction} is aborted"
            )

    # What readers of committed records see

    def read(self, place: Place, offset: int, value: bytes, by: str) -> None:
        transaction = self._of.get(value)
        if transaction is None:
            raise Violation(f"{by} read {value!r} in {place} at {offset}, which nobody sent")
        if transaction.sent[value] != place:
            raise Violation(f"{by} read {value!r} in {place}, but it was sent to {transaction.sent[value]}")
        known = self._found.setdefault(value, (place, offset))
        if known != (place, offset):
            raise Violation(f"duplicate: {value!r} is in {place} at {known[1]} and at {offset}")
        acked = transaction.offsets.get(value, offset)
        if acked != offset:
            raise Violation(
                f"inconsistent offsets: {value!r} was acknowledged at {acked} of {place}, and {by} read it at "
                f"{offset}"
            )
        self.compared += 1
        if transaction.outcome is Outcome.OPEN:
            self._torn(
                transaction,
                f"precommitted read: {by} read {value!r} of {transaction}, which nobody asked to commit",
            )
        elif transaction.outcome is Outcome.ABORTED:
            self._torn(transaction, f"G1a: {by} read {value!r} of {transaction}, which is aborted")
        transaction.seen.setdefault(value, by)
        self._whole(transaction)

    def was_read(self, value: bytes) -> bool:
        return value in self._found

    def read_past(self, place: Place, start: int, end: int, by: str) -> None:
        """A reader has read from one offset to another; ``read`` was called for what it saw."""
        self._read_to.setdefault(place, {})[by] = end
        acked = self._acked.get(place, {})
        for offset in range(start, end):
            value = acked.get(offset)
            if value is None:
                continue
            transaction = self._of[value]
            self.compared += 1
            if value not in transaction.seen:
                self._passed(transaction, value, by)

    def _passed(self, transaction: Transaction, value: bytes, by: str) -> None:
        transaction.passed.setdefault(value, by)
        if transaction.outcome is Outcome.COMMITTED:
            self._torn(
                transaction, f"lost write: {by} did not see {value!r} of {transaction}, which is committed"
            )
        self._whole(transaction)

    def _whole(self, transaction: Transaction) -> None:
        if transaction.seen and transaction.passed:
            value, by = next(iter(transaction.seen.items()))
            hidden, other = next(iter(transaction.passed.items()))
            self._torn(
                transaction,
                f"torn transaction {transaction}: {by} saw {value!r} in {transaction.sent[value]}, and {other} "
                f"passed {hidden!r} in {transaction.sent[hidden]} without seeing it",
            )

    def excuses(self, *values: bytes) -> bool:
        """Whether one of these values may have been committed by a late EndTxn."""
        is_excused = any(self._of[value].is_excused for value in values)
        self.excused += is_excused
        return is_excused

    def _torn(self, transaction: Transaction, what: str) -> None:
        if not transaction.is_excused:
            raise Violation(what)
        self.excused += 1

    # At the end

    def final(self) -> None:
        """Check that nothing is missing, after everything was read."""
        for transaction in self.transactions.values():
            for value, place in transaction.sent.items():
                offset = transaction.offsets.get(value)
                if transaction.outcome is Outcome.COMMITTED and value not in transaction.seen:
                    self._torn(
                        transaction,
                        f"lost write: {value!r}, acknowledged at {offset} of {place}, is in the committed "
                        f"{transaction} and was never read",
                    )
                if transaction.seen and value not in transaction.seen:
                    self._torn(
                        transaction, f"torn transaction {transaction}: {value!r} of {place} was never read"
                    )


class MoneyStays:
    """11: the transfers that a reader has seen completely add up to nothing, so no money comes or goes."""

    def __init__(self) -> None:
        # By reader and transfer: the amounts seen.
        self._amounts: dict[tuple[str, str], list[int]] = {}
        self.transfers = 0

    def saw(self, transfer: str, amount: int, by: str) -> None:
        self._amounts.setdefault((by, transfer), []).append(amount)

    def final(self, *, is_excused: bool) -> None:
        for (by, transfer), amounts in self._amounts.items():
            self.transfers += 1
            if sum(amounts) and not is_excused:
                raise Violation(f"money: {by} saw the amounts {amounts} of the transfer {transfer}")


class ZombiesStayOut:
    """13: after InitProducerId was answered, requests of a lower epoch of this producer are refused."""

    def __init__(self) -> None:
        # By producer id: (when the answer was received, epoch).
        self._fences: dict[int, list[tuple[float, int]]] = {}
        self.fenced = 0
        self.initialized_count = 0

    def initialized(self, producer_id: int, epoch: int, now_ms: float) -> None:
        """The answer to InitProducerId was received."""
        self.initialized_count += 1
        self._fences.setdefault(producer_id, []).append((now_ms, epoch))

    def accepted(self, what: str, producer_id: int, epoch: int, asked_ms: float) -> None:
        """A request that was sent at ``asked_ms`` was answered without an error."""
        for since_ms, newer in self._fences.get(producer_id, ()):
            if newer > epoch and asked_ms > since_ms:
                raise Violation(
                    f"zombie: {what} of producer {producer_id} was sent at {asked_ms:.0f} ms in epoch {epoch} and "
                    f"accepted; epoch {newer} was given out at {since_ms:.0f} ms"
                )


class OneOutputPerInput:
    """12: every record that a group has processed has exactly one output."""

    def __init__(self, atomic: TransactionsAreAtomic) -> None:
        self._atomic = atomic
        # By input (partition, offset): the output seen by readers of committed records.
        self._outputs: dict[tuple[int, int], bytes] = {}

    @property
    def count(self) -> int:
        return len(self._outputs)

    def saw(self, partition: int, offset: int, output: bytes, by: str) -> None:
        known = self._outputs.setdefault((partition, offset), output)
        if known != output and not self._atomic.excuses(known, output):
            raise Violation(
                f"two outputs of input {partition}/{offset}: {known!r} and, read by {by}, {output!r}"
            )

    def final(self, committed: dict[int, int]) -> None:
        """``committed`` are the offsets that the group has committed, by partition."""
        for partition, end in committed.items():
            for offset in range(end):
                if (partition, offset) not in self._outputs:
                    raise Violation(
                        f"no output: the group has committed offset {end} of input {partition}, and nobody has "
                        f"read an output of {offset}"
                    )
        for (partition, offset), output in self._outputs.items():
            if offset >= committed.get(partition, 0) and not self._atomic.excuses(output):
                raise Violation(
                    f"torn transaction: the output of input {partition}/{offset} was read, and the group has "
                    f"committed {committed.get(partition, 0)}"
                )


class OneView:
    """15: readers of committed records see exactly what the markers in the partitions say."""

    def __init__(self, atomic: TransactionsAreAtomic) -> None:
        self._atomic = atomic
        # By partition and offset: the value and whether it is committed, as a reader of all records finds.
        self._ended: dict[tuple[Place, int], tuple[bytes, bool]] = {}

    @property
    def count(self) -> int:
        return len(self._ended)

    def ended(self, place: Place, offset: int, value: bytes, *, is_commit: bool) -> None:
        self._ended[place, offset] = (value, is_commit)

    def final(self) -> None:
        """Everything was read by both kinds of readers."""
        for (place, offset), (value, is_commit) in self._ended.items():
            if self._atomic.was_read(value) != is_commit:
                raise Violation(
                    f"the marker behind {value!r} at {offset} of {place} is "
                    f"{'a commit' if is_commit else 'an abort'}, and it was {'never ' if is_commit else ''}read as "
                    "committed"
                )


class TransactionCheckers:
    """All checkers of what clients see of transactions."""

    def __init__(self) -> None:
        self.atomic = TransactionsAreAtomic()
        self.money = MoneyStays()
        self.zombies = ZombiesStayOut()
        self.outputs = OneOutputPerInput(self.atomic)
        self.view = OneView(self.atomic)
        # The ids of classic producers.
        self.classic: dict[int, None] = {}
