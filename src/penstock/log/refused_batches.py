"""Batches of idempotent producers that were refused with a retriable error, and will be sent again.

A client has several batches in flight. When one is refused (no leader, too few in-sync replicas, disk full) and
the cause is gone before the next one arrives, that next one must not overtake it. OUT_OF_ORDER_SEQUENCE_NUMBER
would be true, but librdkafka then starts a new sequence, and batches that were stored but not acknowledged yet
are stored twice. So the later batch gets the same error as the refused one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import SEQUENCE_MAX, BatchHeader

# Per producer: as many as a client may have in flight.
BATCHES_REMEMBERED = 5
PRODUCERS_REMEMBERED = 1_000
# For as long as batches sent after a refused one may still arrive.
REMEMBERED_MS = 60_000
# For all partitions that are not hosted here.
ELSEWHERE_REMEMBERED = 1_000


class _Refused(NamedTuple):
    producer_epoch: int
    error: ErrorCode
    sequences: deque[int]
    wall_ms: int


class RefusedBatches:
    """For one partition. Batches stored since then are not removed from here: see ``after`` in ``overtaken``."""

    __slots__ = ("_by_producer",)

    def __init__(self) -> None:
        self._by_producer: dict[int, _Refused] = {}

    def add(self, header: BatchHeader, error: ErrorCode, wall_ms: int) -> None:
        known = self._by_producer.pop(header.producer_id, None)
        if known is None or known.producer_epoch != header.producer_epoch:
            if len(self._by_producer) >= PRODUCERS_REMEMBERED:
                del self._by_producer[next(iter(self._by_producer))]
            sequences: deque[int] = deque(maxlen=BATCHES_REMEMBERED)
        else:
            sequences = known.sequences
        if header.base_sequence not in sequences:
            sequences.append(header.base_sequence)
        self._by_producer[header.producer_id] = _Refused(header.producer_epoch, error, sequences, wall_ms)

    def overtaken(self, header: BatchHeader, after: int, wall_ms: int) -> ErrorCode | None:
        """The error of a refused batch before this one, if any. ``after`` is the last sequence stored, or -1."""
        known = self._of(header, wall_ms)
        if known is not None and any(
            (after < 0 or _is_before(after, sequence)) and _is_before(sequence, header.base_sequence)
            for sequence in known.sequences
        ):
            return known.error
        return None

    def includes(self, header: BatchHeader, wall_ms: int) -> bool:
        """Whether this same batch was refused before."""
        known = self._of(header, wall_ms)
        return known is not None and header.base_sequence in known.sequences

    def _of(self, header: BatchHeader, wall_ms: int) -> _Refused | None:
        known = self._by_producer.get(header.producer_id)
        if (
            known is None
            or known.producer_epoch != header.producer_epoch
            # The clock may have been set back.
            or abs(wall_ms - known.wall_ms) > REMEMBERED_MS
        ):
            return None
        return known


def _is_before(sequence: int, other: int) -> bool:
    """Whether ``sequence`` comes before ``other``, which is near it. Sequences wrap around to 0."""
    return 0 < (other - sequence) & SEQUENCE_MAX <= SEQUENCE_MAX // 2


# Shared by all partitions that never refused a batch, which are most of them.
NONE_REFUSED = RefusedBatches()


class _RefusedElsewhere(NamedTuple):
    topic: str | bytes
    partition: int
    header: BatchHeader
    error: ErrorCode
    wall_ms: int


class RefusedElsewhere:
    """Batches for partitions that this broker does not host, or has not heard of yet.

    A client may learn of a new topic before its leader does. If the leader refuses the first of several batches and
    then learns of the topic, the later batches must not overtake the first one. Once another producer has written,
    the log is not empty, and nothing else would show that a batch before them is missing.
    """

    __slots__ = ("_refused",)

    def __init__(self) -> None:
        self._refused: deque[_RefusedElsewhere] = deque(maxlen=ELSEWHERE_REMEMBERED)

    def add(
        self, topic: str | bytes, partition: int, header: BatchHeader, error: ErrorCode, wall_ms: int
    ) -> None:
        """``topic`` is its name or its id, whichever the client gave."""
        self._refused.append(_RefusedElsewhere(topic, partition, header, error, wall_ms))

    def of(self, name: str, topic_id: bytes, partition: int) -> RefusedBatches:
        """The refused batches of a partition that is hosted here from now on."""
        refused_batches = NONE_REFUSED
        for refused in self._refused:
            if refused.partition == partition and refused.topic in (name, topic_id):
                if refused_batches is NONE_REFUSED:
                    refused_batches = RefusedBatches()
                refused_batches.add(refused.header, refused.error, refused.wall_ms)
        return refused_batches
