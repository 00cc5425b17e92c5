"""The log on a real disk: memory and descriptors, and a process that is killed while it appends."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import penstock
from penstock.environment import Environment
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.machine import MachineClock, MachineFiles
from tests.log.making import append, base_offsets

CONFIG = LogConfig(segment_bytes=20_000, index_interval_bytes=500)


def environment(files: MachineFiles | None = None) -> Environment:
    nowhere: object = None
    return Environment(
        clock=MachineClock(),
        files=files or MachineFiles(),
        network=nowhere,  # type: ignore[arg-type]
        random=random.Random(0),
        spawn=nowhere,  # type: ignore[arg-type]
        processes=nowhere,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_comes_back_from_a_real_disk(tmp_path: Path, clean: bool) -> None:
    directory = str(tmp_path / "topic-0")
    log = Log.open(environment(), directory, CONFIG, clean=True)
    for number in range(1000):
        append(log, epoch=number // 300, producer=(5, 0, number))
    if clean:
        log.close()
    log = Log.open(environment(), directory, CONFIG, clean=clean)
    log.check()
    assert base_offsets(log, bytes_max=5000) == list(range(1000))
    assert log.epochs.entries == [(0, 0), (1, 300), (2, 600), (3, 900)]


def test_a_log_works_with_few_descriptors(tmp_path: Path) -> None:
    files = MachineFiles(open_files_max=2)
    log = Log.open(environment(files), str(tmp_path / "topic-0"), CONFIG, clean=True)
    for _ in range(1500):
        append(log)
    assert len(log._segments.items) > 4
    assert base_offsets(log, bytes_max=3000) == list(range(1500))
    log.truncate_to(700)
    log.delete_before(300)
    log.check()
    log.close()
    assert len(files._open) <= 2


def _traced_bytes() -> int:
    """Of what the log has made: clients of other tests may have threads in this process."""
    ours = tracemalloc.Filter(True, str(Path(penstock.__file__).parent / "*"), all_frames=True)
    made = tracemalloc.take_snapshot().filter_traces([ours])
    return sum(trace.size for trace in made.traces)


def test_idle_logs_are_small(tmp_path: Path) -> None:
    count = 50
    shared = environment()
    for number in range(count):
        log = Log.open(shared, str(tmp_path / f"topic-{number}"), CONFIG, clean=True)
        append(log)
        log.close()
    gc.collect()
    tracemalloc.start(20)
    logs = [
        Log.open(shared, str(tmp_path / f"topic-{number}"), CONFIG, clean=True) for number in range(count)
    ]
    gc.collect()
    idle = _traced_bytes() / count
    for log in logs:
        append(log)
        log.read(0, 1000, 2, at_least_one=True)
    gc.collect()
    used = _traced_bytes() / count
    tracemalloc.stop()
    assert idle < 3_000
    assert used < 10_000


APPEND_FOR_EVER = """
import sys
from penstock.log.log import Log
from tests.log.making import append
from tests.log.test_on_disk import CONFIG, environment

log = Log.open(environment(), sys.argv[1], CONFIG, clean=False)
sequence = log.log_end_offset
while True:
    offset = append(log, size=sequence % 700, producer=(5, 0, sequence))
    sequence += 1
    sys.stdout.write(f"{offset}\\n")
    sys.stdout.flush()
"""


def test_every_acknowledged_batch_survives_the_end_of_the_process(tmp_path: Path) -> None:
    directory = str(tmp_path / "topic-0")
    chance = random.Random(11)
    root = str(Path(__file__).resolve().parents[2])
    package = str(Path(penstock.__file__).resolve().parents[1])
    acknowledged = -1
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", APPEND_FOR_EVER, directory],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([root, package])},
        )
        assert process.stdout is not None
        for _ in range(chance.randint(50, 300)):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        for line in process.stdout.read().split("\n")[:-1]:
            acknowledged = int(line)
        process.stdout.close()
        process.wait()
        log = Log.open(environment(), directory, CONFIG, clean=False)
        assert log.log_end_offset > acknowledged
        assert base_offsets(log) == list(range(log.log_end_offset))
        log.check()
        state = log.producers.get(5)
        assert state is not None
        assert state.batches[-1].last_sequence == log.log_end_offset - 1
    assert acknowledged > 300
