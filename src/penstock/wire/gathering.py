"""Records of many callers, gathered into batches, without a socket or a clock.

Each partition has piles of records, of which the last is still growing. A pile becomes a batch when the producer
could send it at once, so while requests are in flight the piles grow, and under load batches are large without any
waiting. With a linger a pile also waits that long for company. Encoding happens once, for a whole pile.

A caller's records of one call and partition are a part of a pile, or of several. Its ``Sink`` hears of each part:
the offset of the part's first record, or the failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from penstock.model import TopicPartition
from penstock.protocol.compression import Codec
from penstock.protocol.records import RecordFields
from penstock.wire.core import Core
from penstock.wire.errors import ProduceFailed, WireError
from penstock.wire.producing import Producing
from penstock.wire.record_batches import encode_rows
from penstock.wire.sequences import Batch

# About what a record and its lengths take besides key, value and headers.
ROW_BYTES = 24

_FIELDS = frozenset((bytes, type(None)))

# Called with the number of the first record of the call's, how many records this is about, and the offset of the
# first (-1: stored, but the broker does not say where) or why they failed.
Sink: TypeAlias = Callable[[int, int, int, ProduceFailed | None], None]


class _Part(NamedTuple):
    sink: Sink
    # The number of the part's first record among those of its call.
    number: int
    rows: int


class _Pile:
    __slots__ = ("begun_ms", "bytes", "parts", "rows")

    def __init__(self, begun_ms: int) -> None:
        self.begun_ms = begun_ms
        self.rows: list[RecordFields] = []
        self.bytes = 0
        self.parts: list[_Part] = []


class Gathering:
    """A ``Participant`` of the core, which acts before its producer does."""

    def __init__(
        self, core: Core, producing: Producing, *, codec: Codec, batch_bytes: int, linger_ms: int
    ) -> None:
        self._core = core
        self._producing = producing
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._linger_ms = linger_ms
        self._piles: dict[TopicPartition, deque[_Pile]] = {}
        core.participants.insert(core.participants.index(producing), self)

    def has_pile(self, at: TopicPartition) -> bool:
        return at in self._piles

    def add(
        self, at: TopicPartition, rows: Sequence[RecordFields], sizes: Sequence[int], sink: Sink, now_ms: int
    ) -> None:
        """``sizes`` are those of ``sizes_of``."""
        piles = self._piles.get(at)
        if piles is None:
            piles = self._piles[at] = deque([_Pile(now_ms)])
        pile = piles[-1]
        first = 0
        for number, size in enumerate(sizes):
            if pile.rows and pile.bytes + size > self._batch_bytes:
                if number > first:
                    pile.parts.append(_Part(sink, first, number - first))
                pile = _Pile(now_ms)
                piles.append(pile)
                first = number
            pile.rows.append(rows[number])
            pile.bytes += size
        pile.parts.append(_Part(sink, first, len(rows) - first))

    def close(self) -> None:
        """Fail what was not given to the producer."""
        error = ProduceFailed(WireError("this producer is closed"), may_be_stored=False)
        for piles in self._piles.values():
            for pile in piles:
                _fail(pile.parts, error)
        self._piles.clear()
        if self in self._core.participants:
            self._core.participants.remove(self)

    # Participant

    def step(self) -> None:
        now_ms = self._core.now_ms
        for at, piles in list(self._piles.items()):
            is_ripe = len(piles) > 1 or now_ms >= piles[0].begun_ms + self._linger_ms
            if is_ripe and self._producing.could_send(at):
                pile = piles.popleft()
                if not piles:
                    del self._piles[at]
                due_ms = pile.begun_ms + self._producing.deadline_ms
                try:
                    batch = self._batch(at, pile.rows, pile.parts, due_ms)
                except ValueError as error:
                    cause = WireError(f"cannot write the records for {at}: {error}")
                    _fail(pile.parts, ProduceFailed(cause, may_be_stored=False))
                else:
                    self._producing.add_batch(batch)

    def due_ms(self) -> int | None:
        """When the next pile is ripe. One that waits for the producer needs no timer until that has room."""
        now_ms = self._core.now_ms
        times = []
        for at, piles in self._piles.items():
            ripe_ms = piles[0].begun_ms + self._linger_ms
            if ripe_ms > now_ms or self._producing.could_send(at):
                times.append(ripe_ms)
        return min(times, default=None)

    def slept(self, ms: int) -> None:
        for piles in self._piles.values():
            for pile in piles:
                pile.begun_ms += ms

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        for piles in self._piles.values():
            assert piles, "no pile, no entry"
            for pile in piles:
                assert pile.rows and sum(part.rows for part in pile.parts) == len(pile.rows)

    # Private

    def _batch(self, at: TopicPartition, rows: list[RecordFields], parts: list[_Part], due_ms: int) -> Batch:
        return Batch(
            at,
            encode_rows(rows, self._codec),
            len(rows),
            due_ms,
            partial(_acknowledge, parts),
            lambda error, may_be_stored: _fail(parts, ProduceFailed(error, may_be_stored)),
            partial(self._halves, at, rows, parts, due_ms) if len(rows) > 1 else None,
        )

    def _halves(
        self, at: TopicPartition, rows: list[RecordFields], parts: list[_Part], due_ms: int
    ) -> list[Batch]:
        middle = len(rows) // 2
        before: list[_Part] = []
        behind: list[_Part] = []
        begin = 0
        for sink, number, count in parts:
            here = min(count, max(0, middle - begin))
            if here:
                before.append(_Part(sink, number, here))
            if here < count:
                behind.append(_Part(sink, number + here, count - here))
            begin += count
        return [
            self._batch(at, rows[:middle], before, due_ms),
            self._batch(at, rows[middle:], behind, due_ms),
        ]


def sizes_of(rows: Sequence[RecordFields]) -> list[int]:
    """About the bytes that each row takes in a batch. Raises TypeError or ValueError if one is no record."""
    timestamps, keys, values, headers = zip(*rows)
    for field in (*keys, *values) if not _FIELDS.issuperset(map(type, keys + values)) else ():
        if type(field) not in _FIELDS:
            raise TypeError(f"a key or value is bytes or None, not {type(field).__name__}")
    if min(timestamps) < -1 or max(timestamps) >= 2**62:
        raise ValueError("a timestamp is milliseconds since 1970, or -1")
    sizes = [ROW_BYTES + len(key or b"") + len(value or b"") for key, value in zip(keys, values)]
    if any(headers):
        for number, each in enumerate(headers):
            for name, content in each:
                if type(content) not in _FIELDS:
                    raise TypeError(f"the value of a header is bytes or None, not {type(content).__name__}")
                sizes[number] += len(name.encode()) + len(content or b"") + 4
    return sizes


def _acknowledge(parts: list[_Part], base_offset: int) -> None:
    for sink, number, count in parts:
        sink(number, count, base_offset, None)
        if base_offset >= 0:
            base_offset += count


def _fail(parts: list[_Part], error: ProduceFailed) -> None:
    for sink, number, count in parts:
        sink(number, count, -1, error)
