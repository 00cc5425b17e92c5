"""What the controller is told of damaged replicas, and when they are mended."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.replication.directory_reports import DirectoryReports
from penstock.metadata.image import PartitionImage
from penstock.metadata.values import LOST_DIRECTORY
from penstock.model import BrokerId
from penstock.protocol.messages.brokers import AssignReplicasToDirsRequest, AssignReplicasToDirsResponse

ME, OTHER, THIRD = (BrokerId(number) for number in (1, 2, 3))
HERE = bytes(15) + b"h"
GONE = bytes(15) + b"g"


class Replica:
    """As much of a hosted partition as the reports look at."""

    topic_id = bytes(16)
    index = 0
    is_deleted = False
    is_offline = False

    def __init__(self, image: PartitionImage) -> None:
        self.image = image
        self.mended_from: list[int] = []
        self.is_disk_full = False

    def mend(self, offset: int) -> None:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.mended_from.append(offset)
        self.is_offline = False


class Cluster:
    """A broker with one replica, and the controller that its reports go to."""

    def __init__(self, isr: tuple[BrokerId, ...]) -> None:
        brokers = (ME, OTHER, THIRD)
        self.hosted = Replica(PartitionImage(0, OTHER, 1, 1, brokers, isr, (HERE, bytes(16), bytes(16))))
        self.asked: list[tuple[AssignReplicasToDirsRequest, Callable[[Any], None]]] = []
        self._soon: list[Callable[[], None]] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        environment: Any = SimpleNamespace(spawn=SimpleNamespace(soon=self._soon.append, later=self._later))
        storage: Any = SimpleNamespace(
            place=lambda _: SimpleNamespace(id=HERE),
            directories=[HERE],
            has_lost=lambda directory: directory == GONE,
        )
        logger: Any = SimpleNamespace(warning=lambda *_, **__: None, error=lambda *_, **__: None)
        controller: Any = SimpleNamespace(
            ask=lambda request, _, done, **__: self.asked.append((request, done))
        )
        self.reports = DirectoryReports(
            environment,
            storage,
            controller,
            logger,
            node_id=ME,
            broker_epoch=lambda: 7,
            role_changed=lambda _: None,
        )

    def damage(self, offset: int) -> None:
        self.reports.damaged(cast(HostedPartition, self.hosted), offset)
        self.run()

    def image_becomes(self, **changes: Any) -> None:
        self.hosted.image = self.hosted.image._replace(**changes)
        self.reports.assigned(cast(HostedPartition, self.hosted))
        self.run()

    def answer(self, response: AssignReplicasToDirsResponse | None) -> bytes:
        """Answer the oldest report; the directory that it named."""
        request, done = self.asked.pop(0)
        done(response)
        self.run()
        return request.directories[0].id

    def run(self) -> None:
        while self._soon:
            self._soon.pop(0)()

    def time_passes(self) -> int:
        """Let every timer run out; how many there were."""
        timers, self._timers = self._timers, []
        for timer in timers:
            timer[1]()
            self.run()
        return len(timers)

    def _later(self, delay_ms: float, callback: Callable[[], None]) -> Any:
        timer = (delay_ms, callback)
        self._timers.append(timer)
        return SimpleNamespace(cancel=lambda: self._timers.remove(timer))


def test_a_damaged_replica_is_mended_when_nobody_counts_on_it() -> None:
    cluster = Cluster(isr=(ME, OTHER))
    cluster.damage(40)
    assert cluster.hosted.is_offline and cluster.reports.has_damaged
    assert cluster.answer(AssignReplicasToDirsResponse()) == LOST_DIRECTORY
    assert not cluster.hosted.mended_from, "the image does not say so yet"
    cluster.image_becomes(isr=(OTHER,), directories=(LOST_DIRECTORY, bytes(16), bytes(16)))
    assert cluster.hosted.mended_from == [40]
    assert not cluster.hosted.is_offline and not cluster.reports.has_damaged
    assert cluster.answer(AssignReplicasToDirsResponse()) == HERE


@pytest.mark.parametrize("change", [{"isr": (OTHER, THIRD)}, {"leader_epoch": 2}])
def test_a_damaged_replica_is_not_mended_by_an_image_that_does_not_know_of_the_damage(
    change: dict[str, Any],
) -> None:
    """The controller may have let this replica into the ISR since, for what it had before."""
    cluster = Cluster(isr=(OTHER,))
    cluster.damage(40)
    cluster.image_becomes(**change)
    assert not cluster.hosted.mended_from
    cluster.image_becomes(isr=(OTHER, ME))
    cluster.answer(AssignReplicasToDirsResponse())
    assert not cluster.hosted.mended_from
    cluster.image_becomes(isr=(OTHER,), directories=(LOST_DIRECTORY, bytes(16), bytes(16)))
    assert cluster.hosted.mended_from == [40]


def test_the_only_copy_is_not_reported() -> None:
    cluster = Cluster(isr=(ME,))
    cluster.damage(40)
    assert not cluster.asked and not cluster.hosted.is_offline


def test_a_report_that_nobody_answered_is_sent_again() -> None:
    cluster = Cluster(isr=(ME, OTHER))
    told: list[str] = []
    cluster.damage(40)
    cluster.reports.when_reported(lambda: told.append("reported"))
    assert cluster.answer(None) == LOST_DIRECTORY
    assert not told
    cluster.time_passes()
    assert cluster.answer(AssignReplicasToDirsResponse()) == LOST_DIRECTORY
    assert told == ["reported"]


def lost_on_a_full_disk() -> Cluster:
    """Nobody counts on the damaged replica any more, and there was no room to mend it."""
    cluster = Cluster(isr=(ME, OTHER))
    cluster.hosted.is_disk_full = True
    cluster.damage(40)
    cluster.answer(AssignReplicasToDirsResponse())
    cluster.image_becomes(isr=(OTHER,), directories=(LOST_DIRECTORY, bytes(16), bytes(16)))
    assert cluster.hosted.is_offline and cluster.reports.has_damaged
    return cluster


def test_a_damaged_replica_that_could_not_be_mended_is_mended_later() -> None:
    cluster = lost_on_a_full_disk()
    for epoch in range(5):
        cluster.image_becomes(partition_epoch=10 + epoch)
    for _ in range(3):
        assert cluster.time_passes() == 1, "no more than one timer, whatever else tries"
        assert cluster.hosted.is_offline and cluster.reports.has_damaged
    cluster.hosted.is_disk_full = False
    cluster.time_passes()
    assert cluster.hosted.mended_from == [40]
    assert not cluster.hosted.is_offline and not cluster.reports.has_damaged
    assert cluster.answer(AssignReplicasToDirsResponse()) == HERE
    assert cluster.time_passes() == 0


def test_a_damaged_replica_that_is_counted_on_again_is_not_mended_when_there_is_room() -> None:
    cluster = lost_on_a_full_disk()
    cluster.hosted.is_disk_full = False
    cluster.hosted.image = cluster.hosted.image._replace(isr=(ME, OTHER))
    cluster.time_passes()
    assert not cluster.hosted.mended_from and cluster.reports.has_damaged


def test_nothing_is_mended_after_the_broker_has_closed() -> None:
    cluster = lost_on_a_full_disk()
    cluster.reports.close()
    assert cluster.time_passes() == 0 and cluster.reports.has_damaged


def test_a_broker_with_one_directory_says_what_lies_in_it_when_it_had_another_before() -> None:
    cluster = Cluster(isr=(OTHER, THIRD))
    cluster.reports.placed(cast(HostedPartition, cluster.hosted))
    cluster.run()
    assert cluster.asked == []
    cluster.image_becomes(directories=(GONE, bytes(16), bytes(16)))
    cluster.reports.placed(cast(HostedPartition, cluster.hosted))
    cluster.run()
    assert [request.directories[0].id for request, _ in cluster.asked] == [HERE]
