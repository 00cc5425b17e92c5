"""Jobs in a real process of their own: what comes back, and that the process never outlives its broker."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.environment import JobKilled
from penstock.job_process import NICENESS
from penstock.machine_processes import COMMAND, MachineProcesses, write_message
from tests import jobs
from tests.support import wait_until

DEADLINE_S = 60.0
Outcome = tuple[Any, Exception | None]

# A broker, as far as it matters here: it has a job run until it ends itself.
BROKER = """
import asyncio, sys
from penstock.machine_processes import MachineProcesses
from tests import jobs
from tests.support import wait_until
from pathlib import Path

path = Path(sys.argv[1])
loop = asyncio.new_event_loop()
MachineProcesses(loop).run(jobs.compute_for_ever, str(path), lambda *outcome: None)
wait_until(path.exists, 60, "no job")
if sys.argv[2] == "waits":
    print("runs", flush=True)
    loop.run_forever()
loop.close()
"""


class Broker:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.processes = MachineProcesses(self.loop)
        self.outcomes: list[Outcome] = []

    def start(self, job: Callable[..., Any], argument: Any = None, **options: Any) -> None:
        def done(result: Any, error: Exception | None) -> None:
            assert threading.current_thread() is threading.main_thread()
            self.outcomes.append((result, error))
            self.loop.stop()

        self.processes.run(job, argument, done, **options)

    def next_outcome(self) -> Outcome:
        if not self.outcomes:
            give_up = self.loop.call_later(DEADLINE_S, self.loop.stop)
            self.loop.run_forever()
            give_up.cancel()
        return self.outcomes.pop(0)

    def ask(self, job: Callable[..., Any], argument: Any = None) -> Outcome:
        self.start(job, argument)
        return self.next_outcome()


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.processes.close()
    broker.loop.close()


def is_gone(process: int) -> bool:
    """A process that nobody has waited for yet counts as gone."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state.startswith("Z")


def wait_until_gone(process: int) -> None:
    wait_until(lambda: is_gone(process), DEADLINE_S, f"process {process} is still there")


def running(path: Path) -> int:
    """The process of a job that computes for ever, once it does."""
    return int(wait_until(lambda: path.exists() and path.read_text(), DEADLINE_S, "the job did not begin"))


def test_jobs_run_in_one_other_process_in_their_order(broker: Broker) -> None:
    numbers = list(range(10))
    for count in range(5):
        broker.start(jobs.total, numbers[:count])
    broker.start(jobs.process_id)
    assert [broker.next_outcome() for _ in range(5)] == [(sum(range(count)), None) for count in range(5)]
    process, _ = broker.next_outcome()
    assert process != os.getpid()
    assert broker.ask(jobs.process_id) == (process, None)


def test_the_broker_goes_first_when_both_want_a_core(broker: Broker) -> None:
    process, _ = broker.ask(jobs.process_id)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process) == min(19, ours + NICENESS)


def test_a_job_has_the_files_of_the_machine(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"some bytes")
    assert broker.ask(jobs.copy, (str(tmp_path / "source"), str(tmp_path / "target"))) == (10, None)
    assert (tmp_path / "target").read_bytes() == b"some bytes"


def test_a_job_cannot_change_what_the_broker_has(broker: Broker) -> None:
    mine = [7]
    assert broker.ask(jobs.append_to_argument, mine) == ([7, 1], None)
    assert mine == [7]


def test_more_than_a_pipe_holds_goes_both_ways(broker: Broker) -> None:
    numbers = list(range(200_000))
    assert broker.ask(jobs.append_to_argument, numbers) == ([*numbers, 200_000], None)


def test_an_error_of_the_disk_keeps_its_number(broker: Broker) -> None:
    _, error = broker.ask(jobs.find_the_disk_full, "/data")
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ENOSPC, "/data")


@pytest.mark.parametrize("job", [jobs.fail_in_its_own_way, jobs.return_something_unpicklable])
def test_what_cannot_be_sent_back_is_an_error_and_the_process_goes_on(
    broker: Broker, job: Callable[..., Any]
) -> None:
    process, _ = broker.ask(jobs.process_id)
    result, error = broker.ask(job)
    assert result is None
    assert isinstance(error, Exception) and not isinstance(error, JobKilled)
    assert broker.ask(jobs.process_id) == (process, None)


def test_what_a_job_prints_does_not_get_between_the_answers(broker: Broker) -> None:
    assert broker.ask(jobs.talk, "a line\n") == ("a line\n", None)
    assert broker.ask(jobs.total, [1, 2]) == (3, None)


def test_a_job_that_cannot_be_sent_is_refused_at_once(broker: Broker) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)):
        broker.processes.run(lambda files, argument: None, None, lambda *outcome: None)


def test_a_job_whose_process_is_killed_has_failed_and_the_next_gets_another(
    broker: Broker, tmp_path: Path
) -> None:
    broker.start(jobs.compute_for_ever, str(tmp_path / "pid"))
    broker.start(jobs.process_id)
    process = running(tmp_path / "pid")
    os.kill(process, signal.SIGKILL)
    result, error = broker.next_outcome()
    assert result is None
    assert isinstance(error, JobKilled)
    other, error = broker.next_outcome()
    assert error is None
    assert other != process


def test_a_process_that_is_killed_between_two_jobs_is_replaced(broker: Broker) -> None:
    process, _ = broker.ask(jobs.process_id)
    os.kill(process, signal.SIGKILL)
    wait_until_gone(process)
    other, error = broker.ask(jobs.process_id)
    assert error is None
    assert other != process


def test_a_process_that_cannot_be_started_is_an_error_of_the_job(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(subprocess, "Popen", refuse)
        _, error = broker.ask(jobs.process_id)
        assert isinstance(error, OSError)
    assert broker.ask(jobs.total, [1]) == (1, None)


def test_closing_kills_the_job_and_calls_nobody_back(tmp_path: Path) -> None:
    broker = Broker()
    broker.start(jobs.compute_for_ever, str(tmp_path / "pid"))
    broker.start(jobs.process_id)
    process = running(tmp_path / "pid")
    broker.processes.close()
    assert is_gone(process)
    broker.loop.call_soon(broker.loop.stop)
    broker.loop.run_forever()
    assert broker.outcomes == []
    broker.loop.close()


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_its_broker_however_that_ends(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    path = tmp_path / "pid"
    how = "ends" if number is None else "waits"
    with subprocess.Popen([sys.executable, "-c", BROKER, str(path), how], stdout=subprocess.PIPE) as broker:
        process = running(path)
        if number is not None:
            assert broker.stdout is not None
            assert broker.stdout.readline() == b"runs\n"
            broker.send_signal(number)
        broker.wait(DEADLINE_S)
    wait_until_gone(process)


def test_an_answer_that_nobody_reads_ends_the_process_without_a_word() -> None:
    """The broker was killed; that its end of the other pipe is closed too may be noticed later."""
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    with process, process.stdin, process.stderr:
        process.stdout.close()
        write_message(process.stdin, pickle.dumps(sys.path))
        write_message(process.stdin, pickle.dumps((jobs.process_id, None)))
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == b""


def test_control_c_at_a_terminal_is_not_for_the_process_of_jobs(broker: Broker) -> None:
    process, _ = broker.ask(jobs.process_id)
    os.kill(process, signal.SIGINT)
    assert broker.ask(jobs.process_id) == (process, None)


def test_a_job_is_held_to_a_rate(broker: Broker, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 400)
    broker.start(jobs.time_to_copy, str(path), bytes_per_second=4_000_000)
    result, error = broker.next_outcome()
    assert error is None
    seconds, copied = result
    # Three megabytes: read, written, and read again.
    assert seconds >= 3_000_000 / 4_000_000
    assert copied == path.read_bytes() * 10
