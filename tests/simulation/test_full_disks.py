"""Full disks in a whole cluster, in virtual time: writes go on while one is full, and all is whole after there is
room.

Seeds of their own, so that a change of the plans changes nothing here. "Full" leaves the nodes their reserve
unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.broker.storage.reserve import NAME
from penstock.sim import swarm
from penstock.sim.cluster import Machine
from penstock.sim.plans import plan_for

GAP_MS_MAX = 10_000
FULL_MS = 15_000


class Filled(swarm.Run):
    """A cluster of three at work, without other faults."""

    def __init__(self, seed: int, *, is_flushed: bool = False, data_dirs: int = 1) -> None:
        plan = plan_for(seed, seconds=1, nodes=3)
        super().__init__(
            replace(
                plan,
                faults=(),
                is_flushed=is_flushed,
                data_dirs=data_dirs,
                administers=False,
                restarts_all=False,
                partitions=4,
                producers=1,
                one_shot_producers=0,
                members=2,
                segment_bytes=2_048,
                produce_interval_ms=200.0,
                latency_ms=1.0,
                clock_drift=0.0,
                clock_skew_ms=0,
            )
        )
        self._begin()
        self._be_unsafe()
        self.settle()

    def settle(self) -> None:
        assert self.loop.run_until(self.inspector.is_whole, swarm.LIVENESS_MS), (
            self.inspector.what_is_missing()
        )

    def leader(self) -> Machine:
        """Of a partition, and not the controller."""
        hosted = [
            machine
            for machine in self.cluster.machines.values()
            if machine.node is not None and not machine.node.is_controller and any(machine.node.led())
        ]
        return hosted[0]

    def controller(self) -> Machine:
        (found,) = [
            machine
            for machine in self.cluster.machines.values()
            if machine.node is not None and machine.node.is_controller
        ]
        return found

    def longest_gap_ms(self, for_ms: float) -> float:
        """The longest time in which a partition that is written to had nothing acknowledged."""
        longest, since = 0.0, {producer: self.loop.now_ms for producer in self.producers}
        counts = {producer: producer.acknowledged for producer in self.producers}
        end_ms = self.loop.now_ms + for_ms
        while self.loop.now_ms < end_ms:
            self.loop.run_for(100)
            for producer in self.producers:
                longest = max(longest, self.loop.now_ms - since[producer])
                if producer.acknowledged != counts[producer]:
                    counts[producer], since[producer] = producer.acknowledged, self.loop.now_ms
        return longest

    def finish(self) -> None:
        """There is room: everything comes to its end, and all that was acknowledged is there."""
        self._be_alive()
        self._end()


def take_reserve(machine: Machine) -> None:
    """As if somebody else had eaten all of it."""
    assert machine.files is not None
    for path, _ in list(machine.disk.files()):
        if NAME in path:
            machine.files.remove(path)
    assert machine.node is not None
    for directory in machine.node.broker.storage.directories:
        directory.reserve.find()


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("role", ["leader", "controller"])
def test_writes_go_on_while_a_disk_is_full(role: str, is_flushed: bool) -> None:
    run = Filled(1, is_flushed=is_flushed)
    machine = run.leader() if role == "leader" else run.controller()
    machine.disk.fill()
    assert run.longest_gap_ms(FULL_MS) < GAP_MS_MAX
    assert not any(machine.node.led()), "it leads what it cannot write"  # type: ignore[union-attr]
    for hosted in run.leader().node.broker.partitions:  # type: ignore[union-attr]
        assert machine.node_id not in hosted.image.isr
    told = [line for line in run.cluster.lines if machine.host in line and "full" in line]
    assert 0 < len(told) < 5, told
    machine.disk.free()
    run.settle()
    run.finish()


def test_a_full_follower_holds_nobody_up() -> None:
    run = Filled(2)
    # It leads nothing when it has just come back.
    machine = run.leader()
    run.cluster.stop(machine)
    run.loop.run_for(3_000)
    if not machine.is_running:
        run.cluster.start(machine)
    run.settle()
    led = list(machine.node.led())  # type: ignore[union-attr]
    assert not led, led
    machine.disk.fill()
    assert run.longest_gap_ms(FULL_MS) < GAP_MS_MAX
    machine.disk.free()
    run.settle()
    run.finish()


@pytest.mark.parametrize("role", ["leader", "controller"])
def test_writes_go_on_when_the_reserve_is_used_up_too(role: str) -> None:
    run = Filled(3)
    machine = run.leader() if role == "leader" else run.controller()
    take_reserve(machine)
    machine.disk.fill()
    assert run.longest_gap_ms(FULL_MS) < GAP_MS_MAX
    assert run.controller() is not machine, "a controller that cannot append leads the quorum"
    machine.disk.free()
    run.settle()
    run.finish()


def test_all_disks_full_stop_writes_and_lose_nothing() -> None:
    run = Filled(4)
    for machine in run.cluster.machines.values():
        machine.disk.fill()
    run.loop.run_for(20_000)
    before = [producer.acknowledged for producer in run.producers]
    run.loop.run_for(20_000)
    assert [producer.acknowledged for producer in run.producers] == before
    for machine in run.cluster.machines.values():
        assert machine.is_running
        machine.disk.free()
    run.settle()
    run.finish()


def test_a_node_starts_on_a_full_disk_and_is_whole_when_there_is_room() -> None:
    run = Filled(5)
    machine = run.leader()
    machine.disk.fill()
    run.loop.run_for(5_000)
    run.cluster.crash(machine)
    run.loop.run_for(3_000)
    if not machine.is_running:
        run.cluster.start(machine)
    assert run.longest_gap_ms(FULL_MS) < GAP_MS_MAX
    assert machine.is_running, machine.failure
    machine.disk.free()
    run.settle()
    run.finish()


def test_one_full_disk_of_two_costs_only_what_lies_on_it() -> None:
    run = Filled(6, data_dirs=2)
    machine = run.leader()
    machine.disk.fill("/disk2")
    assert run.longest_gap_ms(FULL_MS) < GAP_MS_MAX
    broker = machine.node.broker  # type: ignore[union-attr]
    for hosted in broker.partitions:
        home = broker.storage.directory_of(hosted)
        if home is None:
            continue
        assert (machine.node_id in hosted.image.isr) == (not home.is_full), hosted
    assert {directory.is_full for directory in broker.storage.directories} == {False, True}
    machine.disk.free("/disk2")
    run.settle()
    run.finish()
