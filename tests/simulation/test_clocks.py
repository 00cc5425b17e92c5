"""Clusters in which clocks are ten days off for a while, with topics that keep their records for a week."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from penstock.broker.clocks.timekeeper import NodeTime, Reading, Timekeeper
from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.sim import swarm
from penstock.sim.cluster import Machine
from penstock.sim.plans import plan_for

DAY = 86_400_000


def begun(seed: int, nodes: int, **settings: str) -> swarm.Run:
    plan = plan_for(seed, seconds=60, nodes=nodes)
    # Each broker leads something.
    plan = replace(plan, partitions=4, segment_bytes=2_048, clock_skew_ms=0, administers=False, faults=())
    run = swarm.Run(replace(plan, produce_interval_ms=400))
    run.cluster._settings = {**run.cluster._settings, "log.retention.check.interval.ms": "1000", **settings}
    run._begin()
    assert run.loop.run_until(partial(has_written, run, 50), 60_000)
    return run


def written(run: swarm.Run) -> int:
    return sum(producer.acknowledged for producer in run.producers)


def has_written(run: swarm.Run, count: int) -> bool:
    return written(run) >= count


def starts(run: swarm.Run) -> set[int]:
    """Where the logs of the topic begin, on all machines that run."""
    return {
        hosted.log.log_start_offset
        for machine in run.cluster.running
        if machine.node is not None
        for hosted in machine.node.broker.partitions
        if hosted.topic == "orders" and hosted.is_open
    }


def be_wrong(run: swarm.Run, machine: Machine, wrong_ms: int, *, restarts: bool) -> None:
    run.cluster.set_clock(machine, wrong_ms)
    if restarts:
        run.cluster.crash(machine)
        run.loop.run_for(500)
        run.cluster.start(machine)
    run.loop.run_for(9_000)
    run.cluster.set_clock(machine, 0)
    run.loop.run_for(3_000)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("wrong_ms", [10 * DAY, -10 * DAY])
def test_no_single_clock_deletes_a_record(nodes: int, wrong_ms: int) -> None:
    run = begun(11, nodes)
    for machine in run.cluster.machines.values():
        for restarts in (False, True):
            count = written(run)
            be_wrong(run, machine, wrong_ms, restarts=restarts)
            assert starts(run) == {0}, f"{machine} was wrong"
            assert run.loop.run_until(partial(has_written, run, count + 1), 60_000), "nor is anything refused"
    assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()


def test_no_record_is_deleted_when_all_clocks_are_set_at_once() -> None:
    run = begun(12, 3)
    for machine in run.cluster.machines.values():
        run.cluster.set_clock(machine, 10 * DAY)
    run.loop.run_for(60_000)
    assert starts(run) == {0}


def test_records_are_deleted_when_their_time_is_over() -> None:
    run = begun(13, 3, **{"log.retention.ms": "20000"})
    run.loop.run_for(60_000)
    assert min(starts(run)) > 0
    assert run.loop.run_until(lambda: len(starts(run)) <= run.plan.partitions, 60_000), (
        "by all replicas the same"
    )


def test_a_broker_that_was_down_believes_the_others_at_once() -> None:
    run = begun(14, 3)
    run.loop.run_for(60_000)
    machine = run.cluster.machines[2]
    run.cluster.crash(machine)
    run.loop.run_for(40_000)
    run.cluster.start(machine)

    def believes() -> bool:
        return machine.node is not None and machine.node.broker.clocks.doubt() is None

    assert run.loop.run_until(believes, 15_000)


def by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timekeeper, "expiry_ms", lambda self, reading: reading.wall_ms)


def on_followers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(self: Housekeeping, hosted: HostedPartition) -> None:
        hosted.expire(self._environment.clock.wall_ms())

    monkeypatch.setattr(Housekeeping, "_expire", expire)


def by_the_controllers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shares its machine with the controller then always agrees with it."""
    compared = Timekeeper.compared

    def by_one(
        self: Timekeeper, sent: Reading, received: Reading, controller_ms: int | None, clocks: object
    ) -> None:
        compared(self, sent, received, controller_ms, {0: NodeTime(0)})
        # Neither does it wonder about jumps.
        self._believed_offset_ms = self._offset_ms
        self._jumps.clear()

    monkeypatch.setattr(Timekeeper, "compared", by_one)


@pytest.mark.parametrize("plant", [by_its_own_clock, on_followers_too, by_the_controllers_clock])
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: object) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=r"was wrong|nor is anything|starts at"):
        test_no_single_clock_deletes_a_record(3, 10 * DAY)
