"""A replica that may lack tombstones copies its log again when it meets compacted batches.

The log here has the value of a key at offset 3 and its tombstone at offset 20. The leader has compacted both away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from penstock.broker.clocks.clock_watch import ClockWatch
from penstock.broker.config import BrokerConfig
from penstock.broker.logs import Logger
from penstock.broker.membership.registration import Registration
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.broker.storage.storage import Storage
from penstock.log.cleaning_state import CleaningState
from penstock.metadata.image import Image, TopicImage
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import filler
from tests.broker.disks import NODE, Node
from tests.broker.partition.test_hosted_partition import ME, OTHER, hosted, partition
from tests.log.test_replicated import fetched

BEHIND: dict[str, Any] = {"isr": (OTHER,)}
AS_ELIGIBLE: dict[str, Any] = {"isr": (OTHER,), "eligible_leader_replicas": (ME,)}
COMPACTED = filler(10, 24, 0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a")


def started(node: Node, boot_id: bytes = b"boot 1") -> Storage:
    """A node whose controller has heard of it."""
    storage = node.start(boot_id=boot_id)
    Registration(storage, node.logger).remember_epoch(5)  # type: ignore[arg-type]
    return storage


def follower(storage: Storage, epoch: int = 1, **image: Any) -> HostedPartition:
    return hosted(storage, partition(epoch=epoch, **image))


def append(one: HostedPartition, records: bytes | bytearray, high_watermark: int = 0) -> None:
    assert one.follower_log.append(records, high_watermark, 0) == ErrorCode.NONE


def range_of(one: HostedPartition) -> tuple[int, int]:
    return one.log.log_start_offset, one.log.log_end_offset


def test_a_replica_that_was_in_sync_appends_compacted_batches(node: Node) -> None:
    """It was away. The leader has kept the tombstones that it has not had."""
    append(follower(started(node)), fetched(0, 10))
    one = follower(started(node), epoch=2, **BEHIND)
    append(one, COMPACTED)
    assert range_of(one) == (0, 25)


def test_a_new_replica_appends_what_one_leader_has_compacted(node: Node) -> None:
    one = follower(started(node), **BEHIND)
    append(one, fetched(0, 10))
    append(one, COMPACTED)
    assert range_of(one) == (0, 25)


def test_a_new_replica_copies_again_after_a_change_of_leader(node: Node) -> None:
    """The value came from the old leader; the new one has compacted the tombstone already."""
    one = follower(started(node), **BEHIND)
    append(one, fetched(0, 10))
    one.assign(partition(epoch=2, **BEHIND))
    append(one, COMPACTED)
    assert range_of(one) == (0, 0)
    append(one, filler(0, 9, 0) + COMPACTED)
    assert range_of(one) == (0, 25), "everything from one leader"


def test_a_new_replica_goes_on_with_another_leader_that_has_compacted_nothing(node: Node) -> None:
    one = follower(started(node), **BEHIND)
    append(one, fetched(0, 10))
    one.assign(partition(epoch=2, **BEHIND))
    append(one, fetched(10, 5))
    assert range_of(one) == (0, 15)


@pytest.mark.parametrize("image", [{}, AS_ELIGIBLE], ids=["in sync", "eligible"])
def test_a_new_replica_that_has_caught_up_is_complete(node: Node, image: dict[str, Any]) -> None:
    one = follower(started(node), **BEHIND)
    append(one, fetched(0, 9))
    one.assign(partition(epoch=2, **image))
    append(one, fetched(9, 1))
    again = follower(started(node), epoch=3, **BEHIND)
    append(again, COMPACTED)
    assert range_of(again) == (0, 25)


def test_a_replica_that_may_be_elected_never_empties_its_log(node: Node) -> None:
    append(follower(started(node), **BEHIND), fetched(0, 10))
    again = follower(started(node), epoch=2, **AS_ELIGIBLE)
    append(again, COMPACTED)
    assert range_of(again) == (0, 25)


def test_a_new_replica_that_is_killed_remembers_that_it_is_incomplete(node: Node) -> None:
    append(follower(started(node), **BEHIND), fetched(0, 10))
    again = follower(started(node), epoch=1, **BEHIND)
    append(again, COMPACTED)
    assert range_of(again) == (0, 0)


def test_a_replica_whose_damage_was_cut_off_is_incomplete(node: Node) -> None:
    """The tombstone was in the part that was cut off, and the others know that it was here."""
    storage = started(node)
    one = follower(storage)
    append(one, fetched(0, 25))
    one.assign(partition(epoch=2, **BEHIND))
    one.mend(10)
    assert range_of(one) == (0, 10)
    append(one, COMPACTED)
    assert range_of(one) == (0, 0)


def test_a_replica_whose_damage_was_cut_off_remembers_it(node: Node) -> None:
    one = follower(started(node))
    append(one, fetched(0, 25))
    one.assign(partition(epoch=2, **BEHIND))
    one.mend(10)
    again = follower(started(node), epoch=2, **BEHIND)
    append(again, COMPACTED)
    assert range_of(again) == (0, 0)


# A power failure


def after_power_failure(node: Node) -> None:
    """A process has started since, the controller knows of the loss, and it is killed before it has caught up."""
    append(follower(started(node)), fetched(0, 10))
    started(node, b"boot 2")


def test_a_replica_that_lost_power_copies_again(node: Node) -> None:
    append(follower(started(node)), fetched(0, 10))
    one = follower(started(node, b"boot 2"), epoch=2, **BEHIND)
    append(one, COMPACTED)
    assert range_of(one) == (0, 0)


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "switched to flushed since"])
def test_a_replica_that_lost_power_and_is_killed_remembers_it(node: Node, flushed: bool) -> None:
    append(follower(started(node)), fetched(0, 10))
    storage = started(node, b"boot 2")
    if flushed:
        storage.flushed_note.add(follower(storage).key)
    one = follower(started(node, b"boot 2"), epoch=2, **BEHIND)
    append(one, COMPACTED)
    assert range_of(one) == (0, 0)


def checkpointed(node: Node, storage: Storage, one: HostedPartition, *, is_current: bool) -> None:
    """What housekeeping does every minute."""
    if is_current:
        topic = TopicImage(one.topic, one.topic_id, (one.image,))
        storage.quarantine_strays(Image(topics={one.topic: topic}, topics_by_id={topic.id: topic}))
    config, _ = BrokerConfig.load({})
    logger = cast(Logger, node.logger)
    housekeeping = Housekeeping(
        storage.environment,
        config,
        storage,
        cast(Partitions, [one]),
        ClockWatch(storage.environment, storage.path, NODE, logger),
        logger,
        may_delete=lambda: True,
        when_full=lambda: None,
    )
    told: list[bool] = []
    housekeeping.checkpoint(told.append)
    assert told == [True]


@pytest.mark.parametrize(
    ("image", "is_current", "copies"),
    [
        ({}, True, False),
        (AS_ELIGIBLE, True, False),
        (BEHIND, True, True),
        # It still says what was before the power failure.
        ({}, False, True),
    ],
    ids=["in sync", "eligible", "behind", "old image"],
)
def test_a_power_failure_is_forgotten_when_every_replica_has_caught_up(
    node: Node, image: dict[str, Any], is_current: bool, copies: bool
) -> None:
    after_power_failure(node)
    storage = started(node, b"boot 2")
    checkpointed(node, storage, follower(storage, epoch=2, **image), is_current=is_current)
    one = follower(started(node, b"boot 2"), epoch=3, **BEHIND)
    append(one, COMPACTED)
    assert range_of(one) == ((0, 0) if copies else (0, 25))


# The high watermark


def test_a_killed_replica_knows_as_committed_what_was_when_it_compacted(node: Node) -> None:
    """Otherwise a reader up to an older checkpoint would miss the values whose successors lie above it."""
    one = follower(started(node))
    append(one, fetched(0, 10))
    one.log.swapping.prepare_end(CleaningState(6, committed_before=8))()
    again = follower(started(node), epoch=2)
    _ = again.log
    assert again.high_watermark == 8
