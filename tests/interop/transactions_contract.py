"""What transactions of every library must do, seen by two readers.

Each test writes with one library and reads with that library and another, both isolation levels, and compares all
records, their offsets and the readers' positions with a model of the log (``Ledger``).
"""

# confluent_kafka is typed, but does not say which names it exports.
# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from tests.conftest import RunningBroker
from tests.interop.client import PATIENCE_S, ClientError, Outgoing
from tests.interop.transactions import (
    ISOLATIONS,
    MARK,
    Isolation,
    Ledger,
    Library,
    Producer,
    Seen,
    Sent,
    TransactionalClient,
    in_order,
    numbered,
)
from tests.support import BrokerProcess, wait_until

Unique = Callable[[str], str]

PARTITIONS = 3
# For how long a reader must not get what it must not see. It would have come with what it did get.
LINGER_MS = 300
# Long enough for one send on a busy machine.
SHORT_TIMEOUT_MS = 3000
LEVELS = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
}


class Book:
    """A topic and its ledger: everything done to the one is written into the other, and answers are compared."""

    def __init__(self, reference: Any, topic: str) -> None:
        self.topic = topic
        self.ledger = Ledger(PARTITIONS)
        self._reference = reference
        self._number = 0
        reference.create_topic(topic, PARTITIONS)

    def plain(self, count: int = 6) -> None:
        """Records outside of transactions, of another producer."""
        records = self._next(count)
        outgoing = [Outgoing(each.value, partition=each.partition) for each in records]
        written = self._reference.produce(self.topic, outgoing, idempotent=True)
        assert written == self.ledger.sent(records)

    def send(self, producer: Producer, count: int = 6) -> None:
        records = self._next(count)
        assert producer.send(self.topic, records) == self.ledger.sent(records, producer)

    def commit(self, producer: Producer) -> None:
        producer.commit()
        self.ledger.ended(producer, commit=True)

    def abort(self, producer: Producer) -> None:
        producer.abort()
        self.ledger.ended(producer, commit=False)

    def was_aborted(self, producer: Producer) -> None:
        """The coordinator has aborted the producer's transaction, or is about to."""
        self.ledger.ended(producer, commit=False)
        self.wait_for_ends()

    def wait_for_ends(self) -> None:
        """A marker is written soon after its transaction's end, not with it."""
        expected = {isolation: self.ledger.ends(isolation) for isolation in ISOLATIONS}
        wait_until(
            lambda: {isolation: self.ends(isolation) for isolation in ISOLATIONS} == expected,
            PATIENCE_S,
            f"the ends of {self.topic} are {expected}",
        )

    def ends(self, isolation: Isolation) -> dict[int, int]:
        return ends(self._reference, self.topic, isolation)

    def compare(self, readers: Sequence[TransactionalClient], *, linger_ms: int = 0) -> None:
        """Every reader sees, at either isolation, exactly what the ledger says."""
        self.wait_for_ends()
        for reader in readers:
            for isolation in ISOLATIONS:
                expected, ends = self.ledger.visible(isolation), self.ledger.ends(isolation)
                reading = reader.read(self.topic, isolation, len(expected), ends, linger_ms=linger_ms)
                assert in_order(reading.records) == expected, isolation
                assert reading.positions in (None, ends), isolation

    def _next(self, count: int) -> list[Sent]:
        records = numbered(self._number, count, PARTITIONS)
        self._number += count
        return records


def ends(reference: Any, topic: str, isolation: Isolation) -> dict[int, int]:
    """As ListOffsets says."""
    asked = {TopicPartition(topic, each): OffsetSpec.latest() for each in range(PARTITIONS)}
    answers = reference.admin.list_offsets(asked, isolation_level=LEVELS[isolation])
    return {each.partition: answer.result(PATIENCE_S).offset for each, answer in answers.items()}


class Transacting:
    """For a fixture ``library``, its ``client``, and ``readers``: that client and one of another library."""

    @pytest.fixture
    def book(self, reference: Any, unique: Unique) -> Book:
        return Book(reference, unique("topic"))

    def test_committed_records_are_read_and_aborted_ones_are_not(
        self, client: TransactionalClient, readers: Sequence[TransactionalClient], book: Book, unique: Unique
    ) -> None:
        producer = client.open(unique("id"))

        book.plain()
        for _ in range(2):
            producer.begin()
            book.send(producer)
            book.send(producer)
            book.commit(producer)
            producer.begin()
            book.send(producer)
            book.abort(producer)
        # Not all partitions are in each transaction.
        producer.begin()
        book.send(producer, 1)
        book.abort(producer)
        producer.begin()
        book.send(producer, 2)
        book.commit(producer)
        book.plain()

        book.compare(readers)
        producer.close()

    def test_records_behind_an_open_transaction_wait_for_its_end(
        self, client: TransactionalClient, readers: Sequence[TransactionalClient], book: Book, unique: Unique
    ) -> None:
        slow, fast = client.open(unique("id")), client.open(unique("id"))

        book.plain()
        slow.begin()
        book.send(slow, 1)
        fast.begin()
        book.send(fast)
        book.commit(fast)
        fast.begin()
        book.send(fast)
        book.abort(fast)
        book.plain()
        assert book.ledger.ends("read_committed")[0] < book.ledger.ends("read_uncommitted")[0]
        book.compare(readers, linger_ms=LINGER_MS)

        book.send(slow)
        book.commit(slow)
        book.compare(readers)
        slow.close()
        fast.close()

    def test_a_second_producer_of_an_id_fences_the_first(
        self,
        library: Library,
        client: TransactionalClient,
        readers: Sequence[TransactionalClient],
        book: Book,
        unique: Unique,
    ) -> None:
        for late in ("send", "commit"):
            transactional_id = unique("id")
            first = client.open(transactional_id)
            first.begin()
            book.send(first)

            second = client.open(transactional_id)

            book.was_aborted(first)
            with pytest.raises(ClientError) as refused:
                if late == "send":
                    first.send(book.topic, [Sent(0, b"too late")])
                else:
                    first.commit()
            expected = library.fenced_send if late == "send" else library.fenced_commit
            assert refused.value.name == expected, refused.value
            second.begin()
            book.send(second)
            book.commit(second)
        book.compare(readers)

    def test_a_transaction_past_its_timeout_is_aborted(
        self,
        broker: BrokerProcess | RunningBroker,
        library: Library,
        client: TransactionalClient,
        readers: Sequence[TransactionalClient],
        book: Book,
        unique: Unique,
    ) -> None:
        transactional_id = unique("id")
        producer = client.open(transactional_id, timeout_ms=SHORT_TIMEOUT_MS)
        producer.begin()
        book.send(producer)
        book.plain()

        book.was_aborted(producer)
        with pytest.raises(ClientError) as refused:
            producer.commit()
        # Apache Kafka before the fix of KAFKA-20785 has another answer for transactions v2.
        older = {"INVALID_TXN_STATE"} if isinstance(broker, RunningBroker) else set()
        assert refused.value.name in {library.fenced_commit} | older, refused.value
        book.compare(readers)

        again = client.open(transactional_id)
        again.begin()
        book.send(again)
        book.commit(again)
        book.compare(readers)

    def test_offsets_are_committed_with_the_records_of_their_transaction(
        self,
        library: Library,
        client: TransactionalClient,
        readers: Sequence[TransactionalClient],
        reference: Any,
        book: Book,
        unique: Unique,
    ) -> None:
        group, transactional_id = unique("group"), unique("id")
        source, target = book, Book(reference, unique("target"))
        writer = client.open(unique("id"))
        for ending in (source.commit, source.abort, source.commit):
            writer.begin()
            source.send(writer, 12)
            ending(writer)
        source.wait_for_ends()
        inputs = source.ledger.visible("read_committed")

        first = client.open_in_group(transactional_id, group, source.topic)
        read = first.transform(target.topic, 7)
        target.ledger.sent(_transformed(read), first)
        if not library.offsets_at_end:
            target.wait_for_ends()
            with pytest.raises(ClientError) as unstable:
                _committed(reference, group, source.topic)
            assert unstable.value.name == "UNSTABLE_OFFSET_COMMIT"
        target.abort(first)
        first.close()
        target.wait_for_ends()
        assert _committed(reference, group, source.topic) == {}

        outputs: list[Seen] = []
        for count in (7, len(inputs) - 7):
            following = client.open_in_group(transactional_id, group, source.topic)
            read = following.transform(target.topic, count)
            target.ledger.sent(_transformed(read), following)
            target.commit(following)
            following.close()
            outputs += read
            target.compare(readers)
            assert _committed(reference, group, source.topic) == {
                partition: max(each.offset for each in outputs if each.partition == partition) + 1
                for partition in {each.partition for each in outputs}
            }
        assert in_order(outputs) == inputs


def _transformed(read: Sequence[Seen]) -> list[Sent]:
    return [Sent(each.partition, each.value + MARK) for each in read]


def _committed(reference: Any, group: str, topic: str) -> dict[int, int]:
    """Committed offsets, or UNSTABLE_OFFSET_COMMIT while a transaction holds some back."""
    committed: dict[int, int] = reference.committed(group, topic, range(PARTITIONS), require_stable=True)
    return committed
