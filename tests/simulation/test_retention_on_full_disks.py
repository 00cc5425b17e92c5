"""Disks that our own records have filled: what expires makes room there, too."""

from __future__ import annotations

import pytest

from penstock.sim import disk as simulated
from penstock.sim.client import Place
from penstock.sim.cluster import Machine
from tests.replication.making import end_offset_of
from tests.simulation.test_full_disks import Filled

RETENTION_MS = 20_000
# For the clocks to be believed, what is expired to be found, told and removed.
PATIENCE_MS = 60_000
TOPIC = "orders"
# A small disk has a small reserve: the records of a short run are enough to free it.
SMALL_DISK_BYTES = 64 * 1024


class Everywhere(dict[Place, None]):
    def __contains__(self, place: object) -> bool:
        return True


class Expiring(Filled):
    """A cluster whose records live for a short while."""

    def _begin(self) -> None:
        self.cluster._settings = {
            **self.cluster._settings,
            "log.retention.ms": str(RETENTION_MS),
            "log.retention.check.interval.ms": "1000",
            "log.segment.delete.delay.ms": "1000",
        }
        self.checkers.starts.expiring = Everywhere()
        super()._begin()

    def fill(self, machine: Machine) -> None:
        machine.disk.fill(left_bytes=100)
        assert self.loop.run_until(lambda: not self.has_room(machine), 10_000)

    def hush(self) -> None:
        for producer in self.producers:
            producer.is_open = False

    def has_room(self, machine: Machine) -> bool:
        assert machine.node is not None
        return not any(directory.is_full for directory in machine.node.broker.storage.directories)

    def starts(self, machine: Machine) -> dict[int, int]:
        assert machine.node is not None
        return {
            hosted.index: hosted.log.log_start_offset
            for hosted in machine.node.broker.partitions
            if hosted.topic == TOPIC
        }


@pytest.fixture(autouse=True)
def small_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "CAPACITY_BYTES", SMALL_DISK_BYTES)


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_its_leaders_have_deleted_makes_room_on_a_full_follower(
    is_restarted: bool, is_flushed: bool
) -> None:
    run = Expiring(1, is_flushed=is_flushed)
    run.loop.run_for(15_000)
    machine = run.leader()
    run.fill(machine)
    if is_restarted:
        run.cluster.crash(machine)
        run.loop.run_for(3_000)
        if not machine.is_running:
            run.cluster.start(machine)
    before = run.starts(machine)
    assert run.loop.run_until(lambda: run.has_room(machine), RETENTION_MS + PATIENCE_MS)
    after = run.starts(machine)
    assert after != before
    for other in run.cluster.machines.values():
        for index, start in run.starts(other).items():
            assert after[index] <= start or other is machine
    # What the leaders keep by now is more than the little that was freed.
    machine.disk.free()
    run.settle()


def test_a_quiet_topic_that_expires_as_a_whole_makes_room_by_itself() -> None:
    """The last segment of each log goes, too, for which something has to be written."""
    run = Expiring(2)
    run.loop.run_for(15_000)
    machine = run.leader()
    run.fill(machine)
    run.hush()
    assert run.loop.run_until(lambda: run.has_room(machine), RETENTION_MS + PATIENCE_MS)
    run.settle()


def test_all_disks_that_our_own_records_have_filled_free_themselves() -> None:
    """Leaders apply retention on a full disk, whether or not somebody could be asked."""
    run = Expiring(3)
    run.loop.run_for(15_000)
    for machine in run.cluster.machines.values():
        run.fill(machine)
    run.hush()
    everyone = list(run.cluster.machines.values())
    assert run.loop.run_until(lambda: all(map(run.has_room, everyone)), RETENTION_MS + PATIENCE_MS)
    run.settle()


def test_a_full_follower_that_asks_where_its_leaders_begin_is_not_taken_to_be_in_sync() -> None:
    """Not even on a quiet partition, of which it has everything."""
    run = Filled(4)
    run.loop.run_for(5_000)
    for producer in run.producers:
        producer.is_open = False
    run.loop.run_for(2_000)
    machine = run.leader()
    broker = machine.node.broker  # type: ignore[union-attr]
    # Metadata that finds no room takes from the reserve.
    machine.disk.fill()
    assert broker.storage.directories[0].reserve.give()
    assert run.loop.run_until(lambda: not any(machine.node.led()), 10_000)  # type: ignore[union-attr]
    asked_ms = broker.replication.full_followers._next_ms
    run.loop.run_for(20_000)
    assert broker.replication.full_followers._next_ms > asked_ms
    leaders = [other.node for other in run.cluster.machines.values() if other is not machine]
    led = [hosted for node in leaders for hosted in node.led()]  # type: ignore[union-attr]
    assert led
    for hosted in led:
        assert machine.node_id not in hosted.image.isr
        assert end_offset_of(hosted.replication, machine.node_id) == -1
    machine.disk.free()
    run.settle()
