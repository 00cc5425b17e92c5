"""Compaction of a log that was cut meanwhile, on a disk that has no room, and after a crash."""

from __future__ import annotations

import errno

import pytest

from penstock.log.cleaner_job import CleaningJob, clean
from penstock.log.cleaning_state import CLEANING, CleaningState
from penstock.log.log import Log
from penstock.protocol.records import decode_header, encode_batch
from tests.log.making import DIRECTORY, NOW, append_marker, made_files, names, opened
from tests.log.test_compaction import RETENTION_MS, compact, config, contents, put, records, roll
from tests.support_files import FakeFiles


@pytest.fixture
def files() -> FakeFiles:
    return made_files()


def _latest(log: Log) -> dict[bytes | None, bytes | None]:
    return {key: value for _, key, value in contents(log)}


def _job(log: Log) -> CleaningJob:
    job = log.prepare_cleaning(log.log_end_offset, NOW, drop_below=0, table_bytes=24_000, load_factor=0.9)
    assert job is not None
    return job


def _delete_and_compact(log: Log, files: FakeFiles) -> None:
    """Delete key a, then write until the tombstone was compacted, and again after its time."""
    put(log, b"a", None, epoch=1)
    for _ in range(12):
        put(log, b"b", b"x" * 100, epoch=1)
    for wall_ms in range(NOW, NOW + 5 * RETENTION_MS, RETENTION_MS):
        for _ in range(4):
            put(log, b"roll", b"x" * 300, epoch=1)
        compact(log, files, wall_ms=wall_ms)


def test_what_is_written_after_a_truncation_is_dirty(files: FakeFiles) -> None:
    """An unclean election, or a damaged replica that fetches again: the cut is below the compacted part's end."""
    log = opened(files, config())
    put(log, b"a", b"1")
    for _ in range(20):
        put(log, b"c", b"x" * 100)
    roll(log)
    compact(log, files)
    assert log.first_dirty_offset > 10
    log.truncate_to(2)
    _delete_and_compact(log, files)
    assert _latest(log).get(b"a") is None, "a deleted value is back"


def test_what_recovery_has_cut_is_dirty(files: FakeFiles) -> None:
    log = opened(files, config())
    put(log, b"a", b"1")
    for _ in range(20):
        put(log, b"c%d" % _, b"x" * 100)
    roll(log)
    compact(log, files)
    assert log.first_dirty_offset > 10
    log.close()
    files.damage(f"{DIRECTORY}/{names(files, '.log')[1]}", 70, 1)
    log = opened(files, config(), clean=False, recovery_point=0)
    assert 0 < log.log_end_offset < 10
    _delete_and_compact(log, files)
    assert _latest(log).get(b"a") is None, "a deleted value is back"


def test_a_log_that_started_over_is_dirty_after_a_restart_too(files: FakeFiles) -> None:
    log = opened(files, config())
    for _ in range(20):
        put(log, b"c", b"x" * 100)
    roll(log)
    compact(log, files)
    log.start_over_at(0)
    put(log, b"a", b"1", epoch=1)
    put(log, b"d", b"1", epoch=1)
    log.close()
    log = opened(files, config())
    _delete_and_compact(log, files)
    assert _latest(log).get(b"a") is None, "a deleted value is back"


def test_a_log_knows_after_a_crash_what_was_committed_when_it_was_compacted(files: FakeFiles) -> None:
    """A value may be gone by the first swap, and the marker of what follows it lies above the compacted part."""
    log = opened(files, config())
    for number in range(40):
        put(log, b"%d" % (number % 20), b"x" * 100)
    roll(log)
    group = clean(files, _job(log)).groups[0]
    log.swapping.prepare_check(group)()
    log.swapping.prepare_intent(group)()
    assert log.swap(group)
    assert log.first_dirty_offset == 0
    end_offset = log.log_end_offset
    log.close()
    again = opened(files, config(), clean=False, recovery_point=0)
    assert again.committed_before == end_offset
    again.truncate_to(30)
    assert again.committed_before == 30
    put(again, b"a", b"1", epoch=1)
    again.close()
    third = opened(files, config())
    assert third.committed_before <= 30


def test_a_job_on_a_full_disk_leaves_no_files(files: FakeFiles) -> None:
    log = opened(files, config())
    for number in range(40):
        put(log, b"%d" % (number % 20), b"x" * 100)
    roll(log)
    job = _job(log)
    files.fail_after(1500)
    with pytest.raises(OSError) as raised:
        clean(files, job)
    assert raised.value.errno == errno.ENOSPC
    assert names(files, ".cleaned") == [], "the disk stays full"


def _swapped_without_end(files: FakeFiles) -> Log:
    """The first group is swapped, but the disk was full when its intent should have been removed."""
    log = opened(files, config(segment_bytes=1000))
    for number in range(40):
        put(log, b"k%d" % number if number % 3 else b"often", b"%d" % number + b"x" * 40)
    put(log, b"last", b"x" * 900)
    put(log, b"active", b"x" * 900)
    result = clean(files, _job(log))
    group = result.groups[0]
    log.swapping.prepare_check(group)()
    log.swapping.prepare_intent(group)()
    assert log.swap(group)
    files.fail_after(0)
    log.swapping.prepare_end()()
    files.fail_after(None)
    return log


def test_an_intent_that_could_not_be_removed_is_not_applied_to_the_next_job(files: FakeFiles) -> None:
    log = _swapped_without_end(files)
    before = _latest(log)
    # The next pass; the broker is shut down when its files are written and nothing is announced.
    log.config = config(segment_bytes=4000)
    clean(files, _job(log))
    log.close()
    log = opened(files, config(segment_bytes=1000))
    assert _latest(log) == before
    log.check()


def test_an_intent_that_could_not_be_removed_is_not_applied_to_half_a_file(files: FakeFiles) -> None:
    log = _swapped_without_end(files)
    before = _latest(log)
    job = _job(log)
    # The job is killed while it writes its first file.
    torn = files.open(f"{DIRECTORY}/{job.sources[0].base_offset:020d}.log.cleaned")
    torn.append((files.read(f"{DIRECTORY}/{job.sources[0].base_offset:020d}.log")[:100],))
    log.close()
    log = opened(files, config(segment_bytes=1000))
    assert _latest(log) == before
    log.check()


def test_an_intent_that_a_start_could_not_remove_is_not_applied_later(files: FakeFiles) -> None:
    log = opened(files, config(segment_bytes=1000))
    for number in range(40):
        put(log, b"k%d" % number if number % 3 else b"often", b"%d" % number + b"x" * 40)
    put(log, b"last", b"x" * 900)
    put(log, b"active", b"x" * 900)
    group = clean(files, _job(log)).groups[0]
    log.swapping.prepare_check(group)()
    log.swapping.prepare_intent(group)()
    before = _latest(log)
    log.close()
    files.fail_after(0)
    log = opened(files, config(segment_bytes=1000))
    files.fail_after(None)
    after = _latest(log)
    assert after == before
    log.config = config(segment_bytes=4000)
    clean(files, _job(log))
    log.close()
    log = opened(files, config(segment_bytes=1000))
    assert _latest(log) == before
    log.check()


def test_the_end_of_a_pass_is_not_noted_in_a_topic_that_was_made_again(files: FakeFiles) -> None:
    """The topic is deleted and made again while the last work of a pass waits for its thread."""
    log = opened(files, config())
    for _ in range(20):
        put(log, b"c", b"x" * 100)
    roll(log)
    compact(log, files)
    end = log.swapping.prepare_end(CleaningState(log.first_dirty_offset))
    log.moved("/data/topic-0.deleted")
    for name in names(files, ""):
        files.remove(f"{DIRECTORY}/{name}")
    log = opened(files, config())
    put(log, b"a", b"1", epoch=1)
    end()
    log.close()
    log = opened(files, config())
    _delete_and_compact(log, files)
    assert _latest(log).get(b"a") is None, "a deleted value is back"


def test_aborted_records_stay_hidden_when_only_the_rename_of_the_log_file_survives(files: FakeFiles) -> None:
    """As swapping.py says, any of the renames may be there or not after a power failure.

    Segment A without and B with an aborted transaction are merged. The table is full before the transaction, so its
    records are copied as they are.
    """
    log = opened(files, config(segment_bytes=500))
    put(log, b"first", b"x" * 100, timestamp=NOW + 5)
    put(log, b"c", b"x" * 200)
    put(log, b"c", b"x" * 20)
    many = encode_batch([(NOW, b"m%d" % number, b"", ()) for number in range(9)])
    log.append(many, decode_header(many), 0)
    hidden = put(log, b"h", b"aborted", producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    append_marker(log, 5, is_commit=False)
    for _ in range(2):
        put(log, b"roll", b"x" * 1000)
    before = log.aborted_transactions(0, log.log_end_offset)
    assert [entry.first_offset for entry in before] == [hidden]
    log.config = config(segment_bytes=1200)
    job = log.prepare_cleaning(log.log_end_offset, NOW, drop_below=0, table_bytes=24 * 10, load_factor=0.9)
    assert job is not None
    result = clean(files, job)
    group = result.groups[0]
    assert len(group.sources) > 1 and result.clean_before <= hidden < group.end_offset and group.has_aborted
    log.swapping.prepare_check(group)()
    log.swapping.prepare_intent(group)()
    end = log.log_end_offset
    kept = {f"{DIRECTORY}/{CLEANING}": files.read(f"{DIRECTORY}/{CLEANING}")}
    base = f"{DIRECTORY}/{group.base_offset:020d}"
    for suffix in (".index", ".timeindex"):
        kept[base + suffix] = files.read(base + suffix)
        kept[f"{base}{suffix}.cleaned"] = files.read(f"{base}{suffix}.cleaned")
    kept[f"{base}.txnindex.cleaned"] = files.read(f"{base}.txnindex.cleaned")
    log.close()
    log = opened(files, config(segment_bytes=1200))  # completes the swap; then undo some of it
    log.close()
    files.remove(f"{base}.txnindex")
    for path, data in kept.items():
        files.replace(path, data)
    log = opened(files, config(segment_bytes=1200), clean=False, recovery_point=end)
    assert hidden in [one.offset for one in records(log)]
    assert [entry.last_offset for entry in log.aborted_transactions(0, end)] == [before[0].last_offset]
