"""The note of what is flushed: true at every moment, whatever is switched, killed or full meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.membership.registration import Registration
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.storage.storage import Storage
from penstock.protocol.errors import ErrorCode
from tests.broker.disks import Node
from tests.broker.partition.test_hosted_partition import ME, hosted, partition
from tests.broker.phrases import batch
from tests.log.test_replicated import fetched


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a")


def started(node: Node, **options: Any) -> Storage:
    """A node whose controller has heard of it."""
    storage = node.start(**options)
    Registration(storage, node.logger).remember_epoch(5)  # type: ignore[arg-type]
    return storage


def held_back(node: Node) -> list[Callable[[], None]]:
    """What threads would do from now on, to be done when the test says so."""
    held: list[Callable[[], None]] = []
    at_once = node.spawn.in_thread

    def in_thread(work: Callable[[], Any], done: Callable[..., None], *, lane: str) -> None:
        held.append(lambda: at_once(work, done, lane=lane))

    node.spawn.in_thread = in_thread  # type: ignore[method-assign]
    return held


def run(held: list[Callable[[], None]]) -> None:
    while held:
        held.pop(0)()


def left(node: Node, **options: Any) -> list[tuple[bytes, int]]:
    """What the next process would report."""
    found: list[tuple[bytes, int]] = list(node.start(**options).flushed_note.partitions())
    return found


def switch(one: HostedPartition, *, is_flushed: bool) -> None:
    one.config = replace(one.config, flush_messages=1 if is_flushed else 2**63 - 1, is_flushed=is_flushed)


def leader(storage: Storage, **settings: Any) -> HostedPartition:
    """Alone in sync, and nobody is eligible, so that what counts of its log is committed."""
    image = partition()._replace(leader=ME, isr=(ME,), replicas=(ME,), directories=(bytes(16),))
    return hosted(storage, image, **settings)


def test_a_topic_switched_to_flushed_is_noted_when_what_it_confirmed_is_on_the_disk(node: Node) -> None:
    one = hosted(started(node), partition())
    assert one.follower_log.append(fetched(0, 10), 10, 0) == ErrorCode.NONE
    held = held_back(node)
    switch(one, is_flushed=True)
    assert one.log.recovery_point == 0
    assert left(node) == [], "power lost now takes what was confirmed"
    run(held)
    assert one.log.recovery_point == 10
    assert left(node) == [one.key]


def test_a_topic_switched_back_waits_for_the_disk_until_the_note_is_removed(node: Node) -> None:
    one = leader(started(node), is_flushed=True, flush_messages=1)
    _ = one.log
    held = held_back(node)
    switch(one, is_flushed=False)
    appended = one.append(memoryview(bytearray(batch(b"x"))), by_all=True)
    assert appended.error == ErrorCode.NONE
    assert one.high_watermark == 0, "the note says that what counts is on the disk"
    # The note goes; the fsync has not been made.
    held.pop(0)()
    assert left(node) == []
    assert one.high_watermark == 1
    assert one.log.recovery_point == 0


def test_a_topic_switched_to_and_fro_is_never_noted_with_something_unflushed(node: Node) -> None:
    one = leader(started(node))
    held = held_back(node)
    for is_flushed in (True, False, True, False, True):
        assert one.append(memoryview(bytearray(batch(b"x"))), by_all=True).error == ErrorCode.NONE
        switch(one, is_flushed=is_flushed)
        if held:
            held.pop(0)()
        one.replication.check()
        if left(node):
            assert one.high_watermark <= one.log.recovery_point
    run(held)
    assert left(node) == [one.key]
    assert one.high_watermark == one.log.recovery_point == 5


def test_settings_of_the_next_process_remove_the_note_before_anything_counts_unflushed(node: Node) -> None:
    storage = started(node)
    one = leader(storage, is_flushed=True, flush_messages=1)
    assert one.append(memoryview(bytearray(batch(b"x"))), by_all=True).error == ErrorCode.NONE
    assert left(node) == [one.key]
    again = leader(started(node))
    held = held_back(node)
    assert again.append(memoryview(bytearray(batch(b"y"))), by_all=True).error == ErrorCode.NONE
    assert again.high_watermark == 1
    assert left(node) == [again.key]
    run(held)
    assert left(node) == []
    assert again.high_watermark == 2


def test_nothing_is_noted_before_the_controller_has_heard_of_a_power_loss(node: Node) -> None:
    """The next process would report as kept what this one has found lost."""
    one = hosted(started(node), partition())
    assert one.follower_log.append(fetched(0, 10), 10, 0) == ErrorCode.NONE
    storage = node.start(boot_id=b"boot 2")
    again = hosted(storage, partition(), is_flushed=True, flush_messages=1)
    _ = again.log
    assert storage.flushed_note.partitions() == []
    assert left(node, boot_id=b"boot 2") == []
    Registration(storage, node.logger).remember_epoch(6)  # type: ignore[arg-type]
    assert left(node, boot_id=b"boot 2") == [again.key]


def test_a_note_that_a_full_disk_does_not_take_is_tried_again(node: Node) -> None:
    storage = started(node)
    one = leader(storage, is_flushed=True, flush_messages=1)
    _ = one.log
    node.files.failures = [("replace", f"{node.paths[0]}/penstock-flushed", errno.ENOSPC)]
    switch(one, is_flushed=False)
    assert one.append(memoryview(bytearray(batch(b"x"))), by_all=True).error == ErrorCode.NONE
    assert one.high_watermark == one.log.recovery_point == 1, "it stays flushed"
    node.spawn.run()
    assert len([line for line in node.logger.lines if "flushed note" in line]) == 1, "said once"
    assert not node.failures, "a full disk has not failed"
    node.files.failures = []
    node.spawn.run()
    assert left(node) == []


def test_a_deleted_partition_is_not_noted_any_more(node: Node) -> None:
    storage = started(node)
    storage._deleted_before = None
    one = leader(storage, is_flushed=True, flush_messages=1)
    assert one.append(memoryview(bytearray(batch(b"x"))), by_all=True).error == ErrorCode.NONE
    assert left(node) == [one.key]
    one.deleted()
    storage.delete_log(one)
    assert left(node) == []


def test_a_damaged_note_says_nothing(node: Node) -> None:
    storage = started(node)
    _ = leader(storage, is_flushed=True, flush_messages=1).log
    file = Path(node.paths[0], "penstock-flushed")
    file.write_bytes(file.read_bytes().replace(b" 0\n", b" 1\n"))
    assert left(node) == []
    assert any("damaged" in line for line in node.logger.lines)


def test_a_node_that_flushes_nothing_writes_no_note(node: Node) -> None:
    one = leader(started(node))
    assert one.append(memoryview(bytearray(batch(b"x"))), by_all=True).error == ErrorCode.NONE
    assert not Path(node.paths[0], "penstock-flushed").exists()
