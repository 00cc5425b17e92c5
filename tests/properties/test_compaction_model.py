"""Compaction of a log against a dict: whatever is cleaned, whenever it is interrupted, each key has its last value.

The model keeps every record that was ever appended. What a log may show is: its records are some of these, each at
its offset and unchanged; for every key the last record that is not of an aborted transaction is there, unless it is
a tombstone whose time was over; nothing that no cleaning has reached is missing. The cleaner is stopped
after any of its steps, by a power failure, by the end of the process, or by a full disk.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.log.cleaner_job import CleaningJob, CleaningResult, clean
from penstock.log.cleaning_state import CleaningState
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.protocol.compression import Codec
from penstock.protocol.records import (
    Marker,
    Record,
    batches,
    decode_header,
    decode_records,
    encode_batch,
    encode_marker,
)
from tests.log.making import flush
from tests.support_files import FakeFiles, fake_environment

DIRECTORY = "/data/topic-0"
EXAMPLES = int(os.environ.get("PENSTOCK_EXAMPLES", "100"))
KEYS = [b"a", b"b", b"c", b"d", b"e", b""]
RETENTION_MS = 1_000


class ModelBatch(NamedTuple):
    base_offset: int
    end_offset: int
    epoch: int
    producer_id: int
    # Empty: a marker.
    records: tuple[Record, ...]
    is_commit: bool = False
    is_transactional: bool = False


class Interrupted(Exception):
    pass


class CompactionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.files = FakeFiles()
        self.files.make_directory("/data")
        self.environment = fake_environment(self.files)
        self.batches: list[ModelBatch] = []
        self.end = 0
        self.leader_epoch = 0
        self.sequences: dict[int, int] = {}
        self.writes = 0
        self.high_watermark = 0
        # The highest of all cleanings: where tombstones may be missing, and where anything may.
        self.drop_below = 0
        self.cleaned_before = 0

    @initialize(
        segment_bytes=st.sampled_from([150, 400, 3000]),
        table_keys=st.sampled_from([4, 100]),
        interval=st.sampled_from([0, 100, 4096]),
    )
    def open_first(self, segment_bytes: int, table_keys: int, interval: int) -> None:
        self.table_bytes = table_keys * 24 + 48
        self.config = LogConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=interval,
            is_compacted=True,
            min_cleanable_dirty_ratio=0.0,
            delete_retention_ms=RETENTION_MS,
        )
        self.log = Log.open(self.environment, DIRECTORY, self.config, clean=True)
        self.write_many(table_keys + interval, 25)

    # Writing

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
        deletes=st.booleans(),
        codec=st.sampled_from(list(Codec)),
        producer_id=st.integers(-1, 2),
        transactional=st.booleans(),
    )
    def write(
        self, keys: list[bytes], deletes: bool, codec: Codec, producer_id: int, transactional: bool
    ) -> None:
        is_transactional = transactional and producer_id >= 0
        if producer_id in self.log.producers.open_transactions():
            is_transactional = True
        records = []
        for delta, key in enumerate(keys):
            self.writes += 1
            value = None if deletes and delta == 0 else b"%d" % self.writes
            records.append(
                Record(self.end + delta, self.files.clock.wall + self.writes % 3, key, value, (("h", key),))
            )
        sequence = self.sequences.get(producer_id, 0)
        batch = encode_batch(
            records,
            codec=codec,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence if producer_id >= 0 else -1,
            transactional=is_transactional,
        )
        self.sequences[producer_id] = sequence + len(records)
        self.log.append(batch, decode_header(batch), self.leader_epoch)
        self.batches.append(
            ModelBatch(
                self.end,
                self.end + len(records),
                self.leader_epoch,
                producer_id,
                tuple(records),
                is_transactional=is_transactional,
            )
        )
        self.end += len(records)
        self._advance()

    @rule(seed=st.integers(0, 2**32), count=st.integers(3, 25))
    def write_many(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        if chance.random() < 0.3:
            self.leader_epoch += 1
            self.log.begin_epoch(self.leader_epoch)
        self.files.clock.advance(chance.choice([1, 400, 5_000]))
        for _ in range(count):
            if chance.random() < 0.3:
                self.end_transaction(chance.randrange(3), chance.random() < 0.5)
            else:
                keys = [chance.choice(KEYS) for _ in range(chance.randint(1, 3))]
                codec = chance.choice(list(Codec))
                self.write(keys, chance.random() < 0.3, codec, chance.randint(-1, 2), chance.random() < 0.5)

    @rule(producer_id=st.integers(0, 2), is_commit=st.booleans())
    def end_transaction(self, producer_id: int, is_commit: bool) -> None:
        batch = encode_marker(Marker(is_commit, 0), producer_id, 0, self.files.clock.wall)
        self.log.append(batch, decode_header(batch), self.leader_epoch)
        self.batches.append(
            ModelBatch(self.end, self.end + 1, self.leader_epoch, producer_id, (), is_commit, True)
        )
        self.end += 1
        self._advance()

    def _advance(self) -> None:
        self.high_watermark = self.end

    # Cleaning

    @rule(
        stop=st.one_of(st.none(), st.integers(0, 12)),
        how=st.sampled_from(["power", "kill", "full"]),
        seed=st.integers(0, 2**32),
        share=st.floats(0, 1),
    )
    def compact(self, stop: int | None, how: str, seed: int, share: float) -> None:
        """Clean, and stop after some step."""
        for producer_id in range(seed % 4):
            self.end_transaction(producer_id, seed % 8 < 4)
        drop_below = round(self.end * share)
        flush(self.log)
        job = self.log.prepare_cleaning(
            self.high_watermark,
            self.files.clock.wall,
            drop_below=drop_below,
            table_bytes=self.table_bytes,
            load_factor=0.9,
        )
        if job is None:
            return
        self.drop_below = max(self.drop_below, drop_below)
        steps = 0

        def step() -> None:
            nonlocal steps
            if steps == stop:
                raise Interrupted
            steps += 1

        if stop is not None and how == "full":
            self.files.fail_after(stop * 40)
        try:
            self._clean(job, step if how != "full" else lambda: None)
        except Interrupted:
            if how == "power":
                self.files.crash(random.Random(seed))
            self._reopen(clean=False)
        except OSError:
            assert how == "full"
            self.files.fail_after(None)
            if seed % 2:
                self._reopen(clean=False)
            else:
                self.log.swapping.cut()
                self.log.swapping.state.swap = None
        self.files.fail_after(None)

    def _clean(self, job: CleaningJob, step: object) -> None:
        assert callable(step)
        result: CleaningResult = clean(self.files, job)
        self.cleaned_before = max(self.cleaned_before, result.clean_before)
        assert result.clean_before > job.first_dirty_offset, "a pass makes progress"
        assert result.records_after <= result.records_before
        swapping = self.log.swapping
        step()
        for group in result.groups:
            swapping.prepare_check(group)()
            step()
            swapping.prepare_intent(group)()
            step()
            assert self.log.swap(group)
            self.log.check()
            step()
            swapping.prepare_end()()
            step()
        swapping.prepare_end(CleaningState(result.clean_before))()

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
        self.log.close()
        for name in self.files.list(DIRECTORY):
            if name.endswith(suffix):
                self.files.remove(f"{DIRECTORY}/{name}")
        self._reopen(clean=True)

    @rule(share=st.floats(0, 1))
    def copy(self, share: float) -> None:
        """A follower that has a part of the log, from before it was compacted, copies the rest."""
        directory = "/data/copy-0"
        self.files.remove(directory)
        follower = Log.open(self.environment, directory, self.config, clean=True)
        offset = round(self.end * share)
        for batch in self.batches:
            if batch.end_offset > offset:
                break
            follower.append_replicated(_encoded(batch))
        while follower.log_end_offset < self.end:
            found = self.log.read(follower.log_end_offset, 300, self.end, at_least_one=True)
            assert found is not None
            follower.append_replicated(found.file.read_at(found.position, found.size))
        follower.check()
        self._check_records(follower, may_lack_tombstones=True)
        follower.abandon()
        self.files.remove(directory)

    def _reopen(self, *, clean: bool) -> None:
        self.log = Log.open(self.environment, DIRECTORY, self.config, clean=clean)
        assert self.log.log_end_offset == self.end, (self.log.log_end_offset, self.end)
        assert not [name for name in self.files.list(DIRECTORY) if name.endswith(".cleaned")]

    # What must hold

    @invariant()
    def holds_what_it_must(self) -> None:
        if hasattr(self, "log"):
            self.log.check()
            self._check_records(self.log)

    def _check_records(self, log: Log, *, may_lack_tombstones: bool = False) -> None:
        found, epochs = _read(log)
        undecided: dict[int, list[ModelBatch]] = {}
        decided: list[Record] = []
        aborted: set[int] = set()
        for batch in self.batches:
            if not batch.is_transactional:
                decided += batch.records
            elif batch.records:
                undecided.setdefault(batch.producer_id, []).append(batch)
            else:
                for ended in undecided.pop(batch.producer_id, []):
                    if batch.is_commit:
                        decided += ended.records
                    else:
                        aborted.update(record.offset for record in ended.records)
        is_open = {record.offset for some in undecided.values() for one in some for record in one.records}
        written = {record.offset: record for batch in self.batches for record in batch.records}
        for offset, record in found.items():
            assert record == written[offset], "a record has changed"
        for offset in written:
            if offset >= self.cleaned_before or offset in is_open:
                assert offset in found, f"{offset} was not cleanable"
        last: dict[bytes | None, Record] = {}
        for record in sorted(decided):
            last[record.key] = record
        for key, record in last.items():
            if record.offset in found:
                continue
            assert record.value is None, f"the value of {key!r} is lost"
            assert record.offset < self.drop_below, "a replica did not have the tombstone yet"
            older = [
                other
                for other in found.values()
                if other.key == key and other.offset not in aborted | is_open
            ]
            assert may_lack_tombstones or not older, f"{key!r} was deleted and is back"
        # What a read-committed reader must not see is in the list, or gone.
        aborted_there = aborted & set(found)
        listed = log.aborted_transactions(0, self.end)
        producers = {record.offset: batch.producer_id for batch in self.batches for record in batch.records}
        for offset in aborted_there:
            assert any(
                entry.producer_id == producers[offset] and entry.first_offset <= offset < entry.last_offset
                for entry in listed
            ), f"the aborted record {offset} is visible"
        for batch in self.batches:
            for epoch, start, end in epochs:
                if start <= batch.base_offset < end:
                    assert epoch == batch.epoch, "an offset has changed its epoch"


def _encoded(batch: ModelBatch) -> bytearray:
    if not batch.records:
        data = encode_marker(Marker(batch.is_commit, 0), batch.producer_id, 0, 1_700_000_000_000)
    else:
        data = encode_batch(
            batch.records,
            base_sequence=0 if batch.producer_id >= 0 else -1,
            transactional=batch.is_transactional,
            producer_id=batch.producer_id,
            producer_epoch=0 if batch.producer_id >= 0 else -1,
        )
    data[0:8] = batch.base_offset.to_bytes(8, "big")
    data[12:16] = batch.epoch.to_bytes(4, "big")
    return data


def _read(log: Log) -> tuple[dict[int, Record], list[tuple[int, int, int]]]:
    """All records by offset, in order; and the epochs of the batches: (epoch, first offset, end offset)."""
    found: dict[int, Record] = {}
    epochs: list[tuple[int, int, int]] = []
    offset = log.log_start_offset
    while (part := log.read(offset, 500, log.log_end_offset, at_least_one=True)) is not None:
        data = part.file.read_at(part.position, part.size)
        for position, header in batches(data):
            assert header.base_offset <= offset <= header.last_offset or header.base_offset > offset
            if not header.is_control:
                for record in decode_records(data, position, bytes_max=1 << 20):
                    found[record.offset] = Record(*record[:4], tuple(record.headers))
            epochs.append((header.leader_epoch, header.base_offset, header.next_offset))
            offset = header.next_offset
    assert list(found) == sorted(found)
    return found, epochs


TestCompaction = CompactionMachine.TestCase
TestCompaction.settings = settings(max_examples=EXAMPLES // 2, stateful_step_count=20, deadline=None)
