"""Several data directories: whose they are, what lies where, and what is left when a disk fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from penstock.broker.options import ServeError
from penstock.broker.storage.data_directory import METADATA_DIRECTORY
from penstock.log.log import CorruptLog
from penstock.log.names import write_partition_metadata
from penstock.metadata.image import Image, PartitionImage, TopicImage
from penstock.model import BrokerId, TopicId
from tests.broker.disks import NODE, Hosted, Node, hosted
from tests.log.test_replicated import fetched


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a", "b", "c")


def image(
    *partitions: Hosted, places: dict[int, bytes] | None = None, replicas: tuple[int, ...] = (NODE,)
) -> Image:
    topics: dict[str, TopicImage] = {}
    for one in partitions:
        known = topics.get(one.topic, TopicImage(one.topic, one.topic_id))
        directories = tuple((places or {}).get(one.index, bytes(16)) for _ in replicas)
        brokers = tuple(map(BrokerId, replicas))
        partition = PartitionImage(one.index, brokers[0], 0, 0, brokers, brokers, directories)
        topics[one.topic] = known._replace(partitions=(*known.partitions, partition))
    return Image(topics=topics, topics_by_id={topic.id: topic for topic in topics.values()})


# Whose directories


def test_every_directory_gets_an_id_of_its_own(node: Node) -> None:
    first = node.start()
    assert len(set(first.directory_ids)) == 3
    assert first.cluster_id is not None
    again = node.start()
    assert again.directory_ids == first.directory_ids
    assert again.cluster_id == first.cluster_id
    assert not any(directory.is_new for directory in again.directories)


def test_a_fresh_node_of_a_cluster_learns_its_cluster_id_from_the_others(node: Node) -> None:
    first = node.start(is_alone=False)
    assert first.cluster_id is None
    ids = first.directory_ids
    again = node.start(is_alone=False)
    assert again.cluster_id is None
    again.adopt_cluster_id("abc")
    third = node.start(is_alone=False)
    assert (third.cluster_id, third.directory_ids) == ("abc", ids)
    third.adopt_cluster_id("abc")
    with pytest.raises(ServeError, match="belongs to the cluster abc"):
        third.adopt_cluster_id("xyz")


def test_a_new_disk_gets_a_new_id(node: Node) -> None:
    before = node.start()
    ids, cluster_id = before.directory_ids, before.cluster_id
    shutil.rmtree(node.paths[1])
    after = node.start()
    assert after.cluster_id == cluster_id
    assert [directory.is_new for directory in after.directories] == [False, True, False]
    assert after.directory_ids[0] == ids[0] and after.directory_ids[2] == ids[2]
    assert [after.has_lost(id) for id in ids] == [False, True, False]
    assert not after.has_lost(after.directory_ids[1])


@pytest.mark.parametrize("reserved", [0, 1, 2])
def test_an_id_with_a_meaning_of_its_own_is_not_lost(node: Node, reserved: int) -> None:
    assert not node.start().has_lost(reserved.to_bytes(16, "big"))


def test_directories_of_different_owners_are_refused(node: Node, tmp_path: Path) -> None:
    node.start()
    with pytest.raises(ServeError, match="belongs to node 7"):
        node.start(node_id=8)
    other = Node(tmp_path, "d")
    other.seed = 100
    other.start()
    node.paths.append(other.paths[0])
    with pytest.raises(ServeError, match="another cluster"):
        node.start()


def test_a_copy_of_a_directory_is_refused(node: Node) -> None:
    node.start()
    shutil.copy(f"{node.paths[1]}/meta.properties", f"{node.paths[2]}/meta.properties")
    with pytest.raises(ServeError, match=r"same directory\.id"):
        node.start()


@pytest.mark.parametrize("place", [0, 1])
def test_a_directory_with_logs_and_no_owner_is_refused(node: Node, place: int) -> None:
    storage = node.start()
    for index in range(3):
        hosted(index).write(storage)
    os.remove(f"{node.paths[place]}/meta.properties")
    os.mkdir(f"{node.paths[2]}/holiday-2024")
    with pytest.raises(ServeError, match="missing beside existing data"):
        node.start()


def test_a_new_directory_with_what_is_named_like_a_partition_is_refused_and_left_alone(node: Node) -> None:
    os.makedirs(f"{node.paths[1]}/holiday-2024")
    with pytest.raises(ServeError, match=r"holds holiday-2024.*choose an empty --data-dir"):
        node.start()
    assert os.path.isdir(f"{node.paths[1]}/holiday-2024")


def test_a_directory_given_twice_is_refused(node: Node) -> None:
    node.paths.append(node.paths[0] + "/")
    with pytest.raises(ServeError, match="twice"):
        node.start()


def test_directories_in_another_order_are_refused(node: Node) -> None:
    node.start()
    os.mkdir(f"{node.paths[0]}/{METADATA_DIRECTORY}")
    node.paths.reverse()
    with pytest.raises(ServeError, match="give that --data-dir first"):
        node.start()


def test_a_node_that_is_alone_does_not_start_without_its_metadata(node: Node) -> None:
    cluster_id = node.start().cluster_id
    shutil.rmtree(node.paths[0])
    with pytest.raises(ServeError, match="metadata is missing"):
        node.start()
    # Others can give it back.
    assert node.start(is_alone=False).cluster_id == cluster_id


def test_a_used_directory_is_refused(node: Node) -> None:
    with pytest.raises(ServeError, match="another broker is running"):
        node.start(is_used=True)


# Where partitions lie


def test_new_partitions_go_where_there_are_fewest(node: Node) -> None:
    storage = node.start()
    for index in range(9):
        hosted(index).write(storage)
    assert [len(list(directory.partitions())) for directory in storage.directories] == [3, 3, 3]
    again = node.start()
    assert [directory.partition_count for directory in again.directories] == [3, 3, 3]


def test_a_partition_is_found_where_it_lies(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(6)]
    for one in partitions:
        one.write(storage, one.index + 1)
    places = [storage.directory_of(one) for one in partitions]  # type: ignore[arg-type]
    assert None not in places
    node.stop(storage, *partitions)

    again = node.start()
    again.quarantine_strays(image(*partitions))
    for one, place in zip(partitions, places):
        fresh = hosted(one.index)
        assert place is not None
        assert fresh.open(again).log_end_offset == one.index + 1
        found = again.directory_of(fresh)  # type: ignore[arg-type]
        assert found is not None and found.path == place.path


def test_a_partition_without_files_goes_where_the_metadata_has_it(node: Node) -> None:
    storage = node.start()
    wanted = storage.directories[2]
    one = hosted()
    one.open(storage, wanted.id)
    storage.make_directory(one)  # type: ignore[arg-type]
    assert node.where("t-0") == [wanted.path]


def test_a_partition_that_is_there_twice_is_the_one_the_metadata_names(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    node.stop(storage, one)
    home = storage.directory_of(one)  # type: ignore[arg-type]
    assert home is not None
    other = next(directory for directory in storage.directories if directory is not home)
    shutil.copytree(f"{home.path}/t-0", f"{other.path}/t-0")
    for named, spare in ((other, home), (home, other)):
        again = node.start()
        again.quarantine_strays(image(one, places={0: named.id}))
        assert node.where("t-0") == [named.path]
        assert node.strays(spare.path) == ["t-0"]
        for directory in again.directories:
            assert directory.partition_count == len(list(directory.partitions()))
        shutil.copytree(f"{named.path}/t-0", f"{spare.path}/t-0")
        shutil.rmtree(next(Path(spare.path).glob("*-stray")))


def test_of_two_namesakes_the_one_with_the_topics_id_is_right(node: Node) -> None:
    storage = node.start()
    first, second, third = storage.directories
    for directory, topic_id in ((first, b"old"), (second, b"new"), (third, b"old")):
        os.mkdir(f"{directory.path}/t-0")
        write_partition_metadata(node.files, f"{directory.path}/t-0", TopicId(topic_id.rjust(16)))
    right = Hosted("t", 0, b"new".rjust(16))
    storage.quarantine_strays(image(right, places={0: third.id}))
    assert node.where("t-0") == [second.path]


def test_what_no_metadata_explains_is_set_aside(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(3)]
    for one in partitions:
        one.write(storage)
    namesake = Hosted("t", 1, bytes(15) + b"x")
    known = image(partitions[0], Hosted("u", 0, bytes(15) + b"u"))
    storage.quarantine_strays(known)
    assert sorted(name for path in node.paths for name in node.strays(path)) == ["t-1", "t-2"]
    assert len(node.where("t-0")) == 1
    assert not storage.holds(namesake)  # type: ignore[arg-type]


def test_a_replica_that_the_metadata_gave_to_others_is_removed(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    storage.quarantine_strays(image(one, replicas=(1, 2)))
    assert node.where("t-0") == []
    node.spawn.run()
    assert not any(name.startswith("t-0") for path in node.paths for name in os.listdir(path))


def test_a_namesake_of_a_replica_that_is_not_ours_is_set_aside(node: Node) -> None:
    storage = node.start()
    hosted().write(storage)
    storage.quarantine_strays(image(Hosted("t", 0, bytes(15) + b"x"), replicas=(1, 2)))
    assert [name for path in node.paths for name in node.strays(path)] == ["t-0"]


def test_metadata_of_before_does_not_delete_what_lies_there_now(node: Node) -> None:
    """A start replays it from a snapshot: topics that are long gone are deleted once more."""
    storage = node.start()
    late, back = hosted(topic="l"), hosted(topic="b")
    late.write(storage)
    back.write(storage)
    node.stop(storage, late, back)
    again = node.start()
    # Deleted and made anew under its name, and moved away and back.
    again.delete_log(Hosted("l", 0, bytes(15) + b"x"))  # type: ignore[arg-type]
    again.delete_log(hosted(topic="b"))  # type: ignore[arg-type]
    again.quarantine_strays(image(late, back))
    node.spawn.run()
    assert hosted(topic="l").open(again).log_end_offset == 3
    assert hosted(topic="b").open(again).log_end_offset == 3


def test_what_was_deleted_while_the_node_was_away_is_removed_and_not_set_aside(node: Node) -> None:
    storage = node.start()
    gone, renewed, moved = hosted(topic="g"), hosted(topic="r"), hosted(topic="m")
    for one in (gone, renewed, moved):
        one.write(storage)
    node.stop(storage, gone, renewed, moved)
    again = node.start()
    for one in (gone, renewed, moved):
        again.delete_log(Hosted(one.topic, 0, one.topic_id))  # type: ignore[arg-type]
    namesake = Hosted("r", 0, bytes(15) + b"x")
    again.quarantine_strays(image(namesake, Hosted("m", 0, moved.topic_id), replicas=(1, 2)))
    node.spawn.run()
    left = [name for path in node.paths for name in os.listdir(path)]
    assert not any(name.endswith(("-0", "-stray", "-delete")) for name in left)
    # Should it come back, it is not missed.
    assert hosted(topic="m").open(again).log_end_offset == 0


def test_a_partition_that_its_checkpoint_remembers_is_missed(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    node.stop(storage, one)
    home = node.where("t-0")[0]
    shutil.rmtree(f"{home}/t-0")
    again = node.start()
    again.quarantine_strays(image(one))
    index = node.paths.index(home)
    with pytest.raises(OSError, match="held data"):
        hosted().open(again, again.directory_ids[index])
    # The others have it, and it is not in sync: it begins anew.
    fresh = hosted()
    again.give_up(fresh, 0)  # type: ignore[arg-type]
    assert fresh.write(again).log_end_offset == 3


def test_a_replica_that_comes_back_is_not_measured_by_the_one_that_left(node: Node) -> None:
    """The old recovery point would keep a start after a crash from looking at the new bytes."""
    storage = node.start()
    storage.quarantine_strays(image())
    one = hosted()
    one.write(storage, 50)
    offset, work = one.log.prepare_flush()
    work()
    one.log.flushed(offset)
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    storage.delete_log(one)  # type: ignore[arg-type]
    back = hosted()
    back.write(storage, 3)
    again = node.start()
    found = hosted().open(again)
    assert found.log_end_offset == 3
    assert found.recovery is not None and not found.recovery.was_cut


def test_what_is_deleted_while_a_checkpoint_is_gathered_is_not_remembered_again(tmp_path: Path) -> None:
    storage = Node(tmp_path, "a").start()
    storage.quarantine_strays(image())
    one = hosted()
    one.write(storage, 50)
    offset, work = one.log.prepare_flush()
    work()
    one.log.flushed(offset)
    one.is_deleted = True
    storage.delete_log(one)  # type: ignore[arg-type]
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    assert storage.directories[0].checkpoint.get(one.topic_id, one.index) == (0, 0, 0)


def test_a_log_that_is_cut_before_the_checkpoint_is_written_is_remembered_as_shorter(node: Node) -> None:
    storage = node.start()
    one = hosted()
    log = one.write(storage, 50)
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)
    storage.remember([one])  # type: ignore[list-item]
    log.truncate_to(10)
    log.append_replicated(fetched(10, 10, epoch=2))
    storage.prepare_checkpoint()()
    found = hosted().open(node.start())
    assert found.log_end_offset == 20
    assert found.recovery is not None and not found.recovery.was_cut


def test_a_log_that_is_cut_is_remembered_as_shorter_before_it_grows_again(node: Node) -> None:
    storage = node.start()
    one = hosted()
    log = one.write(storage, 50)
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)
    log.delete_before(40)
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    log.truncate_to(10)
    log.append_replicated(fetched(10, 10, epoch=2))
    found = hosted().open(node.start())
    assert (found.log_start_offset, found.log_end_offset) == (10, 20)
    assert found.recovery is not None
    assert found.recovery.scanned_bytes == found.size_bytes
    assert not found.recovery.was_cut


@pytest.mark.parametrize("boot_id", [b"boot 1", b"boot 2"], ids=["killed", "power lost"])
def test_more_than_a_torn_tail_is_damage(node: Node, boot_id: bytes) -> None:
    """Nobody has written down how much was flushed since the checkpoint: a flushed replica has confirmed it."""
    storage = node.start()
    log = hosted().write(storage, 5)
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)
    (segment,) = Path(node.where("t-0")[0], "t-0").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    found = hosted().open(node.start(boot_id=boot_id))
    assert found.log_end_offset == 2
    assert found.recovery is not None and found.recovery.was_cut


def test_a_torn_tail_is_no_damage_after_a_power_failure(node: Node) -> None:
    storage = node.start()
    hosted().write(storage, 5)
    (segment,) = Path(node.where("t-0")[0], "t-0").glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-7])
    found = hosted().open(node.start(boot_id=b"boot 2"))
    assert found.log_end_offset == 4
    assert found.recovery is not None and not found.recovery.was_cut


def test_a_high_watermark_is_not_remembered_beyond_a_cut(node: Node) -> None:
    storage = node.start()
    one = hosted()
    log = one.write(storage, 50)
    one.high_watermark = 30
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    assert log.recovery_point == 0
    again = node.start()
    fresh = hosted()
    fresh.open(again)
    assert again.remembered_high_watermark(fresh) == 30  # type: ignore[arg-type]
    fresh.log.truncate_to(20)
    again = node.start()
    fresh = hosted()
    fresh.open(again)
    assert again.remembered_high_watermark(fresh) == 20  # type: ignore[arg-type]


def test_damage_is_found_again_until_it_may_be_cut_off(node: Node) -> None:
    """The checkpoint tells of it too. After the cut the log grows, and it would speak of other bytes."""
    storage = node.start()
    one = hosted()
    log = one.write(storage, 50)
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)
    one.high_watermark = 50
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    (segment,) = Path(node.where("t-0")[0], "t-0").glob("*.log")
    segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2 + 1])
    found = segment.read_bytes()
    for _ in range(2):
        with pytest.raises(CorruptLog) as damage:
            hosted().open(node.start(), may_cut=False)
        assert damage.value.offset == 25
        assert segment.read_bytes() == found
    log = hosted().open(node.start())
    assert log.log_end_offset == 25
    assert log.recovery is not None and log.recovery.was_cut
    log.append_replicated(fetched(25, 10, epoch=2))
    again = node.start()
    fresh = hosted()
    assert fresh.open(again).log_end_offset == 35
    assert fresh.log.recovery is not None and not fresh.log.recovery.was_cut
    assert again.remembered_high_watermark(fresh) == 25  # type: ignore[arg-type]


def test_a_log_that_started_over_lower_keeps_what_it_then_got(node: Node) -> None:
    storage = node.start()
    one = hosted()
    log = one.write(storage, 50)
    log.delete_before(40)
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    log.start_over_at(5)
    log.append_replicated(fetched(5, 10, epoch=2))
    found = hosted().open(node.start())
    assert (found.log_start_offset, found.log_end_offset) == (5, 15)


def test_a_deleted_log_frees_its_name_and_its_place(node: Node) -> None:
    storage = node.start()
    storage.quarantine_strays(image())
    partitions = [hosted(index) for index in range(3)]
    for one in partitions:
        one.write(storage)
    victim = storage.directory_of(partitions[1])  # type: ignore[arg-type]
    assert victim is not None
    storage.delete_log(partitions[1])  # type: ignore[arg-type]
    assert node.where("t-1") == []
    assert victim.partition_count == 0
    replacement = hosted(5)
    replacement.write(storage)
    assert storage.directory_of(replacement) is victim  # type: ignore[arg-type]
    node.spawn.run()
    assert not [name for name in os.listdir(victim.path) if name.endswith("-delete")]


# Clean and unclean stops


def test_only_what_was_not_closed_is_recovered(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(3)]
    for one in partitions:
        one.write(storage)
    node.stop(storage, *partitions)
    os.remove(f"{node.paths[1]}/.kafka_cleanshutdown")
    again = node.start()
    assert [directory.was_clean for directory in again.directories] == [True, False, True]
    (name,) = again.partitions_to_recover()
    assert node.where(str(name)) == [node.paths[1]]
    assert sum(len(list(directory.partitions())) for directory in again.directories) == 3


# Failing disks


def test_a_failing_disk_takes_its_directory_offline(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(3)]
    for one in partitions:
        one.write(storage)
        storage.flush_queue.unflushed[one] = None  # type: ignore[index]
    victim = partitions[1]
    directory = storage.directory_of(victim)  # type: ignore[arg-type]
    assert directory is storage.directories[1]
    storage.append_failed(victim, OSError(errno.EIO, "broken"))  # type: ignore[arg-type]
    assert node.failed == [directory]
    assert node.failures == []
    assert storage.offline_directory_ids == [directory.id]
    assert directory.id not in storage.directory_ids
    unflushed: list[object] = list(storage.flush_queue.unflushed)
    assert unflushed == [partitions[0], partitions[2]]
    assert storage.directory_of(victim) is directory  # type: ignore[arg-type]
    assert not storage.holds(victim)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="offline"):
        hosted(1).open(storage)
    with pytest.raises(OSError, match="offline"):
        hosted(9).open(storage, directory.id)
    # Told once.
    storage.flush_failed(victim, OSError(errno.EIO, "broken"))  # type: ignore[arg-type]
    assert node.failed == [directory]
    # New partitions go elsewhere; what is lost is not lost for good.
    for index in range(10, 14):
        hosted(index).write(storage)
    assert len(list(directory.partitions())) == 1
    assert not storage.has_lost(directory.id)
    storage.leave_clean_marker(1)
    assert not os.path.exists(f"{directory.path}/.kafka_cleanshutdown")


def test_a_failed_fsync_takes_the_directory_offline(node: Node) -> None:
    storage = node.start()
    one, two = hosted(0), hosted(1)
    one.write(storage)
    two.write(storage)
    storage.flush_failed(two, OSError(errno.EIO, "broken"))  # type: ignore[arg-type]
    assert [directory.path for directory in node.failed] == node.where("t-1")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
def test_a_full_disk_has_not_failed(node: Node, number: int) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    storage.append_failed(one, OSError(number, "full"))  # type: ignore[arg-type]
    assert (node.failed, node.failures) == ([], [])


def test_a_damaged_log_is_one_logs_trouble(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    storage.append_failed(one, CorruptLog("damaged", "x", 5))  # type: ignore[arg-type]
    assert (node.failed, node.failures) == ([], [])


def test_the_first_directory_stops_the_node(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.open(storage, storage.directories[0].id)
    storage.append_failed(one, OSError(errno.EIO, "broken"))  # type: ignore[arg-type]
    assert node.failed == []
    assert len(node.failures) == 1 and node.paths[0] in node.failures[0]


def test_a_disk_that_fails_when_a_log_is_opened_goes_offline(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(2)]
    for one in partitions:
        one.write(storage)
    node.stop(storage, *partitions)
    again = node.start()
    node.files.failures = [("list", f"{node.paths[1]}/t-1", errno.EIO)]
    with pytest.raises(OSError):
        hosted(1).open(again)
    assert [directory.path for directory in node.failed] == [node.paths[1]]
    assert hosted(0).open(again).log_end_offset == 3


def test_a_log_that_may_not_be_opened_is_no_failing_disk(node: Node) -> None:
    storage = node.start()
    one = hosted()
    one.write(storage)
    node.stop(storage, one)
    again = node.start()
    node.files.failures = [("list", f"{node.paths[0]}/t-0", errno.EACCES)]
    with pytest.raises(OSError):
        hosted().open(again)
    assert (node.failed, node.failures) == ([], [])


def test_a_node_starts_without_a_disk_that_does_not_work(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(3)]
    for one in partitions:
        one.write(storage)
    lost = storage.directory_ids[1]
    node.stop(storage, *partitions)
    again = node.start(failures=[("make", node.paths[1], errno.EIO)])
    assert len(again.directory_ids) == 2
    assert again.offline_directory_ids == [], "nobody can tell its id"
    # Not lost: it may be on the disk that cannot be read. So the partition does not start over elsewhere.
    assert not again.has_lost(lost)
    again.quarantine_strays(image(*partitions))
    with pytest.raises(OSError):
        hosted(1).open(again, lost)
    assert hosted(2).open(again).log_end_offset == 3
    hosted(7).write(again)


def test_a_node_starts_without_a_disk_whose_names_cannot_be_read(node: Node) -> None:
    node.start()
    again = node.start(failures=[("list", node.paths[1], errno.EIO)])
    assert [directory.is_online for directory in again.directories] == [True, False, True]


def test_a_node_does_not_start_without_its_first_disk(node: Node) -> None:
    node.start()
    with pytest.raises(ServeError, match="cannot use the data directory"):
        node.start(failures=[("read", node.paths[0], errno.EIO)])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_node_starts_with_disks_that_are_full(node: Node, number: int) -> None:
    """Nothing is written at a start on the same boot; on another one, the note is made when there is room."""
    full = [("replace", path, number) for path in node.paths]
    node.stop(node.start())
    again = node.start(failures=full)
    assert all(directory.is_online and directory.has_noted_boot for directory in again.directories)
    node.files.failures = []
    node.stop(again)
    after_reboot = node.start(boot_id=b"boot 2", failures=full)
    assert all(directory.is_online for directory in after_reboot.directories)
    assert not after_reboot.lost_page_cache
    files = node.files
    # Killed now, it might have lost something, for all that the disks can tell.
    assert node.start(boot_id=b"boot 2", failures=full).lost_page_cache
    files.failures = []
    after_reboot.prepare_checkpoint()()
    assert not node.start(boot_id=b"boot 2").lost_page_cache


def test_a_new_disk_that_is_full_is_not_used(node: Node) -> None:
    """Without a note of the boot, nobody could tell a loss of power from then on."""
    storage = node.start(failures=[("replace", f"{node.paths[1]}/.boot-id", errno.ENOSPC)])
    assert [directory.is_online for directory in storage.directories] == [True, False, True]


def test_a_full_disk_does_not_keep_a_log_from_being_cut(node: Node) -> None:
    storage = node.start()
    one = hosted()
    log = one.write(storage, 50)
    offset, work = log.prepare_flush()
    work()
    log.flushed(offset)
    storage.remember([one])  # type: ignore[list-item]
    storage.prepare_checkpoint()()
    node.files.failures = [("append", node.paths[0], errno.ENOSPC)]
    log.truncate_to(10)
    assert log.log_end_offset == 10


def test_one_checkpoint_that_cannot_be_written_does_not_hold_up_the_others(node: Node) -> None:
    storage = node.start()
    partitions = [hosted(index) for index in range(3)]
    for one in partitions:
        one.write(storage)
    node.files.failures = [("replace", f"{node.paths[0]}/penstock-checkpoint", errno.ENOSPC)]
    with pytest.raises(OSError):
        storage.remember(partitions)  # type: ignore[arg-type]
        storage.prepare_checkpoint()()
    written = [os.path.exists(f"{path}/penstock-checkpoint") for path in node.paths]
    assert written == [False, True, True]


# Whose directory it is


@pytest.mark.parametrize("left", [None, b"version: 0\nt"])
def test_after_a_power_loss_records_of_a_deleted_topic_are_not_taken_for_those_of_its_namesake(
    node: Node, left: bytes | None
) -> None:
    hosted().write(node.start(), 5)
    (note,) = [Path(path, "t-0", "partition.metadata") for path in node.where("t-0")]
    note.unlink()
    if left is not None:
        note.write_bytes(left)
    again = Hosted("t", 0, bytes(15) + b"x")
    storage = node.start(boot_id=b"boot 2")
    storage.quarantine_strays(image(again))
    assert again.open(storage).log_end_offset == 0
    assert list(Path(node.paths[0]).glob("t-0*-stray")), "nothing is thrown away"


def test_the_first_flush_of_a_log_covers_the_note_of_whose_it_is(node: Node) -> None:
    one = hosted()
    log = one.write(node.start(), 5)
    node.files.failures = [("sync", f"{node.paths[0]}/t-0/partition.metadata", errno.EIO)]
    _, work = log.prepare_flush()
    with pytest.raises(OSError, match="Input/output error"):
        work()
