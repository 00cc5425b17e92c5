"""Producer states against a model that remembers everything ever written, and knows only the rule's words."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.log.producers import TRY_AGAIN, Duplicate, ProducerStates
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import SEQUENCE_MAX, BatchHeader

EXPIRATION_MS = 1000
EXAMPLES = int(os.environ.get("PENSTOCK_EXAMPLES", "200"))


class ProducersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.states = ProducerStates(EXPIRATION_MS)
        self.states.log_was_empty = True
        self.wall_ms = 1_000_000
        self.end = 0
        # By producer id: (header, offset) of all batches since it became known, and when it last wrote.
        self.written: dict[int, list[tuple[BatchHeader, int]]] = {}
        self.last_ms: dict[int, int] = {}
        self.first_sequence = {0: 0, 1: 0, 2: SEQUENCE_MAX - 3}
        # How many of its batches a producer's state may still know.
        self.remembered: dict[int, int] = {}
        # The highest epoch of each, which nothing may forget.
        self.epochs: dict[int, int] = {}

    @rule(
        producer_id=st.integers(0, 2),
        epoch_ahead=st.sampled_from([0, 0, 0, 0, 1, -1]),
        sequence_ahead=st.sampled_from([0, 0, 0, 1, -1, -3]),
        from_zero=st.booleans(),
        count=st.integers(1, 4),
    )
    def send(
        self, producer_id: int, epoch_ahead: int, sequence_ahead: int, from_zero: bool, count: int
    ) -> None:
        epoch = max(0, self.epochs.get(producer_id, 0) + epoch_ahead)
        expected = self._next_sequence(producer_id)
        sequence = 0 if from_zero and epoch_ahead else (expected + sequence_ahead) & SEQUENCE_MAX
        self._send(producer_id, epoch, sequence, count)

    @rule(producer_id=st.integers(0, 2), back=st.integers(1, 7))
    def send_again(self, producer_id: int, back: int) -> None:
        history = self._history(producer_id)
        if len(history) >= back:
            header = history[-back][0]
            self._send(producer_id, header.producer_epoch, header.base_sequence, header.count)

    @rule(ms=st.sampled_from([1, 400, EXPIRATION_MS + 1]))
    def wait(self, ms: int) -> None:
        self.wall_ms += ms

    @rule()
    def sweep(self) -> None:
        self.states.expire(self.wall_ms)

    @rule()
    def restart_from_a_snapshot(self) -> None:
        self.states.expire(self.wall_ms)
        snapshot = self.states.encode()
        self.states = ProducerStates(EXPIRATION_MS)
        self.states.log_was_empty = self.end == 0
        self.states.load(snapshot, self.wall_ms)
        for producer_id in self.written:
            if self._history(producer_id):
                # It begins to be forgotten from here: the clock may be wrong at a start.
                self.last_ms[producer_id] = self.wall_ms

    @rule()
    def restart_and_remember(self) -> None:
        self.restart_from_a_snapshot()
        everything = sorted(
            (item for history in self.written.values() for item in history), key=lambda i: i[1]
        )
        self.states.remember(header._replace(base_offset=offset) for header, offset in everything)

    @invariant()
    def holds(self) -> None:
        self.states.check_invariants(self.end)

    def _send(self, producer_id: int, epoch: int, sequence: int, count: int) -> None:
        header = BatchHeader(0, 100, 0, 2, 0, 0, count - 1, 0, 0, producer_id, epoch, sequence, count)
        verdict = self.states.check(header, self.wall_ms)
        expected = self._expected(header)
        if isinstance(expected, Duplicate):
            assert isinstance(verdict, Duplicate)
            assert verdict.base_offset == expected.base_offset
        else:
            assert verdict is expected, (verdict, expected)
        if verdict is None:
            self.states.update(header, self.end, self.wall_ms)
            self.states.log_was_empty = False
            history = self._history(producer_id)
            if history and history[-1][0].producer_epoch != epoch:
                history.clear()
                self.remembered[producer_id] = 0
            history.append((header, self.end))
            self.written[producer_id] = history
            self.epochs[producer_id] = epoch
            self.last_ms[producer_id] = self.wall_ms
            self.remembered[producer_id] = min(5, self.remembered.get(producer_id, 0) + 1)
            self.end += count

    def _expected(self, header: BatchHeader) -> Duplicate | ErrorCode | None:
        history = self._history(header.producer_id)
        if header.producer_epoch < self.epochs.get(header.producer_id, 0):
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if not history:
            overtook = self.end == 0 and header.base_sequence != 0
            return TRY_AGAIN if overtook else None
        if header.producer_epoch > history[-1][0].producer_epoch:
            return None if header.base_sequence == 0 else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        if header.base_sequence == self._next_sequence(header.producer_id):
            return None
        for written, offset in history[-self.remembered[header.producer_id] :]:
            if (written.base_sequence, written.count) == (header.base_sequence, header.count):
                return Duplicate(offset, 0)
        return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def _history(self, producer_id: int) -> list[tuple[BatchHeader, int]]:
        if self.wall_ms - self.last_ms.get(producer_id, 0) > EXPIRATION_MS:
            self.written[producer_id] = []
            self.remembered.pop(producer_id, None)
        return self.written.get(producer_id, [])

    def _next_sequence(self, producer_id: int) -> int:
        history = self._history(producer_id)
        if not history:
            return self.first_sequence[producer_id]
        header = history[-1][0]
        return (header.base_sequence + header.count) & SEQUENCE_MAX


TestProducers = ProducersMachine.TestCase
TestProducers.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)
