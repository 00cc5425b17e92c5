"""The log against a list of batches: whatever is done to it, it reads back what the list says.

Crashes are of two kinds. After the end of the process alone, everything appended is still there. After a power
failure everything below the recovery point is, and of the rest a prefix; the model then shortens itself to
what the log says survived, after checking that this is a prefix indeed.
"""

from __future__ import annotations

import errno
import os
import random
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.log.config import LogConfig
from penstock.log.log import Log, OffsetOutOfRange
from penstock.log.producers import Duplicate
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import BatchHeader, CorruptBatch, Record, batches, check_produced, encode_batch
from tests.support_files import FakeFiles, fake_environment

DIRECTORY = "/data/topic-0"
PRODUCERS = 3
# Some twenty seconds. PENSTOCK_EXAMPLES asks for more: before a release, or after a change to recovery.
EXAMPLES = int(os.environ.get("PENSTOCK_EXAMPLES", "300"))


class ModelBatch(NamedTuple):
    base_offset: int
    next_offset: int
    timestamp: int
    leader_epoch: int
    data: bytes


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.files = FakeFiles()
        self.files.make_directory("/data")
        self.environment = fake_environment(self.files)
        self.batches: list[ModelBatch] = []
        self.start = 0  # the model's log start offset
        self.start_max = 0
        self.end = 0
        # Every batch that was ever appended: an unsynced truncation may be undone by a power failure.
        self.ever: set[bytes] = set()
        self.durable = 0  # everything below was flushed
        self.epoch = 0
        self.next_sequence = dict.fromkeys(range(PRODUCERS), 0)
        # The model forgets what its producers wrote when a crash or truncation made that uncertain.
        self.known = set(range(PRODUCERS))
        self.flushes: list[tuple[int, object]] = []

    @initialize(
        segment_bytes=st.sampled_from([300, 1000, 5000, 1 << 20]),
        interval=st.sampled_from([1, 100, 4096]),
        index_bytes=st.sampled_from([64, 10_000]),
    )
    def open_first(self, segment_bytes: int, interval: int, index_bytes: int) -> None:
        self.config = LogConfig(
            segment_bytes=segment_bytes,
            segment_ms=10_000,
            segment_index_bytes=index_bytes,
            index_interval_bytes=interval,
            retention_ms=60_000,
        )
        self.log = Log.open(self.environment, DIRECTORY, self.config, clean=True)

    # Writing

    @rule(
        count=st.integers(1, 5),
        size=st.integers(0, 300),
        producer=st.none() | st.integers(0, PRODUCERS - 1),
        late_ms=st.sampled_from([0, 0, 0, 500, 20_000, -1]),
    )
    def append(self, count: int, size: int, producer: int | None, late_ms: int) -> None:
        self._append(count, size, producer, late_ms)

    @rule(times=st.integers(10, 60), size=st.integers(0, 100))
    def append_many(self, times: int, size: int) -> None:
        for _ in range(times):
            self._append(1, size, None, 0)

    @rule(count=st.integers(1, 3), size=st.integers(0, 300), room=st.integers(0, 400), broken=st.booleans())
    def append_to_a_full_disk(self, count: int, size: int, room: int, broken: bool) -> None:
        self.files.fail_after(room, errno.EIO if broken else errno.ENOSPC)
        try:
            self._append(count, size, None, 0)
        except OSError:
            assert self.log.log_end_offset == self.end
        finally:
            self.files.fail_after(None)

    @rule(is_told=st.booleans())
    def elect(self, is_told: bool) -> None:
        self.epoch += 1
        if is_told:
            self.log.begin_epoch(self.epoch)
            assert self.log.epochs.end_offset_for(self.epoch, self.end) == (self.epoch, self.end)

    @rule(
        sizes=st.lists(st.integers(0, 300), max_size=20),
        elected=st.integers(0, 3),
        damage=st.sampled_from(["none", "none", "cut", "flip"]),
        room=st.none() | st.integers(0, 3000),
    )
    def append_replicated(self, sizes: list[int], elected: int, damage: str, room: int | None) -> None:
        """What a follower does with an answer that was cut off or damaged, and on a disk that fills up."""
        self.files.clock.advance(100)
        answer = bytearray()
        offset, epoch = self.end, self.epoch
        sent: list[ModelBatch] = []
        for count, size in enumerate(sizes):
            if count == elected:
                epoch += 1
            timestamp = self.files.clock.wall
            batch = encode_batch([(timestamp, b"k", bytes(size), ())], base_offset=offset, leader_epoch=epoch)
            answer += batch
            sent.append(ModelBatch(offset, offset + 1, timestamp, epoch, bytes(batch)))
            self.ever.add(bytes(batch))
            offset += 1
        if sent and damage == "cut":
            del answer[-1:]
            sent.pop()
        elif sent and damage == "flip":
            answer[-1] ^= 1
            sent.pop()
        self.files.fail_after(room)
        try:
            appended = self.log.append_replicated(answer)
            assert damage != "flip" or not sizes
            assert appended == sum(len(batch.data) for batch in sent)
        except CorruptBatch:
            assert damage == "flip"
        except OSError:
            assert room is not None
            # Some of it, and nothing of the next batch.
            sent = [batch for batch in sent if batch.next_offset <= self.log.log_end_offset]
        self.files.fail_after(None)
        self.batches += sent
        self.end += len(sent)
        self.epoch = epoch

    @rule(producer=st.integers(0, PRODUCERS - 1), back=st.integers(1, 5))
    def retry(self, producer: int, back: int) -> None:
        """One of a producer's last five batches again is a duplicate, with its first offset."""
        written = [b for b in self.batches if self._header(b).producer_id == producer]
        if producer not in self.known or len(written) < back:
            return
        batch = written[-back]
        verdict = self.log.producers.check(self._header(batch), self.files.clock.wall)
        # What was deleted may be forgotten in a crash; the last batch never is.
        if back == 1 or isinstance(verdict, Duplicate):
            assert isinstance(verdict, Duplicate), verdict
            assert verdict.base_offset == batch.base_offset
        else:
            assert verdict is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    # Making durable

    @rule()
    def prepare_flush(self) -> None:
        self.flushes.append(self.log.prepare_flush())

    @precondition(lambda self: self.flushes)
    @rule(data=st.data())
    def finish_a_flush(self, data: st.DataObject) -> None:
        # Worker threads may finish in any order.
        offset, work = self.flushes.pop(data.draw(st.integers(0, len(self.flushes) - 1)))
        work()  # type: ignore[operator]
        self.log.flushed(offset)
        self.durable = self.log.recovery_point

    @rule()
    def flush(self) -> None:
        offset, work = self.log.prepare_flush()
        work()
        self.log.flushed(offset)
        # (With another flush under way that was prepared at the same offset, the log claims the less of both.)
        assert self.flushes or self.log.recovery_point == offset == self.end
        self.durable = self.log.recovery_point

    # Shortening, which must work on a full disk

    @rule(share=st.floats(0, 1), is_full=st.booleans())
    def truncate(self, share: float, is_full: bool) -> None:
        self.files.fail_after(0 if is_full else None)
        target = self.start + round((self.end - self.start) * share)
        self.log.truncate_to(target)
        if target < self.end:
            self._forget_from(target)
            assert self.log.log_end_offset == self.end
        self.files.fail_after(None)

    @rule(place=st.integers(-20, 20), snapshot=st.booleans(), is_full=st.booleans())
    def start_over(self, place: int, snapshot: bool, is_full: bool) -> None:
        target = max(0, self.end + place)
        self.files.fail_after(0 if is_full else None)
        self.log.start_over_at(target, self.epoch if snapshot and target else None)
        self.files.fail_after(None)
        assert self.log.epochs.latest == (self.epoch if snapshot and target else -1)
        self.start = self.end = self.durable = target
        # Nothing before was in this log.
        self.start_max = target
        self.batches = []
        self._lose_track_of_producers()

    @rule(share=st.floats(0, 1), is_full=st.booleans())
    def delete_records(self, share: float, is_full: bool) -> None:
        target = round(self.end * share)
        self.files.fail_after(0 if is_full else None)
        self.log.delete_before(target)
        self.files.fail_after(None)
        self.start = max(self.start, target)
        assert self.log.log_start_offset == self.start

    @rule(ms=st.integers(0, 100_000), share=st.floats(0, 1), is_full=st.booleans())
    def expire(self, ms: int, share: float, is_full: bool) -> None:
        self.files.clock.advance(ms)
        ceiling = round(self.end * share)
        self.files.fail_after(0 if is_full else None)
        removed = self.log.expire(self.files.clock.wall, ceiling)
        self.files.fail_after(None)
        assert self.log.log_start_offset <= max(ceiling, self.start)
        if removed:
            gone = [b for b in self.batches if b.next_offset <= self.log.log_start_offset]
            newest = max((b.timestamp for b in gone if b.base_offset >= self.start), default=0)
            assert self.files.clock.wall - newest > self.config.retention_ms
        self.start = max(self.start, self.log.log_start_offset)
        assert self.log.log_start_offset == self.start

    # Coming and going

    @rule(with_checkpoint=st.booleans())
    def close_and_reopen(self, with_checkpoint: bool) -> None:
        self.log.close()
        self.flushes.clear()
        self._reopen(clean=True, checkpoint=self.start if with_checkpoint else None)
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        self.durable = self.end

    @rule(seed=st.integers(0, 2**32))
    def close_and_lose_power(self, seed: int) -> None:
        """The clean-shutdown marker is durable, so all that a clean open trusts must be."""
        self.log.close()
        self.files.crash(random.Random(seed))
        self._reopen(clean=True, checkpoint=self.start)
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        self.durable = self.end
        # A snapshot may be lost: see ``be_killed``.
        left = [self._header(b).producer_id for b in self.batches if b.base_offset >= self.start]
        self.known &= set(left)

    @rule(is_full=st.booleans())
    def be_killed(self, is_full: bool) -> None:
        """The process ends; what it wrote is still in the page cache."""
        self.files.fail_after(0 if is_full else None)
        self._reopen(clean=False, checkpoint=self.start)
        self.log.check()
        self.files.fail_after(None)
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        # The state is made again from the batches: a producer whose batches were all deleted is not known.
        left = [self._header(b).producer_id for b in self.batches if b.base_offset >= self.start]
        self.known &= set(left)

    @rule(seed=st.integers(0, 2**32))
    def lose_power(self, seed: int) -> None:
        self.files.crash(random.Random(seed))
        self.files.make_directory("/data")
        self._reopen(clean=False, checkpoint=self.start)
        assert self.log.log_end_offset >= self.durable
        assert self.log.log_start_offset == self.start
        self._adopt()

    # What must hold

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "log"):
            return
        self.start_max = min(max(self.start_max, self.start), self.end)
        self.log.check()
        assert self.log.log_end_offset == self.end

    @rule(share=st.floats(0, 1), bytes_max=st.integers(0, 3000), below=st.integers(0, 50), one=st.booleans())
    def read(self, share: float, bytes_max: int, below: int, one: bool) -> None:
        offset = self.start + round((self.end - self.start) * share)
        ceiling = self.end - below
        found = self.log.read(offset, bytes_max, ceiling, at_least_one=one)
        expected = [b for b in self.batches if b.next_offset > offset and b.next_offset <= ceiling]
        if found is None:
            assert not expected or (not one and len(expected[0].data) > bytes_max)
            return
        data = found.file.read_at(found.position, found.size)
        got = [data[position : position + header.size] for position, header in batches(data)]
        assert sum(map(len, got)) == found.size, "only whole batches"
        assert got == [b.data for b in expected[: len(got)]]
        assert found.size <= bytes_max or (one and len(got) == 1)

    @rule()
    def read_everything(self) -> None:
        offset = self.start
        for _ in range(len(self.batches) + 1):
            found = self.log.read(offset, 1000, self.end, at_least_one=True)
            if found is None:
                break
            data = found.file.read_at(found.position, found.size)
            for position, header in batches(data):
                batch = self.batches_by_base()[header.base_offset]
                assert data[position : position + header.size] == batch.data
                offset = header.next_offset
        assert offset == self.end

    @rule(before=st.integers(1, 10))
    def read_out_of_range(self, before: int) -> None:
        for offset in (self.start - before, self.end + before):
            with pytest.raises(OffsetOutOfRange):
                self.log.read(offset, 100, self.end, at_least_one=True)
        assert self.log.read(self.end, 100, self.end, at_least_one=True) is None

    @rule(share=st.floats(0, 1), jitter_ms=st.integers(-600, 600))
    def look_up_a_timestamp(self, share: float, jitter_ms: int) -> None:
        left = [b for b in self.batches if b.next_offset > self.start]
        if not left:
            assert self.log.offset_for_timestamp(0) is None
            return
        timestamp = max(0, left[round((len(left) - 1) * share)].timestamp + jitter_ms)
        expected = next((b for b in left if b.timestamp >= timestamp), None)
        found = self.log.offset_for_timestamp(timestamp)
        if expected is None:
            assert found is None
        else:
            offset = max(expected.base_offset, self.start)
            assert found == (offset, expected.timestamp, expected.leader_epoch)

    @rule()
    def look_up_the_newest(self) -> None:
        left = [b for b in self.batches if b.next_offset > self.start and b.timestamp >= 0]
        found = self.log.latest_timestamp()
        if not left:
            assert found is None
            return
        newest = max(left, key=lambda b: (b.timestamp, -b.base_offset))
        assert found == (max(newest.base_offset, self.start), newest.timestamp, newest.leader_epoch)

    @rule(epoch=st.integers(0, 30))
    def look_up_an_epoch(self, epoch: int) -> None:
        # What began before a start that was ever set is forgotten, even if the start was lowered again.
        left = [b for b in self.batches if b.next_offset > self.start_max]
        found_epoch, end_offset = self.log.epochs.end_offset_for(epoch, self.end)
        if found_epoch == -1 or not left:
            return
        assert found_epoch <= epoch
        for batch in left:
            first = max(batch.base_offset, self.start_max)
            assert (batch.leader_epoch <= epoch) == (first < end_offset), (batch, end_offset)

    # Private

    def batches_by_base(self) -> dict[int, ModelBatch]:
        return {batch.base_offset: batch for batch in self.batches}

    def _append(self, count: int, size: int, producer: int | None, late_ms: int) -> None:
        self.files.clock.advance(100)
        timestamp = -1 if late_ms < 0 else self.files.clock.wall - late_ms
        records = [Record(0, timestamp, b"k", bytes(size), ())] * count
        if producer is None:
            batch = encode_batch(records)
        else:
            sequence = self.next_sequence[producer]
            batch = encode_batch(records, producer_id=producer, producer_epoch=0, base_sequence=sequence)
        header = check_produced(memoryview(batch), max_message_bytes=1 << 20)
        assert isinstance(header, BatchHeader)
        if producer is not None:
            verdict = self.log.producers.check(header, self.files.clock.wall)
            if producer in self.known:
                assert verdict is None, (producer, header, verdict)
            elif verdict is not None:
                return
        base_offset = self.log.append(batch, header, self.epoch)
        assert base_offset == self.end
        self.end += count
        self.batches.append(ModelBatch(base_offset, self.end, timestamp, self.epoch, bytes(batch)))
        self.ever.add(bytes(batch))
        if producer is not None:
            self.next_sequence[producer] += count
            self.known.add(producer)

    def _forget_from(self, offset: int) -> None:
        removed = next(b for b in self.batches if b.next_offset > offset)
        # A batch goes as a whole.
        self.end = min(offset, removed.base_offset)
        self.batches = [b for b in self.batches if b.next_offset <= self.end]
        self.start = min(self.start, self.end)
        self.durable = min(self.durable, self.end)
        self._lose_track_of_producers()

    def _lose_track_of_producers(self) -> None:
        self.known.clear()
        for producer in range(PRODUCERS):
            self.next_sequence[producer] += 1000
        self.epoch += 1

    def _adopt(self) -> None:
        """Believe the log about what survived, as far as it is possible."""
        survived: list[ModelBatch] = []
        offset = self.start
        while (found := self.log.read(offset, 1 << 20, 1 << 60, at_least_one=True)) is not None:
            data = found.file.read_at(found.position, found.size)
            for position, header in batches(data):
                batch = data[position : position + header.size]
                assert batch in self.ever
                fields = (header.base_offset, header.next_offset, header.max_timestamp, header.leader_epoch)
                survived.append(ModelBatch(*fields, batch))
                offset = header.next_offset
        durable = [b for b in self.batches if b.next_offset > self.start and b.next_offset <= self.durable]
        assert survived[: len(durable)] == durable, "what was flushed is there"
        first = survived[0].base_offset if survived else self.start
        self.batches = [b for b in self.batches if b.next_offset <= first] + survived
        self.end = self.log.log_end_offset
        self._lose_track_of_producers()

    def _reopen(self, *, clean: bool, checkpoint: int | None) -> None:
        self.log = Log.open(
            self.environment,
            DIRECTORY,
            self.config,
            clean=clean,
            recovery_point=self.durable,
            log_start_offset=checkpoint,
        )
        self.flushes.clear()
        if checkpoint is None:
            # Without the checkpoint a log begins with its first segment.
            assert self.log.log_start_offset <= self.start
            self.start = self.log.log_start_offset

    def _header(self, batch: ModelBatch) -> BatchHeader:
        return next(iter(batches(batch.data)))[1]


TestLog = LogMachine.TestCase
TestLog.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, report_multiple_bugs=False
)
