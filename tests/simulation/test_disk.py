"""The disk model: what survives a process, what survives power, and what does not."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.environment import Files
from penstock.sim.disk import BOOT_ID, Content, Disk, SimFiles
from penstock.sim.loop import Loop, Process, ProcessDied, Streams


class Machine:
    def __init__(self, seed: int = 1) -> None:
        self.loop = Loop(Streams(seed))
        self.disk = Disk(random.Random(seed))
        self.start()

    def start(self) -> SimFiles:
        self.process = Process(self.loop, "a")
        self.files = SimFiles(self.disk, self.process)
        return self.files

    def lose_power(self) -> SimFiles:
        self.process.end()
        self.disk.lose_power()
        return self.start()

    def kill(self) -> SimFiles:
        self.process.end()
        return self.start()


def test_it_is_what_the_environment_asks_for() -> None:
    files: Files = Machine().files
    files.make_directory("/data/t-0")
    assert files.open("/data/t-0/x").size == 0


def test_a_killed_process_leaves_everything_it_wrote() -> None:
    machine = Machine()
    machine.files.make_directory("/data/t-0")
    machine.files.open("/data/t-0/x").append([b"abc", b"def"])
    machine.files.replace("/data/y", b"y", durable=False)
    machine.files.rename("/data/t-0", "/data/t-1")
    files = machine.kill()
    assert files.read("/data/t-1/x") == b"abcdef"
    assert files.read("/data/y") == b"y"
    assert files.list("/data") == ["t-1", "y"]


def test_a_dead_process_cannot_touch_the_disk() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    file = machine.files.open("/data/x")
    file.append([b"a"])
    machine.process.end()
    for touch in (
        lambda: file.append([b"b"]),
        lambda: machine.files.remove("/data/x"),
        lambda: machine.files.exists("/data/x"),
        lambda: file.read_at(0, 1),
    ):
        with pytest.raises(ProcessDied):
            touch()


@given(
    st.integers(0, 10_000),
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.binary(max_size=2_000)),
            st.tuples(st.just("truncate"), st.floats(0, 1)),
            st.tuples(st.just("sync"), st.just(0)),
        ),
        max_size=20,
    ),
)
def test_what_was_synced_survives_power_loss(seed: int, steps: list[tuple[str, object]]) -> None:
    machine = Machine(seed)
    machine.files.make_directory("/data")
    file = machine.files.open("/data/x")
    file.append([b"begin"])
    file.prepare_sync()()
    machine.files.sync_directory("/data")
    written, durable, cut_to = b"begin", b"begin", 5
    for what, value in steps:
        if what == "append":
            assert isinstance(value, bytes)
            file.append([value])
            written += value
        elif what == "truncate":
            assert isinstance(value, float)
            size = int(len(written) * value)
            file.truncate(size)
            written = written[:size]
            cut_to = min(cut_to, size)
        else:
            file.prepare_sync()()
            durable = written
            cut_to = len(durable)
    left = machine.lose_power().read("/data/x")
    assert left[:cut_to] == durable[:cut_to]


def test_unsynced_bytes_are_kept_lost_torn_and_zeroed() -> None:
    seen = set()
    for seed in range(200):
        machine = Machine(seed)
        machine.files.make_directory("/data")
        file = machine.files.open("/data/x")
        file.prepare_sync()()
        machine.files.sync_directory("/data")
        file.append([b"a" * 1000])
        file.append([b"b" * 1000])
        left = machine.lose_power().read("/data/x")
        if left == b"a" * 1000 + b"b" * 1000:
            seen.add("kept")
        elif left == b"":
            seen.add("lost")
        elif b"\0" in left:
            seen.add("zeroed")
        else:
            seen.add("torn")
    assert seen == {"kept", "lost", "torn", "zeroed"}


def test_a_sync_covers_what_was_written_before_it_was_prepared() -> None:
    lost = 0
    for seed in range(50):
        machine = Machine(seed)
        machine.files.make_directory("/data")
        file = machine.files.open("/data/x")
        file.append([b"before"])
        early = file.prepare_sync()
        file.append([b"after"])
        late = file.prepare_sync()
        if seed % 2:
            late()
        early()
        machine.files.sync_directory("/data")
        left = machine.lose_power().read("/data/x")
        assert left.startswith(b"before")
        if seed % 2:
            assert left == b"beforeafter"
        lost += left != b"beforeafter"
    assert lost > 5


def test_names_are_durable_only_with_their_directory() -> None:
    seen = set()
    for seed in range(60):
        machine = Machine(seed)
        machine.files.make_directory("/data")
        machine.files.replace("/data/old", b"1")
        machine.files.rename("/data/old", "/data/new")
        file = machine.files.open("/data/made")
        file.append([b"x"])
        file.prepare_sync()()
        seen.add(tuple(machine.lose_power().list("/data")))
    assert seen == {("old",), ("new",), ("made", "new")}


def test_a_removed_file_may_come_back_until_its_directory_is_synced() -> None:
    back = 0
    for seed in range(40):
        machine = Machine(seed)
        machine.files.make_directory("/data")
        machine.files.replace("/data/x", b"1")
        machine.files.remove("/data/x")
        if seed % 2:
            machine.files.sync_directory("/data")
        exists = machine.lose_power().exists("/data/x")
        assert not (exists and seed % 2)
        back += exists
    assert back > 3


def test_a_directory_that_its_parent_does_not_know_is_lost_with_all_that_is_in_it() -> None:
    seen = set()
    for seed in range(40):
        machine = Machine(seed)
        machine.files.make_directory("/data/t-0")
        machine.files.replace("/data/t-0/x", b"1")
        files = machine.lose_power()
        seen.add(files.exists("/data/t-0/x"))
        assert files.exists("/data/t-0/x") == files.exists("/data/t-0")
    assert seen == {True, False}


def test_a_durable_replacement_is_the_old_or_the_new_file_wherever_the_process_dies() -> None:
    for changes in range(8):
        for power in (False, True):
            machine = Machine(changes)
            machine.files.make_directory("/data")
            machine.files.replace("/data/x", b"old")
            machine.files.changes_left = changes
            died = False
            try:
                machine.files.replace("/data/x", b"new")
            except ProcessDied:
                died = True
            assert died == (changes < 4)
            files = machine.lose_power() if power else machine.kill()
            assert files.read("/data/x") in ((b"old", b"new") if died else (b"new",))


def test_a_replacement_that_is_not_durable_may_be_torn_by_power_loss() -> None:
    seen = set()
    for seed in range(60):
        machine = Machine(seed)
        machine.files.make_directory("/data")
        machine.files.replace("/data/x", b"old")
        machine.files.replace("/data/x", b"new content", durable=False)
        seen.add(machine.lose_power().read("/data/x"))
    assert {b"old", b"new content"} < seen


def test_a_full_disk_refuses_writes_and_leaves_the_file_as_it_was() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    file = machine.files.open("/data/x")
    file.append([b"12345"])
    machine.disk.room_bytes = 3
    file.append([b"678"])
    with pytest.raises(OSError) as caught:
        file.append([b"9"])
    assert caught.value.errno == errno.ENOSPC
    assert machine.files.read("/data/x") == b"12345678"
    machine.disk.heal()
    file.append([b"9"])
    assert file.size == 9


def test_a_disk_can_be_filled_alone_and_removing_files_makes_room_on_it() -> None:
    machine = Machine()
    for directory in ("/disk1", "/disk2", "/disk22"):
        machine.files.make_directory(directory)
    old = machine.files.open("/disk2/old")
    old.append([b"12345678"])
    machine.disk.fill("/disk2")
    machine.files.open("/disk1/x").append([b"fits"])
    machine.files.open("/disk22/x").append([b"fits"])
    with pytest.raises(OSError) as caught:
        machine.files.open("/disk2/x").append([b"1"])
    with pytest.raises(OSError):
        machine.files.replace("/disk2/y", b"1")
    assert caught.value.errno == errno.ENOSPC
    old.truncate(5)
    assert machine.disk.free_bytes("/disk2") == 3
    machine.files.remove("/disk2/old")
    machine.files.replace("/disk2/y", b"12345678")
    machine.files.replace("/disk2/y", b"")
    assert machine.disk.free_bytes("/disk2/y") == 8
    assert machine.disk.is_full
    machine.disk.free("/disk2")
    assert not machine.disk.is_full
    machine.files.open("/disk2/x").append([bytes(100)])


def test_one_of_two_data_directories_can_fail() -> None:
    machine = Machine()
    for directory in ("/disk1", "/disk2"):
        machine.files.make_directory(directory)
    machine.disk.failing = ("/disk2",)
    machine.files.open("/disk1/x").append([b"fine"])
    with pytest.raises(OSError) as caught:
        machine.files.open("/disk2/x").append([b"not"])
    assert caught.value.errno == errno.EIO


def test_after_a_failed_fsync_the_next_one_lies() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    file = machine.files.open("/data/x")
    file.append([b"good"])
    file.prepare_sync()()
    machine.files.sync_directory("/data")
    file.append([b"lost"])
    machine.disk.failing_syncs = 1
    with pytest.raises(OSError):
        file.prepare_sync()()
    file.prepare_sync()()
    assert machine.files.read("/data/x") == b"goodlost"
    assert machine.lose_power().read("/data/x") == b"good\0\0\0\0"


def test_a_lock_is_held_until_the_process_ends() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    assert machine.files.lock("/data/.lock")
    other = SimFiles(machine.disk, Process(machine.loop, "a"))
    assert not other.lock("/data/.lock")
    machine.process.end()
    assert other.lock("/data/.lock")


def test_the_boot_id_changes_with_the_power_and_not_with_the_process() -> None:
    machine = Machine()
    boot_id = machine.files.read(BOOT_ID)
    assert machine.kill().read(BOOT_ID) == boot_id
    assert machine.lose_power().read(BOOT_ID) != boot_id


def test_a_file_opened_again_must_still_be_there() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    file = machine.files.open("/data/x")
    file.append([b"a"])
    machine.files.rename("/data/x", "/data/y")
    assert file.read_at(0, 1) == b"a"
    machine.disk.evictions = 1.0
    with pytest.raises(FileNotFoundError):
        file.read_at(0, 1)
    file.moved("/data/y")
    assert file.read_at(0, 1) == b"a"


def test_a_wiped_disk_is_empty() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    machine.files.replace("/data/x", b"1")
    machine.process.end()
    machine.disk.wipe()
    assert machine.start().list("/data") == []
    assert list(machine.disk.files()) == []


def test_a_flipped_bit_is_flipped_on_the_disk_too() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    machine.files.replace("/data/x", b"abc")
    content = machine.disk.find("/data/x")
    assert isinstance(content, Content)
    content.flip(1, 0x20, is_cached=False)
    assert machine.files.read("/data/x") == b"aBc"
    assert machine.lose_power().read("/data/x") == b"aBc"


def test_a_flipped_bit_shows_when_the_page_cache_is_dropped() -> None:
    machine = Machine()
    machine.files.make_directory("/data")
    machine.files.replace("/data/x", b"abc")
    machine.files.replace("/data/y", b"abc")
    cut, content = machine.disk.find("/data/x"), machine.disk.find("/data/y")
    assert isinstance(cut, Content) and isinstance(content, Content)
    for each in (cut, content):
        each.flip(1, 0x20, is_cached=True)
    assert machine.files.read("/data/y") == b"abc"
    # What is written again is as it was written.
    cut.truncate(1)
    cut.append(b"bd")
    machine.disk.drop_caches()
    assert machine.files.read("/data/x") == b"abd"
    assert machine.files.read("/data/y") == b"aBc"
    machine.disk.drop_caches()
    assert machine.files.read("/data/y") == b"aBc", "once"
    assert machine.lose_power().read("/data/y") == b"aBc"
