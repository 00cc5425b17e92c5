"""A broker with several disks loses one: its partitions go on elsewhere, the others stay where they are.

The disk fails by a small C library that is preloaded into the brokers (``failing_disk.c``): nothing in them knows
of it. Metadata is on the first directory; it is the second that fails.

And a disk that gives back other bytes than were written: what one replica lost the others have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import ElectLeadersRequest
from tests.chaos.brokers import ROLLING
from tests.chaos.errands import read_everything, settings
from tests.chaos.ledger import Ledger, Place, encode_value, identity_of, offset_in
from tests.cluster.cluster import Cluster
from tests.cluster.failover import create, load
from tests.cluster.wire import Wire
from tests.support import wait_until
from tests.tools import Missing, cached, program, run, skip_or_fail

SOURCE = Path(__file__).parent / "failing_disk.c"
PARTITIONS = 12
VICTIM = 1


class FailingDisk:
    def __init__(self, library: Path, scratch: Path) -> None:
        self._flag = scratch / "the disk fails"
        self.good = scratch / "good"
        self.bad = scratch / "bad"
        self.environment = {
            "LD_PRELOAD": str(library),
            "PENSTOCK_FAILING_FLAG": str(self._flag),
            "PENSTOCK_FAILING_PREFIX": str(self.bad),
        }

    def fail(self) -> None:
        self._flag.touch()

    def replace(self) -> None:
        """A new, empty disk in its place."""
        for path in sorted(self.bad.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        self._flag.unlink()

    def partitions(self, directory: Path, topic: str) -> set[int]:
        """Which partitions of a topic have their records there."""
        return {int(path.parent.name.rpartition("-")[2]) for path in directory.glob(f"{topic}-*/*.log")}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    try:
        with cached("preload", SOURCE.read_bytes()) as (directory, made):
            library = directory / "failing_disk.so"
            if not made:
                run([program("gcc"), "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"])
    except Missing as missing:
        skip_or_fail(missing)
    yield FailingDisk(library, tmp_path)


def test_only_the_partitions_of_a_failed_disk_go_elsewhere(disk: FailingDisk) -> None:
    ledger = Ledger()
    places = [Place("topic", number) for number in range(PARTITIONS)]
    with Cluster(3, data_dirs={VICTIM: [disk.good, disk.bad]}, environment=disk.environment) as cluster:
        create(cluster, "topic", PARTITIONS)
        with load(cluster, "topic", PARTITIONS, ledger):
            wait_until(
                lambda: (
                    len(disk.partitions(disk.good, "topic") | disk.partitions(disk.bad, "topic"))
                    == PARTITIONS
                ),
                30,
                "every partition has records",
            )
            lost, kept = disk.partitions(disk.bad, "topic"), disk.partitions(disk.good, "topic")
            assert lost and kept, "both disks are used"
            disk.fail()

            def has_moved() -> bool:
                views = [cluster.partition("topic", number) for number in sorted(lost)]
                return all(VICTIM not in view.in_sync_replicas and view.leader >= 0 for view in views)

            wait_until(has_moved, 30, "other nodes lead the partitions of the failed disk")
            assert cluster.nodes[VICTIM].is_running, cluster.nodes[VICTIM].log_tail()
            before = ledger.acknowledged_count
            wait_until(lambda: ledger.acknowledged_count > before + 500, 30, "writes go on")
            for number in sorted(kept):
                assert VICTIM in cluster.partition("topic", number).in_sync_replicas, number
            # Replaced by an empty one: what was there is copied again.
            cluster.stop(VICTIM)
            disk.replace()
            cluster.start(VICTIM)
            cluster.wait_in_sync("topic", deadline_s=90)
        assert disk.partitions(disk.good, "topic") | disk.partitions(disk.bad, "topic") == set(
            range(PARTITIONS)
        )
        ledger.check(read_everything(cluster.bootstrap, places))
        # And the copy is good for something: it serves alone what only the others had kept.
        followers = [node for node in cluster.nodes if node != VICTIM]
        cluster.stop(followers[0])
        cluster.wait_for("topic", lambda view: view.leader >= 0, "everything is led", asking=[VICTIM])
        ledger.check(read_everything(cluster.bootstrap, places))


def test_a_damaged_replica_is_fetched_again_from_the_others() -> None:
    """Old data is not looked at when a broker starts: the damage is found by the first who reads it."""
    choose = random.Random(1)
    places = [Place("topic", number) for number in range(PARTITIONS)]
    ledger = Ledger()
    with Cluster(3, ROLLING) as cluster:
        create(cluster, "topic", PARTITIONS)
        fill(cluster, places, ledger)
        cluster.wait_in_sync("topic")
        # By now all of it is known to be flushed, so that it is not looked at when the node starts.
        time.sleep(2)
        cluster.kill(VICTIM)
        for place in places:
            assert cluster.damage(VICTIM, *place, choose) is not None
        cluster.start(VICTIM)
        cluster.wait_in_sync("topic")
        elect_preferred(cluster)
        wait_until(
            lambda: any(cluster.leader(*place) == VICTIM for place in places), 30, "it leads something"
        )
        ledger.check(read_everything(cluster.bootstrap, places))
        cluster.wait_in_sync("topic")


def fill(cluster: Cluster, places: list[Place], ledger: Ledger) -> None:
    """Many small batches, so that there are many segments."""

    def acknowledged(place: Place, identity: int, _: KafkaError | None, message: Message) -> None:
        ledger.acknowledged(place, offset_in(message), identity)

    producer = Producer(settings(cluster.bootstrap, enable_idempotence=True, batch_num_messages=20))
    for place in places:
        for sequence in range(3000):
            identity = identity_of(0, sequence)
            producer.produce(
                place.topic,
                encode_value(identity, 100),
                partition=place.partition,
                on_delivery=partial(acknowledged, place, identity),
            )
        producer.poll(0)
    assert producer.flush(60) == 0
    assert ledger.acknowledged_count == 3000 * len(places)


def elect_preferred(cluster: Cluster) -> None:
    """Give every partition back to its first replica."""
    with Wire(cluster.nodes[cluster.controller()].address, timeout_s=30) as wire:
        answer = wire.call(ElectLeadersRequest(election_type=0, topic_partitions=None, timeout_ms=20_000), 2)
    assert answer.error_code == ErrorCode.NONE
