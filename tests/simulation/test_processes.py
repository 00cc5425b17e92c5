"""Jobs in simulated processes of their own: virtual time, deaths in the middle, equal runs for equal seeds."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.environment import JobKilled, Processes
from penstock.sim.disk import Disk, SimFiles
from penstock.sim.loop import Loop, Process, Streams
from penstock.sim.processes import SimProcesses
from tests import jobs

SOURCE, TARGET = "/data/source", "/data/target"
DATA = bytes(range(100))
LONG_MS = 1_000_000


class Machine:
    def __init__(self, seed: int = 1) -> None:
        self.loop = Loop(Streams(seed))
        self.disk = Disk(random.Random(seed))
        self.process = Process(self.loop, "a")
        self.files = SimFiles(self.disk, self.process)
        self.processes = SimProcesses(self.process, self.disk)
        self.outcomes: list[tuple[Any, Exception | None]] = []
        self.files.make_directory("/data")
        self.files.replace(SOURCE, DATA)

    def run(self, job: Callable[..., Any], argument: Any = None) -> None:
        self.processes.run(job, argument, lambda *outcome: self.outcomes.append(outcome))

    def copied(self) -> bytes:
        """What there is of the copy, after the node's process too."""
        content = self.disk.find(TARGET)
        return bytes(content.data) if content is not None else b""  # type: ignore[union-attr]


def test_it_is_what_the_environment_asks_for() -> None:
    processes: Processes = Machine().processes
    processes.close()


def test_nothing_is_drawn_and_nothing_scheduled_before_the_first_job() -> None:
    machine = Machine()
    state = machine.loop.streams["schedule"].getstate()
    SimProcesses(machine.process, machine.disk).close()
    assert machine.loop.streams["schedule"].getstate() == state
    assert not machine.loop._queue
    assert not machine.process.on_end


def test_jobs_take_time_and_come_one_after_the_other() -> None:
    machine = Machine()
    ends_ms: list[float] = []
    for count in range(5):
        machine.processes.run(
            jobs.total, list(range(count)), lambda total, error: ends_ms.append(machine.loop.now_ms)
        )
        machine.run(jobs.total, list(range(count)))
    assert machine.outcomes == []
    machine.loop.run_for(LONG_MS)
    assert machine.outcomes == [(sum(range(count)), None) for count in range(5)]
    assert ends_ms == sorted(ends_ms)
    assert len(set(ends_ms)) == 5


def test_a_job_reaches_the_machines_disk() -> None:
    machine = Machine()
    machine.run(jobs.copy, (SOURCE, TARGET))
    machine.loop.run_for(LONG_MS)
    assert machine.outcomes == [(len(DATA), None)]
    assert machine.files.read(TARGET) == DATA


def test_a_job_cannot_change_what_the_node_has() -> None:
    machine = Machine()
    mine = [7]
    machine.run(jobs.append_to_argument, mine)
    machine.loop.run_for(LONG_MS)
    assert machine.outcomes == [([7, 1], None)]
    assert mine == [7]


def test_a_job_that_cannot_be_sent_is_refused_at_once() -> None:
    machine = Machine()
    with pytest.raises((AttributeError, TypeError, ValueError)):
        machine.run(lambda files, argument: None)


def test_an_error_of_the_disk_is_the_jobs() -> None:
    machine = Machine()
    machine.disk.fill("/data", left_bytes=10)
    machine.run(jobs.copy, (SOURCE, TARGET))
    machine.loop.run_for(LONG_MS)
    ((result, error),) = machine.outcomes
    assert result is None
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC


def test_a_job_is_fast_again_when_the_disk_is() -> None:
    """A disk is slow for seconds; a job that began meanwhile was slow for minutes (seed 1001000064)."""
    for seed in range(30):
        machine = Machine(seed)
        machine.disk.slowness = 300.0
        machine.run(jobs.total, [1, 2])
        machine.loop.run_for(3_000)
        machine.disk.slowness = 1.0
        machine.loop.run_for(5_000)
        assert machine.outcomes == [(3, None)]


def test_a_killed_job_has_failed_with_a_part_of_its_work_done_and_the_next_runs() -> None:
    left = set()
    for seed in range(30):
        machine = Machine(seed)
        machine.run(jobs.copy, (SOURCE, TARGET))
        machine.run(jobs.total, [1, 2])
        machine.processes.kill()
        left.add(machine.copied())
        machine.loop.run_for(LONG_MS)
        (_, error), next_outcome = machine.outcomes
        assert isinstance(error, JobKilled)
        assert next_outcome == (3, None)
    assert all(DATA.startswith(part) for part in left)
    assert b"" in left and DATA in left, "some had not begun, some had all but answered"
    assert len(left) > 5


@pytest.mark.parametrize("how", ["crash", "close"])
def test_a_job_ends_in_the_middle_when_its_node_does(how: str) -> None:
    left = set()
    for seed in range(30):
        machine = Machine(seed)
        machine.run(jobs.copy, (SOURCE, TARGET))
        machine.run(jobs.copy, (SOURCE, "/data/another"))
        machine.process.end() if how == "crash" else machine.processes.close()
        left.add(machine.copied())
        machine.loop.run_for(LONG_MS)
        assert machine.outcomes == []
        assert machine.copied() in left, "nothing is written after the end"
        assert machine.disk.find("/data/another") is None
    assert len(left) > 5


def test_a_job_goes_on_while_its_node_is_paused_and_is_heard_of_later() -> None:
    machine = Machine()
    machine.run(jobs.copy, (SOURCE, TARGET))
    machine.process.pause(LONG_MS)
    machine.loop.run_for(LONG_MS / 2)
    assert machine.copied() == DATA
    assert machine.outcomes == []
    machine.loop.run_for(LONG_MS)
    assert machine.outcomes == [(len(DATA), None)]


def test_the_same_seed_is_the_same_run() -> None:
    def run(seed: int) -> tuple[str, bytes]:
        machine = Machine(seed)
        for _ in range(3):
            machine.run(jobs.copy, (SOURCE, TARGET))
        machine.loop.run_for(100)
        if machine.processes.is_running:
            machine.processes.kill()
        machine.loop.run_for(LONG_MS)
        return machine.loop.trace_hash, machine.copied()

    assert run(3) == run(3)
    assert len({run(seed)[0] for seed in range(5)}) == 5
