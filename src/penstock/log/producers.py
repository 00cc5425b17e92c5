"""What each idempotent producer last wrote to this partition, so that a retried batch is stored only once.

A client numbers the records it sends to a partition. The last five batches of each producer id are
remembered, because a client may have five in flight. A batch is then

    the next one                  sequence = last + 1 (0 after 2^31 - 1)   append
    one of the last five again    same epoch, same first and last          respond as the first time
    of an older epoch             its producer was replaced                INVALID_PRODUCER_EPOCH
    the first of a newer epoch    sequence 0                               append
    of an unknown producer        see ``check``                            append, perhaps when it is retried
    anything else                 a batch before it is missing             OUT_OF_ORDER_SEQUENCE_NUMBER

The state is written beside the segments, in Kafka's format, when a segment is rolled and when the log is closed.
It is rebuilt from the newest such snapshot and the batches after it. An entry in that format is one batch. A
producer has one entry per batch, the newest last, which is the one that Kafka uses. (Older versions wrote only
the newest. So after loading, the last megabyte of batches is read again to fill in the rest: ``remember``.)

A transaction's batches have the same sequence. ``OpenTransactions`` says which producers have one open, and a
batch of such a producer must belong to it. The marker that ends it may have a newer epoch (KIP-890, or the
coordinator fenced the producer); then the batches before it are forgotten, and the sequence begins at 0.

The state of an idle producer expires, but not while it has an open transaction, and an epoch above 0 is kept: a
batch of an earlier epoch must not be stored, however late it arrives. In a snapshot that is an entry without a
batch and without a time.

Careful: ``wall_ms`` here is ``Log.steady_ms``, which does not jump when the clock is set. If a producer expired
because of such a jump, its next retry would be stored twice.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Mapping
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from penstock.log.aborted_index import AbortedTransaction
from penstock.log.open_transactions import OpenTransactions
from penstock.log.refused_batches import NONE_REFUSED, RefusedBatches
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import NO_SEQUENCE, SEQUENCE_MAX, TRANSACTIONAL, BatchHeader, Marker

BATCHES_REMEMBERED = 5

NO_COORDINATOR_EPOCH = -1

_SNAPSHOT_VERSION = 1
_SNAPSHOT_HEADER = Struct(">hIi")  # version, CRC of all bytes after it, count
_SNAPSHOT_CRC_START = 6
# producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch, first offset of
# the open transaction
_SNAPSHOT_ENTRY = Struct(">qhiqiqiq")


# On this error every client refreshes its metadata and sends the same batch again, in order.
TRY_AGAIN = ErrorCode.NOT_LEADER_OR_FOLLOWER

# Per partition. Clients may invent any number of producer ids, and each is remembered for a day.
PRODUCERS_MAX = 50_000
# Per partition. Only a producer with an epoch above 0 needs one.
FENCES_MAX = 100_000
# The least time a producer is remembered after a start, whatever the clock says: its client may retry that long.
LOADED_MS_MIN = 3_600_000


class Duplicate(NamedTuple):
    """The batch is in the log already."""

    base_offset: int
    timestamp: int


class WrittenBatch(NamedTuple):
    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int


# In a snapshot, of a producer without batches.
_NO_BATCH = WrittenBatch(NO_SEQUENCE, NO_SEQUENCE, -1, -1, -1)


class ProducerState:
    __slots__ = ("batches", "coordinator_epoch", "epoch", "last_seen_ms")

    def __init__(
        self,
        epoch: int,
        last_seen_ms: int,
        batches: list[WrittenBatch],
        coordinator_epoch: int = NO_COORDINATOR_EPOCH,
    ) -> None:
        self.epoch = epoch
        # When it last appended. (Kafka goes by the records' timestamps, which a client chooses.)
        self.last_seen_ms = last_seen_ms
        # All of ``epoch``, oldest first, at most BATCHES_REMEMBERED. Empty when a marker began the epoch.
        self.batches = batches
        # The highest of its markers: an earlier coordinator must not end its transactions.
        self.coordinator_epoch = coordinator_epoch

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class CorruptSnapshot(Exception):
    pass


class ProducerStates:
    __slots__ = ("_expiration_ms", "_fences", "_states", "log_was_empty", "transactions")

    def __init__(self, expiration_ms: int) -> None:
        self._expiration_ms = expiration_ms
        self._states: dict[int, ProducerState] = {}
        # Producer id -> epoch of expired producers. Above 0, oldest first, disjoint from ``_states``.
        self._fences: dict[int, int] = {}
        # Their producers are all in ``_states``.
        self.transactions = OpenTransactions()
        # The log has never held a record.
        self.log_was_empty = False

    def __len__(self) -> int:
        return len(self._states)

    def get(self, producer_id: int) -> ProducerState | None:
        return self._states.get(producer_id)

    def items(self) -> ItemsView[int, ProducerState]:
        return self._states.items()

    def open_transaction(self, producer_id: int) -> int | None:
        """The first offset of the producer's open transaction."""
        return self.transactions.first_offsets.get(producer_id)

    def open_transactions(self) -> Mapping[int, int]:
        """Producer id -> first offset of its open transaction, oldest first."""
        return self.transactions.first_offsets

    @property
    def has_known_transactions(self) -> bool:
        """Whether there is any trace of a transaction."""
        return (
            len(self.transactions) > 0
            or bool(self._fences)
            or any(state.coordinator_epoch != NO_COORDINATOR_EPOCH for state in self._states.values())
        )

    def check(
        self, header: BatchHeader, wall_ms: int, refused_batches: RefusedBatches = NONE_REFUSED
    ) -> Duplicate | ErrorCode | None:
        """Decide about a batch from a client: None means append it.

        An unknown producer may continue at any sequence (KIP-360): its state may have expired. In a log that
        never held a record, such a batch may have overtaken the first one, which would then be lost silently
        (KAFKA-15591). Or its producer is an old one and the topic was recreated. A client that is told to retry
        does so in order. So the batch is refused (``TRY_AGAIN``, which the caller records), and accepted when
        it comes again with no batch before it. (Kafka 4.3 accepts it at once, and may lose the first batch.
        Kafka 4.5 rejects it as out of order, which is fatal for a librdkafka producer.)
        """
        state = self._states.get(header.producer_id)
        base_sequence = header.base_sequence
        epoch = self._fences.get(header.producer_id, 0) if state is None else state.epoch
        if header.producer_epoch < epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if state is None or self._has_expired(header.producer_id, state, wall_ms):
            overtaken = refused_batches.overtaken(header, -1, wall_ms)
            if (
                overtaken is None
                and base_sequence != 0
                and self.log_was_empty
                and not refused_batches.includes(header, wall_ms)
            ):
                return TRY_AGAIN
            return overtaken
        if header.producer_epoch != epoch:
            if header.producer_id in self.transactions:
                # Only a marker ends the transaction of the earlier epoch.
                return ErrorCode.INVALID_TXN_STATE
            if base_sequence == 0:
                return None
            return refused_batches.overtaken(header, -1, wall_ms) or ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        batches = state.batches
        last = batches[-1].last_sequence if batches else NO_SEQUENCE
        if base_sequence == (last + 1) & SEQUENCE_MAX:
            if not header.attributes & TRANSACTIONAL and header.producer_id in self.transactions:
                return ErrorCode.INVALID_TXN_STATE
            return None
        last_sequence = header.last_sequence
        for batch in batches:
            if batch.base_sequence == base_sequence and batch.last_sequence == last_sequence:
                if header.attributes & TRANSACTIONAL:
                    # A client that aborts gives up what it has sent, and librdkafka uses its sequence numbers again
                    # without a new epoch. As a duplicate the new batch would be acknowledged and lost (in Kafka it
                    # is). No client sends a batch again after it has ended the transaction.
                    first = self.transactions.first_offsets.get(header.producer_id)
                    if first is None or batch.base_offset < first:
                        return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
                return Duplicate(batch.base_offset, batch.timestamp)
        return refused_batches.overtaken(header, last, wall_ms) or ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def update(self, header: BatchHeader, base_offset: int, wall_ms: int) -> None:
        """A batch of data with a producer id was appended at ``base_offset``."""
        was_open = False
        if header.attributes & TRANSACTIONAL:
            was_open = header.producer_id in self.transactions
            self.transactions.began(header.producer_id, base_offset)
        elif header.base_sequence < 0:
            return
        batch = WrittenBatch(
            header.base_sequence,
            header.last_sequence,
            base_offset,
            base_offset + header.last_offset_delta,
            header.max_timestamp,
        )
        state = self._states.get(header.producer_id)
        if state is None or (wall_ms - state.last_seen_ms > self._expiration_ms and not was_open):
            self._add(header, wall_ms, [batch])
            return
        state.last_seen_ms = wall_ms
        if header.producer_epoch != state.epoch:
            state.epoch = header.producer_epoch
            state.batches = [batch]
            return
        batches = state.batches
        if len(batches) == BATCHES_REMEMBERED:
            del batches[0]
        batches.append(batch)

    def _add(self, header: BatchHeader, wall_ms: int, batches: list[WrittenBatch]) -> None:
        known = self._states.get(header.producer_id)
        if known is None and len(self._states) >= PRODUCERS_MAX:
            self._make_room()
        self._fences.pop(header.producer_id, None)
        state = ProducerState(header.producer_epoch, wall_ms, batches)
        if known is not None:
            state.coordinator_epoch = known.coordinator_epoch
        self._states[header.producer_id] = state

    # Ending transactions

    def check_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, *, is_v2: bool = False
    ) -> ErrorCode:
        """Decide about a marker from a coordinator: NONE means append it.

        With transactions v2 (``is_v2``) the marker's epoch is newer than that of the transaction it ends. So a
        marker of the epoch of an open transaction was delayed, and ended the transaction before (KIP-1228).
        """
        state = self._states.get(producer_id)
        if state is not None and coordinator_epoch < state.coordinator_epoch:
            return ErrorCode.TRANSACTION_COORDINATOR_FENCED
        epoch = self._fences.get(producer_id, 0) if state is None else state.epoch
        if producer_epoch < epoch or (is_v2 and producer_epoch == epoch and producer_id in self.transactions):
            return ErrorCode.INVALID_PRODUCER_EPOCH
        return ErrorCode.NONE

    def end_transaction(
        self, header: BatchHeader, marker: Marker, offset: int, wall_ms: int
    ) -> AbortedTransaction | None:
        """A marker was appended at ``offset``. Returns the entry for the index if it aborts a transaction."""
        state = self._states.get(header.producer_id)
        if state is None:
            fenced = self._fences.get(header.producer_id, 0)
            self._add(header, wall_ms, [])
            state = self._states[header.producer_id]
            state.epoch = max(header.producer_epoch, fenced)
        elif header.producer_epoch > state.epoch:
            state.epoch = header.producer_epoch
            state.batches = []
        state.last_seen_ms = wall_ms
        state.coordinator_epoch = max(state.coordinator_epoch, marker.coordinator_epoch)
        first_offset = self.transactions.ended(header.producer_id, offset)
        if marker.is_commit or first_offset is None:
            return None
        return AbortedTransaction(
            header.producer_id, first_offset, offset, self.transactions.first_undecided(offset + 1)
        )

    # Loading and expiry

    def remember(self, headers: Iterable[BatchHeader]) -> None:
        """Add the batches that a snapshot lacks. ``headers`` are the batches below it, in order."""
        older: dict[int, list[WrittenBatch]] = {}
        for header in headers:
            state = self._states.get(header.producer_id)
            if state is None or header.producer_epoch != state.epoch or header.base_sequence < 0:
                continue
            if state.batches and header.last_offset < state.batches[0].base_offset:
                older.setdefault(header.producer_id, []).append(
                    WrittenBatch(
                        header.base_sequence,
                        header.last_sequence,
                        header.base_offset,
                        header.last_offset,
                        header.max_timestamp,
                    )
                )
        for producer_id, batches in older.items():
            state = self._states[producer_id]
            state.batches = [*batches, *state.batches][-BATCHES_REMEMBERED:]

    def _make_room(self) -> None:
        """Expire the tenth of the producers that have been idle the longest, but none with an open transaction.

        (The transaction coordinator ends transactions by time, and limits their number.)
        """
        idle = [producer_id for producer_id in self._states if producer_id not in self.transactions]
        idle.sort(key=lambda producer_id: self._states[producer_id].last_seen_ms)
        for producer_id in idle[: len(self._states) // 10 + 1]:
            self._forget(producer_id)

    def _has_expired(self, producer_id: int, state: ProducerState, wall_ms: int) -> bool:
        return wall_ms - state.last_seen_ms > self._expiration_ms and producer_id not in self.transactions

    def expire(self, wall_ms: int) -> int:
        """Expire idle producers. Returns how many."""
        expired = [
            producer_id
            for producer_id, state in self._states.items()
            if self._has_expired(producer_id, state, wall_ms)
        ]
        for producer_id in expired:
            self._forget(producer_id)
        return len(expired)

    def _forget(self, producer_id: int) -> None:
        epoch = self._states.pop(producer_id).epoch
        if epoch > 0:
            if len(self._fences) >= FENCES_MAX:
                del self._fences[next(iter(self._fences))]
            self._fences[producer_id] = epoch

    def encode(self) -> bytes:
        """Encode a snapshot. Its timestamps are when the producer last appended, which is what expiry needs."""
        body = bytearray()
        pack = _SNAPSHOT_ENTRY.pack
        for producer_id, epoch in self._fences.items():
            body += pack(producer_id, epoch, -1, -1, 0, -1, -1, -1)
        first_offsets = self.transactions.first_offsets
        for producer_id, state in self._states.items():
            first_offset = first_offsets.get(producer_id, -1)
            for batch in state.batches or (_NO_BATCH,):
                body += pack(
                    producer_id,
                    state.epoch,
                    batch.last_sequence,
                    batch.last_offset,
                    batch.last_offset - batch.base_offset,
                    state.last_seen_ms,
                    state.coordinator_epoch,
                    first_offset,
                )
        count = len(body) // _SNAPSHOT_ENTRY.size
        crc = crc32c(count.to_bytes(4, "big") + body)
        return _SNAPSHOT_HEADER.pack(_SNAPSHOT_VERSION, crc, count) + body

    def load(self, snapshot: bytes, wall_ms: int, offset: int = 0) -> None:
        """Load the snapshot at an offset. No producer expires here: the clock may be wrong.

        Producers that seem to have expired are kept for LOADED_MS_MIN, whatever the clock says.

        Raises:
            CorruptSnapshot: it is damaged, or has an unknown version. Nothing was loaded.
        """
        if len(snapshot) < _SNAPSHOT_HEADER.size:
            raise CorruptSnapshot("cut short")
        version, crc, count = _SNAPSHOT_HEADER.unpack_from(snapshot)
        if version != _SNAPSHOT_VERSION:
            raise CorruptSnapshot(f"version {version}")
        if crc32c(memoryview(snapshot)[_SNAPSHOT_CRC_START:]) != crc:
            raise CorruptSnapshot("the CRC does not match")
        if len(snapshot) != _SNAPSHOT_HEADER.size + count * _SNAPSHOT_ENTRY.size:
            raise CorruptSnapshot(f"{count} entries in {len(snapshot)} bytes")
        states: dict[int, ProducerState] = {}
        fences: dict[int, int] = {}
        first_offsets: dict[int, int] = {}
        earliest_ms = wall_ms - max(0, self._expiration_ms - LOADED_MS_MIN)
        for (
            producer_id,
            epoch,
            last_sequence,
            last_offset,
            delta,
            timestamp,
            coordinator_epoch,
            first_offset,
        ) in _SNAPSHOT_ENTRY.iter_unpack(snapshot[_SNAPSHOT_HEADER.size :]):
            if timestamp < 0 and last_sequence < 0 and first_offset < 0:
                if epoch > 0:
                    fences[producer_id] = epoch
                continue
            if first_offset >= 0:
                first_offsets[producer_id] = first_offset
            batches = []
            if last_sequence >= 0:
                base_sequence = (last_sequence - delta) & SEQUENCE_MAX
                batches.append(
                    WrittenBatch(base_sequence, last_sequence, last_offset - delta, last_offset, timestamp)
                )
            known = states.get(producer_id)
            if known is not None and known.epoch == epoch:
                known.batches += batches
            else:
                last_seen_ms = max(earliest_ms, min(timestamp, wall_ms))
                states[producer_id] = ProducerState(epoch, last_seen_ms, batches, coordinator_epoch)
        self._states = states
        self._fences = fences
        self.transactions.load(first_offsets, offset)

    def check_invariants(self, log_end_offset: int) -> None:
        assert not self._states.keys() & self._fences.keys()
        assert all(epoch > 0 for epoch in self._fences.values())
        self.transactions.check(log_end_offset)
        assert self.open_transactions().keys() <= self._states.keys()
        for producer_id, state in self._states.items():
            assert len(state.batches) <= BATCHES_REMEMBERED, producer_id
            assert not state.batches or state.batches[-1].last_offset < log_end_offset, (
                producer_id,
                state.batches,
                log_end_offset,
            )
            for batch, following in pairwise(state.batches):
                assert batch.last_offset < following.base_offset, (producer_id, state.batches)
