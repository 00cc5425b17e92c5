"""The reserve of a data directory, and what a storage does with a disk that is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.quorum.snapshots import PART, Snapshots
from penstock.broker.storage.data_directory import CHECKPOINT, META_PROPERTIES, Directory
from penstock.broker.storage.reserve import NAME, PARTS, Reserve
from penstock.broker.storage.storage import Storage
from penstock.environment import Environment
from penstock.log.config import LogConfig
from penstock.raft.storage import SnapshotId
from penstock.sim.disk import CAPACITY_BYTES, Disk, SimFiles
from penstock.sim.loop import Loop, Process, Streams
from tests.broker.disks import Node, hosted

ROOM = CAPACITY_BYTES // 64


@pytest.fixture
def disk() -> Disk:
    return Disk(Streams(1)["disk"])


@pytest.fixture
def files(disk: Disk) -> SimFiles:
    files = SimFiles(disk, Process(Loop(Streams(1)), "node"))
    files.make_directory("/data")
    return files


def made(files: SimFiles) -> Reserve:
    reserve = Reserve(files, "/data")
    reserve.find()
    return reserve


def write(files: SimFiles, name: str, size: int = 100) -> Callable[[], None]:
    return lambda: files.replace(f"/data/{name}", bytes(size))


def test_what_must_be_written_is_written_from_the_reserve(files: SimFiles, disk: Disk) -> None:
    reserve = made(files)
    reserve.fill()
    disk.fill("/data")
    with pytest.raises(OSError):
        write(files, "records")()
    reserve.keeping(write(files, "vote"))
    assert files.exists("/data/vote") and not reserve.is_whole
    # One part lasts for long.
    for number in range(50):
        reserve.keeping(write(files, f"vote-{number}"))
    assert len([name for name in files.list("/data") if name.startswith(NAME)]) == PARTS - 1


def test_a_reserve_that_is_used_up_says_so(files: SimFiles, disk: Disk) -> None:
    reserve = made(files)
    reserve.fill()
    disk.fill("/data")
    with pytest.raises(OSError) as caught:
        reserve.keeping(write(files, "too-much", ROOM + 1))
    assert caught.value.errno == errno.ENOSPC
    assert not reserve.give()


def test_half_of_the_reserve_is_not_for_deleting(files: SimFiles) -> None:
    """A thousand logs that expire at once must not take from the metadata what it needs to say so."""
    reserve = made(files)
    reserve.fill()
    assert [reserve.give_spare() for _ in range(PARTS)] == [True, True, False, False]
    assert reserve.give()


def test_another_error_takes_nothing_from_the_reserve(files: SimFiles, disk: Disk) -> None:
    reserve = made(files)
    reserve.fill()
    disk.failing = ("/data/vote",)
    with pytest.raises(OSError) as caught:
        reserve.keeping(write(files, "vote"))
    assert caught.value.errno == errno.EIO
    assert reserve.is_whole


def test_there_is_room_only_when_the_reserve_is_whole_and_as_much_is_left(
    files: SimFiles, disk: Disk
) -> None:
    reserve = made(files)
    reserve.fill()
    disk.fill("/data")
    assert reserve.give()
    for left, is_room in ((ROOM // 4, False), (ROOM, False), (ROOM * 5 // 4 + 1, True)):
        disk.fill("/data", left_bytes=left)
        if is_room:
            reserve.look()
            assert reserve.is_whole
        else:
            with pytest.raises(OSError):
                reserve.look()
    assert sorted(files.list("/data"))[:PARTS] == [f"{NAME}.{part}" for part in range(PARTS)]


def test_the_next_process_finds_what_is_left_on_a_full_disk(files: SimFiles, disk: Disk) -> None:
    first = made(files)
    first.fill()
    disk.fill("/data")
    assert first.give()
    disk.fill("/data")
    files.replace("/data/penstock-reserve.probe", b"")
    second = made(files)
    assert not second.is_whole and not files.exists("/data/penstock-reserve.probe")
    assert [second.give() for _ in range(PARTS)] == [True] * (PARTS - 1) + [False]


# A snapshot that is fetched


def environment_of(files: SimFiles) -> Environment:
    return Environment(clock=None, files=files, network=None, random=None, spawn=None, processes=None)  # type: ignore[arg-type]


def test_what_comes_of_a_download_that_could_not_be_begun_is_not_written(disk: Disk, files: SimFiles) -> None:
    snapshots = Snapshots(environment_of(files), "/data")
    snapshot_id = SnapshotId(10, 1)
    disk.fill("/data")
    with pytest.raises(OSError, match="full"):
        snapshots.write_piece(snapshot_id, 0, b"one")
    disk.free("/data")
    snapshots.write_piece(snapshot_id, 3, b"two")
    assert snapshots.finish_download(snapshot_id) is None
    assert files.list("/data") == []


def test_a_download_is_begun_from_the_reserve(disk: Disk, files: SimFiles) -> None:
    reserve = Reserve(files, "/data")
    reserve.find()
    reserve.fill()
    disk.fill("/data")
    snapshots = Snapshots(environment_of(files), "/data", reserve.keeping)
    snapshots.write_piece(SnapshotId(10, 1), 0, b"one")
    snapshots.write_piece(SnapshotId(10, 1), 3, b"two")
    path = snapshots.path_of(SnapshotId(10, 1)) + PART
    assert files.read(path) == b"onetwo" and not reserve.is_whole


# A storage


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a", "b")


def full(node: Node, number: int) -> None:
    path = f"{node.paths[number]}/"
    node.files.failures = [(what, path, errno.ENOSPC) for what in ("append", "allocate", "make")]


def test_names_of_the_reserve_are_no_partitions(node: Node) -> None:
    storage = node.start()
    for directory in storage.directories:
        assert sum(name.startswith(NAME) for name in os.listdir(directory.path)) == PARTS
        assert not list(directory.partitions())


def failed_append(node: Node, storage: Storage) -> Directory:
    one = hosted()
    one.write(storage)
    home = storage.place(one)  # type: ignore[arg-type]
    error = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(1_000):
        storage.append_failed(one, error)  # type: ignore[arg-type]
    assert storage.has_no_room(one)  # type: ignore[arg-type]
    return home


def test_a_full_disk_is_told_of_once_and_goes_on_when_there_is_room(node: Node) -> None:
    changed: list[Directory] = []
    storage = node.start(on_room_changed=changed.append)
    home = failed_append(node, storage)
    assert storage.full_directory_ids == [home.id] and storage.offline_directory_ids == []
    assert sum("full" in line for line in node.logger.lines) == 1
    node.spawn.run()
    assert changed == [home]
    full(node, storage.directories.index(home))
    # What was removed from the reserve cannot be made again.
    assert home.reserve.give()
    for _ in range(5):
        storage.look_for_room()
    assert home.is_full and changed == [home]
    node.files.failures = []
    storage.look_for_room()
    assert not home.is_full and not storage.is_any_full and changed == [home, home]
    assert len(node.logger.lines) == 2


def test_a_log_that_expires_as_a_whole_does_so_on_a_full_disk(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.config.log = LogConfig(retention_bytes=0)
    log = one.write(storage)
    home = storage.place(one)  # type: ignore[arg-type]
    replace = node.files.replace

    def full_until_room_was_made(target: str, data: bytes, *, durable: bool = True) -> None:
        if home.reserve.is_whole:
            raise OSError(errno.ENOSPC, "No space left on device", target)
        replace(target, data, durable=durable)

    node.files.replace = full_until_room_was_made  # type: ignore[method-assign,assignment]
    assert log.expire(None, log.log_end_offset) == 1
    assert log.size_bytes == 0 and not home.reserve.is_whole
    log.check()


def test_a_new_partition_goes_to_a_disk_with_room(node: Node) -> None:
    storage = node.start()
    home = failed_append(node, storage)
    for index in range(1, 6):
        one = hosted(index)
        one.write(storage)
        assert storage.place(one) is not home  # type: ignore[arg-type]


def test_metadata_that_takes_from_the_reserve_keeps_records_from_being_written(node: Node) -> None:
    storage = node.start()
    assert storage.directories[0].reserve.give()
    node.files.failures = [("allocate", node.paths[0], errno.ENOSPC)]
    storage.look_for_room()
    assert storage.full_directory_ids == storage.directory_ids[:1]


def test_a_node_starts_on_a_full_disk_and_knows_that_it_is_full(node: Node) -> None:
    storage = node.start()
    home = failed_append(node, storage)
    while home.reserve.give():
        pass
    storage = node.start(failures=[("allocate", node.paths[0], errno.ENOSPC)])
    assert [directory.is_full for directory in storage.directories] == [True, False]
    node.files.failures = []
    storage.look_for_room()
    assert not storage.is_any_full


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EOPNOTSUPP])
def test_a_node_works_without_a_reserve_where_none_can_be_made(node: Node, number: int) -> None:
    """A limit for the size of files, say. It says so, and only once."""
    refused = [("allocate", path, number) for path in node.paths]
    storage = node.start(failures=refused)
    assert storage.offline_directory_ids == []
    assert sum("reserve" in line for line in node.logger.lines) == len(node.paths)
    storage.look_for_room()
    assert not storage.is_any_full
    # A disk that fills up has room again when its free space says so.
    home = failed_append(node, storage)
    storage.look_for_room()
    assert not home.is_full and home.is_online
    assert sum("reserve" in line for line in node.logger.lines) == len(node.paths)


@pytest.mark.parametrize("part", ["", "/penstock-reserve.probe"])
def test_a_reserve_that_cannot_be_taken_back_does_not_take_the_disk_offline(node: Node, part: str) -> None:
    storage = node.start()
    first = storage.directories[0]
    assert first.reserve.give()
    node.files.failures = [("allocate", first.path + part, errno.EFBIG)]
    for _ in range(2):
        storage.look_for_room()
    assert first.is_online and not first.is_full


def test_a_disk_that_fails_when_the_reserve_is_made_goes_offline(node: Node) -> None:
    storage = node.start(failures=[("allocate", node.paths[1], errno.EIO)])
    assert [directory.is_online for directory in storage.directories] == [True, False]


def test_a_checkpoint_is_written_on_a_full_disk(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    home = storage.place(one)  # type: ignore[arg-type]
    path = os.path.join(home.path, CHECKPOINT)
    attempts = 0
    replace = node.files.replace

    def full_until_room_was_made(target: str, data: bytes, *, durable: bool = True) -> None:
        nonlocal attempts
        if target == path:
            attempts += 1
            if home.reserve.is_whole:
                raise OSError(errno.ENOSPC, "No space left on device", target)
        replace(target, data, durable=durable)

    node.files.replace = full_until_room_was_made  # type: ignore[method-assign,assignment]
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    assert attempts == 2 and os.path.exists(path)


def written_cluster_ids(node: Node) -> list[bool]:
    """Whether each directory says which cluster it belongs to."""
    return ["cluster.id=abc" in Path(path, META_PROPERTIES).read_text() for path in node.paths]


def test_a_node_that_joins_on_a_full_disk_writes_its_cluster_down_when_there_is_room(node: Node) -> None:
    no_room = [("allocate", node.paths[0], errno.ENOSPC), ("replace", node.paths[0], errno.ENOSPC)]
    node.start(is_alone=False)
    storage = node.start(is_alone=False)
    while storage.directories[0].reserve.give():
        pass
    node.files.failures = no_room
    storage.adopt_cluster_id("abc")
    assert storage.cluster_id == "abc" and not node.failures and not node.failed
    assert written_cluster_ids(node) == [False, True]
    # The same disk at the next start.
    storage = node.start(is_alone=False, failures=no_room)
    assert storage.cluster_id == "abc"
    storage.look_for_room()
    assert written_cluster_ids(node) == [False, True]
    node.files.failures = []
    storage.look_for_room()
    storage.look_for_room()
    assert written_cluster_ids(node) == [True, True] and not storage.is_any_full


def test_the_cluster_is_written_down_from_the_reserve(node: Node) -> None:
    storage = node.start(is_alone=False)
    replace = node.files.replace
    reserve = storage.directories[0].reserve

    def full_until_room_was_made(target: str, data: bytes, *, durable: bool = True) -> None:
        if target.startswith(node.paths[0]) and reserve.is_whole:
            raise OSError(errno.ENOSPC, "No space left on device", target)
        replace(target, data, durable=durable)

    node.files.replace = full_until_room_was_made  # type: ignore[method-assign,assignment]
    storage.adopt_cluster_id("abc")
    assert written_cluster_ids(node) == [True, True] and not reserve.is_whole


@pytest.mark.parametrize("number", [0, 1])
def test_a_disk_that_fails_while_the_cluster_is_written_down_goes_offline(node: Node, number: int) -> None:
    storage = node.start(is_alone=False)
    node.files.failures = [("replace", node.paths[number], errno.EIO)]
    storage.adopt_cluster_id("abc")
    assert not storage.directories[number].is_online
    # Without the first one the node cannot go on.
    assert [bool(node.failures), bool(node.failed)] == [number == 0, number == 1]


@pytest.mark.parametrize("what", ["make", "replace"])
def test_a_new_disk_that_is_full_at_start_holds_nothing_that_could_come_back(node: Node, what: str) -> None:
    """What lay in the disk before it is lost, and can be fetched again to another."""
    before = node.start()
    placed_in = before.directory_ids[1]
    shutil.rmtree(node.paths[1])
    storage = node.start(failures=[(what, node.paths[1], errno.ENOSPC)])
    assert storage.directory_ids == before.directory_ids[:1]
    assert storage.has_lost(placed_in)
    # It was never used, so the next start misses nothing.
    assert storage.offline_directory_ids == []
    assert len(node.start().directory_ids) == 2


def test_a_disk_that_is_full_at_start_may_hold_what_it_held(node: Node) -> None:
    before = node.start()
    placed_in = before.directory_ids[1]
    for error in (errno.ENOSPC, errno.EIO):
        storage = node.start(failures=[("make", node.paths[1], error)])
        assert not storage.directories[1].is_online and not storage.has_lost(placed_in)
