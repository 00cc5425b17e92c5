"""One partition's unacknowledged batches, in the order of ``send``, which is the order of their sequences. A
batch is

    waiting     not sent, or to be sent again
    in flight   in a request without a response yet
    gone        acknowledged

These rules keep the order whatever is lost, refused or moved:

- Batches in flight precede those never sent. At most five are in flight: a broker remembers five per producer.
- After a failure nothing is sent until every batch in flight is answered or its connection has ended. Then all are
  sent again from the first, with the same sequences.
- The first batch of a partition is sent alone. A broker that does not know a producer accepts any first sequence
  (KIP-360), so a second batch could overtake the first for good.
- An overtaken batch (written, but its response was lost) is also sent alone; otherwise newer batches might push it
  out of the broker's memory before it is sent again.

Careful: a batch in the middle may be acknowledged first. Then the batches before it must turn out to lie before
it in the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from penstock.model import TopicPartition
from penstock.protocol.records import CRC_START, SEQUENCE_MAX, TRANSACTIONAL
from penstock.wire.errors import OutOfSequence, WireError

# A broker remembers this many batches per producer, so at most this many may be in flight.
IN_FLIGHT_MAX = 5
OFFSET_MAX = 2**63 - 1

# In a batch's header: producer id, producer epoch and base sequence; and the CRC before them.
_PRODUCER = Struct(">qhi")
_PRODUCER_AT = 43
_CRC = Struct(">I")
_CRC_AT = 17
# The lower byte, with all attributes that are defined.
_ATTRIBUTES_AT = 22

# Called with the offset of the batch's first record; -1 when unknown (the broker had the batch already).
OnAck = Callable[[int], None]
# Called with the error, and whether the batch may be in the log nevertheless.
OnFailure = Callable[[WireError, bool], None]


class Identity(NamedTuple):
    producer_id: int
    epoch: int


class Batch:
    def __init__(
        self,
        at: TopicPartition,
        data: bytearray,
        count: int,
        due_ms: int,
        on_ack: OnAck | None,
        on_failure: OnFailure | None = None,
        divide: Callable[[], list[Batch]] | None = None,
    ) -> None:
        self.at = at
        self.data = data
        self.count = count
        # The deadline for its acknowledgement.
        self.due_ms = due_ms
        self.on_ack = on_ack
        # For a producer whose batches fail one by one.
        self.on_failure = on_failure
        # Makes smaller batches of the same records, if it has more than one.
        self.divide = divide
        # -1 until first sent; then fixed, unless the queue gets another identity.
        self.sequence = -1
        self.is_in_flight = False
        # Sent at least once without a definite response.
        self.maybe_written = False
        # A later batch was acknowledged, and the lowest offset of such a batch.
        self.is_overtaken = False
        self.offset_below = OFFSET_MAX
        self.corrupt_tries = 0
        # Its failure was reported. It is not sent again.
        self.is_given_up = False

    @property
    def is_doubtful(self) -> bool:
        """Whether it may be in the log although nobody said so."""
        return self.is_in_flight or self.maybe_written or self.is_overtaken


class Queue:
    def __init__(
        self, at: TopicPartition, identity: Identity | None, *, is_transactional: bool = False
    ) -> None:
        self.at = at
        self._is_transactional = is_transactional
        self.batches: deque[Batch] = deque()
        self.in_flight = 0
        # The producer of these sequences. None while there is no producer id or a new one is needed.
        self.identity = identity
        self.next_sequence = 0
        # The broker has acknowledged a batch, so it knows our sequences.
        self.is_established = False
        # Offset of the last batch that left the queue.
        self.acked_offset = -1
        # A batch was refused or lost: wait for the others in flight, then send again from the first.
        self.has_failed = False

        # The sender's state.
        # Id of the topic last sent to. A recreated topic has another id.
        self.topic_id: bytes | None = None
        self.failures = 0
        self.not_before_ms = 0
        self.unknown_since_ms: int | None = None
        self.trouble = ""

    def next_to_send(self) -> Batch | None:
        """The first batch that is not in flight, if the rules allow sending it."""
        if self.has_failed or self.identity is None or self.in_flight >= len(self.batches):
            return None
        goes_alone = not self.is_established or self.batches[0].is_overtaken
        if self.in_flight >= (1 if goes_alone else IN_FLIGHT_MAX):
            return None
        return self.batches[self.in_flight]

    def sent(self, batch: Batch) -> None:
        """The next batch is about to be sent. Fills in its header the first time."""
        assert self.identity is not None and batch is self.batches[self.in_flight]
        batch.is_in_flight = True
        self.in_flight += 1
        if batch.sequence >= 0:
            return
        batch.sequence = self.next_sequence
        self.next_sequence = (self.next_sequence + batch.count) & SEQUENCE_MAX
        if self._is_transactional:
            batch.data[_ATTRIBUTES_AT] |= TRANSACTIONAL
        _PRODUCER.pack_into(batch.data, _PRODUCER_AT, *self.identity, batch.sequence)
        with memoryview(batch.data) as view, view[CRC_START:] as covered:
            crc = crc32c(covered)
        _CRC.pack_into(batch.data, _CRC_AT, crc)

    def refused(self, batch: Batch, *, maybe_written: bool) -> bool:
        """The batch failed and will be sent again. Returns whether it is the first since the last success."""
        self._landed(batch)
        batch.maybe_written = batch.maybe_written or maybe_written
        is_news = not self.has_failed
        self.has_failed = self.in_flight > 0
        return is_news

    def acknowledged(self, batch: Batch, base_offset: int) -> None:
        """The batch is in the log at this offset (-1 if the broker does not say).

        Raises:
            OutOfSequence: its offset contradicts the order of the batches.
        """
        if base_offset >= 0 and not self.acked_offset < base_offset < batch.offset_below:
            raise OutOfSequence(f"{self.at} has records in another order than they were sent")
        self._landed(batch)
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

    def drop(self, batch: Batch) -> None:
        """Forget a batch that is not acknowledged. What follows it needs another identity if it had a sequence."""
        assert not batch.is_in_flight
        self.batches.remove(batch)
        if batch.sequence >= 0:
            self.identity = None
        if not self.in_flight:
            self.has_failed = False

    def replace(self, batch: Batch, smaller: list[Batch]) -> None:
        """Send smaller batches in place of one that was refused, as another producer."""
        assert not batch.is_in_flight
        at = self.batches.index(batch)
        self.batches.remove(batch)
        for place, each in enumerate(smaller):
            self.batches.insert(at + place, each)
        self.identity = None

    def forget_order(self) -> None:
        """Offsets begin again: the log is another one, or has lost its end."""
        self.acked_offset = -1
        for batch in self.batches:
            batch.offset_below = OFFSET_MAX

    def forgotten(self) -> OutOfSequence:
        """The error for batches that must not be sent again as another producer: that might repeat them."""
        return OutOfSequence(
            f"the leader of {self.at} has forgotten this producer, so it is unknown whether it has the last "
            "batches; check the log, and send the rest with a new producer"
        )

    def identify(self, identity: Identity) -> None:
        """Restart the sequences as another producer. Raises OutOfSequence when that might repeat records."""
        assert not self.in_flight
        if any(batch.is_doubtful for batch in self.batches):
            raise self.forgotten()
        self.identity = identity
        self.next_sequence = 0
        self.is_established = False
        for batch in self.batches:
            batch.sequence = -1

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        flying = [batch.is_in_flight for batch in self.batches]
        assert self.in_flight == sum(flying) <= IN_FLIGHT_MAX
        assert self.has_failed or flying == sorted(flying, reverse=True), "batches in flight come first"
        assert not self.has_failed or self.in_flight, "a failure is over when nothing is in flight"
        sequences = [batch.sequence for batch in self.batches]
        numbered = [sequence for sequence in sequences if sequence >= 0]
        assert self.identity is None or sequences[: len(numbered)] == numbered, "numbered in order"
        steps = [(behind - before) & SEQUENCE_MAX for before, behind in pairwise(numbered)]
        assert all(0 < step < SEQUENCE_MAX // 2 for step in steps), "sequences grow"
        overtaken = [batch.is_overtaken for batch in self.batches]
        assert overtaken == sorted(overtaken, reverse=True), "overtaken batches come first"

    def _landed(self, batch: Batch) -> None:
        assert batch.is_in_flight
        batch.is_in_flight = False
        self.in_flight -= 1
