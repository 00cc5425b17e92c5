"""The leader epochs of a log, as OffsetForLeaderEpoch asks for them."""

from __future__ import annotations

import pytest

from penstock.log.epochs import LeaderEpochs
from tests.log.making import DIRECTORY, append, made_files, opened
from tests.support_files import FakeFiles


@pytest.fixture
def files() -> FakeFiles:
    files = made_files()
    files.make_directory(DIRECTORY)
    return files


def made(files: FakeFiles, *entries: tuple[int, int]) -> LeaderEpochs:
    epochs = LeaderEpochs(files, DIRECTORY)
    for epoch, start in entries:
        epochs.assign(epoch, start)
    return epochs


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (-1, (-1, -1)),  # nobody's epoch
        (1, (1, 10)),  # before our first: ends where our first begins
        (2, (2, 20)),
        (3, (2, 20)),  # never led here: the largest before it
        (4, (4, 30)),
        (6, (6, 100)),  # the current one ends with the log
        (7, (-1, -1)),  # not known yet
    ],
)
def test_the_end_of_an_epoch_is_where_the_next_one_begins(
    files: FakeFiles, asked: int, answer: tuple[int, int]
) -> None:
    assert made(files, (2, 10), (4, 20), (6, 30)).end_offset_for(asked, 100) == answer


def test_a_log_without_epochs_knows_nothing(files: FakeFiles) -> None:
    assert made(files).end_offset_for(0, 0) == (-1, -1)
    assert made(files).latest == -1


def test_an_epoch_begins_once(files: FakeFiles) -> None:
    epochs = made(files, (2, 10), (2, 15), (2, 20))
    assert epochs.entries == [(2, 10)]


def test_an_epoch_that_wrote_nothing_gives_way(files: FakeFiles) -> None:
    assert made(files, (1, 0), (2, 10), (3, 10)).entries == [(1, 0), (3, 10)]


def test_epochs_are_read_back_from_the_file(files: FakeFiles) -> None:
    made(files, (2, 10), (4, 20))
    assert files.read(f"{DIRECTORY}/leader-epoch-checkpoint") == b"0\n2\n2 10\n4 20\n"
    assert LeaderEpochs(files, DIRECTORY).entries == [(2, 10), (4, 20)]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"0\n",
        b"1\n0\n",
        b"0\n2\n1 1\n",
        b"0\n1\nx y\n",
        b"0\n2\n2 5\n1 9\n",
        b"\xff\xfe",
        b"0\n1\n1 2 3\n",
    ],
)
def test_an_unreadable_file_is_known_as_such(files: FakeFiles, text: bytes) -> None:
    files.replace(f"{DIRECTORY}/leader-epoch-checkpoint", text)
    assert LeaderEpochs(files, DIRECTORY).stored() is None


def test_no_beginning_of_the_file_is_taken_for_the_whole(files: FakeFiles) -> None:
    """A power failure may leave any part of it: "2 1" of an epoch that began at 111."""
    whole = b"0\n2\n0 0\n2 111\n"
    for size in range(len(whole)):
        files.replace(f"{DIRECTORY}/leader-epoch-checkpoint", whole[:size])
        assert LeaderEpochs(files, DIRECTORY).stored() is None, whole[:size]


@pytest.mark.parametrize("text", [None, b"0\n3\n0 0\n2 2\n", b"0\n3\n0 0\n? 2\n5 3\n"])
def test_what_cannot_be_read_is_made_again_from_the_batches(files: FakeFiles, text: bytes | None) -> None:
    """Without epochs a follower would go on behind records that its leader never had."""
    log = opened(files)
    for epoch in (0, 0, 2, 5):
        append(log, epoch=epoch)
    log.close()
    path = f"{DIRECTORY}/leader-epoch-checkpoint"
    if text is None:
        files.remove(path)
    else:
        files.replace(path, text)
    again = opened(files)
    assert again.recovery is None
    assert again.epochs.entries == [(0, 0), (2, 2), (5, 3)]
    assert again.epochs.end_offset_for(3, again.log_end_offset) == (2, 3)
    again.close()
    assert files.read(path) == b"0\n3\n0 0\n2 2\n5 3\n"


@pytest.mark.parametrize(("end", "left"), [(31, 3), (30, 2), (20, 1), (11, 1), (10, 0), (0, 0)])
def test_truncating_the_end_forgets_epochs_that_began_behind_it(
    files: FakeFiles, end: int, left: int
) -> None:
    epochs = made(files, (2, 10), (4, 20), (6, 30))
    epochs.truncate_from_end(end)
    assert epochs.entries == [(2, 10), (4, 20), (6, 30)][:left]
    assert LeaderEpochs(files, DIRECTORY).entries == epochs.entries


@pytest.mark.parametrize(
    ("start", "entries"),
    [
        (5, [(2, 10), (4, 20), (6, 30)]),
        (10, [(2, 10), (4, 20), (6, 30)]),
        (15, [(2, 15), (4, 20), (6, 30)]),
        (20, [(4, 20), (6, 30)]),
        (99, [(6, 99)]),
    ],
)
def test_truncating_the_start_moves_the_epoch_it_lies_in(
    files: FakeFiles, start: int, entries: list[tuple[int, int]]
) -> None:
    epochs = made(files, (2, 10), (4, 20), (6, 30))
    epochs.truncate_from_start(start)
    assert epochs.entries == entries
    epochs.check(start, 100)


def test_the_epoch_of_an_offset_is_found(files: FakeFiles) -> None:
    epochs = made(files, (2, 10), (4, 20))
    assert [epochs.epoch_at(offset) for offset in (9, 10, 19, 20, 99)] == [-1, 2, 2, 4, 4]


def test_nothing_is_written_when_nothing_changes(files: FakeFiles) -> None:
    epochs = made(files, (2, 10))
    writes = epochs.writes
    epochs.truncate_from_end(50)
    epochs.truncate_from_start(3)
    epochs.assign(2, 40)
    epochs.replace([(2, 10)])
    assert epochs.writes == writes
