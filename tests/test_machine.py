"""The real doors outside, where the simulated ones cannot stand in for them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from pathlib import Path

import pytest

from penstock.environment import Stream
from penstock.machine import LONG_COLLECTION_S, SPARED_S, MachineFiles, MachineNetwork, Survivors


@pytest.mark.parametrize("host", ["kafka..example", "x" * 300, "a\0b", ""])
def test_what_cannot_be_a_host_is_a_host_that_cannot_be_reached(host: str) -> None:
    """Nodes tell each other where they listen; whatever one of them says, the others go on."""

    async def connect() -> tuple[Stream | None, OSError | None]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[Stream | None, OSError | None]] = loop.create_future()
        MachineNetwork(loop).connect(host, 1, lambda *answer: answered.set_result(answer))
        return await answered

    stream, error = asyncio.run(connect())

    assert stream is None
    assert isinstance(error, OSError)


def test_two_threads_that_replace_a_file_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may be on its way to the disk when the broker closes and writes the last one."""
    files = MachineFiles()
    path = str(tmp_path / "checkpoint")
    sync = os.fsync
    others: list[threading.Thread] = []

    def sync_behind_another(descriptor: int) -> None:
        if not others:
            others.append(threading.Thread(target=lambda: files.replace(path, b"of a thread")))
            others[0].start()
            others[0].join()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_behind_another)
    files.replace(path, b"the last one")
    assert files.read(path) == b"the last one"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_what_a_long_collection_has_left_over_is_spared_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, worked_s, done = 0.0, 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "thread_time", lambda: worked_s)
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("unfreeze"))
    survivors = Survivors()

    def collect(generation: int, takes_s: float) -> list[str]:
        nonlocal worked_s
        done.clear()
        survivors.collected("start", {"generation": generation})
        worked_s += takes_s
        survivors.collected("stop", {"generation": generation, "collected": 0})
        return list(done)

    assert collect(1, 2 * LONG_COLLECTION_S) == []
    assert collect(2, LONG_COLLECTION_S / 2) == [], "with few objects all is as ever"
    assert collect(2, 2 * LONG_COLLECTION_S) == ["freeze"]
    now_s += SPARED_S - 1
    assert collect(2, 2 * LONG_COLLECTION_S) == ["freeze"]
    assert collect(2, LONG_COLLECTION_S / 2) == []
    now_s += 1
    assert collect(2, LONG_COLLECTION_S / 2) == ["unfreeze"]
    assert collect(2, LONG_COLLECTION_S / 2) == [], "nothing is set aside any more"
