"""One full disk in a cluster of three: writes go on while it is full, and its node comes back when there is room.

Every node has a small tmpfs of its own, so ENOSPC is real; mounting one needs root. The probes write to a
partition led by each of the nodes, with ``acks=all``. What is printed is the longest time that one of them
could not write.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from penstock.protocol.errors import ErrorCode
from tests.chaos.cluster_faults import small_disk
from tests.chaos.cluster_probe import Probe
from tests.chaos.errands import read_everything
from tests.chaos.ledger import Ledger, Place
from tests.chaos.test_disk_full import SmallDisk
from tests.cluster.cluster import Cluster
from tests.cluster.failover import create, is_created, load, probing, write
from tests.cluster.network import why_not
from tests.cluster.wire import Address, NoAnswer, Wire, produce, quorum
from tests.support import wait_until

pytestmark = pytest.mark.chaos

DISK_BYTES = 64 << 20
PARTITIONS = 3
# While it is full, as long as is asked for in the worst case; a busy machine is given more.
FULL_S = 45.0
HELD_S = 5.0
LINES_PER_SECOND_MAX = 5


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, SmallDisk]]:
    missing = why_not()
    if missing is not None:
        pytest.skip(f"no small disks to fill: {missing}")
    root = tmp_path_factory.mktemp("disks")
    with ExitStack() as stack:
        yield {node: stack.enter_context(small_disk(root / f"disk-{node}", DISK_BYTES)) for node in (1, 2, 3)}


@pytest.fixture(scope="module")
def cluster(disks: dict[int, SmallDisk]) -> Iterator[Cluster]:
    settings = {"log.retention.check.interval.ms": "1000"}
    data_dirs = {node: [disk.path / "data"] for node, disk in disks.items()}
    with Cluster(3, settings, data_dirs=data_dirs) as cluster:
        yield cluster


def leader(cluster: Cluster, topic: str) -> int:
    """One that is not the controller."""
    leads = {cluster.leader(topic, index) for index in range(PARTITIONS)}
    return min(leads - {cluster.controller()})


def follower(cluster: Cluster, topic: str) -> int:
    """One that leads nothing that is written to: of a topic with one partition."""
    view = cluster.partition(topic, 0)
    return min(set(view.replicas) - {view.leader, cluster.controller()})


def controller(cluster: Cluster, topic: str) -> int:
    return cluster.controller()


def controller_without_reserve(cluster: Cluster, topic: str) -> int:
    """Somebody else's files have taken that too: it cannot append to the metadata log."""
    victim = cluster.controller()
    for path in cluster.nodes[victim].data_dirs[0].glob("penstock-reserve.*"):
        path.unlink()
    return victim


@pytest.mark.parametrize(
    ("role", "partitions"),
    [(leader, 3), (follower, 1), (controller, 3), (controller_without_reserve, 3)],
)
def test_writes_go_on_while_one_disk_is_full(
    cluster: Cluster,
    disks: dict[int, SmallDisk],
    unique: Callable[[str], str],
    role: Callable[[Cluster, str], int],
    partitions: int,
) -> None:
    topic, loaded, ledger = unique("probed"), unique("loaded"), Ledger()
    create(cluster, topic, partitions)
    create(cluster, loaded, PARTITIONS)
    with ExitStack() as stack:
        stack.enter_context(load(cluster, loaded, PARTITIONS, ledger))
        probes = [stack.enter_context(probing(cluster, topic, index)) for index in range(partitions)]
        victim = role(cluster, topic)
        lines_before = cluster.nodes[victim].log().count("\n")
        began = time.monotonic()
        deadline = began + FULL_S
        try:
            # Until all that could be written of has been, and the node has noticed.
            fill(disks[victim])
            if role is controller_without_reserve:
                # More than goes into the last page of its log.
                others = [node.address for node in cluster.nodes.values() if node.id != victim]
                create_many(others, unique("made"), 30)
                assert quorum(others[0]).leader_id != victim
            while time.monotonic() < began + HELD_S or not all(map(goes_on, probes)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            is_going_on = all(map(goes_on, probes))
            gap_s = max(probe.gap_s(began) for probe in probes)
            held_s = time.monotonic() - began
            lines = cluster.nodes[victim].log().count("\n") - lines_before
        finally:
            freed = time.monotonic()
            disks[victim].empty()
        cluster.wait_in_sync(loaded)
        cluster.wait_in_sync(topic)
        back_s = time.monotonic() - freed
        gap_back_s = max(probe.gap_s(freed) for probe in probes)
    print(
        f"\n{role.__name__}: full for {held_s:.1f} s, the longest gap {gap_s:.2f} s, {lines} log lines;"
        f" in sync {back_s:.1f} s after there was room, the longest gap then {gap_back_s:.2f} s"
    )
    assert is_going_on, "no writes while one disk was full"
    assert lines < LINES_PER_SECOND_MAX * held_s
    ledger.check(read_everything(cluster.bootstrap, [Place(loaded, number) for number in range(PARTITIONS)]))


def create_many(addresses: list[Address], name: str, count: int) -> None:
    """Topics, one after the other, by asking brokers that can do it, or soon will."""
    numbers = itertools.count()

    def is_made() -> bool:
        with suppress(NoAnswer):
            return is_created(addresses[0], f"{name}-{next(numbers)}")
        return False

    for _ in range(count):
        wait_until(is_made, 30, "a topic can be created")


def fill(disk: SmallDisk) -> None:
    """The node takes of what is left, too."""
    with suppress(OSError):
        disk.fill(0)
    with suppress(OSError):
        disk.fill_rest()


def test_all_disks_full_stop_writes_with_an_error_and_lose_nothing(
    cluster: Cluster, disks: dict[int, SmallDisk], unique: Callable[[str], str]
) -> None:
    loaded, ledger = unique("loaded"), Ledger()
    create(cluster, loaded, PARTITIONS)
    with load(cluster, loaded, PARTITIONS, ledger):
        try:
            for disk in disks.values():
                fill(disk)
            wait_until(
                lambda: all("the disk is full" in node.log() for node in cluster.nodes.values()),
                30,
                "every node says that its disk is full",
            )
            with Wire(cluster.nodes[cluster.leader(loaded, 0)].address) as wire:
                refused = produce(wire, loaded, 0, bytes(100_000), acks=-1, timeout_ms=5_000)
            assert refused.error_code in (
                ErrorCode.KAFKA_STORAGE_ERROR,
                ErrorCode.NOT_ENOUGH_REPLICAS,
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                # The leader had room for just this one, and its followers had none.
                ErrorCode.REQUEST_TIMED_OUT,
            )
        finally:
            for disk in disks.values():
                disk.empty()
        cluster.wait_in_sync(loaded)
        before = ledger.acknowledged_count
        wait_until(lambda: ledger.acknowledged_count > before + 100, 60, "writes go on when there is room")
    ledger.check(read_everything(cluster.bootstrap, [Place(loaded, number) for number in range(PARTITIONS)]))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_disk_that_our_own_records_have_filled_frees_itself_as_they_expire(
    cluster: Cluster, disks: dict[int, SmallDisk], unique: Callable[[str], str], is_restarted: bool
) -> None:
    """Somebody lowers the retention, and leaves alone what else lies on the disk."""
    topic = unique("filling")
    create(cluster, topic, 1, segment_bytes=str(1 << 20), file_delete_delay_ms="1000")
    victim = follower(cluster, topic)
    try:
        disks[victim].fill(8 << 20)
        write(cluster, topic, 15_000, size=1_000)
        wait_until(
            lambda: victim not in cluster.partition(topic, 0).in_sync_replicas, 30, "the full disk is noticed"
        )
        if is_restarted:
            cluster.restart(victim, kill=True)
            assert victim not in cluster.partition(topic, 0).in_sync_replicas
        began = time.monotonic()
        set_retention_bytes(cluster, topic, 2 << 20)
        cluster.wait_in_sync(topic)
        print(f"\nin sync {time.monotonic() - began:.1f} s after the retention was lowered")
    finally:
        disks[victim].empty()
    write(cluster, topic, 100)


def set_retention_bytes(cluster: Cluster, topic: str, size: int) -> None:
    entry = ConfigEntry("retention.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(60)


def goes_on(probe: Probe) -> bool:
    return probe.since(time.monotonic() - 1) >= 5
