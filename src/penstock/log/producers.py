"""What each idempotent producer last wrote to this partition: so that a retried batch is stored once.

A client numbers the records it sends to a partition. The last five batches of each producer id are
remembered, as many as a client may have in flight. A batch is then

    the next one                  sequence = last + 1 (0 after 2^31 - 1)   append
    one of the last five again    same epoch, same first and last          answer as the first time
    of an older epoch             its producer was replaced                INVALID_PRODUCER_EPOCH
    the first of a newer epoch    sequence 0                               append
    of an unknown producer        see ``check``                            append, perhaps the second time
    anything else                 something before it is missing           OUT_OF_ORDER_SEQUENCE_NUMBER

The state is written next to the segments when a segment is rolled and when the log is closed, in Kafka's own
format, and is made again from the batches behind the last such snapshot. In that format an entry is one batch.
A producer has as many entries as batches, the last one last, which is the one that Kafka takes. (We wrote only
that one once; so the log shows a loaded state its last stretch of batches once more: ``remember``.)

A producer that has been silent for long is forgotten, but not its epoch, if it is above 0: what was sent in an
epoch before must not be stored however late it arrives. In a snapshot that is an entry without a batch.

What a newcomer gets wrong: ``wall_ms`` here is ``Log.steady_ms``, which no step of the clock moves. A producer
that is forgotten because the clock was set has its next retry stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from penstock.log.refused_batches import NONE_REFUSED, RefusedBatches
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import SEQUENCE_MAX, BatchHeader

BATCHES_REMEMBERED = 5

_SNAPSHOT_VERSION = 1
_SNAPSHOT_HEADER = Struct(">hIi")  # version, crc of what follows it, count
_SNAPSHOT_CRC_START = 6
# producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch, first offset of
# the open transaction
_SNAPSHOT_ENTRY = Struct(">qhiqiqiq")


# What every client answers with the same batch in its turn, having asked who leads.
TRY_AGAIN = ErrorCode.NOT_LEADER_OR_FOLLOWER

# Of one partition. Clients make producer ids up as they like, and each is remembered for a day.
PRODUCERS_MAX = 50_000
# Of one partition. Only a producer that had to begin another epoch takes one.
FENCES_MAX = 100_000
# How long a producer is remembered after a start, whatever the clock says then: as long as its client may retry.
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


class ProducerState:
    __slots__ = ("batches", "epoch", "last_seen_ms")

    def __init__(self, epoch: int, last_seen_ms: int, batches: list[WrittenBatch]) -> None:
        self.epoch = epoch
        # When it last appended. (Kafka goes by the records' timestamps, which a client chooses.)
        self.last_seen_ms = last_seen_ms
        # All of ``epoch``, oldest first, never empty, at most BATCHES_REMEMBERED.
        self.batches = batches


class CorruptSnapshot(Exception):
    pass


class ProducerStates:
    __slots__ = ("_expiration_ms", "_fences", "_states", "log_was_empty")

    def __init__(self, expiration_ms: int) -> None:
        self._expiration_ms = expiration_ms
        self._states: dict[int, ProducerState] = {}
        # The epochs of producers that were forgotten, above 0, the longest forgotten first. None of ``_states``.
        self._fences: dict[int, int] = {}
        # The log has never held a record.
        self.log_was_empty = False

    def __len__(self) -> int:
        return len(self._states)

    def get(self, producer_id: int) -> ProducerState | None:
        return self._states.get(producer_id)

    def check(
        self, header: BatchHeader, wall_ms: int, refused_batches: RefusedBatches = NONE_REFUSED
    ) -> Duplicate | ErrorCode | None:
        """Judge a batch a client sent: None when it is to be appended.

        A producer that is not known may go on at any sequence (KIP-360): its state may have expired. In a log
        that never held a record such a batch may have overtaken the first one, which would then be lost
        silently (KAFKA-15591); or its producer has written for long, and the topic was made again. A client
        that is told to try again does so in order. So the batch is refused (``TRY_AGAIN``, for the caller to
        remember), and taken when it comes again and nothing before it has. (Kafka 4.3 takes it at once, and may
        lose the first. Kafka 4.5 calls it out of order, which ends a producer of librdkafka.)
        """
        state = self._states.get(header.producer_id)
        base_sequence = header.base_sequence
        epoch = self._fences.get(header.producer_id, 0) if state is None else state.epoch
        if header.producer_epoch < epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if state is None or wall_ms - state.last_seen_ms > self._expiration_ms:
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
            if base_sequence == 0:
                return None
            return refused_batches.overtaken(header, -1, wall_ms) or ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        batches = state.batches
        last = batches[-1].last_sequence
        if base_sequence == (last + 1) & SEQUENCE_MAX:
            return None
        last_sequence = header.last_sequence
        for batch in batches:
            if batch.base_sequence == base_sequence and batch.last_sequence == last_sequence:
                return Duplicate(batch.base_offset, batch.timestamp)
        return refused_batches.overtaken(header, last, wall_ms) or ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def update(self, header: BatchHeader, base_offset: int, wall_ms: int) -> None:
        """A batch with a producer id was appended at ``base_offset``."""
        if header.base_sequence < 0:
            return  # a transaction marker: it has no sequence
        batch = WrittenBatch(
            header.base_sequence,
            header.last_sequence,
            base_offset,
            base_offset + header.last_offset_delta,
            header.max_timestamp,
        )
        state = self._states.get(header.producer_id)
        if state is None or wall_ms - state.last_seen_ms > self._expiration_ms:
            if len(self._states) >= PRODUCERS_MAX:
                self._make_room()
            self._fences.pop(header.producer_id, None)
            self._states[header.producer_id] = ProducerState(header.producer_epoch, wall_ms, [batch])
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

    def remember(self, headers: Iterable[BatchHeader]) -> None:
        """Fill up what a snapshot had no room for, from the batches (in order) below it."""
        older: dict[int, list[WrittenBatch]] = {}
        for header in headers:
            state = self._states.get(header.producer_id)
            if state is None or header.producer_epoch != state.epoch or header.base_sequence < 0:
                continue
            if header.last_offset < state.batches[0].base_offset:
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
        """Forget the tenth that has been silent the longest."""
        by_silence = sorted(self._states, key=lambda producer_id: self._states[producer_id].last_seen_ms)
        for producer_id in by_silence[: len(by_silence) // 10 + 1]:
            self._forget(producer_id)

    def expire(self, wall_ms: int) -> int:
        """Forget producers that have not written for long; how many."""
        expired = [
            producer_id
            for producer_id, state in self._states.items()
            if wall_ms - state.last_seen_ms > self._expiration_ms
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
        """A snapshot. The timestamp in it is when we last saw the producer, which is what it is used for."""
        body = bytearray()
        pack = _SNAPSHOT_ENTRY.pack
        for producer_id, epoch in self._fences.items():
            body += pack(producer_id, epoch, -1, -1, 0, -1, -1, -1)
        for producer_id, state in self._states.items():
            for batch in state.batches:
                delta = batch.last_offset - batch.base_offset
                body += pack(
                    producer_id,
                    state.epoch,
                    batch.last_sequence,
                    batch.last_offset,
                    delta,
                    state.last_seen_ms,
                    -1,
                    -1,
                )
        count = len(body) // _SNAPSHOT_ENTRY.size
        crc = crc32c(count.to_bytes(4, "big") + body)
        return _SNAPSHOT_HEADER.pack(_SNAPSHOT_VERSION, crc, count) + body

    def load(self, snapshot: bytes, wall_ms: int) -> None:
        """Begin from a snapshot. Nobody is forgotten here: by a clock that is wrong now, a retry would be new.

        Those that seem to have expired are remembered for LOADED_MS_MIN, in which the clock is not asked.

        Raises:
            CorruptSnapshot: it is damaged, or of a version we do not know. Nothing was loaded.
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
        earliest_ms = wall_ms - max(0, self._expiration_ms - LOADED_MS_MIN)
        for (
            producer_id,
            epoch,
            last_sequence,
            last_offset,
            delta,
            timestamp,
            _,
            _,
        ) in _SNAPSHOT_ENTRY.iter_unpack(snapshot[_SNAPSHOT_HEADER.size :]):
            if last_sequence < 0:
                if epoch > 0:
                    fences[producer_id] = epoch
                continue
            base_sequence = (last_sequence - delta) & SEQUENCE_MAX
            batch = WrittenBatch(base_sequence, last_sequence, last_offset - delta, last_offset, timestamp)
            known = states.get(producer_id)
            if known is not None and known.epoch == epoch:
                known.batches.append(batch)
            else:
                last_seen_ms = max(earliest_ms, min(timestamp, wall_ms))
                states[producer_id] = ProducerState(epoch, last_seen_ms, [batch])
        self._states = states
        self._fences = fences

    def check_invariants(self, log_end_offset: int) -> None:
        assert not self._states.keys() & self._fences.keys()
        assert all(epoch > 0 for epoch in self._fences.values())
        for producer_id, state in self._states.items():
            assert 0 < len(state.batches) <= BATCHES_REMEMBERED, producer_id
            assert state.batches[-1].last_offset < log_end_offset, (
                producer_id,
                state.batches,
                log_end_offset,
            )
            for batch, following in pairwise(state.batches):
                assert batch.last_offset < following.base_offset, (producer_id, state.batches)
