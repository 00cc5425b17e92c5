"""What a follower writes, and what it remembers of the leaders it had or was."""

from __future__ import annotations

import errno

import pytest

from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.protocol.records import CorruptBatch, encode_batch
from tests.log.making import DIRECTORY, NOW, append, base_offsets, made_files, names, opened
from tests.support_files import FakeFiles

EPOCHS = "leader-epoch-checkpoint"


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


def fetched(first: int, count: int, *, epoch: int = 0, producer_id: int = -1) -> bytearray:
    """Batches of one record each, as a leader sends them."""
    data = bytearray()
    for offset in range(first, first + count):
        data += encode_batch(
            [(NOW + offset, None, bytes(20), ())],
            base_offset=offset,
            leader_epoch=epoch,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=offset if producer_id >= 0 else -1,
        )
    return data


BATCH_BYTES = len(fetched(0, 1))


# Appending what was fetched


def test_contiguous_batches_of_one_segment_are_one_write(files: FakeFiles) -> None:
    log = opened(files)
    before = files.appends
    assert log.append_replicated(fetched(0, 50)) == 50 * BATCH_BYTES
    assert files.appends == before + 1
    assert base_offsets(log, bytes_max=BATCH_BYTES) == list(range(50))
    log.check()


def test_replicated_batches_roll_where_single_ones_would(files: FakeFiles) -> None:
    config = LogConfig(segment_bytes=BATCH_BYTES * 4, index_interval_bytes=1)
    at_once, one_by_one = opened(files, config), opened(other := made_files(), config)
    at_once.append_replicated(fetched(0, 10))
    for offset in range(10):
        one_by_one.append_replicated(fetched(offset, 1))
    at_once.close()
    one_by_one.close()
    assert names(files) == names(other)
    for name in names(files):
        assert files.read(f"{DIRECTORY}/{name}") == other.read(f"{DIRECTORY}/{name}"), name


def test_replicated_batches_roll_by_time(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_ms=3))
    log.append_replicated(fetched(0, 9))
    assert [int(name[:20]) for name in names(files, ".log")] == [0, 4, 8]
    log.check()


def test_a_batch_cut_off_at_the_end_is_left_out(files: FakeFiles) -> None:
    log = opened(files)
    data = fetched(0, 3)
    for cut in (1, BATCH_BYTES - 1):
        assert log.append_replicated(data[:-cut]) == BATCH_BYTES * 2
        log.truncate_to(0)
    assert log.append_replicated(data[: BATCH_BYTES - 1]) == 0
    assert log.log_end_offset == 0


@pytest.mark.parametrize("position", [9, 16, 17, 25, BATCH_BYTES - 1])
def test_a_damaged_batch_is_not_written(files: FakeFiles, position: int) -> None:
    log = opened(files)
    data = fetched(0, 4)
    data[2 * BATCH_BYTES + position] ^= 0x10
    if position == 9:
        # A length that reaches beyond the data looks like a batch that was cut off.
        assert log.append_replicated(data) == 2 * BATCH_BYTES
    else:
        with pytest.raises(CorruptBatch):
            log.append_replicated(data)
    assert base_offsets(log) == [0, 1]
    log.append_replicated(fetched(2, 2))
    log.check()


def test_an_epoch_that_goes_back_within_the_answer_is_refused(files: FakeFiles) -> None:
    log = opened(files)
    with pytest.raises(CorruptBatch):
        log.append_replicated(fetched(0, 1, epoch=4) + fetched(1, 1, epoch=3))
    assert log.log_end_offset == 1


def test_an_epoch_before_the_log_is_refused(files: FakeFiles) -> None:
    log = opened(files)
    append(log, epoch=4)
    with pytest.raises(CorruptBatch):
        log.append_replicated(fetched(1, 1, epoch=3))
    assert log.log_end_offset == 1
    log.append_replicated(fetched(1, 1, epoch=4))


def test_producers_are_known_from_replicated_batches(files: FakeFiles) -> None:
    log = opened(files)
    log.append_replicated(fetched(0, 3, producer_id=7))
    state = log.producers.get(7)
    assert state is not None
    assert [batch.base_offset for batch in state.batches] == [0, 1, 2]


def test_a_full_disk_leaves_a_follower_between_two_batches(files: FakeFiles) -> None:
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES * 4))
    log.append_replicated(fetched(0, 1))
    files.fail_after(BATCH_BYTES * 3 + 10, errno.ENOSPC)
    with pytest.raises(OSError):
        log.append_replicated(fetched(1, 9))
    assert log.log_end_offset == 4
    log.check()
    files.fail_after(None)
    log.append_replicated(fetched(4, 6))
    assert base_offsets(log) == list(range(10))
    log.check()


# Elections


def test_an_election_writes_nothing(files: FakeFiles) -> None:
    empty = opened(files)
    empty.begin_epoch(3)
    assert empty.epochs.end_offset_for(3, empty.log_end_offset) == (3, 0)
    assert names(files) == []
    append(empty, epoch=3)
    before = files.read(f"{DIRECTORY}/{EPOCHS}")
    empty.begin_epoch(5)
    assert files.read(f"{DIRECTORY}/{EPOCHS}") == before


def test_a_leader_that_wrote_nothing_answers_for_the_epoch_before(files: FakeFiles) -> None:
    """KIP-279: what its predecessors wrote ends where its own epoch begins."""
    log = opened(files)
    for _ in range(10):
        append(log, epoch=2)
    log.begin_epoch(5)
    assert log.epochs.end_offset_for(2, log.log_end_offset) == (2, 10)
    assert log.epochs.end_offset_for(4, log.log_end_offset) == (2, 10)
    assert log.epochs.end_offset_for(5, log.log_end_offset) == (5, 10)


def test_the_first_batch_of_an_epoch_writes_down_that_it_began(files: FakeFiles) -> None:
    for _ in range(2):
        log = opened(files)
        log.begin_epoch(log.epochs.latest + 3)
        append(log, epoch=log.epochs.latest)
        assert log.epochs.stored() == log.epochs.entries
        log.close()
    assert opened(files).epochs.entries == [(2, 0), (5, 1)]


def test_a_begun_epoch_survives_a_clean_stop(files: FakeFiles) -> None:
    log = opened(files)
    append(log, epoch=2)
    log.begin_epoch(5)
    log.close()
    assert opened(files).epochs.entries == [(2, 0), (5, 1)]
    assert opened(files, clean=False).epochs.entries == [(2, 0), (5, 1)]


def test_an_older_epoch_does_not_begin(files: FakeFiles) -> None:
    log = opened(files)
    append(log, epoch=4)
    for epoch in (3, 4):
        log.begin_epoch(epoch)
        assert log.epochs.entries == [(4, 0)]


def test_a_truncation_to_the_end_forgets_an_epoch_that_wrote_nothing(files: FakeFiles) -> None:
    """The leader does not know it, and would say for ever that we diverge."""
    log = opened(files)
    append(log, epoch=2)
    for target in (1, 7):
        log.begin_epoch(5)
        log.truncate_to(target)
        assert log.epochs.entries == [(2, 0)]
    log.append_replicated(fetched(1, 1, epoch=2) + fetched(2, 1, epoch=7))
    assert log.epochs.entries == [(2, 0), (7, 2)]
    log.check()


def test_a_later_leader_takes_the_place_of_an_epoch_that_wrote_nothing(files: FakeFiles) -> None:
    log = opened(files)
    append(log, epoch=2)
    log.begin_epoch(5)
    log.append_replicated(fetched(1, 1, epoch=6))
    assert log.epochs.entries == [(2, 0), (6, 1)]


def test_an_epoch_that_began_in_an_empty_log_is_forgotten_by_truncating(files: FakeFiles) -> None:
    log = opened(files)
    log.begin_epoch(5)
    log.truncate_to(0)
    assert log.epochs.entries == []
    assert names(files) == []


def test_a_full_disk_keeps_a_begun_epoch_in_memory(files: FakeFiles) -> None:
    log: Log = opened(files)
    log.begin_epoch(3)
    files.fail_after(0)
    with pytest.raises(OSError):
        append(log, epoch=3)
    files.fail_after(None)
    append(log, epoch=3)
    assert log.epochs.stored() == [(3, 0)]
    log.check()


def test_files_beside_no_segment_say_nothing_about_an_empty_log(files: FakeFiles) -> None:
    files.make_directory(DIRECTORY)
    files.replace(f"{DIRECTORY}/{EPOCHS}", b"0\n2\n1 0\n9 50\n")
    log = opened(files, clean=False)
    assert log.epochs.latest == -1
    append(log, epoch=2)
    assert opened(files, clean=False).epochs.entries == [(2, 0)]


def test_a_log_that_begins_inside_a_batch_is_copied_from_that_batch_on(files: FakeFiles) -> None:
    batch = encode_batch([(NOW, None, bytes(20), ()) for _ in range(5)], base_offset=5, leader_epoch=0)
    log = opened(files)
    log.start_over_at(7)
    log.append_replicated(batch + fetched(10, 5))
    assert (log.log_start_offset, log.log_end_offset) == (7, 15)
    log.check()


@pytest.mark.parametrize("room", [0, 50, 200, 400])
def test_a_log_that_begins_inside_a_batch_stays_where_it_begins_on_a_full_disk(
    files: FakeFiles, room: int
) -> None:
    batch = encode_batch([(NOW, None, bytes(20), ()) for _ in range(5)], base_offset=5, leader_epoch=0)
    log = opened(files)
    log.start_over_at(7)
    files.fail_after(room)
    with pytest.raises(OSError) as raised:
        log.append_replicated(batch + fetched(10, 5))
    assert raised.value.errno == errno.ENOSPC
    # What is below is committed, and the replica has said that its log goes so far.
    assert log.log_start_offset == 7 and 7 <= log.log_end_offset < 15
    log.check()
