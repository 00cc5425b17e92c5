"""The thread that removes files, and writes checkpoints, is busy for long: nobody but who needs it waits for it."""

from __future__ import annotations

from penstock.broker.partition.hosted_partition import HostedPartition
from penstock.protocol.errors import ErrorCode
from penstock.sim.client import Place
from penstock.sim.cluster import Machine
from tests.simulation.test_full_disks import Filled

BUSY_MS = 20_000
# Before a follower is dropped.
GAP_MS_MAX = 3_000


def occupy_upkeep(machine: Machine) -> None:
    assert machine.node is not None
    spawn = machine.node.broker.environment.spawn
    usual = spawn._thread_ms  # type: ignore[attr-defined]
    spawn._thread_ms = lambda lane: BUSY_MS  # type: ignore[attr-defined]
    spawn.in_thread(lambda: None, lambda *_: None, lane="upkeep")
    spawn._thread_ms = usual  # type: ignore[attr-defined]


def test_deleted_records_do_not_stop_followers_that_are_busy_removing_files() -> None:
    """Only the answer waits, until a kill would not bring the records back."""
    run = Filled(1)
    run.loop.run_for(5_000)
    waiting: list[HostedPartition] = []
    answers: list[ErrorCode] = []
    for machine in run.cluster.machines.values():
        assert machine.node is not None
        occupy_upkeep(machine)
        waiting += [hosted for hosted in machine.node.led() if hosted.topic == "orders"]
    assert waiting
    for hosted in waiting:
        # Inside a segment.
        offset = hosted.high_watermark - 1
        run.checkers.starts.asked(Place(hosted.topic_id, hosted.topic, hosted.index), offset)
        hosted.delete_before(offset)
        hosted.when_deleted_before(offset, answers.append)
    assert run.longest_gap_ms(BUSY_MS - 5_000) < GAP_MS_MAX
    assert not answers, "answered before the followers have written it down"
    for hosted in waiting:
        assert len(hosted.image.isr) == 3, "a follower was dropped"
    run.loop.run_for(10_000)
    assert answers == [ErrorCode.NONE] * len(waiting)
    run.finish()
