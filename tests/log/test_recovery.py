"""What a log makes of its files when it was not closed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.log.config import LogConfig
from penstock.log.log import CorruptLog, Log
from penstock.protocol.records import encode_batch
from tests.log.making import (
    DIRECTORY,
    NOW,
    append,
    base_offsets,
    flush,
    made_batch,
    made_files,
    names,
    opened,
)
from tests.support_files import FakeFiles

BATCH_BYTES = len(made_batch()[0])
CONFIG = LogConfig(segment_bytes=BATCH_BYTES * 4, index_interval_bytes=1)


def path(base_offset: int, suffix: str = ".log") -> str:
    return f"{DIRECTORY}/{base_offset:020d}{suffix}"


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


@pytest.fixture
def log(files: FakeFiles) -> Log:
    """Segments at 0, 4, 8; epochs 0, 1, 2 of four batches each; two producers."""
    log = opened(files, CONFIG)
    for count in range(10):
        append(log, NOW + count, epoch=count // 4, producer=(count % 2, 0, count // 2))
    return log


def recovered(files: FakeFiles, recovery_point: int = 0) -> Log:
    log = opened(files, CONFIG, clean=False, recovery_point=recovery_point)
    log.check()
    return log


def test_nothing_is_lost_when_only_the_process_ended(files: FakeFiles, log: Log) -> None:
    again = recovered(files)
    assert base_offsets(again) == list(range(10))
    assert again.epochs.entries == [(0, 0), (1, 4), (2, 8)]
    assert again.recovery is not None
    assert (again.recovery.cut_bytes, again.recovery.set_aside) == (0, [])
    assert again.recovery.scanned_bytes == log.size_bytes


def test_only_segments_from_the_recovery_point_on_are_read(files: FakeFiles, log: Log) -> None:
    again = recovered(files, recovery_point=9)
    assert again.recovery is not None
    assert again.recovery.scanned_bytes == BATCH_BYTES * 2
    assert again.recovery_point == 9
    assert base_offsets(again) == list(range(10))
    assert again.epochs.entries == [(0, 0), (1, 4), (2, 8)]


@pytest.mark.parametrize("kept", range(0, BATCH_BYTES * 2 + 1, 5))
def test_a_torn_tail_is_cut(files: FakeFiles, log: Log, kept: int) -> None:
    files.open(path(8)).truncate(kept)
    again = recovered(files)
    assert again.log_end_offset == 8 + kept // BATCH_BYTES
    assert again.recovery is not None
    assert again.recovery.cut_bytes == kept % BATCH_BYTES
    assert files.size(path(8)) == kept // BATCH_BYTES * BATCH_BYTES
    assert append(again, epoch=2) == again.log_end_offset - 1


@pytest.mark.parametrize("tail", [bytes(1), bytes(61), bytes(5000), b"\xff" * 100, b"rubbish" * 50])
def test_rubbish_behind_the_last_batch_is_cut(files: FakeFiles, log: Log, tail: bytes) -> None:
    files.open(path(8)).append((tail,))
    again = recovered(files)
    assert again.log_end_offset == 10
    assert again.recovery is not None
    assert again.recovery.cut_bytes == len(tail)


@pytest.mark.parametrize("position", [0, 8, 11, 16, 17, 21, 25, 61, BATCH_BYTES - 1])
def test_nothing_behind_a_damaged_batch_survives(files: FakeFiles, log: Log, position: int) -> None:
    files.damage(path(4), BATCH_BYTES + position, 0x80)
    behind = files.read(path(4))[BATCH_BYTES:]
    later = files.read(path(8))
    again = recovered(files)
    assert again.log_end_offset == 5
    assert base_offsets(again) == [0, 1, 2, 3, 4]
    assert again.epochs.entries == [(0, 0), (1, 4)]
    # What lay behind is kept for a person to look at.
    assert files.read(path(4, ".log.corrupt")) == behind
    assert files.read(path(8, ".log.corrupt")) == later
    assert again.recovery is not None
    assert {path(4, ".log.corrupt"), path(8, ".log.corrupt")} <= set(again.recovery.set_aside)
    assert append(again, epoch=2) == 5


def remove_segments(files: FakeFiles) -> None:
    for base in (0, 4, 8):
        files.remove(path(base))


# What is done to the files, the recovery point, and where the damage is.
DAMAGE: dict[str, tuple[Callable[[FakeFiles], object], int, int]] = {
    "a damaged batch": (lambda files: files.damage(path(4), BATCH_BYTES, 0x80), 0, 5),
    "a damaged last batch": (lambda files: files.damage(path(8), BATCH_BYTES + 61, 0x80), 0, 9),
    "a tail that was durable": (lambda files: files.open(path(8)).truncate(BATCH_BYTES + 30), 10, 9),
    "a batch that was durable": (lambda files: files.open(path(8)).truncate(BATCH_BYTES), 10, 9),
    "a segment": (lambda files: files.remove(path(4)), 0, 4),
    "the last segment": (lambda files: files.remove(path(8)), 9, 8),
    "every segment": (remove_segments, 9, 0),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_that_may_not_be_cut_off_is_left_for_the_next_process_to_find(
    files: FakeFiles, log: Log, what: str
) -> None:
    """A process that cut it off and died before it told anybody would leave a log that is in order, and shorter."""
    do, recovery_point, offset = DAMAGE[what]
    do(files)
    found = {name: files.read(f"{DIRECTORY}/{name}") for name in names(files, ".log")}
    for _ in range(2):
        with pytest.raises(CorruptLog) as damage:
            opened(files, CONFIG, clean=False, recovery_point=recovery_point, may_cut=False)
        assert damage.value.offset == offset
        assert {name: files.read(f"{DIRECTORY}/{name}") for name in names(files, ".log")} == found
    told: list[int] = []
    again = opened(files, CONFIG, clean=False, recovery_point=recovery_point, before_cut=told.append)
    assert again.log_end_offset == offset
    assert set(told) == {offset}


def test_a_torn_tail_is_cut_off_whether_damage_may_be_or_not(files: FakeFiles, log: Log) -> None:
    files.open(path(8)).append((bytes(made_batch(size=200)[0])[:-30],))
    assert opened(files, CONFIG, clean=False, recovery_point=10, may_cut=False).log_end_offset == 10
    assert len(files.read(path(8))) == 2 * BATCH_BYTES


def test_what_was_set_aside_before_is_not_overwritten(files: FakeFiles, log: Log) -> None:
    files.replace(path(8, ".log.corrupt"), b"earlier")
    files.damage(path(4), 100, 0x80)
    recovered(files)
    assert files.read(path(8, ".log.corrupt")) == b"earlier"
    assert names(files, ".log.2.corrupt") == [f"{8:020d}.log.2.corrupt"]


def test_on_a_full_disk_nothing_is_cut_and_no_half_copies_pile_up(files: FakeFiles, log: Log) -> None:
    files.damage(path(4), 100, 0x80)
    before = files.read(path(4))
    for _ in range(3):
        files.fail_after(0)
        with pytest.raises(OSError, match="No space"):
            recovered(files)
    assert files.read(path(4)) == before
    assert names(files, ".corrupt") == []
    files.fail_after(None)
    assert recovered(files).log_end_offset == 5
    assert names(files, ".corrupt") != []


@pytest.mark.parametrize("tail", [b"", bytes(5000), "torn"])
def test_what_every_crash_leaves_behind_is_not_set_aside(
    files: FakeFiles, log: Log, tail: bytes | str
) -> None:
    data = bytes(made_batch(size=200)[0])[:-30] if isinstance(tail, str) else tail
    files.open(path(8)).append((data,))
    again = recovered(files)
    assert again.recovery is not None
    assert (again.recovery.cut_bytes, again.recovery.set_aside) == (len(data), [])


def test_below_the_recovery_point_even_half_a_batch_is_set_aside(files: FakeFiles, log: Log) -> None:
    files.open(path(8)).truncate(BATCH_BYTES + 30)
    again = recovered(files, recovery_point=10)
    assert again.log_end_offset == 9
    assert len(files.read(path(8, ".log.corrupt"))) == 30


def test_segments_behind_a_missing_one_are_set_aside(files: FakeFiles, log: Log) -> None:
    files.remove(path(4))
    again = recovered(files)
    assert again.log_end_offset == 4
    assert names(files, ".log") == [f"{0:020d}.log"]


def test_a_segment_that_overlaps_is_set_aside(files: FakeFiles, log: Log) -> None:
    batch = encode_batch([(NOW, None, b"v", ())], base_offset=2, leader_epoch=0)
    files.replace(path(2), bytes(batch))
    assert recovered(files).log_end_offset == 4


def test_a_batch_of_an_older_epoch_ends_the_log(files: FakeFiles, log: Log) -> None:
    """A segment that a truncation removed came back behind newer data."""
    batch = encode_batch([(NOW, None, b"v", ())], base_offset=10, leader_epoch=1)
    files.open(path(8)).append((batch,))
    assert recovered(files).log_end_offset == 10


def test_a_batch_that_belongs_elsewhere_ends_the_log(files: FakeFiles, log: Log) -> None:
    for base_offset in (9, 11):  # the checksum does not cover it
        batch = encode_batch([(NOW, None, b"v", ())], base_offset=base_offset, leader_epoch=2)
        files.open(path(8)).append((batch,))
        assert recovered(files).log_end_offset == 10


def test_indexes_are_made_again_exactly(files: FakeFiles, log: Log) -> None:
    log.close()
    suffixes = (".index", ".timeindex")
    good = {base + suffix: files.read(path(int(base), suffix)) for base in "048" for suffix in suffixes}
    for base in "048":
        for suffix in suffixes:
            files.replace(path(int(base), suffix), b"garbage")
    recovered(files).close()
    for name, content in good.items():
        assert files.read(path(int(name[0]), name[1:])) == content


def test_epochs_are_made_again_from_the_batches(files: FakeFiles, log: Log) -> None:
    files.remove(f"{DIRECTORY}/leader-epoch-checkpoint")
    assert recovered(files, recovery_point=9).epochs.entries == [(0, 0), (1, 4), (2, 8)]


def test_a_checkpoint_with_too_many_epochs_is_corrected(files: FakeFiles, log: Log) -> None:
    files.replace(f"{DIRECTORY}/leader-epoch-checkpoint", b"0\n4\n0 0\n1 4\n2 8\n9 200\n")
    assert recovered(files).epochs.entries == [(0, 0), (1, 4), (2, 8)]


def test_an_epoch_that_began_at_the_end_of_the_log_is_kept(files: FakeFiles, log: Log) -> None:
    log.epochs.assign(7, 10)
    assert recovered(files).epochs.entries == [(0, 0), (1, 4), (2, 8), (7, 10)]


def test_an_epoch_that_began_behind_the_end_of_the_log_is_forgotten(files: FakeFiles, log: Log) -> None:
    log.epochs.assign(7, 11)
    assert recovered(files).epochs.latest == 2


def test_an_epoch_that_a_batch_contradicts_is_forgotten(files: FakeFiles, log: Log) -> None:
    files.replace(f"{DIRECTORY}/leader-epoch-checkpoint", b"0\n2\n0 0\n1 10\n")
    assert recovered(files).epochs.entries == [(0, 0), (1, 4), (2, 8)]


def test_a_torn_tail_is_no_damage(files: FakeFiles, log: Log) -> None:
    files.open(path(8)).truncate(2 * BATCH_BYTES - 5)
    again = recovered(files, recovery_point=9)
    assert again.log_end_offset == 9
    assert again.recovery is not None and not again.recovery.was_cut


def test_less_than_the_disk_was_known_to_hold_is_damage(files: FakeFiles, log: Log) -> None:
    files.damage(path(8), 70, 1)
    again = recovered(files, recovery_point=9)
    assert again.log_end_offset == 8
    assert again.recovery is not None and again.recovery.was_cut


@pytest.mark.parametrize("position", [0, 8, 16])
def test_damage_before_the_recovery_point_is_told_and_nothing_is_cut(
    files: FakeFiles, log: Log, position: int
) -> None:
    """Found because, without a snapshot, producers and epochs are read from the batches."""
    log.close()
    for name in [*names(files, ".snapshot"), "leader-epoch-checkpoint"]:
        files.remove(f"{DIRECTORY}/{name}")
    files.damage(path(0), BATCH_BYTES + position, 0x80)
    with pytest.raises(CorruptLog) as found:
        opened(files, CONFIG, clean=False, recovery_point=9, may_cut=False)
    assert found.value.offset == 1
    again = opened(files, CONFIG, clean=False, recovery_point=9)
    assert again.recovery is not None
    assert again.recovery.damaged_at == 1
    assert (again.recovery.was_cut, again.recovery.set_aside, again.log_end_offset) == (False, [], 10)
    # Each of the others can be read, and tells what it can.
    assert base_offsets(again, 4) == [4, 5, 6, 7, 8, 9]
    assert again.epochs.entries == [(0, 0), (1, 4), (2, 8)]
    states = [again.producers.get(producer_id) for producer_id in (0, 1)]
    assert [state is not None and state.batches[-1].last_sequence for state in states] == [4, 4]
    # And a replica that has others is mended like this.
    again.truncate_to(1)
    again.check()
    assert again.log_end_offset == 1


def test_damage_among_the_batches_of_producers_is_told_once(files: FakeFiles, log: Log) -> None:
    log.close()
    for name in names(files, ".snapshot"):
        files.remove(f"{DIRECTORY}/{name}")
    files.damage(path(4), BATCH_BYTES, 0x80)
    again = opened(files, CONFIG)
    assert again.recovery is None
    with pytest.raises(CorruptLog) as found:
        append(again, epoch=2)
    assert found.value.offset == 5
    # The only copy goes on with what the other batches tell.
    assert append(again, epoch=2, producer=(0, 0, 5)) == 10
    state = again.producers.get(0)
    assert state is not None and state.batches[-1].last_sequence == 5


def test_a_cut_behind_damage_that_the_index_led_past_goes_back_to_the_damage(files: FakeFiles) -> None:
    log = opened(files, CONFIG)
    for count in range(10):
        append(log, NOW + count * 10)
    log.close()
    files.damage(path(4), BATCH_BYTES, 0x80)
    # The last entry but one becomes the last. It is wrong, so the index is made again, from the batches.
    files.damage(path(4, ".timeindex"), 1 * 12 + 7, 0x01)
    again = opened(files, CONFIG)
    warned: list[int] = []
    again.before_cut = warned.append
    again.truncate_to(7)
    assert (again.log_end_offset, warned) == (5, [7, 5])
    again.check()


def test_the_loss_of_every_segment_is_damage(files: FakeFiles, log: Log) -> None:
    for base_offset in (0, 4, 8):
        files.remove(path(base_offset))
    again = recovered(files, recovery_point=9)
    assert again.log_end_offset == 0
    assert again.recovery is not None and again.recovery.was_cut


def test_a_lost_segment_is_damage(files: FakeFiles, log: Log) -> None:
    files.remove(path(8))
    again = recovered(files, recovery_point=9)
    assert again.log_end_offset == 8
    assert again.recovery is not None and again.recovery.was_cut


def test_snapshots_from_above_the_recovery_point_are_not_believed(files: FakeFiles, log: Log) -> None:
    # As if written by a history that the crash undid.
    stranger = opened(made_files(), CONFIG)
    append(stranger, producer=(99, 0, 0))
    files.replace(path(8, ".snapshot"), stranger.producers.encode())
    files.replace(path(10, ".snapshot"), stranger.producers.encode())
    again = recovered(files, recovery_point=5)
    assert again.producers.get(99) is None
    again.close()
    for one in (again, opened(files, CONFIG)):
        assert one.producers.get(99) is None
        states = [one.producers.get(producer_id) for producer_id in (0, 1)]
        assert [state is not None and state.batches[-1].last_sequence for state in states] == [4, 4]


def test_a_recovered_log_keeps_snapshots_for_its_last_segments(files: FakeFiles, log: Log) -> None:
    for name in names(files, ".snapshot"):
        files.remove(f"{DIRECTORY}/{name}")
    recovered(files)
    assert names(files, ".snapshot") == [f"{offset:020d}.snapshot" for offset in (4, 8)]


def test_a_cut_first_segment_leaves_an_empty_log(files: FakeFiles, log: Log) -> None:
    files.damage(path(0), 30, 0x01)
    again = recovered(files)
    assert (again.log_start_offset, again.log_end_offset) == (0, 0)
    assert append(again) == 0


def test_a_clean_open_that_finds_a_torn_tail_recovers(files: FakeFiles, log: Log) -> None:
    """Said to be clean, but without the snapshot that closing writes."""
    files.open(path(8)).truncate(BATCH_BYTES + 10)
    again = opened(files, CONFIG, clean=True)
    assert again.log_end_offset == 9
    assert again.recovery is not None
    again.check()


def test_large_batches_and_chunk_borders(files: FakeFiles) -> None:
    log = opened(files)
    sizes = [(1 << 20) - 500, 300, 3 << 20, 10, 1 << 20, 5000]
    for size in sizes:
        append(log, size=size)
    again = opened(files, clean=False)
    assert again.log_end_offset == len(sizes)
    again.check()


@pytest.mark.parametrize("seed", range(30))
def test_what_was_flushed_survives_a_power_failure(seed: int) -> None:
    files = made_files()
    log = opened(files, CONFIG)
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 20)):
        append(log)
    flush(log)
    durable = log.log_end_offset
    for _ in range(chance.randint(0, 20)):
        append(log)
    files.crash(chance)
    again = recovered(files, recovery_point=durable)
    assert durable <= again.log_end_offset <= log.log_end_offset
    assert base_offsets(again) == list(range(again.log_end_offset))


@pytest.mark.parametrize("seed", range(60))
def test_a_truncation_to_the_end_of_a_segment_may_be_undone_by_a_power_failure(seed: int) -> None:
    files = made_files()
    log = opened(files, CONFIG)
    for count in range(12):
        append(log, NOW + count)
    flush(log)
    log.truncate_to(6)
    assert log.recovery_point == 6
    log.config = LogConfig(segment_bytes=BATCH_BYTES * 2, index_interval_bytes=1)
    append(log, epoch=1)  # rolls: the segment that was cut is no longer the active one
    files.crash(random.Random(seed))
    again = recovered(files, recovery_point=6)
    assert base_offsets(again) == list(range(again.log_end_offset))
    assert again.log_end_offset >= 6


@pytest.mark.parametrize("seed", range(60))
def test_a_log_emptied_by_retention_never_uses_an_offset_again(seed: int) -> None:
    files = made_files()
    log = opened(files, LogConfig(segment_bytes=BATCH_BYTES * 4, retention_ms=1000))
    for _ in range(10):
        append(log)
    flush(log)
    log.expire(NOW + 1001, 10)
    assert log.log_start_offset == 10
    files.crash(random.Random(seed))
    # The removal may have been undone, in part; without the checkpoint nothing else tells.
    assert recovered(files, recovery_point=10).log_end_offset == 10


def test_the_partition_directory_itself_is_made_durable(files: FakeFiles) -> None:
    synced: list[str] = []
    log = opened(files)
    append(log)
    sync_directory = files.sync_directory
    files.sync_directory = lambda path: (synced.append(path), sync_directory(path))[1]  # type: ignore[func-returns-value,method-assign]
    flush(log)
    assert synced == [DIRECTORY, "/data"]
    append(log)
    flush(log)
    assert synced == [DIRECTORY, "/data"], "once is enough"
