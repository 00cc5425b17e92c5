"""One partition's batches that are not acknowledged, in the order in which they were given, which is the order of
their sequences. A batch is

    waiting     not sent, or to be sent again
    in flight   in a request that has no answer yet
    gone        acknowledged

and these rules keep the order whatever is lost, refused or moved:

- Those in flight come before those that never were. At most five are: what a broker remembers of a producer.
- After a failure nothing is sent until all that is in flight has been answered, or its connection has ended. Then
  everything goes again from the first, with the same sequences.
- The first batch of a partition goes alone. A broker that knows nothing of a producer takes any sequence as its
  first (KIP-360), so a second batch could overtake the first for good.
- A batch that others have overtaken (it was written, but its answer was lost) goes alone too, or the broker
  might forget it behind newer ones before it is asked about it again.

What a newcomer gets wrong: an acknowledgement may come for a batch in the middle. Then those before it must turn
out to lie before it in the log, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from penstock.model import TopicPartition
from penstock.protocol.records import CRC_START, SEQUENCE_MAX
from penstock.wire.errors import OutOfSequence

# How many batches of a producer a broker remembers, and so how many may be in flight.
IN_FLIGHT_MAX = 5
OFFSET_MAX = 2**63 - 1

# In a batch's header: producer id, producer epoch, base sequence; and the CRC before it.
_PRODUCER = Struct(">qhi")
_PRODUCER_AT = 43
_CRC = Struct(">I")
_CRC_AT = 17

# Called with the offset of the batch's first record; -1 when the broker does not say (it had the batch already).
OnAck = Callable[[int], None]


class Identity(NamedTuple):
    producer_id: int
    epoch: int


class Batch:
    def __init__(
        self, at: TopicPartition, data: bytearray, count: int, due_ms: int, on_ack: OnAck | None
    ) -> None:
        self.at = at
        self.data = data
        self.count = count
        # When it is too late to be acknowledged.
        self.due_ms = due_ms
        self.on_ack = on_ack
        # -1 until it is first sent; then for good, unless the queue gets another identity.
        self.sequence = -1
        self.is_in_flight = False
        # It was sent once without a definite answer.
        self.maybe_written = False
        # One behind it was acknowledged; and the lowest offset at which that was so.
        self.is_overtaken = False
        self.offset_below = OFFSET_MAX
        self.corrupt_tries = 0


class Queue:
    def __init__(self, at: TopicPartition, identity: Identity | None) -> None:
        self.at = at
        self.batches: deque[Batch] = deque()
        self.in_flight = 0
        # Whose sequences these are. None while there is no producer id, or a new one is needed.
        self.identity = identity
        self.next_sequence = 0
        # The broker has acknowledged something, and so knows our sequences.
        self.is_established = False
        # Of the last batch before the queue.
        self.acked_offset = -1
        # Something was refused or lost: wait for the rest of what is in flight, then begin again.
        self.has_failed = False

        # How it is going, for whoever sends.
        # Of the topic that was last sent to. One that was made anew is another.
        self.topic_id: bytes | None = None
        self.failures = 0
        self.not_before_ms = 0
        self.unknown_since_ms: int | None = None
        self.trouble = ""

    def next_to_send(self) -> Batch | None:
        """The first that is not in flight, if the rules allow to send it."""
        if self.has_failed or self.identity is None or self.in_flight >= len(self.batches):
            return None
        goes_alone = not self.is_established or self.batches[0].is_overtaken
        if self.in_flight >= (1 if goes_alone else IN_FLIGHT_MAX):
            return None
        return self.batches[self.in_flight]

    def sent(self, batch: Batch) -> None:
        """The batch, which is the next to send, is about to leave; its header is filled in when it is new."""
        assert self.identity is not None and batch is self.batches[self.in_flight]
        batch.is_in_flight = True
        self.in_flight += 1
        if batch.sequence >= 0:
            return
        batch.sequence = self.next_sequence
        self.next_sequence = (self.next_sequence + batch.count) & SEQUENCE_MAX
        _PRODUCER.pack_into(batch.data, _PRODUCER_AT, *self.identity, batch.sequence)
        with memoryview(batch.data) as view, view[CRC_START:] as covered:
            crc = crc32c(covered)
        _CRC.pack_into(batch.data, _CRC_AT, crc)

    def refused(self, batch: Batch, *, maybe_written: bool) -> bool:
        """The batch came back and goes again; whether it is the first to do so since things went well."""
        self._landed(batch)
        batch.maybe_written = batch.maybe_written or maybe_written
        is_news = not self.has_failed
        self.has_failed = self.in_flight > 0
        return is_news

    def acknowledged(self, batch: Batch, base_offset: int) -> None:
        """The batch is in the log, at this offset if the broker says so (-1 if not).

        Raises:
            OutOfSequence: it is not where its place in the order is.
        """
        self._landed(batch)
        if base_offset >= 0 and not self.acked_offset < base_offset < batch.offset_below:
            raise OutOfSequence(f"{self.at} has records in another order than they were written in")
        for each in self.batches:
            if each is batch:
                break
            each.is_overtaken = True
            if base_offset >= 0:
                each.offset_below = min(each.offset_below, base_offset)
        if batch is self.batches[0] and base_offset >= 0:
            self.acked_offset = base_offset
        self.batches.remove(batch)
        self.is_established = True
        self.failures = 0
        if not self.in_flight:
            self.has_failed = False

    def identify(self, identity: Identity) -> None:
        """Begin to count anew, as another producer. Raises OutOfSequence when that might repeat records."""
        assert not self.in_flight
        if any(batch.maybe_written or batch.is_overtaken for batch in self.batches):
            raise OutOfSequence(
                f"the leader of {self.at} has forgotten this producer, and nobody knows whether it has the last "
                "batches; look what is in the log, and write the rest with a new producer"
            )
        self.identity = identity
        self.next_sequence = 0
        self.is_established = False
        for batch in self.batches:
            batch.sequence = -1

    def check(self) -> None:
        """Assert what must be true between two events."""
        flying = [batch.is_in_flight for batch in self.batches]
        assert self.in_flight == sum(flying) <= IN_FLIGHT_MAX
        assert self.has_failed or flying == sorted(flying, reverse=True), "what is in flight comes first"
        assert not self.has_failed or self.in_flight, "a failure is over when nothing is in flight"
        sequences = [batch.sequence for batch in self.batches]
        numbered = [sequence for sequence in sequences if sequence >= 0]
        assert sequences[: len(numbered)] == numbered, "numbered in order"
        steps = [(behind - before) & SEQUENCE_MAX for before, behind in pairwise(numbered)]
        assert all(0 < step < SEQUENCE_MAX // 2 for step in steps), "sequences grow"
        overtaken = [batch.is_overtaken for batch in self.batches]
        assert overtaken == sorted(overtaken, reverse=True), "who is overtaken stands before who is not"

    def _landed(self, batch: Batch) -> None:
        assert batch.is_in_flight
        batch.is_in_flight = False
        self.in_flight -= 1
