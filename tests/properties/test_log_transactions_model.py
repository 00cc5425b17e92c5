"""Transactions in a log against a list of batches, from which everything is computed anew for each question.

Whatever is done to the log (rolls, truncation, deletion, replication, restarts, lost snapshots and indexes), the
last stable offset and the aborted transactions are those of the list. Only of transactions that began before the
first segment may the log know less, once it had to rebuild its state from what is left.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.protocol.records import Marker, decode_header, encode_batch, encode_marker, patch
from tests.log.making import flush
from tests.support_files import FakeFiles, fake_environment

DIRECTORY = "/data/topic-0"
PRODUCERS = st.integers(0, 3)
EXAMPLES = int(os.environ.get("PENSTOCK_EXAMPLES", "100"))


class ModelBatch(NamedTuple):
    base_offset: int
    next_offset: int
    producer_id: int
    # None: data. Only data of transactions has a producer here.
    is_commit: bool | None


class ModelTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    marker_offset: int | None
    is_commit: bool | None


class TransactionsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.files = FakeFiles()
        self.files.make_directory("/data")
        self.environment = fake_environment(self.files)
        self.batches: list[ModelBatch] = []
        self.start = 0
        self.end = 0
        # The log has rebuilt its state from the batches at this offset and after it.
        self.known_from = 0
        self.leader_epoch = 0
        self.epochs = dict.fromkeys(range(4), 0)
        self.sequences = dict.fromkeys(range(4), 0)
        self.durable = 0

    @initialize(
        segment_bytes=st.sampled_from([200, 500, 2000, 1 << 20]), index_bytes=st.sampled_from([80, 10_000])
    )
    def open_first(self, segment_bytes: int, index_bytes: int) -> None:
        self.config = LogConfig(
            segment_bytes=segment_bytes, segment_index_bytes=index_bytes, index_interval_bytes=100
        )
        self.log = Log.open(self.environment, DIRECTORY, self.config, clean=True)

    # Writing

    @rule(producer_id=PRODUCERS, count=st.integers(1, 3), follows=st.booleans())
    def write(self, producer_id: int, count: int, follows: bool) -> None:
        batch = encode_batch(
            [(self.files.clock.wall, b"k", b"v", ())] * count,
            producer_id=producer_id,
            producer_epoch=self.epochs[producer_id],
            base_sequence=self.sequences[producer_id],
            transactional=True,
        )
        self.sequences[producer_id] += count
        self._append(batch, ModelBatch(self.end, self.end + count, producer_id, None), follows)

    @rule(count=st.integers(1, 3), follows=st.booleans())
    def write_without_a_transaction(self, count: int, follows: bool) -> None:
        batch = encode_batch([(self.files.clock.wall, b"k", b"v", ())] * count)
        self._append(batch, ModelBatch(self.end, self.end + count, -1, None), follows)

    @rule(producer_id=PRODUCERS, is_commit=st.booleans(), bumps=st.booleans(), follows=st.booleans())
    def end_transaction(self, producer_id: int, is_commit: bool, bumps: bool, follows: bool) -> None:
        if bumps:
            self.epochs[producer_id] += 1
            self.sequences[producer_id] = 0
        assert not self.log.producers.check_marker(producer_id, self.epochs[producer_id], self.leader_epoch)
        marker = Marker(is_commit, self.leader_epoch)
        batch = encode_marker(marker, producer_id, self.epochs[producer_id], self.files.clock.wall)
        self._append(batch, ModelBatch(self.end, self.end + 1, producer_id, is_commit), follows)

    @rule(seed=st.integers(0, 2**32), count=st.integers(5, 30))
    def write_many(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        for _ in range(count):
            producer_id, follows = chance.randrange(4), chance.random() < 0.5
            if chance.random() < 0.3:
                self.end_transaction(producer_id, chance.random() < 0.3, chance.random() < 0.3, follows)
            else:
                self.write(producer_id, chance.randint(1, 3), follows)

    # Shortening

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        offset = self.start + round((self.end - self.start) * share)
        self.log.truncate_to(offset)
        self.batches = [batch for batch in self.batches if batch.next_offset <= offset]
        self.end = (
            max((batch.next_offset for batch in self.batches), default=0) if offset < self.end else self.end
        )
        assert self.log.log_end_offset == self.end
        self.start = min(self.start, self.end)
        self._rebuilt()
        # Otherwise a power failure may undo it.
        flush(self.log)
        self.durable = self.end
        self.leader_epoch += 1
        for producer_id in self.epochs:
            self.epochs[producer_id] += 1
            self.sequences[producer_id] = 0

    @rule(share=st.floats(0, 1))
    def delete(self, share: float) -> None:
        offset = self.start + round((self.end - self.start) * share)
        self.log.delete_before(offset, frees_last=True)
        self.start = offset

    # Restarts

    @rule()
    def close(self) -> None:
        self.log.close()
        self._reopen(clean=True)

    @rule()
    def kill(self) -> None:
        self._reopen(clean=False)

    @rule(suffix=st.sampled_from([".snapshot", "index"]))
    def lose_files(self, suffix: str) -> None:
        """All snapshots, or all indexes."""
        self.log.close()
        for name in self.files.list(DIRECTORY):
            if name.endswith(suffix):
                self.files.remove(f"{DIRECTORY}/{name}")
        self._reopen(clean=True)

    @rule(seed=st.integers(0, 2**32))
    def damage_an_index(self, seed: int) -> None:
        self.log.close()
        chance = random.Random(seed)
        found = [name for name in self.files.list(DIRECTORY) if name.endswith(".txnindex")]
        if found:
            path = f"{DIRECTORY}/{chance.choice(found)}"
            data = self.files.read(path)
            cut = chance.choice([1, 33, 35, len(data)])
            self.files.replace(
                path, data[:-cut] + bytes(chance.choice([0, cut])) if cut % 34 else bytes(len(data))
            )
        self._reopen(clean=True)

    @rule(seed=st.integers(0, 2**32), flushes=st.booleans())
    def lose_power(self, seed: int, flushes: bool) -> None:
        if flushes:
            flush(self.log)
            self.durable = self.end
        self.files.crash(random.Random(seed))
        self.files.make_directory("/data")
        self._reopen(clean=False)
        assert self.durable <= self.log.log_end_offset <= self.end
        self.end = self.log.log_end_offset
        self.batches = [batch for batch in self.batches if batch.next_offset <= self.end]
        self.leader_epoch += 1
        for producer_id in self.epochs:
            self.epochs[producer_id] += 1
            self.sequences[producer_id] = 0

    # What must hold

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "log"):
            self.log.check()
            assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)

    @rule(share=st.floats(0, 1))
    def ask_for_the_last_stable_offset(self, share: float) -> None:
        high_watermark = self.start + round((self.end - self.start) * share)
        unstable = [
            transaction.first_offset
            for transaction in self._transactions()
            if transaction.marker_offset is None or transaction.marker_offset >= high_watermark
        ]
        # To answer for a lower high watermark than before, the batches are read again.
        items = self.log._segments.items
        known_from = max(self.known_from, items[0].base_offset if items else 0)
        certain = [offset for offset in unstable if offset >= known_from]
        least = max(self.start, min([high_watermark, *unstable]))
        most = max(self.start, min([high_watermark, *certain]))
        found = self.log.last_stable_offset(high_watermark)
        assert least <= found <= most, (least, found, most)

    @rule()
    def ask_at_the_end(self) -> None:
        self.ask_for_the_last_stable_offset(1.0)

    @rule(share=st.floats(0, 1), count=st.integers(0, 30))
    def ask_for_aborted_transactions(self, share: float, count: int) -> None:
        offset = self.start + round((self.end - self.start) * share)
        # As a reader does: complete below the last stable offset.
        end_offset = min(offset + count, self.log.last_stable_offset(self.end))
        expected = [
            (transaction.first_offset, transaction.producer_id, transaction.marker_offset)
            for transaction in self._transactions()
            if transaction.is_commit is False
            and transaction.marker_offset is not None
            and transaction.marker_offset >= offset
            and transaction.first_offset < end_offset
        ]
        found = self.log.aborted_transactions(offset, end_offset)
        assert [entry.first_offset for entry in found] == sorted(entry.first_offset for entry in found)
        # Of a transaction that began before the known offsets, the log may know a later beginning, or nothing.
        old = {begun.marker_offset for begun in self._transactions() if begun.first_offset < self.known_from}
        got = [(entry.first_offset, entry.producer_id, entry.last_offset) for entry in found]
        assert [entry for entry in got if entry[2] not in old] == sorted(
            entry for entry in expected if entry[2] not in old
        )

    # Private

    def _transactions(self) -> list[ModelTransaction]:
        found: list[ModelTransaction] = []
        first: dict[int, int] = {}
        for batch in self.batches:
            if batch.producer_id < 0:
                continue
            if batch.is_commit is None:
                first.setdefault(batch.producer_id, batch.base_offset)
            elif batch.producer_id in first:
                begun = first.pop(batch.producer_id)
                found.append(ModelTransaction(batch.producer_id, begun, batch.base_offset, batch.is_commit))
        found += [ModelTransaction(producer_id, begun, None, None) for producer_id, begun in first.items()]
        return found

    def _append(self, batch: bytearray, model: ModelBatch, follows: bool) -> None:
        self.files.clock.advance(10)
        if follows:
            patch(batch, 0, self.end, self.leader_epoch)
            self.log.append_replicated(batch)
        else:
            self.log.append(batch, decode_header(batch), self.leader_epoch)
        self.batches.append(model)
        self.end = model.next_offset

    def _rebuilt(self) -> None:
        items = self.log._segments.items
        self.known_from = max(self.known_from, items[0].base_offset if items else self.start)

    def _reopen(self, *, clean: bool) -> None:
        self.log = Log.open(
            self.environment,
            DIRECTORY,
            self.config,
            clean=clean,
            recovery_point=self.durable,
            log_start_offset=self.start,
        )
        if clean:
            self.durable = self.end
        self._rebuilt()


TestTransactions = TransactionsMachine.TestCase
TestTransactions.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, report_multiple_bugs=False
)
