"""Transactions in a log: which are open, how far readers may read, and which of the batches they must skip."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.log import producers
from penstock.log.aborted_index import AbortedTransaction
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.producers import Duplicate
from penstock.log.segments import CorruptLog
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import Marker, decode_header, encode_batch, encode_marker
from tests.log.making import (
    DIRECTORY,
    NOW,
    append,
    append_marker,
    flush,
    headers_in,
    made_batch,
    made_files,
    names,
    opened,
)
from tests.support_files import FakeFiles

DAY = 86_400_000
SMALL = LogConfig(segment_bytes=400)
# Its second byte of eight, in a batch.
PRODUCER_ID_AT = 44


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


@pytest.fixture
def log(files: FakeFiles) -> Log:
    return opened(files)


def write(
    log: Log, producer_id: int, sequence: int = 0, *, count: int = 1, epoch: int = 0, leader_epoch: int = 0
) -> int:
    producer = (producer_id, epoch, sequence)
    return append(log, *[NOW] * count, producer=producer, transactional=True, epoch=leader_epoch)


def commit(log: Log, producer_id: int, epoch: int = 0, **options: int) -> int:
    return append_marker(log, producer_id, epoch, is_commit=True, **options)


def abort(log: Log, producer_id: int, epoch: int = 0, **options: int) -> int:
    return append_marker(log, producer_id, epoch, is_commit=False, **options)


def verdict(
    log: Log, producer_id: int, sequence: int, *, epoch: int = 0, transactional: bool = True
) -> Duplicate | ErrorCode | None:
    header = made_batch(producer=(producer_id, epoch, sequence), transactional=transactional)[1]
    return log.producers.check(header, log.steady_ms())


def copied(log: Log, files: FakeFiles, config: LogConfig | None = None) -> Log:
    """A follower's log with the same batches."""
    follower = opened(files, config)
    offset = log.log_start_offset
    while (found := log.read(offset, 1000, log.log_end_offset, at_least_one=True)) is not None:
        follower.append_replicated(found.file.read_at(found.position, found.size))
        offset = follower.log_end_offset
    return follower


# The last stable offset


def test_without_transactions_everything_committed_is_stable(log: Log) -> None:
    assert log.last_stable_offset(0) == 0
    append(log, NOW, NOW)
    append(log, producer=(7, 0, 0))
    assert [log.last_stable_offset(offset) for offset in (0, 1, 3)] == [0, 1, 3]


def test_an_open_transaction_holds_the_last_stable_offset(log: Log) -> None:
    append(log)
    assert write(log, 7, count=2) == 1
    append(log)
    assert log.last_stable_offset(4) == 1
    assert log.last_stable_offset(1) == 1
    assert log.last_stable_offset(0) == 0
    commit(log, 7)
    assert log.last_stable_offset(5) == 5


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_transaction_is_open_until_its_marker_is_committed(log: Log, is_commit: bool) -> None:
    append(log)
    write(log, 7)
    assert append_marker(log, 7, is_commit=is_commit) == 2
    append(log)
    assert log.last_stable_offset(2) == 1
    assert log.last_stable_offset(3) == 3
    assert log.last_stable_offset(4) == 4


def test_the_earliest_of_several_transactions_counts(log: Log) -> None:
    for producer_id in (7, 8, 9):
        write(log, producer_id, count=10)
    commit(log, 8)
    assert log.last_stable_offset(31) == 0
    commit(log, 7)
    assert log.last_stable_offset(32) == 20
    assert log.last_stable_offset(31) == 0, "the marker of the first is not committed"
    commit(log, 9)
    assert log.last_stable_offset(33) == 33
    assert log.producers.open_transactions() == {}


def test_more_batches_belong_to_the_same_transaction(log: Log) -> None:
    write(log, 7, 0)
    write(log, 7, 1)
    assert log.producers.open_transaction(7) == 0
    assert log.producers.open_transactions() == {7: 0}
    abort(log, 7)
    assert log.producers.open_transaction(7) is None
    assert write(log, 7, 2) == 3
    assert log.producers.open_transaction(7) == 3


def test_the_last_stable_offset_is_not_below_the_start(log: Log) -> None:
    write(log, 7, count=5)
    log.delete_before(3)
    assert log.last_stable_offset(5) == 3
    assert log.producers.open_transaction(7) == 0


def test_a_high_watermark_that_was_higher_before_is_answered_exactly(log: Log) -> None:
    append(log)
    write(log, 7)
    commit(log, 7)
    append(log)
    assert log.last_stable_offset(4) == 4
    assert log.last_stable_offset(2) == 1


# Markers


def test_a_marker_with_a_newer_epoch_fences_and_begins_a_sequence(log: Log) -> None:
    write(log, 7, 0)
    write(log, 7, 1)
    abort(log, 7, 1)
    assert verdict(log, 7, 2) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert verdict(log, 7, 0) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert verdict(log, 7, 2, epoch=1) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert verdict(log, 7, 0, epoch=1) is None
    assert verdict(log, 7, 0, epoch=2) is None
    write(log, 7, 0, epoch=1)
    assert verdict(log, 7, 0, epoch=1) == Duplicate(3, NOW)


def test_a_marker_of_the_same_epoch_lets_the_sequence_continue(log: Log) -> None:
    write(log, 7, 0)
    commit(log, 7)
    assert verdict(log, 7, 1) is None


@pytest.mark.parametrize("end", [commit, abort])
def test_a_sequence_that_is_used_again_in_the_next_transaction_is_no_duplicate(
    log: Log, end: Callable[..., int]
) -> None:
    """librdkafka does so after an abort whose last answer was lost. A new record would be acknowledged and lost."""
    write(log, 7, 0)
    assert verdict(log, 7, 0) == Duplicate(0, NOW)
    end(log, 7)
    assert verdict(log, 7, 0) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    write(log, 7, 1)
    assert verdict(log, 7, 0) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert verdict(log, 7, 1) == Duplicate(2, NOW)


def test_a_marker_without_a_transaction_changes_only_the_epochs(log: Log) -> None:
    append(log)
    abort(log, 7, 3, coordinator_epoch=5)
    state = log.producers.get(7)
    assert state is not None
    assert (state.epoch, state.coordinator_epoch, state.last_sequence) == (3, 5, -1)
    assert log.last_stable_offset(2) == 2
    assert log.aborted_transactions(0, 2) == []
    assert names_of_indexes(log) == []
    assert verdict(log, 7, 0, epoch=2) is ErrorCode.INVALID_PRODUCER_EPOCH
    log.check()


def test_markers_of_earlier_epochs_are_refused(log: Log) -> None:
    write(log, 7, epoch=2)
    check = log.producers.check_marker
    assert check(7, 2, 5) is ErrorCode.NONE
    assert check(7, 3, 5) is ErrorCode.NONE
    assert check(7, 1, 5) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert check(8, 0, 0) is ErrorCode.NONE
    commit(log, 7, 2, coordinator_epoch=5)
    assert check(7, 2, 5) is ErrorCode.NONE, "the same again, because its answer was lost"
    assert check(7, 2, 4) is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    assert check(7, 9, 4) is ErrorCode.TRANSACTION_COORDINATOR_FENCED


def test_a_late_marker_does_not_end_the_next_transaction_when_epochs_grow(log: Log) -> None:
    write(log, 7, epoch=1)
    assert log.producers.check_marker(7, 2, 0, is_v2=True) is ErrorCode.NONE
    commit(log, 7, 2)
    assert log.producers.check_marker(7, 2, 0, is_v2=True) is ErrorCode.NONE, "repeated"
    write(log, 7, epoch=2)
    assert log.producers.check_marker(7, 2, 0, is_v2=True) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert log.producers.check_marker(7, 3, 0, is_v2=True) is ErrorCode.NONE


def test_a_marker_fences_an_expired_producers_epoch(log: Log, files: FakeFiles) -> None:
    append(log, producer=(7, 3, 0))
    files.clock.advance(2 * DAY)
    log.producers.expire(log.steady_ms())
    assert log.producers.get(7) is None
    assert log.producers.check_marker(7, 2, 0) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert log.producers.check_marker(7, 3, 0) is ErrorCode.NONE


def test_a_control_batch_of_another_kind_ends_nothing(log: Log) -> None:
    write(log, 7)
    for key in (b"\0\0\0\5", b"x", None):
        batch = encode_batch(
            [(NOW, key, b"", ())], producer_id=7, producer_epoch=0, control=True, transactional=True
        )
        log.append(batch, decode_header(batch), 0)
    assert log.producers.open_transaction(7) == 0


# Batches of clients


def test_a_batch_outside_the_open_transaction_is_refused(log: Log) -> None:
    write(log, 7)
    assert verdict(log, 7, 1, transactional=False) is ErrorCode.INVALID_TXN_STATE
    assert verdict(log, 7, 1) is None
    assert verdict(log, 7, 0) == Duplicate(0, NOW)
    assert verdict(log, 7, 0, epoch=1) is ErrorCode.INVALID_TXN_STATE
    commit(log, 7)
    assert verdict(log, 7, 1, transactional=False) is None
    assert verdict(log, 7, 0, epoch=1) is None


def test_an_open_transaction_does_not_expire(log: Log, files: FakeFiles) -> None:
    write(log, 7)
    append(log, producer=(8, 0, 0))
    files.clock.advance(10 * DAY)
    assert log.producers.expire(log.steady_ms()) == 1
    assert log.last_stable_offset(2) == 0
    assert verdict(log, 7, 0) == Duplicate(0, NOW)
    assert verdict(log, 7, 5) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert verdict(log, 7, 1, transactional=False) is ErrorCode.INVALID_TXN_STATE
    write(log, 7, 1)
    assert verdict(log, 7, 0) == Duplicate(0, NOW)
    log.check()


def test_an_open_transaction_makes_no_room(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 10)
    write(log, 7)
    for producer_id in range(100, 150):
        append(log, producer=(producer_id, 0, 0))
    assert log.last_stable_offset(51) == 0
    for producer_id in range(200, 250):
        write(log, producer_id)
    assert len(log.producers.open_transactions()) == 51
    log.check()


# Aborted transactions


def names_of_indexes(log: Log) -> list[str]:
    return [name for name in log._files.list(log.directory) if name.endswith(".txnindex")]


def filled(log: Log) -> list[AbortedTransaction]:
    """Transactions that overlap, some aborted."""
    write(log, 7, count=5)  # 0
    write(log, 8, count=5)  # 5
    write(log, 9, count=5)  # 10
    abort(log, 8)  # 15
    write(log, 8, 5, count=4)  # 16
    abort(log, 7)  # 20
    commit(log, 9)  # 21
    abort(log, 8)  # 22
    append(log)  # 23
    return [
        AbortedTransaction(7, 0, 20, 10),
        AbortedTransaction(8, 5, 15, 0),
        AbortedTransaction(8, 16, 22, 23),
    ]


def test_aborted_transactions_are_sorted_by_first_offset(log: Log) -> None:
    expected = filled(log)
    assert log.aborted_transactions(0, 24) == expected
    assert log.aborted_transactions(0, 5) == expected[:1]
    assert log.aborted_transactions(0, 6) == expected[:2]
    assert log.aborted_transactions(15, 16) == expected[:2]
    assert log.aborted_transactions(16, 17) == [expected[0], expected[2]]
    assert log.aborted_transactions(21, 22) == expected[2:]
    assert log.aborted_transactions(23, 24) == []


def test_each_segment_has_an_index_of_its_markers(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    for number in range(10):
        write(log, 7, number)
        if number % 3 == 0:
            abort(log, 7)
        elif number % 3 == 1:
            commit(log, 7)
    bases = [int(name[:20]) for name in names(files, ".txnindex")]
    assert len(bases) > 2
    for base, name in zip(bases, names(files, ".txnindex")):
        data = files.read(f"{DIRECTORY}/{name}")
        assert data and len(data) % 34 == 0
        assert int.from_bytes(data[18:26], "big") >= base
    found = log.aborted_transactions(0, log.log_end_offset)
    assert [entry.first_offset for entry in found] == sorted(entry.first_offset for entry in found)
    assert len(found) == 4


def test_a_transaction_over_segments_is_listed_with_its_marker_only(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    write(log, 7, 0)
    for _ in range(20):
        append(log)
    write(log, 7, 1)
    marker = abort(log, 7)
    assert len(names(files, ".txnindex")) == 1
    expected = [AbortedTransaction(7, 0, marker, marker + 1)]
    assert log.aborted_transactions(0, 1) == expected
    assert log.aborted_transactions(10, 12) == expected
    assert log.aborted_transactions(marker + 1, marker + 2) == []


def test_a_full_index_rolls_the_segment(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_index_bytes=100))
    for number in range(6):
        write(log, 7, number)
        abort(log, 7)
    assert len(names(files, ".txnindex")) > 1
    assert len(log.aborted_transactions(0, 12)) == 6
    log.check()


def test_the_end_of_a_read_is_known(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    for number in range(20):
        append(log, *[NOW] * (number % 3 + 1))
    offset = 0
    while (found := log.read(offset, 150, log.log_end_offset - 1, at_least_one=True)) is not None:
        end_offset = headers_in(found)[-1].next_offset
        assert log.end_offset_of(found) >= end_offset
        assert log.end_offset_of(found) in (end_offset, log.log_end_offset - 1)
        offset = end_offset
    first = log.read(0, 150, log.log_end_offset, at_least_one=True)
    assert first is not None
    log.read(5, 150, log.log_end_offset, at_least_one=True)
    assert log.end_offset_of(first) == log.log_end_offset, "an upper bound"


# Restarts


Restart = Callable[[Log, FakeFiles, LogConfig], Log]


def close(log: Log, files: FakeFiles, config: LogConfig) -> Log:
    log.close()
    return opened(files, config)


def kill(log: Log, files: FakeFiles, config: LogConfig) -> Log:
    return opened(files, config, clean=False)


def lose_power(log: Log, files: FakeFiles, config: LogConfig) -> Log:
    flush(log)
    point = log.recovery_point
    files.crash(random.Random(3))
    return opened(files, config, clean=False, recovery_point=point)


def lose_snapshots(log: Log, files: FakeFiles, config: LogConfig) -> Log:
    log.close()
    for name in names(files, ".snapshot"):
        files.remove(f"{DIRECTORY}/{name}")
    return opened(files, config)


RESTARTS = pytest.mark.parametrize("restart", [close, kill, lose_power, lose_snapshots])


@RESTARTS
@pytest.mark.parametrize("config", [LogConfig(), SMALL], ids=["one segment", "many"])
def test_open_and_aborted_transactions_survive(files: FakeFiles, restart: Restart, config: LogConfig) -> None:
    log = opened(files, config)
    expected = filled(log)
    write(log, 10)  # 24
    write(log, 9, 5)  # 25
    commit(log, 10, coordinator_epoch=4)  # 26
    log = restart(log, files, config)
    log.check()
    assert log.producers.open_transactions() == {9: 25}
    assert log.aborted_transactions(0, 27) == expected
    assert log.last_stable_offset(27) == 25
    assert log.last_stable_offset(26) == 24
    assert log.producers.check_marker(10, 0, 3) is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    assert verdict(log, 9, 6, transactional=False) is ErrorCode.INVALID_TXN_STATE
    end = abort(log, 9)
    assert log.aborted_transactions(0, 28) == [*expected, AbortedTransaction(9, 25, end, end + 1)]


@RESTARTS
@pytest.mark.parametrize("config", [LogConfig(), SMALL], ids=["one segment", "many"])
def test_a_high_watermark_behind_the_restart_is_answered_exactly(
    files: FakeFiles, restart: Restart, config: LogConfig
) -> None:
    log = opened(files, config)
    filled(log)
    expected = [log.last_stable_offset(offset) for offset in range(25)]
    assert expected[:16] == [0] * 16
    log = restart(log, files, config)
    assert [log.last_stable_offset(offset) for offset in range(24, -1, -1)] == expected[::-1]


@pytest.mark.parametrize("clean", [True, False])
def test_five_batches_of_transactions_survive_a_restart(files: FakeFiles, clean: bool) -> None:
    log = opened(files)
    for sequence in range(8):
        write(log, 7, sequence)
        if sequence == 1:
            commit(log, 7)
    if clean:
        log.close()
    log = opened(files, clean=clean)
    assert [verdict(log, 7, sequence) for sequence in range(2, 9)] == [
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        *(Duplicate(offset, NOW) for offset in (4, 5, 6, 7, 8)),
        None,
    ]


@RESTARTS
def test_an_epoch_begun_by_a_marker_survives(files: FakeFiles, restart: Restart) -> None:
    log = opened(files)
    write(log, 7, 0)
    abort(log, 7, 1)
    log = restart(log, files, LogConfig())
    assert verdict(log, 7, 1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert verdict(log, 7, 1, epoch=1) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert verdict(log, 7, 0, epoch=1) is None


# Truncation, deletion, replication


def test_truncation_opens_transactions_again(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    expected = filled(log)
    log.truncate_to(22)
    assert log.producers.open_transactions() == {8: 16}
    assert log.aborted_transactions(0, 22) == expected[:2]
    assert log.last_stable_offset(22) == 16
    log.truncate_to(20)
    assert log.producers.open_transactions() == {7: 0, 9: 10, 8: 16}
    assert log.aborted_transactions(0, 20) == expected[1:2]
    log.check()
    commit(log, 7, leader_epoch=1)
    assert log.aborted_transactions(0, 21) == expected[1:2]
    log.truncate_to(0)
    assert log.producers.open_transactions() == {}
    assert log.aborted_transactions(0, 21) == []
    log.check()
    log.close()
    log = opened(files, SMALL)
    assert log.aborted_transactions(0, 21) == []


def test_an_index_that_was_cut_to_nothing_takes_entries_again(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    write(log, 7)
    abort(log, 7)
    assert log.aborted_transactions(0, 2) == [AbortedTransaction(7, 0, 1, 2)]
    log.truncate_to(1)
    for _ in range(20):
        append(log)
    log.check()
    log.truncate_to(1)
    abort(log, 7)
    assert log.aborted_transactions(0, 2) == [AbortedTransaction(7, 0, 1, 2)]
    log.check()


def test_a_log_that_starts_over_has_no_transactions(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    filled(log)
    write(log, 7, 5)
    log.start_over_at(100)
    assert log.last_stable_offset(100) == 100
    assert names_of_indexes(log) == []
    assert log.aborted_transactions(100, 200) == []
    log.check()


def test_a_deleted_segment_takes_its_index_with_it(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    expected = filled(log)
    for _ in range(10):
        append(log)
    log.delete_before(30)
    assert names_of_indexes(log) == []
    assert any(path.endswith(".txnindex.deleted") for path in log.pending_deletes)
    assert log.aborted_transactions(30, 34) == []
    assert expected
    log.check()


def test_a_follower_has_the_same_transactions(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    filled(log)
    write(log, 9, 5)
    others = made_files()
    follower = copied(log, others, LogConfig(segment_bytes=700))
    assert follower.log_end_offset == log.log_end_offset
    assert follower.aborted_transactions(0, 25) == log.aborted_transactions(0, 25)
    assert follower.producers.open_transactions() == log.producers.open_transactions()
    assert [follower.last_stable_offset(offset) for offset in range(25, 0, -1)] == [
        log.last_stable_offset(offset) for offset in range(25, 0, -1)
    ]
    follower.check()


def test_a_full_disk_loses_no_entry(files: FakeFiles) -> None:
    log = opened(files)
    write(log, 7)
    marker = encode_marker(Marker(False, 0), 7, 0, NOW)
    files.fail_after(len(marker))
    log.append(marker, decode_header(marker), 0)
    files.fail_after(None)
    expected = [AbortedTransaction(7, 0, 1, 2)]
    assert log.aborted_transactions(0, 2) == expected
    log.close()
    assert opened(files).aborted_transactions(0, 2) == expected


# Damaged and missing indexes


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("damage", ["short", "empty", "zeros", "swapped", "beyond", "version"])
def test_a_damaged_index_is_rebuilt(files: FakeFiles, damage: str, clean: bool) -> None:
    log = opened(files)
    expected = filled(log)
    log.close()
    path = f"{DIRECTORY}/{0:020d}.txnindex"
    data = files.read(path)
    assert len(data) == 3 * 34
    damaged = {
        "short": data[:-1],
        "empty": b"",
        "zeros": bytes(len(data)),
        "swapped": data[34:68] + data[:34] + data[68:],
        "beyond": data[:-16] + (99).to_bytes(8, "big") + data[-8:],
        "version": b"\0\7" + data[2:],
    }[damage]
    files.replace(path, damaged)
    log = opened(files, clean=clean, recovery_point=24)
    if not clean:
        assert files.read(path) == data
    write(log, 11)
    abort(log, 11)
    last = AbortedTransaction(11, 24, 25, 26)
    assert log.aborted_transactions(0, 26) == [*expected, last]
    assert files.read(path)[: len(data)] == data
    log.close()
    assert opened(files).aborted_transactions(0, 26) == [*expected, last]


def test_indexes_that_were_removed_are_rebuilt(files: FakeFiles) -> None:
    """All of them, as operators of Kafka do to have them rebuilt."""
    log = opened(files, SMALL)
    expected = filled(log)
    log.close()
    for suffix in ("index", "timeindex", "txnindex"):
        for name in names(files, suffix):
            files.remove(f"{DIRECTORY}/{name}")
    for _ in range(2):
        # Opened and closed before they are needed.
        log = opened(files, SMALL)
        log.check()
        log.close()
    log = opened(files, SMALL)
    assert log.aborted_transactions(0, 24) == expected


def test_recovery_rebuilds_a_missing_index_and_removes_a_stale_one(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    expected = filled(log)
    log.close()
    bases = [name.removesuffix(".log") for name in names(files, ".log")]
    for base in bases:
        path = f"{DIRECTORY}/{base}.txnindex"
        if files.exists(path):
            files.remove(path)
        else:
            files.replace(path, bytes(34))
    log = opened(files, SMALL, clean=False)
    assert log.aborted_transactions(0, 24) == expected
    assert all(files.size(f"{DIRECTORY}/{name}") for name in names(files, ".txnindex"))
    log.check()


def test_a_new_segment_does_not_inherit_an_index(files: FakeFiles) -> None:
    files.make_directory(DIRECTORY)
    files.replace(f"{DIRECTORY}/{0:020d}.txnindex", bytes(34))
    log = opened(files)
    append(log)
    assert names_of_indexes(log) == []
    log.close()
    assert opened(files).aborted_transactions(0, 1) == []


def test_a_marker_that_was_damaged_is_reported(files: FakeFiles) -> None:
    """A flipped bit must not turn an abort into a commit."""
    log = opened(files)
    write(log, 7)
    abort(log, 7)
    log.close()
    for name in names(files, ".snapshot"):
        files.remove(f"{DIRECTORY}/{name}")
    path = f"{DIRECTORY}/{0:020d}.log"
    files.damage(path, files.size(path) - 10, 0x01)
    log = opened(files)
    with pytest.raises(OSError, match="CRC of the batch"):
        log.last_stable_offset(2)


def test_a_producer_id_that_was_damaged_opens_no_transaction(files: FakeFiles) -> None:
    """Nobody would ever end it, and the last stable offset would stay there (seed 998000016)."""
    log = opened(files)
    write(log, 7)
    second = write(log, 8)
    commit(log, 7)
    commit(log, 8)
    position = len(made_batch(producer=(7, 0, 0), transactional=True)[0])
    log.close()
    for name in names(files, ".snapshot"):
        files.remove(f"{DIRECTORY}/{name}")
    files.damage(f"{DIRECTORY}/{0:020d}.log", position + PRODUCER_ID_AT, 0x08)
    log = opened(files)
    with pytest.raises(CorruptLog, match="does not match") as found:
        log.last_stable_offset(4)
    assert found.value.offset == second
    # If this is the only copy, it goes on with the other batches: also those behind the damage.
    assert log.producers.open_transactions() == {}
    assert log.last_stable_offset(4) == 4


# What a crash, a full disk or an operator leaves behind


def test_a_snapshot_from_before_the_log_opens_no_transaction_again(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    write(log, 7)
    while not names(files, ".snapshot"):
        append(log)
    commit(log, 7, 1)
    append(log)
    flush(log)
    log.delete_before(log.log_end_offset, frees_last=True)
    start, recovery_point = log.log_start_offset, log.recovery_point
    # The one from the roll was not written back before the power failed. The one before it has 7 open.
    files.replace(f"{DIRECTORY}/{start:020}.snapshot", b"")
    log = opened(files, SMALL, clean=False, recovery_point=recovery_point, log_start_offset=start)
    append(log, epoch=1)
    assert log.producers.open_transactions() == {}
    assert log.last_stable_offset(log.log_end_offset) == log.log_end_offset
    assert verdict(log, 7, 0, epoch=1) is None


def test_an_emptied_log_remembers_its_producers_after_a_power_loss(files: FakeFiles) -> None:
    for seed in range(20):
        files = made_files()
        log = opened(files, SMALL)
        write(log, 7, 0, epoch=3)
        commit(log, 7, 3)
        flush(log)
        log.delete_before(log.log_end_offset, frees_last=True)
        start, recovery_point = log.log_start_offset, log.recovery_point
        files.crash(random.Random(seed))
        log = opened(files, SMALL, clean=False, recovery_point=recovery_point, log_start_offset=start)
        assert verdict(log, 7, 1, epoch=2) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_entries_that_could_not_be_replaced_do_not_come_back(files: FakeFiles) -> None:
    log = opened(files, SMALL)
    write(log, 7)
    abort(log, 7)
    files.fail_after(0)
    log = opened(files, SMALL, clean=False)
    files.fail_after(None)
    log.truncate_to(1)
    commit(log, 7, leader_epoch=1)
    for _ in range(12):
        append(log, epoch=1)
    assert log.aborted_transactions(0, 2) == []
    log.check()
    log.close()
    assert opened(files, SMALL).aborted_transactions(0, 2) == []


def test_entries_that_were_dropped_on_a_full_disk_are_rebuilt_by_the_next_process(files: FakeFiles) -> None:
    config = LogConfig(index_interval_bytes=1)
    log = opened(files, config)
    write(log, 7)
    write(log, 8)
    abort(log, 7)
    marker = encode_marker(Marker(False, 0), 8, 0, NOW)
    files.fail_after(len(marker))
    log.append(marker, decode_header(marker), 0)
    files.fail_after(None)
    for _ in range(3):
        append(log)
    files.fail_after(0)
    log.truncate_to(5)
    files.fail_after(None)
    log.close()
    assert [entry.producer_id for entry in opened(files, config).aborted_transactions(0, 4)] == [7, 8]


def test_entries_of_a_completed_segment_that_had_no_room_are_rebuilt_by_the_next_process(
    files: FakeFiles,
) -> None:
    log = opened(files, SMALL)
    write(log, 7)
    write(log, 8)
    flush(log)
    recovery_point = log.recovery_point
    abort(log, 8)
    abort(log, 7)
    for _ in range(12):
        append(log)
    path = f"{DIRECTORY}/{0:020}.txnindex"
    # A power failure may leave this of a file that was not synced.
    files.replace(path, files.read(path)[: len(files.read(path)) // 2])
    files.fail_after(0)
    log = opened(files, SMALL, clean=False, recovery_point=recovery_point)
    files.fail_after(None)
    for _ in range(12):
        append(log, epoch=1)
    log.close()
    assert [entry.producer_id for entry in opened(files, SMALL).aborted_transactions(0, 2)] == [7, 8]


def test_a_removed_index_of_a_segment_that_nobody_has_read_is_rebuilt(files: FakeFiles) -> None:
    config = LogConfig(segment_bytes=300_000)
    log = opened(files, config)
    write(log, 7)
    for _ in range(10):
        append(log, size=100_000)
    abort(log, 7)
    for _ in range(40):
        append(log, size=100_000)
    expected = log.aborted_transactions(0, 1)
    assert expected
    log.close()
    for suffix in (".index", ".timeindex", ".txnindex"):
        for name in names(files, suffix):
            files.remove(f"{DIRECTORY}/{name}")
    log = opened(files, config)
    found = log.read(0, 1000, log.last_stable_offset(log.log_end_offset), at_least_one=True)
    assert found is not None
    assert log.aborted_transactions(0, log.end_offset_of(found)) == expected


def test_a_replica_that_nobody_reads_forgets_ended_transactions(log: Log) -> None:
    for sequence in range(50):
        write(log, 7, sequence)
        commit(log, 7)
        log.committed(log.log_end_offset)
    assert len(log.producers.transactions._ended) == 0
