"""The real doors outside, where the simulated ones cannot stand in for them."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.environment import Stream
from penstock.machine import (
    LONG_COLLECTION_S,
    SPARED_S,
    MachineClock,
    MachineFiles,
    MachineNetwork,
    Survivors,
)


def test_the_clock_counts_what_the_machine_sleeps_and_is_the_same_in_every_process() -> None:
    clock = MachineClock()
    code = "from penstock.machine import MachineClock as C; print(C().now_ms(), C().boot_id())"
    before_ms = clock.now_ms()
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now_ms, *boot = other.stdout.split()
    assert before_ms <= int(now_ms) <= clock.now_ms()
    assert boot == [clock.boot_id()] if clock.boot_id() else not boot
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert clock.now_ms() <= time.clock_gettime(time.CLOCK_BOOTTIME) * 1000 <= clock.now_ms() + 1_000


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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_of_a_listener_for_both_families_has_its_own_address(host: str) -> None:
    """An ACL that denies something to 10.0.0.7 must not miss ::ffff:10.0.0.7."""

    async def peer() -> str:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[Stream] = loop.create_future()
        try:
            listener = MachineNetwork(loop).listen("::", 0, accepted.set_result)
        except OSError:
            pytest.skip("this machine has no IPv6")
        _, writer = await asyncio.open_connection(host, listener.address[1])
        stream = await accepted
        for each in (writer, stream, listener):
            each.close()
        return stream.peer

    assert asyncio.run(peer()) == host


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


def cannot_allocate(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_room_is_taken_by_writing_where_it_cannot_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Not every C library does so by itself on NFS and the like; and a write may be a short one."""
    cannot_allocate(monkeypatch, number)
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:400_000], offset)
    )
    path = str(tmp_path / "reserve")
    MachineFiles().allocate(path, 3_000_000)
    assert os.stat(path).st_size == 3_000_000
    with open(path, "rb") as file:
        assert not file.read().strip(b"\0")


@pytest.mark.parametrize("is_allocated", [True, False])
def test_a_file_for_which_there_is_no_room_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_allocated: bool
) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cannot_allocate(monkeypatch, errno.ENOSPC if is_allocated else errno.EOPNOTSUPP)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="space"):
        MachineFiles().allocate(str(tmp_path / "reserve"), 1_000)
    assert os.listdir(tmp_path) == []


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
