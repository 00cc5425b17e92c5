"""Three real brokers under every fault there is, and real clients that must not notice more than a delay.

Writers are idempotent with acks=all on partitions of three replicas, two of which must be in sync. What is
promised, and looked at all the way and at the end: no acknowledged record is lost or there twice, each
producer's records are in its order, nobody reads anything that changes later, a partition of a group has one
owner in a generation, commits never go back, and the three copies are the same bytes.

Without PENSTOCK_CHAOS_SECONDS it goes on for two minutes, and always until every fault was there once. Cutting
nodes off and filling disks need root; without it those faults are left out, and it says so.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from penstock.protocol.records import batches
from tests.chaos.brokers import ROLLING
from tests.chaos.clients import Client, running
from tests.chaos.cluster_clients import ClusterCommitter, ClusterWriter, Commits, GroupMember
from tests.chaos.cluster_faults import RECOVERY_S, Faults, small_disk
from tests.chaos.cluster_owners import Owner, Owners
from tests.chaos.cluster_probe import Probe
from tests.chaos.conftest import SECONDS
from tests.chaos.errands import create_topics, read_everything, read_with_kafka_python
from tests.chaos.ledger import Ledger, Place
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.network import Network, why_not
from tests.cluster.wire import Wire
from tests.support import wait_until

# The reader in Python, which checks every CRC, leaves sockets open that it has lost.
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LOADED = [Place("loaded", partition) for partition in range(6)]
PROBED = [Place("probed", partition) for partition in range(3)]
MARKED = [Place("marked", partition) for partition in range(16)]
WRITERS = 3
RECORDS_PER_SECOND = 250
SECONDS_DEFAULT = 120.0
DISK_BYTES_PER_SECOND = 1 << 20
MENDING_S = 60.0


def wanted_seconds() -> float:
    return float(os.environ.get(SECONDS) or SECONDS_DEFAULT)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.timeout(2 * wanted_seconds() + 1500)
def test_what_was_acknowledged_survives_every_fault(stack: ExitStack, tmp_path: Path, seed: int) -> None:
    seconds = wanted_seconds()
    ledger = Ledger()
    choose = random.Random(seed)
    missing = why_not()
    disks = {}
    if missing is None:
        for node in (1, 2, 3):
            size = int((400 + seconds) * DISK_BYTES_PER_SECOND)
            disks[node] = stack.enter_context(small_disk(tmp_path / f"disk-{node}", size))
    else:
        print(f"\nno cuts and no full disks: {missing}")
    cluster = stack.enter_context(
        Cluster(
            3,
            ROLLING,
            network=None if missing else stack.enter_context(Network()),
            data_dirs={node: [disk.path / "data"] for node, disk in disks.items()},
        )
    )
    create_topics(cluster.bootstrap, LOADED + PROBED + MARKED)
    cluster.wait_in_sync("loaded")
    addresses = [node.address for node in cluster.nodes.values()]

    writers = [
        ClusterWriter(number, cluster.bootstrap, ledger, LOADED, choose.randrange(2**32), RECORDS_PER_SECOND)
        for number in range(WRITERS)
    ]
    commits = Commits(ledger)
    members = [
        GroupMember(number, cluster.bootstrap, ledger, commits, ["loaded"], "readers") for number in range(2)
    ]
    committer = ClusterCommitter(cluster.bootstrap, ledger, MARKED, "committers")
    owners = Owners(ledger)
    holders = [Owner(number, addresses, ledger, owners, "owners") for number in range(3)]
    clients: list[Client] = [*writers, *members, committer, *holders]
    probes = [Probe(lambda: addresses, *place) for place in PROBED]
    faults = Faults(cluster, "loaded", choose.randrange(2**32), disks=disks)
    with running(clients, ledger):
        for probe in probes:
            probe.start()
        deadline = time.monotonic() + seconds
        while not ledger.violations and (
            time.monotonic() < deadline or len(faults.struck) < len(faults.names)
        ):
            time.sleep(choose.uniform(0, 1))
            if choose.random() < 0.5:
                choose.choice(members).leave_and_join()
            if choose.random() < 0.3:
                choose.choice(holders).leave_abruptly()
            done = faults.next()
            print(
                f"{time.strftime('%H:%M:%S')} {done.name}: {done.victim}, held {done.held_s:.1f} s,"
                f" {unavailable_ms(probes, done.began, done.recovered):.0f} ms without a write",
                flush=True,
            )
        ledger.raise_violations()
        faults.recover()
        before = ledger.acknowledged_count
        wait_until(
            lambda: ledger.acknowledged_count > before + 100, RECOVERY_S, "writes go on after the faults"
        )
        for probe in probes:
            probe.stop()
    show(faults, probes)
    faults.recover()
    readings = read_everything(cluster.bootstrap, LOADED)
    ledger.check(readings)
    for writer in writers:
        writer.check(readings)
    assert read_with_kafka_python(cluster.bootstrap, LOADED[0]) == readings[LOADED[0]]
    read_every_copy(cluster, LOADED)
    assert_same_bytes(cluster, LOADED)
    cluster.assert_healthy()

    print(
        f"seed {seed}: {len(faults.struck)} faults, {ledger.acknowledged_count} records acknowledged,"
        f" {ledger.seen_count} read on the way, {commits.count}+{committer.commits.count} commits,"
        f" {commits.looks}+{committer.commits.looks} looks at them,"
        f" {sum(member.assignments for member in members)} assignments,"
        f" {owners.generations} generations of owners"
    )
    assert {done.name for done in faults.struck} == set(faults.names)
    assert ledger.acknowledged_count >= 100 * seconds
    assert ledger.seen_count >= 50 * seconds
    assert commits.count >= seconds / 2 and committer.commits.count >= seconds
    assert committer.commits.looks >= 5
    assert sum(member.assignments for member in members) >= 4
    assert owners.generations >= 2


def unavailable_ms(probes: list[Probe], since: float, until: float) -> float:
    """The longest time in which one of the probed partitions took no write."""
    return 1000 * max(probe.gap_s(since, until) for probe in probes)


def show(faults: Faults, probes: list[Probe]) -> None:
    table = Table("fault", "of", "held s", "back in sync after s", "longest without a write ms")
    for done in faults.struck:
        table.add_row(
            done.name,
            done.victim,
            f"{done.held_s:.1f}",
            f"{done.recovered - done.healed:.1f}",
            f"{unavailable_ms(probes, done.began, done.recovered):.0f}",
        )
    Console(width=120).print(table)


def read_every_copy(cluster: Cluster, places: list[Place]) -> None:
    """Let every node read all it has, also as a follower: damage is found, and mended, when it is read."""
    for node in cluster.nodes.values():
        for place in places:
            deadline = time.monotonic() + MENDING_S
            offset, end = 0, 1
            while offset < end:
                with Wire(node.address) as connection:
                    answer = wire.fetch(connection, *place, offset, rack="of no broker")
                records = bytes(answer.records or b"")
                for _, header in batches(records):
                    offset = header.base_offset + header.last_offset_delta + 1
                if not records:
                    # It has found something and fetches it again from the others.
                    assert time.monotonic() < deadline, (
                        f"{place}: node {node.id} cannot serve {offset}: error {answer.error_code}"
                    )
                    time.sleep(0.2)
                end = end if answer.error_code else max(1, answer.high_watermark)
    for topic in {place.topic for place in places}:
        cluster.wait_in_sync(topic, deadline_s=RECOVERY_S)


def assert_same_bytes(cluster: Cluster, places: list[Place]) -> None:
    """The copies of a partition are the same, byte for byte, wherever each began a new segment."""
    for place in places:
        copies = {}
        for node in cluster.nodes.values():
            (directory,) = node.data_dirs
            segments = sorted((directory / f"{place.topic}-{place.partition}").glob("*.log"))
            copies[node.id] = b"".join(segment.read_bytes() for segment in segments)
        first = next(iter(copies.values()))
        assert first, f"{place} is empty"
        for node_id, copy in copies.items():
            if copy != first:
                at = next(
                    (position for position, (a, b) in enumerate(zip(first, copy)) if a != b),
                    min(len(first), len(copy)),
                )
                raise AssertionError(
                    f"{place}: node {node_id} has {len(copy)} bytes, another {len(first)}; they part at {at}"
                )
