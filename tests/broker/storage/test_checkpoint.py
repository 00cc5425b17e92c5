"""What is remembered of the logs outside them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.broker.storage.checkpoint import Checkpoint, Remembered
from penstock.model import TopicId
from tests.support_files import FakeFiles

PATH = "/data/penstock-checkpoint"
ONE = TopicId(bytes(15) + b"\x11")
TWO = TopicId(bytes(15) + b"\x22")


@pytest.fixture
def files() -> FakeFiles:
    files = FakeFiles()
    files.make_directory("/data")
    return files


def loaded(files: FakeFiles) -> Checkpoint:
    checkpoint = Checkpoint(files, PATH)
    checkpoint.load()
    return checkpoint


def write(checkpoint: Checkpoint, *logs: tuple[TopicId, int, int, int]) -> None:
    """Topic, partition, recovery point and high watermark, start."""
    for topic_id, index, recovery_point, start in logs:
        checkpoint.remember(topic_id, index, Remembered(recovery_point, start, recovery_point))
    checkpoint.prepare_write()()


def test_what_was_written_is_read_back(files: FakeFiles) -> None:
    write(loaded(files), (ONE, 0, 100, 10), (TWO, 3, 7, 0))
    again = loaded(files)
    assert again.get(ONE, 0) == (100, 10, 100)
    assert again.get(TWO, 3) == (7, 0, 7)
    assert again.get(TWO, 4) == (0, 0, 0)


@pytest.mark.parametrize("high_watermark", [0, 7, 100, 2000])
def test_the_high_watermark_is_read_back(files: FakeFiles, high_watermark: int) -> None:
    checkpoint = loaded(files)
    checkpoint.remember(ONE, 0, Remembered(100, 10, high_watermark))
    checkpoint.prepare_write()()
    assert loaded(files).get(ONE, 0) == (100, 10, high_watermark)
    checkpoint.lower(ONE, 0, 50)
    assert loaded(files).get(ONE, 0) == (50, 10, min(50, high_watermark))


def test_a_changed_byte_is_noticed(files: FakeFiles) -> None:
    write(loaded(files), (ONE, 0, 100, 10))
    files.damage(PATH, files.size(PATH) - 3, 1)
    with pytest.raises(ValueError):
        loaded(files)


def test_what_was_lowered_is_durable_at_once(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10), (TWO, 0, 50, 40))
    checkpoint.lower(ONE, 0, 60)
    checkpoint.lower(TWO, 0, 30)
    checkpoint.lower(TWO, 0, 20)
    files.crash(random.Random(1))
    again = loaded(files)
    assert again.get(ONE, 0) == (60, 10, 60)
    assert again.get(TWO, 0) == (20, 20, 20)


def test_nothing_is_written_for_a_log_that_is_not_lowered(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    checkpoint.lower(ONE, 0, 100)
    checkpoint.lower(ONE, 0, 300)
    checkpoint.lower(TWO, 0, 0)
    assert files.list("/data") == ["penstock-checkpoint"]


def test_a_later_checkpoint_may_raise_it_again(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    checkpoint.lower(ONE, 0, 60)
    write(checkpoint, (ONE, 0, 80, 10))
    assert loaded(files).get(ONE, 0) == (80, 10, 80)
    checkpoint.lower(ONE, 0, 70)
    assert loaded(files).get(ONE, 0) == (70, 10, 70)
    write(loaded(files), (ONE, 0, 90, 10))
    assert loaded(files).get(ONE, 0) == (90, 10, 90)


def test_a_checkpoint_that_was_prepared_before_does_not_raise_it(files: FakeFiles) -> None:
    """It is written by another thread, which may be late."""
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    checkpoint.remember(ONE, 0, Remembered(110, 10, 110))
    late = checkpoint.prepare_write()
    checkpoint.lower(ONE, 0, 60)
    late()
    assert loaded(files).get(ONE, 0) == (60, 10, 60)
    checkpoint.lower(ONE, 0, 50)
    late()
    assert loaded(files).get(ONE, 0) == (50, 10, 50)


def test_the_lowered_do_not_pile_up(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    for count in range(20):
        write(checkpoint, (ONE, 0, 100 + count, 10))
        checkpoint.lower(ONE, 0, 60)
        assert loaded(files).get(ONE, 0) == (60, 10, 60)
    assert files.read(PATH + "-lowered").count(b"\n") == 1


def test_a_line_cut_short_counts_for_nothing(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    checkpoint.lower(ONE, 0, 60)
    checkpoint.lower(ONE, 0, 40)
    for cut in range(1, 30):
        files.open(PATH + "-lowered").truncate(files.size(PATH + "-lowered") - 1)
        assert loaded(files).get(ONE, 0) == (60, 10, 60), cut


def test_what_is_lowered_behind_a_line_cut_short_counts(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    checkpoint.lower(ONE, 0, 60)
    checkpoint.lower(ONE, 0, 40)
    files.open(PATH + "-lowered").truncate(files.size(PATH + "-lowered") - 9)
    loaded(files).lower(ONE, 0, 20)
    assert loaded(files).get(ONE, 0) == (20, 10, 20)


def test_a_log_that_was_forgotten_begins_anew(files: FakeFiles) -> None:
    """A replica that was given to another node and comes back, before the file was written again."""
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10), (TWO, 0, 100, 10))
    checkpoint.remember(ONE, 0, Remembered(110, 10, 110))
    late = checkpoint.prepare_write()
    checkpoint.forget(ONE, 0)
    checkpoint.renew(ONE, 0)
    checkpoint.renew(TWO, 0)
    late()
    assert loaded(files).get(ONE, 0) == (0, 0, 0)
    assert loaded(files).get(TWO, 0) == (100, 10, 100)


def test_a_log_that_the_file_has_forgotten_too_costs_no_write(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    checkpoint.forget(ONE, 0)
    write(checkpoint)
    checkpoint.renew(ONE, 0)
    checkpoint.renew(TWO, 0)
    assert files.list("/data") == ["penstock-checkpoint"]
    assert loaded(files).get(ONE, 0) == (0, 0, 0)


def test_a_full_disk_is_told(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 100, 10))
    files.fail_after(3)
    with pytest.raises(OSError):
        checkpoint.lower(ONE, 0, 60)
    files.fail_after(None)
    assert checkpoint.get(ONE, 0) == (60, 10, 60)
    # The file still says 100.
    checkpoint.lower(ONE, 0, 80)
    assert loaded(files).get(ONE, 0) == (60, 10, 60)


def test_what_a_full_disk_kept_from_being_lowered_is_not_written_again(files: FakeFiles) -> None:
    """The log is cut all the same, perhaps between two slices of those that are remembered."""
    checkpoint = loaded(files)
    checkpoint.remember(ONE, 0, Remembered(100, 10, 100))
    files.fail_after(3)
    with pytest.raises(OSError):
        checkpoint.lower(ONE, 0, 60)
    files.fail_after(None)
    checkpoint.prepare_write()()
    assert loaded(files).get(ONE, 0) == (60, 10, 60)
    checkpoint.lower(ONE, 0, 70)
    assert files.size(PATH + "-lowered") == 0, "the file is right again"


@pytest.mark.parametrize("seed", range(200))
def test_it_is_never_above_what_was_lowered_whatever_a_crash_leaves(files: FakeFiles, seed: int) -> None:
    chance = random.Random(seed)
    checkpoint = loaded(files)
    ceiling = 0
    late: list[Callable[[], None]] = []
    for _ in range(30):
        match chance.choice(["write", "prepare", "late", "lower", "crash", "kill"]):
            case "write":
                ceiling += chance.randrange(20)
                write(checkpoint, (ONE, 0, ceiling, 0))
                late.clear()  # one thread writes them, in order
            case "prepare":
                ceiling += chance.randrange(20)
                checkpoint.remember(ONE, 0, Remembered(ceiling, 0, ceiling))
                late.append(checkpoint.prepare_write())
            case "late" if late:
                late.pop(0)()
            case "lower":
                ceiling = chance.randint(0, ceiling)
                checkpoint.lower(ONE, 0, ceiling)
            case "crash":
                files.crash(chance)
                checkpoint = loaded(files)
                late.clear()
            case "kill":
                checkpoint = loaded(files)
                late.clear()
        assert max(loaded(files).get(ONE, 0)) <= ceiling


def test_of_a_log_that_is_as_new_nothing_is_written(files: FakeFiles) -> None:
    checkpoint = loaded(files)
    write(checkpoint, (ONE, 0, 0, 0), (TWO, 0, 5, 0))
    assert files.read(PATH).count(b"\n") == 2, "the title and one log"
    assert loaded(files).get(ONE, 0) == (0, 0, 0)
    # But of one that was another before, that must be said.
    write(checkpoint, (TWO, 0, 0, 0))
    assert loaded(files).get(TWO, 0) == (0, 0, 0)
