"""A broker process to measure: its CPU time, its memory, its descriptors."""

from __future__ import annotations

import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.protocol.apis import APIS
from penstock.protocol.requests import request_frame
from penstock.protocol.schema import Message, decode


class MeasuredBroker:
    def __init__(self, settings: Mapping[str, str] | None = None, data_dir: Path | None = None) -> None:
        self._settings = dict(settings or {})
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-bench-")) if data_dir is None else None
        self.data_dir = data_dir or (self._scratch or Path()) / "data"
        self._process: subprocess.Popen[str] | None = None
        self.address = ("", 0)
        # CPU seconds from exec until the ready line.
        self.start_cpu_s = 0.0

    def __enter__(self) -> MeasuredBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "--data-dir", str(self.data_dir)]
        if "listeners" not in self._settings:
            command += ["--listen", "127.0.0.1:0"]
        for name, value in self._settings.items():
            command += ["--set", f"{name}={value}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.start_cpu_s = self.cpu_s
        assert " ready kafka=" in line, f"not ready: {line!r}"
        host, port = line.split("kafka=")[1].split()[0].rsplit(":", 1)
        # The first listener has a name if the settings have them.
        self.address = (host.rpartition("://")[2], int(port))

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(120) == 0
        self._process = None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        return cpu_s(self.pid)

    @property
    def resident_mb(self) -> float:
        return resident_mb(self.pid)

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def cpu_s(pid: int) -> float:
    """What all living threads of a process have used."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


class Wire:
    """A connection that speaks our own codec, for setting benchmarks up and for driving them."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def call(self, request: Message, version: int) -> Any:
        api = APIS[type(request).KEY]
        self._correlation_id += 1
        self.socket.sendall(frame(request, version, self._correlation_id))
        answer = self.receive()
        skip = 4 + (api.response_header_version(version) == 1)
        return decode(api.response, version, answer[skip:])

    def receive(self) -> bytes:
        size = struct.unpack(">i", self._exactly(4))[0]
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(1 << 20, size - len(data)))
            assert piece, "the broker closed the connection"
            data += piece
        return bytes(data)

    def close(self) -> None:
        self.socket.close()


def frame(request: Message, version: int, correlation_id: int = 1) -> bytes:
    """A whole request as it goes on the wire."""
    return b"".join(request_frame(APIS[type(request).KEY], version, correlation_id, b"bench", request))


def settle() -> None:
    """Let writeback and the scheduler calm down between measurements."""
    time.sleep(0.5)
