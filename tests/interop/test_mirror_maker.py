"""MirrorMaker 2 in its dedicated mode, killed: records, settings and groups' offsets arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.interop.application import (
    COMPACTING_SETTINGS,
    Application,
    everything,
    latest,
    wait_until_compacted,
)
from tests.interop.client import PATIENCE_S, Outgoing, Record
from tests.interop.connect import STARTING_S, java_application
from tests.support import BrokerProcess, wait_until

pytestmark = [pytest.mark.interop_long, pytest.mark.timeout(1200)]

PARTITIONS = 3
KEYS = 40
MIRRORED, MIRRORED_LATEST = "west.orders", "west.orders-latest"
HOUR_MS = 3_600_000


class Cluster:
    def __init__(self, broker: BrokerProcess) -> None:
        self.bootstrap = broker.bootstrap
        self.client = ConfluentClient(broker.bootstrap)


class Mirror:
    """From the cluster ``west`` to the cluster ``east``."""

    def __init__(self, west: Cluster, east: Cluster, directory: Path, *, exactly_once: bool) -> None:
        self.west, self.east = west, east
        self._directory = directory
        often = ["refresh.topics", "refresh.groups", "sync.topic.configs", "sync.group.offsets"]
        often += ["emit.checkpoints", "emit.heartbeats"]
        stored = ("offset", "config", "status")
        own = ("heartbeats", "checkpoints", "offset-syncs")
        self._properties = {
            "clusters": "west, east",
            "west.bootstrap.servers": west.bootstrap,
            "east.bootstrap.servers": east.bootstrap,
            "west->east.enabled": "true",
            "west->east.topics": "orders.*",
            "west->east.groups": "readers.*",
            "east->west.enabled": "false",
            "sync.group.offsets.enabled": "true",
            "replication.factor": "1",
            "offset.storage.partitions": "1",
            "status.storage.partitions": "1",
            **{f"{each}.storage.replication.factor": "1" for each in stored},
            **{f"{each}.topic.replication.factor": "1" for each in own},
            **{f"{each}.interval.seconds": "1" for each in often},
            # Every offset is known on the other side.
            "offset.lag.max": "0",
            # Of the worker, which reads these under the name of the cluster that it writes to.
            "east.offset.flush.interval.ms": "50",
            "east.session.timeout.ms": "6000",
            "east.heartbeat.interval.ms": "500",
            "east.scheduled.rebalance.max.delay.ms": "0",
            "east.plugin.discovery": "service_load",
        }
        if exactly_once:
            self._properties |= {
                "east.exactly.once.source.support": "enabled",
                "dedicated.mode.enable.internal.rest": "true",
                "listeners": "http://127.0.0.1:0",
            }

    def run(self) -> Application:
        return java_application(
            "org.apache.kafka.connect.mirror.MirrorMaker",
            self._properties,
            self._directory,
            "--clusters",
            "east",
        )


class Orders:
    """Writes to ``orders``, and the last of each key, sometimes none, to the compacted ``orders-latest``."""

    def __init__(self, client: ConfluentClient) -> None:
        self._client = client
        self._written = 0
        self.latest: dict[bytes | None, bytes] = {}
        client.create_topic("orders", PARTITIONS, {"retention.ms": str(24 * HOUR_MS)})
        client.create_topic("orders-latest", PARTITIONS, {"cleanup.policy": "compact"})

    def write(self, count: int) -> None:
        numbers = range(self._written, self._written + count)
        orders = [
            Outgoing(b"%d" % number, key=b"%d" % (number % KEYS), headers=(("number", b"%d" % number),))
            for number in numbers
        ]
        changes = [
            each._replace(value=None) if number % 7 == 0 else each for number, each in zip(numbers, orders)
        ]
        self._client.produce("orders", orders, idempotent=True)
        self._client.produce("orders-latest", changes, idempotent=True)
        for change in changes:
            if change.value is None:
                self.latest.pop(change.key, None)
            else:
                self.latest[change.key] = change.value
        self._written += count

    @contextmanager
    def coming_in(self) -> Iterator[None]:
        done = threading.Event()

        def write() -> None:
            while not done.wait(0.02):
                self.write(20)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@pytest.fixture
def clusters() -> Iterator[tuple[Cluster, Cluster]]:
    with BrokerProcess(COMPACTING_SETTINGS) as west, BrokerProcess(COMPACTING_SETTINGS) as east:
        made = Cluster(west), Cluster(east)
        yield made
        for cluster in made:
            cluster.client.close()


@pytest.mark.parametrize("exactly_once", [False, True], ids=["at_least_once", "exactly_once"])
def test_a_killed_mirror_goes_on_where_it_was(
    clusters: tuple[Cluster, Cluster], tmp_path: Path, exactly_once: bool
) -> None:
    west, east = clusters
    mirror = Mirror(west, east, tmp_path, exactly_once=exactly_once)
    orders = Orders(west.client)
    # MirrorMaker translates offsets of groups that it knows when it starts, and from that place on.
    orders.write(200)
    west.client.resume("readers-half", "orders", 100)

    with mirror.run() as running, orders.coming_in():
        wait_until(lambda: count(running, east, MIRRORED) > 1000, STARTING_S, "records arrive")

        def has_followed() -> bool:
            west.client.resume("readers-half", "orders", 200)
            return len(committed(east, "readers-half")) == PARTITIONS

        wait_until(has_followed, 2 * PATIENCE_S, "offsets of a group arrive")
        running.kill_when(
            lambda: count(running, east, MIRRORED) < count(None, west, "orders"), "not all has arrived"
        )
    for _ in range(25):
        orders.write(20)
    west.client.alter_config("orders", "retention.ms", str(48 * HOUR_MS))
    west.client.resume("readers-all", "orders", len(everything(west.bootstrap, "orders")))
    for cluster, topic in (
        (west, "orders-latest"),
        (west, "mm2-offset-syncs.east.internal"),
        (east, "mm2-offsets.west.internal"),
    ):
        wait_until_compacted(cluster.bootstrap, topic)

    with mirror.run() as running:
        source = everything(west.bootstrap, "orders")

        def has_arrived() -> bool:
            assert running.is_running, running.log_tail()
            return values(everything(east.bootstrap, MIRRORED)) == values(source)

        wait_until(has_arrived, STARTING_S, "every record arrives")
        wait_until(
            lambda: latest(everything(east.bootstrap, MIRRORED_LATEST)) == orders.latest,
            2 * PATIENCE_S,
            "every last value arrives",
        )
        wait_until(
            lambda: east.client.describe_configs(MIRRORED)["retention.ms"].value == str(48 * HOUR_MS),
            2 * PATIENCE_S,
            "the changed setting arrives",
        )
        copies = everything(east.bootstrap, MIRRORED)
        wait_until(
            lambda: not unread(east, "readers-all", copies),
            2 * PATIENCE_S,
            "offsets of the other group arrive",
        )
        running.kill()

    originals = comparable(source)
    for partition, mirrored in comparable(copies).items():
        if exactly_once:
            assert mirrored == originals[partition]
        else:
            assert list(dict.fromkeys(mirrored)) == originals[partition]
    assert set(comparable(copies)) == set(originals)
    assert east.client.describe_configs(MIRRORED_LATEST)["cleanup.policy"].value == "compact"
    # A group that moves to the other cluster misses nothing, and does not start from the beginning.
    left = values(unread(east, "readers-half", copies))
    assert left >= values(unread(west, "readers-half", source, "orders"))
    assert len(left) < len(source)


def count(running: Application | None, cluster: Cluster, topic: str) -> int:
    if running is not None:
        assert running.is_running, running.log_tail()
    # Asking for a topic must not create it.
    return len(everything(cluster.bootstrap, topic)) if topic in cluster.client.topics() else 0


def committed(cluster: Cluster, group: str, topic: str = MIRRORED) -> dict[int, int]:
    return cluster.client.committed(group, topic, range(PARTITIONS))


def unread(cluster: Cluster, group: str, records: list[Record], topic: str = MIRRORED) -> list[Record]:
    """What the group would read next."""
    starts = committed(cluster, group, topic)
    return [record for record in records if record.offset >= starts.get(record.partition, 0)]


def values(records: list[Record]) -> set[bytes | None]:
    return {record.value for record in records}


def comparable(records: list[Record]) -> dict[int, list[Record]]:
    """By partition, without the offsets, which may differ."""
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record.partition, []).append(record._replace(offset=0))
    return found
