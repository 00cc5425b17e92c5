"""One hosted partition on real files: what it does when its disk, or its leader, does not do as it should."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.config import BrokerConfig
from penstock.broker.counters import TopicTraffic
from penstock.broker.handlers.offsets import _find
from penstock.broker.logs import Logger
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.broker.replication.isr_proposals import core_of
from penstock.broker.storage.storage import Storage
from penstock.log.config import LogConfig
from penstock.log.log import CorruptLog
from penstock.log.names import write_partition_metadata
from penstock.metadata.image import Image, PartitionImage, TopicImage
from penstock.model import BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsPartitionResponse
from penstock.protocol.records import Marker, batches
from tests.broker.disks import NODE, Node
from tests.broker.phrases import batch
from tests.log.test_replicated import BATCH_BYTES, fetched

OTHER = BrokerId(8)
ME = BrokerId(NODE)


class Around:
    """A node with nothing but this partition."""

    me = ME
    lag_max_ms = 10_000

    def __init__(self) -> None:
        self.told: list[str] = []

    def live(self, broker: int) -> int | None:
        return 100 + broker

    def stamp_ms(self) -> int:
        return 1_000

    def may_cut(self, _: HostedPartition) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.told.append(name)


class Noting(Around):
    """Those who wait for a start to be written down are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Callable[[], None]] = []

    def start_raised(self, hosted: HostedPartition, then: Callable[[], None]) -> None:
        self.noted.append(then)


class Watching:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def changed(self, _: HostedPartition) -> None:
        self.heard.append("changed")

    def mark_dirty(self, _: HostedPartition) -> None:
        self.heard.append("dirty")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a")


@pytest.fixture
def two_disks(tmp_path: Path) -> Node:
    return Node(tmp_path, "a", "b")


def partition(leader: BrokerId = OTHER, epoch: int = 1, **changes: Any) -> PartitionImage:
    both = (ME, OTHER)
    return PartitionImage(0, leader, epoch, epoch, both, both, (bytes(16), bytes(16)))._replace(**changes)


def hosted(
    storage: Storage, image: PartitionImage, around: Around | None = None, **settings: Any
) -> HostedPartition:
    config, _ = BrokerConfig.load({})
    defaults = config.topic_config(Image(), NODE, "t")
    topic = TopicImage("t", TopicId(bytes(15) + b"t"), (image,))
    return HostedPartition(
        storage, around or Around(), topic, image, replace(defaults, **settings), TopicTraffic()
    )


def on_second_disk(node: Node, storage: Storage, **settings: Any) -> HostedPartition:
    """A leader with ten records in the second directory."""
    one = hosted(storage, partition(), **settings)
    one.assign(partition(epoch=2, directories=(storage.directory_ids[1], bytes(16))))
    assert one.follower_log.append(fetched(0, 10), 10, 0) == ErrorCode.NONE
    assert node.where("t-0") == [node.paths[1]]
    one.assign(one.image._replace(leader=ME, leader_epoch=3, partition_epoch=3))
    return one


def checkpoint(storage: Storage, one: HostedPartition) -> None:
    storage.remember([one])
    storage.prepare_checkpoint()()


def test_metadata_older_than_the_log_is_no_leave_to_append(node: Node) -> None:
    """A node that starts applies what it knew before; a coordinator must not write in an epoch that is over."""
    one = hosted(node.start(), partition(ME, 5))
    assert one.append_internal(bytearray(batch(b"k"))).base_offset == 0
    again = hosted(node.start(), partition(ME, 3))
    with pytest.raises(OSError) as caught:
        again.append_internal(bytearray(batch(b"k")))
    assert caught.value.errno == errno.EAGAIN
    again.assign(partition(ME, 6))
    assert again.append_internal(bytearray(batch(b"k"))).base_offset == 1


# Following


def test_a_follower_says_where_it_begins_only_when_it_will_still_know_after_a_kill(node: Node) -> None:
    """Whoever asked for the deletion is answered when all in sync have said it; one of them may lead next."""
    storage, around = node.start(), Noting()
    one = hosted(storage, partition(), around)
    assert one.follower_log.append(fetched(0, 50), 50, 0) == ErrorCode.NONE
    checkpoint(storage, one)
    # DeleteRecords at the leader.
    assert one.follower_log.append(b"", 50, 30) == ErrorCode.NONE
    assert one.follower_log.position()[2] == 0, "said before it is written down"
    checkpoint(storage, one)
    around.noted.pop()()
    assert one.follower_log.position()[2] == 30
    # Killed, and elected.
    assert hosted(node.start(), partition(ME, 5)).log.log_start_offset == 30


def test_a_follower_fetches_on_while_where_it_begins_is_not_written_down(node: Node) -> None:
    """Its line serves all partitions of the leader, and the disk may be busy for long."""
    around, heard = Noting(), []
    one = hosted(node.start(), partition(), around)
    assert one.follower_log.append(fetched(0, 50), 50, 30) == ErrorCode.NONE
    one.when_flushed(lambda: heard.append("on"))
    assert heard == ["on"]
    assert one.follower_log.append(fetched(50, 5), 55, 30) == ErrorCode.NONE
    assert one.follower_log.position() == (55, 0, 0)
    assert len(around.noted) == 1, "asked for once"


def test_a_follower_says_of_its_start_what_is_written_down_and_no_more(node: Node) -> None:
    around = Noting()
    one = hosted(node.start(), partition(), around)
    assert one.follower_log.append(fetched(0, 50), 50, 10) == ErrorCode.NONE
    assert one.follower_log.append(b"", 50, 30) == ErrorCode.NONE
    around.noted.pop()()
    assert one.follower_log.position()[2] == 10
    # It deletes more while it leads.
    one.assign(partition(ME, 5))
    one.delete_before(40)
    one.assign(partition(epoch=6))
    around.noted.pop()()
    assert one.follower_log.position()[2] == 30
    around.noted.pop()()
    assert one.follower_log.position()[2] == 40
    assert not around.noted


def test_a_start_that_was_to_be_written_down_is_not_that_of_a_log_that_starts_over(node: Node) -> None:
    around = Noting()
    one = hosted(node.start(), partition(), around)
    assert one.follower_log.append(fetched(0, 50), 30, 30) == ErrorCode.NONE
    one.follower_log.start_over_at(40)
    assert one.follower_log.position()[2] == 40
    around.noted.pop()()
    assert one.follower_log.position()[2] == 40


def test_a_start_that_the_names_of_the_segments_tell_need_not_be_written_down(node: Node) -> None:
    storage, around, said = node.start(), Around(), []
    one = hosted(storage, partition(), around, log=LogConfig(segment_bytes=5 * BATCH_BYTES))
    assert one.follower_log.append(fetched(0, 20), 20, 0) == ErrorCode.NONE
    assert one.follower_log.append(b"", 20, 10) == ErrorCode.NONE
    one.when_flushed(lambda: said.append(one.follower_log.position()[2]))
    assert said == [10]
    assert hosted(node.start(), partition(ME, 5)).log.log_start_offset == 10


def test_what_was_written_before_an_append_failed_is_flushed(node: Node) -> None:
    """In flushed mode its followers, or its leader, wait for that, and nobody else asks for it."""
    storage = node.start()
    one = hosted(
        storage, partition(), log=LogConfig(segment_bytes=3 * BATCH_BYTES), flush_messages=1, is_flushed=True
    )
    node.files.failures = [("append", f"{node.paths[0]}/t-0/{3:020}", errno.ENOSPC)]
    assert one.follower_log.append(fetched(0, 5), 0, 0) == ErrorCode.KAFKA_STORAGE_ERROR
    assert one.follower_log.position() == (3, 0, 0)
    assert one.log.recovery_point == 3
    node.files.failures = []
    assert one.follower_log.append(fetched(3, 5), 0, 0) == ErrorCode.NONE
    assert one.log.recovery_point == 8


def test_a_replica_cut_below_its_remembered_high_watermark_says_so(node: Node) -> None:
    """An unclean election while it was away is no reason to refuse, and every reason to tell."""
    storage = node.start()
    one = hosted(storage, partition())
    one.follower_log.append(fetched(0, 50), 40, 0)
    node.stop(storage, one)  # type: ignore[arg-type]
    again = node.start()
    one = hosted(again, partition(epoch=9))
    one.follower_log.truncate_for(0, 45)
    assert not any("committed" in line for line in node.logger.lines)
    one.follower_log.truncate_for(0, 30)
    assert one.log.log_end_offset == 30
    assert [line for line in node.logger.lines if "committed" in line and "'start': 30, 'end': 40" in line]


def test_a_follower_frees_the_space_of_all_that_its_leader_has_deleted(node: Node) -> None:
    """Also of its last segment, to which nothing may be added for long."""
    storage = node.start()
    one = hosted(storage, partition())
    one.follower_log.append(fetched(0, 3), 3, 0)
    assert one.follower_log.append(b"", 3, 3) == ErrorCode.NONE
    assert (one.log.log_start_offset, one.log.log_end_offset, one.log.size_bytes) == (3, 3, 0)


@pytest.mark.parametrize("leads", [False, True])
def test_only_the_leader_deletes_what_is_too_much(node: Node, leads: bool) -> None:
    storage = node.start()
    storage.quarantine_strays(Image())
    one = hosted(storage, partition(), log=LogConfig(segment_bytes=BATCH_BYTES, retention_bytes=0))
    one.follower_log.append(fetched(0, 3), 3, 0)
    if leads:
        one.assign(partition(leader=ME, epoch=2))
    config, _ = BrokerConfig.load({})
    logger = cast(Logger, node.logger)
    clocks = ClockWatch(storage.environment, storage.path, NODE, logger)
    topics = cast(Partitions, [one])
    Housekeeping(
        storage.environment,
        config,
        storage,
        topics,
        clocks,
        logger,
        may_delete=lambda: True,
        when_full=lambda: None,
    )
    node.spawn.run()
    assert one.log.log_start_offset == (3 if leads else 0)


# Leading


@pytest.mark.parametrize(
    ("version", "error"), [(4, ErrorCode.LEADER_NOT_AVAILABLE), (5, ErrorCode.OFFSET_NOT_AVAILABLE)]
)
def test_a_leader_that_does_not_know_what_is_committed_does_not_say_there_is_no_such_record(
    node: Node, version: int, error: ErrorCode
) -> None:
    """KIP-207. A client that hears of none goes on at the end."""
    one = hosted(node.start(), partition())
    # Ten records, of which the leader before us has told us only that five are committed.
    records = fetched(0, 10)
    assert one.follower_log.append(records, 5, 0) == ErrorCode.NONE
    times = [header.max_timestamp for _, header in batches(records)]
    assert times == sorted(set(times))

    def ask(timestamp: int) -> tuple[int, int]:
        result = ListOffsetsPartitionResponse(partition_index=0)
        wanted = ListOffsetsPartition(partition_index=0, timestamp=timestamp)
        _find(one, wanted, version, result, read_committed=False)
        return result.error_code, result.offset

    one.assign(partition(ME, 2))
    assert not one.replication.has_established
    assert ask(times[0]) == (ErrorCode.NONE, 0)
    assert ask(times[7]) == (error, -1)
    assert ask(times[9] + 1) == (error, -1)
    assert ask(-1) == (error, -1)
    one.fetched_by(OTHER, 100 + OTHER, 10, 0)
    assert one.replication.has_established
    assert ask(times[7]) == (ErrorCode.NONE, 7)
    assert ask(times[9] + 1) == (ErrorCode.NONE, -1)


def test_followers_hear_of_deleted_records_though_nothing_is_written(node: Node) -> None:
    """Else the records would be back with the next leader."""
    storage = node.start()
    one = hosted(storage, partition())
    one.follower_log.append(fetched(0, 10), 10, 0)
    one.assign(partition(leader=ME, epoch=2))
    follower, consumer = Watching(), Watching()
    one.waiters.watch(follower, is_replica=True)
    one.waiters.watch(consumer)
    one.delete_before(5)
    assert (follower.heard, consumer.heard) == (["dirty"], ["changed"])


def test_a_deletion_is_done_when_all_in_sync_have_deleted(node: Node) -> None:
    storage = node.start()
    one = hosted(storage, partition())
    one.follower_log.append(fetched(0, 10), 10, 0)
    one.assign(partition(leader=ME, epoch=2))
    one.fetched_by(OTHER, 108, 10, 0)
    assert one.delete_before(5) == 5
    heard: list[ErrorCode] = []
    one.when_deleted_before(5, heard.append)
    one.fetched_by(OTHER, 108, 10, 4)
    assert heard == []
    one.fetched_by(OTHER, 108, 10, 5)
    assert heard == [ErrorCode.NONE]
    one.when_deleted_before(5, heard.append)
    assert heard == [ErrorCode.NONE] * 2


def test_a_replica_whose_disk_was_replaced_says_at_once_where_it_will_lie(node: Node) -> None:
    """It cannot be in sync before, and with too few in sync its first record never comes."""
    around = Around()
    image = partition(directories=(b"a disk of before", bytes(16)), isr=(OTHER,))
    one = hosted(node.start(), image, around)
    assert one.log.log_end_offset == 0
    assert around.told.count("placed") == 1


def test_a_replica_that_others_count_on_is_not_begun_anew_because_it_is_opened(node: Node) -> None:
    """Its disk may come back."""
    around = Around()
    one = hosted(node.start(), partition(directories=(b"a disk of before", bytes(16))), around)
    assert one.log.log_end_offset == 0
    assert "placed" not in around.told


@pytest.mark.parametrize("is_known", [False, True])
def test_a_replica_without_a_record_says_nothing_of_where_it_will_lie(node: Node, is_known: bool) -> None:
    storage, around = node.start(), Around()
    directory = storage.directory_ids[0] if is_known else bytes(16)
    one = hosted(storage, partition(directories=(directory, bytes(16)), isr=(OTHER,)), around)
    assert one.log.log_end_offset == 0
    assert "placed" not in around.told


def test_a_follower_joins_when_it_begins_where_its_leader_does(node: Node) -> None:
    storage = node.start()
    one = hosted(storage, partition())
    one.follower_log.append(fetched(0, 10), 10, 0)
    one.assign(partition(leader=ME, epoch=2, isr=(ME,)))
    one.delete_before(5)
    one.fetched_by(OTHER, 108, 10, 4)
    assert one.replication.proposal(0) is None
    one.fetched_by(OTHER, 108, 10, 5)
    assert one.replication.proposal(0) is not None


def test_a_restarted_leader_lets_nobody_in_who_begins_before_it(node: Node) -> None:
    storage = node.start()
    one = hosted(storage, partition())
    one.follower_log.append(fetched(0, 10), 10, 5)
    checkpoint(storage, one)
    again = hosted(node.start(), partition(leader=ME, epoch=2, isr=(ME,)))
    assert again.log.log_start_offset == 5
    again.fetched_by(OTHER, 108, 10, 4)
    assert again.replication.proposal(0) is None
    again.fetched_by(OTHER, 108, 10, 5)
    assert again.replication.proposal(0) is not None


def test_one_request_may_wait_many_times_for_one_deletion(node: Node) -> None:
    """Whoever compares each with every other keeps the broker busy for minutes."""

    class Waiter(list[ErrorCode]):
        __hash__ = list.__hash__

        def __call__(self, error: ErrorCode) -> None:
            self.append(error)

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

    storage = node.start()
    one = hosted(storage, partition(leader=ME))
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        one.when_deleted_before(0, waiter)
    one.fetched_by(OTHER, 108, 0, 0)
    assert [list(waiter) for waiter in waiters] == [[ErrorCode.NONE]] * 3


@pytest.mark.parametrize(
    ("isr", "leader", "error"),
    [((ME,), ME, ErrorCode.NONE), ((OTHER,), OTHER, ErrorCode.NOT_LEADER_OR_FOLLOWER)],
    ids=["out of sync", "leads now"],
)
def test_a_deletion_does_not_wait_for_a_follower_that(
    node: Node, isr: tuple[BrokerId, ...], leader: BrokerId, error: ErrorCode
) -> None:
    storage = node.start()
    one = hosted(storage, partition(leader=ME), min_insync_replicas=1)
    heard: list[ErrorCode] = []
    one.when_deleted_before(0, heard.append)
    assert heard == []
    one.assign(partition(leader=leader, epoch=2, isr=isr))
    assert heard == [error]


def test_a_disk_that_cannot_be_read_goes_offline(two_disks: Node) -> None:
    """The partitions on it should be led by others, who can read them."""
    storage = two_disks.start()
    one = on_second_disk(two_disks, storage)
    two_disks.files.failures = [("read", f"{two_disks.paths[1]}/t-0/", errno.EIO)]
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        one.read(3, 100, at_least_one=True)
    assert two_disks.failed == [storage.directories[1]]


def test_a_marker_that_comes_before_the_directory_is_known_is_no_failing_disk(two_disks: Node) -> None:
    """The partition was added to a transaction, and nothing was written to it."""
    storage = two_disks.start()
    one = hosted(storage, partition(leader=ME, isr=(ME,)), min_insync_replicas=1)
    appended = one.append_marker(Marker(True, 0), 7, 0)
    assert (appended.error, two_disks.failed) == (ErrorCode.KAFKA_STORAGE_ERROR, [])
    one.assign(partition(leader=ME, epoch=2, isr=(ME,), directories=(storage.place(one).id, bytes(16))))
    assert one.append_marker(Marker(True, 0), 7, 0).error == ErrorCode.NONE


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_file_that_cannot_be_opened_for_a_moment_is_no_failing_disk(two_disks: Node, number: int) -> None:
    storage = two_disks.start()
    one = on_second_disk(two_disks, storage)
    two_disks.files.failures = [("read", f"{two_disks.paths[1]}/t-0/", number)]
    with pytest.raises(OSError, match=os.strerror(number)):
        one.read(3, 100, at_least_one=True)
    assert two_disks.failed == []


# Going


def test_a_deleted_partition_has_no_part_in_the_replication(node: Node) -> None:
    """Whoever still looks after it, for a follower that lags, would do so for ever."""
    storage = node.start()
    one = hosted(storage, partition(leader=ME))
    proposed = one.replication
    assert core_of(one) is proposed
    one.deleted()
    assert core_of(one) is None


def test_a_deleted_partition_leaves_its_successors_directory_alone(node: Node) -> None:
    storage = node.start()
    one = hosted(storage, partition())
    one.deleted()
    path = Path(node.paths[0], "t-0")
    path.mkdir()
    write_partition_metadata(node.files, str(path), TopicId(bytes(15) + b"u"))
    with pytest.raises(OSError, match="deleted"):
        _ = one.log
    assert path.exists()


def test_upkeep_by_metadata_of_before_leaves_alone_what_lies_there_now(node: Node) -> None:
    """Until a node has heard from the others, what it knows may be as old as its last snapshot."""
    storage = node.start()
    storage.make_directory(hosted(storage, partition()))
    write_partition_metadata(storage.environment.files, f"{node.paths[0]}/t-0", TopicId(bytes(15) + b"x"))
    config, _ = BrokerConfig.load({})
    topics = cast(Partitions, [hosted(storage, partition())])
    logger = cast(Logger, node.logger)
    clocks = ClockWatch(storage.environment, storage.path, NODE, logger)
    Housekeeping(
        storage.environment,
        config,
        storage,
        topics,
        clocks,
        logger,
        may_delete=lambda: True,
        when_full=lambda: None,
    )
    node.spawn.run()
    assert node.where("t-0") == node.paths


# Mending


@pytest.mark.parametrize("leads", [False, True])
def test_damage_that_an_append_comes_upon_is_told(node: Node, leads: bool) -> None:
    """It looks at what the producers wrote before, and would fail for ever if nobody mended the replica."""
    storage = node.start()
    small = LogConfig(segment_bytes=BATCH_BYTES * 4, index_interval_bytes=1)
    one = hosted(storage, partition(), log=small)
    assert one.follower_log.append(fetched(0, 10), 0, 0) == ErrorCode.NONE
    one.log.close()
    node.stop(storage)
    for snapshot in Path(node.paths[0], "t-0").glob("*.snapshot"):
        snapshot.unlink()
    first = min(Path(node.paths[0], "t-0").glob("*.log"))
    data = bytearray(first.read_bytes())
    data[BATCH_BYTES] ^= 1
    first.write_bytes(data)
    around = Around()
    again = hosted(node.start(), partition(leader=ME if leads else OTHER, epoch=2), around, log=small)
    if leads:
        error = again.append(memoryview(bytearray(batch(b"v")))).error
    else:
        error = again.follower_log.append(fetched(10, 1, epoch=2), 10, 0)
    assert error == ErrorCode.KAFKA_STORAGE_ERROR
    assert "damaged" in around.told


@pytest.mark.parametrize("may_cut", [False, True])
def test_damage_that_a_start_finds_is_cut_off_only_when_nobody_counts_on_it(
    node: Node, may_cut: bool
) -> None:
    """If the process dies before the controller has heard of it, the next one must find it again."""
    one = hosted(node.start(), partition())
    assert one.follower_log.append(fetched(0, 10), 0, 0) == ErrorCode.NONE
    (segment,) = Path(node.paths[0], "t-0").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[7 * BATCH_BYTES + 70] ^= 1
    segment.write_bytes(data)
    storage = node.start()
    around = Around()
    around.may_cut = lambda _: may_cut  # type: ignore[method-assign]
    again = hosted(storage, partition(epoch=2), around)
    if not may_cut:
        with pytest.raises(CorruptLog):
            _ = again.log
        assert segment.read_bytes() == data
    else:
        assert again.log.log_end_offset == 7
    assert around.told.count("damaged") == 1
    again.is_offline = True
    again.mend(7)
    assert around.told.count("damaged") == 1
    assert again.follower_log.position() == (7, 0, 0)
    assert again.follower_log.append(fetched(7, 3), 10, 0) == ErrorCode.NONE


def test_a_damaged_replica_on_a_full_disk_is_offline_until_it_could_be_mended(node: Node) -> None:
    """What is cut off is kept beside it, which needs room."""
    one = hosted(node.start(), partition())
    assert one.follower_log.append(fetched(0, 10), 0, 0) == ErrorCode.NONE
    (segment,) = Path(node.paths[0], "t-0").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[7 * BATCH_BYTES + 70] ^= 1
    segment.write_bytes(data)
    again = hosted(node.start(), partition(epoch=2))
    again.is_offline = True
    node.files.failures = [(what, f"{node.paths[0]}/t-0/", errno.ENOSPC) for what in ("append", "replace")]
    for _ in range(2):
        with pytest.raises(OSError, match="space"):
            again.mend(7)
        assert again.is_offline and segment.read_bytes() == data
    node.files.failures = []
    again.mend(7)
    assert not again.is_offline and again.follower_log.position() == (7, 0, 0)


def test_a_damaged_replica_whose_disk_fails_too_begins_anew_with_a_name_of_its_own(two_disks: Node) -> None:
    storage = two_disks.start()
    one = on_second_disk(two_disks, storage)
    one.is_offline = True
    two_disks.files.failures = [("append", two_disks.paths[1], errno.EIO)]
    storage.append_failed(one, OSError(errno.EIO, "the disk failed"))
    one.take_offline()
    one.assign(partition(epoch=4))
    one.mend(0)
    # Where it lies has to be written down first.
    assert one.follower_log.append(fetched(0, 10), 10, 0) == ErrorCode.LOG_DIR_NOT_FOUND
    one.assign(partition(epoch=5, directories=(storage.directory_ids[0], bytes(16))))
    assert one.follower_log.append(fetched(0, 10), 10, 0) == ErrorCode.NONE
    assert os.path.exists(f"{two_disks.paths[0]}/t-0/partition.metadata")


def test_a_flush_that_ends_when_its_log_is_gone_lets_the_next_one_begin(two_disks: Node) -> None:
    """In flushed mode the follower fetches nothing more before that, and others in its lane wait with it."""
    storage = two_disks.start()
    one = on_second_disk(two_disks, storage, flush_messages=1, is_flushed=True)
    held: list[Callable[[], None]] = []
    do_now = two_disks.spawn.in_thread
    two_disks.spawn.in_thread = (  # type: ignore[method-assign]
        lambda *args, **options: held.append(lambda: do_now(*args, **options))
    )
    one.assign(partition(epoch=4))
    one.follower_log.append(fetched(10, 1), 10, 0)
    storage.append_failed(one, OSError(errno.EIO, "the disk failed"))
    one.take_offline()
    one.assign(partition(epoch=5, directories=(storage.directory_ids[0], bytes(16))))
    one.mend(0)
    one.follower_log.append(fetched(0, 10), 10, 0)
    heard: list[str] = []
    one.when_flushed(lambda: heard.append("flushed"))
    while held:
        held.pop(0)()
    assert heard == ["flushed"]


def test_what_follows_a_batch_that_came_before_the_election_does_not_overtake_it(node: Node) -> None:
    """A client may hear of the new leader before it does itself, and has several batches under way."""

    def append(sequence: int) -> ErrorCode:
        records = bytearray(
            batch(b"v", timestamp=wall_ms, producer_id=7, producer_epoch=0, base_sequence=sequence)
        )
        return one.append(memoryview(records)).error

    storage = node.start()
    wall_ms = storage.environment.clock.wall_ms()
    one = hosted(storage, partition(leader=ME))
    assert append(0) == ErrorCode.NONE
    one.assign(partition(epoch=2))
    assert append(1) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    one.assign(partition(leader=ME, epoch=3))
    assert append(2) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert [append(1), append(2)] == [ErrorCode.NONE] * 2
